"""Hardware profiles: what one box can do, as YAML at the border and SI numbers inside.

A profile holds numbers with their source and uncertainty and no policy: which all-reduce an engine picks, or which
kernels it runs, is the engine's description. Field names carry the unit; `Machine` (specsim.ops) holds SI.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SourceKind = Literal["measured", "fitted", "published", "datasheet", "assumed"]
Positive = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
Finite = Annotated[float, Field(gt=-1e9, lt=1e9, allow_inf_nan=False)]
Uncertainty = Annotated[float, Field(ge=0, le=3, allow_inf_nan=False)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Strict):
    """Where a group of numbers comes from."""

    kind: SourceKind
    reference: str = Field(min_length=3)
    date: str = Field(pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")


class Group(Strict):
    """A group of numbers with one origin. `relative_uncertainty` is one standard deviation as a fraction of the value."""

    source: Source
    relative_uncertainty: Uncertainty
    note: str = ""


class Gpu(Group):
    """The GPU itself, from its datasheet; `memory_gb` and `l2_mb` are decimal."""

    name: str
    memory_gb: Positive
    bandwidth_gb_s: Positive
    bf16_tflops: Positive
    l2_mb: Positive | None = None
    power_w: Positive | None = None
    compute_capability: str | None = None


class OperatorRate(Group):
    """Cost of one operator class: seconds = fixed + bytes / bandwidth + flops / peak."""

    fixed_us: NonNegative
    bandwidth_gb_s: Positive
    peak_tflops: Positive | None = None


class AllReduceCurve(Group):
    """Latency of one all-reduce against message bytes (one rank's buffer), for one implementation, rank count and mode."""

    implementation: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]  # nccl, custom, flashinfer, oneshot, nccl-ll, ...
    ranks: Annotated[int, Field(ge=2, le=1024)]
    mode: Literal["graph", "eager"]
    bytes: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1)]
    latency_us: Annotated[list[Positive], Field(min_length=1)]

    @model_validator(mode="after")
    def _paired(self) -> AllReduceCurve:
        if len(self.bytes) != len(self.latency_us):
            raise ValueError(f"bytes has {len(self.bytes)} entries and latency_us {len(self.latency_us)}: give one latency a size")
        if any(b <= a for a, b in zip(self.bytes, self.bytes[1:], strict=False)):
            raise ValueError("bytes must increase")
        return self


class Launch(Group):
    """Host costs. `kernel_us`: one eager launch; `collective_us`: one eager collective from Python; `graph_us`: starting a
    graph; `graph_node_us`: device time between two nodes of a graph."""

    kernel_us: NonNegative
    collective_us: NonNegative
    graph_us: NonNegative
    graph_node_us: NonNegative


class EngineTerms(Group):
    """What one engine adds on this box, fitted from whole passes: the few terms that no operator measurement shows."""

    kernel_gap_us: Finite = 0.0  # correction a kernel in a graph
    row_layer_us: Finite = 0.0  # a row and layer
    verify_layer_us: Finite = 0.0  # multi-row attention, a layer of a verify pass
    decode_host_us: NonNegative = 0.0  # host time a decode step that the GPU waits for
    cycle_host_us: NonNegative = 0.0  # host time a speculative cycle that the GPU waits for


class Profile(Strict):
    """One box. Operator classes are keyed by name: see docs/model.md for the list and what stands in for a missing one."""

    schema_: Literal["specsim.hardware/1"] = Field(alias="schema", default="specsim.hardware/1")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    gpus: Annotated[int, Field(ge=1, le=1024)]
    link: Literal["none", "nvlink", "pcie"]
    gpu: Gpu
    operators: dict[str, OperatorRate]
    allreduce: list[AllReduceCurve] = []
    launch: Launch
    engines: dict[str, EngineTerms] = {}
    caveats: list[str] = []  # shown by predict as warnings about this profile
    cpu: bool = False  # made without a GPU: only to try the program
    environment: dict[str, Any] = {}
    samples: dict[str, Any] = {}  # raw samples, or the name of the file beside the profile that holds them


def folder() -> Path:
    """The folder with the shipped profiles, in a checkout and in an install."""
    import specsim.hardware as shipped

    return Path(shipped.__path__[0])
