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
answers (E[min] / E of two answers: 1 and 1/2). So bunches count by twice that share. A bunch ends where places do (`specsim.busy_periods`,
`specsim.sharing`), and where these are few its shape matters (`specsim.bunches`); beyond the limit of running requests they wait, by Pollaczek-Khinchine. Little's law gives times from numbers.
Where prompts ride in the steps that decode nobody stands still: those steps take longer, the more of them the sooner after one's own
prompt (`specsim.riding`), and no token takes longer than the widest of them. Nothing is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim import gathering
from specsim.gathering import Steps, numbers
from specsim.preemption import FullMemory
from specsim.riding import Mixing
from specsim.sharing import MOST_WORK, Crowd, Shared, shared

Array = NDArray[np.float64]
SETTLED = 5  # rounds after which the number that a full memory holds stands still
BEYOND = 8  # times as many prompts as fit a step that are looked at
BEYOND_ROW = 64  # prompts of a row that are looked at
SEEN = 24  # batches at which prefills are looked at
RATES = 6  # rates at which prompts beside one's own answer are looked at
SLOWER = 0.1  # share of the tokens a second that is lost beyond the largest graph, to speak of it
INSTANT = 1e-9  # of a step: how long nothing lasts
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
    def whole_cv2(self) -> float:
        """How prompts and answers vary together, which are taken to be independent: variance over the square of the mean."""
        whole = self.input_tokens + self.output_tokens
        return (self.input_cv2 * self.input_tokens**2 + self.output_cv2 * self.output_tokens**2) / whole**2

    def held_cv2(self, kept: float = 0.0) -> float:
        """How the tokens vary that one running request holds, a share `kept` of those still to come among them: variance over the square of
        the mean. It is met at any moment of its life, and the longer its answer the more often (answers being Gamma distributed)."""
        answer = self.output_tokens * (1 + self.output_cv2)  # of one that is met: E[O^2] / E[O]
        square = self.output_tokens * answer * (1 + 2 * self.output_cv2)  # E[O^3] / E[O]
        mean = self.input_tokens + (1 + kept) / 2 * answer
        prompts = self.input_tokens**2 * (1 + self.input_cv2)
        whole = prompts + (1 + kept) * self.input_tokens * answer + (1 + kept + kept**2) / 3 * square
        return whole / mean**2 - 1

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
    a KV cache that is full before all places are taken, where the engine then preempts. held: requests that the KV cache holds on average, where that
    is fewer than there are places, and crowd: those that it does while others wait all the time (as the engine counts them: vLLM starts what fits). graphs: the largest batch that has a graph, by
    draft length. lead_s: host time before a prefill while no step runs. scatter: variance of the tokens of a cycle over the square of their mean.
    uneven: where the KV cache ends before places do and lengths vary, how what running requests hold varies: variance over the square of the mean. fits: prompts
    whose tokens fill a prefill step."""

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
    held: float = math.inf
    crowd: float = math.inf
    lead_s: float = 0.0
    scatter: float = 0.0
    uneven: float = 0.0
    fits: float = 1.0

    @property
    def varies(self) -> float:
        """How the prefills of single prompts vary: variance of their seconds over the square of the mean."""
        return self.requests.input_cv2 if self.spread is None else self.spread

    @property
    def most_running(self) -> int:
        return len(self.step)

    @property
    def places(self) -> float:
        """Requests that run at once at most, on average where memory ends first."""
        return min(float(self.most_running), self.held)

    def capacity(self, accept_length: ArrayLike | None = None) -> Array:
        """Requests a second at most, by accept length."""
        return self.crowded(accept_length)[0]

    def crowded(
        self, accept_length: ArrayLike | None = None, taken: ArrayLike | None = None
    ) -> tuple[Array, Array, Array]:
        """(requests a second at most, how many fewer run meanwhile than there are places: those that are prefilled, and how many are together), by accept
        length: every place `taken` (those of a queue that lasts, where it is not said), and prompts prefilled as places fall free.

        A step ends a Poisson number of sequences, m on average, whose places are filled in one prefill: m / (1 - e^-m) if any. Where
        places are `late` the first prefill after a rest fills those of one step, the second those of two, each more those of one,
        until none ended. A budget of tokens holds decoding rows and prompts: no more run than leave room for the prompts that
        replace them. Where memory is full, preempted prompts are prefilled again, as far as the budget leaves room.
        """
        steps = self._steps(accept_length)[..., -1]
        if taken is None:
            taken = self.places if math.isinf(self.crowd) else self.crowd
        taken = np.asarray(taken, dtype=float)
        places = np.minimum(taken, self.budget / (self.rows + self.prompt / steps))
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
        beside = np.maximum(running - group, 0.0)  # decode while they are prefilled
        prefill = self._alone(group) - self._saved(beside, group) / group
        step = np.interp(running, np.arange(1, len(self.step) + 1), self.step)
        most = np.asarray(1 / (held * step / places + (1 + again) * prefill))
        of_others = np.interp(beside, np.arange(len(self.step) + 1), np.concatenate([[0.0], self.step]))
        steps_too = 0.0 if self.mixing is None else self.chunks * of_others  # they ride in steps that decode
        passing = np.minimum(most * (1 + again) * (group * prefill + steps_too), places)
        return most, passing + np.maximum(self.places - taken, 0.0), np.broadcast_to(group, most.shape)

    def queued(self, r: Array, accept_length: ArrayLike | None) -> tuple[Array, Array, Array]:
        """`crowded` of the queues that there are at rates r (p,). Fewer run in waves than apart, and these take a life to build: a queue is met that lasts
        E[B^2] / E[B] of the busy periods B of a server whose services take 1 / limit seconds, and so many lives."""
        found = self.crowded(accept_length)
        if not self.crowd < self.places:
            return found
        longest, built = found[0], np.zeros_like(r)
        life = (self._steps(accept_length)[..., -1] + self.late) * self.step[-1]
        for _ in range(SETTLED):
            found = self.crowded(accept_length, self.places + (self.crowd - self.places) * built)
            free = 1 - np.minimum(r, longest) / found[0]
            lasts = (1 + self.requests.output_cv2) / found[0] / np.maximum(free, 1e-9) ** 2
            built = np.exp(-life / lasts)
        return np.where(r < longest, found[0], longest), *found[1:]

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
        crowd = self.crowd if math.isinf(self.crowd) else min(self.crowd, places)
        uneven = self.uneven if self.held < places else 0.0
        return replace(self, step=self.step[:places], accept_length=gained, memory=None, crowd=crowd, uneven=uneven)

    def accepting(self, survival: Array) -> Server:
        """The server with a chance survival[j] that at least j + 1 drafted tokens are accepted in a cycle."""
        return replace(self, accept_length=1 + float(np.sum(survival)), scatter=scatter(survival))

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

        running = (held.weight[:, 1:] * n).sum(axis=1) + held.standing.sum(axis=1)
        taken = state.mean(state.steps)
        if self.mixing is not None:  # no token takes longer than the widest step
            running = np.minimum(
                running, r * taken * state.mean(n * self.widest[1:]) / np.maximum(state.mean(n), 1e-300)
            )
        gained = max(self.requests.output_tokens - 1, 0.0)
        tpot = running / r * (1 - 1 / taken) / gained if gained else np.zeros_like(r)
        # One by one, as in an M/G/1 queue. A prompt with another before it and one behind ends within a step that is full.
        busy = np.minimum(mean(prefills.busy), MOST_WORK)
        before = busy * mean(prefills.each * held.waited) * (1 + self.varies) / (2 * (1 - busy))
        ttft = (
            held.waiting / r
            + mean(prefills.first)
            + before
            + busy**2 * mean(prefills.full * held.waited) * self._cut(busy)
        )
        working = 1 - held.clock[:, 0]
        ttft = ttft + self.lead_s * (1 - working)

        def served(values: Array, otherwise: float = math.inf) -> Array:
            return np.where(held.stable, values, otherwise)

        return Point(r, served(running), served(held.waiting), served(tpot), served(ttft), served(working, 1.0))

    def _cut(self, busy: Array) -> Array:
        """Share of a full step that is left when a prompt ends in it, where prompts of a row follow each other without pause: of the j-th, those
        of a geometric row at `busy` (p,)."""
        place = np.arange(1.0, BEYOND_ROW + 1)
        chance = busy[:, None] ** (place - 1)
        return np.asarray((chance * self.left_of_step(place)).sum(axis=1) / chance.sum(axis=1))

    def left_of_step(self, place: Array) -> Array:
        """Share of a full step that is left when the j-th prompt of a row ends in it: where prompts vary, half."""
        ends = place / self.fits
        kept = np.exp(-2 * math.pi**2 * self.requests.input_cv2 * place / self.fits**2)
        return np.asarray(kept * (np.ceil(ends - 1e-9) - ends) + (1 - kept) / 2)

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

    def state(self, r: Array, accept_length: ArrayLike | None = None) -> State:
        """How many run at rates r (p,), and what prefill does while they do."""
        steps = np.atleast_2d(self._steps(accept_length))
        places = np.minimum(np.arange(1.0, len(self.step) + 1), self.places)
        kept = steps + self.late  # steps that a place is taken for
        n = places * steps / kept
        prefills = self._prefills(r)
        limit, passing, group = (np.broadcast_to(x, r.shape) for x in self.queued(r, accept_length))
        each = kept * np.interp(n, np.arange(1, len(self.step) + 1), self.step) / places
        crowd = Crowd(
            r, each, n, prefills.work, prefills.growing, self.places, limit, passing, group, len(self.prefill),
            float(self.prefill[0]), self.requests.alike, self.requests.output_cv2, self.varies, uneven=self.uneven,
        )  # fmt: skip
        if self.mixing is None:
            return State(r, steps, n, each, prefills, shared(crowd))
        last = np.broadcast_to(steps[:, -1], r.shape)
        room = self.budget / (self.rows + self.prompt / last)
        state = State(
            r,
            steps,
            n,
            each,
            prefills,
            shared(replace(crowd, window=last / 2 / self.chunks, room=room, in_step=self.chunks > 1)),
        )
        return replace(state, held=replace(state.held, standing=state.held.standing + self._riding(state, self.mixing)))

    def _riding(self, state: State, mixing: Mixing) -> Array:
        """(p, N + 1) requests more that run since the steps of an answer have prompts beside them, as if these stood still."""
        r, weight = state.rate, state.held.weight
        seen = np.flatnonzero(state.held.stable)
        if not len(seen):
            return np.zeros_like(weight)
        at = seen[np.unique(np.linspace(0, len(seen) - 1, RATES).round().astype(np.int64))]
        step, found = np.concatenate([self.step[:1], self.step]), []
        for i in at:
            running, steps = state.mean(state.decoding)[i], state.mean(state.steps)[i]
            alone = float(np.interp(running, np.arange(len(step)), step))
            riding = mixing.riding(running, alone, self.budget, r[i], self.prompt)
            found.append(riding.longer(steps - 1) * steps / max(steps - 1, 1e-9))  # its first step is its prompt's
        return np.asarray(weight * state.held.beside * (r * np.interp(np.arange(len(r)), at, found))[:, None])

    def _prefills(self, r: Array) -> _Prefills:
        """Prefills at rates r (p,), by how many decode: looked at for `SEEN` batches, and on straight lines between them; once for each rate,
        whatever the accept lengths beside it."""
        r, each_rate = np.unique(r, return_inverse=True)
        n = np.arange(len(self.step) + 1)
        seen = self.seen
        step = np.concatenate([[INSTANT * self.step[0]], self.step])[seen]  # none decode: a prompt waits for nothing
        running = seen.astype(float)
        steps = self.steps_of(r[:, None], step, running)
        growing = np.clip(steps.growing, 0.0, 1.0)
        first, busy, each, full = self._first(r[:, None], step, running, steps)
        return _Prefills(
            *(
                np.asarray([np.interp(n, seen, row) for row in by])[each_rate]
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
        ended = running / np.ravel(self._steps(None))[-1]  # in a step
        taken = np.minimum(prompts, np.maximum(self.places - running + ended, 1.0)[:, None])  # that find a place
        alone = np.interp(taken, prompts, alone[prompts])
        saved = self._saved(running[:, None], taken)
        added = np.asarray(np.maximum(alone - saved, 0.1 * alone) * (prompts > 0))
        with_them = step[:, None] * (prompts == 0) if self.mixing is None else step[:, None]
        spread = np.asarray(slope**2 * taken * self.requests.input_cv2)
        return gathering.steps_of(
            r, prompts, added + with_them, added, spread, taken, self.fits, self.requests.input_cv2
        )


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
class State:
    """The steady state at rates r (p,), by how many places are taken. steps: that a request takes part in; decoding: sequences that decode
    while 1, 2, ... places are taken, and each: seconds of decoding after which one of them leaves."""

    rate: Array
    steps: Array
    decoding: Array
    each: Array
    prefills: _Prefills
    held: Shared

    def mean(self, values: Array) -> Array:
        """(p,) values by how many places are taken, while any is."""
        weight = self.held.weight[:, 1:]
        return np.asarray((weight * values).sum(axis=1) / np.maximum(weight.sum(axis=1), 1e-300))

    def among(self, first: int, last: int) -> State:
        """The state while `first` to `last` places are taken, both included."""
        held, taken = self.held, np.arange(self.held.weight.shape[1])
        inside = (taken >= first) & (taken <= last)
        total = np.maximum((held.weight * inside).sum(axis=1), 1e-300)
        weight, clock, standing = (x * inside / total[:, None] for x in (held.weight, held.clock, held.standing))
        waiting = held.waiting / total * inside[-1]
        return replace(self, held=replace(held, weight=weight, clock=clock, standing=standing, waiting=waiting))

    @property
    def crossings(self) -> Array:
        """(p, N) how often a second the number of places taken goes from n up to n + 1, and as often back down, for n from 0."""
        return np.asarray(self.held.clock[:, 1:] / self.each)


def scatter(survival: Array) -> float:
    """Variance of the tokens that a cycle gives over the square of their mean."""
    mean, square = 1 + survival.sum(), 1 + (survival * (2 * np.arange(1, len(survival) + 1) + 1)).sum()
    return float(square / mean**2 - 1)
