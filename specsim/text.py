"""A prediction in words and tables, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specsim.memory import would_fit
from specsim.pages import Grid, Line, Page, grid
from specsim.prediction import Prediction
from specsim.quantities import Quantity


def headline(p: Prediction) -> str:
    """One line: what is predicted."""
    return p.scenario.title


def verdict(p: Prediction) -> str:
    """Whether it fits where it does not, and then one sentence: does speculation pay here, and what it would need."""
    said = _speculation(p)
    m = p.memory
    if m is None or m.fits:
        return said
    there = f"{m.usable / 1e9:,.1f} of {m.capacity / 1e9:,.0f} GB can be used"
    mends = would_fit(p.scenario)
    fit = f"{' or '.join(mends)} would fit" if mends else "take another box"
    return (
        f"Does not fit: it needs {m.needed / 1e9:,.1f} GB a GPU, {there}; {fit}. "
        f"With enough memory: {said[:1].lower()}{said[1:]}"
    )


def _speculation(p: Prediction) -> str:
    if p.cycle_ms is None or p.breakeven_length is None:
        return f"No speculation: {p.decode_ms} ms a step, {p.decode_tokens_per_s} tokens a second."
    d = p.scenario.draft_tokens.reshape(-1)[0]
    need = f"{p.breakeven_length} of at most {_most(p):g} tokens a cycle"
    if not p.reachable:
        return f"Speculation cannot pay here: it would need {need}, which no drafter gives with {d:g} draft tokens."
    if p.speedup is None or p.accept_length is None:
        if p.breakeven_length.value < 1:
            return f"Speculation pays with any drafter: a cycle takes {p.breakeven_length} of a decode step, and gains a token or more."
        return f"Speculation pays above {need}, an accept rate of {p.breakeven_rate}."
    change = p.speedup.value - 1
    sure = p.speedup.low > 1 or p.speedup.high < 1
    word = "gains" if change >= 0 else "loses"
    hedge = "" if sure else " (within the interval it may do either)"
    return f"Speculation {word} {abs(change):.0%}{hedge}: it needs {need}, this drafter gives {p.accept_length:.2f}."


def _most(p: Prediction) -> float:
    s = p.scenario
    return float(min(s.num_steps.reshape(-1)[0], s.draft_tokens.reshape(-1)[0] - 1)) + 1


CYCLE = ("draft", "verify", "extend", "host")
QUANTITIES = (  # field of a prediction, in words, unit, and the phases that decide it
    ("decode_ms", "baseline: one decode step", "ms", ("decode",)),
    ("draft_ms", "draft", "ms", ("draft",)),
    ("verify_ms", "verify", "ms", ("verify",)),
    ("extend_ms", "draft extend", "ms", ("extend",)),
    ("host_ms", "host", "ms", ("host",)),
    ("cycle_ms", "cycle", "ms", CYCLE),
    ("accept_length", "tokens a cycle", "", ()),
    ("decode_tokens_per_s", "baseline tokens a second", "tok/s", ("decode",)),
    ("spec_tokens_per_s", "speculative tokens a second", "tok/s", CYCLE),
    ("speedup", "speedup", "x", ("decode", *CYCLE)),
    ("breakeven_length", "break-even accept length", "tokens", ("decode", *CYCLE)),
    ("breakeven_rate", "break-even accept rate", "", ("decode", *CYCLE)),
)
_DECIDING = tuple({phases for *_, phases in QUANTITIES})


def rows(p: Prediction) -> list[tuple[str, str, str, str]]:
    """(what, value, unit, 80 % interval) of the short table."""
    return [row[:4] for row in sourced_rows(p)]


def sourced_rows(p: Prediction) -> list[tuple[str, str, str, str, str]]:
    """As `rows`, with the `origin` of each number."""
    out = []
    spent = _spent(p)
    origins = {phases: _shares(spent, phases) for phases in _DECIDING}
    for key, what, unit, phases in QUANTITIES:
        found = getattr(p, key)
        if isinstance(found, Quantity):
            out.append((what, str(found), unit, found.interval, origins[phases]))
        elif found is not None:
            rate = "" if p.accept_rate is None else f" (accept rate {p.accept_rate:.2f})"
            out.append((what + rate, f"{found:.2f}", unit, "as given", "given"))
        elif key == "breakeven_rate" and p.breakeven_length is not None:
            d = f"{p.scenario.draft_tokens.reshape(-1)[0]:g}"
            out.append((what, f"not reachable with {d} draft tokens", "", "", ""))
    return out


def origin(p: Prediction, phases: Sequence[str]) -> str:
    """Where the prices behind some phases come from, by their share of the time: "published 71 %, assumed 29 %"."""
    return _shares(_spent(p), phases)


def _spent(p: Prediction) -> dict[str, dict[str, float]]:
    """ms by source of each phase."""
    spent: dict[str, dict[str, float]] = {}
    for part in p.parts:
        of = spent.setdefault(part.phase, {})
        of[part.source] = of.get(part.source, 0.0) + abs(part.ms)
    return spent


def _shares(spent: Mapping[str, Mapping[str, float]], phases: Sequence[str]) -> str:
    of: dict[str, float] = {}
    for phase in phases:
        for source, ms in spent.get(phase, {}).items():
            of[source] = of.get(source, 0.0) + ms
    whole = sum(of.values())
    shares = [(ms / whole, source) for source, ms in of.items() if ms >= 0.005 * whole > 0]
    if len(shares) == 1:
        return shares[0][1]
    return ", ".join(f"{source} {share:.0%}".replace("%", " %") for share, source in sorted(shares, reverse=True))


def page(p: Prediction, explain: bool = False) -> Page:
    """The prediction as people see it; `explain` adds where the time goes and where the numbers come from."""
    yield Line(headline(p), "title")
    yield Line()
    yield Line(verdict(p), "verdict" if p.fits else "bad verdict")
    yield Line()
    yield grid(("~", ">", "", "80 % interval"), rows(p), keys=3)
    if p.speedup is None and p.breakeven_length is not None:
        yield Line("speedup by accept rate: " + "  ".join(f"{a:.1f}: {v}" for a, v in p.speedup_curve))
    if explain:
        yield Line()
        yield _breakdown(p)
    for warning in p.warnings:
        yield Line(f"note: {warning}", "warning")


def _breakdown(p: Prediction) -> Grid:
    """Phase by component, with calls, bytes and the origin of the price."""
    shown = []
    last = ""
    for part in p.parts:
        megabytes = f"{part.bytes / 1e6:,.1f}" if part.bytes else ""
        phase = part.phase if part.phase != last else ""
        shown.append((phase, part.component, f"{part.ms:.3f}", f"{part.count:,.0f}", megabytes, part.source))
        last = part.phase
    heads = ("phase", "component", ">ms", ">calls", ">MB", "source")
    return grid(heads, shown, "where the time goes", keys=2)
