"""docs/accuracy.md keeps its prose when the tables are made anew, and the peer's figures belong to shipped records."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from specsim.errors import InputError
from specsim.files import read_yaml
from specsim.replay import Pair, load

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy_page", ROOT / "benchmarks" / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_block_is_replaced_and_the_rest_stays(accuracy: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- begin one -->\nold\n<!-- end one -->\n\nAfter.\n")
    block = accuracy.Block("one", "One", ("| a |", "| --- |"))
    for _ in range(2):
        accuracy.write([block], page)
        assert page.read_text() == "Before.\n\n<!-- begin one -->\n\n| a |\n| --- |\n\n<!-- end one -->\n\nAfter.\n"
    with pytest.raises(InputError, match="has no markers of 'two'"):
        accuracy.write([accuracy.Block("two", "Two", ())], page)


def test_the_page_has_every_block() -> None:
    text = (ROOT / "docs" / "accuracy.md").read_text()
    for name in ("recorded", "held-out", "load", "published", "public", "healthy", "field", "peers"):
        assert text.count(f"<!-- begin {name} -->") == text.count(f"<!-- end {name} -->") == 1


def test_figures_by_hand(accuracy: ModuleType) -> None:
    """Errors +10 %, -20 %, 0; the interval holds two of three: median 10 %, worst -20 %, 67 %."""
    pairs = [Pair("a", "decode", 1, 1, o, 11, 9, 11) for o in (10, 13.75, 11)]
    assert accuracy.figures(pairs) == ["3", "10.0 %", "-20.0 %", "67 %"]
    table = accuracy.summary(pairs, lambda p: "graphs")
    assert table[2].endswith("| 3 %, 8 % | missed |")


def test_variants_hold_their_experts_in_four_bits(accuracy: ModuleType) -> None:
    for name in accuracy.VARIANTS:
        model = accuracy.variant(name)
        assert model.experts is not None
        assert model.experts.format.bits == 4
        assert 215e9 < model.weight_bytes < 250e9, name


def test_the_peers_figures_belong_to_shipped_records(accuracy: ModuleType) -> None:
    records, _ = load(ROOT / "validation")
    points = read_yaml(ROOT / "validation" / "peer_aiconfigurator.yaml")["points"]
    named = {row["record"] for row in points}
    assert named <= {record.name for record in records}
    for record in records:
        if record.name in named:
            assert all(accuracy._said(points, record.name, point) for point in record.points), record.name


def test_the_peers_formula(accuracy: ModuleType) -> None:
    """A chain of 3 steps over 32 layers: a decode step of 4 sequences times 35 / 32."""
    records, _ = load(ROOT / "validation")
    record = next(r for r in records if r.name == "llama8b-e3-s3")
    formula = accuracy.formula_ms(record, record.points[0])
    wide = accuracy._plain(accuracy.scenario_of(record, record.points[0], None), 4)
    assert formula == pytest.approx(accuracy.predict(wide, samples=0).decode_ms.value * 35 / 32)


def test_asking_the_peer(accuracy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the program, which knows decode steps only: 6.25 ms; nothing for a chain, and a tree is not asked."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setitem(sys.modules, "accuracy", accuracy)
    import peer_rows

    program = tmp_path / "program"
    program.write_text('#!/bin/sh\ncase "$*" in *nextn*) exit 1;; *) echo "  TPOT:             6.250 ms";; esac\n')
    program.chmod(0o755)
    records = {r.name: r for r in load(ROOT / "validation")[0]}

    def row(name: str) -> str | None:
        found: str | None = peer_rows.row(str(program), records[name], records[name].points[0])
        return found

    assert row("llama8b-base") == (
        "- {record: llama8b-base, batch: 1, context: 1104, tp: 1, nextn: 0, mode: SILICON, step_ms: 6.25}"
    )
    assert row("llama8b-e3-s3") is None
    assert row("llama8b-e3-tree") is None


def test_the_readme_says_what_the_page_shows() -> None:
    """Of the runs with fitted terms (no model's own run in its terms): decode and verify in graphs within 2.5 % in the median and
    7 % at worst, 36 % where all rows, or those of a request, chose the same experts, cycles, and eager steps and cycles, within 45 %; cycles on one GPU whose host was watched within 7 %."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = "decode and verify in CUDA graphs on calibrated H200s are within 2.5 % in the median and 7 % at worst (36 % where random weights send rows to the same experts); cycles that wait for the host, and eager steps and cycles, miss by up to 45 %; where the cores of the host were watched, cycles in graphs on one GPU are within 7 %"  # fmt: skip
    assert said in readme
    page = (ROOT / "docs" / "accuracy.md").read_text()
    block = page.split("<!-- begin held-out -->")[1].split("<!-- end held-out -->")[0].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]]
    seen = {
        (runs, phase): (float(median.split()[0]), float(worst.split()[0])) for runs, phase, _, median, worst, *_ in rows
    }
    for (runs, phase), (median, worst) in seen.items():
        if runs.startswith("graphs") and phase in ("decode", "verify"):
            apart = "in no fit" in runs
            assert median <= (16 if apart else 2.5), (runs, phase)
            assert abs(worst) <= (36 if apart else 7), (runs, phase)
        if runs.startswith("graphs") and phase == "cycle":
            assert abs(worst) <= 45, (runs, phase)
        if runs.startswith("eager") and phase in ("decode", "verify", "cycle"):
            assert abs(worst) <= 45, (runs, phase)
    assert abs(seen["graphs, one GPU, cores watched", "cycle"][1]) <= 7
    assert {phase for runs, phase in seen if runs == "eager"} >= {"decode", "verify", "cycle"}
