"""Starting and watching the worker processes of a stage: one a GPU, in process groups of their own.

The watchdog reads each rank's state file. A rank that stays in one operation beyond its time, an error that leaves other
ranks waiting, or a process that dies ends the attempt: the operation, its size and the ranks are named and recorded as
failed, every process is killed, and a new set of workers goes on with the next case. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specsim.calibration.children import running
from specsim.calibration.context import dumps, log_of

from specsim.errors import WorkError
from specsim.files import write_atomically
from specsim.records import sample_trouble

GRACE_S = 3.0  # between asking a process to end and killing it, and between a rank's error and the others' end
MOST_ATTEMPTS = 12
MOST_LOSSES = 2  # processes that one operator over one number of ranks may cost; its other sizes would cost more
DISK_FULL = 4
FIRST_NODE_S = 300.0  # how long another node's launcher waits for a sign of the first
ENDED = "ended"  # among the stages' files: they are of a run that has ended

# Multicast objects on NVLink can put a shared host's GPUs out of service: never made unless asked for.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True)
class Stage:
    """Measurements that share worker processes: `ranks` of them in all, with `environment` set on top of ours."""

    name: str
    measures: tuple[str, ...]
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What all stages of a run share. node, nodes and master place this launcher among those of other nodes."""

    folder: Path
    cpu: bool = False
    quick: bool = False
    shapes: dict[str, Any] = field(default_factory=dict)
    allow_multicast: bool = False
    node: int = 0
    nodes: int = 1
    master: str = ""  # HOST:PORT, for several nodes
    start_timeout_s: float = 180.0


Event = Callable[[str, dict[str, Any]], None]


def run_stage(stage: Stage, setting: Setting, event: Event, *, number: int = 0) -> list[str]:
    """Run a stage to its end and return the troubles met, as sentences. Raises WorkError when the disk is full.

    event(kind, details) is called with "poll" several times a second, with "trouble", and with "unfinished" where the stage
    ends before its cases do. Leaves no process behind, whatever ends it. On several nodes the first one leads: the others wait for its files in the shared folder.
    """
    over = setting.folder / "stages" / f"{stage.name}.over"
    if setting.node > 0 and stage.ranks == 1:
        return []  # single-rank stages run on the first node
    troubles: list[str] = []
    lost: Counter[tuple[str, str, int]] = Counter()
    try:
        for attempt in range(MOST_ATTEMPTS):
            path = setting.folder / "stages" / f"{stage.name}.{attempt}.json"
            if setting.node == 0:
                _write_stage(path, stage, setting, [what for what, n in lost.items() if n >= MOST_LOSSES])
            elif not _appears(path, over, setting, event):
                return troubles
            trouble = _attempt(stage, setting, path, number * MOST_ATTEMPTS + attempt, event)
            if trouble is None:
                return troubles
            text, key = trouble
            troubles.append(text)
            event("trouble", {"text": text})
            if not key:  # it did not get as far as a case: trying again would end the same way
                event("unfinished", {"text": text})
                return troubles
            _record_failure(setting.folder, stage, key, text)
            lost[_what(setting.folder, stage, key)] += 1
        text = f"{stage.name}: given up after {MOST_ATTEMPTS} attempts"
        event("unfinished", {"text": text})
        return [*troubles, text]
    finally:
        if setting.nodes > 1 and setting.node == 0:
            write_atomically(over, "")


def wait_for_the_run(setting: Setting, event: Event) -> None:
    """Wait until the first node has begun, where the folder holds the stages of a run that ended: they are not this run's.
    event and WorkError: as of `run_stage` and `_wait`."""
    _wait(lambda: not (setting.folder / "stages" / ENDED).exists(), setting, event)


def _appears(path: Path, over: Path, setting: Setting, event: Event) -> bool:
    """Wait until the first node begins an attempt (True) or has ended the stage (False)."""
    _wait(lambda: path.exists() or over.exists(), setting, event)
    return path.exists()


def _wait(reached: Callable[[], bool], setting: Setting, event: Event) -> None:
    """Wait for what the first node does. Raises WorkError when it has not written anything for FIRST_NODE_S beyond what it is
    doing may take."""
    signs, since = _signs(setting.folder), time.monotonic()
    while not reached():
        time.sleep(0.1)
        event("poll", {"waiting": f"waiting for the first node ({setting.master})"})
        if (now := _signs(setting.folder)) != signs:
            signs, since = now, time.monotonic()
        elif (silent := time.monotonic() - since) > FIRST_NODE_S + signs[1]:
            raise WorkError(
                f"the first node ({setting.master}) gave no sign for {silent:.0f} s: run the same line there with --node-rank 0,"
                f" and --out a folder that every node sees ({setting.folder})"
            )


def _signs(folder: Path) -> tuple[frozenset[tuple[str, int]], float]:
    """What the first node has written of its stages and ranks, and how long what its ranks do may take, in seconds."""
    found, longest = set(), 0.0
    for path in (*folder.glob("stages/*"), *folder.glob("*.rank*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found.add((path.name, path.stat().st_mtime_ns))
            state = json.loads(path.read_text()) if ".rank" in path.name else {}
            if state.get("state") in ("starting", "compiling", "running"):
                longest = max(longest, float(state["timeout_s"]))
    return frozenset(found), longest


def finished(folder: Path) -> set[str]:
    """Keys of the cases with a result, good or bad."""
    return {p.name[:-5] for p in (folder / "done").glob("*.json")}


def results(folder: Path) -> list[dict[str, Any]]:
    """All results, in order of their keys. A file that is not whole is left out."""
    found = (result_of(path) for path in sorted((folder / "done").glob("*.json")))
    return [result for result in found if result is not None]


def result_of(path: Path) -> dict[str, Any] | None:
    """The result in a file of `done`; None where it is not whole, as after a machine's crash."""
    with contextlib.suppress(OSError, ValueError):
        result: dict[str, Any] = json.loads(path.read_text())
        return None if sample_trouble(result) else result
    return None


def _write_stage(path: Path, stage: Stage, setting: Setting, given_up: list[tuple[str, str, int]]) -> None:
    """What the workers need to know, before they start. given_up: measure, operator and ranks that are not tried again."""
    for old in setting.folder.glob(f"{stage.name}.rank*.json"):
        old.unlink(missing_ok=True)
    document = {
        "name": stage.name, "folder": str(setting.folder), "measures": list(stage.measures), "cpu": setting.cpu,
        "quick": setting.quick, "shapes": setting.shapes, "skip": sorted(finished(setting.folder)),
        "options": stage.options, "given_up": given_up, "start_timeout_s": setting.start_timeout_s,
    }  # fmt: skip
    write_atomically(path, dumps(document))


def _case(folder: Path, stage: Stage, key: str) -> dict[str, Any]:
    """A case as the stage's workers planned it; {} where they have not said so."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        cases = json.loads((folder / f"{stage.name}.cases.json").read_text())["cases"]
        return next((case for case in cases if case["key"] == key), {})
    return {}


def _what(folder: Path, stage: Stage, key: str) -> tuple[str, str, int]:
    """Measure, operator and ranks of a case."""
    case = _case(folder, stage, key)
    return (case["measure"], case["operator"], case["ranks"]) if case else ("", key, 0)


def _attempt(stage: Stage, setting: Setting, path: Path, turn: int, event: Event) -> tuple[str, str] | None:
    """None when all ranks of this node ended well, else (what went wrong, key of the case or "")."""
    count = stage.ranks // setting.nodes if stage.ranks > 1 else 1
    first = setting.node * count
    with _ranks(stage, setting, path, first, count, turn) as ranks:
        return _watch(stage, setting, path.stem, ranks, first, event)


class Ranks:
    """The processes of one node's ranks, which one process has forked (see `worker`)."""

    def __init__(self, parent: subprocess.Popen[bytes], count: int) -> None:
        assert parent.stdout is not None
        self.parent, self._told = parent, parent.stdout
        self._codes: list[int | None] = [None] * count
        os.set_blocking(self._told.fileno(), False)

    def codes(self) -> list[int | None]:
        """Exit codes by local rank, -N of one that signal N ended, None of those that go on. Where their parent is gone, the
        ranks are."""
        ended = self.parent.poll()
        for line in (self._told.read() or b"").splitlines():
            with contextlib.suppress(ValueError, IndexError):  # libraries may print as well
                local, code = map(int, line.split())
                self._codes[local] = code
        if ended:
            self._codes = [ended if code is None else code for code in self._codes]
        return list(self._codes)


@contextlib.contextmanager
def _ranks(stage: Stage, setting: Setting, path: Path, first: int, count: int, turn: int) -> Iterator[Ranks]:
    host, port = "127.0.0.1", free_port()
    if setting.nodes > 1:
        host, base = setting.master.rsplit(":", 1)
        port = int(base) + turn
    environment = {**os.environ, **stage.environment, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPU numbers as nvidia-smi has them
    if not setting.allow_multicast:
        environment |= NO_MULTICAST
    if setting.nodes == 1:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # none that a fork would lose, either
        environment.setdefault(threads, "1")
    environment |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(stage.ranks)}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    logs = [log_of(setting.folder, stage.name, rank) for rank in range(first, first + count)]
    parent: subprocess.Popen[bytes] | None = None
    try:
        for path_of_log in logs:
            path_of_log.parent.mkdir(parents=True, exist_ok=True)
            path_of_log.open("ab").close()
        with logs[0].open("ab") as log:  # what goes wrong before there are ranks
            parent = subprocess.Popen(
                running("specsim.calibration.worker", str(path), str(first), str(count)),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=environment,
            )  # fmt: skip
        yield Ranks(parent, count)
    except OSError as error:
        raise WorkError(f"{setting.folder}: cannot be written: {error.strerror or error}") from None
    finally:
        if parent is not None:
            _kill(parent)


def _kill(parent: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, which are in its group: first by asking, then by force."""
    try:
        _end(parent, signal.SIGTERM)
    finally:  # also when a second Ctrl-C cuts the grace short
        _end(parent, signal.SIGKILL)
        if parent.stdout is not None:
            parent.stdout.close()


def _end(parent: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(parent.pid, sign)  # the session's leader: its group outlives it
    with contextlib.suppress(subprocess.TimeoutExpired):
        parent.wait(timeout=GRACE_S)


def free_port() -> int:
    """A port that is free at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _watch(
    stage: Stage, setting: Setting, attempt: str, ranks: Ranks, first: int, event: Event
) -> tuple[str, str] | None:
    def state(rank: int) -> dict[str, Any]:
        return _state(setting.folder, stage.name, rank, attempt)

    started = time.time()
    error_since: float | None = None
    while True:
        time.sleep(0.05)
        event("poll", {"stage": stage.name})
        codes = ranks.codes()
        states = [state(first + i) for i in range(len(codes))]
        if all(c == 0 for c in codes):
            return None
        if DISK_FULL in codes:
            raise WorkError(
                f"{setting.folder}: cannot be written (disk full?); free some space and run again with --resume"
            )
        dead = [i for i, c in enumerate(codes) if c not in (None, 0)]
        if dead:
            error_since = error_since or time.time()
            failing = [s for s in states if s.get("state") == "error"]
            if len(dead) == len(codes) or time.time() - error_since > 1.0 or failing:
                return _died(stage, setting, states, codes, dead, first)
        late = [s for s in states if s and s["state"] != "finished" and time.time() - s["since"] > s["timeout_s"]]
        if late:
            return _hung(stage, [state(rank) for rank in range(stage.ranks)])  # also those of other nodes
        if not any(states) and time.time() - started > setting.start_timeout_s:
            return f"{stage.name}: the workers did not start within {setting.start_timeout_s:.0f} s", ""


def _state(folder: Path, stage: str, rank: int, attempt: str) -> dict[str, Any]:
    """What the rank does, {} while it has not said so: on several nodes a rank of the attempt before may have written last."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / f"{stage}.rank{rank}.json").read_text())
        return found if found.get("attempt") == attempt else {}
    return {}


def _hung(stage: Stage, states: list[dict[str, Any]]) -> tuple[str, str]:
    running = [s for s in states if s and s["state"] != "finished"]
    behind = min(running, key=lambda s: (s["step"], s["since"]))
    if behind["state"] == "compiling":
        text = f"{stage.name}: not compiled within {behind['timeout_s']:.0f} s, so not measured; --resume lets it go on"
        return text, behind["key"]
    ranks = ", ".join(f"rank {s['rank']} in {s['operation']}" for s in running)
    seconds = time.time() - behind["since"]
    return f"{stage.name}: hung for {seconds:.0f} s: {behind['operation']} ({ranks})", behind["key"]


def _died(
    stage: Stage, setting: Setting, states: list[dict[str, Any]], codes: list[int | None], dead: list[int], first: int
) -> tuple[str, str]:
    culprit = min(dead, key=lambda i: _guilt(codes[i] or 0, states[i]))
    state, code = states[culprit], codes[culprit] or 0
    how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
    log = log_of(setting.folder, stage.name, first + culprit)
    why = state.get("error") or _last_line(log, state.get("log_bytes", 0))
    where = state.get("operation") or "its start"
    return f"{stage.name}: rank {first + culprit} {how} in {where}" + (f": {why}" if why else ""), state.get("key", "")


def _guilt(code: int, state: dict[str, Any]) -> tuple[int, float]:
    """Orders dead ranks, the one that brought the others down first: killed, then the first error, then aborted, then any."""
    if code < 0 and -code != signal.SIGABRT:  # an abort is how libraries answer a lost peer
        return 0, 0.0
    if state.get("error"):
        return 1, state["since"]
    return (2 if code < 0 else 3), 0.0


def _last_line(log: Path, begin: int) -> str:
    """The last line that was written after the first `begin` bytes."""
    with contextlib.suppress(OSError):
        said = log.read_bytes()[begin:].decode(errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""
    return ""


def _record_failure(folder: Path, stage: Stage, key: str, text: str) -> None:
    """A failed case's result. What a rank wrote of it stays, but that its error is what the launcher saw: the rank that
    writes is seldom the one that died. Of several nodes' launchers the first counts. A result that is there stays whole."""
    path = folder / "done" / f"{key}.json"
    measure, operator = key.split(".")[:2]
    document: dict[str, Any] = {"key": key, "stage": stage.name, "measure": measure, "operator": operator}
    document |= _case(folder, stage, key) | (result_of(path) or {})
    if document.get("status") == "done":
        return
    write_atomically(
        path, dumps({**document, "status": "failed", "error": text, "at": document.get("at", time.time())})
    )
