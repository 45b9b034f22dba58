"""What bare promises beyond the contract: nothing of it outlives it, however its owner ends."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree.contract import errors
from dutyfree.engine.host import file_system
from dutyfree.substrates.bare.substrate import MEMORY_DIRECTORY, PREFIX, remove_leftovers
from dutyfree.substrates.local.lifecycle import closing
from dutyfree.substrates.local.owner import identity
from dutyfree.substrates.local.reaper import OWNER as OWNED
from tests.awaiting import enter, overrun_beside, together
from tests.engine import counts
from tests.processes import eventually, speaking_python

DYING = """
import asyncio, os, pathlib, signal, sys, dutyfree
whole = pathlib.Path.{moment}
def partly(path, *arguments):
    whole(path, *arguments)
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.{moment} = partly
async def main():
    async with dutyfree.open("bare", directory=sys.argv[1]):
        pass
asyncio.run(main())
"""
OWNER = """
import asyncio, sys, dutyfree
async def main():
    async with dutyfree.open("bare", directory=sys.argv[1]) as substrate, substrate.sandbox() as sandbox:
        await sandbox.write("file", b"x")
        # One child in the process group, one that left it.
        await sandbox.exec("sleep 1000 & setsid sleep 1000 & echo $!")
        print("ready", flush=True)
        await sandbox.exec("sleep 1000")
asyncio.run(main())
"""


def processes_marked(text):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def runs(pid):
    """A killed process may stay as a zombie, without a command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def gone(directory):
    """Wait for the reaper: no process of the owner's and no directory."""
    return eventually(lambda: not [*directory.glob(f"{PREFIX}*"), *processes_marked(str(directory))])


def reaper_of(pid):
    children = counts.children(pid)
    return next(child for child in children if "reaper.py" in Path(f"/proc/{child}/cmdline").read_text())


@contextmanager
def owner(directory):
    with speaking_python(OWNER, str(directory), start_new_session=True) as (process, said):
        assert said == "ready"
        yield process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_owner_leaves_nothing(tmp_path, number):
    with owner(tmp_path) as process:
        assert processes_marked(str(tmp_path))
        os.kill(process.pid, number)
    assert gone(tmp_path)


def test_what_even_the_reaper_left_is_removed_by_the_next_owner(tmp_path):
    with owner(tmp_path) as process:
        os.kill(reaper_of(process.pid), signal.SIGKILL)
        process.kill()
    assert list(tmp_path.glob(f"{PREFIX}*"))
    assert remove_leftovers(tmp_path) == 1
    assert gone(tmp_path)


async def test_a_living_owners_directory_is_left_alone(tmp_path):
    async with dutyfree.open("bare", directory=str(tmp_path)):
        assert await anyio.to_thread.run_sync(remove_leftovers, tmp_path) == 0
        assert len(list(tmp_path.iterdir())) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["symlink_to", "mkdir", "chmod"])
def test_killed_while_it_opens_it_leaves_nothing(tmp_path, moment):
    dying = DYING.format(moment=moment)
    killed = subprocess.run([sys.executable, "-c", dying, str(tmp_path)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert eventually(lambda: not os.listdir(tmp_path))


def test_what_cannot_be_judged_is_left_alone(tmp_path):
    """A directory may be shared with another machine, or another pid namespace."""
    boot, space, pid, start, machine = (identity() or "").split("/")
    elsewhere = [f"other-boot/{space}/{pid}/{start}/other-machine", f"{boot}/1/{pid}/1/{machine}", "unknown"]
    for number, owner in enumerate(elsewhere):
        (tmp_path / f"{PREFIX}{number}").mkdir()
        (tmp_path / f"{PREFIX}{number}{OWNED}").symlink_to(owner)
    (tmp_path / f"{PREFIX}new").mkdir()
    assert remove_leftovers(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 2 * len(elsewhere) + 1
    (tmp_path / f"{PREFIX}0{OWNED}").unlink()
    (tmp_path / f"{PREFIX}0{OWNED}").symlink_to(f"other-boot/{space}/{pid}/{start}/{machine}")
    assert remove_leftovers(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 2 * len(elsewhere) - 1


@pytest.mark.parametrize("kind", ["relative", "link"])
async def test_its_directory_may_be_relative_or_a_link(tmp_path, monkeypatch, kind):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    directory = "real" if kind == "relative" else str(tmp_path / "link")
    async with dutyfree.open("bare", directory=directory) as substrate, substrate.sandbox() as sandbox:
        await sandbox.write("file", b"content")
        assert (await sandbox.exec("cat file", cwd=".")).stdout == b"content"
        # It bears no mark, and is found by where it works.
        seen = await sandbox.exec("env -i setsid sleep 1000 >/dev/null 2>&1 & echo $!; sleep 0.3")
    assert not await anyio.to_thread.run_sync(runs, int(seen.stdout))
    assert not list((tmp_path / "real").iterdir())


async def test_a_failed_removal_does_not_hide_the_failure_before_it(tmp_path, monkeypatch):
    """What cannot be removed: a mount point; here the removal itself is made to fail."""

    def refuse(path, *, dir_fd=None):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    async with dutyfree.open("bare", directory=str(tmp_path)) as substrate:
        monkeypatch.setattr(os, "rmdir", refuse)
        with pytest.raises(KeyError):
            async with substrate.sandbox():
                raise KeyError
        with pytest.raises(errors.CleanupError, match="busy"):
            await enter(substrate.sandbox())
        monkeypatch.undo()
    assert not list(tmp_path.iterdir())


UNPRIVILEGED = """
import asyncio, sys, dutyfree
async def main():
    async with dutyfree.open("bare", directory=sys.argv[1]) as substrate, substrate.sandbox() as sandbox:
        seen = await sandbox.exec("mkdir -p go/mod && touch go/mod/file && ln -s / go/up && chmod -R 0555 go")
        assert seen.ok, seen
asyncio.run(main())
"""


def test_read_only_directories_are_removed_by_any_user(tmp_path):
    command = [sys.executable, "-c", UNPRIVILEGED, str(tmp_path)]
    if os.geteuid() == 0:
        # Root with no more rights to files than their owner has.
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert not os.listdir(tmp_path)


async def test_commands_get_a_small_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        seen = (await sandbox.exec("env")).stdout.decode()
    assert "SECRET_TOKEN" not in seen
    assert f"HOME={sandbox.workdir}" in seen


async def test_a_timeout_ends_no_command_that_began_later():
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        seen, later = await overrun_beside(sandbox)
    assert seen.timed_out
    assert later.stdout == b"lives\n"


async def test_limits_that_it_cannot_enforce_are_refused():
    async with dutyfree.open("bare") as substrate:
        for limits in (
            dutyfree.Limits(memory=1 << 20),
            dutyfree.Limits(network="off"),
            dutyfree.Limits(network=("host",)),
        ):
            with pytest.raises(errors.CreateError, match="bare cannot limit"):
                await enter(substrate.sandbox(limits=limits))


async def test_a_directory_that_cannot_be_used_is_said():
    with pytest.raises(errors.Unavailable, match=r"/nonexistent.*directory="):
        await enter(dutyfree.open("bare", directory="/nonexistent"))


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The kind of storage, and a directory of that kind."""
    path = MEMORY_DIRECTORY if request.param == "memory" else str(tmp_path)
    found = "memory" if file_system.kind(path) in file_system.IN_MEMORY else "disk"
    if found != request.param:
        pytest.skip(
            f"{path} is in {found}; to enable it: a tmpfs at {MEMORY_DIRECTORY}, --basetemp on a disk"
        )
    return found, path


async def test_files_are_where_they_should_be(directory: tuple[str, str]) -> None:
    storage, path = directory
    where = {"directory": path} if storage == "disk" else {}
    async with dutyfree.open("bare", storage=storage, **where) as substrate:
        assert (await substrate.facts())["storage"].startswith(f"{storage} (")
        async with substrate.sandbox() as sandbox:
            assert sandbox.workdir.startswith(f"{path}/{PREFIX}")
    if storage == "disk":
        with pytest.raises(errors.Unavailable, match=r"is not in memory.*mount -t tmpfs"):
            await enter(dutyfree.open("bare", storage="memory", directory=path))


async def test_unknown_users_and_unusable_words_are_observed():
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        seen = await sandbox.exec("true", user="nobody-of-that-name")
        assert (seen.exit_code, seen.started) == (126, False)
        assert b"'nobody-of-that-name': there is no such user" in seen.stderr
        seen = await sandbox.exec(["echo", "a\0b"])
        assert (seen.exit_code, seen.started) == (126, False)
        assert (await sandbox.exec("true")).ok


async def test_usage_and_spans_tell_the_commands_own_time():
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        seen = await sandbox.exec(["python3", "-c", "x = 1"])
    assert seen.usage is not None
    assert seen.usage.cpu_seconds > 0
    assert seen.command_seconds is not None
    assert seen.command_seconds <= seen.seconds


def test_peak_memory_is_told_above_the_owners_own():
    """In a small process: below its owner's own peak, a command's cannot be told."""
    program = """
import asyncio, dutyfree
async def main():
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        for size in (1, 200):
            seen = await sandbox.exec(["python3", "-c", f"x = bytearray({size} << 20)"])
            print(seen.usage.peak_memory)
asyncio.run(main())
"""
    # Through a shell that forks: a process that we start ourselves has our own peak for its own.
    command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    small, large = done.stdout.split()
    assert small == "None" or int(small) < 100 << 20
    assert 200 << 20 < int(large) < 300 << 20


def descriptors():
    """Those of this process. Some of other tests may still be closed as their objects are forgotten."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


async def test_no_descriptor_is_lost():
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        await sandbox.exec("true")
        before = descriptors()
        for _ in range(20):
            await sandbox.exec("cat", stdin=b"x" * 100_000)
            await sandbox.exec(["no-such-program"])
            await sandbox.exec("sleep 5", timeout=0.01)
            assert not (await sandbox.exec("true", user="nobody-of-that-name")).ok
            assert not (await sandbox.exec(["echo", "a\0b"])).ok
        assert descriptors() <= before


@pytest.mark.parametrize("working", [0, 1, 2])
async def test_no_descriptor_is_lost_when_there_are_too_few(monkeypatch, working):
    pipe = os.pipe
    made: list[None] = []

    def scarce():
        if len(made) >= working:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(None)
        return pipe()

    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        await sandbox.exec("true", stdin=b"")
        before = descriptors()
        monkeypatch.setattr(os, "pipe", scarce)
        with pytest.raises(errors.DispatchError, match="cannot make a pipe: Too many open files"):
            await sandbox.exec("true", stdin=b"")
        monkeypatch.undo()
        assert descriptors() <= before


async def test_a_command_that_cannot_be_watched_does_not_live_on(monkeypatch):
    def scarce(pid):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        await sandbox.exec("true")
        before = descriptors()
        monkeypatch.setattr(os, "pidfd_open", scarce)
        with pytest.raises(errors.ExecError, match="Too many open files"):
            await sandbox.exec("setsid sleep 1000 & sleep 1000")
        monkeypatch.undo()
        assert descriptors() <= before
        assert not processes_marked(sandbox.id)


def test_nothing_is_left_in_the_temporary_directory():
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*{OWNED}"):
        with suppress(FileNotFoundError):  # others come and go
            assert os.readlink(path) != identity()


async def test_commands_at_once_do_not_take_each_others_descriptors():
    """A stream that ends early gives its number free, and another command gets it."""
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:

        async def some(number):
            for _ in range(15):
                await sandbox.exec(["sh", "-c", f"exec >&- 2>&-; sleep 0.00{number % 7}"])

        with anyio.fail_after(60):
            await together(*(partial(some, number) for number in range(12)))


@pytest.mark.root("only root can mount")
async def test_a_download_to_a_full_disk_is_not_the_agents_fault(tmp_path):
    await anyio.run_process(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)])
    try:
        async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
            await sandbox.write("tree/file", bytes(1 << 20))
            for path in ("tree", "tree/file"):
                with pytest.raises(errors.CollectError) as failed:
                    await sandbox.download(path, tmp_path / "copy" / path)
                assert errors.verdict(failed.value) == "infrastructure"
    finally:
        await anyio.run_process(["umount", str(tmp_path)])


class Ending:
    """A sandbox that cannot be closed."""

    def __init__(self, error):
        self.error = error

    async def close(self):
        raise self.error


@pytest.mark.parametrize(
    "error", [OSError(errno.EBUSY, "busy", "/x"), errors.CleanupError("x"), errors.ExecError("x")]
)
async def test_an_error_of_the_body_comes_before_one_of_the_end(error):
    with pytest.raises(KeyError):
        async with closing(Ending(error)):
            raise KeyError
    with pytest.raises(errors.CleanupError if isinstance(error, OSError) else type(error)):
        await enter(closing(Ending(error)))
