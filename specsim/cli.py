"""The command line: a table of commands, each loaded only when it is called, and one place that prints errors."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from specsim.commands.common import Context, Group, all_wrong, usage

# name -> one line of help. Each lives in specsim/commands/<name>.py as `command`, imported only when it runs.
COMMANDS = {
    "predict": "Decode, verify and cycle time, and the acceptance that breaks even.",
    "calibrate": "Measure this box and write its hardware profile.",
    "doctor": "Check this box's health in seconds, measuring nothing more.",
    "validate": "Set predictions beside a live server, or replay records.",
    "fit": "Fit the engine terms to recorded runs.",
    "observe": "Read logs, metrics, traces and benchmark files into records.",
    "diagnose": "Why is verify slow: weighs the causes, names the test that tells them apart.",
    "sweep": "Best draft length, break-even maps, Pareto front over many configurations.",
    "plan": "GPUs for a load, when to switch speculation off, what a drafter must reach.",
    "simulate": "Requests under load: TTFT, TPOT, throughput, queue.",
    "report": "One HTML file with charts, tables and sources, from any result.",
    "serve": "The planner page: sliders for a scenario, its prediction beside them.",
    "hardware": "List, show, compare and import hardware profiles.",
    "models": "List and show models as specsim reads them.",
    "completion": "Completion of commands, options and names, for bash, zsh or fish.",
}


COMPLETING = "_SPECSIM_COMPLETE"  # set by a shell that asks for completions


class _LazyGroup(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"specsim.commands.{name}").command
        command.context_class = Context
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands and options, without loading the commands."""
        found = [CompletionItem(name, help=said) for name, said in COMMANDS.items() if name.startswith(incomplete)]
        return found or click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="specsim")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option(
    "--config",
    metavar="FILE",
    help="Defaults of options; default $SPECSIM_CONFIG, else the nearest specsim.yaml from here up to the repository's root.",
)
@click.option("--no-config", is_flag=True, help="Read no file of defaults.")
@click.pass_context
def group(context: click.Context, debug: bool, config: str | None, no_config: bool) -> None:
    """A performance model and simulator for speculative decoding.

    \b
    Example:  specsim predict --draft-tokens 3 --accept-rate 0.6
    """
    run = context.ensure_object(dict)
    if no_config or {"-h", "--help"} & set(run.get("line", ())):
        return
    from pathlib import Path

    from specsim import team

    path = Path(config) if config is not None else team.find()
    name = context.invoked_subcommand
    command = name and group.get_command(context, name)
    if path is not None and name and command:
        from specsim.commands.scenario import names

        run["defaults"] = team.read(path, name, command, run.get("line", ()), commands=COMMANDS, scenario=names())
        context.default_map = {name: run["defaults"].values}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 the work could not be done, 2 bad input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_streams()
    debug = "--debug" in arguments
    if debug:  # accepted anywhere on the line
        arguments = [a for a in arguments if a != "--debug"]
    arguments = arguments or ["--help"]
    run: dict[str, Any] = {"debug": debug, "line": arguments}
    try:
        code = group.main(arguments, prog_name="specsim", standalone_mode=False, obj=run)
        sys.stdout.flush()  # a full disk or a closed pipe shows here, not when the interpreter ends
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        _fail(error, "\nerror: ".join(dict.fromkeys(usage(one) for one in all_wrong(error))), 2, debug)
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except BrokenPipeError:  # the reader closed early (| head): not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if COMPLETING in os.environ:  # a half-typed line may be wrong in any way
            sys.exit(1)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO):
            _fail(error, f"the output cannot be written: {error.strerror}", 1, debug)
        from specsim.errors import InputError, SpecsimError

        if isinstance(error, InputError):
            explain = run["defaults"].explain if "defaults" in run else str
            told = [explain(one) for one in getattr(error, "errors", (error,))]
            _fail(error, "\nerror: ".join(told), error.exit_code, debug)
        if isinstance(error, SpecsimError):
            _fail(error, str(error), error.exit_code, debug)
        _fail(
            error,
            f"unexpected {type(error).__name__}: {error} (this is a bug; run again with --debug and report it)",
            1,
            debug,
        )


def _prepare_streams() -> None:
    """A locale without our characters shows their codes, and output that is closed is said once, not a bug."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    if sys.stdout is None:
        _fail(OSError(), "standard output is closed", 1, debug=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _fail(error: BaseException, message: str, code: int, debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exception(error)
    sys.stderr.write(f"error: {message}\n")
    sys.exit(code)
