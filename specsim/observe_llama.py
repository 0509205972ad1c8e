"""llama.cpp: `llama-speculative`, `llama-server`'s lines per request, and ik_llama's bench table.

Accept length = 1 + accepted / drafts. Drafts may be shorter than `n_max`, so 1 + rate x n_max is not it.
"""

from __future__ import annotations

import re
from typing import Any

from specsim.observe_checks import CONTRADICTION, check_length, conditional, make_record, parse_number, read_positions
from specsim.observe_read import Source
from specsim.records import EngineRun, Point, Quantity, Record

_EVAL = re.compile(r"(?<!prompt )\beval time = *(\d{1,12}(?:\.\d*)?) ms / *(\d+) tokens")
_DRAFTED = re.compile(r"draft acceptance(?: rate)? = *(\d{1,12}(?:\.\d*)?) \( *(\d+) accepted / *(\d+) generated\)")
_LENGTH = re.compile(r"mean acceptance length = *(\d{1,12}(?:\.\d*)?)")
_PER_POSITION = re.compile(r"(?:acceptance rate per position|#acc rate/pos) = \(([\d., ]+)\)")
_STATISTICS = re.compile(r"#gen drafts = *(\d+).*?#gen tokens = *(\d+), *#acc tokens = *(\d+)")
_DURATION = re.compile(r"#calls\(b,g,a\) = *\d+ +(\d+) +\d+.*dur\(b,g,a\) = *[\d.]+, *(\d{1,12}(?:\.\d*)?), *[\d.]+ ms")
_ROW = re.compile(
    r"^\|[^|]*\|[^|]*\|[^|]*\| *(\d+) *\|[^|]*\| *(\d{1,12}(?:\.\d*)?) *\| *(\d{1,12}(?:\.\d*)?) *\| *(\d+) *\| *(\d+)/(\d+) *\|"
    r" *(\d{1,12}(?:\.\d*)?)% *\| *(\d{1,12}(?:\.\d*)?) *\|([\d.% ]*)"
)
_COUNT = re.compile(r"^(n_draft|n_predict|n_drafted|n_accept) *= *(\d+)\b")
_DECODED = re.compile(r"^decoded +(\d+) tokens in +(\d{1,12}(?:\.\d*)?) seconds")


class LlamaLog:
    """llama.cpp: `llama-speculative`, `llama-server`'s per-request lines, and ik_llama's bench table."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.points: list[Point] = []
        self.caveats: list[str] = []
        self.counts: dict[str, int] = {}
        self.decoded: tuple[int, float] | None = None
        self.eval: tuple[float, int] | None = None
        self.draft_ms: Quantity | None = None
        self.method: list[str] = []
        self.count = 0

    def feed(self, number: int, line: str) -> bool:
        """Take the lines that carry acceptance or time."""
        if "eval time" in line and (match := _EVAL.search(line)):
            self.eval = (float(match[1]), int(match[2][:12]))
            return True
        if "draft acceptance" in line and (match := _DRAFTED.search(line)):
            self._request(line, int(match[2][:12]), int(match[3][:12]))
            return True
        if "#gen drafts" in line and (match := _STATISTICS.search(line)):
            if (found := _DURATION.search(line)) and int(found[1][:12]) > 0:
                self.draft_ms = Quantity(
                    value=float(found[2]) / int(found[1][:12]), n=int(found[1][:12]), how="total / calls"
                )
                if self.points:
                    self.points[-1] = self.points[-1].model_copy(update={"draft_ms": self.draft_ms})
            if not self.points and int(match[1][:12]) > 0:
                self._add(1 + int(match[3][:12]) / int(match[1][:12]), None, None, {"drafts": int(match[1][:12])})
            return True
        if line.startswith("|") and (match := _ROW.match(line)):
            drafts, accepted = int(match[4][:12]), int(match[5][:12])
            positions = [float(p) / 100 for p in re.findall(r"(\d+(?:\.\d+)?)%", match[9])]
            if drafts:
                cycle = 1000 * float(match[2]) / drafts
                self._add(1 + accepted / drafts, positions, cycle, {"drafts": drafts, "accepted": accepted})
            return True
        if match := _DECODED.match(line):
            self.decoded, self.counts = (int(match[1][:12]), float(match[2])), {}
            return True
        if match := _COUNT.match(line):
            self.counts[match[1]] = int(match[2][:12])
            if match[1] == "n_accept":
                self._summary()
            return True
        return False

    def _request(self, line: str, accepted: int, generated: int) -> None:
        self.method.append(
            "llama.cpp: accept length = 1 + accepted / drafts (drafts may be shorter than n_max), bonus token included"
        )
        drafts_text = re.search(r"(\d+) drafts", line)
        length_text, positions_text = _LENGTH.search(line), _PER_POSITION.search(line)
        length = None
        if drafts_text and int(drafts_text[1][:12]) > 0:
            length = 1 + accepted / int(drafts_text[1][:12])
        elif length_text:
            length = parse_number(length_text[1])
        positions = (
            [p for p in (parse_number(t.strip()) for t in positions_text[1].split(",")) if p is not None]
            if positions_text
            else None
        )
        cycle = None
        if length and self.eval and self.eval[1] > 0:
            cycle = self.eval[0] / self.eval[1] * length
        self.eval = None
        self._add(length, positions, cycle, {"accepted": accepted, "drafted": generated})

    def _summary(self) -> None:
        predicted, accepted = self.counts.get("n_predict", 0), self.counts.get("n_accept", 0)
        if predicted > accepted:
            cycles = predicted - accepted
            self.method.append(
                "llama-speculative: cycles = n_predict - n_accept, one bonus token each; length = n_predict / cycles"
            )
            seconds = self.decoded[1] if self.decoded else None
            self._add(predicted / cycles, None, 1000 * seconds / cycles if seconds else None, dict(self.counts))
        elif self.counts.get("n_drafted"):
            self.caveats.append(f"{CONTRADICTION}n_accept = {accepted} is not below n_predict = {predicted}")

    def _add(
        self, length: float | None, positions: list[float] | None, cycle_ms: float | None, raw: dict[str, Any]
    ) -> None:
        self.count += 1
        if len(self.points) >= 1000:  # a long server log: the first thousand requests tell enough
            return
        rates = None
        if length is not None and positions:
            read = read_positions(length, positions)
            rates = read.rates
            if read.message.startswith(CONTRADICTION):
                self.caveats.append(read.message)
        elif positions:
            rates = conditional(positions)
        if length is not None and (problem := check_length(length)):
            self.caveats.append(problem)
        how = "time / cycles of one request"
        self.points.append(
            Point(
                batch=1,
                tokens_per_cycle=length,
                accept_rate_by_position=rates,
                cycle_ms=Quantity(value=cycle_ms, n=1, how=how) if cycle_ms else None,
                raw=raw,
            )
        )

    def records(self) -> list[Record]:
        """One record, or none."""
        if not self.points:
            return []
        if self.count > len(self.points):
            self.caveats.append(f"only the first {len(self.points)} of {self.count} requests are kept")
        engine = EngineRun(name="other", version="llama.cpp")
        return [
            make_record(
                self.source, "llama.cpp log", engine, points=self.points, method=self.method, caveats=self.caveats
            )
        ]
