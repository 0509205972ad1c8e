"""Percentiles of what requests see in the closed form's steady state: the parts that its means are sums of, drawn together.

An arrival meets a number of running requests, a step, the one after it and its own prefill, each as likely as `specsim.steady` and `specsim.gathering` say;
drawn at evenly spread points (multiples of square roots of primes; Richtmyer, 1951) rather than by chance, so that a plan is the same
each time. Waits for a place and for prompts that are prefilled one by one are taken as exponential. The time per token of one request scatters with

    the number that runs      of which those that run beside its first token leave over its life, and those that were prefilled since then
                              take their places: prompts that stop a request run beside it then
    prompts behind its own    of which a short answer sees those that go before its last step
    prompts in between        busy periods that begin at the rate while the server decodes, each of as many as branch off (Borel and Tanner)
    acceptance                (variance of a cycle's tokens over the square of their mean) / (cycles of its life)

What all tokens take together is known, and prompts are scaled to it. Where the engine mixes them into the steps that decode no step is wider
than its budget, which is not scaled, and a busy period may not be over with the last token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specsim.drawn import branched, gamma, poisson
from specsim.names import PERCENTILES
from specsim.quantities import short, six
from specsim.sharing import MOST_WORK
from specsim.steady import INSTANT, WAIT, Point, Server, State

Array = NDArray[np.float64]
DRAWS = 2048
PRIMES = (
    2,
    3,
    5,
    7,
    11,
    13,
    17,
    19,
    23,
    29,
    31,
    37,
    41,
    43,
    47,
    53,
    59,
    61,
    67,
    71,
    73,
    79,
    83,
    89,
    97,
    101,
    103,
    107,
    109,
    113,
    127,
    131,
)
ROUNDS = 4  # prefills in a row behind one's own that are followed
TINY = 1e-12
HALVINGS, FURTHEST = 16, 4.0  # of a factor, and the largest
LEAST = 0.2  # share of its mean below which nothing varies
PERCENTS = {name: float(name[1:]) for name in PERCENTILES}  # that can be asked for


@dataclass(frozen=True)
class Percentiles:
    """Seconds to the first token and a token after it, of half and of 99 % of the requests."""

    p50_ttft_s: float
    p99_ttft_s: float
    p50_tpot_s: float
    p99_tpot_s: float

    def json(self) -> dict[str, float]:
        """In ms."""
        return {f"{name[:-2]}_ms": six(s * 1e3) for name, s in asdict(self).items()}

    def sentence(self) -> str:
        """For people."""
        p50, p99, tpot, slow = (short(s * 1e3, 3) for s in astuple(self))
        if not astuple(self)[-1]:  # answers of one token
            return f"half of the requests see TTFT below {p50} ms, 99% below {p99} ms"
        return f"half of the requests see TTFT below {p50} and TPOT below {tpot} ms, 99% below {p99} and {slow} ms"


def percentiles(server: Server, rate: float) -> Percentiles | None:
    """Of a server at a rate, requests a second; None where the load is not served."""
    if not rate < float(server.capacity()):
        return None
    (low, high), (median, slow) = (np.percentile(x, (50, 99)).tolist() for x in draw(server, rate))
    return Percentiles(low, high, median, slow)


def below(server: Server, rate: float, percent: float) -> Point:
    """The point at a rate, with the TTFT and the TPOT that so many per cent of the requests stay below in the places of means; infinite
    where the load is not served."""
    state = server.state(np.asarray([rate]))
    point = server.point(state)
    if not state.held.stable[0]:
        return point
    ttft, tpot = (np.atleast_1d(np.percentile(x, percent)) for x in draw(server, rate, state, float(point.tpot_s[0])))
    return replace(point, ttft_s=ttft, tpot_s=tpot)


def draw(server: Server, rate: float, state: State | None = None, mean: float | None = None) -> tuple[Array, Array]:
    """(TTFT, TPOT), seconds of each of `DRAWS` requests; TPOT of those whose answer has a second token, 0 where none has. state, mean: those
    of the server at the rate, and its mean TPOT, where they are known."""
    points = (np.sqrt(PRIMES)[:, None] * (np.arange(DRAWS) + 0.5)) % 1
    at, order = iter(points[:-2]), points[-2:]
    state = server.state(np.asarray([rate])) if state is None else state
    mean = float(server.point(state).tpot_s[0]) if mean is None else mean
    weight = state.held.weight[0]
    running = _pick(weight, next(at))
    prompts = _together if len(server.prefill) > 1 else _one_by_one
    ttft, behind = prompts(server, rate, state, running, at, order)
    full, waiting = max(float(state.held.full[0]), TINY), state.held.waiting[0] / rate
    turn = next(at)
    ttft = ttft - np.where(turn < full, np.log(np.minimum(turn / full, 1.0)) * waiting / full, 0.0)

    idle = (running == 0) & (next(at) < state.held.clock[0, 0] / max(float(weight[0]), TINY))
    ttft = ttft + server.lead_s * idle

    answer = server.requests.output_tokens
    if not mean:
        return ttft, np.zeros_like(ttft)
    drawn = answer * gamma(1.0, server.requests.output_cv2, next(at))
    after = np.maximum(np.rint(drawn) if server.requests.output_cv2 else drawn, 1.0) - 1  # tokens after the first
    several = after > 0
    if not several.any():
        return ttft, np.zeros_like(ttft)
    left = (x[several] for x in at)
    return ttft, _per_token(server, state, mean, behind[:, several], after[several], left)


def _per_token(server: Server, state: State, mean: float, behind: Array, after: Array, at: Iterator[Array]) -> Array:
    """TPOT of answers with so many tokens after the first, and so many prompts behind their own (in rows of one step after another, or all), where all tokens take `mean` on average."""
    from scipy.special import ndtri

    rate, prefills, requests = float(state.rate[0]), state.prefills, server.requests
    weight = state.held.weight[0] * np.arange(state.held.weight.shape[1])  # by requests that run
    work, growing = (
        float(np.average(x, weights=weight)) for x in (np.clip(prefills.work[0], 0.0, MOST_WORK), prefills.growing[0])
    )
    met = _pick(weight, next(at)).astype(float)
    batches, step = np.arange(len(server.step) + 1), np.concatenate([[0.0], server.step])
    length = np.broadcast_to(server.accept_length, server.step.shape)[np.maximum(met.astype(np.int64), 1) - 1]
    # The last cycle gives more than is left to come, as the next renewal after any moment is far.
    beyond = (length * (1 + server.scatter) - 1) / 2
    varied = 1 + ndtri(next(at)) * np.sqrt(server.scatter * length / after)
    cycles = (after + beyond) / length * np.maximum(varied, LEAST)
    # Busy periods begin at the rate while the server decodes, and the prompts that one serves are a branching process.
    extra = growing * work / (1 - work)
    prompt = work / (1 - work) / (rate * (1 + extra))  # seconds that one adds
    alone, widest = (np.interp(met, batches, x) * cycles for x in (step, server.widest))
    # Of the steps after its own those decode that have no prompts, or all (mixed): with its last token the rest is nothing to it.
    together = len(behind) > 1
    taken = np.zeros_like(after) if server.mixing is None else np.minimum(behind[0] * prompt / widest, 1.0) * cycles
    if together:
        decodes = np.ones_like(behind) if server.mixing is not None else (behind == 0).astype(float)
        before = np.cumsum(decodes, axis=0) - decodes
        behind = behind * np.clip(cycles - before, 0.0, 1.0)
        taken = np.minimum(decodes.sum(axis=0), cycles)
    behind = behind.sum(axis=0)
    load, idle, done = extra / (1 + extra), 1 - taken / cycles, np.ones_like(after)
    if (
        server.mixing is not None and not together
    ):  # whose prompts take steps of the answer, and may not be done with its last token
        steps = prompt * cycles / np.maximum(widest - alone, TINY)
        load = np.minimum(rate * steps * widest / cycles, MOST_WORK)
        begins, ends = rate * alone / cycles, (1 - load) / steps  # chance, in a step
        lasts = (begins + ends) * idle * cycles
        done = 1 + np.expm1(-lasts) / np.maximum(lasts, TINY)
        idle = idle / (1 + begins / ends)
    begun = poisson(rate * alone * idle, next(at))
    served = branched(begun, load, server.varies, next(at)) * done
    others = behind + served * gamma(served, server.varies, next(at))
    seconds = others * prompt
    most = np.maximum(widest - alone, TINY)  # all its steps are full
    # Some that run beside its first token do so to its last; what was prefilled since then has taken the places of the others.
    stay = _staying(after / max(requests.output_tokens - 1, 1.0), requests.alike)
    came = np.average(batches, weights=weight) * np.minimum(others, most / prompt) / (rate * mean * after)
    beside = np.clip(stay * met + (1 - stay) * came, 1.0, len(server.step))
    alone, widest = (np.interp(beside, batches, x) * cycles for x in (step, server.widest))
    most = np.maximum(widest - alone, TINY)
    return np.asarray((alone + _of_mean(seconds, most, mean * after.sum() - alone.sum())) / after)


def _of_mean(values: Array, most: Array, total: float) -> Array:
    """The values, `most` at most, that add up to a total as far as those do that are below that, each times the same factor."""
    low, high = 0.0, FURTHEST
    for _ in range(HALVINGS):
        factor = (low + high) / 2
        found = np.where(values < most, np.minimum(values * factor, most), most)
        low, high = (factor, high) if found.sum() < total else (low, factor)
    return np.asarray(found)


def _together(
    server: Server, rate: float, state: State, running: NDArray[np.int64], at: Iterator[Array], order: Array
) -> tuple[Array, Array]:
    """(TTFT but for the wait for a place, prompts that are prefilled right behind one's own, in rows of one step after another) where prompts share a prefill."""
    seen = server.seen
    step = np.concatenate([[INSTANT * server.step[0]], server.step])[seen]
    steps = server.steps_of(np.asarray([[rate]]), step, seen.astype(float))
    place = np.abs(seen - running[:, None]).argmin(axis=1)
    cv2, several = server.requests.input_cv2, steps.prompts.astype(float)
    totals = server.prefill * np.arange(1, len(server.prefill) + 1)
    slope = totals[1] - totals[0]

    def took(seconds: Array, prompts: Array, u: Array, more: int = 0) -> Array:
        """Seconds of a step whose prompts have as many tokens as they happen to; `more`: it is met, which long ones are more often."""
        varied = seconds + slope * prompts * (gamma(np.maximum(prompts, 1.0), cv2, u, more) - 1) if cv2 else seconds
        return np.asarray(np.maximum(varied, LEAST * seconds))

    def of(values: Array) -> Array:
        return np.asarray(np.broadcast_to(values, (*steps.share.shape, *values.shape[steps.share.ndim :]))[0][place])

    seconds, alone = of(steps.seconds), of(steps.with_one_s)
    rows = np.arange(DRAWS)
    k = _pick(of(steps.met), next(at))
    here = took(seconds[rows, k], several[k], next(at), 1)
    left = next(at)
    beside = _pick(of(steps.beside)[rows, k], next(at))
    k = _pick(of(steps.share), next(at))
    following = took(seconds[rows, k], several[k], next(at))
    together = several[beside] + 1
    own = took(alone[rows, beside], together, next(at))
    behind, last, next_ = np.zeros((ROUNDS, DRAWS)), following, own
    # More than fit are several steps in a row, and the rest of them go on when one's own prompt is done.
    place = np.ceil(order[0] * together)
    done = np.minimum(place + order[1] * steps.fits if cv2 else np.ceil(place / steps.fits) * steps.fits, together)
    for i in range(
        ROUNDS
    ):  # those that came in the step before one's own, then in it, until a step in which nobody came
        came = rate * last
        many = poisson(came, next(at))
        many = many * gamma(many, cv2, next(at))
        prefill = np.interp(many, np.arange(len(totals) + 1), np.append(0.0, totals)) * np.maximum(
            many / len(totals), 1.0
        )
        last, next_ = next_, prefill
        behind[i] = many
    behind[0] += together - done
    return left * here + following + own * done / together, behind


def _one_by_one(
    server: Server, rate: float, state: State, running: NDArray[np.int64], at: Iterator[Array], order: Array
) -> tuple[Array, Array]:
    """The same where each prompt takes a step or more of its own: an M/G/1 queue."""
    weight, p = state.held.weight[0], state.prefills
    step = np.concatenate([[INSTANT * server.step[0]], server.step])
    busy = min(float(weight @ p.busy[0]), MOST_WORK)
    own = (p.first[0] - WAIT * step * np.maximum(1 - p.busy[0], 0.0))[running] * gamma(1.0, server.varies, next(at))
    decides = (next(at) + WAIT - 0.5) * step[running]
    # Where there is a wait, it is a geometric number of prompts' residual times (Pollaczek and Khinchine).
    residual = float(weight @ p.each[0]) * (1 + server.varies) / 2
    many = 1 + np.floor(np.log(next(at)) / math.log(max(busy, TINY)))
    queue = residual * _residuals(many, server.varies, order[1])
    wait = np.where(next(at) < busy, queue, decides) + np.where(
        next(at) < busy**2, float(weight @ p.full[0]) * server.left_of_step(many), 0.0
    )
    ttft = wait + own
    left = branched(poisson(rate * ttft, next(at)), busy, server.varies, next(at))
    return ttft, (left * gamma(left, server.varies, next(at)))[None]


def _residuals(many: Array, varies: float, u: Array) -> Array:
    """Sums of so many residual times of services, over their mean, at points u in (0, 1): each is evenly any share of a service that is met. Of services
    of one length a single one is that share; more are taken as Gamma distributed."""
    varied = 4 * (1 + 2 * varies) / (3 * (1 + varies)) - 1
    sums = many * gamma(many, varied, u)
    return sums if varies else np.where(many == 1, 2 * u, sums)


def _pick(chance: Array, u: Array) -> NDArray[np.int64]:
    """Places drawn with (..., n) chances, which need not add up to 1, at points u in (0, 1)."""
    total = np.cumsum(chance, axis=-1)
    if total.ndim == 1:
        return np.asarray(np.minimum(np.searchsorted(total, u * total[-1]), len(total) - 1))
    return np.asarray(np.minimum((total < u[:, None] * total[:, -1:]).sum(axis=-1), total.shape[-1] - 1))


def _staying(life: Array, alike: float) -> Array:
    """Share of those that run beside a request's first token, over its life of so many mean ones: all alike leave evenly within a life of
    theirs, and answers as exponential ones by the same chance at any time."""
    life = np.maximum(life, TINY)
    return np.asarray((2 * alike - 1) / 2 + (2 - 2 * alike) * -np.expm1(-life) / life)
