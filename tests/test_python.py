"""What `import specsim` offers: the public names, options as keywords, docstrings' examples, results that show themselves."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specsim
from specsim import _HOMES
from specsim.cli import COMMANDS, main
from specsim.pages import Grid, Shown

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = """
    Acceptance InputError Model Prediction Profile Quantity Scenario SpecsimError WorkError
    diagnose evaluate fit load_model load_profile machine_of observe plan predict read_launch scenario simulate sweep validate
""".split()  # noqa: SIM905


def test_the_public_names() -> None:
    """Held here: a name that goes or comes is a decision."""
    assert sorted(specsim.__all__) == sorted(PUBLIC) == sorted(_HOMES)
    assert dir(specsim) == specsim.__all__
    for name in specsim.__all__:
        assert getattr(specsim, name).__doc__
    with pytest.raises(AttributeError):
        specsim.nothing  # noqa: B018


def test_no_submodule_takes_the_place_of_a_function() -> None:
    """`import specsim.x` sets the attribute x of the package: no module may be called like a public name."""
    modules = {path.stem for path in (ROOT / "specsim").iterdir()}
    assert not modules & set(specsim.__all__)


def test_importing_costs_nothing() -> None:
    code = "import sys, specsim; dir(specsim); print({'numpy', 'pydantic', 'yaml', 'click'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "name", ["specsim", *sorted({f"specsim.{home.partition(':')[0]}" for home in _HOMES.values()})]
)
def test_the_examples_of_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", ["predict", "scenario", "sweep", "plan", "simulate", "diagnose"])
def test_every_function_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(specsim, name).__doc__ or "")


def document(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    with pytest.raises(SystemExit):
        main([*line, "--json"])
    return unsigned(json.loads(capsys.readouterr().out))


def unsigned(found: dict[str, Any]) -> dict[str, Any]:
    """Without the command that makes it again, which only the command line adds everywhere."""
    return {key: value for key, value in found.items() if key != "command"}


MODEL = ["--model", "Llama-3.1-8B", "--hardware", "1x-h200"]
SCENARIO: dict[str, Any] = {"model": "Llama-3.1-8B", "hardware": "1x-h200"}


def test_functions_say_what_commands_say(capsys: pytest.CaptureFixture[str]) -> None:
    """The same options, as keywords and on the line, give the same document."""
    made = specsim.predict(**SCENARIO, batch=8, draft_tokens=4, accept_rate=0.6)
    assert unsigned(made.json()) == document(
        capsys, "predict", *MODEL, "--batch", "8", "--draft-tokens", "4", "--accept-rate", "0.6"
    )
    assert made.json() == specsim.predict(specsim.scenario(**SCENARIO, batch=8, draft_tokens=4, accept_rate=0.6)).json()
    swept = specsim.sweep(**SCENARIO, batch=[1, 8], draft_tokens=range(2, 4), accept_rate=0.6)
    assert swept.json() == document(
        capsys, "sweep", *MODEL, "--batch", "1,8", "--draft-tokens", "2:3", "--accept-rate", "0.6"
    )
    planned = specsim.plan(**SCENARIO, rate=4, tpot_ms=20, draft_tokens=[2, 4], accept_rate=0.6)
    words = ["--rate", "4", "--tpot-ms", "20", "--draft-tokens", "2,4", "--accept-rate", "0.6"]
    assert planned.json() == document(capsys, "plan", *MODEL, *words)
    run = specsim.simulate(**SCENARIO, method="none", concurrency=4, num_requests=20)
    assert run.json() == document(
        capsys, "simulate", *MODEL, "--method", "none", "--concurrency", "4", "--num-requests", "20"
    )
    diagnosis = specsim.diagnose(**SCENARIO, decode_ms=5.2, verify_ms=12, draft_tokens=4, decode_at={4: 5.4})
    words = ["--decode-ms", "5.2", "--verify-ms", "12", "--draft-tokens", "4", "--decode-at", "4=5.4"]
    assert diagnosis.json() == document(capsys, "diagnose", *MODEL, *words)


def test_the_model_may_come_first() -> None:
    """A name, a folder, a config.json or a loaded model, as `--model` has it; stated once."""
    box: dict[str, Any] = {"hardware": "1x-h200"}
    for model in ("Qwen3-8B", ROOT / "specsim" / "presets" / "Qwen3-8B.json", specsim.load_model("Qwen3-8B")):
        assert specsim.predict(model, **box, samples=0).scenario.model.name == "Qwen3-8B"
    assert specsim.scenario("Qwen3-8B", **box).title == specsim.scenario(model="Qwen3-8B", **box).title
    assert specsim.plan("Qwen3-8B", **box, rate=1, method="none").plan.best.scenario.model.name == "Qwen3-8B"
    run = specsim.simulate("Qwen3-8B", **box, method="none", concurrency=1, num_requests=1, output_tokens=2)
    assert run.scenario.model.name == "Qwen3-8B"
    swept = specsim.sweep(["Qwen3-8B", "Llama-3.1-8B"], **box, method="none")
    assert [case["model"] for case in swept.json()["cases"]] == ["Qwen3-8B", "Llama-3.1-8B"]
    with pytest.raises(specsim.InputError, match="did you mean 'Qwen3-8B'"):
        specsim.predict("Qwen3-8", **box)
    for wrong, told in ((8, "a int where a model is expected"), (specsim.scenario(), "a Scenario where a model")):
        with pytest.raises(specsim.InputError, match=told):
            specsim.scenario(wrong)  # type: ignore[arg-type]
    with pytest.raises(specsim.InputError, match="the model is stated twice"):
        specsim.predict("Qwen3-8B", model="Qwen3-8B")
    with pytest.raises(specsim.InputError, match="a scenario and options"):
        specsim.predict(specsim.scenario(), batch=8)


def test_a_fit_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    record = str(ROOT / "validation" / "llama8b-e3-s3-eager.json")
    found = specsim.fit(record)
    assert repr(found).startswith("<Fitted: sglang: 2 terms fitted to 3 points")
    assert found.json() == document(capsys, "fit", "--records", record)
    assert found.profile().engines["sglang"].source.kind == "fitted"
    assert found.boxes == ("1x-h200",)


def test_objects_are_said_in_one_line() -> None:
    """Those without a page too: what a scenario is made of, what its costs are, and records."""
    s = specsim.scenario("Llama-3.1-8B", hardware="1x-h200", batch=[1, 8], draft_tokens=3)
    machine = specsim.machine_of(s)
    cost = specsim.evaluate(s, machine)
    (record, *_) = specsim.observe(ROOT / "validation" / "llama8b-base.json")
    for each in (s, s.engine, machine, cost, record):
        assert re.fullmatch(r"<\w+: [^\n]{4,200}>", repr(each)), repr(each)
    assert "batch 1 to 8" in repr(s)
    assert f"decode {1e3 * cost.decode_s.min():.3g} to {1e3 * cost.decode_s.max():.3g} ms" in repr(cost)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_say_units_and_errors(name: str) -> None:
    """A function that prices or measures says units, one that takes input the errors; a class of numbers its units."""
    said = " ".join((getattr(specsim, name).__doc__ or "").split())
    if name not in ("InputError", "SpecsimError", "WorkError", "read_launch", "load_model", "load_profile", "observe"):
        assert re.search(r"\b(ms|seconds|bytes|tokens|units?|probability)\b", said), said
    if name.islower() and name not in ("evaluate", "machine_of"):
        assert "Raises InputError" in said


def test_a_launch_line_is_a_keyword_as_well() -> None:
    made = specsim.scenario(hardware="1x-h200", sglang_args="--model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3")
    assert (made.model.name, made.method) == ("Qwen3-8B", "eagle3")


def test_settings_of_an_engine_are_those_that_something_reads() -> None:
    from specsim.asked import SETTINGS

    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "specsim").glob("*.py"))
    read = set(re.findall(r"""options\.(?:get|pop)\("(\w+)\"""", source))
    assert set() == SETTINGS - read
    made = specsim.scenario(max_running_requests=64, batch=60)
    assert not any("at most" in warning for warning in made.warnings)


def _refused(**options: Any) -> str:
    try:
        specsim.predict(**options, samples=0)
    except specsim.InputError as error:
        return str(error)
    return ""


def test_a_value_of_the_wrong_kind_is_one_line() -> None:
    """Whatever the option: "no" is no switch, and would count as true. Lists have their place in a sweep."""
    from specsim.asked import NAMES, SWITCHES

    for name in sorted(NAMES):
        for value in ({"a": 1}, object(), b"x", 1.5, float("nan"), "no such thing"):
            said = _refused(**{"model": "Llama-3.1-8B", "hardware": "2x-h200", name: value})
            assert said or value == "no such thing" or (name, value) in (("env", {"a": 1}), ("accept_length", 1.5)), (
                name
            )
            assert "\n" not in said
    for name in SWITCHES:
        with pytest.raises(
            specsim.InputError, match=f"--{name.replace('_', '-')}: 'no' is no value of it; give True or"
        ):
            specsim.scenario(**{name: "no"})
    with pytest.raises(specsim.InputError, match="--max-running-requests: 0 is out of range; give 1 or more"):
        specsim.scenario(max_running_requests=0)
    with pytest.raises(specsim.InputError, match="several values where one is needed"):
        specsim.predict(accept_rate=[0.5, 0.6], samples=0)
    assert specsim.scenario(eager="verify").graph_phases == specsim.scenario(eager=["verify"]).graph_phases


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: specsim.validate(3), "records: 3 is no path; give that of a file or a folder"),
        (lambda: specsim.fit(None), "records: None is no path"),
        (lambda: specsim.diagnose(decode_ms="12"), "--decode-ms: '12' is no number"),
        (lambda: specsim.diagnose(decode_ms=12, verify_ms=[1]), r"--verify-ms: \[1\] is no number"),
        (lambda: specsim.diagnose(decode_ms=12, noise="5%"), "--noise: '5%' is no number"),
        (lambda: specsim.diagnose(decode_ms=12, decode_at=3), "--decode-at: is no times by batch; such as {4: 15.5}"),
        (lambda: specsim.diagnose(decode_ms=12, verify_at={4: "x"}), "--verify-at: 'x' is no number"),
        (lambda: specsim.diagnose(decode_ms=12, results="graph-flag=yes"), "--result: 'graph-flag=yes' is no list"),
    ],
)
def test_what_is_no_path_or_number_is_one_line(call: Callable[[], object], says: str) -> None:
    with pytest.raises(specsim.InputError, match=says):
        call()


@pytest.mark.parametrize("name", ["predict", "scenario", "sweep", "plan", "simulate", "diagnose"])
def test_a_keyword_that_is_no_option_is_told(name: str) -> None:
    """An option that is misspelt must not be taken for an engine's flag."""
    needed: dict[str, Any] = {"plan": {"rate": 1}, "simulate": {"rate": 1}}.get(name, {})
    with pytest.raises(specsim.InputError, match="no option 'hardwear'; did you mean 'hardware'"):
        getattr(specsim, name)(hardwear="1x-h200", **needed)


def test_results_show_themselves() -> None:
    """One line as repr, the tables of the terminal when printed, the same cells in a notebook."""
    record = ROOT / "validation" / "llama8b-base.json"
    results: list[Shown] = [
        specsim.predict(**SCENARIO),
        specsim.sweep(**SCENARIO, batch=[1, 8], draft_tokens=[2, 3]),
        specsim.plan(**SCENARIO, rate=4, method="none"),
        specsim.simulate(**SCENARIO, method="none", concurrency=4, num_requests=20),
        specsim.diagnose(decode_ms=12.1, verify_ms=29.5, draft_tokens=3),
        specsim.validate(record),
        specsim.load_profile("1x-h200"),
        specsim.load_model("Qwen3-8B"),
    ]
    for result in results:
        line = repr(result)
        assert line.startswith(f"<{type(result).__name__}: ")
        assert "\n" not in line
        assert len(line) < 500
        tables = [part for part in result.page() if isinstance(part, Grid)]
        assert tables, line
        shown = result._repr_html_()
        assert shown.count("<table>") == len(tables)
        assert max(map(len, (row for row in str(result).splitlines() if "  " in row.strip()))) <= 240
        printed = str(result)
        for cell in (cell for table in tables for row in table.rows for cell in row):
            assert all(word in printed for word in cell.split()), cell


def test_every_page_has_its_module() -> None:
    """`page_from` of each result names a module with a `page`, which comes after it in the reading order."""
    from test_layout import READING_ORDER

    seen = [cls for cls in Shown.__subclasses__() if cls.__module__.startswith("specsim.")]
    assert len(seen) >= 8
    for cls in seen:
        module = importlib.import_module(cls.page_from)
        assert callable(module.page)
        home, shows = cls.__module__.removeprefix("specsim."), cls.page_from.removeprefix("specsim.")
        assert READING_ORDER.index(home) < READING_ORDER.index(shows)


def test_every_command_that_answers_questions_has_its_function() -> None:
    assert {"predict", "sweep", "plan", "simulate", "diagnose", "validate", "observe"} <= set(COMMANDS) & set(
        specsim.__all__
    )


def test_wrong_options_are_told_together_and_each_by_itself() -> None:
    with pytest.raises(specsim.InputError) as caught:
        specsim.predict(batch=0, context=-5, tp=3)
    assert [error.where for error in caught.value.errors] == ["--tp", "--batch", "--context"]  # type: ignore[attr-defined]
    assert str(caught.value) == "; and ".join(map(str, caught.value.errors))  # type: ignore[attr-defined]
