"""Prompts that are prefilled one after another without pause, as the customers of M/D/1 busy periods; and that places end.

A period serves N customers with P(N = n) = e^(-load n) (load n)^(n - 1) / n! (Borel, 1942). At a moment in it K of them are done: k as often as
N exceeds k, so that P(K = k) = (1 - load) P(N > k), and

    E[K] = x + x^2 / 2      x = load / (1 - load)      E[min(K, m)] = sum of P(K >= k) over k from 1 to m

K has a long tail: at a load of 0.8 its mean is 12, and a quarter of that is beyond 30. What is done stands still until the period
ends, and takes a place meanwhile: with the last one prefill ends.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
HEAVIEST, LOADS = 1e-4, 60  # share of time without work in the busiest queue that is looked at, and how many are
LIGHTEST = 1e-6  # load


def within(load: Array, places: Array) -> Array:
    """E[min(K, places)] / E[K], in [0, 1], for loads in [0, 1) and places >= 0, which broadcast; straight lines between loads, and
    between whole places."""
    load, places = np.broadcast_arrays(load, places)
    loads, shares = _table(int(places.max()) + 1)
    index = np.interp(load, loads, np.arange(LOADS))
    low, left = np.minimum(index.astype(np.int64), LOADS - 2), places.astype(np.int64)
    across, along = index - low, places - left

    def at(row: NDArray[np.int64]) -> Array:
        return np.asarray(shares[row, left] * (1 - along) + shares[row, left + 1] * along)

    return at(low) * (1 - across) + at(low + 1) * across


@functools.lru_cache(8)
def _table(most: int) -> tuple[Array, Array]:
    """(loads, (loads, most + 1) of `within` for 0 to `most` places)."""
    loads = 1 - np.geomspace(1 - LIGHTEST, HEAVIEST, LOADS)
    n = np.arange(1, most + 1, dtype=float)
    log = n * np.log(n) - np.cumsum(np.log(n)) - np.log(n) - np.outer(loads, n) + np.outer(np.log(loads), n - 1)
    more = np.maximum(1 - np.cumsum(np.exp(log), axis=1), 0.0)  # P(N > n), for n from 1
    done = np.maximum(1 - (1 - loads)[:, None] * (1 + np.cumsum(more, axis=1) - more), 0.0)  # P(K >= n)
    reached = np.concatenate([np.zeros((LOADS, 1)), np.cumsum(done, axis=1)], axis=1)
    x = loads / (1 - loads)
    return loads, np.minimum(reached / (x + x**2 / 2)[:, None], 1.0)
