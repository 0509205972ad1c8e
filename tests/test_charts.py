"""Charts of documents: the specification and the table hold the document's own numbers, and a browser draws them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specsim
from specsim.charts import KINDS, charts_for
from specsim.errors import InputError

VENDOR = Path(__file__).resolve().parent.parent / "specsim" / "web" / "vendor"


def prediction(**options):
    return specsim.predict(specsim.scenario(**options), samples=50).json()


DOCUMENTS = {
    "with acceptance": lambda: prediction(draft_tokens=3, accept_rate=0.6),
    "without acceptance": lambda: prediction(draft_tokens=3),
    "beyond any acceptance": lambda: prediction(draft_tokens=2, hardware="8x-pcie-field", batch=4),
    "without speculation": lambda: prediction(method="none"),
}


@pytest.fixture(params=DOCUMENTS)
def document(request):
    return DOCUMENTS[request.param]()


def test_charts_are_plain_data_with_a_table_and_no_address(document):
    for chart in charts_for(document):
        text = json.dumps(chart.json(), allow_nan=False)
        assert text.count("http") == 1, "the name of the schema alone"
        assert chart.table.rows
        assert all(len(row) == len(chart.table.columns) for row in chart.table.rows)
        assert chart.about.endswith(".")


def test_the_bars_of_a_phase_end_at_its_time():
    """The breakdown's parts of a phase sum to that phase, so the last bar ends there."""
    found = prediction(draft_tokens=3)
    chart = charts_for(found)[0]
    ends = {}
    for row in chart.spec["data"]["values"]:
        ends[row["phase"]] = max(row["end"], ends.get(row["phase"], 0.0))
    for phase, end in ends.items():
        assert end == pytest.approx(found[f"{phase}_ms"]["value"], rel=1e-4)


def test_the_speedup_chart_marks_break_even_where_the_prediction_has_it():
    found = prediction(draft_tokens=3, accept_rate=0.6)
    spec = {chart.key: chart.spec for chart in charts_for(found)}["speedup"]
    marked = [row for layer in spec["layer"] for row in layer.get("data", {}).get("values", [])]
    assert found["breakeven"]["accept_rate"].items() <= marked[1].items()
    assert any(row.get("value") == found["speedup"]["value"] for row in marked)


def test_a_schema_without_charts_is_told_with_those_that_have():
    with pytest.raises(InputError, match=r"no charts of specsim.models/1; known: specsim.prediction/1"):
        charts_for({"schema": "specsim.models/1"})
    with pytest.raises(InputError, match="a document without schema"):
        charts_for([])


@pytest.mark.browser
def test_every_chart_is_drawn(new_page):
    """No chart is blank: each draws as many marks as it has rows, at a width within its page."""
    page = new_page(viewport={"width": 700, "height": 500})
    for name in ("vega", "vega-lite", "vega-embed"):
        page.add_script_tag(path=VENDOR / f"{name}.min.js")
    assert {make()["schema"] for make in DOCUMENTS.values()} == set(KINDS)
    for name, make in DOCUMENTS.items():
        for chart in charts_for(make()):
            page.evaluate("document.body.innerHTML = '<div id=c style=\"width: 100%\"></div>'")
            page.evaluate(
                "s => vegaEmbed('#c', s, {renderer: 'svg', actions: false, ast: true}).then(() => 0)", chart.spec
            )
            marks = page.evaluate(
                "Array.from(document.querySelectorAll('#c .mark-rect path, #c .mark-symbol path, #c .mark-line path'))"
                ".filter(m => m.getBoundingClientRect().width + m.getBoundingClientRect().height > 0).length"
            )
            assert marks > 0, (name, chart.key)
            width = page.evaluate("document.querySelector('#c svg').getBoundingClientRect().right")
            assert 350 < width <= 700, (name, chart.key)
