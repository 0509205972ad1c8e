"""The presets that ship, their drafters, and the `models` command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from click.testing import CliRunner

from specsim.commands.models import command
from specsim.configs import PRESETS, Preset, default_draft, list_presets, load_config, load_model
from specsim.model_text import parts, stored

ALL = list_presets()
TARGETS = [p for p in ALL if p.role == "target"]

# Published sizes in billions (total, active); cards count active parameters with or without the embedding and the head.
CARDS = {
    "Kimi-K2.5": (1027, 32), "Kimi-K2.6": (1027, 32), "Kimi-K2-Instruct": (1026, 32), "DeepSeek-V3": (671, 37),
    "DeepSeek-R1": (671, 37), "DeepSeek-V3.2": (671, 37), "DeepSeek-V2-Lite": (15.7, 2.4), "GLM-4.5-Air": (106, 12),
    "GLM-4.6": (355, 32), "GLM-5.1-FP8": (744, 40), "GLM-5.1-NVFP4": (744, 40), "Qwen3-8B": (8.2, 8.2),
    "Qwen3-32B": (32.8, 32.8), "Qwen3-30B-A3B": (30.5, 3.3), "Qwen3-30B-A3B-FP8": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22), "Qwen3-235B-A22B-FP8": (235, 22), "Qwen3-Next-80B-A3B": (80, 3),
    "Qwen3.5-397B-A17B": (397, 17), "gpt-oss-20b": (20.9, 3.6), "gpt-oss-120b": (116.8, 5.1), "MiniMax-M2.5": (230, 10),
    "Llama-3.1-8B": (8.03, 8.03), "Llama-3.1-70B": (70.6, 70.6), "Llama-3.1-405B": (405.9, 405.9),
    "Llama-3.3-70B": (70.6, 70.6), "Llama-4-Scout": (109, 17), "Mixtral-8x7B": (46.7, 12.9),
}  # fmt: skip


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(command, list(arguments))
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("preset", ALL, ids=lambda p: p.name)
def test_every_preset_loads_cleanly(preset: Preset) -> None:
    model = load_model(preset.name)
    assert model.name == preset.name
    assert not model.warnings
    assert preset.source
    assert preset.hf_id == "" or re.fullmatch(r"[\w.-]+/[\w.-]+", preset.hf_id)
    assert bool(model.mtp_layers) == preset.mtp
    assert sum(parts(model).values()) == pytest.approx(model.weight_bytes)
    assert min(parts(model).values()) >= 0


def test_the_targets_are_those_with_a_card() -> None:
    assert {p.name for p in TARGETS} == set(CARDS)


@pytest.mark.parametrize("name", CARDS)
def test_presets_have_the_published_size(name: str) -> None:
    """Within 2 %, or within the last digit that the card prints."""
    total, active = CARDS[name]
    model = load_model(name)
    digit = 0.06 if active != int(active) else 0.6
    assert model.total_parameters / 1e9 == pytest.approx(total, rel=0.02)
    counted = (model.active_parameters, model.active_parameters_without_embedding, model.active_parameters_in_layers)
    assert min(abs(c / 1e9 - active) for c in counted) <= max(0.02 * active, digit)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("Kimi-K2.5", 595),
        ("gpt-oss-20b", 13.8),
        ("gpt-oss-120b", 65.3),
        ("Qwen3-235B-A22B", 470),
        ("Mixtral-8x7B", 93.4),
    ],
)
def test_weights_are_as_large_as_the_published_files(name: str, gigabytes: float) -> None:
    assert load_model(name).weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_drafters_fit_their_targets() -> None:
    for target in TARGETS:
        for name in target.drafts:
            drafter, model = load_model(name), load_model(target.name)
            if drafter.draft is not None:
                assert drafter.draft.target_hidden == model.hidden, (target.name, name)
            assert drafter.vocab == model.vocab, (target.name, name)
            assert drafter.total_parameters < 0.2 * model.total_parameters


def test_default_drafts() -> None:
    assert default_draft("Kimi-K2.5") == "kimi-k2.5-eagle3"
    assert default_draft("moonshotai/Kimi-K2.5") == "kimi-k2.5-eagle3"
    assert default_draft("gpt-oss-120b") == "gpt-oss-120b-eagle3"
    assert default_draft("Mixtral-8x7B") is None
    assert default_draft("no-such-model") is None
    assert load_model("lightseekorg/kimi-k2.5-eagle3").name == "kimi-k2.5-eagle3"
    assert load_model("meta-llama/llama-3.1-8b").name == load_model("Llama-3.1-8B-Instruct").name == "Llama-3.1-8B"


def test_no_id_names_two_presets() -> None:
    names = [n.lower() for p in ALL for n in {p.name, p.hf_id, *p.same_shape} if n]
    assert len(names) == len(set(names))


def test_presets_say_where_they_come_from_and_nothing_else() -> None:
    for path in PRESETS.glob("*.json"):
        config = json.loads(path.read_text())
        assert {k for k in config if k.startswith("_")} <= {"_hf_id", "_source", "_drafts", "_same_shape"}
        assert path.stat().st_size < 8192
    assert load_config("kimi-k2.5")["_hf_id"] == "moonshotai/Kimi-K2.5"


def test_reading_is_quick() -> None:
    """A preset in less than 20 ms (best of three, for the machine may be busy), without heavy imports."""

    def seconds(name: str) -> float:
        start = time.perf_counter()
        load_model(name)
        return time.perf_counter() - start

    for preset in ALL:
        assert min(seconds(preset.name) for _ in range(3)) < 0.02, preset.name
    code = "import sys, specsim.configs; print([m for m in ('pydantic', 'scipy', 'numpy', 'yaml') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_list_command() -> None:
    document = json.loads(run("list", "--json").stdout)
    models = {m["name"]: m for m in document["models"]}
    assert document["schema"] == "specsim.models/1"
    assert len(models) == len(ALL)
    assert models["Kimi-K2.5"]["drafts"][0] == "kimi-k2.5-eagle3"
    assert models["DeepSeek-V3"]["mtp"] is True
    assert models["qwen3-8b-dflash"]["kind"] == "dflash"
    table = run("list").stdout
    assert "Kimi-K2.5" in table
    assert "1.03 T" in table


def test_show_command() -> None:
    document = json.loads(run("show", "Kimi-K2.5", "--json").stdout)
    assert document["schema"] == "specsim.model/1"
    assert (document["experts"], document["experts_per_token"]) == (384, 8)
    assert (document["hidden"], document["layers"], document["vocab"]) == (7168, 61, 163840)
    assert document["kv_bytes_per_token"] == 61 * 576 * 2
    assert document["layer_kinds"] == [{"kind": "mla+dense", "count": 1}, {"kind": "mla+moe", "count": 60}]
    assert sum(document["bytes"].values()) == pytest.approx(document["weight_bytes"])
    assert document["default_draft"] == "kimi-k2.5-eagle3"
    text = run("show", "Qwen3-Next-80B-A3B").stdout
    assert "36 gdn+moe, 12 gqa+moe" in text
    assert "MTP" in text


def test_show_puts_warnings_beside_the_document(tmp_path: Any) -> None:
    config = load_config("Llama-3.1-8B") | {"model_type": "brand_new"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BrandNewForCausalLM"]}))
    result = run("show", str(tmp_path), "--json")
    assert "brand_new" in json.loads(result.stdout)["warnings"][0]
    assert "brand_new" in result.stderr


def test_an_unknown_model_is_one_line_and_exit_code_2() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "specsim", "models", "show", "Kimi-K25"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "did you mean 'Kimi-K2.5'" in result.stderr


@pytest.mark.parametrize(
    ("name", "said"), [("Qwen3-8B", "bf16"), ("DeepSeek-V3", "fp8 in blocks"), ("gpt-oss-20b", "mxfp4 (experts)")]
)
def test_a_model_without_quantisation_says_the_format_that_it_is_stored_in(name: str, said: str) -> None:
    assert stored(load_model(name)) == said
