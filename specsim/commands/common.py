"""What commands share: JSON output, tables and messages for people."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")


def print_json(document: Any) -> None:
    """Print one JSON document; NaN and infinity are a bug, so they raise."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def note(message: str) -> None:
    """A warning or progress line on standard error."""
    sys.stderr.write(f"{message}\n")


def console() -> Console:
    """A rich console on standard output: colour only on a terminal and without NO_COLOR; width 100 elsewhere.

    Text is printed as it is: names of models, boxes and files may hold what rich would take for markup or emoji.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else 100
    return Console(width=width, highlight=False, markup=False, emoji=False)
