"""The line of an operator class through its samples: the cost equation of specsim.ops.operator_seconds, fitted to what was timed.

Least squares on relative residuals with a robust loss, so that one odd shape does not bend the line; errors come from the
covariance. What the samples do not pin down is said, and held at a stated value instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.ops import PROCESSORS, CacheParts, Load, in_stages, operator_seconds
from specsim.quantities import HALF, counted

Array = NDArray[np.float64]
Sample = Mapping[str, Any]  # a result of specsim.calibration.worker

FITTED = ("gemm", "blockwise", "moe", "attention", "small")  # measurements that a class's line is fitted to
LOSS_SCALE = 0.05  # relative residual from which a point counts less
KNOWN = 0.3  # relative standard error above which a parameter is not identified
ENOUGH = 8  # points, for what walking the inner width takes
REACHED = 1.0  # computing over moving that some sample has to come to for a peak to be told
WITHIN_REACH = 0.5  # and at the peak that it is held at otherwise: below, what looks like one is something else
READING = 1.2  # reading alone is so much faster than a copy at most
DEFAULT_EFFICIENCY = 0.7  # of the measured bf16 rate, as the peak of a class whose own is not identified
SMALL_EFFICIENCY = 0.6  # of the measured bandwidth, for a small kernel whose own is not identified
WALKED = {
    "attention_mla": "summing the parts of a cache"
}  # class -> what `inner_ns` is the pace of, where it is no width


@dataclass(frozen=True)
class Fit:
    """Parameters of one class in SI, standard errors, and what held.

    residuals: relative, measured over fitted less one, one a sample point. held: parameters that the samples do not
    pin down and that kept a stated value ("bandwidth", "peak", "fixed").
    """

    fixed_s: float
    bytes_per_s: float
    flops_per_s: float | None
    fixed_error_s: float
    bandwidth_error: float  # relative
    residuals: Array
    held: tuple[str, ...] = ()
    inner_s: float = 0.0  # a value of inner width, or a part of a cache
    walked: str = "walking the inner width"  # what `inner_s` is the pace of

    @property
    def scatter(self) -> float:
        """Standard deviation with which an 80 % interval holds 80 % of the residuals, whose tails are longer than a normal's."""
        return float(np.quantile(np.abs(self.residuals), 0.8) / HALF)

    @property
    def note(self) -> str:
        text = f"{counted(len(self.residuals), 'point')}, median error {np.median(np.abs(self.residuals)):.1%}, worst {np.max(np.abs(self.residuals)):.0%}"
        text += f", fixed +- {self.fixed_error_s * 1e6:.2g} us"
        text += f", {self.walked} takes time" if self.inner_s else ""
        return text + "".join(f"; {name} not identifiable, held" for name in self.held)


def fit(
    seconds: Array,
    nbytes: Array,
    flops: Array,
    *,
    bandwidth: float,
    peak: float | None,
    inner: Array | None = None,
    staged: bool = False,
    fastest: float = np.inf,
) -> Fit:
    """Fit fixed, bandwidth and peak of `operator_seconds`. Arrays of shape (points,), SI.

    bandwidth and peak are what a parameter is held at when the samples do not identify it; peak None leaves the flops
    out. inner: the width that each output sums over; where the samples tell what walking a value of it takes, that is
    fitted too, with a bandwidth of at most `fastest`. staged: as of `operator_seconds`. Raises ValueError
    without points. With fewer points than parameters, what cannot be told is held.
    """
    if not len(seconds):
        raise ValueError("no points to fit")
    columns: dict[str, Array] = {"fixed": np.ones_like(seconds), "bandwidth": nbytes}
    least: dict[str, float] = {}
    if inner is not None:
        without = fit(seconds, nbytes, flops, bandwidth=bandwidth, peak=peak)
        if len(seconds) < ENOUGH or len(np.unique(inner)) < 2:
            return without
        columns["inner"], least["bandwidth"] = inner, 1 / fastest
    given: dict[str, float] = {"bandwidth": 1.0 / bandwidth}
    held: list[str] = []
    if peak is not None and np.any(flops > 0):
        columns["peak"], given["peak"] = flops, 1.0 / peak
        if np.max(flops / np.maximum(nbytes, 1.0)) * bandwidth < WITHIN_REACH * peak:
            held.append("peak")
    while True:
        free = [name for name in columns if name not in held]
        values, errors = _least_squares(seconds, columns, free, {n: given[n] for n in held}, least, staged)
        unknown = [n for n in ("peak", "bandwidth") if n in free and not errors[n] <= KNOWN * values[n]]
        if "peak" in free and "peak" not in unknown:  # a small excess at the largest samples is no compute limit
            reached = values["peak"] * columns["peak"] / np.maximum(values["bandwidth"] * columns["bandwidth"], 1e-300)
            unknown = unknown if reached.max() > REACHED else ["peak", *unknown]
        if not unknown:
            break
        held.append(unknown[0])
    fixed, fixed_error = max(values["fixed"], 0.0), errors["fixed"]
    predicted = _predicted(values, columns, staged)
    # With walking, what is certain is the start of the calls as a whole.
    unsure = () if inner is not None or fixed_error <= max(fixed, 1e-12) else ("fixed",)
    found = Fit(
        fixed_s=fixed,
        bytes_per_s=1.0 / values["bandwidth"],
        flops_per_s=1.0 / values["peak"] if "peak" in columns and "peak" not in held else None,
        fixed_error_s=float(min(fixed_error, 1.0)),
        bandwidth_error=float(errors["bandwidth"] / values["bandwidth"]) if "bandwidth" not in held else float("nan"),
        residuals=seconds / predicted - 1.0,
        held=(*held, *unsure),
        inner_s=values.get("inner", 0.0),
    )
    return found if inner is None or errors["inner"] <= KNOWN * values["inner"] else without


def _predicted(values: Mapping[str, float], columns: Mapping[str, Array], staged: bool) -> Array:
    """Seconds by the cost equation. values: seconds, seconds a byte, flop and value of inner width, as far as there are
    columns."""
    times = {name: values[name] * column for name, column in columns.items()}
    return operator_seconds(times["fixed"], times["bandwidth"], times.get("peak"), times.get("inner"), staged=staged)


def _least_squares(
    seconds: Array,
    columns: Mapping[str, Array],
    free: Sequence[str],
    held: Mapping[str, float],
    least: Mapping[str, float],
    staged: bool,
) -> tuple[dict[str, float], dict[str, float]]:
    """Coefficients of the columns, `least` or more, and their standard errors (infinite where the samples say nothing)."""
    from scipy.optimize import least_squares

    typical = {n: float(np.median(seconds) / max(columns[n].max(), 1e-300)) for n in free}  # every unknown near 1

    def residuals(x: Array) -> Array:
        values = {n: v * typical[n] for n, v in zip(free, x, strict=True)} | dict(held)
        return _predicted(values, columns, staged) / seconds - 1.0

    lower = np.array([max(1e-9, least.get(n, 0.0) / typical[n]) for n in free])
    solution = least_squares(
        residuals,
        np.maximum(0.5, 1.01 * lower),
        bounds=(lower, np.inf),
        loss="soft_l1",
        f_scale=LOSS_SCALE,
        x_scale="jac",
    )
    freedom = len(seconds) - len(free)
    left = residuals(solution.x)
    weight = 1.0 / np.sqrt(1.0 + (left / LOSS_SCALE) ** 2)  # of the robust loss
    slope = _jacobian(residuals, solution.x)
    normal = (slope * weight[:, None]).T @ slope
    errors = np.full(len(free), np.inf)
    if freedom > 0 and np.linalg.cond(normal) < 1e12:
        variance = float(np.sum(weight * left**2) / freedom)
        errors = np.sqrt(np.maximum(np.diag(np.linalg.inv(normal)) * variance, 0.0))
    scale = np.array([typical[n] for n in free])
    values = dict(zip(free, solution.x * scale, strict=True)) | dict(held)
    return values, dict(zip(free, errors * scale, strict=True)) | dict.fromkeys(held, 0.0)


def _jacobian(function: Callable[[Array], Array], x: Array) -> Array:
    """Central differences; the unknowns are near 1."""
    steps = np.maximum(np.abs(x), 1e-3) * 1e-5
    columns = [(function(x + d) - function(x - d)) / (2 * d.sum()) for d in np.diag(steps)]
    return np.column_stack(columns)


def in_place(results: Sequence[Sample]) -> list[Sample]:
    """The first rank's finished samples, without those of a class that were timed back to back, as by earlier releases, where
    others of it were timed in place: a kernel is cheaper after itself than after another."""
    done = [r for r in results if r["status"] == "done" and r.get("rank", 0) == 0]
    placed = {s["operator"] for s in done if "alone" in s["extras"]}
    return [s for s in done if s["operator"] not in placed or "alone" in s["extras"]]


def points(samples: Sequence[Sample], operator: str, processors: int = PROCESSORS) -> tuple[Array, Array, Array, Array]:
    """Median seconds, bytes, flops and inner widths of those of `in_place` samples that a class is fitted to: attention's of one
    query row, on a GPU of so many `processors`, and with the bf16 products the large one of `peak`, which is one of them."""

    def belongs(s: Sample) -> bool:
        if s["operator"] == operator:
            return s["measure"] != "attention" or bool(s["params"]["queries"] == 1)
        return operator == "gemm_bf16" and (s["measure"], s["operator"]) == ("peak", "matmul")

    chosen = [s for s in samples if belongs(s) and s["spread"]["median"] > 0]
    columns = [(s["spread"]["median"], s["bytes"], s["flops"], _inner(s, processors)) for s in chosen]
    seconds, nbytes, flops, inner = np.array(columns, dtype=float).reshape(-1, 4).T
    return seconds, nbytes, flops, inner


def _inner(s: Sample, processors: int) -> float:
    """The inner width of a product, or of both products of fused experts, or the parts of a latent cache; 0 for what sums over
    none."""
    p = s["params"]
    if s["operator"] == "attention_mla":
        batch, queries, tokens = (np.asarray(float(p[name])) for name in ("batch", "queries", "context"))
        return float(CacheParts(p["heads"]).of(Load(batch, queries, tokens - queries, processors=processors)))
    return float(p["hidden"] + p["intermediate"] if s["measure"] == "moe" else p.get("k", 0))


def fits(samples: Sequence[Sample], bandwidth: float, peak: float, processors: int = PROCESSORS) -> dict[str, Fit]:
    """A fit for every operator class with samples. bandwidth, peak, processors: the GPU's own, in bytes/s and flop/s."""
    found: dict[str, Fit] = {}
    for name in sorted({s["operator"] for s in samples if s["measure"] in FITTED}):
        seconds, nbytes, flops, inner = points(samples, name, processors)
        if len(seconds):
            small = name in ("norm", "tiny", "router")
            held = bandwidth * (SMALL_EFFICIENCY if small else 0.9)
            most = None if small else DEFAULT_EFFICIENCY * peak
            widths = inner if inner.any() else None
            fitted = fit(
                seconds,
                nbytes,
                flops,
                bandwidth=held,
                peak=most,
                inner=widths,
                staged=in_stages(name),
                fastest=READING * bandwidth,
            )
            found[name] = replace(fitted, walked=WALKED.get(name, fitted.walked))
    return found
