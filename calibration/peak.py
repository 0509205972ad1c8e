"""The GPU's own limits: memory bandwidth by a large copy, bf16 arithmetic by a large matrix product, on every rank.

What: seconds of one call on each GPU at once, so that a slow one shows; the product after running for 0.3 s, at the clocks
that the power limit leaves. Against: bytes read plus bytes written, and
flops. Units: seconds, bytes, flops.
"""

from __future__ import annotations

from specsim.calibration.context import Case, Context, Measurement
from specsim.calibration.timing import SUSTAINED_S, in_graph

NAME = "peak"
WHAT = "memory bandwidth and bf16 arithmetic of every GPU"
AGAINST = "bytes read plus written; flops"
UNITS = "seconds a call"
RANKS = "all"
CLASSES = ("copy", "matmul")


def cases(context: Context) -> list[Case]:
    megabytes = 2048 if context.gpu else 8
    n = 8192 if context.gpu else 256
    return [
        Case(NAME, "copy", {"mb": megabytes}, bytes=2e6 * megabytes, ranks=context.world),
        Case(NAME, "matmul", {"n": n}, bytes=6.0 * n * n, flops=2.0 * n**3, ranks=context.world),
    ]


def run(context: Context, case: Case) -> Measurement:
    import torch

    torch.manual_seed(case.seed)
    if case.operator == "copy":
        values = case.params["mb"] * 500_000
        source = torch.randn(values, device=context.device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        return in_graph(context, [lambda: target.copy_(source)] * 4)
    n = case.params["n"]
    a = torch.randn(n, n, device=context.device, dtype=torch.bfloat16)
    b = torch.randn(n, n, device=context.device, dtype=torch.bfloat16)
    out = torch.empty(n, n, device=context.device, dtype=torch.bfloat16)
    return in_graph(context, [lambda: torch.matmul(a, b, out=out)] * 4, warm_s=SUSTAINED_S)
