#!/usr/bin/env python3
"""Solved problems a minute at a fixed KV pool: the real server, several policies in one run.

Starts one `pliant serve` a policy, each with a pool for --sequences whole sequences of the mean problem, and lets --clients clients
solve the same problems, one after the other, greedily, through /v1/chat/completions. An answer counts when the text after </think>
is the problem's. A policy is NAME or NAME:CAPACITY (kv.capacity of each request: full, grow, or tokens).

    python3 bench/reckoner_pool.py                                                  (about 5 minutes on two cores)
    python3 bench/reckoner_pool.py --level medium --policies full,growpage,pliant:grow
"""
import argparse
import asyncio
import json
import os
import tempfile
import time

import serving

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(ROOT, "tests/data")


def read_problems(args):
    with open(args.problems, encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    problems = [p for p in problems if p["level"] == args.level][:args.count]
    if not problems:
        raise SystemExit(f"{args.problems}: no problem of level {args.level}")
    return problems


def block_bytes(args, folder):
    """Asks a server: 8 pages hold 32 tokens."""
    server = serving.Server(args.pliant, [args.model, "--kv-memory", "64MiB", "--policy", "full"],
                            os.path.join(folder, "probe.log"))
    try:
        _, body = asyncio.run(serving.request(server.port, "GET", "/v1/kv"))
    finally:
        server.stop()
    return 8 * json.loads(body)["pages"]["bytes"]


async def solve(port, problems, clients, capacity):
    todo, right, tokens, held, failures = iter(problems), 0, 0, [], []
    running = []

    async def client():
        nonlocal right, tokens
        for problem in todo:
            body = {"messages": [{"role": "user", "content": problem["prompt"]}], "temperature": 0, "max_tokens": 4090 - problem["prompt_len"] - 16,
                    "skip_special_tokens": False}
            if capacity:
                body["kv"] = {"capacity": int(capacity) if capacity.isdigit() else capacity}
            status, data = await serving.request(port, "POST", "/v1/chat/completions", body, timeout=3000)
            answer = json.loads(data)
            if status != 200:
                failures.append(data.decode(errors="replace")[:200])
                continue
            text = answer["choices"][0]["message"]["content"] or ""
            right += text.rsplit("</think>", 1)[-1].strip() == problem["answer"]
            tokens += answer["usage"]["completion_tokens"]
            held.append(answer["usage"]["kv"]["held_share"])

    async def watch():
        while True:
            running.append((await serving.metrics(port))["pliant_requests_running"])
            await asyncio.sleep(0.5)

    before = await serving.metrics(port)
    watcher = asyncio.create_task(watch())
    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.monotonic() - start
    watcher.cancel()
    after = await serving.metrics(port)
    change = {name: after[f"pliant_{name}_total"] - before[f"pliant_{name}_total"]
              for name in ("preemptions", "kv_offloads", "kv_drops", "kv_returned_pages")}
    return {"right": right, "problems": len(problems), "seconds": seconds, "a_minute": 60 * right / seconds,
            "tokens_a_second": tokens / seconds, "held_share": serving.mean(held), "running": serving.mean(running),
            **change, "failures": failures}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pliant", default=os.path.join(ROOT, "build/release/pliant"))
    parser.add_argument("--model", default=os.path.join(DATA, "models/reckoner-q8_0.gguf"))
    parser.add_argument("--problems", default=os.path.join(DATA, "problems/reckoner.jsonl"))
    parser.add_argument("--level", default="hard")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--sequences", type=float, default=4, help="whole mean sequences that the pool holds")
    parser.add_argument("--policies", default="full,pliant:grow")
    parser.add_argument("--exact-store", default="ram:1GiB")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    problems = read_problems(args)
    out = {}
    with tempfile.TemporaryDirectory(prefix="pliant-reckoner-", ignore_cleanup_errors=True) as folder:
        tokens = serving.mean([p["prompt_len"] + p["cot_len"] for p in problems])
        pool = int(args.sequences * block_bytes(args, folder) * (tokens / 32 + 1))
        print(f"{len(problems)} {args.level} problems, {args.clients} clients, pool {pool / 2**20:.1f} MiB "
              f"({args.sequences:g} whole sequences)", flush=True)
        for name in args.policies.split(","):
            policy, _, capacity = name.partition(":")
            store = ["--exact-store", args.exact_store] if policy in ("pliant", "elastic", "offload") else []
            server = serving.Server(
                args.pliant, [args.model, "--policy", policy, "--kv-memory", str(pool), "--max-running", str(args.clients),
                              "--no-prefix-cache", *store], os.path.join(folder, policy + ".log"))
            try:
                result = asyncio.run(solve(server.port, problems, args.clients, capacity))
            finally:
                server.stop()
            out[name] = result
            print(f"{name:16} {result['right']:3d}/{result['problems']} right, {result['a_minute']:6.1f} solved a minute, "
                  f"{result['tokens_a_second']:7.1f} tokens/s, {result['seconds']:6.1f} s, running {result['running']:.1f}, "
                  f"held {100 * result['held_share']:.0f} %, preempted {result['preemptions']:.0f}, "
                  f"dropped {result['kv_drops']:.0f}, returned {result['kv_returned_pages']:.0f}"
                  + (f"; {result['failures'][0]}" if result["failures"] else ""), flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
