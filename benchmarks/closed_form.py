"""The closed form of a loaded server (specsim.steady) against the simulator, over loads, engines and sizes of requests.

    python benchmarks/closed_form.py [--requests 10000] [--input-tokens 200,1000,2000,6000] [--variation 0]

For Llama-3.1-8B on one H200, SGLang and vLLM, with and without EAGLE-3 (4 draft tokens, accept rate 0.6), answers of 200 and
1,000 tokens: relative error of mean TPOT and mean TTFT (closed form / simulated - 1) at shares of the capacity that the closed form
gives, and of that capacity itself, beside what a server completes to which a fifth more is sent. (Requests of one length that are sent
much faster start together, stay in step, and make room for one another at once: up to a sixth more is done.) All requests are alike,
or, with --variation V, of Gamma distributed lengths with a variance of V times the square of the mean; arrivals
are Poisson; two seeds each. What is compared is the steady state: near capacity a server takes thousands of requests to fill, so
runs from 0.8 of it on are five times as long, and the first third of a run is left out, as is the last tenth, in which it empties.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from specsim.metrics import Metrics
from specsim.prediction import machine_of
from specsim.scenarios import build
from specsim.simulation import simulate
from specsim.simulation_costs import server_of as simulated_server
from specsim.steady import Requests, server_of
from specsim.workload import Lengths, synthetic
from specsim.workload import Requests as Sent

SHARES = (0.5, 0.8, 0.9)


def load(count: int, given: int, made: int, variation: float, rate: float, seed: int) -> Iterator[Sent]:
    """Poisson arrivals of so many tokens in and out."""
    draw = np.random.default_rng(seed)

    def lengths(mean: int, n: int) -> NDArray[np.int64]:
        tokens = draw.gamma(1 / variation, mean * variation, n) if variation else np.full(n, mean)
        return np.maximum(np.rint(tokens), 1).astype(np.int64)

    for block in synthetic(count, Lengths(1), Lengths(1), rate, seed=seed):
        n = len(block)
        yield replace(block, input_tokens=lengths(given, n), output_tokens=lengths(made, n))


def errors(
    engine: str, draft_tokens: int, given: int, made: int, variation: float, requests: int
) -> list[tuple[float, float]]:
    """(error of TPOT, error of TTFT) at each share of capacity; last (error of capacity, 0)."""
    options = {"method": "none"} if draft_tokens == 1 else {"draft_tokens": draft_tokens, "accept_rate": 0.6}
    s = build(model="Llama-3.1-8B", hardware="1x-h200", engine=engine, **options)
    machine = machine_of(s)
    server, simulated = server_of(s, machine, Requests(given, made, variation, variation)), simulated_server(s, machine)
    out = []
    for share in SHARES:
        rate = share * float(server.capacity())
        count = requests * (5 if share > 0.7 else 1)
        loads = [load(count, given, made, variation, rate, seed) for seed in (1, 2)]
        tpot, ttft, rate = np.mean([steady(simulate(simulated, sent).metrics) for sent in loads], axis=0)
        point = server.at(rate)
        out.append((point.tpot_s[0] / tpot - 1, point.ttft_s[0] / ttft - 1))
    limit = float(server.capacity())
    rows = simulate(simulated, load(5 * requests, given, made, variation, 1.2 * limit, seed=1)).metrics.rows
    assert rows is not None
    finished = np.sort(rows[len(rows) // 3 : -len(rows) // 10, 4])
    return [*out, (limit * (finished[-1] - finished[0]) / 1e12 / (len(finished) - 1) - 1, 0.0)]


def steady(m: Metrics) -> tuple[float, float, float]:
    """(mean TPOT, mean TTFT, rate of the arrivals), seconds, without the filling and the emptying of the server."""
    assert m.rows is not None
    rows = m.rows[m.rows[:, 0].argsort()]
    _, arrival, _, first, finished, _, made = rows[len(rows) // 3 : -len(rows) // 10].T.astype(float)
    rate = (len(arrival) - 1) / (arrival[-1] - arrival[0]) * 1e12
    return (
        float(np.sum(finished - first) / np.sum(made - 1) / 1e12),
        float(np.mean(first - arrival) / 1e12),
        float(rate),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--input-tokens", default="200,1000,2000,6000")
    parser.add_argument("--variation", type=float, default=0.0)
    arguments = parser.parse_args()
    shares = "  ".join(f"{f'TPOT, TTFT at {share:.0%}':>18}" for share in SHARES)
    print(f"{'engine':7} {'draft':>5} {'input':>6} {'output':>6}  {shares}  {'limit':>6}")
    sizes = [int(n) for n in arguments.input_tokens.split(",")]
    for given, engine, draft, made in product(sizes, ("sglang", "vllm"), (1, 4), (200, 1000)):
        *found, (limit, _) = errors(engine, draft, given, made, arguments.variation, arguments.requests)
        cells = "  ".join(f"{f'{tpot:+.1%}, {ttft:+.1%}':>18}" for tpot, ttft in found)
        print(f"{engine:7} {draft:5} {given:6,} {made:6,}  {cells}  {limit:+6.1%}", flush=True)


if __name__ == "__main__":
    main()
