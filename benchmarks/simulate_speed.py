"""Speed of the simulator: requests a second on one core, memory, and how both grow with the number of requests.

    python benchmarks/simulate_speed.py [--requests 1000000] [--vidur-python PATH]

Load: 4,096 input and 256 output tokens, 32 requests in flight, on Llama-3.1-8B and one H200, with and without EAGLE-3 (4
draft tokens, accept rate 0.6), as SGLang and as vLLM schedule. Compiling (once a machine, then cached) is not counted;
drawing requests and collecting metrics is. Times are CPU seconds of one thread, wall seconds beside them; memory is the
largest resident set of a process of its own.

Beside them in the same run: Vidur (benchmarks/peer_vidur.py), where an interpreter can import it, as one from an environment of
its own with `pip install vidur` can. AISimulate is not run: its package on PyPI only points to wheels of another index.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

CASES = [("sglang", "none"), ("vllm", "none"), ("sglang", "eagle3"), ("vllm", "eagle3")]


def measure(engine: str, method: str, requests: int, compiled: bool) -> dict[str, float]:
    """One run in this process."""
    from specsim.prediction import machine_of
    from specsim.scenarios import build
    from specsim.simulation import simulate
    from specsim.simulation_costs import server_of
    from specsim.workload import Lengths, synthetic

    options = {} if method == "none" else {"draft_tokens": 4, "accept_rate": 0.6}
    s = build(model="Llama-3.1-8B", hardware="1x-h200", engine=engine, method=method, **options)
    server = server_of(s, machine_of(s), concurrency=32)

    def run(n: int) -> None:
        simulate(server, synthetic(n, Lengths(4096), Lengths(256)), concurrency=32, compiled=compiled)

    run(33)  # compile, or load what was compiled
    cpu, wall = time.process_time(), time.perf_counter()
    run(requests)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cpu_s": cpu, "wall_s": wall, "peak_mb": peak / 1e6}


def apart(*arguments: object) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def vidur(python: str, requests: int) -> str:
    """A line of the table, or why there is none."""
    command = [python, str(Path(__file__).with_name("peer_vidur.py")), str(requests)]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1]
        return f"vidur: not measured, {python} does not run it ({said}); give --vidur-python"
    r = json.loads(done.stdout.strip().splitlines()[-1])
    return f"vidur           {'constant':9} {requests:9,} {requests / r['cpu_s']:17,.0f} {requests / r['wall_s']:9,.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of the longest run")
    parser.add_argument("--vidur-python", default=sys.executable, metavar="PATH", help="an interpreter with vidur")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        engine, method, requests, compiled = arguments.one
        print(json.dumps(measure(engine, method, int(requests), compiled == "True")))
        return
    n = arguments.requests
    print(f"{'engine':7} {'method':7} {'path':9} {'requests':>9} {'requests/s (CPU)':>17} {'(wall)':>9} {'peak MB':>8}")
    for engine, method in CASES:
        runs = [(n // 100, True), (n // 10, True), (n // 500, False)]
        if (engine, method) == CASES[2]:
            runs.insert(2, (n, True))
        for requests, compiled in runs:
            r = apart(engine, method, requests, compiled)
            path = "numba" if compiled else "plain"
            print(
                f"{engine:7} {method:7} {path:9} {requests:9,} {requests / r['cpu_s']:17,.0f} {requests / r['wall_s']:9,.0f} {r['peak_mb']:8.0f}",
                flush=True,
            )
    print(vidur(arguments.vidur_python, max(n // 2000, 50)))


if __name__ == "__main__":
    main()
