"""One process a GPU: takes the stage's measurements, one case after the other, and writes each result at once.

`launch` starts one process a node, as specsim.calibration.worker STAGE.json FIRST COUNT: it loads torch and forks
the ranks from FIRST on, COUNT of them (on GPUs each rank loads torch itself), since eight processes that load it take longer than many a
stage; and it prints a line "LOCAL_RANK CODE" for each that has ended. torchrun can start the ranks as well, as `... STAGE.json`
with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. Files in the stage's folder, all written atomically:

    <stage>.cases.json       the cases to come, with estimates (rank 0)
    <stage>.rank<N>.json     what the rank is doing, since when: the watchdog reads it
    done/<key>.json          a finished measurement, or the error that it ended in
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from specsim.calibration.allreduce import groups
from specsim.calibration.context import Case, Context, Measurement, case_document, dumps, log_of, spread

from specsim.errors import WorkError
from specsim.files import write_atomically

GPU_LOST = 3  # exit code: this process cannot measure any more and must be replaced
DISK_FULL = 4  # exit code: a result could not be written
MEET_S = 8.0  # how long a rank whose case failed waits for the others to come through


def main(arguments: list[str]) -> int:
    _die_with_parent(os.getppid())
    path = Path(arguments[0])
    return _ranks(path, *map(int, arguments[1:])) if len(arguments) > 1 else _rank(path)


def _ranks(path: Path, first: int, count: int) -> int:
    """Fork the ranks of this node, and tell the codes with which they end."""
    stage = json.loads(path.read_text())
    if stage["cpu"]:  # on GPUs each rank loads it itself: nothing of CUDA is in a process that forks
        import torch.distributed  # noqa: F401

    own, local_ranks = os.getpid(), {}
    for local in range(count):
        pid = os.fork()
        if pid == 0:
            _die_with_parent(own)
            log = log_of(Path(stage["folder"]), stage["name"], first + local)
            file = os.open(log, os.O_WRONLY | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(file, stream)
            os.environ |= {"RANK": str(first + local), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(count)}
            return _rank(path)
        local_ranks[pid] = local
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which ends the ranks: this process outlives them
    while local_ranks:
        pid, status = os.wait()
        sys.stdout.write(f"{local_ranks.pop(pid)} {os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    return 0


def _rank(path: Path) -> int:
    stage = json.loads(path.read_text())
    reporter = Reporter(Path(stage["folder"]), stage["name"], int(os.environ["RANK"]), path.stem)
    try:
        reporter.state("starting", "joining the group", timeout_s=float(stage.get("start_timeout_s", 180)))
        context = _context(stage)
        code = _run(context, stage, reporter)
        if code == 0:  # else its last state says what went wrong
            reporter.state("finished", "waiting for the other ranks", timeout_s=1e9)
    except WorkError as error:
        _log(str(error))
        return DISK_FULL
    if code == 0 and context.world > 1:
        import torch.distributed as dist

        dist.barrier()
    return code


def _run(context: Context, stage: dict[str, Any], reporter: Reporter) -> int:
    skip = set(stage["skip"])
    given_up = [tuple(what) for what in stage.get("given_up", ())]
    modules = {n: importlib.import_module(n if "." in n else f"specsim.calibration.{n}") for n in stage["measures"]}
    without = set(stage["options"].get("without", ()))
    planned = [
        (modules[name], case)
        for name in stage["measures"]
        for case in modules[name].cases(context)
        if case.operator not in without and _compile_key(case) not in skip
    ]
    cases = [case for _, case in planned]
    if context.rank == 0:
        document = {"cases": [case_document(c) for c in cases], "environment": _environment(context)}
        write_atomically(reporter.folder / f"{stage['name']}.cases.json", dumps(document))
    for n in sorted({c.ranks for m, c in planned if m.RANKS == "groups"}):  # every rank makes every group, in one order
        reporter.state("starting", f"connecting {n} ranks", timeout_s=120.0)
        groups(context, n)
    for module, case in planned:
        key = case.key
        if key in skip or context.rank >= case.ranks:
            continue
        if (case.measure, case.operator, case.ranks) in given_up:
            if context.rank == 0:
                why = f"not tried: {case.operator} over {case.ranks} ranks hung or ended its processes more than once"
                reporter.failed(key, case, time.time(), RuntimeError(why))
            continue
        if not _prepare(context, module, case, reporter):
            return GPU_LOST
        reporter.state("running", case.size, timeout_s=case.timeout_s, key=key)
        if not _one(context, module, case, key, reporter):
            return GPU_LOST
    return 0


def _compile_key(case: Case) -> str:
    """What a compilation that ran out of time is recorded under: the kernel's cases are not tried after it."""
    return f"{case.measure}.{case.operator}.compile"


def _prepare(context: Context, module: Any, case: Case, reporter: Reporter) -> bool:
    """Let a kernel compile at its first use over so many ranks, in a time of its own. What goes wrong on all ranks is told by
    its cases, which meet it again. False when the others hang in it: the process must be replaced."""
    seconds = module.compile_s(case) if hasattr(module, "compile_s") else 0.0
    prepared: set[tuple[str, int]] = context.cache.setdefault("prepared", set())
    if not seconds or (case.operator, case.ranks) in prepared:
        return True
    prepared.add((case.operator, case.ranks))
    doing = f"compiling {case.operator} at its first use, up to {seconds / 60:.0f} minutes"
    key = _compile_key(case)
    reporter.state("compiling", doing, timeout_s=seconds, key=key)
    try:
        module.prepare(context, case)
        return _meet(context, case, f"{key}-{case.ranks}", wait=False)
    except Exception as error:
        _log(f"{doing}:\n{traceback.format_exc()}")
        if _meet(context, case, f"{key}-{case.ranks}", wait=True):
            return True
        _give_up(context)
        reporter.state("error", doing, key=key, error=f"{type(error).__name__}: {error}"[:300])
        return False


def _one(context: Context, module: Any, case: Case, key: str, reporter: Reporter) -> bool:
    """Measure one case and write its result. False when the process must be replaced."""
    started = time.time()
    try:
        measured: Measurement = module.run(context, case)
        if context.rank == 0:
            reporter.done(key, case, started, measured)
        elif module.RANKS == "all":
            reporter.done(f"{key}.rank{context.rank}", case, started, measured, rank=context.rank)
        _meet(context, case, key, wait=False)
        return True
    except WorkError:
        raise
    except Exception as error:
        _log(f"{case.size}:\n{traceback.format_exc()}")
        lost = _cuda_lost(context, error)
        reporter.failed(key, case, started, error)
        if not lost and not _meet(context, case, key, wait=True):  # the others hang in it: all must be replaced
            lost = True
        if lost:
            _give_up(context)
            reporter.state("error", case.size, key=key, error=f"{type(error).__name__}: {error}"[:300])
    for name in ("moe_path", "moe_key"):
        context.cache.pop(name, None)
    if context.gpu and not lost:
        import torch

        torch.cuda.empty_cache()
    return not lost


def _meet(context: Context, case: Case, key: str, *, wait: bool) -> bool:
    """Tell the other ranks of a case that this one is through; with `wait`, whether all of them are within seconds and none
    has given up. One that gives up says so before it goes: its end is an error in the others, of the same case."""
    if case.ranks < 2:
        return True
    store = context.cache["store"]
    store.set(f"through/{key}/{context.rank}", "1")
    if not wait:
        return True
    try:
        store.wait([f"through/{key}/{r}" for r in range(case.ranks)], timedelta(seconds=MEET_S))
        return not store.check(["lost"])
    except Exception:  # torch raises its own store errors, by version
        return False


def _give_up(context: Context) -> None:
    if context.world > 1:
        with contextlib.suppress(Exception):  # the rank that holds the store may be gone
            context.cache["store"].set("lost", str(context.rank))


def _cuda_lost(context: Context, error: Exception) -> bool:
    """Whether CUDA refuses further work: after an illegal access every call fails."""
    if not context.gpu:
        return False
    import torch

    try:
        torch.ones(1, device=context.device).add_(1)
        torch.cuda.synchronize(context.device)
        return False
    except Exception:
        return True


class Reporter:
    """Writes the rank's state and the results. Raises WorkError when the disk is full: the launcher then stops."""

    def __init__(self, folder: Path, stage: str, rank: int, attempt: str) -> None:
        self.folder, self.stage, self.rank, self.attempt = folder, stage, rank, attempt
        self.step = 0

    def state(self, state: str, operation: str, *, timeout_s: float = 60.0, key: str = "", error: str = "") -> None:
        self.step += 1
        document = {
            "rank": self.rank, "pid": os.getpid(), "attempt": self.attempt, "state": state, "operation": operation, "key": key,
            "step": self.step, "since": time.time(), "timeout_s": timeout_s, "error": error, "log_bytes": _log_bytes(),
        }  # fmt: skip
        write_atomically(self.folder / f"{self.stage}.rank{self.rank}.json", dumps(document))

    def done(self, key: str, case: Case, started: float, m: Measurement, rank: int = 0) -> None:
        if not m.seconds or not all(0 <= s < 1e6 for s in m.seconds):
            raise RuntimeError("the timer gave no usable sample")
        document = {
            **case_document(case), "key": key, "stage": self.stage, "status": "done", "rank": rank, "narrow": m.narrow,
            "calls": m.calls, "seconds": [float(f"{s:.5g}") for s in m.seconds[:100]], "spread": spread(m.seconds), "extras": m.extras,
            "took_s": time.time() - started, "at": started,
        }  # fmt: skip
        if "bytes" in m.extras:
            document["bytes"] = m.extras["bytes"]
        write_atomically(self.folder / "done" / f"{key}.json", dumps(document))

    def failed(self, key: str, case: Case, started: float, error: Exception) -> None:
        """The first rank's account stays: the others' errors follow from it."""
        path = self.folder / "done" / f"{key}.json"
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text())["status"] == "failed":
                return
        document = {
            **case_document(case), "key": key, "stage": self.stage, "status": "failed", "rank": self.rank,
            "error": f"rank {self.rank}: {type(error).__name__}: {error}"[:500],
            "traceback": traceback.format_exc()[-3000:], "took_s": time.time() - started, "at": started,
        }  # fmt: skip
        write_atomically(path, dumps(document))


def _log(text: str) -> None:
    """Into this process's log, which may be on the disk that is full."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")


def _log_bytes() -> int:
    """How long this process's log is by now, 0 where it has none."""
    try:
        return os.fstat(sys.stderr.fileno()).st_size
    except (OSError, ValueError):
        return 0


def _context(stage: dict[str, Any]) -> Context:
    import torch
    import torch.distributed as dist

    if not (stage["cpu"] or torch.cuda.is_available()):
        raise RuntimeError(f"PyTorch {torch.__version__} sees no GPU here: install a CUDA build that the driver knows")
    local = int(os.environ["LOCAL_RANK"])
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=120)))
    if stage["cpu"]:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    else:
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=world)
    context = Context(rank, world, local, device, stage["quick"], stage["shapes"], stage["options"])
    context.cache["store"] = dist.PrefixStore("cases", store)
    torch.set_grad_enabled(False)
    return context


def _environment(context: Context) -> dict[str, Any]:
    import platform

    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "ranks": context.world}
    if context.gpu:
        properties = torch.cuda.get_device_properties(context.device)
        found |= {
            "gpu": properties.name, "cuda": torch.version.cuda, "memory_bytes": properties.total_memory,
            "l2_bytes": context.l2_bytes, "processors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }  # fmt: skip
        with contextlib.suppress(Exception):
            found["nccl"] = ".".join(str(v) for v in torch.cuda.nccl.version())
        for package in ("triton", "sglang", "sgl_kernel"):
            with contextlib.suppress(Exception):
                from importlib.metadata import version

                found[package] = version({"sgl_kernel": "sglang-kernel"}.get(package, package))
    else:
        found |= {
            "gpu": platform.processor() or platform.machine() or "CPU",
            "memory_bytes": _host_memory(),
            "cpu": True,
        }
    found["settings"] = {
        k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "TORCH_SYMM", "NVSHMEM_"))
    }
    return found


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 2**30


def _die_with_parent(parent: int) -> None:
    """On Linux the kernel kills this process when its launcher dies, however it dies."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # no destructors: a communicator that waits for lost ranks must not keep this process
