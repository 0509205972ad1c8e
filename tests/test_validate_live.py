"""Measuring a live server: regression, counters, phases, and every fault a server can show, against a fake one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer

from specsim import live
from specsim.cli import main
from specsim.errors import InputError, WorkError
from specsim.kernels import kernel_table, profile
from specsim.live import (
    ChangedError,
    Client,
    Counters,
    LogTail,
    PointError,
    ServerError,
    check_same,
    decode_lines,
    identify,
)
from specsim.measure import Plan, growth, lengths_for, logged, measure, slope
from specsim.records import Point, Record
from specsim.redaction import KEY_VARIABLES
from specsim.validation import check_folder, run_url

PLAN = Plan(min_repeats=2, max_repeats=2, lengths=(4, 8, 16, 24))


def quiet(text: str) -> None:
    pass


def one(batch: int = 2, context: int = 32, plan: Plan = PLAN, log: LogTail | None = None, **state: Any) -> Point:
    with FakeServer(**state) as server:
        client = Client(server.url, timeout=5)
        return measure(client, identify(client), batch, context, plan, log, quiet)


# --- regression ---


def test_slope_of_exact_times() -> None:
    """T = 5 ms + 2 ms n: the slope is 2 ms whatever the offset."""
    n = [4, 8, 16, 24]
    q = slope(n, [0.005 + 0.002 * k for k in n])
    assert q.value == pytest.approx(2.0, rel=1e-6)
    assert q.low is not None
    assert q.high is not None
    assert q.high - q.low < 0.01


def test_one_hiccup_does_not_move_the_slope() -> None:
    """One of twelve batches takes 80 ms longer: the mean slope would be off by far more than 1 %."""
    n = [10, 40, 70, 100] * 3
    noise = np.random.default_rng(1).normal(0, 1e-4, 12)
    seconds = [0.01 + 0.005 * k + e for k, e in zip(n, noise, strict=True)]
    seconds[7] += 0.08
    assert slope(n, seconds).value == pytest.approx(5.0, rel=0.005)


def test_the_interval_covers_about_80_percent() -> None:
    """400 series of known slope and Gaussian noise: 80 % intervals hold the truth in 72 to 88 % of them."""
    rng = np.random.default_rng(0)
    n = np.tile([10, 40, 70, 100], 3)
    held = 0
    for _ in range(400):
        q = slope(n.tolist(), (0.01 + 0.005 * n + rng.normal(0, 1e-3, 12)).tolist())
        held += bool(q.low is not None and q.high is not None and q.low <= 5.0 <= q.high)
    assert 0.72 <= held / 400 <= 0.88


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2]), ([3, 3, 3], [1, 2, 3])])
def test_slope_needs_points_and_lengths(x: list[float], y: list[float]) -> None:
    with pytest.raises(ValueError, match="three points"):
        slope(x, y)


def test_lengths_follow_the_time_of_a_step() -> None:
    """4 s over lengths that sum to 2.2 N: N = 4 / (2.2 x 0.02) = 91; bounded to 32..240."""
    assert lengths_for(0.02, Plan()) == (9, 36, 64, 91)
    assert lengths_for(1.0, Plan())[-1] == 32
    assert lengths_for(1e-4, Plan())[-1] == 240


# --- a server that behaves ---


def test_decode_without_speculation() -> None:
    """0.2 ms a step, of which the timer on each of two ranks has 0.9."""
    point = one()
    assert point.decode_ms is not None
    assert point.decode_ms.value == pytest.approx(0.2, rel=1e-3)
    assert point.cycle_ms is None
    assert point.host_ms is not None
    assert point.host_ms.value == pytest.approx(0.02, rel=0.02)
    assert point.raw["timer_ms"]["value"] == pytest.approx(0.18, rel=1e-3)
    assert point.tokens_per_s is not None
    assert point.tokens_per_s.value == pytest.approx(2 / 0.2e-3, rel=1e-3)
    assert point.cuda_graph is True
    assert point.context is not None
    assert 32 < point.context < 32 + 25
    assert point.notes == []


def test_cycle_with_its_phases() -> None:
    """0.2 ms a cycle: verify 0.12, draft 0.02, extend 0.01; the rest is host. Each cycle gives 2 tokens."""
    point = one(draft_tokens=4)
    found = {k: getattr(point, f"{k}_ms").value for k in ("cycle", "verify", "draft", "extend", "host")}
    assert found == pytest.approx({"cycle": 0.2, "verify": 0.12, "draft": 0.02, "extend": 0.01, "host": 0.05}, rel=1e-2)
    assert point.tokens_per_cycle == 2
    assert point.accept_rate_by_position == [1.0]
    assert point.decode_ms is None


def test_vllm_is_measured_by_the_same_call() -> None:
    point = one(engine="vllm", draft_tokens=3, step_ms=4.0)
    assert point.cycle_ms is not None
    assert point.cycle_ms.value == pytest.approx(4.0, rel=0.3)  # the client's clock: a busy machine disturbs it
    assert point.tokens_per_cycle == pytest.approx(2, rel=0.1)
    assert point.accept_rate_by_position == [1.0, 0.0]
    plain = one(engine="vllm", step_ms=4.0, engines=8)
    assert plain.decode_ms is not None
    assert plain.decode_ms.value == pytest.approx(4.0, rel=0.3)


def test_a_cycle_of_vllm_is_one_of_the_longest_request() -> None:
    """Requests accept differently, and the time is that of the one that needs most cycles: 4 ms each, though the mean
    request makes four fifths of them; the accept length is of the mean: 2 tokens / 0.8."""
    point = one(engine="vllm", draft_tokens=3, step_ms=4.0, share=0.8)
    assert point.cycle_ms is not None
    assert point.cycle_ms.value == pytest.approx(4.0, rel=0.1)
    assert point.tokens_per_cycle == pytest.approx(2 / 0.8, rel=0.1)


def test_steps_of_vllm_without_a_draft_are_cycles_of_one_token() -> None:
    """N-grams find nothing to draft in half of the steps: cycles of 4 ms emit 1.5 tokens."""
    point = one(engine="vllm", draft_tokens=3, step_ms=4.0, idle=0.5)
    assert point.cycle_ms is not None
    assert point.cycle_ms.value == pytest.approx(4.0, rel=0.1)
    assert point.tokens_per_cycle == pytest.approx(1.5, rel=0.1)


def test_counters_that_fall_are_told() -> None:
    """A server that starts again counts from zero; a proxy shows now one server's counters, now another's."""
    before, after = (live.Counters(f'vllm:spec_decode_num_drafts_total{{engine="0"}} {n}') for n in (9, 3))
    with pytest.raises(PointError, match="fell from one answer to the next"):
        growth(before, after, "vllm:spec_decode_num_drafts")


def test_a_value_is_what_follows_the_labels() -> None:
    """OpenMetrics puts a time stamp and an exemplar after it, with labels of its own."""
    counters = live.Counters('vllm:x_total{engine="0",pod="a}b"} 9 17.5 # {trace_id="y"} 0.5 17.4\n# EOF')
    assert counters.per_rank("vllm:x", engine="0") == 9


def test_without_metrics_the_step_is_still_measured() -> None:
    point = one(fault="no-metrics")
    assert point.decode_ms is not None
    assert point.decode_ms.value == pytest.approx(0.2, rel=1e-3)
    assert point.host_ms is None
    assert point.cuda_graph is None


def test_a_log_that_disagrees_is_reported_and_preferred(tmp_path: Path) -> None:
    """Each batch the log says 2 requests at 8,000 tokens a second: 0.25 ms a step, 25 % above the regression's 0.2."""
    log = tmp_path / "server.log"
    log.write_text("")

    class Growing(LogTail):
        def lines(self) -> list[str]:
            line = "Decode batch, #running-req: 2, #token: 9, cuda graph: True, gen throughput (token/s): 8000.00, #queue-req: 0"
            return ["Prefill batch, #new-seq: 2", line, line]

    point = one(log=Growing(log))
    assert point.decode_ms is not None
    assert point.decode_ms.value == pytest.approx(0.25)
    assert "log" in point.decode_ms.how
    assert "differ by -20.0%" in point.notes[0]


def test_log_lines_across_a_prefill_are_not_steady() -> None:
    def decode(n: int, rate: float, accept: str = "") -> str:
        return f"[x] Decode batch, #running-req: {n}, #token: 1, {accept}cuda graph: False, gen throughput (token/s): {rate}, #queue-req: 0"

    lines = [decode(4, 100), decode(4, 400), "Prefill batch, #new-seq: 1", decode(4, 50), decode(2, 100)]
    lines.append(decode(2, 500, "accept len: 2.50, accept rate: 0.50, "))
    found = decode_lines(lines)
    assert [(x.running, x.step_ms, x.graph) for x in found] == [(4, 10.0, False), (2, 10.0, False)]
    assert logged(found, 4) is None


def test_log_tail_reads_only_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = LogTail(path)
    with path.open("a") as file:
        file.write("new\n")
    assert tail.lines() == ["new"]
    assert tail.lines() == []
    path.unlink()
    assert tail.lines() == []


def test_counters_are_averaged_over_ranks() -> None:
    text = 'a_total{tp_rank="0",category="x"} 3\na_total{tp_rank="1",category="x"} 5\na_total{tp_rank="0",category="y"} NaN\njunk\n'
    counters = Counters(text)
    assert counters.per_rank("a", category="x") == 4
    assert counters.per_rank("a", category="y") is None
    assert counters.categories("a", "category") == ["x"]


# --- faults ---


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"fault": "proxy"}, "answered with a web page; is a proxy in front"),
        ({"fault": "redirect"}, "answered 302, a redirect"),
        ({"fault": "unauthorised"}, "answered 401; set SPECSIM_API_KEY"),
        ({"engine": "other"}, "is neither SGLang"),
    ],
)
def test_what_is_not_an_inference_server(state: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with FakeServer(**state) as server, pytest.raises(ServerError, match=message) as caught:
        identify(Client(server.url))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"fault": "500"}, "answered 500: Internal Server Error"),
        ({"fault": "reject"}, "answered 400: batch is too large"),
        ({"fault": "retract"}, "retracted 1 request:"),
        ({"fault": "short"}, r"2 answers of \[7\] tokens instead of 2 of 8"),
        ({"fault": "unsteady"}, "not steady: 2.00 target passes a step"),
        ({"fault": "unsteady", "engine": "vllm", "step_ms": 2.0}, "not steady: 2.00 target passes a step"),
        ({"capacity": 1}, "runs at most 1 request at once"),
        ({"fault": "stripped", "draft_tokens": 4}, "do not say how many cycles they took"),
        ({"fault": "no-drafts", "engine": "vllm", "draft_tokens": 4}, "it drafts, and /metrics counts no draft"),
        ({"fault": "bare"}, "no meta_info with completion_tokens"),
    ],
)
def test_a_point_that_cannot_be_measured(state: dict[str, Any], message: str) -> None:
    with pytest.raises(PointError, match=message) as caught:
        one(**state)
    assert "\n" not in str(caught.value)


def test_a_batch_beyond_the_kv_cache_is_not_sent() -> None:
    with pytest.raises(PointError, match="KV cache and the server has 100000"):
        one(batch=4, context=40000)


@pytest.mark.parametrize(
    ("info", "running"),
    [
        ({}, 48),
        ({"internal_states": {"effective_max_running_requests_per_dp": 16}}, 16),  # as older releases have it
        ({"internal_states": [{"effective_max_running_requests_per_dp": 16}, {}]}, 16),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 4}] * 8, "dp_size": 8}, 32),
        ({"internal_states": []}, 48),
        ({"internal_states": [None], "max_running_requests": None}, None),
    ],
)
def test_how_many_requests_run_at_once(info: dict[str, Any], running: int | None) -> None:
    """The smaller of what was asked for (48) and what the ranks hold together; by every release's layout and path."""
    with FakeServer(info=info, info_path="/get_server_info") as server:
        served = identify(Client(server.url))
    assert served.max_running == running
    assert served.kv_tokens == 100000 * info.get("dp_size", 1)


def test_a_vllm_that_drafts_and_counts_no_draft_is_not_taken_for_plain_decoding(tmp_path: Path) -> None:
    """Its flags say that it drafts, where nothing else does: /metrics may be out of reach."""
    said: list[str] = []
    flags = ["--speculative-config", '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3}']
    with FakeServer(engine="vllm", draft_tokens=4, fault="no-metrics") as server:
        with pytest.raises(WorkError, match="no point could be measured"):
            run_url(server.url, [(1, 32)], tmp_path, PLAN, said.append, flags=flags)
        assert "it drafts, and /metrics counts no draft" in said[-1]
    with FakeServer(engine="vllm", draft_tokens=4, step_ms=4.0) as server:
        path, failed = run_url(server.url, [(1, 32)], tmp_path, PLAN, quiet, flags=flags)
    assert failed == 0
    assert json.loads(path.read_text())["points"][0]["tokens_per_cycle"] == pytest.approx(2, rel=0.1)


def test_a_model_a_profile_or_a_log_that_is_not_there_is_told_first(tmp_path: Path) -> None:
    for what, words in (
        ({"log": tmp_path / "no.log"}, "no such log"),
        ({"model": tmp_path / "no"}, "no such target config"),
        ({"hardware": "no"}, "no hardware profile"),
        ({"flags": ["--speculative-config", "{"]}, "speculative-config"),
    ):
        with FakeServer(engine="vllm") as server:
            with pytest.raises(InputError, match=words):
                run_url(server.url, [(1, 32)], tmp_path, PLAN, quiet, **what)  # type: ignore[arg-type]
            assert server.state.batches == 0


def test_a_slow_server_ends_at_the_time_limit_of_a_request() -> None:
    with FakeServer(fault="slow") as server:
        client = Client(server.url, timeout=0.3)
        with pytest.raises(ServerError, match=r"no answer within 0\.3 s"):
            measure(client, identify(client), 1, 32, PLAN, None, quiet)


def test_nobody_listens() -> None:
    with FakeServer() as server:
        url = server.url
    with pytest.raises(ServerError, match="connection refused"):
        identify(Client(url))


@pytest.mark.parametrize("fault", [None, "loading", "proxy"])
def test_a_server_that_does_not_answer_leaves_no_folder(
    fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeServer(fault=fault) as server:
        url = server.url
        if fault:
            with pytest.raises(SystemExit, match="1"):
                main(["validate", "--url", url, "--batch", "1", "--quick"])
    if not fault:  # it is gone by now
        with pytest.raises(SystemExit, match="1"):
            main(["validate", "--url", url, "-o", "a/b"])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "new" / "deep"):
        check_folder(folder)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match="cannot be written"):
        check_folder(tmp_path / "file" / "runs")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:port", "http://user:pw@h:1"])
def test_addresses_that_cannot_be(url: str) -> None:
    with pytest.raises(InputError):
        Client(url)


def test_what_no_server_can_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not exist (RFC 2606), TLS to a server that speaks none, and a key that no header can hold."""
    with pytest.raises(ServerError, match=r"nowhere\.invalid: no such host"):
        identify(Client("http://nowhere.invalid"))
    with FakeServer() as server:
        with pytest.raises(ServerError, match="TLS certificate or protocol is refused"):
            identify(Client(server.url.replace("http:", "https:"), timeout=5))
        monkeypatch.setenv("SPECSIM_API_KEY", "sesame\r\nX-Other: 1")
        with pytest.raises(InputError, match="SPECSIM_API_KEY: holds what no HTTP header can") as caught:
            identify(Client(server.url))
    assert "sesame" not in str(caught.value)


def test_a_key_that_the_server_sends_back_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSIM_API_KEY", "sesame")
    said: list[str] = []
    for fault in ("bare", "echo"):
        with FakeServer(fault=fault) as server, pytest.raises(WorkError):
            run_url(server.url, [(1, 32)], tmp_path, PLAN, said.append)
        assert "Bearer [redacted]" in said[-1]
    assert not list(tmp_path.glob("*.json"))


def test_other_flags_are_another_server() -> None:
    with FakeServer() as server:
        client = Client(server.url)
        served = identify(client)
        check_same(client, served)
        server.state.capacity = 7
        with pytest.raises(ChangedError, match="it has other flags now"):
            check_same(client, served)


def test_a_failed_point_leaves_the_others(tmp_path: Path) -> None:
    """The server takes one request at a time: batch 1 is kept, batch 2 is a caveat, and the count says so."""
    with FakeServer(fault="reject") as server:
        path, failed = run_url(server.url, [(1, 32), (2, 32)], tmp_path, PLAN, quiet)
    record = Record.model_validate(json.loads(path.read_text()))
    assert failed == 1
    assert [p.batch for p in record.points] == [1]
    assert any("batch 2 at context 32 failed" in c for c in record.caveats)


def test_a_broken_connection_costs_its_point_alone(tmp_path: Path) -> None:
    """A point takes 11 batches; the 19th to 21st are dropped: one in each of three points, since no batch is sent again that may be
    running still. The server answers meanwhile, so the last point is measured."""
    said: list[str] = []
    with FakeServer(fault="drop") as server:
        path, failed = run_url(server.url, [(1, 32), (2, 32), (3, 32), (3, 32), (4, 32)], tmp_path, PLAN, said.append)
    record = Record.model_validate(json.loads(path.read_text()))
    assert (failed, [p.batch for p in record.points]) == (3, [1, 4])
    assert "broke off" in said[2]


def test_another_version_in_mid_run_keeps_finished_points(tmp_path: Path) -> None:
    """A point takes 11 batches; the version is another from the 19th on, in the second point."""
    message = "fake 0.5.16 became /models/fake 9.9; finished points are kept in .*lost.json"
    with FakeServer(fault="version") as server, pytest.raises(ServerError, match=message):
        run_url(server.url, [(1, 32), (2, 32), (4, 32)], tmp_path, PLAN, quiet, name="lost")
    record = Record.model_validate(json.loads((tmp_path / "lost.json").read_text()))
    assert [p.batch for p in record.points] == [1]
    assert record.caveats


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    with FakeServer(fault="500") as server, pytest.raises(WorkError, match="no point could be measured"):
        run_url(server.url, [(1, 32)], tmp_path, PLAN, quiet)


def test_the_api_key_is_sent_and_never_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSIM_API_KEY", "sesame")
    said: list[str] = []
    with FakeServer(fault="unauthorised") as server:
        path, failed = run_url(server.url, [(1, 32)], tmp_path, PLAN, said.append)
        assert set(server.state.keys_seen) == {"Bearer sesame"}
    assert failed == 0
    assert "sesame" not in path.read_text() + " ".join(said)


def test_the_record_rebuilds_the_launch_flags(tmp_path: Path) -> None:
    with FakeServer(draft_tokens=4) as server:
        path, _ = run_url(server.url, [(1, 32)], tmp_path, PLAN, quiet)
    record = Record.model_validate(json.loads(path.read_text()))
    assert record.engine is not None
    assert record.engine.version == "0.5.16"
    assert record.engine.flags[:4] == ["--model-path", "/models/fake", "--tp", "2"]
    assert "--disable-cuda-graph" in record.engine.flags
    assert record.engine.flags[-4:] == ["--speculative-algorithm", "EAGLE3", "--speculative-num-draft-tokens", "4"]


# --- kernel traces ---


def trace(path: Path, steps: int) -> Path:
    """Each step: two `gemm` of 3 us, one `norm` of 1 us, and a CPU event that does not count."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": 'tricky "]} name'}}]
    for _ in range(steps):
        for name, cat, us in (
            ("gemm", "kernel", 3.0),
            ("gemm", "kernel", 3.0),
            ("norm", "kernel", 1.0),
            ("op", "cpu_op", 50),
        ):
            events.append({"ph": "X", "cat": cat, "name": name, "ts": 1.0, "dur": us})
    with gzip.open(path, "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": events, "traceName": "t"}, file, indent=2)
    return path


def test_a_profile_of_a_live_server() -> None:
    """The fake profiler writes one kernel of 2 us a step."""
    with FakeServer() as server:
        client = Client(server.url, timeout=5)
        table = profile(client, identify(client), 2, 32)
    assert (table["batch"], table["context"], table["kernels_per_step"]) == (2, 32, 1.0)
    assert table["busy_ms_per_step"] == pytest.approx(0.002)


def test_a_profiler_without_a_trace_is_a_failed_point() -> None:
    with FakeServer(fault="no-trace") as server:
        client = Client(server.url, timeout=5)
        with pytest.raises(PointError, match="left no trace"):
            profile(client, identify(client), 2, 32, trace_s=0.2)


def test_kernel_table_counts_a_step(tmp_path: Path) -> None:
    """7 us a step. The profiler kept six steps instead of five: six divides every count."""
    table = kernel_table(trace(tmp_path / "t.json.gz", 6))
    assert table["steps"] == 6
    assert table["kernels_per_step"] == 3
    assert table["busy_ms_per_step"] == pytest.approx(0.007)
    assert table["kernels"][0] == {"name": "gemm", "per_step": 2.0, "mean_us": 3.0, "ms_per_step": 0.006}


def test_kernels_that_run_once_a_step_tell_how_many_steps_there_were(tmp_path: Path) -> None:
    """48 layers in five steps: 240 launches, which four divides as well; the embedding ran five times."""
    path = tmp_path / "t.json"
    ran = {"gemm": 240, "norm": 480, "embedding": 5, "argmax": 5, "copy": 8}
    events = [{"ph": "X", "cat": "kernel", "name": n, "ts": 1.0, "dur": 1.0} for n, c in ran.items() for _ in range(c)]
    path.write_text(json.dumps({"traceEvents": events}))
    table = kernel_table(path)
    assert (table["steps"], table["kernels"][1]["per_step"]) == (5, 48.0)


def test_kernel_table_tells_what_the_host_took_to_launch(tmp_path: Path) -> None:
    """Launched at 10, 25 and 60 us on one thread: b took 15 us to get to and c 35; a has nothing before it, the event
    record between is no kernel, and another thread's call at 20 us is not in the way."""
    path = tmp_path / "t.json"
    events = [
        {"ph": "X", "cat": "kernel", "name": n, "ts": 99.0, "dur": 1.0, "args": {"correlation": c}}
        for c, n in ((1, "a"), (2, "b"), (3, "c"), (9, "other"))
    ]
    for correlation, thread, at in ((3, 7, 60.0), (1, 7, 10.0), (2, 7, 25.0), (9, 8, 20.0), (4, 7, 50.0)):
        call = {"ph": "X", "cat": "cuda_runtime", "name": "call", "tid": thread, "ts": at, "dur": 1.0}
        events.append(call | {"args": {"correlation": correlation}})
    path.write_text(json.dumps({"traceEvents": events}))
    rows = {row["name"]: row for row in kernel_table(path, steps=1)["kernels"]}
    assert (rows["b"]["host_us"], rows["c"]["host_us"]) == (15.0, 35.0)
    assert rows["c"]["host_ms_per_step"] == 0.035
    assert not {"host_us"} & (rows["a"].keys() | rows["other"].keys())


def test_a_cut_trace_counts_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_bytes(gzip.decompress(trace(tmp_path / "t.json.gz", 5).read_bytes())[:-200])
    assert kernel_table(path)["kernels"][0]["name"] == "gemm"


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": []}', "<html>"])
def test_what_is_not_a_trace(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"traceEvents|no GPU kernel"):
        kernel_table(path)
