"""Charts of a diagnosis: explanations before and after the evidence, what they predict, tests and remedies by worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.chart_style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    TEXT,
    VERMILION,
    Chart,
    Spec,
    at,
    axis,
    colours,
    shapes,
    spec_of,
    table_of,
    tips,
)

Document = Mapping[str, Any]
NAMED = 8  # explanations with a bar; the table has all
BEFORE, AFTER = "before any evidence", "given what was observed"


def diagnosis_charts(document: Document) -> list[Chart]:
    """Of specsim.diagnosis/1. Times are compared only where the scenario is known."""
    charts = [weights_chart(document)]
    if any(h["predicts"]["decode_ms"] or h["predicts"]["verify_ms"] for h in document["hypotheses"]):
        charts.append(times_chart(document))
    if document["experiments"]:
        charts.append(tests_chart(document))
    if any(r["gain_if_right"] for r in document["remedies"]):
        charts.append(remedies_chart(document))
    return charts


def weight_rows(document: Document) -> list[dict[str, Any]]:
    """Weights of the explanations, before (where the document has it) and after."""
    return [
        {"id": h["id"], "name": h["name"], "when": when, "weight": weight}
        for h in document["hypotheses"]
        for when, weight in ((BEFORE, h.get("prior")), (AFTER, h["weight"]))
        if weight is not None
    ]


def _rows_axis(names: list[str]) -> Spec:
    return axis("id", "", "nominal", sort=names, axis={"title": None, "domain": False, "ticks": False})


def weights_chart(document: Document) -> Chart:
    """Bars of the weights."""
    shown = [h["id"] for h in document["hypotheses"][:NAMED]]
    every = weight_rows(document)
    rows = [{**r, "words": f"{r['weight']:.0%}"} for r in every if r["id"] in shown]
    about = (
        "Weight of each explanation before any evidence and given what was observed; one fault at a time is assumed."
    )
    whens = [w for w in (BEFORE, AFTER) if any(r["when"] == w for r in rows)]
    y = _rows_axis(shown)
    offset = {"field": "when", "sort": whens}
    x = axis("weight", "weight", scale={"domain": [0, 1]}, axis={"format": ".0%"})
    layers: list[Spec] = [
        {"mark": "bar", "encoding": {"y": y, "yOffset": offset, "x": x, "color": colours("when", whens, {BEFORE: GREY, AFTER: VERMILION}),
                                     "tooltip": tips(("name", "explanation"), ("when", ""), ("weight", "weight", ".1%"))}},
        {"mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 10}, "encoding": {"y": y, "yOffset": offset, "x": x, "text": {"field": "words"}}},
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, height=34 * len(shown))
    spec["config"]["legend"]["columns"] = 1
    return Chart("weights", "What it may be", about, spec, table_of(every, {"id": "explanation", "name": "meaning", "when": "when", "weight": "weight"}))  # fmt: skip


def time_rows(document: Document) -> list[dict[str, Any]]:
    """Decode and verify that each explanation predicts, ms."""
    return [
        {"id": h["id"], "name": h["name"], "phase": phase, **h["predicts"][f"{phase}_ms"]}
        for h in document["hypotheses"]
        for phase in ("decode", "verify")
        if h["predicts"][f"{phase}_ms"]
    ]


def observed_rows(document: Document) -> list[dict[str, Any]]:
    """Decode and verify that were observed at the scenario's own batch, ms."""
    batch = (document.get("scenario") or {}).get("batch")
    seen = [o for o in document["observations"] if o["kind"] in ("decode", "verify") and o["batch"] == batch]
    return [{"phase": o["kind"], "value": o["value"], "words": f"{o['kind']}, observed"} for o in seen]


def times_chart(document: Document) -> Chart:
    """Predicted decode and verify by explanation, against what was observed."""
    shown = [h["id"] for h in document["hypotheses"][:NAMED]]
    every = time_rows(document)
    rows = [r for r in every if r["id"] in shown]
    about = "Decode and verify that each explanation predicts, with 80 % intervals; dashed lines are what was observed."
    phases = ["decode", "verify"]
    colour = colours("phase", phases, {"decode": BLUE, "verify": ORANGE})
    y = _rows_axis(shown)
    layers: list[Spec] = [
        {"data": {"values": observed_rows(document)}, "mark": {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 1.5},
         "encoding": {"x": {"field": "value", "type": "quantitative"}, "color": colour, "tooltip": tips(("words", "time"), ("value", "ms", ".4~g"))}},
        {"mark": {"type": "rule", "strokeWidth": 3}, "encoding": {"y": y, "x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}, "color": colour}},
        {"mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
         "encoding": {"y": y, "x": axis("value", "time, ms"), "color": colour, "shape": shapes("phase", phases),
                      "tooltip": tips(("name", "explanation"), ("phase", "phase"), ("value", "ms", ".4~g"), ("low", "80 % from", ".4~g"), ("high", "to", ".4~g"))}},
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, height=30 * len(shown))
    columns = {"id": "explanation", "phase": "phase", "value": "ms", "low": "80 % from", "high": "to"}
    return Chart("times", "What each explanation predicts", about, spec, table_of(every, columns))


def tests_chart(document: Document) -> Chart:
    """Bars of what the tests would tell."""
    rows = [{**e, "words": f"{e['minutes']:g} min"} for e in document["experiments"]]
    about = "What each test would tell, in bits (1 bit halves the doubt), and the minutes that it takes; first what tells most for its time."
    y = _rows_axis([r["id"] for r in rows])
    x = axis("bits", "information, bits")
    layers: list[Spec] = [
        {"mark": {"type": "bar", "color": BLUE, "height": {"band": 0.6}},
         "encoding": {"y": y, "x": x, "tooltip": tips(("what", "test"), ("bits", "bits", ".2~f"), ("minutes", "minutes"))}},
        {"mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 11}, "encoding": {"y": y, "x": x, "text": {"field": "words"}}},
    ]  # fmt: skip
    spec = spec_of(
        [{k: r[k] for k in ("id", "what", "bits", "minutes", "words")} for r in rows],
        about,
        layers,
        height=26 * len(rows),
    )
    columns = {"id": "test", "what": "what", "bits": "bits", "minutes": "minutes", "command": "command", "tell": "then again with"}  # fmt: skip
    return Chart("tests", "Which test to run next", about, spec, table_of(rows, columns))


def remedy_rows(document: Document) -> list[dict[str, Any]]:
    """Remedies whose gain is known: tokens a second over those of now, if the explanation is right."""
    return [
        {"id": r["id"], "what": r["what"], "command": r["command"], "helps": ", ".join(r["helps"]) or "any", "chance": r["chance"], **r["gain_if_right"]}
        for r in document["remedies"]
        if r["gain_if_right"]
    ]  # fmt: skip


def remedies_chart(document: Document) -> Chart:
    """Gains with intervals."""
    rows = remedy_rows(document)
    about = "Tokens a second with each remedy, over those of now, if the explanation that it mends is right."
    y = _rows_axis([r["id"] for r in rows])
    layers: list[Spec] = [
        {"mark": {"type": "rule", "strokeWidth": 3, "color": GREEN}, "encoding": {"y": y, "x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}}},
        {"mark": {"type": "point", "filled": True, "color": GREEN, "stroke": TEXT, "strokeWidth": 0.5, "opacity": 1},
         "encoding": {"y": y, "x": axis("value", "times the tokens a second of now", scale={"zero": False}),
                      "size": {"field": "chance", "type": "quantitative", "scale": {"domain": [0, 1], "range": [30, 260]}, "legend": None},
                      "tooltip": tips(("what", "remedy"), ("helps", "mends"), ("chance", "chance", ".0%"), ("value", "gain if right", ".3~f"), ("low", "80 % from", ".3~f"), ("high", "to", ".3~f"))}},
        at(1.0, "x"),
    ]  # fmt: skip
    spec = spec_of(rows, about + " A larger point is likelier to be needed.", layers, height=28 * len(rows))
    columns = {"id": "remedy", "what": "what", "helps": "mends", "chance": "chance", "value": "gain if right", "low": "80 % from", "high": "to", "command": "command"}  # fmt: skip
    return Chart("remedies", "What each remedy would give", about + " A larger point is likelier to be needed.", spec, table_of(rows, columns))  # fmt: skip
