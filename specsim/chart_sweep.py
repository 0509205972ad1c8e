"""Charts of a sweep: best draft length, break-even map, speedup over acceptance, latency against throughput."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from specsim.chart_style import (
    FADED,
    MUTED,
    PALETTE,
    TEXT,
    Chart,
    Row,
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
    thinned,
    tips,
)

Document = Mapping[str, Any]
MOST_ROWS = 2000  # of one chart
LINES = 6  # batches that a chart of curves shows
LOWEST = "lowest"
UNFIT = "too large"


def sweep_charts(document: Document) -> list[Chart]:
    """Of specsim.sweep/1. Without acceptance there is no best draft length; without speculation only step times."""
    cases = {case["case"]: case_words(case) for case in document["cases"]}
    kind = document["axes"]["acceptance"]
    charts = []
    if document.get("best"):
        charts.append(best_chart(document, cases))
    if document.get("breakeven"):
        charts.append(breakeven_chart(document, cases))
    if document.get("best") and kind in ("rate", "length") and len({x["acceptance"] for x in document["best"]}) > 1:
        charts.append(curves_chart(document, cases))
    if document.get("pareto"):
        charts.append(front_chart(document))
    if document.get("rows"):
        charts.append(steps_chart(document))
    return charts


def case_words(case: Row) -> str:
    cut = "".join(
        f" {name} {case[key]}" for name, key in (("EP", "ep"), ("DP", "dp_attention")) if case.get(key, 1) > 1
    )
    return f"{case['model']} on {case['hardware']}, {case['engine']}, TP {case['tp']}{cut}"


def accept_words(value: Any) -> str:
    """An acceptance as people read it: a rate, a length, rates by position or a profile's name."""
    if isinstance(value, list):
        return ", ".join(f"{v:g}" for v in value)
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def best_cells(document: Document, cases: Mapping[int, str]) -> list[dict[str, Any]]:
    """The best setting of every batch, context and acceptance."""
    return [
        {**x, "case": cases[x["case"]], "accept": accept_words(x["acceptance"]),
         "words": UNFIT if x["setting"] == "-" else x["setting"],
         "gain": "" if x["speedup"] is None or x["setting"] == "off" else f"{x['speedup']:.2f}x"}
        for x in document["best"]
    ]  # fmt: skip


def best_chart(document: Document, cases: Mapping[int, str]) -> Chart:
    """A map of the best draft tokens over batch and context."""
    rows, note = few(best_cells(document, cases), MOST_ROWS)
    kind = document["axes"]["acceptance"].replace("_", " ")
    about = f"Draft tokens that give the most tokens a second, with their speedup; off: plain decoding is faster; too large: it does not fit the GPUs.{note}"
    accepts = list(dict.fromkeys(r["accept"] for r in rows))
    choices = _choices(rows, {"case": "scenario", "accept": f"accept {kind}"}, {"accept": accepts[len(accepts) // 2]})
    most = max((r["draft_tokens"] or 1 for r in rows), default=2)
    colour = {
        "condition": [
            {"test": "datum.setting === '-'", "value": "transparent"},
            {"test": "datum.setting === 'off'", "value": "#d9d9d9"},
        ],
        "field": "draft_tokens", "type": "quantitative", "legend": None,
        "scale": {"scheme": "viridis", "domain": [1, max(most, 3)]},
    }  # fmt: skip
    dark = f"datum.setting !== 'off' && datum.setting !== '-' && datum.draft_tokens < {0.65 * max(most, 3):.6g}"
    letters = {
        "condition": [{"test": dark, "value": "#ffffff"}, {"test": "datum.setting === '-'", "value": MUTED}],
        "value": "#000000",
    }
    tooltip = tips(
        ("batch", "batch"), ("context", "context"), ("words", "draft tokens"), ("speedup", "speedup", ".3~f")
    )
    layers = _map_layers(rows, colour, letters, tooltip, ("words", "gain"))
    spec = spec_of(rows, about, layers, height=_height(rows), **choices)
    columns = {"case": "scenario", "accept": f"accept {kind}", "batch": "batch", "context": "context", "words": "draft tokens", "speedup": "speedup"}  # fmt: skip
    return Chart("best", "Best draft length", about, spec, table_of(rows, columns))


def breakeven_cells(document: Document, cases: Mapping[int, str]) -> list[dict[str, Any]]:
    """The accept rate that breaks even: of each setting, and the lowest of all."""
    rows = [
        {**x, "case": cases[x["case"]], "length": x["setting"], "words": f"{x['setting']} tokens"}
        for x in document["breakeven"]
    ]
    lowest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for x in rows:
        place = (x["case"], x["batch"], x["context"])
        if place not in lowest or _rate(x) < _rate(lowest[place]):
            lowest[place] = x
    found = [{**x, "length": LOWEST} for x in lowest.values()]
    return [{**x, "shown": "never" if x["accept_rate"] is None else f"{x['accept_rate']:.2f}"} for x in found + rows]


def _rate(x: Row) -> float:
    return 2.0 if x["accept_rate"] is None else float(x["accept_rate"])


def breakeven_chart(document: Document, cases: Mapping[int, str]) -> Chart:
    """A map of the accept rate that breaks even over batch and context."""
    rows, note = few(breakeven_cells(document, cases), MOST_ROWS)
    about = f"Accept rate from which speculation pays, and the draft tokens that need it; never: no accept rate is enough.{note}"
    choices = _choices(rows, {"case": "scenario", "length": "draft tokens"}, {"length": LOWEST})
    colour = {
        "condition": {"test": "datum.accept_rate === null", "value": "transparent"},
        "field": "accept_rate", "type": "quantitative", "scale": {"scheme": "viridis", "domain": [0, 1], "reverse": True},
        "legend": {"title": "accept rate", "orient": "bottom", "gradientLength": 160, "format": ".1f"},
    }  # fmt: skip
    letters = {
        "condition": [
            {"test": "datum.accept_rate === null", "value": MUTED},
            {"test": "datum.accept_rate > 0.45", "value": "#ffffff"},
        ],
        "value": "#000000",
    }
    tooltip = tips(("batch", "batch"), ("context", "context"), ("words", "with"), ("shown", "break-even accept rate"),
                   ("accept_length", "break-even accept length", ".3~f"))  # fmt: skip
    layers = _map_layers(rows, colour, letters, tooltip, ("shown", "words"))
    spec = spec_of(rows, about, layers, height=_height(rows), **choices)
    columns = {"case": "scenario", "batch": "batch", "context": "context", "setting": "draft tokens",
               "accept_length": "break-even accept length", "accept_rate": "break-even accept rate"}  # fmt: skip
    table = table_of((r for r in rows if r["length"] != LOWEST), columns)
    return Chart("breakeven", "Break-even", about, spec, table)


def _height(rows: Sequence[Row]) -> int:
    return max(90, 34 * len({r["batch"] for r in rows}))


def _map_layers(
    rows: Sequence[Row], colour: Spec, letters: Spec, tooltip: list[Spec], words: tuple[str, str]
) -> list[Spec]:
    """Rectangles over batch and context with up to two words in each: above, and below where there is room."""
    contexts = len({r["context"] for r in rows})
    place = {
        "x": axis("context", "context, tokens a sequence", "ordinal", axis={"labelAngle": 0 if contexts < 8 else -45, "format": ",d"}),
        "y": axis("batch", "batch, sequences", "ordinal", sort="descending", axis={"format": ",d"}),
    }  # fmt: skip
    text = {"type": "text", "fontSize": 11}
    both = contexts <= 6
    tiles: Spec = {
        "mark": {"type": "rect", "stroke": MUTED, "strokeWidth": 0.5},
        "encoding": {**place, "color": colour, "tooltip": tooltip},
    }
    above: Spec = {
        "mark": {**text, "dy": -6 if both else 0, "fontWeight": "bold"},
        "encoding": {**place, "text": {"field": words[0]}, "color": letters},
    }
    below: Spec = {
        "mark": {**text, "dy": 7, "fontSize": 10},
        "encoding": {**place, "text": {"field": words[1]}, "color": letters},
    }
    return [tiles, above, *([below] if both else [])]


def _choices(rows: Sequence[Row], fields: Mapping[str, str], start: Mapping[str, Any]) -> Spec:
    """Select boxes for the fields that hold several values, and the filter that obeys them."""
    params, tests = [], []
    for field, label in fields.items():
        values = list(dict.fromkeys(r[field] for r in rows))
        if len(values) > 1:
            params.append(chooser(f"chosen_{field}", label, values, start.get(field, values[0])))
            tests.append(f"datum.{field} === chosen_{field}")
    return {"params": params, "transform": [{"filter": " && ".join(tests)}]} if tests else {}


def curve_rows(document: Document, cases: Mapping[int, str]) -> list[dict[str, Any]]:
    """Speedup with the best draft tokens by acceptance: of at most `LINES` batches."""
    batches = thinned(sorted({x["batch"] for x in document["best"]}), LINES)
    return [
        {**x, "case": cases[x["case"]], "label": f"batch {x['batch']:,}"}
        for x in document["best"]
        if x["batch"] in batches and x["speedup"] is not None and x["setting"] != "-"
    ]


def crossings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Where each curve of `curve_rows` crosses 1 upwards, interpolated."""
    out = []
    for (case, context, label), group in itertools.groupby(
        sorted(rows, key=lambda r: (r["case"], r["context"], r["batch"], r["acceptance"])),
        key=lambda r: (r["case"], r["context"], r["label"]),
    ):
        for low, high in itertools.pairwise(group):
            if low["speedup"] < 1 <= high["speedup"]:
                share = (1 - low["speedup"]) / (high["speedup"] - low["speedup"])
                place = low["acceptance"] + share * (high["acceptance"] - low["acceptance"])
                out.append({"case": case, "context": context, "label": label, "acceptance": place, "speedup": 1.0})
                break
    return out


def curves_chart(document: Document, cases: Mapping[int, str]) -> Chart:
    """Speedup over acceptance, a line a batch, marked where it breaks even."""
    rows, note = few(curve_rows(document, cases), MOST_ROWS)
    kind = document["axes"]["acceptance"]
    about = f"Speedup over plain decoding with the best draft tokens; a diamond marks the break-even of a batch.{note}"
    labels = [f"batch {b:,}" for b in sorted({r["batch"] for r in rows})]
    x = axis(
        "acceptance",
        f"accept {kind}" + (", tokens a cycle" if kind == "length" else ""),
        scale={"zero": False},
        axis={"tickCount": 8},
    )
    y = axis("speedup", "speedup, times plain decoding")
    colour = colours("label", labels)
    choices = _choices(rows, {"case": "scenario", "context": "context"}, {})
    tooltip = tips(("label", "batch"), ("acceptance", "acceptance", ".3~f"), ("setting", "draft tokens"), ("speedup", "speedup", ".3~f"))  # fmt: skip
    layers: list[Spec] = [
        {"params": [by_legend("label")], "mark": {"type": "line", "strokeWidth": 2}, "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dashes("label", labels), "opacity": FADED}},
        {"mark": {"type": "point", "filled": True, "size": 45}, "encoding": {"x": x, "y": y, "color": colour, "shape": shapes("label", labels), "opacity": FADED, "tooltip": tooltip}},
        {"data": {"values": crossings(rows)}, "transform": choices.get("transform", []),
         "mark": {"type": "point", "shape": "diamond", "size": 150, "filled": False, "stroke": TEXT, "strokeWidth": 1.5},
         "encoding": {"x": x, "y": y, "tooltip": tips(("label", "batch"), ("acceptance", "break-even", ".3~f"))}},
        at(1.0),
    ]  # fmt: skip
    if "transform" in choices:  # each layer has its own data, so each filters for itself
        for layer in layers[:2]:
            layer["transform"] = choices["transform"]
    spec = spec_of(rows, about, layers, **({"params": choices["params"]} if choices else {}))
    columns = {"case": "scenario", "context": "context", "batch": "batch", "acceptance": f"accept {kind}", "setting": "draft tokens", "speedup": "speedup"}  # fmt: skip
    return Chart("curves", "Speedup over acceptance", about, spec, table_of(rows, columns))


def front_rows(document: Document) -> list[dict[str, Any]]:
    """The points of all fronts of latency against throughput."""
    return [
        {**p, "model": f["model"], "context": f["context"], "accept": accept_words(f["acceptance"]), "box": f"{p['hardware']}, TP {p['tp']}"}
        for f in document["pareto"]
        for p in f["points"]
    ]  # fmt: skip


def front_chart(document: Document) -> Chart:
    """Milliseconds a token against tokens a second and GPU."""
    rows, note = few(front_rows(document), MOST_ROWS)
    about = f"What no other configuration beats in both latency and throughput; each point is a batch and draft length.{note}"
    kind = document["axes"]["acceptance"].replace("_", " ")
    accepts = list(dict.fromkeys(r["accept"] for r in rows))
    choices = _choices(
        rows,
        {"model": "model", "context": "context", "accept": f"accept {kind}"},
        {"accept": accepts[len(accepts) // 2] if accepts else ""},
    )
    boxes = list(dict.fromkeys(r["box"] for r in rows))[: len(PALETTE)]
    x = axis("tpot_ms", "latency, ms a token", scale={"type": "log", "nice": False, "padding": 14})
    y = axis(
        "tokens_per_s_per_gpu",
        "throughput, tokens a second and GPU",
        scale={"type": "log", "nice": False, "padding": 14},
    )
    tooltip = tips(("box", "box"), ("batch", "batch"), ("setting", "draft tokens"), ("tpot_ms", "ms a token", ".4~g"), ("tokens_per_s_per_gpu", "tok/s a GPU", ".4~g"))  # fmt: skip
    layers = [
        {"mark": {"type": "line", "color": MUTED, "strokeWidth": 1}, "encoding": {"x": x, "y": y}},
        {"mark": {"type": "point", "filled": True, "size": 70}, "encoding": {"x": x, "y": y, "color": colours("box", boxes), "shape": shapes("box", boxes), "tooltip": tooltip}},
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, **choices)
    columns = {"model": "model", "context": "context", "accept": f"accept {kind}", "tpot_ms": "ms a token", "tokens_per_s_per_gpu": "tokens a second and GPU",
               "batch": "batch", "setting": "draft tokens", "box": "box"}  # fmt: skip
    return Chart("front", "Latency against throughput", about, spec, table_of(rows, columns))


def step_rows(document: Document) -> list[dict[str, Any]]:
    """Step times by batch: of plain decoding, and of the cycle of each draft length."""
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for r in document["rows"]:
        case = f"{r['model']} on {r['hardware']}, {r['engine']}, TP {r['tp']}"
        for what, ms in (("plain decode", r["decode_ms"]), (f"cycle, d = {r['draft_tokens']}", r["cycle_ms"])):
            if ms is not None:
                row = {"case": case, "context": r["context"], "batch": r["batch"], "what": what, "ms": ms}
                seen[case, r["context"], r["batch"], what] = row
    return list(seen.values())


def steps_chart(document: Document) -> Chart:
    """Milliseconds of a step by batch."""
    rows, note = few(step_rows(document), MOST_ROWS)
    about = (
        f"Milliseconds of one plain decode step and of one speculative cycle, by batch; d is the draft tokens.{note}"
    )
    names = list(dict.fromkeys(r["what"] for r in rows))
    x = axis("batch", "batch, sequences", scale={"type": "log", "base": 2}, axis={"format": ",d"})
    y = axis("ms", "time, ms")
    colour = colours("what", names)
    choices = _choices(rows, {"case": "scenario", "context": "context"}, {})
    layers: list[Spec] = [
        {"params": [by_legend("what")], "mark": {"type": "line", "strokeWidth": 2}, "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dashes("what", names), "opacity": FADED}},
        {"mark": {"type": "point", "filled": True, "size": 50}, "encoding": {"x": x, "y": y, "color": colour, "shape": shapes("what", names), "opacity": FADED,
         "tooltip": tips(("what", "step"), ("batch", "batch"), ("ms", "ms", ".4~g"))}},
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, **choices)
    columns = {"case": "scenario", "context": "context", "batch": "batch", "what": "step", "ms": "ms"}
    return Chart("steps", "Step times", about, spec, table_of(rows, columns))
