"""How many requests share a server: the distribution of the number that runs, and what stands or waits beside it.

By the clock that runs only while the server decodes, n requests leave at g(n) and b = rate / (1 - rho) come in bunches; `specsim.steady` derives

    p(n) = A(n - 1) / g(n)      A(n) = A(n - 1) q + b'(n) p(n)

Bunches are geometric, q / (1 - q) requests beyond the first. Where places end so does a bunch: begun with m free places it has
(1 - q^m) / (1 - q) requests, and as many are prefilled as a busy period that is cut serves (`specsim.busy_periods`), b P(K < m), so that b'(n) is
their quotient. With one place that is exact. Where prompts are prefilled one by one, decoding stands still and places are few, they are those of whole busy periods (`specsim.bunches`).
What is left over waits, as do those that come while every place is taken: each begins a busy period of the whole server, whose customers take 1 / limit seconds (limit: requests a second
with every place taken).

While others wait some places belong to prompts that are being prefilled, `passing` on average. Answers of one length that were prefilled without pause end
together, and so do those that take their places, k = last left + (1 - last) size of them: the bunch that took the `last` share of places, or the one that those before came with. The
first of k is a step ahead and prefilled alone, the others f = min(k - 1, what fits a step) at a time, so that 1 + (k - 1) (k - 1 + f) / 2 k have no first token yet on average. (Not so where each prompt rides in a step that decodes: those end a
step apart, so that every one decodes beside the prompts that follow all others. Prompts of several steps were found to be between the two, and are taken as the first.)

Where decoding goes on beside prompts (vLLM) who came first leaves meanwhile. No more run than come within the steps of an answer, and bunches
count as they vary within so many steps: with K prompts in a step on average those of every other step follow one another as rho^j, so that the number
within T = 2 L steps varies

    (1 + 2 sum of (1 - j / L) rho^j) / (1 - rho^2)      j = 1 .. L

times as much as Poisson's; to the I of long answers as L grows.

Where a KV cache is what ends and requests are of several sizes, what n of them hold varies by n v on top of how n does, v being their variance over the square
of their mean: together (i + v) / i times as much as n of one size, i being the variance of n over its mean, 1 + q / (1 - q). Whoever waits for room then does so as
if requests came, ran and left in groups of 1 + v / i to as many places fewer (Hayward's equivalent; Fredericks, Bell System Technical Journal 59, 1980), and each of them
keeps a server of (1 + v) (1 + answers) / 2 times as varied services busy. TPOT follows from the number that runs, which is not in groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specsim.bunches import crowds
from specsim.busy_periods import LONGEST, cut

Array = NDArray[np.float64]
MOST_WORK = 1 - 1e-6  # share of time that prefill takes
TINY = 1e-300
FEW = 256  # places up to which the shape of bunches matters, as they end with them


@dataclass(frozen=True)
class Crowd:
    """What comes and goes at rates (p,), by the number of places taken.

    each: (p, N) seconds of decoding after which one of n leaves; decoding: (N,) or (p, N) sequences that then decode; work, growing: (p, N + 1) share of
    time that prefill takes, and by which share that grows with one of the rate. places: that there are at most; limit: (p,) rates
    that can be served; passing: (p,) prompts that are prefilled while others wait for a place, `group` (p,) of them together, and `fits` at most. prompt_s: seconds of one. alike: the shorter of two answers over the mean one; answers, prompts:
    how they vary, variance over the square of the mean. window: (p,) pairs of steps of an answer beside prompts, over the steps of a
    prompt, and room: (p,) requests that run beside prompts at most; None where decoding stands still.
    uneven: how what running requests hold of a memory varies, variance over the square of the mean. in_step: answers whose prompts were prefilled without pause end together.
    """

    rate: Array
    each: Array
    decoding: Array
    work: Array
    growing: Array
    places: float
    limit: Array
    passing: Array
    group: Array
    fits: int
    prompt_s: float
    alike: float
    answers: float
    prompts: float
    window: Array | None = None
    room: Array | None = None
    uneven: float = 0.0
    in_step: bool = True

    @property
    def bunches(self) -> tuple[Array, Array, Array]:
        """(p, N + 1) each: the load of a busy period of prompts, requests of a bunch beyond its first, (I - 1) / 2, and as how many they count where answers
        stay together, and within the steps of an answer."""
        work = np.clip(self.work, 0.0, MOST_WORK)
        extra = self.growing * work / (1 - work)
        load = extra / (1 + extra)
        bunch = extra + extra**2 * (1 + self.prompts) / 2  # of prompts that vary
        counted = 2 * self.alike * bunch
        if self.window is not None and self.room is not None:
            each = np.broadcast_to(self.each, bunch[:, 1:].shape)
            most = np.maximum(self.room[:, None] - _mean(self.rate, each, 1 - work), 0.0)
            counted = np.minimum(counted * _seen(load, self.window[:, None]), most)
        return load, bunch, counted

    def grouped(self, i: int, size: float) -> Crowd:
        """The crowd at the i-th rate in groups of `size` requests that come, run and leave together, as a server of fewer places."""
        most = self.work.shape[1] - 1
        groups = np.arange(np.ceil(self.places / size) + 1)
        requests = np.minimum(groups * size, self.places)

        def at(values: Array, first: int) -> Array:
            """Values by requests, from `first` on, as values by groups."""
            row = np.broadcast_to(values, (len(self.rate), most + 1 - first))[i]
            return np.asarray(np.interp(requests[first:], np.arange(first, most + 1), row)[None])

        return replace(
            self, rate=self.rate[i : i + 1] / size, each=size * at(self.each, 1), decoding=at(self.decoding, 1) / size, work=at(self.work, 0),
            growing=at(self.growing, 0), places=self.places / size, limit=self.limit[i : i + 1] / size, passing=self.passing[i : i + 1] / size,
            prompt_s=self.prompt_s * size, answers=(1 + self.uneven) * (1 + self.answers) / size - 1,
            window=None if self.window is None else self.window[i : i + 1],
            room=None if self.room is None else self.room[i : i + 1] / size, uneven=0.0, group=self.group[i : i + 1],
        )  # fmt: skip


@dataclass(frozen=True)
class Shared:
    """How many share the server, by the number of places taken (p, N + 1).

    weight: share of time in which so many are; clock: the part of it in which they decode and nobody waits for a place; standing: requests
    that stand prefilled beside them, over all time, less those that have no first token yet where others wait for a place; waited: share of the waits for prompts ahead that end before places do;
    beside: share of others' prompts beside one's own answer that find a place. waiting: (p,) for a place, mean, and full: share of arrivals that do. Where it is not
    stable, numbers mean nothing.
    """

    weight: Array
    clock: Array
    standing: Array
    waited: Array
    beside: Array
    waiting: Array
    full: Array
    stable: NDArray[np.bool_]


def shared(c: Crowd) -> Shared:
    """The distribution of a crowd."""
    found = _alike(c)
    if not c.uneven:
        return found
    waiting, full = np.zeros((2, len(c.rate)))
    varies = 1 + (found.weight * c.bunches[2]).sum(axis=1)  # of the number that runs, over its mean
    for i, size in enumerate(1 + c.uneven / varies):
        groups = _alike(c.grouped(i, size))
        waiting[i], full[i] = size * groups.waiting[0], groups.full[0]
    return replace(found, waiting=waiting, full=full)


def _alike(c: Crowd) -> Shared:
    """The distribution of a crowd whose requests hold as much each."""
    r = c.rate
    stable = r < c.limit
    work = np.clip(c.work, 0.0, MOST_WORK)
    free = 1 - work
    load, bunch, counted = c.bunches
    each = np.broadcast_to(c.each, bunch[:, 1:].shape)
    left = np.maximum(c.places - np.arange(bunch.shape[1]), 0.0)
    left = np.broadcast_to(left, bunch.shape)
    if c.room is not None:
        left = np.where(left >= c.room[:, None], LONGEST, left)
    periods, beside = cut(load, left), np.ones_like(load)
    if c.room is not None:  # of those that come within the steps of an answer
        within = cut(load, np.broadcast_to(c.room[:, None], load.shape)).held
        beside = np.minimum(cut(load, np.maximum(left - 1, 0.0)).held / np.maximum(within, TINY), 1.0)
    full = np.zeros_like(load, dtype=bool)
    if c.room is not None:
        full = (np.arange(bunch.shape[1]) >= c.room[:, None]) & (_mean(r, each, free) >= c.room[:, None])
    found = r[:, None] / free * periods.passed  # that come and find a place
    if c.window is None and c.fits == 1 and each.shape[1] <= FEW:
        extra = np.sqrt(1 + counted / c.alike) - 1
        of_load = np.where(full, TINY, extra / (1 + extra))
        mean = np.maximum(cut(of_load, left).passed, TINY) * (1 + extra)
        clock, size = crowds(of_load, mean, np.where(full, TINY, found / mean), each, 2 * c.alike - 1)
    else:
        q = counted / (1 + counted)
        bunches = found / ((1 - q ** np.maximum(left, 1.0)) * (1 + counted))
        clock, size = _clock(np.where(full, TINY, q), np.where(full, TINY, bunches), each)
    paused = periods.passed * work / free  # beside each second of decoding: none where every place is taken
    weight = clock * (1 + paused)
    # Those wait for a place that come while all are taken, and that were left over when the last one was.
    after = np.where(stable, 1 / np.where(stable, c.limit - r, 1.0), 0.0)
    beyond = r * (clock * (1 - periods.passed)).sum(axis=1) * after
    share = np.minimum(c.limit * c.prompt_s, 1.0)  # of a place's time that its prompt takes
    varied = c.answers * (1 - share) ** 2 + c.prompts * share**2
    waiting = (1 + varied) / 2 * beyond * c.limit * after + r * (clock * periods.pairs).sum(axis=1) * after
    standing = clock * bunch * work / free * periods.stood
    left = np.minimum(left, c.places)
    last = left / c.places  # of the places, those that one bunch took
    waited_for = clock * (1 - periods.passed)
    size = last * left + (1 - last) * size
    more = np.maximum((waited_for * size).sum(axis=1) / np.maximum(waited_for.sum(axis=1), TINY) - 1, 0.0)
    passing = 1 + more * (more + np.minimum(more, c.fits)) / 2 / (1 + more)
    together = (2 * c.alike - 1) * np.maximum(passing / c.group - 1, 0.0) * c.in_step
    if c.window is not None:  # nobody stands still: `specsim.riding` says what prompts beside one's own cost
        standing = np.zeros_like(standing)
    inside = np.atleast_2d(c.decoding)[:, -1] / c.places  # of the time of a place that it decodes
    fewer = c.passing * inside * (1 + together)
    if c.room is not None:
        fewer = np.where(c.room < c.places, np.maximum(np.atleast_2d(c.decoding)[:, -1] - c.room, 0.0), fewer)
    standing[:, -1] -= beyond * fewer
    weight[:, -1] += beyond
    total = weight.sum(axis=1)
    weight, clock, standing = (x / total[:, None] for x in (weight, clock, standing))
    return Shared(weight, clock, standing, periods.waited, beside, waiting / total, weight[:, -1], stable)


def _clock(q: Array, bunches: Array, each: Array) -> tuple[Array, Array]:
    """(p(n), by the clock of decoding; mean bunch that then comes to n) where bunches are geometric: `specsim.bunches.crowds`."""
    q = np.maximum(q, TINY)
    ratio = q[:, 1:-1] + bunches[:, 1:-1] * each[:, :-1]
    none = np.zeros_like(each[:, :1])
    log = np.log(bunches[:, :1] * each) + np.concatenate([none, np.cumsum(np.log(ratio), axis=1)], axis=1)
    log = np.concatenate([none, log], axis=1)
    clock = np.exp(log - log.max(axis=1, keepdims=True))
    left = np.concatenate([none, np.cumsum(np.log(q[:, 1:-1] / ratio), axis=1)], axis=1)
    size = np.minimum(left + np.logaddexp.accumulate(-left, axis=1), np.log(np.arange(1, left.shape[1] + 1)))
    return np.asarray(clock / clock.sum(axis=1, keepdims=True)), np.concatenate([none, np.exp(size)], axis=1)


def _seen(load: Array, window: Array) -> Array:
    """Share of the variance that bunches add which is seen within so many pairs of steps."""
    x = load / (1 - load)
    pairs = 2 * x - 2 * load * (1 - load**window) / window / (1 - load) ** 2
    return np.clip(((1 + pairs) / (1 - load**2) - 1) / np.maximum(2 * x + x**2, TINY), 0.0, 1.0)


def _mean(r: Array, each: Array, free: Array) -> Array:
    """Requests that run on average were all steps those of so many. No number from 0 to `room` with that mean varies more than
    one that is either (Bhatia and Davis, Am. Math. Monthly 107, 2000): by room less the mean, times the mean."""
    lives = np.arange(1.0, free.shape[1]) * each
    return np.asarray(r[:, None] / free * np.concatenate([each[:, :1], lives], axis=1))
