"""One decode step and one speculative cycle of a scenario, in seconds; acceptance never enters here.

    cycle = draft steps + verify + draft extend + host

A pass runs in a graph of the padded batch where the engine captured one, and eagerly elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specsim.forward import Cost, Network, Pass, build, cost
from specsim.machine import Machine, lift
from specsim.models import Model
from specsim.ops import Load
from specsim.routing import UNIFORM, with_overlap

if TYPE_CHECKING:
    from specsim.scenarios import Scenario

Array = NDArray[np.float64]
PHASES = ("decode", "draft", "verify", "extend")


@dataclass(frozen=True)
class Cycle:
    """Costs of the phases; `draft`, `verify` and `extend` are None without speculation. Seconds, shapes broadcast."""

    decode: Cost
    decode_host: Array
    draft: Cost | None = None
    verify: Cost | None = None
    extend: Cost | None = None
    cycle_host: Array | None = None

    @property
    def decode_s(self) -> Array:
        """Seconds of one plain decode step, the host time that the GPU waits for included."""
        return np.asarray(self.decode.total + self.decode_host)

    @property
    def cycle_s(self) -> Array:
        """Seconds of one speculative cycle. Raises ValueError without speculation."""
        if self.verify is None or self.cycle_host is None:
            raise ValueError("no speculation in this scenario")
        parts = [c.total for c in (self.draft, self.verify, self.extend) if c is not None]
        return np.asarray(sum(parts, self.cycle_host))


def evaluate(scenario: Scenario, machine: Machine) -> Cycle:
    """Costs of a scenario on a machine. Every array field of the scenario broadcasts; samples lead."""
    s = scenario
    ndim = np.broadcast(s.batch, s.context, s.draft_tokens).ndim
    decode = target_pass(s, machine, np.ones(()), "decode")
    decode_host = lift(machine.terms["decode_host_s"], ndim)
    if s.method == "none":
        return Cycle(decode, decode_host)
    verify = target_pass(s, machine, s.draft_tokens, "verify")
    draft, extend = draft_passes(s, machine)
    return Cycle(decode, decode_host, draft, verify, extend, lift(machine.terms["cycle_host_s"], ndim))


def target_pass(s: Scenario, machine: Machine, tokens: Array, phase: str) -> Cost:
    """One pass of the target over `tokens` rows a sequence: decode with 1, verify with d, prefill with more."""
    return _pass(s, s.model, machine, tokens, phase, fc=False)


def draft_passes(s: Scenario, machine: Machine) -> tuple[Cost | None, Cost | None]:
    """The draft steps of a cycle and its draft extend.

    Chains and trees: num_steps - 1 steps of batch x topk rows (the first drafted token comes from the extend of the
    cycle before), then one extend over the d verified rows. A block drafter emits all in one pass over its block.
    N-gram drafting runs on the host.
    """
    if s.draft is None or s.draft.draft is None:
        return None, None
    shape = s.draft.draft
    if shape.block:
        return _pass(s, s.draft, machine, np.asarray(float(shape.block)), "draft", fc=True), None
    every_step = shape.kind in ("eagle", "mtp")  # EAGLE-3 joins the target's hidden states only in the extend
    step = _pass(s, s.draft, machine, np.asarray(float(s.topk)), "draft", fc=every_step)
    extend = _pass(s, s.draft, machine, s.draft_tokens, "extend", fc=True)
    return scaled(step, np.maximum(s.num_steps - 1.0, 0.0)), extend


def scaled(c: Cost, n: Array) -> Cost:
    """n passes of equal cost."""
    seconds = {k: v * n for k, v in c.seconds.items()}
    top = float(np.max(n, initial=0.0))
    return Cost(seconds, {k: v * top for k, v in c.calls.items()}, {k: v * n for k, v in c.bytes.items()}, c.source)


def _pass(s: Scenario, model: Model, machine: Machine, tokens: Array, phase: str, *, fc: bool) -> Cost:
    network = s.network
    routing = with_overlap(UNIFORM, machine.experts_overlap) if s.routing is None else s.routing
    share = np.ceil(s.batch / s.parallel.dp) * s.parallel.dp if s.parallel.dp > 1 else s.batch
    in_graph = s.graph_phases.get(phase, True)
    captured = s.captured.get(phase, ())
    if in_graph and captured:
        padded = s.engine.padded_batch(share, captured).astype(np.float64)
        graph = _cost(
            s, model, machine, Load(share, tokens, s.context, padded, routing), network, phase, fc=fc, graph=True
        )
        above = np.asarray(share > max(captured))
        if not np.any(above):
            return graph
        eager = _cost(
            s, model, machine, Load(share, tokens, s.context, None, routing), network, phase, fc=fc, graph=False
        )
        return eager if np.all(above) else _chosen(above, eager, graph)
    return _cost(
        s, model, machine, Load(share, tokens, s.context, None, routing), network, phase, fc=fc, graph=in_graph
    )


def _cost(
    s: Scenario, model: Model, machine: Machine, load: Load, network: Network, phase: str, *, fc: bool, graph: bool
) -> Cost:
    p: Pass = build(model, s.parallel, s.engine, graph, fc=fc, last_rows=phase == "extend")
    return cost(p, load, machine, s.engine, network, graph=graph, verify=phase in ("verify", "extend"))


def _chosen(where: NDArray[np.bool_], a: Cost, b: Cost) -> Cost:
    """Cost a where `where`, cost b elsewhere."""
    keys = dict.fromkeys([*a.seconds, *b.seconds])
    zero = np.zeros(())
    return Cost(
        {k: np.where(where, a.seconds.get(k, zero), b.seconds.get(k, zero)) for k in keys},
        {k: max(a.calls.get(k, 0.0), b.calls.get(k, 0.0)) for k in keys},
        {k: np.where(where, a.bytes.get(k, zero), b.bytes.get(k, zero)) for k in keys},
        {**a.source, **b.source},
    )
