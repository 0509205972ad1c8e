"""specsim calibrate"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import (
    InFile,
    Meter,
    Name,
    OutFile,
    OutFolder,
    json_option,
    note,
    on_the_line,
    plot_option,
    print_result,
    show,
)
from specsim.pages import Line, Page, grid

if TYPE_CHECKING:
    from specsim.calibrate import Result
    from specsim.calibration.session import Outcome, Plan, Progress
    from specsim.models import Model
    from specsim.profiles import Profile
    from specsim.records import Record


OF_A_FIT = ("refit", "output", "plot", "as_json")  # options that say something where nothing is measured


@click.command()
@click.option("--name", type=Name(), help="The profile's name, e.g. 1x-h200; default 8x-gpu and the like.")
@click.option(
    "--out",
    type=OutFolder(),
    metavar="DIR",
    help="Work folder with every finished measurement; default calibration-NAME.",
)
@click.option(
    "-o",
    "--output",
    type=OutFile(),
    metavar="FILE",
    help="The profile; default NAME.yaml in the work folder. With --refit nothing is written without it.",
)
@click.option(
    "--gpus",
    "--ranks",
    "ranks",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="How many GPUs (with --cpu: processes); default all; 2 with --cpu.",
)
@click.option(
    "--model",
    metavar="NAME|DIR|FILE",
    multiple=True,
    help="Measure this model's own shapes: a name, a folder or a config.json; repeatable, for its drafter or other models.",
)
@click.option(
    "--tp",
    type=click.IntRange(1),
    metavar="RANKS",
    help="With --model: ranks a model is cut over; default as many as are measured.",
)
@click.option(
    "--experts",
    multiple=True,
    metavar="HIDDEN,INTERMEDIATE,EXPERTS,TOPK",
    help="An expert shape of one rank, instead of a model; repeatable.",
)
@click.option("--quick", is_flag=True, help="Fewer sizes: under two minutes.")
@click.option(
    "--only",
    metavar="NAMES",
    help="Measure these alone, separated by commas: peak, launches, small, gemm, blockwise, moe, attention, copies, allreduce; default all.",
)
@click.option(
    "--kinds",
    metavar="NAMES",
    help="All-reduces to measure, separated by commas: nccl, nccl-ll, nccl-ll128, nccl-simple, nccl-ring, nccl-tree, "
    "nccl-no-p2p, custom, custom-v1, flashinfer; engines for the last three as far as they are installed, forced for nccl-*; "
    "default all that can run here.",
)
@click.option(
    "--skip", metavar="CLASSES", help="Leave these operator classes out, separated by commas, such as moe_int4."
)
@click.option(
    "--resume", is_flag=True, help="Go on in a work folder: finished measurements stay, failed ones are tried again."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(1),
    metavar="SECONDS",
    help="Seconds after which it stops and writes the profile of what is there.",
)
@click.option("--no-p2p", is_flag=True, help="Measure with NCCL_P2P_DISABLE=1, as a box without peer access would run.")
@click.option("--cpu", is_flag=True, help="Run on CPU tensors, only to try the program.")
@plot_option("each class's residuals")
@click.option(
    "--refit",
    multiple=True,
    type=InFile(),
    metavar="FILE",
    help="Measure nothing: fit a calibration's record (NAME.record.json) again, into -o; repeatable, to add later measurements of the same box.",
)
@click.option(
    "--allow-multicast",
    is_flag=True,
    help="Let NCCL create NVLink multicast objects. Harmful on hosts that others share.",
)
@click.option(
    "--nnodes",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Nodes that take part, with --out in one shared folder; default 1.",
)
@click.option("--node-rank", type=click.IntRange(0), default=0, metavar="N", help="This node's number; default 0.")
@click.option("--master", default="", metavar="HOST:PORT", help="The first node, for --nnodes above 1.")
@json_option
def command(**options: Any) -> None:
    """Measure this box with microbenchmarks and write its hardware profile.

    No inference engine is needed; SGLang's own kernels are measured too when it is importable. Every finished measurement is
    on disk at once: after an interruption, run the same line with --resume.

    \b
    Examples:
      specsim calibrate --name 8x-h200
      specsim calibrate --model Kimi-K2.5 --tp 8 --name my-box -o my-box.yaml \\
        --plot residuals.png
      specsim calibrate --gpus 2 --no-p2p --name 2x-h200-no-p2p
      specsim calibrate --cpu --quick
    """
    import signal

    from specsim.errors import WorkError

    if options["refit"]:
        _refit(list(options["refit"]), options)
        return
    plan, name = _plan(options)
    from specsim.calibration import session

    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # as Ctrl-C: the workers go first; a lost terminal too, but under nohup
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    started = time.monotonic()
    with session.held(plan), Meter("calibrate") as meter:
        session.prepare(plan, resume=options["resume"])
        if plan.node == 0:
            note(_said(plan, " and ".join(options["model"])))
        try:
            outcome = session.run(
                plan,
                lambda p: meter(p.elapsed_s, p.elapsed_s + p.left_s, _measured(p), p.left_s),
                lambda text: meter.note(f"warning: {text}"),
            )
        except KeyboardInterrupt:
            meter.note("interrupted before anything was measured")
            sys.exit(130)
    if plan.node == 0:
        try:
            _finish(plan, name, outcome, options, time.monotonic() - started)
        except WorkError as error:  # a full disk
            raise WorkError(f"{error}; what was measured is in {plan.folder}: go on with --resume") from None
    if outcome.unfinished:
        left = f"{outcome.unfinished[0]}; what was measured is in {plan.folder}: run the same line with --resume for the rest"
        raise WorkError(left)
    if outcome.interrupted:
        note(f"interrupted; what was measured is in {plan.folder}: run the same line with --resume for the rest")
        sys.exit(130)


def _measured(p: Progress) -> str:
    of = f" of {p.total}" if p.total else ""
    return f"{p.done}{of} measured, {p.now}"


def _plan(options: dict[str, Any]) -> tuple[Plan, str]:
    import importlib.util

    from specsim.errors import InputError, WorkError

    try:
        from specsim.calibration.session import Plan, check_names, count_gpus
    except ModuleNotFoundError as error:
        raise WorkError(f"the benchmarks are not installed ({error}): run `pip install -e .` in the checkout") from None
    cpu, ranks, nodes = options["cpu"], options["ranks"], options["nnodes"]
    names = {option: _names(options, option) for option in ("only", "skip", "kinds")}
    check_names(names["only"], names["skip"], names["kinds"])
    models, experts = _models(options), _experts(options)
    if experts and names["only"] and "moe" not in names["only"]:
        raise InputError("is about moe", where="--experts", mend="add it to --only, or leave --experts out")
    port = options["master"].rpartition(":")[2]
    if nodes > 1 and not (":" in options["master"] and port.isdigit() and 0 < int(port) < 2**16):
        raise InputError("needs --master HOST:PORT, the same on every node", where="--nnodes")
    if nodes == 1 and options["master"]:
        raise InputError("is about several nodes", where="--master", mend="give --nnodes too, or leave it out")
    if options["node_rank"] >= nodes:
        mend = "nodes are numbered from 0; give --nnodes on each"
        raise InputError(f"no node {options['node_rank']} among {nodes}", where="--node-rank", mend=mend)
    if importlib.util.find_spec("torch") is None:
        raise WorkError("PyTorch is not installed: pip install 'specsim[calibrate]'")
    if not cpu:
        here = count_gpus()
        if not here:
            raise WorkError("no GPU found here; --cpu runs the same on CPU tensors, to try the program")
        ranks = ranks or here * nodes
        if ranks > here * nodes:
            raise InputError(f"asks for {ranks} GPUs where {here * nodes} are", where="--gpus")
    ranks = ranks or 2
    if ranks % nodes:
        raise InputError(f"{ranks} ranks do not divide over {nodes} nodes", where="--nnodes")
    name = options["name"] or (f"{ranks}x-cpu" if cpu else f"{ranks}x-gpu") + ("-no-p2p" if options["no_p2p"] else "")
    plan = Plan(
        folder=Path(options["out"] or f"calibration-{name}").absolute(), ranks=ranks, cpu=cpu, quick=options["quick"],
        only=names["only"], kinds=names["kinds"], without=names["skip"], no_p2p=options["no_p2p"],
        shapes=_shapes(models, experts, options["tp"] or ranks), allow_multicast=options["allow_multicast"], nodes=nodes, node=options["node_rank"],
        master=options["master"], time_limit_s=options["time_limit"] or float("inf"),
    )  # fmt: skip
    return plan, name


def _said(plan: Plan, model: str) -> str:
    """The plan in a line: what is measured over how many ranks, and what is not because the model has none."""
    from specsim.calibration.session import stages

    names = list(dict.fromkeys(name for stage in stages(plan) for name in stage.measures))
    kinds = {shape["kind"] for shape in plan.shapes.get("attention", ())}
    lacks = []
    for kind, measure in (("experts", "moe"), ("attention", "attention")):
        if not plan.shapes.get(kind, True) and measure in names and measure not in plan.only:
            names.remove(measure)
            lacks.append(kind)
    if plan.cpu and "blockwise" in names and not plan.only:  # engines' kernels, on GPUs alone
        names.remove("blockwise")
    if kinds and "attention" in names:
        lacks += [f"{kind.upper()} attention" for kind in ("gqa", "mla") if kind not in kinds]
    unit = "process" if plan.cpu else "GPU"
    ranks = f"one {unit}" if plan.ranks == 1 else f"{plan.ranks} {'processes' if plan.cpu else 'GPUs'}"
    why = (
        f"; {model} ha{'ve' if ' and ' in model else 's'} no {' and no '.join(lacks)}, which is left out"
        if lacks
        else ""
    )
    return f"calibrate: {', '.join(names)} on {ranks}{why}"


def _names(options: dict[str, Any], option: str) -> tuple[str, ...]:
    """The names that an option lists; none where it is not given."""
    if options[option] is None:
        return ()
    names = tuple(name for name in options[option].replace(" ", "").split(",") if name)
    if not names:
        from specsim.errors import InputError

        raise InputError("names nothing", where=f"--{option}", mend="give names, separated by commas, or leave it out")
    return names


def _models(options: dict[str, Any]) -> list[Model]:
    from specsim.errors import InputError

    if options["tp"] and not options["model"]:
        raise InputError("is about a model's shapes", where="--tp", mend="give --model too, or leave it out")
    if not options["model"]:
        return []
    from specsim.configs import load_model

    return [load_model(name) for name in options["model"]]


def _experts(options: dict[str, Any]) -> list[dict[str, int]]:
    from specsim.errors import InputError

    found = []
    for text in options["experts"]:
        try:
            hidden, intermediate, experts, top_k = (int(part) for part in text.split(","))
        except ValueError:
            raise InputError(
                f"{text!r} is not four whole numbers", where="--experts", mend="such as 7168,256,384,8"
            ) from None
        if min(hidden, intermediate, experts, top_k) < 1 or top_k > experts:
            raise InputError(f"{text!r} has a number out of range", where="--experts", mend="such as 7168,256,384,8")
        found.append({"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k})
    return found


def _shapes(models: list[Model], experts: list[dict[str, int]], tp: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if models:
        from specsim.forward import Parallel
        from specsim.scenarios import check_heads
        from specsim.shapes import shapes

        for model in models:
            check_heads(model, Parallel(tp))
        found = shapes(models, tp)
    if experts:
        found["experts"] = [*found.get("experts", ()), *experts]
    return found


def _finish(plan: Plan, name: str, outcome: Outcome, options: dict[str, Any], seconds: float) -> None:
    from specsim.calibrate import build

    topology = (outcome.health or {}).get("topology") or {}
    result = build(
        name, outcome.results, outcome.environment, ranks=plan.ranks, cpu=plan.cpu, no_p2p=plan.no_p2p, quick=plan.quick,
        nvlink=bool(topology) and all(v.startswith("NV") for v in topology.values()), health=outcome.health,
        troubles=outcome.troubles, command=_command_line(), published=_published(),
    )  # fmt: skip
    _write(result, Path(options["output"] or plan.folder / f"{name}.yaml"), options, seconds)


def _refit(paths: list[Path], options: dict[str, Any]) -> None:
    from specsim.calibrate import rebuild
    from specsim.errors import InputError

    for option in on_the_line():
        if option.name not in OF_A_FIT:
            mend = "leave it out: a record is fitted again as it was measured"
            raise InputError("says nothing with --refit", where=option.opts[0], mend=mend)
    target = Path(options["output"]) if options["output"] else None
    if target is not None and target.resolve() in [path.resolve() for path in paths]:
        raise InputError(
            f"{str(target)!r} is a record that is fitted", where="--output", mend="name the profile's file"
        )
    result = rebuild([_record(path) for path in paths], _published())
    _write(result, target, options, 0.0)


def _record(path: Path) -> Record:
    from pydantic import ValidationError

    from specsim.calibrate import GIVE
    from specsim.errors import InputError
    from specsim.files import read_text
    from specsim.records import Record, first_trouble

    try:
        return Record.model_validate_json(read_text(path, "calibration record", limit=2**28))
    except ValidationError as error:
        raise InputError(first_trouble(error), where=str(path), mend=GIVE) from None


def _published() -> list[Profile]:
    from specsim.profiles import list_profiles, load_profile

    return [load_profile(known) for known in list_profiles()]


def _write(result: Result, target: Path | None, options: dict[str, Any], seconds: float) -> None:
    """Write the profile and, beside it, the record; show both. Without a target nothing is written but the plot."""
    from specsim.files import write_atomically
    from specsim.profiles import dump_profile
    from specsim.residuals import plot

    record = None
    if target is not None:
        record = target.with_name(f"{target.stem}.record.json")
        write_atomically(target, dump_profile(result.profile))
        write_atomically(record, result.record.model_dump_json(by_alias=True, exclude_none=True))
    if options["plot"] is not None:
        plot(result, options["plot"])
        note(f"wrote {options['plot']}")
    for warning in result.warnings:
        note(f"warning: {warning}")
    if not options["as_json"]:
        show(_page(result, _wrote(target, record, seconds)))
        return
    profile, samples = result.profile, result.record.samples
    document: dict[str, Any] = {
        "schema": "specsim.calibration/1",
        "profile": None if target is None else str(target),
        "record": None if record is None else str(record),
        "seconds": round(seconds, 1),
        "measured": sum(s["status"] == "done" for s in samples),
        "failed": sum(s["status"] != "done" for s in samples),
        "operators": {k: v.model_dump(exclude_none=True) for k, v in profile.operators.items()},
        "allreduce": [c.model_dump() for c in profile.allreduce],
        "launch": profile.launch.model_dump(),
        "warnings": result.warnings,
    }
    print_result(document)


def _command_line() -> str:
    return "specsim " + " ".join(sys.argv[1:]) if sys.argv[1:2] == ["calibrate"] else "specsim calibrate"


def _wrote(target: Path | None, record: Path | None, seconds: float) -> str:
    if target is None or record is None:
        return "Wrote nothing: give -o FILE to keep the profile."
    after = f" after {seconds:.0f} s" if seconds else ""
    return f"Wrote {target} and {record.name}{after}."


def _rate(value: float) -> str:
    """Whole, or two digits of a small one: a CPU does hundredths of a TFLOP/s."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _page(result: Result, wrote: str) -> Page:
    profile = result.profile
    yield Line(f"{profile.name}: seconds = fixed + ((bytes / bandwidth)^3 + (flops / peak)^3)^(1/3)", "title")
    rates = [
        (name, f"{r.fixed_us:.2f}", _rate(r.bandwidth_gb_s), _rate(r.peak_tflops) if r.peak_tflops else "", f"{r.relative_uncertainty:.0%}", r.note or r.source.kind)
        for name, r in profile.operators.items()
    ]  # fmt: skip
    yield grid(("class", ">fixed us", ">GB/s", ">TFLOP/s", ">+-", "~from"), rates)
    if profile.allreduce:
        curves = []
        for c in profile.allreduce:
            at = dict(zip(c.bytes, c.latency_us, strict=True))
            cells = (f"{at[1024 * k]:.1f}" if 1024 * k in at else "" for k in (4, 16, 64, 256, 1024))
            curves.append((c.implementation, str(c.ranks), c.mode, *cells))
        yield Line()
        heads = ("all-reduce, us", ">ranks", "mode", ">4 KB", ">16 KB", ">64 KB", ">256 KB", ">1 MB")
        yield grid(heads, curves, keys=3)
    yield Line()
    for name, entries in profile.samples["verify_layer_us"].items():
        middle = sorted(e["more_us"] for e in entries)[len(entries) // 2]
        said = f"3 to 4 query rows add {middle:.1f} us a call (median); the engine term verify_layer_us is about this"
        yield Line(f"{name}: {said}")
    launch = profile.launch
    times = (
        f"kernel {launch.kernel_us:.1f} us, collective {launch.collective_us:.1f} us, graph {launch.graph_us:.1f} us"
    )
    yield Line(f"launch: {times}; {launch.note}")
    yield Line()
    yield Line(wrote, "verdict")
