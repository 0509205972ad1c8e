"""Reports: one file, whole without a network, safe whatever a model is called, and usable without a mouse."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser

import pytest
from documents import COMMANDS, document
from test_charts import ALL

from specsim.cli import main
from specsim.errors import InputError
from specsim.profiles import dump_profile, load_profile
from specsim.report import SCRIPTS, report, vendored
from specsim.report_parts import verdict_of

LIMIT = 5_000_000  # bytes of a file
NASTY = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>&<!--\u2028\"'`${x}"
COVERED = """() => [...document.querySelectorAll('.chart')].flatMap(chart => {
  const texts = [...chart.querySelectorAll('.role-mark text')].filter(t => t.textContent && t.getAttribute('opacity') !== '0');
  const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
  const on = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  return boxes.flatMap(([a, x], i) => boxes.slice(i + 1).filter(([, y]) => on(x, y)).map(([b]) => [chart.id, a, b]));
})"""
CUT = """[...document.querySelectorAll('table.stacks')].map(t => t.parentElement)
  .filter(s => s.scrollWidth > s.clientWidth + 1).map(s => s.innerText.slice(0, 80))"""
DRAWN = "[...document.querySelectorAll('.chart')].every(c => c.dataset.state)"


class Reader(HTMLParser):
    """Elements with their attributes, and the texts of scripts."""

    def __init__(self, text: str, whole: bool = False) -> None:
        """whole: with the chart scripts, which take long to read."""
        super().__init__()
        for name in () if whole else SCRIPTS:
            text = text.replace(vendored(name), "")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "link", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data

    def named(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def named_badly(value, key=""):
    """The document with every free text replaced; what decides between kinds stays."""
    if isinstance(value, dict):
        return {k: named_badly(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [named_badly(v, key) for v in value]
    if isinstance(value, str) and key not in ("schema", "acceptance", "method", "phase", "kind", "key"):
        return NASTY
    return value


@pytest.mark.parametrize("name", ALL)
def test_a_report_is_one_well_formed_file_that_names_no_address_to_fetch(name):
    text = report(ALL[name]())
    assert len(text.encode()) < LIMIT
    found = Reader(text)
    assert found.open == []
    assert len(found.named("h1")) == 1
    assert {attrs.get("src") for _, attrs in found.elements} == {None}
    assert all(a["href"].startswith(("#", "data:application/json;base64,")) for a in found.named("a"))
    assert not found.named("link")
    charts = [attrs for _, attrs in found.elements if attrs.get("class") == "chart"]
    assert all(c["role"] == "img" and c["aria-label"] for c in charts)
    assert len(found.named("details")) == len(charts) == len(found.named("figure"))
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch(r"h\d", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@pytest.mark.parametrize("name", ["prediction", "validation of nothing"])
def test_the_content_policy_allows_the_scripts_of_the_file_and_nothing_else(name):
    found = Reader(report(ALL[name]()), whole=True)
    (policy,) = [m["content"] for m in found.named("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    types = [attrs.get("type") for attrs in found.named("script")]
    code = [text for text, kind in zip(found.scripts, types, strict=True) if kind is None]
    sums = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in code}
    assert set(rules["script-src"].split()) == (sums or {"'none'"})
    assert set(rules) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}


def test_a_verdict_of_what_does_not_fit_is_marked():
    fits = document("prediction")
    unfit = {**fits, "memory": {**fits["memory"], "fits": False}}
    assert 'class="verdict"' in report(fits)
    assert 'class="verdict bad"' in report(unfit)


def test_the_document_can_be_taken_out_of_the_report_whole():
    found = document("prediction")
    (link,) = [a["href"] for a in Reader(report(found)).named("a") if "download" in a]
    assert json.loads(base64.b64decode(link.partition(",")[2])) == found


@pytest.mark.parametrize("name", COMMANDS)
def test_names_never_leave_their_text(name):
    """Every text of a document is a try to break out, and none opens an element."""
    found, clean = Reader(report(named_badly(document(name)))), Reader(report(document(name)))
    assert not found.named("img")
    assert [t for t, _ in found.elements if t in ("script", "h1", "h2", "figure", "meta")] == [
        t for t, _ in clean.elements if t in ("script", "h1", "h2", "figure", "meta")
    ]
    assert found.open == []


def test_numbers_of_one_reference_share_a_row_with_the_span_of_their_uncertainties():
    sources = [
        {
            "of": "a",
            "kind": "measured",
            "reference": "a bench",
            "date": "2026-11-29T10:00Z",
            "relative_uncertainty": 0.02,
        },
        {
            "of": "b",
            "kind": "measured",
            "reference": "a bench",
            "date": "2026-11-29T11:00Z",
            "relative_uncertainty": 0.1,
        },
        {"of": "c", "kind": "given", "reference": "a flag", "date": None, "relative_uncertainty": None},
    ]
    text = report({**document("prediction"), "sources": sources})
    rows = [re.findall(r">([^<]*)</t[hd]>", row) for row in re.findall(r"<tr>.*?</tr>", text)]
    assert ["a, b", "measured", "a bench", "2026-11-29", "2% to 10%"] in rows
    assert ["c", "given", "a flag", "", ""] in rows


def big_sweep():
    """A sweep of 10,000 rows, and as many cells in each map: made by hand, as a command lists 2,000 at most."""
    found = document("sweep")

    def many(rows):
        return [
            {**rows[i % len(rows)], "batch": 1 + i % 100, "context": 1024 * (1 + i // 100 % 10)} for i in range(10_000)
        ]

    fronts = [{**found["pareto"][0], "points": many(found["pareto"][0]["points"])}]
    return {**found, "rows": many(found["rows"]), "best": many(found["best"]), "breakeven": many(found["breakeven"]), "pareto": fronts}  # fmt: skip


def test_ten_thousand_rows_are_cut_and_the_report_says_so():
    text = report(big_sweep())
    assert len(text.encode()) < LIMIT
    assert "The first 300 of 10,000 rows." in text
    assert "Save the whole result" not in text, "it would be as large again"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "is no result of specsim; a report reads what predict, sweep, plan, simulate, validate"),
        ('{"schema": 3}', "is no result of specsim"),
        (
            '{"schema": "specsim.models/1"}',
            "is specsim.models/1, which no report reads; a report reads what predict, sweep",
        ),
        ('{"schema": "specsim.record/1"}', "which no report reads; compare it first: specsim validate --records"),
        ('{"schema": "specsim.sweep/1"}', "is no whole specsim.sweep/1 (KeyError: 'cases'); make it again with --json"),
        ('{"schema": "specsim.prediction/1", "breakdown": 3}', "is no whole specsim.prediction/1"),
        ("{", "line 1, column 2: is not JSON"),
        ('{"schema": ["specsim.sweep/1"]}', "is no result of specsim"),
    ],
)
def test_a_file_that_is_no_result_is_told_in_one_line(tmp_path, capsys, content, told):
    source = tmp_path / "odd.json"
    source.write_text(content)
    with pytest.raises(SystemExit) as done:
        main(["report", "--from", str(source), "-o", str(tmp_path / "out.html")])
    assert done.value.code == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_document_that_lacks_any_one_part_is_told_or_shown(name):
    """No document, whatever is missing from its first level, ends in a traceback."""
    whole = document(name)
    for key in (k for k, v in whole.items() if isinstance(v, (dict, list))):
        for odd in ({k: v for k, v in whole.items() if k != key}, {**whole, key: 3}, {**whole, key: None}):
            with contextlib.suppress(InputError):
                report(odd)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_value_that_is_odd_anywhere_is_told_or_shown(name):
    """Whatever stands at any place of a document: numbers that no float holds, and what is of another type."""
    whole = json.loads(json.dumps(document(name)))
    places: list = []

    def walk(node):
        for key in list(node)[:12] if isinstance(node, dict) else range(min(len(node), 1)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(whole)
    for node, key in places[:60]:
        kept = node[key]
        for odd in (10**400, [None], 1e308, "x"):
            node[key] = odd
            with contextlib.suppress(InputError):
                report(whole)
        node[key] = kept


def test_the_command_predicts_a_scenario_or_takes_a_result(tmp_path, capsys):
    options = ["--draft-tokens", "3", "--accept-rate", "0.6"]
    with pytest.raises(SystemExit) as done:
        main(["report", *options, "-o", str(tmp_path / "a.html")])
    assert done.value.code == 0
    source = tmp_path / "result.json"
    source.write_text(json.dumps(document("prediction")))
    with pytest.raises(SystemExit) as done:
        main(["report", "--from", str(source), "-o", str(tmp_path / "b.html")])
    assert done.value.code == 0
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()
    assert "wrote" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["report", "--from", str(source), *options, "-o", str(tmp_path / "c.html")])
    assert done.value.code == 2
    assert "the result has its own scenario" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["report", "-o", str(source / "c.html")])
    assert done.value.code == 2
    assert "--output: there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["report", "--from", str(source), "-o", str(source)])
    assert done.value.code == 2
    assert "--output: .json is no report; end the name in .html" in capsys.readouterr().err
    assert json.loads(source.read_text()) == document("prediction")


def test_a_profile_is_reported_as_its_document_is(tmp_path):
    (tmp_path / "box.yaml").write_text(dump_profile(load_profile("1x-h200")))
    with pytest.raises(SystemExit) as done:
        main(["report", "--from", str(tmp_path / "box.yaml"), "-o", str(tmp_path / "box.html")])
    assert done.value.code == 0
    assert (tmp_path / "box.html").read_text() == report(document("hardware of one GPU"))


def test_verdicts_of_calibrations_and_weighed_profiles_say_what_their_numbers_say():
    """Of 563 measurements of this record 18 failed; without peer access there is no custom all-reduce."""
    found = document("calibration")
    assert (found["measured"], found["failed"]) == (563, 18)
    assert verdict_of(found).startswith("563 measurements of 2x-h200 are done, 18 failed.")
    found = document("hardware diff weighed")
    assert found["missing"] == ["allreduce.custom.2.graph"]
    assert "2x-h200-no-p2p lacks 1 of them, and the others differ by at most" in verdict_of(found)
    assert verdict_of({**found, "within": 0.03, "agree": False}).endswith("They do not agree within 3.00%.")
    assert verdict_of({**found, "missing": []}).endswith(f"; they differ by at most {found['worst']:.1%}.")


def test_a_teams_defaults_stay_out_of_the_report_of_a_result(tmp_path, monkeypatch):
    (tmp_path / "specsim.yaml").write_text("scenario: {hardware: 1x-h200, eager: [verify]}\n")
    (tmp_path / "result.json").write_text(json.dumps(document("prediction")))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["report", "--from", "result.json", "-o", "out.html"])
    assert done.value.code == 0
    assert (tmp_path / "out.html").read_text() == report(document("prediction"))


# --- in a browser -----------------------------------------------------------------------------------------------------


def opened(new_page, tmp_path, text, **options):
    path = tmp_path / "report.html"
    path.write_text(text, encoding="utf-8")
    page = new_page(**options)
    page.goto(path.as_uri())
    page.wait_for_function(DRAWN)
    return page


@pytest.mark.browser
@pytest.mark.parametrize(
    "name",
    [
        "prediction",
        "sweep",
        "plan",
        "simulation",
        "validation",
        "diagnosis",
        "hardware",
        "hardware diff",
        "hardware diff weighed",
        "calibration",
    ],
)
def test_every_kind_opens_offline_with_its_charts_drawn(new_page, tmp_path, name):
    """On a phone in the dark: no chart is blank, nothing is wider than the page, and the page asks for nothing."""
    page = opened(
        new_page, tmp_path, report(document(name)), viewport={"width": 390, "height": 800}, color_scheme="dark"
    )
    charts = page.evaluate(
        "[...document.querySelectorAll('.chart')].map(c => [c.dataset.state, c.querySelectorAll('.role-mark path').length])"
    )
    assert charts
    assert all(state == "drawn" and marks > 0 for state, marks in charts)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(COVERED) == [], "letters lie on each other"
    assert page.evaluate(CUT) == [], "a table with sentences is a list of its rows"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"


@pytest.mark.browser
@pytest.mark.parametrize("name", ["validation of nothing", "sweep of one"])
def test_reports_of_nothing_and_of_one_row_open(new_page, tmp_path, name):
    page = opened(new_page, tmp_path, report(ALL[name]()))
    assert page.locator("h1").is_visible()
    assert page.locator(".chart[data-state=failed]").count() == 0


@pytest.mark.browser
def test_ten_thousand_rows_open(new_page, tmp_path):
    page = opened(new_page, tmp_path, report(big_sweep()))
    assert page.locator(".chart[data-state=drawn]").count() == page.locator("figure").count() == 5


@pytest.mark.browser
@pytest.mark.parametrize("name", ["prediction", "sweep", "plan", "diagnosis", "hardware diff"])
def test_a_name_that_is_a_script_does_not_run(new_page, tmp_path, name):
    page = opened(new_page, tmp_path, report(named_badly(document(name))))
    assert page.evaluate("window.broken") is None
    assert page.locator(".chart[data-state=failed]").count() == 0
    assert page.locator("img").count() == 0


@pytest.mark.browser
def test_tables_and_choices_work_from_the_keyboard(new_page, tmp_path):
    page = opened(new_page, tmp_path, report(document("sweep")))
    first = page.locator("figure details").first
    first.locator("summary").focus()
    page.keyboard.press("Enter")
    assert first.locator("table").is_visible()
    page.keyboard.press("Tab")
    before = page.locator("#chart-best").inner_text()
    choice = page.locator("#controls-best select")
    choice.focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#chart-best").inner_text() != before
    assert choice.evaluate("s => s.closest('label').innerText.trim().startsWith('accept rate')")
    page.keyboard.press("Home")


@pytest.mark.browser
def test_print_is_black_on_white_and_leaves_out_what_only_a_screen_can_use(new_page, tmp_path):
    page = opened(new_page, tmp_path, report(document("sweep")), color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("figure details").first.is_visible()
    assert not page.locator(".vega-bindings").first.is_visible()
    assert page.locator("figure .chart svg").first.is_visible()
