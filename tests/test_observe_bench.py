"""Benchmark files and metrics: what each tool's figures mean, with numbers derived by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specsim.errors import InputError
from specsim.observations import observe
from specsim.records import Record


def one(tmp_path: Path, content: Any) -> Record:
    path = tmp_path / "result"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    records = observe(path)
    assert len(records) == 1
    return records[0]


def contradicts(record: Record, text: str) -> bool:
    return any(c.startswith("contradiction: ") and text in c for c in record.caveats)


# --- SGLang

SERVING = {
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": float("inf"),
    "max_concurrency": 4,
    "duration": 50.0,
    "completed": 40,
    "total_input_tokens": 40000,
    "total_output_tokens": 20000,
    "total_output_tokens_retokenized": 19900,
    "output_throughput": 400.0,
    "mean_ttft_ms": 200.0,
    "mean_tpot_ms": 9.0,
    "mean_itl_ms": 9.1,
    "concurrency": 3.9,
    "accept_length": 2.5,
    "max_output_tokens_per_s": 700.0,
}


def test_bench_serving_of_2025(tmp_path):
    """9 ms a token at length 2.5: a cycle of 22.5 ms. Context: 1000 in and half of 500 out."""
    record = one(tmp_path, SERVING)
    (point,) = record.points
    assert point.cycle_ms.value == pytest.approx(22.5)
    assert (point.batch, point.context, point.tokens_per_cycle) == (4, 1250, 2.5)
    assert "ITL is per token: ITL / TPOT = 1.01" in record.method
    assert "since its start" in record.method
    assert record.engine.name == "sglang"
    assert not record.caveats
    assert record.environment["request_rate"] == "inf"


def test_bench_serving_of_december_2024_has_no_time_per_token(tmp_path):
    old = [
        "backend",
        "dataset_name",
        "request_rate",
        "duration",
        "completed",
        "total_input_tokens",
        "total_output_tokens",
    ]
    row = {k: SERVING[k] for k in [*old, "output_throughput"]} | {"max_concurrency": None, "median_itl_ms": 12.0}
    row["total_output_tokens_retokenized"] = 19900
    (point,) = one(tmp_path, json.dumps(row)).points  # Infinity and null inside
    assert point.tokens_per_s.value == 400.0
    assert point.cycle_ms is None
    assert point.decode_ms is None
    assert point.batch is None  # all requests at once: the engine chose the batch


def test_bench_serving_without_speculation(tmp_path):
    """accept_length null: 9 ms a token is 9 ms a step."""
    record = one(tmp_path, SERVING | {"accept_length": None})
    assert record.points[0].decode_ms.value == pytest.approx(9.0)
    assert "taken as a run without speculation" in record.method


def test_bench_serving_null_length_but_a_speculating_server(tmp_path):
    info = {"speculative_algorithm": "EAGLE3", "tp_size": 8, "api_key": "topsecret", "speculative_num_draft_tokens": 3}
    record = one(tmp_path, SERVING | {"accept_length": None, "server_info": info, "request_rate": "trace"})
    assert record.points[0].decode_ms is None
    assert "--speculative-algorithm" in record.engine.flags
    assert "topsecret" not in record.model_dump_json()


def test_bench_serving_json_lines_keep_the_good_ones(tmp_path):
    good = json.dumps(SERVING)
    path = tmp_path / "bench.jsonl"
    path.write_text(f"{good}\n{good[:200]}\n{good}\n")
    records = observe(path)
    assert [r.name for r in records] == ["SGLang bench_serving, line 1", "SGLang bench_serving, line 3"]
    assert any("line 2: is not whole JSON" in c for c in records[0].caveats)


def test_peak_below_mean_and_other_sums(tmp_path):
    record = one(
        tmp_path,
        SERVING | {"max_output_tokens_per_s": 300.0, "duration": 60.0, "mean_tpot_ms": 20.0, "mean_itl_ms": 20.0},
    )
    assert contradicts(record, "peak throughput 300 tok/s is below the mean 400")
    assert contradicts(record, "20000 tokens in 60 s are 333.3 tok/s, not 400")
    assert contradicts(record, "throughput x time per token = 8.0 requests, above the 3.9 at once")


CONSOLE = """
============ Serving Benchmark Result ============
Backend:                                 sglang
Traffic request rate:                    inf
Max request concurrency:                 1
Successful requests:                     10
Benchmark duration (s):                  20.00
Total input tokens:                      5000
Total generated tokens:                  2000
Request throughput (req/s):              0.50
Output token throughput (tok/s):         100.00
Peak output token throughput (tok/s):    150.00
Concurrency:                             1.00
Accept length:                           3.00
----------------End-to-End Latency----------------
Mean E2E Latency (ms):                   2000.00
---------------Time to First Token----------------
Mean TTFT (ms):                          200.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          8.00
---------------Inter-Token Latency----------------
Mean ITL (ms):                           8.20
==================================================
"""


def test_console_table_of_sglang(tmp_path):
    """8 ms a token at length 3: 24 ms a cycle."""
    record = one(tmp_path, CONSOLE)
    (point,) = record.points
    assert point.cycle_ms.value == pytest.approx(24.0)
    assert (point.batch, point.tokens_per_cycle, point.context) == (1, 3.0, 600)
    assert not record.caveats


def test_console_table_that_is_cut_off(tmp_path):
    record = one(tmp_path, CONSOLE[: CONSOLE.index("----------------End-to-End")])
    assert record.points[0].tokens_per_cycle == 3.0
    assert any("line 2: the table that begins here has no closing rule" in c for c in record.caveats)


def test_one_batch_server(tmp_path):
    """Batch 8, 128 tokens out in 4 s of which 0.8 s to the last first token: 320 tok/s, 25 ms a token, x 2 = 50 ms a cycle."""
    row = {"run_name": "a", "batch_size": 8, "input_len": 1024, "output_len": 128, "latency": 4.0, "last_ttft": 0.8}
    row |= {
        "input_throughput": 10240.0,
        "output_throughput": 320.0,
        "overall_throughput": 2304.0,
        "last_gen_throughput": 330.0,
    }
    record = one(tmp_path, row | {"acc_length": 2.0})
    assert record.points[0].cycle_ms.value == pytest.approx(50.0)
    assert "pure decoding" in record.method
    plain = one(tmp_path, row | {"acc_length": -1})
    assert plain.points[0].decode_ms.value == pytest.approx(25.0)
    old = {k: row[k] for k in ("run_name", "batch_size", "input_len", "output_len", "latency")} | {
        "output_throughput": 256.0
    }
    first = one(tmp_path, old)
    assert "prefill included" in first.method
    assert first.points[0].decode_ms is None
    assert contradicts(one(tmp_path, row | {"output_throughput": 999.0}), "is not batch x output / latency")


def test_speculative_sweep(tmp_path):
    """Length 2.4 in 20 ms: 120 tok/s for one request, 480 for four. Without speculation the step is a decode step."""
    row = {
        "batch_size": 4,
        "steps": 3,
        "topk": 1,
        "num_draft_tokens": 4,
        "acc_length": 2.4,
        "step_time": 0.02,
        "speed": 120.0,
    }
    record = one(tmp_path, row | {"completion_tokens": 512.0})
    (point,) = record.points
    assert point.cycle_ms.value == pytest.approx(20.0)
    assert point.tokens_per_s.value == pytest.approx(480.0)
    assert record.engine.flags == [
        "--speculative-num-steps",
        "3",
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        "4",
    ]
    plain = row | {"steps": 0, "topk": 0, "num_draft_tokens": 0, "acc_length": 1.0, "step_time": 0.0125, "speed": 80.0}
    assert one(tmp_path, plain).points[0].decode_ms.value == pytest.approx(12.5)
    assert contradicts(one(tmp_path, row | {"speed": 480.0}), "is not accept length / step time = 120.0")
    assert contradicts(one(tmp_path, row | {"acc_length": 5.0}), "above the 4 draft tokens")


def test_server_info(tmp_path):
    """Two DP ranks at lengths 2.4 and 2.6; recorded steps of batch 1: 20th percentile of 10, 11, 12, 13, 90 ms is 11."""
    info = {
        "model_path": "org/m",
        "tp_size": 4,
        "dp_size": 2,
        "api_key": "topsecret",
        "ssl_keyfile_password": "alsosecret",
        "speculative_algorithm": "EAGLE3",
        "speculative_num_draft_tokens": 3,
        "version": "0.5.16",
        "internal_states": [
            {
                "avg_spec_accept_length": 2.4,
                "last_gen_throughput": 100.0,
                "step_time_dict": {"1": [0.01, 0.011, 0.012, 0.013, 0.09]},
            },
            {"avg_spec_accept_length": 2.6, "last_gen_throughput": 50.0, "effective_max_running_requests_per_dp": 48},
        ],
    }
    record = one(tmp_path, info)
    assert record.points[0].tokens_per_cycle == pytest.approx(2.5)
    assert record.points[0].cycle_ms.value == pytest.approx(11.0)
    assert record.engine.version == "0.5.16"
    text = record.model_dump_json()
    assert "topsecret" not in text
    assert "alsosecret" not in text
    info["internal_states"] = [{"avg_spec_accept_length": 3.5, "last_gen_throughput": 100.0}]
    assert contradicts(one(tmp_path, info), "above the 3 draft tokens")


# --- vLLM

SERVE = {
    "date": "20260601-101500",
    "backend": "openai",
    "model_id": "org/model",
    "num_prompts": 50,
    "request_rate": "inf",
    "max_concurrency": 8,
    "duration": 50.0,
    "completed": 50,
    "failed": 0,
    "total_input_tokens": 50000,
    "total_output_tokens": 20000,
    "output_throughput": 400.0,
    "mean_ttft_ms": 200.0,
    "mean_tpot_ms": 15.0,
    "mean_itl_ms": 42.0,
    "spec_decode_acceptance_rate": 60.0,
    "spec_decode_acceptance_length": 2.8,
    "spec_decode_num_drafts": 7000,
    "spec_decode_draft_tokens": 21000,
    "spec_decode_accepted_tokens": 12600,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.4],
}


def test_vllm_bench_serve(tmp_path):
    """12600 / 21000 = 60 percent; 1 + 12600 / 7000 = 2.8 = 1 + .8 + .6 + .4; 42 / 15 = 2.8: ITL counts chunks; 15 x 2.8 = 42 ms."""
    record = one(tmp_path, SERVE)
    (point,) = record.points
    assert point.tokens_per_cycle == pytest.approx(2.8)
    assert point.cycle_ms.value == pytest.approx(42.0)
    assert point.accept_rate_by_position == pytest.approx([0.8, 0.75, 2 / 3])
    assert "percent of drafted" in record.method
    assert "ITL is per chunk: ITL / TPOT = 2.80" in record.method
    assert record.date == "2026-06-01T10:15:00"
    assert not record.caveats


def test_vllm_bench_serve_that_contradicts_itself(tmp_path):
    record = one(
        tmp_path,
        SERVE | {"spec_decode_acceptance_rate": 45.0, "spec_decode_acceptance_length": 1.8, "mean_itl_ms": 25.0},
    )
    assert contradicts(record, "acceptance rate 45 is not accepted / drafted = 0.6000")
    assert contradicts(record, "1 + accepted / drafts = 2.80 but the length is 1.80")
    assert contradicts(record, "ITL / TPOT = 1.67 is neither 1 (per token) nor 2.80 (per chunk)")
    assert record.points[0].tokens_per_cycle == pytest.approx(2.8)


def test_vllm_bench_serve_without_speculative_keys(tmp_path):
    """ITL = TPOT: one token a chunk, no speculation. ITL = 2.5 TPOT: chunks of 2.5 tokens, the length."""
    plain = {k: v for k, v in SERVE.items() if not k.startswith("spec_")}
    point = one(tmp_path, plain | {"mean_itl_ms": 15.1}).points[0]
    assert point.decode_ms.value == pytest.approx(15.0)
    chunks = one(tmp_path, plain | {"mean_itl_ms": 37.5}).points[0]
    assert chunks.tokens_per_cycle == pytest.approx(2.5)
    assert chunks.cycle_ms.value == pytest.approx(37.5)


def test_short_keys_are_seconds(tmp_path):
    row = {"date": "20260203-101112", "model_id": "m", "request_rate": "inf", "max_concurrency": 16, "duration": 100.0}
    row |= {
        "completed": 100,
        "total_input_tokens": 100,
        "total_output_tokens": 10000,
        "output_throughput": 100.0,
        "median_tpot": 0.14,
    }
    record = one(tmp_path, row)
    assert "are seconds" in record.method
    assert record.points[0].raw["median_tpot_ms"] == pytest.approx(140.0)
    assert record.points[0].decode_ms is None  # nothing says whether speculation was on


def test_vllm_console_table(tmp_path):
    """k = 70 / 10 = 7 but five positions are shown: no identity. 1 + 20 / 10 = 3; 20 ms x 3 = 60 ms."""
    text = CONSOLE.replace("Backend:                                 sglang\n", "").replace(
        "Accept length:    ", "Ignored thing:    "
    )
    text = (
        text.replace("8.00\n", "20.00\n")
        .replace("8.20\n", "60.00\n")
        .replace("Concurrency:      ", "Other thing:      ")
    )
    text = text.replace("= Serving", "= Serving").replace(
        "Peak output token throughput (tok/s):    150.00", "Peak output token throughput (tok/s):    50.00"
    )
    rule = "=" * 50 + "\n"
    section = "---------------Speculative Decoding---------------\nAcceptance rate (%):        28.57\nAcceptance length:          3.00\n"
    section += "Drafts:    10\nDraft tokens:   70\nAccepted tokens:   20\nPer-position acceptance (%):\n  Position 0:   60.00\n  Position 1:   40.00\n"
    record = one(tmp_path, text.replace(rule, section + rule))
    assert record.engine.name == "vllm"
    assert record.points[0].tokens_per_cycle == pytest.approx(3.0)
    assert record.points[0].cycle_ms.value == pytest.approx(60.0)
    assert contradicts(record, "peak throughput 50 tok/s is below the mean 100")
    assert "2 of 7 positions" in record.method


def test_request_metrics(tmp_path):
    """50 cycles: 30 accept none, 10 one, 10 two. L = 1 + 30 / 50; c_1 = 20 / 50, c_2 = 10 / 20."""
    spec = {
        "num_spec_steps": 50,
        "num_accepted_draft_tokens": 30,
        "num_draft_tokens": 100,
        "mean_acceptance_length": 1.6,
    }
    record = one(
        tmp_path, {"usage": {}, "metrics": {"speculative_decoding": spec | {"acceptance_histogram": [30, 10, 10]}}}
    )
    assert record.points[0].tokens_per_cycle == pytest.approx(1.6)
    assert record.points[0].accept_rate_by_position == pytest.approx([0.4, 0.5])


# --- other tools


def cells(*rows: dict[str, Any]) -> dict[str, Any]:
    meta = {"engine": "vllm", "model": "m", "version": "0.4.17", "timestamp": "2026-02-03T10:11:12.500000"}
    return {"metadata": meta, "results": list(rows)}


def test_inference_bench(tmp_path):
    """26 ms a chunk, 10 ms a token: length 2.6. 100 tok/s x 26 ms = 2.6 = batch x length."""
    row = {"concurrency": 1, "context_tokens": 0, "aggregate_tps": 100.0, "inter_token_latency_avg": 0.010}
    record = one(tmp_path, cells(row | {"chunk_inter_token_latency_avg": 0.026, "server_spec_accept_rate": 0.55}))
    (point,) = record.points
    assert point.tokens_per_cycle == pytest.approx(2.6)
    assert point.cycle_ms.value == pytest.approx(26.0)
    assert record.date == "2026-02-03T10:11:12"
    wrong = one(tmp_path, cells(row | {"chunk_inter_token_latency_avg": 0.026, "aggregate_tps": 60.0}))
    assert contradicts(wrong, "throughput x cycle = 1.6 but batch x length = 2.6")


def test_inference_bench_without_speculation(tmp_path):
    row = {"concurrency": 4, "context_tokens": 0, "aggregate_tps": 200.0, "server_spec_accept_rate": 0.0}
    assert one(tmp_path, cells(row)).points[0].decode_ms.value == pytest.approx(20.0)


def test_inference_bench_counter_under_a_rates_name(tmp_path):
    row = {"concurrency": 1, "context_tokens": 0, "aggregate_tps": 100.0, "server_spec_accept_rate": 1850.0}
    record = one(tmp_path, cells(row))
    assert contradicts(record, "server_spec_accept_rate is 1850: a counter under a rate's name")
    assert record.points[0].tokens_per_cycle is None
    assert "server_spec_accept_rate" not in record.points[0].raw


def test_guidellm(tmp_path):
    """10 ms a token, 2.5 tokens a chunk: 25 ms a cycle. Its time per output token holds the first token's wait."""

    def stat(mean: float) -> dict[str, Any]:
        return {"successful": {"mean": mean, "median": mean, "percentiles": {"p50": mean}}, "total": {"mean": 99.0}}

    metrics = {
        "inter_token_latency_ms": stat(10.0),
        "time_per_output_token_ms": stat(14.0),
        "output_tokens_per_second": stat(390.0),
        "request_concurrency": stat(4.1),
        "output_tokens_per_iteration": stat(2.5),
        "prompt_token_count": stat(1000.0),
        "output_token_count": stat(200.0),
    }
    record = one(tmp_path, {"benchmarks": [{"metrics": metrics}]})
    (point,) = record.points
    assert (point.batch, point.context, point.tokens_per_cycle) == (4, 1100, 2.5)
    assert point.cycle_ms.value == pytest.approx(25.0)
    assert "first token included: not used" in record.method
    metrics["output_tokens_per_iteration"] = stat(1.0)
    assert one(tmp_path, {"benchmarks": [{"metrics": metrics}]}).points[0].decode_ms.value == pytest.approx(10.0)


def test_nccl_tests_and_a_table_without_rows(tmp_path):
    text = "# nThread 1 nGpus 1 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0\n"
    text += "".join(
        f"#  Rank  {i} Group  0 Pid {i} on host device  {i} [0000:0{i}:00] NVIDIA Thing 9\n" for i in range(2)
    )
    text += "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
    rows = "       16384          8192      half     sum      -1    20.00    0.82    0.82      0    21.00    0.78    0.78      0\n"
    record = one(tmp_path, text + rows)
    assert record.samples == [{"operator": "allreduce", "bytes": 16384, "ranks": 2, "us": 20.0, "in_graph": False}]
    with pytest.raises(InputError, match="hung or failed"):
        one(tmp_path, text)


# --- metrics


def test_sglang_metrics_take_one_rank_of_each_group(tmp_path):
    """Two DP ranks of two TP ranks: 150 tok/s in all; L = 1.6, rate .6 so d = 2; busiest rank 2 x 1.6 / 100 s = 32 ms."""
    text = "# TYPE sglang:num_running_reqs gauge\n"
    for tp, dp, running, rate in ((0, 0, 2, 100), (1, 0, 2, 100), (2, 1, 1, 50), (3, 1, 1, 50)):
        labels = f'dp_rank="{dp}",engine_type="unified",tp_rank="{tp}"'
        text += f"sglang:num_running_reqs{{{labels}}} {running}.0\nsglang:gen_throughput{{{labels}}} {rate}.0\n"
        text += f"sglang:spec_accept_length{{{labels}}} 1.6\nsglang:spec_accept_rate{{{labels}}} 0.6\n"
    text += 'sglang:spec_accept_length{engine_type="draft",tp_rank="0"} 9.0\n'
    text += (
        'sglang:inter_token_latency_seconds_sum{a="b"} 20.0\nsglang:inter_token_latency_seconds_count{a="b"} 1000.0\n'
    )
    record = one(tmp_path, text)
    (point,) = record.points
    assert point.tokens_per_s.value == 150.0
    assert point.tokens_per_cycle == pytest.approx(1.6)
    assert point.cycle_ms.value == pytest.approx(32.0)
    assert point.raw["inter_token_latency_ms"] == pytest.approx(20.0)
    assert "(L - 1) / (d - 1)" in record.method
    assert "per token" in record.method


def test_sglang_metrics_tell_graph_passes(tmp_path):
    text = 'sglang:cuda_graph_passes_total{mode="decode_cuda_graph",tp_rank="0"} 10.0\n'
    text += 'sglang:cuda_graph_passes_total{mode="decode_none",tp_rank="0"} 90.0\nsglang:cuda_graph_passes_created{mode="x"} 17e8\n'
    text += 'sglang:gpu_execution_seconds_total{category="target_verify",tp_rank="0"} 4.5\n'
    record = one(tmp_path, text)
    assert record.points[0].cuda_graph is False
    assert any("90 of 100 decode or verify passes ran without a CUDA graph" in c for c in record.caveats)
    assert record.environment["gpu_seconds"] == {"target_verify": 4.5}


def vllm_counters(engines_with_positions: int) -> str:
    """Two engines of 100 drafts, 300 drafted and 160 accepted each; positions .8, .5, .3 where given."""
    text = ""
    for engine in range(2):
        label = f'engine="{engine}",model_name="m"'
        text += f"vllm:spec_decode_num_drafts_total{{{label}}} 100\nvllm:spec_decode_num_draft_tokens_total{{{label}}} 300\n"
        text += f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} 160\nvllm:spec_decode_num_drafts_created{{{label}}} 1.7e9\n"
        if engine < engines_with_positions:
            for position, count in enumerate((80, 50, 30)):
                text += f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{position}"}} {count}\n'
    return text


def test_vllm_counters_are_summed_over_engines(tmp_path):
    """1 + 320 / 200 = 2.6."""
    record = one(tmp_path, vllm_counters(2))
    assert record.points[0].tokens_per_cycle == pytest.approx(2.6)
    assert record.points[0].accept_rate_by_position == pytest.approx([0.8, 0.625, 0.6])
    assert not record.caveats
    assert record.environment["dp_ranks"] == 2


def test_vllm_positions_of_one_engine_only(tmp_path):
    record = one(tmp_path, vllm_counters(1))
    assert contradicts(record, "too low by 2.00, as when 2 data-parallel engines")
    assert record.points[0].accept_rate_by_position == pytest.approx([0.8, 0.625, 0.6])


def test_a_counter_under_a_rates_name(tmp_path):
    record = one(tmp_path, 'vllm:spec_decode_draft_acceptance_rate{model_name="m"} 1709.0\n')
    assert contradicts(record, "spec_decode_draft_acceptance_rate = 1709 is not a rate in [0, 1] but a counter")


def test_llamacpp_counters(tmp_path):
    text = "llamacpp:spec_decode_num_drafts 50\nllamacpp:spec_decode_num_draft_tokens 150\nllamacpp:spec_decode_num_accepted_tokens 90\n"
    text += "".join(
        f'llamacpp:spec_decode_num_accepted_tokens_per_pos{{position="{i}"}} {n}\n' for i, n in enumerate((45, 30, 15))
    )
    point = one(tmp_path, text).points[0]
    assert point.tokens_per_cycle == pytest.approx(2.8)
    assert point.accept_rate_by_position == pytest.approx([0.9, 2 / 3, 0.5])


def test_a_time_stamp_and_an_exemplar_are_no_values(tmp_path):
    """OpenMetrics puts both after the value, the second with labels of its own; 1 + 150 / 100 = 2.5."""
    text = 'vllm:spec_decode_num_drafts_total{engine="0",pod="a}b"} 100 # {trace_id="x"} 0.5\n'
    text += 'vllm:spec_decode_num_accepted_tokens_total{engine="0",pod="a}b"} 150 1.7e9 # {} 1.0 1.5\n'.replace(
        "1.7e9", "17"
    )
    text += 'vllm:e2e_request_latency_seconds_bucket{le="0.5",engine="0"} 3 # {trace_id="x"} 0.4 17.5\n# EOF\n'
    record = one(tmp_path, text)
    assert record.points[0].tokens_per_cycle == pytest.approx(2.5)
    assert record.caveats == []


def test_of_several_scrapes_the_last_counts(tmp_path):
    """Counters since the start are not added: 1 + 320 / 200 = 2.6 again, with 200 drafts, not 400."""
    record = one(tmp_path, vllm_counters(2) + vllm_counters(2))
    assert record.points[0].tokens_per_cycle == pytest.approx(2.6)
    assert record.points[0].raw["drafts"] == 200
    assert any("a further scrape begins" in caveat for caveat in record.caveats)


def test_damaged_metrics_lines_are_named(tmp_path):
    record = one(
        tmp_path, vllm_counters(2) + 'vllm:num_requests_running{engine="0"} what\nvllm:num_requests_running{engine="0\n'
    )
    assert any("line 15: 'what' is not a number" in c for c in record.caveats)
    assert any("line 16: sample is cut off" in c for c in record.caveats)
