"""When to speculate, by batch and context: schedules with hysteresis, and the same in the words of the engines.

SGLang: `--speculative-adaptive-config FILE`, candidate steps by batch size (python/sglang/srt/speculative/
adaptive_spec_params.py; a batch takes the nearest key, so both ends of a range are keys). vLLM: the key
`num_speculative_tokens_per_batch_size` of `--speculative-config`, [first batch, last batch, drafted tokens]
(docs/features/speculative_decoding/dynamic_speculative_decoding.md).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.configs import list_presets
from specsim.machine import Machine
from specsim.scenarios import Scenario
from specsim.simulation_costs import cache_limits, running_limit
from specsim.sweep import Case, Lane, Setting

Array = NDArray[np.float64]
SCHEMA = "specsim.policy/1"
Ranges = tuple[tuple[int, int, int], ...]  # (first batch, last batch, drafted tokens; 0: off)
BATCHES = 512  # the largest batch a policy looks at


@dataclass(frozen=True)
class Policy:
    """What to draft at one context. `rising` holds while the batch grows, `falling` while it shrinks: between their
    thresholds the server stays with what it does, so that a batch that wavers does not switch at every step."""

    context: int
    hysteresis: float
    rising: Ranges
    falling: Ranges


def policies(
    s: Scenario, machine: Machine, draft_tokens: Sequence[int], contexts: Sequence[int], hysteresis: float = 0.03
) -> list[Policy]:
    """Schedules for a scenario with acceptance that drafts chains, one a context at which at least one request fits.

    Every choice is within `hysteresis` (a fraction) of the best at its batch, averaged over batches nearby (`_smooth`).
    """
    d = np.asarray([float(x) for x in draft_tokens])
    lanes, settings, lengths = [], [], []
    for value in d:  # one a draft length: the graphs an engine captures may depend on it
        one = replace(s, draft_tokens=np.asarray([value]), num_steps=np.asarray([value - 1]))
        lanes.append(Lane(one, one.draft_tokens, one.num_steps))
        settings.append(Setting(s.method, s.names.get("draft", ""), int(value) - 1, 1, int(value)))
        lengths.append(one.accept_length)
    case = Case(tuple(lanes), machine, tuple(settings), np.stack(lengths).reshape(-1, 1), np.zeros((len(d), 1)))  # type: ignore[arg-type]
    kv, running = cache_limits(s, min(running_limit(s), BATCHES))
    out = []
    for context in contexts:
        most = min(running, int(kv / (context + float(d.max()))))
        if most < 1:
            continue
        decode, cycle = case.costs(np.arange(1.0, most + 1), np.asarray([float(context)]))
        worth = decode[:, 0, None] * case.lengths[:, 0] / cycle[:, 0, :]
        worth = np.concatenate([np.ones((most, 1)), worth], axis=1)
        drafted = [0, *(int(x) - 1 for x in d)]
        rising, falling = _schedules(_smooth(worth), drafted, hysteresis)
        out.append(Policy(int(context), hysteresis, rising, falling))
    return out


def _smooth(worth: Array) -> Array:
    """Worth averaged over the batches that a mean of n wavers between, n - root n to n + root n (from 4 up): graphs of
    padded sizes favour single batches, which no server stays at."""
    sums = np.vstack([np.zeros(worth.shape[1]), np.cumsum(worth, axis=0)])
    n = np.arange(1, len(worth) + 1)
    reach = np.where(n < 4, 0, np.sqrt(n).astype(int))
    low, high = np.maximum(n - 1 - reach, 0), np.minimum(n + reach, len(worth))
    return np.asarray((sums[high] - sums[low]) / (high - low)[:, None])


def _schedules(worth: Array, drafted: Sequence[int], hysteresis: float) -> tuple[Ranges, Ranges]:
    """Ranges for a rising and a falling batch, from the worth of each choice (batch, choice).

    Rising: as few switches as there can be when every choice stays within the hysteresis of the best; each holds as long as
    it does. Falling: the same choices in reverse, each held down to where it leaves the hysteresis.
    """
    good = worth * (1 + hysteresis) >= worth.max(axis=1, keepdims=True)
    n = len(worth)
    starts: list[tuple[int, int]] = []  # (place of the first batch, choice)
    at = 0
    while at < n:
        held = [_run(good[at:, k]) for k in range(worth.shape[1])]
        longest = max(held)
        choice = max(
            (k for k in range(len(held)) if held[k] == longest), key=lambda k: float(worth[at : at + longest, k].sum())
        )
        starts.append((at, choice))
        at += longest
    back = [(max(at - _run(good[:at, k][::-1]), 0) if at else 0, k) for at, k in starts]
    for i in range(1, len(back)):  # a choice that its successor holds out is passed over
        back[i] = (max(back[i][0], back[i - 1][0]), back[i][1])
    return _ranges(starts, n, drafted), _ranges(back, n, drafted)


def _run(good: NDArray[np.bool_]) -> int:
    """How many leading places are true."""
    return len(good) if good.all() else int(np.argmin(good))


def _ranges(starts: Sequence[tuple[int, int]], n: int, drafted: Sequence[int]) -> Ranges:
    ends = [at for at, _ in starts[1:]] + [n]
    return tuple((at + 1, end, drafted[k]) for (at, k), end in zip(starts, ends, strict=True) if end > at)


def said(ranges: Ranges) -> str:
    """Ranges for people."""
    if len(ranges) == 1:
        return "off" if not ranges[0][2] else f"{ranges[0][2] + 1} draft tokens"
    spans = (("off" if not k else f"{k + 1}") + (f" at {a}" if a == b else f" from {a} to {b}") for a, b, k in ranges)
    return ", ".join(spans)


def policy_json(found: Sequence[Policy], engine: str) -> dict[str, Any]:
    """The document of schema specsim.policy/1. Ranges are [first batch, last batch, drafted tokens]."""
    return {
        "schema": SCHEMA,
        "engine": engine,
        "by_context": [
            {
                "context": p.context,
                "hysteresis": p.hysteresis,
                "rising": [list(r) for r in p.rising],
                "falling": [list(r) for r in p.falling],
            }
            for p in found
        ],
    }


# --- in the words of the engines ------------------------------------------------------------------------------------

_SGLANG = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "EAGLE", "draft-model": "STANDALONE", "ngram": "NGRAM", "dflash": "DFLASH"}  # fmt: skip
_VLLM = {"draft-model": "draft_model"}


def checkpoint(name: str) -> str:
    """The Hugging Face id of a preset, else the name itself."""
    return next((p.hf_id for p in list_presets() if p.name == name and p.hf_id), name)


def sglang_line(s: Scenario, policy: Policy | None = None, file: str = "") -> str:
    """SGLang's launch line of a scenario; with a policy that changes, it names the `file` with `sglang_adaptive`."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", checkpoint(s.names.get("model_path", s.model.name)), "--tp-size", str(s.parallel.tp)]  # fmt: skip
    if s.parallel.ep > 1:
        words += ["--ep-size", str(s.parallel.ep)]
    if s.parallel.dp > 1:
        words += ["--dp-size", str(s.parallel.dp), "--enable-dp-attention"]
    if s.method != "none":
        words += ["--speculative-algorithm", _SGLANG.get(s.method, s.method.upper())]
        if s.names.get("draft") and s.method not in ("mtp", "ngram"):
            words += ["--speculative-draft-model-path", checkpoint(s.names.get("draft_path") or s.names["draft"])]
        steps, tokens = int(s.num_steps.reshape(-1)[0]), int(s.draft_tokens.reshape(-1)[0])
        switches = policy is not None and file and sglang_adaptive(policy) is not None
        if policy is not None and switches and steps not in {k for *_, k in policy.rising}:
            steps = max(k for *_, k in policy.rising)  # SGLang wants a step count of the file
            tokens = steps + 1
        if s.method not in ("ngram", "dflash"):
            words += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(s.topk)]
        words += ["--speculative-num-draft-tokens", str(tokens)]
        if switches:
            words += ["--speculative-adaptive", "--speculative-adaptive-config", file]
    if s.options.get("max_running_requests"):
        words += ["--max-running-requests", str(s.options["max_running_requests"])]
    return shlex.join(words)


def vllm_config(s: Scenario, policy: Policy | None = None) -> dict[str, Any] | None:
    """The value of vLLM's --speculative-config; None without speculation. With a policy, its rising ranges are in it."""
    if s.method == "none":
        return None
    out: dict[str, Any] = {"method": _VLLM.get(s.method, s.method)}
    if s.names.get("draft") and s.method not in ("mtp", "ngram"):
        out["model"] = checkpoint(s.names.get("draft_path") or s.names["draft"])
    out["num_speculative_tokens"] = int(s.draft_tokens.reshape(-1)[0]) - 1
    if policy is not None and any(k for *_, k in policy.rising):
        out["num_speculative_tokens"] = max(k for *_, k in policy.rising)
        if len(policy.rising) > 1:
            out["num_speculative_tokens_per_batch_size"] = [list(r) for r in policy.rising]
    return out


def vllm_line(s: Scenario, policy: Policy | None = None) -> str:
    """vLLM's launch line of a scenario."""
    words = [
        "vllm",
        "serve",
        checkpoint(s.names.get("model_path", s.model.name)),
        "--tensor-parallel-size",
        str(s.parallel.tp),
    ]
    if s.parallel.ep > 1:
        words += ["--enable-expert-parallel"]
    config = vllm_config(s, policy)
    if config is not None:
        words += ["--speculative-config", json.dumps(config)]
    return shlex.join(words)


def sglang_adaptive(policy: Policy) -> dict[str, Any] | None:
    """The file of SGLang's --speculative-adaptive-config for a policy; None where it never changes."""
    if len(policy.rising) < 2:
        return None
    out: dict[str, Any] = {}
    for first, last, k in policy.rising:
        for batch in (first, last):
            out[str(batch)] = {"candidate_steps": [k]}
    return out
