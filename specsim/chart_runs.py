"""Charts of runs: a simulation's latencies and timeline, and predictions beside measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specsim.chart_style import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    VERMILION,
    Chart,
    Spec,
    at,
    axis,
    by_legend,
    chooser,
    colours,
    dashes,
    few,
    shapes,
    spec_of,
    table_of,
    tips,
)

Document = Mapping[str, Any]
MOST_POINTS = 3000
LATENCIES = {
    "ttft": "TTFT",
    "queue_time": "of it in the queue",
    "tpot": "TPOT",
    "itl": "ITL, per token",
    "itl_chunk": "ITL, per chunk",
    "e2e_latency": "end to end",
}
PERCENTILES = {"median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
LARGE = ("decode", "verify", "cycle")  # phases whose error in percent matters
TIMES = ("decode", "draft", "verify", "extend", "host", "cycle")
UNDER_LOAD = ("ttft_median", "tpot_median", "tpot_p99")  # of the requests of a run by the clock


def simulation_charts(document: Document) -> list[Chart]:
    """Of specsim.simulation/1."""
    return [latency_chart(document), load_chart(document), rate_chart(document)]


def latency_rows(document: Document) -> list[dict[str, Any]]:
    """Percentiles of every latency that some request had, ms."""
    return [
        {"latency": name, "percentile": label, "ms": document[f"{what}_{key}_ms"]}
        for key, name in LATENCIES.items()
        for what, label in PERCENTILES.items()
        if f"{what}_{key}_ms" in document
    ]


def latency_chart(document: Document) -> Chart:
    """Percentiles on one logarithmic axis, with the targets."""
    rows = latency_rows(document)
    about = "Percentiles of the latencies of all requests; a bar is a target. A time of 0 has no place on this axis."
    names = list(dict.fromkeys(r["latency"] for r in rows))
    y = axis("latency", "", "nominal", sort=names, axis={"title": None, "grid": True})
    x = axis("ms", "time, ms", scale={"type": "log", "nice": False, "padding": 14})
    labels = list(PERCENTILES.values())
    limits = [{"latency": LATENCIES[k], "ms": v} for k, v in (document.get("targets_ms") or {}).items()]
    layers: list[Spec] = [
        {"mark": {"type": "line", "color": MUTED, "strokeWidth": 1}, "encoding": {"y": y, "x": x, "detail": {"field": "latency"}}},
        {"mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
         "encoding": {"y": y, "x": x, "color": colours("percentile", labels, dict(zip(labels, (BLUE, GREEN, ORANGE, VERMILION), strict=True))), "shape": shapes("percentile", labels),
                      "tooltip": tips(("latency", "latency"), ("percentile", "percentile"), ("ms", "ms", ",.4~g"))}},
    ]  # fmt: skip
    if limits:
        layers.append({"data": {"values": limits}, "mark": {"type": "tick", "thickness": 3, "size": 22, "color": MUTED},
                       "encoding": {"y": y, "x": {"field": "ms", "type": "quantitative"}, "tooltip": tips(("latency", "target of"), ("ms", "ms", ",.4~g"))}})  # fmt: skip
    more = {"transform": [{"filter": "datum.ms > 0"}]}
    spec = spec_of(rows, about, layers, height=max(80, 36 * len(names)), **more)
    return Chart("latency", "Latencies", about, spec, table_of(rows, {"latency": "latency", "percentile": "percentile", "ms": "ms"}))  # fmt: skip


def timeline_rows(document: Document) -> list[dict[str, Any]]:
    """The timeline, a row a span of time."""
    t = document["timeline"]
    keys = ("running", "waiting", "busy", "output_tokens_per_s")
    return [
        {"s": round(i * t["span_s"], 6), **dict(zip(keys, values, strict=True))}
        for i, values in enumerate(zip(*(t[k] for k in keys), strict=True))
    ]


def load_chart(document: Document) -> Chart:
    """Requests running and waiting over time."""
    spans = timeline_rows(document)
    about = f"Requests that ran and that waited, means over {document['timeline']['span_s']:.3g} s."
    rows = [{"s": r["s"], "what": what, "requests": r[what]} for r in spans for what in ("running", "waiting")]
    x, y = axis("s", "time, s"), axis("requests", "requests")
    names = ["running", "waiting"]
    tooltip = tips(("s", "s", ",.4~g"), ("what", ""), ("requests", "requests", ".3~g"))
    layers: list[Spec] = [
        {"params": [by_legend("what")], "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5, "tooltip": True},
         "encoding": {"x": x, "y": y, "color": colours("what", names), "strokeDash": dashes("what", names), "tooltip": tooltip}},
        *([{"mark": {"type": "point", "filled": True}, "encoding": {"x": x, "y": y, "color": colours("what", names), "tooltip": tooltip}}] if len(spans) < 3 else []),
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, height=220)
    return Chart(
        "load",
        "Batch and queue",
        about,
        spec,
        table_of(spans, {"s": "from, s", "running": "running", "waiting": "waiting"}),
    )


def rate_chart(document: Document) -> Chart:
    """Output tokens a second over time."""
    rows = timeline_rows(document)
    about = f"Output tokens a second over the run, means over {document['timeline']['span_s']:.3g} s."
    x, y = axis("s", "time, s"), axis("output_tokens_per_s", "output tokens a second")
    tooltip = tips(("s", "s", ",.4~g"), ("output_tokens_per_s", "tokens/s", ",.4~g"), ("busy", "busy", ".0%"))
    layers: list[Spec] = [
        {"mark": {"type": "area", "interpolate": "step-after", "color": GREEN, "opacity": 0.35, "line": {"color": GREEN, "strokeWidth": 1.5}},
         "encoding": {"x": x, "y": y, "tooltip": tooltip}},
        *([{"mark": {"type": "point", "filled": True, "color": GREEN}, "encoding": {"x": x, "y": y, "tooltip": tooltip}}] if len(rows) < 3 else []),
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, height=180)
    return Chart("rate", "Throughput", about, spec, table_of(rows, {"s": "from, s", "output_tokens_per_s": "output tokens/s", "busy": "share busy"}))  # fmt: skip


def validation_charts(document: Document) -> list[Chart]:
    """Of specsim.validation/1: step times, and the latencies of runs under load."""
    steps, loads = (times_of(document, phases) for phases in (TIMES, UNDER_LOAD))
    charts = [agreement_chart(steps, TIMES), residual_chart(steps)] if steps else []
    if loads:
        charts.append(agreement_chart(loads, UNDER_LOAD, "load", "Under load, predicted against observed"))
    return charts


def times_of(document: Document, phases: Sequence[str]) -> list[dict[str, Any]]:
    """The points of some phases, ms, where both times are above 0."""
    return [dict(p) for p in document["points"] if p["phase"] in phases and p["observed"] > 0 and p["predicted"] > 0]


def agreement_chart(
    points: list[dict[str, Any]],
    order: Sequence[str],
    key: str = "agreement",
    title: str = "Predicted against observed",
) -> Chart:
    """Predicted against observed, with intervals and the diagonal."""
    rows, note = few(points, MOST_POINTS)
    about = f"Predicted against observed times; lines are 80 % intervals, and on the diagonal both agree.{note}"
    phases = [p for p in order if any(r["phase"] == p for r in rows)]
    values = [v for r in rows for v in (r["observed"], r["predicted"])]
    ends = [{"observed": v, "predicted": v} for v in (min(values) * 0.8, max(values) * 1.25)]
    scale = {"type": "log", "domain": [ends[0]["observed"], ends[1]["observed"]], "nice": False}
    x, y = axis("observed", "observed, ms", scale=scale), axis("predicted", "predicted, ms", scale=scale)
    bounded = [{**r, "low": max(r["low"], ends[0]["observed"])} for r in rows]
    colour = colours("phase", phases)
    layers: list[Spec] = [
        {"data": {"values": ends}, "mark": {"type": "line", "color": MUTED, "strokeWidth": 1}, "encoding": {"x": x, "y": y}},
        {"mark": {"type": "rule", "opacity": 0.5, "clip": True}, "encoding": {"x": x, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}, "color": colour}},
        {"params": [by_legend("phase")], "mark": {"type": "point", "filled": True, "size": 45},
         "encoding": {"x": x, "y": y, "color": colour, "shape": shapes("phase", phases), "opacity": {"condition": {"param": "picked", "value": 0.85}, "value": 0.08},
                      "tooltip": _point_tips()}},
    ]  # fmt: skip
    spec = spec_of(bounded, about, layers, height=380)
    columns = {"record": "record", "phase": "phase", "batch": "batch", "context": "context", "observed": "observed, ms", "predicted": "predicted, ms",
               "low": "80 % from", "high": "to", "error": "error", "covered": "in the interval"}  # fmt: skip
    return Chart(key, title, about, spec, table_of(rows, columns))


def residual_chart(points: list[dict[str, Any]]) -> Chart:
    """Errors in percent over the observed time."""
    rows, note = few([{**p, "percent": 100 * p["error"]} for p in points], MOST_POINTS)
    about = f"Error of each prediction over the observed time; above 0 specsim was too slow.{note}"
    phases = [p for p in TIMES if any(r["phase"] == p for r in rows)]
    large = [p for p in LARGE if p in phases]
    more: Spec = {}
    if large and large != phases:
        named = ", ".join(large)
        more = {"params": [chooser("shown", "phases", [named, "all"], named)],
                "transform": [{"filter": f"shown === 'all' || indexof({large!r}, datum.phase) >= 0"}]}  # fmt: skip
    x = axis("observed", "observed, ms", scale={"type": "log", "nice": False, "padding": 12})
    layers: list[Spec] = [
        at(0.0, color=MUTED),
        {"mark": {"type": "point", "filled": True, "size": 45, "opacity": 0.85},
         "encoding": {"x": x, "y": axis("percent", "error, %"), "color": colours("phase", phases), "shape": shapes("phase", phases), "tooltip": _point_tips()}},
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, **more)
    columns = {"record": "record", "phase": "phase", "batch": "batch", "context": "context", "observed": "observed, ms", "percent": "error, %"}  # fmt: skip
    return Chart("residuals", "Errors", about, spec, table_of(rows, columns))


def _point_tips() -> list[Spec]:
    return tips(("record", "record"), ("phase", "phase"), ("batch", "batch"), ("context", "context"), ("observed", "observed, ms", ".4~g"),
                ("predicted", "predicted, ms", ".4~g"), ("error", "error", "+.1%"))  # fmt: skip
