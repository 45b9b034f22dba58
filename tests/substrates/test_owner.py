"""Who is known to be dead, and who cannot be judged."""

from __future__ import annotations

import subprocess

from dutyfree.substrates.local.owner import identity, is_dead


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
