"""Records for people: their points, kernels, all-reduces, and what contradicts what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specsim.observe_checks import CONTRADICTION
from specsim.pages import Grid, Line, Page, grid
from specsim.quantities import counted, decimals, short
from specsim.records import Point, Quantity, Record

SHOWN = 12  # rows of a table; --json has all


def page(records: Sequence[Record], found: Sequence[str] = ()) -> Page:
    """Records as people see them; `found`: where they contradict each other or themselves."""
    for record in records:
        yield from _record(record)
    for text in found:
        yield Line(text, "alarm" if CONTRADICTION in text else "warning")


def _record(record: Record) -> Iterator[Line | Grid]:
    engine = record.engine
    version = f" ({engine.version})" if engine and engine.version and engine.name != "other" else ""
    yield Line(f"{record.source}: {record.name}{version}", "title")
    table = _points(record.points[:SHOWN])
    if table.columns:
        yield table
    links = {k: v for k, v in record.environment.items() if k == "p2p" or k.endswith(("_gb_s", "_us"))}
    for key, value in links.items():
        yield Line(f"  {key.replace('gb_s', 'GB/s').replace('_', ' ')}: {_text(value)}")
    if not (table.columns or record.samples or links):
        yield Line("  no step time, acceptance or all-reduce in it")
    if len(record.points) > SHOWN:
        yield Line(f"and {counted(len(record.points) - SHOWN, 'more point')}; --json has all", "faint")
    yield from _samples(record)
    for text in dict.fromkeys(n for p in record.points[:SHOWN] for n in p.notes):
        yield Line(f"  {text}", "faint")
    for text in record.method.split("; ") if record.method else []:
        yield Line(f"  taken: {text}", "faint")
    for text in record.caveats:
        if not text.startswith(CONTRADICTION):
            yield Line(f"  note: {text}", "warning")
    yield Line()


def _points(points: Sequence[Point]) -> Grid:
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
    heads = [c if c == "graph" else f">{c}" for c in columns]
    return grid(heads, [[row[c] for c in columns] for row in rows], keys=len({"batch", "context"} & set(columns)))


def _samples(record: Record) -> Iterator[Line | Grid]:
    """Kernel classes by phase, then all-reduces by size."""
    kernels = [s for s in record.samples if "total_ms" in s]
    if kernels:
        shown = [
            (s["phase"], s["operator"], f"{s['count']:,}", f"{s['total_ms']:.3f}", f"{s['mean_us']:.2f}", _share(s), s["top"][:50])
            for s in kernels[: 3 * SHOWN]
        ]  # fmt: skip
        yield grid(("phase", "kernels", ">count", ">total ms", ">mean us", "graph", "~longest"), shown, keys=2)
    sizes = ("allreduce", "allreduce by size")
    reduces = [s for s in record.samples if s.get("operator") in sizes and "total_ms" not in s]
    if reduces:
        by_size = [
            (_text(s.get("bytes")), _text(s.get("ranks")), f"{s.get('us', s.get('median_us')):.1f}", _text(s.get("count")))
            for s in reduces[: 3 * SHOWN]
        ]  # fmt: skip
        yield grid((">bytes", ">ranks", ">all-reduce us", ">count"), by_size)
    for s in record.samples:
        if s.get("operator") == "cuda graph":
            yield Line(f"  graph of {s['kernels']:,} kernels: {s['launches']} launches, {s['median_ms']:.3f} ms")
    if "idle_share" in record.environment:
        idle = record.environment
        gaps = f"{idle['gaps_over_20_us']} gaps above 20 us"
        yield Line(f"  GPU idle {idle['idle_share']:.0%} of {idle['span_ms']:.1f} ms; {gaps}")


def _share(kernels: dict[str, Any]) -> str:
    """Of the kernels, how many a graph launched; empty where the trace does not tell."""
    return "" if kernels.get("in_graph") is None else f"{kernels['in_graph'] / kernels['count']:.0%}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _quantity(q: Quantity | None) -> str:
    """Value and 80 % interval, at the digits that the interval allows."""
    if q is None:
        return ""
    if q.low is None or q.high is None or q.low == q.high:
        return short(q.value)
    places = decimals((q.high - q.low) / 2)
    return f"{q.value:,.{places}f} ({q.low:,.{places}f} to {q.high:,.{places}f})"
