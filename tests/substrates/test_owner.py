"""Who is known to be dead, and who cannot be judged."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dutyfree.substrates.local.owner import abandoned, identity, is_dead


def test_the_living_and_the_dead() -> None:
    ours = identity()
    assert ours is not None
    assert not is_dead(ours)
    boot, space, pid, start, machine = ours.split("/")
    assert is_dead(f"{boot}/{space}/{pid}/{int(start) + 1}/{machine}"), "the pid is in use again"
    with subprocess.Popen(["sleep", "60"]) as child:
        other = identity(child.pid)
        assert other is not None
        assert not is_dead(other)
        child.kill()
    assert identity(child.pid) is None
    assert is_dead(other)


def test_only_a_former_boot_of_this_machine_is_dead() -> None:
    boot, space, pid, start, machine = (identity() or "").split("/")
    assert is_dead(f"elsewhere/{space}/{pid}/{start}/{machine}") == bool(machine)
    assert not is_dead(f"elsewhere/{space}/{pid}/{start}/{machine}", after_reboot=False), "maybe a clone"
    assert not is_dead(f"elsewhere/{space}/{pid}/{start}/another-machine")
    assert not is_dead(f"elsewhere/{space}/{pid}/{start}/"), "a machine without a name"
    assert not is_dead(f"{boot}/{int(space) + 1}/{pid}/1/{machine}"), "another pid namespace"
    for unknown in ("", "a", f"{boot}/{space}/{pid}/1", f"{boot}/{space}/x/1/{machine}"):
        assert not is_dead(unknown)


@pytest.mark.root("only root can make the link of another user")
def test_links_of_other_users_say_nothing(tmp_path: Path) -> None:
    """In /tmp everyone can make one, and name any directory or control group with it."""
    boot, space, *_ = (identity() or "").split("/")
    for name in ("dutyfree-x-1", "dutyfree-x-*"):
        (tmp_path / f"{name}.owner").symlink_to(f"{boot}/{space}/999999999/1/x")
    assert len([*abandoned(tmp_path, "dutyfree-x-")]) == 2
    for link in tmp_path.iterdir():
        os.lchown(link, 65534, 65534)
    assert not [*abandoned(tmp_path, "dutyfree-x-")]
