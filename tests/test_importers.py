"""Importers: fits that recover known rates, the text of measuring tools, and operator tables of a made-up package."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.cli import main
from specsim.derive import fill, from_tables, scaled
from specsim.errors import InputError
from specsim.fitting import fit_peak, fit_rate
from specsim.importers import default_source, into_profile, read_tool
from specsim.ops import operator_seconds
from specsim.profiles import Source, latency_us, load_profile
from specsim.tables import import_system, package_folder, systems

SOURCE = Source(kind="measured", reference="a test", date="2026-01-01")

# --- fits ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(1e-6, 1e-4), st.floats(1e11, 1e13), st.integers(4, 40))
def test_fit_recovers_an_exact_line(fixed, bandwidth, points):
    """Sizes from a quarter to four times fixed x bandwidth, where both parameters matter."""
    size = fixed * bandwidth * np.geomspace(0.25, 4, points)
    fit = fit_rate(size, fixed + size / bandwidth)
    assert fit.fixed_s == pytest.approx(fixed, rel=1e-3)
    assert fit.bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
    assert fit.relative_uncertainty < 1e-3


def test_fit_with_noise_and_outliers_stays_within_its_errors():
    """5 us and 2 TB/s under 5 % noise, every tenth point three times too slow: within three standard errors."""
    rng = np.random.default_rng(1)
    size = np.geomspace(1e6, 1e9, 200)
    time = (5e-6 + size / 2e12) * rng.lognormal(0, 0.05, 200)
    time[::10] *= 3
    fit = fit_rate(size, time)
    assert abs(fit.fixed_s - 5e-6) < 3 * fit.fixed_error_s + 0.1e-6
    assert fit.bytes_per_s == pytest.approx(2e12, rel=0.05)
    assert 0.03 < fit.spread < 0.12
    assert fit.median < fit.spread


def test_cached_points_share_the_fixed_time_and_not_the_bandwidth():
    """20 us; 1.4 TB/s from memory and 5 TB/s from the cache: ignoring the difference would hide both numbers."""
    cold, warm = np.geomspace(2e8, 2e9, 20), np.geomspace(1e6, 7e7, 20)
    size = np.concatenate([warm, cold])
    time = 20e-6 + np.concatenate([warm / 5e12, cold / 1.4e12])
    fit = fit_rate(size, time, cached=size < 1e8)
    assert fit.fixed_s == pytest.approx(20e-6, rel=1e-3)
    assert fit.bytes_per_s == pytest.approx(1.4e12, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "time", "why"),
    [
        ([1e6, 2e6], [1e-6, 2e-6], "2 usable points"),
        ([1e6, 2e6, float("nan"), -1.0], [1e-6, 2e-6, 1.0, 1.0], "2 usable points"),
        ([1e6, 1.1e6, 1.2e6, 1.3e6], [1e-6] * 4, "near"),
        ([1e6, 1e7, 1e8, 1e9], [5e-6] * 4, "does not grow with bytes"),
        (np.geomspace(1e6, 1e7, 6), [1e-5, 5e-5, 1e-5, 6e-5, 1e-5, 5e-5], "is known only to"),
    ],
)
def test_what_cannot_be_identified_is_refused(size, time, why):
    with pytest.raises(InputError, match=rf"box gemm: not identifiable: .*{why}"):
        fit_rate(size, time, where="box gemm")


def test_peak_is_found_beyond_the_bend():
    """4 us, 1 TB/s and 200 TFLOPS joined by the cost equation: recovered from compute-bound rows."""
    rows = np.array([1, 64, 512, 1024, 2048, 4096.0])
    size, flops = np.full(6, 1e8), rows * 1e8
    time = operator_seconds(np.asarray(4e-6), size / 1e12, flops / 200e12)
    rate = fit_rate(np.array([1e7, 1e8, 1e9]), 4e-6 + np.array([1e7, 1e8, 1e9]) / 1e12)
    assert fit_peak(rate, size, time, flops) == pytest.approx(200e12, rel=0.01)
    assert fit_peak(rate, size[:2], time[:2], flops[:2]) is None, "no row there is bound by compute"


# --- nccl-tests ----------------------------------------------------------------------------------------------------

HEAD = """# nThread 1 nGpus 1 minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 5 iters: 20 graph: {graph}
# Using devices
#  Rank  0 Group  0 Pid    100 on boxa device  0 [0000:01:00] Test GPU
#  Rank  1 Group  0 Pid    101 on boxa device  1 [0000:02:00] Test GPU
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROWS = """        1024           512  bfloat16     sum      -1    11.50    0.09    0.09      0    11.40    0.09    0.09      0
        2048          1024  bfloat16     sum      -1    12.50    0.16    0.16      0    12.40    0.17    0.17      0
     4194304       2097152  bfloat16     sum      -1   1000.0    4.19    4.19      0    998.0    4.20    4.20      0
# Out of bounds values : 0 OK
"""


def test_current_layout_gives_the_out_of_place_curve():
    found = read_tool(HEAD.format(graph=0) + ROWS, "run.txt")
    curve = found.curves(SOURCE)[0]
    assert (curve.ranks, curve.bytes, curve.latency_us) == (2, [1024, 2048, 4194304], [11.5, 12.5, 1000.0])
    assert curve.mode == "graph"
    assert "hides the launch" in curve.note
    assert found.device == "Test GPU"
    assert found.notes == []
    assert "CUDA graph" in read_tool(HEAD.format(graph=5) + ROWS, "run.txt").curves(SOURCE)[0].note


def test_old_layout_without_root_and_with_error_column():
    """The last column of old releases is the largest deviation, not a count: 4e-07 is no wrong result."""
    text = """# nThread: 1 nGpus: 1 minBytes: 8
#   Rank  0 Pid  10 on boxa device  0 [0x01] Test GPU
#   Rank  1 Pid  11 on boxa device  1 [0x02] Test GPU
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
        4096          1024   float     sum    20.10    0.20    0.20  4e-07    20.00    0.20    0.20  0e+00
        8192          2048   float     sum    21.10    0.39    0.39  4e-07    21.00    0.39    0.39  0e+00
"""
    curve = read_tool(text, "old.txt").curves(SOURCE)[0]
    assert (curve.ranks, curve.latency_us) == (2, [20.1, 21.1])


def test_rank_marks_inside_rows_are_dropped():
    text = HEAD.format(graph=0) + ROWS
    marked = "\n".join(f"[1,0]<stdout>:[0]{line}" for line in text.splitlines())
    torn = marked.replace("      -1    11.50", "      -1[0]    11.50")
    assert read_tool(torn, "run.txt").curves(SOURCE)[0] == read_tool(text, "run.txt").curves(SOURCE)[0]


def test_ranks_come_from_bus_bandwidth_when_the_header_is_cut():
    """busbw / algbw = 175.0 / 100.0 = 2 x 7 / 8: eight ranks."""
    text = "#  size count type redop root time algbw busbw #wrong\n"
    text += "4096 1024 float sum -1 30.0 0.14 0.24 0\n1073741824 268435456 float sum -1 10737.4 100.0 175.0 0\n"
    found = read_tool(text, "cut.txt")
    assert found.runs[0].ranks == 8
    assert "8 ranks by busbw / algbw" in found.notes[0]


def test_bad_rows_are_left_out_with_file_and_line():
    bad = """        8192          4096  bfloat16     sum      -1    13.00    0.63    0.63     17    13.10    0.63    0.63     17
       16384          8192  bfloat16     sum      -1      N/A     N/A     N/A    N/A    14.50    1.13    1.13      0
       32768         16384  bfloat16     sum
       65536         32768  bfloat16   magic      -1    19.00    3.45    3.45      0    19.10    3.43    3.43      0
"""
    found = read_tool(HEAD.format(graph=0) + ROWS + bad, "run.txt")
    assert [row.size for row in found.runs[0].rows] == [1024, 2048, 4194304, 16384], (
        "in place where out of place is missing"
    )
    assert found.runs[0].rows[-1].microseconds == 14.5
    assert [note.split(":")[0] for note in found.notes] == [f"run.txt, line {line}" for line in (12, 14, 15)]
    assert "17 wrong results" in found.notes[0]


def test_a_size_measured_twice_gives_its_median():
    twice = "        1024           512  bfloat16     sum      -1    13.50    0.09    0.09      0\n"
    curve = read_tool(HEAD.format(graph=0) + ROWS + twice, "run.txt").curves(SOURCE)[0]
    assert curve.latency_us[0] == 12.5


def test_an_empty_table_is_a_hang():
    with pytest.raises(InputError, match=r"run.txt: the table that starts at line 6 has no usable row; .*hung"):
        read_tool(HEAD.format(graph=0), "run.txt")


def test_another_collective_is_refused():
    """Reduce-scatter over 2 ranks has busbw / algbw = 1 / 2."""
    text = HEAD.format(graph=0) + "1048576 524288 bfloat16 sum -1 100.0 10.5 5.25 0 100.0 10.5 5.25 0\n"
    with pytest.raises(InputError, match=r"busbw / algbw is 0.5.*all_reduce_perf"):
        read_tool(text, "run.txt")


def test_a_log_of_several_collectives_gives_the_all_reduce():
    """Reduce-scatter and all-gather (busbw / algbw = 1 / 2 over 2 ranks) before and after it are left out with notes."""
    others = [
        HEAD.format(graph=0) + f"1048576 524288 bfloat16 {op} -1 100.0 10.5 5.25 0 100.0 10.5 5.25 0\n"
        for op in ("sum", "none")
    ]
    found = read_tool(others[0] + HEAD.format(graph=0) + ROWS + others[1], "all.txt")
    assert [(c.ranks, c.bytes) for c in found.curves(SOURCE)] == [(2, [1024, 2048, 4194304])]
    assert any("a table left out: busbw / algbw is 0.5" in note for note in found.notes)
    assert any("row that reduces nothing left out" in note for note in found.notes)
    with pytest.raises(InputError, match="reduces nothing"):
        read_tool(others[1], "gather.txt")


def test_every_layout_of_the_header_is_read_by_its_names():
    """Per-iteration columns (-I), timestamps (-T), algo and proto columns, no check (-c 0), in place alone: 11.5 us each."""
    head = "# nThread 1 nGpus 2 minBytes 8\n#  Rank  0 Pid 1 on a device  0 [0x01] GPU\n#  Rank  1 Pid 1 on a device  1 [0x02] GPU\n"
    start = "#  size  count  type  redop  root"
    group, more = "  time  algbw  busbw  #wrong", "  i_min  i_max  i_p99  i_cv%"
    row, values, extra = "1024 512 half sum -1", "  11.50 0.09 0.09 0", "  11.0 12.0 11.9 2.1"
    layouts = [
        (start + 2 * (group + more), row + 2 * (values + extra)),
        (start + 2 * group + "  timestamp", row + 2 * values + " 2026-08-01 12:00:00"),
        (start + "  algo  proto" + 2 * group, row + "  RING  LL128" + 2 * values),
        (start + 2 * group, row + 2 * values.replace(" 0", " N/A").replace("N/A.09", "0.09")),
        (start + 2 * group, row + values),
    ]
    for header, line in layouts:
        curve = read_tool(f"{head}{header}\n{line}\n", "run.txt").curves(SOURCE)[0]
        assert (curve.ranks, curve.bytes, curve.latency_us) == (2, [1024], [11.5]), header


def test_json_of_the_newest_release():
    group = {"time": 11.5, "alg_bw": 0.09, "bus_bw": 0.16, "nwrong": None}
    config = {"nthreads": 1, "ngpus": 4, "graph": 20, "devices": [{"rank": 0, "device_info": "Test GPU"}]}
    results = [{"size": 1024, "out_of_place": group, "in_place": None}, {"size": "odd"}, None]
    found = read_tool(json.dumps({"version": 2, "config": config, "results": results}), "run.json")
    curve = found.curves(SOURCE)[0]
    assert (curve.ranks, curve.bytes, curve.latency_us) == (4, [1024], [11.5])
    assert "CUDA graph" in curve.note
    assert found.device == "Test GPU"
    with pytest.raises(InputError, match="is not whole JSON"):
        read_tool('{"results": [{"in_place": {"alg_bw": 1', "cut.json")


def test_a_loop_over_gpu_counts_gives_a_curve_for_each():
    """Two runs in one file, over 2 and over 4 ranks; the second hangs before its first row in a third run."""
    four = HEAD.format(graph=0).replace(
        "# Using", "#  Rank  2 Pid 1 on b device 2 [0x03] X\n#  Rank  3 Pid 1 on b device 3 [0x04] X\n# Using"
    )
    row = "     1024           512  bfloat16     sum      -1    21.50    0.05    0.07      0    21.40    0.05    0.07      0\n"
    found = read_tool(HEAD.format(graph=0) + ROWS + four + row + HEAD.format(graph=0), "loop.txt")
    assert [(c.ranks, c.latency_us[0]) for c in found.curves(SOURCE)] == [(2, 11.5), (4, 21.5)]
    assert "hung or failed" in found.notes[-1]


@pytest.mark.parametrize(
    "prefix",
    [
        "[1,0]<stdout>:", "[prterun-host1-4411@1,0]<stdout>: ", "0: ", "0:node1: ", "node17: ", "nccl-launcher-x7k2p nccl | ",
        "2026-05-01T12:00:{i:02}.{i}Z ", "Tue May {i:2} 12:00:00 2026<stdout>: ", "Tue May  1 12:00:{i:02} 2026[1,0]<stdout>:",
        "\x1b[0;3{i}m",
    ],
)  # fmt: skip
def test_what_launchers_write_before_each_line_is_dropped(prefix):
    """Open MPI of two generations, Slurm, pdsh, pods, and clocks that go on from line to line: the same readings."""
    plain = HEAD.format(graph=0) + ROWS
    lines = [prefix.format(i=i + 3) + line for i, line in enumerate(plain.splitlines())]
    assert read_tool("\n".join(lines), "run.txt") == read_tool(plain, "run.txt")
    links = P2P.format(access="Device=0 CAN Access Peer Device=1")
    pod = [f"gpu-box-7 | {line}" for line in links.splitlines()]
    assert read_tool("\n".join(pod), "p2p.txt") == read_tool(links, "p2p.txt")


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(blacklist_categories=["Cc", "Cs", "Zl", "Zp"], blacklist_characters="#"), max_size=60))
def test_any_prefix_gives_the_readings_or_one_line(prefix):
    plain = HEAD.format(graph=0) + ROWS
    try:
        found = read_tool("\n".join(prefix + line for line in plain.splitlines()), "run.txt")
    except InputError:
        return
    assert {size for run in found.runs for size in (row.size for row in run.rows)} <= {1024, 2048, 4194304}


@pytest.mark.parametrize(
    ("mine", "other", "differ"),
    [
        ("NVIDIA H200", "NVIDIA H200 141GB", False),
        ("NVIDIA H200", "NVIDIA H100 80GB HBM3", True),
        ("NVIDIA A100 SXM 80GB", "NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 2080 Ti", True),
        ("NVIDIA H200", "NVIDIA GH200 480GB", True),
        ("NVIDIA H200", "", False),
        ("NVIDIA H200", "2x NVIDIA H200", False),
        ("NVIDIA H200", "H200_SXM_141GB", False),
        ("NVIDIA GeForce RTX 4090", "RTX4090", False),
        ("AMD Instinct MI300X", "AMD_Instinct_MI300X_OAM", False),
        ("NVIDIA H100", "NVIDIA A100", True),
        ("NVIDIA L40S", "NVIDIA L40", True),
    ],
)
def test_a_gpu_is_told_by_its_number(mine: str, other: str, differ: bool) -> None:
    gpu = load_profile("1x-h200").gpu.model_copy(update={"name": mine})
    assert gpu.is_other_than(other) is differ


def test_impossible_numbers_are_left_out():
    """1e-9 and 1e24 us are no times, 1e23 GPUs no number of ranks."""
    head = "# nThread 1 nGpus 2\n"
    for time in ("1e-9", "1e24"):
        with pytest.raises(InputError, match="row without a time"):
            read_tool(head + f"4096 1024 float sum -1 {time} 0.36 0.62 0\n", "run.txt")
    huge = {
        "config": {"ngpus": 1e23, "devices": [{}]},
        "results": [{"size": 4096, "in_place": {"time": 11.5, "alg_bw": 0.3}}],
    }
    assert read_tool(json.dumps(huge), "run.json").runs[0].ranks is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD.format(graph=0).replace("(us)", "(ms)") + ROWS, "line 7: a column is in ms"),
        (HEAD.format(graph=0).replace("time", "cputime") + ROWS, "holds the host's time"),
        ("# nThread 1 nGpus 1\n#  Rank  0 Pid 1 on a device 0 [0x01] X\n" + "4096 1024 float sum -1 4.1 1.00 0.00 0\n" * 3, "ran on one rank"),
        (HEAD.format(graph=0) + "4096 1024 float sum -1 11.5 356.0 356.0 0 11.5 356.0 356.0 0\n", "4096 bytes in 11.5 us are not 356 GB/s"),
        (HEAD.format(graph=0) + "0 0 float sum -1 11.5 0.00 0.00 0 11.5 0.00 0.00 0\n", "no usable row"),
    ],
)  # fmt: skip
def test_other_units_and_runs_that_reduce_nothing_are_refused(text, words):
    with pytest.raises(InputError, match=words):
        read_tool(text, "run.txt")


def test_ranks_that_the_printed_digits_leave_open_are_said():
    """busbw / algbw of 16 ranks is 1.875; with two decimals of 1.01 and 1.89 GB/s, 14 to 17 ranks would print the same."""
    text = "#  size count type redop root time algbw busbw #wrong\n1048576 262144 float sum -1 1038 1.01 1.89 0\n"
    found = read_tool(text, "cut.txt")
    assert found.runs[0].ranks == 16
    assert "from 14 to 17 would fit" in found.notes[0]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60), st.integers(0, 2000), st.integers(0, 80))
def test_torn_output_gives_readings_or_one_line(noise, place, removed):
    text = HEAD.format(graph=0) + ROWS
    at = place % len(text)
    try:
        found = read_tool(text[:at] + noise + text[at + removed :], "run.txt")
    except InputError as error:
        message = str(error)
    else:
        assert found.runs
        assert all(row.microseconds > 0 for run in found.runs for row in run.rows)
        message = ""
    assert "\n" not in message


# --- links ---------------------------------------------------------------------------------------------------------

P2P = """[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]
Device: 0, Test GPU, pciBusID: 1, pciDeviceID: 0, pciDomainID:0
Device: 1, Test GPU, pciBusID: 2, pciDeviceID: 0, pciDomainID:0
{access}
P2P Connectivity Matrix
     D\\D     0     1
     0       1     1
     1       1     1
Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1
     0 900.00  20.00
     1  22.00 910.00
Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\\D     0      1
     0 900.00  50.00
     1  54.00 910.00
P2P=Disabled Latency Matrix (us)
   GPU     0      1
     0   1.50  14.00
     1  15.00   1.40
P2P=Enabled Latency (P2P Writes) Matrix (us)
   GPU     0      1
     0   1.50   0.80
     1   1.00   1.40
"""


def test_p2p_matrices_give_medians_over_pairs():
    found = read_tool(P2P.format(access="Device=0 CAN Access Peer Device=1"), "p2p.txt")
    assert found.figures == {
        "pair_copy_gb_s": 21.0,
        "pair_p2p_gb_s": 52.0,
        "pair_copy_us": 14.5,
        "pair_p2p_us": 0.9,
        "own_memory_copy_gb_s": 905.0,
        "p2p": True,
        "gpus": 2,
    }
    assert read_tool(P2P.format(access="Device=0 CANNOT Access Peer Device=1"), "p2p.txt").figures["p2p"] is False


def test_nvbandwidth_matrices():
    text = """nvbandwidth Version: v0.8
Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     55.00     57.00

Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    400.00
 1    396.00       N/A

SUM device_to_device_memcpy_read_ce 796.00
"""
    assert read_tool(text, "nv.txt").figures == {"host_to_gpu_gb_s": 56.0, "pair_p2p_gb_s": 398.0}


def test_nvbandwidth_tells_single_links_from_all_at_once():
    """Testcases that load several links share a title with those that load one; latencies are in ns."""
    text = """nvbandwidth Version: v0.8
Device 0: Test GPU (00000000:01:00)

Running all_to_host_memcpy_ce.
memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)
           0         1
 0     20.00     20.00

Running device_to_host_memcpy_ce.
memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)
           0         1
 0     52.00     54.00

Running device_to_device_bidirectional_memcpy_read_ce.
memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)
           0         1
 0       N/A    700.00
 1    702.00       N/A

Running device_local_copy.
memcpy local GPU(column) bandwidth (GB/s)
           0         1
 0   1900.00   1904.00

Running device_to_device_latency_sm.
Device to Device Latency SM GPU(row) <-> GPU(column) (ns)
           0         1
 0       N/A    750.00
 1    770.00       N/A

Running all_to_one_write_ce.
memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)
           0         1
 0     90.00     90.00
"""
    found = read_tool(text, "nv.txt")
    assert found.device == "Test GPU"
    assert found.figures == {
        "gpu_to_host_gb_s": 53.0,
        "pair_both_ways_gb_s": 701.0,
        "own_memory_copy_gb_s": 1902.0,
        "pair_p2p_us": 0.76,
    }


def test_nvbandwidth_json():
    case = {"name": "host_to_device_memcpy_ce", "status": "Passed"}
    case |= {
        "bandwidth_description": "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)",
        "bandwidth_matrix": [["55.0", "57.0"]],
    }
    waived = {"name": "device_to_device_memcpy_read_ce", "status": "Waived"}
    assert read_tool(json.dumps({"nvbandwidth": {"testcases": [waived, case]}}), "nv.json").figures == {
        "host_to_gpu_gb_s": 56.0
    }
    with pytest.raises(InputError, match="is not nvbandwidth's JSON"):
        read_tool('{"nvbandwidth": {"testcases": [', "nv.json")


def test_matrices_after_an_empty_line_and_json_after_a_launchers_words():
    """A line between title and matrix, as older samples print it, changes nothing; nor does what mpirun says before."""
    links = P2P.format(access="Device=0 CAN Access Peer Device=1")
    assert read_tool(links.replace("(us)\n", "(us)\n\n"), "p2p.txt") == read_tool(links, "p2p.txt")
    case = {"name": "host_to_device_memcpy_ce", "bandwidth_matrix": [["55.0", "57.0"]]}
    case["bandwidth_description"] = "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)"
    text = "--- a warning of mpirun\n" + json.dumps({"nvbandwidth": {"testcases": [case]}}) + "\ndone\n"
    assert read_tool(text, "nv.json").figures == {"host_to_gpu_gb_s": 56.0}


def test_text_of_no_tool_is_refused():
    for text in ("", "hello", "nvbandwidth Version: v0.8\nERROR: no device\n", P2P[:60]):
        with pytest.raises(InputError, match=r"some\.txt"):
            read_tool(text, "some.txt")


def test_readings_go_into_a_profile():
    box = load_profile("8x-rtx-pro-6000")
    readings = read_tool(HEAD.format(graph=0) + ROWS, "run.txt")
    after = into_profile(box, readings, default_source(readings, "run.txt", "2026-01-01"))
    (curve,) = [c for c in after.allreduce if (c.implementation, c.ranks, c.mode) == ("nccl", 2, "graph")]
    assert curve.latency_us == [11.5, 12.5, 1000.0]
    assert curve.source.reference == "nccl-tests on Test GPU, run.txt"
    assert len(after.allreduce) == len(box.allreduce), "it replaces the curve of the same kind"
    links = into_profile(box, read_tool(P2P.format(access=""), "p2p.txt"), SOURCE).environment["links"]
    assert links["p2pBandwidthLatencyTest"]["pair_p2p_gb_s"] == 52.0
    with pytest.raises(InputError, match=r"2 ranks do not fit a profile of 1 GPUs; give a profile with so many `gpus`"):
        into_profile(load_profile("1x-h200"), readings, SOURCE)


# --- operator tables -----------------------------------------------------------------------------------------------

SYSTEM = """gpu: {mem_bw: 2.0e+12, mem_capacity: 8.0e+10, bfloat16_tc_flops: 3.0e+14, power: 300, sm_version: 90}
node: {num_gpus_per_node: 8, intra_node_bw: 6.4e+10, pcie_bw: 6.4e+10}
"""
L2 = 50e6


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet tables need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet tables need pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def gemm_rows(fixed_ms: float, gb_s: float, number: str = "bfloat16", weight_bytes: float = 2) -> list[dict[str, Any]]:
    """Linear layers at `gb_s`, but weights below 25 MB twice as fast: they stay in the cache."""
    rows = []
    for n in (512, 1024, 4096, 16384):
        for k in (512, 2048, 8192):
            for m in (1, 2, 8, 16, 4096):
                size = n * k * weight_bytes
                reach = gb_s * (2 if size < 25e6 else 1) * 1e9
                seconds = fixed_ms * 1e-3 + float(np.hypot(size / reach, 2 * m * n * k / 250e12))
                rows.append({"gemm_dtype": number, "m": m, "n": n, "k": k, "latency": seconds * 1e3})
    return rows


def moe_rows(fixed_us: float, gb_s: float) -> list[dict[str, Any]]:
    """INT4 experts: 2 rows of top-8 touch 16 experts, and so on up to all 128; small ones come from the cache."""
    rows = []
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        size = min(128, tokens * 8) * 3 * 4096 * 512 * (0.5 + 2 / 128)
        reach = gb_s * (4 if size < L2 else 1) * 1e9
        for distribution, factor in (("balanced", 1.0), ("power_law_1.2", 0.5)):
            row = {"moe_dtype": "int4_wo", "kernel_source": "marlin", "num_tokens": tokens, "hidden_size": 4096}
            row |= {"inter_size": 1024, "topk": 8, "num_experts": 128, "moe_tp_size": 2, "moe_ep_size": 1}
            seconds = fixed_us * 1e-6 + size / reach
            rows.append({**row, "distribution": distribution, "latency": seconds * 1e3 * factor})
    return rows


def gqa_rows(fixed_us: float, gb_s: float) -> list[dict[str, Any]]:
    """One KV head of 128: 512 bytes a cached token."""
    rows = []
    for batch in (1, 4, 16, 64):
        for step in (1023, 2047, 16383, 131071):
            seconds = fixed_us * 1e-6 + batch * (step + 1) * 512 / (gb_s * 1e9)
            row = {
                "kernel_source": "fa",
                "batch_size": batch,
                "num_heads": 8,
                "num_key_value_heads": 1,
                "head_dim": 128,
            }
            rows.append({**row, "kv_cache_dtype": "bfloat16", "step": step, "latency": seconds * 1e3})
    return rows


def allreduce_rows(microseconds: dict[int, float], ranks: int = 8, kernel: str = "X_graph") -> list[dict[str, Any]]:
    """Message sizes are in elements of two bytes, as in the real tables; latency in ms."""
    return [
        {"kernel_source": kernel, "num_gpus": ranks, "message_size": size // 2, "latency": us * 1e-3}
        for size, us in microseconds.items()
    ]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable aiconfigurator_core with one made-up system; gives the folder of its tables."""
    root = tmp_path / "aiconfigurator_core"
    data = root / "systems" / "data" / "test_gpu"
    data.mkdir(parents=True)
    (root / "__init__.py").touch()
    (root / "systems" / "test_gpu.yaml").write_text(SYSTEM)
    write(data / "gemm" / "sglang" / "0.9.0" / "gemm_perf.parquet", gemm_rows(0.009, 900))
    write(data / "gemm" / "sglang" / "0.10.0" / "gemm_perf.parquet", gemm_rows(0.005, 1600))
    write(data / "gemm" / "sglang" / "0.10.0rc1" / "gemm_perf.parquet", gemm_rows(0.009, 900))
    write(data / "moe" / "sglang" / "0.10.0" / "moe_perf.parquet", moe_rows(20, 1500))
    write(data / "attention" / "vllm" / "0.1" / "generation_attention_perf.parquet", gqa_rows(8, 1700))
    curve = {1024: 20.0, 4096: 21.0, 14336: 27.0, 65536: 60.0}
    write(data / "comm" / "sglang" / "0.10.0" / "custom_allreduce_perf.parquet", allreduce_rows(curve))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "aiconfigurator_core", raising=False)
    importlib.invalidate_caches()
    return data


def test_tables_give_back_the_rates_they_were_made_from(package):
    """Newest version first (0.10.0 beats 0.9.0 and its own candidate), cold points only, elements as two bytes."""
    found = import_system("Test_GPU", l2_mb=L2 / 1e6)
    gemm, moe, gqa = (found.operators[name] for name in ("gemm_bf16", "moe_int4", "attention_gqa"))
    assert (gemm.fixed_us, gemm.bandwidth_gb_s) == (pytest.approx(5, rel=0.02), pytest.approx(1600, rel=0.02))
    assert gemm.peak_tflops == pytest.approx(250, rel=0.02)
    assert "sglang 0.10.0;" in gemm.source.reference
    assert (moe.fixed_us, moe.bandwidth_gb_s) == (pytest.approx(20, rel=0.02), pytest.approx(1500, rel=0.02))
    assert (gqa.fixed_us, gqa.bandwidth_gb_s) == (pytest.approx(8, rel=0.02), pytest.approx(1700, rel=0.02))
    (curve,) = found.allreduce
    assert latency_us(curve, 14336) == pytest.approx(27)
    assert found.gpu["bandwidth_gb_s"] == 2000
    assert found.gpu["compute_capability"] == "9.0"
    assert (found.gpus, found.link) == (8, "pcie")


def test_a_lone_spike_is_taken_out_of_a_curve(package):
    spike = {1024: 20.0, 2048: 90.0, 4096: 21.0, 8192: 22.0, 16384: 21.5, 32768: 30.0}
    write(package / "comm" / "sglang" / "0.11" / "custom_allreduce_perf.parquet", allreduce_rows(spike))
    (curve,) = import_system("test_gpu").allreduce
    assert curve.latency_us == sorted(curve.latency_us)
    assert max(curve.latency_us) == pytest.approx(30)
    assert latency_us(curve, 2048) == pytest.approx(21, rel=0.05)


def test_tables_that_cannot_be_used_are_noted_and_the_next_is_tried(package):
    torn = package / "gemm" / "sglang" / "0.12.0" / "gemm_perf.parquet"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"PAR1 not really")
    strange = package / "moe" / "sglang" / "0.12.0" / "moe_perf.parquet"
    write(strange, [{"moe_dtype": "int4_wo", "latency": 1.0}])
    found = import_system("test_gpu", l2_mb=L2 / 1e6)
    assert found.operators["gemm_bf16"].fixed_us == pytest.approx(5, rel=0.02)
    assert found.operators["moe_int4"].fixed_us == pytest.approx(20, rel=0.02)
    assert any(str(torn) in note and "not a readable Parquet table" in note for note in found.notes)
    assert any(str(strange) in note and "no column" in note for note in found.notes)


@pytest.mark.parametrize("gb_s", [2500, 300])
def test_a_bandwidth_that_no_cold_read_has_is_refused(package, gb_s):
    """Datasheet 2000 GB/s: 2500 was read from a cache, 300 is not the time to read the stored bytes."""
    write(package / "gemm" / "sglang" / "0.10.0" / "gemm_perf.parquet", gemm_rows(0.005, gb_s))
    found = import_system("test_gpu", l2_mb=L2 / 1e6)
    assert "0.10.0rc1" in found.operators["gemm_bf16"].source.reference


def test_a_whole_profile_from_tables(package):
    profile, _ = from_tables("test_gpu", l2_mb=L2 / 1e6, date="2026-01-01")
    assert {"gemm_bf16", "attention_gqa", "norm", "tiny", "router", "gemm_int8", "moe_nvfp4"} & set(profile.operators)
    assert {rate.source.kind for rate in profile.operators.values()} == {"published", "assumed"}
    (curve,) = profile.allreduce
    assert curve.implementation == "nccl", "above two PCIe-only GPUs the engine's custom kernel is off"


def test_unknown_system_and_missing_class(package):
    with pytest.raises(InputError, match=r"no tables of system 'test_gpv'; did you mean 'test_gpu'\?"):
        import_system("test_gpv")
    for path in package.glob("gemm/*/*/*.parquet"):
        path.unlink()
    with pytest.raises(InputError, match="no gemm_bf16 for test_gpu"):
        from_tables("test_gpu")
    assert systems() == ["test_gpu"]


def test_without_the_package_one_line_names_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"aiconfigurator_core is not installed; pip install aiconfigurator"):
        package_folder()


def test_without_pyarrow_one_line_names_the_extra(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"pip install specsim\[parquet\]"):
        import_system("test_gpu")


# --- derived classes -----------------------------------------------------------------------------------------------


def test_classes_without_a_table_say_what_they_stand_on():
    known = load_profile("8x-h200").operators
    bare = {name: known[name] for name in ("gemm_bf16", "moe_bf16", "moe_int4", "attention_gqa")}
    filled = fill(bare)
    assert {name: filled[name] for name in bare} == bare, "what was measured stays"
    int4 = filled["gemm_int4"]
    assert int4.source.kind == "assumed"
    assert int4.source.reference.startswith("no table: gemm_bf16")
    share = bare["moe_int4"].bandwidth_gb_s / bare["moe_bf16"].bandwidth_gb_s
    assert int4.bandwidth_gb_s == pytest.approx(bare["gemm_bf16"].bandwidth_gb_s * share, rel=1e-3)
    assert "gemm_fp8" not in filled, "nothing known reads like it"


def test_scaling_to_another_gpu_keeps_fixed_times_and_follows_the_datasheet():
    like, target = load_profile("8x-l40s"), load_profile("1x-rtx-4090")
    rates = scaled(like.operators, target.gpu, like.gpu)
    wide = target.gpu.bandwidth_gb_s / like.gpu.bandwidth_gb_s
    for name, rate in rates.items():
        assert rate.fixed_us == like.operators[name].fixed_us
        assert rate.bandwidth_gb_s == pytest.approx(like.operators[name].bandwidth_gb_s * wide, rel=1e-3)
        assert rate.relative_uncertainty >= 0.25


# --- the command ---------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main(["hardware", *arguments])
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out, err


def test_list_and_show_print_every_profile(capsys):
    code, out, _ = run(capsys, "list", "--json")
    names = [p["name"] for p in json.loads(out)["profiles"]]
    assert code == 0
    assert "8x-pcie-field" in names
    assert "8x-pcie-field" in run(capsys, "list")[1]
    code, out, _ = run(capsys, "show", "8x-pcie-field")
    assert code == 0
    for words in ("moe_int4", "fitted", "all-reduce", "launch kernel", "caveat: "):
        assert words in out
    shown = json.loads(run(capsys, "show", "8X-PCIE-field", "--json")[1])
    assert shown["schema"] == "specsim.hardware/1"


def test_diff_and_its_chart(capsys, tmp_path):
    chart = tmp_path / "curves.svg"
    code, out, err = run(capsys, "diff", "8x-rtx-pro-6000", "8x-pcie-field", "--plot", str(chart))
    assert code == 0
    assert "allreduce.nccl.8.graph.32768.latency_us" in out
    assert str(chart) in err
    assert chart.stat().st_size > 5000
    found = json.loads(run(capsys, "diff", "1x-h200-published", "1x-h200-published", "--json")[1])
    assert found["differences"] == []
    assert "same numbers" in run(capsys, "diff", "8x-h100", "8x-h100")[1]
    text = (Path(__file__).parent.parent / "hardware" / "1x-h200.yaml").read_text()
    for day, said in (("monday", text), ("friday", text.replace("bandwidth_gb_s: 4", "bandwidth_gb_s: 3", 1))):
        (tmp_path / f"{day}.yaml").write_text(said)
    days = [str(tmp_path / f"{day}.yaml") for day in ("monday", "friday")]
    assert run(capsys, "diff", *days)[1].split()[:4] == ["number", "monday", "friday", "relative"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "8x-rtx-6000"), "did you mean"),
        (("show", "1x-h200", "--plot", "x.png"), "no all-reduce curve to draw"),
        (("diff", "8x-h100", "8x-h200", "--plot", "x.docx"), "no picture format"),
        (("import", "missing.txt"), "no such file"),
        (("import", "missing.txt", "--into", "8x-h200"), "is a shipped profile"),
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_import_writes_a_profile(capsys, tmp_path):
    log, box = tmp_path / "run.txt", tmp_path / "mybox.yaml"
    log.write_text(HEAD.format(graph=0) + ROWS)
    code, out, _ = run(capsys, "import", str(log))
    assert code == 0
    assert "all-reduce over 2 ranks at 3 sizes" in out
    arguments = ("--into", "2x-h200", "-o", str(box), "--date", "2026-03-04", "--reference", "my rack, slot 3")
    code, out, _ = run(capsys, "import", str(log), *arguments)
    assert code == 0
    written = load_profile(str(box))
    assert written.name == "mybox"
    (curve,) = [c for c in written.allreduce if c.implementation == "nccl" and c.mode == "graph"]
    assert (curve.source.reference, curve.source.date) == ("my rack, slot 3", "2026-03-04")
    code, out, _ = run(capsys, "import", str(log), "--into", str(box), "--implementation", "mine", "--json")
    assert json.loads(out)["written"] == str(box)
    assert "mine" in {c.implementation for c in load_profile(str(box)).allreduce}


def test_import_of_tables(capsys, tmp_path, package):
    box = tmp_path / "test.yaml"
    code, out, _ = run(capsys, "import", "aiconfigurator:test_gpu", "-o", str(box), "--l2-mb", "50")
    assert code == 0
    assert "operator classes from tables" in out
    assert load_profile(str(box)).operators["gemm_bf16"].fixed_us == pytest.approx(5, rel=0.02)
    merged = tmp_path / "merged.yaml"
    code, _, _ = run(capsys, "import", "aiconfigurator:test_gpu", "--into", "8x-l40s", "-o", str(merged))
    assert code == 0
    after, before = load_profile(str(merged)), load_profile("8x-l40s")
    assert after.gpu == before.gpu
    assert after.operators["gemm_bf16"].fixed_us == pytest.approx(5, rel=0.02)
    assert after.operators["norm"] == before.operators["norm"]


def test_one_rank_that_prints_bandwidths_is_refused_too():
    """One "# Rank" line beside rows whose bandwidths are too small to tell ranks from."""
    text = "# nThread 1 nGpus 1 minBytes 8\n#  Rank  0 Pid 1 on a device  0 [0x01] GPU\n#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong\n"
    rows = "".join(
        f"{size} {size // 4} float sum -1 {20 + size / 1e4:.2f} 0.1 0.2 0 21.0 0.1 0.2 0\n" for size in (4096, 16384)
    )
    with pytest.raises(InputError, match="one rank"):
        read_tool(text + rows, "run.txt").curves(SOURCE)


def test_rows_without_numbers_are_left_out_and_other_columns_noted(package):
    """Every third row of the linear layers has no time; times as text of numbers are numbers; as words they are not."""
    path = package / "gemm" / "sglang" / "0.10.0" / "gemm_perf.parquet"
    rows = gemm_rows(0.005, 1600)
    holes = [
        {**row, "latency": (None, float("nan"), -1.0)[i % 3] if i % 4 == 0 else row["latency"]}
        for i, row in enumerate(rows)
    ]
    write(path, holes)
    assert import_system("test_gpu", l2_mb=L2 / 1e6).operators["gemm_bf16"].fixed_us == pytest.approx(5, rel=0.02)
    write(path, [{**row, "latency": str(row["latency"])} for row in rows])
    assert import_system("test_gpu", l2_mb=L2 / 1e6).operators["gemm_bf16"].fixed_us == pytest.approx(5, rel=0.02)
    write(path, [{**row, "latency": "fast"} for row in rows])
    found = import_system("test_gpu", l2_mb=L2 / 1e6)
    assert found.operators["gemm_bf16"].fixed_us == pytest.approx(9, rel=0.02), "the release before serves"
    assert any("column 'latency' is not of numbers" in note for note in found.notes)


def test_a_system_without_tables_is_told_from_an_unknown_one(package):
    (package.parent / "bare_gpu").mkdir()
    (package.parent.parent / "bare_gpu.yaml").write_text(SYSTEM)
    with pytest.raises(InputError, match="'bare_gpu' is described but has no tables"):
        import_system("bare_gpu")
    with pytest.raises(InputError, match="no tables of system 'other'"):
        import_system("other")
