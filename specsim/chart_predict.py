"""Charts of a prediction: where the time goes, and what acceptance is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.chart_style import (
    BLUE,
    COMPONENTS,
    FADED,
    GREY,
    PAGE,
    PHASES,
    TEXT,
    VERMILION,
    WORDS,
    Chart,
    Row,
    at,
    axis,
    by_legend,
    colours,
    spec_of,
    table_of,
    tips,
)

Document = Mapping[str, Any]
LETTERED = (
    "scale('x', datum.end) - scale('x', datum.start) > 7 * length(format(datum.ms, '.3~g')) + 3"  # pixels: it fits
)


def prediction_charts(document: Document) -> list[Chart]:
    """Of specsim.prediction/1. Without speculation there is only the decode step."""
    curve = speedups(document)
    return [time_chart(document), *([speedup_chart(document, curve)] if curve else [])]


def parts(document: Document) -> list[dict[str, Any]]:
    """The breakdown, a row a phase and component that take time: where it starts and ends in its phase's bar, ms."""
    ends: dict[str, float] = {}
    out = []
    for part in document["breakdown"]:
        phase, component, ms = part["phase"], part["component"], part["ms"]
        start = ends.get(phase, 0.0)
        ends[phase] = end = start + ms
        if ms > 0:
            bar, words = PHASES.get(phase, phase), WORDS.get(component, component)
            out.append({**part, "bar": bar, "part": words, "start": start, "end": end})
    return out


def totals(document: Document) -> list[dict[str, Any]]:
    """Every phase with its interval, ms."""
    return [
        {"bar": name, **document[f"{phase}_ms"]}
        for phase, name in PHASES.items()
        if document.get(f"{phase}_ms") is not None
    ]


def time_chart(document: Document) -> Chart:
    """Stacked bars of the phases by component."""
    rows = parts(document)
    about = "Milliseconds of each phase by component; a verify does the work of a decode step for more rows. The line under a bar is its 80 % interval."
    there = {r["component"] for r in rows}
    names = [*(c for c in COMPONENTS if c in there), *sorted(there.difference(COMPONENTS))]
    shown = {WORDS.get(c, c): COMPONENTS.get(c, GREY) for c in names}
    filled = {r["bar"] for r in rows}
    bars = [bar for bar in PHASES.values() if bar in filled]
    y = axis("bar", "", "nominal", sort=bars, axis={"domain": False, "ticks": False, "title": None})
    stacked = {
        "params": [by_legend("part")],
        "mark": {"type": "bar", "stroke": PAGE, "strokeWidth": 1, "height": {"band": 0.62}},
        "encoding": {
            "y": y,
            "x": axis("start", "time, ms", scale={"nice": True}),
            "x2": {"field": "end"},
            "color": colours("part", list(shown), shown),
            "opacity": FADED,
            "tooltip": tips(("bar", "phase"), ("part", "component"), ("ms", "ms", ".4~g"), ("count", "calls", ",.0f"),
                            ("source", "price is")),
        },
    }  # fmt: skip
    letters = {
        "transform": [{"calculate": "(datum.start + datum.end) / 2", "as": "middle"}],
        "mark": {"type": "text", "fontSize": 11},
        "encoding": {
            "y": y,
            "x": {"field": "middle", "type": "quantitative"},
            "text": {"field": "ms", "format": ".3~g"},
            "color": {"condition": {"test": "datum.component === 'gemm'", "value": "#ffffff"}, "value": "#000000"},
            "opacity": {"condition": {"test": LETTERED, "value": 1}, "value": 0},
        },
    }
    spread = {
        "data": {"values": [t for t in totals(document) if t["bar"] in bars]},
        "mark": {"type": "rule", "color": TEXT, "strokeWidth": 1.5, "yOffset": 18},
        "encoding": {"y": y, "x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"},
                     "tooltip": tips(("bar", "phase"), ("value", "ms", ".4~g"), ("low", "80 % from", ".4~g"), ("high", "to", ".4~g"))},
    }  # fmt: skip
    spec = spec_of(rows, about, [stacked, letters, spread], height=48 * len(bars))
    columns = {
        "bar": "phase",
        "part": "component",
        "ms": "ms",
        "count": "calls",
        "bytes": "bytes",
        "source": "price is",
    }
    return Chart("time", "Where the time goes", about, spec, table_of(rows, columns))


def speedups(document: Document) -> list[dict[str, Any]]:
    """The curve of speedup over accept rate; empty without speculation."""
    return [{"accept_rate": p["accept_rate"], **p["speedup"]} for p in document.get("speedup_by_accept_rate") or []]


def speedup_chart(document: Document, curve: list[dict[str, Any]]) -> Chart:
    """Speedup over acceptance, with the break-even and the drafter that was given."""
    about = "Speedup over plain decoding by accept rate, with its 80 % interval; below 1 speculation loses."
    x = axis(
        "accept_rate",
        "accept rate of a drafted token",
        scale={"domain": [0, 1]},
        axis={"tickCount": 6},
    )
    y = axis("value", "speedup, times plain decoding")
    tooltip = tips(
        ("accept_rate", "accept rate", ".3~f"),
        ("value", "speedup", ".3~f"),
        ("low", "80 % from", ".3~f"),
        ("high", "to", ".3~f"),
    )
    layers = [
        {"mark": {"type": "area", "color": BLUE, "opacity": 0.22, "interpolate": "monotone"},
         "encoding": {"x": x, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}},
        {"mark": {"type": "line", "color": BLUE, "strokeWidth": 2.5, "interpolate": "monotone"}, "encoding": {"x": x, "y": y}},
        {"mark": {"type": "point", "color": BLUE, "filled": True, "size": 40}, "encoding": {"x": x, "y": y, "tooltip": tooltip}},
        at(1.0),
    ]  # fmt: skip
    rate = (document.get("breakeven") or {}).get("accept_rate")
    if rate is not None:
        layers += _breakeven(rate)
    else:
        layers.append(_note(0.02, 1.0, "no accept rate breaks even", "left"))
    if document.get("accept_rate") is not None and document.get("speedup") is not None:
        layers += _given({"accept_rate": document["accept_rate"], **document["speedup"]}, tooltip)
    spec = spec_of(curve, about, layers)
    columns = {"accept_rate": "accept rate", "value": "speedup", "low": "80 % from", "high": "to"}
    return Chart("speedup", "What acceptance is worth", about, spec, table_of(curve, columns))


def _breakeven(rate: Row) -> list[dict[str, Any]]:
    """A mark where speedup is 1, with its interval along the line."""
    row = {**rate, "one": 1.0, "words": f"break-even {rate['value']:.2f}"}
    y = {"field": "one", "type": "quantitative"}
    tooltip = tips(("value", "break-even accept rate", ".3~f"), ("low", "80 % from", ".3~f"), ("high", "to", ".3~f"))
    right = rate["value"] > 0.7
    return [
        {"data": {"values": [row]}, "mark": {"type": "rule", "color": VERMILION, "strokeWidth": 5, "opacity": 0.55},
         "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}, "y": y, "tooltip": tooltip}},
        {"data": {"values": [row]}, "mark": {"type": "point", "shape": "diamond", "filled": True, "size": 130, "color": VERMILION},
         "encoding": {"x": {"field": "value", "type": "quantitative"}, "y": y, "tooltip": tooltip}},
        {"data": {"values": [row]}, "mark": {"type": "text", "dy": -14, "align": "right" if right else "left", "dx": 6 if right else -6},
         "encoding": {"x": {"field": "value", "type": "quantitative"}, "y": y, "text": {"field": "words"}}},
    ]  # fmt: skip


def _given(row: Row, tooltip: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The drafter that was given, with the interval of its speedup."""
    data = {"values": [{**row, "words": f"this drafter {row['value']:.2f}x"}]}
    x = {"field": "accept_rate", "type": "quantitative"}
    right = row["accept_rate"] > 0.7
    return [
        {"data": data, "mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": {"x": x, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}},
        {"data": data, "mark": {"type": "point", "shape": "square", "filled": True, "size": 90, "color": TEXT},
         "encoding": {"x": x, "y": {"field": "value", "type": "quantitative"}, "tooltip": tooltip}},
        {"data": data, "mark": {"type": "text", "align": "right" if right else "left", "dx": -10 if right else 10, "dy": 12},
         "encoding": {"x": x, "y": {"field": "value", "type": "quantitative"}, "text": {"field": "words"}}},
    ]  # fmt: skip


def _note(x: float, y: float, words: str, align: str) -> dict[str, Any]:
    return {"data": {"values": [{}]}, "mark": {"type": "text", "align": align, "dy": -9},
            "encoding": {"x": {"datum": x}, "y": {"datum": y}, "text": {"value": words}}}  # fmt: skip
