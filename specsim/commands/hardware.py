"""specsim hardware"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import (
    Group,
    OutFile,
    Percent,
    draw,
    json_option,
    note,
    plot_option,
    print_json,
    print_result,
    show,
)
from specsim.commands.scenario import HARDWARE, says, scenario_of, scenario_options
from specsim.pages import Grid, Line, grid
from specsim.quantities import counted

if TYPE_CHECKING:
    from specsim.profiles import Profile

NOTES = 20  # of an import, printed at most
TABLES = "aiconfigurator:"  # prefix of a system whose tables are imported


@click.group(cls=Group, usual="list")
def command() -> None:
    """List, show, compare and import hardware profiles; alone it lists.

    \b
    Examples:
      specsim hardware show 8x-rtx-pro-6000
      specsim hardware diff 8x-rtx-pro-6000 8x-pcie-field --plot curves.png
      specsim hardware import all_reduce.txt --into 8x-rtx-pro-6000 -o mybox.yaml
    """


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the shipped profiles.

    \b
    Example:  specsim hardware list
    """
    from specsim.profiles import list_profiles, load_profile

    profiles = [load_profile(name) for name in list_profiles()]
    if as_json:
        listed = [
            {"name": p.name, "gpus": p.gpus, "gpu": p.gpu.name, "link": p.link, "description": p.description}
            for p in profiles
        ]
        print_json({"schema": "specsim.hardware-list/1", "profiles": listed})
        return
    rows = [(p.name, str(p.gpus), p.gpu.name, p.link, p.description) for p in profiles]
    show([grid(("profile", ">GPUs", "~GPU", "link", "~description"), rows)])


@command.command("show")
@click.argument("name", type=HARDWARE)
@plot_option("the all-reduce curves")
@json_option
def show_command(name: str, plot: Path | None, as_json: bool) -> None:
    """Show a profile: every number with its source and uncertainty. NAME is a shipped profile or a YAML file.

    \b
    Example:  specsim hardware show 8x-rtx-pro-6000
    """
    from specsim.profiles import load_profile

    profile = load_profile(name)
    if plot is not None or as_json:
        document = profile.document()
        draw(document, plot)
    if as_json:
        print_json(document)
        return
    show(profile.page())


@command.command("diff")
@click.argument("profiles", type=HARDWARE, nargs=-1, required=True)
@click.option(
    "--within",
    type=Percent(),
    help="With a scenario: exit code 1 when a number that matters differs by more, such as 3%.",
)
@plot_option("the all-reduce curves")
@says(hardware="Profile that the scenario is built on; default the first of those compared.")
@scenario_options
@json_option
def diff_command(
    profiles: tuple[str, ...], within: float | None, plot: Path | None, as_json: bool, **options: Any
) -> None:
    """Compare profiles, number by number; the others relative to the first.

    With options of a scenario, the numbers of two profiles that matter to its steps: which part of the decode step, or of
    the speculative cycle, hangs on each. Two calibrations of one box should agree within 3 % where a number makes more
    than 5 % of a step.

    \b
    Examples:
      specsim hardware diff 8x-rtx-pro-6000 8x-pcie-field
      specsim hardware diff 2x-h200 2x-h200-no-p2p 8x-h200 --plot curves.png
      specsim hardware diff monday.yaml friday.yaml --model Llama-3.1-8B \\
        --batch 8 --within 3%
    """
    from specsim.errors import InputError
    from specsim.profiles import load_profile

    weighed = any(value is not None and value != () for value in options.values())
    if len(profiles) < 2 or (weighed and len(profiles) > 2):
        raise InputError(f"{len(profiles)} given", where="diff", mend="give two profiles, or more without a scenario")
    if within is not None and not weighed:
        raise InputError("needs a scenario", where="--within", mend="such as --model Llama-3.1-8B --batch 8")
    loaded = [load_profile(name) for name in profiles]
    draw({"schema": "specsim.hardware-diff/1", "allreduce": _curves(loaded)}, plot)
    if weighed:
        _diff_weighed(profiles, loaded[0], loaded[1], options, within, as_json)
    else:
        _diff_plain(profiles, loaded, as_json)


def _curves(profiles: list[Profile]) -> list[dict[str, Any]]:
    """All-reduce curves of profiles, as the document of a diff has them."""
    return [{"name": p.name, "allreduce": [c.model_dump(mode="json") for c in p.allreduce]} for p in profiles]


def _diff_plain(given: tuple[str, ...], profiles: list[Profile], as_json: bool) -> None:
    from specsim.profiles import diff
    from specsim.provenance import sources_of_profile

    first, *others = profiles
    found = [diff(first, other) for other in others]
    if as_json:
        rows = [[{"key": d.key, "a": d.a, "b": d.b, "relative": d.relative} for d in one] for one in found]
        document = {"schema": "specsim.hardware-diff/1", "a": first.name, "b": others[0].name, "differences": rows[0]}
        more = [{"b": other.name, "differences": row} for other, row in zip(others[1:], rows[1:], strict=True)]
        sources = [source for p in profiles for source in sources_of_profile(p)]
        print_result(
            {**document, **({"more": more} if more else {}), "allreduce": _curves(profiles), "sources": sources}
        )
        return
    if not any(found):
        show([Line(f"{', '.join(given)} hold the same numbers")])
        return
    numbers = [{d.key: d for d in one} for one in found]
    label, *labels = _labels(given, profiles)
    heads = ["number", f">{label}"]
    for other in labels:
        heads += [f">{other}", ">relative"]
    rows_shown = []
    for key in dict.fromkeys(key for one in numbers for key in one):
        here = next((one[key].a for one in numbers if key in one), None)
        cells = [key, _number(here)]
        for one in numbers:
            d = one.get(key)
            cells += ["=", ""] if d is None else [_number(d.b), "" if d.relative is None else f"{d.relative:+.1%}"]
        rows_shown.append(cells)
    show([grid(heads, rows_shown)])


def _diff_weighed(
    given: tuple[str, ...], a: Profile, b: Profile, options: dict[str, Any], within: float | None, as_json: bool
) -> None:
    import sys
    from dataclasses import replace

    from specsim.agreement import MATTERS, steps, weigh
    from specsim.prediction import predict
    from specsim.provenance import sources_of_all

    scenario = scenario_of({**options, "hardware": options["hardware"] or given[0]})
    found = weigh(a, b, scenario)
    weighty = [w for w in found if w.matters]
    before, after = steps(scenario, a), steps(scenario, b)
    missing = [w.key for w in weighty if w.relative is None]
    worst = max((abs(w.relative) for w in weighty if w.relative is not None), default=0.0)
    apart = [] if within is None else [w.key for w in weighty if w.relative is not None and abs(w.relative) > within]
    agree = None if within is None else not (apart or missing)
    if as_json:
        listed = [
            {
                "key": w.key,
                "a": w.a,
                "b": w.b,
                "relative": w.relative,
                "part": w.part,
                "effect": w.effect,
                "matters": w.matters,
            }
            for w in found
        ]
        document = {
            "schema": "specsim.hardware-agreement/1", "a": a.name, "b": b.name, "numbers": listed, "worst": worst,
            "missing": missing, "step_ms": {"a": [1e3 * t for t in before], "b": [1e3 * t for t in after]},
            "within": within, "agree": agree,
            "scenario": predict(scenario).json()["scenario"],
            "sources": sources_of_all([scenario, replace(scenario, profile=b)]),
        }  # fmt: skip
        print_result(document)
    else:
        rows = [
            (w.key.removeprefix("operators."), _number(w.a), _number(w.b), "" if w.relative is None else f"{w.relative:+.1%}", f"{abs(w.part):.0%}",
             "" if w.effect is None else f"{w.effect:+.2%}")
            for w in found if abs(w.part) >= 0.01
        ]  # fmt: skip
        page: list[Line | Grid] = [
            grid(("number", *(f">{name}" for name in _labels(given, [a, b])), ">relative", ">part", ">effect"), rows)
        ]
        names = ("decode step", "cycle")
        moved = ", ".join(
            f"{name} {x * 1e3:.3f} and {y * 1e3:.3f} ms ({y / x - 1:+.1%})"
            for name, x, y in zip(names, before, after, strict=False)
        )
        page += [Line(), Line(f"GPU time: {moved}")]
        limit = "" if within is None else f", {'more than' if apart else 'within'} {100 * within:.3g}%"
        said = f"{counted(len(weighty), 'number')} of more than {MATTERS:.0%} of a step; they differ by at most {worst:.1%}{limit}"
        page.append(Line(said + (f": {', '.join(apart)}" if apart else ""), "verdict"))
        page += [Line(f"{key}: {given[1]} has none", "warning") for key in missing]
        show(page)
    if agree is False:
        sys.exit(1)


def _labels(given: tuple[str, ...], profiles: list[Profile]) -> tuple[str, ...]:
    """What tells profiles apart: their names, those of their files where names are alike, or a, b, ..."""
    for names in ([p.name for p in profiles], [Path(path).stem for path in given]):
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple("abcdefghijklmnopqrstuvwxyz"[i % 26] for i in range(len(given)))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@command.command("import")
@click.argument("what", metavar=f"FILE|{TABLES}SYSTEM")
@click.option(
    "--into", type=HARDWARE, metavar="NAME|FILE", help="Profile that takes the numbers: a name or a YAML file."
)
@click.option("-o", "--output", type=OutFile(), metavar="FILE", help="File to write; its name becomes the profile's.")
@click.option("--date", default=None, metavar="YYYY-MM-DD", help="Date of the measurement; default today.")
@click.option(
    "--reference",
    default=None,
    metavar="TEXT",
    help="Where the numbers are from, kept as their source; default the file's name.",
)
@click.option(
    "--implementation", default="nccl", metavar="NAME", help="Name of the all-reduce that was measured; default nccl."
)
@click.option(
    "--l2-mb",
    type=click.FloatRange(1, 1000),
    metavar="MB",
    help="L2 cache of the GPU in MB, for tables without --into.",
)
@json_option
def import_command(what: str, into: str | None, output: Path | None, as_json: bool, **options: Any) -> None:
    """Import measurements into a profile. Read are the output of nccl-tests, nvbandwidth or p2pBandwidthLatencyTest, and
    operator tables.

    aiconfigurator:SYSTEM fits the Parquet tables of an installed aiconfigurator package (pip install aiconfigurator).

    \b
    Examples:
      specsim hardware import all_reduce.txt --into 8x-rtx-pro-6000 -o mybox.yaml
      specsim hardware import aiconfigurator:h200_sxm -o h200.yaml
    """
    from specsim.files import write_atomically
    from specsim.profiles import dump_profile

    date = options["date"] or datetime.date.today().isoformat()
    _check_options(options)
    _check_target(into, output)
    if output and not into and not what.lower().startswith(TABLES):
        from specsim.errors import InputError

        raise InputError("a measurement fills no whole profile", where="-o", mend="give --into PROFILE beside it")
    profile, summary = _import(what, into, date, options)
    target = output or (Path(into) if into else None)
    for text in summary["notes"][:NOTES]:
        note(f"note: {text}")
    if len(summary["notes"]) > NOTES:
        note(f"note: and {len(summary['notes']) - NOTES} more like these")
    if profile and target:
        if output and output.stem != profile.name:
            profile = _renamed(profile, output.stem)
        write_atomically(target, dump_profile(profile))
    if as_json:
        print_json(
            {"schema": "specsim.hardware-import/1", "written": str(target) if profile and target else None, **summary}
        )
    elif profile and target:
        show([Line(f"wrote {target}: {summary['text']}")])
    elif profile:
        click.echo(dump_profile(profile), nl=False)
    else:
        show([Line(summary["text"])])


def _import(what: str, into: str | None, date: str, options: dict[str, Any]) -> tuple[Profile | None, dict[str, Any]]:
    """The profile that results, None when there is none to put the numbers in, and what was read."""
    from specsim.profile_text import SIZES
    from specsim.profiles import latency_us, load_profile

    base = load_profile(into) if into else None
    if what.lower().startswith(TABLES):
        return _import_tables(what[len(TABLES) :], base, date, options)
    from specsim.importers import default_source, into_profile, read_tool
    from specsim.observe_read import open_sources

    opened = open_sources(what)[0]
    readings = read_tool(opened.text(), opened.name)
    source = default_source(readings, opened.name, date)
    if options["reference"]:
        source = source.model_copy(update={"reference": options["reference"]})
    curves = readings.curves(source, options["implementation"])
    text = [readings.tool]
    for curve in curves:
        text.append(f"all-reduce over {counted(curve.ranks, 'rank')} at {counted(len(curve.bytes), 'size')}")
        known = [(size, latency_us(curve, size)) for size in SIZES]
        text += [f"{time:.3g} us at {size:,} B" for size, time in known if time]
    text += [f"{name} {value}" for name, value in readings.figures.items()]
    notes = [*opened.caveats, *readings.notes]
    if base is not None and base.gpu.is_other_than(readings.device):
        notes.append(f"measured on {readings.device}, put into a profile of {base.gpu.name}")
    summary = {
        "tool": readings.tool,
        "text": "; ".join(text),
        "allreduce": [curve.model_dump(mode="json") for curve in curves],
        "figures": readings.figures,
        "notes": notes,
    }
    if base is None:
        return None, summary
    return into_profile(base, readings, source, options["implementation"]), summary


def _import_tables(
    system: str, base: Profile | None, date: str, options: dict[str, Any]
) -> tuple[Profile, dict[str, Any]]:
    from specsim.derive import from_tables
    from specsim.tables import PACKAGE, release

    l2_mb = base.gpu.l2_mb if base else options["l2_mb"]
    profile, notes = from_tables(system, l2_mb=l2_mb, date=date, reference=options["reference"] or release())
    if base is not None:
        fitted = {name: rate for name, rate in profile.operators.items() if rate.source.kind == "published"}
        curves = {(c.implementation, c.ranks, c.mode): c for c in base.allreduce}
        curves |= {(c.implementation, c.ranks, c.mode): c for c in profile.allreduce if c.ranks <= base.gpus}
        changes = {"operators": base.operators | fitted, "allreduce": [curves[key] for key in sorted(curves)]}
        profile = base.model_copy(update=changes)
    kinds = [rate.source.kind for rate in profile.operators.values()]
    text = f"{kinds.count('published')} of {len(kinds)} operator classes from tables, {counted(len(profile.allreduce), 'curve')}"
    return profile, {"tool": PACKAGE, "text": text, "notes": notes}


def _check_options(options: dict[str, Any]) -> None:
    """What goes into the profile as it is given must be what a profile may hold."""
    import re

    from specsim.errors import InputError

    if options["date"] and not re.fullmatch(r"\d{4}(-\d{2}(-\d{2})?)?", options["date"]):
        raise InputError(f"{options['date']!r} is no date", where="--date", mend="such as 2026-08-01")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", options["implementation"]):
        mend = "small letters, digits and hyphens, such as nccl-ll"
        raise InputError(
            f"{options['implementation']!r} cannot name an all-reduce", where="--implementation", mend=mend
        )
    if options["reference"] is not None and len(options["reference"].strip()) < 3:
        raise InputError("is too short to find the numbers again", where="--reference", mend="name the source")


def _check_target(into: str | None, output: Path | None) -> None:
    """A shipped profile is never changed in place."""
    from specsim.errors import InputError
    from specsim.profiles import load_profile

    if into and output is None and not Path(into).exists():
        load_profile(into)  # no name of one is told first
        raise InputError(f"{into!r} is a shipped profile", where="--into", mend="give -o FILE for the result")


def _renamed(profile: Profile, name: str) -> Profile:
    from specsim.errors import InputError
    from specsim.profiles import Profile as Model

    try:
        return Model.model_validate({**profile.model_dump(by_alias=True), "name": name})
    except ValueError:
        raise InputError(
            f"{name!r} cannot be a profile's name", where="-o", mend="use letters, digits, . _ -"
        ) from None
