"""What a report says in words and tables, from the document alone: the sections before and after its charts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specsim.chart_hardware import box_of
from specsim.chart_style import PHASES, Table, table_of
from specsim.quantities import Quantity, counted

Document = Mapping[str, Any]
Part = tuple[str, "str | Sequence[str] | Table"]  # a heading, and a command, a list of sentences, or a table
TITLES = {
    "specsim.prediction/1": "Prediction",
    "specsim.sweep/1": "Sweep",
    "specsim.plan/1": "Plan",
    "specsim.simulation/1": "Simulation",
    "specsim.simulations/1": "Simulations",
    "specsim.validation/1": "Predictions beside measurements",
    "specsim.diagnosis/1": "Diagnosis",
    "specsim.hardware/1": "Hardware profile",
    "specsim.hardware-diff/1": "Hardware profiles compared",
    "specsim.hardware-agreement/1": "Two hardware profiles, weighed by a scenario",
    "specsim.calibration/1": "Calibration",
}
WORDS = {
    "tp": "tensor-parallel ranks", "ep": "expert-parallel groups", "dp_attention": "attention groups", "num_steps": "draft steps",
    "topk": "branches", "draft_tokens": "draft tokens", "kv_tokens": "KV cache, tokens", "chunk_tokens": "prefill chunk, tokens",
    "overhead_ms": "overhead, ms", "chunk_us": "front end, us a chunk", "prefix_rate": "share in the prefix cache", "max_running_requests": "running requests at most",
    "eager": "without CUDA graph", "gpus": "GPUs", "rate": "requests a second", "input_tokens": "prompt tokens",
    "output_tokens": "output tokens", "ttft_ms": "TTFT target, ms", "tpot_ms": "TPOT target, ms", "percentile": "targets are for the", "link": "link", "overlap": "overlapped scheduling",
    "max_concurrency": "requests in flight at most", "request_rate": "requests a second", "seed": "seed", "dataset_name": "requests",
}  # fmt: skip
LAUNCHES = {
    "kernel_us": "launch of a kernel, us", "collective_us": "launch of a collective, us", "graph_us": "launch of a graph, us",
    "graph_node_us": "node of a graph, us",
}  # fmt: skip
QUANTITIES = {
    **{f"{phase}_ms": ("one plain decode step" if phase == "decode" else name, "ms") for phase, name in PHASES.items()},
    "cycle_ms": ("cycle", "ms"),
    "decode_tokens_per_s": ("plain decoding", "tokens/s"),
    "spec_tokens_per_s": ("with speculation", "tokens/s"),
    "speedup": ("speedup", "times"),
}


def title_of(document: Document) -> str:
    """The document's own title, or what it is."""
    kind = TITLES[document["schema"]]
    if document.get("title"):
        return str(document["title"])
    scenario = document.get("scenario") or {}
    named = [scenario.get("model"), scenario.get("hardware"), document.get("name")]
    if document["schema"] == "specsim.calibration/1":
        named = [box_of(document)]
    return ": ".join([kind, *[", ".join(str(x) for x in named if x)][: any(named)]])


def verdict_of(document: Document) -> str:
    """The document's own verdict; of kinds that have none, what their numbers say; empty where there is neither."""
    if document.get("verdict"):
        return str(document["verdict"])
    found = VERDICTS.get(document["schema"])
    return found(document) if found else ""


def before(document: Document) -> Iterator[Part]:
    """What is said before the charts: the scenario, and the numbers that matter most."""
    if found := BEFORE.get(document["schema"]):
        yield from found(document)
    if facts := scenario_facts(document):
        yield "Scenario", Table(("", ""), tuple(facts.items()))


def sources(document: Document) -> list[Mapping[str, Any]]:
    """Where the numbers come from; the groups of a profile, and of a calibration, are their own sources."""
    if document["schema"] not in ("specsim.hardware/1", "specsim.calibration/1"):
        return list(document.get("sources") or [])
    groups = [(document["gpu"]["name"], document["gpu"])] if "gpu" in document else []
    groups += document["operators"].items()
    groups += [
        (f"all-reduce, {c['implementation']}, {c['ranks']} ranks, {c['mode']}", c) for c in document["allreduce"]
    ]
    groups += [
        ("launches", document["launch"]),
        *((f"engine terms, {k}", v) for k, v in document.get("engines", {}).items()),
    ]
    return [{"of": name, **g["source"], "relative_uncertainty": g["relative_uncertainty"]} for name, g in groups]


def after(document: Document) -> Iterator[Part]:
    """What is said after the charts: what to do next, and every other table."""
    if found := AFTER.get(document["schema"]):
        yield from found(document)


def scenario_facts(document: Document) -> dict[str, Any]:
    """What was asked, by name."""
    found: dict[str, Any] = dict(document.get("scenario") or {})
    for key in ("load", "targets"):
        found |= {k: v for k, v in (document.get(key) or {}).items() if not isinstance(v, (dict, list))}
    for key in ("model", "engine", "request_rate", "max_concurrency", "dataset_name", "seed"):
        if document.get(key) is not None and key not in found:
            found[key] = document[key]
    if document["schema"] == "specsim.hardware/1":
        gpu = document["gpu"]
        found |= {"profile": document["name"], "description": document.get("description"), "GPU": gpu["name"], "gpus": document["gpus"],
                  "link": document["link"], "memory, GB": gpu["memory_gb"], "bandwidth, GB/s": gpu["bandwidth_gb_s"], "bf16, TFLOPS": gpu["bf16_tflops"]}  # fmt: skip
    return {
        WORDS.get(k, k.replace("_", " ")): _listed(v) for k, v in found.items() if v is not None and v not in ([], "")
    }


def _listed(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


# --- by kind --------------------------------------------------------------------------------------------------------


def _prediction(document: Document) -> Iterator[Part]:
    rows = []
    for key, (name, unit) in QUANTITIES.items():
        if document.get(key) is not None:
            rows.append(_quantity(name, document[key], unit))
    if document.get("accept_length") is not None:
        rows.append(("tokens a cycle", f"{document['accept_length']:.4g}", "tokens", "as given"))
    even = document.get("breakeven")
    if even:
        rows.append(_quantity("break-even accept length", even["accept_length"], "tokens"))
        rate = even["accept_rate"]
        rows.append(("break-even accept rate", "not reachable", "", "") if rate is None else _quantity("break-even accept rate", rate, ""))  # fmt: skip
    memory = document.get("memory")
    if memory:
        used, fits = (
            memory["weights_gb_per_gpu"] + memory["kv_gb_per_gpu"],
            "fits" if memory["fits"] else "does not fit",
        )
        rows.append(("memory a GPU, weights and KV cache", f"{used:.4g}", "GB", fits))
    yield "Numbers", Table(("", "value", "unit", "80 % interval"), tuple(rows))


def _quantity(name: str, q: Mapping[str, float], unit: str) -> tuple[str, str, str, str]:
    found = Quantity(q["value"], q["low"], q["high"])
    return name, str(found), unit, found.interval


def _sweep(document: Document) -> Iterator[Part]:
    columns = {"model": "model", "hardware": "hardware", "engine": "engine", "tp": "TP", "ep": "EP", "dp_attention": "DP", "lengths": "settings"}  # fmt: skip
    rows = [{**c, "lengths": ", ".join(s["label"] for s in c["settings"])} for c in document["cases"]]
    yield "Cases", table_of(rows, columns)


def _sweep_rows(document: Document) -> Iterator[Part]:
    rows = document.get("rows")
    if rows:
        few = {k: k.replace("_", " ") for k in rows[0] if len({str(r[k]) for r in rows}) > 1}
        yield "Rows", table_of(rows, few or {k: k.replace("_", " ") for k in rows[0]})


def _sweep_verdict(document: Document) -> str:
    wins = dict(document.get("wins") or {})
    unfit, off = wins.pop("-", 0), wins.pop("off", 0)
    total = sum(wins.values()) + off
    if not total:
        return f"Nothing fits: {unfit:,} combinations need more memory." if unfit else ""
    if not wins:
        return f"Speculation pays in none of {total:,} combinations of batch, context and acceptance."
    most = max(wins, key=lambda label: wins[label])
    return (
        f"Speculation pays in {sum(wins.values()):,} of {total:,} combinations of batch, context and acceptance;"
        f" most often best: {most} draft tokens."
    )


def _plan(document: Document) -> Iterator[Part]:
    launch = document.get("launch") or {}
    for name, label in (("sglang", "Launch with SGLang"), ("vllm", "Launch with vLLM")):
        if launch.get(name):
            yield label, str(launch[name])
    found = document.get("simulation")
    if found:
        yield "Simulated", Table(("", ""), tuple((k.replace("_", " "), v) for k, v in found.items() if not isinstance(v, list)))  # fmt: skip


def _simulation(document: Document) -> Iterator[Part]:
    shown = {
        "completed": "requests completed", "duration": "seconds", "request_throughput": "requests a second",
        "request_goodput": "requests a second within the targets", "output_throughput": "output tokens a second",
        "utilisation": "share of time busy", "prefill_share": "share of time in steps that prefill", "mean_decode_batch": "mean decode batch",
        "accept_length": "tokens a cycle", "peak_waiting": "requests waiting at most", "peak_kv_share": "KV cache full at most", "retractions": "retractions",
    }  # fmt: skip
    yield "Numbers", Table(("", ""), tuple((name, document[key]) for key, name in shown.items() if document.get(key) is not None))  # fmt: skip


def _validation(document: Document) -> Iterator[Part]:
    columns = {"phase": "phase", "n": "n", "median_abs_error": "median error", "worst_error": "worst", "interval_coverage": "in the 80 % interval"}  # fmt: skip
    percents = ("median_abs_error", "worst_error", "interval_coverage")
    rows = []
    for phase, s in document["phases"].items():
        of_step = "worst_error_of_step" in s  # host time, a remainder
        figures = {k: s.get(f"{k}_of_step", s[k]) for k in percents}
        name = phase.replace("_", " ") + (", of the step" if of_step else "")
        rows.append({"phase": name, "n": s["n"], **{k: f"{v:.1%}" for k, v in figures.items()}})
    yield "Errors by phase", table_of(rows, columns)


def _validation_left_out(document: Document) -> Iterator[Part]:
    if document.get("skipped"):
        yield "Left out", [str(x) for x in document["skipped"]]


def _validation_verdict(document: Document) -> str:
    phases = document["phases"]
    said = [
        f"{phase} {phases[phase]['median_abs_error']:.1%}" for phase in ("decode", "verify", "cycle") if phase in phases
    ]
    if not said:
        return ""
    points = document["points"]
    inside = sum(bool(p["covered"]) for p in points) / max(len(points), 1)
    return f"Median error: {', '.join(said)}; {inside:.0%} of {len(points):,} observations lie in their 80 % intervals."


def _diagnosis(document: Document) -> Iterator[Part]:
    if said := document.get("summary") or document.get("facts"):
        yield "In short", said
    columns = {
        "kind": "what",
        "name": "",
        "batch": "batch",
        "draft_tokens": "rows a sequence",
        "value": "value",
        "unit": "unit",
        "source": "source",
    }
    yield "Observed", table_of(document["observations"], columns)


def _diagnosis_next(document: Document) -> Iterator[Part]:
    if document["experiments"]:
        first = document["experiments"][0]
        yield f"Next test: {first['what']} ({first['minutes']:g} min)", str(first["command"])
    if document["uninformative"]:
        yield "Tests that cannot help", [f"{u['id']}: {u['why']}" for u in document["uninformative"]]


def _calibration(document: Document) -> Iterator[Part]:
    launch = document["launch"]
    rows = [
        ("finished measurements", document["measured"]), ("failed measurements", document["failed"]), ("seconds", document["seconds"]),
        *((name, launch[key]) for key, name in LAUNCHES.items()), ("profile", document["profile"]), ("record, raw samples included", document["record"]),
    ]  # fmt: skip
    yield "Numbers", Table(("", ""), tuple(rows))


def _calibration_verdict(document: Document) -> str:
    failed = f", {document['failed']:,} failed" if document["failed"] else ""
    worst = max(document["operators"].items(), key=lambda o: o[1]["relative_uncertainty"], default=None)
    least = f" The least certain class is {worst[0]}, to {worst[1]['relative_uncertainty']:.0%}." if worst else ""
    return f"{document['measured']:,} measurements of {box_of(document)} are done{failed}.{least}"


def _agreement(document: Document) -> Iterator[Part]:
    steps = document["step_ms"]
    rows = [
        (name, a, b, f"{b / a - 1:+.1%}")
        for name, a, b in zip(("decode step", "cycle"), steps["a"], steps["b"], strict=False)
    ]
    yield "GPU time of a step, ms", Table(("", document["a"], document["b"], "apart"), tuple(rows))


def _agreement_missing(document: Document) -> Iterator[Part]:
    if document["missing"]:
        yield f"What {document['b']} lacks", document["missing"]


def _agreement_verdict(document: Document) -> str:
    count = sum(n["matters"] for n in document["numbers"])
    missing = len(document["missing"])
    lacks = f"{document['b']} lacks {missing} of them, and the others" if missing else "they"
    judged = ""
    if document.get("within") is not None:
        judged = f" They {'agree' if document['agree'] else 'do not agree'} within {document['within']:.2%}."
    return f"{counted(count, 'number')} of more than 5 % of a step; {lacks} differ by at most {document['worst']:.1%}.{judged}"


def _diff(document: Document) -> Iterator[Part]:
    for pair in (document, *document.get("more", [])):
        columns = {"key": "number", "a": document["a"], "b": pair["b"], "percent": "relative"}
        rows = [
            {**d, "percent": None if d["relative"] is None else f"{d['relative']:+.1%}"} for d in pair["differences"]
        ]
        yield f"Numbers of {pair['b']} that differ from {document['a']}", table_of(rows, columns)


def _diff_verdict(document: Document) -> str:
    found = document["differences"]
    if not found:
        return f"{document['a']} and {document['b']} hold the same numbers."
    known = [d for d in found if d["relative"] is not None]
    most = max(known, key=lambda d: abs(d["relative"]), default=None)
    far = f"; the farthest apart: {most['key']}, {most['relative']:+.0%}" if most else ""
    return f"{document['b']} differs from {document['a']} in {counted(len(found), 'number')}{far}."


def _simulations(document: Document) -> Iterator[Part]:
    columns = {
        **{name: WORDS.get(name, name.replace("_", " ")) for name in document["varied"]},
        "request_throughput": "requests/s", "output_throughput": "output tokens/s", "median_ttft_ms": "TTFT, ms",
        "p99_ttft_ms": "TTFT p99, ms", "median_tpot_ms": "TPOT, ms", "p99_tpot_ms": "TPOT p99, ms", "error": "left out because",
    }  # fmt: skip
    yield "All simulations", table_of(document["rows"], columns)


BEFORE: dict[str, Callable[[Document], Iterator[Part]]] = {
    "specsim.prediction/1": _prediction,
    "specsim.sweep/1": _sweep,
    "specsim.simulation/1": _simulation,
    "specsim.validation/1": _validation,
    "specsim.diagnosis/1": _diagnosis,
    "specsim.calibration/1": _calibration,
    "specsim.hardware-agreement/1": _agreement,
}
AFTER: dict[str, Callable[[Document], Iterator[Part]]] = {
    "specsim.sweep/1": _sweep_rows,
    "specsim.plan/1": _plan,
    "specsim.simulations/1": _simulations,
    "specsim.validation/1": _validation_left_out,
    "specsim.diagnosis/1": _diagnosis_next,
    "specsim.hardware-diff/1": _diff,
    "specsim.hardware-agreement/1": _agreement_missing,
}
VERDICTS: dict[str, Callable[[Document], str]] = {
    "specsim.sweep/1": _sweep_verdict,
    "specsim.validation/1": _validation_verdict,
    "specsim.hardware-diff/1": _diff_verdict,
    "specsim.hardware-agreement/1": _agreement_verdict,
    "specsim.calibration/1": _calibration_verdict,
}
