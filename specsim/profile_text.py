"""A hardware profile for people: every number with its source and uncertainty."""

from __future__ import annotations

from typing import Any

from specsim.pages import Line, Page, grid
from specsim.profiles import Profile, latency_us

SIZES = (4096, 14336, 43008, 65536, 2**20)  # bytes at which an all-reduce curve is shown


def page(profile: Profile) -> Page:
    """The profile as people see it."""
    references = _References()
    g = profile.gpu
    yield Line(f"{profile.name}: {profile.description}", "title")
    facts = [f"{profile.gpus} x {g.name}", f"link {profile.link}", f"{g.memory_gb:g} GB", f"{g.bandwidth_gb_s:g} GB/s"]
    facts += [f"{g.bf16_tflops:g} TFLOPS bf16"] + ([f"L2 {g.l2_mb:g} MB"] if g.l2_mb else [])
    yield Line(f"{', '.join(facts)} ({references.mark(g)})")
    yield Line()
    rates = [
        (name, f"{r.fixed_us:g}", f"{r.inner_ns:g}" if r.inner_ns else "", f"{r.bandwidth_gb_s:g}", f"{r.peak_tflops:g}" if r.peak_tflops else "", *references.cells(r))
        for name, r in profile.operators.items()
    ]  # fmt: skip
    yield grid(("operator class", ">fixed us", ">inner ns", ">GB/s", ">TFLOPS", ">+-", "source"), rates)
    if profile.allreduce:
        curves = []
        for c in profile.allreduce:
            times = (latency_us(c, b) for b in SIZES)
            cells = (f"{t:.3g}" if t else "" for t in times)
            curves.append((c.implementation, str(c.ranks), c.mode, *cells, *references.cells(c)))
        yield Line()
        heads = ("all-reduce, us", ">ranks", "mode", *(f">{size(b)}" for b in SIZES), ">+-", "source")
        yield grid(heads, curves, keys=3)
    groups = [("launch", profile.launch), *((f"engine {name}", terms) for name, terms in profile.engines.items())]
    terms = [
        (f"{label} {field[:-3]}", f"{value:g}", *references.cells(group, field))
        for label, group in groups
        for field, value in group
        if isinstance(value, float) and field.endswith("_us")
    ]
    yield Line()
    yield grid(("host and engine", ">us", ">+-", "source"), terms)
    if (host := profile.host) is not None:
        slow = f"{host.slow_share:.0%} of the time {host.slow_ratio:g} times as slow, {host.slowdown():.2f} on average"
        yield Line(
            f"cores of the host: {slow} (+- {host.relative_uncertainty:.0%} of what is beyond 1, {references.mark(host)})"
        )
    yield Line()
    yield from (Line(line, "faint") for line in references.lines())
    yield from (Line(f"caveat: {caveat}", "warning") for caveat in profile.caveats)


class _References:
    """Numbers the sources of a profile, so that a table names each by kind and number."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str, str], int] = {}

    def mark(self, group: Any) -> str:
        key = (group.source.kind, group.source.reference, group.source.date)
        return f"{group.source.kind} {self.known.setdefault(key, len(self.known) + 1)}"

    def cells(self, group: Any, field: str = "") -> tuple[str, str]:
        return f"{group.uncertainty(field):.0%}", self.mark(group)

    def lines(self) -> list[str]:
        return [f"{number}: {kind}, {reference}, {date}" for (kind, reference, date), number in self.known.items()]


def size(size: int) -> str:
    """Bytes as people say them."""
    return f"{size / 2**20:g} MB" if size >= 2**20 else f"{size / 1024:g} KB"
