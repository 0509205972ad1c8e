"""A plan asked for by options: `specsim plan`, and `specsim.plan` in Python."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from specsim.asked import AModel, check_fields, with_model
from specsim.choice import Choice
from specsim.errors import InputError
from specsim.files import write_atomically
from specsim.launch_lines import sglang_adaptive, sglang_line, vllm_config, vllm_line, without_weights
from specsim.names import flag_of
from specsim.pages import Shown
from specsim.percentiles import Percentiles, percentiles
from specsim.plan_choices import choices, drafting
from specsim.plans import Plan
from specsim.plans import plan as plan_scenarios
from specsim.policy import policy_json
from specsim.prediction import machine_of
from specsim.provenance import sources_of_all
from specsim.quantities import short, six
from specsim.scenarios import Scenario, too_long
from specsim.simulation import simulate
from specsim.simulation_costs import longest, server_of
from specsim.steady import Requests
from specsim.targets import Targets
from specsim.trace_stats import TraceStats, every, left_out, of_tokens, trace_stats
from specsim.workload import Lengths, Trace, synthetic

CONTEXTS = (1024, 4096, 16384, 65536)  # of the policies, beside the load's own
REQUESTS, INPUT, OUTPUT = 2000, 1024, 256
LIVES = 10  # of a request: shorter runs do not settle
PLAIN = 300_000  # decode steps of a sequence: plain Python is done with them before a kernel is compiled


@dataclass(frozen=True)
class Wanted:
    """The load and what is asked of a plan, as the options of `specsim plan` have it.

    rate: requests a second over all replicas. input_tokens, output_tokens: of every request, or with a range_ratio F of the largest, lengths
    being uniform from F x that; or a trace, whose busiest minute gives the
    rate. prefix_rate: share of each prompt in the prefix cache. ttft_ms, tpot_ms: targets of the mean request, or of a percentile ("p50", "p90", "p95", "p99"). speedup: to give drafters' targets for. hysteresis: gain that a
    switch of the draft length must bring. headroom: share by which the rate may grow. price_per_gpu_hour: for the cost of a
    million output tokens. policy: the file that the launch lines name. simulate: confirm by simulating one replica, with
    so many requests (2,000, or the whole trace) and a seed.
    """

    rate: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    range_ratio: float | None = None
    trace: Path | None = None
    prefix_rate: float = 0.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    percentile: str | None = None
    speedup: float = 1.5
    hysteresis: float = 0.03
    headroom: float = 0.1
    max_gpus: int | None = None
    price_per_gpu_hour: float | None = None
    policy: Path | None = None
    simulate: bool = False
    num_requests: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        price = self.price_per_gpu_hour
        if price is not None and not 0 <= price < math.inf:
            raise InputError(f"{price:g} is no price", where="--price-per-gpu-hour", mend="give 0 or more")
        for name in ("max_gpus", "num_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                where = flag_of(name)
                raise InputError(f"{value} is out of range", where=where, mend="give 1 or more")
        for name in ("num_requests", "seed"):
            if getattr(self, name) is not None and not self.simulate:
                mend = "give --simulate, or leave it out"
                raise InputError("is about the simulation", where=flag_of(name), mend=mend)

    def load(self) -> tuple[float, Requests, TraceStats | None]:
        """(rate, mean request, what the trace says). Raises InputError."""
        if self.trace is not None:
            for name in ("input_tokens", "output_tokens", "range_ratio", "num_requests"):
                if getattr(self, name) is not None:
                    option = flag_of(name)
                    mend = f"leave {option} out"
                    raise InputError(f"a trace has its own; {option} contradicts it", where="--trace", mend=mend)
            stats = trace_stats(self.trace)
            rate = stats.peak_rate if self.rate is None else self.rate
            mean = Requests(
                stats.mean_input, stats.mean_output, stats.input_cv2, stats.output_cv2, prefix_rate=self.prefix_rate
            )
            return rate, mean, stats
        if self.rate is None:
            raise InputError("no load", where="plan", mend="give --rate, or --trace")
        given = float(INPUT if self.input_tokens is None else self.input_tokens)
        made = float(OUTPUT if self.output_tokens is None else self.output_tokens)
        if self.range_ratio is None:
            return self.rate, Requests(given, made, prefix_rate=self.prefix_rate), None
        i, o = (self.lengths(tokens) for tokens in (given, made))
        return self.rate, Requests(i.mean, o.mean, i.cv2, o.cv2, prefix_rate=self.prefix_rate), None

    def lengths(self, tokens: float) -> Lengths:
        """Of prompts or answers of so many tokens. Raises InputError."""
        return Lengths(round(tokens), 1.0 if self.range_ratio is None else self.range_ratio)


@dataclass(frozen=True, repr=False)
class Planned(Shown):
    """A plan with what was asked: `plan.best` is the choice, `launch` how to start it."""

    page_from = "specsim.planned_text"

    plan: Plan
    wanted: Wanted
    trace: TraceStats | None = None
    simulation: dict[str, Any] | None = None

    @property
    def met(self) -> bool:
        """Whether the targets are met."""
        return self.plan.met

    @property
    def launch(self) -> dict[str, Any]:
        """Launch lines of the best choice; with a policy file, of a server that follows it."""
        best = self.plan.best
        s, ranges, file = best.scenario, best.ranges, str(self.wanted.policy or "policy.json")
        if self.wanted.policy is not None:
            s, ranges = _speculating(self.plan), self.plan.policies[0].rising
        own = (
            s.engine.name == "sglang"
        )  # else the file is in vLLM's words, which SGLang does not read: one length, the longest
        return {
            "sglang": sglang_line(s, ranges, file) if own else sglang_line(longest(s, ranges)),
            "vllm": vllm_line(s, ranges),
            "vllm_speculative_config": vllm_config(s, ranges),
            "sglang_adaptive_config": sglang_adaptive(ranges) if len(ranges) > 1 else None,
        }

    @functools.cached_property
    def percentiles(self) -> Percentiles | None:
        """Of what requests see under the best choice, where it meets the targets."""
        best = self.plan.best
        if not best.replicas or best.server is None:
            return None
        return percentiles(best.server, self.plan.rate / best.replicas)

    def title(self) -> str:
        """One line: what is planned for."""
        s, r = self.plan.best.scenario, self.plan.requests
        load = f"{short(self.plan.rate)} request{'s'[: self.plan.rate != 1]} a second of {r.input_tokens:,.0f} + {r.output_tokens:,.0f} tokens{' on average' * bool(r.whole_cv2)}"
        cached = f", {r.prefix_rate:.0%} of a prompt cached" if r.prefix_rate else ""
        return f"{s.model.name}, {s.engine.name}: {load}{cached}"

    def verdict(self) -> str:
        """One sentence: what serves the load, or what misses its targets least."""
        found, best = self.plan, self.plan.best
        words = {"off": "no speculation", "by batch": "draft tokens by batch"}
        where = f"{best.scenario.profile.name}, TP {best.scenario.parallel.tp}, {words.get(best.setting, f'{best.setting} draft tokens')}{at_most(best)}"  # fmt: skip
        p, which = best.point, found.targets.percentile
        if not found.met:
            p, of = best.seen or p, f"{which} " if which else ""
            limits = [f"{of}{name} {limit:g} ms" for name, limit in (("TTFT", found.targets.ttft_ms), ("TPOT", found.targets.tpot_ms)) if limit is not None]  # fmt: skip
            got = "" if p is None else f" ({of}TTFT {short(p.ttft_s[0] * 1e3)} ms, TPOT {short(p.tpot_s[0] * 1e3)} ms with hardly any load)"  # fmt: skip
            far = missed(best).replace("times", "times a target")
            return f"Nothing meets {' and '.join(limits)}. The nearest miss is {far}: {where}{got}."
        assert p is not None
        price = self.wanted.price_per_gpu_hour
        cost = "" if price is None else f", {short(best.cost_per_million(found.rate, found.requests.output_tokens, price))} for a million output tokens"  # fmt: skip
        sure = "" if found.tpot_ms is None else f" (80 % interval {found.tpot_ms.interval})"
        many = "s" if best.replicas > 1 else ""
        tpot = (
            f"mean TPOT {short(p.tpot_s[0] * 1e3, 3)} ms{sure}"
            if p.tpot_s[0]
            else f"mean TTFT {short(p.ttft_s[0] * 1e3, 3)} ms"
        )
        if best.seen is not None:
            tpot += f", {which} TTFT {short(best.seen.ttft_s[0] * 1e3, 3)} and TPOT {short(best.seen.tpot_s[0] * 1e3, 3)} ms"
        tpot += f", headroom {room(best, found.rate)}"
        gpus = "1 GPU" if best.gpus == 1 else f"{best.gpus:,} GPUs"
        return f"{gpus}: {best.replicas:,} replica{many} of {where}; {tpot}{cost}."

    def write_policy(self, path: Path) -> None:
        """Write when to switch the draft length, as the plan's engine reads it. Raises InputError, WorkError."""
        found = self.plan
        if not found.policies:
            what = "needs acceptance, and a drafter of chains whose length the engine can change"
            raise InputError(what, where="--policy", mend="give --accept-rate")
        ranges = found.policies[0].rising
        if not any(k for *_, k in ranges):
            mend = "leave it out, and launch without speculation"
            raise InputError("speculation is off at every batch", where="--policy", mend=mend)
        vllm = found.best.scenario.engine.name == "vllm"
        document = vllm_config(_speculating(found), ranges) if vllm else sglang_adaptive(ranges)
        write_atomically(path, json.dumps(document, indent=2) + "\n")

    def json(self) -> dict[str, Any]:
        """The document of schema specsim.plan/1."""
        found, price = self.plan, self.wanted.price_per_gpu_hour
        return {
            "schema": "specsim.plan/1",
            "title": self.title(),
            "verdict": self.verdict(),
            "load": {
                "rate": found.rate,
                "input_tokens": found.requests.input_tokens,
                "output_tokens": found.requests.output_tokens,
                "range_ratio": self.wanted.range_ratio,
                "prefix_rate": found.requests.prefix_rate,
                "trace": None if self.trace is None else self.trace.json(),
            },
            "targets": {
                "ttft_ms": found.targets.ttft_ms,
                "tpot_ms": found.targets.tpot_ms,
                "percentile": found.targets.percentile,
            },
            "meets_targets": found.met,
            "tpot_ms": None if found.tpot_ms is None else found.tpot_ms.json(),
            "percentiles": None if self.percentiles is None else self.percentiles.json(),
            "model": found.best.scenario.names.get("model", found.best.scenario.model.name),
            "engine": found.best.scenario.engine.name,
            "choices": [c.json(found.rate, found.requests, price) for c in found.choices],
            "drafter_targets": [
                {
                    "draft_tokens": t.draft_tokens,
                    "load": t.load,
                    "batch": t.batch,
                    "breakeven_accept_length": _six(t.breakeven_length),
                    "breakeven_accept_rate": _six(t.breakeven_rate),
                    "speedup": found.speedup,
                    "speedup_accept_rate": _six(t.speedup_rate),
                    "target_accept_rate": _six(t.target_rate),
                }
                for t in found.drafter_targets
            ],
            "policy": policy_json(found.policies, found.best.scenario.engine.name) if found.policies else None,
            "launch": self.launch,
            "simulation": self.simulation,
            "sources": sources_of_all((c.scenario for c in found.choices), prefills=True),
            "warnings": list(found.warnings),
        }


def plan(model: AModel | None = None, /, **options: Any) -> Planned:
    """Plan GPUs for a load: the options of `specsim plan`, with underscores.

        >>> found = plan("Llama-3.1-8B", hardware=["1x-h200"], rate=2, tpot_ms=20)
        >>> found.met, found.plan.best.gpus
        (True, 1)

    Options of the load (requests a second, tokens) and its targets (ms) are the fields of `Wanted`; all others are those of `specsim.scenario`, of which
    hardware, tp, ep and draft_tokens may be lists. Raises InputError.
    """
    options = with_model(model, options)
    names = {field.name for field in fields(Wanted)}
    wanted = Wanted(**{name: value for name, value in options.items() if name in names and value is not None})
    rate, requests, stats = wanted.load()
    asked = {name: value for name, value in options.items() if name not in names}
    makers, draft_tokens, notes = choices(asked)
    found = plan_scenarios(
        makers, rate, requests, Targets(wanted.ttft_ms, wanted.tpot_ms, wanted.percentile), drafting=functools.partial(drafting, asked),
        headroom=wanted.headroom, max_gpus=wanted.max_gpus, draft_tokens=draft_tokens, speedup=wanted.speedup,
        hysteresis=wanted.hysteresis, contexts=CONTEXTS,
    )  # fmt: skip
    of_trace = (left_out(stats.skipped),) if stats is not None and stats.skipped else ()
    largest = math.ceil((wanted.input_tokens or INPUT) + (wanted.output_tokens or OUTPUT))
    longest = largest if stats is None else stats.longest
    s = found.best.scenario
    long = too_long(s.model, s.options, longest, of_tokens(longest))
    found = replace(found, warnings=(*notes, *of_trace, *long, *without_weights(s), *found.warnings))
    return Planned(found, wanted, stats, _simulated(found, wanted, stats) if wanted.simulate and found.met else None)


def missed(c: Choice) -> str:
    """By how far a choice misses its targets, in words."""
    return f"{c.miss - 1:.0%} off" if c.miss < 2 else f"{short(c.miss, 3)} times"


def at_most(c: Choice) -> str:
    """The plan's own cap on running requests, in words."""
    return f", at most {c.most:,} running" if c.most else ""


def room(c: Choice, rate: float) -> str:
    """The headroom of a choice, in words."""
    left = c.headroom(rate)
    return f"{left:.0%}" if left < 10 else "over 1000%"


def _six(x: float | None) -> float | None:
    return None if x is None else six(x)


def _speculating(found: Plan) -> Scenario:
    """A scenario of the best choice's GPUs that drafts: its own, where it does."""
    best = found.best.scenario
    if best.method != "none":
        return best
    others = (c.scenario for c in found.choices if c.scenario.method != "none")
    return next(s for s in others if (s.profile.name, s.parallel) == (best.profile.name, best.parallel))


def _simulated(found: Plan, wanted: Wanted, stats: TraceStats | None) -> dict[str, Any]:
    """One replica of the best choice under its share of the load."""
    best = found.best
    asked, seed = wanted.num_requests or REQUESTS, wanted.seed or 0
    cached = found.requests.prefix_rate
    server = server_of(best.scenario, machine_of(best.scenario), ranges=best.ranges, prefix_rate=cached)
    if wanted.trace is not None:
        load = every(Trace(wanted.trace), best.replicas)
    else:
        given, made = wanted.input_tokens or INPUT, wanted.output_tokens or OUTPUT
        load = synthetic(asked, wanted.lengths(given), wanted.lengths(made), found.rate / best.replicas, seed=seed)
    targets = {"ttft": found.targets.ttft_ms, "tpot": found.targets.tpot_ms}
    count = asked if stats is None else stats.requests / best.replicas
    plain = count * found.requests.output_tokens / server.accept_length < PLAIN
    run = simulate(
        server,
        load,
        compiled=False if plain else None,
        seed=seed,
        targets_ms={name: limit for name, limit in targets.items() if limit is not None},
        count=asked if wanted.trace is None else 0,
    )
    m = run.metrics
    out: dict[str, Any] = {"requests": m.completed, "mean_batch": m.mean_batch, "utilisation": m.utilisation}
    for name in ("ttft", "tpot"):
        latency = m.latencies[name]
        if latency is not None:
            out |= {f"mean_{name}_ms": latency.mean, f"p50_{name}_ms": latency.median, f"p99_{name}_ms": latency.p99}
            if wanted.percentile in ("p90", "p95"):
                out[f"{wanted.percentile}_{name}_ms"] = getattr(latency, wanted.percentile)
    if (
        m.itl_token is not None
    ):  # TPOT of all tokens together, as the closed form has it: of a trace, short answers see more
        out["mean_itl_ms"] = m.itl_token.mean
    out["share_within_targets"] = m.goodput / m.request_throughput if m.request_throughput else 0.0
    out["warnings"] = [*run.warnings, *_unsettled(found, m.completed, stats)]
    return out


def _unsettled(found: Plan, completed: int, stats: TraceStats | None) -> Iterator[str]:
    """A note where a server fills and empties for much of a run, so that its means are not those of the steady state."""
    assert found.best.point is not None
    running = float(found.best.point.running[0])
    if stats is None and completed < LIVES * running:
        digit = 10 ** int(math.log10(LIVES * running))
        enough = math.ceil(LIVES * running / digit) * digit
        yield (
            f"{running:,.0f} requests run at once in the steady state, and the simulation of {completed:,} starts empty: "
            f"--num-requests {enough} is long enough to settle"
        )
