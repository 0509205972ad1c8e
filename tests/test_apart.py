"""What a run of whole servers cannot say about an engine's terms is known before any fit, from its profile and its scenario."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest

import specsim
from specsim.apart import set_aside, standing_apart
from specsim.commands.fit import command
from specsim.engine_fit import Case, Seen, cases_of
from specsim.errors import InputError
from specsim.models import Model
from specsim.prediction import machine_of
from specsim.profiles import OperatorRate, Profile, Source
from specsim.replay import load

VALIDATION = Path(__file__).parents[1] / "validation"
MEASURED = Source(kind="measured", reference="this box", date="2026")


def box(samples: dict[str, Any] | None = None, **kinds: str) -> Profile:
    """A calibrated box: all of it measured, but the classes named here, each of a kind of source."""
    plain = builders.profile()
    operators: dict[str, OperatorRate] = {}
    for name, rate in plain.operators.items():
        source = MEASURED.model_copy(update={"kind": kinds.get(name, "measured")})
        operators[name] = rate.model_copy(update={"source": source})
    curves = [c.model_copy(update={"source": MEASURED}) for c in plain.allreduce]
    return builders.profile(operators=operators, allreduce=curves, samples=samples or {})


def case(name: str, model: Model, profile: Profile, tp: int = 1, options: dict[str, Any] | None = None) -> Case:
    s = builders.scenario(model, tp=tp, box=profile, method="none", d=1, options=options or {}, batch=[1, 8],
                          context=[1000, 1000])  # fmt: skip
    blank = Case(name, model.name, s, machine_of(s), (), tuple(Seen("decode", place, 1.0, 0.02) for place in (0, 1)))
    times = blank.predicted({n: np.asarray(t.value) for n, t in s.engine.terms.items()})[:, 0]
    return replace(blank, seen=tuple(replace(b, ms=float(t)) for b, t in zip(blank.seen, times, strict=True)))


def test_what_a_calibrated_profile_has_from_elsewhere_is_no_ground_for_terms() -> None:
    """Tables for the experts' class: a run of a model with experts is set aside, a dense one's is not. Where the profile is of
    tables alone nothing is, since its terms are what makes up for them."""
    dense, experts = builders.dense(), builders.moe()
    mixed = box(moe_int4="published", attention_mla="published")
    found = set_aside([case("dense", dense, mixed), case("experts", experts, mixed)])
    assert list(found) == ["experts"]
    assert "round has moe_int4 from elsewhere" in found["experts"]
    assert set_aside([case("experts", experts, builders.profile())]) == {}
    assert set_aside([case("experts", experts, box())]) == {}
    lacking = box().model_copy(update={"operators": {n: r for n, r in box().operators.items() if n != "moe_int4"}})
    assert "moe_int4" in set_aside([case("experts", experts, lacking)])["experts"]


def test_an_all_reduce_from_a_table_counts_where_it_is_used() -> None:
    ours = box()
    tabled = [
        c.model_copy(update={"source": MEASURED.model_copy(update={"kind": "published"})}) for c in ours.allreduce
    ]
    tables = ours.model_copy(update={"allreduce": tabled})
    found = set_aside([case("one", builders.dense(), tables), case("two", builders.dense(), tables, tp=2)])
    assert list(found) == ["two"]
    assert "the all-reduce nccl" in found["two"]
    assert set_aside([case("two", builders.dense(), ours, tp=2)]) == {}


@pytest.mark.parametrize(
    ("rows", "tp", "aside"),
    [
        (["64 512 1", "128 768 1"], 1, False),  # both at an end of what was calibrated
        (["64 768 1", "128 768 1"], 1, True),  # narrower than any
        (["64 256 1"], 2, False),  # cut over two ranks: 64 of 256
        (["64 512 1"], 2, True),
        (["128 512 1"], 1, True),  # fewer than any
        (["torn"], 1, False),  # a profile without the sizes says nothing
        (["64 wide 1", "nan 768 1"], 1, False),  # nor one without their numbers
        ("64 768 1", 1, False),
        (None, 1, False),
    ],
)
def test_experts_are_held_against_the_sizes_that_were_calibrated(rows: Any, tp: int, aside: bool) -> None:
    """builders.moe: 64 experts of width 512."""
    samples = {"moe_int4": {"columns": "experts intermediate median_us", "rows": rows}}
    found = set_aside([case("experts", builders.moe(), box(samples), tp=tp)])
    assert bool(found) == aside
    if aside:
        assert f"64 experts of width {512 // tp} on a rank, and moe_int4 of round was calibrated at" in found["experts"]


def test_of_the_shipped_records_the_fit_sets_aside_what_calibration_never_saw() -> None:
    cases, _ = cases_of(load(VALIDATION)[0], engine="sglang")
    found = set_aside(cases)
    alike = found.pop("gpt-oss-20b-e3-s3-routed")
    assert alike.startswith("the rows of a request chose the same experts")
    assert all(why.startswith("all rows chose the same experts") for why in found.values())
    assert set(found) == {c.record for c in cases if c.record.startswith("gpt-oss") and "routed" not in c.record}


def test_of_several_ranks_the_timers_that_hold_waits_are_not_fitted() -> None:
    cases, _ = cases_of(load(VALIDATION)[0], engine="sglang")
    phases = {
        several: {s.phase for c in cases if (c.scenario.parallel.tp > 1) is several for s in c.seen}
        for several in (False, True)
    }
    assert phases[False] == {"decode", "draft", "verify", "extend", "cycle"}
    assert phases[True] == {"decode", "verify", "cycle"}


def test_a_record_that_no_other_agrees_with_is_told() -> None:
    """Nine runs as the terms say, one at twice the time: 1 / 2 - 1 = -50 %. Without graphs models differ by more, and a run at
    1.5 times the time is nothing to tell: ln 1.5 = 0.41 is within 2 x 0.25."""
    cases = [case(f"run{n}", builders.dense(4 + n), box()) for n in range(10)]
    terms = {n: np.asarray(t.value) for n, t in cases[0].scenario.engine.terms.items()}
    assert standing_apart(cases, terms) == {}
    slow = replace(cases[3], seen=tuple(replace(s, ms=2 * s.ms) for s in cases[3].seen))
    assert standing_apart([*cases[:3], slow, *cases[4:]], terms) == {"run3": pytest.approx(-0.5)}
    eager = [case(f"run{n}", builders.dense(4 + n), box(), options={"disable_cuda_graph": True}) for n in range(3)]
    slow = replace(eager[0], seen=tuple(replace(s, ms=1.5 * s.ms) for s in eager[0].seen))
    assert standing_apart([slow, *eager[1:]], terms) == {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copies of a record that says something about terms, and of one that does not."""
    for name in ("llama8b-e3-s3-ctx", "gpt-oss-20b-base"):
        (tmp_path / f"{name}.json").write_text((VALIDATION / f"{name}.json").read_text())
    return tmp_path


def test_the_command_tells_what_it_sets_aside(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--records", str(folder), "--terms", "draft_step"]
    command.main(line, standalone_mode=False)
    shown = capsys.readouterr().out
    assert "set aside gpt-oss-20b-base: all rows chose the same experts" in shown
    assert "\nset aside  decode" in shown  # predicted all the same
    command.main([*line, "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    assert document["records"] == ["llama8b-e3-s3-ctx"]
    assert [entry["record"] for entry in document["set_aside"]] == ["gpt-oss-20b-base"]
    assert document["held_out"][0]["records"] == ["gpt-oss-20b-base"]
    both = specsim.fit(folder, terms=["draft_step"], include=["gpt-*"])
    assert both.set_aside == {}
    assert len(both.fit.records) == 2


def test_nothing_left_to_fit_is_one_line(folder: Path) -> None:
    with pytest.raises(InputError, match=r"no record says anything about the terms \(gpt-oss-20b-base: all rows chose"):
        specsim.fit(folder / "gpt-oss-20b-base.json")
    with pytest.raises(InputError, match=r"no record that is set aside matches 'llama\*'.*gpt-oss"):
        specsim.fit(folder, include=["llama*"])
