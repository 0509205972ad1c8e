"""Quantiles of Gamma and Poisson distributions at many points at once, from tables: to a per cent, and fifty times as fast as exact ones."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SHAPES = np.geomspace(1e-3, 1e5, 97)  # of Gamma distributions
NORMAL = np.linspace(-4.5, 4.5, 181)  # points, as quantiles of a normal one
FEW = 24  # mean up to which Poisson numbers are added up one by one


def gamma(of: Array | float, cv2: Array | float, u: Array, more: int = 0) -> Array:
    """Means of `of` Gamma distributed values of mean 1 and variance cv2 at points u in (0, 1); `more`: 1 where they are met in proportion
    to their size."""
    from scipy.special import ndtri

    if not np.any(cv2):
        return np.ones_like(u)
    shape = np.broadcast_to(of / np.maximum(cv2, 1e-9), u.shape)
    table = _quantiles()
    across = np.interp(np.log(np.maximum(shape + more, SHAPES[0])), np.log(SHAPES), np.arange(len(SHAPES)))
    along = np.interp(ndtri(u), NORMAL, np.arange(len(NORMAL)))
    i, j = (np.minimum(x.astype(np.int64), n - 2) for x, n in ((across, len(SHAPES)), (along, len(NORMAL))))
    across, along = across - i, along - j
    low = table[i, j] * (1 - along) + table[i, j + 1] * along
    high = table[i + 1, j] * (1 - along) + table[i + 1, j + 1] * along
    return np.asarray((low * (1 - across) + high * across) * (shape + more) / np.maximum(shape, SHAPES[0]))


def poisson(mean: Array, u: Array) -> Array:
    """Poisson numbers of so many on average at points u in (0, 1); of many as a normal distribution with their skewness."""
    from scipy.special import ndtri

    few = np.minimum(mean, FEW)
    chance = np.exp(-few)
    total, number = chance.copy(), np.zeros_like(few)
    most = int(np.ceil(few.max(initial=0.0) + 6 * np.sqrt(few.max(initial=0.0)) + 6))
    for k in range(1, most + 1):
        number += u > total
        chance = chance * few / k
        total += chance
    z = ndtri(u)
    many = np.maximum(np.rint(mean + z * np.sqrt(mean) + (z**2 - 1) / 6), 0.0)
    return np.where(mean <= FEW, number, many)


def branched(first: Array, load: Array | float, varies: float, u: Array) -> Array:
    """Customers of busy periods that begin with so many at points u in (0, 1), at a load: `first` and a Gamma distributed number with the mean,
    first x load / (1 - load), and the variance, first x load (1 + load x varies) / (1 - load)^3, that Borel and Tanner's has for services
    of one length; varies: their variance over the square of the mean."""
    return np.asarray(first * (1 + load / (1 - load) * gamma(first * load * (1 - load) / (1 + load * varies), 1.0, u)))


@functools.cache
def _quantiles() -> Array:
    """(shapes, points) of Gamma distributions of mean 1."""
    from scipy.special import gammaincinv, ndtr

    return np.asarray(gammaincinv(SHAPES[:, None], ndtr(NORMAL)) / SHAPES[:, None])
