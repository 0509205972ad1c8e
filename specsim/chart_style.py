"""What all charts share: one palette, one look, and the pair of a Vega-Lite specification and the table of the same data.

The palette is Okabe and Ito's (https://jfly.uni-koeln.de/color), which people with any kind of colour blindness can tell
apart. Text, axes and grid take the page's own colours through CSS variables, so that one specification serves light, dark
and print; without them the fallbacks are those of a light page. Specifications never name a network address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name: nothing fetches it
Spec = dict[str, Any]
Row = Mapping[str, Any]

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#8C8C8C"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY, YELLOW)
TEXT, MUTED, GRID, PAGE = (
    "var(--text, #1b1b1b)",
    "var(--muted, #595959)",
    "var(--grid, #dcdcdc)",
    "var(--page, #ffffff)",
)

COMPONENTS = {
    "gemm": BLUE,
    "attention": SKY,
    "experts": GREEN,
    "allreduce": VERMILION,
    "small_kernels": ORANGE,
    "lm_head": PURPLE,
    "launch": YELLOW,
    "host": GREY,
}
WORDS = {"gemm": "GEMM", "allreduce": "all-reduce", "small_kernels": "small kernels", "lm_head": "LM head"}
PHASES = {"decode": "plain decode", "draft": "draft", "verify": "verify", "extend": "draft extend", "host": "host"}
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-left", "triangle-right")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 2], [1, 3], [10, 4], [3, 5])
_WORDS = {"labelColor": TEXT, "titleColor": TEXT, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
CONFIG: Spec = {  # Vega-Lite's: the look of everything that is no data
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {**_WORDS, "domainColor": MUTED, "tickColor": MUTED, "gridColor": GRID, "labelLimit": 220, "titlePadding": 8, "labelFlush": False, "labelSeparation": 6},
    "axisQuantitative": {"tickCount": 7},
    "legend": {**_WORDS, "orient": "bottom", "title": None, "columns": {"expr": "max(1, floor((containerSize()[0] - 90) / 110) || 2)"}, "symbolStrokeColor": MUTED, "symbolOpacity": 1, "symbolBaseFillColor": TEXT, "symbolBaseStrokeColor": TEXT, "layout": {"bottom": {"direction": "vertical", "anchor": "start"}}, "labelLimit": 260},
    "text": {"color": TEXT, "fontSize": 12},
    "rule": {"color": TEXT},
    "range": {"category": list(PALETTE)},
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows of one chart in words and numbers, for those who cannot see it; None is an empty cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A chart: `key` names it within its document, `about` says in one sentence what it shows, `spec` is a Vega-Lite
    specification with its data, `table` the same data."""

    key: str
    title: str
    about: str
    spec: Spec
    table: Table

    def json(self) -> dict[str, Any]:
        """As a page takes it."""
        table = {"columns": self.table.columns, "rows": self.table.rows}
        return {"key": self.key, "title": self.title, "about": self.about, "spec": self.spec, "table": table}


def table_of(rows: Iterable[Row], columns: Mapping[str, str]) -> Table:
    """A table of rows: `columns` maps a key to its heading."""
    return Table(tuple(columns.values()), tuple(tuple(map(row.get, columns)) for row in rows))


def spec_of(rows: Sequence[Row], about: str, layers: Sequence[Spec], *, height: Any = 280, **more: Any) -> Spec:
    """A layered chart over `rows`, as wide as its place in the page."""
    return {
        "$schema": SCHEMA,
        "description": about,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": rows},
        "layer": list(layers),
        "config": CONFIG,
        **more,
    }


def axis(field: str, title: str, kind: str = "quantitative", **more: Any) -> Spec:
    """An x or y channel. The title ends with the unit."""
    return {"field": field, "type": kind, "title": title, **more}


def colours(field: str, names: Sequence[str], chosen: Mapping[str, str] | None = None, **more: Any) -> Spec:
    """A colour channel: each name keeps its colour in every chart, whichever others are there."""
    values = [(chosen or {}).get(name, PALETTE[i % len(PALETTE)]) for i, name in enumerate(names)]
    return {"field": field, "type": "nominal", "scale": {"domain": list(names), "range": values}, **more}


def shapes(field: str, names: Sequence[str]) -> Spec:
    """A shape channel beside the colours, so that a print in grey can be read."""
    return {"field": field, "type": "nominal", "scale": {"domain": list(names), "range": [SHAPES[i % len(SHAPES)] for i in range(len(names))]}}  # fmt: skip


def dashes(field: str, names: Sequence[str]) -> Spec:
    """A dash channel beside the colours of lines: one that lies on another lets it show through, since only the first is whole."""
    return {"field": field, "type": "nominal", "scale": {"domain": list(names), "range": [DASHES[i % len(DASHES)] for i in range(len(names))]}}  # fmt: skip


def widths(field: str, names: Sequence[str]) -> Spec:
    """Widths of lines that differ in colour alone, for the same end: the first is the widest, and lies below."""
    thick = [max(4 - 1.5 * i, 1.2) for i in range(len(names))]
    return {"field": field, "type": "ordinal", "scale": {"domain": list(names), "range": thick}, "legend": None}


def few(rows: Sequence[Row], most: int) -> tuple[list[Row], str]:
    """The first rows, and a sentence when they are not all."""
    note = f" Shown are the first {most:,} of {len(rows):,} points." if len(rows) > most else ""
    return list(rows[:most]), note


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the values, evenly, ends included."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def tips(*fields: tuple[str, str] | tuple[str, str, str]) -> list[Spec]:
    """A tooltip: (field, heading) or (field, heading, number format)."""
    return [
        {"field": f, "title": heading, **({"format": form[0], "type": "quantitative"} if form else {"type": "nominal"})}
        for f, heading, *form in fields
    ]


def chooser(name: str, label: str, options: Sequence[Any], value: Any) -> Spec:
    """A choice that the reader makes, as a select box under the chart; expressions know it by `name`."""
    return {"name": name, "value": value, "bind": {"input": "select", "options": list(options), "name": f"{label} "}}


def by_legend(field: str) -> Spec:
    """A click on the legend brings out one of its names."""
    return {"name": "picked", "select": {"type": "point", "fields": [field]}, "bind": "legend"}


FADED = {"condition": {"param": "picked", "value": 1}, "value": 0.15}


def at(value: float, channel: str = "y", **mark: Any) -> Spec:
    """A line across the chart at one value."""
    return {"data": {"values": [{}]}, "mark": {"type": "rule", "strokeDash": [4, 4], **mark}, "encoding": {channel: {"datum": value}}}  # fmt: skip
