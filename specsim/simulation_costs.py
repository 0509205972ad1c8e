"""What a simulated server is: its step times as tables of the one cost model, and the rules of its scheduler.

A step of the simulator needs one number, so the vectorised cost model is evaluated once on a grid and interpolated:

    decode or cycle   exact in the batch; piecewise linear in the mean cached tokens a sequence. Nodes: powers of the
                      fourth root of 2, where an attention window fills, and, found by halving, where costs bend (from
                      memory- to compute-bound, from host to GPU)
    prefill           piecewise linear in new tokens (each up to 256, then 1 % apart or closer) and in the mean cached
                      tokens that a row attends to, all that attention's work depends on; nodes found as above
    both in one step  prefill of all rows + what the cached tokens of the decoding sequences add (vLLM mixes; SGLang
                      does not): prefill(P + B d) + step(B, context) - target pass(B, context 0)

The error of the interpolation is below 0.5 % (tests/test_simulation.py). Times are whole picoseconds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from specsim.cycle import evaluate, target_pass
from specsim.engines import running_flag
from specsim.errors import InputError, as_fraction
from specsim.forward import build, cost
from specsim.machine import ZERO, Machine, lift
from specsim.memory import memory_share, rank_kv_per_token, rank_state, rank_weights
from specsim.models import Model
from specsim.ops import Load
from specsim.scenarios import Scenario, contents, exactly

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Ranges = tuple[
    tuple[int, int, int], ...
]  # a policy: (first batch, last batch, drafted tokens; 0: off), from batch 1 up
PS = 1e12  # picoseconds a second
CURVED = 0.001  # share of a value by which a straight line may miss it in the middle of a cell
HALVINGS = 8  # of a cell at most: a jump has no straight line
ROWS = 4096  # batches whose step times are worked out at once
WIDEST_GRID = 2**18  # tokens: beyond, costs are extrapolated along their last segment
POLICIES = ("prefill-first", "mixed")
TABLES = 16  # of the last servers are kept: a few MB each

# Defaults of the engines: tokens of a prefill chunk by GPU memory (decimal GB, exclusive bound); SGLang
# server_args.py, vLLM engine/arg_utils.py. Running requests without speculation: SGLang model_runner.py.
SGLANG_CHUNK = ((35.0, 2048), (60.0, 4096), (160.0, 8192), (math.inf, 16384))
VLLM_CHUNK = ((70.0, 2048), (math.inf, 8192))
SGLANG_RUNNING = 4096
STATE_SHARE = 0.9 / 1.9  # SGLang --mamba-full-memory-ratio 0.9: state to KV cache
SGLANG_PREFILL = 16384  # --max-prefill-tokens, the limit when chunks are off


@dataclass(frozen=True)
class Costs:
    """Step times of one server, picoseconds.

    step[b, i]: one step of b sequences (0..max) with contexts[i] cached tokens each; base[b]: the target's pass in it at
    no cached tokens; rows[b]: rows that a sequence has in it, 1 or the draft tokens; drafts[b]: tokens that may be accepted
    beyond the first. prefill[i, j]: prefill of tokens[i] rows that attend to reach[j] tokens each on average. lead: host time
    before a prefill of `led` tokens (from, to), as far as no step runs meanwhile.
    """

    contexts: Array
    step: Array
    base: Array
    tokens: Array
    reach: Array
    prefill: Array
    rows: Ints
    drafts: Ints
    lead: float = 0.0
    led: tuple[int, int] = (1, 0)

    @property
    def most_rows(self) -> int:
        """Rows that a sequence has in a decode step at most."""
        return int(self.rows.max())

    @classmethod
    def fixed(
        cls, step_s: float, prefill_s: float = 0.0, prefill_token_s: float = 0.0, *, batch: int = 1, rows: int = 1
    ) -> Costs:
        """A server without a cost model: every step takes `step_s`, a prefill `prefill_s` + tokens x `prefill_token_s`."""
        two = np.array([0.0, 1.0])
        step = np.full((batch + 1, 2), round(step_s * PS), dtype=float)
        prefill = np.repeat(np.rint((prefill_s + two * prefill_token_s) * PS)[:, None], 2, axis=1)
        a_batch = np.ones(batch + 1, dtype=np.int64)
        return cls(two, step, step[:, 0], two, two, prefill, rows * a_batch, (rows - 1) * a_batch)


@dataclass(frozen=True)
class Server:
    """A server to simulate. `survival[j]`: probability that at least j + 1 drafted tokens are accepted (none: decode), of
    which a step of b sequences draws the first `costs.drafts[b]`.

    policy: "prefill-first" (SGLang: a step prefills while requests wait, else decodes) or "mixed" (vLLM: every step
    decodes, and prefills with the tokens left of its budget). chunk_tokens: rows of a prefill step at most. kv_tokens:
    tokens that the KV cache holds. overlap: the next step is decided while one runs, so it cannot know how that ends.
    prefix_rate: share of every prompt found in the prefix cache. overhead_s: from sending a request to the scheduler's
    seeing it (network, tokeniser). chunk_s: what the front end (detokeniser, HTTP server: one process, beside the scheduler)
    takes to send one chunk of one request, one after another.
    """

    costs: Costs
    policy: str
    max_running: int
    chunk_tokens: int
    kv_tokens: int
    overlap: bool = True
    survival: tuple[float, ...] = ()
    prefix_rate: float = 0.0
    overhead_s: float = 0.0
    chunk_s: float = 0.0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InputError(f"unknown policy {self.policy!r}", where="policy", mend=f"one of {', '.join(POLICIES)}")
        for name, value in (
            ("max running requests", self.max_running),
            ("chunk tokens", self.chunk_tokens),
            ("KV tokens", self.kv_tokens),
        ):
            if value < 1:
                raise InputError(f"{value} {name}", where="server", mend="give 1 or more")
        falls = (1.0, *self.survival, 0.0)
        if any(not a >= b for a, b in itertools.pairwise(falls)):
            raise InputError(
                "survival does not fall from 1 to 0", where="server", mend="give P(at least 1, 2, ... accepted)"
            )
        if not 0 <= self.prefix_rate < 1:
            raise InputError(
                f"{self.prefix_rate:g} is not in [0, 1)",
                where="--prefix-rate",
                mend=as_fraction(self.prefix_rate),
            )
        if not 0 <= self.overhead_s < 3600:
            raise InputError(
                f"{1e3 * self.overhead_s:g} ms", where="--overhead-ms", mend="give 0 or more, below 3,600,000"
            )
        if not 0 <= self.chunk_s < 1:
            raise InputError(f"{1e6 * self.chunk_s:g} us", where="--chunk-us", mend="give 0 or more, below 1,000,000")
        if self.max_running >= len(self.costs.step):
            raise InputError(
                f"has step times up to batch {len(self.costs.step) - 1}", where="server", mend="lower max_running"
            )

    @property
    def accept_lengths(self) -> Array:
        """Mean tokens that a decode step gives a sequence that has more to come, by batch (0..max)."""
        gained = np.concatenate([[1.0], 1.0 + np.cumsum(self.survival)])
        return np.asarray(gained[np.minimum(self.costs.drafts, len(self.survival))])

    @property
    def accept_length(self) -> float:
        """The same at the largest batch."""
        return float(self.accept_lengths[-1])


def server_of(
    s: Scenario,
    machine: Machine,
    *,
    concurrency: int | None = None,
    chunk_tokens: int | None = None,
    overlap: bool | None = None,
    prefix_rate: float = 0.0,
    overhead_s: float = 0.0,
    chunk_s: float = 0.0,
    histogram: Iterable[float] | None = None,
    ranges: Ranges = (),
) -> Server:
    """The server of a scenario (its batch and context play no part). `concurrency`: requests in flight at most.

    `histogram`: how often a cycle gained 1, 2, ... tokens, as recorded; it replaces the scenario's acceptance. `ranges`: draft
    lengths by batch (a chain's), which replace the scenario's. Raises InputError without acceptance under speculation, and
    when the weights leave no room for a KV cache.
    """
    s = longest(s, ranges)
    survival = acceptance_of(s, histogram)
    sglang = s.engine.name == "sglang"
    chunk = chunk_tokens or default_chunk(s)
    running = running_limit(s)
    if not sglang:
        running = min(running, max(1, chunk // rows_of(s)))  # every running request's rows fit the token budget
    running = running if concurrency is None else min(running, concurrency)
    kv, running = cache_limits(s, running)
    running = min(running, kv)
    on = not s.options.get("disable_overlap", False) if overlap is None else overlap
    return Server(
        costs=tables(s, machine, running, chunk, ranges),
        policy="prefill-first" if sglang else "mixed",
        max_running=running,
        chunk_tokens=chunk,
        kv_tokens=kv,
        overlap=on,
        survival=survival,
        prefix_rate=prefix_rate,
        overhead_s=overhead_s,
        chunk_s=chunk_s,
    )


def acceptance_of(s: Scenario, histogram: Iterable[float] | None = None) -> tuple[float, ...]:
    """P(at least 1, 2, ... drafted tokens are accepted) in one cycle; empty without speculation. Raises InputError."""
    if s.method == "none":
        return ()
    steps, tokens = int(s.num_steps.reshape(-1)[0]), int(s.draft_tokens.reshape(-1)[0])
    if histogram is not None:
        counts = np.asarray(list(histogram), dtype=float)
        most = min(steps, tokens - 1) + 1
        if counts.size == 0 or np.any(~np.isfinite(counts) | (counts < 0)) or counts.sum() <= 0 or counts.size > most:
            raise InputError(
                f"{counts.size} counts cannot be read",
                where="--accept-histogram",
                mend=f"give how often 1 to {most} tokens were gained, not all 0",
            )
        return tuple(float(x) for x in counts[::-1].cumsum()[::-1][1:] / counts.sum())
    if s.acceptance is None:
        raise InputError(
            "speculation needs an acceptance to simulate",
            where="--accept-rate",
            mend="give it, or --accept-length, --accept-histogram, or --method none",
        )
    return tuple(float(x) for x in np.atleast_1d(s.acceptance.survival(steps, s.topk, tokens)))


def default_chunk(s: Scenario) -> int:
    """Tokens of a prefill step at most: the engine's option, else its default for the GPU."""
    if s.engine.name == "sglang":
        size = s.options.get("chunked_prefill_size")
        if size is not None:
            return int(size) if size > 0 else SGLANG_PREFILL
        return next(tokens for below, tokens in SGLANG_CHUNK if s.profile.gpu.memory_gb < below)
    size = s.options.get("max_num_batched_tokens")
    return int(size) if size else next(tokens for below, tokens in VLLM_CHUNK if s.profile.gpu.memory_gb < below)


def running_limit(s: Scenario) -> int:
    """Requests that the engine runs at once: its option, else its default."""
    given = s.options.get("max_running_requests")
    if given:
        return int(given)
    if s.engine.name == "sglang":
        return (s.engine.running_cap_speculative or SGLANG_RUNNING) if s.method != "none" else SGLANG_RUNNING
    tiers = s.engine.policy["graphs"]["max_num_seqs"]
    return int(tiers["large" if s.profile.gpu.memory_gb * 1e9 / 2**20 >= tiers["large_from_mib"] else "small"])


def limited(s: Scenario, running: int) -> Scenario:
    """The scenario whose server runs so many requests at once at most, with its launch line."""
    flag = running_flag(s.engine.name)
    others = (given for given in s.options.get("flags", ()) if given[0] != flag)
    options = {**s.options, "max_running_requests": running, "flags": (*others, (flag, str(running)))}
    return replace(s, options=options)


def cache_limits(s: Scenario, running: int) -> tuple[int, int]:
    """(tokens that the KV caches of all attention groups hold, requests that run at once).

    Recurrent states take at most `STATE_SHARE` of what the weights leave, which lowers the requests that run. Raises
    InputError when the weights leave no room.
    """
    models = [s.model] if s.draft is None else [s.model, s.draft]
    share = s.options.get("mem_fraction")
    capacity = s.profile.gpu.memory_gb * 1e9 * memory_share(s)
    weights = sum(rank_weights(m, s.parallel) for m in models)
    state = sum(rank_state(m, s.parallel) for m in models)
    a_token = sum(rank_kv_per_token(m, s.parallel) for m in models)
    left = capacity - weights
    dp = s.parallel.dp
    if left <= a_token + state:
        there = (
            f"{share:g} of {s.profile.gpu.memory_gb:g}"
            if share
            else f"{capacity / 1e9:.1f} of {s.profile.gpu.memory_gb:g}"
        )
        raises = " or ".join(["that share"] * bool(share) + ["--tp"] * (s.parallel.tp < s.profile.gpus))
        raise InputError(
            f"{s.model.name} does not fit: {weights / 1e9:.1f} GB of weights a GPU, {there} GB can be used",
            where="memory",
            mend=f"raise {raises}, or take another --hardware" if raises else "take another --hardware",
        )
    if state:
        running = min(running, max(1, int(STATE_SHARE * left / state)) * dp)
        left -= math.ceil(running / dp) * state
    tokens = min(int(left / a_token), 2**40) if a_token else 2**40
    asked = s.options.get("max_total_tokens")
    if asked:  # more than there is room for is not given
        tokens = min(tokens, int(asked))
    measured = s.options.get("kv_tokens")  # what a server said that it has
    return int(measured or tokens) * (dp if a_token else 1), running


# --- tables ---------------------------------------------------------------------------------------------------------


def prefill_seconds(s: Scenario, machine: Machine, tokens: Array, reach: Array, *, on_average: bool = False) -> Array:
    """Seconds of one prefill pass over `tokens` rows of one sequence, the drafter's pass included: from a graph that is cut at each
    attention, padded to a captured number of tokens, with its host time beside the step before (`lead_seconds`); or eager,
    where that is part of it.

    reach: cached tokens that a row attends to on average, itself included: cached + (tokens + 1) / 2 for one sequence.
    Only the last row goes through the head. on_average: padded as numbers of tokens about as large are. Broadcasts.
    """
    tokens, reach = np.broadcast_arrays(np.asarray(tokens, dtype=float), np.asarray(reach, dtype=float))
    machine = machine.sustained()
    host: Array = lift(machine.host_s("prefill_host", s.parallel.tp), tokens.ndim)
    rows = s.engine.padded_prefill(tokens, prefill_graphs(s), on_average=on_average)
    padded = rows > 0

    def passes(rows: Array, cut: bool) -> Array:
        at = reach - (tokens + 1) / 2
        load = Load(np.ones(()), tokens, at, rows / tokens, s.routing or machine.routing, machine.processors)
        seconds: Array = sum(
            (
                cost(
                    build(model, s.parallel, s.engine, False, fc=fc, last_rows=True, in_blocks=s.in_blocks),
                    load,
                    machine,
                    s.engine,
                    s.network,
                    graph=False,
                    prefill=True,
                    cut=cut,
                    target=s.model,
                ).total
                for model, fc in ((s.model, False), (s.draft, True))
                if model is not None
            ),
            ZERO if cut else host,
        )
        return seconds

    if not padded.any():
        return np.asarray(passes(tokens, cut=False))
    if padded.all():
        return np.asarray(passes(rows, cut=True))
    return np.where(padded, passes(np.where(padded, rows, tokens), cut=True), passes(tokens, cut=False))


def lead_seconds(s: Scenario, machine: Machine, tokens: Array) -> Array:
    """Host time before the graphs of prefills of so many tokens, which is hidden while a step runs; 0 where they are eager, which
    `prefill_seconds` counts it in."""
    host = float(machine.host_s("prefill_host", s.parallel.tp).reshape(-1)[0])
    return np.where(s.engine.padded_prefill(tokens, prefill_graphs(s)) > 0, host, 0.0)


def prefill_graphs(s: Scenario) -> tuple[int, ...]:
    """Numbers of prompt tokens that the scenario's prefills have a graph for; see `Engine.prefill_graphs`."""
    latent = any(a.attention is not None and a.attention.kind == "mla" for a, _ in s.model.layers)
    options = {**s.options, "dp_attention": s.parallel.dp > 1}
    if not any(s.graph_phases.values()):
        options["disable_cuda_graph"] = True
    uncut = (options.get("chunked_prefill_size") or 1) < 0
    return s.engine.prefill_graphs(options, latent=latent, chunk=0 if uncut else default_chunk(s))


def eager_prefills(s: Scenario) -> bool:
    """Whether options take from the prefills of a scenario the graphs that they have else."""
    without = replace(
        s, options={k: s.options[k] for k in ("max_total_tokens", "version") if k in s.options}, eager=frozenset()
    )
    return not prefill_graphs(s) and bool(prefill_graphs(without))


def step_seconds(s: Scenario, machine: Machine, batch: Array, context: Array) -> Array:
    """Seconds of one decode step, or of one cycle under speculation. Broadcasts."""
    at = replace(s, batch=np.asarray(batch, dtype=float), context=np.asarray(context, dtype=float))
    c = evaluate(at, machine)
    return c.decode_s if s.method == "none" else c.cycle_s


def longest(s: Scenario, ranges: Ranges) -> Scenario:
    """The scenario with the longest draft of a policy, which its memory and admission are sized for. Raises InputError
    for a policy of a scenario that drafts no chains."""
    if not ranges:
        return s
    if s.method == "none" or s.topk > 1:
        raise InputError("belongs to speculation by chains", where="policy", mend="leave --method none and --topk out")
    return drafting(s, max(k for *_, k in ranges) or 1)


def drafting(s: Scenario, k: int) -> Scenario:
    """The scenario with k drafted tokens, 0 being plain decoding."""
    if k:
        return replace(s, draft_tokens=np.asarray(k + 1.0), num_steps=np.asarray(float(k)))
    return replace(s, method="none", draft=None, draft_tokens=np.ones(()), num_steps=np.zeros(()))


def lanes(s: Scenario, most: int, ranges: Ranges) -> list[tuple[Scenario, Array]]:
    """What runs at which batches (1..most): the scenario at all, or each draft length of a policy at its own; beyond its last
    range a policy goes on as there."""
    batches = np.arange(1.0, most + 1)
    if not ranges:
        return [(s, batches)]
    drafted = np.full(most, ranges[-1][2])
    for first, last, k in ranges:
        drafted[first - 1 : last] = k
    return [(drafting(s, int(k)), batches[drafted == k]) for k in np.unique(drafted)]


def rows_of(s: Scenario) -> int:
    """Rows that a sequence has in a decode step: 1, or the draft tokens."""
    return 1 if s.method == "none" else int(s.draft_tokens.reshape(-1)[0])


def base_seconds(s: Scenario, machine: Machine, batches: Array) -> Array:
    """Seconds of the target's pass in a decode step, at no cached tokens. batches: (n,)."""
    phase = "decode" if s.method == "none" else "verify"
    at = replace(s, batch=batches, context=np.zeros(()))
    return np.broadcast_to(target_pass(at, machine, np.asarray(float(rows_of(s))), phase).total, batches.shape)


def tables(s: Scenario, machine: Machine, max_batch: int, chunk: int, ranges: Ranges = ()) -> Costs:
    """The step times of a scenario (its batch, context and acceptance play no part) for batches up to `max_batch` and prefill
    steps of up to `chunk` tokens. Those of the last `TABLES` servers are kept: simulations of one at several loads work them out
    once. Nobody may write to them."""
    s = replace(s, batch=np.ones(()), context=np.zeros(()), acceptance=None, asked={})
    parts = exactly([getattr(machine, field.name) for field in fields(machine)])
    return _tables(_Asked(max_batch, chunk, ranges, contents(s), parts, s, machine))


@dataclass(frozen=True)
class _Asked:
    """What tables are of. Equal where all numbers are that they depend on."""

    max_batch: int
    chunk: int
    ranges: Ranges
    scenario_parts: str
    machine_parts: str
    scenario: Scenario = field(compare=False)
    machine: Machine = field(compare=False)


@functools.lru_cache(TABLES)
def _tables(asked: _Asked) -> Costs:
    s, machine, max_batch, chunk, ranges = asked.scenario, asked.machine, asked.max_batch, asked.chunk, asked.ranges
    widest = s.model.max_context or WIDEST_GRID
    cut = lanes(s, max_batch, ranges)
    bends = {x for one, _ in cut for x in (1, (s.topk + 1) / 2, rows_of(one), (rows_of(one) + 1) / 2)}

    def steps(row: Ints, context: Array) -> Array:
        if len(cut) == 1:
            return step_seconds(cut[0][0], machine, np.asarray(row + 1.0), context)
        batch, context = np.broadcast_arrays(row + 1.0, context)
        seconds = np.zeros(batch.shape)
        for one, batches in cut:
            here = np.isin(batch, batches)
            if here.any():  # a refinement may look at batches of one range only
                seconds[here] = step_seconds(one, machine, batch[here], context[here])
        return seconds

    contexts, step = refined(steps, max_batch, _nodes(widest, (limit - x for limit in _windows(s) for x in bends)))
    base = np.zeros(max_batch + 1)
    rows, drafts = np.ones(max_batch + 1, dtype=np.int64), np.zeros(max_batch + 1, dtype=np.int64)
    for one, batches in cut:
        at = batches.astype(np.int64)
        base[at] = base_seconds(one, machine, batches)
        rows[at] = rows_of(one)
        drafts[at] = int(one.num_steps.reshape(-1)[0])
    most = chunk + (int(rows.max()) * max_batch if s.engine.name == "vllm" else 0)
    tokens = np.unique(
        np.concatenate(
            [
                np.arange(min(most, 256) + 1),
                np.geomspace(256, max(most, 256), 2 + int(100 * math.log(max(most, 256) / 256))).round(),
                [most],
                [x for size in prefill_graphs(s) for x in (size, size + 1)],  # more tokens run the next graph
            ]
        )
    )
    tokens = tokens[tokens <= most].astype(float)

    reach = _nodes(widest, _windows(s))

    def by_tokens(row: Ints, tokens: Array) -> Array:
        return prefill_seconds(s, machine, np.maximum(tokens, 1.0), reach[:: len(reach) // 4][row])

    def by_reach(row: Ints, reach: Array) -> Array:
        return prefill_seconds(s, machine, np.maximum(tokens[row], 1.0), reach)

    tokens, _ = refined(by_tokens, 4, tokens, whole=True)
    reach, prefill = refined(by_reach, len(tokens), reach)

    graphs = prefill_graphs(s)
    least = math.ceil(graphs[0] / s.engine.policy["graphs"]["prefill_padding"]) if graphs else 1
    led = least, max(graphs, default=0)

    def ps(seconds: Array) -> Array:
        return np.rint(seconds * PS)

    return Costs(
        contexts=contexts,
        step=ps(np.pad(step, ((1, 0), (0, 0)))),
        base=ps(base),
        tokens=tokens,
        reach=reach,
        prefill=ps(prefill),
        rows=rows,
        drafts=drafts,
        lead=float(ps(lead_seconds(s, machine, np.asarray(float(led[1]))))),
        led=led,
    )


def _windows(s: Scenario) -> list[float]:
    """Numbers of tokens at which an attention layer of target or draft stops reading more."""
    models: list[Model] = [s.model] if s.draft is None else [s.model, s.draft]
    attentions = [layer.attention for m in models for layer, _ in m.layers if layer.attention is not None]
    found = {float(x) for a in attentions for x in (a.window, a.sparse_tokens) if x}
    compressed = {float(a.sparse_tokens * a.compress) for a in attentions if a.sparse_tokens and a.compress > 1}
    return sorted(found | compressed)


def _nodes(widest: float, more: Iterable[float]) -> Array:
    powers = 2.0 ** np.arange(4.0, math.log2(max(widest, 64)) + 0.25, 0.25)
    return np.unique(np.concatenate([[0.0], powers.round(), [x for x in more if x > 0]]))


def refined(f: Callable[[Ints, Array], Array], rows: int, nodes: Array, *, whole: bool = False) -> tuple[Array, Array]:
    """(nodes, f at them of shape (rows, nodes)), with nodes added until f is linear between them in each of the rows.

    f(row, x) broadcasts. A cell is halved for a row whose value in the middle is off the straight line by more than
    `CURVED` of it; at a single bend the line is off by at most twice what it is in the middle. A cell that one row needs is
    filled from the straight line in the others. whole: nodes are whole numbers, and so are those added.
    """

    def at(row: Ints, x: Array) -> Array:
        """f in parts of so many rows: it takes some dozen times the memory of what it returns."""
        parts = range(0, len(row), ROWS)
        one_each = x.ndim == row.ndim  # x belongs to rows, else every row has all of it
        found = [f(row[i : i + ROWS], x[i : i + ROWS] if one_each else x) for i in parts]
        return np.concatenate(
            [np.broadcast_to(y, (len(row[i : i + ROWS]), *y.shape[1:])) for i, y in zip(parts, found, strict=True)]
        )

    table = np.broadcast_to(at(np.arange(rows)[:, None], nodes), (rows, len(nodes)))
    halves = np.ones((rows, len(nodes) - 1), dtype=bool)  # cells to look into, by row
    for _ in range(HALVINGS):
        halves &= np.diff(nodes) > whole
        if not halves.any():
            break
        cells = np.flatnonzero(halves.any(axis=0))
        middle = (nodes[cells] + nodes[cells + 1]) / 2
        middle = np.floor(middle) if whole else middle
        share = (middle - nodes[cells]) / (nodes[cells + 1] - nodes[cells])
        line = table[:, cells] + share * (table[:, cells + 1] - table[:, cells])
        row, cell = np.nonzero(halves[:, cells])
        value = line.copy()
        value[row, cell] = at(row, middle[cell])
        curved = np.abs(value - line) > CURVED * value
        kept = curved.any(axis=0)
        if not kept.any():
            break
        cells, middle, value, curved = cells[kept], middle[kept], value[:, kept], curved[:, kept]
        nodes = np.insert(nodes, cells + 1, middle)
        table = np.insert(table, cells + 1, value, axis=1)
        halves = np.zeros((rows, len(nodes) - 1), dtype=bool)
        new = cells + 1 + np.arange(len(cells))
        halves[:, new - 1] = halves[:, new] = curved
    return nodes, table
