"""Acceptance: hand values, properties, and three independent oracles (series, brute-force trees, simulation)."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from specsim.acceptance import (
    MEANINGS,
    RANK_SHARE,
    Acceptance,
    as_reported,
    chain_length,
    conditional_rates,
    convert,
    list_profiles,
    profile,
    rank_rates,
    rate_for_length,
    tree_length,
)
from specsim.errors import InputError

rates = st.floats(0, 1)
steps = st.integers(1, 12)


# Chains


def test_chain_by_hand():
    """0.6, 2 steps: 1 + 0.6 + 0.36 = 1.96. 0.53, 2 steps: 1 + 0.53 + 0.2809 = 1.8109, the field case's 1.8 tokens."""
    assert chain_length(0.6, 2) == pytest.approx(1.96, abs=1e-15)
    assert chain_length(0.53, 2) == pytest.approx(1.8109, abs=1e-15)
    assert chain_length(1, 7) == 8.0
    assert chain_length(0, 7) == 1.0
    assert chain_length(0.5, 0) == 1.0


def test_field_case_breaks_even_at_083():
    """Cycle 30.4 ms over decode 12.1 ms: L* = 2.512; a + a^2 = 1.512 at (-1 + sqrt(1 + 6.05)) / 2 = 0.8275."""
    wanted = 30.4 / 12.1
    assert rate_for_length(wanted, 2) == pytest.approx((-1 + math.sqrt(1 + 4 * (wanted - 1))) / 2, abs=1e-14)
    assert rate_for_length(wanted, 2) == pytest.approx(0.83, abs=0.005)


@given(rates, st.integers(0, 40))
def test_chain_is_its_series(alpha, s):
    assert chain_length(alpha, s) == pytest.approx(math.fsum(alpha**i for i in range(s + 1)), rel=1e-13)


@pytest.mark.parametrize("missing", [1e-3, 1e-6, 1e-9, 1e-12, 2**-53])
def test_chain_is_stable_near_one(missing):
    """1 - a = e: L = (s+1) - e s (s+1) / 2 + O(e^2); the textbook quotient loses its digits here."""
    alpha = 1 - missing
    assert chain_length(alpha, 5) == pytest.approx(math.fsum(alpha**i for i in range(6)), rel=4e-16)


def test_chain_broadcasts():
    alpha = np.linspace(0, 1, 5)[:, None]
    s = np.arange(4)
    got = chain_length(alpha, s)
    assert got.shape == (5, 4)
    assert_allclose(got, [[sum(a**i for i in range(k + 1)) for k in s] for a in alpha[:, 0]], rtol=1e-14)


# Properties of every acceptance


@given(st.lists(rates, min_size=1, max_size=6), steps, st.integers(1, 4), st.integers(2, 20))
def test_length_stays_within_what_can_be_accepted(given_rates, s, topk, d):
    length = Acceptance.per_position(given_rates).length(s, topk, d)
    assert 1.0 <= length <= min(s, d - 1) + 1 + 1e-12


@given(rates, rates, steps, st.integers(1, 4), st.integers(2, 20))
def test_length_rises_with_the_rate(a, b, s, topk, d):
    low, high = (Acceptance.constant(x).length(s, topk, d) for x in sorted((a, b)))
    assert low <= high + 1e-12


@given(st.lists(rates, min_size=1, max_size=6), steps, st.integers(1, 3), st.integers(2, 12))
def test_length_rises_with_steps_and_draft_tokens(given_rates, s, topk, d):
    acceptance = Acceptance.per_position(given_rates)
    assert acceptance.length(s, topk, d) <= acceptance.length(s + 1, topk, d) + 1e-12
    assert acceptance.length(s, topk, d) <= acceptance.length(s, topk, d + 1) + 1e-12


@given(st.lists(rates, min_size=1, max_size=6), steps)
def test_chain_by_position_is_its_series(given_rates, s):
    repeated = [given_rates[min(i, len(given_rates) - 1)] for i in range(s)]
    series = 1 + sum(math.prod(repeated[: i + 1]) for i in range(s))
    assert Acceptance.per_position(given_rates).length(s) == pytest.approx(series, rel=1e-12)


@given(st.lists(rates, min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 3), st.integers(2, 12))
def test_survival_adds_to_the_length(given_rates, s, topk, d):
    acceptance = Acceptance.per_position(given_rates)
    survival = acceptance.survival(s, topk, d)
    assert survival.shape == (s,)
    assert np.all(np.diff(survival) <= 1e-12)
    assert 1 + survival.sum() == pytest.approx(acceptance.length(s, topk, d), rel=1e-12)


def test_the_last_rate_repeats():
    """0.9, 0.5 over 3 steps: 1 + 0.9 + 0.45 + 0.225 = 2.575."""
    assert Acceptance.per_position([0.9, 0.5]).length(3) == pytest.approx(2.575)
    assert any("position 2" in note for note in Acceptance.per_position([0.9, 0.5]).warnings(3))
    assert Acceptance.constant(0.5).warnings(3) == []


def test_a_chain_is_cut_by_its_draft_tokens_and_not_stretched():
    """5 steps and d = 3: two positions, 1 + 0.5 + 0.25. More rows than drafted tokens gain nothing."""
    half = Acceptance.constant(0.5)
    assert half.length(5, draft_tokens=3) == 1.75
    assert half.length(2, draft_tokens=9) == 1.75


def test_arrays_of_rates_steps_and_tokens_broadcast():
    alpha = np.linspace(0.1, 0.9, 4)[:, None]
    s = np.array([1, 2, 5])
    for topk in (1, 3):
        got = Acceptance.constant(alpha).length(s, topk, s + 1)
        want = [[Acceptance.constant(float(a)).length(int(k), topk, int(k) + 1) for k in s] for a in alpha[:, 0]]
        assert_allclose(got, want, rtol=1e-13)
    mixed = Acceptance.per_position([0.9, alpha]).length(s)
    assert mixed.shape == (4, 3)
    assert_allclose(mixed[:, 0], 1.9)


# The reverse


@given(st.floats(1e-6, 1), st.integers(1, 40))
def test_chain_round_trip(alpha, s):
    assert rate_for_length(chain_length(alpha, s), s) == pytest.approx(alpha, rel=1e-9)


@given(st.floats(0.001, 1), st.integers(1, 6), st.integers(2, 4), st.integers(2, 16))
@example(0.2, 1, 2, 3)  # where ranks become alike the length bends
def test_tree_round_trip(alpha, s, topk, d):
    """The rate may differ where the tree hardly depends on it; its length may not."""
    length = Acceptance.constant(alpha).length(s, topk, d)
    found = rate_for_length(length, s, topk, d)
    assert Acceptance.constant(found).length(s, topk, d) == pytest.approx(length, abs=2e-6)


@given(st.floats(1, 9), steps)
def test_lengths_beyond_reach_are_nan(length, s):
    rate = rate_for_length(length, s)
    assert math.isnan(rate) == (length > s + 1)
    if length <= s + 1:
        assert chain_length(rate, s) == pytest.approx(length, rel=1e-12)


def test_reverse_at_the_edges():
    assert rate_for_length(1.0, 3) == 0.0
    assert rate_for_length(0.5, 3) == 0.0
    assert rate_for_length(4.0, 3) == 1.0
    assert math.isnan(rate_for_length(4.0001, 3))
    assert math.isnan(rate_for_length(float("nan"), 3))
    assert math.isnan(rate_for_length(3.5, 5, draft_tokens=3))
    assert rate_for_length(2.5, 5, topk=2, draft_tokens=2) != rate_for_length(2.5, 5, topk=2)
    assert math.isnan(rate_for_length(1.5, 0))
    assert rate_for_length(np.array([]), 3).shape == (0,)
    assert_allclose(rate_for_length([1.5, 1.75, 3.5], [1, 2, 2]), [0.5, 0.5, np.nan])


def test_a_million_are_inverted_in_half_a_second():
    lengths = np.random.default_rng(0).uniform(0.9, 6.5, 10**6)
    best = min(_seconds(lambda: rate_for_length(lengths, 5)) for _ in range(3))
    assert best < 1.5  # 0.2 s alone on a slow core; room for a busy machine


def test_a_long_chain_is_inverted_about_as_fast_as_a_short_one():
    """A step a binary digit: 9 for 512 terms, 2 for 5; a step a term would take a hundred times as many."""
    lengths = np.random.default_rng(0).uniform(1, 5, 10**5)
    short = min(_seconds(lambda: rate_for_length(lengths, 4)) for _ in range(3))
    long = min(_seconds(lambda: rate_for_length(lengths, 511)) for _ in range(3))
    assert long < 12 * short  # 2 to 3
    assert_allclose(chain_length(rate_for_length(lengths, 511), 511), lengths, rtol=1e-12)


def _seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# Trees


def _brute_force(levels, topk, d):
    """The best of all trees of d - 1 nodes below the root with at most `topk` children a node, by trying each."""
    nodes = {(): 1.0}
    for depth, ranks in enumerate(levels):
        for path in [path for path in nodes if len(path) == depth]:
            for rank in range(topk):
                nodes[(*path, rank)] = nodes[path] * ranks[rank]
    del nodes[()]
    best = 0.0
    for chosen in itertools.combinations(nodes, min(d - 1, len(nodes))):
        inside = set(chosen)
        if all(len(path) == 1 or path[:-1] in inside for path in chosen):
            best = max(best, sum(nodes[path] for path in chosen))
    return 1 + best


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 3), st.integers(2, 6))
def test_tree_is_the_best_of_all_trees(first, second, s, d):
    """Two children a node: with at most 5 nodes no level needs more than the 2 parents that are expanded."""
    ranks = [first, (1 - first) * second]
    assert tree_length(ranks, s, 2, d) == pytest.approx(_brute_force([ranks] * s, 2, d), rel=1e-12)


def test_tree_by_hand():
    """Ranks 0.6, 0.2, depth 2, 4 nodes: of 0.6, 0.36, 0.2, 0.12, 0.12 and 0.04 the best three are 0.6, 0.36 and 0.2."""
    assert tree_length([0.6, 0.2], 2, 2, 4) == pytest.approx(2.16)
    assert tree_length([0.6, 0.2], 2, 2, 3) == pytest.approx(1.96)  # the chain
    assert tree_length([0.6, 0.2], 2, 2, 99) == pytest.approx(1 + 0.8 + 0.8 * 0.8)  # every candidate


@given(rates, steps)
def test_one_child_a_node_is_the_chain(alpha, s):
    assert tree_length([alpha], s, 1, s + 1) == pytest.approx(chain_length(alpha, s), rel=1e-12)


@given(rates, st.integers(1, 7), st.integers(2, 5), st.integers(0, 20))
def test_a_tree_is_no_worse_than_the_chain_of_its_depth(alpha, s, topk, extra):
    assert Acceptance.constant(alpha).length(s, topk, s + 1 + extra) >= chain_length(alpha, s) - 1e-12


@given(rates, st.integers(1, 10))
def test_ranks_fall_and_exclude_each_other(alpha, topk):
    ranks = rank_rates(alpha, topk)
    assert ranks[0] == alpha
    assert np.all(np.diff(ranks) <= 0)
    assert ranks.sum() <= 1 + 1e-12


def test_rank_share_against_measured_trees():
    """One drafter, six shapes (SpecForge issue 339): one rate explains all lengths within 0.15 tokens."""
    measured = {(3, 1, 4): 1.86, (3, 3, 8): 2.2, (3, 3, 4): 1.99, (7, 4, 16): 2.52, (6, 4, 12): 2.42, (8, 8, 60): 3.2}
    alpha = np.linspace(0.3, 0.7, 401)
    worst = np.max([np.abs(Acceptance.constant(alpha).length(*at) - length) for at, length in measured.items()], axis=0)
    assert RANK_SHARE == 0.25
    assert worst.min() < 0.15


@pytest.mark.parametrize(("s", "topk", "d"), [(3, 1, 4), (3, 1, 3), (4, 3, 8), (2, 2, 20)])
def test_monte_carlo(s, topk, d):
    """Walk the tree child by child, as a verifier does, knowing only which nodes were drafted."""
    acceptance = Acceptance.per_position([0.7, 0.5])
    ranks = [rank_rates(rate, topk) for rate in (0.7, 0.5, 0.5, 0.5)[:s]]
    beam, candidates = [((), 1.0)], []
    for level in ranks:
        children = [((*path, r), p * level[r]) for path, p in beam for r in range(topk)]
        candidates += children
        beam = sorted(children, key=lambda node: -node[1])[:topk]
    drafted = {path for path, _ in sorted(candidates, key=lambda node: -node[1])[: d - 1]}
    random = np.random.default_rng(1)
    cycles, gained = 20_000, []
    for draws in random.random((cycles, s)):
        path = ()
        for level, draw in zip(ranks, draws, strict=True):
            child = int(np.searchsorted(np.cumsum(level), draw, side="right"))
            if (*path, child) not in drafted:
                break
            path = (*path, child)
        gained.append(len(path) + 1)
    error = 4 * np.std(gained) / math.sqrt(cycles)
    assert np.mean(gained) == pytest.approx(acceptance.length(s, topk, d), abs=error)
    sampled = acceptance.sample(np.random.default_rng(2), cycles, s, topk, d)
    assert sampled.mean() == pytest.approx(acceptance.length(s, topk, d), abs=error)
    assert sampled.min() >= 1
    assert sampled.max() <= s + 1
    assert_allclose(
        np.bincount(sampled, minlength=s + 2) / cycles, np.bincount(gained, minlength=s + 2) / cycles, atol=0.02
    )


# What engines print


def test_one_figure_in_each_meaning():
    """d = 4, L = 2.2: SGLang prints 1.2 / 3 = 0.40 now and 2.2 / 4 = 0.55 before; vLLM 40 %; 1.2 without the bonus."""
    figures = {
        "length": 2.2,
        "accepted": 1.2,
        "sglang-rate": 0.4,
        "sglang-rate-old": 0.55,
        "fraction": 0.4,
        "percent": 40.0,
    }
    for meaning, figure in figures.items():
        assert convert(figure, meaning, num_steps=3).length(3) == pytest.approx(2.2, rel=1e-12)
        assert as_reported(2.2, meaning, 3) == pytest.approx(figure)
    assert convert(0.4, "sglang-rate", draft_tokens=4).length(3) == pytest.approx(2.2)
    assert as_reported(1.96, "rate", 2) == pytest.approx(0.6)


@given(
    st.floats(1, 5), st.sampled_from(["length", "accepted", "sglang-rate", "sglang-rate-old", "fraction", "percent"])
)
def test_meanings_round_trip(length, meaning):
    acceptance = convert(as_reported(length, meaning, 4), meaning, num_steps=4)
    assert acceptance.length(4) == pytest.approx(length, rel=1e-9)
    assert meaning in acceptance.source


def test_unconditional_rates():
    """vLLM's 0.8, 0.6, 0.3 over all cycles are 0.8, 0.75, 0.5 given the ones before: L = 1 + 0.8 + 0.6 + 0.3."""
    acceptance = convert([0.8, 0.6, 0.3], "unconditional")
    assert acceptance.rates == pytest.approx((0.8, 0.75, 0.5))
    assert acceptance.length(3) == pytest.approx(2.7)
    assert_allclose(acceptance.survival(3), [0.8, 0.6, 0.3])
    assert conditional_rates([0.5, 0.0, 0.0]) == (0.5, 0.0, 0.0)
    assert convert([0.8, 0.6], "conditional").rates == (0.8, 0.6)
    with pytest.raises(InputError, match="rise"):
        convert([0.6, 0.8], "unconditional")


def test_a_rate_per_position_has_one_equal_rate():
    acceptance = Acceptance.per_position([0.9, 0.6, 0.4])
    assert chain_length(acceptance.rate(3), 3) == pytest.approx(acceptance.length(3))
    assert Acceptance.constant(0.7).rate(3) == 0.7


# Bad input


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Acceptance.constant(1.2), "--accept-rate"),
        (lambda: Acceptance.constant(-0.1), "--accept-rate"),
        (lambda: Acceptance.constant(float("nan")), "--accept-rate"),
        (lambda: Acceptance.constant("often"), "--accept-rate"),
        (lambda: Acceptance.constant(np.array([0.5, np.inf])), "--accept-rate"),
        (lambda: Acceptance.per_position([]), "--accept-per-position"),
        (lambda: Acceptance.per_position("0.5"), "--accept-per-position"),
        (lambda: Acceptance.per_position([0.5, 1.5]), "--accept-per-position"),
        (lambda: Acceptance(()), "--accept-per-position"),
        (lambda: Acceptance.from_length(0.9, 3), "--accept-length"),
        (lambda: Acceptance.from_length(4.1, 3), "--accept-length"),
        (lambda: Acceptance.from_length(float("nan"), 3), "--accept-length"),
        (lambda: Acceptance.from_length(3.5, 5, 1, 3), "--accept-length"),
        (lambda: Acceptance.constant(0.5).length(3, 1, 1), "--draft-tokens"),
        (lambda: Acceptance.constant(0.5).length(-1), "--num-steps"),
        (lambda: Acceptance.constant(0.5).length(1.5), "--num-steps"),
        (lambda: Acceptance.constant(0.5).length("3x"), "--num-steps"),
        (lambda: Acceptance.constant(0.5).length(3, 0), "--topk"),
        (lambda: tree_length([0.7, 0.6], 2, 2, 4), "rank rates"),
        (lambda: tree_length([0.7], 2, 2, 4), "rank rates"),
        (lambda: convert(0.5, "sglang-rate"), "--num-steps"),
        (lambda: convert(0.2, "sglang-rate-old", num_steps=3), "sglang-rate-old"),
        (lambda: convert(1850.0, "fraction", num_steps=3), "fraction"),
        (lambda: convert(130.0, "percent", num_steps=3), "percent"),
        (lambda: convert([], "unconditional"), "--accept-per-position"),
        (lambda: Acceptance.constant(np.full(2, 0.5)).sample(np.random.default_rng(0), 1, 3), "acceptance"),
        (lambda: as_reported(2.0, "unconditional", 3), "acceptance"),
    ],
)
def test_bad_input_names_its_option(make, option):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(option + ":")
    assert "\n" not in str(caught.value)


def test_percent_typed_as_a_rate_gets_its_mend():
    with pytest.raises(InputError, match=r"1\.5 is not in \[0, 1\]; give a fraction"):
        Acceptance.constant(1.5)
    with pytest.raises(InputError, match=r"for 60 % give 0\.6"):
        Acceptance.constant(60)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(InputError, match=r"did you mean 'kimi-k2\.5-eagle3/gsm8k'"):
        Acceptance.from_profile("kimi-k2.5-eagle3/gms8k")
    with pytest.raises(InputError, match="did you mean 'kimi-k2"):
        Acceptance.from_profile("kimi-k25-eagle3/gsm8k")
    with pytest.raises(InputError, match="did you mean 'sglang-rate'"):
        convert(0.5, "sglang_rate", num_steps=3)


# Profiles


def test_there_is_no_default():
    with pytest.raises(TypeError):
        Acceptance()


@pytest.mark.parametrize("name", list_profiles())
def test_every_profile_reproduces_its_figures(name):
    entry = profile(name)
    acceptance = Acceptance.from_profile(name)
    s, topk, d = entry.settings
    assert topk > 1 or d == s + 1
    assert entry.method in {"eagle3", "eagle", "mtp", "draft-model", "ngram"}
    assert len(entry.source) > 10
    if entry.measured == "length":
        assert acceptance.length(s, topk, d) == pytest.approx(entry.figures[0], abs=1e-6)
    elif entry.measured == "unconditional":
        assert_allclose(acceptance.survival(s), entry.figures)
    elif entry.measured == "conditional":
        assert acceptance.rates == entry.figures
    else:
        assert entry.measured == "lengths-by-steps"
        assert_allclose([acceptance.length(k) for k, _ in entry.figures], [length for _, length in entry.figures])
    assert name in acceptance.source
    assert acceptance.warnings(s, topk, d) == list(acceptance.caveats)
    assert entry.teacher_forced == any("teacher" in caveat for caveat in acceptance.caveats)


def test_a_profile_from_the_model_card():
    """Kimi-K2.5's EAGLE-3 on GSM8K: 3.201 tokens at 3 steps: 0.853 + 0.7276 + 0.6206 = 2.201."""
    acceptance = Acceptance.from_profile("kimi-k2.5-eagle3/gsm8k")
    assert acceptance.rates == pytest.approx((0.853,), abs=5e-4)
    assert acceptance.length(2) == pytest.approx(1 + acceptance.rates[0] + acceptance.rates[0] ** 2)
    assert any("position 3" in note for note in acceptance.warnings(6))
    assert any("tree" in note for note in acceptance.warnings(3, 4, 8))


def test_meanings_are_described():
    assert all(len(text) > 15 for text in MEANINGS.values())


@pytest.mark.parametrize(("topk", "draft_tokens"), [(2, 2), (2, 11), (8, 6)])
def test_a_tree_is_no_deeper_than_it_has_nodes(topk, draft_tokens):
    """A node at depth k has k ancestors, the root included, so d nodes reach d - 1 deep at most: 500 steps cost and give what d - 1 do."""
    rate = np.linspace(0.0, 1.0, 11)
    deep, enough = (Acceptance.constant(rate).length(s, topk, draft_tokens) for s in (500, draft_tokens - 1))
    assert_allclose(deep, enough, rtol=1e-12)
    survival = Acceptance.constant(0.6).survival(500, topk, draft_tokens)
    assert survival.shape == (500,)
    assert not survival[draft_tokens - 1 :].any()
    start = time.perf_counter()
    rate_for_length(1.5, 500, topk, draft_tokens)
    assert time.perf_counter() - start < 2
