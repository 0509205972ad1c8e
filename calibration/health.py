"""The box's health as nvidia-smi tells it: what is wrong, and what it costs. Measures nothing, takes seconds.

What: clocks, power limits, throttling, GPU kinds, peer access, PCIe generation and width, topology, ECC, MIG, processes.
Against: the GPU's own maxima and its neighbours. Units: MHz, W, MiB, as nvidia-smi prints them.
Data that peer access returns are compared too where `peers` can run (see calibration/peers.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from specsim import host_speed
from specsim.errors import WorkError

Level = Literal["error", "warning", "note"]
Runner = Callable[[list[str]], str]  # arguments of nvidia-smi -> its output

FIELDS = (
    "index", "name", "uuid", "driver_version", "pstate", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem",
    "power.draw", "power.limit", "power.default_limit", "clocks_event_reasons.active", "clocks_throttle_reasons.active",
    "temperature.gpu", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
    "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "mig.mode.current", "memory.used", "memory.total",
    "utilization.gpu", "compute_mode",
)  # fmt: skip
# Bits of the throttle reasons that cost time, and what they mean (NVML's nvmlClocksEventReasons)
REASONS = {
    0x2: "clocks set by hand", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "temperature (software)", 0x40: "temperature (hardware)", 0x80: "power brake",
}  # fmt: skip
DEADLINE_S = 15.0  # for everything
HIDDEN_MIB = 2048.0  # of memory in use without a process to be seen
LOST = re.compile(r"device handle|GPU is lost|fallen off", re.IGNORECASE)  # of a line in a GPU's place
GB_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}  # one direction, after encoding
P2P_WORDS = {
    "CNS": "the chipset does not support it", "GNS": "the GPU does not support it", "TNS": "the topology does not support it",
    "NS": "not supported", "DR": "disabled by a driver setting", "U": "unknown",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """Something wrong, or worth knowing, and what it costs."""

    level: Level
    what: str
    costs: str = ""

    @property
    def line(self) -> str:
        return f"{self.what}: {self.costs}" if self.costs else self.what


@dataclass
class Health:
    """What nvidia-smi said. gpus: one dictionary of FIELDS each; topology and p2p by pair "0-1"; peer_data: wrong values
    of 1 MB copied, by pair "from-to", for the pairs that were checked; cores: `host_speed.by_core`, by core."""

    gpus: list[dict[str, str]] = field(default_factory=list)
    topology: dict[str, str] = field(default_factory=dict)
    p2p: dict[str, str] = field(default_factory=dict)
    peer_data: dict[str, int] = field(default_factory=dict)
    processes: list[dict[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    cores: dict[str, list[float]] = field(default_factory=dict)

    @property
    def nvlink(self) -> bool:
        """Whether every pair of GPUs is joined by NVLink."""
        return bool(self.topology) and all(link.startswith("NV") for link in self.topology.values())

    def document(self) -> dict[str, Any]:
        return {
            "schema": "specsim.health/1",
            "healthy": not any(f.level in ("error", "warning") for f in self.findings),
            "findings": [asdict(f) for f in self.findings],
            "gpus": self.gpus, "topology": self.topology, "p2p": self.p2p, "peer_data": self.peer_data,
            "processes": self.processes, "cores_us": self.cores,
        }  # fmt: skip


def nvidia_smi(arguments: list[str], timeout_s: float = 15.0) -> str:
    """Output of nvidia-smi. Raises WorkError when there is none, or when it fails or takes long."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=timeout_s, encoding="utf-8",
            errors="replace", env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        raise WorkError(
            "nvidia-smi is not here: no NVIDIA driver on this machine (or not on PATH), so there are no GPUs to check"
        ) from None
    except (subprocess.TimeoutExpired, OSError) as error:
        raise WorkError(
            f"nvidia-smi does not answer ({type(error).__name__}): the driver may hang; see dmesg for Xid errors"
        ) from None
    output = done.stdout or done.stderr
    if done.returncode and "not a valid field" not in output:
        raise WorkError(f"nvidia-smi failed: {' '.join(output.split())[:200] or f'code {done.returncode}'}")
    return output


def collect(run: Runner | None = None, *, peers: bool = False, cores: bool = False) -> Health:
    """Ask nvidia-smi for everything and judge it, in DEADLINE_S at most. Raises WorkError when it does not run at all.

    peers: also compare what GPUs read from each other, which needs torch. cores: also look whether all cores of this host run
    at one speed.
    """
    end = time.monotonic() + DEADLINE_S
    run = run or (lambda arguments: nvidia_smi(arguments, max(1.0, end - time.monotonic() - 1.0)))
    found, said = _asked(run)
    health = Health(gpus=found)
    for line in said:
        if LOST.search(line):
            cost = "it cannot be used before a reset or a reboot; look for its Xid errors in dmesg"
            health.findings.append(Finding("error", f"a GPU does not answer ({line.strip()[:160]})", cost))
        elif line.upper().startswith("WARNING:"):  # such as an infoROM that is corrupted
            cost = "what the card says of its errors and limits may be wrong; have it looked at"
            health.findings.append(Finding("warning", f"nvidia-smi warns: {line[8:].strip()[:160]}", cost))
    check = _start_peers(health) if peers and len(health.gpus) > 1 else None
    for name, arguments in (("topology", ["topo", "-m"]), ("p2p", ["topo", "-p2p", "r"])):
        try:
            setattr(health, name, pairs(run(arguments)))
        except WorkError as error:
            if len(health.gpus) > 1:
                health.findings.append(Finding("note", f"no {name} matrix: {error}"))
    try:
        health.processes = processes(
            run(["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"])
        )
    except WorkError:
        health.findings.append(Finding("note", "nvidia-smi does not list processes here"))
    if check is not None:
        health.peer_data, why = check.finish(end)
        if why:
            health.findings.append(Finding("note", f"data between GPUs were not all compared: {why}"))
    if cores:
        health.cores = {
            str(core): [round(us, 4) for us in looks] for core, looks in host_speed.by_core(5, most=128).items()
        }
    health.findings = _worst_first(health.findings + judge(health) + judge_cores(health.cores))
    return health


def _start_peers(health: Health) -> Any:
    """The check of what GPUs read from each other, started; None, and a note, where it cannot be."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        health.findings.append(Finding("note", "data between GPUs were not compared: PyTorch is not installed"))
        return None
    from specsim.calibration.peers import Check

    try:
        return Check()
    except RuntimeError as error:
        health.findings.append(Finding("note", f"data between GPUs were not compared: {error}"))
        return None


def gpus(run: Runner = nvidia_smi) -> list[dict[str, str]]:
    """One dictionary a GPU. Fields that this nvidia-smi does not know are dropped, one after the other."""
    return _asked(run)[0]


def _asked(run: Runner) -> tuple[list[dict[str, str]], list[str]]:
    """What `gpus` gives, and the lines that are no GPU's."""
    fields = list(FIELDS)
    while fields:
        text = run([f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        if unknown and unknown.group(1) in fields:
            fields.remove(unknown.group(1))
            continue
        rows = [(line, _cells(line, fields)) for line in text.splitlines()]
        found = [dict(zip(fields, row, strict=True)) for _, row in rows if row is not None]
        if not found:
            raise WorkError(f"nvidia-smi lists no GPU: {' '.join(text.split())[:200] or 'it printed nothing'}")
        return found, [line for line, row in rows if row is None]
    raise WorkError("nvidia-smi knows none of the fields asked for")


def _cells(line: str, fields: list[str]) -> list[str] | None:
    """The cells of a GPU's line; None for a line of another kind. A comma within a cell can only be the name's."""
    cells = [cell.strip() for cell in line.split(",")]
    more = len(cells) - len(fields)
    if more < 0 or (fields[0] == "index" and not cells[0].isdigit()):
        return None
    at = fields.index("name") if "name" in fields else 0
    return [*cells[:at], ", ".join(cells[at : at + more + 1]), *cells[at + more + 1 :]]


def pairs(text: str) -> dict[str, str]:
    """A matrix of `nvidia-smi topo` as {"0-1": "NV18", ...}, each pair once."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    found: dict[str, str] = {}
    columns: list[int] = []
    for line in text.splitlines():
        words = line.split()
        if not columns:
            columns = [int(w[3:]) for w in words if re.fullmatch(r"GPU\d+", w)]
            continue
        if words and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            for column, word in zip(columns, words[1:], strict=False):
                if row < column and word != "X":
                    found[f"{row}-{column}"] = word
        elif found:
            break
    return found


def processes(text: str) -> list[dict[str, str]]:
    """One dictionary a process. A comma within a cell can only be the name's."""
    rows = [[c.strip() for c in line.split(",")] for line in text.splitlines()]
    return [
        {"gpu": r[0], "pid": r[1], "name": ", ".join(r[2:-1]), "memory_mib": r[-1]}
        for r in rows
        if len(r) >= 4 and r[1].isdigit()
    ]


def number(gpu: dict[str, str], *names: str) -> float | None:
    """The first of the fields that holds a number."""
    for name in names:
        try:
            return float(gpu.get(name, "").split()[0])
        except (ValueError, IndexError):
            continue
    return None


def reasons(gpu: dict[str, str]) -> list[str]:
    """Throttle reasons that cost time."""
    text = gpu.get("clocks_event_reasons.active") or gpu.get("clocks_throttle_reasons.active") or "0"
    try:
        bits = int(text, 0)
    except ValueError:
        return []
    return [word for bit, word in REASONS.items() if bits & bit]


def judge(health: Health) -> list[Finding]:
    """All findings, the worst first."""
    found: list[Finding] = []
    for gpu in health.gpus:
        found += _judge_one(gpu)
    found += _judge_kinds(health.gpus) + _judge_links(health)
    index = {g.get("uuid"): g.get("index", "?") for g in health.gpus}
    busy = Counter(index.get(p["gpu"], p["gpu"]) for p in health.processes)
    for gpu_index, count in busy.items():
        used = sum(number(p, "memory_mib") or 0 for p in health.processes if index.get(p["gpu"], p["gpu"]) == gpu_index)
        memory = f", {used / 1024:.1f} GiB" if used else ""
        what = f"GPU {gpu_index}: {count} other process{'es' * (count > 1)} on it{memory}"
        found.append(Finding("warning", what, "measurements and requests share the GPU with them"))
    for gpu in health.gpus:
        used = number(gpu, "memory.used") or 0.0
        if used > HIDDEN_MIB and gpu.get("index", "?") not in busy:
            what = (
                f"GPU {gpu.get('index', '?')}: {used / 1024:.1f} GiB in use by processes that cannot be seen from here"
            )
            found.append(Finding("warning", what, "measurements and requests share the GPU with them"))
    return _worst_first(found)


def judge_cores(looks: Mapping[Any, Sequence[float]]) -> list[Finding]:
    """Whether the cores run at two speeds, from `host_speed.by_core`: what waits for the host waits longer on the slow ones."""
    found = host_speed.two_speeds(looks)
    if found is None:
        return []
    share, times = found
    what = (
        f"the host's cores run at two speeds: {share:.0%} of looks found one {times:.1f} times as slow as the fastest"
    )
    cost = (
        "what waits for the host (eager passes, cycles of small models) takes longer by up to as much, and differs from minute to "
        "minute; usual where others use a core's second thread, as on virtual machines"
    )
    return [Finding("warning", what, cost)]


def _worst_first(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda f: ("error", "warning", "note").index(f.level))


def _judge_one(gpu: dict[str, str]) -> list[Finding]:
    found: list[Finding] = []
    at = f"GPU {gpu.get('index', '?')}"
    width, width_max = number(gpu, "pcie.link.width.current"), number(gpu, "pcie.link.width.max")
    gen, gen_max = number(gpu, "pcie.link.gen.current"), number(gpu, "pcie.link.gen.max")
    lane = GB_S_PER_LANE.get(int(gen_max or 0), 0.0)
    if width and width_max and width < width_max:
        speeds = f" ({lane * width:.0f} instead of {lane * width_max:.0f} GB/s)" if lane else ""
        cost = f"host copies, and all-reduces that cross PCIe, run at {width / width_max:.0%} of the speed{speeds}"
        found.append(
            Finding(
                "warning",
                f"{at} runs at PCIe x{width:.0f} of x{width_max:.0f}",
                cost + "; reseat the card or check the riser and slot",
            )
        )
    if gen and gen_max and gen < gen_max:
        busy = (number(gpu, "utilization.gpu") or 0) > 10 or gpu.get("pstate") == "P0"
        speed = f"{GB_S_PER_LANE.get(int(gen), 0) / lane:.0%} of the PCIe bandwidth" if lane else "less PCIe bandwidth"
        cost = (
            f"{speed}, for host copies and all-reduces that cross PCIe"
            if busy
            else "usual on an idle GPU; look again under load"
        )
        found.append(Finding("warning" if busy else "note", f"{at} runs at PCIe gen {gen:.0f} of {gen_max:.0f}", cost))
    limit, usual = number(gpu, "power.limit"), number(gpu, "power.default_limit")
    if limit and usual and limit < 0.98 * usual:
        cost = "clocks fall under sustained load; decode feels it least, prefill and large batches most"
        found.append(Finding("warning", f"{at} is limited to {limit:.0f} W of {usual:.0f} W", cost))
    why = reasons(gpu)
    clock, clock_max = number(gpu, "clocks.sm"), number(gpu, "clocks.max.sm")
    if why:
        speed = f"at {clock:.0f} of {clock_max:.0f} MHz" if clock and clock_max else "its clock is lowered"
        found.append(Finding("warning", f"{at} is throttled by {', '.join(why)}", speed))
    broken = sorted(
        {v for v in gpu.values() if "requires reset" in v.lower() or "gpu is lost" in v.lower() or v == "ERR!"}
    )
    if broken:
        found.append(Finding("error", f"{at} reports {broken[0]!r}", "it cannot be used until it is reset"))
    if gpu.get("remapped_rows.pending", "").lower() in ("yes", "1"):
        found.append(Finding("warning", f"{at} has memory rows to remap", "errors may recur until it is reset"))
    if gpu.get("name", "").startswith("GRID "):
        found.append(Finding("note", f"{at} is a virtual GPU", "others may share it: times vary with what they do"))
    errors = number(gpu, "ecc.errors.uncorrected.volatile.total")
    if errors:
        found.append(
            Finding(
                "error",
                f"{at} has {errors:.0f} uncorrected ECC errors",
                "results may be wrong; reset or replace the GPU",
            )
        )
    if gpu.get("ecc.mode.current") == "Disabled":
        found.append(
            Finding(
                "note", f"{at}: ECC is off", "a little more memory and bandwidth, and no protection from bit errors"
            )
        )
    if gpu.get("mig.mode.current") == "Enabled":
        found.append(
            Finding(
                "error",
                f"{at} is split by MIG",
                "no peer access and no NCCL between its slices; each has a part of the bandwidth",
            )
        )
    if gpu.get("compute_mode") == "Prohibited":
        found.append(Finding("error", f"{at} prohibits compute", "nothing can run on it"))
    return found


def _judge_kinds(gpus: list[dict[str, str]]) -> list[Finding]:
    found: list[Finding] = []
    for key, word in (
        ("name", "kinds"),
        ("memory.total", "memory sizes"),
        ("clocks.max.sm", "maximum clocks"),
        ("power.limit", "power limits"),
        ("pcie.link.width.max", "PCIe widths"),  # a narrow slot lowers the card's own maximum
        ("pcie.link.gen.max", "PCIe generations"),
    ):
        values: dict[str, list[str]] = {}
        for g in gpus:
            if key in g and (key == "name" or number(g, key) is not None):
                values.setdefault(g[key], []).append(g.get("index", "?"))
        if len(values) > 1:
            most, *fewer = sorted(values.items(), key=lambda item: -len(item[1]))
            odd = (f"{len(which)} x {value} (GPU {', '.join(which)})" for value, which in fewer)
            parts = ", ".join([f"{len(most[1])} x {most[0]}", *odd])
            found.append(
                Finding(
                    "warning",
                    f"GPUs of different {word}: {parts}",
                    "tensor parallelism runs at the pace of the slowest",
                )
            )
    return found


def _judge_links(health: Health) -> list[Finding]:
    found: list[Finding] = []
    if len(health.gpus) < 2:
        return found
    for pair, wrong in health.peer_data.items():
        if wrong:
            source, target = pair.split("-")
            cost = "NCCL's sums over peer access are wrong too; set NCCL_P2P_DISABLE=1, or turn off the IOMMU or ACS"
            found.append(Finding("error", f"GPU {target} reads wrong data from GPU {source} ({wrong} of 1 MB)", cost))
    barred: dict[str, list[str]] = {}
    for pair, word in health.p2p.items():
        if word != "OK":
            barred.setdefault(word, []).append(pair)
    for word, which in barred.items():
        everywhere = len(which) == len(health.p2p)
        pairs_text = "all pairs" if everywhere else ", ".join(which[:6]) + (" ..." if len(which) > 6 else "")
        cost = "all-reduces go through host memory: 15 to 20 us or more for each small one in a graph, against about 10 us over NVLink"
        found.append(
            Finding("warning", f"no peer access between GPUs {pairs_text} ({P2P_WORDS.get(word, word)})", cost)
        )
    links = Counter(health.topology.values())
    if links and not health.nvlink:
        nv = sum(n for link, n in links.items() if link.startswith("NV"))
        across = links.get("SYS", 0)
        if nv:
            found.append(
                Finding(
                    "warning",
                    f"NVLink joins {nv} of {sum(links.values())} pairs only",
                    "collectives over all GPUs fall back to PCIe",
                )
            )
        else:
            more = f"; {across} of {sum(links.values())} pairs cross the processors' link" if across else ""
            cost = f"every all-reduce crosses PCIe, and its time climbs steeply with its bytes{more}"
            found.append(Finding("note", "GPUs are joined by PCIe only", cost))
    return found


def under_load(samples: list[list[dict[str, str]]]) -> list[Finding]:
    """What the GPUs did while they were measured: throttling with its reason, and PCIe links that stayed slow.

    samples: what `gpus` gave, several times. A GPU counts in those in which it was busy.
    """
    busy: dict[str, list[dict[str, str]]] = {}
    for sample in samples:
        for gpu in sample:
            if (number(gpu, "utilization.gpu") or 0) > 10:
                busy.setdefault(gpu.get("index", "?"), []).append(gpu)
    found: list[Finding] = []
    for index, seen in busy.items():
        why = Counter(reason for gpu in seen for reason in reasons(gpu))
        if why:
            times = ", ".join(f"{reason} in {n} of {len(seen)} looks" for reason, n in why.most_common())
            clocks = sorted(c for gpu in seen if (c := number(gpu, "clocks.sm")))
            at = f"clocks down to {clocks[0]:.0f} MHz" if clocks else "clocks were lowered"
            found.append(Finding("warning", f"GPU {index} was throttled while measured ({times})", at))
        gen = max(number(gpu, "pcie.link.gen.current") or 0 for gpu in seen)
        most = number(seen[0], "pcie.link.gen.max") or 0
        if 0 < gen < most:
            cost = "it stayed there under load: copies and all-reduces that cross PCIe are slower"
            found.append(Finding("warning", f"GPU {index} ran at PCIe gen {gen:.0f} of {most:.0f}", cost))
    return found
