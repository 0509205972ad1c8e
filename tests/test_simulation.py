"""The simulator against theory, against the closed form, against its plain reference, and what must hold in any run."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import dense, moe, random_server, scenario
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import specsim
from specsim import asked
from specsim.acceptance import Acceptance
from specsim.commands.simulate import command
from specsim.cycle import evaluate
from specsim.errors import InputError
from specsim.metrics import BINS, Collector, bin_middles, bins_of, latency_of, latency_of_histogram
from specsim.prediction import machine_of
from specsim.quantities import short
from specsim.scenarios import Scenario, build
from specsim.simulated import check_rate
from specsim.simulation import simulate
from specsim.simulation_costs import (
    ROWS,
    Costs,
    Server,
    acceptance_of,
    cache_limits,
    lead_seconds,
    prefill_seconds,
    refined,
    server_of,
    step_seconds,
    tables,
)
from specsim.simulation_reference import A1, A2, M1, M2, Reference, bin_of, prefill_time
from specsim.steady import Requests as Mean
from specsim.steady_servers import server_of as steady_server
from specsim.workload import BLOCK, PS, Lengths, Requests, synthetic

pytest.importorskip("numba", reason="the compiled kernel needs numba, which the dev extra installs")

Array = NDArray[np.float64]
PLAIN = {"method": "none", "d": 1}


def plain(**more: Any) -> Scenario:
    """A dense model without speculation on the round box."""
    return replace(scenario(**{**PLAIN, **more}), draft=None, num_steps=np.zeros(()))


def speculative(rate: float = 0.6, **more: Any) -> Scenario:
    return scenario(acceptance=Acceptance.constant(rate), **more)


def requests(*rows: tuple[float, int, int]) -> list[Requests]:
    """One block of (seconds, input tokens, output tokens)."""
    seconds, given, made = zip(*rows, strict=True)
    columns = [np.rint(np.asarray(seconds) * PS), np.asarray(given), np.asarray(made)]
    return [Requests(*(c.astype(np.int64) for c in columns))]


def queue(token_s: float) -> Server:
    """One customer at a time, served for its prompt's tokens x `token_s`: a single-server queue."""
    costs = Costs.fixed(0.0, 0.0, token_s)
    return Server(costs, "prefill-first", 1, 2**40, 2**50, overlap=False)


# Theory


def one_server_queue(blocks: list[Requests], seconds: Callable[[Requests], Array]) -> Array:
    """The wait of every request at a server that takes one at a time, in order (Lindley's recursion
    W' = max(0, W + service - gap), solved by a running minimum)."""
    arrival = np.concatenate([b.arrival for b in blocks]) / PS
    service = np.concatenate([seconds(b) for b in blocks])
    steps = np.concatenate([[0.0], np.cumsum(service[:-1] - np.diff(arrival))])
    return np.asarray(steps - np.minimum.accumulate(steps))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_m_d_1(load: float) -> None:
    """Poisson arrivals, service of exactly 1 s: the mean wait is load / (2 (1 - load)) s (Pollaczek-Khinchine).

    1,500,000 requests of `synthetic` wait so long by Lindley's recursion, and the simulator gives each of the first 200,000 of
    them just that wait."""
    blocks = list(synthetic(1_500_000, Lengths(1000), Lengths(1), rate=load, seed=1))
    waits = one_server_queue(blocks, lambda b: b.input_tokens * 0.001)
    assert waits.mean() == pytest.approx(load / (2 * (1 - load)), rel=0.01)
    m = simulate(queue(0.001), synthetic(200_000, Lengths(1000), Lengths(1), rate=load, seed=1)).metrics
    assert m.rows is not None
    assert np.abs((m.rows[:, 2] - m.rows[:, 1]) / PS - waits[:200_000]).max() < 1e-6
    assert m.utilisation == pytest.approx(load, rel=0.01)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_m_m_1(load: float) -> None:
    """Exponential service of mean 1 s: the mean wait is load / (1 - load) s; the queue holds load^2 / (1 - load). Held as for M/D/1;
    the queue is rate x wait (Little), over the run of the first 200,000."""
    blocks = []
    sizes = np.random.default_rng(5)
    for block in synthetic(1_500_000, Lengths(1), Lengths(1), rate=load, seed=2):
        tokens = np.maximum(np.rint(sizes.exponential(1e6, len(block))), 1).astype(np.int64)
        blocks.append(replace(block, input_tokens=tokens))
    waits = one_server_queue(blocks, lambda b: b.input_tokens * 1e-6)
    assert waits.mean() == pytest.approx(load / (1 - load), rel=0.01)
    first = blocks[:6]
    count = sum(map(len, first))
    m = simulate(queue(1e-6), iter(first)).metrics
    assert m.rows is not None
    assert np.abs((m.rows[:, 2] - m.rows[:, 1]) / PS - waits[:count]).max() < 1e-6
    assert m.json()["mean_waiting"] == pytest.approx(waits[:count].sum() / m.duration_s, rel=1e-5)


def test_little_s_law() -> None:
    """Requests in the system on average = arrival rate x mean time in it, in any run that starts and ends empty."""
    server = server_of(plain(), machine_of(plain()))
    m = simulate(server, synthetic(2000, Lengths(500, 0.2), Lengths(50, 0.2), rate=20.0)).metrics
    e2e = m.latencies["e2e_latency"]
    assert e2e is not None
    assert m.json()["mean_running"] + m.json()["mean_waiting"] == pytest.approx(
        e2e.mean / 1e3 * m.completed / m.duration_s, rel=0.02
    )


# The closed form


def test_one_plain_request_is_the_closed_form() -> None:
    """TTFT = the host's lead and one prefill of the prompt; then one decode step a token, at contexts I, I + 1, ... I + O - 2."""
    s = plain()
    machine = machine_of(s)
    m = simulate(server_of(s, machine), requests((0, 700, 50))).metrics
    first = float(
        prefill_seconds(s, machine, np.asarray(700.0), np.asarray(350.5)) + lead_seconds(s, machine, np.asarray(700.0))
    )
    steps = step_seconds(s, machine, np.ones(()), np.arange(700.0, 749.0))
    assert m.latencies["ttft"].mean == pytest.approx(first * 1e3, rel=1e-5)  # type: ignore[union-attr]
    assert m.latencies["e2e_latency"].mean == pytest.approx((first + steps.sum()) * 1e3, rel=1e-5)  # type: ignore[union-attr]
    assert m.latencies["tpot"].mean == pytest.approx(steps.mean() * 1e3, rel=1e-9)  # type: ignore[union-attr]
    assert m.counters["decode_steps"] == 49 + 1  # under overlap one more step was sent off before the end was known


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("prompt", "options", "led"),
    [
        (700, {"prefill_graph_tokens": 512}, False),  # longer than the largest graph
        (700, {"prefill_graph_tokens": 704}, True),
        (1, {}, False),  # the smallest graph, of four, would be four times as long
        (2, {}, True),
        (700, {"chunked_prefill_size": -1}, False),  # graphs up to no chunk at all: none
        (700, {"max_total_tokens": 600}, False),
        (700, {"max_total_tokens": 600, "prefill_graph_tokens": 1024}, True),
        (700, {"context_length": 600, "prefill_graph_tokens": 1024}, False),
    ],
)
def test_the_host_leads_a_prefill_once(prompt: int, options: dict[str, Any], led: bool, compiled: bool) -> None:
    """An eager prefill has the host's time in it, one from graphs has it before: TTFT is the pass, and the lead of such a one."""
    s = replace(plain(), options={**options, "kv_tokens": 10_000})
    machine = machine_of(s)
    seconds = float(prefill_seconds(s, machine, np.asarray(float(prompt)), np.asarray((prompt + 1) / 2)))
    seconds += float(machine.terms["prefill_host"]) if led else 0.0
    m = simulate(server_of(s, machine, concurrency=1), requests((0, prompt, 1)), compiled=compiled).metrics
    assert m.latencies["ttft"].mean == pytest.approx(seconds * 1e3, rel=1e-5)  # type: ignore[union-attr]
    if prompt > 1:
        closed = steady_server(s, machine, Mean(prompt, 50))
        assert float(closed.at(1e-9).ttft_s[0]) == pytest.approx(seconds, rel=1e-5)


def test_one_speculative_request_is_the_closed_form() -> None:
    """Every draft accepted: d = 3 gives 3 tokens a cycle, so 31 tokens are a prefill and 10 cycles at I, I + 3, ..."""
    s = speculative(1.0)
    machine = machine_of(s)
    m = simulate(server_of(s, machine), requests((0, 600, 31))).metrics
    cycles = step_seconds(s, machine, np.ones(()), 600.0 + 3 * np.arange(10))
    assert m.latencies["tpot"].mean * 30 == pytest.approx(cycles.sum() * 1e3, rel=1e-9)  # type: ignore[union-attr]
    assert m.accept_length == 3.0
    assert m.itl_chunk.mean == pytest.approx(3 * m.itl_token.mean)  # type: ignore[union-attr]


def test_a_prefill_runs_the_kernels_that_a_step_runs() -> None:
    """FP8 weights in blocks: their products by DeepGEMM are not as slow as by Triton, in a prompt of 8,000 tokens as in a step."""
    triton, deep = (
        asked.scenario(
            model="Qwen3-30B-A3B-FP8", hardware="1x-h200", method="none", sglang_args=f"--fp8-gemm-backend {name}"
        )
        for name in ("triton", "deep_gemm")
    )
    rows, reach = np.asarray(8000.0), np.asarray(4000.5)
    assert prefill_seconds(deep, machine_of(deep), rows, reach) != prefill_seconds(
        triton, machine_of(triton), rows, reach
    )


def test_without_graphs_a_prefill_is_launched_as_slowly_as_a_step() -> None:
    """A prompt of 64 tokens beside experts is bound by its launches, as a decode step is: of as many kernels, it takes no less."""
    s = asked.scenario(model="Qwen3-30B-A3B", hardware="1x-h200", method="none", eager=["decode"])
    machine = machine_of(s)
    assert prefill_seconds(s, machine, np.asarray(64.0), np.asarray(32.5)) >= evaluate(s, machine).decode.total


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    """2,500 tokens in chunks of 1,000: 1,000 after 0, 1,000 after 1,000, 500 after 2,000 cached tokens. Before the first the host
    leads alone, before the others by what the step before them, which it runs beside, does not hide."""
    s = plain()
    machine = machine_of(s)
    m = simulate(server_of(s, machine, chunk_tokens=1000), requests((0, 2500, 1))).metrics
    tokens, cached = np.array([1000.0, 1000.0, 500.0]), np.array([0.0, 1000.0, 2000.0])
    steps = prefill_seconds(s, machine, tokens, cached + (tokens + 1) / 2)
    lead = float(lead_seconds(s, machine, np.asarray(1000.0)))
    assert lead == machine.terms["prefill_host"] > steps[0]
    first = lead + steps[0]  # the step that the second runs beside
    seconds = first + max(lead - first, 0.0) + steps[1] + max(lead - steps[1], 0.0) + steps[2]
    assert m.latencies["ttft"].mean == pytest.approx(seconds * 1e3, rel=1e-3)  # type: ignore[union-attr]
    assert m.counters["prefill_steps"] == 3
    assert m.latencies["tpot"] is None


@pytest.mark.parametrize("engine", ["prefill-first", "mixed"])
def test_a_saturated_server_gives_the_closed_form(engine: str) -> None:
    """32 requests always in flight, answers long and alike, so that they grow together: throughput = 32 L / the mean of cycle(32, context)
    over the contexts of an answer. The cycle at the mean context is shorter: up to 6,000 tokens the host is what takes longest."""
    s = speculative(0.6)
    machine = machine_of(s)
    server = replace(server_of(s, machine, concurrency=32), policy=engine)
    m = simulate(server, synthetic(640, Lengths(16), Lengths(8000)), concurrency=32).metrics
    assert s.acceptance is not None
    length = float(s.acceptance.length(2))
    cycle = float(np.mean(step_seconds(s, machine, np.full(401, 32.0), np.linspace(16, 16 + 8000, 401))))
    assert m.accept_length == pytest.approx(length, rel=0.005)
    inside = m.timeline.tokens_per_s[5 : -len(m.timeline.tokens_per_s) // 10]  # without filling and draining
    assert inside.mean() == pytest.approx(32 * length / cycle, rel=0.005)
    assert m.json()["max_concurrent_requests"] == 32


@pytest.mark.parametrize(
    ("engine", "d", "given_", "places", "error"),
    [("sglang", 4, 1000, None, 0.01), ("sglang", 4, 6000, None, 0.01), ("vllm", 4, 1000, None, 0.01), ("vllm", 4, 6000, None, 0.01),
     ("sglang", 1, 4096, 32, 0.01), ("vllm", 1, 1000, 64, 0.01), ("sglang", 1, 2048, None, 0.01), ("vllm", 1, 2000, None, 0.02),
     ("sglang", 1, 2000, None, 0.015)],
)  # fmt: skip
def test_the_limit_is_what_a_saturated_server_does(
    engine: str, d: int, given_: int, places: int | None, error: float
) -> None:
    """A sixth more requests than are served keep every place taken: between a third and nine tenths of them leave at the limit. In the
    last case but one memory ends before places do, and vLLM preempts. In the last, prompts of 2,000 tokens are padded to 2,048 where
    they are prefilled alone or a few together; requests of one length fall into step, fill whole chunks and are not."""
    made = 200
    options = {"method": "none"} if d == 1 else {"draft_tokens": d, "accept_rate": 0.6}
    s = build(model="Llama-3.1-8B", hardware="1x-h200", engine=engine, max_running_requests=places, **options)
    machine = machine_of(s)
    limit = float(steady_server(s, machine, Mean(given_, made)).capacity())
    m = simulate(
        server_of(s, machine), synthetic(20_000, Lengths(given_), Lengths(made), 7 / 6 * limit, seed=1)
    ).metrics
    assert m.rows is not None
    left = np.sort(m.rows[:, 4])[[7000, 18_000]] / PS
    assert 11_000 / (left[1] - left[0]) == pytest.approx(limit, rel=error)


def test_requests_that_start_together_stay_in_step() -> None:
    """Requests of one length that are all sent at once make room for one another in one step, and their prompts share a prefill,
    which takes a while to launch where it is eager: a tenth more is done than under Poisson arrivals, and no rate of these keeps
    it up."""
    options = {"max_running_requests": 32, "prefill_graphs": False}
    s = build(model="Llama-3.1-8B", hardware="1x-h200", method="none", **options)
    machine = machine_of(s)
    limit = float(steady_server(s, machine, Mean(500, 300)).capacity())
    m = simulate(server_of(s, machine), synthetic(1600, Lengths(500), Lengths(300))).metrics
    assert 1.1 * limit < m.request_throughput < 1.2 * limit


@given(
    batch=st.integers(1, 48),
    context=st.floats(0, 130_000),
    d=st.integers(2, 9),
    window=st.sampled_from([None, 500, 4096]),
)
@settings(max_examples=60, deadline=None)
def test_interpolation_errs_below_half_a_percent_in_steps(
    batch: int, context: float, d: int, window: int | None
) -> None:
    s = speculative(model=dense(window=window), d=d)
    machine = machine_of(s)
    costs = tables(s, machine, 48, 64)
    exact = float(step_seconds(s, machine, np.asarray(float(batch)), np.asarray(context)))
    assert np.interp(context, costs.contexts, costs.step[batch]) / 1e12 == pytest.approx(exact, rel=0.005)


@given(tokens=st.integers(1, 8192), cached=st.integers(0, 60_000), tp=st.sampled_from([1, 8]), experts=st.booleans())
@settings(max_examples=60, deadline=None)
def test_interpolation_errs_below_half_a_percent_in_prefill(tokens: int, cached: int, tp: int, experts: bool) -> None:
    s = plain(model=moe() if experts else dense(), tp=tp)
    machine = machine_of(s)
    c = tables(s, machine, 2, 8192)
    reach = cached + (tokens + 1) / 2
    exact = float(prefill_seconds(s, machine, np.asarray(float(tokens)), np.asarray(reach)))
    assert prefill_time(c.tokens, c.reach, c.prefill, tokens, reach) / 1e12 == pytest.approx(exact, rel=0.005)


def test_prefill_times_jump_where_the_all_reduce_changes() -> None:
    """gpt-oss-120b, TP 8: a message of 2,913 rows of 2,880 bf16 values passes 16 MiB, where the engine's own all-reduce ends:
    the time jumps between two neighbouring numbers of rows of an eager prefill, and the table jumps there too, on a host so fast that
    the GPU is what counts."""
    s = specsim.scenario(model="gpt-oss-120b", hardware="8x-h100", method="none", prefill_graphs=False)
    machine = machine_of(s)
    machine = machine.under({**machine.terms, "eager_factor": np.asarray(0.1)})
    c = tables(s, machine, 2, 8192)
    rows = np.arange(1.0, 8193)
    exact = prefill_seconds(s, machine, rows, 20_000 + (rows + 1) / 2)
    assert exact[2912] / exact[2911] > 1.015  # NCCL is slower there
    table = [prefill_time(c.tokens, c.reach, c.prefill, int(n), 20_000 + (n + 1) / 2) / 1e12 for n in rows]
    np.testing.assert_allclose(table, exact, rtol=0.005)


# Kernel, reference, seeds


@st.composite
def runs(draw: st.DrawFn) -> tuple[Server, dict[str, Any], int | None]:
    """A small server of either policy, often short of memory; a load; and how many clients."""
    drafts = draw(st.integers(0, 3))
    batch = draw(st.integers(1, 12))
    costs = Costs.fixed(0.01, 0.002, 1e-5, batch=batch, rows=drafts + 1)
    survival = tuple(sorted((draw(st.floats(0, 1)) for _ in range(drafts)), reverse=True))
    if draw(st.booleans()):  # draft lengths by batch
        lengths = np.asarray(draw(st.lists(st.integers(0, drafts), min_size=batch + 1, max_size=batch + 1)))
        costs = replace(costs, drafts=lengths, rows=lengths + 1)
    server = random_server(draw, costs, batch, survival)
    load = {
        "count": draw(st.integers(1, 80)),
        "inputs": Lengths(draw(st.integers(1, 300)), 0.2),
        "outputs": Lengths(draw(st.integers(1, 80)), 0.1),
        "rate": draw(st.sampled_from([1.0, 20.0, 200.0, float("inf")])),
        "seed": draw(st.integers(0, 100)),
    }
    return server, load, draw(st.sampled_from([None, 1, 3, 20]))


@given(runs())
@settings(max_examples=150, deadline=None)
def test_kernel_equals_reference_and_nothing_is_lost(case: tuple[Server, dict[str, Any], int | None]) -> None:
    server, load, clients = case
    results = []
    for compiled in (False, True):
        try:
            results.append(simulate(server, synthetic(**load), concurrency=clients, compiled=compiled, seed=3).metrics)
        except InputError as error:
            results.append(str(error))  # type: ignore[arg-type]
    plain_run, fast = results
    if isinstance(plain_run, str):
        assert plain_run == fast
        return
    assert plain_run.counters == fast.counters
    assert plain_run.json() == fast.json()
    assert np.array_equal(plain_run.rows, fast.rows)  # type: ignore[arg-type]
    c, done = fast.counters, fast.rows
    assert done is not None
    assert fast.completed + fast.rejected == load["count"]
    assert len(np.unique(done[:, 0])) == fast.completed
    assert (
        c["output_tokens"] == done[:, 6].sum() == c["decode_tokens"] + fast.completed
    )  # the first of each is prefill's
    assert c["prefill_tokens"] == c["input_tokens"] - c["cached_tokens"] + c["recomputed_tokens"]
    assert c["peak_running"] <= server.max_running
    arrival, started, first, finished = done[:, 1:5].T
    assert (arrival <= started).all()
    assert (started < first).all()
    assert (first <= finished).all()
    assert ((first < finished) == (done[:, 6] > 1)).all()
    assert fast.timeline.tokens_per_s.sum() * fast.timeline.span_s == pytest.approx(c["output_tokens"])
    if clients:
        assert c["peak_flight"] <= clients
    if not server.overlap:
        assert c["peak_kv"] <= server.kv_tokens


def test_blocks_do_not_matter() -> None:
    """The same requests in one block or in many, with a queue longer than a block, give the same run."""
    server = Server(Costs.fixed(0.01, 0.001, batch=4), "prefill-first", 4, 512, 4096)
    whole = list(synthetic(700, Lengths(100), Lengths(20), rate=30.0))
    single = [
        Requests(
            *(np.concatenate([getattr(b, n) for b in whole]) for n in ("arrival", "input_tokens", "output_tokens"))
        )
    ]
    pieces = [
        Requests(*(getattr(single[0], n)[i : i + 7] for n in ("arrival", "input_tokens", "output_tokens")))
        for i in range(0, 700, 7)
    ]
    for clients in (None, 6):
        runs_ = [
            simulate(server, w, concurrency=clients, compiled=k).metrics.json()
            for w in (single, pieces)
            for k in (True, False)
        ]
        assert all(r == runs_[0] for r in runs_)


def test_a_seed_is_a_run() -> None:
    s = speculative(0.5)
    server = server_of(s, machine_of(s))

    def once(seed: int) -> dict[str, Any]:
        return simulate(
            server, synthetic(300, Lengths(300, 0.5), Lengths(40), rate=5.0, seed=seed), seed=seed
        ).metrics.json()

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_three_requests_by_hand() -> None:
    """Prefill 2 ms + 10 us a token, steps of 10 ms. Request 0: 3 ms. Request 1 comes at 1 ms; the step from 3 to 13 ms was
    decided at 0, so its prefill of 2.5 ms ends at 15.5 ms. Request 2 comes to an idle server at 500 ms: 502.1 ms."""
    server = Server(
        Costs.fixed(0.010, 0.002, 1e-5, batch=4, rows=3), "prefill-first", 4, 512, 4096, survival=(0.7, 0.4)
    )
    m = simulate(server, requests((0, 100, 8), (0.001, 50, 5), (0.5, 10, 2)), seed=7).metrics
    assert m.rows is not None
    rows = m.rows[m.rows[:, 0].argsort()]
    assert rows[:, 3].tolist() == [3_000_000_000, 15_500_000_000, 502_100_000_000]
    assert rows[:, 2].tolist() == [0, 13_000_000_000, 500_000_000_000]


def test_draws_follow_l_ecuyer_s_generator() -> None:
    """The k-th draw of a request is (x1 A1^k mod M1) - (x2 A2^k mod M2), + M1 - 1 if not positive; p is met below p M1."""
    server = Server(Costs.fixed(0.01, rows=3), "prefill-first", 1, 64, 4096, survival=(0.7, 0.4))
    x1, x2 = 12345, 67890
    run = Reference(server)
    run.feed(requests((0, 1, 300))[0], np.asarray([x1]), np.asarray([x2]))
    run.advance(True)
    left, cycles, k = 299, 0, 0
    while left > 0:
        k += 1
        z = x1 * pow(A1, k, M1) % M1 - x2 * pow(A2, k, M2) % M2
        z += M1 - 1 if z <= 0 else 0
        left -= 1 + (z <= 0.7 * M1) + (z <= 0.4 * M1)
        cycles += 1
    assert run.count["sequence_steps"] == cycles


@pytest.mark.parametrize("policy", ["prefill-first", "mixed"])
def test_overlap_decides_a_step_ahead(policy: str) -> None:
    """A prefill of 2 ms, then steps of 10 ms; another request comes at 1 ms, during the first prefill.

    Prefill-first without overlap: it is prefilled at once at 2 ms, first token at 4 ms. With overlap the step at 2 ms
    was decided at 0, so it decodes until 12 ms, and the prefill ends at 14 ms.
    """
    server = Server(Costs.fixed(0.010, 0.002, batch=4), policy, 4, 512, 4096, overlap=False)
    two = requests((0, 10, 50), (0.001, 10, 50))

    def first(s: Server) -> float:
        m = simulate(s, two).metrics
        assert m.rows is not None
        return float(m.rows[m.rows[:, 0] == 1, 3][0]) / 1e9

    without, with_ = first(server), first(replace(server, overlap=True))
    assert with_ - without == pytest.approx(10.0)
    if policy == "prefill-first":
        assert without == pytest.approx(4.0)


def test_full_memory_retracts_and_still_finishes() -> None:
    """8 requests that grow to up to 170 tokens each share a cache of 500: some are prefilled again, none is lost."""
    for policy in ("prefill-first", "mixed"):
        server = Server(Costs.fixed(0.01, batch=8), policy, 8, 512, 500, overlap=False)
        run = simulate(server, synthetic(100, Lengths(20), Lengths(150, 0.1)), concurrency=8)
        assert run.metrics.completed == 100
        assert run.metrics.counters["retractions"] > 0
        assert run.metrics.counters["peak_kv"] <= 500
        assert any("retractions" in w for w in run.warnings)


def test_overhead_delays_what_the_scheduler_sees() -> None:
    """A prefill of 2 ms, seen 5 ms after it was sent: 7 ms to the first token; a client sends its next at the end of it."""
    server = Server(Costs.fixed(0.010, 0.002), "prefill-first", 1, 64, 4096, overlap=False, overhead_s=0.005)
    m = simulate(server, requests((1, 10, 1), (1, 10, 1)), concurrency=1).metrics
    assert m.rows is not None
    assert (m.rows[:, 1:5] // 10**9).tolist() == [[1000, 1005, 1007, 1007], [1007, 1012, 1014, 1014]]


@pytest.mark.parametrize(("overlap", "first_ms"), [(False, 24), (True, 34)])
def test_a_full_server_prefills_one_decode_step_after_a_place_falls_free(overlap: bool, first_ms: int) -> None:
    """Two places, three requests, prefill 2 ms, steps of 10 ms; the first request ends with the step from 2 to 12 ms.

    SGLang tries no prefill while its batch is marked full, and takes the mark away when it decides on a decode step without
    what finished: the one from 12 ms, so the third prompt is prefilled from 22 to 24 ms. Under overlap the end is known
    one step later.
    """
    server = Server(Costs.fixed(0.010, 0.002, batch=2), "prefill-first", 2, 512, 4096, overlap=overlap)
    m = simulate(server, requests((0, 10, 2), (0, 10, 50), (0, 10, 50))).metrics
    assert m.rows is not None
    assert m.rows[m.rows[:, 0] == 2, 3].tolist() == [first_ms * 10**9]


def test_the_front_end_sends_one_chunk_after_another() -> None:
    """Four requests prefilled together in 2 ms, steps of 10 ms, 3 ms a chunk: the first tokens leave at 5, 8, 11, 14 ms; the
    tokens of the step that ends at 12 ms wait for those, and leave at 17, 20, 23, 26. So four chunks need 12 ms, the step
    makes them in 10, and the backlog grows by 2 ms a step; the scheduler knows nothing of it."""
    server = Server(Costs.fixed(0.010, 0.002, batch=4), "prefill-first", 4, 512, 4096, chunk_s=0.003)
    load = requests(*[(0, 10, 11)] * 4)
    m, quick = (simulate(s, load).metrics for s in (server, replace(server, chunk_s=0.0)))
    assert m.rows is not None
    rows = m.rows[m.rows[:, 0].argsort()]
    assert (rows[:, 3] // 10**9).tolist() == [5, 8, 11, 14]
    assert (rows[:, 4] // 10**9).tolist() == [5 + 120, 8 + 120, 11 + 120, 14 + 120]
    assert m.counters["decode_steps"] == quick.counters["decode_steps"]
    assert m.itl_chunk.median == pytest.approx(12.0, rel=1e-3)  # type: ignore[union-attr]


def test_without_numba_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(Costs.fixed(0.010, 0.002, batch=4), "mixed", 4, 64, 4096)
    load = {"count": 50, "inputs": Lengths(30), "outputs": Lengths(20), "rate": 10.0}
    fast = simulate(server, synthetic(**load))  # type: ignore[arg-type]
    monkeypatch.setattr("specsim.simulation.find_spec", lambda name: None)
    plain_run = simulate(server, synthetic(**load))  # type: ignore[arg-type]
    assert (fast.compiled, plain_run.compiled) == (True, False)
    assert fast.metrics.json() == plain_run.metrics.json()


def test_draft_lengths_by_batch() -> None:
    """Each batch has the step time, rows and accept length of its own draft length; one length at all batches is that
    scenario; and a server whose batch is 1 decodes plainly where speculation is off at 1."""
    s = speculative(0.6, d=4)
    machine = machine_of(s)
    ranges = ((1, 1, 0), (2, 3, 3), (4, 9, 1))
    server = server_of(s, machine, concurrency=12, ranges=ranges)
    drafted = [0, 0, 3, 3, *[1] * 9]
    assert server.costs.drafts.tolist() == drafted
    assert server.costs.rows.tolist() == [k + 1 for k in drafted]
    for b in (1, 2, 5, 12):
        k = drafted[b]
        one = plain() if k == 0 else speculative(0.6, d=k + 1)
        exact = float(step_seconds(one, machine, np.asarray(float(b)), np.asarray(1000.0)))
        assert np.interp(1000, server.costs.contexts, server.costs.step[b]) / 1e12 == pytest.approx(exact, rel=0.005)
        assert server.accept_lengths[b] == pytest.approx(1 + 0.6 * (k > 0) + (0.36 + 0.216) * (k == 3))
    load = {"count": 60, "inputs": Lengths(300), "outputs": Lengths(60), "rate": 30.0}
    alike = [server_of(s, machine, ranges=r) for r in ((), ((1, 7, 3), (8, 48, 3)))]
    a, b = (simulate(one, synthetic(**load)).metrics.json() for one in alike)  # type: ignore[arg-type]
    assert a == b
    single = simulate(server, synthetic(3, Lengths(300), Lengths(60)), concurrency=1).metrics
    assert single.accept_length == 1.0
    with pytest.raises(InputError, match="speculation by chains"):
        server_of(plain(), machine, ranges=ranges)


def test_prefix_caching_prefills_less() -> None:
    """Prompts long enough that the GPU, not the launching of the prefill's kernels, takes the time."""
    s = plain()
    machine = machine_of(s)
    runs_ = [
        simulate(server_of(s, machine, prefix_rate=rate), synthetic(50, Lengths(16000), Lengths(10), rate=2.0)).metrics
        for rate in (0.0, 0.8)
    ]
    assert runs_[1].counters["prefill_tokens"] == 50 * 3200
    assert runs_[1].latencies["ttft"].mean < runs_[0].latencies["ttft"].mean  # type: ignore[union-attr]


def test_speculation_draws_the_acceptance_that_was_given() -> None:
    """Rates 0.8 then 0.5: a cycle gains 1 with 0.2, 2 with 0.4, 3 with 0.4; a recorded histogram says the same."""
    s = scenario(acceptance=Acceptance.per_position([0.8, 0.5]))
    assert acceptance_of(s) == pytest.approx((0.8, 0.4))
    assert acceptance_of(replace(s, acceptance=None), [20, 40, 40]) == pytest.approx((0.8, 0.4))
    server = server_of(s, machine_of(s))
    m = simulate(server, synthetic(100, Lengths(10), Lengths(3000), rate=1.0)).metrics
    assert m.accept_length == pytest.approx(2.2, rel=0.005)


# Metrics


def test_large_numbers_are_shown_without_powers_of_ten() -> None:
    """A queue of an hour is 3,600,000 ms for people, not 3.6e+06; rounding to 10,000 does not make a power of ten either."""
    shown = [short(x) for x in (0.012345, 9.9999, 43.21, 2863.6, 9999.7, 389_412.3, 3.6e6, math.inf)]
    assert shown == ["0.01235", "10", "43.21", "2,864", "10,000", "389,412", "3,600,000", "inf"]
    assert [short(x, 2) for x in (0.0444, 5.4, 99.7, 541.2)] == ["0.044", "5.4", "100", "541"]


def test_histogram_bins() -> None:
    values = np.unique(np.concatenate([np.arange(5000), np.geomspace(1, 2**52, 4000).astype(np.int64)]))
    bins = bins_of(values)
    assert bins.tolist() == [bin_of(int(v)) for v in values]
    assert (np.diff(bins) >= 0).all()
    assert bins.max() < BINS
    assert np.allclose(bin_middles()[bins], values, rtol=5e-4, atol=0.5)


def test_histogram_percentiles_match_exact_ones() -> None:
    values = np.random.default_rng(1).lognormal(3, 1, 100_000)
    exact = latency_of(values)
    histogram = np.bincount(bins_of(np.rint(values * 1e6).astype(np.int64)), minlength=BINS)
    coarse = latency_of_histogram(histogram)
    assert exact is not None
    assert coarse is not None
    for name in ("mean", "median", "std", "p90", "p95", "p99"):
        assert getattr(coarse, name) == pytest.approx(getattr(exact, name), rel=1e-3)


def test_many_requests_fold_into_histograms(monkeypatch: pytest.MonkeyPatch) -> None:
    import specsim.metrics

    server = server_of(plain(), machine_of(plain()))
    load = {"count": 500, "inputs": Lengths(300, 0.2), "outputs": Lengths(30, 0.1), "rate": 5.0}
    exact = simulate(server, synthetic(**load)).metrics  # type: ignore[arg-type]
    monkeypatch.setattr(specsim.metrics, "EXACT", 100)
    folded = simulate(server, synthetic(**load)).metrics  # type: ignore[arg-type]
    assert folded.rows is None
    for name in ("ttft", "tpot", "e2e_latency"):
        a, b = exact.latencies[name], folded.latencies[name]
        assert a is not None
        assert b is not None
        assert b.mean == pytest.approx(a.mean, rel=1e-9)
        assert b.median == pytest.approx(a.median, rel=0.02)


def test_goodput_counts_requests_that_meet_every_target() -> None:
    """Rows: request, arrival, started, first, finished (ps), input, output. TTFT 1, 3, 1 ms; TPOT 1 ms, 1 ms, none."""
    ms = 10**9
    done = np.array(
        [[0, 0, 0, ms, 3 * ms, 5, 3], [1, 0, 0, 3 * ms, 5 * ms, 5, 3], [2, 0, 0, ms, ms, 5, 1]], dtype=np.int64
    )
    for targets, good in (({}, 3), ({"ttft": 2.0}, 2), ({"ttft": 2.0, "tpot": 0.5}, 1), ({"tpot": 1.5}, 3)):
        collector = Collector(targets)
        collector.add(done)
        assert collector.good == good


# Servers


def test_kv_capacity_by_hand() -> None:
    """4 + 1 layers x 2 x 8 heads x 64 values x 2 bytes = 10,240 bytes a token; 92 % of 100 GB less the weights."""
    from specsim.memory import rank_weights

    s = speculative()
    assert s.draft is not None
    left = 92e9 - rank_weights(s.model, s.parallel) - rank_weights(s.draft, s.parallel)
    assert cache_limits(s, 8) == (int(left / 10_240), 8)
    asked = {100: 100, 2**40: int(left / 10_240)}  # --max-total-tokens: what there is no room for is not given
    for tokens, held in asked.items():
        assert cache_limits(replace(s, options={"max_total_tokens": tokens}), 8) == (held, 8)
    assert cache_limits(replace(s, options={"kv_tokens": 2**40}), 8) == (2**40, 8), "as a server said"


def test_weights_beyond_the_share_of_memory_that_was_asked_for() -> None:
    """100 GB x 0.00001 = 1 MB."""
    s = replace(plain(), options={"mem_fraction": 1e-5})
    with pytest.raises(InputError, match=r"1e-05 of 100 GB can be used; raise that share"):
        cache_limits(s, 8)


def test_recurrent_states_take_at_most_their_share() -> None:
    """Every layer linear with 2.5e9 state values = 10 GB a request and layer: of the 92 GB no 47 % hold more than one."""
    target = dense(1)
    layer = replace(
        target.layers[0][0], attention=replace(target.layers[0][0].attention, kind="linear", state_values=2_500_000_000)
    )  # type: ignore[type-var]
    s = plain(model=replace(target, layers=((layer, 4),)))
    assert cache_limits(s, 48) == (2**40, 1)
    server = server_of(s, machine_of(s))
    assert server.max_running == 1


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(InputError, match="does not fit"):
        server_of(plain(model=dense(layers=80, hidden=16384)), machine_of(plain()))


def test_speculation_without_acceptance_is_an_error() -> None:
    with pytest.raises(InputError, match="needs an acceptance"):
        server_of(scenario(), machine_of(scenario()))


def test_a_trace_of_coarse_times_is_told_with_the_mend(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(f'{{"timestamp": {t}, "input_length": 9, "output_length": 9}}' for t in (0, 3000, 3000)))
    options = {"hardware": "1x-h200", "method": "none", "trace": trace}
    note = "times of the trace are multiples of 3 s, and requests of one time come together: --spread 3 spreads them"
    assert note in specsim.simulate("Llama-3.1-8B", **options).warnings
    assert note not in specsim.simulate("Llama-3.1-8B", spread=3.0, **options).warnings


def test_a_histogram_of_plain_decoding_is_said_to_be_left_out() -> None:
    found = specsim.simulate(
        "Llama-3.1-8B", hardware="1x-h200", method="none", rate=1, num_requests=2, accept_histogram=(1, 2)
    )
    assert "--accept-histogram has no meaning without speculation and is left out" in found.warnings


@pytest.mark.parametrize("histogram", [[], [0, 0], [-1, 2], [1, 1, 1, 1], [float("nan"), 1]])
def test_bad_histograms(histogram: list[float]) -> None:
    with pytest.raises(InputError, match="--accept-histogram"):
        acceptance_of(scenario(), histogram)


def test_a_load_above_capacity_names_the_limit() -> None:
    server = server_of(plain(), machine_of(plain()))
    replica = steady_server(plain(), machine_of(plain()), Mean(1000, 100))
    limit = float(replica.capacity())
    check_rate(0.9 * limit, replica, "sglang")
    with pytest.raises(InputError, match="this load cannot be served, the limit is"):
        check_rate(1.1 * limit, replica, "sglang")
    run = simulate(server, synthetic(int(60 * limit), Lengths(1000), Lengths(100), rate=2 * limit))
    assert any("this load cannot be served" in w for w in run.warnings)


def test_requests_too_long_are_rejected() -> None:
    server = Server(Costs.fixed(0.01, batch=2), "prefill-first", 2, 512, 100)
    run = simulate(server, requests((0, 10, 10), (0, 200, 10), (0, 10, 10)))
    assert (run.metrics.completed, run.metrics.rejected) == (2, 1)
    assert "rejected" in run.warnings[0]
    with pytest.raises(InputError, match="none of 1 requests fits"):
        simulate(server, requests((0, 200, 10)))


def test_rejections_cost_no_more_than_requests() -> None:
    """60,000 requests at once, of which a fifth of the later half is too long: none that waits is moved for one that is rejected,
    so it takes no longer than 60,000 that fit (20 times as long where the queue closed up for each)."""
    server = Server(Costs.fixed(0.01, 0.001, batch=64), "prefill-first", 64, 8192, 100_000)
    fits = requests(*[(0, 100, 20)] * 60_000)
    tokens = fits[0].input_tokens.copy()
    tokens[30_000::5] = 200_000
    simulate(server, requests((0, 100, 20)), compiled=True)

    def seconds(load: list[Requests], rejected: int) -> float:
        start = time.perf_counter()
        assert simulate(server, load, compiled=True).metrics.rejected == rejected
        return time.perf_counter() - start

    some = [replace(fits[0], input_tokens=tokens)]
    assert min(seconds(some, 6000) for _ in range(3)) < 4 * min(seconds(fits, 0) for _ in range(3))


# The command

MODEL = ["--model", "Llama-3.1-8B", "--hardware", "1x-h200", "--tp", "1"]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(command, [*MODEL, *arguments], catch_exceptions=True)


def test_json_has_the_fields_of_bench_serving() -> None:
    result = invoke(
        "--method",
        "none",
        "--num-requests",
        "30",
        "--rate",
        "2",
        "--input-tokens",
        "500",
        "--output-tokens",
        "40",
        "--json",
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    wanted = {
        f"{what}_{name}_ms"
        for what in ("mean", "median", "std", "p99")
        for name in ("e2e_latency", "ttft", "tpot", "itl")
    }
    wanted |= {"completed", "duration", "total_input_tokens", "total_output_tokens", "request_rate", "max_concurrency"}
    wanted |= {f"{what}_throughput" for what in ("request", "input", "output", "total")} | {
        "p95_itl_ms",
        "accept_length",
    }
    wanted |= {"concurrency", "max_output_tokens_per_s", "max_concurrent_requests"}
    assert not wanted - set(document)
    assert document["schema"] == "specsim.simulation/1"
    assert document["completed"] == 30
    assert document["accept_length"] is None


def test_the_command_for_people(tmp_path: Any) -> None:
    plot = tmp_path / "timeline.png"
    result = invoke(
        "--draft-tokens", "4", "--accept-rate", "0.6", "--num-requests", "40", "--concurrency", "8", "--input-tokens", "300",
        "--output-tokens", "60", "--ttft-ms", "500", "--tpot-ms", "20", "--plot", str(plot),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "TTFT" in result.output
    assert plot.stat().st_size > 1000


def test_a_policy_from_a_file(tmp_path: Any) -> None:
    """Off up to batch 2, then two drafted tokens: 3 rows at most, and fewer tokens a step than with two drafted always."""
    file = tmp_path / "policy.json"
    file.write_text('{"1": {"candidate_steps": [0]}, "3": {"candidate_steps": [2]}}')
    lengths = []
    for more in (["--policy", str(file)], ["--draft-tokens", "3"]):
        result = invoke("--accept-rate", "0.6", "--rate", "4", "--num-requests", "40", *more, "--json")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["scenario"]["draft_tokens"] == 3
        lengths.append(document["accept_length"])
    assert 1.0 < lengths[0] < lengths[1]


def test_traces_and_rows_out(tmp_path: Any) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{i * 0.2},{100 + i},20\n" for i in range(20)))
    rows = tmp_path / "rows.csv"
    result = invoke("--method", "none", "--trace", str(trace), "--requests-out", str(rows), "--json")
    assert result.exit_code == 0, result.output
    assert len(rows.read_text().splitlines()) == 21


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rate", "1e6", "--num-requests", "10"], "this load cannot be served, the limit is"),
        (["--rate", "0", "--num-requests", "10"], "--rate"),
        (["--concurrency", "0", "--num-requests", "10"], "--concurrency"),
        (
            ["--concurrency", str(10**15), "--num-requests", "10"],
            "--concurrency: 1,000,000,000,000,000 requests in flight; give 1 to",
        ),
        (["--num-requests", "10"], "--rate, --concurrency or --trace"),
        (["--trace", "missing.csv"], "no such trace"),
        (["--rate", "1", "--num-requests", "0"], "--num-requests"),
        (["--rate", "1", "--prefix-rate", "1.5"], "--prefix-rate"),
        (["--rate", "1", "--trace", "x.csv"], "--trace"),
        (["--rate", "1", "--ttft-ms", "-3"], "--ttft-ms: -3 ms is no target"),
        (["--rate", "1", "--policy", "no-such.json"], "no-such.json"),
        (["--rate", "1", "--policy", "p.json", "--draft-tokens", "4"], "contradicts"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str) -> None:
    result = invoke("--method", "none", *arguments)
    assert isinstance(result.exception, InputError), result.output
    assert says in str(result.exception)
    assert "\n" not in str(result.exception)


def test_memory_is_flat_and_cost_linear() -> None:
    """The requests of a long run are never held together: between blocks the kernel keeps the queue only."""
    from specsim.simulation_kernel import Kernel

    server = Server(Costs.fixed(0.001, batch=8), "prefill-first", 8, 4096, 2**20)
    kernel = Kernel(server, 8)
    for block in itertools.islice(synthetic(4 * BLOCK, Lengths(10), Lengths(5)), 4):
        kernel.feed(block, block.input_tokens, block.input_tokens)
        kernel.advance(False)
        assert len(kernel._pending) <= 2 * BLOCK


def test_step_times_of_many_batches_are_worked_out_in_parts() -> None:
    """What a step costs takes a dozen times the memory of its result: 100,000 running requests took 1.6 GB. Parts are no more than so many rows,
    and give what all at once would: a bend at 100 in every seventh row is found."""
    seen = []

    def bent(row: NDArray[np.int64], x: NDArray[np.float64]) -> NDArray[np.float64]:
        seen.append(len(row))
        return 1.0 + row + x + 5.0 * np.maximum(x - 100.0, 0.0) * (row % 7 == 0)

    rows = 2 * ROWS + 5
    nodes, table = refined(bent, rows, np.asarray([0.0, 64.0, 256.0]), whole=True)
    assert max(seen) == ROWS
    assert sum(seen[:3]) == rows
    assert 100.0 in nodes
    assert (table == bent(np.arange(rows)[:, None], nodes)).all()
