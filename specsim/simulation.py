"""Simulate a server under load: what `specsim simulate` and `specsim plan --simulate` call.

    server = server_of(scenario, machine)                      step times and scheduler
    requests = synthetic(1000, Lengths(4096), Lengths(256), rate=5.0)   or Trace(path)
    simulate(server, requests).latencies["ttft"].p99           ms

The run is compiled by numba where that is installed (`pip install specsim[fast]`), and is plain Python elsewhere; both
give the same results to the bit. Memory does not grow with the number of requests, only with the queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specsim.errors import InputError
from specsim.metrics import Collector, Metrics, metrics_of
from specsim.progress import report
from specsim.quantities import short
from specsim.simulation_costs import Server
from specsim.simulation_reference import M1, M2, Reference
from specsim.workload import Requests

Ints = NDArray[np.int64]
PIECE = 8192  # requests between two reports of progress
CHANCE = 3  # standard deviations that are no chance any more
MOST_CLIENTS = 2**24  # when each falls free is kept: 8 bytes


class Run(Protocol):
    """A run in progress: the plain one or the compiled one."""

    chunk_histogram: Ints
    token_histogram: Ints
    timeline: Ints

    @property
    def counters(self) -> Ints: ...
    def feed(self, block: Requests, x1: Ints, x2: Ints) -> None: ...
    def advance(self, last: bool) -> Ints: ...


@dataclass(frozen=True)
class Simulation:
    """A finished run: its metrics, which way it was computed, and what to know about it."""

    metrics: Metrics
    compiled: bool
    warnings: tuple[str, ...] = field(default=())


def simulate(
    server: Server,
    requests: Iterable[Requests],
    *,
    concurrency: int | None = None,
    seed: int = 0,
    targets_ms: Mapping[str, float] | None = None,
    compiled: bool | None = None,
    count: int = 0,
) -> Simulation:
    """Run requests through a server.

    concurrency: requests in flight at most; a request beyond waits at its client, and its clock starts when it is sent.
    seed: of the acceptance draws (the requests have their own). targets_ms: limits of "ttft", "tpot" and "e2e_latency"
    for goodput. compiled: None takes numba where it is installed. count: how many requests
    there are, for progress. Raises InputError when no request can run.
    """
    for name, limit in (targets_ms or {}).items():
        if name not in ("ttft", "tpot", "e2e_latency") or not 0 < limit < math.inf:
            raise InputError(
                f"{name} {limit:g} ms is not a target", where="targets", mend="ttft, tpot or e2e_latency, above 0"
            )
    if concurrency is not None and not 1 <= concurrency <= MOST_CLIENTS:
        what, mend = f"{concurrency:,} requests in flight", f"give 1 to {MOST_CLIENTS:,}, or leave it out"
        raise InputError(what, where="--concurrency", mend=mend)
    use_numba = find_spec("numba") is not None if compiled is None else compiled
    run = _start(server, concurrency or 0, use_numba)
    collector = Collector(targets_ms)
    first, second = (np.random.default_rng(s) for s in np.random.SeedSequence([seed, 1]).spawn(2))
    sent, last_arrival = 0, 0
    for block in requests:
        x1 = first.integers(1, M1, len(block), dtype=np.int64)
        x2 = second.integers(1, M2, len(block), dtype=np.int64)
        for i in range(0, len(block), PIECE):
            part = slice(i, i + PIECE)
            piece = Requests(block.arrival[part], block.input_tokens[part], block.output_tokens[part])
            run.feed(piece, x1[part], x2[part])
            collector.add(run.advance(False))
            report(sent + i, count, "requests")
        sent, last_arrival = sent + len(block), int(block.arrival[-1])
    collector.add(run.advance(True))
    metrics = metrics_of(
        collector,
        run.counters,
        run.chunk_histogram,
        run.token_histogram,
        run.timeline,
        speculative=bool(server.survival) or server.costs.most_rows > 1,
        kv_tokens=server.kv_tokens,
    )
    if not metrics.completed:
        raise InputError(
            f"none of {sent:,} requests fits the KV cache of {server.kv_tokens:,} tokens",
            where="simulate",
            mend="raise --tp, or shorten the requests",
        )
    return Simulation(metrics, use_numba, tuple(_warnings(metrics, last_arrival / 1e12, concurrency)))


def _start(server: Server, clients: int, compiled: bool) -> Run:
    if not compiled:
        return Reference(server, clients)
    from specsim.simulation_kernel import Kernel

    return Kernel(server, clients)


def _warnings(m: Metrics, last_arrival_s: float, concurrency: int | None) -> list[str]:
    out = []
    if m.rejected:
        out.append(f"{m.rejected:,} requests are longer than the KV cache and were rejected")
    if m.counters["retractions"]:
        out.append(
            f"the KV cache ran full: {m.counters['retractions']:,} retractions, {m.counters['recomputed_tokens']:,} tokens prefilled again"
        )
    e2e, wait = m.latencies["e2e_latency"], m.latencies["queue_time"]
    late = m.duration_s - last_arrival_s
    # At its limit a queue of n customers wanders off by about the root of n: a few in line at the end of a short run are chance.
    grew = late > 0.1 * last_arrival_s > 0 and late * m.request_throughput > CHANCE * math.sqrt(m.completed)
    if concurrency is None and grew and e2e and wait and wait.mean > 0.5 * e2e.mean:
        limit = f"{short(m.request_throughput)} requests a second"
        out.append(f"this load cannot be served: requests queued ever longer; the limit is {limit}")
    return out
