"""Measurement records, `specsim.record/1`: one JSON form for everything observed, by whatever means.

`calibrate` writes operator samples, `validate` step times of a live server, `observe` what logs and benchmark files
say. A record states how each figure was derived, so that a replay can set prediction beside observation years later.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

Number = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(allow_inf_nan=False, ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Quantity(_Strict):
    """A figure with its 80 % interval. `how` names the derivation, e.g. "regression over 4 lengths", "event timer"."""

    value: Number
    low: Number | None = None
    high: Number | None = None
    n: int | None = None  # samples behind it
    how: str = ""


class Point(_Strict):
    """One operating point. Times are ms a step or cycle; what was not observed is None."""

    batch: int | None = None
    context: int | None = None  # mean tokens of context during the measurement
    tokens_per_cycle: Number | None = None  # accept length, bonus token included; 1 without speculation
    accept_rate_by_position: list[Number] | None = None  # conditional
    decode_ms: Quantity | None = None
    draft_ms: Quantity | None = None
    verify_ms: Quantity | None = None
    extend_ms: Quantity | None = None
    host_ms: Quantity | None = None
    cycle_ms: Quantity | None = None
    tokens_per_s: Quantity | None = None
    cuda_graph: bool | None = None
    host_slowdown: Quantity | None = None  # of the server's cores meanwhile: 1 is a core of its own (host_speed.Watch)
    notes: list[str] = []
    raw: dict[str, Any] = {}  # raw timings and counters that the figures came from


class LoadRun(_Strict):
    """Requests sent by the clock to a live server, each streamed and timed.

    Requests are alike: `input_tokens` random ids, `output_tokens` generated. `arrival_ms`: when each was due, from the
    first; `sent_ms`: when it was sent. `requests`: columns over the requests that finished, `request` their places in
    `arrival_ms`; times in ms.
    """

    rate: Number  # requests a second, Poisson
    num_requests: int
    input_tokens: int
    output_tokens: int
    seed: int
    accept_histogram: list[int] = []  # cycles that gained 1, 2, ... tokens, where the server says so
    overhead_ms: Quantity | None = None  # of a lone request: first token less queue and prefill, by the server's clock
    chunk_us: Quantity | None = None  # pace of the chunks within a step: what the front end takes to send one
    lone_ms: dict[
        str, Number
    ] = {}  # medians of lone requests in the warm-up: first token; queue and prefill where told
    timers_s: dict[
        str, Number
    ] = {}  # GPU seconds by phase during the run, averaged over ranks, where the engine counts
    results: dict[str, Any] = {}  # in the field names of bench_serving
    arrival_ms: list[Number] = []
    sent_ms: list[Number] = []
    requests: dict[str, list[Number]] = {}
    host_slowdown: Quantity | None = None  # of the server's cores, as of a point
    client: dict[str, Number] = {}  # how late the measuring client itself was
    failed: int = 0
    notes: list[str] = []


class EngineRun(_Strict):
    """What ran: the engine, its version and the launch flags, from which the scenario is rebuilt."""

    name: Literal["sglang", "vllm", "other"]
    version: str | None = None
    flags: list[str] = []  # as on the command line, without the program's name
    env: dict[str, str] = {}  # environment variables that change behaviour; never a secret


class Correction(_Strict):
    """Work that the measurement added and a real server would not do, to be added to predictions before comparing."""

    what: str
    kernels_per_moe_layer: Number = 0.0
    us_per_moe_layer: Number = 0.0
    applies_to: list[Literal["decode", "verify", "draft", "extend"]] = ["decode", "verify"]


class Record(_Strict):
    """One run. `kind`: what made it. Unknown keys are refused, so that a typing error never loses a figure."""

    schema_: Literal["specsim.record/1"] = Field(alias="schema", default="specsim.record/1")
    kind: Literal["calibration", "validation", "observation"]
    name: str
    date: str  # ISO 8601
    source: str = ""  # command, file or address that it came from
    environment: dict[str, Any] = {}  # gpu, gpus, driver, torch, nccl, clocks, topology, ...
    hardware: str | None = None  # profile that describes the box, if known
    engine: EngineRun | None = None
    target_config: dict[str, Any] | None = None  # the target's config.json
    draft_config: dict[str, Any] | None = None
    points: list[Point] = []
    loads: list[LoadRun] = []
    samples: list[
        dict[str, Any]
    ] = []  # operator samples of a calibration: {"operator", "shape", "seconds": [...], ...}
    corrections: list[Correction] = []
    method: str = ""
    caveats: list[str] = []

    def __repr__(self) -> str:
        counts = {"points": len(self.points), "loads": len(self.loads), "samples": len(self.samples)}
        held = ", ".join(f"{n:,} {what}" for what, n in counts.items() if n) or "empty"
        return f"<Record: {self.name}, {self.kind}, {self.date[:10]}, {held}>"

    __str__ = __repr__


# --- samples of a calibration -----------------------------------------------------------------------------------------

SIZES: dict[str, dict[str, type]] = {  # measure -> what identifies its sizes, as far as the fits read it
    "attention": {"batch": int, "context": int, "queries": int},
    "allreduce": {"ranks": int, "mode": str},
}


class _Case(BaseModel):
    """What the fits read of a sample; it holds more."""

    model_config = ConfigDict(strict=True)

    key: str
    measure: str
    operator: str
    rank: int = 0


class _Failed(_Case):
    status: Literal["failed"]
    error: str


class _Spread(BaseModel):
    model_config = ConfigDict(strict=True)

    median: Amount
    p10: Amount
    p90: Amount
    low: Amount
    high: Amount


class _Extras(BaseModel):
    model_config = ConfigDict(strict=True)

    slowest_rank_s: Amount = 0.0
    alone: _Spread | None = None  # the same calls back to back, where the sample's are in place


class _Done(_Case):
    status: Literal["done"]
    params: dict[str, Any]
    bytes: Amount
    flops: Amount
    narrow: bool
    spread: _Spread
    extras: _Extras

    @model_validator(mode="after")
    def _has_its_size(self) -> _Done:
        for name, kind in SIZES.get(self.measure, {}).items():
            if not isinstance(self.params.get(name), kind):
                raise ValueError(f"params.{name} is no {kind.__name__}")
        return self


@lru_cache(maxsize=1)
def _sample() -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[_Done | _Failed, Field(discriminator="status")])


def sample_trouble(sample: Any) -> str:
    """What is wrong with a sample of a calibration, "" when the fits can read it."""
    try:
        _sample().validate_python(sample)
    except ValidationError as error:
        return first_trouble(error)
    return ""


def first_trouble(error: ValidationError) -> str:
    """The first complaint: key and what was expected."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    return f"{key}: {first['msg']}" if key else str(first["msg"])
