"""Classes that a profile lacks: what stands in for them, and how much less certain it is."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

import numpy as np
import pytest
from builders import dense, profile, quiet, scenario
from hypothesis import given
from hypothesis import strategies as st

from specsim.engines import load_engine
from specsim.machine import (
    OWN_SPREAD,
    PUBLISHED_BANDWIDTH,
    PUBLISHED_FIXED,
    STAND_IN_BANDWIDTH,
    STAND_IN_FIXED,
    STAND_INS,
    build,
    stand_in,
)
from specsim.models import Format
from specsim.prediction import predict
from specsim.profiles import OperatorRate, list_profiles, load_profile

FOUND = ("measured", "fitted", "published")
INNER, PARTS = 4096, 16  # a usual inner width; parts of a cache of 1,024 tokens


def start_us(name: str, rate: OperatorRate) -> float:
    """What a call takes besides its bytes and flops: part of it may grow with the inner width, or the parts of a cache."""
    return rate.fixed_us + (PARTS if name == "attention_mla" else INNER) * rate.inner_ns / 1e3


def test_the_spread_is_that_of_the_shipped_profiles() -> None:
    """Root mean square of ln(class / what would stand in for it), over the classes that were measured, each pair once."""
    fixed: dict[tuple[float, float], float] = {}
    bandwidth: dict[tuple[float, float], float] = {}
    for name in list_profiles():
        found = {n: r for n, r in load_profile(name).operators.items() if r.source.kind in FOUND}
        for wanted, rate in found.items():
            general = wanted.rpartition("_")[0]  # a class by kernel is priced as the class, for which another stands in
            if wanted.split("_")[0] in STAND_INS and wanted != "gemm_bf16" and general not in found:
                nearest = stand_in(wanted, found)
                other: OperatorRate = found[nearest]
                starts = start_us(wanted, rate), start_us(nearest, other)
                fixed[starts] = log(starts[0] / starts[1])
                pair = rate.bandwidth_gb_s, other.bandwidth_gb_s
                bandwidth[pair] = log(pair[0] / pair[1])
    assert len(fixed) > 20
    assert sqrt(np.mean(np.square(list(fixed.values())))) == pytest.approx(STAND_IN_FIXED, abs=0.06)
    assert sqrt(np.mean(np.square(list(bandwidth.values())))) == pytest.approx(STAND_IN_BANDWIDTH, abs=0.06)


def test_published_classes_are_as_uncertain_as_they_were_wrong() -> None:
    """Root mean square of ln(published / measured) over the classes that both profiles of one H200 have; the published
    classes of a machine spread by that and their own tables' residuals, measured ones by what they state."""
    ours, tables = load_profile("1x-h200"), load_profile("1x-h200-published")
    both = [n for n, r in tables.operators.items() if r.source.kind == "published"
            and ours.operators[n].source.kind in ("measured", "fitted")]  # fmt: skip
    assert len(both) >= 7
    off = [(log(start_us(n, tables.operators[n]) / start_us(n, ours.operators[n])),
            log(tables.operators[n].bandwidth_gb_s / ours.operators[n].bandwidth_gb_s)) for n in both]  # fmt: skip
    fixed, bandwidth = np.sqrt(np.mean(np.square(off), axis=0))
    assert (fixed, bandwidth) == (
        pytest.approx(PUBLISHED_FIXED, abs=0.03),
        pytest.approx(PUBLISHED_BANDWIDTH, abs=0.02),
    )
    for box in (ours, tables):
        machine = build(box, load_engine("sglang"), samples=20_000)
        own = box.operators["moe_int4"].relative_uncertainty
        more = (PUBLISHED_FIXED, PUBLISHED_BANDWIDTH) if box is tables else (0.0, 0.0)
        rate = machine.rate("moe_int4")
        assert np.log(rate.fixed_s[1:]).std() == pytest.approx(np.hypot(own, more[0]), rel=0.03)
        assert np.log(rate.bytes_per_s[1:]).std() == pytest.approx(np.hypot(own, more[1]), rel=0.03)


@given(st.sets(st.sampled_from(["moe_bf16", "moe_fp8", "attention_mla", "tiny", "norm"])))
def test_something_always_stands_in(known: set[str]) -> None:
    for wanted in ("gemm_int4", "moe_nvfp4", "attention_sparse", "router", "norm", "unheard_of"):
        assert stand_in(wanted, {*known, "gemm_bf16"}) in {*known, "gemm_bf16"} - {wanted}
    assert stand_in("router", {"norm", "tiny", "gemm_bf16"}) == "norm"


def test_samples_of_a_stand_in_spread_by_as_much() -> None:
    """ln of 20,000 samples: the variance of the class itself (0.1^2 each) and 0.6^2 or 0.28^2 add up; the first is the
    profile's own value; a class asked for twice has one set of samples, and two stand-ins have two."""
    machine = build(profile(), load_engine("sglang"), samples=20_000, seed=3)
    known, found = machine.rate("moe_bf16"), machine.rate("moe_fp8")
    assert stand_in("moe_fp8", machine.rates) == "moe_bf16"
    assert (found.fixed_s[0], found.bytes_per_s[0], found.source) == (known.fixed_s[0], known.bytes_per_s[0], "assumed")
    assert np.log(found.fixed_s[1:]).std() == pytest.approx(sqrt(0.1**2 + STAND_IN_FIXED**2), rel=0.02)
    assert np.log(found.bytes_per_s[1:]).std() == pytest.approx(sqrt(0.1**2 + STAND_IN_BANDWIDTH**2), rel=0.02)
    assert machine.rate("moe_fp8") is found
    assert not np.allclose(machine.rate("moe_mxfp4").fixed_s, found.fixed_s)
    again = build(profile(), load_engine("sglang"), samples=20_000, seed=3)
    assert np.array_equal(again.rate("moe_fp8").fixed_s, found.fixed_s)
    assert build(profile(), load_engine("sglang")).rate("moe_fp8").fixed_s.shape == ()


def test_a_prediction_with_a_stand_in_has_the_same_value_and_a_wider_interval() -> None:
    """A dense model in fp8 on a box that has no fp8 GEMM, and on one whose fp8 GEMM is known to be as bf16's."""
    box = profile()
    fp8 = Format("fp8", 8)
    layer = dense(1).layers[0][0]
    mixer, ffn = (tuple(replace(p, format=fp8) for p in part) for part in (layer.mixer, layer.ffn))
    model = replace(dense(), layers=((replace(layer, mixer=mixer, ffn=ffn), 4),))
    known = box.model_copy(update={"operators": {**box.operators, "gemm_fp8": box.operators["gemm_bf16"]}})
    without, with_ = (predict(scenario(model, box=b, engine=quiet())) for b in (box, known))
    assert without.decode_ms.value == pytest.approx(with_.decode_ms.value, rel=1e-12)
    assert without.decode_ms.high - without.decode_ms.low > 1.5 * (with_.decode_ms.high - with_.decode_ms.low)
    assert any("no gemm_fp8: gemm_bf16 stands in" in w for w in without.warnings)


def test_one_shape_is_as_uncertain_as_machines_differ() -> None:
    """Standard deviation of ln(seconds) of products that several H200 timed, about the mean of each."""
    samples = load_profile("1x-h200").samples
    spreads = []
    for name in ("gemm_bf16", "gemm_fp8"):
        columns = samples[name]["columns"].split()
        by_size: dict[tuple[str, ...], list[float]] = {}
        for row in samples[name]["rows"]:
            cell = dict(zip(columns, row.split(), strict=True))
            by_size.setdefault((cell["rows"], cell["n"], cell["k"]), []).append(log(float(cell["median_us"])))
        several = [np.asarray(found) for found in by_size.values() if len(found) > 1]
        squares = sum(float(((found - found.mean()) ** 2).sum()) for found in several)
        spreads.append(sqrt(squares / sum(len(found) - 1 for found in several)))
    assert pytest.approx(np.mean(spreads), abs=0.005) == OWN_SPREAD
