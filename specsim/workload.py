"""Requests to simulate: when they arrive and how many tokens each has; drawn from a distribution or read from a trace.

Requests come in blocks, so a trace of any size takes the memory of one block. Times are whole picoseconds, so that no
sum of them depends on the order or the platform. Trace layouts (`LAYOUTS`) are recognised by their column names, in
letters of either case; a CSV file may have commas, semicolons or tabs between its values:

    own         arrival_s, input_tokens, output_tokens (CSV or JSONL; seconds from any origin)
    Azure       TIMESTAMP, ContextTokens, GeneratedTokens (CSV, 2023 and 2024; Azure/AzurePublicDataset)
    BurstGPT    Timestamp, Request tokens, Response tokens (CSV, seconds; HPMLL/BurstGPT)
    Mooncake    timestamp, input_length, output_length (JSONL, milliseconds; kvcache-ai/Mooncake)
    Bailian     the same beside chat_id (JSONL, seconds; alibaba-edu/qwen-bailian-usagetraces-anon)
    Vidur       arrived_at, num_prefill_tokens, num_decode_tokens (CSV, seconds; microsoft/vidur)
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from specsim.errors import InputError, as_fraction
from specsim.files import opening, why
from specsim.quantities import counted

Ints = NDArray[np.int64]
PS = 10**12  # picoseconds a second
BLOCK = 32_768  # requests
LAST = 8_000_000  # seconds: 92 days of whole picoseconds fit 63 bits
MOST_TOKENS = 2**31


@dataclass(frozen=True)
class Requests:
    """A block of requests in order of arrival: time (ps), prompt tokens and tokens to generate (each at least 1)."""

    arrival: Ints
    input_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.arrival)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request: uniform on the whole numbers from `ratio` x `most` to `most` (as bench_serving's range ratio)."""

    most: int
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.most <= MOST_TOKENS:
            raise InputError(f"{self.most} tokens a request", where="token counts", mend=f"give 1 to {MOST_TOKENS:,}")
        if not 0 <= self.ratio <= 1:
            raise InputError(f"{self.ratio:g} is not in [0, 1]", where="--range-ratio", mend=as_fraction(self.ratio))

    @property
    def least(self) -> int:
        return max(1, int(self.most * self.ratio))

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    @property
    def cv2(self) -> float:
        """Variance over the square of the mean."""
        return ((self.most - self.least + 1) ** 2 - 1) / 12 / self.mean**2

    def draw(self, generator: np.random.Generator, n: int) -> Ints:
        """n independent lengths."""
        return generator.integers(self.least, self.most, n, dtype=np.int64, endpoint=True)


def synthetic(
    count: int,
    inputs: Lengths,
    outputs: Lengths,
    rate: float = math.inf,
    *,
    shape: float = 1.0,
    seed: int = 0,
) -> Iterator[Requests]:
    """`count` requests; the first comes at 0, the gaps after it are Gamma distributed with mean 1 / `rate` seconds.

    `shape` 1 is a Poisson process, smaller ones are burstier (the variation of the gaps is 1 / sqrt(shape)), and
    infinity spaces requests evenly. An infinite `rate` lets all come at once. Raises InputError.
    """
    if count < 1:
        raise InputError(f"{count} requests", where="--num-requests", mend="give 1 or more")
    if not rate > 0:
        raise InputError(f"{rate:g} is not a rate", where="--rate", mend="give requests a second, above 0")
    if not shape > 0:
        raise InputError(f"{shape:g} is not a shape", where="--burstiness", mend="give a number above 0; 1 is Poisson")
    if (count - 1) / rate > LAST:
        what = f"{counted(count, 'request')} at {rate:g} a second last too long"
        raise InputError(what, where="--rate", mend=f"stay below {LAST:,} s")
    times, prompts, answers = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3))
    return _draw(count, inputs, outputs, rate, shape, times, prompts, answers)


def _draw(
    count: int,
    inputs: Lengths,
    outputs: Lengths,
    rate: float,
    shape: float,
    times: np.random.Generator,
    prompts: np.random.Generator,
    answers: np.random.Generator,
) -> Iterator[Requests]:
    now = 0
    for first in range(0, count, BLOCK):
        n = min(BLOCK, count - first)
        if math.isinf(rate):
            gaps = np.zeros(n)
        elif math.isinf(shape):
            gaps = np.full(n, 1 / rate)
        elif shape == 1:
            gaps = times.exponential(1 / rate, n)
        else:
            gaps = times.gamma(shape, 1 / (rate * shape), n)
        if first == 0:
            gaps[0] = 0.0
        if not now / PS + gaps.sum() < LAST:  # before they are whole numbers, which have an end
            raise InputError("the requests come too far apart", where="--rate", mend=f"stay below {LAST:,} s")
        arrival = now + np.cumsum(np.rint(gaps * PS).astype(np.int64))
        now = int(arrival[-1])
        yield Requests(arrival, inputs.draw(prompts, n), outputs.draw(answers, n))


# Traces


@dataclass(frozen=True)
class Layout:
    """A trace layout: its column names for arrival, input and output, how an arrival becomes seconds, and what it is. `beside`: a
    column by which a layout is told from another with the same three."""

    name: str
    arrival: str
    input_tokens: str
    output_tokens: str
    seconds: Callable[[Any], float]
    time: str = "seconds"
    beside: str = ""


def _timestamp(text: Any) -> float:
    """Seconds since 1970 of "2023-11-16 18:15:46.6805900" or "2024-05-10 00:00:00.009930+00:00"; UTC unless it says."""
    text = str(text).strip().replace("Z", "+00:00")
    head, _, tail = text.partition(".")
    digits = len(tail) - len(tail.lstrip("0123456789"))
    when = datetime.fromisoformat(head + tail[digits:])
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return when.timestamp() + (float("0." + tail[:digits]) if digits else 0.0)


def _milliseconds(value: Any) -> float:
    return float(value) / 1000


LAYOUTS = (
    Layout("specsim", "arrival_s", "input_tokens", "output_tokens", float),
    Layout(
        "Azure",
        "TIMESTAMP",
        "ContextTokens",
        "GeneratedTokens",
        _timestamp,
        "a date and time such as 2023-11-16 18:15:46.68",
    ),
    Layout("BurstGPT", "Timestamp", "Request tokens", "Response tokens", float),
    Layout("Mooncake", "timestamp", "input_length", "output_length", _milliseconds, "milliseconds"),
    Layout("Bailian", "timestamp", "input_length", "output_length", float, beside="chat_id"),
    Layout("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", float),
)


class Trace:
    """A trace file, read in blocks: iterate over it for `Requests` whose first arrives at 0.

    `limit`: requests to read at most. `speed`: 2 makes arrivals come twice as fast. `spread_s`: times in the file are
    whole multiples of so many seconds, and requests of one time are spread evenly at random over it (seeded). Rows
    without input or output tokens are failed requests: left out and counted in `skipped`; `longest`: tokens of the longest
    request that was read; `grid_ms`: what all of its times are multiples of, and `together`: requests at the time of the one before. Plain or .gz. The file's
    head is read at once, so a wrong file raises InputError here; a bad row raises it while iterating.
    """

    def __init__(
        self, path: Path, *, limit: int | None = None, speed: float = 1.0, spread_s: float = 0.0, seed: int = 0
    ) -> None:
        if not (math.isfinite(speed) and speed > 0):
            raise InputError(f"{speed:g} is not a speed", where="--speed", mend="give a number above 0")
        if not 0 <= spread_s <= LAST:
            raise InputError(f"{spread_s:g} is not a time", where="--spread", mend=f"give seconds, 0 to {LAST:,}")
        self.path, self.limit, self.speed, self.spread_s, self.seed = path, limit, speed, spread_s, seed
        self.skipped = self.longest = self.together = self.grid_ms = 0
        self.packed = path.suffix.lower() == ".gz"
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            mend = "write it to a file first, and give that"
            raise InputError("is a pipe, and a trace is read more than once", where=str(self.path), mend=mend)
        with self._open() as file:
            self.layout, self.is_json = self._recognise(file)

    def __iter__(self) -> Iterator[Requests]:
        self.skipped = self.longest = self.together = self.grid_ms = 0
        generator = np.random.default_rng(self.seed)
        rows = self._rows()
        done, before = 0, 0
        while self.limit is None or done < self.limit:
            block = self._block(rows, BLOCK if self.limit is None else min(BLOCK, self.limit - done), generator)
            if block is None:
                break
            if self.spread_s:  # the last time of a block may go on in the next one
                block = replace(block, arrival=np.maximum(block.arrival, before))
                before = int(block.arrival[-1])
            done += len(block)
            yield block
        if not done:
            failed = f" that have input and output tokens, and {self.skipped:,} that lack them" if self.skipped else ""
            raise InputError(f"has no requests{failed}", where=str(self.path), mend="give a trace with at least one")

    @property
    def coarse_s(self) -> float:
        """The seconds that times are whole multiples of, from a second up, where requests share times; else 0."""
        return self.grid_ms / 1000 if self.grid_ms >= 1000 and self.together else 0.0

    def _block(
        self, rows: Iterator[tuple[float, int, int]], most: int, generator: np.random.Generator
    ) -> Requests | None:
        arrival: list[float] = []
        inputs: list[int] = []
        outputs: list[int] = []
        for seconds, given, made in rows:
            arrival.append(seconds)
            inputs.append(given)
            outputs.append(made)
            if len(arrival) == most:
                break
        if not arrival:
            return None
        seconds_ = np.asarray(arrival)
        times = np.rint(seconds_ * 1000).astype(np.int64)
        self.grid_ms = int(np.gcd.reduce(np.append(times, self.grid_ms)))
        self.together += int((np.diff(times) == 0).sum())
        if self.spread_s:
            seconds_ = np.sort(seconds_ + generator.random(len(seconds_)) * self.spread_s)
        if seconds_[-1] / self.speed > LAST:
            raise InputError("lasts too long", where="--spread", mend=f"stay below {LAST:,} s")
        ps = np.rint(seconds_ / self.speed * PS).astype(np.int64)
        block = Requests(ps, np.asarray(inputs, dtype=np.int64), np.asarray(outputs, dtype=np.int64))
        self.longest = max(self.longest, int((block.input_tokens + block.output_tokens).max()))
        return block

    def _open(self) -> TextIO:
        with opening(self.path, "trace"):
            if self.packed:
                return io.TextIOWrapper(gzip.open(self.path), encoding="utf-8-sig", newline="")
            return open(self.path, encoding="utf-8-sig", newline="")

    def _recognise(self, file: TextIO) -> tuple[Layout, bool]:
        with self._told():
            head = next((line for line in iter(lambda: file.readline(2**20), "") if line.strip()), "")
            if not head:
                raise InputError("is empty", where=str(self.path), mend="give a trace with at least one request")
            if head.lstrip().startswith("["):
                raise InputError("is one JSON array", where=str(self.path), mend="give one object a line (JSONL)")
            if head.lstrip().startswith("{"):
                return self._layout(list(_object(head, self.path, 1)), "keys"), True
            self.delimiter = max(",;\t", key=head.count)
            names = next(csv.reader([head], delimiter=self.delimiter))
        return self._layout([name.strip() for name in names], "columns"), False

    @contextmanager
    def _told(self, line: Callable[[], int] | None = None) -> Iterator[None]:
        """Says in one line why the file cannot be read any further; `line`: the last that was."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise InputError(
                f"is not a text file: {error}", where=str(self.path), mend="give a CSV or JSONL trace in UTF-8"
            ) from None
        except (csv.Error, EOFError, OSError, zlib.error) as error:
            after = f", line {line() + 1}" if line else ""
            mend = "fetch or pack it again" if self.packed else "correct that line"
            raise InputError(f"cannot be read: {why(error)}", where=f"{self.path}{after}", mend=mend) from None

    def _layout(self, names: Sequence[str], what: str) -> Layout:
        """The layout of columns of these names, in letters of either case; `columns` then holds how the file writes each."""

        def wanted(layout: Layout) -> list[str]:
            return [layout.arrival, layout.input_tokens, layout.output_tokens]

        def written(name: str) -> list[str]:
            alike = [found for found in names if found.strip().casefold() == name.casefold()]
            return [found for found in alike if found.strip() == name] or alike

        def lacks(layout: Layout) -> tuple[int, int]:
            return sum(not written(name) for name in wanted(layout)), sum(name not in names for name in wanted(layout))

        known = [layout for layout in LAYOUTS if not layout.beside or written(layout.beside)]
        nearest = min(known, key=lambda layout: (lacks(layout), not layout.beside))
        missing = [name for name in wanted(nearest) if not written(name)]
        if missing:
            raise InputError(
                f"has no {what if len(missing) > 1 else what[:-1]} {', '.join(missing)} (it has {', '.join(map(str, names[:12]))})",
                where=str(self.path),
                mend="layouts: " + "; ".join(f"{layout.name}: {', '.join(wanted(layout))}" for layout in LAYOUTS),
            )
        for name in wanted(nearest):
            if len(written(name)) > 1:
                raise InputError(f"has several {what} {name}", where=str(self.path), mend="keep one of them")
        self.columns = {name: written(name)[0] for name in wanted(nearest)}
        return nearest

    def _rows(self) -> Iterator[tuple[float, int, int]]:
        """(seconds from the first request, input tokens, output tokens) of each request with tokens."""
        first: float | None = None
        before = -math.inf
        with self._open() as file:
            for line, row in self._json_rows(file) if self.is_json else self._csv_rows(file):
                arrival, given, made = self._values(row, line)
                if arrival < before:
                    raise InputError(
                        f"{self.layout.arrival} goes back by {before - arrival:g} s",
                        where=f"{self.path}, line {line}",
                        mend="sort the trace by arrival",
                    )
                before = arrival
                if given == 0 or made == 0:
                    self.skipped += 1
                    continue
                first = arrival if first is None else first
                if (arrival - first) / self.speed > LAST:
                    raise InputError("lasts too long", where=f"{self.path}, line {line}", mend=f"stay below {LAST:,} s")
                yield arrival - first, given, made

    def _values(self, row: dict[str, Any], line: int) -> tuple[float, int, int]:
        where, layout = f"{self.path}, line {line}", self.layout
        text = self._field(row, layout.arrival, where)
        try:
            arrival = layout.seconds(text)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{layout.arrival} is {text!r}", where=where, mend=f"give {layout.time}") from None
        if not math.isfinite(arrival) or arrival < 0:
            raise InputError(f"{layout.arrival} is {arrival:g}", where=where, mend="give a time of 0 or more")
        return arrival, self._tokens(row, layout.input_tokens, where), self._tokens(row, layout.output_tokens, where)

    def _tokens(self, row: dict[str, Any], name: str, where: str) -> int:
        text = self._field(row, name, where)
        try:
            tokens = float(text)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{name} is {text!r}", where=where, mend="give a whole number") from None
        if not 0 <= tokens <= MOST_TOKENS or tokens != int(tokens):
            raise InputError(f"{name} is {tokens:g}", where=where, mend="give a whole number of 0 or more")
        return int(tokens)

    def _field(self, row: dict[str, Any], name: str, where: str) -> Any:
        value = row.get(self.columns[name])
        if value is None:
            raise InputError(f"has no {name}", where=where, mend="give it, or leave the line out")
        if isinstance(value, bool):
            raise InputError(f"{name} is {value}", where=where, mend="give a number, or leave the line out")
        return value

    def _csv_rows(self, file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
        reader = csv.reader(file, delimiter=self.delimiter)
        names: list[str] = []
        with self._told(lambda: reader.line_num):
            for row in reader:
                if not "".join(row).strip():
                    continue
                if not names:
                    names = [name.strip() for name in row]
                    continue
                if len(row) > len(names) and any(row[len(names) :]):
                    raise InputError(
                        f"has {len(row)} values for {len(names)} columns",
                        where=f"{self.path}, line {reader.line_num}",
                        mend=f"put values that hold a {self.delimiter!r} between quotes",
                    )
                yield reader.line_num, dict(zip(names, row, strict=False))

    def _json_rows(self, file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        with self._told(lambda: number):
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, _object(text, self.path, number)


def _object(text: str, path: Path, line: int) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # ValueError: also a whole number of thousands of digits
        raise InputError("is not JSON", where=f"{path}, line {line}", mend="give one object a line") from None
    if not isinstance(value, dict):
        raise InputError("is not a JSON object", where=f"{path}, line {line}", mend="give one object a line")
    return value
