"""A fit of engine terms for people: each term with its error, and what it makes of the observations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specsim.engine_fit import Fit, HeldOut, Term
from specsim.fitted import Fitted
from specsim.pages import Grid, Line, Page, grid
from specsim.quantities import counted, decimals


def page(found: Fitted | Fit) -> Page:
    """The fit as people see it, with errors on records that were left out where there are some."""
    fitted, held = (found.fit, found.held) if isinstance(found, Fitted) else (found, ())
    noise = f"; residuals {fitted.noise:.1f} times the stated errors" if fitted.noise > 1.05 else ""
    said = f"{counted(len(fitted.terms), 'term')} fitted to {counted(fitted.points, 'point')} of {counted(len(fitted.records), 'record')}"
    yield Line(f"{fitted.engine}: {said}{noise}", "title")
    yield Line()
    yield _terms(fitted)
    yield Line()
    for name, why in fitted.left.items():
        yield Line(f"{name.removesuffix('_us')} stays at its prior: {why}")
    if fitted.left:
        yield Line()
    if isinstance(found, Fitted) and (found.set_aside or found.apart):
        yield from _apart(found)
        yield Line()
    yield _errors(fitted, held)
    if isinstance(found, Fitted):
        yield from (Line(f"note: {warning}", "warning") for warning in found.warnings)


def _apart(found: Fitted) -> Iterator[Line]:
    """Records that were set aside, those of one reason together; and those that stand apart."""
    for why in dict.fromkeys(found.set_aside.values()):
        yield Line(f"set aside {', '.join(r for r, w in found.set_aside.items() if w == why)}: {why}")
    for record, error in found.apart.items():
        yield Line(
            f"{record} stands apart, {error:+.0%} in the median with the fitted terms: look at its server, or --hold-out"
        )


def _terms(fitted: Fit) -> Grid:
    shown = []
    for place, t in enumerate(fitted.terms):
        values = (_with_error(t.prior, t.prior_error), _with_error(t.value, t.error), f"{t.share:.0%}")
        shown.append((t.name.removesuffix("_us"), *values, _strongest(fitted.terms, fitted.correlations[place], place)))
    heads = ("term", ">prior", ">fitted", ">from records", "~correlated with")
    return grid(
        heads,
        shown,
        "engine terms, microseconds but eager_factor, eager_experts and host_slowing; +- one standard deviation",
    )


def _with_error(value: float, error: float) -> str:
    places = decimals(error)
    return f"{value:,.{places}f} +- {error:,.{places}f}"


def _strongest(terms: tuple[Term, ...], row: Any, place: int) -> str:
    """Terms whose correlation with this one is beyond 0.3, strongest first."""
    found = [(r, t.name.removesuffix("_us")) for i, (r, t) in enumerate(zip(row, terms, strict=True)) if i != place]
    return ", ".join(f"{name} {r:+.2f}" for r, name in sorted(found, key=lambda f: -abs(f[0])) if abs(r) > 0.3)


def _errors(fitted: Fit, held: Sequence[HeldOut]) -> Grid:
    shown = []
    for name, before, after in [("fitted", fitted.before, fitted.after), *((h.name, h.before, h.after) for h in held)]:
        for place, (phase, a) in enumerate(before.items()):
            b = after[phase]
            medians = (f"{a['median_abs_error']:.1%}", f"{b['median_abs_error']:.1%}")
            worst = (f"{a['worst_error']:+.1%}", f"{b['worst_error']:+.1%}")
            shown.append(("" if place else name, phase, f"{a['n']:.0f}", *medians, *worst))
    heads = ("", "phase", ">n", ">median before", ">after", ">worst before", ">after")
    title = "errors, prior terms and fitted ones; of held-out records with terms fitted without them"
    return grid(heads, shown, title, keys=2)
