"""A real browser for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
PATIENCE = 180_000  # milliseconds
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

MARKS = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="no Chromium; to enable: apt-get install chromium"),
]


@contextmanager
def launched() -> Iterator[Any]:
    """A browser of Playwright, or a skipped test."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright; to enable: pip install playwright"
    )
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS, timeout=PATIENCE)
        yield running
        running.close()
