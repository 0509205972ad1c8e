"""How fast this host runs Python: core by core, and on the core where a server's busiest thread is.

A core of a virtual machine is a hyperthread as a rule, and who uses its other half is not seen from inside. On hosts of H200s a
fixed loop takes 0.20 or 0.49 us a step, the same core changing every few seconds, and what waits for the host takes up to twice
as long meanwhile (validation/calibration/1x-h200-host-speed.json). Times are a thread's own CPU time, so that
waiting for a core is no part of them. Linux only: elsewhere nothing is measured, and nothing is said.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from specsim.records import Quantity

STEPS = 1000  # of the loop: a quarter of a millisecond, in which a core seldom changes its speed
SLOW = 1.5  # times the fastest from which a look found a core slow: clocks differ by less, a shared core by more
SLOW_SHARE = 0.1  # of looks at a host from which slow cores are told: one core of many may be busy with interrupts
AWAKE_S = 0.015  # in which a core's clock rises from that of an idle one
BUSY = 0.25  # of a second's CPU time from which a thread is busy: an engine's main loop takes all of it, its front end little
BLOCKS = 5  # of looks, whose means tell how certain the mean of all is: looks beside one another are alike


def loop_us(steps: int = STEPS) -> float:
    """Microseconds of this thread's CPU time for one step of a fixed loop of plain Python."""
    table: dict[int, int] = {}
    start = time.thread_time()
    for i in range(steps):
        table[i & 255] = (i * 3) % 7
        pair = [i, i + 1]
        tuple(pair)
        str(i)
    return (time.thread_time() - start) / steps * 1e6


def by_core(rounds: int = 3, most: int = 32) -> dict[int, list[float]]:
    """`loop_us` a few times on each of at most so many cores that this process may use, evenly chosen; empty where threads cannot
    be placed. Each core is kept busy first, until its clock has risen from that of an idle one."""
    if not hasattr(os, "sched_setaffinity"):
        return {}
    cores = sorted(os.sched_getaffinity(0))
    chosen = cores[:: -(-len(cores) // most)]
    return {core: looks for core in chosen if (looks := _on(core, rounds, AWAKE_S))}


def fastest(looks: Sequence[float]) -> float:
    """What a step takes on a core of its own: the fifth percentile, so that one odd look decides nothing."""
    return sorted(looks)[len(looks) // 20]


def slow_share(looks: Sequence[float]) -> tuple[float, float]:
    """(share of the looks that found a slow core, how many times as long those took as the fastest, in the middle)."""
    best = fastest(looks)
    slow = [us for us in looks if us > SLOW * best]
    return len(slow) / len(looks), statistics.median(slow) / best if slow else 1.0


def two_speeds(by_core: Mapping[Any, Sequence[float]]) -> tuple[float, float] | None:
    """`slow_share` of looks at each core, where cores run at two speeds; None where they do not, or were not looked at."""
    looks = [us for core in by_core.values() for us in core]
    found = slow_share(looks) if looks else (0.0, 1.0)
    return found if found[0] >= SLOW_SHARE else None


def _on(core: int, rounds: int = 1, awake_s: float = 0.0) -> list[float]:
    """`loop_us` on one core, after a few steps that bring its code into the cache and `awake_s` seconds; none where it may not
    be used."""
    allowed = os.sched_getaffinity(0)  # of the thread that calls
    try:
        os.sched_setaffinity(0, {core})
        end = time.perf_counter() + awake_s
        loop_us(STEPS // 10)
        while time.perf_counter() < end:
            loop_us(STEPS // 10)
        return [loop_us() for _ in range(rounds)]
    except OSError:
        return []
    finally:
        os.sched_setaffinity(0, allowed)


class Watch:
    """Looks at the cores where a server's busy threads are, ten times a second, in a thread of its own.

    members: the server's processes. A context manager; `since` says what was seen.
    """

    def __init__(self, members: Callable[[], set[int]], period_s: float = 0.1) -> None:
        self._members, self._period_s = members, period_s
        self._looks: list[
            tuple[float, float]
        ] = []  # when (monotonic), us a step on the slowest of the busy threads' cores
        self._all: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="host speed")

    def __enter__(self) -> Watch:
        if hasattr(os, "sched_setaffinity") and Path("/proc/self/stat").exists():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def note(self, environment: dict[str, Any]) -> None:
        """Keep in a record's environment how long a step of the loop takes on this host's fastest core, once that was seen: hosts
        differ in it, and a point's own figure is relative to it."""
        if self._all:
            environment["host_loop_us"] = round(fastest(self._all), 4)

    def since(self, begin: float) -> Quantity | None:
        """How many times as long as on the fastest core the loop took where the server ran, on average since `begin`
        (monotonic seconds), with the 80 % interval of that mean; None for fewer than two looks."""
        looks = [us for when, us in list(self._looks) if when >= begin]
        if len(looks) < 2:
            return None
        best = fastest(self._all)
        mean, half = statistics.fmean(looks) / best, _half(looks) / best
        how = "a fixed loop's time on the cores of the server's busy threads, over the fastest on this host"
        return Quantity(
            value=round(mean, 3), low=round(mean - half, 3), high=round(mean + half, 3), n=len(looks), how=how
        )

    def _run(self) -> None:
        self._all += [us for looks in by_core().values() for us in looks]
        threads: list[Path] = []
        spent: dict[Path, int] = {}
        chosen = 0.0
        while not self._stop.wait(self._period_s):
            if (now := time.monotonic()) - chosen > 1.0:
                before, spent = spent, _spent(self._members())
                least = BUSY * os.sysconf("SC_CLK_TCK") * (now - chosen)
                threads = [thread for thread, ticks in spent.items() if ticks - before.get(thread, ticks) > least]
                chosen = now
            cores = {core for thread in threads if (core := _core(thread)) is not None}
            looks = [us for core in cores for us in _on(core)]
            if looks:
                self._looks.append((now, max(looks)))
                self._all += looks


def _half(looks: Sequence[float]) -> float:
    """Half of the 80 % interval of the looks' mean, from the means of blocks."""
    count = min(BLOCKS, len(looks))
    means = [statistics.fmean(looks[i * len(looks) // count : (i + 1) * len(looks) // count]) for i in range(count)]
    return 1.53 * statistics.stdev(means) / math.sqrt(count)  # Student's t of 4 degrees of freedom


def stat_of(process: Path) -> list[str]:
    """The fields of `stat` behind the name, of a process (/proc/PID) or a thread (/proc/PID/task/TID); [] when it is gone."""
    with contextlib.suppress(OSError):
        return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _spent(members: set[int]) -> dict[Path, int]:
    """Clock ticks that each thread of the processes has used."""
    found = {}
    for pid in members:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                if fields := stat_of(thread):
                    found[thread] = int(fields[11]) + int(fields[12])  # utime, stime
    return found


def _core(thread: Path) -> int | None:
    """The core that a thread ran on last."""
    fields = stat_of(thread)
    return int(fields[36]) if fields else None
