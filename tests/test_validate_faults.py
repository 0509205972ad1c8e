"""Live servers that are none, or say what they should not: every one a clear line, and the API key in no record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer

from specsim.engines import command_line
from specsim.errors import InputError
from specsim.launch import read_launch
from specsim.live import _FLAGS, Client, Served, ServerError, flags_of, generate, identify
from specsim.load import Load
from specsim.measure import Plan, measure
from specsim.records import Point, Record
from specsim.redaction import REDACTED, scrub
from specsim.validation import run_url

PLAN = Plan(min_repeats=2, max_repeats=2, lengths=(4, 8, 16, 24))


def quiet(text: str) -> None:
    pass


def one(**state: Any) -> Point:
    with FakeServer(**state) as server:
        client = Client(server.url, timeout=5)
        return measure(client, identify(client), 1, 32, PLAN, say=quiet)


def test_a_server_that_is_still_loading_is_told_apart_from_another_program() -> None:
    with FakeServer(fault="loading") as server, pytest.raises(ServerError) as caught:
        identify(Client(server.url))
    assert "answered 503: the model is loading; is the server still loading" in str(caught.value)


def test_an_answer_that_is_cut_off_is_a_server_that_broke_off() -> None:
    with pytest.raises(ServerError, match="the server broke off"):
        one(fault="cut")


def test_a_key_in_what_the_server_says_of_itself_is_in_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSIM_API_KEY", "sesame")
    said: list[str] = []
    with FakeServer(fault="tells") as server:
        path, _ = run_url(server.url, [(1, 32)], tmp_path, PLAN, said.append)
    assert path.name == "sglang-Bearer-redacted.json"
    assert "sesame" not in path.read_text() + " ".join(said)
    record = Record.model_validate(json.loads(path.read_text()))
    assert record.environment["attention_backend"] == "Bearer [redacted]"


def test_a_key_that_is_none_hides_no_word_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """People set OPENAI_API_KEY=EMPTY, or none, for servers that ask for no key."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with FakeServer(info={"moe_runner_backend": "none"}) as server:
        path, _ = run_url(server.url, [(1, 32)], tmp_path, PLAN, quiet)
    assert json.loads(path.read_text())["environment"]["moe_runner_backend"] == "none"


def test_numbers_that_are_none_are_not_taken_for_numbers() -> None:
    """Latencies of NaN and a histogram of anything: the batch's own time is the client's, which is a little longer."""
    with FakeServer(fault="nan") as server:
        client = Client(server.url)
        answer = generate(client, identify(client), [[1, 2]], 50)
    assert answer.seconds == answer.wall_seconds
    assert answer.seconds >= (2.0 + 0.2 * 49) / 1e3
    assert answer.histogram == []


def test_a_wide_interval_is_told() -> None:
    """Of three batches two start 20 and 40 ms late, against 4 to 24 steps of 3 ms."""
    assert any(
        "wide to each side after 2 repetitions" in note for note in one(fault="noisy", start_ms=0.5, step_ms=3.0).notes
    )
    assert not any("wide" in note for note in one(start_ms=0.5, step_ms=3.0).notes)


def test_a_vllm_without_counters_says_what_is_not_known(tmp_path: Path) -> None:
    said: list[str] = []
    with FakeServer(engine="vllm", fault="no-metrics") as server:
        path, _ = run_url(server.url, [(1, 32)], tmp_path, PLAN, said.append)
    assert any("it has no /metrics" in line for line in said)
    assert any("no /metrics" in caveat for caveat in json.loads(path.read_text())["caveats"])
    with FakeServer() as server, pytest.raises(InputError, match=r"--vllm-args: the server is sglang 0\.5\.16"):
        run_url(server.url, [(1, 32)], tmp_path, PLAN, quiet, flags=["-tp", "2"])


def test_an_address_holds_no_query_whose_key_would_go_nowhere() -> None:
    with pytest.raises(InputError, match="holds more than an address") as caught:
        Client("http://h:1?api_key=sesame")
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("name", ["api_key", "OPENAI_KEY", "HF_TOKEN", "ssl_keyfile_password", "Authorization"])
def test_names_that_speak_of_a_secret(name: str) -> None:
    assert scrub({name: "sesame", "max_total_num_tokens": 5, "tokenizer_path": "x"}) == {
        name: REDACTED,
        "max_total_num_tokens": 5,
        "tokenizer_path": "x",
    }


def test_a_record_holds_every_flag_that_costs_depend_on() -> None:
    """All options of the description but those that say nothing of speed, or that a record has beside its flags."""
    beside = {"--context-length", "--load-format", "--mem-fraction-static"}
    options = command_line("sglang")["options"]
    costly = {flag for table in options.values() for flag in table.values()} - beside
    values = {"--speculative-algorithm": "EAGLE3", "--speculative-attention-mode": "decode"}
    line = [word for flag in _FLAGS.values() for word in (flag, values.get(flag, "1"))]
    assert costly <= {flag[0] for flag in read_launch("sglang", line).flags}


def test_the_flags_of_a_server_are_those_it_resolved() -> None:
    """An exchange that is "none" is none; a fused all-reduce that the server turned off is off for the replay as well."""
    told = {"tp_size": 8, "moe_a2a_backend": "none", "fp8_gemm_runner_backend": "triton", "nnodes": 1}
    told |= {"flashinfer_allreduce_fusion_backend": None, "speculative_ngram_max_bfs_breadth": 10}
    flags = flags_of(Served("sglang", "0.5.16", "m", told))
    assert flags == ["--tp", "8", "--fp8-gemm-backend", "triton", "--enforce-disable-flashinfer-allreduce-fusion"]
    assert read_launch("sglang", flags).options["flashinfer_allreduce_fusion"] is False
    fused = flags_of(Served("sglang", "0.5.16", "m", told | {"flashinfer_allreduce_fusion_backend": "trtllm"}))
    assert read_launch("sglang", fused).options["flashinfer_allreduce_fusion"] is True
    drafts = flags_of(Served("sglang", "0.5.16", "m", {"speculative_algorithm": "NGRAM"} | told))
    assert drafts[4:8] == ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "10"]


@pytest.mark.parametrize("load", [None, Load(rates=[200.0], num_requests=4, input_tokens=16, output_tokens=3)])
def test_a_server_that_leaves_after_its_last_answer_costs_no_finished_point(tmp_path: Path, load: Load | None) -> None:
    """It measured well and cannot be asked any more whether it is still the same."""
    pairs = [] if load else [(1, 32), (2, 32)]
    with (
        FakeServer(fault="leaves") as server,
        pytest.raises(ServerError, match=r"finished points are kept in .*a\.json"),
    ):
        run_url(server.url, pairs, tmp_path, PLAN, quiet, name="a", load=load)
    record = Record.model_validate(json.loads((tmp_path / "a.json").read_text()))
    assert (len(record.points), len(record.loads)) == ((0, 1) if load else (1, 0))
    assert any(caveat.startswith("stopped after") for caveat in record.caveats)
