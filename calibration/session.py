"""One calibration: its stages in order, what is on disk, how far it is, and the box's clocks while it runs.

The work folder holds plan.json, done/<case>.json, the stages' files and the workers' logs. It is never half written, and
whatever is in it at an interruption serves the next run with `resume`. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specsim.calibration import MEASUREMENTS, children, health
from specsim.calibration.allreduce import VARIANTS
from specsim.calibration.context import dumps
from specsim.calibration.engine_allreduce import ENGINES, PACKAGES, importable
from specsim.calibration.launch import ENDED, Setting, Stage, finished, result_of, results, run_stage, wait_for_the_run

from specsim.errors import InputError, WorkError, did_you_mean
from specsim.files import read_json, write_atomically
from specsim.quantities import counted

START_S = {True: 4.0, False: 14.0}  # a stage's start: on CPU, on GPUs
SAMPLE_EVERY_S = 10.0  # clocks
GROUPS = (
    "engines",
    "forced",
)  # of all-reduces: engines' own kernels that are importable, and NCCL made to do otherwise


TROUBLES = "troubles.json"  # those of all runs in the folder


@dataclass(frozen=True)
class Plan:
    """What to measure. ranks: processes in all, one a GPU."""

    folder: Path
    ranks: int
    cpu: bool = False
    quick: bool = False
    only: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()  # all-reduce implementations, or GROUPS of them; () is all that the run calls for
    without: tuple[str, ...] = ()  # operator classes to leave out
    no_p2p: bool = False
    shapes: dict[str, Any] = field(default_factory=dict)
    allow_multicast: bool = False
    nodes: int = 1
    node: int = 0
    master: str = ""
    time_limit_s: float = float("inf")

    def document(self) -> dict[str, Any]:
        """What must be the same for results to belong together."""
        kept = ("ranks", "cpu", "quick", "no_p2p", "shapes")
        return {"schema": "specsim.calibration-plan/1"} | {k: v for k, v in asdict(self).items() if k in kept}


class TimeIsUp(Exception):
    """The plan's time limit is reached."""


@dataclass(frozen=True)
class Progress:
    """Cases finished and known (0 while a stage has not said what it has), what runs now, seconds so far and to come."""

    done: int
    total: int
    now: str
    elapsed_s: float
    left_s: float


@dataclass(frozen=True)
class Outcome:
    """All that a calibration found. results: one dictionary a case; troubles: what went wrong, as sentences; unfinished: those
    that ended a stage before its cases were measured."""

    results: list[dict[str, Any]]
    environment: dict[str, Any]
    health: dict[str, Any] | None
    troubles: list[str]
    interrupted: bool = False
    unfinished: tuple[str, ...] = ()


def check_names(only: tuple[str, ...], without: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    """Raise InputError for a name that is no measurement, operator class or all-reduce."""
    classes = tuple(operator for module in _modules().values() for operator in module.CLASSES)
    for option, what, given, known in (
        ("--only", "measurement", only, MEASUREMENTS),
        ("--skip", "operator class", without, classes),
        ("--kinds", "all-reduce", kinds, (*VARIANTS, *GROUPS)),
    ):
        for name in given:
            if name not in known:
                raise InputError(f"no {what} {name!r}", where=option, mend=did_you_mean(name, known))


def _modules() -> dict[str, Any]:
    return {name: importlib.import_module(f"specsim.calibration.{name}") for name in MEASUREMENTS}


def stages(plan: Plan) -> list[Stage]:
    """The stages in order: one rank's measurements, then all ranks', then NCCL's variants in processes of their own. Raises
    InputError for what cannot be."""
    check_names(plan.only, plan.without, plan.kinds)
    wanted, every = plan.only or MEASUREMENTS, _modules()
    if plan.kinds and "allreduce" not in wanted:
        raise InputError("is about allreduce", where="--kinds", mend="add it to --only, or leave --kinds out")
    if plan.ranks == 1 and ("allreduce" in plan.only or plan.kinds):
        needs = f"allreduce needs {every['allreduce'].NEEDS}"
        raise InputError(
            needs, where="--kinds" if plan.kinds else "--only", mend="give --gpus 2 or more, or leave it out"
        )
    modules = {name: module for name, module in every.items() if name in wanted}
    shared = plan.ranks > 1
    alone = tuple(n for n, m in modules.items() if m.RANKS == "one" or (m.RANKS == "all" and not shared))
    together = tuple(n for n, m in modules.items() if shared and m.RANKS in ("all", "groups"))
    main = VARIANTS["nccl-no-p2p"] if plan.no_p2p else {}
    options: dict[str, Any] = {
        "gpus": plan.ranks,
        "implementation": "nccl",
        "no_p2p": plan.no_p2p,
        "without": plan.without,
        "only": plan.only,
    }
    found = [Stage("one", alone, 1, dict(main), options)] if alone else []
    if plan.kinds and "nccl" not in plan.kinds:
        together = tuple(n for n in together if n != "allreduce")
    if together:
        found.append(Stage("all", together, plan.ranks, dict(main), options))
    for name in _implementations(plan) if shared and "allreduce" in modules else []:
        environment = {**main, **VARIANTS[name]}
        found.append(Stage(name, ("allreduce",), plan.ranks, environment, {**options, "implementation": name}))
    return found


def _implementations(plan: Plan) -> list[str]:
    """All-reduce implementations that run in worker processes of their own. NCCL as it is by default is not among them."""
    for name in plan.kinds:
        if name in ENGINES and not importable(name):
            needed = " or ".join(PACKAGES[name])
            raise InputError(f"{name} needs {needed}, not installed here", where="--kinds", mend="install it, or leave it out")  # fmt: skip
    engines = [name for name in ENGINES if importable(name) and not plan.no_p2p and plan.nodes == 1]
    forced = [n for n in VARIANTS if n != "nccl" and n not in ENGINES and not (plan.no_p2p and n == "nccl-no-p2p")]
    if plan.kinds:
        several = {"engines": engines, "forced": forced}
        wanted = {name for kind in plan.kinds for name in several.get(kind, [kind])}
        return [name for name in VARIANTS if name != "nccl" and name in wanted]
    if plan.cpu:
        return []
    return engines[:1] if plan.quick else engines + forced


@contextlib.contextmanager
def held(plan: Plan) -> Iterator[None]:
    """The work folder for this run alone: two on the same GPUs would measure each other, and mix their files. Raises
    InputError for what cannot be run, before a folder is made for it, and WorkError when another run has the folder, or it
    cannot be written."""
    if not stages(plan):
        why = "none of them can run here: no engine is installed, or peer access is off"
        raise InputError(why, where="--kinds", mend="leave --kinds out, or give others")
    if plan.node > 0:  # the first node's run has it
        yield
        return
    import fcntl

    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        lock = (plan.folder / "lock").open("w")
    except OSError as error:
        raise WorkError(f"{plan.folder}: cannot be written: {error.strerror or error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkError(f"{plan.folder}: another calibration runs there; wait, or give another --out") from None
        except OSError:
            pass  # a file system without locks
        yield


def prepare(plan: Plan, *, resume: bool) -> None:
    """Make or check the work folder. On resume, failed cases that this run measures and results that are not whole are
    forgotten: they are measured again."""
    if plan.node > 0:
        return  # the first node leads
    again = {(stage.name, measure) for stage in stages(plan) for measure in stage.measures}
    path = plan.folder / "plan.json"
    known = finished(plan.folder)
    if known and not resume:
        raise InputError(
            f"holds {counted(len(known), 'result')} already",
            where=str(plan.folder),
            mend="continue with --resume, or give another --out",
        )
    document = json.loads(dumps(plan.document()))
    if known and path.exists() and read_json(path) != document:
        raise InputError(
            "was begun with other settings (ranks, --quick, --cpu, --no-p2p or shapes)",
            where=str(path),
            mend="give the same, or another --out",
        )
    for old in sorted((plan.folder / "stages").glob("*"), key=lambda path: path.name == ENDED):  # that one last
        old.unlink(missing_ok=True)
    write_atomically(path, dumps(document))
    if not known:
        (plan.folder / TROUBLES).unlink(missing_ok=True)
    for place in sorted((plan.folder / "done").glob("*.json")):
        result = result_of(place)
        if result is None or (result["status"] != "done" and _tried(result, again, plan)):
            place.unlink(missing_ok=True)


def _tried(result: dict[str, Any], again: set[tuple[str, str]], plan: Plan) -> bool:
    """Whether the run measures the case of a result."""
    return (result.get("stage"), result["measure"]) in again and result["operator"] not in plan.without


def run(plan: Plan, report: Callable[[Progress], None], trouble: Callable[[str], None]) -> Outcome:
    """Run all stages. Raises WorkError when nothing could be measured or the disk is full.

    Ctrl-C ends the workers and gives what is there, marked `interrupted`; it passes through when there is nothing. So
    does the time limit, without the mark.
    """
    todo = stages(plan)
    setting = Setting(
        plan.folder, plan.cpu, plan.quick, plan.shapes, plan.allow_multicast, plan.node, plan.nodes, plan.master
    )  # fmt: skip
    clock = _Clock(plan, todo)
    troubles = _known_troubles(plan.folder)
    unfinished: list[str] = []
    box: health.Health | None = None
    if not plan.cpu:
        try:
            box = health.collect(cores=True)
            for finding in box.findings:
                if finding.level != "note":
                    trouble(finding.line)
        except WorkError as error:
            troubles.append(str(error))

    def event(kind: str, details: dict[str, Any]) -> None:
        if kind == "trouble":
            trouble(str(details["text"]))
        elif kind == "unfinished":
            unfinished.append(str(details["text"]))
        elif time.monotonic() - clock.started > plan.time_limit_s:
            raise TimeIsUp
        elif (progress := clock.tick()) is not None:
            report(replace(progress, now=details.get("waiting", progress.now)))

    interrupted = False
    ended = ""
    try:
        if plan.node > 0 and any(stage.ranks > 1 for stage in todo):
            wait_for_the_run(setting, event)
        for number, stage in enumerate(todo):
            clock.stage = number
            troubles += run_stage(stage, setting, event, number=number)
            _keep_troubles(plan, troubles)
    except KeyboardInterrupt:
        interrupted = True
        ended = "interrupted: not all was measured"
    except TimeIsUp:
        ended = f"not all was measured in {plan.time_limit_s:.0f} s: run the same line with --resume for the rest"
    finally:
        if plan.nodes > 1 and plan.node == 0:
            write_atomically(plan.folder / "stages" / ENDED, "")
    found = results(plan.folder)
    of_this_run = [ended] if ended else _without_cases(plan, todo)  # not told by later ones
    if interrupted and not any(r["status"] == "done" for r in found):
        raise KeyboardInterrupt
    if not any(r["status"] == "done" for r in found):
        errors = (str(r["error"]) for r in found)
        first = next(iter([*troubles, *of_this_run, *errors]), "no measurement ran")
        raise WorkError(f"nothing could be measured: {first} (logs in {plan.folder / 'logs'})")
    for finding in health.under_load(clock.seen):
        troubles.append(finding.line)
        trouble(finding.line)
    _keep_troubles(plan, troubles)
    troubles += of_this_run
    surroundings = environment(plan, todo, box, clock.samples)
    return Outcome(found, surroundings, box.document() if box else None, troubles, interrupted, tuple(unfinished))


def _without_cases(plan: Plan, todo: list[Stage]) -> list[str]:
    """What was asked for by name and has nothing to measure on this box."""
    planned: set[str] = set()
    for stage in todo:
        try:
            cases = json.loads((plan.folder / f"{stage.name}.cases.json").read_text())["cases"]
        except (OSError, ValueError, KeyError):  # it ended before it said so, which is told already
            return []
        planned |= {case["measure"] for case in cases}
    said = []
    for name in plan.only:
        module = importlib.import_module(f"specsim.calibration.{name}")
        if name not in planned:
            left = set(module.CLASSES) - set(plan.without)
            why = f"it needs {module.NEEDS}" if left and hasattr(module, "NEEDS") else "--skip leaves none of it"
            said.append(f"{name}: nothing to measure here: {why}")
    return said


def _known_troubles(folder: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        return [str(text) for text in json.loads((folder / TROUBLES).read_text())]
    return []


def _keep_troubles(plan: Plan, troubles: list[str]) -> None:
    """Leave them to the next run in the folder, each once."""
    troubles[:] = dict.fromkeys(troubles)
    if plan.node == 0 and troubles:
        write_atomically(plan.folder / TROUBLES, dumps(troubles))


def environment(
    plan: Plan, todo: list[Stage], box: health.Health | None, samples: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the results hold for: software, GPU, clocks, power limit, topology, settings."""
    found: dict[str, Any] = {}
    for name in (
        *(stage.name for stage in reversed(todo)),
        "all",
        "one",
    ):  # NCCL as it is, also by an earlier run, counts most
        with contextlib.suppress(OSError, ValueError, KeyError):
            found |= json.loads((plan.folder / f"{name}.cases.json").read_text())["environment"]
    found["ranks"] = plan.ranks
    if plan.no_p2p:
        found["p2p"] = "off (NCCL_P2P_DISABLE=1)"
    if box and box.gpus:
        first = box.gpus[0]
        for key, name in (
            ("driver_version", "driver"), ("clocks.max.sm", "clock_max_mhz"), ("power.limit", "power_limit_w"),
            ("power.default_limit", "power_default_w"), ("pcie.link.width.max", "pcie_width"), ("pcie.link.gen.max", "pcie_gen"),
        ):  # fmt: skip
            if key in first:
                value = health.number(first, key)
                found[name] = first[key] if value is None or name == "driver" else value
        found["gpus"] = [g.get("name", "?") for g in box.gpus]
        if box.topology:
            found["topology"] = dict(box.topology)
        if box.p2p:
            found["peer_access"] = dict(box.p2p)
    if samples:
        clocks = sorted(c for s in samples for c in s["clocks"])
        found["clocks_mhz"] = (
            {"min": clocks[0], "median": clocks[len(clocks) // 2], "max": clocks[-1]} if clocks else {}
        )
        found["throttled"] = sorted({r for s in samples for r in s["reasons"]})
    return found


class _Clock:
    """Progress and time left, from the cases known so far; clocks of the GPUs every few seconds."""

    def __init__(self, plan: Plan, todo: list[Stage]) -> None:
        self.plan, self.todo = plan, todo
        self.stage = 0
        self.started = self.last = time.monotonic()
        self.sampled = time.monotonic()
        self.samples: list[dict[str, Any]] = []
        self.seen: list[list[dict[str, str]]] = []
        self.before = finished(plan.folder)

    def tick(self) -> Progress | None:
        now = time.monotonic()
        if not self.plan.cpu and now - self.sampled > SAMPLE_EVERY_S:
            self.sampled = now
            with contextlib.suppress(WorkError):
                gpus = health.gpus()
                clocks = [c for g in gpus if (c := health.number(g, "clocks.sm"))]
                self.samples.append({"clocks": clocks, "reasons": sorted({r for g in gpus for r in health.reasons(g)})})
                self.seen.append(gpus)
        if now - self.last < 0.5:
            return None
        self.last = now
        return self.progress()

    def progress(self) -> Progress:
        done = finished(self.plan.folder)
        estimates: dict[str, float] = {}
        left, known = 0.0, True
        for number, stage in enumerate(self.todo):
            with contextlib.suppress(OSError, ValueError, KeyError):
                cases = json.loads((self.plan.folder / f"{stage.name}.cases.json").read_text())["cases"]
                estimates |= {c["key"]: float(c["estimate_s"]) for c in cases}
                left += START_S[self.plan.cpu] * (number > self.stage)
                continue
            known = False
            usual = {"one": 60.0, "all": 45.0} | dict.fromkeys(ENGINES, 30.0)
            left += START_S[self.plan.cpu] + usual.get(stage.name, 6.0) * (0.4 if self.plan.quick else 1.0)
        elapsed = time.monotonic() - self.started
        fresh = [k for k in estimates if k in done and k not in self.before]
        planned = sum(estimates[k] for k in fresh)
        pace = min(3.0, max(0.1, (elapsed - START_S[self.plan.cpu]) / planned)) if len(fresh) > 5 else 0.6
        left += pace * sum(t for k, t in estimates.items() if k not in done)
        return Progress(len(done & set(estimates)), len(estimates) if known else 0, self._now(), elapsed, left)

    def _now(self) -> str:
        name = self.todo[self.stage].name
        with contextlib.suppress(OSError, ValueError, KeyError):
            return f"{name}: {json.loads((self.plan.folder / f'{name}.rank0.json').read_text())['operation']}"
        return f"{name}: starting"


def count_gpus() -> int:
    """GPUs that CUDA would see here, without importing torch into this process; 0 without any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with contextlib.suppress(WorkError):
        count = len(health.gpus())
        return min(count, len([v for v in visible.split(",") if v.strip()])) if visible is not None else count
    code = "import torch; print(torch.cuda.device_count())"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return int(subprocess.run(children.code(code), capture_output=True, text=True, timeout=120).stdout.split()[-1])
    return 0
