"""What the power limit does to kernels that stream memory: their time in bursts and without a pause, and the clock meanwhile.

    python benchmarks/power_limit.py [OUT.json]        (needs a GPU and nvidia-smi; a minute and a half)

A product of a weight of 28672 x 4096 or 4096 x 4096 with 1 to 256 rows, its weights read anew each time, and with `sgl_kernel` decode
attention. In bursts: two replays of a graph of 12 calls and more, 0.3 s apart, the median of five (3 % of which is the way out of the
pause). Without a pause: the same for two seconds. Printed and written: microseconds a call, the SM clock (MHz), watts and degrees in the
second half. One H200's are in validation/calibration/1x-h200-power-limit.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SHAPES, ROWS = ((28672, 4096), (4096, 4096)), (1, 8, 32, 64, 128, 192, 256)
SEQUENCES = ((1, 32768), (32, 1024), (128, 1024), (256, 1024))
SECONDS, WEIGHTS = 2.0, 3e9  # without a pause; bytes that a graph reads
LOOK = [
    "nvidia-smi",
    "--query-gpu=clocks.sm,power.draw,temperature.gpu",
    "--format=csv,noheader,nounits",
    "-lms",
    "100",
]


def main() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no GPU: there is no power limit to look for")
    torch.cuda.set_device(0)
    torch.set_grad_enabled(False)
    looks: list[tuple[float, str]] = []
    smi = subprocess.Popen(LOOK, stdout=subprocess.PIPE, text=True)

    def watch() -> None:
        for line in smi.stdout or ():
            looks.append((time.time(), line.strip()))

    threading.Thread(target=watch, daemon=True).start()
    found: dict[str, Any] = {}

    def measure(name: str, calls: list[Callable[[], object]]) -> None:
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()

        def microseconds(replays: int) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / replays / len(calls) * 1e3

        microseconds(1)
        bursts = []
        for _ in range(5):
            time.sleep(0.3)
            bursts.append(microseconds(2))
        burst, begin, series = statistics.median(bursts), time.time(), []
        replays = max(1, int(0.1 / (burst * 1e-6 * len(calls))))
        while time.time() < begin + SECONDS:
            series.append(microseconds(replays))
        seen = [look for at, look in looks if at > begin + SECONDS / 2]
        found[name] = {
            "burst": round(burst, 3),
            "series": [round(t, 3) for t in series[:4] + series[-4:]],
            "looks": seen[-4:],
        }
        print(
            f"{name}: {burst:.1f} us in bursts, {statistics.median(series[-6:]):.1f} without a pause; MHz, W, C: {seen[-1:]}"
        )

    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    for n, k in SHAPES:
        weights = [torch.randn(n, k, **like) * k**-0.5 for _ in range(max(12, int(WEIGHTS / (2 * n * k))))]
        for rows in ROWS:
            x, y = torch.randn(rows, k, **like), torch.empty(rows, n, **like)
            measure(f"{n}x{k} rows {rows}", [partial(torch.mm, x, w.t(), out=y) for w in weights])
        del weights
    for batch, context in SEQUENCES:
        measure(f"attention {batch}x{context}", _attention(batch, context) * 6)
    smi.kill()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _attention(batch: int, tokens: int) -> list[Callable[[], object]]:
    """Calls of the decode attention that calibration chooses, over three caches in turn."""
    import torch
    from specsim.calibration import attention
    from specsim.calibration.context import Context

    context = Context(0, 1, 0, torch.device("cuda", 0), False, {})
    params = attention._case(attention.GQA, batch, tokens, 1).params
    inputs = [attention._inputs(context, "gqa", params) for _ in range(3)]
    make, _ = attention._choose(context, "gqa", params, inputs[0])
    return [make(i) for i in inputs]


if __name__ == "__main__":
    main()
