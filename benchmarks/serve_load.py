"""The planner page under load: requests a second on one core, how long they take, and whether memory grows.

    python benchmarks/serve_load.py [--rate 200] [--seconds 60] [--at-once] [--json]

`specsim serve` runs as a process of its own on one core, this client on another. Requests are slider moves on eight pages, each
of another model and box, no two alike, so that no answer comes from a cache (what a cycle costs does in a quarter of them: when
the acceptance alone moves); with --at-once every move sets all sliders anew, and nothing does. They are sent when they are due whether or not
earlier ones were answered, and a latency counts from when its request was due. Memory is the server's resident set after
a warm-up of 1,000 requests and at the end. Beside them: CPU seconds a request took in the server, and what the machine did
otherwise (load average), since a busy machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLACES = [
    {"model": "Kimi-K2.5", "hardware": "8x-pcie-field"},
    {"model": "Kimi-K2.6", "hardware": "8x-rtx-pro-6000"},
    {"model": "DeepSeek-V3", "hardware": "8x-h200", "method": "mtp"},
    {"model": "Qwen3-235B-A22B", "hardware": "8x-h100"},
    {"model": "Llama-3.1-8B", "hardware": "1x-h200"},
    {"model": "Llama-3.3-70B", "hardware": "8x-a100", "engine": "vllm"},
    {"model": "gpt-oss-120b", "hardware": "8x-h100"},
    {"model": "Qwen3-30B-A3B", "hardware": "2x-h200"},
]
SLIDERS = {
    "batch": [str(n) for n in range(1, 65)],
    "context": [str(n) for n in range(256, 32_769, 256)],
    "draft-tokens": [str(n) for n in range(2, 9)],
    "accept-rate": [f"0.{n:02}" for n in range(5, 96)],
}
DRAG = 8  # values that a slider is dragged over
WARM_UP = 1000
CONNECTIONS = 64


def moves(at_once: bool = False) -> Iterator[dict[str, str]]:
    """Options of slider moves, no two alike: on each of the eight pages somebody drags one slider over a few values, then
    the next. at_once: every move sets all four."""
    rng = random.Random(0)
    pages = [{**place, **{name: rng.choice(values) for name, values in SLIDERS.items()}} for place in PLACES]
    seen = set()
    for slider in itertools.cycle(SLIDERS):
        for _, page in itertools.product(range(DRAG), pages):
            for name in SLIDERS if at_once else (slider,):
                page[name] = rng.choice(SLIDERS[name])
            if (move := tuple(page.items())) not in seen:
                seen.add(move)
                yield dict(page)


def pinned(core: int | None) -> Any:
    return None if core is None else lambda: os.sched_setaffinity(0, {core})


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("nan")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Client:
    """Connections that are kept open, each serving one request at a time."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.free: asyncio.LifoQueue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.LifoQueue()

    async def open(self, n: int) -> None:
        for _ in range(n):
            self.free.put_nowait(await asyncio.open_connection(self.host, self.port))

    async def ask(self, options: dict[str, str]) -> int:
        """The status of one prediction, its body read."""
        body = json.dumps({"options": options}).encode()
        head = f"POST /predict HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        reader, writer = await self.free.get()
        if reader.at_eof():  # idle for longer than the server keeps a connection
            writer.close()
            reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in answer.split(b"\r\n")[1:] if b": " in line)
        await reader.readexactly(int(fields[b"content-length"]))
        self.free.put_nowait((reader, writer))
        return int(answer.split(b" ", 2)[1])


async def load(
    client: Client, pid: int, rate: float, seconds: float, options: Iterator[dict[str, str]]
) -> dict[str, Any]:
    await client.open(CONNECTIONS)
    for one in itertools.islice(options, WARM_UP):
        await client.ask(one)
    before, cpu = resident_mb(pid), cpu_seconds(pid)
    took: list[float] = []
    statuses: list[int] = []

    async def one(due: float, move: dict[str, str]) -> None:
        statuses.append(await client.ask(move))
        took.append((time.perf_counter() - due) * 1e3)

    start = time.perf_counter()
    running = []
    for i in range(round(rate * seconds)):
        due = start + i / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        running.append(asyncio.create_task(one(due, next(options))))
    await asyncio.gather(*running)
    elapsed = time.perf_counter() - start
    spent = cpu_seconds(pid) - cpu
    cuts = statistics.quantiles(took, n=100)
    return {
        "requests": len(took),
        "failed": sum(status != 200 for status in statuses),
        "rate_per_s": round(len(took) / elapsed, 1),
        "p50_ms": round(cuts[49], 1),
        "p95_ms": round(cuts[94], 1),
        "p99_ms": round(cuts[98], 1),
        "longest_ms": round(max(took), 1),
        "cpu_ms_per_request": round(spent / len(took) * 1e3, 2),
        "busy": round(spent / elapsed, 2),
        "resident_before_mb": round(before, 1),
        "resident_after_mb": round(resident_mb(pid), 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--at-once", action="store_true", help="every move sets all sliders")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    server_core, client_core = (cores[0], cores[-1]) if len(cores) > 1 else (None, None)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "specsim", "serve", "--port", "0", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=pinned(server_core)
    )
    assert process.stdout is not None
    if client_core is not None:
        os.sched_setaffinity(0, {client_core})
    try:
        text = ""
        while "}" not in text:
            text += process.stdout.readline()
        host, _, port = json.loads(text)["address"].removeprefix("http://").rstrip("/").rpartition(":")
        client, options = Client(host, int(port)), moves(arguments.at_once)
        found = asyncio.run(load(client, process.pid, arguments.rate, arguments.seconds, options))
    finally:
        process.terminate()
        process.wait()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:22} {value}")


if __name__ == "__main__":
    main()
