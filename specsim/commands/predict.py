"""specsim predict"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specsim.commands.common import draw, json_option, note, plot_option, print_json, show
from specsim.commands.scenario import scenario_of, scenario_options
from specsim.pages import Line


@click.command()
@scenario_options
@click.option("--explain", is_flag=True, help="Show where the time goes, by component, and where numbers come from.")
@plot_option("where the time goes, and speedup over acceptance with the break-even")
@json_option
def command(explain: bool, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Predict decode, verify and cycle time, tokens a second, and the acceptance that breaks even.

    With no option at all the scenario is a trillion-parameter MoE (Kimi-K2.5) with its EAGLE-3 draft on eight GPUs
    joined by PCIe, batch 1.

    \b
    Examples:
      specsim predict --draft-tokens 3 --accept-rate 0.6
      specsim predict --model Llama-3.1-8B --hardware 1x-h200 --batch 8 \\
        --draft-tokens 4 --plot prediction.svg
      specsim predict --hardware 1x-h200 \\
        --sglang-args "--model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3"
    """
    from specsim.prediction import predict

    prediction = predict(scenario_of(options))
    if plot is not None:
        draw(prediction.json(), plot)
    if as_json:
        print_json(prediction.json())
        for warning in prediction.warnings:
            note(f"warning: {warning}")
        return
    from specsim.text import page

    hint = "" if explain else "--explain shows where the time goes and where the numbers come from."
    show([*page(prediction, explain), *([Line(hint, "faint")] if hint else [])])
