"""Processes that tests start, and what they wait for without an event loop."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def ran(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its output as text."""
    return subprocess.run(command, capture_output=True, text=True, **options)


Speaking = tuple[subprocess.Popen[str], str]
"""A process and the first line of its output."""


@contextmanager
def speaking(*command: str, **options: Any) -> Iterator[Speaking]:
    """A process and its first line. It is waited for at the end, and killed if the test fails."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process, process.stdout.readline().strip() if process.stdout else ""
        except BaseException:
            process.kill()
            raise


@contextmanager
def speaking_python(code: str, *arguments: str, **options: Any) -> Iterator[Speaking]:
    """The same of a Python program."""
    with speaking(sys.executable, "-c", textwrap.dedent(code), *arguments, **options) as begun:
        yield begun


def eventually(look: Callable[[], Any], seconds: float = 60) -> Any:
    """Look again and again until there is something. Returns what was seen last."""
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
