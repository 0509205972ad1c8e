"""Why is a verify slow? Hypotheses weighed, the next test, what cannot help, and what each remedy would give.

    diagnose(scenario, observations) -> Diagnosis

Everything is one model: faults are changes of its parameters (specsim.hypotheses), measurements are probes of it
(specsim.probes), weights and worth of tests are Monte Carlo over its parameters. One fault at a time is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specsim.cycle import evaluate
from specsim.errors import InputError
from specsim.experiments import LEAST_BITS, Appraisal, Experiment, Uninformative, appraise, candidates, uninformative
from specsim.hypotheses import BY_ID, Fault
from specsim.memory import memory
from specsim.pages import Grid, Page, Shown
from specsim.posterior import Posterior, posterior, spread, weigh
from specsim.prediction import machine_of
from specsim.probes import Observation, Probe
from specsim.profiles import list_profiles, load_profile
from specsim.provenance import sources_of
from specsim.quantities import Quantity, short, six
from specsim.remedies import Remedy, remedies
from specsim.scenarios import Scenario, build

SCHEMA = "specsim.diagnosis/1"
CLEAR = 4.0  # the likeliest explanation leads clearly when it has so many times the weight of the second
DRAWS = 600
MISFIT = 4.0  # deviations from the best explanation beyond which nothing explains an observation
UNGRAPHED_ALIKE = {
    "sglang": "Plain decoding without CUDA graphs is as slow: if that server runs with --disable-cuda-graph, or its log says"
    " 'cuda graph: False', give --eager decode --eager verify.",
    "vllm": "Plain decoding without CUDA graphs is as slow: if that server runs with --enforce-eager, give --eager decode"
    " --eager verify.",
}
FAR = 1.3  # decode observed over predicted
ALONE = 0.1  # an explanation above this weight is one that should explain all that was seen
STEPS = ("decode", "verify", "cycle", "rate")
UNGRAPHED = ("eager", "disable_cuda_graph", "captured_sizes", "cuda_graph_max_bs")  # options that a healthy box lacks
FASTER = 0.75  # of a decode step: no verify of more rows, and no cycle, takes less


@dataclass(frozen=True)
class Hypothesis:
    """A fault, its weight, what it predicts for decode and verify (ms; None without a scenario), and its weight before
    any observation."""

    fault: Fault
    weight: float
    decode_ms: Quantity | None
    verify_ms: Quantity | None
    prior: float


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The answer. `separable`: whether one explanation leads clearly and fits. `facts`: what the given files say by
    themselves. `misfits`: why the observations cannot be right, or that nothing explains a step time; weights then only
    say what is nearest. `ungraphed`: said where plain decoding is as slow as it would be without graphs. `expected_verify_ms`: of a healthy box that decodes as fast as observed."""

    page_from = "specsim.diagnose_text"

    scenario: Scenario | None
    observations: tuple[Observation, ...]
    separable: bool
    hypotheses: tuple[Hypothesis, ...]
    experiments: tuple[Appraisal, ...]
    uninformative: tuple[Uninformative, ...]
    remedies: tuple[Remedy, ...]
    expected_verify_ms: Quantity | None = None
    facts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()
    ungraphed: str = ""
    engine: str = "sglang"
    found: Posterior | None = field(default=None, repr=False, compare=False)

    def observed(self, kind: str) -> float | None:
        """The first observed value of a kind of probe at the scenario's own batch."""
        for o in self.observations:
            if o.probe.kind == kind and (self.scenario is None or o.probe.batch == _batch(self.scenario)):
                return o.value
        return None

    def json(self) -> dict[str, Any]:
        """The document of schema specsim.diagnosis/1."""
        s = self.scenario
        return {
            "schema": SCHEMA,
            **self.said(),
            "summary": list(_sentences(self.page())),
            "scenario": None if s is None else {
                "model": s.names.get("model", s.model.name), "hardware": s.profile.name, "engine": s.engine.name,
                "tp": s.parallel.tp, "batch": _batch(s), "context": int(np.max(s.context)), "method": s.method,
                "draft_tokens": int(np.max(s.draft_tokens)),
            },
            "observations": [
                {"kind": o.probe.kind, "name": o.probe.name, "batch": o.probe.batch, "draft_tokens": o.probe.tokens,
                 "bytes": o.probe.size, "value": o.value, "unit": o.probe.unit, "source": o.source}
                for o in self.observations
            ],
            "separable": self.separable,
            "hypotheses": [
                {"id": h.fault.id, "weight": six(h.weight), "prior": six(h.prior), "name": h.fault.name, "meaning": h.fault.meaning,
                 "predicts": {"decode_ms": _q(h.decode_ms), "verify_ms": _q(h.verify_ms)}}
                for h in self.hypotheses
            ],
            "experiments": [_experiment(a) for a in self.experiments],
            "uninformative": [{"id": u.id, "why": u.why} for u in self.uninformative],
            "remedies": [
                {"id": r.id, "what": r.what, "command": r.command, "helps": list(r.helps), "chance": six(r.chance),
                 "gain": _q(r.gain), "gain_if_right": _q(r.gain_if_right), "cycle_ms": _q(r.cycle_ms),
                 "accept_length_needed": _q(r.accept_length_needed), "reachable": r.reachable}
                for r in self.remedies
            ],
            "expected_verify_ms": _q(self.expected_verify_ms),
            "facts": list(self.facts),
            "sources": [] if s is None else sources_of(s),
            "warnings": list(self.warnings),
        }  # fmt: skip


def _experiment(a: Appraisal) -> dict[str, Any]:
    e = a.experiment
    return {
        "id": e.id, "what": e.what, "bits": six(a.bits), "minutes": e.minutes, "command": e.command, "tell": e.tell,
        "predictions": {k: _q(v) for k, v in a.predictions[0].items()},
        "measures": [
            {"what": label(p), "unit": p.unit or "probability", "predictions": {k: _q(v) for k, v in q.items()}}
            for p, q in zip(e.probes, a.predictions, strict=True)
        ],
    }  # fmt: skip


def _sentences(page: Page) -> Iterator[str]:
    """What a page says before its first table, but for its title and verdict."""
    for part in page:
        if isinstance(part, Grid):
            return
        if part.text and part.style in ("", "warning"):
            yield part.text


def _q(x: Quantity | None) -> dict[str, float] | None:
    return None if x is None else x.json()


def _batch(s: Scenario) -> int:
    return int(np.max(s.batch))


def label(p: Probe) -> str:
    """A probe in words."""
    rows = f" at batch {p.batch}" if p.kind in ("decode", "verify", "cycle", "rate") else ""
    return {
        "decode": f"decode{rows}",
        "verify": f"verify of {p.tokens} rows{rows}" + (" with graphs off" if p.eager else ""),
        "cycle": f"cycle{rows}",
        "rate": f"tokens a second{rows}",
        "component": f"verify: {p.name.replace('_', ' ')}",
        "allreduce": f"all-reduce of {p.size} bytes",
        "greedy": "verify, greedy",
        "protocol": "verify under NCCL_PROTO=LL",
        "clock": "SM clock over its maximum",
        "identity": "throughput x cycle / (batch x accept length)",
        "yes": p.name,
    }[p.kind]


def diagnose(
    scenario: Scenario | None,
    observations: Sequence[Observation],
    *,
    facts: Sequence[str] = (),
    warnings: Sequence[str] = (),
    engine: str = "sglang",
    seed: int = 0,
) -> Diagnosis:
    """Weigh the faults, rank the tests, price the remedies.

    scenario None: nothing is known of model or hardware but the engine's name; only yes-or-no observations count. Raises ValueError when
    a time is observed without a scenario.
    """
    scenario, observations = _declared(scenario, observations)
    found = posterior(scenario, observations, seed=seed)
    rng = np.random.default_rng((seed, 6))
    ranked = found.ranked()
    before = weigh(found.boxes, ()).weights
    rows = max((o.probe.batch * o.probe.tokens for o in observations), default=0)
    no_graph = any(o.probe.name == "verify-graph" and not o.value for o in observations)
    tests = [
        t
        for t in candidates(scenario, engine, rows)
        if not _answered(t, observations) and not (t.id == "graphs-off" and no_graph)
    ]
    appraised = appraise(found, tests, seed) if tests else []
    useful = tuple(a for a in appraised if a.bits >= LEAST_BITS)
    misfits, doubts = _misfits(found, rng)
    ungraphed = UNGRAPHED_ALIKE[engine if scenario is None else scenario.engine.name] if _launched_alike(found) else ""
    misfits = _impossible(scenario, observations) + misfits
    return Diagnosis(
        scenario=scenario,
        observations=tuple(observations),
        separable=ranked[0][1] >= CLEAR * ranked[1][1] and not misfits and not ungraphed,
        hypotheses=tuple(_hypothesis(found, f, w, before[f.id], rng) for f, w in ranked),
        experiments=useful,
        uninformative=tuple(uninformative(found, appraised, engine)),
        remedies=tuple(remedies(found, seed)),
        expected_verify_ms=_healthy(scenario, observations, seed),
        facts=tuple(facts),
        warnings=(*warnings, *misfits, *doubts, *([ungraphed] if ungraphed else [])),
        misfits=tuple(misfits),
        ungraphed=ungraphed,
        engine=engine if scenario is None else scenario.engine.name,
        found=found,
    )


def elsewhere(options: Mapping[str, Any]) -> list[str]:
    """A sentence on how long a healthy cycle takes on the boxes that specsim knows; none when no box can serve this."""
    found = []
    known = {k: v for k, v in options.items() if k not in (*UNGRAPHED, "draft")}  # the public draft will do
    for name in list_profiles():
        profile = load_profile(name)
        if profile.cpu or profile.gpus < int(options.get("tp") or 1) or any("inferred" in c for c in profile.caveats):
            continue
        try:
            s = build(**{**known, "hardware": profile})
        except InputError:
            continue
        if s.method != "none" and memory(s).fits:
            found.append((float(evaluate(s, machine_of(s)).cycle_s.reshape(-1)[0]) * 1e3, name))
    if not found:
        return []
    (low, first), (high, last) = min(found), max(found)
    return [
        f"A healthy cycle of this model takes {low:.1f} ms ({first}) to {high:.1f} ms ({last}) on the boxes that specsim knows."
    ]


def _declared(s: Scenario | None, observations: Sequence[Observation]) -> tuple[Scenario | None, Sequence[Observation]]:
    """Settings that run verify without a graph are a finding like any other: the fault stands for it, the others are
    priced with a graph."""
    if s is None or s.method == "none" or _verify_graph(s):
        return s, observations
    options = {k: v for k, v in s.options.items() if k != "disable_cuda_graph"}
    if "disable_cuda_graph" in s.options:
        mended = replace(s, options=options, eager=frozenset({"decode", "draft", "extend"}))
    elif "verify" in s.eager:
        mended = replace(s, eager=s.eager - {"verify"})
    elif {"captured_sizes", "cuda_graph_max_bs"} & set(
        options
    ):  # a default may have changed; what was asked for has not
        rows = 1 if s.engine.name == "sglang" else int(np.max(s.draft_tokens))
        options = {k: v for k, v in options.items() if k != "captured_sizes"} | {"cuda_graph_max_bs": _batch(s) * rows}
        mended = replace(s, options=options)
    else:
        return s, observations
    if not _verify_graph(mended):
        return s, observations
    flag = Observation(Probe("yes", name="verify-graph"), 0.0, "settings")
    said = any(o.probe == flag.probe for o in observations)
    return mended, [*observations, *([] if said else [flag])]


def _verify_graph(s: Scenario) -> bool:
    """Whether verify runs in a graph under the scenario's settings."""
    return s.graph_phases["verify"] and _batch(s) <= max(s.captured("verify", int(np.max(s.draft_tokens))), default=0)


def _launched_alike(found: Posterior) -> bool:
    """Whether plain decoding is as slow as it would be without CUDA graphs, of which no explanation speaks."""
    s = found.boxes.scenario
    if s is None or "decode" in s.eager:
        return False
    probe = Probe("decode", batch=_batch(s))
    seen = [o.value for o in found.observations if o.probe.kind == "decode" and o.probe.batch == probe.batch]
    if not seen or any(o.probe.name == "verify-graph" and o.value for o in found.observations):
        return False
    healthy = BY_ID["weak-drafter"]
    low, high = np.quantile(found.boxes.predict(replace(probe, eager=True), healthy), (0.1, 0.9))
    return bool(seen[0] > FAR * found.boxes.predict(probe, healthy)[0] and low <= seen[0] <= high)


def _impossible(s: Scenario | None, observations: Sequence[Observation]) -> list[str]:
    """Step times that contradict each other whatever the box."""
    if s is None or "decode" in s.eager:
        return []
    out = []
    plain = {o.probe.batch: o.value for o in observations if o.probe.kind == "decode" and not o.probe.eager}
    verifies = {o.probe.batch: o.value for o in observations if o.probe.kind == "verify" and not o.probe.eager}
    for o in observations:
        p = o.probe
        decode, verify = plain.get(p.batch), verifies.get(p.batch)
        if p.kind in ("verify", "cycle") and not p.eager and decode is not None and o.value < FASTER * decode:
            out.append(
                f"{label(p)} = {short(o.value)} ms cannot be: it does all that a plain decode step of {short(decode)} ms does, and"
                " more. Are both times of one server, and was the GPU waited for before the clock was stopped?"
            )
        elif p.kind == "cycle" and verify is not None and o.value < 0.95 * verify:
            out.append(f"{label(p)} = {short(o.value)} ms cannot be: the verify inside it takes {short(verify)} ms.")
    return out


def _answered(test: Experiment, observations: Sequence[Observation]) -> bool:
    """Whether all that a test would give is observed already (whatever the noise)."""
    seen = {
        (o.probe.kind, o.probe.batch, o.probe.tokens, o.probe.name, o.probe.size, o.probe.eager) for o in observations
    }
    return all((p.kind, p.batch, p.tokens, p.name, p.size, p.eager) in seen for p in test.probes)


def _speculates(s: Scenario | None) -> bool:
    return s is not None and s.method != "none"


def _hypothesis(found: Posterior, fault: Fault, weight: float, prior: float, rng: np.random.Generator) -> Hypothesis:
    s = found.boxes.scenario
    if s is None:
        return Hypothesis(fault, weight, None, None, prior)
    chosen = found.draws(fault, DRAWS, rng)
    b = _batch(s)
    decode = spread(found.boxes.predict_at(Probe("decode", batch=b), fault, chosen))
    if not _speculates(s):
        return Hypothesis(fault, weight, decode, None, prior)
    verify = Probe("verify", batch=b, tokens=int(np.max(s.draft_tokens)))
    return Hypothesis(fault, weight, decode, spread(found.boxes.predict_at(verify, fault, chosen)), prior)


def _healthy(s: Scenario | None, observations: Sequence[Observation], seed: int) -> Quantity | None:
    """Verify of a healthy box that decodes as observed."""
    if s is None or not _speculates(s):
        return None
    plain = [o for o in observations if o.probe.kind == "decode"]
    found = posterior(s, plain, samples=4096, most=4096, seed=seed)
    healthy = BY_ID["weak-drafter"]
    chosen = found.draws(healthy, DRAWS, np.random.default_rng((seed, 7)))
    probe = Probe("verify", batch=_batch(s), tokens=int(np.max(s.draft_tokens)))
    return spread(found.boxes.predict_at(probe, healthy, chosen))


def _misfits(found: Posterior, rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """Observations that no likely explanation comes near: step times, and others."""
    steps: list[str] = []
    others: list[str] = []
    standing = [f for i, (f, w) in enumerate(found.ranked()) if w >= ALONE or i == 0]
    for o in found.observations:
        if o.probe.binary:
            continue
        off, best = min(_distance(found, o, f, rng) for f in standing)
        if off <= MISFIT:
            continue
        near = [f.id for f, w in found.ranked() if f not in standing and _distance(found, o, f, rng)[0] < MISFIT / 2]
        observed = f"{label(o.probe)} = {short(o.value)} {o.probe.unit}"
        if near and o.probe.kind in STEPS and len(found.observations) > 1:
            text = (
                f"{' and '.join(f.id for f in standing)} cannot explain {observed} (predicted: {best:.3g}), but {near[0]}"
                " could: two faults together, or one of the numbers is wrong."
            )
        else:
            text = (
                f"nothing explains {observed}: the nearest explanation gives {best:.3g}."
                f" {_unit(best / o.value) if o.probe.unit == 'ms' else ''}"
                "Are --model, --hardware, --tp and --batch those of the server?"
            )
        (steps if o.probe.kind in STEPS else others).append(text)
    return steps, others


def _distance(found: Posterior, o: Observation, fault: Fault, rng: np.random.Generator) -> tuple[float, float]:
    """(deviations between an observation and what a fault predicts for it, that prediction)."""
    predicted = found.boxes.predict_at(o.probe, fault, found.draws(fault, 200, rng))
    z = float(np.median(np.abs(o.probe.scaled(np.asarray(o.value)) - o.probe.scaled(predicted))))
    return z, float(np.median(predicted))


def _unit(ratio: float) -> str:
    """What a factor of a thousand between prediction and observation suggests."""
    if 100 < ratio < 10_000:
        return "Was it given in seconds? "
    return "Was it given in us? " if 100 < 1 / ratio < 10_000 else ""
