"""Content keys: recipes are the same if their text and the files that they copy in are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.contract import Observation, Recipe, Stage
from dutyfree.contract.errors import CreateError, Quarantined, StageError
from dutyfree.contract.services import Service
from dutyfree.engine.layers.keys import RecipeKeys, identity
from dutyfree.engine.pool.pool import Pool
from dutyfree.engine.pool.scheduler.values import Policy
from dutyfree.substrates.scripted import Scripted
from tests.engine import virtual
from tests.engine.pool.scripted_source import ScriptedSource
from tests.opening import open_native

WORDS = st.sampled_from(["a", "b", "c"])
SETS = st.dictionaries(WORDS, WORDS, max_size=2)
STAGES = st.builds(
    Stage,
    kind=st.sampled_from(["setup", "dependencies"]),
    commands=st.lists(st.one_of(WORDS, st.lists(WORDS, min_size=1, max_size=2)), max_size=2).map(tuple),
    secrets=st.lists(WORDS, max_size=1).map(tuple),
)
SERVICES = st.builds(Service, name=st.just("one"), command=WORDS | st.lists(WORDS, min_size=1), env=SETS)
RECIPES = st.builds(
    Recipe,
    image=st.one_of(st.none(), WORDS),
    stages=st.lists(STAGES, max_size=2).map(tuple),
    services=st.lists(SERVICES, max_size=1).map(tuple),
    env=SETS,
    path=st.lists(WORDS, max_size=1).map(tuple),
)


@given(RECIPES, RECIPES)
def test_recipes_that_say_the_same_are_one_and_no_others(one: Recipe, other: Recipe) -> None:
    assert (one == other) == (one.key() == other.key())
    if one == other:
        assert hash(one) == hash(other)
    assert len({one, other}) == 2 - (one == other)


def test_files_count_by_their_paths_where_recipes_are_compared(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    one, same, other = (Recipe(stages=(Stage("files", files={"f": tmp_path / name}),)) for name in "aab")
    assert (one == same, one == other) == (True, False)
    assert (hash(one) == hash(same), one.key() == other.key()) == (True, True)


def test_a_recipe_with_files_means_what_they_were_when_it_was_first_wanted(tmp_path: Path) -> None:
    async def main() -> None:
        keys = RecipeKeys()
        former, later = written(tmp_path, "1"), written(tmp_path, "1")
        meant = await keys.of(former)
        fixed = keys.fixed(former, meant)
        await anyio.to_thread.run_sync((tmp_path / "file").write_text, "2")
        assert await keys.of(former) == meant
        assert await keys.of(keys.cut(fixed, 2)) == meant[:2]
        now = await keys.of(later)
        assert (now[0], now[1] == meant[1]) == (meant[0], False)
        # Its files had changed: the next request uses the present ones.
        keys.forget(meant[1])
        assert await keys.of(former) == now
        assert await keys.of(fixed) == meant

    anyio.run(main)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    recipe = written(tmp_path, "1")
    (tmp_path / "file").unlink()
    with pytest.raises(CreateError, match=r"the recipe names .*file: No such file"):
        anyio.run(RecipeKeys().of, recipe)


def test_what_is_remembered_is_bounded_and_keeps_what_is_used(tmp_path: Path) -> None:
    from dutyfree.engine.layers.keys import RecipeCache

    some: RecipeCache[int] = RecipeCache(2)
    one, two, three = (Recipe(stages=(Stage("setup", (str(number),)),)) for number in range(3))
    some.put(one, 1)
    some.put(two, 2)
    assert some.get(one) == 1
    some.put(three, 3)
    assert [some.get(recipe) for recipe in (one, two, three)] == [1, None, 3]
    files, same = written(tmp_path, "1"), written(tmp_path, "1")
    assert files == same
    assert identity(files) != identity(same)


def written(directory: Path, text: str) -> Recipe:
    """A recipe with a stage that copies a file in, and one after it."""
    (directory / "file").write_text(text)
    return Recipe(stages=(Stage("files", files={"file": directory / "file"}), Stage("setup", ("echo",))))


# --- In the pool ------------------------------------------------------------------------------------------


def anew(command: str) -> Recipe:
    return Recipe(stages=(Stage("setup", (command,)),), env={"A": "1"})


def source() -> ScriptedSource:
    script = {"false": Observation(exit_code=1), "echo": Observation(exit_code=0, seconds=1.0)}
    return ScriptedSource(Scripted(Scripted.Config(create_seconds=0.01), script=script))


def test_recipes_written_twice_are_one_to_the_pool() -> None:
    async def main() -> None:
        made = source()
        async with Pool(made, policy=Policy(refill=False)) as pool:
            await pool.prefetch([anew("echo")], 1)
            await pool.prefetch([anew("echo")], 1)  # the same prefetch again
            await pool.keep(anew("echo"), 1, 2)
            await pool.until_idle(anew("echo"), 1)
            lease = await pool.acquire(anew("echo"), idempotency_key="k")
            assert lease.served[0].kind == "warm"
            assert await pool.acquire(anew("echo"), idempotency_key="k") is lease
            assert made.ran == ["echo"]
            assert len(pool._chains._known._known) == 1
            for _ in range(3):
                with pytest.raises(StageError):
                    await pool.acquire(anew("false"))
            with pytest.raises(Quarantined):
                await pool.acquire(anew("false"))

    virtual.run(main)


root = pytest.mark.root("stages lie on the disk with root only")


async def _text(native: Any, recipe: Recipe) -> bytes:
    async with native.sandbox(recipe) as sandbox:
        return bytes(await sandbox.read("file"))


@root
@pytest.mark.parametrize("pooled", [False, True])
async def test_files_that_change_are_seen_by_a_recipe_written_anew(
    cache: Path, tmp_path: Path, pooled: bool
) -> None:
    async with open_native() as native:
        if pooled:
            await native.pooled()
        former = await anyio.to_thread.run_sync(written, tmp_path, "1")
        assert await _text(native, former) == b"1"
        later = await anyio.to_thread.run_sync(written, tmp_path, "2")
        assert [await _text(native, one) for one in (former, later, former)] == [b"1", b"2", b"1"]


@root
async def test_what_the_pool_makes_later_is_what_was_asked_for(cache: Path, tmp_path: Path) -> None:
    """Or nothing: the files of the key are gone by then."""
    async with open_native() as native:
        pool = await native.pooled()
        recipe = await anyio.to_thread.run_sync(written, tmp_path, "1")
        chain = await pool._chains.of(recipe)
        await anyio.to_thread.run_sync((tmp_path / "file").write_text, "2")
        with pytest.raises(CreateError, match="changed while it was built"):
            await pool.acquire(recipe)
        assert await _text(native, recipe) == b"2"  # asked again
        assert (await pool._chains.of(recipe)).key != chain.key
