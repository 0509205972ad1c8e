"""`observe`: read what engines and tools leave behind, whatever it is, into records.

    from specsim.observations import observe, contradictions
    records = observe("server.log")            # or a benchmark file, a trace, http://localhost:30000

The format is found by content, never by file name. A text may hold several formats: each line goes to the collectors
until one takes it. A document is JSON read whole; a trace is streamed. Each record's `method` says which meanings were
taken, `caveats` what to distrust; those that begin with "contradiction:" show a source that disagrees with itself.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specsim.errors import InputError
from specsim.observe_bench import read_object
from specsim.observe_checks import CONTRADICTION, compare, make_record
from specsim.observe_llama import LlamaLog
from specsim.observe_metrics import Metrics
from specsim.observe_read import Collector, Source, open_sources
from specsim.observe_serving import ConsoleBench
from specsim.observe_sglang import SglangLog
from specsim.observe_trace import KernelClass, classify, holds_trace, kernels_table, looks_like_trace, read_trace
from specsim.observe_vllm import VllmLog
from specsim.records import Record
from specsim.redaction import scrub

__all__ = ["FORMATS", "KernelClass", "classify", "contradictions", "kernels_table", "observe"]

# What is read, for the help text and the documentation.
FORMATS = {
    "SGLang server log": "decode and prefill lines since 0.4.4, launch settings",
    "vLLM server log": "throughput and SpecDecoding lines, V0 and V1, launch settings",
    "llama.cpp log": "llama-speculative, llama-server, ik_llama's table",
    "/get_server_info": "SGLang's settings, accept length, step times",
    "/metrics": "Prometheus text of SGLang, vLLM, llama.cpp",
    "bench_serving": "SGLang JSON lines and console table",
    "bench_one_batch_server, bench_speculative": "SGLang JSON lines",
    "vllm bench serve": "JSON (ms or seconds) and console table, request metrics",
    "GuideLLM, llm-inference-bench": "JSON",
    "nccl-tests, nvbandwidth, p2pBandwidthLatencyTest": "their text",
    "torch profiler": "Chrome traces, gz too, streamed",
    "specsim.record/1": "records written by specsim",
}
MATCH_LIMIT = 1 << 12  # of a log line, the part that is matched
SETTINGS_LIMIT = 1 << 18  # of a line of launch settings
MAX_ROWS = 20_000  # of JSON lines
MAX_TOOL_LINES = 50_000
_TOOL_HINT = re.compile(r"#|P2P|nvb|mem|^\s*(?:\[\d+\]\s*)?\d+ ")
_TOOL = re.compile(
    r"#\s*nThread|algbw\s+busbw|P2P Connectivity Matrix|P2P \(Peer-to-Peer\)|^nvbandwidth Version|memcpy .*\(row\)"
    r"|^\s*(?:\[\d+\]\s*)?\d+\s+\d+\s+\w+\s+(?:sum|prod|min|max|avg)\s+-?\d+"
)


def observe(where: str | Path) -> list[Record]:
    """Records of a file, `-` (standard input) or an http(s) address; a bare server address gives all that it publishes.

    Raises InputError, naming file and place, when nothing in it can be read; WorkError when a server does not answer.
    """
    records: list[Record] = []
    problems: list[InputError] = []
    for source in open_sources(str(where)):  # several, of a server
        try:
            records += _read(source)
        except InputError as problem:
            problems.append(problem)
    if problems and not records:
        raise problems[0]
    if records:
        records[0].caveats += map(str, problems)
    return records


def contradictions(records: Sequence[Record]) -> list[str]:
    """Where sources disagree with themselves, and where arms differ in more than speculation."""
    own = [f"{r.source}: {c}" for r in records for c in r.caveats if c.startswith(CONTRADICTION)]
    return list(dict.fromkeys(own)) + compare(records)


def _read(source: Source) -> list[Record]:
    head = source.head()
    start = next(source.texts(), "")[: len(head)].lstrip("\ufeff \t\r\n\0")
    if looks_like_trace(start) or holds_trace(source):
        records = read_trace(source)
    elif start.startswith("{") or re.match(r'\[\s*[{\["]', start):
        records = _read_json(source, start)
    else:
        records = _read_lines(source)
    if not records:
        why = f" ({source.caveats[0].removeprefix(source.name + ': ')})" if source.caveats else ""
        raise InputError(
            f"holds nothing of a known format{why}",
            where=source.name,
            mend="`specsim observe --help` lists what is read",
        )
    records[0].caveats += [c for c in source.caveats if c not in records[0].caveats]
    return records


def _read_json(source: Source, start: str) -> list[Record]:
    """A document; JSON lines when the first line is an object by itself; the good part when it is cut off."""
    line = start.split("\n", 1)
    if len(line) == 2 and line[1].strip() and _parses(line[0]):
        return _read_lines(source)
    text = source.text()
    try:
        document = json.loads(text)
        return _from_document(source, document, "") or _read_texts(source, enumerate(_texts(document), 1))
    except RecursionError:
        raise InputError("is nested too deeply", where=source.name) from None
    except ValueError as problem:
        place = (
            f"line {problem.lineno}, column {problem.colno}"
            if isinstance(problem, json.JSONDecodeError)
            else "a number"
        )
        reason = getattr(problem, "msg", "of too many digits")
    if records := _read_lines(source):
        return records
    kept = salvage(text)
    if kept is not None and (records := _from_document(source, kept, "")):
        source.note(f"{place}: the JSON breaks here ({reason}); the part before is used")
        return records
    if looks_like_trace(text[: 16 << 20]):
        return read_trace(source)
    raise InputError(
        f"is not JSON that can be read: {reason}", where=f"{source.name}, {place}", mend="give the whole file"
    )


def _parses(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],]', re.DOTALL)


def salvage(text: str) -> Any:
    """The part of a cut-off JSON document before its last complete element, None when there is none."""
    stack: list[str] = []
    cut, closers = -1, ""
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in "{[":
            stack.append("}" if token == "{" else "]")
            if len(stack) > 500:
                return None
        elif token in "}]":
            if not stack or stack.pop() != token:
                break
            cut, closers = match.end(), "".join(reversed(stack))
        elif token == "," and stack:
            cut, closers = match.start(), "".join(reversed(stack))
    while cut > 0:
        try:
            return json.loads(text[:cut] + closers)
        except (ValueError, RecursionError):
            return None
    return None


def _from_document(source: Source, document: Any, place: str) -> list[Record]:
    """Records of a parsed document: one object, or a list of them."""
    if isinstance(document, list):
        records = []
        for i, item in enumerate(document[:100_000]):
            records += _from_object(source, item, f"entry {i + 1}")
        return records
    return _from_object(source, document, place)


def _from_object(source: Source, item: Any, place: str) -> list[Record]:
    if isinstance(item, dict) and item.get("schema") == "specsim.record/1":
        try:
            return [Record.model_validate(scrub(item))]
        except ValidationError as problem:
            first = problem.errors()[0]
            key = ".".join(map(str, first["loc"]))
            source.note(f"{place or 'the document'}: record is not valid at {key}: {first['msg']}")
            return []
    if (
        isinstance(item, dict)
        and item.get("schema") == "specsim.observations/1"
        and isinstance(item.get("records"), list)
    ):
        return [r for i, row in enumerate(item["records"]) for r in _from_object(source, row, f"record {i + 1}")]
    return read_object(source, item, place)


def _texts(value: Any, depth: int = 10) -> Iterator[str]:
    """The lines of text in a JSON value: a log that a container's runtime, journald or a log store keeps holds them so."""
    if isinstance(value, str):
        yield from value.splitlines()
    elif isinstance(value, list) and len(value) > 8 and all(type(item) is int and 0 <= item < 256 for item in value):
        yield bytes(value).decode("utf-8", "replace")  # journald, of a line with colours
    elif isinstance(value, (dict, list)) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item, depth - 1)


class _JsonLines:
    """Lines that are JSON objects: benchmark results, appended one a run, or a log's lines with what a runtime adds."""

    def __init__(self, source: Source, logs: Sequence[Collector]) -> None:
        self.source, self.logs = source, logs
        self.found: list[Record] = []
        self.unknown = 0  # number of the first line of no known format
        self.wrapped = False  # whether objects hold a log's lines

    def feed(self, number: int, line: str) -> bool:
        """Take a line that begins with a brace; the texts in an object of no known format go to the logs' collectors."""
        text = line.strip()
        if not text.startswith(('{"', '{ "')):
            return False
        if len(self.found) >= MAX_ROWS:
            self.source.note(f"line {number}: more than {MAX_ROWS} results; the rest was skipped")
            return True
        try:
            item = json.loads(text)
        except (ValueError, RecursionError) as problem:
            reason = getattr(problem, "msg", type(problem).__name__)
            if not _feed(self.logs, number, line):
                self.source.note(f"line {number}: is not whole JSON ({reason}); it and others like it were skipped")
            return True
        if not self._take(number, item):
            self.unknown = self.unknown or number
        return True

    def _take(self, number: int, item: Any) -> bool:
        """Whether an object, or a text in it, is of a known format."""
        found = _from_object(self.source, item, f"line {number}")
        self.found += found
        inside = 0 if found else sum(self._told(number, self.source.clean(text, number)) for text in _texts(item))
        self.wrapped = self.wrapped or inside > 0
        return bool(found) or inside > 0

    def _told(self, number: int, text: str) -> bool:
        """Whether a text in an object is of a known format: a log's line, or JSON again, as of a server that logs so itself."""
        if text.startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                return self._take(number, json.loads(text))
        return _feed(self.logs, number, text)

    def records(self) -> list[Record]:
        """What the lines gave. Of a log, lines that tell nothing are no fault."""
        if self.unknown and not self.wrapped:
            self.source.note(
                f"line {self.unknown}: a JSON object of no known format; it and others like it were skipped"
            )
        return self.found


class _Tools:
    """Text of nccl-tests, nvbandwidth and p2pBandwidthLatencyTest, handed to the importer of hardware profiles."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.lines: dict[int, str] = {}

    def feed(self, number: int, line: str) -> bool:
        """Take all lines from a tool's first line on."""
        if not self.lines and (not _TOOL_HINT.search(line[:120]) or not _TOOL.search(line)):
            return False
        if number <= MAX_TOOL_LINES:
            self.lines[number] = line[:2000]
        return True

    def records(self) -> list[Record]:
        """One record with a sample a row."""
        if not self.lines:
            return []
        from specsim.importers import read_tool

        text = "\n".join(self.lines.get(i, "") for i in range(1, max(self.lines) + 1))
        try:
            found = read_tool(text, self.source.name)
        except InputError as problem:
            self.source.note(str(problem).removeprefix(f"{self.source.name}: "))
            return []
        first = found.runs[0] if found.runs else None
        environment = {"gpu": found.device or None, **found.figures}
        environment |= {"ranks": first.ranks, "in_graph": first.in_graph} if first else {}
        samples = [
            {
                "operator": "allreduce",
                "bytes": row.size,
                "ranks": run.ranks,
                "us": row.microseconds,
                "in_graph": run.in_graph,
            }
            for run in found.runs
            for row in run.rows
        ]
        return [
            make_record(
                self.source,
                found.tool,
                samples=samples,
                method=["time of one call in us; bytes a rank"] if samples else ["medians over pairs of GPUs"],
                caveats=found.notes,
                environment=scrub({k: v for k, v in environment.items() if v is not None}),
            )
        ]


def _shorten(line: str) -> str:
    settings = "ServerArgs(" in line or "non-default args:" in line
    return line[: SETTINGS_LIMIT if settings else MATCH_LIMIT]


def _feed(collectors: Sequence[Collector], number: int, line: str) -> bool:
    """Give a line to the collectors until one takes it; whether one did."""
    short = line if len(line) <= MATCH_LIMIT or line.startswith("{") else _shorten(line)
    return any(collector.feed(number, short) for collector in collectors)


def _read_lines(source: Source) -> list[Record]:
    return _read_texts(source, source.lines())


def _read_texts(source: Source, lines: Iterable[tuple[int, str]]) -> list[Record]:
    """Records of (line number, text): each text goes to whoever knows it."""
    logs: list[Collector] = [
        SglangLog(source),
        ConsoleBench(source),
        VllmLog(source),
        Metrics(source),
        LlamaLog(source),
    ]
    collectors = [_JsonLines(source, logs), *logs, _Tools(source)]
    for number, line in lines:
        _feed(collectors, number, line)
    return [record for collector in collectors for record in collector.records()]
