"""A server that has two states at one load: where decoding is slower with one sequence more, as beyond the largest CUDA graph.

While fewer run than there, more leave than come. Beyond, at first, fewer leave than come, so that their number grows until enough of them
share the slower step. The distribution of the number that runs (`specsim.steady`) has a hump on either side, and a server stays under
one until a burst or a lull carries it over. With p(k) the share of time with k, and c(n) crossings a second from n to n + 1 (as many come
back), the mean time from the top of one hump to the top of the other is, exactly where one comes or leaves at a time (Karlin and
Taylor, A First Course in Stochastic Processes, 1975, chapter 4),

    sum of (p(0) + ... + p(n)) / c(n) upwards        sum of (p(n + 1) + p(n + 2) + ...) / c(n) downwards        n between the tops

A run of thousands of requests may see one state only. A cap on running requests at that place leaves the faster one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specsim.engines import running_flag
from specsim.quantities import counted, short
from specsim.steady import Point, Server

LASTING = 10  # lives of a request: a state that is left sooner is one that every run sees
APART = 1.1  # of the time a token in one state to that in the other: less is no state of its own
UNITS = ((3600.0, 60.0, "minute"), (86400.0, 3600.0, "hour"), (365.0 * 86400, 86400.0, "day"))
TINY = 1e-250  # a share of time, or crossings a second, that rounding leaves nothing of


@dataclass(frozen=True)
class Lasting:
    """One state: what requests see in it, its share of a long time, and how long it lasts on average (to its order
    of magnitude: requests that come or leave together carry a server over sooner)."""

    point: Point
    share: float
    lasts_s: float

    def sentence(self) -> str:
        """For people."""
        p = self.point
        return f"TPOT {short(p.tpot_s[0] * 1e3, 3)} ms with {p.running[0]:,.0f} running, {_long(self.lasts_s)}"


@dataclass(frozen=True)
class TwoStates:
    """`fast` up to `crest` running requests, `slow` beyond."""

    crest: int
    fast: Lasting
    slow: Lasting

    def note(self, engine: str) -> str:
        """For people: what they are, and what leaves the faster one alone."""
        return (
            f"this load has two states: {self.fast.sentence()}; or, since a step of more than {self.crest:,} is slower, "
            f"{self.slow.sentence()}: {running_flag(engine)} {self.crest} leaves the first alone"
        )


def two_states(server: Server, rate: float) -> TwoStates | None:
    """The states of a server at a rate (requests a second) that it serves, capped where it is slower as well; None where there is
    one."""
    crest, all_places = server.crest, server.most_running
    if crest >= all_places or not rate < min(float(s.capacity()) for s in (server, server.capped(crest))):
        return None
    state = server.state(np.asarray([rate]))
    weight, crossings = state.held.weight[0], state.crossings[0]
    low, high = int(weight[: crest + 1].argmax()), crest + 1 + int(weight[crest + 1 :].argmax())
    below, between = np.cumsum(weight)[low:high], crossings[low:high]
    if between.min(initial=np.inf) < TINY:  # nobody comes that way: what weight there is beyond is rounding
        return None
    above = np.cumsum(weight[::-1])[::-1][low + 1 : high + 1]
    found = []
    for first, last, side in ((0, crest, below), (crest + 1, all_places, above)):
        share, lasts = float(weight[first : last + 1].sum()), float((side / between).sum())
        if share < TINY:
            return None
        point = server.point(state.among(first, last))
        if not lasts * rate > LASTING * float(point.running[0]):  # Little's law: a life is running / rate
            return None
        found.append(Lasting(point, share, lasts))
    fast, slow = found
    return TwoStates(crest, fast, slow) if slow.point.tpot_s[0] > APART * fast.point.tpot_s[0] else None


def _long(seconds: float) -> str:
    """How long a state lasts, to its size."""
    if seconds < 60:
        return f"for {seconds:.0f} s"
    for below, unit, name in UNITS:
        if seconds < below:
            return f"for {counted(round(seconds / unit), name)}"
    return "for years"
