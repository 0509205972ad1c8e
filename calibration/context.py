"""What a measurement gets (`Context`), what it measures (`Case`) and what it gives back (`Measurement`)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One size of one measured thing.

    operator: class of the hardware profile ("gemm_bf16", "nccl"); params: what identifies the size; bytes, flops: moved
    and computed by one call, as specsim.ops counts them; kernels: launched by one call; estimate_s: time it should
    take; timeout_s: time after which a call counts as hung (compiling included); ranks: how many take part.
    """

    measure: str
    operator: str
    params: dict[str, Any]
    bytes: float = 0.0
    flops: float = 0.0
    kernels: int = 1
    estimate_s: float = 0.6
    timeout_s: float = 60.0
    ranks: int = 1

    @property
    def key(self) -> str:
        """A file name that tells cases apart."""
        text = "-".join(f"{k}={v}" for k, v in self.params.items())
        safe = "".join(c if c.isalnum() or c in "=-." else "_" for c in f"{self.measure}.{self.operator}.{text}")
        return safe if len(safe) <= 160 else f"{safe[:140]}-{zlib.crc32(text.encode()):08x}"

    @property
    def size(self) -> str:
        """For people: operator and size."""
        return f"{self.operator} " + ", ".join(f"{k} {v}" for k, v in self.params.items())

    @property
    def seed(self) -> int:
        return zlib.crc32(self.key.encode())


@dataclass(frozen=True)
class Measurement:
    """Samples in seconds a call. `narrow`: whether the 95 % interval of the median is within the target."""

    seconds: list[float]
    calls: int = 1
    narrow: bool = True
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass
class Context:
    """The worker's surroundings. Collective decisions go over `control`, a gloo group, never over the GPU link."""

    rank: int
    world: int
    local_rank: int
    device: Any  # torch.device
    quick: bool
    shapes: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)  # groups, buffers and controls that cases share

    def chosen(self, kind: str, measure: str, typical: Sequence[Any]) -> Sequence[Any]:
        """The caller's shapes of a kind; typical ones where none were given at all, or where the caller's model has none
        and the measurement was asked for by name."""
        found: Sequence[Any] | None = self.shapes.get(kind)
        return typical if found is None or (not found and measure in self.options.get("only", ())) else found

    @property
    def gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    @property
    def budget_s(self) -> float:
        """Longest time to spend on the samples of one case."""
        return 0.03 if not self.gpu else 0.15 if self.quick else 0.6

    @property
    def target(self) -> float:
        """Half width of the 95 % interval of the median, as a fraction, at which a case is done."""
        return 0.01 if not self.quick else 0.02

    @cached_property
    def l2_bytes(self) -> int:
        if not self.gpu:
            return 2**20
        import torch

        return int(getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or 64 * 2**20)

    @cached_property
    def memory_bytes(self) -> float:
        """All memory of the GPU; without limit on CPU tensors, whose sizes are small."""
        if not self.gpu:
            return float("inf")
        import torch

        return float(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def rotation_bytes(self) -> int:
        """Weights to rotate through so that no call finds its own in the cache: beyond twice the L2."""
        return int(2.2 * self.l2_bytes) + 2**20

    def copies(self, nbytes: float, most: int = 256) -> int:
        """How many buffers of nbytes to rotate through."""
        return max(2, min(most, int(self.rotation_bytes / max(nbytes, 1)) + 2))

    def synchronize(self) -> None:
        if self.gpu:
            import torch

            torch.cuda.synchronize(self.device)

    def agree(self, value: float, group: str | None = None) -> float:
        """The largest value over the ranks of a group named in `cache` (None: this rank alone)."""
        if group is None or self.world == 1:
            return value
        import torch
        import torch.distributed as dist

        box = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.cache[group])
        return float(box[0])


def case_document(case: Case) -> dict[str, Any]:
    """The case as JSON."""
    return {**asdict(case), "key": case.key, "size": case.size}


def log_of(folder: Path, stage: str, rank: int) -> Path:
    """Where a rank's output goes."""
    return folder / "logs" / f"{stage}.rank{rank}.log"


def dumps(document: Any) -> str:
    return json.dumps(document, indent=1, allow_nan=False, default=float)


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, quantiles and the 95 % interval of the median (by order statistics), in the samples' unit."""
    ordered = sorted(samples)
    n = len(ordered)

    def at(q: float) -> float:
        return ordered[min(n - 1, max(0, round(q * (n - 1))))]

    low, high = median_interval(ordered)
    return {
        "median": at(0.5),
        "p10": at(0.1),
        "p90": at(0.9),
        "min": ordered[0],
        "max": ordered[-1],
        "low": low,
        "high": high,
    }


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with 95 % probability. `ordered` must be sorted."""
    n = len(ordered)
    half = 0.98 * n**0.5
    low = max(0, int(n / 2 - half))
    high = min(n - 1, int(n / 2 + half))
    return ordered[low], ordered[high]
