"""`specsim validate`: measure a live server, start one to measure, or set predictions beside records."""

from __future__ import annotations

import fnmatch
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import (
    InFile,
    Meter,
    Name,
    OneOf,
    OutFolder,
    Percent,
    draw,
    json_option,
    note,
    on_the_line,
    plot_option,
    print_json,
    print_result,
    show,
)
from specsim.errors import InputError
from specsim.names import flag_of

if TYPE_CHECKING:
    from specsim.load import Load
    from specsim.measure import Plan
    from specsim.setups import Setup


class Numbers(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Positive numbers with commas between them."""

    def __init__(self, name: str, kind: Callable[[str], float], most: int, such: str) -> None:
        self.name, self.kind, self.most, self.such = name, kind, most, such

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        if isinstance(value, list):
            return value
        try:
            numbers = [self.kind(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list such as {self.such}", param, ctx)
        if not all(0 < n <= self.most for n in numbers):
            self.fail(f"{value!r} holds a number that is not above 0 and up to {self.most:,}", param, ctx)
        return numbers


COUNTS = Numbers("N,N,...", int, 2**20, "1,2,4")
RATES = Numbers("R,R,...", float, 100_000, "2,8,12")
MEASURING, STARTING = ("url", "launch", "scenarios"), ("launch", "scenarios")
# option -> the ways to run that it is for; the others are for all
MODES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("output", "batch", "context", "duration", "quick", "time_limit", "request_timeout"), MEASURING),
    **dict.fromkeys(("rate", "num_requests", "input_tokens", "output_tokens", "seed"), MEASURING),
    **dict.fromkeys(("max_running", "layers", "port", "start_timeout"), STARTING),
    **dict.fromkeys(("only", "resume"), ("scenarios",)),
    **dict.fromkeys(("server_command", "allow_multicast"), STARTING),
    **dict.fromkeys(("tp", "method", "num_steps", "topk", "draft_tokens", "accept_length"), ("launch",)),
    **dict.fromkeys(("eager", "profile", "sglang_args"), ("launch",)),
    "name": ("url", "launch"),
    "model": ("url", "launch", "records"),
    "draft": ("launch", "records"),
    **dict.fromkeys(("server_log", "vllm_args"), ("url",)),
    **dict.fromkeys(("plot", "fail_over"), ("records",)),
}
PATH = InFile()


@click.command()
@click.option("--url", metavar="URL", help="Measure the SGLang or vLLM server at this address.")
@click.option("--launch", is_flag=True, help="Start SGLang with dummy weights, measure it, stop it.")
@click.option("--scenarios", type=PATH, metavar="FILE", help="Launch and measure each scenario of this YAML file.")
@click.option(
    "--records",
    type=PATH,
    metavar="DIR|FILE",
    help="Replay: predicted against observed for the records in this folder (or one file).",
)
@click.option(
    "-o",
    "--output",
    type=OutFolder(),
    default=Path("runs"),
    metavar="DIR",
    help="Folder for records and logs; default runs.",
)
@click.option("--batch", type=COUNTS, help="Batch sizes; default 1,4,16,32.")
@click.option("--context", type=COUNTS, help="Prompt lengths in tokens; default 1024.")
@click.option("--rate", type=RATES, help="Under load: Poisson requests a second, one run for each.")
@click.option(
    "--num-requests",
    type=COUNTS,
    metavar="N,N,...",
    help="Requests of a load run, one number or one a rate; default 400.",
)
@click.option(
    "--input-tokens", type=click.IntRange(1, 2**20), metavar="TOKENS", help="Prompt tokens under load; default 1024."
)
@click.option(
    "--output-tokens", type=click.IntRange(2, 2**20), metavar="TOKENS", help="Generated tokens under load; default 256."
)
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Seed of the arrivals, as in simulate; default 0.")
@click.option(
    "--max-running",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Requests a launched server runs at once under load.",
)
@click.option(
    "--duration",
    type=click.FloatRange(1, 3600),
    metavar="SECONDS",
    help="Seconds to repeat at one point, at most; default 25.",
)
@click.option("--quick", is_flag=True, help="Shorter lengths, two repetitions: about 6 s a point.")
@click.option(
    "--time-limit",
    type=click.FloatRange(1),
    metavar="SECONDS",
    help="Seconds for everything; starts no scenario that cannot finish.",
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="Of --scenarios, those that match; may hold * and be given again."
)
@click.option("--resume", is_flag=True, help="Of --scenarios, leave out what records in the output folder hold.")
@click.option("--name", type=Name(), help="Name of the record.")
@click.option(
    "--model",
    type=PATH,
    metavar="DIR|FILE",
    help="Target: folder with config.json, or that file; of records, where they lack it.",
)
@click.option(
    "--draft", type=PATH, metavar="DIR|FILE", help="Drafter: folder with config.json, or that file; of records too."
)
@click.option(
    "--layers", type=click.IntRange(1, 1024), metavar="N", help="Launch the target with so many of its layers."
)
@click.option(
    "--tp", type=click.IntRange(1, 1024), default=1, metavar="RANKS", help="Tensor-parallel ranks; default 1."
)
@click.option(
    "--method",
    type=OneOf(["none", "eagle3", "eagle", "mtp", "draft-model", "ngram"]),
    default="none",
    metavar="METHOD",
    help="Drafting of the launched server: none, eagle3, eagle, mtp, draft-model or ngram; default none.",
)
@click.option(
    "--num-steps", type=click.IntRange(1, 64), metavar="STEPS", help="Draft steps, as SGLang's --speculative-num-steps."
)
@click.option(
    "--topk", type=click.IntRange(1, 64), default=1, metavar="BRANCHES", help="Branches a draft step; default 1."
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(2, 512),
    metavar="ROWS",
    help="Rows a verify, root included; default steps + 1.",
)
@click.option(
    "--accept-length", type=click.FloatRange(1, 64), metavar="L", help="Accept length to simulate; default 2."
)
@click.option("--eager", is_flag=True, help="Without CUDA graphs.")
@click.option("--profile", is_flag=True, help="Also save a kernel table of the first point.")
@click.option("--sglang-args", default="", metavar="LINE", help="Further flags for the server, in one string.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Port of the launched server; default a free one.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(1),
    default=600.0,
    metavar="SECONDS",
    help="Seconds to get healthy; default 600.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(0.1),
    default=300.0,
    metavar="SECONDS",
    help="Seconds for a batch; default 300.",
)
@click.option("--server-log", type=PATH, metavar="FILE", help="Log file of the server at --url, to compare with.")
@click.option(
    "--vllm-args", default="", metavar="LINE", help="Flags of the vLLM server at --url, which does not say them itself."
)
@click.option(
    "--server-command",
    default=f"{sys.executable} -m sglang.launch_server",
    metavar="COMMAND",
    help="What starts the server; default this Python with -m sglang.launch_server.",
)
@click.option(
    "--allow-multicast", is_flag=True, help="Allow NVLink multicast flags: can disturb other users of the host."
)
@click.option("--hardware", metavar="NAME|FILE", help="Profile of the box: to predict with, or to name in the record.")
@plot_option("of a replay predicted against observed, and residuals")
@click.option(
    "--fail-over",
    type=Percent(),
    help="Replay: exit code 1 when the median error of decode, verify, cycle, tokens a second, break-even or a figure under load is above this.",
)
@json_option
def command(**options: Any) -> int:
    """Set predictions beside a live server, or replay records.

    Measures decode or cycle time by regression over several answer lengths, the phases by the engine's timers, and
    compares them with the engine's log; each point is saved as soon as it is measured. An API key is read from
    SPECSIM_API_KEY or OPENAI_API_KEY.

    \b
    Examples:
      specsim validate --url http://127.0.0.1:30000 --batch 1,4,16 \\
        --context 1024,8192 -o runs
      specsim validate --launch --model DIR --draft DIR --method eagle3 \\
        --num-steps 3 --tp 2 -o runs
      specsim validate --scenarios validation/scenarios-1gpu.yaml \\
        --time-limit 1500 -o runs
      specsim validate --url http://127.0.0.1:30000 --rate 2,8,12 \\
        --num-requests 400 --input-tokens 1024 -o runs
      specsim validate --records runs --hardware 1x-h200 --plot runs.png \\
        --fail-over 10%
    """
    modes = [flag for flag in ("url", "launch", "scenarios", "records") if options[flag]]
    if modes == ["launch", "scenarios"]:
        modes = ["scenarios"]
    if len(modes) != 1:
        raise InputError(
            "give one of --url, --launch, --scenarios and --records",
            where="validate",
            mend="--records DIR replays offline; `specsim validate --help` shows examples",
        )
    _refuse_others(modes[0])
    _refuse_idle(options)
    if modes == ["records"]:
        return _replay(options)
    return _measure(modes[0], options)


def _refuse_others(mode: str) -> None:
    """Raise InputError for an option on the line that says nothing with this way to run."""
    for option in on_the_line():
        ways = MODES.get(option.name or "", (mode,))
        if mode not in ways:
            meant = " or ".join(f"--{way}" for way in ways)
            raise InputError(f"says nothing with --{mode}", where=option.opts[-1], mend=f"it is for {meant}")


def _refuse_idle(options: dict[str, Any]) -> None:
    """Raise InputError for an option on the line that says nothing with another, or without it."""
    method, given = options["method"], {str(option.name) for option in on_the_line()}
    if method == "none":
        for name in ("accept_length", "topk"):
            if name in given:
                raise InputError("is about speculation", where=flag_of(name), mend="give --method too, or leave it out")
    if method == "ngram":
        for name in ("draft", "num_steps", "topk"):
            if name in given:
                raise InputError("says nothing with --method ngram", where=flag_of(name), mend="leave it out")
    points = options["rate"] is None or options["scenarios"] or given & {"batch", "context"}
    for name in ("duration", "quick", "profile"):
        if name in given and not points:
            mend = "give --batch or --context too, or leave it out"
            raise InputError("is about points, and --rate alone measures none", where=flag_of(name), mend=mend)


def _words(options: dict[str, Any], option: str) -> list[str]:
    """The words of a command line that an option holds."""
    try:
        return shlex.split(options[option])
    except ValueError as error:
        where = f"--{option.replace('_', '-')}"
        raise InputError(f"cannot be split: {str(error).lower()}", where=where, mend="balance the quotes") from None


def _measure(mode: str, options: dict[str, Any]) -> int:
    """Measure, and say what was saved and what failed: exit code 1 where something did."""
    from specsim.measure import QUICK, Plan

    if not _words(options, "server_command"):
        raise InputError("names no program", where="--server-command", mend="give one, or leave it out")
    plan = QUICK if options["quick"] else Plan()
    if options["duration"]:
        plan = replace(plan, point_s=options["duration"], max_repeats=1000)
    deadline = time.monotonic() + options["time_limit"] if options["time_limit"] else float("inf")
    for number in (signal.SIGTERM, signal.SIGHUP):  # a lost terminal too, unless nohup has it ignored
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupted)
    if mode == "url":
        paths, failures = _measure_running(options, plan, deadline)
    else:
        paths, failures = _measure_launched(_scenarios(mode, options), options, plan, deadline)
    if options["as_json"]:
        print_json({"schema": "specsim.runs/1", "records": [str(p) for p in paths], "failures": failures})
    else:
        for path in paths:
            click.echo(f"saved {path}")
    if mode != "launch":  # whose one scenario has said it
        for failure in failures:
            note(f"failed: {failure}")
    if paths:
        box = "" if options["hardware"] else " --hardware NAME"
        note(f"predictions beside it: specsim validate --records {shlex.quote(str(options['output']))}{box}")
    return 1 if failures else 0


def _measure_running(options: dict[str, Any], plan: Plan, deadline: float) -> tuple[list[Path], list[str]]:
    """The record of the server at --url, and a line where not all could be measured."""
    from specsim.validation import check_folder, run_url

    load = _load(options)
    pairs = [(b, c) for c in options["context"] or [1024] for b in options["batch"] or [1, 4, 16, 32]]
    pairs = list(dict.fromkeys(pairs))
    if load is not None and not (options["batch"] or options["context"]):
        pairs = []
    check_folder(options["output"])
    path, failed = run_url(
        options["url"],
        pairs,
        options["output"],
        plan,
        note,
        name=options["name"],
        model=options["model"],
        log=options["server_log"],
        flags=_words(options, "vllm_args"),
        hardware=options["hardware"],
        load=load,
        deadline=deadline,
        request_timeout=options["request_timeout"],
    )
    return [path], [f"{failed} of the points or load runs could not be measured as asked"] if failed else []


def _measure_launched(
    scenarios: list[Setup], options: dict[str, Any], plan: Plan, deadline: float
) -> tuple[list[Path], list[str]]:
    """The records of servers that are started one after another, and a line for each failure."""
    from specsim.validation import check, run_list, run_setup

    check(scenarios, options["output"], multicast=options["allow_multicast"])

    def run(setup: Setup) -> tuple[Path, int]:
        return run_setup(
            setup,
            options["output"],
            plan,
            note,
            port=options["port"],
            start_timeout=options["start_timeout"],
            request_timeout=options["request_timeout"],
            deadline=deadline,
            multicast=options["allow_multicast"],
            command=_words(options, "server_command"),
        )

    return run_list(scenarios, run, note, deadline, plan)


def _scenarios(mode: str, options: dict[str, Any]) -> list[Setup]:
    """What to start: the one scenario of --launch, or those of the file that --only and --resume leave, with what the line gives."""
    from specsim.setups import load_setups
    from specsim.validation import left_to_measure

    changes = {field: options[field] for field in ("layers", "hardware") if options[field]}
    if mode == "launch":
        return [_setup(options).model_copy(update=changes)]
    scenarios = load_setups(options["scenarios"])
    if options["only"]:
        chosen = [s for s in scenarios if any(fnmatch.fnmatchcase(s.name, pattern) for pattern in options["only"])]
        if not chosen:
            mend = f"known: {', '.join(s.name for s in scenarios)}"
            raise InputError(f"no scenario matches {', '.join(options['only'])}", where="--only", mend=mend)
        scenarios = chosen
    for key, field in (("batch", "batches"), ("context", "contexts")):
        changes |= {field: options[key], "points": None} if options[key] else {}
    load = _load(options)
    changes |= {} if load is None else {"load": load}
    scenarios = [s.model_copy(update=changes) for s in scenarios]
    if options["resume"]:
        scenarios, whole = left_to_measure(scenarios, options["output"])
        note(f"left out, since they are measured in {options['output']}: {', '.join(whole) or 'none'}")
    return scenarios


def _setup(options: dict[str, Any]) -> Setup:
    from specsim.setups import make_setup

    if options["model"] is None:
        raise InputError(
            "--launch needs --model", where="validate", mend="give --model DIR, a folder with a config.json"
        )
    keys = ("model", "draft", "tp", "method", "num_steps", "topk", "draft_tokens", "accept_length", "eager", "profile")
    values = {key: options[key] for key in keys if options[key] is not None}
    values["flags"] = _words(options, "sglang_args")
    values |= {field: options[key] for key, field in (("batch", "batches"), ("context", "contexts")) if options[key]}
    values |= {"load": load} if (load := _load(options)) is not None else {}
    model: Path = options["model"]
    stem = model.resolve().name if model.is_dir() else model.stem
    tail = options["method"] + (f"-s{options['num_steps']}" if options["num_steps"] else "")
    values["name"] = options["name"] or f"{stem}-tp{options['tp']}-{tail}"
    return make_setup(values, "validate")


def _load(options: dict[str, Any]) -> Load | None:
    """The load that the options ask for, or None."""
    from specsim.load import Load

    keys = ("num_requests", "input_tokens", "output_tokens", "seed", "max_running")
    given = {key: options[key] for key in keys if options[key] is not None}
    if options["rate"] is None:
        if given:
            option = "--" + next(iter(given)).replace("_", "-")
            raise InputError("is about a load", where=option, mend="give --rate R,R,... too, or leave it out")
        return None
    if len(given.get("num_requests", [])) == 1:
        given["num_requests"] = given["num_requests"][0]
    load = Load(rates=options["rate"], **given)
    try:
        load.runs()
    except ValueError as error:
        raise InputError(str(error), where="--num-requests", mend="give one number, or one for each rate") from None
    return load


def _interrupted(number: int, frame: Any) -> None:
    raise KeyboardInterrupt  # so that a launched server is stopped on the way out


def _replay(options: dict[str, Any]) -> int:
    from specsim import replay

    with Meter("validate"):
        result = replay.run(options["records"], options["hardware"], model=options["model"], draft=options["draft"])
    for line in result.skipped:
        note(f"left out: {line}")
    if options["plot"] is not None:
        draw(result.json(), options["plot"])
    if options["as_json"]:
        print_result(result.json())
    else:
        show(result.page())
    over = result.over(options["fail_over"])
    for line in over:
        note(line)
    if options["fail_over"] is not None and not over:
        note(f"no phase that is judged has a median error over {options['fail_over']:.1%}")
    return 1 if over else 0
