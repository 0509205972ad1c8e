"""Whole profiles from partial knowledge: what no table holds, derived from what is known and marked "assumed".

`from_tables` joins the fitted tables of a system (specsim.tables) with the classes derived here, so that a profile is
complete; docs/hardware.md gives the reasoning of each rule. Times in us and rates in GB/s, as in a profile.
"""

from __future__ import annotations

from specsim.errors import InputError
from specsim.profiles import AllReduceCurve, Gpu, Launch, OperatorRate, Profile, Source
from specsim.tables import PACKAGE, Imported, import_system, small_kernels

Rates = dict[str, OperatorRate]

SMALL_SYSTEM = "h200_sxm"  # whose small kernels were timed
SMALL_SOURCE = "torch profiler over decode steps of SGLang 0.5.16 on one H200, hidden size 7168"
SMALL_DATE = "2026-11"
SMALL_US = {"norm": 3.0, "tiny": 1.4, "router": 4.0}  # RMSNorm 2.95 and 2.99; elementwise 1.0 to 1.7; top-k 4.01
SMALL_LIKE = {
    "norm": "quantize",
    "tiny": "convolution",
    "router": "convolution",
}  # which kernel of the tables scales it
SMALL_RATIOS = (0.5, 2.0)  # beyond, the tables were timed differently
OLDER_RATIO = 1.4  # then the ratio of the SM clocks of Hopper and Ampere
ACTIVATION_SHARE = 0.6  # of the datasheet bandwidth that norms and elementwise kernels reach

LAUNCH_SOURCE = (
    "eager kernels 4 to 6 us from Python engines; a graph 15 us and 0.55 to 0.58 us between its nodes "
    "(ahrefs/ocannl issue 488, NVIDIA/Megatron-LM PR 6453)"
)
COLLECTIVE_US = 32.0
COLLECTIVE_NOTE = (
    "collective: 20 to 50 us in the eager all-reduce tables of aiconfigurator_core, 25 to 50 us on H200 hosts"
)


def launch(date: str = "2026-08") -> Launch:
    """Launch costs that hold for any NVIDIA GPU driven from Python."""
    return Launch(
        kernel_us=5.0,
        collective_us=COLLECTIVE_US,
        graph_us=15.0,
        graph_node_us=0.6,
        relative_uncertainty=0.3,
        source=Source(kind="assumed", reference=LAUNCH_SOURCE, date=date),
        note=COLLECTIVE_NOTE,
    )


def small_classes(gpu: Gpu, system: str) -> Rates:
    """norm, tiny and router: H200 kernel times, carried over by the ratio of a comparable kernel in both tables."""
    reference, here = small_kernels(SMALL_SYSTEM), small_kernels(system)
    result = {}
    for name, microseconds in SMALL_US.items():
        source = Source(kind="measured", reference=SMALL_SOURCE, date=SMALL_DATE)
        factor, uncertainty = 1.0, 0.15
        if system != SMALL_SYSTEM:
            like = SMALL_LIKE[name] if SMALL_LIKE[name] in here else "convolution"
            factor, uncertainty = here.get(like, 0.0) / reference.get(like, 1.0), 0.25
            why = f"the ratio of {like} kernels in both tables"
            if not SMALL_RATIOS[0] <= factor <= SMALL_RATIOS[1]:
                factor, why = OLDER_RATIO, "the ratio of SM clocks, since no table compares"
            source = Source(
                kind="assumed",
                reference=f"{microseconds} us on H200 ({SMALL_SOURCE}) x {factor:.2f}, {why}",
                date=SMALL_DATE,
            )
        result[name] = OperatorRate(
            fixed_us=round(microseconds * factor, 2),
            bandwidth_gb_s=round(ACTIVATION_SHARE * gpu.bandwidth_gb_s),
            relative_uncertainty=uncertainty,
            source=source,
            note=f"bandwidth: {ACTIVATION_SHARE:.0%} of the datasheet, assumed",
        )
    return result


def fill(rates: Rates, date: str = "2026-08") -> Rates:
    """The rates with the classes that the tables lack, each from the nearest class that they have and saying so."""
    rates = dict(rates)

    def add(
        name: str, like: str, why: str, fixed: float = 1.0, bandwidth: float = 1.0, uncertainty: float = 0.25
    ) -> None:
        if name in rates or like not in rates:
            return
        base = rates[like]
        rates[name] = OperatorRate(
            fixed_us=float(f"{base.fixed_us * fixed:.3g}"),
            inner_ns=float(f"{base.inner_ns * fixed:.3g}"),
            bandwidth_gb_s=float(f"{base.bandwidth_gb_s * bandwidth:.4g}"),
            peak_tflops=base.peak_tflops,
            relative_uncertainty=max(uncertainty, base.relative_uncertainty),
            source=Source(kind="assumed", reference=f"no table: {why}", date=date),
        )

    marlin = 1.0
    if "moe_int4" in rates and "moe_bf16" in rates:
        marlin = min(1.0, rates["moe_int4"].bandwidth_gb_s / rates["moe_bf16"].bandwidth_gb_s)
    why = "gemm_bf16 with the share of its bandwidth that INT4 experts reach of bf16 ones, fixed x 1.3 to dequantise"
    add("gemm_int4", "gemm_bf16", why, fixed=1.3, bandwidth=marlin)
    add("gemm_int8", "gemm_fp8", "as gemm_fp8, which reads the same bytes")
    add("gemm_nvfp4", "gemm_int4", "as gemm_int4, since weights of 4 bits are dequantised where FP4 units lack")
    add("gemm_mxfp4", "gemm_nvfp4", "as gemm_nvfp4")
    add(
        "moe_nvfp4",
        "moe_int4",
        "as moe_int4, since weights of 4 bits are dequantised where FP4 units lack",
        uncertainty=0.3,
    )
    add("moe_mxfp4", "moe_nvfp4", "as moe_nvfp4", uncertainty=0.3)
    add("moe_fp8", "moe_bf16", "as moe_bf16, fixed x 1.2 to quantise activations", fixed=1.2)
    add("attention_mla", "attention_gqa", "attention_gqa, fixed x 1.35 as on H200", fixed=1.35, uncertainty=0.3)
    add("attention_linear", "attention_gqa", "attention_gqa, fixed x 0.5", fixed=0.5, uncertainty=0.3)
    why = "aiconfigurator_core times a paged fp8 indexer at 3 to 5 us and top-k at 4 to 13 us: as much as attention_gqa"
    add("attention_sparse", "attention_gqa", why, bandwidth=0.3, uncertainty=0.4)
    return dict(sorted(rates.items()))


def scaled(rates: Rates, gpu: Gpu, like: Gpu) -> Rates:
    """Rates of a GPU without tables: the fixed times of `like`, bandwidth and peak in proportion to the datasheets."""
    wide, fast = gpu.bandwidth_gb_s / like.bandwidth_gb_s, gpu.bf16_tflops / like.bf16_tflops
    return {
        name: OperatorRate(
            fixed_us=rate.fixed_us,
            inner_ns=rate.inner_ns,
            bandwidth_gb_s=float(f"{rate.bandwidth_gb_s * wide:.4g}"),
            peak_tflops=float(f"{rate.peak_tflops * fast:.3g}") if rate.peak_tflops else None,
            relative_uncertainty=max(0.25, rate.relative_uncertainty),
            source=Source(
                kind="assumed",
                reference=f"datasheet bandwidth x the efficiency of {like.name}; there: {rate.source.reference}",
                date=rate.source.date,
            ),
        )
        for name, rate in rates.items()
    }


def box_curves(found: Imported, gpus: int, link: str) -> list[AllReduceCurve]:
    """The curves that a box of `gpus` can use. Above two PCIe-only GPUs the engines' custom kernel is off and the
    table's custom rows are NCCL as the engine calls it: they are named so."""
    result = []
    for curve in found.allreduce:
        if curve.ranks > gpus:
            continue
        if link == "pcie" and curve.ranks > 2:
            if curve.implementation != "custom":
                continue
            note = "above two PCIe-only GPUs the engine's custom kernel is off: this is NCCL as the engine calls it"
            curve = curve.model_copy(update={"implementation": "nccl", "note": note})
        result.append(curve)
    return sorted(result, key=lambda c: (c.implementation, c.ranks, c.mode))


def from_tables(
    system: str, *, l2_mb: float | None = None, date: str = "2026-08", reference: str = PACKAGE
) -> tuple[Profile, list[str]]:
    """A complete profile of a system with tables, named after it, and the notes of its import.

    The node's GPU count and link are those of the tables' system description. Raises InputError as `import_system`, and
    when the tables lack a class that every profile needs.
    """
    found = import_system(system, l2_mb=l2_mb, date=date, reference=reference)
    lacking = [name for name in ("gemm_bf16", "attention_gqa") if name not in found.operators]
    if lacking:
        reasons = "; ".join(found.notes) or "there is no such table"
        raise InputError(f"no {lacking[0]} for {found.system}: {reasons}", mend="choose a system with more tables")
    facts = Source(kind="datasheet", reference=f"aiconfigurator_core, description of {found.system}", date=date)
    gpu = Gpu(name=found.system, l2_mb=l2_mb, relative_uncertainty=0.05, source=facts, **found.gpu)
    profile = Profile(
        name=found.system,
        description=f"{found.system}: published operator tables",
        gpus=found.gpus,
        link=found.link,
        gpu=gpu,
        operators=fill(found.operators | small_classes(gpu, found.system), date),
        allreduce=box_curves(found, found.gpus, found.link),
        launch=launch(date=date),
        caveats=["made from public tables, not measured on this box: run specsim calibrate for your own"],
    )
    return profile, found.notes
