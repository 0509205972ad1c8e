"""A sweep for people: for each case its map of draft lengths or break-evens, then latency against throughput."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from specsim.pages import Grid, Line, Page, grid
from specsim.quantities import counted, short
from specsim.sweep_run import Result

CASES = 8  # maps that are shown
POINTS = 16  # of a front
NOTES = 10
CASE = {
    "model": "model", "draft": "draft", "hardware": "hardware", "engine": "engine", ">tp": "TP", ">ep": "EP", ">dp_attention": "DP",
}  # fmt: skip
ROWS = {
    ">batch": "batch", ">context": "context", "method": "method", ">draft_tokens": "d",
    ">accept_rate": "accept rate", ">decode_ms": "decode ms", ">cycle_ms": "cycle ms", ">speedup": "speedup",
    ">tpot_ms": "ms a token", ">breakeven_accept_rate": "break-even rate",
}  # fmt: skip
RESULTS = (">decode_ms", ">cycle_ms", ">speedup", ">tpot_ms", ">breakeven_accept_rate")  # all else tells rows apart


def page(result: Result, rows: bool = False) -> Page:
    """The sweep as people see it: maps, or with `rows` every row that the result holds."""
    count = result.digest.configurations
    yield Line(f"{count:,} configuration{'s' if count != 1 else ''}", "title")
    if result.out is not None:
        yield Line(f"rows: {result.out}")
    if rows:
        yield _rows(result)
    else:
        for index in list(result.cases)[:CASES]:
            yield from _case(result, index)
        if len(result.cases) > CASES:
            yield Line(f"{len(result.cases) - CASES} more cases: --json or --out holds them", "faint")
        if len(result.spec.acceptance) > 1 and result.digest.breakeven:
            yield Line("maps of the other acceptances: give one of them alone; --json and --out hold all", "faint")
        if result.spec.kind:
            yield from _front(result)
    for warning in few(result.warnings):
        yield Line(f"note: {warning}", "warning")


def few(warnings: Sequence[str]) -> list[str]:
    """The first `NOTES`, and how many more there are."""
    more = len(warnings) - NOTES
    return [*warnings[:NOTES], *([f"{counted(more, 'more note')}: --json holds them"] if more > 0 else ())]


def _case(result: Result, index: int) -> Iterator[Line | Grid]:
    case = result.cases[index].labels()
    extra = "".join(f" {name} {case[key]}" for name, key in (("EP", "ep"), ("DP", "dp_attention")) if case[key] > 1)
    yield Line()
    yield Line(f"{case['model']} on {case['hardware']}, {case['engine']}, TP {case['tp']}{extra}")
    d = result.digest
    here = [x for x in d.breakeven or [] if x["case"] == index]
    title, cells = _best(result, index) if result.spec.kind else _breakeven(here)
    contexts = list(dict.fromkeys(x["context"] for x in here)) or [result.spec.context[0]]
    batches = sorted({x["batch"] for x in here})
    if set(cells.values()) == {"does not fit"}:
        yield Line("does not fit at any batch and context")
    elif batches:
        shown = [(f"{batch:,}", *(cells.get((batch, context), "none") for context in contexts)) for batch in batches]
        yield grid((">batch", *(f">context {context:,}" for context in contexts)), shown, title)
    else:
        yield Line("no speculation: --rows shows the times")


def _best(result: Result, index: int) -> tuple[str, dict[tuple[int, int], str]]:
    """Title and cells by (batch, context): the best setting and its speedup, at the middle acceptance."""
    found = [x for x in result.digest.best or [] if x["case"] == index]
    middle = _middle(found)

    def cell(x: dict[str, Any]) -> str:
        if x["setting"] in ("-", "off"):
            return "does not fit" if x["setting"] == "-" else "off"
        return f"{x['setting']}  {x['speedup']:.2f}x"

    several = len(result.spec.acceptance)
    of = f", the middle of {several}" if several > 1 else ""
    title = f"best draft tokens, and speedup, at accept {result.spec.kind.replace('_', ' ')} {middle}{of}"
    return title, {(x["batch"], x["context"]): cell(x) for x in found if str(x["acceptance"]) == middle}


def _middle(found: Collection[Mapping[str, Any]]) -> str:
    """The acceptance that one table shows of several."""
    accepts = list(dict.fromkeys(str(x["acceptance"]) for x in found))
    return accepts[len(accepts) // 2]


def _breakeven(found: list[dict[str, Any]]) -> tuple[str, dict[tuple[int, int], str]]:
    """Title and cells by (batch, context): the lowest accept rate that breaks even, and the setting."""
    lowest: dict[tuple[int, int], dict[str, Any]] = {}
    for x in found:
        place = x["batch"], x["context"]
        if x["accept_rate"] is not None and (place not in lowest or x["accept_rate"] < lowest[place]["accept_rate"]):
            lowest[place] = x
    cells = {place: f"{x['accept_rate']:.2f}  {x['setting']}" for place, x in lowest.items()}
    return "break-even accept rate, and draft tokens where it is lowest", cells


def _front(result: Result) -> Iterator[Line | Grid]:
    fronts = [front for front in result.pareto() if front["points"]]  # none where nothing fits
    if not fronts:
        return
    middle = _middle(fronts)  # as the maps have it
    alike = [front for front in fronts if str(front["acceptance"]) == middle]
    chosen = alike[len(alike) // 2]
    points = chosen["points"]
    step = max(1, -(-len(points) // POINTS))
    labels = {index: case.labels() for index, case in result.cases.items()}
    which = {"hardware": "hardware", ">tp": "TP"} | _varying(labels.values(), ("engine", ">ep", ">dp_attention"))
    shown = [
        (
            f"{p['tpot_ms']:,.2f}", f"{p['tokens_per_s_per_gpu']:,.0f}", f"{p['batch']:,}", p["setting"],
            *(str(labels[p["case"]][key.lstrip(">")]) for key in which),
        )
        for p in points[::step]
    ]  # fmt: skip
    yield Line()
    acceptance = f"accept {result.spec.kind.replace('_', ' ')} {chosen['acceptance']}"
    title = f"latency against throughput: {chosen['model']}, context {chosen['context']:,}, {acceptance}"
    heads = [">" * key.startswith(">") + name for key, name in which.items()]
    yield grid((">ms a token", ">tok/s a GPU", ">batch", ">draft tokens", *heads), shown, title)
    if len(fronts) > 1 or step > 1:
        yield Line(f"{len(fronts)} fronts, all points: --json", "faint")


def _rows(result: Result) -> Grid:
    """Every row, by the columns that tell rows apart and those that hold anything."""
    rows = result.rows or []
    of_case = _varying(rows, tuple(CASE))
    heads = of_case | {k: v for k, v in ROWS.items() if any(row[k.lstrip(">")] is not None for row in rows)}

    def cell(value: Any) -> str:
        return "" if value is None else short(value) if isinstance(value, float) else str(value)

    shown = [[cell(row[key.lstrip(">")]) for key in heads] for row in rows]
    keys = sum(key not in RESULTS for key in heads)
    return grid([">" * key.startswith(">") + name for key, name in heads.items()], shown, keys=keys)


def _varying(rows: Collection[Mapping[str, Any]], keys: tuple[str, ...]) -> dict[str, str]:
    """Those of some columns of a case in which rows differ."""
    return {key: CASE[key] for key in keys if len({row[key.lstrip(">")] for row in rows}) > 1}
