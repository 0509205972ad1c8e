"""Products of fp8 weights that are scaled in blocks of 128 x 128, by the engine's own kernels: what most fp8 checkpoints run.

What: seconds of one product of quantised inputs in a CUDA graph, through SGLang's Triton kernel (`gemm_fp8_triton`) and
DeepGEMM (`gemm_fp8_deepgemm`), where those packages are importable; quantising the inputs is a small kernel of its own.
Against: the bytes of weights, inputs and outputs, and the flops. Units: seconds, bytes, flops. Weights rotate through more
than twice the L2. Outputs are checked against float32 before they are timed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from specsim.calibration import deepgemm
from specsim.calibration.context import Case, Context, Measurement
from specsim.calibration.timing import in_graph

NAME = "blockwise"
WHAT = "fp8 projections scaled in blocks, by the engine's kernels, in a graph with cold weights"
AGAINST = "weight, input and output bytes; flops"
UNITS = "seconds a call"
NEEDS = "a GPU of compute capability 8.9 or later and SGLang, or a Hopper and DeepGEMM"
RANKS = "one"
CLASSES = ("gemm_fp8_triton", "gemm_fp8_deepgemm")
BLOCK = 128
SHAPES = ((1536, 4096), (4096, 4096), (2048, 4096), (5120, 2048), (2048, 7168), (7168, 2048), (14336, 8192))
ROWS = (1, 4, 16, 64, 128, 256)
QUICK_ROWS = (1, 16, 128)


def cases(context: Context) -> list[Case]:
    if not context.gpu:
        return []
    shapes = [tuple(s) for s in context.chosen("gemm", NAME, SHAPES)]
    kinds = [name for name, here in (("triton", _triton_here()), ("deepgemm", deepgemm.here())) if here]
    whole = [(n, k) for n, k in dict.fromkeys(shapes) if n % BLOCK == 0 and k % BLOCK == 0]
    rows = QUICK_ROWS if context.quick else ROWS
    return [_case(kind, r, n, k) for kind in kinds for n, k in whole for r in rows]


def _case(kind: str, rows: int, n: int, k: int) -> Case:
    nbytes = n * k * (1 + 4 / BLOCK**2) + rows * (k * (1 + 4 / BLOCK) + 2 * n)
    return Case(
        NAME, f"gemm_fp8_{kind}", {"rows": rows, "n": n, "k": k}, bytes=nbytes, flops=2.0 * rows * n * k,
        estimate_s=0.3, timeout_s=300.0,
    )  # fmt: skip


def _triton_here() -> bool:
    import torch

    return torch.cuda.get_device_capability() >= (8, 9) and importlib.util.find_spec("sglang") is not None


def run(context: Context, case: Case) -> Measurement:
    import torch

    rows, n, k = (case.params[name] for name in ("rows", "n", "k"))
    torch.manual_seed(case.seed)
    first = torch.randn(n, k, device=context.device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    weights = [first] + [first.clone() for _ in range(context.copies(n * k) - 1)]
    scales = torch.rand(n // BLOCK, k // BLOCK, device=context.device) * 0.1 + 0.05
    x = torch.randn(rows, k, device=context.device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    of_x = torch.rand(rows, k // BLOCK, device=context.device) + 0.5
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    reference = (x.float() * of_x.repeat_interleave(BLOCK, 1)) @ (first.float() * wide).T
    make = _triton if case.operator == "gemm_fp8_triton" else _deepgemm
    multiply = make(x, of_x, scales, n)
    error = float((multiply(first).float() - reference).norm() / reference.norm())
    if not error < 0.02:
        raise RuntimeError(f"wrong result: relative error {error:.3g}")
    return in_graph(context, [partial(multiply, w) for w in weights])


def _triton(x: Any, of_x: Any, scales: Any, n: int) -> Callable[[Any], Any]:
    import torch

    multiply = None
    for name in ("sglang.kernels.ops.quantization.fp8_kernel", "sglang.srt.layers.quantization.fp8_kernel"):
        with contextlib.suppress(ImportError):
            multiply = multiply or getattr(importlib.import_module(name), "w8a8_block_fp8_matmul_triton", None)
    if multiply is None:
        raise RuntimeError("this SGLang has no w8a8_block_fp8_matmul_triton")
    return lambda w: multiply(x, w, of_x, scales, [BLOCK, BLOCK], output_dtype=torch.bfloat16)


def _deepgemm(x: Any, of_x: Any, scales: Any, n: int) -> Callable[[Any], Any]:
    import torch

    multiply = deepgemm.first([("deep_gemm", "fp8_gemm_nt"), ("deep_gemm", "gemm_fp8_fp8_bf16_nt")])
    aligned = deepgemm.first(deepgemm.LAYOUTS)(of_x)
    out = torch.empty(x.shape[0], n, device=x.device, dtype=torch.bfloat16)

    def call(w: Any) -> Any:
        multiply((x, aligned), (w, scales), out)
        return out

    return call
