"""The chart scripts that reports and the planner page carry."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VENDOR = ROOT / "specsim" / "web" / "vendor"
SCRIPTS = ("vega", "vega-lite", "vega-embed")


def test_vendored_files_are_those_that_were_recorded():
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    recorded = {name: digest for digest, name in (line.split() for line in lines)}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del found["SHA256SUMS"]
    assert found == recorded
    scripts = {f"{name}{end}" for name in SCRIPTS for end in (".min.js", ".LICENSE")}
    assert set(recorded) == scripts | {"bundled.LICENSE"}


def test_no_script_ends_the_element_that_it_is_written_into():
    for name in SCRIPTS:
        assert not re.search(r"</script|<!--", (VENDOR / f"{name}.min.js").read_text(encoding="utf-8"), re.IGNORECASE)


@pytest.mark.browser
def test_scripts_run_in_a_browser_at_the_versions_that_the_fetch_names(new_page):
    pinned = dict(re.findall(r"(vega[a-z-]*)@([\d.]+)", (ROOT / ".ci" / "vendor").read_text()))
    page = new_page()
    for name in SCRIPTS:
        page.add_script_tag(path=VENDOR / f"{name}.min.js")
    said = page.evaluate("[vega.version, vegaLite.version, vegaEmbed.version]")
    assert dict(zip(SCRIPTS, said, strict=True)) == pinned
