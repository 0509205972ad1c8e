"""Records that a fit of engine terms sets aside, and records that it fits though they stand apart from the others.

A run tells about an engine's terms only where all else that its time is made of is known on its box. What is not known, the
scenario and the profile say beforehand, whatever the run's own times:

- operator classes and all-reduces that the profile took from tables or assumed, though it measured others on the box: what is
  wrong with them would go into the terms;
- experts outside the sizes that their class was calibrated at: engines choose the configuration of their kernel by how many
  there are and how wide, and a fit to other sizes does not know this one's;
- routing in which the rows of a request choose alike: a verify reads as few experts as a plain step does;
- routing in which all rows choose the same experts: kernels that cut an expert's rows into tiles take its weights up once a tile,
  and classes are calibrated where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from specsim.engine_fit import EAGER_SPREAD, MODEL_SPREAD, Array, Case
from specsim.forward import experts_class
from specsim.machine import positive, priced_as
from specsim.models import Experts
from specsim.profiles import Profile
from specsim.provenance import classes_of, read_by
from specsim.routing import ALIKE, COLLAPSED
from specsim.scenarios import Scenario

CALIBRATED = ("measured", "fitted")
SIZES = ("experts", "intermediate")  # of a class's samples: what engines choose the kernel of experts by
APART = 2.0  # spreads between models beyond which a record is said to stand apart
COMPARED = ("decode", "verify", "cycle")  # the timers of draft and extend hold waits as well


def set_aside(cases: Iterable[Case]) -> dict[str, str]:
    """By record that says nothing about the engine's terms, why."""
    found = {case.record: next(_reasons(case.scenario), "") for case in cases}
    return {record: why for record, why in found.items() if why}


def _reasons(s: Scenario) -> Iterator[str]:
    if foreign := _foreign(s):
        yield f"{s.profile.name} has {', '.join(foreign)} from elsewhere, and others measured on the box"
    for name, experts in _experts(s):
        sizes, known = _sizes(experts, s), _calibrated(name, s.profile)
        if known and not all(low <= sizes[n] <= high for n, (low, high) in known.items()):
            ranges = {n: f"{low:g}" if low == high else f"{low:g} to {high:g}" for n, (low, high) in known.items()}
            here = f"{sizes['experts']:g} experts of width {sizes['intermediate']:g} on a rank"
            there = f"{ranges['experts']} of width {ranges['intermediate']}"
            yield f"{here}, and {name} of {s.profile.name} was calibrated at {there}: `specsim calibrate --model` measures a model's own"
    if s.routing is COLLAPSED:
        yield "all rows chose the same experts, and classes are calibrated with rows that spread"
    if s.routing is ALIKE and s.method != "none":
        yield "the rows of a request chose the same experts, and those of a verify are taken to choose for themselves"


def _foreign(s: Scenario) -> list[str]:
    """What the scenario's costs read of a profile that has it from elsewhere, though others of it were measured."""
    box = s.profile
    if not any(rate.source.kind in CALIBRATED for rate in box.operators.values()):
        return []  # tables alone: terms are then what makes up for them
    classes = dict.fromkeys(priced_as(name, box.operators) for name in classes_of(s))
    found = [n for n in classes if n not in box.operators or box.operators[n].source.kind not in CALIBRATED]
    read = read_by(s) if s.parallel.tp > 1 else frozenset()
    curves = [c for c in box.allreduce if (c.implementation, c.ranks, c.mode) in read]
    return found + [f"the all-reduce {c.implementation}" for c in curves if c.source.kind not in CALIBRATED]


def _experts(s: Scenario) -> Iterator[tuple[str, Experts]]:
    """Kinds of routed experts of target and drafter, with their class."""
    layers = [layer for model in (s.model, s.draft) if model is not None for layer, _ in model.layers]
    for experts in dict.fromkeys(layer.experts for layer in layers):
        if experts is not None:
            yield priced_as(experts_class(experts, s.in_blocks), s.profile.operators), experts


def _sizes(experts: Experts, s: Scenario) -> dict[str, float]:
    """SIZES on one rank."""
    tp, ep = s.parallel.tp, s.parallel.ep
    return dict(zip(SIZES, (experts.count / ep, experts.intermediate * ep / tp), strict=True))


def _calibrated(name: str, box: Profile) -> dict[str, tuple[float, float]]:
    """The range of each of SIZES in the samples of a class; {} where the profile keeps none."""
    table = box.samples.get(name)
    if not isinstance(table, Mapping) or not isinstance(table.get("rows"), list):
        return {}
    columns = str(table.get("columns")).split()
    if not set(SIZES) <= set(columns):
        return {}
    rows = [str(row).split() for row in table["rows"]]
    sizes = [[positive(row[columns.index(n)]) for n in SIZES] for row in rows if len(row) == len(columns)]
    known = [of_a_row for of_a_row in sizes if all(of_a_row)]
    return {n: (min(v), max(v)) for n, v in zip(SIZES, zip(*known, strict=True), strict=False)}


def standing_apart(cases: Sequence[Case], terms: Mapping[str, Array]) -> dict[str, float]:
    """Records whose target's passes and cycles, with the fitted terms, are further from what the other records say than models
    differ: by record, the median of predicted / observed - 1. The fit weighs them down; a fault of their server is likely."""
    error = {}
    for case in cases:
        times = case.predicted(terms)[:, 0]
        logs = [np.log(t / seen.ms) for seen, t in zip(case.seen, times, strict=True) if seen.phase in COMPARED]
        if logs:
            error[case.record, case.eager] = float(np.median(logs))
    found: dict[str, float] = {}
    for eager, spread in ((False, MODEL_SPREAD), (True, EAGER_SPREAD)):
        alike = [e for (_, mode), e in error.items() if mode == eager]
        found |= {
            record: float(np.expm1(e))
            for (record, mode), e in error.items()
            if mode == eager and abs(e - np.median(alike)) > APART * spread
        }
    return found
