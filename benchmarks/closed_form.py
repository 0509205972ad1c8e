"""The closed form of a loaded server (specsim.steady) against the simulator, over loads, engines and sizes of requests.

    python benchmarks/closed_form.py [--requests 10000] [--input-tokens 200,1000,2000,6000] [--variation 0]
    python benchmarks/closed_form.py --memory 0.9,0.5,0.3
    python benchmarks/closed_form.py --percentiles

For Llama-3.1-8B on one H200, SGLang and vLLM, with and without EAGLE-3 (4 draft tokens, accept rate 0.6), answers of 200 and
1,000 tokens: relative error of mean TPOT and mean TTFT (closed form / simulated - 1) at shares of the capacity that the closed form
gives, and of that capacity itself, beside what a server completes to which a fifth more is sent (half more where it may preempt). (Requests of one length that are sent
much faster start together, stay in step, and make room for one another at once: up to a sixth more is done.) All requests are alike,
or, with --variation V, of Gamma distributed lengths with a variance of V times the square of the mean; arrivals
are Poisson; two seeds each. What is compared is the steady state: near capacity a server takes thousands of requests to fill, so
runs from 0.8 of it on are five times as long, and the first third of a run is left out, as is the last tenth, in which it empties.

With --memory there is only capacity, for servers with these shares of the GPU's memory, where the KV cache is full before all places
are taken; prompts and answers are of several lengths, all alike or of Gamma distributed ones. With --percentiles there are
medians and 99th percentiles of TTFT and TPOT.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from specsim.metrics import Metrics
from specsim.percentiles import draw
from specsim.prediction import machine_of
from specsim.scenarios import Scenario, build
from specsim.simulation import simulate
from specsim.simulation_costs import server_of as simulated_server
from specsim.steady import Requests
from specsim.steady_servers import server_of
from specsim.workload import Lengths, synthetic
from specsim.workload import Requests as Sent

SHARES = (0.5, 0.8, 0.9)
SIZES = ((200, 200), (1000, 1000), (2000, 200), (6000, 500))  # tokens in and out, with --percentiles
FULL = (
    (500, 500),
    (1000, 1000),
    (2000, 200),
    (2000, 1000),
    (6000, 1000),
    (200, 1000),
)  # tokens in and out, with --memory
VARIATIONS = (0.0, 0.3, 1.0)


def load(count: int, given: int, made: int, variation: float, rate: float, seed: int) -> Iterator[Sent]:
    """Poisson arrivals of so many tokens in and out."""
    draw = np.random.default_rng(seed)

    def lengths(mean: int, n: int) -> NDArray[np.int64]:
        tokens = draw.gamma(1 / variation, mean * variation, n) if variation else np.full(n, mean)
        return np.maximum(np.rint(tokens), 1).astype(np.int64)

    for block in synthetic(count, Lengths(1), Lengths(1), rate, seed=seed):
        n = len(block)
        yield replace(block, input_tokens=lengths(given, n), output_tokens=lengths(made, n))


def scenario(engine: str, draft_tokens: int) -> Scenario:
    """Llama-3.1-8B on one H200: plain, or EAGLE-3 with an accept rate of 0.6."""
    options = {"method": "none"} if draft_tokens == 1 else {"draft_tokens": draft_tokens, "accept_rate": 0.6}
    return build(model="Llama-3.1-8B", hardware="1x-h200", engine=engine, **options)


def errors(
    engine: str, draft_tokens: int, given: int, made: int, variation: float, requests: int
) -> list[tuple[float, float]]:
    """(error of TPOT, error of TTFT) at each share of capacity; last (error of capacity, 0)."""
    s = scenario(engine, draft_tokens)
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
    more = 1.2 if server.memory is None else 1.5  # a server that preempts did more before its memory was full
    done = completed(simulate(simulated, load(5 * requests, given, made, variation, more * limit, seed=1)).metrics)
    return [*out, (limit / done - 1, 0.0)]


def completed(m: Metrics) -> float:
    """Requests a second that a server completes which always has more to do: without its first third, and its last tenth."""
    assert m.rows is not None
    finished = np.sort(m.rows[len(m.rows) // 3 : -len(m.rows) // 10, 4])
    return float((len(finished) - 1) / (finished[-1] - finished[0]) * 1e12)


def full(engine: str, draft_tokens: int, memory: float, given: int, made: int, variation: float) -> float | None:
    """Error of capacity where the KV cache ends first; None where places do. The closed form is told how the lengths drawn vary."""
    s = scenario(engine, draft_tokens)
    s = replace(s, options={**s.options, "mem_fraction": memory})
    machine = machine_of(s)
    simulated = simulated_server(s, machine)
    server = server_of(s, machine, Requests(given, made, variation, variation))
    if server.most_running == simulated.max_running:
        return None
    count = max(20_000, 40 * server.most_running)
    limit = float(server.capacity())
    sent = list(load(count, given, made, variation, 1.5 * limit, seed=1))
    prompts, answers = (np.concatenate([getattr(x, name) for x in sent]) for name in ("input_tokens", "output_tokens"))
    drawn = Requests(
        prompts.mean(), answers.mean(), prompts.var() / prompts.mean() ** 2, answers.var() / answers.mean() ** 2
    )
    return float(server_of(s, machine, drawn).capacity()) / completed(simulate(simulated, sent).metrics) - 1


def full_table(memories: list[float]) -> None:
    """Print errors of capacity where the KV cache ends first."""
    cases = list(product(FULL, VARIATIONS))
    print("error of capacity, lengths alike, with variance of 0.3 and of 1 of the square of their mean")
    print(f"{'engine':7} {'draft':>5} {'memory':>6}  " + "  ".join(f"{f'{i:,} + {o:,}':>20}" for i, o in FULL))
    found = []
    for engine, draft, memory in product(("sglang", "vllm"), (1, 4), memories):
        row = [full(engine, draft, memory, *sizes, variation) for sizes, variation in cases]
        found += [(engine, abs(e)) for e in row if e is not None]
        said = ["" if e is None else f"{e:+.1%}" for e in row]
        n = len(VARIATIONS)
        cells = "  ".join(f"{' '.join(said[i : i + n]):>20}" for i in range(0, len(said), n))
        print(f"{engine:7} {draft:5} {memory:6g}  {cells}", flush=True)
    for engine in ("sglang", "vllm"):
        off = [e for name, e in found if name == engine]
        print(
            f"{engine}: {np.median(off):.1%} in the middle of {len(off)}, {np.mean(np.asarray(off) < 0.03):.0%} within 3 %, {max(off):.1%} at worst"
        )


def percentile_table(requests: int) -> None:
    """Print errors of percentiles, in the middle and at worst over engines, drafting and sizes."""
    names = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    print(f"{'lengths':12} {'share':>5}  " + "  ".join(f"{name:>12}" for name in names))
    for variation, share in product((0.0, 1.0), SHARES):
        found = []
        for engine, draft, (given, made) in product(("sglang", "vllm"), (1, 4), SIZES):
            s = scenario(engine, draft)
            machine = machine_of(s)
            server = server_of(s, machine, Requests(given, made, variation, variation))
            rate = share * float(server.capacity())
            count = requests * (5 if share > 0.7 else 2)
            m = simulate(simulated_server(s, machine), load(count, given, made, variation, rate, seed=1)).metrics
            assert m.rows is not None
            rows = m.rows[m.rows[:, 0].argsort()][count // 3 : -count // 10].astype(float)
            _, arrival, _, first, finished, _, answer = rows.T
            long = answer > 1
            seen = (first - arrival, (finished - first)[long] / (answer[long] - 1))
            drawn = draw(server, rate)
            found.append(
                [
                    np.percentile(c, q) / np.percentile(x, q) * 1e12 - 1
                    for c, x in zip(drawn, seen, strict=True)
                    for q in (50, 99)
                ]
            )
        off = np.asarray(found)
        worst = off[np.abs(off).argmax(axis=0), np.arange(len(names))]
        cells = "  ".join(
            f"{f'{a:.1%}, {b:+.0%}':>12}" for a, b in zip(np.median(np.abs(off), axis=0), worst, strict=True)
        )
        print(f"{'vary' if variation else 'alike':12} {share:5.0%}  {cells}", flush=True)


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
    parser.add_argument("--memory")
    parser.add_argument("--percentiles", action="store_true")
    arguments = parser.parse_args()
    if arguments.memory:
        full_table([float(share) for share in arguments.memory.split(",")])
        return
    if arguments.percentiles:
        percentile_table(arguments.requests)
        return
    shares = "  ".join(f"{f'TPOT, TTFT at {share:.0%}':>18}" for share in SHARES)
    print(f"{'engine':7} {'draft':>5} {'input':>6} {'output':>6}  {shares}  {'limit':>6}")
    sizes = [int(n) for n in arguments.input_tokens.split(",")]
    for given, engine, draft, made in product(sizes, ("sglang", "vllm"), (1, 4), (200, 1000)):
        *found, (limit, _) = errors(engine, draft, given, made, arguments.variation, arguments.requests)
        cells = "  ".join(f"{f'{tpot:+.1%}, {ttft:+.1%}':>18}" for tpot, ttft in found)
        print(f"{engine:7} {draft:5} {given:6,} {made:6,}  {cells}  {limit:+6.1%}", flush=True)


if __name__ == "__main__":
    main()
