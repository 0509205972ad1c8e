"""MXFP4 experts as SGLang runs gpt-oss on a Hopper: OpenAI's `triton_kernels`, bf16 rows, weights of 4 bits.

Weights are random: 4-bit floats (1 sign, 2 exponent, 1 mantissa), 32 of an inner width sharing a power of two. `up` has gate and
lift in turn (row 0 a gate's, row 1 its lift's), which is how the fused activation reads them. That activation is
gate x sigmoid(gate) x (lift + 1); a bias of -1 on every lift makes it the gate x sigmoid(gate) x lift of the other classes, so that
one reference checks them all. The two products alone are in a call: the choice of experts and its bookkeeping are made before.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GROUP = 32  # inputs that share a scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three bits below the sign
BIAS = 127  # of a scale's exponent
WARPS = 8  # that SGLang lays the weights out for (`process_weights_after_loading`, layers/quantization/mxfp4.py)
UNLIMITED = 1e4


def here() -> bool:
    """Whether SGLang would run these kernels on this GPU, and they are there."""
    import torch

    return bool(importlib.util.find_spec("triton_kernels") and torch.cuda.get_device_capability()[0] == 9)


@dataclass(frozen=True)
class Weights:
    """packed uint8 [experts, outputs, inputs / 2], the lower four bits first; scales uint8 [experts, outputs, inputs / GROUP].
    in_turn: gates and lifts alternate, and an expert reads back with all gates first."""

    packed: Any
    scales: Any
    in_turn: bool = False

    def __getitem__(self, expert: int) -> Any:
        """Float32 [outputs, inputs] of one expert."""
        import torch

        packed = self.packed[expert].int()
        bits = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
        table = torch.tensor([*VALUES, *(-v for v in VALUES)], device=packed.device)
        plain = table[bits] * torch.exp2(self.scales[expert].float() - BIAS).repeat_interleave(GROUP, dim=1)
        return torch.cat([plain[0::2], plain[1::2]]) if self.in_turn else plain


def random(experts: int, outputs: int, inputs: int, device: Any, *, in_turn: bool = False) -> Weights:
    """Weights of any value, each output about as large as an input. Raises ValueError for sizes that do not divide."""
    import math

    import torch

    if inputs % (2 * GROUP) or outputs % (2 * GROUP):
        raise ValueError(f"experts of {outputs} x {inputs} do not divide into blocks of {2 * GROUP}")
    packed = torch.randint(0, 256, (experts, outputs, inputs // 2), device=device, dtype=torch.uint8)
    size = (sum(v * v for v in VALUES) / len(VALUES)) ** 0.5
    exponent = BIAS + round(math.log2(1 / (size * inputs**0.5)))
    scales = torch.randint(exponent - 1, exponent + 1, (experts, outputs, inputs // GROUP), device=device)
    return Weights(packed, scales.to(torch.uint8), in_turn)


def path(up: Weights, down: Weights) -> Callable[[Any, Any], Callable[[], Any]]:
    """Calls of SGLang's fused experts with equal route weights. x [rows, hidden] bf16, ids [rows, top_k]."""
    import torch
    from sglang.srt.layers.moe.fused_moe_triton.triton_kernels_moe import triton_kernel_fused_experts_with_bias
    from sglang.srt.layers.moe.topk import routing
    from sglang.srt.layers.quantization.mxfp4 import _swizzle_mxfp4
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig

    laid = []
    for w in (up, down):
        values, flex, scale = _swizzle_mxfp4(w.packed, w.scales, WARPS)
        laid.append((values, PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=flex))))
    (w1, config1), (w2, config2) = laid
    experts, device = up.packed.shape[0], up.packed.device
    b1 = torch.zeros(experts, up.packed.shape[1], device=device)
    b1[:, 1::2] = -1.0
    b2 = torch.zeros(experts, down.packed.shape[1], device=device)

    def make(x: Any, ids: Any) -> Callable[[], Any]:
        logits = torch.full((x.shape[0], experts), -9.0, device=device, dtype=torch.bfloat16)
        routed, gather, scatter = routing(logits.scatter_(1, ids.long(), 1.0), ids.shape[1])
        return lambda: triton_kernel_fused_experts_with_bias(
            x, w1, config1, b1, w2, config2, b2, routed, gather, scatter, gemm1_alpha=1.0, gemm1_clamp_limit=UNLIMITED
        )

    return make
