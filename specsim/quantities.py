"""A number with its interval, and as many digits of it as the interval allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

LOW, HIGH = 0.1, 0.9  # an 80 % interval
HALF = 1.2816  # standard deviations to each side of a normal one


@dataclass(frozen=True)
class Quantity:
    """value in [low, high], an 80 % interval, in the unit that its field's name ends in."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: NDArray[np.float64], scale: float = 1.0) -> Quantity:
        """From one value followed by parameter samples along the first axis (all other axes of length 1)."""
        return cls.at(landmarks([np.asarray(samples) * scale]), samples.size - 1)[0]

    @classmethod
    def at(cls, marks: NDArray[np.float64], samples: int) -> list[Quantity]:
        """From the `landmarks` of each, or a function of them, that come from so many parameter samples."""
        values = marks[:, 0]
        if marks.shape[1] == 1:
            return [cls(value, value, value) for value in values.tolist()]
        falls = marks[:, 1:2] > marks[:, 4:]
        a, b, c, d = np.where(falls, marks[:, :0:-1], marks[:, 1:]).T
        last = samples - 1
        below = int(LOW * last)
        low, high = _between(a, b, LOW * last - below), _between(c, d, HIGH * last - (last - 1 - below))
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


def landmarks(samples: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """What the value and the interval of quantities follow from, a row each: the value, and the two pairs of its parameter
    samples between which `LOW` and `HIGH` of them lie; the value alone where there are no samples.

    samples: arrays of one size, each a value and then its samples. What only rises or only falls with a quantity, its inverse
    say, has its own landmarks where that quantity has them: a few numbers stand for all samples.
    """
    rows = np.concatenate([values.reshape(-1) for values in samples]).reshape(len(samples), -1)
    n = rows.shape[1] - 1
    if not n:
        return rows
    below = int(LOW * (n - 1))
    low, high = (below, min(below + 1, n - 1)), (max(n - 2 - below, 0), n - 1 - below)  # the same from either end
    return np.concatenate([rows[:, :1], np.sort(rows[:, 1:], axis=1)[:, low + high]], axis=1)


def _between(a: NDArray[np.float64], b: NDArray[np.float64], part: float) -> NDArray[np.float64]:
    """As np.quantile has it."""
    return a + (b - a) * part if part < 0.5 else b - (b - a) * (1.0 - part)


def decimals(error: float) -> int:
    """Decimal places to print beside an error, by the Particle Data Group's rule: two digits of an error whose leading
    digits are 100 to 354, else one."""
    if not math.isfinite(error) or error <= 0:
        return 2
    exponent = math.floor(math.log10(error))
    leading = error / 10**exponent
    return max(0, -exponent + (1 if leading < 3.55 else 0))
