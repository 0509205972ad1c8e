"""The shape of the code: one reading order, light imports, and nothing importable but `specsim`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from specsim.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent

# Read the code in this order; a module imports only from modules before it. A new module gets its place here.
READING_ORDER = """
    errors progress files names redaction team quantities pages records host_speed
    models keys formats families patterns drafters configs model_text
    routing ops profiles profile_text engines launch_words launch_flags launch_sglang launch_vllm launch machine forward
    acceptance scenarios reproduce cycle memory provenance prediction agreement text
    chart_style chart_predict chart_sweep chart_plan chart_runs chart_simulations chart_causes chart_hardware charts report_parts report plot_style plots
    workload simulation_costs simulation_reference metrics simulation_kernel simulation preemption gathering bunches busy_periods riding sharing steady steady_servers two_states drawn percentiles
    load_replay replay replay_text fit_runs engine_fit apart fitted fit_text nccl_tests link_tests importers
    fitting tables derive class_fits calibrate residuals shapes
    prometheus observe_read observe_checks observe_serving observe_sglang observe_vllm observe_llama
    observe_bench observe_metrics observe_trace observations record_text asked
    live kernels server measure streams load setups validation
    fanout ranges sweeps sweep_rows sweep_run sweep_text policy targets choice drafter_targets plans launch_lines trace_stats
    swept simulated simulated_text simulations simulations_text plan_choices planned planned_text
    hypotheses probes evidence posterior experiments remedies diagnosis diagnose_text diagnosed
""".split()  # noqa: SIM905

ABOVE_ALL = {"__init__", "__main__", "cli"}  # these may import anything

# Slow to import, and not needed to print help or a prediction: imported in the functions that use them.
HEAVY = {
    "torch",
    "matplotlib",
    "scipy",
    "fastapi",
    "starlette",
    "uvicorn",
    "pyarrow",
    "pandas",
    "numba",
    "joblib",
}

FLAT = sorted({path.stem for path in (ROOT / "specsim").glob("*.py")} - ABOVE_ALL)
MODULES = sorted(path for path in (ROOT / "specsim").rglob("*.py") if "__pycache__" not in path.parts)


def _imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Names of the modules that a file imports; `top_level_only` leaves out functions and TYPE_CHECKING blocks."""

    def later(node: ast.AST) -> bool:
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        return function or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))

    def walk(node: ast.AST) -> set[str]:
        found = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found |= {alias.name for alias in child.names}
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path.name}: relative import"
                found.add(child.module or "")
                found |= {f"{child.module}.{alias.name}" for alias in child.names}
            elif not (top_level_only and later(child)):
                found |= walk(child)
        return found

    return walk(ast.parse(path.read_text(encoding="utf-8")))


def _siblings(path: Path) -> set[str]:
    """Modules of specsim itself that a file imports anywhere, by their first name."""
    names = {name.split(".")[1] for name in _imports(path) if name.startswith("specsim.")}
    return {name for name in names if (ROOT / "specsim" / f"{name}.py").exists() or name == "commands"}


def test_every_module_has_its_place_in_the_reading_order():
    assert len(READING_ORDER) == len(set(READING_ORDER))
    assert set(FLAT) <= set(READING_ORDER), "list the module in READING_ORDER, after what it imports"


@pytest.mark.parametrize("name", FLAT)
def test_imports_go_only_upwards(name):
    before = set(READING_ORDER[: READING_ORDER.index(name)])
    assert _siblings(ROOT / "specsim" / f"{name}.py") <= before


def test_commands_import_no_other_command():
    for path in (ROOT / "specsim" / "commands").glob("*.py"):
        others = {name for name in _imports(path) if name.startswith("specsim.commands.")}
        shared = {"common", "scenario"}
        assert {name.split(".")[2] for name in others} <= shared, path.name


def test_every_command_has_its_module():
    modules = {path.stem for path in (ROOT / "specsim" / "commands").glob("*.py")}
    assert modules - {"__init__", "common", "scenario"} == set(COMMANDS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_are_imported_where_they_are_used(path):
    assert not {name.split(".")[0] for name in _imports(path, top_level_only=True)} & HEAVY
    assert "torch" not in {name.split(".")[0] for name in _imports(path)}, "only calibration/ uses torch"


def test_calibration_knows_only_the_border_of_specsim():
    """It runs on boxes where only torch and specsim are installed, and must not depend on the model that it feeds."""
    allowed = {"calibration", "records", "errors", "files", "profiles", "quantities", "host_speed"}
    for path in (ROOT / "calibration").rglob("*.py"):
        used = {name.split(".")[1] for name in _imports(path) if name.startswith("specsim.")}
        assert used <= allowed, path.name


def _loaded(arguments: list[list[str]]) -> set[str]:
    """Packages loaded after `specsim` ran with each of the argument lists, in a fresh interpreter."""
    script = """
import contextlib, io, json, sys
from specsim.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main(arguments)
    except SystemExit as done:
        assert not done.code, (arguments, done.code)
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    command = [sys.executable, "-c", script, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_help_is_instant():
    """specsim --help in about 0.1 s: click and nothing else of size."""
    assert not _loaded([["--help"]]) & (HEAVY | {"numpy", "pydantic", "yaml"})


def test_help_of_commands_loads_nothing_heavy():
    assert not _loaded([[name, "--help"] for name in COMMANDS]) & HEAVY


def test_prediction_as_json_loads_nothing_heavy():
    assert not _loaded([["predict", "--json"]]) & (HEAVY - {"scipy"})
