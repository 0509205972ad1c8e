"""What requests must get, and how far a load may go until they do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim import steady
from specsim.errors import InputError
from specsim.percentiles import PERCENTS, below
from specsim.steady import Server

Array = NDArray[np.float64]
GRID = 20  # points of a search, and as many between two of them: replicas and accept rates are exact to 0.25 %


@dataclass(frozen=True)
class Targets:
    """What requests must get: milliseconds to the first token, and a token after it. None: no limit. Means are compared, or with a
    percentile ("p99", ...) what that share of the requests stays below."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    percentile: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("--ttft-ms", self.ttft_ms), ("--tpot-ms", self.tpot_ms)):
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{value:g} ms is no target", where=name, mend="give milliseconds above 0")
        if self.percentile is not None:
            if not isinstance(self.percentile, str) or self.percentile not in PERCENTS:
                raise InputError(
                    f"no percentile {self.percentile!r}", where="--percentile", mend=f"one of {', '.join(PERCENTS)}"
                )
            if not self.given:
                raise InputError(
                    "is about targets", where="--percentile", mend="give --ttft-ms or --tpot-ms, or leave it out"
                )

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self.ttft_ms is not None or self.tpot_ms is not None

    def seen(self, server: Server, rate: ArrayLike) -> steady.Point:
        """What is compared with them, at arrival rates: a point of means, or with times of the percentile in their places."""
        if self.percentile is None:
            return server.at(rate)
        points = [
            below(server, float(r), PERCENTS[self.percentile]) for r in np.atleast_1d(np.asarray(rate, dtype=float))
        ]
        return steady.Point(*(np.concatenate([getattr(p, f.name) for p in points]) for f in fields(steady.Point)))

    def miss(self, p: steady.Point) -> Array:
        """How far a point is from the targets: 1 or less meets them all, 1.2 misses one by 20 %."""
        worst = np.where(np.isfinite(p.tpot_s), 0.0, np.inf)
        for limit, value in ((self.ttft_ms, p.ttft_s), (self.tpot_ms, p.tpot_s)):
            if limit is not None:
                worst = np.maximum(worst, value * 1e3 / limit)
        return worst

    def share(self, server: Server, limit: float) -> float:
        """The highest share of a limit (requests a second) up to which a server meets them, on the grid of `reach`."""

        return self.reach(lambda shares: self.miss(self.seen(server, shares * limit)))

    def reach(self, miss: Callable[[Array], Array]) -> float:
        """How far from 0 towards 1 nothing misses these targets: a multiple of 1 / GRID^2 below 1. With percentiles, which take
        long to say, searched for, as met up to one place only."""
        return _reach(lambda x: miss(x) <= 1) if self.percentile is None else _searched(miss)


def _reach(good: Callable[[Array], NDArray[np.bool_]]) -> float:
    """How far from 0 towards 1 all is good: a multiple of 1 / GRID^2 below 1, up to which every multiple of 1 / GRID is good
    and every one of 1 / GRID^2 beyond the last of these. 0: not even the first."""
    points = np.arange(1, GRID) / GRID
    coarse = _leading(good(points))
    return (coarse + _leading(good((coarse + points) / GRID)) / GRID) / GRID


def _searched(miss: Callable[[Array], Array]) -> float:
    """`_reach` of what takes long to say and misses from one place on only: where a straight line between the logarithms of the nearest
    misses on either side says, one of which counts half each time that it stays (Dowell and Jarratt, BIT 11, 1971); half-way where one is unknown."""
    low, high, below, above = 0, GRID**2, -math.inf, math.inf
    stayed = 0  # side that did last
    while high - low > 1:
        if math.isfinite(below) and math.isfinite(above):
            place = min(max(low + round((high - low) * below / (below - above)), low + 1), high - 1)
        else:
            place = (low + high) // 2
        found = float(miss(np.asarray([place / GRID**2]))[0])
        value = math.log(found) if 0 < found < math.inf else math.copysign(math.inf, found - 1)
        if found <= 1:
            low, below, above = place, value, above / (1 + (stayed == 1))
            stayed = 1
        else:
            high, above, below = place, value, below / (1 + (stayed == -1))
            stayed = -1
    return low / GRID**2


def _leading(good: NDArray[np.bool_]) -> int:
    """How many leading places are true."""
    return len(good) if good.all() else int(np.argmin(good))
