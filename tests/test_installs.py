"""Installing for real: npm and apt by their ordinary clients, from the registries that this machine uses."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import anyio.to_thread
import pytest

from dutyfree import Recipe, Stage, layers, recipes, study_image
from dutyfree.contract.errors import CreateError
from tests.opening import open_native
from tests.test_recipes import git

pytestmark = [pytest.mark.native, pytest.mark.root("layers lie on the disk with root only")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package with its lock, as npm itself writes it. Skips where npm reaches no registry."""
    if not shutil.which("npm"):
        pytest.skip("npm is missing; to enable it: apt-get install npm")
    root = tmp_path / "project"
    root.mkdir()
    package = {"name": "little", "version": "1.0.0", "dependencies": {"is-number": "7.0.0"}}
    (root / "package.json").write_text(json.dumps(package))
    done = subprocess.run(
        ["npm", "install", "--package-lock-only", "--no-audit", "--no-fund", "--fetch-retries=0"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        pytest.skip(
            f"npm reaches no registry: {done.stderr[-200:]}; to enable it: npm config set registry URL"
        )
    return root


async def test_npm_installs_what_the_lock_says(project: Path, cache: Path) -> None:
    del cache
    lock = project / "package-lock.json"
    files = Stage("files", files={"repository/package.json": project / "package.json"})
    recipe = Recipe(stages=(files, recipes.npm(lock=lock)))
    see = 'node -e \'console.log(require("is-number")(5), require("is-number/package.json").version)\''
    for ran in (True, False):
        async with open_native() as native, native.sandbox(recipe) as sandbox:
            seen = await sandbox.exec(see, cwd="repository")
            assert seen.stdout == b"true 7.0.0\n", seen
            assert [entry.name for entry in await sandbox.list(".")] == [
                "repository"
            ]  # neither lock nor cache
        kept = await anyio.to_thread.run_sync(layers.ls)
        assert len(kept) == 2
        if ran:
            times = [entry.made for entry in kept]
    assert [entry.made for entry in kept] == times  # the second time nothing was made
    # Another lock is another layer; one that does not fit to the package is npm's to refuse.
    wrong = lock.read_text().replace("7.0.0", "6.0.0")
    lock.write_text(wrong)
    other = Recipe(stages=(files, recipes.npm(lock=lock)))
    assert await anyio.to_thread.run_sync(other.key) != kept[-1].recipe
    async with open_native() as native:
        with pytest.raises(CreateError, match="npm ci"):
            await native.prepare(other)


async def test_apt_installs_into_an_image(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUTYFREE_CACHE")
    made = await anyio.to_thread.run_sync(study_image.built)
    if made is None:
        pytest.skip("there is no image with apt; to enable it: dutyfree image build")
    debian = str(made.tar)
    monkeypatch.setenv("DUTYFREE_CACHE", str(cache))
    recipe = Recipe(debian, (recipes.apt("hello"),))
    async with open_native() as native:
        try:
            await native.prepare(recipe)
        except CreateError as error:
            if "Could not resolve" in error.message or "Unable to locate" in error.message:
                pytest.skip(
                    f"apt reaches no mirror: {error.message}; to enable it: see /etc/apt in the image"
                )
            raise
        async with native.sandbox(recipe) as sandbox:
            assert (await sandbox.exec("hello")).stdout == b"Hello, world!\n"
            assert await sandbox.list("/var/lib/apt/lists") == ()
            left = await sandbox.exec("find /var/cache/apt -name '*.deb'")
            assert left.stdout == b""
        with pytest.raises(CreateError, match="no-such-package"):
            await native.prepare(Recipe(debian, (recipes.apt("no-such-package"),)))


async def test_a_branch_stays_what_it_was_when_it_was_cloned(tmp_path: Path, cache: Path) -> None:
    """The commit is kept with the layer, and told."""
    del cache
    work = tmp_path / "work"

    def commit(text: str) -> str:
        (work / "file").write_text(text)
        git(work, "add", ".")
        git(work, "commit", "-q", "-m", text)
        return git(work, "rev-parse", "HEAD")

    def begin() -> str:
        work.mkdir()
        git(work, "init", "-q", "-b", "main")
        return commit("one")

    first = await anyio.to_thread.run_sync(begin)
    copied = Stage("files", files={"/srv/work": work})
    recipe = Recipe(stages=(copied, recipes.repository("file:///srv/work", branch="main")))
    async with open_native() as native:
        await native.prepare(recipe)
    kept = await anyio.to_thread.run_sync(layers.ls)
    assert [(entry.kind, entry.commit) for entry in kept] == [("files", ""), ("repository", first)]
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        assert (await sandbox.exec("git -C repository rev-parse HEAD")).stdout.decode().strip() == first
