"""Servers that have two states at one load, where a step of one more is slower: theory, the simulator, and what a plan does about it."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.errors import InputError
from specsim.launch import read_launch
from specsim.planned import plan as specsim_plan
from specsim.plans import plan
from specsim.prediction import machine_of
from specsim.scenarios import Scenario, build
from specsim.simulated import simulate as specsim_simulate
from specsim.simulation import simulate
from specsim.simulation_costs import limited
from specsim.simulation_costs import server_of as simulated_server
from specsim.steady import Requests, Server
from specsim.steady_servers import server_of
from specsim.targets import Targets
from specsim.two_states import TwoStates, two_states
from specsim.workload import Lengths, synthetic
from specsim.workload import Requests as Sent


@functools.cache
def qwen() -> Scenario:
    """Its decode graphs end at 256 sequences; an eager step of 257 takes more than twice as long."""
    return build(model="Qwen3-30B-A3B", hardware="1x-h200", method="none")


@functools.cache
def server(given_: int = 1000, made: int = 100) -> Server:
    return server_of(qwen(), machine_of(qwen()), Requests(given_, made))


def jump(crest: int, factor: float, places: int) -> Server:
    """Without prefill: 10 ms and 0.01 ms a sequence, `factor` times as much beyond `crest`; 101 tokens."""
    n = np.arange(1, places + 1)
    step = (0.010 + 1e-5 * n) * np.where(n > crest, factor, 1.0)
    return Server(Requests(1, 101), step, np.zeros(1), 1.0, 1, graphs=(crest,))


def passage(up: np.ndarray, down: np.ndarray, start: int, end: int) -> float:
    """Mean time from `start` to `end` of a walk on 0, 1, ... that goes up and down at these rates: the h of each place that solves
    rate x h = 1 + sum of rates x h of its neighbours, h = 0 at the end."""
    n = len(up)
    a, one = np.zeros((n, n)), np.ones(n)
    for i in range(n):
        a[i, i] = up[i] + down[i]
        if i + 1 < n:
            a[i, i + 1] = -up[i]
        if i:
            a[i, i - 1] = -down[i]
    a[end], one[end] = 0.0, 0.0
    a[end, end] = 1.0
    return float(np.linalg.solve(a, one)[start])


def test_how_long_a_state_lasts_is_the_passage_of_a_birth_and_death_process():
    """Requests come at r and leave n at a time at n / (T S(n)): from hump to hump that takes what its linear equations give."""
    s = jump(crest=60, factor=2.5, places=200)
    rate = 45.0
    found = two_states(s, rate)
    steps = float(np.ravel(s._steps(None))[0])
    n = np.arange(0, 201)
    down = np.concatenate([[0.0], n[1:] / (steps * s.step)])
    up = np.where(n < 200, rate, 0.0)
    weight = s.state(np.asarray([rate])).held.weight[0]
    low, high = int(weight[:61].argmax()), 61 + int(weight[61:].argmax())
    assert found.crest == 60
    assert low < 60 < high
    assert found.fast.lasts_s == pytest.approx(passage(up, down, low, high), rel=0.05)
    assert found.slow.lasts_s == pytest.approx(passage(up, down, high, low), rel=0.05)


@given(st.integers(20, 80), st.floats(1.5, 4), st.floats(0.1, 0.95))
@settings(max_examples=100, deadline=None)
def test_the_states_are_parts_of_one(crest, factor, share):
    """Shares add up to 1, as do their means to those of the whole; the slow one has more running; the cap leaves the fast one."""
    s = jump(crest, factor, 4 * crest)
    rate = share * float(s.capacity())
    found = two_states(s, rate)
    if found is None:
        return
    fast, slow, whole = found.fast, found.slow, s.at(rate)
    assert fast.share + slow.share == pytest.approx(1)
    for name in ("running", "tpot_s"):
        parts = sum(state.share * getattr(state.point, name)[0] for state in (fast, slow))
        assert parts == pytest.approx(getattr(whole, name)[0], rel=1e-6)
    assert fast.point.running[0] <= crest < slow.point.running[0] * 1.05
    assert fast.point.tpot_s[0] < slow.point.tpot_s[0]
    capped = s.capped(crest).at(rate).tpot_s[0]
    assert capped < slow.point.tpot_s[0]
    if (
        s.state(np.asarray([rate])).held.weight[0, crest] < 1e-3 * fast.share
    ):  # else requests wait for the cap's last place
        assert capped == pytest.approx(fast.point.tpot_s[0], rel=0.01)


def test_there_is_a_load_with_two_states_only_where_a_step_jumps():
    def states(s: Server) -> list[TwoStates]:
        found = (two_states(s, share * float(s.capacity())) for share in np.linspace(0.05, 0.95, 19))
        return [one for one in found if one is not None]

    assert states(jump(60, 2.5, 200))
    assert not states(jump(60, 1.0, 200))
    assert not states(replace(jump(60, 2.5, 200), graphs=()))
    assert not states(jump(60, 2.5, 200).capped(60))


def test_a_capped_server_is_that_of_a_capped_scenario():
    most = server().crest
    asked = server_of(limited(qwen(), most), machine_of(qwen()), Requests(1000, 100))
    assert most == 256
    assert server().capped(most).capacity() == pytest.approx(asked.capacity())
    assert server().capped(most).at(20.0).tpot_s == pytest.approx(asked.at(20.0).tpot_s)


def test_the_simulator_sees_either_state():
    """At 0.76 of capacity: one server starts empty, one with 350 requests at once, of which more run than graphs hold."""
    rate = 0.76 * float(server().capacity())
    simulated = simulated_server(qwen(), machine_of(qwen()))
    for name, crowd, before in (("fast", 0, 400), ("slow", 350, 800)):
        sent = list(synthetic(before + 700, Lengths(1000), Lengths(100), rate, seed=1))
        at_once = Sent(np.zeros(crowd, dtype=np.int64), np.full(crowd, 1000), np.full(crowd, 100))
        rows = simulate(simulated, [at_once, *sent] if crowd else sent, compiled=False).metrics.rows
        rows = rows[rows[:, 0].argsort()][crowd + before : crowd + before + 500].astype(float)
        drawn = 499 / (rows[-1, 1] - rows[0, 1]) * 1e12
        state = getattr(two_states(server(), drawn), name)
        assert ((rows[:, 4] - rows[:, 3]) / 99e12).mean() == pytest.approx(state.point.tpot_s[0], rel=0.05)


def test_a_plan_caps_what_runs_and_agrees_with_its_simulation():
    """At 0.93 of capacity the steady state is the eager one, of 74 ms; a cap at the graphs' 256 leaves 26 ms, on fewer GPUs at most."""
    rate = 0.93 * float(server(1000, 1000).capacity())
    found = specsim_plan(
        "Qwen3-30B-A3B", hardware=["1x-h200"], method="none", rate=rate, input_tokens=1000, output_tokens=1000,
        headroom=0.0, simulate=True, num_requests=400,
    )  # fmt: skip
    best = found.plan.best
    other = next(c for c in found.plan.choices if not c.most)
    assert best.most == best.server.most_running == 256
    assert best.capacity > other.capacity
    assert best.gpus <= other.gpus
    assert best.point.tpot_s[0] < other.point.tpot_s[0] / 2
    assert found.simulation["mean_tpot_ms"] == pytest.approx(best.point.tpot_s[0] * 1e3, rel=0.1)
    assert "at most 256 running" in found.verdict()
    assert found.json()["choices"][0]["max_running_requests"] == 256
    assert read_launch("sglang", found.launch["sglang"]).options["max_running_requests"] == 256
    assert not any("two states" in w for w in found.plan.warnings)


def test_a_plan_that_may_not_cap_says_that_there_are_two_states():
    """Whoever says how many run is not contradicted, and is told what it does."""
    s = limited(qwen(), 700)
    rate = 0.75 * float(server(1000, 200).capacity())
    found = plan([s], rate, Requests(1000, 200), Targets())
    assert all(c.most is None for c in found.choices)
    assert any(re.search(r"two states: TPOT \d.*--max-running-requests 256", w) for w in found.warnings)


def test_simulate_says_so_as_well():
    limit = float(server().capacity())
    options = {"hardware": "1x-h200", "method": "none", "input_tokens": 1000, "output_tokens": 100, "num_requests": 20}
    found = specsim_simulate("Qwen3-30B-A3B", rate=0.76 * limit, **options)
    assert any("--max-running-requests 256 leaves the first alone" in w for w in found.warnings)
    found = specsim_simulate("Qwen3-30B-A3B", rate=0.3 * limit, **options)
    assert not any("two states" in w for w in found.warnings)
    limit, capped = (float(x.capacity()) for x in (server(1000, 1000), server(1000, 1000).capped(256)))
    assert capped > limit
    with pytest.raises(InputError, match=rf"launch with --max-running-requests 256, .*: {capped:.4g}"):
        specsim_simulate("Qwen3-30B-A3B", rate=1.05 * limit, **options | {"output_tokens": 1000})


@pytest.mark.parametrize("prompt", [1, 2, 4, 8])
def test_a_load_far_below_any_limit_has_one_state_whatever_rounding_leaves(prompt):
    """8 of 4,096 run, and p(500) is below any number; the last place's 3e-17 of prompts as short as these was told as a state."""
    s = build(model="Llama-3.1-8B", hardware="1x-h200", method="none")
    assert two_states(server_of(s, machine_of(s), Requests(prompt, 400)), 4.0) is None
