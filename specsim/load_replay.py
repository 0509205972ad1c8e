"""A recorded load run beside the simulator: the same arrivals, lengths, acceptance and limits, predicted step times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specsim.errors import InputError
from specsim.machine import Machine
from specsim.prediction import machine_of, predict
from specsim.records import LoadRun
from specsim.scenarios import Scenario
from specsim.simulation import simulate
from specsim.simulation_costs import Costs, Server, server_of
from specsim.workload import Requests

PHASES = {  # of a validation document, and the field of bench_serving that each is
    "throughput": "output_throughput",
    "tpot_median": "median_tpot_ms",
    "tpot_p99": "p99_tpot_ms",
    "ttft_median": "median_ttft_ms",
}
PLAIN = 2_000_000  # tokens simulated: plain Python is done with them before the simulator is compiled, the first time
Interval = tuple[float, float, float]  # value, low, high
Added = Callable[[str], float]  # milliseconds that the measurement added to a phase's pass


@dataclass(frozen=True)
class Replayed:
    """A load run simulated: its phases in PHASES, tokens a second and ms, and the mean batch of a decode step."""

    phases: Mapping[str, Interval]
    batch: int


def worth_compiling(runs: Iterable[LoadRun]) -> bool:
    """Whether plain Python would take longer for all of them than the simulator takes to compile, the first time."""
    return 3 * sum(run.num_requests * run.output_tokens for run in runs) > PLAIN


def replay_load(
    run: LoadRun, s: Scenario, environment: Mapping[str, Any], added: Added, *, compiled: bool | None = False
) -> Replayed:
    """Simulate a recorded run on the server that `s` and the record's environment describe. compiled: see
    `specsim.simulation.simulate`.

    The interval is that of the predicted step at the run's mean batch: all step times at its low and high end. Raises
    InputError for a run that cannot be simulated.
    """
    if run.failed or not run.requests.get("request"):
        raise InputError(
            f"{run.failed} of {run.num_requests} requests failed", where=f"rate {run.rate:g}", mend="measure it again"
        )
    s = replace(s, options={**s.options, **limits(environment)})
    machine = machine_of(s)
    server = server_for(run, s, machine, added)
    found = _simulated(run, server, compiled)
    batch = max(1, round(found["mean_decode_batch"]))
    p = predict(
        replace(s, batch=np.asarray(float(batch)), context=np.asarray(run.input_tokens + run.output_tokens / 2))
    )
    step = p.decode_ms if s.method == "none" else p.cycle_ms
    ends = [found]
    if step is not None and step.value > 0:
        for end in (step.low, step.high):
            costs = scaled(server.costs, max(end, 0.0) / step.value)
            ends.append(_simulated(run, replace(server, costs=costs), compiled))
    phases = {
        phase: (found[name], min(e[name] for e in ends), max(e[name] for e in ends)) for phase, name in PHASES.items()
    }
    return Replayed(phases, batch)


def observed(run: LoadRun) -> dict[str, float]:
    """The measured value of each phase in PHASES."""
    return {phase: float(run.results[name]) for phase, name in PHASES.items() if name in run.results}


def limits(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The scheduler's limits as the server told them, as options of a scenario."""
    names = {
        "max_running_requests": "max_running_requests",
        "max_total_num_tokens": "kv_tokens",
        "chunked_prefill_size": "chunked_prefill_size",
        "disable_overlap_schedule": "disable_overlap",
    }
    found = {option: environment[name] for name, option in names.items() if environment.get(name) is not None}
    graphs = environment.get("cuda_graph_config")
    phases = graphs if isinstance(graphs, Mapping) else {}
    decode, prefill = (p if isinstance(p := phases.get(name), Mapping) else {} for name in ("decode", "prefill"))
    if _sizes(decode) and decode.get("backend") != "disabled":
        found["captured_sizes"] = decode["bs"]
    if _sizes(prefill) or prefill.get("backend") == "disabled":
        found["prefill_graphs"] = prefill.get("backend") != "disabled"
    if _sizes(prefill):
        found["prefill_graph_sizes"] = prefill["bs"]
    return found


def _sizes(phase: Mapping[str, Any]) -> bool:
    """Whether a phase's configuration says which sizes were captured."""
    sizes = phase.get("bs")
    return isinstance(sizes, list) and bool(sizes) and all(isinstance(n, int) and n > 0 for n in sizes)


def server_for(run: LoadRun, s: Scenario, machine: Machine, added: Added) -> Server:
    """The server to simulate: step times with what the measurement added, the recorded acceptance, overhead and front end."""
    histogram = run.accept_histogram if s.method != "none" else None
    overhead = max(run.overhead_ms.value, 0.0) / 1e3 if run.overhead_ms else 0.0
    chunk = max(run.chunk_us.value, 0.0) / 1e6 if run.chunk_us else 0.0
    server = server_of(
        s, machine, concurrency=len(run.arrival_ms), overhead_s=overhead, chunk_s=chunk, histogram=histogram or None
    )
    phases = ("decode",) if s.method == "none" else ("draft", "verify", "extend")
    more = 1e9 * sum(added(phase) for phase in phases)  # ps
    if not more:
        return server
    costs = server.costs
    step = costs.step + more
    step[0] = 0.0
    return replace(server, costs=replace(costs, step=np.rint(step), base=np.rint(costs.base + more)))


def scaled(costs: Costs, factor: float) -> Costs:
    """The same server, every step `factor` times as long."""
    return replace(
        costs,
        step=np.rint(costs.step * factor),
        base=np.rint(costs.base * factor),
        prefill=np.rint(costs.prefill * factor),
    )


def _simulated(run: LoadRun, server: Server, compiled: bool | None = False) -> dict[str, Any]:
    n = len(run.sent_ms)
    sent = np.rint(np.asarray(run.sent_ms) * 1e9).astype(np.int64)
    load = Requests(
        np.maximum.accumulate(sent - sent[0]),
        np.full(n, run.input_tokens, dtype=np.int64),
        np.full(n, run.output_tokens, dtype=np.int64),
    )
    return simulate(server, [load], seed=run.seed, compiled=compiled).metrics.json()
