"""What a drafter must reach, by draft length and load: to break even, for a speedup, and for the targets of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specsim.acceptance import chain_length, rate_for_length
from specsim.choice import Choice
from specsim.cycle import evaluate
from specsim.machine import Machine
from specsim.progress import track
from specsim.scenarios import Scenario
from specsim.steady import Server
from specsim.steady_servers import server_of
from specsim.targets import GRID, Targets

Array = NDArray[np.float64]
LOADS = (0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Target:
    """What a drafter must reach at one draft length and load. Accept rates; None: no rate is enough, 0: none is needed.

    `batch`: sequences that decode together at this load; `load`: share of the planned rate.
    """

    draft_tokens: int
    load: float
    batch: int
    breakeven_length: float
    breakeven_rate: float | None
    speedup_rate: float | None
    target_rate: float | None


def targets_of_drafters(
    best: Choice,
    drafting: Scenario,
    machine: Machine,
    rate: float,
    targets: Targets,
    draft_tokens: Sequence[int],
    speedup: float,
) -> list[Target]:
    """Accept rates for break-even, `speedup` and the targets, by draft length and load, on the replicas of `best`.

    Break-even and speedup are those of `specsim predict` at the batch of that load; the target's is the lowest constant
    rate from which on the closed form meets all targets. Empty when `drafting` does not speculate, or drafts trees, and for
    answers of one token, which prefill gives.
    """
    if drafting.method == "none" or drafting.topk > 1 or best.server is None or best.server.requests.output_tokens <= 1:
        return []
    requests = best.server.requests
    each = rate / best.replicas if best.replicas else best.capacity / 2
    running = [max(1, round(float(best.server.at(each * load).running[0]))) for load in LOADS]
    out = []
    for d in track([d for d in draft_tokens if d > 1], "targets of drafters"):
        s = replace(drafting, draft_tokens=np.asarray(float(d)), num_steps=np.asarray(d - 1.0))
        server = server_of(s, machine, requests)
        at = replace(s, batch=np.asarray(running, dtype=float), context=np.asarray(requests.context))
        c = evaluate(at, machine)
        needed = np.broadcast_to(c.cycle_s / c.decode_s, (len(LOADS),))
        breakeven, faster = np.asarray(rate_for_length(np.stack([needed, speedup * needed]), d - 1))
        for i, load in enumerate(LOADS):
            out.append(
                Target(
                    d,
                    load,
                    running[i],
                    float(needed[i]),
                    _reached(breakeven[i]),
                    _reached(faster[i]),
                    _rate_for_targets(server, each * load, targets, d),
                )
            )
    return out


def _rate_for_targets(server: Server, rate: float, targets: Targets, d: int) -> float | None:
    """The accept rate from which on every chain of d meets the targets at a rate of requests; 0: none is needed."""

    def miss(short: Array) -> Array:
        """By how far accept rates are short of 1."""
        if targets.percentile is None:
            return targets.miss(server.at(rate, np.asarray(chain_length(1 - short, d - 1))))
        accepting = (server.accepting((1 - x) ** np.arange(1, d)) for x in short)
        return np.asarray([targets.miss(targets.seen(s, rate))[0] for s in accepting])

    at_best, at_none = miss(np.asarray([0.0, 1.0])) <= 1
    if not at_best:
        return None
    reach = targets.reach(miss)
    if at_none and reach == 1 - 1 / GRID**2:
        return 0.0
    return 1 - reach


def _reached(rate: float) -> float | None:
    return None if math.isnan(rate) else float(rate)
