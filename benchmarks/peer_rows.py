"""Ask aiconfigurator for the recorded points that validation/peer_aiconfigurator.yaml lacks, and append its figures.

    pip install aiconfigurator==0.12.0      in an environment of its own
    python benchmarks/peer_rows.py --program PATH/bin/aiconfigurator

A row is the program's TPOT of one generated token after `context` tokens, ms: one decode step, or one speculative
iteration with no draft accepted. The HYBRID database is asked where the SILICON one has no row for the model's shape.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accuracy import ROOT, _graph_points, _said, scenario_of

from specsim.files import read_yaml, write_atomically
from specsim.records import Point, Record
from specsim.replay import load

PAGE = ROOT / "validation" / "peer_aiconfigurator.yaml"
TPOT = re.compile(r"TPOT:\s+([\d.]+) ms")


def ask(program: str, record: Record, point: Point, mode: str) -> float | None:
    """The program's TPOT in ms, or None when it has no answer."""
    s = scenario_of(record, point, None)
    steps = 0 if s.method == "none" else int(s.num_steps)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(record.target_config))
        command = [program, "cli", "estimate", "--model-path", folder, "--system", "h200_sxm", "--backend", "sglang"]
        command += ["--estimate-mode", "static_gen", "--database-mode", mode, "--osl", "2"]
        command += ["--batch-size", str(point.batch), "--isl", str(point.context), "--tp-size", str(s.parallel.tp)]
        command += ["--nextn", str(steps), "--nextn-accepted", "0"] if steps else []
        command += ["--moe-tp-size", str(s.parallel.tp), "--moe-ep-size", "1"] if s.model.experts else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = TPOT.search(done.stdout)
    return float(found[1]) if found and float(found[1]) > 0 else None


def row(program: str, record: Record, point: Point) -> str | None:
    """A line of the file for a point, or None when the program cannot say anything: it knows no trees."""
    if scenario_of(record, point, None).topk > 1:
        return None
    for mode in ("SILICON", "HYBRID"):
        step = ask(program, record, point, mode)
        if step is not None:
            s = scenario_of(record, point, None)
            steps = 0 if s.method == "none" else int(s.num_steps)
            where = f"record: {record.name}, batch: {point.batch}, context: {point.context}, tp: {s.parallel.tp}"
            return f"- {{{where}, nextn: {steps}, mode: {mode}, step_ms: {step:g}}}"
    return None


def missing(records: Sequence[Record], page: Path = PAGE) -> list[tuple[Record, Point]]:
    """Points in graphs without a row."""
    rows = read_yaml(page)["points"]
    return [(r, p) for _, r, p in _graph_points(records) if _said(rows, r.name, p) is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="aiconfigurator", help="the aiconfigurator to run")
    program = parser.parse_args().program
    for record, point in missing(load(ROOT / "validation")[0]):
        line = row(program, record, point)
        print(line or f"{record.name}, batch {point.batch}, context {point.context}: no answer")
        if line:
            write_atomically(PAGE, PAGE.read_text(encoding="utf-8").rstrip("\n") + f"\n{line}\n")


if __name__ == "__main__":
    main()
