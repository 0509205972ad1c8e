"""Percentiles of what requests see in the closed form's steady state: the parts that its means are sums of, drawn together.

An arrival meets a number of running requests, a step, the one after it and its own prefill, each as likely as `specsim.steady` and `specsim.gathering` say;
drawn at evenly spread points (multiples of square roots of primes; Richtmyer, 1951) rather than by chance, so that a plan is the same
each time. Waits for a place and for prompts that are prefilled one by one are taken as exponential. The time per token of one request scatters with

    the number that runs      its time a step, of which a life averages: the variance of a mean over as long as requests stay is 2/3
    prefills in between       (E rho / (1 - rho))^2 / (arrivals in its life) of the square, Gamma distributed
    acceptance                (variance of a cycle's tokens over the square of their mean) / (cycles of its life)

and with the prompts behind its own, which go before its first decode step: a short answer has few tokens to share that wait.
Where the engine mixes prompts into the steps that decode, those behind fill as many of its steps as there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from specsim.names import PERCENTILES
from specsim.quantities import short, six
from specsim.steady import INSTANT, MOST_WORK, WAIT, Server

Array = NDArray[np.float64]
DRAWS = 4096
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)
ROUNDS = 4  # prefills in a row behind one's own that are followed
AVERAGED = 2 / 3  # of the variance of the number running: what is left of it in a mean over a life
TINY = 1e-12
LEAST = 0.2  # share of its mean below which nothing varies
ALL_OR_NONE = 0.05  # least sum of a Beta distribution's two shapes
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


def below(server: Server, rate: float, percent: float) -> tuple[float, float]:
    """(TTFT, TPOT), seconds that so many per cent of the requests stay below; infinite where the load is not served."""
    if not rate < float(server.capacity()):
        return np.inf, np.inf
    ttft, tpot = (float(np.percentile(x, percent)) for x in draw(server, rate))
    return ttft, tpot


def draw(server: Server, rate: float) -> tuple[Array, Array]:
    """(TTFT, TPOT), seconds of each of `DRAWS` requests; TPOT of those whose answer has a second token, 0 where none has."""
    from scipy.special import ndtri

    at = iter((np.sqrt(PRIMES)[:, None] * (np.arange(DRAWS) + 0.5)) % 1)
    state = server.state(np.asarray([rate]))
    weight, prefills = state.held.weight[0], state.prefills
    running = _pick(weight, next(at))
    prompts = _together if len(server.prefill) > 1 else _one_by_one
    ttft, behind = prompts(server, rate, running, at)
    full, waiting = max(float(weight[-1]), TINY), state.held.waiting[0] / rate
    turn = next(at)
    ttft = ttft - np.where(turn < full, np.log(np.minimum(turn / full, 1.0)) * waiting / full, 0.0)

    idle = (running == 0) & (next(at) > prefills.work[0, 0])
    ttft = ttft + server.lead_s * idle

    answer, mean = server.requests.output_tokens, float(server.at(rate).tpot_s[0])
    if not mean:
        return ttft, np.zeros_like(ttft)
    drawn = answer * _gamma(1.0, server.requests.output_cv2, next(at))
    after = np.maximum(np.rint(drawn) if server.requests.output_cv2 else drawn, 1.0) - 1  # tokens after the first
    several = after > 0
    if not several.any():
        return ttft, np.zeros_like(ttft)
    behind, after = np.where(several, behind, 0.0), np.where(several, after, 1.0)
    work = np.clip(prefills.work[0], 0.0, MOST_WORK)
    seen = weight * np.arange(len(weight))  # by requests that run
    pace = np.concatenate([[0.0], server.step]) / (1 - work)
    met = _pick(seen, next(at))
    slower = 1 + (pace[met] / np.average(pace, weights=seen) - 1) * AVERAGED**0.5
    share, growing = np.average(work, weights=seen), np.average(prefills.growing[0], weights=seen)
    least = LEAST * mean
    if server.mixing is not None:  # decoding goes on beside prompts: those behind fill as many steps as there are
        gained = float(np.average(np.broadcast_to(server.accept_length, server.step.shape), weights=seen[1:]))
        steps = np.append(0.0, server.step), server.widest, server.beside(np.asarray([rate]))[0]
        alone, full, mixed = (float(np.average(x, weights=seen)) for x in steps)
        behind = np.minimum(behind / full, after / gained) * (full - alone)
        least = alone / gained
    base = max(mean - behind.mean() / max(answer - 1, 1.0), least)
    between = (growing * share / (1 - share)) ** 2 * (1 + server.varies) / (rate * base * after)
    length = np.broadcast_to(server.accept_length, server.step.shape)[np.maximum(met, 1) - 1]
    cycles = 1 + ndtri(next(at)) * np.sqrt(server.scatter * length / after)
    cycles = np.maximum(cycles, LEAST)
    if server.mixing is None:
        return ttft, (base * slower * _gamma(1.0, between, next(at)) * cycles + behind / after)[several]
    idle_share = (full - mixed) / max(full - alone, TINY)
    runs = after / gained * idle_share**2 / server.chunks  # its steps over those of a busy period that is met
    paced = slower * _within(alone / gained / base, full / gained / base, between, runs, next(at))
    tpot = np.minimum(base * paced + behind / after, server.widest[met] / length) * cycles
    return ttft, tpot[several]


def _together(server: Server, rate: float, running: NDArray[np.int64], at: Iterator[Array]) -> tuple[Array, Array]:
    """(TTFT but for the wait for a place, seconds of the prefills behind one's own) where prompts share a prefill."""
    seen = server.seen
    step = np.concatenate([[INSTANT * server.step[0]], server.step])[seen]
    steps = server.steps_of(np.asarray([[rate]]), step, seen.astype(float))
    place = np.abs(seen - running[:, None]).argmin(axis=1)
    cv2, several = server.requests.input_cv2, steps.prompts.astype(float)
    totals = server.prefill * np.arange(1, len(server.prefill) + 1)
    slope = totals[1] - totals[0]

    def took(seconds: Array, prompts: Array, u: Array, more: int = 0) -> Array:
        """Seconds of a step whose prompts have as many tokens as they happen to; `more`: it is met, which long ones are more often."""
        varied = seconds + slope * prompts * (_gamma(np.maximum(prompts, 1.0), cv2, u, more) - 1) if cv2 else seconds
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
    own = took(alone[rows, beside], several[beside] + 1, next(at))
    behind, last, next_ = np.zeros(DRAWS), following, own
    for _ in range(
        ROUNDS
    ):  # those that came in the step before one's own, then in it, until a step in which nobody came
        came = rate * last
        some = next(at) > np.exp(-came)
        many = came / -np.expm1(-np.maximum(came, 1e-12))
        prefill = np.interp(many, np.arange(1, len(totals) + 1), totals) * np.maximum(many / len(totals), 1.0)
        last, next_ = next_, np.where(some, prefill, 0.0)
        behind = behind + next_
    return left * here + following + own, behind


def _one_by_one(server: Server, rate: float, running: NDArray[np.int64], at: Iterator[Array]) -> tuple[Array, Array]:
    """The same where each prompt takes a step or more of its own: an M/G/1 queue."""
    state = server.state(np.asarray([rate]))
    weight, p = state.held.weight[0], state.prefills
    step = np.concatenate([[INSTANT * server.step[0]], server.step])
    busy = min(float(weight @ p.busy[0]), MOST_WORK)
    own = (p.first[0] - WAIT * step * np.maximum(1 - p.busy[0], 0.0))[running] * _gamma(1.0, server.varies, next(at))
    before = float(weight @ p.each[0]) * (1 + server.varies) / (2 * (1 - busy))  # where there is any
    decides = (next(at) + WAIT - 0.5) * step[running]
    queue = -np.log(next(at)) * before
    wait = np.where(next(at) < busy, queue, decides) + np.where(next(at) < busy**2, float(weight @ p.full[0]) / 2, 0.0)
    ttft = wait + own
    came = rate * ttft
    behind = came * _gamma(1.0, 1 / np.maximum(came, 1e-9), next(at)) * server.prefill[0] / (1 - busy)
    return ttft, behind


def _pick(chance: Array, u: Array) -> NDArray[np.int64]:
    """Places drawn with (..., n) chances, which need not add up to 1, at points u in (0, 1)."""
    total = np.cumsum(chance, axis=-1)
    if total.ndim == 1:
        return np.asarray(np.minimum(np.searchsorted(total, u * total[-1]), len(total) - 1))
    return np.asarray(np.minimum((total < u[:, None] * total[:, -1:]).sum(axis=-1), total.shape[-1] - 1))


def _within(low: float, high: float, cv2: Array, runs: Array, u: Array) -> Array:
    """Values of mean 1 and variance cv2 at points u, Beta distributed from low to high: the share of a request's steps that prompts
    fill. They vary at most as so many independent runs of steps do, each of them full or not: one step is all or none."""
    from scipy.special import betaincinv

    if not low < 1 < high:
        return np.ones_like(u)
    share = (1 - low) / (high - low)
    most = share * (1 - share) * (high - low) ** 2
    alike = np.maximum(most / np.maximum(cv2, TINY) - 1, np.maximum(runs, ALL_OR_NONE))
    return np.asarray(low + (high - low) * betaincinv(share * alike, (1 - share) * alike, u))


def _gamma(of: Array | float, cv2: Array | float, u: Array, more: int = 0) -> Array:
    """Means of `of` Gamma distributed values of mean 1 and variance cv2; `more`: 1 where they are met in proportion to their size."""
    from scipy.special import gammaincinv

    if not np.any(cv2):
        return np.ones_like(u)
    shape = of / np.maximum(cv2, 1e-9)
    return np.asarray(gammaincinv(shape + more, u) / shape)
