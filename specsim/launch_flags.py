"""The flags of a launch line by their full names, and their values converted as an engine converts them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from specsim.engines import command_line, read_flags
from specsim.errors import InputError

NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BY_BATCH = (
    "the draft length changes with the batch; the line's own is used here (specsim simulate --policy FILE follows it)"
)


def is_flag(word: str) -> bool:
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


def flag_names(engine: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Full names of the known flags among the arguments of a server, with no look at what they make together."""
    return tuple(flag_values(engine, arguments, [])[0])


def flag_values(engine: str, arguments: Sequence[str], notes: list[str]) -> tuple[dict[str, Any], list[str], list[str]]:
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
        if not is_flag(word):
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
        while kind != "switch" and not equals and place < len(arguments) and not is_flag(arguments[place]):
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
class Reader:
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
        return whole(self.values[flag], flag, least) if self.on(flag) else None

    def wholes(self, flag: str) -> list[int] | None:
        return sorted({whole(item, flag, 1) for item in self.values[flag]}) if self.on(flag) else None

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


def whole(value: Any, flag: str, least: int) -> int:
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


def present(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def plain(engine: str, read: Reader) -> dict[str, Any]:
    """The options that are a flag's value as it stands, by the table in the engine's description."""
    table = command_line(engine)["options"]
    options: dict[str, Any] = {"model": read.text("--model-path") or (read.positional[0] if read.positional else None)}
    options.update({name: read.whole(flag) for name, flag in table["whole"].items()})
    options.update({name: read.text(flag) for name, flag in table["text"].items()})
    options.update({name: read.fraction(flag) for name, flag in table["fraction"].items()})
    options.update({name: True for name, flag in table["switch"].items() if read.on(flag)})
    return present(options)
