"""specsim: a performance model and simulator for speculative decoding.

    >>> import specsim
    >>> p = specsim.predict(draft_tokens=3, accept_rate=0.6)
    >>> p.reachable
    True

Options are those of the command line, with underscores: `specsim.predict("Qwen3-8B", hardware="1x-h200", batch=8)` is
`specsim predict --model Qwen3-8B --hardware 1x-h200 --batch 8`; so are sweep, plan, simulate, diagnose, validate and fit. Results
show themselves as tables in a notebook and when they are printed, and their `json()` is the document of `--json`.

Names load when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specsim.acceptance import Acceptance as Acceptance
    from specsim.asked import predict as predict
    from specsim.asked import scenario as scenario
    from specsim.configs import load_model as load_model
    from specsim.cycle import evaluate as evaluate
    from specsim.diagnosed import diagnose as diagnose
    from specsim.errors import InputError as InputError
    from specsim.errors import SpecsimError as SpecsimError
    from specsim.errors import WorkError as WorkError
    from specsim.fitted import fit as fit
    from specsim.launch import read_launch as read_launch
    from specsim.models import Model as Model
    from specsim.observations import observe as observe
    from specsim.planned import plan as plan
    from specsim.prediction import Prediction as Prediction
    from specsim.prediction import machine_of as machine_of
    from specsim.profiles import Profile as Profile
    from specsim.profiles import load_profile as load_profile
    from specsim.quantities import Quantity as Quantity
    from specsim.replay import run as validate
    from specsim.scenarios import Scenario as Scenario
    from specsim.simulations import simulate as simulate
    from specsim.swept import sweep as sweep

# name -> module, and the name there where it is another
_HOMES = {
    "Acceptance": "acceptance",
    "InputError": "errors",
    "Model": "models",
    "Prediction": "prediction",
    "Profile": "profiles",
    "Quantity": "quantities",
    "Scenario": "scenarios",
    "SpecsimError": "errors",
    "WorkError": "errors",
    "diagnose": "diagnosed",
    "evaluate": "cycle",
    "fit": "fitted",
    "load_model": "configs",
    "load_profile": "profiles",
    "machine_of": "prediction",
    "observe": "observations",
    "plan": "planned",
    "predict": "asked",
    "read_launch": "launch",
    "scenario": "asked",
    "simulate": "simulations",
    "sweep": "swept",
    "validate": "replay:run",
}

__all__ = [
    "Acceptance",
    "InputError",
    "Model",
    "Prediction",
    "Profile",
    "Quantity",
    "Scenario",
    "SpecsimError",
    "WorkError",
    "diagnose",
    "evaluate",
    "fit",
    "load_model",
    "load_profile",
    "machine_of",
    "observe",
    "plan",
    "predict",
    "read_launch",
    "scenario",
    "simulate",
    "sweep",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specsim' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(f"specsim.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
