"""Starting SGLang for a measurement, and stopping it with all its children, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from specsim.errors import InputError, WorkError
from specsim.host_speed import stat_of
from specsim.live import Client, PointError, ServerError
from specsim.redaction import hide, own_secrets

# NVLink multicast objects can put a host's GPUs out of service for everybody on it: off unless asked for by name.
MULTICAST_FLAGS = ("--enable-torch-symm-mem", "--enable-symm-mem", "--enable-nccl-nvls", "--enable-mscclpp")
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
PROC = Path("/proc")  # where the system has none (macOS), a server is known by the process group that it leads
MARK = "SPECSIM_SERVER"  # variable of the server and all that it starts
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LISTENS = "0A"  # a socket's state in /proc/net/tcp
SAFE_FLAG = "--enforce-disable-flashinfer-allreduce-fusion"


class NotInstalledError(WorkError):
    """There is no engine to start: no set-up of a list can be."""


def refuse_multicast(flags: Sequence[str], env: Mapping[str, str], where: str) -> None:
    """Raises InputError for a flag (or its abbreviation) or variable that makes NVLink multicast objects."""
    for flag in flags:
        name = flag.split("=")[0]
        if len(name) > len("--enable-") and any(refused.startswith(name) for refused in MULTICAST_FLAGS):
            raise InputError(
                f"{name} makes NVLink multicast objects", where=where, mend="leave it out, or give --allow-multicast"
            )
    for variable, off in MULTICAST_OFF.items():
        if env.get(variable, off) != off:
            mend = "leave it out, or give --allow-multicast"
            raise InputError(f"{variable}={env[variable]} allows NVLink multicast", where=where, mend=mend)


def free_port(wanted: int | None, host: str = "127.0.0.1") -> int:
    """`wanted` if nobody listens there; when none is wanted, one that the system chooses, so that two runs that start at once do
    not take the same. Raises WorkError when `wanted` is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted or 0))
        except OSError:
            mend = "stop what listens there, or leave --port out and a free one is chosen"
            raise WorkError(f"port {wanted} of {host} is taken; {mend}") from None
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """In the child, before it runs: have the kernel kill it when this process dies (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _stat(pid: int) -> tuple[int, int, str] | None:
    """Parent, session and state of a process, or None when it is gone."""
    fields = stat_of(PROC / str(pid))
    return (int(fields[1]), int(fields[3]), fields[0]) if fields else None


def tree(root: int, mark: str = "") -> set[int]:
    """Living processes that descend from `root`, belong to its session or were started with `mark` in their environment (those
    that left both, as daemons do), itself included. Without /proc, `root` alone, which stands for its group."""
    if not PROC.is_dir():
        return {root} if _alive(root) else set()
    found: dict[int, tuple[int, int, str]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) and stat[2] not in "ZX":
            found[int(entry.name)] = stat
    members = {pid for pid, (_, session, _) in found.items() if root in (session, pid) or (mark and _marked(pid, mark))}
    grown = True
    while grown:
        more = {pid for pid, (parent, _, _) in found.items() if parent in members} - members
        members |= more
        grown = bool(more)
    return members - {os.getpid()}


def listeners(client: Client) -> set[int]:
    """The processes that listen at a server's port, where it is one on this machine and this user may see them (Linux)."""
    return _listening(client.port or (443 if client.secure else 80)) if client.host in LOOPBACK else set()


def _listening(port: int) -> set[int]:
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in (line.split() for line in Path(table).read_text().splitlines()[1:]):
                if row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{row[9]}]")
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):
            if os.readlink(link) in sockets:
                found.add(int(link.parts[2]))
    return found


def _marked(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it is gone, or another user's
        return False


class Launched:
    """A server process in a session of its own. A context manager: leaving it stops the server and its children."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], port: int, log: Path, timeout: float = 300.0
    ) -> None:
        self.command, self.env, self.log = list(command), dict(env), log
        self.client = Client(f"http://127.0.0.1:{port}", timeout)
        self._secrets = own_secrets(self.command, self.env)
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = f"{MARK}={os.getpid()}-{port}-{time.monotonic_ns()}"

    def __enter__(self) -> Launched:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("wb") as output:
                self._process = subprocess.Popen(
                    self.command,
                    env={**os.environ, **self.env, MARK: self._mark.partition("=")[2]},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                )
        except OSError as error:
            raise WorkError(f"the server could not be started: {error.strerror or error} ({error.filename})") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._hide_secrets()

    def _hide_secrets(self) -> None:
        """Engines write their launch flags into their log, an API key too: take it out."""
        if not self._secrets:
            return
        with contextlib.suppress(OSError):
            text = self.log.read_text("utf-8", "surrogateescape")
            if (hidden := hide(text, self._secrets)) != text:
                self.log.write_text(hidden, "utf-8", "surrogateescape")

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def members(self) -> set[int]:
        """The server's living processes."""
        return tree(self._process.pid) if self._process else set()

    def died(self, seconds: float = 3.0) -> bool:
        """Whether the process has ended, or ends within `seconds`: a connection breaks before its server is gone."""
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.alive

    def last_lines(self, count: int = 12) -> list[str]:
        """The log's last lines that say something."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log.stat().st_size - 65536, 0))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        return [hide(line.rstrip(), self._secrets) for line in lines if line.strip()][-count:]

    def reason(self) -> str:
        """The log's last line that names an error, else its last line."""
        lines = self.last_lines(200)
        errors = [
            line for line in lines if "Error" in line or "error:" in line or "Exception" in line or "Killed" in line
        ]
        return " ".join((errors or lines or ["its log is empty"])[-1].split())[:300]

    def wait(self, seconds: float, say: Callable[[str], None]) -> float:
        """Wait until the server is healthy; the seconds it took. Raises ServerError when it dies or takes longer."""
        start = time.monotonic()
        told = start
        while True:
            if not self.alive:
                code = self._process.returncode if self._process else None
                for line in self.last_lines():
                    say(f"  | {line}")
                reason = self.reason()
                if "No module named 'sglang" in reason:
                    raise NotInstalledError(
                        "SGLang is not installed in this Python; install it there or give --server-command"
                    )
                raise ServerError(f"the server died while starting (exit code {code}): {reason} (log: {self.log})")
            try:
                self.client.ask("GET", "/health", timeout=15)
                return time.monotonic() - start
            except (ServerError, PointError):
                pass
            now = time.monotonic()
            if now - start > seconds:
                for line in self.last_lines():
                    say(f"  | {line}")
                raise ServerError(
                    f"the server was not healthy within {seconds:g} s; its log ends: {self.reason()} (log: {self.log})"
                )
            if now - told > 30:
                told = now
                last = " ".join("".join(self.last_lines(1)).split())[:120]
                say(f"  waiting for the server, {now - start:.0f} s: {last}")
            time.sleep(min(0.05 + (now - start) / 10, 0.5))

    def stop(self, grace: float = 3.0) -> None:
        """Stop the server and every process that it started: politely first, then by force. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        members = tree(process.pid, self._mark)
        try:
            _signal(members, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline:
                process.poll()
                members |= tree(process.pid, self._mark)
                if not any(_alive(pid) for pid in members):
                    break
                time.sleep(0.1)
        finally:  # also when a second Ctrl-C cuts the grace short
            _signal({pid for pid in members | tree(process.pid, self._mark) if _alive(pid)}, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            deadline = time.monotonic() + 10
            while any(_alive(pid) for pid in members) and time.monotonic() < deadline:
                time.sleep(0.1)


def _alive(pid: int) -> bool:
    if not PROC.is_dir():
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter where all of a group have ended
            os.killpg(pid, 0)
            return True
        return False
    stat = _stat(pid)
    return stat is not None and stat[2] not in "ZX"


def _signal(pids: set[int], number: signal.Signals) -> None:
    send = os.kill if PROC.is_dir() else os.killpg
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
