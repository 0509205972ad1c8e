"""A team's file of defaults: which file, what wins over it, what is said about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specsim import team
from specsim.commands.scenario import Count, ScenarioOption, scenario_options

Run = Callable[..., tuple[int, str, str]]


SCENARIO_OPTIONS: list[ScenarioOption] = scenario_options(lambda: None).__click_params__  # type: ignore[attr-defined]


@pytest.fixture
def run(specsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a line in a folder of its own, where no other file of defaults is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(team.VARIABLE, raising=False)
    return specsim


def scenario(run: Run, *line: str) -> dict[str, Any]:
    code, out, err = run("predict", *line, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_defaults_reach_every_command_that_takes_them(run: Run) -> None:
    Path("specsim.yaml").write_text("scenario: {hardware: 8x-rtx-pro-6000, context: 8k}\nsweep: {batch: [1, 2]}\n")
    found = scenario(run)
    assert (found["scenario"]["hardware"], found["scenario"]["context"]) == ("8x-rtx-pro-6000", 8192)
    assert found["scenario"]["model"] == "Kimi-K2.5", "what the file does not name stays the field case"
    assert "specsim.yaml gives --hardware, --context (--no-config leaves it out)" in found["warnings"]
    assert json.loads(run("sweep", "--json")[1])["axes"]["batch"] == [1, 2]
    assert "gives" not in run("models", "list")[1], "it has no such option"
    assert scenario(run, "--context", "2k")["scenario"]["context"] == 2048
    assert run("--no-config", "predict")[1].startswith("Kimi-K2.5 + kimi-k2.5-eagle3 on 8x-pcie-field")
    for name in ("plan", "simulate"):
        assert run(name, "--rate", "1", "--method", "none")[0] == 0, name


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("accept_rate: 0.6", ["--accept-length", "2"], {"accept_length": 2.0}),
        ("draft: kimi-k2.5-eagle3", ["--model", "Llama-3.1-8B"], {"draft": "llama3-8b-eagle3"}),
        ("{method: eagle3, hardware: 1x-h200}", ["--model", "Llama-3.1-8B", "--draft", "Llama-3.2-1B"], {"method": "draft-model"}),
        ("{draft: kimi-k2.5-eagle3, accept-rate: 0.5}", ["--method", "none"], {"draft": None}),
        ("{draft_tokens: 5}", ["--num-steps", "2"], {"draft_tokens": 3}),
        ("{tp: 4, model: Qwen3-8B}", ["--sglang-args", "--model-path Qwen/Qwen3-32B --tp 8"], {"tp": 8, "model": "Qwen3-32B"}),
        ("{sglang-args: --model-path Qwen/Qwen3-32B --tp 8}", ["--tp", "4"], {"tp": 4, "model": "Qwen3-32B"}),
    ],
)  # fmt: skip
def test_what_the_line_gives_wins_and_takes_along_what_would_contradict_it(
    run: Run, file: str, line: list[str], expected: dict[str, Any]
) -> None:
    Path("specsim.yaml").write_text(f"scenario:\n  {file}\n" if file[0] != "{" else f"scenario: {file}\n")
    found = scenario(run, *line)
    shown = {**found["scenario"], **{k: v for k, v in found.items() if k == "accept_length"}}
    assert {key: shown[key] for key in expected} == expected
    assert not any("left out" in warning for warning in found["warnings"])


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("scenario: {tpp: 8}", "specsim.yaml, key scenario.tpp: is no option; did you mean 'tp'?"),
        ("hardware: 1x-h200", "specsim.yaml, key hardware: is an option; write it below scenario:"),
        ("dp-attention: 8", "specsim.yaml, key dp-attention: is an option; write it below scenario:"),
        ("swep: {}", "specsim.yaml, key swep: is no command; did you mean 'sweep'?"),
        ("predict: {explane: true}", "specsim.yaml, key predict.explane: is no option; did you mean 'explain'?"),
        ("scenario: {batch: many}", "specsim.yaml, key scenario.batch: 'many' is not a whole number"),
        ("scenario: {tp: 7}", "specsim.yaml, key scenario.tp: tp 7 does not divide"),
        ("scenario: {tp: }", "specsim.yaml, key scenario.tp: is not a plain value"),
        ("scenario: 8", "specsim.yaml, key scenario: is not a mapping"),
        (
            "scenario: {hardware: 1x-h20}",
            "specsim.yaml, key scenario.hardware: no hardware profile '1x-h20'; did you mean '1x-h200'",
        ),
        ("scenario: {hardware: box.yaml}", "specsim.yaml, key scenario.hardware: box.yaml: no such hardware profile"),
        ("scenario: {hardware: ./box.yaml}", "specsim.yaml, key scenario.hardware: box.yaml: no such hardware profile"),
        ("scenario: {draft: ./mine/config.json}", "specsim.yaml, key scenario.draft: ./mine/config.json: no such"),
        (
            "scenario: {draft-tokens: three}",
            "specsim.yaml, key scenario.draft-tokens: 'three' is not a whole number; for example 4",
        ),
        (
            "scenario: {eager: 'decode,verify'}",
            "specsim.yaml, key scenario.eager: unknown phase 'decode,verify'; give one at a time",
        ),
        ("- 8", "specsim.yaml: is not a mapping"),
        ("predict: {explain: 1}", "specsim.yaml, key predict.explain: is 1; write true or false"),
        ("a: b: c", "specsim.yaml, line 1: is not YAML"),
        ("scenario: {tp: 8, tp: 4}", "specsim.yaml, line 1: key 'tp' is given twice"),
    ],
)
def test_a_bad_file_is_one_line_with_file_and_key(run: Run, file: str, said: str) -> None:
    Path("specsim.yaml").write_text(file)
    code, out, err = run("predict")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert run("predict", "--help")[0] == 0, "help is always to be had"


@pytest.mark.parametrize("key", [str(o.name).replace("_", "-") for o in SCENARIO_OPTIONS if o.name not in team.LAUNCH])
def test_whatever_option_is_wrong_in_the_file_is_told_with_file_and_key(run: Run, key: str) -> None:
    """Names, numbers and paths alike, and whichever part of specsim finds them wrong."""
    for word in ("nosuch", "no/such.yaml"):
        Path("specsim.yaml").write_text(f"scenario: {{{key}: {word}}}")
        code, out, err = run("predict")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: specsim.yaml, key scenario.{key}: ")
        assert word in err


def test_a_fault_inside_a_file_that_the_file_of_defaults_names(run: Run) -> None:
    Path("mine").mkdir()
    Path("mine/config.json").write_text("[]")
    Path("specsim.yaml").write_text("scenario: {model: mine}")
    assert run("predict")[2].startswith("error: specsim.yaml, key scenario.model: mine/config.json: is a list")


@pytest.mark.parametrize("key", [str(o.name).replace("_", "-") for o in SCENARIO_OPTIONS])
def test_an_option_beside_the_sections_is_told_where_it_goes(run: Run, key: str) -> None:
    """Written right, and with its last letter missing where that leaves a word."""
    for name in (key, key[:-1] if len(key) > 3 else key):
        Path("specsim.yaml").write_text(f"{name}: 8")
        code, _, err = run("predict")
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"error: specsim.yaml, key {name}: ")
        assert err.endswith("below scenario:\n")


def test_an_option_of_a_command_beside_the_sections(run: Run) -> None:
    Path("specsim.yaml").write_text("explain: true")
    assert run("predict")[2].endswith("this option goes below predict:\n")
    Path("specsim.yaml").write_text("ttft-ms: 500")
    assert "options go below scenario:, or below the command that takes them" in run("predict")[2]


@pytest.mark.parametrize("option", [o for o in SCENARIO_OPTIONS if isinstance(o.type, Count)], ids=lambda o: o.name)
def test_a_wrong_count_is_answered_with_one_that_the_option_takes(run: Run, option: ScenarioOption) -> None:
    flag, examples = option.opts[0], option.type.examples  # type: ignore[attr-defined]
    assert (
        f"{flag}: 'three' is not a whole number; for example {' or '.join(examples)}\n"
        in run("predict", flag, "three")[2]
    )
    tree = ("--num-steps", "3", "--draft-tokens", "8") if option.name == "topk" else ()
    for example in examples:
        assert run("predict", flag, example, *tree)[0] == 0
        assert example.isdecimal() or option.metavar == "TOKENS", "8k is a number of tokens"


def test_an_error_says_which_defaults_took_part(run: Run) -> None:
    Path("specsim.yaml").write_text("scenario: {hardware: 1x-h200}")
    code, _, err = run("predict", "--tp", "8")
    assert code == 2
    assert "1x-h200" in err
    assert "(specsim.yaml gives --hardware)" in err


def test_paths_are_relative_to_the_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specsim.profiles import dump_profile, load_profile

    boxes, below = tmp_path / "boxes", tmp_path / "a" / "b"
    boxes.mkdir()
    below.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    profile = load_profile("8x-h100").model_copy(update={"name": "ours"})
    (boxes / "ours.yaml").write_text(dump_profile(profile))
    (tmp_path / "specsim.yaml").write_text("scenario: {hardware: boxes/ours.yaml}")
    monkeypatch.chdir(below)
    assert scenario(run)["scenario"]["hardware"] == "ours"


def test_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable; else the nearest one up to the repository's root or the home folder, and none from beyond them."""
    root, below = tmp_path / "repository", tmp_path / "repository" / "a"
    below.mkdir(parents=True)
    (tmp_path / "specsim.yaml").touch()
    monkeypatch.chdir(below)
    assert team.find({}) is None, "neither a repository nor the home folder is above"
    (root / ".git").mkdir()
    assert team.find({}) is None, "the root of the repository ends the search"
    (root / "specsim.yaml").touch()
    assert team.find({}) == Path("../specsim.yaml")
    (below / "specsim.yaml").touch()
    assert team.find({}) == Path("specsim.yaml")
    assert team.find({"SPECSIM_CONFIG": "other.yaml"}) == Path("other.yaml")
    (below / "specsim.yaml").unlink()
    (root / "specsim.yaml").unlink()
    (root / ".git").rmdir()
    assert team.find({"HOME": str(tmp_path)}) == Path("../../specsim.yaml")


def test_diagnose_takes_no_assumption_for_an_observation(run: Run) -> None:
    Path("specsim.yaml").write_text("scenario: {accept_rate: 0.9, hardware: 8x-rtx-pro-6000}")
    with_file = run("diagnose", "--decode-ms", "12.1", "--verify-ms", "29.5", "--draft-tokens", "3", "--json")
    document = json.loads(with_file[1])
    assert "specsim.yaml gives --hardware (--no-config leaves it out)" in document["warnings"]
    without = run(
        "--no-config", "diagnose", "--decode-ms", "12.1", "--verify-ms", "29.5", "--draft-tokens", "3", "--json"
    )
    assert document["hypotheses"] == json.loads(without[1])["hypotheses"]
