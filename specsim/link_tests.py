"""Matrices of nvbandwidth (text, and the JSON of -j) and p2pBandwidthLatencyTest: what the links between GPUs do.

    read(text, where) -> Links: the tool, medians over the pairs, the device, and notes on what was left out

Units as printed: GB/s (10^9 bytes a second); latencies become us.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from specsim.errors import InputError

MATRICES = (  # title in lower case must contain -> figure
    ("unidirectional p2p=disabled bandwidth", "pair_copy_gb_s"),
    ("unidirectional p2p=enabled bandwidth", "pair_p2p_gb_s"),
    ("p2p=disabled latency", "pair_copy_us"),
    ("p2p=enabled latency", "pair_p2p_us"),
    ("cpu(row) -> gpu(column) bandwidth", "host_to_gpu_gb_s"),
    ("cpu(row) <- gpu(column) bandwidth", "gpu_to_host_gb_s"),
    ("memory latency sm cpu(row) <-> gpu(column)", "host_to_gpu_us"),
    ("device to device latency sm gpu(row) <-> gpu(column)", "pair_p2p_us"),
    ("gpu(row) <-> gpu(column) total bandwidth", "pair_both_ways_gb_s"),
    ("gpu(row) <-> gpu(column) bandwidth", "pair_both_ways_gb_s"),
    ("gpu(row) -> gpu(column) bandwidth", "pair_p2p_gb_s"),
    ("gpu(row) <- gpu(column) bandwidth", "pair_p2p_gb_s"),
    ("memcpy local gpu(column) bandwidth", "own_memory_copy_gb_s"),
)
UNITS = {"(gb/s)": 1.0, "(us)": 1.0, "(ns)": 1e-3, "(ms)": 1e3, "(mb/s)": 1e-3, "(tb/s)": 1e3}
CONTENDED = {"all", "one"}  # words of nvbandwidth's testcases that load several links at once


@dataclass
class Links:
    """figures: medians over pairs of GPUs, and whether P2P works."""

    tool: str
    figures: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    notes: list[str] = field(default_factory=list)


def tool_of(text: str) -> str | None:
    """The tool that the text is of, None for none known."""
    if "P2P Connectivity Matrix" in text or "p2pBandwidthLatencyTest" in text.replace(" ", ""):
        return "p2pBandwidthLatencyTest"
    return "nvbandwidth" if "nvbandwidth" in text or "(row)" in text or "GPU(column)" in text else None


def read(text: str, where: str) -> Links:
    """Medians of the matrices: off the diagonal for pairs of GPUs; the diagonal is the GPU's own memory.

    Raises InputError when no matrix can be read.
    """
    tool = tool_of(text) or "nvbandwidth"
    found = Links(tool)
    if '"testcases"' in text and (begin := text.find("{")) >= 0:  # after what a launcher said
        text = _text_of(text[begin:], where)
    lines = text.splitlines()
    testcase = ""
    for title_line, title in enumerate(lines):
        if match := re.match(r"\s*Running (\w+)", title):
            testcase = match[1]
        name = next((figure for words, figure in MATRICES if words in title.lower()), None)
        if name is None or CONTENDED & set(testcase.split("_")):
            continue
        unit = next((scale for mark, scale in UNITS.items() if mark in title.lower()), None)
        if unit is None:
            found.notes.append(f"{where}, line {title_line + 1}: matrix of unknown unit left out")
            continue
        pairs, own = _values(lines, title_line, name, where, found.notes)
        if pairs and name not in found.figures:
            found.figures[name] = round(median(pairs) * unit, 3)
        if own and name.endswith("_gb_s"):
            found.figures.setdefault("own_memory_copy_gb_s", round(median(own) * unit, 3))
    _facts(text, found)
    if not any(isinstance(v, float) for v in found.figures.values()):
        raise InputError(f"holds no readable {tool} matrix", where=where, mend="give the whole output of the tool")
    return found


def _values(
    lines: list[str], title_line: int, name: str, where: str, notes: list[str]
) -> tuple[list[float], list[float]]:
    """Values off the diagonal and on it, the latter for pairs of GPUs alone."""
    pairs, own = [], []
    for row, column, value, number in _matrix(lines, title_line + 1):
        if value is None:
            continue
        if value <= 0:
            notes.append(f"{where}, line {number}: value {value:g} left out")
        elif row == column and name.startswith("pair"):
            own.append(value)
        else:
            pairs.append(value)
    if not pairs and not own:
        notes.append(f"{where}, line {title_line + 1}: matrix without values left out")
    return pairs, own


def _matrix(lines: list[str], start: int) -> Iterator[tuple[int, int, float | None, int]]:
    """Cells of the matrix after its title: row, column, value, line number. Ends at the first line that is none of it."""
    columns: list[int] = []
    for number, line in enumerate(lines[start:], start + 1):
        words = line.split()
        if not words and not columns and number <= start + 2:
            continue  # a line between title and matrix
        if not columns:
            head = [w for w in words if w.isdigit()]
            if not head or len(words) - len(head) > 1:
                return
            columns = [int(w) for w in head]
        elif len(words) == len(columns) + 1 and words[0].isdigit():
            yield from ((int(words[0]), c, _number(w), number) for c, w in zip(columns, words[1:], strict=True))
        else:
            return


def _facts(text: str, found: Links) -> None:
    """The device's name, and from p2pBandwidthLatencyTest how many there are and whether they reach each other."""
    if found.tool == "p2pBandwidthLatencyTest":
        found.figures["p2p"] = "CANNOT Access Peer" not in text
        devices = re.findall(r"^Device: \d+, ([^,\n]+)", text, re.MULTILINE)
        if devices:
            found.figures["gpus"] = len(devices)
    else:
        devices = re.findall(r"\bdevice \d+: (.+?) \([0-9a-f]{8}:", text, re.MULTILINE | re.IGNORECASE)
    found.device = devices[0].strip() if devices else ""


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None  # N/A
    return value if isfinite(value) else None


def _text_of(text: str, where: str) -> str:
    """The JSON document as the text that the tool would have printed."""
    try:
        cases = json.JSONDecoder().raw_decode(text)[0]["nvbandwidth"]["testcases"]
        blocks = []
        for case in cases:
            matrix = case.get("bandwidth_matrix") or []
            head = " ".join(str(i) for i in range(len(matrix[0]) if matrix else 0))
            rows = [f"{i} " + " ".join(str(v) for v in row) for i, row in enumerate(matrix)]
            blocks.append(
                "\n".join([f"Running {case['name']}.", str(case.get("bandwidth_description")), head, *rows, ""])
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(
            "is not nvbandwidth's JSON", where=where, mend="give the whole output of nvbandwidth -j"
        ) from None
    return "\n".join(blocks)
