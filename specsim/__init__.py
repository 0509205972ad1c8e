"""specsim: a performance model and simulator for speculative decoding.

    >>> import specsim
    >>> s = specsim.scenario(model="Kimi-K2.5", hardware="8x-pcie-field", draft_tokens=3, accept_rate=0.6)
    >>> specsim.predict(s).reachable
    True

Names load when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specsim.acceptance import Acceptance as Acceptance
    from specsim.configs import load_model as load_model
    from specsim.cycle import evaluate as evaluate
    from specsim.errors import InputError as InputError
    from specsim.errors import SpecsimError as SpecsimError
    from specsim.launch import read_launch as read_launch
    from specsim.models import Model as Model
    from specsim.prediction import Prediction as Prediction
    from specsim.prediction import machine_of as machine_of
    from specsim.prediction import predict as predict
    from specsim.profiles import Profile as Profile
    from specsim.profiles import load_profile as load_profile
    from specsim.quantities import Quantity as Quantity
    from specsim.scenarios import Scenario as Scenario
    from specsim.scenarios import build as scenario

__all__ = [
    "Acceptance",
    "InputError",
    "Model",
    "Prediction",
    "Profile",
    "Quantity",
    "Scenario",
    "SpecsimError",
    "evaluate",
    "load_model",
    "load_profile",
    "machine_of",
    "predict",
    "read_launch",
    "scenario",
]

_HOMES = {
    "Acceptance": "acceptance",
    "InputError": "errors",
    "Model": "models",
    "Prediction": "prediction",
    "Profile": "profiles",
    "Quantity": "quantities",
    "Scenario": "scenarios",
    "SpecsimError": "errors",
    "evaluate": "cycle",
    "load_model": "configs",
    "load_profile": "profiles",
    "machine_of": "prediction",
    "predict": "prediction",
    "read_launch": "launch",
    "scenario": "scenarios:build",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specsim' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(f"specsim.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
