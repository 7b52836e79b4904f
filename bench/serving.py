"""What bench/pressure.py and bench/soak.py share: a `pliant serve` process, its /metrics, and a small HTTP client.

Python's standard library only. One asyncio loop; a connection carries one request.
"""
import asyncio
import json
import os
import re
import signal
import subprocess
import time


class Server:
    """A running `pliant serve` on a free port of 127.0.0.1."""

    def __init__(self, binary, arguments, log_path):
        self.log = open(log_path, "wb")
        self.process = subprocess.Popen(
            [binary, "serve", *arguments, "--port", "0"],
            stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if found is None:
            self.stop()
            raise SystemExit(f"pliant serve did not start ({line.strip()!r}); see {log_path}")
        self.port = int(found.group(1))

    def stop(self):
        """Ends the process; its exit code, or None when it had to be killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                return None
        self.log.close()
        return self.process.returncode

    def resident_bytes(self):
        """Anonymous and swapped memory of the process (what a leak would grow)."""
        total = 0
        with open(f"/proc/{self.process.pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("RssAnon:", "VmSwap:")):
                    total += int(line.split()[1]) * 1024
        return total

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def parse_metrics(text):
    """Prometheus text to {"name" or "name{labels}": value}."""
    values = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    return values


async def request(port, method, path, body=None, timeout=600):
    """One request on its own connection: (status, body bytes)."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: pliant\r\nConnection: close\r\n"
                     f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(), timeout)
    finally:
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionError("the connection was closed without an answer")
    status = int(head.split()[1])
    if b"transfer-encoding: chunked" in head.lower():
        rest = dechunk(rest)
    return status, rest


def dechunk(data):
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            break
        out, data = out + data[:count], data[count + 2:]
    return out


async def metrics(port):
    status, body = await request(port, "GET", "/metrics", timeout=60)
    if status != 200:
        raise ConnectionError(f"/metrics answered {status}")
    return parse_metrics(body.decode())


class Stream:
    """A streamed completion: `status`, then events one by one with the time at which they came."""

    def __init__(self, port, path, body):
        self.port, self.path, self.body = port, path, body
        self.status = None
        self.error = b""  # the body of an answer that is no stream

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(self.body).encode()
        self.writer.write(f"POST {self.path} HTTP/1.1\r\nHost: pliant\r\nConnection: close\r\n"
                          f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await self.writer.drain()
        return self

    async def __aexit__(self, *_):
        self.writer.close()

    def reset(self):
        """Closes the connection at once, without a goodbye."""
        self.writer.transport.abort()

    async def events(self):
        head = await self.reader.readuntil(b"\r\n\r\n")
        self.status = int(head.split()[1])
        if self.status != 200:
            self.error = await self.reader.read()
            return
        async for line in self.reader:
            if line.startswith(b"data: "):
                now = time.monotonic()
                text = line[6:].strip()
                if text == b"[DONE]":
                    return
                yield now, json.loads(text)


def percentile(values, share):
    """Nearest rank; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def mean(values):
    return sum(values) / len(values) if values else 0.0
