"""Small kernels: a fused add and RMSNorm, an elementwise kernel, and the router's top-k.

What: seconds that one kernel adds after a product in a CUDA graph, its weights and residual cold, its input just written
(see between); `alone` is a chain of the same kernels. At these sizes nearly all of it is fixed time.
Against: bytes read and written. Units: seconds, bytes. `router` picks top-k of the experts' logits of each row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any

from specsim.calibration.between import in_place, products
from specsim.calibration.context import Call, Case, Context, Measurement

NAME = "small"
WHAT = "RMSNorm with residual add, elementwise, and router top-k kernels, after a product in a graph"
AGAINST = "bytes read and written"
UNITS = "seconds a kernel"
RANKS = "one"
CLASSES = ("norm", "tiny", "router")

TYPICAL_EXPERTS = ({"experts": 384, "top_k": 8},)  # to choose from
CPU_EXPERTS = ({"experts": 16, "top_k": 2},)

Made = tuple[
    Sequence[Call], Any, dict[str, str]
]  # calls, each with weights of its own; their input; what the sample says
ROTATED = 32  # sets of weights and residual: until one comes round again, products of twice the L2 have run


def cases(context: Context) -> list[Case]:
    widths = context.shapes.get("hidden") or ((2048, 4096, 7168) if context.gpu else (256,))
    rows: tuple[int, ...] = (1, 16, 128) if context.gpu else (1, 16)
    if context.gpu and not context.quick:
        rows = (1, 4, 16, 64, 128, 1024)
    found = []
    for width in dict.fromkeys(widths):
        for r in rows:
            found.append(Case(NAME, "norm", {"rows": r, "width": width}, bytes=r * width * 2.0 * 3, timeout_s=120.0))
            found.append(Case(NAME, "tiny", {"rows": r, "width": width}, bytes=r * width * 2.0 * 3))
    for experts, top_k in _routers(context):
        for r in rows:
            nbytes = r * (experts * 4.0 + top_k * 8.0)
            found.append(Case(NAME, "router", {"rows": r, "experts": experts, "top_k": top_k}, bytes=nbytes))
    return found


def _routers(context: Context) -> list[tuple[int, int]]:
    experts = context.chosen("experts", "moe", TYPICAL_EXPERTS if context.gpu else CPU_EXPERTS)
    return list(dict.fromkeys((e["experts"], e["top_k"]) for e in experts))


def run(context: Context, case: Case) -> Measurement:
    import torch

    torch.manual_seed(case.seed)
    rows = case.params["rows"]
    maker: Any = {"norm": _norm, "tiny": _tiny, "router": _router}[case.operator]
    calls, fresh, extras = maker(torch, context, rows, **{k: v for k, v in case.params.items() if k != "rows"})
    outputs = fresh.shape[1] if fresh is not None else case.params["experts"]
    measured = in_place(context, calls, products(context, rows, outputs, fresh))
    return Measurement(measured.seconds, measured.calls, measured.narrow, {**measured.extras, **extras})


def _norm(torch: Any, context: Context, rows: int, width: int) -> Made:
    x = torch.randn(rows, width, device=context.device, dtype=torch.bfloat16) * 0.01
    out = torch.empty_like(x)
    residuals = [torch.randn_like(x) for _ in range(ROTATED)]
    weights = [torch.ones(width, device=context.device, dtype=torch.bfloat16) for _ in range(ROTATED)]
    if not context.gpu:

        def plain(residual: Any, weight: Any) -> None:
            residual.add_(x)
            out.copy_(torch.nn.functional.rms_norm(residual, (width,), weight))

        return [partial(plain, *own) for own in zip(residuals, weights, strict=True)], x, {"kernel": "torch"}
    import triton
    from specsim.calibration.kernels import add_rms_norm

    block = triton.next_power_of_2(width)
    residual, weight = residuals[0], weights[0]
    total = (residual + x).float()
    want = torch.nn.functional.rms_norm(total, (width,), weight.float(), 1e-6)

    def launch(residual: Any, weight: Any) -> None:
        add_rms_norm[(rows,)](x, residual, weight, out, width, 1e-6, BLOCK=block, num_warps=8)

    engine, trouble = _engine(context, "fused_add_rmsnorm")
    if engine is not None:
        mine, other = x.clone(), residual.clone()
        try:
            engine(mine, other, weight, 1e-6)
            _check(mine, want)
            _check(other, total)
            calls = [partial(engine, mine, r, w, 1e-6) for r, w in zip(residuals, weights, strict=True)]
            return calls, mine, {"kernel": "sgl_kernel"}
        except Exception as error:  # any failure of a foreign package means: not usable
            trouble = _unused(context, "fused_add_rmsnorm", error)
    launch(residual, weight)
    _check(out, want)
    calls = [partial(launch, r, w) for r, w in zip(residuals, weights, strict=True)]
    return calls, x, {"kernel": "own triton"} | ({"trouble": trouble} if trouble else {})


def _engine(context: Context, name: str) -> tuple[Any, str]:
    """A kernel of sgl_kernel; None where it is not there, and what is wrong with it, if anything."""
    key = f"engine-{name}"
    if key not in context.cache:
        context.cache[key] = None, ""
        if importlib.util.find_spec("sgl_kernel") is not None:
            try:
                import sgl_kernel

                context.cache[key] = getattr(sgl_kernel, name), ""
            except Exception as error:  # any failure of a foreign package means: not usable
                why = f"sgl_kernel's {name} cannot be imported: {type(error).__name__}: {error}"[:200]
                context.cache[key] = None, why
    found: tuple[Any, str] = context.cache[key]
    return found


def _unused(context: Context, name: str, error: Exception) -> str:
    """Leave sgl_kernel's kernel of that name alone from now on, and say why."""
    why = f"sgl_kernel's {name} is not used: {type(error).__name__}: {error}"[:200]
    context.cache[f"engine-{name}"] = None, why
    return why


def _tiny(torch: Any, context: Context, rows: int, width: int) -> Made:
    """The activation of a gated MLP, [rows, 2 width] to [rows, width]: a layer's most common small kernel. Without
    sgl_kernel a multiply, which moves as many bytes."""
    engine, trouble = _engine(context, "silu_and_mul") if context.gpu else (None, "")
    out = torch.empty(rows, width, device=context.device, dtype=torch.bfloat16)
    if engine is not None:
        x = torch.randn(rows, 2 * width, device=context.device, dtype=torch.bfloat16)
        try:
            engine(x, out)
            gate, up = x.float().chunk(2, dim=1)
            _check(out, torch.nn.functional.silu(gate) * up)
            return [partial(engine, x, out)] * ROTATED, x, {"kernel": "sgl_kernel"}
        except Exception as error:  # any failure of a foreign package means: not usable
            trouble = _unused(context, "silu_and_mul", error)
    a = torch.randn(rows, width, device=context.device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    extras = {"kernel": "torch"} | ({"trouble": trouble} if trouble else {})
    return [lambda: torch.mul(a, b, out=out)] * ROTATED, a, extras


def _router(torch: Any, context: Context, rows: int, experts: int, top_k: int) -> Made:
    logits = torch.randn(rows, experts, device=context.device)
    if not context.gpu:
        return [lambda: torch.topk(logits, top_k)] * ROTATED, None, {"kernel": "torch"}
    import triton
    from specsim.calibration.kernels import route

    ids = torch.empty(rows, top_k, device=context.device, dtype=torch.int32)
    weights = torch.empty(rows, top_k, device=context.device)
    block = triton.next_power_of_2(experts)

    def launch() -> None:
        route[(rows,)](logits, ids, weights, experts, TOP_K=top_k, BLOCK=block, num_warps=1 if block <= 512 else 4)

    launch()
    if not bool((ids.long() == torch.topk(logits, top_k).indices).all()):
        raise RuntimeError("wrong result: the router picked other experts than torch.topk")
    return [launch] * ROTATED, None, {"kernel": "own triton"}


def _check(got: Any, want: Any, limit: float = 0.02) -> None:
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < limit:
        raise RuntimeError(f"wrong result: relative error {error:.3g}")
