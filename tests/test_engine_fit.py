"""The fit recovers terms that made the observations, leaves alone what it cannot see, and says which run would show it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders
import numpy as np
import pytest

from specsim import engine_fit
from specsim.apart import set_aside
from specsim.commands.fit import command
from specsim.engine_fit import (
    EAGER_SPREAD,
    FLOOR,
    LOWEST,
    MODEL_SPREAD,
    Case,
    Seen,
    cases_of,
    fit,
    leave_one_out,
    priors,
    split,
    summary,
    with_terms,
)
from specsim.engines import load_engine
from specsim.errors import InputError
from specsim.fit_runs import RUNS, needed
from specsim.fitted import fit as fitted_to
from specsim.machine import build
from specsim.models import Model
from specsim.prediction import machine_of
from specsim.profiles import dump_profile, load_profile, parse_profile
from specsim.replay import load

ROOT = Path(__file__).parents[1]
TRUE = {"row_layer_us": 0.09, "verify_layer_us": 7.0, "draft_step_us": 5.0, "allreduce_skew_us": 3.5, "cycle_host_us": 340.0,
        "cycle_cpu_us": 6500.0, "eager_factor": 5.0}  # fmt: skip


def synthetic(
    models: Sequence[Model], batches: Sequence[int] = (1, 8, 32, 64), eager: bool = True, tps: Sequence[int] = (1, 2)
) -> list[Case]:
    """Observations that specsim itself makes with the terms TRUE, each said to be known to 0.5 %: each model without
    speculation and with EAGLE-3 of 2 and 3 steps, in graphs and eagerly, on one rank and two."""
    cases = []
    for model, tp, d in itertools.product(models, tps, (1, 3, 4)):
        for options in ({}, {"disable_cuda_graph": True}) if eager else ({},):
            method = "eagle3" if d > 1 else "none"
            s = builders.scenario(
                model, tp=tp, d=d, batch=batches, context=[1000] * len(batches), method=method, options=options
            )
            phases = ("draft", "verify", "extend", "cycle") if d > 1 else ("decode",)
            blank = tuple(Seen(phase, place, 1.0, 0.005) for place in range(len(batches)) for phase in phases)
            case = Case(f"{model.name}-{tp}-{d}", model.name, s, machine_of(s), (), blank)
            times = case.predicted({n: np.asarray(v) for n, v in TRUE.items()})[:, 0]
            seen = tuple(replace(b, ms=float(t)) for b, t in zip(blank, times, strict=True))
            cases.append(replace(case, seen=seen))
    return cases


def scaled(case: Case, factor: float) -> Case:
    return replace(case, seen=tuple(replace(s, ms=factor * s.ms) for s in case.seen))


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return synthetic([builders.dense(32), builders.moe(24)])


def test_known_terms_are_recovered(cases: list[Case]) -> None:
    """Each within 2.5 of its own errors, known better than before, and all observations within 1 % in the median."""
    fitted = fit(cases, list(TRUE))
    assert {t.name for t in fitted.terms} == set(TRUE)
    for term in fitted.terms:
        assert abs(term.value - TRUE[term.name]) < 2.5 * term.error, term
        assert abs(term.value - TRUE[term.name]) < 0.5 * abs(term.prior - TRUE[term.name]), term
        assert term.error < term.prior_error
        assert 0.5 <= term.share <= 1
    assert fitted.noise == pytest.approx(1, abs=0.1)
    np.testing.assert_allclose(np.diag(fitted.correlations), 1)
    for phase, before in fitted.before.items():
        after = fitted.after[phase]
        assert after["n"] == before["n"]
        assert after["median_abs_error"] < min(0.012, before["median_abs_error"] + 1e-3), phase


def test_stated_errors_hold_what_they_say() -> None:
    """Sixteen worlds whose terms, models and clocks differ by what the fit assumes: of all its 80 % intervals about 80 % hold the true
    value. Terms of one world are not independent, so that a world more or less off moves the share by
    a hundredth or two, and sixteen may be off by a tenth."""
    rng = np.random.default_rng(11)
    blank = [replace(c, seen=tuple(replace(s, error=FLOOR) for s in c.seen))
             for c in synthetic([builders.dense(32), builders.moe(24), builders.dense(16, 2048)], batches=(1, 64), tps=(1,))]  # fmt: skip
    prior = priors(blank[0].scenario.engine)
    held: list[bool] = []
    for _ in range(16):
        true = {n: max(value + spread * rng.normal(), LOWEST.get(n, 0.0)) for n, (value, spread) in prior.items()}
        own: dict[tuple[str, bool], float] = {}
        seen = []
        for c in blank:
            factor = own.setdefault((c.model, c.eager), rng.normal() * (EAGER_SPREAD if c.eager else MODEL_SPREAD))
            times = c.predicted({n: np.asarray(v) for n, v in true.items()})[:, 0]
            noisy = times * np.exp(factor + FLOOR * rng.normal(size=len(times)))
            seen.append(replace(c, seen=tuple(replace(s, ms=float(t)) for s, t in zip(c.seen, noisy, strict=True))))
        held += [abs(t.value - true[t.name]) < 1.2816 * t.error for t in fit(seen).terms]
    assert len(held) > 50
    assert 0.7 < np.mean(held) < 0.9


def test_a_second_valley_about_as_likely_is_in_the_error() -> None:
    """Searches end at 0, beside it, at 2 with a third of its likelihood, and at 9 with next to none: a variance of 2 x 2 / 4 around 0."""
    ends = [(0.01, 1.2), (9.0, 9.0), (2.0, 1 + np.log(3)), (0.0, 1.0)]
    results = [SimpleNamespace(x=np.array([x]), cost=cost) for x, cost in ends]
    valleys = engine_fit._valleys(results)
    assert [place.tolist() for place, _ in valleys] == [[0.0], [2.0]]
    assert engine_fit._between(valleys, np.array([0.0])) == pytest.approx(np.array([[1.0]]))
    assert engine_fit._between(valleys[:1], np.array([0.0])) == pytest.approx(np.zeros((1, 1)))


def test_an_outlier_hardly_counts(cases: list[Case]) -> None:
    clean = {t.name: t for t in fit(cases, list(TRUE)).terms}
    wild = scaled(cases[0], 3)
    for term in fit([wild, *cases[1:]], list(TRUE)).terms:
        assert abs(term.value - clean[term.name].value) < 1.5 * clean[term.name].error, term.name


def test_terms_that_no_record_shows_stay_and_the_run_is_named() -> None:
    """One rank, in graphs, batch 1: nothing about all-reduces, ranks or eager launches. The cycles are shorter than the
    host's own work, so that is seen."""
    few = synthetic([builders.dense(32)], batches=(1,), eager=False, tps=(1,))
    with pytest.raises(InputError, match=r"eager_factor: the records do not identify it.*--disable-cuda-graph"):
        fit(few, ["draft_step", "eager_factor"])
    fitted = fit(few)
    assert {"allreduce_skew_us", "rank_cpu_us", "eager_factor", "tree_cpu_us", "row_layer_us"} <= set(fitted.left)
    assert "--tp 2" in fitted.left["allreduce_skew_us"]
    assert "batch 32" in fitted.left["row_layer_us"]
    assert not set(fitted.left) & {t.name for t in fitted.terms}
    with pytest.raises(InputError, match="no engine term 'warp'"):
        fit(few, ["warp"])
    with pytest.raises(InputError, match="names no term"):
        fit(few, [])


def test_every_term_names_the_run_that_shows_it() -> None:
    prior = priors(builders.scenario().engine)
    assert set(RUNS) == set(prior)
    assert all(spread > 0 for _, spread in prior.values())


@pytest.mark.parametrize(
    ("names", "held"),
    [
        (["llama8b-base"], {"row_layer_us", "decode_host_us"}),
        (["llama8b-base-eager"], {"decode_cpu_us", "eager_factor"}),
        (["llama8b-base", "llama8b-e3-s3", "qwen3-30b-a3b-base", "llama8b-base-eager", "qwen3-30b-a3b-base-eager"],
         {"kernel_gap_us", "row_layer_us", "verify_layer_us", "draft_step_us", "decode_host_us", "cycle_host_us", "decode_cpu_us",
          "eager_factor", "eager_experts"}),
        (["llama8b-tp2-e3-s3", "llama8b-e3-tree", "llama8b-ngram-d4", "llama8b-e3-s3-no-overlap", "llama8b-e3-s3-eager"],
         {"allreduce_skew_us", "tree_step_us", "ngram_host_us", "ngram_sequence_us", "ngram_verify_us",
          "serial_cpu_us", "cycle_cpu_us", "draft_step_us", "cycle_host_us", "eager_factor", "eager_gap_us", "row_layer_us"}),
    ],
)  # fmt: skip
def test_a_run_that_the_records_hold_is_not_asked_for(names: list[str], held: set[str]) -> None:
    """Where a term is not known though such a run is there, more of its kind are needed, and that is said."""
    records = [load(ROOT / "validation" / f"{name}.json")[0][0] for name in names]
    cases = cases_of(records)[0]
    assert {term for term in RUNS if needed(term, cases).startswith("more records, or steadier ones")} == held
    assert needed("prefill_host_us", cases) == "runs under load; steady runs say nothing about prefills"


def test_held_out_records_have_no_say() -> None:
    cases = synthetic([builders.dense(32), builders.moe(24)], batches=(1, 32), eager=False, tps=(1,))
    kept, out = split(cases, ["moe-*"])
    assert {c.record.split("-")[0] for c in kept} == {"dense"}
    assert {c.record.split("-")[0] for c in out} == {"moe"}
    spoilt = [scaled(c, 9) for c in out]
    held = leave_one_out([*kept, *spoilt])
    assert {h.name.split("-")[0] for h in held} == {"dense", "moe"}
    fitted = next(h for h in held if h.name.startswith("moe"))
    assert fitted.fit.records == tuple(dict.fromkeys(c.record for c in kept))
    assert fitted.after == summary(spoilt, fitted.fit.values)
    assert fitted.after["verify"]["worst_error"] < -0.8
    with pytest.raises(InputError, match="no record matches 'qwen'"):
        split(cases, ["qwen"])
    with pytest.raises(InputError, match="every record"):
        split(cases, ["*"])
    with pytest.raises(InputError, match="one model"):
        leave_one_out(kept)


def test_shipped_records_make_cases() -> None:
    records, _ = load(ROOT / "validation")
    cases, skipped = cases_of(records, engine="sglang")
    assert skipped == []
    models = engine_fit.by_model(cases)
    assert {"kimi-rank8", "llama8b", "qwen3-30b-a3b"} <= set(models)
    assert all(s.error >= engine_fit.FLOOR for case in cases for s in case.seen)
    eager = [c for c in cases if c.record.endswith("eager")]
    assert eager
    assert all(c.eager for c in eager)


def test_the_shipped_terms_are_what_the_fit_finds() -> None:
    """From priors that no run has touched, to the runs that the description names: a third of an error at most away. The runs
    are all those kept but what a fit sets aside."""
    engine = load_engine("sglang")
    cases, _ = cases_of(load(ROOT / "validation")[0], engine="sglang")
    aside = set_aside(cases)
    kept, out = ([c for c in cases if (c.record in aside) == is_out] for is_out in (False, True))
    assert {c.record for c in kept} == set(engine.fitted_to)
    fitted = fit(kept)
    for term in fitted.terms:
        shipped, before = engine.terms[term.name], engine.terms[term.name].before
        assert before is not None
        assert (term.prior, before.source.split()[0]) != (shipped.value, "fitted")
        assert abs(term.value - shipped.value) < term.error / 3, term
    assert {n for n, t in engine.terms.items() if "specsim fit" in t.source} == {t.name for t in fitted.terms}
    assert priors(engine, [c.record for c in out]) == priors(
        engine
    )  # runs that no term has seen: the shipped ones help


def test_an_engine_that_no_record_is_of_is_named() -> None:
    with pytest.raises(InputError, match="no record is of vllm; they are of sglang"):
        cases_of(load(ROOT / "validation" / "llama8b-base.json")[0], engine="vllm")


def test_phases_that_a_scenario_lacks_are_left_out() -> None:
    """One step drafts its only token in the extend: there is no draft pass to compare with, whatever the record says."""
    records, _ = load(ROOT / "validation" / "llama8b-e3-s3-ctx.json")
    record = records[0].model_copy(deep=True)
    assert record.engine is not None
    flags = record.engine.flags
    flags[flags.index("--speculative-num-steps") + 1] = "1"
    (case,), _ = cases_of([record])
    assert {s.phase for s in case.seen} == {"verify", "extend", "cycle"}
    with pytest.raises(InputError, match="no record holds the time of a step at a batch"):
        cases_of(load(ROOT / "validation" / "llama8b-base-load.json")[0])
    engine = record.engine.model_copy(update={"name": "other"})
    with pytest.raises(InputError, match="no record says that SGLang or vLLM ran"):
        cases_of([record.model_copy(update={"engine": engine})])


def test_a_copy_of_a_record_is_believed_once(folder: Path) -> None:
    once = fitted_to(folder)
    for name in ("llama8b-e3-s3", "llama8b-e3-s3-ctx"):
        (folder / f"{name}-copy.json").write_text((folder / f"{name}.json").read_text())
    twice = fitted_to(folder)
    assert [t.name for t in twice.fit.terms] == [t.name for t in once.fit.terms]
    for a, b in zip(twice.fit.terms, once.fit.terms, strict=True):
        assert (a.value, a.error) == pytest.approx((b.value, b.error), rel=1e-6)
    names = ("llama8b-e3-s3", "llama8b-e3-s3-ctx")
    assert set(twice.left_out) == {f"{name}: is a copy of the run {name}, which counts once" for name in names}


def test_a_point_that_no_server_could_run_is_left_out_alone() -> None:
    """Whichever point it is: its neighbours stay."""
    record = load(ROOT / "validation" / "llama8b-e3-s3-ctx.json")[0][0]
    for place in (0, 2):
        for key, value in (("batch", -4), ("batch", 10**15), ("context", -4)):
            points = [p.model_copy(update={key: value}) if i == place else p for i, p in enumerate(record.points)]
            (case,), skipped = cases_of([record.model_copy(update={"points": points})])
            assert len({s.place for s in case.seen}) == len(points) - 1
            assert np.all(case.scenario.batch >= 1)
            assert len(skipped) == 1
            assert "out of range" in skipped[0]


def test_records_of_another_gpu_than_the_profiles_are_told(folder: Path) -> None:
    content = json.loads((folder / "llama8b-e3-s3.json").read_text())
    assert fitted_to(folder).warnings == ()
    content["environment"]["gpu"] = "NVIDIA A100-SXM4-80GB"
    (folder / "llama8b-e3-s3.json").write_text(json.dumps(content))
    found = fitted_to(folder)
    assert found.warnings == ("measured on NVIDIA A100-SXM4-80GB, predicted on 1x-h200: llama8b-e3-s3",)
    assert found.json()["warnings"] == list(found.warnings)
    assert found.warnings[0] in str(found)


def test_a_fit_that_fails_says_what_it_could_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text((ROOT / "validation" / "llama8b-base.json").read_text())
    (tmp_path / "cut.json").write_text('{"schema": "specsim.record/1", "kind"')
    with pytest.raises(InputError, match=r"identify no term \(1 left out, the first: .*cut\.json, line 1"):
        fitted_to(tmp_path)


def run(*arguments: str) -> Any:
    return command.main(list(arguments), standalone_mode=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copies of a few short records."""
    for name in ("llama8b-base", "llama8b-e3-s3", "llama8b-e3-s3-ctx", "qwen3-30b-a3b-e3-s3"):
        (tmp_path / f"{name}.json").write_text((ROOT / "validation" / f"{name}.json").read_text())
    return tmp_path


def test_the_command_writes_a_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out.yaml"
    run("--records", str(folder), "--hold-out", "qwen*", "-o", str(out), "--json")
    document = json.loads(capsys.readouterr().out)
    assert all(type(phase["n"]) is int for phase in document["before"].values())
    assert document["schema"] == "specsim.fit/1"
    assert document["held_out"][0]["records"] == ["qwen3-30b-a3b-e3-s3"]
    assert "qwen3-30b-a3b-e3-s3" not in document["records"]
    group = load_profile(str(out)).engines["sglang"]
    assert group.source.kind == "fitted"
    assert "llama8b-base" in group.source.reference
    assert "qwen" not in group.source.reference
    for term in document["terms"]:
        assert getattr(group, term["name"]) == pytest.approx(term["value"], rel=1e-3)
    assert 0 < group.relative_uncertainty < 1


def test_the_command_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--records", str(folder), "--leave-one-out")
    shown = capsys.readouterr().out
    assert "verify_layer" in shown
    assert "eager_factor stays at its prior" in shown
    assert "qwen3-30b-a3b" in shown
    with pytest.raises(InputError, match="needs a run with --tp 2 or more"):
        run("--records", str(folder), "--terms", "allreduce_skew")


def test_profiles_of_several_boxes_need_a_choice(folder: Path) -> None:
    name = "llama8b-tp2-e3-s3"
    (folder / f"{name}.json").write_text((ROOT / "validation" / f"{name}.json").read_text())
    with pytest.raises(InputError, match=r"1x-h200, 2x-h200.*--hardware"):
        run("--records", str(folder), "-o", str(folder / "out.yaml"))


def test_a_fitted_term_is_no_surer_than_models_differ(cases: list[Case]) -> None:
    """`verify_layer`, fitted to 1 %, keeps the description's spread between models; terms that were not fitted keep theirs. The
    machine spreads each by its own."""
    profile = with_terms(builders.profile(), fit(cases, ["verify_layer", "eager_factor"]), "2026-01-02")
    group = parse_profile(dump_profile(profile), "test").engines["sglang"]
    engine = load_engine("sglang")
    described = {name: term.relative_uncertainty for name, term in engine.terms.items()}
    assert group.uncertainties["verify_layer_us"] == described["verify_layer_us"]
    assert set(group.uncertainties) == {"verify_layer_us", "eager_factor"}
    machine = build(profile, engine, samples=4000)
    for name in ("verify_layer_us", "eager_factor", "row_layer_us"):
        own, drawn = group.uncertainties.get(name, described[name]), machine.terms[name.removesuffix("_us")]
        assert np.std(drawn[1:]) / drawn[0] == pytest.approx(own, rel=0.05)
    with pytest.raises(InputError, match="draft_step_us has no value here"):
        parse_profile(dump_profile(profile).replace("verify_layer_us: 0.2", "draft_step_us: 0.2"), "test")


def test_fitted_terms_go_into_the_profile_beside_its_others(cases: list[Case]) -> None:
    fitted = fit(cases, ["eager_factor"])
    once = with_terms(builders.profile(), fitted, "2026-01-02")
    twice = with_terms(once, fit(cases, ["eager_factor", "draft_step"]), "2026-01-03")
    group = parse_profile(dump_profile(twice), "test").engines["sglang"]
    assert group.draft_step_us is not None
    assert group.eager_factor == pytest.approx(5, rel=0.1)
    assert group.source.date == "2026-01-03"
