"""How often is `specsim diagnose` right, and is it as sure as it should be?

300 synthetic boxes with one known fault each, 25 of every kind, over three scenarios. Each box gives a decode step, a
verify and tokens a second with 5 % noise; then the test that diagnose puts first is run on the box, twice. Faults are
noticeable ones: those of steps cost at least 12 % of a cycle. Boxes are drawn with another seed than the imagined boxes
that diagnose compares them with.

    python benchmarks/diagnose_study.py [--boxes 300]

prints how often the true fault ranks first after 0, 1 and 2 tests, and by fault; and for weights between 0.6 and 0.8,
and every other tenth, how often the fault that got such a weight was the true one.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specsim.experiments import appraise, candidates
from specsim.hypotheses import BY_ID, COSTLESS, FAULTS, Fault
from specsim.posterior import weigh
from specsim.probes import Boxes, Observation, Probe
from specsim.scenarios import Scenario, build

NOISE = 0.05
NOTICEABLE = 1.12  # a cycle over that of the same box without the fault
SAMPLES = 8192
TESTS = 2


def scenarios() -> list[Scenario]:
    """One request on eight PCIe GPUs; a small batch of a mixture of experts; a full batch of a dense model."""
    return [
        build(hardware="8x-rtx-pro-6000", draft_tokens=3, accept_length=1.8),
        build(model="Qwen3-30B-A3B", hardware="8x-h100", tp=2, batch=4, draft_tokens=4, accept_length=2.2),
        build(model="Llama-3.3-70B", hardware="8x-h100", tp=4, batch=64, draft_tokens=4, accept_length=2.5),
    ]


@dataclass
class Tally:
    """right: by number of tests, whether the true fault came first; sure: (weight, true?) of every fault and stage."""

    right: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    by_fault: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    mistaken: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    sure: list[tuple[float, bool]] = field(default_factory=list)

    def share(self, tests: int) -> float:
        """Share of boxes whose true fault came first after so many tests."""
        return float(np.mean(self.right[tests]))

    def calibration(self, low: float, high: float) -> tuple[float, float, int]:
        """Mean weight, share that was true, and number of the weights in [low, high)."""
        chosen = [(w, t) for w, t in self.sure if low <= w < high]
        if not chosen:
            return float("nan"), float("nan"), 0
        weights, true = zip(*chosen, strict=True)
        return float(np.mean(weights)), float(np.mean(true)), len(chosen)


def study(boxes: int = 300, seed: int = 0, samples: int = SAMPLES) -> Tally:
    """Run the study on `boxes` boxes."""
    rng = np.random.default_rng((seed, 11))
    worlds = [(Boxes(s, samples, seed), Boxes(s, 2000, seed + 1)) for s in scenarios()]
    for imagined, _ in worlds:
        imagined.remember([p for t in candidates(imagined.scenario) for p in t.probes])
    tally = Tally()
    for i in range(boxes):
        fault = FAULTS[i % len(FAULTS)]
        possible = [w for w in worlds if fault.possible(w[0].scenario) >= 0.2 and len(_noticeable(fault, w[1]))]  # type: ignore[arg-type]
        if fault.id == "admission-cap":
            possible = worlds[2:]
        imagined, real = possible[(i // len(FAULTS)) % len(possible)]
        _one(tally, fault, imagined, real, rng)
    return tally


def _one(tally: Tally, fault: Fault, imagined: Boxes, real: Boxes, rng: np.random.Generator) -> None:
    s = imagined.scenario
    assert s is not None
    b, d = int(s.batch.max()), int(s.draft_tokens.max())
    box = int(rng.choice(_noticeable(fault, real)))
    first = [Probe("decode", batch=b), Probe("verify", batch=b, tokens=d), Probe("rate", batch=b, tokens=d)]
    observations = [_measure(p, fault, real, box, rng) for p in first]
    tests = candidates(s)
    for done in range(TESTS + 1):
        found = weigh(imagined, observations)
        ranked = found.ranked()
        tally.right[done].append(ranked[0][0].id == fault.id)
        tally.sure += [(w, f.id == fault.id) for f, w in ranked]
        if done < TESTS:
            best = appraise(found, tests)[0].experiment
            tests = [t for t in tests if t.id != best.id]
            observations += [_measure(p, fault, real, box, rng) for p in best.probes]
    tally.by_fault[fault.id].append(ranked[0][0].id == fault.id)
    if ranked[0][0].id != fault.id:
        tally.mistaken[fault.id, ranked[0][0].id] += 1


def _noticeable(fault: Fault, real: Boxes) -> NDArray[np.intp]:
    """The boxes on which the fault matters."""
    if fault.id in COSTLESS:
        return np.arange(1, real.samples)
    s = real.scenario
    assert s is not None
    cycle = Probe("cycle", batch=int(s.batch.max()), tokens=int(s.draft_tokens.max()))
    slow = real.predict(cycle, fault) / real.predict(cycle, BY_ID["weak-drafter"])
    return np.flatnonzero(slow > NOTICEABLE)


def _measure(p: Probe, fault: Fault, real: Boxes, box: int, rng: np.random.Generator) -> Observation:
    true = float(real.predict(p, fault)[box])
    if p.binary:
        return Observation(p, float(rng.random() < true))
    noise = NOISE if p.noise <= NOISE else p.noise
    return Observation(p, true * float(np.exp(noise * rng.standard_normal())))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--boxes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    start = time.perf_counter()
    tally = study(chosen.boxes, chosen.seed)
    print(f"{chosen.boxes} boxes, {time.perf_counter() - start:.0f} s")
    for tests in range(TESTS + 1):
        print(f"true fault first after {tests} tests: {tally.share(tests):.0%}")
    print("by fault after two tests: " + ", ".join(f"{k} {np.mean(v):.0%}" for k, v in tally.by_fault.items()))
    wrong = sorted(tally.mistaken.items(), key=lambda kv: -kv[1])[:8]
    print("most often taken for another: " + ", ".join(f"{a} for {b} ({n})" for (a, b), n in wrong))
    print("weight given   true   number")
    for low in np.arange(0.0, 1.0, 0.1):
        mean, true, n = tally.calibration(low, low + 0.1 if low < 0.85 else 1.01)
        print(f"{mean:8.2f}   {true:8.2f}   {n}")
    mean, true, n = tally.calibration(0.6, 0.8)
    print(f"given 0.6 to 0.8 (mean {mean:.2f}, {n} times): true {true:.0%}")


if __name__ == "__main__":
    main()
