"""A replay for people: errors by phase, and the worst pairs. Host time is what a step's phases leave of it, often next to nothing:
its error is shown as a share of the step, and it is not among the worst; nor is a throughput whose step is."""

from __future__ import annotations

from specsim.pages import Line, Page, grid
from specsim.quantities import counted, short
from specsim.replay import PHASES, Pair, Result

PAIRS = 20  # of the worst that are shown


def page(result: Result) -> Page:
    """The replay as people see it."""
    yield Line("Predicted against observed", "title")
    phases = []
    for phase, found in result.summary().items():
        kind = "_of_step" if "worst_error_of_step" in found else ""
        middle, worst = found[f"median_abs_error{kind}"], found[f"worst_error{kind}"]
        shown = (f"{phase}, of the step" if kind else phase, str(found["n"]), f"{middle:.1%}", f"{worst:+.1%}")
        phases.append((*shown, f"{found['interval_coverage']:.0%}"))
    yield grid(("phase", ">n", ">median error", ">worst", ">in 80 % interval"), phases)
    yield Line()
    rows = []
    listed = _worst(result)
    for p in listed[:PAIRS]:
        error = f"{p.error:+.1%}{' ' if p.covered else '*'}"
        times = (short(p.observed), short(p.predicted), f"{short(p.low)}..{short(p.high)}")
        rows.append((p.record, p.phase, f"{p.batch}, {p.context}", error, *times))
    heads = ("record", "phase", ">batch, context", ">error ", ">observed", ">predicted", ">80 % interval")
    without = [phase for phase in PHASES if len(result.of(phase)) > sum(p.phase == phase for p in listed)]
    follow = f", without {' and '.join(without)} (the steps say it)" if without else ""
    yield grid(heads, rows, f"worst first{follow}", keys=3)
    if len(result.pairs) > len(rows):
        yield Line(f"{counted(len(result.pairs) - len(rows), 'more pair')}: --json lists all.", "faint")
    units = "Times in ms, throughput in tokens a second, break_even in tokens a cycle."
    yield Line(f"{units} * observed outside the interval.", "faint")
    yield from (Line(f"note: {warning}", "warning") for warning in result.warnings)


def _worst(result: Result) -> list[Pair]:
    """The pairs that say something by themselves, in the order of the result."""
    steps = {(p.record, p.batch, p.context) for p in result.pairs if p.phase in ("decode", "cycle")}

    def another(p: Pair) -> bool:
        return p.phase == "tokens_per_s" and (p.record, p.batch, p.context) in steps

    return [p for p in result.pairs if p.step is None and not another(p)]
