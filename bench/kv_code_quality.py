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


def mix(x):
    """An orthonormal Walsh-Hadamard transform of each 32 neighbouring channels; its own inverse."""
    h = torch.ones(1, 1)
    for _ in range(5):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (x.unflatten(-1, (-1, 32)) @ (h / 32**0.5)).flatten(-2)


def plane_code(x, bits, channel, center, mixed=False):
    """Pliant's code, written from its description: 16-bit fixed point over the row's absolute maximum; absent low bits read at
    the midpoint. x: [1, heads, tokens, dim]; channel, center: [heads, 1, dim] or a number. Keys are mixed."""
    x = (x - center) / channel
    if mixed:
        x = mix(x)
    scale = round_up_to_bf16(x.abs().amax(-1, keepdim=True))
    code = torch.where(scale > 0, torch.round(x / scale.clamp_min(1e-30) * 32768), torch.zeros_like(x))
    u = code.clamp(-32767, 32767).to(torch.int64) + 32768
    absent = 16 - bits
    if absent:
        u = (u >> absent << absent) | (1 << (absent - 1))
    x = (u - 32768).to(torch.float32) / 32768 * scale
    return (mix(x) if mixed else x) * channel + center


def upper_byte_of_fp16(x, midpoint):
    bits = x.half().view(torch.int16) & -256
    if midpoint:
        bits = bits | 128
    return bits.view(torch.float16).float()


def recode(name, keys, values, code):
    if name in HALF_CODES:
        return keys.to(HALF_CODES[name]).float(), values.to(HALF_CODES[name]).float()
    if name.startswith("fp16 byte"):
        return [upper_byte_of_fp16(x, name.endswith("midpoint")) for x in (keys, values)]
    k, v = (int(bits) for bits in name.split("/"))
    return plane_code(keys, k, *code, mixed=True), plane_code(values, v, 1.0, 0.0)


def key_code(model, ids, places=4, context=8192):
    """(scale, center) of each layer's K after RoPE: the text read at places spread over the context; center the middle of the range,
    scale the square root of half of it (the larger of a RoPE pair) over the fourth root of the queries' energy."""
    import transformers.models.llama.modeling_llama as llama

    seen, rotate = [], llama.apply_rotary_pos_emb

    def watch(q, k, *rest, **named):
        q, k = rotate(q, k, *rest, **named)
        seen.append((q[0], k[0]))
        return q, k

    llama.apply_rotary_pos_emb = watch
    context = min(context, model.config.max_position_embeddings)
    for place in range(places):
        first = (context - ids.shape[1]) * place // (places - 1)
        model(ids, position_ids=torch.arange(first, first + ids.shape[1])[None], logits_to_keep=1)
    llama.apply_rotary_pos_emb = rotate
    layers = len(seen) // places
    codes = []
    for layer in range(layers):
        q = torch.cat([seen[place * layers + layer][0] for place in range(places)], 1)
        k = torch.cat([seen[place * layers + layer][1] for place in range(places)], 1)
        least, most = k.amin(1, keepdim=True), k.amax(1, keepdim=True)
        half = k.shape[-1] // 2
        span = most - least
        pair = torch.maximum(span[..., :half], span[..., half:]) / 2
        energy = q.view(k.shape[0], -1, q.shape[1], k.shape[-1]).pow(2).mean((1, 2)).unsqueeze(1)
        use = (energy[..., :half] + energy[..., half:]) / 2 / energy.mean(-1, keepdim=True)
        pair = pair.sqrt() * use.clamp_min(1e-4).pow(-1 / 4)
        codes.append((torch.cat([pair, pair], -1), (least + most) / 2))
    return codes


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
    codes = key_code(model, encode((ROOT / "README.md").read_text())[:, :512])

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
            for layer, code in zip(changed.layers, codes):
                keys, values = layer.keys[:, :, tokens], layer.values[:, :, tokens]
                new_keys, new_values = recode(name, keys, values, code)
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
