"""specsim predict"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import console, json_option, note, print_json
from specsim.commands.scenario import scenario_of, scenario_options

if TYPE_CHECKING:
    from specsim.prediction import Prediction


@click.command()
@scenario_options
@click.option("--explain", is_flag=True, help="Show where the time goes, by component, and where numbers come from.")
@json_option
def command(explain: bool, as_json: bool, **options: Any) -> None:
    """Predict decode, verify and cycle time, tokens a second, and the acceptance that breaks even.

    With no option at all the scenario is a trillion-parameter MoE (Kimi-K2.5) with its EAGLE-3 draft on eight GPUs
    joined by PCIe, batch 1.

    \b
    Examples:
      specsim predict --draft-tokens 3 --accept-rate 0.6
      specsim predict --model Llama-3.1-8B --hardware 1x-h200 --batch 8 --draft-tokens 4
      specsim predict --hardware 1x-h200 --sglang-args "--model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3"
    """
    from specsim.prediction import predict

    prediction = predict(scenario_of(options))
    if as_json:
        print_json(prediction.json())
        for warning in prediction.warnings:
            note(f"warning: {warning}")
        return
    show(prediction, explain)


def show(p: Prediction, explain: bool) -> None:
    """Print a prediction for people."""
    from specsim.text import breakdown_table, headline, phase_table, verdict

    out = console()
    out.print(headline(p), soft_wrap=True)
    out.print()
    out.print(verdict(p), style="bold", soft_wrap=True)
    out.print()
    out.print(phase_table(p))
    if p.speedup is None and p.breakeven_length is not None:
        out.print("speedup by accept rate: " + "  ".join(f"{a:.1f}: {v}" for a, v in p.speedup_curve), soft_wrap=True)
    if explain:
        out.print(breakdown_table(p))
    for warning in p.warnings:
        out.print(f"note: {warning}", style="yellow", soft_wrap=True, markup=False)
    if not explain:
        out.print("--explain shows where the time goes and where the numbers come from.", style="dim")
