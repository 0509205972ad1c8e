"""A simulation for people: throughput, latencies, and how busy the server was."""

from __future__ import annotations

from specsim.pages import Line, Page, grid
from specsim.quantities import short
from specsim.simulated import Simulated
from specsim.simulation_costs import prefill_graphs


def page(found: Simulated) -> Page:
    """The simulation as people see it."""
    m, server = found.run.metrics, found.server
    yield Line(found.headline(), "title")
    largest = max(prefill_graphs(found.scenario), default=0)
    graphs = f"in graphs of up to {largest:,}" if largest else "outside graphs"
    yield Line(
        f"at most {server.max_running:,} running, prefill chunks of {server.chunk_tokens:,} tokens {graphs}, {server.kv_tokens:,} tokens of KV cache"
    )
    yield Line()
    yield Line(found.verdict(), "verdict")
    yield Line()
    latencies = {
        "TTFT": m.latencies["ttft"],
        "  of it in the queue": m.latencies["queue_time"],
        "TPOT": m.latencies["tpot"],
        "ITL, per token": m.itl_token,
        "ITL, per chunk": m.itl_chunk,
        "end to end": m.latencies["e2e_latency"],
    }
    rows = [
        (name, *(short(x) for x in (found.mean, found.median, found.p90, found.p99)))
        for name, found in latencies.items()
        if found is not None
    ]
    yield grid(("ms", ">mean", ">p50", ">p90", ">p99"), rows)
    yield Line()
    j = m.json()
    length = "" if m.accept_length is None else f"; {m.accept_length:.2f} tokens a cycle"
    yield Line(
        f"busy {m.utilisation:.0%}, prefilling {m.prefill_share:.0%}; batch {m.mean_batch:,.1f} on average{length}; "
        f"queue {short(j['mean_waiting'], 2)} on average, {m.counters['peak_waiting']:,} at most; "
        f"KV cache {j['peak_kv_share']:.0%} full at most"
    )
    for warning in found.warnings:
        yield Line(f"note: {warning}", "warning")
