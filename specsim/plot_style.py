"""How pictures look: the palette of the charts, hatches and markers for a print in grey, and one way to write a file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.chart_style import COMPONENTS, GREY, PALETTE
from specsim.errors import InputError
from specsim.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
MARKERS = "os^DXvP*"
# Only the first is whole, so that a line which lies on another lets it show through.
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (7, 2, 1, 2)), (0, (1, 3)), (0, (10, 4)), (0, (3, 5)))
HATCHES = ("", "///", "..", "\\\\\\", "xx", "---", "++", "||")
MUTED = "0.45"
UNDATED: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
STYLE: dict[str, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.labelsize": 9, "legend.fontsize": 8, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "0.88", "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5, "lines.linewidth": 1.6, "lines.markersize": 4.5, "savefig.dpi": 150,
    "svg.hashsalt": "specsim",  # the same picture has the same bytes
}  # fmt: skip


def check(path: Path) -> None:
    """Raise InputError for a suffix that no picture has."""
    if path.suffix.lower() not in FORMATS:
        what = f"{path.suffix} is no picture format" if path.suffix else f"{str(path)!r} has no suffix"
        raise InputError(what, where="--plot", mend="end the name in .png, .svg or .pdf")


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, which is written to `path` when all is drawn; the suffix chooses the format.

    Raises InputError for another suffix, and WorkError where the file cannot be written.
    """
    check(path)
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "axes.prop_cycle": cycler(color=PALETTE)}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        out, suffix = io.BytesIO(), path.suffix.lower()
        figure.savefig(out, format=suffix[1:], metadata=UNDATED[suffix])
    write_atomically(path, out.getvalue())


def line(i: int) -> dict[str, Any]:
    """Colour, dash and marker of the i-th line, no two of the first eight alike in grey."""
    return {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)], "linestyle": LINES[i % len(LINES)]}


def filled(component: str, i: int = 0) -> dict[str, Any]:
    """Colour and hatch of a component, the same in every picture; `i` where it is none of those known."""
    names = list(COMPONENTS)
    place = names.index(component) if component in names else len(names) + i
    colour = COMPONENTS.get(component, GREY)
    return {"facecolor": colour, "hatch": HATCHES[place % len(HATCHES)], "edgecolor": "white", "linewidth": 0.4}


def plain(axis: Any) -> None:
    """Numbers of a logarithmic axis as they are, not as powers of ten."""
    axis.set_major_formatter(lambda x, _: f"{x:,.10g}")


def bars(axes: Any, names: Sequence[str]) -> None:
    """Horizontal bars: their names on the y axis, the first on top, and no grid across them."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
