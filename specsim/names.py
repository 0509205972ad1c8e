"""The names that people type, listed without loading what they stand for: a shell completes them at every key."""

from __future__ import annotations

import importlib
from pathlib import Path

ENGINES = ("sglang", "vllm")
METHODS = ("eagle3", "eagle", "mtp", "draft-model", "dflash", "dspark", "ngram", "none")
PHASES = ("decode", "draft", "verify", "extend")
PERCENTILES = ("p50", "p90", "p95", "p99")
ROUTINGS = ("uniform", "zipf:1.0")  # the latter an example: any exponent


def models() -> list[str]:
    """Models that ship with specsim, targets and drafts."""
    return sorted((path.stem for path in (Path(__file__).parent / "presets").glob("*.json")), key=str.lower)


def hardware() -> list[str]:
    """Hardware profiles that ship with specsim."""
    folder = importlib.import_module("specsim.hardware").__path__[0]
    return sorted(path.stem for path in Path(folder).glob("*.yaml"))


def acceptances() -> list[str]:
    """Published drafters on a domain."""
    from specsim.files import read_yaml

    profiles = read_yaml(Path(__file__).parent / "data" / "acceptance.yaml")["profiles"]
    return [f"{family}/{domain}" for family, entry in profiles.items() for domain in entry["domains"]]


def flag_of(name: str) -> str:
    """An option as the command line has it: "draft_tokens" is --draft-tokens."""
    return "--" + name.replace("_", "-")
