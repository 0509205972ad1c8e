"""Write hardware/*.yaml again, from an installed aiconfigurator_core and the public facts entered below.

    python benchmarks/make_profiles.py [NAME ...] [--out FOLDER]

Table-derived numbers come through specsim.tables, so a newer package gives newer numbers by the same rules; facts
entered by hand carry their source. Profiles measured by `specsim calibrate` are not touched unless named. See
docs/hardware.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from specsim.derive import box_curves, fill, launch, scaled, small_classes
from specsim.prediction import predict
from specsim.profiles import (
    AllReduceCurve,
    Gpu,
    Profile,
    Source,
    SourceKind,
    dump_profile,
    latency_us,
    load_profile,
)
from specsim.scenarios import build as scenario
from specsim.tables import Imported, import_system, release

DATE = "2026-08"


def source(kind: SourceKind, reference: str, date: str = DATE) -> Source:
    return Source(kind=kind, reference=reference, date=date)


# --- GPUs: datasheets; memory is what nvidia-smi reports, in decimal GB -------------------------------------------

DATASHEETS = "NVIDIA datasheets and architecture papers; memory as reported by nvidia-smi"


def gpu(name: str, *figures: float, capability: str, note: str = "") -> Gpu:
    """figures: memory GB, bandwidth GB/s, dense bf16 TFLOPS, L2 MB, power W."""
    memory, bandwidth, tflops, l2, watts = figures
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


FP32 = "bf16 with fp32 accumulation"
H200 = gpu("NVIDIA H200", 150.8, 4800, 989, 60, 700, capability="9.0")
H100 = gpu("NVIDIA H100 SXM 80GB", 85.5, 3350, 989, 50, 700, capability="9.0")
A100 = gpu("NVIDIA A100 SXM 80GB", 85.9, 2039, 312, 40, 400, capability="8.0")
B200 = gpu("NVIDIA B200", 192.3, 8000, 2250, 126, 1000, capability="10.0")
L40S = gpu("NVIDIA L40S", 48.3, 864, 362, 96, 350, capability="8.9")
RTX_4090 = gpu("NVIDIA GeForce RTX 4090", 25.8, 1008, 165.2, 72, 450, capability="8.9", note=FP32)
RTX_5090 = gpu("NVIDIA GeForce RTX 5090", 34.2, 1792, 209.5, 96, 575, capability="12.0", note=FP32)
RTX_PRO = gpu(
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", 102.6, 1792, 467.8, 128, 600, capability="12.0",
    note="bf16 at the 2430 MHz observed",
)  # fmt: skip


# --- all-reduce: other public curves (us by bytes) -----------------------------------------------------------------

RTX6K = "local-inference-lab/rtx6kpro at e2c2b95,"


def curve(
    name: str, points: dict[int, float], reference: str, note: str, *, ranks: int = 8, kind: SourceKind = "published"
) -> AllReduceCurve:
    return AllReduceCurve(
        implementation=name,
        ranks=ranks,
        mode="graph",
        bytes=list(points),
        latency_us=list(points.values()),
        relative_uncertainty=0.3 if kind == "fitted" else 0.2,
        source=source(kind, reference),
        note=note,
    )


RTX_EXTRA = (
    curve(
        "oneshot",
        {
            1024: 6.1,
            4096: 6.45,
            16384: 7.7,
            32768: 9.2,
            65536: 11.8,
            131072: 17.6,
            262144: 28.7,
            524288: 51.0,
            2**20: 95.6,
        },
        f"{RTX6K} optimization/pcie-oneshot-allreduce.md",
        "PCIe one-shot kernel, 4 GPUs on one NUMA node",
        ranks=4,
    ),
    curve(
        "oneshot",
        {256: 7.5, 1024: 7.5, 8192: 9.2, 32768: 16.5, 65536: 25.9, 262144: 73.6},
        f"{RTX6K} models/kimi-k25.md",
        "custom kernel, one CPU with PCIe switches; on a box with other switches the idea collapsed to 64 us at 8 KB",
    ),
    curve(
        "nccl-switched",
        {4096: 17.3, 16384: 17.3, 65536: 25.0, 262144: 25.1, 2**20: 80.0, 2**22: 182.4},
        f"{RTX6K} hardware/wrx90-cpayne-8gpu-root-topology-comparison.md",
        "NCCL ring behind two PCIe switches at one root",
    ),
    curve(
        "nccl-untuned",
        {32768: 48.16, 65536: 48.69, 131072: 51.56, 262144: 56.48},
        f"{RTX6K} optimization/nccl-tuning.md",
        "NCCL on a dual-socket box where it detects 0.1 GB/s links and picks the Simple protocol on two channels",
    ),
)
L40S_EXTRA = (
    curve(
        "nccl-other-host",
        {
            1024: 22.2,
            4096: 23.0,
            16384: 25.7,
            32768: 29.3,
            65536: 32.9,
            131072: 46.7,
            262144: 75.8,
            524288: 136,
            2**20: 194,
        },
        "aiconfigurator_core 0.12.0 l40s/comm/custom_allreduce_perf (sglang 0.5.12; SGLang_CustomAllReduce_graph)",
        "another 8x L40S host: a third of this box's latency at 64 KB and above",
    ),
)

# --- boxes ---------------------------------------------------------------------------------------------------------

Link = Literal["none", "nvlink", "pcie"]


@dataclass(frozen=True)
class Box:
    name: str
    text: str
    gpu: Gpu
    gpus: int
    link: Link
    system: str  # whose tables
    caveats: tuple[str, ...] = ()
    extra: tuple[AllReduceCurve, ...] = ()
    like: Gpu | None = None  # the GPU of those tables, where it is another one


LOOP = (
    "all-reduce curves are of back-to-back calls in a loop or graph: between a layer's kernels, with the ranks' skew, "
    "one takes 2 to 3 us more"
)
TABLES = "operator times are from public tables, not from this box: run specsim calibrate for your own"
HOSTS = "public all-reduce tables of two 8x L40S hosts differ by about three times from 64 KB on: measure yours"
TRITON_MLA = (
    "Triton MLA on this GPU is bound by latency, not bytes, between 2K and 32K of context at small batch "
    "(30 to 88 us at batch 1): predictions there are too low"
)
NO_TABLE = "no public operator table: datasheet bandwidth x the efficiency of the {} (the same architecture)"
PUBLISHED = "published operator tables"
PRO = "rtx_pro_6000_server"

BOXES = [
    Box("1x-h200-published", f"One H200 SXM, {PUBLISHED}", H200, 1, "none", "h200_sxm", caveats=(TABLES,)),
    Box(
        "2x-h200-published", f"Two H200 SXM, NVLink, {PUBLISHED}",
        H200, 2, "nvlink", "h200_sxm", caveats=(TABLES, LOOP),
    ),
    Box("8x-h200", f"Eight H200 SXM, NVLink, {PUBLISHED}", H200, 8, "nvlink", "h200_sxm", caveats=(TABLES, LOOP)),
    Box("8x-h100", f"Eight H100 SXM, NVLink, {PUBLISHED}", H100, 8, "nvlink", "h100_sxm", caveats=(TABLES, LOOP)),
    Box("8x-a100", f"Eight A100 SXM 80GB, NVLink, {PUBLISHED}", A100, 8, "nvlink", "a100_sxm", caveats=(TABLES, LOOP)),
    Box("8x-b200", f"Eight B200 SXM, NVLink, {PUBLISHED}", B200, 8, "nvlink", "b200_sxm", caveats=(TABLES, LOOP)),
    Box(
        "8x-l40s", f"Eight L40S, PCIe Gen4, {PUBLISHED}",
        L40S, 8, "pcie", "l40s", caveats=(TABLES, LOOP, HOSTS), extra=L40S_EXTRA,
    ),
    Box(
        "1x-rtx-pro-6000", f"One RTX PRO 6000 Blackwell, {PUBLISHED}",
        RTX_PRO, 1, "none", PRO, caveats=(TABLES, TRITON_MLA),
    ),
    Box(
        "8x-rtx-pro-6000", f"Eight RTX PRO 6000 Blackwell, PCIe Gen5 with a healthy all-reduce, {PUBLISHED}",
        RTX_PRO, 8, "pcie", PRO, caveats=(TABLES, LOOP, TRITON_MLA), extra=RTX_EXTRA,
    ),
    Box(
        "1x-rtx-4090", "One GeForce RTX 4090, scaled from L40S tables",
        RTX_4090, 1, "none", "l40s", caveats=(NO_TABLE.format("L40S"),), like=L40S,
    ),
    Box(
        "1x-rtx-5090", "One GeForce RTX 5090, scaled from RTX PRO 6000 tables",
        RTX_5090, 1, "none", PRO, caveats=(NO_TABLE.format("RTX PRO 6000"),), like=RTX_PRO,
    ),
]  # fmt: skip

_cache: dict[str, Imported] = {}


def tables(system: str, l2_mb: float | None) -> Imported:
    if system not in _cache:
        _cache[system] = import_system(system, l2_mb=l2_mb, date=DATE, reference=release())
    return _cache[system]


def build(box: Box) -> Profile:
    found = tables(box.system, (box.like or box.gpu).l2_mb)
    rates = found.operators if box.like is None else scaled(found.operators, box.gpu, box.like)
    return Profile(
        name=box.name,
        description=box.text,
        gpus=box.gpus,
        link=box.link,
        gpu=box.gpu,
        operators=fill(rates | small_classes(box.gpu, box.system), DATE),
        allreduce=[*box_curves(found, box.gpus, box.link), *box.extra] if box.gpus > 1 else [],
        launch=launch(),
        caveats=list(box.caveats),
    )


# --- the field box: a curve inferred from two step times -----------------------------------------------------------

FIELD_SIZES = (14336, 43008)  # bytes: one and three rows of 7168 bf16 values
FIELD_TIMES = (12.1, 29.48)  # ms: decode, and a verify of three rows
FIELD_SOURCE = (
    "inferred from two step times of one 8-GPU PCIe box: Kimi-K2.5 INT4, SGLang, TP 8, batch 1, decode 12.1 ms and a "
    "3-row verify 29.5 ms; healthy RTX PRO 6000 operators assumed for the rest"
)
FIELD_NOTE = (
    "two numbers fitted to two step times, so nothing is left to check them; below 14 KB the healthy box, above 43 KB "
    "the healthy box and what the second point lies above it"
)
FIELD_CAVEATS = [
    "the all-reduce curve is inferred from two step times, not measured: {:.0f} us at 14 KB and {:.0f} us at 43 KB",
    "a verify launched eagerly, kernel by kernel outside a CUDA graph, explains them as well",
    "experts of three rows explain about 2 ms of the 17 ms between the two steps, a healthy all-reduce under 1 ms",
    "plain decode at batch 3 and 4 tells: about 29 ms means all-reduce or experts, 15 to 17 ms the verify path",
    "the GPU model was not recorded; 8x RTX PRO 6000 Blackwell is the likely one",
]


def field_box(healthy: Profile) -> Profile:
    """The PCIe box of the field report: healthy operators, and an all-reduce curve that explains both step times.

    Both step times are nearly linear in the two latencies, with one call for each of about 123 sums, so a few
    corrections by (measured - predicted) / 123 settle them.
    """
    calls = 123
    points = [30.0, 150.0]
    for _ in range(30):
        box = _with_curve(healthy, points)
        p = predict(scenario(hardware=box, draft_tokens=3), samples=0)
        assert p.verify_ms is not None
        found = (p.decode_ms.value, p.verify_ms.value)
        points = [us + (ms - got) * 1e3 / calls for us, ms, got in zip(points, FIELD_TIMES, found, strict=True)]
    return _with_curve(healthy, [round(us, 1) for us in points])


def _with_curve(healthy: Profile, points: list[float]) -> Profile:
    base = next(c for c in healthy.allreduce if (c.implementation, c.ranks, c.mode) == ("nccl", healthy.gpus, "graph"))
    first, second = FIELD_SIZES
    extra = points[1] - (latency_us(base, second) or 0.0)
    small = [(s, us) for s, us in zip(base.bytes, base.latency_us, strict=True) if s < first / 2]
    latencies = {size: min(us, points[0]) for size, us in small}  # a larger message is never faster
    latencies |= dict(zip(FIELD_SIZES, points, strict=True))
    latencies |= {size: us + extra for size, us in zip(base.bytes, base.latency_us, strict=True) if size > second}
    steep = curve("nccl", {s: round(us, 1) for s, us in latencies.items()}, FIELD_SOURCE, FIELD_NOTE, kind="fitted")
    others = [
        c for c in healthy.allreduce if c.mode == "graph" and c.ranks < healthy.gpus and c.implementation != "oneshot"
    ]
    changes = {
        "name": "8x-pcie-field",
        "description": "Eight PCIe GPUs of a field report: RTX PRO 6000 operators, all-reduce inferred",
        "allreduce": [*others, steep],
        "caveats": [caveat.format(*points) for caveat in FIELD_CAVEATS],
    }
    return healthy.model_copy(update=changes)


def profiles() -> dict[str, Callable[[], Profile]]:
    boxes = {box.name: box for box in BOXES}
    result: dict[str, Callable[[], Profile]] = {n: partial(build, box) for n, box in boxes.items()}
    result["8x-pcie-field"] = lambda: field_box(load_profile("8x-rtx-pro-6000"))
    for name in ("1x-h200", "2x-h200"):
        twin = boxes[f"{name}-published"]
        result[name] = partial(build, replace(twin, name=name))
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
