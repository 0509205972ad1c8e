"""One way to serve a load: a cut of a box with its draft lengths, how many replicas it takes, and what requests see."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim import steady
from specsim.errors import InputError
from specsim.machine import Machine
from specsim.prediction import SAMPLES, machine_of
from specsim.quantities import Quantity, six
from specsim.scenarios import Scenario
from specsim.simulation_costs import Ranges, lanes, limited, longest, rows_of, step_seconds
from specsim.steady import Requests, Server
from specsim.steady_servers import server_of
from specsim.targets import GRID, Targets

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """One way to serve, and what it takes. `rate_each`: requests a second that one replica serves within the targets (0:
    none). `ranges`: draft lengths by batch, where they are not one. `problem` says why there is no server at all."""

    scenario: Scenario
    server: Server | None
    capacity: float = 0.0
    rate_each: float = 0.0
    miss: float = math.inf  # of the targets, unloaded
    seen: steady.Point | None = None  # with times of the targets' percentile, where they have one
    replicas: int = 0
    point: steady.Point | None = None
    problem: str = ""
    ranges: Ranges = ()
    most: int | None = None  # running requests that the scenario is capped at by the plan

    @property
    def draft_tokens(self) -> int:
        """The longest, where they follow the batch."""
        return rows_of(longest(self.scenario, self.ranges))

    @property
    def setting(self) -> str:
        """What drafts, in words."""
        if self.ranges:
            return "by batch"
        return "off" if self.scenario.method == "none" else str(self.draft_tokens)

    def running_as(self, batch: int) -> Scenario:
        """The scenario that runs at a batch."""
        return next(s for s, batches in lanes(self.scenario, batch, self.ranges) if batch in batches)

    @property
    def gpus(self) -> int:
        return self.replicas * self.scenario.parallel.tp

    def headroom(self, rate: float) -> float:
        """By which share the rate may grow before a target is missed."""
        return self.replicas * self.rate_each / rate - 1

    def cost_per_million(self, rate: float, output_tokens: float, price: float) -> float:
        """Price of a million output tokens, at so much a GPU and hour."""
        return self.gpus * price / (rate * output_tokens * 3600) * 1e6

    def json(self, rate: float, requests: Requests, price: float | None) -> dict[str, Any]:
        """The choice as specsim.plan/1 has it."""
        s, p = self.scenario, self.point
        met = self.replicas > 0
        return {
            "hardware": s.profile.name,
            "tp": s.parallel.tp,
            "ep": s.parallel.ep,
            "method": s.method,
            "draft_tokens": self.draft_tokens,
            "by_batch": [list(r) for r in self.ranges] or None,
            "max_running_requests": self.most,
            "meets_targets": met,
            "replicas": self.replicas if met else None,
            "gpus": self.gpus if met else None,
            "rate_per_replica": six(self.rate_each),
            "capacity_per_replica": six(self.capacity),
            "headroom": six(self.headroom(rate)) if met else None,
            "tpot_ms": None if p is None else _ms(p.tpot_s),
            "ttft_ms": None if p is None else _ms(p.ttft_s),
            "at_percentile": None
            if self.seen is None
            else {"ttft_ms": _ms(self.seen.ttft_s), "tpot_ms": _ms(self.seen.tpot_s)},
            "running": six(float(p.running[0])) if p is not None else None,
            "most_running": None if self.server is None else self.server.most_running,
            "miss": six(self.miss) if math.isfinite(self.miss) else None,
            "cost_per_million_output_tokens": None
            if price is None or not met
            else six(self.cost_per_million(rate, requests.output_tokens, price)),
            "problem": self.problem or None,
        }


def _ms(seconds: Array) -> float | None:
    return None if not np.isfinite(seconds[0]) else six(float(seconds[0]) * 1e3)


def order(c: Choice, hysteresis: float) -> tuple[Any, ...]:
    """Fewest GPUs first, then the fastest; what misses its targets last, the nearest miss first. A draft length that follows
    the batch, and a cap on running requests, must each be faster by more than the hysteresis."""
    if not c.replicas or c.point is None:
        return (True, c.miss, 0.0, c.draft_tokens)
    handicap = 1 + hysteresis * (bool(c.ranges) + bool(c.most))
    return (False, c.gpus, float(c.point.tpot_s[0]) * handicap, c.draft_tokens)


def choice_of(
    s: Scenario,
    machine: Machine,
    rate: float,
    requests: Requests,
    targets: Targets,
    headroom: float,
    ranges: Ranges = (),
) -> Choice:
    """A scenario (with draft lengths by batch in `ranges`) under its share of a load; `problem` where it does not fit."""
    try:
        server = server_of(s, machine, requests, ranges)
    except InputError as error:
        return Choice(s, None, problem=str(error), ranges=ranges)
    return _serving(Choice(s, server, ranges=ranges), server, rate, targets, headroom)


def with_cap(c: Choice, rate: float, targets: Targets, headroom: float) -> Choice | None:
    """The choice with no more running than decode at full pace; None where that is all of them, or it
    was said how many run."""
    asked = "max_running_requests" in c.scenario.options
    if c.server is None or asked or c.server.crest == c.server.most_running:
        return None
    most = c.server.crest
    s = limited(c.scenario, most)
    return _serving(replace(c, scenario=s, most=most), c.server.capped(most), rate, targets, headroom)


def _serving(c: Choice, server: Server, rate: float, targets: Targets, headroom: float) -> Choice:
    """The choice, with this server and what it does under the load."""
    capacity = float(server.capacity())
    each = capacity * targets.share(server, capacity)
    miss = float(targets.miss(targets.seen(server, capacity / GRID**2))[0])
    replicas = math.ceil(rate * (1 + headroom) / each * (1 - 1e-12)) if each else 0
    at = rate / replicas if replicas else capacity / GRID**2
    seen = targets.seen(server, at) if targets.percentile else None
    return replace(
        c,
        server=server,
        capacity=capacity,
        rate_each=each,
        miss=miss,
        replicas=replicas,
        point=server.at(at),
        seen=seen,
    )


def tpot_interval(c: Choice) -> Quantity | None:
    """The TPOT of a choice, with as wide an interval as its step time has (its batch is held)."""
    p = c.point
    if p is None or c.server is None or not np.isfinite(p.tpot_s[0]) or not p.tpot_s[0]:
        return None
    batch = max(1, round(float(p.running[0])))
    s, context = c.running_as(batch), np.asarray(c.server.requests.context)
    step = step_seconds(s, machine_of(s, samples=SAMPLES), np.asarray(float(batch)), context)
    step = step.reshape(-1)
    return Quantity.of(p.tpot_s[0] * step / step[0], 1e3)
