"""Reads the launch line of an inference server as that server would resolve it.

`read_launch("sglang", "python3 -m sglang.launch_server --model-path X --tp 8 ...")` gives the scenario that the line
describes, the flags that it does not know, and notes where the engine does something else than the line says.
The rules come from the engines' public source; docs/engines.md names the files.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from specsim.engines import command_line, load_engine, read_flags
from specsim.errors import InputError, did_you_mean
from specsim.names import ENGINES

MAX_LENGTH = 100_000  # characters of a line
# What may change the speed, and no secret such as VLLM_API_KEY.
ENVIRONMENT = re.compile(r"(?!.*(KEY|TOKEN|SECRET|PASSW))(NCCL|SGLANG|SGL|VLLM|CUDA|FLASHINFER|TORCH)_\w+$")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
STARTS = {
    "sglang": ("sglang.launch_server", "sglang serve"),
    "vllm": ("vllm serve", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main serve"),
}
BY_BATCH = (
    "the draft length changes with the batch; the line's own is used here (specsim simulate --policy FILE follows it)"
)
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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


@dataclass
class _Line:
    """A launch line taken apart: the engine's arguments, and what stood in front of them."""

    arguments: list[str]
    env: dict[str, str] = field(default_factory=dict)
    image: str = ""
    command: bool = False  # the engine's command itself was on the line


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
    parts = _take_apart(engine, line)
    tag = re.search(r":v?(\d+\.\d+\.\d+)", parts.image)
    if version is None and tag:
        version = _described(engine, tag.group(1))
    release = load_engine(engine, version)
    notes: list[str] = []
    values, unknown, positional = _read_flags(engine, parts.arguments, notes)
    numbers = tuple(map(int, release.version.split(".")))
    read = _Reader(values, positional, parts.env, notes, numbers, architecture)
    options = _sglang(read) if engine == "sglang" else _vllm(read)
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


# --- From text to arguments -----------------------------------------------------------------------------------------


def _split(text: str) -> list[list[str]]:
    """The commands of a pasted shell text, each a list of words; continued lines joined, redirections left out."""
    if len(text) > MAX_LENGTH:
        raise InputError(f"is longer than {MAX_LENGTH} characters", where="launch line", mend="give one command")
    text = re.sub(r"(?m)^[ \t]*#.*$", "", text)  # comments of a script
    text = re.sub(r"[\\^`][ \t]*\r?\n", " ", text)
    text = re.sub(r"\r?\n(?=[ \t]*-)", " ", text)  # a line that begins with a flag goes on
    text = re.sub(r"(?<!\S)[12](?=>)", "", text)  # of 2>&1; the 2 of "--tp 2 > log" is a value
    text = text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0xA0: " "})
    text = re.sub(r"(?<!\S)[\u2013\u2014](?=[A-Za-z])", "--", text)  # a dash made by a word processor
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        what = f"cannot be split: {str(error).lower()}"
        raise InputError(what, where="launch line", mend="balance the quotes") from None
    commands: list[list[str]] = [[]]
    into_file = False
    for word in words:
        if into_file:
            into_file = False
        elif word and set(word) <= set("<>&|") and set(word) & set("<>"):
            into_file = True
        elif word and set(word) <= set(";&|\n"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def _take_apart(engine: str, line: str | Sequence[str], depth: int = 0) -> _Line:
    """The one command that starts the engine, or, when none does, all words as its arguments."""
    commands = _split(line) if isinstance(line, str) else [[str(word) for word in line]]
    found: list[_Line] = []
    env: dict[str, str] = {}
    for command in commands:
        while command and command[0] in ("export", "env", "exec", "nohup", "sudo", "time", "set", "$"):
            command = command[1:]
        taken = _command(engine, command)
        env.update(taken.env)
        for word in command if depth < 2 and not taken.command else ():
            if " " in word and any(start in word for start in STARTS[engine]):  # bash -c "vllm serve ..."
                taken = replace(_take_apart(engine, word, depth + 1), image=taken.image)
                env.update(taken.env)
        found.append(taken)
    named = [one for one in found if one.command]
    for other in ENGINES:
        if not named and other != engine and any(_start(other, command) is not None for command in commands):
            raise InputError(f"is a line of {other}", where=f"{engine} launch line", mend=f"give it as --{other}-args")
    if len(named) > 1:
        raise InputError("starts several servers", where=f"{engine} launch line", mend="give one command")
    chosen = named[0] if named else _Line([word for one in found for word in one.arguments])
    return replace(chosen, env={name: value for name, value in env.items() if ENVIRONMENT.match(name)})


def _start(engine: str, words: Sequence[str]) -> int | None:
    """Where the engine's arguments begin, or None when its command is not there."""
    if words[:1] == ["serve"]:  # of `vllm serve` or `sglang serve`, as --vllm-args and --sglang-args take it
        return 1
    for place, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        following = words[place + 1] if place + 1 < len(words) else ""
        if name.removesuffix(".py") in STARTS[engine] or word in STARTS[engine]:
            return place + 1
        if f"{name} {following}" in STARTS[engine]:
            return place + 2
        if engine == "sglang" and name == "launch_server.py":
            return place + 1
        if engine == "vllm" and re.match(r"([\w.-]+/)*vllm-openai(:|@|$)", word):
            if "serve" in words[place + 1 :]:
                continue
            return place + 1
    return None


def _command(engine: str, words: list[str]) -> _Line:
    """One command: environment assignments in front and in `docker run -e`, the image, then the engine's arguments."""
    begin = _start(engine, words)
    front = words[:begin] if begin is not None else words if words[:1] in (["docker"], ["podman"]) else []
    env: dict[str, str] = {}
    skip = 0
    while begin is None and skip < len(words) and (assigned := ASSIGNMENT.fullmatch(words[skip])):
        env[assigned[1]] = assigned[2]
        skip += 1
    image = ""
    for place, word in enumerate(front):
        text = word
        if word in ("-e", "--env") and place + 1 < len(front):
            text = front[place + 1]
        elif word.startswith(("--env=", "-e=")):
            text = word.split("=", 1)[1]
        elif word.startswith("-"):
            continue
        if assigned := ASSIGNMENT.fullmatch(text):
            env[assigned[1]] = assigned[2]
        elif re.match(r"([\w.-]+/)*(sglang|vllm-openai|vllm)[\w.-]*(:|@)", word):
            image = word
    return _Line(words[skip if begin is None else begin :], env, image, begin is not None)


# --- From arguments to values ---------------------------------------------------------------------------------------


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not NUMBER.match(word) and " " not in word.split("=", 1)[0]


@lru_cache(maxsize=4096)
def _full_name(engine: str, flag: str) -> tuple[str | None, str]:
    """The flag that the engine's parser takes `flag` for (itself, with dashes, or a unique abbreviation), and a note."""
    known = read_flags(engine)
    if flag in known:
        return flag, ""
    dashed = flag[:2] + flag[2:].replace("_", "-")
    if dashed != flag and dashed in known:
        return dashed, f"{flag}: SGLang knows only {dashed}; read as that" if engine == "sglang" else ""
    if engine == "vllm" and dashed.startswith("--no-") and known.get("--" + dashed[5:]) == "switch":
        return dashed, ""
    if not flag.startswith("--") or len(flag) < 4:
        return None, ""
    longer = sorted(name for name in known if name.startswith(dashed))
    if len(longer) > 1:
        return None, f"{flag} is ambiguous: {', '.join(longer[:6])}; the engine refuses it"
    return (longer[0] if longer else None), ""


def _of_another(flag: str, others: Iterable[str]) -> str | None:
    """The option for the line of an engine that has this flag, where its costs depend on it."""
    return next((f"--{other}-args" for other in others if flag in _decisive(other)), None)


@lru_cache(maxsize=8)
def _decisive(engine: str) -> frozenset[str]:
    """Flags that an engine's line is looked through for, by all their names."""
    numbers = tuple(map(int, load_engine(engine).version.split(".")))
    read = _Reader({}, [], {}, [], numbers, None)
    _ = _sglang(read) if engine == "sglang" else _vllm(read)
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


def flag_names(engine: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Full names of the known flags among the arguments of a server, with no look at what they make together."""
    return tuple(_read_flags(engine, arguments, [])[0])


def _read_flags(engine: str, arguments: Sequence[str], notes: list[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Values by full flag name (the last one wins), unknown flags, positional arguments."""
    known, aliases = read_flags(engine), command_line(engine)["aliases"]
    values: dict[str, Any] = {}
    dotted: dict[str, dict[str, Any]] = {}
    unknown: list[str] = []
    positional: list[str] = []
    place = 0
    while place < len(arguments):
        word = arguments[place]
        place += 1
        if not _is_flag(word):
            positional.append(word)
            continue
        flag, equals, attached = word.partition("=")
        if engine == "vllm" and (short := re.fullmatch(r"(-O|-tp|-pp|-dp)(\d+)", flag)):
            flag, equals, attached = short[1], "=", short[2]
        if engine == "vllm" and "." in flag:
            if not equals and place < len(arguments):
                attached, place = arguments[place], place + 1
            elif not equals:
                raise InputError("expects a value", where=flag, mend="give one after it")
            root, *path = flag.split(".")
            name, note = _full_name(engine, root)
            if name is None:
                unknown.append(flag)
            else:
                _nest(dotted.setdefault(aliases.get(name, name), {}), path, attached)
            notes += [note] if note else []
            continue
        name, note = _full_name(engine, flag)
        notes += [note] if note else []
        kind = "switch" if name and name not in known else known.get(name or "", "unknown")
        following: list[str] = []
        while kind != "switch" and not equals and place < len(arguments) and not _is_flag(arguments[place]):
            if kind in ("value", "optional") and following:
                break
            following.append(arguments[place])
            place += 1
        if name is None:
            unknown.append(flag)
            continue
        name = aliases.get(name, name)
        values.pop(name, None)  # in the order of their last mention
        if kind == "switch":
            if equals:
                raise InputError("takes no value", where=flag, mend=f"leave ={attached[:40]} out")
            values[name] = True
            if engine == "vllm":  # --flag and --no-flag are one option
                values.pop("--" + name[5:] if name.startswith("--no-") else "--no-" + name[2:], None)
        elif kind == "list":
            values[name] = [attached] if equals else following
            if not values[name]:
                raise InputError("expects at least one value", where=flag, mend="give one after it")
        elif equals or following:
            values[name] = attached if equals else following[0]
        elif kind == "value":
            raise InputError("expects a value", where=flag, mend="give one after it")
    values.update({name: json.dumps(nested) for name, nested in dotted.items()})
    return values, unknown, positional


def _nest(into: dict[str, Any], path: Sequence[str], text: str) -> None:
    """Put a dotted argument's value at its place, as vLLM does: JSON, else a number with a suffix, else text."""
    adding = path[-1].endswith("+") if path else False
    for key in path[:-1]:
        inner = into.setdefault(key.replace("-", "_"), {})
        if not isinstance(inner, dict):
            return
        into = inner
    value: Any = text.split(",") if adding else text
    if not adding:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = _suffixed(text) or text
    into[path[-1].rstrip("+").replace("-", "_")] = value


def _suffixed(text: str) -> int | None:
    """vLLM's "8k" (8000) or "8K" (8192), or None."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([kKmMgGtT])", text.strip())
    return int(float(match[1]) * SUFFIXES[match[2]]) if match else None


@dataclass
class _Reader:
    """The line's values, converted (each method raises InputError naming the flag), and where notes are collected."""

    values: dict[str, Any]
    positional: list[str]
    env: dict[str, str]
    notes: list[str]
    release: tuple[int, ...]
    architecture: str | None
    looked_for: set[str] = field(default_factory=set)  # flags, whether on the line or not

    def note(self, text: str) -> None:
        self.notes.append(text)

    def on(self, flag: str) -> bool:
        self.looked_for.add(flag)
        return flag in self.values

    def text(self, flag: str) -> str | None:
        return str(self.values[flag]) if self.on(flag) else None

    def whole(self, flag: str, least: int = 1) -> int | None:
        return _whole(self.values[flag], flag, least) if self.on(flag) else None

    def wholes(self, flag: str) -> list[int] | None:
        return sorted({_whole(item, flag, 1) for item in self.values[flag]}) if self.on(flag) else None

    def fraction(self, flag: str) -> float | None:
        text = self.text(flag)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 < number <= 1:
            raise InputError(f"{text!r} is not a fraction", where=flag, mend="give a number above 0, at most 1")
        return number

    def json(self, flag: str) -> dict[str, Any]:
        text = self.text(flag)
        if text is None:
            return {}
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", "nested too deeply")
            raise InputError(f"is not JSON: {what}", where=flag, mend="quote it as '{\"key\": value}'") from None
        if not isinstance(read, dict):
            raise InputError("is not a JSON object", where=flag, mend="quote it as '{\"key\": value}'")
        return {str(key).replace("-", "_"): value for key, value in read.items()}


def _whole(value: Any, flag: str, least: int) -> int:
    try:
        number = value if isinstance(value, int) and not isinstance(value, bool) else _suffixed(str(value))
        number = int(str(value)) if number is None else number
    except ValueError:
        raise InputError(
            f"{str(value)[:40]!r} is not a whole number", where=flag, mend=f"give {least} or more"
        ) from None
    if not least <= number < 2**53:
        raise InputError(
            f"{number if number < 2**53 else 'the number'} is out of range", where=flag, mend=f"give {least} or more"
        )
    return number


# --- From values to a scenario --------------------------------------------------------------------------------------


def _present(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _plain(engine: str, read: _Reader) -> dict[str, Any]:
    """The options that are a flag's value as it stands, by the table in the engine's description."""
    table = command_line(engine)["options"]
    options: dict[str, Any] = {"model": read.text("--model-path") or (read.positional[0] if read.positional else None)}
    options.update({name: read.whole(flag) for name, flag in table["whole"].items()})
    options.update({name: read.text(flag) for name, flag in table["text"].items()})
    options.update({name: read.fraction(flag) for name, flag in table["fraction"].items()})
    options.update({name: True for name, flag in table["switch"].items() if read.on(flag)})
    return _present(options)


def _not_modelled(options: Mapping[str, Any], read: _Reader) -> None:
    """Note what the line decides and no cost follows."""
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


def _sglang(read: _Reader) -> dict[str, Any]:
    tp, dp = read.whole("--tp-size") or 1, read.whole("--dp-size") or 1
    options = _plain("sglang", read)
    options.update(_present({"chunked_prefill_size": read.whole("--chunked-prefill-size", -1)}))
    if read.on("--flashinfer-allreduce-fusion-backend") or read.on("--enable-flashinfer-allreduce-fusion"):
        options["flashinfer_allreduce_fusion"] = True
    if read.on("--enforce-disable-flashinfer-allreduce-fusion"):
        options["flashinfer_allreduce_fusion"] = False
    if read.on("--enable-symm-mem") or read.on("--enable-torch-symm-mem"):
        options["symmetric_memory"] = True
    options.update(_sglang_graphs(read))
    options.update(_sglang_prefill_graphs(read))
    if read.on("--enable-dp-attention"):
        if tp % dp:
            raise InputError(f"{dp} does not divide --tp-size {tp}", where="--dp-size", mend="give a divisor")
        options["dp_attention"] = dp if dp > 1 else False
        if dp == 1:
            read.note("--enable-dp-attention: has no effect without --dp-size above 1")
    elif dp > 1:
        read.note(f"--dp-size {dp} without --enable-dp-attention: {dp} independent copies of {tp} GPUs each")
    if options.get("moe_a2a_backend", "none") not in ("none", "ascend_tp") and options.get("ep", 1) != tp:
        options["ep"] = tp
        read.note(f"--moe-a2a-backend {options['moe_a2a_backend']}: experts are spread over all {tp} ranks")
    _sglang_speculation(options, read)
    _sglang_environment(options, read)
    return options


def _sglang_graphs(read: _Reader) -> dict[str, Any]:
    """Captured batches. JSON wins over per-phase flags, those over the global switch; a list over a largest size."""
    decode = read.json("--cuda-graph-config").get("decode")
    decode = decode if isinstance(decode, dict) else {}
    backend = decode.get("backend") or read.text("--cuda-graph-backend-decode")
    off = read.on("--disable-cuda-graph") or read.on("--disable-decode-cuda-graph")
    sizes = decode.get("bs") or read.wholes("--cuda-graph-bs-decode")
    sizes = _captured(sizes, "decode")
    largest = read.whole("--cuda-graph-max-bs-decode")
    if decode.get("max_bs") is not None:
        largest = _whole(decode["max_bs"], "--cuda-graph-config", 1)
    if sizes and largest and largest != sizes[-1]:
        read.note(f"--cuda-graph-max-bs {largest}: the list of batch sizes wins, so the largest is {sizes[-1]}")
    largest = sizes[-1] if sizes else largest
    if read.on("--disable-cuda-graph-padding") and largest and not sizes:
        sizes = list(range(1, min(largest, 4096) + 1))
    disabled = backend == "disabled" or (off and backend is None)
    if off and backend not in (None, "disabled"):
        read.note(f"--disable-cuda-graph: the decode backend {backend!r} wins over it, so decode runs in graphs")
    if disabled:
        read.note("CUDA graphs are off: decode, draft, verify and draft extend are all launched kernel by kernel")
    return _present({"cuda_graph_max_bs": largest, "captured_sizes": sizes, "disable_cuda_graph": disabled or None})


def _captured(sizes: Any, phase: str) -> list[int] | None:
    """Sizes that a phase of --cuda-graph-config or a flag lists, ascending; None where neither does. Raises InputError."""
    if sizes is None:
        return None
    if not isinstance(sizes, list) or not sizes:
        raise InputError(f"{phase}.bs is not a list", where="--cuda-graph-config", mend="give whole numbers")
    return sorted({_whole(size, "--cuda-graph-config", 1) for size in sizes})


# Flags that stand for a --cuda-graph-backend-prefill.
_PREFILL_BACKENDS = {
    "--enable-breakable-cuda-graph": "breakable",
    "--enforce-piecewise-cuda-graph": "tc_piecewise",
    "--disable-piecewise-cuda-graph": "disabled",
}


def _sglang_prefill_graphs(read: _Reader) -> dict[str, Any]:
    """Captured numbers of prompt tokens, by the same order of precedence; flags of two generations."""
    prefill = read.json("--cuda-graph-config").get("prefill")
    prefill = prefill if isinstance(prefill, dict) else {}
    flag = "--cuda-graph-backend-prefill"
    given = {name: kind for name, kind in _PREFILL_BACKENDS.items() if read.on(name)}
    given |= {flag: str(read.text(flag))} if read.on(flag) else {}
    backend = prefill.get("backend")
    if backend is None and read.release < (0, 5, 14):  # switches of their own: that which enforces wins
        backend = next(
            (given[name] for name in (flag, *_PREFILL_BACKENDS) if name in given and given[name] != "breakable"), None
        )
    elif backend is None:  # all write one option: the last on the line wins
        backend = next((given[name] for name in reversed(read.values) if name in given), None)
    kinds = (*_PREFILL_BACKENDS.values(), "full")
    if backend is not None and backend not in kinds:
        raise InputError(
            f"{str(backend)[:40]!r} is no backend of prefill graphs", where=flag, mend=f"give one of {', '.join(kinds)}"
        )
    off = [read.on(flag) for flag in ("--disable-cuda-graph", "--disable-prefill-cuda-graph")]
    flags = (read.wholes("--cuda-graph-bs-prefill"), read.wholes("--piecewise-cuda-graph-tokens"))
    sizes = prefill["bs"] if prefill.get("bs") is not None else flags[0] or flags[1]
    sizes = _captured(sizes, "prefill")
    most = [read.whole(flag) for flag in ("--cuda-graph-max-bs-prefill", "--piecewise-cuda-graph-max-tokens")]
    largest = _whole(prefill["max_bs"], "--cuda-graph-config", 1) if prefill.get("max_bs") is not None else None
    on = backend != "disabled" if backend else False if any(off) else None
    largest = largest or next((size for size in most if size), None)
    return _present({"prefill_graphs": on, "prefill_graph_tokens": largest, "prefill_graph_sizes": sizes})


_SGLANG_METHODS = {
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "STANDALONE": "draft-model",
    "NGRAM": "ngram",
    "LOOKAHEAD": "ngram",
    "FROZEN_KV_MTP": "mtp",
    "DFLASH": "dflash",
    "DSPARK": "dspark",
    "UNO": "uno",
}


def _sglang_speculation(options: dict[str, Any], read: _Reader) -> None:
    algorithm = read.text("--speculative-algorithm")
    steps = read.whole("--speculative-num-steps", 0)
    topk = read.whole("--speculative-eagle-topk")
    tokens = read.whole("--speculative-num-draft-tokens")
    if algorithm is None:
        options["method"] = "none"
        if any(flag.startswith("--speculative") for flag in read.values):
            read.note("--speculative-* without --speculative-algorithm: SGLang does not speculate")
        return
    name = algorithm.upper()
    if name != "EAGLE" and name not in _SGLANG_METHODS:
        known = ("EAGLE", *_SGLANG_METHODS)
        raise InputError(
            f"unknown algorithm {algorithm!r}", where="--speculative-algorithm", mend=did_you_mean(name, known)
        )
    method = _SGLANG_METHODS.get(name) or ("eagle" if "draft" in options else "mtp")
    if name == "NEXTN":
        read.note("--speculative-algorithm NEXTN: the same as EAGLE, with the model's own next-token layer as draft")
    elif name == "EAGLE" and method == "mtp":
        read.note("--speculative-algorithm EAGLE without a draft path: the model's own next-token layer (MTP) drafts")
    elif name == "LOOKAHEAD":
        read.note("--speculative-algorithm LOOKAHEAD: its name is NGRAM in described releases")
    options["method"] = method
    if name in ("DFLASH", "DSPARK", "UNO"):
        # SGLang calls the one pass over a block one step; a scenario's num_steps is the depth, which follows the block
        block = read.whole(f"--speculative-{name.lower()}-block-size") or tokens
        options.update(_present({"topk": 1, "draft_tokens": block}))
        said = "" if block else ", and verified whole: the drafter's config says how long it is"
        read.note(f"--speculative-algorithm {name}: a block is drafted in one pass{said}")
    elif method == "ngram":
        tokens = tokens or 12
        breadth = read.whole("--speculative-ngram-max-bfs-breadth") or 10
        options.update({"num_steps": tokens - 1, "topk": 1, "draft_tokens": tokens})
        read.note(
            f"NGRAM: {tokens} tokens are verified, found on the host in a tree of breadth up to {breadth}; "
            f"read as a chain of {tokens}"
        )
    else:
        options.update(_sglang_chain(read, options, steps, topk, tokens))
    if read.on("--speculative-adaptive"):
        read.note(f"--speculative-adaptive: {BY_BATCH}")
    _sglang_limits(options, read, name)


def _sglang_chain(
    read: _Reader, options: Mapping[str, Any], steps: int | None, topk: int | None, tokens: int | None
) -> dict[str, int]:
    """Steps, topk and draft tokens of EAGLE, EAGLE-3, MTP and STANDALONE (speculative_hook.py)."""
    if steps is None and topk is None and tokens is None:
        named = str(options.get("model", "")).lower()
        tree = read.architecture in ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
        tree = (tree or (read.architecture is None and ("llama-" in named or "grok" in named))) and options[
            "method"
        ] != "draft-model"
        steps, topk, tokens = (5, 4, 8) if tree else (3, 1, 4)
        why = read.architecture or (f"{options['model']}, judged by its name" if named else "an unknown architecture")
        read.note(
            f"no steps, topk or draft tokens given: SGLang chooses by architecture; for {why} "
            f"{steps} steps, topk {topk}, {tokens} draft tokens"
        )
        return {"num_steps": steps, "topk": topk, "draft_tokens": tokens}
    if steps is None:
        steps = max(1, (tokens or 4) - 1)
        read.note(
            f"--speculative-num-steps is missing: SGLang refuses topk or draft tokens without it; read as {steps} steps"
        )
    if topk is None:
        topk = 1
        read.note("--speculative-eagle-topk is missing: SGLang fails at start without it; read as 1")
    if topk == 1 and tokens != steps + 1:
        if tokens is not None:
            read.note(f"--speculative-num-draft-tokens {tokens}: with topk 1 SGLang sets it to steps + 1 = {steps + 1}")
        tokens = steps + 1
    elif tokens is None:
        tokens = steps + 1
        read.note(f"--speculative-num-draft-tokens is missing: SGLang fails with topk {topk}; read as {tokens}")
    most = 1 + topk + max(0, steps - 1) * topk**2
    if tokens > most:
        read.note(f"--speculative-num-draft-tokens {tokens}: the tree has at most {most} tokens; SGLang fails")
    return {"num_steps": steps, "topk": topk, "draft_tokens": tokens}


def _sglang_limits(options: dict[str, Any], read: _Reader, name: str) -> None:
    """What SGLang changes elsewhere because it speculates."""
    cap = load_engine("sglang").running_cap_speculative
    if "max_running_requests" not in options:  # the scenario's own default, where it still speculates
        read.note(f"speculation caps running requests at {cap} unless --max-running-requests is given")
    if read.on("--enable-mixed-chunk"):
        read.note("--enable-mixed-chunk: SGLang turns it off when it speculates")
    if options.get("dp_attention") and name in ("STANDALONE", "NGRAM", "LOOKAHEAD", "DFLASH"):
        read.note(f"--enable-dp-attention: SGLang {name} does not support it and refuses to start")
    topk = options.get("topk", 1)
    spec_v1 = read.release < (0, 5, 13) and name not in ("NGRAM", "LOOKAHEAD") and topk > 1
    synchronous = name in ("NGRAM", "LOOKAHEAD", "DFLASH") and read.release < (0, 5, 14)
    if (spec_v1 or synchronous) and not options.get("disable_overlap"):
        options["disable_overlap"] = True
        read.note(f"overlap scheduling is off: in this release it does not work with {name} and topk {topk}")
    mode = options.get("speculative_attention_mode")
    if mode is not None and mode not in ("prefill", "decode"):
        raise InputError(f"{mode!r} is not a mode", where="--speculative-attention-mode", mend="give prefill or decode")
    if mode is not None:
        read.note(
            "--speculative-attention-mode only chooses the attention backend of verify and draft extend; "
            "it does not decide whether they run in CUDA graphs"
        )
    trtllm = [key for key in options if key.endswith("attention_backend") and options[key] == "trtllm_mha"]
    if trtllm and topk > 1:
        read.note("trtllm_mha supports topk 1 only when speculating; SGLang refuses to start")


def _sglang_environment(options: dict[str, Any], read: _Reader) -> None:
    length = read.env.get("SGLANG_SIMULATE_ACC_LEN")
    if length is not None:
        try:
            simulated = float(length)
        except ValueError:
            simulated = float("nan")
        if not simulated < 1e6:
            raise InputError(f"{length[:40]!r} is not a number", where="SGLANG_SIMULATE_ACC_LEN", mend="give one")
        if simulated > 0:
            options["simulated_accept_length"] = simulated
            read.note(f"SGLANG_SIMULATE_ACC_LEN: acceptance is simulated, {simulated:g} tokens a cycle")
    if "SGLANG_ENABLE_SPEC_V2" in read.env:
        value = read.env["SGLANG_ENABLE_SPEC_V2"].lower()
        if read.release >= (0, 5, 14):
            read.note("SGLANG_ENABLE_SPEC_V2: removed in 0.5.14; the overlapped worker always runs")
        elif value in ("0", "false", "no", "off") and options.get("method") not in (None, "none"):
            options["disable_overlap"] = True
            read.note("SGLANG_ENABLE_SPEC_V2=0: speculation runs without overlap scheduling")
    if read.env.get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "0").lower() in ("1", "true", "yes", "on") and read.release < (
        0,
        5,
        21,
    ):
        read.note("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE: exists from 0.5.21 on; ignored by this release")


_VLLM_METHODS = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "draft_model": "draft-model",
    "ngram": "ngram",
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "ngram",
}


def _vllm(read: _Reader) -> dict[str, Any]:
    tp, dp = read.whole("--tp-size") or 1, read.whole("--dp-size") or 1
    experts = read.on("--enable-expert-parallel")
    options = _plain("vllm", read)
    if read.text("--max-model-len") not in (None, "auto", "-1"):
        options["context_length"] = read.whole("--max-model-len")
    if isinstance(backend := read.json("--attention-config").get("backend"), str):
        options.setdefault("attention_backend", backend)
    if "VLLM_ATTENTION_BACKEND" in read.env:
        options.setdefault("attention_backend", read.env["VLLM_ATTENTION_BACKEND"])
    if dp > 1 and experts:
        options.update({"tp": tp * dp, "dp_attention": dp})
        read.note(
            f"--data-parallel-size {dp} with expert parallelism: {tp * dp} GPUs, attention on {dp} groups of {tp}, "
            f"experts over all; read as tp {tp * dp}, dp_attention {dp}"
        )
    elif dp > 1:
        read.note(
            f"--data-parallel-size {dp}: {dp} copies of {tp} GPUs for a dense model; "
            "a mixture of experts cuts its experts over all of them"
        )
    if experts:
        options["ep"] = tp * dp
    options.update(_vllm_graphs(read))
    _vllm_speculation(options, read)
    return options


def _vllm_graphs(read: _Reader) -> dict[str, Any]:
    config = read.json("--compilation-config") if not _is_level(read.text("--compilation-config")) else {}
    mode = str(config.get("cudagraph_mode", "")).upper()
    sizes = read.wholes("--cudagraph-capture-sizes")
    if sizes is None and config.get("cudagraph_capture_sizes") is not None:
        given = config["cudagraph_capture_sizes"]
        if not isinstance(given, list) or not given:
            where = "--compilation-config cudagraph_capture_sizes"
            raise InputError("is not a list of sizes", where=where, mend="give whole numbers")
        sizes = sorted({_whole(size, "cudagraph_capture_sizes", 1) for size in given})
    largest = read.whole("--max-cudagraph-capture-size", 0)
    if largest is None and config.get("max_cudagraph_capture_size") is not None:
        largest = _whole(config["max_cudagraph_capture_size"], "max_cudagraph_capture_size", 0)
    eager = read.on("--enforce-eager")
    off = eager or mode == "NONE" or read.text("--optimization-level") == "0" or largest == 0
    if eager and (sizes or largest or mode not in ("", "NONE")):
        read.note("--enforce-eager: wins over the compilation config; nothing runs in CUDA graphs")
    if "PIECEWISE" in mode and "FULL" not in mode:
        read.note(f"cudagraph_mode {mode}: attention runs outside the graphs, one launch a layer and piece")
    if off:
        read.note("CUDA graphs are off: decode and verify are launched kernel by kernel")
    return _present({"cuda_graph_max_bs": largest or None, "captured_sizes": sizes, "disable_cuda_graph": off or None})


def _is_level(text: str | None) -> bool:
    return text is not None and re.fullmatch(r"[0-3]", text.strip()) is not None


def _vllm_speculation(options: dict[str, Any], read: _Reader) -> None:
    where = "--speculative-config"
    config = read.json(where)
    for flag, key in (
        ("--spec-method", "method"),
        ("--spec-model", "model"),
        ("--spec-tokens", "num_speculative_tokens"),
    ):
        if read.on(flag):
            if key in config:
                raise InputError(f"{key} is given twice", where=flag, mend=f"leave it out here or in {where}")
            config[key] = read.text(flag)
    if not config:
        options["method"] = "none"
        return
    method, draft = config.get("method"), config.get("model")
    for key, value in (("method", method), ("model", draft)):
        if value is not None and not isinstance(value, str):
            raise InputError(f"{key} is not a text", where=where, mend=f'give "{key}": "..."')
    name = _vllm_method(read, method, draft)
    tokens = config.get("num_speculative_tokens")
    if tokens is not None:
        tokens = _whole(tokens, f"{where} num_speculative_tokens", 1)
    elif name == "mtp":
        tokens = 1
        read.note("num_speculative_tokens is missing: vLLM takes the model's number of next-token layers; read as 1")
    elif name == "suffix":
        tokens = 24
        read.note("num_speculative_tokens is missing: suffix decoding verifies up to 24")
    else:
        raise InputError("num_speculative_tokens is missing", where=where, mend="give how many tokens to draft")
    options["method"] = _VLLM_METHODS.get(name, name)
    options.update({"num_steps": tokens, "topk": 1, "draft_tokens": tokens + 1})
    if draft is not None and name not in ("ngram", "ngram_gpu", "suffix"):
        options["draft"] = draft
    if name == "suffix":
        read.note("suffix: the number of verified tokens changes from step to step; the largest is used")
    if name not in _VLLM_METHODS:
        read.note(f"speculative method {name!r} has no cost model here")
    if config.get("num_speculative_tokens_per_batch_size"):
        read.note(f"num_speculative_tokens_per_batch_size: {BY_BATCH}")
    if config.get("speculative_token_tree") is not None:
        read.note("speculative_token_tree: not read; a chain is assumed")
    if config.get("enforce_eager") is True:
        read.note("speculative enforce_eager: the draft is launched kernel by kernel")
    draft_tp = config.get("draft_tensor_parallel_size")
    if draft_tp is not None:
        draft_tp = _whole(draft_tp, f"{where} draft_tensor_parallel_size", 1)
        target = options.get("tp", 1) // (options.get("dp_attention") or 1)
        if draft_tp not in (1, target):
            read.note(f"draft_tensor_parallel_size {draft_tp}: vLLM takes only 1 or the target's {target}")
        options["draft_tp"] = draft_tp


def _vllm_method(read: _Reader, method: str | None, draft: str | None) -> str:
    """The method as vLLM deduces it: its own name, then the draft's name, then a whole draft model."""
    name = method or ("ngram" if draft in ("ngram", "[ngram]") else "draft_model")
    if name != "mtp" and name.endswith("_mtp"):
        read.note(f"method {name!r}: vLLM's old name of mtp")
        name = "mtp"
    if draft is None:
        if name in ("eagle", "eagle3", "draft_model", "dflash", "medusa"):
            mend = 'add "model": "..."'
            raise InputError(f"method {name!r} without a draft model", where="--speculative-config", mend=mend)
        return name
    if name in ("eagle", "eagle3", "dflash", "ngram", "[ngram]", "ngram_gpu", "suffix", "extract_hidden_states"):
        return name
    lower = draft.lower()
    named = "eagle" if "eagle-" in lower else "eagle3" if "eagle3" in lower else "dflash" if "dflash" in lower else name
    if named != name or method is None:
        read.note(f"method deduced from the draft's name {draft!r}: {named}")
    if named == "draft_model":
        read.note("vLLM also looks into the draft's config: a next-token (MTP) or Medusa type there wins")
    return named
