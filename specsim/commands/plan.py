"""specsim plan"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import console, draw, json_option, note, plot_option, print_result
from specsim.commands.scenario import COUNT, options_of, scenario_of, scenario_options

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.plans import Choice, Plan
    from specsim.scenarios import Scenario
    from specsim.trace_stats import TraceStats

LISTS = ("hardware", "tp", "ep", "draft_tokens")
FIXED = ("batch", "context", "num_steps", "topk")  # what the load and the plan set
DRAFT_TOKENS = (2, 3, 4, 5, 6, 7, 8)
CONTEXTS = (1024, 4096, 16384, 65536)
INPUT, OUTPUT = 1024, 256
PLAIN = 300_000  # decode steps of a sequence: plain Python is done with them before a kernel is compiled


def lists_of_some(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the scenario options; those in `LISTS` take lists and ranges, and batch and context are not asked."""
    own = len(getattr(command, "__click_params__", []))
    wrapped = scenario_options(command)
    for option in wrapped.__click_params__[own:]:  # type: ignore[attr-defined]
        if option.name in LISTS:
            option.type, option.metavar = click.STRING, "LIST"
        option.hidden = option.name in FIXED
    return wrapped


@click.command()
@lists_of_some
@click.option("--rate", type=float, metavar="R", help="Requests a second, over all replicas.")
@click.option("--input-tokens", type=COUNT, help=f"Mean prompt tokens; default {INPUT:,}.")
@click.option("--output-tokens", type=COUNT, help=f"Mean tokens a request generates; default {OUTPUT:,}.")
@click.option(
    "--trace", type=Path, metavar="FILE", help="Take lengths, and the rate of the busiest minute, from a trace."
)
@click.option("--ttft-ms", type=float, help="Target: mean time to first token.")
@click.option("--tpot-ms", type=float, help="Target: mean time per output token.")
@click.option(
    "--speedup", type=float, default=1.5, metavar="X", help="Speedup to give drafters' targets for; default 1.5."
)
@click.option(
    "--hysteresis", type=float, default=0.03, metavar="F", help="Gain that a switch must bring; default 0.03."
)
@click.option("--headroom", type=float, default=0.1, metavar="F", help="Share by which the rate may grow; default 0.1.")
@click.option("--max-gpus", type=COUNT, metavar="N", help="GPUs there are.")
@click.option("--price-per-gpu-hour", type=float, metavar="P", help="Give the cost of a million output tokens.")
@click.option(
    "--policy", "policy_out", type=Path, metavar="FILE", help="Write when to switch, as --engine reads it (JSON)."
)
@click.option("--simulate", is_flag=True, help="Confirm the plan by simulating one replica.")
@click.option("--num-requests", type=COUNT, default=2000, help="Requests of the simulation; default 2,000.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the simulation; default 0.")
@plot_option("GPUs or cost of each choice, and what a drafter must reach")
@json_option
def command(as_json: bool, plot: Path | None, **options: Any) -> int:
    """How many GPUs a load takes, with which draft length, when to switch speculation off, which acceptance to train for.

    --hardware, --tp, --ep and --draft-tokens take lists and ranges; without acceptance only plain decoding is planned, and
    what a drafter must reach. Exit code 1 when nothing meets the targets.

    \b
    Examples:
      specsim plan --hardware 8x-rtx-pro-6000 --rate 2 --input-tokens 2000 \\
        --output-tokens 500 --tpot-ms 40 --accept-rate 0.6
      specsim plan --model Llama-3.1-8B --hardware 1x-h200 --rate 20 \\
        --ttft-ms 500 --tpot-ms 10 --accept-rate 0.6 --simulate
    """
    from specsim.plans import Targets
    from specsim.plans import plan as make
    from specsim.steady import Requests

    own = {k: options.pop(k) for k in (
        "rate", "input_tokens", "output_tokens", "trace", "ttft_ms", "tpot_ms", "speedup", "hysteresis", "headroom", "max_gpus",
        "price_per_gpu_hour", "policy_out", "simulate", "num_requests", "seed",
    )}  # fmt: skip
    rate, mean_input, mean_output, stats = _load(own)
    requests = Requests(mean_input, mean_output)
    makers, draft_tokens, notes = _scenarios(options)
    found = make(
        makers, rate, requests, Targets(own["ttft_ms"], own["tpot_ms"]), drafting=functools.partial(_drafting, options),
        headroom=own["headroom"], max_gpus=own["max_gpus"], draft_tokens=draft_tokens, speedup=own["speedup"],
        hysteresis=own["hysteresis"], contexts=CONTEXTS,
    )  # fmt: skip
    found = replace(found, warnings=(*notes, *found.warnings))
    if own["policy_out"] is not None:
        _write_policy(own["policy_out"], found)
    simulated = _simulate(found, own) if own["simulate"] else None
    document = _document(found, own, simulated, stats)
    draw(document, plot)
    if as_json:
        print_result(document)
        for warning in found.warnings:
            note(f"warning: {warning}")
    else:
        _show(found, own, simulated, stats)
    return 0 if found.met else 1


# --- from options ---------------------------------------------------------------------------------------------------


def _load(own: dict[str, Any]) -> tuple[float, float, float, TraceStats | None]:
    """(rate, mean input, mean output, what the trace says)."""
    from specsim.errors import InputError

    if own["trace"] is not None:
        from specsim.trace_stats import trace_stats

        for name in ("input_tokens", "output_tokens"):
            if own[name] is not None:
                option = "--" + name.replace("_", "-")
                raise InputError(f"a trace has its own; {option} contradicts it", where="--trace", mend=f"leave {option} out")  # fmt: skip
        stats = trace_stats(own["trace"])
        rate = stats.peak_rate if own["rate"] is None else own["rate"]
        return rate, stats.mean_input, stats.mean_output, stats
    if own["rate"] is None:
        raise InputError("no load", where="plan", mend="give --rate, or --trace")
    given, made = own["input_tokens"], own["output_tokens"]
    return own["rate"], float(INPUT if given is None else given), float(OUTPUT if made is None else made), None


def _scenarios(
    options: dict[str, Any],
) -> tuple[list[Callable[[], Scenario]], tuple[int, ...], tuple[str, ...]]:
    """What builds each choice (cuts of the boxes, by plain decoding and each draft length), the draft lengths, and notes."""
    from specsim.errors import InputError
    from specsim.ranges import whole_numbers, words
    from specsim.scenarios import build

    single = {k: v for k, v in options.items() if k not in LISTS and v is not None and v != ()}
    for name in FIXED:
        if name in single:
            raise InputError(
                "the load and --draft-tokens set it", where="--" + name.replace("_", "-"), mend="leave it out"
            )
    boxes = words(options["hardware"], "--hardware") if options.get("hardware") else (None,)
    groups = whole_numbers(options["ep"], "--ep") if options.get("ep") else (None,)
    lengths = whole_numbers(options["draft_tokens"], "--draft-tokens") if options.get("draft_tokens") else DRAFT_TOKENS
    if min(lengths) < 2:
        raise InputError(
            f"{min(lengths)} is below 2", where="--draft-tokens", mend="give 2 or more; off is always among the choices"
        )
    if "accept_length" in single and len(lengths) > 1:
        raise InputError("belongs to one draft length", where="--accept-length", mend="give that --draft-tokens, or --accept-rate")  # fmt: skip
    accepted = [k for k in single if k.startswith("accept_")]
    base, notes = options_of(single)
    base = {k: v for k, v in base.items() if k not in (*FIXED, "draft_tokens")}
    plain = {k: v for k, v in base.items() if k not in (*accepted, "draft")} | {"method": "none"}
    makers: list[Callable[[], Scenario]] = []
    for box in boxes:
        given = whole_numbers(options["tp"], "--tp") if options.get("tp") else None
        for tp, ep in product(_cuts(plain, box) if given is None else given, groups):
            cut = {k: v for k, v in (("hardware", box), ("tp", tp), ("ep", ep)) if v is not None}
            makers.append(functools.partial(build, **{**plain, **cut}))
            if accepted and base.get("method") != "none":
                makers += [
                    functools.partial(build, **{**base, **cut, "draft_tokens": d, "num_steps": d - 1, "topk": 1})
                    for d in lengths
                ]
    if len(makers) > 2000:
        raise InputError(f"{len(makers):,} choices", where="plan", mend="shorten the lists")
    return makers, lengths, notes


def _cuts(options: dict[str, Any], box: str | None) -> list[int | None]:
    """Every power of two of ranks on which the model fits a box, or the box's default."""
    from specsim.errors import InputError
    from specsim.memory import memory
    from specsim.scenarios import build

    if "flags" in options:  # a launch line says it
        return [None]
    whole = build(**{**options, **({"hardware": box} if box else {})})
    found: list[int | None] = []
    for tp in (2**i for i in range(11)):
        if tp <= whole.profile.gpus:
            try:
                s = build(**{**options, **({"hardware": box} if box else {}), "tp": tp})
            except InputError:
                continue
            if memory(s).fits:
                found.append(tp)
    return found or [None]


def _drafting(options: dict[str, Any], best: Scenario) -> Scenario:
    """The best choice's scenario with speculation, whatever its acceptance."""
    if best.method != "none":
        return best
    kept = {k: v for k, v in options.items() if k not in LISTS and not k.startswith("accept_") and v is not None}
    hardware = {"hardware": best.profile.name} if not options.get("hardware") else _box(options["hardware"], best)
    return scenario_of({**kept, **hardware, "tp": best.parallel.tp, "ep": best.parallel.ep})


def _box(listed: str, best: Scenario) -> dict[str, Any]:
    """The word of --hardware that names the best choice's box (a file has another name than its profile)."""
    from specsim.profiles import load_profile
    from specsim.ranges import words

    return {"hardware": next(w for w in words(listed, "--hardware") if load_profile(w).name == best.profile.name)}


def _write_policy(path: Path, found: Plan) -> None:
    import json

    from specsim.errors import InputError
    from specsim.files import write_atomically
    from specsim.launch_lines import sglang_adaptive, vllm_config

    if not found.policies:
        raise InputError(
            "needs acceptance, and a drafter of chains whose length the engine can change", where="--policy", mend="give --accept-rate"
        )  # fmt: skip
    ranges = found.policies[0].rising
    if not any(k for *_, k in ranges):
        raise InputError("speculation is off at every batch", where="--policy", mend="leave it out, and launch without speculation")  # fmt: skip
    document = vllm_config(_speculating(found), ranges) if found.best.scenario.engine.name == "vllm" else sglang_adaptive(ranges)  # fmt: skip
    write_atomically(path, json.dumps(document, indent=2) + "\n")


def _speculating(found: Plan) -> Scenario:
    """A scenario of the best choice's GPUs that drafts: its own, where it does."""
    best = found.best.scenario
    if best.method != "none":
        return best
    others = (c.scenario for c in found.choices if c.scenario.method != "none")
    return next(s for s in others if (s.profile.name, s.parallel) == (best.profile.name, best.parallel))


def _simulate(found: Plan, own: dict[str, Any]) -> dict[str, Any] | None:
    """One replica of the best choice under its share of the load."""
    if not found.met:
        return None
    from specsim.prediction import machine_of
    from specsim.simulation import simulate
    from specsim.simulation_costs import server_of
    from specsim.trace_stats import every
    from specsim.workload import Lengths, Trace, synthetic

    best = found.best
    server = server_of(best.scenario, machine_of(best.scenario), ranges=best.ranges)
    if own["trace"] is not None:
        load = every(Trace(own["trace"]), best.replicas)
    else:
        inputs, outputs = Lengths(round(found.requests.input_tokens)), Lengths(round(found.requests.output_tokens))
        load = synthetic(own["num_requests"], inputs, outputs, found.rate / best.replicas, seed=own["seed"])
    targets = {"ttft": found.targets.ttft_ms, "tpot": found.targets.tpot_ms}
    count = own["num_requests"] if own["trace"] is None else math.inf
    plain = count * found.requests.output_tokens / server.accept_length < PLAIN
    compiled = False if plain else None
    run = simulate(
        server,
        load,
        compiled=compiled,
        seed=own["seed"],
        targets_ms={k: v for k, v in targets.items() if v is not None},
    )
    m = run.metrics
    out: dict[str, Any] = {"requests": m.completed, "mean_batch": m.mean_batch, "utilisation": m.utilisation}
    for name in ("ttft", "tpot"):
        latency = m.latencies[name]
        if latency is not None:
            out |= {f"mean_{name}_ms": latency.mean, f"p50_{name}_ms": latency.median, f"p99_{name}_ms": latency.p99}
    out["share_within_targets"] = m.goodput / m.request_throughput if m.request_throughput else 0.0
    out["warnings"] = list(run.warnings)
    return out


# --- results --------------------------------------------------------------------------------------------------------


def _launch(found: Plan, own: dict[str, Any]) -> dict[str, Any]:
    """Launch lines of the best choice; with --policy, of a server that follows the policy."""
    from specsim.launch_lines import sglang_adaptive, sglang_line, vllm_config, vllm_line

    s, ranges, file = found.best.scenario, found.best.ranges, str(own["policy_out"] or "policy.json")
    if own["policy_out"] is not None:
        s, ranges = _speculating(found), found.policies[0].rising
    return {
        "sglang": sglang_line(s, ranges, file),
        "vllm": vllm_line(s, ranges),
        "vllm_speculative_config": vllm_config(s, ranges),
        "sglang_adaptive_config": sglang_adaptive(ranges) if len(ranges) > 1 else None,
    }


def _document(
    found: Plan, own: dict[str, Any], simulated: dict[str, Any] | None, stats: TraceStats | None
) -> dict[str, Any]:
    from specsim.policy import policy_json
    from specsim.provenance import sources_of_all

    price = own["price_per_gpu_hour"]
    return {
        "schema": "specsim.plan/1",
        "title": _title(found),
        "verdict": _headline(found, own),
        "load": {
            "rate": found.rate,
            "input_tokens": found.requests.input_tokens,
            "output_tokens": found.requests.output_tokens,
            "trace": None if stats is None else stats.json(),
        },
        "targets": {"ttft_ms": found.targets.ttft_ms, "tpot_ms": found.targets.tpot_ms},
        "meets_targets": found.met,
        "tpot_ms": None if found.tpot_ms is None else found.tpot_ms.json(),
        "model": found.best.scenario.names.get("model", found.best.scenario.model.name),
        "engine": found.best.scenario.engine.name,
        "choices": [c.json(found.rate, found.requests, price) for c in found.choices],
        "drafter_targets": [
            {
                "draft_tokens": t.draft_tokens, "load": t.load, "batch": t.batch,
                "breakeven_accept_length": float(f"{t.breakeven_length:.6g}"), "breakeven_accept_rate": _six(t.breakeven_rate),
                "speedup": found.speedup, "speedup_accept_rate": _six(t.speedup_rate), "target_accept_rate": _six(t.target_rate),
            }
            for t in found.drafter_targets
        ],
        "policy": policy_json(found.policies, found.best.scenario.engine.name) if found.policies else None,
        "launch": _launch(found, own),
        "simulation": simulated,
        "sources": sources_of_all(c.scenario for c in found.choices),
        "warnings": list(found.warnings),
    }  # fmt: skip


def _six(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.6g}")


def _show(found: Plan, own: dict[str, Any], simulated: dict[str, Any] | None, stats: TraceStats | None) -> None:
    out = console()
    out.print(_title(found), soft_wrap=True)
    if stats is not None:
        out.print(stats.sentence(), soft_wrap=True)
    out.print()
    out.print(_headline(found, own), style="bold", soft_wrap=True)
    out.print()
    out.print(_choices_table(found, own["price_per_gpu_hour"]))
    if len(found.choices) > 12:
        out.print(f"{len(found.choices) - 12} more choices: --json", style="dim")
    if found.policies:
        out.print()
        for line in _policy_lines(found, own):
            out.print(line, soft_wrap=True)
    if found.drafter_targets:
        out.print()
        _show_targets(found, out)
    if simulated is not None:
        out.print()
        _show_simulation(simulated, found, out)
    out.print()
    launch = _launch(found, own)
    out.print("SGLang: " + launch["sglang"], soft_wrap=True, markup=False)
    out.print("vLLM:   " + launch["vllm"], soft_wrap=True, markup=False)
    for warning in found.warnings:
        out.print(f"note: {warning}", style="yellow", soft_wrap=True, markup=False)


def _policy_lines(found: Plan, own: dict[str, Any]) -> list[str]:
    """Draft lengths by batch at several contexts, and how the plan's own choice goes with them."""
    from specsim.policy import said

    here, best = found.policies[0], found.best
    lines = [f"draft tokens by batch of one replica, within {own['hysteresis']:.0%} of the best"]
    for p in found.policies:
        back = "" if p.falling == p.rising or p is not here else f"; while it falls: {said(p.falling)}"
        lines.append(f"  context {p.context:>7,}: {said(p.rising)}{back}")
    one = here.rising[0][2] if len(here.rising) == 1 else None
    if own["policy_out"] is not None:
        lines.append(f"{own['policy_out']} and the launch lines follow that of context {here.context:,}")
    elif best.ranges:
        lines.append("the plan follows it: write the file that SGLang reads with --policy policy.json")
    elif one != best.draft_tokens - 1:
        why = "no switching" if one is None else f"the fastest at its own batch, though not within {own['hysteresis']:.0%} of the best at every other"  # fmt: skip
        gain = next((c for c in found.choices if c.ranges and c.point is not None and c.gpus == best.gpus), None)
        worth = ""
        if one is None and gain is not None and gain.point is not None and best.point is not None:
            worth = f": switching would save {1 - float(gain.point.tpot_s[0] / best.point.tpot_s[0]):.1%} of TPOT; --policy FILE writes it"
        lines.append(f"the plan keeps {best.setting} ({why}{worth})")
    return lines


def _title(found: Plan) -> str:
    s, r = found.best.scenario, found.requests
    load = f"{found.rate:.4g} requests a second of {r.input_tokens:,.0f} + {r.output_tokens:,.0f} tokens"
    return f"{s.model.name}, {s.engine.name}: {load}"


def _headline(found: Plan, own: dict[str, Any]) -> str:
    best = found.best
    drafting = {"off": "no speculation", "by batch": "draft tokens by batch"}.get(best.setting, f"{best.setting} draft tokens")  # fmt: skip
    where = f"{best.scenario.profile.name}, TP {best.scenario.parallel.tp}, {drafting}"
    if not found.met:
        limits = [f"{n} {getattr(found.targets, f'{n.lower()}_ms'):g} ms" for n in ("TTFT", "TPOT") if getattr(found.targets, f"{n.lower()}_ms") is not None]  # fmt: skip
        p = best.point
        got = (
            ""
            if p is None
            else f" (TTFT {p.ttft_s[0] * 1e3:,.4g} ms, TPOT {p.tpot_s[0] * 1e3:,.4g} ms with hardly any load)"
        )
        return f"Nothing meets {' and '.join(limits)}. The nearest miss is {best.miss - 1:.0%} off: {where}{got}."
    price = own["price_per_gpu_hour"]
    cost = "" if price is None else f", {best.cost_per_million(found.rate, found.requests.output_tokens, price):.4g} a million output tokens"  # fmt: skip
    many = "s" if best.replicas > 1 else ""
    assert best.point is not None
    q = found.tpot_ms
    sure = "" if q is None else f" ({q.interval})"
    return f"{best.gpus} GPUs: {best.replicas} replica{many} of {where}; TPOT {best.point.tpot_s[0] * 1e3:,.3g} ms{sure}, headroom {_room(best, found.rate)}{cost}."


def _room(c: Choice, rate: float) -> str:
    room = c.headroom(rate)
    return f"{room:.0%}" if room < 10 else "over 1000%"


def _choices_table(found: Plan, price: float | None) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    names = [
        "hardware",
        "TP",
        "EP",
        "draft tokens",
        "GPUs",
        "replicas",
        "req/s each",
        "TPOT ms",
        "TTFT ms",
        "batch",
        "headroom",
    ]
    for name in [*names, *(["cost/M"] if price is not None else [])]:
        table.add_column(name, justify="left" if name == "hardware" else "right")
    for c in found.choices[:12]:
        table.add_row(*_choice_row(c, found, price))
    return table


def _choice_row(c: Choice, found: Plan, price: float | None) -> list[str]:
    s = c.scenario
    row = [s.profile.name, str(s.parallel.tp), str(s.parallel.ep), c.setting]
    if c.server is None:
        return [*row, "does not fit"]
    p = c.point
    numbers = (
        ["", "", ""] if p is None else [f"{p.tpot_s[0] * 1e3:,.1f}", f"{p.ttft_s[0] * 1e3:,.0f}", f"{p.running[0]:.1f}"]
    )
    if not c.replicas:
        return [*row, "no", f"{c.miss - 1:.0%} off", "0", *numbers, ""]
    cost = [] if price is None else [f"{c.cost_per_million(found.rate, found.requests.output_tokens, price):.3g}"]
    return [*row, str(c.gpus), str(c.replicas), f"{c.rate_each:.3g}", *numbers, _room(c, found.rate), *cost]


def _show_targets(found: Plan, out: Console) -> None:
    from rich.table import Table

    out.print(f"accept rate a drafter must reach, on {found.best.scenario.profile.name}, TP {found.best.scenario.parallel.tp}: break-even | {found.speedup:g}x | the targets", style="dim", soft_wrap=True)  # fmt: skip
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("draft tokens", justify="right")
    loads = list(dict.fromkeys((t.load, t.batch) for t in found.drafter_targets))
    for load, batch in loads:
        table.add_column(f"{load:.0%} load, batch {batch}", justify="right")
    for d in dict.fromkeys(t.draft_tokens for t in found.drafter_targets):
        row = [t for t in found.drafter_targets if t.draft_tokens == d]
        table.add_row(str(d), *(" | ".join("none" if x is None else f"{x:.2f}" for x in (t.breakeven_rate, t.speedup_rate, t.target_rate)) for t in row))  # fmt: skip
    out.print(table)


def _show_simulation(simulated: dict[str, Any], found: Plan, out: Console) -> None:
    p = found.best.point
    assert p is not None
    out.print(f"simulated: {simulated['requests']:,} requests through one replica, {simulated['share_within_targets']:.0%} within the targets", soft_wrap=True)  # fmt: skip
    for name, closed in (("TTFT", p.ttft_s), ("TPOT", p.tpot_s)):
        key = name.lower()
        if f"mean_{key}_ms" in simulated:
            out.print(f"  {name}: mean {simulated[f'mean_{key}_ms']:,.4g} ms (closed form {closed[0] * 1e3:,.4g}), p50 {simulated[f'p50_{key}_ms']:,.4g}, p99 {simulated[f'p99_{key}_ms']:,.4g}", soft_wrap=True)  # fmt: skip
    for warning in simulated["warnings"]:
        out.print(f"note: {warning}", style="yellow", soft_wrap=True, markup=False)
