"""Predictions beside recorded measurements: errors a phase, interval coverage, tables and plots. Works offline."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ValidationError

import specsim.load_replay as load_replay
from specsim.configs import load_config
from specsim.errors import InputError
from specsim.files import path_of, read_json
from specsim.pages import Shown
from specsim.prediction import machine_of, predict
from specsim.profiles import Host, Profile, load_profile
from specsim.profiles import Source as Origin
from specsim.progress import track
from specsim.provenance import Source, sources_of_all
from specsim.quantities import HALF, six
from specsim.records import Correction, LoadRun, Point, Quantity, Record, first_trouble
from specsim.routing import ALIKE, COLLAPSED
from specsim.scenarios import Scenario, of_record

SCHEMA = "specsim.validation/1"
RECORD = "specsim.record/1"
RECORDED_ROUTING = {"collapsed": COLLAPSED, "alike": ALIKE}  # by what a record says, where it is not uniform
MOST_SLOW = 10.0  # of a core, by a fixed loop: above, the loop was mostly waiting for it
OWN_CORE_US = 0.2  # a step of the loop on a core of its own, of the hosts that launches were calibrated on
STEPS = ("decode", "draft", "verify", "extend", "host", "cycle", "tokens_per_s", "break_even")  # at a fixed batch
WHOLE = ("decode", "verify", "cycle", "tokens_per_s")  # the others are what a difference left, or may be 0
PHASES = (*STEPS, *load_replay.PHASES)  # the latter under load
JUDGED = (
    "decode",
    "verify",
    "cycle",
    "tokens_per_s",
    "break_even",
    *load_replay.PHASES,
)  # large enough for an error in percent to matter
Interval = tuple[float, float, float]  # value, low, high
Predictor = Callable[[Record, Point, "str | Profile | None"], Mapping[str, Interval]]


@dataclass(frozen=True)
class Pair:
    """One phase of one point: observed beside predicted. Times in ms; tokens_per_s in 1/s; break_even in tokens.

    Of a load run (`record` ends in its rate) `batch` is the simulated mean and `context` that of a request. `step`: of host
    time, the observed ms of the step or cycle that it is a remainder of. `host_slowdown`: of the cores that were predicted on,
    those watched or else the profile's; 1 is a core of its own, None is not known.
    """

    record: str
    phase: str
    batch: int | None
    context: int | None
    observed: float
    predicted: float
    low: float
    high: float
    step: float | None = None
    host_slowdown: float | None = None

    @property
    def error(self) -> float:
        """(predicted - observed) / observed."""
        return self.predicted / self.observed - 1

    @property
    def of_step(self) -> float:
        """The error as a share of the step: that of a remainder, which may be next to nothing itself."""
        return self.error if self.step is None else (self.predicted - self.observed) / self.step

    @property
    def covered(self) -> bool:
        return self.low <= self.observed <= self.high


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """All pairs, worst first, and what was left out and why; `unreadable`: of that, the files that hold no whole record."""

    page_from = "specsim.replay_text"

    pairs: tuple[Pair, ...]
    skipped: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()  # of what was observed, and of what predicted it
    unreadable: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def of(self, phase: str) -> list[Pair]:
        return [p for p in self.pairs if p.phase == phase]

    def summary(self) -> dict[str, dict[str, Any]]:
        """Figures a phase, for phases that were observed."""
        return {phase: _summary(pairs) for phase in PHASES if (pairs := self.of(phase))}

    def json(self) -> dict[str, Any]:
        """The document of schema specsim.validation/1."""
        points = [
            {
                **{k: getattr(p, k) for k in ("record", "phase", "batch", "context")},
                **{k: six(getattr(p, k)) for k in ("observed", "predicted", "low", "high", "error")},
                "covered": p.covered,
                "host_slowdown": None if p.host_slowdown is None else six(p.host_slowdown),
            }
            for p in self.pairs
        ]
        return {
            "schema": SCHEMA,
            **self.said(),
            "phases": self.summary(),
            "points": points,
            "sources": list(self.sources),
            "skipped": list(self.skipped),
            "unreadable": list(self.unreadable),
            "warnings": list(self.warnings),
        }

    def over(self, limit: float | None) -> list[str]:
        """A line for each judged phase whose median error is above `limit`, and one for records that could not be read and so
        were not judged; none without a limit."""
        if limit is None:
            return []
        found = self.summary()
        lines = [f"not judged: {len(self.unreadable)} of the files, which cannot be read"] if self.unreadable else []
        for phase in JUDGED:
            if phase in found and found[phase]["median_abs_error"] > limit:
                lines.append(f"{phase}: median error {found[phase]['median_abs_error']:.1%} is over {limit:.1%}")
        return lines


def _summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    errors = [abs(p.error) for p in pairs]
    shares = [p.of_step for p in pairs if p.step is not None]
    of_step = {"median_abs_error_of_step": statistics.median(map(abs, shares)), "worst_error_of_step": max(shares, key=abs)} if shares else {}  # fmt: skip
    return {
        "n": len(pairs),
        "median_abs_error": round(statistics.median(errors), 5),
        "worst_error": round(max(pairs, key=lambda p: abs(p.error)).error, 5),
        "interval_coverage": round(sum(p.covered for p in pairs) / len(pairs), 4),
        **{name: round(value, 5) for name, value in of_step.items()},
    }


def load(path: Path) -> tuple[list[Record], list[str]]:
    """The validation and observation records in a folder (not below it) or one file, and lines on files that hold no whole
    record, or one of a newer schema.

    Raises InputError when there is none.
    """
    if not path.exists():
        raise InputError("does not exist", where=str(path), mend="give a folder of records, such as validation/")
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    records, skipped = [], []
    for file in files:
        try:
            content = read_json(file, "record")
            schema = content.get("schema") if isinstance(content, dict) else None
            if path.is_dir() and schema != RECORD:
                if str(schema).startswith("specsim.record/"):
                    skipped.append(f"{file}: is a {schema}, and this specsim reads {RECORD}; install the newer one")
                elif isinstance(content, dict) and {"points", "engine"} <= set(content):
                    skipped.append(f"{file}: has the keys of a record and schema {schema!r}; its schema is {RECORD}")
                continue
            record = Record.model_validate(content)
        except ValidationError as error:
            skipped.append(f"{file}: is not a {RECORD} ({first_trouble(error)})")
            continue
        except InputError as error:
            skipped.append(str(error))
            continue
        if record.kind != "calibration":
            records.append(record)
        elif not path.is_dir():
            raise InputError("is a calibration's record", where=str(path), mend="`specsim calibrate --refit` reads it")
    if not records:
        first = "" if not skipped else skipped[0] if path.is_dir() else skipped[0].removeprefix(str(path)).lstrip(":, ")
        why = f" ({first})" if first else ""
        raise InputError(
            f"holds no record{why}", where=str(path), mend="make some with `specsim validate --url` or --launch"
        )
    return records, skipped


def distinct(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """The records, each run once and each under a name of its own, and a line for each that is there twice: a copy would count
    its errors twice, and a fit believe it twice."""
    kept, lines = [], []
    first: dict[str, str] = {}  # name, by all else of a record
    for record in records:
        content = record.model_dump_json(exclude={"name"})
        if content in first:
            lines.append(f"{record.name}: is a copy of the run {first[content]}, which counts once")
            continue
        names = itertools.chain([record.name], (f"{record.name} ({i})" for i in itertools.count(2)))
        first[content] = name = next(n for n in names if n not in first.values())
        kept.append(record if name == record.name else record.model_copy(update={"name": name}))
    return kept, lines


def predict_point(record: Record, point: Point, hardware: str | Profile | None) -> dict[str, Interval]:
    """What specsim says of a recorded point, a phase: value, low, high; `host_slowdown` beside them is what it was predicted
    with. Raises InputError when it cannot say anything.

    The work that the measurement added (record.corrections) is added to the passes that it slowed down.
    """
    scenario = scenario_of(record, point, hardware)
    p = predict(scenario)
    launch_s = machine_of(scenario).launch_s(scenario.model, scenario.parallel.tp)
    added = {
        phase: sum(float(added_ms(c, scenario, phase, launch_s)) for c in record.corrections)
        for phase in ("decode", "draft", "verify", "extend")
    }
    found = {
        phase: (q.value + more, q.low + more, q.high + more)
        for phase, q, more in (
            ("decode", p.decode_ms, added["decode"]),
            ("draft", p.draft_ms, added["draft"]),
            ("verify", p.verify_ms, added["verify"]),
            ("extend", p.extend_ms, added["extend"]),
            ("host", p.host_ms, 0.0),
            ("cycle", p.cycle_ms, added["draft"] + added["verify"] + added["extend"]),
        )
        if q is not None and q.value > 0  # a phase that the scenario lacks: one step drafts nothing
    }
    if scenario.method == "none":
        q = p.decode_host_ms
        found["host"] = (q.value, q.low, q.high)
    step = found.get("cycle") or found["decode"]
    tokens = 1e3 * (point.batch or 1) * (point.tokens_per_cycle or 1.0)
    found["tokens_per_s"] = (tokens / step[0], tokens / step[2], tokens / step[1])
    if p.breakeven_length is not None and "cycle" in found:
        q = p.breakeven_length  # the correction enters both times: shift the value and keep the relative interval
        value = found["cycle"][0] / found["decode"][0]
        found["break_even"] = (value, value * q.low / q.value, value * q.high / q.value)
    found["host_slowdown"] = (slowdown_of(scenario),) * 3
    return found


def slowdown_of(scenario: Scenario) -> float:
    """How many times as long as on a core of its own the slowest rank's core takes for the host's work; 1 where nobody looked."""
    host = scenario.profile.host
    return 1.0 if host is None else host.slowdown(scenario.parallel.tp)


def scenario_of(record: Record, point: Point, hardware: str | Profile | None) -> Scenario:
    """The scenario of a recorded point, with the routing that the run had, on cores as slow as they were then. Raises InputError
    when the record lacks it."""
    scenario = of_record(record, point, hardware)
    if point.host_slowdown is not None:
        scenario = replace(
            scenario, profile=scenario.profile.model_copy(update={"host": _host(record, point.host_slowdown)})
        )
    routing = RECORDED_ROUTING.get(record.environment.get("routing", ""))
    return scenario if routing is None else replace(scenario, routing=routing)


def _host(record: Record, seen: Quantity) -> Host:
    """The cores of the host while a point was measured. `seen` is of the slowest of the ranks already."""
    loop_us = record.environment.get("host_loop_us")
    pace = loop_us / OWN_CORE_US if isinstance(loop_us, (int, float)) and 0 < loop_us < 100 else 1.0
    slow = max(seen.value * pace, 1.0)
    half = slow - 1 if seen.high is None else max(seen.high - seen.value, 0.0) * pace
    relative = min(half / HALF / (slow - 1), 3.0) if slow > 1 else 0.0
    reference = f"the cores of the server's busy threads during {record.name}"
    source = Origin.model_construct(
        kind="measured", reference=reference, date=record.date[:10]
    )  # whatever a record calls its day
    return Host.model_construct(slow_share=1.0, slow_ratio=slow, relative_uncertainty=relative, source=source, note="")


def added_ms(correction: Correction, scenario: Scenario, phase: str, launch_s: ArrayLike) -> NDArray[np.float64]:
    """Milliseconds that a correction adds to a pass: its own time in a graph, and its launches, of `launch_s` seconds as
    all others, when the phase is eager."""
    if phase not in correction.applies_to:
        return np.zeros(())
    layers = sum(n for layer, n in scenario.model.layers if layer.experts is not None)
    graph = scenario.graph_phases.get(phase, True)
    kernels = 0.0 if graph else correction.kernels_per_moe_layer
    launches_us = kernels * np.asarray(launch_s) * 1e6
    return np.asarray(layers * np.maximum(correction.us_per_moe_layer, launches_us) / 1e3)


def compare(
    records: Sequence[Record], hardware: str | Profile | None, predictor: Predictor = predict_point
) -> tuple[list[Pair], list[str]]:
    """Pairs of every observed phase of every point, and lines on points that could not be predicted."""
    pairs: list[Pair] = []
    skipped: dict[tuple[str, str], list[Point]] = {}
    for record in track(records, "records"):
        for point in record.points:
            if point.batch is None:
                skipped.setdefault((record.name, "does not say how many requests ran"), []).append(point)
                continue
            try:
                said = predictor(record, point, hardware)
            except InputError as error:
                skipped.setdefault((record.name, str(error)), []).append(point)
                continue
            seen = observed(point)
            for phase in [phase for phase in WHOLE if seen.get(phase, 1.0) <= 0]:
                why = f"{phase} is {seen.pop(phase):g}, and must be above 0"
                skipped.setdefault((record.name, why), []).append(point)
            base = _base(record, point, records)
            if base is not None and "cycle" in seen:
                seen["break_even"] = seen["cycle"] / base
            slow = said["host_slowdown"][0] if "host_slowdown" in said else None
            for phase, value in seen.items():
                if phase in said and value > 0:
                    step = seen.get("cycle") or seen.get("decode") if phase == "host" else None
                    pairs.append(Pair(record.name, phase, point.batch, point.context, value, *said[phase], step, slow))
    pairs.sort(key=lambda pair: -abs(pair.error))
    return pairs, left_out(skipped)


def left_out(skipped: Mapping[tuple[str, str], Sequence[Point]]) -> list[str]:
    """A line for the points of each record that are left out for one reason: points by (record, why)."""

    def what(points: Sequence[Point]) -> str:
        one = f"batch {points[0].batch} context {points[0].context}"
        return one if len(points) == 1 else f"{len(points)} points"

    return [f"{name} {what(points)}: {why}" for (name, why), points in skipped.items()]


def compare_loads(records: Sequence[Record], hardware: str | Profile | None) -> tuple[list[Pair], list[str]]:
    """Pairs of every load run beside the simulator, and lines on runs that could not be simulated."""
    pairs: list[Pair] = []
    skipped: list[str] = []
    compiled = None if load_replay.worth_compiling(run for record in records for run in record.loads) else False
    for record in track(records, "loads"):
        for run in record.loads:
            try:
                pairs += load_pairs(record, run, hardware, compiled=compiled)
            except InputError as error:
                skipped.append(f"{record.name} rate {run.rate:g}: {error}")
    return pairs, skipped


def load_pairs(
    record: Record, run: LoadRun, hardware: str | Profile | None, *, compiled: bool | None = False
) -> list[Pair]:
    """A load run beside the simulator (`compiled`, see `specsim.simulation.simulate`). Raises InputError when it cannot be simulated."""
    middle = run.input_tokens + run.output_tokens // 2
    length = run.results.get("accept_length")
    scenario = scenario_of(
        record, Point(batch=1, context=middle, tokens_per_cycle=length, host_slowdown=run.host_slowdown), hardware
    )
    launch_s = machine_of(scenario).launch_s(scenario.model, scenario.parallel.tp)
    said = load_replay.replay_load(
        run,
        scenario,
        record.environment,
        lambda phase: sum(float(added_ms(c, scenario, phase, launch_s)) for c in record.corrections),
        compiled=compiled,
    )
    name = f"{record.name} {run.rate:g}/s"
    seen = load_replay.observed(run).items()
    slow = slowdown_of(scenario)
    return [
        Pair(name, phase, said.batch, middle, value, *said.phases[phase], host_slowdown=slow)
        for phase, value in seen
        if value > 0
    ]


def observed(point: Point) -> dict[str, float]:
    """What was observed, a phase."""
    quantities = {phase: getattr(point, f"{phase}_ms") for phase in STEPS[:6]} | {"tokens_per_s": point.tokens_per_s}
    return {phase: q.value for phase, q in quantities.items() if q is not None}


def _base(record: Record, point: Point, records: Sequence[Record]) -> float | None:
    """Decode time in ms of the same model, flags, batch and context (within 20 %), without speculation: the middle of what was
    observed, where several records have it; None if none has."""
    if point.cycle_ms is None:
        return None
    alike = [r for r in records if r.target_config == record.target_config and _settings(r) == _settings(record)]
    seen = [
        candidate.decode_ms.value
        for candidate in (p for other in alike for p in other.points)
        if candidate.batch == point.batch
        and candidate.decode_ms is not None
        and candidate.decode_ms.value > 0
        and abs((candidate.context or 0) - (point.context or 0)) <= 0.2 * max(point.context or 0, 1)
    ]
    return statistics.median(seen) if seen else None


def _settings(record: Record) -> tuple[Any, ...]:
    """What must agree for two runs to be compared, besides the model: ranks, graphs, all-reduce path, overlap."""
    flags = record.engine.flags if record.engine else []
    env = record.engine.env if record.engine else {}
    ranks = [v for f, v in zip(flags, flags[1:], strict=False) if f in ("--tp", "--tp-size")] or ["1"]  # noqa: RUF007
    switches = ("--disable-cuda-graph", "--disable-custom-all-reduce", "--disable-overlap-schedule")
    return (ranks, [s in flags for s in switches], env.get("NCCL_P2P_DISABLE", "0"), record.environment.get("gpu"))


def complete(
    records: Sequence[Record], model: Path | None = None, draft: Path | None = None
) -> tuple[list[Record], list[str]]:
    """The records whose model is known, and a line for each of the others.

    model, draft: those of records that do not hold their own, such as logs and benchmark files: a preset, a folder or
    a config.json. Raises InputError when these cannot be read, and when no record lacks them.
    """
    target = None if model is None else load_config(model)
    drafter = None if draft is None else load_config(draft)
    lacking = [record for record in records if record.target_config is None]
    _refuse_idle(model, draft, lacking)
    kept, left_out = [], []
    for record in records:
        if record.target_config is None and target is not None:
            record = record.model_copy(update={"target_config": target, "draft_config": record.draft_config or drafter})
        if record.target_config is None:
            left_out.append(f"{record.name} ({record.source or 'no source'}): does not hold its model; give --model")
        elif record.engine is None:
            left_out.append(f"{record.name} ({record.source or 'no source'}): does not say which engine ran")
        else:
            kept.append(record)
    return kept, left_out


def _refuse_idle(model: Path | None, draft: Path | None, lacking: Sequence[Record]) -> None:
    """Raise InputError for a model or a draft that no record would be given. lacking: the records without a model."""
    if model is not None and not lacking:
        raise InputError("says nothing: every record holds its model", where="--model", mend="leave it out")
    if draft is not None and model is None:
        raise InputError("says nothing without --model", where="--draft", mend="give it too, or leave it out")
    if draft is not None and all(record.draft_config is not None for record in lacking):
        raise InputError("says nothing: every record holds its draft", where="--draft", mend="leave it out")


def run(
    path: str | Path,
    hardware: str | None = None,
    predictor: Predictor = predict_point,
    model: Path | None = None,
    draft: Path | None = None,
) -> Result:
    """Predict what the records at `path` (a folder, or one) measured, and compare: times in ms, errors as fractions.

    hardware: the profile to predict with, in place of each record's own. model, draft: see `complete`. Raises InputError
    when there is no record, or none can be predicted.
    """
    if hardware is not None:
        load_profile(hardware)  # a wrong name is told once, and not for each record
    records, unreadable = load(path_of(path, "records"))
    records, copies = distinct(records)
    records, unknown = complete(records, model, draft)
    pairs, skipped = compare(records, hardware, predictor)
    under_load, more = compare_loads(records, hardware)
    pairs = sorted([*pairs, *under_load], key=lambda pair: -abs(pair.error))
    skipped += more
    if not pairs:
        why = [*unknown, *skipped, "nothing was observed"]
        raise InputError(f"no point could be predicted; {why[0]}", where=str(path))
    named = {pair.record for pair in pairs}
    used = [r for r in records if r.name in named]
    return Result(
        tuple(pairs),
        (*unreadable, *copies, *unknown, *skipped),
        tuple(_sources(used, hardware)),
        tuple(unreadable),
        (*on_others(used, hardware), *strange_cores(used)),
    )


def strange_cores(records: Sequence[Record]) -> Iterator[str]:
    """Lines on records whose cores can hardly have been as slow as they say: faster than a core of its own, or slower than
    MOST_SLOW."""
    for record in records:
        watched = (*(p.host_slowdown for p in record.points), *(load.host_slowdown for load in record.loads))
        seen = {slow.value for slow in watched if slow is not None}
        for value in sorted({min(seen, default=1.0), max(seen, default=1.0)}):
            if 1.0 <= value <= MOST_SLOW:
                continue
            why = "is below 1, which is a core of its own" if value < 1 else "is more than a shared core shows"
            yield f"{record.name}: host_slowdown {value:g} {why}; check how it was measured"


def on_others(records: Sequence[Record], hardware: str | None) -> Iterator[str]:
    """Lines on records of another GPU than that of the profile which predicts them."""
    measured: dict[tuple[str, str], list[str]] = {}
    for record in records:
        measured.setdefault((hardware or record.hardware or "", str(record.environment.get("gpu") or "")), []).append(
            record.name
        )
    for (box, device), names in measured.items():
        with contextlib.suppress(InputError):
            if box and load_profile(box).gpu.is_other_than(device):
                yield f"measured on {device}, predicted on {box}: {', '.join(names[:3])}{', ...' if names[3:] else ''}"


def _sources(records: Sequence[Record], hardware: str | None) -> Iterator[Source]:
    """Of the records, and of the scenarios of their first points, each source once."""
    scenarios = []
    for record in records:
        yield {"of": f"record {record.name}", "kind": "measured", "reference": record.source, "date": record.date,
               "relative_uncertainty": None}  # fmt: skip
        with contextlib.suppress(InputError):
            scenarios += [scenario_of(record, point, hardware) for point in record.points[:1]]
    yield from (s for s in sources_of_all(scenarios) if not s["of"].startswith("shape of "))
