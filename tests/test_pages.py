"""Pages: tables that fit any width without breaking a word, and HTML that nothing escapes from."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specsim
from specsim.pages import Grid, Line, grid, html, text

WORD = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)
CELL = st.lists(WORD, max_size=4).map(" ".join)
HEAD = st.tuples(st.sampled_from(["", ">", "~"]), WORD).map("".join)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    heads = draw(st.lists(HEAD, min_size=1, max_size=9))
    rows = draw(st.lists(st.lists(CELL, min_size=len(heads), max_size=len(heads)), max_size=4))
    return grid(heads, rows, keys=draw(st.integers(1, 2)))


@settings(deadline=None)
@given(grids(), st.integers(20, 200))
def test_tables_fit_and_break_no_word(g: Grid, width: int) -> None:
    """The keys and the widest other column always stand side by side; from that width on every line fits, and below it
    as well every word of every cell is there, whole."""
    lines = text([g], width).splitlines()
    cells = [[row[i] for row in g.rows] for i in range(len(g.columns))]
    whole = [" ".join(cell).split() if c.prose else cell for c, cell in zip(g.columns, cells, strict=True)]
    widest = [max(map(len, [c.name, *parts])) for c, parts in zip(g.columns, whole, strict=True)]
    if width >= sum(widest[: g.keys]) + max(widest[g.keys :], default=0) + 2 * g.keys:
        assert max(map(len, lines), default=0) <= width
    words = set(" ".join(lines).split())
    assert {word for row in g.rows for cell in row for word in cell.split()} <= words


@settings(deadline=None)
@given(grids())
def test_cells_stay_whole_where_all_fits(g: Grid) -> None:
    """At a width that takes the whole table, a row is one line and its cells stand in order."""
    lines = text([g], 2000).splitlines()
    assert len(lines) == 1 + len(g.rows)
    for line, row in zip(lines[1:], g.rows, strict=True):
        assert line.split() == " ".join(row).split()


def test_columns_that_do_not_fit_go_on_below_under_their_key() -> None:
    """12 columns of text: the key of 4, a gap of 2 and one column of 5 take 11; a second one would take 7 more."""
    g = grid(("name", ">first", ">third"), [("box", "12345", "67890")])
    assert text([g], 12).splitlines() == ["name  first", "box   12345", "", "name  third", "box   67890"]


def test_the_first_of_several_keys_stands_above_its_rows_where_the_rest_then_fits() -> None:
    """Side by side: 9 + 2 + 5 + 2 + 5 = 23 columns. Without the first key: an indent of 2, then 12. An empty key goes on
    with the last one, and so does a repeated one; a cell of prose may take several lines."""
    rows = [
        ("some-name", "decode", "10"),
        ("", "verify", "20"),
        ("some-name", "cycle", "30"),
        ("other", "decode", "40"),
    ]
    g = grid(("record", "phase", ">error"), rows, keys=2)
    shown = ["record", "  phase   error", "some-name", "  decode     10", "  verify     20", "  cycle      30", "other"]
    assert text([g], 17).splitlines() == [*shown, "  decode     40"]
    assert text([g], 24).splitlines()[1] == "some-name  decode     10"
    prose = grid(("record", "phase", "~said"), [("a-long-name", "cycle", "one two three four five")], keys=2)
    shown = ["record", "  phase  said", "a-long-name", "  cycle  one two three four", "         five"]
    assert text([prose], 29).splitlines() == shown


def test_a_title_is_as_narrow_as_its_table() -> None:
    assert text([grid(("a",), [("1",)], "one two three four")], 10).splitlines() == ["one two", "three four", "a", "1"]


def test_prose_takes_what_is_left() -> None:
    """Beside a key of 3 and a gap of 2, 18 and 27 columns are left."""
    g = grid(("key", "~said"), [("a", "one two three four five six seven")])
    assert text([g], 23).splitlines() == ["key  said", "a    one two three four", "     five six seven"]
    assert text([g], 32).splitlines() == ["key  said", "a    one two three four five six", "     seven"]


def test_paragraphs_are_broken_on_a_terminal_only() -> None:
    note = Line("note: " + "word " * 30, "warning")
    assert len(text([note], 40).splitlines()) == 1
    lines = text([note], 40, wrap=True).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[1].startswith("  word")


def test_a_broken_command_is_the_same_command() -> None:
    """A shell joins lines that end with a backslash."""
    command = (
        "python -m sglang.launch_server --model-path a/b --tp 8 --json '{\"a b\": 1}' --flag --speculative-num-steps 3"
    )
    lines = text([Line("SGLang: " + command, "command")], 40, wrap=True).splitlines()
    assert max(map(len, lines)) <= 40
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert " ".join(" ".join(line.removesuffix("\\") for line in lines).split()) == "SGLang: " + command


def test_wide_characters_take_two_columns() -> None:
    lines = text([grid(("name", "n"), [("模型", "1"), ("abcd", "2")])], 80).splitlines()
    assert lines[1:] == ["模型  1", "abcd  2"]


def test_no_control_character_reaches_a_terminal() -> None:
    shown = text([Line("\x1b[31mred\x07"), grid(("a",), [("\x1b]0;title\x07\n",)])], 80)
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_colours_are_only_what_was_asked_for() -> None:
    page = [Line("yes", "verdict"), grid(("a",), [("1",)], "title")]
    assert "\x1b" not in text(page, 80)
    assert "\x1b[1myes\x1b[0m" in text(page, 80, styled=True)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.said = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.said += data


@settings(deadline=None)
@given(st.text(max_size=20), st.sampled_from(["", "title", "warning", "command"]))
def test_html_escapes_everything(word: str, style: str) -> None:
    bad = f"<script>{word}</script>&\"'<img>"
    reader = _Reader()
    reader.feed(html([Line(bad, style), grid((bad,), [(bad,)], bad)]))  # type: ignore[arg-type]
    assert reader.tags <= {
        "div",
        "p",
        "b",
        "strong",
        "small",
        "em",
        "pre",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    assert reader.said.replace("\r", "\n").count("<script>") == 4


@pytest.mark.parametrize("shown", ["prediction", "model", "profile"])
def test_results_show_themselves(shown: str) -> None:
    """repr is one line that says what it is, print gives the page, a notebook gets tables of the same cells."""
    s = specsim.scenario(accept_rate=0.6)
    result = {"prediction": specsim.predict(s, samples=20), "model": s.model, "profile": s.profile}[shown]
    assert repr(result).startswith(f"<{type(result).__name__}: ")
    assert "\n" not in repr(result)
    assert len(repr(result)) < 400
    page = list(result.page())
    tables = [part for part in page if isinstance(part, Grid)]
    reader = _Reader()
    reader.feed(result._repr_html_())
    assert "table" in reader.tags
    for table in tables:
        for row in table.rows:
            assert all(cell in reader.said for cell in row)
            assert all(word in str(result) for cell in row for word in cell.split())
