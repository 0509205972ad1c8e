"""Operator tables of an installed `aiconfigurator_core` package, fitted to the rates and curves of a profile.

The package is optional and only read: Parquet tables of measured operators, one folder for each system, operator,
framework and version. Latency is in ms and message sizes are in elements of two bytes; here all becomes seconds and
bytes. Small weights of a loop over one layer stay in the L2 cache, so bandwidth comes from points with more bytes than
that ("cold").
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specsim.errors import InputError, did_you_mean
from specsim.files import read_yaml
from specsim.fitting import RateFit, fit_peak, fit_rate
from specsim.profiles import AllReduceCurve, OperatorRate, Source
from specsim.quantities import counted

PACKAGE = "aiconfigurator_core"
FRAMEWORKS = ("sglang", "vllm", "trtllm")  # whose table is preferred
ELEMENT_BYTES = 2  # message sizes are counted in elements of half precision
COLD_BYTES = 100e6  # stands in for an unknown L2
GEMM_COLD_BYTES = 25e6  # the GEMM loop rotates some weights: below this they come from L2
CURVE_BYTES = (512, 16 * 2**20)  # sizes kept of an all-reduce curve
GOOD_MEDIAN, WORST_MEDIAN = 0.08, 0.25  # median relative error of a fit: take it at once; refuse it
LEAST_SHARE, MOST_SHARE = 0.3, 1.05  # of the memory bandwidth: less is not a read of the stored bytes, more is not cold
LEAST_UNCERTAINTY = 0.05  # of one table's fit: what other boards of the same GPU differ by
CURVE_UNCERTAINTY = 0.2  # between hosts, and between a loop and a layer
OPTIONAL = ("window_size",)  # columns that older tables lack
NAMES = {
    "gemm_dtype",
    "moe_dtype",
    "kernel_source",
    "distribution",
    "kv_cache_dtype",
    "model_name",
    "phase",
    "nccl_dtype",
    "op_name",
}

# Bytes of one weight, scales included, by the tables' name of the number format.
WEIGHT_BYTES = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4 / 128**2,
    "sq": 1.0,
    "int4_wo": 0.5 + 2 / 128,  # groups of 128, one 16-bit scale each
    "nvfp4": 0.5 + 1 / 16,
    "w4a16_mxfp4": 0.5 + 1 / 32,
}
# class -> the tables' names of its number format, in order of preference.
GEMMS: dict[str, tuple[str, ...]] = {
    "gemm_bf16": ("bfloat16",),
    "gemm_fp8": ("fp8_block", "fp8"),
    "gemm_int4": ("int4_wo",),
    "gemm_int8": ("sq",),
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

Floats = NDArray[Any]  # numbers or truth values
Columns = dict[str, Floats]


@dataclass
class Imported:
    """What a system's tables gave. `notes` says what was left out and why."""

    system: str
    gpu: dict[str, Any]  # datasheet figures, in the units of a profile
    gpus: int = 1  # in a node
    link: Literal["none", "nvlink", "pcie"] = "none"
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


def release() -> str:
    """The package's name and version, for sources; without a version when it is unpacked, not installed."""
    try:
        return f"{PACKAGE} {metadata.version(PACKAGE)}"
    except metadata.PackageNotFoundError:
        return PACKAGE


def systems() -> list[str]:
    """Names of the systems that the installed package has tables for."""
    return sorted({p.parts[-5] for p in (package_folder() / "data").glob("*/*/*/*/*.parquet")})


def read_table(path: Path, columns: tuple[str, ...]) -> Columns:
    """Columns of one Parquet table as arrays; a column of OPTIONAL that is not there is all zero. Rows without a number
    where one belongs, or without a time, are left out.

    Raises InputError without pyarrow, when the file is damaged or when it lacks another column.
    """
    parquet = _parquet()
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow raises its own family, OSError and ValueError
        raise InputError(f"is not a readable Parquet table: {type(error).__name__}", where=str(path)) from None
    absent = [c for c in columns if c not in table.column_names]
    for name in absent:
        if name not in OPTIONAL:
            raise InputError(f"has no column {name!r}", where=str(path), mend="the table's layout is not known")
    result = {c: _values(table.column(c).to_numpy(), c, path) for c in columns if c not in absent}
    result |= {c: np.zeros(table.num_rows) for c in absent}
    usable = np.ones(table.num_rows, dtype=bool)
    for name, values in result.items():
        if name not in NAMES:
            usable &= np.isfinite(values) & ((name != "latency") | (values > 0))
    return {name: values[usable] for name, values in result.items()}


def _values(values: Floats, name: str, path: Path) -> Floats:
    """A column as names or as numbers. Raises InputError for a column of numbers that holds something else."""
    if name in NAMES:
        return values.astype(str)
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(
            f"column {name!r} is not of numbers", where=str(path), mend="the table's layout is not known"
        ) from None


def _parquet() -> Any:
    """The Parquet reader. Raises InputError when pyarrow is not installed."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError("reading Parquet tables needs pyarrow", mend="pip install specsim[parquet]") from None
    return parquet


def import_system(system: str, *, l2_mb: float | None = None, date: str = "2026", reference: str = PACKAGE) -> Imported:
    """Fit all the operator classes and curves that the system's tables hold.

    l2_mb: the GPU's L2 cache in MB, which decides which points were cold. Raises InputError for an unknown system.
    """
    known = systems()
    name = next((s for s in known if s.lower() == system.lower()), None)
    if name is None:
        described = {
            p.stem.lower() for p in package_folder().glob("*.yaml") if (package_folder() / "data" / p.stem).is_dir()
        }
        what = (
            f"{system!r} is described but has no tables"
            if system.lower() in described
            else f"no tables of system {system!r}"
        )
        raise InputError(what, mend=did_you_mean(system, known))
    _parquet()  # once here: what goes wrong with one table is only noted
    root = package_folder()
    facts = read_yaml(root / f"{name}.yaml", "system description")
    facts = facts if isinstance(facts, dict) else {}
    node = facts.get("node") or {}
    gpus = int(node.get("num_gpus_per_node", 1))
    fast = node.get("intra_node_bw", 0) > node.get("pcie_bw", 0)
    found = Imported(name, _gpu(facts), gpus, "none" if gpus < 2 else "nvlink" if fast else "pcie")
    reader = _Reader(root / "data" / name, found, (l2_mb or COLD_BYTES / 1e6) * 1e6, reference, date)
    reader.operators()
    found.allreduce = reader.curves()
    return found


def _gpu(facts: dict[str, Any]) -> dict[str, Any]:
    """The GPU's datasheet figures in a profile's units, from the system description (bytes, bytes/s, operations/s)."""
    gpu = facts.get("gpu") or {}
    units = {"memory_gb": ("mem_capacity", 1e9), "bandwidth_gb_s": ("mem_bw", 1e9), "power_w": ("power", 1.0)}
    units["bf16_tflops"] = ("bfloat16_tc_flops", 1e12)
    result: dict[str, Any] = {k: round(float(gpu[name]) / unit, 1) for k, (name, unit) in units.items() if name in gpu}
    if "sm_version" in gpu:
        major, minor = divmod(int(gpu["sm_version"]), 10)
        result["compute_capability"] = f"{major}.{minor}"
    return result


@dataclass(frozen=True)
class _Points:
    """Measured points of one operator class from one table: bytes, seconds, which were cached, and for the compute
    limit the same of large row counts with their operations."""

    sizes: Floats
    seconds: Floats
    source: Source
    cached: Floats | None = None
    large: tuple[Floats, Floats, Floats] | None = None  # bytes, seconds, operations


class _Reader:
    """Reads one system's tables into an `Imported`."""

    def __init__(self, root: Path, found: Imported, l2_bytes: float, reference: str, date: str) -> None:
        self.root, self.found, self.l2, self.reference, self.date = root, found, l2_bytes, reference, date

    def operators(self) -> None:
        """Fit every class that has a table. One that cannot be read or fitted is noted and the next one tried."""
        for name, formats in GEMMS.items():
            self.keep(name, self.gemm(formats))
        for name, formats in MOES.items():
            self.keep(name, self.experts(formats))
        self.keep("attention_gqa", self.gqa())
        self.keep("attention_mla", self.mla())
        self.keep("attention_linear", self.linear())

    def keep(self, name: str, candidates: Iterator[_Points]) -> None:
        """Keep the first candidate that fits well; else the best that fits at all and is physically possible."""
        tried: list[tuple[float, RateFit, _Points]] = []
        problems = []
        for points in candidates:
            try:
                fit = fit_rate(points.sizes, points.seconds, cached=points.cached, where=f"{self.found.system} {name}")
                self._check(fit, points.source.reference)
            except InputError as error:
                problems.append(str(error))
                continue
            tried.append((fit.median, fit, points))
            if fit.median <= GOOD_MEDIAN:
                break
        if not tried:
            self.found.notes += [f"{name} left out: {problem}" for problem in problems[:1]]
            return
        _, fit, points = min(tried, key=lambda t: t[0])
        peak = fit_peak(fit, *points.large) if points.large else None
        self.found.fits[name] = fit
        self.found.operators[name] = OperatorRate(
            fixed_us=float(f"{fit.fixed_s * 1e6:.3g}"),
            bandwidth_gb_s=float(f"{fit.bytes_per_s / 1e9:.4g}"),
            peak_tflops=float(f"{peak / 1e12:.3g}") if peak else None,
            relative_uncertainty=float(f"{max(fit.relative_uncertainty, LEAST_UNCERTAINTY):.2g}"),
            source=points.source,
            note=f"{counted(fit.points, 'point')}, median error {fit.median:.1%}, fixed +- {fit.fixed_error_s * 1e6:.2g} us",
        )

    def _check(self, fit: RateFit, where: str) -> None:
        """Refuse what no cold read shows: more than the memory gives, far less, or a fit that explains nothing."""
        share = fit.bytes_per_s / 1e9 / self.found.gpu.get("bandwidth_gb_s", fit.bytes_per_s / 1e9)
        if not LEAST_SHARE <= share <= MOST_SHARE:
            raise InputError(f"reads at {share:.0%} of the memory bandwidth", where=where)
        if fit.median > WORST_MEDIAN:
            raise InputError(f"misses the measured times by {fit.median:.0%} (median)", where=where)

    def tables(
        self, operator: str, table: str, *columns: str, frameworks: tuple[str, ...] = FRAMEWORKS
    ) -> Iterator[tuple[Columns, str]]:
        """Columns of the operator's tables and 'framework version', best first: by framework, then newest version."""
        for framework in frameworks:
            for version in _versions(self.root / operator / framework):
                path = version / f"{table}.parquet"
                if path.is_file():
                    try:
                        yield read_table(path, columns), f"{framework} {version.name}"
                    except InputError as error:
                        self.found.notes.append(str(error))

    def source(self, operator: str, table: str, version: str, detail: str) -> Source:
        where = f"{self.reference} {self.found.system}/{operator}/{table} ({version}; {detail})"
        return Source(kind="published", reference=where, date=self.date)

    def gemm(self, formats: tuple[str, ...]) -> Iterator[_Points]:
        """Linear layers: bytes are the weights'. Fixed and bandwidth from 2 to 16 rows, the peak from 512 and more."""
        for number in formats:
            for c, version in self.tables("gemm", "gemm_perf", "gemm_dtype", "m", "n", "k", "latency"):
                size = c["n"].astype(float) * c["k"] * WEIGHT_BYTES[number]
                usable = (c["gemm_dtype"] == number) & (c["n"] >= 512) & (c["k"] >= 512) & (size > GEMM_COLD_BYTES)
                few = usable & (c["m"] >= 2) & (c["m"] <= 16)
                many = usable & (c["m"] >= 512)
                seconds, flops = c["latency"] * 1e-3, 2.0 * c["m"] * c["n"] * c["k"]
                detail = f"{number}, 2 to 16 rows, weights above {GEMM_COLD_BYTES / 1e6:.0f} MB"
                source = self.source("gemm", "gemm_perf", version, detail)
                if few.any():
                    large = (size[many], seconds[many], flops[many])
                    yield _Points(size[few], seconds[few], source, large=large)

    def experts(self, formats: tuple[str, ...]) -> Iterator[_Points]:
        """The fused routed-expert path: bytes = distinct experts x three matrices. Balanced routing, for which the
        number of distinct experts is known: min(experts, rows x top-k)."""
        names = "moe_dtype kernel_source num_tokens hidden_size inter_size topk num_experts moe_tp_size moe_ep_size"
        columns = (*names.split(), "distribution", "latency")
        for number in formats:
            for c, version in self.tables("moe", "moe_perf", *columns):
                shard = c["inter_size"] / c["moe_tp_size"]
                usable = (c["moe_dtype"] == number) & (c["distribution"] == "balanced") & (c["moe_ep_size"] == 1)
                usable &= (c["num_tokens"] <= 64) & (c["num_experts"] >= 64) & (shard >= 192) & (shard <= 1024)
                usable &= (c["topk"] != UNGATED_TOPK) & (c["hidden_size"] != UNGATED_HIDDEN)
                distinct = np.minimum(c["num_experts"], c["num_tokens"].astype(float) * c["topk"])
                size = distinct * 3 * c["hidden_size"] * shard * WEIGHT_BYTES[number]
                cached = size < 0.6 * self.l2
                usable &= cached | (size > self.l2)
                for kernel in _by_count(c["kernel_source"][usable]):
                    rows = usable & (c["kernel_source"] == kernel)
                    detail = f"{kernel}, {number}, balanced, bandwidth from experts above {self.l2 / 1e6:.0f} MB"
                    source = self.source("moe", "moe_perf", version, detail)
                    yield _Points(size[rows], c["latency"][rows] * 1e-3, source, cached[rows])

    def gqa(self) -> Iterator[_Points]:
        """One decode attention call: bytes are the KV cache read. Contexts so short that bytes cost next to nothing
        give the fixed time, and those beyond twice the L2 the bandwidth."""
        table = "generation_attention_perf"
        columns = ("kernel_source", "batch_size", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype")
        for c, version in self.tables("attention", table, *columns, "step", "window_size", "latency"):
            usable = (c["head_dim"] == 128) & (c["window_size"] == 0) & (c["kv_cache_dtype"] == "bfloat16")
            usable &= c["num_heads"] >= 4 * c["num_key_value_heads"]
            size = c["batch_size"] * (c["step"] + 1.0) * c["num_key_value_heads"] * 128 * 2 * 2
            yield from self._attention(c, usable, size, "attention", table, version, "head size 128, bf16 cache")

    def mla(self) -> Iterator[_Points]:
        """As `gqa`, for multi-head latent attention with 8 to 16 heads a rank: 512 + 64 values a token."""
        table = "generation_mla_perf"
        columns = ("kernel_source", "num_heads", "batch_size", "kv_cache_dtype", "step", "latency")
        for c, version in self.tables("mla", table, *columns):
            usable = (c["kv_cache_dtype"] == "bfloat16") & (c["num_heads"] >= 8) & (c["num_heads"] <= 16)
            size = c["batch_size"] * (c["step"] + 1.0) * (512 + 64) * 2
            yield from self._attention(c, usable, size, "mla", table, version, "8 to 16 heads, bf16 cache")

    def _attention(
        self, c: Columns, usable: Floats, size: Floats, operator: str, table: str, version: str, detail: str
    ) -> Iterator[_Points]:
        step = c["step"] + 1
        usable = usable & (step >= 500) & (c["batch_size"] <= 64)
        usable &= ((step <= 2048) & (size < 0.05 * self.l2)) | (size > 2 * self.l2)
        for kernel in _by_count(c["kernel_source"][usable]):
            rows = usable & (c["kernel_source"] == kernel)
            source = self.source(operator, table, version, f"{kernel}, {detail}")
            yield _Points(size[rows], c["latency"][rows] * 1e-3, source)

    def linear(self) -> Iterator[_Points]:
        """The recurrent step of linear attention with its convolution: bytes are the state, read and written."""
        keys = ("batch_size", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "model_name")
        for c, version in self.tables("linear_attention", "gdn_perf", *keys, "phase", "kernel_source", "latency"):
            parts: dict[tuple[Any, ...], dict[str, float]] = {}
            for i in np.flatnonzero(c["phase"] == "generation"):
                parts.setdefault(tuple(c[k][i] for k in keys), {})[c["kernel_source"][i]] = float(c["latency"][i])
            both = {k: sum(v.values()) for k, v in parts.items() if len(v) == 2}
            state = np.array([float(k[0]) * k[2] * k[3] * k[4] * 4 * 2 for k in both])
            seconds = np.array(list(both.values())) * 1e-3
            rows = (state < 0.05 * self.l2) | (state > 2 * self.l2)
            detail = "recurrent step and convolution, fp32 state"
            source = self.source("linear_attention", "gdn_perf", version, detail)
            yield _Points(state[rows], seconds[rows], source)

    # --- all-reduce ---------------------------------------------------------------------------------------------

    def curves(self) -> list[AllReduceCurve]:
        """The newest curve of each implementation, rank count and mode; SGLang's before vLLM's and TensorRT-LLM's."""
        found: dict[tuple[str, int, str], AllReduceCurve] = {}
        columns = ("kernel_source", "num_gpus", "message_size", "latency")
        for c, version in self.tables("comm", "custom_allreduce_perf", *columns):
            for kernel in _by_count(c["kernel_source"]):
                implementation = "trtllm" if kernel.startswith("TRTLLM") else "custom"
                if implementation == "trtllm" and not version.startswith("trtllm"):
                    continue  # a copy of TensorRT-LLM's table under another name
                mode = "eager" if kernel.endswith("_eager") else "graph"
                self._curves(found, c, c["kernel_source"] == kernel, implementation, mode, version, kernel)
        loops = ("nccl_dtype", "op_name", "num_gpus", "message_size", "latency")
        for library in ("nccl", "oneccl"):
            for c, version in self.tables("comm", f"{library}_perf", *loops, frameworks=(library,)):
                rows = (c["nccl_dtype"] == "half") & (c["op_name"] == "all_reduce")
                self._curves(found, c, rows, library, "graph", version, "back-to-back loop")
        return [found[k] for k in sorted(found)]

    def _curves(
        self,
        found: dict[tuple[str, int, str], AllReduceCurve],
        c: Columns,
        rows: Floats,
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
            table = f"{implementation}_perf" if "ccl" in implementation else "custom_allreduce_perf"
            sizes = np.unique(size[here])
            times = np.array([float(np.median(c["latency"][here & (size == b)])) * 1e3 for b in sizes])
            times = _without_spikes(times)
            found[key] = AllReduceCurve(
                implementation=implementation,
                ranks=int(ranks),
                mode="eager" if mode == "eager" else "graph",
                bytes=[int(b) for b in sizes],
                latency_us=[float(f"{t:.3g}") for t in times],
                relative_uncertainty=CURVE_UNCERTAINTY,
                source=self.source("comm", table, version, detail),
            )


def small_kernels(system: str) -> dict[str, float]:
    """Seconds of the smallest kernels in the system's tables, to scale what no table holds: `convolution` (one row's
    causal convolution update) and `quantize` (fp8 scaling of one row of 7168). Absent ones are left out."""
    reader = _Reader(package_folder() / "data" / system, Imported(system, {}), COLD_BYTES, PACKAGE, "2026")
    result = {}
    for c, _ in reader.tables("linear_attention", "gdn_perf", "kernel_source", "batch_size", "latency"):
        rows = (c["kernel_source"] == "causal_conv1d_update") & (c["batch_size"] == 1)
        if rows.any() and "convolution" not in result:
            result["convolution"] = float(np.median(c["latency"][rows])) * 1e-3
    for c, version in reader.tables("quantize", "scale_matrix_perf", "m", "k", "latency"):
        rows = (c["m"] == 1) & (c["k"] == 7168)
        if rows.any() and version.startswith("sglang") and "quantize" not in result:
            result["quantize"] = float(np.median(c["latency"][rows])) * 1e-3
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


def _versions(folder: Path) -> list[Path]:
    """Version folders, the newest first."""
    return sorted(folder.iterdir(), key=_version, reverse=True) if folder.is_dir() else []


def _without_spikes(times: Floats) -> Floats:
    """Times over growing sizes without lone outliers (a running median of three) and never falling."""
    padded = np.concatenate([[0.0], times, [np.inf]])
    calm = np.median(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0)
    rising: Floats = np.sqrt(np.maximum.accumulate(calm) * np.minimum.accumulate(calm[::-1])[::-1])
    return rising
