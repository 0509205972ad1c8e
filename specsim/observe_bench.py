"""Other benchmarks' JSON: one-batch, speculative sweep, request metrics, llm-inference-bench, GuideLLM; and the table of
all JSON formats.

GuideLLM's inter-token latency is per token and its "time per output token" contains the first token's wait.
llm-inference-bench gives seconds per token and per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specsim.observe_checks import (
    CONTRADICTION,
    check_length,
    iso_date,
    make_record,
    measured,
    number,
    numbers_of,
    positive,
    title,
    whole,
)
from specsim.observe_read import Source
from specsim.observe_serving import bench_record
from specsim.observe_sglang import server_info_record
from specsim.records import EngineRun, Point, Record
from specsim.redaction import scrub

_KEPT_OF_CELL = (
    "concurrency",
    "context_tokens",
    "aggregate_tps",
    "ttft_avg",
    "total_tokens",
    "num_errors",
    "server_spec_accept_rate",
    "server_gen_throughput",
    "inter_token_latency_avg",
    "chunk_inter_token_latency_avg",
)


def one_batch_record(source: Source, row: Mapping[str, Any], place: str) -> list[Record]:
    """A line of SGLang's bench_one_batch_server. Newer ones subtract the time to the last first token, older do not."""
    batch, made, given = whole(row.get("batch_size")), positive(row.get("output_len")), number(row.get("input_len"))
    latency, rate = positive(row.get("latency")), positive(row.get("output_throughput"))
    first, length = number(row.get("last_ttft")), positive(row.get("acc_length"))
    method, caveats = [], []
    if length is not None:
        method.append("acc_length: the server's average since its start, bonus token included")
        if problem := check_length(length):
            caveats.append(problem)
            length = None
    elif "acc_length" in row:
        method.append("acc_length is -1 or null: no speculation")
        length = 1.0
    point = Point(
        batch=batch,
        context=whole(given + made / 2) if given is not None and made else None,
        tokens_per_cycle=length,
        raw=numbers_of(row, [*row.keys()][:30]),
    )
    if batch and made and latency and rate:
        whole_rate = batch * made / latency
        decode_rate = batch * made / (latency - first) if first is not None and latency > first >= 0 else None
        if decode_rate and abs(rate / decode_rate - 1) < 0.05:
            method.append("output throughput is over the time after the last first token: pure decoding")
        elif abs(rate / whole_rate - 1) < 0.05:
            method.append("output throughput is over the whole latency, prefill included")
        else:
            caveats.append(
                f"{CONTRADICTION}output throughput {rate:g} is not batch x output / latency, with or without prefill"
            )
        point.tokens_per_s = measured(rate, "output throughput")
        if decode_rate:
            step = 1000 * batch / decode_rate * (length or 1.0)
            how = "(latency - last first token) x accept length / output length"
            if length and length > 1:
                point.cycle_ms = measured(step, how)
            elif length == 1.0:
                point.decode_ms = measured(step, how)
        else:
            point.notes.append("the time to the first token is not given, so prefill cannot be separated: no step time")
    engine = EngineRun(name="sglang")
    return [
        make_record(
            source,
            title("SGLang bench_one_batch_server", place),
            engine,
            points=[point],
            method=method,
            caveats=caveats,
        )
    ]


def speculative_record(source: Source, row: Mapping[str, Any], place: str) -> list[Record]:
    """A line of SGLang's bench_speculative: step_time in seconds, 20th percentile; speed = acc_length / step_time."""
    length, step, speed = positive(row.get("acc_length")), positive(row.get("step_time")), positive(row.get("speed"))
    steps, d = whole(row.get("steps")), whole(row.get("num_draft_tokens"))
    method = ["step_time: seconds a cycle, 20th percentile of what the server timed; acc_length with the bonus token"]
    caveats = []
    speculates = bool(steps)
    if length is not None and (problem := check_length(length, d if speculates else 1)):
        caveats.append(problem)
        length = None
    if length and step and speed:
        if abs(speed * step / length - 1) > 0.05:
            caveats.append(f"{CONTRADICTION}speed {speed:g} is not accept length / step time = {length / step:.1f}")
        method.append("speed is tokens/s of one request, not of the batch")
    batch = whole(row.get("batch_size"))
    time = measured(1000 * step if step else None, "20th percentile of the server's step times")
    point = Point(
        batch=batch,
        tokens_per_cycle=length if speculates else 1.0,
        cycle_ms=time if speculates else None,
        decode_ms=None if speculates else time,
        tokens_per_s=measured(speed * batch if speed and batch else None, "speed x batch"),
        raw=numbers_of(
            row,
            [
                "batch_size",
                "steps",
                "topk",
                "num_draft_tokens",
                "acc_length",
                "step_time",
                "speed",
                "completion_tokens",
            ],
        ),
    )
    flags = []
    if speculates:
        for flag, key in (("num-steps", "steps"), ("eagle-topk", "topk"), ("num-draft-tokens", "num_draft_tokens")):
            if (value := whole(row.get(key))) is not None:
                flags += [f"--speculative-{flag}", str(value)]
    engine = EngineRun(name="sglang", flags=flags)
    return [
        make_record(
            source, title("SGLang bench_speculative", place), engine, points=[point], method=method, caveats=caveats
        )
    ]


def request_record(source: Source, row: Mapping[str, Any], place: str) -> list[Record]:
    """vLLM's metrics of one answer (`metrics.speculative_decoding`)."""
    metrics = row.get("metrics")
    spec = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(spec, dict):
        return []
    cycles, accepted = positive(spec.get("num_spec_steps")), number(spec.get("num_accepted_draft_tokens"))
    printed = positive(spec.get("mean_acceptance_length"))
    length = 1 + accepted / cycles if cycles and accepted is not None else printed
    caveats = []
    if length and printed and abs(length - printed) > 0.01 * length:
        caveats.append(
            f"{CONTRADICTION}1 + accepted / steps = {length:.3f} but mean_acceptance_length is {printed:.3f}"
        )
    histogram = spec.get("acceptance_histogram")
    counts = (
        [c for c in (number(x) for x in histogram) if c is not None and c >= 0] if isinstance(histogram, list) else []
    )
    rates = [sum(counts[i + 1 :]) / rest for i in range(len(counts) - 1) if (rest := sum(counts[i:])) > 0]
    point = Point(
        batch=1,
        tokens_per_cycle=length,
        accept_rate_by_position=rates or None,
        raw=numbers_of(spec, ["num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens"]),
    )
    method = [
        "one request: length = 1 + accepted / cycles, bonus token included; positions from the histogram, conditional"
    ]
    return [
        make_record(
            source,
            title("vLLM request metrics", place),
            EngineRun(name="vllm"),
            points=[point],
            method=method,
            caveats=caveats,
        )
    ]


def inference_bench_record(source: Source, document: Mapping[str, Any], place: str = "") -> list[Record]:
    """llm-inference-bench: cells of concurrency and context. Early versions store a counter as an accept rate."""
    meta = document.get("metadata")
    meta = meta if isinstance(meta, dict) else {}
    results = document.get("results")
    rows = [r for r in results if isinstance(r, dict)] if isinstance(results, list) else []
    given = [r for row in rows if (r := number(row.get("server_spec_accept_rate"))) is not None]
    bad = [r for r in given if not 0 <= r <= 1]
    method, caveats = [], []
    if bad:
        span = f"{min(bad):g} to {max(bad):g}" if len(bad) > 1 else f"{bad[0]:g}"
        caveats.append(
            f"{CONTRADICTION}server_spec_accept_rate is {span}: a counter under a rate's name; never used as acceptance"
        )
    elif any(given):
        method.append(
            "server_spec_accept_rate: the server's own of a short window; not used (SGLang's was L / d before April 2026)"
        )
    points = [p for row in rows if (p := _cell(row, bool(bad), any(given), method, caveats)) is not None]
    if any(p.cycle_ms for p in points):
        method.append("accept length = chunk latency / latency per token: one chunk a cycle, bonus token included")
    name = str(meta.get("engine", "")).lower()
    engine = EngineRun(name="vllm" if "vllm" in name else "sglang" if "sglang" in name else "other")
    environment = scrub({k: meta[k] for k in ("model", "version", "engine", "timestamp", "max_tokens") if k in meta})
    gpus = document.get("startup_diagnostics")
    query = gpus.get("nvidia_smi_query") if isinstance(gpus, dict) else None
    text = query.get("stdout") if isinstance(query, dict) else None
    if isinstance(text, str):
        lines = [line.split(",") for line in text.splitlines() if line.count(",") >= 2]
        if lines:
            environment.update(gpu=lines[0][1].strip()[:80], gpus=len(lines), driver=lines[0][2].strip()[:40])
    heading = title("llm-inference-bench", place)
    return [
        make_record(
            source,
            heading,
            engine,
            points=points,
            method=method,
            caveats=caveats,
            environment=environment,
            date=iso_date(meta.get("timestamp")),
        )
    ]


def _cell(
    row: Mapping[str, Any], counter: bool, speculates: bool, method: list[str], caveats: list[str]
) -> Point | None:
    batch = whole(row.get("effective_concurrency")) or whole(row.get("concurrency"))
    rate = positive(row.get("aggregate_tps"))
    if not batch or not rate:
        return None
    per_token, per_chunk = (
        positive(row.get("inter_token_latency_avg")),
        positive(row.get("chunk_inter_token_latency_avg")),
    )
    length = per_chunk / per_token if per_token and per_chunk else None
    point = Point(
        batch=batch,
        context=whole(row.get("context_tokens")),
        tokens_per_s=measured(rate, "aggregate throughput of the cell"),
        raw=numbers_of(row, _KEPT_OF_CELL),
    )
    if counter:
        point.raw.pop("server_spec_accept_rate", None)
    share = number(row.get("server_spec_accept_rate"))
    if per_token and per_chunk and length is not None and (length > 1.05 or (speculates and (share or 0) > 0)):
        method.append("inter_token_latency is per token, chunk_inter_token_latency per chunk (seconds)")
        point.tokens_per_cycle, point.cycle_ms = length, measured(1000 * per_chunk, "mean time between chunks")
    elif not counter and not speculates:
        step = per_token if per_token else batch / rate
        point.tokens_per_cycle = 1.0
        point.decode_ms = measured(
            1000 * step, "latency per token" if per_token else "concurrency / throughput, first tokens included"
        )
    elif not counter:
        point.notes.append("no latency per token and per chunk in this version: no cycle time")
    if row.get("underfilled") is True:
        point.notes.append("fewer requests ran than asked for")
    if point.cycle_ms and length and abs(rate * point.cycle_ms.value / (1000 * batch * length) - 1) > 0.15:
        caveats.append(
            f"{CONTRADICTION}concurrency {batch}: throughput x cycle = {rate * point.cycle_ms.value / 1000:.1f}"
            f" but batch x length = {batch * length:.1f}"
        )
    return point


def guidellm_record(source: Source, document: Mapping[str, Any], place: str = "") -> list[Record]:
    """GuideLLM: ITL is per token; its time_per_output_token contains the wait for the first token and is not used."""
    method = [
        "inter_token_latency_ms is per token: (last - first token) / (tokens - 1)",
        "time_per_output_token_ms is request latency / tokens, first token included: not used",
    ]
    points, caveats = [], []
    benchmarks = document.get("benchmarks")
    for row in benchmarks if isinstance(benchmarks, list) else []:
        metrics = row.get("metrics") if isinstance(row, dict) else None
        if not isinstance(metrics, dict):
            continue
        itl = positive(_stat(metrics, "inter_token_latency_ms"))
        rate = positive(_stat(metrics, "output_tokens_per_second"))
        running = positive(_stat(metrics, "request_concurrency"))
        chunk = positive(_stat(metrics, "output_tokens_per_iteration"))
        given, made = number(_stat(metrics, "prompt_token_count")), number(_stat(metrics, "output_token_count"))
        point = Point(
            batch=max(1, round(running)) if running and running < 1e9 else None,
            context=whole(given + made / 2) if given is not None and made is not None else None,
            tokens_per_s=measured(rate, "mean output tokens per second"),
            raw={
                k: v
                for k in (
                    "inter_token_latency_ms",
                    "time_per_output_token_ms",
                    "time_to_first_token_ms",
                    "output_tokens_per_iteration",
                )
                if (v := number(_stat(metrics, k))) is not None
            },
        )
        if itl and chunk and chunk > 1.05:
            point.tokens_per_cycle, point.cycle_ms = (
                chunk,
                measured(itl * chunk, "latency per token x tokens per chunk"),
            )
            method.append("accept length = output_tokens_per_iteration: tokens a streamed chunk, one chunk a cycle")
        elif itl and chunk:
            point.tokens_per_cycle, point.decode_ms = 1.0, measured(itl, "latency per token")
        elif itl:
            point.notes.append("latency per token is known, but not whether speculation was on: no step time")
        if rate and itl and running and rate * itl / 1000 > 1.15 * running:
            caveats.append(
                f"{CONTRADICTION}throughput x latency per token = {rate * itl / 1000:.1f}, above the {running:.1f} at once"
            )
        points.append(point)
    heading = title("GuideLLM", place)
    return [make_record(source, heading, EngineRun(name="other"), points=points, method=method, caveats=caveats)]


def _stat(metrics: Mapping[str, Any], name: str) -> Any:
    """The mean of a metric: `metrics[name].successful.mean`, or `.mean` in early reports."""
    entry = metrics.get(name)
    if not isinstance(entry, dict):
        return None
    inner = entry.get("successful", entry)
    return inner.get("mean", inner.get("median")) if isinstance(inner, dict) else None


# The first format whose test the object passes reads it.
JSON_FORMATS: list[
    tuple[Callable[[Mapping[str, Any]], bool], Callable[[Source, Mapping[str, Any], str], list[Record]]]
] = [
    (lambda r: isinstance(r.get("benchmarks"), list), guidellm_record),
    (lambda r: isinstance(r.get("results"), list) and isinstance(r.get("metadata"), dict), inference_bench_record),
    (lambda r: {"acc_length", "step_time", "num_draft_tokens"} <= r.keys(), speculative_record),
    (lambda r: {"batch_size", "input_len", "output_len", "latency"} <= r.keys(), one_batch_record),
    (lambda r: isinstance(r.get("metrics"), dict) and "speculative_decoding" in r["metrics"], request_record),
    (lambda r: "output_throughput" in r and ("duration" in r or "backend" in r or "completed" in r), bench_record),
    (lambda r: "internal_states" in r or {"tp_size", "model_path"} <= r.keys(), server_info_record),
]


def read_object(source: Source, row: Any, place: str) -> list[Record]:
    """Records of one JSON object, or none when it is of no known format."""
    if not isinstance(row, dict):
        return []
    for fits, read in JSON_FORMATS:
        if fits(row):
            return read(source, row, place)
    return []
