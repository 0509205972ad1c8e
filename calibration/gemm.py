"""Dense projections: rows x k times k x n, as torch and cuBLAS(Lt) run them.

What: seconds of one call of torch.nn.functional.linear (bf16) or torch._scaled_mm (fp8 e4m3, one scale a tensor) in a
CUDA graph. Against: the bytes of weights, inputs and outputs, and the flops. Units: seconds, bytes, flops.
Weights rotate through more than twice the L2. Outputs are checked against float32 before they are timed. Products of many
rows are timed under a server's load: arithmetic draws the most power, so that a short burst shows clocks that no server keeps,
and products without pause show clocks that no server falls to. Between two of them lies a pause as in a server's cycle, a
stream through memory as attention's and small kernels, and all have run for 0.3 s before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from specsim.calibration.between import in_place, pauses
from specsim.calibration.context import Case, Context, Measurement
from specsim.calibration.timing import SUSTAINED_S, in_graph

NAME = "gemm"
WHAT = "dense projections, bf16 and fp8, in a graph with cold weights"
AGAINST = "weight, input and output bytes; flops"
UNITS = "seconds a call"
RANKS = "one"
CLASSES = ("gemm_bf16", "gemm_fp8")

# outputs x inputs; 4 to 600 MB in bf16. Few inputs as well as many: a product's start grows with the width that it sums over
SHAPES = (
    (4096, 512),
    (512, 5120),
    (2048, 2048),
    (1536, 4096),
    (7168, 2048),
    (4096, 4096),
    (7168, 4096),
    (6144, 8192),
    (14336, 8192),
    (20480, 7168),
    (40960, 7168),
)
ROWS = (1, 4, 16, 32, 64, 128, 256)  # of every shape: cuBLAS takes 10 to 16 % longer for some at 64 rows than at one
QUICK_ROWS = (1, 16, 32, 64, 128)  # of one shape; the others at 4 rows
QUICK_SHAPE = (7168, 4096)
PEAK_SHAPES = ((7168, 4096), (20480, 7168))  # for the compute limit, and the bend below it
PEAK_ROWS = (512, 1024, 2048)
QUICK_PEAK_ROWS = (512, 2048)
SUSTAINED_ROWS = 256  # from here on arithmetic may be the limit
# A pause in units of a product's time: a stream through memory, and as long of small kernels. With what is timed to subtract it,
# products run for 53 % of the time, streams and small kernels for 23 % each: as much as products, attention and the rest have of
# a cycle of 64 requests and 4 draft tokens of an 8B model (6.1, 2.7 and 2.6 of 11.5 ms, validation/llama8b-e3-s3-rows.kernels.json).
PAUSE = 0.22
CPU_SHAPES = ((64, 128), (128, 256), (256, 256), (256, 512), (512, 512), (512, 1024))


def cases(context: Context) -> list[Case]:
    shapes = [tuple(s) for s in context.shapes.get("gemm", ())] + list(SHAPES if context.gpu else CPU_SHAPES)
    shapes = list(dict.fromkeys(shapes))
    few = context.quick or not context.gpu
    points = [(rows, n, k) for n, k in shapes for rows in ((4,) if few else ROWS)]
    if not context.gpu:
        points += [(16, *CPU_SHAPES[-1])]
    else:
        points += [(rows, *QUICK_SHAPE) for rows in QUICK_ROWS if context.quick]
        points += [(rows, n, k) for n, k in PEAK_SHAPES for rows in (QUICK_PEAK_ROWS if context.quick else PEAK_ROWS)]
    kinds = ["bf16"]
    if context.gpu and _has_fp8():
        kinds.append("fp8")
    found = [_case(kind, *p) for kind in kinds for p in points if kind == "bf16" or (p[1] % 16 == 0 and p[2] % 16 == 0)]
    return sorted(
        found, key=lambda c: bool(c.params["rows"] >= SUSTAINED_ROWS)
    )  # a load lowers the clocks of what follows


def _case(kind: str, rows: int, n: int, k: int) -> Case:
    width = 2 if kind == "bf16" else 1
    nbytes = width * n * k + rows * (width * k + 2 * n)
    estimate = 0.1 + SUSTAINED_S * (rows >= SUSTAINED_ROWS)
    return Case(
        NAME, f"gemm_{kind}", {"rows": rows, "n": n, "k": k}, bytes=nbytes, flops=2.0 * rows * n * k, estimate_s=estimate
    )  # fmt: skip


def _has_fp8() -> bool:
    import torch

    return bool(torch.cuda.get_device_capability() >= (8, 9) and hasattr(torch, "_scaled_mm"))


def run(context: Context, case: Case) -> Measurement:
    import torch

    rows, n, k = (case.params[name] for name in ("rows", "n", "k"))
    torch.manual_seed(case.seed)
    fp8 = case.operator == "gemm_fp8"
    copies = context.copies(n * k * (1 if fp8 else 2))
    x = torch.randn(rows, k, device=context.device, dtype=torch.bfloat16)
    weights = [
        torch.randn(n, k, device=context.device, dtype=torch.bfloat16) * k**-0.5
        for _ in range(copies if not fp8 else 1)
    ]
    reference = x.float() @ weights[0].float().T
    if fp8:
        one = torch.ones((), device=context.device)
        scale = torch.full((), k**-0.5 / 16, device=context.device)
        weights = [(weights[0] * 16 * k**0.5).to(torch.float8_e4m3fn)]
        weights += [weights[0].clone() for _ in range(copies - 1)]
        padded = torch.zeros(max(16, -(-rows // 16) * 16), k, device=context.device, dtype=torch.bfloat16)
        padded[:rows] = x
        x8 = padded.to(torch.float8_e4m3fn)

        def multiply(w: Any) -> Any:
            return torch._scaled_mm(
                x8, w.t(), scale_a=one, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
            )

    else:

        def multiply(w: Any) -> Any:
            return torch.nn.functional.linear(x, w)

    error = (multiply(weights[0])[:rows].float() - reference).norm() / reference.norm()
    if not float(error) < (0.1 if fp8 else 0.02):
        raise RuntimeError(f"wrong result: relative error {float(error):.3g}")
    calls = [partial(multiply, w) for w in weights]
    if rows < SUSTAINED_ROWS:
        return in_graph(context, calls)
    measured = in_place(context, calls, lambda alone_s: pauses(context, alone_s * PAUSE), warm_s=SUSTAINED_S)
    # Not "alone", which would leave out the products of fewer rows: those are back to back, and one class is of both.
    extras = {("burst" if name == "alone" else name): value for name, value in measured.extras.items()}
    return replace(measured, extras=extras)
