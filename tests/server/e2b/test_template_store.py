"""The templates of E2B clients: what a tenant may keep is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from dutyfree.contract.errors import LimitError, RecipeError
from dutyfree.server.e2b.template_store import (
    LATEST_BUILDS,
    MOST_BYTES,
    MOST_TAGS,
    MOST_TEMPLATES,
    TakenSnapshot,
    TemplateStore,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TemplateStore]:
    with TemplateStore(tmp_path / "templates.sqlite") as opened:
        yield opened


def test_builds_that_were_never_started_are_forgotten(store: TemplateStore) -> None:
    template, first = store.request("one", "name", (), None, None)
    first.updated = 1.0  # it waits for its turn
    for _ in range(3 * LATEST_BUILDS):
        store.request("one", "name", (), None, None)
    assert len(template.builds) == LATEST_BUILDS + 1
    assert first.id in template.builds


def test_tags_are_names_and_bounded(store: TemplateStore) -> None:
    tags = tuple(f"tag-{number}" for number in range(MOST_TAGS))
    template, build = store.request("one", "name", tags, None, None)
    with pytest.raises(RecipeError, match="not a name"):
        store.assign(template, build.id, ("x" * 1000,))
    store.assign(template, build.id, tags)
    with pytest.raises(LimitError, match="tags"):
        store.assign(template, build.id, ("more",))
    with pytest.raises(LimitError, match="tags"):
        store.request("one", "name", ("more",), None, None)
    with pytest.raises(RecipeError, match="not a name"):
        store.check_snapshot("one", "x" * 1000)


async def test_the_bytes_of_a_tenant_are_bounded(store: TemplateStore, tmp_path: Path) -> None:
    template, _ = store.request("one", "name", (), None, None)
    await store.save(template)
    await store.save(template)
    with TemplateStore(tmp_path / "templates.sqlite") as again:
        assert again._used["one"] == store._used["one"] > 0
        again._used["one"] = MOST_BYTES + 1
        with pytest.raises(LimitError, match="more than"):
            again.request("one", "other", (), None, None)
        again.request("two", "other", (), None, None)
    await store.remove(template)
    assert store._used["one"] == 0


def test_a_snapshot_is_taken_again_under_its_name(store: TemplateStore) -> None:
    taken = TakenSnapshot("image", "sandbox", "")
    store.snapshots = {("one", f"snapshot-{number}"): taken for number in range(MOST_TEMPLATES)}
    with pytest.raises(LimitError, match="snapshots"):
        store.check_snapshot("one", "new")
    store.check_snapshot("one", "snapshot-0")
    store.check_snapshot("two", "new")


async def test_uploads_at_the_same_time_forget_the_oldest(store: TemplateStore) -> None:
    store._uploads = {("one", f"old-{number}"): "digest" for number in range(MOST_TEMPLATES + 2)}
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(store.add_upload, "one", f"new-{number}", "digest")
    assert len(store._uploads) == MOST_TEMPLATES
    assert store.upload("one", "old-4") is None
    assert store.upload("one", "old-5") == store.upload("one", "new-2") == "digest"
