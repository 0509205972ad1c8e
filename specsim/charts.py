"""Charts of any document that a command prints with `--json`, as Vega-Lite specifications with their data.

    charts_for(json.loads(text)) -> [Chart, ...]

Pure functions of the document: a report, the planner page and a notebook show the same charts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from specsim.chart_causes import diagnosis_charts
from specsim.chart_hardware import agreement_charts, calibration_charts, diff_charts, hardware_charts
from specsim.chart_plan import plan_charts
from specsim.chart_predict import prediction_charts
from specsim.chart_runs import simulation_charts, validation_charts
from specsim.chart_simulations import simulations_charts
from specsim.chart_style import Chart as Chart
from specsim.chart_style import Table as Table
from specsim.chart_sweep import sweep_charts
from specsim.errors import InputError

KINDS: dict[str, Callable[[Mapping[str, Any]], list[Chart]]] = {
    "specsim.prediction/1": prediction_charts,
    "specsim.sweep/1": sweep_charts,
    "specsim.plan/1": plan_charts,
    "specsim.simulation/1": simulation_charts,
    "specsim.simulations/1": simulations_charts,
    "specsim.validation/1": validation_charts,
    "specsim.diagnosis/1": diagnosis_charts,
    "specsim.hardware/1": hardware_charts,
    "specsim.hardware-diff/1": diff_charts,
    "specsim.hardware-agreement/1": agreement_charts,
    "specsim.calibration/1": calibration_charts,
}


_NUMBERS = frozenset({float, int, bool, type(None)})  # most of a document: nothing in them to clean


def charts_for(document: Mapping[str, Any]) -> list[Chart]:
    """The charts of a document, the most telling first. Raises InputError for a schema that has none."""
    schema = document.get("schema") if isinstance(document, Mapping) else None
    if schema not in KINDS:
        raise InputError(f"no charts of {schema or 'a document without schema'}", where="charts", mend=f"known: {', '.join(KINDS)}")  # fmt: skip
    return KINDS[schema](_clean(document))


def _clean(value: Any) -> Any:
    """Without control characters and line separators: a specification that holds one in a name is not drawn."""
    if isinstance(value, str):
        return value if value.isprintable() else re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", value)
    if isinstance(value, list):
        return [each if type(each) in _NUMBERS else _clean(each) for each in value]
    if isinstance(value, (dict, Mapping)):
        return {key: each if type(each) in _NUMBERS else _clean(each) for key, each in value.items()}
    return value
