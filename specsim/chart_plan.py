"""Charts of a plan: GPUs and latency of each choice, what a drafter must reach, when to switch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.chart_style import (
    BLUE,
    GREY,
    MUTED,
    PAGE,
    VERMILION,
    Chart,
    Spec,
    at,
    axis,
    chooser,
    colours,
    dashes,
    shapes,
    spec_of,
    table_of,
    tips,
)

Document = Mapping[str, Any]
SHOWN = 16  # choices in the chart; the table has all
KINDS = {"the best": VERMILION, "speculation": BLUE, "off": GREY}


def plan_charts(document: Document) -> list[Chart]:
    """Of specsim.plan/1."""
    charts = [choices_chart(document)]
    if any(c["tpot_ms"] is not None for c in document["choices"]):
        charts.append(latency_chart(document))
    if document.get("drafter_targets"):
        charts.append(targets_chart(document))
    if document.get("policy"):
        charts.append(policy_chart(document))
    return charts


def choice_rows(document: Document) -> list[dict[str, Any]]:
    """Every choice, named by what tells it from the others; with times of the percentile that the targets are about."""
    choices = document["choices"]
    several = {key: len({c[key] for c in choices}) > 1 for key in ("hardware", "tp", "ep")}
    out = []
    for i, c in enumerate(choices):
        words = {"hardware": c["hardware"], "tp": f"TP {c['tp']}", "ep": f"EP {c['ep']}"}
        capped = [f"at most {c['max_running_requests']:,} running"] if c.get("max_running_requests") else []
        box = ", ".join([*(words[key] for key in words if several[key] or key == "tp"), *capped])
        varies = bool(c.get("by_batch"))  # the draft length follows the batch
        setting = "off" if c["method"] == "none" else "by batch" if varies else f"{c['draft_tokens']} draft tokens"
        kind = "the best" if i == 0 and c["meets_targets"] else "off" if setting == "off" else "speculation"
        name = ", ".join([*(words[key] for key in words if several[key]), setting, *capped])
        out.append(
            {
                **c,
                **(c.get("at_percentile") or {}),
                "name": name,
                "box": box,
                "setting": setting,
                "kind": kind,
                "words": _words(c),
            }
        )
    return out


def _words(c: Mapping[str, Any]) -> str:
    if c["problem"]:
        return "cannot run"
    if not c["meets_targets"]:
        return "misses the targets" + ("" if c["miss"] is None else f" by {c['miss'] - 1:.0%}")
    return f"{c['gpus']} GPU" + ("s" if c["gpus"] > 1 else "")


def choices_chart(document: Document) -> Chart:
    """Bars of the GPUs, or the cost, that each choice takes."""
    rows = choice_rows(document)
    priced = any(r["cost_per_million_output_tokens"] is not None for r in rows)
    field = "cost_per_million_output_tokens" if priced else "gpus"
    title = "price of a million output tokens" if priced else "GPUs for the load"
    more = f" The {SHOWN} best of {len(rows)} choices." if len(rows) > SHOWN else ""
    about = f"What each way to serve takes for the load within the targets, the best first.{more}"
    shown = [{**r, "value": r[field] or 0} for r in rows[:SHOWN]]
    longest = max((r["value"] for r in shown), default=0) or 1
    kinds = [k for k in KINDS if any(r["kind"] == k for r in shown)]
    y = axis(
        "name", "", "nominal", sort=[r["name"] for r in shown], axis={"title": None, "domain": False, "ticks": False}
    )
    tooltip = tips(
        ("name", "choice"),
        ("gpus", "GPUs"),
        ("replicas", "replicas"),
        ("tpot_ms", "TPOT, ms", ".4~g"),
        ("ttft_ms", "TTFT, ms", ".4~g"),
        ("headroom", "headroom", ".0%"),
    )
    layers: list[Spec] = [
        {"mark": {"type": "bar", "height": {"band": 0.6}},
         "encoding": {"y": y, "x": axis("value", title, axis={} if priced else {"tickMinStep": 1}), "color": colours("kind", kinds, KINDS), "tooltip": tooltip}},
    ]  # fmt: skip
    for inside, mark in ((True, {"color": "#ffffff", "x": 0, "dx": 6}), (False, {"dx": 5})):
        lettered = [r for r in shown if (r["value"] > 0.35 * longest) == inside]
        place = {"y": y} if inside else {"y": y, "x": {"field": "value", "type": "quantitative"}}
        if lettered:
            layers.append({"data": {"values": lettered}, "mark": {"type": "text", "align": "left", "fontSize": 11, **mark},
                           "encoding": {**place, "text": {"field": "words"}}})  # fmt: skip
    spec = spec_of(shown, about, layers, height=max(60, 30 * len(shown)))
    columns = {"hardware": "hardware", "tp": "TP", "setting": "draft tokens", "meets_targets": "meets the targets", "replicas": "replicas", "gpus": "GPUs", "tpot_ms": "TPOT, ms",
               "ttft_ms": "TTFT, ms", "headroom": "headroom", "rate_per_replica": "requests/s a replica", "cost_per_million_output_tokens": "price of a million output tokens",
               "max_running_requests": "running at most", "problem": "problem"}  # fmt: skip
    return Chart("choices", "What each choice takes", about, spec, table_of(rows, columns))


def latency_chart(document: Document) -> Chart:
    """Milliseconds a token by draft tokens, a line a cut of a box."""
    rows = [
        {**r, "tokens": r["setting"].removesuffix(" draft tokens")}
        for r in choice_rows(document)
        if r["tpot_ms"] is not None
    ]
    which = document["targets"].get("percentile") or "mean"
    about = f"Time per output token ({which}) of each choice at its share of the load; hollow: misses the targets."
    boxes = list(dict.fromkeys(r["box"] for r in rows))
    order = ["off", *(str(d) for d in sorted({r["draft_tokens"] for r in rows if r["tokens"].isdigit()})), "by batch"]
    x = axis("tokens", "draft tokens (root included)", "ordinal", sort=order, axis={"labelAngle": 0})
    y = axis("tpot_ms", "time per output token, ms")
    colour = colours("box", boxes)
    tooltip = tips(
        ("hardware", "hardware"),
        ("tp", "TP"),
        ("setting", "setting"),
        ("words", "takes"),
        ("tpot_ms", "TPOT, ms", ".4~g"),
        ("ttft_ms", "TTFT, ms", ".4~g"),
    )
    layers: list[Spec] = [
        {"transform": [{"filter": "datum.tokens !== 'by batch'"}], "mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.6}, "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dashes("box", boxes)}},
        {"mark": {"type": "point", "size": 90, "opacity": 1, "strokeWidth": 2},
         "encoding": {"x": x, "y": y, "color": colour, "shape": shapes("box", boxes), "tooltip": tooltip,
                      "fill": {"condition": {"test": "!datum.meets_targets", "value": PAGE}, "field": "box", "type": "nominal", "scale": colour["scale"], "legend": None}}},
    ]  # fmt: skip
    limit = document["targets"].get("tpot_ms")
    if limit is not None:
        words = {"data": {"values": [{}]}, "mark": {"type": "text", "align": "left", "dy": -7, "x": 4, "color": MUTED},
                 "encoding": {"y": {"datum": limit}, "text": {"value": f"target {limit:g} ms"}}}  # fmt: skip
        layers += [at(limit), words]
    spec = spec_of(rows, about, layers)
    columns = {
        "hardware": "hardware",
        "tp": "TP",
        "setting": "draft tokens",
        "gpus": "GPUs",
        "tpot_ms": "TPOT, ms",
        "ttft_ms": "TTFT, ms",
    }
    return Chart("latency", "Latency by draft tokens", about, spec, table_of(rows, columns))


def target_rows(document: Document) -> list[dict[str, Any]]:
    """What a drafter must reach, a row a draft length, load and purpose; None: no accept rate is enough."""
    speedup = document["drafter_targets"][0]["speedup"]
    purposes = {"breakeven_accept_rate": "break-even", "speedup_accept_rate": f"speedup {speedup:g}", "target_accept_rate": "the targets"}  # fmt: skip
    return [
        {"load": f"{t['load']:.0%}", "draft_tokens": t["draft_tokens"], "batch": t["batch"], "purpose": name, "accept_rate": t[key]}
        for t in document["drafter_targets"]
        for key, name in purposes.items()
    ]  # fmt: skip


def targets_chart(document: Document) -> Chart:
    """The accept rate that a drafter must reach, by draft tokens."""
    rows = target_rows(document)
    about = "Accept rate that a drafter must reach to break even, for a speedup, and for the targets; a gap: no rate is enough."
    purposes = list(dict.fromkeys(r["purpose"] for r in rows))
    loads = list(dict.fromkeys(r["load"] for r in rows))
    x = axis("draft_tokens", "draft tokens (root included)", "ordinal", axis={"labelAngle": 0})
    y = axis("accept_rate", "accept rate needed", scale={"domain": [0, 1]})
    colour = colours("purpose", purposes)
    tooltip = tips(("purpose", "for"), ("draft_tokens", "draft tokens"), ("batch", "batch at this load"), ("accept_rate", "accept rate", ".3~f"))  # fmt: skip
    layers: list[Spec] = [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dashes("purpose", purposes)}},
        {"mark": {"type": "point", "filled": True, "size": 70}, "encoding": {"x": x, "y": y, "color": colour, "shape": shapes("purpose", purposes), "tooltip": tooltip}},
    ]  # fmt: skip
    more: Spec = {}
    if len(loads) > 1:
        more = {"params": [chooser("load", "share of the load", loads, loads[-1])], "transform": [{"filter": "datum.load === load"}]}  # fmt: skip
    spec = spec_of(rows, about, layers, **more)
    columns = {"load": "share of the load", "draft_tokens": "draft tokens", "batch": "batch", "purpose": "for", "accept_rate": "accept rate needed"}  # fmt: skip
    return Chart("targets", "What a drafter must reach", about, spec, table_of(rows, columns))


def policy_rows(document: Document) -> list[dict[str, Any]]:
    """Ranges of batches with one draft length, while the load rises."""
    return [
        {"context": f"{p['context']:,}", "first": first, "last": last, "start": first - 0.5, "end": last + 0.5,
         "draft_tokens": k + 1 if k else 1, "words": f"{k + 1}" if k else "off", "middle": (first + last) / 2}
        for p in document["policy"]["by_context"]
        for first, last, k in p["rising"]
    ]  # fmt: skip


def policy_chart(document: Document) -> Chart:
    """Bars of the draft tokens to use, over the batch."""
    rows = policy_rows(document)
    about = "Draft tokens to use by the sequences that decode together, while the load rises; off: plain decoding."
    contexts = list(dict.fromkeys(r["context"] for r in rows))
    y = axis("context", "context, tokens", "nominal", sort=contexts)
    most = max(max(r["draft_tokens"] for r in rows), 3)
    width = max(r["last"] for r in rows)
    colour = {"condition": {"test": "datum.draft_tokens === 1", "value": "#d9d9d9"}, "field": "draft_tokens", "type": "quantitative",
              "legend": None, "scale": {"scheme": "viridis", "domain": [1, most]}}  # fmt: skip
    dark = f"datum.draft_tokens > 1 && datum.draft_tokens < {0.65 * most:.6g}"
    layers: list[Spec] = [
        {"mark": {"type": "bar", "stroke": MUTED, "strokeWidth": 0.5, "height": {"band": 0.7}},
         "encoding": {"y": y, "x": axis("start", "batch, sequences", scale={"domain": [0, width + 1], "nice": False}), "x2": {"field": "end"}, "color": colour,
                      "tooltip": tips(("context", "context"), ("first", "batch from"), ("last", "to"), ("words", "draft tokens"))}},
        {"transform": [{"filter": f"datum.last - datum.first >= {0.03 * width:.6g}"}], "mark": {"type": "text", "fontSize": 11},
         "encoding": {"y": y, "x": {"field": "middle", "type": "quantitative"}, "text": {"field": "words"},
                      "color": {"condition": {"test": dark, "value": "#ffffff"}, "value": "#000000"}}},
    ]  # fmt: skip
    spec = spec_of(rows, about, layers, height=max(60, 32 * len(contexts)))
    columns = {"context": "context", "first": "batch from", "last": "to", "words": "draft tokens"}
    return Chart("policy", "When to switch", about, spec, table_of(rows, columns))
