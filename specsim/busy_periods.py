"""Prompts that are prefilled one after another without pause, as the customers of M/D/1 busy periods; and that places end.

A period serves N customers with P(N = n) = e^(-load n) (load n)^(n - 1) / n! (Borel, 1942). At a moment in it K of them are done: k as often as
N exceeds k, so that P(K = k) = (1 - load) P(N > k), and

    E[K] = x + x^2 / 2      x = load / (1 - load)      E[min(K, m)] = sum of P(K >= k) over k from 1 to m

K has a long tail: at a load of 0.8 its mean is 12, and a quarter of that is beyond 30. What is done stands still until the period
ends, and takes a place meanwhile: with the m-th, which takes the last place, prefill ends. By then a share P(K < m) of the period has passed, in which

    E[K; K < m] = E[min(K, m)] - m P(K >= m)

stood still on average, and by Wald's identity 1 - (1 - load) E[min(N, m)] = P(K >= m) wait for another place, where a period that is
not cut has none. Q_k that are present after k customers (0 once the period is over) make

    E[Q_k] = P(K >= k)      E[Q_(k + 1)^2] = E[Q_k^2] - 2 (1 - load) E[Q_k] + (1 - load + load^2) P(N > k)      Q_0 = 1

and while the next is prefilled Q_k - 1 + load / 2 wait for it, over the whole of a period load / (2 (1 - load)^2) prefills' time. Of those that are left
over, who came during the last prefill waited half of it: that belongs to their wait for a place, as do all pairs of them as often as Poisson numbers have.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
HEAVIEST, LOADS = 1e-4, 60  # share of time without work in the busiest queue that is looked at, and how many are
LIGHTEST = 1e-6  # load
ROUNDING = 1e-12  # a chance that a sum of thousands leaves of nothing
LONGEST = 4096  # customers that are followed: more places are as good as no end


@dataclass(frozen=True)
class Cut:
    """Busy periods that end with their m-th customer at the latest. held: E[min(K, m)] / E[K]; passed: share of their time, P(K < m);
    stood: of those that stand still, E[K; K < m] / E[K]; waited: of the time that customers wait within them who are served there. pairs: of customers that
    are left over, on average, beyond those of a Poisson number; 1 - passed are left over."""

    held: Array
    passed: Array
    stood: Array
    waited: Array
    pairs: Array


def cut(load: Array, places: Array) -> Cut:
    """Periods of loads in [0, 1) that end with `places` >= 0 customers, which broadcast; straight lines between loads, and between whole
    places."""
    load, places = np.broadcast_arrays(load, places)
    loads, table = _table()
    places = np.minimum(places, LONGEST)
    index = np.interp(load, loads, np.arange(LOADS))
    low, left = np.minimum(index.astype(np.int64), LOADS - 2), places.astype(np.int64)
    across, along = (index - low)[..., None], (places - left)[..., None]

    def at(row: NDArray[np.int64]) -> Array:
        return np.asarray(table[row, left] * (1 - along) + table[row, left + 1] * along)

    return Cut(*np.moveaxis(at(low) * (1 - across) + at(low + 1) * across, -1, 0))


@functools.cache
def _table() -> tuple[Array, Array]:
    """(loads, (loads, places, 5) of `Cut` for 0 to one more place than `LONGEST`)."""
    most = LONGEST + 1
    loads = 1 - np.geomspace(1 - LIGHTEST, HEAVIEST, LOADS)
    free, x = (1 - loads)[:, None], (loads / (1 - loads))[:, None]
    n = np.arange(1, most + 1, dtype=float)
    log = n * np.log(n) - np.cumsum(np.log(n)) - np.log(n) - np.outer(loads, n) + np.outer(np.log(loads), n - 1)
    more = np.maximum(1 - np.cumsum(np.exp(log), axis=1), 0.0)  # P(N > n), for n from 1
    more = np.concatenate([np.ones((LOADS, 1)), more], axis=1)  # and from 0
    done = 1 - free * (np.cumsum(more, axis=1) - more)  # P(K >= n)
    done = np.where(done > ROUNDING, done, 0.0)
    held = np.concatenate([np.zeros((LOADS, 1)), np.cumsum(done[:, 1:], axis=1)], axis=1)
    stood = held - np.arange(most + 1) * done
    waits = _before(np.maximum(done - more * (1 - loads[:, None] / 2), 0.0)) - done / 2
    square = 1 + _before(-2 * free * done + (free + loads[:, None] ** 2) * more)
    mean = x + x**2 / 2
    shares = (held / mean, 1 - done, stood / mean, waits / (x * (1 + x) / 2))
    pairs = np.maximum(square - done - done**2, 0.0) / 2
    table = np.stack([*(np.clip(s, 0.0, 1.0) for s in shares), pairs], axis=-1)
    table[:, LONGEST:] = 1.0, 1.0, 1.0, 1.0, 0.0
    loads[0], table[0, 1:, 1], table[0, :, 4] = 0.0, 1.0, 0.0
    return loads, table


def _before(values: Array) -> Array:
    """Sums over what comes before each place."""
    return np.cumsum(values, axis=1) - values
