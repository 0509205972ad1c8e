"""When to speculate, by batch and context: schedules with hysteresis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.machine import Machine
from specsim.scenarios import Scenario
from specsim.simulation_costs import Ranges, cache_limits, drafting, running_limit, step_seconds

Array = NDArray[np.float64]
SCHEMA = "specsim.policy/1"
BATCHES = 512  # the largest batch a policy looks at


@dataclass(frozen=True)
class Policy:
    """What to draft at one context. `rising` holds while the batch grows, `falling` while it shrinks: between their
    thresholds the server stays with what it does, so that a batch that wavers does not switch at every step."""

    context: int
    hysteresis: float
    rising: Ranges
    falling: Ranges


def policies(
    s: Scenario,
    machine: Machine,
    draft_tokens: Sequence[int],
    contexts: Sequence[int],
    hysteresis: float = 0.03,
    prefer: int | None = None,
) -> list[Policy]:
    """Schedules for a scenario with acceptance that drafts chains, one a context at which at least one request fits.

    Every choice is within `hysteresis` (a fraction) of the best at its batch, averaged over batches nearby (`_smooth`). Where
    several hold equally long, `prefer` (drafted tokens) is taken if it is among them, else the best of them.
    """
    drafted = [0, *(d - 1 for d in draft_tokens)]
    kv, running = cache_limits(s, min(running_limit(s), BATCHES))
    room = [min(running, int(kv / (context + max(draft_tokens)))) for context in contexts]
    batches, at = np.arange(1.0, max([*room, 1]) + 1), np.asarray(contexts, dtype=float)
    worth = np.empty((len(batches), len(contexts), len(drafted)))  # tokens a second of one sequence
    for place, k in enumerate(drafted):
        one = drafting(s, k)
        length = 1.0 if one.accept_length is None else float(one.accept_length.reshape(-1)[0])
        worth[:, :, place] = length / step_seconds(one, machine, batches[:, None], at[None, :])
    out = []
    for i, (context, most) in enumerate(zip(contexts, room, strict=True)):
        if most >= 1:
            here = worth[:most, i] / worth[:most, i, :1]
            rising, falling = _schedules(_smooth(here), drafted, hysteresis, prefer)
            out.append(Policy(int(context), hysteresis, rising, falling))
    return out


def _smooth(worth: Array) -> Array:
    """Worth averaged over the batches that a mean of n wavers between, n - root n to n + root n (from 4 up): graphs of
    padded sizes favour single batches, which no server stays at."""
    sums = np.vstack([np.zeros(worth.shape[1]), np.cumsum(worth, axis=0)])
    n = np.arange(1, len(worth) + 1)
    reach = np.where(n < 4, 0, np.sqrt(n).astype(int))
    low, high = np.maximum(n - 1 - reach, 0), np.minimum(n + reach, len(worth))
    return np.asarray((sums[high] - sums[low]) / (high - low)[:, None])


def _schedules(
    worth: Array, drafted: Sequence[int], hysteresis: float, prefer: int | None = None
) -> tuple[Ranges, Ranges]:
    """Ranges for a rising and a falling batch, from the worth of each choice (batch, choice).

    Rising: as few switches as there can be when every choice stays within the hysteresis of the best; each holds as long as
    it does. Falling: the same choices in reverse, each held down to where it leaves the hysteresis.
    """
    good = worth * (1 + hysteresis) >= worth.max(axis=1, keepdims=True)
    n = len(worth)
    starts: list[tuple[int, int]] = []  # (place of the first batch, choice)
    at = 0
    while at < n:
        held = [_run(good[at:, k]) for k in range(worth.shape[1])]
        longest = max(held)
        choice = max(
            (k for k in range(len(held)) if held[k] == longest),
            key=lambda k: (drafted[k] == prefer, float(worth[at : at + longest, k].sum())),
        )
        starts.append((at, choice))
        at += longest
    back = [(max(at - _run(good[:at, k][::-1]), 0) if at else 0, k) for at, k in starts]
    for i in range(1, len(back)):  # a choice that its successor holds out is passed over
        back[i] = (max(back[i][0], back[i - 1][0]), back[i][1])
    return _ranges(starts, n, drafted), _ranges(back, n, drafted)


def _run(good: NDArray[np.bool_]) -> int:
    """How many leading places are true."""
    return len(good) if good.all() else int(np.argmin(good))


def _ranges(starts: Sequence[tuple[int, int]], n: int, drafted: Sequence[int]) -> Ranges:
    ends = [at for at, _ in starts[1:]] + [n]
    return tuple((at + 1, end, drafted[k]) for (at, k), end in zip(starts, ends, strict=True) if end > at)


def said(ranges: Ranges) -> str:
    """Ranges for people."""
    if len(ranges) == 1:
        return "off" if not ranges[0][2] else f"{ranges[0][2] + 1} draft tokens"
    spans = (("off" if not k else f"{k + 1}") + (f" at {a}" if a == b else f" from {a} to {b}") for a, b, k in ranges)
    return ", ".join(spans)


def policy_json(found: Sequence[Policy], engine: str) -> dict[str, Any]:
    """The document of schema specsim.policy/1. Ranges are [first batch, last batch, drafted tokens]."""
    return {
        "schema": SCHEMA,
        "engine": engine,
        "by_context": [
            {
                "context": p.context,
                "hysteresis": p.hysteresis,
                "rising": [list(r) for r in p.rising],
                "falling": [list(r) for r in p.falling],
            }
            for p in found
        ],
    }
