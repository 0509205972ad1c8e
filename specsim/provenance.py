"""Where the numbers behind a result come from: every group of a profile, an engine, a model or a drafter that costs use.

One source is `{"of", "kind", "reference", "date", "relative_uncertainty"}`: what it is of; measured, fitted, published,
datasheet, assumed or given; where to find it; and one standard deviation over the value, where one is known.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from specsim.configs import Preset, list_presets
from specsim.cycle import evaluate
from specsim.forward import build
from specsim.machine import build as build_machine
from specsim.machine import nearest_curve, priced_as, stand_in
from specsim.models import Model
from specsim.profiles import AllReduceCurve, Group, Profile
from specsim.scenarios import Scenario

Source = dict[str, Any]
POINTS = 16  # of an array, at which it is seen what takes part
KINDS = ("measured", "fitted", "published", "datasheet", "assumed")


def sources_of(s: Scenario, *, prefills: bool = False) -> list[Source]:
    """The sources of one scenario's costs, acceptance and shapes: of what takes part in them, and nothing else.

    prefills: prompts are prefilled too, which takes a term of its own, and messages of all sizes.
    """
    read = read_by(s)
    if prefills:
        read |= {"prefill_host", *_preferred(s)}
    box = s.profile
    found = [_group(f"{box.name}: {box.gpu.name}", box.gpu)]
    for name in dict.fromkeys(priced_as(name, box.operators) for name in classes_of(s)):
        if name in box.operators:
            found.append(_group(f"{box.name}: {name}", box.operators[name]))
        else:
            other = stand_in(name, box.operators)
            found.append({**_group(f"{box.name}: {name}, for which {other} stands in", box.operators[other]), "kind": "assumed"})  # fmt: skip
    found += [_group(f"{box.name}: {_words(c)}", c) for c in box.allreduce if _key(c) in read]
    found.append(_group(f"{box.name}: launches", box.launch))
    if box.host is not None:
        found.append(_group(f"{box.name}: cores of the host", box.host))
    found += _terms(s, read)
    found += [_shape(model) for model in (s.model, s.draft) if model is not None]
    if s.acceptance is not None and s.method != "none":
        kind = "given" if s.acceptance.source.startswith("given") else "published"
        found.append(_source("acceptance", kind, s.acceptance.source))
    if s.model.experts is not None and s.routing is None:
        found.append(_source("expert popularity", "assumed", "uniform; --routing gives another"))
    return found


def sources_of_all(scenarios: Iterable[Scenario], *, prefills: bool = False) -> list[Source]:
    """The sources of several scenarios, each once."""
    found = (source for s in scenarios for source in sources_of(s, prefills=prefills))
    return list({repr(source): source for source in found}.values())


def read_by(s: Scenario) -> frozenset[Any]:
    """What the scenario's costs read of its machine; of arrays, at points from the smallest to the largest."""
    spread: dict[str, Any] = {
        name: np.round(np.geomspace(max(np.min(values), 1), max(np.max(values), 1), POINTS))
        for name in ("batch", "context", "draft_tokens", "num_steps")
        if (values := getattr(s, name)).size > 1
    }
    machine = build_machine(s.profile, s.engine).noting()
    evaluate(replace(s, **spread), machine)
    return machine.read


def sources_of_profile(box: Profile) -> list[Source]:
    """Every group of a profile."""
    groups: list[tuple[str, Group]] = [(box.gpu.name, box.gpu), *box.operators.items()]
    groups += [(_words(curve), curve) for curve in box.allreduce]
    groups.append(("launches", box.launch))
    if box.host is not None:
        groups.append(("cores of the host", box.host))
    groups += ((f"engine terms, {name}", terms) for name, terms in box.engines.items())
    return [_group(f"{box.name}: {name}", group) for name, group in groups]


def _source(of: str, kind: str, reference: str, date: str | None = None, relative: float | None = None) -> Source:
    return {"of": of, "kind": kind, "reference": reference, "date": date, "relative_uncertainty": relative}


def _group(of: str, group: Group) -> Source:
    source = group.source
    return _source(of, source.kind, source.reference, source.date, group.relative_uncertainty)


def _words(curve: AllReduceCurve) -> str:
    return f"all-reduce, {curve.implementation}, {curve.ranks} ranks, {curve.mode}"


def _shape(model: Model) -> Source:
    preset = _presets().get(model.name) if model.source.startswith("preset ") else None
    if preset is None:
        return _source(f"shape of {model.name}", "given", model.source or model.name)
    return _source(f"shape of {model.name}", "published", preset.source or preset.hf_id or preset.name)


@functools.cache
def _presets() -> dict[str, Preset]:
    return {preset.name: preset for preset in list_presets()}


def classes_of(s: Scenario) -> list[str]:
    """Operator classes of the scenario's passes, sorted."""
    passes = [build(s.model, s.parallel, s.engine, True, in_blocks=s.in_blocks)]
    if s.draft is not None:
        passes.append(build(s.draft, s.parallel, s.engine, True, fc=True, in_blocks=s.in_blocks))
    return sorted({o.rate for p in passes for o in p.operators if o.component != "allreduce"})


def _key(curve: AllReduceCurve) -> tuple[str, int, str]:
    return curve.implementation, curve.ranks, curve.mode


def _preferred(s: Scenario) -> Iterator[tuple[str, int, str]]:
    """The curves that serve some message size, by the engine's order of preference."""
    curves = {_key(curve): curve for curve in s.profile.allreduce}
    if s.parallel.tp == 1 or not curves:
        return
    for graph in sorted({s.graph_phases.get(phase, True) for phase in ("decode", "draft", "verify", "extend")}):
        names = tuple(name for name, _ in s.network.limits(s.engine, graph, gather=False))
        for place in range(len(names)):
            yield _key(nearest_curve(curves, names[place:], s.parallel.tp, "graph" if graph else "eager"))


def _terms(s: Scenario, read: Collection[str]) -> Iterator[Source]:
    """The engine's terms that were read: those that the profile has fitted together, the description's own one by one."""
    fitted = s.profile.engines.get(s.engine.name)
    here = [name for name in s.engine.terms if name.removesuffix("_us") in read]
    own = [name for name in here if fitted is not None and getattr(fitted, name) is not None]
    if fitted is not None and own:
        yield _group(f"{s.profile.name}: engine terms, {s.engine.name}", fitted)
    for name in here:
        term = s.engine.terms[name]
        if name not in own:
            word = term.source.split()[0].strip(":")
            kind = word if word in KINDS else "assumed"
            yield _source(
                f"{s.engine.name} {s.engine.version}: {name}", kind, term.source, None, term.relative_uncertainty
            )
