"""Sweeps: every combination of scenario options, in one vectorised pass a case and in bounded memory.

    case      a target on a box: one value of each of model, hardware, engine, tp, ep, ...
    setting   how it drafts: method, draft, num_steps, topk, draft tokens; "off" is plain decoding
    cell      one batch and context

Costs are computed once a (cell, setting) on open axes (batch x 1 x 1, 1 x context x 1, settings), and acceptance only
multiplies: speedup = L x D / C. Cells are worked off in blocks, and what is kept of them (which setting is best, break-even,
Pareto fronts) is merged as they come, so memory does not depend on the number of configurations. Rows go to a file as they
come (specsim.sweep_rows).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.acceptance import Acceptance, rate_for_length
from specsim.cycle import evaluate
from specsim.errors import InputError
from specsim.machine import Machine
from specsim.memory import memory_share, rank_kv, rank_state, rank_weights
from specsim.prediction import machine_of
from specsim.quantities import six
from specsim.scenarios import Scenario, no_meaning

Array = NDArray[np.float64]
Options = tuple[tuple[str, Any], ...]  # scenario options by name
DRAFTING = ("method", "draft", "topk", "num_steps")  # options that make settings; all others make cases
COST_VALUES = 2**17  # (cell, setting) pairs priced at once
BLOCK_ROWS = 2**20  # configurations at once
KEPT_LENGTHS = 2**21  # (setting, acceptance) pairs whose lengths are worked out once, not in every block
TASK_ROWS = 2**22  # configurations a task
PART_ROWS = 2**18  # rows a task when they are written: what an interruption costs is seconds
MOST_CASES = 2000
# Values of an axis that maps and fronts keep, evenly thinned, by the number of cases: what is kept stays in tens of MB.
SHOWN = (
    (40, {"batch": 32, "context": 12, "acceptance": 12, "front": 256}),
    (400, {"batch": 12, "context": 4, "acceptance": 4, "front": 64}),
    (MOST_CASES, {"batch": 4, "context": 2, "acceptance": 2, "front": 16}),
)


@dataclass(frozen=True)
class Spec:
    """A sweep: the product of cases, draftings, batches, contexts, draft tokens and acceptances.

    `cases` and `draftings` are scenario options (draftings: those in `DRAFTING`). acceptance: values of `kind`, one of
    "rate", "length", "per_position", "profile", or "" for none. `make` builds a scenario from options.
    """

    make: Callable[[dict[str, Any]], Scenario]
    cases: tuple[Options, ...] = ((),)
    draftings: tuple[Options, ...] = ((),)
    batch: tuple[int, ...] = (1,)
    context: tuple[int, ...] = (2048,)
    draft_tokens: tuple[int, ...] = ()
    kind: str = ""
    acceptance: tuple[Any, ...] = (None,)

    @property
    def planned(self) -> int:
        """Configurations asked for."""
        axes = (self.cases, self.draftings, self.batch, self.context, self.draft_tokens or (0,), self.acceptance)
        return int(np.prod([len(axis) for axis in axes], dtype=object))


@dataclass(frozen=True)
class Setting:
    """One way of drafting. `off` is plain decoding. `drafter` names it where a sweep compares several."""

    method: str
    draft: str
    num_steps: int
    topk: int
    draft_tokens: int
    drafter: str = ""

    @property
    def label(self) -> str:
        """As tables name it."""
        if self.method == "none":
            return "off"
        length = f"{self.draft_tokens}" if self.topk == 1 else f"{self.draft_tokens} (s{self.num_steps} k{self.topk})"
        return f"{self.drafter} {length}".strip()


def named(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """The settings with their drafter where there are several: what tells them apart, the method or the draft model."""
    pairs = {(s.method, s.draft) for s in settings if s.method != "none"}
    if len(pairs) < 2:
        return tuple(settings)
    methods = len({method for method, _ in pairs}) > 1
    by_method = len({method for method, _ in pairs}) == len(pairs)

    def name(s: Setting) -> str:
        return s.method if by_method else " ".join(filter(None, [s.method * methods, s.draft]))

    return tuple(replace(s, drafter=name(s)) for s in settings)


OFF = Setting("none", "", 0, 1, 1)


@dataclass(frozen=True)
class Lane:
    """Settings that one vectorised call prices: a scenario with arrays of draft tokens and steps."""

    scenario: Scenario
    draft_tokens: Array
    num_steps: Array


@dataclass(frozen=True)
class Case:
    """A built case. kind, acceptance: as those of the `Spec`."""

    lanes: tuple[Lane, ...]
    machine: Machine
    settings: tuple[Setting, ...]
    kind: str
    acceptance: tuple[Any, ...]
    notes: tuple[str, ...] = ()

    @property
    def scenario(self) -> Scenario:
        return self.lanes[0].scenario

    def labels(self) -> dict[str, Any]:
        """What tells this case from others, as in a prediction's JSON."""
        s = self.scenario
        return {
            "model": s.names.get("model", s.model.name),
            "hardware": s.names.get("hardware", s.profile.name),
            "engine": s.engine.name,
            "tp": s.parallel.tp,
            "ep": s.parallel.ep,
            "dp_attention": s.parallel.dp,
        }

    def lengths(self, places: slice) -> Array:
        """Accept lengths, (setting, acceptance), of some of the acceptances; nan where none was given, or where the setting cannot
        reach it."""
        return np.concatenate([_lengths(self.kind, self.acceptance[places], lane) for lane in self.lanes])

    def rates(self, lengths: Array) -> Array:
        """The constant accept rates that give accept lengths, (setting, n); nan where none does."""
        out = np.full(lengths.shape, np.nan)
        first = 0
        for lane in self.lanes:
            here = slice(first, first + len(lane.draft_tokens))
            if lane.scenario.method != "none":
                found = rate_for_length(lengths[here].T, lane.num_steps, lane.scenario.topk, lane.draft_tokens)
                out[here] = np.atleast_2d(found).T
            first = here.stop
        return out

    def costs(self, batch: Array, context: Array) -> tuple[Array, Array]:
        """Seconds of a decode step, (batch, context), and of a cycle, (batch, context, setting), on the open axes.

        A setting without speculation has cycles of one decode step.
        """
        shape = (len(batch), len(context))
        parts = []
        decode: Array = np.zeros(shape)
        for lane in self.lanes:
            at = replace(
                lane.scenario,
                batch=batch[:, None, None],
                context=context[None, :, None],
                draft_tokens=lane.draft_tokens,
                num_steps=lane.num_steps,
            )
            c = evaluate(at, self.machine)
            decode = np.broadcast_to(c.decode_s, (*shape, 1))[..., 0]
            cycle = c.decode_s if c.verify is None else c.cycle_s
            parts.append(np.broadcast_to(cycle, (*shape, len(lane.draft_tokens))))
        return decode, np.concatenate(parts, axis=-1)

    def fits(self, batch: Array, context: Array) -> NDArray[np.bool_]:
        """Whether weights and KV cache fit a GPU: (batch, context, setting + 1), plain decoding last (its target alone)."""
        columns = []
        for lane in (*self.lanes, None):
            s = self.scenario if lane is None else lane.scenario
            models = [s.model] if lane is None or s.draft is None else [s.model, s.draft]
            rows = np.ones(1) if lane is None else lane.draft_tokens
            sequences = np.ceil(batch / s.parallel.dp)[:, None, None]
            tokens = context[None, :, None] + rows
            kv = sequences * sum(rank_kv(m, s.parallel, tokens) + rank_state(m, s.parallel) for m in models)
            weights = sum(rank_weights(m, s.parallel) for m in models)
            columns.append(np.asarray(weights + kv <= s.profile.gpu.memory_gb * 1e9 * memory_share(s)))
        return np.concatenate(columns, axis=-1)


# --- cases ----------------------------------------------------------------------------------------------------------


def build_case(spec: Spec, index: int) -> Case:
    """Build one case. Settings that cannot be (a tree of too few nodes, a method without draft) are left out and noted.

    Raises InputError when none is left.
    """
    lanes: list[Lane] = []
    settings: list[Setting] = []
    notes: list[str] = []
    failure: InputError | None = None
    options = dict(spec.cases[index])
    for drafting in spec.draftings:
        for scenario in _scenarios({**options, **dict(drafting)}, spec, notes):
            if isinstance(scenario, InputError):
                failure = failure or scenario
                continue
            d, steps = np.broadcast_arrays(np.atleast_1d(scenario.draft_tokens), np.atleast_1d(scenario.num_steps))
            names = (scenario.method, scenario.names.get("draft", ""))
            for group in _captured_alike(scenario, d, steps):
                made = [Setting(*names, int(steps[i]), scenario.topk, int(d[i])) for i in group]
                new = [i for i, setting in zip(group, made, strict=True) if setting not in settings]
                settings += [Setting(*names, int(steps[i]), scenario.topk, int(d[i])) for i in new]
                if new:
                    lanes.append(Lane(scenario, d[new], steps[new]))
            notes += scenario.warnings
    if spec.kind and lanes and all(lane.scenario.method == "none" for lane in lanes):
        notes.append(no_meaning(f"--accept-{spec.kind.replace('_', '-')}"))
    if not lanes:
        raise failure or InputError("no configuration is left", where="sweep", mend="loosen the lists")
    ends: tuple[Any, ...] = spec.acceptance
    if spec.kind in ("rate", "length"):  # all of them may be a million: what is wrong shows at their ends
        ends = float(np.min(ends)), float(np.max(ends))  # nan where any is
    for lane in lanes:
        _lengths(spec.kind, ends, lane)
    machine, said = machine_of(lanes[0].scenario), tuple(dict.fromkeys(notes))
    return Case(tuple(lanes), machine, named(settings), spec.kind, spec.acceptance, said)


built = functools.lru_cache(maxsize=8)(build_case)


def _scenarios(options: dict[str, Any], spec: Spec, notes: list[str]) -> Iterator[Scenario | InputError]:
    """The scenario with all draft tokens, or one a draft length where some cannot be."""
    tokens: list[Any] = list(spec.draft_tokens)
    speculates = options.get("method") != "none"
    wanted = {**options, "batch": list(spec.batch), "context": list(spec.context)}
    if not tokens or not speculates:
        try:
            yield spec.make(wanted)
        except InputError as error:
            yield _left_out(error, options, notes)
        return
    try:
        yield spec.make({**wanted, "draft_tokens": tokens})
        return
    except InputError as error:
        if len(tokens) == 1:
            yield _left_out(error, options, notes)
            return
    for d in tokens:
        try:
            yield spec.make({**wanted, "draft_tokens": d})
        except InputError as error:
            yield _left_out(error, {**options, "draft_tokens": d}, notes)


def _left_out(error: InputError, options: Mapping[str, Any], notes: list[str]) -> InputError:
    said = " ".join(f"{k}={v}" for k, v in options.items()) or "the default scenario"
    notes.append(f"left out {said}: {error}")
    return error


def _captured_alike(s: Scenario, d: Array, steps: Array) -> Iterator[list[int]]:
    """Places of draft lengths for which the engine captures the same graphs, which one call may price together."""
    if s.method == "none":
        yield [0]
        return
    groups: dict[Any, list[int]] = {}
    for i in range(len(d)):
        groups.setdefault((s.captured("verify", int(d[i])), s.captured("extend", int(d[i]))), []).append(i)
    yield from groups.values()


def _lengths(kind: str, acceptance: Sequence[Any], lane: Lane) -> Array:
    """Accept lengths (setting, acceptance) of a lane. Raises InputError for what is no acceptance."""
    n = len(lane.draft_tokens)
    s = lane.scenario
    if s.method == "none":
        return np.ones((1, len(acceptance)))
    steps, tokens = lane.num_steps[:, None], lane.draft_tokens[:, None]
    if kind == "rate":
        rates = np.asarray(acceptance, dtype=float)
        return np.asarray(Acceptance.constant(rates).length(steps, s.topk, tokens)).reshape(n, -1)
    if kind == "length":
        given = np.asarray(acceptance, dtype=float)
        if np.any(~(given >= 1)):
            raise InputError("is below 1", where="--accept-length", mend="the bonus token counts: give 1 or more")
        return np.where(given <= np.minimum(steps, tokens - 1) + 1, given, np.nan)
    columns = []
    for value in acceptance:
        if value is None:
            columns.append(np.full(n, np.nan))
            continue
        found = Acceptance.per_position(value) if kind == "per_position" else Acceptance.from_profile(value)
        columns.append(np.asarray(found.length(lane.num_steps, s.topk, lane.draft_tokens)).reshape(n))
    return np.stack(columns, axis=-1)


# --- tasks and blocks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A part of a sweep: a case, a slice of its batches and one of its contexts."""

    case: int
    batch: tuple[int, int]
    context: tuple[int, int]


def tasks_of(spec: Spec, cases: Mapping[int, Case], *, written: bool = False) -> list[Task]:
    """The parts of a sweep, in the order of their rows; they do not depend on who runs them."""
    out = []
    most = min(TASK_ROWS, PART_ROWS) if written else TASK_ROWS
    for index, case in cases.items():
        a_context = len(case.settings) * len(spec.acceptance)
        batches = max(1, most // (a_context * len(spec.context)))
        contexts = max(1, most // a_context) if batches == 1 else len(spec.context)
        for b in range(0, len(spec.batch), batches):
            for c in range(0, len(spec.context), contexts):
                ends = min(b + batches, len(spec.batch)), min(c + contexts, len(spec.context))
                out.append(Task(index, (b, ends[0]), (c, ends[1])))
    return out


@dataclass(frozen=True)
class Block:
    """Some cells with their costs, and a slice of the acceptances. Places count from the start of the axes.

    batch, context, decode: (cell,); cycle: (cell, setting); fits: (cell, setting + 1); lengths: (setting, acceptance).
    """

    case: Case
    batch_at: NDArray[np.int64]
    context_at: NDArray[np.int64]
    acceptance_at: NDArray[np.int64]
    batch: Array
    context: Array
    decode: Array
    cycle: Array
    fits: NDArray[np.bool_]
    lengths: Array

    @functools.cached_property
    def rates(self) -> Array:
        """Accept rates, (setting, acceptance)."""
        return self.case.rates(self.lengths)

    @functools.cached_property
    def needed(self) -> Array:
        """Break-even accept length, (cell, setting)."""
        return np.asarray(self.cycle / self.decode[:, None])

    @functools.cached_property
    def speedup(self) -> Array:
        """(cell, acceptance, setting)."""
        return np.asarray(self.lengths.T[None] / self.needed[:, None, :])

    @functools.cached_property
    def breakeven_rate(self) -> Array:
        """(cell, setting); nan where no rate breaks even."""
        columns = []
        for i, setting in enumerate(self.case.settings):
            if setting.method == "none":
                columns.append(np.full(len(self.batch), np.nan))
            else:
                found = rate_for_length(self.needed[:, i], setting.num_steps, setting.topk, setting.draft_tokens)
                columns.append(np.atleast_1d(np.asarray(found)))
        return np.stack(columns, axis=-1)


def blocks(spec: Spec, task: Task) -> Iterator[Block]:
    """The blocks of a task, batch by batch, then context, then acceptance."""
    case = built(spec, task.case)
    m, most = len(case.settings), len(spec.acceptance)
    cells = max(1, COST_VALUES // m)
    (b0, b1), (c0, c1) = task.batch, task.context
    wide = min(c1 - c0, cells)
    high = max(1, cells // wide) if wide == c1 - c0 else 1
    acceptances = max(1, min(most, BLOCK_ROWS // m))
    lengths = case.lengths(slice(None)) if m * most <= KEPT_LENGTHS else None
    for b, c in itertools.product(range(b0, b1, high), range(c0, c1, wide)):
        b_at, c_at = np.arange(b, min(b + high, b1)), np.arange(c, min(c + wide, c1))
        batch = np.asarray([spec.batch[i] for i in b_at], dtype=float)
        context = np.asarray([spec.context[i] for i in c_at], dtype=float)
        decode, cycle = case.costs(batch, context)
        fits = case.fits(batch, context).reshape(-1, m + 1)
        decode, cycle = decode.reshape(-1), cycle.reshape(-1, m)
        b_of, c_of = np.repeat(b_at, len(c_at)), np.tile(c_at, len(b_at))
        batches, contexts = np.repeat(batch, len(c_at)), np.tile(context, len(b_at))
        at_once = max(1, BLOCK_ROWS // (m * acceptances))
        for first in range(0, len(decode), at_once):
            k = slice(first, first + at_once)
            for a in range(0, most, acceptances):
                n = slice(a, min(a + acceptances, most))
                yield Block(
                    case, b_of[k], c_of[k], np.arange(n.start, n.stop), batches[k], contexts[k],
                    decode[k], cycle[k], fits[k], case.lengths(n) if lengths is None else lengths[:, n],
                )  # fmt: skip


# --- what is kept ---------------------------------------------------------------------------------------------------


def shown(spec: Spec, axis: str) -> NDArray[np.int64]:
    """Places of an axis ("front": of the batches, in fronts) that maps keep: all, or as many as `SHOWN` allows, evenly."""
    count = len(spec.batch if axis == "front" else getattr(spec, axis))
    most = next(limits for cases, limits in SHOWN if len(spec.cases) <= cases)[axis]
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


@dataclass
class Digest:
    """What a sweep keeps of its blocks. Digests of parts merge in any grouping to the same."""

    configurations: int = 0
    unreachable: int = 0  # accept lengths that a setting cannot have
    wins: dict[str, int] | None = None  # (cell, acceptance) pairs by the best setting's label; "-": nothing fits
    best: list[dict[str, Any]] | None = None
    breakeven: list[dict[str, Any]] | None = None
    fronts: dict[str, list[list[float]]] | None = (
        None  # "case,context,acceptance" -> [tpot_ms, tokens/s a GPU, batch, setting]
    )

    def add(self, other: Digest) -> None:
        """Merge another digest into this one."""
        self.configurations += other.configurations
        self.unreachable += other.unreachable
        wins = dict(self.wins or {})
        for label, n in (other.wins or {}).items():
            wins[label] = wins.get(label, 0) + n
        self.wins = wins
        self.best = [*(self.best or []), *(other.best or [])]
        self.breakeven = [*(self.breakeven or []), *(other.breakeven or [])]
        fronts = dict(self.fronts or {})
        for key, points in (other.fronts or {}).items():
            fronts[key] = front([*fronts.get(key, []), *points])
        self.fronts = fronts


def front(points: Iterable[list[float]]) -> list[list[float]]:
    """The points that no other beats in both: low first number (latency), high second (throughput); latency rising."""
    kept: list[list[float]] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1], p[2:])):
        if not kept or point[1] > kept[-1][1]:
            kept.append(point)
    return kept


def digest(spec: Spec, task: Task) -> Digest:
    """All that is kept of one task."""
    out = Digest()
    keep = {axis: shown(spec, axis) for axis in ("batch", "context", "acceptance", "front")}
    for block in blocks(spec, task):
        out.add(_digest_of(block, spec, task.case, keep))
    return out


def _digest_of(b: Block, spec: Spec, index: int, keep: Mapping[str, NDArray[np.int64]]) -> Digest:
    case = b.case
    unreachable = int(np.isnan(b.lengths).sum()) * len(b.batch) if spec.kind else 0
    out = Digest(configurations=len(b.batch) * b.lengths.size - unreachable, unreachable=unreachable, fronts={})
    cells = np.flatnonzero(np.isin(b.batch_at, keep["batch"]) & np.isin(b.context_at, keep["context"]))
    if b.acceptance_at[0] == 0:
        out.breakeven = _breakeven(b, index, cells)
    if not spec.kind:
        return out
    off_fits = b.fits[:, -1]
    value = np.where(b.fits[:, None, :-1], b.speedup, -np.inf)
    value = np.where(np.isnan(value), -np.inf, value)
    place = value.argmax(axis=-1)
    best = np.take_along_axis(value, place[..., None], axis=-1)[..., 0]
    off = (best < 1.0) & off_fits[:, None]
    place = np.where(off, len(case.settings), np.where(np.isneginf(best), len(case.settings) + 1, place))
    labels = [*(s.label for s in case.settings), "off", "-"]
    counts = np.bincount(place.reshape(-1), minlength=len(labels))
    out.wins = {}
    for label, n in zip(labels, counts.tolist(), strict=True):
        if n:
            out.wins[label] = out.wins.get(label, 0) + n
    kept = np.flatnonzero(np.isin(b.acceptance_at, keep["acceptance"]))
    out.best = [
        {
            "case": index,
            "batch": int(b.batch[i]),
            "context": int(b.context[i]),
            "acceptance": listed(spec.acceptance[int(b.acceptance_at[j])]),
            "draft_tokens": None
            if place[i, j] > len(case.settings)
            else (*case.settings, OFF)[place[i, j]].draft_tokens,
            "setting": labels[place[i, j]],
            "speedup": None if np.isneginf(best[i, j]) else six(float(best[i, j])),
        }
        for i in cells.tolist()
        for j in kept.tolist()
    ]
    out.fronts = _fronts(b, index, keep["front"], keep["context"], kept)
    return out


def _breakeven(b: Block, index: int, cells: NDArray[np.int64]) -> list[dict[str, Any]]:
    if not len(cells):
        return []
    few = replace(b, **{name: getattr(b, name)[cells] for name in ("batch", "context", "decode", "cycle", "fits")})
    return [
        {
            "case": index,
            "batch": int(few.batch[i]),
            "context": int(few.context[i]),
            "setting": setting.label,
            "draft_tokens": setting.draft_tokens,
            "accept_length": six(float(few.needed[i, j])),
            "accept_rate": None if np.isnan(few.breakeven_rate[i, j]) else six(float(few.breakeven_rate[i, j])),
        }
        for i in range(len(cells))
        for j, setting in enumerate(b.case.settings)
        if setting.method != "none"
    ]


def _fronts(
    b: Block, index: int, batches: NDArray[np.int64], contexts: NDArray[np.int64], acceptances: NDArray[np.int64]
) -> dict[str, list[list[float]]]:
    """Fronts of ms a token against tokens a second and GPU, one a shown context and acceptance."""
    gpus = b.case.scenario.parallel.tp
    m = len(b.case.settings)
    out = {}
    wanted = np.isin(b.batch_at, batches)
    for c in contexts[np.isin(contexts, b.context_at)].tolist():
        here = np.flatnonzero(wanted & (b.context_at == c))
        cycle = np.concatenate([b.cycle[here], b.decode[here, None]], axis=1)
        for j in acceptances.tolist():
            length = np.append(b.lengths[:, j], 1.0)
            tpot = cycle / length * 1e3
            rate = b.batch[here, None] * length / cycle / gpus
            good = b.fits[here] & ~np.isnan(tpot)
            k, setting = np.nonzero(good)
            order = np.lexsort((-rate[good], tpot[good]))
            falling = np.maximum.accumulate(rate[good][order])
            first = np.flatnonzero(np.diff(falling, prepend=-1.0) > 0)
            chosen = order[first]
            points = zip(tpot[good][chosen], rate[good][chosen], b.batch[here][k[chosen]], setting[chosen], strict=True)
            key = f"{index},{c},{int(b.acceptance_at[j])}"
            out[key] = [[float(t), float(r), int(batch), int(x) if x < m else -1] for t, r, batch, x in points]
    return out


def listed(value: Any) -> Any:
    """A value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


# --- any configurations, not a grid ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flat:
    """Costs and worth of a list of configurations; seconds, and tokens a cycle."""

    decode_s: Array
    cycle_s: Array
    accept_length: Array

    @property
    def speedup(self) -> Array:
        return np.asarray(self.accept_length * self.decode_s / self.cycle_s)


def evaluate_many(
    s: Scenario, batch: Array, context: Array, draft_tokens: Array, accept_rate: Array, machine: Machine | None = None
) -> Flat:
    """Price configurations one by one given (four arrays of one length), as chains, in bounded working memory.

    `s` gives all else. The result is what `specsim.cycle.evaluate` says of each alone. Configurations of one batch and
    draft length make a row of a table, rows of about one length are priced together, and only what depends on the context
    is worked out in every place of it.
    """
    machine = machine or machine_of(s)
    n = len(batch)
    order = np.lexsort((batch, draft_tokens))
    b, c, d = batch[order], context[order], draft_tokens[order]
    changes = (np.diff(b) != 0) | (np.diff(d) != 0)
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1, [n]]) if n else np.zeros(1, dtype=np.int64)
    decode, cycle, length = np.empty(n), np.empty(n), np.empty(n)
    for first, counts in _tables(d[starts[:-1]], starts):
        k = first[:, None] + np.minimum(
            np.arange(counts.max()), counts[:, None] - 1
        )  # short rows repeat their last place
        one = np.asarray(d[first[0]])
        found = evaluate(
            replace(s, batch=b[first][:, None], context=c[k], draft_tokens=one, num_steps=one - 1), machine
        )
        decode[k], cycle[k] = found.decode_s, found.cycle_s
    for value in np.unique(d):
        here = slice(*np.searchsorted(d, [value, value + 0.5]))
        length[here] = Acceptance.constant(accept_rate[order[here]]).length(value - 1, 1, value)
    back = np.empty(n, dtype=np.int64)
    back[order] = np.arange(n)
    return Flat(decode[back], cycle[back], length[back])


def _tables(tokens: Array, starts: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(starts, lengths) of rows to price together: of one draft length, about equally long, `TABLE_VALUES` in all."""
    counts = np.diff(starts)
    for d in np.unique(tokens):
        rows = np.flatnonzero(tokens == d)
        rows = rows[np.argsort(-counts[rows], kind="stable")]
        while len(rows):
            longest = int(counts[rows[0]])
            high = max(1, TABLE_VALUES // longest)
            high = min(high, max(1, int(np.searchsorted(-counts[rows], -longest / 2))))  # at most half of it is padding
            taken, rows = rows[:high], rows[high:]
            for at in range(0, longest, TABLE_VALUES):  # only a row of its own is longer
                yield starts[taken] + at, np.minimum(counts[taken] - at, TABLE_VALUES)


TABLE_VALUES = 2**16
