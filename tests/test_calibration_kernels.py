"""Engines' kernels beside plain torch: a wrong result, or another release's signature, is told and its times are not used."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch is not installed (pip install 'specsim[calibrate]')", allow_module_level=True)

import torch
from specsim.calibration import attention, between, blockwise, deepgemm, gemm, marlin, moe, mxfp4, small
from specsim.calibration.context import Context, Measurement
from specsim.calibration.session import Plan, stages

from specsim import calibration
from specsim.commands import calibrate as calibrate_command
from specsim.configs import load_model
from specsim.shapes import shapes


class OnGpu(Context):
    """A context that says it is on a GPU; its tensors are on the CPU."""

    gpu = True
    l2_bytes = 2**14
    memory_bytes = 16e9

    def synchronize(self) -> None: ...


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    """Timing is left out; calls run once, as a capture would."""

    def timed(context: Context, calls: Any, *_: Any, **options: Any) -> Measurement:
        for call in calls:
            call()
        return Measurement([1e-5] * 5)

    monkeypatch.setattr(gemm, "in_graph", timed)
    for module in (attention, moe, small):
        monkeypatch.setattr(module, "in_place", timed)
    card = SimpleNamespace(multi_processor_count=8)
    for name, value in (
        ("get_device_capability", (9, 0)), ("get_device_properties", card), ("synchronize", None), ("empty_cache", None)
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return OnGpu(0, 1, 0, torch.device("cpu"), False, {})


def package(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """A package that can be found and imported, with its parents."""
    parts = name.split(".")
    for i in range(len(parts)):
        module = ModuleType(".".join(parts[: i + 1]))
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, loader=None)
        if i == len(parts) - 1 or module.__name__ not in sys.modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(sys.modules[name]).update(names)


# --- Marlin ---------------------------------------------------------------------------------------------------------


def test_marlins_order_of_values() -> None:
    """Thread 0 holds of the first tile rows 0, 1, 8, 9 of columns 0 and 8: 0, 16, 128, 144 and 8, 24, 136, 152, of which an
    int32 takes every second one first. Thread 1: rows 2, 3, 10, 11. Thread 4: column 1. Each of the 1,024 values once."""
    order = marlin._order()
    assert order[:8] == [0, 128, 8, 136, 16, 144, 24, 152]
    assert order[8:10] == [256, 384]
    assert order[32] == 32
    assert order[4 * 32] == 1
    assert sorted(order) == list(range(1024))


def test_marlins_values_and_scales_stand_where_they_belong() -> None:
    """One value of 9 among zeros in the lowest bits of the first int32: input 0 of output 0 is (9 - 8) x its scale. The
    scale of output 8 is the second of the 64 in Marlin's order."""
    packed = torch.zeros(1, 4, 128, dtype=torch.int32)
    packed[0, 0, 0] = 9
    scales = torch.ones(1, 2, 64, dtype=torch.bfloat16)
    scales[0, 0, 1] = 2.0
    weights = marlin.Weights(packed, scales)[0]
    assert weights.shape == (64, 64)
    assert weights[0, :3].tolist() == [1.0, -8.0, -8.0]
    assert weights[8, 31:33].tolist() == [-16.0, -8.0]
    drawn = marlin.random(2, 64, 256, "cpu")
    assert float(drawn[1].std()) * 16 == pytest.approx(0.93, rel=0.1)  # 4.6 x 0.2 / sqrt(256)


SHAPE = {"hidden": 128, "intermediate": 64, "experts": 4, "top_k": 2}


def fake_marlin(right: bool) -> Any:
    def fused(x: Any, w1: Any, w2: Any, s1: Any, s2: Any, logits: Any, route: Any, ids: Any, **options: Any) -> Any:
        assert options["num_bits"] == 4
        s1 = s1 if right else s1.flip(1)
        return moe.reference(x, ids, route, marlin.Weights(w1, s1), marlin.Weights(w2, s2)).to(x.dtype)

    return fused


@pytest.mark.parametrize("right", [True, False])
def test_int4_experts_are_checked_before_they_are_timed(
    context: Context, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """The wrong kernel mixes up the groups of the first product's scales."""
    name = "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe"
    package(monkeypatch, name, fused_marlin_moe=fake_marlin(right))
    monkeypatch.setattr(moe, "CALLS", 2)
    case = moe._case("int4", SHAPE, 5, "uniform")
    if right:
        assert moe.run(context, case).extras["kernel"] == "sglang marlin"
        return
    with pytest.raises(RuntimeError, match=r"sglang marlin: wrong result: relative error 0\.\d+ at 5 rows"):
        moe.run(context, case)


def test_what_cannot_be_built_is_built_once(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def broken(*arguments: Any) -> Any:
        tries.append(1)
        raise TypeError("unexpected keyword argument")

    monkeypatch.setattr(moe, "_marlin", broken)
    for _ in range(3):
        with pytest.raises((TypeError, RuntimeError), match="unexpected keyword"):
            moe.run(context, moe._case("int4", SHAPE, 5, "uniform"))
    assert len(tries) == 1


@pytest.mark.parametrize("fault", ["", "wrong", "signature"])
def test_fused_experts_of_an_engine_or_our_own(context: Context, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def sglang(context: Context, kind: str, p: Any, weights: moe.Weights) -> moe.Path:
        if fault == "signature":
            raise TypeError("no argument 'filter_expert'")
        return own(context, kind, p, weights, 2.0 if fault else 1.0)

    def own(context: Context, kind: str, p: Any, weights: moe.Weights, factor: float = 1.0) -> moe.Path:
        def path(x: Any, ids: Any) -> Any:
            route = torch.full(ids.shape, factor / ids.shape[1])
            return lambda: moe.reference(x, ids, route, *weights.real).to(x.dtype)

        return path

    monkeypatch.setattr(moe, "_sglang_here", lambda: True)
    monkeypatch.setattr(moe, "_sglang", sglang)
    monkeypatch.setattr(moe, "_triton", own)
    monkeypatch.setattr(moe, "CALLS", 2)
    extras = moe.run(context, moe._case("bf16", SHAPE, 2, "uniform")).extras
    assert extras["kernel"] == ("own triton" if fault else "sglang triton")
    assert ("SGLang's fused experts are not used" in extras.get("trouble", "")) == bool(fault)


# --- DeepGEMM -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "name"), [(1.0, deepgemm.NAMES[0]), (1.0, deepgemm.NAMES[2]), (1.3, deepgemm.NAMES[1])]
)
def test_deepgemms_products_are_checked_whatever_they_are_called(
    context: Context, monkeypatch: pytest.MonkeyPatch, factor: float, name: str
) -> None:
    def multiply(left: Any, right: Any, out: Any, counts: Any, expected: int) -> None:
        for e, rows in enumerate(counts.tolist()):
            w = right[0][e].float() * float(right[1][0, 0, 0])
            out[e, :rows] = (left[0][e, :rows].float() @ w.T * factor).to(out.dtype)

    package(monkeypatch, "deep_gemm", **{name: multiply, "get_col_major_tma_aligned_tensor": lambda scales: scales})
    shape = {"hidden": 128, "intermediate": 128, "experts": 3, "top_k": 2}
    monkeypatch.setattr(moe, "CALLS", 2)
    case = moe._case("fp8_deepgemm", shape, 4, "uniform")
    if factor == 1.0:
        assert "deep_gemm" in moe.run(context, case).extras["kernel"]
        return
    with pytest.raises(RuntimeError, match="deep_gemm: wrong result"):
        moe.run(context, case)


def test_a_deepgemm_of_an_unknown_release_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, "deep_gemm")
    w = torch.zeros(1, 128, 128)
    with pytest.raises(RuntimeError, match="this DeepGEMM has none of fp8_m_grouped_gemm_nt_masked, "):
        deepgemm.path(w, w, 1.0, 1.0)


# --- attention and norms --------------------------------------------------------------------------------------------


def fake_flash(fault: str) -> Any:
    """flash_attn_with_kvcache over pages of one token, or what another release would make of the call."""

    def flash(
        *, q: Any, k_cache: Any, v_cache: Any, page_table: Any, softmax_scale: float, qv: Any = None, **rest: Any
    ) -> Any:
        if fault == "signature":
            raise TypeError("got an unexpected keyword argument 'page_table'")
        batch, tokens = page_table.shape
        k, v = k_cache.flatten(0, 1)[page_table.long()], v_cache.flatten(0, 1)[page_table.long()]
        if qv is not None:
            k, q = torch.cat([v, k], -1), torch.cat([qv, q], -1)
        p = {"context": tokens, "queries": rest["max_seqlen_q"], "heads": q.shape[1], "head_dim": softmax_scale**-2}
        out = attention._reference("gqa", p, q.unflatten(0, (batch, -1)), k, v)
        return out.flatten(0, 1).roll(1, 0) if fault == "wrong" else out.flatten(0, 1)

    return flash


@pytest.mark.parametrize("fault", ["", "wrong", "signature"])
def test_attention_of_an_engine_or_our_own(context: Context, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Rolled by a row, as if each query had another's answer. The other kind is tried for itself."""
    package(monkeypatch, "sgl_kernel.flash_attn", flash_attn_with_kvcache=fake_flash(fault))
    monkeypatch.setattr(attention, "_own", lambda context, kind, p, data: attention._plain(kind, p, data))
    shapes = [
        {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 32}, {"kind": "mla", "heads": 4, "latent": 64, "rope": 16}
    ]  # fmt: skip
    for shape in shapes:
        for _ in range(2):
            extras = attention.run(context, attention._case(shape, 3, 40, 4)).extras
            assert extras["kernel"] == ("split-kv" if fault else "flash-attention-3")
            assert ("flash-attention-3 is not used" in extras.get("trouble", "")) == bool(fault)


@pytest.mark.parametrize(("kind", "queries", "once"), [("gqa", 1, True), ("gqa", 4, False), ("mla", 1, False)])
def test_flash_attention_divides_its_cache_as_often_as_sglang_does(
    context: Context, monkeypatch: pytest.MonkeyPatch, kind: str, queries: int, once: bool
) -> None:
    """Once a pass in a plain decode over grouped queries, so not within what is timed; else in every layer's call."""
    shape = {
        "gqa": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 32},
        "mla": {"kind": "mla", "heads": 4, "latent": 64, "rope": 16},
    }[kind]
    asked: list[Any] = []
    flash, given = fake_flash(""), []

    def engine(scheduler_metadata: Any = None, **rest: Any) -> Any:
        given.append(scheduler_metadata)
        return flash(**rest)

    package(
        monkeypatch, "sgl_kernel.flash_attn", flash_attn_with_kvcache=engine,
        get_scheduler_metadata=lambda **sizes: asked.append(sizes) or "schedule",
    )  # fmt: skip
    kernel = attention.run(context, attention._case(shape, 3, 40, queries)).extras["kernel"]
    assert set(given) == {"schedule" if once else None}
    assert kernel == "flash-attention-3" + (", scheduled once a pass" if once else "")
    assert [a["max_seqlen_k"] for a in asked] == [40] * len(asked)
    assert bool(asked) == once


def test_our_own_attention_is_checked_in_its_last_sequence_too(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(context: Context, kind: str, p: Any, data: Any) -> Any:
        out = attention._reference(kind, p, *data)
        out[-1] *= 1.1
        return lambda: out

    monkeypatch.setattr(attention, "_own", late)
    with pytest.raises(RuntimeError, match=r"wrong result: relative error 0\.1 in sequence 2"):
        attention.run(context, attention._case({"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 32}, 3, 40, 1))


def test_caches_that_do_not_fit_are_not_planned(context: Context) -> None:
    """GQA with 8 heads of 128: 4 KiB a token, so 256 x 4K is 4.3 GB, planned where 40 % of the memory is more."""
    planned = {
        (c.params["batch"], c.params["context"]) for c in attention.cases(context) if c.operator == "attention_gqa"
    }
    assert (256, 4096) in planned
    vars(context)["memory_bytes"] = 8e9
    fewer = {
        (c.params["batch"], c.params["context"]) for c in attention.cases(context) if c.operator == "attention_gqa"
    }
    assert planned - fewer == {(256, 4096)}
    quick = OnGpu(0, 1, 0, context.device, True, {})
    large = [c.params for c in attention.cases(quick) if c.params["batch"] > 32]
    assert {(p["batch"], p["queries"]) for p in large} == {(b, q) for b in (128, 256) for q in (1, 4)}


@pytest.mark.parametrize("fault", ["wrong", "signature"])
def test_a_norm_that_is_wrong_falls_back_to_ours(context: Context, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def engine(x: Any, residual: Any, weight: Any, eps: float) -> None:
        if fault == "signature":
            raise TypeError("takes 6 arguments")
        residual += x  # and leaves x as it was

    class Launcher:
        def __getitem__(self, grid: Any) -> Any:
            def launch(x: Any, residual: Any, weight: Any, out: Any, width: int, eps: float, **options: Any) -> None:
                residual += x
                out.copy_(torch.nn.functional.rms_norm(residual, (width,), weight, eps))

            return launch

    package(monkeypatch, "sgl_kernel", fused_add_rmsnorm=engine)
    package(monkeypatch, "triton", next_power_of_2=lambda n: n)
    package(monkeypatch, "specsim.calibration.kernels", add_rms_norm=Launcher())
    monkeypatch.setattr(
        sys.modules["specsim.calibration"], "kernels", sys.modules["specsim.calibration.kernels"], raising=False
    )
    case = next(c for c in small.cases(context) if c.operator == "norm")
    extras = small.run(context, case).extras
    assert extras["kernel"] == "own triton"
    assert "sgl_kernel's fused_add_rmsnorm is not used" in extras["trouble"]


@pytest.mark.parametrize("fault", ["", "wrong", "missing"])
def test_the_elementwise_kernel_is_an_engines_activation_where_it_is_right(
    context: Context, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """It reads 2 width and writes width: the bytes of a multiply of two, which stands in for it."""

    def engine(x: Any, out: Any) -> None:
        gate, up = x.chunk(2, dim=1)
        out.copy_(gate * up if fault == "wrong" else torch.nn.functional.silu(gate) * up)

    package(monkeypatch, "sgl_kernel", **({} if fault == "missing" else {"silu_and_mul": engine}))
    case = next(c for c in small.cases(context) if c.operator == "tiny")
    measured = small.run(context, case)
    assert measured.extras["kernel"] == ("torch" if fault else "sgl_kernel")
    assert ("sgl_kernel's silu_and_mul" in measured.extras.get("trouble", "")) == bool(fault)
    assert case.bytes == case.params["rows"] * case.params["width"] * 2 * 3


def test_many_rows_are_measured_at_the_clocks_that_a_server_keeps(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of 256 rows and more run before they are timed, a pause between two of them as in an engine's cycle; fewer rows
    are bound by memory. A pause is a stream and small kernels of 0.22 of a product each. With the pauses alone, which are timed in
    turn, products are 1 / (1 + 4 x 0.22) = 53 % of the time."""
    warmed: dict[int, float] = {}
    paused: dict[int, float] = {}
    monkeypatch.setattr(gemm, "in_graph", lambda context, calls: warmed.update({rows: 0.0}))
    monkeypatch.setattr(gemm, "pauses", lambda context, seconds: paused.update({rows: seconds}) or [])

    def in_place(context: Context, calls: Any, before: Any, *, warm_s: float) -> Measurement:
        before(9e-6)
        warmed[rows] = warm_s
        return Measurement([1e-5], extras={"alone": {"median": 8e-6}, "pairs": 4})

    monkeypatch.setattr(gemm, "in_place", in_place)
    for rows in (128, 256, 2048):
        measured = gemm.run(context, gemm._case("bf16", rows, 64, 64))
    assert measured.extras == {"burst": {"median": 8e-6}, "pairs": 4}
    assert warmed[128] == 0 < warmed[256] == warmed[2048]
    assert paused == {256: pytest.approx(1.98e-6), 2048: pytest.approx(1.98e-6)}
    planned = {(c.params["rows"], c.params["n"]) for c in gemm.cases(context) if c.params["rows"] > 128}
    order = [c.params["rows"] >= gemm.SUSTAINED_ROWS for c in gemm.cases(context)]
    assert order == sorted(order)  # of both kinds: after a load the first product of one row took 5 to 20 % longer
    assert planned == {(256, n) for n, _ in gemm.SHAPES} | {
        (rows, n) for rows in (512, 1024, 2048) for n in (7168, 20480)
    }


def test_a_pause_takes_the_time_that_was_asked_for(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream reads and writes what memory moves in the time: at 2 bytes a value, a tenth of the time is a tenth of the values,
    down to a least; streams go round beyond twice the cache. Small kernels fill as much time again. How fast both are shows a
    trial, here of a millisecond each."""
    monkeypatch.setattr(between, "Chain", lambda context, calls, *_: SimpleNamespace(once=lambda: 1e-3))
    between.pauses(context, 1e-3)
    chunks = context.copies(2 * between.STREAM_BYTES)
    assert context.cache["pause_rates"] == (2 * between.STREAM_BYTES * chunks / 1e-3, 1e-3 / between.FEW_HUNDRED)
    context.cache["pause_rates"] = 1e9, 2e-3
    ran: list[int] = []
    monkeypatch.setattr(torch, "neg", lambda a, out: ran.append(a.numel()))
    long, short = (between.pauses(context, seconds) for seconds in (0.1, 0.01))
    for pauses, seconds in ((long, 0.1), (short, 0.01)):
        ran.clear()
        pauses[0]()
        assert ran[0] * 2 * 2 == pytest.approx(seconds * 1e9, rel=1e-6)
        assert ran[1:] == [64] * round(seconds / 2e-3)
    assert len(short) * 0.01 * 1e9 > 2 * context.l2_bytes
    ran.clear()
    between.pauses(context, 0.0)[0]()
    assert len(ran) == 1
    assert ran[0] > 0


def test_mxfp4_experts_read_back_as_the_floats_that_they_stand_for() -> None:
    """Of a byte the lower four bits come first: 0x72 is 1 (code 2) and then 6 (code 7), 0x9a is -1 (code 10) and -0.5 (code 9). A
    scale of 126 halves them. With gates and lifts in turn, rows 0 and 2 are gates and come first."""
    packed = torch.zeros(1, 4, mxfp4.GROUP, dtype=torch.uint8)
    packed[0, 1, 0], packed[0, 2, 1] = 0x72, 0x9A
    scales = torch.full((1, 4, 2), 126, dtype=torch.uint8)
    plain = mxfp4.Weights(packed, scales)[0]
    assert plain.shape == (4, 64)
    assert plain[1, :2].tolist() == [0.5, 3.0]
    assert plain[2, 2:4].tolist() == [-0.5, -0.25]
    assert plain.count_nonzero() == 4
    assert torch.equal(mxfp4.Weights(packed, scales, in_turn=True)[0], plain[[0, 2, 1, 3]])
    drawn = mxfp4.random(2, 128, 2880, "cpu", in_turn=True)
    assert float((drawn[1] @ torch.randn(2880)).square().mean().sqrt()) == pytest.approx(0.7, rel=0.5)
    with pytest.raises(ValueError, match="do not divide"):
        mxfp4.random(2, 128, 2848, "cpu")


@pytest.mark.parametrize("kernel_us", [2.0, -0.1])
def test_a_kernel_in_place_is_what_it_adds_to_products(
    context: Context, monkeypatch: pytest.MonkeyPatch, kernel_us: float
) -> None:
    """Products of 5 us and kernels that add 2: pairs of 7 less 5. Noise that makes a difference negative counts as zero and
    is not narrow. Four products and three kernels make four pairs, each list gone round."""
    cost = {"product": 5e-6, "kernel": kernel_us * 1e-6}
    run: list[str] = []

    class Clocked:
        def __init__(self, context: Context, calls: list[Any], *_: Any) -> None:
            self.seconds = sum(cost[call()] for call in calls)

        def times(self, n: int) -> list[float]:
            return [self.seconds * (1 + 1e-4 * (i % 3 - 1)) for i in range(n)]

        def once(self) -> float:
            return self.seconds

    def call(kind: str, name: str) -> Any:
        return lambda: (run.append(name), kind)[1]

    monkeypatch.setattr(between, "Chain", Clocked)
    monkeypatch.setattr(between, "in_graph", lambda *_: Measurement([1.6e-6] * 5))
    before = [call("product", f"p{i}") for i in range(4)]
    found = between.in_place(context, [call("kernel", f"k{i}") for i in range(3)], before)
    assert run[:8] == ["p0", "k0", "p1", "k1", "p2", "k2", "p3", "k0"]
    middle = sorted(found.seconds)[len(found.seconds) // 2]
    assert middle == pytest.approx(max(kernel_us, 0.0) * 1e-6, rel=1e-3)
    assert found.narrow == (kernel_us > 0)
    assert found.extras["alone"]["median"] == 1.6e-6
    assert found.extras["product_s"] == pytest.approx(5e-6, rel=1e-3)


@pytest.mark.parametrize("operator", small.CLASSES)
def test_small_kernels_follow_a_product_of_their_width(
    context: Context, monkeypatch: pytest.MonkeyPatch, operator: str
) -> None:
    """On CPU tensors: the product writes what the kernel reads, and weights of products and kernels take turns."""
    seen: list[Any] = []
    monkeypatch.setattr(small, "in_place", lambda c, calls, before: seen.append((calls, before)) or Measurement([1e-6]))
    plain = Context(0, 1, 0, torch.device("cpu"), False, {})
    case = next(c for c in small.cases(plain) if c.operator == operator)
    small.run(plain, case)
    calls, before = seen[0]
    width = case.params.get("width") or case.params["experts"]
    assert {tuple(p().shape) for p in before} == {(case.params["rows"], width)}
    assert sum(p.args[1].numel() * 2 for p in before) > 2 * plain.l2_bytes
    assert len({p.args[1].data_ptr() for p in before}) == len(before)
    for call in calls:
        call()


@pytest.mark.parametrize(
    ("model", "only", "classes", "said"),
    [
        ("Llama-3.1-8B", (), {"attention_gqa"}, "has no experts and no MLA attention, which is left out"),
        ("Llama-3.1-8B", ("moe", "small"), {"moe_bf16", "router"}, "small, moe on one GPU"),
        ("Kimi-K2.5", (), {"attention_mla", "moe_bf16", "router"}, "has no GQA attention, which is left out"),
    ],
)
def test_only_what_a_model_has_is_timed(
    context: Context, model: str, only: tuple[str, ...], classes: set[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense model has no experts and no router, each has one kind of attention; a measurement asked for by name is made."""
    monkeypatch.setattr(moe, "_sglang_here", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    plan = Plan(Path("unused"), 1, only=only, shapes=shapes([load_model(model)], 1))
    options = next(stage.options for stage in stages(plan) if "small" in stage.measures)
    of_model = replace(context, shapes=plan.shapes, options=options)
    measured = [m for m in (attention, moe, small) if not only or m.NAME in only]
    found = {case.operator for m in measured for case in m.cases(of_model)}
    assert found - {"norm", "tiny"} == classes
    assert calibrate_command._said(plan, model).endswith(said)


@pytest.mark.parametrize("name", calibration.MEASUREMENTS)
def test_every_case_is_of_a_class_that_can_be_left_out(
    context: Context, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with every kind there, so that names are checked before any process starts."""
    monkeypatch.setattr(moe, "_sglang_here", lambda: True)
    monkeypatch.setattr(moe.mxfp4, "here", lambda: True)
    monkeypatch.setattr(moe.deepgemm, "here", lambda: True)
    monkeypatch.setattr(blockwise, "_triton_here", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    module = importlib.import_module(f"specsim.calibration.{name}")
    planned = module.cases(replace(context, world=2, options={"gpus": 2}))
    assert {case.operator for case in planned} <= set(module.CLASSES)
    if name != "allreduce":
        assert {case.operator for case in planned} == set(module.CLASSES)
