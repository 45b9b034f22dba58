"""Programs of the repository as modules, to try their parts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load(path: Path) -> Any:
    """Import a Python file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
