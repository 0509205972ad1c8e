"""specsim report"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specsim.commands.common import SOURCE, OutFile, json_option, note, print_json
from specsim.commands.scenario import FILE, scenario_of, scenario_options, without_defaults


@click.command()
@scenario_options
@click.option("--from", "source", type=FILE, metavar=SOURCE, help="What a command printed with --json, or a profile (YAML), instead of a scenario.")  # fmt: skip
@click.option("-o", "--output", type=OutFile(), required=True, metavar="FILE.html", help="The file to write.")
@json_option
def command(source: Path | None, output: Path, as_json: bool, **options: Any) -> None:
    """Write a report: one HTML file with verdict, interactive charts, tables and the source of every number.

    It opens anywhere, without a network. Give a scenario, which is predicted, or --from with what predict, sweep, plan,
    simulate, validate --records, diagnose, calibrate, hardware show or hardware diff print with --json; or a hardware
    profile.

    \b
    Examples:
      specsim report --draft-tokens 3 --accept-rate 0.6 -o report.html
      specsim sweep --batch 1:64:x2 --draft-tokens 2:8 --accept-rate 0.3:0.9:0.1 \\
        --json > sweep.json
      specsim report --from sweep.json -o sweep.html
    """
    from specsim.errors import InputError
    from specsim.files import read_json, write_atomically
    from specsim.profiles import load_profile
    from specsim.report import report

    if output.suffix.lower() not in ("", ".html", ".htm"):
        raise InputError(f"{output.suffix} is no report", where="--output", mend="end the name in .html")
    if source is not None:
        options = without_defaults(options, lambda _: False)
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None and value != ()]
    if source is not None and given:
        raise InputError(f"the result has its own scenario, and {given[0]} another", where="--from", mend=f"leave {given[0]} out")  # fmt: skip
    if source is not None:
        profile = source.suffix.lower() in (".yaml", ".yml")
        text = report(load_profile(str(source)).document() if profile else read_json(source, "result"), str(source))
    else:
        from specsim.prediction import predict

        text = report(predict(scenario_of(options)).json())
    write_atomically(output, text)
    if as_json:
        print_json({"schema": "specsim.report/1", "report": str(output)})
    note(f"wrote {output}")
