"""Prometheus text of SGLang, vLLM and llama.cpp: gauges per rank, counters since the start, histograms.

SGLang prints each gauge once per tensor-parallel rank: one rank of each data-parallel group counts. vLLM prints counters
per engine, which add up; its `_created` samples are time stamps and never do. SGLang's inter-token latency is per token,
vLLM's per output of a step (per chunk).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from specsim.observe_checks import CONTRADICTION, check_length, check_rate, make_record, read_positions, read_rates
from specsim.observe_checks import number as finite
from specsim.observe_read import Source
from specsim.prometheus import LABEL, LABELS
from specsim.records import EngineRun, Point, Quantity, Record
from specsim.redaction import scrub

_SAMPLE = re.compile(
    rf"^(sglang|vllm|llamacpp)[:_]([a-zA-Z0-9_:]+){LABELS}\s+(\S+)(?:\s+-?[\d.]+)?(?:\s+# \{{.*)?\s*$"
)  # name, labels, value; a time stamp and an exemplar may follow
MAX_SAMPLES = 300_000

Samples = list[tuple[dict[str, str], float]]


class Metrics:
    """A scrape of `/metrics`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.engines: dict[str, dict[str, dict[str, tuple[dict[str, str], float]]]] = defaultdict(
            lambda: defaultdict(dict)
        )  # by engine, name and labels as written
        self.count = 0

    def feed(self, number: int, line: str) -> bool:
        """Take samples and their HELP and TYPE comments."""
        if line.startswith("# ") and re.match(r"# (HELP|TYPE) (sglang|vllm|llamacpp)[:_]", line):
            return True
        if not line.startswith(("sglang", "vllm", "llamacpp")):
            return False
        match = _SAMPLE.match(line)
        if match is None:
            if re.match(r"(sglang|vllm|llamacpp):\w+\{", line):
                self.source.note(f"line {number}: sample is cut off or garbled; skipped, as others like it")
                return True
            return False
        engine, name, labels, text = match.groups()
        if name.endswith(("_created", "_bucket")):
            return True
        try:
            value = finite(float(text))
        except ValueError:
            self.source.note(f"line {number}: {text[:40]!r} is not a number; skipped, as others like it")
            return True
        if value is None:
            return True
        self.count += 1
        if self.count > MAX_SAMPLES:
            self.source.note(f"line {number}: more than {MAX_SAMPLES} samples; the rest was skipped")
            return True
        samples, key = self.engines[engine][name], labels or ""
        if key in samples:
            self.source.note(f"line {number}: a further scrape begins; of several the last counts")
        samples[key] = (dict(LABEL.findall(key)), value)
        return True

    def records(self) -> list[Record]:
        """One record an engine."""
        readers = {"sglang": _sglang, "vllm": _vllm, "llamacpp": _llamacpp}
        return [
            readers[engine](self.source, {name: list(samples.values()) for name, samples in found.items()})
            for engine, found in sorted(self.engines.items())
        ]


def _per_group(samples: Samples) -> list[float]:
    """One value per data-parallel rank, of its lowest tensor-parallel rank; draft engines left out."""
    best: dict[str, tuple[float, float]] = {}
    for labels, value in samples:
        if labels.get("engine_type") == "draft":
            continue
        rank = float(labels["tp_rank"]) if labels.get("tp_rank", "").isdecimal() else 0.0
        key = labels.get("dp_rank", "") + labels.get("pp_rank", "")
        if key not in best or rank < best[key][0]:
            best[key] = (rank, value)
    return [value for _, value in best.values()]


def _total(samples: Samples) -> float | None:
    return sum(value for _, value in samples) if samples else None


def _mean_ms(metrics: dict[str, Samples], *names: str) -> float | None:
    """Mean of the first histogram that has counts, seconds to ms."""
    for name in names:
        total, count = _total(metrics.get(f"{name}_sum", [])), _total(metrics.get(f"{name}_count", []))
        if total is not None and count and count > 0 and total > 0:
            return 1000 * total / count
    return None


def _record(
    source: Source,
    name: str,
    engine: EngineRun,
    point: Point,
    method: list[str],
    caveats: list[str],
    environment: dict[str, Any],
) -> Record:
    return make_record(
        source, name, engine, points=[point], method=method, caveats=caveats, environment=scrub(environment)
    )


def _rates_misnamed(metrics: dict[str, Samples], caveats: list[str]) -> None:
    for name, samples in metrics.items():
        if name.endswith(("_rate", "_utilization")) and "spec" in name:
            worst = max((abs(v) for _, v in samples), default=0.0)
            if problem := check_rate(worst, name):
                caveats.append(problem)


def _sglang(source: Source, metrics: dict[str, Samples]) -> Record:
    method: list[str] = []
    caveats: list[str] = []
    environment: dict[str, Any] = {}
    lengths = [v for v in _per_group(metrics.get("spec_accept_length", [])) if v > 0]
    rates = [v for v in _per_group(metrics.get("spec_accept_rate", [])) if v > 0]
    running, throughput = _per_group(metrics.get("num_running_reqs", [])), _per_group(metrics.get("gen_throughput", []))
    d_given = [int(v) for _, v in metrics.get("spec_num_draft_tokens", []) if 1 < v < 1000]
    _rates_misnamed(metrics, caveats)
    length = sum(lengths) / len(lengths) if lengths else None
    d = d_given[0] if d_given else None
    if length is not None:
        method.append("accept length: a gauge of the last log interval, bonus token included; draft engines left out")
        if problem := check_length(length, d):
            caveats.append(problem)
        if rates and len(rates) == len(lengths):
            meaning = read_rates([(n, r) for n, r in zip(lengths, rates, strict=True)], d)
            (caveats if meaning.message.startswith(CONTRADICTION) else method).append(meaning.message)
    ranks = max(len(running), len(throughput))
    if ranks > 1:
        method.append(
            f"gauges are per rank: one of each of {ranks} data-parallel ranks was taken; throughput is their sum"
        )
    batch = round(max(running)) if running and 0 < max(running) < 1e6 else None
    tokens = sum(throughput) if throughput and sum(throughput) > 0 else None
    point = Point(
        batch=batch,
        tokens_per_cycle=length,
        tokens_per_s=Quantity(value=tokens, n=len(throughput), how="gen_throughput, last log interval")
        if tokens
        else None,
    )
    if (
        batch
        and throughput
        and (best := throughput[running.index(max(running))] if len(running) == len(throughput) else 0.0) > 0
    ):
        step = Quantity(
            value=1000 * batch * (length or 1.0) / best, n=1, how="one gauge reading: batch x length / throughput"
        )
        point.notes.append("from gauges of one moment, maybe not of the same interval: rough")
        if length is not None:
            point.cycle_ms = step
        elif "spec_accept_length" not in metrics:
            point.decode_ms = step
    if (itl := _mean_ms(metrics, "inter_token_latency_seconds", "time_per_output_token_seconds")) is not None:
        method.append("inter-token latency: per token, mean since the start")
        point.raw["inter_token_latency_ms"] = itl
    _graph_passes(metrics, point, caveats)
    _busy(metrics, environment, method)
    calls, made = _total(metrics.get("spec_verify_calls_total", [])), _total(metrics.get("generation_tokens_total", []))
    if calls and made:
        environment["generated_tokens_per_verify_call"] = made / calls
    return _record(source, "SGLang metrics", EngineRun(name="sglang"), point, method, caveats, environment)


def _graph_passes(metrics: dict[str, Samples], point: Point, caveats: list[str]) -> None:
    """`cuda_graph_passes_total{mode="decode_cuda_graph"|"decode_none"}`: passes since the start."""
    passes: dict[str, float] = defaultdict(float)
    for labels, value in metrics.get("cuda_graph_passes_total", []):
        passes[labels.get("mode", "")] += value
    graph, eager = passes.get("decode_cuda_graph", 0.0), passes.get("decode_none", 0.0)
    if graph + eager > 0:
        point.cuda_graph = graph > eager
        point.raw.update(decode_graph_passes=graph, decode_eager_passes=eager)
        if eager > 0 and eager > 0.02 * (graph + eager):
            caveats.append(f"{eager:.0f} of {graph + eager:.0f} decode or verify passes ran without a CUDA graph")
    elif flags := [v for labels, v in metrics.get("is_cuda_graph", []) if labels.get("engine_type") != "draft"]:
        point.cuda_graph = flags[0] > 0


def _busy(metrics: dict[str, Samples], environment: dict[str, Any], method: list[str]) -> None:
    by_category: dict[str, list[float]] = defaultdict(list)
    for labels, value in metrics.get("gpu_execution_seconds_total", []):
        by_category[labels.get("category", "")].append(value)
    if by_category:
        environment["gpu_seconds"] = {k: max(v) for k, v in sorted(by_category.items())[:20]}
        method.append("gpu_execution_seconds: GPU time by forward mode since the start, of the busiest rank")


def _positions(samples: Samples) -> tuple[dict[int, float], int]:
    sums: dict[int, float] = defaultdict(float)
    engines = set()
    for labels, value in samples:
        text = labels.get("position", "")
        if text.isdecimal() and len(text) < 4:
            sums[int(text)] += value
            engines.add(labels.get("engine", ""))
    return dict(sorted(sums.items())), len(engines)


def _counted(
    prefix: str, metrics: dict[str, Samples], method: list[str], caveats: list[str]
) -> tuple[float | None, list[float] | None, dict[str, Any]]:
    """Length, conditional rates and counters from draft, accepted and per-position counters."""

    def of(name: str) -> Samples:
        return metrics.get(f"{prefix}{name}_total") or metrics.get(f"{prefix}{name}") or []

    drafts, drafted, accepted = (
        _total(of("num_drafts")),
        _total(of("num_draft_tokens")),
        _total(of("num_accepted_tokens")),
    )
    raw = {k: v for k, v in (("drafts", drafts), ("drafted", drafted), ("accepted", accepted)) if v is not None}
    sums, engines_with = _positions(of("num_accepted_tokens_per_pos"))
    if not drafts or drafts <= 0 or accepted is None:
        return None, None, raw
    method.append("accept length = 1 + accepted / drafts: counters since the start, all engines, bonus token included")
    length = 1 + accepted / drafts
    if drafted and accepted == 0:
        caveats.append("no drafted token was accepted: speculation is broken, not weak")
    if problem := check_length(length, round(drafted / drafts) + 1 if drafted else None):
        caveats.append(problem)
    if not sums:
        return length, None, raw
    engines = len({labels.get("engine", "") for labels, _ in of("num_drafts")})
    if engines_with < engines:
        caveats.append(f"{engines_with} of {engines} engines give positions")
    read = read_positions(length, [v / drafts for v in sums.values()])
    (caveats if read.message.startswith(CONTRADICTION) else method).append(read.message)
    return length, read.rates, raw


def _vllm(source: Source, metrics: dict[str, Samples]) -> Record:
    method: list[str] = []
    caveats: list[str] = []
    environment: dict[str, Any] = {}
    length, rates, raw = _counted("spec_decode_", metrics, method, caveats)
    _rates_misnamed(metrics, caveats)
    for name in ("spec_decode_draft_acceptance_rate", "spec_decode_efficiency"):
        if metrics.get(name):
            environment[name] = metrics[name][0][1]
            method.append(f"{name}: a gauge of vLLM V0; efficiency x (k + 1) is the accept length")
    running = [v for _, v in metrics.get("num_requests_running", [])]
    engines = {labels.get("engine", "") for samples in metrics.values() for labels, _ in samples} - {""}
    if len(engines) > 1:
        method.append(f"counters of {len(engines)} engines are summed; time stamps (_created) are not counters")
        environment["dp_ranks"] = len(engines)
    point = Point(
        batch=round(max(running)) if running and 0 < max(running) < 1e6 else None,
        tokens_per_cycle=length,
        accept_rate_by_position=rates,
        raw=raw,
    )
    itl = _mean_ms(metrics, "inter_token_latency_seconds", "time_per_output_token_seconds")
    if itl is not None:
        method.append(
            "inter-token latency: per output of a step (per chunk, so a cycle with speculation), mean since the start"
        )
        point.raw["inter_token_latency_ms"] = itl
        point.notes.append("mean latency since the start, at varying batch and with prefills between")
        point.batch = None
        time = Quantity(value=itl, how="mean inter-token latency since the start, at varying batch")
        if length is not None:
            point.cycle_ms = time
        elif not any(name.startswith("spec_decode") for name in metrics):
            point.tokens_per_cycle, point.decode_ms = 1.0, time
    return _record(source, "vLLM metrics", EngineRun(name="vllm"), point, method, caveats, environment)


def _llamacpp(source: Source, metrics: dict[str, Samples]) -> Record:
    method: list[str] = []
    caveats: list[str] = []
    length, rates, raw = _counted("spec_decode_", metrics, method, caveats)
    point = Point(tokens_per_cycle=length, accept_rate_by_position=rates, raw=raw)
    return _record(
        source, "llama.cpp metrics", EngineRun(name="other", version="llama.cpp"), point, method, caveats, {}
    )
