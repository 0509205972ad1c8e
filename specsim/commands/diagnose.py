"""specsim diagnose"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specsim.commands.common import Meter, Share, draw, json_option, note, plot_option, print_result, show
from specsim.commands.scenario import COUNT, says, scenario_options, without_defaults


class At(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """BATCH=MS."""

    name = "batch=ms"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        batch, mark, ms = str(value).partition("=")
        if not mark:
            self.fail(f"{value!r} is not BATCH=MS; for example 3=15.5", param, ctx)
        try:
            found = COUNT.convert(batch, param, ctx), float(ms)
        except ValueError:
            self.fail(f"{value!r} is not BATCH=MS; for example 3=15.5", param, ctx)
        if found[0] < 1 or not 0 < found[1] < 1e7:
            self.fail(f"{value!r}: give a batch of 1 or more and a time above 0; for example 3=15.5", param, ctx)
        return found


@click.command()
@click.argument("sources", nargs=-1, type=click.Path(readable=False), metavar="[FILE|URL...]")
@click.option("--decode-ms", type=float, metavar="MS", help="One plain decode step, without speculation.")
@click.option("--verify-ms", type=float, metavar="MS", help="One verify of the target.")
@click.option("--cycle-ms", type=float, metavar="MS", help="One whole speculative cycle.")
@click.option(
    "--decode-tokens-per-s",
    type=float,
    metavar="X",
    help="Instead of --decode-ms: all tokens a second without speculation.",
)
@click.option(
    "--tokens-per-s",
    type=float,
    metavar="X",
    help="All tokens a second with speculation; with an acceptance it gives the cycle.",
)
@click.option("--decode-at", type=At(), multiple=True, help="A plain decode step at another batch; repeatable.")
@click.option("--verify-at", type=At(), multiple=True, help="A verify at another batch; repeatable.")
@click.option(
    "--result",
    "results",
    multiple=True,
    metavar="TEST=VALUE,...",
    help="The outcome of a test that diagnose proposed; repeatable.",
)
@click.option(
    "--noise", type=Share(), default=0.05, metavar="F", help="Relative error of the step times given; default 0.05."
)
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of the Monte Carlo samples; default 0.")
@plot_option("the weights of the explanations, and decode and verify by component under each")
@says(
    hardware="Hardware profile of a healthy box like this one (specsim hardware list); default 8x-rtx-pro-6000, and none beside files.",
    accept_rate="Probability, 0 to 1, that a drafted token is accepted, as observed.",
    accept_length="Mean tokens a cycle, the bonus token included, as observed.",
    accept_per_position="Conditional accept rates, 0 to 1, by position, as observed.",
)
@scenario_options
@json_option
def command(sources: tuple[str, ...], as_json: bool, plot: Path | None, seed: int, **options: Any) -> None:
    """Say why a verify is slow: explanations weighed, the next test, what cannot help, what each remedy would give.

    Give step times, files or addresses that `specsim observe` reads, or both. A log fills in model, engine flags, batch
    and accept length; give --hardware so that times can be judged. Acceptance options mean what was observed. With no
    scenario option and no file the scenario is the field case on a healthy box.

    \b
    Examples:
      specsim diagnose --decode-ms 12.1 --verify-ms 29.5 --draft-tokens 3
      specsim diagnose --decode-ms 12.1 --verify-ms 29.5 --draft-tokens 3 \\
        --decode-at 3=15.5
      specsim diagnose server.log --hardware 8x-h100
      specsim diagnose --decode-tokens-per-s 200 --tokens-per-s 150 \\
        --accept-length 1.9 --draft-tokens 4 --model Qwen3-30B-A3B \\
        --hardware 8x-h100 --tp 2
    """  # fmt: skip
    from specsim.diagnose_text import explained
    from specsim.diagnosed import diagnose

    def wanted(name: str) -> bool:
        """A team's acceptance was not observed here, and files know better than defaults what the server ran."""
        return name == "hardware" if sources else not name.startswith("accept_")

    options = without_defaults(options, wanted)
    with Meter("diagnose"):
        d = diagnose(*sources, seed=seed, **options)
    if plot is not None:
        draw(d.json(), plot, components=explained(d))
    if as_json:
        print_result(d.json())
        for warning in d.warnings:
            note(f"warning: {warning}")
        return
    show(d.page())
