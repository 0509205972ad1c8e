"""Hardware profiles: what one box can do, as YAML at the border and SI numbers inside.

A profile holds numbers with their source and uncertainty and no policy: which all-reduce an engine picks, or which
kernels it runs, is the engine's description. Field names carry the unit; `Machine` (specsim.ops) holds SI.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import itertools
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, isfinite, log
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specsim.errors import InputError, did_you_mean
from specsim.files import parse_yaml, read_text
from specsim.names import ENGINES
from specsim.pages import Shown

SourceKind = Literal["measured", "fitted", "published", "datasheet", "assumed"]
Positive = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
Finite = Annotated[float, Field(gt=-1e9, lt=1e9, allow_inf_nan=False)]
Uncertainty = Annotated[float, Field(ge=0, le=3, allow_inf_nan=False)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Source(Strict):
    """Where a group of numbers comes from."""

    kind: SourceKind
    reference: str = Field(min_length=3)
    date: str = Field(pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")

    @field_validator("date", mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        """YAML reads 2026-07-25 as a date and 2026 as a number: both mean the text."""
        if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
            return value.isoformat()
        return str(value) if type(value) is int else value


class Group(Strict):
    """A group of numbers with one origin. `relative_uncertainty` is one standard deviation as a fraction of a value."""

    source: Source
    relative_uncertainty: Uncertainty
    note: str = ""

    def uncertainty(self, name: str) -> float:
        """Relative uncertainty of one of the numbers."""
        return self.relative_uncertainty


class Gpu(Group):
    """The GPU itself, from its datasheet; `memory_gb` and `l2_mb` are decimal; `processors`: streaming multiprocessors."""

    name: str
    memory_gb: Positive
    bandwidth_gb_s: Positive
    bf16_tflops: Positive
    l2_mb: Positive | None = None
    power_w: Positive | None = None
    processors: Annotated[int, Field(ge=1, le=4096)] | None = None
    compute_capability: str | None = None

    def is_other_than(self, device: str) -> bool:
        """Whether a name, as a driver gives it, is that of another GPU: of another number, H100 80GB HBM3 beside H200."""
        mine, other = (re.search(r"[A-Z]*\d+[A-Z]*", _plain(name)) for name in (self.name, device))
        return mine is not None and other is not None and mine[0] != other[0]


def _plain(device: str) -> str:
    """A device's name without how many there are, and with spaces where other tools write none."""
    return re.sub(r"^\d+ ?X ", "", re.sub(r"TX(?=\d)", "TX ", device.upper().replace("_", " ")))


class OperatorRate(Group):
    """Cost of one operator class, for specsim.ops.operator_seconds; `inner_ns` is what walking a value of inner width
    takes; of MLA, a part of a cache."""

    fixed_us: NonNegative
    inner_ns: NonNegative = 0.0
    bandwidth_gb_s: Positive
    peak_tflops: Positive | None = None


class AllReduceCurve(Group):
    """Latency of one all-reduce against message bytes (one rank's buffer), by implementation, rank count and mode."""

    implementation: Annotated[
        str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    ]  # nccl, custom, flashinfer, oneshot, nccl-ll, ...
    ranks: Annotated[int, Field(ge=2, le=1024)]
    mode: Literal["graph", "eager"]
    bytes: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1)]
    latency_us: Annotated[list[Positive], Field(min_length=1)]

    @model_validator(mode="after")
    def _paired(self) -> AllReduceCurve:
        if len(self.bytes) != len(self.latency_us):
            raise ValueError(
                f"bytes has {len(self.bytes)} entries and latency_us {len(self.latency_us)}: give one latency a size"
            )
        if any(b <= a for a, b in zip(self.bytes, self.bytes[1:], strict=False)):
            raise ValueError("bytes must increase")
        return self


class Launch(Group):
    """Host costs. `kernel_us`: one eager launch; `collective_us`: one eager collective from Python; `graph_us`: the
    start of a graph; `graph_node_us`: device time between two nodes of a graph."""

    kernel_us: NonNegative
    collective_us: NonNegative
    graph_us: NonNegative
    graph_node_us: NonNegative


class Host(Group):
    """How fast the cores are that an engine's busy threads run on. `slow_share`: of the time in which a core is slow, because
    somebody uses its other half; `slow_ratio`: how many times as long a fixed loop of Python takes meanwhile
    (specsim.host_speed). A pass waits for the slowest of its ranks, which is slow for 1 - (1 - slow_share) ** ranks of the
    time. `relative_uncertainty` is of what the loop takes longer on average."""

    slow_share: Annotated[float, Field(ge=0, le=1)]
    slow_ratio: Annotated[float, Field(ge=1, le=100)]

    def slowdown(self, ranks: int = 1) -> float:
        """How many times as long as on a core of its own the loop takes for the slowest of the ranks, on average."""
        return 1 + (1 - (1 - self.slow_share) ** ranks) * (self.slow_ratio - 1)


class EngineTerms(Group):
    """What one engine adds on this box, fitted from whole passes: the few terms that no operator measurement shows.

    A term that is left out keeps the engine description's own value and uncertainty. docs/engines.md defines each.
    `uncertainties`: relative uncertainty of terms, by name, where it is not that of the group.
    """

    uncertainties: dict[str, Uncertainty] = {}
    kernel_gap_us: Finite | None = None
    row_layer_us: Finite | None = None
    row_groups_us: NonNegative | None = None
    verify_layer_us: Finite | None = None
    allreduce_skew_us: NonNegative | None = None
    draft_step_us: NonNegative | None = None
    decode_host_us: NonNegative | None = None
    cycle_host_us: NonNegative | None = None
    decode_cpu_us: NonNegative | None = None
    cycle_cpu_us: NonNegative | None = None
    sequence_cpu_us: NonNegative | None = None
    serial_cpu_us: NonNegative | None = None
    rank_cpu_us: NonNegative | None = None
    prefill_host_us: NonNegative | None = None
    eager_gap_us: NonNegative | None = None
    tree_step_us: NonNegative | None = None
    tree_cpu_us: NonNegative | None = None
    ngram_host_us: NonNegative | None = None
    ngram_sequence_us: NonNegative | None = None
    ngram_verify_us: NonNegative | None = None
    eager_factor: Positive | None = None
    eager_experts: Positive | None = None
    host_slowing: NonNegative | None = None

    @model_validator(mode="after")
    def _known(self) -> EngineTerms:
        for name in self.uncertainties:
            if name not in self.names() or getattr(self, name) is None:
                raise ValueError(f"uncertainties: {name} has no value here: give one, or leave its uncertainty out")
        return self

    @classmethod
    def names(cls) -> set[str]:
        """Names of all terms, as the engines' descriptions have them."""
        return set(cls.model_fields) - set(Group.model_fields) - {"uncertainties"}

    def uncertainty(self, name: str) -> float:
        return self.uncertainties.get(name, self.relative_uncertainty)


class Profile(Shown, Strict):
    """One box, in the units that its fields' names end in (_us, _gb_s, _gb, _mb, _tflops; message sizes in bytes).

    Operator classes are keyed by name: docs/model.md lists them and what stands in for a missing one.
    """

    page_from: ClassVar[str] = "specsim.profile_text"

    schema_: Literal["specsim.hardware/1"] = Field(alias="schema", default="specsim.hardware/1")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    gpus: Annotated[int, Field(ge=1, le=1024)]
    link: Literal["none", "nvlink", "pcie"]
    gpu: Gpu
    operators: dict[str, OperatorRate]
    allreduce: list[AllReduceCurve] = []
    launch: Launch
    host: Host | None = None  # None: cores of its own
    engines: dict[str, EngineTerms] = {}
    caveats: list[str] = []  # shown by predict as warnings about this profile
    cpu: bool = False  # made without a GPU: only to try the program
    environment: dict[str, Any] = {}
    samples: dict[str, Any] = {}  # raw samples, or the name of the file beside the profile that holds them

    def document(self) -> dict[str, Any]:
        """The document of schema specsim.hardware/1."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def folder() -> Path:
    """The folder with the shipped profiles, in a checkout and in an install."""
    return Path(importlib.import_module("specsim.hardware").__path__[0])


OTHER_UNIT = (1 / 300, 100.0)  # times: a thousand, and what a class reaches of the GPU's own, a hundredth on a CPU
REQUIRED = ("gemm_bf16", "attention_gqa", "norm", "tiny")  # operator classes that every profile has
FORMATS = ("bf16", "fp16", "fp8", "int8", "int4", "nvfp4", "mxfp4")  # that products and experts are named after
CLASSES = (
    *(f"{kind}_{name}" for kind in ("gemm", "moe") for name in FORMATS),
    *("attention_gqa", "attention_mla", "attention_linear", "attention_sparse", "norm", "tiny", "router"),
)


def list_profiles() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return list(_shipped_names().values())


@functools.cache
def _shipped_names() -> dict[str, str]:
    """Name by name in lower case."""
    return {name.lower(): name for name in sorted(p.stem for p in folder().glob("*.yaml"))}


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """A shipped profile by name (any case), or one from a YAML file.

    Raises InputError, one line: an unknown name with the nearest one, or the file, key and value that are wrong.
    """
    if not isinstance(name_or_path, str | os.PathLike) or not os.fspath(name_or_path):
        raise InputError("no profile was given", where="hardware", mend="give a profile's name or a YAML file")
    name_or_path = os.fspath(name_or_path)
    path = Path(name_or_path)
    if path.suffix.lower() not in (".yaml", ".yml") and "/" not in name_or_path and not path.is_file():
        return load_shipped(name_or_path)
    return parse_profile(read_text(path, "hardware profile"), str(path))


def load_shipped(name: str) -> Profile:
    """A shipped profile by name (any case); no file of that name is looked at. Raises InputError, with the nearest name."""
    found = _shipped_names().get(name.lower())
    if found is None:
        raise InputError(f"no hardware profile {name[:80]!r}", mend=did_you_mean(name[:80], list_profiles()))
    return _shipped(found)


@functools.cache
def _shipped(name: str) -> Profile:
    path = folder() / f"{name}.yaml"
    return parse_profile(read_text(path, "hardware profile"), str(path))


def parse_profile(text: str, where: str) -> Profile:
    """A profile from YAML text. Raises InputError naming `where`, the key and the value that is wrong."""
    data = parse_yaml(text, where, "hardware profile")
    if not isinstance(data, dict):
        raise InputError("is not a mapping", where=where, mend="a profile starts with 'schema: specsim.hardware/1'")
    if not data.keys() & Profile.model_fields.keys():
        raise InputError(
            "holds no key of a hardware profile",
            where=where,
            mend="`specsim calibrate` writes one; a config.json is for --model",
        )
    for key in ("environment", "samples"):
        _refuse_odd_values(data.get(key), key, where)
    try:
        profile = Profile.model_validate(data, strict=True)
    except ValidationError as error:
        raise _unknown_key(error, where) or InputError(*_first(error), where=where) from None
    except RecursionError:
        raise InputError("is nested too deeply", where=where) from None
    missing = [name for name in REQUIRED if name not in profile.operators]
    if missing:
        listing = ", ".join(missing)
        mend = "; ".join(["every profile needs " + ", ".join(REQUIRED), *unread_names(profile)])
        raise InputError(f"operators lacks {listing}", where=where, mend=mend)
    _refuse_other_units(profile, where)
    return profile


def _refuse_other_units(profile: Profile, where: str) -> None:
    """A rate that is further off the GPU's own than OTHER_UNIT is in another unit: TB/s, bytes, GFLOPS."""
    for name, rate in profile.operators.items():
        for field, own in (("bandwidth_gb_s", "bandwidth_gb_s"), ("peak_tflops", "bf16_tflops")):
            value, of_gpu = getattr(rate, field), getattr(profile.gpu, own)
            if value and not OTHER_UNIT[0] < value / of_gpu < OTHER_UNIT[1]:
                said = f"operators.{name}.{field} is {value:g} where gpu.{own} is {of_gpu:g}"
                raise InputError(said, where=where, mend="give both in the unit that their names end in")


def _first(error: ValidationError) -> tuple[str]:
    """The first complaint as one line: key, what was expected, what was found."""
    details = error.errors(include_url=False)
    first = details[0]
    key = ".".join(str(part) for part in first["loc"]) or "profile"
    found = repr(first["input"])
    found = found if len(found) <= 60 else found[:57] + "..."
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    got = "" if first["type"] == "missing" else f", got {found}"
    return (f"{key}: {first['msg'][:1].lower()}{first['msg'][1:]}{got}{more}",)


def unlike_hosts(profiles: Iterable[Profile]) -> list[str]:
    """A line where boxes are compared of which some have a `host` group and others none: their cores are taken for cores of its
    own, and what is launched kernel by kernel is faster by that alone."""
    boxes = {p.name: p.host for p in profiles}
    watched = [
        f"{name} (a loop takes {host.slowdown():.2f} times as long)" for name, host in boxes.items() if host is not None
    ]
    others = [name for name, host in boxes.items() if host is None]
    if not watched or not others:
        return []
    said = f"the host's cores were watched on {', '.join(watched)} and are taken for cores of their own on {', '.join(others)}"
    return [f"{said}: eager passes and the host's work differ by it, whatever the GPUs do"]


def unread_names(profile: Profile) -> list[str]:
    """A line for each operator class and engine that no prediction asks for: a misspelt one, whose figures a stand-in replaces, or
    one of a later version, without which the rest holds."""
    found = []
    for group, names, known in (("operators", profile.operators, CLASSES), ("engines", profile.engines, ENGINES)):
        for name in names:  # a class may also be by kernel: gemm_fp8_triton
            if name not in known and not name.startswith(tuple(f"{one}_" for one in known)):
                found.append(f"{group}.{name} is read by nothing; {did_you_mean(name, known)}")
    return found


def _unknown_key(error: ValidationError, where: str) -> InputError | None:
    """The complaint about a key that a profile has not there, with the nearest that it has: one that is missing is often a
    misspelt one. None where every key is known."""
    for one in error.errors(include_url=False):
        if one["type"] == "extra_forbidden":
            key = ".".join(map(str, one["loc"]))
            return InputError(
                f"{key}: unknown key", where=where, mend=did_you_mean(str(one["loc"][-1]), _keys_at(one["loc"]))
            )
    return None


def _keys_at(loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the group that holds a key."""
    model: type[BaseModel] = Profile
    for part in loc[:-1]:
        if field := model.model_fields.get(str(part)):
            model = next(_models(field.annotation), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """The groups that a field's type speaks of: itself, or inside lists, mappings and choices."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from _models(inner)


def _refuse_odd_values(value: Any, key: str, where: str) -> None:
    """The free parts of a profile hold what JSON can hold."""
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_odd_values(item, f"{key}.{name}", where)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_odd_values(item, f"{key}.{index}", where)
    elif not (value is None or isinstance(value, (str, int)) or (isinstance(value, float) and isfinite(value))):
        raise InputError(
            f"{key}: {str(value)[:60]!r} is no plain value", where=where, mend="write it as text in quotes"
        )


# --- writing ------------------------------------------------------------------------------------------------------


def dump_profile(profile: Profile) -> str:
    """The profile as YAML that `parse_profile` reads back: stable order, numbers before their source, flat lists."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def sequence(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
        flat = all(isinstance(item, (int, float)) for item in data)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)

    def number(dumper: yaml.SafeDumper, data: float) -> yaml.Node:
        text = repr(data) if data != int(data) or abs(data) >= 1e15 else f"{data:.1f}"
        if "e" in text and "." not in text:  # YAML reads 1e-07 as text
            text = text.replace("e", ".0e")
        return dumper.represent_scalar("tag:yaml.org,2002:float", text)

    def words(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
        odd = any(unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") for c in data)  # YAML takes some for line ends
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style='"' if odd else None)

    Dumper.add_representer(list, sequence)
    Dumper.add_representer(str, words)
    Dumper.add_representer(float, number)
    data = profile.model_dump(by_alias=True, exclude_defaults=True, mode="json")
    document = {"schema": profile.schema_, **_numbers_first(data)}
    return yaml.dump(document, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True, default_flow_style=False)


def _numbers_first(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers_first(item) for item in value]
    if not isinstance(value, dict):
        return value
    last = ("relative_uncertainty", "source", "note")
    if "source" not in value:
        return {k: _numbers_first(v) for k, v in value.items()}
    return {k: _numbers_first(v) for k, v in value.items() if k not in last} | {k: value[k] for k in last if k in value}


# --- comparing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One number of two profiles. `relative` is b / a - 1, None when one profile lacks the number."""

    key: str
    a: float | None
    b: float | None

    @property
    def relative(self) -> float | None:
        return None if not self.a or self.b is None else self.b / self.a - 1


def diff(a: Profile, b: Profile) -> list[Difference]:
    """Every number in which the profiles differ, in the order of the profile; all-reduce curves at the sizes of `a`
    that lie in the range of `b`, interpolated in log-log."""
    numbers_a, numbers_b = dict(_numbers(a)), dict(_numbers(b))
    found = [Difference(k, v, numbers_b.get(k)) for k, v in numbers_a.items() if numbers_b.get(k) != v]
    found += [Difference(k, None, v) for k, v in numbers_b.items() if k not in numbers_a]
    curves_a = {(c.implementation, c.ranks, c.mode): c for c in a.allreduce}
    curves_b = {(c.implementation, c.ranks, c.mode): c for c in b.allreduce}
    for key in sorted(curves_a.keys() | curves_b.keys()):
        label = f"allreduce.{key[0]}.{key[1]}.{key[2]}"
        if key not in curves_a or key not in curves_b:
            only = curves_a.get(key) or curves_b[key]
            middle = only.latency_us[len(only.latency_us) // 2]
            here = key in curves_a
            found.append(Difference(f"{label}.latency_us", middle if here else None, None if here else middle))
            continue
        for size, one in zip(curves_a[key].bytes, curves_a[key].latency_us, strict=True):
            other = latency_us(curves_b[key], size)
            if other is not None and abs(other / one - 1) > 1e-9:
                found.append(Difference(f"{label}.{size}.latency_us", one, other))
    return found


def latency_us(curve: AllReduceCurve, size: float) -> float | None:
    """The curve's latency at `size` bytes, interpolated in log-log; None outside the measured range."""
    if not curve.bytes[0] <= size <= curve.bytes[-1]:
        return None
    pairs = list(zip(curve.bytes, curve.latency_us, strict=True))
    for (b0, t0), (b1, t1) in itertools.pairwise(pairs):
        if b0 <= size <= b1:
            share = (log(size) - log(b0)) / (log(b1) - log(b0))
            return t0 * exp(share * log(t1 / t0))
    return curve.latency_us[0]


def _numbers(profile: Profile) -> Iterator[tuple[str, float]]:
    groups: list[tuple[str, Group]] = [("gpu", profile.gpu), ("launch", profile.launch)]
    groups += [(f"operators.{name}", rate) for name, rate in profile.operators.items()]
    groups += [(f"engines.{name}", terms) for name, terms in profile.engines.items()]
    yield "gpus", float(profile.gpus)
    for label, group in groups:
        for field, value in group:
            if isinstance(value, (int, float)) and field != "relative_uncertainty":
                yield f"{label}.{field}", float(value)
