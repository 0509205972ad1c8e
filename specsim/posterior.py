"""Weights of the faults given observations: how likely each makes what was seen, over all its imagined boxes.

    weight(fault) ~ prior(fault) x mean over boxes of product over observations of p(observed | predicted)

The noise is log-normal with the tails of Student's t, so that one bad figure cannot decide alone. The mean over prior
samples is Monte Carlo; when too few boxes agree with the observations, more are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specsim.hypotheses import BY_ID, COSTLESS, FAULTS, NOTICEABLE, Fault
from specsim.probes import Boxes, Observation, Probe, chance
from specsim.quantities import HIGH, LOW, Quantity
from specsim.scenarios import Scenario

Array = NDArray[np.float64]
Index = NDArray[np.intp]
SAMPLES, MOST_SAMPLES = 8192, 32768
ENOUGH = 600  # effective boxes of the leading faults, so that weights repeat within 0.03 from seed to seed
CLEAR = 0.95  # above it the weights are settled however few boxes agree
TAIL = 6.0  # degrees of freedom of the noise
WORTH = 0.003  # a fault below this weight takes no part in choosing experiments


@dataclass(frozen=True)
class Posterior:
    """weights by fault id, which sum to 1; `logs` the log likelihood of every box of each fault; `fit` how well the
    likeliest fault explains the observations: the mean squared deviation in units of the noise."""

    boxes: Boxes
    observations: tuple[Observation, ...]
    weights: dict[str, float]
    logs: dict[str, Array]
    effective: float

    def ranked(self) -> list[tuple[Fault, float]]:
        """Faults with their weights, the likeliest first."""
        return sorted(((f, self.weights[f.id]) for f in FAULTS), key=lambda fw: -fw[1])

    def draws(self, fault: Fault, n: int, rng: np.random.Generator) -> Index:
        """n boxes of the fault, as likely as the observations make them."""
        logs = self.logs[fault.id]
        p = np.exp(logs - logs.max())
        return np.asarray(rng.choice(len(p), n, p=p / p.sum()))

    def components(self, fault: Fault, phase: str, n: int = 400) -> dict[str, float]:
        """Mean ms by component of "decode" or "verify" on boxes of the fault."""
        chosen = self.draws(fault, n, np.random.default_rng(8))
        return {k: float(v.mean()) for k, v in self.boxes.components_at(phase, fault, chosen).items()}


def posterior(
    scenario: Scenario | None,
    observations: Sequence[Observation],
    *,
    samples: int = SAMPLES,
    most: int = MOST_SAMPLES,
    seed: int = 0,
) -> Posterior:
    """The posterior, with as many samples as it needs. Raises ValueError when a time is observed without a scenario."""
    while True:
        found = weigh(Boxes(scenario, samples, seed), observations)
        clear = found.ranked()[0][1] > CLEAR
        if found.effective >= ENOUGH or clear or samples >= most or not observations:
            return found
        samples *= 4


def weigh(boxes: Boxes, observations: Sequence[Observation]) -> Posterior:
    """The posterior over given boxes."""
    logs, evidence = {}, {}
    for fault in FAULTS:
        logs[fault.id] = log_likelihood(boxes, fault, observations)
        possible = fault.possible(boxes.scenario) if boxes.scenario is not None else 1.0
        matters = noticeable(boxes, fault, observations)
        if not np.any(matters):
            possible = 0.0
        else:
            logs[fault.id] = np.where(matters, logs[fault.id], -np.inf)
        top = logs[fault.id].max()
        mean = float(np.sum(np.exp(logs[fault.id] - top)) / max(np.sum(matters), 1))
        evidence[fault.id] = fault.prior * possible * np.exp(top) * mean
    total = sum(evidence.values())
    if total <= 0:
        raise ValueError("no fault explains the observations")
    weights = {k: float(v / total) for k, v in evidence.items()}
    leading = sorted(weights, key=lambda k: -weights[k])[:3]
    effective = min((_effective(logs[k]) for k in leading if weights[k] > 0.1), default=np.inf)
    return Posterior(boxes, tuple(observations), weights, logs, effective)


def noticeable(boxes: Boxes, fault: Fault, observations: Sequence[Observation] = ()) -> NDArray[np.bool_]:
    """Boxes on which the fault matters: it slows the cycle (the decode step, without speculation), or a step that was
    observed, noticeably."""
    s = boxes.scenario
    if s is None or fault.id in COSTLESS:
        return np.ones(boxes.samples, dtype=bool)
    batch = int(np.max(s.batch))
    probe = Probe("decode", batch) if s.method == "none" else Probe("cycle", batch, int(np.max(s.draft_tokens)))
    probes = {probe, *(o.probe for o in observations if o.probe.kind in ("decode", "verify", "cycle"))}
    slow = [boxes.predict(p, fault) >= NOTICEABLE * boxes.predict(p, BY_ID["weak-drafter"]) for p in probes]
    return np.asarray(np.any(slow, axis=0))


def log_likelihood(boxes: Boxes, fault: Fault, observations: Sequence[Observation]) -> Array:
    """Log probability of the observations on every box of a fault, up to a constant common to all faults."""
    total = np.zeros(boxes.samples)
    for o in observations:
        if o.probe.binary:
            p = chance(o.probe, fault)
            total = total + np.log(p if o.value else 1 - p)
        else:
            z = o.probe.scaled(np.asarray(o.value)) - o.probe.scaled(boxes.predict(o.probe, fault))
            total = total - (TAIL + 1) / 2 * np.log1p(z * z / TAIL)
    return total


def _effective(logs: Array) -> float:
    w = np.exp(logs - logs.max())
    return float(w.sum() ** 2 / (w * w).sum())


def spread(values: Array) -> Quantity:
    """Median and 80 % interval of draws."""
    return spreads(values[None])[0]


def spreads(values: Array) -> list[Quantity]:
    """The same of each row."""
    low, middle, high = np.quantile(values, (LOW, 0.5, HIGH), axis=1).tolist()
    return [Quantity(*three) for three in zip(middle, low, high, strict=True)]
