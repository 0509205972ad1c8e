"""What each remedy would give: the same boxes priced again without the fault, or with another choice.

A gain is tokens a second afterwards over tokens a second now, of the speculating server and at the accept length it has.
`gain` is over all explanations that still stand; `gain_if_right` over those that the remedy is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specsim.hypotheses import BY_ID, Fault
from specsim.machine import Machine
from specsim.posterior import WORTH, Posterior, spread
from specsim.probes import Boxes, Observation, Probe
from specsim.progress import track
from specsim.quantities import Quantity
from specsim.scenarios import Scenario

Array = NDArray[np.float64]
DRAWS = 600
HEALTHY = BY_ID["weak-drafter"]
WORTHWHILE = 1.02  # a remedy that gives less, where it is the right one, is none


@dataclass(frozen=True)
class Remedy:
    """chance: weight of the explanations it is for (1 for a choice that does not depend on them). gain: factor on
    tokens a second, None where the accept length would be needed and is not known. cycle_ms: afterwards."""

    id: str
    what: str
    command: str
    helps: tuple[str, ...]
    chance: float
    gain: Quantity | None
    gain_if_right: Quantity | None
    cycle_ms: Quantity | None
    accept_length_needed: Quantity | None = None
    reachable: bool | None = None


@dataclass(frozen=True)
class _Draw:
    """Boxes of one fault, in proportion to its weight."""

    fault: Fault
    chosen: NDArray[np.intp]


class _Mixture:
    """Draws of all explanations that still stand; prices are arrays over them all."""

    def __init__(self, found: Posterior, seed: int) -> None:
        self.rng = rng = np.random.default_rng((seed, 5))
        self.found, self.boxes = found, found.boxes
        self.draws = [_Draw(f, found.draws(f, max(round(DRAWS * w), 1), rng)) for f, w in found.ranked() if w > WORTH]

    def price(self, probe: Probe, mended: Sequence[str] = (), boxes: Boxes | None = None) -> Array:
        """The probe on every draw; faults named in `mended` are healthy."""
        source = boxes or self.boxes
        return np.concatenate(
            [source.predict_at(probe, HEALTHY if d.fault.id in mended else d.fault, d.chosen) for d in self.draws]
        )

    def seen(self, probe: Probe) -> Array:
        """The probe as it was observed, with its noise; as priced where it was not. A throughput tells the cycle too."""
        for o in self.found.observations:
            if (o.probe.kind, o.probe.batch, o.probe.tokens, o.probe.eager) == (
                probe.kind,
                probe.batch,
                probe.tokens,
                False,
            ):
                return self._around(o.value, o.probe.noise)
        if probe.kind == "cycle":
            length = None if self.found.boxes.scenario is None else self.found.boxes.scenario.accept_length
            rate = self.observed("rate", probe.batch, probe.tokens)
            if rate is not None and length is not None:
                running = self.running(probe.batch)
                return self._around(1e3 * float(length.reshape(-1)[0]) / rate.value, rate.probe.noise) * running
            verify = self.observed("verify", probe.batch, probe.tokens)
            if verify is not None:  # measured, whatever explains it; what comes on top is priced
                rest = self.price(probe) - self.price(verify.probe)
                return self._around(verify.value, verify.probe.noise) + np.maximum(rest, 0.0)
        return self.price(probe)

    def observed(self, kind: str, batch: int, tokens: int) -> Observation | None:
        """The first observation of a kind at this batch and as many tokens, in graphs or not as the server runs it."""
        for o in self.found.observations:
            if (o.probe.kind, o.probe.batch, o.probe.tokens, o.probe.eager) == (kind, batch, tokens, False):
                return o
        return None

    def around(self, o: Observation) -> Array:
        """An observation with its noise."""
        return self._around(o.value, o.probe.noise)

    def _around(self, value: float, noise: float) -> Array:
        n = sum(len(d.chosen) for d in self.draws)
        return np.asarray(value * np.exp(noise * self.rng.standard_normal(n)))

    def of(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Which draws are of these faults."""
        return np.concatenate([np.full(len(d.chosen), d.fault.id in ids) for d in self.draws])

    def running(self, batch: int) -> Array:
        """Requests that run at once, of `batch` that are sent."""
        out = []
        for d in self.draws:
            caps = [float(np.max(v.batch)) for v in d.fault.variants(self._sent(batch), "cycle")]
            which = self.boxes.severity[d.fault.id].get("variant", np.zeros(self.boxes.samples))[d.chosen]
            out.append(
                np.asarray(caps)[which.astype(int) % len(caps)]
                if d.fault.id == "admission-cap"
                else np.full(len(which), float(batch))
            )
        return np.concatenate(out)

    def _sent(self, batch: int) -> Scenario:
        assert self.boxes.scenario is not None
        return replace(self.boxes.scenario, batch=np.asarray(float(batch)))


@dataclass(frozen=True)
class Mend:
    """How a fault is mended under each engine."""

    id: str
    what: str
    sglang: str
    vllm: str
    helps: tuple[str, ...]


CLOCKS = "nvidia-smi -q -d PERFORMANCE,POWER tells a power cap, heat or a fixed clock"
MENDS = (
    Mend(
        "graph-for-verify",
        "replay verify from a CUDA graph",
        "drop --disable-cuda-graph, raise --cuda-graph-max-bs to the batch served, and look for 'cuda graph: True'",
        "drop --enforce-eager and raise max_cudagraph_capture_size to batch x (num_speculative_tokens + 1)",
        ("verify-eager",),
    ),
    Mend(
        "graph-for-draft",
        "replay draft and draft extend from CUDA graphs",
        "another draft attention backend, or a newer release (docs/engines.md)",
        "a newer release",
        ("draft-eager",),
    ),
    Mend(
        "experts-kernel",
        "tune the experts' kernel for this many rows",
        "tune fused_moe_triton for the GPU, or another --moe-runner-backend",
        "benchmarks/kernels/benchmark_moe.py --tune, or another backend",
        ("experts-slow",),
    ),
    Mend(
        "attention-kernel",
        "another attention backend for verify",
        "--attention-backend",
        "--attention-backend (VLLM_ATTENTION_BACKEND before 0.13)",
        ("verify-attention",),
    ),
    Mend(
        "no-host-gap",
        "take the host out of the cycle",
        "leave the overlap scheduler on; look for .item() and synchronisation in a profile, and ask specsim doctor whether the cores are shared",
        "--async-scheduling; look for synchronisation in a profile, and ask specsim doctor whether the cores are shared",
        ("host-gap",),
    ),
    Mend(
        "greedy-sampling",
        "sample greedily, or without top-p and top-k",
        "temperature 0",
        "temperature 0",
        ("sampling",),
    ),
    Mend(
        "capture-sizes",
        "capture graphs of the batches that are served",
        "--cuda-graph-bs with the served batches",
        "cudagraph_capture_sizes with multiples of num_speculative_tokens + 1",
        ("batch-padding",),
    ),
    Mend(
        "admit-more",
        "admit as many requests as are sent",
        "--max-running-requests",
        "--max-num-seqs and --max-num-batched-tokens",
        ("admission-cap",),
    ),
    Mend("full-clocks", "full clocks", CLOCKS, CLOCKS, ("clocks",)),
)


def remedies(found: Posterior, seed: int = 0) -> list[Remedy]:
    """Remedies of the explanations that still stand, then the choices that are open in any case."""
    s = found.boxes.scenario
    if s is None or s.method == "none":
        return []
    mixture = _Mixture(found, seed)
    b, d = int(np.max(s.batch)), int(np.max(s.draft_tokens))
    cycle, decode = Probe("cycle", batch=b, tokens=d), Probe("decode", batch=b)
    now, plain = mixture.seen(cycle), mixture.seen(decode)
    running = mixture.running(b)
    out = []
    for m in track(MENDS, "remedies"):
        weight = sum(found.weights[h] for h in m.helps)
        if weight < WORTH or (m.id == "admit-more" and np.all(running >= b)):  # none is kept waiting
            continue
        graphs = replace(s, eager=frozenset()) if m.id == "graph-for-verify" and s.eager else s  # one flag for all
        after = mixture.price(cycle, m.helps, found.boxes.of(graphs))
        gain = mixture.price(cycle) / after
        if m.id == "admit-more":
            gain = gain * np.where(mixture.of(m.helps), b / running, 1.0)
        command = m.sglang if s.engine.name == "sglang" else m.vllm
        out.append(_mend(m.id, m.what, command, m.helps, weight, gain, after, mixture.of(m.helps)))
    if s.parallel.tp > 1:
        out.append(_allreduce(found, mixture, cycle))
    out = [r for r in out if r.gain_if_right is None or r.gain_if_right.value >= WORTHWHILE]
    out.sort(key=lambda r: -r.chance * (r.gain_if_right.value - 1 if r.gain_if_right else 0.0))
    out += _choices(s, mixture, now, plain * running / b, b, d)
    return out


def _mend(
    id_: str, what: str, command: str, helps: tuple[str, ...], chance: float, gain: Array, after: Array, right: NDArray[np.bool_]
) -> Remedy:  # fmt: skip
    chosen = gain[right] if np.any(right) else gain
    return Remedy(id_, what, command, helps, chance, spread(gain), spread(chosen), spread(after))


def _allreduce(found: Posterior, mixture: _Mixture, cycle: Probe) -> Remedy:
    """The best all-reduce that the profile knows for these ranks, and no steep part."""
    s = found.boxes.scenario
    assert s is not None
    assert found.boxes.machine is not None
    machine, name = _best_link(found.boxes.machine, s.parallel.tp)
    better = found.boxes.on(machine)
    helps = ("allreduce-steep",)
    after = mixture.price(cycle, helps, better)
    gain = mixture.price(cycle) / after
    if s.engine.name == "sglang" and s.profile.link != "nvlink":
        command = (
            "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1 with SGLang 0.5.21 or later; else NCCL_PROTO=LL, NCCL_P2P_LEVEL=SYS"
        )
    else:
        command = "NCCL_PROTO, NCCL_P2P_LEVEL; see the log for which all-reduce the engine chose"
    what = f"all-reduce as good as {name} on the profile's box" if name else "a better all-reduce"
    right = mixture.of(helps)
    return _mend("better-allreduce", what, command, helps, found.weights["allreduce-steep"], gain, after, right)


def _best_link(m: Machine, ranks: int) -> tuple[Machine, str]:
    """The machine whose every all-reduce is the fastest one known for the ranks at 32 KiB, and that one's name."""
    size = np.asarray(32768.0)
    known = [c for (_, r, mode), c in m.curves.items() if r == ranks and mode == "graph"]
    if not known:
        return m, ""
    best = min(known, key=lambda c: float(c.seconds(size)))
    curves = {k: best if k[1] == ranks and k[2] == "graph" else c for k, c in m.curves.items()}
    return replace(m, curves=curves), best.implementation


def _choices(s: Scenario, mixture: _Mixture, now: Array, plain: Array, b: int, d: int) -> list[Remedy]:
    """Fewer draft tokens, no speculation, a better drafter. plain: ms in which plain decoding of all that are sent gives
    a token to as many sequences as the speculating server runs."""
    needed = now / plain
    most = float(min(np.max(s.num_steps), d - 1)) + 1
    length = None if s.accept_length is None else float(s.accept_length.reshape(-1)[0])
    out = []
    if d > 2 and s.topk == 1:
        fewer = d - 1
        after = mixture.price(Probe("cycle", batch=b, tokens=fewer))
        gain = None
        if length is not None:
            assert s.acceptance is not None
            shorter = float(np.asarray(s.acceptance.length(fewer - 1.0, 1, float(fewer))).reshape(-1)[0])
            gain = spread(shorter / length * mixture.price(Probe("cycle", batch=b, tokens=d)) / after)
        flag = (
            "--speculative-num-steps and --speculative-num-draft-tokens"
            if s.engine.name == "sglang"
            else "num_speculative_tokens"
        )
        out.append(Remedy("fewer-draft-tokens", f"{fewer} instead of {d}", flag, (), 1.0, gain, gain, spread(after)))
    off = None if length is None else spread(needed / length)
    rate = mixture.observed("rate", b, d)
    if rate is not None and off is not None:  # both rates are known, whatever the acceptance means
        off = spread(1e3 * mixture.running(b) / plain / mixture.around(rate))
    out.append(
        Remedy(
            "speculation-off",
            "no speculation",
            "drop the speculative flags",
            (),
            1.0,
            off,
            off,
            None,
            spread(needed),
            None,
        )
    )
    reachable = bool(np.median(needed) <= most)
    full = spread(most / needed)
    best = None if length is None else spread(np.full(len(now), most / length))
    out.append(
        Remedy(
            "better-drafter", f"perfect: {full} x plain",
            "", (), 1.0, best, best, spread(now), spread(needed), reachable,
        )
    )  # fmt: skip
    return out
