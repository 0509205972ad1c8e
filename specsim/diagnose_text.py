"""A diagnosis in words and tables, and its drawing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from specsim.diagnosis import CLEAR, FAR, Diagnosis, Hypothesis, label
from specsim.evidence import NOTHING
from specsim.experiments import Appraisal
from specsim.forward import build as build_pass
from specsim.hypotheses import BY_ID
from specsim.ops import Load
from specsim.pages import Grid, Line, Page, grid
from specsim.probes import Probe
from specsim.quantities import Quantity, short
from specsim.remedies import MENDS, Remedy

SHOWN = 6  # explanations in the tables
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
FEW_BITS = 0.06  # the best test is worth naming from here on
SURE = 0.9  # an explanation above it is to be confirmed rather than found
GAINS = 3  # remedies named in the text
LIKELY = 0.05  # explanations below this weight are not named in the text
NAMED = 0.01  # nor below this one, when a test sets no likelier ones apart
AGREES = 0.12  # log distance within which an accept length agrees with throughput x cycle


def situation(d: Diagnosis) -> str:
    """What was measured, what a healthy box would take, and what that leaves per all-reduce and per kernel."""
    s = d.scenario
    decode, verify, expected = d.observed("decode"), d.observed("verify"), d.expected_verify_ms
    if s is None or verify is None or expected is None:
        return ""
    rows = int(np.max(s.batch) * np.max(s.draft_tokens))
    ratio = f", {verify / decode:.1f} times a decode step of {short(decode)} ms" if decode else ""
    out = f"Verify of {rows} rows takes {short(verify)} ms{ratio}."
    out += f" A healthy box{' that decodes as fast' if decode else ''} would need {expected} ms ({expected.interval})"
    extra = verify - expected.value
    if verify <= expected.high * 1.04:
        return out + ": verify is not slow."
    p = build_pass(s.model, s.parallel, s.engine, graph=True)
    calls = sum(o.calls for o in p.operators if o.component == "allreduce")
    kernels = float(np.max(p.kernels(Load(s.batch, s.draft_tokens, s.context))))
    shares = [f"{extra * 1e3 / kernels:,.1f} us for each of {kernels:,.0f} kernels"]
    if calls:
        shares.insert(
            0,
            f"{extra * 1e3 / calls:,.0f} us for each of {calls:.0f} all-reduces, the embedding's and the logits' included",
        )
    return out + f". {extra:,.1f} ms are unexplained: as much as {', or '.join(shares)}."


def baseline(d: Diagnosis) -> str:
    """Said when the decode step itself is far from what the profile predicts."""
    decode = d.observed("decode")
    if decode is None or d.scenario is None or d.found is None or "decode" in d.scenario.eager:
        return ""  # launched by the host, whose speed no profile knows
    predicted = float(
        d.found.boxes.predict(Probe("decode", batch=int(np.max(d.scenario.batch))), BY_ID["weak-drafter"])[0]
    )
    if 1 / FAR < decode / predicted < FAR:
        return ""
    return (
        f"The decode step itself takes {decode:.3g} ms where {predicted:.3g} ms are predicted for {d.scenario.profile.name}:"
        + (" something slows plain decoding too, or" if decode > predicted else "")
        + " the profile is not of this box."
        + (f" {d.ungraphed}" if d.ungraphed else "")
    )


def breakeven(d: Diagnosis) -> str:
    """What acceptance the measured cycle needs."""
    better = next((r for r in d.remedies if r.id == "better-drafter"), None)
    if better is None or better.accept_length_needed is None or d.scenario is None:
        return ""
    s = d.scenario
    need = better.accept_length_needed
    most = float(min(np.max(s.num_steps), np.max(s.draft_tokens) - 1)) + 1
    if not better.reachable:
        return f"{_cycle(d)} speculation would need {need} tokens a cycle to break even; {most:g} is the most there can be."
    if need.value <= 1:
        return f"{_cycle(d)} a cycle would take less than a decode step, so that speculation would pay whatever is accepted."
    known = s.accept_length
    has = f"; the drafter gives {float(known.reshape(-1)[0]):.2f}" if known is not None else ""
    if known is not None and float(known.reshape(-1)[0]) < NOTHING:
        has += (
            ": no drafted token is ever accepted, so speculation is broken here, not merely weak (a wrong draft, or deeper"
            " than it was trained for)"
        )
    implied = _implied(d)
    if implied is not None and known is not None:
        has = f". The drafter is said to give {float(known.reshape(-1)[0]):.2f}, but throughput and cycle make it {implied:.2f}"
    return f"{_cycle(d)} speculation breaks even at {need} of at most {most:g} tokens a cycle{has}."


def _cycle(d: Diagnosis) -> str:
    """What a break-even rests on: measured or predicted."""
    given = {"cycle": "this cycle", "rate": "this cycle", "verify": "this verify"}
    cycle = next((words for kind, words in given.items() if d.observed(kind) is not None), "the predicted cycle")
    plain = "" if d.observed("decode") is not None else ", and a plain decode step as predicted,"
    return f"With {cycle}{plain}"


def _implied(d: Diagnosis) -> float | None:
    """Tokens a cycle of a throughput and a cycle that were both observed, where they contradict the accept length."""
    rate, cycle, s = d.observed("rate"), d.observed("cycle"), d.scenario
    if rate is None or cycle is None or s is None or s.accept_length is None:
        return None
    implied = rate * cycle / 1e3 / float(np.max(s.batch))
    return None if abs(np.log(implied / float(s.accept_length.reshape(-1)[0]))) < AGREES else implied


def payoff(d: Diagnosis) -> float | None:
    """Tokens with speculation over those without, clear of 1; None where that is not known or not clear."""
    off = next((r.gain for r in d.remedies if r.id == "speculation-off"), None)
    if off is None or off.low <= 1 <= off.high:
        return None
    return 1 / off.value


def name(d: Diagnosis, h: Hypothesis) -> str:
    """A fault in words, as it stands in this case: a drafter that pays is not weak."""
    if h.fault.id != "weak-drafter":
        return h.fault.name
    if d.scenario is not None and d.scenario.method == "none":
        return "nothing is slow"
    gain = payoff(d)
    if gain is None:
        return "nothing is slow: whether speculation pays is up to the drafter"
    return "nothing is slow, and speculation pays" if gain > 1 else h.fault.name


def verdict(d: Diagnosis) -> str:
    """One sentence: the likeliest explanations, and whether the observations can tell them apart."""
    first, second = d.hypotheses[:2]
    if not d.observations:
        return "No time or flag could be weighed: these are the weights before any evidence."
    if d.misfits:
        return (
            f"No single explanation fits these numbers. The nearest is {first.fault.id}, and its weight of"
            f" {first.weight:.0%} only says that the others are further off: check the numbers first."
        )
    if d.separable and first.fault.id == "weak-drafter":
        return f"Most likely ({first.weight:.0%}) {name(d, first)}."
    if d.ungraphed and first.weight >= CLEAR * second.weight:
        return f"If plain decoding runs in CUDA graphs, most likely ({first.weight:.0%}): {name(d, first)}."
    if d.separable:
        return f"Most likely ({first.weight:.0%}): {first.fault.name}."
    return (
        f"{_evidence(d)} cannot tell {first.fault.id} ({first.weight:.0%}: {name(d, first)})"
        f" from {second.fault.id} ({second.weight:.0%}: {name(d, second)})."
    )


def pays(d: Diagnosis) -> str:
    """Said when speculation is worth having as it is: what is left to gain is no reason to turn it off."""
    gain = payoff(d)
    if gain is None or gain < 1 or d.misfits or d.observed("decode") is None:
        return ""
    if d.scenario is not None and "decode" in d.scenario.eager:
        return (
            f"Speculation pays here, {gain:.2f} times the tokens of plain decoding, but plain decoding runs without graphs"
            " as well: compare with plain decoding in graphs."
        )
    return f"Speculation pays: {gain:.2f} times the tokens of plain decoding."


def _evidence(d: Diagnosis) -> str:
    times = sum(not o.probe.binary for o in d.observations)
    if times == len(d.observations):
        count = NUMBERS[times] if times < len(NUMBERS) else str(times)
        return f"{count.capitalize()} step time{'' if times == 1 else 's'}"
    return "One observation" if len(d.observations) == 1 else f"{len(d.observations)} observations"


def next_test(d: Diagnosis) -> str:
    """The best test: what to run, and what each likely explanation predicts for it."""
    if not d.experiments or d.experiments[0].bits < FEW_BITS:
        return "No test that specsim knows would change this much."
    a = d.experiments[0]
    e = a.experiment
    answers = _answers(d, a)
    word = "To confirm it" if d.hypotheses[0].weight > SURE and not d.misfits else "Next"
    return f"{word}, {e.minutes:g} minute{'' if e.minutes == 1 else 's'}: {e.what}." + (
        f" {answers}" if answers else ""
    )


def _answers(d: Diagnosis, a: Appraisal) -> str:
    """Outcomes by explanation: "about 28 ms means allreduce-steep, about 16 ms verify-eager"."""
    count = len([h for i, h in enumerate(d.hypotheses) if h.weight >= LIKELY or i < 2])
    while True:
        likely = list(d.hypotheses[:count])
        probe, predicted = _telling(likely, a)
        groups = _outcomes(likely, probe, predicted)
        if len(groups) > 1 or count == len(d.hypotheses) or d.hypotheses[count].weight < NAMED:
            break
        count += 1
    if len(groups) < 2:
        return ""
    if probe.binary:
        return "; ".join(f"{word} speaks for {', '.join(ids)}" for word, ids in groups) + "."
    said = "; ".join(f"{value} means {', '.join(ids)}" for value, ids in groups)
    return f"{label(probe)[0].upper()}{label(probe)[1:]}: {said}."


def _outcomes(likely: list[Hypothesis], probe: Probe, predicted: dict[str, Quantity]) -> list[tuple[str, list[str]]]:
    """Outcomes in words, each with the explanations that it speaks for."""
    if probe.binary:
        yes = [h.fault.id for h in likely if predicted[h.fault.id].value > 0.5]
        no = [h.fault.id for h in likely if predicted[h.fault.id].value <= 0.5]
        return [(word, ids) for word, ids in (("Yes", yes), ("No", no)) if ids]
    groups: list[tuple[float, list[str]]] = []
    for h in sorted(likely, key=lambda h: -predicted[h.fault.id].value):
        value = predicted[h.fault.id].value
        if groups and abs(np.log((groups[-1][0] + 0.3) / (value + 0.3))) < 0.12:
            groups[-1][1].append(h.fault.id)
        else:
            groups.append((value, [h.fault.id]))
    return [(f"about {value:.3g} {probe.unit}".rstrip(), ids) for value, ids in groups]


def _telling(likely: list[Hypothesis], a: Appraisal) -> tuple[Probe, dict[str, Quantity]]:
    """The probe of a test on which the likely explanations differ most."""

    def apart(p: Probe, q: dict[str, Quantity]) -> float:
        values = np.array([q[h.fault.id].value for h in likely])
        return float(np.ptp(values if p.binary else p.scaled(values)))

    both = list(zip(a.experiment.probes, a.predictions, strict=True))
    return max(both, key=lambda pq: apart(*pq))


def gains(d: Diagnosis) -> list[str]:
    """What the remedies of the likely explanations would give; without a scenario only what they are."""
    out = []
    if d.scenario is None:
        likely = {h.fault.id for h in d.hypotheses if h.weight >= LIKELY}
        for m in MENDS if d.observations else ():
            if likely & set(m.helps):
                how = {"sglang": f": {m.sglang}", "vllm": f": {m.vllm}"}.get(d.engine, "")
                out.append(f"If it is {' or '.join(m.helps)}: {m.what}{how}.")
        return out
    for r in d.remedies:
        if r.gain_if_right is None or not r.helps or r.chance < LIKELY:
            continue
        how = f": {r.command}" if r.command else ""
        out.append(
            f"If it is {' or '.join(r.helps)}, {r.gain_if_right.value:.2f} times the tokens ({r.gain_if_right.low:.2f} to {r.gain_if_right.high:.2f}) are to be had:"
            f" {r.what}{how}."
        )
    return out


def page(d: Diagnosis) -> Page:
    """The diagnosis as people see it."""
    if d.scenario is not None:
        yield Line(d.scenario.title, "title")
        yield Line()
    yield from paragraphs(d)
    yield Line()
    yield _hypotheses(d)
    if d.experiments:
        yield Line()
        yield _experiments(d)
    yield Line()
    yield Line("tests that cannot help", "faint")
    yield from (Line(f"  {text}") for text in why_not(d))
    if d.remedies:
        yield Line()
        yield _remedies(d)
    for warning in d.warnings:
        if warning not in (*d.misfits, d.ungraphed):
            yield Line(f"note: {warning}", "warning")


def paragraphs(d: Diagnosis) -> Iterator[Line]:
    """The answer in words: what was measured, the likeliest explanation, the next test, what a remedy would give."""
    for fact in d.facts:
        yield Line(fact)
    for text in (situation(d), baseline(d), breakeven(d), pays(d)):
        if text:
            yield Line(text)
    for text in d.misfits:
        yield Line(f"{text[0].upper()}{text[1:]}", "warning")
    yield Line(verdict(d), "verdict")
    yield Line(next_test(d))
    if d.experiments and d.experiments[0].bits >= FEW_BITS:
        yield Line(f"  {d.experiments[0].experiment.command}", "command")
        yield Line(f"  then again with {d.experiments[0].experiment.tell}", "faint")
    for text in [] if d.misfits else gains(d)[:GAINS]:
        yield Line(text)
    for u in d.uninformative[:1]:
        yield Line(f"Cannot help: {u.id}. {u.why[0].upper()}{u.why[1:]}.")


def _hypotheses(d: Diagnosis) -> Grid:
    """Explanations by weight, with the decode and verify that they predict."""
    priced = d.scenario is not None
    shown = []
    for h in d.hypotheses[:SHOWN]:
        cells = (_short(h.decode_ms), _short(h.verify_ms)) if priced else ()
        shown.append((_percent(h.weight), h.fault.id, name(d, h), *cells))
    rest = d.hypotheses[SHOWN:]
    shown.append((_percent(sum(h.weight for h in rest)), "others", ", ".join(h.fault.id for h in rest)))
    times = (">decode ms", ">verify ms") if priced else ()
    return grid((">weight", "explanation", "~", *times), shown, "explanations", keys=2)


def _percent(w: float) -> str:
    return f"{w:.0%}" if w >= 0.01 or w == 0 else "<1%"


def _short(q: Quantity | None) -> str:
    return "" if q is None else str(q)


def _experiments(d: Diagnosis) -> Grid:
    """Tests by worth, with what the two likeliest explanations predict."""
    named = [h for h in d.hypotheses[:2] if h.weight >= 0.01] or list(d.hypotheses[:2])
    shown = []
    for a in d.experiments:
        for i, (p, q) in enumerate(zip(a.experiment.probes, a.predictions, strict=True)):
            head = (a.experiment.id, f"{a.bits:.2f}", f"{a.experiment.minutes:g}") if i == 0 else ("", "", "")
            cells = (_outcome(p.binary, q[h.fault.id]) for h in named)
            shown.append((*head, f"{label(p)}{f', {p.unit}' if p.unit else ''}", *cells))
    heads = ("test", ">bits", ">min", "~gives", *(f">{h.fault.id}" for h in named))
    return grid(heads, shown, "tests that help, the best first")


def _outcome(binary: bool, q: Quantity) -> str:
    return ("yes" if q.value > 0.5 else "no") if binary else str(q)


def _remedies(d: Diagnosis) -> Grid:
    """Remedies, the explanations they are for, and their gain if one of those is right."""
    shown = [
        (r.id, r.what + (f" (for {', '.join(r.helps)})" if r.helps else ""), _percent(r.chance), _gain(r))
        for r in d.remedies
    ]
    return grid(("remedy", "~", ">chance", ">gain if right"), shown, "remedies")


def _gain(r: Remedy) -> str:
    if r.gain_if_right is None:
        if r.accept_length_needed is not None:
            return f"break-even {r.accept_length_needed}"
        return "" if r.cycle_ms is None else f"cycle {r.cycle_ms} ms"
    q = r.gain_if_right
    return f"x {q.value:.2f}" + (f" ({q.low:.2f} to {q.high:.2f})" if q.low < q.high else "")


def why_not(d: Diagnosis) -> Iterator[str]:
    """Tests that cannot help, those with one reason together."""
    reasons = dict.fromkeys(u.why for u in d.uninformative)
    for why in reasons:
        yield f"{', '.join(u.id for u in d.uninformative if u.why == why)}: {why}"


def explained(d: Diagnosis) -> list[tuple[str, str, dict[str, float]]]:
    """Decode and verify under each likely explanation, as mean ms by component on the boxes that it leaves: (explanation,
    phase, ms). None without a scenario that speculates."""
    if d.found is None or d.scenario is None or d.scenario.method == "none":
        return []
    shown = [h for h in d.hypotheses if h.weight >= 0.01][:SHOWN]
    return [(h.fault.id, phase, d.found.components(h.fault, phase)) for h in shown for phase in ("decode", "verify")]
