"""vLLM: the server log with its windows of 10 s, and the speculative lines of V0, early V1 and today.

A window is steady when the one before has the same batch, nothing waits and no prompt was processed in it:

    cycle = batch x L / throughput;     without speculation  decode step = batch / throughput
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specsim.observe_checks import (
    CONTRADICTION,
    check_length,
    keywords,
    literal,
    make_record,
    parse_number,
    quantity,
    read_positions,
)
from specsim.observe_read import Source, to_flags
from specsim.records import EngineRun, Point, Record
from specsim.redaction import scrub

_N = r"(\d{1,12}(?:\.\d{1,12})?)"  # a number as printed; a garbled one matches nothing
_MEAN = rf"(?:{_N}|nan)"  # nan: nothing was drafted in the window
_COUNT = r"(\d{1,12})"
_ENGINE = re.compile(
    rf"(?:Engine {_COUNT}: |{_COUNT} Engines Aggregated: )?Avg prompt throughput: {_N} tokens/s, Avg generation throughput:"
    rf" {_N} tokens/s, Running: {_COUNT} reqs(?:, Swapped: \d+ reqs)?, (?:Waiting|Pending): {_COUNT} reqs"
)
_ARGUMENT = re.compile(r"'(\w{1,60})': ('[^']{0,2000}'|-?[\d.]{1,40}|True|False)(?=[,}])")
_V1 = re.compile(
    rf"SpecDecoding metrics: Mean acceptance length: {_MEAN}, Accepted throughput: {_N} tokens/s, Drafted throughput: {_N}"
    rf" tokens/s, Accepted: {_COUNT} tokens, Drafted: {_COUNT} tokens,"
    rf" Per-position acceptance rate: ([\d., ]+?)(?:,? Avg Draft acceptance rate: {_MEAN}%|\s*$)"
)
_V1_MIDDLE = re.compile(
    rf"SpecDecoding metrics: Mean acceptance length: {_MEAN}, Accepted: {_COUNT} tokens, Drafted: {_COUNT} tokens"
    r"(?:, Per-position acceptance rate: ([\d., ]+\d))?"
)
_V1_EARLY = re.compile(
    rf"SpecDecoding metrics: Draft acceptance rate: {_MEAN}%, Mean acceptance length: {_MEAN}, Accepted: {_COUNT} tokens,"
    rf" Drafted: {_COUNT} tokens"
)
_V0 = re.compile(
    rf"Speculative metrics: Draft acceptance rate: {_N}, System efficiency: {_N}, Number of speculative tokens: {_COUNT},"
    rf" Number of accepted tokens: {_COUNT}, Number of draft tokens: {_COUNT}, Number of emitted tokens: {_COUNT}"
)


@dataclass
class _Window:
    """Windows of one running count (None: lines without a batch)."""

    cycles: array[float] = field(default_factory=lambda: array("d"))
    rates: array[float] = field(default_factory=lambda: array("d"))
    accepted: float = 0.0
    drafted: float = 0.0
    drafts: float = 0.0
    counted: float = 0.0  # accepted in windows whose drafts are known
    lengths: array[float] = field(default_factory=lambda: array("d"))
    position_sums: list[float] = field(default_factory=list)  # of accepted per position
    unbalanced: int = 0
    windows: int = 0


@dataclass
class _Engine:
    running: int = -1
    current: tuple[int | None, float, bool] | None = None  # running (None: not known), tokens/s, steady
    together: int = 1  # engines whose sum a line gives


class VllmLog:
    """vLLM server logs: throughput windows and the V0, early V1 and current speculative lines."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.settings: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.version: str | None = None
        self.engines: dict[str, _Engine] = defaultdict(_Engine)
        self.last = ""
        self.groups: dict[int | None, _Window] = defaultdict(_Window)
        self.method: list[str] = []
        self.caveats: list[str] = []
        self.cumulative: tuple[float, int, float] | None = None  # V0: length, k, rate
        self.plain: list[tuple[int, float]] = []  # steady windows without a speculative line
        self.unread = False  # whether a speculative line could not be read
        self.full_graphs = False

    def feed(self, number: int, line: str) -> bool:
        """Take throughput, speculative and start-up lines."""
        if "throughput:" in line and (match := _ENGINE.search(line)):
            self._throughput(*match.groups())
            return True
        if "SpecDecoding metrics:" in line:
            return self._speculative(number, line)
        if "Speculative metrics:" in line and (match := _V0.search(line)):
            rate, efficiency, k, _, _, _ = match.groups()
            self.cumulative = (float(efficiency) * (int(k) + 1), int(k), float(rate))
            return True
        return self._startup(line)

    def _startup(self, line: str) -> bool:
        if "args: Namespace(" in line:  # older releases
            settings = keywords(line.split("args: Namespace(", 1)[1])
            names = ("speculative_model", "num_speculative_tokens")
            if settings.get("num_speculative_tokens") and not isinstance(settings.get("speculative_config"), dict):
                settings["speculative_config"] = {n.removeprefix("speculative_"): settings.pop(n, None) for n in names}
            self.settings = settings
            return True
        if "non-default args:" in line:
            body = line.split("non-default args:", 1)[1].strip()
            parsed = literal(body)
            if not isinstance(parsed, dict):
                self.caveats.append("the line of non-default args is cut off; launch flags beyond it are unknown")
                parsed = {k: literal(v) for k, v in _ARGUMENT.findall(body)}
                if "num_speculative_tokens" in parsed:
                    inner = {k: parsed.pop(k) for k in ("num_speculative_tokens", "method") if k in parsed}
                    parsed["speculative_config"] = inner
            self.settings = {str(k): v for k, v in parsed.items()}
            return True
        if (" version " in line or "LLM engine" in line) and (
            match := re.search(r"(?:LLM engine|API server version) \(?v?(\d+\.\d+\S*?)\)?(?: with config|\s|$)", line)
        ):
            self.version = match.group(1)
            for name in ("enforce_eager", "tensor_parallel_size", "data_parallel_size"):
                if found := re.search(rf"\b{name}=(\w+)", line):
                    self.environment[name] = literal(found.group(1))
            if found := re.search(r"speculative_config=SpeculativeConfig\(.{0,2000}?num_spec_tokens=(\d{1,3})\b", line):
                self.environment["num_speculative_tokens"] = int(found.group(1))
            return True
        if "Truncating max_cudagraph_capture_size to" in line and (match := re.search(r"size to (\d+)", line)):
            self.environment["max_cudagraph_capture_size"] = int(match.group(1))
            return True
        if "max_num_scheduled_tokens is set to" in line and (match := re.search(r"is set to (\d+)", line)):
            self.environment["max_num_scheduled_tokens"] = int(match.group(1))
            return True
        if "GPU KV cache size:" in line and (match := re.search(r"size: ([\d,]+) tokens", line)):
            self.environment["kv_cache_tokens"] = int(match.group(1).replace(",", "") or 0)
            return True
        if "Capturing CUDA graphs (decode, FULL)" in line:
            self.full_graphs = True
            return True
        return False

    def _throughput(
        self, engine: str | None, together: str | None, prompt: str, rate: str, running: str, waiting: str
    ) -> None:
        self.last = engine or ""
        state = self.engines[self.last]
        self._flush(state)
        tokens = parse_number(rate) or 0.0
        total = int(running[:9])
        steady = state.running == total > 0 and parse_number(prompt) == 0 and int(waiting[:9]) == 0 and tokens > 0
        state.running, state.together = total, max(1, int((together or "1")[:4]))
        batch, rest = divmod(total, state.together)
        if state.together > 1:
            self.method.append(
                f"{state.together} engines (data parallel) are summed in a line: batch and throughput are those of one,"
                " where requests divide evenly"
            )
        state.current = (None if rest else batch, tokens / state.together, steady and not rest)

    def _flush(self, state: _Engine) -> None:
        """A window that no speculative line followed is one of plain decoding."""
        if state.current and state.current[0] and state.current[2]:
            self.plain.append((state.current[0], state.current[1]))
        state.current = None

    def _speculative(self, number: int, line: str) -> bool:
        positions: list[float] = []
        if match := _V1.search(line):
            length, accepted, drafted = float(match[1] or 1), float(match[4]), float(match[5])
            drafted_rate = parse_number(match[3]) or 0.0
            positions = [p for p in (parse_number(t.strip()) for t in match[6].split(",")) if p is not None]
            self.method.append(
                "accept length: vLLM's `Mean acceptance length`, of the window, bonus token included; its draft acceptance"
                " rate is percent of drafted tokens"
            )
        elif match := _V1_EARLY.search(line):
            rate, printed = float(match[1] or 0), float(match[2] or 0)
            accepted, drafted = float(match[3]), float(match[4])
            length, drafted_rate = printed + 1, 0.0
            self.method.append(
                "accept length: `Mean acceptance length` of vLLM V1 before May 2025 has no bonus token; 1 was added"
            )
            if accepted > 0 and drafted > 0 and abs(accepted / drafted - rate / 100) > 0.01:
                self.caveats.append(
                    f"{CONTRADICTION}accepted / drafted = {accepted / drafted:.3f} but the rate is {rate} %"
                )
        elif match := _V1_MIDDLE.search(line):
            length, accepted, drafted, drafted_rate = float(match[1] or 1), float(match[2]), float(match[3]), 0.0
            positions = [p for p in (parse_number(t.strip()) for t in (match[4] or "").split(",")) if p is not None]
            self.method.append("accept length: vLLM's `Mean acceptance length`, of the window, bonus token included")
        else:
            self.unread = True
            self.source.note(
                f"line {number}: speculative line is cut off or of an unknown form; skipped, as others like it"
            )
            return True
        state = self.engines[self.last]
        current, state.current = state.current, None
        group = self.groups[(current[0] or None) if current else None]
        group.windows += 1
        group.accepted += accepted
        group.drafted += drafted
        group.counted += accepted if self._width(positions) else 0.0
        if drafted > 0:  # a window without drafts prints length 1 or nan
            group.lengths.append(length)
        k = self._width(positions)
        if k and drafted > 0:
            drafts = drafted / k
            group.drafts += drafts
            if positions:
                sums = group.position_sums
                sums.extend([0.0] * (len(positions) - len(sums)))
                for i, p in enumerate(positions):
                    sums[i] += p * drafts
        if current and current[0] and current[2] and drafted > 0:
            batch, tokens = current[0], current[1]
            group.rates.append(tokens)
            group.cycles.append(1000 * batch * length / tokens)
            if k and drafted_rate > 0 and abs(drafted_rate / state.together / k * length / tokens - 1) > 0.1:
                group.unbalanced += 1
        return True

    def _width(self, positions: list[float]) -> int | None:
        return len(positions) or self._k()

    def _k(self) -> int | None:
        config = self.settings.get("speculative_config")
        value = config.get("num_speculative_tokens") if isinstance(config, dict) else None
        value = self.environment.get("num_speculative_tokens") if value is None else value
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1000 else None

    def records(self) -> list[Record]:
        """One record, or none."""
        for state in self.engines.values():
            self._flush(state)
        if not (self.groups or self.engines or self.settings or self.cumulative or self.environment):
            return []
        flags = to_flags(self.settings)
        points = [
            p
            for batch, group in sorted(self.groups.items(), key=lambda kv: kv[0] or 0)
            for p in self._point(batch, group)
        ]
        if self.cumulative:
            points.append(self._v0_point(*self.cumulative))
        if not self.groups and not self.cumulative:
            points += self._plain_points()
        self._graph_limit()
        if len(self.engines) > 1:
            self.method.append(
                f"{len(self.engines)} engines (data parallel) log for themselves: batch and throughput are per engine"
            )
        return [
            make_record(
                self.source,
                "vLLM server log",
                EngineRun(name="vllm", version=self.version, flags=flags),
                points=points,
                method=self.method,
                caveats=self.caveats,
                environment=scrub(self.environment),
            )
        ]

    def _graph(self, batch: int | None, rows: int) -> bool | None:
        """Graph or not: known only when eager was forced, or FULL decode graphs were captured up to enough tokens."""
        if self.settings.get("enforce_eager") is True or self.environment.get("enforce_eager") is True:
            return False
        cap = self.environment.get("max_cudagraph_capture_size") or self.settings.get("max_cudagraph_capture_size")
        if batch is None or not isinstance(cap, int):
            return None
        return False if batch * rows > cap else True if self.full_graphs else None

    def _graph_limit(self) -> None:
        cap, k, most = (
            self.environment.get("max_cudagraph_capture_size"),
            self._k() or 0,
            self.settings.get("max_num_seqs"),
        )
        if isinstance(cap, int):
            largest = cap // (k + 1)
            text = f"CUDA graphs are captured up to {cap} tokens: a batch of {largest} at {k + 1} tokens a sequence"
            if isinstance(most, int) and most > largest:
                text += f"; batches of {largest + 1} to {most} run without a graph"
            self.caveats.append(text)

    def _point(self, batch: int | None, group: _Window) -> Iterator[Point]:
        if group.drafted > 0 and group.accepted == 0:
            self.caveats.append(
                f"no drafted token of {group.drafted:.0f} was accepted: speculation is broken, not weak"
            )
        if not group.lengths:
            return
        length = 1 + group.counted / group.drafts if group.drafts > 0 else sum(group.lengths) / len(group.lengths)
        printed = sum(group.lengths) / len(group.lengths)
        if group.drafts > 0 and len(group.lengths) == 1 and abs(length - printed) > 0.02 * length:
            self.caveats.append(
                f"{CONTRADICTION}1 + accepted / drafts = {length:.2f} but the printed length is {printed:.2f}"
            )
        rates = None
        if group.position_sums and group.drafts > 0:
            read = read_positions(length, [s / group.drafts for s in group.position_sums])
            rates = read.rates
            (self.caveats if read.message.startswith(CONTRADICTION) else self.method).append(
                read.message
                if read.message.startswith(CONTRADICTION)
                else "per-position rates are unconditional; stored as conditional"
            )
        if group.unbalanced:
            self.caveats.append(
                f"{CONTRADICTION}in {group.unbalanced} windows drafts/s x length is over 10 % from the generation throughput"
            )
        if problem := check_length(length, (self._k() or 0) + 1 if self._k() else None):
            self.caveats.append(problem)
        if group.cycles:
            self.method.append(
                "cycle = batch x acceptance length / generation throughput, windows of steady batch without prefill"
            )
        yield Point(
            batch=batch,
            tokens_per_cycle=length,
            accept_rate_by_position=rates,
            cycle_ms=quantity(
                group.cycles, "median over steady windows of batch x length / generation throughput", 0.005
            ),
            tokens_per_s=quantity(group.rates, "generation throughput of steady windows"),
            cuda_graph=self._graph(batch, 1 + (self._k() or len(group.position_sums))),
            notes=[] if group.cycles else ["no steady window: acceptance only, no time"],
            raw={"windows": group.windows, "accepted": group.accepted, "drafted": group.drafted},
        )

    def _v0_point(self, length: float, k: int, rate: float) -> Point:
        self.method.append(
            "accept length = system efficiency x (k + 1), since the start, bonus token included (vLLM V0 counters)"
        )
        if problem := check_length(length, k + 1):
            self.caveats.append(problem)
        return Point(tokens_per_cycle=length, raw={"draft_acceptance_rate": rate, "num_speculative_tokens": k})

    def _plain_points(self) -> list[Point]:
        by_batch: dict[int, list[float]] = defaultdict(list)
        for batch, tokens in self.plain:
            by_batch[batch].append(tokens)
        drafts = self.unread or self.settings.get("speculative_config") or self._k()
        if by_batch and drafts:
            self.caveats.append(
                "the server speculates, but no speculative line of the log could be read: throughput is known, not the"
                " accept length or the time of a step"
            )
        elif by_batch:
            self.method.append(
                "no speculative line is printed, so no speculation: decode step = batch / generation throughput"
            )
        return [
            Point(
                batch=batch,
                tokens_per_cycle=None if drafts else 1.0,
                decode_ms=None
                if drafts
                else quantity(
                    [1000 * batch / t for t in rates], "median over steady windows of batch / throughput", 0.005
                ),
                tokens_per_s=quantity(rates, "generation throughput of steady windows"),
                cuda_graph=self._graph(batch, 1 + (self._k() or 0)),
                raw={"windows": len(rates)},
            )
            for batch, rates in sorted(by_batch.items())
        ]
