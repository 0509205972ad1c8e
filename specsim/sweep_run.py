"""Run a sweep over processes or a cluster, keep what is done, and say what came out.

With a file for the rows, every finished task leaves its rows and its digest in `FILE.parts/`; a sweep that was interrupted
takes up there when it is started again, and the folder goes when the file is whole. Results do not depend on who ran what.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from specsim import fanout
from specsim.errors import InputError, WorkError, together
from specsim.files import read_kept, write_atomically
from specsim.pages import Shown
from specsim.profiles import unlike_hosts
from specsim.provenance import sources_of_all
from specsim.quantities import six
from specsim.scenarios import contents
from specsim.sweep_rows import check_target, join_parts, records, write_part
from specsim.sweeps import MOST_CASES, Case, Digest, Spec, Task, built, digest, front, listed, shown, tasks_of

SCHEMA = "specsim.sweep/1"
LISTED = 2000  # rows that the JSON document holds at most
Progress = Callable[[int, int], None]


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """What came out of a sweep: the digest of all its parts, and rows where they are few."""

    page_from = "specsim.sweep_text"

    spec: Spec
    cases: dict[int, Case]
    digest: Digest
    rows: list[dict[str, Any]] | None
    out: Path | None = None
    warnings: tuple[str, ...] = field(default=())

    def pareto(self) -> list[dict[str, Any]]:
        """Fronts of latency against throughput over cases, batches and settings: one a model, context and acceptance."""
        merged: dict[tuple[str, int, int], list[list[float]]] = {}
        for key, points in (self.digest.fronts or {}).items():
            index, context, acceptance = (int(x) for x in key.split(","))
            group = (str(self.cases[index].labels()["model"]), context, acceptance)
            merged[group] = front([*merged.get(group, []), *([t, r, b, s, index] for t, r, b, s in points)])
        return [
            {
                "model": model,
                "context": self.spec.context[context],
                "acceptance": listed(self.spec.acceptance[acceptance]),
                "points": [self._point(*point) for point in points],
            }
            for (model, context, acceptance), points in sorted(merged.items())
        ]

    def _point(self, tpot_ms: float, rate: float, batch: float, setting: float, index: float) -> dict[str, Any]:
        case = self.cases[int(index)]
        chosen = None if setting < 0 else case.settings[int(setting)]
        return {
            "tpot_ms": six(tpot_ms),
            "tokens_per_s_per_gpu": six(rate),
            "batch": int(batch),
            "setting": chosen.label if chosen else "off",
            "draft_tokens": chosen.draft_tokens if chosen else 1,
            "hardware": case.labels()["hardware"],
            "tp": case.scenario.parallel.tp,
            "case": int(index),
        }

    def json(self) -> dict[str, Any]:
        """The document of schema specsim.sweep/1."""
        s, d = self.spec, self.digest
        return {
            "schema": SCHEMA,
            **self.said(),
            "configurations": d.configurations,
            "axes": {
                "batch": _axis(s.batch),
                "context": _axis(s.context),
                "draft_tokens": _axis(s.draft_tokens),
                "acceptance": s.kind or None,
                "acceptances": _axis(s.acceptance) if s.kind else [],
            },
            "cases": [
                {"case": i, **case.labels(), "settings": [asdict(x) | {"label": x.label} for x in case.settings]}
                for i, case in self.cases.items()
            ],
            "wins": d.wins if s.kind else None,
            "best": d.best if s.kind else None,
            "breakeven": d.breakeven,
            "pareto": self.pareto() if s.kind else None,
            "rows": self.rows,
            "sources": sources_of_all(lane.scenario for case in self.cases.values() for lane in case.lanes),
            "out": None if self.out is None else str(self.out),
            "warnings": list(self.warnings),
        }


def _axis(values: tuple[Any, ...]) -> list[Any]:
    """All values of an axis, or its ends when there are many."""
    return [listed(v) for v in (values if len(values) <= LISTED else (values[0], values[-1]))]


def run(
    spec: Spec, *, out: Path | None = None, jobs: int = 1, cluster: str | None = None, progress: Progress | None = None
) -> Result:
    """Run a sweep. `progress` is called with configurations done and planned.

    Raises InputError when no case can be built or `out` cannot be, and WorkError when workers or the disk fail.
    """
    kind = ""
    wrong: list[InputError] = []
    try:
        kind = "" if out is None else check_target(out)
    except InputError as error:
        wrong.append(error)
    try:
        fanout.check(jobs, cluster)
    except InputError as error:
        wrong.append(error)
    if wrong:
        raise together(wrong[0], wrong[1:])
    cases, warnings = _cases(spec)
    tasks = tasks_of(spec, cases, written=out is not None)
    total = sum(_size(spec, cases[t.case], t) for t in tasks)
    kept = Digest()
    done = 0
    with fanout.kept(out, lambda: _mark(spec, cases)) as parts:
        run = fanout.run(partial(_work, spec, parts, kind), tasks, jobs=jobs, cluster=cluster)
        for task, found in zip(tasks, run, strict=True):
            kept.add(found)
            done += _size(spec, cases[task.case], task)
            if progress:
                progress(done, total)
        if not kept.configurations:
            longest = max(setting.draft_tokens for case in cases.values() for setting in case.settings)
            what = "no configuration can gain so many tokens a cycle"
            raise InputError(what, where="--accept-length", mend=f"give 1 to {longest}, or more --draft-tokens")
        if out is not None and parts is not None:
            written = [_part(parts, task, kind) for task in tasks]
            missing = next((p for p in written if not p.exists()), None)
            if missing is not None:
                raise WorkError(
                    f"{missing}: is not here; workers on other machines need a file system shared with this one"
                )
            join_parts(written, out)
    if kept.unreachable:
        ask = "configuration asks" if kept.unreachable == 1 else "configurations ask"
        warnings.append(f"{kept.unreachable:,} {ask} for more tokens a cycle than the draft tokens allow: left out")
    for axis in ("batch", "context", "acceptance"):
        few, count = len(shown(spec, axis)), len(getattr(spec, axis))
        if few < count:
            warnings.append(f"maps show {few} of the {count:,} values of {axis}; rows hold all")
    rows = list(_records(spec, tasks)) if total <= LISTED else None
    return Result(spec, cases, kept, rows, out, tuple(dict.fromkeys(warnings)))


def _cases(spec: Spec) -> tuple[dict[int, Case], list[str]]:
    """The cases that can be built, and what is to be said of all."""
    if len(spec.cases) > MOST_CASES:
        raise InputError(
            f"{len(spec.cases):,} cases", where="sweep", mend=f"{MOST_CASES:,} at most: make several sweeps of it"
        )
    cases: dict[int, Case] = {}
    warnings: list[str] = []
    failure: InputError | None = None
    for index in range(len(spec.cases)):
        try:
            cases[index] = built(spec, index)
        except InputError as error:
            failure = failure or error
            said = " ".join(f"{k}={v}" for k, v in spec.cases[index])
            warnings.append(f"left out {said}: {error}")
            continue
        warnings += cases[index].notes
    if not cases:
        assert failure is not None
        raise failure
    warnings += unlike_hosts(lane.scenario.profile for case in cases.values() for lane in case.lanes)
    return cases, warnings


def _size(spec: Spec, case: Case, task: Task) -> int:
    cells = (task.batch[1] - task.batch[0]) * (task.context[1] - task.context[0])
    return cells * len(case.settings) * len(spec.acceptance)


def _records(spec: Spec, tasks: list[Task]) -> Iterator[dict[str, Any]]:
    for task in tasks:
        yield from records(spec, task)


# --- parts that last ------------------------------------------------------------------------------------------------


def _mark(spec: Spec, cases: dict[int, Case]) -> str:
    """What the rows depend on: the axes, and each scenario down to its numbers."""
    from specsim import sweep_rows

    scenarios = [lane.scenario for case in cases.values() for lane in case.lanes]
    said = [contents(s) for s in scenarios]
    axes = repr(
        (spec.draft_tokens, spec.batch, spec.context, spec.kind, spec.acceptance, sweep_rows.COLUMNS, list(cases))
    )
    return "\n".join([axes, *said])


def _part(parts: Path, task: Task, kind: str) -> Path:
    return parts.with_name(f"{parts.name}-{task.case}-{task.batch[0]}-{task.context[0]}.{kind}")


def _work(spec: Spec, parts: Path | None, kind: str, task: Task) -> Digest:
    """One task: its digest, and its rows in the parts' folder where there is one. What is there already, and
    whole, is not done again."""
    if parts is None:
        return digest(spec, task)
    part = _part(parts, task, kind)
    note = part.with_suffix(".json")
    before = read_kept(note)
    if before and part.exists() and before.get("bytes") == part.stat().st_size:
        return Digest(**before["digest"])
    found = digest(spec, task)
    write_part(spec, task, part)
    write_atomically(note, json.dumps({"bytes": part.stat().st_size, "digest": asdict(found)}))
    return found
