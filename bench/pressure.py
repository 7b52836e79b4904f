#!/usr/bin/env python3
"""Serving under KV pressure: the real server, several policies in one run.

Starts one `pliant serve` a policy, each with a KV pool for about --sequences of the mean request, and plays the same requests
against each in turn: they arrive at random times (--rate a second), each is sent by the first of --clients clients that is free, prompts are 1,000 to 2,000 made-up tokens. Time to first token is measured at the client from the moment it
sends. --sweep plays several loads, to find the one at which a policy saturates; --load 1.15 finds it first: so many times the requests a second
that the first policy completes while all clients ask without a pause. --sequences 36 makes memory ample.

    python3 bench/pressure.py                                                       (about 5 minutes on two cores)
    python3 bench/pressure.py --sequences 36 --policies full,elastic                (ample memory)
    python3 bench/pressure.py --sweep 0.3,0.4,0.5 --policies full,elastic,pliant:4
    python3 bench/pressure.py --load 1.15 --requests 48                             (about 12 minutes)
"""
import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time

import serving

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COUNTERS = ["preemptions", "kv_offloads", "kv_demotions", "kv_restores", "tokens_below_16_bits"]


def make_plan(args, rate, seed, requests):
    """The requests in order: (seconds from the start, prompt, output tokens). The same for every policy."""
    rng = random.Random(seed)
    at, plan = 0.0, []
    for index in range(requests):
        # One in each interval of 1/rate, at any moment of it; a Poisson process clusters so much that short runs say little.
        at = at + rng.expovariate(rate) if args.poisson else (index + rng.random()) / rate
        prompt = [rng.randrange(1000, args.vocabulary) for _ in range(rng.randint(*args.prompt))]
        plan.append((at, prompt, rng.randint(*args.output)))
    return plan


class Part:
    """What the clients and /metrics saw of one policy under one load."""

    def __init__(self):
        self.ttft, self.gaps, self.latency = [], [], []
        self.ends = []
        self.tokens, self.failed, self.first_error = 0, 0, ""
        self.seconds = 0.0
        self.running, self.waiting = [], []
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.lowest = 16

    def add(self, other):
        for name in ("ttft", "gaps", "latency", "running", "waiting"):
            getattr(self, name).extend(getattr(other, name))
        for name in ("tokens", "failed", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in COUNTERS:
            self.counters[name] += other.counters[name]
        self.first_error = self.first_error or other.first_error
        self.lowest = min(self.lowest, other.lowest)

    def summary(self):
        return {
            "requests": len(self.ttft) + self.failed, "failed": self.failed,
            "ttft_mean_s": serving.mean(self.ttft), "ttft_p50_s": serving.percentile(self.ttft, 0.5),
            "ttft_p90_s": serving.percentile(self.ttft, 0.9),
            "itl_mean_ms": 1e3 * serving.mean(self.gaps), "itl_p99_ms": 1e3 * serving.percentile(self.gaps, 0.99),
            "latency_mean_s": serving.mean(self.latency),
            "tokens_per_s": self.tokens / self.seconds if self.seconds else 0.0,
            "running_mean": serving.mean(self.running), "waiting_mean": serving.mean(self.waiting),
            "lowest_bits": self.lowest, "seconds": self.seconds, **self.counters}


async def ask(port, prompt, output, part):
    sent = time.monotonic()
    first = last = None
    body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True,
            "logprobs": 0,  # so that every token comes in a chunk of its own, whatever its text
            "stream_options": {"include_usage": True}}
    stream = serving.Stream(port, "/v1/completions", body)
    usage = None
    try:
        async with stream:
            async for now, event in stream.events():
                if event.get("usage"):
                    usage = event["usage"]
                if "error" in event:
                    stream.error = json.dumps(event).encode()
                if not event.get("choices"):
                    continue
                if first is None:
                    first = now
                else:
                    part.gaps.append(now - last)
                last = now
    except (OSError, asyncio.IncompleteReadError) as error:
        stream.error = repr(error).encode()
    if first is None or usage is None or stream.error:
        part.failed += 1
        part.first_error = part.first_error or stream.error.decode(errors="replace")[:300]
        return
    part.ttft.append(first - sent)
    part.latency.append(last - sent)
    part.ends.append(last)
    part.tokens += usage["completion_tokens"]
    part.lowest = min(part.lowest, usage["kv"]["lowest_k_bits"], usage["kv"]["lowest_v_bits"])


async def play(port, plan, clients):
    part = Part()
    before = await serving.metrics(port)
    start = time.monotonic()

    todo = iter(plan)

    async def client():
        for at, prompt, output in todo:  # shared: each takes the next
            await asyncio.sleep(max(0.0, start + at - time.monotonic()))
            await ask(port, prompt, output, part)

    async def watch():
        while True:
            now = await serving.metrics(port)
            part.running.append(now["pliant_requests_running"])
            part.waiting.append(now["pliant_requests_waiting"])
            await asyncio.sleep(0.25)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(client() for _ in range(clients)))
    part.seconds = time.monotonic() - start
    watcher.cancel()
    after = await serving.metrics(port)
    for name in COUNTERS:
        part.counters[name] = int(after[f"pliant_{name}_total"] - before[f"pliant_{name}_total"])
    return part


def bytes_per_token(args, folder):
    """Asks a server: a pool of a known size says how many tokens it holds."""
    server = serving.Server(args.pliant, [*args.model, "--kv-memory", "64MiB", "--policy", "full"],
                            os.path.join(folder, "probe.log"))
    try:
        _, body = asyncio.run(serving.request(server.port, "GET", "/v1/kv"))
    finally:
        server.stop()
    return 8 * json.loads(body)["pages"]["bytes"] / 32  # a block: 8 pages, 32 tokens


def start_servers(args, policies, pool, folder):
    servers = {}
    for name in policies:
        policy, _, floor = name.partition(":")
        servers[name] = serving.Server(
            args.pliant,
            [*args.model, "--policy", policy, "--kv-memory", str(pool), "--max-running", str(args.clients),
             *(["--exact-store", args.exact_store] if args.exact_store != "auto" else []),
             *(["--kv-floor", floor] if floor else [])],
            os.path.join(folder, name.replace(":", "-") + ".log"))
    return servers


def saturated_rate(args, policy, pool, folder):
    """Requests a second that a policy completes while more wait: from the first that ends to the last that ends with a full house."""
    server = start_servers(args, [policy], pool, folder)[policy]
    try:
        plan = [(0.0, prompt, output) for _, prompt, output in make_plan(args, 1.0, args.seed + 1000, args.probe)]
        part = asyncio.run(play(server.port, plan, args.clients))
    finally:
        server.stop()
    ends = sorted(part.ends)
    last = len(ends) - int(args.sequences)  # after it fewer run than memory has room for
    if last < 4:
        raise SystemExit(f"--load: only {len(ends)} of {args.probe} requests ended; ask for more with --probe")
    return (last - 1) / (ends[last - 1] - ends[0])


LINES = [("requests", "requests", "%d"), ("failed", "failed", "%d"), ("TTFT mean s", "ttft_mean_s", "%.2f"),
         ("TTFT P50 s", "ttft_p50_s", "%.2f"), ("TTFT P90 s", "ttft_p90_s", "%.2f"),
         ("ITL mean ms", "itl_mean_ms", "%.1f"), ("ITL P99 ms", "itl_p99_ms", "%.1f"),
         ("latency mean s", "latency_mean_s", "%.2f"), ("output tokens/s", "tokens_per_s", "%.1f"),
         ("running, mean", "running_mean", "%.1f"), ("waiting, mean", "waiting_mean", "%.1f"),
         ("preemptions", "preemptions", "%d"), ("offloads", "kv_offloads", "%d"), ("demotions", "kv_demotions", "%d"),
         ("restores", "kv_restores", "%d"), ("tokens below 16 bits", "tokens_below_16_bits", "%d"),
         ("lowest bits", "lowest_bits", "%d"), ("seconds", "seconds", "%.1f")]


def print_table(title, parts):
    print(f"\n{title}\n{'':24}" + "".join(f"{name:>12}" for name in parts))
    summaries = {name: part.summary() for name, part in parts.items()}
    for label, key, form in LINES:
        print(f"{label:24}" + "".join(f"{form % s[key]:>12}" for s in summaries.values()))
    base = next(iter(summaries.values()))["ttft_mean_s"]
    print(f"{'TTFT: first column / this':24}" + "".join(
        f"{base / max(s['ttft_mean_s'], 1e-9):>12.2f}"[-12:] for s in summaries.values()))
    for name, part in parts.items():
        if part.first_error:
            print(f"{name}: first failure: {part.first_error}")
    sys.stdout.flush()
    return summaries


def measure(args, policies, pool, rate, folder, label):
    """Rounds of one load, policies in turn, each round in another order; servers are started anew for each load."""
    servers = start_servers(args, policies, pool, folder)
    parts = {name: Part() for name in policies}
    try:
        for index in range(args.rounds):
            plan = make_plan(args, rate, args.seed + index, args.requests)
            order = policies if index % 2 == 0 else policies[::-1]
            for name in order:
                part = asyncio.run(play(servers[name].port, plan, args.clients))
                print(f"round {index + 1}, {name}: {part.seconds:.0f} s, mean TTFT {serving.mean(part.ttft):.2f} s",
                      file=sys.stderr, flush=True)
                parts[name].add(part)
    finally:
        codes = {name: server.stop() for name, server in servers.items()}
    for name, code in codes.items():
        if code != 0:
            raise SystemExit(f"{name}: the server ended with {code}; see {folder}")
    return print_table(label, parts)


def pair(text):
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pliant", default=os.path.join(ROOT, "build/release/pliant"))
    parser.add_argument("--model", nargs="*", default=[], help="path and options of the model (default: SmolLM2)")
    parser.add_argument("--vocabulary", type=int, default=49000, help="prompt token ids are below this")
    parser.add_argument("--policies", default="full,offload,elastic",
                        help="in the order of the table; NAME:BITS sets --kv-floor")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--requests", type=int, default=32, help="a round")
    parser.add_argument("--rounds", type=int, default=1, help="each in the other order")
    parser.add_argument("--prompt", type=pair, default=(1000, 2000))
    parser.add_argument("--output", type=pair, default=(400, 600))
    parser.add_argument("--sequences", type=float, default=6, help="of the mean request, that the pool holds at 16 bits")
    parser.add_argument("--rate", type=float, default=0.45, help="requests a second")
    parser.add_argument("--poisson", action="store_true", help="arrivals are a Poisson process")
    parser.add_argument("--sweep", default="", help="several rates in place of one")
    parser.add_argument("--load", type=float, default=0, help="in place of a rate: times what the first policy completes when saturated")
    parser.add_argument("--probe", type=int, default=20, help="requests by which --load finds that")
    parser.add_argument("--exact-store", default="ram:1GiB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    out = {}
    with tempfile.TemporaryDirectory(prefix="pliant-pressure-", ignore_cleanup_errors=True) as folder:
        each = bytes_per_token(args, folder) * (sum(args.prompt) + sum(args.output)) / 2
        policies = args.policies.split(",")
        rates = [float(r) for r in args.sweep.split(",") if r] or [args.rate]
        if args.load > 0:
            most = saturated_rate(args, policies[0], int(args.sequences * each), folder)
            rates = [round(args.load * most, 3)]
            print(f"{policies[0]} completes {most:.3f} requests/s when saturated", flush=True)
        for rate in rates:
            label = (f"{rate} requests/s, {args.clients} clients, pool {args.sequences * each / 2**20:.0f} MiB "
                     f"({args.sequences:g} mean requests)")
            out[f"rate {rate}"] = measure(args, policies, int(args.sequences * each), rate, folder, label)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
