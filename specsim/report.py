"""A report: one HTML file of a document that a command printed with `--json`, whole without a network.

Scripts, styles, data and charts are in the file, and its content policy forbids every request and every script but those
whose sums it names. All text is escaped, whatever a model or a box is called.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from specsim.charts import KINDS, Chart, Table, charts_for
from specsim.errors import InputError
from specsim.report_parts import after, before, sources, title_of, verdict_of

READS = "predict, sweep, plan, simulate, validate --records, diagnose, calibrate, hardware show and hardware diff"
SCRIPTS = ("vega", "vega-lite", "vega-embed")
TABLE_ROWS = 300  # of one table that are shown
SENTENCE, SHORT = 48, 12  # letters of a cell
KEPT_BYTES = 1_000_000  # a document up to that size is kept whole in the report


def report(document: Any, where: str = "document") -> str:
    """The report of a document, as HTML. Raises InputError for another schema, or a document that lacks what its schema has."""
    schema = document.get("schema") if isinstance(document, Mapping) else None
    if not isinstance(schema, str) or schema not in KINDS:
        what = f"is {schema[:60]}, which no report reads" if isinstance(schema, str) else "is no result of specsim"
        mend = f"a report reads what {READS} print with --json"
        if schema == "specsim.record/1":
            mend = f"compare it first: specsim validate --records {where} --json > result.json"
        raise InputError(what, where=where, mend=mend)
    try:
        return _page(document)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        said = f"{type(error).__name__}: {error}"
        raise InputError(f"is no whole {schema} ({said})", where=where, mend="make it again with --json") from error


def _page(document: Mapping[str, Any]) -> str:
    charts = charts_for(document)
    specs = _inert(json.dumps({c.key: c.spec for c in charts}, separators=(",", ":"), allow_nan=False))
    scripts = [*(vendored(name) for name in SCRIPTS), _web("report.js")] if charts else []
    allowed = " ".join(_sum(script) for script in scripts) or "'none'"
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    title = title_of(document)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{escape(title)} - specsim</title>",
            f"<style>{_web('report.css')}</style>",
            "</head>",
            "<body>",
            *_body(document, title, charts),
            f'<script type="application/json" id="specifications">{specs}</script>' if charts else "",
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


def _body(document: Mapping[str, Any], title: str, charts: Sequence[Chart]) -> Iterator[str]:
    verdict = verdict_of(document)
    yield '<a class="skip" href="#charts">To the charts</a>'
    yield f"<header><h1>{escape(title)}</h1>"
    if verdict:
        bad = " bad" if (document.get("memory") or {}).get("fits") is False else ""
        yield f'<p class="verdict{bad}">{escape(verdict)}</p>'
    yield "</header>"
    yield "<main>"
    if notes := [*document.get("warnings", []), *document.get("caveats", [])]:
        yield f'<section class="notes"><h2>To know first</h2>{_items(notes)}</section>'
    yield '<div class="beside">'
    for heading, content in before(document):
        yield _section(heading, content)
    yield "</div>"
    yield '<section id="charts"><h2>Charts</h2>'
    yield "<noscript><p>The charts need JavaScript; the table under each holds the same data.</p></noscript>"
    if not charts:
        yield "<p>There is nothing to draw in this result.</p>"
    for chart in charts:
        yield _figure(chart)
    yield "</section>"
    for heading, content in after(document):
        yield _section(heading, content)
    yield from _again(document)
    if found := sources(document):
        yield _section("Where the numbers come from", _sources(found))
    yield "</main>"
    yield f"<footer><p>specsim {escape(version('specsim'))}, {escape(document['schema'])}. This file asks nothing of any network.</p></footer>"


def _figure(chart: Chart) -> str:
    key, about = escape(chart.key), escape(chart.about)
    return (
        f'<figure><h3>{escape(chart.title)}</h3><figcaption class="about">{about}</figcaption>'
        f'<div class="chart" id="chart-{key}" role="img" aria-label="{about} The table below holds the same data."></div>'
        f'<div id="controls-{key}"></div>'
        f"<details><summary>Table: {escape(chart.title.lower())}</summary>{table(chart.table)}</details></figure>"
    )


def _section(heading: str, content: str | Sequence[str] | Table) -> str:
    if isinstance(content, str):
        inner = f"<pre><code>{escape(content)}</code></pre>"
    else:
        inner = table(content) if isinstance(content, Table) else _items(content)
    return f"<section><h2>{escape(heading)}</h2>{inner}</section>"


def _sources(found: Sequence[Mapping[str, Any]]) -> Table:
    """A row a reference, with all numbers that come from it."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for s in found:
        groups.setdefault((s["kind"], s["reference"], (s.get("date") or "")[:10]), []).append(s)
    rows = []
    for (kind, reference, date), group in groups.items():
        spread = sorted({s["relative_uncertainty"] for s in group if s.get("relative_uncertainty") is not None})
        said = [f"{x:.0%}" for x in dict.fromkeys([*spread[:1], *spread[-1:]])]
        rows.append((", ".join(s["of"] for s in group), kind, reference, date, " to ".join(dict.fromkeys(said))))
    return Table(("numbers", "are", "reference", "date", "+- (one standard deviation)"), tuple(rows))


def _again(document: Mapping[str, Any]) -> Iterator[str]:
    """The command that makes the document again, and the document itself."""
    kept = json.dumps(document, allow_nan=False).encode()
    if not document.get("command") and len(kept) > KEPT_BYTES:
        return
    yield "<section><h2>Make it again</h2>"
    if document.get("command"):
        yield f"<pre><code>{escape(document['command'])} --json</code></pre>"
    if len(kept) <= KEPT_BYTES:
        data = base64.b64encode(kept).decode()
        name = f"{document['schema'].removeprefix('specsim.').removesuffix('/1')}.json"
        yield f'<p class="screen"><a download="{escape(name)}" href="data:application/json;base64,{data}">Save the whole result as JSON</a></p>'
    yield "</section>"


def _items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(str(line))}</li>' for line in lines)}</ul>"


def table(t: Table) -> str:
    """A table as HTML; the first column heads its rows, columns of numbers are flush right, short ones are not broken, and
    one with sentences becomes a list of its rows on a phone."""
    rows = [[_cell(value) for value in row] for row in t.rows[:TABLE_ROWS]]
    classes = [_class(number, [row[i] for row in rows]) for i, number in enumerate(_numeric(t))]
    heads = "".join(f'<th scope="col"{c}>{escape(str(name))}</th>' for name, c in zip(t.columns, classes, strict=True))
    head = f"<thead><tr>{heads}</tr></thead>" if any(t.columns) else ""
    lines = []
    for first, *others in rows:
        named = zip(t.columns[1:], others, classes[1:], strict=True)
        cells = [f'<td{c} data-name="{escape(str(name))}">{escape(cell)}</td>' for name, cell, c in named]
        lines.append(f'<tr><th scope="row"{classes[0]}>{escape(first)}</th>{"".join(cells)}</tr>')
    more = f'<p class="faint">The first {TABLE_ROWS:,} of {len(t.rows):,} rows.</p>' if len(t.rows) > TABLE_ROWS else ""
    stacks = ' class="stacks"' if any(len(cell) > SENTENCE for row in rows for cell in row) and head else ""
    return f'<div class="scroll" tabindex="0"><table{stacks}>{head}<tbody>{"".join(lines)}</tbody></table></div>{more}'


def _numeric(t: Table) -> list[bool]:
    """Whether each column holds numbers alone."""
    columns = [[row[i] for row in t.rows] for i in range(len(t.columns))]
    return [
        bool(column) and all(v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)) for v in column)
        for column in columns
    ]


def _class(number: bool, cells: Sequence[str]) -> str:
    names = [*(["right"] if number else []), *(["short"] if all(len(cell) <= SHORT for cell in cells) else [])]
    return f' class="{" ".join(names)}"' if names else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return str(value)


# --- pieces of the file -----------------------------------------------------------------------------------------------


@functools.cache
def vendored(name: str) -> str:
    """One of the chart scripts, without the note on where its source map would be fetched."""
    return _web(f"vendor/{name}.min.js").partition("\n//# sourceMappingURL")[0]


@functools.cache
def _web(name: str) -> str:
    return (files("specsim") / "web" / name).read_text(encoding="utf-8")


@functools.cache
def _sum(script: str) -> str:
    """The script's sum, as a content policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _inert(text: str) -> str:
    """JSON that ends no element, wherever a browser reads it."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
