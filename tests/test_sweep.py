"""Sweeps: ranges, rows that equal predictions, blocks that change nothing, files, resumption, fan-out, and the command."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import subprocess
import sys
import threading
import tracemalloc
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim import fanout, sweep_rows, sweep_run, swept
from specsim import sweeps as sweep
from specsim.cycle import evaluate
from specsim.errors import InputError, SpecsimError, WorkError
from specsim.memory import memory
from specsim.prediction import machine_of, predict
from specsim.ranges import numbers, whole_numbers, words
from specsim.scenarios import Scenario, build
from specsim.sweep_rows import COLUMNS, records
from specsim.sweep_text import _breakeven
from specsim.sweeps import Spec, blocks, build_case, evaluate_many, front, tasks_of

ROOT = Path(__file__).resolve().parent.parent


def make(options: dict[str, object]) -> Scenario:
    return build(**options)  # type: ignore[arg-type]


LLAMA = (("model", "Llama-3.1-8B"), ("hardware", "1x-h200"))


def small_spec(**changes: object) -> Spec:
    values: dict[str, object] = {
        "make": make,
        "cases": (LLAMA,),
        "batch": (1, 3, 8, 33),
        "context": (0, 1000, 40_000),
        "draft_tokens": (2, 4, 7),
        "kind": "rate",
        "acceptance": (0.0, 0.5, 0.85, 1.0),
    }
    return Spec(**{**values, **changes})  # type: ignore[arg-type]


def test_rows_that_are_in_a_file_are_not_asked_for_again(specsim, tmp_path):
    code, _, err = specsim("sweep", "--batch", "1:3000", "--rows", "--out", str(tmp_path / "x.csv"))
    assert code == 2
    assert f"leave it out: {tmp_path / 'x.csv'} holds them" in err


def test_a_map_of_one_of_several_acceptances_says_so():
    box = {"model": "Llama-3.1-8B", "hardware": "1x-h200", "draft_tokens": [3, 4]}
    shown = str(swept.sweep(accept_rate=[0.5, 0.6, 0.7], **box))
    assert "at accept rate 0.6, the middle of 3" in " ".join(shown.split())
    shown_of_two = str(swept.sweep(accept_rate=[0.5, 0.6, 0.7], context=[1000, 8000], **box))
    assert shown_of_two.count("accept rate 0.6") == 2  # the map's and the front's
    assert "maps of the other acceptances: give one of them alone" in shown
    for none in ({"accept_rate": 0.6}, {"accept_rate": [0.5, 0.6], "method": "none"}):
        assert "the other acceptances" not in str(swept.sweep(**none, **box))


def test_draft_lengths_beside_a_launch_line_are_all_swept():
    line = "--model-path meta-llama/Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3 --speculative-num-steps 3"
    found = swept.sweep(hardware="1x-h200", draft_tokens=range(2, 6), tp=1, accept_rate=0.6, sglang_args=line)
    assert [row["draft_tokens"] for row in found.rows] == [2, 3, 4, 5]
    assert [w for w in found.warnings if "wins" in w] == ["--draft-tokens wins over the launch line's 4, root included"]


def all_records(spec: Spec) -> list[dict[str, object]]:
    cases = {i: build_case(spec, i) for i in range(len(spec.cases))}
    return [row for task in tasks_of(spec, cases) for row in records(spec, task)]


# --- ranges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", (7,)),
        ("1,2,8", (1, 2, 8)),
        ("2:9", (2, 3, 4, 5, 6, 7, 8, 9)),
        ("1:256:x2", (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ("1:100:x10", (1, 10, 100)),
        ("1:10:x1.5", (1, 2, 3, 5, 8)),  # 1, 1.5, 2.25, 3.375, 5.06, 7.59 rounded: halves go to the even number
        ("1k,8k,64k", (1024, 8192, 65536)),
        ("1,4:8:2,4", (1, 4, 6, 8)),
        (" 1 , 2 ", (1, 2)),
        ("5:5", (5,)),
        ("1m", (1024**2,)),
    ],
)
def test_whole_numbers(text, values):
    assert whole_numbers(text, "--batch") == values


def test_steps_of_fractions_are_exact():
    """0.3 + 11 x 0.05 is 0.85 in decimals, and 0.8500000000000001 in doubles."""
    assert numbers("0.3:0.95:0.05", "--a") == tuple(float(f"{0.3 + 0.05 * i:.2f}") for i in range(14))
    assert numbers("0.3:0.95:0.05", "--a")[11] == 0.85


@pytest.mark.parametrize(
    "text",
    ["", ",", "1,,2", "a", "1:2:3:4", "9:2", "1:2.5", "1:9:0", "1:9:-1", "1:9:x1", "0:9:x2", "1:9:x0.5", "1.5", "1:", ":2", "nan", "inf", "1e999", "1:1e15", "1:2:0.0000000001", "1:1e9:x1.000001", "1_0", "٣", "0x10"],
)  # fmt: skip
def test_bad_ranges_are_one_line_with_the_option(text):
    with pytest.raises(InputError) as error:
        whole_numbers(text, "--batch")
    assert str(error.value).startswith("--batch: ")
    assert "\n" not in str(error.value)


@given(st.text(alphabet="0123456789:,.xkmKe+- *#", max_size=16) | st.text(max_size=12))
@settings(max_examples=300, deadline=None)
def test_any_text_gives_values_or_a_message(text):
    for parse in (whole_numbers, numbers):
        try:
            values = parse(text, "--x")
        except InputError:
            continue
        assert values
        assert len(set(values)) == len(values)
        assert all(math.isfinite(v) for v in values)


@given(st.integers(0, 10**6), st.integers(0, 300), st.integers(1, 50))
def test_a_range_is_a_range(first, span, step):
    assert whole_numbers(f"{first}:{first + span}:{step}", "--x") == tuple(range(first, first + span + 1, step))


def test_words():
    assert words("a,b, c ,a", "--model") == ("a", "b", "c")
    with pytest.raises(InputError, match="empty place"):
        words("a,,b", "--model")


# --- rows are predictions -------------------------------------------------------------------------------------------

SAME = ("model", "draft", "hardware", "engine", "tp", "ep", "dp_attention", "method", "num_steps", "topk", "batch", "context", "draft_tokens")  # fmt: skip
Q = ("decode_ms", "cycle_ms", "decode_tokens_per_s", "spec_tokens_per_s", "speedup")


def expect_prediction(row: dict[str, object], prediction: dict[str, object]) -> None:
    """Every number of the row is that of the prediction, digit by digit."""
    for name in SAME:
        assert row[name] == prediction["scenario"][name], name
    for name in Q:
        value = prediction[name]
        assert row[name] == (None if value is None else value["value"]), name
    even = prediction["breakeven"] or {"accept_length": None, "accept_rate": None}
    assert row["breakeven_accept_length"] == (even["accept_length"] and even["accept_length"]["value"])
    assert row["breakeven_accept_rate"] == (even["accept_rate"] and even["accept_rate"]["value"])
    assert row["accept_length"] == prediction["accept_length"]
    assert row["fits"] == prediction["memory"]["fits"]


def predicted(case: dict[str, object], row: dict[str, object], **acceptance: object) -> dict[str, object]:
    off = row["method"] == "none"
    drafting = {} if off else {"draft_tokens": row["draft_tokens"], "num_steps": row["num_steps"], "topk": row["topk"], **acceptance}  # fmt: skip
    s = make({**case, "method": row["method"], "batch": row["batch"], "context": row["context"], **drafting})
    return predict(s, samples=1).json()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_rows_equal_predictions(engine):
    spec = small_spec(cases=((*LLAMA, ("engine", engine)),), draftings=((), (("method", "none"),)))
    rows = all_records(spec)
    assert len(rows) == 4 * 3 * 4 * (3 + 1)
    for row in rows[::7]:
        expect_prediction(row, predicted(dict(spec.cases[0]), row, accept_rate=row["accept_rate"]))


@given(
    batch=st.integers(1, 300),
    context=st.integers(0, 200_000),
    d=st.integers(2, 12),
    alpha=st.floats(0, 1).map(lambda x: round(x, 3)),
    case=st.sampled_from(
        [
            {"model": "Kimi-K2.5", "hardware": "8x-pcie-field"},
            {"model": "Kimi-K2.5", "hardware": "8x-h200", "ep": 8, "dp_attention": 8},
            {"model": "Qwen3-30B-A3B", "hardware": "1x-h200", "engine": "vllm"},
            {"model": "DeepSeek-V3", "hardware": "8x-h200", "method": "mtp"},
            {"model": "Llama-3.1-8B", "hardware": "1x-rtx-4090", "method": "ngram"},
        ]
    ),
)
@settings(max_examples=25, deadline=None)
def test_any_row_equals_its_prediction(batch, context, d, alpha, case):
    spec = small_spec(cases=(tuple(case.items()),), batch=(1, batch, 301), context=(5, context), draft_tokens=(d, 13), acceptance=(0.4, alpha))  # fmt: skip
    rows = [r for r in all_records(spec) if (r["batch"], r["context"], r["draft_tokens"]) == (batch, context, d)]
    for row, accept in zip(rows, dict.fromkeys((0.4, alpha)), strict=False):
        expect_prediction(row, predicted(case, row, accept_rate=accept))


def test_trees_lengths_and_profiles():
    """Trees that have too few nodes, and accept lengths beyond the draft tokens, are left out and counted."""
    trees = small_spec(
        draftings=((("topk", 4), ("num_steps", 2)), (("topk", 4), ("num_steps", 3))), draft_tokens=(8, 30)
    )
    rows = all_records(trees)
    assert {(r["num_steps"], r["draft_tokens"]) for r in rows} == {(2, 8), (3, 8), (3, 30)}  # 2 steps: 21 nodes
    expect_prediction(rows[5], predicted(dict(LLAMA), rows[5], accept_rate=rows[5]["accept_rate"]))
    lengths = small_spec(kind="length", acceptance=(1.5, 3.5))
    rows = all_records(lengths)
    assert {(r["draft_tokens"], r["accept_length"]) for r in rows} == {(2, 1.5), (4, 1.5), (4, 3.5), (7, 1.5), (7, 3.5)}
    expect_prediction(rows[1], predicted(dict(LLAMA), rows[1], accept_length=rows[1]["accept_length"]))
    assert sweep_run.run(lengths).digest.unreachable == 4 * 3
    positions = small_spec(kind="per_position", acceptance=((0.8, 0.5), (0.9,)))
    rows = all_records(positions)
    expect_prediction(rows[0], predicted(dict(LLAMA), rows[0], accept_per_position=(0.8, 0.5)))
    profiles = small_spec(kind="profile", acceptance=("kimi-k2.5-eagle3/gsm8k",))
    expect_prediction(all_records(profiles)[2], predicted(dict(LLAMA), all_records(profiles)[2], accept_profile="kimi-k2.5-eagle3/gsm8k"))  # fmt: skip


def test_settings_name_their_drafter_where_there_are_several():
    """By method where that tells them apart, by draft model where it does not, by both where it takes both; alone by length."""

    def labels(*draftings: dict[str, object]) -> list[str]:
        spec = small_spec(draftings=tuple(tuple(d.items()) for d in draftings), draft_tokens=(3,))
        return [s.label for s in build_case(spec, 0).settings]

    eagle, ngram, off = {"method": "eagle3"}, {"method": "ngram"}, {"method": "none"}
    small = {"method": "draft-model", "draft": "Llama-3.2-1B"}
    assert labels(eagle, off) == ["3", "off"]
    assert labels(eagle, ngram, off) == ["eagle3 3", "ngram 3", "off"]
    other = {"draft": "llama3-8b-eagle3", "method": "eagle"}
    assert labels(eagle, other, small) == ["eagle3 3", "eagle 3", "draft-model 3"]
    settings = [sweep.Setting("eagle3", name, 2, 1, 3) for name in ("a", "b")]
    assert [s.label for s in sweep.named(settings)] == ["a 3", "b 3"]
    third = sweep.Setting("eagle", "b", 2, 1, 3)
    assert [s.label for s in sweep.named([*settings, third])] == ["eagle3 a 3", "eagle3 b 3", "eagle b 3"]


def test_without_acceptance_there_are_costs_and_break_even():
    spec = small_spec(kind="", acceptance=(None,))
    row = all_records(spec)[4]
    assert row["speedup"] is None
    assert row["breakeven_accept_length"] > 1
    result = sweep_run.run(spec).json()
    assert result["best"] is None
    assert len(result["breakeven"]) == 4 * 3 * 3


def test_many_random_configurations_equal_single_ones():
    rng = np.random.default_rng(1)
    n = 500
    batch, context = rng.integers(1, 40, n).astype(float), rng.integers(0, 9000, n).astype(float)
    tokens, rate = rng.integers(2, 7, n).astype(float), rng.random(n)
    for engine in ("sglang", "vllm"):
        s = make({**dict(LLAMA), "engine": engine})
        found = evaluate_many(s, batch, context, tokens, rate)
        for i in range(0, n, 50):
            one = make({**dict(LLAMA), "engine": engine, "batch": batch[i], "context": context[i], "draft_tokens": tokens[i], "accept_rate": rate[i]})  # fmt: skip
            c = evaluate(one, machine_of(one))
            assert found.decode_s[i] == pytest.approx(float(c.decode_s), rel=1e-12)
            assert found.cycle_s[i] == pytest.approx(float(c.cycle_s), rel=1e-12)
            assert found.accept_length[i] == pytest.approx(float(one.accept_length), rel=1e-12)
            assert found.speedup[i] == pytest.approx(float(one.accept_length * c.decode_s / c.cycle_s), rel=1e-12)
    assert len(evaluate_many(s, *(np.zeros(0) for _ in range(4))).cycle_s) == 0


# --- blocks change nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("costs", "rows", "task"), [(1, 1, 1), (7, 5, 11), (64, 9, 40), (12, 10**6, 30)])
def test_block_sizes_change_nothing(monkeypatch, tmp_path, costs, rows, task):
    spec = small_spec(draftings=((), (("method", "none"),)))
    whole = sweep_run.run(spec, out=tmp_path / "whole.csv").json()
    monkeypatch.setattr(sweep, "COST_VALUES", costs)
    monkeypatch.setattr(sweep, "BLOCK_ROWS", rows)
    monkeypatch.setattr(sweep, "TASK_ROWS", task)
    parts = sweep_run.run(spec, out=tmp_path / "parts.csv").json()

    def content(document: dict[str, object]) -> dict[str, object]:
        ordered = {k: sorted(document[k], key=json.dumps) for k in ("best", "breakeven")}
        return {**document, **ordered, "out": None}

    assert content(parts) == content(whole)
    assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_large_random_tables_cut_long_rows(monkeypatch):
    s = make(dict(LLAMA))
    context = np.arange(50.0)
    ones = np.ones(50)
    whole = evaluate_many(s, 3 * ones, context, 4 * ones, 0.5 * ones)
    monkeypatch.setattr(sweep, "TABLE_VALUES", 7)
    assert np.array_equal(evaluate_many(s, 3 * ones, context, 4 * ones, 0.5 * ones).cycle_s, whole.cycle_s)


def test_memory_does_not_grow_with_the_sweep(monkeypatch):
    """Six times the acceptances, and four times the contexts: the same memory."""
    monkeypatch.setattr(sweep, "COST_VALUES", 2**10)
    monkeypatch.setattr(sweep, "BLOCK_ROWS", 2**13)
    monkeypatch.setattr(sweep, "TASK_ROWS", 2**15)

    def of(rates: int, contexts: int) -> Spec:
        return small_spec(
            batch=tuple(range(1, 17)), context=tuple(range(1000, 1000 + contexts)), draft_tokens=(2, 3, 4, 5),
            acceptance=tuple(i / rates for i in range(rates)),
        )  # fmt: skip

    def peak(rates: int, contexts: int) -> float:
        tracemalloc.start()
        assert sweep_run.run(of(rates, contexts)).digest.configurations == 16 * contexts * 4 * rates
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    sweep_run.run(of(2, 2))  # what is made once: modules, tables
    assert peak(200, 30) < 1.3 * peak(50, 10) + 5e5


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_acceptances(monkeypatch):
    """One batch and context at 12 draft lengths and 300,000 accept rates, 3,600,000 configurations: lengths and rates of all at once
    would be 58 MB."""
    monkeypatch.setattr(sweep, "BLOCK_ROWS", 2**14)
    monkeypatch.setattr(sweep, "KEPT_LENGTHS", 2**14)
    spec = small_spec(
        batch=(1,), context=(1000,), draft_tokens=tuple(range(2, 14)), acceptance=tuple(np.linspace(0, 1, 300_000))
    )
    sweep_run.run(small_spec())  # what is loaded once
    tracemalloc.start()
    found = sweep_run.run(spec)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.digest.configurations == 3_600_000
    assert peak < 20e6


def test_best_setting_and_fronts_by_brute_force():
    spec = small_spec(cases=((("model", "Kimi-K2.5"), ("hardware", "8x-h200")),), batch=(1, 2, 16, 512))
    result = sweep_run.run(spec).json()
    rows = all_records(spec)
    for cell in result["best"]:
        here = [r for r in rows if r["fits"] and (r["batch"], r["context"], r["accept_rate"]) == (cell["batch"], cell["context"], cell["acceptance"])]  # fmt: skip
        top = max(here, key=lambda r: r["speedup"], default=None)
        if top is None:
            assert cell["setting"] in ("-", "off")
        elif top["speedup"] < 1:
            assert cell["setting"] == "off"
        else:
            assert (cell["draft_tokens"], cell["speedup"]) == (top["draft_tokens"], top["speedup"])
    assert sum(result["wins"].values()) == 4 * 3 * 4
    for found in result["pareto"]:
        here = [
            r for r in rows if r["fits"] and (r["context"], r["accept_rate"]) == (found["context"], found["acceptance"])
        ]
        points = {(r["tpot_ms"], float(f"{r['spec_tokens_per_s'] / 8:.6g}")) for r in here}
        points |= {(r["decode_ms"], float(f"{r['decode_tokens_per_s'] / 8:.6g}")) for r in here}
        kept = [(p["tpot_ms"], p["tokens_per_s_per_gpu"]) for p in found["points"]]
        for tpot, rate in points:
            assert any(t <= tpot and r >= rate * (1 - 1e-5) for t, r in kept)
        assert kept == sorted(kept)
        assert [r for _, r in kept] == sorted(r for _, r in kept)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda p: [float(p[0]), float(p[1])]), max_size=30))
def test_a_front_is_what_nothing_beats(points):
    kept = front(points)
    for p in points:
        assert any(k[0] <= p[0] and k[1] >= p[1] for k in kept)
    for k in kept:
        assert not any(p[0] <= k[0] and p[1] >= k[1] and p != k for p in points)


def test_fits_as_memory_says():
    spec = small_spec(
        cases=((("model", "Kimi-K2.5"), ("hardware", "8x-pcie-field")),), batch=(1, 8, 64), context=(1000, 30_000)
    )
    for task in tasks_of(spec, {0: build_case(spec, 0)}):
        for b in blocks(spec, task):
            for i in range(len(b.batch)):
                for j, setting in enumerate((*b.case.settings, sweep.OFF)):
                    more = {"method": "none"} if setting.method == "none" else {"draft_tokens": setting.draft_tokens}
                    s = make({**dict(spec.cases[0]), "batch": b.batch[i], "context": b.context[i], **more})
                    assert b.fits[i, j] == memory(s).fits


# --- files, resumption ----------------------------------------------------------------------------------------------


def test_csv_and_parquet_hold_the_same(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is optional")
    spec = small_spec(draftings=((), (("method", "none"),)))
    for name in ("a.csv", "a.parquet"):
        sweep_run.run(spec, out=tmp_path / name)
    with (tmp_path / "a.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    table = pq.read_table(tmp_path / "a.parquet").to_pydict()
    assert tuple(table) == COLUMNS
    assert len(read) == len(table["batch"]) == 4 * 3 * 4 * 4
    for i, (row, record) in enumerate(zip(read, all_records(spec), strict=True)):
        for name in COLUMNS:
            value = record[name]
            assert row[name] == ("" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value))
            full = table[name][i]
            if value is None:
                assert full in ("", None) or math.isnan(full)
            elif isinstance(value, float):
                assert float(f"{full:.6g}") == value
            else:
                assert full == value
    assert not list(tmp_path.glob("*.parts"))


def test_no_pyarrow_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install 'specsim\[parquet\]'"):
        sweep_run.run(small_spec(), out=tmp_path / "a.parquet")


def test_all_packages_that_lack_are_told_at_once(monkeypatch, tmp_path):
    for package in ("pyarrow", "joblib", "distributed"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError) as caught:
        sweep_run.run(small_spec(), out=tmp_path / "a.parquet", cluster="dask://here:1")
    said = str(caught.value)
    assert "--out: Parquet needs pyarrow; pip install 'specsim[parquet]'" in said
    assert "--cluster: needs joblib and distributed; pip install 'specsim[dask]'" in said


@pytest.mark.parametrize(("name", "said"), [("a.txt", "neither .csv nor .parquet"), ("no/a.csv", "is no folder")])
def test_bad_targets(tmp_path, name, said):
    with pytest.raises(InputError, match=said):
        sweep_run.run(small_spec(), out=tmp_path / name)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_link_stays_one_and_a_full_disk_is_one_line(tmp_path, kind):
    """As all other files: a link's target is written, and what a device refuses is told, with the parts kept."""
    pytest.importorskip("pyarrow")
    (tmp_path / "real").mkdir()
    link = tmp_path / f"link.{kind}"
    link.symlink_to(tmp_path / "real" / "rows")
    sweep_run.run(small_spec(), out=link)
    assert link.is_symlink()
    plain = tmp_path / f"plain.{kind}"
    sweep_run.run(small_spec(), out=plain)
    assert (tmp_path / "real" / "rows").read_bytes() == plain.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["real", link.name, plain.name])
    if Path("/dev/full").exists():
        full = tmp_path / f"full.{kind}"
        full.symlink_to("/dev/full")
        with pytest.raises(WorkError, match="cannot be written"):
            sweep_run.run(small_spec(), out=full)
        assert full.is_symlink()
        assert any((tmp_path / f"full.{kind}.parts").iterdir())


def test_an_interrupted_sweep_goes_on(monkeypatch, tmp_path):
    """Two of four parts are done when the sweep is interrupted; only the rest is computed again, with the same result."""
    monkeypatch.setattr(sweep, "TASK_ROWS", 36)  # one batch a task
    spec = small_spec()
    whole = sweep_run.run(spec, out=tmp_path / "whole.csv")
    done: list[int] = []
    real = sweep_rows.write_part

    def interrupted(spec: Spec, task: sweep.Task, path: Path) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        real(spec, task, path)
        done.append(task.batch[0])

    monkeypatch.setattr(sweep_run, "write_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep_run.run(spec, out=tmp_path / "a.csv")
    assert done == [0, 1]
    assert not (tmp_path / "a.csv").exists()
    again: list[int] = []
    monkeypatch.setattr(sweep_run, "write_part", lambda s, t, p: (real(s, t, p), again.append(t.batch[0]))[0])
    result = sweep_run.run(spec, out=tmp_path / "a.csv")
    assert again == [2, 3]
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert result.json() | {"out": None} == whole.json() | {"out": None}
    assert not (tmp_path / "a.csv.parts").exists()


@pytest.mark.parametrize("damage", ["a note cut off", "a note of nothing", "a part cut off", "a part of nothing"])
def test_a_part_that_was_damaged_is_made_again(monkeypatch, tmp_path, damage):
    """By a disk that was full or lost power: neither rows that are missing nor an error that no further run gets past."""
    monkeypatch.setattr(sweep, "TASK_ROWS", 36)
    sweep_run.run(small_spec(), out=tmp_path / "whole.csv")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(sweep_run, "join_parts", stop)
        with pytest.raises(KeyboardInterrupt):
            sweep_run.run(small_spec(), out=tmp_path / "a.csv")
    parts = sorted((tmp_path / "a.csv.parts").glob("*.json" if "note" in damage else "*.csv"))
    assert len(parts) == 4
    parts[1].write_bytes(parts[1].read_bytes()[: 0 if "nothing" in damage else 100])
    sweep_run.run(small_spec(), out=tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_parts_of_another_sweep_are_not_taken(monkeypatch, tmp_path):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(sweep_run, "join_parts", stop)
        with pytest.raises(KeyboardInterrupt):
            sweep_run.run(small_spec(acceptance=(0.1,)), out=tmp_path / "a.csv")
    assert (tmp_path / "a.csv.parts").exists()
    sweep_run.run(small_spec(), out=tmp_path / "a.csv")
    sweep_run.run(small_spec(), out=tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "a.csv.parts").mkdir()
    (tmp_path / "a.csv.parts" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        sweep_run.run(small_spec(), out=tmp_path / "a.csv")
    assert (tmp_path / "a.csv.parts" / "thesis.txt").exists()


# --- fan-out --------------------------------------------------------------------------------------------------------


def test_failed_tasks_are_tried_again():
    calls: dict[int, int] = {}

    def flaky(task: int) -> int:
        calls[task] = calls.get(task, 0) + 1
        if task == 2 and calls[task] < fanout.TRIES:
            raise OSError("a hiccup")
        return 10 * task

    assert list(fanout.run(flaky, [1, 2, 3])) == [10, 20, 30]
    assert calls == {1: 1, 2: fanout.TRIES, 3: 1}


def test_what_fails_for_good_is_raised():
    def broken(task: int) -> int:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        list(fanout.run(broken, [1]))
    calls: list[int] = []

    def wrong(task: int) -> int:
        calls.append(task)
        raise InputError("wrong")

    with pytest.raises(SpecsimError, match="wrong"):
        list(fanout.run(wrong, [1, 2]))
    assert calls == [1], "bad input is not tried again"


@pytest.mark.parametrize("jobs", [0, -2])
def test_bad_numbers_of_processes(jobs):
    with pytest.raises(InputError, match="--jobs"):
        list(fanout.run(abs, [1], jobs=jobs))


def test_clusters_that_cannot_be(monkeypatch):
    pytest.importorskip("joblib", reason="joblib is optional")
    with pytest.raises(InputError, match="unknown cluster"):
        list(fanout.run(abs, [1], cluster="slurm://here"))
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(InputError, match=r"pip install 'specsim\[dask\]'"):
        list(fanout.run(abs, [1], cluster="dask://127.0.0.1:1"))
    monkeypatch.setitem(sys.modules, "joblib", None)
    for extra, asked in (
        ("fanout", {"jobs": 2}),
        ("dask", {"cluster": "dask://127.0.0.1:1"}),
        ("ray", {"cluster": "ray"}),
    ):
        with pytest.raises(InputError, match=rf"pip install 'specsim\[{extra}\]'"):
            list(fanout.run(abs, [1], **asked))
    with pytest.raises(InputError, match="unknown cluster"):
        list(fanout.run(abs, [1], cluster="slurm://here"))


def test_workers_that_keep_dying_are_one_line(monkeypatch):
    """Parallel raises what a lost worker or cluster raises; the wave is tried `TRIES` times."""
    joblib = pytest.importorskip("joblib", reason="joblib is optional")
    tries: list[int] = []

    class Dead:
        def __call__(self, tasks: object) -> None:
            tries.append(1)
            raise ConnectionError("scheduler went away\nlong story")

    monkeypatch.setattr(joblib, "Parallel", Dead)
    with pytest.raises(WorkError, match=r"a worker process died .*; run again: with --out it goes on") as error:
        list(fanout.run(abs, [1, 2], jobs=2))
    assert "\n" not in str(error.value)
    assert len(tries) == fanout.TRIES


SWEEP = ["sweep", "--model", "Llama-3.1-8B", "--hardware", "1x-h200,1x-rtx-5090", "--batch", "1,4", "--draft-tokens", "2:4", "--accept-rate", "0.4,0.8", "--json"]  # fmt: skip


def run_cli(arguments: list[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "specsim", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_processes_give_the_same_to_the_bit(specsim):
    pytest.importorskip("joblib", reason="joblib is optional")
    alone, two = specsim(*SWEEP), specsim(*SWEEP, "--jobs", "2")
    assert alone[0] == two[0] == 0, two[2]
    assert alone[1] == two[1]


DASK = """
from specsim import cli
from test_sweep import SWEEP
if __name__ == "__main__":
    from distributed import LocalCluster
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        cli.main([*SWEEP, "--cluster", cluster.scheduler_address.replace("tcp://", "dask://")])
"""
RAY = """
import sys
from test_sweep import SWEEP, run_cli
if __name__ == "__main__":
    import ray
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    done = run_cli([*SWEEP, "--cluster", "ray"])
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    ray.shutdown()
"""


def test_a_local_cluster_of_two_workers_gives_the_same(specsim, tmp_path):
    """Of each kind that is installed, both at once: they take their time to start."""
    kinds = {
        package: script for package, script in (("distributed", DASK), ("ray", RAY)) if find_spec(package) is not None
    }
    if not kinds or find_spec("joblib") is None:
        pytest.skip("neither Dask nor Ray is installed: both are optional")
    running = {}
    for package, script in kinds.items():
        file = tmp_path / f"a_{package}_cluster.py"
        file.write_text(script)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        running[package] = subprocess.Popen(
            [sys.executable, file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
    _, alone, _ = specsim(*SWEEP)
    said = {package: process.communicate(timeout=240) for package, process in running.items()}
    for package, (out, err) in said.items():
        assert out == alone, (package, err[-2000:])


def test_a_dead_cluster_is_one_line_and_leaves_nothing(specsim, tmp_path):
    if find_spec("distributed") is None or find_spec("joblib") is None:
        pytest.skip("distributed is optional and not installed")
    out = ["--out", str(tmp_path / "rows.csv")]
    for line in (["--cluster", "dask://127.0.0.1:1"], ["--engine", "dask://127.0.0.1:1,vllm"]):
        code, _, err = specsim(*SWEEP, *line, *out)
        assert (code, err.count("\n")) == (1, 1)
        assert "no Dask scheduler answers (ConnectionRefusedError); nothing was run" in err
        assert not list(tmp_path.iterdir())


def test_a_cluster_without_workers_is_one_line(monkeypatch):
    """joblib waits for a worker for some seconds, and raises TimeoutError."""
    joblib = pytest.importorskip("joblib", reason="joblib is optional")

    def none_came(_: int) -> int:
        raise TimeoutError("no worker")

    monkeypatch.setattr(joblib, "effective_n_jobs", none_came)
    monkeypatch.setattr(fanout, "_backend", lambda *_: contextlib.nullcontext())
    with pytest.raises(WorkError, match="dask://a:1: has no workers, nothing was run"):
        list(fanout.run(abs, [1], cluster="dask://a:1"))


@pytest.mark.parametrize(
    ("workers", "ends"),
    [
        ([{"a": 1}] * 40, False),
        ([{"a": 1}, {}, {}, {"a": 1}] * 10, False),
        ([{"a": 1}, {}], True),
        ([OSError()], False),
    ],
)
def test_a_cluster_whose_workers_all_went_away_is_not_waited_for(monkeypatch, workers, ends):
    """20 looks in the time after which it counts as gone: workers that come back in between are waited for, and a scheduler
    that does not answer fails by itself."""
    closed = threading.Event()
    seen = iter(workers)
    last = workers[-1]

    class Client:
        def nthreads(self) -> dict[str, int]:
            nonlocal last
            last = next(seen, last)
            if isinstance(last, Exception):
                raise last
            return last

        def close(self) -> None:
            closed.set()

    monkeypatch.setattr(fanout, "ALONE_S", 0.4)
    with fanout._attended(Client()):
        assert closed.wait(0.7) is ends


@pytest.mark.parametrize("before", [False, True])
def test_what_ray_tells_of_lost_workers_stands_beside_no_document(monkeypatch, capsys, before):
    """Ray prints it on the standard output of who is connected, whatever it is told of logs; a connection of ours ends with the
    work, one that was there before stays."""
    told: list[str] = []
    ray = SimpleNamespace(
        is_initialized=lambda: before, init=lambda **_: told.append("init"), shutdown=lambda: told.append("shutdown")
    )
    joblib = SimpleNamespace(parallel_config=lambda **_: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util.joblib", SimpleNamespace(register_ray=lambda: None))
    with fanout._backend(joblib, "ray", 1):
        print("(raylet) A worker died")
    assert capsys.readouterr() == ("", "(raylet) A worker died\n")
    assert told == (["init"] if before else ["init", "shutdown"])


def test_what_is_kept_goes_with_the_whole_or_when_nothing_is(tmp_path):
    """A folder with a part in it stays after a failure, for the next run; one without goes."""
    out = tmp_path / "rows.csv"

    def fails(after: int) -> None:
        with fanout.kept(out, lambda: "one") as parts:
            for i in range(after):
                parts.with_name(f"{parts.name}-{i}.csv").touch()
            raise WorkError("the cluster went away")

    for made in (0, 1):
        with pytest.raises(WorkError):
            fails(made)
        assert (tmp_path / "rows.csv.parts").exists() == bool(made)
    with fanout.kept(out, lambda: "one") as parts:
        assert parts.with_name(f"{parts.name}-0.csv").exists(), "taken up again"
    assert not list(tmp_path.iterdir())


def test_parts_of_another_version_are_not_taken(monkeypatch, tmp_path):
    """What another version made would differ from what is made now, in one file with it."""

    def left(with_part: bool) -> list[str]:
        with contextlib.suppress(WorkError), fanout.kept(tmp_path / "rows.csv", lambda: "one") as parts:
            if with_part:
                parts.with_name(f"{parts.name}-0.csv").touch()
            found = [p.name for p in parts.parent.iterdir() if p.name != "mark"]
            raise WorkError("the cluster went away")
        return found

    assert len(left(with_part=True)) == len(left(with_part=False)) == 1
    monkeypatch.setattr(fanout, "version", lambda package: "0")
    assert left(with_part=False) == []


def test_the_lowest_break_even_is_found_by_number_not_by_text():
    """0.1411 with 10 draft tokens is lower than 0.1414 with 9, and both show as 0.14."""
    cells = [
        {"batch": 1, "context": 5, "accept_rate": rate, "setting": d} for d, rate in (("9", 0.1414), ("10", 0.1411))
    ]
    for order in (cells, cells[::-1]):
        assert _breakeven(order)[1] == {(1, 5): "0.14  10"}


# --- the command ----------------------------------------------------------------------------------------------------


def test_json_is_one_document(specsim):
    code, out, err = specsim("sweep", "--batch", "1:16:x2", "--draft-tokens", "2:4", "--accept-rate", "0.3:0.9:0.3", "--tp", "4,8", "--json")  # fmt: skip
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "specsim.sweep/1"
    assert document["configurations"] == 5 * 3 * 3 * 2 == len(document["rows"])
    assert [c["tp"] for c in document["cases"]] == [4, 8]
    assert document["axes"]["acceptances"] == [0.3, 0.6, 0.9]
    assert set(document["rows"][0]) == set(COLUMNS)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "1:8:x2", "--draft-tokens", "2:6", "--accept-rate", "0.6"], "best draft tokens, and speedup"),
        (["--batch", "1:8:x2", "--draft-tokens", "2:6"], "break-even accept rate"),
        (["--batch", "1,2", "--accept-rate", "0.6", "--rows"], "break-even"),
        (["--tp", "1,8", "--accept-rate", "0.6"], "does not fit at any batch"),
        (["--accept-per-position", "0.9,0.5;0.8", "--draft-tokens", "3"], "per position [0.8]"),
        (["--sglang-args", "--model-path x --tp 8", "--model", "Kimi-K2.5", "--batch", "1,2"], "no speculation"),
    ],
)
def test_output_for_people(specsim, arguments, said):
    code, out, err = specsim("sweep", *arguments)
    assert code == 0, err
    assert said in out
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "0"], "--batch"),
        (["--batch", "9:1"], "goes down"),
        (["--accept-rate", "0.5:1.5:0.5"], "--accept-rate"),
        (["--accept-rate", "0.3:0.95"], "steps of 1, which miss its end; give a step: 0.3:0.95:0.1"),
        (["--cluster", "dask://here"], "give dask://HOST:PORT"),
        (["--accept-rate", "0.5", "--accept-length", "2"], "stated twice"),
        (["--model", "Kimi-K2.5,nothing-like-it", "--tp", "3"], "no model 'nothing-like-it'"),
        (["--model", "Kimi-K2.5,Llama-3.1-8B", "--tp", "3"], "does not divide 64 attention heads of Kimi-K2.5"),
        (["--draft-tokens", "1"], "--draft-tokens"),
        (["--dp-attention", "many"], "--dp-attention"),
        (["--accept-length", "0.5"], "--accept-length"),
        (
            ["--accept-length", "5,6", "--draft-tokens", "2,3"],
            "no configuration can gain so many tokens a cycle; give 1 to 3",
        ),
        (["--plot", "x.docx"], "--plot: .docx is no picture format"),
        (["--batch", "1:3000", "--rows"], "too many to show"),
        (["--tp", "1:1000", "--ep", "1:1000"], "cases"),
        (["--engine", "dask://a:1", "--cluster", "ray"], "several clusters"),
        (["--engine", "dask://a:1,ray"], "several clusters"),
    ],
)
def test_bad_input_is_one_line(specsim, arguments, said):
    code, _, err = specsim("sweep", *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert said in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accept_rate": "0.6"}, "--accept-rate: '0.6' is no number"),
        ({"captured_sizes": [16, "64"]}, "--captured-sizes: '64' is no whole number"),
        ({"captured_sizes": 64}, "--captured-sizes: '64' is no whole number"),
        ({"accept_length": [2, "3"]}, "--accept-length: '3' is no number"),
        ({"jobs": "2"}, "--jobs: '2' processes"),
        ({"num_steps": range(1, 2100)}, "sweep: 2,099 ways to draft; 2,000 at most"),
        ({"cluster": 5}, "--cluster: unknown cluster 5"),
        ({"engine": ["vllm", "dask://here"]}, "--cluster: 'dask://here' names no host and port"),
    ],
)
def test_wrong_values_in_python_are_told(options, says):
    with pytest.raises(InputError, match=says):
        swept.sweep("Llama-3.1-8B", hardware="1x-h200", **options)


def test_a_list_of_graph_sizes_is_one_value():
    """Where the smallest graph is of 16 sequences 2 are padded to it, and take longer than in a graph of their own; 16 do not."""
    few, every = (swept.sweep("Llama-3.1-8B", hardware="1x-h200", batch=[2, 16], draft_tokens=3, **kept) for kept in ({"captured_sizes": (16, 64)}, {}))  # fmt: skip
    assert few.rows[0]["decode_ms"] > every.rows[0]["decode_ms"]
    assert few.rows[1]["decode_ms"] == every.rows[1]["decode_ms"]


def test_where_nothing_fits_no_front_is_shown(specsim):
    code, out, _ = specsim("sweep", "--hardware", "1x-h200", "--accept-rate", "0.5")
    assert code == 0
    assert "does not fit at any batch and context" in out
    assert "latency against throughput" not in out


def test_few_of_many_notes_are_shown(specsim):
    """89 cuts of one GPU of which 88 are none: ten are told, the rest counted; the document has all."""
    line = [
        "sweep",
        "--model",
        "Llama-3.1-8B",
        "--hardware",
        "1x-h200",
        "--tp",
        "1:89",
    ]
    _, out, _ = specsim(*line)
    assert out.count("note: left out ") == 10
    assert "note: 78 more notes: --json holds them" in out
    _, out, err = specsim(*line, "--json")
    assert err.count("left out") == 10
    assert sum(w.startswith("left out") for w in json.loads(out)["warnings"]) == 88


@pytest.mark.parametrize(
    ("option", "values", "mend"),
    [
        ("--draft-tokens", "2:5000", "513 is out of range; give 2 to 512"),
        ("--topk", "0:3", "0 is out of range; give 1 to 64"),
        ("--num-steps", "1:600", "512 is out of range; give 1 to 511"),
        ("--tp", "0,1", "0 is out of range; give 1 to 1,024"),
    ],
)
def test_what_no_scenario_can_have_is_refused_before_any_is_built(specsim, option, values, mend):
    """In one line, not in one for each of 4,488 settings that were left out, 17 s later."""
    code, out, err = specsim("sweep", option, values)
    assert (code, out) == (2, "")
    assert err.splitlines() == [f"error: {option}: {mend}"]


@pytest.mark.parametrize(
    ("option", "values", "mend"),
    [
        ("--model", "Qwen3-8B,Qwen3-8x", "no model 'Qwen3-8x': no preset, folder or file"),
        ("--hardware", "1x-h200,1x-h20", "no hardware profile '1x-h20'; did you mean '1x-h200'?"),
        ("--method", "eagle3,eagel", "--method: unknown method 'eagel'; did you mean 'eagle'?"),
        ("--routing", "uniform,zipf:x", "--routing: 'zipf:x' needs an exponent"),
    ],
)
def test_a_name_that_nothing_has_is_refused(specsim, option, values, mend):
    """A word that is misspelt in a list of many would else be a note below a result that lacks it."""
    for command in ("sweep", "simulate --num-requests 2 --rate 1"):
        code, out, err = specsim(*command.split(), option, values)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert mend in err


def test_a_file_that_cannot_be_used_is_left_out_as_what_does_not_fit_is(specsim, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "of another kind"}')
    code, out, _ = specsim("sweep", "--model", f"Llama-3.1-8B,{tmp_path}", "--hardware", "1x-h200", "--json")
    assert code == 0
    assert any(w.startswith("left out") for w in json.loads(out)["warnings"])


def test_a_case_that_cannot_be_is_left_out_and_said(specsim):
    code, out, _ = specsim("sweep", "--hardware", "1x-h200,2x-h200", "--model", "Llama-3.1-8B", "--tp", "2", "--json")
    document = json.loads(out)
    assert code == 0
    assert [c["hardware"] for c in document["cases"]] == ["2x-h200"]
    assert any(w.startswith("left out") and "hardware=1x-h200" in w for w in document["warnings"])


def test_files_that_share_a_name_go_by_their_paths(specsim, tmp_path, monkeypatch):
    """Two folders `ckpt`, two drafts `dr` (which would else count as one) and two states of one box."""
    monkeypatch.chdir(tmp_path)
    for folder, shipped in (("x/ckpt", "Qwen3-8B"), ("y/ckpt", "Llama-3.1-8B"), ("x/dr", "qwen3-8b-eagle3"), ("y/dr", "qwen3-8b-eagle3")):  # fmt: skip
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text((ROOT / f"specsim/presets/{shipped}.json").read_text())
    Path("box.yaml").write_text((ROOT / "hardware/1x-h200.yaml").read_text())
    _, out, _ = specsim("sweep", "--model", "x/ckpt,y/ckpt", "--hardware", "1x-h200", "--method", "none", "--json")
    assert [row["model"] for row in json.loads(out)["rows"]] == ["x/ckpt", "y/ckpt"]
    _, out, _ = specsim(
        "sweep", "--model", "Qwen3-8B", "--draft", "x/dr,y/dr", "--hardware", "1x-h200,box.yaml", "--json"
    )
    rows = json.loads(out)["rows"]
    assert [row["draft"] for row in rows] == ["x/dr", "y/dr"] * 2
    assert [row["hardware"] for row in rows] == ["1x-h200", "1x-h200", "box.yaml", "box.yaml"]
    _, out, _ = specsim("sweep", "--model", "x/ckpt", "--hardware", "box.yaml", "--method", "none", "--json")
    assert json.loads(out)["rows"][0]["model"] == "ckpt", "alone it needs no path"


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        (["--model", "Llama-3.1-8B,Qwen3-8B"], "model batch context method d decode ms ms a token"),
        (["--engine", "sglang,vllm"], "engine batch context method d decode ms ms a token"),
        (["--tp", "4,8"], "TP batch context method d decode ms ms a token"),
        (["--batch", "1,2"], "batch context method d decode ms ms a token"),
    ],
)
def test_rows_show_what_tells_them_apart_and_nothing_empty(specsim, options, heads):
    line = ["--model", "Llama-3.1-8B", "--hardware", "8x-h200", "--method", "none", "--rows", *options]
    assert specsim("sweep", *line)[1].splitlines()[1].split() == heads.split()


def test_plot_and_file(specsim, tmp_path):
    code, _, err = specsim("sweep", "--batch", "1:8:x2", "--draft-tokens", "2:4", "--accept-rate", "0.2:0.9:0.1", "--plot", str(tmp_path / "a.png"), "--out", str(tmp_path / "a.csv"))  # fmt: skip
    assert code == 0, err
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 4 * 3 * 8
    code, _, err = specsim("sweep", "--accept-rate", "0.5", "--plot", str(tmp_path / "a.csv" / "a.png"))
    assert code == 2
    assert "--plot: there is no folder" in err
