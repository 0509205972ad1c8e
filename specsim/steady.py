"""The steady state of one server under a Poisson load, in closed form (docs/planning.md has the derivation).

Decoding stops while prompts are prefilled. Prefill takes rho = rate x P of the time, and by the clock that runs only while the
server decodes, requests come in bunches: those whose prompts were prefilled without pause. Bunches are the customers of M/D/1
busy periods; here they are geometric with the same mean and variance, q / (1 - q) = Q / (1 - rho) beyond the first, where
Q = rho + rho^2 / 2 (1 - rho) is what one prompt leaves behind. Requests share a decode step equally: n of them leave at
g(n) = n / (T S(n)), where S(n) is the time of a step of n sequences and T the steps that each needs. Then

    p(n) = b / g(n) x A(n)      A(n + 1) = A(n) (q + b / g(n))      b = rate (1 - q) / (1 - rho)

holds exactly for exponential work (level crossing). Without prefill (q = 0) it is Cohen's processor sharing, which holds whatever
the distribution of lengths (Acta Informatica 12, 1979). With it lengths matter: requests of a bunch whose answers are equally
long stay together until they leave, and the variance that bunches add to the number running is twice that of exponential
answers (E[min] / E of two answers: 1 and 1/2). So bunches count by twice that share. Beyond the limit of running requests they
wait, by Pollaczek-Khinchine. Little's law gives times from numbers. Nothing is fitted.
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
WIDTHS = 64  # numbers of rows at which a mixed step is worked out
MOST_RUNNING = 2048  # running requests that are looked at; engines admit fewer in all but name


ROUNDS, CLOSE = 100, 1e-5  # of the fixed points
WAIT = 1.5  # steps from an arrival to its prefill while the server decodes: the rest of the running one, and the next (overlap)


@dataclass(frozen=True)
class Requests:
    """What arrives: mean tokens of a request's prompt and answer (each at least 1), and how they vary: variance over the
    square of the mean."""

    input_tokens: float
    output_tokens: float
    input_cv2: float = 0.0
    output_cv2: float = 0.0

    @property
    def context(self) -> float:
        """Cached tokens of a running request, averaged over its life."""
        return self.input_tokens + self.output_tokens / 2

    @property
    def alike(self) -> float:
        """The shorter of two answers over the mean answer: 1 / (1 + coefficient of variation), which is exact for answers of one
        length (1) and for exponential ones (1/2), and 5 % from it for uniform ones (2/3)."""
        return 1 / (1 + math.sqrt(self.output_cv2))


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
    fill: seconds of a prefill step that is full, where prompts do not share one as a rule.
    mixing: what a prefill step saves by riding in a decode step, where the engine mixes them (vLLM)."""

    requests: Requests
    step: Array
    prefill: Array
    accept_length: Array | float
    gpus: int
    chunks: float = 1.0
    fill: float = 0.0
    mixing: Mixing | None = None

    @property
    def most_running(self) -> int:
        return len(self.step)

    def capacity(self, accept_length: ArrayLike | None = None) -> Array:
        """Requests a second at most, by accept length: every place taken, and prompts prefilled as places fall free."""
        steps = self._steps(accept_length)[..., -1]
        most = float(self.most_running)
        group = np.clip(1 + WAIT * most / steps, 1.0, len(self.prefill))
        prefill = self._alone(group) - self._saved(np.asarray(most), group) / group
        return np.asarray(1 / (steps * self.step[-1] / most + prefill))

    def _steps(self, accept_length: ArrayLike | None) -> Array:
        """Decode steps that a request would take part in at each batch, (accept lengths, 1) for those given or (batch,) for the
        server's own; under overlap it stays for one step after its last token."""
        given = None if accept_length is None else np.asarray(accept_length, dtype=float)[..., None]
        length = np.broadcast_to(self.accept_length, self.step.shape) if given is None else given
        return np.asarray((self.requests.output_tokens - 1) / length + 1)

    def _alone(self, group: Array) -> Array:
        """Seconds a prompt that `group` prompts take which are prefilled together."""
        return np.asarray(np.interp(group, np.arange(1, len(self.prefill) + 1), self.prefill))

    def _saved(self, running: Array, group: Array) -> Array:
        """Seconds that the steps of a prefill of `group` prompts save by riding in decode steps of `running` sequences."""
        return np.zeros_like(running) if self.mixing is None else self.chunks * self.mixing.saved(running, group)

    def at(self, rate: ArrayLike, accept_length: ArrayLike | None = None) -> Point:
        """The steady state at arrival rates (requests a second) and accept lengths, which broadcast to one axis."""
        steps = np.atleast_2d(self._steps(accept_length))
        r = np.atleast_1d(np.asarray(rate, dtype=float))
        r = np.broadcast_to(r, np.broadcast_shapes(r.shape, steps.shape[:1]))
        n = np.arange(1, len(self.step) + 1, dtype=float)
        mean_step, mean_running = np.full_like(r, self.step[0]), np.ones_like(r)
        met = _Met.first(r)
        for _ in range(ROUNDS):  # prefills lengthen decoding, longer steps gather more prompts: half a step at a time
            last, met = met, self._meet(met, r, mean_step, mean_running)
            held = _shared(r, met.work, steps * self.step / n, self.requests)
            running = np.where(held.stable, held.weight @ n + met.work * held.bunch, n[-1])
            step = np.where(held.stable, held.weight @ self.step, self.step[-1])  # 0 counts while none decodes
            close = np.all(np.abs(running - mean_running) <= CLOSE * running)
            close &= np.all(np.abs(met.here - last.here) <= CLOSE * met.here)
            mean_step, mean_running = (mean_step + step) / 2, (mean_running + running) / 2
            if close:
                break
        decoding = held.weight.sum(axis=1)
        own = met.together * self._alone(met.together)
        if self.mixing is not None:  # the prompt's steps decode as well
            own = own + np.maximum(self.chunks * step - decoding * self._saved(running, met.together), 0.0)
        free = np.maximum(1 - met.work, 1e-9)
        vary = 1 + self.requests.input_cv2
        together = len(self.prefill) > 1  # all that come in one step are prefilled in the next but one; else one by one
        before = met.here / 2 + met.following if together else WAIT * step + met.work * own * vary / (2 * free)
        # A prompt in a row of them (one before it, one behind: each with probability `work`) ends within a step that is full.
        before = before + met.work**2 * self.fill / 2
        gained = max(self.requests.output_tokens - 1, 0.0)
        taken = (held.weight * steps).sum(axis=1) / np.maximum(decoding, 1e-300)
        tpot = running / r * (1 - 1 / taken) / gained if gained else np.zeros_like(r)

        def served(values: Array, otherwise: float = math.inf) -> Array:
            return np.where(held.stable, values, otherwise)

        busy = served(1 - (1 - decoding) * free, 1.0)
        return Point(
            r, served(running), served(held.waiting), served(tpot), served(held.waiting / r + before + own), busy
        )

    def _meet(self, last: _Met, r: Array, step: Array, running: Array) -> _Met:
        """One round towards what an arrival meets when decode steps take `step` seconds, by rate.

        A step prefills the K prompts that came in the last but one: SGLang's takes P(K), or S when nothing came; vLLM's S + P(K),
        P being what prefill adds. So K is Poisson with mean rate x D, and an arrival comes in a step of E[D^2] / E[D] seconds.
        """
        most, k = float(len(self.prefill)), last.prompts
        together = k * self._alone(k)
        prompts = np.maximum(together - self._saved(running, k), 0.1 * together)
        slope = np.where(k < most, (k + 1) * self._alone(np.minimum(k + 1, most)) - together, 0.0)
        full = prompts if self.mixing is None else step + prompts
        p = last.share
        p = 1 - (1 - p) * np.exp(-r * step) - p * np.exp(-r * full) * (1 + (r * slope) ** 2 * last.spread / 2)
        mean = (1 - p) * step + p * full
        fixed = (1 - p) * step**2 + p * full**2 + slope**2 * p * k * (1 - k + self.requests.input_cv2)
        square = fixed / (1 - np.minimum(slope * r, 0.95) ** 2)  # E[D^2]
        k = np.clip(r * mean / p, 1.0, most)
        spread = np.maximum((r * mean + r**2 * square) / p - k**2, 0.0)
        here = square / mean
        return _Met(p, k, spread, r * prompts / k, np.clip(1 + r * here, 1.0, most), here, mean)


@dataclass(frozen=True)
class Mixing:
    """Prefill in the steps that decode: the target's pass that decoding would have run alone, less what its rows add to the pass
    over the prompts. base[n - 1]: that pass of n sequences at no cached tokens, seconds; rows[n - 1]: their rows; prompt: rows
    of one prompt in a step; seconds[i]: a prefill of tokens[i] rows."""

    base: Array
    rows: Array
    prompt: float
    tokens: Array
    seconds: Array

    def saved(self, running: Array, group: Array) -> Array:
        """Seconds that a step of `group` prompts saves by riding in one of `running` sequences."""
        n = np.arange(1, len(self.base) + 1)
        alone = group * self.prompt
        wide, narrow = (
            np.interp(x, self.tokens, self.seconds) for x in (alone + np.interp(running, n, self.rows), alone)
        )
        return np.asarray(np.interp(running, n, self.base) - (wide - narrow))


@dataclass(frozen=True)
class _Met:
    """What an arrival meets. share: of steps that prefill; prompts, spread: mean and variance of prompts in these; work: share
    of time that prefill takes; together: prompts in its own prefill; here, following: seconds of the step that it comes in,
    and of the one after, which had been decided."""

    share: Array
    prompts: Array
    spread: Array
    work: Array
    together: Array
    here: Array
    following: Array

    @classmethod
    def first(cls, r: Array) -> _Met:
        """Where the rounds begin: nothing is prefilled."""
        zero, one = np.zeros_like(r), np.ones_like(r)
        return cls(zero, one, zero, zero, one, zero, zero)


@dataclass(frozen=True)
class _Shared:
    """How many share the server by the clock of decoding. weight[i, n - 1]: probability that n run; bunch: requests beyond
    the first in a bunch; waiting: for a place, mean. Where it is not stable, numbers mean nothing."""

    weight: Array
    bunch: Array
    waiting: Array
    stable: NDArray[np.bool_]


def _shared(r: Array, work: Array, each: Array, requests: Requests) -> _Shared:
    """The distribution at rates r (p,) when prefill takes `work` (p,) of the time and n running requests leave one every
    each[:, n - 1] seconds of decoding."""
    stable = work + r * each[:, -1] < 1
    free = np.where(stable, 1 - work, 1.0)
    bunch = (work + work**2 * (1 + requests.input_cv2) / (2 * free)) / free
    counted = 2 * requests.alike * bunch
    q, bunches = counted / (1 + counted), r / free / (1 + counted)
    up = np.where(stable[:, None], bunches[:, None] * each, 0.5)
    ratio = q[:, None] * stable[:, None] + up
    log = np.log(up) + np.cumsum(np.log(ratio), axis=1) - np.log(ratio)
    top = np.maximum(log.max(axis=1), 0.0)
    weight, empty = np.exp(log - top[:, None]), np.exp(-top)
    tail = np.where(stable, work + r * each[:, -1], 0.0)  # one that waits for a place is not prefilled before it has it
    beyond = weight[:, -1] * tail / (1 - tail)
    total = empty + weight.sum(axis=1) + beyond
    vary = (1 + requests.output_cv2) / 2
    waiting = vary * beyond / (1 - tail) / total
    weight[:, -1] += beyond
    return _Shared(weight / total[:, None], bunch, waiting, stable)


def server_of(
    s: Scenario,
    machine: Machine,
    requests: Requests,
    ranges: Ranges = (),
    *,
    chunk_tokens: int | None = None,
    prefix_rate: float = 0.0,
) -> Server:
    """The server of a scenario (its batch and context play no part). Its accept length is the scenario's, 1 without.

    `ranges`: draft lengths by batch, which replace the scenario's. chunk_tokens: of a prefill step, else the engine's.
    prefix_rate: share of each prompt in the prefix cache. Raises InputError when the weights leave no room for the KV cache of
    one request.
    """
    s = longest(s, ranges)
    tokens = float(rows_of(s))
    kv, running = cache_limits(s, running_limit(s))
    held = int(kv / (requests.context + tokens))
    chunk = chunk_tokens or default_chunk(s)
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
    prompt = max(requests.input_tokens * (1 - prefix_rate), 1.0)
    reach = np.asarray(requests.input_tokens * prefix_rate + (prompt + 1) / 2)
    chunks = max(1, math.ceil(prompt / chunk))
    together = np.arange(1.0, max(1, int(chunk / prompt)) + 1)
    a_step = prompt / chunks

    def prefill(tokens: Array) -> Array:
        return prefill_seconds(s, machine, tokens, reach).reshape(-1)

    seconds = chunks * prefill(together * a_step) / together
    fill = 0.0 if len(together) > 1 else float(prefill(np.asarray([float(chunk)]))[0])
    mixing = None
    if mixed:
        base, rows = np.empty(most), np.empty(most)
        for one, batches in cut:
            at = batches.astype(np.int64) - 1
            base[at] = base_seconds(one, machine, batches)
            rows[at] = batches * rows_of(one)
        widths = np.geomspace(a_step, chunk + rows[-1], WIDTHS)
        mixing = Mixing(base, rows, a_step, widths, prefill(widths))
    return Server(requests, step, seconds.reshape(-1), gained, s.parallel.tp, float(chunks), fill, mixing)
