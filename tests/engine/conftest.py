"""The C program with sanitizers in it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("gcc is missing; to enable it: apt-get install gcc")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = tmp_path_factory.mktemp("engine") / "dutyfree-init"
    reason = module.build(ROOT / "src/dutyfree/engine", target, sanitized=True)
    if "asan" in reason:
        pytest.skip(f"no sanitizers here: {reason}")
    assert not reason, reason
    return target
