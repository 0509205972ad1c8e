"""From a calibration's samples to a hardware profile and a record.

Each operator class gets the line through its samples (class_fits.py); all-reduce curves and launch costs are medians.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from specsim import host_speed
from specsim.class_fits import DEFAULT_EFFICIENCY, Fit, Sample, fits, in_place
from specsim.derive import launch as usual_launch
from specsim.errors import InputError
from specsim.ops import PROCESSORS
from specsim.profiles import AllReduceCurve, Gpu, Host, Launch, OperatorRate, Profile, Source
from specsim.records import Record, first_trouble, sample_trouble

SMALLEST_UNCERTAINTY = 0.01
HOST_UNCERTAINTY = 0.6  # of what slow cores add on average, by where and when a server ran (docs/accuracy.md)
BAD = 0.15  # median relative residual from which a class's line is no description of its samples
BORROWED = ("published", "assumed", "datasheet")  # kinds of source that another profile of the same GPU may lend
PEER_MEASURES = ("allreduce", "copies")  # depend on whether GPUs reach each other
SLOW = 0.93  # of the best GPU's rate, below which a GPU is named
HINT = re.compile(r"[:;,] [^:;]*--resume.*$")  # of a measurement that goes on: nothing to a record that is fitted again
GIVE = "give a *.record.json of specsim calibrate"
REQUIRED = {
    "gemm_bf16": 5e-6,
    "attention_gqa": 12e-6,
    "norm": 3e-6,
    "tiny": 1.5e-6,
}  # class: fixed seconds if never measured


@dataclass(frozen=True)
class Result:
    """A calibration's profile, its record, the fits behind it, and what to tell the user."""

    profile: Profile
    record: Record
    fits: dict[str, Fit]
    warnings: list[str]


def build(
    name: str, results: Sequence[Sample], environment: Mapping[str, Any], *, ranks: int, cpu: bool = False, no_p2p: bool = False,
    quick: bool = False, nvlink: bool = False, health: Mapping[str, Any] | None = None, troubles: Sequence[str] = (), date: str = "",
    command: str = "", published: Sequence[Profile] = (),
) -> Result:  # fmt: skip
    """The profile and record of a calibration's results (see specsim.calibration.session).

    published: profiles of the same GPU, from which operator classes and all-reduce kernels that could not be measured
    here are taken with their own source.
    """
    date = date or datetime.date.today().isoformat()
    samples = in_place(results)
    failed = [r for r in results if r["status"] != "done" and r["error"] not in troubles]  # those are told already
    source = Source(kind="measured", reference=f"specsim calibrate on {environment.get('gpu', 'this box')}", date=date)
    taken = [] if cpu else [p for p in published if p.gpu.name == environment.get("gpu")]
    gpu, bandwidth, peak = _gpu(results, environment, source, taken)
    fitted = fits(samples, bandwidth, peak, gpu.processors or PROCESSORS)
    curves = _curves(samples, source)
    operators, assumed = _operators(fitted, bandwidth, source, taken, _kernels(samples))
    if nvlink and not no_p2p and not cpu:
        curves += _published_curves(taken, curves, ranks)
    launch, launch_assumed = _launch(samples, curves, source)
    host = _host(health or {}, source)
    warnings = [
        *troubles,
        *([] if cpu else _slow_gpus(results)),
        *_warnings(samples, failed, fitted, assumed + launch_assumed),
    ]
    link = "none" if ranks == 1 else "nvlink" if nvlink and not no_p2p and not cpu else "pcie"
    caveats = [w for w in warnings if "WRONG DATA" in w]
    if assumed:
        caveats.append(f"not measured, assumed: {', '.join(assumed)}")
    profile = Profile(
        name=name,
        description=f"{ranks} x {environment.get('gpu', 'GPU')}, measured" + (", peer access off" if no_p2p else ""),
        gpus=ranks, link=link,  # type: ignore[arg-type]
        gpu=gpu, operators=operators, allreduce=curves, launch=launch, host=host, caveats=caveats, cpu=cpu,
        environment={"date": date, "quick": quick, **_plain(environment)},
        samples={**_tables(samples), "verify_layer_us": verify_layer(samples)},
    )  # fmt: skip
    record = Record(
        kind="calibration", name=name, date=date, source=command, hardware=name,
        environment={
            **_plain(environment), "health": _plain(health or {}), "troubles": list(troubles),
            "plan": {"ranks": ranks, "cpu": cpu, "no_p2p": no_p2p, "quick": quick, "nvlink": nvlink},
        }, samples=[_plain(dict(r)) for r in results], caveats=warnings,
        method="seconds a call; chains in CUDA graphs less an empty graph, weights rotated beyond twice the L2; see docs/calibration.md",
    )  # fmt: skip
    return Result(profile, record, fitted, warnings)


def rebuild(records: Sequence[Record], published: Sequence[Profile] = ()) -> Result:
    """The profile and record again from a box's calibration records, with this release's fits.

    Later records add to the first and replace what they measured again; a failure replaces nothing. One taken with other
    peer access or on another number of GPUs lends only what one GPU does alone, and only where the box has nothing of its own. What
    went wrong in any of them is told again. Raises InputError without records, for another kind of record or a damaged
    one, and for records of another kind of GPU.
    """
    if not records:
        raise InputError("no record", mend=GIVE)
    first = records[0]
    plan: Any = first.environment.get("plan")
    samples: dict[str, Sample] = {}
    own: set[str] = set()  # keys of what the box itself, as the first record has it, has measured
    for record in records:
        other: Any = record.environment.get("plan")
        if record.kind != "calibration" or not _is_whole(record.environment):
            raise InputError("is not the record of a calibration", where=record.name, mend=GIVE)
        gpu, expected = record.environment.get("gpu"), first.environment.get("gpu")
        if (other.get("cpu"), gpu) != (plan.get("cpu"), expected):
            raise InputError(f"is of {gpu or 'CPUs'}, {first.name} of {expected or 'CPUs'}", where=record.name)
        lent = any(other.get(key) != plan.get(key) for key in ("no_p2p", "ranks"))
        for number, s in enumerate(record.samples):
            if wrong := sample_trouble(s):
                raise InputError(f"is damaged: {wrong}", where=f"{record.name}, samples.{number}", mend=GIVE)
            known = samples.get(s["key"])
            if lent and (s["key"] in own or s["measure"] in PEER_MEASURES or s.get("ranks", 1) > 1):
                continue
            if _is_done(s) or not _is_done(known):
                samples[s["key"]] = s
                own |= {s["key"]} if _is_done(s) and not lent else set()
    environment = {k: v for k, v in first.environment.items() if k not in ("plan", "health", "troubles")}
    said = (str(t) for record in records for t in record.environment.get("troubles") or ())
    troubles = dict.fromkeys(HINT.sub("", text) for text in said)
    try:
        return build(
            first.name, list(samples.values()), environment, **plan, health=first.environment.get("health"),
            troubles=list(troubles), date=max(r.date for r in records),
            command="; ".join(dict.fromkeys(r.source for r in records)), published=published,
        )  # fmt: skip
    except ValidationError as error:
        raise InputError(f"makes no profile: {first_trouble(error)}", where=first.name, mend=GIVE) from None


def _is_done(sample: Sample | None) -> bool:
    return sample is not None and sample["status"] == "done"


def _is_whole(environment: Mapping[str, Any]) -> bool:
    """Whether it says what `build` needs to know of a run."""
    plan, switches = environment.get("plan"), ("cpu", "no_p2p", "quick", "nvlink")
    sizes = [environment.get(name) or 0.0 for name in ("memory_bytes", "l2_bytes")]
    return (
        isinstance(plan, dict)
        and set(plan) == {"ranks", *switches}
        and type(plan["ranks"]) is int
        and all(isinstance(plan[name], bool) for name in switches)
        and isinstance(environment.get("troubles") or [], list)
        and all(isinstance(size, (int, float)) for size in sizes)
    )


def _gpu(
    results: Sequence[Sample], environment: Mapping[str, Any], source: Source, published: Sequence[Profile]
) -> tuple[Gpu, float, float]:
    """The GPU as measured: the slowest of the ranks' bandwidths, and its bf16 rate. Where these are not among the samples,
    as published; else the fastest that a bf16 product went, below which no fit may then be held; else a guess."""
    done = [r for r in results if r["status"] == "done" and r["spread"]["median"] > 0]
    copies, products = (
        [r[amount] / r["spread"]["median"] for r in done if (r["measure"], r["operator"]) == ("peak", operator)]
        for amount, operator in (("bytes", "copy"), ("flops", "matmul"))
    )
    known = bool(copies and products)
    if published:
        copies = copies or [published[0].gpu.bandwidth_gb_s * 1e9]
        products = products or [published[0].gpu.bf16_tflops * 1e12]
    # Their weights come from memory, rotated beyond the L2.
    multiplied = [r for r in done if r["operator"] == "gemm_bf16"]
    copies = copies or [max((r["bytes"] / r["spread"]["median"] for r in multiplied), default=0.0) or 1e12]
    products = products or [max((r["flops"] / r["spread"]["median"] for r in multiplied), default=0.0) or 2e14]
    bandwidth, peak = min(copies), min(products)
    gpu = Gpu(
        name=str(environment.get("gpu") or "GPU"),
        memory_gb=round(float(environment.get("memory_bytes") or 80e9) / 1e9, 1),
        bandwidth_gb_s=_digits(bandwidth / 1e9, 4),
        bf16_tflops=_digits(peak / 1e12, 4),
        l2_mb=_digits(float(environment["l2_bytes"]) / 1e6, 4) if environment.get("l2_bytes") else None,
        power_w=environment.get("power_limit_w") or None,
        processors=environment.get("processors"),
        compute_capability=environment.get("compute_capability"),
        source=source if known else source.model_copy(update={"kind": "assumed"}),
        relative_uncertainty=0.03 if known else 1.0,
        note="bandwidth: a large copy; bf16: an 8192 cube; the slowest GPU"
        if known
        else f"not measured: {'as published' if published else 'the fastest bf16 product, or a guess'}",
    )
    return gpu, bandwidth, peak


def _slow_gpus(results: Sequence[Sample]) -> list[str]:
    """GPUs well below the best of the box."""
    found = []
    for operator, word in (("copy", "memory bandwidth"), ("matmul", "bf16 rate")):
        rates = {
            r.get("rank", 0): 1.0 / r["spread"]["median"]
            for r in results
            if r["status"] == "done"
            and r["measure"] == "peak"
            and r["operator"] == operator
            and r["spread"]["median"] > 0
        }
        best = max(rates.values(), default=0.0)
        for rank, rate in sorted(rates.items()):
            if rate < SLOW * best:
                found.append(f"GPU {rank}: {word} is {rate / best:.0%} of the best GPU's: all ranks wait for it")
    return found


def _kernels(samples: Sequence[Sample]) -> dict[str, str]:
    """The kernels that served each class, as the benchmarks name them."""
    found: dict[str, set[str]] = {}
    for s in samples:
        if s["extras"].get("kernel"):
            found.setdefault(s["operator"], set()).add(str(s["extras"]["kernel"]))
    return {name: _joined(kernels) for name, kernels in found.items()}


def _joined(kernels: Iterable[str]) -> str:
    """Names of kernels in a line; "NAME, HOW" beside NAME is the same one, run so some of the time."""
    names = sorted(set(kernels))
    ways = {name: [n.removeprefix(f"{name}, ") for n in names if n.startswith(f"{name}, ")] for name in names}
    told = {f"{name}, {way}" for name, found in ways.items() for way in found}
    return " and ".join(", some ".join([name, *ways[name]]) for name in names if name not in told)


def _operators(
    fitted: Mapping[str, Fit],
    bandwidth: float,
    source: Source,
    published: Sequence[Profile],
    kernels: Mapping[str, str],
) -> tuple[dict[str, OperatorRate], list[str]]:
    operators = {
        name: OperatorRate(
            fixed_us=_digits(f.fixed_s * 1e6, 4) if f.fixed_s > 1e-9 else 0.0,
            inner_ns=_digits(f.inner_s * 1e9, 3),
            bandwidth_gb_s=_digits(f.bytes_per_s / 1e9, 4),
            peak_tflops=_digits(f.flops_per_s / 1e12, 4) if f.flops_per_s else None,
            source=source.model_copy(update={"kind": "fitted"}) if f.held else source,
            relative_uncertainty=min(3.0, round(max(f.scatter, SMALLEST_UNCERTAINTY), 3)),
            note=f.note + (f"; kernel: {kernels[name]}" if name in kernels else ""),
        )
        for name, f in fitted.items()
    }
    for profile in published:
        for name, rate in profile.operators.items():
            if rate.source.kind in BORROWED:
                operators.setdefault(name, rate)
    missing = [name for name in REQUIRED if name not in operators]
    for name in missing:
        operators[name] = OperatorRate(
            fixed_us=REQUIRED[name] * 1e6,
            bandwidth_gb_s=_digits(0.8 * bandwidth / 1e9, 4),
            source=Source(kind="assumed", reference="not measured", date=source.date),
            relative_uncertainty=0.5,
        )
    return operators, missing


def _curves(samples: Sequence[Sample], source: Source) -> list[AllReduceCurve]:
    """One curve for each implementation, number of ranks and mode; "alone" stays in the samples."""
    grouped: dict[tuple[str, int, str], list[Sample]] = {}
    for s in samples:
        if s["measure"] == "allreduce" and s["params"]["mode"] in ("graph", "eager"):
            grouped.setdefault((s["operator"], s["params"]["ranks"], s["params"]["mode"]), []).append(s)
    curves = []
    for (implementation, ranks, mode), group in sorted(grouped.items()):
        ordered = sorted(group, key=lambda s: float(s["bytes"]))
        latency = [max(s["extras"].get("slowest_rank_s", 0.0), s["spread"]["median"]) for s in ordered]
        kept = [(int(s["bytes"]), _digits(t * 1e6, 4), s) for s, t in zip(ordered, latency, strict=True) if t > 0]
        if not kept:
            continue
        widths = [
            (s["spread"]["high"] - s["spread"]["low"]) / (2 * s["spread"]["median"])
            for _, _, s in kept
            if s["spread"]["median"] > 0
        ]
        curves.append(
            AllReduceCurve(
                implementation=implementation,
                ranks=ranks,
                mode=mode,  # type: ignore[arg-type]
                bytes=[b for b, _, _ in kept],
                latency_us=[t for _, t, _ in kept],
                source=source,
                relative_uncertainty=min(3.0, round(max(0.02, float(np.median(widths)) if widths else 0.1), 3)),
                note="; ".join(filter(None, ["between small kernels" if mode == "graph" else "", _kernel_note(group)])),
            )
        )
    return curves + _stand_ins(curves)


def _kernel_note(group: Sequence[Sample]) -> str:
    names = _joined(str(s["extras"]["kernel"]) for s in group if s["extras"].get("kernel"))
    return f"kernel: {names}" if names else ""


def _stand_ins(curves: Sequence[AllReduceCurve]) -> list[AllReduceCurve]:
    """The engines' older kernel for the newer one where only the older could be measured."""
    have = {(c.implementation, c.ranks, c.mode) for c in curves}
    return [
        c.model_copy(update={"implementation": "custom", "note": f"{c.note}; stands in for the engine's newer kernel"})
        for c in curves
        if c.implementation == "custom-v1" and ("custom", c.ranks, c.mode) not in have
    ]


def _published_curves(
    published: Sequence[Profile], measured: Sequence[AllReduceCurve], ranks: int
) -> list[AllReduceCurve]:
    """Curves of engines' own kernels that were not importable here, as published for this GPU."""
    have = {(c.implementation, c.ranks, c.mode) for c in measured}
    found = []
    for curve in (c for p in published for c in p.allreduce):
        key = (curve.implementation, curve.ranks, curve.mode)
        own = curve.implementation.startswith("nccl")
        if not own and curve.ranks <= ranks and key not in have and curve.source.kind in BORROWED:
            have.add(key)
            found.append(curve)
    return found


def _launch(samples: Sequence[Sample], curves: Sequence[AllReduceCurve], source: Source) -> tuple[Launch, list[str]]:
    found = {
        s["operator"]: s["spread"]["median"] * 1e6
        for s in samples
        if s["measure"] == "launches" and s["operator"] != "graph_host"
    }
    eager = [c for c in curves if c.mode == "eager"]
    if eager:
        found["eager_collective"] = min(max(eager, key=lambda c: c.ranks).latency_us)
    usual = usual_launch()
    defaults = {
        "eager_kernel": usual.kernel_us,
        "eager_collective": usual.collective_us,
        "graph_launch": usual.graph_us,
    }
    missing = [name for name in defaults if name not in found]
    value = defaults | found
    node = f"an empty node takes {found['graph_node']:.2f} us, which" if "graph_node" in found else "what a node takes"
    launch = Launch(
        kernel_us=_digits(value["eager_kernel"], 4),
        collective_us=_digits(value["eager_collective"], 4),
        graph_us=_digits(value["graph_launch"], 4),
        graph_node_us=0.0,
        source=source.model_copy(update={"kind": "assumed"}) if missing else source,
        relative_uncertainty=usual.relative_uncertainty if missing else 0.1,
        note=f"{node} is in the fixed times already: they were measured in chains in graphs",
    )
    return launch, missing


def _host(health: Mapping[str, Any], source: Source) -> Host | None:
    """The host's cores, from the looks at each that are kept with its health; None where they are its own, or were not looked at."""
    found = host_speed.two_speeds(health.get("cores_us") or {})
    if found is None:
        return None
    share, ratio = found
    return Host(
        slow_share=_digits(share, 3), slow_ratio=_digits(ratio, 3), source=source, relative_uncertainty=HOST_UNCERTAINTY,
        note="every core, a few looks in a second: how much of the time it is slow differs by the minute",
    )  # fmt: skip


def _warnings(
    samples: Sequence[Sample], failed: Sequence[Sample], fitted: Mapping[str, Fit], assumed: Sequence[str]
) -> list[str]:
    found = []
    errors: dict[tuple[str, str], list[Sample]] = {}
    for r in failed:
        errors.setdefault((r["operator"], str(r["error"]).split(":", 1)[-1].strip()[:200]), []).append(r)
    for (operator, error), group in errors.items():
        found.append(f"{operator}: {len(group)} of its sizes not measured: {error}")
    found += dict.fromkeys(f"{s['operator']}: {s['extras']['trouble']}" for s in samples if s["extras"].get("trouble"))
    noisy: dict[str, int] = {}
    for s in samples:
        noisy[s["operator"]] = noisy.get(s["operator"], 0) + (not s["narrow"])
    wide = ", ".join(f"{n} {name}" for name, n in noisy.items() if n)
    if wide:
        found.append(f"still noisy after repeating: {wide}")
    for name, f in fitted.items():
        for parameter in f.held:
            said = f"{name}: {parameter} cannot be told from these samples"
            rows = max((s["params"].get("rows", 0) for s in samples if s["operator"] == name), default=0)
            if parameter == "peak" and rows:
                said += (
                    f", of {rows:,} rows at most: beyond them {DEFAULT_EFFICIENCY:.0%} of the bf16 product's is assumed"
                )
            found.append(said)
        if (middle := float(np.median(np.abs(f.residuals)))) > BAD:
            found.append(
                f"{name}: no line fits its samples, half of them are off by {middle:.0%}: see its residuals (--plot)"
            )
    if assumed:
        found.append(f"not measured, assumed: {', '.join(assumed)}")
    return found


def _tables(samples: Sequence[Sample]) -> dict[str, Any]:
    """The samples by class as small tables: parameters, bytes, and the 10, 50 and 90 % quantiles in microseconds; `alone_us`
    is the median of the same calls back to back."""
    tables: dict[str, Any] = {}
    for s in samples:
        sizes = {**s["params"], "bytes": round(float(s["bytes"]))}
        times = {q: s["spread"][q] for q in ("p10", "median", "p90")}
        times |= {"alone": s["extras"]["alone"]["median"]} if "alone" in s["extras"] else {}
        row = {**sizes, **{f"{name}_us": _digits(t * 1e6, 5) for name, t in times.items()}}
        table = tables.setdefault(s["operator"], {"columns": " ".join(row), "rows": []})
        if table["columns"] == " ".join(row):
            table["rows"].append(" ".join(str(v) for v in row.values()))
    return tables


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _plain(value: Any) -> Any:
    """The value in JSON's types."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def verify_layer(samples: Sequence[Sample]) -> dict[str, list[dict[str, float]]]:
    """What several query rows add to attention, by class: seconds more than one row, at each size measured."""
    found: dict[str, list[dict[str, float]]] = {}
    base = {
        (s["operator"], s["params"]["batch"], s["params"]["context"]): s
        for s in _attention(samples)
        if s["params"]["queries"] == 1
    }
    for s in _attention(samples):
        p = s["params"]
        one = base.get((s["operator"], p["batch"], p["context"]))
        if p["queries"] > 1 and one is not None:
            more = (s["spread"]["median"] - one["spread"]["median"]) * 1e6
            entry = {"batch": p["batch"], "context": p["context"], "queries": p["queries"], "more_us": round(more, 3)}
            found.setdefault(s["operator"], []).append(entry)
    return found


def _attention(samples: Sequence[Sample]) -> list[Sample]:
    return [s for s in samples if s["measure"] == "attention"]
