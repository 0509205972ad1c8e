"""specsim observe"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import console, json_option, note, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from specsim.records import Point, Quantity, Record

SHOWN = 12  # rows of a table for people; --json has all


@click.command()
@click.argument("sources", nargs=-1, metavar="FILE|URL...")
@click.option("-o", "--output", metavar="DIR", help="Write each record as JSON into this folder.")
@json_option
def command(sources: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """Read what engines and tools leave behind: server logs, metrics, benchmark results, profiles.

    The format is found by content: logs of SGLang, vLLM and llama.cpp; /metrics and /get_server_info; bench_serving,
    bench_one_batch_server, bench_speculative, vllm bench serve, GuideLLM, llm-inference-bench; nccl-tests, nvbandwidth;
    torch profiler traces (gz too). Give a server's address to ask it; `-` reads standard input. An API key comes from
    the variable SPECSIM_API_KEY only and is never stored.

    \b
    Examples:
      specsim observe server.log
      specsim observe baseline.log speculative.log bench.jsonl -o records/
      specsim observe http://localhost:30000 --json
      specsim observe TP-0.trace.json.gz
    """
    from specsim.errors import InputError, SpecsimError
    from specsim.observations import contradictions, observe

    if not sources:
        raise InputError(
            "nothing to observe", where="FILE|URL", mend="give a log, a benchmark file, a trace or an address"
        )
    records: list[Record] = []
    problems: list[SpecsimError] = []
    for source in sources:
        try:
            records += observe(source)
        except SpecsimError as problem:
            problems.append(problem)
    found = contradictions(records)
    if output is not None:
        _write(records, Path(output))
    if as_json and records:
        print_json(
            {
                "schema": "specsim.observations/1",
                "records": [r.model_dump(by_alias=True, exclude_none=True) for r in records],
                "contradictions": found,
            }
        )
    elif records:
        _show(records, found)
    for earlier in problems[:-1]:
        note(f"error: {earlier}")
    if problems:
        raise problems[-1]


def _write(records: Iterable[Record], folder: Path) -> None:
    from specsim.files import write_atomically

    used: set[str] = set()
    for record in records:
        stem = (
            re.sub(r"[^A-Za-z0-9._-]+", "-", f"{Path(record.source).name}-{record.name}").strip("-.")[:80] or "record"
        )
        name, count = stem, 1
        while name.lower() in used:
            count += 1
            name = f"{stem}-{count}"
        used.add(name.lower())
        path = folder / f"{name}.json"
        write_atomically(path, record.model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n")
        note(f"wrote {path}")


def _show(records: list[Record], found: list[str]) -> None:
    from specsim.observe_checks import CONTRADICTION

    out = console()
    for record in records:
        engine = record.engine
        version = f" ({engine.version})" if engine and engine.version and engine.name != "other" else ""
        out.print(f"{record.source}: {record.name}{version}", style="bold", markup=False, soft_wrap=True)
        table = _points(record.points[:SHOWN])
        if table.columns:
            out.print(table)
        links = {k: v for k, v in record.environment.items() if k == "p2p" or k.endswith(("_gb_s", "_us"))}
        for key, value in links.items():
            out.print(f"  {key.replace('gb_s', 'GB/s').replace('_', ' ')}: {_text(value)}", markup=False)
        if not (table.columns or record.samples or links):
            out.print("  no step time, acceptance or all-reduce in it")
        if len(record.points) > SHOWN:
            out.print(f"and {len(record.points) - SHOWN} more points; --json has all")
        _show_samples(out, record)
        for text in dict.fromkeys(n for p in record.points[:SHOWN] for n in p.notes):
            out.print(f"  {text}", style="dim", markup=False, soft_wrap=True)
        for text in record.method.split("; ") if record.method else []:
            out.print(f"  taken: {text}", style="dim", markup=False, soft_wrap=True)
        for text in record.caveats:
            if not text.startswith(CONTRADICTION):
                out.print(f"  note: {text}", style="yellow", markup=False, soft_wrap=True)
        out.print()
    for text in found:
        out.print(text, style="bold red" if CONTRADICTION in text else "yellow", markup=False, soft_wrap=True)


def _table(columns: list[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name in ("phase", "kernels", "graph", "longest") else "right")
    return table


def _points(points: list[Point]) -> Table:
    """The points, with only the columns that say something."""
    rows = [
        {
            "batch": _text(p.batch),
            "context": _text(p.context),
            "tokens/cycle": "" if p.tokens_per_cycle is None else f"{p.tokens_per_cycle:.2f}",
            "by position": " ".join(f"{r:.2f}" for r in (p.accept_rate_by_position or [])[:8]),
            "decode ms": _quantity(p.decode_ms),
            "cycle ms": _quantity(p.cycle_ms),
            "verify ms": _quantity(p.verify_ms),
            "draft ms": _quantity(p.draft_ms),
            "extend ms": _quantity(p.extend_ms),
            "tokens/s": _quantity(p.tokens_per_s),
            "graph": "" if p.cuda_graph is None else "yes" if p.cuda_graph else "no",
        }
        for p in points
    ]
    columns = [c for c in rows[0] if any(row[c] for row in rows)] if rows else []
    table = _table(columns)
    for row in rows:
        table.add_row(*(row[c] for c in columns))
    return table


def _show_samples(out: Console, record: Record) -> None:
    """Kernel classes by phase, then all-reduces by size."""
    kernels = [s for s in record.samples if "total_ms" in s]
    if kernels:
        table = _table(["phase", "kernels", "count", "total ms", "mean us", "graph", "longest"])
        for row in kernels[: 3 * SHOWN]:
            share = f"{row['in_graph'] / row['count']:.0%}"
            time = f"{row['total_ms']:.3f}"
            table.add_row(
                row["phase"],
                row["operator"],
                f"{row['count']:,}",
                time,
                f"{row['mean_us']:.2f}",
                share,
                row["top"][:50],
            )
        out.print(table)
    reduces = [
        s for s in record.samples if s.get("operator") in ("allreduce", "allreduce by size") and "total_ms" not in s
    ]
    if reduces:
        table = _table(["bytes", "ranks", "all-reduce us", "count"])
        for row in reduces[: 3 * SHOWN]:
            microseconds = row.get("us", row.get("median_us"))
            table.add_row(
                _text(row.get("bytes")), _text(row.get("ranks")), f"{microseconds:.1f}", _text(row.get("count"))
            )
        out.print(table)
    for row in (s for s in record.samples if s.get("operator") == "cuda graph"):
        out.print(f"  graph of {row['kernels']:,} kernels: {row['launches']} launches, {row['median_ms']:.3f} ms")
    if "idle_share" in record.environment:
        idle = record.environment
        out.print(
            f"  GPU idle {idle['idle_share']:.0%} of {idle['span_ms']:.1f} ms; {idle['gaps_over_20_us']} gaps above 20 us"
        )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _quantity(q: Quantity | None) -> str:
    """Value and 80 % interval, at the digits that the interval allows."""
    from specsim.quantities import decimals

    if q is None:
        return ""
    if q.low is None or q.high is None or q.low == q.high:
        return f"{q.value:,.4g}" if abs(q.value) < 1e4 else f"{q.value:,.0f}"
    places = decimals((q.high - q.low) / 2)
    return f"{q.value:,.{places}f} ({q.low:,.{places}f} to {q.high:,.{places}f})"
