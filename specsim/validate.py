"""Validation runs: from a scenario, or a server that already runs, to a record that is saved after every point."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import specsim.kernels as kernels
from specsim.errors import InputError, WorkError, did_you_mean
from specsim.files import read_json, read_yaml, write_atomically
from specsim.live import Client, LogTail, PointError, Served, ServerError, flags_of, identify
from specsim.measure import Plan, measure
from specsim.records import Correction, EngineRun, Record
from specsim.server import MULTICAST_OFF, SAFE_FLAG, Launched, free_port, refuse_multicast

ALGORITHMS = {
    "eagle3": "EAGLE3",
    "eagle": "EAGLE",
    "mtp": "NEXTN",
    "draft-model": "STANDALONE",
    "ngram": "NGRAM",
    "none": "",
}
START_S = 90.0  # what a start and a stop take at most as a rule, for --time-limit
POINT_S = 25.0
Count = Annotated[int, Field(ge=1, le=4096)]

Say = Callable[[str], None]


class Scenario(BaseModel):
    """One server to start and what to measure on it. Paths are relative to the scenario file."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    model: Path  # a folder with config.json, or such a file
    draft: Path | None = None
    tp: Count = 1
    method: Literal["eagle3", "eagle", "mtp", "draft-model", "ngram", "none"] = "none"
    num_steps: Count | None = None
    topk: Count = 1
    draft_tokens: Count | None = None
    accept_length: Annotated[float, Field(ge=1)] | None = None  # simulated; None: 2, or 1 when nothing more fits
    batches: Annotated[list[Count], Field(min_length=1)] = [1, 4, 16, 32]
    contexts: Annotated[list[Annotated[int, Field(ge=16, le=2**20)]], Field(min_length=1)] = [1024]
    points: list[tuple[Count, int]] | None = None  # (batch, context) pairs instead of batches x contexts
    eager: bool = False  # --disable-cuda-graph
    uniform_experts: bool | None = None  # spread dummy routing evenly; None: when the model has experts
    weights: Literal["dummy", "real"] = "dummy"
    memory: Annotated[float, Field(gt=0, lt=1)] = 0.8  # --mem-fraction-static
    flags: list[str] = []  # further server flags, as on the command line
    env: dict[str, str] = {}
    profile: bool = False  # also a kernel table of the first point
    routing: str | None = None  # told in the record when the routing is not uniform
    about: str = ""

    @property
    def rows(self) -> int:
        """Rows a sequence in a verify pass: the draft tokens, root included."""
        if self.method == "none":
            return 1
        return self.draft_tokens or (self.num_steps or 0) + 1

    def pairs(self) -> list[tuple[int, int]]:
        return self.points or [(batch, context) for context in self.contexts for batch in self.batches]


def load_scenarios(path: Path) -> list[Scenario]:
    """The scenarios of a YAML file: a list `scenarios:` over `defaults:`. Raises InputError naming entry and key."""
    document = read_yaml(path, "scenario file")
    if isinstance(document, list):
        document = {"scenarios": document}
    if not isinstance(document, dict) or not isinstance(document.get("scenarios"), list):
        raise InputError("has no list `scenarios`", where=str(path), mend="see validation/README.md for an example")
    unknown = set(document) - {"scenarios", "defaults"}
    if unknown:
        raise InputError(f"unknown key {min(map(str, unknown))!r}", where=str(path), mend="known: defaults, scenarios")
    defaults = document.get("defaults") or {}
    found = []
    for number, entry in enumerate(document["scenarios"], 1):
        if not isinstance(entry, dict) or not isinstance(defaults, dict):
            raise InputError("is not a mapping", where=f"{path}, scenario {number}", mend="write key: value lines")
        where = f"{path}, scenario {entry.get('name', number)}"
        env = {**(defaults.get("env") or {}), **(entry.get("env") or {})}
        merged = {**defaults, **entry, "env": {k: str(v) for k, v in env.items()}}
        for key in ("model", "draft"):
            if merged.get(key):
                merged[key] = path.parent / str(merged[key])
        found.append(make_scenario(merged, where))
    names = [s.name for s in found]
    twice = {n for n in names if names.count(n) > 1}
    if twice:
        raise InputError(f"two scenarios are called {min(twice)!r}", where=str(path), mend="give each its own name")
    return found


def make_scenario(values: dict[str, Any], where: str) -> Scenario:
    """A checked scenario. Raises InputError naming the key."""
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise InputError(
                f"unknown key {key!r}", where=where, mend=did_you_mean(key, list(Scenario.model_fields))
            ) from None
        raise InputError(f"{key}: {first['msg']}", where=where, mend="correct that value") from None
    if scenario.method not in ("none", "ngram") and scenario.num_steps is None:
        raise InputError(
            f"method {scenario.method} needs num_steps", where=where, mend="give --num-steps, as SGLang has it"
        )
    if scenario.method == "ngram" and scenario.draft_tokens is None:
        raise InputError("method ngram needs draft_tokens", where=where, mend="give --draft-tokens")
    if scenario.method in ("eagle3", "eagle", "draft-model") and scenario.draft is None:
        raise InputError(f"method {scenario.method} needs a draft", where=where, mend="give --draft DIR")
    if scenario.method == "none" and (scenario.draft or scenario.num_steps or scenario.draft_tokens):
        raise InputError(
            "a draft, num_steps or draft_tokens without a method", where=where, mend="give --method eagle3"
        )
    if scenario.method != "none" and scenario.topk > 1 and scenario.draft_tokens is None:
        raise InputError("topk above 1 needs draft_tokens", where=where, mend="give --draft-tokens")
    limit = (scenario.num_steps or scenario.rows - 1) + 1
    if scenario.method != "none" and (scenario.accept_length or 1) > limit:
        raise InputError(
            f"accept_length {scenario.accept_length:g} is above num_steps + 1 = {limit}", where=where, mend="lower it"
        )
    return scenario


def config_of(path: Path, what: str) -> dict[str, Any]:
    """The config.json in a folder, or the file itself. Raises InputError."""
    config = read_json(path / "config.json" if path.is_dir() else path, f"{what} config.json")
    if not isinstance(config, dict):
        raise InputError("is not a model's config.json", where=str(path), mend="give a folder with one, or the file")
    return config


def moe_layers(config: dict[str, Any]) -> int:
    """Layers with routed experts, 0 for a dense model."""
    inner = config.get("text_config", config)
    if not any(inner.get(k) for k in ("n_routed_experts", "num_experts", "num_local_experts")):
        return 0
    return int(inner.get("num_hidden_layers", 0)) - int(inner.get("first_k_dense_replace", 0) or 0)


def server_flags(scenario: Scenario, model: str, draft: str | None, port: int) -> list[str]:
    """SGLang's flags for a scenario."""
    flags = [
        "--model-path",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--trust-remote-code",
        "--dtype",
        "bfloat16",
    ]
    flags += ["--skip-tokenizer-init", "--skip-server-warmup", "--grammar-backend", "none", "--enable-metrics"]
    flags += ["--decode-log-interval", "20", "--mem-fraction-static", f"{scenario.memory:g}"]
    if scenario.weights == "dummy":
        flags += ["--load-format", "dummy"]
    largest = max(batch for batch, _ in scenario.pairs())
    flags += ["--max-running-requests", str(max(largest, 8))]
    flags += ["--disable-cuda-graph"] if scenario.eager else ["--cuda-graph-max-bs", str(max(largest, 8))]
    if scenario.tp > 1:
        flags += ["--tp", str(scenario.tp), SAFE_FLAG]
    if scenario.method != "none":
        flags += [
            "--speculative-algorithm",
            ALGORITHMS[scenario.method],
            "--speculative-num-draft-tokens",
            str(scenario.rows),
        ]
        if scenario.method != "ngram":
            flags += [
                "--speculative-num-steps",
                str(scenario.num_steps),
                "--speculative-eagle-topk",
                str(scenario.topk),
            ]
        if draft is not None:
            flags += ["--speculative-draft-model-path", draft]
    return flags + scenario.flags


def server_env(scenario: Scenario, experts: bool) -> dict[str, str]:
    """Environment variables that the scenario sets; the user's own come after and win."""
    env = {"SGLANG_ENABLE_METRICS_DEVICE_TIMER": "1", "HF_HUB_OFFLINE": "1"}
    if scenario.tp > 1:
        env |= MULTICAST_OFF
    if scenario.method != "none" and (scenario.weights == "dummy" or scenario.accept_length is not None):
        most = (scenario.num_steps or scenario.rows - 1) + 1
        env["SGLANG_SIMULATE_ACC_LEN"] = f"{scenario.accept_length or min(2, most):g}"
        env["SGLANG_SIMULATE_ACC_METHOD"] = "match-expected"
    if experts:
        env["SGLANG_SIMULATE_UNIFORM_EXPERTS"] = "1"
    return env | scenario.env


UNIFORM = Correction(
    what="simulated uniform routing (SGLANG_SIMULATE_UNIFORM_EXPERTS): tiny kernels that draw the experts at random",
    kernels_per_moe_layer=8,
    us_per_moe_layer=11.0,
    applies_to=["decode", "verify"],
)


@dataclass
class Recorder:
    """A record that is on disk after every point. Raises WorkError when it cannot be written."""

    record: Record
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{self.record.name}.json"

    def save(self) -> None:
        text = json.dumps(self.record.model_dump(by_alias=True, exclude_none=True), indent=1)
        text = re.sub(r"\[[-+.\de,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)  # numbers on one line
        write_atomically(self.path, text + "\n")


def measure_all(
    client: Client,
    served: Served,
    recorder: Recorder,
    pairs: Sequence[tuple[int, int]],
    plan: Plan,
    log: LogTail | None,
    say: Say,
    deadline: float,
) -> int:
    """Measure and save each (batch, context); the number that failed. Raises ServerError when the server is gone."""
    failed = 0
    for batch, context in pairs:
        if time.monotonic() + 0.5 * plan.point_s > deadline:
            recorder.record.caveats.append(
                f"the time limit left out batch {batch} at context {context} and what follows"
            )
            say("  the time limit is reached")
            recorder.save()
            return failed + 1
        done = len(recorder.record.points)
        try:
            recorder.record.points.append(
                measure(client, served, batch, context, plan, log, lambda text: say(f"  {text}"))
            )
        except PointError as error:
            failed += 1
            say(f"  batch {batch} context {context}: {error}")
            recorder.record.caveats.append(f"batch {batch} at context {context} failed: {error}")
        except ServerError as error:
            recorder.record.caveats.append(f"stopped at batch {batch}, context {context}: {error}")
            recorder.save()
            raise
        now = identify(client)
        if (now.version, now.model) != (served.version, served.model):
            del recorder.record.points[done:]  # it ran on two servers
            what = f"{served.model} {served.version} became {now.model} {now.version}"
            recorder.record.caveats.append(f"the server changed during batch {batch}, context {context}: {what}")
            recorder.save()
            raise ServerError(f"the server changed while it was measured: {what}")
        recorder.save()
    return failed


METHOD = (
    "token-id requests of fixed length, one POST a batch; time of the longest request against its steps at four "
    "lengths, repeated, robust regression with an 80 % interval; phases: slope of the engine's CUDA-event timers, "
    "averaged over ranks; "
    "context is the mean over the measurement; raw timings with each point"
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
    deadline: float = float("inf"),
    request_timeout: float = 300.0,
) -> tuple[Path, int]:
    """Measure a server that already runs. The record's path and how many points failed. Raises WorkError.

    model: where its config.json is, if not where the server says; log: the server's log file, if it can be read here.
    """
    client = Client(url, request_timeout)
    served = identify(client)
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
    record.engine = EngineRun(name=served.engine, version=served.version, flags=flags_of(served))
    record.target_config = _find_config(model or Path(served.model))
    draft = served.info.get("speculative_draft_model_path")
    record.draft_config = _find_config(Path(str(draft))) if draft else None
    if record.target_config is None:
        record.caveats.append("the model's config.json was not found from here: replay needs it (give --model DIR)")
    record.caveats.append("other users' requests, if there were any, slow the steps down")
    recorder = Recorder(record, folder)
    tail = LogTail(log) if log is not None else None
    failed = measure_all(client, served, recorder, pairs, plan, tail, say, deadline)
    if not record.points:
        raise WorkError(f"{client.url}: no point could be measured; see the lines above")
    return recorder.path, failed


def run_scenario(
    scenario: Scenario,
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
    where = f"scenario {scenario.name}"
    config = config_of(scenario.model, "target")
    draft_config = config_of(scenario.draft, "draft") if scenario.draft else None
    experts = (
        moe_layers(config) > 0 and scenario.weights == "dummy"
        if scenario.uniform_experts is None
        else scenario.uniform_experts
    )
    env = server_env(scenario, experts)
    if not multicast:
        refuse_multicast(scenario.flags, env, where)
    with ExitStack() as stack:
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specsim-")))
        model = _as_folder(scenario.model, models / "target")
        draft = _as_folder(scenario.draft, models / "draft") if scenario.draft else None
        chosen = free_port(port)
        flags = server_flags(scenario, model, draft, chosen)
        record = Record(
            kind="validation", name=scenario.name, date=_now(), source="specsim validate --launch", method=METHOD
        )
        record.engine = EngineRun(name="sglang", flags=_portable(flags, scenario), env=env)
        record.target_config, record.draft_config = config, draft_config
        if experts:
            record.corrections.append(UNIFORM)
        if scenario.weights == "dummy":
            record.caveats.append("dummy weights" + ("; acceptance is simulated" if scenario.method != "none" else ""))
        if scenario.about:
            record.caveats.append(scenario.about)
        log = folder / "logs" / f"{scenario.name}.log"
        say(f"{scenario.name}: starting {' '.join(command)} {' '.join(flags)}")
        server = stack.enter_context(Launched([*command, *flags], env, chosen, log, request_timeout))
        took = server.wait(min(start_timeout, max(deadline - time.monotonic(), 1.0)), say)
        say(f"{scenario.name}: healthy after {took:.0f} s")
        served = identify(server.client)
        record.engine.version = served.version
        record.environment = {**_environment(served), **_gpu(), "start_s": round(took, 1)}
        if moe_layers(config):
            record.environment["routing"] = scenario.routing or ("uniform" if experts else "as the weights have it")
        recorder = Recorder(record, folder)
        recorder.save()
        try:
            failed = measure_all(server.client, served, recorder, scenario.pairs(), plan, LogTail(log), say, deadline)
            if scenario.profile and time.monotonic() + 30 < deadline:
                failed += _profile(server.client, served, scenario, recorder, say)
        except ServerError as error:
            if not server.alive:
                for line in server.last_lines():
                    say(f"  | {line}")
                raise ServerError(f"{where}: the server died: {server.reason()} (log: {log})") from None
            raise ServerError(f"{where}: {error}") from None
        if not record.points:
            raise WorkError(f"{where}: no point could be measured; see the lines above")
        return recorder.path, failed


def run_list(
    scenarios: Sequence[Scenario], run: Callable[[Scenario], tuple[Path, int]], say: Say, deadline: float, plan: Plan
) -> tuple[list[Path], list[str]]:
    """Run scenario after scenario, going on after a failed one. The records' paths, and a line for each failure."""
    paths, failures = [], []
    for scenario in scenarios:
        left = deadline - time.monotonic()
        need = START_S + 0.6 * plan.point_s * min(len(scenario.pairs()), 2)
        if left < need:
            failures.append(
                f"{scenario.name}: not started: {max(left, 0):.0f} s of the time limit are left, {need:.0f} needed"
            )
            say(failures[-1])
            continue
        try:
            path, failed = run(scenario)
        except (WorkError, InputError) as error:
            failures.append(f"{scenario.name}: {error}")
            say(f"{scenario.name}: failed: {error}")
            continue
        paths.append(path)
        if failed:
            failures.append(
                f"{scenario.name}: {failed} of its points or profiles could not be measured (see its record's caveats)"
            )
    return paths, failures


def _profile(client: Client, served: Served, scenario: Scenario, recorder: Recorder, say: Say) -> int:
    """Save the kernel table of the scenario's first point beside its record; 1 when that failed."""
    batch, context = scenario.pairs()[0]
    try:
        table = kernels.profile(client, served, batch, context)
    except (PointError, InputError) as error:
        say(f"  profile: {error}")
        recorder.record.caveats.append(f"the kernel profile failed: {error}")
        recorder.save()
        return 1
    path = recorder.folder / f"{scenario.name}.kernels.json"
    write_atomically(path, json.dumps({"of": scenario.name, **table}, indent=1) + "\n")
    busy = f"{table['busy_ms_per_step']:.3f} ms busy"
    say(f"  profile: {table['kernels_per_step']:g} kernels a step, {busy}; saved as {path}")
    return 0


def _as_folder(path: Path, target: Path) -> str:
    """A folder that SGLang takes as a model: the given one, or a new one around the config file."""
    if path.is_dir():
        return str(path)
    target.mkdir()
    shutil.copyfile(path, target / "config.json")
    return str(target)


def _portable(flags: list[str], scenario: Scenario) -> list[str]:
    """The flags without this run's temporary paths and port."""
    names = {"--model-path": scenario.model, "--speculative-draft-model-path": scenario.draft}
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
        "attention_backend",
        "moe_runner_backend",
        "page_size",
        "cuda_graph_config",
    )
    return {"engine_version": served.version} | {k: served.info[k] for k in keys if served.info.get(k) is not None}


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
