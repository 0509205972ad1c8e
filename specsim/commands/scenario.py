"""Scenario options, the same for every command that takes them, and the scenario they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

import specsim.names as known
from specsim.commands.common import InFile, Share, as_click_tells

if TYPE_CHECKING:
    from specsim.scenarios import Scenario

F = TypeVar("F", bound=Callable[..., Any])


class Count(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A whole number, "8k" meaning 8 x 1024. examples: what a wrong word is answered with."""

    name = "count"

    def __init__(self, *examples: str) -> None:
        self.examples = examples

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower()
        factor = {"k": 1024, "m": 1024**2}.get(text[-1:], 1)
        try:
            return int(text[:-1] if factor > 1 else text) * factor
        except ValueError:
            mend = f"for example {' or '.join(self.examples)}"
            self.fail(_several(value) or f"{value!r} is not a whole number; {mend}", param, ctx)


class Number(click.types.FloatParamType):
    """A number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if several := _several(value):
            self.fail(several, param, ctx)
        return super().convert(value, param, ctx)


def _several(value: Any) -> str:
    """What to say of a list or a range where one number is wanted; empty for all else."""
    listed = isinstance(value, str) and re.fullmatch(
        r"\s*[\d.]+[km%]?(\s*[,:]\s*[\d.]+[km%]?)+\s*", value, re.IGNORECASE
    )
    return f"{value!r} is several values where one is needed; specsim sweep takes them" if listed else ""


class Rate(Number, Share):
    """A rate, as 0.6 or 60%."""


class Rates(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Rates with commas between."""

    name = "a1,a2,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        from specsim.ranges import share

        try:
            return tuple(share(x) for x in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers; for example 0.7,0.6,0.5", param, ctx)


class Several(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """One value of a type, or a list or a range of them: then a tuple (docs/planning.md)."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.name = kind.name
        self.numeric = isinstance(kind, (Count, click.IntRange, click.types.FloatParamType))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        kind = self.kind.several(",") if isinstance(self.kind, Known) else self.kind
        found: list[CompletionItem] = kind.shell_complete(ctx, param, incomplete)
        return found

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or not ("," in value or (self.numeric and ":" in value)):
            return self.kind.convert(value, param, ctx)
        from specsim.errors import InputError

        try:
            return self._listed(value, param, ctx)
        except InputError as error:
            self.fail(as_click_tells(error), param, ctx)

    def _listed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        from specsim.ranges import numbers, whole_numbers, words

        flag = param.opts[0] if param is not None else ""
        many = numbers if isinstance(self.kind, click.types.FloatParamType) else whole_numbers
        found: list[Any] = []
        for word in words(value, flag):
            listed = many(word, flag) if self.numeric and ":" in word else (word,)
            found += [self.kind.convert(one, param, ctx) for one in listed]
        return tuple(dict.fromkeys(found))


class Listed(click.types.StringParamType):
    """The text of a list or a range, whose values are checked with those of all other options of the line. read: what reads it
    later."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from specsim.errors import InputError

        text = super().convert(value, param, ctx)
        try:
            self.read(text)
        except InputError as error:
            self.fail(as_click_tells(error), param, ctx)
        return text


class DpAttention(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Attention groups: a number, or "on" for one a rank."""

    name = "groups"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | bool:
        if isinstance(value, int):
            return value
        if str(value) == "on":
            return True
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor 'on'", param, ctx)


class Known(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A name from a list or, with `files`, a path: both are completed by a shell. Whoever loads it checks it.

    `separator`: several may be given, each completed by itself.
    """

    name = "name"

    def __init__(self, listed: Callable[[], Iterable[str]], files: bool = False, separator: str = "") -> None:
        self.listed, self.files, self.separator = listed, files, separator

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, mark, word = incomplete.rpartition(self.separator) if self.separator else ("", "", incomplete)
        found = [name for name in self.listed() if name.lower().startswith(word.lower())]
        if not found and self.files:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(before + mark + name) for name in found]

    def several(self, separator: str) -> Known:
        """The same for an option that takes a list of them."""
        return Known(self.listed, self.files, separator)


MODEL, HARDWARE = Known(known.models, files=True), Known(known.hardware, files=True)
FILE = InFile()


class ScenarioOption(click.Option):
    """An option of a scenario: a file of defaults gives them to all commands at once."""

    of_scenario = True


def option(*flags: str, **settings: Any) -> Callable[[F], F]:
    return click.option(*flags, cls=ScenarioOption, **settings)


COUNT, TOKENS = Count("4"), Count("2048", "8k")
OPTIONS = [
    option("--model", type=MODEL, metavar="NAME|DIR|FILE", help="Target: a preset (specsim models list) or a config.json; default Kimi-K2.5."),
    option("--draft", type=MODEL, metavar="NAME|DIR|FILE", help="Draft model; default the target's public draft."),
    option("--hardware", type=HARDWARE, metavar="NAME|FILE", help="Hardware profile (specsim hardware list); default 8x-pcie-field."),
    option("--engine", type=Known(lambda: known.ENGINES), metavar="sglang|vllm", help="Serving engine; default sglang."),
    option("--tp", type=COUNT, metavar="RANKS", help="Tensor-parallel ranks; default the box's GPUs."),
    option("--ep", type=COUNT, metavar="GROUPS", help="Expert-parallel groups; default 1."),
    option("--dp-attention", type=DpAttention(), metavar="GROUPS|on", help="Groups of data-parallel attention; on: one a rank; default 1."),
    option("--batch", type=COUNT, metavar="SEQUENCES", help="Sequences decoded together; default 1."),
    option("--context", type=TOKENS, metavar="TOKENS", help="Cached tokens of each sequence; default 2048 (8k is 8 x 1024)."),
    option("--method", type=Known(lambda: known.METHODS), metavar="METHOD", help="eagle3, eagle, mtp, draft-model, dflash, dspark, ngram or none; default the draft's own."),
    option("--draft-tokens", type=COUNT, metavar="ROWS", help="Rows a sequence verifies each cycle, root included; default 3."),
    option("--num-steps", type=COUNT, metavar="STEPS", help="Depth of drafting; default draft tokens - 1, a chain."),
    option("--topk", type=COUNT, metavar="BRANCHES", help="Branching of drafting; default 1, a chain."),
    option("--accept-rate", type=Rate(), metavar="A", help="Probability that a drafted token is accepted, as 0.6 or 60%; no default."),
    option("--accept-length", type=Number(), metavar="L", help="Mean tokens a cycle, the bonus token included; no default."),
    option("--accept-per-position", type=Rates(), metavar="A1,A2,...", help="Conditional accept rates by position, as 0.7,0.6 or 70%,60%; no default."),
    option("--accept-profile", type=Known(known.acceptances), metavar="NAME", help="A published drafter on a domain, such as kimi-k2.5-eagle3/gsm8k; no default."),
    option("--routing", type=Known(lambda: known.ROUTINGS, files=True), metavar="uniform|zipf:S|FILE", help="Expert popularity; default uniform."),
    option("--eager", type=Known(lambda: known.PHASES), multiple=True, metavar="PHASE", help="Run decode, draft, verify or extend without CUDA graph; repeatable."),
    option("--sglang-args", metavar="LINE", help="Read all of this from an SGLang launch line; options beside it win."),
    option("--vllm-args", metavar="LINE", help="Read all of this from a vLLM launch line; options beside it win."),
]  # fmt: skip


def names() -> list[str]:
    """Names of all scenario options."""
    made = scenario_options(lambda: None)
    return [str(option.name) for option in made.__click_params__]  # type: ignore[attr-defined]


def scenario_options(command: F) -> F:
    """Add every scenario option to a command."""
    for add in reversed(OPTIONS):
        command = add(command)
    return command


def says(**helps: str) -> Callable[[F], F]:
    """Other help for some scenario options of a command, where they mean something else; "": they play no part, and are
    not shown."""

    def change(command: F) -> F:
        for option in command.__click_params__:  # type: ignore[attr-defined]
            if isinstance(option, ScenarioOption) and option.name in helps:
                option.help, option.hidden = helps[option.name], not helps[option.name]
        return command

    return change


def without_defaults(options: dict[str, Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The options without those of a scenario that a file of defaults gave and that are not wanted."""
    context = click.get_current_context(silent=True)
    defaults = (context.obj or {}).get("defaults") if context else None
    if context is None or defaults is None:
        return options
    dropped = {
        str(param.name): () if param.multiple else None
        for param in context.command.params
        if isinstance(param, ScenarioOption)
        and context.get_parameter_source(str(param.name)) is click.core.ParameterSource.DEFAULT_MAP
        and not wanted(str(param.name))
    }
    context.obj["defaults"] = defaults.without(known.flag_of(name) for name in dropped)
    return {**options, **dropped}


def scenario_of(values: dict[str, Any]) -> Scenario:
    """As `specsim.asked.scenario_of`, which loads the model when it is called: --help needs none of it."""
    from specsim import asked

    return asked.scenario_of(values)


def options_of(values: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """As `specsim.asked.options_of`."""
    from specsim import asked

    return asked.options_of(values)
