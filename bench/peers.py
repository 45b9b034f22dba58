"""The same work with Docker, crun, runc, gVisor, bubblewrap and sandlock, if they are installed."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from rounds import Row, Side, figure, interleaved, ratio

import dutyfree
from dutyfree import substrates

TRUE = ["/bin/true"]
IMAGE = "dutyfree/study"
SETTLE = 0.1
ROOT = ("dev", "etc", "proc", "sys", "tmp", "usr", "workspace")
LINKS = ("bin", "sbin", "lib", "lib64")


def call(*command: str | Path) -> None:
    subprocess.run(command, capture_output=True, check=True)


async def docker(rounds: int) -> list[Row]:
    """P4; and D1, D2: the docker substrate must not be slower than Docker's own client."""
    async with (
        dutyfree.open("docker") as engine,
        dutyfree.open("native", ready=0) as cold,
        dutyfree.open("native") as native,
        native.sandbox() as ours,
    ):
        await engine.prepare()
        async with engine.sandbox() as theirs:

            async def client() -> None:
                call("docker", "exec", theirs.id, *TRUE)

            async def api() -> None:
                await theirs.exec(TRUE)

            async def exec_native() -> None:
                await ours.exec(TRUE)

            sides: dict[str, Side] = {"api": api, "client": client, "native": exec_native}
            execs = await interleaved(rounds, sides, SETTLE)

        async def run() -> float:
            begin = perf_counter()
            subprocess.run(["docker", "run", "--name", "dutyfree-bench", IMAGE, *TRUE], check=True)
            took = perf_counter() - begin
            call("docker", "rm", "--force", "dutyfree-bench")
            return took

        async def create(substrate: Any) -> float:
            begin = perf_counter()
            async with substrate.sandbox() as fresh:
                await fresh.exec(TRUE)
                return perf_counter() - begin

        async def create_docker() -> None:
            async with engine.sandbox() as fresh:
                await fresh.exec(TRUE)

        async def run_and_remove() -> None:
            call("docker", "run", "--rm", "--network", "none", IMAGE, *TRUE)

        creates = await interleaved(
            max(5, rounds // 10),
            {
                "run": run,
                "cold": partial(create, cold),
                "native": partial(create, native),
                "api": create_docker,
                "client": run_and_remove,
            },
            2 * SETTLE,
        )
    started, cold_times = creates["run"], creates["cold"]
    return [
        ratio("P4a", "docker run ÷ native create with ready=0", started, cold_times),
        ratio("P4d", "docker run ÷ native create by default", started, creates["native"], at_least=150),
        ratio("P4b", "Docker API exec ÷ native exec", execs["api"], execs["native"], at_least=60),
        ratio("P4c", "docker exec ÷ native exec", execs["client"], execs["native"], at_least=80),
        ratio("D1", "docker substrate exec ÷ docker exec", execs["api"], execs["client"], at_most=1.0),
        ratio("D2", "docker create, exec, remove ÷ docker run --rm", creates["api"], creates["client"]),
    ]  # fmt: skip


async def runtimes(rounds: int) -> list[Row]:
    """One complete run, and one exec in a running container; native runs in the same rounds."""
    async with AsyncExitStack() as stack:
        runs: dict[str, Side] = {}
        execs: dict[str, Side] = {}
        for name in ("crun", "runc"):
            if shutil.which(name):
                runs[name], execs[name] = await stack.enter_async_context(_oci(name))
            else:
                print(f"{name} skipped: not installed (apt-get install {name})", file=sys.stderr)
        for name in ("crun", "runc", "runsc"):
            for actions in ("exec", "init"):
                sides = await _ours(stack, name, actions)
                if sides is not None:
                    runs[f"oci-{name}-{actions}"], execs[f"oci-{name}-{actions}"] = sides
        if (python := _sandlock()) is not None:
            runs["sandlock"], execs["sandlock"] = await stack.enter_async_context(_in_sandlock(python))
        else:
            print("sandlock skipped: not installed (pip install sandlock)", file=sys.stderr)
        if shutil.which("bwrap"):
            runs["bubblewrap"] = _bubblewrap
        else:
            print("bubblewrap is left out: not installed (apt-get install bubblewrap)", file=sys.stderr)
        async with dutyfree.open("native") as native, native.sandbox() as standing:

            async def run() -> None:
                async with native.sandbox() as fresh:
                    await fresh.exec(TRUE)

            async def exec_native() -> None:
                await standing.exec(TRUE)

            run_times = await interleaved(rounds, {"native": run, **runs})
            exec_times = await interleaved(rounds, {"native": exec_native, **execs})
    ours, our_execs = run_times["native"], exec_times["native"]
    rows = [
        figure("R-native", "native: create, exec, destroy, ms", statistics.median(ours) * 1e3, ours),
        figure("E-native", "native: exec, ms", statistics.median(our_execs) * 1e3, our_execs),
    ]
    rows += [ratio(f"R-{name}", f"{name} run ÷ native", run_times[name], ours) for name in runs]
    rows += [ratio(f"E-{name}", f"{name} exec ÷ native", exec_times[name], our_execs) for name in execs]
    return rows


async def _ours(stack: AsyncExitStack, runtime: str, actions: str) -> tuple[Side, Side] | None:
    """The substrate ``oci``, on the image of the study: one sandbox each time, and one that stands."""
    found = await substrates.probe("oci", runtime=runtime)
    if not found.available:
        print(f"oci with {runtime} skipped: {found.detail} ({found.remedy})", file=sys.stderr)
        return None
    opened: Any = await stack.enter_async_context(dutyfree.open("oci", runtime=runtime, actions=actions))
    await opened.prepare()
    standing: Any = await stack.enter_async_context(opened.sandbox())

    async def run() -> None:
        async with opened.sandbox() as fresh:
            await fresh.exec(TRUE)

    async def execute() -> None:
        await standing.exec(TRUE)

    return run, execute


SANDLOCK = """
import sys, tempfile, time
import sandlock

directory = tempfile.mkdtemp()

def make():
    return sandlock.Sandbox(
        fs_readable=["/usr", "/bin", "/lib", "/lib64", "/etc", "/dev"], fs_writable=[directory],
        workdir=directory, cwd=directory, max_memory="512M", max_processes=64,
        on_exit=sandlock.BranchAction.ABORT,
    )

standing = make()
for line in sys.stdin:
    begin = time.perf_counter()
    sandbox = make() if line.strip() == "run" else standing
    done = sandbox.run(["/bin/true"])
    print(time.perf_counter() - begin if done.success else "nan", flush=True)
"""


def _sandlock() -> str | None:
    """A Python that has it: this one, or that of the variable SANDLOCK_PYTHON."""
    for python in (os.environ.get("SANDLOCK_PYTHON"), sys.executable):
        if python and subprocess.run([python, "-c", "import sandlock"], capture_output=True).returncode == 0:
            return python
    return None


@asynccontextmanager
async def _in_sandlock(python: str) -> AsyncIterator[tuple[Side, Side]]:
    """It has no exec in a sandbox that stands: its second figure is a run with the policy made before."""
    with subprocess.Popen(
        [python, "-c", SANDLOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as runner:

        async def ask(what: str) -> float:
            assert runner.stdin
            assert runner.stdout
            runner.stdin.write(f"{what}\n")
            runner.stdin.flush()
            seconds = float(runner.stdout.readline() or "nan")
            if math.isnan(seconds):
                raise RuntimeError(f"sandlock {what} failed")
            return seconds

        yield partial(ask, "run"), partial(ask, "again")
        runner.communicate()


async def _bubblewrap() -> None:
    links = [part for name in _links() for part in ("--symlink", os.readlink(Path("/", name)), f"/{name}")]
    call("bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", *links, "--proc", "/proc", "--dev", "/dev",
         "--tmpfs", "/tmp", *TRUE)  # fmt: skip


def _links() -> list[str]:
    return [name for name in LINKS if Path("/", name).is_symlink()]


LOOP = """
import json, subprocess, sys, time
for line in sys.stdin:
    begin = time.perf_counter()
    null = subprocess.DEVNULL
    done = subprocess.run(json.loads(line), stdin=null, stdout=null, stderr=null)
    print(time.perf_counter() - begin if done.returncode == 0 else "nan", flush=True)
"""

# crun refuses hosts with control groups of both versions, so it gets not to see those of the second.
ENTER = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'


@asynccontextmanager
async def _oci(runtime: str) -> AsyncIterator[tuple[Side, Side]]:
    """Two bundles on the /usr of the host: one to run each time, one that keeps running."""
    with TemporaryDirectory(prefix=f"dutyfree-{runtime}-") as scratch:
        for name, command in {"once": TRUE, "standing": ["/bin/sleep", "infinity"]}.items():
            _bundle(runtime, Path(scratch, name), command)
        place = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]
        runner = subprocess.Popen(
            [*place, sys.executable, "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        async def ask(*command: str) -> float:
            assert runner.stdin
            assert runner.stdout
            runner.stdin.write(json.dumps([runtime, "--root", f"{scratch}/state", *command]) + "\n")
            runner.stdin.flush()
            seconds = float(runner.stdout.readline() or "nan")
            if math.isnan(seconds):
                raise RuntimeError(f"{runtime} {command[0]} failed")
            return seconds

        await ask("run", "--detach", "--bundle", f"{scratch}/standing", "dutyfree-standing")
        try:
            yield (
                lambda: ask("run", "--bundle", f"{scratch}/once", "dutyfree-once"),
                lambda: ask("exec", "dutyfree-standing", *TRUE),
            )
        finally:
            await ask("delete", "--force", "dutyfree-standing")
            runner.communicate()


def _bundle(runtime: str, bundle: Path, command: list[str]) -> None:
    for name in ROOT:
        (bundle / "rootfs" / name).mkdir(parents=True)
    for name in _links():
        (bundle / "rootfs" / name).symlink_to(os.readlink(Path("/", name)))
    subprocess.run([runtime, "spec"], cwd=bundle, check=True)
    config = json.loads((bundle / "config.json").read_text())
    config["process"] |= {"terminal": False, "args": command, "cwd": "/"}
    # Raising a limit above that of this process needs a capability that not every host grants.
    config["process"].pop("rlimits", None)
    config["root"] = {"path": "rootfs", "readonly": False}
    config["mounts"].append(
        {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]}
    )
    (bundle / "config.json").write_text(json.dumps(config))
