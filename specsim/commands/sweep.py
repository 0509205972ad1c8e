"""specsim sweep"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from specsim.commands.common import Meter, OutFile, draw, json_option, note, plot_option, print_result, show
from specsim.commands.scenario import Count, Known, Listed, scenario_options
from specsim.names import flag_of

F = TypeVar("F", bound=Callable[..., Any])
SINGLE = ("sglang_args", "vllm_args")  # launch lines: commas are part of them
TYPES: dict[str, Any] = {}


def _reader(name: str) -> Callable[[str], Any]:
    return lambda text: _values(name, text)


def lists_of_scenario_options(command: F) -> F:
    """Add every scenario option, each taking a list or a range; its own type is kept in `TYPES`."""
    own = list(getattr(command, "__click_params__", []))
    wrapped = scenario_options(command)
    for option in getattr(wrapped, "__click_params__", [])[len(own) :]:
        if isinstance(option, click.Option) and option.name and not option.multiple and option.name not in SINGLE:
            TYPES[option.name] = option.type
            option.type = option.type.several(",") if isinstance(option.type, Known) else Listed(_reader(option.name))
            option.metavar = "LIST"
    return wrapped


@click.command()
@lists_of_scenario_options
@click.option("--out", type=OutFile(), metavar="FILE", help="Write a row a configuration: .csv or .parquet.")
@click.option("--rows", is_flag=True, help="Show the rows (at most 2,000 configurations) instead of the maps.")
@plot_option("best draft length or break-even by batch and context, and speedup over acceptance")
@click.option("--jobs", type=int, default=1, metavar="N", help="Processes; -1: one a core; default 1.")
@click.option("--cluster", metavar="dask://HOST:PORT|ray", help="Run on an existing Dask or Ray cluster instead.")
@json_option
def command(
    out: Path | None, rows: bool, plot: Path | None, jobs: int, cluster: str | None, as_json: bool, **options: Any
) -> None:
    """Predict every combination of options: best draft length, break-even, latency against throughput.

    Every scenario option takes a list or a range: 1,2,8 or 2:9 or 1:256:x2 or 0.3:0.95:0.05 or 1k,8k,64k; rates by
    position are parted by semicolons. A million configurations take about a second, a hundred million no more memory.

    \b
    Examples:
      specsim sweep --batch 1:64:x2 --draft-tokens 2:8 --accept-rate 0.6
      specsim sweep --batch 1:256:x2 --context 1k,8k,64k --draft-tokens 2:9 \\
        --accept-rate 0.3:0.95:0.05 --out all.csv
      specsim sweep --model Llama-3.1-8B --hardware 1x-h200,1x-rtx-5090 \\
        --batch 1:64:x2 --draft-tokens 2:6 --jobs 2
    """
    from specsim.swept import sweep

    lists = {name: _values(name, text) for name, text in options.items() if name in TYPES and text is not None}
    with Meter("sweep"):
        result = sweep(out=out, jobs=jobs, cluster=cluster, **{**options, **lists})
    if plot is not None:
        draw(result.json(), plot)
    from specsim.sweep_text import few, page

    if as_json:
        print_result(result.json())
        for warning in few(result.warnings):
            note(f"warning: {warning}")
        return
    if rows and result.rows is None:
        from specsim.errors import InputError

        mend = "give --out FILE" if out is None else f"leave it out: {out} holds them"
        raise InputError(f"{result.digest.configurations:,} rows are too many to show", where="--rows", mend=mend)
    show(page(result, rows))


def _values(name: str, text: str) -> tuple[Any, ...]:
    """The values that an option lists, each of the option's own type."""
    from specsim.errors import InputError
    from specsim.ranges import numbers, whole_numbers, words

    kind, option = TYPES[name], flag_of(name)
    if isinstance(kind, Count):
        return whole_numbers(text, option)
    if isinstance(kind, click.types.FloatParamType):
        return numbers(text, option)
    try:
        return tuple(
            kind.convert(w, None, None) for w in words(text, option, ";" if name == "accept_per_position" else ",")
        )
    except click.BadParameter as error:
        raise InputError(error.message, where=option) from None
