"""Results say where their numbers come from and which command makes them again."""

from __future__ import annotations

import json
import re
import shlex

import numpy as np
import pytest
from documents import COMMANDS, document, printed, text_of

import specsim
from specsim.acceptance import Acceptance
from specsim.configs import load_preset
from specsim.profiles import load_profile
from specsim.provenance import KINDS, sources_of
from specsim.redaction import without_secrets
from specsim.scenarios import build

OTHERS = {
    "rates by position": ["predict", "--draft-tokens", "4", "--accept-per-position", "0.71,0.6,0.333"],
    "a length": ["predict", "--draft-tokens", "4", "--accept-length", "2.345678"],
    "a profile of acceptance": ["predict", "--model", "Llama-3.1-8B", "--hardware", "1x-h200", "--accept-profile", "llama-3.1-8b-eagle3/mtbench"],
    "eager phases": ["predict", "--eager", "verify", "--eager", "draft", "--batch", "2"],
    "a tree": ["predict", "--topk", "2", "--num-steps", "3", "--draft-tokens", "6"],
    "attention groups": ["predict", "--dp-attention", "on", "--batch", "16", "--method", "none"],
    "routing": ["predict", "--routing", "zipf:0.8", "--context", "8k"],
    "any case": ["predict", "--model", "llama-3.1-8b", "--hardware", "1X-H200"],
    "a launch line": ["predict", "--hardware", "1x-h200", "--batch", "4", "--sglang-args",
                      "--model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3 --disable-cuda-graph"],
    "a launch line of vLLM": ["predict", "--hardware", "1x-h200", "--vllm-args", "Qwen/Qwen3-8B --max-num-seqs 16"],
}  # fmt: skip


def again(text: str) -> str:
    """What the command in a document prints."""
    words = shlex.split(json.loads(text)["command"])
    assert words[0] == "specsim"
    return printed([*words[1:], "--json"])


@pytest.mark.parametrize("name", [n for n in COMMANDS if not n.startswith("hardware") or "diff" in n])
def test_the_command_in_a_document_makes_the_same_document(name):
    assert again(text_of(name)) == text_of(name)


@pytest.mark.parametrize("name", OTHERS)
def test_the_command_of_a_prediction_makes_it_again_from_whatever_options(name):
    text = printed([*OTHERS[name], "--json"])
    assert again(text) == text


def test_a_prediction_made_in_python_has_the_command_line_of_its_options():
    s = specsim.scenario(
        model=load_preset("Llama-3.1-8B"),
        hardware=load_profile("1x-h200").model_copy(),
        draft_tokens=4,
        accept_rate=0.6,
    )
    found = specsim.predict(s).json()
    assert found["command"] is None, "a profile read for itself may have been changed"
    s = specsim.scenario(model=load_preset("Llama-3.1-8B"), hardware="1x-h200", draft_tokens=4, accept_rate=0.6)
    found = specsim.predict(s).json()
    assert (
        found["command"] == "specsim predict --model Llama-3.1-8B --hardware 1x-h200 --draft-tokens 4 --accept-rate 0.6"
    )
    assert json.loads(again(json.dumps(found))) == found


def test_what_no_option_states_has_no_command():
    for options in ({"acceptance": Acceptance.constant(0.6)}, {"max_running_requests": 8}):
        assert specsim.predict(build(draft_tokens=3, **options)).json()["command"] is None


def test_keys_do_not_travel_in_commands():
    line = "--model-path Qwen/Qwen3-8B --api-key hunter2-hunter2 --tp 1"
    assert "hunter2" not in without_secrets(line)
    assert without_secrets("--model-path Qwen/Qwen3-8B --tp 1") == "--model-path Qwen/Qwen3-8B --tp 1"
    box = ["--hardware", "1x-h200", "--sglang-args", line, "--json"]
    for command in (["predict"], ["sweep", "--batch", "1,2"]):
        text = printed([*command, *box])
        assert "hunter2" not in text
        assert "[redacted]" in json.loads(text)["command"]


def test_defaults_of_a_team_are_in_the_command(tmp_path, monkeypatch):
    """The command says what a file gave, and that the file is not to be read: another team's file changes nothing."""
    (tmp_path / "specsim.yaml").write_text(
        "scenario: {model: Llama-3.1-8B, hardware: 1x-h200}\nsweep: {draft-tokens: '2:3'}\n"
    )
    monkeypatch.chdir(tmp_path)
    found = json.loads(printed(["sweep", "--batch", "1,2", "--accept-rate=0.5", "--jobs", "1", "--json"]))
    words = "--no-config sweep --batch 1,2 --accept-rate=0.5 --model Llama-3.1-8B --hardware 1x-h200 --draft-tokens 2:3"
    assert found["command"] == f"specsim {words}"
    (tmp_path / "specsim.yaml").write_text("scenario: {model: Qwen3-8B}\n")
    same = json.loads(again(json.dumps(found)))
    assert {**same, "command": "", "warnings": []} == {**found, "command": "", "warnings": []}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_source_has_a_kind_and_a_reference(name):
    for source in document(name).get("sources", []):
        assert source["kind"] in (*KINDS, "given")
        assert source["reference"]
        assert source["date"] is None or re.fullmatch(r"\d{4}(-\d\d){0,2}", source["date"])
        assert source["relative_uncertainty"] is None or 0 <= source["relative_uncertainty"] <= 3


def test_the_kinds_of_a_breakdown_are_those_of_its_sources():
    """A part that says it is published must have a published source beside it."""
    for name in ("prediction", "prediction without speculation"):
        found = document(name)
        assert {part["source"] for part in found["breakdown"]} <= {s["kind"] for s in found["sources"]}


def test_a_profile_gives_its_own_source_for_each_class_and_curve_that_is_used():
    found = document("prediction")
    box = load_profile(found["scenario"]["hardware"])
    by_name = {s["of"]: s for s in found["sources"]}
    rate = box.operators["attention_mla"]
    assert by_name[f"{box.name}: attention_mla"]["reference"] == rate.source.reference
    assert by_name[f"{box.name}: attention_mla"]["relative_uncertainty"] == rate.relative_uncertainty
    assert any("all-reduce, nccl, 8 ranks, graph" in name for name in by_name)
    assert not any("attention_linear" in name for name in by_name), "this model has none"
    assert by_name["acceptance"]["kind"] == "given"


def test_a_validation_names_its_records_and_what_predicted_them():
    sources = document("validation")["sources"]
    assert any(s["of"].startswith("record llama8b") and s["kind"] == "measured" and s["date"] for s in sources)
    assert any(s["of"].startswith("1x-h200: ") for s in sources)


def named(**options) -> set[str]:
    """The engine's terms and the all-reduce curves among a prediction's sources, by their last words."""
    found = [s["of"].split(": ", 1)[1] for s in specsim.predict(**options).json()["sources"] if ": " in s["of"]]
    return {name for name in found if name.endswith(("_us", "_factor")) or name.startswith("all-reduce")}


def test_sources_name_what_took_part_and_nothing_else():
    """A chain has no tree and no n-gram; one GPU no all-reduce; without speculation there is no cycle; graphs have no
    eager costs; a prediction prefills no prompt, and a simulation does."""
    box = {"model": "Llama-3.1-8B", "hardware": "1x-h200"}
    plain = {"kernel_gap_us", "row_layer_us", "decode_host_us", "decode_cpu_us", "sequence_cpu_us"}
    cycle = plain | {"verify_layer_us", "cycle_host_us", "cycle_cpu_us"}
    drafted = cycle | {"draft_step_us", "eager_gap_us", "eager_factor"}  # this engine extends drafts eagerly
    assert named(**box, method="none") == plain
    assert named(**box, draft_tokens=3) == drafted
    assert named(**box, topk=2, num_steps=3, draft_tokens=6) == drafted | {"tree_step_us", "tree_cpu_us"}
    assert named(**box, method="ngram", draft_tokens=4) == cycle | {
        "ngram_host_us",
        "ngram_sequence_us",
        "ngram_verify_us",
    }
    assert named(**box, method="none", eager=["decode"]) == plain - {"kernel_gap_us"} | {"eager_gap_us", "eager_factor"}
    two = named(model="Llama-3.1-8B", hardware="2x-h200", method="none")
    assert {name for name in two - plain if name.startswith("all-reduce")}
    assert two - plain >= {"allreduce_skew_us"}
    assert any("prefill_host_us" in s["of"] for s in document("simulation")["sources"])


def test_sources_of_a_sweep_are_those_of_its_smallest_and_largest_points():
    """Batches beyond the captured ones run eagerly, so a sweep over both kinds names the terms of both."""
    box = {"model": "Llama-3.1-8B", "hardware": "1x-h200", "method": "none"}

    def eager(batch) -> bool:
        s = specsim.scenario(**box, batch=batch, max_running_requests=4096)
        return any("eager_gap_us" in source["of"] for source in sources_of(s))

    assert not eager(8)
    assert eager(2048)
    assert eager(np.array([8.0, 2048.0]))
