"""Speed of specsim itself: sweeps, plans and cold starts, each beside a yardstick measured in the same run.

    python benchmarks/speed.py [--configurations 1000000] [--json]

What is measured, all on one core: 1,000,000 random (batch, context, draft tokens, acceptance) configurations of Kimi-K2.5 in
one vectorised call; grids of 1,000,000 and 100,000,000 configurations with their maps and fronts; a plan over 20 choices of
(box, TP, draft length); and cold processes. Yardsticks: the same cost model called once a configuration, a bare numpy pass
of exp and log over as many numbers, and a Python that does nothing. Times are wall seconds, the best of several tries; memory
is the largest resident set of a process of its own, less that of one which only imports.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ONE_CORE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def best(function: Callable[[], object], tries: int = 3) -> float:
    """Wall seconds of the fastest try."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def flat(n: int) -> dict[str, float]:
    """Random configurations, and both yardsticks."""
    from dataclasses import replace

    import numpy as np

    from specsim.cycle import evaluate
    from specsim.prediction import machine_of
    from specsim.scenarios import build
    from specsim.sweeps import evaluate_many

    rng = np.random.default_rng(0)
    s = build(model="Kimi-K2.5", hardware="8x-h200", draft_tokens=3)
    machine = machine_of(s)
    batch = rng.integers(1, 257, n).astype(float)
    context = rng.integers(1, 65_536, n).astype(float)
    tokens = rng.integers(2, 10, n).astype(float)
    rate = rng.random(n)
    imported = _peak_mb()
    seconds = best(lambda: evaluate_many(s, batch, context, tokens, rate, machine))
    peak = _peak_mb() - imported
    found = evaluate_many(s, batch, context, tokens, rate, machine)
    few = min(n, 200)

    def one_by_one() -> None:
        for i in range(few):
            at = replace(s, batch=batch[i], context=context[i], draft_tokens=tokens[i], num_steps=tokens[i] - 1)
            c = evaluate(at, machine)
            assert abs(float(c.cycle_s) / found.cycle_s[i] - 1) < 1e-12

    numbers = rng.random(n)
    return {
        "configurations": n,
        "seconds": seconds,
        "peak_mb": peak,
        "one_by_one_s": best(one_by_one, 1) / few * n,
        "exp_and_log_s": best(lambda: np.log(np.exp(numbers)), 5),
    }


def grid(n: int) -> dict[str, float]:
    """A grid of about n configurations with everything that a sweep keeps."""
    from specsim.scenarios import build
    from specsim.sweep_run import run
    from specsim.sweeps import Spec

    batches, lengths, contexts = 256, 8, 100 if n > 10**7 else 10
    rates = max(1, n // (batches * lengths * contexts))
    imported = _peak_mb()
    spec = Spec(
        make=lambda options: build(**options),
        cases=((("model", "Kimi-K2.5"), ("hardware", "8x-h200")),),
        batch=tuple(range(1, batches + 1)),
        context=tuple(range(1000, 1000 * contexts + 1, 1000)),
        draft_tokens=tuple(range(2, 2 + lengths)),
        kind="rate",
        acceptance=tuple(i / rates for i in range(rates)),
    )
    seconds = best(lambda: run(spec), 1)
    return {"configurations": spec.planned, "seconds": seconds, "peak_mb": _peak_mb() - imported}


def plan_choices() -> dict[str, float]:
    """A plan over 20 choices, once all is imported."""
    from functools import partial

    from specsim.plans import plan
    from specsim.scenarios import build
    from specsim.steady import Requests
    from specsim.targets import Targets

    choices = [
        partial(build, model="Llama-3.3-70B", hardware=box, tp=tp, draft_tokens=d, accept_rate=0.6)
        for box in ("8x-h200", "8x-h100")
        for tp in (4, 8)
        for d in (2, 3, 4, 5, 6)
    ]

    def once() -> None:
        plan(choices, 20.0, Requests(2000, 500), Targets(1000, 30), drafting=lambda s: s)

    return {"choices": len(choices), "seconds": best(once)}


def apart(name: str, n: int) -> dict[str, float]:
    """One of the measurements, in a process of its own."""
    command = [sys.executable, __file__, "--one", name, str(n)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **ONE_CORE})
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def cold(command: list[str], tries: int = 7) -> float:
    """Median wall seconds of a process from start to end."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=1_000_000)
    parser.add_argument("--largest", type=int, default=100_000_000, help="configurations of the large grid")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, n = arguments.one
        print(json.dumps({"flat": flat, "grid": grid, "plan": lambda _: plan_choices()}[name](int(n))))
        return
    n = arguments.configurations
    specsim = str(Path(sys.executable).with_name("specsim"))
    found = {
        "flat": apart("flat", n),
        "grid": apart("grid", n),
        "large": apart("grid", arguments.largest),
        "plan": apart("plan", 0),
        "cold": {
            "python": cold([sys.executable, "-c", "pass"]),
            "help": cold([specsim, "--help"]),
            "predict": cold([specsim, "predict", "--draft-tokens", "3", "--accept-rate", "0.6"]),
        },
    }
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    f, c = found["flat"], found["cold"]
    print(
        f"{f['configurations']:,} random configurations of Kimi-K2.5, one call: {f['seconds']:.2f} s, {f['peak_mb']:.0f} MB more"
    )
    print(
        f"  one call a configuration would take {f['one_by_one_s']:,.0f} s: {f['one_by_one_s'] / f['seconds']:,.0f} times as long"
    )
    print(
        f"  a bare pass of exp and log takes {f['exp_and_log_s'] * 1e3:.1f} ms: the model costs {f['seconds'] / f['exp_and_log_s']:,.0f} of them"
    )
    for name in ("grid", "large"):
        g = found[name]
        per_second = g["configurations"] / g["seconds"]
        print(
            f"{g['configurations']:,} on a grid, with maps and fronts: {g['seconds']:.2f} s ({per_second / 1e6:.0f} million a second), {g['peak_mb']:.0f} MB more"
        )
    p = found["plan"]
    print(f"plan of {p['choices']} choices: {p['seconds']:.2f} s")
    print(
        f"cold start: python {c['python'] * 1e3:.0f} ms, specsim --help {c['help'] * 1e3:.0f} ms ({c['help'] / c['python']:.1f} x), specsim predict {c['predict'] * 1e3:.0f} ms ({c['predict'] / c['python']:.1f} x)"
    )


if __name__ == "__main__":
    main()
