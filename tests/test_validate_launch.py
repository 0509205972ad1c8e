"""Launching a server: scenario files, flags, faults, and no process left behind. The server is tests/fake_server.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from builders import heed_interrupts

from specsim import validation as validate
from specsim.configs import model_from_config
from specsim.errors import InputError, WorkError
from specsim.live import ServerError
from specsim.load import Load
from specsim.measure import Plan
from specsim.records import Record
from specsim.server import Launched, NotInstalledError, free_port, refuse_multicast
from specsim.setups import Setup, load_setups, make_setup, moe_layers, server_env, server_flags
from specsim.validation import left_to_measure, run_list, run_setup

ROOT = Path(__file__).parents[1]
FAKE = (sys.executable, str(ROOT / "tests" / "fake_server.py"))
SPECSIM = (sys.executable, "-m", "specsim", "validate")
STARTED = ("--server-command", " ".join(FAKE))
PLAN = Plan(min_repeats=2, max_repeats=2, lengths=(4, 8, 16, 24))
DENSE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 8}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "tiny.json"
    path.parent.mkdir()
    path.write_text(json.dumps(DENSE))
    return path


def scenario(model: Path, **values: Any) -> Setup:
    return make_setup({"name": "tiny", "model": model, "batches": [1, 2, 4], "contexts": [32], **values}, "test")


def quiet(text: str) -> None:
    pass


def launch(s: Setup, folder: Path, **options: Any) -> tuple[Path, int]:
    return run_setup(s, folder, PLAN, quiet, command=FAKE, **options)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_run_leaves_a_record_and_no_process(model: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    s = scenario(model, draft=model, method="eagle3", num_steps=3, env={"FAKE_CHILD_FILE": str(child)})
    path, failed = launch(s, tmp_path / "runs")
    record = Record.model_validate(json.loads(path.read_text()))
    assert failed == 0
    assert [p.batch for p in record.points] == [1, 2, 4]
    assert record.points[0].verify_ms is not None
    assert record.target_config == DENSE
    assert record.engine is not None
    assert record.engine.env["SGLANG_SIMULATE_ACC_LEN"] == "2"
    assert record.engine.flags[:2] == ["--model-path", "tiny"]  # no temporary path, no port
    assert "--port" not in record.engine.flags
    assert (tmp_path / "runs" / "logs" / "tiny.log").exists()
    assert gone(int(child.read_text()))


def test_secrets_are_neither_shown_nor_recorded(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    flags = [
        "--x",
        '{"access_key": "sesame"}',
        "--api-key",
        "sesame",
        "--admin-api-key=sesame",
        "--decode-log-interval",
        "7",
    ]
    env = {"HF_TOKEN": "sesame", "HTTPS_PROXY": "http://me:sesame@proxy:3128", "NCCL_P2P_DISABLE": "1"}
    s = scenario(model, batches=[1], flags=flags, env=env)
    path, _ = run_setup(s, tmp_path, PLAN, said.append, command=["env", "WANDB_API_KEY=sesame", *FAKE])
    record = Record.model_validate(json.loads(path.read_text()))
    log = (tmp_path / "logs" / "tiny.log").read_text()
    assert "sesame" not in path.read_text() + " ".join(said) + log
    assert "api_key='[redacted]'" in log  # the fake server writes its arguments down, as SGLang does
    assert record.engine is not None
    assert record.engine.flags[-5:] == [
        "--api-key",
        "[redacted]",
        "--admin-api-key=[redacted]",
        "--decode-log-interval",
        "7",
    ]
    assert record.engine.env["NCCL_P2P_DISABLE"] == "1"


def test_a_run_without_a_point_leaves_no_record(model: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="no point could be measured"):
        launch(scenario(model, env={"FAKE_FAULT": "500"}), tmp_path)
    assert not list(tmp_path.glob("*.json"))


def test_flags_of_a_scenario_on_two_gpus(model: Path) -> None:
    s = scenario(model, draft=model, method="eagle3", num_steps=2, tp=2, flags=["--x"], batches=[1, 64])
    flags = server_flags(s, "M", "D", 1234)
    pairs = dict(zip(flags, flags[1:], strict=False))  # noqa: RUF007
    wanted = {"--tp": "2", "--speculative-num-steps": "2", "--speculative-num-draft-tokens": "3", "--port": "1234"}
    wanted |= {"--max-running-requests": "64", "--cuda-graph-max-bs": "64", "--load-format": "dummy"}
    assert {k: pairs[k] for k in wanted} == wanted
    assert "--enforce-disable-flashinfer-allreduce-fusion" in flags
    assert flags[-1] == "--x"
    assert server_env(s.model_copy(update={"tp": 1}), experts=False)["NCCL_NVLS_ENABLE"] == "0"
    env = server_env(s, experts=True)
    assert {env[k] for k in ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS")} == {"0", "1"}
    assert env["SGLANG_SIMULATE_UNIFORM_EXPERTS"] == "1"
    assert "--disable-cuda-graph" in server_flags(s.model_copy(update={"eager": True}), "M", "D", 1)


@pytest.mark.parametrize(
    "flag", ["--enable-torch-symm-mem", "--enable-symm-mem", "--enable-nccl-nvls", "--enable-mscclpp", "--enable-msc"]
)
def test_multicast_needs_an_explicit_word(model: Path, tmp_path: Path, flag: str) -> None:
    with pytest.raises(InputError, match="multicast"):
        launch(scenario(model, flags=[flag]), tmp_path)
    assert launch(scenario(model, flags=[flag], batches=[1]), tmp_path, multicast=True)[1] == 0


def test_multicast_by_environment_is_refused_and_other_flags_pass() -> None:
    with pytest.raises(InputError, match="NCCL_NVLS_ENABLE=1"):
        refuse_multicast([], {"NCCL_NVLS_ENABLE": "1"}, "test")
    refuse_multicast(["--enable-metrics", "--enable-mixed-chunk"], {"NCCL_NVLS_ENABLE": "0"}, "test")


def test_a_server_that_dies_while_starting_says_why(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(
        ServerError, match=r"died while starting \(exit code 3\): ValueError: no such attention backend"
    ) as caught:
        run_setup(scenario(model, env={"FAKE_FAULT": "start"}), tmp_path, PLAN, said.append, command=FAKE)
    assert "\n" not in str(caught.value)
    assert any("no such attention backend" in line for line in said)


def test_a_server_that_never_gets_healthy_is_stopped(model: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    s = scenario(model, env={"FAKE_FAULT": "unhealthy", "FAKE_CHILD_FILE": str(child)})
    with pytest.raises(ServerError, match=r"not healthy within 1\.5 s"):
        launch(s, tmp_path, start_timeout=1.5)
    assert gone(int(child.read_text()))


def test_without_sglang_the_mend_is_said(model: Path, tmp_path: Path) -> None:
    code = "import sys; sys.exit(\"ModuleNotFoundError: No module named 'sglang'\")"
    with pytest.raises(WorkError, match="install it there or give --server-command"):
        run_setup(scenario(model), tmp_path, PLAN, quiet, command=[sys.executable, "-c", code])


def test_no_such_program(model: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="could not be started"):
        run_setup(scenario(model), tmp_path, PLAN, quiet, command=["/nowhere/python"])


def test_a_server_that_dies_in_mid_run_keeps_finished_points(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ServerError, match=r"the server died: RuntimeError: CUDA error.*finished points are kept in .*tiny\.json"
    ):
        launch(scenario(model, env={"FAKE_FAULT": "die"}), tmp_path)
    record = Record.model_validate(json.loads((tmp_path / "tiny.json").read_text()))
    assert [p.batch for p in record.points] == [1]


def test_a_full_disk_ends_the_run_and_stops_the_server(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    write = validate.write_atomically

    def full(path: Path, text: str) -> None:
        if path == tmp_path / "tiny.json":
            raise WorkError(f"{path}: cannot be written: No space left on device")
        write(path, text)

    monkeypatch.setattr(validate, "write_atomically", full)
    with pytest.raises(WorkError, match="No space left on device"):
        launch(scenario(model, env={"FAKE_CHILD_FILE": str(child)}), tmp_path)
    assert gone(int(child.read_text()))


def test_no_place_for_temporary_files(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(WorkError, match=r"no temporary folder can be made .*set TMPDIR"):
        launch(scenario(model), tmp_path)


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(WorkError, match=f"port {port} of 127.0.0.1 is taken"):
            free_port(port)
    assert free_port(None) > 0


def test_a_taken_port_starts_nothing(model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        paths, failures = run_list(
            [scenario(model)], lambda s: launch(s, tmp_path, port=port), quiet, float("inf"), PLAN
        )
    assert paths == []
    assert f"port {port} of 127.0.0.1 is taken" in failures[0]
    assert not (tmp_path / "logs").exists()


def test_a_list_goes_on_after_a_failed_one(model: Path, tmp_path: Path) -> None:
    bad = scenario(model, name="bad", env={"FAKE_FAULT": "start"})
    good = scenario(model, name="good", batches=[1])
    missing = scenario(tmp_path / "nowhere.json", name="missing")
    paths, failures = run_list([bad, missing, good], lambda s: launch(s, tmp_path), quiet, float("inf"), PLAN)
    assert [p.name for p in paths] == ["good.json"]
    assert [f.split(":")[0] for f in failures] == ["bad", "missing"]


def test_no_scenario_is_begun_that_cannot_end(model: Path, tmp_path: Path) -> None:
    deadline = time.monotonic() + 30
    paths, failures = run_list([scenario(model)], lambda s: launch(s, tmp_path), quiet, deadline, PLAN)
    assert paths == []
    assert "not started" in failures[0]


def test_a_second_run_does_not_overwrite_the_first(model: Path, tmp_path: Path) -> None:
    names = [launch(scenario(model, batches=[1], hardware="1x-h200"), tmp_path)[0].name for _ in range(2)]
    assert names == ["tiny.json", "tiny-2.json"]
    assert Record.model_validate(json.loads((tmp_path / "tiny-2.json").read_text())).hardware == "1x-h200"


def test_what_is_wrong_is_found_before_a_server_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    good = scenario(model)
    validate.check([good], tmp_path)
    with pytest.raises(InputError, match="no such target config"):
        validate.check([good, scenario(tmp_path / "nowhere.json")], tmp_path)
    with pytest.raises(
        InputError, match="this is the name of a preset; a server takes the model's own: give its folder"
    ):
        validate.check([scenario(Path("llama-3.1-8b"))], tmp_path)
    with pytest.raises(WorkError, match=r"^/proc/runs: cannot be written"):
        validate.check([good], Path("/proc/runs"))
    with pytest.raises(InputError, match="multicast"):
        validate.check([scenario(model, flags=["--enable-mscclpp"])], tmp_path)
    with pytest.raises(InputError, match="no hardware profile 'nope'"):
        validate.check([scenario(model, hardware="nope")], tmp_path)
    with pytest.raises(InputError, match="did you mean --disable-cuda-graph"):
        validate.check([scenario(model, flags=["--disable-cuda-grahp"])], tmp_path)
    for flags in (["--tp", "2"], ["--tensor-parallel-size=2"], ["--speculative-num-steps", "3"], ["--port", "1"]):
        with pytest.raises(InputError, match="among the further flags: the set-up gives it itself"):
            validate.check([scenario(model, flags=flags)], tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    model.write_text(json.dumps(DENSE | sizes))
    with pytest.raises(InputError, match="tp 3 does not divide 4 attention heads"):
        validate.check([scenario(model, tp=3)], tmp_path)
    for flags in (["--api-key", "sesame"], ["--tokenizer-worker-num", "2", "--api-key=sesame"]):
        monkeypatch.delenv("SPECSIM_API_KEY", raising=False)
        with pytest.raises(InputError, match="does not send; set SPECSIM_API_KEY to it") as caught:
            validate.check([scenario(model, flags=flags)], tmp_path)
        assert "sesame" not in str(caught.value)
        monkeypatch.setenv("SPECSIM_API_KEY", "sesame")
        with pytest.raises(InputError, match="tp 3 does not divide"):
            validate.check([scenario(model, flags=flags, tp=3)], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match="cannot be written"):
        validate.check([good], tmp_path / "file")


@pytest.mark.parametrize("proc", ["/proc", "/nowhere"])
def test_stop_kills_a_child_that_ignores_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proc: str) -> None:
    """Also where the system has no /proc, as macOS: the server leads a group of its own."""
    monkeypatch.setattr("specsim.server.PROC", Path(proc))
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "p = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)']);"
        "print(p.pid, flush=True); time.sleep(99)"
    )
    log = tmp_path / "log"
    with Launched([sys.executable, "-c", code], {}, 1, log) as server:
        while not log.read_text().strip():
            time.sleep(0.02)
        time.sleep(0.3)
        child = int(log.read_text())
        server.stop(grace=0.3)
        server.stop()
    assert gone(child)


def test_stop_finds_a_child_that_left_the_session(tmp_path: Path) -> None:
    """As a daemon does: its own session, and a parent that is gone."""
    log = tmp_path / "log"
    with Launched(["sh", "-c", "setsid sh -c 'echo $$; exec sleep 99' & sleep 99"], {}, 1, log) as server:
        while not log.read_text().strip():
            time.sleep(0.02)
        daemon = int(log.read_text())
        assert server._process is not None
        server._process.kill()
        server._process.wait()
        assert not gone(daemon)
    assert gone(daemon)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_command_leaves_no_orphan(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    child = tmp_path / "child"
    command = [*SPECSIM, "--launch", "--model", str(model), "--batch", "1", "-o", str(tmp_path), *STARTED]
    env = {**os.environ, "FAKE_STEP_MS": "50", "FAKE_CHILD_FILE": str(child), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "healthy after" in line:
                break
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(20) == 130
    assert rest.strip().splitlines()[-1] == "interrupted"
    assert gone(int(child.read_text()))


def test_the_command_prints_one_json_document(model: Path, tmp_path: Path) -> None:
    command = [
        *SPECSIM,
        "--launch",
        "--model",
        str(model),
        "--batch",
        "1,99",
        "--context",
        "32",
        "-o",
        str(tmp_path),
        *STARTED,
    ]
    command += ["--quick", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60
    )
    document = json.loads(done.stdout)
    assert done.returncode == 1  # 99 requests are more than the fake server runs at once
    assert document["records"] == [str(tmp_path / "tiny-tp1-none.json")]
    assert "1 of its points" in document["failures"][0]


def test_resume_leaves_out_what_is_done(model: Path, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("- {name: a, model: models/tiny.json}\n- {name: b, model: models/tiny.json}\n")
    command = [*SPECSIM, "--scenarios", str(tmp_path / "s.yaml"), "--resume"]
    command += [
        "--batch",
        "1",
        "--context",
        "32",
        "--quick",
        "-o",
        str(tmp_path / "runs"),
        "--server-command",
        " ".join(FAKE),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name, wanted in ((["--only", "a"], ["a.json"]), ([], ["a.json", "b.json"])):
        done = subprocess.run([*command, *name], capture_output=True, text=True, env=env, timeout=60)
        assert done.returncode == 0, done.stderr
        assert sorted(p.name for p in (tmp_path / "runs").glob("*.json")) == wanted
    assert "left out, since they are measured in" in done.stderr


# --- scenario files ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scenarios: 3", "no list `scenarios`"),
        ("scenarios: [3]", "scenario 1: is not a mapping"),
        ("other: 1\nscenarios: []", "unknown key 'other'"),
        ("- {name: a, model: m, metod: eagle3}", "unknown key 'metod'.*did you mean 'method'"),
        ("- {name: a/b, model: m}", "name: String should match"),
        ("- {name: a, model: m, method: eagle3, draft: d}", "needs num_steps"),
        ("- {name: a, model: m, method: eagle3, num_steps: 2}", "needs a draft"),
        ("- {name: a, model: m, method: ngram}", "needs draft_tokens"),
        (
            "- {name: a, model: m, profile: true, load: {rates: [2]}}",
            "profile is of the first point, and a load has none",
        ),
        ("- {name: a, model: m, num_steps: 2}", "without a method"),
        ("- {name: a, model: m, method: mtp, num_steps: 1, accept_length: 2.5}", "above num_steps"),
        ("- {name: a, model: m, method: mtp, num_steps: 2, topk: 4}", "topk above 1 needs draft_tokens"),
        ("- {name: a, model: m, method: mtp, num_steps: 2, draft_tokens: 9}", r"num_steps \+ 1 = 3 rows with topk 1"),
        ("- {name: a, model: m, method: mtp, num_steps: 2, topk: 2, draft_tokens: 9}", "draft_tokens 9 of a tree of 7"),
        ("- {name: a, model: m, batches: [0]}", "batches.0"),
        ("- {name: a, model: m}\n- {name: a, model: m}", "two scenarios are called 'a'"),
        ("- {name: a", "is not YAML"),
        ("scenarios: []", "lists no scenario"),
        ("defaults: [1]\nscenarios: [{name: a, model: m}]", "defaults: is not a mapping"),
        ("defaults: {env: x}\nscenarios: [{name: a, model: m}]", "defaults, env: is not a mapping"),
        ("- {name: a, model: m, env: [A]}", "scenario a, env: is not a mapping"),
        ("- {name: a, model: m, env: {A=B: 1}}", "env.A=B"),
        ('- {name: a, model: m, env: {A: "x\\0y"}}', "env.A: String should match"),
        ('- {name: a, model: m, flags: ["a\\0b"]}', "flags.0: String should match"),
        ("- {name: a, model: m, points: [[1, -5]]}", "points.0.1"),
        ("- {name: a, model: m, points: []}", "points: List should have at least 1 item"),
    ],
)
def test_scenario_files_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_setups(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["scenarios-1gpu.yaml", "scenarios-2gpu.yaml"])
def test_shipped_scenarios_load_with_their_models(name: str) -> None:
    found = load_setups(ROOT / "validation" / name)
    assert len(found) >= 9
    for s in found:
        refuse_multicast(s.flags, server_env(s, experts=True), s.name)
        target = model_from_config(json.loads(s.model.read_text()), name=s.name)
        assert (target.experts is not None) == (moe_layers(json.loads(s.model.read_text())) > 0)
        if s.draft is not None:
            draft = model_from_config(json.loads(s.draft.read_text()), name=s.name)
            assert draft.hidden == target.hidden
        if name == "scenarios-2gpu.yaml":
            assert s.tp == 2


def test_resume_measures_what_a_record_lacks_and_nothing_twice(model: Path, tmp_path: Path) -> None:
    """Of two batches and two rates a record holds one each: the rest goes into a second one, after which nothing is left."""
    load = Load(rates=[2, 8, 12], num_requests=[10, 20, 30])
    setup = Setup(name="a", model=model, batches=[1, 4], contexts=[32], load=load)
    run = {"rate": 8.0, "num_requests": 20, "input_tokens": 1024, "output_tokens": 256, "seed": 0}
    point = {"batch": 4, "raw": {"prompt_tokens": 32}}
    kept = {"schema": "specsim.record/1", "kind": "validation", "name": "a", "date": "2026-01-01"}

    def write(name: str, **holds: Any) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({**kept, "name": name, **holds}))

    assert left_to_measure([setup], tmp_path) == ([setup], [])
    write("a", points=[point], loads=[run])
    write("a-3x", points=[{**point, "batch": 1}])  # of another name
    (tmp_path / "a-4.json").write_text('{"schema": "spec')  # torn
    (rest,), whole = left_to_measure([setup], tmp_path)
    assert whole == []
    assert rest.pairs() == [(1, 32)]
    assert rest.load is not None
    assert rest.load.runs() == [(2, 10), (12, 30)]
    write("a-2", points=[{**point, "batch": 1}])
    (rest,), _ = left_to_measure([setup], tmp_path)
    assert rest.pairs() == []
    assert rest.load is not None
    plain = [setup.model_copy(update={"load": None, "name": name}) for name in ("a", "a-2")]
    assert [s.pairs() for s in left_to_measure(plain, tmp_path)[0]] == [
        [(1, 32)],
        [(4, 32)],
    ]  # a-2 is a scenario of its own there
    write("a-5", loads=[{**run, "rate": 2.0}, {**run, "rate": 12.0}])
    assert left_to_measure([setup], tmp_path) == ([], ["a"])


def test_a_list_ends_where_there_is_no_engine_to_start(model: Path) -> None:
    """Of three scenarios on a machine without SGLang one is tried, and one line says why."""
    tried: list[str] = []

    def run(setup: Setup) -> tuple[Path, int]:
        tried.append(setup.name)
        raise NotInstalledError("SGLang is not installed")

    setups = [Setup(name=name, model=model) for name in ("a", "b", "c")]
    assert run_list(setups, run, str, float("inf"), PLAN) == ([], ["a: SGLang is not installed"])
    assert tried == ["a"]
