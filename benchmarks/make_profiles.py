"""Write hardware/*.yaml again, from an installed aiconfigurator_core and the public facts entered below.

    python benchmarks/make_profiles.py [NAME ...] [--out FOLDER]

Table-derived numbers come through specsim.tables, so a newer package gives newer numbers by the same rules; facts entered
by hand carry their source. Profiles measured by `specsim calibrate` are not touched unless named. See docs/hardware.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specsim.profiles import AllReduceCurve, Gpu, Launch, OperatorRate, Profile, Source, dump_profile
from specsim.tables import Imported, import_system, small_kernels

DATE = "2026-08"


def source(kind: Any, reference: str, date: str = DATE) -> Source:
    return Source(kind=kind, reference=reference, date=date)


# --- GPUs: datasheets; memory is what nvidia-smi reports, in decimal GB -------------------------------------------

DATASHEETS = "NVIDIA datasheets and architecture papers; memory as reported by nvidia-smi"


def gpu(name: str, memory: float, bandwidth: float, tflops: float, l2: float, watts: float, capability: str, note: str = "") -> Gpu:
    return Gpu(
        name=name,
        memory_gb=memory,
        bandwidth_gb_s=bandwidth,
        bf16_tflops=tflops,
        l2_mb=l2,
        power_w=watts,
        compute_capability=capability,
        relative_uncertainty=0.02,
        source=source("datasheet", DATASHEETS),
        note=note,
    )


H200 = gpu("NVIDIA H200", 150.8, 4800, 989, 60, 700, "9.0")
H100 = gpu("NVIDIA H100 SXM 80GB", 85.5, 3350, 989, 50, 700, "9.0")
A100 = gpu("NVIDIA A100 SXM 80GB", 85.9, 2039, 312, 40, 400, "8.0")
B200 = gpu("NVIDIA B200", 192.3, 8000, 2250, 126, 1000, "10.0")
L40S = gpu("NVIDIA L40S", 48.3, 864, 362, 96, 350, "8.9")
RTX_4090 = gpu("NVIDIA GeForce RTX 4090", 25.8, 1008, 165.2, 72, 450, "8.9", "bf16 with fp32 accumulation")
RTX_5090 = gpu("NVIDIA GeForce RTX 5090", 34.2, 1792, 209.5, 96, 575, "12.0", "bf16 with fp32 accumulation")
RTX_PRO = gpu(
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", 102.6, 1792, 467.8, 128, 600, "12.0", "bf16 at the 2430 MHz observed"
)

# --- small kernels: timed on one H200, carried to other GPUs by the ratio of comparable kernels in the tables ------

SMALL_SOURCE = "torch profiler over decode steps of SGLang 0.5.16 on one H200, 61-layer MLA model, hidden size 7168"
SMALL_H200 = {"norm": 3.0, "tiny": 1.4, "router": 4.0}  # us: (Fused)RMSNorm 2.95 and 2.99, elementwise 1.0 to 1.7, top-k 4.01
LIKE = {"norm": "quantize", "tiny": "convolution", "router": "convolution"}  # which table kernel a class scales with
ACTIVATION_SHARE = 0.6  # of the datasheet bandwidth that norms and elementwise kernels reach


def small_classes(box_gpu: Gpu, system: str | None) -> dict[str, OperatorRate]:
    """norm, tiny and router for a GPU; `system` names its tables, None where it has none."""
    reference, here = small_kernels("h200_sxm"), small_kernels(system) if system else {}
    result = {}
    for name, microseconds in SMALL_H200.items():
        if box_gpu.name == H200.name:
            origin, factor, uncertainty, note = source("measured", SMALL_SOURCE, "2026-11"), 1.0, 0.15, ""
        else:
            like = LIKE[name] if LIKE[name] in here else "convolution"
            factor = here[like] / reference[like] if like in here else 1.0
            origin = source("assumed", f"H200 kernel times x {factor:.2f}, the ratio of {like} kernels in aiconfigurator_core tables")
            uncertainty, note = 0.25, f"H200: {microseconds} us ({SMALL_SOURCE})"
        result[name] = OperatorRate(
            fixed_us=round(microseconds * factor, 2),
            bandwidth_gb_s=round(ACTIVATION_SHARE * box_gpu.bandwidth_gb_s),
            relative_uncertainty=uncertainty,
            source=origin,
            note=(note + "; " if note else "") + f"bandwidth: {ACTIVATION_SHARE:.0%} of the datasheet, assumed",
        )
    return result


# --- classes without a table ---------------------------------------------------------------------------------------

Rates = dict[str, OperatorRate]


def stand_in(rates: Rates, like: str, why: str, *, fixed: float = 1.0, bandwidth: float = 1.0, uncertainty: float = 0.25) -> OperatorRate:
    base = rates[like]
    return OperatorRate(
        fixed_us=float(f"{base.fixed_us * fixed:.3g}"),
        bandwidth_gb_s=float(f"{base.bandwidth_gb_s * bandwidth:.4g}"),
        peak_tflops=base.peak_tflops,
        relative_uncertainty=max(uncertainty, base.relative_uncertainty),
        source=source("assumed", f"no table: {why}"),
    )


def fill(rates: Rates) -> None:
    """Classes that the tables lack, from the nearest class that they have. Each says what it stands on."""
    if "gemm_int4" not in rates and "moe_int4" in rates:
        share = min(1.0, rates["moe_int4"].bandwidth_gb_s / rates["moe_bf16"].bandwidth_gb_s)
        why = "gemm_bf16 with the bandwidth that Marlin INT4 experts reach of bf16 experts, fixed x 1.3 for dequantising"
        rates["gemm_int4"] = stand_in(rates, "gemm_bf16", why, fixed=1.3, bandwidth=share)
    if "gemm_int8" not in rates and "gemm_fp8" in rates:
        rates["gemm_int8"] = stand_in(rates, "gemm_fp8", "as gemm_fp8, the same bytes")
    if "gemm_nvfp4" not in rates and "gemm_int4" in rates:
        rates["gemm_nvfp4"] = stand_in(rates, "gemm_int4", "as gemm_int4: without FP4 units it runs weight-only")
    if "gemm_mxfp4" not in rates and "gemm_nvfp4" in rates:
        rates["gemm_mxfp4"] = stand_in(rates, "gemm_nvfp4", "as gemm_nvfp4")
    if "moe_nvfp4" not in rates and "moe_int4" in rates:
        rates["moe_nvfp4"] = stand_in(rates, "moe_int4", "as moe_int4: without FP4 units it runs weight-only", uncertainty=0.3)
    if "moe_mxfp4" not in rates and "moe_nvfp4" in rates:
        rates["moe_mxfp4"] = stand_in(rates, "moe_nvfp4", "as moe_nvfp4", uncertainty=0.3)
    if "moe_fp8" not in rates and "moe_bf16" in rates:
        rates["moe_fp8"] = stand_in(rates, "moe_bf16", "as moe_bf16, fixed x 1.2 for quantising activations", fixed=1.2)
    if "attention_mla" not in rates:
        rates["attention_mla"] = stand_in(rates, "attention_gqa", "attention_gqa, fixed x 1.4 as on H200", fixed=1.4, uncertainty=0.3)
    if "attention_linear" not in rates:
        rates["attention_linear"] = stand_in(rates, "attention_gqa", "attention_gqa, fixed x 0.5", fixed=0.5, uncertainty=0.3)
    if "attention_sparse" not in rates:
        why = "indexer and top-k taken as one attention_mla call and half of its fixed time again"
        rates["attention_sparse"] = stand_in(rates, "attention_mla", why, fixed=1.5, uncertainty=0.4)


# --- launch --------------------------------------------------------------------------------------------------------

LAUNCH_SOURCE = (
    "eager kernels 4 to 6 us from Python engines; graph 15 us and gaps of 0.55 to 0.58 us a node "
    "(ahrefs/ocannl issue 488, NVIDIA/Megatron-LM PR 6453)"
)


def launch(collective: float, note: str) -> Launch:
    return Launch(
        kernel_us=5.0,
        collective_us=collective,
        graph_us=15.0,
        graph_node_us=0.6,
        relative_uncertainty=0.3,
        source=source("assumed", LAUNCH_SOURCE),
        note=note,
    )


PYTHON_H200 = launch(50.0, "collective: 45 to 60 us from Python on one H200 host, whatever the size")
PYTHON_OTHER = launch(40.0, "collective: 20 to 50 us in the eager all-reduce tables of aiconfigurator_core, 45 to 60 us on an H200 host")

# --- all-reduce: other public curves (bytes, us) -------------------------------------------------------------------

RTX6K = "local-inference-lab/rtx6kpro at e2c2b95"


def curve(name: str, ranks: int, points: dict[int, float], reference: str, note: str, kind: str = "published", mode: str = "graph", uncertainty: float = 0.2) -> AllReduceCurve:  # fmt: skip
    return AllReduceCurve(
        implementation=name,
        ranks=ranks,
        mode=mode,  # type: ignore[arg-type]
        bytes=list(points),
        latency_us=list(points.values()),
        relative_uncertainty=uncertainty,
        source=source(kind, reference),
        note=note,
    )


RTX_EXTRA = [
    curve(
        "oneshot", 4, {1024: 6.1, 4096: 6.45, 16384: 7.7, 32768: 9.2, 65536: 11.8, 131072: 17.6, 262144: 28.7, 524288: 51.0, 1048576: 95.6},
        f"{RTX6K} optimization/pcie-oneshot-allreduce.md", "PCIe one-shot kernel, 4 GPUs on one NUMA node",
    ),
    curve(
        "oneshot", 8, {256: 7.5, 1024: 7.5, 8192: 9.2, 32768: 16.5, 65536: 25.9, 262144: 73.6},
        f"{RTX6K} models/kimi-k25.md", "custom kernel on one CPU with PCIe switches; on another box the same idea collapsed to 64 us at 8 KB",
    ),
    curve(
        "nccl-switched", 8, {4096: 17.34, 16384: 17.31, 65536: 25.0, 262144: 25.1, 1048576: 80.0, 4194304: 182.4},
        f"{RTX6K} hardware/wrx90-cpayne-8gpu-root-topology-comparison.md", "NCCL ring behind two PCIe switches at one root",
    ),
    curve(
        "nccl-untuned", 8, {32768: 48.16, 65536: 48.69, 131072: 51.56, 262144: 56.48},
        f"{RTX6K} optimization/nccl-tuning.md", "NCCL that detects 0.1 GB/s links on a dual-socket box and picks Simple on two channels",
    ),
]  # fmt: skip

BACK_TO_BACK = (
    "all-reduce curves are of back-to-back calls in a loop or graph: between a layer's kernels, with the ranks' skew, "
    "one takes 2 to 3 us more"
)


def pcie_curves(found: Imported) -> list[AllReduceCurve]:
    """Above two PCIe-only GPUs the engines' custom kernel is off and the table's 'custom' rows are NCCL: name them so."""
    result = []
    for c in found.allreduce:
        if c.implementation == "custom" and c.ranks > 2:
            note = "above two PCIe-only GPUs the engine's custom kernel is off: this is NCCL as the engine calls it"
            result.append(c.model_copy(update={"implementation": "nccl", "note": note}))
        elif c.implementation == "custom" or (c.implementation == "nccl" and c.ranks == 2):
            result.append(c)
    return sorted(result, key=lambda c: (c.implementation, c.ranks, c.mode))


# --- boxes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    name: str
    description: str
    gpu: Gpu
    gpus: int
    link: str
    system: str | None  # whose tables
    launch: Launch = PYTHON_OTHER
    caveats: tuple[str, ...] = ()
    extra: tuple[AllReduceCurve, ...] = ()
    like: str | None = None  # the system whose efficiency stands in where `system` is None
    like_gpu: Gpu | None = None


H200_CAVEAT = "operator times are from public tables, not from this box: run specsim calibrate for your own"
MLA_RTX = "Triton MLA on this GPU is bound by latency, not bytes, between 2K and 32K of context at small batch (30 to 88 us at batch 1)"

BOXES = [
    Box("1x-h200-published", "One H200 SXM, published operator tables", H200, 1, "none", "h200_sxm", PYTHON_H200, (H200_CAVEAT,)),
    Box("2x-h200-published", "Two H200 SXM over NVLink, published operator tables", H200, 2, "nvlink", "h200_sxm", PYTHON_H200, (H200_CAVEAT, BACK_TO_BACK)),
    Box("8x-h200", "Eight H200 SXM over NVLink, published operator tables", H200, 8, "nvlink", "h200_sxm", PYTHON_H200, (H200_CAVEAT, BACK_TO_BACK)),
    Box("8x-h100", "Eight H100 SXM over NVLink, published operator tables", H100, 8, "nvlink", "h100_sxm", PYTHON_OTHER, (BACK_TO_BACK,)),
    Box("8x-a100", "Eight A100 SXM 80GB over NVLink, published operator tables", A100, 8, "nvlink", "a100_sxm", PYTHON_OTHER, (BACK_TO_BACK,)),
    Box("8x-b200", "Eight B200 SXM over NVLink, published operator tables", B200, 8, "nvlink", "b200_sxm", PYTHON_OTHER, (BACK_TO_BACK,)),
    Box(
        "8x-l40s", "Eight L40S over PCIe Gen4, published operator tables", L40S, 8, "pcie", "l40s", PYTHON_OTHER,
        (BACK_TO_BACK, "public all-reduce tables of two 8x L40S hosts differ by five times at 64 KB: measure yours"),
    ),
    Box("1x-rtx-pro-6000", "One RTX PRO 6000 Blackwell, published operator tables", RTX_PRO, 1, "none", "rtx_pro_6000_server", PYTHON_OTHER, (MLA_RTX,)),
    Box(
        "8x-rtx-pro-6000", "Eight RTX PRO 6000 Blackwell over PCIe Gen5, healthy all-reduce, published operator tables", RTX_PRO, 8,
        "pcie", "rtx_pro_6000_server", PYTHON_OTHER, (BACK_TO_BACK, MLA_RTX), tuple(RTX_EXTRA),
    ),
    Box(
        "1x-rtx-4090", "One GeForce RTX 4090, scaled from L40S tables", RTX_4090, 1, "none", None, PYTHON_OTHER,
        ("no public operator table: datasheet bandwidth x the efficiency of the L40S (the same architecture)",), like="l40s", like_gpu=L40S,
    ),
    Box(
        "1x-rtx-5090", "One GeForce RTX 5090, scaled from RTX PRO 6000 tables", RTX_5090, 1, "none", None, PYTHON_OTHER,
        ("no public operator table: datasheet bandwidth x the efficiency of the RTX PRO 6000 (the same architecture)",),
        like="rtx_pro_6000_server", like_gpu=RTX_PRO,
    ),
]  # fmt: skip

_cache: dict[str, Imported] = {}


def tables(system: str, l2_mb: float | None) -> Imported:
    if system not in _cache:
        try:
            release = version("aiconfigurator_core")
        except PackageNotFoundError:  # unpacked, not installed
            release = "0.12.0"
        _cache[system] = import_system(system, l2_mb=l2_mb, date=DATE, reference=f"aiconfigurator_core {release}")
    return _cache[system]


def scaled(rates: Rates, target: Gpu, like: Gpu) -> Rates:
    """Rates of a GPU without tables: the same fixed times, bandwidth and peak in proportion to the datasheets."""
    wide, fast = target.bandwidth_gb_s / like.bandwidth_gb_s, target.bf16_tflops / like.bf16_tflops
    result = {}
    for name, rate in rates.items():
        result[name] = OperatorRate(
            fixed_us=rate.fixed_us,
            bandwidth_gb_s=float(f"{rate.bandwidth_gb_s * wide:.4g}"),
            peak_tflops=float(f"{rate.peak_tflops * fast:.3g}") if rate.peak_tflops else None,
            relative_uncertainty=max(0.25, rate.relative_uncertainty),
            source=source("assumed", f"datasheet bandwidth x the efficiency of {like.name}; there: {rate.source.reference}"),
        )
    return result


def build(box: Box) -> Profile:
    system = box.system or box.like
    assert system is not None
    found = tables(system, (box.like_gpu or box.gpu).l2_mb)
    rates = dict(found.operators)
    if box.like_gpu is not None:
        rates = scaled(rates, box.gpu, box.like_gpu)
    fill(rates)
    rates |= small_classes(box.gpu, system)
    curves: list[AllReduceCurve] = []
    if box.gpus > 1:
        curves = pcie_curves(found) if box.link == "pcie" else found.allreduce
        curves = [c for c in curves if c.ranks <= box.gpus] + list(box.extra)
    return Profile(
        name=box.name,
        description=box.description,
        gpus=box.gpus,
        link=box.link,  # type: ignore[arg-type]
        gpu=box.gpu,
        operators=dict(sorted(rates.items())),
        allreduce=curves,
        launch=box.launch,
        caveats=list(box.caveats),
    )


def renamed(profile: Profile, name: str, description: str) -> Profile:
    return profile.model_copy(update={"name": name, "description": description})


# --- the field box: a curve inferred from two step times -----------------------------------------------------------

FIELD_POINTS = {14336: 30.0, 43008: 150.0}  # us: one and three rows of 7168 bf16 values
FIELD_SHAPE = {65536: 164.5, 131072: 279.9, 262144: 426.0, 524288: 502.6, 1048576: 863.2, 2097152: 2618.2}
FIELD_SHAPE_43008 = 113.5  # that curve at 43,008 B
FIELD_SOURCE = (
    "inferred from two step times of one 8-GPU PCIe box: Kimi-K2.5 INT4, SGLang, TP 8, batch 1, decode 12.1 ms and a "
    "3-row verify 29.5 ms; healthy RTX PRO 6000 operators assumed for the rest"
)


def field_box(healthy: Profile) -> Profile:
    """The PCIe box of the field report: healthy operators, and an all-reduce curve that explains both step times."""
    points = {1024: 26.0, 4096: 27.0, **FIELD_POINTS}
    points |= {size: round(us * FIELD_POINTS[43008] / FIELD_SHAPE_43008, 1) for size, us in FIELD_SHAPE.items()}
    note = (
        "two numbers fitted to two step times, so nothing is left to check them; below 14 KB the healthy box, above 43 KB the shape "
        "of the 8x L40S NCCL 2.27.3 table of aiconfigurator_core, scaled to pass through the second point"
    )
    steep = curve("nccl", 8, points, FIELD_SOURCE, note, kind="fitted", uncertainty=0.3)
    others = [c for c in healthy.allreduce if c.implementation in ("nccl", "custom") and c.ranks < 8]
    return healthy.model_copy(
        update={
            "name": "8x-pcie-field",
            "description": "Eight PCIe GPUs of a field report (GPU model not recorded): RTX PRO 6000 operators, all-reduce inferred",
            "allreduce": [*others, steep],
            "caveats": [
                "the all-reduce curve is inferred from two step times, not measured: about 30 us at 14,336 B and 150 us at 43,008 B",
                "another explanation fits as well: a verify launched eagerly, about 2,200 kernels and 122 all-reduces outside a CUDA graph",
                "expert bytes of three rows explain about 2 ms of the 17 ms between the two steps, a healthy all-reduce curve less than 1 ms",
                "plain decode at batch 3 and 4 tells them apart: about 29 ms means all-reduce or experts, 15 to 17 ms the verify path",
                "the GPU model was not recorded; 8x RTX PRO 6000 Blackwell is the likely one",
            ],
        }
    )


def profiles() -> dict[str, Callable[[], Profile]]:
    boxes = {box.name: box for box in BOXES}
    result: dict[str, Callable[[], Profile]] = {name: (lambda b=box: build(b)) for name, box in boxes.items()}  # type: ignore[misc]
    result["8x-pcie-field"] = lambda: field_box(build(boxes["8x-rtx-pro-6000"]))
    for name in ("1x-h200", "2x-h200"):
        twin = boxes[f"{name}-published"]
        result[name] = lambda t=twin, n=name: build(replace(t, name=n))  # type: ignore[misc]
    return result


MEASURED_LATER = ("1x-h200", "2x-h200")  # replaced by `specsim calibrate`: written only when absent or named


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="profiles to write; all but measured ones by default")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "hardware")
    arguments = parser.parse_args()
    for name, make in profiles().items():
        target = arguments.out / f"{name}.yaml"
        if arguments.names and name not in arguments.names:
            continue
        if not arguments.names and name in MEASURED_LATER and target.exists():
            continue
        target.write_text(dump_profile(make()), encoding="utf-8")
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
