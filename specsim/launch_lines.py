"""A scenario in the words of the engines: launch lines ready to paste, and files that switch the draft length by batch.

SGLang: `--speculative-adaptive-config FILE`, candidate steps by batch size (python/sglang/srt/speculative/
adaptive_spec_params.py). A batch is padded to the next captured one and takes the largest key up to it, the nearest key in
earlier releases: with both ends of a range as keys either finds its range. vLLM: the key
`num_speculative_tokens_per_batch_size` of `--speculative-config`, [first batch, last batch, drafted tokens]
(vllm/v1/spec_decode/dynamic/utils.py).
"""

from __future__ import annotations

import json
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from specsim.configs import list_presets
from specsim.errors import InputError
from specsim.files import read_json
from specsim.scenarios import Scenario
from specsim.simulation_costs import Ranges, longest, rows_of

_SGLANG = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "EAGLE", "draft-model": "STANDALONE"}
_VLLM = {"draft-model": "draft_model"}
BUILT_IN = ("mtp", "ngram")  # methods whose drafter no flag names
WHOLE = ("ngram", "dflash", "dspark")  # methods that draft in one go: no steps, no branching
# What a line is made of here; the rest of a launch line that was given is kept as it was.
MADE = {
    "sglang": ("--model-path", "--tp-size", "--ep-size", "--dp-size", "--enable-dp-attention", "--speculative-algorithm",
               "--speculative-draft-model-path", "--speculative-num-steps", "--speculative-eagle-topk",
               "--speculative-num-draft-tokens", "--speculative-adaptive", "--speculative-adaptive-config"),
    "vllm": ("--model-path", "--tp-size", "--dp-size", "--enable-expert-parallel", "--speculative-config",
             "--spec-method", "--spec-model", "--spec-tokens"),
}  # fmt: skip


def checkpoint(name: str) -> str:
    """The Hugging Face id of a preset, else the name itself."""
    return _ids().get(name, name)


def without_weights(s: Scenario) -> tuple[str, ...]:
    """A note where a launch line names a drafter that ships as a shape alone: nobody can load it."""
    name = s.names.get("draft_path") or s.names.get("draft", "")
    shapes = {p.name for p in list_presets() if not p.hf_id}
    if s.method == "none" or s.method in BUILT_IN or name not in shapes:
        return ()
    return (f"{name} is the shape of a drafter, without published weights: put the path of yours in the launch line",)


@cache
def _ids() -> dict[str, str]:
    return {p.name: p.hf_id for p in list_presets() if p.hf_id}


def _kept(s: Scenario, engine: str) -> list[str]:
    """Flags of the launch line that the scenario was read from, for the same engine."""
    if s.engine.name != engine:
        return []
    return [word for flag in s.options.get("flags", ()) if flag[0] not in MADE[engine] for word in flag]


def _environment(s: Scenario, engine: str) -> list[str]:
    given = s.options.get("env") or {}
    return [f"{name}={value}" for name, value in given.items()] if s.engine.name == engine else []


def sglang_line(s: Scenario, ranges: Ranges = (), file: str = "") -> str:
    """SGLang's launch line of a scenario; with draft lengths by batch it names the `file` that `sglang_adaptive` makes."""
    words = [*_environment(s, "sglang"), "python", "-m", "sglang.launch_server", "--model-path", checkpoint(s.names.get("model_path", s.model.name)), "--tp-size", str(s.parallel.tp)]  # fmt: skip
    if s.parallel.ep > 1:
        words += ["--ep-size", str(s.parallel.ep)]
    if s.parallel.dp > 1:
        words += ["--dp-size", str(s.parallel.dp), "--enable-dp-attention"]
    if s.method != "none":
        s = longest(s, ranges)  # SGLang wants a step count of the file, and sizes its buffers for the longest
        words += ["--speculative-algorithm", _SGLANG.get(s.method, s.method.upper())]
        if s.names.get("draft") and s.method not in BUILT_IN:
            words += ["--speculative-draft-model-path", checkpoint(s.names.get("draft_path") or s.names["draft"])]
        if s.method not in WHOLE:
            steps = int(s.num_steps.reshape(-1)[0])
            words += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(s.topk)]
        words += ["--speculative-num-draft-tokens", str(rows_of(s))]
        if len(ranges) > 1:
            words += ["--speculative-adaptive", "--speculative-adaptive-config", file]
    return shlex.join([*words, *_kept(s, "sglang")])


def vllm_config(s: Scenario, ranges: Ranges = ()) -> dict[str, Any] | None:
    """The value of vLLM's --speculative-config, with draft lengths by batch where they change; None without speculation, and
    for a tree, which vLLM does not draft."""
    if s.method == "none" or s.topk > 1:
        return None
    out: dict[str, Any] = {"method": _VLLM.get(s.method, s.method)}
    if s.names.get("draft") and s.method not in BUILT_IN:
        out["model"] = checkpoint(s.names.get("draft_path") or s.names["draft"])
    out["num_speculative_tokens"] = rows_of(longest(s, ranges)) - 1
    if len(ranges) > 1:
        out["num_speculative_tokens_per_batch_size"] = [list(r) for r in ranges]
    return out


def vllm_line(s: Scenario, ranges: Ranges = ()) -> str:
    """vLLM's launch line of a scenario; a comment for a tree, which vLLM does not draft. Attention groups are its data
    parallelism, which goes with expert parallelism."""
    if s.topk > 1:
        return "# vLLM drafts no trees: topk 1 has a line"
    dp = s.parallel.dp
    words = [*_environment(s, "vllm"), "vllm", "serve", checkpoint(s.names.get("model_path", s.model.name)), "--tensor-parallel-size", str(s.parallel.tp // dp)]  # fmt: skip
    if dp > 1:
        words += ["--data-parallel-size", str(dp)]
    if s.parallel.ep > 1 or dp > 1:
        words += ["--enable-expert-parallel"]
    config = vllm_config(s, ranges)
    if config is not None:
        words += ["--speculative-config", json.dumps(config)]
    return shlex.join([*words, *_kept(s, "vllm")])


def sglang_adaptive(ranges: Ranges) -> dict[str, Any]:
    """The file of SGLang's --speculative-adaptive-config."""
    return {str(batch): {"candidate_steps": [k]} for first, last, k in ranges for batch in (first, last)}


def read_ranges(path: Path) -> Ranges:
    """Draft lengths by batch from a file that either engine reads.

    Raises InputError for a file that is none of these, or leaves the choice among several lengths to the engine.
    """
    where = str(path)
    held = read_json(path, "policy")
    try:
        if "num_speculative_tokens" in held:
            default = [[1, 1, held["num_speculative_tokens"]]]
            listed = [tuple(map(_whole, r)) for r in held.get("num_speculative_tokens_per_batch_size") or default]
        else:
            keys = sorted((int(key), value["candidate_steps"]) for key, value in held.items() if key.isdigit())
            if any(len(steps) != 1 for _, steps in keys):
                raise InputError("several candidates for one batch", where=where, mend="leave one for each: which of them runs depends on acceptance as it goes")  # fmt: skip
            firsts = [(key, _whole(steps[0])) for key, steps in keys]
            ends = [key - 1 for key, _ in firsts[1:]] + [firsts[-1][0]]
            listed = [(first, end, k) for (first, k), end in zip(firsts, ends, strict=True)]
            listed[0] = (1, *listed[0][1:])
        return _merged(listed)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):
        raise InputError("gives no draft lengths by batch", where=where, mend="give a file that specsim plan --policy wrote") from None  # fmt: skip


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(value)
    return value


def _merged(listed: list[Any]) -> Ranges:
    """Ranges without gaps (a gap goes on as before it), neighbours of one length joined. Raises ValueError."""
    out: list[tuple[int, int, int]] = []
    if listed[0][0] != 1 or any(a[1] >= b[0] for a, b in pairwise(listed)) or any(a > b for a, b, _ in listed):
        raise ValueError(listed)
    for first, last, k in listed:
        if out and out[-1][2] == k:
            out[-1] = (out[-1][0], last, k)
        else:
            if out:
                out[-1] = (out[-1][0], first - 1, out[-1][2])
            out.append((first, last, k))
    return tuple(out)
