"""A replay for people: errors by phase, and the worst pairs."""

from __future__ import annotations

from specsim.pages import Line, Page, grid
from specsim.quantities import short
from specsim.replay import Result

PAIRS = 20  # of the worst that are shown


def page(result: Result) -> Page:
    """The replay as people see it."""
    yield Line("Predicted against observed", "title")
    phases = [
        (
            phase,
            str(s["n"]),
            f"{s['median_abs_error']:.1%}",
            f"{s['worst_error']:+.1%}",
            f"{s['interval_coverage']:.0%}",
        )
        for phase, s in result.summary().items()
    ]
    yield grid(("phase", ">n", ">median error", ">worst", ">in 80 % interval"), phases)
    yield Line()
    worst = []
    for p in result.pairs[:PAIRS]:
        error = f"{p.error:+.1%}{' ' if p.covered else '*'}"
        times = (short(p.observed), short(p.predicted), f"{short(p.low)}..{short(p.high)}")
        worst.append((p.record, p.phase, f"{p.batch}, {p.context}", error, *times))
    heads = ("record", "phase", ">batch, context", ">error ", ">observed", ">predicted", ">80 % interval")
    yield grid(heads, worst, "worst first", keys=3)
    if len(result.pairs) > PAIRS:
        yield Line(f"{len(result.pairs) - PAIRS} more pairs: --json lists all.", "faint")
    units = "Times in ms, throughput in tokens a second, break_even in tokens a cycle."
    yield Line(f"{units} * observed outside the interval.", "faint")
