"""Operator tables of an installed `aiconfigurator_core` package, fitted to the rates and curves of a profile.

The package is optional and only read: Parquet tables of measured operators, one folder for each system, operator, framework
and version. Latency is in ms and message sizes are in elements of two bytes; here all becomes seconds and bytes. Small
weights of a loop over one layer stay in the L2 cache, so only points with more bytes than that are fitted ("cold").
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.errors import InputError, did_you_mean
from specsim.files import read_yaml
from specsim.fitting import RateFit, fit_peak, fit_rate
from specsim.profiles import AllReduceCurve, OperatorRate, Source

PACKAGE = "aiconfigurator_core"
FRAMEWORKS = ("sglang", "vllm", "trtllm")  # whose table is preferred
ELEMENT_BYTES = 2  # message sizes are counted in elements of half precision
COLD_BYTES = 100e6  # stands in for an unknown L2
GEMM_COLD_BYTES = 25e6  # the GEMM loop rotates some weights: below this they come from L2
CURVE_BYTES = (512, 16 * 2**20)  # sizes kept of an all-reduce curve
DECODE_STEPS = (500, 33_000)  # context lengths of the attention points, tokens

# Bytes of one weight, scales included, by the tables' name of the number format.
WEIGHT_BYTES = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4 / 128**2,
    "int8_wo": 1.0,
    "sq": 1.0,
    "int4_wo": 0.5 + 2 / 128,  # groups of 128, one 16-bit scale each
    "nvfp4": 0.5 + 1 / 16,
    "w4a16_mxfp4": 0.5 + 1 / 32,
}
# class -> (number format, kernel name must contain), in order of preference.
GEMMS: dict[str, tuple[str, ...]] = {
    "gemm_bf16": ("bfloat16",),
    "gemm_fp8": ("fp8_block", "fp8"),
    "gemm_int4": ("int4_wo",),
    "gemm_int8": ("sq", "int8_wo"),
    "gemm_nvfp4": ("nvfp4",),
}
MOES: dict[str, tuple[str, ...]] = {
    "moe_bf16": ("bfloat16",),
    "moe_fp8": ("fp8_block", "fp8"),
    "moe_int4": ("int4_wo",),
    "moe_nvfp4": ("nvfp4",),
    "moe_mxfp4": ("w4a16_mxfp4",),
}
UNGATED_TOPK = 22  # Nemotron-H experts have two matrices instead of three
UNGATED_HIDDEN = 2688

Columns = dict[str, NDArray[Any]]


@dataclass
class Imported:
    """What a system's tables gave. `notes` says what was left out and why."""

    system: str
    gpu: dict[str, Any]
    operators: dict[str, OperatorRate] = field(default_factory=dict)
    allreduce: list[AllReduceCurve] = field(default_factory=list)
    fits: dict[str, RateFit] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def package_folder() -> Path:
    """The folder with the systems. Raises InputError when the package is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise InputError(f"package {PACKAGE} is not installed", mend="pip install aiconfigurator")
    return Path(next(iter(found.submodule_search_locations))) / "systems"


def systems() -> list[str]:
    """Names of the systems that the installed package has tables for."""
    return sorted(p.name for p in (package_folder() / "data").iterdir() if p.is_dir())


def read_table(path: Path, columns: tuple[str, ...] | None = None) -> Columns:
    """Columns of one Parquet table as arrays. Raises InputError without pyarrow or when the file is damaged."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError("reading Parquet tables needs pyarrow", mend="pip install specsim[parquet]") from None
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow raises its own family, OSError and ValueError
        raise InputError(f"is not a readable Parquet table: {type(error).__name__}", where=str(path)) from None
    absent = [c for c in columns or () if c not in table.column_names]
    if absent:
        raise InputError(f"has no column {absent[0]!r}", where=str(path), mend="the table's layout is not known")
    return {c: table.column(c).to_numpy() for c in columns or table.column_names}


def import_system(system: str, *, l2_mb: float | None = None, date: str = "2026", reference: str = PACKAGE) -> Imported:
    """Fit all the operator classes and curves that the system's tables hold.

    l2_mb: the GPU's L2 cache in MB, which decides which points were cold. Raises InputError for an unknown system.
    """
    known = systems()
    name = next((s for s in known if s.lower() == system.lower()), None)
    if name is None:
        raise InputError(f"no tables of system {system!r}", mend=did_you_mean(system, known))
    root = package_folder()
    facts = read_yaml(root / f"{name}.yaml", "system description")
    found = Imported(name, _gpu(facts if isinstance(facts, dict) else {}))
    reader = _Reader(root / "data" / name, found, (l2_mb or COLD_BYTES / 1e6) * 1e6, reference, date)
    reader.gemms()
    reader.experts()
    reader.attention()
    reader.linear()
    found.allreduce = reader.curves()
    return found


def _gpu(facts: dict[str, Any]) -> dict[str, Any]:
    """The GPU's datasheet figures in a profile's units, from the system description (bytes, bytes/s, operations/s)."""
    gpu = facts.get("gpu") or {}
    units = {"memory_gb": ("mem_capacity", 1e9), "bandwidth_gb_s": ("mem_bw", 1e9), "power_w": ("power", 1.0)}
    units["bf16_tflops"] = ("bfloat16_tc_flops", 1e12)
    result = {k: round(float(gpu[name]) / unit, 1) for k, (name, unit) in units.items() if name in gpu}
    if "sm_version" in gpu:
        major, minor = divmod(int(gpu["sm_version"]), 10)
        result["compute_capability"] = f"{major}.{minor}"
    return result


class _Reader:
    """Reads one system's tables into an `Imported`."""

    def __init__(self, root: Path, found: Imported, l2_bytes: float, reference: str, date: str) -> None:
        self.root, self.found, self.l2, self.reference, self.date = root, found, l2_bytes, reference, date

    def tables(self, operator: str, table: str) -> Iterator[tuple[Path, str]]:
        """Tables of an operator, best first: by framework, then newest version. Yields path and 'framework version'."""
        for framework in FRAMEWORKS:
            folder = self.root / operator / framework
            versions = sorted(folder.iterdir(), key=_version, reverse=True) if folder.is_dir() else []
            for version in versions:
                path = version / f"{table}.parquet"
                if path.is_file():
                    yield path, f"{framework} {version.name}"

    def source(self, operator: str, table: str, version: str, detail: str) -> Source:
        where = f"{self.reference} {self.found.system}/{operator}/{table} ({version}; {detail})"
        return Source(kind="published", reference=where, date=self.date)

    def keep(self, name: str, fit: RateFit, source: Source, peak: float | None = None, note: str = "") -> None:
        self.found.fits[name] = fit
        self.found.operators[name] = OperatorRate(
            fixed_us=float(f"{fit.fixed_s * 1e6:.3g}"),
            bandwidth_gb_s=float(f"{fit.bytes_per_s / 1e9:.4g}"),
            peak_tflops=float(f"{peak / 1e12:.3g}") if peak else None,
            relative_uncertainty=float(f"{max(fit.relative_uncertainty, 0.03):.2g}"),
            source=source,
            note=f"{fit.points} points, median error {fit.median:.1%}, fixed +- {fit.fixed_error_s * 1e6:.2g} us"
            + (f"; {note}" if note else ""),
        )

    def first(self, name: str, attempts: Iterator[Callable[[], None]]) -> None:
        """Take the first attempt that fits; note why the others failed."""
        reasons = []
        for attempt in attempts:
            try:
                return attempt()
            except InputError as error:
                reasons.append(str(error))
        if reasons:
            self.found.notes.append(f"{name}: {reasons[0]}")
        return None

    # --- linear layers ------------------------------------------------------------------------------------------

    def gemms(self) -> None:
        """Linear layers: bytes are the weights'. Fixed and bandwidth from 2 to 16 rows, the peak from 512 and more."""
        cache: dict[Path, Columns] = {}
        for name, formats in GEMMS.items():

            def attempts(name: str = name, formats: tuple[str, ...] = formats) -> Iterator[Callable[[], None]]:
                for number in formats:
                    for path, version in self.tables("gemm", "gemm_perf"):
                        if path not in cache:
                            cache[path] = read_table(path, ("gemm_dtype", "m", "n", "k", "latency"))
                        if (cache[path]["gemm_dtype"] == number).any():
                            yield lambda c=cache[path], v=version, f=number: self._gemm(name, c, v, f)  # type: ignore[misc]

            self.first(name, attempts())

    def _gemm(self, name: str, c: Columns, version: str, number: str) -> None:
        wide = (c["gemm_dtype"] == number) & (c["n"] >= 512) & (c["k"] >= 512)
        size = c["n"].astype(float) * c["k"] * WEIGHT_BYTES[number]
        seconds = c["latency"] * 1e-3
        few = wide & (size > GEMM_COLD_BYTES) & (c["m"] >= 2) & (c["m"] <= 16)
        fit = fit_rate(size[few], seconds[few], where=f"{self.found.system} {name}")
        many = wide & (size > GEMM_COLD_BYTES) & (c["m"] >= 512)
        flops = 2.0 * c["m"] * c["n"] * c["k"]
        peak = fit_peak(fit, size[many], seconds[many], flops[many])
        detail = f"{number}, 2 to 16 rows, weights above {GEMM_COLD_BYTES / 1e6:.0f} MB"
        self.keep(name, fit, self.source("gemm", "gemm_perf", version, detail), peak)

    # --- routed experts -----------------------------------------------------------------------------------------

    def experts(self) -> None:
        """The fused routed-expert path: bytes = distinct experts x three matrices. Balanced routing, for which the
        number of distinct experts is known: min(experts, rows x top-k)."""
        columns = ("moe_dtype", "kernel_source", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
        columns += ("moe_tp_size", "moe_ep_size", "distribution", "latency")
        cache: dict[Path, Columns] = {}
        for name, formats in MOES.items():

            def attempts(name: str = name, formats: tuple[str, ...] = formats) -> Iterator[Callable[[], None]]:
                for number in formats:
                    for path, version in self.tables("moe", "moe_perf"):
                        if path not in cache:
                            cache[path] = read_table(path, columns)
                        c = cache[path]
                        for kernel in _by_count(c["kernel_source"][c["moe_dtype"] == number]):
                            yield lambda c=c, v=version, f=number, k=kernel: self._moe(name, c, v, f, k)  # type: ignore[misc]

            self.first(name, attempts())

    def _moe(self, name: str, c: Columns, version: str, number: str, kernel: str) -> None:
        shard = c["inter_size"] / c["moe_tp_size"]
        rows = (c["moe_dtype"] == number) & (c["kernel_source"] == kernel) & (c["distribution"] == "balanced")
        rows &= (c["moe_ep_size"] == 1) & (c["num_tokens"] <= 64) & (c["num_experts"] >= 64)
        rows &= (shard >= 192) & (shard <= 1024) & (c["topk"] != UNGATED_TOPK) & (c["hidden_size"] != UNGATED_HIDDEN)
        distinct = np.minimum(c["num_experts"], c["num_tokens"].astype(float) * c["topk"])
        size = distinct * 3 * c["hidden_size"] * shard * WEIGHT_BYTES[number]
        cached = size < 0.6 * self.l2
        rows &= cached | (size > self.l2)
        seconds = c["latency"] * 1e-3
        fit = fit_rate(size[rows], seconds[rows], cached=cached[rows], where=f"{self.found.system} {name} ({kernel})")
        detail = f"{kernel}, {number}, balanced routing, bandwidth from more than {self.l2 / 1e6:.0f} MB of experts"
        self.keep(name, fit, self.source("moe", "moe_perf", version, detail))

    # --- attention ----------------------------------------------------------------------------------------------

    def attention(self) -> None:
        """One decode attention call: bytes are the KV cache read. Contexts so short that bytes cost nothing give the
        fixed time, and contexts beyond twice the L2 the bandwidth."""
        self.first("attention_gqa", self._gqa_attempts())
        self.first("attention_mla", self._mla_attempts())

    def _gqa_attempts(self) -> Iterator[Callable[[], None]]:
        columns = ("kernel_source", "batch_size", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype")
        for path, version in self.tables("attention", "generation_attention_perf"):
            c = read_table(path, (*columns, "step", "window_size", "latency"))
            for kernel in _by_count(c["kernel_source"]):
                rows = (c["kernel_source"] == kernel) & (c["head_dim"] == 128) & (c["window_size"] == 0)
                rows &= (c["kv_cache_dtype"] == "bfloat16") & (c["num_heads"] >= 4 * c["num_key_value_heads"])
                size = c["batch_size"] * (c["step"] + 1.0) * c["num_key_value_heads"] * 128 * 2 * 2
                detail = f"{kernel}, head size 128, bf16 cache"
                source = self.source("attention", "generation_attention_perf", version, detail)
                yield lambda c=c, r=rows, s=size, o=source: self._attention("attention_gqa", c, r, s, o)  # type: ignore[misc]

    def _mla_attempts(self) -> Iterator[Callable[[], None]]:
        for path, version in self.tables("mla", "generation_mla_perf"):
            c = read_table(path, ("kernel_source", "num_heads", "batch_size", "kv_cache_dtype", "step", "latency"))
            for kernel in _by_count(c["kernel_source"]):
                rows = (c["kernel_source"] == kernel) & (c["kv_cache_dtype"] == "bfloat16") & (c["num_heads"] <= 16)
                rows &= c["num_heads"] >= 8
                size = c["batch_size"] * (c["step"] + 1.0) * (512 + 64) * 2
                source = self.source("mla", "generation_mla_perf", version, f"{kernel}, 8 to 16 heads, bf16 cache")
                yield lambda c=c, r=rows, s=size, o=source: self._attention("attention_mla", c, r, s, o)  # type: ignore[misc]

    def _attention(self, name: str, c: Columns, rows: NDArray[Any], size: NDArray[Any], source: Source) -> None:
        step = c["step"] + 1
        usual = rows & (step >= DECODE_STEPS[0]) & (c["batch_size"] <= 64)
        short = usual & (step <= 2048) & (size < 0.05 * self.l2)
        cold = usual & (size > 2 * self.l2)
        chosen = short | cold
        fit = fit_rate(size[chosen], c["latency"][chosen] * 1e-3, where=f"{self.found.system} {name}")
        self.keep(name, fit, source)

    def linear(self) -> None:
        """The recurrent step of linear attention with its convolution: bytes are the state, read and written."""

        def attempts() -> Iterator[Callable[[], None]]:
            for path, version in self.tables("linear_attention", "gdn_perf"):
                c = read_table(path)
                source = self.source("linear_attention", "gdn_perf", version, "recurrent step and convolution, fp32 state")
                yield lambda c=c, s=source: self._linear(c, s)  # type: ignore[misc]

        self.first("attention_linear", attempts())

    def _linear(self, c: Columns, source: Source) -> None:
        keys = ("batch_size", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "model_name")
        parts: dict[tuple[Any, ...], dict[str, float]] = {}
        for i in np.flatnonzero(c["phase"] == "generation"):
            parts.setdefault(tuple(c[k][i] for k in keys), {})[c["kernel_source"][i]] = float(c["latency"][i])
        both = {k: sum(v.values()) for k, v in parts.items() if len(v) == 2}
        state = np.array([float(k[0]) * k[2] * k[3] * k[4] * 4 * 2 for k in both])
        seconds = np.array(list(both.values())) * 1e-3
        chosen = (state < 0.05 * self.l2) | (state > 2 * self.l2)
        self.keep("attention_linear", fit_rate(state[chosen], seconds[chosen], where="attention_linear"), source)

    # --- all-reduce ---------------------------------------------------------------------------------------------

    def curves(self) -> list[AllReduceCurve]:
        """The newest curve of each implementation, rank count and mode; SGLang's before vLLM's and TensorRT-LLM's."""
        found: dict[tuple[str, int, str], AllReduceCurve] = {}
        for path, version in self.tables("comm", "custom_allreduce_perf"):
            c = read_table(path, ("kernel_source", "num_gpus", "message_size", "latency"))
            for kernel in _by_count(c["kernel_source"]):
                mode = "eager" if kernel.endswith("_eager") else "graph"
                implementation = "trtllm" if kernel.startswith("TRTLLM") else "custom"
                if implementation == "trtllm" and not version.startswith("trtllm"):
                    continue  # a copy of TensorRT-LLM's table under another name
                self._curves(found, c, c["kernel_source"] == kernel, implementation, mode, version, kernel)
        folder = self.root / "comm" / "nccl"
        for version in sorted(folder.iterdir(), key=_version, reverse=True) if folder.is_dir() else []:
            path = version / "nccl_perf.parquet"
            if path.is_file():
                c = read_table(path, ("nccl_dtype", "op_name", "num_gpus", "message_size", "latency"))
                rows = (c["nccl_dtype"] == "half") & (c["op_name"] == "all_reduce")
                self._curves(found, c, rows, "nccl", "graph", f"nccl {version.name}", "back-to-back loop")
        return [found[k] for k in sorted(found)]

    def _curves(
        self,
        found: dict[tuple[str, int, str], AllReduceCurve],
        c: Columns,
        rows: NDArray[Any],
        implementation: str,
        mode: str,
        version: str,
        detail: str,
    ) -> None:
        size = c["message_size"].astype(np.int64) * ELEMENT_BYTES
        for ranks in np.unique(c["num_gpus"][rows]):
            key = (implementation, int(ranks), mode)
            here = rows & (c["num_gpus"] == ranks) & (size >= CURVE_BYTES[0]) & (size <= CURVE_BYTES[1])
            if key in found or ranks < 2 or here.sum() < 3:
                continue
            table = "nccl_perf" if version.startswith("nccl") else "custom_allreduce_perf"
            sizes = np.unique(size[here])
            times = [float(np.median(c["latency"][here & (size == b)])) * 1e3 for b in sizes]
            found[key] = AllReduceCurve(
                implementation=implementation,
                ranks=int(ranks),
                mode="eager" if mode == "eager" else "graph",
                bytes=[int(b) for b in sizes],
                latency_us=[float(f"{t:.3g}") for t in times],
                relative_uncertainty=0.15,
                source=self.source("comm", table, version, detail),
            )


def small_kernels(system: str) -> dict[str, float]:
    """Times in seconds of the smallest kernels in the system's tables, to scale what no table holds: `convolution`
    (one row's causal convolution update) and `quantize` (per-row fp8 scaling of a row of 7168). Absent ones are left out."""
    root = package_folder() / "data" / system
    reader = _Reader(root, Imported(system, {}), COLD_BYTES, PACKAGE, "2026")
    result = {}
    for path, _ in reader.tables("linear_attention", "gdn_perf"):
        c = read_table(path, ("kernel_source", "batch_size", "latency"))
        rows = (c["kernel_source"] == "causal_conv1d_update") & (c["batch_size"] == 1)
        if rows.any():
            result["convolution"] = float(np.median(c["latency"][rows])) * 1e-3
            break
    for path, version in reader.tables("quantize", "scale_matrix_perf"):
        if not version.startswith("sglang"):
            continue
        c = read_table(path, ("m", "k", "latency"))
        rows = (c["m"] == 1) & (c["k"] == 7168)
        if rows.any():
            result["quantize"] = float(np.median(c["latency"][rows])) * 1e-3
            break
    return result


def _by_count(values: NDArray[Any]) -> list[str]:
    """Distinct values, the most frequent first, then by name."""
    names, counts = np.unique(values.astype(str), return_counts=True)
    return [str(names[i]) for i in np.argsort(-counts, kind="stable")]


def _version(path: Path) -> tuple[tuple[int, ...], str]:
    """Sort key of a version folder: its numbers, a release candidate before its release."""
    plain = path.name.split("rc")[0]
    numbers = tuple(int(n) for n in re.findall(r"\d+", plain))
    return numbers, f"0{path.name}" if "rc" in path.name else f"1{path.name}"
