"""In place: a call timed as it runs in an engine's graph, after a product, instead of after itself.

What: seconds that a call adds to a chain of small products: the graph of [product, call] pairs less the graph of the
products alone, replayed in turn so that clocks drift alike in both. Against: the same calls back to back (`alone`). Units:
seconds. `before` may be another pause than products. After a product a kernel starts cold: its code, its weights and what it last wrote have left the caches, and
nothing of its start was prepared by its own last launch. An RMSNorm takes twice as long as in a chain of norms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

from specsim.calibration.context import Call, Context, Measurement, median_interval, spread
from specsim.calibration.timing import BATCH, CHAIN_S, LEAST, MOST_NODES, Chain, in_graph

# of one product's weights, on a GPU and on CPU: a few microseconds
PRODUCT_BYTES = {True: 4 * 2**20, False: 64 * 2**10}
STREAM_BYTES = 2**24  # that a trial reads, and writes, to see how fast memory is
FEW_HUNDRED = 200  # small kernels of a trial
FEW = 4  # calls of a chain on CPU tensors
WIDER = 2.0  # a difference of two medians may be as many times as wide as a median


def products(context: Context, rows: int, outputs: int, out: Any = None) -> list[Call]:
    """bf16 products of `rows` rows with `outputs` outputs, small, their weights rotated beyond twice the L2. out: where they
    write, [rows, outputs]: the input of the call that follows."""
    import torch

    def zeros(*shape: int) -> Any:
        return torch.zeros(*shape, device=context.device, dtype=torch.bfloat16)

    inputs = max(64, PRODUCT_BYTES[context.gpu] // (2 * outputs) // 64 * 64)
    x, y = zeros(rows, inputs) + 1, zeros(rows, outputs) if out is None else out
    weights = [
        torch.randn(outputs, inputs, device=context.device, dtype=torch.bfloat16).mul_(inputs**-0.5)
        for _ in range(context.copies(2.0 * inputs * outputs))
    ]
    return [partial(torch.mm, x, w.t(), out=y) for w in weights]


def pauses(context: Context, seconds: float) -> list[Call]:
    """What an engine runs between products, each for about so many seconds: an elementwise kernel that reads and writes memory,
    going round beyond twice the L2, and then small kernels."""
    import torch

    def streams(half: int) -> list[Call]:
        chunks = context.copies(2 * half)
        source, target = (torch.ones(chunks, half // 2, device=context.device, dtype=torch.bfloat16) for _ in range(2))
        return [partial(torch.neg, a, out=b) for a, b in zip(source, target, strict=True)]

    small: Call = partial(torch.neg, torch.ones(64, device=context.device), out=torch.empty(64, device=context.device))
    if "pause_rates" not in context.cache:
        trial, least = streams(STREAM_BYTES), [small] * FEW_HUNDRED
        whole, each = (Chain(context, calls, None, None).once() for calls in (trial, least))
        context.cache["pause_rates"] = 2 * STREAM_BYTES * len(trial) / whole, each / FEW_HUNDRED
    bytes_s, small_s = context.cache["pause_rates"]
    after = [small] * round(seconds / small_s)

    def pause(stream: Call) -> None:
        stream()
        for call in after:
            call()

    return [partial(pause, stream) for stream in streams(max(int(seconds * bytes_s / 2), STREAM_BYTES // 16))]


def in_place(
    context: Context,
    calls: Sequence[Call],
    before: Sequence[Call] | Callable[[float], Sequence[Call]],
    *,
    warm_s: float = 0.0,
) -> Measurement:
    """Seconds of one of `calls` after one of the products `before`; both lists are gone round. `alone` in the extras are the
    same calls back to back. A sample below zero, which noise can make of a call that costs next to nothing, counts as zero.

    before: or what makes them of the seconds that a call takes alone. warm_s: seconds that the pairs run before they are timed.
    """
    if not context.gpu:  # nothing is cold there
        calls = calls[:FEW]
    alone = in_graph(context, calls)
    if callable(before):
        before = before(spread(alone.seconds)["median"])
    if not context.gpu:
        before = before[:FEW]
    several = max(len(calls), len(before))
    first, second = (list(islice(cycle(some), several)) for some in (before, calls))
    pairs = list(chain.from_iterable(zip(first, second, strict=True)))
    least = Chain(context, pairs, None, None).once()
    repeats = int(max(1.0, min(2 * CHAIN_S / max(least, 1e-7), MOST_NODES / len(pairs))))
    both, base = (Chain(context, some * repeats, None, None) for some in (pairs, first))
    n = several * repeats
    if warm_s and context.gpu:
        both.warm(warm_s)
    samples, nothing, narrow = _difference(context, both, base)
    extras = {
        **alone.extras,
        "alone": {**spread(alone.seconds), "narrow": alone.narrow},
        "product_s": nothing / n,
        "pairs": n,
    }
    return Measurement([max(s - nothing, 0.0) / n for s in samples], n, narrow, extras)


def _difference(context: Context, both: Chain, base: Chain) -> tuple[list[float], float, bool]:
    """Samples of `both`, the median of `base`, and whether the difference of the medians is known narrowly."""
    longer: list[float] = []
    shorter: list[float] = []
    for some in (both, base):
        some.times(2)
    start = time.perf_counter()
    while True:
        longer += both.times(BATCH[context.gpu])[1:]  # the first of a batch starts on an idle GPU
        shorter += base.times(BATCH[context.gpu])[1:]
        (middle, half), (nothing, other) = (_median(some) for some in (longer, shorter))
        narrow = len(longer) >= LEAST[context.gpu] and 0 < (half**2 + other**2) ** 0.5 <= WIDER * context.target * (
            middle - nothing
        )
        if narrow or time.perf_counter() - start > context.budget_s:
            return longer, nothing, narrow


def _median(samples: Sequence[float]) -> tuple[float, float]:
    """The median and half of its 95 % interval."""
    ordered = sorted(samples)
    low, high = median_interval(ordered)
    return ordered[len(ordered) // 2], (high - low) / 2
