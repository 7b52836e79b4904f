#!/usr/bin/env python3
"""Pliant and llama.cpp on the same machine, the same GGUF, in one run, alternating.

  python3 bench/llama_compare.py --model FILE.gguf --llama-python PYTHON [--rounds 3] [--threads 2] [--json FILE]

PYTHON is an interpreter that has llama-cpp-python (built from its source package: the bundled llama.cpp is what is
timed, through llama_decode, with no sampling). Pliant's side is build/release/bench/pliant_step_bench. The table has the
median over rounds of each, and the ratio.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys

LLAMA = r'''
import json, sys, time
import llama_cpp as L
path, threads = sys.argv[1], int(sys.argv[2])
L.llama_backend_init()
@L.llama_log_callback
def quiet(level, text, data): pass
L.llama_log_set(quiet, None)
model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
p = L.llama_context_default_params()
p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = 8192, 2048, 512, 16
p.kv_unified = True
p.n_threads = p.n_threads_batch = threads
ctx = L.llama_new_context_with_model(model, p)
memory = L.llama_get_memory(ctx)
def decode(items):
    b = L.llama_batch_init(len(items), 0, 1)
    b.n_tokens = len(items)
    for i, (token, position, sequence, logits) in enumerate(items):
        b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, logits
        b.seq_id[i][0] = sequence
    start = time.perf_counter()
    assert L.llama_decode(ctx, b) == 0
    L.llama_synchronize(ctx)
    seconds = time.perf_counter() - start
    L.llama_batch_free(b)
    return seconds
for n in (512, 2048):
    best = 1e9
    for _ in range(3):
        L.llama_memory_clear(memory, True)
        best = min(best, decode([(1000 + i * 7 % 40000, i, 0, i == n - 1) for i in range(n)]))
    print(json.dumps({"case": f"prefill:{n}", "seconds": best, "tokens_per_second": n / best}), flush=True)
for s in (1, 16):
    L.llama_memory_clear(memory, True)
    for k in range(s):
        decode([(1000 + i * 7 % 40000, i, k, i == 127) for i in range(128)])
    total = sum(decode([(100 + step * 13 + k, 128 + step, k, 1) for k in range(s)]) for step in range(64))
    print(json.dumps({"case": f"decode:{s}", "seconds": total / 64, "tokens_per_second": s * 64 / total}), flush=True)
'''


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed ({done.returncode}): {done.stderr[-500:]}")
    return {r["case"]: r["tokens_per_second"] for r in map(json.loads, filter(lambda l: l.startswith("{"), done.stdout.splitlines()))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    bench = pathlib.Path(__file__).resolve().parent.parent / "build/release/bench/pliant_step_bench"
    rows = {}
    for _ in range(args.rounds):
        for name, command in (("llama.cpp", [args.llama_python, "-c", LLAMA, args.model, str(args.threads)]),
                              ("pliant", [str(bench), args.model, "--threads", str(args.threads)])):
            for case, rate in run(command).items():
                rows.setdefault(case, {}).setdefault(name, []).append(rate)
    print(f"{'case':14} {'llama.cpp tok/s':>16} {'pliant tok/s':>14} {'ratio':>7}")
    for case, sides in rows.items():
        llama, ours = statistics.median(sides["llama.cpp"]), statistics.median(sides["pliant"])
        print(f"{case:14} {llama:16.1f} {ours:14.1f} {ours / llama:6.2f}x")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
