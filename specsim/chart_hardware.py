"""Charts of hardware: all-reduce curves of one box or several, and how far their numbers lie apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from specsim.chart_style import (
    BLUE,
    FADED,
    MUTED,
    VERMILION,
    Chart,
    Spec,
    at,
    axis,
    by_legend,
    chooser,
    colours,
    dashes,
    shapes,
    spec_of,
    table_of,
    tips,
    widths,
)

Document = Mapping[str, Any]
SIZE = "datum.value >= 1048576 ? datum.value / 1048576 + ' MB' : datum.value >= 1024 ? datum.value / 1024 + ' KB' : datum.value + ' B'"
HEAVY, LIGHT = "more than 5 % of a step", "less"
NAMED = 24  # numbers with a bar; the table has all


def hardware_charts(document: Document) -> list[Chart]:
    """Of specsim.hardware/1."""
    charts = [curves_chart(rows)] if (rows := curve_rows(document, document["name"])) else []
    return [*charts, operators_chart(document)]


def diff_charts(document: Document) -> list[Chart]:
    """Of specsim.hardware-diff/1."""
    rows = [r for curves in document.get("allreduce") or [] for r in curve_rows(curves, curves["name"])]
    charts = [curves_chart(rows)] if rows else []
    pairs = [{"a": document["a"], **pair} for pair in (document, *document.get("more", []))]
    made = [apart_chart(pair, i) for i, pair in enumerate(pairs) if any(_bar(d) for d in pair["differences"])]
    return [*charts, *made]


def calibration_charts(document: Document) -> list[Chart]:
    """Of specsim.calibration/1: those of the profile that it wrote."""
    return hardware_charts({**document, "name": box_of(document)})


def box_of(document: Document) -> str:
    """The name of the profile that a calibration wrote."""
    return PurePath(document["profile"]).stem


def agreement_charts(document: Document) -> list[Chart]:
    """Of specsim.hardware-agreement/1."""
    return [effects_chart(document)] if any(n["effect"] is not None for n in document["numbers"]) else []


def curve_rows(document: Document, box: str) -> list[dict[str, Any]]:
    """Every point of a box's all-reduce curves."""
    return [
        {"box": box, "way": f"{c['implementation']}, {c['mode']}", "ranks": c["ranks"], "kind": c["source"]["kind"],
         "bytes": size, "us": us, "low": us * (1 - min(c["relative_uncertainty"], 0.9)), "high": us * (1 + c["relative_uncertainty"])}
        for c in document.get("allreduce") or []
        for size, us in zip(c["bytes"], c["latency_us"], strict=True)
    ]  # fmt: skip


def curves_chart(rows: list[dict[str, Any]]) -> Chart:
    """Latency over message size, log-log, at the ranks that the reader chooses; a colour a box where there are two."""
    about = "All-reduce latency by message size, a line an implementation and mode (graph: inside a CUDA graph); bands are one standard deviation."
    ways = list(dict.fromkeys(r["way"] for r in rows))
    boxes = list(dict.fromkeys(r["box"] for r in rows))
    ranks = sorted({r["ranks"] for r in rows}, reverse=True)
    x = axis(
        "bytes",
        "message, bytes a rank",
        scale={"type": "log", "base": 2, "nice": False},
        axis={"labelExpr": SIZE, "tickCount": 8},
    )
    y = axis("us", "latency, us", scale={"type": "log", "nice": False, "padding": 10})
    colour = colours("box", boxes) if len(boxes) > 1 else colours("way", ways)
    each = {"detail": [{"field": "box"}, {"field": "way"}]}
    dash = dashes("way", ways)
    wide: Spec = {"strokeWidth": widths("box", boxes)} if len(boxes) > 1 else {}
    layers: list[Spec] = [
        {"mark": {"type": "area", "opacity": 0.12}, "encoding": {"x": x, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}, "color": colour, **each}},
        {"params": [by_legend(colour["field"])], "mark": {"type": "line", "strokeWidth": 2}, "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dash, "opacity": FADED, **wide, **each}},
        {"mark": {"type": "point", "filled": True, "size": 50}, "encoding": {"x": x, "y": y, "color": colour, "shape": shapes("way", ways), "opacity": FADED,
         "tooltip": tips(("box", "box"), ("way", "all-reduce"), ("ranks", "ranks"), ("bytes", "bytes"), ("us", "us", ".4~g"), ("kind", "source"))}},
    ]  # fmt: skip
    more: Spec = {}
    if len(ranks) > 1:
        more = {
            "params": [chooser("ranks", "ranks", ranks, ranks[0])],
            "transform": [{"filter": "datum.ranks === ranks"}],
        }
    spec = spec_of(rows, about, layers, height=320, **more)
    spec["config"]["legend"]["columns"] = {"expr": "max(1, floor((containerSize()[0] - 60) / 150) || 1)"}
    columns = {
        "box": "box",
        "way": "all-reduce",
        "ranks": "ranks",
        "bytes": "bytes",
        "us": "latency, us",
        "kind": "source",
    }
    return Chart("allreduce", "All-reduce curves", about, spec, table_of(rows, columns))


def operators_chart(document: Document) -> Chart:
    """Fixed time of the operator classes; bandwidth is in the table."""
    rows = [
        {"name": name, "fixed_us": o["fixed_us"], "inner_ns": o.get("inner_ns") or None, "bandwidth_gb_s": o["bandwidth_gb_s"], "peak_tflops": o.get("peak_tflops"),
         "uncertainty": o["relative_uncertainty"], "kind": o["source"]["kind"], "low": o["fixed_us"] * (1 - min(o["relative_uncertainty"], 1)),
         "high": o["fixed_us"] * (1 + o["relative_uncertainty"])}
        for name, o in document["operators"].items()
    ]  # fmt: skip
    about = "Time that each operator class takes whatever its size, with one standard deviation; its bandwidth is in the table."
    y = axis(
        "name", "", "nominal", sort=[r["name"] for r in rows], axis={"title": None, "domain": False, "ticks": False}
    )
    layers: list[Spec] = [
        {"mark": {"type": "bar", "color": BLUE, "height": {"band": 0.6}}, "encoding": {"y": y, "x": axis("fixed_us", "fixed time, us"),
         "tooltip": tips(("name", "class"), ("fixed_us", "fixed, us", ".4~g"), ("bandwidth_gb_s", "GB/s", ",.4~g"), ("kind", "source"))}},
        {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": {"y": y, "x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}}},
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, height=max(60, 22 * len(rows)))
    columns = {"name": "operator class", "fixed_us": "fixed, us", "inner_ns": "inner, ns a value", "bandwidth_gb_s": "GB/s", "peak_tflops": "TFLOPS", "uncertainty": "+-", "kind": "source"}  # fmt: skip
    return Chart("operators", "Operator classes", about, spec, table_of(rows, columns))


def _bar(difference: Mapping[str, Any]) -> bool:
    """Whether a number gets a bar: those of all-reduce curves are in their own chart."""
    return bool(difference["relative"]) and not difference["key"].startswith("allreduce.")


def _name(key: str) -> str:
    """A number's key in fewer letters: "operators.norm.bandwidth_gb_s" is "norm GB/s"."""
    short = (
        key.removeprefix("operators.")
        .replace("bandwidth_gb_s", "GB/s")
        .replace("_us", " us")
        .replace("_tflops", " TFLOPS")
    )
    return short.replace("_gb", " GB").replace("_mb", " MB").replace(".", " ")


def apart_chart(document: Document, number: int = 0) -> Chart:
    """Bars of how far the numbers lie apart, the farthest first."""
    known = [
        {"key": d["key"], "name": _name(d["key"]), "a": d["a"], "b": d["b"], "percent": 100 * d["relative"]}
        for d in document["differences"]
        if _bar(d)
    ]
    rows = sorted(known, key=lambda r: -abs(r["percent"]))[:NAMED]
    more = f" The {NAMED} farthest of {len(known)}." if len(known) > NAMED else ""
    about = f"Numbers of {document['b']} relative to those of {document['a']}.{more}"
    y = axis(
        "name",
        "",
        "nominal",
        sort=[r["name"] for r in rows],
        axis={"title": None, "domain": False, "ticks": False, "labelLimit": 190},
    )
    layers: list[Spec] = [
        {"mark": {"type": "bar", "height": {"band": 0.6}},
         "encoding": {"y": y, "x": axis("percent", f"{document['b']} over {document['a']}, %"),
                      "color": {"condition": {"test": "datum.percent > 0", "value": VERMILION}, "value": BLUE},
                      "tooltip": tips(("key", "number"), ("a", document["a"], ",.4~g"), ("b", document["b"], ",.4~g"), ("percent", "%", "+.1f"))}},
        at(0.0, "x", color=MUTED, strokeDash=[1, 0]),
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, height=max(60, 22 * len(rows)))
    table = table_of(({**d, "percent": None if d["relative"] is None else 100 * d["relative"]} for d in document["differences"]),
                     {"key": "number", "a": document["a"], "b": document["b"], "percent": "apart, %"})  # fmt: skip
    title = f"How far {document['b']} is from {document['a']}"
    return Chart("apart" if not number else f"apart-{number}", title, about, spec, table)


def weighed_rows(document: Document) -> list[dict[str, Any]]:
    """Every weighed number, its differences in per cent."""
    return [
        {**n, "name": _name(n["key"]), "change": None if n["effect"] is None else 100 * n["effect"],
         "percent": None if n["relative"] is None else 100 * n["relative"], "share": 100 * abs(n["part"]),
         "which": HEAVY if n["matters"] else LIGHT}
        for n in document["numbers"]
    ]  # fmt: skip


def effect_rows(document: Document) -> list[dict[str, Any]]:
    """Those that both boxes have, what changes a step most first; as many as get a bar."""
    known = (r for r in weighed_rows(document) if r["change"] is not None)
    return sorted(known, key=lambda r: -abs(r["change"]))[:NAMED]


def effects_chart(document: Document) -> Chart:
    """Bars of what each number of the second box would change of a step of the first, the largest first."""
    a, b = document["a"], document["b"]
    rows = effect_rows(document)
    about = f"By how many per cent a step of {a} changes with each number of {b} in its place."
    y = axis("name", "", "nominal", sort=[r["name"] for r in rows], axis={"title": None, "domain": False, "ticks": False, "labelLimit": 190})  # fmt: skip
    layers: list[Spec] = [
        {"mark": {"type": "bar", "height": {"band": 0.6}},
         "encoding": {"y": y, "x": axis("change", "change of the step, %"), "color": colours("which", [HEAVY, LIGHT], {HEAVY: VERMILION, LIGHT: BLUE}),
                      "tooltip": tips(("key", "number"), ("a", a, ",.4~g"), ("b", b, ",.4~g"), ("percent", "apart, %", "+.1f"), ("share", "part of the step, %", ".1f"), ("change", "change of the step, %", "+.2f"))}},
        at(0.0, "x", color=MUTED, strokeDash=[1, 0]),
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, height=max(60, 22 * len(rows)))
    columns = {"key": "number", "a": a, "b": b, "percent": "apart, %", "share": "part of the step, %", "change": "change of the step, %"}  # fmt: skip
    return Chart("effects", "What the differences do to a step", about, spec, table_of(weighed_rows(document), columns))
