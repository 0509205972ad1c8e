"""A simulation asked for by options: `specsim simulate`, and `specsim.simulate` in Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from specsim import steady, steady_servers
from specsim.asked import AModel, check_fields, check_numbers, overruled, scenario, with_model
from specsim.engines import running_flag
from specsim.errors import InputError
from specsim.launch_lines import read_ranges
from specsim.machine import Machine
from specsim.names import flag_of
from specsim.pages import Shown
from specsim.policy import said
from specsim.prediction import machine_of
from specsim.provenance import sources_of
from specsim.quantities import short
from specsim.scenarios import Scenario, no_meaning, too_long
from specsim.simulation import Simulation
from specsim.simulation import simulate as run_through
from specsim.simulation_costs import Ranges, Server, prefill_graphs, server_of
from specsim.trace_stats import left_out, of_tokens
from specsim.two_states import two_states
from specsim.workload import BLOCK, Lengths, Requests, Trace, synthetic

REQUESTS, INPUT, OUTPUT = 1000, 1024, 256
SMALL = 60_000  # decode steps of a sequence: plain Python is done with them before a kernel is compiled
FIXED = ("batch", "context")  # what the load sets
OF_A_TRACE = ("rate", "burstiness", "input_tokens", "output_tokens", "range_ratio")  # what a trace says itself


@dataclass(frozen=True)
class Load:
    """What is sent to the server and what is asked of it, as the options of `specsim simulate` have it.

    rate: requests a second; inf sends all at once. burstiness: Gamma shape of the gaps, 1 is Poisson. concurrency:
    requests in flight at most; without a rate each is sent when one ends. trace: a file with arrivals and lengths, played
    `speed` times as fast, its times spread over `spread` seconds. range_ratio: lengths are drawn from that share of the
    tokens up to them. prefix_rate: share of each prompt in the prefix cache. overhead_ms: from sending a request to the
    scheduler's seeing it; chunk_us: what the front end takes to send a chunk. accept_histogram: how often a cycle gained 1,
    2, ... tokens. policy: a file with draft lengths by batch. ttft_ms, tpot_ms, e2e_ms: targets of goodput.
    """

    num_requests: int | None = None
    rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    trace: Path | None = None
    speed: float | None = None
    spread: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    range_ratio: float | None = None
    prefix_rate: float = 0.0
    overhead_ms: float = 0.0
    chunk_us: float = 0.0
    accept_histogram: tuple[float, ...] | None = None
    policy: Path | None = None
    chunk_tokens: int | None = None
    no_overlap: bool = False
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_numbers("accept_histogram", () if self.accept_histogram is None else self.accept_histogram)
        if self.trace is None and self.rate is None and self.concurrency is None:
            raise InputError("no load", where="simulate", mend="give --rate, --concurrency or --trace")
        if self.trace is not None:
            for name in OF_A_TRACE:
                if getattr(self, name) is not None:
                    option = flag_of(name)
                    mend = f"leave {option} out"
                    raise InputError(f"a trace has its own; {option} contradicts it", where="--trace", mend=mend)
        for name in ("speed", "spread"):
            if getattr(self, name) is not None and self.trace is None:
                raise InputError("is about a trace", where=flag_of(name), mend="give --trace, or leave it out")
        if self.burstiness is not None and (self.rate is None or math.isinf(self.rate)):
            raise InputError("is about a rate", where="--burstiness", mend="give --rate, or leave it out")
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise InputError(f"{limit:g} ms is no target", where=flag_of(name), mend="give milliseconds above 0")
        for name in ("num_requests", "concurrency", "chunk_tokens", "input_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{value} is out of range", where=flag_of(name), mend="give 1 or more")

    @property
    def lengths(self) -> tuple[Lengths, Lengths]:
        """Of prompts and of answers, without a trace."""
        ratio = 1.0 if self.range_ratio is None else self.range_ratio
        given, made = self.input_tokens, self.output_tokens
        return Lengths(INPUT if given is None else given, ratio), Lengths(OUTPUT if made is None else made, ratio)

    @property
    def open_rate(self) -> float | None:
        """Requests a second where nothing but the rate limits what is in flight."""
        closed = self.rate is None or math.isinf(self.rate) or self.concurrency is not None
        return None if closed else self.rate

    @property
    def count(self) -> int:
        """Requests, without a trace."""
        return REQUESTS if self.num_requests is None else self.num_requests

    def requests(self) -> Iterable[Requests] | Trace:
        """The requests, block by block."""
        if self.trace is not None:
            speed = 1.0 if self.speed is None else self.speed
            return Trace(self.trace, limit=self.num_requests, speed=speed, spread_s=self.spread or 0.0, seed=self.seed)  # fmt: skip
        rate = math.inf if self.rate is None else self.rate
        shape = 1.0 if self.burstiness is None else self.burstiness
        return synthetic(self.count, *self.lengths, rate, shape=shape, seed=self.seed)


@dataclass(frozen=True, repr=False)
class Simulated(Shown):
    """A finished simulation with what was asked: `run.metrics` holds latencies, throughput and the timeline."""

    page_from = "specsim.simulated_text"

    scenario: Scenario
    load: Load
    server: Server
    run: Simulation
    ranges: Ranges = ()
    warnings: tuple[str, ...] = ()

    def headline(self) -> str:
        """One line: what was simulated."""
        s = self.scenario
        drafting = f"draft tokens by batch: {said(self.ranges)}" if self.ranges else f"{self.server.costs.most_rows} draft tokens"  # fmt: skip
        spec = "" if s.method == "none" else f", {s.method} with {drafting}"
        return f"{s.model.name} on {s.profile.name}, {s.engine.name} {s.engine.version}, TP {s.parallel.tp}{spec}"

    def verdict(self) -> str:
        """One sentence: what the server got done."""
        m = self.run.metrics
        good = f", {short(m.goodput)} of them within the targets" if m.targets_ms else ""
        done = f"{m.completed:,} request{'' if m.completed == 1 else 's'} in {short(m.duration_s)} s: {short(m.request_throughput)} requests a second{good}"
        made = short(m.output_throughput, 2) if m.output_throughput < 10 else f"{m.output_throughput:,.0f}"
        return f"{done}; {made} output tokens a second."

    def json(self) -> dict[str, Any]:
        """The document of schema specsim.simulation/1."""
        s, server, load = self.scenario, self.server, self.load
        rate = "inf" if load.rate is None or math.isinf(load.rate) else load.rate
        return {
            "schema": "specsim.simulation/1",
            "title": self.headline(),
            "verdict": self.verdict(),
            "backend": "specsim",
            "dataset_name": "trace" if load.trace else "random",
            "request_rate": "trace" if load.trace else rate,
            "max_concurrency": load.concurrency,
            "seed": load.seed,
            "scenario": {
                "model": s.names.get("model", s.model.name),
                "draft": s.names.get("draft") or None,
                "hardware": s.profile.name,
                "engine": s.engine.name,
                "tp": s.parallel.tp,
                "method": s.method,
                "draft_tokens": server.costs.most_rows,
                "by_batch": [list(r) for r in self.ranges] or None,
                "max_running_requests": server.max_running,
                "chunk_tokens": server.chunk_tokens,
                "prefill_graph_tokens": max(prefill_graphs(s), default=0),
                "kv_tokens": server.kv_tokens,
                "overlap": server.overlap,
                "prefix_rate": server.prefix_rate,
                "overhead_ms": load.overhead_ms,
                "chunk_us": load.chunk_us,
            },
            **self.run.metrics.json(),
            "sources": sources_of(s, prefills=True),
            "warnings": list(self.warnings),
        }


def simulate(model: AModel | None = None, /, *, times: int = 1, **options: Any) -> Simulated:
    """Simulate a server under load: the options of `specsim simulate`, with underscores.

        >>> found = simulate("Llama-3.1-8B", hardware="1x-h200", method="none", concurrency=4, num_requests=20)
        >>> found.run.metrics.completed
        20

    Load options (requests a second, tokens, targets in ms) are the fields of `Load`; all others are those of
    `specsim.scenario`. Latencies are in ms, throughput is in tokens and requests a second. times: such simulations that
    are to run, which says whether a compiled kernel pays; it changes no number. Raises InputError.
    """
    options = with_model(model, options)
    names = {field.name for field in fields(Load)}
    asked = {name: value for name, value in options.items() if name in names and value is not None}
    for name in FIXED:
        if options.get(name) is not None:
            raise InputError("the load sets it", where=flag_of(name), mend="leave it out")
    load = Load(**asked)
    ranges = _ranges(load, options)
    stated = [name for name in options if name.startswith("accept") and options[name] is not None]
    if load.accept_histogram is not None and len(stated) > 1:
        named = " and ".join(map(flag_of, stated))
        raise InputError("acceptance is stated twice", where=named, mend="give one of them")
    s = scenario(**{name: value for name, value in options.items() if name not in names})
    machine = machine_of(s)
    server = server_of(
        s,
        machine,
        concurrency=load.concurrency,
        chunk_tokens=load.chunk_tokens,
        overlap=False if load.no_overlap else None,
        prefix_rate=load.prefix_rate,
        overhead_s=load.overhead_ms / 1e3,
        chunk_s=load.chunk_us / 1e6,
        histogram=load.accept_histogram,
        ranges=ranges,
    )
    requests = load.requests()
    if isinstance(requests, Trace):
        first = next(iter(requests))  # of a longer trace it is not known how long it is
        steps = math.inf if len(first) == BLOCK else float(first.output_tokens.sum()) / server.accept_length
    else:
        steps = load.count * load.lengths[1].mean / server.accept_length
    of_states = _of_states(load, s, machine, server, ranges)
    targets = {"ttft": load.ttft_ms, "tpot": load.tpot_ms, "e2e_latency": load.e2e_ms}
    run = run_through(
        server,
        requests,
        concurrency=load.concurrency,
        seed=load.seed,
        targets_ms={name: limit for name, limit in targets.items() if limit is not None},
        compiled=False if steps * times < SMALL else None,
        count=load.count if load.trace is None else 0,
    )
    longest = requests.longest if isinstance(requests, Trace) else sum(length.most for length in load.lengths)
    chunk = s.options.get("chunked_prefill_size") or s.options.get("max_num_batched_tokens")
    won = overruled({"chunk_tokens": chunk}, {"chunk_tokens": load.chunk_tokens}) if chunk and load.chunk_tokens else ()
    unused = (no_meaning("--accept-histogram"),) if load.accept_histogram is not None and s.method == "none" else ()
    long = too_long(s.model, s.options, longest, of_tokens(longest))
    said_of_run = (*run.warnings, *_notes(requests, run, steps), *of_states)
    return Simulated(s, load, server, run, ranges, (*s.warnings, *won, *unused, *long, *said_of_run))


def _ranges(load: Load, options: Mapping[str, Any]) -> Ranges:
    """The draft lengths by batch of a policy. Raises InputError where options contradict it."""
    if load.policy is None:
        return ()
    for name in ("draft_tokens", "num_steps"):
        if options.get(name) is not None:
            mend = f"leave {flag_of(name)} out"
            raise InputError(f"a policy says it; {flag_of(name)} contradicts it", where="--policy", mend=mend)
    return read_ranges(load.policy)


def _of_states(load: Load, s: Scenario, machine: Machine, server: Server, ranges: Ranges) -> tuple[str, ...]:
    """A note where a server has two states at the rate. Raises InputError where it cannot serve it (`check_rate`)."""
    if load.open_rate is None:
        return ()
    inputs, outputs = load.lengths
    mean = steady.Requests(inputs.mean, outputs.mean, inputs.cv2, outputs.cv2, load.prefix_rate)
    replica = steady_servers.server_of(s, machine, mean, ranges, chunk_tokens=load.chunk_tokens)
    gained = server.accept_lengths[1 : replica.most_running + 1]
    replica = replace(replica, memory=None, accept_length=gained)
    check_rate(load.open_rate, replica, s.engine.name)
    states = two_states(replica, load.open_rate)
    return () if states is None else (states.note(s.engine.name),)


def check_rate(rate: float, replica: steady.Server, engine: str) -> None:
    """Raise InputError when requests come faster than a server completes them at best, and name a cap with which it completes more."""
    limit = float(replica.capacity())
    if rate > limit:
        capped = float(replica.capped(replica.crest).capacity())
        mend = "lower it, or give --concurrency for a closed loop"
        if capped > limit:
            mend = f"lower it, or launch with {running_flag(engine)} {replica.crest}, up to which decoding keeps its pace: {short(capped)}"
        raise InputError(
            f"this load cannot be served, the limit is {short(limit)} requests a second",
            where=f"--rate {rate:g}",
            mend=mend,
        )


def _notes(requests: Iterable[Requests] | Trace, run: Simulation, steps: float) -> Iterable[str]:
    skipped = requests.skipped if isinstance(requests, Trace) else 0
    if skipped:
        yield left_out(skipped)
    if isinstance(requests, Trace) and requests.coarse_s and not requests.spread_s:
        yield f"times of the trace are multiples of {requests.coarse_s:g} s, and requests of one time come together: --spread {requests.coarse_s:g} spreads them"
    if not run.compiled and steps > 20 * SMALL:
        yield "numba is not installed, so this ran in plain Python: pip install 'specsim[fast]' is over 100 times faster"
