"""A team's defaults: `specsim.yaml`, for options that the command line leaves out.

    scenario:                     options of a scenario, for every command that takes them
      hardware: boxes/ours.yaml   paths are relative to the file
      tp: 8
    simulate:                     options of one command
      ttft-ms: 500

The file is $SPECSIM_CONFIG, or the nearest one from the working directory up to the root of the repository or the home
folder. What the line gives wins, and takes with it the defaults that would contradict it: a model its draft, a launch
line everything that launch lines say.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.errors import InputError, did_you_mean
from specsim.files import read_yaml

if TYPE_CHECKING:
    import click

NAME = "specsim.yaml"
VARIABLE = "SPECSIM_CONFIG"
SCENARIO = "scenario"
ACCEPTANCE = ("accept_rate", "accept_length", "accept_per_position", "accept_profile", "accept_histogram")
DRAFTING = ("draft", "draft_tokens", "num_steps", "topk", *ACCEPTANCE)
LAUNCH = ("sglang_args", "vllm_args")
SAID_BY_LAUNCH = (*LAUNCH, "model", "draft", "engine", "tp", "ep", "dp_attention", "method", "draft_tokens", "num_steps", "topk")  # fmt: skip
# option on the line -> defaults that it displaces
DISPLACES: dict[str, tuple[str, ...]] = {
    "model": ("draft",),
    "draft": ("method",),
    "method": ("draft",),
    "draft_tokens": ("num_steps",),
    "num_steps": ("draft_tokens",),
    **dict.fromkeys(ACCEPTANCE, ACCEPTANCE),
    **dict.fromkeys(LAUNCH, SAID_BY_LAUNCH),
    "method=none": DRAFTING,
}


@dataclass(frozen=True)
class Defaults:
    """What one run takes from the file. values: a click default map of the command; keys: option -> key of the file."""

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)

    def note(self) -> str:
        """Said wherever a result rests on the file; empty when nothing came from it."""
        return f"{self.path} gives {', '.join(self.keys)} (--no-config leaves it out)" if self.keys else ""

    def words(self) -> list[str]:
        """The same on a command line."""
        return [word for option in self.keys for word in self._words(option)]

    def _words(self, option: str) -> list[str]:
        value = self._value(option)
        if isinstance(value, bool):
            return [option] if value else []
        return [word for each in (value if isinstance(value, list) else [value]) for word in (option, str(each))]

    def _names(self, option: str) -> list[str]:
        """The value of an option, each of a list by itself."""
        value = self._value(option)
        return [word for each in (value if isinstance(value, list) else [value]) for word in str(each).split(",")]

    def _value(self, option: str) -> Any:
        """The value of an option, which a command that has commands keeps one level down."""
        name = option[2:].replace("-", "_")
        below = (inner for inner in self.values.values() if isinstance(inner, dict) and name in inner)
        return self.values[name] if name in self.values else next(below)[name]

    def without(self, options: Iterable[str]) -> Defaults:
        """The same, where a command makes nothing of some defaults. options: such as "--tp"."""
        dropped = set(options)
        return replace(self, keys={option: key for option, key in self.keys.items() if option not in dropped})

    def explain(self, error: InputError) -> str:
        """The error's line, with the file and the key where a default of the file caused it, or may have."""
        key = self.keys.get(error.where)
        if key:
            return str(InputError(error.what, where=f"{self.path}, key {key}", mend=error.mend))
        for option, key in self.keys.items():
            if any(_is_of(error, word) for word in self._names(option)):
                return f"{self.path}, key {key}: {error}"
        said = f" ({self.path} gives {', '.join(self.keys)})" if self.keys and error.where.startswith("--") else ""
        return f"{error}{said}"


def find(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file that applies in the working directory, None when there is none."""
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE])
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        return None
    folders = [here, *here.parents]
    ends = [
        i for i, folder in enumerate(folders) if (folder / ".git").exists() or str(folder) == environment.get("HOME")
    ]
    for folder in folders[: ends[0] + 1 if ends else 1]:
        if (folder / NAME).is_file():
            return Path(os.path.relpath(folder / NAME, here))
    return None


def read(
    path: Path,
    name: str,
    command: click.Command,
    line: Sequence[str],
    *,
    commands: Iterable[str],
    scenario: Iterable[str],
) -> Defaults:
    """The defaults of one command. line: the arguments as given. commands: names of all of them; scenario: names of all
    scenario options, of which a command may lack some.

    Raises InputError, with file and key, for what is no command or no option of this one, and for values that the option
    would refuse on the line.
    """
    data = read_yaml(path, "file of defaults")
    if not isinstance(data, dict | None):
        raise InputError("is not a mapping", where=str(path), mend=f"write for example {SCENARIO}: {{tp: 8}}")
    sections = {str(key): value for key, value in (data or {}).items()}
    known = [SCENARIO, *commands]
    options = frozenset(scenario)
    for key, value in sections.items():
        if key.replace("-", "_") in options and not isinstance(value, dict):  # there is a command hardware, too
            raise InputError("is an option", where=f"{path}, key {key}", mend=f"write it below {SCENARIO}:")
        if key not in known and not isinstance(value, dict):
            raise _misplaced(key, f"{path}, key {key}", {SCENARIO: options, name: _options(command)})
        if key not in known:
            raise InputError("is no command", where=f"{path}, key {key}", mend=did_you_mean(key, known))
        if not isinstance(value, dict):
            raise InputError(
                "is not a mapping of options", where=f"{path}, key {key}", mend="write option: value below it"
            )
    reader = _Reader(path, line, options)
    for section in (SCENARIO, name):  # the command's own keys come last: they win
        reader.take(command, section, sections.get(section, {}), reader.values)
    return Defaults(path, reader.values, reader.keys)


def _is_of(error: InputError, word: str) -> bool:
    """Whether an error that names no option is of this name, file or folder."""
    if error.where:
        spellings = {word, str(Path(word))}  # "./box.yaml" is told as box.yaml
        return any(error.where == name or error.where.startswith((f"{name}/", f"{name}, ")) for name in spellings)
    return repr(word) in error.what


def _misplaced(key: str, where: str, sections: Mapping[str, Iterable[str]]) -> InputError:
    """The error of an option that stands beside the sections, by its own name or nearly so. sections: the options of each."""
    from difflib import get_close_matches

    name = key.replace("-", "_")
    for section, options in sections.items():
        if near := get_close_matches(name, list(options), n=1, cutoff=1.0 if name in options else 0.6):
            meant = "" if near[0] == name else f"did you mean {near[0].replace('_', '-')!r}? "
            return InputError("is no command", where=where, mend=f"{meant}this option goes below {section}:")
    return InputError(
        "is no command", where=where, mend=f"options go below {SCENARIO}:, or below the command that takes them"
    )


class _Reader:
    """Turns keys of the file into values of options."""

    def __init__(self, path: Path, line: Sequence[str], scenario: frozenset[str]) -> None:
        self.path, self.line, self.scenario = path, line, scenario
        self.given = _given(line)
        self.displaced = {name for flag in self.given for name in DISPLACES.get(flag, ())}
        self.values: dict[str, Any] = {}
        self.keys: dict[str, str] = {}

    def take(self, command: click.Command, section: str, found: Mapping[Any, Any], values: dict[str, Any]) -> None:
        """Put the keys of one section into `values`, but those that the line gives or displaces."""
        options = _options(command)
        if section == SCENARIO:
            options = {name: option for name, option in options.items() if _of_scenario(option) and not option.hidden}
        subcommands = {} if section == SCENARIO else dict(getattr(command, "commands", {}))
        for key, value in found.items():
            name, where = str(key).replace("-", "_"), f"{self.path}, key {section}.{key}"
            if name in subcommands:
                if not isinstance(value, dict):
                    raise InputError("is not a mapping of options", where=where, mend="write option: value below it")
                if name in self.line:
                    self.take(subcommands[name], f"{section}.{key}", value, values.setdefault(name, {}))
            elif name in options:
                option = options[name]
                if name not in self.given and not (_of_scenario(option) and name in self.displaced):
                    values[str(option.name)] = _value(value, option, self.path, where)
                    self.keys["--" + name.replace("_", "-")] = f"{section}.{key}"
            elif section != SCENARIO or name not in self.scenario:
                known = sorted(self.scenario) if section == SCENARIO else [*options, *subcommands]
                mend = did_you_mean(str(key), [name.replace("_", "-") for name in known])
                raise InputError("is no option", where=where, mend=mend)


def _given(line: Sequence[str]) -> set[str]:
    """Names of the options on the line, and "method=none" where it says so."""
    words = [word for word in line if word.startswith("--")]
    found = {word[2:].partition("=")[0].replace("-", "_") for word in words}
    if "--method=none" in line or ("--method", "none") in pairwise(line):
        found.add("method=none")
    return found


def _options(command: click.Command) -> dict[str, click.Option]:
    """A command's options by the names that the file has for them."""
    import click

    options = (param for param in command.params if isinstance(param, click.Option))
    return {flag[2:].replace("-", "_"): o for o in options for flag in o.opts if flag.startswith("--")}


def _of_scenario(option: click.Option) -> bool:
    return bool(getattr(option, "of_scenario", False))


def _value(value: Any, option: click.Option, path: Path, where: str) -> Any:
    """The value as the line would give it, once the option has taken it."""
    import click

    if option.is_flag:
        if not isinstance(value, bool):
            raise InputError(f"is {value!r}", where=where, mend="write true or false")
        return value
    items = value if isinstance(value, list) else [value]
    if any(item is None or isinstance(item, dict | list) for item in items) or not items:
        raise InputError("is not a plain value", where=where, mend="write a number, a text, or a list of them")
    texts = [_text(item, path) for item in items]
    made: Any = texts if option.multiple else ",".join(texts)
    try:
        with click.Context(click.Command("defaults")) as context:
            option.type_cast_value(context, made)
    except click.BadParameter as error:
        raise InputError(error.message.rstrip(".").replace("\n", " "), where=where) from None
    return made


def _text(item: Any, path: Path) -> str:
    """A value as text; one that is the path of a file or folder beside `path`, as that path."""
    if isinstance(item, bool):
        return "on" if item else "off"  # YAML takes on for true
    text = str(item)
    looks = "/" in text or text.endswith((".yaml", ".yml", ".json"))
    return str(path.parent / text) if looks and (path.parent / text).exists() else text
