"""The commands that README.md and docs/ show: found, run in order, and compared with the output shown.

A command stands in a fence:

    ```sh                      its lines that start with `specsim` are run
    ```console                 after "$ "; what follows is compared, "..." stands for anything
    ```sh title="needs ..."    NOT_RUN below: shown to the reader; only the options are checked
    ```sh title="exit code 1"  any fence with a title of this kind: the code is expected
    ```log title="server.log"  a file: written before the commands that follow
    ```

Every page runs in a folder of its own, with the files of FILES that it names. `python tests/pages.py` (`make examples`)
renews the outputs shown.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from specsim.cli import group, main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "validation" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Titles of fences whose commands are not run here.
NOT_RUN = {
    "needs a GPU",
    "needs a GPU and SGLang",
    "needs a running server",
    "needs a cluster",
    "runs until stopped",
}
SHELL = ("sh", "console")

FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d[\d.,]*")


@dataclass(frozen=True)
class Fence:
    language: str
    title: str
    text: str
    start: int  # of the text, in the page

    @property
    def exit_code(self) -> int:
        return int(self.title.removeprefix("exit code ")) if self.title.startswith("exit code ") else 0


@dataclass
class Shown:
    """One command of a page."""

    line: str
    fence: Fence
    output: str | None = None  # None: not shown
    start: int = 0  # of the output, in the page

    @property
    def words(self) -> list[str]:
        """The arguments, without "> FILE"."""
        words = shlex.split(self.line, comments=True)[1:]
        return words[:-2] if self.target else words

    @property
    def target(self) -> str | None:
        """The file that the output goes to, where the line ends with "> FILE"."""
        words = shlex.split(self.line, comments=True)
        return words[-1] if words[-2] == ">" else None

    @property
    def runs(self) -> bool:
        return self.fence.title not in NOT_RUN


@dataclass
class Result:
    code: int
    out: str
    err: str = field(repr=False, default="")


def fences(page: Path) -> list[Fence]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Fence(match[1], match[2] or "", match[3], match.start(3)) for match in found]


def commands(fence: Fence) -> list[Shown]:
    """The `specsim` commands of a shell fence; a backslash at the end of a line joins the next."""
    found: list[Shown] = []
    at, prompt = fence.start, "$ " if fence.language == "console" else ""
    lines = iter(fence.text.splitlines(keepends=True))
    for line in lines:
        at += len(line)
        if line.startswith(f"{prompt}specsim "):
            while line.endswith("\\\n"):
                more = next(lines)
                at += len(more)
                line = line[:-2] + " " + more.strip() + "\n"
            found.append(Shown(line.removeprefix(prompt).strip(), fence, "" if prompt else None, at))
        elif prompt and found and not line.startswith(prompt):
            found[-1].output = (found[-1].output or "") + line
    return found


def run(shown: Shown) -> Result:
    """Run a command in this process; `> FILE` at its end takes the output."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(shown.words)
        except SystemExit as stop:
            code = int(stop.code or 0)
    if shown.target:
        Path(shown.target).write_text(out.getvalue(), encoding="utf-8")
    return Result(code, out.getvalue() + (err.getvalue() if code else ""), err.getvalue())


def parse(shown: Shown) -> None:
    """Read a command's options without running it. Raises click.ClickException for one that does not exist."""
    command: click.Command = group
    words = shown.words
    context = click.Context(group, info_name="specsim")
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        if found is None:
            raise click.UsageError(f"no command {words[0]}")
        command, words = found, words[1:]
    command.make_context(command.name, list(words), parent=context)


def _words(text: str) -> str:
    return " ".join(text.split())


def problem(shown: Shown, result: Result) -> str:
    """What is wrong with the result of a command, in words; empty if nothing."""
    if result.code != shown.fence.exit_code:
        return f"exit code {result.code}: {result.err.strip()[-400:]}"
    parts = [re.escape(_words(part)) for part in re.split(r"(?<!\S)\.\.\.(?!\S)", shown.output or "...")]
    if not re.fullmatch(".*".join(parts), _words(result.out)):
        printed = {_words(line) for line in result.out.splitlines()}
        gone = [line for line in (shown.output or "").splitlines() if "..." not in line and _words(line) not in printed]
        if not gone:
            return 'other lines are printed as well: put "..." where they are left out'
        return "\n".join(["not printed (any more); `make examples` renews it:", *gone])
    return ""


@contextlib.contextmanager
def folder(page: Path) -> Iterator[None]:
    """A temporary working folder with the files of FILES that the page names."""
    text, before = page.read_text(encoding="utf-8"), Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            for file, make in FILES.items():
                if re.search(rf"(?<![\w-]){re.escape(file)}", text):
                    make(Path(file))
            yield
        finally:
            os.chdir(before)


def steps(page: Path) -> Iterator[Shown]:
    """The commands of a page in order; the files that it shows are written on the way."""
    for fence in fences(page):
        if fence.language in SHELL:
            yield from commands(fence)
        elif fence.title:
            Path(fence.title).parent.mkdir(parents=True, exist_ok=True)
            Path(fence.title).write_text(fence.text, encoding="utf-8")


# --- files that pages name and do not show -----------------------------------------------------------------------------


def _preset(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        shutil.copy(ROOT / "specsim" / "presets" / f"{name}.json", path / "config.json")

    return make


def _trace(path: Path) -> None:
    rows = "".join(f"{i * 0.5},{200 + i},50\n" for i in range(40))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows, encoding="utf-8")


def _runs(path: Path) -> None:
    path.mkdir()
    for name in ("llama8b-base", "llama8b-e3-s3-eager", "qwen3-30b-a3b-base", "qwen3-30b-a3b-e3-s3"):
        shutil.copy(ROOT / "validation" / f"{name}.json", path)


FILES: dict[str, Callable[[Path], object]] = {
    "my-model": _preset("Llama-3.1-8B"),
    "my-drafter": _preset("llama3-8b-eagle3"),
    "my-box.yaml": lambda path: shutil.copy(ROOT / "hardware" / "1x-h200.yaml", path),
    "trace.csv": _trace,
    "runs": _runs,
    "validation": lambda path: path.symlink_to(ROOT / "validation", target_is_directory=True),
}


# --- renewing ----------------------------------------------------------------------------------------------------------


def _blank(line: str) -> str:
    return _words(NUMBER.sub("#", line))


def renewed(shown: str, printed: str) -> str:
    """The output shown, with the figures of the output printed. Lines are matched in order by all but their figures;
    one that has no match stays, for a person to look at. Without "..." the whole output is taken."""
    if "..." not in shown:
        return "\n".join(line.rstrip() for line in printed.strip("\n").splitlines()) + "\n"
    rest, lines = printed.splitlines(), []
    for line in shown.splitlines():
        match = next((i for i, other in enumerate(rest) if _blank(other) == _blank(line)), None)
        if match is not None and line.strip() not in ("", "..."):
            line, rest = rest[match].rstrip(), rest[match + 1 :]
        lines.append(line)
    return "\n".join(lines) + "\n"


def renew(page: Path) -> list[str]:
    """Renew the outputs that a page shows; the commands whose output still differs."""
    text, moved, left = page.read_text(encoding="utf-8"), 0, []
    with folder(page):
        for shown in steps(page):
            if not (shown.runs and shown.output):
                if shown.runs:
                    run(shown)
                continue
            result = run(shown)
            new = renewed(shown.output, result.out)
            text = text[: shown.start + moved] + new + text[shown.start + moved + len(shown.output) :]
            moved += len(new) - len(shown.output)
            shown.output = new
            if wrong := problem(shown, result):
                left.append(f"{page.relative_to(ROOT)}: {shown.line}\n{wrong}")
    page.write_text(text, encoding="utf-8")
    return left


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "Agg"
    pages = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    if failed := [line for page in pages for line in renew(page)]:
        sys.exit("\n\n".join(failed))
