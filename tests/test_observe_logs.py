"""Server logs: each generation of each engine's lines, with numbers derived by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsim.observations import contradictions, observe
from specsim.records import Record


def read(tmp_path: Path, text: str, name: str = "server.log") -> list[Record]:
    path = tmp_path / name
    path.write_text(text)
    return observe(path)


def one(tmp_path: Path, text: str) -> Record:
    records = read(tmp_path, text)
    assert len(records) == 1
    return records[0]


def decode(
    second: int,
    batch: int,
    rate: float,
    length: float | None = None,
    share: float | None = None,
    queue: int = 0,
    tag: str = " TP0",
) -> str:
    """A decode line of SGLang 0.5."""
    minute, second = divmod(second, 60)
    spec = "" if length is None else f"accept len: {length:.2f}, "
    spec += "" if share is None else f"accept rate: {share:.2f}, "
    return (
        f"[2026-02-03 10:{minute:02d}:{second:02d}{tag}] Decode batch, #running-req: {batch}, #token: {batch * 1500},"
        f" token usage: 0.05, {spec}cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: {queue}, \n"
    )


PREFILL = (
    "[2026-02-03 10:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 900, #cached-token: 100, token usage: 0.01,"
    " #running-req: 0, #queue-req: 0, \n"
)

# One line a generation, numbers of our own: (line, batch, length, graph).
GENERATIONS = [
    (
        "[2025-03-20 01:02:03 TP0] Decode batch. #running-req: 4, #token: 900, token usage: 0.01, accept len: 2.50,"
        " gen throughput (token/s): 80.00, largest-len: 0, #queue-req: 12, ",
        4,
        2.5,
        None,
    ),
    (
        "[2025-06-01 01:02:03 DP1 TP1] Decode batch. #running-req: 6, #token: 31000, token usage: 0.10, accept len: 2.80,"
        " cuda graph: True, gen throughput (token/s): 150.00, #queue-req: 0",
        6,
        2.8,
        True,
    ),
    (
        "[2025-10-20 01:02:03 TP0] Decode batch. #running-req: 1, #token: 200, token usage: 0.00, accept len: 2.00,"
        " accept rate: 0.50, cuda graph: True, gen throughput (token/s): 170.00, #queue-req: 0, ",
        1,
        2.0,
        True,
    ),
    (
        "[2025-11-10 01:02:03] Decode batch, #running-req: 40, #token: 30000, token usage: 0.19, cuda graph: False,"
        " gen throughput (token/s): 1400.00, #queue-req: 0, ",
        40,
        1.0,
        False,
    ),
    (
        "[2026-01-10 01:02:03 TP0] Decode batch [812], #running-req: 2, #full token: 3000, full token usage: 0.10, #swa token:"
        " 500, swa token usage: 0.02, accept len: 1.90, accept rate: 0.63, npu graph: True, gen throughput (token/s): 99.00,"
        " #queue-req: 0, ",
        2,
        1.9,
        True,
    ),
    (
        "[2026-08-18 00:02:25] Decode batch, #running-req: 3, #full token: 1, full token usage: 0.00, mamba num: 1, mamba usage:"
        " 0.1, accept len: 2.20, accept rate: 0.40, cuda graph: True, gen throughput (token/s): 50.00, #queue-req: 0",
        3,
        2.2,
        True,
    ),
    (
        "Decode batch, #running-req: 6, #token: 24000, token usage: 0.12, accept len: 2.20, accept rate: 0.40, cuda graph: True,"
        " gen throughput (token/s): 500.00, #queue-req: 0, fwd occupancy: 93.00%",
        6,
        2.2,
        True,
    ),
]


@pytest.mark.parametrize(("line", "batch", "length", "graph"), GENERATIONS)
def test_every_generation_of_the_decode_line(tmp_path, line, batch, length, graph):
    point = one(tmp_path, line + "\n").points[0]
    assert (point.batch, point.tokens_per_cycle, point.cuda_graph) == (batch, pytest.approx(length), graph)
    assert point.cycle_ms is None  # one line ends no steady interval
    assert point.decode_ms is None


@pytest.mark.parametrize(
    "line",
    [
        "[2025-03-20 02:56:26 TP0] Prefill batch. #new-seq: 3, #new-token: 380, #cached-token: 20, token usage: 0.00, #running-req: 2,"
        " #queue-req: 6, ",
        "[2026-05-10 12:50:14] Prefill batch, #new-seq: 1, #new-token: 380, #cached-token: 20, full token usage: 0.01, swa token"
        " usage: 0.02, #running-req: 0, #queue-req: 0, input throughput (token/s): 40.00, cuda graph: False",
        "[2026-07-01 04:31:24 TP0] Prefill batch, #new-seq: 1, #new-token: 380, #cached-token: 20, full token usage: 0.14, mamba"
        " usage: 0.20, #running-req: 1, #queue-req: 9, #pending-token: 10, npu graph: False, input throughput (token/s): 40.00",
    ],
)
def test_prefill_lines(tmp_path, line):
    environment = one(tmp_path, line + "\n").environment
    assert environment["prefill_lines"] == 1
    assert environment["cached_token_share"] == pytest.approx(20 / 400)


def test_cycle_is_batch_times_length_over_throughput(tmp_path):
    """60 tok/s at length 1.8 and batch 1: 1.8 / 60 s = 30 ms. The line after the prefill carries idle time."""
    log = PREFILL + decode(1, 1, 3.1, 1.8, 0.6)
    log += "".join(decode(2 + i, 1, 60 + d, 1.8, 0.6) for i, d in enumerate([0, 0.6, -0.6, 0, 0]))
    record = one(tmp_path, log)
    (point,) = record.points
    assert point.cycle_ms is not None
    assert point.cycle_ms.value == pytest.approx(30.0)
    assert point.cycle_ms.n == 5
    assert point.cycle_ms.low is not None
    assert point.cycle_ms.high is not None
    assert 1800 / 60.6 - 0.2 < point.cycle_ms.low < 30 < point.cycle_ms.high < 1800 / 59.4 + 0.2
    assert point.context == 1500
    assert point.cuda_graph is True
    assert record.environment["steady_intervals"] == 5
    assert record.date == "2026-02-03T10:00:01"


def test_plain_decoding_gives_the_decode_step(tmp_path):
    """Batch 4 at 320 tok/s: 12.5 ms a step."""
    (point,) = one(tmp_path, "".join(decode(i, 4, 320.0) for i in range(4))).points
    assert point.decode_ms is not None
    assert point.decode_ms.value == pytest.approx(12.5)
    assert point.tokens_per_cycle == 1.0
    assert point.cycle_ms is None


def test_unsteady_intervals_are_dropped(tmp_path):
    """A change of batch, a prefill between, an idle line and a stall: only the two clean pairs of batch 2 count."""
    log = decode(0, 2, 100, 2.0) + decode(1, 2, 100, 2.0) + decode(2, 3, 77, 2.0) + decode(3, 2, 88, 2.0)
    log += PREFILL + decode(4, 2, 50, 2.0) + decode(5, 2, 100, 2.0) + decode(6, 2, 1.5, 2.0)
    points = {p.batch: p for p in one(tmp_path, log).points}
    assert points[2].raw["steady_intervals"] == 2
    assert points[2].cycle_ms.value == pytest.approx(40.0)
    assert points[3].cycle_ms is None


def test_a_stalled_interval_is_an_outlier(tmp_path):
    log = "".join(decode(i, 1, r, 2.0) for i, r in enumerate([100, 100, 100, 100, 20, 100]))
    record = one(tmp_path, log)
    assert record.points[0].cycle_ms.n == 4
    assert "1 interval above 3 times the median" in record.method


def test_both_definitions_of_accept_rate(tmp_path):
    """L = 2.2: the old rate of d = 4 is 0.55, the new one 0.40."""
    old = one(tmp_path, decode(0, 1, 60, 2.2, 0.55) + decode(1, 1, 60, 2.4, 0.60))
    assert "L / d (SGLang before April 2026" in old.method
    assert "d = 4" in old.method
    new = one(tmp_path, decode(0, 1, 60, 2.2, 0.40) + decode(1, 1, 60, 2.5, 0.50))
    assert "(L - 1) / (d - 1) (current SGLang" in new.method
    mixed = one(tmp_path, decode(0, 1, 60, 2.2, 0.55) + decode(1, 1, 60, 2.2, 0.40))
    assert mixed.caveats[0].startswith("contradiction: two definitions of accept rate")
    assert mixed.points[0].tokens_per_cycle == pytest.approx(2.2)


def test_length_above_what_the_settings_allow(tmp_path):
    log = "server_args=ServerArgs(model_path='m', speculative_num_draft_tokens=3)\n" + decode(0, 1, 60, 3.4)
    assert any("above the 3 draft tokens" in c for c in one(tmp_path, log).caveats)


def test_settings_become_flags_and_secrets_do_not(tmp_path):
    log = (
        "[2026-02-03 10:00:00] server_args=ServerArgs(model_path='org/m', tp_size=8, api_key='topsecret', hf_token='hf_abcdefgh1',"
        " speculative_algorithm='EAGLE3', speculative_num_steps=2, speculative_num_draft_tokens=3, cuda_graph_bs=[1, 2],"
        " disable_cuda_graph=False, enable_dp_attention=True, quantization=None)\n"
        "[2026-02-03 10:00:09 TP0] max_total_num_tokens=50000, chunked_prefill_size=8192, max_running_requests=48, context_len=4096\n"
        "[2026-02-03 10:00:09 TP0] Custom allreduce is disabled because more than two PCIe-only GPUs\n"
    ) + decode(0, 1, 60, 1.8)
    record = one(tmp_path, log)
    assert record.engine is not None
    flags = record.engine.flags
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "3"
    assert flags[flags.index("--tp-size") + 1] == "8"
    assert "--enable-dp-attention" in flags
    assert "--disable-cuda-graph" not in flags
    assert record.environment["max_running_requests"] == 48
    assert record.environment["custom_all_reduce"].startswith("disabled")
    assert "topsecret" not in record.model_dump_json()
    assert "hf_abcdefgh1" not in record.model_dump_json()


def test_two_launches_in_one_log_are_two_records_and_their_graphs_differ(tmp_path):
    log = "server_args=ServerArgs(model_path='m', tp_size=1)\n" + decode(0, 1, 80) + decode(1, 1, 80)
    eager = (decode(0, 1, 60, 1.8) + decode(1, 1, 60, 1.8)).replace("cuda graph: True", "cuda graph: False")
    log += (
        "server_args=ServerArgs(model_path='m', tp_size=1, disable_cuda_graph=True, speculative_algorithm='EAGLE')\n"
        + eager
    )
    records = read(tmp_path, log)
    assert [r.name for r in records] == ["SGLang server log, launch 1", "SGLang server log, launch 2"]
    found = contradictions(records)
    assert any("runs in CUDA graphs and" in f and "launch 2) does not" in f for f in found)
    assert any("also differ in --disable-cuda-graph" in f for f in found)
    assert any("without a CUDA graph at batch 1 and never with one" in c for c in records[1].caveats)


def test_admission_limit(tmp_path):
    """Batch stays at 32 with requests waiting: the cap, not the cycle, sets the throughput."""
    record = one(tmp_path, "".join(decode(i, 32, 640, 2.5, queue=70 - i) for i in range(10)))
    assert record.environment["admission_limited_at"] == 32
    assert any(c.startswith("admission-limited: #running-req is 32") for c in record.caveats)


def test_ranks_are_kept_apart(tmp_path):
    """Two DP ranks in turn at batch 2; a second TP rank repeats and does not count."""
    log = ""
    for i in range(4):
        log += (
            decode(i, 2, 100, 2.0, tag=" DP0 TP0")
            + decode(i, 2, 50, 2.0, tag=" DP1 TP2")
            + decode(i, 2, 100, 2.0, tag=" DP0 TP1")
        )
    record = one(tmp_path, log)
    assert record.environment["dp_ranks"] == 2
    assert "batch and throughput are per rank" in record.method
    assert "4 lines of further ranks of the same requests" in record.method
    assert record.points[0].cycle_ms.n == 6
    assert (record.points[0].cycle_ms.low, record.points[0].cycle_ms.high) == (
        pytest.approx(40, rel=0.01),
        pytest.approx(80, rel=0.01),
    )


def test_time_stamps_contradict_the_throughput(tmp_path):
    """40 cycles a line, one line a second: 25 ms a cycle by the clock, but batch x length / throughput is 50 ms."""
    settings = "server_args=ServerArgs(model_path='m', decode_log_interval=40)\n"
    good = one(tmp_path, settings + "".join(decode(i, 1, 80, 2.0) for i in range(40)))
    assert not [c for c in good.caveats if "time stamps" in c]
    bad = one(tmp_path, settings + "".join(decode(i, 1, 40, 2.0) for i in range(40)))
    assert any("by time stamps a cycle takes 0.50 times" in c for c in bad.caveats)


def test_cut_off_and_interleaved_lines_are_named_and_skipped(tmp_path):
    whole = decode(0, 1, 60, 1.8) + decode(1, 1, 60, 1.8)
    record = one(tmp_path, whole + whole.splitlines()[0][:120])
    assert record.points[0].raw["lines"] == 2
    assert any("line 3: decode line is cut off" in c for c in record.caveats)
    line = whole.splitlines()[0]
    garbled = one(tmp_path, whole + line[:80] + line + "\n")
    assert any("line 3: decode line is cut off or garbled" in c for c in garbled.caveats)


# --- vLLM


def window(batch: int, rate: float, prompt: float = 0.0, waiting: int = 0, engine: str = "000") -> str:
    return (
        f"(APIServer pid=1) INFO 02-03 10:00:10 [loggers.py:271] Engine {engine}: Avg prompt throughput: {prompt} tokens/s, Avg"
        f" generation throughput: {rate} tokens/s, Running: {batch} reqs, Waiting: {waiting} reqs, GPU KV cache usage: 0.3%,"
        " Prefix cache hit rate: 0.0%\n"
    )


def spec(length: float, accepted: int, drafted: int, positions: str, seconds: float = 10.0) -> str:
    return (
        f"(APIServer pid=1) INFO 02-03 10:00:10 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: {length}, Accepted"
        f" throughput: {accepted / seconds:.2f} tokens/s, Drafted throughput: {drafted / seconds:.2f} tokens/s, Accepted: {accepted}"
        f" tokens, Drafted: {drafted} tokens, Per-position acceptance rate: {positions}, Avg Draft acceptance rate:"
        f" {100 * accepted / max(drafted, 1):.1f}%\n"
    )


def test_vllm_windows(tmp_path):
    """400 drafts of 3 in 10 s, 640 accepted: L = 2.6, 104 tok/s at batch 1, cycle 25 ms. u = .8, .5, .3 so c = .8, .625, .6."""
    pair = window(1, 104.0) + spec(2.6, 640, 1200, "0.800, 0.500, 0.300")
    record = one(tmp_path, window(1, 30.0, prompt=50.0) + spec(2.6, 640, 1200, "0.800, 0.500, 0.300") + 3 * pair)
    (point,) = record.points
    assert point.tokens_per_cycle == pytest.approx(2.6)
    assert point.accept_rate_by_position == pytest.approx([0.8, 0.625, 0.6])
    assert point.cycle_ms.value == pytest.approx(25.0)
    assert point.cycle_ms.n == 3
    assert not record.caveats
    assert "unconditional" in record.method
    assert "percent of drafted" in record.method


def test_vllm_throughput_that_does_not_fit_the_drafts(tmp_path):
    pair = window(1, 60.0) + spec(2.6, 640, 1200, "0.800, 0.500, 0.300")
    assert any("drafts/s x length is over 10 % from" in c for c in one(tmp_path, 3 * pair).caveats)


def test_vllm_positions_too_low_by_the_data_parallel_size(tmp_path):
    """L = 2.6 but positions add to 0.8: (2.6 - 1) / 0.8 = 2."""
    record = one(tmp_path, spec(2.6, 640, 1200, "0.450, 0.220, 0.130"))
    assert any("too low by 2.00, as when 2 data-parallel" in c for c in record.caveats)
    assert record.points[0].accept_rate_by_position == pytest.approx([0.9, 0.44 / 0.9, 0.26 / 0.44])


def test_vllm_v1_before_may_2025_leaves_the_bonus_token_out(tmp_path):
    line = "INFO SpecDecoding metrics: Draft acceptance rate: 60.0%, Mean acceptance length: 1.80, Accepted: 180 tokens, Drafted: 300 tokens\n"
    record = one(tmp_path, line)
    assert record.points[0].tokens_per_cycle == pytest.approx(2.8)
    assert "has no bonus token, 1 was added" in record.method


def test_vllm_v0_line(tmp_path):
    """Efficiency 0.5 of k + 1 = 6 tokens: L = 3."""
    line = (
        "INFO 02-03 10:00:10 metrics.py:475] Speculative metrics: Draft acceptance rate: 0.450, System efficiency: 0.500, Number of"
        " speculative tokens: 5, Number of accepted tokens: 45, Number of draft tokens: 100, Number of emitted tokens: 60.\n"
    )
    assert one(tmp_path, line).points[0].tokens_per_cycle == pytest.approx(3.0)


def test_vllm_without_speculation(tmp_path):
    """Batch 2 at 100 tok/s: 20 ms."""
    (point,) = one(tmp_path, 3 * window(2, 100.0)).points
    assert point.decode_ms.value == pytest.approx(20.0)
    assert point.tokens_per_cycle == 1.0


def test_vllm_broken_speculation(tmp_path):
    record = one(tmp_path, spec(1.0, 0, 1300, "0.000, 0.000"))
    assert any("speculation is broken, not weak" in c for c in record.caveats)


def test_vllm_settings_and_graph_limit(tmp_path):
    """Captured up to 40 tokens, 7 tokens a sequence: 5 sequences; 6 run without a graph."""
    log = (
        "INFO non-default args: {'model': 'm', 'max_num_seqs': 6, 'api_key': ['topsecret'], 'tensor_parallel_size': 2,"
        " 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 6}}\n"
        "INFO Initializing a V1 LLM engine (v0.20.2) with config: model='m', tensor_parallel_size=2, enforce_eager=False\n"
        "WARNING [vllm.py:1719] Truncating max_cudagraph_capture_size to 40\n"
    )
    record = one(
        tmp_path, log + 2 * (window(6, 150.0) + spec(2.5, 900, 3600, "0.500, 0.400, 0.300, 0.200, 0.050, 0.050"))
    )
    assert record.engine.version == "0.20.2"
    assert record.points[0].cuda_graph is False
    assert any(
        "a batch of 5 at 7 tokens a sequence; batches of 6 to 6 run without a graph" in c for c in record.caveats
    )
    assert "topsecret" not in record.model_dump_json()
    assert "--speculative-config" in record.engine.flags


def test_vllm_settings_that_are_cut_off(tmp_path):
    log = "INFO non-default args: {'model': 'm', 'tensor_parallel_size': 4, 'speculative_config': {'num_speculative_tokens': 3, 'x\n"
    record = one(tmp_path, log + window(1, 10.0))
    assert record.engine.flags[:4] == ["--model", "m", "--tensor-parallel-size", "4"]
    assert any("cut off" in c for c in record.caveats)


# --- llama.cpp


def test_llama_speculative_summary(tmp_path):
    """400 tokens of which 300 accepted: 100 cycles, length 4, 20 s / 100 = 200 ms."""
    text = "encoded   20 tokens in    0.500 seconds, speed:   40.000 t/s\ndecoded  400 tokens in   20.000 seconds, speed:   20.0 t/s\n"
    text += "n_draft   = 16\nn_predict = 400\nn_drafted = 900\nn_accept  = 300\naccept    = 33.333%\n"
    (point,) = one(tmp_path, text).points
    assert point.tokens_per_cycle == pytest.approx(4.0)
    assert point.cycle_ms.value == pytest.approx(200.0)


def test_llama_server_lines(tmp_path):
    """250 tokens in 2.5 s at length 2.5: 10 ms a token, 25 ms a cycle; 300 ms / 80 calls of drafting."""
    text = (
        "0.06 I slot print_timing: id  1 | task 0 | prompt eval time =      99.00 ms /    12 tokens (    8.25 ms per token)\n"
        "0.06 I slot print_timing: id  1 | task 0 |        eval time =    2500.00 ms /   250 tokens (   10.00 ms per token)\n"
        "0.06 I slot print_timing: id  1 | task 5 | draft acceptance = 0.50000 (  150 accepted /   300 generated), mean acceptance"
        " length =  2.50, acceptance rate per position = (0.700, 0.500, 0.300)\n"
        "0.06 I statistics     draft-eagle3: #calls(b,g,a) =    1     80     80, #gen drafts =     80, #acc drafts =    70, #gen tokens"
        " =    240, #acc tokens =   120, #mean acc len = 2.50, #acc rate/pos = (0.700, 0.500, 0.300), dur(b,g,a) = 0.005, 300.000,"
        " 0.114 ms\n"
    )
    (point,) = one(tmp_path, text).points
    assert point.tokens_per_cycle == pytest.approx(2.5)
    assert point.cycle_ms.value == pytest.approx(25.0)
    assert point.draft_ms.value == pytest.approx(3.75)
    assert point.accept_rate_by_position == pytest.approx([0.7, 5 / 7, 0.6])


def test_llama_length_comes_from_drafts_not_from_rate_times_maximum(tmp_path):
    """160 / 84 + 1 = 2.90, while 1 + 0.64 x 3 would be 2.92."""
    (point,) = one(tmp_path, "draft acceptance = 0.64000 (  160 accepted /   250 generated), 84 drafts\n").points
    assert point.tokens_per_cycle == pytest.approx(1 + 160 / 84)


def test_llama_bench_table(tmp_path):
    """200 drafts, 500 accepted of 600: length 3.5; 10 s / 200 = 50 ms."""
    row = "| code     |   1 | mtp     |     700 | eog   |  10.000 |   70.00 |    200 |     500/600 |  83.33% |   3.50 | 90.0% 85.0% 75.0% |\n"
    (point,) = one(tmp_path, row).points
    assert point.tokens_per_cycle == pytest.approx(3.5)
    assert point.cycle_ms.value == pytest.approx(50.0)
    assert point.accept_rate_by_position == pytest.approx([0.9, 0.85 / 0.9, 0.75 / 0.85])


def test_a_mixed_file_gives_all_its_parts(tmp_path):
    text = decode(0, 1, 80) + decode(1, 1, 80) + spec(2.6, 640, 1200, "0.800, 0.500, 0.300")
    text += "draft acceptance = 0.5 (  100 accepted /   200 generated), 80 drafts\nnoise\n"
    assert {r.name for r in read(tmp_path, text)} == {"SGLang server log", "vLLM server log", "llama.cpp log"}


def test_untagged_and_tagged_lines_of_joined_logs_both_count(tmp_path):
    log = decode(0, 1, 80, tag="") + decode(1, 1, 80, tag="") + decode(2, 4, 200) + decode(3, 4, 200)
    assert [p.batch for p in one(tmp_path, log).points] == [1, 4]


def test_experts_without_a_tuned_kernel_are_told(tmp_path: Path) -> None:
    warning = (
        "[2026-02-03 10:00:00] Using default MoE kernel config. Performance might be sub-optimal! Config file not found"
        " at /x/configs/triton_3_6_0/E=64,N=1408,device_name=NVIDIA_H200.json\n"
    )
    record = one(tmp_path, warning + decode(1, 4, 800) + decode(2, 4, 800))
    assert record.environment["untuned_experts"] == "E=64,N=1408"
    assert any("no tuned kernel" in c and "E=64,N=1408" in c for c in record.caveats)
    assert not any("no tuned kernel" in c for c in one(tmp_path, decode(1, 4, 800) + decode(2, 4, 800)).caveats)


# --- what a runtime or a log store adds


def wrapped_log() -> str:
    return (
        "INFO non-default args: {'model': 'm', 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 3}}\n"
        + 4 * (window(1, 104.0) + spec(2.6, 640, 1200, "0.800, 0.500, 0.300"))
    )


@pytest.mark.parametrize("kind", ["container", "cloud", "journald", "store", "one line", "twice"])
def test_a_log_inside_json_is_read_as_the_log(tmp_path, kind):
    """Docker's and Kubernetes' JSON lines, an array of entries, journald's bytes of a coloured line, Loki's answer."""
    plain = one(tmp_path, wrapped_log())
    lines = ["INFO:     GET /health 200 OK\n", *wrapped_log().splitlines(keepends=True)]
    text = {
        "container": "\n".join(json.dumps({"log": "\x1b[32m" + line, "stream": "stderr"}) for line in lines),
        "cloud": json.dumps([{"insertId": "x", "textPayload": line} for line in lines], indent=1),
        "journald": "\n".join(json.dumps({"_PID": "7", "MESSAGE": list(f"\x1b[0m{line}".encode())}) for line in lines),
        "store": json.dumps({"data": {"result": [{"values": [[str(i), line] for i, line in enumerate(lines)]}]}}),
        "one line": json.dumps({"text": "".join(lines)}),
        "twice": "\n".join(json.dumps({"log": json.dumps({"level": "INFO", "message": x}) + "\n"}) for x in lines),
    }[kind]
    record = one(tmp_path, text)
    assert record.points == plain.points
    assert (record.engine, record.caveats) == (plain.engine, [])


def test_a_json_line_that_is_cut_still_gives_its_text(tmp_path):
    lines = [json.dumps({"log": decode(i, 1, 80)}) for i in range(4)]
    assert one(tmp_path, "\n".join(lines)[:-3]).points[0].raw["steady_intervals"] == 3


# --- ranks


@pytest.mark.parametrize(
    "tags",
    [
        [" DP0 ATTN_CP0 TP0", " DP0 ATTN_CP1 TP1", " DP1 ATTN_CP0 TP2"],
        [" DP0 MOE_DP0 TP0 EP0", " DP0 MOE_DP1 TP1 EP1", " DP1 MOE_DP0 TP2 EP2"],
        [" DP0 PP0 TP0", " DP0 PP1 TP0", " DP1 PP0 TP0"],
        [".123 DP0 TP0", ".123 DP0 TP1", ".123 DP1 TP2"],
        [",123+00:00 DP0 TP0", ",123+00:00 DP0 TP1", ",123+00:00 DP1 TP2"],
    ],
)
def test_only_data_parallel_ranks_have_requests_of_their_own(tmp_path, tags):
    """Two groups, of batch 1 and 3: each is steady by itself; what further ranks of the first say is left out."""
    log = "".join(decode(i, 3 if "DP1" in tag else 1, 80, tag=tag) for i in range(4) for tag in tags)
    record = one(tmp_path, log)
    assert [(p.batch, p.raw["steady_intervals"]) for p in record.points] == [(1, 3), (3, 3)]
    assert record.environment["dp_ranks"] == 2


def test_pipeline_stages_are_no_data_parallel_ranks(tmp_path):
    record = one(tmp_path, "".join(decode(i, 1, 80, tag=tag) for i in range(4) for tag in (" PP0 TP0", " PP1 TP0")))
    assert record.points[0].raw["steady_intervals"] == 3
    assert "dp_ranks" not in record.environment


def test_a_line_of_several_vllm_engines_is_a_sum(tmp_path):
    """2 requests and 208 tokens a second on two engines: one each, 104 a second, so the 25 ms of `test_vllm_windows`."""
    line = window(2, 208.0).replace("Engine 000:", "2 Engines Aggregated:")
    record = one(tmp_path, 4 * (line + spec(2.6, 1280, 2400, "0.800, 0.500, 0.300")))
    (point,) = record.points
    assert (point.batch, point.tokens_per_s.value) == (1, 104.0)
    assert point.cycle_ms.value == pytest.approx(25.0)
    assert record.caveats == []
    (odd,) = one(
        tmp_path, 4 * (line.replace("Running: 2", "Running: 3") + spec(2.6, 1280, 2400, "0.8, 0.5, 0.3"))
    ).points
    assert (odd.batch, odd.cycle_ms) == (None, None)  # who runs two is not told


# --- speculation whose length is not told


@pytest.mark.parametrize(
    "text",
    [
        "INFO non-default args: {'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 3}}\n"
        + 4 * window(1, 104.0),
        "INFO api_server.py:531] args: Namespace(model='m', speculative_model='d', num_speculative_tokens=5)\n"
        + 4 * window(1, 104.0),
        "Initializing a V1 LLM engine (v0.20.2) with config: speculative_config=SpeculativeConfig(method='mtp',"
        " model='m', num_spec_tokens=3), tensor_parallel_size=1\n" + 4 * window(1, 104.0),
        4 * (window(1, 104.0) + "SpecDecoding metrics: of a form that is not known\n"),
        "server_args=ServerArgs(model_path='m', speculative_algorithm='EAGLE3')\n"
        + "".join(decode(i, 1, 104.0) for i in range(4)),
    ],
)
def test_a_server_that_speculates_is_never_taken_for_plain_decoding(tmp_path, text):
    record = one(tmp_path, text)
    (point,) = record.points
    assert (point.tokens_per_cycle, point.decode_ms, point.cycle_ms) == (None, None, None)
    assert point.tokens_per_s.value == 104.0
    assert any("the server speculates" in caveat for caveat in record.caveats)
    assert "no speculation" not in record.method


def test_settings_of_an_older_vllm(tmp_path):
    text = "INFO args: Namespace(model='m', api_key='sesame', tensor_parallel_size=4, speculative_model='d', num_speculative_tokens=5)\n"
    flags = one(tmp_path, text + window(1, 104.0)).engine.flags
    assert flags[flags.index("--speculative-config") + 1] == '{"model": "d", "num_speculative_tokens": 5}'
    assert "sesame" not in flags


def test_a_window_without_drafts_prints_nan(tmp_path):
    """As vLLM does when requests come to an end: the other windows still count, and nothing is said to be damaged."""
    idle = spec(1.0, 0, 0, "0.000, 0.000, 0.000").replace("length: 1.0", "length: nan").replace("0.0%", "nan%")
    record = one(tmp_path, 4 * (window(1, 104.0) + spec(2.6, 640, 1200, "0.800, 0.500, 0.300")) + window(1, 5.0) + idle)
    assert record.points[0].tokens_per_cycle == pytest.approx(2.6)
    assert not any("cut off" in caveat for caveat in record.caveats)


def test_one_garbled_number_costs_its_line_alone(tmp_path):
    pair = window(1, 104.0) + spec(2.6, 640, 1200, "0.800, 0.500, 0.300")
    record = one(tmp_path, 3 * pair + pair.replace("length: 2.6", "length: 2.6.6") + pair)
    assert record.points[0].cycle_ms.value == pytest.approx(25.0)
    assert any("cut off or of an unknown form" in caveat for caveat in record.caveats)


def test_a_benchmark_result_that_a_container_printed_is_read(tmp_path):
    row = {
        "backend": "sglang",
        "duration": 10.0,
        "completed": 4,
        "output_throughput": 40.0,
        "mean_tpot_ms": 10.0,
        "accept_length": 2.0,
    }
    record = one(tmp_path, "\n".join(json.dumps({"log": x}) for x in ("starting\n", json.dumps(row) + "\n")))
    assert (record.name, record.points[0].cycle_ms.value) == ("SGLang bench_serving, line 2", 20.0)
    assert record.caveats == []
