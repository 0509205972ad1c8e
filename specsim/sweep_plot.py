"""Charts of a sweep: the best draft length by batch and context, and speedup over acceptance with break-even."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from specsim.errors import InputError, WorkError
from specsim.sweep_run import Result


def draw(result: Result, path: Path) -> None:
    """Draw the first case of a sweep that fits: left its map (best draft length, at the middle acceptance), right speedup curves.

    Raises InputError without an accept rate or length, WorkError when the file cannot be written.
    """
    if not result.digest.best or result.spec.kind not in ("rate", "length"):
        raise InputError("needs acceptance to draw", where="--plot", mend="give --accept-rate or --accept-length, as a range for curves")  # fmt: skip
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    fitting = (x["case"] for x in result.digest.best if x["setting"] != "-")
    index = next(fitting, next(iter(result.cases)))
    case = result.cases[index].labels()
    found = [x for x in result.digest.best if x["case"] == index]
    accepts = list(dict.fromkeys(x["acceptance"] for x in found))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    _map(figure, left, [x for x in found if x["acceptance"] == accepts[len(accepts) // 2]])
    left.set_title(
        f"best draft tokens at accept {result.spec.kind} {accepts[len(accepts) // 2]:g}", fontsize=10, loc="left"
    )
    _curves(right, found, accepts)
    right.set_xlabel(f"accept {result.spec.kind}")
    right.set_title("speedup with the best draft tokens; below 1: speculation loses", fontsize=10, loc="left")
    figure.suptitle(f"{case['model']} on {case['hardware']}, {case['engine']}, TP {case['tp']}", fontsize=11)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise WorkError(f"{path}: cannot be written: {error}") from None
    finally:
        plt.close(figure)


def _map(figure: Any, axes: Any, cells: list[dict[str, Any]]) -> None:
    """Batch over context, coloured by the best draft tokens and lettered; grey where nothing fits."""
    import matplotlib as mpl
    import numpy as np

    batches, contexts = sorted({x["batch"] for x in cells}), sorted({x["context"] for x in cells})
    grid = np.full((len(batches), len(contexts)), np.nan)
    for x in cells:
        if x["draft_tokens"] is not None:
            grid[batches.index(x["batch"]), contexts.index(x["context"])] = x["draft_tokens"]
    most = max((x["draft_tokens"] or 1 for x in cells), default=1)
    lightest = 0.75 * most
    for x in cells if grid.size <= 200 else []:
        place = contexts.index(x["context"]), batches.index(x["batch"])
        dark = x["draft_tokens"] is None or x["draft_tokens"] > lightest
        axes.text(*place, x["setting"], ha="center", va="center", fontsize=8, color="black" if dark else "white")
    axes.set_facecolor("0.8")
    colours = mpl.colormaps["viridis"].resampled(most)
    image = axes.imshow(grid, origin="lower", aspect="auto", vmin=0.5, vmax=most + 0.5, cmap=colours)
    axes.set_xticks(range(len(contexts)), [f"{c:,}" for c in contexts], rotation=45, fontsize=8)
    axes.set_yticks(range(len(batches)), [f"{b:,}" for b in batches], fontsize=8)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("batch, sequences")
    bar = figure.colorbar(image, ax=axes, label="draft tokens (off: plain decoding; grey: does not fit)")
    ticks = range(1, most + 1, 1 + most // 16)
    bar.set_ticks(list(ticks), labels=["off" if t == 1 else str(t) for t in ticks])


def _curves(axes: Any, found: list[dict[str, Any]], accepts: list[float]) -> None:
    """Speedup over acceptance, one line a batch (at most six) at the smallest context, with a dot where it breaks even."""
    context = min(x["context"] for x in found)
    batches = sorted({x["batch"] for x in found})
    for batch in batches[:: max(1, -(-len(batches) // 6))]:
        here = {x["acceptance"]: x["speedup"] for x in found if x["batch"] == batch and x["context"] == context}
        pairs = [(a, here[a]) for a in accepts if here.get(a) is not None]
        if pairs:
            even = [
                a + (1 - low) / (high - low) * (b - a)
                for (a, low), (b, high) in itertools.pairwise(pairs)
                if low < 1 <= high
            ]
            label = f"batch {batch:,}" + (f", breaks even at {even[0]:.2f}" if even else "")
            (line,) = axes.plot(*zip(*pairs, strict=True), marker="o" if len(pairs) < 3 else None, label=label)
            axes.plot(even, [1] * len(even), "o", color=line.get_color())
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    axes.set_ylabel("speedup")
    if len(axes.lines) > 1:
        axes.legend(fontsize=8, title=f"context {context:,}", title_fontsize=8)
