"""Torch profiler and other Chrome traces, streamed: kernels by class and phase, graphs, gaps, all-reduce by size.

A trace of 1 GB holds some millions of events. They are decoded one at a time; of a kernel only its time, length, name
number, launch and device stay, in arrays of at most 4 million, so memory stays below a few hundred MB whatever the file.

Phases come from the annotations that SGLang (`step[TARGET_VERIFY bs=1]`, `draft`, `draft_extend`) and vLLM
(`execute_context_0(0)_generation_1(4)`) put on the GPU's time line, or on the CPU's by the launches within. Times are
those under the profiler, which lengthens steps: 8.3 ms against 6.6 ms was measured for a step of 2,199 kernels.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.errors import InputError
from specsim.observe_checks import make_record, number, quantity
from specsim.observe_read import Source, open_sources
from specsim.records import EngineRun, Point, Record
from specsim.redaction import plain, scrub

MAX_KERNELS = 4_000_000
MAX_LAUNCHES = 4_000_000
MAX_RANGES = 200_000
MAX_NAMES = 20_000
MAX_EVENT = 4 << 20  # characters
MAX_PREAMBLE = 16 << 20

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Kernel classes, first match wins: names of cuBLAS, CUTLASS, Triton, FlashInfer, FlashAttention, NCCL, SGLang, vLLM.
_CLASSES = [
    ("allreduce", r"all_?reduce|cross_device_reduce|quickreduce"),
    ("communication", r"nccl|all_?gather|reduce_?scatter|all_?to_?all|deep_?ep|nvshmem|send_?recv"),
    ("tiny", r"kv_buffer|kv_cache_kernel|reshape_and_cache|act_and_mul|rope|rotary|silu_and|gelu_and"),
    ("router", r"router|gating|grouped_topk|topk_softmax|moe_fused_gate"),
    ("moe", r"moe|expert|grouped_?gemm|group_gemm"),
    ("ssm", r"mamba|gated_delta|selective_s|causal_conv1d|recurrent_"),
    ("attention", r"mqa_logits|indexer|topk_transform|sparse_attn"),
    (
        "sampling",
        r"sampl|top_?[kp]|arg_?max|softmax|radix_?sort|multinomial|renorm|verify_?tree|tree_spec|build_tree|eagle",
    ),
    ("norm", r"norm"),
    ("attention", r"flash|fmha|attn|attention|mla|batch_?(decode|prefill)|merge_?state|xqa|split_?kv|paged"),
    ("gemm", r"gemm|gemv|nvjet|cutlass|cublas|xmma|wgmma|matmul|marlin|machete|split_?k|mm_kernel"),
    ("quantise", r"quant|scaled_fp|cast_fp"),
    ("copy", r"memcpy|memset"),
    (
        "tiny",
        r"elementwise|fill|copy|cat|index|reduce_kernel|arange|embed|scatter|gather|cumsum|transpose|triton_(poi|red|per)|metadata|scan",
    ),
]
_COMPILED = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _CLASSES]

_DTYPE_BYTES = {"float": 4, "int": 4, "half": 2, "bfloat16": 2, "double": 8, "long": 8, "byte": 1, "char": 1}
_GENERATION = re.compile(r"context_?(\d*)\((?:\d*)\)_?\s*generation_?(\d+)\((?:sq)?(\d+)")
_EVENT_EDGE = re.compile(r"\}\s*,\s*(?=\{)")
_FILLER = re.compile(r"[\s,]*")


@lru_cache(maxsize=4096)
def classify(name: str) -> str:
    """The class of a kernel by its name: allreduce, communication, router, moe, ssm, attention, sampling, norm, gemm,
    quantise, copy, tiny, or other."""
    for kind, pattern in _COMPILED:
        if pattern.search(name):
            return kind
    return "other"


@lru_cache(maxsize=4096)
def phase_of(name: str) -> tuple[str, int | None] | None:
    """(decode | verify | draft | extend | prefill, batch if told) of an annotation, None when it marks no phase."""
    lower = name.lower()
    batch = re.search(r"bs=(\d{1,6})", lower)
    size = int(batch.group(1)) if batch else None
    if match := _GENERATION.search(lower):
        waiting, running, tokens = match.group(1), int(match.group(2)[:9]), int(match.group(3)[:9])
        if waiting.strip("0"):
            return "prefill", None
        return ("verify" if tokens > running else "decode", running) if running else None
    step = re.match(r"step\[(\w+)", lower)
    word = step.group(1) if step else lower.split(":")[-1].strip().split(" ")[0]
    if "draft_extend" in word:
        return "extend", size
    if re.match(r"(target_)?verify$", word):
        return "verify", size
    if re.match(r"(eagle_|multi_step_)?draft(_forward)?$", word):
        return "draft", size
    if step and word == "decode":
        return "decode", size
    if step and word in ("extend", "prefill", "mixed"):
        return "prefill", size
    return None


def looks_like_trace(head: str) -> bool:
    """Whether a text that begins so is a Chrome trace."""
    return '"traceEvents"' in head or bool(re.match(r'\s*\[\s*\{[^{}]*"ph"\s*:\s*"', head))


def holds_trace(source: Source) -> bool:
    """Whether a document is a Chrome trace: before its events may come megabytes, such as the groups of many ranks."""
    read = ""
    for text in source.texts():
        read += text
        if looks_like_trace(read):
            return True
        if len(read) > MAX_PREAMBLE or not read.lstrip("\ufeff \t\r\n\0").startswith("{"):
            return False
    return False


@dataclass
class _Reader:
    """Streams the events of a trace; `preamble` is what came before them."""

    source: Source
    preamble: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    skipped: int = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """Each event object. Malformed ones are skipped, the first is noted with its place."""
        texts = self.source.texts()
        buffer, position, base = self._start(texts)
        decode = json.JSONDecoder().raw_decode
        ended = False
        while True:
            match = _FILLER.match(buffer, position)
            position = match.end() if match else position
            if position < len(buffer) and buffer[position] == "]":
                return
            try:
                if position >= len(buffer):
                    raise ValueError
                event, position = decode(buffer, position)
            except (ValueError, RecursionError):
                if not ended and len(buffer) - position < MAX_EVENT:
                    base += position
                    more = next(texts, None)
                    buffer, position, ended = buffer[position:] + (more or ""), 0, more is None
                    continue
                edge = _EVENT_EDGE.search(buffer, position)
                self._bad(base + position, last=edge is None and ended)
                if edge is None:
                    if ended:
                        return
                    base += len(buffer)
                    buffer, position = "", 0
                else:
                    position = edge.end()
                continue
            self.count += 1
            if isinstance(event, dict):
                yield event

    def _bad(self, place: int, last: bool) -> None:
        self.skipped += 1
        if last:
            self.source.note(f"the trace is cut off at character {place}, after {self.count} events; those are used")
        elif self.skipped == 1:
            self.source.note(
                f"event {self.count + 1}, at character {place}, is malformed; it and others like it were skipped"
            )

    def _start(self, texts: Iterator[str]) -> tuple[str, int, int]:
        buffer = ""
        for text in texts:
            buffer += text
            if match := re.search(r'"traceEvents"\s*:\s*\[', buffer):
                self._keep(buffer[: match.start()])
                return buffer, match.end(), 0
            if re.match(r"\s*\[\s*\{", buffer) and '"ph"' in buffer:
                return buffer, buffer.index("[") + 1, 0
            if len(buffer) > MAX_PREAMBLE:
                break
        raise InputError("holds no list of traceEvents", where=self.source.name, mend="give a Chrome trace")

    def _keep(self, before: str) -> None:
        try:
            parsed = json.loads(before.rstrip().rstrip(",") + "}")
        except (ValueError, RecursionError):
            return
        if isinstance(parsed, dict):
            self.preamble = parsed


@dataclass
class _Columns:
    """Kernels, launches and annotated ranges of a trace, in arrays."""

    start: array[float] = field(default_factory=lambda: array("d"))  # us
    length: array[float] = field(default_factory=lambda: array("d"))  # us
    name: array[int] = field(default_factory=lambda: array("l"))
    launch: array[int] = field(default_factory=lambda: array("q"))
    device: array[int] = field(default_factory=lambda: array("l"))
    node: array[int] = field(default_factory=lambda: array("b"))  # 1: the event itself says it is a graph's node
    names: dict[str, int] = field(default_factory=dict)
    launch_id: array[int] = field(default_factory=lambda: array("q"))
    launch_at: array[float] = field(default_factory=lambda: array("d"))
    launch_graph: array[int] = field(default_factory=lambda: array("b"))
    graph_us: list[float] = field(default_factory=list)
    eager_us: list[float] = field(default_factory=list)
    gpu_ranges: list[tuple[float, float, str, int]] = field(default_factory=list)
    cpu_ranges: list[tuple[float, float, str, int]] = field(default_factory=list)
    reduces: dict[tuple[int, int, str], array[float]] = field(default_factory=dict)
    capped: bool = False

    def add(self, event: dict[str, Any]) -> None:
        """Take what matters of one event."""
        category, name = event.get("cat"), event.get("name")
        start, length = number(event.get("ts")), number(event.get("dur"))
        if not isinstance(category, str) or not isinstance(name, str) or start is None or length is None or length < 0:
            return
        category = category.lower()
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            self._kernel(name, start, length, event.get("args"), event.get("pid"))
        elif category in ("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime"):
            if "launch" in name.lower():
                self._launch(name, start, length, event.get("args"))
        elif category in ("gpu_user_annotation", "user_annotation") and (phase := phase_of(name[:200])):
            ranges = self.gpu_ranges if category[0] == "g" else self.cpu_ranges
            if len(ranges) < MAX_RANGES:
                ranges.append((start, start + length, phase[0], phase[1] or 0))

    def _kernel(self, name: str, start: float, length: float, args: Any, process: Any) -> None:
        if len(self.start) >= MAX_KERNELS:
            self.capped = True
            return
        args = args if isinstance(args, dict) else {}
        name = plain(name)
        name = name[:300] if len(self.names) < MAX_NAMES or name[:300] in self.names else "other"
        self.start.append(start)
        self.length.append(length)
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.launch.append(_integer(args.get("correlation"), -1))
        self.device.append(_integer(args.get("device", process), 0) & 0x7FFFFFFF)
        self.node.append(1 if _integer(args.get("graph node id"), 0) > 0 else 0)
        if classify(name) == "allreduce":
            elements, width = number(args.get("In msg nelems")), _DTYPE_BYTES.get(str(args.get("dtype", "")).lower(), 0)
            size = int(elements * width) if elements and 0 < elements < 1e15 and width else -1
            key = (size, _integer(args.get("Group size"), 0), name[:80])
            if key in self.reduces or len(self.reduces) < 1000:
                values = self.reduces.setdefault(key, array("d"))
                values.append(length)

    def _launch(self, name: str, start: float, length: float, args: Any) -> None:
        correlation = _integer(args.get("correlation"), -1) if isinstance(args, dict) else -1
        graph = "graphlaunch" in name.lower()
        times = self.graph_us if graph else self.eager_us
        if len(times) < 200_000:
            times.append(length)
        if correlation >= 0 and len(self.launch_id) < MAX_LAUNCHES:
            self.launch_id.append(correlation)
            self.launch_at.append(start)
            self.launch_graph.append(int(graph))


def _integer(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else default


@dataclass(frozen=True)
class KernelClass:
    """Kernels of one class in one phase ("all": the whole trace). `seconds` is their sum, `steps` the phase's steps."""

    kind: str
    phase: str
    count: int
    seconds: float
    in_graph: int | None  # None where the trace does not tell what launched them
    steps: int
    top: str  # the name that takes most of the time

    @property
    def mean_us(self) -> float:
        """Mean time of a kernel, microseconds."""
        return 1e6 * self.seconds / self.count if self.count else 0.0


@dataclass
class _Analysis:
    columns: _Columns
    kinds: list[str]
    start: Floats
    length: Floats
    name: Ints
    launch: Ints
    in_graph: NDArray[np.bool_]
    told: NDArray[np.bool_]  # whether the trace says what launched the kernel: else `in_graph` means nothing
    step: Ints  # index of the step of each kernel, -1 for none
    steps: list[tuple[float, float, str, int]]
    device: int
    devices: int


def _merge(ranges: list[tuple[float, float, str, int]]) -> list[tuple[float, float, str, int]]:
    """Steps in order: copies of a range on further streams are merged, ranges inside a draft or extend belong to it."""
    outer: list[tuple[float, float, str, int]] = []
    for start, end, phase, batch in sorted(ranges, key=lambda r: (r[0], -r[1])):
        if outer:
            last = outer[-1]
            if start < last[1] and (phase == last[2] or end <= last[1]):
                inner_wins = phase == "verify" and last[2] not in ("draft", "extend")
                kept = phase if inner_wins else last[2]
                outer[-1] = (last[0], max(end, last[1]) if phase == last[2] else last[1], kept, last[3] or batch)
                continue
        outer.append((start, end, phase, batch))
    return outer


def _analyse(columns: _Columns) -> _Analysis:
    """Sort the busiest device's kernels and give each its step and whether a graph launched it."""
    devices = np.asarray(columns.device, dtype=np.int64)
    values, counts = np.unique(devices, return_counts=True)
    device = int(values[int(np.argmax(counts))]) if len(values) else 0
    mine = np.flatnonzero(devices == device)
    start = np.asarray(columns.start, dtype=np.float64)[mine]
    order = mine[np.argsort(start, kind="stable")]
    start = np.asarray(columns.start, dtype=np.float64)[order]
    length = np.asarray(columns.length, dtype=np.float64)[order]
    launch = np.asarray(columns.launch, dtype=np.int64)[order]
    ids = np.asarray(columns.launch_id, dtype=np.int64)
    in_graph = np.asarray(columns.node, dtype=np.int8)[order] > 0
    told = in_graph.copy()
    by_id = np.argsort(ids, kind="stable")
    ids = ids[by_id]
    if len(ids):
        place = np.minimum(np.searchsorted(ids, launch), len(ids) - 1)
        known = ids[place] == launch
        graphs = np.asarray(columns.launch_graph, dtype=np.int8)[by_id][place] > 0
        in_graph |= known & graphs
        told |= known
    if columns.gpu_ranges:
        steps, moment = _merge(columns.gpu_ranges), start
    else:
        steps = _merge(columns.cpu_ranges)
        moment = np.full(len(start), np.nan)
        if len(ids):
            moment = np.where(known, np.asarray(columns.launch_at, dtype=np.float64)[by_id][place], np.nan)
    step = np.full(len(start), -1, dtype=np.int64)
    if steps:
        begins = np.asarray([s[0] for s in steps])
        ends = np.asarray([s[1] for s in steps])
        at = np.searchsorted(begins, moment, side="right") - 1
        inside = (at >= 0) & (moment < ends[np.maximum(at, 0)] + 1e-6)
        step[inside] = at[inside]
    return _Analysis(
        columns=columns,
        kinds=[classify(n) for n in columns.names],
        start=start,
        length=length,
        name=np.asarray(columns.name, dtype=np.int64)[order],
        launch=launch,
        in_graph=in_graph,
        told=told,
        step=step,
        steps=steps,
        device=device,
        devices=len(values),
    )


def _table(found: _Analysis) -> list[KernelClass]:
    names = list(found.columns.names)
    phases = np.asarray([s[2] for s in found.steps] + ["outside"])[found.step] if found.steps else None
    groups = [("all", np.ones(len(found.start), dtype=bool))]
    if phases is not None:
        groups += [(str(p), phases == p) for p in sorted(set(phases.tolist()))]
    kind_of = np.asarray(found.kinds or ["other"])[found.name] if len(found.name) else np.asarray([], dtype=str)
    rows = []
    for phase, mask in groups:
        steps = sum(1 for s in found.steps if s[2] == phase)
        for kind in sorted(set(kind_of[mask].tolist())):
            chosen = mask & (kind_of == kind)
            per_name = np.bincount(found.name[chosen], weights=found.length[chosen], minlength=len(names))
            rows.append(
                KernelClass(
                    kind=kind,
                    phase=phase,
                    count=int(chosen.sum()),
                    seconds=float(found.length[chosen].sum()) / 1e6,
                    in_graph=int((chosen & found.in_graph).sum()) if (chosen & found.told).any() else None,
                    steps=steps,
                    top=names[int(np.argmax(per_name))][:100],
                )
            )
    order = {p: i for i, (p, _) in enumerate(groups)}
    return sorted(rows, key=lambda r: (order[r.phase], -r.seconds))


def kernels_table(trace: str | Path | Source) -> list[KernelClass]:
    """Kernel classes of a trace (path, address or opened source), over the whole and per phase, most time first.

    Raises InputError when the file is no trace. A damaged trace gives the table of its good part.
    """
    source = trace if isinstance(trace, Source) else open_sources(str(trace))[0]
    return _table(_analyse(_load(source)[0]))


def _load(source: Source) -> tuple[_Columns, _Reader]:
    columns, reader = _Columns(), _Reader(source)
    for event in reader.events():
        columns.add(event)
    if columns.capped:
        source.note(f"holds more than {MAX_KERNELS} kernels; the first were used")
    return columns, reader


def read_trace(source: Source) -> list[Record]:
    """One record: a point per phase, and samples of kernel classes, graphs and all-reduces."""
    columns, reader = _load(source)
    found = _analyse(columns)
    caveats, method = [], []
    if not len(found.start):
        caveats.append("the trace holds no GPU kernels: profile with CUDA activities")
    elif not found.steps:
        method.append("no annotation of a phase is in the trace: kernels are given for the whole, graphs by their size")
    else:
        where = "GPU's" if columns.gpu_ranges else "CPU's"
        method.append(
            f"phases are the annotated ranges on the {where} time line, a step runs from its first to last kernel"
        )
    if len(found.start):
        method.append("times are under the profiler, which lengthens steps: shares and counts are sounder than sums")
    environment = _environment(reader.preamble, found)
    points = _points(found)
    kinds = {p.cuda_graph for p in points}
    if {True, False} <= kinds:
        eager = [n.split(":")[0] for p in points if p.cuda_graph is False for n in p.notes[:1]]
        caveats.append(f"these phases are not in a CUDA graph while others are: {', '.join(eager)}")
    record = make_record(
        source,
        "trace",
        EngineRun(name="sglang" if any("step[" in n for n in _range_names(columns)) else "other"),
        points=points,
        method=method,
        caveats=caveats,
        environment=environment,
        samples=_samples(found),
    )
    return [record]


def _range_names(columns: _Columns) -> list[str]:
    return ["step["] if any(r[2] in ("draft", "extend") for r in columns.gpu_ranges + columns.cpu_ranges) else []


def _environment(preamble: dict[str, Any], found: _Analysis) -> dict[str, Any]:
    out: dict[str, Any] = {
        "kernels": len(found.start),
        "events_device": found.device,
        "devices_in_trace": found.devices,
    }
    properties = preamble.get("deviceProperties")
    if isinstance(properties, list) and properties and isinstance(properties[0], dict):
        out.update(gpu=str(properties[0].get("name", ""))[:80], gpus_seen=len(properties))
    distributed = preamble.get("distributedInfo")
    if isinstance(distributed, dict):
        out.update(
            {k: v for k in ("rank", "world_size", "nccl_version") if isinstance(v := distributed.get(k), (int, str))}
        )
    columns = found.columns
    if columns.graph_us:
        out["graph_launches"] = len(columns.graph_us)
        out["graph_launch_us"] = float(np.median(columns.graph_us))
    if columns.eager_us:
        out["eager_launches"] = len(columns.eager_us)
        out["eager_launch_us"] = float(np.median(columns.eager_us))
    if len(found.start):
        ends = np.maximum.accumulate(found.start + found.length)
        gaps = np.maximum(found.start[1:] - ends[:-1], 0.0)
        span = float(ends[-1] - found.start[0])
        idle = float(gaps.sum())
        out["span_ms"], out["idle_ms"] = span / 1000, idle / 1000
        out["idle_share"] = idle / span if span > 0 else 0.0
        out["gaps_over_20_us"] = int((gaps > 20).sum())
        names = list(columns.names)
        largest = [int(i) for i in np.argsort(gaps)[::-1][:3] if gaps[i] > 20]
        out["largest_gaps"] = [
            {
                "ms": float(gaps[i]) / 1000,
                "after": names[found.name[i]][:60],
                "before": names[found.name[i + 1]][:60],
                "at_ms": float(ends[i] - found.start[0]) / 1000,
            }
            for i in largest
        ]
    return scrub(out)  # type: ignore[no-any-return]


def _points(found: _Analysis) -> list[Point]:
    """A point per phase and batch, with the median time of a step on the GPU, and for speculation the cycle."""
    if not found.steps or not len(found.start):
        return []
    chosen = found.step >= 0
    index = found.step[chosen]
    total = len(found.steps)
    ends = (found.start + found.length)[chosen]
    first, last = np.full(total, np.inf), np.full(total, -np.inf)
    np.minimum.at(first, index, found.start[chosen])
    np.maximum.at(last, index, ends)
    counts = np.bincount(index, minlength=total)
    graph = np.bincount(index, weights=found.in_graph[chosen], minlength=total)
    told = np.bincount(index, weights=found.told[chosen], minlength=total)
    busy = np.bincount(index, weights=found.length[chosen], minlength=total)
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, (_, _, phase, batch) in enumerate(found.steps):
        if counts[i]:
            groups[phase, batch].append(i)
    points = []
    for (phase, batch), members in sorted(groups.items()):
        if phase == "prefill":
            continue
        spans = [float(last[i] - first[i]) / 1000 for i in members]
        kernels = float(np.median(counts[members]))
        known = told[members].sum()
        share = float(graph[members].sum() / known) if known > counts[members].sum() / 2 else None
        launched = "what launched them is not told" if share is None else f"{share:.0%} of them launched by a graph"
        point = Point(
            batch=batch or None,
            cuda_graph=None if share is None else share > 0.5,
            tokens_per_cycle=1.0 if phase == "decode" else None,
            notes=[
                f"{phase}: {len(members)} steps of {kernels:.0f} kernels, {launched};"
                f" busy {float(np.median(busy[members])) / 1000:.3g} ms a step; under the profiler"
            ],
            raw={
                "phase": phase,
                "steps": len(members),
                "kernels_per_step": kernels,
                **({} if share is None else {"share_in_graph": share}),
                "busy_ms": float(np.median(busy[members])) / 1000,
            },
        )
        setattr(point, f"{phase}_ms", quantity(spans, "first to last kernel of a step, under the profiler"))
        if phase == "verify" and len(members) > 2:
            follow = [float(first[b] - first[a]) / 1000 for a, b in pairwise(members)]
            point.cycle_ms = quantity(follow, "start of a verify to the start of the next, under the profiler")
        points.append(point)
    return points


def _samples(found: _Analysis) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row in _table(found):
        per_step = (
            {"ms_per_step": 1000 * row.seconds / row.steps, "per_step": row.count / row.steps} if row.steps else {}
        )
        rows.append(
            {
                "operator": row.kind,
                "phase": row.phase,
                "count": row.count,
                "total_ms": 1000 * row.seconds,
                "mean_us": row.mean_us,
                "in_graph": row.in_graph,
                "top": row.top,
                **per_step,
            }
        )
    rows += _graph_samples(found)
    for (size, ranks, name), lengths in sorted(found.columns.reduces.items()):
        values = np.asarray(lengths)
        rows.append(
            {
                "operator": "allreduce by size",
                "bytes": size if size >= 0 else None,
                "ranks": ranks or None,
                "implementation": name,
                "count": len(values),
                "median_us": float(np.median(values)),
                "p10_us": float(np.quantile(values, 0.1)),
                "p90_us": float(np.quantile(values, 0.9)),
                "note": "waiting for slower ranks included",
            }
        )
    return rows


def _graph_samples(found: _Analysis) -> list[dict[str, Any]]:
    """Graphs told apart by their number of kernels: launches and the time from first to last kernel."""
    mask = found.in_graph & (found.launch >= 0)
    if not mask.any():
        return []
    ids, inverse, counts = np.unique(found.launch[mask], return_inverse=True, return_counts=True)
    first, last = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(first, inverse, found.start[mask])
    np.maximum.at(last, inverse, (found.start + found.length)[mask])
    rows = []
    for kernels in sorted(set(counts.tolist()), reverse=True)[:20]:
        spans = (last - first)[counts == kernels]
        rows.append(
            {
                "operator": "cuda graph",
                "kernels": int(kernels),
                "launches": len(spans),
                "median_ms": float(np.median(spans)) / 1000,
            }
        )
    return rows
