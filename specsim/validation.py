"""Validation runs: from a setup, or a server that already runs, to a record that is saved after every point."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import specsim.kernels as kernels
import specsim.replay as replay
from specsim.configs import model_from_config
from specsim.errors import InputError, WorkError
from specsim.files import opening, write_atomically
from specsim.forward import Parallel
from specsim.host_speed import Watch
from specsim.launch import read_launch
from specsim.launch_flags import flag_names
from specsim.live import (
    BrokenError,
    ChangedError,
    Client,
    LogTail,
    PointError,
    Served,
    ServerError,
    check_same,
    counters,
    flags_of,
    identify,
)
from specsim.load import Load, measure_loads, seconds_of
from specsim.measure import Plan, measure
from specsim.profiles import load_profile
from specsim.records import Correction, EngineRun, Record
from specsim.redaction import KEY_VARIABLES, api_key, scrub, without_key
from specsim.scenarios import check_heads
from specsim.server import Launched, NotInstalledError, free_port, listeners, refuse_multicast, tree
from specsim.setups import OWN_FLAGS, Setup, config_of, moe_layers, server_env, server_flags, target_config

START_S = 90.0  # what a start and a stop take at most as a rule, for --time-limit
Say = Callable[[str], None]


UNIFORM = Correction(
    what="simulated uniform routing (SGLANG_SIMULATE_UNIFORM_EXPERTS): tiny kernels that draw the experts at random",
    kernels_per_moe_layer=8,
    us_per_moe_layer=11.0,
    applies_to=["decode", "verify"],
)


def check(setups: Sequence[Setup], folder: Path, *, multicast: bool = False) -> None:
    """Find what is wrong before a server is started. Raises InputError for a setup, WorkError for the folder."""
    for setup in setups:
        _check_flags(setup)
        _check_ranks(target_config(setup), setup)
        if setup.draft is not None:
            config_of(setup.draft, "draft")
        if setup.hardware is not None:
            load_profile(setup.hardware)
        if not multicast:
            refuse_multicast(setup.flags, setup.env, f"scenario {setup.name}")
    check_folder(folder)


def _check_flags(setup: Setup) -> None:
    """Raise InputError for a further flag that is misspelt, or that the set-up gives itself."""
    where = f"scenario {setup.name}"
    for flag in flag_names("sglang", setup.flags):
        if flag in OWN_FLAGS:
            key = OWN_FLAGS[flag]
            mend = f"give --{key.replace('_', '-')}, or the key {key}" if key else "leave it out"
            raise InputError(f"{flag} among the further flags: the set-up gives it itself", where=where, mend=mend)
    wanted = [
        w.partition("=")[2] or after for w, after in itertools.pairwise([*setup.flags, ""]) if w.startswith("--api-key")
    ]
    if wanted and wanted[-1] != api_key()[0]:
        mend = f"set {KEY_VARIABLES[0]} to it"
        raise InputError("--api-key is one that this client does not send", where=where, mend=mend)
    # With the ranks, which what groups of them get must divide.
    read_launch("sglang", ["--tp-size", str(setup.tp), *setup.flags]).refuse_slips(where)


def _check_ranks(config: dict[str, Any], setup: Setup) -> None:
    """Raise InputError where the ranks do not divide the target's heads. A model that cannot be priced may be measured."""
    try:
        model = model_from_config(config, name=setup.name, source=str(setup.model))
    except InputError:
        return
    check_heads(model, Parallel(setup.tp))


def check_folder(folder: Path) -> None:
    """Raises WorkError when a record could not be written there. A folder that is made for that is there with its first
    record: a server that does not answer leaves none."""
    probe = folder / ".specsim-probe"
    made = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        write_atomically(probe, "x" * 65536)
        probe.unlink()
    except WorkError as error:
        raise WorkError(str(error).replace(str(probe), str(folder))) from None
    finally:
        for part in made:
            with contextlib.suppress(OSError):  # another has put something there
                part.rmdir()


def left_to_measure(setups: Sequence[Setup], folder: Path) -> tuple[list[Setup], list[str]]:
    """The set-ups with what no record of theirs in the folder holds yet, and the names of those that are whole."""
    left, whole = [], []
    for setup in setups:
        others = {s.name for s in setups} - {setup.name}
        name = re.compile(rf"{re.escape(setup.name)}(-\d+)?")  # see `free_name`
        files = [f for f in sorted(folder.glob("*.json")) if name.fullmatch(f.stem) and f.stem not in others]
        rest = setup.without([r for f in files for r in _whole(f)]) if files else setup
        if rest is None:
            whole.append(setup.name)
        else:
            left.append(rest)
    return left, whole


def _whole(file: Path) -> list[Record]:
    """The record in a file; none where it is torn, or something else."""
    with contextlib.suppress(InputError):
        return replay.load(file)[0]
    return []


def free_name(folder: Path, name: str) -> str:
    """`name`, or with a number behind it when a record of that name is there: no run overwrites another."""
    names = [name, *(f"{name}-{i}" for i in range(2, 1000))]
    return next((n for n in names if not (folder / f"{n}.json").exists()), name)


@dataclass
class Recorder:
    """A record that is on disk after every point. Raises WorkError when it cannot be written."""

    record: Record
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{self.record.name}.json"

    def save(self) -> None:
        text = json.dumps(without_key(self.record.model_dump(by_alias=True, exclude_none=True)), indent=1)
        text = re.sub(r"\[[-+.\de,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)  # numbers on one line
        write_atomically(self.path, text + "\n")

    def drop_if_empty(self) -> bool:
        """Whether anything was measured; without it the file is removed."""
        kept = bool(self.record.points or self.record.loads)
        if not kept:
            self.path.unlink(missing_ok=True)
        return kept

    def kept(self) -> str:
        """What to say of the record when the run broke off; an empty one is removed."""
        return f"; finished points are kept in {self.path}" if self.drop_if_empty() else ""


def measure_all(
    client: Client,
    served: Served,
    recorder: Recorder,
    pairs: Sequence[tuple[int, int]],
    load: Load | None,
    plan: Plan,
    log: LogTail | None,
    say: Say,
    deadline: float,
    host: Watch,
) -> int:
    """Measure and save each (batch, context), and then the load; the number that failed. Raises ServerError when the server is gone.

    host: watches the cores of a server on this machine.
    """
    record, failed = recorder.record, 0
    for batch, context in pairs:
        if time.monotonic() + 0.5 * plan.point_s > deadline:
            record.caveats.append(f"the time limit left out batch {batch} at context {context} and what follows")
            say("  the time limit is reached")
            recorder.save()
            failed += 1
            break
        done = len(record.points)
        try:
            record.points.append(
                measure(client, served, batch, context, plan, log, lambda text: say(f"  {text}"), host)
            )
            host.note(record.environment)
        except (PointError, BrokenError) as error:  # whether the server is gone is asked below
            failed += 1
            say(f"  batch {batch} context {context}: {error}")
            record.caveats.append(f"batch {batch} at context {context} failed: {error}")
        except ServerError as error:
            record.caveats.append(f"stopped at batch {batch}, context {context}: {error}")
            recorder.save()
            raise
        try:
            check_same(client, served)
        except ChangedError as error:
            del record.points[done:]
            record.caveats.append(f"batch {batch}, context {context}: {error}")
            recorder.save()
            raise
        except ServerError as error:  # it is gone since: what was measured before stays
            record.caveats.append(f"stopped after batch {batch}, context {context}: {error}")
            recorder.save()
            raise
        recorder.save()
    if load is None:
        return failed
    record.method = f"{record.method}; {LOAD_METHOD}" if record.points else LOAD_METHOD
    return failed + measure_loads(client, served, load, record, recorder.save, say, deadline, host)


METHOD = (
    "token-id requests of fixed length, one POST a batch; time of the longest request against its steps at four "
    "lengths, repeated, robust regression with an 80 % interval; phases: slope of the engine's CUDA-event timers, "
    "averaged over ranks; "
    "context is the mean over the measurement; raw timings with each point"
)


LOAD_METHOD = (
    "load: different prompts of random token ids, sent by the clock at Poisson arrivals and streamed; a chunk's time is "
    "that of the poll that found it; raw times of each request"
)


def run_url(
    url: str,
    pairs: Sequence[tuple[int, int]],
    folder: Path,
    plan: Plan,
    say: Say,
    *,
    name: str | None = None,
    model: Path | None = None,
    log: Path | None = None,
    flags: Sequence[str] = (),
    hardware: str | None = None,
    load: Load | None = None,
    deadline: float = float("inf"),
    request_timeout: float = 300.0,
) -> tuple[Path, int]:
    """Measure a server that already runs. The record's path and how many points failed. Raises WorkError, and InputError for
    a model, a profile or a log that is not there.

    model: where its config.json is, if not where the server says; log: the server's log file, if it can be read here;
    flags: those that it was started with, for a server that does not say (vLLM).
    """
    client = Client(url, request_timeout)
    tail = None if log is None else _tail(log)
    target = None if model is None else config_of(model, "target")
    if hardware is not None:
        load_profile(hardware)
    served = _flagged(identify(client), flags)
    say(f"{client.url}: {served.engine} {served.version}, {served.model}")
    label = name or re.sub(r"[^A-Za-z0-9._-]+", "-", f"{served.engine}-{Path(served.model).name}").strip("-.")
    record = Record(
        kind="validation",
        name=label,
        date=_now(),
        source=f"{served.engine} at {client.url}",
        environment=_environment(served),
        method=METHOD,
    )
    record.engine = EngineRun(name=served.engine, version=served.version, flags=scrub([*flags_of(served), *flags]))
    record.target_config = target or _find_config(Path(served.model))
    draft = served.info.get("speculative_draft_model_path")
    record.draft_config = _find_config(Path(str(draft))) if draft else None
    if record.target_config is None:
        record.caveats.append("the model's config.json was not found from here: replay needs it (give --model DIR)")
    record.caveats.append("other users' requests, if there were any, slow the steps down")
    if counters(client) is None:
        caveat, hint = _blind(served)
        record.caveats.append(f"the server has no /metrics: {caveat}")
        say(f"  it has no /metrics, so that {hint}")
    record.name, record.hardware = free_name(folder, label), hardware
    recorder = Recorder(record, folder)
    try:
        own = listeners(client)
        with Watch(lambda: set().union(*map(tree, own))) as host:
            failed = measure_all(client, served, recorder, pairs, load, plan, tail, say, deadline, host)
    except ServerError as error:
        raise ServerError(f"{error}{recorder.kept()}") from None
    if not recorder.drop_if_empty():
        raise WorkError(f"{client.url}: no point could be measured; see the lines above")
    return recorder.path, failed


def _blind(served: Served) -> tuple[str, str]:
    """What is not known of a server without counters: for its record, and what would mend it."""
    if served.engine == "sglang":
        caveat = "phases were not timed, and that batches were steady is not known"
        return caveat, "nothing times its phases or tells a steady batch: start it with --enable-metrics"
    if served.speculative:
        return "that batches were steady is not known", "its cycles cannot be counted: open /metrics to this client"
    caveat = "were it to draft, its cycles were taken for steps of one token"
    return caveat, "whether it drafts is not known: if so, say it by --vllm-args"


def _tail(log: Path) -> LogTail:
    with opening(log, "log", where="--server-log"):
        log.stat()
    return LogTail(log)


def _flagged(served: Served, flags: Sequence[str]) -> Served:
    """A vLLM server with what its flags say of drafting, which it does not say itself. Raises InputError for what vLLM
    would refuse."""
    if not flags:
        return served
    if served.engine != "vllm":
        mend = "leave it out: it says its flags itself"
        raise InputError(f"the server is {served.engine} {served.version}, no vLLM", where="--vllm-args", mend=mend)
    launch = read_launch("vllm", ["--model", served.model, *flags])
    launch.refuse_slips("--vllm-args")
    method = launch.options.get("method", "none")
    if method == "none":
        return served
    said = {"speculative_algorithm": method, "speculative_draft_model_path": launch.options.get("draft")}
    return replace(served, info={name: value for name, value in said.items() if value})


def run_setup(
    setup: Setup,
    folder: Path,
    plan: Plan,
    say: Say,
    *,
    port: int | None = None,
    start_timeout: float = 600.0,
    request_timeout: float = 300.0,
    deadline: float = float("inf"),
    multicast: bool = False,
    command: Sequence[str] = (sys.executable, "-m", "sglang.launch_server"),
) -> tuple[Path, int]:
    """Start SGLang, measure, stop it. The record's path and how many points failed. Raises InputError and WorkError."""
    where = f"scenario {setup.name}"
    check_folder(folder)  # before a minute goes into a start
    config = target_config(setup)
    spread = setup.uniform_experts
    if spread is None:
        spread = moe_layers(config) > 0 and setup.weights == "dummy"
    env = server_env(setup, spread)
    if not multicast:
        refuse_multicast(setup.flags, env, where)
    with ExitStack() as stack:
        models = Path(stack.enter_context(_temporary()))
        model = _as_folder(setup.model, models / "target", config if setup.layers else None)
        draft = _as_folder(setup.draft, models / "draft") if setup.draft else None
        chosen = free_port(port)
        flags = server_flags(setup, model, draft, chosen)
        engine = EngineRun(name="sglang", flags=scrub(_portable(flags, setup)), env=scrub(env))
        record = _record_of(setup, free_name(folder, setup.name), engine, config, spread)
        log = folder / "logs" / f"{record.name}.log"
        say(f"{setup.name}: starting {' '.join(scrub([*command, *flags]))}")
        server = stack.enter_context(Launched([*command, *flags], env, chosen, log, request_timeout))
        took = server.wait(min(start_timeout, max(deadline - time.monotonic(), 1.0)), say)
        say(f"{setup.name}: healthy after {took:.0f} s")
        served = identify(server.client)
        engine.version = served.version
        record.environment |= {**_environment(served), **_gpu(), "start_s": round(took, 1)}
        recorder = Recorder(record, folder)
        try:
            with Watch(server.members) as host:
                pairs, lines = setup.pairs(), LogTail(log)
                failed = measure_all(
                    server.client, served, recorder, pairs, setup.load, plan, lines, say, deadline, host
                )
            if setup.profile and time.monotonic() + 30 > deadline:
                say("  the time limit leaves out the profile")
            elif setup.profile and pairs:  # a run that goes on may have none left
                failed += _profile(server.client, served, setup, recorder, say)
        except ServerError as error:
            kept = recorder.kept()
            if server.died():
                for line in server.last_lines():
                    say(f"  | {line}")
                raise ServerError(f"{where}: the server died: {server.reason()} (log: {log}){kept}") from None
            raise ServerError(f"{where}: {error}{kept}") from None
        if not recorder.drop_if_empty():
            raise WorkError(f"{where}: no point could be measured; see the lines above")
        return recorder.path, failed


def _record_of(setup: Setup, name: str, engine: EngineRun, config: dict[str, Any], spread: bool) -> Record:
    """The record of a set-up before anything is measured. config: the target's, with the layers that it starts with; spread:
    whether rows choose their experts at random. Raises InputError for a drafter that is not there."""
    record = Record(kind="validation", name=name, date=_now(), source="specsim validate --launch", method=METHOD)
    record.engine, record.hardware = engine, setup.hardware
    record.target_config = config
    record.draft_config = config_of(setup.draft, "draft") if setup.draft else None
    if spread:
        record.corrections.append(UNIFORM)
    if moe_layers(config):
        record.environment["routing"] = setup.routing or ("uniform" if spread else "as the weights have it")
    if setup.weights == "dummy":
        record.caveats.append("dummy weights" + ("; acceptance is simulated" if setup.method != "none" else ""))
    if setup.about:
        record.caveats.append(setup.about)
    return record


def run_list(
    setups: Sequence[Setup], run: Callable[[Setup], tuple[Path, int]], say: Say, deadline: float, plan: Plan
) -> tuple[list[Path], list[str]]:
    """Run set-up after set-up, going on after a failed one, but where there is no engine to start. The records' paths, and a line for
    each failure."""
    paths, failures = [], []
    for setup in setups:
        left = deadline - time.monotonic()
        need = START_S + 0.6 * plan.point_s * min(len(setup.pairs()), 2)
        need += seconds_of(setup.load) if setup.load is not None else 0.0
        if left < need:
            failures.append(
                f"{setup.name}: not started: {max(left, 0):.0f} s of the time limit are left, {need:.0f} needed"
            )
            say(failures[-1])
            continue
        try:
            path, failed = run(setup)
        except (WorkError, InputError) as error:
            why = str(error).removeprefix(f"scenario {setup.name}: ")
            failures.append(f"{setup.name}: {why}")
            say(f"{setup.name}: failed: {why}")
            if isinstance(error, NotInstalledError):
                break
            continue
        paths.append(path)
        if failed:
            failures.append(
                f"{setup.name}: {failed} of its points or profiles could not be measured (see its record's caveats)"
            )
            say(failures[-1])
    return paths, failures


def _profile(client: Client, served: Served, setup: Setup, recorder: Recorder, say: Say) -> int:
    """Save the kernel table of the set-up's first point beside its record; 1 when that failed."""
    batch, context = setup.pairs()[0]
    try:
        table = kernels.profile(client, served, batch, context)
    except (PointError, InputError) as error:
        say(f"  profile: {error}")
        recorder.record.caveats.append(f"the kernel profile failed: {error}")
        recorder.save()
        return 1
    path = recorder.folder / f"{recorder.record.name}.kernels.json"
    write_atomically(path, json.dumps({"of": recorder.record.name, **table}, indent=1) + "\n")
    busy = f"{table['busy_ms_per_step']:.3f} ms busy"
    say(f"  profile: {table['kernels_per_step']:g} kernels a step, {busy}; saved as {path}")
    return 0


def _temporary() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="specsim-")
    except OSError as error:
        raise WorkError(f"no temporary folder can be made ({error.strerror}); set TMPDIR to one with space") from None


def _as_folder(path: Path, target: Path, config: dict[str, Any] | None = None) -> str:
    """A folder that SGLang takes as a model: the given one, or a new one around the config file or around `config`."""
    if config is None and path.is_dir():
        return str(path)
    write_atomically(target / "config.json", json.dumps(config) if config is not None else path.read_bytes())
    return str(target)


def _portable(flags: list[str], setup: Setup) -> list[str]:
    """The flags without this run's temporary paths and port."""
    names = {"--model-path": setup.model, "--speculative-draft-model-path": setup.draft}
    kept = []
    for before, flag in zip(["", *flags], flags, strict=False):
        path = names.get(before)
        kept.append((path.name if path.is_dir() else path.stem) if path else flag)
    for drop in ("--port", "--host"):
        at = kept.index(drop)
        del kept[at : at + 2]
    return kept


def _find_config(path: Path) -> dict[str, Any] | None:
    try:
        return config_of(path, "target")
    except InputError:
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _environment(served: Served) -> dict[str, Any]:
    keys = (
        "max_total_num_tokens",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "disable_overlap_schedule",
        "disable_radix_cache",
        "schedule_conservativeness",
        "stream_interval",
        "attention_backend",
        "moe_runner_backend",
        "page_size",
        "cuda_graph_config",
    )
    running = {} if served.max_running is None else {"max_running_requests": served.max_running}
    told = {k: served.info[k] for k in keys if served.info.get(k) is not None}
    return {"engine_version": served.version, **running, **told}


def _gpu() -> dict[str, Any]:
    """What nvidia-smi says of the GPUs, and the versions beside SGLang's own; empty where neither is found."""
    found: dict[str, Any] = {}
    for package in ("torch", "sglang-kernel", "triton", "flashinfer-python", "nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    query = "--query-gpu=name,driver_version,clocks.max.sm,power.limit"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        out = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
        rows = [[cell.strip() for cell in line.split(",")] for line in out.stdout.splitlines() if line.count(",") == 3]
        if rows:
            found |= dict(zip(("gpu", "driver", "max_sm_clock", "power_limit"), rows[0], strict=True)) | {
                "gpus": len(rows)
            }
    return found
