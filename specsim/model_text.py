"""A model as specsim reads it: its JSON document, and its page."""

from __future__ import annotations

from typing import Any

from specsim.configs import default_draft
from specsim.models import Model
from specsim.pages import Line, Page, grid


def describe(model: Model, draft: str | None = None) -> dict[str, Any]:
    """The JSON document of `models show`."""
    experts = model.experts
    return {
        "schema": "specsim.model/1",
        "name": model.name,
        "architecture": model.architecture,
        "source": model.source,
        "hidden": model.hidden,
        "layers": model.num_layers,
        "vocab": model.vocab,
        "max_context": model.max_context,
        "total_parameters": model.total_parameters,
        "active_parameters": model.active_parameters,
        "active_parameters_without_embedding": model.active_parameters_without_embedding,
        "active_parameters_in_layers": model.active_parameters_in_layers,
        "experts": experts.count if experts else 0,
        "experts_per_token": experts.per_token if experts else 0,
        "expert_bytes": experts.bytes_each if experts else 0,
        "quantisation": model.quantisation,
        "kv_format": model.kv_format.name,
        "kv_bytes_per_token": model.kv_bytes_per_token(),
        "state_bytes_per_sequence": model.activation.bytes
        * sum(n * layer.attention.state_values for layer, n in model.layers if layer.attention),
        "weight_bytes": model.weight_bytes,
        "bytes": parts(model),
        "layer_kinds": [{"kind": kind, "count": count} for kind, count in _kinds(model).items()],
        "mtp_layers": sum(n for _, n in model.mtp_layers),
        "draft": None
        if model.draft is None
        else {
            "kind": model.draft.kind,
            "target_hidden": model.draft.target_hidden,
            "block": model.draft.block,
            "head_outputs": model.head.outputs,
        },
        "default_draft": draft,
        "warnings": list(model.warnings),
    }


def parts(model: Model) -> dict[str, float]:
    """Bytes in memory by part; they sum to `model.weight_bytes`."""
    found = dict.fromkeys(("attention", "experts", "shared_experts", "router", "dense_ffn", "norms_and_small"), 0.0)
    for layer, n in model.layers:
        found["attention"] += n * sum(p.bytes for p in layer.mixer)
        found["dense_ffn"] += n * sum(p.bytes for p in layer.ffn)
        found["norms_and_small"] += n * 2 * (layer.norm_parameters + layer.other_parameters)
        if layer.experts is not None:
            found["experts"] += n * layer.experts.count * layer.experts.bytes_each
            found["shared_experts"] += n * sum(p.bytes for p in layer.experts.shared)
            found["router"] += n * (layer.experts.router.bytes if layer.experts.router else 0)
    found["norms_and_small"] += 2 * model.final_norm_parameters
    found["head"] = 0.0 if model.tied else model.head.bytes
    found["draft"] = sum(p.bytes for p in model.draft_projections())
    found["other"] = model.other_bytes
    found["embedding"] = model.weight_bytes - sum(found.values())
    return found


def _kinds(model: Model) -> dict[str, int]:
    found: dict[str, int] = {}
    for layer, n in model.layers:
        found[layer.kind] = found.get(layer.kind, 0) + n
    return found


def stored(model: Model) -> str:
    """How weights are stored: the quantisation, or the format of a model without one."""
    return model.activation.name if model.quantisation == "none" else model.quantisation


def page(model: Model) -> Page:
    """The model as people see it."""
    d = describe(model, default_draft(model.name))
    yield Line(d["name"], "title")
    rows = [
        ("architecture", d["architecture"]),
        ("read from", d["source"]),
        ("parameters", f"{count(d['total_parameters'])}, {count(d['active_parameters'])} active a token"),
        ("shape", f"{d['layers']} layers, hidden {d['hidden']}, vocabulary {d['vocab']}"),
        ("layers", ", ".join(f"{k['count']} {k['kind']}" for k in d["layer_kinds"])),
        ("stored as", stored(model)),
        ("weights", size(d["weight_bytes"])),
        ("KV cache", f"{d['kv_bytes_per_token'] / 1e3:.1f} KB a token ({d['kv_format']})"),
    ]
    if d["experts"]:
        rows.insert(4, ("experts", f"{d['experts']}, {d['experts_per_token']} a token, {size(d['expert_bytes'])} each"))
    if d["state_bytes_per_sequence"]:
        rows.append(("state", f"{size(d['state_bytes_per_sequence'])} a sequence"))
    if d["mtp_layers"]:
        rows.append(("MTP", f"{d['mtp_layers']} built-in layers"))
    if d["draft"]:
        rows.append(("drafter", f"{d['draft']['kind']}, head of {d['draft']['head_outputs']} tokens"))
    if d["default_draft"]:
        rows.append(("usual drafter", d["default_draft"]))
    yield grid(("", "~"), rows)
    yield Line()
    shares = [
        (name.replace("_", " "), size(value), f"{100 * value / d['weight_bytes']:.1f} %")
        for name, value in d["bytes"].items()
        if value > 0
    ]
    yield grid(("part", ">bytes", ">share"), shares, "weights by part")


def count(parameters: float) -> str:
    return f"{parameters / 1e12:.2f} T" if parameters >= 1e12 else f"{parameters / 1e9:.1f} B"


def size(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value / 1e3:.1f} KB"
