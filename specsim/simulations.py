"""Simulations asked for by options, one or many: `specsim simulate`, and `specsim.simulate` in Python.

Options with several values make one simulation for every combination; each is what `specsim.simulated.simulate` says of it, run
here or spread by `specsim.fanout`. With a file for the rows each that is finished is kept beside it until the file is whole.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from specsim import fanout
from specsim.asked import AModel, scenario, with_model
from specsim.errors import InputError
from specsim.files import no_folder, path_of, read_kept, write_atomically
from specsim.pages import Shown
from specsim.progress import listening, report
from specsim.provenance import sources_of
from specsim.quantities import short
from specsim.scenarios import contents, refuse_unknown
from specsim.simulated import Load, Simulated
from specsim.simulated import simulate as simulate_one
from specsim.swept import products, several

SCHEMA = "specsim.simulations/1"
MOST = 10_000  # simulations at once
SINGLE = ("accept_histogram", "eager", "sglang_args", "vllm_args", "trace", "policy")  # these do not vary
NAMES = {"rate": "request_rate", "concurrency": "max_concurrency"}  # as bench_serving calls them
Task = tuple[int, Mapping[str, Any]]


@dataclass(frozen=True, repr=False)
class Simulations(Shown):
    """Several simulations, a row each: what varied, then the metrics in the field names of bench_serving; `error` says why one
    could not be run, and is None else."""

    page_from = "specsim.simulations_text"

    varied: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    sources: tuple[Mapping[str, Any], ...] = ()
    out: Path | None = None
    warnings: tuple[str, ...] = ()  # of what was asked, each once

    @property
    def finished(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["error"] is None]

    def verdict(self) -> str:
        """One sentence: which of them got most done."""
        goal = "request_goodput" if any(row["request_goodput"] is not None for row in self.finished) else "request_throughput"  # fmt: skip
        best = max(self.finished, key=lambda row: row[goal] or 0.0)
        what = "within the targets" if goal == "request_goodput" else "finished"
        at = ", ".join(f"{name.replace('_', ' ')} {best[name]}" for name in self.varied)
        return f"{short(best[goal])} requests a second {what} at most{f', with {at}' if at else ''}."

    def json(self) -> dict[str, Any]:
        """The document of schema specsim.simulations/1."""
        out = None if self.out is None else str(self.out)
        return {
            "schema": SCHEMA,
            **self.said(),
            "varied": list(self.varied),
            "rows": list(self.rows),
            "sources": list(self.sources),
            "out": out,
            "warnings": list(self.warnings),
        }


def simulate(
    model: AModel | Sequence[AModel] | None = None,
    /,
    *,
    out: str | Path | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    **options: Any,
) -> Simulated | Simulations:
    """Simulate a server under load: the options of `specsim simulate`, with underscores, each a value or several.

        >>> found = simulate("Llama-3.1-8B", hardware="1x-h200", method="none", concurrency=[1, 4], num_requests=20)
        >>> [row["completed"] for row in found.rows]
        [20, 20]

    Load options (requests a second, tokens, targets in ms) are the fields of `specsim.simulated.Load`; all others are those of
    `specsim.scenario`. One value each gives a `Simulated`; several, or `out`, `Simulations`. Latencies are in ms, throughput is
    in tokens and requests a second. out: a .csv file for the rows. jobs: processes, -1 for
    one a core; cluster: "dask://HOST:PORT" or "ray" instead. Raises InputError, WorkError.
    """
    options = with_model(model, options, several=True)
    cluster = fanout.cluster_of(options, cluster)
    lists = {name: several(name, value) for name, value in options.items() if name not in SINGLE and value is not None}
    varied = tuple(name for name, values in lists.items() if len(values) > 1)
    single = {name: lists[name][0] if name in lists else value for name, value in options.items() if name not in varied}
    if not varied and out is None:
        if cluster is not None:
            mend = "leave it out, or give several values"
            raise InputError("one simulation is not spread", where="--cluster", mend=mend)
        return simulate_one(**single)
    count = math.prod(len(lists[name]) for name in varied)
    if count > MOST:
        raise InputError(f"{count:,} simulations", where="simulate", mend=f"{MOST:,} at most: make several runs of it")
    refuse_unknown(lists)
    cases = [dict(case) for case in products(varied, lists)]
    tasks: list[Task] = [(i, {**single, **case}) for i, case in enumerate(cases)]
    rows: list[Mapping[str, Any]] = []
    sources: dict[str, Mapping[str, Any]] = {}  # of all of them, each once
    warnings: dict[str, None] = {}
    with fanout.kept(None if out is None else _csv_file(Path(out)), lambda: _mark(options, lists)) as parts:
        run = fanout.run(partial(_row, parts, len(tasks)), tasks, jobs=jobs, cluster=cluster)
        for case, found in zip(cases, run, strict=True):
            sources |= {repr(source): source for source in found.pop("sources", ())}
            warnings |= dict.fromkeys(found.pop("warnings", ()))
            rows.append({NAMES.get(name, name): _plain(value) for name, value in case.items()} | found)
            report(len(rows), len(tasks), "simulations")
        if all(row["error"] for row in rows):
            raise InputError(rows[0]["error"])
        if out is not None:
            write_atomically(Path(out), _csv(rows))
    names = tuple(NAMES.get(name, name) for name in varied)
    file = None if out is None else Path(out)
    return Simulations(names, tuple(rows), tuple(sources.values()), file, tuple(warnings))


def _row(parts: Path | None, times: int, task: Task) -> dict[str, Any]:
    """The metrics, `sources` and `warnings` (but those of its run) of one simulation, or the `error` why there are none. What is kept is not done again."""
    index, options = task
    kept = None if parts is None else parts.with_name(f"{parts.name}-{index}.json")
    if kept is not None and (before := read_kept(kept)):
        return before
    try:
        with listening(None):  # its own progress says nothing of the whole
            found = simulate_one(times=times, **options)
    except InputError as error:
        return {"error": str(error)}
    metrics = {k: v for k, v in found.run.metrics.json().items() if not isinstance(v, (dict, list))}
    said = [warning for warning in found.warnings if warning not in found.run.warnings]
    row = {"error": None, **metrics, "sources": sources_of(found.scenario, prefills=True), "warnings": said}
    if kept is not None:
        write_atomically(kept, json.dumps(row))
    return row


def _csv_file(out: Path) -> Path:
    if out.suffix.lower() != ".csv":
        raise InputError(f"{out} is no .csv", where="--out", mend="name the file results.csv")
    if why := no_folder(out):
        raise InputError(why, where="--out")
    return out


def _mark(options: Mapping[str, Any], lists: Mapping[str, tuple[Any, ...]]) -> str:
    """What the rows depend on: each scenario down to its numbers, the load, and its files."""
    of_load = {field.name for field in fields(Load)}
    outer = [name for name in lists if name not in of_load]
    once = {name: value for name, value in options.items() if name not in lists and name not in of_load}
    said = [repr(sorted((name, lists.get(name, options[name])) for name in options if name in of_load))]
    for case in products(outer, lists):
        try:
            said.append(contents(scenario(**once, **dict(case))))
        except InputError as error:
            said.append(str(error))
    for path in (path_of(options[name], f"--{name}") for name in ("trace", "policy") if options.get(name)):
        said.append(f"{path.stat().st_size} {path.stat().st_mtime_ns}" if path.exists() else "")
    return "\n".join(said)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, (int, float, bool, str)) and value != math.inf else str(value)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    file = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
