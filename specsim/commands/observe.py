"""specsim observe"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specsim.commands.common import Meter, OutFolder, json_option, note, print_json, show

if TYPE_CHECKING:
    from specsim.records import Record


@click.command()
@click.argument("sources", nargs=-1, metavar="FILE|URL...")
@click.option("-o", "--output", type=OutFolder(), metavar="DIR", help="Write each record as JSON into this folder.")
@json_option
def command(sources: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Read what engines and tools leave behind: server logs, metrics, benchmark results, profiles.

    The format is found by content: logs of SGLang, vLLM and llama.cpp; /metrics and /get_server_info; bench_serving,
    bench_one_batch_server, bench_speculative, vllm bench serve, GuideLLM, llm-inference-bench; nccl-tests, nvbandwidth;
    torch profiler traces (gz too). Give a server's address to ask it; `-` reads standard input. An API key comes from
    the variable SPECSIM_API_KEY only and is never stored.

    \b
    Examples:
      specsim observe server.log
      specsim observe baseline.log speculative.log bench.jsonl -o records/
      specsim observe http://localhost:30000 --json
      specsim observe TP-0.trace.json.gz
    """
    from specsim.errors import InputError, SpecsimError
    from specsim.observations import contradictions, observe

    if not sources:
        raise InputError(
            "nothing to observe", where="FILE|URL", mend="give a log, a benchmark file, a trace or an address"
        )
    records: list[Record] = []
    problems: list[SpecsimError] = []
    with Meter("observe"):
        for source in sources:
            try:
                records += observe(source)
            except SpecsimError as problem:
                problems.append(problem)
    found = contradictions(records)
    if output is not None:
        _write(records, output)
    if as_json and records:
        print_json(
            {
                "schema": "specsim.observations/1",
                "records": [r.model_dump(by_alias=True, exclude_none=True) for r in records],
                "contradictions": found,
            }
        )
    elif records:
        from specsim.record_text import page

        show(page(records, found))
    for earlier in problems[:-1]:
        note(f"error: {earlier}")
    if problems:
        raise problems[-1]


def _write(records: Iterable[Record], folder: Path) -> None:
    from specsim.files import write_atomically

    used: set[str] = set()
    for record in records:
        stem = (
            re.sub(r"[^A-Za-z0-9._-]+", "-", f"{Path(record.source).name}-{record.name}").strip("-.")[:80] or "record"
        )
        name, count = stem, 1
        while name.lower() in used:
            count += 1
            name = f"{stem}-{count}"
        used.add(name.lower())
        path = folder / f"{name}.json"
        write_atomically(path, record.model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n")
        note(f"wrote {path}")
