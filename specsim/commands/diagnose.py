"""specsim diagnose"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import draw, json_option, note, plot_option, print_result, show
from specsim.commands.scenario import COUNT, scenario_options, without_defaults

if TYPE_CHECKING:
    from specsim.evidence import Evidence
    from specsim.probes import Observation
    from specsim.records import Record
    from specsim.scenarios import Scenario

HEALTHY_FIELD = "8x-rtx-pro-6000"  # the field case's box before its all-reduce was inferred from these very step times
MIXED = 0.1  # relative error of a throughput at several requests as a step time: prefills and gaps are in it
YES, NO = ("yes", "true", "1", "on"), ("no", "false", "0", "off")


class At(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """BATCH=MS."""

    name = "batch=ms"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        batch, mark, ms = str(value).partition("=")
        try:
            found = COUNT.convert(batch, param, ctx), float(ms)
        except ValueError:
            self.fail(f"{value!r} is not BATCH=MS; for example 3=15.5", param, ctx)
        if not mark or found[0] < 1 or not 0 < found[1] < 1e7:
            self.fail(f"{value!r}: give a batch of 1 or more and a time above 0; for example 3=15.5", param, ctx)
        return found


@click.command()
@click.argument("sources", nargs=-1, metavar="[FILE|URL...]")
@click.option("--decode-ms", type=float, metavar="MS", help="One plain decode step, without speculation.")
@click.option("--verify-ms", type=float, metavar="MS", help="One verify of the target.")
@click.option("--cycle-ms", type=float, metavar="MS", help="One whole speculative cycle.")
@click.option(
    "--decode-tokens-per-s",
    type=float,
    metavar="X",
    help="Instead of --decode-ms: all tokens a second without speculation.",
)
@click.option(
    "--tokens-per-s",
    type=float,
    metavar="X",
    help="All tokens a second with speculation; with an acceptance it gives the cycle.",
)
@click.option("--decode-at", type=At(), multiple=True, help="A plain decode step at another batch; repeatable.")
@click.option("--verify-at", type=At(), multiple=True, help="A verify at another batch; repeatable.")
@click.option(
    "--result",
    "results",
    multiple=True,
    metavar="TEST=VALUE,...",
    help="The outcome of a test that diagnose proposed; repeatable.",
)
@click.option("--noise", type=float, default=0.05, show_default=True, help="Relative error of the step times given.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the Monte Carlo samples.")
@plot_option("the weights of the explanations, and decode and verify by component under each")
@scenario_options
@json_option
def command(sources: tuple[str, ...], as_json: bool, plot: Path | None, seed: int, **options: Any) -> None:
    """Say why a verify is slow: explanations weighed, the next test, what cannot help, what each remedy would give.

    Give step times, files or addresses that `specsim observe` reads, or both. A log fills in model, engine flags, batch
    and accept length; give --hardware so that times can be judged. Acceptance options mean what was observed. With no
    scenario option and no file the scenario is the field case on a healthy box.

    \b
    Examples:
      specsim diagnose --decode-ms 12.1 --verify-ms 29.5 --draft-tokens 3
      specsim diagnose --decode-ms 12.1 --verify-ms 29.5 --draft-tokens 3 \\
        --decode-at 3=15.5
      specsim diagnose server.log --hardware 8x-h100
      specsim diagnose --decode-tokens-per-s 200 --tokens-per-s 150 \\
        --accept-length 1.9 --draft-tokens 4 --model Qwen3-30B-A3B \\
        --hardware 8x-h100 --tp 2
    """  # fmt: skip
    from specsim.diagnose_text import explained
    from specsim.diagnosis import diagnose
    from specsim.observations import contradictions, observe

    def wanted(name: str) -> bool:
        """A team's acceptance was not observed here, and files know better than defaults what the server ran."""
        return name == "hardware" if sources else not name.startswith("accept_")

    options = without_defaults(options, wanted)
    records: list[Record] = [r for source in sources for r in observe(source)]
    names = [r.engine.name for r in records if r.engine is not None]
    engine = next((name for name in names if name != "other"), "other" if names else "sglang")
    scenario, observations, facts, warnings = _inputs(records, options)
    if engine == "other" and scenario is not None:
        warnings.append(
            f"the engine of the files is not modelled: times are judged as if it were {scenario.engine.name}"
        )
    facts += [f for f in contradictions(records) if f not in facts]
    d = diagnose(scenario, observations, facts=facts, warnings=warnings, engine=engine, seed=seed)
    if plot is not None:
        draw(d.json(), plot, components=explained(d))
    if as_json:
        print_result(d.json())
        for warning in d.warnings:
            note(f"warning: {warning}")
        return
    show(d.page())


def _inputs(
    records: list[Record], options: dict[str, Any]
) -> tuple[Scenario | None, list[Observation], list[str], list[str]]:
    """Scenario, observations, facts and warnings of records and options together; options win."""
    from specsim.errors import InputError
    from specsim.evidence import Evidence, read

    given = {k: options.pop(k) for k in ("decode_ms", "verify_ms", "cycle_ms", "decode_tokens_per_s", "tokens_per_s",
                                         "decode_at", "verify_at", "results", "noise")}  # fmt: skip
    for name in ("decode_ms", "verify_ms", "cycle_ms", "decode_tokens_per_s", "tokens_per_s"):
        value = given[name]
        if value is not None and not 0 < value < 1e7:
            raise InputError(f"{value:g} is out of range", where=_flag(name), mend="give a number above 0")
    if not 0.001 <= given["noise"] <= 1:
        raise InputError(f"{given['noise']:g} is out of range", where="--noise", mend="give 0.001 to 1; 0.05 is 5 %")
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
    return scenario, observations + kept, list(evidence.facts), warnings


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _scenario(evidence: Evidence, options: dict[str, Any], files: bool) -> tuple[Scenario | None, list[str]]:
    """The scenario of options and launch settings; None when files tell no model that is known, or no hardware."""
    from dataclasses import replace

    from specsim.commands.scenario import scenario_of
    from specsim.diagnosis import elsewhere
    from specsim.evidence import launch_options

    chosen = {k: v for k, v in options.items() if v is not None and v != ()}
    if not files or chosen.get("sglang_args") or chosen.get("vllm_args"):
        if "hardware" not in chosen and not (chosen.get("sglang_args") or chosen.get("vllm_args")):
            options = {**options, "hardware": HEALTHY_FIELD}
        given = scenario_of(options)
        assumed = (
            ()
            if "hardware" in chosen or "model" not in chosen
            else (f"no --hardware given: the box is {HEALTHY_FIELD}",)
        )
        return given, [*assumed, *_fitted(given)]
    settings, notes = launch_options(evidence.speculating)
    merged = {**settings, **chosen}
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
    from specsim.errors import InputError
    from specsim.scenarios import build

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


def _given(given: dict[str, Any], s: Scenario | None) -> list[Observation]:
    """Observations of the options."""
    from specsim.errors import InputError
    from specsim.probes import Observation, Probe

    noise = given["noise"]
    batch = 1 if s is None else int(s.batch.max())
    tokens = 1 if s is None else int(s.draft_tokens.max())
    out: list[Observation] = []

    def add(kind: str, value: float, at: int = batch, d: int = 1, noise: float = noise) -> None:
        out.append(Observation(Probe(kind, batch=at, tokens=d, noise=noise), value))

    mixed = noise if batch == 1 else max(noise, MIXED)

    if given["decode_ms"] is not None and given["decode_tokens_per_s"] is not None:
        raise InputError("the decode step is stated twice", where="--decode-ms and --decode-tokens-per-s", mend="give one of them")  # fmt: skip
    if given["decode_ms"] is not None:
        add("decode", given["decode_ms"])
    if given["decode_tokens_per_s"] is not None:
        add("decode", 1e3 * batch / given["decode_tokens_per_s"], noise=mixed)
    for at, ms in given["decode_at"]:
        add("decode", ms, at)
    speculative = given["verify_ms"] or given["cycle_ms"] or given["tokens_per_s"] or given["verify_at"]
    if speculative and s is not None and s.method == "none":
        raise InputError("the scenario does not speculate", where="--verify-ms, --cycle-ms, --tokens-per-s, --verify-at", mend="leave them out, or give --method")  # fmt: skip
    if given["verify_ms"] is not None:
        add("verify", given["verify_ms"], d=tokens)
    for at, ms in given["verify_at"]:
        add("verify", ms, at, tokens)
    if given["cycle_ms"] is not None:
        add("cycle", given["cycle_ms"], d=tokens)
    if given["tokens_per_s"] is not None:
        if s is None or s.accept_length is None:
            raise InputError("needs an acceptance", where="--tokens-per-s", mend="give --accept-length as observed, bonus token included")  # fmt: skip
        add("rate", given["tokens_per_s"], d=tokens, noise=mixed)
    for text in given["results"]:
        out += _result(text, s)
    return out


def _result(text: str, s: Scenario | None) -> list[Observation]:
    from specsim.errors import InputError, did_you_mean
    from specsim.experiments import candidates
    from specsim.probes import Observation

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
