"""Fits: known parameters come back; what the samples cannot tell is held and said; a profile is built from results."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import profile, quiet
from pydantic import ValidationError

from specsim import calibrate, class_fits, residuals
from specsim.calibrate import build
from specsim.class_fits import fit
from specsim.configs import load_model
from specsim.errors import InputError
from specsim.machine import build as build_machine
from specsim.ops import Operator, Rate, operator_seconds
from specsim.profiles import dump_profile, load_profile, parse_profile
from specsim.records import Record
from specsim.shapes import shapes

VALIDATION = Path(__file__).parents[1] / "validation"
FIXED, BANDWIDTH, PEAK = 4.5e-6, 4.0e12, 700e12


def spread(seconds: float) -> dict[str, float]:
    return {
        "median": seconds,
        "p10": seconds,
        "p90": seconds,
        "min": seconds,
        "max": seconds,
        "low": seconds,
        "high": seconds,
    }


def result(
    measure: str, operator: str, seconds: float, *, nbytes: float = 0, flops: float = 0, **params: Any
) -> dict[str, Any]:
    key = f"{measure}.{operator}." + "-".join(f"{k}={v}" for k, v in params.items())
    return {
        "key": key, "measure": measure, "operator": operator, "params": params, "bytes": nbytes, "flops": flops, "status": "done",
        "rank": 0, "narrow": True, "seconds": [seconds] * 5, "spread": spread(seconds), "extras": {},
    }  # fmt: skip


def gemms() -> list[dict[str, Any]]:
    found = []
    for rows in (4, 128, 2048):
        for nbytes in (5e6, 2e7, 5e7, 1e8, 3e8, 6e8):
            flops = rows * nbytes
            seconds = float(
                operator_seconds(np.asarray(FIXED), np.asarray(nbytes / BANDWIDTH), np.asarray(flops / PEAK))
            )
            found.append(
                result("gemm", "gemm_bf16", seconds, nbytes=nbytes, flops=flops, rows=rows, n=int(nbytes), k=1)
            )
    return found


def peaks() -> list[dict[str, Any]]:
    copy = result("peak", "copy", 2e9 / 4e12, nbytes=2e9, mb=1000)
    return [copy, result("peak", "matmul", 1.0, nbytes=1, flops=7e14, n=8192)]


def test_fit_recovers_the_parameters_it_was_given() -> None:
    """18 points of the cost equation at 4.5 us, 4 TB/s and 700 T with 1 % noise and one point twice too slow."""
    seconds, nbytes, flops, _ = class_fits.points(gemms(), "gemm_bf16")
    noisy = seconds * np.random.default_rng(1).normal(1.0, 0.01, len(seconds))
    noisy[7] *= 2.0
    found = fit(noisy, nbytes, flops, bandwidth=1e12, peak=1e14)
    assert found.fixed_s == pytest.approx(FIXED, rel=0.06)
    assert found.bytes_per_s == pytest.approx(BANDWIDTH, rel=0.04)
    assert found.flops_per_s == pytest.approx(PEAK, rel=0.04)
    assert found.held == ()
    assert abs(found.fixed_s - FIXED) < 4 * found.fixed_error_s
    assert found.residuals[7] > 0.8


def test_few_rows_tell_no_peak_whatever_bends_their_times() -> None:
    """Experts of at most 128 rows do at most 12 flops a byte: at 4 TB/s 48 TFLOP/s, a tenth of what 7e14 flop/s in bf16 let
    expect (70 %: 490). That the largest are slow, as if they computed at 40, is no limit of rows beyond them."""
    samples = []
    for rows in (1, 4, 16, 48, 64, 96, 128):
        nbytes = 1e7 * rows**0.5
        flops = 12 * nbytes * rows / 128
        seconds = float(operator_seconds(np.asarray(2e-5), np.asarray(nbytes / 4e12), np.asarray(flops / 4e13)))
        shape = {"hidden": 2048, "intermediate": 1408, "experts": 64, "top_k": 6}
        samples.append(result("moe", "moe_bf16", seconds, nbytes=nbytes, flops=flops, rows=rows, **shape))
    made = build("box", [*gemms(), *peaks(), *samples], {"gpu": "Test GPU"}, ranks=1, date="2026-11-30")
    assert made.profile.operators["moe_bf16"].peak_tflops is None
    said = "moe_bf16: peak cannot be told from these samples, of 128 rows at most: beyond them 70% of the bf16 product's is assumed"
    assert said in made.warnings
    more = [{**s, "flops": 40 * s["flops"]} for s in samples]
    for s in more:
        seconds = float(
            operator_seconds(np.asarray(2e-5), np.asarray(s["bytes"] / 4e12), np.asarray(s["flops"] / 3e14))
        )
        s["spread"] = spread(seconds)
    made = build("box", [*gemms(), *peaks(), *more], {"gpu": "Test GPU"}, ranks=1, date="2026-11-30")
    assert made.profile.operators["moe_bf16"].peak_tflops == pytest.approx(300, rel=0.1)


def test_the_sustained_product_counts_among_the_others() -> None:
    """Products of 4 rows alone, at most 6e8 bytes x 4 flops: the 8192 cube of `peak` is what identifies their limit."""
    few = [s for s in gemms() if s["params"]["rows"] == 4]
    assert "peak" in class_fits.fits(few, BANDWIDTH, 1e14)["gemm_bf16"].held
    cube = 8192
    seconds = float(
        operator_seconds(np.asarray(FIXED), np.asarray(6 * cube**2 / BANDWIDTH), np.asarray(2 * cube**3 / PEAK))
    )
    found = class_fits.fits(
        [*few, result("peak", "matmul", seconds, nbytes=6 * cube**2, flops=2 * cube**3, n=cube)], BANDWIDTH, 1e14
    )
    assert found["gemm_bf16"].held == ()
    assert found["gemm_bf16"].flops_per_s == pytest.approx(PEAK, rel=0.02)


def test_kernels_timed_in_place_count_instead_of_those_timed_alone() -> None:
    """Norms of 2.5 us in place, in a later record; the earlier one has 1.6 us, back to back, also at another size."""
    old = [result("small", "norm", 1.6e-6, nbytes=n * 1e3, rows=n, width=64) for n in (1, 2, 16)]
    alone = {"extras": {"alone": spread(1.6e-6)}}
    new = [{**result("small", "norm", 2.5e-6, nbytes=n * 1e3, rows=n, width=64), **alone} for n in (1, 2, 4)]
    made = calibrate.rebuild([record_of([*peaks(), *old]), record_of(new)])
    assert made.fits["norm"].fixed_s == pytest.approx(2.5e-6, rel=0.01)
    assert len(made.fits["norm"].residuals) == 3
    table = made.profile.samples["norm"]
    assert table["columns"].split()[-1] == "alone_us"
    assert [row.split()[-1] for row in table["rows"]] == ["1.6"] * 3


def test_bandwidth_that_the_samples_cannot_tell_is_held_and_said() -> None:
    """Three sizes of a few KB: 3 us each, whatever the bytes."""
    nbytes = np.array([4e3, 8e3, 16e3])
    seconds = np.array([3.0e-6, 3.05e-6, 2.98e-6])
    found = fit(seconds, nbytes, np.zeros(3), bandwidth=2e12, peak=None)
    assert found.held == ("bandwidth",)
    assert found.bytes_per_s == pytest.approx(2e12)
    assert found.fixed_s == pytest.approx(3.0e-6, rel=0.02)
    assert "bandwidth not identifiable" in found.note


def test_one_point_gives_a_fixed_time_and_no_claim() -> None:
    found = fit(np.array([1e-5]), np.array([1e6]), np.zeros(1), bandwidth=1e12, peak=None)
    assert found.held == ("bandwidth", "fixed")
    assert found.fixed_s == pytest.approx(9e-6)


def test_no_points_is_an_error() -> None:
    with pytest.raises(ValueError, match="no points"):
        fit(np.array([]), np.array([]), np.array([]), bandwidth=1.0, peak=None)


def test_profile_of_results_loads_again_and_keeps_their_numbers() -> None:
    results = gemms() + peaks()
    for nbytes in (4096, 65536):
        for mode in ("graph", "alone", "eager"):
            found = result("allreduce", "nccl", 1e-5 + nbytes * 1e-10, nbytes=nbytes, ranks=2, mode=mode, bytes=nbytes)
            results.append(found)
    for name, seconds in (("eager_kernel", 5e-6), ("graph_launch", 1.2e-5), ("graph_node", 1e-6)):
        results.append(result("launches", name, seconds))
    made = build("2x-test", results, {"gpu": "Test GPU", "memory_bytes": 8e10}, ranks=2, nvlink=True, date="2026-11-29")
    profile = parse_profile(dump_profile(made.profile), "made")
    assert profile.operators["gemm_bf16"].fixed_us == pytest.approx(4.5, rel=0.01)
    assert profile.operators["gemm_bf16"].source.kind == "measured"
    assert profile.gpu.bandwidth_gb_s == pytest.approx(4000)
    assert profile.link == "nvlink"
    assert [(c.implementation, c.mode) for c in profile.allreduce] == [("nccl", "eager"), ("nccl", "graph")]
    assert profile.allreduce[0].latency_us == [pytest.approx(10.41, rel=1e-3), pytest.approx(16.55, rel=1e-3)]
    assert profile.launch.kernel_us == 5.0
    assert profile.launch.collective_us == pytest.approx(10.41, rel=1e-3)
    assert profile.launch.graph_node_us == 0.0
    assert any("not measured, assumed: attention_gqa, norm, tiny" in c for c in profile.caveats)
    assert made.record.kind == "calibration"
    assert len(made.record.samples) == len(results)


def test_a_class_alone_is_fitted_without_the_peaks() -> None:
    """`calibrate --only gemm` knows neither the copy's bandwidth nor the cube's rate, and a line of products must not be held
    below a made-up one: of the samples of an H200 without them the same line comes out within 5 %."""
    document = json.loads((VALIDATION / "calibration" / "1x-h200.record.json").read_text())
    document["samples"] = [
        s for s in document["samples"] if s["operator"] in ("copy", "matmul", "gemm_bf16", "gemm_fp8")
    ]
    whole = calibrate.rebuild([Record.model_validate(document)]).profile
    document["samples"] = [s for s in document["samples"] if s["measure"] != "peak"]
    published = load_profile("1x-h200-published")
    for some in ([], [published]):
        alone = calibrate.rebuild([Record.model_validate(document)], some)
        for name in ("gemm_bf16", "gemm_fp8"):
            rate, expected = alone.profile.operators[name], whole.operators[name]
            assert rate.bandwidth_gb_s == pytest.approx(expected.bandwidth_gb_s, rel=0.05)
            assert rate.fixed_us == pytest.approx(expected.fixed_us, rel=0.05)
            assert rate.relative_uncertainty < 0.1
        assert alone.profile.gpu.source.kind == "assumed"
    assert alone.profile.gpu.bandwidth_gb_s == published.gpu.bandwidth_gb_s


def test_small_kernels_or_all_reduces_alone_say_nothing_of_the_gpu() -> None:
    """They have no flops, and fit in the L2: what the GPU can do is then a guess, which no measurement is taken for."""
    norm = result("small", "norm", 3e-6, nbytes=1e5, rows=1, width=4096)
    for results in ([norm], []):
        gpu = build("box", results, {}, ranks=1).profile.gpu
        assert (gpu.bandwidth_gb_s, gpu.bf16_tflops, gpu.source.kind) == (1000, 200, "assumed")


def test_a_class_that_no_line_fits_is_told() -> None:
    """Products that take any time between 10 and 90 us whatever their size."""
    results = [*peaks(), *gemms()]
    for r, seconds in zip(results[2:], itertools.cycle((1e-5, 9e-5, 3e-5)), strict=False):
        r["spread"] = spread(seconds)
    assert any("gemm_bf16: no line fits its samples" in w for w in build("box", results, {}, ranks=1).warnings)
    assert not any("no line fits" in w for w in build("box", [*peaks(), *gemms()], {}, ranks=1).warnings)


def test_wrong_data_becomes_a_caveat_and_no_curve() -> None:
    bad = {**result("allreduce", "nccl", 1.0, ranks=2, mode="graph", bytes=4096), "status": "failed"}
    bad["error"] = "rank 1: RuntimeError: WRONG DATA: 5 of 2048 values over 2 ranks, attempt 1"
    made = build("x", [*gemms(), *peaks(), bad], {"gpu": "Test GPU"}, ranks=2, date="2026-11-29")
    assert made.profile.allreduce == []
    assert any("WRONG DATA" in c for c in made.profile.caveats)


def test_without_peer_access_the_link_is_pcie() -> None:
    made = build("x", [*gemms(), *peaks()], {"gpu": "Test GPU"}, ranks=2, nvlink=True, no_p2p=True, date="2026-11-29")
    assert made.profile.link == "pcie"
    assert "peer access off" in made.profile.description


def test_a_slow_gpu_is_named_with_what_it_costs() -> None:
    slow = {**result("peak", "copy", 2e9 / 3e12, nbytes=2e9, mb=1000), "rank": 5}
    made = build("x", [*gemms(), *peaks(), slow], {"gpu": "Test GPU"}, ranks=8, date="2026-11-29")
    assert "GPU 5: memory bandwidth is 75% of the best GPU's: all ranks wait for it" in made.warnings
    assert made.profile.gpu.bandwidth_gb_s == pytest.approx(3000)


def test_classes_that_were_not_measured_come_from_a_published_profile_of_the_same_gpu() -> None:
    published = load_profile("8x-b200")
    made = build(
        "x",
        [*gemms(), *peaks()],
        {"gpu": published.gpu.name},
        ranks=8,
        nvlink=True,
        date="2026-11-29",
        published=[published],
    )
    lent = {n for n, o in published.operators.items() if o.source.kind in calibrate.BORROWED}
    assert lent <= set(made.profile.operators)
    assert made.profile.operators["gemm_bf16"].fixed_us == pytest.approx(4.5, rel=0.01)
    assert all(not c.implementation.startswith("nccl") for c in made.profile.allreduce)
    other = build(
        "x", [*gemms(), *peaks()], {"gpu": "Other"}, ranks=8, nvlink=True, date="2026-11-29", published=[published]
    )
    assert set(other.profile.operators) == {"gemm_bf16", "attention_gqa", "norm", "tiny"}


def test_verify_rows_are_set_beside_one_row() -> None:
    base = {"batch": 1, "context": 1024, "heads": 8}
    samples = [
        result("attention", "attention_mla", t, queries=q, **base) for q, t in ((1, 16e-6), (3, 21e-6), (4, 23e-6))
    ]
    found = calibrate.verify_layer(samples)["attention_mla"]
    assert [e["more_us"] for e in found] == [pytest.approx(5.0), pytest.approx(7.0)]


def test_residual_plot_is_written(tmp_path: Any) -> None:
    made = build("x", [*gemms(), *peaks()], {"gpu": "Test GPU"}, ranks=1, date="2026-11-29")
    residuals.plot(made, tmp_path / "residuals.png")
    assert (tmp_path / "residuals.png").stat().st_size > 1000


def test_shapes_of_a_model_are_those_of_one_rank() -> None:
    """Kimi-K2.5 over 8 ranks: 384 experts of 7168 x 2048 / 8, 64 / 8 heads of MLA."""
    found = shapes([load_model("Kimi-K2.5")], 8)
    assert found["experts"] == [{"hidden": 7168, "intermediate": 256, "experts": 384, "top_k": 8}]
    assert found["attention"] == [{"kind": "mla", "heads": 8, "latent": 512, "rope": 64}]
    assert found["hidden"] == [7168]
    assert [2112, 7168] in found["gemm"] or [1536, 7168] in found["gemm"]
    assert [163840 // 8, 7168] in found["gemm"]  # the head
    assert [384, 7168] in found["gemm"]  # the router, whole on each rank


def test_shapes_of_several_models_are_each_there_once() -> None:
    """Llama-3.1-8B and its drafter share a layer's shapes but for what joins two inputs; the drafter's fc takes three hidden states."""
    target, draft = load_model("Llama-3.1-8B"), load_model("EAGLE3-LLaMA3.1-Instruct-8B")
    alone, both = shapes([target], 1), shapes([target, draft], 1)
    assert both["attention"] == alone["attention"]
    assert both["hidden"] == [4096]
    more = [shape for shape in both["gemm"] if shape not in alone["gemm"]]
    assert len(both["gemm"]) == len({tuple(shape) for shape in both["gemm"]})
    assert [4096, 3 * 4096] in more
    assert [(32 + 2 * 8) * 128, 2 * 4096] in more


def record_of(results: list[dict[str, Any]], **plan: Any) -> Any:
    told = {"ranks": 2, "cpu": False, "no_p2p": False, "quick": False, "nvlink": True, **plan}
    return Record(
        kind="calibration", name="box", date="2026-08-01", source="specsim calibrate",
        environment={"gpu": "Test", "memory_bytes": 80e9, "plan": told}, samples=results,
    )  # fmt: skip


def reduce_at(seconds: float, kind: str = "nccl", status: str = "done") -> dict[str, Any]:
    found = result("allreduce", kind, seconds, nbytes=4096, ranks=2, mode="graph", bytes=4096)
    return found if status == "done" else {**found, "status": status, "error": "rank 0: planted"}


def test_later_records_of_a_box_add_to_the_first() -> None:
    """A kernel that failed and is measured later comes in; what fails later takes nothing away; a repeat replaces."""
    first = record_of([*gemms(), *peaks(), reduce_at(9e-6), reduce_at(0.0, "custom", "failed")])
    later = record_of([reduce_at(7e-6), reduce_at(3e-6, "custom")])
    failing = record_of([reduce_at(0.0, status="failed")])
    joined = calibrate.rebuild([first, later, failing])
    assert {c.implementation: c.latency_us for c in joined.profile.allreduce} == {"custom": [3.0], "nccl": [7.0]}
    assert "gemm_bf16" in joined.fits
    assert not any("custom" in w for w in joined.warnings)


def test_what_went_wrong_in_a_run_outlives_its_fits() -> None:
    """Troubles of a run come back from its record, each once, and are in the next record again."""
    hung = "nccl-tree: hung for 60 s: nccl-tree ranks 2, mode graph, bytes 4096 (rank 1 in it)"
    environment = {"gpu": "Test", "memory_bytes": 80e9}
    first = calibrate.build("box", [*gemms(), *peaks()], environment, ranks=2, troubles=[hung, "GPU 1 was throttled"])
    later = calibrate.build("box", [reduce_at(7e-6)], environment, ranks=2, troubles=[hung, "interrupted"])
    joined = calibrate.rebuild([calibrate.rebuild([first.record]).record, later.record])
    assert joined.warnings[:3] == [hung, "GPU 1 was throttled", "interrupted"]
    assert joined.record.caveats == joined.warnings
    assert "troubles" not in joined.profile.environment


def test_a_kernel_that_could_not_be_used_is_told_once() -> None:
    trouble = "sgl_kernel's fused norm is not used: RuntimeError: wrong result"
    norms = [
        {**result("small", "norm", 2e-6 + rows * 1e-9, nbytes=rows * 1e4, rows=rows), "extras": {"trouble": trouble}}
        for rows in (1, 16, 128)
    ]
    made = build("x", [*gemms(), *peaks(), *norms], {"gpu": "Test GPU"}, ranks=1, date="2026-11-29")
    assert made.warnings.count(f"norm: {trouble}") == 1


def test_a_record_with_other_peer_access_lends_what_does_not_depend_on_it() -> None:
    off = record_of([reduce_at(20e-6)], no_p2p=True, nvlink=False)
    on = record_of([*gemms(), *peaks(), reduce_at(7e-6), reduce_at(3e-6, "custom")])
    joined = calibrate.rebuild([off, on]).profile
    assert [(c.implementation, c.latency_us) for c in joined.allreduce] == [("nccl", [20.0])]
    assert joined.operators["gemm_bf16"].fixed_us == pytest.approx(4.5, rel=0.05)


def test_a_record_of_one_gpu_lends_what_one_does_alone() -> None:
    """Four products of the whole box failed; one GPU of it measured them later, and its own all-reduce stays out."""
    failed = [{**g, "status": "failed", "error": "x"} for g in gemms()]
    box = record_of([*failed, *peaks(), reduce_at(7e-6)])
    alone = record_of([*gemms(), reduce_at(3e-6)], ranks=1)
    joined = calibrate.rebuild([box, alone]).profile
    assert (joined.gpus, [c.latency_us for c in joined.allreduce]) == (2, [[7.0]])
    assert joined.operators["gemm_bf16"].fixed_us == pytest.approx(4.5, rel=0.05)


def test_of_records_that_lend_the_later_counts() -> None:
    """A kernel of 2 us, which one GPU measured at 3 us first and later at 5: without own samples of the box 5, with them 2."""

    def norms(seconds: float) -> list[dict[str, Any]]:
        return [result("small", "norm", seconds, nbytes=rows * 1e3, rows=rows, width=64) for rows in (1, 2, 4)]

    early, late = (record_of([*gemms(), *norms(s)], ranks=1) for s in (3e-6, 5e-6))
    for own, expected in (([], 5e-6), (norms(2e-6), 2e-6)):
        box = record_of([*peaks(), reduce_at(7e-6), *own])
        assert calibrate.rebuild([box, early, late]).fits["norm"].fixed_s == pytest.approx(expected, rel=0.01)


def test_records_of_other_boxes_do_not_join() -> None:
    from specsim.errors import InputError

    other = record_of(peaks())
    other.environment["gpu"] = "Other GPU"
    with pytest.raises(InputError, match="is of Other GPU, box of Test"):
        calibrate.rebuild([record_of(peaks()), other])
    with pytest.raises(InputError, match="no record"):
        calibrate.rebuild([])


def _damages(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place of a document, the first two of each list, with what may stand there instead; DELETE takes it out."""
    for wrong in (DELETE, None, "x", -1, [], {}) if place else ():
        yield place, wrong
    several = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in several:
        yield from _damages(inner, (*place, key))


DELETE = object()


def test_a_damaged_record_is_refitted_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever one value of the file becomes, the answer is a profile or a line that names the record."""
    from specsim.errors import InputError
    from specsim.records import Record

    monkeypatch.setattr(calibrate, "fits", lambda *arguments: {})  # nothing depends on their numbers
    samples = [*gemms()[:1], *peaks(), reduce_at(9e-6), reduce_at(0.0, "custom", "failed")]
    whole = record_of(samples).model_dump(by_alias=True)
    refused = []
    for place, wrong in _damages(whole):
        damaged = copy.deepcopy(whole)
        within = damaged
        for key in place[:-1]:
            within = within[key]
        if wrong is DELETE:
            del within[place[-1]]
        else:
            within[place[-1]] = wrong
        try:
            calibrate.rebuild([Record.model_validate(damaged)])
        except ValidationError:
            pass  # the command says which key
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert all(line.startswith(("box", "x: ", ": ")) for line in refused)  # the name may be the damaged value


def test_what_a_record_tells_again_asks_for_no_measurement_to_go_on() -> None:
    """Troubles of a run are told again, without what its user could have done then."""
    record = record_of([*gemms(), *peaks()])
    record.environment["troubles"] = [
        "not all was measured in 100 s: run the same line with --resume for the rest",
        "moe: not compiled within 30 s, so not measured; --resume lets it go on",
        "GPU 1 was throttled while measured (power cap): clocks down to 1680 MHz",
    ]
    joined = calibrate.rebuild([record])
    assert joined.warnings[:3] == [
        "not all was measured in 100 s",
        "moe: not compiled within 30 s, so not measured",
        "GPU 1 was throttled while measured (power cap): clocks down to 1680 MHz",
    ]


def test_a_kernel_in_two_ways_is_named_once() -> None:
    one, two, three = gemms()[:3]
    names = ("flash-attention-3", "flash-attention-3, scheduled once a pass", "own triton")
    samples = [{**s, "extras": {**s["extras"], "kernel": k}} for s, k in zip((one, two, three), names, strict=True)]
    note = calibrate.rebuild([record_of([*samples, *peaks()])]).profile.operators["gemm_bf16"].note
    assert note.endswith("; kernel: flash-attention-3, some scheduled once a pass and own triton")


def test_a_refit_writes_only_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without -o it shows the profile and leaves the folder of the record as it was; with -o it writes there alone."""
    from specsim.commands.calibrate import command

    given = tmp_path / "given"
    given.mkdir()
    record = given / "box.record.json"
    record.write_text(record_of([*gemms(), *peaks()]).model_dump_json(by_alias=True))
    before = record.read_text()
    command.main(["--refit", str(record)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "gemm_bf16" in shown
    assert shown.endswith("Wrote nothing: give -o FILE to keep the profile.\n")
    command.main(["--refit", str(record), "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    assert document["profile"] is document["record"] is None
    with pytest.raises(InputError, match="is a record that is fitted; name the profile's file"):
        command.main(["--refit", str(record), "-o", str(record)], standalone_mode=False)
    command.main(["--refit", str(record), "-o", str(tmp_path / "new.yaml")], standalone_mode=False)
    assert f"Wrote {tmp_path / 'new.yaml'} and new.record.json." in capsys.readouterr().out.replace("\n", " ")
    assert [path.name for path in given.iterdir()] == ["box.record.json"]
    assert record.read_text() == before


def test_the_older_kernel_stands_in_for_the_newer_one() -> None:
    joined = calibrate.rebuild([record_of([*gemms(), *peaks(), reduce_at(4e-6, "custom-v1")])]).profile
    stand_in = next(c for c in joined.allreduce if c.implementation == "custom")
    assert stand_in.latency_us == [4.0]
    assert "stands in" in stand_in.note


@pytest.mark.parametrize("staged", [False, True])
def test_what_walking_takes_comes_back(staged: bool) -> None:
    """Products of four inner widths whose samples were made with 2 ns a value, inside the root or beside the fixed time; where
    nothing is walked, nothing is found."""
    inner = np.tile([512.0, 2048.0, 4096.0, 7168.0], 6)
    nbytes = np.repeat([1e6, 4e6, 1e7, 4e7, 1e8, 3e8], 4)
    noise = np.exp(np.random.default_rng(1).normal(0, 0.01, len(inner)))
    none = np.zeros_like(inner)
    walk = 2e-9 * inner
    start = FIXED + (walk if staged else none)
    seconds = noise * operator_seconds(start, nbytes / BANDWIDTH, none, none if staged else walk)
    found = fit(seconds, nbytes, none, bandwidth=1e12, peak=None, inner=inner, staged=staged, fastest=5e12)
    assert found.inner_s == pytest.approx(2e-9, rel=0.05)
    assert found.bytes_per_s == pytest.approx(BANDWIDTH, rel=0.05)
    assert found.scatter < 0.02
    flat = noise * operator_seconds(np.asarray(FIXED), nbytes / BANDWIDTH)
    assert fit(flat, nbytes, none, bandwidth=1e12, peak=None, inner=inner, staged=staged).inner_s == 0.0


@pytest.mark.parametrize(("measure", "name"), [("gemm", "gemm_bf16"), ("moe", "moe_bf16")])
def test_a_class_is_fitted_as_it_is_priced(measure: str, name: str) -> None:
    """Samples that take what the machine says of 2 ns a value of inner width, inside the root or beside the fixed time: they are
    all on the fitted line."""
    here = build_machine(profile(), quiet())
    at = Rate(*(np.asarray(x) for x in (FIXED, BANDWIDTH, PEAK)), "measured", np.asarray(2e-9))
    machine = replace(here, rates={**here.rates, name: at})
    samples = []
    for inner in (512.0, 2048.0, 7168.0):
        for nbytes in (1e6, 4e6, 2e7, 1e8):
            moved, none, walked = (np.asarray(x)[()] for x in (nbytes, 0.0, inner))
            seconds, _ = machine.price(Operator("", name, 1, 1), moved, none, walked, 0)
            sizes = {"k": inner} if measure == "gemm" else {"hidden": inner - 128, "intermediate": 128}
            samples.append(result(measure, name, float(seconds), nbytes=nbytes, **sizes))
    found = class_fits.fits(samples, BANDWIDTH, PEAK)[name]
    assert found.inner_s == pytest.approx(2e-9, rel=0.01)
    assert np.abs(found.residuals).max() < 1e-3


@pytest.mark.parametrize("processors", [132, 78])
def test_what_a_part_of_a_latent_cache_takes_comes_back(processors: int) -> None:
    """14 us + 60 ns a part + bytes / 4 TB/s: few sequences are cut into many parts, b / (1 + 1.1 b x batch / processors) of b
    blocks of 64. The profile names the processors, and the note what is slow."""
    samples = []
    for batch, context in (
        (1, 1024),
        (1, 8192),
        (1, 32768),
        (4, 4096),
        (8, 2048),
        (32, 1024),
        (32, 4096),
        (64, 1024),
        (128, 4096),
    ):
        blocks, nbytes = context / 64, batch * context * 1152.0
        seconds = 14e-6 + 60e-9 * blocks / (1 + 1.1 * blocks * batch / processors) + nbytes / BANDWIDTH
        sizes = {"batch": batch, "context": context, "queries": 1, "heads": 8, "latent": 512, "rope": 64}
        samples.append(result("attention", "attention_mla", seconds, nbytes=nbytes, **sizes))
    record = record_of([*samples, *peaks()])
    record.environment["processors"] = processors
    built = calibrate.rebuild([record])
    found = built.fits["attention_mla"]
    assert found.inner_s == pytest.approx(60e-9, rel=0.02)
    assert found.fixed_s == pytest.approx(14e-6, rel=0.01)
    assert built.profile.gpu.processors == processors
    assert "summing the parts of a cache takes time" in built.profile.operators["attention_mla"].note


def test_a_peak_is_told_only_where_it_limits() -> None:
    """A small excess at the largest samples is no compute limit: the peak is held, and says so."""
    nbytes = np.array([1e6, 4e6, 1e7, 4e7, 1e8, 3e8, 5e8, 6e8])
    flops = nbytes * PEAK / BANDWIDTH / 3  # a third of what would balance
    seconds = operator_seconds(np.asarray(FIXED), nbytes / BANDWIDTH, flops / PEAK)
    found = fit(seconds, nbytes, flops, bandwidth=1e12, peak=5e14)
    assert found.flops_per_s is None
    assert "peak" in found.held


def test_the_spread_holds_what_it_says() -> None:
    """Four residuals in five lie within 1.28 spreads, however long the tail."""
    residuals = np.concatenate([np.full(8, 0.02), np.full(2, 0.4)])
    found = calibrate.Fit(FIXED, BANDWIDTH, PEAK, 0.0, 0.0, residuals)
    assert np.mean(np.abs(residuals) <= 1.2816 * found.scatter + 1e-12) == pytest.approx(0.8)
