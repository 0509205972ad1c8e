"""Memory of `simulate --trace` and `plan --trace` while a trace grows: it should be that of a block of rows, whatever the size.

    python benchmarks/huge_trace.py [--megabytes 20,200,2000] [--layouts azure,burstgpt,mooncake,azure.gz] [--folder /tmp]

For each layout a file of that size is written (uncompressed size for .gz), both commands read it in a process of their own, and
the file is removed. Peak resident memory is the operating system's figure for that process, the program itself included.
Requests are short, so that the time is that of reading. The compiled simulator needs numba, whose compiler takes 100 MB in the
first run on a machine: that run is made before anything is measured.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import TextIO

START = datetime(2024, 5, 10)
GAP_S = 0.05
SERVER = ["--model", "Llama-3.1-8B", "--hardware", "1x-h200", "--method", "none"]
COMMANDS = {"simulate": [], "plan": ["--tpot-ms", "30"]}


def azure(i: int) -> str:
    return f"{START + timedelta(seconds=i * GAP_S)},{100 + i % 900},{2 + i % 3}\n"


def burstgpt(i: int) -> str:
    return f"{i * GAP_S:.2f},ChatGPT,{100 + i % 900},{2 + i % 3},{102 + i % 900 + i % 3},Conversation log\n"


def mooncake(i: int) -> str:
    return f'{{"timestamp": {int(i * GAP_S * 1000)}, "input_length": {100 + i % 900}, "output_length": {2 + i % 3}, "hash_ids": [{i}, {i + 1}]}}\n'


LAYOUTS: dict[str, tuple[str, str, Callable[[int], str]]] = {
    "azure": (".csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", azure),
    "burstgpt": (".csv", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", burstgpt),
    "mooncake": (".jsonl", "", mooncake),
}


def write(file: TextIO, layout: str, size: float) -> int:
    """Write rows until the file has `size` bytes; returns how many."""
    _, head, row = LAYOUTS[layout]
    file.write(head)
    written, rows = len(head), 0
    while written < size:
        block = "".join(row(i) for i in range(rows, rows + 10_000))
        file.write(block)
        written, rows = written + len(block), rows + 10_000
    return rows


def measured(command: list[str]) -> tuple[float, float]:
    """(peak resident MB, seconds) of a command. Raises RuntimeError when it fails."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([sys.executable, "-m", "specsim", *command, "--json"], stdout=out, stderr=out)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 1):  # 1: no configuration keeps the targets
            out.seek(0)
            raise RuntimeError(out.read().decode()[-500:])
    return used.ru_maxrss * 1024 / 1e6, time.perf_counter() - begin


def rows(folder: Path, layout: str, megabytes: float) -> Iterator[str]:
    name, _, packed = layout.partition(".")
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        path = place / ("trace" + LAYOUTS[name][0] + (f".{packed}" if packed else ""))
        with gzip.open(path, "wt", compresslevel=1) if packed else path.open("w") as file:
            count = write(file, name, megabytes * 1e6)
        for command, more in COMMANDS.items():
            peak, took = measured([command, *SERVER, "--trace", str(path), *more])
            yield f"{layout:12} {megabytes:9,.0f} {count:12,} {command:9} {peak:8.0f} {took:8.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", default="20,200,2000")
    parser.add_argument("--layouts", default="azure,burstgpt,mooncake,azure.gz")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    print(f"{'layout':12} {'size MB':>9} {'requests':>12} {'command':9} {'peak MB':>8} {'seconds':>8}")
    measured(["simulate", *SERVER, "--num-requests", "2000", "--rate", "1"])  # compiles
    for layout in arguments.layouts.split(","):
        for size in arguments.megabytes.split(","):
            for line in rows(arguments.folder, layout, float(size)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
