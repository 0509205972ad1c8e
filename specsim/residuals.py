"""A calibration's picture: what was measured over what the line of its class says, against the bytes moved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specsim.calibrate import Result
from specsim.chart_style import BLUE
from specsim.class_fits import Fit, Sample, in_place, points
from specsim.plot_style import MUTED, picture, plain


def plot(result: Result, path: Path) -> None:
    """Residuals of each class against bytes, one panel a class. Raises InputError for a suffix that no picture has, and
    WorkError where the file cannot be written."""
    names = list(result.fits) or ["nothing fitted"]
    samples = in_place(result.record.samples)
    rows = -(-len(names) // 3)
    with picture(path, 12, 3 * rows) as figure:
        axes = figure.subplots(rows, 3, squeeze=False)
        for axis, name in zip(axes.flat, names, strict=False):
            _residuals(axis, name, result.fits.get(name), samples)
        for axis in list(axes.flat)[len(names) :]:
            axis.set_visible(False)


def _residuals(axis: Any, name: str, f: Fit | None, samples: Sequence[Sample]) -> None:
    if f is None:
        axis.set_title(name)
        return
    _, nbytes, *_ = points(samples, name)
    axis.axhline(0, color=MUTED, linewidth=0.8)
    axis.scatter(nbytes / 1e6, 100 * f.residuals, s=14, color=BLUE)
    axis.set(xscale="log", xlabel="moved, MB", ylabel="measured over fitted, %")
    plain(axis.xaxis)
    axis.set_title(f"{name}: {f.fixed_s * 1e6:.2f} us + bytes / {f.bytes_per_s / 1e9:.0f} GB/s", fontsize=9)
