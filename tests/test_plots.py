"""Pictures of documents: what they show is in the document, one style, and the same bytes for the same result."""

from __future__ import annotations

import re

import matplotlib as mpl
import numpy as np
import pytest
from documents import COMMANDS, document, printed, text_of
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from specsim import plots
from specsim.chart_style import COMPONENTS
from specsim.errors import InputError, WorkError
from specsim.plot_style import HATCHES, LINES, MARKERS, check, filled, line, picture

mpl.use("Agg")
NOTHING = {"hardware of one GPU", "hardware diff of two GPUs"}
PICTURES = [name for name in COMMANDS if name not in NOTHING]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """drawn(name) -> the figure that a document's picture had when it was written."""

    def draw(name, **more):
        figures = []
        write = Figure.savefig
        monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), write(self, *a, **k)))
        plots.plot(document(name), tmp_path / "picture.png", **more)
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        return figures[0]

    return draw


@pytest.mark.parametrize("name", PICTURES)
def test_every_axis_has_a_label_and_something_on_it(drawn, name):
    """A label ends with its unit; axes of names (their ticks say what they are) and colour bars are labelled as well."""
    for axes in drawn(name).axes:
        assert axes.has_data()
        labels = axes.get_xlabel() + axes.get_ylabel()
        assert labels
        assert axes.get_xlabel() or not axes.xaxis.get_ticklabels() or axes.get_label() == "<colorbar>" or name.startswith(("diag", "sim"))  # fmt: skip


@pytest.mark.parametrize("name", sorted(NOTHING))
def test_nothing_to_draw_is_told(name, tmp_path):
    with pytest.raises(InputError, match=r"--plot: .*no all-reduce curve to draw; choose a profile of several GPUs"):
        plots.plot(document(name), tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_the_bars_of_a_prediction_sum_to_its_phases(drawn):
    found = document("prediction")
    axes = drawn("prediction").axes[0]
    names = [t.get_text() for t in axes.get_yticklabels()]
    widths = dict.fromkeys(names, 0.0)
    for bar in axes.patches:
        widths[names[round(bar.get_y() + bar.get_height() / 2)]] += bar.get_width()
    assert widths["plain decode"] == pytest.approx(found["decode_ms"]["value"], rel=1e-4)
    assert widths["verify"] == pytest.approx(found["verify_ms"]["value"], rel=1e-4)


def test_the_break_even_is_marked_with_its_interval(drawn):
    rate = document("prediction")["breakeven"]["accept_rate"]
    lines = [np.asarray(each.get_xydata()).tolist() for each in drawn("prediction").axes[1].lines]
    assert [[rate["value"], 1.0]] in lines
    assert [[rate["low"], 1.0], [rate["high"], 1.0]] in lines


def test_a_picture_of_a_diagnosis_shows_components_where_they_are_given(drawn):
    parts = [("verify-eager", phase, {"gemm": 3.0, "launch": 9.0}) for phase in ("decode", "verify")]
    assert len(drawn("diagnosis").axes) == 1
    figure = drawn("diagnosis", components=parts)
    assert len(figure.axes) == 2
    assert sum(bar.get_height() for bar in figure.axes[1].patches) == pytest.approx(24.0)


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_the_same_result_gives_the_same_bytes(tmp_path, suffix):
    """No date, no random names: pictures can be kept beside code and compared."""
    made = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.{suffix}"
        plots.plot(document("prediction"), path)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    assert not re.search(rb"20\d\d-\d\d-\d\d|CreationDate", made[0])


def test_another_suffix_is_told_before_any_work(tmp_path, capsys):
    for name, told in (("x.docx", ".docx is no picture format"), ("x", "has no suffix"), (".svg", "has no suffix")):
        with pytest.raises(InputError, match=f"--plot: .*{re.escape(told)}.*; end the name in .png, .svg or .pdf"):
            check(tmp_path / name)
    with pytest.raises(SystemExit) as done:
        printed(["sweep", "--batch", "1:65536", "--plot", "x.jpg"])
    assert done.value.code == 2


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(WorkError, match="cannot be written"):
        plots.plot(document("prediction"), tmp_path / "file" / "x.svg")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_drawing_that_fails_keeps_the_file_that_was_there(tmp_path):
    path = tmp_path / "x.svg"
    path.write_text("kept")
    with pytest.raises(ZeroDivisionError), picture(path, 2, 2):
        raise ZeroDivisionError
    assert path.read_text() == "kept"


def test_settings_of_the_program_around_stay(tmp_path):
    before = dict(mpl.rcParams)
    plots.plot(document("prediction"), tmp_path / "x.svg")
    assert dict(mpl.rcParams) == before


def test_what_lies_side_by_side_differs_without_colour():
    """Lines by marker and dash, components by hatch, so that a print in grey can be read; and by colour as well."""
    assert len({(line(i)["marker"], line(i)["linestyle"]) for i in range(8)}) == 8
    assert len(set(HATCHES)) == len(HATCHES) == len(COMPONENTS)
    assert len({filled(c)["hatch"] for c in COMPONENTS}) == len(COMPONENTS)
    assert len({to_rgb(filled(c)["facecolor"]) for c in COMPONENTS}) == len(COMPONENTS)
    assert len(set(MARKERS)) == 8
    assert len(set(LINES)) == 8


@pytest.mark.parametrize(
    "command", ["prediction", "sweep", "plan", "simulation", "validation", "hardware", "hardware diff"]
)
def test_every_command_with_something_to_show_takes_plot(command, tmp_path):
    """The document is the same with and without a picture, and the picture is there."""
    path = tmp_path / "picture.svg"
    assert printed([*COMMANDS[command], "--plot", str(path), "--json"]) == text_of(command)
    assert path.read_text().startswith("<?xml")
