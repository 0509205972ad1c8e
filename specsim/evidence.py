"""What records of `observe` say to a diagnosis: observations, and plain facts that need no model at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specsim import names
from specsim.probes import STEP_NOISE, Observation, Probe
from specsim.quantities import counted
from specsim.records import Point, Record
from specsim.scenarios import recorded

TRACE_NOISE = 0.15  # steps are longer under a profiler
EAGER_NCCL_NOISE = 0.25  # nccl-tests outside a graph: its launches are inside
CLIFF = 2.2  # times as long at twice the batch
MOST_POINTS = 8  # batches of one record
NOTHING = 1.005  # an accept length below it: no drafted token is accepted
MANY_LINES = 20  # decode lines from which a queue would have shown
KINDS = {"allreduce": "allreduce", "moe": "experts", "attention": "attention", "gemm": "gemm", "norm": "small_kernels",
         "tiny": "small_kernels", "router": "small_kernels", "copy": "small_kernels"}  # fmt: skip


@dataclass
class Evidence:
    """observations for the weights; facts as sentences; accept_length, batch, context and the record of the speculating
    server, as far as the records tell."""

    observations: list[Observation] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    accept_length: float | None = None
    batch: int | None = None
    context: int | None = None
    speculating: Record | None = None
    decode_ms: dict[int, float] = field(default_factory=dict)
    cycle_ms: float | None = None


def read(records: Sequence[Record], draft_tokens: int | None = None, ranks: int | None = None) -> Evidence:
    """Evidence of records. draft_tokens, ranks: of the scenario; where it is not known, what the records' launch flags
    say, and all-reduces of any number of ranks."""
    found = Evidence()
    for record in records:
        _plain(record, found)
    best = _speculating(records)
    if best is not None:
        record, point = best
        known = launch_options(record)[0].get("draft_tokens") or draft_tokens
        d = int(known or max(2, math.ceil(point.tokens_per_cycle or 2)))
        found.speculating = record
        found.accept_length, found.batch, found.context = point.tokens_per_cycle, point.batch, point.context
        _speculation(record, point, d, known is not None, found)
        _other_batches(record, point, d, found)
    else:
        found.speculating = next((r for r in records if r.engine is not None and r.engine.flags), None)
    for record in records:
        _allreduces(record, found, ranks)
        limit = record.environment.get("admission_limited_at")
        if limit:
            found.observations.append(Observation(Probe("yes", name="queue"), 1.0, record.source))
            found.facts.append(
                f"Requests wait while only {limit} run at once: throughput is limited by admission, not by the speed of a cycle."
            )
        found.facts += [f"{record.source}: {c}" for c in record.caveats if c.startswith("contradiction:")]
    return found


def _plain(record: Record, found: Evidence) -> None:
    """Decode steps without speculation, one a batch."""
    steps: dict[int, float] = {}
    for p in record.points:
        if p.decode_ms is None or p.batch is None or (p.tokens_per_cycle or 1.0) > 1.0 or p.batch in found.decode_ms:
            continue
        noise = TRACE_NOISE if _is_trace(record) else STEP_NOISE
        probe = Probe("decode", batch=p.batch, noise=noise)
        found.observations.append(Observation(probe, p.decode_ms.value, record.source))
        steps[p.batch] = found.decode_ms[p.batch] = p.decode_ms.value
        if p.cuda_graph is False:
            found.facts.append(f"Plain decoding at batch {p.batch} runs without a CUDA graph.")
    if steps:
        listed = ", ".join(f"{ms:.1f} ms at batch {batch}" for batch, ms in sorted(steps.items())[:8])
        found.facts.append(f"Plain decoding takes {listed} ({record.source}).")
    for (small, fast), (large, slow) in pairwise(sorted(steps.items())):
        if large <= 2 * small and slow > CLIFF * fast:
            found.facts.append(
                f"Between batch {small} and {large} a plain step takes {slow / fast:.1f} times as long: a cliff in rows,"
                " which a verify of as many rows meets too."
            )


def _other_batches(record: Record, best: Point, d: int, found: Evidence) -> None:
    """Cycles at other batches than the one that is diagnosed, and what each arm gives where both were measured."""
    noise = TRACE_NOISE if _is_trace(record) else STEP_NOISE
    seen: set[int] = set()
    for p in record.points:
        if p.cycle_ms is None or p.batch is None or p.batch in seen or len(seen) >= MOST_POINTS:
            continue
        seen.add(p.batch)
        if p.batch != best.batch:
            found.observations.append(
                Observation(Probe("cycle", p.batch, d, noise=noise), p.cycle_ms.value, record.source)
            )
        plain = found.decode_ms.get(p.batch)
        if plain is not None and p.tokens_per_cycle:
            speedup = p.tokens_per_cycle * plain / p.cycle_ms.value
            found.facts.append(
                f"At batch {p.batch} speculation gives {speedup:.2f} times the tokens of plain decoding;"
                f" {p.cycle_ms.value / plain:.2f} tokens a cycle would break even."
            )
    eager = sorted(
        {
            p.batch
            for p in record.points
            if p.cuda_graph is False and p.batch and p.batch != best.batch and (p.tokens_per_cycle or 0) != 1.0
        }
    )
    if eager:
        also = " as well" if best.cuda_graph is False else ""
        found.facts.append(f"Verify runs without a CUDA graph at batch {', '.join(map(str, eager[:8]))}{also}.")


def _speculating(records: Sequence[Record]) -> tuple[Record, Point] | None:
    """The point that most lines stand behind, of those that speculate."""
    points = [
        (r, p)
        for r in records
        for p in r.points
        if (p.tokens_per_cycle or 0.0) > 1.0
        or p.accept_rate_by_position
        or p.cycle_ms is not None
        or p.verify_ms is not None
    ]
    return max(points, key=lambda rp: _lines(rp[1]), default=None)


def _lines(p: Point) -> float:
    steady = p.raw.get("steady_intervals", 0)
    lines = p.raw.get("lines", 0)
    return (steady if isinstance(steady, int) else 0) * 1000 + (lines if isinstance(lines, int) else 0)


def _speculation(record: Record, p: Point, d: int, known: bool, found: Evidence) -> None:
    noise = TRACE_NOISE if _is_trace(record) else STEP_NOISE
    batch = p.batch or 1
    if p.tokens_per_cycle is not None and p.tokens_per_cycle < NOTHING:
        found.facts.append(
            "No drafted token is ever accepted: speculation is broken here, not merely weak (a wrong draft, or deeper than it was trained for)."
        )
    elif p.tokens_per_cycle is not None:
        found.facts.append(
            f"Speculation gains {p.tokens_per_cycle:.2f} tokens a cycle{f' of at most {d}' if known else ''} (accept length, bonus token included)."
        )
    if p.verify_ms is not None:
        found.observations.append(Observation(Probe("verify", batch, d, noise=noise), p.verify_ms.value, record.source))
        found.facts.append(f"A verify at batch {batch} takes {p.verify_ms.value:.1f} ms.")
    elif p.cycle_ms is not None:
        found.observations.append(Observation(Probe("cycle", batch, d, noise=noise), p.cycle_ms.value, record.source))
    if p.cycle_ms is not None:
        found.cycle_ms = p.cycle_ms.value
        fact = f"A cycle at batch {batch} takes {p.cycle_ms.value:.1f} ms"
        if p.tokens_per_cycle:
            fact += (
                f": speculation pays only where a plain decode step of this batch takes more than"
                f" {p.cycle_ms.value / p.tokens_per_cycle:.1f} ms"
            )
        found.facts.append(fact + ".")
    flags = [q.cuda_graph for q in record.points if q.batch == p.batch and q.cuda_graph is not None]
    if flags:
        in_graph = p.cuda_graph if p.cuda_graph is not None else flags[0]
        found.observations.append(Observation(Probe("yes", name="verify-graph"), float(in_graph), record.source))
        found.facts.append(
            f"Verify at batch {batch} runs in a CUDA graph."
            if in_graph
            else f"Verify at batch {batch} runs WITHOUT a CUDA graph: the host launches each kernel of it."
        )
    lines = record.environment.get("decode_lines", 0)
    if isinstance(lines, int) and lines >= MANY_LINES and not record.environment.get("admission_limited_at"):
        found.observations.append(Observation(Probe("yes", name="queue"), 0.0, record.source))
    if _is_trace(record):
        _parts(record, batch, d, found)


def _parts(record: Record, batch: int, d: int, found: Evidence) -> None:
    """ms of a verify by kind of kernel, from a profile."""
    parts: dict[str, float] = {}
    for row in record.samples:
        steps = row.get("steps")
        if row.get("phase") == "verify" and row.get("operator") in KINDS and steps:
            name = KINDS[row["operator"]]
            parts[name] = parts.get(name, 0.0) + float(row["total_ms"]) / float(steps)
    for name, ms in parts.items():
        found.observations.append(
            Observation(Probe("component", batch, d, name=name, noise=TRACE_NOISE), ms, record.source)
        )
    if parts:
        listed = ", ".join(
            f"{name.replace('_', ' ')} {ms:.1f}" for name, ms in sorted(parts.items(), key=lambda kv: -kv[1])
        )
        found.facts.append(f"In the profile a verify's kernels take, in ms: {listed}.")


def _allreduces(record: Record, found: Evidence, ranks: int | None) -> None:
    rows = [r for r in record.samples if r.get("operator") == "allreduce" and r.get("us") and r.get("bytes")]
    if ranks is not None:
        rows = [r for r in rows if (r.get("ranks") or ranks) == ranks]
    for row in rows[:64]:
        noise = 0.12 if row.get("in_graph") else EAGER_NCCL_NOISE
        probe = Probe("allreduce", size=int(row["bytes"]), noise=noise)
        found.observations.append(Observation(probe, float(row["us"]), record.source))
    if rows:
        found.facts.append(f"All-reduce times of {counted(len(rows), 'size')} are given ({record.source}).")


def _is_trace(record: Record) -> bool:
    return any("total_ms" in row for row in record.samples[:8])


def launch_options(record: Record | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Scenario options of a record's launch flags, and notes. Empty where the record has none that can be read."""
    from specsim.errors import InputError
    from specsim.launch import read_launch

    if record is None or record.engine is None or not record.engine.flags or record.engine.name == "other":
        return {}, ()
    try:
        if record.target_config is not None:  # it says more than its flags: the models themselves, and maybe the box
            options, notes = recorded(record)
            return {**options, **({"hardware": record.hardware} if record.hardware in names.hardware() else {})}, notes
        launch = read_launch(record.engine.name, record.engine.flags)
    except InputError as problem:
        return {}, (f"{record.source}: the launch settings cannot be used: {problem}",)
    options = {"tp": 1, "method": "none", **launch.options, "engine": record.engine.name}
    for key in ("nodes", "pp", "dp"):
        options.pop(key, None)
    return options, launch.notes
