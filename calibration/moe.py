"""Routed experts: the fused path from routing to sum, at the target's real shapes.

What: seconds that one call adds after a product in a graph (see between): alignment, gate and up, activation, down,
weighted sum. Through SGLang's fused Triton experts (bf16, fp8 with 128 x 128 scales) and its Marlin path (INT4, group 32)
when sglang is importable; else bf16 and fp8 through Triton kernels of our own (one scale an expert). The sample's `kernel`
says which. DeepGEMM's products alone, where it is importable, are a class of their own (see deepgemm). Outputs are compared
with plain torch at every size before it is timed. Against: bytes, which are distinct experts touched x bytes of one expert
plus the rows', and flops. Units: seconds, bytes, flops.
Routing is uniform at random, or skewed (Zipf 1): every call of the chain has its own draw, so weights come from memory.
Shapes are the caller's: hidden, intermediate (of one rank), experts, top_k.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from specsim.calibration import deepgemm, marlin, mxfp4
from specsim.calibration.between import in_place, products
from specsim.calibration.context import Case, Context, Measurement

NAME = "moe"
WHAT = "fused routed experts at 1 to 2,048 rows, uniform and skewed routing"
AGAINST = "bytes of the distinct experts touched and of the rows; flops"
UNITS = "seconds a call"
RANKS = "one"

# one rank of a large model cut eight ways, and a smaller model on one GPU: (hidden, intermediate, experts, top_k)
SHAPES = (
    {"hidden": 7168, "intermediate": 256, "experts": 384, "top_k": 8},
    {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
)
# what has MXFP4 weights is gpt-oss, 20b whole and 120b cut in four
MXFP4_SHAPES = (
    {"hidden": 2880, "intermediate": 2880, "experts": 32, "top_k": 4},
    {"hidden": 2880, "intermediate": 768, "experts": 128, "top_k": 4},
)
CPU_SHAPES = ({"hidden": 64, "intermediate": 32, "experts": 16, "top_k": 2},)
BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_deepgemm": 1.0, "int4": 0.5 + 2.0 / 32, "mxfp4": 0.5 + 1.0 / mxfp4.GROUP}
CLASSES = tuple(f"moe_{kind}" for kind in BYTES)
# relative error: fp8 rounds activations, Marlin adds slices in bf16
LIMITS = {"bf16": 0.02, "fp8": 0.25, "int4": 0.05, "mxfp4": 0.02}
CALLS = 24  # draws in one chain
ROWS = (1, 2, 3, 4, 8, 16, 32, 48, 64, 128)
QUICK_ROWS = (1, 4, 16, 48, 128)
PEAK_ROWS = (512, 2048)  # a prefill's, which show what experts compute


def cases(context: Context) -> list[Case]:
    typical = SHAPES if context.gpu else CPU_SHAPES
    kinds = ["bf16"]
    if context.gpu:
        import torch

        if torch.cuda.get_device_capability() >= (8, 9):
            kinds.append("fp8")
        if deepgemm.here():
            kinds.append("fp8_deepgemm")
        if _sglang_here():
            kinds.append("int4")
            if mxfp4.here():
                kinds.append("mxfp4")
    few = QUICK_ROWS if context.quick else ROWS
    found = []
    for kind in kinds:
        for shape in context.chosen("experts", NAME, MXFP4_SHAPES if kind == "mxfp4" else typical):
            rows = few if kind == "fp8_deepgemm" else (*few, *PEAK_ROWS)  # masked products are of few rows
            draws = [(r, "uniform") for r in (rows if context.gpu else (1, 4, 16))]
            draws += [(r, "zipf") for r in ((16,) if context.quick else (4, 16, 64))]
            found += [_case(kind, shape, r, routing) for r, routing in draws]
    return found


def _case(kind: str, shape: dict[str, int], rows: int, routing: str) -> Case:
    e = 3.0 * shape["hidden"] * shape["intermediate"]
    distinct = shape["experts"] * (1 - (1 - shape["top_k"] / shape["experts"]) ** rows)  # replaced by the draw's count
    params = {"rows": rows, "routing": routing, **shape}
    return Case(
        NAME,
        f"moe_{kind}",
        params,
        bytes=distinct * e * BYTES[kind] + _row_bytes(params),
        flops=2.0 * rows * shape["top_k"] * e,
        kernels=5 if kind == "bf16" else 6,
        estimate_s=1.0,
        timeout_s=600.0 if kind == "int4" else 300.0,  # engines compile kernels at their first use
    )


def _sglang_here() -> bool:
    return bool(importlib.util.find_spec("sglang") and importlib.util.find_spec("sgl_kernel"))


def _row_bytes(p: dict[str, Any]) -> float:
    return float(p["rows"] * p["top_k"] * (2 * p["hidden"] + 3 * p["intermediate"]) * 2.0)


def run(context: Context, case: Case) -> Measurement:
    import torch

    p, kind = case.params, case.operator.removeprefix("moe_")
    torch.manual_seed(case.seed)
    probabilities = torch.ones(p["experts"])
    if p["routing"] == "zipf":
        probabilities = 1.0 / torch.arange(1, p["experts"] + 1)
    draws = [torch.multinomial(probabilities.expand(p["rows"], -1), p["top_k"]) for _ in range(CALLS)]
    distinct = sum(len(torch.unique(d)) for d in draws) / CALLS
    made = _made(context, kind, p)
    x = torch.randn(p["rows"], p["hidden"], device=context.device, dtype=torch.bfloat16)
    ids = [d.to(device=context.device, dtype=torch.int32) for d in draws]
    calls = [made.path(x, d) for d in ids]
    if made.real is not None:
        _check(made.name, kind, calls[0](), x, ids[0], made.real)
    measured = in_place(context, calls, products(context, p["rows"], p["hidden"]))
    each = 3.0 * p["hidden"] * p["intermediate"] * BYTES[kind]
    extras = {
        **measured.extras,
        "kernel": made.name,
        "distinct": distinct,
        "bytes": distinct * each + _row_bytes(p),
    } | ({"trouble": made.trouble} if made.trouble else {})
    return Measurement(measured.seconds, measured.calls, measured.narrow, extras)


Path = Callable[[Any, Any], Callable[[], Any]]
Real = tuple[Any, Any]  # up[e] and down[e] as the floats that the weights stand for


@dataclass(frozen=True)
class Made:
    """Kernels with weights in place. real: the weights to check outputs with, None where `path` does that itself. trouble:
    what was wrong with kernels that would have been better."""

    path: Path
    name: str
    real: Real | None = None
    trouble: str = ""


def _made(context: Context, kind: str, p: dict[str, Any]) -> Made:
    """The kernels, kept while the kind and shape stay the same. What kept them from being made is told again for every
    size: compiling and filling them again would end the same way."""
    key = (kind, p["hidden"], p["intermediate"], p["experts"], p["top_k"])
    broken: dict[Any, str] = context.cache.setdefault("moe_broken", {})
    if key in broken:
        raise RuntimeError(broken[key])
    if context.cache.get("moe_key") != key:
        context.cache.pop("moe_path", None)
        if context.gpu:
            import torch

            torch.cuda.empty_cache()
        try:
            context.cache["moe_path"] = _choose(context, kind, p)
        except Exception as error:
            broken[key] = f"{type(error).__name__}: {error}"[:300]
            raise RuntimeError(broken[key]) from error
        context.cache["moe_key"] = key
    made: Made = context.cache["moe_path"]
    return made


def _weights(context: Context, experts: int, n: int, k: int, kind: str) -> Any:
    """Random weights, filled expert by expert so that no float copy of them all exists."""
    import torch

    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
    w = torch.empty(experts, n, k, device=context.device, dtype=dtype)
    for e in range(experts):
        w[e] = (torch.randn(n, k, device=context.device) * (1.0 if kind == "fp8" else k**-0.5)).to(dtype)
    return w


def reference(x: Any, ids: Any, route: Any, up: Any, down: Any) -> Any:
    """The same in plain torch and float32. x [rows, hidden], ids and route [rows, top_k], up [e, 2i, h], down [e, h, i]."""
    import torch

    out = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    for row in range(x.shape[0]):
        for choice in range(ids.shape[1]):
            e = int(ids[row, choice])
            gate, lift = (up[e].float() @ x[row].float()).chunk(2)
            out[row] += route[row, choice] * (down[e].float() @ (torch.nn.functional.silu(gate) * lift))
    return out


@dataclass(frozen=True)
class Weights:
    """up [experts, 2 x intermediate, hidden], down [experts, hidden, intermediate]; each times its scale is the real value."""

    up: Any
    down: Any
    scale_up: float
    scale_down: float

    @property
    def real(self) -> Real:
        return _Real(self.up, self.scale_up), _Real(self.down, self.scale_down)


class _Real:
    """Weights as the floats they stand for, one expert at a time."""

    def __init__(self, weights: Any, scale: float) -> None:
        self.weights, self.scale = weights, scale

    def __getitem__(self, e: int) -> Any:
        return self.weights[e].float() * self.scale


def _check(name: str, kind: str, got: Any, x: Any, ids: Any, real: Real) -> None:
    """Compare the first, middle and last row with plain torch, for equal route weights. Raises RuntimeError."""
    import torch

    rows = sorted({0, x.shape[0] // 2, x.shape[0] - 1})
    route = torch.full((len(rows), ids.shape[1]), 1.0 / ids.shape[1], device=x.device)
    want = reference(x[rows], ids[rows], route, *real)
    error = float((got[rows].float() - want).norm() / want.norm())
    if not error < LIMITS[kind]:
        raise RuntimeError(f"{name}: wrong result: relative error {error:.3g} at {x.shape[0]} rows")


def _choose(context: Context, kind: str, p: dict[str, Any]) -> Made:
    """The engine's kernels where they work and are right, else our own."""
    if kind == "int4":
        path, real = _marlin(context, p)
        return Made(path, "sglang marlin", real)
    if kind == "mxfp4":
        w1 = mxfp4.random(p["experts"], 2 * p["intermediate"], p["hidden"], context.device, in_turn=True)
        w2 = mxfp4.random(p["experts"], p["hidden"], p["intermediate"], context.device)
        return Made(mxfp4.path(w1, w2), "sglang triton_kernels", (w1, w2))
    import torch

    hidden, inner = p["hidden"], p["intermediate"]
    scaled = kind.startswith("fp8")
    up = _weights(context, p["experts"], 2 * inner, hidden, "fp8" if scaled else kind)
    down = _weights(context, p["experts"], hidden, inner, "fp8" if scaled else kind)
    weights = Weights(up, down, hidden**-0.5 if scaled else 1.0, inner**-0.5 if scaled else 1.0)
    if kind == "fp8_deepgemm":
        path = deepgemm.path(up, down, weights.scale_up, weights.scale_down)
        return Made(path, "deep_gemm, the products alone")
    if not context.gpu:
        return Made(lambda x, ids: lambda: reference(x, ids, torch.ones(ids.shape) / ids.shape[1], up, down), "torch")
    trouble = ""
    if _sglang_here():
        x = torch.randn(3, hidden, device=context.device, dtype=torch.bfloat16)
        ids = torch.stack([torch.randperm(p["experts"])[: p["top_k"]] for _ in range(3)]).to(
            context.device, torch.int32
        )
        try:
            path = _sglang(context, kind, p, weights)
            _check("sglang triton", kind, path(x, ids)(), x, ids, weights.real)
            return Made(path, "sglang triton", weights.real)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # any failure of a foreign package means: not usable
            trouble = f"SGLang's fused experts are not used: {type(error).__name__}: {error}"[:200]
    return Made(_triton(context, kind, p, weights), "own triton", weights.real, trouble)


def _sglang(context: Context, kind: str, p: dict[str, Any], weights: Weights) -> Path:
    """SGLang's fused experts, called as its Triton runner does, outside a server: one rank, no symmetric memory."""
    import torch
    from sglang.srt.runtime_context import get_context

    module: Any = importlib.import_module("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe")
    if "sglang_arguments" not in context.cache:
        context.cache["sglang_arguments"] = get_context().override_server_args()
        context.cache["sglang_arguments"].install()
        module.get_tp_group = lambda: SimpleNamespace(world_size=1)
        module.is_allocation_symmetric = lambda: False
    options: dict[str, Any] = {"filter_expert": False}
    if kind == "fp8":
        for name, w, scale in (
            ("w1_scale", weights.up, weights.scale_up),
            ("w2_scale", weights.down, weights.scale_down),
        ):
            blocks = (w.shape[0], -(-w.shape[1] // 128), -(-w.shape[2] // 128))
            options[name] = torch.full(blocks, scale, device=context.device, dtype=torch.float32)
        options |= {"use_fp8_w8a8": True, "block_shape": [128, 128]}

    def path(x: Any, ids: Any) -> Callable[[], Any]:
        route = torch.full(ids.shape, 1.0 / p["top_k"], device=context.device, dtype=torch.float32)
        return lambda: module.fused_experts_impl(x, weights.up, weights.down, route, ids, **options)

    return path


def _triton(context: Context, kind: str, p: dict[str, Any], weights: Weights) -> Path:
    import torch
    import triton
    from specsim.calibration import kernels

    hidden, inner, experts, top_k = p["hidden"], p["intermediate"], p["experts"], p["top_k"]
    up, down = weights.up, weights.down
    dtype, device = up.dtype, context.device
    scale_up = torch.full((experts,), weights.scale_up, device=device)
    scale_down = torch.full((experts,), weights.scale_down, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def tile(n: int, k: int, active: int) -> tuple[int, int]:
        """Tiles that divide n and k, narrower when few experts leave processors idle."""
        wide = 64 if active * n >= 64 * 2 * processors else 32 if active * n >= 32 * processors else 16
        block_n = next((b for b in (64, 32, 16) if b <= wide and n % b == 0), 0)
        block_k = next((b for b in (128, 64, 32) if k % b == 0), 0)
        if not block_n or not block_k:
            raise ValueError(f"experts of {n} x {k} do not divide into tiles of 16 x 32")
        return block_n, block_k

    def make_buffers(rows: int) -> tuple[Any, ...]:
        """Shared by all calls, as an engine's allocator would: only ids and weights differ between calls."""
        count = rows * top_k
        slots = torch.zeros(experts, rows, device=device, dtype=torch.int32)
        counts, active, n_active = (torch.zeros(n, device=device, dtype=torch.int32) for n in (experts, experts, 1))
        h = torch.empty(count, 2 * inner, device=device, dtype=torch.bfloat16)
        mid = torch.empty(count, inner, device=device, dtype=dtype)
        y = torch.empty(count, hidden, device=device, dtype=torch.bfloat16)
        given = torch.empty(rows, hidden, device=device, dtype=dtype)
        return slots, counts, active, n_active, h, mid, y, given

    shared: dict[int, tuple[Any, ...]] = {}

    def path(x: Any, ids: Any) -> Callable[[], Any]:
        rows = x.shape[0]
        count = rows * top_k
        active_most = min(experts, count)
        block_m = 16 if rows * top_k < 16 * experts else 32 if rows * top_k < 64 * experts else 64
        if rows not in shared:
            shared.clear()
            shared[rows] = make_buffers(rows)
        slots, counts, active, n_active, h, mid, y, given = shared[rows]
        route = torch.full((count,), 1.0 / top_k, device=device)
        out = torch.empty_like(x)
        block = max(16, triton.next_power_of_2(count))
        (un, uk), (dn, dk) = tile(2 * inner, hidden, active_most), tile(hidden, inner, active_most)
        tiles = triton.cdiv(rows, block_m)
        common = {"SCALED": kind == "fp8", "BLOCK_M": block_m, "num_stages": 4}

        def call() -> Any:
            left = x
            if kind == "fp8":
                given.copy_(x)
                left = given
            kernels.align_experts[(experts,)](ids, slots, counts, active, n_active, count, rows, BLOCK=block)
            kernels.grouped_gemm[(2 * inner // un, active_most, tiles)](
                left, up, h, slots, counts, active, n_active, scale_up, route, 2 * inner, hidden, rows,
                TOP_K=top_k, WEIGHTED=False, BLOCK_N=un, BLOCK_K=uk, **common)  # fmt: skip
            kernels.silu_mul[(count, triton.cdiv(inner, 512))](h, mid, inner, BLOCK=512)
            kernels.grouped_gemm[(hidden // dn, active_most, tiles)](
                mid, down, y, slots, counts, active, n_active, scale_down, route, hidden, inner, rows,
                TOP_K=1, WEIGHTED=True, BLOCK_N=dn, BLOCK_K=dk, **common)  # fmt: skip
            kernels.sum_experts[(rows, triton.cdiv(hidden, 1024))](y, out, n_active, hidden, TOP_K=top_k, BLOCK=1024)
            return out

        return call

    return path


def _marlin(context: Context, p: dict[str, Any]) -> tuple[Path, Real]:
    """SGLang's fused Marlin experts (INT4, symmetric, group 32, bf16 scales) on random weights in its layout."""
    import torch
    from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe

    hidden, inner, experts, top_k, device = p["hidden"], p["intermediate"], p["experts"], p["top_k"], context.device
    up = marlin.random(experts, 2 * inner, hidden, device)
    down = marlin.random(experts, hidden, inner, device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    workspace = torch.zeros(processors * 4, device=device, dtype=torch.int32)

    def path(x: Any, ids: Any) -> Callable[[], Any]:
        logits = torch.zeros(x.shape[0], experts, device=device, dtype=torch.float32)
        route = torch.full((x.shape[0], top_k), 1.0 / top_k, device=device, dtype=torch.float32)
        return lambda: fused_marlin_moe(
            x, up.packed, down.packed, up.scales, down.scales, logits, route, ids,
            workspace=workspace, num_bits=4, is_k_full=True,
        )  # fmt: skip

    return path, (up, down)
