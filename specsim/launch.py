"""Reads the launch line of an inference server as that server would resolve it.

`read_launch("sglang", "python3 -m sglang.launch_server --model-path X --tp 8 ...")` gives the scenario that the line
describes, the flags that it does not know, and notes where the engine does something else than the line says.
The rules come from the engines' public source; docs/engines.md names the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from specsim.engines import command_line, load_engine, read_flags
from specsim.errors import InputError, did_you_mean
from specsim.launch_flags import Reader, flag_values
from specsim.launch_sglang import sglang
from specsim.launch_vllm import vllm
from specsim.launch_words import take_apart
from specsim.names import ENGINES

# Flags that change what is served, with what is priced instead.
AS_CONFIGURED = "the model is priced as its config.json has it"
BY_TOKENS = (
    "--dcp-size",
    "--decode-context-parallel-size",
    "--attn-cp-size",
    "--attention-context-parallel-size",
    "--prefill-context-parallel-size",
)
NOT_MODELLED = {
    **dict.fromkeys(("--json-model-override-args", "--hf-overrides", "--torchao-config"), AS_CONFIGURED),
    **dict.fromkeys(("--enable-lora", "--lora-paths", "--lora-modules"), "the model is priced without adapters"),
    "--enable-torch-compile": "kernels are priced as the engine's own",
    "--disaggregation-mode": "one server does both prefill and decode",
    "--kv-transfer-config": "one server does both prefill and decode",
    **dict.fromkeys(("--cpu-offload-gb", "--offload-group-size"), "all weights are read from the GPUs' own memory"),
    "--kt-weight-path": "the experts are priced on the GPUs",
    **dict.fromkeys(
        ("--enable-two-batch-overlap", "--enable-single-batch-overlap", "--enable-dbo"),
        "exchange and products are priced one after the other",
    ),
    **dict.fromkeys(("--ep-num-redundant-experts", "--enable-eplb"), "each expert is held once, wherever it lies"),
    "--moe-dense-tp-size": "dense layers are cut as all others are",
    **dict.fromkeys(BY_TOKENS, "no cache is cut by tokens over ranks"),
    "--enable-deterministic-inference": "kernels are priced as the engine's own",
    **dict.fromkeys(
        ("--enable-mscclpp", "--enable-symm-mem", "--enable-torch-symm-mem"),
        "all-reduces are priced as the engine's others have them",
    ),
    "--speculative-adaptive": "the draft length is that of the line throughout",
    "--speculative-token-map": "the draft's head is priced as its config.json has it",
}
OFF = frozenset(
    {"0", "-1", "none", "null", "false"}
)  # values by which a flag above says what the engine does without it


@dataclass(frozen=True)
class Launch:
    """A launch line as the engine resolves it. `options` has the scenario's names; only what the line decides is there.

    Sizes of captured graphs are sequences for SGLang and tokens for vLLM, as in the engines' own flags. A `method`
    outside specsim.engines.METHODS ("dflash", "medusa", ...) is one that has no cost model. `flags` are the known flags of
    the line by their full names, each with its values. `slips` are unknown flags that look like a misspelt one that costs
    depend on, with that one.
    """

    engine: str
    options: dict[str, Any]
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    flags: tuple[tuple[str, ...], ...] = ()
    slips: tuple[tuple[str, str], ...] = ()

    def refuse_slips(self, where: str) -> None:
        """Raises InputError for a misspelt flag that costs depend on: the engine refuses it, and without it the scenario is
        another. A flag that is only unknown may be one of a newer release."""
        for flag, meant in self.slips:
            named = {"sglang": "SGLang", "vllm": "vLLM"}
            other = next((name for engine, name in named.items() if meant == f"--{engine}-args"), "")
            own = _counterpart(self.engine, flag)
            known = f", or its name here, {own}" if own else ""
            mend = f"it is one of {other}: give the line with {meant}{known}" if other else f"did you mean {meant}?"
            raise InputError(f"{flag} is no flag of {named[self.engine]}", where=where, mend=mend)


def read_launch(
    engine: str, line: str | Sequence[str], *, version: str | None = None, architecture: str | None = None
) -> Launch:
    """The scenario that a launch line describes.

    `line` is a command as pasted (environment, docker run, continued lines and all), its flags alone, or a list of
    arguments. `version` is the engine's release, `architecture` the target's (config.json "architectures"), which
    decides some defaults. Raises InputError, naming the flag, for a value that the engine would refuse.
    """
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}", where="--engine", mend=did_you_mean(engine, ENGINES))
    if "ServerArgs(" in line:
        mend = "give the flags that it was started with, or the log to specsim diagnose"
        raise InputError("is what a server prints, not what starts it", where=f"{engine} launch line", mend=mend)
    parts = take_apart(engine, line)
    tag = re.search(r":v?(\d+\.\d+\.\d+)", parts.image)
    if version is None and tag:
        version = _described(engine, tag.group(1))
    release = load_engine(engine, version)
    notes: list[str] = []
    values, unknown, positional = flag_values(engine, parts.arguments, notes)
    numbers = tuple(map(int, release.version.split(".")))
    read = Reader(values, positional, parts.env, notes, numbers, architecture)
    options = sglang(read) if engine == "sglang" else vllm(read)
    _not_modelled(options, read)
    stray = positional if "--model-path" in values else positional[1:]
    if stray:
        notes.append(f"words that belong to no flag, left out: {' '.join(stray)[:200]}")
    if version is not None:
        options["version"] = release.version
    elif tag:
        notes.append(f"{engine} {tag.group(1)} is not described; read as {release.version}")
    if parts.env:
        options["env"] = parts.env
    if "--config" in values:
        notes.append(f"--config {values['--config']}: the file is not read here; flags on the line win over it")
    if parts.env.get("NCCL_P2P_DISABLE", "0") != "0":
        notes.append("NCCL_P2P_DISABLE: NCCL all-reduces go through host memory; the engine's custom kernels ignore it")
    said = tuple(dict.fromkeys(" ".join(note.split()) for note in notes))
    flags = tuple(
        (name,) if value is True else (name, *value) if isinstance(value, list) else (name, str(value))
        for name, value in values.items()
    )
    unknown = list(dict.fromkeys(unknown))
    other_names = [alias for alias, name in command_line(engine)["aliases"].items() if name in read.looked_for]
    # Some are looked for on any engine's line.
    own = [name for name in sorted(read.looked_for) if name in read_flags(engine)]
    others = [other for other in ENGINES if other != engine]
    slips = tuple(
        (flag, meant) for flag in unknown if (meant := _of_another(flag, others) or _meant(flag, [*own, *other_names]))
    )
    return Launch(engine, options, tuple(unknown), said, flags, slips)


def _described(engine: str, version: str) -> str | None:
    """`version` when there is a description of it, else None."""
    try:
        return load_engine(engine, version).version
    except InputError:
        return None


def _of_another(flag: str, others: Iterable[str]) -> str | None:
    """The option for the line of an engine that has this flag, where its costs depend on it."""
    return next((f"--{other}-args" for other in others if flag in _decisive(other)), None)


@lru_cache(maxsize=8)
def _decisive(engine: str) -> frozenset[str]:
    """Flags that an engine's line is looked through for, by all their names."""
    numbers = tuple(map(int, load_engine(engine).version.split(".")))
    read = Reader({}, [], {}, [], numbers, None)
    _ = sglang(read) if engine == "sglang" else vllm(read)
    aliases = command_line(engine)["aliases"]
    names = [*read_flags(engine), *aliases]
    return frozenset(name for name in names if aliases.get(name, name) in read.looked_for)


def _counterpart(engine: str, flag: str) -> str | None:
    """The flag of an engine for what another engine's sets."""
    for other in ENGINES:
        for kind, table in command_line(other)["options"].items():
            for option, name in table.items():
                if name == flag and other != engine:
                    found = command_line(engine)["options"].get(kind, {}).get(option)
                    return None if found is None else str(found)
    return None


def _meant(flag: str, looked_for: Sequence[str]) -> str | None:
    """The flag that another one is a slip of the keyboard for: as long, but for two letters, and nearly the same."""
    if len(flag) < 5:
        return None
    dashed = flag.replace("_", "-")
    near = get_close_matches(dashed, [name for name in looked_for if abs(len(name) - len(flag)) <= 2], n=1, cutoff=0.85)
    return near[0] if near else None


def _not_modelled(options: Mapping[str, Any], read: Reader) -> None:
    """Note what the line decides and no cost follows."""
    for flag, instead in NOT_MODELLED.items():
        off = OFF | {"1"} if flag in BY_TOKENS else OFF
        if read.on(flag) and str(read.values[flag]).casefold() not in off:
            read.note(f"{flag} is not modelled: {instead}")
    if str(options.get("load_format")) in ("gguf", "bitsandbytes"):
        read.note(
            f"--load-format {options['load_format']} is not modelled: weights are priced as the model's config.json has them"
        )
    if options.get("pp", 1) > 1:
        read.note(
            f"pipeline parallelism is not modelled: all layers are priced on one stage, not cut in {options['pp']}"
        )
    cache = str(options.get("kv_cache_dtype", "auto"))
    if cache not in ("auto", "bf16", "bfloat16") and not cache.startswith("fp8"):
        read.note(f"--kv-cache-dtype {cache} is not modelled: the cache is priced as the model's config.json has it")
    kind = str(options.get("dtype", "auto"))
    if kind not in ("auto", "bfloat16", "float16", "half"):
        read.note(f"--dtype {kind} is not modelled: weights are priced as the model's config.json has them")
    if (exchange := options.get("moe_a2a_backend", "none")) != "none":
        read.note(f"--moe-a2a-backend {exchange} is not modelled: rows are summed over ranks instead of exchanged")
    if options.get("draft_tp", options.get("tp", 1)) != options.get("tp", 1):
        read.note(
            f"draft_tensor_parallel_size {options['draft_tp']} is not modelled: the draft is cut as the target is"
        )
