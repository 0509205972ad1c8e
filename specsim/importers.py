"""Text of public measuring tools, read into what a profile holds: nccl-tests, nvbandwidth, p2pBandwidthLatencyTest.

    read_tool(text, where) -> Readings: all-reduce rows, link and memory figures, and notes on what was left out

Rows that cannot be used are left out with a note that names file and line; text with nothing usable is an InputError.
Units as printed: bytes, us, GB/s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from specsim.errors import InputError
from specsim.profiles import AllReduceCurve, Profile, Source

RANK_MARKS = re.compile(r"\[\d+(?:,\d+)?\](?:<std\w+>:?)?|^\s*\d+:\s")  # [0], [1,0]<stdout>:, and Slurm's "3: "
REDUCTIONS = ("sum", "prod", "min", "max", "avg", "mulsum")
CURVE_LIMIT = 2**30  # larger messages tell nothing about decoding
MATRICES = (  # title in lower case must contain -> figure
    ("unidirectional p2p=disabled bandwidth", "pair_copy_gb_s"),
    ("unidirectional p2p=enabled bandwidth", "pair_p2p_gb_s"),
    ("p2p=disabled latency", "pair_copy_us"),
    ("p2p=enabled latency", "pair_p2p_us"),
    ("cpu(row) -> gpu(column) bandwidth", "host_to_gpu_gb_s"),
    ("cpu(row) <- gpu(column) bandwidth", "gpu_to_host_gb_s"),
    ("gpu(row) <-> gpu(column) bandwidth", "pair_both_ways_gb_s"),
    ("gpu(row) -> gpu(column) bandwidth", "pair_p2p_gb_s"),
    ("gpu(row) <- gpu(column) bandwidth", "pair_p2p_gb_s"),
)


@dataclass(frozen=True)
class Row:
    """One line of a collective's table: message bytes and the time of one call in us."""

    size: int
    microseconds: float
    line: int


@dataclass
class Readings:
    """What a tool's text held."""

    tool: str
    rows: list[Row] = field(default_factory=list)
    ranks: int | None = None
    in_graph: bool = False
    gpus_a_process: int = 1
    figures: dict[str, Any] = field(default_factory=dict)  # links: medians over pairs, and whether P2P works
    device: str = ""
    notes: list[str] = field(default_factory=list)

    def curve(self, source: Source, implementation: str = "nccl") -> AllReduceCurve:
        """The all-reduce curve: the median where a size was measured more than once. Raises InputError without ranks."""
        if self.ranks is None:
            raise InputError(
                "the number of ranks cannot be told", where=source.reference, mend="keep the '# Rank' lines"
            )
        times: dict[int, list[float]] = {}
        for row in self.rows:
            times.setdefault(row.size, []).append(row.microseconds)
        note = "captured in a CUDA graph" if self.in_graph else "loop of back-to-back calls, which hides the launch"
        if self.gpus_a_process > 1:
            note += f"; one process drove {self.gpus_a_process} GPUs, so small sizes hold its launch time"
        return AllReduceCurve(
            implementation=implementation,
            ranks=self.ranks,
            mode="graph",
            bytes=sorted(times),
            latency_us=[round(median(times[size]), 3) for size in sorted(times)],
            relative_uncertainty=0.15,
            source=source,
            note=note,
        )


def read_tool(text: str, where: str) -> Readings:
    """Read the text of a known tool. Raises InputError when it is of no known tool or holds nothing usable."""
    if re.search(r"#\s*nThread|algbw\s+busbw", text):
        return read_nccl_tests(text, where)
    if "P2P Connectivity Matrix" in text or "p2pBandwidthLatencyTest" in text.replace(" ", ""):
        return read_matrices(text, where, "p2pBandwidthLatencyTest")
    if "nvbandwidth" in text or "(row)" in text:
        return read_matrices(text, where, "nvbandwidth")
    known = "nccl-tests, nvbandwidth or p2pBandwidthLatencyTest output"
    raise InputError("is of no known tool", where=where, mend=f"give {known}, or aiconfigurator:SYSTEM")


# --- nccl-tests ---------------------------------------------------------------------------------------------------


def read_nccl_tests(text: str, where: str) -> Readings:
    """All-reduce rows of nccl-tests output, old and new layouts. The out-of-place time, or in-place where that is missing.

    Ranks come from the '# Rank' lines, else from busbw / algbw = 2 (n - 1) / n. Rows with wrong results, of another
    collective, or torn by interleaved ranks are left out. Raises InputError when no row is left.
    """
    found = Readings("nccl-tests")
    listed: set[int] = set()
    bandwidths: list[tuple[float, float]] = []
    header = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = RANK_MARKS.sub(" ", raw).strip()
        place = f"{where}, line {number}"
        if line.startswith("#"):
            header = number if "algbw" in line else header
            _header(line, found, listed)
            continue
        words = line.split()
        if not words or not words[0].isdigit():
            continue
        try:
            row, pair = _row(words, number, place)
        except InputError as error:
            found.notes.append(str(error))
            continue
        if row.size > CURVE_LIMIT:
            continue
        found.rows.append(row)
        if pair:
            bandwidths.append(pair)
    found.ranks = len(listed) or None
    _check_collective(found, bandwidths, where)
    if not found.rows:
        why = f"the table that starts at line {header} has no usable row" if header else "has no table of results"
        mend = "a table without rows means that the run hung or failed" if not found.notes else found.notes[0]
        raise InputError(why, where=where, mend=mend)
    return found


def _header(line: str, found: Readings, listed: set[int]) -> None:
    """Take what a comment line tells: ranks, GPUs of a process, graph mode, device."""
    if match := re.match(r"#\s*Rank\s+(\d+)\s+.*?device\s+\S+\s+\[[^\]]*\]\s*(.*)", line):
        listed.add(int(match[1]))
        found.device = found.device or match[2].strip()
    if match := re.search(r"nGpus\s+(\d+)", line):
        found.gpus_a_process = int(match[1])
    if match := re.search(r"graph:\s*(\d+)", line):
        found.in_graph = int(match[1]) > 0


def _row(words: list[str], number: int, place: str) -> tuple[Row, tuple[float, float] | None]:
    """One result row, and its algbw and busbw where they are precise. Columns: size count type [redop] [root] then time algbw busbw [#wrong],
    once or twice (out of place, in place)."""
    start = next((i for i, word in enumerate(words[2:], 2) if not re.match(r"[A-Za-z_]", word)), len(words))
    rest = words[start:]
    if len(rest) in (5, 7, 9):  # a root comes first
        rest = rest[1:]
    width = {3: 3, 4: 4, 6: 3, 8: 4}.get(len(rest))
    if len(words) < 6 or width is None:
        raise InputError(f"row of {len(words)} columns left out", where=place, mend="the layout is not known")
    if start > 3 and words[3] not in REDUCTIONS:
        raise InputError(f"reduction {words[3]!r} left out", where=place, mend="the layout is not known")
    for group in (rest[:width], rest[width : 2 * width]):
        if not group:
            continue
        time, algbw, busbw, *wrong = (_number(word) for word in group)
        if wrong and wrong[0] is not None and wrong[0] >= 1:  # old releases print the largest deviation, far below 1
            raise InputError(
                f"row with {group[3]} wrong results left out", where=place, mend="the link or a GPU is broken"
            )
        if time is not None and time > 0:
            return Row(int(words[0]), time, number), (algbw, busbw) if busbw and algbw and algbw >= 1 else None
    raise InputError("row without a time left out", where=place, mend="the run failed at that size")


def _check_collective(found: Readings, bandwidths: list[tuple[float, float]], where: str) -> None:
    """Tell the ranks from busbw / algbw of the largest bandwidth, and refuse rows of another collective.

    An all-reduce over n ranks has 2 (n - 1) / n, which is 1 or more; all-gather and reduce-scatter have less than 1.
    """
    if not bandwidths:
        return
    algbw, busbw = max(bandwidths)
    ratio = busbw / algbw
    expected = 2 * (found.ranks - 1) / found.ranks if found.ranks else 0.0
    if found.ranks and abs(ratio - expected) <= 0.02 * ratio:
        return
    implied = round(2 / (2 - ratio)) if 0.98 <= ratio < 1.999 else 0
    if implied < max(2, found.ranks or 0):
        listed = f" over {found.ranks} ranks has {expected:.3g}" if found.ranks else " has 1 or more"
        mend = "give the output of all_reduce_perf"
        raise InputError(f"busbw / algbw is {ratio:.3g}, an all-reduce{listed}", where=where, mend=mend)
    lines = f"{found.ranks} '# Rank' lines" if found.ranks else "no '# Rank' lines"
    found.notes.append(f"{where}: {lines}, but {implied} ranks by busbw / algbw = {ratio:.4g}")
    found.ranks = implied


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None  # N/A
    return value if isfinite(value) else None


# --- matrices of nvbandwidth and p2pBandwidthLatencyTest -----------------------------------------------------------


def read_matrices(text: str, where: str, tool: str) -> Readings:
    """Medians of the matrices: off the diagonal for pairs of GPUs; the diagonal is the GPU's own memory.

    Raises InputError when no matrix can be read.
    """
    found = Readings(tool)
    lines = text.splitlines()
    for title_line, title in enumerate(lines):
        name = next((figure for words, figure in MATRICES if words in title.lower()), None)
        if name is None:
            continue
        pairs, own = [], []
        for row, column, value, number in _matrix(lines, title_line + 1):
            if value is None:
                continue
            if value <= 0:
                found.notes.append(f"{where}, line {number}: value {value:g} left out")
            elif row == column and name.startswith("pair"):
                own.append(value)
            else:
                pairs.append(value)
        if not pairs and not own:
            found.notes.append(f"{where}, line {title_line + 1}: matrix without values left out")
        if pairs and name not in found.figures:
            found.figures[name] = round(median(pairs), 3)
        if own and name.endswith("_gb_s") and "own_memory_copy_gb_s" not in found.figures:
            found.figures["own_memory_copy_gb_s"] = round(median(own), 3)
    if tool == "p2pBandwidthLatencyTest":
        found.figures["p2p"] = "CANNOT Access Peer" not in text
        devices = re.findall(r"^Device: \d+, ([^,\n]+)", text, re.MULTILINE)
        found.device = devices[0].strip() if devices else ""
        found.figures["gpus"] = len(devices) or None
    if not any(isinstance(v, float) for v in found.figures.values()):
        raise InputError(f"holds no readable {tool} matrix", where=where, mend="give the whole output of the tool")
    found.figures = {k: v for k, v in found.figures.items() if v is not None}
    return found


def _matrix(lines: list[str], start: int) -> Iterator[tuple[int, int, float | None, int]]:
    """Cells of the matrix after its title: row, column, value, line number. Ends at the first line that is none of it."""
    columns: list[int] = []
    for number, line in enumerate(lines[start:], start + 1):
        words = line.split()
        if not columns:
            head = [w for w in words if w.isdigit()]
            if not head or len(words) - len(head) > 1:
                return
            columns = [int(w) for w in head]
        elif len(words) == len(columns) + 1 and words[0].isdigit():
            yield from ((int(words[0]), c, _number(w), number) for c, w in zip(columns, words[1:], strict=True))
        else:
            return


# --- into a profile ------------------------------------------------------------------------------------------------


def into_profile(profile: Profile, readings: Readings, source: Source, implementation: str = "nccl") -> Profile:
    """The profile with the readings in it: a curve replaces the one of the same implementation, ranks and mode; link
    figures go to environment.links. Raises InputError when the curve has more ranks than the box has GPUs."""
    changes: dict[str, Any] = {}
    if readings.rows:
        curve = readings.curve(source, implementation)
        if curve.ranks > profile.gpus:
            raise InputError(
                f"{curve.ranks} ranks do not fit a profile of {profile.gpus} GPUs",
                where=source.reference,
                mend="give the profile of that box",
            )
        kept = [
            c
            for c in profile.allreduce
            if (c.implementation, c.ranks, c.mode) != (implementation, curve.ranks, curve.mode)
        ]
        changes["allreduce"] = sorted([*kept, curve], key=lambda c: (c.implementation, c.ranks, c.mode))
    if readings.figures:
        link = {**readings.figures, "source": source.model_dump()}
        links = {**profile.environment.get("links", {}), readings.tool: link}
        changes["environment"] = {**profile.environment, "links": links}
    return profile.model_copy(update=changes)


def default_source(readings: Readings, where: str, date: str) -> Source:
    """A source that names the tool, the device and the file."""
    device = f" on {readings.device}" if readings.device else ""
    return Source(kind="measured", reference=f"{readings.tool}{device}, {where}", date=date)
