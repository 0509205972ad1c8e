"""Timing: a chain of calls in a CUDA graph with an empty-graph control subtracted, or eagerly from Python.

Seconds a call. Against: the same graph without the calls. Samples are taken in batches until the 95 % interval of
their median is narrow, or the case's time is up, which the measurement then says. On CPU tensors the same path runs
the calls one after the other under the host's clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

from specsim.calibration.context import Call, Context, Measurement, median_interval

from specsim import host_speed

BATCH = {True: 10, False: 3}  # replays between two looks at the clock, on a GPU and on CPU
LEAST = {True: 20, False: 4}  # samples
PATIENCE = 8  # times the usual budget that calls from Python wait for a core to become fast, which takes seconds
CHAIN_S = 400e-6  # shortest chain worth timing: events resolve about a microsecond
MOST_NODES = 2000
SUSTAINED_S = 0.3  # for `warm_s`, where arithmetic bounds: as long a load as a busy server's

Capture = Callable[[], AbstractContextManager[Any]]


def in_graph(
    context: Context,
    calls: Sequence[Call],
    *,
    group: str | None = None,
    capture: Capture | None = None,
    base: Sequence[Call] = (),
    warm_s: float = 0.0,
) -> Measurement:
    """Seconds of one of `calls`, run back to back in a graph; `base` is a chain whose time is subtracted.

    group: ranks that must replay in step. capture: makes the context entered around the capture (engines' communicators
    need it). warm_s: seconds that the chain runs before samples are taken, on a GPU and for one rank alone.
    """
    chain = Chain(context, calls, group, capture)
    least = chain.once()
    repeats = int(context.agree(max(1.0, min(CHAIN_S / max(least, 1e-7), MOST_NODES / len(calls))), group))
    if repeats > 1:
        chain = Chain(context, list(calls) * repeats, group, capture)
    n = len(calls) * repeats
    if context.gpu and group is None:
        chain.warm(warm_s)
    if base:
        subtract = _collect(context, Chain(context, list(base) * repeats, group, None), group, context.budget_s / 2)[0]
        nothing = sorted(subtract)[len(subtract) // 2]
    else:
        nothing = empty_seconds(context)
    samples, narrow = _collect(context, chain, group, context.budget_s, nothing)
    return Measurement([max(s - nothing, 0.0) / n for s in samples], n, narrow, {"control_s": nothing, "chain": n})


def eager(context: Context, calls: Sequence[Call], *, group: str | None = None) -> Measurement:
    """Seconds of one call from Python, host time included: a loop of calls, then one wait, under the host's clock.

    Where the host's cores run at two speeds, loops on a slow one are set aside (`slow_share` and `slow_s` of the extras), unless
    most are, which is the extras' `trouble`.
    """
    for call in calls:
        call()
    context.synchronize()
    if "core_us" not in context.cache:
        looks = [us for core in host_speed.by_core().values() for us in core]
        context.cache["core_us"] = host_speed.fastest(looks) if looks else math.inf
    limit = host_speed.SLOW * context.cache["core_us"]

    def loop() -> tuple[float, bool]:
        context.agree(0.0, group)
        start = time.perf_counter()
        for call in calls:
            call()
        context.synchronize()
        took = time.perf_counter() - start
        return took, context.agree(float(host_speed.loop_us() > limit), group) > 0

    loop()
    taken: list[tuple[float, bool]] = []
    start = time.perf_counter()
    while True:
        taken += [loop() for _ in range(3)]
        samples = [s for s, slow in taken if not slow]
        narrow = len(samples) >= 9 and _narrow(samples, context.target, 0.0)
        patience = PATIENCE if group is None and len(samples) < 6 else 1  # all of several ranks are seldom fast at once
        late = time.perf_counter() - start > context.budget_s * patience and len(taken) >= 6
        if context.agree(float(not (narrow or late)), group) == 0.0:
            return _on_fast_cores(taken, len(calls), narrow)


def _on_fast_cores(taken: Sequence[tuple[float, bool]], calls: int, narrow: bool) -> Measurement:
    """The loops that no slow core ran, of (seconds, on a slow core); all of them where most are."""
    fast, slow = ([s / calls for s, found in taken if found == kind] for kind in (False, True))
    extras: dict[str, Any] = {}
    if slow:
        extras = {"slow_share": len(slow) / len(taken), "slow_s": statistics.median(slow)}
    if len(fast) < len(slow):
        trouble = (
            f"the host's cores were slow in {len(slow)} of {len(taken)} loops: more than it takes on a core of its own"
        )
        return Measurement(fast + slow, calls, False, {**extras, "trouble": trouble})
    return Measurement(fast, calls, narrow, extras)


class Chain:
    """Calls captured in one graph after a marker kernel, so that the empty graph differs by the calls alone."""

    def __init__(self, context: Context, calls: Sequence[Call], group: str | None, capture: Capture | None) -> None:
        self.context, self.calls = context, calls
        self.graph: Any = None
        if not context.gpu:
            for call in calls[:1]:
                call()
            return
        import torch

        marker = torch.ones(32, device=context.device)
        stream = torch.cuda.Stream(context.device)
        stream.wait_stream(torch.cuda.current_stream(context.device))
        with torch.cuda.stream(stream):
            marker.add_(1)
            seen: set[int] = set()
            for call in calls:  # warm up: compile, create handles, register buffers
                if id(call) not in seen:
                    seen.add(id(call))
                    call()
        torch.cuda.current_stream(context.device).wait_stream(stream)
        context.synchronize()
        context.agree(0.0, group)
        self.graph = torch.cuda.CUDAGraph()
        with (
            capture() if capture else nullcontext(),
            torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"),
        ):
            marker.add_(1)
            for call in calls:
                call()
        self.marker = marker
        self.graph.replay()
        context.synchronize()

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            for call in self.calls:
                call()

    def once(self) -> float:
        """Seconds of one replay, the best of three."""
        return min(self.times(3))

    def warm(self, seconds: float) -> None:
        """Run for so long by the host's clock: a GPU that reaches its power limit lowers its clocks within tenths of a second."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.times(BATCH[self.context.gpu])

    def times(self, n: int) -> list[float]:
        """Seconds of n replays in a row: between events on the GPU, by the host's clock on CPU."""
        if self.graph is None:
            out = []
            for _ in range(n):
                start = time.perf_counter()
                self.run()
                out.append(time.perf_counter() - start)
            return out
        import torch

        marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.graph.replay()
            mark.record()
        marks[-1].synchronize()
        return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]


def empty_seconds(context: Context) -> float:
    """Seconds of a graph that holds the marker alone; measured once a process."""
    if "empty" not in context.cache:
        samples = sorted(_collect(context, Chain(context, [], None, None), None, context.budget_s)[0])
        context.cache["empty"] = samples[len(samples) // 2]
    return float(context.cache["empty"])


def _collect(
    context: Context, chain: Chain, group: str | None, budget: float, nothing: float = 0.0
) -> tuple[list[float], bool]:
    samples: list[float] = []
    context.agree(0.0, group)
    chain.times(2)
    start = time.perf_counter()
    while True:
        context.agree(0.0, group)
        samples += chain.times(BATCH[context.gpu])[1:]  # the first of a batch starts on an idle GPU
        narrow = len(samples) >= LEAST[context.gpu] and _narrow(samples, context.target, nothing)
        late = time.perf_counter() - start > budget
        if context.agree(float(not (narrow or late)), group) == 0.0:
            return samples, narrow


def _narrow(samples: Sequence[float], target: float, nothing: float) -> bool:
    ordered = sorted(samples)
    low, high = median_interval(ordered)
    middle = ordered[len(ordered) // 2] - nothing
    return middle > 0 and (high - low) / 2 <= target * middle
