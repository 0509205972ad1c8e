"""Operators: what one rank runs in a forward pass, in sizes; and the one equation that prices them.

    seconds = calls x fixed + ((bytes / bandwidth)^3 + (flops / peak)^3)^(1/3)

adds the fixed time to the work; only the work is a roofline, with a bend as round as the measured one. An operator's bytes and flops are linear in a few features
of the load (rows, cached tokens, distinct experts), so operators of one class and component add up to one operator, and
a million configurations are a handful of array operations. All-reduces are priced by interpolating a measured curve.
See docs/model.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from specsim.routing import UNIFORM, Routing

Array = NDArray[np.float64]
UNIT: Array = np.ones(())[()]  # a number costs a tenth of an array of none dimensions, and broadcasts as well
PROCESSORS = 132  # of a GPU that does not say: of most that FlashAttention-3 serves


@dataclass(frozen=True, eq=False)
class Load:
    """What a pass works on; every field broadcasts against the others. Loads of the same numbers and routing are equal.

    batch: sequences; tokens: query rows of each sequence (1 in decode, d in verify); context: cached tokens of each
    sequence before the pass; graph_batch: sequences the GPU really runs when a graph pads the batch (None: batch);
    processors: of the GPU that works on it, by which some kernels cut their work.
    """

    batch: Array
    tokens: Array
    context: Array
    graph_batch: Array | None = None
    routing: Routing = UNIFORM
    processors: int = PROCESSORS

    @cached_property
    def rows(self) -> Array:
        """Rows computed, padding included."""
        return (self.batch if self.graph_batch is None else self.graph_batch) * self.tokens

    @cached_property
    def ndim(self) -> int:
        return max(self.batch.ndim, self.tokens.ndim, self.context.ndim)

    @property
    def size(self) -> int:
        """Of the largest field."""
        return max(self.batch.size, self.tokens.size, self.context.size)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        fields = (self.batch, self.tokens, self.context, self.graph_batch)
        return (*(None if x is None else (x.shape, x.tobytes()) for x in fields), self.routing)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Load) and self._key == other._key


# --- features of a load that bytes and flops are linear in --------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """A number derived from the load. Equal features are computed once a pass."""

    def of(self, load: Load) -> Array:
        raise NotImplementedError

    def of_group(self, groups: int) -> Feature:
        """The number on one of `groups` ranks that share the sequences, where it is no sum over them; from the load of all."""
        return self


@dataclass(frozen=True)
class _One(Feature):
    def of(self, load: Load) -> Array:
        return UNIT


@dataclass(frozen=True)
class _Rows(Feature):
    def of(self, load: Load) -> Array:
        return load.rows


@dataclass(frozen=True)
class _Batch(Feature):
    def of(self, load: Load) -> Array:
        return load.batch


ONE, ROWS, BATCH = _One(), _Rows(), _Batch()


@dataclass(frozen=True)
class KeyTokens(Feature):
    """Cache entries read, over all sequences: each once a pass, whatever the query rows; at most `limit` a sequence.
    `compress` tokens share an entry."""

    limit: int | None = None
    compress: int = 1

    def of(self, load: Load) -> Array:
        return load.batch * _limited((load.context + load.tokens) / self.compress, self.limit)


@dataclass(frozen=True)
class RowsAbove(Feature):
    """1 where there are more rows than `limit`, else 0."""

    limit: int

    def of(self, load: Load) -> Array:
        return UNIT * (load.rows > self.limit)

    def of_group(self, groups: int) -> Feature:
        return RowsAbove(self.limit * groups)


@dataclass(frozen=True)
class QueryKeyPairs(Feature):
    """(query row, cache entry) pairs, over all sequences: the work of attention."""

    limit: int | None = None
    compress: int = 1

    def of(self, load: Load) -> Array:
        return load.batch * load.tokens * _limited((load.context + (load.tokens + 1) / 2) / self.compress, self.limit)


@dataclass(frozen=True)
class CacheParts(Feature):
    """Parts that FlashAttention-3 cuts a latent cache into, so that few sequences keep a GPU busy; a second kernel sums them
    one after the other.

    A cache is blocks of BLOCK tokens, read for BLOCK query rows at a time (all heads share it). With x = 1.1 blocks a processor, over
    all sequences, a part is ceil(x) blocks (`prepare_varlen_num_blocks_kernel`, hopper/flash_prepare_scheduler.cu; the block
    is that of values of 512, hopper/tile_size.h). Taken as 1 + x, which is never less: the kernel's own steps would make a longer
    cache cheaper here and there.
    """

    heads: float  # of queries, on one rank
    limit: int | None = None
    compress: int = 1
    groups: int = 1

    BLOCK: ClassVar[int] = 64
    MARGIN: ClassVar[float] = 1.1

    def of(self, load: Load) -> Array:
        blocks = _limited((load.context + load.tokens) / self.compress, self.limit) / self.BLOCK
        sequences = load.batch / self.groups * np.maximum(self.heads * load.tokens / self.BLOCK, 1.0)
        return blocks / (1.0 + self.MARGIN * sequences * blocks / load.processors)

    def of_group(self, groups: int) -> Feature:
        return replace(self, groups=self.groups * groups)


def _limited(tokens: Array, limit: int | None) -> Array:
    return tokens if limit is None else np.minimum(tokens, limit)


@dataclass(frozen=True)
class DistinctExperts(Feature):
    """Distinct experts of `count` that the rows touch, `per_token` a row, on the busiest of `groups` ranks.

    The touched experts fall on the groups at random: their number on one group has the hypergeometric variance
    d (1/g) (1 - 1/g) (E - d) / (E - 1), and the largest of g such numbers lies about inv_normal((g - 3/8) / (g + 1/4))
    standard deviations above the mean (Blom 1958).
    """

    count: int
    per_token: int
    groups: int = 1

    def of(self, load: Load) -> Array:
        touched = load.routing.distinct(load.rows, self.count, self.per_token)
        if self.groups == 1:
            return touched
        g = self.groups
        left = np.maximum(self.count - touched, 0.0) / max(self.count - 1, 1)
        spread = np.sqrt(touched / g * (1 - 1 / g) * left)
        busiest = touched / g + NormalDist().inv_cdf((g - 0.375) / (g + 0.25)) * spread
        return np.minimum(busiest, np.minimum(touched, self.count / g))


Linear = Mapping[Any, float]  # by Feature; Any, since a mapping's keys are invariant
Form = tuple[tuple[int, float], ...]  # the same, by the place of the feature in a list: nothing is hashed


def _added(a: Linear, b: Linear, scale: float = 1.0) -> dict[Feature, float]:
    total = dict(a)
    for feature, coefficient in b.items():
        total[feature] = total.get(feature, 0.0) + scale * coefficient
    return total


# --- operators ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Operator:
    """`calls` calls of one class in one pass. bytes, flops and inner widths are totals over the calls; `kernels` too.

    `message` holds the bytes of ONE all-reduce call, and marks the operator as one.
    """

    component: str  # allreduce, experts, gemm, attention, small_kernels, lm_head
    rate: str  # operator class of the hardware profile
    calls: float
    kernels: float
    bytes: Linear = field(default_factory=dict)
    flops: Linear = field(default_factory=dict)
    message: Linear | None = None
    gather: bool = False  # an all-gather: NCCL serves it whatever serves sums
    behind: str = (
        ""  # class beside whose fixed time the calls run on a second stream: that much of their work is hidden
    )
    # What each output sums over from end to end: a product's inner width, the parts of a cache; `behind`: of that class's calls.
    inner: Linear = field(default_factory=dict)
    when: Feature = ONE  # the share of the calls that run, 0 or 1
    # Of a product's weights: outputs, inputs; of experts with a gate, on a rank: inputs, inner width, how many, chosen ones.
    shape: tuple[float, ...] | None = None

    @cached_property
    def staged(self) -> bool:
        """Whether its calls are `in_stages`."""
        return in_stages(self.rate)

    def times(self, n: float) -> Operator:
        return replace(
            self,
            calls=n * self.calls,
            kernels=n * self.kernels,
            inner=_added({}, self.inner, n),
            bytes=_added({}, self.bytes, n),
            flops=_added({}, self.flops, n),
        )

    def plus(self, other: Operator) -> Operator:
        return replace(
            self,
            calls=self.calls + other.calls,
            kernels=self.kernels + other.kernels,
            inner=_added(self.inner, other.inner),
            bytes=_added(self.bytes, other.bytes),
            flops=_added(self.flops, other.flops),
        )


def merge(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """Add up operators of one component and class, products of one size, and all-reduces of one message size."""
    merged: dict[tuple[Any, ...], Operator] = {}
    for operator in operators:
        message = tuple(sorted(operator.message.items(), key=repr)) if operator.message else None
        size = None if operator.behind or not operator.inner else _size(operator)
        key = (operator.component, operator.rate, message, operator.gather, operator.behind, size, operator.when)
        merged[key] = merged[key].plus(operator) if key in merged else operator
    return tuple(merged.values())


def _size(o: Operator) -> tuple[Any, ...]:
    """Inner width and bytes of one call, but for what many additions do to the last digits."""
    return tuple((f, f"{x / o.calls:.9g}") for form in (o.inner, o.bytes) for f, x in form.items())


def gemm(
    inputs: float,
    outputs: float,
    weight_bytes: float,
    rate: str,
    *,
    calls: int = 1,
    component: str = "gemm",
    rows: Feature = ROWS,
    walked: Feature = ONE,
) -> Operator:
    """rows x inputs times inputs x outputs: reads the weights once, reads and writes the rows as bf16. walked: whether its
    kernel walks the inner width."""
    moved = {ONE: weight_bytes, rows: (inputs + outputs) * 2.0}
    flops = {rows: 2.0 * inputs * outputs}
    one = Operator(component, rate, 1.0, 1.0, moved, flops, inner={walked: inputs}, shape=(outputs, inputs))
    return one.times(calls)


def small(rate: str, calls: float, width: float, *, kernels_each: float = 1.0, passes: float = 3.0) -> Operator:
    """Norms and elementwise kernels: `passes` x `width` bf16 values read or written a row."""
    return Operator("small_kernels", rate, calls, calls * kernels_each, {ROWS: calls * passes * width * 2.0})


# Families of classes whose calls are several kernels, each of which needs what the one before has summed.
IN_STAGES = ("moe", "attention")


def in_stages(rate: str) -> bool:
    """Whether a call of an operator class is several kernels in turn: what one walks the others' work does not hide
    (`operator_seconds`). THE rule, for what fits a class and for what prices it."""
    return rate.split("_")[0] in IN_STAGES


def operator_seconds(
    fixed: Array,
    moving: Array,
    computing: Array | None = None,
    walking: Array | None = None,
    *,
    staged: bool = False,
) -> Array:
    """THE cost equation: fixed + (moving^3 + computing^3 + walking^3)^(1/3). All in seconds; moving = bytes / bandwidth,
    computing = flops / peak, walking = inner width (or parts of a cache) x seconds a value: a tile of the output is summed from end to end of the
    inner width, block after block, and a block takes a latency however little is read. staged: calls of several kernels
    (`in_stages`), in which walking adds to the fixed time instead.

    The cubes follow the measured bend between the limits; their maximum is too low there, the root of squares and the sum
    too high (products of one H200, docs/model.md)."""
    if walking is not None and staged:
        fixed, walking = fixed + walking, None
    if computing is None and walking is None:
        return fixed + moving
    cubes = moving * moving * moving
    for limit in (computing, walking):
        if limit is not None:
            cubes = cubes + limit * limit * limit
    work: Array = np.cbrt(cubes)
    return fixed + work


# --- the machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own:
    """How products or experts of one shape differ from the line of their class: time / line at numbers of rows, ascending; linear
    between them.

    A library picks a kernel by shape: one whose tiles are few beside the processors, or cut the inner width among them, is 5 to
    15 % slower than its class on average; experts that an engine has no tuned kernel for are a third slower from some number
    of rows on. Beyond the rows that were timed the difference fades, to nothing at `FADED` times the most.
    """

    rows: Array
    factor: Array
    share: float = 1.0  # of the class's uncertainty that is left

    FADED: ClassVar[float] = 4.0

    @cached_property
    def _line(self) -> tuple[Array, Array]:
        return np.append(self.rows, self.rows[-1] * self.FADED), np.append(self.factor, 1.0)

    def at(self, rows: Array) -> Array:
        """Factors at numbers of rows."""
        found: Array = np.interp(rows, *self._line)
        return found


@dataclass(frozen=True)
class Rate:
    """Price of one operator class in SI units; each a scalar, or one value a parameter sample."""

    fixed_s: Array
    bytes_per_s: Array
    flops_per_s: Array
    source: str
    inner_s: Array | None = None  # a value of inner width, or a part of a cache
    shapes: Mapping[tuple[float, ...], Own] = field(
        default_factory=dict
    )  # products and experts that were timed themselves

    def scaled(self, start: Array, bandwidth: Array, flops: Array | None = None) -> Rate:
        """`start` times the fixed time, `bandwidth` times the bytes and (unless `flops` says otherwise) flops a second."""
        fast = bandwidth if flops is None else flops
        return Rate(
            self.fixed_s * start,
            self.bytes_per_s * bandwidth,
            self.flops_per_s * fast,
            self.source,
            None if self.inner_s is None else self.inner_s * start,
            self.shapes,
        )


@dataclass(frozen=True)
class Curve:
    """All-reduce latency against bytes: log-log linear between the points, flat below them, and above the last one
    linear in bytes at the last segment's bandwidth."""

    implementation: str
    log_bytes: Array
    log_seconds: Array
    factor: Array  # one multiplier, or one a sample
    source: str

    @cached_property
    def _beyond(self) -> tuple[float, float]:
        """Bytes of the last point, and seconds a byte above it."""
        if len(self.log_bytes) < 2:
            return 0.0, 0.0
        (b0, b1), (t0, t1) = np.exp(self.log_bytes[-2:]), np.exp(self.log_seconds[-2:])
        return b1, max((t1 - t0) / (b1 - b0), 0.0)

    def seconds(self, message: Array) -> Array:
        """Latency of one call, without the sample factor. message: bytes."""
        inside: Array = np.exp(np.interp(np.log(np.maximum(message, 1.0)), self.log_bytes, self.log_seconds))
        last, slope = self._beyond
        return inside + slope * np.maximum(message - last, 0.0)
