"""The output of nccl-tests' all_reduce_perf: text of every release, and the JSON of -J.

    read(text, where) -> Output: the runs in the file, the device, and notes on what was left out

A file may hold several runs, one after the other, as a loop over GPU counts writes it. Columns are found by the header's
names where there is one, else by their number. Units as printed: bytes, us, GB/s (10^9 bytes a second).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from specsim.errors import InputError

RANK_MARKS = re.compile(r"\[\d+(?:,\d+)?\](?:<std\w+>:?)?|^\s*\d+:\s")  # [0], [1,0]<stdout>:, and Slurm's "3: "
REDUCTIONS = ("sum", "prod", "min", "max", "avg", "mulsum")
SHORTEST_US, LONGEST_US = 0.01, 1e9  # of a time that can be one
MOST_RANKS = 1024
LARGEST = 2**30  # bytes; larger messages tell nothing about decoding
UNITS = {"B", "elements", "us", "GB/s", "%"}
PRECISE = 1.0  # GB/s from which algbw is printed with enough digits to check the time by
DISAGREE = 0.05


@dataclass(frozen=True)
class Row:
    """One line of the table: message bytes of one rank, and the time of one call in us."""

    size: int
    microseconds: float
    line: int


@dataclass
class Run:
    """One run of the program. ranks: None when nothing tells them."""

    rows: list[Row] = field(default_factory=list)
    ranks: int | None = None
    in_graph: bool = False
    gpus_a_process: int = 1


@dataclass
class Output:
    """What the file held."""

    runs: list[Run] = field(default_factory=list)
    device: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class _Table:
    """A run while it is read: its header's columns, the ranks listed, and the bandwidths that tell them too."""

    run: Run = field(default_factory=Run)
    columns: list[str] = field(default_factory=list)
    listed: set[int] = field(default_factory=set)
    counted: int = 0  # ranks, where the document says how many
    bandwidths: list[tuple[float, float]] = field(default_factory=list)  # algbw, busbw
    silent: int = 0  # rows without bus bandwidth, as one rank alone has them
    header: int = 0  # line


def looks_like(text: str) -> bool:
    """Whether the text is of nccl-tests."""
    return bool(re.search(r"#\s*nThread|algbw\s+busbw", text)) or ('"in_place"' in text and '"alg_bw"' in text)


def read(text: str, where: str) -> Output:
    """All runs. Raises InputError when none has a usable row or is of an all-reduce, or when a table is in another unit.

    A log of several programs may hold other collectives beside it: their tables are left out with a note."""
    found = Output()
    tables = [_json_table(text, where, found)] if text.lstrip().startswith("{") else _tables(text, where, found)
    refused: list[InputError] = []
    for table in tables:
        try:
            found.runs += [_finished(table, where, found.notes)] if table.run.rows else []
        except InputError as error:
            refused.append(error)
    empty = [
        f"the table that starts at line {t.header} has no usable row" for t in tables if t.header and not t.run.rows
    ]
    if not found.runs and refused:
        raise refused[0]
    if not found.runs:
        mend = found.notes[0] if found.notes else "a table without rows means that the run hung or failed"
        raise InputError(empty[0] if empty else "has no table of results", where=where, mend=mend)
    found.notes += [f"{where}: {what}: that run hung or failed, or was another collective" for what in empty]
    found.notes += [f"{error.where}: a table left out: {error.what}" for error in refused]
    return found


def _tables(text: str, where: str, found: Output) -> list[_Table]:
    tables = [_Table()]
    for number, raw in enumerate(text.splitlines(), 1):
        line = RANK_MARKS.sub(" ", raw).strip()
        place = f"{where}, line {number}"
        if line.startswith("#"):
            again = re.search(r"#\s*nThread", line) or ("algbw" in line and tables[-1].run.rows)
            if again and (tables[-1].run.rows or tables[-1].header):
                tables.append(_Table())
            _comment(line, number, place, tables[-1], found)
            continue
        words = line.split()
        if not words or not words[0].isdigit():
            continue
        try:
            row = _row(words, number, place, tables[-1])
        except InputError as error:
            found.notes.append(str(error))
            continue
        if 0 < row.size <= LARGEST:
            tables[-1].run.rows.append(row)
    return tables


def _comment(line: str, number: int, place: str, table: _Table, found: Output) -> None:
    """Take what a comment line tells: ranks, GPUs of a process, graph mode, device, columns. Raises InputError for a unit
    that is not nccl-tests'."""
    if match := re.match(r"#\s*Rank\s+(\d+)\s+.*?device\s+\S+\s+\[[^\]]*\]\s*(.*)", line):
        table.listed.add(int(match[1]))
        found.device = found.device or match[2].strip()
    if match := re.search(r"nGpus\s+(\d+)", line):
        table.run.gpus_a_process = int(match[1])
    if match := re.search(r"graph:\s*(\d+)", line):
        table.run.in_graph = int(match[1]) > 0
    if "algbw" in line:
        table.columns, table.header = line.lstrip("#").split(), number
        if "cputime" in table.columns:
            raise InputError("holds the host's time (-C), not the GPU's", where=place, mend="run it without -C")
    if "(elements)" in line:
        odd = set(re.findall(r"\(([^()\s]+)\)", line)) - UNITS
        if odd:
            raise InputError(
                f"a column is in {sorted(odd)[0]}",
                where=place,
                mend="nccl-tests prints us and GB/s: convert the numbers",
            )


def _row(words: list[str], number: int, place: str, table: _Table) -> Row:
    """One result row: the time out of place, or in place where that is missing. Raises InputError for one of no use."""
    if len(words) < 6:
        raise InputError(f"row of {len(words)} columns left out", where=place, mend="the layout is not known")
    if words[3] == "none":
        raise InputError("row that reduces nothing left out", where=place, mend="give the output of all_reduce_perf")
    if re.match(r"[A-Za-z]", words[3]) and words[3] not in REDUCTIONS:
        raise InputError(f"reduction {words[3]!r} left out", where=place, mend="the layout is not known")
    for group in _groups(words, table.columns, place):
        time, algbw, busbw, *wrong = (_number(word) for word in group)
        if wrong and wrong[0] is not None and wrong[0] >= 1:  # old releases print the largest deviation, far below 1
            raise InputError(
                f"row with {group[3]} wrong results left out", where=place, mend="the link or a GPU is broken"
            )
        if time is None or not SHORTEST_US <= time < LONGEST_US:
            continue
        if algbw is not None and algbw >= PRECISE:
            size = int(words[0])
            if abs(size / time / 1e3 - algbw) > DISAGREE * algbw:
                raise InputError(
                    f"row left out: {size} bytes in {time:g} us are not {algbw:g} GB/s", where=place,
                    mend="it is torn, or in other units",
                )  # fmt: skip
            if busbw:
                table.bandwidths.append((algbw, busbw))
        table.silent += busbw == 0.0 and algbw is not None and algbw >= 0.05
        return Row(int(words[0]), time, number)
    raise InputError("row without a time left out", where=place, mend="the run failed at that size")


def _groups(words: list[str], columns: list[str], place: str) -> list[list[str]]:
    """(time, algbw, busbw, #wrong) out of place and in place, by the header's names, or by number where it was cut off.

    Raises InputError for a row that does not match the header.
    """
    names = [*columns[:-1], "date", "clock"] if columns[-1:] == ["timestamp"] else columns
    starts = [i for i, name in enumerate(names) if name == "time"]
    if not starts:
        return _by_number(words, place)
    if len(starts) == 2 and len(words) == len(names) - (starts[1] - starts[0]):  # nothing was run out of place
        names, starts = names[: starts[0]] + names[starts[1] :], starts[:1]
    if len(words) != len(names):
        raise InputError(f"row of {len(words)} columns where the header has {len(names)} left out", where=place)
    groups = []
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else len(names)
        at = dict(zip(names[start:end], words[start:end], strict=True))
        wrong = [at[name] for name in ("#wrong", "error") if name in at]
        groups.append([at["time"], at.get("algbw", "N/A"), at.get("busbw", "N/A"), *wrong])
    return groups


def _by_number(words: list[str], place: str) -> list[list[str]]:
    """Columns without a header: size count type [redop] [root], then time algbw busbw [#wrong] once or twice."""
    start = next((i for i, word in enumerate(words[2:], 2) if not re.match(r"[A-Za-z_]", word)), len(words))
    rest = words[start:]
    if len(rest) in (5, 7, 9):  # a root comes first
        rest = rest[1:]
    width = {3: 3, 4: 4, 6: 3, 8: 4}.get(len(rest))
    if width is None:
        raise InputError(f"row of {len(words)} columns left out", where=place, mend="the layout is not known")
    return [group for group in (rest[:width], rest[width : 2 * width]) if group]


def _finished(table: _Table, where: str, notes: list[str]) -> Run:
    """The run with its ranks settled. Raises InputError for rows of another collective or of one rank alone."""
    run = table.run
    run.ranks = table.counted or len(table.listed) or None
    alone = not table.bandwidths and table.silent and (run.ranks or 1) == 1
    if not alone:
        _check_collective(run, table.bandwidths, where, notes)
    if alone or run.ranks == 1:
        mend = "give -g N, or build nccl-tests with MPI=1 and start it with mpirun"
        raise InputError("ran on one rank, so that nothing was reduced", where=where, mend=mend)
    if run.ranks is not None and run.ranks > MOST_RANKS:
        run.ranks = None  # of a broken file
    return run


def _check_collective(run: Run, bandwidths: list[tuple[float, float]], where: str, notes: list[str]) -> None:
    """Tell the ranks from busbw / algbw of the largest bandwidth, and refuse rows of another collective.

    An all-reduce over n ranks has 2 (n - 1) / n, which is 1 or more; all-gather and reduce-scatter have less than 1.
    """
    if not bandwidths:
        return
    algbw, busbw = max(bandwidths)
    ratio = busbw / algbw
    expected = 2 * (run.ranks - 1) / run.ranks if run.ranks else 0.0
    if run.ranks and abs(ratio - expected) <= 0.02 * ratio:
        return
    fewest, implied, most = _implied_ranks(bandwidths)
    if implied < max(2, run.ranks or 0):
        listed = f" over {run.ranks} ranks has {expected:.3g}" if run.ranks else " has 1 or more"
        mend = "give the output of all_reduce_perf"
        raise InputError(f"busbw / algbw is {ratio:.3g}, an all-reduce{listed}", where=where, mend=mend)
    lines = f"{run.ranks} '# Rank' lines" if run.ranks else "no '# Rank' lines"
    unsure = f" (anything from {fewest} to {most} would fit)" if fewest < most else ""
    notes.append(f"{where}: {lines}, but {implied} ranks by busbw / algbw = {ratio:.4g}{unsure}")
    run.ranks = implied


def _implied_ranks(bandwidths: list[tuple[float, float]]) -> tuple[int, int, int]:
    """The fewest, the likeliest and the most ranks that the printed bandwidths allow; zeros when none fits all rows.

    Each row bounds busbw / algbw = 2 (n - 1) / n by its last digits. Of several, a multiple of eight is likeliest.
    """
    low, high = 0.98, 1.999
    for algbw, busbw in bandwidths:
        half = 0.005 if busbw < 1e3 else 0.05 if busbw < 1e4 else 0.5
        low = max(low, (busbw - half) / (algbw + half))
        high = min(high, (busbw + half) / (algbw - half))
    if low > high:  # torn rows: trust the largest
        return _implied_ranks([max(bandwidths)]) if len(bandwidths) > 1 else (0, 0, 0)
    fewest, most = max(2, round(2 / (2 - low) + 0.45)), int(2 / (2 - high) + 0.05)
    fitting = range(min(fewest, most), max(fewest, most) + 1)
    return fitting[0], next((n for n in fitting if n % 8 == 0), fitting[len(fitting) // 2]), fitting[-1]


def _number(word: Any) -> float | None:
    try:
        value = float(word)
    except (TypeError, ValueError):
        return None  # N/A
    return value if isfinite(value) else None


def _json_table(text: str, where: str, found: Output) -> _Table:
    """The table of the document that -J writes: config with devices, and results."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("is not whole JSON", where=where, mend="give the text output, or let the run end") from None
    config, results = data.get("config"), data.get("results")
    config = config if isinstance(config, dict) else {}
    listed = config.get("devices")
    devices = [d for d in listed if isinstance(d, dict)] if isinstance(listed, list) else []
    table = _Table()
    table.run.in_graph = bool(_number(config.get("graph")))
    table.run.gpus_a_process = int(_number(config.get("ngpus")) or 1)
    table.counted = len(devices) * table.run.gpus_a_process * int(_number(config.get("nthreads")) or 1)
    found.device = str(devices[0].get("device_info", "")).strip() if devices else ""
    table.columns = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong".split()  # noqa: SIM905
    for number, result in enumerate(results if isinstance(results, list) else [], 1):
        if not isinstance(result, dict) or not isinstance(result.get("size"), int):
            continue
        words = [str(result["size"]), "0", "-", "sum", "-1"]
        for name in ("out_of_place", "in_place"):
            group = result.get(name)
            words += [
                str(group.get(key, "N/A")) if isinstance(group, dict) else "N/A"
                for key in ("time", "alg_bw", "bus_bw", "nwrong")
            ]
        try:
            row = _row(words, number, f"{where}, result {number}", table)
        except InputError as error:
            found.notes.append(str(error))
            continue
        if 0 < row.size <= LARGEST:
            table.run.rows.append(row)
    return table
