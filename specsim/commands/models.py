"""`specsim models`: the presets, and any model as specsim reads it."""

from __future__ import annotations

import click

from specsim.commands.common import Group, json_option, note, print_json, show
from specsim.commands.scenario import MODEL
from specsim.configs import default_draft, list_presets, load_model
from specsim.model_text import count, describe, page, size, stored
from specsim.pages import Grid, Line, grid


@click.group("models", cls=Group, usual="list")
def command() -> None:
    """List and show models as specsim reads them; alone it lists.

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
    parts: list[Line | Grid] = []
    for role, title in (("target", "Targets"), ("draft", "Drafters")):
        shown = []
        for preset, model in rows:
            if preset.role == role:
                own = [*preset.drafts, *(["MTP (built in)"] if preset.mtp else [])]
                last = ", ".join(own) or "-" if role == "target" else model.draft.kind if model.draft else "model"
                sizes = (count(model.total_parameters), count(model.active_parameters), size(model.weight_bytes))
                shown.append((preset.name, *sizes, stored(model), last))
        heads = ("model", ">total", ">active", ">weights", "stored as", "~drafters" if role == "target" else "kind")
        parts += [Line(title, "title"), grid(heads, shown), Line()]
    show(parts[:-1])


@command.command("show")
@click.argument("model", type=MODEL)
@json_option
def show_command(model: str, as_json: bool) -> None:
    """Show a model as specsim reads it. MODEL is a preset's name, a folder with config.json, or a config file.

    \b
    Example:  specsim models show Kimi-K2.5 --json
    """
    found = load_model(model)
    if as_json:
        print_json(describe(found, default_draft(model)))
    else:
        show(page(found))
    for warning in found.warnings:
        note(f"warning: {warning}")
