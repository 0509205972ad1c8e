"""Every parser against made and damaged inputs: records that are valid, or one InputError; never anything else."""

from __future__ import annotations

import gzip
import io
import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_observe_bench import CONSOLE, SERVE, SERVING, cells, vllm_counters
from test_observe_logs import GENERATIONS, PREFILL, decode, spec, window
from test_observe_trace import cycle, document

from specsim.errors import InputError
from specsim.observations import _read, contradictions, kernels_table
from specsim.observe_checks import conditional, quantity, read_positions, read_rates
from specsim.observe_read import Source
from specsim.records import Record
from specsim.redaction import scrub

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def source(data: bytes) -> Source:
    return Source("made", "2026-01-01T00:00:00+00:00", lambda: io.BytesIO(data))


def survives(data: bytes) -> list[Record]:
    """Read; what comes out must be valid records whose JSON is strict."""
    try:
        records = _read(source(data))
    except InputError as problem:
        message = str(problem)
        records = []
    else:
        message = ""
    assert "\n" not in message
    for record in records:
        Record.model_validate(json.loads(record.model_dump_json(by_alias=True)))
        json.dumps(record.model_dump(by_alias=True), allow_nan=False)
    contradictions(records)
    return records


LLAMA = (
    "decoded  400 tokens in   20.000 seconds, speed:   20.0 t/s\nn_draft   = 16\nn_predict = 400\nn_drafted = 900\nn_accept  = 300\n"
    "slot print_timing: id  1 |        eval time =    2500.00 ms /   250 tokens\n"
    "draft acceptance = 0.50000 (  150 accepted /   300 generated), mean acceptance length =  2.50, acceptance rate per position = (0.7, 0.5)\n"
    "statistics draft: #calls(b,g,a) = 1 80 80, #gen drafts = 80, #acc drafts = 70, #gen tokens = 240, #acc tokens = 120, dur(b,g,a) = 0.0, 3.0, 0.1 ms\n"
    "| code | 1 | mtp | 700 | eog | 10.000 | 70.00 | 200 | 500/600 | 83.33% | 3.50 | 90.0% 85.0% |\n"
)
SETTINGS = "server_args=ServerArgs(model_path='m', tp_size=8, speculative_num_draft_tokens=3, decode_log_interval=40, cuda_graph_bs=[1, 2])\n"
ARGUMENTS = (
    "INFO non-default args: {'max_num_seqs': 6, 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 3}}\n"
)
SGLANG_METRICS = (
    'sglang:spec_accept_length{tp_rank="0",dp_rank="0"} 1.6\nsglang:spec_accept_rate{tp_rank="0"} 0.6\nsglang:num_running_reqs{tp_rank="0"} 2\n'
    'sglang:gen_throughput{tp_rank="0"} 100\nsglang:cuda_graph_passes_total{mode="decode_none"} 5\nsglang:gpu_execution_seconds_total{category="x"} 1\n'
)
NCCL = (
    "# nThread 1 nGpus 1 graph: 0\n#  Rank  0 Group  0 Pid 1 on host device  0 [0000:00:00] NVIDIA Thing\n"
    "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
    "       16384          8192      half     sum      -1    20.00    0.82    0.82      0    21.00    0.78    0.78      0\n"
)
TEXTS = {
    "sglang": SETTINGS
    + PREFILL
    + "".join(decode(i, 2, 100.0 + i, 1.8, 0.6) for i in range(5))
    + "".join(g[0] + "\n" for g in GENERATIONS),
    "vllm": ARGUMENTS
    + "Truncating max_cudagraph_capture_size to 40\n"
    + 3 * (window(2, 104.0) + spec(2.6, 640, 1200, "0.800, 0.500, 0.300")),
    "llama": LLAMA,
    "console": CONSOLE,
    "metrics": SGLANG_METRICS + vllm_counters(1),
    "nccl": NCCL,
    "vllm before": "INFO api_server.py:531] args: Namespace(model='m', tensor_parallel_size=4, speculative_model='d', num_speculative_tokens=5)\n"
    + window(2, 104.0)
    + "INFO 02-06 metrics.py:475] Speculative metrics: Draft acceptance rate: 0.600, System efficiency: 0.667, Number of"
    " speculative tokens: 5, Number of accepted tokens: 100, Number of draft tokens: 500, Number of emitted tokens: 400.\n"
    + "SpecDecoding metrics: Draft acceptance rate: 61.2%, Mean acceptance length: 1.84, Accepted: 184 tokens, Drafted: 300 tokens\n"
    + "SpecDecoding metrics: Mean acceptance length: 2.77, Accepted: 626 tokens, Drafted: 1062 tokens, Per-position"
    " acceptance rate: 0.802, 0.551, 0.415\n",
    "started": SETTINGS
    + "Capture target verify cuda graph bs [1, 2, 4]\nmax_total_num_tokens=1000, max_running_requests=48\n"
    + "2 Engines Aggregated: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 162.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs\n"
    + "Initializing a V1 LLM engine (v0.20.2) with config: speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=3), enforce_eager=False\n"
    + "GPU KV cache size: 319,232 tokens\n",
}
ODD = ("", ".", "1.5.5", "-3", "nan", "inf", "0", "1e300", "9" * 400, "9" * 5000, "1,,2", "08")
ROW = {
    "batch_size": 4,
    "steps": 3,
    "topk": 1,
    "num_draft_tokens": 4,
    "acc_length": 2.4,
    "step_time": 0.02,
    "speed": 120.0,
}
ONE = {
    "batch_size": 8,
    "input_len": 1024,
    "output_len": 128,
    "latency": 4.0,
    "last_ttft": 0.8,
    "output_throughput": 320.0,
    "acc_length": 2.0,
}
CELL = {
    "concurrency": 1,
    "context_tokens": 0,
    "aggregate_tps": 100.0,
    "inter_token_latency_avg": 0.01,
    "chunk_inter_token_latency_avg": 0.026,
}
STAT = {"successful": {"mean": 2.5, "median": 2.5}}
GUIDE = {
    "inter_token_latency_ms": STAT,
    "output_tokens_per_second": STAT,
    "request_concurrency": STAT,
    "output_tokens_per_iteration": STAT,
}
INFO = {
    "model_path": "m",
    "tp_size": 4,
    "speculative_num_draft_tokens": 3,
    "internal_states": [
        {"avg_spec_accept_length": 2.4, "last_gen_throughput": 9.0, "step_time_dict": {"1": [0.01, 0.02]}}
    ],
}
SPEC = {
    "num_spec_steps": 50,
    "num_accepted_draft_tokens": 30,
    "mean_acceptance_length": 1.6,
    "acceptance_histogram": [30, 10, 10],
}
DOCUMENTS: dict[str, Any] = {
    "serving": SERVING | {"server_info": INFO},
    "serve": SERVE,
    "short": {
        "output_throughput": 9.0,
        "duration": 1.0,
        "median_tpot": 0.1,
        "date": "20260203-101112",
        "max_concurrency": 2,
    },
    "speculative": ROW,
    "one": ONE,
    "cells": cells(CELL, CELL | {"server_spec_accept_rate": 5.0}),
    "guide": {"benchmarks": [{"metrics": GUIDE}]},
    "info": INFO,
    "request": {"metrics": {"speculative_decoding": SPEC}},
    "record": {"schema": "specsim.record/1", "kind": "observation", "name": "n", "date": "d", "points": [{"batch": 1}]},
    "list": [SERVE, ROW],
    "trace": document(cycle(1000.0, 0, False) + cycle(2000.0, 1, True)),
}

numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1e308, 1e-308, 10**400, float("nan"), float("inf"), -0.0, 2**63, True]),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20), st.just("hf_abcdefghijk"))
values = st.recursive(
    leaves, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4), max_leaves=8
)


@pytest.mark.parametrize("name", TEXTS)
@quick
@given(data=st.data())
def test_damaged_text(name, data):
    """Cut anywhere, pieces replaced by noise, bytes flipped, numbers made absurd, lines shuffled."""
    raw = bytearray(TEXTS[name].encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        action = data.draw(st.sampled_from(["cut", "drop", "noise", "digits", "double", "shuffle"]))
        if action == "cut":
            raw = raw[:at]
        elif action == "drop":
            del raw[at : at + data.draw(st.integers(1, 40))]
        elif action == "noise":
            raw[at : at + 3] = data.draw(st.binary(max_size=12))
        elif action == "digits":
            raw[at:at] = data.draw(
                st.sampled_from([b"9" * 40, b"0", b".", b"-", b"e99", b"nan", b"inf", b"%", b", ", b": "])
            )
        elif action == "double":
            raw[at:at] = raw[: data.draw(st.integers(0, 300))]
        else:
            lines = bytes(raw).split(b"\n")
            raw = bytearray(b"\n".join(data.draw(st.permutations(lines[:30]))))
    survives(bytes(raw))


@pytest.mark.parametrize("name", TEXTS)
@quick
@given(data=st.data())
def test_absurd_numbers_in_text(name, data):
    """Every number of the text may become any other."""
    made = re.sub(
        r"\d+(?:\.\d+)?",
        lambda m: data.draw(st.sampled_from([m.group(), "0", "0.0", "1", "99999999999999999999", "1.5", "7"])),
        TEXTS[name],
    )
    survives(made.encode())


@pytest.mark.parametrize("name", TEXTS)
def test_every_number_of_a_text_made_odd_by_itself(name):
    """One at a time, so that the rest of its line is still read."""
    text = TEXTS[name]
    for match in re.finditer(r"\d+(?:\.\d+)?", text):
        for odd in ODD:
            survives((text[: match.start()] + odd + text[match.end() :]).encode())


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    "before",
    [
        "bench-1  | ",
        "2026-02-03T10:00:00.123456789Z stdout F ",
        "2026-02-03T10:00:00.1234567Z ",
        "[pod/sglang-0/main] 2026-02-03T10:00:00.123456789+02:00 ",
        "Feb  3 10:00:00 gpu-01 python3[1234]: ",
    ],
)
def test_what_a_runtime_writes_before_each_line_changes_nothing(name, before):
    """Docker Compose, Kubernetes' files and kubectl, CI services and journald."""
    text = TEXTS[name]
    plain = survives(text.encode())
    found = survives("".join(before + line for line in text.splitlines(keepends=True)).encode())
    assert [(r.name, r.points, r.samples, r.caveats) for r in found] == [
        (r.name, r.points, r.samples, r.caveats) for r in plain
    ]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_value_of_a_document_made_odd_by_itself(name):
    """One at a time, so that the rest of the document is still read."""
    document = json.loads(json.dumps(DOCUMENTS[name]))
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(min(len(node), 3)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(document)
    for node, key in places:
        kept = node[key]
        for odd in (None, -1, 0, 1e308, -1e308, 10**400, float("nan"), "x", "\ud800", [], {}, [None], True):
            node[key] = odd
            survives(json.dumps(document).encode())
        node[key] = kept


@pytest.mark.parametrize("name", DOCUMENTS)
@quick
@given(data=st.data())
def test_documents_with_other_values(name, data):
    """Any value of the document may become any other, of any type."""

    def change(node: Any) -> Any:
        if data.draw(st.integers(0, 7)) == 0:
            return data.draw(values)
        if isinstance(node, dict):
            return {k: change(v) for k, v in list(node.items())[:40] if data.draw(st.integers(0, 19)) != 0}
        return [change(v) for v in node[:12]] if isinstance(node, list) else node

    survives(json.dumps(change(DOCUMENTS[name])).encode())


@pytest.mark.parametrize("name", DOCUMENTS)
@quick
@given(data=st.data())
def test_documents_cut_or_flipped(name, data):
    raw = bytearray(json.dumps(DOCUMENTS[name], indent=data.draw(st.sampled_from([None, 1]))).encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw = raw[:at]
    else:
        raw[at : at + 2] = data.draw(st.binary(min_size=1, max_size=6))
    survives(bytes(raw))
    survives(gzip.compress(bytes(raw))[: data.draw(st.integers(1, 4000))])


@quick
@given(
    st.binary(max_size=400),
    st.sampled_from([b"", b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b\x08\x00", b"{", b"[{", b'{"traceEvents": [']),
)
def test_any_bytes(noise, head):
    survives(head + noise)


@quick
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["ph", "cat", "name", "ts", "dur", "pid", "args"]), values, max_size=7),
        max_size=8,
    )
)
def test_any_events(events):
    data = json.dumps({"traceEvents": events}).encode()
    survives(data)
    kernels_table(source(data))


@quick
@given(st.lists(st.tuples(st.floats(1, 16), st.floats(0, 1)), max_size=8), st.one_of(st.none(), st.integers(2, 16)))
def test_rates_are_always_given_a_meaning(pairs, d):
    assert read_rates(pairs, d).message


@quick
@given(st.integers(2, 16), st.booleans(), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_rounded_rates_are_recognised(d, new, shares):
    """Pairs printed by one definition with two decimals are never called of the other only, nor contradictory."""
    lengths = [1 + s * (d - 1) for s in shares]
    pairs = [(round(n, 2), round((n - 1) / (d - 1) if new else n / d, 2)) for n in lengths]
    assert read_rates(pairs, d).meaning in ("new" if new else "old", "unknown")
    assert not read_rates(pairs, d).message.startswith("contradiction")


@quick
@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=8))
def test_conditional_rates_come_back(rates):
    chain, product = [], 1.0
    for rate in rates:
        product *= rate
        chain.append(product)
    back = conditional(chain)
    assert back == pytest.approx(rates)
    assert read_positions(1 + sum(chain), chain).rates == pytest.approx(rates)


@quick
@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=40), st.floats(0, 0.1))
def test_quantities_hold_their_value(numbers, rounding):
    q = quantity(numbers, "x", rounding)
    assert q is not None
    assert q.low is None or q.low <= q.value <= (q.high or 0)
    assert min(numbers) <= q.value <= max(numbers)


@quick
@given(st.dictionaries(st.sampled_from(["api_key", "hf_token", "max_tokens", "x"]), values, max_size=4))
def test_scrubbed_values_are_strict_json_without_secrets(made):
    clean = scrub(made)
    json.dumps(clean, allow_nan=False)
    assert "hf_abcdefghijk" not in json.dumps(clean)
