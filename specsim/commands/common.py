"""What commands share: JSON output, tables and messages for people."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from specsim.pages import Page

SOURCE = "RESULT.json"  # the metavar of an option that takes a document
F = TypeVar("F", bound=Callable[..., Any])
ELSEWHERE = ("--plot", "--jobs", "--cluster")  # options that change nothing in a document
REDRAWN_S, SAID_S = 0.1, 5.0  # how often progress is shown on a terminal, and elsewhere

ASKED_JSON = f"{__name__}.json"
JSON_HELP = "Print one JSON document on standard output."
json_option = click.option("--json", "as_json", is_flag=True, help=JSON_HELP)


class Share(click.types.FloatParamType):
    """A rate or another share, as 0.6 or 60%."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from specsim.ranges import share

        try:
            return share(value) if isinstance(value, str) else float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number; for example 0.6 or 60%", param, ctx)


class Percent(Share):
    """A share that a limit is; a whole number without the sign would be one of hundreds of per cent, which nobody means."""

    name = "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not 0 <= number < (10 if str(value).strip().endswith("%") else 1):
            meant = number if 1 <= number < 1000 and "%" not in str(value) else 10
            self.fail(f"{value!r} is out of range; write {meant:g}% or {meant / 100:g}", param, ctx)
        return number


prefix_option = click.option(
    "--prefix-rate",
    type=Share(),
    default=0.0,
    metavar="F",
    help="Share of each prompt in the prefix cache, 0 to 1; default 0.",
)
range_option = click.option(
    "--range-ratio", type=Share(), metavar="F", help="Draw lengths from F x tokens to tokens; default 1, all alike."
)


class Name(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A name that is also a file's."""

    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
            self.fail(f"{text!r} cannot be a file's name; write letters, digits, . _ -", param, ctx)
        return text


class OneOf(click.Choice):  # type: ignore[type-arg,unused-ignore]
    """One of a few words; another is answered with the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.choices:
            from specsim.errors import did_you_mean

            self.fail(f"{value!r}: {did_you_mean(str(value), list(self.choices))}", param, ctx)
        return value


class Help(click.HelpFormatter):
    """Help whose lines are broken at blanks alone: a name with hyphens stays whole."""

    WHOLE = "\u2011"  # a hyphen that does not break, while lines are made

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", self.WHOLE))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(name, said.replace("-", self.WHOLE)) for name, said in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(self.WHOLE, "-")


class Context(click.Context):
    formatter_class = Help


class Group(click.Group):
    """A group whose unknown commands are answered with the nearest known one, and none with those there are, or by the `usual` one.
    --json before a command is that command's."""

    context_class = Context

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.context_class = Context
        return command

    def __init__(self, *args: Any, usual: str | None = None, **settings: Any) -> None:
        super().__init__(*args, **{"no_args_is_help": False, **settings})
        self.usual = usual
        self.params.append(
            click.Option(["--json"], is_flag=True, expose_value=False, callback=_ask_json, help=JSON_HELP)
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.usual and not ctx.resilient_parsing and all(word.startswith("-") for word in args):
            args = [*args, self.usual]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            from specsim.errors import InputError, did_you_mean

            mend = did_you_mean(args[0], known)
            if "show" in known and not mend.startswith("did you mean"):  # a model or a profile, as `show` takes it
                mend = f"`{ctx.command_path} show {args[0][:80]}` shows one; {mend}"
            raise InputError(f"no command {args[0][:80]!r}", where=ctx.command_path, mend=mend)
        name, command, rest = super().resolve_command(ctx, args)
        asked = ctx.meta.get(ASKED_JSON) and not isinstance(command, click.Group)
        return name, command, ["--json", *rest] if asked else rest


def _ask_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[ASKED_JSON] = True  # also of the contexts below


def usage(error: click.ClickException) -> str:
    """What click says about a wrong line, in one line that says what is wrong, where, and the mend."""
    said = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter) and error.param:
        flags = [flag for flag in error.param.opts if flag.startswith("--")]
        where = flags[0] if flags else error.param.human_readable_name
        return f"{where}: {_in_words(' '.join(error.message.split()).rstrip('.'), error.param.type)}"
    context = getattr(error, "ctx", None)
    if context is not None and isinstance(error, click.NoSuchOption):
        return f"{context.command_path}: no option {error.option_name!r}; {_nearest_option(context, error.option_name)}"
    extra = re.match(r"Got unexpected extra arguments? \((\S+?)[\s)]", said)
    if context is not None and (word := extra[1] if extra else _stray(context, error)):
        return f"{context.command_path}: {word!r} stands alone; {_as_option(context.command, word)}"
    if context is None:
        return f"{said}; --help lists the options"
    if isinstance(context.command, click.Group) and said == "Missing command":
        return f"{context.command_path}: no command; one of {', '.join(context.command.list_commands(context))}"
    mend = "" if "Did you mean" in said else f"; {context.command_path} --help lists the options"
    return f"{context.command_path}: {said[:1].lower()}{said[1:].replace('. (Did', ' (Did')}{mend}"


def all_wrong(error: click.ClickException) -> list[click.ClickException]:
    """The error, which click raises at the first wrong word of a line, with what else is wrong with its options."""
    from specsim.errors import InputError

    context = getattr(error, "ctx", None)
    told_alone = isinstance(error, click.MissingParameter) or not isinstance(error, (click.BadParameter, click.NoSuchOption))  # fmt: skip
    if context is None or told_alone:
        return [error]
    found: list[click.ClickException] = []
    parser = context.command.make_parser(context)
    parser.ignore_unknown_options = True
    try:
        given, left, _ = parser.parse_args(_words(context))
    except click.UsageError:
        return [error]
    context.params.clear()
    for param in context.command.get_params(context):
        if param.is_eager or param.name not in given:
            continue
        try:
            param.handle_parse_result(context, given, [])
        except click.BadParameter as wrong:
            found.append(wrong)
        except InputError:  # told once click finds nothing wrong
            continue
    found += [click.NoSuchOption(word.partition("=")[0], ctx=context) for word in left if word.startswith("--")]
    return found or [error]


def _words(context: click.Context) -> list[str]:
    """The words of this run's line after the command."""
    line = list((context.find_root().obj or {}).get("line", ()))
    return line[line.index(context.info_name) + 1 :] if context.info_name in line else []


def _in_words(said: str, kind: click.ParamType) -> str:  # type: ignore[type-arg, unused-ignore]
    """What click says of a number, as this program says it."""
    kind = getattr(kind, "kind", kind)
    if wrong := re.fullmatch(r"(.+) is not a valid (float|integer)(?: range)?", said):
        what, example = ("number", "0.5") if wrong[2] == "float" else ("whole number", "4")
        said, inside = f"{wrong[1]} is not a {what}", f"for example {example}"
    elif outside := re.fullmatch(r"(.+) is not in the range .+", said):
        said, inside = f"{outside[1]} is out of range", ""
    else:
        return said
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    if least is not None:
        inside = f"give {least:,} or more" if most is None else f"give {least:,} to {most:,}"
    return f"{said}; {inside}"


def _nearest_option(context: click.Context, name: str) -> str:
    """The mend for an option that a command has not: the nearest one that it has."""
    import difflib

    known = [flag for option in context.command.params for flag in option.opts if flag.startswith("--")]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"{context.command_path} --help lists the options"


def _stray(context: click.Context, error: click.ClickException) -> str:
    """A word that no option takes, of a line that lacks an option: click tells the lack first, and the word is its cause."""
    takes_words = any(isinstance(param, click.Argument) for param in context.command.params)
    if takes_words or not isinstance(error, click.MissingParameter):
        return ""
    _, left, _ = context.command.make_parser(context).parse_args(_words(context))
    return left[0] if left else ""


def _as_option(command: click.Command, word: str) -> str:
    """The mend for a word that belongs to an option: the option whose names it is one of, or that takes such files."""
    for option in command.params:
        names = [name.lower() for name in getattr(option.type, "listed", list)()]
        if word.lower() in names or (word.endswith(".json") and option.metavar == SOURCE):
            return f"write {option.opts[0]} {word}"
    return "--help lists the options that take a value"


def on_the_line() -> list[click.Parameter]:
    """The options of this run that its line gives, not a file of defaults."""
    context = click.get_current_context()
    line = click.core.ParameterSource.COMMANDLINE
    return [p for p in context.command.params if context.get_parameter_source(p.name or "") is line]


class InFile(click.Path):
    """A file, or a folder of them, to read. Whoever reads it tells what is wrong with it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not str(value):
            self.fail("is empty; give a path, or leave it out", param, ctx)
        return Path(value)


class OutFolder(InFile):
    """A folder to write into, which is made where it is not there."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        for part in (path, *path.parents):
            if part.exists() and not part.is_dir():
                self.fail(f"{str(part)!r} is a file; name a folder", param, ctx)
        return path


class OutFile(click.Path):
    """A file to write: that its folder is not there, that it is a folder, or that another option writes it too, is told before
    any work is done."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from specsim.files import no_folder

        path = Path(value)
        if str(path) == "-":
            self.fail("'-' is no file; name one, or /dev/stdout", param, ctx)
        if why := no_folder(path):
            self.fail(why, param, ctx)
        if path.is_dir():
            self.fail(f"{str(path)!r} is a folder; name a file", param, ctx)
        for other in ctx.command.params if ctx else ():
            given = ctx.params.get(other.name or "") if ctx else None
            if isinstance(other.type, OutFile) and given and Path(given).absolute() == path.absolute():
                self.fail(f"{str(path)!r} is written by {other.opts[-1]} too; name another", param, ctx)
        return path


def as_click_tells(error: Any) -> str:
    """What an InputError says, without the place: click names the option itself, and tells it with all else of the line."""
    return "; ".join(filter(None, (error.what, error.mend)))


class PlotFile(OutFile):
    """A file for a picture; so is a suffix that no picture has."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from specsim.errors import InputError
        from specsim.plot_style import check

        try:
            check(Path(value))
        except InputError as error:
            self.fail(as_click_tells(error), param, ctx)
        return super().convert(value, param, ctx)


def plot_option(what: str) -> Callable[[F], F]:
    """--plot FILE, for a command that draws `what`."""
    return click.option("--plot", type=PlotFile(), metavar="FILE", help=f"Draw {what} (PNG, SVG or PDF).")


def draw(document: dict[str, Any], path: Path | None, **more: Any) -> None:
    """Draw a document where a picture was asked for, and say so."""
    if path is None:
        return
    from specsim.plots import plot

    plot(document, path, **more)
    note(f"wrote {path}")


def print_json(document: Any) -> None:
    """Print one JSON document; NaN and infinity are a bug, so they raise. Its warnings name the file that defaults came
    from."""
    said = defaults_note()
    if said and isinstance(document, dict) and isinstance(document.get("warnings"), list):
        document = {**document, "warnings": [*document["warnings"], said]}
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def defaults_note() -> str:
    """Which options of this run came from a file of defaults; empty when none did."""
    context = click.get_current_context(silent=True)
    found = (context.obj or {}).get("defaults") if context else None
    return str(found.note()) if found else ""


def print_result(document: dict[str, Any]) -> None:
    """Print the document of a result, with the command that makes it again."""
    print_json({"schema": document["schema"], "command": command_line(), **document})


def command_line() -> str:
    """The line that runs here, without what only says where it runs and where its output goes, and with what a file of
    defaults gave it; keys and tokens are redacted."""
    from specsim.redaction import scrub, without_secrets

    run = click.get_current_context().find_root().obj or {}
    words: list[str] = []
    given = iter(run.get("line", sys.argv[1:]))
    for word in given:
        if word in ELSEWHERE:
            next(given, None)
        elif word != "--json" and word.partition("=")[0] not in ELSEWHERE:
            words.append(without_secrets(word) if " " in word else word)
    if "defaults" in run and run["defaults"].keys:
        words = ["--no-config", *words, *run["defaults"].words()]
    return shlex.join(["specsim", *scrub(words)])


def note(message: str) -> None:
    """A warning or progress line on standard error."""
    sys.stderr.write(f"{message}\n")


def show(page: Page) -> None:
    """Print a page: on a terminal as wide as it is, with colours unless NO_COLOR or TERM=dumb; elsewhere tables have 80
    columns, a paragraph is one line, and nothing depends on the surroundings."""
    from specsim.pages import WIDTH, Line, text

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else WIDTH
    said = defaults_note()
    page = [*page, Line(f"note: {said}", "faint")] if said else page
    sys.stdout.write(text(page, width, wrap=terminal, styled=terminal and colours()))


def colours() -> bool:
    """Whether a terminal gets colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Meter:
    """How far a long piece of work is, on standard error: a line that is written over on a terminal, else one every five
    seconds. Nothing in the first second. As a context manager it hears what runs inside (`specsim.progress`)."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.over = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.started = self.since = time.monotonic()
        self.done = 0.0
        self.last = self.started - (REDRAWN_S - 1 if self.over else 0)
        self.drawn = False

    def __enter__(self) -> Meter:
        from specsim.progress import listening

        self.within = listening(self)
        self.within.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.within.__exit__(*raised)
        self.wipe()

    def __call__(self, done: float, total: float, now: str = "", left_s: float | None = None) -> None:
        """total: 0 where it is not known. now: what runs at present. left_s: seconds to come, where they are known better
        than by proportion."""
        time_now = time.monotonic()
        if done < self.done:  # the next part of the work: its time left is its own
            self.since = time_now
        self.done = done
        if time_now - self.started < 1 or time_now - self.last < (REDRAWN_S if self.over else SAID_S):
            return
        self.last = time_now
        share = min(1.0, done / total) if total else 0.0
        how = f"{share:.0%}" if total else f"{done:,.0f} so far"
        if left_s is None and share:
            left_s = (time_now - self.since) * (1 - share) / share
        left = "" if left_s is None else f", about {_duration(left_s)} left"
        line = f"{self.what}: {how}{left}{f'; {now}' if now else ''}"
        if not self.over:
            note(line)
            return
        bar = f"[{'#' * round(20 * share):20}] "
        sys.stderr.write(f"\r\x1b[K{(bar + line)[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()
        self.drawn = True

    def note(self, text: str) -> None:
        """A line that stays, above the progress."""
        self.wipe()
        note(text)

    def wipe(self) -> None:
        """Take the line away."""
        if self.drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self.drawn = False


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
