"""A plan for people: the choice, what else there is, when to switch, what a drafter must reach, how to launch."""

from __future__ import annotations

from collections.abc import Iterator

from specsim.choice import Choice
from specsim.drafter_targets import Target
from specsim.pages import Grid, Line, Page, grid
from specsim.percentiles import PERCENTS
from specsim.planned import Planned, missed, room
from specsim.policy import said
from specsim.quantities import counted, short

SHOWN = 12  # choices


def page(p: Planned) -> Page:
    """The plan as people see it."""
    found = p.plan
    yield Line(p.title(), "title")
    if p.trace is not None:
        yield Line(p.trace.sentence())
    yield Line()
    yield Line(p.verdict(), "verdict")
    yield Line()
    yield _choices(p)
    if len(found.choices) > SHOWN:
        yield Line(f"{len(found.choices) - SHOWN} more choices: --json", "faint")
    if p.percentiles is not None:
        yield Line(f"with the first choice {p.percentiles.sentence()}")
    if found.policies:
        yield Line()
        yield from _policies(p)
    if found.drafter_targets:
        yield Line()
        yield _targets(p)
    if p.simulation is not None:
        yield Line()
        yield from _simulation(p)
    yield Line()
    launch = p.launch
    yield Line("SGLang: " + launch["sglang"], "command")
    yield Line("vLLM:   " + launch["vllm"], "command")
    for warning in found.warnings:
        yield Line(f"note: {warning}", "warning")


def _choices(p: Planned) -> Grid:
    price = p.wanted.price_per_gpu_hour
    cost = () if price is None else (">cost/M",)
    which = p.plan.targets.percentile
    tpot, ttft = (f">{name} ms" if which is None else f">{which} {name} ms" for name in ("TPOT", "TTFT"))
    spare = ">spare" if p.met else ">miss"
    heads = ("hardware", ">TP", ">EP", ">draft tokens", ">cap", ">GPUs", ">replicas", ">req/s each", tpot, ttft, ">batch", spare, *cost)  # fmt: skip
    rows = [_row(c, p) for c in p.plan.choices[:SHOWN]]
    rows = [(*row, *("",) * (len(heads) - len(row))) for row in rows]
    usual = {">EP": "1", ">GPUs": "no"}  # every other column says nothing where all of it is empty
    kept = [i for i, head in enumerate(heads) if any(row[i] != usual.get(head, "") for row in rows)]
    heads, rows = tuple(heads[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]
    return grid(heads, rows, keys=heads.index(">draft tokens") + 1 + (">cap" in heads))


def _row(c: Choice, p: Planned) -> tuple[str, ...]:
    s, price = c.scenario, p.wanted.price_per_gpu_hour
    row = (s.profile.name, str(s.parallel.tp), str(s.parallel.ep), c.setting, f"{c.most:,}" if c.most else "")
    if c.server is None:
        return (*row, "no", "", "", "", "", "", "does not fit")
    at = c.seen or c.point
    times = ("", "", "") if at is None else (f"{at.tpot_s[0] * 1e3:,.1f}", f"{at.ttft_s[0] * 1e3:,.0f}", f"{at.running[0]:.1f}")  # fmt: skip
    if not c.replicas:
        return (*row, "no", "", "", *times, missed(c))
    cost = () if price is None else (short(c.cost_per_million(p.plan.rate, p.plan.requests.output_tokens, price), 3),)
    return (*row, f"{c.gpus:,}", f"{c.replicas:,}", short(c.rate_each, 3), *times, room(c, p.plan.rate), *cost)


def _policies(p: Planned) -> Iterator[Line]:
    """Draft lengths by batch at several contexts, and how the plan's own choice goes with them."""
    found, best, here = p.plan, p.plan.best, p.plan.policies[0]
    close = f"{p.wanted.hysteresis:.0%} of the best"
    yield Line(f"draft tokens by batch of one replica, within {close}", "faint")
    for policy in found.policies:
        back = (
            "" if policy.falling == policy.rising or policy is not here else f"; while it falls: {said(policy.falling)}"
        )
        yield Line(f"  context {policy.context:>7,}: {said(policy.rising)}{back}")
    one = here.rising[0][2] if len(here.rising) == 1 else None
    if p.wanted.policy is not None:
        yield Line(f"{p.wanted.policy} and the launch lines follow that of context {here.context:,}")
    elif best.ranges:
        yield Line("the plan follows it: write the file that SGLang reads with --policy policy.json")
    elif one != best.draft_tokens - 1:
        at_its_own = f"the fastest at its own batch, though not within {close} at every other"
        yield Line(f"the plan keeps {best.setting}: {_worth(p) if one is None else at_its_own}")


def _worth(p: Planned) -> str:
    """What switching would save, where a choice of as many GPUs switches."""
    best = p.plan.best
    other = next((c for c in p.plan.choices if c.ranges and c.point is not None and c.gpus == best.gpus), None)
    saved = 0.0
    if other is not None and other.point is not None and best.point is not None and best.point.tpot_s[0]:
        saved = 1 - float(other.point.tpot_s[0] / best.point.tpot_s[0])
    worth = f"{saved:.1%} of TPOT; --policy FILE writes it" if saved > 5e-4 else "nothing at this load"
    return f"switching would save {worth}"


def _targets(p: Planned) -> Grid:
    found = p.plan
    s = found.best.scenario
    loads = list(dict.fromkeys((t.load, t.batch) for t in found.drafter_targets))
    rows = []
    for d in dict.fromkeys(t.draft_tokens for t in found.drafter_targets):
        rows.append((str(d), *(_rates(t, found.targets.given) for t in found.drafter_targets if t.draft_tokens == d)))
    where = f"accept rate a drafter must reach, on {s.profile.name}, TP {s.parallel.tp}"
    title = f"{where}: break-even | {found.speedup:g}x{' | the targets' if found.targets.given else ''}"
    return grid((">draft tokens", *(f">{load:.0%} load, batch {batch}" for load, batch in loads)), rows, title)


def _rates(t: Target, targets: bool) -> str:
    rates = (t.breakeven_rate, t.speedup_rate, *((t.target_rate,) if targets else ()))
    return " | ".join("none" if rate is None else f"{rate:.2f}" for rate in rates)


def _simulation(p: Planned) -> Iterator[Line]:
    m, at = p.simulation, p.plan.best.point
    assert m is not None
    assert at is not None
    within = f"{m['share_within_targets']:.0%} within the targets"
    yield Line(f"simulated: {counted(m['requests'], 'request')} through one replica, {within}")
    for name, closed in (("TTFT", at.ttft_s), ("TPOT", at.tpot_s)):
        key = name.lower()
        if f"mean_{key}_ms" in m:
            of_all = f"{short(m['mean_itl_ms'])} over all tokens, " if p.trace and name == "TPOT" else ""
            mean = f"mean {short(m[f'mean_{key}_ms'])} ms ({of_all}closed form {short(closed[0] * 1e3)})"
            shown = (f"{which} {short(m[f'{which}_{key}_ms'])}" for which in PERCENTS if f"{which}_{key}_ms" in m)
            yield Line(f"  {name}: {', '.join([mean, *shown])}")
    for warning in m["warnings"]:
        yield Line(f"note: {warning}", "warning")
