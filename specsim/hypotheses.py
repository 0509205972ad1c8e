"""What can be wrong: each fault is a change of parameters in the one cost model, as strong as a prior says.

A fault never has an equation of its own. `afflict` turns a scenario and a machine into those of a faulty box;
`specsim.cycle` prices both alike. Severities are drawn once, one a parameter sample, so every prediction of a fault
holds for the same imagined boxes. The priors are judgement: medians and spreads of what public reports describe, kept
wide. docs/field-case.md shows how much of a verdict they carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.cycle import target_pass
from specsim.machine import Machine, lift
from specsim.machine import build as build_machine
from specsim.ops import Curve, Rate
from specsim.scenarios import Scenario

Array = NDArray[np.float64]
Severity = Mapping[str, Array]
BOX, LINK = 0.05, 0.10  # relative spread of one box's operators and all-reduces against its profile, common to them
STRANGE, STRANGER = (
    0.15,
    0.4,
)  # share of boxes that the profile does not describe well, and the spread of all their times
COARSE_GRAPHS = (4, 8, 16, 32, 64, 128, 256)  # steps between captured batch sizes that users set by hand
CAPS = (8, 16, 32)  # running requests that users admit; the engine's own limit is as likely as all of them


@dataclass(frozen=True)
class SteepCurve(Curve):
    """An all-reduce curve `factor_above` times as high from `above` bytes on; both have one value a sample."""

    above: Array = field(default_factory=lambda: np.asarray(np.inf))
    factor_above: Array = field(default_factory=lambda: np.asarray(1.0))

    def seconds(self, message: Array) -> Array:
        """Latency of one call, samples leading. message: bytes."""
        n = np.ndim(message)
        return np.asarray(
            np.where(message >= lift(self.above, n), lift(self.factor_above, n), 1.0) * super().seconds(message)
        )


Apply = Callable[[Scenario, Machine, Severity, str], tuple[Scenario, Machine]]


@dataclass(frozen=True, eq=False)
class Fault:
    """One hypothesis.

    prior: weight before any observation, relative to the others. draw: severities of n imagined boxes. apply: the
    faulty scenario and machine of one phase ("decode", "verify" or "cycle"). variants: the scenarios among which each
    sample's severity "variant" chooses. possible: 0 where the scenario rules the fault out. chances: probability of
    yes-or-no findings, where it differs from the usual.
    """

    id: str
    name: str
    meaning: str
    prior: float
    draw: Callable[[np.random.Generator, int], dict[str, Array]] = field(default=lambda rng, n: {}, repr=False)
    apply: Apply = field(default=lambda s, m, severity, phase: (s, m), repr=False)
    variants: Callable[[Scenario, str], tuple[Scenario, ...]] = field(default=lambda s, phase: (s,), repr=False)
    possible: Callable[[Scenario], float] = field(default=lambda s: 1.0, repr=False)
    chances: Mapping[str, float] = field(default_factory=dict)


COSTLESS = ("acceptance-definition", "weak-drafter", "admission-cap")  # leave every step as fast as it should be
NOTICEABLE = 1.05  # a cycle over that of the same box without the fault: below it, a fault is none

# What a log or a flag shows, and how often it shows it when nothing is wrong with it.
CHANCES = {"verify-graph": 0.98, "draft-graph": 0.98, "queue": 0.03, "padded": 0.03}


def _lognormal(rng: np.random.Generator, n: int, median: float, sigma: float) -> Array:
    return np.asarray(median * np.exp(sigma * rng.standard_normal(n)))


def _loguniform(rng: np.random.Generator, n: int, low: float, high: float) -> Array:
    return np.asarray(np.exp(rng.uniform(np.log(low), np.log(high), n)))


def _rows(s: Scenario, phase: str) -> float:
    return float(np.max(s.batch)) * (1.0 if phase == "decode" else float(np.max(s.draft_tokens)))


def _with(machine: Machine, **terms: Array) -> Machine:
    """The machine with the seconds of engine terms raised."""
    return machine.under({**machine.terms, **{k: machine.terms[k] + v for k, v in terms.items()}})


# --- launched kernel by kernel ------------------------------------------------------------------------------------


def launches(rng: np.random.Generator, n: int) -> dict[str, Array]:
    """Seconds a kernel and an all-reduce launched from the engine's Python code. Hosts and models differ ten times: 80 % from 8 us
    (little more than a bare launch from Python, 4 to 6) to 65 (models with experts on virtual H200 hosts; 35 to 45 dense). An
    all-reduce takes as long as four to six kernels, bare (25 to 34 us) as in a server's step."""
    kernel = _lognormal(rng, n, 23e-6, 0.82)
    return {
        "kernel": kernel,
        "collective": kernel * _lognormal(rng, n, 5.0, 0.25),
        "waiting": rng.uniform(0.0, 1.0, n),  # share of the host's own work that launching does not already contain
    }


def launched(m: Machine, severity: Severity) -> Machine:
    """The machine with the launch costs of a severity."""
    waiting = {k: m.terms[k] * severity["waiting"] for k in ("decode_cpu", "cycle_cpu", "sequence_cpu", "rank_cpu")}
    launch = {**m.launch, "kernel_s": severity["kernel"], "collective_s": severity["collective"]}
    # A severity's launch holds the rest.
    alone = {"eager_factor": np.ones(()), "eager_experts": np.ones(()), "host_slowing": np.zeros(())}
    return m.under({**m.terms, **waiting, **alone}, launch)


def _eager(*phases: str) -> Apply:
    def apply(s: Scenario, m: Machine, severity: Severity, phase: str) -> tuple[Scenario, Machine]:
        return replace(s, eager=s.eager | set(phases)), launched(m, severity)

    return apply


# --- all-reduce -----------------------------------------------------------------------------------------------------


def _steepness(rng: np.random.Generator, n: int) -> dict[str, Array]:
    """Three of four protocol switches and lost links show between 4 and 64 KiB, the others up to 512 KiB."""
    small = _loguniform(rng, n, 4096, 65536)
    large = _loguniform(rng, n, 65536, 524288)
    return {
        "above": np.where(rng.random(n) < 0.75, small, large),
        "factor": 1 + _lognormal(rng, n, 2.5, 0.8),
        "left": rng.random(n) ** 2,  # of the excess, under another NCCL protocol
    }


def _steep(s: Scenario, m: Machine, severity: Severity, phase: str) -> tuple[Scenario, Machine]:
    return s, replace(m, curves={k: _steeper(c, severity) for k, c in m.curves.items()})


def _steeper(c: Curve, severity: Severity) -> Curve:
    return SteepCurve(
        c.implementation, c.log_bytes, c.log_seconds, c.factor, c.source, severity["above"], severity["factor"]
    )


# --- operators ------------------------------------------------------------------------------------------------------


def _cliff(rng: np.random.Generator, n: int) -> dict[str, Array]:
    """From so many rows on, the experts take so many times as long. Below one row: always (a low bandwidth)."""
    return {"above": _loguniform(rng, n, 0.5, 32.0), "factor": 1 + _lognormal(rng, n, 1.0, 0.7)}


def _slow_experts(s: Scenario, m: Machine, severity: Severity, phase: str) -> tuple[Scenario, Machine]:
    factor = np.where(_rows(s, phase) > severity["above"], severity["factor"], 1.0)
    return s, replace(m, rates={k: _slower(r, factor) if k.startswith("moe") else r for k, r in m.rates.items()})


def _slower(r: Rate, factor: Array) -> Rate:
    return r.scaled(factor, 1 / factor)


def _slow_attention(s: Scenario, m: Machine, severity: Severity, phase: str) -> tuple[Scenario, Machine]:
    """Further query rows cost `share` of a whole attention call each, where a good kernel shares the reading; with their
    number it grows as the root, between a kernel that re-reads for every row and one that runs all as a prefill."""
    if phase == "decode":
        return s, m
    layers = s.model.num_layers
    each = np.asarray(target_pass(s, m, np.ones(()), "decode").seconds["attention"]) / layers
    extra = severity["share"] * np.sqrt(2 * (float(np.max(s.draft_tokens)) - 1)) * each
    return s, _with(m, verify_layer=extra)


def _slow_clocks(s: Scenario, m: Machine, severity: Severity, phase: str) -> tuple[Scenario, Machine]:
    """Fixed times and arithmetic follow the SM clock; memory keeps its own."""
    f = severity["clock"]
    return s, replace(
        m,
        rates={k: r.scaled(1 / f, f**0.3, f) for k, r in m.rates.items()},
    )


def _sampling(s: Scenario, m: Machine, severity: Severity, phase: str) -> tuple[Scenario, Machine]:
    """Seconds a row for sorting and sampling the vocabulary; many rows share a launch."""
    each = severity["row"] / np.sqrt(max(float(np.max(s.batch)), 1.0))
    return s, _with(m, row_layer=each / s.model.num_layers)


# --- host -----------------------------------------------------------------------------------------------------------


def _gap(s: Scenario, m: Machine, severity: Severity, phase: str) -> tuple[Scenario, Machine]:
    """The GPU waits in each cycle; a clock around verify sees a share of it."""
    if phase == "verify":
        return s, m.under(m.terms, {**m.launch, "graph_s": m.launch["graph_s"] + severity["gap"] * severity["seen"]})
    return s, _with(m, cycle_host=severity["gap"], cycle_cpu=severity["gap"]) if phase == "cycle" else m


def _coarse(s: Scenario, phase: str) -> tuple[Scenario, ...]:
    """Graphs captured at multiples of a coarse step only, for the steps that pad this batch."""
    if phase == "decode":
        return (s,)
    batch = int(np.max(s.batch))
    steps = [n for n in COARSE_GRAPHS if batch % n][:4]
    return tuple(
        replace(s, options={**s.options, "captured_sizes": range(n, batch + n, n), "max_running_requests": batch + n})
        for n in steps
    ) or (s,)


def _admitted(s: Scenario, phase: str) -> tuple[Scenario, ...]:
    """A speculating server runs fewer requests than are sent."""
    batch = float(np.max(s.batch))
    own = [s.engine.running_cap_speculative or 0] * len(CAPS)
    caps = [c for c in (*CAPS, *own) if 0 < c < batch] if phase != "decode" else []
    return tuple(replace(s, batch=np.minimum(s.batch, c)) for c in caps) or (s,)


def _steep_possible(s: Scenario) -> float:
    """More than two PCIe GPUs leave every message to NCCL, whose curves are the steep ones in public reports."""
    if s.parallel.tp == 1:
        return 0.0
    return 0.2 if s.profile.link == "nvlink" else 1.5 if s.parallel.tp > 2 else 1.0


def _padded_possible(s: Scenario) -> float:
    """Small where the engine's own list has a graph of just this batch, since then a user must have replaced it."""
    captured = s.captured("verify", int(np.max(s.draft_tokens)))
    return 0.4 if float(np.max(s.batch)) in captured and "captured_sizes" not in s.options else 1.0


def _capped_possible(s: Scenario) -> float:
    """Sure to happen above the engine's own limit, unlikely below what anybody would set."""
    batch = float(np.max(s.batch))
    own = None if "max_running_requests" in s.options else s.engine.running_cap_speculative
    return 2.0 if own and batch > own else 1.0 if batch > CAPS[0] else 0.25


def _has_experts(s: Scenario) -> float:
    return float(any(layer.experts is not None for layer, _ in s.model.layers))


FAULTS: tuple[Fault, ...] = (
    Fault(
        "verify-eager",
        "verify is launched kernel by kernel, not from a CUDA graph",
        "the host launches every kernel of each verify; the time hardly depends on how many rows are verified",
        0.15,
        launches,
        _eager("verify"),
        chances={"verify-graph": 0.02},
    ),
    Fault(
        "allreduce-steep",
        "the all-reduce is slow at the size of verify's messages",
        "a protocol switch, a lost peer-to-peer path or a mis-detected link between the sizes of decode and verify",
        0.12,
        _steepness,
        _steep,
        possible=_steep_possible,
    ),
    Fault(
        "experts-slow",
        "the experts are slower than their bytes explain",
        "a kernel that has no good configuration for this many rows, low bandwidth, or rows that touch more experts",
        0.08,
        _cliff,
        _slow_experts,
        possible=_has_experts,
    ),
    Fault(
        "verify-attention",
        "attention over several query rows is slow",
        "the verify's attention kernel re-reads the cache for every row, or runs as a prefill",
        0.08,
        lambda rng, n: {"share": _lognormal(rng, n, 1.2, 0.8)},
        _slow_attention,
    ),
    Fault(
        "host-gap",
        "the GPU waits for the host in every cycle",
        "a synchronisation or Python work between draft and verify",
        0.09,
        lambda rng, n: {"gap": _lognormal(rng, n, 3e-3, 0.8), "seen": rng.uniform(0.0, 1.0, n)},
        _gap,
    ),
    Fault(
        "sampling",
        "sampling over the vocabulary is slow",
        "top-p and top-k sort the whole vocabulary for each verified row",
        0.07,
        lambda rng, n: {"row": _lognormal(rng, n, 0.6e-3, 0.7)},
        _sampling,
    ),
    Fault(
        "batch-padding",
        "the graph runs a larger batch than is served",
        "the captured sizes are coarse, so each verify is padded to the next one",
        0.06,
        lambda rng, n: {"variant": rng.integers(0, 12, n).astype(float)},
        variants=_coarse,
        possible=_padded_possible,
        chances={"padded": 0.97},
    ),
    Fault(
        "admission-cap",
        "fewer requests run than are sent",
        "speculation lowers how many requests the engine admits; the others wait and the steps are as fast as they should be",
        0.07,
        lambda rng, n: {"variant": rng.integers(0, 12, n).astype(float)},
        variants=_admitted,
        possible=_capped_possible,
        chances={"queue": 0.97},
    ),
    Fault(
        "draft-eager",
        "the draft is launched kernel by kernel",
        "draft steps and draft extend run outside CUDA graphs; verify does not",
        0.08,
        launches,
        _eager("draft", "extend"),
        possible=lambda s: float(s.draft is not None),
        chances={"draft-graph": 0.02},
    ),
    Fault(
        "clocks",
        "the GPUs run at low clocks",
        "a power cap, heat or a fixed clock slows decode and verify alike",
        0.07,
        lambda rng, n: {"clock": np.minimum(_lognormal(rng, n, 0.65, 0.2), 0.92)},
        _slow_clocks,
    ),
    Fault(
        "acceptance-definition",
        "the acceptance that was read is not what it seems",
        "the figure counts the bonus token where it should not, or the reverse, or is a share of something else",
        0.07,
        lambda rng, n: {"ratio": np.exp(np.where(rng.random(n) < 0.7, -1, 1) * (0.12 + np.abs(0.3 * rng.standard_normal(n))))},
    ),
    Fault(
        "weak-drafter",
        "nothing is slow: the drafter is too weak",
        "every step costs what it should, and the accept length stays under the break-even",
        0.10,
    ),
)  # fmt: skip
BY_ID = {f.id: f for f in FAULTS}


def boxes(s: Scenario, n: int, seed: int) -> Machine:
    """n imagined healthy boxes: the profile's parameter samples, and what sets one box apart from its profile."""
    m = build_machine(s.profile, s.engine, samples=n, seed=seed)
    rng = np.random.default_rng((seed, 1))
    whole = np.where(rng.random(n) < STRANGE, STRANGER, 0.0) * rng.standard_normal(n)
    box = np.concatenate([[1.0], np.exp(whole + BOX * rng.standard_normal(n))])
    link = np.concatenate([[1.0], np.exp(whole + LINK * rng.standard_normal(n))])
    return replace(
        m,
        rates={k: _slower(r, box) for k, r in m.rates.items()},
        curves={k: replace(c, factor=c.factor * link) for k, c in m.curves.items()},
    )


def take(m: Machine, chosen: NDArray[np.intp]) -> Machine:
    """The machine with these of its samples."""

    def of(x: Any) -> Array:
        array = np.asarray(x)
        return array[chosen] if array.ndim else array

    return replace(
        m,
        rates={
            k: Rate(
                of(r.fixed_s),
                of(r.bytes_per_s),
                of(r.flops_per_s),
                r.source,
                None if r.inner_s is None else of(r.inner_s),
                r.shapes,
            )
            for k, r in m.rates.items()
        },
        curves={k: replace(c, factor=of(c.factor)) for k, c in m.curves.items()},
        launch={k: of(v) for k, v in m.launch.items()},
        host_drawn=of(m.host_drawn),
        terms={k: of(v) for k, v in m.terms.items()},
        experts_overlap=of(m.experts_overlap),
    )
