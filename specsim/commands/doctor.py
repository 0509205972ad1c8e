"""specsim doctor"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from specsim.commands.common import json_option, print_json, show
from specsim.pages import Line, Page, Style

if TYPE_CHECKING:
    from specsim.calibration.health import Health

STYLES: dict[str, Style] = {"error": "alarm", "warning": "warning"}


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Check this box's health in seconds, measuring nothing more: what is wrong and what it costs.

    Clocks, power limits, throttling, GPUs of different kinds, peer access, PCIe generation and width, topology, ECC,
    MIG and other processes, as nvidia-smi tells them; whether the host's cores run at one speed; with PyTorch also
    whether GPUs read each other's memory right.
    Exit code 1 when a GPU is broken or there is none.

    \b
    Example:  specsim doctor --json
    """
    import sys

    from specsim.calibration import health

    found = health.collect(peers=True, cores=True)
    if as_json:
        print_json(found.document())
    else:
        show(_page(found))
    if any(f.level == "error" for f in found.findings):
        sys.exit(1)


def _page(found: Health) -> Page:
    for name, count in _kinds(found.gpus).items():
        yield Line(f"{count} x {name}", "title")
    if found.topology:
        yield Line("links: " + ", ".join(f"{n} x {link}" for link, n in _count(found.topology.values()).items()))
    for finding in found.findings:
        yield Line(f"{finding.level}: {finding.line}", STYLES.get(finding.level, ""))
    if not any(f.level in ("error", "warning") for f in found.findings):
        yield Line("healthy: nothing that costs speed was found")


def _kinds(gpus: list[dict[str, str]]) -> dict[str, int]:
    return _count(
        f"{g.get('name', '?')}, driver {g.get('driver_version', '?')}, {g.get('power.limit', '?')} W" for g in gpus
    )


def _count(values: object) -> dict[str, int]:
    from collections import Counter

    return dict(Counter(values))  # type: ignore[call-overload]
