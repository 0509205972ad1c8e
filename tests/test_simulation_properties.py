"""What must hold in any run of the simulator, on servers whose step times are anything; and queues whose answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import random_server
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.errors import InputError
from specsim.metrics import LATENCIES, latency_of_histogram
from specsim.simulation import simulate
from specsim.simulation_costs import Costs, Server
from specsim.workload import PS, Lengths, Requests, synthetic

pytest.importorskip("numba", reason="the compiled kernel needs numba, which the dev extra installs")

MS = PS // 1000
TARGETS = {"ttft": 300.0, "tpot": 30.0, "e2e_latency": 900.0}


def blocks_of(arrival: Any, given: Any, made: Any, size: int = 10**9) -> list[Requests]:
    columns = [np.asarray(c, dtype=np.int64) for c in (arrival, given, made)]
    return [Requests(*(c[i : i + size] for c in columns)) for i in range(0, len(columns[0]), size)]


@st.composite
def runs(draw: st.DrawFn) -> tuple[Server, list[Requests], int | None]:
    """A server with tables of random times at random nodes (they neither rise nor fall in order), graphs that lead, drafts by
    batch; requests in blocks of any size, many at one time, of one token or beyond the KV cache; and how many clients."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, drafts = draw(st.integers(1, 10)), draw(st.integers(0, 4))

    def nodes() -> Any:
        return np.concatenate([[0.0], np.sort(rng.choice(np.arange(1.0, 400), rng.integers(1, 6), replace=False))])

    def times(*shape: int) -> Any:
        return np.rint(rng.uniform(0.1 * MS, 30 * MS, shape))

    contexts, tokens, reach = nodes(), nodes(), nodes()
    by_batch = rng.integers(0, drafts + 1, batch + 1) if draw(st.booleans()) else np.full(batch + 1, drafts)
    step = times(batch + 1, len(contexts))
    led = (float(times(1)[0]), (int(rng.integers(1, 50)), int(rng.integers(50, 200)))) if draw(st.booleans()) else (0.0, (1, 0))  # fmt: skip
    costs = Costs(
        contexts, step, np.rint(step.min(axis=1) * rng.random()), tokens, reach, times(len(tokens), len(reach)),
        by_batch + 1, by_batch, *led,
    )  # fmt: skip
    survival = tuple(np.sort(rng.choice([0.0, 1.0, *rng.random(3)], drafts))[::-1].tolist())
    server = random_server(draw, costs, batch, survival)
    n, gap = draw(st.integers(1, 60)), draw(st.sampled_from([0, 1, 10**7, 10 * MS, PS]))
    arrival = np.cumsum(rng.integers(0, gap + 1, n) * rng.integers(0, 2, n))
    given = rng.integers(1, draw(st.sampled_from([1, 60, 400])) + 1, n)
    made = rng.integers(1, draw(st.sampled_from([1, 2, 30, 200])) + 1, n)
    load = blocks_of(arrival, given, made, draw(st.sampled_from([1, 7, 1000])))
    return server, load, draw(st.sampled_from([None, 1, 2, 5, 40]))


@given(runs(), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_any_run(case: tuple[Server, list[Requests], int | None], seed: int) -> None:
    """The kernel is the reference to the bit; tokens and requests are conserved; requests in the system are rate x time in it
    (Little), exactly, as is the sum of the timeline; percentiles are numpy's, and goodput is counted by hand."""
    server, load, clients = case
    found = []
    for compiled in (False, True):
        try:
            run = simulate(server, iter(load), concurrency=clients, compiled=compiled, seed=seed, targets_ms=TARGETS)
            found.append(run.metrics)
        except InputError:  # only where nothing fits
            fits = [b.input_tokens + b.output_tokens + server.costs.most_rows <= server.kv_tokens for b in load]
            assert not np.concatenate(fits).any()
    assert len(found) in (0, 2)
    if not found:
        return
    plain, fast = found
    assert plain.counters == fast.counters
    assert plain.json() == fast.json()
    done, c = fast.rows, fast.counters
    assert done is not None
    assert np.array_equal(plain.rows, done)

    sent = np.concatenate([b.arrival for b in load])
    assert fast.completed + fast.rejected == len(sent)
    assert len(np.unique(done[:, 0])) == fast.completed == len(done)
    assert c["output_tokens"] == done[:, 6].sum() == c["decode_tokens"] + fast.completed
    assert c["prefill_tokens"] == c["input_tokens"] - c["cached_tokens"] + c["recomputed_tokens"]
    assert c["peak_running"] <= server.max_running
    assert c["peak_flight"] <= (clients or len(sent))
    assert server.overlap or c["peak_kv"] <= server.kv_tokens
    arrival, started, first, finished = done[:, 1:5].T
    seen = arrival + round(server.overhead_s * PS)
    assert (arrival >= sent[done[:, 0]]).all()
    assert clients or (arrival == sent[done[:, 0]]).all()
    assert (seen <= started).all()
    assert (started < first).all()
    assert ((first < finished) == (done[:, 6] > 1)).all()

    spans = fast.timeline.span_s
    assert fast.timeline.tokens_per_s.sum() * spans == pytest.approx(c["output_tokens"])
    if not server.chunk_s:  # else a request is at the front end when the scheduler is done with it
        area = c["running_area"] + c["waiting_area"]
        assert area == pytest.approx((finished - seen).sum() / 1000, abs=2 * (len(sent) + c["retractions"]))
        assert (fast.timeline.running + fast.timeline.waiting).sum() * spans * 1e9 == pytest.approx(area, abs=1)

    steps = np.maximum(done[:, 6] - 1, 1)
    several = done[:, 6] > 1
    values = dict(zip(LATENCIES, (first - arrival, ((finished - first) / steps)[several], finished - arrival, started - arrival), strict=True))  # fmt: skip
    for name, ps in values.items():
        latency = fast.latencies[name]
        assert (latency is None) == (not len(ps))
        if latency is not None:
            assert latency.p99 == pytest.approx(np.percentile(ps, 99) / MS)
            assert latency.mean == pytest.approx(ps.mean() / MS)
    good = (values["ttft"] <= 300 * MS) & ((finished - first) / steps <= 30 * MS) & (values["e2e_latency"] <= 900 * MS)
    assert fast.good == good.sum()


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300))
def test_percentiles_of_a_histogram_are_values_that_came(ns: list[int]) -> None:
    """Each is within half a bin, 0.05 %, of one of the two values that numpy takes it between, and the mean is as near."""
    from specsim.metrics import BINS, bins_of

    histogram = np.bincount(bins_of(np.asarray(ns, dtype=np.int64)), minlength=BINS)
    found = latency_of_histogram(histogram)
    assert found is not None
    for q, value in ((50, found.median), (90, found.p90), (95, found.p95), (99, found.p99)):
        higher = np.percentile(ns, q, method="higher") / 1e6
        assert value == pytest.approx(higher, rel=0.0005, abs=1e-6)
    assert found.mean == pytest.approx(np.mean(ns) / 1e6, rel=0.0005, abs=1e-6)


# Queues


def one_at_a_time(token_s: float) -> Server:
    """Serves one request at a time, for its prompt's tokens x `token_s`."""
    return Server(Costs.fixed(0.0, 0.0, token_s), "prefill-first", 1, 2**40, 2**50, overlap=False)


@pytest.mark.parametrize("clients", [1, 3, 10])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_closed_network(clients: int, compiled: bool) -> None:
    """C clients that send again at once, at a server that takes 1 s: it is never idle, and from the C-th request on each takes C s."""
    run = simulate(one_at_a_time(0.001), synthetic(50, Lengths(1000), Lengths(1)), concurrency=clients, compiled=compiled)  # fmt: skip
    m = run.metrics
    assert m.rows is not None
    assert (m.rows[:, 4] - m.rows[:, 1]).tolist() == [min(i + 1, clients) * PS for i in range(50)]
    assert m.request_throughput == 1.0
    assert m.utilisation == 1.0


@pytest.mark.parametrize(
    ("load", "count", "told"), [(0.8, 20, 0), (0.9, 50, 0), (0.9, 2000, 0), (1.5, 400, 40), (3.0, 40, 40)]
)
def test_a_short_run_of_a_load_that_is_served_is_not_called_overload(load: float, count: int, told: int) -> None:
    """A server that takes 1 s for each, 40 seeds: none of those below its limit is told that it cannot be served, all those far
    above are."""
    found = 0
    for seed in range(40):
        run = simulate(one_at_a_time(0.001), synthetic(count, Lengths(1000), Lengths(1), rate=load, seed=seed))
        found += any("cannot be served" in warning for warning in run.warnings)
    assert found == told


def test_m_g_1_with_two_lengths() -> None:
    """A tenth of the requests takes 5 s, the rest 0.5 s, at 0.6 a second: the mean wait is rate E[S^2] / (2 (1 - load)), with
    E[S] = 0.95 s and E[S^2] = 2.725 s^2 (Pollaczek-Khinchine), within four standard errors of 40 independent runs."""
    rate, mean, square = 0.6, 0.95, 2.725
    waits = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        arrival = np.cumsum(np.rint(rng.exponential(1 / rate, 20_000) * PS))
        m = simulate(one_at_a_time(0.1), blocks_of(arrival, np.where(rng.random(20_000) < 0.1, 50, 5), np.ones(20_000))).metrics  # fmt: skip
        assert m.latencies["queue_time"] is not None
        waits.append(m.latencies["queue_time"].mean / 1e3)
    error = np.std(waits) / np.sqrt(len(waits))
    theory = rate * square / (2 * (1 - rate * mean))
    assert error < 0.01 * theory
    assert abs(np.mean(waits) - theory) < 4 * error


@pytest.mark.parametrize("lengths", ["exponential", "alike", "two"])
def test_processor_sharing_does_not_care_how_lengths_vary(lengths: str) -> None:
    """A step of n sequences takes n times as long, so they share one processor: the mean time in the system is
    E[S] / (1 - load) whatever the distribution (Kleinrock, Queueing Systems 2, 1976). E[S] = 1 s of 200 steps, load 0.5; a request joins at the next
    step, half a step of n later on average, which is below 1 %."""
    n, load, mean = 40_000, 0.5, 200
    times = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        drawn = {"exponential": rng.exponential(mean, n), "alike": np.full(n, mean), "two": np.where(rng.random(n) < 0.1, 5.5, 0.5) * mean}  # fmt: skip
        made = np.maximum(np.rint(drawn[lengths]), 1)
        batch = np.arange(101.0)
        step = np.repeat((batch * PS / made.mean())[:, None], 2, axis=1)
        two, ones = np.array([0.0, 1.0]), np.ones(101, dtype=np.int64)
        costs = Costs(two, step, 0 * batch, two, two, np.zeros((2, 2)), ones, 0 * ones)
        server = Server(costs, "mixed", 100, 2**40, 2**50, overlap=False)
        m = simulate(server, blocks_of(np.cumsum(np.rint(rng.exponential(1 / load, n) * PS)), np.ones(n), made)).metrics
        assert m.latencies["e2e_latency"] is not None
        times.append(m.latencies["e2e_latency"].mean / 1e3)
    error = np.std(times) / np.sqrt(len(times) - 1)
    assert abs(np.mean(times) - 1 / (1 - load)) < 4 * error + 0.01 / (1 - load)
