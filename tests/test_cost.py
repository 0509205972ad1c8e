"""Costs: hand-derived values, what must never fall, and what must agree whatever the path."""

from __future__ import annotations

import pickle
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest
from builders import SOURCE, dense, eagle, moe, profile, quiet, rate, scenario
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.cycle import evaluate, target_pass
from specsim.engines import Term, load_engine
from specsim.forward import (
    Network,
    Parallel,
    Pass,
    _of_group,
    allreduce_seconds,
    attention_core,
    build,
    cost,
    routed_experts,
    slice_of,
    weight_bytes,
)
from specsim.machine import Machine
from specsim.machine import build as build_machine
from specsim.models import Attention, Experts, Projection
from specsim.names import PHASES
from specsim.ops import CacheParts, DistinctExperts, Load, Operator, RowsAbove, gemm, merge
from specsim.profiles import Host, OperatorRate
from specsim.quantities import Quantity, decimals, landmarks

QUIET = replace(quiet(), kernels={})
NO_NETWORK = Network(1, "none", {})


def load(batch: float = 1, tokens: float = 1, context: float = 1000) -> Load:
    return Load(np.asarray(float(batch)), np.asarray(float(tokens)), np.asarray(float(context)))


def seconds(machine: Machine, operator: Operator, at: Load) -> float:
    """Of one operator alone, in a graph without gaps."""
    return float(cost(Pass((operator,), 1), at, machine, QUIET, NO_NETWORK, graph=True).seconds[operator.component])


def test_a_gemm_by_hand() -> None:
    """1000 x 1000 bf16: 2e6 bytes of weights and 2 x 1000 x 2 of a row = 2.004e6 bytes at 1e12 B/s = 2.004 us, plus 10 us fixed."""
    machine = build_machine(profile(), QUIET)
    operator = gemm(1000, 1000, 2e6, "gemm_bf16")
    assert seconds(machine, operator, load()) == pytest.approx(12.004e-6)


def timed(*rows: str) -> dict[str, object]:
    """Samples of products as a profile keeps them."""
    return {"gemm_bf16": {"columns": "rows n k bytes p10_us median_us p90_us", "rows": list(rows)}}


def test_products_of_a_shape_that_was_timed_cost_what_they_took() -> None:
    """1000 x 1000: one row of the class takes 12.004 us (above), and this shape took 15.005, a quarter more; at 3 rows, twice as
    much as the 12.012 of the class. Between them lies 1.625 at two; at twelve, four times the most, nothing is left of it. A shape
    that was timed at two numbers of rows alone is priced by its class, and so is any other."""
    rows = "1 1000 1000 2004000 1 15.005 1", "2 1000 1000 2008000 1 19.513 1", "3 1000 1000 2012000 1 24.024 1"
    few = "1 2000 1000 4006000 1 99 1", "4 2000 1000 4024000 1 99 1"
    box = profile().model_copy(update={"samples": timed(*rows, *few)})
    machine, plain = (build_machine(p, QUIET) for p in (box, profile()))
    own, other, square = (gemm(1000, n, 2e3 * n, "gemm_bf16") for n in (1000, 2000, 500))
    assert seconds(machine, own, load()) == pytest.approx(15.005e-6)
    assert seconds(machine, own, load(3)) == pytest.approx(24.024e-6)
    assert seconds(machine, own.times(7), load(2)) == pytest.approx(7 * 1.625 * 12.008e-6, rel=1e-4)
    for batch, factor in ((3, 2.0), (7.5, 1.5), (12, 1.0), (500, 1.0)):
        assert seconds(machine, own, load(batch)) == pytest.approx(factor * seconds(plain, own, load(batch)), rel=1e-4)
    for operator in (other, square, replace(own, shape=None)):
        assert seconds(machine, operator, load()) == seconds(plain, operator, load())


def test_experts_that_were_timed_cost_what_they_took() -> None:
    """8 experts of 1024 x 512, 2 a row, on a rank: at 4 rows the class takes 10 us and its bytes (those that the sample counted), 20 us
    in all; they took 30. Experts of another width cost what the class does, and samples of rows that all chose the same tell nothing."""
    columns = "rows routing hidden intermediate experts top_k bytes p10_us median_us p90_us alone_us"
    samples = [f"{rows} uniform 1024 512 8 2 10000000 1 30 1 1" for rows in (1, 4, 16)]
    samples += ["4 zipf 1024 512 8 2 10000000 1 500 1 1" for _ in range(3)]
    box = profile().model_copy(update={"samples": {"moe_bf16": {"columns": columns, "rows": samples}}})
    e = Experts(8, 2, 1024, 512)
    wide = replace(e, intermediate=1024)
    machine, plain = (build_machine(p, QUIET) for p in (box, profile()))
    for rows in (1, 4, 10, 16):
        one = routed_experts(e, Parallel(1), 5, "moe_bf16")
        line = 20.0  # of the sample, whose flops add less than a thousandth
        assert seconds(machine, one, load(rows)) == pytest.approx(seconds(plain, one, load(rows)) * 30 / line, rel=2e-3)
        other = routed_experts(wide, Parallel(1), 5, "moe_bf16")
        assert seconds(machine, other, load(rows)) == seconds(plain, other, load(rows))
    assert routed_experts(replace(e, gated=False), Parallel(1), 5, "moe_bf16").shape is None, (
        "none is timed without a gate"
    )
    assert routed_experts(wide, Parallel(2), 5, "moe_bf16").shape == routed_experts(e, Parallel(1), 5, "moe_bf16").shape


def test_a_rank_has_the_rows_of_its_own_sequences() -> None:
    """Of 6 sequences in 2 attention groups a rank multiplies 3 rows: twice as much as the class, as timed at 3, however many are in
    all. 8 experts of 16 on one of 2 groups of ranks, 2 of the 16 a row, do as many products for 8 rows as 8 experts with 2 a row
    for 4."""
    rows = [
        f"{r} 1000 1000 {2_000_000 + 4000 * r} 1 {f * (12 + 0.004 * r)} 1" for r, f in ((1, 1.0), (3, 2.0), (6, 1.0))
    ]
    columns = "rows routing hidden intermediate experts top_k bytes p10_us median_us p90_us alone_us"
    experts = [f"{r} uniform 1024 512 8 2 10000000 1 {us} 1 1" for r, us in ((1, 20), (4, 40), (8, 20))]
    box = profile().model_copy(update={"samples": {**timed(*rows), "moe_bf16": {"columns": columns, "rows": experts}}})
    machine, plain = (build_machine(p, QUIET) for p in (box, profile()))
    for calls in (1, 5):
        shared = _of_group(gemm(1000, 1000, 2e6, "gemm_bf16", calls=calls), 2)
        assert seconds(machine, shared, load(6)) == pytest.approx(2 * seconds(plain, shared, load(6)), rel=1e-3)
    half = routed_experts(Experts(16, 2, 1024, 512), Parallel(2, ep=2), 5, "moe_bf16")
    assert seconds(machine, half, load(8)) == pytest.approx(2 * seconds(plain, half, load(8)), rel=1e-3)


@pytest.mark.parametrize(
    "table",
    [
        "products.csv",
        ["1 1000 1000"],
        {"columns": "rows n k bytes median_us"},
        {"columns": None, "rows": ["1 1000 1000 2004000 15"]},
        {"columns": "rows n k bytes median_us", "rows": None},
        {"columns": "rows n k bytes median_us", "rows": 3},
        {"columns": "rows n k bytes median_us", "rows": "1 1000 1000 2004000 15"},
        {"columns": "rows n k median_us", "rows": ["1 1000 1000 15", "2 1000 1000 15", "3 1000 1000 15"]},
        *(
            {"columns": "rows n k bytes median_us", "rows": [f"{r} 1000 1000 2004000 {us}" for r in (1, 2, 3)]}
            for us in ("nan", "0", "-15", "inf", "1e999", "slow", "")
        ),
        {
            "columns": "rows n k bytes median_us",
            "rows": ["1 1000 1000 2004000 15", "2 1000 1000 2004000 15", "-3 1000 1000 1 15"],
        },
    ],
)
def test_samples_that_say_nothing_leave_a_shape_to_its_class(table: Any) -> None:
    """What a hand edited, or another program wrote: no table, no numbers, or none above 0."""
    box = profile().model_copy(update={"samples": {"gemm_bf16": table}})
    product = gemm(1000, 1000, 2e6, "gemm_bf16")
    assert seconds(build_machine(box, QUIET), product, load(2)) == seconds(
        build_machine(profile(), QUIET), product, load(2)
    )


def test_what_was_timed_itself_is_surer_than_its_class() -> None:
    """Of a class known to 12 %, a shape that was timed is known to 3 %, as far as GPUs of one kind differ; the value is the same."""
    rates = {
        **profile().operators,
        "gemm_bf16": profile().operators["gemm_bf16"].model_copy(update={"relative_uncertainty": 0.12}),
    }
    rows = [f"{r} 1000 1000 {2_000_000 + 4000 * r} 1 {12 + 0.004 * r} 1" for r in (1, 2, 3)]
    box = profile().model_copy(update={"operators": rates, "samples": timed(*rows)})
    machine = build_machine(box, QUIET, samples=400)
    own, other = (machine.price(o, np.float64(2.004e6), np.float64(2e6), np.float64(1000.0), 0)[0] for o in
                  (gemm(1000, 1000, 2e6, "gemm_bf16"), gemm(1000, 1001, 2e6, "gemm_bf16")))  # fmt: skip
    assert own[0] == pytest.approx(12.004e-6, rel=1e-3)
    assert np.std(own) == pytest.approx(np.std(other) / 4, rel=1e-3)


def test_machines_that_timed_the_same_shape_are_averaged() -> None:
    """Two took 15.005 and 9.003 us where the class has 12.004: what the class has."""
    one = "1 1000 1000 2004000 1 15.005 1", "2 1000 1000 2008000 1 12.008 1", "3 1000 1000 2012000 1 12.012 1"
    box = profile().model_copy(update={"samples": timed(*one, "1 1000 1000 2004000 1 9.003 1")})
    operator = gemm(1000, 1000, 2e6, "gemm_bf16")
    assert seconds(build_machine(box, QUIET), operator, load()) == pytest.approx(12.004e-6)


def test_a_gemm_is_limited_by_compute_at_many_rows() -> None:
    """At 10,000 rows and 50 TFLOP/s: 2 x 10,000 x 1e6 flops = 400 us, 42e6 bytes at 1e12 = 42 us; (400^3 + 42^3)^(1/3) =
    400.15 us, plus 10 us fixed."""
    slow = build_machine(profile(operators={**profile().operators, "gemm_bf16": rate(10, 1000, 50)}), QUIET)
    operator = gemm(1000, 1000, 2e6, "gemm_bf16")
    assert seconds(slow, operator, load(10_000)) == pytest.approx(410.15e-6, rel=1e-4)


def test_a_dense_decode_by_hand() -> None:
    """One layer of hidden 1024, 16 heads of 64, 8 KV heads, feed-forward 4096, at batch 1 and context 999, round profile.

    gemm: 4 calls x 10 us; weights 2 x (1024 x 2048 + 1024 x 1024 + 1024 x 8192 + 4096 x 1024) = 31.457e6 bytes, rows
    2 x (3072 + 2048 + 9216 + 5120) = 38,912 -> 31.496 us. attention: 10 us + 1000 tokens x 2048 bytes = 2.048 us.
    norm: 2 calls, 6 x 1024 bytes each. lm_head: 10 us + 2 x 1024 x 32,000 + 2 x 33,024 = 65.602 us, and 10 x 32,000 bytes of
    logits.
    """
    machine = build_machine(profile(), QUIET)
    p = build(dense(1), Parallel(), QUIET, True)
    c = cost(p, load(context=999), machine, QUIET, NO_NETWORK, graph=True)
    assert c.seconds["gemm"] == pytest.approx(40e-6 + 31.496e-6, rel=1e-4)
    assert c.seconds["attention"] == pytest.approx(12.048e-6, rel=1e-4)
    assert c.seconds["small_kernels"] == pytest.approx(2 * (10e-6 + 6 * 1024e-12), rel=1e-4)
    assert c.seconds["lm_head"] == pytest.approx(75.922e-6, rel=1e-4)
    assert c.seconds["launch"] == pytest.approx(10e-6)  # one graph launch
    assert "allreduce" not in c.seconds


def test_tensor_parallel_sums_twice_a_layer() -> None:
    """2 a layer x 4 layers + the embedding = 9 sums of one row of 1024 bf16 values, and the gathered logits."""
    p = build(dense(4), Parallel(8), QUIET, True)
    sums = [o for o in p.operators if o.message is not None]
    assert sorted(o.calls for o in sums) == [1, 9]
    assert sum(o.calls for o in build(dense(4), Parallel(1), QUIET, True).operators if o.message is not None) == 0


def test_an_allreduce_curve_by_hand() -> None:
    """20 us flat below 16 KiB; half way in log bytes between (16 KiB, 20) and (64 KiB, 80) is 40 us at 32 KiB; above, the last
    segment's 60 us / 49,152 bytes: 128 KiB costs 80 + 65,536 x 60 / 49,152 = 160 us."""
    curve = build_machine(profile(), QUIET).curve(("nccl",), 8, "graph")
    assert curve.seconds(np.asarray([2048.0, 16384, 32768, 65536, 131072])) == pytest.approx(
        [20e-6, 20e-6, 40e-6, 80e-6, 160e-6]
    )


def test_an_eager_pass_waits_for_the_host() -> None:
    """Eager, in an engine whose code makes three launches of one: max(GPU, 3 x kernels x 1 ms + each all-reduce 3 x 50 us, or what the
    eager curve has beyond the time on the GPU where that is more; its own kernel is in the call). On the GPU the all-reduces take what they take in a graph."""
    bare = build_machine(profile(launch=profile().launch.model_copy(update={"kernel_us": 1000.0})), QUIET)
    machine = replace(bare, terms={**bare.terms, "eager_factor": np.asarray(3.0)})
    p = build(dense(4), Parallel(2), QUIET, False)
    c = cost(p, load(), machine, QUIET, Network(2, "pcie", {"disable_custom_all_reduce": True}), graph=False)
    sums = [(o.calls, sum(o.message.values())) for o in p.operators if o.message is not None]  # of one row
    curves = {mode: machine.curve(("nccl",), 2, mode).seconds for mode in ("graph", "eager")}
    host = {b: float(curves["eager"](np.asarray(b)) - curves["graph"](np.asarray(b))) for _, b in sums}
    called = sum(n * max(150e-6, host[b]) for n, b in sums)
    assert c.seconds["allreduce"] == pytest.approx(sum(n * float(curves["graph"](np.asarray(b))) for n, b in sums))
    assert sum(n for n, _ in sums) == 10
    assert c.total == pytest.approx((float(p.kernels(load())) - 10) * 3e-3 + called)


def test_a_host_on_slow_cores() -> None:
    """Cores that are half of the time 3 times as slow: a loop takes 2 times as long for one rank, 1 + 0.75 x 2 = 2.5 for the slower of
    two, 3 for the slowest of many; what an engine that is slowed half as much as the loop launches 1.5, 1.75, and at most 2 times."""
    host = Host(slow_share=0.5, slow_ratio=3.0, source=SOURCE, relative_uncertainty=0.2)
    assert [host.slowdown(n) for n in (1, 2)] == [2.0, 2.5]
    assert host.slowdown(64) == pytest.approx(3.0)
    own = profile(launch=profile().launch.model_copy(update={"kernel_us": 1000.0}))
    machines = [build_machine(p, QUIET) for p in (own, own.model_copy(update={"host": host}))]
    terms = {"host_slowing": np.asarray(0.5), "decode_host": np.asarray(1e-3), "cycle_host": np.asarray(2e-3)}
    fast, slow = (replace(m, terms={**m.terms, **terms}) for m in machines)
    for tp, times in ((1, 1.5), (2, 1.75)):
        eager = scenario(dense(4), eagle(dense(4)), engine=QUIET, tp=tp, eager=frozenset(PHASES))
        before, after = (evaluate(eager, m) for m in (fast, slow))
        assert after.decode_host == pytest.approx(before.decode_host * times)
        assert after.cycle_host == pytest.approx(before.cycle_host * times)
        if tp == 1:
            assert after.verify.total == pytest.approx(before.verify.total * times, rel=1e-3)
        graphs = scenario(dense(4), eagle(dense(4)), engine=QUIET, tp=tp)
        assert evaluate(graphs, slow).verify.total == evaluate(graphs, fast).verify.total
    sampled = build_machine(own.model_copy(update={"host": host}), QUIET, samples=500)
    sampled = replace(sampled, terms={**sampled.terms, "host_slowing": np.asarray(1.0)})
    drawn = sampled.slowing(2)[1:]
    assert drawn.max() <= 3.0
    assert np.std(drawn) == pytest.approx(1.5 * 0.2, rel=0.3)


def test_launches_take_longer_beside_the_code_of_experts() -> None:
    """Launches of 1 ms, 1.7 times as long where the target has experts: in its verify and in its dense draft's steps alike,
    though what is launched there is what a dense target's draft launches. In graphs nothing changes."""
    box = profile(launch=profile().launch.model_copy(update={"kernel_us": 1000.0}))
    machine = build_machine(box, QUIET)
    slow = replace(machine, terms={**machine.terms, "eager_experts": np.asarray(1.7)})
    for target, times in ((dense(4), 1.0), (moe(4), 1.7)):
        eager = scenario(target, eagle(target), engine=QUIET, eager=frozenset(PHASES))
        before, after = (evaluate(eager, m) for m in (machine, slow))
        assert after.verify.total == pytest.approx(before.verify.total * times)
        assert after.draft.total == pytest.approx(before.draft.total * times)
        graphs = scenario(target, eagle(target), engine=QUIET)
        assert evaluate(graphs, slow).verify.total == evaluate(graphs, machine).verify.total


def test_choosing_experts_by_groups_costs_a_row() -> None:
    """0.1 us a row and layer: 6.3 us a layer between 1 and 64 requests, in a plain step and, with 4 rows a request, in a verify."""
    machine = build_machine(profile(), QUIET)
    slow = replace(machine, terms={**machine.terms, "row_groups": np.asarray(0.1e-6)})
    plain = moe(5)
    layer = plain.layers[0][0]
    assert layer.experts is not None
    grouped = replace(plain, layers=((replace(layer, experts=replace(layer.experts, by_groups=True)), 5),))
    for target, layers in ((plain, 0), (grouped, 5), (dense(5), 0)):
        for batch in (1, 64):
            s = scenario(target, eagle(target), d=4, batch=batch, engine=QUIET)
            before, after = (evaluate(s, m) for m in (machine, slow))
            assert after.decode.total - before.decode.total == pytest.approx(layers * batch * 0.1e-6, abs=1e-12)
            assert after.verify.total - before.verify.total == pytest.approx(layers * 4 * batch * 0.1e-6, abs=1e-12)
            assert after.draft.total == before.draft.total


def test_a_batch_costs_the_same_beside_larger_ones() -> None:
    """SGLang speculates with at most 48 requests unless told otherwise. A batch above that asks for more, and changes nothing of
    what a smaller one beside it is padded to."""
    batches = [8, 31, 40, 64, 400]
    options = {"captured_sizes": (16, 64)}
    together = evaluate(scenario(dense(4), batch=batches, options=options), build_machine(profile(), QUIET)).cycle_s
    for batch, cycle_s in zip(batches, together, strict=True):
        alone = evaluate(scenario(dense(4), batch=batch, options=options), build_machine(profile(), QUIET)).cycle_s
        assert float(alone) == float(cycle_s), batch


def test_plain_decoding_knows_no_draft_length_in_a_sweep_beyond_the_cap() -> None:
    """7 batches, some above the 48 requests that the server was told to run, by 3 draft lengths: decode has a time a batch."""
    batches = np.array([1.0, 2, 4, 8, 16, 32, 64])[:, None]
    s = scenario(dense(4), batch=batches, context=1000, d=np.array([3, 4, 5]), options={"max_running_requests": 48})
    assert evaluate(s, build_machine(profile(), QUIET)).decode_s.shape == (7, 1)


def test_each_sequence_costs_the_host_which_shows_where_the_gpu_is_faster() -> None:
    """Host work of 20 ms and 100 us for each of 64 sequences is 26.4 ms, longer than the graph, which it contains: a step of
    26.4 ms. Over 8 data parallel ranks each host has 8 of them: 20.8. 1 ns is hidden."""
    box = profile()
    for dp, sequence_us, ms in ((1, 100.0, 26.4), (8, 100.0, 20.8)):
        known = {"decode_cpu": np.asarray(20e-3), "sequence_cpu": np.asarray(sequence_us * 1e-6)}
        machine = build_machine(box, QUIET)
        machine = replace(machine, terms={**machine.terms, **known})
        s = replace(scenario(dense(2), box=box, engine=QUIET, batch=64), parallel=Parallel(8, dp=dp))
        assert evaluate(s, machine).decode_s == pytest.approx(ms * 1e-3)
    hidden = replace(machine, terms={**machine.terms, "decode_cpu": np.zeros(()), "sequence_cpu": np.asarray(1e-9)})
    assert evaluate(s, hidden).decode_host == hidden.terms["decode_host"]


@pytest.mark.parametrize("cpu_us", [100.0, 50_000.0])
def test_host_time_by_hand(cpu_us: float) -> None:
    """Overlapped, the host's work hides behind the graphs but for a gap; alone, a step's own work and 700 us of a cycle's
    are seen in any case. An n-gram verify waits 900 us for the host inside its own time."""
    terms = {"decode_cpu_us": 80.0, "cycle_cpu_us": cpu_us, "cycle_host_us": 20.0, "decode_host_us": 10.0,
             "serial_cpu_us": 700.0, "ngram_verify_us": 900.0}  # fmt: skip
    engine = replace(QUIET, terms={**QUIET.terms, **{name: Term(value, 0.0, "test") for name, value in terms.items()}})
    box = build_machine(profile(), engine)
    for options, least, decode in (({}, 20e-6, 10e-6), ({"disable_overlap": True}, 700e-6, 80e-6)):
        c = evaluate(scenario(dense(), engine=engine, options=options), box)
        assert c.draft is not None
        assert c.verify is not None
        graphs = float(c.draft.total + c.verify.total)
        assert float(c.cycle_host) == pytest.approx(max(least, cpu_us * 1e-6 - graphs))
        assert float(c.decode_host) == pytest.approx(max(decode, 80e-6 - float(c.decode.total)))
    chain = evaluate(scenario(dense(), engine=engine, method="none", draft=None), box)
    ngram = evaluate(replace(scenario(dense(), engine=engine, method="ngram"), draft=None), box)
    assert chain.verify is None
    assert ngram.verify is not None
    assert float(ngram.verify.seconds["host"]) == pytest.approx(900e-6)
    assert float(ngram.verify.total) == pytest.approx(sum(float(v) for v in ngram.verify.seconds.values()))


def test_kv_is_read_once_for_all_rows_of_a_sequence() -> None:
    """Verify law: a pass over batch x d rows reads each sequence's cache once."""
    box = profile(operators={**profile().operators, "attention_gqa": rate(0, 1000, 1e6)})
    machine = build_machine(box, QUIET)
    s = scenario(dense(1), box=box, engine=QUIET, context=100_000)
    one = target_pass(s, machine, np.asarray(1.0), "decode").seconds["attention"]
    eight = target_pass(s, machine, np.asarray(8.0), "decode").seconds["attention"]
    assert one < eight < 1.001 * one


@given(st.integers(1, 64), st.integers(0, 50_000), st.integers(2, 9), st.sampled_from([1, 2, 4, 8]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_time_never_falls_with_more_work(batch: int, context: int, d: int, tp: int, experts: bool) -> None:
    """More rows, context or layers never cost less; more ranks never load a rank with more bytes of weights."""
    model = moe() if experts else dense()
    graphs = {
        "captured_sizes": tuple(range(1, 129)),
        "max_running_requests": 128,
    }  # no step from graph to eager, where a pass may get cheaper
    base = scenario(model, tp=tp, batch=batch, context=context, d=d, engine=QUIET, options=graphs)
    machine = build_machine(base.profile, QUIET)
    here = evaluate(base, machine)
    assert here.cycle_s > here.verify.total  # type: ignore[union-attr]
    for more in (
        replace(base, batch=base.batch + 1),
        replace(base, context=base.context + 1000),
        replace(base, draft_tokens=base.draft_tokens + 1, num_steps=base.num_steps + 1),
        replace(base, model=moe(5) if experts else dense(5)),
    ):
        assert evaluate(more, machine).cycle_s >= here.cycle_s * (1 - 1e-12)


@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_arrays_and_scalars_agree(batch: int, context: int, d: int) -> None:
    """A sweep is the same equation as one prediction, across graph padding and the end of the captured sizes."""
    batches, tokens = np.asarray([1.0, batch]), np.asarray([2.0, d + 1.0])
    options = {"captured_sizes": (1, 2, 4, 8, 16, 32, 64)}
    machine = build_machine(profile(), load_engine("sglang"))
    many = evaluate(
        scenario(moe(), batch=batches[:, None], context=100.0 * context, d=tokens[None, :], options=options), machine
    )
    for i in range(2):
        for j in range(2):
            one = evaluate(
                scenario(moe(), batch=batches[i], context=100.0 * context, d=tokens[j], options=options), machine
            )
            assert np.broadcast_to(many.cycle_s, (2, 2))[i, j] == pytest.approx(float(one.cycle_s), rel=1e-12)


def test_samples_lead_and_start_with_the_profile_itself() -> None:
    plain = build_machine(profile(), load_engine("sglang"))
    sampled = build_machine(profile(), load_engine("sglang"), samples=50, seed=1)
    s = scenario(moe(), tp=8)
    many = evaluate(s, sampled).cycle_s
    assert many.shape[0] == 51
    assert many.reshape(-1)[0] == pytest.approx(float(evaluate(s, plain).cycle_s))
    assert np.ptp(many) > 0


@pytest.mark.parametrize("eager", [frozenset(), frozenset({"decode", "verify", "extend"})])
def test_what_a_machine_keeps_serves_all_terms_and_loads(eager: frozenset[str]) -> None:
    """Passes priced under other terms and launch costs, and for other loads, are those of a machine that has priced nothing."""
    loads = [
        scenario(moe(), tp=8, batch=b, context=c, eager=eager) for b, c in (([1, 8], 1000), ([1, 9], 1000), (1, 99))
    ]
    first = build_machine(profile(), load_engine("sglang"), samples=3)
    terms = {name: 1.5 * value + 1e-6 for name, value in first.terms.items()}
    launch = {name: 2 * value for name, value in first.launch.items()}
    for kept in (first, first.under(terms), first.under(terms, launch), first):
        for s in loads:
            one, other = evaluate(s, kept), evaluate(s, replace(kept))
            assert np.array_equal(one.cycle_s, other.cycle_s)
            assert np.array_equal(one.decode_s, other.decode_s)


def test_an_all_reduce_of_one_message_whatever_kind_of_number_it_is() -> None:
    """Prices are looked up by number; an array without axes is one, too."""
    s, machine = scenario(moe(), tp=8), build_machine(profile(), QUIET, samples=5)
    found = [allreduce_seconds(size, machine, QUIET, s.network) for size in (np.float64(1e4), np.asarray(1e4), np.full(1, 1e4))]  # fmt: skip
    assert found[0].shape == found[1].shape == (6,)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2].reshape(-1))


def test_a_machine_that_priced_travels_to_another_process() -> None:
    s = scenario(moe(), tp=8)
    machine = build_machine(profile(), QUIET, samples=5)
    before = evaluate(s, machine).cycle_s
    assert np.array_equal(evaluate(s, pickle.loads(pickle.dumps(machine))).cycle_s, before)


def test_merging_operators_changes_nothing() -> None:
    """Not even where one product streams, another computes and a third walks: those of one size are added up, no others."""
    box = profile(operators={**profile().operators, "gemm_bf16": walking(rate(1, 1000, 50), 2.0)})
    machine = build_machine(box, QUIET)
    products = [(100, 20_000, 4e6), (8000, 50, 8e5), (10, 10, 200), (8000, 50, 8e5)]
    operators = [gemm(k, n, size, "gemm_bf16") for k, n, size in products]
    together = merge(operators)
    assert len(together) == 3
    for rows in (1, 300):
        apart = sum(seconds(machine, o, load(rows)) for o in operators)
        assert sum(seconds(machine, o, load(rows)) for o in together) == pytest.approx(apart, rel=1e-12)


def walking(r: OperatorRate, inner_ns: float) -> OperatorRate:
    return r.model_copy(update={"inner_ns": inner_ns})


def test_a_product_walks_its_inner_width_by_hand() -> None:
    """4000 x 10 at 2 ns a value: 8 us of walking, 80e3 bytes at 1e12 B/s are nothing beside them, plus 10 us fixed."""
    box = profile(operators={**profile().operators, "gemm_bf16": walking(rate(10, 1000, 1000), 2.0)})
    machine = build_machine(box, QUIET)
    assert seconds(machine, gemm(4000, 10, 8e4, "gemm_bf16"), load()) == pytest.approx(18e-6, rel=1e-4)


def test_experts_add_what_they_walk() -> None:
    """3 ns a value over hidden + intermediate, beside the fixed time: each layer's experts are dearer by exactly that."""
    model, here = moe(), profile()
    e = next(layer.experts for layer, _ in model.layers if layer.experts is not None)
    layers = sum(n for layer, n in model.layers if layer.experts is not None)
    slow = walking(here.operators[f"moe_{e.format.name}"], 3.0)
    there = profile(operators={**here.operators, f"moe_{e.format.name}": slow})
    p = build(model, Parallel(), QUIET, True)
    one, other = (cost(p, load(), build_machine(box, QUIET), QUIET, NO_NETWORK, graph=True) for box in (here, there))
    more = other.seconds["experts"] - one.seconds["experts"]
    assert more == pytest.approx(layers * 3e-9 * (e.inputs + e.intermediate), rel=1e-9)


def test_a_product_whose_kernel_splits_the_inner_width_walks_nothing() -> None:
    """Up to the rows that the engine has such a kernel for."""
    operator = gemm(4000, 10, 8e4, "gemm_bf16", walked=RowsAbove(16))
    box = profile(operators={**profile().operators, "gemm_bf16": walking(rate(10, 1000, 1000), 2.0)})
    machine = build_machine(box, QUIET)
    few, many = (seconds(machine, operator, load(rows)) for rows in (16, 17))
    assert few == pytest.approx(10e-6, rel=0.05)
    assert many == pytest.approx(18e-6, rel=0.01)


def test_a_latent_cache_is_cut_for_few_sequences() -> None:
    """8 heads at 64 tokens a block, 1.1 blocks over 132 processors: 1,024 tokens make 16 / (1 + 16 / 120) = 14.1 parts, 8,192 make
    128 / (1 + 128 / 120) = 61.9, four of 4,096 make 64 / (1 + 256 / 120) = 20.4 each and 256 of them 64 / (1 + 16,384 / 120) =
    0.47. 128 heads are two blocks of 64 query rows: 128 / (1 + 256 / 120) = 40.9. One of four groups has a quarter of the
    sequences; 2,048 selected tokens are 32 / (1 + 32 / 120) = 25.3 parts at any context."""
    for parts, batch, context, expected in (
        (CacheParts(8), 1, 1024, 14.1), (CacheParts(8), 1, 8192, 61.9), (CacheParts(8), 4, 4096, 20.4), (CacheParts(8), 256, 4096, 0.465),
        (CacheParts(128), 1, 8192, 40.9), (CacheParts(8).of_group(4), 4, 8192, 61.9), (CacheParts(8, limit=2048), 1, 50_000, 25.3),
    ):  # fmt: skip
        assert parts.of(load(batch, context=context - 1)) == pytest.approx(expected, rel=2e-3)


def test_a_cache_is_cut_for_the_processors_of_the_gpu() -> None:
    """8,192 tokens are 128 blocks: 61.9 parts for the 132 processors of a GPU that does not say, 128 / (1 + 128 x 1.1 / 78) = 45.6
    for 78. At 10 ns a part and four layers a decode pass takes 4 x 16.3 x 10 ns less."""
    few = profile().gpu.model_copy(update={"processors": 78})
    rates = {**profile().operators, "attention_mla": walking(rate(10, 1000, 1000), 10.0)}
    mla = Attention("mla", 8, 1, 192, kv_lora_rank=512, rope_dim=64)
    model = replace(dense(), layers=((replace(dense(1).layers[0][0], attention=mla), 4),))
    times = []
    for gpu in (profile().gpu, few):
        s = scenario(model, context=8191, box=profile(operators=rates, gpu=gpu), engine=QUIET)
        times.append(float(evaluate(s, build_machine(s.profile, s.engine)).decode.total))
    assert times[0] - times[1] == pytest.approx(4 * (61.94 - 45.63) * 10e-9, rel=1e-3)


@given(st.integers(1, 300), st.integers(1, 130_000), st.sampled_from([8, 16, 64, 128]), st.integers(1, 4))
def test_parts_are_those_of_the_kernel_without_its_steps(batch: int, tokens: int, heads: int, d: int) -> None:
    """The kernel's: a part is ceil(1.1 blocks a processor) blocks. Never more, never less than half but for what is rounded
    up; a longer cache has no fewer, more sequences no more."""
    blocks, rows = ceil(tokens / 64), ceil(heads * d / 64)
    kernels = ceil(blocks / ceil(blocks * rows * batch / 120))
    parts, at = CacheParts(heads), load(batch, d, tokens - d)
    here = float(parts.of(at))
    assert here <= kernels
    assert here >= (kernels - 1) / 2 * (1 - 1 / blocks)
    assert parts.of(load(batch, d, tokens - d + 500)) >= here
    assert parts.of(load(batch + 1, d, tokens - d)) <= here


def test_parts_of_a_cache_are_paid_one_by_one() -> None:
    """10 ns a part of one sequence of 8,192 tokens: 61.9 x 10 ns a layer in MLA, nothing where K/V heads have their own."""
    mla = Attention("mla", 8, 1, 192, kv_lora_rank=512, rope_dim=64)
    gqa = Attention("gqa", 8, 1, 128)
    for a, more in ((mla, 0.619e-6), (gqa, 0.0)):
        (operator,) = attention_core(a, 1, 2.0, 3)
        name = operator.rate
        rates = {**profile().operators, name: rate(10, 1000, 1000)}
        boxes = profile(operators=rates), profile(operators={**rates, name: walking(rates[name], 10.0)})
        plain, walked = (seconds(build_machine(box, QUIET), operator, load(context=8191)) for box in boxes)
        assert walked - plain == pytest.approx(more, rel=1e-3, abs=1e-12)


def test_kv_heads_are_repeated_when_ranks_outnumber_them() -> None:
    """16 query heads and 2 KV heads of 64 on 8 ranks: 2 query heads and one whole K and V head each = (2 + 2) x 64 outputs."""
    qkv = Projection("qkv", 1024, (16 + 4) * 64, kv_outputs=4 * 64, kv_heads=2)
    assert slice_of(qkv, 8) == (1024, 4 * 64)
    assert weight_bytes(qkv, 8) == 1024 * 256 * 2


def test_padding_runs_the_captured_batch() -> None:
    options = {"captured_sizes": (4, 8)}
    machine = build_machine(profile(), QUIET)
    three = evaluate(scenario(moe(), batch=3, engine=QUIET, options=options), machine).decode.seconds["experts"]
    four = evaluate(scenario(moe(), batch=4, engine=QUIET, options=options), machine).decode.seconds["experts"]
    assert three == pytest.approx(float(four))


def test_an_eagle_cycle_has_one_extend_and_a_step_less_than_its_depth() -> None:
    machine = build_machine(profile(), QUIET)
    two, four = (evaluate(scenario(dense(), d=d, engine=QUIET), machine) for d in (3, 5))
    assert two.draft is not None
    assert four.draft is not None
    assert float(four.draft.total) == pytest.approx(3 * float(two.draft.total))
    none = evaluate(scenario(dense(), d=2, engine=QUIET), machine)
    assert float(none.draft.total) == 0  # type: ignore[union-attr]


def test_reduced_vocabulary_makes_drafting_cheaper() -> None:
    machine = build_machine(profile(), QUIET)
    target = dense()
    small, large = (evaluate(scenario(target, eagle(target, v), engine=QUIET), machine) for v in (8000, 32000))
    assert small.cycle_s < large.cycle_s
    assert float(small.verify.total) == float(large.verify.total)  # type: ignore[union-attr]


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_intervals_are_quantiles_of_the_samples(n: int, seed: int) -> None:
    """Of quantities themselves, of what falls with them and of what rises with them."""
    rows = np.exp(np.random.default_rng(seed).standard_normal((3, 1 + n)))
    rows[2] = np.sort(rows[2])
    marks = landmarks(list(rows))
    for f in (np.asarray, lambda x: 7.0 / x, np.sqrt):
        found, (values, samples) = Quantity.at(f(marks), n), np.split(f(rows), [1], axis=1)
        low, high = np.quantile(samples, (0.1, 0.9), axis=1)
        assert [q.value for q in found] == values.ravel().tolist()
        assert [q.low for q in found] == pytest.approx(np.minimum(low, values.ravel()).tolist(), rel=1e-12)
        assert [q.high for q in found] == pytest.approx(np.maximum(high, values.ravel()).tolist(), rel=1e-12)


@given(st.floats(0.001, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_quantity_lies_in_its_interval(value: float, below: float, above: float) -> None:
    q = Quantity.of(np.asarray([value, max(value - below, 0.0), value + above]))
    assert q.low <= q.value <= q.high
    assert str(q)


def test_digits_follow_the_error() -> None:
    """Particle Data Group: an error of 0.827 keeps one digit (place 1), 0.119 two (place 2), 36 none."""
    assert [decimals(e) for e in (0.827, 0.119, 36.0, 1.3)] == [1, 2, 0, 1]


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_several_draft_lengths_at_once_agree_with_one(name: str) -> None:
    """vLLM captures numbers of tokens, so which batch has a graph depends on the draft length."""
    d, engine = np.asarray([2.0, 4, 9, 64]), load_engine(name)
    machine = build_machine(profile(), engine)
    many = evaluate(scenario(moe(), batch=20, d=d, engine=engine), machine).cycle_s
    for place, tokens in enumerate(d):
        one = evaluate(scenario(moe(), batch=20, d=tokens, engine=engine), machine).cycle_s
        assert many[place] == pytest.approx(float(one), rel=1e-12)


def test_a_batch_above_the_default_cap_still_runs_in_a_graph() -> None:
    """SGLang queues what its cap of 48 leaves out; what is asked for at batch 64 is a server that runs 64."""
    s = scenario(moe(), batch=64)
    assert max(s.captured("verify", 3)) >= 64
    assert max(scenario(moe(), batch=8).captured("verify", 3)) == 48


def test_shared_experts_hide_only_behind_fixed_time() -> None:
    """Two streams share one memory: a step never takes less than its bytes. Shared experts of 100 MB at 1 TB/s are 100 us
    beside 10 us of the routed experts' fixed time, so 90 us are paid; of 5 MB, nothing."""
    machine = build_machine(profile(), QUIET)

    def gemms(mb: float) -> float:
        base = moe(1)
        layer = base.layers[0][0]
        assert layer.experts is not None
        shared = (Projection("shared", 1000, round(mb * 500)),)
        model = replace(base, layers=((replace(layer, experts=replace(layer.experts, shared=shared)), 1),))
        p = build(model, Parallel(), QUIET, True)
        return float(cost(p, load(), machine, QUIET, NO_NETWORK, graph=True).seconds["gemm"])

    without = gemms(0.002)
    assert gemms(100) - without == pytest.approx(90e-6, rel=0.01)
    assert gemms(5) == pytest.approx(without)


@given(st.integers(1, 200), st.sampled_from([2, 4, 8]))
@settings(max_examples=50, deadline=None)
def test_the_busiest_group_of_experts(rows: int, groups: int) -> None:
    """Between the mean and what one group or all touched experts can be; 8 experts on 8 groups: about 2.3 on the busiest
    (a simulation gives 2.5 to 3.2), not 1."""
    touched = float(DistinctExperts(384, 8).of(load(rows)))
    busiest = float(DistinctExperts(384, 8, groups).of(load(rows)))
    assert touched / groups <= busiest <= min(touched, 384 / groups) + 1e-9
    assert 2.0 < float(DistinctExperts(384, 8, 8).of(load(1))) < 3.2


def test_a_missing_eager_curve_is_the_graph_curve_of_the_same_implementation() -> None:
    curves = [c for c in profile().allreduce if c.mode == "graph" or c.ranks != 8]
    other = curves[0].model_copy(
        update={"implementation": "custom", "ranks": 8, "mode": "eager", "latency_us": [1.0, 1.0]}
    )
    machine = build_machine(profile(allreduce=[*curves, other]), QUIET)
    assert machine.curve(("nccl",), 8, "eager").implementation == "nccl"


def test_a_larger_message_is_never_faster() -> None:
    dip = profile().allreduce[0].model_copy(update={"bytes": [1024, 4096, 16384], "latency_us": [10.0, 7.0, 12.0]})
    curve = build_machine(profile(allreduce=[dip]), QUIET).curve(("nccl",), 2, dip.mode)
    assert np.all(np.diff(curve.seconds(np.asarray([1024.0, 2048, 4096, 8192, 16384]))) >= -1e-18)
