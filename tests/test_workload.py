"""Requests: moments of what is drawn, trace layouts, and traces that cannot be read."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.errors import InputError
from specsim.workload import BLOCK, LAST, PS, Lengths, Requests, Trace, synthetic

OWN = "arrival_s,input_tokens,output_tokens\n"


def joined(blocks: object) -> Requests:
    parts = list(blocks)  # type: ignore[call-overload]
    return Requests(
        *(np.concatenate([getattr(b, n) for b in parts]) for n in ("arrival", "input_tokens", "output_tokens"))
    )


def write(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


# Drawn requests


@pytest.mark.parametrize(("shape", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (float("inf"), 0.0)])
def test_gaps_have_the_mean_and_variation_that_were_asked(shape: float, variation: float) -> None:
    """Gamma gaps of shape k have a coefficient of variation of 1 / sqrt(k)."""
    all_ = joined(synthetic(200_000, Lengths(10), Lengths(10), rate=5.0, shape=shape))
    gaps = np.diff(all_.arrival) / PS
    assert gaps.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03, abs=1e-9)
    assert all_.arrival[0] == 0
    assert (gaps >= 0).all()


def test_lengths_are_uniform_between_their_ends() -> None:
    lengths = Lengths(1000, 0.5)
    drawn = lengths.draw(np.random.default_rng(0), 100_000)
    assert (drawn.min(), drawn.max()) == (500, 1000)
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.005)
    assert set(Lengths(7).draw(np.random.default_rng(0), 50)) == {7}
    assert Lengths(10, 0.0).least == 1


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert joined(synthetic(10, Lengths(1), Lengths(1))).arrival.tolist() == [0] * 10


def test_a_seed_gives_the_same_requests_and_lengths_do_not_move_arrivals() -> None:
    a, b = (joined(synthetic(1000, Lengths(n, 0.1), Lengths(5), rate=1.0, seed=3)) for n in (10, 500))
    assert np.array_equal(a.arrival, b.arrival)
    assert not np.array_equal(a.arrival, joined(synthetic(1000, Lengths(10), Lengths(5), rate=1.0, seed=4)).arrival)


def test_requests_come_in_blocks() -> None:
    sizes = [len(block) for block in synthetic(2 * BLOCK + 5, Lengths(1), Lengths(1), rate=100.0)]
    assert sizes == [BLOCK, BLOCK, 5]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"count": 0}, "--num-requests"),
        ({"rate": 0.0}, "--rate"),
        ({"rate": float("nan")}, "--rate"),
        ({"rate": 1e-9}, "too long"),
        ({"shape": 0.0}, "--burstiness"),
        ({"rate": 3e-6, "shape": 0.001, "count": 20, "seed": 1}, "too far apart"),  # a gap beyond 63 bits of ps
        ({"rate": 1e-3, "shape": 1e-5, "count": 5000, "seed": 3}, "too far apart"),
    ],
)
def test_impossible_loads(change: dict[str, float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        joined(synthetic(**{"count": 10, "inputs": Lengths(1), "outputs": Lengths(1), **change}))  # type: ignore[arg-type]


def test_one_request_may_come_at_any_rate() -> None:
    assert joined(synthetic(1, Lengths(1), Lengths(1), rate=1e-9)).arrival.tolist() == [0]


@given(st.floats(1e-9, 1e9), st.floats(1e-4, 10), st.integers(1, 50), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_requests_come_in_order_or_not_at_all(rate: float, shape: float, count: int, seed: int) -> None:
    try:
        arrival = joined(synthetic(count, Lengths(1), Lengths(1), rate=rate, shape=shape, seed=seed)).arrival
    except InputError:
        return
    assert arrival[0] == 0
    assert (np.diff(arrival) >= 0).all()
    assert arrival[-1] <= LAST * PS


@pytest.mark.parametrize(("most", "ratio"), [(0, 1.0), (10, 1.5), (10, -0.1), (10, float("nan"))])
def test_impossible_lengths(most: int, ratio: float) -> None:
    with pytest.raises(InputError):
        Lengths(most, ratio)


# Layouts

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = [
    {"timestamp": 3000, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 6000, "input_length": 7319, "output_length": 490, "hash_ids": [0, 14]},
]


@pytest.mark.parametrize(
    ("name", "text", "arrival_s", "first"),
    [
        ("own.csv", OWN + "5,100,10\n5.25,200,20\n", [0, 0.25], (100, 10)),
        ("own.csv", "output_tokens,arrival_s,x,input_tokens\n10,1,a,100\n20,2,b,200\n", [0, 1], (100, 10)),
        ("own.jsonl", '{"arrival_s": 0, "input_tokens": 3, "output_tokens": 4}\n\n{"arrival_s": 2, "input_tokens": 3, "output_tokens": 4}\n', [0, 2], (3, 4)),
        ("semicolons.csv", OWN.replace(",", ";") + "5;100;10\n6;1;1;\n", [0, 1], (100, 10)),
        ("tabs.tsv", OWN.replace(",", "\t").title() + "5\t100\t10\n6\t1\t1\n", [0, 1], (100, 10)),
        ("azure.csv", AZURE + "2023-11-16T18:15:46Z,374,44\n2023-11-16T18:15:47.5Z,1,1\n", [0, 1.5], (374, 44)),
        ("azure23.csv", AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n", [0, 4.314579], (374, 44)),
        ("azure24.csv", AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n", [0, 0.99007], (2162, 5)),
        ("burst.csv", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n", [0, 40], (472, 18)),
        ("burst2.csv", "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n1,a,2,ChatGPT,4,1,5,x\n2,a,2,ChatGPT,4,1,5,x\n", [0, 1], (4, 1)),
        ("blanks.csv", "  \r\n" + OWN + "\r\n 5 ,100,10,,\r\n   \r\n,,\r\n\"6\",\"1\",1\r\n\r\n", [0, 1], (100, 10)),
        ("zones.csv", AZURE + "2024-05-10 00:00:00Z,3,4\n2024-05-10 05:30:01+05:30,1,1\n2024-05-10 00:00:02,1,1\n", [0, 1, 2], (3, 4)),
        ("exact.csv", "timestamp,Timestamp,Request tokens,Response tokens\n9,5,7,8\n3,6,1,1\n", [0, 1], (7, 8)),
        ("late.csv", OWN + "9007199254740992,1,2\n9007199254740994,1,1\n", [0, 2], (1, 2)),
        ("mooncake.jsonl", "".join(json.dumps(row) + "\n" for row in MOONCAKE), [0, 3], (6755, 500)),
        ("bailian.jsonl", "".join(json.dumps({"chat_id": 1, **row}) + "\n" for row in MOONCAKE), [0, 3000], (6755, 500)),
        ("vidur.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,374,44\n2,20,4\n", [0, 1.5], (374, 44)),
    ],
)  # fmt: skip
def test_layouts(tmp_path: Path, name: str, text: str, arrival_s: list[float], first: tuple[int, int]) -> None:
    all_ = joined(Trace(write(tmp_path, text, name)))
    assert all_.arrival / PS == pytest.approx(arrival_s, abs=2e-7)  # seconds since 1970 leave 0.2 us
    assert (all_.input_tokens[0], all_.output_tokens[0]) == first


def test_a_compressed_trace_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(("\ufeff" + OWN + "0,1,2\n").encode()))
    assert len(joined(Trace(path))) == 1


def test_failed_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path, OWN + "0,5,0\n1,5,5\n2,0,5\n4,5,5\n"))
    assert joined(trace).arrival.tolist() == [0, 3 * PS]
    assert trace.skipped == 2
    assert len(joined(trace)) == 2
    assert trace.skipped == 2  # reading twice does not count twice


def test_speed_and_limit(tmp_path: Path) -> None:
    path = write(tmp_path, OWN + "".join(f"{i},5,5\n" for i in range(50)))
    assert joined(Trace(path, speed=4.0, limit=3)).arrival.tolist() == [0, PS // 4, PS // 2]


def test_spread_keeps_order_and_stays_within_its_quantum(tmp_path: Path) -> None:
    path = write(tmp_path, OWN + "".join(f"{3 * (i // 10)},5,5\n" for i in range(400)))
    a, b = joined(Trace(path, spread_s=3.0, seed=1)), joined(Trace(path, spread_s=3.0, seed=1))
    assert np.array_equal(a.arrival, b.arrival)
    assert (np.diff(a.arrival) >= 0).all()
    assert len(np.unique(a.arrival)) == 400
    assert (a.arrival // (3 * PS) == np.arange(400) // 10).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("head", "row"),
    [
        (OWN, "{0},5,5\n"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "2024-05-{1:02}T{2:02}:{3:02}:00,5,5\n"),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", "{0},ChatGPT,5,5,10,API log\n"),
        ("", '{{"timestamp": {0}, "input_length": 5, "output_length": 5, "hash_ids": [1, 2, 3]}}\n'),
    ],
)
def test_a_large_trace_takes_the_memory_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, row: str, packed: bool
) -> None:
    """8,000 rows are read in blocks of 256; what is allocated at the peak, the file's own buffers of up to 0.2 MB included, stays
    below a third of the 150 bytes a row that all at once take. (`benchmarks/huge_trace.py` does it with 2 GB.)"""
    monkeypatch.setattr("specsim.workload.BLOCK", 256)
    path = tmp_path / ("large" + ("" if head else ".jsonl") + (".csv" if head else "") + (".gz" if packed else ""))
    lines = head + "".join(row.format(i, 1 + i // 1440, i // 60 % 24, i % 60) for i in range(8000))
    path.write_bytes(gzip.compress(lines.encode(), 1) if packed else lines.encode())
    tracemalloc.start()
    n = sum(len(block) for block in Trace(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == 8000
    assert peak < 8000 * 150 / 3


# Traces that cannot be read


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (OWN, "has no requests"),
        (OWN + "0,5,0\n", "has no requests that have input and output tokens, and 1 that lack them"),
        ("arrival_s,input_tokens\n0,5\n", "no column output_tokens"),
        ("TIMESTAMP,GeneratedTokens\nx,5\n", "no column ContextTokens"),
        ("a,b\n1,2\n", "no columns arrival_s, input_tokens, output_tokens"),
        ('{"timestamp": 1, "input_length": 2}\n', "no key output_length"),
        ("[1, 2]\n", "is one JSON array; give one object a line"),
        (OWN + "0,1,1\n0,1,024,1\n", "line 3: has 4 values for 3 columns; put values that hold a ',' between quotes"),
        (AZURE + "1700000000.5,1,1\n", "give a date and time such as"),
        (OWN + "5,1,1\n4,1,1\n", "line 3: arrival_s goes back by 1 s; sort the trace"),
        (OWN + "-1,1,1\n", "line 2: arrival_s is -1"),
        (OWN + "nan,1,1\n", "arrival_s is nan"),
        (OWN + "soon,1,1\n", "arrival_s is 'soon'"),
        (OWN + "0,many,1\n", "input_tokens is 'many'"),
        (OWN + "0,1,-1\n", "output_tokens is -1"),
        (OWN + "0,1.5,1\n", "input_tokens is 1.5"),
        (OWN + "0,1\n", "line 2: has no output_tokens"),
        ('{"arrival_s": 0, "input_tokens": 1, "output_tokens": null}\n', "line 1: has no output_tokens"),
        (OWN + "0,1,1\n1e9,1,1\n", "lasts too long"),
        (AZURE + "yesterday,1,1\n", "TIMESTAMP is 'yesterday'"),
        ('{"arrival_s": 0, "input_tokens": 1, "output_tokens": 1}\n{oops\n', "line 2: is not JSON"),
        ('{"arrival_s": 0, "input_tokens": 1, "output_tokens": 1}\n[]\n', "line 2: is not a JSON object"),
        ('{"arrival_s": null, "input_tokens": 1, "output_tokens": 1}\n', "line 1: has no arrival_s"),
        ('{"arrival_s": 0, "input_tokens": 1, "output_tokens": ' + "1" * 5000 + "}\n", "line 1: is not JSON"),
        ('{"arrival_s": 0, "input_tokens": true, "output_tokens": 1}\n', "line 1: input_tokens is True"),
        (OWN + "1e400,1,1\n", "arrival_s is inf"),
        (OWN + "0,1e400,1\n", "input_tokens is inf"),
        (OWN.strip() + ",input_tokens\n0,1,1,2\n", "has several columns input_tokens; keep one"),
        (OWN.strip() + "," + "x" * 200_000 + "\n0,1,1,2\n", "field larger than field limit"),
    ],
)
def test_bad_traces_are_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        joined(Trace(write(tmp_path, text)))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such trace"):
        Trace(tmp_path / "missing.csv")
    with pytest.raises(InputError, match="is a folder, not a trace; give a file"):
        Trace(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is a pipe, and a trace is read more than once; write it to a file first"):
        Trace(tmp_path / "pipe")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01" * 10)
    with pytest.raises(InputError, match="is not a text file"):
        Trace(tmp_path / "binary.csv")
    (tmp_path / "not.gz").write_bytes(b"plain")
    with pytest.raises(InputError, match=r"cannot be read: not a gzipped file.*; fetch or pack it again"):
        Trace(tmp_path / "not.gz")
    for change in ({"speed": 0.0}, {"spread_s": -1.0}, {"spread_s": 1e300}, {"spread_s": float("nan")}):
        with pytest.raises(InputError):
            Trace(write(tmp_path, OWN + "0,1,1\n"), **change)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="lasts too long"):
        joined(Trace(write(tmp_path, OWN + "0,1,1\n"), spread_s=1000.0, speed=1e-9))


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:15],
        lambda raw: raw[:10] + b"\xff" * 100,
        lambda raw: raw + b"more",
    ],
)
@pytest.mark.parametrize("row", ["{0},1,1\n", '{{"arrival_s": {0}, "input_tokens": 1, "output_tokens": 1}}\n'])
def test_a_damaged_compressed_trace_is_one_line(tmp_path: Path, damage: Callable[[bytes], bytes], row: str) -> None:
    path = tmp_path / "t.GZ"
    head = OWN if row[1:2] == "0" else ""
    path.write_bytes(damage(gzip.compress((head + "".join(row.format(i) for i in range(9000))).encode())))
    with pytest.raises(InputError, match=r"cannot be read: .*; fetch or pack it again"):
        joined(Trace(path))


@pytest.mark.parametrize(
    ("times", "coarse"),
    [
        ([0, 0, 3000, 3000, 9000], 3.0),
        ([5000, 8000, 8000, 14000], 3.0),  # from any origin
        ([0, 3000, 6000], 0.0),  # none at one time
        ([0, 0, 3000, 3500], 0.0),
        ([7000, 7000], 0.0),
    ],
)
def test_times_that_several_requests_share_are_seen_to_be_coarse(
    tmp_path: Path, times: list[int], coarse: float
) -> None:
    """Greatest common divisor of the times from the first one; below a second requests come apart enough."""
    rows = (json.dumps({"timestamp": t, "input_length": 9, "output_length": 9}) for t in times)
    trace = Trace(write(tmp_path, "\n".join(rows), "trace.jsonl"))
    for _ in range(2):  # whoever reads it again
        list(trace)
        assert trace.coarse_s == coarse
        assert trace.longest == 18
