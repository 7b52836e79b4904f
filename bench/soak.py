#!/usr/bin/env python3
"""A soak of the real server: random requests, random leaving, bad requests, a tiny pool and a small exact store.

Half of the time with the prefix cache, half without. At the end every gauge must be back: nothing running, waiting, open or under
way; every page free or held by the prefix cache alone (without it: all free and the exact store empty). Meanwhile one client asks
the same greedy question with kv.min_bits 16 again and again: the answer must never change. Exit code 1 and a list of what is wrong
when something is.

    python3 bench/soak.py --minutes 10
"""
import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter

import serving

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORDS = "the boat left early and nobody knew why because every net was torn while rain fell on the harbour wall".split()
PROBE = {"prompt": [504 + 7 * i for i in range(150)], "max_tokens": 24, "temperature": 0, "ignore_eos": True,
         "kv": {"min_bits": 16}}

# What is wrong with it, path, body, the status it must get.
BAD = [
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b"[]", 400),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400),
    ("/v1/completions", b"\xff\xfe", 400),
    ("/v1/completions", {}, 400),
    ("/v1/completions", {"prompt": ""}, 400),
    ("/v1/completions", {"prompt": []}, 400),
    ("/v1/completions", {"prompt": [[]]}, 400),
    ("/v1/completions", {"prompt": [-1]}, 400),
    ("/v1/completions", {"prompt": [10 ** 9]}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10 ** 9}, 400),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400),
    ("/v1/completions", {"prompt": "x", "top_p": 2}, 400),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400),
    ("/v1/completions", {"prompt": "x", "n": 1000}, 400),
    ("/v1/completions", {"prompt": "x", "stop": [""]}, 400),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"abc": 1}}, 400),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 1000}}, 400),
    ("/v1/completions", {"prompt": "x", "kv": {"min_bits": 7}}, 400),
    ("/v1/completions", {"prompt": "x", "model": "another"}, 404),
    ("/v1/completions", {"prompt": "x " * 20000}, 400),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"-1": 1}}, 400),
    ("/nowhere", {"prompt": "x"}, 404),
    ("/metrics", {"prompt": "x"}, 405),
]


class Soak:
    def __init__(self, port, args, seed):
        self.port, self.args = port, args
        self.rng = random.Random(seed)
        self.counts, self.faults = Counter(), []
        self.probe_answer = None

    def fault(self, what):
        self.counts["FAULT"] += 1
        if len(self.faults) < 20:
            self.faults.append(what)

    # ---- what is asked ------------------------------------------------------------------------------------------------------
    def fields(self):
        r = self.rng
        choices = [
            ("temperature", lambda: r.choice([0, 0.00001, 0.3, 1, 2, 100])), ("top_p", lambda: r.choice([0.000001, 0.5, 0.95, 1])),
            ("top_k", lambda: r.choice([-1, 0, 1, 5, 100000])), ("min_p", lambda: r.choice([0, 0.05, 1])),
            ("presence_penalty", lambda: r.uniform(-2, 2)), ("frequency_penalty", lambda: r.uniform(-2, 2)),
            ("repetition_penalty", lambda: r.choice([0.1, 1, 1.2, 10])), ("seed", lambda: r.randrange(-2 ** 62, 2 ** 62)),
            ("stop", lambda: r.sample([".", "\n", "the", " a", "zq"], r.randint(1, 4))),
            ("stop_token_ids", lambda: [r.randrange(49000) for _ in range(r.randint(0, 5))]),
            ("ignore_eos", lambda: r.random() < 0.5), ("logit_bias", lambda: {str(r.randrange(49000)): r.uniform(-100, 100)
                                                                              for _ in range(r.randint(0, 8))}),
            ("skip_special_tokens", lambda: r.random() < 0.5), ("kv", lambda: {"min_bits": r.choice([4, 8, 16])}),
            ("cache_salt", lambda: r.choice(["", "a", "b"])), ("priority", lambda: r.randint(-3, 3)),
            ("user", lambda: "somebody")]
        return {name: make() for name, make in r.sample(choices, r.randint(0, 8))}

    def good(self):
        """Path and body of a request that must be served."""
        r = self.rng
        body = self.fields()
        body["max_tokens"] = r.choice([1, 2, 8, 30, 100])
        length = min(int(r.expovariate(1 / 150)) + 1, 900)
        if r.random() < 0.4:
            body["messages"] = [{"role": "user", "content": " ".join(r.choice(WORDS) for _ in range(length))}]
            if r.random() < 0.3:
                body.update(logprobs=True, top_logprobs=r.randint(0, 5))
            path = "/v1/chat/completions"
        else:
            shared = r.choice([0, 0, 64, 200])  # a common start, for the prefix cache
            body["prompt"] = [1000 + i for i in range(shared)] + [r.randrange(1000, 49000) for _ in range(length)]
            path = "/v1/completions"
        if r.random() < 0.1:
            body["n"] = r.randint(2, 3)
        return path, body

    # ---- one turn of a client -----------------------------------------------------------------------------------------------
    async def whole(self):
        path, body = self.good()
        status, answer = await serving.request(self.port, "POST", path, body)
        self.expect(status, answer, body)

    async def stream_whole(self):
        path, body = self.good()
        body["stream"] = True
        async with serving.Stream(self.port, path, body) as stream:
            ends = 0
            async for _, event in stream.events():
                if "error" in event and event["error"].get("code") != "out_of_memory":
                    self.fault(f"stream: {event}")
                ends += sum(1 for c in event.get("choices", []) if c.get("finish_reason"))
        self.expect(stream.status, stream.error, body)
        self.counts["choices ended"] += ends

    async def stream_left(self):
        path, body = self.good()
        body["stream"] = True
        left = self.rng.randint(0, 20)
        async with serving.Stream(self.port, path, body) as stream:
            if left == 0:
                await asyncio.sleep(self.rng.random() * 0.5)
            else:
                async for _ in stream.events():
                    left -= 1
                    if left == 0:
                        break
            if self.rng.random() < 0.5:
                stream.reset()
        self.counts["streams left"] += 1

    async def whole_left(self):
        path, body = self.good()
        try:
            await serving.request(self.port, "POST", path, body, timeout=self.rng.random())
        except asyncio.TimeoutError:
            pass
        self.counts["answers left"] += 1

    async def upload_left(self):
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{\"prompt\": \"")
        await writer.drain()
        await asyncio.sleep(self.rng.random() * 0.1)
        writer.transport.abort()
        self.counts["uploads left"] += 1

    async def bad(self):
        path, body, wanted = self.rng.choice(BAD)
        status, answer = await serving.request(self.port, "POST", path, body)
        self.counts[f"bad: {status}"] += 1
        if status != wanted:
            self.fault(f"{path} {str(body)[:80]}: {status} in place of {wanted}: {answer[:200]!r}")
        elif b'"error"' not in answer:
            self.fault(f"{path} {str(body)[:80]}: no JSON error: {answer[:200]!r}")

    async def look(self):
        path = self.rng.choice(["/metrics", "/v1/kv", "/health", "/v1/models"])
        status, _ = await serving.request(self.port, "GET", path)
        if status != 200:
            self.fault(f"{path}: {status}")

    def expect(self, status, answer, body):
        self.counts[f"good: {status}"] += 1
        if status not in (200, 429, 503):
            self.fault(f"a good request got {status}: {answer[:300]!r} for {json.dumps(body)[:200]}")

    async def client(self, deadline):
        turns = [self.whole] * 4 + [self.stream_whole] * 6 + [self.stream_left] * 5 + [self.whole_left] * 3 + [
            self.upload_left, self.bad, self.bad, self.bad, self.look]
        while time.monotonic() < deadline:
            try:
                await self.rng.choice(turns)()
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
                self.fault(f"a connection broke: {error!r}")

    async def prober(self, deadline):
        while time.monotonic() < deadline:
            await self.probe()
            await asyncio.sleep(1)

    async def probe(self):
        status, answer = await serving.request(self.port, "POST", "/v1/completions", PROBE)
        if status != 200:
            return self.counts.update(["probe not served"])
        text = json.loads(answer)["choices"][0]["text"]
        self.probe_answer = self.probe_answer if self.probe_answer is not None else text
        if text != self.probe_answer:
            self.fault(f"the exact answer changed: {self.probe_answer!r} to {text!r}")
        self.counts["exact answers compared"] += 1

    # ---- the end ------------------------------------------------------------------------------------------------------------
    async def check_rest(self, prefix_cache, descriptors, server):
        wrong = []
        for _ in range(300):
            m = await serving.metrics(self.port)
            _, kv = await serving.request(self.port, "GET", "/v1/kv")
            kv = json.loads(kv)
            page = kv["pages"]["bytes"]
            g = lambda name: int(m["pliant_" + name])  # noqa: E731
            at_rest = {
                "running": g("requests_running"), "waiting": g("requests_waiting"), "offloaded": kv["offloaded"],
                "requests listed": len(kv["requests"]), "open requests": g("http_requests_open"),
                "open streams": g("http_streams_open"), "body bytes held": g("http_body_bytes_held"),
                "connections besides this one": g("http_connections") - 1,
                "pages neither free nor cached": g("kv_pages") - g("kv_pages_free") - g("kv_pages_cached"),
                "pages fenced": kv["pages"]["fenced"], "pages of copies under way": kv["pages"]["copying"],
                "bytes used beyond the cached pages": g("kv_bytes_used") - g("kv_pages_cached") * page,
                "blocks not cached": kv["blocks"]["total"] - kv["blocks"]["cached"],
                # A cached block has at most eight planes in the store.
                "store bytes beyond those of cached blocks": max(0, g("exact_store_bytes_used") - 8 * page * kv["blocks"]["cached"]),
                "store bytes over its budget": max(0, g("exact_store_bytes_used") - g("exact_store_bytes")),
                "ready": 1 - g("ready"),
            }
            if not prefix_cache:
                at_rest["pages not free"] = g("kv_pages") - g("kv_pages_free")
                at_rest["store bytes"] = g("exact_store_bytes_used")
                at_rest["blocks"] = kv["blocks"]["total"]
            at_rest["file descriptors beyond those at the start"] = max(0, server.descriptors() - descriptors - 1)
            wrong = [f"{name}: {value}" for name, value in at_rest.items() if value != 0]
            if not wrong:
                break
            await asyncio.sleep(0.2)
        print("  at rest: " + ("every gauge is back" if not wrong else "; ".join(wrong)))
        print("  " + ", ".join(f"{name} {int(m['pliant_' + name + '_total'])}" for name in (
            "requests_admitted", "requests_finished", "requests_cancelled", "requests_failed", "requests_rejected", "preemptions",
            "kv_offloads", "kv_demotions", "kv_restores", "tokens_below_16_bits", "generated_tokens")))
        self.faults += wrong
        answers = await asyncio.gather(*(serving.request(self.port, "POST", "/v1/completions",
                                                         {"prompt": [1000 + i], "max_tokens": 4}) for i in range(8)))
        if any(status != 200 for status, _ in answers):
            self.faults.append(f"eight requests at the end: {[status for status, _ in answers]}")
        await self.probe()

    async def run(self, seconds, prefix_cache, server):
        await self.probe()
        descriptors, start = server.descriptors(), time.monotonic()
        deadline = start + seconds

        async def watch_memory():
            for share in (0.25, 0.5, 0.75, 1.0):
                await asyncio.sleep(max(0.0, start + share * seconds - time.monotonic()))
                print(f"  {share:.0%}: {server.resident_bytes() / 2**20:.0f} MiB anonymous, {sum(self.counts.values())} turns", flush=True)

        await asyncio.gather(watch_memory(), self.prober(deadline), *(self.client(deadline) for _ in range(self.args.clients)))
        await self.check_rest(prefix_cache, descriptors, server)
        print("  " + ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pliant", default=os.path.join(ROOT, "build/release/pliant"))
    parser.add_argument("--model", nargs="*", default=[], help="path and options of the model (default: SmolLM2)")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kv-memory", default="40MiB")
    parser.add_argument("--exact-store", default="ram:24MiB", help="or file:PATH:SIZE")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    failed = False
    for prefix_cache in (True, False):
        with tempfile.TemporaryDirectory(prefix="pliant-soak-") as folder:
            log = os.path.join(folder, "server.log")
            server = serving.Server(args.pliant, [
                *args.model, "--kv-memory", args.kv_memory, "--exact-store", args.exact_store, "--kv-floor", "4", "--max-running", "12",
                "--max-queue", "24", *([] if prefix_cache else ["--no-prefix-cache"])], log)
            print(f"{'with' if prefix_cache else 'without'} the prefix cache, {args.minutes / 2:g} minutes", flush=True)
            soak = Soak(server.port, args, args.seed + prefix_cache)
            try:
                asyncio.run(soak.run(args.minutes * 30, prefix_cache, server))
            finally:
                code = server.stop()
            with open(log, encoding="utf-8", errors="replace") as file:
                soak.faults += [line.strip() for line in file if "error" in line.lower()][:10]
            if code != 0:
                soak.faults.append(f"the server's exit code is {code}")
            for fault in soak.faults:
                print("  WRONG: " + fault)
            failed = failed or bool(soak.faults)
    print("something is wrong" if failed else "nothing is wrong")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
