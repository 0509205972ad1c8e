"""One decode step and one speculative cycle of a scenario, in seconds; acceptance never enters here.

    cycle = draft steps + verify + draft extend + host

A pass runs in a graph of the padded batch where the engine captured one, and eagerly elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specsim.forward import Cost, Pass, build, cost
from specsim.machine import ZERO, Machine, lift
from specsim.models import DraftShape, Model
from specsim.ops import Load

if TYPE_CHECKING:
    from specsim.scenarios import Scenario

Array = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Cycle:
    """Costs of the phases; `draft`, `verify` and `extend` are None without speculation. Seconds, shapes broadcast."""

    def __repr__(self) -> str:
        cycle = "" if self.verify is None else f", cycle {_ms(self.cycle_s)}"
        return f"<Cycle: decode {_ms(self.decode_s)}{cycle}>"

    decode: Cost
    decode_host: Array
    draft: Cost | None = None
    verify: Cost | None = None
    extend: Cost | None = None
    cycle_host: Array | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """Operator classes that the phases priced."""
        phases = (self.decode, self.verify, self.draft, self.extend)
        return tuple(dict.fromkeys(name for c in phases if c is not None for name in c.classes))

    @cached_property
    def decode_s(self) -> Array:
        """Seconds of one plain decode step, the host time that the GPU waits for included."""
        return np.asarray(self.decode.total + self.decode_host)

    @cached_property
    def cycle_s(self) -> Array:
        """Seconds of one speculative cycle. Raises ValueError without speculation."""
        if self.verify is None or self.cycle_host is None:
            raise ValueError("no speculation in this scenario")
        parts = [c.total for c in (self.draft, self.verify, self.extend) if c is not None]
        return np.asarray(sum(parts, self.cycle_host))


def _ms(seconds: Array) -> str:
    low, high = 1e3 * np.min(seconds), 1e3 * np.max(seconds)
    return f"{low:.3g} ms" if low == high else f"{low:.3g} to {high:.3g} ms, shape {seconds.shape}"


def evaluate(scenario: Scenario, machine: Machine) -> Cycle:
    """Costs of a scenario on a machine, in seconds. Every array field of the scenario broadcasts; samples lead.

    The host's own work of a step or cycle is hidden as far as the GPU runs graphs meanwhile; what is left is host time.
    Some remains in any case: a gap under overlapped scheduling; without it a step's own work, and in a cycle what lies
    between its results and the next draft.
    """
    s = scenario
    ndim = s.ndim

    def term(name: str) -> Array:
        return lift(machine.host_s(name, s.parallel.tp), ndim)

    decode = target_pass(s, machine, np.ones(()), "decode")
    each = term("sequence_cpu") * np.ceil(s.batch / s.parallel.dp)
    own = term("decode_cpu") + each
    overlap = not s.options.get("disable_overlap")
    decode_host = np.maximum(term("decode_host") if overlap else own, own - _graph_time(decode))
    if s.method == "none":
        return Cycle(decode, decode_host)
    verify = target_pass(s, machine, s.draft_tokens, "verify")
    draft, extend = draft_passes(s, machine, _graph_time(verify))
    cpu = term("cycle_cpu") + each + (term("rank_cpu") if s.parallel.tp > 1 else 0.0)
    cpu = cpu + (term("tree_cpu") if s.topk > 1 else 0.0)
    cycle_host = np.maximum(term("cycle_host" if overlap else "serial_cpu"), cpu - _graph_time(draft, verify))
    if s.method == "ngram":  # the match needs the tokens of the cycle before, and the verify needs the match
        cycle_host = cycle_host + term("ngram_host") + term("ngram_sequence") * s.batch
        verify = _waiting(verify, term("ngram_verify"), machine.terms_source)
    return Cycle(decode, decode_host, draft, verify, extend, cycle_host)


def _graph_time(*phases: Cost | None) -> Array:
    """Seconds of the phases that run in graphs, during which the host works ahead."""
    return sum((c.graph * c.total for c in phases if c is not None), ZERO)


def _waiting(c: Cost, seconds: Array, source: str) -> Cost:
    """A pass inside which the GPU waits so long for the host."""
    return replace(
        c, seconds={**c.seconds, "host": seconds}, calls={**c.calls, "host": 1.0}, bytes={**c.bytes, "host": ZERO},
        source={**c.source, "host": source},
    )  # fmt: skip


def target_pass(s: Scenario, machine: Machine, tokens: Array, phase: str) -> Cost:
    """One pass of the target over `tokens` rows a sequence: decode with 1, verify with d, prefill with more."""
    return _pass(s, s.model, machine, tokens, phase)


def draft_passes(s: Scenario, machine: Machine, ahead: Array | float = 0.0) -> tuple[Cost | None, Cost | None]:
    """The draft steps of a cycle and its draft extend.

    Chains and trees: num_steps - 1 steps of batch x topk rows (the first drafted token comes from the extend of the
    cycle before), then one extend over the d verified rows, launched while the verify's graph runs for `ahead` seconds.
    A block drafter emits all in one pass over its block. N-gram drafting runs on the host:
    `evaluate` adds its time.
    """
    if s.draft is None:
        return None, None
    shape = s.draft.draft or DraftShape("model")
    if shape.block:
        return _pass(s, s.draft, machine, np.asarray(float(shape.block)), "draft", fc=True), None
    every_step = shape.kind in ("eagle", "mtp")  # EAGLE-3 joins the target's hidden states only in the extend
    step = _pass(s, s.draft, machine, np.asarray(float(s.topk)), "draft", fc=every_step)
    each = machine.terms["draft_step"] + (machine.terms["tree_step"] if s.topk > 1 else 0.0)
    step = replace(step, seconds={**step.seconds, "small_kernels": step.seconds["small_kernels"] + lift(each, s.ndim)})
    extend = _pass(s, s.draft, machine, s.draft_tokens, "extend", fc=True, ahead=ahead)
    return scaled(step, np.maximum(s.num_steps - 1.0, 0.0)), extend


def scaled(c: Cost, n: Array) -> Cost:
    """n passes of equal cost."""
    seconds = {k: v * n for k, v in c.seconds.items()}
    top = float(np.max(n, initial=0.0))
    calls, moved = {k: v * top for k, v in c.calls.items()}, {k: v * n for k, v in c.bytes.items()}
    return replace(c, seconds=seconds, calls=calls, bytes=moved)


def _pass(
    s: Scenario,
    model: Model,
    machine: Machine,
    tokens: Array,
    phase: str,
    *,
    fc: bool = False,
    ahead: Array | float = 0.0,
) -> Cost:
    """One pass of `model` over `tokens` rows a sequence: in a graph for the batches that have one, eagerly for others."""
    routing = s.routing or machine.routing
    share = np.ceil(s.batch / s.parallel.dp) * s.parallel.dp if s.parallel.dp > 1 else s.batch

    def run(graph: bool, padded: Array | None) -> Cost:
        # [()] makes a number of an array without axes, with which arithmetic takes a tenth of the time
        load = Load(
            share[()], tokens[()], s.context[()], None if padded is None else padded[()], routing, machine.processors
        )
        last, block, by = phase == "extend", s.tree_block(phase), s.in_blocks
        p: Pass = build(model, s.parallel, s.engine, graph, fc=fc, last_rows=last, tree_block=block, in_blocks=by)
        verify = phase in ("verify", "extend")
        return cost(p, load, machine, s.engine, s.network, graph=graph, verify=verify, target=s.model, ahead=ahead)

    if not s.graph_phases.get(phase, True):
        return run(False, None)
    padded, above = _padded(s, share, phase)
    eager = np.count_nonzero(above)
    if eager == above.size:
        return run(False, None)
    graph = run(True, padded)
    return _chosen(above, run(False, None), graph) if eager else graph


def _padded(s: Scenario, share: Array, phase: str) -> tuple[Array, NDArray[np.bool_]]:
    """(batch that the graph of a phase really runs, where the batch is above every graph).

    Captured sizes depend on the rows a sequence has in the pass where an engine captures numbers of tokens (vLLM).
    """
    rows = s.draft_tokens.reshape(-1) if s.draft_tokens.size == 1 else np.unique(s.draft_tokens)
    over = s.batch > (s.running_cap(phase) or np.inf)
    beyond = np.count_nonzero(over)
    sides = [side for side, n in ((False, over.size - beyond), (True, beyond)) if n]
    sizes = {(r, side): s.captured(phase, r, beyond=side) for r in map(int, rows.tolist()) for side in sides}
    captured, *others = set(sizes.values())
    if not others:
        return s.engine.padded_batch(share, captured).astype(np.float64), np.asarray(share > max(captured, default=0))
    lengths = (
        s.draft_tokens if any(len({c for (_, at), c in sizes.items() if at == side}) > 1 for side in sides) else None
    )
    shape = share.shape if lengths is None else np.broadcast_shapes(share.shape, lengths.shape)
    padded, above = np.empty(shape), np.empty(shape, dtype=bool)
    batch, over = np.broadcast_to(share, shape), np.broadcast_to(over, shape)
    for (r, side), captured in sizes.items():
        here = over == side if lengths is None else (over == side) & (np.broadcast_to(lengths, shape) == r)
        padded[here] = s.engine.padded_batch(batch[here], captured)
        above[here] = batch[here] > max(captured, default=0)
    return padded, above


def _chosen(where: NDArray[np.bool_], a: Cost, b: Cost) -> Cost:
    """Cost a where `where`, cost b elsewhere."""
    keys = dict.fromkeys([*a.seconds, *b.seconds])
    zero = np.zeros(())
    return Cost(
        {k: np.where(where, a.seconds.get(k, zero), b.seconds.get(k, zero)) for k in keys},
        {k: max(a.calls.get(k, 0.0), b.calls.get(k, 0.0)) for k in keys},
        {k: np.where(where, a.bytes.get(k, zero), b.bytes.get(k, zero)) for k in keys},
        {**a.source, **b.source},
        tuple(dict.fromkeys([*a.classes, *b.classes])),
        np.where(where, a.graph, b.graph),
    )
