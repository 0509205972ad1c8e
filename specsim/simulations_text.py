"""Simulations for people: a table with a row each."""

from __future__ import annotations

from specsim.pages import Line, Page, grid
from specsim.quantities import short
from specsim.simulations import Simulations

COLUMNS = {
    ">request_throughput": "req/s", ">output_throughput": "tokens/s", ">request_goodput": "in target/s", ">mean_ttft_ms": "TTFT ms",
    ">p99_ttft_ms": "p99", ">mean_tpot_ms": "TPOT ms", ">p99_tpot_ms": "p99", ">mean_decode_batch": "batch", ">utilisation": "busy",
}  # fmt: skip
ROWS, NOTES = 200, 10  # that are shown


def page(found: Simulations) -> Page:
    """The simulations as people see them."""
    yield Line(f"{len(found.rows):,} simulation{'s'[: len(found.rows) > 1]}", "title")
    yield Line(found.verdict(), "verdict")
    yield Line()
    done = found.finished
    columns = {name: title for name, title in COLUMNS.items() if any(row.get(name[1:]) is not None for row in done)}
    shown = done[:ROWS]
    titles = (*(f">{name.replace('_', ' ')}" for name in found.varied), *(f">{title}" for title in columns.values()))
    cells = [
        (*(_cell(row[name]) for name in found.varied), *(_cell(row[name[1:]]) for name in columns)) for row in shown
    ]
    yield grid(titles, cells)
    if len(done) > ROWS:
        yield Line(f"{len(done) - ROWS:,} more: --json or --out holds them", "faint")
    if found.out is not None:
        yield Line(f"rows: {found.out}")
    for warning in found.warnings[:NOTES]:
        yield Line(f"note: {warning}", "warning")
    if len(found.warnings) > NOTES:
        yield Line(f"note: {len(found.warnings) - NOTES:,} more: --json holds them", "warning")
    failed = [row for row in found.rows if row["error"] is not None]
    for row in failed[:NOTES]:
        at = ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in found.varied)
        yield Line(f"note: left out {at}: {row['error']}", "warning")
    if len(failed) > NOTES:
        yield Line(f"note: left out {len(failed) - NOTES:,} more: --json or --out says why", "warning")


def _cell(value: object) -> str:
    return short(value) if isinstance(value, (int, float)) else "" if value is None else str(value)
