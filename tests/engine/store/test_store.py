"""The layer store: eviction, locks, and removal while others use it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from dutyfree.engine.store.layer_lease import LayerLease
from dutyfree.engine.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_the_last_used_are_spared(store: Store) -> None:
    keys = [f"stage:{hashlib.sha256(b'%d' % n).hexdigest()}" for n in range(4)]
    for number, key in enumerate(keys):
        with store.obtain(key, lambda tree: ((tree / "f").write_bytes(b"1"), 1, 0)) as lease:
            os.utime(lease.tree.parent / "lease", (number, number))
    with store.obtain(keys[0], lambda tree: pytest.fail("it is there")):
        pass
    assert store.collect(spare=2).layers == 2
    assert {info.key for info in store.layers()} == {keys[3], keys[0]}
    assert store.collect(keep=[keys[3]]).layers == 1
    assert {info.key for info in store.layers()} == {keys[3]}


def test_a_layer_that_a_power_cut_may_have_torn_is_made_again(store: Store) -> None:
    key = f"stage:{'0' * 64}"
    made = []

    def make(tree: Path) -> tuple[int, int, int]:
        made.append(tree)
        return 0, 0, 0

    for is_synced in (False, True):
        with store.obtain(key, make) as lease:
            if is_synced:
                store.sync([key])
            facts = lease.tree.parent / "facts"
            facts.write_bytes(facts.read_bytes().replace(b'"boot":"', b'"boot":"another-'))
    with store.obtain(key, make):
        pass
    assert len(made) == 2


def test_locks_are_removed_under_those_who_wait(store: Store) -> None:
    """Only one thread holds the lock at a time, while another one collects."""
    key = f"stage:{'0' * 64}"
    inside = most = 0
    done = threading.Event()

    def collect() -> None:
        while not done.is_set():
            store.collect()

    def hold() -> None:
        nonlocal inside, most
        for _ in range(30):
            with store.build_lock(key):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    collector = threading.Thread(target=collect)
    holders = [threading.Thread(target=hold) for _ in range(4)]
    for thread in (collector, *holders):
        thread.start()
    for thread in holders:
        thread.join()
    done.set()
    collector.join()
    assert most == 1
    store.collect()
    assert not list((store.root / "locks").iterdir())


def test_removing_takes_no_other_layer_of_the_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it gets the lock, the layer is removed, and built again by another process that uses it."""
    key = f"stage:{'0' * 64}"
    store.obtain(key, lambda _: (0, 0, 0)).close()
    flock = fcntl.flock
    held: list[LayerLease] = []

    def late(descriptor: int, how: int) -> None:
        monkeypatch.undo()
        assert store.remove(key)
        held.append(store.obtain(key, lambda tree: ((tree / "new").write_bytes(b"1"), 1, 0)))
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert not store.remove(key)
    with held[0] as lease:
        assert (lease.tree / "new").exists()
