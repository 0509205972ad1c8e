"""Test settings, and the browser that tests marked `browser` drive."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Workers share the cores: a product of small matrices whose threads wait for each other takes a hundred times as long. Before
# numpy is loaded, for processes that tests start too.
assert "numpy" not in sys.modules
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

CHROMIUM = "/usr/bin/chromium"  # Debian's; elsewhere the one of `playwright install chromium`
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
# No deadline for an example: on a busy machine it says nothing. The rest is hypothesis's own, which under CI=1 is derandomised.
settings.register_profile("specsim", settings.default, deadline=None)
settings.load_profile("specsim")
LOCAL = ("file:", "data:", "blob:", "about:", "http://127.0.0.1", "http://localhost")


@pytest.fixture
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads begin after two lone requests."""
    from specsim import load

    monkeypatch.setattr(load, "LONE", 2)
    monkeypatch.setattr(load, "WARM_S", 0.0)


@pytest.fixture
def specsim(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """specsim("predict", "--json", ...) runs a command line in this process: (exit code, standard output, standard error)."""
    from specsim.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            main(list(arguments))
        captured = capsys.readouterr()
        return int(done.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, one for all tests of a process. Without one the test is skipped; under SPECSIM_BROWSER=1 it fails."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        path = CHROMIUM if Path(CHROMIUM).exists() else None
        try:
            found = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        except Error as error:
            why = f"no Chromium: apt-get install chromium, or playwright install chromium ({error.message.splitlines()[0]})"
            if os.environ.get("SPECSIM_BROWSER") == "1":
                pytest.fail(why)
            pytest.skip(why)
        yield found
        found.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Playwright keeps an event loop of this thread running for as long as the browser is there: tests without a browser
    do not see it, so that they may run their own."""
    if "browser" in getattr(item, "fixturenames", ()):
        return (yield)
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return (yield)
    finally:
        asyncio._set_running_loop(loop)


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """new_page(offline=False, viewport=..., console=("expected text",)): a page in a context of its own, offline by default.

    When the test ends: no error on the console beyond the expected ones, and no request that left the machine.
    """
    contexts, problems = [], []

    def make(*, console: tuple[str, ...] = (), **options: Any) -> Any:
        context = browser.new_context(**{"offline": True, **options})
        context.set_default_timeout(120_000)  # ms: the machine may be busy
        contexts.append(context)

        def said(kind: str, text: str) -> None:
            if kind in ("error", "warning") and not any(expected in text for expected in console):
                problems.append(f"{kind}: {text}")

        context.on("console", lambda message: said(message.type, message.text))
        context.on("weberror", lambda error: said("error", str(error.error)))
        context.on("request", lambda request: request.url.startswith(LOCAL) or problems.append(f"asked {request.url}"))
        return context.new_page()

    yield make
    for context in contexts:
        context.close()
    assert not problems
