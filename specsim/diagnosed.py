"""A diagnosis asked for by options: `specsim diagnose`, and `specsim.diagnose` in Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

from specsim.asked import NAMES, beside, check_fields, check_numbers, overruled, scenario_of
from specsim.diagnosis import Diagnosis, elsewhere
from specsim.diagnosis import diagnose as weigh
from specsim.errors import InputError, did_you_mean
from specsim.evidence import Evidence, launch_options, read
from specsim.experiments import candidates
from specsim.names import flag_of
from specsim.observations import contradictions, observe
from specsim.probes import Observation, Probe
from specsim.records import Record
from specsim.scenarios import Scenario, build

HEALTHY_FIELD = "8x-rtx-pro-6000"  # the field case's box before its all-reduce was inferred from these very step times
MIXED = 0.1  # relative error of a throughput at several requests as a step time: prefills and gaps are in it
YES, NO = ("yes", "true", "1", "on"), ("no", "false", "0", "off")
Times = Mapping[int, float] | Iterable[tuple[int, float]]


@dataclass(frozen=True)
class Given:
    """What was observed, as the options of `specsim diagnose` have it.

    decode_ms, verify_ms, cycle_ms: one step. decode_tokens_per_s, tokens_per_s: over the batch, without and with speculation.
    decode_at, verify_at: ms by batch, where it is another one. results: outcomes of proposed tests, such as
    "graph-flag=yes". noise: relative error of the times.
    """

    decode_ms: float | None = None
    verify_ms: float | None = None
    cycle_ms: float | None = None
    decode_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    decode_at: Times = ()
    verify_at: Times = ()
    results: tuple[str, ...] = ()
    noise: float = 0.05

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("decode_at", "verify_at"):
            try:
                pairs = tuple((batch, ms) for batch, ms in _pairs(getattr(self, name)))
            except (TypeError, ValueError):
                where = flag_of(name)
                raise InputError("is no times by batch", where=where, mend="such as {4: 15.5}") from None
            check_numbers(name, (number for pair in pairs for number in pair))
            object.__setattr__(self, name, pairs)
        if isinstance(self.results, str) or not isinstance(self.results, Sequence):
            raise InputError(f"{self.results!r} is no list", where="--result", mend='such as ["graph-flag=yes"]')
        for name in ("decode_ms", "verify_ms", "cycle_ms", "decode_tokens_per_s", "tokens_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e7:
                where = flag_of(name)
                raise InputError(f"{value:g} is out of range", where=where, mend="give a number above 0")
        if not 0.001 <= self.noise <= 1:
            raise InputError(f"{self.noise:g} is out of range", where="--noise", mend="give 0.001 to 1; 0.05 is 5 %")


def diagnose(*sources: str, seed: int = 0, **options: Any) -> Diagnosis:
    """Say why a verify is slow: the options of `specsim diagnose`, with underscores.

        >>> d = diagnose(decode_ms=12.1, verify_ms=29.5, draft_tokens=3)
        >>> sorted(h.fault.id for h in d.hypotheses[:2]), d.separable
        (['allreduce-steep', 'verify-eager'], False)

    sources: files and addresses that `specsim.observe` reads. Observed times, in ms, are the fields of `Given`; all other options are
    those of `specsim.scenario`, where acceptance is what was observed. Raises InputError.
    """
    names = {field.name for field in fields(Given)}
    asked = {name: value for name, value in options.items() if name not in names}
    for name in asked:
        if name not in NAMES:
            raise InputError(f"no option {name!r}", mend=did_you_mean(name, sorted({*NAMES, *names})))
    given = Given(**{name: value for name, value in options.items() if name in names and value is not None})
    records = [record for source in sources for record in observe(source)]
    engines = [r.engine.name for r in records if r.engine is not None]
    engine = next((name for name in engines if name != "other"), "other" if engines else "sglang")
    scenario, observations, facts, warnings = _inputs(records, given, asked)
    if engine == "other" and scenario is not None:
        warnings.append(
            f"the engine of the files is not modelled: times are judged as if it were {scenario.engine.name}"
        )
    facts += [f for f in contradictions(records) if f not in facts]
    return weigh(scenario, observations, facts=facts, warnings=warnings, engine=engine, seed=seed)


def _pairs(times: Times) -> Iterable[tuple[int, float]]:
    return times.items() if isinstance(times, Mapping) else times


def _inputs(
    records: list[Record], given: Given, options: dict[str, Any]
) -> tuple[Scenario | None, list[Observation], list[str], list[str]]:
    """Scenario, observations, facts and warnings of records and options together; options win."""
    evidence = read(records, options.get("draft_tokens")) if records else Evidence()
    scenario, warnings = _scenario(evidence, options, bool(records))
    if scenario is not None and records:
        evidence = read(records, int(scenario.draft_tokens.max()), scenario.parallel.tp)
    observations = _given(given, scenario)
    if scenario is None and any(not o.probe.binary for o in observations):
        raise InputError(
            "a time says nothing without model and hardware", where="--model and --hardware", mend=warnings[0]
        )
    kept = [o for o in evidence.observations if scenario is not None or o.probe.binary]
    said = {(o.probe.kind, o.probe.batch, o.probe.tokens, o.probe.name, o.probe.size) for o in observations}
    kept = [o for o in kept if (o.probe.kind, o.probe.batch, o.probe.tokens, o.probe.name, o.probe.size) not in said]
    if scenario is not None and scenario.method == "none":
        kept = [o for o in kept if o.probe.kind not in ("verify", "cycle", "component")]
    if not records and not observations:
        raise InputError("nothing was observed", where="diagnose", mend="give --decode-ms and --verify-ms, or a log; see --help")  # fmt: skip
    return scenario, observations + kept, list(evidence.facts), warnings + _contradicting(observations)


def _contradicting(given: Sequence[Observation]) -> list[str]:
    """What is to be said of step times of one server that cannot both be, by more than their noise explains."""
    found = []
    for a, b in combinations((o for o in given if o.probe.kind in ("decode", "verify", "cycle")), 2):
        far = 1 + 3 * (a.probe.noise + b.probe.noise)
        if (a.probe.kind, a.probe.batch) == (b.probe.kind, b.probe.batch) and not 1 / far <= a.value / b.value <= far:
            found.append(
                f"a {a.probe.kind} at batch {a.probe.batch} is given as {a.value:g} and as {b.value:g} ms:"
                " one of them is of another server, or of another moment"
            )
        if (
            (a.probe.kind, b.probe.kind) == ("verify", "cycle")
            and a.probe.batch == b.probe.batch
            and a.value > far * b.value
        ):
            found.append(
                f"a verify of {a.value:g} ms is longer than the cycle of {b.value:g} ms that holds it: are both of one server?"
            )
    return found


def _scenario(evidence: Evidence, options: dict[str, Any], files: bool) -> tuple[Scenario | None, list[str]]:
    """The scenario of options and launch settings; None when files tell no model that is known, or no hardware."""
    chosen = {k: v for k, v in options.items() if v is not None and v != ()}
    if not files or chosen.get("sglang_args") or chosen.get("vllm_args"):
        if "hardware" not in chosen and not (chosen.get("sglang_args") or chosen.get("vllm_args")):
            options = {**options, "hardware": HEALTHY_FIELD}
        made = scenario_of(options)
        assumed = (
            ()
            if "hardware" in chosen or "model" not in chosen
            else (f"no --hardware given: the box is {HEALTHY_FIELD}",)
        )
        return made, [*assumed, *_fitted(made)]
    settings, notes = launch_options(evidence.speculating)
    notes = (*notes, *overruled({k: v for k, v in settings.items() if k != "hardware"}, chosen))
    merged = beside(settings, chosen)
    for name, value in (("batch", evidence.batch), ("context", evidence.context)):
        if value and name not in merged:
            merged[name] = value
    if "model" not in merged or "hardware" not in merged:
        missing = [f"--{n}" for n in ("model", "hardware") if n not in merged]
        if missing == ["--hardware"] and evidence.cycle_ms is not None:
            evidence.facts += elsewhere(merged)
        return None, [f"times are not judged without {' and '.join(missing)}", *notes]
    if evidence.accept_length is not None and not any(k.startswith("accept") for k in merged):
        merged["accept_length"] = evidence.accept_length
    s, problem = _built(merged, chosen)
    if s is None:
        return None, [f"times are not judged: {problem}", *notes]
    return replace(s, warnings=()), [*([problem] if problem else []), *notes, *s.warnings, *_fitted(s)]


def _built(merged: dict[str, Any], chosen: dict[str, Any]) -> tuple[Scenario | None, str]:
    """The scenario of launch settings; without their draft when that is not known. What the user chose must be right."""
    try:
        return build(**merged), ""
    except InputError as first:
        if "draft" in merged and "draft" not in chosen:
            without = {k: v for k, v in merged.items() if k != "draft"}
            try:
                return build(**without), f"{str(first).split(';')[0]}: the target's public draft stands in"
            except InputError:
                pass
        if merged.get("model") == chosen.get("model"):
            raise
        return None, str(first)


def _fitted(s: Scenario) -> list[str]:
    """Said when the hardware profile already contains an explanation of what is to be explained."""
    if any("inferred" in c for c in s.profile.caveats):
        return [f"{s.profile.name} was inferred from step times: it already contains one explanation of them. Take the healthy box, --hardware {HEALTHY_FIELD}"]  # fmt: skip
    return []


def _given(given: Given, s: Scenario | None) -> list[Observation]:
    """Observations of the options."""
    noise = given.noise
    batch = 1 if s is None else int(s.batch.max())
    tokens = 1 if s is None else int(s.draft_tokens.max())
    out: list[Observation] = []

    def add(kind: str, value: float, at: int = batch, d: int = 1, noise: float = noise) -> None:
        out.append(Observation(Probe(kind, batch=at, tokens=d, noise=noise), value))

    mixed = noise if batch == 1 else max(noise, MIXED)

    if given.decode_ms is not None and given.decode_tokens_per_s is not None:
        raise InputError("the decode step is stated twice", where="--decode-ms and --decode-tokens-per-s", mend="give one of them")  # fmt: skip
    if given.decode_ms is not None:
        add("decode", given.decode_ms)
    if given.decode_tokens_per_s is not None:
        add("decode", 1e3 * batch / given.decode_tokens_per_s, noise=mixed)
    for at, ms in _pairs(given.decode_at):
        add("decode", ms, at)
    speculative = given.verify_ms or given.cycle_ms or given.tokens_per_s or given.verify_at
    if speculative and s is not None and s.method == "none":
        raise InputError("the scenario does not speculate", where="--verify-ms, --cycle-ms, --tokens-per-s, --verify-at", mend="leave them out, or give --method")  # fmt: skip
    if given.verify_ms is not None:
        add("verify", given.verify_ms, d=tokens)
    for at, ms in _pairs(given.verify_at):
        add("verify", ms, at, tokens)
    if given.cycle_ms is not None:
        add("cycle", given.cycle_ms, d=tokens)
    if given.tokens_per_s is not None:
        if s is None or s.accept_length is None:
            raise InputError("needs an acceptance", where="--tokens-per-s", mend="give --accept-length as observed, bonus token included")  # fmt: skip
        add("rate", given.tokens_per_s, d=tokens, noise=mixed)
    for text in given.results:
        out += _result(text, s)
    return out


def _result(text: str, s: Scenario | None) -> list[Observation]:
    name, mark, rest = text.partition("=")
    tests = {t.id: t for t in candidates(s)}
    if name not in tests:
        raise InputError(f"no test {name!r}", where="--result", mend=did_you_mean(name, list(tests)))
    probes = tests[name].probes
    values = rest.split(",") if mark else []
    if len(values) != len(probes):
        raise InputError(f"{name} gives {len(probes)} value{'s' if len(probes) > 1 else ''}", where=f"--result {text}", mend=tests[name].tell)  # fmt: skip
    out = []
    for probe, value in zip(probes, values, strict=True):
        word = value.strip().lower()
        if probe.binary:
            if word not in YES + NO:
                raise InputError(f"{value!r} is neither yes nor no", where=f"--result {text}", mend="give yes or no")
            out.append(Observation(probe, float(word in YES)))
            continue
        try:
            number = float(word)
        except ValueError:
            number = -1.0
        if not 0 <= number < 1e7 or (number == 0 and probe.kind != "component"):
            raise InputError(f"{value!r} is not a number above 0", where=f"--result {text}", mend=tests[name].tell)
        out.append(Observation(probe, number))
    return out
