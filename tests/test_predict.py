"""The predict command as its users meet it: the field case, the JSON contract, launch lines, bad input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specsim
from specsim.cli import main
from specsim.configs import PRESETS, load_model
from specsim.errors import InputError
from specsim.names import PHASES
from specsim.prediction import SAMPLES, machine_of, predict
from specsim.profiles import load_profile
from specsim.scenarios import build


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, "predict", *arguments, "--json")
    assert code == 0
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def test_the_field_case_by_the_bare_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured: decode 12.1 ms, verify 29.5 ms, cycle 30.4 ms; break-even 2.5 tokens and a rate of 0.83."""
    p = document(capsys, "--draft-tokens", "3", "--accept-rate", "0.6")
    assert p["decode_ms"]["value"] == pytest.approx(12.1, rel=0.05)
    assert p["verify_ms"]["value"] == pytest.approx(29.5, rel=0.05)
    assert p["cycle_ms"]["value"] == pytest.approx(30.4, rel=0.05)
    assert p["breakeven"]["accept_length"]["value"] == pytest.approx(2.5, rel=0.05)
    assert p["breakeven"]["accept_rate"]["value"] == pytest.approx(0.83, abs=0.04)
    assert p["breakeven"]["reachable"] is True
    assert p["speedup"]["high"] < 1
    assert p["accept_length"] == pytest.approx(1 + 0.6 + 0.36)


def test_a_launch_line_that_drafts_nothing_is_named_where_draft_tokens_are_asked_for() -> None:
    """The line is the whole server's: it has no speculation, and one GPU, whatever the default case has."""
    line = {"model": "Llama-3.1-8B", "hardware": "1x-h200", "sglang_args": "--disable-cuda-graph"}
    note = "the launch line drafts nothing"
    assert any(note in w for w in specsim.predict(**line, draft_tokens=4).scenario.warnings)
    assert not any(note in w for w in specsim.predict(**line, draft_tokens=4, method="eagle3").scenario.warnings)


LINE = (
    "--model-path meta-llama/Llama-3.1-8B-Instruct --tp 1 --speculative-algorithm EAGLE3 --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --chunked-prefill-size 2048"
)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp": 2}, ["--tp wins over the launch line's 1"]),
        ({"draft_tokens": 6}, ["--draft-tokens wins over the launch line's 4, root included"]),
        ({"num_steps": 2}, ["--num-steps wins over the launch line's 3"]),
        ({"method": "none"}, ["--method wins over the launch line's eagle3"]),
        ({"model": "Qwen3-8B", "method": "none"},
         ["--model wins over the launch line's meta-llama/Llama-3.1-8B-Instruct", "--method wins over the launch line's eagle3"]),
        ({"chunked_prefill_size": 512}, ["--chunked-prefill-size wins over the launch line's 2048"]),
        ({"tp": 1, "model": "llama-3.1-8b", "draft_tokens": 4, "num_steps": 3, "topk": 1, "method": "eagle3"}, []),
        ({"dp_attention": 1}, []),
        ({"ep": 1, "batch": 4, "context": 100, "draft": "llama3-8b-eagle3", "accept_rate": 0.5}, []),  # the line says none of it
    ],
)  # fmt: skip
def test_an_option_beside_a_launch_line_wins_and_is_told(given: dict[str, Any], said: list[str]) -> None:
    s = specsim.scenario(hardware="8x-h100", sglang_args=LINE, **given)
    assert [w for w in s.warnings if "wins over" in w] == said
    assert s.parallel.tp == given.get("tp", 1)


def test_phases_that_a_method_lacks_and_trees_that_an_engine_lacks_are_told() -> None:
    box = {"model": "Llama-3.1-8B", "hardware": "1x-h200"}

    def said(**options: Any) -> list[str]:
        return [w for w in specsim.scenario(**box, **options).warnings if "has no" in w or "chains alone" in w]

    none = "method none has no verify: --eager verify is left out"
    assert said(method="none", eager=("decode", "verify")) == [none]
    assert said(method="ngram", eager=("draft", "verify")) == ["method ngram has no draft: --eager draft is left out"]
    assert said(eager=("decode", "draft", "verify", "extend")) == []
    assert none in specsim.plan(**box, rate=1, method="none", eager=("verify",)).plan.warnings
    assert none not in specsim.plan(**box, rate=1, accept_rate=0.6, eager=("verify",)).plan.warnings
    tree = {"topk": 4, "num_steps": 3, "draft_tokens": 8}
    assert said(engine="vllm", **tree) == ["vLLM drafts chains alone: this tree is priced as if it could"]
    assert said(**tree) == []


def test_a_chunk_beside_a_launch_line_wins_and_is_told() -> None:
    load = {"hardware": "8x-h100", "sglang_args": LINE, "method": "none", "rate": 1, "num_requests": 2}
    said = specsim.simulate(**load, chunk_tokens=1024).warnings
    assert "--chunk-tokens wins over the launch line's 2048" in said
    assert not any("chunk" in w for w in specsim.simulate(**load, chunk_tokens=2048).warnings)


@pytest.mark.parametrize(
    "line",
    [{"sglang_args": "--model-path Qwen3-8B --context-length 4096"}, {"vllm_args": "Qwen3-8B --max-model-len 4k"}],
)
def test_what_the_launch_line_allows_holds_for_the_context_and_for_requests(line: dict[str, Any]) -> None:
    """4k is 4,000 in vLLM's words. A request of 3,000 + 1,000 tokens is the longest that both take."""
    limit = 4096 if "sglang_args" in line else 4000
    box = {"hardware": "1x-h200", **line}
    note = f"is beyond the {limit:,} tokens that the launch line allows: the server refuses it"

    def said(made: Any) -> list[str]:
        return [w for w in made.json()["warnings"] if "beyond" in w]

    assert said(specsim.predict(**box, context=limit)) == []
    assert said(specsim.predict(**box, context=limit + 1)) == [f"context {limit + 1:,} {note}"]
    assert said(specsim.predict(hardware="1x-h200", model="Qwen3-8B", context=50_000)) == [
        "context 50,000 is beyond the 40,960 tokens of Qwen3-8B"
    ]
    for make, load in ((specsim.plan, {"rate": 1}), (specsim.simulate, {"rate": 1, "num_requests": 2})):
        assert said(make(**box, **load, input_tokens=3000, output_tokens=1000)) == []
        long = make(**box, **load, input_tokens=4000, output_tokens=1000)
        assert said(long) == [f"a request of 5,000 tokens, prompt and answer, {note}"]


def test_the_longest_request_of_a_trace_is_held_against_what_the_server_takes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,100,10\n1,5000,10\n2,100,10\n")
    line = {"hardware": "1x-h200", "sglang_args": "--model-path Qwen3-8B --context-length 1024"}
    for make in (specsim.plan, specsim.simulate):
        found = [w for w in make(**line, trace=trace).json()["warnings"] if "beyond" in w]
        assert len(found) == 1  # not that of a default context
        assert found[0].startswith("a request of 5,010 tokens, prompt and answer, is beyond the 1,024 tokens")


def test_attention_groups_beside_a_launch_line() -> None:
    line = "--model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp {} --enable-dp-attention"
    for groups, on, told in ((8, True, False), (4, True, True), (4, 4, False), (8, 2, True)):
        s = specsim.scenario(hardware="8x-h200", sglang_args=line.format(groups), dp_attention=on)
        assert (f"--dp-attention wins over the launch line's {groups}" in s.warnings) == told


def test_an_option_takes_with_it_what_the_launch_line_says_of_the_same() -> None:
    """One length of a chain the other, a drafter its method: what is asked for is priced, not what topk 1 makes of both."""

    def priced(line: str, **given: Any) -> tuple[str, float, float]:
        s = specsim.scenario(hardware="8x-h100", sglang_args=line, **given)
        return s.method, float(s.num_steps), float(s.draft_tokens)

    assert priced(LINE, draft_tokens=6) == ("eagle3", 5, 6)
    assert priced(LINE, num_steps=2) == ("eagle3", 2, 3)
    tree = LINE.replace("topk 1", "topk 4 --speculative-num-draft-tokens 8")
    assert priced(tree, draft_tokens=16) == ("eagle3", 3, 16)
    plain = "--model-path meta-llama/Llama-3.1-8B-Instruct"
    assert priced(plain, draft="llama3-8b-eagle3", draft_tokens=3) == ("eagle3", 2, 3)
    ngram = f"{plain} --speculative-algorithm NGRAM"
    assert priced(ngram)[1:] == (11, 12)  # SGLang's, found on the host at once: no length of a drafter
    assert priced(ngram, draft="llama3-8b-eagle3") == ("eagle3", 2, 3)
    assert priced(ngram, method="eagle3", draft_tokens=4) == ("eagle3", 3, 4)
    assert priced(LINE, method="ngram") == ("ngram", 3, 4)
    s = specsim.scenario(hardware="8x-h100", sglang_args=ngram, draft="llama3-8b-eagle3")
    assert "--draft wins over the launch line's ngram" in s.warnings
    s = specsim.scenario(hardware="8x-h100", sglang_args=LINE, method="none", batch=64)
    assert s.draft is None
    assert not any("queue" in w or "left out" in w for w in s.warnings)  # nothing of the line's speculation is left


def test_the_field_case_is_the_default() -> None:
    s = build()
    assert (s.model.name, s.draft and s.draft.name, s.profile.name) == (
        "Kimi-K2.5",
        "kimi-k2.5-eagle3",
        "8x-pcie-field",
    )
    assert (s.parallel.tp, float(s.batch), float(s.draft_tokens), s.method) == (8, 1, 3, "eagle3")


@pytest.mark.parametrize(("batch", "low", "high"), [(1, 10.8, 11.5), (2, 13.2, 13.8), (4, 16.7, 17.1), (8, 22.8, 22.8)])
def test_a_healthy_pcie_box(batch: int, low: float, high: float) -> None:
    """Kimi-K2.6 without speculation on 8 RTX PRO 6000, published (rtx6kpro pages kimi-k26-v2 and -v4): within 15 %."""
    p = predict(
        build(model="Kimi-K2.6", hardware="8x-rtx-pro-6000", method="none", batch=batch, context=512), samples=0
    )
    assert 0.85 * low < p.decode_ms.value < 1.15 * high


def test_the_json_contract(capsys: pytest.CaptureFixture[str]) -> None:
    p = document(capsys, "--draft-tokens", "3", "--accept-rate", "0.6")
    assert p["schema"] == "specsim.prediction/1"
    named = (
        "model",
        "draft",
        "hardware",
        "engine",
        "tp",
        "batch",
        "context",
        "method",
        "num_steps",
        "topk",
        "draft_tokens",
    )
    assert set(named) <= set(p["scenario"])
    for key in ("decode_ms", "draft_ms", "verify_ms", "extend_ms", "host_ms", "cycle_ms", "decode_tokens_per_s",
                "spec_tokens_per_s", "speedup"):  # fmt: skip
        assert p[key]["low"] <= p[key]["value"] <= p[key]["high"]
    known = {"allreduce", "experts", "gemm", "attention", "small_kernels", "lm_head", "launch", "host"}
    for phase in ("decode", "draft", "verify", "extend", "host"):
        parts = [b for b in p["breakdown"] if b["phase"] == phase]
        assert {b["component"] for b in parts} <= known
        assert sum(b["ms"] for b in parts) == pytest.approx(p[f"{phase}_ms"]["value"], rel=1e-4)
        assert all(b["source"] in ("measured", "fitted", "published", "datasheet", "assumed") for b in parts)
    assert set(p["memory"]) == {"weights_gb_per_gpu", "kv_gb_per_gpu", "fits"}
    total = sum(p[f"{phase}_ms"]["value"] for phase in ("draft", "verify", "extend", "host"))
    assert p["cycle_ms"]["value"] == pytest.approx(total, rel=1e-4)
    assert p["speedup"]["value"] == pytest.approx(
        p["accept_length"] * p["decode_ms"]["value"] / p["cycle_ms"]["value"], rel=1e-3
    )


def test_without_acceptance_there_is_no_speedup_but_a_curve(capsys: pytest.CaptureFixture[str]) -> None:
    p = document(capsys, "--draft-tokens", "3")
    assert p["speedup"] is None
    assert p["accept_rate"] is None
    assert p["breakeven"]["accept_length"]["value"] > 1
    curve = [c["speedup"]["value"] for c in p["speedup_by_accept_rate"]]
    assert curve == sorted(curve)
    assert curve[-1] == pytest.approx(3 * curve[0], rel=1e-4)


def test_break_even_is_never_a_rate_above_one(capsys: pytest.CaptureFixture[str]) -> None:
    p = document(capsys, "--draft-tokens", "2", "--hardware", "8x-h200", "--eager", "verify")
    assert p["breakeven"]["reachable"] is False
    assert p["breakeven"]["accept_rate"] is None
    code, out, _ = run(capsys, "predict", "--draft-tokens", "2", "--hardware", "8x-h200", "--eager", "verify")
    assert code == 0
    assert "not reachable with 2 draft tokens" in out


@given(
    st.sampled_from(["Llama-3.1-8B", "Qwen3-30B-A3B", "Kimi-K2.5", "gpt-oss-20b", "DeepSeek-V3", "Qwen3-Next-80B-A3B"]),
    st.sampled_from(["8x-h100", "8x-rtx-pro-6000", "8x-pcie-field"]),
    st.integers(1, 200),
    st.integers(0, 100_000),
    st.integers(2, 9),
    st.floats(0, 1),
)
@settings(max_examples=25, deadline=None)
def test_any_prediction_is_sane(model: str, box: str, batch: int, context: int, d: int, alpha: float) -> None:
    s = build(model=model, hardware=box, batch=batch, context=context, draft_tokens=d, accept_rate=alpha, tp=8)
    p = predict(s, samples=20)
    assert 1 <= (p.accept_length or 1) <= d
    for q in (p.decode_ms, p.verify_ms, p.cycle_ms, p.speedup, p.breakeven_length):
        if q is not None:
            assert 0 < q.low <= q.value <= q.high < math.inf
    if p.breakeven_rate is not None:
        assert 0 <= p.breakeven_rate.low <= p.breakeven_rate.high <= 1
    json.dumps(p.json(), allow_nan=False)


def test_tp_1_has_no_allreduce() -> None:
    p = predict(build(model="Llama-3.1-8B", hardware="8x-h100", tp=1, draft_tokens=3), samples=0)
    assert not [part for part in p.parts if part.component == "allreduce"]


@pytest.mark.parametrize("phase", PHASES)
def test_an_eager_phase_costs_more_on_a_fast_box(phase: str) -> None:
    base = {"model": "Llama-3.1-8B", "hardware": "8x-h200", "tp": 8, "draft_tokens": 3}
    graph, eager = (predict(build(**base, eager=e), samples=0) for e in ((), (phase,)))
    times = [
        {"decode": p.decode_ms, "draft": p.draft_ms, "verify": p.verify_ms, "extend": p.extend_ms}[phase]
        for p in (graph, eager)
    ]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].value >= times[0].value


def test_a_launch_line_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "NCCL_P2P_DISABLE=1 python3 -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp 8 --speculative-algorithm EAGLE3 "
        "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3 --frobnicate 3 "
        "--speculative-draft-model-path lightseekorg/kimi-k2.5-eagle3 --cuda-graph-max-bs 8"
    )
    p = document(capsys, "--sglang-args", line, "--hardware", "8x-pcie-field")
    assert (p["scenario"]["draft_tokens"], p["scenario"]["tp"], p["scenario"]["method"]) == (3, 8, "eagle3")
    assert any("--frobnicate" in w for w in p["warnings"])
    plain = document(capsys, "--draft-tokens", "3")
    assert p["verify_ms"]["value"] == pytest.approx(plain["verify_ms"]["value"], rel=1e-3)


def test_vllm_counts_one_draft_token_less(capsys: pytest.CaptureFixture[str]) -> None:
    line = """vllm serve moonshotai/Kimi-K2.5 -tp 8 --speculative-config '{"method": "eagle3", "model": "lightseekorg/kimi-k2.5-eagle3",
    "num_speculative_tokens": 2}'"""
    p = document(capsys, "--vllm-args", line, "--hardware", "8x-rtx-pro-6000")
    assert (p["scenario"]["draft_tokens"], p["scenario"]["num_steps"], p["scenario"]["engine"]) == (3, 2, "vllm")


BAD = {
    "gpu": ("--hardware", "8x-h20"),
    "model": ("--model", "Kimi-K9"),
    "a folder without config.json": ("--model", "FOLDER"),
    "flag": ("--draft-tokns", "3"),
    "engine": ("--engine", "tgi"),
    "method": ("--method", "medusa"),
    "negative": ("--batch", "-1"),
    "zero": ("--batch", "0"),
    "huge": ("--context", "99999999999999999999"),
    "word": ("--batch", "many"),
    "nan": ("--accept-rate", "nan"),
    "rate above one": ("--accept-rate", "1.2"),
    "rate below zero": ("--accept-rate", "-0.1"),
    "length above s + 1": ("--draft-tokens", "3", "--accept-length", "3.5"),
    "draft tokens below two": ("--draft-tokens", "1"),
    "tp that does not divide": ("--tp", "7"),
    "tp above the box": ("--tp", "16"),
    "two acceptances": ("--accept-rate", "0.5", "--accept-length", "2"),
    "a tree without depth": ("--topk", "4", "--draft-tokens", "8"),
    "a tree too large": ("--topk", "2", "--num-steps", "2", "--draft-tokens", "30"),
    "phase": ("--eager", "prefil"),
    "routing": ("--routing", "zipf:-1"),
    "rates": ("--accept-per-position", "0.5,x"),
    "launch line": ("--sglang-args", "--model-path 'x"),
    "ep without experts": ("--model", "Llama-3.1-8B", "--ep", "2"),
    "a drafter as the target": ("--model", "kimi-k2.5-eagle3"),
    "a block that is longer than drafted": (
        "--model",
        "Qwen3-8B",
        "--draft",
        "qwen3-8b-dflash",
        "--draft-tokens",
        "64",
    ),
    "no known draft": ("--model", "Mixtral-8x7B", "--hardware", "8x-h100", "--draft-tokens", "4"),
    "a method without a cost model": ("--method", "medusa"),
    "no draft tokens": ("--draft-tokens", "0"),
    "an empty model": ("--model", ""),
    "draft of another size": ("--model", "Llama-3.1-8B", "--draft", "kimi-k2.5-eagle3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = [str(tmp_path) if a == "FOLDER" else a for a in BAD[name]]
    code, out, err = run(capsys, "predict", *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--model", "--draft", "--hardware", "--method", "--sglang-args", "--vllm-args"])
def test_an_empty_option_is_no_default(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell variable that is not set must not price the default scenario."""
    code, out, err = run(capsys, "predict", option, "")
    assert (code, out) == (2, "")
    assert f"{option}: is empty" in err


def test_a_launch_line_without_a_model_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "predict", "--sglang-args", "--tp 8")
    assert "names no model" in out


def test_a_block_drafter_on_a_launch_line_verifies_its_block(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH --speculative-draft-model-path qwen3-8b-dflash"
    assert document(capsys, "--hardware", "1x-h200", "--sglang-args", line)["scenario"]["draft_tokens"] == 16


def test_names_are_no_markup_and_numbers_are_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "[red]:smile:[" / "b]"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((PRESETS / "Qwen3-8B.json").read_text())
    for arguments in (["models", "show", str(folder)], ["predict", "--hardware", "1x-h200", "--model", str(folder)]):
        assert run(capsys, *arguments)[0] == 0
    named = tmp_path / "[bold]:smile:[x].json"
    named.write_text((PRESETS / "Qwen3-8B.json").read_text())
    for arguments in (["models", "show"], ["predict", "--hardware", "1x-h200", "--context", "10m", "--model"]):
        code, out, _ = run(capsys, *arguments, str(named))
        assert code == 0
        assert "[bold]:smile:[x]" in out
    assert "context 10485760," in out or "context 10485760\n" in out


@pytest.mark.parametrize(
    ("content", "expected"),
    [("{,}", "line 1"), ("[1]", "object"), ('{"hidden_size": 4}', "missing"), ("", "is empty")],
)
def test_a_broken_config_names_its_place(
    content: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    code, _, err = run(capsys, "predict", "--model", str(tmp_path))
    assert code == 2
    assert str(tmp_path) in err
    assert expected in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "it needs 673.3 GB a GPU, 138.1 of 150 GB can be used; TP 8 on 8 such GPUs would fit."),
        (("--hardware", "8x-h200", "--tp", "1"), "TP 8 would fit."),
        (("--batch", "64", "--context", "64k", "--model", "Qwen3-8B"), "138.1 of 150 GB can be used; batch 12 or TP 8 on 8 such GPUs would fit."),
        (("--context", "4m", "--model", "Qwen3-8B"), "a context of 825,401 or TP 8 on 8 such GPUs would fit."),
    ],
)  # fmt: skip
def test_a_verdict_says_first_that_it_does_not_fit_and_what_would(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A smaller batch never makes room for weights that alone are too large. Qwen3-8B keeps 36 x 2 x 8 x 128 x 2 = 147,456
    bytes a token: (138.1 - 16.4) GB hold 825 thousand. The numbers are there all the same."""
    base = ("--model", "DeepSeek-R1", "--hardware", "1x-h200", "--method", "none")
    p = document(capsys, *base, *arguments)
    assert p["memory"]["fits"] is False
    assert p["verdict"].startswith("Does not fit: it needs ")
    assert said in p["verdict"]
    assert f"With enough memory: no speculation: {p['decode_ms']['value']:,.0f}"[:-1] in p["verdict"]
    code, out, _ = run(capsys, "predict", *base, *arguments)
    assert code == 0
    assert out.splitlines()[2] == p["verdict"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "none", "--draft-tokens", "4"), "have no meaning"),
        (("--method", "ngram", "--draft", "kimi-k2.5-eagle3", "--draft-tokens", "3"), "--draft is left out"),
        (("--model", "Qwen3-8B", "--context", "500000"), "beyond the"),
        (("--model", "Llama-3.1-8B", "--routing", "zipf:1"), "no experts"),
        (("--batch", "64", "--draft-tokens", "3"), "would queue"),
    ],
)
def test_what_is_left_out_is_said(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert any(said in w for w in document(capsys, *arguments, "--hardware", "8x-h100")["warnings"])


def test_a_method_finds_the_draft_that_serves_it(capsys: pytest.CaptureFixture[str]) -> None:
    p = document(capsys, "--model", "Qwen3-8B", "--hardware", "1x-h200", "--method", "dflash")
    assert (p["scenario"]["draft"], p["scenario"]["draft_tokens"]) == ("qwen3-8b-dflash", 16)
    p = document(capsys, "--model", "Qwen3-8B", "--hardware", "1x-h200", "--method", "eagle3", "--draft-tokens", "4")
    assert p["scenario"]["draft"] == "qwen3-8b-eagle3"


@pytest.mark.parametrize(
    ("eager", "noted"),
    [(["decode"], True), (["verify"], True), (["decode", "verify"], False), (["draft"], False), ([], False)],
)
def test_a_baseline_launched_unlike_the_verify_is_told(
    capsys: pytest.CaptureFixture[str], eager: list[str], noted: bool
) -> None:
    """Launches one by one make a decode step of 8B cost three cycles in graphs: the break-even is below the one token that each
    cycle gains, and no drafter's merit."""
    given = [word for phase in eager for word in ("--eager", phase)]
    model = ("--model", "Llama-3.1-8B", "--draft", "llama3-8b-eagle3", "--hardware", "1x-h200")
    p = document(capsys, *model, *given)
    told = [w for w in p["warnings"] if "the break-even compares two servers" in w]
    assert len(told) == noted
    below = eager == ["decode"]
    assert (p["breakeven"]["accept_length"]["value"] < 1) == below
    _, out, _ = run(capsys, "predict", *model, *given)
    assert ("Speculation pays with any drafter: a cycle takes 0.3" in out) == below


def test_eager_lists_phases_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, "--method", "none")["scenario"]["eager"] == []
    assert document(capsys, "--draft-tokens", "3", "--eager", "verify")["scenario"]["eager"] == ["verify"]


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "predict", "--model", "Kimi-K9", "--debug")
    assert "Traceback" in err


def test_public_functions_survive_imports_of_submodules() -> None:
    code = "import specsim, specsim.prediction, specsim.scenarios; s = specsim.scenario(draft_tokens=3); print(specsim.predict(s).reachable)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_a_prediction_is_deterministic() -> None:
    s = build(draft_tokens=3, accept_rate=0.6)
    assert predict(s).json() == predict(s).json()


def test_arrays_are_refused_by_predict() -> None:
    with pytest.raises(specsim.InputError):
        predict(build(batch=np.asarray([1, 2])))


def test_a_machine_made_once_serves_every_scenario_of_its_box() -> None:
    """The same document as alone, also after another model that this box lacks a class for: what stands in is noted for
    the scenario that needs it and no other."""
    box = load_profile("8x-a100")
    one = build(model="MiniMax-M2.5", hardware=box, draft_tokens=3)
    other = build(model="Llama-3.1-8B", hardware=box, draft_tokens=3)
    alone = [predict(s).json() for s in (one, other)]
    machine = machine_of(one, samples=SAMPLES)
    assert [predict(s, machine=machine).json() for s in (one, other)] == alone
    assert any("stands in" in w for w in alone[0]["warnings"])
    assert not any("stands in" in w for w in alone[1]["warnings"])


def test_an_interval_of_even_routing_that_reaches_down_alone_says_why() -> None:
    """At 8 rows of 128 experts the rest of a measured H200 is known to a per cent or two, and no routing touches more experts
    than an even one. A dense model has none, and a routing that is given is no assumption."""

    def told(**options: Any) -> bool:
        made = predict(build(hardware="1x-h200", batch=8, method="none", **options))
        return any("chosen evenly" in warning for warning in made.warnings)

    assert told(model="Qwen3-30B-A3B")
    assert not told(model="Qwen3-30B-A3B", routing="uniform")
    assert not told(model="Llama-3.1-8B")


def test_a_batch_beyond_the_running_limit_names_the_engines_own_flag() -> None:
    for engine, flag in (("sglang", "--max-running-requests"), ("vllm", "--max-num-seqs")):
        made = build(model="Qwen3-8B", hardware="1x-h200", engine=engine, batch=32, max_running_requests=16)
        queued = f"{engine} runs at most 16 requests at once here: batch 32 would queue; more need {flag} 32 in the launch line, which --{engine}-args reads"
        assert queued in made.warnings
        line = f"--model-path Qwen/Qwen3-8B {flag} 32" if engine == "sglang" else f"vllm serve Qwen/Qwen3-8B {flag} 32"
        told = specsim.predict(hardware="1x-h200", batch=32, **{f"{engine}_args": line}).scenario
        assert not any("would queue" in warning for warning in told.warnings), "the mend mends it"


def test_a_drafter_that_cannot_serve_the_target_is_told_by_its_own_name() -> None:
    """One whose way of drafting has no equation, and one of another vocabulary: ids of tokens are what the two exchange."""
    drafter = load_model("qwen3-8b-eagle3")
    assert drafter.draft is not None
    other = replace(drafter, draft=replace(drafter.draft, kind="domino"))
    with pytest.raises(
        specsim.InputError, match="qwen3-8b-eagle3 drafts by domino, which has no cost model; give another"
    ):
        build(model="Qwen3-8B", draft=other, hardware="1x-h200")
    made = build(model="Qwen3-8B", draft=replace(drafter, vocab=32000), hardware="1x-h200")
    assert "qwen3-8b-eagle3 has 32000 tokens, Qwen3-8B 151936: they must share a tokenizer" in made.warnings
    assert not any("tokenizer" in w for w in build(model="Qwen3-8B", draft=drafter, hardware="1x-h200").warnings)


def test_a_draft_model_of_another_vocabulary_is_refused_as_both_engines_do() -> None:
    """Llama-3.2-1B has 128,256 tokens, Qwen3-8B 151,936; vLLM can be told to draft what both have. Models of a family pass."""
    pair = {"model": "Qwen3-8B", "draft": "Llama-3.2-1B", "hardware": "1x-h200"}
    said = "^--draft: Llama-3.2-1B has 128256 tokens, Qwen3-8B 151936: they must share a tokenizer; give a draft model of the target's family"
    with pytest.raises(specsim.InputError, match=f"{said}$"):
        build(**pair)
    with pytest.raises(
        specsim.InputError, match=f'{said}, or "use_heterogeneous_vocab": true in --speculative-config$'
    ):
        build(**pair, engine="vllm")
    config = json.dumps({"model": "Llama-3.2-1B", "num_speculative_tokens": 3, "use_heterogeneous_vocab": True})
    line = f"vllm serve Qwen/Qwen3-8B --speculative-config '{config}'"
    told = specsim.predict(hardware="1x-h200", vllm_args=line).scenario
    assert (told.method, [w for w in told.warnings if "vLLM drafts what both have alone" in w] != []) == (
        "draft-model",
        True,
    )
    assert not any("tokenizer" in w for w in build(model="Qwen3-8B", draft="Qwen3-0.6B", hardware="1x-h200").warnings)


def test_groups_of_data_parallel_attention_have_graphs_of_their_own() -> None:
    """SGLang captures up to 512 sequences a rank on this box, so eight groups replay graphs for up to 4,096: the step of 520 takes
    little more than that of 512, and only the one of 4,104 is launched kernel by kernel. Padding is a group's too: 520 are 65 each, in
    a graph of 72."""
    s = specsim.scenario(model="DeepSeek-V3", hardware="8x-b200", method="none", tp=8, dp_attention=8, context=500)
    assert max(s.captured("decode")) == 8 * 512
    predicted = {n: specsim.predict(replace(s, batch=np.asarray(float(n)))) for n in (512, 520, 576, 4096, 4104)}
    step = {n: p.decode_ms.value for n, p in predicted.items()}
    assert step[512] < step[520] == pytest.approx(step[576], rel=0.02)
    assert step[520] < 1.1 * step[512]
    waits = {
        n: sum(row["ms"] for row in p.json()["breakdown"] if row["component"] == "launch") for n, p in predicted.items()
    }
    assert max(waits[n] for n in (512, 520, 576, 4096)) < 0.05 < 1.0 < waits[4104]  # one replay; kernels one by one


def test_a_launch_lines_share_of_memory_decides_what_fits() -> None:
    """16.4 GB of weights and 40 caches of 2,048 tokens, 28.5 GB: not in a tenth of 150 GB, but in 0.8 of it."""
    for share, fits in (("0.1", False), ("0.8", True)):
        line = f"--model-path Qwen/Qwen3-8B --mem-fraction-static {share}"
        p = specsim.predict(hardware="1x-h200", batch=40, sglang_args=line)
        assert p.memory.fits is fits
        assert p.memory.usable == pytest.approx(float(share) * p.memory.capacity)


def test_a_batch_beyond_every_graph_is_told_and_no_other():
    """SGLang captures batches up to 256 on an H200, and 8 where the flag says so; one more is launched kernel by kernel."""

    def notes(batch: int, **options: Any) -> list[str]:
        s = build(model="Llama-3.1-8B", hardware="1x-h200", method="none", batch=batch, context=128, **options)
        return [w for w in predict(s).warnings if "no CUDA graph" in w]

    assert notes(256) == []
    (told,) = notes(257)
    assert told.startswith("decode has no CUDA graph of 257 sequences, the largest is of 256")
    assert len(notes(9, cuda_graph_max_bs=8)) == 1
    assert notes(8, cuda_graph_max_bs=8) == []
    assert notes(257, disable_cuda_graph=True) == []  # asked for


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"model": "Qwen3-235B-A22B-FP8", "tp": 8},
            "the experts' width of 1,536 into 192 a rank, within blocks of 128",
        ),
        ({"model": "Qwen3-235B-A22B-FP8", "tp": 8}, "tp 4 or ep 8 would do"),
        ({"model": "Qwen3-30B-A3B-FP8", "tp": 4}, "tp 2 or ep 4 would do"),
        ({"model": "MiniMax-M2.5", "tp": 8}, "tp 4 or ep 8 would do"),
        ({"model": "Qwen3-235B-A22B-FP8", "tp": 8, "ep": 8}, ""),
        ({"model": "Qwen3-235B-A22B-FP8", "tp": 4}, ""),
        ({"model": "Qwen3-235B-A22B", "tp": 8}, ""),
        ({"model": "DeepSeek-V3", "tp": 8}, ""),
    ],
)
def test_a_cut_within_blocks_of_fp8_weights_is_told(options: dict[str, Any], said: str) -> None:
    """1,536 over 8 ranks is 192, one block and a half, which SGLang and vLLM refuse ("The output_size of gate's and up's weight =
    192 is not divisible by weight quantization block_n = 128", vLLM issue 17569); 2,048 over 8 is two blocks."""
    found = [w for w in build(**options, hardware="8x-h200", method="none").warnings if "refuse to load" in w]
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_the_default_cut_is_one_that_all_heads_can_share(tmp_path: Path) -> None:
    """Phi-4 has 40 heads and 10 K/V heads: of 8 GPUs two can share them, so that is the default, and 8 are refused."""
    shape = {"model_type": "phi3", "hidden_size": 5120, "num_hidden_layers": 2, "num_attention_heads": 40,
             "num_key_value_heads": 10, "intermediate_size": 17920, "vocab_size": 100352}  # fmt: skip
    path = tmp_path / "phi.json"
    path.write_text(json.dumps(shape))
    assert build(model=str(path), hardware="8x-h100").parallel.tp == 2
    with pytest.raises(InputError, match=r"tp 8 does not divide 10 K/V heads of phi; one of 1, 2, 5 would"):
        build(model=str(path), hardware="8x-h100", tp=8)


@pytest.mark.parametrize(
    "mixer",
    [
        {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 256},
        {"model_type": "lfm2", "full_attn_idxs": [1], "conv_L_cache": 3},
    ],
)
def test_mixers_of_channels_are_cut_as_those_of_heads_are(tmp_path: Path, mixer: dict[str, Any]) -> None:
    """A Mamba or convolution layer works channel by channel: 8 ranks hold an eighth of it, weights and state."""
    shape = {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
             "intermediate_size": 14336, "vocab_size": 65536}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**shape, **mixer}))
    whole, cut = (predict(build(model=str(path), hardware="8x-h100", tp=tp)).json() for tp in (1, 8))
    assert cut["memory"]["weights_gb_per_gpu"] == pytest.approx(whole["memory"]["weights_gb_per_gpu"] / 8, rel=0.02)
    assert build(model=str(path), hardware="8x-h100").parallel.tp == 8


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft-model"])
def test_a_cache_of_8_bits_is_the_draft_s_too(method: str) -> None:
    """One flag sets the cache of both models, so that half the bits are half the bytes."""
    models = {
        "eagle3": {"model": "Llama-3.1-8B"},
        "mtp": {"model": "DeepSeek-V3"},
        "draft-model": {"model": "Llama-3.1-8B", "draft": "Llama-3.2-1B"},
    }
    wide, narrow = (
        predict(build(**models[method], hardware="8x-h200", method=method, batch=16, **more)).json()["memory"]
        for more in ({}, {"kv_cache_dtype": "fp8_e4m3"})
    )
    assert narrow["kv_gb_per_gpu"] == pytest.approx(wide["kv_gb_per_gpu"] / 2, rel=1e-4)
