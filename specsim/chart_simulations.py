"""Charts of several simulations: latencies and throughput over what varied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.chart_style import Chart, Spec, axis, by_legend, colours, dashes, spec_of, table_of, tips
from specsim.quantities import six

Document = Mapping[str, Any]
Row = dict[str, Any]
# What is drawn: key, title, unit, and the metrics as (name in the rows, what it is called).
METRICS = (
    ("ttft", "Time to first token", "TTFT, ms", (("median_ttft_ms", "median"), ("p99_ttft_ms", "p99"))),
    ("tpot", "Time per output token", "TPOT, ms", (("median_tpot_ms", "median"), ("p99_tpot_ms", "p99"))),
    ("throughput", "Throughput", "requests a second", (("request_throughput", "finished"), ("request_goodput", "within the targets"))),
)  # fmt: skip


def simulations_charts(document: Document) -> list[Chart]:
    """Of specsim.simulations/1."""
    return [chart for key, *_ in METRICS if (chart := metric_chart(document, key))]


def over(document: Document) -> tuple[str, bool]:
    """What the charts go over, and whether it is a number: of what varied, but the seed, a number before words, and that
    with the most values."""
    rows = [row for row in document["rows"] if not row["error"]]

    def telling(name: str) -> tuple[bool, int]:
        values = {row.get(name, 0) if type(row.get(name)) in (int, float) else str(row.get(name)) for row in rows}
        return not any(isinstance(value, str) for value in values), len(values)

    names = [name for name in document["varied"] if name != "seed"] or list(document["varied"]) or ["simulation"]
    name = max(names, key=telling)
    return name, telling(name)[0]


def metric_rows(document: Document, key: str) -> list[Row]:
    """A row a simulation and metric: `x`; `series`, the metric and the other options that varied; `value`; `seed`; and `mean`
    over the seeds, which the lines go through."""
    metrics = next(found for name, _, _, found in METRICS if name == key)
    x, number = over(document)
    others = [name for name in document["varied"] if name not in (x, "seed")]
    rows: list[Row] = []
    for row in document["rows"]:
        if row["error"]:
            continue
        series = ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in others)
        for name, what in metrics:
            if row.get(name) is not None:
                label = ", ".join(filter(None, (what, series)))
                rows.append({"x": row.get(x, 1), "series": label, "value": row[name], "seed": row.get("seed")})
    values: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        values.setdefault((str(row["x"]), row["series"]), []).append(row["value"])
    for row in rows:
        alike = values[str(row["x"]), row["series"]]
        row["mean"] = six(sum(alike) / len(alike))
    return sorted(rows, key=lambda r: r["x"]) if number else rows


def metric_chart(document: Document, key: str) -> Chart | None:
    """One metric over what varied; None where no simulation has it."""
    rows = metric_rows(document, key)
    if not rows:
        return None
    _, title, unit, _ = next(found for found in METRICS if found[0] == key)
    name, number = over(document)
    label = name.replace("_", " ")
    about = f"{title} over {label}; a point is one simulation, a line their mean over the seeds."
    names = list(dict.fromkeys(r["series"] for r in rows))
    x = axis("x", label, "quantitative" if number else "nominal", **({} if number else {"sort": None}))
    tooltip = tips(("series", ""), ("x", label), ("value", unit, ",.4~g"), ("seed", "seed"))
    colour = colours("series", names)
    shade = {"condition": {"param": "picked", "value": 0.9}, "value": 0.1}
    layers: list[Spec] = [
        {"params": [by_legend("series")], "mark": {"type": "point", "filled": True, "size": 50},
         "encoding": {"x": x, "y": axis("value", unit), "color": colour, "opacity": shade, "tooltip": tooltip}},
        {"mark": {"type": "line", "strokeWidth": 1.5},
         "encoding": {"x": x, "y": axis("mean", unit), "color": colour, "opacity": shade,
                      "strokeDash": dashes("series", names)}},
    ]  # fmt: skip
    columns = {"x": label, "series": "of", "seed": "seed", "value": unit}
    return Chart(key, title, about, spec_of(rows, about, layers, height=220), table_of(rows, columns))
