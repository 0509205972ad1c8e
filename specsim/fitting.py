"""Fitting measured operator times to the cost form of a profile: seconds = fixed + bytes / bandwidth.

The residual is relative (predicted / measured - 1), since a 10 % error matters alike for 5 us and 500 us, and the loss
is soft-L1, since public tables hold outliers. Units: bytes, seconds, operations; docs/hardware.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim.errors import InputError

Array = NDArray[np.float64]
SCALE = 0.1  # residuals above 10 % count as outliers
WORST = 0.5  # a parameter known no better than to 50 % is not identified


@dataclass(frozen=True)
class RateFit:
    """A fitted rate, SI units. `*_error` are one standard deviation from the covariance, `spread` is the half-width
    that holds 68 % of the relative residuals, `median` the median relative residual, `points` how many measurements."""

    fixed_s: float
    bytes_per_s: float
    fixed_error_s: float
    bytes_per_s_error: float
    spread: float
    median: float
    points: int

    @property
    def relative_uncertainty(self) -> float:
        """One standard deviation of a predicted time, as a fraction: residual spread and bandwidth error together."""
        return float(np.hypot(self.spread, self.bytes_per_s_error / self.bytes_per_s))


def fit_rate(sizes: ArrayLike, seconds: ArrayLike, *, cached: ArrayLike | None = None, where: str = "fit") -> RateFit:
    """Fit `seconds = fixed + bytes / bandwidth` with fixed >= 0.

    sizes: bytes of each point, shape (n,); seconds: measured time of each, shape (n,); cached: which points were read
    from the L2 cache, shape (n,). Those share the fixed time, which they show best, and have a bandwidth of their own.
    Raises InputError when the points cannot identify both parameters: fewer than three, sizes that do not spread by a
    factor of 1.5, times that do not grow with bytes, or a covariance that leaves the bandwidth open.
    """
    from scipy.optimize import least_squares

    size, time = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    good = np.isfinite(size) & np.isfinite(time) & (size > 0) & (time > 0)
    warm = np.zeros(size.shape, bool) if cached is None else np.asarray(cached, dtype=bool)
    size, time, warm = size[good], time[good], warm[good]
    cold = ~warm

    def refuse(why: str) -> InputError:
        return InputError(f"not identifiable: {why}", where=where, mend="give more points over a wider range of bytes")

    if cold.sum() < 3:
        raise refuse(f"{cold.sum()} usable points, at least 3 are needed")
    if size[cold].max() < 1.5 * size[cold].min():
        raise refuse(f"all points lie near {size[cold].mean():.3g} bytes")
    unit_time, unit_slope = float(np.median(time)), float(np.median(time) / np.median(size))

    columns = [unit_time / time, cold * unit_slope * size / time]
    if warm.any():
        columns.append(warm * unit_slope * size / time)
    jacobian = np.column_stack(columns)

    def residual(p: Array) -> Array:
        return np.asarray(jacobian @ p - 1)

    start = [0.2, 0.8, 0.3][: len(columns)]
    result = least_squares(residual, start, bounds=(0, np.inf), loss="soft_l1", f_scale=SCALE)
    fixed, slope = float(result.x[0]) * unit_time, float(result.x[1]) * unit_slope
    relative = np.abs(residual(result.x))
    spread = float(np.quantile(relative, 0.68))
    if slope * size[cold].max() < 0.02 * fixed or slope <= 0:
        raise refuse("time does not grow with bytes, so the bandwidth is open")
    variance = max(spread, 1e-6) ** 2 * size.size / max(size.size - len(columns), 1)
    covariance = variance * np.linalg.pinv(jacobian.T @ jacobian)
    fixed_error = float(np.sqrt(covariance[0, 0])) * unit_time
    slope_error = float(np.sqrt(covariance[1, 1])) * unit_slope
    if slope_error > WORST * slope:
        raise refuse(f"the bandwidth is known only to {slope_error / slope:.0%}")
    return RateFit(
        fixed_s=fixed,
        bytes_per_s=1 / slope,
        fixed_error_s=fixed_error,
        bytes_per_s_error=slope_error / slope**2,
        spread=spread,
        median=float(np.median(relative)),
        points=int(size.size),
    )


def fit_peak(rate: RateFit, sizes: ArrayLike, seconds: ArrayLike, operations: ArrayLike) -> float | None:
    """Achieved operations per second at large row counts, or None where no point is limited by compute.

    Given fixed and bandwidth, the peak of each compute-limited point follows from specsim.ops.operator_seconds:
    (time - fixed)^3 = (bytes / bandwidth)^3 + (operations / peak)^3.
    """
    size, time, flops = (np.asarray(a, dtype=float) for a in (sizes, seconds, operations))
    beyond = (time - rate.fixed_s) ** 3 - (size / rate.bytes_per_s) ** 3
    limited = (beyond > 0.5 * time**3) & (time > rate.fixed_s)
    if limited.sum() < 3:
        return None
    return float(np.median(flops[limited] / np.cbrt(beyond[limited])))
