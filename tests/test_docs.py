"""The documentation is true: every command that it shows is run, and prints what the page says."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from pages import (
    FENCE,
    NOT_RUN,
    PAGES,
    ROOT,
    SHELL,
    commands,
    fences,
    folder,
    parse,
    problem,
    run,
    steps,
)

from specsim.cli import COMMANDS

SHOWN = {
    page: [shown for fence in fences(page) if fence.language in SHELL for shown in commands(fence)] for page in PAGES
}


JSON = ROOT / "docs" / "reference" / "json.md"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if SHOWN[page] and page != JSON], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_of_a_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    wrong = []
    with folder(page):
        for shown in steps(page):
            parse(shown)
            if shown.runs and (said := problem(shown, run(shown))):
                wrong.append(f"{shown.line}\n{said}")
    assert not wrong, "\n\n".join(wrong)


def test_few_commands_are_not_run() -> None:
    """Only what needs hardware, a server or a cluster is left out; each command of the program is shown."""
    every = [shown for page in PAGES for shown in SHOWN[page]]
    left_out = Counter(shown.fence.title for shown in every if not shown.runs)
    assert set(left_out) <= NOT_RUN
    assert sum(left_out.values()) <= 0.25 * len(every), left_out
    assert {shown.words[0] for shown in every} >= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_hides(page: Path) -> None:
    """A command outside a fence of tests/pages.py would be shown and never run; a title with a slip would run it."""
    text = page.read_text(encoding="utf-8")
    prose = FENCE.sub("", text)
    assert not re.findall(r"^(?: {4}|\$ ).*\bspecsim \w.*$|^specsim \w+ -.*$|^```.*$", prose, re.MULTILINE)
    for fence in fences(page):
        if fence.language in SHELL:
            assert fence.title in ("", *NOT_RUN) or re.fullmatch(r"exit code [12]", fence.title), fence.title
        else:
            assert "specsim " not in fence.text or fence.language in ("yaml", "python", "log", "json"), fence.text


def test_make_targets_and_scripts_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        assert (
            set(
                re.findall(
                    r"\bmake (?:\w+=\S* )*([a-z]+)\b(?=[`\s]|$)",
                    "\n".join(f.text for f in fences(page) if f.language in SHELL),
                )
            )
            <= targets
        )
        for script in re.findall(r"\bpython (\w+/\w+\.py)", text):
            assert (ROOT / script).exists(), f"{page.name}: {script}"


def test_fields_of_json_documents_are_those_printed() -> None:
    """Each section of reference/json.md lists the fields of the document that its command writes, and no others."""
    with folder(JSON):
        for shown in steps(JSON):
            assert not problem(shown, run(shown))
        for section in re.split(r"^## ", JSON.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if written := re.search(r"> (\w+\.json)$", section, re.MULTILINE):
                rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
                listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
                assert sorted(listed) == sorted(json.loads(Path(written[1]).read_text())), written[1]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    """`make docs` runs them; outputs in git would be old ones."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
