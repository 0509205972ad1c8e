"""Text of public measuring tools, read into what a profile holds: nccl-tests, nvbandwidth, p2pBandwidthLatencyTest.

    read_tool(text, where) -> Readings: all-reduce rows, link and memory figures, and notes on what was left out

Rows that cannot be used are left out with a note that names file and line; text with nothing usable is an InputError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from specsim import link_tests, nccl_tests
from specsim.errors import InputError
from specsim.nccl_tests import Run
from specsim.profiles import AllReduceCurve, Profile, Source

# what a line of each tool begins with
BEGINNINGS = (r"#[ \t]*nThread", r"#.*\balgbw\b", r"P2P Connectivity Matrix", r"nvbandwidth Version")


@dataclass
class Readings:
    """What a tool's text held: runs of an all-reduce, or figures of the links (medians over pairs, whether P2P works)."""

    tool: str
    runs: list[Run] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    notes: list[str] = field(default_factory=list)

    def curves(self, source: Source, implementation: str = "nccl") -> list[AllReduceCurve]:
        """One curve for each number of ranks, the median where a size was measured more than once; runs in a CUDA graph
        before loops. Raises InputError when the ranks of a run cannot be told."""
        if any(run.ranks is None for run in self.runs):
            raise InputError(
                "the number of ranks cannot be told", where=source.reference, mend="keep the '# Rank' lines"
            )
        counts = sorted({run.ranks for run in self.runs if run.ranks})
        return [_curve([r for r in self.runs if r.ranks == n], n, source, implementation) for n in counts]


def _curve(runs: list[Run], ranks: int, source: Source, implementation: str) -> AllReduceCurve:
    runs = [run for run in runs if run.in_graph] or runs
    times: dict[int, list[float]] = {}
    for run in runs:
        for row in run.rows:
            times.setdefault(row.size, []).append(row.microseconds)
    note = "captured in a CUDA graph" if runs[0].in_graph else "loop of back-to-back calls, which hides the launch"
    if runs[0].gpus_a_process > 1:
        note += f"; one process drove {runs[0].gpus_a_process} GPUs, so small sizes hold its launch time"
    return AllReduceCurve(
        implementation=implementation,
        ranks=ranks,
        mode="graph",
        bytes=sorted(times),
        latency_us=[round(median(times[size]), 3) for size in sorted(times)],
        relative_uncertainty=0.15,
        source=source,
        note=note,
    )


def read_tool(text: str, where: str) -> Readings:
    """Read the text of a known tool. Raises InputError when it is of no known tool or holds nothing usable."""
    text = without_prefixes(text)
    if nccl_tests.looks_like(text):
        output = nccl_tests.read(text, where)
        return Readings("nccl-tests", output.runs, device=output.device, notes=output.notes)
    if link_tests.tool_of(text):
        links = link_tests.read(text, where)
        return Readings(links.tool, figures=links.figures, device=links.device, notes=links.notes)
    known = "nccl-tests, nvbandwidth or p2pBandwidthLatencyTest output"
    raise InputError("is of no known tool", where=where, mend=f"give {known}, or aiconfigurator:SYSTEM")


def without_prefixes(text: str) -> str:
    """The text without what launchers write before each line (ranks, pods, hosts, times) and without colours.

    A line that every tool begins with tells what stands before it; digits and spaces may differ from line to line.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for begin in BEGINNINGS:
        match = re.search(rf"^(.{{0,120}}?){begin}", text, re.MULTILINE)
        if match is None:
            continue
        pieces = re.split(r"(\d+|\s+)", match[1].strip())
        prefix = "".join(r"\d+" if p.isdigit() else r"[ \t]+" if p.isspace() else re.escape(p) for p in pieces)
        return re.sub(rf"^[ \t]*{prefix}[ \t]?", "", text, flags=re.MULTILINE) if prefix else text
    return text


# --- into a profile ------------------------------------------------------------------------------------------------


def into_profile(profile: Profile, readings: Readings, source: Source, implementation: str = "nccl") -> Profile:
    """The profile with the readings in it: a curve replaces the one of the same implementation, ranks and mode; link
    figures go to environment.links. Raises InputError when a curve has more ranks than the box has GPUs."""
    changes: dict[str, Any] = {}
    if readings.runs:
        curves = readings.curves(source, implementation)
        most = max(c.ranks for c in curves)
        if most > profile.gpus:
            raise InputError(
                f"{most} ranks do not fit a profile of {profile.gpus} GPUs",
                where=source.reference,
                mend="give a profile with so many `gpus`: of several boxes, a copy of one's with that number",
            )
        known = {(c.implementation, c.ranks, c.mode): c for c in [*profile.allreduce, *curves]}
        changes["allreduce"] = [known[key] for key in sorted(known)]
    if readings.figures:
        link = {**readings.figures, "source": source.model_dump()}
        links = {**profile.environment.get("links", {}), readings.tool: link}
        changes["environment"] = {**profile.environment, "links": links}
    return profile.model_copy(update=changes)


def default_source(readings: Readings, where: str, date: str) -> Source:
    """A source that names the tool, the device and the file."""
    device = f" on {readings.device}" if readings.device else ""
    return Source(kind="measured", reference=f"{readings.tool}{device}, {where}", date=date)
