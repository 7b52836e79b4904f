#!/usr/bin/env python3
"""Compares Pliant's logits and greedy tokens with transformers in fp32 on the same dequantised weights.

    parity.py MODEL [--prompts FILE.jsonl] [--text FILE] [options of pliant_dump_logits after --]

MODEL is a GGUF file of the llama architecture or a Hugging Face folder. Needs torch, transformers, tokenizers, gguf, numpy
(PyPI) and the program pliant_dump_logits (--program, default build/release/bench/pliant_dump_logits).

Logits: over --tokens (2,048) tokens of --text (default: README.md and docs/), the largest difference, the mean KL a token from
transformers to Pliant, and how often the best token is the same. Greedy: --new (128) tokens for each of 20 prompts (--prompts: lines
{"prompt": "..."}, 20 of them evenly spread, put into the model's chat format); where the two part, the gap between transformers' two best logits there is
compared with the largest logit difference measured before.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROMPTS = [
    "What is the capital of France?", "Write a haiku about the sea.", "Explain gravity to a child.",
    "List three uses of a paperclip.", "Translate 'good morning' into Spanish.", "What is 17 times 23?",
    "Write a Python function that reverses a string.", "Who wrote Hamlet?", "Describe a sunset in two sentences.",
    "Why is the sky blue?", "Give me a recipe for pancakes.", "What is the difference between a list and a tuple?",
    "Tell me a short story about a fox.", "How do vaccines work?", "Name five countries in Africa.",
    "Summarise the plot of Cinderella.", "What are prime numbers?", "Write a polite email to cancel a meeting.",
    "How does a bicycle stay upright?", "Give three tips for better sleep.",
]


def load_gguf(path):
    """LlamaForCausalLM with the file's weights dequantised to fp32, and its tokenizer."""
    reader = gguf.GGUFReader(path)
    key = lambda name, default=None: reader.fields[name].contents() if name in reader.fields else default
    arch = key("general.architecture")
    if arch != "llama":
        sys.exit(f"{path}: architecture {arch}; this script builds llama only, use a Hugging Face folder")
    heads, kv_heads = key("llama.attention.head_count"), key("llama.attention.head_count_kv")
    tensors = {t.name: torch.tensor(np.array(gguf.quants.dequantize(t.data, t.tensor_type), dtype=np.float32))
               for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0], hidden_size=key("llama.embedding_length"),
        intermediate_size=key("llama.feed_forward_length"), num_hidden_layers=key("llama.block_count"),
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=key("llama.attention.key_length", key("llama.embedding_length") // heads),
        max_position_embeddings=key("llama.context_length"), rms_norm_eps=key("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters=dict(rope_type="default", rope_theta=key("llama.rope.freq_base", 10000.0)),
        tie_word_embeddings="output.weight" not in tensors)
    if "rope_freqs.weight" in tensors:
        sys.exit(f"{path}: RoPE frequency factors; use the Hugging Face folder of this model")
    names = [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("attn_q.", "self_attn.q_proj."),
             ("attn_k.", "self_attn.k_proj."), ("attn_v.", "self_attn.v_proj."), ("attn_output", "self_attn.o_proj"),
             ("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"), ("ffn_gate", "mlp.gate_proj"),
             ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj"), ("blk.", "model.layers.")]
    state = {}
    for name, tensor in tensors.items():
        if "attn_q." in name or "attn_k." in name:  # rows of a RoPE pair stand side by side in GGUF
            n = heads if "attn_q." in name else kv_heads
            tensor = tensor.reshape(n, -1, 2, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        if name == "output.weight":
            name = "lm_head.weight"
        for old, new in names:
            name = name.replace(old, new)
        state[name] = tensor.contiguous()
    model = LlamaForCausalLM(config)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    tokens = key("tokenizer.ggml.tokens")
    types = key("tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in key("tokenizer.ggml.merges")]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [m for m in merges if m[0] + m[1] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if key("tokenizer.ggml.pre") == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, types) if kind == 3])
    tokenizer.add_tokens([t for t, kind in zip(tokens, types) if kind == 4])
    return model.float().eval(), tokenizer, key("tokenizer.chat_template", "")


def load(path):
    if not pathlib.Path(path).is_dir():
        return load_gguf(path)
    folder = pathlib.Path(path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, Tokenizer.from_file(str(folder / "tokenizer.json")), config.get("chat_template") or ""


def render(template, text):
    import jinja2
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template).render(
        messages=[{"role": "user", "content": text}], add_generation_prompt=True)


def run_pliant(args, model, prompts, *options):
    lines = "".join(" ".join(map(str, p)) + "\n" for p in prompts)
    done = subprocess.run([args.program, model, *options, *args.rest], input=lines, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{args.program}: {done.stderr.strip()}")
    return done.stdout


def compare_logits(args, model, tokenizer, scratch):
    ids = tokenizer.encode(args.text).ids[:args.tokens]
    if len(ids) < args.tokens:
        sys.exit(f"the text has {len(ids)} tokens, {args.tokens} are needed; give a longer --text")
    out = f"{scratch}/logits"
    run_pliant(args, args.model, [ids], "--out", out)
    ours = np.memmap(out, dtype="<f4", mode="r").reshape(len(ids), -1)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    largest, kl, same, squares = 0.0, 0.0, 0, 0.0
    for at in range(0, len(ids), 64):
        a = theirs[at:at + 64].double()
        b = torch.tensor(np.array(ours[at:at + 64])).double()
        difference = (a - b).abs()
        largest = max(largest, difference.max().item())
        squares += (difference ** 2).mean(-1).sum().item()
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        kl += (log_a.exp() * (log_a - log_b)).sum().item()
        same += (a.argmax(-1) == b.argmax(-1)).sum().item()
    n = len(ids)
    print(f"logits, {n} tokens: largest difference {largest:.4g}, root mean square {(squares / n) ** 0.5:.3g} "
          f"(the logits' deviation is {theirs.std().item():.3g}), mean KL {kl / n:.3g} a token, same best token {same} of {n}", flush=True)
    return largest


def greedy(model, ids, mine):
    """transformers' best token after the prompt and each of our tokens, and the gap between its two best logits there.

    Up to the first place where the two differ this is its own greedy answer, in one pass.
    """
    with torch.no_grad():
        best = model(torch.tensor([ids + mine[:-1]])).logits[0, len(ids) - 1:].topk(2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def compare_greedy(args, model, tokenizer, template, noise):
    prompts = [tokenizer.encode(render(template, p) if template else p).ids for p in args.prompts]
    lines = run_pliant(args, args.model, prompts, "--greedy", str(args.new)).splitlines()
    ours = [list(map(int, line.split())) for line in lines]
    equal, close, wrong = 0, [], []
    for i, (ids, mine) in enumerate(zip(prompts, ours)):
        theirs, gaps = greedy(model, ids, mine)
        at = next((k for k in range(args.new) if theirs[k] != mine[k]), None)
        if at is None:
            equal += 1
        else:
            # Each of the two logits may be off by the noise.
            (close if gaps[at] <= 2 * noise else wrong).append((i, at, gaps[at]))
    print(f"greedy, {len(prompts)} prompts of {args.new} tokens: {equal} equal, {len(close)} part within the noise, "
          f"{len(wrong)} part beyond it")
    for name, cases in (("within", close), ("BEYOND", wrong)):
        for i, at, gap in cases:
            print(f"  prompt {i} parts at token {at}: two best logits {gap:.4g} apart, {name} 2 x {noise:.4g}")
    return not wrong


def spread(prompts):
    return [prompts[i * len(prompts) // 20] for i in range(20)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--program", default=str(ROOT / "build/release/bench/pliant_dump_logits"))
    parser.add_argument("--text")
    parser.add_argument("--prompts")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--no-greedy", action="store_true")
    own, rest = sys.argv[1:], []
    if "--" in own:
        own, rest = own[:own.index("--")], own[own.index("--") + 1:]
    args = parser.parse_args(own)
    args.rest = rest
    files = [pathlib.Path(args.text)] if args.text else [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    args.text = "".join(f.read_text() for f in files)
    args.prompts = (spread([json.loads(line)["prompt"] for line in open(args.prompts)]) if args.prompts else PROMPTS)
    print(f"{args.model} {' '.join(rest)}")
    model, tokenizer, template = load(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        noise = compare_logits(args, model, tokenizer, scratch)
    if not args.no_greedy:
        sys.exit(0 if compare_greedy(args, model, tokenizer, template, noise) else 1)


main()
