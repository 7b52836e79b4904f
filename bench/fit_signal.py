#!/usr/bin/env python3
"""Fits the weights of a learned growth signal (src/backend/growth_weights.h) to a model.

Every 16 tokens of a chain of thought: will more of what has been written be needed 16 tokens later than now? A logistic regression on the
unit vectors of the short and long running mean (16 and 64 steps) of every query head, before norm and RoPE, which is what a server has at
that moment; the whole cache, in f32. What is needed is told by the text alone:

    --need recalls    reckoner's own grammar (demand.py): definitions, who asked, values; tokens must be characters
    --need copies:N   of any text: a token is needed until it is copied for the last time, where a copy is the longest run of at least N
                      tokens, taken from left to right, that stands earlier in the text, at its nearest place

PROBLEMS has one JSON object a line with "id", "prompt" and the chain of thought as "cot"; or with --answers the chains are those of the
right answers that a run of `pliant bench quality --reckoner PROBLEMS --courses --json FILE` wrote. They must not be the problems that the
signal is judged with. One problem in five is left out at first and told, then all are fitted.

    python3 bench/fit_signal.py MODEL_FOLDER problems.jsonl --out weights.safetensors

Needs torch, transformers, numpy. One hard problem takes a second, and 25 kB for each 16 tokens.
"""
import argparse
import json
import math
import struct

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import demand

SHORT, LONG = 16, 64  # RetainedHistory::kShortSteps, kLongSteps
EVERY = 16            # kQuerySignalTokens


def last_copies(tokens, start, least):
    """For each token the position where its last copy begins, or -1. Copies are looked for from `start` on."""
    text = "".join(map(chr, tokens))
    last = [-1] * len(text)
    at = start
    while at + least <= len(text):
        length, source = least, text.rfind(text[at:at + least], 0, at + least - 1)
        if source < 0:
            at += 1
            continue
        while at + length < len(text):
            longer = text.rfind(text[at:at + length + 1], 0, source + length + 1)
            if longer < 0:
                break
            source, length = longer, length + 1
        last[source:source + length] = [at] * length
        at += length
    return last


class Queries:
    """Rows of every query head, before norm and RoPE, of one pass over a text."""

    def __init__(self, model):
        self.model = model
        names = [name for name, _ in model.named_modules() if name.endswith("self_attn.q_proj")]
        config = model.config.get_text_config()
        self.shape = (config.num_hidden_layers, config.num_attention_heads,
                      getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        if len(names) != self.shape[0]:
            raise SystemExit(f"{len(names)} projections of queries, {self.shape[0]} layers: this architecture is not known here")
        self.rows = {}
        for name in names:
            model.get_submodule(name).register_forward_hook(
                lambda module, given, out, name=name: self.rows.__setitem__(name, out[0]))

    @torch.no_grad()
    def means(self, tokens, places):
        """[places][2][layers * heads][head_dim], unit vectors, of what came before each place."""
        self.model.base_model(torch.tensor([tokens]), use_cache=False)
        rows = torch.cat([self.rows[name] for name in self.rows], 1)
        quick, slow = rows[0].clone(), rows[0].clone()
        wanted, out = set(places), []
        for t in range(1, len(tokens) + 1):
            if t in wanted:
                both = torch.stack([quick, slow]).view(2, -1, self.shape[2])
                out.append(torch.nn.functional.normalize(both, dim=-1).half())
            if t < len(tokens):
                quick.lerp_(rows[t], 1 / SHORT)
                slow.lerp_(rows[t], 1 / LONG)
        return torch.stack(out).numpy()


def read_chains(path, answers, limit):
    with open(path, encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    if answers:
        with open(answers, encoding="utf-8") as file:
            courses = [one for score in json.load(file)["reckoner"] for one in score.get("courses", []) if one["right"]]
        chains = {one["id"]: one["answer"].split("</think>")[0] for one in courses}
    else:
        chains = {one["id"]: one["cot"] for one in problems}
    kept = {}
    for one in problems:
        if one["id"] in chains and len(kept.setdefault(one.get("level", ""), [])) < limit:
            kept[one.get("level", "")].append((one["prompt"], chains[one["id"]]))
    return kept


def features_and_labels(queries, tokenizer, prompt, chain, need, horizon):
    head = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False)
    tokens = list(head) + tokenizer(chain, add_special_tokens=False)["input_ids"]
    start = len(head)
    if need == "recalls":
        last = demand.last_reads(prompt, chain, start)
        if len(last) != len(tokens):
            raise SystemExit("--need recalls: tokens of this model are not characters; --need copies:8 is for any")
    else:
        last = last_copies(tokens, start, int(need.split(":")[1]))
    last = np.array(last)
    needed = lambda t: int((last[:t] >= t).sum())
    places = [t for t in range(-(-(start + 2 * EVERY) // EVERY) * EVERY, len(tokens) - horizon + 1, EVERY)]
    if not places:
        return None
    return queries.means(tokens, places), np.array([needed(t + horizon) > needed(t) for t in places])


def fit(features, labels, decay):
    """Weights and bias of a logistic regression; `decay` counts the squares of weights of features of unit variance."""
    mean, spread = features.mean(0, dtype=np.float64).astype(np.float32), features.std(0, dtype=np.float64).astype(np.float32) + 1e-6
    x = torch.from_numpy((features - mean) / spread)
    y = torch.from_numpy(labels.astype(np.float32))
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    steps = torch.optim.LBFGS([weight, bias], max_iter=150, history_size=10, line_search_fn="strong_wolfe")

    def loss():
        steps.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(x @ weight + bias, y) + decay * (weight * weight).sum()
        value.backward()
        return value

    steps.step(loss)
    weight = (weight.detach().numpy() / spread).astype(np.float64)
    return weight, bias.item() - float(weight @ mean)


def write(path, shape, weight, bias, above):
    """Safetensors, as src/model/growth_weights.h says."""
    short, long = np.split(weight.astype(np.float32), 2)
    tensors = [("short_mean", shape, short), ("long_mean", shape, long), ("bias", (1,), np.float32([bias])),
               ("above", (1,), np.float32([above]))]
    header, at = {}, 0
    for name, size, values in tensors:
        header[name] = {"dtype": "F32", "shape": list(size), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for _, _, values in tensors))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("problems")
    parser.add_argument("--answers")
    parser.add_argument("--need", default="recalls", help="recalls or copies:N")
    parser.add_argument("--horizon", type=int, default=16)
    parser.add_argument("--decay", type=float, default=1e-3)
    parser.add_argument("--above", type=float, default=0.3, help="what a history grows above unless told otherwise; at 0.5 most are right")
    parser.add_argument("--limit", type=int, default=1 << 30, help="problems of each level")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    queries = Queries(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval())
    found, labels, left_out, levels = [], [], [], []
    for level, chains in read_chains(args.problems, args.answers, args.limit).items():
        for i, (prompt, chain) in enumerate(chains):
            rows = features_and_labels(queries, tokenizer, prompt, chain, args.need, args.horizon)
            if rows is None:
                continue
            found.append(rows[0].reshape(len(rows[0]), -1))
            labels.append(rows[1])
            left_out += [i % 5 == 4] * len(rows[1])
            levels += [level] * len(rows[1])
        print(f"{level or 'all'}: {len(chains)} chains", flush=True)
    features, labels = np.concatenate(found).astype(np.float32), np.concatenate(labels)
    del found
    left_out, levels = np.array(left_out), np.array(levels)
    weight, bias = fit(features[~left_out], labels[~left_out], args.decay)
    for level in dict.fromkeys(levels):
        part = left_out & (levels == level)
        if part.any():
            rows = list(zip(features[part] @ weight + bias, labels[part].tolist()))
            rises = labels[part].mean()
            shares = "  ".join(f"above {above}: {100 * demand.right(rows, math.log(above / (1 - above))):.1f} % (balanced "
                               f"{100 * demand.balanced(rows, math.log(above / (1 - above))):.1f} %)" for above in (0.5, args.above))
            print(f"{level:7} left out: {len(rows)} signals, constant {100 * max(rises, 1 - rises):.1f} %  right {shares}  area {demand.auc(rows):.2f}")
    weight, bias = fit(features, labels, args.decay)
    write(args.out, queries.shape, weight, bias, args.above)
    print(f"{args.out}: {len(labels)} signals of {args.need}, bias {bias:.3f}")


if __name__ == "__main__":
    main()
