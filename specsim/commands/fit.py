"""specsim fit"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specsim.commands.common import Meter, OneOf, OutFile, json_option, note, print_json, show
from specsim.errors import InputError

if TYPE_CHECKING:
    from specsim.profiles import Profile
    from specsim.records import Record

EPILOG = """\b
Examples:
  specsim fit --records validation --leave-one-out
  specsim fit --records runs --hardware 1x-h200 --hold-out 'llama8b-*' \\
    -o my-box.yaml
  specsim fit --records runs --terms cycle_cpu
"""
PATH = click.Path(path_type=Path)


@click.command(epilog=EPILOG)
@click.option("--records", type=PATH, required=True, help="Folder of records, or one record.")
@click.option("--hardware", help="Profile to predict with and to write into.  [default: each record's own]")
@click.option("--hold-out", multiple=True, metavar="NAME", help="Leave out these records; may hold * and be repeated.")
@click.option("--leave-one-out", is_flag=True, help="Also predict each model's runs from a fit to the other models'.")
@click.option("--terms", metavar="A,B,...", help="Fit these terms.  [default: all that the records identify]")
@click.option("--engine", type=OneOf(["sglang", "vllm"]), help="Engine, where records are of several.")
@click.option("-o", "--output", type=OutFile(), help="Write the profile with the fitted terms to this YAML file.")
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
    names = None if terms is None else [name.strip() for name in terms.split(",") if name.strip()]
    with Meter("fit"):
        cases, skipped = engine_fit.cases_of(found, hardware, engine)
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
        from specsim.fit_text import page

        show(page(fitted, held))
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
