"""The command that makes a result again, from what was asked. In the command line's own words, at full precision."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from specsim.configs import load_preset
from specsim.errors import InputError
from specsim.models import Model
from specsim.profiles import Profile, load_shipped
from specsim.routing import Routing
from specsim.scenarios import Scenario

OPTIONS = (
    "model", "draft", "hardware", "engine", "tp", "ep", "dp_attention", "batch", "context", "method", "draft_tokens", "num_steps",
    "topk", "accept_rate", "accept_length", "accept_per_position", "accept_profile", "routing", "eager", "sglang_args", "vllm_args",
)  # fmt: skip


class _Unsaid(Exception):
    """A value that no option can state."""


def command_of(s: Scenario, command: str = "predict") -> str | None:
    """`specsim predict ...` for a scenario; None where it was made of what no option states (a model in memory, say)."""
    words = ["specsim", command]
    try:
        for name, value in in_order(s.asked):
            for text in _texts(name, value):
                words += [f"--{name.replace('_', '-')}", text]
    except _Unsaid:
        return None
    return shlex.join(words)


def in_order(asked: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What was asked, in the order of --help."""
    if set(asked) - set(OPTIONS):
        raise _Unsaid
    return ((name, asked[name]) for name in OPTIONS if name in asked)


def _texts(name: str, value: Any) -> Iterator[str]:
    """An option's value as the command line takes it; several where it is given several times."""
    if isinstance(value, str):
        yield _shipped(name, value)
    elif isinstance(value, Model):
        if value.source != f"preset {value.name}" or load_preset(value.name) is not value:
            raise _Unsaid
        yield value.name
    elif isinstance(value, Profile):
        yield _same_box(value)
    elif isinstance(value, Routing):
        if value.name != "uniform" and not value.name.startswith("zipf:"):
            raise _Unsaid
        yield value.name
    elif value is True:
        yield "on"
    elif type(value) in (int, float):
        yield _number(value)
    elif name == "eager":
        yield from sorted(value)
    elif isinstance(value, tuple):
        yield ",".join(map(_number, value))
    elif isinstance(value, (int, float, np.number)) or (isinstance(value, np.ndarray) and value.size == 1):
        yield _number(np.asarray(value).reshape(-1)[0])
    elif value is not False:
        raise _Unsaid


def _number(value: Any) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() else repr(number)


def _same_box(box: Profile) -> str:
    try:
        found = load_shipped(box.name)
    except InputError:
        raise _Unsaid from None
    if found is not box:
        raise _Unsaid
    return box.name


def _shipped(name: str, text: str) -> str:
    """A shipped model or box under its own name, in whatever case it was given."""
    try:
        if name in ("model", "draft"):
            return load_preset(text).name
        if name == "hardware":
            return load_shipped(text).name
    except InputError:
        pass  # a file
    return text
