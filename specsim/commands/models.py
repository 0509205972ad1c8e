"""`specsim models`: the presets, and any model as specsim reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import console, json_option, note, print_json
from specsim.configs import default_draft, list_presets, load_model

if TYPE_CHECKING:
    from specsim.models import Model


@click.group("models")
def command() -> None:
    """List and show models as specsim reads them.

    \b
    Example:  specsim models list
              specsim models show Kimi-K2.5
              specsim models show path/to/config.json --json
    """


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the models that ship with specsim, and their drafters.

    \b
    Example:  specsim models list --json
    """
    rows = [(preset, load_model(preset.name)) for preset in list_presets()]
    if as_json:
        print_json(
            {
                "schema": "specsim.models/1",
                "models": [
                    {
                        "name": preset.name,
                        "hf_id": preset.hf_id or None,
                        "role": preset.role,
                        "kind": model.draft.kind if model.draft else "model",
                        "total_parameters": model.total_parameters,
                        "active_parameters": model.active_parameters,
                        "quantisation": model.quantisation,
                        "drafts": list(preset.drafts),
                        "mtp": preset.mtp,
                        "source": preset.source,
                    }
                    for preset, model in rows
                ],
            }
        )
        return
    from rich.table import Table

    for role, title in (("target", "Targets"), ("draft", "Drafters")):
        table = Table(title=title, title_justify="left")
        for heading, justify in (("model", "left"), ("total", "right"), ("active", "right"), ("weights", "right"),
                                 ("stored as", "left"), ("drafters" if role == "target" else "kind", "left")):  # fmt: skip
            table.add_column(heading, justify="right" if justify == "right" else "left")
        for preset, model in rows:
            if preset.role == role:
                own = [*preset.drafts, *(["MTP (built in)"] if preset.mtp else [])]
                last = ", ".join(own) or "-" if role == "target" else model.draft.kind if model.draft else "model"
                table.add_row(preset.name, _count(model.total_parameters), _count(model.active_parameters),
                              _bytes(model.weight_bytes), model.quantisation, last)  # fmt: skip
        console().print(table)


@command.command("show")
@click.argument("model")
@json_option
def show_command(model: str, as_json: bool) -> None:
    """Show a model as specsim reads it. MODEL is a preset's name, a folder with config.json, or a config file.

    \b
    Example:  specsim models show Kimi-K2.5 --json
    """
    found = load_model(model)
    document = describe(found, default_draft(model))
    if as_json:
        print_json(document)
    else:
        _print(document)
    for warning in found.warnings:
        note(f"warning: {warning}")


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


def _print(document: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    table = Table(show_header=False, box=None, title=document["name"], title_justify="left")
    rows = [
        ("architecture", document["architecture"]),
        ("read from", document["source"]),
        (
            "parameters",
            f"{_count(document['total_parameters'])}, {_count(document['active_parameters'])} active a token",
        ),
        ("shape", f"{document['layers']} layers, hidden {document['hidden']}, vocabulary {document['vocab']}"),
        ("layers", ", ".join(f"{k['count']} {k['kind']}" for k in document["layer_kinds"])),
        ("stored as", document["quantisation"]),
        ("weights", _bytes(document["weight_bytes"])),
        ("KV cache", f"{document['kv_bytes_per_token'] / 1e3:.1f} KB a token ({document['kv_format']})"),
    ]
    if document["experts"]:
        each = _bytes(document["expert_bytes"])
        rows.insert(4, ("experts", f"{document['experts']}, {document['experts_per_token']} a token, {each} each"))
    if document["state_bytes_per_sequence"]:
        rows.append(("state", f"{_bytes(document['state_bytes_per_sequence'])} a sequence"))
    if document["mtp_layers"]:
        rows.append(("MTP", f"{document['mtp_layers']} built-in layers"))
    if document["draft"]:
        rows.append(("drafter", f"{document['draft']['kind']}, head of {document['draft']['head_outputs']} tokens"))
    if document["default_draft"]:
        rows.append(("usual drafter", document["default_draft"]))
    for name, value in rows:
        table.add_row(name, str(value))
    out.print(table)
    shares = Table(title="Weights by part", title_justify="left")
    shares.add_column("part")
    shares.add_column("bytes", justify="right")
    shares.add_column("share", justify="right")
    for name, value in document["bytes"].items():
        if value > 0:
            shares.add_row(name.replace("_", " "), _bytes(value), f"{100 * value / document['weight_bytes']:.1f} %")
    out.print(shares)


def _count(parameters: float) -> str:
    return f"{parameters / 1e12:.2f} T" if parameters >= 1e12 else f"{parameters / 1e9:.1f} B"


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value / 1e3:.1f} KB"
