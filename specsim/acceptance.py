"""Acceptance: how many tokens a cycle gains, from the probability that a drafted token is accepted, and back.

What to use when:

    an accept rate, or several by position  ->  Acceptance.constant, .per_position
    an accept length from a log             ->  Acceptance.from_length
    a figure as an engine prints it         ->  convert(value, meaning, ...)
    a published drafter on a known task     ->  Acceptance.from_profile("kimi-k2.5-eagle3/gsm8k")
    the acceptance that a length needs      ->  rate_for_length(length, num_steps)
    the acceptance that breaks even         ->  rate_for_length(C / D, num_steps)

There is no default acceptance anywhere. Words are those of docs/acceptance.md: `num_steps` s drafting steps, `topk` k
children a node, `draft_tokens` d rows that the target verifies, the root included; in a chain (k = 1) d = s + 1. Rates
are fractions, lengths are tokens a cycle with the bonus token included. Costs never enter here.

Depth is what can be verified: min(s, d - 1). Rows that no drafted node fills (d - 1 above s in a chain, above
k + (s - 1) k^2 in a tree) cost time and gain nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim.errors import InputError, as_fraction, did_you_mean

Array: TypeAlias = NDArray[np.float64]
Number: TypeAlias = float | Array

RANK_SHARE = 0.25
"""Share of what the earlier ranks left that the next rank takes in a tree:

    p_1 = alpha, p_r = min(p_(r-1), share x (1 - p_1 - ... - p_(r-1))).

An assumption, used only when topk > 1 and no rank rates are given. One drafter run with six tree shapes (Qwen3-30B-A3B
EAGLE-3, sgl-project/SpecForge issue 339) is best met by 0.19 (0.04 tokens rms); Llama-3.1-8B EAGLE-3 as chain
(vllm-project/vllm issue 20780) and as tree (sgl-project/sglang pull request 4247) by 0.3 at 5 steps and 0.45 at 8. At
0.25 the worst of the eight is 10 % short."""

_TABLE = 2**14 + 1  # nodes of the table that inverts tree lengths: error of a rate below 1e-7
_BENT = 1e-6  # second difference of lengths in the table beyond which a straight line errs by more than 1e-7 or so
_FINER = 64  # parts of a cell beside a bend


# Chains


def chain_length(alpha: ArrayLike, num_steps: ArrayLike) -> Number:
    """Accept length of a chain of `num_steps` tokens, each accepted with probability `alpha` given the ones before it.

    L = 1 + a + a^2 + ... + a^s = (1 - a^(s+1)) / (1 - a), and s + 1 at a = 1 (Leviathan et al., arXiv 2211.17192,
    equation 1). Arguments broadcast; tokens a cycle, in [1, s+1]. Raises InputError for rates outside [0, 1] and
    negative steps.
    """
    return _plain(_chain_length(_rates(alpha, "--accept-rate"), _counts(num_steps, "--num-steps", 0)))


def _chain_length(alpha: Array, steps: Array) -> Array:
    missing = 1.0 - alpha
    with np.errstate(divide="ignore", invalid="ignore"):  # alpha 0: log 0; alpha 1: 0 / 0, replaced
        length = -np.expm1((steps + 1.0) * np.log1p(-missing)) / missing
    return np.minimum(np.maximum(np.where(missing == 0.0, steps + 1.0, length), 1.0), steps + 1.0)


def rate_for_length(
    length: ArrayLike, num_steps: ArrayLike, topk: int = 1, draft_tokens: ArrayLike | None = None
) -> Number:
    """The lowest constant accept rate whose accept length is at least `length`: the reverse of `Acceptance.length`.

    nan where no rate reaches it (length > min(s, d - 1) + 1), 0 where `length` <= 1, nan where it is nan. Arguments
    broadcast. A chain is solved by Newton's method to rounding error, a tree by a table to 1e-7.

    Break-even: a cycle of C seconds and a decode step of D need rate_for_length(C / D, s); a speedup of x needs
    rate_for_length(x * C / D, s).
    """
    wanted, steps = np.asarray(length, float), _counts(num_steps, "--num-steps", 0)
    tokens = np.float64(np.nan) if draft_tokens is None else _counts(draft_tokens, "--draft-tokens", 2)
    if steps.ndim or tokens.ndim:
        wanted, steps, tokens = np.broadcast_arrays(wanted, steps, tokens)
    width = _topk(topk)
    rate = np.full(wanted.shape, np.nan)
    for s, d, here in _groups(steps, tokens):
        values = wanted[here]
        rate[here] = (
            _invert_chain(values, _depth(s, d))
            if width == 1
            else _invert_tree(values, _depth(s, d), width, _width(s, width, d))
        )
    return _plain(rate)


def _invert_chain(length: Array, steps: int) -> Array:
    """Newton from above. L(a) is convex and rises, so every step stays above the root. Two upper bounds to start from:
    L >= 1 + a, and by the mean inequality L >= (s + 1) a^(s/2)."""
    target = np.minimum(np.maximum(length, 1.0), steps + 1.0)
    a = np.minimum(np.minimum(target - 1.0, 1.0), (target / (steps + 1.0)) ** (2.0 / max(steps, 1)))
    for _ in range(100):
        value, slope = _sum_of_powers(a, steps + 1)
        change = (value - target) / np.maximum(slope, 1.0)
        a -= change
        if not np.count_nonzero(np.abs(change) >= 1e-9):  # what is left goes with its square
            break
    return np.where(length <= steps + 1.0, np.minimum(np.maximum(a, 0.0), 1.0), np.nan)


def _sum_of_powers(a: Array, terms: int) -> tuple[Array, Array]:
    """(S = 1 + a + ... + a^(terms - 1), its derivative), a step for each binary digit of `terms`: S(n + 1) = 1 + a S(n), and S(2n) =
    S(n) (1 + a^n), a^n being 1 - (1 - a) S(n). (The quotient of `chain_length` has a derivative that rounding spoils near 1.)"""
    missing, value, slope = 1.0 - a, np.ones_like(a), np.zeros_like(a)
    for digit in bin(terms)[3:]:
        power = 1.0 - missing * value
        slope *= 2.0 * power
        slope += value * value
        power += 1.0
        value *= power
        if digit == "1":
            slope *= a
            slope += value
            value *= a
            value += 1.0
    return value, slope


# Trees


def rank_rates(alpha: ArrayLike, topk: int, share: float = RANK_SHARE) -> Array:
    """Acceptance by rank of a node's children, shape (..., topk), from that of the first: see `RANK_SHARE` for the
    assumption.

    p_1 = alpha; each next rank takes `share` of what is left, and never more than the rank before it. At most one child
    of a node can be the token that the target takes, so the rates add to at most 1.
    """
    first = _rates(alpha, "--accept-rate")
    ranks = [first]
    left = 1.0 - first
    for _ in range(1, _topk(topk)):
        ranks.append(np.minimum(ranks[-1], share * left))
        left = left - ranks[-1]
    return np.stack(ranks, axis=-1)


def tree_length(rates: ArrayLike, depth: int, topk: int, draft_tokens: int) -> Number:
    """Accept length of the most probable draft tree of `draft_tokens` nodes, root included.

    `rates`, shape (..., >= topk): probability that a node's child of rank r is accepted given that the node was; the
    ranks exclude each other, so they add to at most 1. The tree is the one SGLang builds (EAGLE-2, arXiv 2406.16858,
    section 4): the `topk` most probable nodes of a level get `topk` children each, down to `depth`; of all these topk +
    (depth - 1) topk^2 candidates the d - 1 with the largest path probability are verified. A path's probability is the
    product of its rates, and L = 1 + their sum. With topk = 1 it is the chain.

    Real trees follow the drafter's confidence token by token and do better than this fixed one.
    """
    ranks = _rates(rates, "rank rates")
    width = _topk(topk)
    if ranks.ndim == 0 or ranks.shape[-1] < width:
        raise InputError(
            f"{np.size(ranks)} rank rates for a tree of {width} children a node",
            where="rank rates",
            mend="give one a rank",
        )
    ranks = ranks[..., :width]
    if (ranks.sum(axis=-1) > 1.0 + 1e-9).any():
        raise InputError(
            "add to more than 1, but only one child of a node can be accepted",
            where="rank rates",
            mend="give exclusive rates",
        )
    steps = int(_counts(depth, "--num-steps", 0))
    tokens = int(_counts(draft_tokens, "--draft-tokens", 2))
    return _plain(1.0 + _tree_survival([ranks] * steps, width, tokens).sum(axis=-1))


def _tree_survival(levels: Sequence[Array], topk: int, draft_tokens: int) -> Array:
    """P(at least j drafted tokens accepted), shape (..., len(levels)); `levels` holds the rank rates (..., topk) of
    each depth."""
    shape = np.broadcast_shapes(*(ranks.shape[:-1] for ranks in levels)) if levels else ()
    deeper = max(len(levels) - (draft_tokens - 1), 0)  # than a node is whose ancestors are all in the tree
    levels = levels[: len(levels) - deeper]
    beam = np.ones((*shape, 1))
    candidates = []
    for ranks in levels:
        paths = (beam[..., :, None] * ranks[..., None, :]).reshape(*shape, -1)
        candidates.append(paths)
        beam = -np.sort(-paths, axis=-1)[..., :topk]
    if not candidates:
        return np.zeros((*shape, 0))
    everything = np.concatenate(candidates, axis=-1)
    nodes = min(draft_tokens - 1, everything.shape[-1])
    # A child's path is never more probable than its parent's, and a stable sort puts the parent first: a tree.
    chosen = np.argsort(-everything, axis=-1, kind="stable")[..., :nodes]
    kept = np.zeros(everything.shape)
    np.put_along_axis(kept, chosen, np.take_along_axis(everything, chosen, axis=-1), axis=-1)
    ends = np.cumsum([paths.shape[-1] for paths in candidates])[:-1]
    found = np.stack([part.sum(axis=-1) for part in np.split(kept, ends, axis=-1)], axis=-1)
    return np.concatenate([found, np.zeros((*shape, deeper))], axis=-1) if deeper else found


def _invert_tree(length: Array, steps: int, topk: int, draft_tokens: int) -> Array:
    rate = np.where(length <= 1.0, 0.0, np.nan)
    alphas, lengths = _tree_table(steps, topk, draft_tokens)
    inside = (length > 1.0) & (length <= lengths[-1])
    rate[inside] = np.interp(length[inside], lengths, alphas)
    return rate


@functools.lru_cache(maxsize=32)
def _tree_table(steps: int, topk: int, draft_tokens: int) -> tuple[Array, Array]:
    alphas = np.linspace(0.0, 1.0, _TABLE)
    lengths = _tree_lengths(alphas, steps, topk, draft_tokens)
    # The length bends where ranks become alike or a tree takes other nodes: cells beside a bend are cut finer.
    bent = np.abs(np.diff(lengths, 2)) > _BENT
    cells = np.flatnonzero(np.append(bent, False) | np.append(False, bent))
    finer = (alphas[cells][:, None] + np.arange(1, _FINER) / _FINER * (alphas[1] - alphas[0])).reshape(-1)
    alphas = np.concatenate([alphas, finer])
    lengths = np.concatenate([lengths, _tree_lengths(finer, steps, topk, draft_tokens)])
    order = np.argsort(alphas)
    return alphas[order], np.maximum.accumulate(lengths[order])


def _tree_lengths(alphas: Array, steps: int, topk: int, draft_tokens: int) -> Array:
    lengths = np.ones(alphas.shape)
    candidates = topk + (steps - 1) * topk * topk
    parts = min(max(len(alphas), 1), 16 + len(alphas) * candidates // 2**22)  # keeps wide trees in memory
    for part in np.array_split(np.arange(len(alphas)), parts):
        if len(part):
            lengths[part] += _tree_survival([rank_rates(alphas[part], topk)] * steps, topk, draft_tokens).sum(axis=-1)
    return lengths


# The class


@dataclass(frozen=True)
class Acceptance:
    """Conditional accept rates by position, each a number or an array; positions beyond the last given repeat it.

    `rates[i]`: probability that drafted token i + 1 is accepted given that those before it were. Arrays broadcast
    against each other and against the settings. `source` says where they come from, `caveats` what to know before using
    them elsewhere, and `measured_at` the (num_steps, topk, draft_tokens) of the run behind them, if known.
    """

    rates: tuple[Number, ...]
    source: str = "given"
    caveats: tuple[str, ...] = ()
    measured_at: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rates, (int, float, str)) or len(self.rates) == 0:
            raise InputError("no rates", where="--accept-per-position", mend="give at least one, e.g. 0.7,0.6,0.5")
        option = "--accept-rate" if len(self.rates) == 1 else "--accept-per-position"
        object.__setattr__(self, "rates", tuple(_plain(_rates(rate, option)) for rate in self.rates))

    @classmethod
    def constant(cls, alpha: ArrayLike) -> Acceptance:
        """The same rate at every position. Raises InputError outside [0, 1]."""
        return cls((_plain(_rates(alpha, "--accept-rate")),), "given accept rate")

    @classmethod
    def per_position(cls, rates: Sequence[ArrayLike]) -> Acceptance:
        """Conditional rates of positions 1, 2, ...; the last repeats. For an engine's unconditional rates see
        `convert`."""
        if isinstance(rates, (str, bytes)) or not isinstance(rates, (Sequence, np.ndarray)) or len(rates) == 0:
            raise InputError("no rates", where="--accept-per-position", mend="give at least one, e.g. 0.7,0.6,0.5")
        return cls(
            tuple(_plain(_rates(rate, "--accept-per-position")) for rate in rates), "given accept rates by position"
        )

    @classmethod
    def from_length(
        cls, length: ArrayLike, num_steps: int, topk: int = 1, draft_tokens: int | None = None
    ) -> Acceptance:
        """The constant rate that gives `length` (bonus token included) at these settings. Raises InputError outside [1,
        s+1]."""
        steps, width, tokens = settings(num_steps, topk, draft_tokens)
        try:
            wanted = np.asarray(length, float)
        except (TypeError, ValueError):
            raise InputError(f"{length!r} is not a number", where="--accept-length", mend="such as 2.4") from None
        most = _depth(steps, tokens) + 1
        if not np.all((wanted >= 1.0) & (wanted <= most)):
            raise InputError(
                f"{_first(wanted[~((wanted >= 1.0) & (wanted <= most))])} is not in [1, {most}]",
                where="--accept-length",
                mend=f"{tokens} draft tokens gain 1 to {most} tokens a cycle, the bonus token included",
            )
        return cls((rate_for_length(wanted, steps, width, tokens),), "given accept length", (), (steps, width, tokens))

    @classmethod
    def from_profile(cls, name: str) -> Acceptance:
        """A published drafter on one domain, e.g. "kimi-k2.5-eagle3/gsm8k". Raises InputError for unknown names."""
        return profile(name).acceptance()

    def length(self, num_steps: ArrayLike, topk: int = 1, draft_tokens: ArrayLike | None = None) -> Number:
        """Accept length L: tokens a sequence gains in one cycle, bonus token included, in [1, min(s, d-1) + 1].

        A chain: 1 + a_1 + a_1 a_2 + ... over min(s, d - 1) positions. A tree (topk > 1): `tree_length` with
        `rank_rates` of each position's rate. `num_steps` and `draft_tokens` broadcast with the rates.
        """
        steps = _counts(num_steps, "--num-steps", 0)
        tokens = None if draft_tokens is None else _counts(draft_tokens, "--draft-tokens", 2)
        width = _topk(topk)
        if width == 1:
            return _plain(self._chain(steps if tokens is None else np.minimum(steps, tokens - 1.0)))
        steps, wide = np.broadcast_arrays(steps, np.nan if tokens is None else tokens)
        shape = np.broadcast_shapes(steps.shape, *(np.shape(rate) for rate in self.rates))
        steps, wide = np.broadcast_to(steps, shape), np.broadcast_to(wide, shape)
        rates = [np.broadcast_to(rate, shape) for rate in self.rates]
        length = np.empty(shape)
        for s, d, here in _groups(steps, wide):
            levels = [rank_rates(rates[min(i, len(rates) - 1)][here], width) for i in range(s)]
            length[here] = 1.0 + _tree_survival(levels, width, _width(s, width, d)).sum(axis=-1)
        return _plain(length)

    def _chain(self, depth: Array) -> Array:
        reached, length = np.ones(())[()], np.ones(())[()]
        for position, rate in enumerate(self.rates[:-1]):
            reached = reached * rate
            length = length + np.where(position < depth, reached, 0.0)
        beyond = np.maximum(depth - (len(self.rates) - 1), 0.0)
        length = length + reached * (_chain_length(np.asarray(self.rates[-1])[()], beyond) - 1.0)
        return np.minimum(np.maximum(length, 1.0), depth + 1.0)

    def rate(self, num_steps: ArrayLike, topk: int = 1, draft_tokens: ArrayLike | None = None) -> Number:
        """The constant rate with the same accept length at these settings: the one number to print."""
        if len(self.rates) == 1:
            return self.rates[0]
        return rate_for_length(self.length(num_steps, topk, draft_tokens), num_steps, topk, draft_tokens)

    def survival(self, num_steps: int, topk: int = 1, draft_tokens: int | None = None) -> Array:
        """P(at least j drafted tokens are accepted) for j = 1..s, shape (..., s): what vLLM calls the per-position
        rate."""
        steps, width, tokens = settings(num_steps, topk, draft_tokens)
        rates = np.broadcast_arrays(*(np.asarray(self.rates[min(i, len(self.rates) - 1)], float) for i in range(steps)))
        return _tree_survival([rank_rates(rate, width) for rate in rates], width, tokens)

    def sample(
        self, generator: np.random.Generator, size: int, num_steps: int, topk: int = 1, draft_tokens: int | None = None
    ) -> NDArray[np.int64]:
        """Tokens gained in `size` independent cycles, shape (size,), each in 1..s+1, with mean `length`. Rates must be
        numbers."""
        survival = self.survival(num_steps, topk, draft_tokens)
        if survival.ndim != 1:
            raise InputError(
                "arrays of rates cannot be sampled", where="acceptance", mend="sample one acceptance at a time"
            )
        draws = generator.random(size)
        gained: NDArray[np.int64] = 1 + (draws[:, None] < survival[None, :]).sum(axis=1)
        return gained

    def warnings(self, num_steps: int, topk: int = 1, draft_tokens: int | None = None) -> list[str]:
        """What to know when these rates are used at these settings: caveats, positions never measured, a tree from a
        chain's rate."""
        steps, width, tokens = settings(num_steps, topk, draft_tokens)
        notes = list(self.caveats)
        positions = len(self.rates) if self.measured_at is None else max(self.measured_at[0], len(self.rates))
        if (len(self.rates) > 1 or self.measured_at is not None) and steps > positions:
            notes.append(
                f"acceptance beyond position {positions} was not given; the last rate is repeated up to {steps}"
            )
        if width > 1 and (self.measured_at is None or self.measured_at != (steps, width, tokens)):
            notes.append(
                f"acceptance of a tree (topk {width}) is estimated from the first rank's rate: "
                f"each next rank is assumed to take {RANK_SHARE:.0%} of the rest"
            )
        return notes


def settings(num_steps: int, topk: int = 1, draft_tokens: int | None = None) -> tuple[int, int, int]:
    """(num_steps, topk, draft_tokens), checked. Left out, draft_tokens is every candidate: s + 1 in a chain, all of the
    tree's."""
    steps = int(_counts(num_steps, "--num-steps", 1))
    width = _topk(topk)
    tokens = _width(steps, width, np.nan if draft_tokens is None else int(_counts(draft_tokens, "--draft-tokens", 2)))
    return steps, width, tokens


# What engines print

MEANINGS: Mapping[str, str] = {
    "rate": "probability that a drafted token is accepted given that those before it were (specsim's accept rate)",
    "length": "tokens a cycle, bonus token included (SGLang accept len; vLLM mean acceptance length from May 2025)",
    "accepted": "drafted tokens accepted a cycle, bonus token left out (vLLM V1 before May 2025)",
    "sglang-rate": "(L - 1) / (d - 1): SGLang's accept rate since April 2026",
    "sglang-rate-old": "L / d: SGLang's accept rate before April 2026",
    "fraction": "accepted / drafted tokens (llama.cpp draft acceptance; vLLM's counters)",
    "percent": "100 x accepted / drafted tokens (vLLM draft acceptance rate)",
    "conditional": "rates by position, each given that the positions before it were accepted",
    "unconditional": "rates by position, over all cycles (vLLM per-position acceptance rate)",
}


def convert(
    value: ArrayLike, meaning: str, num_steps: int | None = None, topk: int = 1, draft_tokens: int | None = None
) -> Acceptance:
    """Acceptance from a figure as an engine prints it; `meaning` is one of MEANINGS. vLLM's num_speculative_tokens is
    num_steps.

    All but "rate", "conditional" and "unconditional" need `num_steps` (or, for a chain, `draft_tokens`). "fraction" and
    "percent" assume full drafts, d - 1 tokens each cycle. Raises InputError for impossible figures.
    """
    if meaning not in MEANINGS:
        raise InputError(f"no meaning {meaning!r}", where="acceptance", mend=did_you_mean(meaning, list(MEANINGS)))
    source = f"given {meaning}: {MEANINGS[meaning]}"
    if meaning == "rate":
        return Acceptance((_plain(_rates(value, "--accept-rate")),), source)
    if meaning == "conditional":
        return Acceptance(Acceptance.per_position(cast(Sequence[ArrayLike], value)).rates, source)
    if meaning == "unconditional":
        return Acceptance(conditional_rates(value), source)
    if num_steps is None:
        if draft_tokens is None or topk != 1:
            raise InputError(
                f"a {meaning} needs the number of drafted tokens",
                where="--num-steps",
                mend="give --num-steps or --draft-tokens",
            )
        num_steps = int(_counts(draft_tokens, "--draft-tokens", 2)) - 1
    steps, width, tokens = settings(num_steps, topk, draft_tokens)
    figure = np.asarray(value, float)
    if meaning in ("sglang-rate", "sglang-rate-old", "fraction"):
        figure = _rates(figure, meaning)
    elif meaning == "percent":
        figure = _rates(figure / 100.0, "percent")
    length = {
        "length": figure,
        "accepted": figure + 1.0,
        "sglang-rate": 1.0 + figure * (tokens - 1),
        "sglang-rate-old": figure * tokens,
        "fraction": 1.0 + figure * (tokens - 1),
        "percent": 1.0 + figure * (tokens - 1),
    }[meaning]
    slack = 0.005 if meaning == "length" else 0.005 * tokens  # figures are printed with two decimals
    most = _depth(steps, tokens) + 1.0
    if np.any((length < 1.0 - slack) | (length > most + slack) | np.isnan(length)):
        raise InputError(
            f"{_first(figure)} would be an accept length of {_first(length):.4g}, outside [1, {most:g}]",
            where=meaning,
            mend=f"check the settings and what the figure means ({MEANINGS[meaning]})",
        )
    found = Acceptance.from_length(np.clip(length, 1.0, most), steps, width, tokens)
    return Acceptance(found.rates, source, (), found.measured_at)


def as_reported(
    length: ArrayLike, meaning: str, num_steps: int, topk: int = 1, draft_tokens: int | None = None
) -> Number:
    """The figure that an engine would print for an accept length: `convert` reversed, for MEANINGS of one number."""
    steps, width, tokens = settings(num_steps, topk, draft_tokens)
    size = np.asarray(length, float)
    if meaning == "rate":
        return rate_for_length(size, steps, width, tokens)
    figures = {
        "length": size,
        "accepted": size - 1.0,
        "sglang-rate": (size - 1.0) / (tokens - 1),
        "sglang-rate-old": size / tokens,
        "fraction": (size - 1.0) / (tokens - 1),
        "percent": 100.0 * (size - 1.0) / (tokens - 1),
    }
    if meaning not in figures:
        raise InputError(
            f"no single figure {meaning!r}", where="acceptance", mend=did_you_mean(meaning, ["rate", *figures])
        )
    return _plain(figures[meaning])


def conditional_rates(unconditional: ArrayLike) -> tuple[float, ...]:
    """Rates given that the earlier positions were accepted, from rates over all cycles: a_i = u_i / u_(i-1), and a_1 =
    u_1.

    Positions after one of rate 0 get 0. Raises InputError when the rates rise, which no verifier can produce.
    """
    rates = _rates(unconditional, "--accept-per-position")
    if rates.ndim != 1 or rates.size == 0:
        raise InputError("no rates", where="--accept-per-position", mend="give one a position")
    before = np.concatenate([[1.0], rates[:-1]])
    if (rates > before).any():
        raise InputError(
            "unconditional rates by position rise, which cannot be",
            where="--accept-per-position",
            mend="if they are conditional already, give them as such",
        )
    return tuple(float(rate) for rate in np.divide(rates, before, out=np.zeros_like(rates), where=before > 0))


# Profiles


@dataclass(frozen=True)
class AcceptanceProfile:
    """One drafter on one domain, as published. `figures` are what was measured, `measured` says how to read them:

    length: accept length at `settings`; lengths-by-steps: (num_steps, length) pairs; unconditional, conditional: rates
    by position. `teacher_forced`: measured on fixed text while training, not while serving; such rates run high.
    """

    name: str
    target: str
    drafter: str
    method: str
    measured: str
    figures: tuple[float, ...] | tuple[tuple[int, float], ...]
    settings: tuple[int, int, int]
    source: str
    date: str
    teacher_forced: bool = False
    note: str = ""

    def acceptance(self) -> Acceptance:
        """The rates that reproduce the figures at the profile's settings."""
        caveats = [
            f"acceptance was published for {self.drafter} with {self.target}; other weights, prompts or sampling differ"
        ]
        if self.teacher_forced:
            caveats.append("acceptance was measured by teacher forcing, not while serving: expect less")
        if self.note:
            caveats.append(self.note)
        return Acceptance(self._rates(), f"profile {self.name} ({self.source})", tuple(caveats), self.settings)

    def _rates(self) -> tuple[Number, ...]:
        steps, width, tokens = self.settings
        if self.measured == "length":
            return Acceptance.from_length(cast(float, self.figures[0]), steps, width, tokens).rates
        if self.measured == "unconditional":
            return conditional_rates(cast(ArrayLike, self.figures))
        if self.measured == "conditional":
            return cast(tuple[Number, ...], self.figures)
        # Lengths by steps: a step adds the share of cycles that reached it; steps added together share one rate.
        rates: list[float] = []
        reached, steps, length = 1.0, 0, 1.0
        for more_steps, longer in cast(tuple[tuple[int, float], ...], self.figures):
            added = more_steps - steps
            gain = min(max(longer - length, 0.0) / reached, float(added)) if reached > 0.0 else 0.0
            rate = cast(float, rate_for_length(1.0 + gain, added))
            rates += [rate] * added
            reached, steps, length = reached * rate**added, more_steps, longer
        return tuple(rates)


def list_profiles() -> tuple[str, ...]:
    """Names of all shipped profiles, "drafter/domain", sorted."""
    return tuple(sorted(_profiles()))


def profile(name: str) -> AcceptanceProfile:
    """The profile of that name. Raises InputError, with the nearest name, when there is none."""
    try:
        return _profiles()[name]
    except KeyError:
        known = [*list_profiles()]
        inside = [other for other in known if other.split("/")[0] == name.split("/")[0]]
        raise InputError(
            f"no acceptance profile {name!r}", where="--accept-profile", mend=did_you_mean(name, inside or known)
        ) from None


@functools.cache
def _profiles() -> dict[str, AcceptanceProfile]:
    from specsim.files import read_yaml

    found = {}
    for family, entry in read_yaml(Path(__file__).parent / "data" / "acceptance.yaml")["profiles"].items():
        for domain, figures in entry["domains"].items():
            if isinstance(figures, dict):
                values: Any = tuple((int(steps), float(length)) for steps, length in figures.items())
            else:
                values = tuple(float(figure) for figure in np.atleast_1d(figures))
            at = entry["settings"]
            found[f"{family}/{domain}"] = AcceptanceProfile(
                name=f"{family}/{domain}",
                target=entry["target"],
                drafter=entry["drafter"],
                method=entry["method"],
                measured=entry["measured"],
                figures=values,
                settings=(at["num_steps"], at["topk"], at["draft_tokens"]),
                source=entry["source"],
                date=str(entry["date"]),
                teacher_forced=entry.get("teacher_forced", False),
                note=entry.get("note", ""),
            )
    return found


# Checks


def _rates(value: ArrayLike, option: str) -> Array:
    """`value` as an array of rates. Raises InputError, naming `option`, outside [0, 1] or for nan."""
    try:
        rates: Array = np.asarray(value, float)[()]
    except (TypeError, ValueError):
        raise InputError(f"{value!r} is not a number", where=option, mend="give fractions between 0 and 1") from None
    inside = (rates >= 0.0) & (rates <= 1.0)  # false for nan
    if not inside.all():
        wrong = _first(rates[~inside])
        raise InputError(f"{wrong:.9g} is not in [0, 1]", where=option, mend=as_fraction(wrong))
    return rates


def _counts(value: ArrayLike, option: str, least: int) -> Array:
    """`value` as an array of whole numbers of at least `least`."""
    if type(value) is int and least <= value < 2**20:
        return np.float64(value)  # a number costs a tenth of an array without axes
    try:
        counts: Array = np.asarray(value, float)[()]
    except (TypeError, ValueError):
        raise InputError(f"{value!r} is not a number", where=option, mend="give a whole number") from None
    right = (counts >= least) & (counts < 2**20) & (counts == np.floor(counts))
    if not right.all():
        raise InputError(
            f"{_first(counts[~right]):g} is not a whole number of at least {least}", where=option, mend="correct it"
        )
    return counts


def _topk(topk: int) -> int:
    return int(_counts(topk, "--topk", 1))


def _depth(steps: int, tokens: float) -> int:
    """Positions that can be accepted; `tokens` nan when not limited."""
    return steps if np.isnan(tokens) else min(steps, int(tokens) - 1)


def _width(steps: int, topk: int, tokens: float) -> int:
    """Draft tokens; where nan, all candidates and the root."""
    if not np.isnan(tokens):
        return int(tokens)
    return 1 + (topk + (steps - 1) * topk * topk if steps else 0)


def _groups(steps: Array, tokens: Array) -> Iterator[tuple[int, float, Any]]:
    """The different (num_steps, draft_tokens) in two arrays of one shape, each with an index to where they are."""
    if steps.size == 0:
        return
    if not any(steps.strides) and not any(tokens.strides):  # one pair, broadcast: no need to sort a million
        yield int(steps.flat[0]), float(tokens.flat[0]), ...
        return
    bounded = np.nan_to_num(tokens, nan=0.0)  # draft_tokens is at least 2
    keys, at = np.unique(steps * 2.0**20 + bounded, return_inverse=True)
    at = at.reshape(steps.shape)
    for i, key in enumerate(keys):
        s, d = divmod(int(key), 2**20)
        yield s, float(d) if d else np.nan, at == i


def _plain(value: ArrayLike) -> Number:
    """A float for one number, else the array."""
    array = np.asarray(value, float)
    return float(array) if array.ndim == 0 else array


def _first(value: ArrayLike) -> float:
    return float(np.asarray(value).flat[0])
