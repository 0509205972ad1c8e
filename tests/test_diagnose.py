"""diagnose: the field case, its JSON, logs alone, bad input, and a small study of boxes with known faults."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import scenario as small_scenario
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim import diagnosed
from specsim.cli import main
from specsim.diagnosis import diagnose
from specsim.experiments import appraise, candidates
from specsim.hypotheses import BY_ID, CHANCES, FAULTS
from specsim.posterior import posterior
from specsim.probes import Boxes, Observation, Probe
from specsim.scenarios import build

ROOT = Path(__file__).resolve().parent.parent
FIELD = ("--decode-ms", "12.1", "--verify-ms", "29.5", "--draft-tokens", "3")
IDS = {
    "verify-eager", "allreduce-steep", "experts-slow", "verify-attention", "host-gap", "sampling", "batch-padding",
    "admission-cap", "draft-eager", "clocks", "acceptance-definition", "weak-drafter",
}  # fmt: skip
LOG = """\
[2026-03-01 08:00:00] server_args=ServerArgs(model_path='{model}', tp_size=8, speculative_algorithm='EAGLE3', speculative_num_steps=2, speculative_eagle_topk=1, speculative_num_draft_tokens=3)
[2026-03-01 08:00:05 TP0] Prefill batch, #new-seq: 1, #new-token: 700, #cached-token: 0, token usage: 0.01, #running-req: 0, #queue-req: 0,
"""
LINE = "[2026-03-01 08:00:{:02d} TP0] Decode batch, #running-req: {batch}, #token: {tokens}, token usage: 0.01, accept len: {length:.2f}, accept rate: {rate:.2f}, cuda graph: {graph}, gen throughput (token/s): {speed:.2f}, #queue-req: {queue},\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["diagnose", *arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    parsed: dict[str, Any] = json.loads(out)
    return parsed


@pytest.fixture(scope="module")
def field() -> dict[str, Any]:
    """The document of the field case, for tests that only read it."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        main(["diagnose", *FIELD, "--json"])
    parsed: dict[str, Any] = json.loads(out.getvalue())
    return parsed


def weights(d: dict[str, Any]) -> dict[str, float]:
    return {h["id"]: h["weight"] for h in d["hypotheses"]}


def log(
    graph: bool = False, batch: int = 1, queue: int = 0, model: str = "moonshotai/Kimi-K2.5", lines: int = 6
) -> str:
    """A server log whose cycles take batch x 1.80 / 60 s: 30 ms at batch 1."""
    body = [
        LINE.format(
            6 + i, batch=batch, tokens=700 + 72 * i, length=1.80, rate=0.40, graph=graph, speed=60 * batch, queue=queue
        )
        for i in range(lines)
    ]
    return LOG.format(model=model) + "".join(body)


# --- the field case ---------------------------------------------------------------------------------------------


def test_two_step_times_cannot_tell(field: dict[str, Any]) -> None:
    d, w = field, weights(field)
    assert set(w) == IDS
    assert sum(w.values()) == pytest.approx(1)
    assert not d["separable"]
    assert {h["id"] for h in d["hypotheses"][:2]} == {"verify-eager", "allreduce-steep"}
    assert w["verify-eager"] + w["allreduce-steep"] > 0.6
    assert max(w.values()) < 0.8
    assert w["experts-slow"] < 0.1
    assert d["experiments"][0]["id"] in ("graph-flag", "decode-batch-3-4")
    assert {"graph-flag", "decode-batch-3-4"} == {e["id"] for e in d["experiments"][:2]}
    assert {"attention-mode", "engine-regression"} <= {u["id"] for u in d["uninformative"]}
    assert "graph" in next(u["why"] for u in d["uninformative"] if u["id"] == "attention-mode")


@pytest.mark.parametrize("seed", [1, 2])
def test_weights_repeat_from_seed_to_seed(capsys: pytest.CaptureFixture[str], field: dict[str, Any], seed: int) -> None:
    a, b = weights(field), weights(document(capsys, *FIELD, "--seed", str(seed)))
    assert max(abs(a[k] - b[k]) for k in a) < 0.03


@pytest.mark.parametrize(
    ("observed", "gone"),
    [
        (("--decode-at", "3=15.5"), "allreduce-steep"),
        (("--decode-at", "3=28.5"), "verify-eager"),
        (("--decode-at", "4=16.5"), "allreduce-steep"),
        (("--result", "graph-flag=true"), "verify-eager"),
        (("--result", "graph-flag=false"), "allreduce-steep"),
        (("--result", "nccl-tests=29,31"), "allreduce-steep"),
        (("--result", "nccl-tests=29,150"), "verify-eager"),
        (("--result", "kernel-profile=18.5,4,1.7,3.8,1.1,0"), "verify-eager"),
        (("--result", "kernel-profile=6.5,4,1.7,4.6,1.3,11"), "allreduce-steep"),
        (("--result", "nccl-protocol=16"), "verify-eager"),
    ],
)  # fmt: skip
def test_one_test_settles_it(capsys: pytest.CaptureFixture[str], observed: tuple[str, str], gone: str) -> None:
    w = weights(document(capsys, *FIELD, *observed))
    assert w[gone] < 0.05
    kept = {"verify-eager", "allreduce-steep"} - {gone}
    assert max(w, key=lambda k: w[k]) in kept


def test_predictions_follow_what_each_explanation_means(field: dict[str, Any]) -> None:
    """Plain decode at batch 3: as slow as verify when the all-reduce is; as on a healthy box when the launches are."""
    test = next(e for e in field["experiments"] if e["id"] == "decode-batch-3-4")
    assert test["minutes"] == 3
    assert "--batch-size 3 4" in test["command"]
    eager, steep = test["predictions"]["verify-eager"], test["predictions"]["allreduce-steep"]
    assert 14 < eager["value"] < 18
    assert 26 < steep["value"] < 34
    assert eager["high"] < steep["low"]
    for h in field["hypotheses"][:2]:
        assert h["predicts"]["decode_ms"]["value"] == pytest.approx(12.1, rel=0.05)
        assert h["predicts"]["verify_ms"]["value"] == pytest.approx(29.5, rel=0.05)


def test_remedies_are_worth_what_the_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy verify takes 15 ms: a graph would give a bit less than 30 / 16. Break-even: 30.4 / 12.1 = 2.51 of 3."""
    d = document(capsys, *FIELD, "--cycle-ms", "30.4", "--accept-length", "1.8")
    by_id = {r["id"]: r for r in d["remedies"]}
    assert by_id["graph-for-verify"]["gain_if_right"]["value"] == pytest.approx(30.4 / 16.5, rel=0.15)
    assert by_id["graph-for-verify"]["helps"] == ["verify-eager"]
    assert by_id["better-drafter"]["accept_length_needed"]["value"] == pytest.approx(30.4 / 12.1, rel=0.02)
    assert by_id["better-drafter"]["reachable"] is True
    assert by_id["speculation-off"]["gain"]["value"] == pytest.approx(30.4 / 12.1 / 1.8, rel=0.02)
    assert by_id["better-allreduce"]["gain_if_right"]["value"] > 1.5
    assert by_id["fewer-draft-tokens"]["cycle_ms"] is not None
    for r in d["remedies"]:
        for q in (r["gain"], r["gain_if_right"], r["cycle_ms"]):
            assert q is None or q["low"] <= q["value"] <= q["high"]


def test_one_page_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """The field case: 61 layers with two all-reduces each, one of the embedding and the gathered logits, 2 x 61 + 2 = 124."""
    code, out, _ = run(capsys, *FIELD)
    assert code == 0
    undecided = next(line for line in out.splitlines() if line.startswith("Two step times cannot tell"))
    assert "verify-eager" in undecided
    assert "allreduce-steep" in undecided
    assert "for each of 124 all-reduces, the embedding's and the logits' included, or" in out
    assert "Next, 1 minute" in out
    assert "Cannot help: attention-mode" in out
    assert out.index("Next") < out.index("explanations") < out.index("tests that help") < out.index("remedies")


def test_a_healthy_verify_is_not_called_slow(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--decode-ms", "12.1", "--verify-ms", "15", "--draft-tokens", "3")
    assert code == 0
    assert "verify is not slow" in out


def test_the_fitted_profile_is_said_to_be_one_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    d = document(capsys, *FIELD, "--hardware", "8x-pcie-field")
    assert any("already contains one explanation" in w for w in d["warnings"])


def test_a_plot_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "why.png"
    code, _, err = run(capsys, *FIELD, "--plot", str(target), "--json")
    assert code == 0
    assert str(target) in err
    assert target.read_bytes()[1:4] == b"PNG"
    code, _, err = run(capsys, *FIELD, "--plot", str(target / "why.png"))
    assert code == 2
    assert err.count("\n") == 1


# --- logs alone ---------------------------------------------------------------------------------------------------


def test_a_log_alone_tells_the_graph_flag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No hardware is known, so times are not judged; what the log shows is said all the same."""
    file = tmp_path / "server.log"
    file.write_text(log(graph=False))
    code, out, _ = run(capsys, str(file))
    assert code == 0
    assert "1.80 tokens a cycle of at most 3" in out
    assert "A cycle at batch 1 takes 30.0 ms" in out
    assert "more than 16.7 ms" in out  # 30 / 1.8
    assert "WITHOUT a CUDA graph" in out
    assert "A healthy cycle of this model takes" in out
    assert re.search(r"Most likely \(\d\d%\): verify is launched kernel by kernel", out)
    assert "--hardware" in out


def test_a_log_and_a_box_judge_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Cycle 30 ms in a graph, decode 12.1 ms: the flag rules out eager launches, and the all-reduce is left."""
    file = tmp_path / "server.log"
    file.write_text(log(graph=True))
    w = weights(document(capsys, str(file), "--hardware", "8x-rtx-pro-6000", "--decode-ms", "12.1"))
    assert w["verify-eager"] < 0.05
    assert max(w, key=lambda k: w[k]) == "allreduce-steep"


def test_options_beside_a_log_win_over_its_settings_and_say_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "server.log"
    file.write_text(log())
    d = document(capsys, str(file), "--hardware", "8x-rtx-pro-6000", "--tp", "4", "--draft-tokens", "5")
    assert (d["scenario"]["tp"], d["scenario"]["draft_tokens"]) == (4, 5)
    said = " ".join(d["warnings"])
    assert "--tp wins over the launch line's 8" in said
    assert "--draft-tokens wins over the launch line's 3, root included" in said
    same = document(capsys, str(file), "--hardware", "8x-rtx-pro-6000", "--tp", "8", "--draft-tokens", "3")
    assert "wins" not in " ".join(same["warnings"])


def test_a_queue_means_admission(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text(log(graph=True, batch=32, queue=60, lines=30))
    d = document(capsys, str(file))
    assert d["hypotheses"][0]["id"] == "admission-cap"
    assert any("limited by admission" in f for f in d["facts"])


def test_both_arms_need_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Plain decoding at 80 tokens a second beside 60: 0.75 times, and 1.8 / 0.75 = 2.4 tokens a cycle break even."""
    plain, speculating = tmp_path / "plain.log", tmp_path / "spec.log"
    speculating.write_text(log(graph=True))
    other = re.sub(r"accept len.*?rate: [\d.]+, |, speculative_\w+=[^,)]+", "", log(graph=True))
    plain.write_text(other.replace("60.00", "80.00"))
    facts = " ".join(document(capsys, str(plain), str(speculating))["facts"])
    assert "12.5 ms at batch 1" in facts
    assert "0.75 times the tokens of plain decoding; 2.40 tokens a cycle would break even" in facts


def test_a_cliff_in_rows_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    points = [
        {"batch": b, "decode_ms": {"value": ms}, "tokens_per_cycle": 1.0}
        for b, ms in ((8, 30.0), (16, 40.0), (32, 104.0))
    ]
    file.write_text(
        json.dumps(
            {"schema": "specsim.record/1", "kind": "observation", "name": "n", "date": "2026-03-01", "points": points}
        )
    )
    facts = document(capsys, str(file))["facts"]
    assert any("Between batch 16 and 32 a plain step takes 2.6 times" in fact for fact in facts)


def test_an_unknown_model_is_no_obstacle(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text(log(model="someone/secret-model"))
    for more in ((), ("--hardware", "8x-h100")):
        d = document(capsys, str(file), *more)
        assert d["scenario"] is None
        assert d["hypotheses"][0]["id"] == "verify-eager"
        assert d["hypotheses"][0]["predicts"] == {"decode_ms": None, "verify_ms": None}


def test_a_log_that_never_accepts_is_called_broken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text(log().replace("accept len: 1.80", "accept len: 1.00").replace("rate: 0.40", "rate: 0.00"))
    d = document(capsys, str(file))
    assert any("broken" in f for f in d["facts"])


def test_nccl_tests_output_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """150 us at 43,008 bytes is what a steep all-reduce would show."""
    record = {
        "schema": "specsim.record/1", "kind": "observation", "name": "nccl", "date": "2026-03-01",
        "samples": [{"operator": "allreduce", "bytes": n, "us": t, "in_graph": True} for n, t in ((14336, 29.0), (43008, 150.0))],
    }  # fmt: skip
    file = tmp_path / "nccl.json"
    file.write_text(json.dumps(record))
    w = weights(
        document(
            capsys,
            str(file),
            *FIELD,
            "--hardware",
            "8x-rtx-pro-6000",
            "--model",
            "Kimi-K2.5",
            "--tp",
            "8",
            "--method",
            "eagle3",
        )
    )
    assert w["allreduce-steep"] > 0.9


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing was observed"),
        (("--decode-ms", "-3"), "--decode-ms"),
        (("--decode-ms", "nan"), "--decode-ms"),
        (("--verify-ms", "0"), "--verify-ms"),
        (("--decode-ms", "fast"), "fast"),
        (("--decode-ms", "12", "--decode-at", "3"), "BATCH=MS"),
        (("--decode-ms", "12", "--decode-at", "3:15.5"), "'3:15.5' is not BATCH=MS; for example 3=15.5"),
        (("--decode-ms", "12", "--decode-at", "3=0"), "3=0"),
        (("--decode-ms", "12", "--decode-at", "0=3"), "0=3"),
        (("--decode-ms", "12", "--decode-tokens-per-s", "80"), "twice"),
        (("--verify-ms", "12", "--method", "none"), "does not speculate"),
        (("--tokens-per-s", "60"), "--accept-length"),
        (("--decode-ms", "12", "--result", "grph-flag=true"), "graph-flag"),
        (("--decode-ms", "12", "--result", "graph-flag=maybe"), "maybe"),
        (("--decode-ms", "12", "--result", "nccl-tests=30"), "2 values"),
        (("--decode-ms", "12", "--result", "nccl-tests=30,x"), "'x'"),
        (("--decode-ms", "12", "--noise", "0"), "--noise"),
        (("--decode-ms", "12", "--hardware", "8x-nothing"), "8x-nothing"),
        (("no-such.log",), "no-such.log"),
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_the_wrong_box_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    d = document(capsys, "--decode-ms", "90", "--verify-ms", "1", "--draft-tokens", "3")
    assert any("nothing explains" in w for w in d["warnings"])


# --- the faults and the arithmetic -----------------------------------------------------------------------------------


def test_every_fault_only_slows() -> None:
    """No fault makes a decode, a verify or a cycle faster than on the same box without it."""
    boxes = Boxes(build(hardware="8x-rtx-pro-6000", batch=64, draft_tokens=4), 200)
    for kind, tokens in (("decode", 1), ("verify", 4)):
        probe = Probe(kind, batch=64, tokens=tokens)
        healthy = boxes.predict(probe, BY_ID["weak-drafter"])
        for fault in FAULTS:
            if fault.id not in ("admission-cap", "verify-eager"):  # fewer requests; an eager pass has no graph's launch
                assert np.all(boxes.predict(probe, fault) >= healthy * (1 - 1e-9)), (fault.id, kind)


def test_a_fault_leaves_alone_what_it_does_not_touch() -> None:
    boxes = Boxes(build(hardware="8x-rtx-pro-6000", draft_tokens=3), 100)
    decode, verify = Probe("decode"), Probe("verify", tokens=3)
    healthy = BY_ID["weak-drafter"]
    for name in ("verify-eager", "verify-attention", "host-gap", "batch-padding", "draft-eager", "admission-cap"):
        assert np.array_equal(boxes.predict(decode, BY_ID[name]), boxes.predict(decode, healthy)), name
    for name in ("draft-eager", "acceptance-definition"):
        assert np.array_equal(boxes.predict(verify, BY_ID[name]), boxes.predict(verify, healthy)), name


def test_one_gpu_has_no_allreduce_and_a_dense_model_no_experts() -> None:
    d = diagnose(small_scenario(), [Observation(Probe("decode"), 1.0), Observation(Probe("verify", tokens=3), 2.0)])
    w = {h.fault.id: h.weight for h in d.hypotheses}
    assert w["allreduce-steep"] == 0
    assert w["experts-slow"] == 0
    assert not any(r.id == "better-allreduce" for r in d.remedies)
    assert not any(a.experiment.id.startswith("nccl") for a in d.experiments)


def test_a_flag_alone_weighs_by_bayes() -> None:
    """P(eager | no graph) = p x 0.98 / (p x 0.98 + (total - p) x 0.02), p the prior of an eager verify."""
    d = diagnose(None, [Observation(Probe("yes", name="verify-graph"), 0.0)])
    total = sum(f.prior for f in FAULTS)
    p = BY_ID["verify-eager"].prior
    right = p * (1 - BY_ID["verify-eager"].chances["verify-graph"])
    wrong = (total - p) * (1 - CHANCES["verify-graph"])
    assert d.hypotheses[0].fault.id == "verify-eager"
    assert d.hypotheses[0].weight == pytest.approx(right / (right + wrong))


def test_information_is_between_nothing_and_the_entropy() -> None:
    s = build(hardware="8x-rtx-pro-6000", draft_tokens=3)
    found = posterior(s, [Observation(Probe("decode"), 12.1), Observation(Probe("verify", tokens=3), 29.5)])
    w = np.array([x for x in found.weights.values() if x > 0])
    entropy = float(-np.sum(w * np.log2(w)))
    for a in appraise(found, candidates(s)):
        assert 0 <= a.bits <= entropy + 0.05, a.experiment.id


@settings(max_examples=6, deadline=None)
@given(
    decode=st.floats(1.0, 200.0),
    ratio=st.floats(0.5, 20.0),
    d=st.integers(2, 8),
    batch=st.sampled_from([1, 7, 64, 300]),
    engine=st.sampled_from(["sglang", "vllm"]),
)
def test_any_pair_of_times_gives_a_sound_document(decode: float, ratio: float, d: int, batch: int, engine: str) -> None:
    s = build(model="Qwen3-30B-A3B", hardware="8x-h100", tp=2, engine=engine, batch=batch, draft_tokens=d)
    seen = [
        Observation(Probe("decode", batch=batch), decode),
        Observation(Probe("verify", batch=batch, tokens=d), decode * ratio),
    ]
    found = diagnose(s, seen).json()
    json.dumps(found, allow_nan=False)
    assert sum(h["weight"] for h in found["hypotheses"]) == pytest.approx(1, abs=1e-4)
    assert all(e["bits"] >= 0 and e["minutes"] > 0 for e in found["experiments"])


# --- answers that sceptics tried to break ------------------------------------------------------------------------------

LLAMA = ("--model", "Llama-3.1-8B", "--hardware", "1x-h200", "--draft-tokens", "4")


def remedy(d: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in d["remedies"] if r["id"] == name)


def test_a_measured_verify_is_part_of_the_cycle_whatever_explains_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A verify of ten decode steps cannot break even below ten tokens a cycle, however far from every explanation."""
    d = document(capsys, *LLAMA, "--decode-ms", "7", "--verify-ms", "700")
    assert remedy(d, "better-drafter")["accept_length_needed"]["low"] > 85
    assert remedy(d, "better-drafter")["reachable"] is False


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"decode_ms": 7, "verify_ms": 3}, "cannot be"),
        ({"decode_ms": 7, "verify_ms": 9, "cycle_ms": 8}, "the verify inside it takes 9 ms"),
        ({"decode_ms": 0.005, "verify_ms": 0.006}, "in seconds?"),
        ({"decode_ms": 7, "verify_ms": 7000}, "nothing explains"),
        ({"decode_ms": 7, "verify_ms": 9000}, "Was it given in us?"),
    ],
)
def test_numbers_that_cannot_be_give_no_verdict(times: dict[str, float], said: str) -> None:
    found = diagnosed.diagnose(model="Llama-3.1-8B", hardware="1x-h200", draft_tokens=4, **times)
    assert any(said in w for w in found.json()["warnings"])
    assert found.json()["separable"] is False
    out = str(found)
    assert "No single explanation fits" in out
    assert "Most likely" not in out
    assert "are to be had" not in out.split("explanations")[0]
    assert "Speculation pays" not in out
    assert not re.search(r"breaks even at 0\.\d", out)  # a cycle gives a token at least


def test_a_capped_server_is_compared_by_tokens_not_by_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """3,600 tokens a second without speculation and 1,300 with: off is 2.8 times as much, although few run at once."""
    d = document(
        capsys, "--model", "DeepSeek-R1", "--hardware", "8x-h200", "--method", "mtp", "--draft-tokens", "3", "--batch",
        "128", "--decode-tokens-per-s", "3600", "--tokens-per-s", "1300", "--accept-length", "2.1",
    )  # fmt: skip
    assert d["hypotheses"][0]["id"] == "admission-cap"
    assert remedy(d, "speculation-off")["gain"]["value"] == pytest.approx(3600 / 1300, rel=0.03)
    needed = remedy(d, "better-drafter")["accept_length_needed"]["value"]
    assert needed == pytest.approx(2.1 * 3600 / 1300, rel=0.05)


def test_speculation_that_pays_is_said_to_pay(capsys: pytest.CaptureFixture[str]) -> None:
    seen = ("--decode-ms", "5", "--verify-ms", "5.2", "--cycle-ms", "6.2")
    _, out, _ = run(capsys, *LLAMA, *seen, "--accept-length", "3.1")
    assert "Speculation pays: 2.5" in out
    assert "too weak" not in out
    _, out, _ = run(capsys, *LLAMA, *seen, "--accept-length", "1.05")
    assert "too weak" in out
    assert "Speculation pays" not in out


def test_no_remedy_that_gains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    d = document(capsys, *LLAMA, "--decode-ms", "5", "--verify-ms", "5.2")
    for r in d["remedies"]:
        assert not r["helps"] or r["gain_if_right"]["value"] >= 1.02, r["id"]
    assert not any(r["id"] == "admit-more" for r in d["remedies"])  # one request is never kept waiting


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("vllm", "org/Qwen3-8B --enforce-eager --speculative-config '{\"method\": \"eagle3\", \"model\": \"qwen3-8b-eagle3\", \"num_speculative_tokens\": 3}'"),
        ("sglang", "--model-path org/Qwen3-8B --disable-cuda-graph --speculative-algorithm EAGLE3 --speculative-num-draft-tokens 4"
         " --speculative-num-steps 3 --speculative-eagle-topk 1"),
    ],
)  # fmt: skip
def test_settings_without_graphs_are_the_finding(capsys: pytest.CaptureFixture[str], engine: str, line: str) -> None:
    """Every step takes 12 ms on the host, 5 in a graph: the settings say why, and the graph is worth about two."""
    seen = (
        f"--{engine}-args", line, "--model", "Qwen3-8B", "--hardware", "1x-h200", "--decode-ms", "12", "--verify-ms",
        "12.5", "--accept-length", "2.2",
    )  # fmt: skip
    d = document(capsys, *seen)
    assert d["hypotheses"][0]["id"] == "verify-eager"
    assert d["hypotheses"][0]["weight"] > 0.9
    assert remedy(d, "graph-for-verify")["gain_if_right"]["value"] > 1.8
    assert d["expected_verify_ms"]["value"] < 8
    assert not any(e["id"] == "graphs-off" for e in d["experiments"])
    _, out, _ = run(capsys, *seen)
    assert "plain decoding runs without graphs as well" in out
    assert "not of this box" not in out


def test_throughput_and_cycle_overrule_the_acceptance_that_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    """180 tokens a second at a cycle of 8 ms are 1.44 tokens a cycle, not 2.9: plain decoding at 200 is faster."""
    arguments = (
        "--model", "Qwen3-30B-A3B", "--hardware", "8x-h100", "--tp", "1", "--draft-tokens", "4", "--decode-ms", "5",
        "--cycle-ms", "8", "--tokens-per-s", "180", "--accept-length", "2.9",
    )  # fmt: skip
    d = document(capsys, *arguments)
    assert d["hypotheses"][0]["id"] == "acceptance-definition"
    assert remedy(d, "speculation-off")["gain"]["value"] == pytest.approx(200 / 180, rel=0.03)
    _, out, _ = run(capsys, *arguments)
    assert "make it 1.44" in out
    assert "Speculation pays" not in out


def test_a_break_even_says_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LLAMA, "--verify-ms", "9")
    assert "With this verify, and a plain decode step as predicted, " in out
    _, out, _ = run(capsys, *LLAMA, "--decode-ms", "5")
    assert "With the predicted cycle" in out
    _, out, _ = run(capsys, *LLAMA, "--decode-ms", "5", "--cycle-ms", "9")
    assert "With this cycle speculation" in out


def test_a_server_that_does_not_speculate_has_tests_too(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--model",
        "gpt-oss-120b",
        "--hardware",
        "8x-h100",
        "--tp",
        "2",
        "--decode-ms",
        "15",
        "--method",
        "none",
    )
    d = document(capsys, *arguments)
    assert d["remedies"] == []
    assert {p["what"].split()[0] for e in d["experiments"] for p in e["measures"]} <= {
        "decode",
        "all-reduce",
        "SM",
        "queue",
    }
    _, out, _ = run(capsys, *arguments)
    assert "drafter" not in out.split("explanations")[0]


def test_slow_decoding_raises_the_question_of_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    """A decode step of 21 ms where a graph takes 6, and a verify of 22: without the launch line nobody knows why."""
    arguments = ("--model", "Qwen3-30B-A3B", "--hardware", "8x-h100", "--tp", "2", "--draft-tokens", "4", "--decode-ms", "21",
                 "--verify-ms", "22")  # fmt: skip
    for engine, flag in (("sglang", "--disable-cuda-graph"), ("vllm", "--enforce-eager")):
        _, out, _ = run(capsys, *arguments, "--engine", engine)
        assert f"without CUDA graphs is as slow: if that server runs with {flag}" in out
        assert "\nMost likely" not in out
    assert document(capsys, *arguments)["separable"] is False
    _, out, _ = run(capsys, *arguments, "--eager", "decode", "--eager", "verify")
    assert "without CUDA graphs is as slow" not in out
    assert "launched kernel by kernel" in out.split("Cannot help")[0]
    _, out, _ = run(capsys, *FIELD)
    assert "without CUDA graphs is as slow" not in out


def test_two_faults_are_not_taken_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    """No graph by the log, but plain decoding of three rows is slow as well: a graph alone will not bring 15 ms."""
    arguments = ("--decode-ms", "12.1", "--verify-ms", "48", "--draft-tokens", "3", "--decode-at", "3=28.5", "--result",
                 "graph-flag=false")  # fmt: skip
    _, out, _ = run(capsys, *arguments)
    assert "two faults together" in out
    assert "No single explanation fits" in out
    assert "are to be had" not in out.split("explanations")[0]
    assert document(capsys, *arguments)["separable"] is False


def test_another_engine_gets_no_commands_of_ours(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "llama.log"
    file.write_text(
        "draft acceptance rate = 0.80000 (  800 accepted / 1000 generated)\n"
        "       eval time =   10000.00 ms /  1200 tokens (    8.33 ms per token,   120.00 tokens per second)\n"
    )
    code, out, err = run(capsys, str(file))
    assert code == 0, err
    for word in ("cuda graph: [A-Za-z]", "--disable-cuda-graph", "--enforce-eager", "speculative-attention-mode"):
        assert word not in out


def test_a_plain_step_without_a_graph_is_no_verify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    eager = re.sub(r"accept len.*?rate: [\d.]+, ", "", log(graph=False, batch=40, lines=3).split("\n", 2)[2])
    file.write_text(log(graph=True, lines=9) + eager)
    facts = " ".join(document(capsys, str(file))["facts"])
    assert "Verify at batch 1 runs in a CUDA graph" in facts
    assert "Verify runs without" not in facts
    file.write_text(log(graph=True, lines=9) + log(graph=False, batch=40, lines=3).split("\n", 2)[2])
    facts = " ".join(document(capsys, str(file))["facts"])
    assert "Verify runs without a CUDA graph at batch 40." in facts


def test_nothing_accepted_is_called_broken_by_hand_too(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LLAMA, "--decode-ms", "5", "--cycle-ms", "7", "--accept-length", "1.0")
    assert "speculation is broken" in out


def test_outcomes_of_the_next_test_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """A test is only explained by a number on which the explanations differ."""
    _, out, _ = run(
        capsys, "--model", "Qwen3-8B", "--hardware", "1x-h200", "--engine", "vllm", "--draft-tokens", "4",
        "--decode-ms", "5.2", "--verify-ms", "19",
    )  # fmt: skip
    line = next(text for text in out.split("\n") if text.startswith(("Next", "To confirm")))
    assert line.count(" means ") != 1
    assert "  means" not in line
    assert "VLLM_ATTENTION_BACKEND" not in out.replace("(VLLM_ATTENTION_BACKEND before 0.13)", "")


def test_a_healthy_cycle_elsewhere_has_its_graphs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text(log())
    plain = next(f for f in document(capsys, str(file))["facts"] if "healthy cycle" in f)
    file.write_text(log().replace("tp_size=8,", "tp_size=8, disable_cuda_graph=True,"))
    assert next(f for f in document(capsys, str(file))["facts"] if "healthy cycle" in f) == plain


# --- the study, small; benchmarks/diagnose_study.py runs 300 boxes ---------------------------------------------------


def test_known_faults_are_found_and_weights_are_honest() -> None:
    spec = importlib.util.spec_from_file_location("diagnose_study", ROOT / "benchmarks" / "diagnose_study.py")
    assert spec is not None
    assert spec.loader is not None
    study = importlib.util.module_from_spec(spec)
    sys.modules["diagnose_study"] = study  # where its dataclasses look for their names
    spec.loader.exec_module(study)
    tally = study.study(boxes=36, samples=4096)
    assert tally.share(2) >= 0.72
    assert tally.share(0) < tally.share(2)
    mean, true, n = tally.calibration(0.5, 1.01)
    assert n > 30
    assert abs(mean - true) < 0.15


@pytest.mark.parametrize("record", ["llama8b-base-eager", "llama8b-base-eager-alone"])
def test_a_server_without_graphs_is_asked_about_them(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What recorded servers without CUDA graphs took a decode step is in the range of eager launches. (Recorded models with experts
    launched a third more kernels than theirs, for simulated routing.)"""
    points = json.loads((ROOT / "validation" / f"{record}.json").read_text())["points"]
    decode = next(p["decode_ms"]["value"] for p in points if p["batch"] == 1)
    times = ["--decode-ms", f"{decode:.1f}", "--verify-ms", f"{1.05 * decode:.1f}", "--draft-tokens", "4"]
    with contextlib.suppress(SystemExit):
        main(["diagnose", "--model", "Llama-3.1-8B", "--hardware", "1x-h200", *times])
    assert "give --eager decode" in " ".join(capsys.readouterr().out.split())


def test_a_record_brings_its_own_model_and_box() -> None:
    """Measured by validate with EAGLE-3 on an H200: its times are judged without an option, and an option goes before it."""
    record = ROOT / "validation" / "llama8b-e3-s3.json"
    found = diagnosed.diagnose(record)
    s = found.scenario
    assert s is not None
    assert (s.model.name, s.profile.name, s.method, int(s.draft_tokens)) == ("llama8b-e3-s3", "1x-h200", "eagle3", 4)
    assert {o.probe.kind for o in found.observations} >= {"verify", "cycle"}
    other = diagnosed.diagnose(record, hardware="8x-l40s", tp=1).scenario
    assert other is not None
    assert other.profile.name == "8x-l40s"
    said = str(found)
    assert "Verify of 4 rows takes 5.115 ms." in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--decode-at", "3=15.5", "--decode-at", "3=28"), "a decode at batch 3 is given as 15.5 and as 28 ms"),
        (("--decode-ms", "12", "--decode-at", "1=30"), "a decode at batch 1 is given as 12 and as 30 ms"),
        (("--verify-ms", "29.5", "--cycle-ms", "20"), "a verify of 29.5 ms is longer than the cycle of 20 ms"),
        (("--decode-at", "3=15.5", "--decode-at", "3=16"), ""),
        (("--decode-at", "3=15.5", "--decode-at", "4=28"), ""),
        (("--verify-ms", "29.5", "--cycle-ms", "30.4", "--decode-ms", "12.1"), ""),
        (("--verify-ms", "29.5", "--cycle-ms", "30.4", "--noise", "0.3"), ""),
    ],
)
def test_step_times_that_contradict_each_other_are_told(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    """Beyond three times the noise of both, 30 % here; what is left of them is weighed all the same."""
    warnings = document(capsys, "--draft-tokens", "3", *arguments)["warnings"]
    found = [w for w in warnings if "is given as" in w or "longer than the cycle" in w]
    assert (len(found), said in "".join(found)) == (1 if said else 0, True)
