"""Named snapshots on a server: they survive it, and belong to one tenant."""

from __future__ import annotations

from pathlib import Path

import pytest

import dutyfree
from dutyfree.contract import Recipe
from dutyfree.contract.errors import RecipeError, UsageError
from dutyfree.server.tokens import Tokens
from tests.awaiting import until
from tests.serving import serving

pytestmark = [pytest.mark.native, pytest.mark.root("snapshots with names are on disk")]


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    with Tokens(tmp_path / "server.sqlite") as tokens:
        return tokens.create("ours"), tokens.create("theirs")


async def test_names_belong_to_a_tenant_and_survive_the_server(
    tmp_path: Path, cache: Path, keys: tuple[str, str]
) -> None:
    ours, theirs = keys
    with serving(tmp_path) as url:
        async with dutyfree.open("hosted", url=url, token=ours) as hosted, hosted.sandbox() as sandbox:
            await sandbox.write("file", b"kept")
            kept = await sandbox.snapshot("state")
            assert kept.image == "snapshot:state"
            with pytest.raises(UsageError, match="already"):
                await sandbox.snapshot("state")
            with pytest.raises(UsageError, match="no name"):
                await sandbox.snapshot("../state")
    with serving(tmp_path) as url:
        async with (
            dutyfree.open("hosted", url=url, token=ours) as mine,
            dutyfree.open("hosted", url=url, token=theirs) as others,
        ):
            async with mine.sandbox(Recipe("snapshot:state")) as sandbox:
                assert await sandbox.read("file") == b"kept"
            for image in ("snapshot:state", "snapshot:served.ours.state", "snapshot:ours.state"):
                with pytest.raises(RecipeError, match="no snapshot"):
                    await others.prepare(Recipe(image))
            others.forget(Recipe("snapshot:state"))
            await others.facts()
            await mine.prepare(Recipe("snapshot:state"))  # it is still there
            mine.forget(Recipe("snapshot:state"))

            async def gone() -> bool:
                try:
                    await mine.prepare(Recipe("snapshot:state"))
                except RecipeError:
                    return True
                return False

            assert await until(gone)
            async with mine.sandbox() as sandbox:
                await sandbox.write("file", b"new")
                await sandbox.snapshot("state")
            async with mine.sandbox(Recipe("snapshot:state")) as sandbox:
                assert await sandbox.read("file") == b"new"
