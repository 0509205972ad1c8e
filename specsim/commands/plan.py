"""specsim plan"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specsim.commands.common import (
    Meter,
    OneOf,
    OutFile,
    Percent,
    Share,
    draw,
    json_option,
    note,
    plot_option,
    prefix_option,
    print_result,
    range_option,
    show,
)
from specsim.commands.scenario import COUNT, FILE, TOKENS, Known, Listed, says, scenario_options
from specsim.names import PERCENTILES, flag_of

LISTS = ("hardware", "tp", "ep", "draft_tokens")
FIXED = ("batch", "context", "num_steps", "topk")  # what the load and the plan set
REQUESTS, INPUT, OUTPUT = 2000, 1024, 256  # as specsim.planned has them


def lists_of_some(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the scenario options; those in `LISTS` take lists and ranges, and batch and context are not asked."""
    own = len(getattr(command, "__click_params__", []))
    wrapped = scenario_options(command)
    for option in wrapped.__click_params__[own:]:  # type: ignore[attr-defined]
        if option.name in LISTS:
            option.type = option.type.several(",") if isinstance(option.type, Known) else Listed(_whole)
            option.metavar = "LIST"
        option.hidden = option.name in FIXED
    return wrapped


def _whole(text: str) -> Any:
    from specsim.ranges import whole_numbers

    return whole_numbers(text, "")


@click.command()
@says(
    tp="Tensor-parallel ranks; default every power of two on which the model fits.",
    draft_tokens="Rows a sequence verifies each cycle, root included; default 2 to 8, none, and by batch.",
)
@lists_of_some
@click.option("--rate", type=float, metavar="R", help="Requests a second, over all replicas.")
@click.option("--input-tokens", type=TOKENS, metavar="TOKENS", help=f"Prompt tokens of a request; default {INPUT:,}.")
@click.option("--output-tokens", type=TOKENS, metavar="TOKENS", help=f"Tokens a request generates; default {OUTPUT:,}.")
@range_option
@click.option(
    "--trace", type=FILE, metavar="FILE", help="Take lengths, and the rate of the busiest minute, from a trace."
)
@prefix_option
@click.option("--ttft-ms", type=float, metavar="MS", help="Target: time to first token.")
@click.option("--tpot-ms", type=float, metavar="MS", help="Target: time per output token.")
@click.option(
    "--percentile",
    type=OneOf(PERCENTILES),
    help="Of the requests that must meet the targets; default their mean.",
)
@click.option(
    "--speedup", type=float, default=1.5, metavar="X", help="Speedup to give drafters' targets for; default 1.5."
)
@click.option(
    "--hysteresis", type=Share(), default=0.03, metavar="F", help="Gain that a switch must bring; default 0.03."
)
@click.option(
    "--headroom",
    type=Percent(),
    default=0.1,
    metavar="F",
    help="Share by which the rate may grow, as 0.2 or 20%; default 0.1.",
)
@click.option("--max-gpus", type=COUNT, metavar="N", help="GPUs there are at most; default any number.")
@click.option("--price-per-gpu-hour", type=float, metavar="P", help="Give the cost of a million output tokens.")
@click.option("--policy", type=OutFile(), metavar="FILE", help="Write when to switch, as --engine reads it (JSON).")
@click.option("--simulate", is_flag=True, help="Confirm the plan by simulating one replica.")
@click.option(
    "--num-requests",
    type=COUNT,
    metavar="N",
    help=f"Requests of the simulation; default {REQUESTS:,}; a trace is played whole.",
)
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Seed of the simulation; default 0.")
@plot_option("GPUs or cost of each choice, and what a drafter must reach")
@json_option
def command(as_json: bool, plot: Path | None, **options: Any) -> int:
    """How many GPUs a load takes, with which draft length, when to switch speculation off, which acceptance to train for.

    --hardware, --tp, --ep and --draft-tokens take lists and ranges; without acceptance only plain decoding is planned, and
    what a drafter must reach. Exit code 1 when nothing meets the targets.

    \b
    Examples:
      specsim plan --hardware 8x-rtx-pro-6000 --rate 2 --input-tokens 2000 \\
        --output-tokens 500 --tpot-ms 40 --accept-rate 0.6
      specsim plan --model Llama-3.1-8B --hardware 1x-h200 --rate 20 \\
        --ttft-ms 500 --tpot-ms 10 --accept-rate 0.6 --simulate
    """
    from specsim.planned import plan as make
    from specsim.ranges import whole_numbers, words

    for name in LISTS:
        if options[name]:
            read = words if name == "hardware" else whole_numbers
            options[name] = read(options[name], flag_of(name))
    with Meter("plan"):
        found = make(**options)
    if found.wanted.policy is not None:
        found.write_policy(found.wanted.policy)
    document = found.json()
    draw(document, plot)
    if as_json:
        print_result(document)
        for warning in found.plan.warnings:
            note(f"warning: {warning}")
    else:
        show(found.page())
    return 0 if found.met else 1
