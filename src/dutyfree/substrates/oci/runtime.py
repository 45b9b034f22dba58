"""What crun, runc and runsc differ in: their command lines, and what they need from us."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dutyfree.contract.errors import Unavailable
from dutyfree.substrates.local.runtime_environment import runtime_environment
from dutyfree.substrates.oci.groups import UNIFIED, Hosted

INSTALL = {
    "crun": "apt-get install crun",
    "runc": "apt-get install runc",
    "runsc": "apt-get install runsc (Debian 13), or -t bookworm-backports runsc (Debian 12)",
}

SOCKET = 'exec 3<&0 </dev/null; exec "$@"'
"""Gives the runtime its stdin as descriptor 3."""

APART = (
    'exec 3<&0 4>&1 5>&2 </dev/null >/dev/null 2>"$0"; exec "$@"',
    'exec "$@" <&3 >&4 2>&5 3<&- 4>&- 5>&-',
)
"""On this host and in the container: the command gets our pipes as they are, and the runtime none of them."""


class Runtime(NamedTuple):
    """One of the programs, and the directory in which it keeps the state of containers."""

    kind: str
    program: str
    root: Path
    host: Hosted

    @property
    def is_gvisor(self) -> bool:
        return self.kind == "runsc"

    @property
    def base(self) -> tuple[str, ...]:
        flags: tuple[str, ...] = ()
        if self.is_gvisor:
            # The sandbox of gVisor is in the group that we put runsc into.
            flags = ("--platform=systrap", "--network=none", "--ignore-cgroups")
        return (self.program, *flags, "--root", str(self.root))

    @property
    def hidden(self) -> str:
        """A mount that the runtime must not see: crun refuses hosts with both versions of control groups."""
        return str(UNIFIED) if self.kind == "crun" and self.host.hybrid else ""

    @property
    def logs_exec(self) -> bool:
        """Whether its exec gets a log, which has a text only if it could not start the program."""
        return self.kind == "crun"

    @property
    def copies(self) -> bool:
        """Whether it copies the streams of a container or command, instead of passing them on.

        Then a process in the background would hold an exec, and each frame of init would take a detour.
        """
        return self.kind == "runc"

    def run(self, bundle: Path, name: str) -> tuple[str, ...]:
        """Run a container whose init speaks on our standard streams."""
        words = (*self.base, "run", "--bundle", str(bundle))
        if self.copies:
            return ("/bin/sh", "-c", SOCKET, "sh", *words, "--preserve-fds", "1", name)
        return (*words, name)

    def restore(self, bundle: Path, name: str, image: Path) -> tuple[str, ...]:
        """Restore a checkpoint as a container whose init speaks on our standard streams. gVisor only."""
        return (*self.base, "restore", "--bundle", str(bundle), "--image-path", str(image), name)

    def status(self, name: str) -> Path | None:
        """A file that a running container has a moment after its start. Until then crun does not know it."""
        return self.root / name / "status" if self.kind == "crun" else None

    def exec(self, name: str, process: Path, *, pid_file: Path, log: Path) -> tuple[str, ...]:
        """Run the command of a file in a container. ``pid_file`` exists as soon as it runs."""
        # Every user of the host can read a command line, so neither the command nor its variables are in it.
        logged = ("--log", str(log)) if self.logs_exec else ()
        words = (*self.base, *logged, "exec", "--process", str(process), "--pid-file", str(pid_file))
        if self.copies:
            return ("/bin/sh", "-c", APART[0], str(log), *words, "--preserve-fds", "3", name)
        return (*words, name)

    def inside(self, argv: Sequence[str]) -> tuple[str, ...]:
        """What ``exec`` runs in the container for a command."""
        return ("/bin/sh", "-c", APART[1], "sh", *argv) if self.copies else tuple(argv)

    async def call(self, *words: str, seconds: float = 30.0) -> tuple[int, str]:
        """Run a short command of the runtime: its exit code, and what it wrote to stderr."""
        process = await asyncio.create_subprocess_exec(
            *self.base,
            *words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=runtime_environment({}),
        )
        try:
            async with asyncio.timeout(seconds):
                _, said = await process.communicate()
        except TimeoutError:
            return -1, f"{self.kind} {words[0]} did not end in {seconds:g} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0, said.decode(errors="replace").strip()


def find(kind: str, program: str) -> str:
    """The path of the program. Raises Unavailable."""
    found = shutil.which(program or kind)
    if found is None:
        if program:
            remedy = f"give the path of {kind}, or leave the option program out"
            raise Unavailable(f"there is no program {program}", remedy=remedy)
        raise Unavailable(f"there is no {kind}", remedy=f"install it: {INSTALL[kind]}")
    return found


def version(program: str) -> str:
    """Blocks. Raises OSError, subprocess.SubprocessError."""
    done = subprocess.run(
        [program, "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env=runtime_environment({}),
    )
    return done.stdout.splitlines()[0].split()[-1] if done.stdout else ""
