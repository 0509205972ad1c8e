"""Two profiles of one box (or of two), weighed by what each of their numbers does to a step of a scenario.

    weigh(a, b, scenario) -> numbers, the weightiest first: a, b, b / a - 1, and which part of a step hangs on it

The part is an elasticity: by how many per cent the step grows when the number grows by one per cent. Steps are the plain
decode step and the speculative cycle, without the host's own time, which no profile holds; the larger part counts. Shapes that were
timed themselves are priced by their class here. A curve
of all-reduces counts as one number; its difference is the one that the scenario's own messages see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.cycle import evaluate
from specsim.prediction import machine_of
from specsim.profiles import AllReduceCurve, Profile
from specsim.scenarios import Scenario, check_ranks

STEP = 0.01  # relative change by which an elasticity is taken
MATTERS = 0.05  # of a step


@dataclass(frozen=True)
class Weighed:
    """One number of two profiles. part: of the step; relative: b / a - 1, None when one profile lacks it; effect: by how
    much the step changes with b's number in a's place."""

    key: str
    a: float
    b: float | None
    relative: float | None
    part: float
    effect: float | None

    @property
    def matters(self) -> bool:
        return abs(self.part) > MATTERS


def weigh(a: Profile, b: Profile, scenario: Scenario) -> list[Weighed]:
    """Every number of `a` that a step of the scenario depends on, the weightiest first. Raises InputError where `b` has too
    few GPUs for the scenario's ranks, or no all-reduce."""
    check_ranks(b, scenario.parallel.tp)
    a, b = (
        box.model_copy(update={"samples": {}}) for box in (a, b)
    )  # else shapes that were timed do not heed the class's numbers
    base = steps(scenario, a)
    found = []
    for key, value, put in _numbers(a):
        parts = (steps(scenario, put(value * (1 + STEP))) / base - 1) / STEP
        at = int(np.argmax(np.abs(parts)))
        other = _value(b, key)
        if parts[at] and value:
            effect = None if other is None else float(steps(scenario, put(other))[at] / base[at] - 1)
            relative = None if other is None else other / value - 1
            found.append(Weighed(key, value, other, relative, float(parts[at]), effect))
    found += _curves(a, b, scenario, base)
    return sorted(found, key=lambda w: -abs(w.part))


def steps(scenario: Scenario, profile: Profile) -> NDArray[np.float64]:
    """Seconds of the plain step, and of the cycle where there is one, without host time."""
    moved = replace(scenario, profile=profile)
    c = evaluate(moved, machine_of(moved))
    cycle = [phase.total for phase in (c.draft, c.verify, c.extend) if phase is not None]
    totals = [c.decode.total] + ([np.asarray(sum(cycle))] if cycle else [])
    return np.array([float(total.reshape(-1)[0]) for total in totals])


def _numbers(profile: Profile) -> Iterator[tuple[str, float, Any]]:
    """Key, value and a function that gives the profile with another value there."""
    for name, rate in profile.operators.items():
        for field in ("fixed_us", "inner_ns", "bandwidth_gb_s", "peak_tflops"):
            value = getattr(rate, field)
            if value:
                yield f"operators.{name}.{field}", value, _operator_setter(profile, name, field)
    for field in ("kernel_us", "collective_us", "graph_us", "graph_node_us"):
        yield f"launch.{field}", getattr(profile.launch, field), _launch_setter(profile, field)


def _operator_setter(profile: Profile, name: str, field: str) -> Any:
    def put(value: float) -> Profile:
        rate = profile.operators[name].model_copy(update={field: value})
        return profile.model_copy(update={"operators": {**profile.operators, name: rate}})

    return put


def _launch_setter(profile: Profile, field: str) -> Any:
    def put(value: float) -> Profile:
        return profile.model_copy(update={"launch": profile.launch.model_copy(update={field: value})})

    return put


def _value(profile: Profile, key: str) -> float | None:
    group, *rest = key.split(".")
    if group == "launch":
        return float(getattr(profile.launch, rest[0]))
    rate = profile.operators.get(rest[0])
    found = None if rate is None else getattr(rate, rest[1])
    return None if found is None else float(found)


def _curves(a: Profile, b: Profile, scenario: Scenario, base: NDArray[np.float64]) -> Iterator[Weighed]:
    """The curves that serve the scenario: their difference is that of the step, over their part of it."""
    others = {(c.implementation, c.ranks, c.mode): c for c in b.allreduce}
    for curve in a.allreduce:
        slower = curve.model_copy(update={"latency_us": [t * (1 + STEP) for t in curve.latency_us]})
        parts = (steps(scenario, _with(a, curve, slower)) / base - 1) / STEP
        at = int(np.argmax(np.abs(parts)))
        if not parts[at]:
            continue
        key = (curve.implementation, curve.ranks, curve.mode)
        other = others.get(key)
        effect = None if other is None else float(steps(scenario, _with(a, curve, other))[at] / base[at] - 1)
        middle = curve.latency_us[len(curve.latency_us) // 2]
        relative = None if effect is None else effect / float(parts[at])
        seen = None if relative is None else middle * (1 + relative)
        yield Weighed(f"allreduce.{key[0]}.{key[1]}.{key[2]}", middle, seen, relative, float(parts[at]), effect)


def _with(profile: Profile, curve: AllReduceCurve, other: AllReduceCurve) -> Profile:
    return profile.model_copy(update={"allreduce": [other if c is curve else c for c in profile.allreduce]})
