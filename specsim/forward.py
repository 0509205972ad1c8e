"""A forward pass as operators: what one rank runs for the layers of a model, given how it is cut over GPUs.

Decode, verify, draft step, draft extend and prefill are all this pass with other loads; nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsim.engines import USUAL, Engine, InBlocks
from specsim.machine import ZERO, Machine, lift
from specsim.models import Attention, Experts, Layer, Model, Projection
from specsim.ops import (
    BATCH,
    ONE,
    ROWS,
    CacheParts,
    DistinctExperts,
    Feature,
    Form,
    KeyTokens,
    Linear,
    Load,
    Operator,
    QueryKeyPairs,
    RowsAbove,
    gemm,
    merge,
    small,
)

Array = NDArray[np.float64]
Limits = tuple[tuple[str, int], ...]  # the largest message that each implementation of all-reduces takes, bytes
STATE_BYTES = 4.0  # recurrent states are kept in fp32
KEPT = 256  # largest load, in numbers, whose price a machine keeps


@dataclass(frozen=True)
class Parallel:
    """How a model is cut: tp ranks in all; experts over `ep` groups of them; attention repeated in `dp` groups."""

    tp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def attention(self) -> int:
        """Ranks that share one attention layer's heads."""
        return self.tp // self.dp


@dataclass(frozen=True, eq=False)
class Pass:
    """The operators of one forward pass on one rank, and what the engine's own terms multiply. `build` makes one of a kind."""

    operators: tuple[Operator, ...]
    layers: int
    grouped: int = 0  # of them with experts that are chosen by groups

    def kernels(self, load: Load) -> Array:
        """CUDA kernels of the pass."""
        return np.asarray(sum((o.kernels * o.when.of(load) for o in self.operators), ZERO))

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """What bytes, flops, inner widths and messages are linear in, and which operators run."""
        forms = (form for o in self.operators for form in (o.bytes, o.flops, o.inner, o.message or {}, {o.when: 1.0}))
        return tuple(dict.fromkeys(feature for form in forms for feature in form))

    @cached_property
    def forms(self) -> tuple[tuple[Form, Form, Form, Form], ...]:
        """(bytes, or the message of one call; flops; inner widths; whether it runs, where that depends) of each operator, its
        features by their place in `features`."""
        place = {feature: i for i, feature in enumerate(self.features)}

        def form(linear: Linear) -> Form:
            return tuple((place[feature], coefficient) for feature, coefficient in linear.items())

        return tuple(
            (
                form(o.bytes if o.message is None else o.message),
                form(o.flops),
                form(o.inner),
                () if o.when == ONE else form({o.when: 1.0}),
            )
            for o in self.operators
        )

    @cached_property
    def gathers(self) -> tuple[bool, ...]:
        """Of each kind of all-reduce in it, sums and gathers, whether it is a gather."""
        return tuple(dict.fromkeys(o.gather for o in self.operators if o.message is not None))

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Operator classes that are priced, all-reduces apart."""
        priced = [name for o in self.operators if o.message is None for name in (o.rate, o.behind) if name]
        return tuple(dict.fromkeys(priced))


@dataclass(frozen=True)
class Cost:
    """Seconds of a pass by component, with calls, bytes and the source of the price; shapes broadcast. classes: operator
    classes that it priced; graph: where it ran in a graph."""

    seconds: Mapping[str, Array]
    calls: Mapping[str, float]
    bytes: Mapping[str, Array]
    source: Mapping[str, str]
    classes: tuple[str, ...] = ()
    graph: Any = False  # or an array of booleans

    @cached_property
    def total(self) -> Array:
        return np.asarray(sum(self.seconds.values(), ZERO))


# --- layers to operators --------------------------------------------------------------------------------------------


def slice_of(p: Projection, ranks: int) -> tuple[float, float]:
    """(inputs, outputs) of a projection on one of `ranks` ranks; K/V heads are repeated when ranks outnumber them."""
    if p.split == "none" or ranks == 1:
        return p.inputs, p.outputs
    if p.split == "row":
        return p.inputs / ranks, p.outputs
    kv = p.kv_outputs * max(1.0, p.kv_heads / ranks) / p.kv_heads if p.kv_heads else 0.0
    return p.inputs, (p.outputs - p.kv_outputs) / ranks + kv


def weight_bytes(p: Projection, ranks: int) -> float:
    """Bytes of the projection's weights on one rank, all `count` of them."""
    inputs, outputs = slice_of(p, ranks)
    return p.count * (inputs * outputs + (outputs if p.bias else 0)) * p.format.bytes


def _projection(
    p: Projection,
    ranks: int,
    *,
    component: str = "gemm",
    rows: Feature = ROWS,
    in_blocks: str = "",
    walked: Feature = ONE,
) -> Operator:
    inputs, outputs = slice_of(p, ranks)
    weights = weight_bytes(p, ranks) / p.count
    rate = f"gemm_{p.format.name}" + (f"_{in_blocks}" if in_blocks and p.format.in_blocks else "")
    return gemm(inputs, outputs, weights, rate, calls=p.count, component=component, rows=rows, walked=walked)


def _walked(p: Projection, layer: Layer, engine: Engine) -> Feature:
    """Whether the engine's kernel walks the inner width: not where it has one that splits it among threads, for few rows."""
    rule = engine.split_products.get(p.name, {})
    latent = layer.attention is not None and layer.attention.kind == "mla"
    return RowsAbove(rule["rows"]) if rule and latent and p.outputs in rule["outputs"] else ONE


def _quantized(p: Projection, ranks: int, engine: Engine) -> Iterator[Operator]:
    """What an engine runs before a product in the format of `p`: 8 bits are multiplied by 8 bits, so the inputs are read
    in 16 bits and written in 8. Weights alone in few bits (int4) are widened inside the product."""
    inputs, _ = slice_of(p, ranks)
    for rate, calls in engine.kernels.get(p.format.name, {}).items():
        yield small(rate, calls * p.count, inputs, passes=1.5)


def attention_core(
    a: Attention, ranks: int, kv_bytes: float, kernels: float, tree_block: int = 0
) -> Iterator[Operator]:
    """The operators that read the cache or the state. KV is read once a sequence and pass, shared by its query rows.

    GQA: 2 kv_heads head_dim values a token and layer, heads cut over ranks down to one. MLA: kv_lora_rank + rope_dim
    values, the same on every rank. Sparse attention reads the selected tokens for each row, after an indexer that
    reads every token's key. Recurrent layers read and write a state a sequence, and keep one a drafted token.

    tree_block: tokens of a block when the rows of a tree attend to their own branches in a second call (0: they do
    not). Such a row is a sequence of its own and costs at least a block, however short its branch.

    The parts that a cache is cut into are counted for MLA alone: where each K/V head has a cache of its own there are few, and
    calibrations do not tell what one takes.
    """
    heads = a.heads / ranks
    if a.kind in ("linear", "conv"):
        state = a.state_values / ranks * STATE_BYTES
        yield Operator("attention", "attention_linear", 1, kernels, {BATCH: state, ROWS: state})
        return
    if a.kind == "mla":
        values, width = float(a.kv_lora_rank + a.rope_dim), 2 * a.kv_lora_rank + a.rope_dim
    else:
        v = a.v_head_dim or a.head_dim
        values, width = max(1.0, a.kv_heads / ranks) * (a.head_dim + v), a.head_dim + v
    limit = a.window if a.compress == 1 else None
    keys: Feature = KeyTokens(limit, a.compress)
    pairs: Feature = QueryKeyPairs(limit, a.compress)
    if a.sparse_tokens:
        scored = {pairs: 2.0 * a.index_heads * a.index_dim}
        yield Operator("attention", "attention_sparse", 1, kernels, {keys: a.index_bytes}, scored)
        limit = min(a.sparse_tokens, limit or a.sparse_tokens)
        keys = pairs = QueryKeyPairs(limit, a.compress)  # each row reads its own selection
    moved = {keys: values * kv_bytes}
    worked = {pairs: 2.0 * heads * width}
    if a.compress > 1 and a.window:  # the newest tokens are read uncompressed beside the compressed history
        moved[KeyTokens(a.window)] = values * kv_bytes
        worked[QueryKeyPairs(a.window)] = 2.0 * heads * width
    parts = {CacheParts(heads, limit, a.compress): 1.0} if a.kind == "mla" else {}
    yield Operator("attention", f"attention_{a.kind}", 1, kernels, moved, worked, inner=parts)
    if tree_block and not a.window:  # windowed layers attend to all in one call
        yield Operator("attention", f"attention_{a.kind}", 1, kernels, {ROWS: tree_block * values * kv_bytes})


def layer_operators(
    layer: Layer,
    model: Model,
    parallel: Parallel,
    engine: Engine,
    graph: bool,
    tree_block: int = 0,
    in_blocks: InBlocks = USUAL,
) -> Iterator[Operator]:
    """What one rank runs for one layer, all-reduces included."""

    def product(p: Projection, ranks: int) -> Iterator[Operator]:
        yield from _quantized(p, ranks, engine)
        yield _projection(p, ranks, in_blocks=in_blocks.products, walked=_walked(p, layer, engine))

    if layer.norms:
        yield small("norm", layer.norms, model.hidden)
    if layer.attention is not None:
        a = layer.attention
        core = attention_core(
            a, parallel.attention, model.kv_format.bytes, engine.attention_launches(a.kind), tree_block
        )
        yield from (_of_group(o, parallel.dp) for o in core)
        yield from _extras(engine, a.kind, model.hidden)
        if a.head_norms:
            yield from _extras(engine, "head_norms", model.hidden)
        for o in _extras(engine, f"{a.kind}_rows", a.heads * a.head_dim / parallel.attention, 2.0):
            yield _of_group(replace(o, when=RowsAbove(1)), parallel.dp)
        if tree_block and not a.window:
            yield from _extras(engine, "tree", model.hidden)
    for p in layer.mixer:
        yield from (_of_group(o, parallel.dp) for o in product(p, parallel.attention))
    for p in layer.ffn:
        yield from product(p, parallel.tp)
    if layer.ffn:
        yield from _extras(engine, "dense", model.hidden)
    if layer.experts is not None:
        e = layer.experts
        rate = experts_class(e, in_blocks)
        if e.router is not None:
            yield _projection(e.router, 1, walked=_walked(e.router, layer, engine))
        beside = graph and engine.shared_experts_overlap  # on a second stream, beside the routed experts
        for p in e.shared:
            if beside:
                o, n = _projection(p, parallel.tp, in_blocks=in_blocks.products), len(e.shared)
                inner = {ONE: _inner(e, parallel) / n}
                yield replace(o, calls=1 / n, kernels=0, behind=rate, inner=inner)
            else:
                yield from product(p, parallel.tp)
        if e.shared and not beside:
            yield from _extras(engine, "shared", model.hidden)
        yield routed_experts(e, parallel, engine.launches(rate), rate)
        if rate == "moe_fp8_deepgemm":
            yield from _around_deepgemm(e, model, parallel, engine)
        yield from _extras(engine, "moe", model.hidden)
        yield from _extras(engine, f"moe_{in_blocks.around}", model.hidden)
        if e.by_groups:
            yield from _extras(engine, "groups", model.hidden)
    if parallel.tp > 1:
        sums = layer.allreduces - int(parallel.attention == 1 and bool(layer.mixer))
        gathers = int(parallel.dp > 1 and (bool(layer.ffn) or layer.experts is not None))
        for _ in range(sums + gathers):  # attention groups gather their rows before the feed-forward
            yield allreduce(model.hidden * model.activation.bytes)


def _of_group(o: Operator, dp: int) -> Operator:
    """The operator on one of `dp` attention groups, which holds 1/dp of the sequences (its weights are whole)."""
    if dp == 1:
        return o

    def share(linear: Mapping[Feature, float]) -> dict[Feature, float]:
        return {f: c if f == ONE else c / dp for f, c in linear.items()}

    inner = {f.of_group(dp): c for f, c in o.inner.items()}
    return replace(o, bytes=share(o.bytes), flops=share(o.flops), inner=inner, when=o.when.of_group(dp))


def experts_class(e: Experts, in_blocks: InBlocks = USUAL) -> str:
    """The operator class of the routed experts' kernel."""
    return f"moe_{e.format.name}" + (f"_{in_blocks.experts}" if in_blocks.experts and e.format.in_blocks else "")


def routed_experts(e: Experts, parallel: Parallel, kernels: float, rate: str) -> Operator:
    """The fused routed experts: each distinct expert's weights once, cut over TP or spread over EP groups."""
    within = parallel.tp // parallel.ep
    distinct = DistinctExperts(e.count, e.per_token, parallel.ep)
    active = e.per_token / parallel.ep
    moved = {
        distinct: e.bytes_each / within,
        ROWS: active * (2 * e.inputs + 3 * e.intermediate / within) * 2.0,
    }
    flops = {ROWS: 2.0 * active * e.matrices * e.inputs * e.intermediate / within}
    sizes = (float(e.inputs), e.intermediate / within, e.count / parallel.ep, float(e.per_token))
    shape = sizes if e.gated else None  # those that are timed have a gate
    return Operator("experts", rate, 1, kernels, moved, flops, inner={ONE: _inner(e, parallel)}, shape=shape)


def _around_deepgemm(e: Experts, model: Model, parallel: Parallel, engine: Engine) -> Iterator[Operator]:
    """What SGLang runs around DeepGEMM's grouped products, whose class is of the products alone. Each expert has a block of
    256 rows, and the scales of both products' inputs, one for 128 values, are laid out anew for whole blocks, however few
    rows are in them (`_run_masked_gemm`, layers/moe/moe_runner/deep_gemm.py)."""
    yield from _extras(engine, "moe_deepgemm", model.hidden)
    scales = 256 * e.count / parallel.ep * _inner(e, parallel) / 128
    yield Operator("small_kernels", "tiny", 2, 2, {ONE: 2 * 4 * scales})


def _inner(e: Experts, parallel: Parallel) -> float:
    """Inner widths of an expert's two products on one rank."""
    return e.inputs + e.intermediate * parallel.ep / parallel.tp


def _extras(engine: Engine, piece: str, width: float, passes: float = 3.0) -> Iterator[Operator]:
    """The engine's small kernels of a piece, over `passes` times rows of `width` values."""
    for rate, calls in engine.kernels.get(piece, {}).items():
        yield small(rate, calls, width, passes=passes)


def allreduce(bytes_a_row: float, rows: Feature = ROWS) -> Operator:
    """One sum over ranks of rows x bytes_a_row."""
    return Operator("allreduce", "allreduce", 1, 1, message={rows: bytes_a_row})


@lru_cache(maxsize=256)  # a sweep or a slider asks for the same passes again and again
def build(
    model: Model,
    parallel: Parallel,
    engine: Engine,
    graph: bool,
    *,
    fc: bool = False,
    last_rows: bool = False,
    tree_block: int = 0,
    in_blocks: InBlocks = USUAL,
) -> Pass:
    """All operators of a pass through the model's layers, its head and, for a drafter, its fc.

    last_rows: the head sees one row a sequence (a draft extend keeps only the last accepted one). tree_block: see
    `attention_core`. in_blocks: see `Scenario.in_blocks`.
    """
    operators: list[Operator] = []
    for layer, n in model.layers:
        operators += [
            o.times(n) for o in merge(layer_operators(layer, model, parallel, engine, graph, tree_block, in_blocks))
        ]
    operators += _extras(engine, "draft" if model.draft else "pass", model.hidden)
    if parallel.tp > 1:
        operators.append(allreduce(model.hidden * model.activation.bytes))  # vocabulary-parallel embedding
    if fc and model.draft:
        operators += [_projection(p, 1) for p in ([model.draft.fc] if model.draft.fc else [])]
        operators += [_projection(p, 1, rows=BATCH).times(model.draft.block) for p in model.draft.token_heads]
    seen = BATCH if last_rows else ROWS
    operators.append(_projection(model.head, parallel.tp, component="lm_head", rows=seen))
    operators.append(logits(model.head.outputs, seen))
    if parallel.tp > 1:  # logits gathered: half an all-reduce of as many bytes
        operators.append(replace(allreduce(model.head.outputs * model.activation.bytes / 2, seen), gather=True))
    grouped = sum(n for layer, n in model.layers if layer.experts is not None and layer.experts.by_groups)
    return Pass(merge(operators), model.num_layers, grouped)


# --- operators to seconds -------------------------------------------------------------------------------------------


def logits(vocabulary: int, rows: Feature) -> Operator:
    """What sampling does with the logits: read as bf16, written and read again as fp32. Its kernels are the engine's."""
    return Operator("lm_head", "gemm_bf16", 0, 0, {rows: vocabulary * 10.0})


@dataclass(frozen=True)
class Network:
    """How an all-reduce of given bytes is served: ranks, and the engine's order of implementations by size."""

    ranks: int
    link: str
    options: Mapping[str, object]

    def limits(self, engine: Engine, graph: bool, gather: bool) -> Limits:
        """`Engine.allreduce_limits` of this network."""
        key = engine, graph, gather
        if key not in self._found:
            options = {**self.options, "disable_custom_all_reduce": True} if gather else self.options
            self._found[key] = engine.allreduce_limits(ranks=self.ranks, link=self.link, graph=graph, options=options)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple[Engine, bool, bool], Limits]:
        return {}


def cost(
    p: Pass,
    load: Load,
    machine: Machine,
    engine: Engine,
    network: Network,
    *,
    graph: bool,
    verify: bool = False,
    prefill: bool = False,
    cut: bool = False,
    target: Model | None = None,
    ahead: Array | float = 0.0,
) -> Cost:
    """Seconds of a pass.

    In a graph: the operators, the engine's corrections a kernel, row and layer, and one graph launch. Eager: max(GPU
    time with the gaps between its kernels, kernels and all-reduces x what the engine's code takes to launch one); `ahead` seconds of launching
    are hidden behind work that the GPU already has. cut: only attention is launched so, between graphs of all else, one more than there are
    layers. target: the server's (see `Machine.launch_s`).
    """
    n, terms = load.ndim, machine.terms
    limits = tuple((gather, network.limits(engine, graph, gather)) for gather in p.gathers)
    asked = p, load, limits, network.ranks, graph
    priced = machine.passes(_priced, *asked) if load.size <= KEPT else _priced(machine, *asked)
    seconds = {name: part.seconds for name, part in priced.parts.items()}
    calls = {name: part.calls for name, part in priced.parts.items()}
    moved = {name: part.bytes for name, part in priced.parts.items()}
    source = {name: part.source for name, part in priced.parts.items()}

    def add(component: str, time: Array, count: float, origin: str) -> None:
        seconds[component] = seconds.get(component, ZERO) + time
        calls[component] = calls.get(component, 0.0) + count
        moved.setdefault(component, ZERO)
        source[component] = _weakest(source.get(component), origin)

    if priced.sums:  # each waits for the last rank
        seconds["allreduce"] = seconds["allreduce"] + calls["allreduce"] * lift(terms["allreduce_skew"], n)
    if graph:
        gap = lift(terms["kernel_gap"], n)  # beside what a class's fixed time holds of it, so that it may be below 0
        for name, part in priced.parts.items():
            seconds[name] = seconds[name] + part.kernels * gap
        add("launch", lift(machine.launch["graph_s"], n), 1, machine.launch_source)
    else:
        gpu, called = sum(seconds.values(), ZERO), 0.0
        if cut:  # all-reduces are in the graphs
            kernels = priced.parts["attention"].kernels if "attention" in priced.parts else ZERO
            calling = (p.layers + 1) * lift(machine.launch["graph_s"], n)
        else:
            kernels = sum((part.kernels for part in priced.parts.values()), ZERO)
            least = lift(machine.launch_s(target, network.ranks, "collective_s"), n)
            calling = sum((count * np.maximum(eager, least) for count, eager in priced.sums), ZERO)
            called = sum(count for count, _ in priced.sums)
        gaps = kernels * lift(terms["eager_gap"], n)
        launches = (kernels - called) * lift(machine.launch_s(target, network.ranks), n) + calling
        waits = np.maximum(launches - gpu - gaps - ahead, 0.0)
        # A bare launch, times what the engine makes of it.
        origin = _weakest(machine.launch_source, machine.terms_source)
        add("launch", gaps + waits, float(np.max(kernels, initial=0.0)), origin)
    if not prefill:  # what grows with rows was seen at up to 256; thousands of prompt rows do not pay it
        add("small_kernels", lift(terms["row_layer"], n) * load.rows * p.layers, 0, machine.terms_source)
        if p.grouped:
            add("small_kernels", lift(terms["row_groups"], n) * load.rows * p.grouped, 0, machine.terms_source)
    if verify:
        add("attention", lift(terms["verify_layer"], n) * (load.tokens > 1) * p.layers, 0, machine.terms_source)
    return Cost(seconds, calls, moved, source, p.classes, graph)


class _Part(NamedTuple):
    """What the operators of one component take: their seconds, CUDA kernels, calls, bytes, and the origin of the price."""

    seconds: Array
    kernels: Array | float
    calls: float
    bytes: Array
    source: str

    def plus(self, other: _Part) -> _Part:
        return _Part(
            self.seconds + other.seconds,
            self.kernels + other.kernels,
            self.calls + other.calls,
            self.bytes + other.bytes,
            _weakest(self.source, other.source),
        )


@dataclass(frozen=True)
class _Priced:
    """A pass as the box's rates and curves have it: nothing here depends on the engine's terms or on launch costs. sums: of the
    all-reduces of each size, calls and what the eager latency of one has beyond its time on the GPU."""

    parts: Mapping[str, _Part]
    sums: tuple[tuple[float, Array], ...]


def _priced(
    machine: Machine,
    p: Pass,
    load: Load,
    limits: tuple[tuple[bool, Limits], ...],
    ranks: int,
    graph: bool,
) -> _Priced:
    worths = [feature.of(load) for feature in p.features]
    n, limits_of = load.ndim, dict(limits)
    parts: dict[str, _Part] = {}
    sums: list[tuple[float, Array]] = []
    for o, (bytes_, flops, inner, when) in zip(p.operators, p.forms, strict=True):
        size = _value(bytes_, worths)
        if o.message is not None:
            assert size is not None
            time, called, origin = _one_sum(machine, limits_of[o.gather], ranks, graph, size)
            part = _Part(o.calls * time, o.kernels, o.calls, o.calls * size, origin)
            sums.append((o.calls, np.maximum(called - time, 0.0)))
        else:
            size = ZERO if size is None else size
            time, origin = machine.price(o, size, _value(flops, worths), _value(inner, worths), n)
            part = _Part(time, o.kernels, o.calls, size, origin)
            runs = _value(when, worths)
            if runs is not None:
                share = float(np.max(runs, initial=0.0))
                part = _Part(time * runs, o.kernels * runs, o.calls * share, size * runs, origin)
        parts[o.component] = parts[o.component].plus(part) if o.component in parts else part
    return _Priced(parts, tuple(sums))


def _value(form: Form, worths: Sequence[Array]) -> Array | None:
    """The value of a linear form; None of an empty one."""
    amount: Array | None = None
    for place, coefficient in form:
        part = coefficient * worths[place]
        amount = part if amount is None else amount + part
    return amount


def allreduce_seconds(message: Array, machine: Machine, engine: Engine, network: Network) -> Array:
    """Seconds of one all-reduce of `message` bytes in a graph, with what its ranks wait for each other.

    Each size is served by the implementation that the engine picks.
    """
    time, _, _ = _one_sum(machine, network.limits(engine, True, False), network.ranks, True, message)
    return time + lift(machine.terms["allreduce_skew"], message.ndim)


def _one_sum(machine: Machine, limits: Limits, ranks: int, graph: bool, message: Array) -> tuple[Array, Array, str]:
    """(seconds on the GPU without the wait for the last rank, eager latency, origin) of one all-reduce."""
    n = message.ndim
    names, reach = _reach(limits)
    served = reach.searchsorted(message)  # the first that takes a message of that size
    origin: str | None = None
    taken = {"graph": ZERO} if graph else {"graph": ZERO, "eager": ZERO}
    first, last = (int(served), int(served)) if n == 0 else (int(served.min()), int(served.max()))
    for place in range(first, last + 1):
        here = served == place
        if first < last and not here.any():
            continue
        for mode, seconds in taken.items():
            curve = machine.curve(names[place:], ranks, mode)
            each = curve.seconds(message) * lift(curve.factor, n)
            taken[mode] = each if first == last else np.where(here, each, seconds)
            origin = _weakest(origin, curve.source)
    return taken["graph"], taken.get("eager", ZERO), origin or "assumed"


@lru_cache(maxsize=256)
def _reach(limits: Limits) -> tuple[tuple[str, ...], Array]:
    """The implementations in order, and the largest message that each or one before it takes, bytes."""
    names, bytes_ = zip(*limits, strict=True)
    return names, np.maximum.accumulate(np.asarray(bytes_, dtype=float))


_ORIGINS = ("measured", "fitted", "published", "datasheet", "assumed")


def _weakest(a: str | None, b: str) -> str:
    """The less certain of two origins."""
    return b if a is None or a == b else max(a, b, key=_ORIGINS.index)
