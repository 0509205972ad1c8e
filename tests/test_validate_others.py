"""Servers of other releases and what stands between them and the client: each a right figure, or a line that says what is not known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import Answered, FakeServer

from specsim.errors import InputError, WorkError
from specsim.live import Client, LogTail, PointError, ServerError, decode_lines, generate, identify
from specsim.load import Load
from specsim.measure import Plan, logged, measure
from specsim.observations import observe
from specsim.records import Point, Record
from specsim.validation import run_url

PLAN = Plan(min_repeats=2, max_repeats=2, lengths=(4, 8, 16, 24))
LOAD = Load(rates=[100.0], num_requests=6, input_tokens=16, output_tokens=5)
CERTIFICATE = Path(__file__).parent / "self_signed.pem"  # of 127.0.0.1, until 2126, with its key


pytestmark = pytest.mark.usefixtures("short_warm_up")


def quiet(text: str) -> None:
    pass


def one(batch: int = 2, **state: Any) -> Point:
    with FakeServer(**state) as server:
        client = Client(server.url, timeout=5)
        return measure(client, identify(client), batch, 32, PLAN, say=quiet)


def measured(url: str, folder: Path, **options: Any) -> tuple[Record, int, list[str]]:
    said: list[str] = []
    path, failed = run_url(url, options.pop("pairs", [(1, 32)]), folder, PLAN, said.append, name="r", **options)
    return Record.model_validate(json.loads(path.read_text())), failed, said


def at(path: str, *answer: Any) -> Callable[[str, Answered], Answered]:
    """A change of what one path answers: status, content and type."""
    return lambda asked, usual: (*answer, *usual[len(answer) :]) if asked == path else usual  # type: ignore[return-value]


# --- what it says that it is ---


def test_an_sglang_whose_server_info_names_no_model_is_asked_for_it() -> None:
    def change(path: str, usual: Answered) -> Answered:
        content = {"/server_info": {"version": "0.6"}, "/model_info": {"model_path": "/models/x"}}.get(path)
        return usual if content is None else (200, content, usual[2])

    with FakeServer(change=change) as server:
        served = identify(Client(server.url))
    assert (served.engine, served.version, served.model) == ("sglang", "0.6", "/models/x")


def test_an_sglang_whose_flags_a_proxy_hides_is_no_unknown_server() -> None:
    change = at("/get_model_info", 200, {"model_path": "m", "is_generation": True})
    with (
        FakeServer(info_path="/elsewhere", change=change) as server,
        pytest.raises(ServerError, match="an SGLang that does not say how it was started"),
    ):
        identify(Client(server.url))


def test_another_engine_with_the_paths_of_vllm_is_named() -> None:
    change = at("/v1/models", 200, {"data": [{"id": "m", "owned_by": "tensorrt_llm"}]})
    with (
        FakeServer(engine="vllm", change=change) as server,
        pytest.raises(ServerError, match="neither SGLang nor vLLM: /v1/models says that it is tensorrt_llm"),
    ):
        identify(Client(server.url))


def test_what_a_server_says_of_itself_is_one_line() -> None:
    with FakeServer(info={"version": "0.5\nerror: all is lost", "model_path": "m\r\nx"}) as server:
        served = identify(Client(server.url))
    assert (served.version, served.model) == ("0.5 error: all is lost", "m x")


# --- what it answers ---


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"engine": "vllm", "change": at("/v1/completions", 200, {"choices": [], "usage": None})}, r"not say .*\(usage\), of 16"),
        ({"meta": {"completion_tokens": float("inf")}}, "no meta_info with completion_tokens"),
        ({"meta": {"spec_verify_ct": 7}, "draft_tokens": 4}, "of 24 and of 135 tokens took 7 cycles each"),
        ({"change": at("/generate", 502, "<html>Bad Gateway</html>", "text/html")}, "answered 502: a web page"),
    ],
)  # fmt: skip
def test_answers_that_tell_nothing_are_a_failed_point(state: dict[str, Any], message: str) -> None:
    with pytest.raises(PointError, match=message):
        one(**state)


def test_an_answer_nested_too_deeply_is_told() -> None:
    with pytest.raises(ServerError, match="something that is not JSON"):
        one(change=at("/generate", 200, "[" * 200_000))


def test_a_time_longer_than_the_client_waited_is_not_believed() -> None:
    """50 tokens take 12 ms by the client's clock and 20 s by the server's: another unit, or another clock."""
    with FakeServer(meta={"e2e_latency": 20.0}) as server:
        client = Client(server.url)
        answer = generate(client, identify(client), [[1, 2]], 50)
    assert answer.skewed
    assert (2 + 0.2 * 49) / 1e3 <= answer.seconds == answer.wall_seconds < 20
    assert any(
        "of 8 of 8 batches that they took longer" in note for note in one(meta={"e2e_latency": 20.0}, step_ms=2.0).notes
    )


def test_cycles_without_anything_else_are_speculation() -> None:
    """The server does not say that it drafts, and has no histogram: that it counts cycles says so. 2 tokens each."""
    info = {"speculative_algorithm": None, "speculative_num_draft_tokens": None}
    point = one(draft_tokens=4, info=info, meta={"spec_correct_drafts_histogram": None})
    assert point.decode_ms is None
    assert point.cycle_ms is not None
    assert point.cycle_ms.value == pytest.approx(0.2, rel=1e-3)
    assert point.tokens_per_cycle == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    "meta",
    [
        {"spec_verify_ct": "x"},
        {"spec_verify_ct": float("nan")},
        {"spec_correct_drafts_histogram": [1, None, "x"]},
        {"spec_correct_drafts_histogram": {"0": 1}},
        {"spec_correct_drafts_histogram": [0.5, 1e30]},
        {"queue_time": float("inf")},
        {"prefill_finished_time": 10**400},
    ],
)
def test_nonsense_under_load_is_left_out_and_the_rest_kept(tmp_path: Path, meta: dict[str, Any]) -> None:
    with FakeServer(draft_tokens=4, meta=meta) as server:
        record, failed, _ = measured(server.url, tmp_path, pairs=[], load=LOAD)
    run = record.loads[0]
    assert (failed, run.results["completed"]) == (0, 6)
    assert ("cycles" in run.requests) == ("spec_verify_ct" not in meta)
    assert bool(run.accept_histogram) == ("spec_correct_drafts_histogram" not in meta)
    assert bool(run.lone_ms.get("queue")) or run.overhead_ms is None or "queue_time" not in meta


def test_a_number_of_tokens_that_is_none_is_a_failed_request(tmp_path: Path) -> None:
    with (
        FakeServer(meta={"completion_tokens": 10**30}) as server,
        pytest.raises(ServerError, match=r"the warm-up failed: .*0 tokens instead of 5"),
    ):
        measured(server.url, tmp_path, pairs=[], load=LOAD)


# --- its counters ---


@pytest.mark.parametrize("answer", [(403, "no"), (302, ""), (500, "x"), (200, "<html>", "text/html")])
def test_counters_that_cannot_be_read_end_no_run(tmp_path: Path, answer: tuple[Any, ...]) -> None:
    with FakeServer(change=at("/metrics", *answer)) as server:
        record, failed, said = measured(server.url, tmp_path)
    assert (failed, len(record.points)) == (0, 1)
    assert any("that batches were steady is not known" in caveat for caveat in record.caveats)
    assert "start it with --enable-metrics" in said[1]


@pytest.mark.parametrize(
    "text", ["", "sglang:cuda_graph_passes_total NaN\n", 'sglang:cuda_graph_passes_total{mode="decode_none"} 5\n']
)
def test_counters_that_stand_still_tell_no_steady_batch(text: str) -> None:
    """As a proxy that keeps a page, or a release without this counter, has them; those that move say nothing of it."""
    assert any("steady is not known" in note for note in one(change=at("/metrics", 200, text, "text/plain")).notes)
    assert one().notes == []


def test_every_scheduler_counts_its_own_retractions() -> None:
    """Of four data-parallel schedulers one took a request back: a quarter on average, and one in all."""
    asked: list[str] = []

    def change(path: str, usual: Answered) -> Answered:
        asked.extend([path] if path == "/metrics" else [])
        lost = len(asked) // 2  # one between the first two looks
        lines = [
            f'sglang:num_retracted_requests_total{{dp_rank="{r}",tp_rank="{r}"}} {lost if r == 2 else 0}'
            for r in range(4)
        ]
        return (200, "\n".join(lines), "text/plain") if path == "/metrics" else usual

    with pytest.raises(PointError, match="retracted 1 request:"):
        one(change=change)


def test_counters_that_fall_under_load_keep_the_run_and_count_as_a_fault(tmp_path: Path) -> None:
    """They count down, as those of a server that starts again and again would look."""
    left = [1000]

    def change(path: str, usual: Answered) -> Answered:
        left[0] -= 1
        line = f'sglang:forward_execution_seconds_total{{category="decode"}} {left[0]}'
        return (200, line, "text/plain") if path == "/metrics" else usual

    load = LOAD.model_copy(update={"rates": [100.0, 200.0]})
    with FakeServer(change=change) as server:
        record, failed, said = measured(server.url, tmp_path, pairs=[], load=load)
    assert (failed, [run.results["completed"] for run in record.loads]) == (2, [6, 6])
    assert sum("fell from one answer to the next" in caveat for caveat in record.caveats) == 2
    assert "fell from one answer to the next" in said[-1]


# --- its log ---


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """Cut in its last number, 8000.00 would be 80: a step a hundred times as long."""
    log = tmp_path / "log"
    log.write_text("")
    tail = LogTail(log)
    line = (
        "Decode batch, #running-req: 2, #token: 9, cuda graph: True, gen throughput (token/s): 8000.00, #queue-req: 0\n"
    )
    log.write_text(line + line[:-19])
    assert [line[:12] for line in tail.lines()] == ["Decode batch"]
    log.write_text(line + line)
    assert [found.step_ms for found in decode_lines([line, *tail.lines()])] == [0.25]


def test_a_log_that_begins_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old and long\n")
    tail = LogTail(log)
    log.write_text("new\n")
    assert tail.lines() == ["new"]


def test_schedulers_in_one_log_are_told_apart() -> None:
    """Two data-parallel schedulers with 4 of 8 requests each, 1 ms a step: 4,000 tokens a second on either."""
    text = "Decode batch, #running-req: 4, #token: 9, cuda graph: True, gen throughput (token/s): 4000.0, #queue-req: 0"
    lines = [f"[2026-01-01 00:00:0{i} DP{rank} TP{rank}] {text}" for i in range(3) for rank in (0, 1)]
    found = logged(decode_lines(lines), 8)
    assert found is not None
    assert (found.value, found.n) == (1.0, 4)
    assert logged(decode_lines(lines), 4) is None


# --- what stands between ---


def test_a_certificate_of_its_own_is_refused_with_the_mend_and_then_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer(tls=CERTIFICATE) as server:
        with pytest.raises(ServerError, match=r"CERTIFICATE_VERIFY_FAILED.*set SSL_CERT_FILE to it"):
            identify(Client(server.url))
        with pytest.raises(WorkError, match=r"CERTIFICATE_VERIFY_FAILED.*set SSL_CERT_FILE to it"):
            observe(server.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        assert observe(server.url)
        record, failed, _ = measured(server.url, tmp_path, load=LOAD)
    assert (failed, len(record.points), len(record.loads)) == (0, 1, 1)


def test_an_ipv6_address_is_asked_by_its_name(tmp_path: Path) -> None:
    try:
        server = FakeServer(host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        record, failed, _ = measured(server.url, tmp_path, load=LOAD)
    assert (failed, len(record.points), len(record.loads)) == (0, 1, 1)
    assert server.state.hosts_seen == {server.url.removeprefix("http://")}


def test_a_proxy_of_the_environment_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with FakeServer() as server:
        _, failed, _ = measured(server.url, tmp_path, load=LOAD)
    assert failed == 0


def test_a_key_that_does_not_arrive_is_told_apart_from_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    with FakeServer(fault="unauthorised") as server, pytest.raises(ServerError) as caught:
        identify(Client(server.url))
    assert "answered 401 to the key in OPENAI_API_KEY; is it the server's" in str(caught.value)


def test_a_key_in_a_path_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSIM_API_KEY", "sesame")
    client = Client("http://h:1/sesame/v1")
    assert (client.url, client.prefix) == ("http://h:1/[redacted]", "/sesame")


@pytest.mark.parametrize(
    "url",
    ["http://[::1", "http://a b:80", "http://h/a b", "http://h/ä", "http://x..y", "http://h:99999", "http://\0:1"],
)
def test_what_is_no_address_is_bad_input(url: str) -> None:
    with pytest.raises(InputError, match=r"^--url: ") as caught:
        Client(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://h:port?api_key=sesame", "ftp://h?key=sesame", "ftp://me:sesame@h"])
def test_an_address_that_is_refused_shows_no_key(url: str) -> None:
    with pytest.raises(InputError) as caught:
        Client(url)
    assert "sesame" not in str(caught.value)


def test_a_get_that_breaks_off_is_asked_once_more(tmp_path: Path) -> None:
    """Something in between drops every 23rd connection: a look at the counters is repeated, a batch is not."""
    with FakeServer() as server:
        handler = server.httpd.RequestHandlerClass
        usual, asked = handler.do_GET, [0]

        def dropping(self: Any) -> None:
            asked[0] += 1
            if asked[0] % 23:
                usual(self)
            else:
                self.close_connection = True

        handler.do_GET = dropping
        record, failed, _ = measured(server.url, tmp_path, pairs=[(1, 32), (2, 32)])
    assert asked[0] > 23
    assert (failed, len(record.points)) == (0, 2)


def test_a_point_fails_where_nothing_was_made_of_it(tmp_path: Path) -> None:
    with (
        FakeServer(change=at("/generate", 200, [])) as server,
        pytest.raises(WorkError, match="no point could be measured"),
    ):
        measured(server.url, tmp_path)


@pytest.mark.parametrize("odd", ["2.0.1", ".", "9" * 400, "9" * 5000, "nan", ""])
def test_a_garbled_number_of_a_log_costs_its_line_alone(odd: str) -> None:
    """Of lines that two processes write at once, or that are cut: the server is measured all the same."""
    line = "Decode batch, #running-req: 4, #token: 1, accept len: 2.00, cuda graph: True, gen throughput (token/s): 80.00, #queue-req: 0"
    whole = decode_lines([line] * 3)
    assert [found.step_ms for found in whole] == [100.0, 100.0]
    for number in ("4", "2.00", "80.00"):
        garbled = line.replace(f": {number},", f": {odd},")
        assert decode_lines([line] * 3 + [garbled]) == whole
