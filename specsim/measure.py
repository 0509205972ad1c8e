"""From timed batches to milliseconds a step: robust regression over several lengths, the engine's timers, its log.

The time of a batch that makes n steps is a + b n: the prefill, the network and the scheduler's start are in a, the
step in b. Several lengths and repetitions give b with an interval, and no single hiccup decides it. The same slope of
the engine's event timers gives the time of each phase: a draft extend that shares its timer with the prefill is told
apart because only it grows with n.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from specsim.host_speed import Watch
from specsim.live import (
    Answer,
    Client,
    Counters,
    DecodeLine,
    LogTail,
    PointError,
    Served,
    counters,
    decode_lines,
    generate,
    prompts,
)
from specsim.quantities import counted
from specsim.records import Point, Quantity

DISAGREE = 0.03  # sources that differ by more are reported
UNSTEADY, UNSTEADY_MEAN = 1.1, 1.5  # target passes a cycle from which a batch did not run as one
SLOWED = 1.2  # times its fastest from which a slow core is told: below, it hardly shows
WIDE = 0.05  # half of a step's interval that is reported
TIMER = "sglang:forward_execution_seconds"
PASSES = "sglang:cuda_graph_passes"
STEPS = "vllm:iteration_tokens_total_count"  # a histogram with one entry an engine step
RETRACTED = ("sglang:num_retracted_requests", "vllm:num_preemptions")
DRAFTS = "vllm:spec_decode_num_drafts"
DRAFTING = "vllm:spec_decode"  # what begins so is there when it drafts
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"


def slope(steps: Sequence[float], seconds: Sequence[float], how: str = "regression") -> Quantity:
    """Milliseconds a step with an 80 % interval, from seconds against steps; outliers weigh less (Tukey's biweight).

    Starts at the Theil-Sen slope, so that up to about a quarter of the points may be disturbed. Raises ValueError for
    fewer than three points or a single length.
    """
    from scipy.special import stdtrit

    x, y = np.asarray(steps, float), np.asarray(seconds, float)
    if len(x) < 3 or len(np.unique(x)) < 2:
        raise ValueError("needs three points and two lengths")
    i, j = np.triu_indices(len(x), 1)
    apart = x[i] != x[j]
    b = float(np.median((y[j] - y[i])[apart] / (x[j] - x[i])[apart]))
    a = float(np.median(y - b * x))
    weight = np.ones_like(x)
    floor = 1e-6 + 1e-5 * float(np.ptp(y))  # seconds: clocks are no finer
    for _ in range(30):
        residual = y - a - b * x
        scale = max(1.4826 * float(np.median(np.abs(residual))), floor)
        weight = np.clip(1 - (residual / (4.685 * scale)) ** 2, 0, None) ** 2
        mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
        spread = float(np.sum(weight * (x - mean_x) ** 2))
        if spread == 0:
            break
        b_next = float(np.sum(weight * (x - mean_x) * (y - mean_y)) / spread)
        a = float(mean_y - b_next * mean_x)
        if abs(b_next - b) <= 1e-9 * abs(b):
            b = b_next
            break
        b = b_next
    residual = y - a - b * x
    effective = float(np.sum(weight))
    freedom = max(effective - 2, 1.0)
    variance = float(np.sum(weight * residual**2)) / freedom
    spread = float(np.sum(weight * (x - np.average(x, weights=weight)) ** 2))
    error = math.sqrt(variance / spread) if spread > 0 else abs(b)
    half = float(stdtrit(freedom, 0.9)) * max(error, floor / math.sqrt(spread) if spread > 0 else 0.0)
    return _ms(b, half, len(x), f"{how} over {counted(len(np.unique(x)), 'length')}")


def _ms(value: float, half: float, n: int, how: str) -> Quantity:
    def round6(seconds: float) -> float:
        return round(1e3 * seconds, 6)

    return Quantity(value=round6(value), low=round6(value - half), high=round6(value + half), n=n, how=how)


def logged(lines: Sequence[DecodeLine], batch: int) -> Quantity | None:
    """Milliseconds a step from steady log intervals of `batch` requests; None for fewer than two. Data-parallel schedulers are
    taken to share them evenly."""
    schedulers = len({line.rank for line in lines})
    values = sorted(line.step_ms for line in lines if line.running * schedulers == batch)
    if len(values) < 2:
        return None
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(v - middle) for v in values)
    half = 1.28 * 1.253 * spread / math.sqrt(len(values))
    return Quantity(
        value=round(middle, 6),
        low=round(middle - half, 6),
        high=round(middle + half, 6),
        n=len(values),
        how="log: steady intervals",
    )


@dataclass(frozen=True)
class Plan:
    """How long to measure. `repeat_s`: GPU time of one pass over all lengths; `width`: half interval to stop at."""

    repeat_s: float = 4.0
    min_repeats: int = 3
    max_repeats: int = 6
    point_s: float = 25.0  # no further repetition is begun after this
    width: float = 0.01
    lengths: tuple[int, ...] = ()  # cycles; () = chosen from the warm-up
    seed: int = 0


QUICK = Plan(repeat_s=2.5, min_repeats=2, max_repeats=3, point_s=10.0)


def lengths_for(step_s: float, plan: Plan) -> tuple[int, ...]:
    """Four lengths, in cycles, whose sum at `step_s` seconds a cycle is about `repeat_s`; the longest is 32 to 240."""
    longest = min(max(round(plan.repeat_s / (2.2 * max(step_s, 1e-5))), 32), 240)
    return tuple(max(round(longest * f), 4) for f in (0.1, 0.4, 0.7, 1.0))


@dataclass
class _Series:
    """Everything seen at one point: answers with the counters' growth beside them."""

    answers: list[Answer] = field(default_factory=list)
    cycles: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)  # seconds a category, one entry an answer
    counted: bool = False  # the server has counters
    passes: list[float] = field(default_factory=list)
    eager_passes: float = 0.0
    graph_passes: float = 0.0
    lines: list[DecodeLine] = field(default_factory=list)
    drafts: float = 0.0  # vLLM: drafts made, sequences times cycles
    drafted: list[float] = field(default_factory=list)  # vLLM: cycles of the mean sequence, for each answer
    accepted: dict[int, float] = field(default_factory=dict)  # vLLM: drafts accepted at each position
    slowdowns: list[float | None] = field(default_factory=list)  # of the server's cores, for each answer


def growth(before: Counters | None, after: Counters | None, name: str, **labels: str) -> float | None:
    """What a counter gained between two moments; None where it is not known. Raises PointError where it lost."""
    if before is None or after is None or (end := after.per_rank(name, **labels)) is None:
        return None
    gained = end - (before.per_rank(name, **labels) or 0.0)
    if gained < 0:
        raise PointError(
            f"{name} fell from one answer to the next: did the server start again, or do several share its address?"
        )
    return gained


def retracted(before: Counters | None, after: Counters | None) -> int:
    """Requests that the server took out of a batch between two moments, 0 where it does not say; of all data-parallel ranks, as
    each counts its own. Raises PointError where a counter lost."""
    lost = 0.0
    for name in RETRACTED:
        ranks = after.categories(name, "dp_rank") if after is not None else []
        own = [growth(before, after, name, dp_rank=r) for r in ranks] or [growth(before, after, name)]
        lost += sum(grown or 0.0 for grown in own)
    return math.ceil(lost)


def _one(
    client: Client,
    served: Served,
    token_ids: list[list[int]],
    new_tokens: int,
    series: _Series,
    log: LogTail | None,
    host: Watch | None,
) -> None:
    """One batch; its answer, what the counters and the log gained, and how slow the server's cores were go into `series`."""
    before = counters(client)
    begin = time.monotonic()
    answer = generate(client, served, token_ids, new_tokens)
    slow = host.since(begin) if host is not None else None
    series.slowdowns.append(slow.value if slow is not None else None)
    after = counters(client)
    if lost := retracted(before, after):
        raise PointError(
            f"the server retracted {counted(lost, 'request')}: its KV cache is too small; lower --batch or --context"
        )
    cycles = answer.cycles
    if cycles is None:
        drafts = growth(before, after, DRAFTS) or 0.0
        if not drafts and (served.speculative or (after is not None and after.any_of(DRAFTING))):
            raise PointError(
                f"{client.url}: it drafts, and /metrics counts no draft ({DRAFTS}); is speculation off at this batch, or is "
                "this a vLLM without its V1 counters?"
            )
        steps = _steps(before, after) if drafts and before is not None and after is not None else None
        # Of the longest request, which the time is of: the engine's steps but for the prefill; else the mean of all.
        cycles = steps - 1 if steps else drafts / len(token_ids) if drafts else float(new_tokens - 1)
        series.drafts += drafts
        accepted = 0.0
        for position in after.categories(ACCEPTED, "position") if after is not None else []:
            grown = growth(before, after, ACCEPTED, position=position) or 0.0
            series.accepted[int(position)] = series.accepted.get(int(position), 0.0) + grown
            accepted += grown
        # A cycle emits one token and what it accepts, steps included in which nothing was drafted (n-grams).
        own = new_tokens - 1 - accepted / len(token_ids) if accepted else drafts / len(token_ids)
        series.drafted.append(own)
    series.answers.append(answer)
    series.cycles.append(cycles)
    if before is not None and after is not None:
        series.counted = True
        for category in after.categories(TIMER, "category"):
            spent = growth(before, after, TIMER, category=category)
            past = series.phases.setdefault(category, [0.0] * (len(series.answers) - 1))
            past.append(spent or 0.0)
        graph, eager = (growth(before, after, PASSES, mode=f"decode_{m}") for m in ("cuda_graph", "none"))
        if graph is not None or eager is not None:
            series.passes.append((graph or 0.0) + (eager or 0.0))
            series.graph_passes += graph or 0.0
            series.eager_passes += eager or 0.0
        elif (steps := _steps(before, after)) is not None:
            series.passes.append(steps)
    if log is not None:
        series.lines += decode_lines(log.lines())


def _steps(before: Counters, after: Counters) -> float | None:
    """Steps of a vLLM between two moments: with data-parallel engines, of the one that made the most."""
    engines = after.categories(STEPS, "engine")
    own = [grown for e in engines if (grown := growth(before, after, STEPS, engine=e)) is not None]
    return max(own) if own else growth(before, after, STEPS)


def check_capacity(served: Served, batch: int, context: int, new_tokens: int) -> None:
    """Raises PointError when the server says that it cannot run the batch at once."""
    if served.max_running is not None and batch > served.max_running:
        raise PointError(
            f"the server runs at most {counted(served.max_running, 'request')} at once"
            " (SGLang's default under speculation is 48); start it with more --max-running-requests or lower --batch"
        )
    if served.kv_tokens is not None and batch * (context + new_tokens) > served.kv_tokens:
        need = batch * (context + new_tokens)
        raise PointError(
            f"needs {need} tokens of KV cache and the server has {served.kv_tokens}; lower --batch or --context"
        )


def measure(
    client: Client,
    served: Served,
    batch: int,
    context: int,
    plan: Plan,
    log: LogTail | None = None,
    say: Callable[[str], None] = print,
    host: Watch | None = None,
) -> Point:
    """One operating point of a live server. host: watches the cores of one on this machine; the point then says how fast they were.

    Raises PointError when the server rejects, retracts or does not hold the batch steady, ServerError when it is gone.
    """
    check_capacity(served, batch, context, 64)
    token_ids = prompts(batch, context, plan.seed)
    start = time.perf_counter()
    warm = _Series()
    for tokens in (8, 8, 40):  # the first fills the prefix cache and compiles what is compiled late
        _one(client, served, token_ids, tokens, warm, log, host)
    accept = max((warm.answers[2].new_tokens - 1) / max(warm.cycles[2], 1.0), 1.0)
    step = (warm.answers[2].seconds - warm.answers[1].seconds) / max(warm.cycles[2] - warm.cycles[1], 1.0)
    chosen = plan.lengths or lengths_for(max(step, 2e-4), plan)
    check_capacity(served, batch, context, math.ceil(max(chosen) * accept) + 1)
    series, cycle = _Series(), None
    begin, watched = time.perf_counter(), time.monotonic()
    for repeat in range(plan.max_repeats):
        for n in chosen if repeat % 2 == 0 else chosen[::-1]:
            _one(client, served, token_ids, math.ceil(n * accept) + 1, series, log, host)
        cycle = _cycle(series)
        narrow = cycle.high is not None and (cycle.high - cycle.value) <= plan.width * abs(cycle.value)
        if repeat + 1 >= plan.min_repeats and (narrow or time.perf_counter() - begin > plan.point_s):
            break
    assert cycle is not None
    if cycle.value <= 0:
        raise PointError(
            f"the time does not grow with the length ({cycle.value} ms a step): the server or network is too noisy"
        )
    point = _point(served, batch, context, series, cycle)
    point.raw["measuring_s"] = round(time.perf_counter() - start, 2)
    if host is not None:
        _add_host(point, host.since(watched), series.slowdowns)
    half = math.inf if cycle.high is None else (cycle.high - cycle.value) / cycle.value
    if half > WIDE:
        point.notes.append(
            f"its 80 % interval is {half:.0%} wide to each side after {repeat + 1} repetitions: the server or the network is noisy"
        )
    say(_line(point))
    return point


def _add_host(point: Point, slowdown: Quantity | None, each: Sequence[float | None]) -> None:
    """Keep how slow the server's cores were, in all and during each answer, and say it where they were."""
    point.host_slowdown = slowdown
    if slowdown is None:
        return
    point.raw["host_slowdown"] = list(each)
    if slowdown.value > SLOWED:
        what = f"the server's core took {slowdown.value:.2f} times as long as this host's fastest"
        point.notes.append(f"{what}: what waits for the host did too")


def _cycle(series: _Series) -> Quantity:
    """The time of a step or cycle. Raises PointError when the answers do not tell it."""
    if len(set(series.cycles)) == 1:
        lengths = sorted({a.new_tokens for a in series.answers})
        raise PointError(
            f"answers of {lengths[0]} and of {lengths[-1]} tokens took {counted(int(series.cycles[0]), 'cycle')} each, as the "
            "server counts them (spec_verify_ct)"
        )
    return slope(series.cycles, [a.seconds for a in series.answers])


def _point(served: Served, batch: int, context: int, series: _Series, cycle: Quantity) -> Point:
    told = any(a.histogram or a.accept_lengths for a in series.answers)
    speculative = served.speculative or series.drafts > 0 or told
    notes: list[str] = []
    if late := sum(a.skewed for a in series.answers):
        notes.append(
            f"the server says of {late} of {len(series.answers)} batches that they took longer than the client waited: "
            "there the client's clock is taken"
        )
    raw: dict[str, object] = {
        "prompt_tokens": context,
        "new_tokens": [a.new_tokens for a in series.answers],
        "cycles": [round(c, 3) for c in series.cycles],
        "seconds": [round(a.seconds, 6) for a in series.answers],
        "wall_seconds": [round(a.wall_seconds, 6) for a in series.answers],
        "regression_ms": cycle.model_dump(),
    }
    graph = None
    if len(series.passes) == len(series.answers) and any(series.passes):
        raw["decode_passes"] = series.passes
        if series.graph_passes or series.eager_passes:
            graph = series.graph_passes > series.eager_passes
        if min(series.graph_passes, series.eager_passes) > 0:
            notes.append(f"{series.graph_passes:g} steps ran in a CUDA graph and {series.eager_passes:g} eagerly")
        mean = series.drafts > 0  # of all requests, which the longest may exceed by a quarter
        own = series.drafted if mean else series.cycles
        rate = slope(own, series.passes).value / 1e3 if len(set(own)) > 1 else 0.0
        if rate > (UNSTEADY_MEAN if mean else UNSTEADY):
            raise PointError(
                f"the batch was not steady: {rate:.2f} target passes a step; can the server hold {batch} requests?"
            )
    elif series.counted:
        notes.append("its counters do not show its steps: that the batch was steady is not known")
    chosen = cycle
    from_log = logged(series.lines, batch)
    if from_log is not None:
        raw["log_ms"] = from_log.model_dump()
        apart = cycle.value / from_log.value - 1
        if abs(apart) > DISAGREE:
            notes.append(
                f"the regression ({cycle.value:.3f} ms) and the log ({from_log.value:.3f} ms) differ by {apart:+.1%}"
            )
            if (from_log.n or 0) >= 4:
                chosen = from_log
    elif series.lines:
        seen = sorted({line.running for line in series.lines})
        notes.append(f"the log shows {seen} running requests, never steadily {batch}")
    timers = {
        name: slope(series.cycles, spent, "event timer, slope")
        for name, spent in series.phases.items()
        if len(spent) == len(series.cycles) and max(spent) > 0
    }
    raw["timers_s"] = {name: [round(s, 6) for s in spent] for name, spent in series.phases.items() if any(spent)}
    # T(n) = b n + c n^2 / 2 when a step grows by c a token; the slope over lengths n is then b + c mean(n).
    mean_tokens = statistics.fmean(a.new_tokens for a in series.answers)
    point = Point(batch=batch, context=round(context + mean_tokens), cuda_graph=graph, notes=notes, raw=raw)
    if not speculative:
        point.decode_ms, point.tokens_per_cycle = chosen, 1.0
        _compare(point, chosen, timers.get("decode"), "decode's event timer")
        tokens_s = 1e3 * batch / chosen.value
    else:
        length = _accept_length(series)
        point.cycle_ms, point.tokens_per_cycle = chosen, round(length, 4)
        point.accept_rate_by_position = _rates(series)
        if series.answers[-1].accept_lengths:
            raw["accept_lengths"] = series.answers[-1].accept_lengths  # of each request of the last batch
        _phases(point, chosen, timers)
        tokens_s = 1e3 * batch * length / chosen.value
    low, high = ((round(tokens_s * chosen.value / end, 3) if end else None) for end in (chosen.high, chosen.low))
    point.tokens_per_s = Quantity(
        value=round(tokens_s, 3), low=low, high=high, n=chosen.n, how="batch x tokens a cycle / cycle"
    )
    return point


def _phases(point: Point, cycle: Quantity, timers: dict[str, Quantity]) -> None:
    """Draft, verify, extend and host time of a cycle, where the engine's timers are on.

    An eager draft step reports as "decode" and an eager draft extend as "extend"; in graphs they have their own names.
    """
    verify = timers.get("target_verify")
    if verify is None:
        return
    point.verify_ms = verify
    drafts = [timers[k] for k in ("eagle_draft", "decode") if k in timers and timers[k].value > 1e-3]
    names = ("eagle_draft_extend", "extend", "draft_extend_v2")
    extends = [timers[k] for k in names if k in timers and timers[k].value > 5e-3 and (timers[k].low or 0) > 0]
    point.draft_ms, point.extend_ms = _sum(drafts), _sum(extends)
    known = [q for q in (verify, point.draft_ms, point.extend_ms) if q]
    rest = cycle.value - sum(q.value for q in known)
    half = math.sqrt(sum(((q.high or q.value) - q.value) ** 2 for q in [cycle, *known]))
    point.host_ms = Quantity(
        value=round(rest, 6),
        low=round(rest - half, 6),
        high=round(rest + half, 6),
        n=cycle.n,
        how="cycle minus timed phases",
    )
    if rest < -DISAGREE * cycle.value:
        busy = sum(q.value for q in known)
        point.notes.append(f"the event timers sum to {busy:.3f} ms, more than the cycle of {cycle.value:.3f} ms")


def _sum(parts: list[Quantity]) -> Quantity | None:
    if not parts:
        return None
    value = sum(q.value for q in parts)
    half = math.sqrt(sum(((q.high or q.value) - q.value) ** 2 for q in parts))
    return Quantity(
        value=round(value, 6), low=round(value - half, 6), high=round(value + half, 6), n=parts[0].n, how=parts[0].how
    )


def _compare(point: Point, chosen: Quantity, timer: Quantity | None, name: str) -> None:
    """Keep the timer's figure beside the step's. The GPU may be idle between steps, so only a longer timer is wrong."""
    if timer is None:
        return
    point.raw["timer_ms"] = timer.model_dump()
    rest = chosen.value - timer.value
    point.host_ms = Quantity(value=round(rest, 6), n=chosen.n, how="step minus timed pass")
    if rest < -DISAGREE * chosen.value:
        point.notes.append(f"{name} says {timer.value:.3f} ms, more than the step of {chosen.value:.3f} ms")


def _accept_length(series: _Series) -> float:
    cycles = sum(sum(a.histogram) for a in series.answers)
    if cycles:
        return 1 + sum(i * n for a in series.answers for i, n in enumerate(a.histogram)) / cycles
    return sum(a.new_tokens - 1 for a in series.answers) / max(sum(series.drafted or series.cycles), 1.0)


def _rates(series: _Series) -> list[float] | None:
    """Conditional accept rate at each position: of the cycles that came so far, those that went one further."""
    width = max((len(a.histogram) for a in series.answers), default=0)
    total = [sum(a.histogram[i] for a in series.answers if i < len(a.histogram)) for i in range(width)]
    reached = [float(sum(total[i:])) for i in range(width)]
    if series.drafts and series.accepted:
        reached = [series.drafts, *(series.accepted[i] for i in sorted(series.accepted))]
    return [round(b / a, 4) for a, b in pairwise(reached) if a] or None


def _line(point: Point) -> str:
    parts = [f"batch {point.batch} context {point.raw['prompt_tokens']}:"]
    for name in ("decode_ms", "cycle_ms", "draft_ms", "verify_ms", "extend_ms", "host_ms"):
        quantity: Quantity | None = getattr(point, name)
        if quantity is not None:
            wide = f" ±{quantity.high - quantity.value:.3f}" if quantity.high is not None else ""
            parts.append(f"{name[:-3]} {quantity.value:.3f}{wide} ms")
    if point.cycle_ms is not None:
        parts.append(f"accept length {point.tokens_per_cycle:.2f}")
    parts.append(f"[{point.raw['measuring_s']} s]")
    return " ".join(parts) + "".join(f"; note: {n}" for n in point.notes)
