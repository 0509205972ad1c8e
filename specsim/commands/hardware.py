"""specsim hardware"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import json_option, note, print_json, show
from specsim.pages import Line, grid

if TYPE_CHECKING:
    from specsim.profiles import AllReduceCurve, Profile

NOTES = 20  # of an import, printed at most
TABLES = "aiconfigurator:"  # prefix of a system whose tables are imported

plot_option = click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw the all-reduce curves (png, svg, pdf)."
)


@click.group()
def command() -> None:
    """List, show, compare and import hardware profiles.

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
@click.argument("name")
@plot_option
@json_option
def show_command(name: str, plot: Path | None, as_json: bool) -> None:
    """Show a profile: every number with its source and uncertainty. NAME is a shipped profile or a YAML file.

    \b
    Example:  specsim hardware show 8x-rtx-pro-6000
    """
    from specsim.profiles import load_profile

    profile = load_profile(name)
    if plot:
        draw([profile], plot)
    if as_json:
        print_json(profile.model_dump(mode="json", by_alias=True, exclude_none=True))
        return
    show(profile.page())


@command.command("diff")
@click.argument("a")
@click.argument("b")
@plot_option
@json_option
def diff_command(a: str, b: str, plot: Path | None, as_json: bool) -> None:
    """Compare two profiles, number by number. The last column is B relative to A.

    \b
    Example:  specsim hardware diff 8x-rtx-pro-6000 8x-pcie-field
    """
    from specsim.profiles import diff, load_profile

    one, other = load_profile(a), load_profile(b)
    found = diff(one, other)
    if plot:
        draw([one, other], plot)
    if as_json:
        rows = [{"key": d.key, "a": d.a, "b": d.b, "relative": d.relative} for d in found]
        curves = [{"name": p.name, "allreduce": [c.model_dump(mode="json") for c in p.allreduce]} for p in (one, other)]
        print_json(
            {
                "schema": "specsim.hardware-diff/1",
                "a": one.name,
                "b": other.name,
                "differences": rows,
                "allreduce": curves,
            }
        )
        return
    if not found:
        show([Line(f"{one.name} and {other.name} hold the same numbers")])
        return
    shown = [(d.key, _number(d.a), _number(d.b), "" if d.relative is None else f"{d.relative:+.1%}") for d in found]
    show([grid(("number", f">{one.name}", f">{other.name}", ">relative"), shown)])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@command.command("import")
@click.argument("what", metavar=f"FILE|{TABLES}SYSTEM")
@click.option("--into", help="Profile that takes the numbers: a name or a YAML file.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; its name becomes the profile's.")
@click.option("--date", default=None, help="Date of the measurement, YYYY-MM-DD; today by default.")
@click.option("--reference", default=None, help="Where the numbers are from, kept as their source.")
@click.option("--implementation", default="nccl", show_default=True, help="Name of the all-reduce that was measured.")
@click.option("--l2-mb", type=click.FloatRange(1, 1000), help="L2 cache of the GPU in MB, for tables without --into.")
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
        text.append(f"all-reduce over {curve.ranks} ranks at {len(curve.bytes)} sizes")
        known = [(size, latency_us(curve, size)) for size in SIZES]
        text += [f"{time:.3g} us at {size:,} B" for size, time in known if time]
    text += [f"{name} {value}" for name, value in readings.figures.items()]
    summary = {
        "tool": readings.tool,
        "text": "; ".join(text),
        "allreduce": [curve.model_dump(mode="json") for curve in curves],
        "figures": readings.figures,
        "notes": [*opened.caveats, *readings.notes],
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
    text = f"{kinds.count('published')} of {len(kinds)} operator classes from tables, {len(profile.allreduce)} curves"
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

    if into and output is None and not Path(into).is_file():
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


# --- plot ---------------------------------------------------------------------------------------------------------


def draw(profiles: list[Profile], path: Path) -> None:
    """The all-reduce curves of the profiles at their largest rank count, on one log-log chart."""
    from specsim.errors import InputError, WorkError

    curves = [(p, c) for p in profiles for c in _widest(p)]
    if not curves:
        names = ", ".join(p.name for p in profiles)
        raise InputError(
            f"{names}: no all-reduce curve to draw", where="--plot", mend="choose a profile of several GPUs"
        )
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for p, c in curves:
        style = "--" if c.mode == "eager" else "-"
        marker = "o" if p is profiles[0] else "s"
        label = f"{p.name}: {c.implementation}, {c.ranks} ranks, {c.mode} ({c.source.kind})"
        axes.plot(c.bytes, c.latency_us, style, marker=marker, markersize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="message (bytes a rank)", ylabel="all-reduce latency (us)")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
    try:
        figure.savefig(path)
    except ValueError:
        raise InputError(
            f"{path.suffix or 'no suffix'} is no picture format", where="--plot", mend="use .png, .svg or .pdf"
        ) from None
    except OSError as error:
        raise WorkError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        plt.close(figure)
    note(f"wrote {path}")


def _widest(profile: Profile) -> list[AllReduceCurve]:
    ranks = max((c.ranks for c in profile.allreduce), default=0)
    return [c for c in profile.allreduce if c.ranks == ranks]
