"""Owners with the same pid, each in its own pid namespace and with its own /run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

pytestmark = [
    pytest.mark.native,
    pytest.mark.root("namespaces without their own ids"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is missing: apt install util-linux"),
]

OWNER = """
import json, pathlib, sys, anyio, dutyfree
def tell(**facts): print(json.dumps(facts), flush=True)
async def main():
    async with dutyfree.open("native", ready=0) as native, native.sandbox() as sandbox:
        launcher = native.node.launcher.pid
        (init,) = [
            stat.parent for stat in pathlib.Path("/proc").glob("[0-9]*/stat")
            if int(stat.read_text().rpartition(")")[2].split()[1]) == launcher
        ]
        await sandbox.start(["sleep", "1000"])
        await sandbox.exec("true")
        (sleeper,) = [
            stat.parent for stat in pathlib.Path("/proc").glob("[0-9]*/stat") if "(sleep)" in stat.read_text()
        ]
        groups = [line.split(":", 2)[2] for line in (sleeper / "cgroup").read_text().split()]
        tell(launcher=launcher, groups=[group for group in groups if "dutyfree-" in group],
             ids=int((init / "uid_map").read_text().split()[1]))
        for line in sys.stdin:
            if line == "pause\\n": await sandbox.pause()
            if line == "exec\\n": await sandbox.exec("true", timeout=60)
            tell(done=line.strip())
anyio.run(main)
"""

START = 'mount -t tmpfs none /run && exec "$0" -c "$1"'


class Owner:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.facts = self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        heard: dict[str, Any] = json.loads(self._process.stdout.readline())
        return heard

    def do(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._hear() == {"done": what}


@contextmanager
def owner() -> Iterator[Owner]:
    namespaces = ["unshare", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
    with subprocess.Popen(
        [*namespaces, "sh", "-c", START, sys.executable, OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Owner(process)
        finally:
            process.kill()


def test_they_have_nothing_in_common() -> None:
    with ExitStack() as stack:
        one, other = (stack.enter_context(owner()) for _ in range(2))
        assert one.facts["launcher"] == other.facts["launcher"], "each has the number that the other has"
        assert one.facts["groups"]
        assert not set(one.facts["groups"]) & set(other.facts["groups"])
        assert one.facts["ids"] != other.facts["ids"]
        one.do("pause")
        other.do("exec")
