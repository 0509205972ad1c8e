"""Prompts that ride in the steps that decode (vLLM): how much longer than mean steps those are which follow one's own prefill.

A step takes what is left of its budget from the prompts that wait, in their order, of those that came before the step before it began. So while
all fit, the prompts of every other step follow one another, and once they do not all wait in one row. Two steps at a time, the tokens that wait are a Markov chain,

    w' = (w - 2 C)+ + tokens of Poisson(rate D(w)) prompts

where C tokens of prompts fit a step and D(w) are the seconds of two steps that find w. (Where all fit and D grows with w in a straight line that is exact.) With c(w) prompts
that end in two steps, the T steps of an answer take longer than as many mean ones by

    R = sum over j of E[c(w_0) (D(w_j) - E[D])] / E[c]      j = 1 .. T / 2

seconds: for long answers what a bunch costs that stands still, and for short ones no more than that all their steps are full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
PARTS = 4  # that what fits two steps is counted in, at least,
FINE = 16  # and so many times as many where prompts are shorter
STATES = 96  # a matrix of more may wait for threads
SPLIT = 32  # prompts in two steps that are shared out one by one
FOLLOWED = 64  # pairs of steps that are followed; what decays beyond does so evenly
LEAST = 0.1  # share of its time alone that a prompt takes beside others
TAIL = 6  # standard deviations beyond which more prompts do not come
LEAK = 1e-15  # chance that is as good as none; smaller ones are slow to multiply
TINY = 1e-300


@dataclass(frozen=True)
class Mixing:
    """Prefill in the steps that decode: the target's pass that decoding would have run alone, less what its rows add to the pass
    over the prompts. base[n]: that pass of n sequences at no cached tokens, seconds; rows[n]: their rows; prompt: rows
    of one prompt in a step; seconds[i]: a prefill of tokens[i] rows."""

    base: Array
    rows: Array
    prompt: float
    tokens: Array
    seconds: Array

    def saved(self, running: Array, group: Array) -> Array:
        """Seconds that a step of `group` prompts saves by riding in one of `running` sequences."""
        n = np.arange(len(self.base))
        alone = group * self.prompt
        wide, narrow = (
            np.interp(x, self.tokens, self.seconds) for x in (alone + np.interp(running, n, self.rows), alone)
        )
        return np.asarray(np.interp(running, n, self.base) - (wide - narrow))

    def riding(self, running: float, step: float, budget: float, rate: float, prompt: float) -> Riding:
        """Prompts of so many tokens that ride beside `running` sequences, whose step takes so long alone."""
        n = np.arange(len(self.base))
        rows, base = (float(np.interp(running, n, x)) for x in (self.rows, self.base))
        tokens = np.concatenate([[0.0], self.tokens])
        alone = np.interp(tokens, self.tokens, self.seconds)
        added = np.maximum(np.interp(tokens + rows, self.tokens, self.seconds) - base, LEAST * alone)
        return Riding(rate, step, max(budget - rows, 1.0), prompt, tokens, added * (tokens > 0))


@dataclass(frozen=True)
class Riding:
    """Prompts of `prompt` tokens each come at a rate (requests a second) to steps of `step` seconds, in each of which `room` tokens of
    them fit; added[i]: seconds that tokens[i] add to a step, both from 0."""

    rate: float
    step: float
    room: float
    prompt: float
    tokens: Array
    added: Array

    def longer(self, steps: float) -> float:
        """R: seconds that the next `steps` steps take beyond as many mean ones, where a prompt ended."""
        unit, of_a_prompt = self._unit()
        w, fits = np.arange(STATES, dtype=float), 2 * self.room / unit
        took = 2 * self.step + self._pair(np.minimum(w, fits) * unit)
        move = _moves(np.maximum(w - fits, 0.0), self.rate * took, of_a_prompt)
        balance = (np.eye(STATES) - move).T
        balance[-1] = 1.0
        share = np.linalg.solve(balance, np.eye(STATES)[-1])
        share = np.where(share > LEAK, share, 0.0)
        met = share * _ended(w, np.minimum(w, fits), of_a_prompt)
        met /= max(met.sum(), TINY)
        mean = float(share @ took)
        # Whoever ends in the first of two full steps has the second one before it. A single step meets its own like where steps are full.
        full = float(met[w >= fits].sum())
        total = full / 2 * (self.step + self._added(self.room) - mean / 2)
        kept: list[float] = []
        pairs = (1 - full) * (steps // 2 + max(steps % 2 - 1, 0.0)) + full * (steps - 0.5) / 2
        while pairs > 0 and len(kept) < FOLLOWED:
            met = met @ move
            kept.append(float(met @ took) - mean)
            total += kept[-1] * min(pairs, 1.0)
            pairs -= 1
        if pairs > 0 and kept[FOLLOWED // 2] > kept[-1] > TINY:
            ratio = (kept[-1] / kept[FOLLOWED // 2]) ** (2 / FOLLOWED)
            total += kept[-1] * ratio * (1 - ratio**pairs) / (1 - ratio)
        return max(float(total), 0.0)

    def _unit(self) -> tuple[float, float]:
        """(tokens that are counted as one, how many of these a prompt has: a whole number, or one over a whole number)."""
        pair = 2 * self.room
        parts = float(np.ceil(PARTS * self.prompt / pair))
        if parts == 1:
            parts = 1 / max(1, int(pair / (FINE * PARTS * self.prompt)))
        return self.prompt / parts, parts

    def _added(self, tokens: Array | float) -> Array:
        return np.asarray(np.interp(tokens, self.tokens, self.added))

    def _pair(self, tokens: Array) -> Array:
        """Seconds that tokens add to two steps, in either of which prompts are that fit, each by chance."""
        if self.prompt >= self.room:
            first = np.minimum(tokens, self.room)
            return self._added(first) + self._added(tokens - first)
        n, j = np.arange(SPLIT + 1)[:, None], np.arange(SPLIT + 1)
        log = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1.0, SPLIT + 1)))])
        chance = np.where(j <= n, np.exp(log[n] - log[j] - log[np.maximum(n - j, 0)] - n * np.log(2)), 0.0)
        first = np.clip(j * self.prompt, n * self.prompt - self.room, self.room)
        second = np.clip(n * self.prompt - first, 0.0, self.room)
        one_by_one = (chance * (self._added(first) + self._added(second))).sum(axis=1)
        few = np.interp(tokens / self.prompt, np.arange(SPLIT + 1), one_by_one)
        return np.where(tokens <= SPLIT * self.prompt, few, 2 * self._added(tokens / 2))


def _moves(rest: Array, came: Array, of_a_prompt: float) -> Array:
    """(from, to) chances of numbers of waiting units, of which `rest` are left and to which Poisson numbers of prompts come."""
    most = int(np.ceil(came.max() + TAIL * np.sqrt(came.max()) + TAIL))
    k = np.arange(most + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    chance = np.exp(k * np.log(np.maximum(came, TINY))[:, None] - came[:, None] - log_factorial)
    chance /= chance.sum(axis=1, keepdims=True)
    to = np.minimum(rest[:, None] + k * of_a_prompt, STATES - 1.0)
    low = np.minimum(to.astype(np.int64), STATES - 2)
    row, across = np.arange(STATES)[:, None] * STATES, to - low
    flat = sum(
        np.bincount((row + low + i).ravel(), (chance * part).ravel(), STATES**2)
        for i, part in ((0, 1 - across), (1, across))
    )
    return np.where(np.asarray(flat) > LEAK, flat, 0.0).reshape(STATES, STATES)


def _ended(waiting: Array, taken: Array, of_a_prompt: float) -> Array:
    """Prompts that end where so many units of those that wait are taken, in their order."""
    if of_a_prompt <= 1:
        return taken / of_a_prompt

    def prompts(units: Array) -> Array:
        return np.ceil(units / of_a_prompt)

    whole = np.floor(taken)
    more = np.minimum(whole + 1, waiting)
    return np.asarray(
        prompts(waiting) - (whole + 1 - taken) * prompts(waiting - whole) - (taken - whole) * prompts(waiting - more)
    )
