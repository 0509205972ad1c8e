"""Two profiles weighed by a scenario: parts of a step as elasticities, and the verdict on two calibrations of one box."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsim.agreement import steps, weigh
from specsim.cli import main
from specsim.profiles import Profile, dump_profile, load_profile
from specsim.scenarios import build


def scenario(**options):
    return build(**{"model": "Llama-3.1-8B", "hardware": "2x-h200", "tp": 2, "batch": 4, "draft_tokens": 4, **options})


def changed(profile: Profile, name: str, field: str, factor: float) -> Profile:
    rate = profile.operators[name]
    rate = rate.model_copy(update={field: getattr(rate, field) * factor})
    return profile.model_copy(update={"operators": {**profile.operators, name: rate}})


def test_a_profile_agrees_with_itself():
    box = load_profile("2x-h200")
    found = weigh(box, box, scenario())
    assert {w.relative for w in found} == {0.0}
    assert {w.effect for w in found} == {0.0}
    assert abs(found[0].part) == max(abs(w.part) for w in found)


def test_the_part_of_a_number_says_what_its_change_does():
    """A bandwidth 2 % higher: the step changes by about -2 % of the part that hangs on it, and no other number differs."""
    box = load_profile("2x-h200")
    found = {w.key: w for w in weigh(box, changed(box, "gemm_bf16", "bandwidth_gb_s", 1.02), scenario())}
    number = found["operators.gemm_bf16.bandwidth_gb_s"]
    assert number.matters
    assert number.part < 0
    assert number.relative == pytest.approx(0.02)
    assert number.effect == pytest.approx(number.part * 0.02, rel=0.05)
    assert all(w.relative == 0 for key, w in found.items() if key != number.key)


def test_parts_add_up_to_the_whole():
    """Every time 1 % longer and every rate 1 % lower makes the GPU's step 1 % longer, but for the engine's own terms: the
    parts of one plain step, the signs of rates turned, add up to at most 1, and to most of it."""
    found = weigh(load_profile("2x-h200"), load_profile("2x-h200"), scenario(method="none", draft_tokens=None))
    assert 0.7 < sum(abs(w.part) for w in found) <= 1.02


def test_a_curve_counts_as_one_number_at_the_sizes_that_are_sent():
    """Latencies twice as long at every size: 100 % apart, and the step longer by the curve's part."""
    one = scenario(model="Kimi-K2.5", hardware="8x-pcie-field", tp=8)
    box = load_profile("8x-pcie-field")
    slow = [c.model_copy(update={"latency_us": [2 * t for t in c.latency_us]}) for c in box.allreduce]
    other = box.model_copy(update={"allreduce": slow})
    curve = next(w for w in weigh(box, other, one) if w.key.startswith("allreduce.nccl.8.graph"))
    assert curve.relative == pytest.approx(1.0, rel=0.02)
    gained = steps(one, other) / steps(one, box) - 1
    assert min(abs(gained - curve.effect)) < 0.01


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["hardware", *arguments])
    done = capsys.readouterr()
    return end.value.code or 0, done.out, done.err


def test_diff_with_a_scenario_judges_two_calibrations(capsys, tmp_path: Path):
    box = load_profile("2x-h200")
    (tmp_path / "again.yaml").write_text(dump_profile(changed(box, "gemm_bf16", "bandwidth_gb_s", 1.05)))
    line = ["diff", "2x-h200", str(tmp_path / "again.yaml"), "--model", "Llama-3.1-8B", "--tp", "2"]
    code, out, _ = run(capsys, *line)
    assert code == 0
    assert out.rstrip().endswith("they differ by at most 5.0%")
    code, out, _ = run(capsys, *line, "--within", "3%")
    assert code == 1
    assert out.rstrip().endswith("they differ by at most 5.0%, more than 3%: operators.gemm_bf16.bandwidth_gb_s")
    code, out, _ = run(capsys, *line, "--within", "6%")
    assert code == 0
    assert out.rstrip().endswith("they differ by at most 5.0%, within 6%")
    assert sum(row.startswith("number ") for row in out.splitlines()) == 1, "one table, 80 columns wide"
    code, out, _ = run(capsys, *line, "--json")
    document = json.loads(out)
    assert document["schema"] == "specsim.hardware-agreement/1"
    assert document["worst"] == pytest.approx(0.05)
    assert (document["within"], document["agree"]) == (None, None)
    assert len(document["step_ms"]["a"]) == 2
    assert json.loads(run(capsys, *line, "--json", "--within", "3%")[1])["agree"] is False


def test_two_files_of_a_box_that_is_not_shipped(capsys, tmp_path: Path):
    """Files whose profiles have one name are told apart by theirs, and the first is what the scenario runs on."""
    box = load_profile("2x-h200").model_copy(update={"name": "box"})
    for name, factor in (("monday", 1.0), ("friday", 1.01)):
        (tmp_path / f"{name}.yaml").write_text(dump_profile(changed(box, "gemm_bf16", "fixed_us", factor)))
    files = [str(tmp_path / f"{name}.yaml") for name in ("monday", "friday")]
    code, out, _ = run(capsys, "diff", *files, "--model", "Llama-3.1-8B", "--tp", "2", "--within", "3%")
    assert code == 0
    assert out.split("\n")[0].split()[1:3] == ["monday", "friday"]


def test_a_number_that_the_second_lacks_is_no_agreement(capsys, tmp_path: Path):
    box = load_profile("2x-h200")
    curves = [c for c in box.allreduce if c.implementation != "custom"]
    (tmp_path / "less.yaml").write_text(dump_profile(box.model_copy(update={"allreduce": curves})))
    line = ["diff", "2x-h200", str(tmp_path / "less.yaml"), "--model", "Llama-3.1-8B", "--tp", "2", "--batch", "8"]
    code, out, _ = run(capsys, *line, "--within", "3%")
    assert code == 1
    assert f"allreduce.custom.2.graph: {tmp_path / 'less.yaml'} has none" in out.replace("\n", " ").replace("  ", " ")
    assert run(capsys, *line)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["diff", "2x-h200"], "give two profiles"),
        (["diff", "2x-h200", "8x-h200", "8x-h100", "--batch", "2"], "give two profiles"),
        (["diff", "2x-h200", "8x-h200", "--within", "3%"], "needs a scenario"),
        (["diff", "2x-h200", "8x-h200", "--batch", "2", "--within", "3"], "write 3% or 0.03"),
        (
            ["diff", "2x-h200", "1x-h200", "--model", "Llama-3.1-8B", "--tp", "2"],
            "needs more GPUs than the 1 of 1x-h200",
        ),
    ],
)
def test_bad_comparisons_are_one_line(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_profile_without_all_reduce_serves_one_rank_alone(capsys, tmp_path: Path):
    (tmp_path / "bare.yaml").write_text(dump_profile(load_profile("2x-h200").model_copy(update={"allreduce": []})))
    line = ["diff", "2x-h200", str(tmp_path / "bare.yaml"), "--model", "Llama-3.1-8B"]
    code, _, err = run(capsys, *line, "--tp", "2")
    assert code == 2
    assert "2x-h200 has no all-reduce curve, which tp 2 needs" in err
    assert run(capsys, *line, "--tp", "1")[0] == 0


def test_several_profiles_side_by_side(capsys):
    code, out, _ = run(capsys, "diff", "2x-h200", "2x-h200-no-p2p", "8x-h200", "--json")
    assert code == 0
    document = json.loads(out)
    assert [document["b"], document["more"][0]["b"]] == ["2x-h200-no-p2p", "8x-h200"]
    assert run(capsys, "diff", "2x-h200", "2x-h200-no-p2p", "8x-h200")[0] == 0
