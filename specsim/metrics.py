"""What a simulated run tells: latency percentiles, throughput, goodput, utilisation, and how batch and queue went.

    TTFT  first token - arrival             TPOT  (last token - first token) / (output tokens - 1)
    E2E   last token - arrival              queue time  start of prefill - arrival
    ITL   time between two chunks: `chunk` counts each chunk once (vLLM's benchmark), `token` divides it by its tokens and
          counts each token (SGLang's benchmark)

JSON is in the field names of SGLang's bench_serving, so that one script reads both. Percentiles of up to `EXACT`
requests are those of numpy; beyond, and for ITL always, they come from a histogram whose bins are 0.1 % wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.quantities import six
from specsim.simulation_reference import BINS, BUCKETS, COUNTERS, FINE

Ints = NDArray[np.int64]
Array = NDArray[np.float64]
EXACT = 200_000  # requests whose latencies are kept one by one
LATENCIES = ("ttft", "tpot", "e2e_latency", "queue_time")


def bins_of(ns: Ints) -> Ints:
    """Histogram bins of times in ns: exact below 2,048, then 1,024 bins in each power of two."""
    ns = np.maximum(ns, 0)
    _, exponent = np.frexp(ns.astype(np.float64))  # ns < 2**53, so exact
    shift = np.maximum(exponent - 11, 0).astype(np.int64)
    return np.asarray(shift * FINE + (ns >> shift))


def bin_middles() -> Array:
    """The middle of every bin, ns."""
    place = np.arange(BINS)
    shift = np.maximum(place // FINE - 1, 0)
    low = (place - shift * FINE) << shift
    return np.asarray(low + ((1 << shift) - 1) / 2)


@dataclass(frozen=True)
class Latency:
    """Mean, median, spread and percentiles of one latency, ms."""

    mean: float
    median: float
    std: float
    p90: float
    p95: float
    p99: float

    def json(self, name: str) -> dict[str, float]:
        """bench_serving's fields: mean_NAME_ms, ..."""
        return {
            f"{what}_{name}_ms": six(getattr(self, what)) for what in ("mean", "median", "std", "p90", "p95", "p99")
        }


def latency_of(values_ms: Array) -> Latency | None:
    """Of single values; None of none."""
    if not values_ms.size:
        return None
    p50, p90, p95, p99 = np.percentile(values_ms, [50, 90, 95, 99])
    return Latency(float(values_ms.mean()), float(p50), float(values_ms.std()), float(p90), float(p95), float(p99))


def latency_of_histogram(histogram: Ints, mean_ms: float | None = None) -> Latency | None:
    """Of a histogram of ns; `mean_ms` where it is known exactly."""
    seen = np.flatnonzero(histogram)
    if not seen.size:
        return None
    weight, middle = histogram[seen], bin_middles()[seen] / 1e6
    total = weight.sum()
    average = float((weight * middle).sum() / total)
    reached = weight.cumsum()
    p50, p90, p95, p99 = (float(middle[np.searchsorted(reached, q * (total - 1) + 1)]) for q in (0.5, 0.9, 0.95, 0.99))
    std = float(np.sqrt((weight * (middle - average) ** 2).sum() / total))
    return Latency(average if mean_ms is None else mean_ms, p50, std, p90, p95, p99)


class Collector:
    """Takes completed requests as they come; memory does not grow beyond `EXACT` of them."""

    def __init__(self, targets_ms: Mapping[str, float] | None = None) -> None:
        self.targets_ms = dict(targets_ms or {})
        self.good = 0
        self.count = 0
        self._kept: list[Ints] = []
        self._histograms: dict[str, Ints] = {}
        self._sums = dict.fromkeys(LATENCIES, 0.0)
        self._numbers = dict.fromkeys(LATENCIES, 0)

    def add(self, done: Ints) -> None:
        """Rows of `simulation_reference.DONE_FIELDS`."""
        if not len(done):
            return
        self.count += len(done)
        values = _latencies(done)
        good = np.ones(len(done), dtype=bool)
        for name, limit in self.targets_ms.items():
            good &= ~(values[name] > limit * 1e9)  # nan: a single token has no TPOT to miss
        self.good += int(good.sum())
        for name in LATENCIES:
            known = values[name][~np.isnan(values[name])]
            self._sums[name] += float(known.sum())
            self._numbers[name] += len(known)
        if self._histograms:
            self._fold(values)
            return
        self._kept.append(done)
        if self.count > EXACT:
            self._histograms = {name: np.zeros(BINS, dtype=np.int64) for name in LATENCIES}
            for rows in self._kept:
                self._fold(_latencies(rows))
            self._kept = []

    def _fold(self, values: Mapping[str, Array]) -> None:
        for name, histogram in self._histograms.items():
            known = values[name][~np.isnan(values[name])]
            places, counts = np.unique(bins_of(np.rint(known / 1e3).astype(np.int64)), return_counts=True)
            histogram[places] += counts

    def latencies(self) -> dict[str, Latency | None]:
        """By name in LATENCIES."""
        if self._histograms:
            return {
                name: latency_of_histogram(
                    self._histograms[name],
                    self._sums[name] / self._numbers[name] / 1e9 if self._numbers[name] else None,
                )
                for name in LATENCIES
            }
        done = np.concatenate(self._kept) if self._kept else np.zeros((0, 7), dtype=np.int64)
        values = _latencies(done)
        return {name: latency_of(values[name][~np.isnan(values[name])] / 1e9) for name in LATENCIES}

    @property
    def rows(self) -> Ints | None:
        """Completed requests one by one, in order of completion; None when there were more than `EXACT`."""
        if self._histograms:
            return None
        return np.concatenate(self._kept) if self._kept else np.zeros((0, 7), dtype=np.int64)


def _latencies(done: Ints) -> dict[str, Array]:
    """ps, by name; TPOT of a request with one token is nan."""
    _, arrival, started, first, finished, _, output = done.T
    steps = np.where(output > 1, output - 1, 1)
    return {
        "ttft": (first - arrival).astype(float),
        "tpot": np.where(output > 1, (finished - first) / steps, np.nan),
        "e2e_latency": (finished - arrival).astype(float),
        "queue_time": (started - arrival).astype(float),
    }


@dataclass(frozen=True)
class Timeline:
    """Averages over equal spans of time: requests running and waiting, share of time busy, output tokens a second."""

    seconds: Array  # where each span begins
    span_s: float
    running: Array
    waiting: Array
    busy: Array
    tokens_per_s: Array


@dataclass(frozen=True)
class Metrics:
    """Results of one simulated run. Latencies are None where no request had one (a single output token has no TPOT)."""

    completed: int
    rejected: int
    duration_s: float
    counters: Mapping[str, int]
    latencies: Mapping[str, Latency | None]
    itl_chunk: Latency | None
    itl_token: Latency | None
    timeline: Timeline
    good: int
    targets_ms: Mapping[str, float]
    accept_length: float | None
    kv_tokens: int
    rows: Ints | None = field(default=None, repr=False)

    @property
    def request_throughput(self) -> float:
        """Completed requests a second."""
        return self._rate(self.completed)

    @property
    def output_throughput(self) -> float:
        """Output tokens a second."""
        return self._rate(self.counters["output_tokens"])

    @property
    def goodput(self) -> float:
        """Requests a second that met every target."""
        return self._rate(self.good)

    @property
    def utilisation(self) -> float:
        """Share of the run in which the server worked."""
        return self._share(self.counters["busy"])

    @property
    def prefill_share(self) -> float:
        """Share of the run in steps that prefilled."""
        return self._share(self.counters["prefill_busy"])

    @property
    def mean_batch(self) -> float:
        """Sequences in a decode step, on average."""
        steps = self.counters["decode_steps"] + self.counters["mixed_steps"]
        return self.counters["sequence_steps"] / steps if steps else 0.0

    def _rate(self, number: int) -> float:
        return number / self.duration_s if self.duration_s else 0.0

    def _share(self, ps: int) -> float:
        return min(ps / 1e12 / self.duration_s, 1.0) if self.duration_s else 0.0

    def _mean(self, area: int) -> float:
        return area / 1e9 / self.duration_s if self.duration_s else 0.0

    def json(self) -> dict[str, Any]:
        """bench_serving's fields, then what only a simulator knows."""
        c = self.counters
        out: dict[str, Any] = {
            "completed": self.completed,
            "duration": six(self.duration_s),
            "total_input_tokens": c["input_tokens"],
            "total_output_tokens": c["output_tokens"],
            "request_throughput": six(self.request_throughput),
            "input_throughput": six(self._rate(c["input_tokens"])),
            "output_throughput": six(self.output_throughput),
            "total_throughput": six(self._rate(c["input_tokens"] + c["output_tokens"])),
        }
        for name in ("e2e_latency", "ttft", "tpot"):
            out |= _latency_json(self.latencies[name], name)
        out |= _latency_json(self.itl_token, "itl") | _latency_json(self.itl_chunk, "itl_chunk")
        out |= _latency_json(self.latencies["queue_time"], "queue_time")
        e2e = self.latencies["e2e_latency"]
        return out | {
            "concurrency": six(e2e.mean / 1e3 * self.request_throughput) if e2e else 0.0,
            "accept_length": None if self.accept_length is None else six(self.accept_length),
            "max_output_tokens_per_s": c["peak_second_tokens"],
            "max_concurrent_requests": c["peak_flight"],
            "request_goodput": six(self.goodput) if self.targets_ms else None,
            "targets_ms": dict(self.targets_ms),
            "rejected": self.rejected,
            "utilisation": six(self.utilisation),
            "prefill_share": six(self.prefill_share),
            "mean_decode_batch": six(self.mean_batch),
            "mean_running": six(self._mean(c["running_area"])),
            "mean_waiting": six(self._mean(c["waiting_area"])),
            "peak_running": c["peak_running"],
            "peak_waiting": c["peak_waiting"],
            "peak_kv_share": six(c["peak_kv"] / self.kv_tokens),
            "decode_steps": c["decode_steps"],
            "prefill_steps": c["prefill_steps"],
            "mixed_steps": c["mixed_steps"],
            "prefilled_tokens": c["prefill_tokens"],
            "prefix_cached_tokens": c["cached_tokens"],
            "retractions": c["retractions"],
            "recomputed_tokens": c["recomputed_tokens"],
            "timeline": {
                "span_s": six(self.timeline.span_s),
                "running": _list(self.timeline.running),
                "waiting": _list(self.timeline.waiting),
                "busy": _list(self.timeline.busy),
                "output_tokens_per_s": _list(self.timeline.tokens_per_s),
            },
        }


def metrics_of(
    collector: Collector,
    counters: Ints,
    chunk_histogram: Ints,
    token_histogram: Ints,
    timeline: Ints,
    *,
    speculative: bool,
    kv_tokens: int,
) -> Metrics:
    """Put together what a run left."""
    c = {name: int(value) for name, value in zip(COUNTERS, counters, strict=True)}
    per_token = c["chunk_ns"] / c["decode_tokens"] / 1e6 if c["decode_tokens"] else None
    steps = c["sequence_steps"]
    return Metrics(
        completed=c["completed"],
        rejected=c["rejected"],
        duration_s=c["last_finish"] / 1e12,
        counters=c,
        latencies=collector.latencies(),
        itl_chunk=latency_of_histogram(chunk_histogram, c["chunk_ns"] / c["chunks"] / 1e6 if c["chunks"] else None),
        itl_token=latency_of_histogram(token_histogram, per_token),
        timeline=_timeline(timeline, c["bucket_ns"], c["last_finish"] // 1000),
        good=collector.good,
        targets_ms=collector.targets_ms,
        accept_length=c["decode_tokens"] / steps if speculative and steps else None,
        kv_tokens=kv_tokens,
        rows=collector.rows,
    )


def _timeline(areas: Ints, bucket_ns: int, end_ns: int) -> Timeline:
    n = min(BUCKETS, end_ns // bucket_ns + 1)
    span = np.full(n, bucket_ns, dtype=float)
    running, waiting, busy = (row[:n] / span for row in areas[:3])
    seconds = np.arange(n) * bucket_ns / 1e9
    return Timeline(seconds, bucket_ns / 1e9, running, waiting, busy, areas[3, :n] / (span / 1e9))


def _latency_json(latency: Latency | None, name: str) -> dict[str, float]:
    return {} if latency is None else latency.json(name)


def _list(values: Array) -> list[float]:
    return [float(f"{x:.4g}") for x in values]
