"""Kernel profiles: a few steps under SGLang's profiler, and the table of kernels by name from its trace."""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from specsim.errors import InputError
from specsim.files import why
from specsim.live import Client, PointError, Served, ServerError, generate, prompts

STEPS = 5
GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_CATEGORIES = {"cuda_runtime", "cuda_driver"}


def profile(
    client: Client, served: Served, batch: int, context: int, timeout: float = 60.0, trace_s: float = 20.0
) -> dict[str, Any]:
    """The kernel table of a few steps of `batch` requests. Raises PointError when the server makes no trace here."""
    if served.engine != "sglang":
        raise PointError("only SGLang's profiler is driven")
    token_ids = prompts(batch, context)
    generate(client, served, token_ids, 8)  # the prefill goes to the prefix cache
    with tempfile.TemporaryDirectory(prefix="specsim-trace-") as folder:
        failure: list[Exception] = []

        def load() -> None:
            try:
                generate(client, served, token_ids, 400)
            except (PointError, ServerError) as error:
                failure.append(error)

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        time.sleep(0.4)  # past the prefill
        body = {
            "output_dir": folder,
            "num_steps": STEPS,
            "activities": ["GPU"],
            "with_stack": False,
            "record_shapes": False,
        }
        client.ask("POST", "/start_profile", body, timeout)
        thread.join(timeout)
        if failure:
            raise PointError(f"the profiled requests failed: {failure[0]}")
        deadline = time.monotonic() + trace_s
        traces: list[Path] = []
        while not traces and time.monotonic() < deadline:
            traces = sorted(Path(folder).rglob("*TP-0*.trace.json.gz")) or sorted(Path(folder).rglob("*.trace.json.gz"))
            time.sleep(0.3)
        if not traces:
            raise PointError("the profiler left no trace that can be read from here")
        table = kernel_table(traces[0])
    return {"batch": batch, "context": context, **table}


def events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace, one at a time: the file is never held whole. Raises InputError for another file."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            yield from _events(file, path)
    except (OSError, EOFError) as error:
        raise InputError(
            f"cannot be read: {why(error)}", where=str(path), mend="give a Chrome trace, plain or .gz"
        ) from None


def _events(file: IO[Any], path: Path, chunk: int = 1 << 20) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    buffer = ""
    while '"traceEvents"' not in buffer:
        more = file.read(chunk)
        if not more:
            raise InputError("has no traceEvents", where=str(path), mend="give a Chrome trace")
        buffer = buffer[-32:] + more
    buffer = buffer[buffer.index('"traceEvents"') :].partition("[")[2]
    at = 0
    while True:
        while at < len(buffer) and buffer[at] in " \n\r\t,":
            at += 1
        if at < len(buffer) and buffer[at] == "]":
            return
        try:
            event, at = decoder.raw_decode(buffer, at)
        except ValueError:
            more = file.read(chunk)
            if not more:
                return  # cut short: what was whole counts
            buffer, at = buffer[at:] + more, 0
            continue
        if isinstance(event, dict):
            yield event


def host_gaps(launches: dict[Any, tuple[object, float]]) -> dict[Any, float]:
    """Microseconds that the host took to get to each launch since the one before on its thread, by correlation.

    launches: by correlation, the host's thread and the time of the call in microseconds. One graph launch stands for
    many kernels, so in graphs this says little; eagerly it is what a kernel costs in the engine's own code.
    """
    last: dict[object, float] = {}
    gaps = {}
    for correlation, (thread, at) in sorted(launches.items(), key=lambda item: item[1][1]):
        if thread in last:
            gaps[correlation] = at - last[thread]
        last[thread] = at
    return gaps


def _host(gaps: list[float], steps: int) -> dict[str, float]:
    """The median, since now and then a launch waits for something else; and the sum, in which those waits are."""
    if not gaps:
        return {}
    return {"host_us": round(statistics.median(gaps), 3), "host_ms_per_step": round(sum(gaps) / steps / 1e3, 4)}


def kernel_table(path: Path, steps: int = STEPS) -> dict[str, Any]:
    """Kernels by name: count a step, mean microseconds, milliseconds a step, the host's microseconds before a launch.

    Raises InputError when it holds no kernel.

    The trace may hold a step more or less than asked for: the number as often as which most kernels ran is taken, since
    every step has some that run once, then the one that divides most counts.
    """
    durations: dict[str, list[float]] = defaultdict(list)
    correlations: dict[str, list[object]] = defaultdict(list)
    launches: dict[object, tuple[object, float]] = {}  # by correlation: the host's thread and time
    for event in events(path):
        if event.get("ph") != "X":
            continue
        correlation = (event.get("args") or {}).get("correlation")
        if event.get("cat") in GPU_CATEGORIES and isinstance(event.get("dur"), (int, float)):
            durations[str(event.get("name"))].append(float(event["dur"]))
            correlations[str(event.get("name"))].append(correlation)
        elif event.get("cat") in HOST_CATEGORIES and correlation is not None:
            launches[correlation] = (event.get("tid"), float(event.get("ts", 0.0)))
    if not durations:
        raise InputError("holds no GPU kernel", where=str(path), mend="profile with GPU activities on")
    ran = {c for seen in correlations.values() for c in seen}
    prepared = host_gaps({c: launch for c, launch in launches.items() if c in ran})
    counts = [len(d) for d in durations.values()]
    steps = max(
        (steps, steps + 1, steps - 1), key=lambda n: (counts.count(n), sum(c for c in counts if n and c % n == 0))
    )
    rows = [
        {
            "name": name[:160],
            "per_step": round(len(d) / steps, 3),
            "mean_us": round(statistics.fmean(d), 3),
            "ms_per_step": round(sum(d) / steps / 1e3, 4),
            **_host([prepared[c] for c in correlations[name] if c in prepared], steps),
        }
        for name, d in durations.items()
    ]
    rows.sort(key=lambda row: -float(str(row["ms_per_step"])))
    return {
        "steps": steps,
        "kernels_per_step": round(sum(counts) / steps, 1),
        "busy_ms_per_step": round(sum(map(sum, durations.values())) / steps / 1e3, 4),
        "note": "sum of kernel times; kernels on two streams may overlap, and the profiler slows short kernels",
        "kernels": rows[:120],
    }
