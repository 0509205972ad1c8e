"""The planner page in a real browser. The fixture `new_page` fails a test whose page logs an error or asks another machine."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specsim.cli import main
from specsim.configs import PRESETS
from specsim.profiles import folder

pytestmark = pytest.mark.browser

ARTEFACTS = Path(__file__).resolve().parent.parent / "artefacts"
PHONE = {"viewport": {"width": 360, "height": 740}}
SHOWN = "body[data-state=shown]"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "specsim", "serve", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    text = ""
    while "}" not in text:
        text += process.stdout.readline()
    yield json.loads(text)["address"]
    process.terminate()
    process.wait()
    process.stdout.close()


@pytest.fixture
def opened(new_page: Callable[..., Any], address: str) -> Callable[..., Any]:
    """opened(fragment, **options): the page with its charts drawn."""

    def go(fragment: str = "", **options: Any) -> Any:
        page = new_page(offline=False, **options)
        page.goto(address + fragment)
        page.wait_for_selector("body[data-charts-ms]")
        return page

    return go


def says(page: Any, part: str) -> str:
    """The verdict, once it holds `part`."""
    page.locator("#verdict", has_text=re.compile(part)).wait_for()
    return str(page.locator("#verdict").inner_text())


def predicted(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        main(["predict", *arguments, "--json"])
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def chosen(page: Any, name: str) -> str:
    """What a select box shows."""
    return str(page.locator(f"#{name}").evaluate("(box) => box.selectedOptions[0].textContent"))


def drop(page: Any, selector: str, name: str, text: str) -> None:
    """A file from outside let fall on an element."""
    page.locator(selector).evaluate(
        """(element, [name, text]) => {
            const carried = new DataTransfer();
            carried.items.add(new File([text], name));
            for (const type of ["dragover", "drop"])
                element.dispatchEvent(new DragEvent(type, { dataTransfer: carried, bubbles: true, cancelable: true }));
        }""",
        [name, text],
    )


def test_moving_sliders_moves_the_verdict_the_charts_and_the_link(opened):
    page = opened("#accept-rate=0.6")
    before = says(page, "loses 25%")
    letters = page.locator("[data-chart=time] svg").inner_html()
    took = []
    for index, d in enumerate(range(4, 10), 2):  # the slider's places count from 2 draft tokens
        page.locator("#draft-tokens").fill(str(index))
        says(page, f"at most {d} tokens")
        took.append(float(page.locator("body").get_attribute("data-verdict-ms")))
    assert min(took) < 100  # of a busy machine; benchmarks/serve_load.py has the distribution
    verdict = says(page, "at most 9")
    assert verdict != before
    assert page.locator("#draft-tokens-number").input_value() == "9"
    page.locator("#announce", has_text=verdict).wait_for()
    page.wait_for_timeout(400)
    assert page.locator("[data-chart=time] svg").inner_html() != letters
    assert page.url.endswith("#accept-rate=0.6&draft-tokens=9")
    number = predicted("--accept-rate", "0.6", "--draft-tokens", "9")["speedup"]["value"]
    assert f"{abs(number - 1):.0%}" in verdict
    page.locator("#accept").select_option("")
    says(page, "pays above|cannot pay")
    page.locator("#draft-tokens").focus()
    page.keyboard.press("ArrowLeft")
    says(page, "at most 8")


def test_the_legend_of_the_break_even_map_is_drawn(opened):
    """Its gradient is looked up by the page's address: before any move, after one, and after "Start over"."""
    page = opened()

    def found() -> bool:
        return page.evaluate(
            """() => [...document.querySelectorAll('svg [fill^="url"]')].map((bar) => {
              const [page, id] = bar.getAttribute("fill").slice(4, -1).replaceAll('"', "").split(/#(.*)/s);
              return page === location.href.split("#")[0] && document.getElementById(id) !== null;
            })"""
        ) == [True]

    page.wait_for_timeout(500)  # the state is written 300 ms after a move
    page.locator("#draft-tokens-number").fill("4")
    says(page, "of at most 4 tokens")
    page.wait_for_timeout(500)
    assert found()
    page.locator("#reset").click()
    says(page, "of at most 3 tokens")
    page.wait_for_timeout(500)
    page.locator("#draft-tokens-number").fill("5")
    says(page, "of at most 5 tokens")
    page.wait_for_timeout(500)
    assert found()


def test_a_link_reproduces_the_state(opened):
    link = "#model=Llama-3.1-8B&hardware=2x-h200&engine=vllm&batch=24&context=8k&draft-tokens=4&accept-length=2.2&eager=verify"
    page = opened(link)
    words = ["--model", "Llama-3.1-8B", "--hardware", "2x-h200", "--engine", "vllm", "--batch", "24", "--context", "8192", "--draft-tokens", "4"]  # fmt: skip
    expected = predicted(*words, "--accept-length", "2.2", "--eager", "verify")
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON", exact=True).click()
    assert json.loads(Path(download.value.path()).read_text()) == expected
    assert page.locator("#model").input_value() == "Llama-3.1-8B"
    assert page.locator("#batch-number").input_value() == "24"
    assert page.locator("#accept").input_value() == "accept-length"
    assert page.locator("[name=eager][value=verify]").is_checked()
    page.locator("#sources-title").click()
    page.locator("#sources tbody tr").first.wait_for()
    assert page.locator("#sources tbody tr").count() == len(expected["sources"])
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    assert Path(download.value.path()).read_text().startswith("table,name,value,low,high")
    with page.expect_download() as download:
        page.get_by_role("button", name="Launch flags").click()
    flags = Path(download.value.path()).read_text()
    assert "--speculative-num-draft-tokens 4" in flags
    assert '"num_speculative_tokens": 3' in flags
    assert (
        page.locator("#command").inner_text() == f"specsim predict {' '.join(words)} --accept-length 2.2 --eager verify"
    )
    page.wait_for_timeout(400)
    assert page.url.endswith(link)  # an untouched state is written as it came


def test_files_are_dropped_refused_shared_and_put_away(opened, address):
    page = opened("#accept-rate=0.6", console=("413", "422"))
    config = (PRESETS / "Qwen3-8B.json").read_text()
    assert chosen(page, "draft") == "kimi-k2.5-eagle3, automatic"
    assert chosen(page, "method") == "eagle3, automatic"
    drop(page, ".pick[data-kind=model]", "own.json", config)  # the error is in the words of the page
    page.locator("#error", has_text="“Draft”: no public draft of own is known; give “Draft” or “Method”, or").wait_for()
    assert chosen(page, "draft") == chosen(page, "method") == "automatic"
    page.locator("#accept").select_option("")
    page.locator("#headline", has_text="own on 8x-pcie-field").wait_for()
    assert (chosen(page, "model"), chosen(page, "draft"), chosen(page, "method")) == (
        "own",
        "none, automatic",
        "none, automatic",
    )
    drop(page, ".pick[data-kind=model]", "<img src=x onerror=alert(1)>.json", config)
    page.locator("#headline", has_text="<img src=x onerror=alert(1)>").wait_for()
    assert not page.locator("#headline img, .chip img, #command img").count()
    page.locator("#model-file").set_input_files({"name": "mine.json", "mimeType": "", "buffer": config.encode()})
    page.locator("#headline", has_text="mine").wait_for()
    drop(page, "body", "box.yaml", (folder() / "1x-h200.yaml").read_text())
    page.locator("#headline", has_text="mine on 1x-h200").wait_for()
    assert "8.19 B" in page.locator(".pick[data-kind=model] .chip").inner_text()

    drop(page, ".pick[data-kind=model]", "bad.json", '{"hidden_size": 64,}')
    page.locator("#error", has_text="bad.json, line 1, column 20: is not JSON").wait_for()
    drop(page, ".pick[data-kind=hardware]", "bad.yaml", "a: [")
    page.locator("#error", has_text="bad.yaml, line ").wait_for()
    drop(page, ".pick[data-kind=model]", "large.json", "x" * (2**20 + 1))
    page.locator("#error", has_text="large.json: is larger than 1024 KiB").wait_for()
    page.locator("#batch").fill("3")  # and the page goes on with what it had
    page.locator("#headline", has_text="mine on 1x-h200, sglang 0.5.16, TP 1, batch 4").wait_for()
    assert page.locator("#error").inner_text() == ""

    drop(page, "body", "config.json", (PRESETS / "qwen3-8b-eagle3.json").read_text())  # a drafter is known by itself
    page.locator("#headline", has_text="mine + draft on 1x-h200").wait_for()
    page.get_by_role("button", name="Put the dropped draft away").click()
    page.locator("#headline", has_text="mine on 1x-h200").wait_for()

    page.get_by_role("button", name="Copy link").click()
    page.locator("#done", has_text="does not hold mine.json and box.yaml").wait_for()
    link = page.url
    again = opened(link.removeprefix(address))  # this server still has the files
    assert again.locator("#headline").inner_text() == page.locator("#headline").inner_text()
    page.get_by_role("button", name="Put the dropped model away").click()
    page.locator("#headline", has_text="Kimi-K2.5").wait_for()


def test_a_link_with_a_file_that_the_server_lacks_asks_for_it(new_page, address):
    page = new_page(offline=False, console=("409",))
    page.goto(f"{address}#model-file={'0' * 32}%2Fmine.json&batch=2")
    page.locator("#error", has_text="the dropped model file is not here; drop it again").wait_for()
    assert page.locator("#verdict").inner_text() == "No prediction yet."
    assert page.locator(".pick[data-kind=model] .chip").inner_text().startswith("mine.json")
    drop(page, ".pick[data-kind=model]", "mine.json", (PRESETS / "Qwen3-8B.json").read_text())
    page.locator("#headline", has_text="mine").wait_for()
    assert "batch 2" in page.locator("#headline").inner_text()


def test_a_launch_line_is_read_and_bad_input_is_one_line(new_page, address):
    page = new_page(offline=False, console=("422",))
    page.goto(f"{address}#batch=4&draft-tokens=6")
    page.wait_for_selector(SHOWN)
    page.locator("#line-box summary").click()
    line = "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2 --speculative-algorithm EAGLE3 --speculative-num-steps 4 --speculative-eagle-topk 1"
    page.locator("#line").fill(line)
    page.locator("#headline", has_text="TP 2, batch 4, context 2048, eagle3 with 5 draft tokens").wait_for()
    page.locator("#draft-tokens").fill("1")
    page.locator("#headline", has_text="eagle3 with 3 draft tokens").wait_for()
    page.locator("#model").select_option("Qwen3-30B-A3B")  # the line was of its own model
    page.locator("#headline", has_text="Qwen3-30B-A3B + qwen3-30b-eagle3 on 8x-pcie-field, sglang").wait_for()
    assert page.locator("#line").input_value() == ""
    page.locator("#more summary").click()
    page.locator("#topk").fill("4")  # a tree of the steps and tokens that are shown
    page.locator("#command", has_text="--draft-tokens 3 --num-steps 2 --topk 4").wait_for()
    page.locator("#line").fill("vllm serve nobody/knows")
    page.locator("#error", has_text="drop its config.json on the page").wait_for()
    page.locator("#line").fill("")
    page.locator("#batch-number").fill("8x")
    page.locator("#error", has_text="“Batch”: '8x' is not a whole number; for example 4").wait_for()
    assert page.locator("#error").get_attribute("role") == "alert"
    page.locator("#batch-number").fill("8k")
    page.locator("#headline", has_text="batch 8192").wait_for()
    assert page.locator("#error").inner_text() == ""


CHECKS = """() => {
    const wrong = [];
    const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
    if (new Set(ids).size !== ids.length) wrong.push("an id is there twice");
    for (const e of document.querySelectorAll("input, select, textarea, button")) {
        const name = e.getAttribute("aria-label") || [...(e.labels ?? [])].map((l) => l.textContent).join(" ") || e.textContent;
        if (!name.trim()) wrong.push(`no name: ${e.outerHTML}`);
    }
    for (const e of document.querySelectorAll("[aria-labelledby]"))
        if (!document.getElementById(e.getAttribute("aria-labelledby"))) wrong.push(`no label: ${e.outerHTML.slice(0, 99)}`);
    for (const e of document.querySelectorAll("svg.marks")) if (!e.getAttribute("aria-label") && !e.querySelector("[aria-label]")) wrong.push("a chart has no description");
    for (const f of document.querySelectorAll("figure")) if (!f.querySelector("details table")) wrong.push("a chart has no table");
    const levels = [...document.querySelectorAll("h1, h2, h3")].filter((h) => h.checkVisibility()).map((h) => +h.tagName[1]);
    levels.forEach((l, i) => { if (l > (levels[i - 1] ?? 0) + 1) wrong.push(`heading level ${l} after ${levels[i - 1]}`); });
    const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const numbers = (c) => (c.match(/[\\d.]+/g) ?? []).map(Number);
    for (const e of document.querySelectorAll("body *")) {
        const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!text || !e.checkVisibility() || e.closest("svg, :disabled, option, .unseen, .skip, noscript")) continue;
        let under = e;
        while (under && (numbers(getComputedStyle(under).backgroundColor)[3] ?? 1) === 0) under = under.parentElement;
        const pair = [getComputedStyle(e).color, getComputedStyle(under ?? document.body).backgroundColor].map((c) => light(numbers(c))).sort((a, b) => b - a);
        const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
        if (ratio < 4.5) wrong.push(`contrast ${ratio.toFixed(2)}: ${e.outerHTML.slice(0, 99)}`);
    }
    return wrong;
}"""


@pytest.mark.parametrize(
    ("scheme", "fragment"),
    [
        ("light", "#accept-rate=0.6"),
        ("dark", "#accept-rate=0.95&hardware=8x-h200"),
        ("dark", "#method=none&model=DeepSeek-R1&hardware=1x-h200"),
    ],
)
def test_names_descriptions_tables_and_contrast(scheme, fragment, opened):
    page = opened(fragment, color_scheme=scheme)
    assert page.evaluate(CHECKS) == []
    unfit = page.locator("#answer").get_attribute("data-mood") == "unfit"
    assert unfit == ("DeepSeek" in fragment) == page.locator("#verdict").inner_text().startswith("Does not fit")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_by_keyboard_alone(opened):
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to charts and tables"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "details"
    seen = []
    page.evaluate("document.querySelector('.skip').focus()")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body || document.activeElement.className === 'skip'"):
            break
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        assert (
            page.evaluate(
                "getComputedStyle(document.activeElement.matches('.file input') ? document.activeElement.parentElement : document.activeElement).outlineStyle"
            )
            != "none"
        ), seen[-1]
    assert seen.index("model") < seen.index("draft-tokens") < seen.index("copy-link") < seen.index("JSON")
    assert {"model-file", "hardware-file", "accept", "batch", "tp", "time-table"} <= set(seen)
    page.locator("[data-chart=speedup] summary").focus()
    page.keyboard.press("Enter")
    rows = page.locator("[data-chart=speedup] tbody tr")
    rows.nth(10).wait_for()  # the table is written when it opens
    assert rows.count() == 11
    page.locator("#batch").focus()
    page.keyboard.press("ArrowRight")
    page.locator("#headline", has_text="batch 2").wait_for()
    assert page.locator("#batch").get_attribute("aria-valuetext") == "2 sequences"


def test_a_phone_shows_all_without_scrolling_sideways(opened):
    page = opened("#accept-rate=0.6", **PHONE)
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.evaluate("scrollTo(0, 900)")
    assert page.locator("#verdict").is_visible()
    assert 0 <= page.locator("#answer").bounding_box()["y"] < 100  # stays in sight
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "planner-phone.png")


def test_a_screenshot_is_kept(opened):
    ARTEFACTS.mkdir(exist_ok=True)
    page = opened("#accept-rate=0.6", viewport={"width": 1200, "height": 860})
    page.screenshot(path=ARTEFACTS / "planner.png")
    for width in (390, 500, 700, 900, 1000, 1150, 1300, 1700):  # no figure stands alone in its row, unless it fills it
        page.set_viewport_size({"width": width, "height": 860})
        page.wait_for_timeout(50)
        assert page.locator("#figures div").evaluate_all(
            """(tiles) => tiles.every((tile) => tile.offsetWidth > tile.parentElement.clientWidth * 0.9
                || tiles.some((other) => other !== tile && other.offsetTop === tile.offsetTop))"""
        ), width
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (ARTEFACTS / "planner.png").stat().st_size > 20_000


def test_a_server_that_is_gone_is_told(new_page, address):
    page = new_page(offline=False, console=("Failed to load",))
    page.goto(address)
    page.wait_for_selector(SHOWN)
    page.route("**/predict", lambda route: route.abort())
    page.locator("#batch").fill("2")
    page.locator("#error", has_text="no answer: is specsim serve still running?").wait_for()
