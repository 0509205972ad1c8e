"""Plan a deployment: how many replicas of which cut and draft length serve a load within its targets.

Each choice (box, tp, ep, draft setting; and, where it changes, the draft length by batch) is put through the closed form of
`specsim.steady` on a grid of rates up to its capacity. The highest rate up to which all targets hold is what one replica serves; replicas = rate / that, rounded up. More
rate never takes fewer GPUs and looser targets never more, by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim import steady
from specsim.acceptance import chain_length, rate_for_length
from specsim.cycle import evaluate
from specsim.errors import InputError
from specsim.machine import Machine
from specsim.percentiles import PERCENTS, below
from specsim.policy import Policy, policies
from specsim.prediction import SAMPLES, machine_of
from specsim.progress import track
from specsim.quantities import Quantity, short, six
from specsim.scenarios import Scenario
from specsim.simulation_costs import Ranges, eager_prefills, lanes, limited, longest, rows_of, step_seconds
from specsim.steady import Requests, Server
from specsim.two_states import two_states

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
            if self.percentile not in PERCENTS:
                raise InputError(
                    f"no percentile {self.percentile!r}", where="--percentile", mend=f"one of {', '.join(PERCENTS)}"
                )
            if self.ttft_ms is None and self.tpot_ms is None:
                raise InputError(
                    "is about targets", where="--percentile", mend="give --ttft-ms or --tpot-ms, or leave it out"
                )

    def seen(self, server: Server, rate: ArrayLike) -> steady.Point:
        """What is compared with them, at arrival rates: a point of means, or with times of the percentile in their places."""
        p = server.at(rate)
        if self.percentile is None:
            return p
        percent = PERCENTS[self.percentile]
        ttft, tpot = np.transpose([below(server, float(r), percent) for r in p.rate])
        return replace(p, ttft_s=ttft, tpot_s=tpot)

    def miss(self, p: steady.Point) -> Array:
        """How far a point is from the targets: 1 or less meets them all, 1.2 misses one by 20 %."""
        worst = np.where(np.isfinite(p.tpot_s), 0.0, np.inf)
        for limit, value in ((self.ttft_ms, p.ttft_s), (self.tpot_ms, p.tpot_s)):
            if limit is not None:
                worst = np.maximum(worst, value * 1e3 / limit)
        return worst

    def share(self, server: Server, limit: float) -> float:
        """The highest share of a limit (requests a second) up to which a server meets them, on the grid of `_reach`."""

        def met(shares: Array) -> NDArray[np.bool_]:
            return self.miss(self.seen(server, shares * limit)) <= 1

        return _reach(met) if self.percentile is None else _halved(met)


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


@dataclass(frozen=True)
class Target:
    """What a drafter must reach at one draft length and load. Accept rates; None: no rate is enough, 0: none is needed.

    `batch`: sequences that decode together at this load; `load`: share of the planned rate.
    """

    draft_tokens: int
    load: float
    batch: int
    breakeven_length: float
    breakeven_rate: float | None
    speedup_rate: float | None
    target_rate: float | None


@dataclass(frozen=True)
class Plan:
    """The answer: every choice: fewest GPUs first, then the fastest; those that miss their targets last, the nearest first."""

    rate: float
    requests: Requests
    targets: Targets
    choices: tuple[Choice, ...]
    tpot_ms: Quantity | None = None  # of the best choice at its load, with the interval of its step time
    drafter_targets: tuple[Target, ...] = ()
    policies: tuple[Policy, ...] = ()  # on the best choice's GPUs, the first at the load's context
    speedup: float = 1.5
    warnings: tuple[str, ...] = field(default=())

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def met(self) -> bool:
        return self.best.replicas > 0


def plan(
    scenarios: Iterable[Callable[[], Scenario] | Scenario],
    rate: float,
    requests: Requests,
    targets: Targets,
    *,
    drafting: Callable[[Scenario], Scenario] | None = None,
    headroom: float = 0.0,
    max_gpus: int | None = None,
    draft_tokens: Sequence[int] = (2, 3, 4, 5, 6, 7, 8),
    speedup: float = 1.5,
    hysteresis: float = 0.03,
    contexts: Sequence[int] = (),
) -> Plan:
    """Put scenarios (or what builds them) through the closed form and rank them.

    drafting: of the best choice's scenario, one on the same GPUs that speculates, for the targets of drafters at
    `draft_tokens`. headroom: share by which the rate may grow before a target is missed. hysteresis: what a draft length that
    follows the batch must bring over one that does not; `contexts`: other contexts to give policies for. Scenarios that cannot
    be built are noted; those that do not fit become choices with a `problem`. Where decoding is slower beyond some number of running
    requests (no graph holds more) a cap there is a choice of its own, if it takes fewer GPUs or is faster by the hysteresis. Raises InputError when none can serve at all, for
    rates and sizes out of range, for speculation without acceptance, and when the load takes more than `max_gpus` GPUs.
    """
    _check(rate, requests, speedup, headroom, hysteresis)
    choices: list[Choice] = []
    failure: InputError | None = None
    warnings: list[str] = []
    machines: dict[tuple[str, str], Machine] = {}
    for make in track(list(scenarios), "choices"):
        try:
            s = make if isinstance(make, Scenario) else make()
        except InputError as error:
            failure = failure or error
            warnings.append(f"left out: {error}")
            continue
        if s.method != "none" and s.acceptance is None:
            raise InputError(
                "speculation needs an acceptance", where="plan", mend="give --accept-rate, or --method none"
            )
        key = (s.profile.name, s.engine.name)
        if key not in machines:
            machines[key] = machine_of(s)
        warnings += s.warnings
        choices.append(_choice(s, machines[key], rate, requests, targets, headroom))
    if not any(c.server for c in choices):
        if failure is not None and not choices:
            raise failure
        problem = next((c.problem for c in choices), "no configuration is left")
        raise InputError(problem, where="plan")
    context = round(requests.context)
    for s, lengths in _groups(choices):
        machine = machines[s.profile.name, s.engine.name]
        for policy in policies(s, machine, lengths, [context], hysteresis):
            if len(policy.rising) > 1:
                choices.append(_choice(s, machine, rate, requests, targets, headroom, policy.rising))
    for c in list(choices):
        capped = _capped(c, rate, targets, headroom)
        if capped is not None and capped.replicas and _order(capped, hysteresis) < _order(c, hysteresis):
            choices.append(capped)
    ordered = tuple(sorted(choices, key=lambda c: _order(c, hysteresis)))
    best = ordered[0]
    if best.replicas and max_gpus is not None and best.gpus > max_gpus:
        limit = max(c.rate_each * (max_gpus // c.scenario.parallel.tp) for c in ordered) / (1 + headroom)
        raise InputError(
            f"{max_gpus} GPU{'s' if max_gpus > 1 else ''} cannot serve {rate:g} requests a second within the targets and {headroom:.0%} headroom, the limit is {short(limit)}",
            where="--max-gpus",
            mend=f"lower --rate, loosen the targets, or use {best.gpus:,}",
        )
    made: list[Target] = []
    if drafting is not None:
        try:
            drafter = drafting(best.scenario)
            machine = machines[drafter.profile.name, drafter.engine.name]
            made = targets_of_drafters(best, drafter, machine, rate, targets, draft_tokens, speedup)
        except InputError as error:
            warnings.append(f"no targets of drafters: {error}")
    found: list[Policy] = []
    for s, lengths in _groups([c for c in choices if _place(c.scenario) == _place(best.scenario)]):
        machine = machines[s.profile.name, s.engine.name]
        prefer = None if best.ranges else best.draft_tokens - 1
        at = list(dict.fromkeys([context, *contexts]))
        found = policies(s, machine, lengths, at, hysteresis, prefer)
    if any(c.scenario.options.get("disable_overlap") for c in ordered):
        warnings.append(
            "without overlapped scheduling a first token waits less than is said here, by up to a third: see --simulate"
        )
    states = two_states(best.server, rate / best.replicas) if best.server is not None and best.replicas else None
    if states is not None:
        warnings.append(states.note(best.scenario.engine.name))
    if eager_prefills(best.scenario):
        warnings.append("prefills run outside CUDA graphs by these options: each is launched kernel by kernel")
    said = tuple(dict.fromkeys(warnings))
    return Plan(
        rate, requests, targets, ordered, _interval(best), tuple(made), tuple(found), speedup=speedup, warnings=said
    )


def _place(s: Scenario) -> tuple[Any, ...]:
    """What the draft length may change on without new GPUs."""
    return s.profile.name, s.parallel, s.engine.name


def _groups(choices: Sequence[Choice]) -> Iterator[tuple[Scenario, list[int]]]:
    """For each cut of a box whose engine can change the draft length with the batch: a scenario and its draft lengths."""
    seen: list[tuple[Any, ...]] = []
    for c in choices:
        s = c.scenario
        block = s.draft is not None and s.draft.draft is not None and s.draft.draft.block
        chain = s.method != "none" and s.topk == 1 and not block and not c.ranges and c.server is not None
        if chain and _place(s) not in seen and s.engine.switches(s.method, s.parallel.dp > 1):
            seen.append(_place(s))
            alike = [o for o in choices if _place(o.scenario) == _place(s) and not o.ranges]
            yield s, sorted({o.draft_tokens for o in alike if o.scenario.method != "none"})


def _interval(c: Choice) -> Quantity | None:
    """The TPOT of a choice, with as wide an interval as its step time has (its batch is held)."""
    p = c.point
    if p is None or c.server is None or not np.isfinite(p.tpot_s[0]) or not p.tpot_s[0]:
        return None
    batch = max(1, round(float(p.running[0])))
    s, context = c.running_as(batch), np.asarray(c.server.requests.context)
    step = step_seconds(s, machine_of(s, samples=SAMPLES), np.asarray(float(batch)), context)
    step = step.reshape(-1)
    return Quantity.of(p.tpot_s[0] * step / step[0], 1e3)


def _check(rate: float, requests: Requests, speedup: float, headroom: float, hysteresis: float) -> None:
    if not 0 <= hysteresis < 1:
        raise InputError(f"{hysteresis:g} is not in [0, 1)", where="--hysteresis", mend="give a fraction")
    if not 0 < rate < 1e9:
        raise InputError(f"{rate:g} requests a second", where="--rate", mend="give a rate above 0, below 1e9")
    for name, value in (("--input-tokens", requests.input_tokens), ("--output-tokens", requests.output_tokens)):
        if not 1 <= value < 2**31:
            raise InputError(f"{value:g} tokens", where=name, mend="give 1 or more, below 2^31")
    if not 0 <= requests.prefix_rate < 1:
        mend = "give the share of a prompt that is cached"
        raise InputError(f"{requests.prefix_rate:g} is not in [0, 1)", where="--prefix-rate", mend=mend)
    if not 1 <= speedup < 100:
        raise InputError(f"{speedup:g} is no speedup", where="--speedup", mend="give 1 or more")
    if not 0 <= headroom <= 10:
        raise InputError(f"{headroom:g} is out of range", where="--headroom", mend="give a fraction, for example 0.2")


def _order(c: Choice, hysteresis: float) -> tuple[Any, ...]:
    """Fewest GPUs first, then the fastest; what misses its targets last, the nearest miss first. A draft length that follows
    the batch, and a cap on running requests, must each be faster by more than the hysteresis."""
    if not c.replicas or c.point is None:
        return (True, c.miss, 0.0, c.draft_tokens)
    handicap = 1 + hysteresis * (bool(c.ranges) + bool(c.most))
    return (False, c.gpus, float(c.point.tpot_s[0]) * handicap, c.draft_tokens)


def _choice(
    s: Scenario,
    machine: Machine,
    rate: float,
    requests: Requests,
    targets: Targets,
    headroom: float,
    ranges: Ranges = (),
) -> Choice:
    try:
        server = steady.server_of(s, machine, requests, ranges)
    except InputError as error:
        return Choice(s, None, problem=str(error), ranges=ranges)
    return _serving(Choice(s, server, ranges=ranges), server, rate, targets, headroom)


def _capped(c: Choice, rate: float, targets: Targets, headroom: float) -> Choice | None:
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


def _reach(good: Callable[[Array], NDArray[np.bool_]]) -> float:
    """How far from 0 towards 1 all is good: a multiple of 1 / GRID^2 below 1, up to which every multiple of 1 / GRID is good
    and every one of 1 / GRID^2 beyond the last of these. 0: not even the first."""
    points = np.arange(1, GRID) / GRID
    coarse = _leading(good(points))
    return (coarse + _leading(good((coarse + points) / GRID)) / GRID) / GRID


def _halved(good: Callable[[Array], NDArray[np.bool_]]) -> float:
    """`_reach` of what takes long to say and is good up to one place only: found by halving."""
    low, high = 0, GRID**2  # good at the one, and not at the other
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(np.asarray([middle / GRID**2]))[0] else (low, middle)
    return low / GRID**2


def _leading(good: NDArray[np.bool_]) -> int:
    """How many leading places are true."""
    return len(good) if good.all() else int(np.argmin(good))


# --- what a drafter must reach --------------------------------------------------------------------------------------

LOADS = (0.25, 0.5, 1.0)


def targets_of_drafters(
    best: Choice,
    drafting: Scenario,
    machine: Machine,
    rate: float,
    targets: Targets,
    draft_tokens: Sequence[int],
    speedup: float,
) -> list[Target]:
    """Accept rates for break-even, `speedup` and the targets, by draft length and load, on the replicas of `best`.

    Break-even and speedup are those of `specsim predict` at the batch of that load; the target's is the lowest constant
    rate from which on the closed form meets all targets. Empty when `drafting` does not speculate, or drafts trees.
    """
    if drafting.method == "none" or drafting.topk > 1 or best.server is None:
        return []
    requests = best.server.requests
    each = rate / best.replicas if best.replicas else best.capacity / 2
    running = [max(1, round(float(best.server.at(each * load).running[0]))) for load in LOADS]
    out = []
    for d in draft_tokens:
        if d < 2:
            continue
        s = replace(drafting, draft_tokens=np.asarray(float(d)), num_steps=np.asarray(d - 1.0))
        server = steady.server_of(s, machine, requests)
        at = replace(s, batch=np.asarray(running, dtype=float), context=np.asarray(requests.context))
        c = evaluate(at, machine)
        needed = np.broadcast_to(c.cycle_s / c.decode_s, (len(LOADS),))
        for i, load in enumerate(LOADS):
            out.append(
                Target(
                    d,
                    load,
                    running[i],
                    float(needed[i]),
                    _rate(needed[i], d),
                    _rate(speedup * needed[i], d),
                    _rate_for_targets(server, each * load, targets, d),
                )
            )
    return out


def _rate_for_targets(server: Server, rate: float, targets: Targets, d: int) -> float | None:
    """The accept rate from which on every chain of d meets the targets at a rate of requests; 0: none is needed."""

    def met(short: Array) -> NDArray[np.bool_]:
        """By how far accept rates are short of 1."""
        if targets.percentile is None:
            return targets.miss(server.at(rate, np.asarray(chain_length(1 - short, d - 1)))) <= 1
        accepting = (server.accepting((1 - x) ** np.arange(1, d)) for x in short)
        return np.asarray([targets.miss(targets.seen(s, rate))[0] <= 1 for s in accepting])

    at_best, at_none = met(np.asarray([0.0, 1.0]))
    reach = 1 - 1 / GRID**2 if at_none and targets.percentile else (_halved if targets.percentile else _reach)(met)
    if at_none and reach == 1 - 1 / GRID**2:
        return 0.0
    return 1 - reach if at_best else None


def _rate(length: float, d: int) -> float | None:
    found = float(np.asarray(rate_for_length(length, d - 1)))
    return None if math.isnan(found) else found
