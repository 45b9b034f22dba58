"""A substrate that uses bubblewrap: a sandbox is a set of namespaces with this host's programs, read-only."""

import json
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex

import anyio
import msgspec
from anyio.to_thread import run_sync

from dutyfree.contract import Availability, Limits, Recipe, limited
from dutyfree.contract.errors import CreateError
from dutyfree.substrates import toolkit

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
NOBODY = 65534 if os.geteuid() == 0 else -1  # the sandbox's user on the host; -1: the caller
BECOME = "" if NOBODY == -1 else f"/usr/bin/setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups "
SYSTEM = "".join(f" --ro-bind-try /{name} /{name}" for name in ("usr", "etc", "bin", "sbin", "lib", "lib64"))
BWRAP = f"{BECOME}bwrap --unshare-all --uid 0 --gid 0 --dev /dev --proc /proc --tmpfs /tmp{SYSTEM}"
FIRST = ["--info-fd", "1", "--as-pid-1", "sh", "-c", "echo ready >&2; while :; do sleep 9999 & wait $!; done"]
ENTER = f"{BECOME}/usr/bin/nsenter --user --preserve-credentials --mount --pid --net --ipc --uts --target"
POWERLESS = ["/usr/bin/setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"]


class Bubblewrap:
    summary, name, host_address = "namespaces over this host's programs, by bubblewrap", "bubblewrap", None
    Config = msgspec.defstruct("Config", [("directory", str, "/tmp")], frozen=True)  # noqa: S108

    def __init__(self, config: msgspec.Struct) -> None:
        self._base = Path(config.directory, f"dutyfree-bubblewrap-{token_hex(8)}")

    @classmethod
    async def probe(cls, config: msgspec.Struct) -> Availability:
        for tool in ("bwrap", "nsenter", "setpriv"):
            if not shutil.which(tool):
                return Availability(False, f"there is no {tool}", "apt-get install bubblewrap util-linux")
        tried = await anyio.run_process([*BWRAP.split(), "true"], check=False)
        return Availability(not tried.returncode, tried.stderr.decode().strip(), "allow user namespaces")

    async def __aenter__(self) -> "Bubblewrap":
        toolkit.require(await self.probe(self.Config()), self.name)
        self._reaper = await run_sync(lambda: toolkit.Reaper(directory=str(self._base)))
        await run_sync(self._base.mkdir, 0o755)
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await run_sync(toolkit.remove_tree, str(self._base))
            await run_sync(self._reaper.dismiss)

    @asynccontextmanager
    async def sandbox(
        self, recipe: Recipe | None = None, *, limits: Limits | None = None, labels: object = None
    ) -> AsyncIterator["BubblewrapSandbox"]:
        toolkit.refuse(self.name, recipe, limits, network=("off",))
        directory = str(self._base / token_hex(6))
        sandbox = BubblewrapSandbox(directory, limited(limits, Limits()), ENVIRONMENT, directory)
        async with toolkit.closing(sandbox):
            await sandbox.make()
            if recipe is not None:
                await toolkit.apply_stages(sandbox, recipe)
                sandbox.variables = recipe.variables(sandbox.workdir, ENVIRONMENT["PATH"])
            yield sandbox

    async def prepare(self, recipe: Recipe | None = None) -> None:
        pass  # stages run in each sandbox, so there is nothing to prepare

    async def facts(self) -> dict[str, str]:
        return {"isolation": "namespaces", "kernel": os.uname().release}


class BubblewrapSandbox(toolkit.EnteredSandbox):
    _bwrap = None

    async def make(self) -> None:
        await run_sync(os.mkdir, self.workdir, 0o700)
        await run_sync(os.chown, self.workdir, NOBODY, NOBODY)
        argv = [*BWRAP.split(), "--die-with-parent", "--bind", self.workdir, self.workdir, *FIRST]
        self._bwrap = await anyio.open_process(argv, env=ENVIRONMENT | self.commands.mark)
        if (said := await self._bwrap.stderr.receive()) != b"ready\n":
            raise CreateError(f"bwrap: {said.decode()}")
        self._first = json.loads(await self._bwrap.stdout.receive())["child-pid"]

    def enter(self, argv: Sequence[str]) -> list[str]:
        return [*ENTER.split(), str(self._first), *POWERLESS, *argv]

    def is_gone(self) -> bool:
        return not toolkit.is_alive(self._first)

    async def close(self) -> None:
        self.closed = True
        await run_sync(self.commands.kill)  # PID 1 too: it has the mark
        if self._bwrap is not None:
            await self._bwrap.aclose()
        await run_sync(toolkit.remove_tree, self.workdir)
