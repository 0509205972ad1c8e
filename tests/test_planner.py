"""The planner behind the page: the numbers of `predict`, no file ever opened for a request, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specsim
from specsim.charts import charts_for
from specsim.cli import main
from specsim.commands.scenario import OPTIONS
from specsim.commands.serve import guarded
from specsim.configs import PRESETS
from specsim.errors import InputError
from specsim.profiles import Profile, folder, parse_profile
from specsim.web import planner
from specsim.web.app import FOLDER, REQUEST_BYTES, application
from specsim.web.connection import UNREAD_BYTES
from specsim.web.guard import HEADERS, Guard, is_local
from specsim.web.planner import FILE_BYTES, FILES, NAMES, Missing, Planner

TOKEN = "a-token-of-the-tests"
PLANNER = Planner()


def refusal(act: Callable[[], object]) -> str:
    """The line of the InputError that something raises; empty when it raises none."""
    try:
        act()
    except InputError as error:
        return str(error)
    return ""


# --- the numbers of predict -----------------------------------------------------------------------------------------

NAMED = {
    "model": ["Llama-3.1-8B", "Qwen3-30B-A3B", "kimi-k2.5", "Qwen/Qwen3-8B"],
    "hardware": ["8x-h100", "1X-H200", "8x-pcie-field"],
    "engine": ["sglang", "vllm", "other"],
    "tp": ["1", "8", "3"],
    "batch": ["1", "7", "8k", "0", "x"],
    "context": ["2048", "0", "64k", "-1"],
    "method": ["none", "mtp", "eagle3", "ngram", "medusa"],
    "draft-tokens": ["2", "5", "1"],
    "num-steps": ["3"],
    "topk": ["1", "4"],
    "accept-rate": ["0.6", "1.5", "nan"],
    "accept-length": ["1.9"],
    "accept-per-position": ["0.7,0.5", "a"],
    "accept-profile": ["kimi-k2.5-eagle3/gsm8k", "none"],
    "routing": ["uniform", "zipf:0.8", "zipf:x"],
    "eager": [["verify"], ["decode", "extend"], ["all"]],
    "sglang-args": ["--model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3", "--tp 8 --speculative-num-steps"],
    "vllm-args": ['vllm serve meta-llama/Llama-3.1-8B --speculative-config \'{"method": "eagle3"}\''],
}
REQUESTS = st.fixed_dictionaries({}, optional={name: st.sampled_from(texts) for name, texts in NAMED.items()})


def line_of(options: dict[str, Any]) -> list[str]:
    """The options of a request as arguments, in the order of the help."""
    given = {name: options[name] for name in NAMES if name in options}
    return [f"--{name}={one}" for name, value in given.items() for one in (value if name == "eager" else [value])]


def command_line(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """(standard output, error line) of `predict --json` with the options of a request."""
    words = line_of(options)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["predict", *words, "--json"])
    out, err = capsys.readouterr()
    return out, err.splitlines()[-1].removeprefix("error: ") if err and not out else ""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft-tokens": "3", "accept-rate": "0.6"},
        {"model": "Llama-3.1-8B", "hardware": "1x-h200", "num-steps": "5", "topk": "4", "draft-tokens": "8"},
        {"model": "DeepSeek-V3", "hardware": "8x-h200", "method": "mtp", "batch": "64", "accept-length": "1.8"},
        {"hardware": "1x-h200", "vllm-args": "vllm serve Qwen/Qwen3-8B --max-num-seqs 32", "batch": "40"},
        {"model": "Qwen3-30B-A3B", "hardware": "2x-h200", "eager": ["verify", "extend"], "routing": "zipf:1"},
    ],
)
def test_the_document_is_that_of_the_command_line(options, capsys):
    out, _ = command_line(options, capsys)
    assert PLANNER.document({"options": options}) == out
    shown, document = json.loads(PLANNER.answer({"options": options})), json.loads(out)
    assert {key: shown[key] for key in document if key in shown} == {
        key: document[key] for key in document if key in shown
    }
    assert shown["charts"] == json.loads(json.dumps([chart.json() for chart in charts_for(document)]))


@settings(max_examples=60, deadline=None)
@given(options=REQUESTS)
def test_any_options_give_the_document_or_the_error_of_the_command_line(options):
    words = line_of(options)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main(["predict", *words, "--json"])
    try:
        document = PLANNER.document({"options": options})
        json.loads(PLANNER.answer({"options": options}), parse_constant=pytest.fail)  # nan is none of JSON
    except InputError as error:
        document = "".join(f"error: {one}\n" for one in getattr(error, "errors", (error,)))
    assert document == (err if stop.value.code else out).getvalue()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("batch", "context", "draft-tokens", "accept-rate", "accept-length")), st.integers(2, 64)), min_size=2, max_size=6))  # fmt: skip
def test_an_answer_does_not_depend_on_what_was_asked_before(moves):
    """Prices are kept between moves: one planner that saw them all says what a fresh one does."""
    kept, options = Planner(), {"model": "Qwen3-30B-A3B", "hardware": "2x-h200"}
    for slider, n in moves:
        options = {k: v for k, v in options.items() if not (slider.startswith("accept") and k.startswith("accept"))}
        scale = {"draft-tokens": 2 + n % 6, "accept-rate": n / 64, "accept-length": 1 + n / 64}
        options = {**options, slider: str(scale.get(slider, n))}
        kept.answer({"options": options})
        assert kept.document({"options": options}) == Planner().document({"options": options})


def test_charts_hold_no_text_of_a_file():
    """Of an answer they are not searched for characters that Vega does not take."""
    file = PLANNER.add_file("model", "odd\u0007name.json", (PRESETS / "Llama-3.1-8B.json").read_bytes())
    options = {"accept-rate": "0.7", "method": "ngram"}
    answer = json.loads(PLANNER.answer({"options": options, "files": {"model": file["id"]}}))
    assert "odd\u0007name" in answer["headline"]
    assert "odd" not in json.dumps(answer["charts"])


def test_no_number_that_json_lacks_leaves_the_page():
    """A name may say NaN; a number may not be it, wherever it stands."""
    assert json.loads(planner._json({"name": "NaN", "x": [1.5]})) == {"name": "NaN", "x": [1.5]}
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            planner._json({"x": [1.5, {"y": value}]})


def test_half_a_character_is_shown_as_it_came():
    """JSON may hold one as an escape, UTF-8 cannot: here in the name of a flag, of which a note says that it is not known."""
    line = json.loads('"--model-path Qwen/Qwen3-8B --half\\ud800"')
    shown = json.loads(PLANNER.answer({"options": {"sglang-args": line, "hardware": "1x-h200"}}))
    assert shown["warnings"][0].endswith("--half\ud800")


@pytest.mark.parametrize(
    ("options", "mood"),
    [
        ({"hardware": "1x-h200", "model": "DeepSeek-R1", "accept-rate": "0.9"}, "unfit"),  # whatever speculation gains
        ({"hardware": "8x-h200", "model": "DeepSeek-R1", "accept-rate": "0.9"}, "gain"),
        ({"accept-rate": "0.1"}, "loss"),
        ({}, "open"),
        ({"method": "none"}, "none"),
    ],
)
def test_the_colour_of_a_verdict(options, mood):
    shown = json.loads(PLANNER.answer({"options": options}))
    assert shown["mood"] == mood
    assert shown["verdict"].startswith("Does not fit") == (mood == "unfit")


def test_a_dropped_file_is_read_as_the_command_line_reads_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.json").write_text((PRESETS / "Qwen3-8B.json").read_text())
    (tmp_path / "my-box.yaml").write_text((folder() / "1x-h200.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    planner = Planner()
    sent = {
        kind: planner.add_file(kind, name, (tmp_path / name).read_bytes())
        for kind, name in (("model", "mine.json"), ("hardware", "my-box.yaml"))
    }
    out, _ = command_line({"model": "mine.json", "hardware": "my-box.yaml", "method": "ngram"}, capsys)
    files = {kind: kept["id"] for kind, kept in sent.items()}
    assert planner.document({"options": {"method": "ngram"}, "files": files}) == out


def test_two_dropped_files_called_config_json_are_told_apart(tmp_path, monkeypatch, capsys):
    """Every model's file has that name: the page says of what kind each is, as the command line does of folders so called."""
    planner = Planner()
    files = {}
    for kind, preset in (("model", "Qwen3-8B"), ("draft", "qwen3-8b-eagle3")):
        (tmp_path / kind).mkdir()
        path = tmp_path / kind / "config.json"
        path.write_text((PRESETS / f"{preset}.json").read_text())
        kept = planner.add_file("model", "config.json", path.read_bytes())  # a drafter is known by itself
        assert kept["file"] == "config.json"
        files[kind] = kept["id"]
    monkeypatch.chdir(tmp_path)
    out, _ = command_line({"model": "model/config.json", "draft": "draft/config.json", "hardware": "1x-h200"}, capsys)
    assert planner.document({"options": {"hardware": "1x-h200"}, "files": files}) == out
    assert "model + draft on 1x-h200" in out
    assert "--model model/config.json --draft draft/config.json" in out


@pytest.mark.parametrize(
    ("name", "text"), [("mine.json", '{"hidden_size": 64'), ("mine.json", "[]"), ("mine.json", '{"hidden_size": "a"}')]
)
def test_a_bad_file_has_the_error_of_the_command_line(name, text, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    _, said = command_line({"model": name}, capsys)
    with pytest.raises(InputError) as caught:
        Planner().add_file("model", name, text.encode())
    assert str(caught.value) == said


def test_the_page_knows_every_scenario_option():
    assert len(NAMES) == len(OPTIONS)
    script = (FOLDER / "app.js").read_text() + (FOLDER / "index.html").read_text()
    assert not [name for name in NAMES if f'"{name}"' not in script]


def test_the_csv_holds_the_numbers_of_the_document():
    request = {"options": {"draft-tokens": "4", "accept-rate": "0.7"}}
    document = json.loads(PLANNER.document(request))
    rows = list(csv.reader(io.StringIO(PLANNER.table(request))))
    found = {(row[0], row[1]): row[2:] for row in rows}
    for key in ("decode_ms", "verify_ms", "cycle_ms", "speedup"):
        q = document[key]
        assert [float(x) for x in found["result", key][:3]] == [q["value"], q["low"], q["high"]]
        assert found["result", key][6]
    parts = [(f"{p['phase']} {p['component']}", p["ms"], p["source"]) for p in document["breakdown"]]
    assert [(r[1], float(r[2]), r[8]) for r in rows if r[0] == "breakdown"] == parts


def test_the_csv_of_a_dropped_model_starts_no_formula():
    planner = Planner()
    kept = planner.add_file("model", "=1+1.json", (PRESETS / "Qwen3-8B.json").read_bytes())
    text = planner.table({"options": {"hardware": "1x-h200", "method": "none"}, "files": {"model": kept["id"]}})
    assert "\nscenario,model,'=1+1\n" in text


def test_the_map_of_draft_lengths_is_that_of_the_sweep(capsys):
    words = ["--batch", "1,2,4,8,16,32,64", "--context", "1k,4k,16k,64k", "--draft-tokens", "2:8", "--json"]
    for options, key in (
        ({"accept-rate": "0.7"}, "best"),
        ({}, "breakeven"),
        ({"accept-per-position": "0.8,0.5"}, "best"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["sweep", *words, *line_of(options)])
        expected = next(c for c in charts_for(json.loads(capsys.readouterr().out)) if c.key == key)
        (found,) = json.loads(PLANNER.around({"options": {**options, "batch": "5", "context": "9"}}))["charts"]
        assert found["table"] == json.loads(json.dumps(expected.json()["table"]))
    assert json.loads(PLANNER.around({"options": {"method": "none"}})) == {"charts": []}


def test_the_page_opens_with_the_scenario_of_the_command(tmp_path):
    """Where the command is given paths, they are read once, before any request."""
    config = tmp_path / "mine" / "config.json"
    config.parent.mkdir()
    config.write_text((PRESETS / "Qwen3-8B.json").read_text())
    planner = Planner()
    planner.start_with(
        {
            "model": str(config.parent),
            "hardware": "1x-h200",
            "batch": 8,
            "accept_per_position": (0.7, 0.5),
            "eager": ("verify",),
            "method": "ngram",
        }
    )
    start = planner.choices()["start"]
    assert start["options"] == {
        "hardware": "1x-h200",
        "batch": "8",
        "accept-per-position": "0.7,0.5",
        "eager": ["verify"],
        "method": "ngram",
    }
    assert start["files"]["model"]["name"] == "mine"
    config.unlink()
    files = {kind: file["id"] for kind, file in start["files"].items()}
    for i in range(FILES + 1):  # dropped files do not push it out
        planner.add_file("draft", f"{i}.json", (PRESETS / "qwen3-8b-eagle3.json").read_bytes())
    assert json.loads(planner.document({"options": start["options"], "files": files}))["scenario"]["model"] == "mine"
    with pytest.raises(InputError, match="neither uniform nor zipf"):
        Planner().start_with({"routing": "popularity.txt"})


# --- no file is ever opened for a request ---------------------------------------------------------------------------

OPENED: list[str] = []
WATCHING = threading.Event()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and WATCHING.is_set():
        OPENED.append(str(arguments[0]))


sys.addaudithook(_watch)


@contextmanager
def opened() -> Iterator[list[str]]:
    """The files that are opened meanwhile, but for specsim's own and those of imports."""
    OPENED.clear()
    WATCHING.set()
    found: list[str] = []
    try:
        yield found
    finally:
        WATCHING.clear()
        own = (str(Path(specsim.__file__).parent), str(folder()), sys.prefix, sys.base_prefix)
        found += [path for path in OPENED if not path.startswith(own)]


PATHS = ["../secret", "/etc/passwd", "~/.ssh/config", "secret", "./secret", "secret.yaml", "link", "a\0b", "file:///etc/passwd", "specsim/presets", "-", "", " ", "..", "%2e%2e/secret", "secret\n", "//host/share", "C:\\secret"]  # fmt: skip
PLACES = ["model", "draft", "hardware", "engine", "method", "routing", "accept-profile", "sglang-args", "vllm-args"]


@pytest.fixture(scope="module")
def trap(tmp_path_factory) -> Iterator[Path]:
    """A working folder where every name that a request may hold is a file or a folder that would be read."""
    place = tmp_path_factory.mktemp("trap")
    config = (PRESETS / "Llama-3.2-1B.json").read_text()
    for name in ("secret", "Kimi-K2.5", "kimi-k2.5-eagle3", "Qwen/Qwen3-8B", "uniform"):
        (place / name).mkdir(parents=True)
        (place / name / "config.json").write_text(config)
    profile = (folder() / "1x-h200.yaml").read_text()
    for name in ("8x-pcie-field", "8x-h100", "secret.yaml"):
        (place / name).write_text(profile)
    (place / "zipf:1").write_text("1 2 3")
    (place / "link").symlink_to(place / "secret")
    before = Path.cwd()
    os.chdir(place)
    yield place
    os.chdir(before)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", PLACES)
def test_no_request_opens_a_path(place, path, trap):
    text = {
        "sglang-args": f"--model-path {path} --config {path} --speculative-draft-model-path {path} --speculative-algorithm EAGLE",
        "vllm-args": f"vllm serve {path} --config {path}",
    }.get(place, path)
    with opened() as found, pytest.raises(InputError) as caught:
        Planner().answer({"options": {place: text}})
    assert found == []
    assert "\n" not in str(caught.value)


@settings(max_examples=80, deadline=None)
@given(place=st.sampled_from(PLACES), text=st.text(max_size=40))
def test_no_text_opens_a_file(place, text):
    with opened() as found:
        said = refusal(lambda: PLANNER.answer({"options": {place: text}}))
    assert found == []
    assert "\n" not in said


def test_names_are_those_of_shipped_files_whatever_lies_in_the_working_folder(trap):
    """The command line would take the folder `Kimi-K2.5`; the page must not."""
    for options in (
        {},
        {"model": "Kimi-K2.5", "draft": "kimi-k2.5-eagle3", "hardware": "8x-pcie-field", "routing": "zipf:1"},
    ):
        with opened() as found:
            s = json.loads(Planner().document({"options": options}))
        assert found == []
        assert s["memory"]["weights_gb_per_gpu"] > 70  # a trillion INT4 parameters on 8 GPUs, not the 1 B of the trap


# --- requests and files that are no requests and files --------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [None, [], 3, {"x": 1}, {"options": []}, {"options": {"batch": 8}}, {"options": {"batch": None}}, {"options": {"help": "1"}},
     {"options": {"json": ""}}, {"options": {"model=x --draft": "a"}}, {"options": {"batch": "1" * 3000}}, {"options": {"eager": ["decode"] * 9}},
     {"options": {"batch": ["1"]}}, {"files": {"model": 3}}, {"files": {"other": "x"}}, {"files": {"model": "x" * 100}},
     {"options": {"topk": "64", "num-steps": "64", "draft-tokens": "512"}}, {"options": {"sglang-args": "x" * 30_000}},
     {"options": {"sglang-args": "--model-path Qwen/Qwen3-8B --cuda-graph-max-bs 999999999"}},
     {"options": {"batch": "9" * 1900}}, {"options": {"accept-rate": "1e999"}}],
)  # fmt: skip
def test_what_is_no_request_is_refused_in_one_line(request_):
    with pytest.raises(InputError) as caught:
        PLANNER.answer(request_)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


BOMBS = {
    "nested JSON": ("model", b'{"a":' * 50_000),
    "nested lists": ("model", b"[" * 100_000),
    "digits": ("model", b'{"hidden_size": ' + b"9" * 100_000 + b"}"),
    "NaN": ("model", b'{"hidden_size": NaN}'),
    "infinity": ("draft", b'{"hidden_size": 1e999, "vocab_size": Infinity}'),
    "not text": ("model", b"\xff\xfe\x00"),
    "nested YAML": ("hardware", b"[" * 100_000),
    "aliases": ("hardware", b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"\n".join(b"%c: &%c [%s]" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(12))),
    "merges": ("hardware", b"a: &a {x: 1}\n" + b"\n".join(b"%c: &%c {<<: [%s]}" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(12))),
    "base 60": ("hardware", b"gpus: " + b"1:" * 100_000 + b"1"),
    "code": ("hardware", b"!!python/object/apply:os.system [ls]"),
    "layers": ("model", json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 10**9}).encode()),
    "operators": ("hardware", (folder() / "1x-h200.yaml").read_bytes().replace(b"\noperators:\n", b"\noperators:\n" + b"".join(b"  x%d: {fixed_us: 1, bandwidth_gb_s: 1, relative_uncertainty: 0, source: {kind: assumed, reference: none, date: '2026'}}\n" % i for i in range(1000)))),
    "empty": ("model", b""),
    "kind": ("../x", b"{}"),
}  # fmt: skip


@pytest.mark.timeout(90)  # seconds of a busy machine
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once_in_one_line(name):
    kind, raw = BOMBS[name]
    with pytest.raises(InputError) as caught:
        Planner().add_file(kind, "bomb", raw)
    assert "\n" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["model", "draft", "hardware"]),
    name=st.text(max_size=30),
    place=st.integers(0, 2000),
    noise=st.binary(max_size=6),
    cut=st.integers(0, 30),
)
def test_any_bytes_are_read_or_refused_in_one_line(kind, name, place, noise, cut):
    whole = (
        (folder() / "1x-rtx-4090.yaml").read_bytes() if kind == "hardware" else (PRESETS / "Qwen3-8B.json").read_bytes()
    )
    at = place % len(whole)
    planner = Planner()

    def send_and_ask() -> None:
        kept = planner.add_file(kind, name, whole[:at] + noise + whole[at + cut :])
        planner.answer({"options": {}, "files": {kind: kept["id"]}})

    assert "\n" not in refusal(send_and_ask)


def test_files_are_forgotten_oldest_first_and_the_page_is_told():
    planner = Planner()
    raw = (PRESETS / "Qwen3-8B.json").read_bytes()
    ids = [planner.add_file("model", f"{i}.json", raw)["id"] for i in range(FILES + 1)]
    with pytest.raises(Missing) as caught:
        planner.document({"files": {"model": ids[0]}})
    assert caught.value.kinds == ["model"]
    assert planner.document({"files": {"model": ids[1]}, "options": {"hardware": "1x-h200"}})


def test_of_a_dropped_profile_only_what_predicts_is_kept():
    raw = (folder() / "1x-h200.yaml").read_bytes()
    assert parse_profile(raw.decode(), "box.yaml").environment
    planner = Planner()
    kept = planner._files[planner.add_file("hardware", "box.yaml", raw)["id"]].read
    assert isinstance(kept, Profile)
    assert kept.environment == {}
    assert {name.split("_")[0] for name in kept.samples} == {
        "gemm",
        "moe",
    }  # shapes that were timed are priced by themselves


# --- who may ask ----------------------------------------------------------------------------------------------------


def ask(
    app: Any, method: str = "GET", path: str = "/", body: bytes | list[bytes] = b"", **headers: Any
) -> tuple[int, dict[str, str], bytes, int]:
    """(status, headers, body, parts of the request's body that were read) of one request to an ASGI application."""
    sent = {"host": "127.0.0.1:8765", **headers}
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, values in sent.items() for value in (values if isinstance(values, list) else [values]) if value is not None]  # fmt: skip
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"", "headers": lines, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8765), "http_version": "1.1"}  # fmt: skip
    parts = body if isinstance(body, list) else [body]
    read = 0
    answer: list[Any] = []

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": parts[read - 1], "more_body": read < len(parts)}

    async def send(message: Any) -> None:
        answer.append(message)

    asyncio.run(app(scope, receive, send))
    head = {name.decode(): value.decode() for name, value in answer[0]["headers"]}
    return answer[0]["status"], head, b"".join(m.get("body", b"") for m in answer[1:]), read


@pytest.fixture(scope="module")
def app() -> Any:
    return guarded(Planner(), "127.0.0.1")


def post(
    app: Any, path: str = "/predict", request: Any = None, **headers: Any
) -> tuple[int, dict[str, str], bytes, int]:
    return ask(app, "POST", path, json.dumps(request or {}).encode(), **{"content_type": "application/json", **headers})


def test_the_page_and_its_parts_are_served(app):
    status, head, body, _ = ask(app)
    assert (status, head["content-type"]) == (200, "text/html; charset=utf-8")
    for part in (
        "/app.js",
        "/charts.js",
        "/style.css",
        "/icon.svg",
        "/vendor/vega.min.js",
        "/vendor/vega-lite.min.js",
        "/vendor/vega-embed.min.js",
    ):
        assert part[1:].encode() in body
        status, head, _, _ = ask(app, path=part)
        assert status == 200
        assert ask(app, path=part, if_none_match=head["etag"])[0] == 304
    assert json.loads(ask(app, path="/choices")[2])["boxes"]


@pytest.mark.parametrize("path", ["/../planner.py", "/planner.py", "/vendor/", "/vendor/../app.py", "/%2e%2e/app.py", "//etc/passwd", "/vendor/SHA256SUMS", "/index.html/", "/file", "/docs", "/openapi.json", "/\0"])  # fmt: skip
def test_nothing_else_is_served(path, app):
    assert ask(app, path=path)[0] == 404


def test_no_address_of_another_host_is_in_the_page():
    for name in ("index.html", "app.js", "charts.js", "style.css", "icon.svg"):
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text
        assert "//" not in text.replace("// ", "") or name.endswith(".js")


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9000", "127.0.0.1", "127.0.0.1:1", "[::1]:8765", "LOCALHOST:8765"]
)
def test_names_of_this_machine_may_ask(host, app):
    """Whatever the port: ssh may forward another one."""
    assert ask(app, host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil", "0.0.0.0:8765", "10.0.0.1", "", "[::2]:8765", None, ["localhost", "evil.example"], "localhost@evil.example", "evil.example#localhost"])  # fmt: skip
def test_other_names_are_refused(host, app):
    """DNS rebinding: a site's own name that resolves to 127.0.0.1 is sent as Host."""
    status, _, body, read = ask(app, "POST", "/predict", b"{}", host=host)
    assert status == 421
    assert "host name" in json.loads(body)["error"]
    assert read == 0


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://localhost:8765"}, {"origin": "http://127.0.0.1:9"},
     {"origin": ["http://127.0.0.1:8765", "http://evil.example"]}, {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}],
)  # fmt: skip
def test_requests_of_other_sites_are_refused(headers, app):
    assert post(app, **headers)[0] == 403
    assert ask(app, path="/choices", **headers)[0] == 403


def test_the_page_itself_may_ask_and_a_link_to_it_may_be_followed(app):
    assert post(app, origin="http://127.0.0.1:8765", sec_fetch_site="same-origin")[0] == 200
    assert ask(app, sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200


def test_forms_of_other_sites_cannot_be_sent(app):
    """A form can only send what is no JSON, without asking first."""
    assert post(app, content_type="text/plain")[0] == 422
    status, head, _, _ = ask(
        app, "OPTIONS", "/predict", origin="http://127.0.0.1:8765", access_control_request_method="POST"
    )
    assert status == 405
    assert not [name for name in head if name.startswith("access-control")]


def test_every_answer_has_the_security_headers_and_no_cookie(app):
    answers = [ask(app), ask(app, path="/choices"), ask(app, path="/none"), post(app), post(app, request={"x": 1}), ask(app, "DELETE", "/predict"), ask(app, host="evil.example")]  # fmt: skip
    assert sorted({status for status, *_ in answers}) == [200, 404, 405, 421, 422]
    for _, head, _, _ in answers:
        assert all(head[name.decode()] == value.decode() for name, value in HEADERS)
        assert "set-cookie" not in head
        assert "access-control-allow-origin" not in head
    policy = dict(part.strip().split(" ", 1) for part in answers[0][1]["content-security-policy"].split(";"))
    assert policy["script-src"] == "'self'"
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"


@pytest.mark.parametrize(
    ("path", "limit"), [("/predict", REQUEST_BYTES), ("/csv", REQUEST_BYTES), ("/file/model", FILE_BYTES)]
)
def test_what_is_too_large_is_not_read(path, limit, app):
    status, _, body, read = ask(app, "POST", path, b"", content_type="application/json", content_length=str(limit + 1))
    assert (status, read) == (413, 0)
    assert "larger than" in json.loads(body)["error"]
    part = b" " * 65536
    status, _, _, read = ask(app, "POST", path, [part] * 1000, content_type="application/json")  # its length not said
    assert status == 413
    assert read == limit // len(part) + 1


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "9" * 50])
def test_odd_lengths_are_refused(length, app):
    assert post(app, content_length=length)[0] == 413


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000, b'"x"', b"NaN"])
def test_bodies_that_are_no_requests(body, app):
    status, _, said, _ = ask(app, "POST", "/predict", body, content_type="application/json")
    assert status == 422
    assert "\n" not in json.loads(said)["error"]


def test_a_missing_file_is_told_apart(app):
    status, _, body, _ = post(app, request={"files": {"draft": "0" * 32}})
    assert status == 409
    assert json.loads(body)["missing"] == ["draft"]


def test_a_fault_inside_says_nothing_of_itself(capsys):
    class Broken(Planner):
        def answer(self, request: Any) -> bytes:
            raise ZeroDivisionError("a secret of the inside")

    status, head, body, _ = post(Guard(application(Broken())))
    assert status == 500
    assert head["x-content-type-options"] == "nosniff"
    assert b"secret" not in body
    assert b"Traceback" not in body
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "ZeroDivisionError" in said
    assert "secret" not in said


def test_with_a_token_every_request_needs_it():
    app = guarded(Planner(), "127.0.0.1", TOKEN)
    for path in (
        "/",
        "/app.js",
        "/choices",
        "/none",
        f"/{TOKEN}x/",
        f"/{TOKEN[:-1]}/",
        f"//{TOKEN}/",
        "/%61-token-of-the-tests/",
    ):
        status, _, body, _ = ask(app, path=path)
        assert status == 403
        assert TOKEN.encode() not in body
    assert post(app)[0] == 403
    assert ask(app, path=f"/{TOKEN}/")[0] == 200
    assert ask(app, path=f"/{TOKEN}/vendor/vega.min.js")[0] == 200
    assert post(app, f"/{TOKEN}/predict")[0] == 200
    assert ask(app, path=f"/{TOKEN}/", host="evil.example")[0] == 421


def test_other_addresses_are_asked_by_address_or_by_name():
    """No site can make a browser send an address as Host but that of the server itself."""
    app = guarded(Planner(), "0.0.0.0", TOKEN, ("planner.example",))
    for host in ("10.1.2.3:8765", "[fe80::1]:8765", socket.gethostname(), "planner.example", "localhost:8765"):
        assert ask(app, path=f"/{TOKEN}/", host=host)[0] == 200
    assert ask(app, path=f"/{TOKEN}/", host="evil.example")[0] == 421


def test_which_addresses_are_of_this_machine():
    assert all(is_local(a) for a in ("127.0.0.1", "localhost", "::1", "127.8.8.8"))
    assert not any(is_local(a) for a in ("0.0.0.0", "::", "10.0.0.1", "box", "127.0.0.1.example"))


# --- the command ----------------------------------------------------------------------------------------------------


@contextmanager
def served(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(address, process) of a running `specsim serve`; interrupted in the end, as Ctrl-C does."""
    command = [sys.executable, "-m", "specsim", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("specsim planner: ").split(" ")[0].strip(), process
    finally:
        process.send_signal(signal.SIGINT)


def test_the_command_prints_its_address_once_and_ends_cleanly():
    with served() as (address, process):
        assert urlopen(address).status == 200
    out, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in err
    assert err.strip() == ""


def test_answers_do_not_wait_for_acknowledgements():
    """Headers and body are two packets: where the second waits for the first's delayed acknowledgement, each answer takes
    40 ms more. Ten answers of a prediction that is in the cache take far less than 400 ms, even on a busy machine."""
    with served() as (address, process):
        connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"))
        took = []
        for _ in range(12):
            start = time.perf_counter()
            connection.request("POST", "/predict", "{}", {"content-type": "application/json"})
            assert connection.getresponse().read()
            took.append(time.perf_counter() - start)
        connection.close()
    process.communicate(timeout=10)
    assert sorted(took)[3] < 0.03


def test_a_request_without_an_end_is_not_kept():
    """The parser would hold headers of any length, and any number of requests: the connection is closed, whatever it is that
    does not end."""
    line, field = "POST /predict HTTP/1.1\r\nhost: localhost\r\n", "x: y\r\n"
    chunked = f"{line}transfer-encoding: chunked\r\n\r\n"
    with served() as (address, process):
        port = int(address.rstrip("/").rpartition(":")[2])
        for start, endless in (
            ("GET /", "x"),
            (f"{line}x: ", "x"),
            (line, field),
            (f"{chunked}0\r\n", field),
            ("", f"{line}\r\n"),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as raw, contextlib.suppress(ConnectionError):
                raw.sendall((start + endless * (4 * UNREAD_BYTES)).encode())
                while raw.recv(2**16):
                    pass
        body = b" " * (REQUEST_BYTES - 2) + b"{}"  # what may be long still is read
        assert urlopen(Request(f"{address}predict", body, {"content-type": "application/json"})).status == 200
    process.communicate(timeout=10)


def test_a_given_token_is_never_printed():
    with served("--token", TOKEN) as (address, process):
        assert address.endswith("/TOKEN/")
        at = address.removesuffix("TOKEN/")
        assert urlopen(f"{at}{TOKEN}/").status == 200
        for path in ("none", f"{TOKEN}/none", f"{TOKEN}/predict"):
            with pytest.raises(OSError, match="HTTP Error"):
                urlopen(Request(at + path, data=b"x"))
        port = int(address.split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as raw:  # what is no HTTP at all
            raw.sendall(f"GET /{TOKEN}/ NONSENSE\r\n\r\n".encode())
            raw.recv(1000)
    out, err = process.communicate(timeout=10)
    assert TOKEN not in out + err


def test_another_address_makes_a_token():
    with served("--host", "0.0.0.0") as (address, process):
        host, token = address.removeprefix("http://").rstrip("/").split("/")
        assert len(token) == 32
        port = host.rpartition(":")[2]
        assert urlopen(f"http://127.0.0.1:{port}/{token}/").status == 200
        with pytest.raises(OSError, match="403"):
            urlopen(f"http://127.0.0.1:{port}/")
    process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["--port", "{taken}"],
            1,
            "error: port {taken} is taken; give another --port, or --port 0 for any that is free",
        ),
        (["--host", "192.0.2.1", "--port", "0"], 2, "error: --host: '192.0.2.1': "),
        (["--host", "no.such.host.invalid", "--port", "0"], 2, "error: --host: 'no.such.host.invalid': "),
        (["--token", "short", "--port", "0"], 2, "error: --token: is not 16 to 128 letters, digits, - or _; "),
        (["--port", "70000"], 2, "error: --port: 70000 is out of range; give 0 to 65,535"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments, code, said, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        with pytest.raises(SystemExit) as stop:
            main(["serve", *(a.format(taken=taken) for a in arguments)])
    assert stop.value.code == code
    err = capsys.readouterr().err
    assert err.startswith(said.format(taken=taken))
    assert err.count("\n") == 1


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_the_mend(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--port", "0"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: specsim serve: needs {package}; pip install 'specsim[serve]'\n"
