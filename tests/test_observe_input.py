"""Sources as they come: encodings, damage, addresses, secrets, and the command."""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specsim.cli import main
from specsim.errors import InputError, WorkError
from specsim.observations import contradictions, observe, salvage
from specsim.observe_checks import quantity, read_positions, read_rates
from specsim.observe_read import open_sources, to_flags
from specsim.redaction import REDACTED, safe_address, scrub

LINE = (
    "[2026-02-03 10:00:0{} TP0] Decode batch, #running-req: 1, #token: 1500, token usage: 0.05, accept len: 1.80, accept rate: 0.60,"
    " cuda graph: True, gen throughput (token/s): 60.00, #queue-req: 0, \n"
)
LOG = "".join(LINE.format(i) for i in range(4))
BENCH = {
    "backend": "sglang",
    "duration": 10.0,
    "completed": 4,
    "output_throughput": 40.0,
    "mean_tpot_ms": 10.0,
    "accept_length": 2.0,
}


def write(tmp_path: Path, data: bytes | str, name: str = "input") -> Path:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


# --- encodings and damage


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252"]
)
def test_any_encoding(tmp_path, encoding):
    (record,) = observe(write(tmp_path, LOG.replace("TP0", "TP0").encode(encoding)))
    assert record.points[0].cycle_ms.value == pytest.approx(30.0)


def test_bytes_that_are_not_utf_8_are_named(tmp_path):
    (record,) = observe(write(tmp_path, "caf\xe9\n".encode("latin-1") + LOG.encode()))
    assert any("line 1 is not UTF-8; it was read as latin-1" in c for c in record.caveats)


def test_colours_returns_and_nulls(tmp_path):
    coloured = LOG.replace("Decode", "\x1b[32mDecode").replace(" batch", " batch\x1b[0m").replace("\n", "\r\n")
    (record,) = observe(write(tmp_path, "progress  1%\rprogress 99%\r" + coloured + "\0\0\0"))
    assert record.points[0].raw["lines"] == 4


def test_packed_logs(tmp_path):
    assert (
        observe(write(tmp_path, gzip.compress(LOG.encode()) + gzip.compress(LOG.encode())))[0].points[0].raw["lines"]
        == 8
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"hello\n", "holds nothing of a known format"),
        (b"PK\x03\x04....", "a zip archive; unpack it first"),
        (b"\x28\xb5\x2f\xfd....", "zstd"),
        (b"BZh9....", "bzip2 -d"),
        (b"SQLite format 3\0....", "SQLite.*take a torch profile instead"),
        (b"\x1f\x8b\x08 broken", "holds nothing of a known format \\(the gzip stream breaks"),
        (b'{"a": [1, 2', "is not JSON that can be read"),
        (b'{"a": 1}', "holds nothing of a known format"),
        (b"[" * 100_000, "holds nothing|nested too deeply"),
        (b'{"a": ' * 5000, "nested too deeply|not JSON"),
        (
            b'{"output_throughput": ' + b"9" * 5000 + b', "duration": 1}',
            "not JSON that can be read: of too many digits",
        ),
    ],
)
def test_hopeless_inputs_are_one_line_that_names_the_file(tmp_path, data, message):
    path = write(tmp_path, data)
    with pytest.raises(InputError, match=message) as problem:
        observe(path)
    assert str(path) in str(problem.value)
    assert "\n" not in str(problem.value)


def test_a_pipe_is_read_as_a_file_is(tmp_path):
    """As a shell's <(zcat server.log.gz) gives it; nothing in it, and /dev/null, are empty files."""
    for content, lines in ((LOG.encode(), 4), (gzip.compress(LOG.encode()), 4), (b"", 0)):
        pipe = tmp_path / f"pipe{len(content)}"
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        try:
            if lines:
                assert observe(pipe)[0].points[0].raw["lines"] == lines
            else:
                with pytest.raises(InputError, match="is empty"):
                    observe(pipe)
        finally:
            writer.join(timeout=10)
    with pytest.raises(InputError, match="/dev/null: is empty"):
        observe("/dev/null")


def test_paths_that_are_no_files(tmp_path):
    for where in (tmp_path, tmp_path / "missing", "a\0b"):
        with pytest.raises(InputError):
            observe(where)


def test_a_document_that_is_cut_off_gives_its_whole_cells(tmp_path):
    rows = [{"concurrency": n, "context_tokens": 0, "aggregate_tps": 50.0 * n} for n in (1, 2, 4)]
    text = json.dumps({"metadata": {"engine": "vllm"}, "results": rows}, indent=1)
    (record,) = observe(write(tmp_path, text[: text.rindex("aggregate_tps")]))
    assert [p.batch for p in record.points] == [1, 2]
    assert any("the JSON breaks here" in c and "line " in c for c in record.caveats)


def test_salvage():
    assert salvage('{"a": [1, 2, {"b": 3}, {"c": ') == {"a": [1, 2, {"b": 3}]}
    assert salvage('{"a": "x, y", "b') == {"a": "x, y"}
    assert salvage("nothing") is None


def test_a_million_bad_lines_are_one_caveat(tmp_path):
    (record,) = observe(write(tmp_path, LOG + "Decode batch, #running-req: 1, #tok\n" * 20_000))
    assert len(record.caveats) == 1
    assert "line 5: decode line is cut off" in record.caveats[0]


def test_hostile_lines_take_no_time(tmp_path):
    """Unclosed quotes, runs of blanks and repeated keys, 200 KB a line: each must be linear."""
    hostile = ["ServerArgs(" + "a='" * 60_000, "SpecDecoding metrics: " + "1, " * 60_000, "#gen drafts = 1" * 15_000]
    hostile += [
        "SpecDecoding metrics: Mean acceptance length: 1, " + " " * 200_000 + "x",
        "Decode batch" + "a: " * 60_000,
    ]
    hostile += ["non-default args: {" + "'a': '" * 40_000, "|" * 200_000, 'sglang:x{a="' * 20_000]
    observe(write(tmp_path, "\n".join(hostile) + "\n" + LOG))


def test_a_long_line_is_skipped_and_the_rest_read(tmp_path, monkeypatch):
    monkeypatch.setattr("specsim.observe_read.MAX_LINE", 1 << 20)
    (record,) = observe(write(tmp_path, "x" * (4 << 20) + "\n" + LOG))
    assert record.points[0].raw["lines"] == 4
    assert any("line 1 is longer" in c for c in record.caveats)


# --- secrets


def test_secrets_are_removed():
    assert scrub({"api_key": "x", "hf_token": "y", "max_tokens": 5, "deep": [{"ssl_keyfile_password": "z"}]}) == {
        "api_key": REDACTED,
        "hf_token": REDACTED,
        "max_tokens": 5,
        "deep": [{"ssl_keyfile_password": REDACTED}],
    }
    assert scrub(["--api-key", "x", "--admin-api-key=y", "--tp", "8"]) == [
        "--api-key",
        REDACTED,
        f"--admin-api-key={REDACTED}",
        "--tp",
        "8",
    ]
    assert "hf_abc" not in scrub("pulled with hf_abcdefghijkl")
    assert "s3cret" not in scrub("http://user:s3cret@host/x")
    assert to_flags({"tp_size": 8, "api_key": "x", "served_model_name": "n", "disable_cuda_graph": True}) == [
        "--tp-size",
        "8",
        "--disable-cuda-graph",
    ]


def test_addresses_lose_their_secrets():
    shown = safe_address("http://me:pw@host:1/metrics?api_key=abc&token=def&x=1")
    assert shown == f"http://{REDACTED}@host:1/metrics?api_key={REDACTED}&token={REDACTED}&x=1"


def test_the_launch_line_in_a_log_keeps_no_key(tmp_path):
    log = (
        "python -m sglang.launch_server --model-path m --tp 8 --api-key topsecret --speculative-num-draft-tokens 3\n"
        + LOG
    )
    (record,) = observe(write(tmp_path, log))
    assert "topsecret" not in record.model_dump_json()
    assert record.engine.flags[:4] == ["--model-path", "m", "--tp-size", "8"]


# --- addresses


@pytest.fixture
def server(monkeypatch) -> Iterator[tuple[str, dict[str, Any]]]:
    """A server whose answers a test sets: path -> (status, headers, body). It notes the headers that it was sent."""
    answers: dict[str, Any] = {"seen": []}
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers["seen"].append((self.path, self.headers.get("Authorization")))
            status, headers, body = answers.get(self.path, (404, {}, b""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}", answers
    running.shutdown()
    running.server_close()
    thread.join()


METRICS = b'vllm:num_requests_running{engine="0"} 2.0\n'


@pytest.mark.parametrize("page", [b"<!doctype html><p>log in", b'["of another program"]'])
def test_a_path_that_something_else_answers_costs_itself_alone(server, page):
    """A gateway answers what it does not know with a page of its own, and passes /metrics on."""
    address, answers = server
    answers["/metrics"] = (200, {}, METRICS)
    for path in ("/get_server_info", "/server_info"):
        answers[path] = (200, {"Content-Type": "text/html"}, page)
    assert [r.name for r in observe(address)] == ["vLLM metrics"]
    answers["/metrics"] = (200, {}, page)
    with pytest.raises(WorkError if page.startswith(b"<") else InputError) as found:
        observe(address)
    if page.startswith(b"<"):
        assert "answered with a web page; is a proxy in front" in str(found.value)


@pytest.mark.parametrize(
    "head", ["Content-Length: 4000\r\n\r\n", f"Transfer-Encoding: chunked\r\n\r\n{len(METRICS) + 60:x}\r\n"]
)
def test_an_answer_that_breaks_off_is_used_as_far_as_it_came_and_says_so(head):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(f"HTTP/1.1 200 OK\r\n{head}".encode() + METRICS)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        (record,) = observe(f"http://127.0.0.1:{listening.getsockname()[1]}/metrics")
        thread.join()
    assert record.points[0].batch == 2
    assert any(f"breaks off after {len(METRICS)} bytes" in caveat for caveat in record.caveats)


def test_a_server_is_asked_for_all_that_it_publishes(server, monkeypatch):
    address, answers = server
    monkeypatch.setenv("SPECSIM_API_KEY", "topsecret")
    answers["/get_server_info"] = (
        200,
        {},
        json.dumps({"model_path": "m", "tp_size": 1, "internal_states": []}).encode(),
    )
    answers["/metrics"] = (200, {}, METRICS)
    records = observe(address)
    assert [r.name for r in records] == ["SGLang server info", "vLLM metrics"]
    assert {key for _, key in answers["seen"]} == {"Bearer topsecret"}
    assert "topsecret" not in "".join(r.model_dump_json() for r in records)


def test_one_address(server):
    address, answers = server
    answers["/metrics"] = (200, {}, METRICS)
    assert observe(f"{address}/metrics")[0].points[0].batch == 2
    answers["/moved"] = (302, {"Location": "/metrics"}, b"")
    assert observe(f"{address}/moved")[0].source == f"{address}/moved"


def test_a_redirect_never_carries_the_key_nor_leaves_http(server, monkeypatch):
    address, answers = server
    monkeypatch.setenv("SPECSIM_API_KEY", "topsecret")
    answers["/moved"] = (302, {"Location": "/metrics"}, b"")
    answers["/metrics"] = (200, {}, METRICS)
    observe(f"{address}/moved")
    assert answers["seen"] == [("/moved", "Bearer topsecret"), ("/metrics", None)]
    answers["/bad"] = (302, {"Location": "file:///etc/passwd"}, b"")
    with pytest.raises(WorkError):
        observe(f"{address}/bad")


def test_servers_that_do_not_answer_well(server, monkeypatch):
    address, answers = server
    with pytest.raises(WorkError, match="answered 404"):
        observe(address)
    answers["/locked"] = (401, {}, b"")
    with pytest.raises(WorkError, match="set SPECSIM_API_KEY"):
        observe(f"{address}/locked")
    answers["/empty"] = (200, {}, b"")
    with pytest.raises(WorkError, match="is empty"):
        observe(f"{address}/empty")
    monkeypatch.setattr("specsim.observe_read.MAX_DOWNLOAD", 1000)
    answers["/large"] = (200, {}, b"x" * 5000)
    with pytest.raises(WorkError, match="larger"):
        observe(f"{address}/large")
    with pytest.raises(WorkError, match="no answer"):
        observe("http://127.0.0.1:1/metrics")
    for where in ("ftp://host/x", "file:///etc/passwd"):
        with pytest.raises(InputError, match="is not read"):
            open_sources(where)


# --- checks


def test_interval_of_a_median():
    """Of 25 values the 80 % interval of the median runs from the 10th to the 16th: 12.5 -/+ 1.28 x 2.5."""
    q = quantity(list(range(1, 26)), "x")
    assert (q.value, q.low, q.high, q.n) == (13, 10, 16, 25)
    assert (quantity([5.0], "x").low, quantity([], "x")) == (None, None)
    assert quantity([10.0, 10.0], "x", 0.01).low == pytest.approx(9.9)


def test_positions_by_their_identity():
    assert read_positions(2.7, [0.8, 0.5, 0.4]).meaning == "unconditional"
    assert read_positions(1 + 0.8 + 0.4 + 0.2, [0.8, 0.5, 0.5]).meaning == "conditional"
    assert read_positions(2.6, [0.45, 0.22, 0.13]).meaning == "too low"
    assert read_positions(2.0, [0.8, 0.5, 0.4]).meaning == "unclear"


def test_rates_with_the_draft_tokens_known():
    assert read_rates([(2.0, 0.5)], 4).meaning == "old"
    assert read_rates([(2.0, 0.5)], 3).meaning == "new"
    assert read_rates([(2.0, 0.5)]).meaning == "unknown"  # d = 4 by the old, 3 by the new definition
    assert read_rates([(2.0, 0.9), (2.5, 0.1)], 4).message.startswith("contradiction")


def test_rates_over_the_drafting_steps_of_a_tree():
    """A tree of 3 steps and 8 rows: 1.4 / 3, 1.2 / 3 and 2.1 / 3 are (L - 1) / (n - 1) with n = 4, not 8."""
    read = read_rates([(2.4, 0.47), (2.2, 0.40), (3.1, 0.70)], 8)
    assert "n = 4 and not the d = 8" in read.message
    assert not read.message.startswith("contradiction")


# --- the command


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main(["observe", *arguments])
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out, err


def test_command_for_people(tmp_path, capsys):
    code, out, err = run(capsys, str(write(tmp_path, LOG)))
    assert code == 0
    assert "30.00" in out
    assert "taken: cycle = batch x accept length / gen throughput" in out
    assert err == ""


def test_a_source_without_figures_says_so(tmp_path, capsys):
    empty = '{"backend": "sglang", "accept_length": NaN, "mean_tpot_ms": Infinity, "output_throughput": -3, "max_concurrency": 0}\n'
    code, out, _ = run(capsys, str(write(tmp_path, empty)))
    assert code == 0
    assert "no step time, acceptance or all-reduce in it" in out
    assert "batch" not in out.split("\n")[1]


def test_links_are_shown(tmp_path, capsys):
    report = (
        "[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]\nDevice=0 CANNOT Access Peer Device=1\nP2P Connectivity Matrix\n     D\\D     0     1\n     0\t     1     0\n     1\t     0     1\n"
        "Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)\n   D\\D     0      1 \n     0 600.00   7.50 \n     1   7.50 600.00 \n"
    )
    code, out, _ = run(capsys, str(write(tmp_path, report)))
    assert code == 0
    assert "pair copy GB/s: 7.5" in out
    assert "p2p: no" in out


def test_command_json_is_one_document_and_reads_itself(tmp_path, capsys):
    code, out, _ = run(capsys, str(write(tmp_path, LOG)), str(write(tmp_path, json.dumps(BENCH), "b")), "--json")
    assert code == 0
    document = json.loads(out)
    assert document["schema"] == "specsim.observations/1"
    assert [r["schema"] for r in document["records"]] == ["specsim.record/1"] * 2
    assert all(r["kind"] == "observation" for r in document["records"])
    again = observe(write(tmp_path, out, "again.json"))
    assert [r.model_dump(by_alias=True, exclude_none=True) for r in again] == document["records"]


def test_command_writes_records_that_it_reads_back(tmp_path, capsys):
    code, _, err = run(capsys, str(write(tmp_path, LOG)), str(write(tmp_path, LOG)), "-o", str(tmp_path / "out"))
    assert code == 0
    files = sorted((tmp_path / "out").iterdir())
    assert [f.name for f in files] == ["input-SGLang-server-log-2.json", "input-SGLang-server-log.json"]
    assert err.count("wrote ") == 2
    assert observe(files[0])[0].points[0].cycle_ms.value == pytest.approx(30.0)


def test_command_keeps_the_good_sources(tmp_path, capsys):
    code, out, err = run(
        capsys, str(tmp_path / "missing"), str(write(tmp_path, LOG)), str(write(tmp_path, "", "empty"))
    )
    assert code == 2
    assert "30.00" in out
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "error"]
    assert run(capsys)[0] == 2


def test_command_names_contradictions(tmp_path, capsys):
    eager = LOG.replace("graph: True", "graph: False")
    _, out, _ = run(capsys, str(write(tmp_path, LOG, "a.log")), str(write(tmp_path, eager, "b.log")))
    assert "does not: their ratio says nothing about speculation" in " ".join(out.split())


def test_many_results_are_compared_without_delay(tmp_path):
    path = write(tmp_path, (json.dumps(BENCH) + "\n") * 3000)
    records = observe(path)
    assert len(records) == 3000
    assert contradictions(records) == []


def test_a_broken_record_is_named(tmp_path):
    with pytest.raises(InputError, match="record is not valid at kind"):
        observe(write(tmp_path, json.dumps({"schema": "specsim.record/1", "kind": "x", "name": "n", "date": "d"})))


@pytest.mark.parametrize(
    ("where", "mend"), [("localhost:30000", "give http://localhost:30000"), ("server.log", "check the path")]
)
def test_an_address_without_its_scheme_is_told_from_a_file_that_is_not_there(where: str, mend: str) -> None:
    with pytest.raises(InputError, match=mend):
        open_sources(where)
