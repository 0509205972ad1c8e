"""Pictures of results, for `--plot`: of the same documents, and from the same rows, as the charts of a report.

plot(document, Path("picture.svg"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specsim import chart_causes, chart_hardware, chart_plan, chart_predict, chart_runs, chart_simulations, chart_sweep
from specsim.chart_style import BLUE, GREEN, GREY, SKY, VERMILION, WORDS
from specsim.errors import InputError
from specsim.plot_style import HATCHES, MUTED, STYLE, bars, filled, line, picture, plain

Document = Mapping[str, Any]
Row = Mapping[str, Any]


def plot(document: Document, path: Path, **more: Any) -> None:
    """Draw a document. Raises InputError where there is nothing to draw, or for a suffix that no picture has, and
    WorkError where the file cannot be written."""
    PLOTS[document["schema"]](document, path, **more)


def _nothing(what: str, mend: str) -> InputError:
    return InputError(what, where="--plot", mend=mend)


# --- prediction -----------------------------------------------------------------------------------------------------


def prediction_plot(document: Document, path: Path) -> None:
    """Left the phases stacked by component with their intervals, right speedup over acceptance with the break-even."""
    curve = chart_predict.speedups(document)
    rows = chart_predict.parts(document)
    with picture(path, 11 if curve else 6, 4.2) as figure:
        axes = figure.subplots(1, 2 if curve else 1, squeeze=False)[0]
        _stacked(axes[0], rows, chart_predict.totals(document))
        if curve:
            _speedup(axes[1], document, curve)
        figure.suptitle(_title(document), x=0.01, ha="left", fontsize=10)


def _stacked(axes: Any, rows: Sequence[Row], totals: Sequence[Row]) -> None:
    names = [t["bar"] for t in totals if any(r["bar"] == t["bar"] for r in rows)]
    components = list(dict.fromkeys(r["component"] for r in sorted(rows, key=lambda r: r["component"])))
    for i, component in enumerate(components):
        here = [r for r in rows if r["component"] == component]
        places = [names.index(r["bar"]) for r in here]
        axes.barh(places, [r["ms"] for r in here], 0.6, left=[r["start"] for r in here], label=WORDS.get(component, component), **filled(component, i))  # fmt: skip
    for t in totals:
        if t["bar"] in names:
            axes.plot([t["low"], t["high"]], [names.index(t["bar"]) + 0.4] * 2, color="black", linewidth=1.2)
    bars(axes, names)
    axes.set_xlabel("time, ms (line below: 80 % interval)")
    axes.set_title("where the time goes")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.17))


def _speedup(axes: Any, document: Document, curve: Sequence[Row]) -> None:
    x = [p["accept_rate"] for p in curve]
    axes.fill_between(x, [p["low"] for p in curve], [p["high"] for p in curve], color=SKY, alpha=0.35, linewidth=0)
    axes.plot(x, [p["value"] for p in curve], color=BLUE, marker="o", label="speedup, 80 % interval")
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--")
    rate = (document.get("breakeven") or {}).get("accept_rate")
    if rate is not None:
        axes.plot([rate["low"], rate["high"]], [1, 1], color=VERMILION, linewidth=4, alpha=0.6, solid_capstyle="butt")
        axes.plot([rate["value"]], [1], "D", color=VERMILION, markersize=7, label=f"break-even {rate['value']:.2f} ({rate['low']:.2f} to {rate['high']:.2f})")  # fmt: skip
    if document.get("accept_rate") is not None and document.get("speedup") is not None:
        s = document["speedup"]
        error = [[s["value"] - s["low"]], [s["high"] - s["value"]]]
        axes.errorbar([document["accept_rate"]], [s["value"]], yerr=error, fmt="s", color="black", markersize=6, label=f"this drafter {s['value']:.2f}x")  # fmt: skip
    axes.set(xlim=(0, 1), xlabel="accept rate", ylabel="speedup, times plain decoding")
    axes.set_ylim(bottom=0)
    axes.set_title("what acceptance is worth" + ("" if rate is not None else ": no accept rate breaks even"))
    axes.legend(loc="upper left")


def _title(document: Document) -> str:
    return str(document.get("title") or "")


# --- sweep ----------------------------------------------------------------------------------------------------------


def sweep_plot(document: Document, path: Path) -> None:
    """Of the first case that fits: its map of the best draft length, or of the break-even without acceptance; and speedup
    over acceptance, or step times."""
    best, even = document.get("best") or [], document.get("breakeven") or []
    index = next((x["case"] for x in best if x["setting"] != "-"), document["cases"][0]["case"])
    only = {**document, **{key: [x for x in document.get(key) or [] if x["case"] == index] for key in ("best", "breakeven")}}  # fmt: skip
    cases = {case["case"]: chart_sweep.case_words(case) for case in document["cases"]}
    curves = (
        chart_sweep.curve_rows(only, cases) if document["axes"]["acceptance"] in ("rate", "length") and best else []
    )
    curves = curves if len({r["acceptance"] for r in curves}) > 1 else []
    steps = chart_sweep.step_rows(document) if document.get("rows") and not curves else []
    panels: list[Callable[[Any], None]] = []
    if best:
        panels.append(lambda axes: _best_map(figure, axes, chart_sweep.best_cells(only, cases), document["axes"]["acceptance"]))  # fmt: skip
    elif even:
        panels.append(lambda axes: _even_map(figure, axes, chart_sweep.breakeven_cells(only, cases)))
    if curves:
        panels.append(lambda axes: _curves(axes, curves, document["axes"]["acceptance"]))
    elif steps:
        panels.append(lambda axes: _steps(axes, [r for r in steps if r["case"] == steps[0]["case"]]))
    if not panels:
        raise _nothing("there is nothing to draw", "sweep several batches, contexts or acceptances")
    with picture(path, 6 * len(panels), 4.8) as figure:
        for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            draw(axes)
        figure.suptitle(cases[index], x=0.01, ha="left", fontsize=10)


def _grid(axes: Any, cells: Sequence[Row], value: str) -> tuple[Any, list[Any], list[Any]]:
    """Values over batch and context, nan where there are none."""
    import numpy as np

    batches, contexts = sorted({x["batch"] for x in cells}), sorted({x["context"] for x in cells})
    found = np.full((len(batches), len(contexts)), np.nan)
    for x in cells:
        if x[value] is not None:
            found[batches.index(x["batch"]), contexts.index(x["context"])] = x[value]
    axes.set_xticks(range(len(contexts)), [f"{c:,}" for c in contexts], rotation=45 if len(contexts) > 5 else 0)
    axes.set_yticks(range(len(batches)), [f"{b:,}" for b in batches])
    axes.set(xlabel="context, tokens a sequence", ylabel="batch, sequences")
    axes.grid(False)
    axes.set_facecolor("0.9")
    return found, batches, contexts


def _letters(axes: Any, cells: Sequence[Row], batches: Sequence[Any], contexts: Sequence[Any], light: Callable[[Row], bool], words: Callable[[Row], str]) -> None:  # fmt: skip
    if len(batches) * len(contexts) <= 200:
        for x in cells:
            place = contexts.index(x["context"]), batches.index(x["batch"])
            axes.text(*place, words(x), ha="center", va="center", fontsize=7, color="black" if light(x) else "white")


def _best_map(figure: Any, axes: Any, cells: Sequence[Row], kind: str) -> None:
    import matplotlib as mpl

    accepts = list(dict.fromkeys(x["accept"] for x in cells))
    middle = accepts[len(accepts) // 2]
    here = [x for x in cells if x["accept"] == middle]
    found, batches, contexts = _grid(axes, here, "draft_tokens")
    most = max((x["draft_tokens"] or 1 for x in here), default=1)
    colours = mpl.colormaps["viridis"].resampled(most)
    image = axes.imshow(found, origin="lower", aspect="auto", vmin=0.5, vmax=most + 0.5, cmap=colours)
    ticks = list(range(1, most + 1, 1 + most // 16))
    bar = figure.colorbar(image, ax=axes, label="draft tokens (off: plain decoding is faster)")
    bar.set_ticks(ticks, labels=["off" if t == 1 else str(t) for t in ticks])
    _letters(axes, here, batches, contexts, lambda x: x["draft_tokens"] is None or x["draft_tokens"] > 0.6 * most,
             lambda x: f"{x['words']}\n{x['gain']}" if x["gain"] and len(contexts) <= 6 else x["words"])  # fmt: skip
    axes.set_title(f"best draft tokens at accept {kind.replace('_', ' ')} {middle}")


def _even_map(figure: Any, axes: Any, cells: Sequence[Row]) -> None:
    here = [x for x in cells if x["length"] == chart_sweep.LOWEST]
    found, batches, contexts = _grid(axes, here, "accept_rate")
    image = axes.imshow(found, origin="lower", aspect="auto", vmin=0, vmax=1, cmap="viridis_r")
    figure.colorbar(image, ax=axes, label="break-even accept rate")
    _letters(axes, here, batches, contexts, lambda x: x["accept_rate"] is None or x["accept_rate"] < 0.45,
             lambda x: x["shown"] if x["accept_rate"] is None else f"{x['shown']}\n{x['words']}")  # fmt: skip
    axes.set_title("lowest accept rate that breaks even")


def _curves(axes: Any, rows: Sequence[Row], kind: str) -> None:
    context = min(r["context"] for r in rows)
    here = [r for r in rows if r["context"] == context]
    even = {r["label"]: r["acceptance"] for r in chart_sweep.crossings(here)}
    for i, label in enumerate(dict.fromkeys(r["label"] for r in sorted(here, key=lambda r: r["batch"]))):
        mine = sorted((r["acceptance"], r["speedup"]) for r in here if r["label"] == label)
        said = f"{label}, breaks even at {even[label]:.2f}" if label in even else label
        axes.plot(*zip(*mine, strict=True), label=said, **line(i))
    if even:
        axes.plot(list(even.values()), [1] * len(even), "D", markersize=8, markerfacecolor="none", color="black")
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--")
    axes.set(xlabel=f"accept {kind}" + (", tokens a cycle" if kind == "length" else ""), ylabel="speedup, times plain decoding")  # fmt: skip
    axes.set_title(f"speedup with the best draft tokens, context {context:,}")
    axes.legend()


def _steps(axes: Any, rows: Sequence[Row]) -> None:
    context = min(r["context"] for r in rows)
    here = [r for r in rows if r["context"] == context]
    for i, what in enumerate(dict.fromkeys(r["what"] for r in here)):
        axes.plot(*zip(*sorted((r["batch"], r["ms"]) for r in here if r["what"] == what), strict=True), label=what, **line(i))  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set(xlabel="batch, sequences", ylabel="time, ms")
    axes.set_ylim(bottom=0)
    axes.set_title(f"step times, context {context:,}; d is the draft tokens")
    axes.legend()


# --- plan -----------------------------------------------------------------------------------------------------------


def plan_plot(document: Document, path: Path) -> None:
    """What each choice takes; right what a drafter must reach at the whole load."""
    rows = chart_plan.choice_rows(document)[: chart_plan.SHOWN]
    targets = chart_plan.target_rows(document) if document.get("drafter_targets") else []
    priced = any(r["cost_per_million_output_tokens"] is not None for r in rows)
    field = "cost_per_million_output_tokens" if priced else "gpus"
    with picture(path, 11 if targets else 6, max(3.0, 0.35 * len(rows) + 1.6)) as figure:
        axes = figure.subplots(1, 2 if targets else 1, squeeze=False)[0]
        for kind, (colour, hatch) in {k: (c, h) for (k, c), h in zip(chart_plan.KINDS.items(), HATCHES[:3], strict=True)}.items():  # fmt: skip
            mine = [(i, r[field] or 0) for i, r in enumerate(rows) if r["kind"] == kind]
            if mine:
                axes[0].barh(*zip(*mine, strict=True), 0.6, color=colour, hatch=hatch, edgecolor="white", label=kind)
        for i, r in enumerate(rows):
            axes[0].annotate(
                r["words"], (r[field] or 0, i), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
        bars(axes[0], [r["name"] for r in rows])
        axes[0].margins(x=0.2)
        axes[0].set_xlabel("price of a million output tokens" if priced else "GPUs for the load")
        axes[0].set_title("what each choice takes")
        axes[0].legend(ncols=3, loc="upper left", bbox_to_anchor=(0, -0.12))
        if targets:
            _targets(axes[1], [r for r in targets if r["load"] == targets[-1]["load"]])
        figure.suptitle(_title(document), x=0.01, ha="left", fontsize=10)


def _targets(axes: Any, rows: Sequence[Row]) -> None:
    for i, purpose in enumerate(dict.fromkeys(r["purpose"] for r in rows)):
        mine = [(r["draft_tokens"], r["accept_rate"]) for r in rows if r["purpose"] == purpose and r["accept_rate"] is not None]  # fmt: skip
        if mine:
            axes.plot(*zip(*mine, strict=True), label=purpose, **line(i))
    axes.set_xticks(sorted({r["draft_tokens"] for r in rows}))
    axes.set(ylim=(0, 1.02), xlabel="draft tokens (root included)", ylabel="accept rate needed")
    axes.set_title("what a drafter must reach (a gap: no rate is enough)")
    axes.legend()


# --- runs -----------------------------------------------------------------------------------------------------------


def simulation_plot(document: Document, path: Path) -> None:
    """Batch and queue above, output tokens a second below, over time; right the percentiles of the latencies."""
    spans = chart_runs.timeline_rows(document)
    seconds = [r["s"] for r in spans]
    latencies = [r for r in chart_runs.latency_rows(document) if r["ms"] > 0]
    with picture(path, 12, 5) as figure:
        axes = figure.subplot_mosaic([["load", "latency"], ["rate", "latency"]], width_ratios=[3, 2])
        for i, what in enumerate(("running", "waiting")):
            style = {**line(i), "marker": None if len(spans) > 1 else "o", "linewidth": 1.2}
            axes["load"].step(seconds, [r[what] for r in spans], where="post", label=what, **style)
        axes["load"].set(ylabel="requests", ylim=(0, None))
        axes["load"].legend(loc="upper right")
        axes["rate"].step(seconds, [r["output_tokens_per_s"] for r in spans], where="post", color=GREEN, linewidth=1.2)
        axes["rate"].set(xlabel="time, s", ylabel="output tokens a second", ylim=(0, None))
        names = list(dict.fromkeys(r["latency"] for r in latencies))
        for i, percentile in enumerate(chart_runs.PERCENTILES.values()):
            mine = [(r["ms"], names.index(r["latency"])) for r in latencies if r["percentile"] == percentile]
            if mine:
                axes["latency"].plot(*zip(*mine, strict=True), label=percentile, **{**line(i), "linestyle": "none"})
        for key, limit in (document.get("targets_ms") or {}).items():
            if chart_runs.LATENCIES[key] in names:
                axes["latency"].plot(
                    [limit], [names.index(chart_runs.LATENCIES[key])], "|", color="black", markersize=18
                )
        bars(axes["latency"], names)
        axes["latency"].set(xscale="log", xlabel="time, ms (bar: target)")
        plain(axes["latency"].xaxis)
        axes["latency"].legend(loc="best")
        figure.suptitle(_title(document), x=0.01, ha="left", fontsize=10)


def simulations_plot(document: Document, path: Path) -> None:
    """Latencies and throughput of several simulations over what varied: points, and lines through their means."""
    panels = {
        key: rows for key, *_ in chart_simulations.METRICS if (rows := chart_simulations.metric_rows(document, key))
    }
    if not panels:
        raise _nothing("no simulation has a latency or a throughput", "give loads that can be served")
    name, number = chart_simulations.over(document)
    places = {
        x: x if number else i
        for i, x in enumerate(dict.fromkeys(r["x"] for r in (row for rows in panels.values() for row in rows)))
    }
    with picture(path, 4.6 * len(panels), 4.2) as figure:
        for axes, (key, title, unit, _) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0],
            [found for found in chart_simulations.METRICS if found[0] in panels],
            strict=True,
        ):
            for i, series in enumerate(dict.fromkeys(r["series"] for r in panels[key])):
                mine = [r for r in panels[key] if r["series"] == series]
                x = [places[r["x"]] for r in mine]
                style = line(i)
                axes.plot(x, [r["value"] for r in mine], **{**style, "linestyle": "none"}, alpha=0.5)
                axes.plot(x, [r["mean"] for r in mine], **{**style, "marker": None}, label=series)
            if not number:
                axes.set_xticks(list(places.values()), [str(x) for x in places], rotation=20, ha="right")
            axes.set(xlabel=name.replace("_", " "), ylabel=unit, ylim=(0, None), title=title)
            axes.legend()
        figure.suptitle(_title(document), x=0.01, ha="left", fontsize=10)


def validation_plot(document: Document, path: Path) -> None:
    """Predicted against observed with intervals, and the residuals beside it."""
    order = chart_runs.TIMES if chart_runs.times_of(document, chart_runs.TIMES) else chart_runs.UNDER_LOAD
    points = chart_runs.times_of(document, order)
    if not points:
        raise _nothing("no time was both observed and predicted", "give records of step times")
    with picture(path, 11, 5) as figure:
        scatter, residual = figure.subplots(1, 2)
        for i, phase in enumerate(p for p in order if any(r["phase"] == p for r in points)):
            mine = [p for p in points if p["phase"] == phase]
            x = [p["observed"] for p in mine]
            error = [
                [max(p["predicted"] - p["low"], 0) for p in mine],
                [max(p["high"] - p["predicted"], 0) for p in mine],
            ]
            style = {**line(i), "linestyle": "none"}
            scatter.errorbar(x, [p["predicted"] for p in mine], yerr=error, elinewidth=0.7, label=phase, **style)
            if phase != "host":  # a remainder, next to which any error is large
                residual.plot(x, [100 * p["error"] for p in mine], label=phase, **style)
        values = [v for p in points for v in (p["observed"], p["predicted"])]
        ends = [min(values) * 0.8, max(values) * 1.25]
        scatter.plot(ends, ends, color=MUTED, linewidth=0.8)
        scatter.set(xscale="log", yscale="log", xlabel="observed, ms", ylabel="predicted, ms (80 % interval)")
        residual.axhline(0, color=MUTED, linewidth=0.8)
        residual.set(xscale="log", xlabel="observed, ms", ylabel="error, %")
        for axis in (scatter.xaxis, scatter.yaxis, residual.xaxis):
            plain(axis)
        scatter.legend()
        figure.suptitle("predicted against observed", x=0.01, ha="left", fontsize=10)


# --- diagnosis ------------------------------------------------------------------------------------------------------


def diagnosis_plot(
    document: Document, path: Path, components: Sequence[tuple[str, str, Mapping[str, float]]] = ()
) -> None:
    """Weights before any evidence and after; right decode and verify by component under each likely explanation.

    components: (explanation, "decode" or "verify", ms by component), which the document does not hold.
    """
    shown = [h for h in document["hypotheses"] if h["weight"] >= 0.01][: chart_causes.NAMED]
    with picture(path, 12 if components else 6, 4.6) as figure:
        axes = figure.subplots(1, 2 if components else 1, squeeze=False)[0]
        _weights(axes[0], shown)
        if components:
            _explained(axes[1], components, chart_causes.observed_rows(document))
        figure.suptitle(_title(document), x=0.01, ha="left", fontsize=10)


def _weights(axes: Any, shown: Sequence[Row]) -> None:
    for offset, key, colour, hatch, name in ((-0.2, "prior", GREY, "///", chart_causes.BEFORE), (0.2, "weight", VERMILION, "", chart_causes.AFTER)):  # fmt: skip
        places = [i + offset for i in range(len(shown))]
        axes.barh(places, [100 * h.get(key, 0.0) for h in shown], 0.38, color=colour, hatch=hatch, edgecolor="white", label=name)  # fmt: skip
    bars(axes, [h["id"] for h in shown])
    axes.set(xlabel="weight, %", xlim=(0, 100))
    axes.set_title("what it may be")
    axes.legend(loc="lower right")


def _explained(axes: Any, bars_of: Sequence[tuple[str, str, Mapping[str, float]]], observed: Sequence[Row]) -> None:
    names = list(dict.fromkeys(name for name, _, _ in bars_of))
    places = [names.index(name) + (0.0 if phase == "decode" else 0.42) for name, phase, _ in bars_of]
    bottom = [0.0] * len(bars_of)
    for i, component in enumerate(dict.fromkeys(c for _, _, parts in bars_of for c in parts)):
        heights = [parts.get(component, 0.0) for _, _, parts in bars_of]
        axes.bar(places, heights, 0.38, bottom=bottom, label=WORDS.get(component, component), **filled(component, i))
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for o in observed:
        axes.axhline(o["value"], color="black", linewidth=1, linestyle=":" if o["phase"] == "decode" else "--", label=o["words"])  # fmt: skip
    axes.set_xticks([i + 0.21 for i in range(len(names))], [n.replace("-", "-\n", 1) for n in names], fontsize=8)
    axes.grid(False, axis="x")
    axes.set_ylabel("time, ms (left decode, right verify)")
    axes.set_title("what each explanation predicts")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


# --- hardware -------------------------------------------------------------------------------------------------------


def hardware_plot(document: Document, path: Path) -> None:
    """All-reduce curves at the most ranks of each box: of one, a colour an implementation; of several, a colour a box, and
    without what no engine chooses by itself (nccl-ll and the like)."""
    boxes = document.get("allreduce") if document["schema"] == "specsim.hardware-diff/1" else [document]
    rows = [r for box in boxes or [] for r in _widest(chart_hardware.curve_rows(box, box["name"]))]
    names = list(dict.fromkeys(r["box"] for r in rows))
    if len(names) > 1:
        rows = [r for r in rows if not r["way"].startswith("nccl-")]
    if not rows:
        raise _nothing(
            f"{', '.join(box['name'] for box in boxes or [])}: no all-reduce curve to draw",
            "choose a profile of several GPUs",
        )
    ways = list(dict.fromkeys(r["way"] for r in rows))
    with picture(path, 10, 5) as figure:
        axes = figure.subplots()
        for box, way in dict.fromkeys((r["box"], r["way"]) for r in rows):
            mine = [r for r in rows if (r["box"], r["way"]) == (box, way)]
            style = line(ways.index(way))
            colour = line(names.index(box))["color"] if len(names) > 1 else style["color"]
            label = f"{box}: {way}, {mine[0]['ranks']} ranks ({mine[0]['kind']})"
            x = [r["bytes"] for r in mine]
            wide = (
                max(2.8 - names.index(box), 0.9) if len(names) > 1 else STYLE["lines.linewidth"]
            )  # the first shows below
            axes.plot(x, [r["us"] for r in mine], **{**style, "color": colour, "linewidth": wide}, label=label)
            axes.fill_between(
                x, [r["low"] for r in mine], [r["high"] for r in mine], color=colour, alpha=0.1, linewidth=0
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: _size(x))
        axes.set(yscale="log", xlabel="message, bytes a rank", ylabel="all-reduce latency, us (band: one standard deviation)")  # fmt: skip
        plain(axes.yaxis)
        figure.legend(loc="outside right upper")


def calibration_plot(document: Document, path: Path) -> None:
    """The all-reduce curves that a calibration measured."""
    hardware_plot({**document, "schema": "specsim.hardware/1", "name": chart_hardware.box_of(document)}, path)


def agreement_plot(document: Document, path: Path) -> None:
    """What each number of the second box would change of a step of the first."""
    rows = chart_hardware.effect_rows(document)
    if not rows:
        raise _nothing(f"{document['a']} and {document['b']} have no number in common", "compare boxes of one kind")
    with picture(path, 7, max(2.4, 0.24 * len(rows) + 1.2)) as figure:
        axes = figure.subplots()
        for matters, colour, hatch, name in ((True, VERMILION, "", chart_hardware.HEAVY), (False, BLUE, "///", chart_hardware.LIGHT)):  # fmt: skip
            mine = [(i, r["change"]) for i, r in enumerate(rows) if r["matters"] == matters]
            if mine:
                places, changes = zip(*mine, strict=True)
                axes.barh(places, changes, 0.6, color=colour, hatch=hatch, edgecolor="white", label=name)
        bars(axes, [r["name"] for r in rows])
        axes.axvline(0, color=MUTED, linewidth=0.8)
        axes.set_xlabel(f"change of the step with {document['b']}'s number, %")
        axes.set_title(f"what the differences to {document['a']} do to a step")
        axes.legend(loc="best")


def _widest(rows: Sequence[Row]) -> list[Row]:
    most = max((r["ranks"] for r in rows), default=0)
    return [r for r in rows if r["ranks"] == most]


def _size(size: float) -> str:
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size:g} B"


PLOTS: dict[str, Callable[..., None]] = {
    "specsim.prediction/1": prediction_plot,
    "specsim.sweep/1": sweep_plot,
    "specsim.plan/1": plan_plot,
    "specsim.simulation/1": simulation_plot,
    "specsim.simulations/1": simulations_plot,
    "specsim.validation/1": validation_plot,
    "specsim.diagnosis/1": diagnosis_plot,
    "specsim.hardware/1": hardware_plot,
    "specsim.hardware-diff/1": hardware_plot,
    "specsim.hardware-agreement/1": agreement_plot,
    "specsim.calibration/1": calibration_plot,
}
