"""The examples as modules, to try their parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.modules import load

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    return load(EXAMPLES / f"{name}.py")


def printed(name: str, *arguments: str) -> str:
    """What it prints when it is run as it is written."""
    program = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout
