"""The simulator, plainly: requests in a continuous-batching scheduler, one step at a time.

This is what the compiled kernel (`specsim.simulation_kernel`) is tested against, bit for bit, and what runs where numba
is not installed. One loop:

    release the requests that have arrived -> decide the next step -> let time pass -> give out tokens

Time is whole picoseconds. Only step times are interpolated in floating point, by +, -, *, / in a fixed order, and then
rounded, so every platform computes the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specsim.simulation_costs import Server
from specsim.workload import Requests

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Acceptance is drawn by L'Ecuyer's combined generator (Communications of the ACM 31, 1988): two multiplicative
# generators in whole numbers below 2^48, period 2^61; every request starts at a random place of its own.
A1, M1, A2, M2 = 40014, 2147483563, 40692, 2147483399

# SGLang's estimate of how much of its limit a request will generate (environ.py): it starts at INIT, falls to LEAST over
# DECAY decode steps, and rises when it was too low. CLIP: tokens of one request that are counted at most.
INIT_RATIO, LEAST_RATIO, DECAY_STEPS, CLIP, RETRACT_STEPS = 0.7, 0.7 * 0.14, 600, 4096, 20

FINE = 1024  # histogram bins in each power of two of nanoseconds: 0.1 % wide
BINS = 56 * FINE
BUCKETS = 512  # of the timeline; their width doubles when a run outgrows them
FIRST_BUCKET = 10**8  # ns
DONE_FIELDS = ("request", "arrival", "started", "first", "finished", "input_tokens", "output_tokens")

# Counters of a run. Times in ps unless they say ns; *_area: number x ns.
COUNTERS = (
    "now", "visible", "busy", "prefill_busy", "decode_steps", "prefill_steps", "mixed_steps", "sequence_steps",
    "decode_tokens", "chunks", "chunk_ns", "prefill_tokens", "cached_tokens", "retractions", "recomputed_tokens", "rejected",
    "completed", "input_tokens", "output_tokens", "running_area", "waiting_area", "peak_running", "peak_waiting", "peak_flight", "peak_kv",
    "second", "second_tokens", "peak_second_tokens", "bucket_ns", "last_finish",
)  # fmt: skip
COUNTER = {name: place for place, name in enumerate(COUNTERS)}


def interpolate(nodes: Floats, at: float) -> tuple[int, float]:
    """(left node, share of the way to the next); outside, along the first or last segment."""
    low, high = 0, len(nodes) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if nodes[middle] <= at:
            low = middle
        else:
            high = middle
    return low, (at - nodes[low]) / (nodes[low + 1] - nodes[low])


def step_time(contexts: Floats, step: Floats, batch: int, cached: int) -> float:
    """Picoseconds of one decode step of `batch` sequences with `cached` tokens among them."""
    i, share = interpolate(contexts, cached / batch)
    left = step[batch, i]
    return float(left + share * (step[batch, i + 1] - left))


def prefill_time(tokens: Floats, reach: Floats, prefill: Floats, rows: int, attended: float) -> float:
    """Picoseconds of a prefill of `rows` rows that attend to `attended` tokens each on average."""
    i, across = interpolate(tokens, float(rows))
    j, along = interpolate(reach, attended)
    low = prefill[i, j] + along * (prefill[i, j + 1] - prefill[i, j])
    high = prefill[i + 1, j] + along * (prefill[i + 1, j + 1] - prefill[i + 1, j])
    return float(low + across * (high - low))


def bin_of(ns: int) -> int:
    """Histogram bin of a time: exact below 2,048 ns, then 1,024 bins in each power of two."""
    shift = 0
    while ns >= 2 * FINE:
        ns >>= 1
        shift += 1
    return shift * FINE + ns


@dataclass
class Slot:
    """A request that has started. `cached`: its tokens in the KV cache; `need`: prompt tokens still to prefill."""

    request: int
    arrival: int
    started: int
    input_tokens: int
    output_tokens: int
    x1: int
    x2: int
    serial: int = 0
    generated: int = 0
    cached: int = 0
    need: int = 0
    held: int = 0
    first: int = 0
    last: int = 0
    queued: int = 0  # since when it waits


class Reference:
    """A run in progress: `feed` it blocks of requests and `advance` it; `counters` and histograms tell what happened."""

    def __init__(self, server: Server, clients: int = 0) -> None:
        self.server = server
        self.clients = clients  # requests in flight at most, 0: no limit
        self.pending: deque[tuple[int, int, int, int, int, int]] = deque()
        self.waiting: deque[Slot] = deque()
        self.retracted: list[Slot] = []  # the last one goes first
        self.running: list[Slot] = []
        self.partial: Slot | None = None
        self.freed: deque[int] = deque()
        self.unused = clients
        self.overhead = round(server.overhead_s * 1e12)
        self.chunk = round(server.chunk_s * 1e12)
        self.front = 0  # when the front end has handed out all chunks so far
        self.flight = 0
        self.fed = 0
        self.used = 0  # tokens of the KV cache
        self.ghosts = self.ghost_cached = self.ghost_held = 0
        self.stale = 0  # finished requests that keep their places until the next decode step is decided (prefill-first)
        self.full = False  # a request found no place: no more prefill before one that finished has given up its place
        self.serial = 0
        self.ratio = INIT_RATIO
        self.count = dict.fromkeys(COUNTERS, 0)
        self.count["bucket_ns"] = FIRST_BUCKET
        self.chunk_histogram = np.zeros(BINS, dtype=np.int64)
        self.token_histogram = np.zeros(BINS, dtype=np.int64)
        self.timeline = np.zeros((4, BUCKETS), dtype=np.int64)  # running, waiting, busy x ns; tokens
        self.thresholds = [int(p * M1) for p in server.survival]
        self.rows = server.costs.most_rows
        self.done: list[tuple[int, ...]] = []

    @property
    def counters(self) -> Ints:
        return np.asarray([self.count[name] for name in COUNTERS], dtype=np.int64)

    def feed(self, block: Requests, x1: Ints, x2: Ints) -> None:
        """Append requests; x1 and x2 seed the draws of each."""
        columns = (block.arrival, block.input_tokens, block.output_tokens, x1, x2)
        for arrival, given, made, a, b in zip(*(c.tolist() for c in columns), strict=True):
            self.pending.append((self.fed, arrival, given, made, a, b))
            self.fed += 1

    def advance(self, last: bool) -> Ints:
        """Run until more requests must be known, or with `last` to the end. Returns what completed: (n, DONE_FIELDS)."""
        self.done = []
        while self._release(last) and self._step():
            pass
        return np.asarray(self.done, dtype=np.int64).reshape(-1, len(DONE_FIELDS))

    # --- arrivals ---------------------------------------------------------------------------------------------------

    def _release(self, last: bool) -> bool:
        """Move what has arrived to the queue; idle until something does. False: more must be fed first, or all is done."""
        c = self.count
        while True:
            while self.pending and (time := self._next_arrival()) is not None and time <= c["now"]:
                self._arrive(time)
            if not self.pending and not last:
                return False
            if self.running or self.partial or self.waiting or self.retracted or self.ghosts:
                return True
            if not self.pending:
                return False
            time = self._next_arrival()
            assert time is not None  # nothing is in flight, so a client is free
            c["now"] = c["visible"] = max(c["now"], time)
            self.ratio = INIT_RATIO
            self._sweep()

    def _next_arrival(self) -> int | None:
        """When the scheduler sees the next request, sent at its own time or when a client is free. None: none is yet."""
        sent = self.pending[0][1]
        if self.clients and not self.unused:
            if not self.freed:
                return None
            sent = max(sent, self.freed[0])
        return sent + self.overhead

    def _arrive(self, time: int) -> None:
        request, _, given, made, x1, x2 = self.pending.popleft()
        if self.clients:
            if self.unused:
                self.unused -= 1
            else:
                self.freed.popleft()
        if given + made + self.rows > self.server.kv_tokens:
            self.count["rejected"] += 1
            if self.clients:
                self.freed.append(self.count["now"])
            return
        self.flight += 1
        self.count["peak_flight"] = max(self.count["peak_flight"], self.flight)
        self.waiting.append(Slot(request, time, -1, given, made, x1, x2, queued=time))

    # --- one step ---------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        c, costs = self.count, self.server.costs
        start = c["now"]
        plan = self._plan(c["visible"])
        decodes = self.server.policy == "mixed" or not plan
        if not plan and not self.running and not self.ghosts:  # nothing was known to run: decide again, knowing all
            self._sweep()
            plan = self._plan(start)
            decodes = self.server.policy == "mixed"
        if decodes:
            self._sweep()
        rows = sum(take for _, take in plan)
        pairs = sum(take * (2 * slot.cached + take + 1) for slot, take in plan)  # twice the (row, token) pairs
        batch = len(self.running) + self.ghosts if decodes else 0
        cached = sum(slot.cached for slot in self.running) + self.ghost_cached
        if not rows:
            time = step_time(costs.contexts, costs.step, batch, cached)
        elif not batch:
            time = prefill_time(costs.tokens, costs.reach, costs.prefill, rows, pairs / (2 * rows))
            if costs.led[0] <= rows <= costs.led[1]:
                time += max(
                    costs.lead - (start - c["visible"]), 0.0
                )  # visible: when the step before began, under overlap
        else:
            time = prefill_time(
                costs.tokens, costs.reach, costs.prefill, rows + batch * int(costs.rows[batch]), pairs / (2 * rows)
            )
            time = time + step_time(costs.contexts, costs.step, batch, cached) - float(costs.base[batch])
        took = max(int(time + 0.5), 1)
        self._account(start, took, rows, batch)
        now = c["now"] = start + took
        c["visible"] = start if self.server.overlap else now
        gone = self.ghost_held
        if self.server.policy != "mixed":
            self.stale += self.ghosts
        self.ghosts = self.ghost_cached = self.ghost_held = 0
        tokens = 0
        if batch:
            self.ratio = max(self.ratio - (INIT_RATIO - LEAST_RATIO) / DECAY_STEPS, LEAST_RATIO)
            c["sequence_steps"] += len(self.running)
            still = []
            thresholds = self.thresholds[: costs.drafts[batch]]
            for slot in self.running:
                gained = min(self._draw(slot, thresholds), slot.output_tokens - slot.generated)
                slot.cached += gained
                slot.held += gained
                self.used += gained
                c["decode_tokens"] += gained
                tokens += gained
                seen = self._hand_out(now)
                self._chunk(seen - slot.last, gained)
                slot.generated += gained
                slot.last = seen
                if slot.generated == slot.output_tokens:
                    self._finish(slot, seen)
                else:
                    still.append(slot)
            self.running = still
        for slot, take in plan:
            slot.cached += take
            slot.need -= take
            if slot.need:
                self.partial = slot
                continue
            if slot is self.partial:
                self.partial = None
            tokens += 1
            seen = self._hand_out(now)
            if slot.generated == 0:
                slot.first = seen
            else:
                c["decode_tokens"] += 1
                self._chunk(seen - slot.last, 1)
            slot.generated += 1
            slot.last = seen
            if slot.generated == slot.output_tokens:
                self._finish(slot, seen)
            else:
                self.running.append(slot)
        self.used -= gone
        self._tokens(now, tokens)
        return True

    def _draw(self, slot: Slot, thresholds: Sequence[int]) -> int:
        """Tokens that one cycle gives: 1 + the drafted tokens accepted."""
        if not thresholds:
            return 1
        slot.x1 = slot.x1 * A1 % M1
        slot.x2 = slot.x2 * A2 % M2
        z = slot.x1 - slot.x2
        if z <= 0:
            z += M1 - 1
        gained = 1
        for threshold in thresholds:
            if z > threshold:
                break
            gained += 1
        return gained

    def _hand_out(self, now: int) -> int:
        """When the client has a chunk that a step ending `now` made: the front end sends one after another."""
        if not self.chunk:
            return now
        self.front = max(self.front, now) + self.chunk
        return self.front

    def _finish(self, slot: Slot, now: int) -> None:
        c = self.count
        c["completed"] += 1
        c["input_tokens"] += slot.input_tokens
        c["output_tokens"] += slot.output_tokens
        c["last_finish"] = now
        self.flight -= 1
        if self.clients:
            self.freed.append(now)
        if self.server.overlap:  # the next step was sent off with it
            self.ghosts += 1
            self.ghost_cached += slot.cached
            self.ghost_held += slot.held
        else:
            self.used -= slot.held
            if (
                self.server.policy != "mixed" and slot.output_tokens > 1
            ):  # else its prefill was all, and it took no place
                self.stale += 1
        self.done.append(
            (
                slot.request,
                slot.arrival - self.overhead,
                slot.started,
                slot.first,
                now,
                slot.input_tokens,
                slot.output_tokens,
            )
        )

    # --- the scheduler ----------------------------------------------------------------------------------------------

    def _plan(self, visible: int) -> list[tuple[Slot, int]]:
        """Which prompts to prefill in this step, and how many tokens of each. Starts requests, and retracts some."""
        server = self.server
        mixed = server.policy == "mixed"
        plan: list[tuple[Slot, int]] = []
        budget = server.chunk_tokens
        growth = 0
        if mixed:
            if self._make_room():
                return []
            decoding = len(self.running) + self.ghosts
            budget -= decoding * int(server.costs.rows[decoding])
            growth = len(self.running) * self.rows
        if self.partial is not None and budget > 0:
            take = min(self.partial.need, budget)
            plan.append((self.partial, take))
            budget -= take
        reserved = -1.0
        busy = len(self.running) + self.ghosts + self.stale + (self.partial is not None)
        while budget > 0 and not self.full and (not self.partial or self.partial.need <= plan[0][1]):
            if self.retracted:
                slot = self.retracted[-1]
            elif self.waiting and self.waiting[0].arrival <= visible:
                slot = self.waiting[0]
            else:
                break
            if busy >= server.max_running:
                self.full = not mixed
                break
            total = slot.input_tokens + slot.generated
            if mixed:
                if self.used + growth + total > server.kv_tokens:
                    break
            else:
                if reserved < 0:
                    reserved = self.ratio * sum(min(s.output_tokens - s.generated, CLIP) for s in self.running)
                    reserved += sum(min(s.output_tokens - s.generated, CLIP) for s, _ in plan)
                rest = min(slot.output_tokens - slot.generated, CLIP)
                alone = not self.running and not plan and not self.ghosts
                if not alone and self.used + reserved + (total + rest) > server.kv_tokens:
                    self.full = True
                    break
                reserved += rest
            take = self._start(slot, total, budget)
            plan.append((slot, take))
            budget -= take
            busy += 1
            if take < slot.need:
                self.partial = slot
                break
        if not plan and not mixed and self._make_room():
            self.full = False
        return plan

    def _sweep(self) -> None:
        """What finished gives up its place (SGLang filters its running batch when it decides on a decode step)."""
        if self.stale or not (self.running or self.ghosts):
            self.full = False
        self.stale = 0

    def _start(self, slot: Slot, total: int, budget: int) -> int:
        """Take a request off its queue and give it memory; returns the prompt tokens to prefill in this step."""
        c = self.count
        if self.retracted:
            self.retracted.pop()
        else:
            self.waiting.popleft()
            c["cached_tokens"] += int(slot.input_tokens * self.server.prefix_rate)
            slot.started = c["now"]
        begin, end = slot.queued // 1000, c["now"] // 1000
        c["waiting_area"] += end - begin
        self._spread(1, begin, end, 1)
        slot.cached = int(slot.input_tokens * self.server.prefix_rate)
        slot.need = total - slot.cached
        slot.held = total
        slot.serial = self.serial
        self.serial += 1
        self.used += total
        return min(slot.need, budget)

    def _make_room(self) -> bool:
        """Retract requests until the next decode step fits the KV cache; true if any was."""
        server, rows = self.server, self.rows
        any_left = False
        while (
            len(self.running) + (self.partial is not None) > 1
            and self.used + len(self.running) * rows > server.kv_tokens
        ):
            if server.policy == "mixed":
                if self.partial is not None:  # the newest
                    victim, self.partial = self.partial, None
                else:
                    victim = max(self.running, key=lambda s: s.serial)
            else:  # the least output, then the longest prompt, then the newest
                victim = min(self.running, key=lambda s: (s.generated, -s.input_tokens, -s.serial))
            if victim in self.running:
                self.running.remove(victim)
            again = victim.cached if victim.need else victim.input_tokens + victim.generated
            self.count["recomputed_tokens"] += again - int(victim.input_tokens * server.prefix_rate)
            self.used -= victim.held
            victim.held = victim.cached = 0
            victim.queued = self.count["now"]
            self.retracted.append(victim)
            self.count["retractions"] += 1
            any_left = True
        if any_left and server.policy != "mixed":
            made = sum(s.generated for s in self.running) + RETRACT_STEPS * len(self.running)
            self.ratio = min(1.0, made / (sum(s.output_tokens for s in self.running) + 1))
        return any_left

    # --- accounts ---------------------------------------------------------------------------------------------------

    def _chunk(self, gap: int, tokens: int) -> None:
        """Note a chunk of `tokens` that came `gap` ps after the one before."""
        ns = (gap + 500) // 1000
        self.count["chunks"] += 1
        self.count["chunk_ns"] += ns
        self.chunk_histogram[bin_of(ns)] += 1
        self.token_histogram[bin_of((ns + tokens // 2) // tokens)] += tokens

    def _account(self, start: int, took: int, rows: int, batch: int) -> None:
        c = self.count
        c["busy"] += took
        c["prefill_tokens"] += rows
        if rows:
            c["prefill_busy"] += took
        c["mixed_steps" if rows and batch else "prefill_steps" if rows else "decode_steps"] += 1
        waiting = len(self.waiting) + len(self.retracted)
        running = self.flight - waiting
        c["peak_running"] = max(c["peak_running"], running)
        c["peak_waiting"] = max(c["peak_waiting"], waiting)
        c["peak_kv"] = max(c["peak_kv"], self.used)
        begin, end = start // 1000, (start + took) // 1000
        c["running_area"] += running * (end - begin)
        self._spread(0, begin, end, running)
        self._spread(2, begin, end, 1)

    def _spread(self, row: int, begin: int, end: int, number: int) -> None:
        """Add `number` to a row of the timeline from `begin` to `end` ns, merging buckets in pairs until it is covered."""
        c = self.count
        while end >= c["bucket_ns"] * BUCKETS:
            pairs = self.timeline[:, 0::2] + self.timeline[:, 1::2]
            self.timeline[:] = 0
            self.timeline[:, : BUCKETS // 2] = pairs
            c["bucket_ns"] *= 2
        while begin < end:
            bucket = begin // c["bucket_ns"]
            part = min(end, (bucket + 1) * c["bucket_ns"]) - begin
            self.timeline[row, bucket] += number * part
            begin += part

    def _tokens(self, now: int, tokens: int) -> None:
        c = self.count
        self.timeline[3, (now // 1000) // c["bucket_ns"]] += tokens
        second = now // 10**12
        if second != c["second"]:
            c["second"], c["second_tokens"] = second, 0
        c["second_tokens"] += tokens
        c["peak_second_tokens"] = max(c["peak_second_tokens"], c["second_tokens"])
