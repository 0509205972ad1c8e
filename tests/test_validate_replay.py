"""Replay of records: arithmetic of errors and coverage by hand, with a stub predictor; then the shipped records."""

from __future__ import annotations

import fnmatch
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specsim import replay
from specsim.cli import group
from specsim.commands.validate import command
from specsim.engines import load_engine
from specsim.errors import InputError
from specsim.profiles import load_profile
from specsim.records import Correction, EngineRun, Point, Quantity, Record
from specsim.replay import Interval, compare, load, observed, predict_point

ROOT = Path(__file__).parents[1]
CONFIG = {"model_type": "llama"}


def record(name: str, points: list[Point], flags: list[str] | None = None, **more: Any) -> Record:
    engine = EngineRun(name="sglang", flags=flags or [])
    return Record(
        kind="validation", name=name, date="2026-01-01", engine=engine, target_config=CONFIG, points=points, **more
    )


def decode(batch: int, ms: float, context: int = 1000) -> Point:
    return Point(batch=batch, context=context, decode_ms=Quantity(value=ms), tokens_per_cycle=1)


def cycle(batch: int, ms: float, context: int = 1100) -> Point:
    return Point(
        batch=batch, context=context, cycle_ms=Quantity(value=ms), verify_ms=Quantity(value=ms - 2), tokens_per_cycle=2
    )


def stub(record: Record, point: Point, hardware: Any) -> dict[str, Interval]:
    """Always 10 ms with 9 to 11; break-even 1.5."""
    ten = (10.0, 9.0, 11.0)
    return {"decode": ten, "verify": ten, "cycle": ten, "host": ten, "break_even": (1.5, 1.4, 1.6)}


def test_errors_and_coverage_by_hand() -> None:
    """Decode observed 8, 10 and 20: errors +25 %, 0, -50 %; median 25 %, worst -50 %, one of three in 9..11."""
    pairs, skipped = compare([record("a", [decode(1, 8), decode(2, 10), decode(4, 20)])], None, stub)
    result = replay.Result(tuple(pairs))
    assert skipped == []
    assert [p.observed for p in result.pairs] == [20, 8, 10]  # worst first
    assert result.summary() == {
        "decode": {"n": 3, "median_abs_error": 0.25, "worst_error": -0.5, "interval_coverage": 0.3333}
    }
    assert result.over(None) == []
    assert result.over(0.3) == []
    assert result.over(0.2) == ["decode: median error 25.0% is over 20.0%"]


def test_host_time_is_judged_as_a_part_of_its_step() -> None:
    """Host 0.01 ms of a decode of 8 where 10 is predicted: 1,000 times as long, and 9.99 / 8 = 125 % of the step. It is in the
    table of phases as that, and not among the worst, which the decode leads with 10 / 8 = +25 %."""
    point = decode(1, 8)
    point.host_ms = Quantity(value=0.01)
    (host, other), _ = compare([record("a", [point])], None, stub)
    assert (host.phase, host.of_step) == ("host", pytest.approx(9.99 / 8))
    assert (other.phase, other.of_step) == ("decode", pytest.approx(0.25))
    rate = replace(other, phase="tokens_per_s", observed=125.0, predicted=100.0)  # the same step, the other way round
    shown = str(replay.Result((host, other, rate)))
    phases, worst = shown.split("worst first, without host and tokens_per_s (the steps say it)\n")
    assert "host, of the step  1        124.9%" in phases
    assert "host" not in worst
    assert "+25.0%" in worst
    assert "tokens_per_s" not in worst
    alone = str(replay.Result((rate,)))
    assert "tokens_per_s" in alone.split("worst first\n")[1]


def test_host_time_of_plain_decoding_has_an_interval() -> None:
    """The engine's term on cores as slow as the profile's, known to 75 %: an 80 % interval of nearly 0.96 of it to each side, above 0."""
    records, _ = load(ROOT / "validation" / "llama8b-base.json")
    value, low, high = predict_point(records[0], records[0].points[0], None)["host"]
    terms, host = load_engine("sglang").terms, load_profile("1x-h200").host
    assert host is not None
    assert terms["decode_host_us"].relative_uncertainty == 0.75
    slow = 1 + terms["host_slowing"].value * (host.slowdown() - 1)
    assert value == pytest.approx(terms["decode_host_us"].value / 1e3 * slow)
    assert 0 <= low < 0.25 * value
    assert 1.6 * value < high < 2.3 * value


def test_a_point_is_predicted_on_cores_as_slow_as_they_were() -> None:
    """An eager step, all launches: on cores whose loop takes twice as long 1 + host_slowing times what it takes on cores of its own,
    whatever the profile says; of the slower of two ranks already. In graphs next to nothing changes."""

    def step(name: str, slowdown: Quantity | None) -> tuple[float, float, float]:
        (read,), _ = load(ROOT / "validation" / f"{name}.json")
        read = read.model_copy(
            update={"environment": {k: v for k, v in read.environment.items() if k != "host_loop_us"}}
        )
        return predict_point(read, read.points[0].model_copy(update={"host_slowdown": slowdown}), None)["decode"]

    own, twice = (Quantity(value=v, low=v, high=v) for v in (1.0, 2.0))
    slowing = load_engine("sglang").terms["host_slowing"].value
    for name in ("llama8b-base-eager", "qwen3-30b-a3b-tp2-base-eager"):
        assert step(name, twice)[0] == pytest.approx(step(name, own)[0] * (1 + slowing), rel=1e-3)
    assert step("llama8b-base", twice)[0] == pytest.approx(step("llama8b-base", own)[0], rel=0.01)
    # A host whose best core takes twice as long as those of the hosts that launches were calibrated on is twice as slow throughout.
    (read,), _ = load(ROOT / "validation" / "llama8b-base-eager.json")
    other = read.model_copy(update={"environment": {**read.environment, "host_loop_us": 2 * replay.OWN_CORE_US}})
    seen = other.points[0].model_copy(update={"host_slowdown": own})
    assert predict_point(other, seen, None)["decode"] == step("llama8b-base-eager", twice)
    # What cannot be is as good as nothing: cores faster than the fastest, an interval that ends before it begins, a loop of no time.
    for strange in (Quantity(value=0.2), Quantity(value=1.0, low=3.0, high=-2.0)):
        assert step("llama8b-base-eager", strange) == step("llama8b-base-eager", own)
    for loop_us in ("fast", -1, 0, math.nan, math.inf):
        odd = read.model_copy(update={"date": "today", "environment": {**read.environment, "host_loop_us": loop_us}})
        assert predict_point(odd, seen, None)["decode"] == step("llama8b-base-eager", own)
    assert step("llama8b-base-eager", Quantity(value=1e6))[0] > 1e5 * step("llama8b-base-eager", own)[0]
    # A look that is less certain makes a wider interval; cores that nobody looked at, one wider still.
    wide = step("llama8b-base-eager", Quantity(value=2.0, low=1.4, high=2.6))
    narrow = step("llama8b-base-eager", twice)
    assert wide[2] - wide[1] > 1.1 * (narrow[2] - narrow[1])


def test_a_file_that_cannot_be_read_does_not_pass_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One whole record and a torn one: told, in the JSON too, and an exit code of 1 where a limit is given."""

    def ended(*more: str) -> int:
        return int(command.main(["--records", str(tmp_path), "--json", *more], standalone_mode=False))

    whole = (ROOT / "validation" / "llama8b-e3-s3-ctx.json").read_text()
    (tmp_path / "whole.json").write_text(whole)
    assert ended("--fail-over", "50%") == 0
    capsys.readouterr()
    (tmp_path / "torn.json").write_text(whole[: len(whole) // 2])
    assert ended("--fail-over", "50%") == 1
    said = capsys.readouterr()
    assert "torn.json" in json.loads(said.out)["unreadable"][0]
    assert "left out: " in said.err
    assert "not judged: 1 of the files, which cannot be read" in said.err
    assert ended() == 0


def test_a_record_of_another_gpu_than_the_profiles_is_said() -> None:
    """Of an H200, which a driver may call by its memory too, predicted on the profiles of both."""
    record = ROOT / "validation" / "llama8b-base.json"
    assert replay.run(record, "1x-h200-published").warnings == ()
    found = replay.run(record, "8x-l40s")
    assert found.warnings == ("measured on NVIDIA H200 141GB, predicted on 8x-l40s: llama8b-base",)
    assert found.json()["warnings"] == list(found.warnings)
    assert f"note: {found.warnings[0]}" in str(found)


def test_break_even_needs_the_same_server_without_speculation() -> None:
    """Cycle 15 over decode 10 at the same batch and nearly the same context: 1.5, as predicted."""
    base, spec = (
        record("base", [decode(1, 10)]),
        record("spec", [cycle(1, 15), cycle(2, 15), cycle(1, 15, context=9000)]),
    )
    pairs, _ = compare([base, spec], None, stub)
    even = [p for p in pairs if p.phase == "break_even"]
    assert [(p.batch, p.observed, p.error) for p in even] == [(1, 1.5, 0.0)]
    other = record("base", [decode(1, 10)], ["--disable-cuda-graph"])
    pairs, _ = compare([other, spec], None, stub)
    assert not [p for p in pairs if p.phase == "break_even"]


def test_what_was_observed() -> None:
    point = cycle(1, 15)
    point.tokens_per_s = Quantity(value=133.3)
    assert observed(point) == {"cycle": 15, "verify": 13, "tokens_per_s": 133.3}


def test_points_that_cannot_be_predicted_are_named() -> None:
    def refuses(record: Record, point: Point, hardware: Any) -> dict[str, Interval]:
        raise InputError("names no hardware profile", mend="give --hardware")

    pairs, skipped = compare([record("a", [decode(1, 8)])], None, refuses)
    assert pairs == []
    assert skipped == ["a batch 1 context 1000: names no hardware profile; give --hardware"]


def test_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(record("a", [decode(1, 8)]).model_dump_json(by_alias=True))
    (tmp_path / "a.kernels.json").write_text('{"of": "a"}')
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "typo.json").write_text('{"schema": "specsim.record/1", "kind": "validation", "nam": 1}')
    (tmp_path / "cal.json").write_text(
        json.dumps({"schema": "specsim.record/1", "kind": "calibration", "name": "c", "date": "2026"})
    )
    records, skipped = load(tmp_path)
    assert [r.name for r in records] == ["a"]
    assert len(skipped) == 2


def test_a_copy_of_a_run_counts_once_and_two_runs_of_a_name_are_two(tmp_path: Path) -> None:
    """b is a's copy under another name; the second file of the name a is another run."""
    runs = [
        record("a", [decode(1, 8)]),
        record("b", [decode(1, 8)]),
        record("a", [decode(1, 9)]),
        record("a", [decode(1, 7)]),
    ]
    for i, run in enumerate(runs):
        (tmp_path / f"{i}.json").write_text(run.model_dump_json(by_alias=True))
    kept, lines = replay.distinct(load(tmp_path)[0])
    assert [r.name for r in kept] == ["a", "a (2)", "a (3)"]
    assert lines == ["b: is a copy of the run a, which counts once"]
    source = (ROOT / "validation" / "llama8b-base.json").read_text()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.json").write_text(source)
    (tmp_path / "there" / "copy.json").write_text(source)
    once, twice = (replay.run(tmp_path / name) for name in ("here", "there"))
    assert once.summary() == twice.summary()
    assert len(twice.skipped) == 1
    assert twice.over(1.0) == []  # a copy is no file that cannot be read


def test_points_left_out_for_one_reason_are_one_line() -> None:
    def refuses(record: Record, point: Point, hardware: Any) -> dict[str, Interval]:
        raise InputError("names no hardware profile", mend="give --hardware")

    _, skipped = compare([record("a", [decode(1, 8), decode(2, 8), Point(decode_ms=Quantity(value=1))])], None, refuses)
    assert skipped == [
        "a 2 points: names no hardware profile; give --hardware",
        "a batch None context None: does not say how many requests ran",
    ]


def test_observed_records_replay_with_a_model(tmp_path: Path) -> None:
    """What `observe` reads from a log has no config.json: one line says so, the other record goes on; --model mends it."""
    bare, own = record("log", [decode(1, 4.8), decode(4, 5.0)]), record("own", [decode(1, 4.8)])
    bare.target_config = None
    own.target_config = json.loads((ROOT / "validation" / "configs" / "llama-3.1-8b.json").read_text())
    for r in (bare, own):
        (tmp_path / f"{r.name}.json").write_text(r.model_dump_json(by_alias=True, exclude_none=True))
    result = replay.run(tmp_path, "1x-h200")
    assert {p.record for p in result.pairs} == {"own"}
    assert result.skipped == ("log (no source): does not hold its model; give --model",)
    result = replay.run(tmp_path, "1x-h200", model=Path("Llama-3.1-8B"))
    assert len(result.of("decode")) == 3
    assert result.skipped == ()
    (tmp_path / "own.json").unlink()
    with pytest.raises(InputError, match=r"no point could be predicted; log .* give --model"):
        replay.run(tmp_path, "1x-h200")


@pytest.mark.parametrize("content", [None, "{}", "[]", '{"schema": "specsim.record/1"}'])
def test_nothing_to_replay(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError):
        load(path)
    if content is not None:
        with pytest.raises(InputError, match="holds no record"):
            load(tmp_path)


def test_shipped_records_are_predicted_in_every_phase() -> None:
    """The four runs in validation/, offline: each point has a prediction, and no judged phase is far off."""
    result = replay.run(ROOT / "validation", None)
    assert result.skipped == ()
    summary = result.summary()
    assert {"decode", "draft", "verify", "cycle", "tokens_per_s", "break_even"} <= set(summary)
    assert result.over(0.15) == []
    for pair in result.pairs:
        assert pair.low <= pair.predicted <= pair.high


def test_a_correction_is_added_to_the_passes_that_it_slowed_down() -> None:
    """Kimi-K2.5's rank has 60 MoE layers: 11 us each are 0.66 ms, on decode and verify and so on the cycle."""
    path = ROOT / "validation" / "kimi-rank8-e3-s2.json"
    with_it = Record.model_validate(json.loads(path.read_text()))
    without = with_it.model_copy(update={"corrections": []})
    a, b = (predict_point(r, r.points[0], None) for r in (with_it, without))
    added = {phase: a[phase][0] - b[phase][0] for phase in ("decode", "draft", "verify", "cycle", "host")}
    assert added == pytest.approx({"decode": 0.66, "draft": 0, "verify": 0.66, "cycle": 0.66, "host": 0})
    eager = with_it.model_copy(deep=True)
    assert eager.engine is not None
    eager.engine.flags.append("--disable-cuda-graph")
    eager.corrections = [Correction(what="x", kernels_per_moe_layer=8, us_per_moe_layer=0)]
    bare = eager.model_copy(update={"corrections": []})
    assert (
        predict_point(eager, eager.points[0], None)["verify"][0]
        > predict_point(bare, bare.points[0], None)["verify"][0]
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str, name: str = "") -> tuple[Any, str]:
        records = str(ROOT / "validation" / name)
        code = group.main(["validate", "--records", records, *arguments], standalone_mode=False)
        return code, capsys.readouterr().out

    plot, few = tmp_path / "plot.svg", tmp_path / "few"
    few.mkdir()
    for name in ("llama8b-base", "llama8b-e3-s3", "qwen3-8b-tp2-base"):
        shutil.copy(ROOT / "validation" / f"{name}.json", few)
    code, out = run("--json", "--plot", str(plot), "--fail-over", "50%", name=str(few))
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "specsim.validation/1"
    assert set(document["phases"]["decode"]) == {"n", "median_abs_error", "worst_error", "interval_coverage"}
    errors = [abs(p["error"]) for p in document["points"]]
    assert errors == sorted(errors, reverse=True)
    assert plot.read_text().startswith("<?xml")
    assert run("--json", "--fail-over", "0", name="llama8b-base.json")[0] == 1
    assert "median error" in run(name="llama8b-base.json")[1]


@pytest.mark.parametrize(
    ("seen", "used", "said"),
    [
        (None, 1.0, ""),
        (2.0, 2.0, ""),
        (0.5, 1.0, "host_slowdown 0.5 is below 1, which is a core of its own; check how it was measured"),
        (40.0, 40.0, "host_slowdown 40 is more than a shared core shows; check how it was measured"),
    ],
)
def test_cores_that_can_hardly_be_are_told_and_what_was_used_is_in_the_document(
    tmp_path: Path, seen: float | None, used: float, said: str
) -> None:
    whole = Record.model_validate(json.loads((ROOT / "validation" / "llama8b-base-eager.json").read_text()))
    whole.environment.pop("host_loop_us", None)
    for point in whole.points:
        point.host_slowdown = None if seen is None else Quantity(value=seen)
    path = tmp_path / "a.json"
    path.write_text(whole.model_dump_json(by_alias=True))
    document = replay.run(path, "1x-h200-published").json()  # a box that nobody looked at the cores of
    assert {point["host_slowdown"] for point in document["points"]} == {used}
    about = [line for line in document["warnings"] if "host_slowdown" in line]
    assert about == ([f"{whole.name}: {said}"] if said else [])


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"schema": "specsim.record/1", "points": [{"host_slowdown": "slow"}]}']
)
def test_a_file_that_holds_no_record_is_named_once(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(content)
    with pytest.raises(InputError, match="holds no record") as caught:
        load(path)
    assert str(caught.value).count("odd.json") == 1


@pytest.mark.parametrize("names", [True, "LlamaForCausalLM", [], [None], {}])
def test_a_config_that_names_no_architecture_is_predicted_by_its_sizes(names: Any) -> None:
    whole = Record.model_validate(json.loads((ROOT / "validation" / "llama8b-base.json").read_text()))
    assert whole.target_config is not None
    odd = whole.model_copy(update={"target_config": {**whole.target_config, "architectures": names}})
    assert predict_point(odd, odd.points[0], None) == predict_point(whole, whole.points[0], None)


def test_the_record_of_a_calibration_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "box.record.json"
    path.write_text(Record(kind="calibration", name="box", date="2026-01-01").model_dump_json(by_alias=True))
    with pytest.raises(InputError, match="is a calibration's record; `specsim calibrate --refit` reads it"):
        load(path)


def test_a_record_of_a_newer_release_is_told_and_other_files_are_not(tmp_path: Path) -> None:
    for name, document in (("new", {"schema": "specsim.record/2"}), ("other", {"schema": "specsim.plan/1"})):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    (tmp_path / "old.json").write_text(record("old", [decode(1, 8)]).model_dump_json(by_alias=True))
    records, skipped = load(tmp_path)
    assert [r.name for r in records] == ["old"]
    assert len(skipped) == 1
    assert "new.json: is a specsim.record/2, and this specsim reads specsim.record/1" in skipped[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--records", "validation", "--batch", "1"], "--batch: says nothing with --records"),
        (["--url", "x", "--fail-over", "10%"], "--fail-over: says nothing with --url; it is for --records"),
        (["--url", "x", "--tp", "1"], "--tp: says nothing with --url"),
        (["--scenarios", "x", "--method", "ngram"], "--method: says nothing with --scenarios"),
        (["--launch", "--model", "x", "--server-command", ""], "--server-command: names no program"),
        (["--launch", "--model", "x", "--accept-length", "2"], "--accept-length: is about speculation"),
        (["--launch", "--model", "x", "--topk", "4"], "--topk: is about speculation; give --method too"),
        (
            ["--launch", "--model", "x", "--method", "ngram", "--draft", "y"],
            "--draft: says nothing with --method ngram",
        ),
        (["--url", "x", "--rate", "2", "--quick"], "--quick: is about points, and --rate alone measures none"),
        (["--launch", "--model", "x", "--rate", "2", "--profile"], "--profile: is about points"),
        (
            ["--records", str(ROOT / "validation" / "llama8b-base.json"), "--model", "Qwen3-8B"],
            "--model: says nothing: every record holds its model",
        ),
        (
            ["--records", str(ROOT / "validation" / "llama8b-base.json"), "--draft", "qwen3-8b-eagle3"],
            "--draft: says nothing without --model",
        ),
        (["--url", "x", "--name", "../x"], "cannot be a file's name"),
        (["--url", "x", "--vllm-args", "--a 'b"], "--vllm-args: cannot be split: no closing quotation"),
    ],
)
def test_an_option_that_would_do_nothing_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from specsim.cli import main

    with pytest.raises(SystemExit) as end:
        main(["validate", *arguments])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--url", "x", "--launch"],
        ["--launch"],
        ["--records", "/nowhere"],
        ["--launch", "--model", "/nowhere.json", "--method", "eagle3"],
    ],
)
def test_bad_input_is_named(arguments: list[str]) -> None:
    done = CliRunner().invoke(group, ["validate", *arguments], standalone_mode=False)
    assert isinstance(done.exception, InputError)


@pytest.mark.parametrize(
    "arguments",
    [["--batch", "1,x"], ["--batch", "0"], ["--fail-over", "much"], ["--fail-over", "nan"], ["--fail-over", "5%%"]],
)
def test_bad_numbers_are_named(arguments: list[str]) -> None:
    done = CliRunner().invoke(group, ["validate", "--launch", *arguments])
    assert done.exit_code == 2
    assert "Invalid value" in done.output


def test_a_profile_that_is_not_there_is_told_for_itself() -> None:
    """Not as what is wrong with the first record of the folder."""
    with pytest.raises(InputError, match=r"^no hardware profile '8x-h10'; did you mean '8x-h100'"):
        replay.run(ROOT / "validation", "8x-h10")


def test_the_list_of_shipped_runs_is_complete() -> None:
    """Every record in validation/ is named in its README, by itself or by a pattern, and so is every other file there; nothing
    is named that is not there."""
    folder = ROOT / "validation"
    text = (folder / "README.md").read_text(encoding="utf-8")

    def named(table: str) -> set[str]:
        first = (row.split("|")[1] for row in text.split(table)[1].split("\n\n")[0].strip().splitlines())
        return {word for cell in first for word in cell.split("`")[1::2]}

    records = {path.stem for path in folder.glob("*.json") if not path.stem.endswith(".kernels")}
    others = {path.name + "/" * path.is_dir() for path in folder.iterdir()} - {"README.md"}
    for table, there in (("| records | what they are |", records), ("| file | what it is |", others)):
        patterns = named(table)
        assert [name for name in sorted(there) if not any(fnmatch.fnmatchcase(name, p) for p in patterns)] == []
        assert [p for p in sorted(patterns) if not fnmatch.filter(there, p)] == []


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_a_time_that_cannot_be_is_told_and_the_others_are_compared(tmp_path: Path, value: float) -> None:
    """A plain step of 0 ms, whose host time is a share of it and which a break-even divides by."""
    for name in ("dsv2lite-base", "dsv2lite-e3-s3"):
        content = json.loads((ROOT / "validation" / f"{name}.json").read_text())
        if name == "dsv2lite-base":
            content["points"][0]["decode_ms"]["value"] = value
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    result = replay.run(tmp_path)
    assert [line for line in result.skipped if f"decode is {value:g}, and must be above 0" in line]
    first = content["points"][0]
    pairs = {(p.record, p.phase, p.batch) for p in result.pairs if p.context < 2000}
    assert ("dsv2lite-base", "decode", 1) not in pairs
    assert ("dsv2lite-base", "decode", 4) in pairs
    assert ("dsv2lite-e3-s3", "break_even", first["batch"]) not in pairs
    assert result.json()["phases"]["cycle"]["n"] == 5


@pytest.mark.parametrize("schema", ["specsim.recrod/1", None])
def test_a_record_by_its_keys_with_another_schema_does_not_pass_a_check(tmp_path: Path, schema: str | None) -> None:
    content = json.loads((ROOT / "validation" / "dsv2lite-base.json").read_text())
    (tmp_path / "good.json").write_text(json.dumps(content))
    (tmp_path / "odd.json").write_text(json.dumps({**content, "schema": schema, "name": "odd"}))
    (tmp_path / "list.json").write_text("[]")
    _, unreadable = load(tmp_path)
    assert len(unreadable) == 1
    assert f"odd.json: has the keys of a record and schema {schema!r}; its schema is specsim.record/1" in unreadable[0]
