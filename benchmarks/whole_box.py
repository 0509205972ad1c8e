"""Calibrate a whole box, as it is and with peer access off, and measure real servers on it, in one call:

    python benchmarks/whole_box.py --time-limit 3000 -o box
    python benchmarks/whole_box.py --no-servers --gpus 2 --model typical --time-limit 480 -o box

Steps: health; calibration without engines' kernels, which take minutes to compile; without servers the same again, and how
far the two agree; calibration with NCCL_P2P_DISABLE=1; engines' all-reduces and experts as far as they are installed, and
without servers NCCL's other protocols, added to the first calibration; the scenarios of validation/scenarios-8gpu.yaml
(SGLang with random weights); predictions beside what was measured. Everything is on disk as soon as it is measured, the profile is written after every
step, and the same line goes on where a run ended. A step that fails is reported and the next one runs. No NVLink multicast
object is made.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SPECSIM = [sys.executable, "-m", "specsim"]
LEAST_S, SHORT_S = 30.0, 5.0  # left, below which no step is started: one that measures, and one that takes seconds
Runner = Callable[[list[str], float, Path], int]  # command, seconds it may take, log -> exit code


TYPICAL = "typical"  # as --model: the shapes that calibrate measures without one
JUDGED = ("Llama-3.1-8B", "Qwen3-30B-A3B")  # by which two such calibrations are compared
WITHIN = "3%"
SLOW_CLASSES = "moe_int4,moe_fp8_deepgemm"  # engines compile their kernels at first use


@dataclass(frozen=True)
class Step:
    """One command. share: of the time that is left when it starts, which it may take; limited: it is told so itself, and
    ends with what it has."""

    name: str
    command: list[str]
    share: float = 1.0
    limited: bool = False


def steps(options: argparse.Namespace) -> list[Step]:
    """The steps that measure; their limits are set when they start. Without servers each may take twice its share."""
    out, name = Path(options.output).absolute(), f"{options.gpus}x-{options.name}"
    shapes = [] if options.model == TYPICAL else ["--model", options.model, "--tp", str(options.gpus)]
    common = ["--gpus", str(options.gpus), *shapes, "--resume"]
    common += [flag for flag, given in (("--quick", options.quick), ("--cpu", options.cpu)) if given]
    more = 1.0 if options.servers else 2.0

    def calibrate(step: str, folder: str, profile: str, share: float, *arguments: str) -> Step:
        where = ["--name", profile, "--out", str(out / folder), "-o", str(out / f"{profile}.yaml")]
        return Step(step, [*SPECSIM, "calibrate", *where, *common, *arguments], min(1.0, more * share), limited=True)

    plain = ("--kinds", "nccl", "--skip", SLOW_CLASSES)
    off = f"{name}-no-p2p"
    joined = [*SPECSIM, "calibrate", "--refit", str(out / f"{off}.record.json")]
    joined += ["--refit", str(out / f"{name}.record.json"), "-o", str(out / f"{off}.yaml")]
    first = calibrate("calibrate", "calibration", name, 0.25, *plain)
    twice = [
        calibrate("calibrate-again", "calibration-again", f"{name}-again", 0.3, *plain),
        *(_agree(options, out, name, model) for model in (JUDGED if options.model == TYPICAL else (options.model,))),
    ]
    measured = [
        calibrate(
            "calibrate-no-p2p", "calibration-no-p2p", off, 0.15,
            "--no-p2p", "--kinds", "nccl", "--only", "peak,launches,copies,allreduce",
        ),
        calibrate("engines-allreduce", "calibration", name, 0.25, "--only", "allreduce", "--kinds", "engines"),
        calibrate("engines-experts", "calibration", name, 0.3, "--only", "moe"),
    ]  # fmt: skip
    forced = calibrate("forced", "calibration", name, 0.5, "--only", "allreduce", "--kinds", "forced")
    join = Step("join", joined)
    doctor = Step("doctor", [*SPECSIM, "doctor"])
    if not options.servers:
        return [doctor, first, *twice, *measured, forced, join]
    serve = [
        *SPECSIM,
        "validate",
        "--scenarios",
        str(options.scenarios),
        "--quick",
        "--resume",
        "-o",
        str(out / "runs"),
    ]
    serve += ["--layers", str(options.layers)] if options.layers else []
    return [doctor, first, *measured, join, Step("validate", serve, 0.97, limited=True)]


def _agree(options: argparse.Namespace, out: Path, name: str, model: str) -> Step:
    """The two calibrations by what a model's steps hang on; its exit code is 1 where they do not agree."""
    pair = [str(out / f"{name}.yaml"), str(out / f"{name}-again.yaml")]
    scenario = ["--model", model, "--tp", str(options.gpus), "--batch", "8", "--within", WITHIN]
    return Step(f"agree-{model}", [*SPECSIM, "hardware", "diff", *pair, *scenario])


def with_limit(step: Step, seconds: float) -> list[str]:
    """The command with its own time limit, where it has one."""
    return [*step.command, "--time-limit", f"{seconds:.0f}"] if step.limited else step.command


def replays(options: argparse.Namespace) -> list[Step]:
    """Predictions beside the records, each with the profile of how its server ran."""
    out, name = Path(options.output).absolute(), f"{options.gpus}x-{options.name}"
    found = []
    for path in sorted((out / "runs").glob("*.json")):
        engine = json.loads(path.read_text(encoding="utf-8")).get("engine") or {}
        off = (engine.get("env") or {}).get("NCCL_P2P_DISABLE") == "1"
        profile = out / f"{name}{'-no-p2p' if off else ''}.yaml"
        command = [*SPECSIM, "validate", "--records", str(path), "--hardware", str(profile)]
        if engine and profile.exists():
            found.append(Step(f"replay-{path.stem}", command))
    return found


def run(command: list[str], seconds: float, log: Path) -> int:
    """Run a command, its output here and in the log. After `seconds` it is asked to end, and 20 s later made to."""
    log.parent.mkdir(parents=True, exist_ok=True)
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with log.open("a", encoding="utf-8") as file, subprocess.Popen(command, cwd=ROOT, **pipe) as process:
        timers = [threading.Timer(seconds, process.terminate), threading.Timer(seconds + 20, process.kill)]
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                file.write(line)
                file.flush()
            return process.wait()
        finally:
            for timer in timers:
                timer.cancel()
            if process.poll() is None:
                process.terminate()


def work(options: argparse.Namespace, runner: Runner) -> list[dict[str, object]]:
    """Run all steps within the limit. What ran, how it ended and how long it took, also in summary.json as it goes."""
    out = Path(options.output).absolute()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.time_limit
    done: list[dict[str, object]] = []

    def go(step: Step) -> None:
        left = end - time.monotonic()
        if left < (LEAST_S if step.limited else SHORT_S):
            done.append({"step": step.name, "code": None, "seconds": 0.0, "note": "no time left"})
        else:
            command = with_limit(step, left * step.share)
            print(f"== {step.name}, {left:.0f} s left: {shlex.join(command)}", flush=True)
            started = time.monotonic()
            code = runner(command, left, out / "logs" / f"{step.name}.log")
            done.append({"step": step.name, "code": code, "seconds": round(time.monotonic() - started, 1)})
        (out / "summary.json").write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")

    for step in steps(options):
        if not options.only or step.name in options.only or step.name.split("-")[0] in options.only:
            go(step)
    if options.servers and (not options.only or "replay" in options.only):
        end += LEAST_S + 60  # reading records takes seconds
        for step in replays(options):
            go(step)
    return done


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default="whole-box", help="folder for everything")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--name", default="h200", help="the profiles are called GPUSx-NAME")
    parser.add_argument("--time-limit", type=float, default=3000.0, help="seconds for everything")
    parser.add_argument(
        "--model", default="Kimi-K2.5", help=f"whose shapes are calibrated; {TYPICAL}: those of no model"
    )
    parser.add_argument(
        "--no-servers", dest="servers", action="store_false", help="calibrate and compare, serve nothing"
    )
    parser.add_argument("--layers", type=int, help="run the scenarios' models with so many layers")
    parser.add_argument("--quick", action="store_true", help="quick calibrations")
    parser.add_argument("--cpu", action="store_true", help="processes on CPU in place of GPUs, to try the calibrations")
    parser.add_argument("--scenarios", type=Path, default=ROOT / "validation" / "scenarios-8gpu.yaml")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="STEP",
        help="some steps, or some kinds: doctor, calibrate, agree, engines, forced, join, validate, replay",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.dry_run:
        for step in steps(options):
            print(shlex.join(with_limit(step, options.time_limit * step.share)))
        return 0
    done = work(options, run)
    for entry in done:
        print(
            f"{entry['step']:40} {'ok' if entry['code'] == 0 else entry.get('note') or entry['code']} {entry['seconds']} s"
        )
    return 1 if any(entry["code"] for entry in done) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
