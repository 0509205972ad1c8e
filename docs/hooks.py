"""What mkdocs does for this site beyond its plugins: formulas as MathML, and the reference from `--help` and docstrings.

Both are made while building, so the site needs no script for them. A page that would load anything from another host
fails the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

import specsim
from specsim.cli import group


def _formula(source: str, *_: Any, **__: Any) -> str:
    """A ```math fence as MathML, which browsers render without a script."""
    return f'<div class="formula">{convert(source, display="block")}</div>'


def on_config(config: Any) -> Any:
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "formula", "format": _formula})
    return config


def _help(name: str, command: click.Command, parent: click.Context, depth: int) -> str:
    context = command.context_class(command, info_name=name, parent=parent)
    text = f"{'#' * depth} {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n\n"
    if isinstance(command, click.Group):
        text += _helps(command, context, depth + 1)
    return text


def _helps(of: click.Group, context: click.Context, depth: int) -> str:
    found = [(name, of.get_command(context, name)) for name in of.list_commands(context)]
    return "".join(_help(name, command, context, depth) for name, command in found if command is not None)


def _names() -> str:
    """A block of mkdocstrings for each public name, under the name that `import specsim` gives it."""
    found = []
    for name in specsim.__all__:
        value = getattr(specsim, name)
        found.append(f'::: {value.__module__}.{value.__qualname__}\n    options: {{heading: "specsim.{name}"}}')
    return "\n\n".join(found)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The reference pages hold a line `::: help` or `::: names` where what is generated goes."""
    if page.file.src_uri == "reference/commands.md":
        every = _helps(group, group.context_class(group, info_name="specsim"), 2)
        return markdown.replace("\n::: help\n", f"\n{every}\n")
    if page.file.src_uri == "reference/python.md":
        return markdown.replace("\n::: names\n", f"\n{_names()}\n")
    return markdown


LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(https?:)?//[^>]*>|<link\b(?![^>]*canonical)[^>]*\bhref=[\"']?(https?:)?//[^>]*>"
)


def on_post_build(config: Any, **_: Any) -> None:
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        if found := LOADED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.name} loads from another host: {found[0]}")
