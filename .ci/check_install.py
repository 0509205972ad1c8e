"""An installed specsim works outside its checkout: run by the environment's Python, in an empty folder."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

assert not {"specsim", "hardware", "calibration"} & set(os.listdir()), "run me outside a checkout"
sys.path[:] = [
    entry for entry in sys.path if pathlib.Path(entry or ".").resolve() != pathlib.Path(__file__).resolve().parent
]


def specsim(*arguments: str) -> str:
    """Standard output of the installed command."""
    done = subprocess.run(["specsim", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"specsim {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


for name in ("hardware", "calibration", "cli", "tests", "benchmarks"):
    assert importlib.util.find_spec(name) is None, f"{name} is importable beside specsim"
for name in ("specsim", "specsim.hardware", "specsim.calibration", "specsim.presets", "specsim.commands"):
    assert importlib.util.find_spec(name) is not None, f"{name} is missing"

assert specsim("--version").startswith("specsim")
assert "Example" in specsim("--help")
prediction = json.loads(specsim("predict", "--json"))
assert prediction["schema"] == "specsim.prediction/1", prediction["schema"]
assert prediction["speedup"] is None, "an acceptance came from nowhere"
with_rate = json.loads(specsim("predict", "--draft-tokens", "3", "--accept-rate", "0.6", "--json"))
assert abs(with_rate["accept_length"] - 1.96) < 1e-9, with_rate["accept_length"]
assert "kimi" in specsim("models", "list").lower()
assert "pcie" in specsim("hardware", "list").lower()

specsim("report", "--draft-tokens", "3", "--accept-rate", "0.6", "-o", "report.html")
assert "vegaEmbed" in pathlib.Path("report.html").read_text(), "the report lacks its chart scripts"
specsim("predict", "--plot", "prediction.svg")
assert pathlib.Path("prediction.svg").read_text().startswith("<?xml")
