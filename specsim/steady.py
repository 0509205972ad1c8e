"""The steady state of one server under a Poisson load, in closed form (docs/planning.md has the derivation).

n running requests of T decode steps each leave at the rate mu(n) = n (1 - rho) / (T S(n) + Q P), where S(n) is the time of a
step of n sequences, rho = rate x P the share of time that prefill takes, and Q the prompts that queued behind one's own and are
prefilled before its first step: what a request leaves behind in an M/D/1 queue, rho + rho^2 / 2 (1 - rho). A server whose speed depends on how
many share it, and which they share equally, has n requests with a probability proportional to

    rate^n / (mu(1) mu(2) ... mu(n))        mu(n) = mu(B) beyond the limit B of running requests: those wait

whatever the distribution of their lengths (Cohen, Acta Informatica 12, 1979). The mean of n over the rate is the time in
decode: Little's law. Nothing is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim.errors import InputError
from specsim.machine import Machine
from specsim.scenarios import Scenario
from specsim.simulation_costs import (
    Ranges,
    base_seconds,
    cache_limits,
    default_chunk,
    lanes,
    longest,
    prefill_seconds,
    rows_of,
    running_limit,
    step_seconds,
)

Array = NDArray[np.float64]
MOST_RUNNING = 2048  # running requests that are looked at; engines admit fewer in all but name


WAIT = 1.5  # steps from an arrival to its prefill while the server decodes: the rest of the running one, and the next (overlap)


@dataclass(frozen=True)
class Requests:
    """What arrives: mean tokens of a request's prompt and answer (each at least 1)."""

    input_tokens: float
    output_tokens: float

    @property
    def context(self) -> float:
        """Cached tokens of a running request, averaged over its life."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class Point:
    """A server at a rate; every field has the shape of the rates asked for. Infinite where the load is not served.

    running: requests that decode, mean; waiting: for a place among them; tpot_s: per output token after the first;
    ttft_s: to the first token; busy: share of time with work.
    """

    rate: Array
    running: Array
    waiting: Array
    tpot_s: Array
    ttft_s: Array
    busy: Array


@dataclass(frozen=True)
class Server:
    """One replica. step[n - 1]: seconds of a decode step or cycle of n sequences, which gives each accept_length[n - 1] tokens
    (or one number for all n); prefill[g - 1]: seconds a request when g prompts are prefilled together, in `chunks` steps.
    saved[n - 1]: seconds that a prefill step saves by riding in a decode step of n sequences, where the engine mixes them
    (vLLM)."""

    requests: Requests
    step: Array
    prefill: Array
    accept_length: Array | float
    gpus: int
    chunks: float = 1.0
    saved: Array | None = None

    @property
    def most_running(self) -> int:
        return len(self.step)

    def capacity(self, accept_length: ArrayLike | None = None) -> Array:
        """Requests a second at most, by accept length: every place taken, and prompts prefilled as places fall free."""
        steps = self._steps(accept_length)[..., -1]
        most = float(self.most_running)
        prefill = self._prefill_share(self._group(most / steps), np.asarray(most))
        return np.asarray(1 / (steps * self.step[-1] / most + prefill))

    def _steps(self, accept_length: ArrayLike | None) -> Array:
        """Decode steps that a request would take part in at each batch, (accept lengths, 1) for those given or (batch,) for the
        server's own; under overlap it stays for one step after its last token."""
        given = None if accept_length is None else np.asarray(accept_length, dtype=float)[..., None]
        length = np.broadcast_to(self.accept_length, self.step.shape) if given is None else given
        return np.asarray((self.requests.output_tokens - 1) / length + 1)

    def _group(self, a_step: Array) -> Array:
        """Prompts prefilled together when so many come in a step: an arrival waits for one and a half (overlap)."""
        return np.asarray(np.clip(1 + WAIT * a_step, 1.0, len(self.prefill)))

    def _prefill_share(self, group: Array, running: Array) -> Array:
        """Seconds that a prompt keeps decode waiting, in groups of `group` beside `running` sequences."""
        alone = np.interp(group, np.arange(1, len(self.prefill) + 1), self.prefill)
        if self.saved is None:
            return np.asarray(alone)
        saved = np.interp(running, np.arange(1, len(self.saved) + 1), self.saved)
        return np.asarray(np.maximum(alone - self.chunks * saved, 0.1 * alone))

    def at(self, rate: ArrayLike, accept_length: ArrayLike | None = None) -> Point:
        """The steady state at arrival rates (requests a second) and accept lengths, which broadcast to one axis."""
        steps = np.atleast_2d(self._steps(accept_length))
        r = np.atleast_1d(np.asarray(rate, dtype=float))
        r = np.broadcast_to(r, np.broadcast_shapes(r.shape, steps.shape[:1]))
        n = np.arange(1, len(self.step) + 1, dtype=float)
        group, running = np.ones_like(r), np.ones_like(r)
        for _ in range(4):  # how many prompts wait together depends on the step they wait for
            work = r * self._prefill_share(group, running)
            stable = work < 1
            behind = np.where(stable, work + work**2 / (2 * np.maximum(1 - work, 1e-9)), 0.0)  # prompts after one's own
            slowed = np.where(stable, r / np.where(stable, 1 - work, 1.0), 0.0)
            each = steps * self.step + (behind * work / np.maximum(r, 1e-300))[:, None]  # seconds of its own decode
            tail = slowed * each[:, -1] / n[-1]
            stable &= tail < 1
            slowed, tail = np.where(stable, slowed, 1e-12), np.where(stable, tail, 0.0)
            log = np.cumsum(np.log(slowed[:, None] * each / n), axis=1)
            top = np.maximum(log.max(axis=1, initial=0.0), 0.0)
            weight, empty = np.exp(log - top[:, None]), np.exp(-top)
            beyond = weight[:, -1] * tail / (1 - tail)
            total = empty + weight.sum(axis=1) + beyond
            running = (weight @ n + beyond * n[-1]) / total
            waiting = weight[:, -1] * tail / (1 - tail) ** 2 / total
            decoding = 1 - empty / total
            step = (weight @ self.step + beyond * self.step[-1]) / np.maximum(total - empty, 1e-300)
            group = self._group(np.where(stable, r * step * decoding, n[-1] / steps[:, -1]))
            running = np.where(stable, running, n[-1])
        own = self.prefill[0] * np.ones_like(r)
        if self.saved is not None:  # the prompt's steps decode as well
            own = own + self.chunks * np.maximum(step * decoding - np.interp(running, n, self.saved), 0.0)
        queue = work * own / (2 * np.maximum(1 - work, 1e-9))
        others = np.minimum(group - 1 + r * own * work, len(self.prefill) - 1)  # in one's own prefill step
        ttft = waiting / r + WAIT * step * decoding + queue + (1 + others / 2) * own
        gained = max(self.requests.output_tokens - 1, 0.0)
        own_steps = ((weight * steps).sum(axis=1) + beyond * steps[:, -1]) / np.maximum(total - empty, 1e-300)
        tpot = running / r * (1 - 1 / own_steps) / gained if gained else np.zeros_like(r)

        def served(values: Array, otherwise: float = math.inf) -> Array:
            return np.where(stable, values, otherwise)

        busy = served(1 - (1 - decoding) * (1 - work), 1.0)
        return Point(r, served(running), served(waiting), served(tpot), served(ttft), busy)


def server_of(s: Scenario, machine: Machine, requests: Requests, ranges: Ranges = ()) -> Server:
    """The server of a scenario (its batch and context play no part). Its accept length is the scenario's, 1 without.

    `ranges`: draft lengths by batch, which replace the scenario's. Raises InputError when the weights leave no room for the
    KV cache of one request.
    """
    s = longest(s, ranges)
    tokens = float(rows_of(s))
    kv, running = cache_limits(s, running_limit(s))
    held = int(kv / (requests.context + tokens))
    chunk = default_chunk(s)
    mixed = s.engine.name != "sglang"
    if mixed:
        running = min(running, max(1, int(chunk / tokens)))
    most = min(running, held, MOST_RUNNING)
    if most < 1:
        raise InputError(
            f"the KV cache holds {kv:,} tokens, a request of {requests.input_tokens + requests.output_tokens:,.0f} does not fit",
            where=f"{s.profile.name}, TP {s.parallel.tp}",
            mend="raise --tp, or take another --hardware",
        )
    cut = lanes(s, most, ranges)
    step, gained = np.empty(most), np.ones(most)
    for one, batches in cut:
        at = batches.astype(np.int64) - 1
        step[at] = step_seconds(one, machine, batches, np.asarray(requests.context))
        if one.accept_length is not None:
            gained[at] = one.accept_length.reshape(-1)[0]
    prompt = max(requests.input_tokens, 1.0)
    chunks = max(1, math.ceil(prompt / chunk))
    together = np.arange(1.0, max(1, int(chunk / prompt)) + 1)
    seconds = chunks * prefill_seconds(s, machine, together * prompt / chunks, np.asarray((prompt + 1) / 2)) / together
    saved = None
    if mixed:
        wider = prefill_seconds(
            s, machine, np.asarray([1.0, 1.25]) * prompt / chunks, np.asarray((prompt + 1) / 2)
        ).reshape(-1)
        a_row = (wider[1] - wider[0]) / (0.25 * prompt / chunks)
        saved = np.empty(most)
        for one, batches in cut:
            at = batches.astype(np.int64) - 1
            saved[at] = base_seconds(one, machine, batches) - batches * rows_of(one) * a_row
    return Server(requests, step, seconds.reshape(-1), gained, s.parallel.tp, float(chunks), saved)
