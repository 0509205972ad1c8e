"""Copies between host and GPU and from GPU to GPU.

What: seconds of one copy, pinned host memory, by events on the stream. Against: bytes. Units: seconds, bytes.
A copy between GPUs is checked value by value before it is timed: some boxes return wrong data over P2P.
"""

from __future__ import annotations

from typing import Any

from specsim.calibration.context import Case, Context, Measurement
from specsim.calibration.timing import eager

NAME = "copies"
WHAT = "copies from host to GPU, back, and to the other GPUs"
AGAINST = "bytes copied"
UNITS = "seconds a copy"
RANKS = "one"
CLASSES = ("h2d", "d2h", "p2p")


def cases(context: Context) -> list[Case]:
    sizes = (65536, 2**20, 64 * 2**20) if context.gpu else (65536,)
    found = [Case(NAME, kind, {"bytes": n}, bytes=n) for kind in ("h2d", "d2h") for n in sizes]
    for peer in range(1, _gpus(context)):
        found += [Case(NAME, "p2p", {"peer": peer, "bytes": n}, bytes=n) for n in (65536, 64 * 2**20)]
    return found


def _gpus(context: Context) -> int:
    if not context.gpu:
        return 1
    import torch

    return min(int(context.options.get("gpus") or 1), int(torch.cuda.device_count()))


def run(context: Context, case: Case) -> Measurement:
    import torch

    n = case.params["bytes"]
    device: Any = context.device
    values = torch.randint(0, 255, (n,), dtype=torch.uint8)
    host = values.pin_memory() if context.gpu else values
    extras: dict[str, Any] = {}
    if case.operator == "p2p":
        other = torch.device("cuda", case.params["peer"])
        extras["peer_access"] = bool(torch.cuda.can_device_access_peer(device, other))
        source, target = values.to(device), torch.zeros(n, dtype=torch.uint8, device=other)
    elif case.operator == "h2d":
        source, target = host, torch.zeros(n, dtype=torch.uint8, device=device)
    else:
        source = values.to(device)
        target = torch.zeros(n, dtype=torch.uint8)
        target = target.pin_memory() if context.gpu else target
    target.copy_(source)
    context.synchronize()
    if not torch.equal(target.cpu(), values):
        raise RuntimeError(f"wrong data after a {case.operator} copy of {n} bytes")
    count = max(1, min(50, int(256 * 2**20 / n)))
    measured = eager(context, [lambda: target.copy_(source, non_blocking=True)] * count)
    return Measurement(measured.seconds, measured.calls, measured.narrow, extras)
