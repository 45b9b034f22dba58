"""The examples as modules, to try their parts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def printed(name: str, *arguments: str) -> str:
    """What it prints when it is run as it is written."""
    program = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout
