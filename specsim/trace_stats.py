"""What a plan needs of a trace, read in one pass in the memory of one block; and the share of it that one replica gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.quantities import counted, short
from specsim.workload import PS, Requests, Trace

MINUTE = 60  # seconds


@dataclass(frozen=True)
class TraceStats:
    """Requests, mean tokens (and how they vary: variance over the square of the mean), and rates a second: over the trace,
    and in its busiest minute and second."""

    requests: int
    mean_input: float
    mean_output: float
    duration_s: float
    mean_rate: float
    peak_rate: float
    busiest_second: int
    input_cv2: float = 0.0
    output_cv2: float = 0.0
    skipped: int = 0  # requests without input or output tokens, which are left out
    longest: int = 0  # tokens of the longest request, prompt and answer

    def json(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """For people."""
        return (
            f"trace: {counted(self.requests, 'request')} in {self.duration_s:,.0f} s, {short(self.mean_rate, 3)} a second on average, "
            f"{short(self.peak_rate, 3)} in the busiest minute, {self.busiest_second:,} in the busiest second"
        )


def trace_stats(path: Path) -> TraceStats:
    """Read a trace once. A trace shorter than a minute counts as one whole minute, or as its own length from a second up.

    Raises InputError, as the trace does.
    """
    count, given, given2, made, made2, last = 0, 0, 0, 0, 0, 0.0
    second, minute = _Busiest(1), _Busiest(MINUTE)
    trace = Trace(path)
    for block in trace:
        count += len(block)
        given += int(block.input_tokens.sum())
        given2 += sum(n * n for n in block.input_tokens.tolist())
        made += int(block.output_tokens.sum())
        made2 += sum(n * n for n in block.output_tokens.tolist())
        last = float(block.arrival[-1]) / PS
        for busiest in (second, minute):
            busiest.add(block.arrival)
    duration = max(last, 1.0)
    peak = minute.most / min(MINUTE, duration)
    inputs, outputs = (max(x2 * count / total**2 - 1, 0.0) for x2, total in ((given2, given), (made2, made)))
    return TraceStats(
        count,
        given / count,
        made / count,
        duration,
        count / duration,
        peak,
        second.most,
        inputs,
        outputs,
        trace.skipped,
        trace.longest,
    )


def of_tokens(longest: int) -> str:
    """The longest request of a load, in words."""
    return f"a request of {longest:,} tokens, prompt and answer,"


def left_out(skipped: int) -> str:
    """A note about requests of a trace that failed."""
    verb = "has" if skipped == 1 else "have"
    return f"{counted(skipped, 'request')} of the trace {verb} no input or no output tokens: left out"


class _Busiest:
    """The most arrivals in one span of so many seconds. Arrivals come in order, so only the span they have reached is kept."""

    def __init__(self, seconds: int) -> None:
        self.span = seconds * PS
        self.most = self._here = 0
        self._place = -1

    def add(self, arrival: NDArray[np.int64]) -> None:
        """The next arrivals, picoseconds, none before those already added."""
        places, numbers = np.unique(arrival // self.span, return_counts=True)
        if places[0] == self._place:
            numbers[0] += self._here
        self._place, self._here = int(places[-1]), int(numbers[-1])
        self.most = max(self.most, int(numbers.max()))


def every(blocks: Iterable[Requests], n: int) -> Iterator[Requests]:
    """Every n-th request: what one of n replicas gets in turn."""
    skip = 0
    for block in blocks:
        kept = slice(skip, None, n)
        skip = (skip - len(block)) % n
        if len(block.arrival[kept]):
            yield Requests(block.arrival[kept], block.input_tokens[kept], block.output_tokens[kept])
