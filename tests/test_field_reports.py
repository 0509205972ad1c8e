"""What users reported in public, as tests: the shape of each report with numbers of our own, and the right answer.

Reports that specsim cannot answer are in docs/limits.md. The names say what was reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import SOURCE, dense, moe
from builders import scenario as small_scenario

from specsim.acceptance import Acceptance, chain_length, convert, rate_for_length
from specsim.cli import main
from specsim.configs import load_model, model_from_config
from specsim.cycle import evaluate
from specsim.engines import load_engine
from specsim.errors import InputError
from specsim.forward import Parallel, allreduce
from specsim.memory import memory
from specsim.observations import contradictions, observe
from specsim.observe_checks import check_rate, read_positions, read_rates
from specsim.prediction import machine_of, predict
from specsim.profiles import AllReduceCurve, latency_us
from specsim.scenarios import build

FIELD_BOX = ("--hardware", "8x-rtx-pro-6000")


def diagnosis(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        main(["diagnose", *arguments, "--json"])
    captured = capsys.readouterr()
    assert not stop.value.code, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def weights(d: dict[str, Any]) -> dict[str, float]:
    return {h["id"]: h["weight"] for h in d["hypotheses"]}


def remedy(d: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in d["remedies"] if r["id"] == name)


def decode_line(
    batch: int, queue: int, length: float, rate: float, speed: float, second: int, graph: str = "True"
) -> str:
    return (
        f"[2026-04-01 12:00:{second:02d} TP0] Decode batch, #running-req: {batch}, #token: {batch * 900}, token usage: 0.10,"
        f" accept len: {length:.2f}, accept rate: {rate:.2f}, cuda graph: {graph}, gen throughput (token/s): {speed:.2f},"
        f" #queue-req: {queue},\n"
    )


# --- slower with speculation: what the two rates say ------------------------------------------------------------------


def test_a_small_moe_that_loses_at_batch_1(capsys: pytest.CaptureFixture[str]) -> None:
    """220 against 165 tokens a second at 1.95 tokens a cycle: a cycle costs 1.95 x 220 / 165 = 2.6 decode steps."""
    d = diagnosis(
        capsys, "--model", "Qwen3-30B-A3B", "--hardware", "8x-h100", "--tp", "2", "--draft-tokens", "4",
        "--decode-tokens-per-s", "220", "--tokens-per-s", "165", "--accept-length", "1.95",
    )  # fmt: skip
    assert remedy(d, "better-drafter")["accept_length_needed"]["value"] == pytest.approx(2.6, rel=0.02)
    assert remedy(d, "better-drafter")["reachable"] is True
    off = remedy(d, "speculation-off")["gain"]
    assert off["value"] == pytest.approx(220 / 165, rel=0.02)
    assert off["low"] > 1


def test_no_acceptance_breaks_even_with_one_drafted_token(capsys: pytest.CaptureFixture[str]) -> None:
    """460 tokens a second in graphs against 255 at 1.7 a cycle: 3.07 are needed, and 2 is the most."""
    d = diagnosis(
        capsys, "--model", "Qwen3-8B", "--hardware", "1x-h200", "--draft-tokens", "2",
        "--decode-tokens-per-s", "460", "--tokens-per-s", "255", "--accept-length", "1.7",
    )  # fmt: skip
    assert remedy(d, "better-drafter")["accept_length_needed"]["value"] == pytest.approx(1.7 * 460 / 255, rel=0.02)
    assert remedy(d, "better-drafter")["reachable"] is False


def test_many_tokens_a_verify_and_half_the_speed_is_the_host_not_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """380 to 210 tokens a second at 5.4 tokens a verify: a cycle of 9.8 steps. Rows cannot cost that on a small model:
    launches, a host gap or attention row by row."""
    d = diagnosis(
        capsys, "--model", "Qwen3-0.6B", "--hardware", "1x-h200", "--method", "ngram", "--draft-tokens", "9",
        "--decode-tokens-per-s", "380", "--tokens-per-s", "210", "--accept-length", "5.4",
    )  # fmt: skip
    w = weights(d)
    assert w["verify-eager"] + w["host-gap"] > 0.5
    assert w["weak-drafter"] < 0.05


def test_overhead_does_not_shrink_with_tensor_parallelism() -> None:
    """21 to 30 tokens a second on one GPU, 62 to 59 on four, at 2.5 tokens a cycle: 2.5 / 30 - 1 / 21 = 35.7 ms and
    2.5 / 59 - 1 / 62 = 26.2 ms a cycle beyond a step. The host's share is the same on both."""
    by_tp = {tp: predict(build(model="Llama-3.1-8B", hardware="8x-h100", tp=tp, draft_tokens=4)) for tp in (1, 4)}
    host = {tp: p.host_ms.value for tp, p in by_tp.items() if p.host_ms is not None}
    assert host[4] >= host[1] > 0
    need = {tp: p.breakeven_length.value for tp, p in by_tp.items() if p.breakeven_length is not None}
    assert need[4] > need[1]


def test_a_constant_excess_in_decode_and_verify_is_the_allreduce(capsys: pytest.CaptureFixture[str]) -> None:
    """26 ms where 12 are expected, and 14 ms more in a verify as well: low clocks would multiply both."""
    w = weights(diagnosis(capsys, "--decode-ms", "26", "--verify-ms", "29.5", "--draft-tokens", "3"))
    assert max(w, key=lambda k: w[k]) == "allreduce-steep"
    assert w["clocks"] < 0.1
    assert w["verify-eager"] < 0.05


def test_a_cliff_in_rows_hits_decode_and_verify_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps double between 16 and 32 rows, whether these are 32 requests or 8 verifies of 4: no fault of the verify."""
    w = weights(
        diagnosis(
            capsys, "--model", "GLM-5.1-NVFP4", *FIELD_BOX, "--method", "mtp", "--draft-tokens", "4", "--decode-at", "1=18",
            "--decode-at", "4=25", "--decode-at", "16=44", "--decode-at", "32=104", "--verify-at", "4=46", "--verify-at", "8=103",
        )
    )  # fmt: skip
    assert w["allreduce-steep"] + w["experts-slow"] > 0.9
    assert w["verify-eager"] < 0.05


def test_two_rows_of_a_moe_cost_three_times_one(capsys: pytest.CaptureFixture[str]) -> None:
    """6, 18 and 23 ms at 1, 2 and 4 rows on one consumer GPU: the experts' kernel, not speculation."""
    d = diagnosis(
        capsys, "--model", "Qwen3-30B-A3B", "--hardware", "1x-rtx-4090", "--draft-tokens", "4",
        "--decode-at", "1=6", "--decode-at", "2=18", "--decode-at", "4=23",
    )  # fmt: skip
    assert d["hypotheses"][0]["id"] == "experts-slow"
    assert rate_for_length(23 / 6, 3) == pytest.approx(0.96, abs=0.015)  # what 3 drafted tokens would need


def test_batch_is_not_assumed_to_spoil_a_moe_ever_more() -> None:
    """Experts saturate: a cycle of 16 rows costs fewer decode steps at batch 32 than at batch 2, and more again at 256."""
    s = build(
        model="Qwen3-30B-A3B", hardware="8x-h100", tp=4, draft_tokens=16, batch=[2, 32, 256], max_running_requests=512
    )
    c = evaluate(s, machine_of(s))
    small, middle, large = (c.cycle_s / c.decode_s).reshape(-1)
    assert middle < small
    assert middle < large


# --- admission, graphs and flags ---------------------------------------------------------------------------------------


def test_a_queue_behind_a_small_batch_is_admission(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The batch stays at 24 while 70 requests wait, in every line: not a slow verify."""
    file = tmp_path / "server.log"
    file.write_text("".join(decode_line(24, 70, 2.5, 0.5, 900.0, i) for i in range(40)))
    d = diagnosis(capsys, str(file))
    assert d["hypotheses"][0]["id"] == "admission-cap"
    assert any("limited by admission" in fact for fact in d["facts"])


def test_half_the_requests_decode_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    """1,250 tokens a second at 38 ms a token are 47.5 requests in flight of 96 sent: SGLang admits 48 when speculating."""
    d = diagnosis(
        capsys, "--model", "GLM-5.1-FP8", "--hardware", "8x-h200", "--draft-tokens", "4", "--batch", "96",
        "--accept-length", "3.5", "--tokens-per-s", "1250", "--result", "queue=yes",
    )  # fmt: skip
    assert d["hypotheses"][0]["id"] == "admission-cap"
    scenario = build(model="GLM-5.1-FP8", hardware="8x-h200", draft_tokens=4, batch=96)
    assert any("at most 48" in w for w in scenario.warnings)


def test_one_arm_without_graphs_is_no_comparison(tmp_path: Path) -> None:
    plain, eager = tmp_path / "plain.log", tmp_path / "spec.log"
    for file, graph in ((plain, "True"), (eager, "False")):
        file.write_text("".join(decode_line(8, 0, 2.5, 0.5, 300.0, i, graph) for i in range(12)))
    said = contradictions([*observe(plain), *observe(eager)])
    assert any("CUDA graphs" in text for text in said)


def test_flags_that_differ_beside_speculation_are_named(tmp_path: Path) -> None:
    files = []
    for name, more in (
        ("a", "enable_torch_compile=True"),
        ("b", "speculative_algorithm='EAGLE', speculative_num_steps=1"),
    ):
        file = tmp_path / f"{name}.log"
        file.write_text(
            f"server_args=ServerArgs(model_path='org/m', tp_size=8, {more})\n" + decode_line(4, 0, 1.8, 0.4, 99.0, 1)
        )
        files += observe(file)
    assert any("torch-compile" in text for text in contradictions(files))


def test_captured_tokens_cover_fewer_sequences() -> None:
    """vLLM captures tokens: 42 wanted for 6 sequences of 7 rows, 40 captured, so 5 sequences at most run in a graph."""
    vllm = load_engine("vllm")
    assert max(vllm.captured_batches(40, True, 80.0, 1, rows=7, explicit=[1, 2, 4, 8, 16, 24, 32, 40])) == 5
    assert max(vllm.captured_batches(512, True, 80.0, 1, rows=2, max_running=264)) <= 256


def test_attention_mode_is_listed_as_no_test_of_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    d = diagnosis(capsys, "--decode-ms", "12", "--verify-ms", "29", "--draft-tokens", "3")
    assert "attention-mode" in {u["id"] for u in d["uninformative"]}


# --- what a figure means -----------------------------------------------------------------------------------------------


def test_accepted_without_the_bonus_token() -> None:
    """3.2 accepted a cycle are 4.2 tokens; at 30 tokens a second a cycle takes 140 ms."""
    assert chain_length(rate_for_length(4.2, 7), 7) == pytest.approx(4.2)


def test_a_share_of_drafted_tokens_becomes_a_length() -> None:
    """0.82 of 2 drafted: 2.64 tokens; 0.71 of 3: 3.13."""
    assert convert(0.82, "fraction", num_steps=2).length(2) == pytest.approx(2.64)
    assert convert(0.71, "fraction", num_steps=3).length(3) == pytest.approx(3.13)


def test_both_definitions_of_a_rate_agree_in_the_length() -> None:
    """Length 2.2 with 4 draft tokens: 0.55 by the old definition (2.2 / 4), 0.40 by the new one (1.2 / 3)."""
    old = convert(0.55, "sglang-rate-old", draft_tokens=4).length(3)
    new = convert(0.40, "sglang-rate", draft_tokens=4).length(3)
    assert old == pytest.approx(2.2)
    assert new == pytest.approx(2.2)
    assert read_rates([(2.2, 0.55)], 4).message != read_rates([(2.2, 0.40)], 4).message


def test_positions_too_low_by_the_number_of_engines() -> None:
    """Length 2.8, positions 0.5, 0.25, 0.15: they add to 0.9, half of the 1.8 that were gained."""
    found = read_positions(2.8, [0.5, 0.25, 0.15])
    assert "2" in found.message


def test_a_counter_is_no_rate() -> None:
    assert check_rate(1730.0, "server_spec_accept_rate")
    assert check_rate(0.47, "server_spec_accept_rate") is None


def test_a_rate_of_a_larger_budget_is_lower_and_may_be_better() -> None:
    """4 draft tokens at 0.63 give 2.89, 8 at 0.34 give 3.38: rates of different budgets do not compare."""
    small = convert(0.63, "sglang-rate", draft_tokens=4).length(3)
    large = convert(0.34, "sglang-rate", draft_tokens=8).length(7)
    assert small == pytest.approx(2.89)
    assert large == pytest.approx(3.38)


def test_one_rate_for_all_positions_overstates_a_long_chain() -> None:
    """0.83 at one step says 4.8 tokens at eight; measured positions that fall from 0.76 give 4.5."""
    unconditional = [0.76, 0.62, 0.51, 0.42, 0.36, 0.31, 0.27, 0.24]
    measured = convert(unconditional, "unconditional").length(8)
    assert measured == pytest.approx(1 + sum(unconditional))
    assert Acceptance.constant(0.83).length(8) > 1.05 * measured


def test_nothing_is_ever_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("".join(decode_line(4, 0, 1.0, 0.0, 80.0, i) for i in range(8)))
    assert any("broken" in fact for fact in diagnosis(capsys, str(file))["facts"])


# --- theory ------------------------------------------------------------------------------------------------------------


def test_best_length_of_a_slow_draft() -> None:
    """A draft that costs 0.6 of the target at acceptance 0.8: speedup (1 - a^(k+1)) / ((1 - a)(0.6 k + 1)) is 1.125 at
    k = 1, 1.109 at 2 and 0.922 at 5. At k = 5 break-even is 0.84."""
    speedup = {k: float(np.asarray(chain_length(0.8, k))) / (0.6 * k + 1) for k in (1, 2, 5)}
    assert speedup[1] == pytest.approx(1.125)
    assert speedup[2] == pytest.approx(1.109, abs=0.001)
    assert speedup[5] == pytest.approx(0.922, abs=0.001)
    assert rate_for_length(0.6 * 5 + 1, 5) == pytest.approx(0.84, abs=0.01)


def test_a_published_formula_by_its_numbers() -> None:
    """a = 0.5, 4 drafted at a cost of 0.1 each: 1.9375 / 1.4 = 1.384."""
    assert float(np.asarray(chain_length(0.5, 4))) / 1.4 == pytest.approx(1.384, abs=0.001)


# --- all-reduce and memory -----------------------------------------------------------------------------------------------


def test_messages_and_curves_of_two_implementations() -> None:
    """A verify sends batch x d x hidden x 2 bytes. A one-shot kernel wins below the crossing, NCCL above."""

    def curve(name: str, points: dict[int, float]) -> AllReduceCurve:
        return AllReduceCurve(
            source=SOURCE, relative_uncertainty=0.1, implementation=name, ranks=4, mode="graph",
            bytes=list(points), latency_us=list(points.values()),
        )  # fmt: skip

    nccl = curve("nccl", {4096: 19, 16384: 22, 131072: 52, 393216: 84})
    oneshot = curve("oneshot", {4096: 4, 16384: 7, 131072: 45, 393216: 121})
    at = {size: (latency_us(nccl, size), latency_us(oneshot, size)) for size in (8192, 131072, 262144)}
    assert at[8192][1] < at[8192][0]  # type: ignore[operator]
    assert at[131072][1] < at[131072][0]  # type: ignore[operator]
    assert at[262144][1] > at[262144][0]  # type: ignore[operator]
    assert allreduce(7168 * 2.0).message is not None


def test_a_layer_split_has_no_allreduce() -> None:
    s = small_scenario(dense(), tp=1)
    assert "allreduce" not in evaluate(s, machine_of(s)).decode.seconds


def test_all_experts_must_fit_though_few_are_active() -> None:
    """64 experts in memory, 4 read by one row: memory counts all, a decode step the few."""
    model = moe()
    need = memory(small_scenario(model, tp=1))
    experts = model.layers[0][0].experts
    assert experts is not None
    assert need.weights > 0.9 * 4 * experts.count * experts.bytes_each


def test_latent_cache_is_the_same_on_every_rank() -> None:
    """kv_lora_rank 512 + 64 rope values x 2 bytes x layers a token, whatever the heads or the ranks."""
    model = load_model("DeepSeek-V3")
    per_token = 576 * model.kv_format.bytes * model.num_layers
    for tp in (1, 8):
        s = build(model="DeepSeek-V3", hardware="8x-h200", tp=tp, method="none", batch=1, context=1000)
        assert memory(s).kv == pytest.approx(1000 * per_token, rel=0.05)
        assert s.parallel == Parallel(tp)


def test_an_expert_key_that_is_not_known_is_refused_not_dropped() -> None:
    config = {
        "architectures": ["UnknownMoeForCausalLM"], "model_type": "unknown_moe", "hidden_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32000,
        "number_of_routed_expert_blocks": 64,
    }  # fmt: skip
    with pytest.raises(InputError):
        model_from_config(config, name="unknown")
