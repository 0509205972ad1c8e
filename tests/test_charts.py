"""Charts of documents: the specification and the table hold the document's own numbers, and a browser draws them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from documents import COMMANDS, document

from specsim.chart_simulations import metric_rows, over
from specsim.chart_style import MUTED, PALETTE, few, thinned
from specsim.chart_sweep import crossings
from specsim.charts import KINDS, charts_for
from specsim.errors import InputError

VENDOR = Path(__file__).resolve().parent.parent / "specsim" / "web" / "vendor"
BLIND = "prediction without speculation"


def chart(name: str, key: str):
    return {chart.key: chart for chart in charts_for(document(name))}[key]


def bare_diagnosis():
    """As from a log of an unknown model: no times are predicted, no remedy is priced, no test is left."""
    found = document("diagnosis")
    for hypothesis in found["hypotheses"]:
        hypothesis["predicts"] = {"decode_ms": None, "verify_ms": None}
    for remedy in found["remedies"]:
        remedy["gain_if_right"] = None
    return {**found, "scenario": None, "experiments": []}


def stripped(name: str, **changes):
    return {**document(name), **changes}


VARIANTS = {
    "validation of nothing": lambda: stripped("validation", points=[], phases={}),
    "diagnosis without scenario": bare_diagnosis,
    "diagnosis of an older release": lambda: stripped(
        "diagnosis",
        hypotheses=[{k: v for k, v in h.items() if k != "prior"} for h in document("diagnosis")["hypotheses"]],
    ),
    "hardware diff of an older release": lambda: {
        k: v for k, v in document("hardware diff").items() if k != "allreduce"
    },
    "sweep of many rows": lambda: stripped("sweep", rows=document("sweep")["rows"] * 200),
}
ALL = {**{name: lambda name=name: document(name) for name in COMMANDS}, **VARIANTS}


def test_a_phase_of_no_time_has_no_bar():
    """With 2 draft tokens the draft extend drafts: there are no draft steps."""
    stacked, _, spread = chart("prediction that never pays", "time").spec["layer"]
    assert {row["bar"] for row in spread["data"]["values"]} == set(stacked["encoding"]["y"]["sort"])
    assert "draft" not in stacked["encoding"]["y"]["sort"]


def test_there_are_documents_of_every_kind():
    assert {document(name)["schema"] for name in COMMANDS} == set(KINDS)


@pytest.mark.parametrize("name", ALL)
def test_charts_are_plain_data_with_a_table_and_no_address(name):
    charts = charts_for(ALL[name]())
    assert charts or name == "validation of nothing" or "older" in name
    assert len({c.key for c in charts}) == len(charts)
    for made in charts:
        text = json.dumps(made.json(), allow_nan=False)
        assert json.dumps(made.spec).count("http") == 1, "the name of the schema alone"
        assert made.table.rows
        assert all(len(row) == len(made.table.columns) for row in made.table.rows)
        assert made.about.endswith(".")
        assert len(text) < 2_000_000


@pytest.mark.parametrize("name", ALL)
def test_axes_have_titles_with_units(name):
    """A quantity's axis says what it is, and its unit where it has one."""
    units = (
        "ms",
        "us",
        "bits",
        "%",
        "times",
        "rate",
        "tokens",
        "GPUs",
        "requests",
        "bytes",
        "sequences",
        "s",
        "weight",
        "GPU",
    )
    for made in charts_for(ALL[name]()):
        for layer in made.spec["layer"]:
            for channel in ("x", "y"):
                title = layer.get("encoding", {}).get(channel, {}).get("title")
                if layer["encoding"].get(channel, {}).get("type") == "quantitative" and title is not None:
                    assert title.replace(",", " ").split()[-1].strip("()") or any(u in title for u in units)
                    assert any(u in title for u in units), (made.key, title)


def test_the_bars_of_a_phase_end_at_its_time():
    """The breakdown's parts of a phase sum to that phase, so the last bar ends there."""
    found = document("prediction without acceptance")
    ends = {}
    for row in chart("prediction without acceptance", "time").spec["data"]["values"]:
        ends[row["phase"]] = max(row["end"], ends.get(row["phase"], 0.0))
    for phase, end in ends.items():
        assert end == pytest.approx(found[f"{phase}_ms"]["value"], rel=1e-4)


def test_the_speedup_chart_marks_break_even_where_the_prediction_has_it():
    found = document("prediction")
    marked = [
        row for layer in chart("prediction", "speedup").spec["layer"] for row in layer.get("data", {}).get("values", [])
    ]
    assert any(found["breakeven"]["accept_rate"].items() <= row.items() for row in marked)
    assert any(row.get("value") == found["speedup"]["value"] for row in marked)


def test_a_speedup_that_is_never_reached_is_said_in_the_chart():
    assert document("prediction that never pays")["breakeven"]["reachable"] is False
    assert "no accept rate breaks even" in json.dumps(chart("prediction that never pays", "speedup").spec)


def test_the_lowest_break_even_of_a_map_is_the_lowest_of_its_settings():
    rows = chart("sweep", "breakeven").spec["data"]["values"]
    for place, group in itertools.groupby(sorted(rows, key=lambda r: (r["batch"], r["context"])), key=lambda r: (r["batch"], r["context"])):  # fmt: skip
        here = list(group)
        (lowest,) = [r["accept_rate"] for r in here if r["length"] == "lowest"]
        others = [r["accept_rate"] for r in here if r["length"] != "lowest" and r["accept_rate"] is not None]
        assert lowest == (min(others) if others else None), place


def test_a_curve_breaks_even_where_the_line_between_two_points_crosses_one():
    """From (0.2, 0.8) to (0.6, 1.2) the line is at 1 half way, at 0.4; a curve that starts above 1 has no such place."""
    rows = [
        {"case": "", "context": 1, "batch": b, "label": str(b), "acceptance": a, "speedup": s}
        for b, a, s in ((1, 0.2, 0.8), (1, 0.6, 1.2), (2, 0.2, 1.1), (2, 0.6, 1.5))
    ]
    (found,) = crossings(rows)
    assert found["label"] == "1"
    assert found["acceptance"] == pytest.approx(0.4)


def test_weights_before_and_after_sum_to_one():
    rows = dict.fromkeys(("before any evidence", "given what was observed"), 0.0)
    for _, _, when, weight in chart("diagnosis", "weights").table.rows:
        rows[when] += weight
    assert rows == pytest.approx(dict.fromkeys(rows, 1.0), abs=1e-4)


def test_thinning_keeps_the_ends_and_few_says_what_is_left_out():
    assert thinned([1, 2, 4, 8, 16, 32, 64], 3) == [1, 8, 64]
    assert thinned([1, 2], 3) == [1, 2]
    assert few([{}] * 3, 2) == ([{}] * 2, " Shown are the first 2 of 3 points.")
    assert few([{}] * 2, 2) == ([{}] * 2, "")


def test_the_palette_is_told_apart_in_grey_where_it_is_used_first():
    """Relative luminance (WCAG) of the first colours differs pairwise by 3 percentage points at least, and text that is
    muted keeps 4.5 to 1 on white: (1 + 0.05) / (luminance + 0.05)."""

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    shades = sorted(luminance(c) for c in PALETTE[:4])
    assert min(b - a for a, b in itertools.pairwise(shades)) > 0.03
    assert 1.05 / (luminance(MUTED.removesuffix(")").split()[-1]) + 0.05) > 4.5


def test_a_schema_without_charts_is_told_with_those_that_have():
    with pytest.raises(InputError, match=r"no charts of specsim.models/1; known: specsim.prediction/1"):
        charts_for({"schema": "specsim.models/1"})
    for odd in ([], {}, None):
        with pytest.raises(InputError, match="a document without schema"):
            charts_for(odd)


@pytest.mark.browser
def test_every_chart_is_drawn_at_the_width_of_a_phone(new_page):
    """No chart is blank: each draws marks of some size, within its page."""
    width = 390
    page = new_page(viewport={"width": width, "height": 700})
    page.set_content("<body style='margin: 8px'>")
    for name in ("vega", "vega-lite", "vega-embed"):
        page.add_script_tag(path=VENDOR / f"{name}.min.js")
    page.add_script_tag(
        content="""window.draw = spec => {
        document.body.innerHTML = '<div id=c style="width: 100%"></div>';
        return vegaEmbed('#c', spec, {renderer: 'svg', actions: false, ast: true}).then(() => {
            const shown = m => m.getBoundingClientRect().width + m.getBoundingClientRect().height > 0;
            const marks = [...document.querySelectorAll('#c .role-mark path')].filter(shown);
            return [marks.length, document.querySelector('#c svg').getBoundingClientRect().right, document.body.innerText];
        });
    }"""
    )
    for name, make in ALL.items():
        for made in charts_for(make()):
            marks, right, text = page.evaluate("s => draw(s)", made.spec)
            assert marks > 0, (name, made.key)
            assert width / 2 < right <= width, (name, made.key)
            assert "NaN" not in text, (name, made.key)
            assert "undefined" not in text, (name, made.key)


def test_one_simulation_has_no_seed_that_it_was_not_given() -> None:
    """Nothing varied: the one point is called simulation 1, whatever its seed."""
    made = document("simulations")
    alone = {**made, "varied": [], "rows": [{k: v for k, v in made["rows"][0].items() if k not in made["varied"]}]}
    assert over(alone) == ("simulation", False)
    assert {(row["x"], row["seed"]) for row in metric_rows(alone, "ttft")} == {(1, None)}


def test_several_simulations_are_drawn_over_what_has_the_most_values() -> None:
    """Rates 2, 500 and 4, two seeds, two methods: over the rate in its order, a series a method and percentile, no point of the
    load that cannot be served, lines through the means over the seeds; sources of both methods, each once."""
    made = document("simulations")
    assert over(made) == ("request_rate", True)
    rows = metric_rows(made, "tpot")
    assert [row["x"] for row in rows] == sorted(row["x"] for row in rows)
    assert {row["x"] for row in rows} == {2, 4}
    assert {row["series"] for row in rows} == {
        f"{what}, method {m}" for what in ("median", "p99") for m in ("none", "eagle3")
    }
    for row in rows:
        two = [r["value"] for r in rows if (r["x"], r["series"]) == (row["x"], row["series"])]
        assert len(two) == 2
        assert row["mean"] == pytest.approx(sum(two) / 2, rel=1e-5)
    assert [chart.key for chart in charts_for(made)] == ["ttft", "tpot", "throughput"]
    only = {**made, "varied": ["method"]}
    assert over(only) == ("method", False)
    of = [source["of"] for source in made["sources"]]
    assert len(of) == len({str(source) for source in made["sources"]})
    assert any("draft_step" in name for name in of)


@pytest.mark.parametrize("name", ALL)
def test_a_line_that_lies_on_another_lets_it_show_through(name):
    """Lines of several colours differ in dash or width too, and only the first of up to eight is whole: equal curves are seen."""
    for made in charts_for(ALL[name]()):
        for layer in made.spec["layer"]:
            encoding = layer.get("encoding", {})
            colour = encoding.get("color", {})
            mark = layer["mark"]
            if (
                (mark if isinstance(mark, str) else mark["type"]) != "line"
                or "field" not in colour
                or len(colour["scale"]["domain"]) < 2
            ):
                continue
            own = [
                encoding[c]
                for c in ("strokeDash", "strokeWidth")
                if encoding.get(c, {}).get("field") == colour["field"]
            ]
            assert own, made.key
            marks = own[0]["scale"]["range"][:8]
            assert len({str(m) for m in marks}) > 1
            if own[0] is encoding.get("strokeDash"):
                assert marks.count([1, 0]) == 1
                assert marks[0] == [1, 0]
            else:
                assert marks == sorted(marks, reverse=True)
