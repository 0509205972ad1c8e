"""The simulator compiled by numba: the rules of `specsim.simulation_reference`, on arrays. Import it only where numba is.

`Kernel` has the face of `Reference`. One row of an array is one request that has started:

    request arrival started input output x1 x2 serial generated cached need held first last queued

What changes in every decode step lies apart, in one array each: `left`, the tokens still to generate, and the states
`x1`, `x2` of the draws. While a request decodes, the rest follows: generated = output - left, cached = held = input +
generated - 1, and `last` is the end of the step before for all but those that joined since (from OLD on).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim import simulation_reference as reference
from specsim.simulation_costs import Server
from specsim.simulation_reference import (
    A1,
    A2,
    BINS,
    BUCKETS,
    CLIP,
    COUNTER,
    COUNTERS,
    DECAY_STEPS,
    DONE_FIELDS,
    FIRST_BUCKET,
    INIT_RATIO,
    LEAST_RATIO,
    M1,
    M2,
    RETRACT_STEPS,
)
from specsim.workload import Requests

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

REQUEST, ARRIVAL, STARTED, INPUT, OUTPUT, X1, X2, SERIAL, GENERATED, CACHED, NEED, HELD, FIRST, LAST, QUEUED = range(15)
COLUMNS = 15

# The scheduler's state between two calls. Of the requests fed, HEAD to TAIL wait, and those from RELEASED on have yet to come.
(HEAD, TAIL, RELEASED, RUNNING, RETRACTED, PARTIAL, FREED_AT, FREED, UNUSED, FLIGHT, USED, SUM, GHOSTS, GHOST_CACHED,
 GHOST_HELD, NEXT_SERIAL, OLD, LAST_DECODE, STALE, FULL, FRONT, STATES) = range(22)  # fmt: skip

# What the server and its clients are.
MIXED, MAX_RUNNING, CHUNK, KV, OVERLAP, ROWS, CLIENTS, OVERHEAD, CHUNK_TIME, LEAD, LED_FROM, LED_TO = range(12)

# Counters, as constants that numba can freeze.
NOW, VISIBLE, BUSY, PREFILL_BUSY = (COUNTER[n] for n in ("now", "visible", "busy", "prefill_busy"))
DECODE_STEPS, PREFILL_STEPS, MIXED_STEPS = (COUNTER[n] for n in ("decode_steps", "prefill_steps", "mixed_steps"))
SEQUENCE_STEPS, DECODE_TOKENS = COUNTER["sequence_steps"], COUNTER["decode_tokens"]
CHUNKS, CHUNK_NS = COUNTER["chunks"], COUNTER["chunk_ns"]
PREFILL_TOKENS, CACHED_TOKENS = COUNTER["prefill_tokens"], COUNTER["cached_tokens"]
RETRACTIONS, RECOMPUTED, REJECTED = (COUNTER[n] for n in ("retractions", "recomputed_tokens", "rejected"))
COMPLETED, INPUTS, OUTPUTS = (COUNTER[n] for n in ("completed", "input_tokens", "output_tokens"))
RUNNING_AREA, WAITING_AREA = COUNTER["running_area"], COUNTER["waiting_area"]
PEAK_RUNNING, PEAK_WAITING, PEAK_FLIGHT = (COUNTER[n] for n in ("peak_running", "peak_waiting", "peak_flight"))
PEAK_KV, SECOND, SECOND_TOKENS = (COUNTER[n] for n in ("peak_kv", "second", "second_tokens"))
PEAK_SECOND, BUCKET_NS, LAST_FINISH = (COUNTER[n] for n in ("peak_second_tokens", "bucket_ns", "last_finish"))


def _compile(function: Any) -> Any:
    """The function compiled on its first call; kept on disk where the place for it can be written to."""
    from numba import njit

    try:
        return njit(cache=True)(function)
    except RuntimeError:  # no place for the cache
        return njit(function)


interpolate = _compile(reference.interpolate)
bin_of = _compile(reference.bin_of)


def _step_time(contexts: Floats, step: Floats, batch: int, cached: int) -> float:
    i, share = interpolate(contexts, cached / batch)
    left = step[batch, i]
    return left + share * (step[batch, i + 1] - left)  # type: ignore[no-any-return]


def _prefill_time(tokens: Floats, reach: Floats, prefill: Floats, rows: int, attended: float) -> float:
    i, across = interpolate(tokens, float(rows))
    j, along = interpolate(reach, attended)
    low = prefill[i, j] + along * (prefill[i, j + 1] - prefill[i, j])
    high = prefill[i + 1, j] + along * (prefill[i + 1, j + 1] - prefill[i + 1, j])
    return low + across * (high - low)  # type: ignore[no-any-return]


step_time = _compile(_step_time)
prefill_time = _compile(_prefill_time)


def _next_arrival(arrival: int, s: Ints, p: Ints, freed: Ints) -> int:
    """When the scheduler sees the next request; -1: no client is free."""
    if p[CLIENTS] and s[UNUSED] == 0:
        if s[FREED] == 0:
            return -1
        arrival = max(arrival, freed[s[FREED_AT]])
    return arrival + p[OVERHEAD]  # type: ignore[no-any-return]


def _free(now: int, s: Ints, p: Ints, freed: Ints) -> None:
    if p[CLIENTS]:
        freed[(s[FREED_AT] + s[FREED]) % len(freed)] = now
        s[FREED] += 1


def _sweep(s: Ints) -> None:
    """What finished gives up its place."""
    if s[STALE] or s[RUNNING] + s[GHOSTS] == 0:
        s[FULL] = 0
    s[STALE] = 0


def _hand_out(now: int, s: Ints, p: Ints) -> int:
    """When the client has a chunk that a step ending `now` made."""
    if p[CHUNK_TIME] == 0:
        return now
    s[FRONT] = max(s[FRONT], now) + p[CHUNK_TIME]
    return s[FRONT]  # type: ignore[no-any-return]


def _note_chunk(gap: int, gained: int, times: int, c: Ints, chunk_histogram: Ints, token_histogram: Ints) -> None:
    """`times` chunks of `gained` tokens that came `gap` ps after the ones before."""
    ns = (gap + 500) // 1000
    c[CHUNKS] += times
    c[CHUNK_NS] += ns * times
    chunk_histogram[bin_of(ns)] += times
    token_histogram[bin_of((ns + gained // 2) // gained)] += gained * times


def _spread(row: int, begin: int, end: int, number: int, c: Ints, timeline: Ints) -> None:
    """Add `number` to a row of the timeline from `begin` to `end` ns, merging buckets in pairs until it is covered."""
    while end >= c[BUCKET_NS] * BUCKETS:
        for line in range(4):
            for pair in range(BUCKETS // 2):
                timeline[line, pair] = timeline[line, 2 * pair] + timeline[line, 2 * pair + 1]
            timeline[line, BUCKETS // 2 :] = 0
        c[BUCKET_NS] *= 2
    while begin < end:
        bucket = begin // c[BUCKET_NS]
        part = min(end, (bucket + 1) * c[BUCKET_NS]) - begin
        timeline[row, bucket] += number * part
        begin += part


spread = _compile(_spread)


def _note_step(start: int, took: int, rows: int, batch: int, s: Ints, waiting: int, c: Ints, timeline: Ints) -> None:
    c[BUSY] += took
    c[PREFILL_TOKENS] += rows
    if rows:
        c[PREFILL_BUSY] += took
        if batch:
            c[MIXED_STEPS] += 1
        else:
            c[PREFILL_STEPS] += 1
    else:
        c[DECODE_STEPS] += 1
    running = s[FLIGHT] - waiting
    c[PEAK_RUNNING] = max(c[PEAK_RUNNING], running)
    c[PEAK_WAITING] = max(c[PEAK_WAITING], waiting)
    c[PEAK_KV] = max(c[PEAK_KV], s[USED])
    begin, end = start // 1000, (start + took) // 1000
    c[RUNNING_AREA] += running * (end - begin)
    spread(0, begin, end, running, c, timeline)
    spread(2, begin, end, 1, c, timeline)


def _make_room(
    prefix_rate: float,
    s: Ints,
    p: Ints,
    ratio: Floats,
    running: Ints,
    left: Ints,
    x1: Ints,
    x2: Ints,
    partial: Ints,
    retracted: Ints,
    c: Ints,
) -> bool:
    """Retract requests until the next decode step fits; true if any was."""
    found = False
    while s[RUNNING] + s[PARTIAL] > 1 and s[USED] + s[RUNNING] * p[ROWS] > p[KV]:
        if p[MIXED] and s[PARTIAL]:
            victim = partial[0]
            s[PARTIAL] = 0
        else:
            worst = 0
            for i in range(1, s[RUNNING]):
                newer = running[i, SERIAL] > running[worst, SERIAL]
                made = running[i, OUTPUT] - left[i]
                least = running[worst, OUTPUT] - left[worst]
                if p[MIXED]:
                    if newer:
                        worst = i
                elif made != least:
                    if made < least:
                        worst = i
                elif running[i, INPUT] != running[worst, INPUT]:
                    if running[i, INPUT] > running[worst, INPUT]:
                        worst = i
                elif newer:
                    worst = i
            victim = running[worst].copy()
            victim[GENERATED] = victim[OUTPUT] - left[worst]
            victim[CACHED] = victim[INPUT] + victim[GENERATED] - 1
            victim[HELD] = victim[CACHED]
            victim[X1] = x1[worst]
            victim[X2] = x2[worst]
            if worst < s[OLD]:
                victim[LAST] = s[LAST_DECODE]
                s[OLD] -= 1
            s[SUM] -= victim[CACHED]
            for i in range(worst, s[RUNNING] - 1):
                running[i] = running[i + 1]
                left[i], x1[i], x2[i] = left[i + 1], x1[i + 1], x2[i + 1]
            s[RUNNING] -= 1
        again = victim[CACHED] if victim[NEED] else victim[INPUT] + victim[GENERATED]
        c[RECOMPUTED] += again - int(victim[INPUT] * prefix_rate)
        s[USED] -= victim[HELD]
        retracted[s[RETRACTED]] = victim
        retracted[s[RETRACTED], HELD] = 0
        retracted[s[RETRACTED], CACHED] = 0
        retracted[s[RETRACTED], QUEUED] = c[NOW]
        s[RETRACTED] += 1
        c[RETRACTIONS] += 1
        found = True
    if found and not p[MIXED]:
        made, most = RETRACT_STEPS * s[RUNNING], 1
        for i in range(s[RUNNING]):
            made += running[i, OUTPUT] - left[i]
            most += running[i, OUTPUT]
        ratio[0] = min(1.0, made / most)
    return found


next_arrival = _compile(_next_arrival)
sweep = _compile(_sweep)
hand_out = _compile(_hand_out)
free = _compile(_free)
note_chunk = _compile(_note_chunk)
note_step = _compile(_note_step)
make_room = _compile(_make_room)


def _plan(
    visible: int,
    prefix_rate: float,
    pending: Ints,
    s: Ints,
    p: Ints,
    ratio: Floats,
    running: Ints,
    left: Ints,
    x1: Ints,
    x2: Ints,
    partial: Ints,
    retracted: Ints,
    plan: Ints,
    take: Ints,
    rows_at: Ints,
    c: Ints,
    timeline: Ints,
) -> int:
    """Fill `plan` and `take` with the prompts to prefill in this step; returns how many."""
    mixed = p[MIXED] != 0
    n = 0
    budget = p[CHUNK]
    growth = 0
    if mixed:
        if make_room(prefix_rate, s, p, ratio, running, left, x1, x2, partial, retracted, c):
            return 0
        decoding = s[RUNNING] + s[GHOSTS]
        budget -= decoding * rows_at[decoding]
        growth = s[RUNNING] * p[ROWS]
    busy = s[RUNNING] + s[GHOSTS] + s[STALE] + s[PARTIAL]
    open_ = budget > 0 and s[FULL] == 0
    if s[PARTIAL] and budget > 0:
        plan[0] = partial[0]
        take[0] = min(partial[0, NEED], budget)
        budget -= take[0]
        s[PARTIAL] = 0
        n = 1
        open_ = take[0] == plan[0, NEED] and s[FULL] == 0
    reserved = -1.0
    while open_ and budget > 0:
        again = s[RETRACTED] > 0
        if again:
            slot = retracted[s[RETRACTED] - 1]
            total = slot[INPUT] + slot[GENERATED]
            rest = min(slot[OUTPUT] - slot[GENERATED], CLIP)
        elif s[HEAD] < s[TAIL] and pending[s[HEAD], 1] <= visible:
            slot = pending[s[HEAD]]
            total = slot[2]
            rest = min(slot[3], CLIP)
        else:
            break
        if busy >= p[MAX_RUNNING]:
            s[FULL] = not mixed
            break
        if mixed:
            if s[USED] + growth + total > p[KV]:
                break
        else:
            if reserved < 0:
                coming = 0
                for i in range(s[RUNNING]):
                    coming += min(left[i], CLIP)
                reserved = ratio[0] * coming
                coming = 0
                for i in range(n):
                    coming += min(plan[i, OUTPUT] - plan[i, GENERATED], CLIP)
                reserved += coming
            alone = s[RUNNING] == 0 and n == 0 and s[GHOSTS] == 0
            if not alone and s[USED] + reserved + (total + rest) > p[KV]:
                s[FULL] = 1
                break
            reserved += rest
        if again:
            plan[n] = slot
            s[RETRACTED] -= 1
        else:
            plan[n] = 0
            plan[n, REQUEST] = slot[0]
            plan[n, ARRIVAL] = slot[1]
            plan[n, STARTED] = c[NOW]
            plan[n, INPUT] = slot[2]
            plan[n, OUTPUT] = slot[3]
            plan[n, X1] = slot[4]
            plan[n, X2] = slot[5]
            plan[n, QUEUED] = slot[1]
            s[HEAD] += 1
            c[CACHED_TOKENS] += int(slot[2] * prefix_rate)
        begin, end = plan[n, QUEUED] // 1000, c[NOW] // 1000
        c[WAITING_AREA] += end - begin
        spread(1, begin, end, 1, c, timeline)
        plan[n, CACHED] = int(plan[n, INPUT] * prefix_rate)
        plan[n, NEED] = total - plan[n, CACHED]
        plan[n, HELD] = total
        plan[n, SERIAL] = s[NEXT_SERIAL]
        s[NEXT_SERIAL] += 1
        s[USED] += total
        take[n] = min(plan[n, NEED], budget)
        budget -= take[n]
        busy += 1
        open_ = take[n] == plan[n, NEED]
        n += 1
    if n == 0 and not mixed and make_room(prefix_rate, s, p, ratio, running, left, x1, x2, partial, retracted, c):
        s[FULL] = 0
    return n


def _finish(slot: Ints, now: int, s: Ints, p: Ints, freed: Ints, c: Ints, done: Ints, n: int) -> None:
    c[COMPLETED] += 1
    c[INPUTS] += slot[INPUT]
    c[OUTPUTS] += slot[OUTPUT]
    c[LAST_FINISH] = now
    s[FLIGHT] -= 1
    free(now, s, p, freed)
    if p[OVERLAP]:
        s[GHOSTS] += 1
        s[GHOST_CACHED] += slot[CACHED]
        s[GHOST_HELD] += slot[HELD]
    else:
        s[USED] -= slot[HELD]
        s[STALE] += p[MIXED] == 0 and slot[OUTPUT] > 1
    done[n, 0] = slot[REQUEST]
    done[n, 1] = slot[ARRIVAL] - p[OVERHEAD]
    done[n, 2] = slot[STARTED]
    done[n, 3] = slot[FIRST]
    done[n, 4] = now
    done[n, 5] = slot[INPUT]
    done[n, 6] = slot[OUTPUT]


def _release(last: bool, pending: Ints, s: Ints, p: Ints, ratio: Floats, freed: Ints, c: Ints) -> bool:
    """Move what has arrived to the queue; idle until something does. False: feed more, or all is done."""
    n = len(pending)
    while True:
        while s[RELEASED] < n:
            row = pending[s[RELEASED]]
            time = next_arrival(row[1], s, p, freed)
            if time < 0 or time > c[NOW]:
                break
            if p[CLIENTS]:
                if s[UNUSED] > 0:
                    s[UNUSED] -= 1
                else:
                    s[FREED_AT] = (s[FREED_AT] + 1) % len(freed)
                    s[FREED] -= 1
            if row[2] + row[3] + p[ROWS] > p[KV]:
                c[REJECTED] += 1
                free(c[NOW], s, p, freed)
                s[RELEASED] += 1
                continue
            row[1] = time
            s[FLIGHT] += 1
            c[PEAK_FLIGHT] = max(c[PEAK_FLIGHT], s[FLIGHT])
            if s[TAIL] < s[RELEASED]:  # over the place of one that was rejected
                pending[s[TAIL]] = row
            s[TAIL] += 1
            s[RELEASED] += 1
        if s[RELEASED] == n and not last:
            return False
        if s[RUNNING] + s[PARTIAL] + s[RETRACTED] + s[GHOSTS] > 0 or s[HEAD] < s[TAIL]:
            return True
        if s[RELEASED] == n:
            return False
        c[NOW] = max(c[NOW], next_arrival(pending[s[RELEASED], 1], s, p, freed))
        c[VISIBLE] = c[NOW]
        ratio[0] = INIT_RATIO
        sweep(s)


plan_prefill = _compile(_plan)
finish = _compile(_finish)
release = _compile(_release)


def _nothing_new(last: bool, pending: Ints, s: Ints, p: Ints, c: Ints) -> bool:
    """`release` would do nothing and answer true: a short cut for most steps."""
    if s[RUNNING] == 0 or s[RELEASED] == len(pending):
        return last and s[RUNNING] > 0
    if p[CLIENTS] and s[UNUSED] == 0 and s[FREED] == 0:
        return True
    return pending[s[RELEASED], 1] + p[OVERHEAD] > c[NOW]  # type: ignore[no-any-return]


def _settled(pending: Ints, s: Ints, p: Ints, c: Ints) -> bool:
    """`_plan` would find nothing to prefill or to retract: a short cut for most steps."""
    if s[RUNNING] == 0 or s[PARTIAL] or s[USED] + s[RUNNING] * p[ROWS] > p[KV]:
        return False
    if s[FULL]:
        return True
    return not s[RETRACTED] and (s[HEAD] == s[TAIL] or pending[s[HEAD], 1] > c[VISIBLE])


nothing_new = _compile(_nothing_new)
settled = _compile(_settled)


def _advance(
    last: bool,
    prefix_rate: float,
    pending: Ints,
    s: Ints,
    p: Ints,
    ratio: Floats,
    running: Ints,
    left: Ints,
    x1: Ints,
    x2: Ints,
    partial: Ints,
    retracted: Ints,
    freed: Ints,
    plan: Ints,
    take: Ints,
    thresholds: Ints,
    rows_at: Ints,
    drafts_at: Ints,
    contexts: Floats,
    step: Floats,
    base: Floats,
    tokens: Floats,
    reach: Floats,
    prefill: Floats,
    c: Ints,
    chunk_histogram: Ints,
    token_histogram: Ints,
    timeline: Ints,
    done: Ints,
) -> int:
    finished = 0
    gains = np.zeros(len(thresholds) + 2, dtype=np.int64)
    paced = p[CHUNK_TIME] != 0
    while nothing_new(last, pending, s, p, c) or release(last, pending, s, p, ratio, freed, c):
        start = c[NOW]
        n = 0
        if not settled(pending, s, p, c):
            n = plan_prefill(
                c[VISIBLE],
                prefix_rate,
                pending,
                s,
                p,
                ratio,
                running,
                left,
                x1,
                x2,
                partial,
                retracted,
                plan,
                take,
                rows_at,
                c,
                timeline,
            )
        decodes = p[MIXED] != 0 or n == 0
        if n == 0 and s[RUNNING] == 0 and s[GHOSTS] == 0:
            sweep(s)
            n = plan_prefill(
                start,
                prefix_rate,
                pending,
                s,
                p,
                ratio,
                running,
                left,
                x1,
                x2,
                partial,
                retracted,
                plan,
                take,
                rows_at,
                c,
                timeline,
            )
            decodes = p[MIXED] != 0
        if decodes:
            sweep(s)
        rows = 0
        pairs = 0
        for i in range(n):
            rows += take[i]
            pairs += take[i] * (2 * plan[i, CACHED] + take[i] + 1)
        batch = s[RUNNING] + s[GHOSTS] if decodes else 0
        cached = s[SUM] + s[GHOST_CACHED]
        if rows == 0:
            time = step_time(contexts, step, batch, cached)
        elif batch == 0:
            time = prefill_time(tokens, reach, prefill, rows, pairs / (2 * rows))
            if p[LED_FROM] <= rows <= p[LED_TO]:
                time += max(p[LEAD] - (start - c[VISIBLE]), 0)
        else:
            time = prefill_time(tokens, reach, prefill, rows + batch * rows_at[batch], pairs / (2 * rows))
            time = time + step_time(contexts, step, batch, cached) - base[batch]
        took = max(int(time + 0.5), 1)
        note_step(start, took, rows, batch, s, s[TAIL] - s[HEAD] + s[RETRACTED], c, timeline)
        now = start + took
        c[NOW] = now
        c[VISIBLE] = start if p[OVERLAP] else now
        gone = s[GHOST_HELD]
        if p[MIXED] == 0:
            s[STALE] += s[GHOSTS]
        s[GHOSTS] = 0
        s[GHOST_CACHED] = 0
        s[GHOST_HELD] = 0
        out = 0
        if batch:
            ratio[0] = max(ratio[0] - (INIT_RATIO - LEAST_RATIO) / DECAY_STEPS, LEAST_RATIO)
            c[SEQUENCE_STEPS] += s[RUNNING]
            kept = 0
            shared = now - s[LAST_DECODE]  # the gap of most chunks: counted by size and noted once
            drafts = min(drafts_at[batch], len(thresholds))
            for i in range(s[RUNNING]):
                gained = 1
                if drafts:
                    x1[i] = x1[i] * A1 % M1
                    x2[i] = x2[i] * A2 % M2
                    z = x1[i] - x2[i]
                    z += (M1 - 1) * (z <= 0)
                    for j in range(
                        drafts
                    ):  # thresholds never rise, so their order does not matter: no branch to mispredict
                        gained += z <= thresholds[j]
                gained = min(gained, left[i])
                left[i] -= gained
                out += gained
                seen = hand_out(now, s, p) if paced else now
                if i < s[OLD]:
                    gains[gained] += 1
                else:
                    note_chunk(seen - running[i, LAST], gained, 1, c, chunk_histogram, token_histogram)
                    running[i, LAST] = seen
                if left[i] == 0:
                    running[i, CACHED] = running[i, INPUT] + running[i, OUTPUT] - 1
                    running[i, HELD] = running[i, CACHED]
                    s[SUM] -= running[i, CACHED]
                    finish(running[i], seen, s, p, freed, c, done, finished)
                    finished += 1
                else:
                    if kept != i:
                        running[kept] = running[i]
                        left[kept], x1[kept], x2[kept] = left[i], x1[i], x2[i]
                    kept += 1
            s[USED] += out
            s[SUM] += out
            s[RUNNING] = kept
            s[OLD] = 0 if p[CHUNK_TIME] else kept  # chunks that come one after another have gaps of their own
            s[LAST_DECODE] = now
            c[DECODE_TOKENS] += out
            for gained in range(1, len(gains)):
                if gains[gained]:
                    note_chunk(shared, gained, gains[gained], c, chunk_histogram, token_histogram)
                    gains[gained] = 0
        for i in range(n):
            slot = plan[i]
            slot[CACHED] += take[i]
            slot[NEED] -= take[i]
            if slot[NEED]:
                partial[0] = slot
                s[PARTIAL] = 1
                continue
            out += 1
            seen = hand_out(now, s, p)
            if slot[GENERATED] == 0:
                slot[FIRST] = seen
            else:
                c[DECODE_TOKENS] += 1
                note_chunk(seen - slot[LAST], 1, 1, c, chunk_histogram, token_histogram)
            slot[GENERATED] += 1
            slot[LAST] = seen
            if slot[GENERATED] == slot[OUTPUT]:
                finish(slot, seen, s, p, freed, c, done, finished)
                finished += 1
            else:
                at = s[RUNNING]
                running[at] = slot
                left[at] = slot[OUTPUT] - slot[GENERATED]
                x1[at], x2[at] = slot[X1], slot[X2]
                s[RUNNING] += 1
                s[SUM] += slot[CACHED]
        s[USED] -= gone
        timeline[3, (now // 1000) // c[BUCKET_NS]] += out
        second = now // 10**12
        if second != c[SECOND]:
            c[SECOND] = second
            c[SECOND_TOKENS] = 0
        c[SECOND_TOKENS] += out
        c[PEAK_SECOND] = max(c[PEAK_SECOND], c[SECOND_TOKENS])
    return finished


advance = _compile(_advance)


class Kernel:
    """A run in progress, compiled; see `specsim.simulation_reference.Reference`."""

    def __init__(self, server: Server, clients: int = 0) -> None:
        self.server = server
        costs = server.costs
        self._pending = np.zeros((0, 6), dtype=np.int64)
        self._fed = 0
        self._state = np.zeros(STATES, dtype=np.int64)
        self._state[UNUSED] = clients
        mixed = int(server.policy == "mixed")
        self._parameters = np.asarray(
            [
                mixed,
                server.max_running,
                server.chunk_tokens,
                server.kv_tokens,
                server.overlap,
                costs.most_rows,
                clients,
                round(server.overhead_s * 1e12),
                round(server.chunk_s * 1e12),
                round(costs.lead),
                *costs.led,
            ],
            dtype=np.int64,
        )
        self._ratio = np.asarray([INIT_RATIO])
        self._running, self._retracted, self._plan = (
            np.zeros((server.max_running + 1, COLUMNS), dtype=np.int64) for _ in range(3)
        )
        self._left, self._x1, self._x2 = (np.zeros(server.max_running + 1, dtype=np.int64) for _ in range(3))
        self._partial = np.zeros((1, COLUMNS), dtype=np.int64)
        self._take = np.zeros(server.max_running + 1, dtype=np.int64)
        self._freed = np.zeros(clients + 1, dtype=np.int64)
        self._thresholds = np.asarray([int(x * M1) for x in server.survival], dtype=np.int64)
        self._by_batch = tuple(np.ascontiguousarray(t, dtype=np.int64) for t in (costs.rows, costs.drafts))
        tables = (costs.contexts, costs.step, costs.base, costs.tokens, costs.reach, costs.prefill)
        self._tables = tuple(np.ascontiguousarray(t, dtype=np.float64) for t in tables)
        self.counters = np.zeros(len(COUNTERS), dtype=np.int64)
        self.counters[BUCKET_NS] = FIRST_BUCKET
        self.chunk_histogram = np.zeros(BINS, dtype=np.int64)
        self.token_histogram = np.zeros(BINS, dtype=np.int64)
        self.timeline = np.zeros((4, BUCKETS), dtype=np.int64)

    def feed(self, block: Requests, x1: Ints, x2: Ints) -> None:
        """Append requests; x1 and x2 seed the draws of each."""
        numbers = np.arange(self._fed, self._fed + len(block))
        fresh = np.column_stack([numbers, block.arrival, block.input_tokens, block.output_tokens, x1, x2])
        head, tail, released = self._state[[HEAD, TAIL, RELEASED]].tolist()
        self._pending = np.concatenate([self._pending[head:tail], self._pending[released:], fresh])
        self._state[HEAD] = 0
        self._state[[TAIL, RELEASED]] = tail - head
        self._fed += len(block)

    def advance(self, last: bool) -> Ints:
        """Run until more requests must be known, or with `last` to the end. Returns what completed: (n, DONE_FIELDS)."""
        done = np.zeros((len(self._pending) + self.server.max_running + 1, len(DONE_FIELDS)), dtype=np.int64)
        n = advance(
            last, self.server.prefix_rate, self._pending, self._state, self._parameters, self._ratio, self._running, self._left, self._x1, self._x2,
            self._partial, self._retracted, self._freed, self._plan, self._take, self._thresholds, *self._by_batch, *self._tables,
            self.counters, self.chunk_histogram, self.token_histogram, self.timeline, done,
        )  # fmt: skip
        return done[:n]
