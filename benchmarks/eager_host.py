"""What slows the host's code of a pass: layers alone, with Triton kernels between them, with a compiled function between.

    python benchmarks/eager_host.py            (needs a GPU and Triton; half a minute)

A layer is a product and an addition, launched from a torch module as engines do; nothing waits for the GPU. Printed: the
microseconds that a layer takes on the host, without what runs between. On an H200 host (torch 2.11, Python 3.12): 22 alone,
27 with a Triton kernel (of 14) between, 28 with a compiled function (of 42) between; with SGLang's fused norm in the place of
the addition 23, 24 and 40 on another. The same layer takes longer beside other code, which is why the engine's term
`eager_experts` is there; how much an engine's own, larger code takes is read from profiles of its runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

LAYERS, ROUNDS, WIDTH = 200, 7, 1024


def main() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no GPU: the launches of a CPU are not those of a GPU's driver")
    import triton
    import triton.language as tl

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(
                torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) * WIDTH**-0.5
            )

        def forward(self, x: Any, residual: Any) -> Any:
            return torch.nn.functional.linear(x, self.weight) + residual

    @triton.jit  # type: ignore[untyped-decorator]
    def copy(a, b, size: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads annotations
        i = tl.arange(0, size)
        tl.store(b + i, tl.load(a + i))

    layers = [Layer() for _ in range(LAYERS)]
    x = torch.randn(1, WIDTH, device="cuda", dtype=torch.bfloat16)
    a, b = torch.zeros(2, 64, device="cuda")
    compiled = torch.compile(lambda p, q: (p * q).sum(-1), dynamic=True)

    def rounds(between: Callable[[], Any] | None) -> tuple[float, float]:
        """Median seconds of a layer and of what is between two."""
        own, other = [], []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            y, extra, start = x, 0.0, time.perf_counter()
            for layer in layers:
                y = layer(y, x)
                if between:
                    before = time.perf_counter()
                    between()
                    extra += time.perf_counter() - before
            own.append((time.perf_counter() - start - extra) / LAYERS)
            other.append(extra / LAYERS)
        return statistics.median(own), statistics.median(other)

    with torch.inference_mode():
        for name, between in (
            ("alone", None),
            ("a Triton kernel between", lambda: copy[(1,)](a, b, size=64)),
            ("alone", None),
            ("a compiled function between", lambda: compiled(x, x)),
            ("alone", None),
        ):
            layer, extra = rounds(between)
            print(f"{name:28} {layer * 1e6:6.1f} us a layer, {extra * 1e6:6.1f} us between", flush=True)


if __name__ == "__main__":
    main()
