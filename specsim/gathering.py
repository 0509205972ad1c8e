"""Prompts that gather while steps run: how many share a prefill, and how long an arrival waits for its own.

A step prefills all prompts that came in the last but one, since the next is decided while one runs: K of them take D(K) seconds, and D(0) is
a step that only decodes. So K is Poisson of mean r D of the step before the last, and the numbers of every other step are a Markov chain,
whose steady state is solved for, number by number. (Means and variances alone miss it: a decode step is many times as long as
the first prefill after it where many decode.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
EACH = 8  # numbers of prompts that are looked at one by one; beyond they are taken in groups
RATIO = 1.35  # of a group to the one before
GROUPED = 0.8  # of what is between two groups: the least standard deviation
INSTANT = 1e-15  # seconds of a step that takes no time
TINY = 1e-300
LEAK = 1e-16  # chance that any number follows any other
TAIL = 5  # standard deviations beyond which more prompts do not come


@dataclass(frozen=True)
class Steps:
    """The steady state at arrival rates (...).

    prompts: (k,) that a step prefills, none first; seconds: (..., k) that it then takes, variance: of these; prefill: (..., k) those of
    them that its prompts add; share: (..., k) of all steps, growth: of it with the logarithm of the rate; beside: (..., k, k)
    chance of the number that comes in a step together with an arrival. taken: (..., k) of the prompts, those that find a place. fits: prompts whose tokens
    fill a step, and varies: how these tokens do, variance over the square of the mean.
    """

    rate: Array
    prompts: Ints
    seconds: Array
    variance: Array
    prefill: Array
    share: Array
    growth: Array
    beside: Array
    taken: Array
    fits: float = math.inf
    varies: float = 0.0

    @property
    def work(self) -> Array:
        """Share of time that prefill takes: that of a prompt on average, at the rate."""
        prompts = np.maximum((self.share * self.taken).sum(axis=-1), TINY)
        return np.asarray(self.rate * (self.share * self.prefill).sum(axis=-1) / prompts)

    @property
    def growing(self) -> Array:
        """By which share that grows with one of the rate: less than 1 where prompts that come together cost less."""
        cost, prompts = (
            (self.growth * x).sum(axis=-1) / np.maximum((self.share * x).sum(axis=-1), TINY)
            for x in (self.prefill, self.taken)
        )
        return np.asarray(1 + cost - prompts)

    @property
    def mean_s(self) -> Array:
        """Seconds of a step."""
        return np.asarray((self.share * self.seconds).sum(axis=-1))

    @property
    def met_s(self) -> Array:
        """Seconds of the step that an arrival comes in: long ones are met more often."""
        return np.asarray((self.share * (self.seconds**2 + self.variance)).sum(axis=-1) / self.mean_s)

    @property
    def met(self) -> Array:
        """(..., k) share of arrivals that come in a step of so many prompts."""
        return np.asarray(self.share * self.seconds / self.mean_s[..., None])

    @property
    def with_one_s(self) -> Array:
        """(..., k) seconds of a step that prefills an arrival beside so many others."""
        more = np.minimum(self.prompts + 1, self.prompts[-1])
        right = np.searchsorted(self.prompts, more)
        left = np.maximum(right - 1, 0)
        share = (self.prompts[right] - more) / np.maximum(self.prompts[right] - self.prompts[left], 1)
        return np.asarray(self.seconds[..., right] * (1 - share) + self.seconds[..., left] * share)

    @property
    def own_s(self) -> Array:
        """Seconds until an arrival is prefilled, from the start of the step that does: with those that come in the same step as it."""
        return np.asarray((self.met * (self.beside @ (self.with_one_s * self.passed)[..., None])[..., 0]).sum(axis=-1))

    @property
    def passed(self) -> Array:
        """(k,) share of a step that prefills an arrival beside so many others which has passed when its own prompt is done, on average: more than
        fit are several steps in a row, each full but the last."""
        k = self.prompts + 1.0
        place = np.arange(1.0, k[-1] + 1)
        ends = np.minimum(np.ceil(place / self.fits - 1e-9) * self.fits, k[:, None])  # of the first, the second, ...
        alike = (ends * (place <= k[:, None])).sum(axis=1) / k**2
        # The ends of prompts that vary are as likely at any place of a step: a wave as long as a step keeps so much of itself.
        kept = np.exp(-2 * (math.pi / self.fits) ** 2 * self.varies * (k + 1) / 2)
        return np.asarray(kept * alike + (1 - kept) * np.minimum((k + 1 + self.fits) / (2 * k), 1.0))

    @property
    def first_s(self) -> Array:
        """From an arrival to the end of its prefill: what is left of the step it comes in, the next, and its own."""
        return self.met_s / 2 + self.mean_s + self.own_s


def numbers(arrivals: Array) -> Ints:
    """Numbers of prompts to look at, of those that arrivals[k] is given for: that come on average, at most, while k are prefilled."""
    k = np.arange(len(arrivals))
    enough = k > arrivals + TAIL * np.sqrt(arrivals) + TAIL
    top = int(np.argmax(enough)) if enough.any() else len(k) - 1
    if top <= EACH:
        return np.arange(top + 1)
    beyond = np.geomspace(EACH, top, 1 + math.ceil(math.log(top / EACH) / math.log(RATIO)))
    return np.unique(np.concatenate([np.arange(EACH + 1), beyond.round().astype(np.int64)]))


def steps_of(
    rate: Array,
    prompts: Ints,
    seconds: Array,
    prefill: Array,
    variance: Array,
    taken: Array | None = None,
    fits: float = math.inf,
    varies: float = 0.0,
) -> Steps:
    """The steady state of arrivals at `rate` (..., 1), with seconds of steps, prefill's part and their variance (..., k)."""
    seconds = np.broadcast_to(seconds, np.broadcast_shapes((*rate.shape, 1), seconds.shape))
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, prompts[-1] + 1)))])[prompts]
    widths = np.log(np.gradient(prompts.astype(float)))  # a group counts as its middle, so many times
    most = 2.0 * prompts[-1] + 1  # more arrivals than that are as good as so many
    gathered, beside, tilted = np.zeros((3, *seconds.shape, len(prompts)))
    sides = (-1, 1) if variance.any() else (0,)  # as often one standard deviation longer as shorter
    for side in sides:
        took = np.maximum(seconds + side * np.sqrt(variance), 1e-3 * seconds + INSTANT)
        mean = np.minimum(rate[..., None] * took, most)[..., None]
        wide = np.maximum(1.0, (GROUPED * (RATIO - 1)) ** 2 * mean)  # no narrower than groups are apart
        log = (prompts * np.log(mean) - log_factorial) / wide + widths
        chance = np.exp(log - log.max(axis=-1, keepdims=True))
        chance /= chance.sum(axis=-1, keepdims=True) * len(sides)
        gathered += chance
        beside += chance * took[..., None]
        tilted += chance * (
            prompts - (chance @ prompts)[..., None] * len(sides)
        )  # d chance / d ln rate, of Poisson numbers
    gathered += LEAK / len(prompts)  # where more come than are served and none decode, no number leads back to fewer
    beside /= beside.sum(axis=-1, keepdims=True)
    # share (1 - gathered) = 0 and adds up to 1; its growth solves the same equations for what tilts it, and adds up to 0.
    balance = np.swapaxes(np.eye(len(prompts)) - gathered, -1, -2).copy()
    balance[..., -1, :] = 1.0
    inverse = np.linalg.inv(balance)
    share = np.clip(inverse[..., -1], 0.0, 1.0)
    pushed = (share[..., None, :] @ tilted)[..., 0, :]
    pushed[..., -1] = 0.0
    growth = (inverse @ pushed[..., None])[..., 0]
    rates = np.broadcast_to(rate, seconds.shape[:-1])
    return Steps(
        rates,
        prompts,
        seconds,
        variance,
        prefill,
        share,
        growth,
        beside,
        prompts.astype(float) if taken is None else taken,
        min(fits, prompts[-1] + 1.0),
        varies,
    )
