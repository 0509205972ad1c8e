"""A live server under load: Poisson arrivals as `specsim simulate` draws them, every request streamed and timed."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from specsim.host_speed import Watch
from specsim.live import (
    FIRST_ID,
    LAST_ID,
    ChangedError,
    Client,
    Counters,
    PointError,
    Served,
    ServerError,
    added,
    check_same,
    counters,
    cycles_of,
    histogram_of,
)
from specsim.measure import ACCEPTED, DRAFTS, TIMER, growth, retracted
from specsim.metrics import latency_of
from specsim.quantities import counted, six
from specsim.records import LoadRun, Quantity, Record
from specsim.streams import Stream, send
from specsim.workload import PS, Lengths, synthetic

Say = Callable[[str], None]
LAG = 0.02  # share of the median gap between chunks that the client's own lag may have
LONE = 8  # lone requests in the warm-up
WARM_S = 8.0  # seconds of the first load that are sent and not measured: the first 6 s of a server's first load ran 9 to 31 % slower
BURST = 32  # chunks whose pace is measured: half of those that a step makes at least
DRAIN_S = 10.0  # what warm-up and the last requests take as a rule

Tokens = Annotated[int, Field(ge=1, le=2**20)]
Rate = Annotated[float, Field(gt=0, le=1e5)]


class Load(BaseModel):
    """What to send: `num_requests` at each of `rates` (one number for all, or one each), all of the same lengths."""

    model_config = ConfigDict(extra="forbid")

    rates: Annotated[list[Rate], Field(min_length=1)]
    num_requests: Annotated[int, Field(ge=2, le=10**6)] | list[Annotated[int, Field(ge=2, le=10**6)]] = 400
    input_tokens: Tokens = 1024
    output_tokens: Annotated[int, Field(ge=2, le=2**20)] = 256
    seed: Annotated[int, Field(ge=0)] = 0
    max_running: Annotated[int, Field(ge=1, le=4096)] | None = (
        None  # of a launched server; None: the engine's own limit
    )

    def runs(self) -> list[tuple[float, int]]:
        """(rate, requests) of each run. Raises ValueError when the lists do not fit."""
        each = self.num_requests if isinstance(self.num_requests, list) else [self.num_requests] * len(self.rates)
        if len(each) != len(self.rates):
            raise ValueError(f"{len(each)} numbers of requests for {len(self.rates)} rates")
        return list(zip(self.rates, each, strict=True))


def seconds_of(load: Load) -> float:
    """What the load takes at least: arrivals and warm-up."""
    (first, count), *_ = load.runs()
    return DRAIN_S + min(WARM_S, count / first) + sum(n / rate for rate, n in load.runs())


def arrivals(load: Load, rate: float, count: int) -> NDArray[np.float64]:
    """Seconds from the first request to each, those of `specsim simulate` with the same rate and seed."""
    blocks = synthetic(count, Lengths(load.input_tokens), Lengths(load.output_tokens), rate, seed=load.seed)
    return np.concatenate([b.arrival for b in blocks]) / PS


def _prompts(count: int, tokens: int, label: str) -> list[list[int]]:
    draw = random.Random(label)
    return [draw.choices(range(FIRST_ID, LAST_ID), k=tokens) for _ in range(count)]


def measure_loads(
    client: Client,
    served: Served,
    load: Load,
    record: Record,
    save: Callable[[], None],
    say: Say,
    deadline: float,
    host: Watch,
) -> int:
    """Send the load at each rate; every run is appended to `record.loads` and saved. How many runs have a fault. host: watches the
    cores of a server on this machine.

    Raises ServerError when the server is gone; what had finished is kept.
    """
    faults = 0
    overhead, lone = _warm_up(client, served, load)
    for rate, count in load.runs():
        if time.monotonic() + count / rate > deadline:
            record.caveats.append(f"the time limit left out rate {rate:g} and what follows")
            say("  the time limit is reached")
            save()
            return faults + 1
        before = counters(client)
        due = arrivals(load, rate, count)
        token_ids = _prompts(count, load.input_tokens, f"{load.seed} {rate}")
        begin = time.monotonic()
        sent = send(client, served, due.tolist(), token_ids, load.output_tokens)
        run = _run(load, rate, due, sent.streams, np.asarray(sent.lag_s), overhead)
        run.host_slowdown = host.since(begin)
        run.lone_ms = lone
        troubles = _failures(sent.streams)
        gone = any(s.sent is None for s in sent.streams) or run.failed == count
        lost: ServerError | None = ServerError(f"rate {rate:g}: {troubles[0]}") if gone else None
        try:
            if not gone:
                check_same(client, served)
            if not troubles:
                _count(run, before, counters(client))
        except ChangedError as error:
            record.caveats.append(f"rate {rate:g}: {error}")
            save()
            raise
        except ServerError as error:  # it is gone since: what was measured before stays
            lost = error
            record.caveats.append(f"stopped after rate {rate:g}: {error}")
        except PointError as error:
            troubles.append(str(error))
        if run.requests["request"]:
            record.loads.append(run)
            host.note(record.environment)
            say(f"  {line(run)}")
        record.caveats += [f"rate {rate:g}: {trouble}" for trouble in troubles]
        save()
        if lost is not None:
            raise lost
        for trouble in troubles:
            say(f"  rate {rate:g}: {trouble}")
        faults += bool(troubles)
    return faults


def _failures(streams: Sequence[Stream]) -> list[str]:
    """One line on the requests that failed; none where all finished."""
    failures = [s.error for s in streams if s.error]
    if not failures:
        return []
    return [f"{len(failures)} of {counted(len(streams), 'request')} failed, the first with: {failures[0]}"]


def _warm_up(client: Client, served: Served, load: Load) -> tuple[Quantity | None, dict[str, float]]:
    """Compile what is compiled late, send the first load for `WARM_S`, and time lone requests. Raises ServerError when they fail.

    Returns a lone request's time to first token beyond queue and prefill, by the server's clock: network, HTTP,
    tokeniser and detokeniser (None where the server does not say); and the medians of what it was taken from, ms.
    """
    crowd = min(32, served.max_running or 32)
    few = min(load.output_tokens, 32)
    streams = send(client, served, [0.0] * crowd, _prompts(crowd, load.input_tokens, f"{load.seed} warm"), few).streams
    due = arrivals(load, *load.runs()[0])
    due = due[due < WARM_S]
    streams += send(
        client, served, due.tolist(), _prompts(len(due), load.input_tokens, f"{load.seed} first"), load.output_tokens
    ).streams
    warm = len(streams)
    for prompt in _prompts(LONE, load.input_tokens, f"{load.seed} lone"):
        streams += send(client, served, [0.0], [prompt], 4 if load.output_tokens >= 4 else 2).streams
    failed = [s.error for s in streams if s.error]
    if failed:
        raise ServerError(f"the warm-up failed: {failed[0]}")
    rows = [(_ttft(s), *times) for s in streams[warm:] if (times := _server_times(s))]
    lone = {"ttft": _us(1e3 * statistics.median(_ttft(s) for s in streams[warm:]))}
    found = [1e3 * (ttft - queue - prefill) for ttft, queue, prefill in rows]
    if len(found) < 2:
        return None, lone
    lone |= {name: _us(1e3 * statistics.median(row[i] for row in rows)) for i, name in ((1, "queue"), (2, "prefill"))}
    low, high = np.percentile(found, [10, 90])
    middle = statistics.median(found)
    overhead = Quantity(value=_us(middle), low=_us(low), high=_us(high), n=len(found), how="median of lone requests")
    return overhead, lone


def _server_times(stream: Stream) -> tuple[float, float] | None:
    """(queue, prefill) seconds of a request by the server's clock; None where it does not say (SGLang: --enable-metrics)."""
    meta = stream.meta
    try:
        queue, prefill = float(meta["queue_time"]), float(meta["prefill_finished_time"] - meta["forward_entry_time"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return (queue, prefill) if 0 <= queue < 3600 and 0 < prefill < 3600 else None


def _ttft(stream: Stream) -> float:
    assert stream.sent is not None
    return stream.chunk_s[0] - stream.sent


def _us(ms: float) -> float:
    return round(float(ms), 3)


def _run(
    load: Load,
    rate: float,
    due: NDArray[np.float64],
    streams: Sequence[Stream],
    lag_s: NDArray[np.float64],
    overhead: Quantity | None,
) -> LoadRun:
    done = [(i, s) for i, s in enumerate(streams) if s.sent is not None and not s.error]
    columns: dict[str, list[float]] = {
        name: [] for name in ("request", "ttft_ms", "e2e_ms", "chunks", "gap_median_ms", "gap_max_ms")
    }
    gaps, sizes = [], []
    more: dict[str, list[float]] = {"queue_ms": [], "prefill_ms": [], "cycles": []}
    for i, s in done:
        assert s.sent is not None
        between = 1e3 * np.diff(np.asarray(s.chunk_s))
        gaps.append(between)
        sizes.append(np.diff(np.asarray(s.chunk_tokens)))
        middle, top = (float(np.median(between)), float(between.max())) if between.size else (0.0, 0.0)
        values = (i, 1e3 * _ttft(s), 1e3 * (s.chunk_s[-1] - s.sent), len(s.chunk_s), middle, top)
        for name, value in zip(columns, values, strict=True):
            columns[name].append(_us(value))
        if times := _server_times(s):
            more["queue_ms"].append(_us(1e3 * times[0]))
            more["prefill_ms"].append(_us(1e3 * times[1]))
        if cycles := cycles_of(s.meta):
            more["cycles"].append(int(cycles))
    run = LoadRun(
        chunk_us=_pace([s for _, s in done]),
        rate=rate,
        num_requests=len(streams),
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        seed=load.seed,
        accept_histogram=added(histogram_of(s.meta) for _, s in done),
        overhead_ms=overhead,
        arrival_ms=[_us(1e3 * d) for d in due],
        sent_ms=[_us(1e3 * s.sent) for s in streams if s.sent is not None],
        requests=columns | {name: column for name, column in more.items() if column and len(column) == len(done)},
        failed=sum(bool(s.error) for s in streams),
    )
    if done:
        run.results = results(run, np.concatenate(gaps), np.concatenate(sizes))
        _judge(run, lag_s, np.concatenate(gaps))
    return run


def _pace(streams: Sequence[Stream]) -> Quantity | None:
    """Microseconds between two chunks of one step: what the server's front end, one process, takes to send one.

    Chunks of a step come one after another, then nothing until the next step. While 2 x BURST requests run or more, half
    of all stretches of BURST chunks lie within a step at least; the lower quartile of their pace is it. None where fewer run.
    """
    times = np.sort(np.concatenate([np.asarray(s.chunk_s) for s in streams] or [np.zeros(0)]))
    pace = (times[BURST:] - times[:-BURST]) / BURST
    first, last = (np.sort([s.chunk_s[end] for s in streams]) for end in (0, -1))
    running = np.searchsorted(first, times[:-BURST], "right") - np.searchsorted(last, times[BURST:], "left")
    pace = 1e6 * pace[running >= 2 * BURST]
    if len(pace) < 8 * BURST:
        return None
    low, value, high = np.percentile(pace, [10, 25, 50])
    how = "pace of the chunks within a step, lower quartile"
    return Quantity(value=_us(value), low=_us(low), high=_us(high), n=len(pace), how=how)


def results(run: LoadRun, gaps_ms: NDArray[np.float64], gap_tokens: NDArray[np.int64]) -> dict[str, Any]:
    """What SGLang's bench_serving reports of the finished requests, in its field names.

    gaps_ms, gap_tokens: between two chunks of a request, and the tokens of the later one.
    """
    ttft, e2e = (np.asarray(run.requests[name]) for name in ("ttft_ms", "e2e_ms"))
    sent = np.asarray(run.sent_ms)[np.asarray(run.requests["request"], dtype=int)]
    seconds = float((sent + e2e).max()) / 1e3
    n, made = len(ttft), len(ttft) * run.output_tokens
    out: dict[str, Any] = {
        "completed": n,
        "duration": seconds,
        "total_input_tokens": n * run.input_tokens,
        "total_output_tokens": made,
        "request_throughput": n / seconds,
        "input_throughput": n * run.input_tokens / seconds,
        "output_throughput": made / seconds,
        "total_throughput": (n * run.input_tokens + made) / seconds,
        "concurrency": float(e2e.sum()) / 1e3 / seconds,
    }
    latencies = {
        "e2e_latency": e2e,
        "ttft": ttft,
        "tpot": (e2e - ttft) / (run.output_tokens - 1),
        "itl": np.repeat(gaps_ms / gap_tokens, gap_tokens),
        "itl_chunk": gaps_ms,
    }
    for name, values in latencies.items():
        found = latency_of(values)
        out |= found.json(name) if found else {}
    cycles = run.requests.get("cycles")
    out["accept_length"] = (run.output_tokens - 1) * n / sum(cycles) if cycles else None
    return {k: six(v) if isinstance(v, float) else v for k, v in out.items() if v is not None}


def _count(run: LoadRun, before: Counters | None, after: Counters | None) -> None:
    """What the server's counters gained: GPU time by phase, retractions, and vLLM's acceptance, which answers lack. Raises
    PointError where one of them lost."""
    for category in after.categories(TIMER, "category") if after is not None else []:
        if spent := growth(before, after, TIMER, category=category):
            run.timers_s[category] = round(spent, 6)
    if lost := retracted(before, after):
        run.notes.append(f"the server retracted {counted(lost, 'request')}: its KV cache was full")
    drafts = growth(before, after, DRAFTS)
    if drafts and after is not None:
        places = sorted(map(int, after.categories(ACCEPTED, "position")))
        reached = [drafts, *(growth(before, after, ACCEPTED, position=str(i)) or 0.0 for i in places), 0.0]
        run.accept_histogram = [round(a - b) for a, b in itertools.pairwise(reached)]
        run.results["accept_length"] = six(sum(reached) / drafts)


def _judge(run: LoadRun, lag_s: NDArray[np.float64], gaps_ms: NDArray[np.float64]) -> None:
    """How late the client was in reading chunks (at most) and in sending; a note when it matters."""
    late = np.asarray(run.sent_ms) - np.asarray(run.arrival_ms)[: len(run.sent_ms)]
    lag = 1e3 * lag_s if lag_s.size else np.zeros(1)
    run.client = {
        "mean_lag_ms": float(f"{lag.mean():.4g}"),
        "p99_lag_ms": float(f"{np.percentile(lag, 99):.4g}"),
        "mean_late_ms": float(f"{late.mean():.4g}"),
        "max_late_ms": float(f"{late.max():.4g}"),
    }
    chunks = run.requests["chunks"]
    if run.output_tokens > 8 and np.median(chunks) < 2:
        run.notes.append(
            "answers came in one piece: something in between holds the stream back, so first tokens are late"
        )
    gap = float(np.median(gaps_ms)) if gaps_ms.size else math.inf
    if lag.mean() > LAG * gap:
        run.notes.append(
            f"the client itself was late by up to {lag.mean():.3g} ms a chunk, of a median gap of {gap:.3g} ms"
        )


def line(run: LoadRun) -> str:
    """The run in one line."""
    r = run.results
    parts = [
        f"rate {run.rate:g}: {r['completed']} requests in {r['duration']:.1f} s, {r['output_throughput']:,.0f} tokens/s",
        f"TTFT median {r['median_ttft_ms']:.1f} ms, TPOT median {r['median_tpot_ms']:.2f} p99 {r['p99_tpot_ms']:.2f} ms",
    ]
    if "accept_length" in r:
        parts.append(f"accept length {r['accept_length']:.2f}")
    return ", ".join(parts) + "".join(f"; note: {note}" for note in run.notes)
