"""Numbers of a bunch of prompts that are prefilled one after another without pause, as a sum of geometric ones: Borel's distribution.

The customers N of an M/D/1 busy period at a load x have P(N = n) = e^(-x n) (x n)^(n - 1) / n!, and since n^n / n! is the mean of
(e^(v cot v) sin v / v)^n over v from 0 to pi (Bouwkamp, Math. Comp. 47, 1986),

    n P(N = n) = mean of q(v)^n / x        q(v) = x e^(1 - x) r(v)        r(v) = e^(v cot v - 1) sin v / v
    P(N >= n)  = mean of w(v) q(v)^n / (1 - q(v)) / x        w(v) = 1 - 2 v cot v + (v / sin v)^2

the second by parts. With a bunch of either kind begun while m are there, numbers that run follow step by step, each q(v) by itself: as many cross
from n to n + 1 as leave at n + 1. Answers that are exponential leave one by one, and P(N > n - m) of the bunches cross; those of one length stay together, and
the distribution of M/D/infinity in bunches, a compound Poisson one, has n P(N = n) in its place (Panjer, ASTIN Bulletin 12, 1981).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NODES = 24  # places at which the mean over v is taken
LIGHTEST = 1e-9  # load
TINY = 1e-300
OFTEN = 16  # numbers after which what has grown is scaled
_V = (np.arange(NODES) + 0.5) * np.pi / NODES
_RATIO = np.sin(_V) / _V * np.exp(_V / np.tan(_V) - 1)
_TAIL = 1 - 2 * _V / np.tan(_V) + (_V / np.sin(_V)) ** 2


def crowds(load: Array, mean: Array, begin: Array, each: Array, alike: float) -> tuple[Array, Array]:
    """((p, N + 1) share of time with 0, 1, ... of at most N, those of a bunch that it then comes with, on average).

    load, mean: (p, N + 1) of the bunches that begin while so many are there, and the requests that find a place; begin: of bunches a second; each: (p, N) seconds after
    which one of 1, 2, ... leaves. alike: from 0, for exponential answers, to 1, for those of one length.
    """
    most = each.shape[1]
    load = np.maximum(load, LIGHTEST)
    q = (load * np.exp(1 - load))[..., None] * _RATIO
    single = np.broadcast_to(1 / (load * NODES), load.shape)[..., None]
    tail = _TAIL / (1 - q)
    weight = single * alike + (1 - alike) * tail / (tail * q).sum(axis=-1, keepdims=True)  # P(N >= 1) = 1
    # What of bunches of answers that stay together ends with the places: no more than those that find one.
    places = (most - np.arange(most + 1.0))[:, None]
    last = alike * np.maximum(mean - (single * q * (1 - q**places) / (1 - q)).sum(axis=-1), 0.0)
    clock, size = np.zeros_like(load), np.ones_like(load)
    clock[:, 0] = 1.0
    cross, counted = np.zeros((2, len(load), NODES))
    for n in range(most):
        cross = (cross + (begin[:, n] * clock[:, n])[:, None] * weight[:, n]) * q[:, n]
        counted = counted * q[:, n] + cross
        came, with_them = cross.sum(axis=1), counted.sum(axis=1)
        if n == most - 1:
            ended = begin * clock * last
            came, with_them = came + ended.sum(axis=1), with_them + (ended * places[:, 0]).sum(axis=1)
        clock[:, n + 1] = each[:, n] * came
        size[:, n + 1] = np.clip(with_them / np.maximum(came, TINY), 1.0, n + 1.0)
        if n % OFTEN == 0:
            scale = clock.max(axis=1, keepdims=True)
            clock, cross, counted = (x / scale for x in (clock, cross, counted))
    return np.asarray(clock / clock.sum(axis=1, keepdims=True)), size
