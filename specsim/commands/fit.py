"""specsim fit"""

from __future__ import annotations

import os
from pathlib import Path

import click

from specsim.commands.common import InFile, Meter, OneOf, OutFile, json_option, note, print_json, show

PATH = InFile()


@click.command()
@click.option("--records", type=PATH, required=True, metavar="DIR|FILE", help="Folder of records, or one record.")
@click.option(
    "--hardware", metavar="NAME|FILE", help="Profile to predict with and to write into; default each record's own."
)
@click.option("--hold-out", multiple=True, metavar="NAME", help="Leave out these records; may hold * and be repeated.")
@click.option(
    "--include",
    multiple=True,
    metavar="NAME",
    help="Fit these, of the records that are set aside; may hold * and be repeated.",
)
@click.option("--leave-one-out", is_flag=True, help="Also predict each model's runs from a fit to the other models'.")
@click.option("--terms", metavar="A,B,...", help="Fit these terms; default all that the records identify.")
@click.option(
    "--engine", type=OneOf(["sglang", "vllm"]), metavar="sglang|vllm", help="Engine, where records are of several."
)
@click.option(
    "-o", "--output", type=OutFile(), metavar="FILE", help="Write the profile with the fitted terms to this YAML file."
)
@json_option
def command(
    records: Path,
    hardware: str | None,
    hold_out: tuple[str, ...],
    include: tuple[str, ...],
    leave_one_out: bool,
    terms: str | None,
    engine: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Fit the engine terms to recorded runs.

    Only the engine's few terms move (docs: Fit), from the values and spreads of its description. Terms that the
    records do not identify stay, and the run that would identify each is named.
    Records that say nothing about the terms are set aside, each with its reason.

    \b
    Examples:
      specsim fit --records validation --engine sglang --leave-one-out
      specsim fit --records runs --hardware 1x-h200 --hold-out 'llama8b-*' \\
        -o my-box.yaml
      specsim fit --records validation --engine sglang --terms eager_factor
    """
    # Its matrices are small: threads that wait for each other made a fit on a busy machine take twice as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from specsim.fitted import fit

    names = None if terms is None else [name.strip() for name in terms.split(",") if name.strip()]
    with Meter("fit"):
        found = fit(
            records, hardware=hardware, hold_out=hold_out, include=include, leave_one_out=leave_one_out, terms=names, engine=engine,
            output=output,
        )  # fmt: skip
    for line in found.left_out:
        note(f"left out: {line}")
    if as_json:
        print_json(found.json())
    else:
        show(found.page())
    if output is not None:
        note(f"wrote {output}")
