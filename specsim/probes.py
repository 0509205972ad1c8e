"""What can be measured on a box, and what each fault predicts for it.

A probe is one number (or one yes or no) that a user can read off; `Boxes.predict` gives its value on every imagined box
of a fault, priced by `specsim.cycle`. Observations, candidate experiments and synthetic studies share these.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specsim.cycle import evaluate, target_pass
from specsim.forward import allreduce_seconds
from specsim.hypotheses import CHANCES, FAULTS, Fault, Severity, boxes, launched, launches, take
from specsim.machine import Machine
from specsim.scenarios import Scenario

Array = NDArray[np.float64]
Index = NDArray[np.intp]
CHOICES = 32  # of boxes whose prices are kept: two of every fault, and more
STEP_NOISE = 0.05  # relative error of a step time as people report it
UNITS = {"decode": "ms", "verify": "ms", "cycle": "ms", "component": "ms", "greedy": "ms", "protocol": "ms",
         "allreduce": "us", "clock": "of full", "identity": "", "rate": "tok/s"}  # fmt: skip
FLOORS = {"component": 0.3}  # in the probe's unit: below it, differences say nothing
_SCALE = {"ms": 1e3, "us": 1e6}


@dataclass(frozen=True)
class Probe:
    """One measurable number. kind:

    decode, verify, cycle: ms of one pass or cycle (`batch`, `tokens` of a verify; `eager`: with CUDA graphs off)
    component: ms of one part of verify (`name`); allreduce: us of one call of `size` bytes in a graph
    greedy: ms of a verify with greedy sampling; protocol: ms of a verify under another NCCL protocol
    rate: tokens a second; identity: throughput x cycle / (batch x accept length), 1 when the length is right
    clock: SM clock over its maximum
    yes: a finding, true or false (`name` as in specsim.hypotheses.CHANCES)
    """

    kind: str
    batch: int = 1
    tokens: int = 1
    name: str = ""
    size: int = 0
    eager: bool = False
    noise: float = STEP_NOISE

    def scaled(self, x: Array) -> Array:
        """Values on the scale on which the noise is normal with standard deviation 1."""
        return np.asarray(np.log(np.maximum(x, 1e-9) + FLOORS.get(self.kind, 0.0)) / self.noise)

    @property
    def binary(self) -> bool:
        return self.kind == "yes"

    @property
    def unit(self) -> str:
        return "" if self.binary else UNITS[self.kind]


@dataclass(frozen=True)
class Observation:
    """A probe and what it gave: a number in the probe's unit, or 1 and 0 for yes and no."""

    probe: Probe
    value: float
    source: str = "given"


class Boxes:
    """Imagined boxes of every fault: one machine, one severity a fault and sample.

    predict(probe, fault): shape (samples,), in the probe's unit, or the probability of a yes. Without a scenario
    (nothing is known of the model or the hardware) only yes-or-no probes can be predicted.
    """

    def __init__(self, scenario: Scenario | None, samples: int, seed: int = 0) -> None:
        self.scenario = scenario
        self.samples = samples + 1
        self.machine = boxes(scenario, samples, seed) if scenario is not None else None
        hosts = launches(np.random.default_rng((seed, 3)), self.samples)  # of a box, should it launch eagerly
        self.severity: dict[str, Severity] = {
            f.id: {**hosts, **f.draw(np.random.default_rng((seed, 2, i)), self.samples)} for i, f in enumerate(FAULTS)
        }
        self._known: dict[tuple[Probe, str], Array] = {}
        self._some: dict[bytes, Machine] = {}

    def on(self, machine: Machine) -> Boxes:
        """The same severities on another machine of as many samples."""
        other = copy(self)
        other.machine, other._known, other._some = machine, {}, {}
        return other

    def of(self, scenario: Scenario) -> Boxes:
        """The same boxes serving another scenario."""
        if scenario is self.scenario:
            return self
        other = copy(self)
        other.scenario, other._known = scenario, {}
        return other

    def predict(self, probe: Probe, fault: Fault) -> Array:
        """The probe's value on every box of the fault. Raises ValueError for a time without a scenario."""
        key = (probe, fault.id)
        if key not in self._known:
            if probe.binary:
                self._known[key] = np.full(self.samples, chance(probe, fault))
            else:
                assert self.machine is not None
                self._known[key] = self._price(probe, fault, self.machine, self.severity[fault.id], self.samples)
        return self._known[key]

    def remember(self, probes: Iterable[Probe]) -> None:
        """Price the probes on all boxes of all faults now, so that many posteriors over these boxes cost little."""
        for probe in probes:
            for fault in FAULTS:
                self.predict(probe, fault)

    def predict_at(self, probe: Probe, fault: Fault, chosen: Index) -> Array:
        """The same for some of the boxes."""
        if (probe, fault.id) in self._known or probe.binary:
            return np.asarray(self.predict(probe, fault)[chosen])
        severity = {k: v[chosen] for k, v in self.severity[fault.id].items()}
        return self._price(probe, fault, self._machine_of(chosen), severity, len(chosen))

    def components_at(self, phase: str, fault: Fault, chosen: Index) -> dict[str, Array]:
        """ms by component of a decode or verify on some of the boxes."""
        assert self.scenario is not None
        severity = {k: v[chosen] for k, v in self.severity[fault.id].items()}
        machine = self._machine_of(chosen)
        priced: list[dict[str, Array]] = []
        for variant in fault.variants(self.scenario, phase):
            s, m = fault.apply(variant, machine, severity, phase)
            seconds = target_pass(s, m, np.ones(()) if phase == "decode" else s.draft_tokens, phase).seconds
            priced.append({k: np.broadcast_to(np.asarray(v).reshape(-1), (len(chosen),)) for k, v in seconds.items()})
        which = np.broadcast_to(_which(severity, len(priced)), (len(chosen),))
        return {
            k: 1e3 * np.stack([p.get(k, np.zeros(len(chosen))) for p in priced])[which, np.arange(len(chosen))]
            for k in priced[0]
        }

    def _machine_of(self, chosen: Index) -> Machine:
        """Some of the boxes, and what was priced on them: many probes are asked of the same few."""
        assert self.machine is not None
        key = chosen.tobytes()
        if key not in self._some:
            if len(self._some) >= CHOICES:
                self._some.pop(next(iter(self._some)))
            self._some[key] = take(self.machine, chosen)
        return self._some[key]

    def _price(self, probe: Probe, fault: Fault, m: Machine, severity: Severity, n: int) -> Array:
        if self.scenario is None:
            raise ValueError("no scenario, no times")
        flat = np.broadcast_to(np.asarray(_price(self.scenario, probe, fault, m, severity), dtype=float), (n,))
        return np.array(flat) * _SCALE.get(probe.unit, 1.0)


def chance(probe: Probe, fault: Fault) -> float:
    """Probability that a yes-or-no finding is yes under a fault."""
    return fault.chances.get(probe.name, CHANCES[probe.name])


def at(s: Scenario, probe: Probe) -> Scenario:
    """The scenario at the probe's batch and tokens, on a server that admits such a batch: it was observed, or sent."""
    changes: dict[str, object] = {"batch": np.asarray(float(probe.batch))}
    if probe.tokens > 1:
        tokens = np.asarray(float(probe.tokens))
        steps = tokens - 1 if s.topk == 1 else s.num_steps
        changes |= {"draft_tokens": tokens, "num_steps": steps}
    if probe.eager:
        changes["eager"] = s.eager | {"decode", "verify", "draft", "extend"}
    cap = s.engine.running_cap_speculative
    if cap is not None and probe.batch > cap and "max_running_requests" not in s.options:
        changes["options"] = {**s.options, "max_running_requests": probe.batch}
    return replace(s, **changes)  # type: ignore[arg-type]


def _price(base: Scenario, probe: Probe, fault: Fault, m: Machine, severity: Severity) -> Array:
    """Seconds (or a plain number) of one probe on the boxes of a fault."""
    s = at(base, probe)
    if probe.kind == "clock":
        return severity.get("clock", np.asarray(0.97))
    if probe.kind == "identity":
        if fault.id == "acceptance-definition":
            return severity["ratio"]
        running = [float(np.max(v.batch)) for v in fault.variants(s, "cycle")]
        return np.asarray(running)[_which(severity, len(running))] / probe.batch
    if probe.kind == "allreduce":
        _, machine = fault.apply(s, m, severity, "verify")
        size = np.asarray(float(probe.size))
        return allreduce_seconds(size, machine, s.engine, s.network)
    if probe.kind == "greedy" and fault.id == "sampling":
        return np.asarray(target_pass(s, m, s.draft_tokens, "verify").total)
    phase = {"decode": "decode", "cycle": "cycle", "rate": "cycle"}.get(probe.kind, "verify")
    if probe.kind == "protocol" and fault.id == "allreduce-steep":  # another protocol undoes most, some or none of it
        severity = {**severity, "factor": 1 + (severity["factor"] - 1) * severity["left"]}
    if probe.eager:
        m = launched(m, severity)
    priced = []
    for variant in fault.variants(s, phase):
        faulty, machine = fault.apply(variant, m, severity, phase)
        priced.append(np.asarray(_time(faulty, machine, probe)))
    if len(priced) == 1:
        value = priced[0]
    else:
        which = _which(severity, len(priced))
        value = np.stack(np.broadcast_arrays(*priced, which)[:-1])[which, np.arange(len(which))]
    if probe.kind != "rate":
        return value
    length = s.accept_length
    assert length is not None
    true = severity["ratio"] if fault.id == "acceptance-definition" else 1.0
    sent = np.asarray([float(np.max(v.batch)) for v in fault.variants(s, phase)])[_which(severity, len(priced))]
    return np.asarray(sent * length.reshape(-1)[0] * true / value)


def _which(severity: Severity, variants: int) -> Index:
    """The variant of each sample."""
    if variants == 1:
        return np.asarray(0)
    return np.asarray(severity["variant"].astype(int) % variants)


def _time(s: Scenario, m: Machine, probe: Probe) -> Array:
    if probe.kind == "decode":
        decode = target_pass(replace(s, method="none"), m, np.ones(()), "decode")
        gap = m.host_s("decode_host", s.parallel.tp)
        if probe.eager:
            host = m.host_s("decode_cpu", s.parallel.tp) + m.host_s("sequence_cpu", s.parallel.tp) * s.batch
            return np.asarray(decode.total + np.maximum(gap, host))
        return np.asarray(decode.total + gap)
    if probe.kind in ("cycle", "rate"):
        return evaluate(s, m).cycle_s
    verify = target_pass(s, m, s.draft_tokens, "verify")
    if probe.kind != "component":
        return verify.total
    if probe.name == "waiting":
        return np.asarray(verify.seconds["launch"])
    return np.asarray(verify.seconds.get(probe.name, np.zeros(())))
