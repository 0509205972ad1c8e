"""What commands share: JSON output, tables and messages for people."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.pages import Page

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")


def print_json(document: Any) -> None:
    """Print one JSON document; NaN and infinity are a bug, so they raise."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def note(message: str) -> None:
    """A warning or progress line on standard error."""
    sys.stderr.write(f"{message}\n")


def show(page: Page) -> None:
    """Print a page: on a terminal as wide as it is, with colours unless NO_COLOR or TERM=dumb; elsewhere tables have 80
    columns, a paragraph is one line, and nothing depends on the surroundings."""
    from specsim.pages import WIDTH, text

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else WIDTH
    sys.stdout.write(text(page, width, wrap=terminal, styled=terminal and colours()))


def colours() -> bool:
    """Whether a terminal gets colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def console() -> Console:
    """A rich console on standard output: colour only on a terminal and without NO_COLOR; width 100 elsewhere.

    Text is printed as it is: names of models, boxes and files may hold what rich would take for markup or emoji.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else 100
    return Console(width=width, highlight=False, markup=False, emoji=False)
