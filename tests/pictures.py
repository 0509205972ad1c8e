"""Renews the pictures that README.md and docs/ show: `make pictures`. Needs Chromium (see conftest.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import ARGUMENTS, CHROMIUM

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
PLANNER = "#model=Qwen3-30B-A3B&hardware=1x-h200&batch=4&draft-tokens=4&accept-rate=0.65"


def planner(browser: object, path: Path) -> None:
    """The page with a scenario, as a palette of 128 colours: a third of the bytes."""
    from PIL import Image

    command = [sys.executable, "-m", "specsim", "serve", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        text = ""
        while "}" not in text:
            text += process.stdout.readline()
        page = browser.new_page(viewport={"width": 1280, "height": 1000})  # type: ignore[attr-defined]
        page.goto(json.loads(text)["address"] + PLANNER)
        page.wait_for_selector("#around[data-state=drawn]")
        page.screenshot(path=path)
    finally:
        process.terminate()
        process.wait()
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def main() -> None:
    from playwright.sync_api import sync_playwright

    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        path = CHROMIUM if Path(CHROMIUM).exists() else None
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        planner(browser, IMAGES / "planner.png")
        browser.close()


if __name__ == "__main__":
    main()
