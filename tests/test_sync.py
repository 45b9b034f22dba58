"""The blocking face: everything of the async one, from plain code and from threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import dutyfree.sync
import dutyfree.sync.types
from dutyfree import errors
from dutyfree.contract import Limits, Observation, Recipe, Stage
from dutyfree.contract.abilities import Chunk, Pooling


@pytest.fixture(params=["scripted", "bare"])
def substrate(request):
    with dutyfree.sync.open(request.param) as opened:
        yield opened


def test_commands_and_files(substrate, tmp_path):
    assert substrate.name in ("scripted", "bare")
    assert isinstance(substrate.facts(), dict)
    substrate.prepare()
    with substrate.sandbox(limits=Limits(output=100), labels={"a": "b"}) as sandbox:
        assert sandbox.workdir.startswith("/")
        assert sandbox.id
        seen = sandbox.exec(["echo", "hello"], timeout=60)
        assert isinstance(seen, Observation)
        assert seen.stdout == b"hello\n"
        sandbox.write("d/f", b"content", mode=0o600)
        assert sandbox.read("d/f") == b"content"
        assert [entry.name for entry in sandbox.list("d")] == ["f"]
        sandbox.download("d", tmp_path / "back")
        assert (tmp_path / "back" / "f").read_bytes() == b"content"
        sandbox.upload(tmp_path / "back", "again")
        sandbox.remove("d")
        assert [entry.name for entry in sandbox.list(".")] == ["again"]


def test_recipes(substrate, tmp_path):
    (tmp_path / "f").write_text("1")
    with substrate.sandbox(Recipe(stages=(Stage("files", files={"f": tmp_path / "f"}),))) as sandbox:
        assert sandbox.read("f") == b"1"


def test_exceptions_pass_through(substrate):
    with substrate.sandbox() as sandbox, pytest.raises(FileNotFoundError):
        sandbox.read("missing")
    with pytest.raises(ZeroDivisionError), substrate.sandbox() as sandbox:
        _ = 1 / 0
    with pytest.raises(errors.SandboxClosed):
        sandbox.read("missing")
    with pytest.raises(errors.CreateError), substrate.sandbox(limits=Limits(disk=1)):
        pass


def test_what_is_closed_says_so():
    with dutyfree.sync.open("scripted") as substrate, substrate.sandbox() as sandbox:
        pass
    for use in (substrate.sandbox, sandbox.reset, substrate.prepare):
        with pytest.raises(errors.SandboxClosed, match=r"the substrate is closed \(use it inside of: with"):
            use()


def test_opening_fails_as_in_async_code():
    with pytest.raises(errors.OptionError), dutyfree.sync.open("nowhere"):
        pass
    with pytest.raises(errors.Unavailable), dutyfree.sync.open("bare", directory="/proc/nowhere"):
        pass


def test_what_is_unknown_is_told_before_it_is_entered():
    with pytest.raises(errors.OptionError, match="did you mean 'native'"):
        dutyfree.sync.open("natvie")
    with pytest.raises(errors.OptionError, match="did you mean 'seed'"):
        dutyfree.sync.open("scripted", sed=1)


def test_it_is_there_after_a_plain_import():
    script = """
import sys
import dutyfree
assert "dutyfree.sync" not in sys.modules
with dutyfree.sync.open("scripted") as substrate, substrate.sandbox() as sandbox:
    print(sandbox.exec("echo hello").stdout)
assert dutyfree.recipes.pip and dutyfree.layers.ls and dutyfree.abilities.Leasing
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_from_several_threads(substrate):
    with substrate.sandbox() as sandbox, ThreadPoolExecutor(8) as threads:

        def one(number):
            sandbox.write(f"f{number}", str(number).encode())
            return sandbox.exec(["cat", f"f{number}"]).stdout

        assert list(threads.map(one, range(40))) == [str(number).encode() for number in range(40)]


def test_threads_run_at_the_same_time():
    with (
        dutyfree.sync.open("bare") as substrate,
        substrate.sandbox() as sandbox,
        ThreadPoolExecutor(8) as threads,
    ):
        # Each waits for all the others.
        meet = "touch met-$0; while [ $(ls | grep -c met-) -lt 8 ]; do sleep 0.02; done"
        seen = threads.map(lambda number: sandbox.exec(["sh", "-c", meet, str(number)], timeout=60), range(8))
        assert all(one.ok for one in seen)


def test_a_sandbox_for_each_thread(substrate):
    def one(number):
        with substrate.sandbox() as sandbox:
            sandbox.write("f", str(number).encode())
            return sandbox.read("f")

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(24))) == [str(number).encode() for number in range(24)]


def test_the_thread_of_the_loop_ends_with_the_context():
    before = set(threading.enumerate())
    with dutyfree.sync.open("scripted"):
        ours = set(threading.enumerate()) - before
        assert ours
    for thread in ours:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def able():
    with dutyfree.sync.open("scripted") as substrate, substrate.sandbox() as sandbox:
        yield substrate, sandbox


def test_reset_snapshot_and_fork(able):
    substrate, sandbox = able
    sandbox.write("f", b"1")
    recipe = sandbox.snapshot()
    assert isinstance(recipe, Recipe)
    with sandbox.fork(2) as (one, two):
        one.write("f", b"one")
        assert two.exec("cat f").stdout == b"1"
    sandbox.reset()
    assert sandbox.list(".") == ()
    with substrate.sandbox(recipe) as copy:
        assert copy.read("f") == b"1"


def test_shells_and_background_processes(able):
    _, sandbox = able
    with sandbox.shell() as shell:
        shell.run("export A=1")
        assert shell.run("printenv A").stdout == b"1\n"
    process = sandbox.start("sleep 60")
    assert process.id
    process.kill()
    assert process.wait().signal == 9
    sandbox.pause()
    sandbox.resume()


def test_streaming(able):
    _, sandbox = able
    chunk, last = sandbox.stream("echo hello")
    assert chunk == Chunk("stdout", b"hello\n")
    assert isinstance(last, Observation)
    for item in sandbox.stream("echo hello"):
        assert item == chunk
        break
    assert sandbox.exec("true").ok


def test_streaming_errors_pass_through(able):
    substrate, _ = able
    with substrate.sandbox() as closed:
        pass
    with pytest.raises(errors.SandboxClosed), suppress(StopIteration):
        next(closed.stream("true"))


@pytest.mark.native
def test_pools_groups_and_leases():
    recipe = Recipe(stages=(Stage("setup", ("echo 1 > a",)),))
    with dutyfree.sync.open("native") as substrate:
        substrate.prefetch([recipe], 2)
        offered: object = substrate
        assert isinstance(offered, Pooling)
        blocking: object = substrate
        assert isinstance(blocking, dutyfree.sync.types.Pooling)
        with substrate.group(recipe, 3) as group:
            assert [sandbox.read("a") for sandbox in group] == [b"1\n"] * 3
        pool = substrate.pooled()
        lease = pool.acquire(recipe, 2, idempotency_key="k", labels={"run": "7"}, lease_seconds=None)
        assert lease.sandboxes[1].exec("cat a").stdout == b"1\n"
        assert set(substrate.sandboxes()) == {sandbox.id for sandbox in lease.sandboxes}
        pool.keep_alive(lease=lease, seconds=100)
        assert lease.until is not None
        assert substrate.pool is not None
        assert [one.labels for one in substrate.pool.leases] == [{"run": "7"}]
        pool.release(lease)
        assert lease.over
        with pool.lease(recipe) as other:
            assert other.sandbox.read("a") == b"1\n"
        assert sum(pool.ledger.served.values()) == 6
        assert str(pool.ledger).startswith("kind ")
