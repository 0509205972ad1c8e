"""How fast a host's cores are: two speeds are told, one is not, and a watched process is found where it runs."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_server import FakeServer
from specsim.calibration import health

from specsim import calibrate, host_speed
from specsim.live import Client, identify
from specsim.measure import Plan, measure
from specsim.records import Quantity
from specsim.server import listeners

RECORDED = Path(__file__).parents[1] / "validation" / "calibration" / "1x-h200-host-speed.json"
placed = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be placed on cores here")


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORDED.read_text())


def test_recorded_cores_have_two_speeds_and_nothing_between(recorded):
    """What the documentation says of the H200 hosts: 0.20 or 0.49 us, each core changing, between them almost nothing."""
    looks = [us for row in recorded["loop_us"] for us in row[1:]]
    share, times = host_speed.slow_share(looks)
    assert 0.5 < share < 0.75
    assert 2.0 < times < 2.6
    assert sum(0.27 < us < 0.38 for us in looks) < 0.12 * len(looks)
    by_core = list(zip(*(row[1:] for row in recorded["loop_us"]), strict=True))
    assert all(0.3 < statistics.fmean(us > 0.33 for us in core) < 0.9 for core in by_core)


def test_steps_without_graphs_take_longer_on_a_slow_core(recorded):
    """Decode steps of Llama-3.1-8B without graphs, 20 at a time by the server's log, by the speed of the scheduler's core."""
    steps = [(at, ms) for name, at, batch, ms in recorded["steps_ms"] if name.startswith("llama8b") and batch == 16]
    by_speed: dict[bool, list[float]] = {True: [], False: []}
    for at, ms in steps:
        seen = [us for when, _, us in recorded["scheduler"] if at - 1.0 <= when <= at + 1.0]
        if seen and (all(us > 0.4 for us in seen) or all(us < 0.27 for us in seen)):
            by_speed[seen[0] > 0.4].append(ms)
    slow, fast = (statistics.median(by_speed[key]) for key in (True, False))
    assert 1.6 < slow / fast < 2.4


def test_one_speed_is_no_finding_and_two_are_one_warning():
    assert health.judge_cores({}) == []
    assert health.judge_cores({core: [0.20, 0.21, 0.24] for core in range(16)}) == []
    assert health.judge_cores({core: [0.20, 0.21, 0.20 if core else 0.9] for core in range(16)}) == []  # one odd look
    (found,) = health.judge_cores({core: [0.2, 0.5, 0.5, 0.2] for core in range(8)})
    assert found.level == "warning"
    assert "50% of looks found one 2.5 times as slow" in found.what


@placed
def test_every_core_is_looked_at_and_the_thread_goes_back_to_where_it_might_run():
    before = os.sched_getaffinity(0)
    looks = host_speed.by_core(2)
    assert os.sched_getaffinity(0) == before
    assert set(looks) <= before
    assert all(len(core) == 2 and min(core) > 0 for core in looks.values())
    assert len(host_speed.by_core(1, most=1)) == 1


@placed
def test_a_core_is_awake_before_it_is_timed(monkeypatch):
    """An idle core's clock is low at first: by then three times as slow here, for 10 ms, which no look may show."""
    clock = [0.0]

    def loop_us(steps=host_speed.STEPS):
        us = 0.6 if clock[0] < 0.010 else 0.2
        clock[0] += steps * us * 1e-6
        return us

    monkeypatch.setattr(host_speed, "loop_us", loop_us)
    monkeypatch.setattr(host_speed.time, "perf_counter", lambda: clock[0])
    assert set(host_speed.by_core(3, most=1).popitem()[1]) == {0.2}


@placed
def test_a_watch_follows_the_busy_thread_of_a_process():
    """A process that computes is looked at ten times a second; one that sleeps is not."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        begin = time.monotonic()
        with host_speed.Watch(lambda: {busy.pid}) as watch, host_speed.Watch(lambda: {idle.pid}) as other:
            while time.monotonic() < begin + 20 and ((seen := watch.since(begin)) is None or (seen.n or 0) < 3):
                time.sleep(0.2)
            assert other.since(begin) is None
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
    assert seen is not None
    assert 0.8 < seen.value < 5
    assert seen.low is not None
    assert seen.high is not None
    assert seen.low <= seen.value <= seen.high
    assert watch.since(time.monotonic()) is None
    environment: dict[str, float] = {}
    watch.note(environment)
    assert 0.01 < environment["host_loop_us"] < 5


def test_a_watch_of_processes_that_are_gone_sees_nothing():
    with host_speed.Watch(lambda: {2**22 + 1}) as watch:
        time.sleep(0.3)
        assert watch.since(0.0) is None
    unseen: dict[str, float] = {}
    host_speed.Watch(set).note(unseen)
    assert unseen == {}


class Slow:
    """A watch of cores that are half as fast as the best."""

    def since(self, begin):
        return Quantity(value=2.0, low=1.9, high=2.1, n=5)


def test_a_point_says_how_slow_the_server_s_cores_were():
    plan = Plan(min_repeats=2, max_repeats=2, lengths=(4, 8, 16, 24))
    with FakeServer() as server:
        client = Client(server.url, timeout=5)
        plain, slow = (measure(client, identify(client), 2, 32, plan, None, str, host) for host in (None, Slow()))
    assert plain.host_slowdown is None
    assert "host_slowdown" not in plain.raw
    assert slow.host_slowdown.value == 2.0
    assert slow.raw["host_slowdown"] == [2.0] * len(slow.raw["cycles"])
    assert [n for n in slow.notes if n not in plain.notes] == [
        "the server's core took 2.00 times as long as this host's fastest: what waits for the host did too"
    ]


@placed
def test_who_listens_at_a_server_s_port_is_found_and_no_other():
    """`validate --url` of a server on this machine finds its processes so; one elsewhere has none here."""
    script = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.BaseHTTPRequestHandler); print(s.server_port, flush=True); s.serve_forever()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline())
            assert listeners(Client(f"http://127.0.0.1:{port}")) == {process.pid}
            assert listeners(Client(f"http://localhost:{port}/v1")) == {process.pid}
            assert listeners(Client(f"http://10.0.0.7:{port}")) == set()
        finally:
            process.kill()
    assert listeners(Client(f"http://127.0.0.1:{port}")) == set()


def test_a_calibration_keeps_how_slow_the_cores_are() -> None:
    """Half of the looks found a core 2.5 times as slow; a host with cores of its own, or at which nobody looked, has no group."""
    made = calibrate.build(
        "box",
        [],
        {"gpu": "Test GPU"},
        ranks=1,
        cpu=True,
        health={"cores_us": {"0": [0.2, 0.5] * 8, "1": [0.5, 0.2] * 8}},
    )
    host = made.profile.host
    assert host is not None
    assert (host.slow_share, host.slow_ratio, host.source.kind) == (0.5, 2.5, "measured")
    for looked in ({"cores_us": {"0": [0.2, 0.21, 0.22] * 8}}, {"cores_us": {}}, None):
        assert calibrate.build("box", [], {"gpu": "Test GPU"}, ranks=1, cpu=True, health=looked).profile.host is None
