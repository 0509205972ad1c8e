"""DeepGEMM's grouped fp8 products, for `moe` to time where the package is importable: gate and up, and down, alone.

Alignment, activation and sum are not in it, so it is a class of its own (`moe_fp8_deepgemm`), beside the whole path. In the
masked layout each expert has a block of rows of which it computes as many as were routed to it. Hopper only: later GPUs
take scales in another form.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

BLOCK = 128  # values that share a scale
# by release
NAMES = ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked", "m_grouped_gemm_fp8_fp8_bf16_nt_masked")
LAYOUTS = (
    ("deep_gemm.utils.layout", "get_mn_major_tma_aligned_tensor"),
    ("deep_gemm", "get_mn_major_tma_aligned_tensor"),
    ("deep_gemm", "get_col_major_tma_aligned_tensor"),
)
CHECKED = 4  # experts
TILE = 256  # a multiple of every kernel's tile: tiles are written whole, so that an expert's last one must end in its own block

Path = Callable[[Any, Any], Callable[[], Any]]


def first(names: Sequence[tuple[str, str]]) -> Any:
    """The first function of (module, name) that this release has."""
    for module, name in names:
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(module), name, None)
            if found is not None:
                return found
    raise RuntimeError(f"this DeepGEMM has none of {', '.join(sorted({name for _, name in names}))}")


def here() -> bool:
    """Whether it is installed and this GPU is a Hopper."""
    if importlib.util.find_spec("deep_gemm") is None:
        return False
    import torch

    return bool(torch.cuda.get_device_capability()[0] == 9)


def path(up: Any, down: Any, scale_up: float, scale_down: float) -> Path:
    """Calls over fp8 weights up [experts, 2 x intermediate, hidden] and down [experts, hidden, intermediate].

    Raises ValueError for widths that are not whole blocks, RuntimeError when a product is wrong or this release has none
    of the functions known here.
    """
    import torch

    multiply = first([("deep_gemm", name) for name in NAMES])
    aligned = first(LAYOUTS)
    experts, _, hidden = up.shape
    inner = down.shape[2]
    if hidden % BLOCK or inner % BLOCK:
        raise ValueError(f"DeepGEMM needs widths of whole blocks of {BLOCK}, not {hidden} and {inner}")

    def scaled(weights: Any, scale: float) -> tuple[Any, Any]:
        blocks = (experts, -(-weights.shape[1] // BLOCK), weights.shape[2] // BLOCK)
        return weights, torch.full(blocks, scale, device=weights.device, dtype=torch.float32)

    def rows_of(most: int, width: int) -> tuple[Any, Any]:
        values = torch.randn(experts, most, width, device=up.device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        scales = torch.ones(experts, most, width // BLOCK, device=up.device, dtype=torch.float32)
        return values, aligned(scales)

    weights = (scaled(up, scale_up), scaled(down, scale_down))
    shared: dict[int, Any] = {}

    def buffers(most: int) -> Any:
        if most not in shared:
            shared.clear()
            made = [rows_of(most, width) for width in (hidden, inner)]
            out = [torch.empty(experts, most, w.shape[1], device=up.device, dtype=torch.bfloat16) for w in (up, down)]
            shared[most] = (made, out)
        return shared[most]

    def check(counts: Any, activations: Any, out: Any) -> None:
        for expert in torch.nonzero(counts).flatten()[:CHECKED].tolist():
            rows = int(counts[expert])
            for (values, _), (w, scale), got in zip(activations, weights, out, strict=True):
                want = values[expert, :rows].float() @ (w[expert].float() * float(scale[0, 0, 0])).T
                error = float((got[expert, :rows].float() - want).norm() / want.norm())
                if not error < 0.1:
                    raise RuntimeError(
                        f"deep_gemm: wrong result: relative error {error:.3g} at {rows} rows of an expert"
                    )

    def make(x: Any, ids: Any) -> Callable[[], Any]:
        rows, top_k = x.shape[0], ids.shape[1]
        activations, out = buffers(-(-rows // TILE) * TILE)
        counts = torch.bincount(ids.flatten().long(), minlength=experts).to(torch.int32)
        expected = max(1, round(rows * top_k / experts))

        def call() -> Any:
            for rows_in, w, target in zip(activations, weights, out, strict=True):
                multiply(rows_in, w, target, counts, expected)
            return out[1]

        if rows not in checked:
            checked.add(rows)
            call()
            torch.cuda.synchronize()
            check(counts, activations, out)
        return call

    checked: set[int] = set()
    return make
