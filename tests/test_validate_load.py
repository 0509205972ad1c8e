"""A live server under load, against a fake one that streams on a schedule; and the replay in the simulator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import heed_interrupts
from click.testing import CliRunner
from fake_server import FakeServer

from specsim import load as load_module
from specsim import load_replay
from specsim import validation as validate
from specsim.cli import group
from specsim.errors import InputError, WorkError
from specsim.live import Client, ServerError, identify
from specsim.load import Load, _pace, _run, arrivals
from specsim.measure import Plan
from specsim.records import LoadRun, Record
from specsim.setups import load_setups, make_setup, server_flags
from specsim.simulation_costs import Costs, Server
from specsim.streams import Stream, send
from specsim.validation import run_setup, run_url
from specsim.workload import Lengths, synthetic

ROOT = Path(__file__).parents[1]
FAKE = (sys.executable, str(ROOT / "tests" / "fake_server.py"))
CONFIG = ROOT / "validation" / "configs" / "llama-3.1-8b.json"
DRAFT = ROOT / "validation" / "configs" / "llama-3.1-8b-eagle3.json"
LOAD = Load(rates=[100.0], num_requests=20, input_tokens=16, output_tokens=9)
WARM = 32 + 2  # requests of the warm-up here


pytestmark = pytest.mark.usefixtures("short_warm_up")


def quiet(text: str) -> None:
    pass


def measured(folder: Path, load: Load = LOAD, **state: Any) -> Record:
    with FakeServer(**state) as server:
        path, failed = run_url(server.url, [], folder, Plan(), quiet, load=load, model=CONFIG, name="r")
    assert failed == 0
    return Record.model_validate(json.loads(path.read_text()))


# --- what is sent ---


def test_the_arrivals_sent_are_those_that_simulate_draws(tmp_path: Path) -> None:
    """The server saw them at the drawn times, in that order, each prompt another, of the length asked for."""
    load = LOAD.model_copy(update={"rates": [40.0], "seed": 7})
    with FakeServer() as server:
        path, _ = run_url(server.url, [], tmp_path, Plan(), quiet, load=load)
        seen = server.state.prompts_seen
    assert len(seen) == WARM + 20
    assert len({h for _, h, _ in seen}) == len(seen)
    assert {n for _, _, n in seen} == {16}
    drawn = np.concatenate([b.arrival for b in synthetic(20, Lengths(16), Lengths(9), 40.0, seed=7)]) / 1e12
    record = Record.model_validate(json.loads(path.read_text()))
    assert record.loads[0].arrival_ms == pytest.approx(1e3 * drawn, abs=1e-3)
    times = np.asarray([t for t, _, _ in seen[WARM:]])
    off = times - times[0] - drawn
    assert np.median(np.abs(off - np.median(off))) < 0.04  # the machine may be busy; a wrong seed is off by 0.2 s


def test_several_rates_reuse_no_prompt(tmp_path: Path) -> None:
    load = Load(rates=[200.0, 400.0], num_requests=[10, 20], input_tokens=16, output_tokens=3)
    with FakeServer() as server:
        path, _ = run_url(server.url, [], tmp_path, Plan(), quiet, load=load)
        seen = server.state.prompts_seen
    assert len({h for _, h, _ in seen}) == len(seen) == WARM + 30
    record = Record.model_validate(json.loads(path.read_text()))
    assert [r.results["completed"] for r in record.loads] == [10, 20]


def test_the_first_load_is_sent_before_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 requests at 100 a second those that are due in the first 50 ms, with prompts of their own; lone ones follow."""
    monkeypatch.setattr(load_module, "WARM_S", 0.05)
    load = LOAD.model_copy(update={"num_requests": 10})
    with FakeServer() as server:
        path, _ = run_url(server.url, [], tmp_path, Plan(), quiet, load=load)
        seen = server.state.prompts_seen
    early = int(np.sum(load_module.arrivals(load, 100.0, 10) < 0.05))
    assert 1 < early < 10
    assert len({h for _, h, _ in seen}) == len(seen) == WARM + early + 10
    record = Record.model_validate(json.loads(path.read_text()))
    assert record.loads[0].results["completed"] == 10
    assert load_module.seconds_of(load) == pytest.approx(10 + 0.05 + 0.1)


# --- what is measured ---


def disturbed(ms: float, by: float = 0.9) -> Any:
    """What the schedule says, or up to 90 % later: the machine is used by others too, and mistakes are factors of 2."""
    return pytest.approx(ms * (1 + by / 2), rel=by / 2)


def test_lone_requests_have_the_times_of_the_schedule(tmp_path: Path) -> None:
    """One request at a time: first token after the prefill, 40 ms, then 4 chunks of one token, 50 ms apart."""
    load = LOAD.model_copy(update={"rates": [3.0], "num_requests": 3, "output_tokens": 5})
    for attempt in range(3):  # until no neighbour was in the way
        run = measured(tmp_path / str(attempt), load, step_ms=50.0, prefill_ms=40.0).loads[0]
        seen = [run.results[f"median_{k}_ms"] for k in ("ttft", "tpot", "itl_chunk")] + [run.lone_ms["ttft"]]
        overhead = run.overhead_ms
        assert overhead is not None
        if seen == [disturbed(40), disturbed(50), disturbed(50), disturbed(40)] and -5 < overhead.value < 20:
            break
    else:
        pytest.fail(f"40, 50, 50 and 40 ms were measured as {seen}, overhead {overhead}")
    assert run.requests["chunks"] == [5, 5, 5]
    assert run.results["total_output_tokens"] == 15
    assert run.requests["prefill_ms"] == pytest.approx([40.0] * 3, abs=0.01)
    assert run.lone_ms["prefill"] == pytest.approx(40, abs=0.01)


def test_a_chunk_of_a_cycle_has_several_tokens(tmp_path: Path) -> None:
    """Cycles of 50 ms give 2 tokens: 25 ms a token, 2 cycles for 4 tokens after the first, as the histogram says."""
    load = LOAD.model_copy(update={"rates": [3.0], "num_requests": 3, "output_tokens": 5})
    run = measured(tmp_path, load, step_ms=50.0, draft_tokens=4).loads[0]
    assert run.results["median_tpot_ms"] == disturbed(25)
    assert run.results["median_itl_ms"] == disturbed(25)
    assert run.results["median_itl_chunk_ms"] == disturbed(50)
    assert run.requests["chunks"] == [3, 3, 3]
    assert run.requests["cycles"] == [2, 2, 2]
    assert run.accept_histogram == [0, 6]
    assert run.timers_s["target_verify"] == pytest.approx(6 * run.timers_s["eagle_draft"])
    assert 0.06 <= run.timers_s["target_verify"] <= 0.181  # 60 % of 2 to 6 cycles: requests may share some
    assert run.results["accept_length"] == 2


def test_vllm_streams_are_read_by_the_same_call(tmp_path: Path) -> None:
    load = LOAD.model_copy(update={"rates": [4.0], "num_requests": 3, "output_tokens": 5})
    run = measured(tmp_path, load, engine="vllm", step_ms=50.0).loads[0]
    assert run.results["median_tpot_ms"] == disturbed(50)
    assert run.overhead_ms is None


def test_the_pace_within_a_step_is_the_front_end_s() -> None:
    """96 requests, a step every 20 ms, whose chunks reach the client 100 us apart: 9.6 ms, then nothing. Of 40 requests at
    most 40 chunks of a step make a stretch of 32 only now and then: that tells nothing."""

    def streams(count: int) -> list[Stream]:
        steps = 0.02 * np.arange(50)
        return [Stream(0.0, 0.0, array("d", steps + 1e-4 * i), array("q", range(1, 51))) for i in range(count)]

    pace = _pace(streams(96))
    assert pace is not None
    assert pace.value == pytest.approx(100, abs=0.01)
    assert _pace(streams(40)) is None
    assert _pace([]) is None


def test_a_late_client_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a chunk is made to take 3 ms, while chunks of 20 streams come every 5 ms."""
    from specsim import streams

    read = streams._Receiver._events

    def slow(self: Any) -> None:
        time.sleep(0.003)
        read(self)

    monkeypatch.setattr(streams._Receiver, "_events", slow)
    run = measured(tmp_path, LOAD.model_copy(update={"rates": [1000.0]}), step_ms=5.0).loads[0]
    assert "the client itself was late" in run.notes[0]
    assert run.client["mean_lag_ms"] > 1


def test_a_record_of_many_tokens_stays_small(tmp_path: Path) -> None:
    """20 requests of 500 tokens: a chunk's time is not kept one by one, below 200 bytes a request."""
    load = LOAD.model_copy(update={"output_tokens": 500, "rates": [1000.0]})
    record = measured(tmp_path, load)
    assert record.loads[0].results["total_output_tokens"] == 10_000
    assert len(record.loads[0].model_dump_json()) < 200 * 20 + 2500


# --- faults ---


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stream-500", "answered 500: Internal Server Error"),
        ("stream-drop", "a stream broke off after"),
        ("stream-error", "out of memory"),
        ("stream-hang", "no answer within 2 s"),
        ("stream-abort", 'finish reason {"type": "abort", "message": "no memory"}'),
    ],
)
def test_failed_requests_leave_the_finished_ones(tmp_path: Path, fault: str, message: str) -> None:
    said: list[str] = []
    patience = 2.0 if fault == "stream-hang" else 30.0  # short where it has to pass, long for a busy machine
    with FakeServer(fault=fault) as server:
        path, failed = run_url(
            server.url, [], tmp_path, Plan(), said.append, load=LOAD, model=CONFIG, request_timeout=patience
        )
    assert failed == 1
    run = Record.model_validate(json.loads(path.read_text())).loads[0]
    assert 0 < run.results["completed"] < 20
    assert run.failed == 20 - run.results["completed"]
    assert len([line for line in said if message.replace("\\", "") in line]) == 1
    assert "\n" not in said[-1]


def test_a_server_that_dies_keeps_what_was_finished(tmp_path: Path) -> None:
    model = tmp_path / "tiny.json"
    model.write_text('{"num_hidden_layers": 8}')
    slow = LOAD.model_copy(
        update={"rates": [20.0]}
    )  # the first are done long before it dies, on a busy machine as well
    values = {"name": "t", "model": model, "load": slow.model_dump(), "env": {"FAKE_FAULT": "stream-die"}}
    with pytest.raises(ServerError, match=r"the server died: RuntimeError: CUDA error.*kept in .*t\.json"):
        run_setup(make_setup(values, "test"), tmp_path, Plan(), quiet, command=FAKE)
    run = Record.model_validate(json.loads((tmp_path / "t.json").read_text())).loads[0]
    assert 0 < run.results["completed"] < 20


def test_another_version_in_mid_run_counts_for_neither(tmp_path: Path) -> None:
    """The first rate is done before the server changes, during the second."""
    load = Load(rates=[500.0, 500.0], num_requests=[4, 10], input_tokens=16, output_tokens=3)
    with (
        FakeServer(fault="version") as server,
        pytest.raises(
            ServerError, match=r"fake 0\.5\.16 became /models/fake 9\.9; finished points are kept in .*v\.json"
        ),
    ):
        run_url(server.url, [], tmp_path, Plan(), quiet, load=load, name="v")
    record = Record.model_validate(json.loads((tmp_path / "v.json").read_text()))
    assert [r.num_requests for r in record.loads] == [4]
    assert "changed" in record.caveats[-1]


def test_a_proxy_that_holds_the_stream_back_is_told(tmp_path: Path) -> None:
    run = measured(tmp_path, LOAD.model_copy(update={"num_requests": 5, "rates": [50.0]}), fault="buffer").loads[0]
    assert any("in one piece" in note for note in run.notes)


def test_nothing_finished_leaves_no_record_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends the key back in its error, which is shown without it."""
    monkeypatch.setenv("SPECSIM_API_KEY", "sesame-open")
    with (
        FakeServer(fault="echo") as server,
        pytest.raises(ServerError, match=r"answered 400: unknown Bearer \[redacted\]$"),
    ):
        run_url(server.url, [], tmp_path, Plan(), quiet, load=LOAD)
    assert set(server.state.keys_seen) == {"Bearer sesame-open"}
    assert not list(tmp_path.glob("*.json"))


def test_a_full_disk_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rate was saved; the disk is full at the second."""
    load = Load(rates=[200.0, 300.0], num_requests=4, input_tokens=16, output_tokens=3)
    written: list[str] = []
    write = validate.write_atomically

    def full(path: Path, text: str) -> None:
        if len(written) == 1:
            raise WorkError(f"{path}: cannot be written: No space left on device")
        written.append(text)
        write(path, text)

    monkeypatch.setattr(validate, "write_atomically", full)
    with FakeServer() as server, pytest.raises(WorkError, match="No space left on device"):
        run_url(server.url, [], tmp_path, Plan(), quiet, load=load, name="d")
    record = Record.model_validate(json.loads((tmp_path / "d.json").read_text()))
    assert [r.rate for r in record.loads] == [200.0]


def test_ctrl_c_under_load_keeps_finished_rates_and_leaves_no_orphan(tmp_path: Path) -> None:
    child = tmp_path / "child"
    command = [sys.executable, "-m", "specsim", "validate", "--launch", "--model", str(CONFIG), "-o", str(tmp_path)]
    command += ["--rate", "200,1", "--num-requests", "5,50", "--input-tokens", "16", "--output-tokens", "3"]
    command += ["--name", "c", "--server-command", " ".join(FAKE)]
    env = {**os.environ, "FAKE_CHILD_FILE": str(child), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "rate 200" in line:
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(20) == 130
    assert rest.strip().splitlines() == ["interrupted"]
    record = Record.model_validate(json.loads((tmp_path / "c.json").read_text()))
    assert [r.rate for r in record.loads] == [200.0]
    assert (
        not Path(f"/proc/{child.read_text()}/cmdline").exists()
        or not Path(f"/proc/{child.read_text()}/cmdline").read_text()
    )


def test_the_command_measures_a_scenario_list_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--only, --time-limit and --resume, as for other scenarios; the records replay."""
    monkeypatch.setenv("FAKE_STEP_MS", "20")  # so that the chunks of a busy machine stay apart
    scenarios = tmp_path / "s.yaml"
    load = "{rates: [100, 200], num_requests: 10, input_tokens: 16, output_tokens: 5}"
    scenarios.write_text(
        f"- {{name: a, model: {CONFIG}, hardware: 1x-h200, load: {load}}}\n- {{name: b, model: {CONFIG}}}\n"
    )
    out = tmp_path / "runs"
    arguments = ["validate", "--scenarios", str(scenarios), "--only", "a", "--time-limit", "200", "--resume"]
    arguments += ["-o", str(out), "--server-command", " ".join(FAKE)]
    for _ in range(2):
        done = CliRunner().invoke(group, arguments, standalone_mode=False)
        assert done.return_value == 0, done.output
    assert [p.name for p in out.glob("*.json")] == ["a.json"]
    record = Record.model_validate(json.loads((out / "a.json").read_text()))
    assert [r.results["completed"] for r in record.loads] == [10, 10]
    done = CliRunner().invoke(group, ["validate", "--records", str(out), "--json"], standalone_mode=False)
    assert set(json.loads(done.stdout)["phases"]) == set(load_replay.PHASES)


def test_nobody_listens_any_more() -> None:
    with FakeServer() as server:
        client = Client(server.url, 5)
        served = identify(client)
    streams = send(client, served, [0.0, 0.3, 0.4], [[1], [2], [3]], 2).streams
    assert "connection refused" in streams[0].error
    assert [s.sent is None for s in streams] == [False, True, True]


def test_a_wrong_number_of_requests() -> None:
    values = {"name": "t", "model": CONFIG, "load": {"rates": [1, 2], "num_requests": [5]}}
    with pytest.raises(InputError, match="1 numbers of requests for 2 rates"):
        make_setup(values, "test")
    done = CliRunner().invoke(group, ["validate", "--url", "http://127.0.0.1:1", "--seed", "3"])
    assert "give --rate" in str(done.exception)


# --- set-ups ---


def test_the_limits_of_a_launched_server() -> None:
    values = {"name": "t", "model": CONFIG, "load": {"rates": [1]}}
    assert "--max-running-requests" not in server_flags(make_setup(values, "t"), "M", None, 1)  # SGLang's own
    values["load"] = {"rates": [1], "max_running": 96}
    flags = server_flags(make_setup(values, "t"), "M", None, 1)
    assert flags[flags.index("--max-running-requests") + 1] == flags[flags.index("--cuda-graph-max-bs") + 1] == "96"
    assert make_setup(values, "t").pairs() == []
    assert make_setup(values | {"batches": [1, 4]}, "t").pairs() == [(1, 1024), (4, 1024)]


def test_the_shipped_load_scenarios() -> None:
    for s in load_setups(ROOT / "validation" / "scenarios-load.yaml"):
        assert s.load is not None
        assert s.pairs() == []
        assert all(20 <= n / rate <= 30 for rate, n in s.load.runs())


# --- replay ---


def run_of(rate: float, results: dict[str, Any], n: int = 40, **more: Any) -> LoadRun:
    load = Load(rates=[rate], num_requests=n, input_tokens=1024, output_tokens=64)
    due = [round(1e3 * t, 3) for t in arrivals(load, rate, n)]
    return LoadRun(
        rate=rate,
        num_requests=n,
        input_tokens=1024,
        output_tokens=64,
        seed=0,
        arrival_ms=due,
        sent_ms=due,
        requests={"request": list(range(n))},
        results=results,
        **more,
    )


def scheduled(due: list[float], tokens: int, accept: int, prefill_s: float, step_s: float) -> list[Stream]:
    """What an ideal client sees of a server that prefills whoever waits, 10 ms a prompt, and else makes one step of all."""
    streams = [Stream(t, sent=t) for t in due]
    waiting, running, now = list(streams), [], 0.0
    while waiting or running:
        now = max(now, waiting[0].due) if not running else now
        new = [s for s in waiting if s.due <= now]
        waiting = waiting[len(new) :]
        now += prefill_s * len(new) if new else step_s
        for s in new or running:
            s.chunk_s.append(now)
            s.chunk_tokens.append(min(s.tokens + (1 if new else accept), tokens))
            s.last = {"meta_info": {"spec_verify_ct": len(s.chunk_s) - 1} if accept > 1 else {}}
        running = [s for s in [*running, *new] if s.tokens < tokens]
    return streams


@pytest.mark.parametrize("accept", [1, 2])
def test_a_server_with_the_simulators_times_replays_with_a_small_error(accept: int) -> None:
    """Steps of 20 ms whatever the batch, prefills of 10 ms, 60 requests a second: 60 % of the time is prefill."""
    load = Load(rates=[60.0], num_requests=300, input_tokens=16, output_tokens=17)
    due = arrivals(load, 60.0, 300)
    streams = scheduled(due.tolist(), 17, accept, 0.010, 0.020)
    run = _run(load, 60.0, due, streams, np.zeros(1), None)
    survival = () if accept == 1 else (1.0,)
    server = Server(
        Costs.fixed(0.020, 0.0, 0.010 / 16, batch=300, rows=accept),
        "prefill-first",
        300,
        8192,
        10**6,
        overlap=False,
        survival=survival,
    )
    said = load_replay._simulated(run, server)
    seen = load_replay.observed(run)
    assert set(seen) == set(load_replay.PHASES)
    for phase, value in seen.items():
        assert said[load_replay.PHASES[phase]] == pytest.approx(value, rel=1e-3), phase
    for name in ("mean_itl_ms", "mean_itl_chunk_ms", "mean_e2e_latency_ms", "concurrency", "duration"):
        assert said[name] == pytest.approx(run.results[name], rel=1e-3), name


@pytest.mark.parametrize("speculative", [False, True])
def test_load_records_replay_beside_the_simulator(tmp_path: Path, speculative: bool) -> None:
    """The record of a made-up run whose figures are twice the simulator's time: every error is -50 %, throughput 0."""
    flags = ["--model-path", "m", "--max-running-requests", "32"]
    if speculative:
        flags += ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
        flags += ["--speculative-num-draft-tokens", "4", "--speculative-draft-model-path", "d"]
    record = Record.model_validate(
        {
            "kind": "validation",
            "name": "made-up",
            "date": "2026-01-01",
            "hardware": "1x-h200",
            "engine": {"name": "sglang", "version": "0.5.16", "flags": flags},
            "target_config": json.loads(CONFIG.read_text()),
            "draft_config": json.loads(DRAFT.read_text()) if speculative else None,
        }
    )
    names = load_replay.PHASES.values()
    more = {"accept_histogram": [0, 100]} if speculative else {}
    base = {"accept_length": 2.0} if speculative else {}
    record.loads = [run_of(10.0, base | dict.fromkeys(names, 1.0), **more)]

    def replayed() -> dict[str, Any]:
        (tmp_path / "r.json").write_text(record.model_dump_json(by_alias=True))
        done = CliRunner().invoke(group, ["validate", "--records", str(tmp_path), "--json"], standalone_mode=False)
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    points = replayed()["points"]
    assert {p["record"] for p in points} == {"made-up 10/s"}
    for p in points:
        factor = 1 if p["phase"] == "throughput" else 2
        record.loads[0].results[load_replay.PHASES[p["phase"]]] = factor * p["predicted"]
        assert p["low"] <= p["predicted"] <= p["high"]
    phases = replayed()["phases"]
    assert set(phases) == set(load_replay.PHASES)
    for name, found in phases.items():
        assert found["worst_error"] == pytest.approx(0 if name == "throughput" else -0.5, abs=1e-4)


def test_the_simulator_is_told_the_servers_limits() -> None:
    told = {"max_running_requests": 7, "max_total_num_tokens": 9000, "chunked_prefill_size": 512, "page_size": 1}
    told |= {"cuda_graph_config": {"decode": {"backend": "full", "bs": [1, 2, 4]}}}
    wanted = {"max_running_requests": 7, "kv_tokens": 9000, "chunked_prefill_size": 512}
    assert load_replay.limits(told) == wanted | {"captured_sizes": [1, 2, 4]}
    for backend, on in (("breakable", True), ("disabled", False)):
        told["cuda_graph_config"] = {"prefill": {"backend": backend, "bs": [4, 8]}}
        assert load_replay.limits(told) == wanted | {"prefill_graphs": on, "prefill_graph_sizes": [4, 8]}
    told["cuda_graph_config"] = {"prefill": {"backend": "disabled"}}
    assert load_replay.limits(told) == wanted | {"prefill_graphs": False}
    for nothing in (None, "default", {"prefill": "x", "decode": 5}, {"prefill": {"bs": "4"}, "decode": {"bs": [None]}}):
        assert load_replay.limits({**told, "cuda_graph_config": nothing}) == wanted


def test_a_run_with_failures_is_left_out() -> None:
    with pytest.raises(InputError, match="3 of 40 requests failed"):
        load_replay.replay_load(run_of(10.0, {}, failed=3), None, {}, lambda phase: 0.0)  # type: ignore[arg-type]


def test_many_load_runs_are_worth_compiling_and_few_are_not() -> None:
    """Three simulations a run: 400 requests of 256 tokens are 307,200 tokens, seven runs of them above two million."""
    run = run_of(10.0, {}).model_copy(update={"num_requests": 400, "output_tokens": 256})
    assert not load_replay.worth_compiling([run] * 6)
    assert load_replay.worth_compiling([run] * 7)
