"""Runs of SGLang's bench_serving and of vllm bench serve, as JSON or as the table that they print.

Inter-token latency is not one thing. SGLang's bench_serving divides a chunk's time by the tokens in it (per token, so
it equals TPOT); vLLM's counts chunks (TPOT x accept length with speculation). The ratio of ITL to TPOT tells which one a
file holds, whatever its keys.

    decode step without speculation = TPOT;     cycle = TPOT x accept length = chunk latency
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.observe_checks import (
    CONTRADICTION,
    check_length,
    iso_date,
    make_record,
    measured,
    number,
    numbers_of,
    parse_number,
    positive,
    read_positions,
    title,
    version_text,
    whole,
)
from specsim.observe_read import Source, to_flags
from specsim.records import EngineRun, Point, Record
from specsim.redaction import scrub

_KEPT = (
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "output_throughput",
    "max_output_tokens_per_s",
    "concurrency",
    "max_concurrency",
    "mean_e2e_latency_ms",
    "mean_ttft_ms",
    "median_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "accept_length",
    "spec_decode_acceptance_rate",
    "spec_decode_num_drafts",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_tokens",
)


def bench_record(source: Source, row: Mapping[str, Any], place: str) -> list[Record]:
    """A run of SGLang's bench_serving or of vllm bench serve (JSON object, or console table under the same names)."""
    sglang = (
        "accept_length" in row or "total_output_tokens_retokenized" in row or "sglang" in str(row.get("backend", ""))
    )
    run = dict(row)
    method: list[str] = []
    caveats: list[str] = []
    if "median_tpot" in run and "median_tpot_ms" not in run:
        method.append("median_tpot, median_ttft without a unit are seconds")
        for key in (
            "mean_tpot",
            "median_tpot",
            "mean_ttft",
            "median_ttft",
            "mean_itl",
            "median_itl",
            "mean_e2el",
            "median_e2el",
        ):
            if (seconds := number(run.get(key))) is not None:
                run[f"{key}_ms"] = 1000 * seconds
    info = run.get("server_info")
    settings = info if isinstance(info, dict) else {}
    flags = to_flags(settings)
    length, rates = _acceptance(run, method, caveats)
    tpot = positive(run.get("mean_tpot_ms")) or positive(run.get("median_tpot_ms"))
    itl = positive(run.get("mean_itl_ms")) or (
        positive(run.get("median_itl_ms")) if not positive(run.get("mean_tpot_ms")) else None
    )
    chunk = _latency(tpot, itl, length, sglang, method, caveats)
    point = Point(
        batch=_batch(run, method),
        context=_context(run),
        tokens_per_cycle=length,
        accept_rate_by_position=rates,
        tokens_per_s=measured(
            positive(run.get("output_throughput")), "output throughput over the whole run, prefill included"
        ),
        raw=numbers_of(run, _KEPT),
    )
    if tpot and length and length > 1:
        point.cycle_ms = measured(
            tpot * length, "mean time per output token x accept length; prefills of others included"
        )
    elif chunk and not length:
        point.cycle_ms = measured(chunk, "mean time between chunks; one chunk a cycle")
        point.tokens_per_cycle = chunk / tpot if tpot else None
    elif tpot and _plain(run, settings, itl, tpot, sglang):
        point.tokens_per_cycle = 1.0
        point.decode_ms = measured(tpot, "mean time per output token; prefills of others included")
        method.append("no accept length is given, so taken as a run without speculation")
    elif tpot:
        point.notes.append("time per output token is known, but not whether speculation was on: no step time")
    caveats += _throughput_checks(run, tpot)
    engine = EngineRun(name="sglang" if sglang else "vllm", version=version_text(settings.get("version")), flags=flags)
    name = title("SGLang bench_serving" if sglang else "vLLM bench serve", place)
    return [
        make_record(
            source,
            name,
            engine,
            points=[point],
            method=method,
            caveats=caveats,
            environment=_environment(run),
            date=iso_date(run.get("date")),
        )
    ]


def _environment(run: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("model_id", "backend", "dataset_name", "tag", "date", "request_rate", "label")
    out = {k: v for k in keys if isinstance(v := run.get(k), (str, int, float)) and v == v}
    return scrub({k: ("inf" if v == float("inf") else v) for k, v in out.items()})  # type: ignore[no-any-return]


def _acceptance(
    run: Mapping[str, Any], method: list[str], caveats: list[str]
) -> tuple[float | None, list[float] | None]:
    """Accept length with the bonus token, and conditional rates per position."""
    length = positive(run.get("accept_length"))
    if length is not None:
        method.append(
            "accept length: the server's average since its start (not of this run alone), bonus token included"
        )
    else:
        length = positive(run.get("spec_decode_acceptance_length"))
        if length is not None:
            method.append("accept length: accepted / drafts + 1 over the run, bonus token included")
    drafts, drafted = positive(run.get("spec_decode_num_drafts")), positive(run.get("spec_decode_draft_tokens"))
    accepted = number(run.get("spec_decode_accepted_tokens"))
    k = drafted / drafts if drafts and drafted else None
    if drafts and accepted is not None:
        counted = 1 + accepted / drafts
        if length is not None and abs(counted - length) > 0.02 * counted:
            caveats.append(
                f"{CONTRADICTION}1 + accepted / drafts = {counted:.2f} but the length is {length:.2f}; counters used"
            )
        length = counted
        if drafted and accepted == 0:
            caveats.append("no drafted token was accepted: speculation is broken, not weak")
    rate = number(run.get("spec_decode_acceptance_rate"))
    if rate is not None and drafted and accepted is not None:
        share = accepted / drafted
        if abs(rate / 100 - share) <= 0.01:
            method.append("acceptance rate is percent of drafted tokens")
        elif abs(rate - share) <= 0.01:
            method.append("acceptance rate is a fraction of drafted tokens")
        else:
            caveats.append(
                f"{CONTRADICTION}acceptance rate {rate:g} is not accepted / drafted = {share:.4f}, nor its percentage"
            )
    if length is not None:
        if problem := check_length(length, round(k) + 1 if k else None):
            caveats.append(problem)
        if length < 1:
            return None, None
    given = run.get("spec_decode_per_position_acceptance_rates")
    positions = [p for p in (number(x) for x in given) if p is not None] if isinstance(given, list) else []
    if positions and max(positions) > 1:
        positions = [p / 100 for p in positions]
        method.append("per-position rates above 1 are percent")
    if not positions or length is None:
        return length, None
    if k is not None and len(positions) < round(k):
        method.append(
            f"{len(positions)} of {round(k)} positions are given; they are stored, the identity was not checked"
        )
        return length, None
    read = read_positions(length, positions)
    (caveats if read.message.startswith(CONTRADICTION) else method).append(read.message)
    return length, read.rates


def _latency(
    tpot: float | None, itl: float | None, length: float | None, sglang: bool, method: list[str], caveats: list[str]
) -> float | None:
    """Say whether ITL is per token or per chunk. Gives the chunk latency (ms) when it alone tells a length above 1."""
    if not tpot or not itl:
        return None
    ratio = itl / tpot
    expected = length or 1.0
    if expected > 1.15 and abs(ratio / expected - 1) < 0.15:
        method.append(f"ITL is per chunk: ITL / TPOT = {ratio:.2f}, the accept length")
        if sglang:
            caveats.append("this file's ITL is per chunk, as in early releases of SGLang's bench_serving")
    elif abs(ratio - 1) < 0.15:
        method.append(f"ITL is per token: ITL / TPOT = {ratio:.2f}")
    elif length is None and ratio > 1.15 and not sglang:
        method.append(f"ITL is per chunk: ITL / TPOT = {ratio:.2f} tokens a chunk, taken as the accept length")
        return itl
    elif expected > 1.15:
        caveats.append(
            f"{CONTRADICTION}ITL / TPOT = {ratio:.2f} is neither 1 (per token) nor {expected:.2f} (per chunk)"
        )
    return None


def _plain(run: Mapping[str, Any], settings: Mapping[str, Any], itl: float | None, tpot: float, sglang: bool) -> bool:
    if settings.get("speculative_algorithm") or settings.get("speculative_config"):
        return False
    if sglang:
        return "accept_length" in run or ("mean_tpot_ms" in run and "max_output_tokens_per_s" in run)
    return itl is not None and abs(itl / tpot - 1) < 0.15


def _batch(run: Mapping[str, Any], method: list[str]) -> int | None:
    limit, mean = positive(run.get("max_concurrency")), positive(run.get("concurrency"))
    if mean is None and (latency := positive(run.get("mean_e2e_latency_ms")) or positive(run.get("mean_e2el_ms"))):
        done, duration = positive(run.get("completed")), positive(run.get("duration"))
        mean = latency / 1000 * done / duration if done and duration else None
    at_once = limit is None and run.get("request_rate") in ("inf", float("inf"))
    if (mean is None and limit is None) or at_once:  # all requests at once: the engine chooses the batch
        return None
    batch = limit if limit and (mean is None or mean > 0.9 * limit) else mean
    method.append("batch: the client's concurrency, an upper bound of the server's decode batch")
    return max(1, whole(batch) or 1)


def _context(run: Mapping[str, Any]) -> int | None:
    """Mean input plus half of the mean output."""
    done, given, made = (
        positive(run.get("completed")),
        number(run.get("total_input_tokens")),
        number(run.get("total_output_tokens")),
    )
    return whole((given + made / 2) / done) if done and given is not None and made is not None else None


def _throughput_checks(run: Mapping[str, Any], tpot: float | None) -> list[str]:
    found = []
    rate, peak = positive(run.get("output_throughput")), positive(run.get("max_output_tokens_per_s"))
    if rate and peak and peak < rate:
        found.append(
            f"{CONTRADICTION}peak throughput {peak:g} tok/s is below the mean {rate:g}: it counts chunks, not tokens"
        )
    duration, made = positive(run.get("duration")), positive(run.get("total_output_tokens"))
    if rate and duration and made and abs(made / duration / rate - 1) > 0.05:
        found.append(f"{CONTRADICTION}{made:g} tokens in {duration:g} s are {made / duration:.1f} tok/s, not {rate:g}")
    running = positive(run.get("concurrency")) or positive(run.get("max_concurrency"))
    if rate and tpot and running and rate * tpot / 1000 > 1.1 * running:
        found.append(
            f"{CONTRADICTION}throughput x time per token = {rate * tpot / 1000:.1f} requests, above the {running:g} at once"
        )
    return found


_CONSOLE = {
    "backend": "backend",
    "max request concurrency": "max_concurrency",
    "maximum request concurrency": "max_concurrency",
    "traffic request rate": "request_rate",
    "successful requests": "completed",
    "benchmark duration (s)": "duration",
    "total input tokens": "total_input_tokens",
    "total generated tokens": "total_output_tokens",
    "output token throughput (tok/s)": "output_throughput",
    "peak output token throughput (tok/s)": "max_output_tokens_per_s",
    "concurrency": "concurrency",
    "accept length": "accept_length",
    "mean e2e latency (ms)": "mean_e2e_latency_ms",
    "mean e2el (ms)": "mean_e2el_ms",
    "mean ttft (ms)": "mean_ttft_ms",
    "median ttft (ms)": "median_ttft_ms",
    "mean tpot (ms)": "mean_tpot_ms",
    "median tpot (ms)": "median_tpot_ms",
    "mean itl (ms)": "mean_itl_ms",
    "median itl (ms)": "median_itl_ms",
    "acceptance rate (%)": "spec_decode_acceptance_rate",
    "acceptance length": "spec_decode_acceptance_length",
    "drafts": "spec_decode_num_drafts",
    "draft tokens": "spec_decode_draft_tokens",
    "accepted tokens": "spec_decode_accepted_tokens",
}


class ConsoleBench:
    """The `Serving Benchmark Result` table that SGLang's and vLLM's benchmarks print."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.block: dict[str, Any] | None = None
        self.began = 0
        self.found: list[Record] = []

    def feed(self, number: int, line: str) -> bool:
        """Take the lines of a table, from its title to its closing rule."""
        if "Serving Benchmark Result" in line:
            self._close(cut=True)
            self.block, self.began = {}, number
            return True
        if self.block is None:
            return False
        text = line.strip()
        if len(text) >= 10 and set(text) == {"="}:
            self._close(cut=False)
            return True
        key, mark, value = text.rpartition(":")
        if not mark:
            return text.startswith("-")
        key, value = key.strip().lower(), value.strip()
        if key.startswith("position ") and (rate := parse_number(value)) is not None:
            self.block.setdefault("spec_decode_per_position_acceptance_rates", []).append(rate / 100)
            return True
        if key in _CONSOLE:
            number_ = parse_number(value)
            self.block[_CONSOLE[key]] = value if number_ is None else number_
        return True

    def _close(self, cut: bool) -> None:
        if self.block:
            if cut:
                self.source.note(
                    f"line {self.began}: the table that begins here has no closing rule; it may be cut off"
                )
            self.found += bench_record(self.source, self.block, f"line {self.began}")
        self.block = None

    def records(self) -> list[Record]:
        """One record a table."""
        self._close(cut=True)
        return self.found
