"""The prediction of one scenario: times, tokens a second, break-even, where the time goes and where numbers come from."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.acceptance import Acceptance, rate_for_length
from specsim.cycle import Cycle, evaluate
from specsim.errors import InputError
from specsim.forward import Cost
from specsim.machine import Machine, priced_as, stand_in
from specsim.machine import build as build_machine
from specsim.memory import Memory, memory
from specsim.pages import Shown
from specsim.profiles import unread_names
from specsim.provenance import sources_of
from specsim.quantities import Quantity, landmarks, six
from specsim.reproduce import command_of
from specsim.scenarios import Scenario

Array = NDArray[np.float64]
SAMPLES = 400
RATES = np.arange(11) / 10  # accept rates of the speedup curve
SCHEMA = "specsim.prediction/1"
ONE_SIDED, LEAST = 3.0, 0.005  # an interval that reaches so much farther down than up, and than that share of its value


@dataclass(frozen=True)
class Part:
    """One component of one phase. count: calls; bytes: moved, or sent by all-reduces."""

    phase: str
    component: str
    ms: float
    count: float
    bytes: float
    source: str


@dataclass(frozen=True, repr=False)
class Prediction(Shown):
    """What specsim says of a scenario. Times in ms with 80 % intervals; None where there is no speculation, or no
    acceptance was given. `speedup_curve` holds (accept rate, speedup) pairs."""

    page_from = "specsim.text"

    scenario: Scenario
    decode_ms: Quantity
    decode_tokens_per_s: Quantity
    decode_host_ms: Quantity  # of `decode_ms`
    draft_ms: Quantity | None = None
    verify_ms: Quantity | None = None
    extend_ms: Quantity | None = None
    host_ms: Quantity | None = None
    cycle_ms: Quantity | None = None
    accept_length: float | None = None
    accept_rate: float | None = None
    spec_tokens_per_s: Quantity | None = None
    speedup: Quantity | None = None
    breakeven_length: Quantity | None = None
    breakeven_rate: Quantity | None = None
    reachable: bool | None = None
    speedup_curve: tuple[tuple[float, Quantity], ...] = ()
    parts: tuple[Part, ...] = ()
    memory: Memory | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether the GPUs hold it; times of what does not fit are what they would be on GPUs with more memory."""
        return self.memory is None or self.memory.fits

    def part_ms(self, phase: str, component: str) -> float:
        """ms of one component of a phase, 0 when absent."""
        return sum(p.ms for p in self.parts if p.phase == phase and p.component == component)

    def json(self, *, sources: bool = True) -> dict[str, Any]:
        """The document of schema specsim.prediction/1 (docs/reference). sources: with those of every number."""
        s = self.scenario

        def q(x: Quantity | None) -> dict[str, float] | None:
            return None if x is None else x.json()

        return {
            "schema": SCHEMA,
            **self.said(),
            "command": command_of(s),
            "scenario": {
                "model": s.names.get("model", s.model.name),
                "draft": s.names.get("draft") or None,
                "hardware": s.profile.name,
                "engine": s.engine.name,
                "tp": s.parallel.tp,
                "ep": s.parallel.ep,
                "dp_attention": s.parallel.dp,
                "batch": _whole(s.batch),
                "context": _whole(s.context),
                "method": s.method,
                "num_steps": _whole(s.num_steps),
                "topk": s.topk,
                "draft_tokens": _whole(s.draft_tokens),
                "routing": s.routing.name if s.routing else "uniform",
                "eager": sorted(
                    phase for phase in {p.phase for p in self.parts} if not s.graph_phases.get(phase, True)
                ),
            },
            "decode_ms": q(self.decode_ms),
            "draft_ms": q(self.draft_ms),
            "verify_ms": q(self.verify_ms),
            "extend_ms": q(self.extend_ms),
            "host_ms": q(self.host_ms),
            "cycle_ms": q(self.cycle_ms),
            "accept_length": self.accept_length,
            "accept_rate": self.accept_rate,
            "decode_tokens_per_s": q(self.decode_tokens_per_s),
            "spec_tokens_per_s": q(self.spec_tokens_per_s),
            "speedup": q(self.speedup),
            "breakeven": None
            if self.breakeven_length is None
            else {
                "accept_length": q(self.breakeven_length),
                "accept_rate": q(self.breakeven_rate),
                "reachable": self.reachable,
            },
            "speedup_by_accept_rate": [{"accept_rate": a, "speedup": q(v)} for a, v in self.speedup_curve],
            "breakdown": [
                {
                    "phase": p.phase,
                    "component": p.component,
                    "ms": six(p.ms),
                    "count": six(p.count),
                    "bytes": six(p.bytes),
                    "source": p.source,
                }
                for p in self.parts
            ],
            "memory": None
            if self.memory is None
            else {
                "weights_gb_per_gpu": six(self.memory.weights / 1e9),
                "kv_gb_per_gpu": six(self.memory.kv / 1e9),
                "fits": self.memory.fits,
            },
            **({"sources": sources_of(s)} if sources else {}),
            "warnings": list(self.warnings),
        }


def _whole(x: Array) -> int:
    return int(x.item())


def machine_of(s: Scenario, *, samples: int = 0, seed: int = 0) -> Machine:
    """The scenario's machine in seconds and bytes, with parameter samples for intervals: sample 0 is the profile's own
    value, and without samples every number has shape ()."""
    return build_machine(s.profile, s.engine, samples=samples, seed=seed)


def predict(s: Scenario, *, samples: int = SAMPLES, seed: int = 0, machine: Machine | None = None) -> Prediction:
    """Predict one scenario (every array of it has one element).

    machine: what `machine_of` made for this profile and engine, for callers that predict many scenarios on one.
    Raises InputError when the scenario holds arrays; use `specsim.cycle.evaluate` for many at once.
    """
    return price(s, machine_of(s, samples=samples, seed=seed) if machine is None else machine).accepting(s)


@dataclass(frozen=True)
class Priced:
    """A prediction before any acceptance, which never enters a cost: one serves all acceptances. marks: the
    `landmarks` of the cycle's seconds and of the break-even length, and how many parameter samples they come from; None without
    speculation. notes: what there is to say of the machine."""

    prediction: Prediction
    marks: tuple[Array, Array, int] | None
    notes: tuple[str, ...]

    def accepting(self, s: Scenario) -> Prediction:
        """The prediction of a scenario that differs from the priced one in nothing but its acceptance."""
        said: dict[str, Any] = {"scenario": s, "warnings": (*s.warnings, *self.notes)}
        if s.acceptance is None or self.marks is None:
            return replace(self.prediction, **said)
        cycle_s, needed, samples = self.marks
        steps, tokens = _whole(s.num_steps), _whole(s.draft_tokens)
        lengths = s.acceptance.length(steps, s.topk, tokens)
        if np.size(lengths) > 1:
            raise several_values()
        gained = np.asarray(lengths).item()
        spec, speedup = Quantity.at(np.vstack([_whole(s.batch) * gained / cycle_s, gained / needed]), samples)
        rate = np.asarray(s.acceptance.rate(steps, s.topk, tokens)).item()
        return replace(
            self.prediction,
            **said,
            accept_length=six(gained),
            accept_rate=None if np.isnan(rate) else six(rate),
            spec_tokens_per_s=spec,
            speedup=speedup,
        )


def several_values() -> InputError:
    return InputError("several values where one is needed", where="predict", mend="use sweep for lists")


def price(s: Scenario, machine: Machine) -> Priced:
    """What is predicted of a scenario whatever the acceptance; see `predict`."""
    if max(s.batch.size, s.context.size, s.draft_tokens.size, s.num_steps.size) > 1:
        raise several_values()
    c = evaluate(s, machine)
    batch = float(s.batch.reshape(-1)[0])
    notes = tuple(_warnings(s, c))
    parts = [*_parts("decode", c.decode), *_host_part("decode", c.decode_host, machine.terms_source)]
    seconds = {"decode_ms": c.decode_s, "decode_host_ms": c.decode_host}
    if c.verify is None or c.cycle_host is None:
        marks = landmarks([*seconds.values()])
        decode, host, speed = Quantity.at(np.vstack([marks * 1e3, batch / marks[:1]]), machine.samples)
        notes += _evenly(s, decode)
        return Priced(Prediction(s, decode, speed, host, memory=memory(s), parts=tuple(parts)), None, notes)
    for phase, part in (("draft", c.draft), ("verify", c.verify), ("extend", c.extend)):
        parts += _parts(phase, part) if part is not None else []
    parts += _host_part("host", c.cycle_host, machine.terms_source)
    none = np.zeros_like(c.cycle_s)
    seconds |= {
        "draft_ms": c.draft.total if c.draft else none,
        "verify_ms": c.verify.total,
        "extend_ms": c.extend.total if c.extend else none,
        "host_ms": c.cycle_host,
        "cycle_ms": c.cycle_s,
    }
    marks = landmarks([*seconds.values(), c.cycle_s / c.decode_s])
    needed = marks[-1]
    reachable = bool(needed[0] <= _most(s))
    lengths = _curve_lengths(float(s.num_steps.flat[0]), s.topk, float(s.draft_tokens.flat[0]))
    rates = _rates(s, needed)
    found = Quantity.at(
        np.vstack(
            [
                marks[:-1] * 1e3,
                needed,
                batch / marks[0],
                np.where(np.isnan(rates), 1.0, rates),  # samples that no rate reaches count as 1
                lengths / needed,
            ]
        ),
        machine.samples,
    )
    known = dict(zip(seconds, found, strict=False))
    length, speed, rate, *speedups = found[len(seconds) :]
    prediction = Prediction(
        scenario=s,
        **known,
        decode_tokens_per_s=speed,
        accept_length=None,  # `accepting` says, and the warnings too
        accept_rate=None,
        breakeven_length=length,
        breakeven_rate=rate if reachable else None,
        reachable=reachable,
        speedup_curve=tuple(zip(RATES.tolist(), speedups, strict=True)),
        parts=tuple(parts),
        memory=memory(s),
        warnings=(),
    )
    notes += _evenly(s, known["verify_ms"])
    return Priced(prediction, (marks[-2], needed, machine.samples), notes)


@functools.lru_cache(maxsize=256)
def _curve_lengths(steps: float, topk: int, tokens: float) -> Array:
    """Accept lengths at `RATES`, shape (rate, 1)."""
    return np.asarray(Acceptance.constant(RATES).length(steps, topk, tokens)).reshape(-1, 1)


def _most(s: Scenario) -> float:
    """The longest accept length there is: every draft accepted."""
    return float(np.max(np.minimum(s.num_steps, s.draft_tokens - 1))) + 1.0


def _rates(s: Scenario, lengths: Array) -> Array:
    """The constant accept rates whose lengths these are; nan where none reaches it."""
    return np.asarray(rate_for_length(lengths, _whole(s.num_steps), s.topk, _whole(s.draft_tokens)))


def _parts(phase: str, c: Cost) -> list[Part]:
    return [
        Part(phase, name, seconds.item(0) * 1e3, c.calls[name], c.bytes[name].item(0), c.source[name])
        for name, seconds in c.seconds.items()
    ]


def _host_part(phase: str, seconds: Array, source: str) -> list[Part]:
    return [Part(phase, "host", float(seconds.reshape(-1)[0]) * 1e3, 1, 0.0, source)]


def _evenly(s: Scenario, step: Quantity) -> tuple[str, ...]:
    """Why an interval reaches down alone, where even routing is the reason: no other touches as many experts."""
    below, above = step.value - step.low, step.high - step.value
    if s.routing is not None or not s.model.experts or below <= ONE_SIDED * max(above, LEAST * step.value):
        return ()
    how = "intervals reach down alone, since rows that prefer some experts touch fewer"
    return (f"experts are taken to be chosen evenly: {how}; --routing zipf:S or a file says how they are chosen",)


def _beyond_graphs(s: Scenario, c: Cycle) -> list[str]:
    """Notes on the phases that run eagerly only because no graph is as large as the batch."""
    batch, rows, found = int(s.batch.item()), int(s.draft_tokens.item()), []
    for phase, part in (("decode", c.decode), ("verify", c.verify)):
        if part is not None and s.graph_phases[phase] and not np.all(part.graph):
            largest = max(s.captured(phase, rows), default=0)
            found.append(
                f"{phase} has no CUDA graph of {batch:,} sequences, the largest is of {largest:,}: it is launched kernel by kernel"
            )
    return found


def _warnings(s: Scenario, c: Cycle) -> list[str]:
    out = []
    if s.profile.cpu:
        out.append(f"profile {s.profile.name} was made without a GPU: its times say nothing about one")
    out += [f"{s.profile.name}: {text}" for text in (*s.profile.caveats, *unread_names(s.profile))]
    out += _beyond_graphs(s, c)
    known = s.profile.operators
    for name in c.classes:
        if priced_as(name, known) not in known:
            out.append(f"{s.profile.name} has no {name}: {stand_in(name, known)} stands in, with a wider interval")
        elif name not in known and s.block_products != s.engine.block_products({}, s.profile.gpu.compute_capability):
            why = f"{s.profile.name} has not measured {name}: it is priced as {priced_as(name, known)}"
            out.append(f"{why}, so that this choice of kernel changes nothing")
    if s.expert_kernels and s.model.experts and not (s.in_blocks.experts and s.model.experts.format.in_blocks):
        general = f"moe_{s.model.experts.format.name}"
        why = f"{s.profile.name} has not measured {general}_{s.expert_kernels}: it is priced as {general}"
        out.append(f"{why}, so that this choice of kernel changes nothing")
    return out
