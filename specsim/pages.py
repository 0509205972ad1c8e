"""What a result says to people: lines and tables, made once and shown alike by terminals, notebooks and reports.

A page is a sequence of `Line` and `Grid`. `text` lays it out for a width: no table breaks a word or a number. Where the
columns do not fit side by side, the first of several keys stands above its rows; where that is not enough, columns go on
below, under the same keys. `html` makes tables of it, with everything escaped.
"""

from __future__ import annotations

import html as markup
import importlib
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

Style = Literal["", "title", "verdict", "bad verdict", "faint", "warning", "alarm", "command"]
WIDTH = 80  # where there is no terminal
READABLE = 100  # columns that a line of prose takes at most
GAP = "  "
PROSE = 20  # columns that a prose cell is given before others move to a table below

ANSI = {
    "title": "1",
    "verdict": "1",
    "bad verdict": "1;31",
    "faint": "2",
    "warning": "33",
    "alarm": "1;31",
    "command": "36",
}
TAGS = {
    "": "<p>{}</p>",
    "title": "<p><b>{}</b></p>",
    "verdict": "<p><strong>{}</strong></p>",
    "bad verdict": "<p><strong>{}</strong></p>",
    "faint": "<p><small>{}</small></p>",
    "warning": "<p><em>{}</em></p>",
    "alarm": "<p><strong>{}</strong></p>",
    "command": "<pre>{}</pre>",
}


@dataclass(frozen=True)
class Line:
    """A paragraph; without text, an empty line. A command stays fit to be copied when it is broken."""

    text: str = ""
    style: Style = ""


@dataclass(frozen=True)
class Column:
    """right: flush right, as numbers are. prose: cells may be broken between words; all others stay whole."""

    name: str
    right: bool = False
    prose: bool = False


@dataclass(frozen=True)
class Grid:
    """A table of texts. The first `keys` columns say what a row is about."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    keys: int = 1


Page = Iterable[Line | Grid]


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", keys: int = 1) -> Grid:
    """A table from heads such as "name", ">number" (flush right) and "~sentences" (prose). Short rows are filled up."""
    columns = tuple(Column(head.lstrip(">~"), head.startswith(">"), head.startswith("~")) for head in heads)
    filled = (tuple(row) + ("",) * (len(columns) - len(row)) for row in rows)
    return Grid(columns, tuple(filled), title, keys)


class Shown:
    """A result that shows itself: tables in a notebook, its first lines as `repr`, the whole page when printed.

    `page_from` names the module whose function `page` makes a page of it.
    """

    page_from: ClassVar[str] = ""

    def page(self) -> Page:
        """What there is to show."""
        made: Page = importlib.import_module(self.page_from).page(self)
        return made

    def said(self) -> dict[str, str]:
        """The title and the verdict, as documents carry them; both stand before the first table, and may be missing."""
        found: dict[str, str] = {}
        for line in self.page():
            if not isinstance(line, Line):
                break
            if line.style == "title":
                found["title"] = line.text
            if line.style in ("verdict", "bad verdict"):  # what follows it need not be laid out
                found["verdict"] = line.text
                break
        return found

    def _repr_html_(self) -> str:
        return html(self.page())

    def __str__(self) -> str:
        return text(self.page()).rstrip("\n")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {' | '.join(self.said().values())}>"


# --- text -----------------------------------------------------------------------------------------------------------


def text(page: Page, width: int = WIDTH, *, wrap: bool = False, styled: bool = False) -> str:
    """The page in columns of text. Tables are never wider than `width` unless one word of them is; `wrap` breaks
    paragraphs as well, between words; `styled` adds ANSI colours."""
    out: list[str] = []
    for part in page:
        if isinstance(part, Grid):
            rows = tuple(tuple(map(_plain, row)) for row in part.rows)
            out += _table(replace(part, rows=rows, title=_plain(part.title)), width, styled)
            continue
        said = _plain(part.text)
        if part.style == "command":
            lines = _command(said, width if wrap else 0)
        else:
            lines = _wrapped(said, min(width, READABLE)) if wrap else [said]
        out += [_styled(line, part.style, styled) for line in lines]
    return "".join(line + "\n" for line in out)


def _plain(string: str) -> str:
    """Without control characters: names from files shall not steer a terminal."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", string)


def _styled(line: str, style: Style, styled: bool) -> str:
    return f"\x1b[{ANSI[style]}m{line}\x1b[0m" if styled and style and line else line


def _wrapped(line: str, width: int) -> list[str]:
    """The line broken between words, what follows indented as it is, and after a label such as "note: " a bit more."""
    indent = line[: len(line) - len(line.lstrip())]
    more = "  " if re.match(r"\s*[a-z]+: ", line) else ""
    return textwrap.wrap(line, width, subsequent_indent=indent + more, break_long_words=False, break_on_hyphens=False) or [""]  # fmt: skip


def _command(line: str, width: int) -> list[str]:
    """The command broken before options, with the backslashes that a shell joins lines by; 0: not broken."""
    if not width or _cells(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    out, now = [], indent
    for word in _words(line):
        if now.strip() and _cells(now) + 1 + _cells(word) > width - 2:
            out.append(now + " \\")
            now = indent + "  "
        now += word if not now.strip() else " " + word
    return [*out, now]


def _words(line: str) -> list[str]:
    """The words of a command, an option together with its value, quoted texts whole."""
    words: list[str] = []
    for word in re.findall(r"(?:'[^']*'|\"[^\"]*\"|\S)+", line):
        if (
            words
            and words[-1].startswith("-")
            and " " not in words[-1]
            and "=" not in words[-1]
            and not word.startswith("-")
        ):
            words[-1] += " " + word
        else:
            words.append(word)
    return words


def _cells(string: str) -> int:
    """Columns that a terminal gives the string: two to wide East Asian characters."""
    return len(string) + sum(unicodedata.east_asian_width(c) in "WF" for c in string if c > "\u1100")


def _table(table: Grid, width: int, styled: bool) -> Iterator[str]:
    if table.title:
        yield from (_styled(line, "faint", styled) for line in _wrapped(table.title, width))
    inner = _without_first_key(table)
    if 0 < inner.keys < len(inner.columns) and not _fits(table, width) and _fits(inner, width - len(GAP)):
        yield from _below_first_key(table, inner, width - len(GAP), styled)
        return
    for number, chosen in enumerate(_pieces(table, width)):
        if number:
            yield ""
        widths = _widths(table, chosen, width)
        heads = tuple(c.name for c in table.columns)
        if any(heads):
            yield from (_styled(line, "faint", styled) for line in _row(heads, table, chosen, widths, head=True))
        for row in table.rows:
            yield from _row(row, table, chosen, widths)


def _fits(table: Grid, width: int) -> bool:
    """Whether all columns stand side by side."""
    least = [_least(table, i) + len(GAP) for i in range(len(table.columns))]
    return sum(least) - len(GAP) <= width


def _without_first_key(table: Grid) -> Grid:
    return Grid(table.columns[1:], tuple(row[1:] for row in table.rows), keys=table.keys - 1)


def _below_first_key(table: Grid, inner: Grid, width: int, styled: bool) -> Iterator[str]:
    """The rows without their first key, which stands above those that share it; an empty one goes on with the last."""
    chosen = list(range(len(inner.columns)))
    widths = _widths(inner, chosen, width)
    heads = _row([c.name for c in inner.columns], inner, chosen, widths, head=True)
    yield from (_styled(line, "faint", styled) for line in (table.columns[0].name, *(GAP + line for line in heads)))
    last = ""
    for (key, *_), row in zip(table.rows, inner.rows, strict=True):
        if key not in ("", last):
            yield key
            last = key
        yield from (GAP + line for line in _row(row, inner, chosen, widths))


def _pieces(table: Grid, width: int) -> list[list[int]]:
    """The columns of each table below the other, keys first, so that each fits. A column wider than the room that the
    keys leave stands alone with them."""
    keys = list(range(min(table.keys, len(table.columns))))
    least = [_least(table, i) for i in range(len(table.columns))]
    taken = sum(least[i] + len(GAP) for i in keys)
    pieces: list[list[int]] = []
    room = 0
    for i in range(len(keys), len(table.columns)):
        if not pieces or least[i] > room:
            pieces.append([*keys])
            room = width - taken
        pieces[-1].append(i)
        room -= least[i] + len(GAP)
    return pieces or [keys]


def _least(table: Grid, i: int, prose: int = PROSE) -> int:
    """Columns of text that a column takes at least; one of prose that many, if it has them, or its longest word."""
    column = table.columns[i]
    cells = [_cells(row[i]) for row in table.rows]
    head = max(map(_cells, column.name.split() or [""]))
    if not column.prose:
        return max([head, *cells])
    words = [_cells(word) for row in table.rows for word in row[i].split()]
    return max([head, *words, min(prose, max(cells, default=0))])


def _widths(table: Grid, chosen: list[int], width: int) -> list[int]:
    """What each chosen column gets: what it needs, and prose what is left over, the neediest first."""
    widths = [_least(table, i, prose=0) for i in chosen]
    left = width - sum(widths) - len(GAP) * (len(chosen) - 1)
    natural = [max([_cells(table.columns[i].name), *(_cells(row[i]) for row in table.rows)]) for i in chosen]
    while left > 0:
        needy = [k for k in range(len(chosen)) if widths[k] < natural[k]]
        if not needy:
            break
        widths[max(needy, key=lambda k: natural[k] / widths[k])] += 1
        left -= 1
    return widths


def _row(row: Sequence[str], table: Grid, chosen: list[int], widths: list[int], head: bool = False) -> Iterator[str]:
    """The lines of one row; heads stand at the bottom of theirs."""
    cells = []
    for i, w in zip(chosen, widths, strict=True):
        broken = head or table.columns[i].prose
        cells.append(
            textwrap.wrap(row[i], w, break_long_words=False, break_on_hyphens=False) if broken and row[i] else [row[i]]
        )
    height = max(len(cell) for cell in cells)
    for place in range(height):
        line = []
        for i, w, cell in zip(chosen, widths, cells, strict=True):
            at = place - height + len(cell) if head else place
            piece = cell[at] if 0 <= at < len(cell) else ""
            pad = " " * (w - _cells(piece))
            line.append(pad + piece if table.columns[i].right else piece + pad)
        yield GAP.join(line).rstrip()


# --- HTML -----------------------------------------------------------------------------------------------------------


def html(page: Page) -> str:
    """The page as HTML that stands alone in a notebook; every text is escaped."""
    return f'<div class="specsim">{"".join(_block(part) for part in page)}</div>'


def _block(part: Line | Grid) -> str:
    if isinstance(part, Line):
        return TAGS[part.style].format(markup.escape(part.text)) if part.text else ""
    title = f"<caption>{markup.escape(part.title)}</caption>" if part.title else ""
    sides = [f' style="text-align:{"right" if c.right else "left"}"' for c in part.columns]
    heads = "".join(f"<th{side}>{markup.escape(c.name)}</th>" for c, side in zip(part.columns, sides, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{s}>{markup.escape(c)}</td>" for c, s in zip(row, sides, strict=True)) + "</tr>"
        for row in part.rows
    )
    return f"<table>{title}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
