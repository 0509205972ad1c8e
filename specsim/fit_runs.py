"""The run that shows each engine term: in words, for people who lack it, and as a question to the records that they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from specsim.scenarios import Scenario


class Run(Protocol):
    """A recorded run: specsim.engine_fit.Case."""

    @property
    def model(self) -> str: ...
    @property
    def scenario(self) -> Scenario: ...
    @property
    def eager(self) -> bool: ...
    @property
    def seen(self) -> Sequence[Any]: ...  # times, with `phase`, `place` among the scenario's points, and `ms`


class Shown(NamedTuple):
    """words: the run, or the runs; among: whether these are such runs."""

    words: str
    among: Callable[[Sequence[Run]], bool]


def needed(term: str, runs: Sequence[Run]) -> str:
    """What would make the term known: the run that shows it, or more of such where the runs hold one already."""
    words, among = RUNS[term]
    return f"more records, or steadier ones, of this kind: {words}" if among(runs) else words


def _watched(run: Run) -> float:
    """How slow the server's cores were seen to be while the run was made; 1 where nobody looked."""
    host = run.scenario.profile.host
    return host.slowdown() if host is not None and host.slow_share == 1 else 1.0


def _one(test: Callable[[Run], bool]) -> Callable[[Sequence[Run]], bool]:
    return lambda runs: any(test(run) for run in runs)


def _method(run: Run, *methods: str) -> bool:
    return run.scenario.method in methods


def _drafts(run: Run) -> bool:
    return not _method(run, "none")


def _timed(run: Run, phase: str = "verify") -> bool:
    return any(seen.phase == phase for seen in run.seen)


def _takes(run: Run, phase: str, low: float, high: float, batch: float = 0.0) -> bool:
    """Whether the phase took `low` to `high` ms at a batch from `batch` on."""
    return any(
        s.phase == phase and low <= s.ms <= high and run.scenario.batch.reshape(-1)[s.place] >= batch for s in run.seen
    )


def _widest(run: Run) -> float:
    return float(np.max(run.scenario.batch))


def _alone(run: Run) -> bool:
    return bool(np.min(run.scenario.batch) == 1)


def _models(runs: Sequence[Run], test: Callable[[Run], bool]) -> set[str]:
    return {run.model for run in runs if test(run)}


def _several_models(runs: Sequence[Run]) -> bool:
    return len(_models(runs, lambda r: not r.eager and _alone(r))) > 1


def _with_and_without_drafts(runs: Sequence[Run]) -> bool:
    return bool(
        _models(runs, lambda r: _drafts(r) and _alone(r)) & _models(runs, lambda r: not _drafts(r) and _alone(r))
    )


def _by_groups(run: Run) -> bool:
    experts = run.scenario.model.experts
    return experts is not None and experts.by_groups


def _eager_with_and_without_experts(runs: Sequence[Run]) -> bool:
    return len({run.scenario.model.experts is None for run in runs if run.eager}) == 2


RUNS: dict[str, Shown] = {
    "kernel_gap_us": Shown(
        "runs of models with many and with few kernels a layer, in graphs at batch 1", _several_models
    ),
    "row_layer_us": Shown("a run at batch 32 or more", _one(lambda r: _widest(r) >= 32)),
    "row_groups_us": Shown(
        "a run at batch 32 or more of a model whose experts are chosen by groups, as DeepSeek-V2's",
        _one(lambda r: _widest(r) >= 32 and _by_groups(r)),
    ),
    "verify_layer_us": Shown(
        "a run with speculation and one without of the same model, at batch 1", _with_and_without_drafts
    ),
    "allreduce_skew_us": Shown("a run with --tp 2 or more", _one(lambda r: r.scenario.parallel.tp > 1)),
    "draft_step_us": Shown(
        "a run with 3 or more draft steps whose phases are timed (SGLANG_ENABLE_METRICS_DEVICE_TIMER=1)",
        _one(lambda r: _timed(r, "draft") and float(np.max(r.scenario.num_steps)) >= 3),
    ),
    "decode_host_us": Shown(
        "a run without speculation of a model whose step takes 2 to 5 ms", _one(lambda r: _takes(r, "decode", 2, 5))
    ),
    "prefill_host_us": Shown("runs under load; steady runs say nothing about prefills", lambda runs: False),
    "cycle_host_us": Shown(
        "a run with speculation whose phases are timed, of a model whose cycle takes 3 to 8 ms",
        _one(lambda r: _timed(r) and _takes(r, "cycle", 3, 8)),
    ),
    "decode_cpu_us": Shown(
        "a run without speculation with --disable-cuda-graph, or of a model whose step takes below 1 ms",
        _one(lambda r: not _drafts(r) and (r.eager or _takes(r, "decode", 0, 1))),
    ),
    "cycle_cpu_us": Shown("a run with speculation and --disable-cuda-graph", _one(lambda r: _drafts(r) and r.eager)),
    "sequence_cpu_us": Shown(
        "a run without speculation at batch 256 or more, of a model whose step takes below 3 ms there",
        _one(lambda r: _takes(r, "decode", 0, 3, batch=256)),
    ),
    "serial_cpu_us": Shown(
        "a run with speculation and --disable-overlap-schedule",
        _one(lambda r: _drafts(r) and bool(r.scenario.options.get("disable_overlap"))),
    ),
    "rank_cpu_us": Shown(
        "a run with speculation and --tp 2 or more, of a model whose cycle takes below 8 ms",
        _one(lambda r: r.scenario.parallel.tp > 1 and _takes(r, "cycle", 0, 8)),
    ),
    "tree_step_us": Shown(
        "a run with --speculative-eagle-topk 2 or more whose phases are timed",
        _one(lambda r: r.scenario.topk > 1 and _timed(r, "draft")),
    ),
    "tree_cpu_us": Shown(
        "a run with --speculative-eagle-topk 2 or more, of a model whose cycle takes below 10 ms",
        _one(lambda r: r.scenario.topk > 1 and _takes(r, "cycle", 0, 10)),
    ),
    "ngram_host_us": Shown(
        "a run with --speculative-algorithm NGRAM at batch 1", _one(lambda r: _method(r, "ngram") and _alone(r))
    ),
    "ngram_sequence_us": Shown(
        "a run with --speculative-algorithm NGRAM at batch 32 or more",
        _one(lambda r: _method(r, "ngram") and _widest(r) >= 32),
    ),
    "ngram_verify_us": Shown(
        "a run with --speculative-algorithm NGRAM whose phases are timed",
        _one(lambda r: _method(r, "ngram") and _timed(r)),
    ),
    "eager_gap_us": Shown(
        "a run with speculation whose draft extend runs without a graph and is timed",
        _one(lambda r: _timed(r, "extend") and not r.scenario.graph_phases.get("extend", True)),
    ),
    "eager_factor": Shown("a run with --disable-cuda-graph", _one(lambda r: r.eager)),
    "eager_experts": Shown(
        "a run of a model with experts and one of a model without, both with --disable-cuda-graph",
        _eager_with_and_without_experts,
    ),
    "host_slowing": Shown(
        "runs with --disable-cuda-graph that specsim validate made on the server's own machine, while its cores were slow",
        _one(lambda r: r.eager and _watched(r) > 1.3),
    ),
}
