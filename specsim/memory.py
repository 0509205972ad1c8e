"""What a rank's GPU memory holds: its slice of target and draft weights, and the KV cache of the running sequences."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim.errors import InputError
from specsim.forward import STATE_BYTES, Parallel, weight_bytes
from specsim.machine import ZERO
from specsim.models import Model
from specsim.scenarios import LIMITS, Scenario, check_heads

Array = NDArray[np.float64]
RESERVE = 0.08  # share of a GPU that graphs, activations, the CUDA context and fragmentation take; assumed


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. share: of it that weights and cache may take."""

    weights: float
    kv: float
    capacity: float
    share: float = 1 - RESERVE

    @property
    def needed(self) -> float:
        return self.weights + self.kv

    @property
    def usable(self) -> float:
        return self.capacity * self.share

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable


def memory(
    s: Scenario, *, batch: float | None = None, context: float | None = None, parallel: Parallel | None = None
) -> Memory:
    """Bytes a rank needs for the scenario's largest batch and context, or for others."""
    parallel = parallel or s.parallel
    models = [s.model] if s.draft is None else [s.model, s.draft]
    weights = sum(rank_weights(m, parallel) for m in models)
    tokens = float(((s.context if context is None else context) + s.draft_tokens).max())
    sequences = math.ceil((s.batch.max() if batch is None else batch) / parallel.dp)
    kv = sequences * sum(float(rank_kv(m, parallel, tokens)) + rank_state(m, parallel) for m in models)
    return Memory(weights, kv, s.profile.gpu.memory_gb * 1e9, memory_share(s))


def memory_share(s: Scenario) -> float:
    """Share of a GPU that weights and cache may take: what the launch line says, or all but RESERVE."""
    return float(s.options.get("mem_fraction") or 1 - RESERVE)


def would_fit(s: Scenario) -> list[str]:
    """What to change, one thing at a time, for a scenario to fit that does not: a smaller batch or else a shorter context,
    more ranks, or more of the same GPUs than the box has. Empty where none of these helps."""
    found: list[str] = []
    one = memory(s, batch=1)
    if one.fits:  # as many sequences as have room on a rank
        found.append(f"batch {int((one.usable - one.weights) / one.kv) * s.parallel.dp:,}")
    else:
        contexts = range(int(s.context.max()))
        if count := bisect_left(contexts, True, key=lambda n: not memory(s, context=n).fits):
            found.append(f"a context of {contexts[count - 1]:,}")
    ranks = 2 * s.parallel.tp
    while ranks <= LIMITS["tp"]:
        parallel = replace(s.parallel, tp=ranks)
        if _divides(s, parallel) and memory(s, parallel=parallel).fits:
            return [*found, f"TP {ranks}" + ("" if ranks <= s.profile.gpus else f" on {ranks} such GPUs")]
        ranks *= 2
    return found


def _divides(s: Scenario, parallel: Parallel) -> bool:
    try:
        for model in (s.model, s.draft):
            if model is not None:
                check_heads(model, parallel)
    except InputError:
        return False
    return True


@lru_cache(maxsize=256)
def rank_weights(model: Model, parallel: Parallel) -> float:
    """Bytes of a model's weights on one rank."""
    tp = parallel.tp
    total = 0.0
    for layer, n in model.layers:
        dense = sum(weight_bytes(p, parallel.attention) for p in layer.mixer) + sum(
            weight_bytes(p, tp) for p in layer.ffn
        )
        if layer.experts is not None:
            e = layer.experts
            dense += sum(weight_bytes(p, tp) for p in e.shared) + (weight_bytes(e.router, 1) if e.router else 0.0)
            dense += e.count * e.bytes_each / tp
        total += n * (dense + 2.0 * (layer.norm_parameters + layer.other_parameters))
    vocabulary = model.vocab * model.hidden if model.embedding_parameters is None else model.embedding_parameters
    total += vocabulary * model.embedding_format.bytes / tp
    if not model.tied:
        total += weight_bytes(model.head, tp)
    total += sum(weight_bytes(p, 1) for p in model.draft_projections())
    return total + 2.0 * model.final_norm_parameters + model.other_bytes / tp


def rank_kv(model: Model, parallel: Parallel, tokens: ArrayLike) -> Array:
    """KV bytes that a sequence of `tokens` tokens takes on one rank: layers with a window keep that many at most.

    Broadcasts over tokens.
    """
    kept: Array = np.asarray(tokens, dtype=np.float64)[()]
    bytes_ = ZERO
    for window, each in _kv_by_window(model, parallel):
        bytes_ = bytes_ + each * (kept if window is None else np.minimum(kept, window))
    return bytes_


def rank_kv_per_token(model: Model, parallel: Parallel) -> float:
    """KV bytes that one token takes on one rank while it is in every layer's window."""
    return sum(each for _, each in _kv_by_window(model, parallel))


@lru_cache(maxsize=256)
def _kv_by_window(model: Model, parallel: Parallel) -> tuple[tuple[int | None, float], ...]:
    """(tokens that layers keep at most, KV bytes one token takes in all of these on one rank)."""
    found: dict[int | None, float] = {}
    for layer, n in model.layers:
        if layer.attention is not None:
            a = layer.attention
            share = 1.0 if a.kind == "mla" or not a.kv_heads else max(1.0, a.kv_heads / parallel.attention) / a.kv_heads
            kept = a.window if a.compress == 1 else None
            found[kept] = found.get(kept, 0.0) + n * a.kv_bytes(model.kv_format.bytes, share)
    return tuple(found.items())


@lru_cache(maxsize=256)
def rank_state(model: Model, parallel: Parallel) -> float:
    """Bytes of recurrent state one sequence takes on one rank."""
    values = sum(n * layer.attention.state_values for layer, n in model.layers if layer.attention)
    return values / parallel.attention * STATE_BYTES
