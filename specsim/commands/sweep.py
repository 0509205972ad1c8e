"""specsim sweep"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specsim.commands.common import console, json_option, note, print_json
from specsim.commands.scenario import Count, scenario_of, scenario_options

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.sweep import Spec
    from specsim.sweep_run import Result

F = TypeVar("F", bound=Callable[..., Any])
ACCEPTANCE = {
    "accept_rate": "rate",
    "accept_length": "length",
    "accept_per_position": "per_position",
    "accept_profile": "profile",
}
SINGLE = ("sglang_args", "vllm_args")  # launch lines: commas are part of them
TYPES: dict[str, Any] = {}


def lists_of_scenario_options(command: F) -> F:
    """Add every scenario option, each taking a list or a range; its own type is kept in `TYPES`."""
    own = list(getattr(command, "__click_params__", []))
    wrapped = scenario_options(command)
    for option in getattr(wrapped, "__click_params__", [])[len(own) :]:
        if isinstance(option, click.Option) and option.name and not option.multiple and option.name not in SINGLE:
            TYPES[option.name] = option.type
            option.type = click.STRING
            option.metavar = "LIST"
    return wrapped


@click.command()
@lists_of_scenario_options
@click.option("--out", type=Path, metavar="FILE", help="Write a row a configuration: .csv or .parquet.")
@click.option("--rows", is_flag=True, help="Show the rows (at most 2,000 configurations) instead of the maps.")
@click.option("--plot", type=Path, metavar="FILE", help="Draw best draft length and speedup (PNG, SVG or PDF).")
@click.option("--jobs", type=int, default=1, metavar="N", help="Processes; -1: one a core; default 1.")
@click.option("--cluster", metavar="dask://HOST:PORT|ray", help="Run on an existing Dask or Ray cluster instead.")
@json_option
def command(
    out: Path | None, rows: bool, plot: Path | None, jobs: int, cluster: str | None, as_json: bool, **options: Any
) -> None:
    """Predict every combination of options: best draft length, break-even, latency against throughput.

    Every scenario option takes a list or a range: 1,2,8 or 2:9 or 1:256:x2 or 0.3:0.95:0.05 or 1k,8k,64k; rates by
    position are parted by semicolons. A million configurations take about a second, a hundred million no more memory.

    \b
    Examples:
      specsim sweep --batch 1:64:x2 --draft-tokens 2:8 --accept-rate 0.6
      specsim sweep --batch 1:256:x2 --context 1k,8k,64k --draft-tokens 2:9 --accept-rate 0.3:0.95:0.05 --out all.csv
      specsim sweep --model Llama-3.1-8B --hardware 1x-h200,1x-rtx-5090 --batch 1:64:x2 --draft-tokens 2:6 --jobs 2
    """
    from specsim.sweep_run import run

    spec = spec_of(options)
    with _bar() as progress:
        result = run(spec, out=out, jobs=jobs, cluster=cluster, progress=progress)
    if plot is not None:
        from specsim.sweep_plot import draw

        draw(result, plot)
    if as_json:
        print_json(result.json())
        for warning in result.warnings:
            note(f"warning: {warning}")
        return
    _show(result, rows)


def spec_of(options: dict[str, Any]) -> Spec:
    """The sweep of a command's options. Raises InputError."""
    from specsim.errors import InputError
    from specsim.sweep import DRAFTING, MOST_CASES, Spec

    given = {k: v for k, v in options.items() if v is not None and v != ()}
    lists = {k: _values(k, v) for k, v in given.items() if k in TYPES}
    kinds = [k for k in lists if k in ACCEPTANCE]
    if len(kinds) > 1:
        named = " and ".join("--" + k.replace("_", "-") for k in kinds)
        raise InputError("acceptance is stated twice", where=named, mend="give one of them")
    single = {k: v for k, v in given.items() if k not in TYPES}
    outer = [k for k in lists if k not in (*DRAFTING, *ACCEPTANCE, "batch", "context", "draft_tokens")]
    drafting = [k for k in lists if k in DRAFTING]
    count = math.prod(len(lists[k]) for k in outer)
    if count > MOST_CASES or math.prod(len(lists[k]) for k in drafting) > MOST_CASES:
        raise InputError(f"{count:,} cases", where="sweep", mend=f"{MOST_CASES:,} at most: make several sweeps of it")
    cases = [{**single, **dict(zip(outer, values, strict=True))} for values in product(*(lists[k] for k in outer))]
    draftings = [dict(zip(drafting, values, strict=True)) for values in product(*(lists[k] for k in drafting))]
    kind = ACCEPTANCE[kinds[0]] if kinds else ""
    if kind == "rate" and not all(0 <= a <= 1 for a in lists["accept_rate"]):
        raise InputError("has values outside [0, 1]", where="--accept-rate", mend="give fractions")
    return Spec(
        make=scenario_of,
        cases=tuple(tuple(case.items()) for case in cases),
        draftings=tuple(tuple(d.items()) for d in draftings),
        batch=lists.get("batch", (1,)),
        context=lists.get("context", (2048,)),
        draft_tokens=lists.get("draft_tokens", ()),
        kind=kind,
        acceptance=lists[kinds[0]] if kinds else (None,),
    )


def _values(name: str, text: str) -> tuple[Any, ...]:
    """The values that an option lists, each of the option's own type."""
    from specsim.errors import InputError
    from specsim.ranges import numbers, whole_numbers, words

    kind, option = TYPES[name], "--" + name.replace("_", "-")
    if isinstance(kind, Count):
        return whole_numbers(text, option)
    if kind is click.FLOAT:
        return numbers(text, option)
    try:
        return tuple(
            kind.convert(w, None, None) for w in words(text, option, ";" if name == "accept_per_position" else ",")
        )
    except click.BadParameter as error:
        raise InputError(error.message, where=option) from None


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on standard error once a second has passed, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(*Progress.get_default_columns()[:3], MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)  # fmt: skip
    started, shown = time.monotonic(), bar.add_task("configurations")

    def progress(done: int, total: int) -> None:
        if time.monotonic() - started > 1 and not bar.live.is_started:
            bar.start()
        bar.update(shown, completed=done, total=total)

    try:
        yield progress
    finally:
        bar.stop()


# --- for people -----------------------------------------------------------------------------------------------------


def _show(result: Result, rows: bool) -> None:
    out = console()
    out.print(f"{result.digest.configurations:,} configurations", style="bold")
    if result.out is not None:
        out.print(f"rows: {result.out}", soft_wrap=True)
    if rows:
        _show_rows(result, out)
    else:
        for index in list(result.cases)[:8]:
            _show_case(result, index, out)
        if len(result.cases) > 8:
            out.print(f"{len(result.cases) - 8} more cases: --json or --out holds them", style="dim")
        if result.spec.kind:
            _show_front(result, out)
    for warning in result.warnings:
        out.print(f"note: {warning}", style="yellow", soft_wrap=True, markup=False)


def _show_case(result: Result, index: int, out: Console) -> None:
    from rich.table import Table

    case = result.cases[index].labels()
    extra = "".join(f" {name} {case[key]}" for name, key in (("EP", "ep"), ("DP", "dp_attention")) if case[key] > 1)
    out.print()
    out.print(f"{case['model']} on {case['hardware']}, {case['engine']}, TP {case['tp']}{extra}", soft_wrap=True)
    spec, d = result.spec, result.digest
    if spec.kind:
        found = [x for x in d.best or [] if x["case"] == index]
        accepts = list(dict.fromkeys(str(x["acceptance"]) for x in found))
        middle = accepts[len(accepts) // 2]
        title = f"best draft tokens, and speedup, at accept {spec.kind.replace('_', ' ')} {middle}"
        cells = {
            (x["batch"], x["context"]): "does not fit" if x["setting"] == "-" else "off" if x["setting"] == "off" else f"{x['setting']}  {x['speedup']:.2f}x"
            for x in found
            if str(x["acceptance"]) == middle
        }  # fmt: skip
    else:
        title = "break-even accept rate, and draft tokens where it is lowest"
        cells = {}
        for x in d.breakeven or []:
            if x["case"] == index and x["accept_rate"] is not None:
                lowest = cells.get((x["batch"], x["context"]), "9")
                cells[x["batch"], x["context"]] = min(lowest, f"{x['accept_rate']:.2f}  {x['setting']}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    contexts = list(dict.fromkeys(x["context"] for x in d.breakeven or [] if x["case"] == index)) or [
        result.spec.context[0]
    ]
    table.add_column("batch", justify="right")
    for context in contexts:
        table.add_column(f"context {context:,}", justify="right")
    for batch in sorted({x["batch"] for x in d.breakeven or [] if x["case"] == index}):
        table.add_row(f"{batch:,}", *(cells.get((batch, context), "none") for context in contexts))
    if set(cells.values()) == {"does not fit"}:
        out.print("does not fit at any batch and context")
    elif table.row_count:
        out.print(title, style="dim")
        out.print(table)
    else:
        out.print("no speculation: --rows shows the times")


def _show_front(result: Result, out: Console) -> None:
    from rich.table import Table

    fronts = result.pareto()
    if not fronts:
        return
    chosen = fronts[len(fronts) // 2]
    title = f"latency against throughput: {chosen['model']}, context {chosen['context']:,}, accept {result.spec.kind.replace('_', ' ')} {chosen['acceptance']}"
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("ms a token", "tok/s a GPU", "batch", "draft tokens", "hardware", "TP"):
        table.add_column(name, justify="left" if name == "hardware" else "right")
    points = chosen["points"]
    step = max(1, -(-len(points) // 16))
    for p in points[::step]:
        table.add_row(
            f"{p['tpot_ms']:,.2f}",
            f"{p['tokens_per_s_per_gpu']:,.0f}",
            f"{p['batch']:,}",
            p["setting"],
            p["hardware"],
            str(p["tp"]),
        )
    out.print()
    out.print(title, style="dim", soft_wrap=True)
    out.print(table)
    if len(fronts) > 1 or step > 1:
        out.print(f"{len(fronts)} fronts, all points: --json", style="dim")


def _show_rows(result: Result, out: Console) -> None:
    from rich.table import Table

    from specsim.errors import InputError

    if result.rows is None:
        raise InputError(
            f"{result.digest.configurations:,} rows are too many to show", where="--rows", mend="give --out FILE"
        )
    names = {
        "hardware": "hardware", "tp": "TP", "batch": "batch", "context": "context", "method": "method", "draft_tokens": "d",
        "accept_rate": "accept rate", "decode_ms": "decode ms", "cycle_ms": "cycle ms", "speedup": "speedup",
        "tpot_ms": "ms a token", "breakeven_accept_rate": "break-even rate",
    }  # fmt: skip
    if len(result.cases) == 1:
        del names["hardware"], names["tp"]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in names.values():
        table.add_column(title, justify="right")
    for row in result.rows:
        table.add_row(
            *("" if row[k] is None else f"{row[k]:.4g}" if isinstance(row[k], float) else str(row[k]) for k in names)
        )
    out.print(table)
