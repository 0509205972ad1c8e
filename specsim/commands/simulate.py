"""specsim simulate"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import console, draw, json_option, note, plot_option, print_result
from specsim.commands.scenario import COUNT, Rates, scenario_of, scenario_options

if TYPE_CHECKING:
    from specsim.metrics import Metrics
    from specsim.scenarios import Scenario
    from specsim.simulation import Simulation
    from specsim.simulation_costs import Ranges, Server
    from specsim.workload import Requests, Trace

REQUESTS, INPUT, OUTPUT = 1000, 1024, 256
OWN = (
    "num_requests", "rate", "burstiness", "concurrency", "trace", "speed", "spread", "input_tokens", "output_tokens", "range_ratio",
    "prefix_rate", "overhead_ms", "accept_histogram", "policy", "chunk_tokens", "no_overlap", "ttft_ms", "tpot_ms", "e2e_ms", "seed", "requests_out", "plot",
)  # fmt: skip
SMALL = 60_000  # decode steps of a sequence: plain Python is done with them before a kernel is compiled


@click.command()
@scenario_options
@click.option("--num-requests", type=COUNT, help=f"Requests to simulate; default {REQUESTS:,}, or the whole trace.")
@click.option("--rate", type=float, metavar="R", help="Requests a second; inf sends all at once.")
@click.option(
    "--burstiness", type=float, metavar="K", help="Gamma shape of the gaps; default 1 (Poisson), inf is even."
)
@click.option(
    "--concurrency", type=COUNT, help="Requests in flight at most; without --rate each is sent when one ends."
)
@click.option(
    "--trace", type=Path, metavar="FILE", help="Arrivals and lengths: CSV or JSONL, .gz too (docs/simulate.md)."
)
@click.option("--speed", type=float, metavar="X", help="Play the trace X times as fast.")
@click.option("--spread", type=float, metavar="S", help="The trace's times are multiples of S seconds: spread them.")
@click.option("--input-tokens", type=COUNT, help=f"Prompt tokens of a request; default {INPUT:,}.")
@click.option("--output-tokens", type=COUNT, help=f"Tokens a request generates; default {OUTPUT:,}.")
@click.option(
    "--range-ratio", type=float, metavar="F", help="Draw lengths from F x tokens to tokens; default 1, all alike."
)
@click.option("--prefix-rate", type=float, default=0.0, metavar="F", help="Share of each prompt in the prefix cache.")
@click.option(
    "--overhead-ms", type=float, default=0.0, help="From sending a request to the scheduler's seeing it; default 0."
)
@click.option("--accept-histogram", type=Rates(), help="How often a cycle gained 1, 2, ... tokens, as recorded.")
@click.option(
    "--policy", type=Path, metavar="FILE", help="Draft lengths by batch, as specsim plan --policy wrote them."
)
@click.option("--chunk-tokens", type=COUNT, help="Tokens of a prefill step at most; default: the engine's.")
@click.option("--no-overlap", is_flag=True, help="Decide each step after the one before, not during it.")
@click.option("--ttft-ms", type=float, help="Goodput target: time to first token.")
@click.option("--tpot-ms", type=float, help="Goodput target: time per output token.")
@click.option("--e2e-ms", type=float, help="Goodput target: time to the last token.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of arrivals, lengths and acceptance; default 0.")
@click.option("--requests-out", type=Path, metavar="FILE", help="Write one line a request (CSV).")
@plot_option("batch, queue and throughput over time, and latencies")
@json_option
def command(as_json: bool, **options: Any) -> None:
    """Simulate a server under load: latencies, throughput, goodput, batch and queue over time.

    Step times come from the cost model of `specsim predict`; JSON has the field names of bench_serving. --batch and
    --context play no part: the load sets them.

    \b
    Examples:
      specsim simulate --model Llama-3.1-8B --hardware 1x-h200 --method none \\
        --concurrency 32 --input-tokens 4096
      specsim simulate --hardware 8x-rtx-pro-6000 --accept-rate 0.6 --rate 0.5 \\
        --input-tokens 2000 --output-tokens 500
      specsim simulate --accept-length 1.8 --trace azure.csv --ttft-ms 1000 \\
        --tpot-ms 30 --plot timeline.png
    """
    from specsim.prediction import machine_of
    from specsim.simulation import check_rate, simulate
    from specsim.simulation_costs import server_of

    own = {name: options.pop(name) for name in OWN}
    _check(own)
    ranges = _policy(own, options)
    s = scenario_of(options)
    server = server_of(
        s,
        machine_of(s),
        concurrency=own["concurrency"],
        chunk_tokens=own["chunk_tokens"],
        overlap=False if own["no_overlap"] else None,
        prefix_rate=own["prefix_rate"],
        overhead_s=own["overhead_ms"] / 1e3,
        histogram=own["accept_histogram"],
        ranges=ranges,
    )
    load, mean_input, mean_output, count = _load(own)
    rate = own["rate"]
    if rate is not None and rate != float("inf") and own["concurrency"] is None:
        check_rate(server, rate, mean_input, mean_output)
    steps = count * mean_output / server.accept_length
    targets = {"ttft": own["ttft_ms"], "tpot": own["tpot_ms"], "e2e_latency": own["e2e_ms"]}
    run = simulate(
        server,
        load,
        concurrency=own["concurrency"],
        seed=own["seed"],
        targets_ms={name: limit for name, limit in targets.items() if limit is not None},
        compiled=False if steps < SMALL else None,
    )
    warnings = [*s.warnings, *run.warnings]
    skipped = getattr(load, "skipped", 0)
    if skipped:
        warnings.append(f"{skipped:,} requests of the trace have no input or no output tokens and were left out")
    if not run.compiled and steps > 20 * SMALL:
        warnings.append(
            "numba is not installed, so this ran in plain Python: pip install 'specsim[fast]' is over 100 times faster"
        )
    if own["requests_out"]:
        _write_rows(own["requests_out"], run.metrics)
    document = _document(s, server, own, run, warnings, ranges)
    draw(document, own["plot"])
    if as_json:
        print_result(document)
        for warning in warnings:
            note(f"warning: {warning}")
        return
    _show(s, server, run, warnings, ranges)


def _policy(own: dict[str, Any], options: dict[str, Any]) -> Ranges:
    """Draft lengths by batch from --policy; none without it."""
    from specsim.errors import InputError
    from specsim.launch_lines import read_ranges

    if own["policy"] is None:
        return ()
    for name in ("draft_tokens", "num_steps"):
        if options[name] is not None:
            option = "--" + name.replace("_", "-")
            raise InputError(f"a policy says it; {option} contradicts it", where="--policy", mend=f"leave {option} out")
    return read_ranges(own["policy"])


def _check(own: dict[str, Any]) -> None:
    from specsim.errors import InputError

    if own["trace"] is None and own["rate"] is None and own["concurrency"] is None:
        raise InputError("no load", where="simulate", mend="give --rate, --concurrency or --trace")
    if own["trace"] is not None:
        for name in ("rate", "burstiness", "input_tokens", "output_tokens", "range_ratio"):
            if own[name] is not None:
                option = "--" + name.replace("_", "-")
                raise InputError(
                    f"a trace has its own; {option} contradicts it", where="--trace", mend=f"leave {option} out"
                )
    for name in ("speed", "spread"):
        if own[name] is not None and own["trace"] is None:
            raise InputError("is about a trace", where=f"--{name}", mend="give --trace, or leave it out")
    if own["burstiness"] is not None and own["rate"] is None:
        raise InputError("is about a rate", where="--burstiness", mend="give --rate, or leave it out")
    for name in ("num_requests", "concurrency", "chunk_tokens"):
        if own[name] is not None and own[name] < 1:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{own[name]} is out of range", where=option, mend="give 1 or more")


def _load(own: dict[str, Any]) -> tuple[Iterable[Requests] | Trace, float, float, float]:
    """The requests, their mean input and output tokens as far as known, and how many there are (inf: not known)."""
    from specsim.workload import Lengths, Trace, synthetic

    if own["trace"] is not None:
        trace = Trace(
            own["trace"],
            limit=own["num_requests"],
            speed=1.0 if own["speed"] is None else own["speed"],
            spread_s=own["spread"] or 0.0,
            seed=own["seed"],
        )
        return trace, 0.0, float("inf"), 1.0
    ratio = 1.0 if own["range_ratio"] is None else own["range_ratio"]
    inputs = Lengths(INPUT if own["input_tokens"] is None else own["input_tokens"], ratio)
    outputs = Lengths(OUTPUT if own["output_tokens"] is None else own["output_tokens"], ratio)
    count = REQUESTS if own["num_requests"] is None else own["num_requests"]
    rate = float("inf") if own["rate"] is None else own["rate"]
    shape = 1.0 if own["burstiness"] is None else own["burstiness"]
    return synthetic(count, inputs, outputs, rate, shape=shape, seed=own["seed"]), inputs.mean, outputs.mean, count


def _document(
    s: Scenario, server: Server, own: dict[str, Any], run: Simulation, warnings: list[str], ranges: Ranges
) -> dict[str, Any]:
    from specsim.provenance import sources_of

    rate = own["rate"]
    return {
        "schema": "specsim.simulation/1",
        "title": _headline(s, server, ranges),
        "verdict": _verdict(run.metrics),
        "backend": "specsim",
        "dataset_name": "trace" if own["trace"] else "random",
        "request_rate": "trace" if own["trace"] else "inf" if rate is None or rate == float("inf") else rate,
        "max_concurrency": own["concurrency"],
        "seed": own["seed"],
        "scenario": {
            "model": s.names.get("model", s.model.name),
            "draft": s.names.get("draft") or None,
            "hardware": s.profile.name,
            "engine": s.engine.name,
            "tp": s.parallel.tp,
            "method": s.method,
            "draft_tokens": server.costs.most_rows,
            "by_batch": [list(r) for r in ranges] or None,
            "max_running_requests": server.max_running,
            "chunk_tokens": server.chunk_tokens,
            "kv_tokens": server.kv_tokens,
            "overlap": server.overlap,
            "prefix_rate": server.prefix_rate,
            "overhead_ms": own["overhead_ms"],
        },
        **run.metrics.json(),
        "sources": sources_of(s),
        "warnings": warnings,
    }


def _headline(s: Scenario, server: Server, ranges: Ranges) -> str:
    from specsim.policy import said

    drafting = f"draft tokens by batch: {said(ranges)}" if ranges else f"{server.costs.most_rows} draft tokens"
    spec = "" if s.method == "none" else f", {s.method} with {drafting}"
    return f"{s.model.name} on {s.profile.name}, {s.engine.name} {s.engine.version}, TP {s.parallel.tp}{spec}"


def _verdict(m: Metrics) -> str:
    good = f", {m.goodput:.4g} of them within the targets" if m.targets_ms else ""
    done = f"{m.completed:,} requests in {m.duration_s:.4g} s: {m.request_throughput:.4g} requests a second{good}"
    return f"{done}; {m.output_throughput:,.0f} output tokens a second."


def _show(s: Scenario, server: Server, run: Simulation, warnings: list[str], ranges: Ranges) -> None:
    from rich.table import Table

    m = run.metrics
    c = m.counters
    out = console()
    out.print(_headline(s, server, ranges), soft_wrap=True)
    out.print(
        f"at most {server.max_running:,} running, prefill chunks of {server.chunk_tokens:,}, {server.kv_tokens:,} tokens of KV cache",
        soft_wrap=True,
    )
    out.print()
    out.print(_verdict(m), style="bold", soft_wrap=True)
    out.print()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("ms", "mean", "p50", "p90", "p99"):
        table.add_column(name, justify="left" if name == "ms" else "right")
    shown = [
        ("TTFT", m.latencies["ttft"]),
        ("  of it in the queue", m.latencies["queue_time"]),
        ("TPOT", m.latencies["tpot"]),
        ("ITL, per token", m.itl_token),
        ("ITL, per chunk", m.itl_chunk),
        ("end to end", m.latencies["e2e_latency"]),
    ]
    for name, latency in shown:
        if latency is not None:
            table.add_row(name, *(f"{x:,.4g}" for x in (latency.mean, latency.median, latency.p90, latency.p99)))
    out.print(table)
    out.print()
    j = m.json()
    length = "" if m.accept_length is None else f"; {m.accept_length:.2f} tokens a cycle"
    out.print(
        f"busy {m.utilisation:.0%}, prefilling {m.prefill_share:.0%}; batch {m.mean_batch:.1f} on average{length}; "
        f"queue {j['mean_waiting']:.2g} on average, {c['peak_waiting']:,} at most; KV cache {j['peak_kv_share']:.0%} full at most",
        soft_wrap=True,
    )
    for warning in warnings:
        out.print(f"note: {warning}", style="yellow", soft_wrap=True, markup=False)


def _write_rows(path: Path, m: Metrics) -> None:
    from specsim.errors import InputError
    from specsim.files import write_atomically
    from specsim.metrics import EXACT

    if m.rows is None:
        raise InputError(
            f"more than {EXACT:,} requests are not kept one by one", where="--requests-out", mend="lower --num-requests"
        )
    lines = ["request,arrival_s,queue_ms,ttft_ms,e2e_ms,tpot_ms,input_tokens,output_tokens"]
    for request, arrival, started, first, finished, given, made in m.rows[m.rows[:, 0].argsort()].tolist():
        tpot = f"{(finished - first) / (made - 1) / 1e9:.6f}" if made > 1 else ""
        lines.append(
            f"{request},{arrival / 1e12:.6f},{(started - arrival) / 1e9:.6f},{(first - arrival) / 1e9:.6f},"
            f"{(finished - arrival) / 1e9:.6f},{tpot},{given},{made}"
        )
    write_atomically(path, "\n".join(lines) + "\n")
