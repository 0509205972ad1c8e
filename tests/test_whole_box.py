"""The run over a whole box: its scenario files load and are safe, and its steps keep to the time and go on after a failure."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from specsim.errors import InputError
from specsim.server import MULTICAST_OFF, SAFE_FLAG, refuse_multicast
from specsim.setups import config_of, load_setups, make_setup, moe_layers, server_env, server_flags, target_config

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "validation").glob("scenarios-*.yaml"))
EIGHT = ROOT / "validation" / "scenarios-8gpu.yaml"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("whole_box", ROOT / "benchmarks" / "whole_box.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["whole_box"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_launch_line_is_safe_and_its_models_are_there(path: Path) -> None:
    for setup in load_setups(path):
        config = target_config(setup)
        if setup.draft is not None:
            config_of(setup.draft, "draft")
        env = server_env(setup, moe_layers(config) > 0)
        flags = server_flags(setup, "MODEL", "DRAFT" if setup.draft else None, 30000)
        refuse_multicast(flags, env, setup.name)
        if setup.tp > 1:
            assert SAFE_FLAG in flags
            assert {name: env.get(name) for name in MULTICAST_OFF} == MULTICAST_OFF
        assert not [f for f in flags if "symm-mem" in f or "nvls" in f or "mscclpp" in f]


def test_eight_gpus_cover_the_question() -> None:
    """Kimi-K2.5 with INT4 experts and another architecture, over 8 ranks; no speculation, 3 and 4 draft tokens; batch 1 to
    32; NVLink, no peer access, and without graphs."""
    setups = load_setups(EIGHT)
    assert {s.tp for s in setups} == {8}
    kimi = [s for s in setups if s.name.startswith("kimi")]
    assert target_config(kimi[0])["num_hidden_layers"] == 61
    assert target_config(kimi[0])["n_routed_experts"] == 384
    assert {s.rows for s in kimi} == {1, 3, 4}
    for host in (False, True):
        some = [s for s in kimi if (s.env.get("NCCL_P2P_DISABLE") == "1") == host]
        assert all(("--disable-custom-all-reduce" in s.flags) == host for s in some)
        assert {s.rows for s in some if not s.eager} == {1, 3, 4}
        assert any(s.eager for s in some)
        assert {b for s in some for b, _ in s.pairs()} >= {1, 4, 16, 32}
    assert {s.rows for s in setups if s.name.startswith("qwen3-235b")} == {1, 4}


def test_layers_can_be_fewer() -> None:
    setup = load_setups(EIGHT)[1].model_copy(update={"layers": 20})
    assert target_config(setup)["num_hidden_layers"] == 20
    assert moe_layers(target_config(setup)) == 19
    assert config_of(setup.model, "target")["num_hidden_layers"] == 61
    for layers, method, words in ((62, "none", "give 2 to 61"), (1, "none", "give 2"), (6, "eagle3", "give 7 to 61")):
        with pytest.raises(InputError, match=words):
            target_config(setup.model_copy(update={"layers": layers, "method": method}))


def test_layers_of_a_model_with_a_text_part(tmp_path: Path) -> None:
    inner = {"num_hidden_layers": 8, "first_k_dense_replace": 3, "layer_types": ["a", "b"] * 4}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner, "model_type": "x"}))
    setup = make_setup({"name": "x", "model": tmp_path, "layers": 5}, "here")
    assert target_config(setup) == {
        "text_config": {**inner, "num_hidden_layers": 5, "layer_types": ["a", "b", "a", "b", "a"]},
        "model_type": "x",
    }


def test_steps_are_commands_that_exist(script: ModuleType, tmp_path: Path) -> None:
    from specsim.commands import calibrate, doctor, hardware, validate

    commands = {
        "calibrate": calibrate.command, "doctor": doctor.command, "validate": validate.command, "diff": hardware.diff_command
    }  # fmt: skip
    for line in (["--layers", "20", "--quick"], ["--no-servers", "--gpus", "2", "--model", "typical", "--cpu"]):
        for step in script.steps(script.parse([*line, "-o", str(tmp_path)])):
            name, *arguments = script.with_limit(step, 100.0)[3:]
            if name == "hardware":
                name = arguments.pop(0)
            commands[name].make_context(name, list(arguments))


def test_a_failed_step_does_not_stop_the_next_and_the_time_is_kept(
    script: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    """A clock that the runner moves: doctor fails in 10 s, each other step takes what it is given. Replays use the profile
    of how the server ran, and come although the time is up."""
    clock = [0.0]
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    ran: list[tuple[str, float]] = []
    out = tmp_path / "box"

    def runner(command: list[str], seconds: float, log: Path) -> int:
        ran.append((log.stem, seconds))
        took = float(command[command.index("--time-limit") + 1]) if "--time-limit" in command else 10.0
        clock[0] += took
        if log.stem == "validate":
            (out / "runs").mkdir(parents=True)
            for name, env in (("fast", {}), ("slow", {"NCCL_P2P_DISABLE": "1"})):
                (out / "runs" / f"{name}.json").write_text(json.dumps({"engine": {"name": "sglang", "env": env}}))
            for name in ("8x-h200.yaml", "8x-h200-no-p2p.yaml"):
                (out / name).write_text("")
        if log.stem.startswith("replay"):
            assert command[-1].endswith("no-p2p.yaml") == log.stem.endswith("slow")
        return 1 if log.stem == "doctor" else 0

    done = script.work(script.parse(["-o", str(out), "--time-limit", "1000"]), runner)
    names = [name for name, _ in ran]
    measured = ["calibrate", "calibrate-no-p2p", "engines-allreduce", "engines-experts"]
    assert names == ["doctor", *measured, "join", "validate", "replay-fast", "replay-slow"]
    assert clock[0] < 1000 + 20 + 1
    assert done[0]["code"] == 1
    assert json.loads((out / "summary.json").read_text()) == done


def test_calibrations_alone_fill_their_time(script: ModuleType, tmp_path: Path, monkeypatch) -> None:
    """480 s, every calibration takes all that it may: the first has 240 s, as those that follow have half of what is left
    or so, and no measurement is started that has no 30 s; what takes seconds needs 5."""
    clock, given = [0.0], {}
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])

    def runner(command: list[str], seconds: float, log: Path) -> int:
        took = float(command[command.index("--time-limit") + 1]) if "--time-limit" in command else 2.0
        given[log.stem] = took
        clock[0] += took
        return 0

    line = ["-o", str(tmp_path), "--no-servers", "--gpus", "2", "--model", "typical", "--time-limit", "480"]
    done = script.work(script.parse(line), runner)
    assert [entry["step"] for entry in done if entry["step"].startswith("agree")] == [
        "agree-Llama-3.1-8B", "agree-Qwen3-30B-A3B"
    ]  # fmt: skip
    assert given["calibrate"] == pytest.approx(239)
    assert given["calibrate-again"] == pytest.approx(143, abs=1)
    assert clock[0] <= 480
    assert {entry["step"] for entry in done if entry.get("note")} <= {"engines-experts", "forced"}


def test_a_command_that_does_not_end_is_ended(script: ModuleType, tmp_path: Path) -> None:
    code = script.run(
        [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"], 1.0, tmp_path / "log"
    )
    assert code != 0
    assert (tmp_path / "log").read_text() == "here\n"
