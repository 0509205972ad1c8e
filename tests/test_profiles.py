"""Hardware profiles: the shipped ones, the reader under bad input, writing and comparing."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.errors import InputError
from specsim.planned import plan
from specsim.prediction import predict
from specsim.profiles import (
    REQUIRED,
    AllReduceCurve,
    Profile,
    Source,
    diff,
    dump_profile,
    folder,
    latency_us,
    list_profiles,
    load_profile,
    parse_profile,
    unread_names,
)
from specsim.scenarios import build
from specsim.swept import sweep

NAMES = list_profiles()
SOURCE = {"kind": "assumed", "reference": "a test", "date": "2026-01-02"}
GROUP = {"relative_uncertainty": 0.1, "source": SOURCE}
RATE = {"fixed_us": 5.0, "bandwidth_gb_s": 1000.0, **GROUP}
SMALL: dict[str, Any] = {
    "schema": "specsim.hardware/1",
    "name": "test-box",
    "gpus": 2,
    "link": "pcie",
    "gpu": {"name": "Test GPU", "memory_gb": 80, "bandwidth_gb_s": 2000.0, "bf16_tflops": 300.0, **GROUP},
    "operators": {name: dict(RATE) for name in REQUIRED},
    "allreduce": [
        {
            "implementation": "nccl",
            "ranks": 2,
            "mode": "graph",
            "bytes": [1024, 4096],
            "latency_us": [8.0, 32.0],
            **GROUP,
        }
    ],
    "launch": {"kernel_us": 5.0, "collective_us": 40.0, "graph_us": 15.0, "graph_node_us": 0.6, **GROUP},
}


def text_of(changes: dict[str, Any] | None = None) -> str:
    """The small profile as YAML, with values put at dotted paths."""
    data = copy.deepcopy(SMALL)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        place: Any = data
        for key in parents:
            place = place[int(key)] if isinstance(place, list) else place[key]
        place[last] = value
    return yaml.safe_dump(data)


# --- the shipped profiles ------------------------------------------------------------------------------------------


def test_the_boxes_promised_are_shipped():
    promised = "1x-h200 2x-h200 8x-h200 8x-h100 8x-a100 8x-b200 8x-l40s 1x-rtx-4090 1x-rtx-5090 1x-rtx-pro-6000"
    assert {*promised.split(), "8x-rtx-pro-6000", "8x-pcie-field", "1x-h200-published"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile_is_sane(name):
    p = load_profile(name)
    assert p.name == name
    assert set(REQUIRED) <= set(p.operators)
    assert (p.link == "none") == (p.gpus == 1)
    assert bool(p.allreduce) == (p.gpus > 1)
    # A measured profile names the rate of a copy, which weights that are only read may exceed, and of one long product,
    # which bursts of small ones may.
    spare, burst = (1.15, 1.35) if p.gpu.source.kind == "measured" else (1.05, 1.0)
    for rate in p.operators.values():
        if rate.fixed_us > 3:
            assert rate.bandwidth_gb_s <= spare * p.gpu.bandwidth_gb_s, "more than the memory gives"
        assert rate.fixed_us < 150
    bf16 = p.operators["gemm_bf16"]
    assert bf16.bandwidth_gb_s > 0.5 * p.gpu.bandwidth_gb_s
    assert bf16.peak_tflops is None or bf16.peak_tflops <= burst * p.gpu.bf16_tflops
    assert p.operators["tiny"].fixed_us < p.operators["norm"].fixed_us < bf16.fixed_us * 2
    for curve in p.allreduce:
        assert curve.ranks <= p.gpus
        dip = 0.25 if curve.source.kind == "measured" else 0.0  # what is measured may wiggle
        if curve.mode == "graph" or not dip:  # eager ones are the host's noise
            highest = np.maximum.accumulate(curve.latency_us)
            assert np.all(np.asarray(curve.latency_us) >= (1 - dip) * highest), "latency falls as the message grows"
        assert 1 < curve.latency_us[0] < 200
    keys = [(c.implementation, c.ranks, c.mode) for c in p.allreduce]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile_survives_writing_and_is_written_by_our_writer(name):
    p = load_profile(name)
    text = dump_profile(p)
    assert parse_profile(text, name) == p


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("8x-")])
def test_boxes_of_eight_have_a_graph_curve_for_every_rank_count(name):
    ranks = {c.ranks for c in load_profile(name).allreduce if c.mode == "graph"}
    assert {2, 4, 8} <= ranks


def test_every_number_names_its_source():
    for name in NAMES:
        p = load_profile(name)
        for group in (p.gpu, p.launch, *p.operators.values(), *p.allreduce, *p.engines.values()):
            assert group.source.reference
            assert group.relative_uncertainty > 0


def test_faster_memory_shows_in_the_operators():
    """B200 8.0, H200 4.8, H100 3.35, A100 2.04, RTX PRO 6000 1.79 and L40S 0.86 TB/s: the fits keep that order."""
    boxes = ["8x-b200", "8x-h200", "8x-h100", "8x-a100", "8x-rtx-pro-6000", "8x-l40s"]
    for operator in ("gemm_bf16", "attention_gqa", "moe_bf16"):
        rates = [load_profile(box).operators[operator].bandwidth_gb_s for box in boxes]
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("name", list_profiles())
def test_what_a_box_says_of_itself_counts_no_calls_of_a_model(name):
    """How many kernels and all-reduces a pass has follows from the model, which a result counts."""
    said = [caveat for caveat in load_profile(name).caveats if re.search(r"\d (kernels|all-reduces)\b", caveat)]
    assert not said


def test_field_box_says_that_its_curve_is_inferred():
    p = load_profile("8x-pcie-field")
    (curve,) = [c for c in p.allreduce if c.ranks == 8]
    assert curve.source.kind == "fitted"
    assert latency_us(curve, 14336) == pytest.approx(30, rel=0.5)
    assert latency_us(curve, 43008) > 3 * latency_us(curve, 14336), "steeper than the bytes"
    assert any("eager" in caveat for caveat in p.caveats)
    assert any("inferred" in caveat for caveat in p.caveats)
    healthy = load_profile("8x-rtx-pro-6000")
    assert p.operators == healthy.operators


def test_scaled_gpus_are_marked_as_assumed():
    for name in ("1x-rtx-4090", "1x-rtx-5090"):
        for rate in load_profile(name).operators.values():
            assert rate.source.kind in ("assumed", "datasheet")
            assert rate.relative_uncertainty >= 0.2


# --- the reader ----------------------------------------------------------------------------------------------------


def test_names_in_any_case_and_paths(tmp_path):
    assert load_profile("8X-RTX-Pro-6000").name == "8x-rtx-pro-6000"
    path = tmp_path / "box.yaml"
    path.write_text(text_of())
    assert load_profile(str(path)).name == "test-box"
    assert load_profile(str(folder() / "1x-h200.yaml")) == load_profile("1x-h200")


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(InputError, match=r"no hardware profile '8x-rtx-6000'; did you mean '8x-rtx-pro-6000'\?"):
        load_profile("8x-rtx-6000")
    with pytest.raises(InputError, match="no such hardware profile"):
        load_profile("missing/box.yaml")


def test_loading_is_quick():
    """Below 15 ms once pydantic and yaml are imported: it is on the path of every prediction."""
    best = min(_seconds("8x-rtx-pro-6000") for _ in range(25))  # the best of many: the machine may be busy
    assert best < 0.015


def _seconds(name: str) -> float:
    start = time.perf_counter()
    load_profile(name)
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("operators.norm.fixed_us", -1.0, ["operators.norm.fixed_us", "greater than or equal to 0", "-1.0"]),
        ("operators.norm.bandwidth_gb_s", 0.0, ["operators.norm.bandwidth_gb_s", "greater than 0"]),
        ("operators.norm.bandwidth_gb_s", float("nan"), ["operators.norm.bandwidth_gb_s", "nan"]),
        ("operators.norm.bandwidth_gb_s", float("inf"), ["operators.norm.bandwidth_gb_s", "inf"]),
        ("operators.norm.bandwidth_gb_s", 1e30, ["operators.norm.bandwidth_gb_s", "less than"]),
        (
            "operators.norm.bandwidth_gb_s",
            2.0,
            ["operators.norm.bandwidth_gb_s is 2 where gpu.bandwidth_gb_s is 2000; give both in"],
        ),
        (
            "operators.gemm_bf16.peak_tflops",
            7e5,
            ["operators.gemm_bf16.peak_tflops is 700000 where gpu.bf16_tflops is"],
        ),
        ("operators.norm.bandwidth_gb_s", "fast", ["operators.norm.bandwidth_gb_s", "valid number", "'fast'"]),
        ("operators.norm.bandwidth_gb_s", "12", ["operators.norm.bandwidth_gb_s", "valid number"]),
        ("operators.norm.bandwidth_gb_s", True, ["operators.norm.bandwidth_gb_s", "valid number"]),
        ("operators.norm.relative_uncertainty", -0.1, ["operators.norm.relative_uncertainty"]),
        ("operators.norm.speed", 3.0, ["operators.norm.speed: unknown key; known: source, "]),
        ("operators.norm.source", {"kind": "guess", "reference": "abc", "date": "2026"}, ["source.kind", "'guess'"]),
        ("operators", {"gemm_bf16": RATE}, ["lacks attention_gqa, norm, tiny"]),
        ("operators", [], ["operators", "dictionary"]),
        ("gpus", 0, ["gpus", "greater than or equal to 1"]),
        ("gpus", 2.5, ["gpus", "integer"]),
        ("link", "wifi", ["link", "'wifi'"]),
        ("name", "../x", ["name"]),
        ("schema", "specsim.hardware/2", ["schema"]),
        ("allreduce.0.bytes", [4096, 1024], ["allreduce.0", "bytes must increase"]),
        ("allreduce.0.bytes", [1024], ["allreduce.0", "give one latency a size"]),
        ("allreduce.0.latency_us", [1.0, None], ["allreduce.0.latency_us.1"]),
    ],
)
def test_bad_values_are_refused_in_one_line(path, value, words):
    with pytest.raises(InputError) as caught:
        parse_profile(text_of({path: value}), "box.yaml")
    message = str(caught.value)
    assert message.startswith("box.yaml: ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("key", "misspelt", "said"),
    [
        ("link", "lnk", "lnk: unknown key; did you mean 'link'?"),
        ("graph_us", "grph_us", "launch.grph_us: unknown key; did you mean 'graph_us'?"),
        ("bf16_tflops", "bf16_tflop", "gpu.bf16_tflop: unknown key; did you mean 'bf16_tflops'?"),
        ("latency_us", "latencies_us", "allreduce.0.latencies_us: unknown key; did you mean 'latency_us'?"),
        ("inner_ns", "iner_ns", "operators.router.iner_ns: unknown key; did you mean 'inner_ns'?"),
        ("slow_ratio", "slow_rate", "host.slow_rate: unknown key; did you mean 'slow_ratio'?"),
        ("kernel_gap_us", "kernel_gpa_us", "engines.sglang.kernel_gpa_us: unknown key; did you mean 'kernel_gap_us'?"),
        ("kind", "knd", "gpu.source.knd: unknown key; did you mean 'kind'?"),
        ("norm:", "nrom:", "operators lacks norm; every profile needs gemm_bf16, attention_gqa, norm, tiny; operators.nrom is read by"),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_named_with_the_nearest(key: str, misspelt: str, said: str) -> None:
    """In every group, and also where the key that it stands for is missing for it."""
    whole = {
        "host": {"slow_share": 0.4, "slow_ratio": 2.0, **GROUP},
        "engines.sglang": {"kernel_gap_us": 1.0, **GROUP},
        "operators.router": {**RATE, "inner_ns": 1.0},
    }
    text = text_of({"engines": {}, **whole})
    parse_profile(text, "box.yaml")
    with pytest.raises(InputError) as caught:
        parse_profile(text.replace(key, misspelt, 1), "box.yaml")
    assert str(caught.value).startswith(f"box.yaml: {said}")


@pytest.mark.parametrize(("watched", "noted"), [((), False), ((0,), True), ((0, 1), False)])
def test_boxes_of_which_some_have_watched_cores_are_told_apart(
    watched: tuple[int, ...], noted: bool, tmp_path: Path
) -> None:
    """A sweep and a plan over two boxes: one line where one has a `host` group and the other none, and none else."""
    boxes = []
    for number in range(2):
        host = {"host": {"slow_share": 0.5, "slow_ratio": 3.0, **GROUP}} if number in watched else {}
        boxes.append(tmp_path / f"box{number}.yaml")
        boxes[-1].write_text(text_of({"name": f"box{number}", "gpus": 1, "link": "none", "allreduce": [], **host}))
    names = [str(box) for box in boxes]
    line = "the host's cores were watched on box0 (a loop takes 2.00 times as long) and are taken for cores of their own on box1"
    swept = sweep("Llama-3.1-8B", hardware=names, batch=[4]).warnings
    planned = plan("Llama-3.1-8B", hardware=names, rate=1).plan.warnings
    for warnings in (swept, planned):
        assert [w.partition(":")[0] for w in warnings if "cores" in w] == ([line] if noted else [])


def test_a_class_or_an_engine_that_nothing_reads_is_told_and_the_profile_stays_of_use() -> None:
    """One of a later version harms nothing; classes by kernel and those of every shipped profile are known."""
    odd = parse_profile(
        text_of({"operators.moe_fp9": RATE, "operators.gemm_fp8_triton": RATE, "engines": {"sgalng": GROUP}}), "x"
    )
    first, second = unread_names(odd)
    assert first.startswith("operators.moe_fp9 is read by nothing; did you mean 'moe_fp")
    assert second.startswith("engines.sgalng is read by nothing; did you mean 'sglang'?")
    assert any("sgalng" in said for said in predict(build(model="Llama-3.1-8B-Instruct", hardware=odd)).warnings)
    assert [unread_names(load_profile(name)) for name in NAMES] == [[] for _ in NAMES]


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "just words", "a: [1", "\t: x", "a: !!python/object/apply:os.system [ls]"]
)
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(InputError) as caught:
        parse_profile(text, "box.yaml")
    assert "box.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_models_config_is_told_from_a_profile():
    with pytest.raises(InputError, match=r"^config.json: holds no key of a hardware profile; .* --model$"):
        parse_profile('{"hidden_size": 4096, "num_hidden_layers": 36}', "config.json")


def test_repeated_keys_are_refused_with_their_line():
    text = text_of() + "gpus: 4\n"
    with pytest.raises(InputError, match=r"box.yaml, line \d+: key 'gpus' is given twice"):
        parse_profile(text, "box.yaml")


def test_aliases_may_neither_contain_themselves_nor_explode():
    with pytest.raises(InputError, match=r"box.yaml, line \d+: a value contains itself"):
        parse_profile(text_of() + "environment: &a {self: *a}\n", "box.yaml")
    levels = ["environment:", "  a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(InputError, match=r"box.yaml, line \d+: holds more than"):
        parse_profile(text_of() + "\n".join(levels), "box.yaml")


def test_merged_keys_may_not_explode():
    """Merging 9 times 9 maps, 9 levels deep, would copy 9^9 = 387 million entries."""
    levels = ["environment:", "  a0: &a0 {x: 1}"]
    levels += [f"  a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 10)]
    with pytest.raises(InputError, match=r"box.yaml, line \d+: holds more than"):
        parse_profile(text_of() + "\n".join(levels), "box.yaml")


@pytest.mark.parametrize("number", ["9" * 100_000, ":".join(["1"] * 100_000), "1:" * 100_000 + "1.0"])
def test_numbers_too_long_to_read_are_refused(number):
    """YAML 1.1 reads 1:1:1 in base 60, which takes seconds for 100,000 digits."""
    with pytest.raises(InputError, match=r"box.yaml, line \d+: is a number of too many digits"):
        parse_profile(text_of() + f"environment: {{x: {number}}}\n", "box.yaml")


@pytest.mark.parametrize("value", [".nan", "2026-01-02", "!!binary aGVsbG8=", "[.inf]", "!!set {a, b}"])
def test_the_free_parts_hold_plain_values_only(value):
    with pytest.raises(InputError, match=r"environment\.x.* is no plain value"):
        parse_profile(text_of() + f"environment: {{x: {value}}}\n", "box.yaml")


def test_dates_may_be_written_plainly():
    text = text_of().replace("'2026-01-02'", "2026-01-02")
    assert parse_profile(text, "box.yaml").launch.source.date == "2026-01-02"


PATHS = [
    "name", "gpus", "link", "gpu", "gpu.bandwidth_gb_s", "operators", "operators.norm", "operators.norm.fixed_us",
    "operators.norm.source", "operators.norm.source.date", "allreduce", "allreduce.0.bytes", "allreduce.0.latency_us",
    "allreduce.0.ranks", "launch", "launch.kernel_us", "schema", "engines", "caveats", "environment", "samples", "extra",
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def profile_or_message(read: Callable[[], Profile]) -> Profile | str:
    """What `read` gives, or the message of its InputError, which is one line."""
    try:
        return read()
    except InputError as error:
        message = str(error)
    assert "\n" not in message
    return message


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), JSON)
def test_any_value_anywhere_gives_a_profile_or_one_line(path, value):
    found = profile_or_message(lambda: parse_profile(text_of({path: value}), "box.yaml"))
    if isinstance(found, str):
        assert found.startswith("box.yaml")
    else:
        assert all(rate.bandwidth_gb_s > 0 for rate in found.operators.values())
        assert parse_profile(dump_profile(found), "again.yaml") == found


@pytest.mark.parametrize("text", ["\x85", "a\x85b", "\u2028", "\u2029x", "\ufeff", "a\tb", "a\nb", "\x7f", "no", "1e3"])
def test_odd_texts_are_written_as_they_are_read_back(text: str) -> None:
    found = parse_profile(text_of({"environment": {text: text}}), "box.yaml")
    assert found.environment == {text: text}
    assert parse_profile(dump_profile(found), "again.yaml") == found


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4), st.integers(0, 12))
def test_any_bytes_give_a_profile_or_one_line(tmp_path_factory, place, noise, removed):
    content = text_of().encode()
    at = place % len(content)
    path = tmp_path_factory.mktemp("fuzz") / "box.yaml"
    path.write_bytes(content[:at] + noise + content[at + removed :])
    assert profile_or_message(lambda: load_profile(str(path)))


def test_the_example_in_the_documentation_is_a_profile():
    page = Path(__file__).resolve().parent.parent / "docs" / "hardware.md"
    example = page.read_text(encoding="utf-8").split("```yaml")[1].split("```")[0]
    assert parse_profile(example, "docs/hardware.md").name == "my-box"


def test_what_calibration_finds_on_a_cpu_is_no_wrong_unit():
    """Experts there reach a hundred and fiftieth of the copy's bandwidth; another unit would be a thousandth at most."""
    assert parse_profile(text_of({"operators.norm.bandwidth_gb_s": 2000 / 158}), "box.yaml").name


# --- writing and comparing -----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1e11), st.floats(21, 1.9e5), st.floats(0, 3))  # GB/s within a hundred times those of the GPU, 2,000
def test_numbers_survive_writing(fixed, bandwidth, uncertainty):
    rate = {"fixed_us": fixed, "bandwidth_gb_s": bandwidth, "relative_uncertainty": uncertainty, "source": SOURCE}
    data = copy.deepcopy(SMALL)
    data["operators"]["norm"] = rate
    p = Profile.model_validate(data)
    assert parse_profile(dump_profile(p), "box.yaml") == p


def test_written_profile_reads_well():
    text = dump_profile(Profile.model_validate(SMALL))
    assert text.startswith("schema: specsim.hardware/1\nname: test-box\n")
    assert "  bytes: [1024, 4096]\n  latency_us: [8.0, 32.0]\n" in text
    assert text.index("fixed_us") < text.index("source:", text.index("fixed_us"))


def test_a_profile_does_not_differ_from_itself():
    for name in NAMES:
        p = load_profile(name)
        assert diff(p, p) == []


def test_differences_are_relative_and_named():
    """The bandwidth goes from 1000 to 1250 GB/s: +25 %; the curve's 8 us at 1 KB to 12 us: +50 %."""
    a = parse_profile(text_of(), "a.yaml")
    changed = {"operators.norm.bandwidth_gb_s": 1250.0, "allreduce.0.latency_us": [12.0, 32.0]}
    b = parse_profile(text_of(changed), "b.yaml")
    found = {d.key: d.relative for d in diff(a, b)}
    assert found == {
        "operators.norm.bandwidth_gb_s": pytest.approx(0.25),
        "allreduce.nccl.2.graph.1024.latency_us": pytest.approx(0.5),
    }


def test_what_only_one_profile_has_is_a_difference_without_a_ratio():
    a = parse_profile(text_of(), "a.yaml")
    b = parse_profile(text_of({"operators.moe_int4": RATE, "allreduce": []}), "b.yaml")
    found = {d.key: (d.a, d.b, d.relative) for d in diff(a, b)}
    assert found["operators.moe_int4.fixed_us"] == (None, 5.0, None)
    assert found["allreduce.nccl.2.graph.latency_us"] == (32.0, None, None)


def test_curves_are_read_in_log_log():
    """8 us at 1 KB and 32 us at 4 KB: at 2 KB, halfway in the logarithm, sqrt(8 x 32) = 16 us; nothing outside."""
    source = Source(kind="assumed", reference="a test", date="2026")
    curve = AllReduceCurve(
        implementation="nccl", ranks=2, mode="graph", bytes=[1024, 4096], latency_us=[8, 32],
        relative_uncertainty=0, source=source,
    )  # fmt: skip
    assert latency_us(curve, 2048) == pytest.approx(16)
    assert latency_us(curve, 1024) == 8
    assert latency_us(curve, 512) is None
    assert latency_us(curve, 8192) is None
