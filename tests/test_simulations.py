"""Many simulations from options with several values: each is the one simulation, whoever runs it and whenever."""

from __future__ import annotations

import csv
import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from specsim import fanout, simulated, simulation_costs, simulations
from specsim.commands.simulate import command
from specsim.errors import InputError, WorkError
from specsim.prediction import machine_of
from specsim.routing import Routing
from specsim.scenarios import build
from specsim.simulated import simulate as simulate_one
from specsim.simulation_costs import tables
from specsim.simulations import simulate

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"model": "Llama-3.1-8B", "hardware": "1x-h200", "method": "none", "num_requests": 20, "output_tokens": 8}
LINE = [word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), str(value))]


def test_a_row_is_what_one_simulation_says():
    found = simulate(**SMALL, rate=[2.0, 4.0], seed=range(2))
    assert found.varied == ("request_rate", "seed")
    assert [(row["request_rate"], row["seed"]) for row in found.rows] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    metrics = simulate_one(**SMALL, rate=4.0, seed=1).run.metrics.json()
    for name, value in found.rows[3].items():
        assert name in ("request_rate", "seed", "error") or metrics[name] == value
    assert len(found.rows[3]) > 60
    assert "4" in found.verdict()


def test_what_one_simulation_is_warned_of_several_are_once(tmp_path):
    line = "--model-path Llama-3.1-8B --tp 1 --context-length 4096"
    box = {"hardware": "8x-h100", "sglang_args": line, "num_requests": 4, "rate": 0.1}
    wanted = "--tp wins over the launch line's 1"
    for again in (False, True):  # kept rows as well
        found = simulate(**box, tp=[1, 2], seed=[1, 2], input_tokens=[100, 8192], out=tmp_path / "rows.csv")
        said = found.json()["warnings"]
        assert said.count(wanted) == 1, again
        assert len([w for w in said if "a request of 8,448 tokens" in w]) == 1
        assert str(found).count("beyond the 4,096") == 1
    assert "warnings" not in (tmp_path / "rows.csv").read_text().splitlines()[0]
    assert simulate(**box, seed=[1, 2]).warnings == ()


def test_step_times_of_one_server_are_worked_out_once():
    """Four simulations of two servers (a chunk size is another server's) look at two tables; afresh each is the same to the bit."""
    simulation_costs._tables.cache_clear()
    server = {**SMALL, "concurrency": 4}
    found = simulate(**server, rate=[2.0, 4.0], chunk_tokens=[2048, 4096])
    assert simulation_costs._tables.cache_info().misses == 2
    for row in found.rows:
        simulation_costs._tables.cache_clear()
        alone = simulate_one(**server, rate=row["request_rate"], chunk_tokens=row["chunk_tokens"]).run.metrics.json()
        assert all(row[name] == value for name, value in alone.items() if name in row)


def test_step_times_are_kept_by_every_digit_of_what_they_depend_on():
    """Acceptance, batch and context change no step time. A routing of many experts, the machine and the batches do, by their last
    digit; no more than `TABLES` are kept."""
    s = build(model="Llama-3.1-8B", hardware="1x-h200", draft_tokens=3, accept_rate=0.5, batch=2)
    machine = machine_of(s)
    simulation_costs._tables.cache_clear()
    first = tables(s, machine, 4, 512)
    other = build(model="Llama-3.1-8B", hardware="1x-h200", draft_tokens=3, accept_rate=0.9, batch=4, context=100)
    assert tables(other, machine_of(other), 4, 512) is first
    popularity = np.ones(3000)
    popularity[1500] += 1e-12
    for changed in (
        (replace(s, routing=Routing(popularity=tuple(popularity))), machine, 4, 512, ()),
        (s, replace(machine, experts_overlap=machine.experts_overlap + 1e-12), 4, 512, ()),
        (replace(s, topk=2), machine, 4, 512, ()),
        (s, machine, 5, 512, ()),
        (s, machine, 4, 513, ()),
        (s, machine, 4, 512, ((1, 4, 1),)),
    ):
        assert tables(*changed) is not first
        assert tables(*changed) is tables(*changed)
    for chunk in range(600, 600 + simulation_costs.TABLES):
        tables(s, machine, 4, chunk)
    again = tables(s, machine, 4, 512)
    assert again is not first
    assert all(np.array_equal(getattr(again, f.name), getattr(first, f.name)) for f in fields(first))


def test_one_value_each_is_one_simulation():
    found = simulate(**SMALL, rate=[2.0], seed=1)
    assert found.json() == simulate_one(**SMALL, rate=2.0, seed=1).json()


def test_closed_loops_keep_both_concurrencies():
    """`max_concurrency` is what was asked, `concurrency` what was in flight on average, as in bench_serving."""
    found = simulate(**SMALL, concurrency=[1, 4])
    assert [row["max_concurrency"] for row in found.rows] == [1, 4]
    assert all(0 < row["concurrency"] <= row["max_concurrency"] + 0.01 for row in found.rows)


def test_processes_give_the_same_to_the_bit(tmp_path):
    pytest.importorskip("joblib", reason="joblib is optional")
    one, two = (simulate(**SMALL, rate=[2.0, 4.0], out=tmp_path / f"{n}.csv", jobs=n) for n in (1, 2))
    assert one.rows == two.rows
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    rows = list(csv.DictReader((tmp_path / "1.csv").read_text().splitlines()))
    assert [float(row["mean_tpot_ms"]) for row in rows] == [row["mean_tpot_ms"] for row in one.rows]


def test_an_interrupted_run_goes_on(monkeypatch, tmp_path):
    """Two of four are done when it is interrupted; the rest is simulated, with the same file; other options start afresh."""
    done: list[int] = []

    def interrupted(**options: object) -> object:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(options["seed"])  # type: ignore[arg-type]
        return simulate_one(**options)

    whole = simulate(**SMALL, rate=2.0, seed=range(4), out=tmp_path / "whole.csv")
    monkeypatch.setattr(simulations, "simulate_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate(**SMALL, rate=2.0, seed=range(4), out=tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()
    again: list[int] = []
    monkeypatch.setattr(simulations, "simulate_one", lambda **o: (again.append(o["seed"]), simulate_one(**o))[1])
    (row,) = (tmp_path / "a.csv.parts").glob("*-1.json")
    row.write_bytes(row.read_bytes()[:50])  # a damaged one is made again
    found = simulate(**SMALL, rate=2.0, seed=range(4), out=tmp_path / "a.csv")
    assert (done, again) == ([0, 1], [1, 2, 3])
    assert found.rows == whole.rows
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not (tmp_path / "a.csv.parts").exists()


def test_other_numbers_in_a_file_start_afresh(tmp_path):
    """Rows of a box that was measured again are not mixed with those of before."""
    box = tmp_path / "box.yaml"
    text = (ROOT / "hardware" / "1x-h200.yaml").read_text()
    marks = []
    for said in (text, text + "# a remark\n", text.replace("bandwidth_gb_s: ", "bandwidth_gb_s: 1", 1)):
        box.write_text(said)
        marks.append(simulations._mark({**SMALL, "hardware": str(box)}, {"rate": (1.0, 2.0), "hardware": (str(box),)}))
    assert marks[0] == marks[1] != marks[2]


def test_two_runs_with_one_file_keep_their_own_rows(monkeypatch, tmp_path):
    """The second starts and ends while the first is at its second row."""
    out = tmp_path / "a.csv"
    alone = simulate(**SMALL, rate=2.0, seed=[1, 2], out=out)
    other = []

    def amid(**options: object) -> object:
        if options["seed"] == 2 and not other:
            other.append(1)
            other.append(simulate(**SMALL, rate=3.0, seed=[1, 2, 3], out=out).rows)
        return simulate_one(**options)

    monkeypatch.setattr(simulations, "simulate_one", amid)
    assert simulate(**SMALL, rate=2.0, seed=[1, 2], out=out).rows == alone.rows
    assert len(other[1]) == 3


def test_few_of_many_failures_are_told():
    rows = [{"request_rate": 1e5 + i, "error": "too much"} for i in range(300)]
    good = {"request_rate": 1.0, "error": None, "request_goodput": None, "request_throughput": 1.0}
    assert str(simulations.Simulations(("request_rate",), (good, *rows))).count("left out") == 11


def test_what_cannot_be_served_is_left_out_with_its_reason():
    found = simulate(**SMALL, rate=[2.0, 1e5])
    assert [row["error"] is None for row in found.rows] == [True, False]
    assert "the limit is" in str(found)
    with pytest.raises(InputError, match="the limit is"):
        simulate(**SMALL, rate=[1e5, 2e5])


def test_many_small_simulations_are_worth_a_compiled_kernel(monkeypatch):
    """20 requests of 8 tokens are 160 steps: below 60,000 for a single one and for 100, above for 1,000 of them."""
    asked = []

    def ran(*_: object, compiled: bool | None, **__: object) -> object:
        asked.append(compiled)
        raise InputError("enough")

    monkeypatch.setattr(simulated, "run_through", ran)
    for times in (1, 100, 1000):
        with pytest.raises(InputError, match="enough"):
            simulate_one(**SMALL, rate=2.0, times=times)
    assert asked == [False, False, None]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate": "5"}, "--rate: '5' is no number"),
        ({"rate": 5, "input_tokens": 0}, "--input-tokens: 0 is out of range; give 1 or more"),
        ({"rate": 5, "accept_histogram": "1,2"}, "--accept-histogram: '1' is no number"),
        ({"rate": 5, "num_requests": 10.5}, "--num-requests: 10.5 is no whole number"),
        ({"rate": 5, "seed": "1:3"}, "--seed: '1:3' is no whole number"),
        ({"rate": 5, "out": "nowhere/x.csv"}, "--out: there is no folder 'nowhere'"),
        ({"rate": 5, "accept_histogram": 5}, "--accept-histogram: 5 is no list of numbers"),
        ({"trace": 5}, "--trace: 5 is no path"),
        ({"trace": 5, "seed": [1, 2]}, "--trace: 5 is no path"),
        ({"rate": 5, "policy": 5}, "--policy: 5 is no path"),
    ],
)
def test_wrong_values_in_python_are_told(options, says):
    with pytest.raises(InputError, match=says):
        simulate(**{**SMALL, **options})


def test_a_whole_number_is_one_in_any_type():
    whole = {
        "concurrency": 2,
        "num_requests": 20,
        "seed": 1,
        "input_tokens": 100,
        "output_tokens": 5,
        "chunk_tokens": 64,
    }
    one, same = (simulate(**{**SMALL, **{k: kind(v) for k, v in whole.items()}}) for kind in (int, float))
    assert one.json() == same.json()


def test_a_cluster_among_the_engines_is_taken_from_there():
    """As `sweep` has it. One simulation is not spread, which is said rather than passed over."""
    pytest.importorskip("distributed", reason="Dask is optional")
    dead = [*LINE, "--engine", "dask://127.0.0.1:1,sglang"]
    several = CliRunner().invoke(command, [*dead, "--rate", "2,4"])
    assert isinstance(several.exception, WorkError)
    assert "no Dask scheduler answers" in str(several.exception)
    one = CliRunner().invoke(command, [*dead, "--rate", "2"])
    assert isinstance(one.exception, InputError)
    assert "--cluster" in str(one.exception)


def test_a_failed_task_is_tried_again(monkeypatch):
    tries: list[int] = []

    def flaky(**options: object) -> object:
        tries.append(1)
        if len(tries) < fanout.TRIES:
            raise OSError("worker lost its disk")
        return simulate_one(**options)

    monkeypatch.setattr(simulations, "simulate_one", flaky)
    assert len(simulate(**SMALL, rate=[2.0, 4.0]).rows) == 2
    assert len(tries) == fanout.TRIES + 1


def test_the_command():
    done = CliRunner().invoke(command, [*LINE, "--rate", "2:4:2,8", "--seed", "1,2", "--json"])
    document = json.loads(done.stdout)
    assert document["schema"] == "specsim.simulations/1"
    assert document["varied"] == ["request_rate", "seed"]
    assert [row["request_rate"] for row in document["rows"]] == [2, 2, 4, 4, 8, 8]
    shown = CliRunner().invoke(command, [*LINE, "--rate", "inf", "--concurrency", "1:4:x2"]).stdout
    assert shown.startswith("3 simulations")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rate", "9:1"], "goes down"),
        (["--rate", "1,x"], "'x' is not a "),
        (["--rate", "1,,2"], "an empty place"),
        (["--rate", "1,2", "--requests-out", "a.csv"], "is of one simulation"),
        (["--rate", "1,2", "--out", "a.txt"], "is no .csv"),
        (["--rate", "1", "--requests-out", "a.png", "--plot", "./a.png"], "is written by --requests-out too"),
        (["--requests-out", "a.csv", "--trace", "./a.csv"], "is the trace itself"),
        (["--rate", "1:9:0.0001"], "10,000 at most"),
        (["--rate", "1,2", "--cluster", "slurm"], "unknown cluster"),
        (["--rate", "1,2", "--jobs", "0"], "0 processes"),
        (["--rate", "1", "--seed", "-1,2"], "-1 is not in the range"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(command, [*LINE, *arguments])
    assert done.exit_code != 0
    assert says in f"{done.output} {done.exception}"
