"""A number with its interval, and as many digits of it as the interval allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOW, HIGH = 0.1, 0.9  # an 80 % interval


@dataclass(frozen=True)
class Quantity:
    """value in [low, high], an 80 % interval, in the unit that its field's name ends in."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: NDArray[np.float64], scale: float = 1.0) -> Quantity:
        """From one value followed by parameter samples along the first axis (all other axes of length 1)."""
        return cls.each([np.asarray(samples) * scale])[0]

    @classmethod
    def each(cls, samples: Sequence[NDArray[np.float64]]) -> list[Quantity]:
        """As `of`, many at once: arrays of one number of samples."""
        flat = np.concatenate([values.reshape(-1) for values in samples]).reshape(len(samples), -1)
        if flat.shape[1] == 1:
            return [cls(value, value, value) for value in flat[:, 0].tolist()]
        values = flat[:, 0]
        low, high = quantiles(flat[:, 1:], (LOW, HIGH))
        return list(map(cls, values.tolist(), np.fmin(low, values).tolist(), np.fmax(high, values).tolist()))

    def json(self) -> dict[str, float]:
        """{"value", "low", "high"}, at six significant digits: more would be noise."""
        return {"value": six(self.value), "low": six(self.low), "high": six(self.high)}

    @cached_property
    def _places(self) -> int:
        return decimals((self.high - self.low) / 2)

    def __str__(self) -> str:
        return f"{self.value:,.{self._places}f}"

    @property
    def interval(self) -> str:
        """The interval as people read it, at the digits of the value."""
        return f"{self.low:,.{self._places}f} to {self.high:,.{self._places}f}"


def counted(n: int, what: str) -> str:
    """So many of them, in words: "1 term", "2 terms"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def six(x: float) -> float:
    """At six significant digits."""
    return float(f"{x:.6g}")


def short(x: float, digits: int = 4) -> str:
    """As people read it: so many significant digits, or all before the point; no powers of ten for large numbers."""
    few = f"{x:,.{digits}g}"
    return few if "e+" not in few else f"{x:,.0f}"


def quantiles(rows: NDArray[np.float64], shares: Sequence[float]) -> NDArray[np.float64]:
    """The quantiles (share, row) of each row (row, sample), nan left out: what np.nanquantile gives, to the last digit.

    Whole rows are sorted in less time than it takes to part them four times, and nan comes last.
    """
    ordered = np.sort(rows, axis=1)
    every: Any = slice(None)
    last: Any = rows.shape[1] - 1
    if np.isnan(ordered[:, -1]).any():  # rows end at different places
        every, last = np.arange(len(rows))[:, None], np.maximum(last - np.isnan(ordered).sum(axis=1, keepdims=True), 0)
    place = np.asarray(shares) * last
    below = place.astype(np.intp)
    part = place - below
    a, b = ordered[every, below], ordered[every, np.minimum(below + 1, last)]
    found = np.where(part < 0.5, a + (b - a) * part, b - (b - a) * (1.0 - part))
    return np.asarray(found.T)


def decimals(error: float) -> int:
    """Decimal places to print beside an error, by the Particle Data Group's rule: two digits of an error whose leading
    digits are 100 to 354, else one."""
    if not math.isfinite(error) or error <= 0:
        return 2
    exponent = math.floor(math.log10(error))
    leading = error / 10**exponent
    return max(0, -exponent + (1 if leading < 3.55 else 0))
