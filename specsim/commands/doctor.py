"""specsim doctor"""

from __future__ import annotations

import click

from specsim.commands.common import console, json_option, print_json


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Check this box's health in seconds, measuring nothing more: what is wrong and what it costs.

    Clocks, power limits, throttling, GPUs of different kinds, peer access, PCIe generation and width, topology, ECC,
    MIG and other processes, as nvidia-smi tells them. Exit code 1 when a GPU is broken or there is none.

    \b
    Example:  specsim doctor --json
    """
    import sys

    from specsim.calibration import health

    found = health.collect()
    if as_json:
        print_json(found.document())
    else:
        out = console()
        for name, count in _kinds(found.gpus).items():
            out.print(f"{count} x {name}", soft_wrap=True, markup=False)
        if found.topology:
            links = ", ".join(f"{n} x {link}" for link, n in _count(found.topology.values()).items())
            out.print(f"links: {links}", soft_wrap=True, markup=False)
        for finding in found.findings:
            out.print(f"{finding.level:8}{finding.line}", soft_wrap=True, markup=False)
        if not any(f.level in ("error", "warning") for f in found.findings):
            out.print("healthy: nothing that costs speed was found")
    if any(f.level == "error" for f in found.findings):
        sys.exit(1)


def _kinds(gpus: list[dict[str, str]]) -> dict[str, int]:
    return _count(
        f"{g.get('name', '?')}, driver {g.get('driver_version', '?')}, {g.get('power.limit', '?')} W" for g in gpus
    )


def _count(values: object) -> dict[str, int]:
    from collections import Counter

    return dict(Counter(values))  # type: ignore[call-overload]
