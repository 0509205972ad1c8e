"""Live servers that are none, or say what they should not: every one a clear line, and the API key in no record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer

from specsim.errors import InputError
from specsim.live import Client, ServerError, generate, identify
from specsim.measure import Plan, measure
from specsim.records import Point, Record
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
    assert path.name == "sglang-Bearer.json"
    assert "sesame" not in path.read_text() + " ".join(said)
    record = Record.model_validate(json.loads(path.read_text()))
    assert record.environment["attention_backend"] == "Bearer ***"


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
