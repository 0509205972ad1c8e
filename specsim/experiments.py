"""What to measure next: candidate tests, what each fault predicts for them, and how many bits they are worth.

The worth of a test is the mutual information between the fault and the outcome, under the weights that hold now:
the entropy of the weights less what is expected to be left of it. Outcomes are simulated from boxes of the posterior
with the noise of the measurement; tests are ranked by bits a minute, those that settle little after those that settle
much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specsim.hypotheses import FAULTS, Fault
from specsim.posterior import WORTH, Posterior, spreads
from specsim.probes import Probe, chance
from specsim.progress import track
from specsim.quantities import Quantity
from specsim.scenarios import Scenario

Array = NDArray[np.float64]
TRUTHS, REFERENCES = 400, 192  # simulated outcomes in all, and boxes of each fault they are compared with
LEAST_BITS = 0.03  # worth less: cannot help
FEW = 0.35  # of the bits of the most telling test: below it, a test comes after all above it
NCCL_NOISE, COMPONENT_NOISE, CLOCK_NOISE, IDENTITY_NOISE = 0.12, 0.08, 0.03, 0.03
PARTS = ("allreduce", "experts", "attention", "gemm", "small_kernels", "waiting")


@dataclass(frozen=True)
class Experiment:
    """A test that a user can run. `probes` are the numbers it gives; `tell` how to hand them back to specsim."""

    id: str
    what: str
    minutes: float
    command: str
    probes: tuple[Probe, ...]
    tell: str


@dataclass(frozen=True)
class Appraisal:
    """An experiment under a posterior: bits, and by probe and fault id what is predicted."""

    experiment: Experiment
    bits: float
    predictions: tuple[dict[str, Quantity], ...]

    @property
    def rate(self) -> float:
        """Bits a minute."""
        return self.bits / self.experiment.minutes


@dataclass(frozen=True)
class Uninformative:
    """A test that cannot help, and why."""

    id: str
    why: str


def candidates(s: Scenario | None, engine: str = "sglang", rows: int = 0) -> list[Experiment]:
    """The tests that make sense for a scenario (None: only what a log of `engine` shows). rows: the most rows of any
    pass that was observed."""
    sglang = (engine if s is None else s.engine.name) == "sglang"
    if s is None:
        return [] if engine == "other" else _log_tests(sglang)
    found = _log_tests(sglang)
    b, d = int(np.max(s.batch)), int(np.max(s.draft_tokens))
    found += [
        _decode_test(s, b * (4 if s.method == "none" else d), sglang),
        *_network_tests(s, b, max(rows, b * d)),
        *_server_tests(s, b, d, sglang),
    ]
    clock = Probe("clock", noise=CLOCK_NOISE)
    found.append(
        Experiment(
            "clocks", "SM clock under load", 1,
            "nvidia-smi --query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit,clocks_throttle_reasons.active --format=csv -l 1",
            (clock,), "--result clocks=SM_CLOCK/MAX_CLOCK",
        )
    )  # fmt: skip
    if s.accept_length is not None:
        found.append(
            Experiment(
                "acceptance-identity", "throughput x cycle against batch x accept length", 2,
                'grep "Decode batch" server.log | tail -20' if sglang else 'grep "SpecDecoding metrics" server.log | tail -20',
                (Probe("identity", batch=b, noise=IDENTITY_NOISE),), "--result acceptance-identity=TOKENS_PER_S*CYCLE_S/(BATCH*LENGTH)",
            )
        )  # fmt: skip
    return found if s.method != "none" else [t for t in found if all(_plain(p) for p in t.probes)]


def _plain(p: Probe) -> bool:
    """Whether a server that does not speculate can be asked."""
    return p.kind in ("decode", "allreduce", "clock") or p.name == "queue"


def _log_tests(sglang: bool) -> list[Experiment]:
    if not sglang:
        return [
            Experiment("graph-flag", "whether graphs are on and captured up to batch x (num_speculative_tokens + 1) tokens", 1,
                       'grep -oE "enforce_eager=[A-Za-z]+|.?cudagraph_mode[^,]*|.?max_cudagraph_capture_size[^,]*" server.log | sort -u',
                       (Probe("yes", name="verify-graph"),), "--result graph-flag=yes|no"),
            Experiment("queue", "whether requests wait while the batch stays below what is sent", 1,
                       'grep -o "Running: [0-9]* reqs, Waiting: [0-9]* reqs" server.log | tail -20',
                       (Probe("yes", name="queue"),), "--result queue=yes|no"),
        ]  # fmt: skip
    return [
        Experiment("graph-flag", "whether decode lines, while speculating, say that verify ran in a graph", 1,
                   'grep -o "cuda graph: [A-Za-z]*" server.log | sort | uniq -c',
                   (Probe("yes", name="verify-graph"),), "--result graph-flag=true|false, or give the log"),
        Experiment("queue", "whether requests wait while the batch stays below what is sent", 1,
                   'grep -oE "#running-req: [0-9]+|#queue-req: [0-9]+" server.log | tail -20',
                   (Probe("yes", name="queue"),), "--result queue=yes|no, or give the log"),
        Experiment("captured-sizes", "whether the served batch is missing from the captured sizes", 1,
                   'grep -iE "capture cuda graph bs|cuda_graph_bs" server.log | head',
                   (Probe("yes", name="padded"),), "--result captured-sizes=yes|no"),
        Experiment("draft-graph", "whether graphs were captured for the draft and its extend", 1,
                   'grep -iE "capture draft (extend )?cuda graph" server.log',
                   (Probe("yes", name="draft-graph"),), "--result draft-graph=yes|no"),
    ]  # fmt: skip


def _decode_test(s: Scenario, rows: int, sglang: bool) -> Experiment:
    context = int(np.max(s.context))
    if sglang:
        run = f"python -m sglang.bench_one_batch_server --model None --base-url http://localhost:30000 --batch-size {rows} {rows + 1} --input-len {max(context, 1)} --output-len 256"
    else:
        run = f"vllm bench serve --model MODEL --dataset-name random --max-concurrency {rows} --num-prompts {8 * rows} --random-input-len {max(context, 1)} --random-output-len 256"
    return Experiment(
        f"decode-batch-{rows}-{rows + 1}", f"plain decode, speculation off, at as many rows as a verify has: batch {rows} and {rows + 1}",
        3, run, (Probe("decode", batch=rows), Probe("decode", batch=rows + 1)),
        f"--decode-at {rows}=MS --decode-at {rows + 1}=MS",
    )  # fmt: skip


def _network_tests(s: Scenario, b: int, rows: int) -> list[Experiment]:
    tp = s.parallel.tp
    if tp == 1:
        return []
    row = round(s.model.hidden * s.model.activation.bytes)
    sizes = tuple(Probe("allreduce", size=row * n, noise=NCCL_NOISE) for n in (b, rows))
    d = int(np.max(s.draft_tokens))
    return [
        Experiment("nccl-tests", f"one all-reduce of {sizes[0].size} and {sizes[1].size} bytes, in a graph, in the server's environment", 5,
                   f"all_reduce_perf -b {row * b} -e {row * rows} -f {max(rows // b, 2)} -d bfloat16 -g {tp} -G 50 -w 20 -n 200",
                   sizes, "--result nccl-tests=US,US, or give its output"),
        Experiment("nccl-protocol", "verify under NCCL_PROTO=LL", 10, "NCCL_PROTO=LL python -m sglang.launch_server ..." if s.engine.name == "sglang" else "NCCL_PROTO=LL vllm serve ...",
                   (Probe("protocol", batch=b, tokens=d),), "--result nccl-protocol=VERIFY_MS"),
    ]  # fmt: skip


def _server_tests(s: Scenario, b: int, d: int, sglang: bool) -> list[Experiment]:
    experts = any(layer.experts is not None for layer, _ in s.model.layers)
    names = [n for n in PARTS if (n != "allreduce" or s.parallel.tp > 1) and (n != "experts" or experts)]
    parts = tuple(Probe("component", batch=b, tokens=d, name=n, noise=COMPONENT_NOISE) for n in names)
    profile = (
        "curl -X POST localhost:30000/start_profile -H 'Content-Type: application/json' -d '{\"num_steps\": 5}'"
        if sglang else "curl -X POST localhost:8000/start_profile; sleep 1; curl -X POST localhost:8000/stop_profile  # needs a server started with a profiler directory"
    )  # fmt: skip
    lengths = tuple(n for n in (2, d + 2) if n != d)
    flag = "--disable-cuda-graph" if sglang else "--enforce-eager"
    where = "--speculative-num-draft-tokens" if sglang else "num_speculative_tokens"
    return [
        Experiment("kernel-profile", "five profiled steps: ms of a verify by kind of kernel, and idle time", 6, profile, parts,
                   "--result kernel-profile=" + ",".join(n.upper() for n in names) + " (ms)"),
        Experiment("graphs-off", "verify with CUDA graphs off", 10, f"restart with {flag}",
                   (Probe("verify", batch=b, tokens=d, eager=True),), "--result graphs-off=VERIFY_MS"),
        Experiment("draft-lengths", f"verify with {' and '.join(map(str, lengths))} draft tokens", 20 if len(lengths) > 1 else 10,
                   f"restart with other {where}", tuple(Probe("verify", batch=b, tokens=n) for n in lengths),
                   "--result draft-lengths=" + ",".join("MS" for _ in lengths)),
        Experiment("cycle-time", "a whole cycle beside the verify: batch x accept length / throughput", 2,
                   'grep "Decode batch" server.log | tail -20' if sglang else 'grep "SpecDecoding metrics" server.log | tail -20',
                   (Probe("cycle", batch=b, tokens=d),), "--cycle-ms MS, or give the log"),
        Experiment("greedy", "verify with temperature 0", 3, 'send requests with "temperature": 0',
                   (Probe("greedy", batch=b, tokens=d),), "--result greedy=VERIFY_MS"),
    ]  # fmt: skip


def appraise(found: Posterior, tests: Sequence[Experiment], seed: int = 0) -> list[Appraisal]:
    """The tests with bits and predictions, the best first."""
    rng = np.random.default_rng((seed, 4))
    weights = {f: w for f, w in found.ranked() if w > WORTH}
    total = sum(weights.values())
    weights = {f: w / total for f, w in weights.items()}
    truths = {f: found.draws(f, max(round(TRUTHS * w), 8), rng) for f, w in weights.items()}
    references = {f: found.draws(f, REFERENCES, rng) for f in FAULTS}
    out = []
    for test in track(tests, "tests"):
        predicted = [{f: found.boxes.predict_at(p, f, references[f]) for f in FAULTS} for p in test.probes]
        true = [{f: found.boxes.predict_at(p, f, truths[f]) for f in weights} for p in test.probes]
        bits = _information(test.probes, weights, true, predicted, rng)
        out.append(Appraisal(test, bits, tuple(_spreads(p) for p in predicted)))
    most = max((a.bits for a in out), default=0.0)
    return sorted(out, key=lambda a: (a.bits < FEW * most, -a.rate))


def _spreads(predicted: Mapping[Fault, Array]) -> dict[str, Quantity]:
    """By fault, as `posterior.spread`."""
    return dict(zip([f.id for f in predicted], spreads(np.stack(list(predicted.values()))), strict=True))


def _information(
    probes: Sequence[Probe],
    weights: dict[Fault, float],
    true: Sequence[dict[Fault, Array]],
    predicted: Sequence[dict[Fault, Array]],
    rng: np.random.Generator,
) -> float:
    """Mutual information in bits between fault and outcome."""
    faults = list(weights)
    prior = np.array([weights[f] for f in faults])
    left = 0.0
    known = [  # what each fault predicts: shape (1, faults, references), or one chance each
        np.asarray([[[chance(p, g)] for g in faults]])
        if p.binary
        else p.scaled(np.stack([at[g] for g in faults])[None])
        for p, at in zip(probes, predicted, strict=True)
    ]
    for f in faults:
        n = len(true[0][f])
        logs: Array = np.zeros((n, len(faults), 1))
        for p, truth, reference in zip(probes, true, known, strict=True):
            if p.binary:
                yes = (rng.random(n) < truth[f])[:, None, None]
                logs = logs + np.log(np.where(yes, reference, 1 - reference))
            else:
                seen = p.scaled(truth[f]) + rng.standard_normal(n)
                off = seen[:, None, None] - reference
                off *= off  # in place: the arrays are large
                off *= -0.5
                off += logs
                logs = off
        logs -= logs.max(axis=(1, 2), keepdims=True)
        joint = prior * np.mean(np.exp(logs, out=logs), axis=2)
        after = joint / joint.sum(axis=1, keepdims=True)
        left += weights[f] * float(np.mean(_entropy(after)))
    return max(float(_entropy(prior[None])[0]) - left, 0.0)


def _entropy(p: Array) -> Array:
    return np.asarray(-np.sum(p * np.log2(np.maximum(p, 1e-12)), axis=1))


def uninformative(found: Posterior, appraised: Sequence[Appraisal], engine: str = "sglang") -> list[Uninformative]:
    """Tests that cannot help: those that no fault answers differently, and those settled already."""
    s = found.boxes.scenario
    sglang = (engine if s is None else s.engine.name) == "sglang"
    out = []
    if sglang:
        out.append(
            Uninformative(
                "attention-mode",
                "--speculative-attention-mode only chooses the attention backend of verify and draft extend. Whether verify"
                " runs in a CUDA graph does not depend on it, so it cannot test the graph hypothesis; and where both"
                " backends are the same it changes nothing",
            )
        )
    out.append(
        Uninformative(
            "engine-regression",
            "an older or newer commit changes every arm: unless the plain decode step was fast before and is slow now, no"
            " hypothesis predicts a difference",
        )
    )
    if s is None or s.parallel.tp > 1:
        out.append(
            Uninformative(
                "nccl-variables-elsewhere",
                "more NCCL variables in the launching shell say nothing unless the workers inherit them: run nccl-tests in"
                " the server's environment instead",
            )
        )
    if sglang:
        out.append(
            Uninformative("piecewise-graphs", "piecewise graphs serve prefill; decode and verify replay full graphs")
        )
    known = {o.probe for o in found.observations}
    names = " and ".join(f.id for f, w in found.ranked()[:2] if w > WORTH)
    for a in appraised:
        if a.bits >= LEAST_BITS:
            continue
        if all(p in known for p in a.experiment.probes):
            why = "its outcome is given already"
        else:
            why = f"the likely explanations ({names}) predict the same outcome"
        out.append(Uninformative(a.experiment.id, why))
    return out


def results(test: Experiment, values: Sequence[float]) -> list[tuple[Probe, float]]:
    """Probes of an experiment with the numbers it gave."""
    return [(replace(p), v) for p, v in zip(test.probes, values, strict=True)]
