"""Plan a deployment: how many replicas of which cut and draft length serve a load within its targets.

Each choice (box, tp, ep, draft setting; and, where it changes, the draft length by batch) is put through the closed form of
`specsim.steady` on a grid of rates up to its capacity. The highest rate up to which all targets hold is what one replica serves; replicas = rate / that, rounded up. More
rate never takes fewer GPUs and looser targets never more, by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specsim.choice import Choice, choice_of, order, tpot_interval, with_cap
from specsim.drafter_targets import Target, targets_of_drafters
from specsim.errors import InputError, as_fraction
from specsim.machine import Machine
from specsim.policy import Policy, policies
from specsim.prediction import machine_of
from specsim.profiles import unlike_hosts
from specsim.progress import track
from specsim.quantities import Quantity, short
from specsim.scenarios import Scenario
from specsim.simulation_costs import eager_prefills
from specsim.steady import Requests
from specsim.targets import Targets
from specsim.two_states import two_states


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
        choices.append(choice_of(s, machines[key], rate, requests, targets, headroom))
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
                choices.append(choice_of(s, machine, rate, requests, targets, headroom, policy.rising))
    for c in list(choices):
        capped = with_cap(c, rate, targets, headroom)
        if capped is not None and capped.replicas and order(capped, hysteresis) < order(c, hysteresis):
            choices.append(capped)
    ordered = tuple(sorted(choices, key=lambda c: order(c, hysteresis)))
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
    warnings += unlike_hosts(c.scenario.profile for c in choices)
    said = tuple(dict.fromkeys(warnings))
    return Plan(
        rate, requests, targets, ordered, tpot_interval(best), tuple(made), tuple(found), speedup=speedup, warnings=said
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


def _check(rate: float, requests: Requests, speedup: float, headroom: float, hysteresis: float) -> None:
    if not 0 <= hysteresis < 1:
        raise InputError(f"{hysteresis:g} is not in [0, 1)", where="--hysteresis", mend=as_fraction(hysteresis))
    if not 0 < rate < 1e9:
        raise InputError(f"{rate:g} requests a second", where="--rate", mend="give a rate above 0, below 1e9")
    for name, value in (("--input-tokens", requests.input_tokens), ("--output-tokens", requests.output_tokens)):
        if not 1 <= value < 2**31:
            raise InputError(f"{value:g} tokens", where=name, mend="give 1 or more, below 2^31")
    if not 0 <= requests.prefix_rate < 1:
        where = "--prefix-rate"
        raise InputError(
            f"{requests.prefix_rate:g} is not in [0, 1)", where=where, mend=as_fraction(requests.prefix_rate)
        )
    if not 1 <= speedup < 100:
        raise InputError(
            f"{speedup:g} is no speedup", where="--speedup", mend="give 1 or more, such as 1.5 for half as fast again"
        )
    if not 0 <= headroom < 10:
        raise InputError(f"{headroom:g} is out of range", where="--headroom", mend=as_fraction(headroom))
