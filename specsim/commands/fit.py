"""specsim fit"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import console, json_option, note, print_json
from specsim.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from specsim.engine_fit import Fit, HeldOut, Term
    from specsim.profiles import Profile
    from specsim.records import Record

EPILOG = """\b
Examples:
  specsim fit --records validation --leave-one-out
  specsim fit --records runs --hardware 1x-h200 --hold-out 'llama8b-*' -o my-box.yaml
  specsim fit --records runs --terms eager_factor,cycle_cpu
"""
PATH = click.Path(path_type=Path)


@click.command(epilog=EPILOG)
@click.option("--records", type=PATH, required=True, help="Folder of records, or one record.")
@click.option("--hardware", help="Profile to predict with and to write into.  [default: each record's own]")
@click.option("--hold-out", multiple=True, metavar="NAME", help="Leave out these records; may hold * and be repeated.")
@click.option("--leave-one-out", is_flag=True, help="Also predict each model's runs from a fit to the other models'.")
@click.option("--terms", metavar="A,B,...", help="Fit these terms.  [default: all that the records identify]")
@click.option("--engine", type=click.Choice(["sglang", "vllm"]), help="Engine, where records are of several.")
@click.option("-o", "--output", type=PATH, help="Write the profile with the fitted terms to this YAML file.")
@json_option
def command(
    records: Path,
    hardware: str | None,
    hold_out: tuple[str, ...],
    leave_one_out: bool,
    terms: str | None,
    engine: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Fit the engine terms to recorded runs.

    Only the engine's few terms move (docs: Fit), from the values and spreads of its description. Terms that the
    records do not identify stay, and the run that would identify each is named.
    """
    from specsim import engine_fit
    from specsim.files import write_atomically
    from specsim.profiles import dump_profile
    from specsim.replay import load

    found, left_out = load(records)
    cases, skipped = engine_fit.cases_of(found, hardware, engine)
    names = None if terms is None else [name.strip() for name in terms.split(",") if name.strip()]
    kept, out = engine_fit.split(cases, hold_out)
    base = _base(found, {case.record for case in kept}, hardware) if output else None
    fitted = engine_fit.fit(kept, names)
    held = [engine_fit.held_out("held out", fitted, out)] if out else []
    if leave_one_out:
        held += engine_fit.leave_one_out(kept, names)
    for line in (*left_out, *skipped):
        note(f"left out: {line}")
    if as_json:
        print_json(engine_fit.document(fitted, held, [*left_out, *skipped]))
    else:
        show(fitted, held)
    if output is not None and base is not None:
        profile = engine_fit.with_terms(base, fitted, datetime.date.today().isoformat())
        write_atomically(output, dump_profile(profile))
        note(f"saved {output}")


def _base(records: list[Record], used: set[str], hardware: str | None) -> Profile:
    """The profile to write the terms into."""
    from specsim.profiles import load_profile

    own = sorted({r.hardware for r in records if r.name in used and r.hardware})
    if hardware is None and len(own) != 1:
        raise InputError(
            f"the records name {len(own)} profiles ({', '.join(own)})", where="--output", mend="choose with --hardware"
        )
    return load_profile(hardware or own[0])


def show(fitted: Fit, held: list[HeldOut]) -> None:
    """Print a fit for people."""
    out = console()
    out.print(
        f"{fitted.engine}: {len(fitted.terms)} terms fitted to {fitted.points} points of {len(fitted.records)} records"
        + (f"; residuals {fitted.noise:.1f} times the stated errors" if fitted.noise > 1.05 else "")
    )
    out.print(_terms(fitted))
    for name, why in fitted.left.items():
        out.print(f"{name.removesuffix('_us')} stays at its prior: {why}", soft_wrap=True, markup=False)
    if fitted.left:
        out.print()
    out.print(_errors(fitted, held))


def _terms(fitted: Fit) -> Table:
    table = _table("Engine terms, microseconds but eager_factor; +- one standard deviation")
    for name in ("term", "prior", "fitted", "from records", "correlated with"):
        table.add_column(name, justify="left" if name in ("term", "correlated with") else "right")
    for place, t in enumerate(fitted.terms):
        values = (_with_error(t.prior, t.prior_error), _with_error(t.value, t.error), f"{t.share:.0%}")
        table.add_row(t.name.removesuffix("_us"), *values, _strongest(fitted.terms, fitted.correlations[place], place))
    return table


def _with_error(value: float, error: float) -> str:
    from specsim.quantities import decimals

    places = decimals(error)
    return f"{value:,.{places}f} +- {error:,.{places}f}"


def _strongest(terms: tuple[Term, ...], row: Any, place: int) -> str:
    """Terms whose correlation with this one is beyond 0.3, strongest first."""
    found = [(r, t.name.removesuffix("_us")) for i, (r, t) in enumerate(zip(row, terms, strict=True)) if i != place]
    return ", ".join(f"{name} {r:+.2f}" for r, name in sorted(found, key=lambda f: -abs(f[0])) if abs(r) > 0.3)


def _errors(fitted: Fit, held: list[HeldOut]) -> Table:
    table = _table("Errors, prior terms and fitted ones; of held-out records with terms fitted without them")
    for name in ("", "phase", "n", "median before", "after", "worst before", "after"):
        table.add_column(name, justify="left" if name in ("", "phase") else "right")
    groups = [("fitted", fitted.before, fitted.after)] + [(h.name, h.before, h.after) for h in held]
    for name, before, after in groups:
        for place, (phase, a) in enumerate(before.items()):
            b = after[phase]
            medians = (f"{a['median_abs_error']:.1%}", f"{b['median_abs_error']:.1%}")
            worst = (f"{a['worst_error']:+.1%}", f"{b['worst_error']:+.1%}")
            table.add_row("" if place else name, phase, f"{a['n']:.0f}", *medians, *worst)
    return table


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE)
