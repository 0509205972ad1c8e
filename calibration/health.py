"""The box's health as nvidia-smi tells it: what is wrong, and what it costs. Measures nothing, takes seconds.

What: clocks, power limits, throttling, GPU kinds, peer access, PCIe generation and width, topology, ECC, MIG, processes.
Against: the GPU's own maxima and its neighbours. Units: MHz, W, MiB, as nvidia-smi prints them.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from specsim.errors import WorkError

Level = Literal["error", "warning", "note"]
Runner = Callable[[list[str]], str]  # arguments of nvidia-smi -> its output

FIELDS = (
    "index", "name", "uuid", "driver_version", "pstate", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem",
    "power.draw", "power.limit", "power.default_limit", "clocks_event_reasons.active", "clocks_throttle_reasons.active",
    "temperature.gpu", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
    "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "memory.used", "memory.total",
    "utilization.gpu", "compute_mode",
)  # fmt: skip
# Bits of the throttle reasons that cost time, and what they mean (NVML's nvmlClocksEventReasons)
REASONS = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "temperature (software)", 0x40: "temperature (hardware)", 0x80: "power brake",
}  # fmt: skip
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
    """What nvidia-smi said. gpus: one dictionary of FIELDS each; links: topology and p2p by pair "0-1"."""

    gpus: list[dict[str, str]] = field(default_factory=list)
    topology: dict[str, str] = field(default_factory=dict)
    p2p: dict[str, str] = field(default_factory=dict)
    processes: list[dict[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def nvlink(self) -> bool:
        """Whether every pair of GPUs is joined by NVLink."""
        return bool(self.topology) and all(link.startswith("NV") for link in self.topology.values())

    def document(self) -> dict[str, Any]:
        return {
            "schema": "specsim.health/1",
            "healthy": not any(f.level in ("error", "warning") for f in self.findings),
            "findings": [asdict(f) for f in self.findings],
            "gpus": self.gpus, "topology": self.topology, "p2p": self.p2p, "processes": self.processes,
        }  # fmt: skip


def nvidia_smi(arguments: list[str]) -> str:
    """Output of nvidia-smi. Raises WorkError when there is none, or when it fails or takes long."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=15, errors="replace")
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


def collect(run: Runner = nvidia_smi) -> Health:
    """Ask nvidia-smi for everything and judge it. Raises WorkError when it does not run at all."""
    health = Health(gpus=gpus(run))
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
    health.findings += judge(health)
    return health


def gpus(run: Runner = nvidia_smi) -> list[dict[str, str]]:
    """One dictionary a GPU. Fields that this nvidia-smi does not know are dropped, one after the other."""
    fields = list(FIELDS)
    while fields:
        text = run([f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        if unknown and unknown.group(1) in fields:
            fields.remove(unknown.group(1))
            continue
        rows = [
            [cell.strip() for cell in line.split(",")]
            for line in text.splitlines()
            if line.count(",") == len(fields) - 1
        ]
        if not rows:
            raise WorkError(f"nvidia-smi lists no GPU: {' '.join(text.split())[:200] or 'it printed nothing'}")
        return [dict(zip(fields, row, strict=True)) for row in rows]
    raise WorkError("nvidia-smi knows none of the fields asked for")


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
    rows = [[c.strip() for c in line.split(",")] for line in text.splitlines()]
    return [
        dict(zip(("gpu", "pid", "name", "memory_mib"), r, strict=True)) for r in rows if len(r) == 4 and r[1].isdigit()
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
    ):
        values = Counter(g[key] for g in gpus if key in g)
        if len(values) > 1:
            parts = ", ".join(f"{n} x {value}" for value, n in values.most_common())
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
