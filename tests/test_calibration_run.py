"""Runs of the benchmarks on CPU tensors: end to end, resumed, and with ranks that die, hang, fail or fill the disk."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import heed_interrupts

from specsim.commands.calibrate import _page
from specsim.errors import WorkError
from specsim.pages import text
from specsim.profiles import load_profile

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="PyTorch is not installed (pip install 'specsim[calibrate]')"
    ),
    pytest.mark.timeout(180),
]


FAULTY = """
import os, sys, time
from specsim.calibration.context import Case, Measurement

NAME, RANKS = "faulty", "groups"

sys.modules["__main__"].MEET_S = 1.0

def cases(context):
    names = ("before", *context.options["faults"], "after")
    return [
        Case("faulty", name, {"bytes": 4096 + i}, ranks=context.world, timeout_s=0.5 if name == "hang" else 5.0)
        for i, name in enumerate(names)
    ]

def run(context, case):
    fault = case.operator
    if context.rank == 1 or fault in ("raise-all", "full"):
        if fault == "hang":
            time.sleep(1000)
        if fault == "kill":
            os.kill(os.getpid(), 9)
        if fault == "full":
            from specsim.errors import WorkError
            sys.stderr = open("/dev/full", "w", buffering=1)  # the log is on that disk too
            def write(*arguments):
                raise WorkError("out/done: cannot be written: No space left on device")
            sys.modules["__main__"].write_atomically = write
        if fault.startswith("raise"):
            raise RuntimeError("planted")
    context.agree(1.0, f"control-{case.ranks}")
    return Measurement([1e-3] * 5)
"""


# Of the processes that the ranks' parent forks.
KILL_THE_SECOND = """
import os, sys
forks = []
if len(sys.orig_argv) > 5 and "specsim.calibration.worker" in sys.orig_argv[2]:
    os.register_at_fork(before=lambda: forks.append(1), after_in_child=lambda: len(forks) == 2 and os.kill(os.getpid(), 9))
"""


# SGLang's two modules as far as they are used: a kernel over shared memory of the host, which spoils sums from 64 KB on.
FAKE_V1 = """
import ctypes, mmap, os
import torch.distributed as dist

class CustomAllreduce:
    @staticmethod
    def create_shared_buffer(nbytes, group):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        paths = [os.path.join(os.environ["FAKE_MEMORY"], str(r)) for r in range(ranks)]
        with open(paths[rank], "wb") as f:
            f.truncate(nbytes)
        dist.barrier(group=group)
        CustomAllreduce.maps = [mmap.mmap(os.open(p, os.O_RDWR), nbytes) for p in paths]
        return [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in CustomAllreduce.maps]

def dispatch_custom_allreduce(group, device):
    from .custom_all_reduce_v2 import CustomAllReduceV2
    return CustomAllReduceV2
"""
FAKE_V2 = """
import contextlib
import torch
import torch.distributed as dist

def _allocate_symmetric_memory(nbytes, device, group):
    raise AssertionError("symmetric memory was asked for")

class CustomAllReduceV2:
    def __init__(self, group, device):
        self.group, self.rank, self.disabled = group, dist.get_rank(group), False
        own, memory = _allocate_symmetric_memory(2**20, device=device, group=group)
        assert memory.multicast_ptr == 0
        self.buffers = [memory.get_buffer(r, [2**20], torch.uint8) for r in range(dist.get_world_size(group))]
        assert own.data_ptr() == self.buffers[self.rank].data_ptr()
        self.capture = contextlib.nullcontext

    def custom_all_reduce(self, x):
        self.buffers[self.rank][:x.nbytes].copy_(x.view(torch.uint8))
        dist.barrier(group=self.group)
        total = sum(b[:x.nbytes].view(x.dtype) for b in self.buffers)
        dist.barrier(group=self.group)
        return total + (x.nbytes >= 65536)
"""


# FlashInfer's module as far as it is used, over the same memory.
FAKE_FLASHINFER = """
import ctypes, types
import torch
import torch.distributed as dist

class AllReduceFusionPattern:
    kAllReduce = 0

def _alloc_symm_buffer_bytes(*arguments):
    raise AssertionError("symmetric memory was asked for")

def trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, ranks, tokens, width, group):
    global kept, home
    kept, home = _alloc_symm_buffer_bytes(2**20, ranks, torch.float16, torch.device("cpu"), "name")[0], group
    return [kept], torch.tensor(kept)

def trtllm_allreduce_fusion(*, allreduce_in, world_rank, token_num, hidden_dim, workspace_ptrs, pattern_code, allreduce_out, **rest):
    assert allreduce_in.shape == (token_num, hidden_dim) and workspace_ptrs.tolist() == kept
    ctypes.memmove(kept[world_rank], allreduce_in.data_ptr(), allreduce_in.nbytes)
    dist.barrier(group=home)
    total = torch.zeros_like(allreduce_in)
    for address in kept:
        theirs = torch.empty_like(allreduce_in)
        ctypes.memmove(theirs.data_ptr(), address, theirs.nbytes)
        total += theirs
    dist.barrier(group=home)
    allreduce_out.copy_(total)
"""


def test_an_engines_kernel_runs_on_plain_memory_and_wrong_sums_are_told(tmp_path: Path) -> None:
    package = tmp_path / "code" / "sglang" / "srt" / "distributed" / "device_communicators"
    package.mkdir(parents=True)
    (package / "custom_all_reduce.py").write_text(FAKE_V1)
    (package / "custom_all_reduce_v2.py").write_text(FAKE_V2)
    other = tmp_path / "code" / "flashinfer" / "comm"
    other.mkdir(parents=True)
    (other / "trtllm_ar.py").write_text(FAKE_FLASHINFER)
    (other / "cuda_ipc.py").write_text(
        FAKE_V1.replace("str(r))", '"f" + str(r))') + "create_shared_buffer = CustomAllreduce.create_shared_buffer\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "code"), "FAKE_MEMORY": str(tmp_path)}
    line = command(
        "--only", "allreduce", "--kinds", "custom,flashinfer", "--out", tmp_path / "out", "-o", tmp_path / "p.yaml"
    )
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    profile = load_profile(str(tmp_path / "p.yaml"))
    assert {(c.implementation, c.ranks, c.mode, *c.bytes) for c in profile.allreduce} == {
        ("custom", 2, "graph", 4096),
        ("custom", 2, "eager", 4096),
        ("flashinfer", 2, "graph", 4096, 65536),
        ("flashinfer", 2, "eager", 4096, 65536),
    }
    assert "sglang CustomAllReduceV2" in profile.allreduce[0].note
    assert any("WRONG DATA" in c for c in profile.caveats)
    assert "WRONG DATA" in (tmp_path / "out" / "logs" / "custom.rank0.log").read_text()


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """A folder whose package `faulty` holds a measurement with cases that go wrong, between a good first and last one."""
    package = tmp_path / "code" / "faulty"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "measures.py").write_text(FAULTY)
    return package.parent


def run_faulty(folder: Path, code: Path, *faults: str) -> tuple[list[dict[str, Any]], list[str]]:
    from specsim.calibration.launch import Setting, Stage, results, run_stage

    path = os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])])
    stage = Stage("faults", ("faulty.measures",), 2, {"PYTHONPATH": path}, {"faults": faults})
    troubles = run_stage(stage, Setting(folder, cpu=True, quick=True), lambda kind, details: None)
    assert workers(folder) == []
    return results(folder), troubles


def workers(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().decode(errors="replace")
            state = (entry.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(folder) in line and int(entry.parent.name) != os.getpid() and state != "Z":
            found.append(int(entry.parent.name))
    return found


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "specsim", "calibrate", "--cpu", "--quick", *map(str, arguments)]


def calibrate(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=150, cwd=cwd)


def test_bad_cases_are_recorded_and_the_others_are_measured(tmp_path: Path, faulty: Path) -> None:
    """Faults one after the other, a good case before and after them: an error in all ranks needs no new processes; a killed
    rank, one that hangs and one that fails while the other waits for it are replaced, and told. Of four sizes of an operator
    that hang for their half second two are waited for, the others are recorded as not tried."""
    made, troubles = run_faulty(tmp_path / "out", faulty, "raise-all", "kill", *["hang"] * 4, "raise")
    found = {r["operator"]: r for r in made}
    assert {n for n, r in found.items() if r["status"] == "done"} == {"before", "after"}
    assert len(made) == 9
    killed, hung, again, failed = troubles
    assert killed.endswith("rank 1 was killed by signal 9 (SIGKILL) in kill bytes 4098")
    assert found["kill"]["error"] == killed
    assert found["kill"]["params"] == {"bytes": 4098}
    assert re.search("hung for [01] s: hang bytes 4099", hung)
    assert "rank 1" in hung
    assert "hang bytes 4100" in again
    bad = {r["params"]["bytes"]: r["error"] for r in made if r["operator"] == "hang"}
    assert [bad[4099], bad[4100]] == [hung, again]
    assert all("not tried: hang over 2 ranks hung" in bad[n] for n in (4101, 4102))
    assert failed.endswith("rank 1 ended with code 3 in raise bytes 4103: RuntimeError: planted")
    assert found["raise"]["error"] == failed
    assert "planted" in found["raise-all"]["error"]


def test_a_kernel_compiles_in_a_time_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes of one kernel: it is compiled once, before the first, and its state says so. What ran out of that time is said
    in a sentence, recorded, and its sizes are not tried by the next workers; those of another kernel are."""
    import torch
    from specsim.calibration import launch, worker
    from specsim.calibration.context import Case, Context, Measurement

    done: list[str] = []
    module = SimpleNamespace(
        RANKS="one",
        cases=lambda context: [Case("allreduce", o, {"bytes": n}) for n in (1, 2) for o in ("flashinfer", "nccl")],
        compile_s=lambda case: 480.0 * (case.operator == "flashinfer"),
        prepare=lambda context, case: done.append(f"compile {case.operator}"),
        run=lambda context, case: done.append(case.size) or Measurement([1e-3]),
    )
    monkeypatch.setattr(worker.importlib, "import_module", lambda name: module)
    states: list[tuple[str, str, float]] = []

    def run(skip: list[str]) -> None:
        done.clear()
        reporter = worker.Reporter(tmp_path, "flashinfer", 0, "flashinfer.0")
        keep = reporter.state
        monkeypatch.setattr(
            reporter,
            "state",
            lambda s, what, **more: states.append((s, what, more["timeout_s"])) or keep(s, what, **more),
        )
        context = Context(0, 1, 0, torch.device("cpu"), True, {})
        stage = {"name": "flashinfer", "skip": skip, "measures": ["any"], "options": {}}
        assert worker._run(context, stage, reporter) == 0

    run([])
    assert done == ["compile flashinfer", "flashinfer bytes 1", "nccl bytes 1", "flashinfer bytes 2", "nccl bytes 2"]
    assert states[0] == ("compiling", "compiling flashinfer at its first use, up to 8 minutes", 480.0)
    assert [s[0] for s in states[1:]] == ["running"] * 4
    state = {"rank": 0, "state": "compiling", "operation": states[0][1], "since": 0.0, "step": 1, "timeout_s": 480.0}
    text, key = launch._hung(
        launch.Stage("flashinfer", ("allreduce",), 1), [{**state, "key": "allreduce.flashinfer.compile"}]
    )
    assert text.startswith("flashinfer: not compiled within 480 s")
    launch._record_failure(tmp_path, launch.Stage("flashinfer", ("allreduce",), 1), key, text)
    found = launch.result_of(tmp_path / "done" / f"{key}.json")
    assert found is not None
    assert (found["operator"], found["status"], found["error"]) == ("flashinfer", "failed", text)
    run([key])
    assert done == ["nccl bytes 1", "nccl bytes 2"]


def test_a_state_of_the_attempt_before_is_none(tmp_path: Path) -> None:
    """Of two nodes the slower one's old workers may write after the first node began again; the case's age is then not the
    new worker's."""
    from specsim.calibration.launch import _state
    from specsim.calibration.worker import Reporter

    Reporter(tmp_path, "all", 3, "all.0").state("running", "nccl bytes 4096")
    assert _state(tmp_path, "all", 3, "all.1") == {}
    assert _state(tmp_path, "all", 3, "all.0")["operation"] == "nccl bytes 4096"


def test_the_dead_rank_that_is_named() -> None:
    """A killed rank before those whose connection it closed; the first error before later ones; aborts follow from them."""
    from specsim.calibration.launch import _guilt

    def order(*ranks: tuple[int, dict[str, Any]]) -> list[int]:
        return sorted(range(len(ranks)), key=lambda i: _guilt(*ranks[i]))

    late, early = ({"error": "Connection closed", "since": 9.0}, {"error": "planted", "since": 8.0})
    assert order((3, late), (-9, {}), (3, early)) == [1, 2, 0]
    assert order((-6, {"error": "", "since": 1.0}), (1, {}), (3, early)) == [2, 0, 1]


def test_a_rank_killed_before_it_says_a_word_is_told_recorded_and_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the system when memory runs out as it begins. What an earlier run measured makes a profile still."""
    (tmp_path / "sitecustomize.py").write_text(KILL_THE_SECOND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"
    written(out, "peak", "copy")
    arguments = ("--ranks", 2, "--only", "allreduce", "--name", "box", "--out", out, "--resume")
    code, _, errors = specsim(capsys, "calibrate", "--cpu", "--quick", *arguments)
    said = "all: rank 1 was killed by signal 9 (SIGKILL) in its start"
    assert code == 1
    assert errors.strip().splitlines()[-1].startswith(f"error: {said}; what was measured is in {out}")
    record = json.loads((out / "box.record.json").read_text())
    assert record["environment"]["troubles"] == [said]
    assert load_profile(str(out / "box.yaml")).cpu
    assert workers(out) == []


def test_a_pytorch_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nvidia-smi lists GPUs and PyTorch is its CPU build."""
    import torch
    from specsim.calibration import worker

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="sees no GPU here: install a CUDA build"):
        worker._context({"cpu": False})


def test_a_full_disk_ends_the_run_and_keeps_what_was_measured(tmp_path: Path, faulty: Path) -> None:
    from specsim.calibration.launch import results

    with pytest.raises(WorkError, match="disk full"):
        run_faulty(tmp_path / "out", faulty, "full")
    assert [r["operator"] for r in results(tmp_path / "out")] == ["before"]
    assert workers(tmp_path / "out") == []


def test_a_launcher_that_cannot_write_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specsim.calibration import launch

    def write(*arguments: object) -> None:
        raise WorkError("out: cannot be written: No space left on device")

    monkeypatch.setattr(launch, "write_atomically", write)
    with pytest.raises(WorkError, match="No space left"):
        launch.run_stage(launch.Stage("one", ("peak",), 1), launch.Setting(tmp_path / "out", cpu=True), lambda *_: None)


def specsim(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """A command in this process: code, output, errors."""
    from specsim.cli import main

    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0), *capsys.readouterr()


def test_eight_ranks_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole quick calibration with eight processes: the curves of 2, 4 and 8 ranks, a profile that loads and predicts
    with a warning, a record that gives it again, a plot, JSON alone on standard output."""
    out = tmp_path / "out"
    done = calibrate("--ranks", 8, "--out", out, "--name", "tiny", "--plot", tmp_path / "p.svg", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["failed"] == 0
    profile = load_profile(document["profile"])
    assert profile.cpu
    assert profile.gpus == 8
    assert {"gemm_bf16", "moe_bf16", "attention_gqa", "attention_mla", "norm", "tiny", "router"} <= set(
        profile.operators
    )
    assert {(c.implementation, c.ranks, c.mode) for c in profile.allreduce} == {
        ("nccl", n, mode) for n in (2, 4, 8) for mode in ("graph", "eager")
    }
    record = json.loads(Path(document["record"]).read_text())
    assert record["schema"] == "specsim.record/1"
    assert record["samples"][0]["seconds"]
    assert {r.get("rank") for r in record["samples"]} == set(range(8))
    assert record["environment"]["settings"]["NCCL_NVLS_ENABLE"] == "0"
    assert (tmp_path / "p.svg").stat().st_size > 1000
    assert workers(out) == []
    again = tmp_path / "again.yaml"
    assert specsim(capsys, "calibrate", "--refit", document["record"], "-o", again)[0] == 0
    assert again.read_text() == Path(document["profile"]).read_text()
    code, shown, _ = specsim(capsys, "predict", "--model", "Llama-3.1-8B", "--hardware", again)
    assert code == 0
    assert "was made without a GPU" in shown


@pytest.mark.parametrize("world", [3, 5, 6, 7, 8])
def test_all_reduce_is_planned_for_any_number_of_gpus(world: int) -> None:
    """In graphs over every number of ranks; eager over the numbers that models are cut over, and over all."""
    from types import SimpleNamespace

    from specsim.calibration.allreduce import cases
    from specsim.calibration.context import Context

    gpu = SimpleNamespace(type="cuda")
    planned = cases(Context(0, world, 0, gpu, False, {}))
    assert {c.ranks for c in planned if c.params["mode"] == "graph"} == set(range(2, world + 1))
    assert {c.ranks for c in planned if c.params["mode"] == "eager"} == {n for n in (2, 4, 8) if n < world} | {world}
    forced = cases(Context(0, world, 0, gpu, False, {}, {"implementation": "nccl-ll"}))
    assert {c.params["mode"] for c in forced} == {"graph", "alone", "eager"}
    older = cases(Context(0, world, 0, gpu, False, {}, {"implementation": "custom-v1"}))
    assert {c.ranks for c in older} <= {2, 4, 6, 8}


def test_a_time_limit_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that never ends, on a clock that the polls move: after 100 s the run gives the one result that is on disk."""
    from specsim.calibration import session

    clock = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])

    def endless(stage: Any, setting: Any, event: Any, *, number: int) -> list[str]:
        written(setting.folder, "peak", "copy")
        while True:
            clock[0] += 5.0
            event("poll", {})

    monkeypatch.setattr(session, "run_stage", endless)
    plan = session.Plan(tmp_path, 2, cpu=True, only=("peak",), time_limit_s=100.0)
    outcome = session.run(plan, lambda progress: None, lambda text: None)
    assert clock[0] == 105.0
    assert not outcome.interrupted
    assert len(outcome.results) == 1
    assert "not all was measured in 100 s" in outcome.troubles[-1]


def test_a_later_run_in_the_folder_adds_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What went wrong in the first run is told by the second. Of the failed cases the second forgets the one that it tries
    again, and keeps those of another stage, of another measurement and of a class that it skips."""
    from specsim.calibration import session

    def failed(stage: str, measure: str, operator: str) -> Path:
        return written(tmp_path, measure, operator, stage, status="failed", error="planted")

    def stage(stage: Any, setting: Any, event: Any, *, number: int) -> list[str]:
        written(setting.folder, "peak", "copy")
        return ["nccl-tree: hung for 60 s"] if stage.name == "all" else []

    monkeypatch.setattr(session, "run_stage", stage)
    first = session.Plan(tmp_path, 2, cpu=True, only=("peak",))
    session.prepare(first, resume=False)
    assert session.run(first, lambda _: None, lambda _: None).troubles == ["nccl-tree: hung for 60 s"]
    kept = [failed("all", "allreduce", "nccl"), failed("one", "gemm", "gemm_bf16"), failed("one", "moe", "moe_int4")]
    gone = failed("one", "moe", "moe_bf16")
    second = session.Plan(tmp_path, 2, cpu=True, only=("moe",), without=("moe_int4",))
    session.prepare(second, resume=True)
    assert all(path.exists() for path in kept)
    assert not gone.exists()
    assert session.run(second, lambda _: None, lambda _: None).troubles == ["nccl-tree: hung for 60 s"]


@pytest.mark.parametrize("text", ["", "[]", '{"key": "peak.copy.all"}', '{"status": "done", "spread": 3}'])
def test_a_result_that_is_not_whole_is_measured_again(tmp_path: Path, text: str) -> None:
    """As a machine's crash leaves files behind: it counts for nothing, and resuming forgets it."""
    from specsim.calibration import session

    plan = session.Plan(tmp_path, 2, cpu=True, only=("peak",))
    whole, torn = written(tmp_path, "peak", "matmul"), written(tmp_path, "peak", "copy")
    torn.write_text(text)
    assert [r["operator"] for r in session.results(tmp_path)] == ["matmul"]
    session.prepare(plan, resume=True)
    assert session.finished(tmp_path) == {whole.stem}


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    """Two runs would measure each other; the next may begin when the first has ended. Other nodes of a run share it."""
    from specsim.calibration import session

    plan = session.Plan(tmp_path, 2, cpu=True)
    with session.held(plan):
        with pytest.raises(WorkError, match="another calibration runs there"), session.held(plan):
            pass
        with session.held(session.Plan(tmp_path, 2, cpu=True, node=1, nodes=2)):
            pass
    with session.held(plan):
        pass


def test_groups_of_all_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines' kernels are those that are installed, none of them without peer access; NCCL's forced kinds are six."""
    from specsim.calibration import session

    monkeypatch.setattr(session, "importable", lambda name: name == "custom")

    def names(**options: Any) -> list[str]:
        return [s.name for s in session.stages(session.Plan(Path("x"), 2, only=("allreduce",), **options))]

    assert names(kinds=("nccl",)) == ["all"]
    assert names(kinds=("engines",)) == ["custom"]
    assert names(kinds=("engines",), no_p2p=True) == []
    forced = names(kinds=("forced",))
    assert forced == ["nccl-ll", "nccl-ll128", "nccl-simple", "nccl-ring", "nccl-tree", "nccl-no-p2p"]
    assert names(kinds=("forced",), no_p2p=True) == forced[:-1]
    assert names() == ["all", "custom", *forced]


def written(folder: Path, measure: str, operator: str, stage: str = "all", **values: Any) -> Path:
    """A result on disk, done unless `values` say otherwise."""
    from specsim.files import write_atomically

    path = folder / "done" / f"{measure}.{operator}.{stage}.json"
    times = dict.fromkeys(("median", "p10", "p90", "low", "high"), 1e-3)
    result = {
        "key": path.stem, "stage": stage, "status": "done", "measure": measure, "operator": operator, "params": {},
        "bytes": 1.0, "flops": 0.0, "narrow": True, "extras": {}, "spread": times,
    }  # fmt: skip
    write_atomically(path, json.dumps(result | values))
    return path


def start_and_wait(folder: Path, cwd: Path) -> subprocess.Popen[str]:
    """A calibration with a few results on disk."""
    process = subprocess.Popen(
        command("--ranks", 2, "--only", "gemm,allreduce", "--out", folder), cwd=cwd,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts,
    )  # fmt: skip
    end = time.time() + 60
    while time.time() < end and len(list((folder / "done").glob("*.json"))) < 2:
        time.sleep(0.05)
    return process


def test_interrupt_leaves_no_process_and_resume_measures_the_rest_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    process = start_and_wait(out, tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    partial = load_profile(str(out / "2x-cpu.yaml"))
    assert any("interrupted" in c for c in json.loads((out / "2x-cpu.record.json").read_text())["caveats"])
    assert partial.cpu
    assert workers(out) == []
    before = {p.name: p.stat().st_mtime_ns for p in (out / "done").glob("*.json")}
    assert before
    line = ("calibrate", "--cpu", "--quick", "--only", "gemm,allreduce", "--out", out)
    code, _, errors = specsim(capsys, *line, "--ranks", 2)
    assert code == 2
    assert "--resume" in errors
    code, _, errors = specsim(capsys, *line, "--ranks", 3, "--resume")
    assert code == 2
    assert "other settings" in errors
    done = calibrate("--ranks", 2, "--only", "gemm,allreduce", "--out", out, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    after = {p.name: p.stat().st_mtime_ns for p in (out / "done").glob("*.json")}
    assert {n: after[n] for n in before} == before
    assert len(after) > len(before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_lost_terminal_is_an_interruption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """As Ctrl-C, not the end of the process: what was measured is told, and workers go before the launcher does."""
    from specsim.calibration import session

    def stage(stage: Any, setting: Any, event: Any, **_: Any) -> list[str]:
        written(setting.folder, "peak", "copy")
        os.kill(os.getpid(), number)
        time.sleep(5)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(session, "run_stage", stage)
    before = [(each, signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGHUP)]
    signal.signal(number, signal.SIG_DFL)
    try:
        code, _, errors = specsim(capsys, "calibrate", "--cpu", "--only", "peak", "--out", tmp_path / "out")
    finally:
        for each, handler in before:
            signal.signal(each, handler)
    assert code == 130
    assert "interrupted; what was measured is in" in errors
    assert (tmp_path / "out" / "2x-cpu.yaml").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_workers_die_with_a_killed_launcher(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start_and_wait(out, tmp_path)
    process.kill()
    process.communicate(timeout=30)
    end = time.time() + 10
    while workers(out) and time.time() < end:
        time.sleep(0.05)
    assert workers(out) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--only", "gem"], 2, "did you mean 'gemm'?"),
        (["--only", ","], 2, "--only: names nothing"),
        (["--skip", "moe_int5"], 2, "did you mean 'moe_int4'?"),
        (["--kinds", "nccl-three"], 2, "did you mean 'nccl-tree'?"),
        (["--kinds", "nccl", "--only", "gemm"], 2, "is about allreduce"),
        (["--only", "allreduce", "--ranks", "1"], 2, "--only: allreduce needs two ranks and more"),
        (["--kinds", "flashinfer"], 2, "--kinds: flashinfer needs flashinfer, not installed here"),
        (["--kinds", "engines", "--only", "allreduce"], 2, "none of them can run here"),
        (["--name", "a/b"], 2, "cannot be a file's name"),
        (["--node-rank", "1"], 2, "no node 1 among 1"),
        (["--nnodes", "2", "--master", "host:port"], 2, "--master HOST:PORT"),
        (["--experts", "1,2"], 2, "four whole numbers"),
        (["--tp", "2"], 2, "--tp: is about a model's shapes"),
        (["--model", "Llama-3.1-8B", "--tp", "3"], 2, "tp 3 does not divide 32 attention heads"),
        (["--refit", "x.record.json"], 2, "--out: says nothing with --refit"),
        (["--kinds", "nccl", "--ranks", "1"], 2, "--kinds: allreduce needs two ranks and more"),
        (["--nnodes", "2"], 2, "--master"),
        (["--ranks", "0"], 2, "--gpus: 0 is out of range; give 1 to 1,024"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    ended, _, errors = specsim(capsys, "calibrate", "--cpu", *arguments, "--out", tmp_path / "out")
    assert ended == code
    assert words in errors
    assert len(errors.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())  # told before anything is measured, and nothing is left


def test_a_wrong_name_is_told_before_what_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch too: the name would be as wrong with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for option, value in (
        ("--only", "foo"),
        ("--skip", "foo"),
        ("--kinds", "foo"),
        ("--experts", "1"),
        ("--model", "foo"),
    ):
        ended, _, errors = specsim(capsys, "calibrate", "--cpu", option, value)
        assert (ended, f"{value!r}" in errors) == (2, True), errors
    assert specsim(capsys, "calibrate", "--cpu", "--only", "gemm")[2].startswith("error: PyTorch is not installed")
    assert not list(tmp_path.iterdir())


def test_what_has_nothing_to_measure_here_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines' products on a box without a GPU, asked for by name: alone an error, beside others a line. What --skip left out says
    so, and a stage that ended before it planned says nothing."""
    from specsim.calibration import session

    def stage(stage: Any, setting: Any, event: Any, *, number: int) -> list[str]:
        cases = [{"measure": "peak"}] if "peak" in stage.measures else []
        (setting.folder / f"{stage.name}.cases.json").write_text(json.dumps({"cases": cases, "environment": {}}))
        if cases:
            written(setting.folder, "peak", "copy")
        return []

    def told(only: str, **options: Any) -> list[str]:
        plan = session.Plan(tmp_path, 1, cpu=True, only=tuple(only.split(",")), **options)
        return session.run(plan, lambda _: None, lambda _: None).troubles

    monkeypatch.setattr(session, "run_stage", stage)
    with pytest.raises(WorkError, match="blockwise: nothing to measure here: it needs a GPU"):
        told("blockwise")
    (text,) = told("blockwise,peak")
    assert text.startswith("blockwise: nothing to measure here")
    assert told("peak") == []
    (text,) = told("peak,gemm", without=("gemm_bf16", "gemm_fp8"))
    assert text == "gemm: nothing to measure here: --skip leaves none of it"
    monkeypatch.setattr(session, "run_stage", lambda *_, **__: ["one: died"])
    (tmp_path / "one.cases.json").unlink()
    assert told("blockwise,peak") == ["one: died"]


def test_progress_goes_by_time_and_counts_no_stage_that_has_not_planned(tmp_path: Path) -> None:
    """Two stages, the first with both of its cases on disk: 2 measured, of a number that is not known yet."""
    from specsim.calibration import session

    plan = session.Plan(tmp_path, 2, cpu=True, only=("copies", "peak"))
    written(tmp_path, "copies", "h2d")
    written(tmp_path, "copies", "d2h")
    cases = [{"key": f"copies.{kind}.all", "estimate_s": 1.0} for kind in ("h2d", "d2h")]
    (tmp_path / "one.cases.json").write_text(json.dumps({"cases": cases}))
    clock = session._Clock(plan, session.stages(plan))
    assert (clock.progress().done, clock.progress().total) == (2, 0)
    assert clock.progress().left_s > 0
    (tmp_path / "all.cases.json").write_text(json.dumps({"cases": [{"key": "peak.copy.all", "estimate_s": 1.0}]}))
    assert (clock.progress().done, clock.progress().total) == (2, 3)


def test_nothing_creates_multicast_objects_unless_asked() -> None:
    from specsim.calibration.launch import NO_MULTICAST

    assert NO_MULTICAST == {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }


def test_another_node_waits_for_the_first_as_long_as_it_shows_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node measures for 1000 s what it does alone, one case every 250 s, then compiles one of 600 s, and is gone: a
    sign each time, silence of 300 + 600 s at the end. Without any sign the wait ends after 300 s."""
    from specsim.calibration import launch
    from specsim.calibration.worker import Reporter

    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += 10.0

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    stage = launch.Stage("all", ("allreduce",), 2)

    def wait(folder: Path, poll: Any) -> None:
        clock[0] = 0.0
        setting = launch.Setting(folder, cpu=True, node=1, nodes=2, master="first:29500")
        with pytest.raises(WorkError, match=r"the first node \(first:29500\) gave no sign .* --node-rank 0"):
            launch.run_stage(stage, setting, poll)

    said = []
    wait(tmp_path / "none", lambda kind, details: said.append(details["waiting"]))
    assert 300 < clock[0] <= 320
    assert set(said) == {"waiting for the first node (first:29500)"}
    reporter = Reporter(tmp_path / "some", "one", 0, "one.0")

    def first_node(kind: str, details: Any) -> None:
        if clock[0] <= 1000 and clock[0] % 250 == 0:
            reporter.state("running", "moe_int4", timeout_s=600.0 if clock[0] == 1000 else 60.0)

    wait(tmp_path / "some", first_node)
    assert 1900 < clock[0] <= 1920


def test_another_node_leaves_the_stages_of_a_run_that_ended_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed, another node starts 50 s before the first: it waits until that one has cleared the folder, and takes no stage
    of the run before for over, nor that one's file for one to follow."""
    from specsim.calibration import launch, session

    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += 10.0
        if clock[0] == 50:
            session.prepare(first, resume=True)

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    first = session.Plan(tmp_path, ranks=2, cpu=True, nodes=2, only=("allreduce",))
    second = replace(first, node=1, master="first:29500")
    monkeypatch.setattr(session, "run_stage", lambda *_, **__: [])
    with pytest.raises(WorkError, match="nothing could be measured"):
        session.run(first, lambda p: None, lambda text: None)
    names = [stage.name for stage in session.stages(first)]
    assert names
    for name in names:
        (tmp_path / "stages" / f"{name}.over").touch()
        (tmp_path / "stages" / f"{name}.0.json").touch()
    seen = []

    def stage_of_another_node(*_: Any, **__: Any) -> list[str]:
        seen.append((clock[0], sorted(p.name for p in (tmp_path / "stages").glob("*"))))
        return []

    monkeypatch.setattr(session, "run_stage", stage_of_another_node)
    with pytest.raises(WorkError, match="nothing could be measured"):
        session.run(second, lambda p: None, lambda text: None)
    assert seen[0] == (50, [])


def test_two_nodes_share_a_folder(tmp_path: Path) -> None:
    """Two launchers on this machine, one rank each, as on two nodes."""
    from specsim.calibration.launch import free_port

    out, master = tmp_path / "out", f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    line = command("--ranks", 2, "--nnodes", 2, "--master", master, "--only", "peak,allreduce", "--out", out)
    nodes = [
        subprocess.Popen(
            [*line, "--node-rank", str(i)],
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for i in range(2)
    ]
    for node in nodes:
        _, errors = node.communicate(timeout=120)
        assert node.returncode == 0, errors
    assert {c.ranks for c in load_profile(str(out / "2x-cpu.yaml")).allreduce} == {2}
    assert workers(out) == []


@pytest.mark.parametrize(("slow_of", "left"), [(0, 1e-5), (3, 1e-5), (1, 3e-5)])  # none slow; every third; all
def test_calls_from_python_are_timed_on_cores_that_are_not_slow(monkeypatch, slow_of, left):
    """A core that is 2.5 times slower makes a call last three times as long: such loops count only where there are no others."""
    torch = pytest.importorskip("torch")
    from specsim.calibration import timing
    from specsim.calibration.context import Context

    loops, state = [0], {"slow": False}

    def call() -> None:
        state["now"] += 3e-5 if state["slow"] else 1e-5

    def loop_us(steps: int = 0) -> float:
        was = 0.5 if state["slow"] else 0.2
        loops[0] += 1
        state["slow"] = slow_of > 0 and loops[0] % slow_of == 0
        return was

    state["now"] = 0.0
    state["slow"] = slow_of == 1
    monkeypatch.setattr(timing.host_speed, "loop_us", loop_us)
    monkeypatch.setattr(timing.host_speed, "by_core", lambda *_: {0: [0.2] * 20})
    monkeypatch.setattr(timing.time, "perf_counter", lambda: state["now"])
    measured = timing.eager(Context(0, 1, 0, torch.device("cpu"), True, {}), [call] * 4)
    assert sorted(measured.seconds)[len(measured.seconds) // 2] == pytest.approx(left)
    assert measured.seconds == pytest.approx([left] * len(measured.seconds))
    assert measured.extras.get("slow_s", 3e-5) == pytest.approx(3e-5)
    assert measured.extras.get("slow_share", 0.0) == pytest.approx({0: 0.0, 3: 1 / 3, 1: 1.0}[slow_of], abs=0.2)
    assert ("trouble" in measured.extras) == (slow_of == 1)


def test_workers_import_what_their_parent_does_whatever_lies_in_the_working_directory(tmp_path, monkeypatch):
    """A user's grp.py beside the command once stood in for the standard library's, and what it printed was read as exit codes."""
    from specsim.calibration import children

    for name in ("grp", "random"):
        (tmp_path / f"{name}.py").write_text("print('the wrong one')\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    for command, words in (
        (children.code("import random, grp; print(random.random() < 1)"), "True"),
        (children.running("json.tool", "--help"), "usage"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert words in done.stdout
        assert "wrong" not in done.stdout


def test_what_a_library_prints_is_no_exit_code(tmp_path):
    from specsim.calibration.launch import Ranks

    script = "print('libfoo 1.2: hello'); print('1 2 3'); print('7 0'); print('0 0'); print('1 -9')"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        parent.wait(30)
        assert Ranks(parent, 2).codes() == [0, -9]


@pytest.mark.parametrize(
    ("tflops", "shown"), [(786.4, "786"), (9.96, "10"), (3.14, "3.1"), (0.0834, "0.083"), (0.002, "0.002")]
)
def test_rates_are_shown_in_digits_that_mean_something(tflops: float, shown: str) -> None:
    """A CPU's hundredths of a TFLOP/s are no 0; a GPU's hundreds stay whole."""
    box = load_profile("1x-h200")
    rates = {
        "gemm_bf16": box.operators["gemm_bf16"].model_copy(update={"peak_tflops": tflops, "bandwidth_gb_s": 1234.5})
    }
    result = SimpleNamespace(profile=box.model_copy(update={"operators": rates}))
    (row,) = (line for line in text(list(_page(result, "")), 120).splitlines() if line.startswith("gemm_bf16"))
    assert row.split()[2:4] == ["1234", shown]
