#!/usr/bin/env python3
"""Writes unicode_ranges.inc: where the reference's Unicode data differ from the libraries Pliant links.

The reference is the Python package `tokenizers`: its regular expressions (Oniguruma) know a newer Unicode than Debian's
PCRE2, its Digits step (Rust) a newer one still, and its NFC an older one than utf8proc. Both directions are found by asking
the reference about every code point.

Usage: unicode_ranges.py > unicode_ranges.inc   (needs tokenizers and libutf8proc.so)
"""
import ctypes
import ctypes.util
import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So".split()


def regex_members(pattern):
    """Code points the reference's regular expressions put in a class."""
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    members = set()
    for i in range(0, len(CODE_POINTS), 4096):
        text = "".join(map(chr, CODE_POINTS[i : i + 4096]))
        for piece, _ in split.pre_tokenize_str(text):
            members.update(map(ord, piece))
    return members


def ranges(members):
    out = []
    for c in sorted(members):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def emit(name, members, comment):
    print(f"// {comment}")
    print(f"inline constexpr CodePointRange {name}[] = {{")
    line = "   "
    for low, high in ranges(members):
        item = f" {{0x{low:X}, 0x{high:X}}},"
        if len(line) + len(item) > 100:
            print(line)
            line = "   "
        line += item
    print(line)
    print("};")


def main():
    assert unicodedata.unidata_version == "14.0.0", "run with a Python whose Unicode is PCRE2 10.42's: 14.0"
    print(f"// Made by unicode_ranges.py from tokenizers {tokenizers.__version__}. Do not edit.")
    known = {}
    for c in CODE_POINTS:
        known.setdefault(unicodedata.category(chr(c)), set()).add(c)
    rows = []
    for category in CATEGORIES:
        reference = regex_members(rf"\p{{{category}}}")
        if known[category] - reference:
            print(f"{category}: only in Unicode 14: {ranges(known[category] - reference)}", file=sys.stderr)
        new = reference - known[category]
        if new:
            emit(f"kNew{category}", new, f"{category} in the reference, unassigned in Unicode 14")
            rows.append(category)
    print("inline constexpr CategoryRanges kNewCategories[] = {")
    for category in rows:
        print(f'    {{"{category}", kNew{category}}},')
    print("};")

    digits = pre_tokenizers.Digits(individual_digits=True)
    numeric = {c for c in CODE_POINTS if len(digits.pre_tokenize_str("a" + chr(c))) == 2}
    only = numeric - regex_members(r"\p{N}")
    assert not regex_members(r"\p{N}") - numeric
    emit("kDigitsStepOnly", only, r"Numeric for the Digits step, not yet for \p{N}")

    word = regex_members(r"\w")
    base = set().union(*(regex_members(rf"\p{{{c}}}") for c in "L M Nd Nl Pc".split()))
    assert not base - word
    emit("kWordOnly", word - base, r"\w besides L, M, Nd, Nl and Pc")

    lib = ctypes.CDLL(ctypes.util.find_library("utf8proc") or "libutf8proc.so.2")
    lib.utf8proc_get_property.restype = ctypes.POINTER(ctypes.c_int16)
    nfc = normalizers.NFC()
    unmoved = set()
    for c in CODE_POINTS:
        if lib.utf8proc_get_property(c)[1] == 0:  # combining class: the second 16-bit field
            continue
        moves = any(nfc.normalize_str(s) != s for s in ("a" + chr(c) + "\u0334", "a\u0315" + chr(c)))
        if not moves and c not in (0x334, 0x315):
            same = {nfc.normalize_str("a" + chr(c) + "\u0334"), nfc.normalize_str("a\u0315" + chr(c))}
            if len(same) == 2:
                unmoved.add(c)
    emit("kNfcStarters", unmoved, "Combining marks newer than the reference's NFC, which takes them as starters")


main()
