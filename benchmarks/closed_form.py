"""The closed form of a loaded server (specsim.steady) against the simulator, over loads, engines and sizes of requests.

    python benchmarks/closed_form.py                                   # means and capacity; every row of a table of docs/planning.md
    python benchmarks/closed_form.py --sizes 4000+10 --places 1,2,4,7  # has its options beside it there
    python benchmarks/closed_form.py --random 80 --memory 0.2,0.3,0.4  # cases drawn, each with a share of capacity, lengths and variation
    python benchmarks/closed_form.py --capacity --memory 0.9,0.5,0.3
    python benchmarks/closed_form.py --percentiles

For Llama-3.1-8B on one H200, SGLang and vLLM, with and without EAGLE-3 (4 draft tokens, accept rate 0.6): relative error of mean TPOT and mean TTFT
(closed form / simulated - 1) at shares of the capacity that the closed form gives, and of that capacity itself, beside what a server completes to which a
fifth more is sent (half more where it may preempt). (Requests of one length that are sent much faster start together, stay in step, and
make room for one another at once: up to a sixth more is done.) Last come, for each share, the median of the errors without their signs, and from which to which they go.

Requests are alike, or, with --variation V, of Gamma distributed lengths with a variance of V times the square of the mean; the closed form is told the
means and variances of those drawn. Arrivals are Poisson; two seeds each, and the error is that of the mean of both. What is compared is the steady state: near capacity
a server takes thousands of requests to fill, so runs from 0.7 of it on are five times as long (200,000 at most), and the first third of a run is left out, as is
the last tenth, in which it empties.

--places and --memory take several values each, one server for each: requests that run at most, and shares of the GPU's memory, with which the KV cache may be full before all places
are taken. --random draws cases where it is, and --capacity gives the capacity of such servers alone, for several lengths, all alike and of Gamma distributed ones. With --percentiles there are
50th, 95th and 99th percentiles of TTFT and TPOT.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from specsim.errors import InputError
from specsim.machine import Machine
from specsim.metrics import EXACT, Metrics
from specsim.percentiles import draw
from specsim.prediction import machine_of
from specsim.scenarios import Scenario, build
from specsim.simulation import simulate
from specsim.simulation_costs import Server as SimulatedServer
from specsim.simulation_costs import server_of as simulated_server
from specsim.steady import Requests, Server
from specsim.steady_servers import server_of
from specsim.workload import Lengths, synthetic
from specsim.workload import Requests as Sent

SIZES = "200+200,200+1000,1000+200,1000+1000,2000+200,2000+1000,6000+200,6000+1000"  # tokens in and out
OF_PERCENTILES = "200+200,1000+1000,2000+200,6000+500"
OF_CAPACITY = "500+500,1000+1000,2000+200,2000+1000,6000+1000,200+1000"
VARIATIONS = (0.0, 0.3, 1.0)  # with --capacity
DRAWN = (0.1, 0.3, 0.6, 1.0, 1.5)  # variations, with --random
FROM, UNTIL = 0.65, 0.93  # shares of capacity, with --random
LONG = 0.7  # share of capacity from which on runs are five times as long
PERCENTS = (50, 95, 99)
Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A server, and what is sent to it: mean tokens in and out, and their variance over the square of the mean."""

    engine: str
    draft_tokens: int
    given: int
    made: int
    variation: float = 0.0
    places: int | None = None
    memory: float | None = None
    model: str = "Llama-3.1-8B"
    hardware: str = "1x-h200"

    def scenario(self) -> Scenario:
        """Plain, or EAGLE-3 with an accept rate of 0.6."""
        drafts = {"draft_tokens": self.draft_tokens, "accept_rate": 0.6}
        options = {"method": "none"} if self.draft_tokens == 1 else drafts
        s = build(model=self.model, hardware=self.hardware, engine=self.engine, **options)
        limits = {"max_running_requests": self.places, "mem_fraction": self.memory}
        return replace(s, options={**s.options, **{name: value for name, value in limits.items() if value}})

    @property
    def requests(self) -> Requests:
        """On average."""
        return Requests(self.given, self.made, self.variation, self.variation)

    def sent(self, count: int, rate: float, seed: int) -> Iterator[Sent]:
        """Poisson arrivals of them."""
        draw = np.random.default_rng(seed)

        def lengths(mean: int, n: int) -> NDArray[np.int64]:
            tokens = draw.gamma(1 / self.variation, mean * self.variation, n) if self.variation else np.full(n, mean)
            return np.maximum(np.rint(tokens), 1).astype(np.int64)

        for block in synthetic(count, Lengths(1), Lengths(1), rate, seed=seed):
            n = len(block)
            yield replace(block, input_tokens=lengths(self.given, n), output_tokens=lengths(self.made, n))

    def line(self) -> str:
        """For people."""
        most = f"{self.places} places" if self.places else f"{self.memory:g} of memory" if self.memory else ""
        varied = f"{self.variation:g}" if self.variation else "alike"
        return f"{self.engine:7} {self.draft_tokens:5} {self.given:6,} {self.made:6,}  {varied:>5} {most:>14}"


@dataclass(frozen=True)
class Setup:
    """A case's servers: closed form and simulator."""

    case: Case
    scenario: Scenario
    machine: Machine
    server: Server
    simulated: SimulatedServer

    @classmethod
    def of(cls, case: Case) -> Setup:
        """Raises InputError where nothing fits."""
        s = case.scenario()
        machine = machine_of(s)
        return cls(case, s, machine, server_of(s, machine, case.requests), simulated_server(s, machine))

    def steady(self, share: float, requests: int, seed: int) -> tuple[Rows, Server, float]:
        """(requests of the steady state as `specsim.metrics` has them, the closed form for the lengths drawn, rate of the arrivals), requests a second."""
        rate, count = share * float(self.server.capacity()), min(requests * (5 if share > LONG else 1), EXACT)
        rows = simulate(self.simulated, self.case.sent(count, rate, seed)).metrics.rows
        assert rows is not None
        rows = rows[rows[:, 0].argsort()][len(rows) // 3 : -len(rows) // 10].astype(float)
        server = self.server
        if self.case.variation:
            server = server_of(self.scenario, self.machine, _drawn(rows[:, 5], rows[:, 6]))
        return rows, server, (len(rows) - 1) / (rows[-1, 1] - rows[0, 1]) * 1e12

    def errors(self, share: float, requests: int) -> tuple[float, float]:
        """(error of TPOT, error of TTFT) at a share of capacity."""
        said, seen = [], []
        for seed in (1, 2):
            rows, server, rate = self.steady(share, requests, seed)
            point = server.at(rate)
            _, arrival, _, first, finished, _, made = rows.T
            said.append((point.tpot_s[0], point.ttft_s[0]))
            seen.append((np.sum(finished - first) / np.sum(made - 1) / 1e12, np.mean(first - arrival) / 1e12))
        tpot, ttft = np.sum(said, axis=0) / np.sum(seen, axis=0) - 1
        return float(tpot), float(ttft)

    def limit(self, requests: int) -> float:
        """Error of capacity."""
        more = 1.2 if math.isinf(self.server.held) else 1.5  # more was done before its memory was full
        sent = list(self.case.sent(requests, more * float(self.server.capacity()), seed=1))
        prompts, answers = (
            np.concatenate([getattr(x, name) for x in sent]) for name in ("input_tokens", "output_tokens")
        )
        limit = server_of(self.scenario, self.machine, _drawn(prompts, answers)).capacity()
        return float(limit) / completed(simulate(self.simulated, sent).metrics) - 1

    def percentiles(self, share: float, requests: int) -> list[float]:
        """Errors of the percentiles of TTFT, and of those of TPOT, at a share of capacity."""
        rows, server, rate = self.steady(share, requests, seed=1)
        _, arrival, _, first, finished, _, made = rows.T
        long = made > 1
        seen = (first - arrival, (finished - first)[long] / (made[long] - 1))
        pairs = product(zip(draw(server, rate), seen, strict=True), PERCENTS)
        return [np.percentile(said, q) / np.percentile(found, q) * 1e12 - 1 for (said, found), q in pairs]


def _drawn(prompts: NDArray[np.floating], answers: NDArray[np.floating]) -> Requests:
    means = prompts.mean(), answers.mean()
    return Requests(*means, prompts.var() / means[0] ** 2, answers.var() / means[1] ** 2)


def completed(m: Metrics) -> float:
    """Requests a second that a server completes which always has more to do: without its first third, and its last tenth."""
    assert m.rows is not None
    finished = np.sort(m.rows[len(m.rows) // 3 : -len(m.rows) // 10, 4])
    return float((len(finished) - 1) / (finished[-1] - finished[0]) * 1e12)


def summary(errors: Sequence[Sequence[float]], names: Sequence[str]) -> str:
    """Median of the errors without their signs, and from which to which they go."""
    off = np.asarray(errors)
    middle, low, high = np.median(np.abs(off), axis=0), off.min(axis=0), off.max(axis=0)
    parts = zip(names, middle, low, high, strict=True)
    return ", ".join(f"{name} {m:.1%} ({a:+.0%} to {b:+.0%})" for name, m, a, b in parts)


def means_table(cases: Sequence[Case], shares: Sequence[float], requests: int) -> None:
    """Print errors of means and of capacity."""
    found: dict[float, list[tuple[float, float]]] = {share: [] for share in shares}
    print(f"{'engine':7} {'draft':>5} {'in':>6} {'out':>6}  {'vary':>5} {'at most':>14}  ", end="")
    print("  ".join(f"{f'TPOT, TTFT at {share:.0%}':>18}" for share in shares), f"  {'limit':>6}")
    for case in cases:
        setup, cells = Setup.of(case), []
        for share in shares:
            found[share].append(setup.errors(share, requests))
            cells.append("{:+.1%}, {:+.1%}".format(*found[share][-1]))
        print(f"{case.line()}  {'  '.join(f'{c:>18}' for c in cells)}   {setup.limit(5 * requests):+6.1%}", flush=True)
    for share in shares:
        print(f"{share:.0%}: {summary(found[share], ('TPOT', 'TTFT'))}")


def random_table(cases: Sequence[Case], count: int, seed: int, requests: int) -> None:
    """Print errors of means of so many cases drawn, each on one of the servers of `cases` whose memory ends before places do."""
    draw = np.random.default_rng(seed)
    found: dict[str, list[tuple[float, float]]] = {}

    def between(low: int, high: int) -> int:
        return int(np.exp(draw.uniform(math.log(low), math.log(high))))

    while count:
        base = cases[int(draw.integers(len(cases)))]
        variation, share = float(draw.choice(DRAWN)), float(draw.uniform(FROM, UNTIL))
        case = replace(base, given=between(300, 10_000), made=between(100, 2000), variation=variation)
        try:
            setup = Setup.of(case)
        except InputError:
            continue
        if not math.isfinite(setup.server.held):
            continue
        count -= 1
        errors = setup.errors(share, requests)
        found.setdefault(case.engine, []).append(errors)
        print("{}  {:4.0%}  {:+.1%}, {:+.1%}".format(case.line(), share, *errors), flush=True)
    for engine, errors_of in sorted(found.items()):
        ninth = np.percentile(np.abs(errors_of), 90, axis=0)
        print(f"{engine}, {len(errors_of)} cases: {summary(errors_of, ('TPOT', 'TTFT'))}; nine in ten within", end=" ")
        print("{:.0%}, {:.0%}".format(*ninth))


def capacity_table(cases: Sequence[Case]) -> None:
    """Print errors of capacity where the KV cache ends first, for all `VARIATIONS`."""
    print("error of capacity, lengths alike, with variance of 0.3 and of 1 of the square of their mean")
    found: dict[str, list[float]] = {}
    for case in cases:
        cells = []
        for variation in VARIATIONS:
            setup = Setup.of(replace(case, variation=variation))
            if setup.server.most_running < setup.simulated.max_running:
                error = setup.limit(max(20_000, 40 * setup.server.most_running))
                found.setdefault(case.engine, []).append(abs(error))
                cells.append(f"{error:+.1%}")
        if cells:
            print(f"{case.line()}  {' '.join(f'{c:>6}' for c in cells)}", flush=True)
    for engine, off in found.items():
        within = np.mean(np.asarray(off) < 0.03)
        print(
            f"{engine}: {np.median(off):.1%} in the middle of {len(off)}, {within:.0%} within 3 %, {max(off):.1%} worst"
        )


def percentile_table(cases: Sequence[Case], shares: Sequence[float], requests: int) -> None:
    """Print errors of percentiles, in the middle and from which to which, over all cases that vary as much."""
    names = [f"{name} p{q}" for name in ("TTFT", "TPOT") for q in PERCENTS]
    for variation, share in product(dict.fromkeys(case.variation for case in cases), shares):
        errors = [Setup.of(case).percentiles(share, requests) for case in cases if case.variation == variation]
        print(f"variation {variation:g}, {share:.0%}: {summary(errors, names)}", flush=True)


def main() -> None:
    """Print the table that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10000, help="that are sent below 0.7 of capacity")
    parser.add_argument("--sizes", help=f"tokens in and out; default {SIZES}")
    parser.add_argument("--variation", help="default 0, with --percentiles 0,1")
    parser.add_argument("--engine", default="sglang,vllm")
    parser.add_argument("--draft-tokens", default="1,4", help="1: plain decoding")
    parser.add_argument("--places", default="")
    parser.add_argument("--memory", default="")
    parser.add_argument("--share", default="0.5,0.8,0.9")
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--hardware", default="1x-h200")
    parser.add_argument("--random", type=int, metavar="CASES")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument("--capacity", action="store_true")
    parser.add_argument("--percentiles", action="store_true")
    a = parser.parse_args()
    sizes = a.sizes or (OF_CAPACITY if a.capacity else OF_PERCENTILES if a.percentiles else SIZES)
    variations = a.variation or ("0,1" if a.percentiles else "0")
    cases = [
        Case(engine, int(draft), *map(int, size.split("+")), float(variation), places, memory, a.model, hardware)
        for hardware, variation, size, engine, draft, places, memory in product(
            a.hardware.split(","),
            variations.split(","),
            sizes.split(","),
            a.engine.split(","),
            a.draft_tokens.split(","),
            [int(n) for n in a.places.split(",") if n] or [None],
            [float(x) for x in a.memory.split(",") if x] or [None],
        )
    ]
    shares = [float(x) for x in a.share.split(",")]
    if a.capacity:
        capacity_table(cases)
    elif a.random:
        random_table(cases, a.random, a.seed, a.requests)
    elif a.percentiles:
        percentile_table(cases, shares, a.requests)
    else:
        means_table(cases, shares, a.requests)


if __name__ == "__main__":
    main()
