"""What type checkers see: of dutyfree.open, of dutyfree.sync, and of the programs in the documentation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/training.md", "docs/contract.md")

OPENED = """
from typing import assert_type

import dutyfree
import dutyfree.sync
from dutyfree import Observation, Recipe, Sandbox, Substrate
from dutyfree.substrates.bare import BareSandbox
from dutyfree.substrates.docker.substrate import DockerSubstrate
from dutyfree.substrates.native import Native
from dutyfree.substrates.scripted import Scripted
from dutyfree.sync import types


async def opened(name: str) -> None:
    async with dutyfree.open(name) as substrate, substrate.sandbox() as sandbox:
        assert_type(substrate, Substrate)
        assert_type(sandbox, Sandbox)
    async with dutyfree.open("native") as native, native.sandbox() as fork, fork.fork(2) as forks:
        assert_type(native, Native)
        assert_type(await forks[0].snapshot("name"), Recipe)
    async with dutyfree.open("native-warm") as warm:
        await warm.prefetch([Recipe()])
    async with dutyfree.open("docker") as docker:
        assert_type(docker, DockerSubstrate)
    async with dutyfree.open("bare") as bare, bare.sandbox() as plain:
        assert_type(plain, BareSandbox)
        await plain.fork(2)  # type: ignore[attr-defined]
    async with dutyfree.open("scripted") as scripted:
        assert_type(scripted, Scripted)


def blocking(name: str) -> None:
    with dutyfree.sync.open(name) as substrate, substrate.sandbox() as sandbox:
        assert_type(sandbox, types.Sandbox)
        assert_type(sandbox.exec("true", timeout=1.0), Observation)
        sandbox.exec("true", timeout="1")  # type: ignore[arg-type]
        if isinstance(sandbox, types.Forkable):
            with sandbox.fork(2) as copies:
                assert_type(copies[0].read("file"), bytes)
    with dutyfree.sync.open("native") as native, native.group(Recipe(), 2) as group:
        assert_type(native, types.Native)
        assert_type(group[0].exec("true").exit_code, int)
        for item in group[0].stream("true"):
            print(item)
        with group[0].fork(2) as forks:
            assert_type(forks[0].snapshot("name"), Recipe)
        with group[0].connect(80) as stream:
            assert_type(stream.receive(), bytes)
    with dutyfree.sync.open("docker") as docker, docker.sandbox() as container:
        assert_type(container.pause(), None)
        container.fork(2)  # type: ignore[union-attr]
"""


def test_the_sync_types_have_the_methods_and_parameters_of_the_async_classes() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/sync_types.py", "--check"], check=False)
    assert done.returncode == 0


def test_opened_substrates_and_the_programs_of_the_docs_pass_mypy(tmp_path: Path) -> None:
    (tmp_path / "opened.py").write_text(OPENED)
    for page in PAGES:
        # The programs of a page build on each other.
        programs = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
        assert programs
        (tmp_path / f"{Path(page).stem.lower()}.py").write_text("\n\n".join(programs))
    files = sorted(tmp_path.glob("*.py"))
    assert len(files) == len(PAGES) + 1
    # The options of the project: strict, and ignores that ignore nothing are errors.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
