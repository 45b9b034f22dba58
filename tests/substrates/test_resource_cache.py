"""Resources that sandboxes share: made once, and the most recently used ones stay."""

from __future__ import annotations

import anyio
import anyio.to_thread
import pytest

from dutyfree.substrates.vm.resource_cache import ResourceCache
from tests.awaiting import together


class Thing:
    closed = False

    def close(self) -> None:
        self.closed = True


async def make() -> Thing:
    return Thing()


async def use(cache: ResourceCache[Thing], key: str) -> Thing:
    async with cache.use(key, make) as thing:
        assert not thing.closed
        return thing


async def test_few_stay_without_a_user() -> None:
    cache: ResourceCache[Thing] = ResourceCache(idle=1)
    first = await use(cache, "one")
    async with cache.use("two", make) as held:
        assert await use(cache, "one") is first
        await use(cache, "three")
        assert first.closed
        last = await use(cache, "four")
        assert await use(cache, "two") is held
    assert last.closed
    assert await use(cache, "two") is held
    cache.close()
    assert held.closed


async def test_nothing_stays_of_many_keys() -> None:
    cache: ResourceCache[Thing] = ResourceCache(idle=2)
    things = [await use(cache, str(number)) for number in range(100)]
    assert [thing.closed for thing in things] == [True] * 98 + [False] * 2
    assert len(cache._entries) == 2


async def test_one_is_made_for_all_who_wait_and_they_need_no_threads() -> None:
    """Else a big disk would hold up the clean-up of other sandboxes."""
    cache: ResourceCache[Thing] = ResourceCache()
    begun, go_on = anyio.Event(), anyio.Event()
    made: list[Thing] = []

    async def slowly() -> Thing:
        begun.set()
        await go_on.wait()
        made.append(Thing())
        return made[-1]

    async def wait() -> None:
        async with cache.use("slow", slowly) as thing:
            assert thing is made[0]

    async def others() -> None:
        await begun.wait()
        assert anyio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
        await use(cache, "quick")
        go_on.set()

    with anyio.fail_after(10):
        await together(others, *[wait] * 50)
    assert len(made) == 1


async def test_what_cannot_be_made_is_tried_again_and_leaves_nothing() -> None:
    cache: ResourceCache[Thing] = ResourceCache()

    async def fail() -> Thing:
        raise OSError("no space")

    for _ in range(2):
        with pytest.raises(OSError, match="no space"):
            async with cache.use("one", fail):
                pass
    assert not cache._entries
    await use(cache, "one")


async def test_who_waits_takes_over_from_one_that_is_cancelled() -> None:
    cache: ResourceCache[Thing] = ResourceCache()
    begun = anyio.Event()

    async def never() -> Thing:
        begun.set()
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async def wait_forever(*, task_status: anyio.abc.TaskStatus[anyio.CancelScope]) -> None:
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            async with cache.use("one", never):
                pass

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            scope = await tasks.start(wait_forever)
            await begun.wait()
            tasks.start_soon(use, cache, "one")
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert len(cache._entries) == 1
