"""SGLang: the server log, every generation of its decode line since 0.4.4, and `/get_server_info`.

Every `decode_log_interval` (40) steps the log has the batch, the accept length and the throughput since the last such
line. A cycle is then  C = batch x L / throughput  (a decode step: batch / throughput). An interval counts as steady when
the line before it has the same batch and no prefill lies between: the first line after idle carries the idle time.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from specsim.observe_checks import (
    CONTRADICTION,
    check_length,
    keywords,
    make_record,
    measured,
    parse_number,
    parse_whole,
    positive,
    quantity,
    read_rates,
    title,
    version_text,
    whole,
)
from specsim.observe_read import Source, flag_value, to_flags
from specsim.quantities import counted
from specsim.records import EngineRun, Point, Record
from specsim.redaction import scrub

LEAST_TOKENS_PER_S = 1.0  # of one sequence; an interval below it held idle time
OUTLIER = 3.0  # times the median cycle of its batch: an interval that held something else than decoding

_FIELD = re.compile(r"(#?[A-Za-z][A-Za-z0-9 #/()_-]{0,40}?): *(True|False|[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]))")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)[^\s\]]*((?: [A-Z_]+\d+)*)\]")
_BATCHES = re.compile(r"Capture (?:target verify |draft )?cuda graph.{0,40}?bs (\[[\d, ]+\])", re.IGNORECASE)


@dataclass
class _Group:
    """Intervals of one batch size and graph flag."""

    lines: int = 0
    cycles: array[float] = field(default_factory=lambda: array("d"))  # ms
    rates: array[float] = field(default_factory=lambda: array("d"))  # tokens/s
    lengths: array[float] = field(default_factory=lambda: array("d"))  # of steady intervals
    all_lengths: array[float] = field(default_factory=lambda: array("d"))
    contexts: array[float] = field(default_factory=lambda: array("d"))
    outliers: int = 0

    def clean(self) -> None:
        """Drop intervals that are far longer than the median."""
        if len(self.cycles) < 3:
            return
        limit = OUTLIER * sorted(self.cycles)[len(self.cycles) // 2]
        keep = [i for i, c in enumerate(self.cycles) if c <= limit]
        self.outliers = len(self.cycles) - len(keep)
        if self.outliers and len(self.lengths) in (0, len(self.cycles)):
            self.lengths = array("d", [self.lengths[i] for i in keep if self.lengths])
        self.cycles, self.rates = (array("d", [values[i] for i in keep]) for values in (self.cycles, self.rates))


@dataclass
class _Rank:
    """What the last decode line of a data-parallel rank said."""

    member: tuple[str, ...]  # tags above 0 (pipeline stage, tensor, expert) of its rank that is listened to
    batch: int = -1
    prefills: int = -1
    stamp: datetime | None = None


@dataclass
class _SglangRun:
    """One server launch."""

    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    groups: dict[tuple[int, bool | None, bool], _Group] = field(default_factory=lambda: defaultdict(_Group))
    ranks: dict[str, _Rank] = field(default_factory=dict)
    pairs: set[tuple[float, float]] = field(default_factory=set)
    caveats: list[str] = field(default_factory=list)
    decode_lines: int = 0
    prefills: int = 0
    new_tokens: float = 0.0
    cached_tokens: float = 0.0
    input_rates: array[float] = field(default_factory=lambda: array("d"))
    duplicates: int = 0

    at_cap: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    timed_s: float = 0.0
    timed_cycles_s: float = 0.0
    segments: int = 0
    date: str | None = None


class SglangLog:
    """SGLang server logs, every generation of the decode line from 0.4.4 on."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.runs = [_SglangRun()]

    def feed(self, number: int, line: str) -> bool:
        """Take decode, prefill and start-up lines."""
        run = self.runs[-1]
        if "Decode batch" in line:
            return self._decode(run, number, line)
        if "Prefill batch" in line:
            self._prefill(run, line)
            return True
        if "ServerArgs(" in line and "=" in line:
            if run.decode_lines or run.settings:
                run = _SglangRun()
                self.runs.append(run)
            body = line.split("ServerArgs(", 1)[1]
            run.settings = keywords(body)
            return True
        if "sglang.launch_server" in line and " --" in line:
            words = scrub(line.split("sglang.launch_server", 1)[1].split())
            run.settings = {**_from_words(words), **run.settings}
            return True
        return self._startup(run, line)

    def _prefill(self, run: _SglangRun, line: str) -> None:
        run.prefills += 1
        fields = {k.strip(): v for k, v in _FIELD.findall(line.partition("Prefill batch")[2])}
        run.new_tokens += parse_number(fields.get("#new-token")) or 0.0
        run.cached_tokens += parse_number(fields.get("#cached-token")) or 0.0
        if rate := parse_number(fields.get("input throughput (token/s)")):
            run.input_rates.append(rate)

    def _startup(self, run: _SglangRun, line: str) -> bool:
        if "uda graph" in line and (match := _BATCHES.search(line)):
            sizes = [int(size) for size in re.findall(r"\d{1,9}", match.group(1))]
            run.environment.setdefault("cuda_graph_batch_sizes", sizes)
            return True
        if "max_running_requests=" in line and (match := re.search(r"max_running_requests=(\d{1,12})\b", line)):
            run.environment["max_running_requests"] = int(match.group(1))
            if tokens := re.search(r"max_total_num_tokens=(\d{1,12})\b", line):
                run.environment["max_total_num_tokens"] = int(tokens.group(1))
            return True
        if "default MoE kernel config" in line:
            shape = re.search(r"E=(\d+),N=(\d+)", line)
            run.environment["untuned_experts"] = shape.group(0) if shape else "shape not told"
            return True
        if "ustom all" in line and re.search(r"ustom all-?reduce.*(disabled|not supported|fail)", line, re.IGNORECASE):
            run.environment["custom_all_reduce"] = "disabled: " + scrub(line[-200:].strip())
            return True
        return False

    def _decode(self, run: _SglangRun, number: int, line: str) -> bool:
        head, _, body = line.partition("Decode batch")
        fields = {k.strip(): v for k, v in _FIELD.findall(body)}
        batch, rate = parse_whole(fields.get("#running-req")), parse_number(fields.get("gen throughput (token/s)"))
        if batch is None or rate is None or "#queue-req" not in fields or body.count("#running-req") > 1:
            self.source.note(f"line {number}: decode line is cut off or garbled; it and others like it were skipped")
            return True
        stamp = _STAMP.search(head)
        tags = stamp.group(2).split() if stamp else []
        key = next((t for t in tags if t.startswith("DP")), "")
        member = tuple(t for t in tags if t != key and t.rstrip("0123456789") + "0" != t)
        rank = run.ranks.setdefault(key, _Rank(member))
        if rank.member != member:  # another rank that works on the same requests
            run.duplicates += 1
            return True
        when = _when(stamp.group(1)) if stamp else None
        run.date = run.date or (when.isoformat() if when else None)
        run.decode_lines += 1
        if batch < 1:
            rank.batch = 0
            return True
        graph = next((v == "True" for k, v in fields.items() if k.endswith(" graph")), None)
        length, logged_rate = parse_number(fields.get("accept len")), parse_number(fields.get("accept rate"))
        group = run.groups[batch, graph, length is not None]
        group.lines += 1
        if length is not None:
            group.all_lengths.append(length)
            if logged_rate is not None and len(run.pairs) < 500:
                run.pairs.add((length, logged_rate))
        if (parse_whole(fields["#queue-req"]) or 0) > 0:
            run.at_cap[batch] += 1
        steady = rank.batch == batch and rank.prefills == run.prefills and rate > batch * LEAST_TOKENS_PER_S
        if steady:
            group.rates.append(rate)
            group.cycles.append(1000 * batch * (length or 1.0) / rate)
            if length is not None:
                group.lengths.append(length)
            tokens = parse_number(fields.get("#token", fields.get("#full token")))
            if tokens is not None and tokens > batch:
                group.contexts.append(tokens / batch)
            if when and rank.stamp:
                run.timed_s += (when - rank.stamp).total_seconds()
                run.timed_cycles_s += group.cycles[-1] / 1000
        else:
            run.segments += 1
        rank.batch, rank.prefills, rank.stamp = batch, run.prefills, when
        return True

    def records(self) -> list[Record]:
        """One record a server launch that decoded or told its settings."""
        told = [r for r in self.runs if r.decode_lines or r.prefills or r.settings or r.environment]
        return [self._record(run, i + 1 if len(told) > 1 else 0) for i, run in enumerate(told)]

    def _record(self, run: _SglangRun, launch: int) -> Record:
        flags = to_flags(run.settings)
        d = parse_whole(flag_value(flags, "--speculative-num-draft-tokens"))
        speculates = any(g.all_lengths for g in run.groups.values())
        method, caveats = [], list(run.caveats)
        if speculates:
            method.append("accept length: SGLang's `accept len`, mean of the interval, bonus token included")
            meaning = read_rates(run.pairs, d)
            (caveats if meaning.message.startswith(CONTRADICTION) else method).append(meaning.message)
            d = d or meaning.draft_tokens
            method.append("cycle = batch x accept length / gen throughput, steady intervals only")
            method.append("the graph flag of a line with an accept length is that of the verify pass")
        silent = bool(run.settings.get("speculative_algorithm")) and not speculates
        if silent and run.groups:
            caveats.append(
                "the server speculates, but its decode lines have no accept length: throughput is known, not the accept"
                " length or the time of a step"
            )
        elif any(not drafted for _, _, drafted in run.groups):
            method.append("lines without an accept length are plain decoding: decode step = batch / gen throughput")
        points = []
        for (batch, graph, drafted), group in sorted(run.groups.items(), key=lambda kv: (kv[0][0], str(kv[0][1:]))):
            group.clean()
            point, found = _sglang_point(batch, graph, group, drafted, d)
            if silent:
                point = point.model_copy(update={"tokens_per_cycle": None, "decode_ms": None})
            points.append(point)
            caveats += found
        if run.prefills:
            run.environment["prefill_lines"] = run.prefills
            total = run.new_tokens + run.cached_tokens
            run.environment["cached_token_share"] = run.cached_tokens / total if total else None
            if run.input_rates:
                run.environment["input_tokens_per_s"] = float(sorted(run.input_rates)[len(run.input_rates) // 2])
        if run.decode_lines:
            steady = sum(len(g.cycles) for g in run.groups.values())
            if dropped := sum(g.outliers for g in run.groups.values()):
                method.append(f"{counted(dropped, 'interval')} above {OUTLIER:g} times the median of the batch dropped")
            run.environment["decode_lines"] = run.decode_lines
            run.environment["steady_intervals"] = steady
            method.append(
                f"{steady} of {run.decode_lines} decode lines end a steady interval, the others follow a prefill, idle"
                " time or a change of batch and give no time"
            )
        if len(run.ranks) > 1:
            method.append(f"{len(run.ranks)} data-parallel ranks log for themselves: batch and throughput are per rank")
            run.environment["dp_ranks"] = len(run.ranks)
        if run.duplicates:
            method.append(
                f"{counted(run.duplicates, 'line')} of further ranks of the same requests, that say the same, left out"
            )
        caveats += self._clock(run, flags) + _admission(run) + _graphs(run)
        if shape := run.environment.get("untuned_experts"):
            caveats.append(
                f"SGLang has no tuned kernel for these experts on this GPU ({shape}): passes were seen 4 to 12 % slower, "
                "beyond 64 rows 25 %; its benchmark/kernels/fused_moe_triton/tuning_fused_moe_triton.py makes one"
            )
        return make_record(
            self.source,
            f"SGLang server log, launch {launch}" if launch else "SGLang server log",
            EngineRun(name="sglang", version=None, flags=flags),
            points=points,
            method=method,
            caveats=caveats,
            environment={k: v for k, v in run.environment.items() if v is not None},
            date=run.date,
        )

    def _clock(self, run: _SglangRun, flags: list[str]) -> list[str]:
        """throughput x cycle = batch x length, with the cycle from time stamps: checked over 20 s of steady lines."""
        interval = parse_whole(flag_value(flags, "--decode-log-interval"))
        if not interval or run.timed_s < 20 or run.timed_s < 10 * run.segments or run.timed_cycles_s <= 0:
            return []
        ratio = run.timed_s / (interval * run.timed_cycles_s)
        if abs(ratio - 1) < 0.15:
            return []
        return [
            f"{CONTRADICTION}by time stamps a cycle takes {ratio:.2f} times batch x length / throughput"
            f" (one line every {interval} cycles): throughput or length is not what it seems"
        ]


def _sglang_point(
    batch: int, graph: bool | None, group: _Group, speculates: bool, draft_tokens: int | None
) -> tuple[Point, list[str]]:
    lengths = group.lengths or group.all_lengths
    length = sum(lengths) / len(lengths) if lengths else None if speculates else 1.0
    rounding = 0.005 / length if length and speculates else 0.0
    if group.rates:
        rounding += 0.005 / max(min(group.rates), 0.005)
    what = "batch x accept length / gen throughput" if speculates else "batch / gen throughput"
    time = quantity(group.cycles, f"median over steady intervals of {what}", min(rounding, 1.0))
    notes = [] if group.cycles else ["no steady interval at this batch: acceptance and graph flag only, no time"]
    problem = check_length(length, draft_tokens) if length is not None else None
    return Point(
        batch=batch,
        context=round(sum(group.contexts) / len(group.contexts)) if group.contexts else None,
        tokens_per_cycle=length,
        cycle_ms=time if speculates else None,
        decode_ms=None if speculates else time,
        tokens_per_s=quantity(group.rates, "gen throughput of steady intervals"),
        cuda_graph=graph,
        notes=notes,
        raw={"lines": group.lines, "steady_intervals": len(group.cycles)},
    ), [problem] if problem else []


def _admission(run: _SglangRun) -> list[str]:
    if run.decode_lines < 5 or not run.at_cap:
        return []
    batch, waiting = max(run.at_cap.items(), key=lambda kv: kv[1])
    if batch < max(b for b, _, _ in run.groups) or waiting < 0.5 * run.decode_lines:
        return []
    run.environment["admission_limited_at"] = batch
    return [
        f"admission-limited: #running-req is {batch} while requests wait, in {waiting} of {run.decode_lines} lines;"
        " throughput is capped by how many are admitted (--max-running-requests, whose default speculation lowers), not"
        " by the speed of a cycle"
    ]


def _graphs(run: _SglangRun) -> list[str]:
    eager = sorted({b for b, g, _ in run.groups if g is False})
    graph = sorted({b for b, g, _ in run.groups if g is True})
    if not eager:
        return []
    out = f"steps ran without a CUDA graph at batch {', '.join(map(str, eager[:12]))}"
    return [out + (f" and with one at batch {', '.join(map(str, graph[:12]))}" if graph else " and never with one")]


def _when(stamp: str) -> datetime | None:
    try:
        return datetime.fromisoformat(stamp)
    except ValueError:
        return None


def _from_words(words: list[str]) -> dict[str, Any]:
    """Launch words as settings: `--tp 8 --disable-cuda-graph` gives {"tp_size": "8", "disable_cuda_graph": True}."""
    out: dict[str, Any] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, mark, value = word[2:].partition("=")
            after = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("-") else True
            name = {"tp": "tp_size", "dp": "dp_size", "ep": "ep_size"}.get(name, name)
            out[name.replace("-", "_")] = value if mark else after
    return out


def server_info_record(source: Source, info: Mapping[str, Any], place: str = "") -> list[Record]:
    """SGLang's `/get_server_info`: settings, accept length since the start, step times when they were recorded."""
    flags = to_flags(info)
    d = whole(_as_number(flag_value(flags, "--speculative-num-draft-tokens")))
    states = info.get("internal_states")
    ranks = [s for s in states if isinstance(s, dict)] if isinstance(states, list) else [dict(info)]
    lengths = [v for s in ranks if (v := positive(s.get("avg_spec_accept_length"))) is not None]
    rates = [v for s in ranks if (v := positive(s.get("last_gen_throughput"))) is not None]
    speculates = bool(lengths) or bool(info.get("speculative_algorithm"))
    method, caveats, points = [], [], []
    length = sum(lengths) / len(lengths) if lengths else None
    if length is not None:
        method.append(
            f"accept length: avg_spec_accept_length since the start, mean of {len(lengths)} ranks, bonus token included"
        )
        if problem := check_length(length, d):
            caveats.append(problem)
        if max(lengths) > 1.15 * min(lengths):
            caveats.append(f"accept length differs between ranks: {min(lengths):.2f} to {max(lengths):.2f}")
    steps: dict[int, list[float]] = {}
    for rank in ranks:
        times = rank.get("step_time_dict", info.get("step_time_dict"))
        for key, values in times.items() if isinstance(times, dict) else ():
            batch = whole(_as_number(key))
            if batch and isinstance(values, list):
                steps.setdefault(batch, []).extend(v for v in (positive(x) for x in values[:100000]) if v)
    for batch, seconds in sorted(steps.items()):
        if seconds:
            low = sorted(seconds)[len(seconds) // 5]
            time = measured(
                1000 * low,
                "20th percentile of the server's step times (prefills and idle time lengthen some)",
                len(seconds),
            )
            points.append(
                Point(
                    batch=batch,
                    tokens_per_cycle=length if speculates else 1.0,
                    cycle_ms=time if speculates else None,
                    decode_ms=None if speculates else time,
                )
            )
    if not points:
        last = f"last_gen_throughput, sum of {len(rates)} ranks, at an unknown batch"
        points = [Point(tokens_per_cycle=length, tokens_per_s=measured(sum(rates) if rates else None, last))]
    state = ranks[0] if ranks else {}
    environment = {
        "max_running_requests": state.get("effective_max_running_requests_per_dp", info.get("max_running_requests")),
        "memory_usage_gb": state.get("memory_usage"),
        "max_total_num_tokens": info.get("max_total_num_tokens"),
    }
    version = version_text(info.get("version")) or version_text(state.get("version"))
    return [
        make_record(
            source,
            title("SGLang server info", place),
            EngineRun(name="sglang", version=version, flags=flags),
            points=points,
            method=method,
            caveats=caveats,
            environment=scrub({k: v for k, v in environment.items() if v is not None}),
        )
    ]


def _as_number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError, OverflowError):
        return None
