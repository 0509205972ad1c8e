"""How honest the errors of `specsim fit` are: worlds whose terms are known, measured as the recorded runs were, and fitted.

    python benchmarks/fit_coverage.py [WORLDS] [SEED]

In each world the engine's terms are drawn from their priors, each model's factor from the spread that the fit gives it, and every
recorded time is what specsim predicts with these, off by the record's own stated error. Printed is how often 80 % intervals hold
the true term, and how far a term is off in units of its stated error (root mean square; 1 where errors are Gaussian and right).
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from specsim.apart import set_aside
from specsim.engine_fit import EAGER_SPREAD, LOWEST, MODEL_SPREAD, Case, cases_of, fit, priors
from specsim.quantities import HALF
from specsim.replay import load

ROOT = Path(__file__).parents[1]


def world(cases: list[Case], true: dict[str, float], rng: np.random.Generator) -> list[Case]:
    """The cases as they would have been seen with these terms."""
    factors: dict[tuple[str, bool], float] = {}
    seen = []
    for case in cases:
        spread = EAGER_SPREAD if case.eager else MODEL_SPREAD
        factor = factors.setdefault((case.model, case.eager), spread * rng.normal())
        times = case.predicted({name: np.asarray(value) for name, value in true.items()})[:, 0]
        errors = np.array([s.error for s in case.seen])
        times = times * np.exp(factor + errors * rng.normal(size=len(times)))
        seen.append(replace(case, seen=tuple(replace(s, ms=float(t)) for s, t in zip(case.seen, times, strict=True))))
    return seen


def main(worlds: int = 20, seed: int = 0) -> None:
    """Print the table."""
    rng = np.random.default_rng(seed)
    cases, _ = cases_of(load(ROOT / "validation")[0], engine="sglang")
    aside = set_aside(cases)
    cases = [case for case in cases if case.record not in aside]
    prior = priors(cases[0].scenario.engine, [case.record for case in cases])
    off: dict[str, list[float]] = defaultdict(list)
    for _ in range(worlds):
        true = {n: max(value + spread * rng.normal(), LOWEST.get(n, 0.0)) for n, (value, spread) in prior.items()}
        for term in fit(world(cases, true, rng)).terms:
            off[term.name].append((term.value - true[term.name]) / term.error)
    rows = [*sorted(off.items()), ("all", [z for values in off.values() for z in values])]
    print(f"{worlds} worlds of {len(cases)} runs\n{'term':20} {'fits':>5} {'in 80 %':>8} {'rms':>6}")
    for name, values in rows:
        z = np.array(values)
        print(f"{name:20} {len(z):5} {np.mean(np.abs(z) < HALF):8.0%} {np.sqrt(np.mean(z**2)):6.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
