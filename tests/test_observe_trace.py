"""Profiler traces: classes, phases, graphs, gaps and all-reduces of made traces, damage, and bounded memory."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specsim.errors import InputError
from specsim.observations import classify, kernels_table, observe
from specsim.observe_trace import phase_of
from specsim.pages import text
from specsim.record_text import page

Event = dict[str, Any]


def kernel(name: str, start: float, length: float, launch: int, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": start,
        "dur": length,
        "args": {"device": 0, "stream": 7, "correlation": launch, **args},
    }


def launch(name: str, start: float, correlation: int) -> Event:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 9, "tid": 9, "ts": start, "dur": 5.0, "args": args}


def annotation(name: str, start: float, length: float, category: str = "gpu_user_annotation") -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": length}


def document(events: list[Event], **more: Any) -> dict[str, Any]:
    head = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA Thing 9"}],
        "distributedInfo": {"rank": 0, "world_size": 8},
    }
    return {**head, **more, "traceEvents": [{"ph": "M", "name": "process_name", "pid": 0}, *events], "traceName": "x"}


def cycle(at: float, number: int, eager: bool) -> list[Event]:
    """A speculative cycle of 1000 us: draft 100 us in a graph, verify 600 us (graph or eager), extend 100 us eager."""
    first = 100 * number
    events = [annotation("draft", at, 100), annotation("step[DECODE bs=2 toks=2]", at + 10, 80)]
    events += [launch("cudaGraphLaunch", at - 20, first), kernel("nvjet_tst_64x8", at, 100, first)]
    events += [annotation("step[TARGET_VERIFY bs=2 toks=6]", at + 150, 600)]
    names = [
        "nvjet_tst_64x8",
        "fused_moe_kernel",
        "cross_device_reduce_1stage",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
    ]
    for i, name in enumerate(names):
        own = first + 1 + (i if eager else 0)
        if eager or i == 0:
            events.append(launch("cudaLaunchKernel" if eager else "cudaGraphLaunch", at + 100 + i, own))
        sizes = {"In msg nelems": 21504, "dtype": "BFloat16", "Group size": 8} if "nccl" in name else {}
        events.append(kernel(name, at + 150 + 150 * i, 100 if i < 3 else 150, own, **sizes))
    events += [annotation("draft_extend", at + 800, 100), launch("cudaLaunchKernel", at + 700, first + 9)]
    events.append(kernel("void flashinfer::norm::RMSNormKernel<8>", at + 800, 100, first + 9))
    return events


def write(tmp_path: Path, events: list[Event], name: str = "trace.json") -> Path:
    path = tmp_path / name
    text = json.dumps(document(events)).encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    return path


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_speculative_trace(tmp_path, eager, name):
    (record,) = observe(write(tmp_path, [e for i in range(4) for e in cycle(1000.0 * (i + 1), i, eager)], name))
    points = {p.raw["phase"]: p for p in record.points}
    assert set(points) == {"draft", "verify", "extend"}  # the step inside the draft is the draft's
    assert points["verify"].verify_ms.value == pytest.approx(0.6)
    assert points["verify"].cycle_ms.value == pytest.approx(1.0)
    assert points["verify"].batch == 2
    assert points["verify"].cuda_graph is not eager
    assert points["verify"].raw["kernels_per_step"] == 4
    assert points["verify"].raw["busy_ms"] == pytest.approx(0.45)
    assert points["draft"].draft_ms.value == pytest.approx(0.1)
    assert points["draft"].cuda_graph is True
    assert points["extend"].cuda_graph is False
    assert record.environment["gpu"] == "NVIDIA Thing 9"
    assert record.environment["world_size"] == 8
    assert record.environment["graph_launches"] == (4 if eager else 8)
    # of each 1000 us: 100 + 450 + 100 busy; the last cycle ends at 900
    assert record.environment["span_ms"] == pytest.approx(3.9)
    assert record.environment["idle_ms"] == pytest.approx(3.9 - 4 * 0.65)
    assert any(
        "not in a CUDA graph while others are: " + ("extend, verify" if eager else "extend") in c
        for c in record.caveats
    )
    (reduce,) = [s for s in record.samples if s["operator"] == "allreduce by size" and s["bytes"]]
    assert (reduce["bytes"], reduce["ranks"], reduce["count"], reduce["median_us"]) == (43008, 8, 4, 150.0)
    graphs = {s["kernels"]: s["launches"] for s in record.samples if s["operator"] == "cuda graph"}
    assert graphs == ({1: 4} if eager else {1: 4, 4: 4})


def test_kernels_table(tmp_path):
    path = write(tmp_path, [e for i in range(4) for e in cycle(1000.0 * (i + 1), i, False)])
    rows = {(r.phase, r.kind): r for r in kernels_table(path)}
    assert rows["verify", "allreduce"].count == 8
    assert rows["verify", "allreduce"].seconds == pytest.approx(4 * 250e-6)
    assert rows["verify", "moe"].mean_us == pytest.approx(100.0)
    assert rows["all", "gemm"].count == 8
    assert rows["verify", "gemm"].in_graph == 4
    assert rows["extend", "norm"].steps == 4
    assert sum(r.count for (phase, _), r in rows.items() if phase == "all") == 4 * 6


def test_phases_from_the_cpu_when_the_gpu_has_none(tmp_path):
    """Kernels run later than the CPU range that launched them: they are found by their launch."""
    events = [
        annotation("execute_context_0(0)_generation_2(2)", 0, 50, "user_annotation"),
        launch("cudaGraphLaunch", 10, 1),
    ]
    events += [kernel("nvjet", 1000, 40, 1), kernel("nvjet", 1050, 50, 1)]
    (record,) = observe(write(tmp_path, events))
    (point,) = record.points
    assert point.decode_ms.value == pytest.approx(0.1)
    assert (point.batch, point.cuda_graph) == (2, True)


def test_what_launched_a_kernel_is_not_guessed(tmp_path):
    """A trace of the GPU alone, without launches or nodes: whether verify is in a graph is not known, so nobody is told no."""
    events = [e for i in range(4) for e in cycle(1000.0 * (i + 1), i, False)]
    events = [{**e, "args": {"device": 0}} if e["cat"] == "kernel" else e for e in events if e["cat"] != "cuda_runtime"]
    path = write(tmp_path, events)
    (record,) = observe(path)
    assert {p.cuda_graph for p in record.points} == {None}
    assert {row.in_graph for row in kernels_table(path)} == {None}
    assert not any("CUDA graph" in caveat for caveat in record.caveats)
    shown = text(page([record], []))
    assert "what launched them is not told" in shown
    assert " 0%" not in shown


def test_events_after_a_long_preamble(tmp_path):
    """Of many ranks, the communicators alone fill hundreds of kilobytes before the first event."""
    groups = [{"pg_name": str(i), "ranks": list(range(64))} for i in range(600)]
    made = document(cycle(1000.0, 0, False), distributedInfo={"rank": 3, "world_size": 64, "pg_config": groups})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(made))
    (record,) = observe(path)
    assert record.name == "trace"
    assert record.environment["rank"] == 3


def test_without_annotations_graphs_are_told_by_size(tmp_path):
    events = [launch("cudaGraphLaunch", 0, 1), kernel("a", 10, 5, 1), kernel("b", 20, 5, 1)]
    (record,) = observe(write(tmp_path, events))
    assert not record.points
    assert "no annotation of a phase" in record.method
    assert [s for s in record.samples if s["operator"] == "cuda graph"] == [
        {"operator": "cuda graph", "kernels": 2, "launches": 1, "median_ms": pytest.approx(0.015)}
    ]


def test_only_the_busiest_device_is_counted(tmp_path):
    events = [kernel("a", i * 10.0, 5, i) for i in range(5)] + [kernel("a", 3, 5, 9, device=1) | {"pid": 1}]
    (record,) = observe(write(tmp_path, events))
    assert record.environment["devices_in_trace"] == 2
    assert record.environment["kernels"] == 5


def test_a_trace_that_is_cut_off(tmp_path):
    path = write(tmp_path, [kernel("gemm", i * 10.0, 5, i) for i in range(50)])
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    (record,) = observe(path)
    assert 15 < record.environment["kernels"] < 30
    assert any("cut off at character" in c for c in record.caveats)
    packed = tmp_path / "cut.json.gz"
    packed.write_bytes(gzip.compress(text.encode())[:-200])
    assert any("gzip stream breaks" in c for c in observe(packed)[0].caveats)


def test_a_malformed_event_is_skipped_and_named(tmp_path):
    path = write(tmp_path, [kernel("gemm", i * 10.0, 5, i) for i in range(50)])
    path.write_text(path.read_text().replace('"ts": 200.0', '"ts": 20..0'))
    (record,) = observe(path)
    assert record.environment["kernels"] == 49
    assert any(
        "event 22, at character" in c and "is malformed" in c for c in record.caveats
    )  # one more: the metadata event


def test_a_bare_list_of_events_and_an_empty_trace(tmp_path):
    path = tmp_path / "list.json"
    path.write_text(json.dumps([kernel("gemm", 0.0, 5, 1)]))
    assert observe(path)[0].environment["kernels"] == 1
    (record,) = observe(write(tmp_path, []))
    assert any("no GPU kernels" in c for c in record.caveats)
    with pytest.raises(InputError, match="no list of traceEvents"):
        kernels_table(_text(tmp_path, '{"other": [1]}'))


def _text(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void device::marlin_moe::Marlin<__nv_bfloat16, 112589", "moe"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "gemm"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<", "attention"),
        ("void (anonymous namespace)::fused_a_gemm_kernel<1, 2112, 7168", "gemm"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "norm"),
        ("_router_triton_kernel", "router"),
        ("void moe_align_block_size_kernel<int>(int const*", "moe"),
        ("void (anonymous namespace)::act_and_mul_kernel<__nv_bfloat16", "tiny"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float", "gemm"),
        ("set_mla_kv_buffer_kernel", "tiny"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>", "tiny"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>", "sampling"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce"),
        ("void sglang::cross_device_reduce_2stage<__nv_bfloat16, 8>", "allreduce"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "allreduce"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("fused_moe_kernel", "moe"),
        ("_fwd_grouped_kernel_stage1", "other"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("per_token_group_quant_8bit_kernel", "quantise"),
    ],
)
def test_classes_by_name(name, kind):
    assert classify(name) == kind


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("step[TARGET_VERIFY bs=1 toks=3]", ("verify", 1)),
        ("step[DECODE bs=16 toks=16]", ("decode", 16)),
        ("step[EXTEND bs=1 toks=8]", ("prefill", 1)),
        ("step[DRAFT_EXTEND bs=2 toks=6]", ("extend", 2)),
        ("draft", ("draft", None)),
        ("draft_extend", ("extend", None)),
        ("execute_context_0(0)_generation_1(8)", ("verify", 1)),
        ("execute_context_0(0)_generation_8(8)", ("decode", 8)),
        ("execute_context_2(512)_generation_0(0)", ("prefill", None)),
        ("ProfilerStep#7", None),
        ("EAGLE_VERIFY", None),
    ],
)
def test_phases_by_annotation(name, phase):
    assert phase_of(name) == phase


def test_memory_is_bounded_on_a_large_trace(tmp_path):
    """100 MB of events, most of them CPU operators with long arguments: under 150 MB more than the modules take."""
    noise = {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0}
    noise["args"] = {"Input Dims": [[1, 7168]] * 100, "Call stack": "file.py(1): forward; " * 100}
    block = json.dumps([noise] * 30 + [kernel("gemm", 1.0, 2.0, 1)] * 20)[1:-1] + ", "
    path = tmp_path / "big.json"
    count = 100_000_000 // len(block)
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for _ in range(count):
            file.write(block)
        file.write("{}]}")
    script = (
        "import resource, sys\nfrom specsim.observations import observe, kernels_table\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "kernels = observe(sys.argv[1])[0].environment['kernels']\n"
        "print(kernels, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    kernels, megabytes = map(int, done.stdout.split())
    assert kernels == 20 * count
    assert megabytes < 150
