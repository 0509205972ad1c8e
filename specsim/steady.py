"""The steady state of one server under a Poisson load, in closed form (docs/planning.md has the derivation).

Decoding stops while prompts are prefilled. While n sequences decode, prefill takes rho(n) of the time, and by the clock that runs
only while the server decodes, requests come in bunches: those whose prompts were prefilled without pause. What counts of bunches is
how the requests that come within a long time vary: I times as much as Poisson ones, and since b = rate / (1 - rho) come by that
clock, and a rate that is off by a share is off by I^(1/2) times that share there,

    I^(1/2) = d ln b / d ln rate = 1 + E rho / (1 - rho)      E = d ln rho / d ln rate

(E is 1 where each prompt costs the same, and the bunches are the customers of M/D/1 busy periods; it is less where prompts that come
together cost less.) Here bunches are geometric with q / (1 - q) = (I - 1) / 2 beyond the first. Requests share a decode step
equally: n of them leave at g(n) = n / (T S(n)), where S(n) is the time of a step of n sequences and T the steps that each needs. Then

    p(n) = A(n - 1) / g(n)      A(n) = A(n - 1) (q + b' / g(n))      b' = b (1 - q)

holds exactly for exponential work (level crossing). Without prefill (q = 0) it is Cohen's processor sharing, which holds whatever
the distribution of lengths (Acta Informatica 12, 1979). With it lengths matter: requests of a bunch whose answers are equally
long stay together until they leave, and the variance that bunches add to the number running is twice that of exponential
answers (E[min] / E of two answers: 1 and 1/2). So bunches count by twice that share. A bunch ends where places do, which cuts the long tail of
busy periods (`specsim.busy_periods`): of prompts that are prefilled one by one or beside decoding, for the chain above; of all, for those that stand still meanwhile.
Beyond the limit of running requests they
wait, by Pollaczek-Khinchine. Little's law gives times from numbers. Where prompts ride in the steps that decode, no token takes
longer than those steps do. Nothing is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim import gathering
from specsim.busy_periods import within
from specsim.errors import InputError
from specsim.gathering import Steps, numbers
from specsim.machine import Machine
from specsim.preemption import FullMemory
from specsim.scenarios import Scenario
from specsim.simulation_costs import (
    Ranges,
    acceptance_of,
    base_seconds,
    cache_limits,
    default_chunk,
    lanes,
    lead_seconds,
    longest,
    prefill_seconds,
    rows_of,
    running_limit,
    step_seconds,
)

Array = NDArray[np.float64]
WIDTHS = 64  # numbers of rows at which a mixed step is worked out
MOST_RUNNING = 4096  # running requests that are looked at; engines admit fewer in all but name
SETTLED = 5  # rounds after which the number that a full memory holds stands still
BEYOND = 8  # times as many prompts as fit a step that are looked at
SEEN = 24  # batches at which prefills are looked at
SLOWER = 0.1  # share of the tokens a second that is lost beyond the largest graph, to speak of it
NODES = 16  # lengths of prompts that are looked at, where they vary
INSTANT = 1e-9  # of a step: how long nothing lasts
MOST_WORK = 1 - 1e-6  # share of time that prefill takes
WAIT = 1.5  # steps from an arrival to its prefill while the server decodes: the rest of the running one, and the next (overlap)


@dataclass(frozen=True)
class Requests:
    """What arrives: mean tokens of a request's prompt and answer (each at least 1), and how they vary: variance over the
    square of the mean. prefix_rate: share of each prompt in the prefix cache, in [0, 1)."""

    input_tokens: float
    output_tokens: float
    input_cv2: float = 0.0
    output_cv2: float = 0.0
    prefix_rate: float = 0.0

    @property
    def context(self) -> float:
        """Cached tokens of a running request, averaged over its life. Long answers are met running more often: the half of an
        answer counts E[O^2] / E[O]^2 times."""
        return self.input_tokens + self.output_tokens / 2 * (1 + self.output_cv2)

    @property
    def alike(self) -> float:
        """The shorter of two answers over the mean answer: 1 / (1 + coefficient of variation), which is exact for answers of one
        length (1) and for exponential ones (1/2), and 5 % from it for uniform ones (2/3)."""
        return 1 / (1 + math.sqrt(self.output_cv2))


@dataclass(frozen=True)
class Point:
    """A server at a rate; every field has the shape of the rates asked for. Infinite where the load is not served.

    running: requests that decode, mean; waiting: for a place among them; tpot_s: per output token after the first;
    ttft_s: to the first token; busy: share of time with work.
    """

    rate: Array
    running: Array
    waiting: Array
    tpot_s: Array
    ttft_s: Array
    busy: Array


@dataclass(frozen=True)
class Server:
    """One replica. step[n - 1]: seconds of a decode step or cycle of n sequences, which gives each accept_length[n - 1] tokens
    (or one number for all n); prefill[g - 1]: seconds a request when g prompts are prefilled together, in `chunks` steps.
    fill: seconds of a prefill step that is full, where prompts do not share one as a rule.
    mixing: what a prefill step saves by riding in a decode step, where the engine mixes them (vLLM), and budget: tokens of such a
    step, of which a sequence takes `rows` and a prompt `prompt`. late: a place that falls free while requests wait is filled one
    step later (SGLang). spread: variance of a prompt's prefill over the square of its mean; None: that of its tokens. memory:
    a KV cache that is full before all places are taken, where the engine then preempts. graphs: the largest batch that has a graph, by
    draft length. lead_s: host time before a prefill while
    no step runs. scatter: variance of the tokens of a cycle over the square of their mean."""

    requests: Requests
    step: Array
    prefill: Array
    accept_length: Array | float
    gpus: int
    chunks: float = 1.0
    fill: float = 0.0
    mixing: Mixing | None = None
    budget: float = math.inf
    rows: float = 1.0
    prompt: float = 0.0
    late: bool = False
    spread: float | None = None
    memory: FullMemory | None = None
    graphs: tuple[int, ...] = ()
    lead_s: float = 0.0
    scatter: float = 0.0

    @property
    def varies(self) -> float:
        """How the prefills of single prompts vary: variance of their seconds over the square of the mean."""
        return self.requests.input_cv2 if self.spread is None else self.spread

    @property
    def most_running(self) -> int:
        return len(self.step)

    def capacity(self, accept_length: ArrayLike | None = None) -> Array:
        """Requests a second at most, by accept length: every place taken, and prompts prefilled as places fall free.

        A step ends a Poisson number of sequences, m on average, whose places are filled in one prefill: m / (1 - e^-m) if any. Where
        places are `late` the first prefill after a rest fills those of one step, the second those of two, each more those of one,
        until none ended. A budget of tokens holds decoding rows and prompts: no more run than leave room for the prompts that
        replace them. Where memory is full, preempted prompts are prefilled again, as far as the budget leaves room.
        """
        steps = self._steps(accept_length)[..., -1]
        places = np.minimum(float(self.most_running), self.budget / (self.rows + self.prompt / steps))
        again = np.zeros_like(places)  # prompts that are prefilled again for each request
        for _ in range(SETTLED if self.memory is not None else 0):
            assert self.memory is not None
            again = self.memory.again(places / steps)
            places = np.minimum(places, self.memory.places(steps, again))
            room = (self.budget / places - self.rows) * steps / self.prompt - 1
            again = np.clip(room, 0.0, again / self.memory.prompt)
        held = steps + self.late
        running, ended = places * steps / held, places / held
        none = np.maximum(np.exp(-ended), 1e-300)  # of them end in a step
        rest = (1 - none**2) / none if self.late else 0.0
        opened = 1 - none if self.memory is None else self.memory.opened(ended)
        group = ended * ((1 + again) / opened + (2 + rest) * self.late) / (1 + rest)
        group = np.clip(group, 1.0, len(self.prefill))
        prefill = self._alone(group) - self._saved(running, group) / group
        n = np.arange(1, len(self.step) + 1)
        return np.asarray(1 / (held * np.interp(running, n, self.step) / places + (1 + again) * prefill))

    def _steps(self, accept_length: ArrayLike | None) -> Array:
        """Decode steps that a request would take part in at each batch, (accept lengths, 1) for those given or (batch,) for the
        server's own; under overlap it stays for one step after its last token."""
        given = None if accept_length is None else np.asarray(accept_length, dtype=float)[..., None]
        length = np.broadcast_to(self.accept_length, self.step.shape) if given is None else given
        return np.asarray((self.requests.output_tokens - 1) / length + 1)

    def _alone(self, group: Array) -> Array:
        """Seconds a prompt that `group` prompts take which are prefilled together."""
        groups = np.arange(1, len(self.prefill) + 1)
        return np.asarray(np.interp(group, groups, groups * self.prefill) / group)

    def _saved(self, running: Array, group: Array) -> Array:
        """Seconds that the steps of a prefill of `group` prompts save by riding in decode steps of `running` sequences."""
        return np.zeros_like(running) if self.mixing is None else self.chunks * self.mixing.saved(running, group)

    @property
    def crest(self) -> int:
        """Sequences beyond which decoding has no graph, and at first is so much slower that fewer tokens come a second, by a tenth
        at least. All of them where there is no such number."""
        pace = np.arange(1, len(self.step) + 1) * self.accept_length / self.step
        least = np.minimum.accumulate(pace[::-1])[::-1]  # from there on
        lost = {n: 1 - least[n - 1] / pace[n - 1] for n in self.graphs if n < len(self.step)}
        found = max(lost, key=lambda n: lost[n], default=0)
        return found if found and lost[found] > SLOWER else len(self.step)

    def capped(self, places: int) -> Server:
        """The server with so many places, fewer than it has."""
        if places >= len(self.step):
            return self
        gained = np.broadcast_to(self.accept_length, self.step.shape)[:places]
        return replace(self, step=self.step[:places], accept_length=gained, memory=None)

    def accepting(self, survival: Array) -> Server:
        """The server with a chance survival[j] that at least j + 1 drafted tokens are accepted in a cycle."""
        return replace(self, accept_length=1 + float(np.sum(survival)), scatter=_scatter(survival))

    def at(self, rate: ArrayLike, accept_length: ArrayLike | None = None) -> Point:
        """The steady state at arrival rates (requests a second) and accept lengths, which broadcast to one axis."""
        r = np.atleast_1d(np.asarray(rate, dtype=float))
        steps = np.atleast_2d(self._steps(accept_length))
        return self.point(self.state(np.broadcast_to(r, np.broadcast_shapes(r.shape, steps.shape[:1])), accept_length))

    def point(self, state: State) -> Point:
        """What requests see in a steady state."""
        r, n, prefills, held = state.rate, state.decoding, state.prefills, state.held

        def mean(values: Array) -> Array:
            return np.asarray((held.weight * values).sum(axis=1))

        decoding = held.weight[:, 1:]
        running = (decoding * n).sum(axis=1) + mean(prefills.work * held.bunch)
        taken = (decoding * state.steps).sum(axis=1) / np.maximum(decoding.sum(axis=1), 1e-300)
        if self.mixing is not None:  # prompts slow decoding no more than by filling its steps
            slow = (decoding * n * self.beside(r)[:, 1:]).sum(axis=1)
            slow = slow / np.maximum((decoding * n).sum(axis=1), 1e-300)
            running = np.minimum(running, r * taken * slow)
        gained = max(self.requests.output_tokens - 1, 0.0)
        tpot = running / r * (1 - 1 / taken) / gained if gained else np.zeros_like(r)
        # One by one, as in an M/G/1 queue. A prompt with another before it and one behind ends within a step that is full.
        busy = np.minimum(mean(prefills.busy), MOST_WORK)
        before = busy * mean(prefills.each) * (1 + self.varies) / (2 * (1 - busy))
        ttft = held.waiting / r + mean(prefills.first) + before + busy**2 * mean(prefills.full) / 2
        working = 1 - held.weight[:, 0] * (1 - prefills.work[:, 0])
        ttft = ttft + self.lead_s * (1 - working)

        def served(values: Array, otherwise: float = math.inf) -> Array:
            return np.where(held.stable, values, otherwise)

        return Point(r, served(running), served(held.waiting), served(tpot), served(ttft), served(working, 1.0))

    @property
    def widest(self) -> Array:
        """Seconds of a step whose budget prompts fill while 0, 1, ... sequences decode (n,): infinite where prefill has steps of
        its own."""
        running = np.arange(len(self.step) + 1.0)
        if self.mixing is None:
            return np.full_like(running, np.inf)
        left = np.maximum(self.budget - self.rows * running, self.rows)
        alone = np.interp(left, self.mixing.tokens, self.mixing.seconds)
        step = np.concatenate([[0.0], self.step])
        return np.asarray(step + np.maximum(alone - self.mixing.saved(running, left / self.mixing.prompt), 0.0))

    def beside(self, r: Array) -> Array:
        """The most seconds that steps right after a prompt's last one take on average (p, n), where decoding goes on beside prompts.
        A customer of an M/G/1 queue leaves others behind as often as the queue is busy, and steps later on have fewer prompts."""
        full, step = self.widest, np.concatenate([[0.0], self.step])
        left = np.maximum(self.budget - self.rows * np.arange(len(full)), self.rows)
        busy = np.minimum(r[:, None] * full * self.prompt / left, 1.0)
        return np.asarray(step + busy * (full - step))

    def state(self, r: Array, accept_length: ArrayLike | None = None) -> State:
        """How many run at rates r (p,), and what prefill does while they do."""
        steps = np.atleast_2d(self._steps(accept_length))
        places = np.arange(1, len(self.step) + 1, dtype=float)
        kept = steps + self.late  # steps that a place is taken for
        n = places * steps / kept
        prefills = self._prefills(r)
        limit = np.broadcast_to(self.capacity(accept_length), r.shape)
        each = kept * np.interp(n, places, self.step) / places
        return State(r, steps, n, each, prefills, _shared(r, prefills, each, limit, self))

    def _prefills(self, r: Array) -> _Prefills:
        """Prefills at rates r (p,), by how many decode: looked at for `SEEN` batches, and on straight lines between them."""
        n = np.arange(len(self.step) + 1)
        seen = self.seen
        step = np.concatenate([[INSTANT * self.step[0]], self.step])[seen]  # none decode: a prompt waits for nothing
        running = seen.astype(float)
        steps = self.steps_of(r[:, None], step, running)
        growing = np.clip(steps.growing, 0.0, 1.0)
        first, busy, each, full = self._first(r[:, None], step, running, steps)
        return _Prefills(
            *(
                np.asarray([np.interp(n, seen, row) for row in by])
                for by in (steps.work, growing, first, busy, each, full)
            )
        )

    @property
    def seen(self) -> NDArray[np.int64]:
        """Batches at which prefills are looked at."""
        return np.unique(np.concatenate([[0], np.geomspace(1, len(self.step), SEEN).round().astype(np.int64)]))

    def _first(self, r: Array, step: Array, running: Array, steps: Steps) -> tuple[Array, ...]:
        """`_Prefills.first` to `full` while `running` sequences decode in `step` seconds."""
        if len(self.prefill) > 1:  # all that come in one step are prefilled in the next but one
            first = steps.first_s
            nobody = np.zeros_like(first)
            return first, nobody, nobody, nobody
        own = np.full_like(steps.work, self.prefill[0])
        busy, each, full = steps.work, own, np.full_like(own, self.fill)
        if self.mixing is not None:  # the prompt's steps decode as well; those in a row are full, and decode as well
            own = own + np.maximum(self.chunks * step - self._saved(running, np.ones_like(running)), 0.0)
            left = np.maximum(self.budget - self.rows * running, self.rows)
            full = np.broadcast_to(step + self.fill - self.mixing.saved(running, left / self.mixing.prompt), own.shape)
            each = full * self.prompt / left
            busy = r * each
        return WAIT * step * np.maximum(1 - busy, 0.0) + own, busy, each, full

    def steps_of(self, r: Array, step: Array, running: Array) -> Steps:
        """The steps at rates r (p, 1) while so many sequences (n,) decode in `step` seconds (n,)."""
        most = len(self.prefill)
        every = np.arange((BEYOND * most if most > 1 else most) + 1)  # more than fit a step take several, as one
        alone: Array = every * self.prefill[np.clip(every - 1, 0, most - 1)]
        prompts = numbers(r.max() * np.maximum(alone, step.max()))
        slope = np.asarray(np.append(np.diff(alone), alone[-1] - alone[-2])[prompts])
        alone = np.asarray(alone[prompts])
        saved = self._saved(running[:, None], prompts.astype(float))
        added = np.asarray(np.maximum(alone - saved, 0.1 * alone) * (prompts > 0))
        with_them = step[:, None] * (prompts == 0) if self.mixing is None else step[:, None]
        spread = np.asarray(slope**2 * prompts * self.requests.input_cv2)
        return gathering.steps_of(r, prompts, added + with_them, added, spread)


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


@dataclass(frozen=True)
class _Prefills:
    """Prefills by rate and by how many decode, (p, N + 1). work: share of time that they take; growing: by which share that grows
    with one of the rate; first: seconds to a first token, but for the wait for prompts ahead that are prefilled one by one; and
    for that wait, busy: share of time with a prompt, each: seconds that it takes, full: seconds of a step in a row of them."""

    work: Array
    growing: Array
    first: Array
    busy: Array
    each: Array
    full: Array


@dataclass(frozen=True)
class _Shared:
    """How many share the server. weight[i, n]: share of time in which n places are taken; bunch[i, n]: requests beyond the first in
    a bunch, as far as there are places; waiting: for a place, mean. Where it is not stable, numbers mean nothing."""

    weight: Array
    bunch: Array
    waiting: Array
    stable: NDArray[np.bool_]


@dataclass(frozen=True)
class State:
    """The steady state at rates r (p,), by how many places are taken. steps: that a request takes part in; decoding: sequences that decode
    while 1, 2, ... places are taken, and each: seconds of decoding after which one of them leaves."""

    rate: Array
    steps: Array
    decoding: Array
    each: Array
    prefills: _Prefills
    held: _Shared

    def among(self, first: int, last: int) -> State:
        """The state while `first` to `last` places are taken, both included."""
        weight = np.zeros_like(self.held.weight)
        weight[:, first : last + 1] = self.held.weight[:, first : last + 1]
        total = np.maximum(weight.sum(axis=1), 1e-300)
        waiting = self.held.waiting / total if last == weight.shape[1] - 1 else np.zeros_like(total)
        return replace(self, held=replace(self.held, weight=weight / total[:, None], waiting=waiting))

    @property
    def crossings(self) -> Array:
        """(p, N) how often a second the number of places taken goes from n up to n + 1, and as often back down, for n from 0."""
        leaving = (1 - np.clip(self.prefills.work, 0.0, MOST_WORK))[:, 1:] / self.each
        return np.asarray(self.held.weight[:, 1:] * leaving)


def _shared(r: Array, prefills: _Prefills, each: Array, limit: Array, server: Server) -> _Shared:
    """The distribution at rates r (p,) when n running requests leave one every each[:, n - 1] seconds of decoding. limit: rates
    that can be served."""
    requests = server.requests
    stable = r < limit
    work = np.clip(prefills.work, 0.0, MOST_WORK)
    free = 1 - work
    extra = prefills.growing * work / free
    bunch = extra + extra**2 * (1 + server.varies) / 2  # (I - 1) / 2, of prompts that vary
    free_places = np.arange(bunch.shape[1] - 1, -1.0, -1.0)
    if server.mixing is not None:  # decoding goes on beside prompts: who came first leaves meanwhile
        free_places = np.minimum(free_places, np.ravel(server._steps(None))[-1] * server.budget / server.prompt)
    within_places = bunch * within(extra / (1 + extra), free_places)
    ending = len(server.prefill) == 1 or server.mixing is not None
    counted = 2 * requests.alike * (within_places if ending else bunch)
    q, bunches = counted / (1 + counted), r[:, None] / free / (1 + counted)
    ratio = q[:, 1:] + bunches[:, 1:] * each
    log = np.log(bunches[:, :1] * each) + np.cumsum(np.log(ratio), axis=1) - np.log(ratio)
    log = np.concatenate([np.zeros_like(log[:, :1]), log], axis=1)
    clock = np.exp(log - log.max(axis=1, keepdims=True))  # by the clock of decoding
    weight = clock / free
    weight[:, -1] = clock[:, -1]  # nothing is prefilled while every place is taken
    # Prompts that came while the one was prefilled that took the last place wait for another.
    over = clock[:, -1] / each[:, -1] * bunch[:, -1] * free[:, -1]
    beyond = np.where(stable, (r * weight[:, -1] + over) / np.where(stable, limit - r, 1.0), 0.0)
    total = weight.sum(axis=1) + beyond
    waiting = (1 + requests.output_cv2) / 2 * beyond / (1 - np.where(stable, r / limit, 0.0)) / total
    weight[:, -1] += beyond
    return _Shared(weight / total[:, None], within_places, waiting, stable)


def server_of(
    s: Scenario,
    machine: Machine,
    requests: Requests,
    ranges: Ranges = (),
    *,
    chunk_tokens: int | None = None,
) -> Server:
    """The server of a scenario (its batch and context play no part). Its accept length is the scenario's, 1 without.

    `ranges`: draft lengths by batch, which replace the scenario's. chunk_tokens: of a prefill step, else the engine's.
    Raises InputError when the weights leave no room for the KV cache of
    one request.
    """
    s = longest(s, ranges)
    tokens = float(rows_of(s))
    kv, running = cache_limits(s, running_limit(s))
    chunk = chunk_tokens or default_chunk(s)
    mixed = s.engine.name != "sglang"
    memory = FullMemory(
        kv, requests.input_tokens, requests.output_tokens, requests.context, tokens, requests.output_cv2
    )
    held = int(kv / (requests.context + tokens)) if mixed else memory.reserved
    if mixed:
        running = min(running, max(1, int(chunk / tokens)))
    most = min(running, held, MOST_RUNNING)
    if most < 1:
        raise InputError(
            f"the KV cache holds {kv:,} tokens, a request of {requests.input_tokens + requests.output_tokens:,.0f} does not fit",
            where=f"{s.profile.name}, TP {s.parallel.tp}",
            mend="raise --tp, or take another --hardware",
        )
    cut = lanes(s, most, ranges)
    step, gained, graphs = np.empty(most), np.ones(most), set()
    for one, batches in cut:
        graphs.add(
            max(one.captured("decode" if one.method == "none" else "verify", rows_of(one), beyond=False), default=0)
        )
        at = batches.astype(np.int64) - 1
        step[at] = step_seconds(one, machine, batches, np.asarray(requests.context))
        if one.accept_length is not None:
            gained[at] = one.accept_length.reshape(-1)[0]
    prompt = max(requests.input_tokens * (1 - requests.prefix_rate), 1.0)
    cached = requests.input_tokens * requests.prefix_rate
    together = np.arange(1.0, max(1, int(chunk / prompt)) + 1)

    def prefill(tokens: Array, reach: ArrayLike) -> Array:
        return prefill_seconds(s, machine, tokens, np.asarray(reach), on_average=requests.input_cv2 > 0)

    # g prompts are so many tokens with such weights, in so many steps: what they take is the mean of that, not of the mean.
    sizes, weights = _sums(prompt, requests.input_cv2, together)
    steps = np.maximum(np.ceil(sizes / chunk * (1 - 1e-12)), 1.0)
    share = (1 + requests.input_cv2) / (1 + requests.input_cv2 / together)[
        :, None
    ]  # of a row's own prompt: sum x^2 / (sum x)^2 x g
    average = cached + (sizes / together[:, None] * share + 1) / 2  # tokens that a row attends to
    totals = prefill(sizes - (steps - 1) * chunk, average)
    if steps.max() > 1:
        totals = totals + (steps - 1) * prefill(np.full_like(sizes, chunk), average)
    seconds = (weights * totals).sum(axis=1) / together
    if len(together) > 1:  # more wait than fit: the last one is cut, and the step is full
        of_a_row = (weights[-1] * sizes[-1] * average[-1]).sum() / (weights[-1] * sizes[-1]).sum()
        seconds[-1] = float(prefill(np.asarray([float(chunk)]), of_a_row)[0]) * prompt / chunk
    chunks = float((weights * steps)[0].sum())
    a_step = prompt / chunks
    reach = cached + (prompt * (1 + requests.input_cv2) + 1) / 2  # of a row of any prompt: long ones have more
    fill = 0.0 if len(together) > 1 else float(prefill(np.asarray([float(chunk)]), reach)[0])
    alone = float((weights[0] * totals[0] ** 2).sum() / seconds[0] ** 2 - 1)
    spread = None if len(together) > 1 else alone
    mixing = None
    if mixed:
        base, rows = np.zeros(most + 1), np.zeros(most + 1)
        for one, batches in cut:
            at = batches.astype(np.int64)
            base[at] = base_seconds(one, machine, batches)
            rows[at] = batches * rows_of(one)
        widths = np.geomspace(a_step, chunk + rows[-1], WIDTHS)
        mixing = Mixing(base, rows, a_step, widths, prefill(widths, reach).reshape(-1))
    full = mixed and held < running
    return Server(
        requests,
        step,
        seconds,
        gained,
        s.parallel.tp,
        chunks=chunks,
        fill=fill,
        mixing=mixing,
        budget=float(chunk) if mixed else math.inf,
        rows=tokens,
        prompt=prompt,
        late=not mixed,
        spread=spread,
        memory=memory if full else None,
        graphs=tuple(sorted(graphs - {0})),
        lead_s=float((weights[0] * lead_seconds(s, machine, np.minimum(sizes[0], chunk))).sum()),
        scatter=_scatter(np.asarray(() if s.acceptance is None else acceptance_of(s))),
    )


def _scatter(survival: Array) -> float:
    """Variance of the tokens that a cycle gives over the square of their mean."""
    mean, square = 1 + survival.sum(), 1 + (survival * (2 * np.arange(1, len(survival) + 1) + 1)).sum()
    return float(square / mean**2 - 1)


def _sums(mean: float, cv2: float, counts: Array) -> tuple[Array, Array]:
    """Sums of `counts` Gamma distributed lengths of that mean and variation, as a few values (n, NODES) with weights: the nodes of
    Gauss-Laguerre, from the recurrence of its polynomials (Golub and Welsch, Math. Comp. 23, 1969)."""
    if not cv2:
        return (counts * mean)[:, None], np.ones((len(counts), 1))
    shape = counts[:, None] / cv2
    i = np.arange(NODES)
    matrix = np.zeros((len(counts), NODES, NODES))
    matrix[:, i, i] = 2 * i + shape
    matrix[:, i[1:], i[:-1]] = np.sqrt(i[1:] * (i[1:] + shape - 1))  # the lower half is what eigh reads
    nodes, vectors = np.linalg.eigh(matrix)
    return nodes * mean * cv2, vectors[:, 0, :] ** 2
