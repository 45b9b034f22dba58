"""A new owner of sandboxes: what a hostile init can send, and that no name is given twice."""

from __future__ import annotations

import pytest

import dutyfree
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.layers.memory_layers import MemorySnapshots
from dutyfree.engine.sandbox.channel import ForeignCommands
from tests.opening import open_native


@pytest.mark.parametrize("told", [False, True])
def test_an_init_cannot_send_output_of_former_commands_for_ever(told: bool) -> None:
    foreign = ForeignCommands()
    if told:
        foreign.unclaimed = {7}
    size = 1 << 20
    taken = 0
    while foreign.expects(Frame.OUTPUT, 7, size):
        taken += size
        assert taken < 1 << 30
    assert taken > 64 << 20


@pytest.mark.native
async def test_a_new_snapshot_does_not_get_the_name_of_an_adopted_one() -> None:
    async with open_native() as native, native.sandbox() as sandbox:
        assert isinstance(sandbox, dutyfree.abilities.Snapshottable)
        recipe = await sandbox.snapshot()
        former = native.node.snapshots
        kept = former.kept(recipe.image or "")
        following = MemorySnapshots(former.layers)  # as of a new owner, whose process has the same id
        following.adopt(kept)
        following.layers.hold(kept.start.trees)
        other = following.add(kept.start.state)
        assert other.image != recipe.image
        following.forget(other)
        following.forget(recipe)
