"""A pasted launch command taken apart: what the shell makes of it, or the container that a manifest or Dockerfile describes, where
the engine's own arguments begin, its environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from specsim.errors import InputError
from specsim.names import ENGINES

MAX_LENGTH = 100_000  # characters of a line
# What may change the speed, and no secret such as VLLM_API_KEY.
ENVIRONMENT = re.compile(r"(?!.*(KEY|TOKEN|SECRET|PASSW))(NCCL|SGLANG|SGL|VLLM|CUDA|FLASHINFER|TORCH)_\w+$")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# How a list or a manifest begins, as Kubernetes, Compose and Dockerfiles have it; and the keys of one that hold words, in order.
LISTED = re.compile(r"\s*(---\s|\[|-\s|\w+:\s|\{\s*[\"\w])")
WORDS = ("entrypoint", "command", "cmd", "args")
SET = re.compile(
    r"""(?:^|;|&&)[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=("[^"$`]*"|'[^']*'|[^\s;&$`"'()]*)(?=[ \t\r]*(?:$|;|&&|\#))""",
    re.MULTILINE,
)
ARRAY = re.compile(r"^[ \t]*(?:declare -a[ \t]+|local[ \t]+)?([A-Za-z_]\w*)\+?=\(([^()]*)\)", re.MULTILINE)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")
STARTS = {
    "sglang": ("sglang.launch_server", "sglang serve"),
    "vllm": ("vllm serve", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main serve"),
}


@dataclass
class Line:
    """A launch line taken apart: the engine's arguments, and what stood in front of them."""

    arguments: list[str]
    env: dict[str, str] = field(default_factory=dict)
    image: str = ""
    command: bool = False  # the engine's command itself was on the line


def _with_variables(text: str) -> str:
    """A shell text with the values of the variables that it sets itself, or gives a default for; others stay."""
    values = {name: value[1:-1] if value[:1] in ("'", '"') else value for name, value in SET.findall(text)}

    def value(found: re.Match[str]) -> str:
        known = values.get(found[1] or found[2], found[3])
        return str(found[0] if known is None else known)

    arrays: dict[str, str] = {}
    for name, words in ARRAY.findall(text):
        arrays[name] = f"{arrays.get(name, '')} {' '.join(words.split())}"
    longest = max(map(len, (*values.values(), *arrays.values())), default=0)
    if longest * text.count("$") > MAX_LENGTH:
        raise InputError(f"is longer than {MAX_LENGTH} characters", where="launch line", mend="give one command")
    for name, words in arrays.items():
        for written in (f'"${{{name}[@]}}"', f"${{{name}[@]}}", f'"${{{name}[*]}}"', f"${{{name}[*]}}"):
            text = text.replace(written, words)
    return VARIABLE.sub(value, ARRAY.sub("", text) if arrays else text)


def _split(text: str) -> list[list[str]]:
    """The commands of a pasted shell text, each a list of words; continued lines joined, redirections left out."""
    if len(text) > MAX_LENGTH:
        raise InputError(f"is longer than {MAX_LENGTH} characters", where="launch line", mend="give one command")
    text = re.sub(r"(?m)^[ \t]*#.*$", "", text)  # comments of a script
    text = _with_variables(text)
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
        elif word.strip() or not word:  # a backslash before a space at the end makes a word of it
            commands[-1].append(word)
    return [command for command in commands if command]


def _listed(engine: str, text: str) -> list[list[str]]:
    """The commands of a JSON or YAML list of words, or of a manifest's containers with their environment; none where the text is
    neither."""
    text = re.sub(r"(?m)^[ \t]*(CMD|ENTRYPOINT)[ \t]+(?=\[)", r"\1: ", text)
    if len(text) > MAX_LENGTH or not LISTED.match(text):
        return []
    if all(
        re.match(r"\s*(-\s|#|$)", line) for line in text.splitlines()
    ):  # the first line's indent is often not copied
        text = "\n".join(line.strip() for line in text.splitlines())
    try:
        documents = list(yaml.load_all(text, yaml.BaseLoader))  # every scalar stays a text
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    found: list[list[str]] = []
    for value in documents:
        plain = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
        found += [value] if plain else [words for each in _containers(value) if (words := _container(engine, each))]
    return found


def _containers(document: Any) -> Iterator[dict[str, Any]]:
    """Every object of a manifest that has a command or arguments."""
    seen: set[int] = set()  # aliases may make a document endless
    rest = [document]
    while rest:
        value = rest.pop(0)
        if id(value) in seen or not isinstance(value, dict | list):
            continue
        seen.add(id(value))
        if isinstance(value, dict) and any(key.lower() in WORDS for key in value if isinstance(key, str)):
            yield value
        rest += value.values() if isinstance(value, dict) else value


def _container(engine: str, container: dict[str, Any]) -> list[str]:
    """The words of one container: its environment, its image where that starts the engine, and what runs in it."""
    lower = {key.lower(): value for key, value in container.items() if isinstance(key, str)}
    words: list[str] = []
    for key in WORDS:
        value = lower.get(key)
        if isinstance(value, str):
            words += [word for command in _split(value) for word in command]
        elif isinstance(value, list):
            words += [each for each in value if isinstance(each, str)]
    image = [lower["image"]] if isinstance(lower.get("image"), str) else []
    if image and _start(engine, words) is None and _start(engine, image) is None:
        image = []
    env: list[str] = []
    for each in (lower.get("env"), lower.get("environment")):
        if isinstance(each, dict):
            env += [f"{name}={value}" for name, value in each.items()]
        for one in each if isinstance(each, list) else ():
            env.append(f"{one.get('name')}={one.get('value', '')}" if isinstance(one, dict) else str(one))
    set_here = dict(one.split("=", 1) for one in env if ASSIGNMENT.fullmatch(one))
    words = [re.sub(r"\$\((\w+)\)", lambda found: set_here.get(found[1], found[0]), word) for word in words]
    return [*(f"{name}={value}" for name, value in set_here.items()), *image, *words] if words else []


def take_apart(engine: str, line: str | Sequence[str], depth: int = 0) -> Line:
    """The one command that starts the engine, or, when none does, all words as its arguments."""
    commands = (_listed(engine, line) or _split(line)) if isinstance(line, str) else [[str(word) for word in line]]
    found: list[Line] = []
    env: dict[str, str] = {}
    for command in commands:
        while command and command[0] in ("export", "env", "exec", "nohup", "sudo", "time", "set", "$"):
            command = command[1:]
        taken = _command(engine, command)
        env.update(taken.env)
        for word in command if depth < 2 and not taken.command else ():
            if " " in word and any(start in word for start in STARTS[engine]):  # bash -c "vllm serve ..."
                taken = replace(take_apart(engine, word, depth + 1), image=taken.image)
                env.update(taken.env)
        found.append(taken)
    named = [one for one in found if one.command]
    for other in ENGINES:
        if not named and other != engine and any(_start(other, command) is not None for command in commands):
            raise InputError(f"is a line of {other}", where=f"{engine} launch line", mend=f"give it as --{other}-args")
    if len(named) > 1:
        raise InputError("starts several servers", where=f"{engine} launch line", mend="give one command")
    chosen = named[0] if named else Line([word for one in found for word in one.arguments])
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


def _command(engine: str, words: list[str]) -> Line:
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
    return Line(words[skip if begin is None else begin :], env, image, begin is not None)
