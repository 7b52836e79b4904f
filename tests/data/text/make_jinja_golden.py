"""Writes jinja_golden.json: small templates and what the reference engine makes of them.

Usage: python make_jinja_golden.py
Needs transformers and jinja2 (the environment that transformers compiles chat templates in is the reference). A case is a
source (with CONTEXT as its variables) and its output, or the class and message of the error.
"""

import datetime
import json
import pathlib

from transformers.utils import chat_template_utils

NOW = datetime.datetime(2026, 3, 9, 14, 5, 7)


class FixedTime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


chat_template_utils.datetime = FixedTime

CONTEXT = {
    "name": "Ada",
    "n": 7,
    "x": 2.5,
    "yes": True,
    "no": False,
    "nil": None,
    "empty": "",
    "words": ["delta", "Alpha", "charlie", "Bravo"],
    "numbers": [3, 1, 4, 1, 5, 9, 2, 6],
    "user": {"name": "Grace", "tags": ["a", "b"], "age": 85, "items": "an item", "nested": {"k": [1, {"z": None}]}},
    "people": [
        {"name": "Zoë", "age": 30, "city": "Paris", "ok": True},
        {"name": "bob", "age": 25, "city": "Rome", "ok": False},
        {"name": "Ann", "age": 30, "city": "paris"},
    ],
    "text": "Größe: 日本語 \U0001f600 straße ΣΑΣ İ e\u0301 ǆ ﬁ",
    "html": "<a href=\"x\">Tom & 'Jerry'</a>",
    "lines": "one\n  two\r\nthree\n\nfour\u2028five",
    "big": 9007199254740993,
    "floats": [1.0, 0.1, 1e16, 1e15, 123456789.123, 1e-5, 0.0001, -0.0, 5e-324, 1.7976931348623157e308, 100.0, 1e22],
    "tree": [{"v": 1, "c": [{"v": 2, "c": []}, {"v": 3, "c": [{"v": 4, "c": []}]}]}],
}

SOURCES = r"""
{{ name }} {{ n }} {{ x }} {{ yes }} {{ nil }} {{ missing }}|
{{ words }} {{ user }} {{ numbers }} {{ floats }}
{{ floats|join(' ') }}
{{ 1 }} {{ 1.0 }} {{ 1e3 }} {{ 1_000 }} {{ 0x1F }} {{ 0o17 }} {{ 0b101 }} {{ 1.5e-7 }} {{ 'a' 'b' }} {{ "q'q" }} {{ 'q"q' }}
{{ '\n\t\\\'\"\x41\u00e9\U0001F600\101\q' }}
{{ [1, 'a', none, true, 1.5, (1,), (), [], {}, {'a': 1, 2: 'b'}] }}
{{ ['it\'s', "q\"q", 'both\'"', '\x00\x7f\xa0\u200b\u2028é日\U0001F600\\'] }}
{{ 1 + 2 }} {{ 7 - 10 }} {{ 3 * 4 }} {{ 7 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2 ** 0.5 }}
{{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ 7.5 % -2 }} {{ 1e308 * 10 }} {{ -1 ** 2 }} {{ 2 ** 3 ** 2 }} {{ - 3 }} {{ +3 }} {{ true + true }} {{ -true }}
{{ 'a' + 'b' }} {{ 'ab' * 3 }} {{ 3 * 'ab' }} {{ [1] + [2] }} {{ [1, 2] * 2 }} {{ (1,) + (2,) }} {{ 'x' ~ 1 ~ none ~ 2.0 ~ [1] }} {{ 'a' * -1 }}
{{ 1 < 2 < 3 }} {{ 1 < 2 > 5 }} {{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ (1, 2) == [1, 2] }} {{ none == none }} {{ big == 9007199254740992.0 }} {{ big > 9007199254740992.0 }}
{{ 'a' in 'abc' }} {{ 'd' in 'abc' }} {{ '' in 'abc' }} {{ 1 in [1, 2] }} {{ 1 not in [1, 2] }} {{ 'name' in user }} {{ 'x' in user }} {{ 2 in (1, 2) }} {{ 3 in range(5) }} {{ 'a' in user.keys() }} {{ 'Grace' in user.values() }}
{{ not yes }} {{ not empty }} {{ yes and n }} {{ no and n }} {{ no or n }} {{ empty or nil or 'z' }} {{ not not 1 }} {{ not 1 == 2 }}
{{ 'a' if yes else 'b' }} {{ 'a' if no else 'b' }} {{ 'a' if no }}| {{ 'a' if no else 'b' if no else 'c' }} {{ ('a' if no) is defined }}
{{ user.name }} {{ user['name'] }} {{ user.tags[0] }} {{ user.tags.1 }} {{ user.tags[-1] }} {{ user.nested.k[1].z }} {{ user['items'] }} {{ user.age }} {{ user.missing }}| {{ user['missing'] }}| {{ user.tags[9] }}|
{{ name[0] }} {{ name[-1] }} {{ name[9] }}| {{ text[7] }} {{ text[-1] }} {{ text[7:10] }} {{ text[::-1] }} {{ text[::2] }} {{ name[1:] }} {{ name[:-1] }} {{ name[5:] }}| {{ numbers[1:3] }} {{ numbers[::-2] }} {{ numbers[-3:] }} {{ numbers[10:20] }} {{ numbers[5:2:-1] }} {{ (1,2,3)[1:] }} {{ range(10)[2:8:3] }} {{ range(10)[-1] }}
{{ text|length }} {{ text|upper }} {{ text|lower }} {{ text|capitalize }} {{ text|title }} {{ text.title() }} {{ text.swapcase() }} {{ text.casefold() }}
{{ 'hello world-foo (bar) [x] don\'t'|title }} {{ 'hello world-foo don\'t'.title() }} {{ 'hELLO'|capitalize }} {{ 'ǆa'.capitalize() }} {{ 'ﬁx ßa'|upper }} {{ 'ﬁx'.title() }} {{ 'ΑΣ. ΑΣΑ Σ'.lower() }}
{{ '  a b  '|trim }}| {{ '  a b  '.strip() }}| {{ 'xxaxx'.strip('x') }} {{ 'xxaxx'.lstrip('x') }} {{ 'xxaxx'.rstrip('x') }} {{ '\u3000a\u00a0'.strip() }} {{ 'abcba'|trim('ab') }} {{ 'éaé'.strip('é') }}
{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a b c d'.split(none, 2) }} {{ 'a  b  c '.split(none, 1) }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ ' a  b  c '.rsplit(none, 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a--b--c'.split('--', maxsplit=1) }} {{ 'aaa'.split('aa') }} {{ 'aaa'.rsplit('aa') }} {{ 'a b'.split(maxsplit=0) }}
{{ lines.splitlines() }} {{ lines.splitlines(true) }} {{ 'a\n'.splitlines() }} {{ ''.splitlines() }}
{{ 'abcabc'.find('c') }} {{ 'abcabc'.rfind('c') }} {{ 'abc'.find('z') }} {{ 'abcabc'.find('c', 3) }} {{ 'abcabc'.count('bc') }} {{ 'aaaa'.count('aa') }} {{ 'abc'.count('') }} {{ text.find('語') }} {{ text.rfind('s') }} {{ 'abc'.index('b') }} {{ 'abcabc'.rindex('b') }} {{ 'abc'.find('', 3) }} {{ 'abc'.find('', 4) }} {{ 'abc'.rfind('') }} {{ 'abc'.find('c', -1) }} {{ 'abc'.find('a', 0, -3) }}
{{ 'abc'.startswith('a') }} {{ 'abc'.startswith(('x', 'a')) }} {{ 'abc'.endswith('bc') }} {{ 'abc'.startswith('b', 1) }} {{ 'abc'.endswith('b', 0, 2) }} {{ 'abc'.startswith('', 4) }} {{ 'abc'.startswith(()) }}
{{ 'abc'.replace('b', 'xx') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'abc'.replace('', '-') }} {{ 'abc'.replace('', '-', 2) }} {{ 'abc'|replace('c', 1) }} {{ 123|replace('2', 'x') }} {{ 'aaa'|replace('a', 'b', 1) }} {{ ''.replace('', 'x') }}
{{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ 'abc'.removeprefix('x') }} {{ 'a-b-c'.partition('-') }} {{ 'a-b-c'.rpartition('-') }} {{ 'abc'.partition('-') }} {{ 'abc'.rpartition('-') }}
{{ 'abc'.center(8, '*') }} {{ 'abc'.center(7, '*') }} {{ 'ab'.center(7, '*') }} {{ 'abcd'.center(7) }}| {{ 'abc'.ljust(5, '.') }} {{ 'abc'.rjust(5) }} {{ '-42'.zfill(6) }} {{ '42'.zfill(1) }} {{ 'a\tb\n\tc'.expandtabs(4) }} {{ 'abc'|center(9) }}|
{{ ', '.join(words) }} {{ ''.join([]) }} {{ '-'.join('abc') }} {{ words|join }} {{ numbers|join('-') }} {{ people|join(', ', attribute='name') }} {{ [1, none, 'a']|join('|') }}
{{ 'abc'.isalpha() }} {{ 'ab1'.isalnum() }} {{ '12'.isdigit() }} {{ '²'.isdigit() }} {{ '²'.isdecimal() }} {{ '½'.isnumeric() }} {{ ' \n'.isspace() }} {{ 'aB'.islower() }} {{ 'ab1'.islower() }} {{ 'AB'.isupper() }} {{ 'Ab Cd'.istitle() }} {{ 'AB'.istitle() }} {{ 'é'.isascii() }} {{ ''.isalpha() }} {{ 'a_1'.isidentifier() }} {{ '1a'.isidentifier() }} {{ '日本'.isalpha() }} {{ 'a\u200b'.isprintable() }}
{{ '{} {}'.format(1, 'a') }} {{ '{1} {0}'.format(1, 'a') }} {{ '{a.name} {b[0]} {b[1]}'.format(a=user, b=numbers) }} {{ '{:>5}|{:<5}|{:^5}|{:*^7}|{:05d}|{:+d}|{:x}|{:#X}|{:b}|{:,}|{:_}'.format('a', 'b', 'c', 'd', 42, 42, 255, 255, 5, 1234567, 1234567) }} {{ '{{}} {!r} {!s}'.format('a', 'b') }}
{{ '{:.2f} {:8.3f}| {:e} {:g} {:g} {:%} {:.0f} {:.3} {:.3} {} {:08.2f} {:,.2f} {:.1%}'.format(3.14159, 2.5, 12345.678, 0.00001, 100000.0, 0.25, 2.5, 123.456, 123.0, 1e20, -3.14159, 1234567.891, 0.1234) }} {{ '{:.3s}|{:5s}|{:{w}}'.format('abcdef', 'ab', 'x', w=4) }} {{ '{:d} {:.2f} {:c} {:o}'.format(true, 3, 65, 8) }} {{ '{:=+6d}|{: d}|{:010,}'.format(42, 42, 1234) }}
{{ '%s %s' % ('a', 1) }} {{ '%d %5d|%-5d|%05d|%+d|%x|%X|%o|%#x' % (1, 2, 3, 4, 5, 255, 255, 8, 255) }} {{ '%.2f %e %g %10.3f| %%' % (3.14159, 12345.678, 0.0001, 2.5) }} {{ '%(a)s %(b)r' % {'a': 1, 'b': 'x'} }} {{ '%s' % 'one' }} {{ '%s' % [1, 2] }} {{ '%c%c' % ('a', 66) }} {{ '%5s|%-5s|%.2s' % ('a', 'b', 'abc') }} {{ '%*d' % (5, 42) }} {{ '%d' % 3.99 }} {{ '%s %s'|format('a', 'b') }} {{ '%(x)s'|format(x=5) }} {{ '%i %u' % (-3, 4) }} {{ '%r %a' % ('é', 'é') }} {{ '%.3d' % 7 }}
{{ html|e }} {{ html|escape }} {{ html|safe }} {{ (html|safe) + '<b>' }} {{ '<b>' + (html|safe) }} {{ ('<b>'|safe) ~ '<i>' }} {{ (html|e)|e }} {{ html|e|string|e }} {{ html|forceescape }} {{ ('<%s>'|safe) % '<x>' }} {{ ('<{}>'|safe).format('<x>') }} {{ ('-'|safe).join(['<', '>'|safe]) }} {{ '<b>a <i>b</i></b>  c &amp; d'|striptags }} {{ (html|safe)|upper }} {{ [html|safe] }} {{ ('a'|safe) == 'a' }} {{ ('a-b'|safe).split('-') }} {{ ('<'|safe) is escaped }} {{ ('a'|safe).replace('a', '<') }}
{{ user|tojson }} {{ words|tojson }} {{ text|tojson }} {{ text|tojson(ensure_ascii=true) }} {{ html|tojson }} {{ nil|tojson }} {{ yes|tojson }} {{ floats|tojson }} {{ '\x00\x1f\x7f\\/"\b\f\n\r\t'|tojson }}
{{ user|tojson(indent=2) }} {{ [1, [], {}, [2]]|tojson(indent=4) }} {{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }} {{ {'a': [1, 2]}|tojson(separators=(',', ':')) }} {{ {1: 'a', true: 2, none: 3, 1.5: 4}|tojson }} {{ (1, 2)|tojson }} {{ [1]|tojson(indent='--') }} {{ [1]|tojson(indent=0) }} {{ {'a': 1, 'b': [1]}|tojson(indent=2, separators=(', ', ' = ')) }}
{{ missing|tojson }}
{{ user.items()|tojson }}
{{ {(1, 2): 3}|tojson }}
{{ numbers|sort }} {{ words|sort }} {{ words|sort(case_sensitive=true) }} {{ words|sort(reverse=true) }} {{ people|sort(attribute='age')|map(attribute='name')|list }} {{ people|sort(attribute='age,name')|map(attribute='name')|join(',') }} {{ people|sort(attribute='age', reverse=true)|map(attribute='name')|list }}
{{ {'b': 1, 'A': 3, 'c': 2}|dictsort }} {{ {'b': 1, 'A': 3, 'c': 2}|dictsort(true) }} {{ {'b': 1, 'A': 3, 'c': 2}|dictsort(false, 'value') }} {{ {'b': 1, 'A': 3}|dictsort(reverse=true) }}
{{ numbers|min }} {{ numbers|max }} {{ words|min }} {{ words|max }} {{ []|min }}| {{ people|max(attribute='age') }} {{ numbers|sum }} {{ people|sum(attribute='age') }} {{ []|sum }} {{ [1.5, 2]|sum(start=10) }} {{ words|max(case_sensitive=true) }}
{{ numbers|unique|list }} {{ ['a', 'A', 'b']|unique|list }} {{ people|unique(attribute='city')|map(attribute='name')|list }} {{ numbers|reverse|list }} {{ 'abc'|reverse }} {{ numbers|first }} {{ numbers|last }} {{ []|first }}| {{ []|last }}| {{ 'abc'|first }} {{ 'abc'|last }} {{ user|first }} {{ user|last }}
{{ numbers|batch(3)|list }} {{ numbers|batch(3, 'x')|list }} {{ numbers|slice(3)|list }} {{ numbers|slice(3, 'x')|list }} {{ people|groupby('city')|list }} {{ people|groupby('age')|map(attribute='grouper')|list }} {{ people|groupby('city', case_sensitive=true)|map('first')|list }} {{ people|groupby('ok', default=false)|map(attribute='list')|map('length')|list }}
{{ numbers|select('odd')|list }} {{ numbers|reject('odd')|list }} {{ numbers|select('gt', 3)|list }} {{ [0, 1, '', 'a', none]|select|list }} {{ people|selectattr('ok')|map(attribute='name')|list }} {{ people|rejectattr('ok')|map(attribute='name')|list }} {{ people|selectattr('age', 'equalto', 30)|map(attribute='name')|list }} {{ people|selectattr('city', 'in', ['Rome'])|list|length }} {{ people|selectattr('ok', 'defined')|list|length }} {{ words|map('upper')|list }} {{ words|map('replace', 'a', 'o')|list }} {{ people|map(attribute='ok', default='?')|list }} {{ numbers|map('string')|join }} {{ people|map(attribute='name.0')|list }}
{{ 'abc'|list }} {{ user|list }} {{ user|items|list }} {{ missing|items|list }} {{ user.items()|list }} {{ user.keys()|list }} {{ user.values()|list|length }} {{ user.keys() }} {{ {'a': 1}.items() }} {{ {'a': 1}.values() }} {{ range(3) }} {{ range(3)|list }} {{ range(5, 0, -2)|list }} {{ user.get('name') }} {{ user.get('zz') }} {{ user.get('zz', 5) }} {{ {'a': 1}.copy() }} {{ [1, 2, 1].count(1) }} {{ [1, 2].index(2) }}
{{ 'a'|default('b') }} {{ missing|default('b') }} {{ empty|default('b') }}| {{ empty|default('b', true) }} {{ nil|default('b') }} {{ missing|d(5) }} {{ user.missing|default([]) }} {{ missing|default }}| {{ nil|default(default_value='q', boolean=true) }}
{{ '42'|int }} {{ '42.7'|int }} {{ 'x'|int }} {{ 'x'|int(7) }} {{ '0x1f'|int(base=16) }} {{ '1f'|int(0, 16) }} {{ 3.9|int }} {{ -3.9|int }} {{ true|int }} {{ nil|int }} {{ ' 12 '|int }} {{ '1_000'|int }} {{ '٣'|int }} {{ '1e3'|int }} {{ '42'|float }} {{ 'x'|float }} {{ 'x'|float(1.5) }} {{ '1e5'|float }} {{ 'inf'|float }} {{ ' 2.5 '|float }} {{ '0b11'|int(0, 2) }} {{ '0o17'|int(0, 0) }}
{{ 2.5|round }} {{ 3.5|round }} {{ 42.55|round(1) }} {{ 2.675|round(2) }} {{ 42.55|round(1, 'floor') }} {{ 42.51|round(0, 'ceil') }} {{ 1234|round(-2) }} {{ 1250|round(-2) }} {{ 1350|round(-2) }} {{ 7|round }} {{ -5|abs }} {{ -2.5|abs }} {{ 1e300|round(2) }} {{ -0.4|round }}
{{ 'foo bar baz qux'|truncate(9) }} {{ 'foo bar baz qux'|truncate(9, true) }} {{ 'foo bar baz qux'|truncate(11) }} {{ 'foo bar baz qux'|truncate(11, false, '...', 0) }} {{ 'Größe 日本語 x'|truncate(8, true, '…', 0) }} {{ 'a b_c d-e é日'|wordcount }} {{ 'a b&c/d é'|urlencode }} {{ {'a b': 'c&d', 'e': 1}|urlencode }} {{ [('a', 1)]|urlencode }} {{ {'class': 'a', 'id': none, 'x': '<'}|xmlattr }}| {{ 1000|filesizeformat }} {{ 1500000|filesizeformat }} {{ 1|filesizeformat }} {{ 2048|filesizeformat(true) }}
{{ 'a\nb\n\nc'|indent }} {{ 'a\nb'|indent(2, true) }} {{ 'a\n\nb'|indent(2, blank=true) }} {{ 'a\nb'|indent('> ') }} {{ 'a\n'|indent }}| {{ lines|indent(1) }}
{{ n is odd }} {{ n is even }} {{ n is divisibleby 7 }} {{ n is divisibleby(2) }} {{ n is number }} {{ x is number }} {{ yes is number }} {{ n is integer }} {{ yes is integer }} {{ x is float }} {{ name is string }} {{ user is mapping }} {{ words is mapping }} {{ words is sequence }} {{ name is sequence }} {{ user is sequence }} {{ n is sequence }} {{ words is iterable }} {{ n is iterable }} {{ name is iterable }} {{ missing is iterable }} {{ missing is sequence }} {{ missing is string }}
{{ yes is true }} {{ yes is false }} {{ 1 is true }} {{ no is false }} {{ yes is boolean }} {{ n is boolean }} {{ nil is none }} {{ n is not none }} {{ missing is defined }} {{ missing is undefined }} {{ name is defined }} {{ user.x is defined }} {{ user.name is defined }} {{ 'ab' is lower }} {{ 'AB' is upper }} {{ 1 is sameas 1 }} {{ nil is sameas none }} {{ 1 is eq 1 }} {{ 1 is ne 2 }} {{ 1 is lt 2 }} {{ 3 is gt(2) }} {{ 1 is in [1, 2] }} {{ 'upper' is filter }} {{ 'zz' is filter }} {{ 'odd' is test }} {{ range is callable }} {{ n is callable }} {{ n is not odd }} {{ 1 is le 1 }} {{ 2 is ge 3 }} {{ 'a' is equalto 'a' }} {{ 1 is greaterthan 0 }} {{ user.keys() is sequence }} {{ user.keys() is iterable }} {{ (numbers|map('abs')) is sequence }} {{ (numbers|map('abs')) is iterable }}
{{ yes is true and no is false }} {{ not nil is none }} {{ n is not none and n is odd or no }} {{ n if n is odd else 0 }} {{ 'a' is string ~ 'b' }}
{% for i in numbers %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b', 'c') }}{{ loop.changed(i > 3) }} {% endfor %}
{% for i in [] %}x{% else %}none{% endfor %} {% for i in [1] %}x{% else %}none{% endfor %} {% for i in [1, 2] %}{% break %}{% else %}none{% endfor %}|
{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for i in numbers if i > 3 %}{{ i }}:{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}
{% for k, v in user.items() %}{{ k }}={{ v }};{% endfor %} {% for k in user %}{{ k }},{% endfor %} {% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %} {% for c in 'añ日' %}{{ c }}-{% endfor %}
{% for i in [1, 2] %}{% for j in [3, 4] %}{{ loop.index }}{{ i }}{{ j }} {% endfor %}{{ loop.index }}{% endfor %}
{% for n in tree recursive %}{{ n.v }}@{{ loop.depth }}{{ loop.index }}({{ loop(n.c) }}){% endfor %}
{% set a = 1 %}{% for i in [1, 2] %}{{ a }}{% set a = a + i %}{{ a }} {% endfor %}{{ a }} {% if yes %}{% set a = 9 %}{% endif %}{{ a }}
{% set ns = namespace(a=1, b='x') %}{% for i in numbers %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.c }}| {{ ns is mapping }} {{ ns is defined }} {% set ns.c = [1] %}{{ ns.c }} {{ ns['a'] }}
{% set a, b = 1, 2 %}{{ a }}{{ b }} {% set (c, d) = [3, 4] %}{{ c }}{{ d }} {% set e = 1, 2 %}{{ e }} {% set f %}block {{ a }}{% endset %}{{ f }} {% set g | upper | replace('B', 'x') %}ab{% endset %}{{ g }} {% set h = (1, ) %}{{ h }}
{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, 5) }} {{ m(b=7, a=3) }} {{ m() }}| {{ m(1, c='z') }} {% set r = m(1) %}{{ r|length }}
{% macro v(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ v(1, 2, 3, x=4) }} {% macro w() %}{{ caller() if caller else 'none' }}{% endmacro %}{{ w() }} {% call w() %}in{% endcall %} {% macro z() %}{{ caller('q') }}{% endmacro %}{% call(p) z() %}<{{ p }}>{% endcall %}
{% macro fact(n) %}{{ 1 if n < 2 else n * fact(n - 1)|int }}{% endmacro %}{{ fact(10) }} {% macro late() %}{{ later }}{% endmacro %}{% set later = 'L' %}{{ late() }}
{% macro outer() %}{% set q = 5 %}{% macro inner() %}{{ q }}{% endmacro %}{{ inner() }}{% endmacro %}{{ outer() }} {% set ns = namespace() %}{% for i in [1, 2] %}{% macro mm() %}m{{ i }}{% endmacro %}{% set ns.f = mm %}{{ ns.f() }}{% endfor %}
{% filter upper %}abc {{ name }}{% endfilter %} {% filter replace('a', 'o')|title %}banana{% endfilter %} {% with a = 1, b = n %}{{ a }}{{ b }}{% endwith %}{{ a }}| {% with %}{% set zz = 1 %}{{ zz }}{% endwith %}{{ zz }}|
{% generation %}gen {{ name }}{% set gg = 1 %}{% endgeneration %}{{ gg }}| {% block foo %}blk {{ name }}{% endblock %} {% block bar scoped %}{% endblock bar %}
{% raw %}{{ not }} {% parsed %} {# x #}{% endraw %} {% raw -%}  a  {%- endraw %}| {# comment {{ x }} #}x {#- strip -#} y
{% if n == 7 %}a{% elif n == 8 %}b{% else %}c{% endif %} {% if no %}a{% elif nil %}b{% else %}c{% endif %} {% if missing %}x{% endif %}{% if 1, 2 %}t{% endif %}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.next() }} {% set j = joiner('; ') %}{{ j() }}a{{ j() }}b{{ j() }}
{{ dict(a=1, b=2) }} {{ dict([('x', 1)], y=2) }} {{ dict({'a': 1}, a=3) }} {{ {'a': 1, 'a': 2} }} {{ {1: 'i', 1.0: 'f', true: 'b'} }} {{ {'a': {'b': 1}}.a.b }}
{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {{ strftime_now('%d %b %Y, %A %B %j %p %I %y %%') }} {{ strftime_now('%-d %e %f|%z|%Z|') }} {{ strftime_now('') }} {{ strftime_now('Tag: %d. März') }}
{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}Today: {{ date_string }} {% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }} {{ today|default(strftime_now('%Y-%m-%d'), true) }} {{ (date or 'no date') if date is defined else 'undefined' }}
{{ user.update }}| {{ words.append }}| {{ name.__class__ }}| {{ user.pop is defined }} {{ words['append'] is defined }} {{ user.get is defined }} {{ user.foo is defined }} {{ name.foo }}| {{ name.upper is callable }} {{ n.foo }}| {{ missing == nope }} {{ missing == nil }} {{ missing in [1, nope] }} {{ missing|length }} {{ missing|list }} {{ missing ~ 'x' }} {{ missing|upper }}| {{ missing|join(',') }}|
{{ words|attr('count') is defined }} {{ user|attr('name') is defined }} {{ user|attr('keys') is defined }} {{ user|attr('get')('name') }} {{ [[1, 2], [3]]|sum(start=[]) }} {{ [3, 1]|sort|first }} {{ numbers|map('int')|sum }}
  {% if yes %}  
  a
  {% endif %}  
  b {% if yes %} c {% endif %}
{%- if yes -%}   
 d
{%- endif +%}  
   {%+ if yes %} e{% endif %}
	{% set tab = 1 %}
f
   {# comment #}
g {{- ' h ' -}} i {{ 'j' }}
{{ 'k' }}
""".strip("\n")

WHOLE = [
    "{% for i in [1, 2] %}{% continue %}{% else %}none{% endfor %}|{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{% else %}none{% endfor %}",
    "a\n{% if yes %}\nb\n{% endif %}\nc\n",
    "a\r\n  {% if yes %}\r\nb\r{% endif %}\n\n",
    "  {%- if yes %}  x{% endif -%}  \n  y",
    "{% for i in [1,2] -%}\n  {{ i }}\n{%- endfor %}\n",
    "\n\n  {# c #}\n  {#- c -#}\n  z",
    "{% raw %}\n  {{ x }}\n{% endraw %}\nb",
    "  {% raw -%}\n  {{ x }}\n  {%- endraw +%}\nb",
    "{{ name }}\n",
    "{{ name }}\n\n",
    "\n",
    "",
    "{% if yes %}\n\n\n  text\n\n{% endif %}\n\n",
    "{%+ set a = 1 +%}\n{{ a }}",
    "  {%+ set a = 1 %}\n{{ a }}",
    "x  {% set a = 1 %}  \n  y",
    "{{ {'a': {'b': 1}} }} {{ {'a': {}}}}",
    "{{ '}}' }} {{ \"%}\" }} {% set a = '%}' %}{{ a }}",
    "{{ [\n1,\n2,\n] }}{{ {\n'a':\n1, } }}{{ (1,\n 2) }}",
    "{% set messages = words[1:] %}{% for m in messages %}{% if loop.first and m is string %}{{ m }}{% elif not loop.last %}-{{ m }}{% else %}.{% endif %}{% endfor %}",
    "{% for row in [[1,2],[3,4]] %}\n  {% for c in row %}\n    {{ c }},\n  {% endfor %}\n{% endfor %}\nend",
    "{% set ns = namespace(found=false) %}{% for m in people if not ns.found %}{{ m.name }}{% if m.name == 'bob' %}{% set ns.found = true %}{% endif %}{% endfor %}",
    "{% for x in words %}{% set outer = loop %}{% for y in [1,2] %}{{ outer.index }}{{ loop.index }} {% endfor %}{% endfor %}",
    "{% macro a(x) %}{% for i in x %}{{ b(i) }}{% endfor %}{% endmacro %}{% macro b(i) %}[{{ i }}]{% endmacro %}{{ a([1, 2]) }}",
    "{% set x = missing or 'dflt' %}{{ x }}{{ missing or none }}{{ missing and 1 }}|",
    "{{ (1, 2, 3)|length }}{{ 'a b'.split()|length }}{{ {}|length }}",
    "{{ words|map('length')|list }}{{ words|map('first')|join }}",
    "{%- for k, v in {'b': 1, 'a': [1, {'c': none}]}|dictsort %}{{ k }}:{{ v|tojson }}{{ ', ' if not loop.last }}{%- endfor %}",
    "{{ '%s=%s' % ('a', {'b': 1}) }} {{ '%s' % none }} {{ '%s' % missing }}|",
    "{{ 'a' 'b' ~ 'c' }} {{ 1 ~ 2 + 3 }} {{ 2 * 3 ~ 4 }} {{ -n|abs }} {{ (-n)|abs }} {{ 10 // 3 ** 2 }}",
    "{{ not missing is defined }}{{ missing is not defined and yes }}{{ (n is odd) and (n is not even) }}",
    "{{ user.name.upper().lower().title() }}{{ user['tags']|join(',')|upper }}",
    "{% print name, n %}{% set _p = 1 %}{{ _p }}",
    "{% for a in [1,2,3,4,5] %}{{ loop.changed(a // 2) }}{{ loop.nextitem is defined }}{{ loop.previtem|default('-') }} {% endfor %}",
    "{% for i in range(3) %}{{ loop.cycle('odd', 'even') }}{% endfor %}{% for i in people|map(attribute='name') %}{{ loop.length }}{{ loop.last }}{{ i }}{% endfor %}",
    "{{ numbers|map('string')|map('upper')|select('ne', '1')|list }}{% set g = numbers|select('odd') %}{{ g|list }}{{ g|list }}",
    "{{ [1,2,3]|map('multiply') is defined }}",
    "{{ 'x' if undefined_filter is defined else 'y' }}{{ 'a'|nope if false else 'b' }}",
    "{% if false %}{{ 'a'|nope }}{% endif %}ok",
    "{{ range(0)|list }}{{ range(1, 10, 4)|list }}{{ range(3)[1] }}{{ range(5)|last }}",
    "{{ 5|string + '5' }}{{ 5.0|string }}{{ [1]|string }}{{ none|string }}",
    "{{ true and 'x' }}{{ 'x'|length == 1 }}{{ (words|length) > 3 and words|first == 'delta' }}",
    "{{ 'ab\\\ncd' }}{{ 'line\nbreak' }}",
    "{{ text[3:5] ~ text[-2:] ~ text[40:] }}{{ text.split(' ')[1] }}{{ text.count('ß') }}{{ text.replace('ß', 'ss') }}",
    "{{ people|map(attribute='missing')|list }}{{ people|map(attribute='missing', default=0)|sum }}",
    "{{ ({'a': 1}.items()|list)[0] }}{{ user.nested.k[0] + 1 }}{{ user.get('nested', {}).get('k')|length }}",
    "{{ 'é'.encode is defined }}{{ 'abc' < 'abd' }}{{ 'Z' < 'a' }}{{ 'é' > 'z' }}{{ '\uffff' < '\U00010000' }}",
]

ERRORS = [
    "{{ raise_exception('no: ' ~ name ~ '!') }}",
    "{{ raise_exception('é') }}",
    "{% if n > 3 %}{{ raise_exception(\"Conversation roles must alternate user/assistant/user/assistant/...\") }}{% endif %}",
    "{{ missing.attr }}", "{{ missing['x'] }}", "{{ missing() }}", "{{ missing + 1 }}", "{{ 1 + missing }}", "{{ 'a' + missing }}",
    "{{ user.missing.deeper }}", "{{ user['missing']['deeper'] }}", "{{ words[9].x }}", "{{ n.foo.bar }}", "{{ nil.foo.bar }}",
    "{{ missing > 1 }}", "{{ 1 < missing }}", "{{ missing|int }}", "{{ -missing }}", "{{ missing[1:] }}", "{{ 'x' in nil }}",
    "{{ user.missing() }}", "{{ name.nope() }}", "{{ name() }}", "{{ nil() }}", "{{ words.append(1) }}", "{{ user.update({}) }}",
    "{{ user.pop('a') }}", "{{ name.__class__.__mro__ }}", "{{ 1 / 0 }}", "{{ 1 // 0 }}", "{{ 1 % 0 }}", "{{ 1.0 / 0 }}",
    "{{ 'a' + 1 }}", "{{ 1 + 'a' }}", "{{ [1] + (1,) }}", "{{ 'a' - 'b' }}", "{{ none + 1 }}", "{{ 'a' * 'b' }}", "{{ -'a' }}",
    "{{ 1 < 'a' }}", "{{ none < 1 }}", "{{ [1, 'a']|sort }}", "{{ {} < {} }}", "{{ 1 in 'abc' }}", "{{ 1 in 5 }}",
    "{% for i in 5 %}{% endfor %}", "{% for i in none %}{% endfor %}", "{% for a, b in [1] %}{% endfor %}",
    "{% for a, b in [(1, 2, 3)] %}{% endfor %}", "{% for a, b in ['x'] %}{% endfor %}", "{% set a, b = 1, 2, 3 %}",
    "{{ none|length }}", "{{ 5|length }}", "{{ (numbers|map('abs'))|length }}", "{{ numbers|map('abs')|last }}", "{{ none|list }}",
    "{{ none|join }}", "{{ numbers|map('nope')|list }}", "{{ numbers|select('nope')|list }}", "{{ numbers|map|list }}",
    "{{ 'a'|nope }}", "{{ 'a' is nope }}", "{% if true %}{{ 'a'|nope }}{% endif %}", "{% if true %}{{ 'a' is nope }}{% endif %}",
    "{% for i in [1] %}{{ 'a'|nope }}{% endfor %}", "{% if false %}{% for i in [1] %}{{ 'a'|nope }}{% endfor %}{% endif %}",
    "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{% endmacro %}{{ m(b=2) }}",
    "{% macro m(a) %}{{ a.x }}{% endmacro %}{{ m() }}", "{% macro m(a) %}{% endmacro %}{% call m() %}{% endcall %}",
    "{% set ns = namespace(a=1) %}{{ ns.b.c }}" if False else "{% set ns = 1 %}{% set ns.a = 1 %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}", "{{ namespace(_x=1) }}", "{{ range(1000000) }}", "{{ range(0, 5, 0) }}", "{{ range('a') }}",
    "{{ 'a'.split('') }}", "{{ 'abc'.index('z') }}", "{{ ','.join([1]) }}", "{{ 'a'.join(5) }}", "{{ '%d' % 'a' }}", "{{ '%s %s' % 'a' }}",
    "{{ '%s' % ('a', 'b') }}", "{{ '%y' % 1 }}", "{{ '{} {}'.format(1) }}", "{{ '{a}'.format() }}", "{{ '{'.format() }}", "{{ '}'.format() }}",
    "{{ '{:d}'.format('a') }}", "{{ '{:q}'.format(1) }}", "{{ '{:.2}'.format(1) }}", "{{ {}[[]] is defined }}{{ {[]: 1} }}", "{{ [[1]]|unique|list }}",
    "{% include 'x' %}", "{{ loop.index }}", "{{ user.tags.x.y }}", "{{ ''|first|upper }}{{ [].x.y }}", "{{ missing|dictsort }}",
    "{{ 'x'|truncate(1) }}", "{{ 5|indent }}", "{{ strftime_now(5) }}", "{{ dict(5) }}", "{{ 'a'.strip(1) }}", "{{ 'a'.startswith(1) }}",
    "{{ 1|round(1, 'x') }}", "{{ 'a'|round }}", "{{ nil.x }}{{ nil.x.y }}", "{{ 'a'.replace('b') }}", "{{ tojson(1) }}", "{{ from_json('1') }}",
    # Not templates at all.
    "{{ ", "{{ }}", "{% if %}", "{% if yes %}", "{% endif %}", "{% for %}", "{% nope %}", "{{ a b }}", "{{ 1 + }}", "{{ (1 }}", "{{ [1) }}",
    "{# x", "{% raw %}x", "{{ 'abc }}", "{{ a.'b' }}", "{{ a is }}", "{{ x| }}", "{{ $ }}", "{% set 1 = 2 %}", "{% set x %}", "{% for loop in x %}{% endfor %}",
    "{% macro m(a=1, b) %}{% endmacro %}", "{% call foo %}{% endcall %}", "{% break %}", "{{ f(a=1, 2) }}", "{{ f(**a, *b) }}", "{{ 1 is odd is even }}",
    "{% block a-b %}{% endblock %}", "{% if a %}{% else %}{% elif b %}{% endif %}", "{% for i in x %}{% endif %}", "{{ {1} }}", "{{ {1:2, } , }}{{ {1: } }}",
    "{% macro m() %}{% break %}{% endmacro %}", "{{ '\\x4' }}", "{{ 1 if }}", "{{ not }}", "{% set a.b.c = 1 %}", "{{ a..b }}", "{% do x %}",
]


def outcome(source):
    try:
        return {"output": chat_template_utils._compile_jinja_template(source).render(**json.loads(json.dumps(CONTEXT)))}
    except Exception as error:  # noqa: BLE001
        return {"error": type(error).__name__, "message": str(error)}


def main():
    lines = SOURCES.split("\n")
    cut = lines.index("  {% if yes %}  ")  # from here on one template of several lines
    sources = lines[:cut] + ["\n".join(lines[cut:])] + WHOLE
    cases = []
    for source in sources + ERRORS:
        cases.append({"source": source, **outcome(source)})
    failed = [case for case in cases[: len(sources)] if "error" in case]
    for case in failed:
        print(case)
    path = pathlib.Path(__file__).parent / "jinja_golden.json"
    path.write_text(json.dumps({"context": CONTEXT, "cases": cases}, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    print(len(cases), "cases")


main()
