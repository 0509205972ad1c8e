"""Many tasks over processes, or over an existing Dask or Ray cluster, through joblib (docs/decisions/fanout.md).

Results come in the order of the tasks, whatever ran them. A task that fails is tried again; a dead worker costs its wave
of tasks, which is tried again too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from specsim.errors import InputError, SpecsimError, WorkError
from specsim.files import write_atomically

T = TypeVar("T")
R = TypeVar("R")
TRIES = 3
ALONE_S = 120.0  # without any worker, after which a cluster counts as gone
PACKAGES = {
    "fanout": ("joblib",),
    "dask": ("joblib", "distributed"),
    "ray": ("joblib", "ray"),
}  # by extra of the install
WAVE = 8  # tasks a worker gets at a time: bounds what is in flight


def run(function: Callable[[T], R], tasks: Sequence[T], *, jobs: int = 1, cluster: str | None = None) -> Iterator[R]:
    """`function` of every task, in order. jobs: processes here (-1: one a core); cluster: "dask://HOST:PORT" or "ray".

    Raises what a task raises after `TRIES` tries (SpecsimErrors at once), InputError when joblib or the cluster's
    package is missing or the cluster's name is wrong, WorkError when the cluster does not answer.
    """
    if cluster is None and jobs == 1:
        for task in tasks:
            yield _value(_tried(function, task))
        return
    check(jobs, cluster)
    joblib = import_module("joblib")
    with _backend(joblib, cluster, jobs):
        try:
            workers = max(1, joblib.effective_n_jobs(-1 if cluster else jobs))
        except TimeoutError:
            raise WorkError(f"{cluster}: has no workers, nothing was run; start some, and run again") from None
        for first in range(0, len(tasks), WAVE * workers):
            wave = tasks[first : first + WAVE * workers]
            for outcome in _wave(joblib, function, wave, cluster):
                yield _value(outcome)


def check(jobs: int, cluster: str | None) -> None:
    """Raise InputError where tasks cannot be run so: the number of processes, the cluster's name, all packages that lack."""
    if cluster is None and jobs == 1:
        return
    if not isinstance(jobs, int) or jobs == 0 or jobs < -1:
        raise InputError(f"{jobs!r} processes", where="--jobs", mend="give 1 or more, or -1 for one a core")
    kind = _kind(cluster)
    if kind not in PACKAGES:
        raise InputError(f"unknown cluster {cluster!r}", where="--cluster", mend="give dask://HOST:PORT or ray")
    if lacking := " and ".join(_lacking(PACKAGES[kind])):
        where = "--jobs" if kind == "fanout" else "--cluster"
        raise InputError(f"needs {lacking}", where=where, mend=f"pip install 'specsim[{kind}]'")


def parts_of(out: Path, mark: str) -> Path:
    """How the names of the files begin that finished tasks leave in a folder beside `out`, until `out` is whole.

    mark: what the tasks are; the folder is emptied when it is of others, and the names tell them apart where two runs have the
    same `out` at once. Raises InputError when it holds other files, and
    WorkError when it cannot be written.
    """
    folder = out.with_name(out.name + ".parts")
    try:
        if folder.exists() and (not (folder / "mark").exists() or (folder / "mark").read_text() != mark):
            if any(p.name != "mark" and not p.name.lstrip(".").startswith("part-") for p in folder.iterdir()):
                raise InputError(f"{folder} holds other files", where="--out", mend="name another file")
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        write_atomically(folder / "mark", mark)
    except OSError as error:
        raise WorkError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return folder / f"part-{mark[:16]}"


def cluster_of(options: dict[str, Any], cluster: str | None) -> str | None:
    """The cluster, which may stand among the engines as well (--engine dask://HOST:PORT), from where it is taken."""
    engine = options.get("engine") or ()
    words = engine.split(",") if isinstance(engine, str) else list(engine)
    found = [word.strip() for word in words if word.strip() == "ray" or word.strip().startswith(("ray://", "dask://"))]
    if not found:
        return cluster
    if len(found) + (cluster is not None) > 1:
        raise InputError("several clusters", where="--cluster", mend="give one")
    left = [word for word in words if word.strip() not in found]
    options["engine"] = (",".join(left) if isinstance(engine, str) else tuple(left)) or None
    return found[0]


@contextlib.contextmanager
def kept(out: Path | None, mark: Callable[[], str]) -> Iterator[Path | None]:
    """`parts_of(out, ...)` while `out` is in the making (None: nothing is kept), for what `mark()` says that the parts depend on and
    this version of specsim. The folder goes when `out` is whole, and when the work ends before any part of it is."""
    if out is None:
        yield None
        return
    parts = parts_of(out, hashlib.sha256(f"{version('specsim')}\n{mark()}".encode()).hexdigest())
    try:
        yield parts
    except BaseException:
        if all(path.name == "mark" for path in parts.parent.iterdir()):
            shutil.rmtree(parts.parent, ignore_errors=True)
        raise
    shutil.rmtree(parts.parent, ignore_errors=True)


def _wave(joblib: Any, function: Callable[[T], R], tasks: Sequence[T], cluster: str | None) -> list[R | Exception]:
    first: Exception | None = None
    for left in reversed(range(TRIES)):
        try:
            found: list[R | Exception] = joblib.Parallel()(joblib.delayed(_tried)(function, task) for task in tasks)
            return found
        except Exception as error:  # a worker died, or the cluster went away: not the task's own failure
            first = first or error  # later ones may only say that it is still away
            if not left:
                lines = str(first).splitlines()
                said = f"{type(first).__name__}{f': {lines[0]}' if lines else ''}"
                what = f"{cluster}: the cluster, or a worker of it, went away" if cluster else "a worker process died"
                raise WorkError(f"{what} ({said}); run again: with --out it goes on where it was") from error
    raise AssertionError


def _tried(function: Callable[[T], R], task: T) -> R | Exception:
    failure: Exception | None = None
    for _ in range(TRIES):
        try:
            return function(task)
        except SpecsimError as error:  # the same input would fail again
            return error
        except Exception as error:
            failure = error
    assert failure is not None
    return failure


def _value(outcome: R | Exception) -> R:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@contextlib.contextmanager
def _backend(joblib: Any, cluster: str | None, jobs: int) -> Iterator[None]:
    if cluster is None:
        with joblib.parallel_config(backend="loky", n_jobs=jobs):
            yield
    elif cluster.startswith("dask://"):
        distributed = import_module("distributed")
        address = cluster.removeprefix("dask://")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InputError(f"{cluster!r} names no host and port", where="--cluster", mend="give dask://HOST:PORT")
        try:
            socket.create_connection((host, int(port)), timeout=10).close()  # Dask itself would try for long
            client = distributed.Client(f"tcp://{address}", timeout=10, set_as_default=False)
        except (OSError, OverflowError) as error:
            raise WorkError(f"{cluster}: no Dask scheduler answers ({type(error).__name__}); nothing was run") from None
        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # that it goes away is told in our own line
        with client, _attended(client), joblib.parallel_config(backend="dask", client=client, n_jobs=-1):
            yield
    else:
        ray = import_module("ray")
        ours = not ray.is_initialized()
        try:
            ray.init(address="auto" if cluster == "ray" else cluster, ignore_reinit_error=True, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkError(f"{cluster}: no Ray cluster answers ({type(error).__name__}), nothing was run; start one: ray start --head") from None  # fmt: skip
        import_module("ray.util.joblib").register_ray()
        try:  # Ray prints what it tells of lost workers, where a document may be printed: not there, and not after it
            with contextlib.redirect_stdout(sys.stderr), joblib.parallel_config(backend="ray", n_jobs=-1):
                yield
        finally:
            if ours:
                ray.shutdown()


@contextlib.contextmanager
def _attended(client: Any) -> Iterator[None]:
    """Ends what waits for a Dask cluster whose scheduler is there and whose workers all went away: it would wait for ever."""
    over = threading.Event()

    def watch() -> None:
        since = time.monotonic()
        while not over.wait(ALONE_S / 20):
            try:
                alone = not client.nthreads()
            except Exception:  # the scheduler is busy, or went away, which what waits for it tells
                alone = False
            if not alone:
                since = time.monotonic()
            elif time.monotonic() - since > ALONE_S:
                client.close()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _kind(cluster: str | None) -> str:
    """What of PACKAGES tasks run with."""
    return "fanout" if cluster is None else str(cluster).partition("://")[0]


def _lacking(packages: Iterable[str]) -> Iterator[str]:
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            yield package
