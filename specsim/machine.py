"""A hardware profile in SI units, with one value or many samples for every parameter, and the price of an operator.

Samples: each parameter is log-normal around its value with the relative uncertainty of its group (normal for the
signed engine corrections). Half of a group's variance is shared by all groups of one source, since a bias in how a
source measures hits all its numbers. Sample 0 is always the profile's own value. A class that stands in for one that the
profile lacks is as much less certain as the shipped profiles' classes of a family differ (`STAND_IN_FIXED`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from specsim.engines import Engine
from specsim.models import Model
from specsim.ops import PROCESSORS, Curve, Operator, Own, Rate, in_stages, operator_seconds
from specsim.profiles import AllReduceCurve, Group, Host, OperatorRate, Profile
from specsim.routing import Routing

Array = NDArray[np.float64]
AnyCurve = TypeVar("AnyCurve")  # of the machine, or of the profile
Key = TypeVar("Key")
Value = TypeVar("Value")
PASSES = 16  # whose prices a machine keeps: a scenario has 4
SHARED_VARIANCE = 0.5  # of a group, common to all groups of its source
ZERO: Array = np.zeros(())[()]  # a number costs a tenth of an array of none dimensions, and broadcasts as well
ONE: Array = np.ones(())[()]

# What stands in for a class that a profile has not measured, in order of preference.
STAND_INS: dict[str, tuple[str, ...]] = {
    "gemm": ("gemm_bf16",),
    "moe": ("moe_bf16", "moe_fp8", "moe_int4", "moe_mxfp4", "moe_nvfp4", "gemm_bf16"),
    "attention": ("attention_gqa", "attention_mla"),
    "router": ("norm", "tiny"),
    "norm": ("tiny",),
}
# How far a stand-in is from the class it stands in for: root mean square of ln(class / its stand-in) over the measured and
# published classes of the shipped profiles, for the fixed time and the bandwidth (tests/test_stand_ins.py works it out).
STAND_IN_FIXED, STAND_IN_BANDWIDTH = 0.6, 0.28
HOST = 2  # the stream of random numbers that host speeds are drawn from
# How far a published class is from what `specsim calibrate` finds on such a box: the same, over the shipped profiles of one GPU
# that has both. A table's own residuals, which a published class states, know nothing of it.
PUBLISHED_FIXED, PUBLISHED_BANDWIDTH = 0.3, 0.066


# Columns of a class's samples: what makes a shape, by kind of class, and what was measured.
SHAPED = {"gemm": ("n", "k"), "moe": ("hidden", "intermediate", "experts", "top_k")}
SAMPLED = ("rows", "bytes", "median_us")
# How far GPUs of one kind are apart in products of one shape: standard deviation of ln(seconds) over the shapes that several of them
# timed for a shipped profile (tests/test_stand_ins.py works it out).
OWN_SPREAD = 0.03
LEAST_ROWS = 3  # numbers of rows that a shape was timed at, to be told apart from its class


def priced_as(name: str, known: Collection[str]) -> str:
    """The class itself; where a class by kernel (gemm_fp8_triton) was not measured, that class by whatever kernel (gemm_fp8)."""
    general = name.rpartition("_")[0]
    return general if name not in known and general in known else name


def stand_in(name: str, known: Collection[str]) -> str:
    """The class of `known` that serves for a class that is not among them."""
    return next(n for n in (*STAND_INS.get(name.split("_")[0], ()), "gemm_bf16") if n in known and n != name)


@dataclass(frozen=True, repr=False)
class Machine:
    """Rates by class, all-reduce curves, launch costs and engine terms, in seconds and bytes.

    Every number has shape () or (samples,); `lift` gives it trailing axes to broadcast against a load. What is looked up
    once is kept: a stand-in for a class, the nearest curve.
    """

    rates: Mapping[str, Rate]
    curves: Mapping[tuple[str, int, str], Curve]  # by (implementation, ranks, mode)
    launch: Mapping[str, Array]  # kernel_s, collective_s, graph_s, graph_node_s, on cores of its own
    launch_source: str
    terms: Mapping[str, Array]  # the engine's, in seconds where they are times (specsim/data/*.yaml defines them)
    terms_source: str
    experts_overlap: Array
    bf16_flops_per_s: Array  # of a large product, without pause
    processors: int = PROCESSORS
    host: Host | None = None
    host_drawn: Array = ONE  # times what slow cores add on average
    samples: int = 0
    seed: int = 0

    @cached_property
    def routing(self) -> Routing:
        """Uniform, not known to be: rows may share experts by more than chance."""
        return Routing(overlap=self.experts_overlap)

    @cached_property
    def _standing_in(self) -> dict[str, Rate]:
        return {}

    @cached_property
    def passes(self) -> Callable[..., Any]:
        """passes(function, *key) is function(machine, *key), worked out once for the keys last used: moves of a slider leave some
        passes as they were, and so do other terms of the engine."""
        return lru_cache(PASSES)(lambda function, *key: function(self, *key))

    @cached_property
    def _nearest(self) -> dict[tuple[tuple[str, ...], int, str], Curve]:
        return {}

    def __repr__(self) -> str:
        held = (
            f"{len(self.rates)} operator classes, {len(self.curves)} all-reduce curves, {len(self.terms)} engine terms"
        )
        return f"<Machine: {held}, {self.samples} samples>"

    def __getstate__(self) -> dict[str, Any]:
        """Without what was looked up, which another process does itself."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def noting(self) -> Machine:
        """The machine for one evaluation: `read` then says what took part in it."""
        return replace(self, terms=Noted(self.terms), curves=Noted(self.curves))

    def under(self, terms: Mapping[str, Array], launch: Mapping[str, Array] | None = None) -> Machine:
        """The machine with other terms of the engine, and launch costs. No price depends on them: what either keeps serves both."""
        other = replace(self, terms=terms, launch=self.launch if launch is None else launch)
        vars(other).update(passes=self.passes, routing=self.routing)
        return other

    def launch_s(self, target: Model | None, ranks: int = 1, what: str = "kernel_s") -> Array:
        """Seconds that the engine's code takes to launch a kernel (or a collective) outside graphs: a bare launch from Python, times
        what the engine makes of it. Where the server's target has experts, the code is too varied to stay in the host's caches, which
        slows all of it."""
        terms = self.terms
        several = terms["eager_experts"] if target is not None and target.experts is not None else 1.0
        return np.asarray(self.launch[what] * terms["eager_factor"] * several * self.slowing(ranks))

    def host_s(self, term: str, ranks: int = 1) -> Array:
        """Seconds that a term of the engine takes which is the host's work."""
        return np.asarray(self.terms[term] * self.slowing(ranks))

    def slowing(self, ranks: int = 1) -> Array:
        """How many times as long as on cores of its own the host takes: 1 + host_slowing x what a fixed loop takes longer there,
        on average (`profiles.Host.slowdown`): an engine's code waits for memory and the driver too."""
        if self.host is None:
            return ONE
        most = self.host.slow_ratio - 1 if self.host.slow_share < 1 else np.inf
        longer = np.minimum((self.host.slowdown(ranks) - 1) * self.host_drawn, most)
        return np.asarray(1 + self.terms["host_slowing"] * longer)

    @property
    def read(self) -> frozenset[Any]:
        """Of a machine of `noting`: names of the terms, and keys of the all-reduce curves, that were looked up."""
        return frozenset(
            key for values in (self.terms, self.curves) if isinstance(values, Noted) for key in values.read
        )

    def rate(self, name: str) -> Rate:
        """The class as it is `priced_as`, or its `stand_in`, less certain."""
        found = self.rates.get(name) or self._standing_in.get(name) or self.rates.get(priced_as(name, self.rates))
        if found is None:
            other = self.rates[stand_in(name, self.rates)]
            rng = np.random.default_rng((self.seed, crc32(name.encode())))
            fixed, bandwidth = (_factor(rng, self.samples, s) for s in (STAND_IN_FIXED, STAND_IN_BANDWIDTH))
            found = replace(other.scaled(fixed, bandwidth), source="assumed")
            self._standing_in[name] = found
        return found

    def sustained(self) -> Machine:
        """The machine in passes that keep it computing, as prefills do: its power limit then sets the clock.

        In published tables, and in profiles calibrated before large products were timed under load, a class's peak comes
        from products of tens of microseconds between pauses; a large product without pause, which calibration measures too,
        is slower. Dense products alone slow down: what other classes compute, at a third to a half of that rate, draws less.
        """
        share = np.minimum(1.0, self.bf16_flops_per_s / self.rates["gemm_bf16"].flops_per_s)
        rates = {
            name: replace(rate, flops_per_s=rate.flops_per_s * share) if name.startswith("gemm_") else rate
            for name, rate in self.rates.items()
        }
        return replace(self, rates=rates)

    def curve(self, preference: tuple[str, ...], ranks: int, mode: str) -> Curve:
        """The first implementation of `preference` that is known for `ranks` and `mode`; see `nearest_curve`."""
        key = (preference, ranks, mode)
        if key not in self._nearest:
            self._nearest[key] = nearest_curve(self.curves, *key)
        return self._nearest[key]

    def price(self, o: Operator, moved: Array, flops: Array | None, inner: Array | None, n: int) -> tuple[Array, str]:
        """(seconds of all calls of an operator, origin of the price); not of all-reduces. moved, flops, inner: the bytes, flops
        and inner widths of all its calls, under a load of n axes."""
        rate = self.rate(o.rate)
        moving = moved / lift(rate.bytes_per_s, n)
        computing = None if flops is None else flops / lift(rate.flops_per_s, n)
        beside = self.rate(o.behind) if o.behind else rate
        start = o.calls * lift(beside.fixed_s, n)
        walking = None if inner is None or beside.inner_s is None else inner * lift(beside.inner_s, n)
        if o.behind:  # two streams share one memory: what the other's start cannot hide is paid
            hidden = start if walking is None else start + walking
            return np.maximum(operator_seconds(-hidden, moving, computing), 0.0), rate.source
        seconds = operator_seconds(start, moving, computing, walking, staged=o.staged)
        own = rate.shapes.get(o.shape) if o.shape else None
        if own is None or flops is None or o.shape is None:
            return seconds, rate.source
        if self.samples:
            value = seconds[:1]
            seconds = value + own.share * (seconds - value)
        return seconds * own.at(flops / (o.calls * own_flops(o.rate, o.shape))), rate.source


class Noted(dict[Key, Value]):
    """A mapping that notes in `read` which keys were looked up."""

    def __init__(self, values: Mapping[Key, Value]) -> None:
        super().__init__(values)
        self.read: set[Key] = set()

    def __getitem__(self, key: Key) -> Value:
        self.read.add(key)
        return super().__getitem__(key)


def own_flops(name: str, shape: Sequence[Any]) -> Any:
    """Flops of a row of a product, outputs x inputs, or of experts with a gate (`Operator.shape`): gate, up and down of the chosen
    ones. Fewer a row are fewer rows, where ranks share the sequences or the experts."""
    first, second, *experts = shape
    return 2.0 * first * second * (3.0 * experts[1] if name.split("_")[0] == "moe" else 1.0)


def own_shapes(name: str, profile: Profile) -> Mapping[tuple[float, ...], Own]:
    """By `Operator.shape`: how the products or experts of a class that a profile holds samples of differ from its line, where they were
    timed at `LEAST_ROWS` numbers of rows or more; experts with rows that spread."""
    table, rate, kind = profile.samples.get(name), profile.operators[name], name.split("_")[0]
    if kind not in SHAPED or not isinstance(table, Mapping) or not isinstance(table.get("rows"), list):
        return {}
    columns = str(table.get("columns")).split()
    if not {*SHAPED[kind], *SAMPLED} <= set(columns):
        return {}
    peak = rate.peak_tflops or profile.gpu.bf16_tflops * 0.7
    line = rate.fixed_us, rate.bandwidth_gb_s, peak, rate.inner_ns or 0.0, rate.relative_uncertainty
    return _own_shapes(name, tuple(columns), tuple(map(str, table["rows"])), line)


@lru_cache(64)  # a plan builds a machine for each of its choices
def _own_shapes(
    name: str, columns: tuple[str, ...], table: tuple[str, ...], line: tuple[float, float, float, float, float]
) -> Mapping[tuple[float, ...], Own]:
    """line: fixed us, GB/s, TFLOP/s, ns a value of inner width, relative uncertainty."""
    kind = name.split("_")[0]
    fixed_us, gb_s, tflops, inner_ns, uncertainty = line
    places = [columns.index(n) for n in (*SHAPED[kind], *SAMPLED)]
    cells = [row.split() for row in table]
    spread = columns.index("routing") if "routing" in columns else None
    whole = [r for r in cells if len(r) == len(columns) and (spread is None or r[spread] == "uniform")]
    if not whole:
        return {}
    values = np.asarray([numbers for r in whole if min(numbers := [positive(r[place]) for place in places]) > 0])
    if not len(values):
        return {}
    widths, (rows, nbytes, median_us) = values[:, : -len(SAMPLED)], values[:, -len(SAMPLED) :].T
    first, second, *_ = widths.T
    flops, inner = (
        rows * own_flops(name, widths.T),
        first + second if kind == "moe" else second,
    )  # both widths are walked
    line_us = operator_seconds(
        np.asarray(fixed_us),
        nbytes / (gb_s * 1e3),
        1e-6 * flops / tflops,
        inner * inner_ns * 1e-3,
        staged=in_stages(name),
    )
    seen: dict[tuple[float, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for shape, r, factor in zip(
        map(tuple, widths.tolist()), rows.tolist(), (median_us / line_us).tolist(), strict=True
    ):
        seen[shape][r].append(factor)
    share = min(1.0, OWN_SPREAD / max(uncertainty, OWN_SPREAD))
    return {
        shape: Own(np.asarray(sorted(timed)), np.asarray([sum(timed[r]) / len(timed[r]) for r in sorted(timed)]), share)
        for shape, timed in seen.items()
        if len(timed) >= LEAST_ROWS
    }


def positive(text: str) -> float:
    """A finite number above 0; of all else that an edited profile may hold, 0."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 < number < np.inf else 0.0


def _factor(rng: np.random.Generator, samples: int, spread: float) -> Array:
    """Log-normal factors, the first 1; a scalar 1 without samples."""
    return np.exp(np.concatenate([[0.0], spread * rng.standard_normal(samples)])) if samples else np.ones(())


def lift(parameter: Array, ndim: int) -> Array:
    """Shape (samples,) to (samples, 1, ..., 1); a scalar stays one."""
    return parameter.reshape(parameter.shape + (1,) * ndim) if ndim and parameter.ndim else parameter


def nearest_curve(
    curves: Mapping[tuple[str, int, str], AnyCurve], preference: tuple[str, ...], ranks: int, mode: str
) -> AnyCurve:
    """The curve to use, or the nearest: the preferred implementation in the other mode, another implementation, and
    then the same at the next rank count (larger first)."""
    modes = (mode, "graph" if mode == "eager" else "eager")
    known = {r for _, r, _ in curves}
    for r in sorted(known, key=lambda r: (r != ranks, r < ranks, abs(r - ranks))):
        others = tuple(i for i, other, _ in curves if other == r and i not in preference)
        for implementation in (*preference, *others):
            for m in modes:
                if (implementation, r, m) in curves:
                    return curves[implementation, r, m]
    raise KeyError(mode)


def build(profile: Profile, engine: Engine, *, samples: int = 0, seed: int = 0) -> Machine:
    """The machine of a profile under an engine, whose terms hold where the profile has none of its own.

    samples 0 gives scalars; otherwise arrays of samples + 1 values whose first is the profile's own.
    """
    rng = np.random.default_rng(seed)
    shared: dict[str, Array] = {}

    def deviation(reference: str, relative: float) -> Array:
        if not samples:
            return ZERO
        if reference not in shared:
            shared[reference] = rng.standard_normal(samples)
        own = rng.standard_normal(samples)
        z = np.sqrt(SHARED_VARIANCE) * shared[reference] + np.sqrt(1 - SHARED_VARIANCE) * own
        return np.concatenate([[0.0], relative * z])

    def positive(value: float, group: Group, more: float = 0.0) -> Array:
        more = more if group.source.kind == "published" else 0.0
        relative = np.hypot(group.relative_uncertainty, more)
        factor: Array = np.exp(deviation(group.source.reference, relative))
        return value * factor

    def priced(name: str, rate: OperatorRate) -> Rate:
        start = positive(1.0, rate, PUBLISHED_FIXED)
        return Rate(
            fixed_s=rate.fixed_us * 1e-6 * start,
            bytes_per_s=positive(rate.bandwidth_gb_s * 1e9, rate, PUBLISHED_BANDWIDTH),
            flops_per_s=positive((rate.peak_tflops or profile.gpu.bf16_tflops * 0.7) * 1e12, rate, PUBLISHED_BANDWIDTH),
            source=rate.source.kind,
            inner_s=rate.inner_ns * 1e-9 * start if rate.inner_ns else None,
            shapes=own_shapes(name, profile),
        )

    rates = {name: priced(name, rate) for name, rate in profile.operators.items()}
    curves: dict[tuple[str, int, str], Curve] = {
        (c.implementation, c.ranks, c.mode): _curve(c, positive(1.0, c)) for c in profile.allreduce
    }
    fitted = profile.engines.get(engine.name)
    terms: dict[str, Array] = {}
    for name, term in engine.terms.items():
        value, relative, reference = term.value, term.relative_uncertainty, term.source
        own = None if fitted is None else getattr(fitted, name)
        if fitted is not None and own is not None:
            value, relative, reference = own, fitted.uncertainty(name), fitted.source.reference
        unit = 1e-6 if name.endswith("_us") else 1.0
        factor: Array = np.maximum(1 + deviation(reference, relative), 0.0)
        terms[name.removesuffix("_us")] = value * unit * factor
    launch = profile.launch
    return Machine(
        rates=rates,
        curves=curves,
        launch={
            "kernel_s": positive(launch.kernel_us * 1e-6, launch),
            "collective_s": positive(launch.collective_us * 1e-6, launch),
            "graph_s": positive(launch.graph_us * 1e-6, launch),
            "graph_node_s": positive(launch.graph_node_us * 1e-6, launch),
        },
        launch_source=launch.source.kind,
        terms=terms,
        terms_source="assumed" if fitted is None else fitted.source.kind,
        samples=samples,
        seed=seed,
        bf16_flops_per_s=positive(profile.gpu.bf16_tflops * 1e12, profile.gpu),
        host=profile.host,
        host_drawn=_host_drawn(profile.host, samples, seed),
        processors=profile.gpu.processors or PROCESSORS,
        experts_overlap=np.concatenate([[0.0], np.abs(rng.normal(0.0, 0.12, samples))]) if samples else ZERO,
    )


def _host_drawn(host: Host | None, samples: int, seed: int) -> Array:
    """From a stream of its own: profiles that differ in the host's cores alone draw all else alike."""
    if host is None or not samples:
        return ONE
    drawn = np.random.default_rng((seed, HOST)).standard_normal(samples)
    return np.concatenate([[1.0], np.maximum(1 + host.relative_uncertainty * drawn, 0.0)])


def _curve(curve: AllReduceCurve, factor: Array) -> Curve:
    return Curve(
        curve.implementation,
        np.log(np.asarray(curve.bytes, dtype=float)),
        np.log(np.maximum.accumulate(curve.latency_us) * 1e-6),  # a larger message is never faster: dips are noise
        factor,
        curve.source.kind,
    )
