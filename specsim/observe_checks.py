"""What figures of different tools mean, and the identities that must hold between them.

    accept length   L = 1 + u_1 + u_2 + ...        u_i: share of cycles in which position i was accepted (unconditional)
                    L = 1 + c_1 + c_1 c_2 + ...    c_i: the same given that position i - 1 was accepted (conditional)
    SGLang's rate   L / d before April 2026, (L - 1) / (d - 1) since; d (`--speculative-num-draft-tokens`) has the root
    vLLM's rate     accepted / drafted = (L - 1) / k, in percent; k = d - 1 (`num_speculative_tokens`)
    throughput      tokens/s x cycle = batch x L

A message that begins with CONTRADICTION means that the source disagrees with itself.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from typing import Any, Literal

from specsim.observe_read import Source, flag_value
from specsim.quantities import HALF
from specsim.records import EngineRun, Point, Quantity, Record
from specsim.redaction import scrub

CONTRADICTION = "contradiction: "
ABSURD = 1e30  # above any count, time or rate in any unit
Engine = Literal["sglang", "vllm", "other"]


def number(value: Any) -> float | None:
    """The value as a finite float; None for text, booleans, NaN, infinity, and what is so large that a product is infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        out = float(value)
    except OverflowError:
        return None
    return out if abs(out) < ABSURD else None


def positive(value: Any) -> float | None:
    """As `number`, and None unless above zero."""
    out = number(value)
    return out if out is not None and out > 0 else None


def whole(value: Any) -> int | None:
    """The value as an integer of at least 0, rounded; None otherwise."""
    out = number(value)
    return round(out) if out is not None and 0 <= out < 2**53 else None


def parse_number(text: str | None) -> float | None:
    """The number that a text is, None when it is none or is negative or absurd."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 <= value < 1e15 else None


def parse_whole(text: str | None) -> int | None:
    """The whole number that a text is, None otherwise."""
    value = parse_number(text)
    return int(value) if value is not None and value == int(value) else None


def literal(text: str) -> Any:
    """The value of a Python literal, or the text itself."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text.strip()


_KEYWORD = re.compile(
    r"(\w{1,80})=('(?:[^'\\]|\\.){0,2000}'|\"(?:[^\"\\]|\\.){0,2000}\"|\[[^\]]{0,4000}\]|\{[^{}]{0,4000}\}|[^,()\[\]{}]{1,400})"
)


def keywords(text: str) -> dict[str, Any]:
    """The settings in what Python shows of an object: `tp_size=8, model='x', ...`, as far as they are whole."""
    return {name: literal(value) for name, value in _KEYWORD.findall(text)}


def measured(value: float | None, how: str, n: int | None = None) -> Quantity | None:
    """A quantity from one figure, None without it."""
    return Quantity(value=value, n=n, how=how) if value is not None else None


def title(what: str, place: str) -> str:
    """A record\'s name: the format, and the place in its source."""
    return f"{what}, {place}" if place else what


def iso_date(text: Any) -> str | None:
    """The ISO 8601 form of a run's own time stamp (`20260213-135636`, or ISO already)."""
    if not isinstance(text, str):
        return None
    try:
        compact = re.fullmatch(r"\d{8}-\d{6}", text)
        when = datetime.strptime(text, "%Y%m%d-%H%M%S") if compact else datetime.fromisoformat(text)
    except ValueError:
        return None
    return when.isoformat(timespec="seconds")


def numbers_of(row: Mapping[str, Any], keys: Sequence[str]) -> dict[str, float]:
    """The finite numbers among some keys of a row."""
    return {k: v for k in keys if (v := number(row.get(k))) is not None}


def version_text(value: Any) -> str | None:
    """A version as a server told it, None when it is no text."""
    return scrub(value)[:200] if isinstance(value, str) and value else None


def quantity(values: Sequence[float], how: str, rounding: float = 0.0) -> Quantity | None:
    """Median with the 80 % confidence interval of the median by order statistics (range below 5 values).

    `rounding` is the relative error of the printed digits; the interval is never narrower than that.
    """
    ordered = sorted(v for v in values if math.isfinite(v))
    n = len(ordered)
    if n == 0:
        return None
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    k = max(0, math.floor(n / 2 - HALF * math.sqrt(n) / 2)) if n >= 5 else 0
    low = min(ordered[k], middle * (1 - rounding))
    high = max(ordered[n - 1 - k], middle * (1 + rounding))
    if n == 1 and rounding == 0:
        return Quantity(value=middle, n=1, how=how)
    return Quantity(value=middle, low=low, high=high, n=n, how=how)


def conditional(unconditional: Sequence[float]) -> list[float] | None:
    """Conditional acceptance c_i = u_i / u_(i-1), u_0 = 1, up to the first position that was never accepted.

    None when a rate rises along the chain or lies outside [0, 1]: then the rates are not unconditional.
    """
    out, before = [], 1.0
    for rate in unconditional:
        if not 0 <= rate <= 1 or rate > before * 1.001 + 5e-4:
            return None
        if before <= 0:
            break
        out.append(min(1.0, rate / before))
        before = rate
    return out


@dataclass(frozen=True)
class Positions:
    """How per-position rates relate to the accept length."""

    meaning: Literal["unconditional", "conditional", "too low", "unclear"]
    rates: list[float] | None  # conditional, when known
    message: str


def read_positions(length: float, rates: Sequence[float], rounding: float = 0.005) -> Positions:
    """Decide by the identity whether rates are unconditional (vLLM, llama.cpp), conditional, or too low by a factor.

    Per-position counters of one data-parallel engine divided by the drafts of all are too low by the number of engines:
    (L - 1) / sum(u) is then a whole number of at least 2.
    """
    rounding += 0.0006 * len(rates)
    total = sum(rates)
    chain, product = 0.0, 1.0
    for rate in rates:
        product *= rate
        chain += product
    shown = ", ".join(f"{r:.3g}" for r in rates[:8])
    as_chain = conditional(rates)
    if abs(1 + total - length) <= rounding + 0.01 * length and as_chain is not None:
        return Positions(
            "unconditional", as_chain, f"positions {shown} are unconditional: 1 + their sum = {1 + total:.2f}"
        )
    if abs(1 + chain - length) <= rounding + 0.01 * length:
        return Positions(
            "conditional",
            [float(r) for r in rates],
            f"positions {shown} are conditional: 1 + sum of running products = {1 + chain:.2f}",
        )
    factor = (length - 1) / total if total > 0 else 0.0
    if factor > 1.5 and abs(factor - round(factor)) < 0.04 * factor:
        n = round(factor)
        scaled = conditional([r * n for r in rates])
        return Positions(
            "too low",
            scaled,
            f"{CONTRADICTION}1 + sum of positions = {1 + total:.2f} but the length is {length:.2f}: the positions ({shown})"
            f" are too low by {factor:.2f}, as when {n} data-parallel engines share the drafts and one gives the"
            f" positions; multiplied by {n}",
        )
    return Positions(
        "unclear",
        None,
        f"{CONTRADICTION}1 + sum of positions = {1 + total:.2f} but the length is {length:.2f}; length used",
    )


@dataclass(frozen=True)
class RateMeaning:
    """What SGLang's accept rate is in these lines. `draft_tokens` is d, given or inferred."""

    meaning: Literal["old", "new", "mixed", "unknown"]
    draft_tokens: int | None
    message: str


def _fits(length: float, rate: float, d: int, new: bool, step: float = 0.0051) -> bool:
    """Whether rate = (L - 1)/(d - 1) (new) or L/d (old) within the rounding of two printed decimals."""
    top, bottom = (length - 1, d - 1) if new else (length, d)
    return bottom > 0 and (top - step) / bottom - step <= rate <= (top + step) / bottom + step


def read_rates(pairs: Iterable[tuple[float, float]], draft_tokens: int | None = None) -> RateMeaning:
    """Tell the two definitions of SGLang's accept rate apart from (accept len, accept rate) pairs.

    With d unknown, every whole d up to 129 is tried. The accept length is unambiguous and is what specsim uses.
    """
    seen = [(length, rate) for length, rate in pairs if length >= 1 and 0 < rate <= 1]
    if not seen:
        return RateMeaning("unknown", draft_tokens, "no accept rate to read; the accept length is used")
    options = [draft_tokens] if draft_tokens else range(2, 130)
    old = [d for d in options if all(_fits(n, r, d, False) for n, r in seen)]
    new = [d for d in options if all(_fits(n, r, d, True) for n, r in seen)]
    words = {
        "old": "accept rate = L / d (SGLang before April 2026, bonus token in)",
        "new": "accept rate = (L - 1) / (d - 1) (current SGLang, bonus token out)",
    }
    if old and not new:
        return RateMeaning("old", _only(old), f"{words['old']}, d = {_list(old)}; the accept length is used")
    if new and not old:
        return RateMeaning("new", _only(new), f"{words['new']}, d = {_list(new)}; the accept length is used")
    if old and new:
        return RateMeaning(
            "unknown",
            draft_tokens,
            f"accept rate could be L / d with d = {_list(old)} or (L - 1) / (d - 1) with d = {_list(new)};"
            " the accept length is used",
        )
    for d in options:
        kinds = [(_fits(n, r, d, False), _fits(n, r, d, True)) for n, r in seen]
        if all(a or b for a, b in kinds) and any(a and not b for a, b in kinds) and any(b and not a for a, b in kinds):
            count = sum(a and not b for a, b in kinds)
            return RateMeaning(
                "mixed",
                d,
                f"{CONTRADICTION}two definitions of accept rate in one source (d = {d}): {count} pairs are L / d, the"
                f" other {len(kinds) - count} are (L - 1) / (d - 1); the accept length is used",
            )
    if draft_tokens:
        other = read_rates(seen)
        if other.meaning in ("old", "new"):
            return RateMeaning(
                "unknown",
                draft_tokens,
                f"accept rate fits {'L / n' if other.meaning == 'old' else '(L - 1) / (n - 1)'} with n = {other.draft_tokens}"
                f" and not the d = {draft_tokens} of the settings (some versions count drafting steps + 1);"
                " the accept length is used",
            )
    return RateMeaning(
        "unknown",
        draft_tokens,
        f"{CONTRADICTION}accept rate fits no definition for {f'd = {draft_tokens}' if draft_tokens else 'any d'}; length used",
    )


def _only(options: Sequence[int]) -> int | None:
    return options[0] if len(options) == 1 else None


def _list(options: Sequence[int]) -> str:
    return " or ".join(map(str, options[:3])) + (" or more" if len(options) > 3 else "")


def check_length(length: float, draft_tokens: int | None = None) -> str | None:
    """A message when an accept length cannot be one: below 1 (bonus token missing?) or above d."""
    if length < 1:
        return f"{CONTRADICTION}accept length {length:.3g} is below 1: a rate, or a length without the bonus token"
    if draft_tokens and length > draft_tokens * 1.01:
        return f"{CONTRADICTION}accept length {length:.3g} is above the {draft_tokens} draft tokens of a cycle"
    return None


def check_rate(rate: float, name: str) -> str | None:
    """A message when a "rate" is not in [0, 1]: a percentage, or a counter under a rate's name."""
    if 0 <= rate <= 1:
        return None
    kind = "a percentage" if 1 < rate <= 100 and "percent" in name else "a counter under a rate's name"
    return f"{CONTRADICTION}{name} = {rate:g} is not a rate in [0, 1] but {kind}; never used as acceptance"


def make_record(
    source: Source,
    what: str,
    engine: EngineRun | None = None,
    *,
    points: list[Point] | None = None,
    method: Sequence[str] = (),
    caveats: Sequence[str] = (),
    environment: dict[str, Any] | None = None,
    samples: list[dict[str, Any]] | None = None,
    date: str | None = None,
) -> Record:
    """An observation record: `method` lists the meanings taken, `caveats` what to distrust, contradictions first."""
    ordered = sorted(dict.fromkeys(caveats), key=lambda c: not c.startswith(CONTRADICTION))
    return Record(
        kind="observation",
        name=what,
        date=date or source.date,
        source=source.name,
        environment=environment or {},
        engine=engine,
        points=points or [],
        samples=samples or [],
        method="; ".join(dict.fromkeys(m.replace("; ", ", ") for m in method)),
        caveats=ordered,
    )


MAX_ARMS = 20
_NOT_CONFOUNDING = ("speculative", "draft-model")  # what the two arms are meant to differ in


def compare(records: Sequence[Record]) -> list[str]:
    """Contradictions between records: one arm with CUDA graphs and one without, arms whose flags differ otherwise."""
    found: list[str] = []
    arms: dict[tuple[str, bool | None, tuple[str, ...]], Record] = {}
    for record in records:
        if record.engine and (record.points or record.engine.flags):
            arms.setdefault((record.engine.name, _graphs(record), tuple(record.engine.flags)), record)
    for (name, graph, flags), (other, other_graph, other_flags) in combinations(list(arms)[:MAX_ARMS], 2):
        a, b = arms[name, graph, flags], arms[other, other_graph, other_flags]
        if name != other:
            continue
        if None not in (graph, other_graph) and graph != other_graph:
            with_, without = (a, b) if graph else (b, a)
            found.append(
                f"{CONTRADICTION}{_label(with_)} runs in CUDA graphs and {_label(without)} does not:"
                " their ratio says nothing about speculation"
            )
        names = _differing(list(flags), list(other_flags)) if flags and other_flags else []
        if names:
            found.append(f"{_label(a)} and {_label(b)} also differ in {', '.join(names)}")
    return list(dict.fromkeys(found))


def _label(record: Record) -> str:
    return f"{record.source} ({record.name})"


def _graphs(record: Record) -> bool | None:
    """True or False when all points (or, without points, the flags) say the same; None when mixed or unknown."""
    flags = record.engine.flags if record.engine else []
    if "--disable-cuda-graph" in flags or flag_value(flags, "--enforce-eager") == "":
        return False
    seen = {p.cuda_graph for p in record.points if p.cuda_graph is not None}
    return seen.pop() if len(seen) == 1 else None


def _differing(a: list[str], b: list[str]) -> list[str]:
    first, second = _as_map(a), _as_map(b)
    names = sorted(n for n in {*first, *second} if first.get(n) != second.get(n))
    return [n for n in names if not any(word in n for word in _NOT_CONFOUNDING)]


def _as_map(flags: list[str]) -> dict[str, str]:
    return {f: flag_value(flags, f) or "" for f in flags if f.startswith("--")}
