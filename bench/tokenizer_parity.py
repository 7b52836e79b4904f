#!/usr/bin/env python3
"""Compares Pliant's token ids with the Python package `tokenizers` on random strings, and both speeds on one text.

The reference is built from the vocabulary in the GGUF file and the family's published tokenizer.json settings.

Usage:
  tokenizer_parity.py compare PROGRAM MODEL.gguf [--count 20000] [--seed 1] [--special]
  tokenizer_parity.py speed PROGRAM MODEL.gguf TEXT_FILE...
  tokenizer_parity.py golden MODEL.gguf OUT.json [--count 300]
PROGRAM is the bench target pliant_tokenizer_ids. Needs the packages tokenizers, gguf and numpy.
"""
import argparse
import json
import os
import random
import struct
import subprocess
import sys
import time
import unicodedata

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
QWEN35 = (rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
          rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{TAIL}")


def split_then_bytes(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits_then_gpt2():
    return pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


FAMILIES = {  # word: pre-tokenizer, ignore_merges, NFC
    "smollm": (digits_then_gpt2, False, False),
    "starcoder": (digits_then_gpt2, False, False),
    "refact": (digits_then_gpt2, False, False),
    "command-r": (digits_then_gpt2, False, True),
    "gpt-2": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True), False, False),
    "llama-bpe": (lambda: split_then_bytes(LLAMA3), True, False),
    "qwen2": (lambda: split_then_bytes(QWEN2), False, True),
    "qwen35": (lambda: split_then_bytes(QWEN35), False, False),
}


def load_reference(path):
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    pre, ignore_merges, nfc = FAMILIES[fields["tokenizer.ggml.pre"].contents()]
    reference = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=ignore_merges))
    reference.pre_tokenizer = pre()
    if nfc:
        reference.normalizer = normalizers.NFC()
    control = [t for t, k in zip(tokens, kinds) if k == 3]
    user = [t for t, k in zip(tokens, kinds) if k == 4 and not t.startswith("[PAD")]
    reference.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    reference.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])
    assert all(reference.token_to_id(t) == tokens.index(t) for t in control + user)
    return reference, control


def by_category():
    table = {}
    for c in range(0x110000):
        if not 0xD800 <= c < 0xE000:
            table.setdefault(unicodedata.category(chr(c)), []).append(chr(c))
    return table


WORDS = ("the of and to in that is was he for it with as his on be at by I this had not are but from or have an they which one you "
         "function return self import class void const int static struct template print elif lambda async await "
         "Unabhängigkeit naïve café Zürich привет мир 你好 世界 こんにちは 안녕하세요 مرحبا שלום नमस्ते สวัสดี γειά 👋🏽 👩‍👩‍👧‍👦 🇩🇪").split()
MARKS = ["'s", "'S", "'t", "'T", "'re", "'RE", "'Ve", "'m", "'LL", "'d", "'D", "\u017f", "'\u017f", "\u2019s", "''s", "->", "=>",
         "(x):\n", "::", "!=", "...", "\u2026", "--", "/*", "*/", "//", "#include <", "\"\"\"", "{\n\t", "}\n\n", ";\r\n", "\r\n\r\n",
         "\n \n", " \n", "\t\t", "    ", "  ", " ", "\u00a0", "\u3000", "\u180e", "\u200b", "\u200d", "\ufeff", "\u0085", "\u2028",
         "1234567", "3.14159", "0x1F", "1,000,000", "\u00b2", "\u00bd", "\u2167", "\u0663\u0664", "e\u0301", "\u1100\u1161\u11a8",
         "\u212b", "a\u0323\u0307", "\x00", "\x1b[0m", "\x7f", "https://a.b/c?d=e&f=%20", "foo_bar", "camelCase", "SHOUT"]


def random_text(rng, table, categories, specials):
    """A mix of words, code, digits, whitespace runs, contractions and characters of every category."""
    parts = []
    for _ in range(rng.randint(1, 24)):
        kind = rng.random()
        if kind < 0.25:
            parts.append(rng.choice(WORDS))
        elif kind < 0.35:
            parts.append(rng.choice(WORDS).upper() if rng.random() < 0.5 else rng.choice(WORDS).title())
        elif kind < 0.6:
            parts.append(rng.choice(MARKS))
        elif kind < 0.7:
            parts.append(rng.choice(" \t\n\r\u00a0") * rng.randint(1, 6))
        elif kind < 0.78:
            parts.append(str(rng.randint(0, 10 ** rng.randint(1, 12))))
        elif kind < 0.9:
            parts.append("".join(rng.choice(table[rng.choice(categories)]) for _ in range(rng.randint(1, 4))))
        elif kind < 0.97:
            parts.append("".join(chr(rng.randint(32, 126)) for _ in range(rng.randint(1, 8))))
        elif specials:
            parts.append(rng.choice(specials))
        if rng.random() < 0.5:
            parts.append(" ")
    return "".join(parts)


def random_texts(seed, count, specials=()):
    rng = random.Random(seed)
    table = by_category()
    table.pop("Cs", None)
    # Half of the draws come from letters, marks, numbers and spaces; Co and Cn hold nearly all code points.
    categories = sorted(table) + "Lu Ll Lo Lm Mn Mc Nd No Nl Zs Po Sm So".split()
    return [random_text(rng, table, categories, list(specials)) for _ in range(count)]


def frames(texts):
    out = bytearray()
    for text in texts:
        data = text.encode()
        out += struct.pack("<I", len(data)) + data
    return bytes(out)


def run(program, model, mode, texts):
    return subprocess.run([program, model, mode], input=frames(texts), stdout=subprocess.PIPE, check=True).stdout


def compare(args):
    reference, control = load_reference(args.model)
    texts = random_texts(args.seed, args.count, control if args.special else ())
    if not args.special:  # every code point once, in company
        texts += [f"a{chr(c)}1 {chr(c)}{chr(c)}b '{chr(c)}\n" for c in range(0x110000) if not 0xD800 <= c < 0xE000
                  and (c < 0x20000 or c % 16 == 0 or 0x31350 <= c < 0x323C0)] if args.every else []
    out = run(args.program, args.model, "special" if args.special else "ids", texts)
    at = tokens = wrong = 0
    for text in texts:
        (n,) = struct.unpack_from("<I", out, at)
        ids = list(struct.unpack_from(f"<{n}i", out, at + 4))
        at += 4 + 4 * n
        expected = reference.encode(text, add_special_tokens=False).ids
        tokens += n
        if ids != expected:
            wrong += 1
            if wrong <= 10:
                print("MISMATCH", json.dumps(text), "\n  pliant   ", ids, "\n  reference", expected)
    print(f"{os.path.basename(args.model)}: {len(texts)} strings, {sum(len(t.encode()) for t in texts)} bytes, "
          f"{tokens} tokens, {wrong} mismatches")
    return 1 if wrong else 0


def speed(args):
    reference, _ = load_reference(args.model)
    text = "".join(open(f, encoding="utf-8").read() for f in args.texts)
    pieces = [text[i : i + 20000] for i in range(0, len(text), 20000)]
    fields = run(args.program, args.model, "time", pieces).split()
    best = 1e30
    for _ in range(3):
        start = time.process_time()
        count = sum(len(reference.encode(p, add_special_tokens=False).ids) for p in pieces)
        best = min(best, time.process_time() - start)
    size = int(fields[0])
    assert count == int(fields[1]), (count, fields)
    ours = float(fields[2])
    print(f"{size} bytes, {count} tokens: pliant {size / ours / 1e6:.1f} MB/s, tokenizers {size / best / 1e6:.1f} MB/s "
          f"(CPU time, one thread each): {best / ours:.1f}x")
    return 0


# What the pre-tokenizers are known to get wrong elsewhere, in front of the random strings of the golden file.
TRICKY = ["->", "(x):\n", "a  b", "\ttab", "\t\tif x:\n\t\t\treturn 1", "1234567", "12345678901", "a\r\n\r\nb", "\r\n\r\n\r\n",
          "trailing   ", "trailing \n", " \n \n", "IT'S WE'LL THEY'RE I'D I'M YOU'VE CAN'T", "it's we'll they're i'd i'm you've can't",
          "", " ", "  ", "\n", "'", "''", "'s", " 's", "x = {'a': 1, 'b': [2, 3]}", "<|im_start|>user\nhi<|im_end|>", "a\u0301\u0323",
          "\u00e9 e\u0301", "\u017f'\u017f", "1\u00bd2\u00b23", "\u0661\u0662\u0663\u0664", "\u180e x", "\x00\x01\x04\x06", "\U0001f469\u200d\U0001f4bb",
          "\ud55c\uae00 \u1112\u1161\u11ab", "#include <stdio.h>\nint main(void) {\n    return 0;\n}\n", "a" * 300, " " * 100 + "x", "=" * 80]


def golden(args):
    reference, control = load_reference(args.model)
    texts = TRICKY + random_texts(7, args.count - len(TRICKY))
    rows = [[t, reference.encode(t, add_special_tokens=False).ids] for t in texts]
    plain = Tokenizer.from_str(reference.to_str())
    plain.encode_special_tokens = True
    rows = [[t, ids, p] if (p := plain.encode(t, add_special_tokens=False).ids) != ids else [t, ids] for t, ids in rows]
    with open(args.out, "w", encoding="ascii") as f:
        f.write("[\n" + ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows) + "\n]\n")
    print(f"{len(rows)} strings")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("compare")
    p.add_argument("program")
    p.add_argument("model")
    p.add_argument("--count", type=int, default=20000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--special", action="store_true", help="put control tokens into the texts and parse them")
    p.add_argument("--every", action="store_true", help="add one string for nearly every code point")
    p.set_defaults(run=compare)
    p = commands.add_parser("speed")
    p.add_argument("program")
    p.add_argument("model")
    p.add_argument("texts", nargs="+")
    p.set_defaults(run=speed)
    p = commands.add_parser("golden", help="text, ids with control tokens parsed, and ids without where they differ")
    p.add_argument("model")
    p.add_argument("out")
    p.add_argument("--count", type=int, default=300)
    p.set_defaults(run=golden)
    args = parser.parse_args()
    sys.exit(args.run(args))


main()
