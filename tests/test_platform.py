"""Where there is no Linux, one sentence says so."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dutyfree
from dutyfree import substrates
from dutyfree.contract.errors import Unavailable
from tests.processes import ran

ROOT = Path(__file__).parents[1]


@pytest.fixture
def darwin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.mark.parametrize("name", ["native", "native-warm", "bare", "docker"])
@pytest.mark.usefixtures("darwin")
async def test_a_substrate_says_that_it_needs_linux(name: str) -> None:
    with pytest.raises(Unavailable, match=f"the substrate '{name}' needs Linux, and this is darwin"):
        dutyfree.open(name)
    with pytest.raises(Unavailable, match="needs Linux"):
        dutyfree.sync.open(name)
    found = await substrates.probe(name)
    assert not found.available
    assert "virtual machine" in found.remedy


def test_the_package_is_imported_and_scripted_runs_anywhere() -> None:
    script = """
import sys
sys.platform = "darwin"
import dutyfree
with dutyfree.sync.open("scripted") as substrate, substrate.sandbox() as sandbox:
    assert sandbox.exec("echo hello").ok
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.usefixtures("darwin")
def test_the_package_is_built_without_the_engine(tmp_path: Path) -> None:
    warnings: list[str] = []

    class Told:
        display_warning = warnings.append

    built: dict[str, Any] = {"artifacts": []}

    class Hook(importlib.import_module("hatch_build").EngineHook):  # type: ignore[misc]
        root, app = str(tmp_path), Told()

        def __init__(self) -> None:
            pass  # hatchling need not be there

    hook: Any = Hook()
    hook.initialize("standard", built)
    assert built == {"artifacts": []}
    assert len(warnings) == 1
    assert warnings[0].startswith("dutyfree needs Linux to run sandboxes; on darwin")


@pytest.mark.parametrize(
    "command", ["make setup", "make study", "make test", "scripts/setup python3 nowhere"]
)
def test_make_and_setup_stop_before_they_begin(command: str, tmp_path: Path) -> None:
    (tmp_path / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (tmp_path / "uname").chmod(0o755)
    # Of the make that runs the tests, this one is no part.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VENV": str(tmp_path / "venv")}
    done = ran(command.split(), cwd=ROOT, env=environment)
    assert done.returncode != 0
    sentence, *rest = done.stderr.splitlines()
    assert sentence.startswith("dutyfree needs Linux, and this is Darwin: use a Linux machine")
    assert all(line.startswith("make") for line in rest)
    assert not done.stdout
    assert not (tmp_path / "venv").exists()
    assert not (ROOT / "nowhere").exists()
