"""Labels: ``dutyfree ps`` shows them while the sandbox lives; processes inside cannot see them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.contract import Limits, Recipe
from dutyfree.contract.errors import UsageError
from dutyfree.engine.host import census, sandbox_labels
from dutyfree.engine.host.sandbox_labels import ROOM, LabelFile
from tests.opening import open_native

LABELS = {"task": "astropy-1", "run": "7 “ü” \x1b[31m"}


async def shown(identity: str) -> Mapping[str, str] | None:
    found = await anyio.to_thread.run_sync(census.sandboxes)
    return next((living.labels for living in found if living.id == identity), None)


@pytest.mark.parametrize("pooled", [False, True])
async def test_every_sandbox_is_shown_with_its_labels(pooled: bool) -> None:
    other = Limits(pids=77)  # the pool has no sandbox with these
    async with open_native() as native:
        if pooled:
            await native.prefetch([Recipe()], 1)
        async with (
            native.sandbox(labels=LABELS) as one,
            native.sandbox() as without,
            native.group(Recipe(), 2, labels={"group": "1"}) as group,
            native.group(Recipe(), 2, labels={"group": "2"}, limits=other) as apart,
        ):
            assert await shown(one.id) == LABELS
            assert await shown(without.id) == {}
            assert [await shown(each.id) for each in (*group, *apart)] == [
                {"group": "1"}, {"group": "1"}, {"group": "2"}, {"group": "2"},
            ]  # fmt: skip
            inside = await one.exec(
                "cat /proc/1/cmdline /proc/1/environ /proc/self/environ; ls -l /proc/*/fd"
            )
            assert b"astropy" not in inside.stdout + inside.stderr
            assert b"labels" not in inside.stdout + inside.stderr
            await one.reset()
            assert await shown(one.id) == LABELS
        with anyio.fail_after(60):
            while await shown(one.id) is not None:  # noqa: ASYNC110 (the pool removes it later)
                await anyio.sleep(0.01)
        async with native.sandbox() as next_one:
            assert await shown(next_one.id) == {}


async def test_a_lease_is_shown_with_its_labels() -> None:
    async with open_native() as native:
        pool = await native.pooled()
        lease = await pool.acquire(Recipe(), labels=LABELS)
        assert await shown(lease.sandbox.id) == LABELS
        pool.release(lease)
        async with native.sandbox() as sandbox:
            assert await shown(sandbox.id) == {}


async def test_ps_shows_them_and_they_do_not_speak_to_the_terminal() -> None:
    async with open_native() as native, native.sandbox(labels=LABELS) as sandbox:
        ps = [sys.executable, "-m", "dutyfree", "ps"]
        told = json.loads((await anyio.run_process([*ps, "--json"])).stdout)
        assert [one["labels"] for one in told if one["id"] == sandbox.id] == [LABELS]
        wide = {**os.environ, "COLUMNS": "200"}
        text = (await anyio.run_process(ps, env=wide)).stdout.decode()
        (line,) = [line for line in text.splitlines() if sandbox.id in line]
        assert "task=astropy-1" in line
        assert "\x1b[31m" not in text


@pytest.mark.parametrize("labels", [{"a": 1}, {1: "a"}, {"a": None}])
async def test_what_are_no_labels_is_refused(labels: Any) -> None:
    async with open_native() as native:
        with pytest.raises(UsageError, match="labels are strings"):
            native.sandbox(labels=labels)
        with pytest.raises(UsageError, match="labels are strings"):
            await (await native.pooled()).acquire(Recipe(), labels=labels)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, ROOM // 4)), max_size=30))
def test_those_that_live_are_told_and_those_that_are_gone_take_little_room(
    steps: list[tuple[bool, int, int]],
) -> None:
    told = LabelFile(os.getpid())
    living: dict[int, dict[str, str]] = {}
    try:
        for number, (is_born, which, size) in enumerate(steps):
            if is_born:
                living[number] = {"a": "x" * size}
                told.put(number, living[number])
            elif living:
                gone = sorted(living)[which % len(living)]
                del living[gone]
                told.drop(gone)
        found = sandbox_labels.read(os.getpid(), [os.getpid()])
        assert living.items() <= found.items()
        assert told._written <= 2 * sum(len(line) for line in told._lines.values()) + 2 * ROOM
    finally:
        told.close()
    assert sandbox_labels.read(os.getpid(), [os.getpid()]) == {}


def test_a_forked_copy_of_the_owner_tells_nothing() -> None:
    told = LabelFile(os.getpid())
    told.put(1, {"a": "b"})
    child = os.fork()
    if not child:
        os._exit(0 if told._file < 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sandbox_labels.read(os.getpid(), [os.getpid()]) == {1: {"a": "b"}}
    told.close()
