#!/usr/bin/env python3
"""The KV code beside others on real keys and values: an independent model of it in PyTorch, with an fp32 cache as reference.

    kv_code_quality.py MODEL.gguf --texts FOLDER [--context 4096] [--scored 128] [--limit N]

Reads each text with transformers in fp32 up to `scored` tokens before the context's end, re-codes the cached keys and values, and
compares the predictions for the scored tokens with those of the untouched fp32 cache. Two kinds of rows:
  whole   every cached token is re-coded: fp16, bf16, and Pliant's 16 bits (is TARGET as good as an fp16 cache?)
  middle  all but the first 64 and the last 64 (below 8 bits: 256) tokens before the scored ones: Pliant's states, and the upper
          byte of fp16, truncated (the published BASE) or read at its midpoint
Also prints the signal-to-noise ratio of the whole codes, the mean over layers and heads of 10 log10(sum x^2 / sum error^2).
Needs torch, transformers, tokenizers, gguf, numpy (PyPI).
"""
import argparse
import copy
import pathlib

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent


def parity_loader():
    """load_gguf of parity.py, which is a program: everything but its last call is run."""
    source = (ROOT / "bench" / "parity.py").read_text()
    names = {"__file__": str(ROOT / "bench" / "parity.py"), "__name__": "parity"}
    exec(compile(source[: source.rindex("\nmain()")], "parity.py", "exec"), names)
    return names["load_gguf"]


HALF_CODES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def round_up_to_bf16(x):
    """The smallest bf16 not below x, for x >= 0."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def plane_code(x, bits, channel):
    """Pliant's code, written from its description: 16-bit fixed point over the row's absolute maximum; absent low bits read at
    the midpoint. x: [1, heads, tokens, dim]; channel: [heads, 1, dim] or 1."""
    x = x / channel
    scale = round_up_to_bf16(x.abs().amax(-1, keepdim=True))
    code = torch.where(scale > 0, torch.round(x / scale.clamp_min(1e-30) * 32768), torch.zeros_like(x))
    u = code.clamp(-32767, 32767).to(torch.int64) + 32768
    absent = 16 - bits
    if absent:
        u = (u >> absent << absent) | (1 << (absent - 1))
    return (u - 32768).to(torch.float32) / 32768 * scale * channel


def upper_byte_of_fp16(x, midpoint):
    bits = x.half().view(torch.int16) & -256
    if midpoint:
        bits = bits | 128
    return bits.view(torch.float16).float()


def recode(name, keys, values, channel):
    if name in HALF_CODES:
        return keys.to(HALF_CODES[name]).float(), values.to(HALF_CODES[name]).float()
    if name.startswith("fp16 byte"):
        return [upper_byte_of_fp16(x, name.endswith("midpoint")) for x in (keys, values)]
    k, v = (int(bits) for bits in name.split("/"))
    return plane_code(keys, k, channel), plane_code(values, v, 1.0)


def channel_scales(model, ids):
    """Largest |K| of each channel after RoPE over a text; the two channels of a RoPE pair share the larger."""
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    scales = []
    for layer in cache.layers:
        top = layer.keys.abs().amax(2, keepdim=True)[0]
        half = top.shape[-1] // 2
        pair = torch.maximum(top[..., :half], top[..., half:])
        scales.append(torch.cat([pair, pair], -1))
    return scales


def snr(x, y):
    return 10 * torch.log10(x.double().pow(2).sum((0, 2, 3)) / (x - y).double().pow(2).sum((0, 2, 3)).clamp_min(1e-300))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--scored", type=int, default=128)
    parser.add_argument("--limit", type=int, default=0)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    model, tokenizer = parity_loader()(args.model)[:2]
    encode = lambda text: torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
    channels = channel_scales(model, encode((ROOT / "README.md").read_text())[:, :512])

    whole = ["fp16", "bf16", "16/16"]
    middle = ["12/12", "12/8", "8/8", "8/4", "4/4", "fp16 byte truncated", "fp16 byte midpoint"]
    total = {name: 0.0 for name in whole + middle}
    same = {name: 0.0 for name in whole + middle}
    decibels = {name: [] for name in whole}
    texts = [p for p in sorted(pathlib.Path(args.texts).glob("*.txt"))]
    texts = texts[: args.limit] if args.limit else texts
    for path in texts:
        ids = encode(path.read_text())[:, : args.context]
        if ids.shape[1] < args.context:
            raise SystemExit(f"{path}: only {ids.shape[1]} tokens")
        start = args.context - args.scored
        cache = None
        for at in range(0, start, 512):
            cache = model(ids[:, at : min(at + 512, start)], past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        predict = lambda c: model(ids[:, start:], past_key_values=c, use_cache=True).logits[0].double().log_softmax(-1)
        reference = predict(copy.deepcopy(cache))
        for name in whole + middle:
            changed = copy.deepcopy(cache)
            deep = name in ("8/4", "4/4")
            tokens = slice(0, start) if name in whole else slice(64, start - (256 if deep else 64))
            for layer, channel in zip(changed.layers, channels):
                keys, values = layer.keys[:, :, tokens], layer.values[:, :, tokens]
                new_keys, new_values = recode(name, keys, values, channel)
                if name in whole:
                    decibels[name] += [snr(keys, new_keys), snr(values, new_values)]
                layer.keys[:, :, tokens], layer.values[:, :, tokens] = new_keys, new_values
            other = predict(changed)
            kl = (reference.exp() * (reference - other)).sum(-1).mean().item()
            total[name] += kl / len(texts)
            same[name] += (reference.argmax(-1) == other.argmax(-1)).double().mean().item() / len(texts)
            print(f"{path.name:28} {name:20} KL {kl:.2e}", flush=True)
    print(f"\n{len(texts)} texts, context {args.context}, last {args.scored} tokens scored")
    for name in whole + middle:
        line = f"{name:20} KL {total[name]:.2e}  top-1 {100 * same[name]:6.2f} %"
        if name in whole:
            both = torch.stack(decibels[name]).view(-1, 2, decibels[name][0].shape[0])
            line += f"  SNR {both.mean():.1f} dB (K {both[:, 0].mean():.1f}, V {both[:, 1].mean():.1f}; lowest {both.min():.1f})"
        print(line)


if __name__ == "__main__":
    main()
