"""Doctor: what fake nvidia-smi outputs of healthy and broken boxes are read as, and what each defect is said to cost."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from specsim.calibration import health

from specsim.errors import WorkError

GOOD = {
    "name": "NVIDIA H200", "uuid": "GPU-{i}", "driver_version": "580.159.04", "pstate": "P0", "clocks.sm": "1980", "clocks.max.sm": "1980",
    "clocks.mem": "3201", "clocks.max.mem": "3201", "power.draw": "120.5", "power.limit": "700.00", "power.default_limit": "700.00",
    "clocks_event_reasons.active": "0x0000000000000001", "clocks_throttle_reasons.active": "0x0000000000000001", "temperature.gpu": "33",
    "pcie.link.gen.current": "5", "pcie.link.gen.max": "5", "pcie.link.width.current": "16", "pcie.link.width.max": "16",
    "ecc.mode.current": "Enabled", "ecc.errors.uncorrected.volatile.total": "0", "remapped_rows.pending": "No", "mig.mode.current": "Disabled", "memory.used": "4",
    "memory.total": "143771", "utilization.gpu": "0", "compute_mode": "Default",
}  # fmt: skip


class Box:
    """A fake nvidia-smi: `defects` by GPU index, a link and a P2P word for every pair, lines of other processes."""

    def __init__(self, n: int = 2, defects: dict[int, dict[str, str]] | None = None, link: str = "NV18", p2p: str = "OK", apps: str = "",
                 unknown: tuple[str, ...] = ()) -> None:  # fmt: skip
        self.n, self.defects, self.link, self.p2p, self.apps, self.unknown = n, defects or {}, link, p2p, apps, unknown
        self.calls = 0

    def __call__(self, arguments: list[str]) -> str:
        self.calls += 1
        if arguments[0].startswith("--query-gpu="):
            fields = arguments[0].partition("=")[2].split(",")
            for field in fields:
                if field in self.unknown:
                    return f'Field "{field}" is not a valid field to query.\n'
            rows = [{**GOOD, "index": str(i), "uuid": f"GPU-{i}", **self.defects.get(i, {})} for i in range(self.n)]
            return "".join(", ".join(row[f] for f in fields) + "\n" for row in rows)
        if arguments[0].startswith("--query-compute-apps"):
            return self.apps
        return self.matrix(self.link if arguments == ["topo", "-m"] else self.p2p)

    def matrix(self, word: str) -> str:
        names = [f"GPU{i}" for i in range(self.n)]
        lines = ["\t\x1b[4m" + "\t".join(names) + "\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m"]
        for i, name in enumerate(names):
            lines.append("\t".join([name, *(" X " if i == j else word for j in range(self.n)), "PHB", "0-15", "0"]))
        return "\n".join(
            [*lines, "NIC0\tPHB\tPHB\t X", "", "Legend:", "  X    = Self", "  SYS  = Connection across NUMA nodes", ""]
        )


def findings(box: Box) -> list[str]:
    return [f"{f.level} {f.line}" for f in health.collect(box).findings]


def test_healthy_box_has_no_findings() -> None:
    found = health.collect(Box(8))
    assert found.findings == []
    assert found.nvlink
    assert len(found.topology) == 28  # pairs of 8
    assert found.topology["0-7"] == "NV18"
    assert found.document()["healthy"]


@pytest.mark.parametrize(
    ("defects", "level", "words"),
    [
        ({5: {"pcie.link.width.current": "8"}}, "warning", "GPU 5 runs at PCIe x8 of x16: host copies, and all-reduces that cross PCIe, run at 50%"),
        ({1: {"pcie.link.gen.current": "3"}}, "warning", "GPU 1 runs at PCIe gen 3 of 5: 25% of the PCIe bandwidth"),
        ({1: {"pcie.link.gen.current": "1", "pstate": "P8"}}, "note", "usual on an idle GPU"),
        ({2: {"power.limit": "450.00"}}, "warning", "GPU 2 is limited to 450 W of 700 W"),
        ({0: {"clocks_event_reasons.active": "0x48", "clocks.sm": "345"}}, "warning",
         "GPU 0 is throttled by hardware slowdown, temperature (hardware): at 345 of 1980 MHz"),
        ({3: {"ecc.errors.uncorrected.volatile.total": "2"}}, "error", "GPU 3 has 2 uncorrected ECC errors"),
        ({3: {"mig.mode.current": "Enabled"}}, "error", "GPU 3 is split by MIG"),
        ({4: {"name": "NVIDIA H100"}}, "warning", "GPUs of different kinds: 7 x NVIDIA H200, 1 x NVIDIA H100 (GPU 4)"),
        ({5: {"pcie.link.width.max": "8", "pcie.link.width.current": "8"}}, "warning", "different PCIe widths: 7 x 16, 1 x 8 (GPU 5)"),
        ({4: {"ecc.mode.current": "Disabled"}}, "note", "ECC is off"),
        ({2: {"clocks.sm": "[GPU requires reset]"}}, "error", "GPU 2 reports '[GPU requires reset]'"),
        ({2: {"temperature.gpu": "ERR!"}}, "error", "GPU 2 reports 'ERR!'"),
        ({2: {"remapped_rows.pending": "Yes"}}, "warning", "GPU 2 has memory rows to remap"),
        ({6: {"name": "GRID A100D-80C"}}, "note", "GPU 6 is a virtual GPU"),
        ({6: {"memory.used": "81920"}}, "warning", "GPU 6: 80.0 GiB in use by processes that cannot be seen"),
        ({7: {"clocks_event_reasons.active": "0x0000000000000082"}}, "warning", "throttled by clocks set by hand, power brake"),
    ],
)  # fmt: skip
def test_defect_is_named_with_what_it_costs(defects: dict[int, dict[str, str]], level: str, words: str) -> None:
    assert any(line.startswith(level) and words in line for line in findings(Box(8, defects)))


@pytest.mark.parametrize("count", [1, 3, 5, 6])
def test_any_number_of_gpus(count: int) -> None:
    found = health.collect(Box(count))
    assert len(found.gpus) == count
    assert len(found.topology) == count * (count - 1) // 2
    assert found.findings == []


def test_wrong_data_between_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from specsim.calibration import peers

    class Check:
        def finish(self, until: float) -> tuple[dict[str, int], str]:
            return {"0-1": 0, "1-0": 4096}, "it took too long"

    monkeypatch.setattr(peers, "Check", Check)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    found = health.collect(Box(2), peers=True)
    lines = [f"{f.level} {f.line}" for f in found.findings]
    assert lines[0].startswith("error GPU 0 reads wrong data from GPU 1 (4096 of 1 MB)")
    assert "note data between GPUs were not all compared: it took too long" in lines
    assert found.document()["peer_data"] == {"0-1": 0, "1-0": 4096}


# torch as far as the check uses it: two GPUs, of which 1 gets 5 wrong values; a driver that talks more than a pipe holds.
FAKE_TORCH = """
import os, sys
int32 = uint8 = None
sys.stderr.write("a warning of the driver " * 5000)
assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"

class Values:
    def __init__(self, wrong=0): self.wrong = wrong
    def remainder(self, n): return self
    def to(self, where): return self
    def cpu(self): return self
    def __ne__(self, other): return self
    def sum(self): return self.wrong
    def copy_(self, other): self.wrong = 5 * (self.where == ("cuda", 1))

def arange(n, dtype): return Values()
def device(*name): return name
def zeros(n, dtype, device):
    found = Values()
    found.where = device
    return found

class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    synchronize = staticmethod(lambda where: None)
    can_device_access_peer = staticmethod(lambda a, b: True)
"""


def test_the_check_of_peers_compares_every_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specsim.calibration.peers import Check

    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert Check().finish(time.monotonic() + 30) == ({"0-1": 5, "1-0": 0}, "")
    (tmp_path / "torch.py").write_text("raise RuntimeError('CUDA error: system not yet initialized')")
    assert Check().finish(time.monotonic() + 30) == ({}, "RuntimeError: CUDA error: system not yet initialized")


def test_throttling_and_slow_links_under_load_are_told() -> None:
    """GPU 1 is busy in both looks: power cap in one, PCIe gen 3 in both. GPU 0 is idle: its gen 1 is usual."""
    idle = {"pcie.link.gen.current": "1", "utilization.gpu": "0", "clocks_event_reasons.active": "0x4"}
    busy = {"pcie.link.gen.current": "3", "utilization.gpu": "99"}
    capped = {**busy, "clocks_event_reasons.active": "0x4", "clocks.sm": "1200"}
    looks = [health.gpus(Box(2, {0: idle, 1: one})) for one in (busy, capped)]
    assert [f.line for f in health.under_load(looks)] == [
        "GPU 1 was throttled while measured (power cap in 1 of 2 looks): clocks down to 1200 MHz",
        "GPU 1 ran at PCIe gen 3 of 5: it stayed there under load: copies and all-reduces that cross PCIe are slower",
    ]
    assert health.under_load([]) == []


def test_no_peer_access_and_pcie_only_are_told_apart_from_nvlink() -> None:
    lines = findings(Box(4, link="SYS", p2p="CNS"))
    assert any("no peer access between GPUs all pairs (the chipset does not support it)" in line for line in lines)
    assert any("joined by PCIe only" in line and "6 of 6 pairs cross the processors' link" in line for line in lines)
    assert not health.collect(Box(2, link="PHB")).nvlink


def test_other_processes_are_counted_by_gpu() -> None:
    apps = "GPU-1, 4242, python3, 20480\nGPU-1, 4243, python3, 1024\n"
    assert any("GPU 1: 2 other processes on it, 21.0 GiB" in line for line in findings(Box(2, apps=apps)))


def test_fields_that_an_older_driver_does_not_know_are_dropped() -> None:
    box = Box(1, unknown=("clocks_event_reasons.active", "mig.mode.current"))
    gpu = health.gpus(box)[0]
    assert "mig.mode.current" not in gpu
    assert gpu["clocks.sm"] == "1980"
    assert box.calls == 3


@pytest.mark.parametrize("value", ["[N/A]", "[Not Supported]", "", "N/A", "[Unknown Error]"])
def test_values_that_are_not_there_find_nothing(value: str) -> None:
    empty = {f: value for f in GOOD if f not in ("name", "uuid", "memory.total", "clocks.max.sm", "power.limit")}
    assert findings(Box(2, {0: empty, 1: empty})) == []


def test_commas_in_a_name_and_lines_of_other_kinds_do_no_harm() -> None:
    def run(arguments: list[str]) -> str:
        text = Box(2, {1: {"name": "NVIDIA RTX, special edition"}})(arguments)
        return f"{text}WARNING: infoROM is corrupted at gpu 0000:01:00.0\n" if "--query-gpu" in arguments[0] else text

    assert [g["name"] for g in health.gpus(run)] == ["NVIDIA H200", "NVIDIA RTX, special edition"]
    assert any("nvidia-smi warns: infoROM is corrupted at gpu 0000:01" in f.line for f in health.collect(run).findings)


def test_a_gpu_that_does_not_answer_is_an_error() -> None:
    """Of two GPUs one fell off the bus: nvidia-smi prints a sentence in its place."""

    def run(arguments: list[str]) -> str:
        lost = "Unable to determine the device handle for GPU1: 0000:02:00.0: Unknown Error\n"
        return Box(1)(arguments) + (lost if "--query-gpu" in arguments[0] else "")

    assert health.collect(run).findings[0].level == "error"
    assert "a GPU does not answer (Unable to determine" in health.collect(run).findings[0].line


def test_a_process_with_a_comma_in_its_name_counts() -> None:
    apps = "GPU-1, 55, /usr/bin/python, train.py, 1024\nGPU-0, 66, [Not Found], [N/A]\n"
    found = findings(Box(2, apps=apps))
    assert any("GPU 1: 1 other process on it, 1.0 GiB" in line for line in found)
    assert any("GPU 0: 1 other process on it:" in line for line in found)


@pytest.mark.parametrize("output", ["", "No devices were found\n", "garbage"])
def test_output_without_gpus_is_one_line(output: str) -> None:
    with pytest.raises(WorkError, match="lists no GPU") as error:
        health.collect(lambda arguments: output)
    assert "\n" not in str(error.value)


def fake_program(folder: Path, box: Box) -> None:
    """An executable nvidia-smi in `folder` that answers as `box` does."""
    answers = {" ".join(a): box(a) for a in (["topo", "-m"], ["topo", "-p2p", "r"])}
    rows = [{**GOOD, "index": str(i), "uuid": f"GPU-{i}", **box.defects.get(i, {})} for i in range(box.n)]
    script = folder / "nvidia-smi"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nanswers, rows = {answers!r}, {rows!r}\na = sys.argv[1:]\n"
        "if a[0].startswith('--query-gpu='):\n"
        "    for r in rows: print(', '.join(r[f] for f in a[0].split('=')[1].split(',')))\n"
        "elif not a[0].startswith('--query'): print(answers[' '.join(a)])\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def doctor(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(path), "HOME": str(path)}
    return subprocess.run(
        [sys.executable, "-m", "specsim", "doctor", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )


def test_doctor_reports_in_seconds_and_fails_on_a_broken_gpu(tmp_path: Path) -> None:
    fake_program(tmp_path, Box(8, {5: {"pcie.link.width.current": "8"}}))
    start = time.monotonic()
    done = doctor(tmp_path)
    assert time.monotonic() - start < 20
    assert done.returncode == 0, done.stderr
    assert "GPU 5 runs at PCIe x8 of x16" in done.stdout
    assert "8 x NVIDIA H200" in done.stdout
    fake_program(tmp_path, Box(1, {0: {"ecc.errors.uncorrected.volatile.total": "1"}}))  # no pair to compare: quick
    broken = doctor(tmp_path, "--json")
    assert broken.returncode == 1
    document = json.loads(broken.stdout)
    assert document["findings"][0]["level"] == "error"
    assert not document["healthy"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import time; time.sleep(60)", "does not answer"),
        ("print('Failed to initialize NVML: Driver/library version mismatch'); sys.exit(18)", "version mismatch"),
        (
            "print('Unable to determine the device handle for GPU0: GPU is lost.', file=sys.stderr); sys.exit(15)",
            "GPU is lost",
        ),
    ],
)
def test_a_driver_that_hangs_or_fails_is_told_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(health, "DEADLINE_S", 3.0)
    start = time.monotonic()
    with pytest.raises(WorkError, match=words):
        health.collect()
    assert time.monotonic() - start < 6.0


def test_doctor_without_nvidia_smi_is_one_clear_line(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: nvidia-smi is not here")
    assert len(done.stderr.splitlines()) == 1
