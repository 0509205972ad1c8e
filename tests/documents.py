"""Documents that commands print with `--json`, one of each kind, made once a process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from specsim.cli import main

ROOT = Path(__file__).resolve().parent.parent
MADE = Path(tempfile.mkdtemp(prefix="specsim-tests-"))
atexit.register(shutil.rmtree, MADE, ignore_errors=True)
SMALL = ["--model", "Llama-3.1-8B", "--hardware", "1x-h200"]
COMMANDS = {
    "prediction": ["predict", "--draft-tokens", "3", "--accept-rate", "0.6"],
    "prediction without acceptance": ["predict", "--draft-tokens", "3"],
    "prediction that never pays": ["predict", "--draft-tokens", "2", "--batch", "4", "--context", "1k", "--eager", "verify"],
    "prediction without speculation": ["predict", "--method", "none"],
    "sweep": ["sweep", *SMALL, "--batch", "1:16:x2", "--context", "1k,8k", "--draft-tokens", "2:4", "--accept-rate", "0.1,0.5,0.9"],
    "sweep of one": ["sweep", "--draft-tokens", "3", "--accept-rate", "0.6"],
    "sweep of rates by position": ["sweep", *SMALL, "--accept-per-position", "0.7,0.6;0.9,0.8", "--draft-tokens", "3"],
    "sweep without acceptance": ["sweep", *SMALL, "--batch", "1,8", "--draft-tokens", "2:4"],
    "sweep without speculation": ["sweep", *SMALL, "--batch", "1,8", "--method", "none"],
    "plan": ["plan", *SMALL, "--rate", "20", "--tpot-ms", "10", "--accept-rate", "0.6", "--draft-tokens", "2,4", "--price-per-gpu-hour", "2"],
    "plan that misses": ["plan", *SMALL, "--rate", "20", "--tpot-ms", "0.1"],
    "simulation": ["simulate", *SMALL, "--method", "none", "--concurrency", "4", "--num-requests", "20", "--output-tokens", "16", "--tpot-ms", "9"],
    "simulation of one": ["simulate", *SMALL, "--method", "none", "--rate", "inf", "--num-requests", "1", "--output-tokens", "1"],
    "simulations": ["simulate", *SMALL, "--method", "none,eagle3", "--accept-rate", "0.6", "--rate", "2,500,4", "--seed", "1:2", "--num-requests", "20", "--output-tokens", "16"],
    "validation": ["validate", "--records", str(ROOT / "validation" / "llama8b-e3-s3.json")],
    "diagnosis": ["diagnose", *SMALL, "--decode-ms", "5.2", "--verify-ms", "12", "--draft-tokens", "4"],
    "hardware": ["hardware", "show", "8x-rtx-pro-6000"],
    "hardware of one GPU": ["hardware", "show", "1x-h200"],
    "hardware diff": ["hardware", "diff", "8x-rtx-pro-6000", "8x-pcie-field"],
    "hardware diff weighed": ["hardware", "diff", "2x-h200", "2x-h200-no-p2p", *SMALL[:2], "--batch", "8"],
    "calibration": ["calibrate", "--refit", str(ROOT / "validation" / "calibration" / "2x-h200.record.json"), "-o", str(MADE / "2x-h200.yaml")],
    "hardware diff of three": ["hardware", "diff", "8x-h100", "8x-h200", "8x-rtx-pro-6000"],
    "hardware diff of two GPUs": ["hardware", "diff", "1x-h200", "1x-rtx-5090"],
}  # fmt: skip


def printed(arguments: list[str]) -> str:
    """What a command prints. Raises SystemExit as the command line does, but for exit code 1 after a document."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as done:
            if done.code not in (0, 1) or not out.getvalue():
                raise
    return out.getvalue()


@functools.cache
def text_of(name: str) -> str:
    return printed([*COMMANDS[name], "--json"])


def document(name: str) -> dict[str, Any]:
    """The document of one of `COMMANDS`; a fresh copy."""
    return json.loads(text_of(name))
