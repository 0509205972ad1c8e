"""specsim simulate"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import (
    Meter,
    OutFile,
    draw,
    json_option,
    note,
    plot_option,
    prefix_option,
    print_result,
    range_option,
    show,
)
from specsim.commands.scenario import COUNT, FILE, TOKENS, Rates, Several, says, scenario_options

if TYPE_CHECKING:
    from specsim.metrics import Metrics

SINGLE = (
    "accept_per_position",
    "accept_histogram",
    "sglang_args",
    "vllm_args",
    "trace",
    "policy",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
)
OF_ALL = ("out", "jobs", "cluster", "requests_out", "plot", "as_json")  # of the whole, not of a simulation
REQUESTS, INPUT, OUTPUT = 1000, 1024, 256  # as specsim.simulated has them


@click.command()
@says(batch="", context="")
@scenario_options
@click.option(
    "--num-requests", type=COUNT, metavar="N", help=f"Requests to simulate; default {REQUESTS:,}, or the whole trace."
)
@click.option("--rate", type=float, metavar="R", help="Requests a second; inf sends all at once.")
@click.option(
    "--burstiness", type=float, metavar="K", help="Gamma shape of the gaps; default 1 (Poisson), inf is even."
)
@click.option(
    "--concurrency",
    type=COUNT,
    metavar="N",
    help="Requests in flight at most; without --rate each is sent when one ends.",
)
@click.option(
    "--trace", type=FILE, metavar="FILE", help="Arrivals and lengths: CSV or JSONL, .gz too (docs/simulate.md)."
)
@click.option("--speed", type=float, metavar="X", help="Play the trace X times as fast; default 1.")
@click.option("--spread", type=float, metavar="S", help="The trace's times are multiples of S seconds: spread them.")
@click.option("--input-tokens", type=TOKENS, metavar="TOKENS", help=f"Prompt tokens of a request; default {INPUT:,}.")
@click.option("--output-tokens", type=TOKENS, metavar="TOKENS", help=f"Tokens a request generates; default {OUTPUT:,}.")
@range_option
@prefix_option
@click.option(
    "--overhead-ms",
    type=float,
    default=0.0,
    metavar="MS",
    help="From sending a request to the scheduler's seeing it; default 0.",
)
@click.option(
    "--chunk-us",
    type=float,
    default=0.0,
    metavar="US",
    help="What the front end takes to send a chunk to its client; default 0.",
)
@click.option(
    "--accept-histogram",
    type=Rates(),
    metavar="N1,N2,...",
    help="How often a cycle gained 1, 2, ... tokens, as recorded.",
)
@click.option(
    "--policy", type=FILE, metavar="FILE", help="Draft lengths by batch, as specsim plan --policy wrote them."
)
@click.option(
    "--chunk-tokens", type=TOKENS, metavar="TOKENS", help="Tokens of a prefill step at most; default the engine's."
)
@click.option("--no-overlap", is_flag=True, help="Decide each step after the one before, not during it.")
@click.option("--ttft-ms", type=float, metavar="MS", help="Goodput target: time to first token.")
@click.option("--tpot-ms", type=float, metavar="MS", help="Goodput target: time per output token.")
@click.option("--e2e-ms", type=float, metavar="MS", help="Goodput target: time to the last token.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Seed of arrivals, lengths and acceptance; default 0.",
)
@click.option(
    "--out", type=OutFile(), metavar="FILE", help="Write a row a simulation (.csv); an interrupted run goes on."
)
@click.option("--jobs", type=int, default=1, metavar="N", help="Processes for several; -1: one a core; default 1.")
@click.option("--cluster", metavar="dask://HOST:PORT|ray", help="Run them on an existing Dask or Ray cluster instead.")
@click.option("--requests-out", type=OutFile(), metavar="FILE", help="Write one line a request (CSV).")
@plot_option(
    "batch, queue and throughput over time, and latencies; of several, latencies and throughput over what varies"
)
@json_option
def command(as_json: bool, **options: Any) -> None:
    """Simulate a server under load: latencies, throughput, goodput, batch and queue over time.

    Step times come from the cost model of `specsim predict`; JSON has the field names of bench_serving. The load sets
    batch and context. Most options take a list or a range (--rate 5:40:5 --seed 1:5): then a row for
    every combination.

    \b
    Examples:
      specsim simulate --model Llama-3.1-8B --hardware 1x-h200 --method none \\
        --concurrency 32 --input-tokens 4096
      specsim simulate --hardware 8x-rtx-pro-6000 --accept-rate 0.6 --rate 0.5 \\
        --input-tokens 2000 --output-tokens 500
      specsim simulate --accept-length 1.8 --trace azure.csv --ttft-ms 1000 \\
        --tpot-ms 30 --plot timeline.png
      specsim simulate --model Llama-3.1-8B --hardware 1x-h200 --method none \\
        --rate 2:12:2 --seed 1:3 --num-requests 500 --out rows.csv --jobs 2
    """
    from specsim.errors import InputError
    from specsim.simulations import Simulations, simulate

    rows_out, picture = options.pop("requests_out"), options.pop("plot")
    for flag, path in (("--out", options["out"]), ("--requests-out", rows_out)):
        if path and options["trace"] and path.absolute() == options["trace"].absolute():
            raise InputError("is the trace itself", where=flag, mend="name another file")
    several = bool(options["out"]) or any(
        isinstance(value, tuple) and len(value) > 1 for name, value in options.items() if name not in (*SINGLE, "eager")
    )
    if several and rows_out:
        raise InputError("is of one simulation, and several are asked for", where="--requests-out", mend="leave it out")
    with Meter("simulate"):
        found = simulate(**options)
    document = found.json()
    if rows_out and not isinstance(found, Simulations):
        _write_rows(rows_out, found.run.metrics)
    draw(document, picture)
    if not as_json:
        show(found.page())
        return
    print_result(document)
    for warning in found.warnings:
        note(f"warning: {warning}")


for _option in command.params:  # those of the scenario and of the load take a list or a range each
    _varies = isinstance(_option, click.Option) and not _option.is_flag and not _option.multiple
    if _varies and _option.name not in (*SINGLE, *OF_ALL):
        _option.type = Several(_option.type)


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
