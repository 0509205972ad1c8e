"""A number with its interval, and as many digits of it as the interval allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOW, HIGH = 0.1, 0.9  # an 80 % interval


@dataclass(frozen=True)
class Quantity:
    """value in [low, high], an 80 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: NDArray[np.float64], scale: float = 1.0) -> Quantity:
        """From one value followed by parameter samples along the first axis (all other axes of length 1)."""
        return cls.each([np.asarray(samples) * scale])[0]

    @classmethod
    def each(cls, samples: Sequence[NDArray[np.float64]]) -> list[Quantity]:
        """As `of`, many at once: arrays of one number of samples, or of a value alone."""
        flat = np.stack(np.broadcast_arrays(*(np.asarray(x, dtype=float).reshape(-1) for x in samples)))
        if flat.shape[1] == 1:
            return [cls(value, value, value) for value in flat[:, 0].tolist()]
        quantile = np.nanquantile if np.isnan(flat).any() else np.quantile  # the first takes ten times as long
        low, high = quantile(flat[:, 1:], (LOW, HIGH), axis=1)
        values = flat[:, 0]
        return [
            cls(*x)
            for x in zip(values.tolist(), np.fmin(low, values).tolist(), np.fmax(high, values).tolist(), strict=True)
        ]

    def json(self) -> dict[str, float]:
        """{"value", "low", "high"}, at six significant digits: more would be noise."""
        return {key: float(f"{getattr(self, key):.6g}") for key in ("value", "low", "high")}

    def __str__(self) -> str:
        places = decimals((self.high - self.low) / 2)
        return f"{self.value:,.{places}f}"

    @property
    def interval(self) -> str:
        """The interval as people read it, at the digits of the value."""
        places = decimals((self.high - self.low) / 2)
        return f"{self.low:,.{places}f} to {self.high:,.{places}f}"


def decimals(error: float) -> int:
    """Decimal places to print beside an error, by the Particle Data Group's rule: two digits of an error whose leading
    digits are 100 to 354, else one."""
    if not math.isfinite(error) or error <= 0:
        return 2
    exponent = math.floor(math.log10(error))
    leading = error / 10**exponent
    return max(0, -exponent + (1 if leading < 3.55 else 0))
