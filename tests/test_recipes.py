"""Stages by name, and recipes from files: right ones work, wrong ones say what is wrong."""

from __future__ import annotations

import io
import os
import socket
import tarfile
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Ready, Recipe, Service, Stage, layers, recipes
from dutyfree.contract.errors import CreateError, RecipeError, UsageError
from dutyfree.contract.stage import tree_digest
from dutyfree.engine.pool.scheduler.values import PrefixChain
from tests.processes import ran

AUTHOR = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b"}
AUTHOR |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def git(root: Path, *arguments: str) -> str:
    done = ran(["git", *arguments], cwd=root, check=True, env={**os.environ, **AUTHOR})
    return done.stdout.strip()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server on this machine: of a git repository (the plain protocol of files), and a package index."""
    root = tmp_path / "served"
    work = tmp_path / "work"
    work.mkdir()
    root.mkdir()
    git(work, "init", "-q", "-b", "main")
    for number in range(3):
        (work / "file").write_text(f"{number}\n")
        git(work, "add", ".")
        git(work, "commit", "-q", "-m", str(number))
    git(work, "clone", "-q", "--bare", str(work), str(root / "project.git"))
    git(root / "project.git", "update-server-info")
    (root / "simple/little").mkdir(parents=True)
    wheel = root / "simple/little/little-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("little.py", "answer = 42\n")
        archive.writestr(
            "little-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: little\nVersion: 1.0\n"
        )
        archive.writestr(
            "little-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("little-1.0.dist-info/RECORD", "")
    (root / "simple/little/index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(root))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://{{}}:{server.server_port}", work
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.native
@pytest.mark.root("the host's servers are reached with root only")
async def test_a_repository_and_its_dependencies(
    served: tuple[str, Path], tmp_path: Path, cache: Path
) -> None:
    url, work = served
    head, before = await anyio.to_thread.run_sync(
        lambda: (git(work, "rev-parse", "HEAD"), git(work, "rev-parse", "HEAD~1"))
    )
    assert await anyio.to_thread.run_sync(recipes.pin, f"{url.format('127.0.0.1')}/project.git") == head
    (tmp_path / "requirements.txt").write_text("little==1.0\n")
    async with dutyfree.open("native") as native:
        there = url.format(native.host_address)
        options = ["--index-url", f"{there}/simple", "--trusted-host", str(native.host_address)]
        options += ["--target", "packages"]
        installed = recipes.pip(requirements=tmp_path / "requirements.txt", options=options)
        for named, branch, commit in ((before, None, before), (None, "main", head), (None, None, head)):
            stage = recipes.repository(f"{there}/project.git", path="a project", commit=named, branch=branch)
            async with native.sandbox(Recipe(stages=(stage, installed))) as sandbox:
                seen = await sandbox.exec("git -C 'a project' rev-parse HEAD")
                assert seen.stdout.decode().strip() == commit, seen
                seen = await sandbox.exec(
                    "PYTHONPATH=packages python3 -c 'import little; print(little.answer)'"
                )
                assert seen.stdout == b"42\n", seen
                seen = await sandbox.exec(f"ls {recipes.stages.LOCKS}")
                assert not seen.ok
        missing = recipes.repository(f"{there}/project.git", commit="0" * 40)
        with pytest.raises(CreateError, match="'repository'"):
            await native.prepare(Recipe(stages=(missing,)))


@pytest.mark.native
@pytest.mark.root("the host's servers are reached with root only")
async def test_a_branch_is_pinned_until_its_layer_is_removed(
    served: tuple[str, Path], tmp_path: Path, cache: Path
) -> None:
    url, work = served

    def go_on() -> None:
        (work / "file").write_text("further\n")
        git(work, "commit", "-q", "-a", "-m", "further")
        git(work, "push", "-q", str(tmp_path / "served/project.git"), "main")
        git(tmp_path / "served/project.git", "update-server-info")

    async def seen() -> bytes:
        async with dutyfree.open("native") as native:
            clone = recipes.repository(f"{url.format(native.host_address)}/project.git", branch="main")
            upon = Stage("setup", ("cp repository/file copy",))
            async with native.sandbox(Recipe(stages=(clone, upon))) as sandbox:
                return (await sandbox.exec("cat repository/file copy")).stdout

    assert await seen() == b"2\n2\n"
    await anyio.to_thread.run_sync(go_on)
    assert await seen() == b"2\n2\n"
    (clone,) = [kept for kept in await anyio.to_thread.run_sync(layers.ls) if kept.commit]
    assert await anyio.to_thread.run_sync(git, work, "rev-parse", "HEAD~1") == clone.commit
    assert await anyio.to_thread.run_sync(layers.remove, [clone.name]) == [clone.name]
    assert await seen() == b"further\nfurther\n"  # and not what was made upon the former


@pytest.mark.parametrize("kind", ["tar", "zip", "directory"])
async def test_a_local_repository(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    if kind == "tar":
        with tarfile.open(source, "w:gz") as tar:
            entry = tarfile.TarInfo("inner/file")
            entry.size = 2
            tar.addfile(entry, io.BytesIO(b"1\n"))
    elif kind == "zip":
        with zipfile.ZipFile(source, "w") as archive:
            archive.writestr("inner/file", "1\n")
            for name, mode, text in (
                ("deep/link", 0o120777, "../run"),
                ("run", 0o100755, "#!/bin/sh\necho 2"),
            ):
                member = zipfile.ZipInfo(name)
                member.external_attr = mode << 16
                archive.writestr(member, text)
    else:
        (source / "inner").mkdir(parents=True)
        (source / "inner/file").write_text("1\n")
    recipe = Recipe(stages=(await anyio.to_thread.run_sync(recipes.repository, source),))
    async with dutyfree.open("bare") as bare, bare.sandbox(recipe) as sandbox:
        assert await sandbox.read("repository/inner/file") == b"1\n"
        assert [entry.name for entry in await sandbox.list(".")] == ["repository"]
        if kind == "zip":
            assert (await sandbox.exec("repository/deep/link")).stdout == b"2\n"


@pytest.mark.parametrize("kind", ["tar", "zip"])
async def test_leading_directories_of_an_archive_can_be_dropped(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    if kind == "tar":
        with tarfile.open(source, "w:gz") as tar:
            for name in ("top/inner/file", "top/run"):
                entry = tarfile.TarInfo(name)
                entry.size = 2
                tar.addfile(entry, io.BytesIO(b"1\n"))
    else:
        with zipfile.ZipFile(source, "w") as archive:
            archive.mkdir("top")
            archive.writestr("top/inner/file", "1\n")
            archive.writestr("top/run", "1\n")
    (tmp_path / "recipe.toml").write_text(
        '[[stages]]\nkind = "repository"\nsource = "source"\npath = "here"\nstrip = 1\n'
    )

    def made() -> list[Recipe]:
        stages = [recipes.repository(source, path="here", strip=strip) for strip in (0, 1, 2)]
        found = [Recipe(stages=(stage,)) for stage in stages]
        assert len({recipe.key() for recipe in found}) == 3
        assert recipes.load(tmp_path / "recipe.toml").key() == found[1].key()
        return found

    whole, one, two = await anyio.to_thread.run_sync(made)
    async with dutyfree.open("bare") as bare:
        for recipe, names in ((whole, ["top"]), (one, ["inner", "run"]), (two, ["file"])):
            async with bare.sandbox(recipe) as sandbox:
                assert sorted(entry.name for entry in await sandbox.list("here")) == names


@pytest.mark.parametrize(
    ("source", "strip", "told"),
    [
        ("https://example.org/a.git", 1, "only an archive takes strip"),
        (".", 1, "only an archive takes strip"),
        (".", -1, "strip must be a number of directories ≥ 0"),
    ],
)
def test_what_cannot_be_stripped_is_refused(source: str, strip: int, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        recipes.repository(source, strip=strip)


def test_keys_of_prefixes_read_every_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def counted(path: Path) -> bytes:
        read.append(path)
        return tree_digest(path)

    monkeypatch.setattr("dutyfree.contract.stage.tree_digest", counted)
    files = [tmp_path / name for name in "abc"]
    for path in files:
        path.write_text(path.name)
    stages = tuple(Stage("files", files={path.name: path}) for path in files)
    recipe = Recipe(stages=stages, services=(Service("one", "sleep 9"),))
    key = PrefixChain.of(recipe).key
    assert read == files
    assert key == recipe.served_key(recipe.keys()[-1])
    prefixes = [Recipe(stages=stages[:length]).key() for length in range(4)]
    assert list(recipe.keys()) == prefixes == [recipe.key(length) for length in range(4)]
    assert recipe.key() not in prefixes


@pytest.mark.timeout(60)
def test_what_is_not_copied_does_not_count(tmp_path: Path) -> None:
    """Such as the socket that git leaves where it watches files, and a pipe that nobody writes to."""
    (tmp_path / "file").write_text("1")
    before = Recipe(stages=(recipes.repository(tmp_path),)).key()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert Recipe(stages=(recipes.repository(tmp_path),)).key() == before


@pytest.mark.native
async def test_one_copy_serves_many_commits(served: tuple[str, Path], tmp_path: Path, cache: Path) -> None:
    """And, if it is wanted, none of them tells what came after it."""
    _, work = served

    def prepare() -> list[str]:
        git(work, "tag", "early", "HEAD~2")
        git(work, "tag", "late")
        git(work, "branch", "fix")
        git(work, "remote", "add", "origin", "https://example.org/project.git")
        (work / "file").write_text("changed, not committed\n")
        return git(work, "rev-list", "HEAD").split()

    last, middle, first = await anyio.to_thread.run_sync(prepare)
    copied = await anyio.to_thread.run_sync(recipes.repository, work)
    async with dutyfree.open("native") as native:
        for commit, content in ((last, b"2\n"), (middle, b"1\n")):
            async with native.sandbox(Recipe(stages=(copied, recipes.checkout(commit)))) as sandbox:
                assert await sandbox.read("repository/file") == content
                assert (await sandbox.exec(f"git -C repository cat-file -e {last}")).ok
        recipe = Recipe(stages=(copied, recipes.checkout(middle, only_past=True)))
        async with native.sandbox(recipe) as sandbox:
            served_from: Any = sandbox
            assert served_from.served.stage == "repository", "the copy was there already"
            told = {
                "git log --all --reflog --format=%H | sort": "".join(sorted((f"{middle}\n", f"{first}\n"))),
                "git tag": "early\n",
                "git remote": "",
                "git status --porcelain": "",
                f"git cat-file -e {last} || echo gone": "gone\n",
            }
            for command, says in told.items():
                seen = await sandbox.exec(command, cwd="repository")
                assert seen.stdout.decode() == says, (command, seen)
        with pytest.raises(CreateError, match="0000"):
            await native.prepare(Recipe(stages=(copied, recipes.checkout("0" * 40))))


def test_a_directory_with_a_commit_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"checkout\(commit\)"):
        recipes.repository(tmp_path, commit="a" * 40)


def test_the_same_in_other_words_has_the_same_key(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.txt"
    lock.write_text("a==1")
    one = Recipe(stages=(Stage("setup", ("a", ("b", "c")), {"d": lock}), recipes.pip(requirements=lock)))
    other = RECIPE(
        stages=[STAGE("setup", ["a", ["b", "c"]], {"d": str(lock)}), recipes.pip(requirements=str(lock))]
    )
    assert other.key() == one.key()


STAGE: Any = Stage
RECIPE: Any = Recipe
PIP: Any = recipes.pip
APT: Any = recipes.apt
PYTHON: Any = recipes.python
"""As they are without a type checker."""


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: STAGE("deps"), "there is no kind of stage 'deps' .the kinds are: repository, "),
        (lambda: STAGE("setup", "make"), "commands must be a list of strings, not 'make'"),
        (lambda: STAGE("setup", ("make",), secrets="TOKEN"), "secrets must be a list"),
        (lambda: STAGE("setup", (3,)), "a command must be a list of strings, not 3"),
        (lambda: STAGE("setup", (("make", 3),)), "a command must be a list of strings"),
        (lambda: STAGE("setup", ("make",), secrets=(3,)), "secrets must be a list of strings"),
        (lambda: PIP("a", secrets="TOKEN"), "secrets must be a list of strings, not 'TOKEN'"),
        (lambda: PYTHON(["ast"]), "the command of the service 'python' must consist of strings"),
        (lambda: RECIPE(Path("/image.tar")), "image must be a string, not PosixPath.*str"),
        (lambda: RECIPE(stages=STAGE("setup")), "stages must be a list of Stage"),
        (lambda: RECIPE(stages=("make",)), "stages must be a list of Stage"),
        (lambda: RECIPE(services=("server",)), "services must be a list of Service"),
        (lambda: RECIPE(env=["A=b"]), "env must be a table of names and values, not "),
        (lambda: RECIPE(env={"A": 1}), "the variable 'A' must be a string, not 1"),
        (lambda: RECIPE(env={b"A": "b"}), "the variable b'A' must be a string"),
        (lambda: RECIPE(env={"": "b"}), "'' is not a valid name of a variable"),
        (lambda: RECIPE(env={"A=": "b"}), "'A=' is not a valid name of a variable"),
        (lambda: RECIPE(env={"A\0": "b"}), "is not a valid name of a variable"),
        (lambda: RECIPE(env={"A": "b\0"}), "the variable A has a value that no process can have: "),
        (lambda: RECIPE(env={"A": "\ud800"}), "the variable A has a value that no process can have: "),
        (lambda: RECIPE(path="bin"), "path must be a list of strings, not 'bin'"),
        (lambda: RECIPE(path=(Path("bin"),)), "path must be a list of strings"),
        (lambda: RECIPE(path=("a:b",)), "'a:b' is not a valid directory of PATH"),
        (lambda: RECIPE(path=("",)), "'' is not a valid directory of PATH"),
    ],
)
def test_what_is_no_recipe_is_refused_where_it_is_written(make: Any, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PIP(["a"]), r"\['a'\] must be a string"),
        (lambda: PIP("a", python=3), "3 must be a string"),
        (lambda: PIP("a", options="--pre"), r"options must be a list of strings, not '--pre'"),
        (lambda: APT(["git"]), r"\['git'\] must be a string"),
    ],
)
def test_packages_and_options_are_strings(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_lock_files_count_by_their_contents(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("a==1")
    one = Recipe(stages=(recipes.pip(requirements=lock),)).key()
    lock.write_text("a==2")
    assert Recipe(stages=(recipes.pip(requirements=lock),)).key() != one
    link = tmp_path / "link"
    link.symlink_to(lock)
    linked = Recipe(stages=(recipes.pip(requirements=link),)).key()
    assert linked == Recipe(stages=(recipes.pip(requirements=lock),)).key()
    lock.write_text("a==3")
    assert Recipe(stages=(recipes.pip(requirements=link),)).key() != linked


def test_a_token_is_named_and_never_told() -> None:
    stage = recipes.repository("https://example.org/x.git", token="TOKEN")
    assert stage.secrets == ("TOKEN",)
    assert "$TOKEN" in str(stage.commands)


RIGHT = """
image = "debian:12"
[[stages]]
kind = "repository"
source = "https://example.org/project.git"
commit = "{commit}"
[[stages]]
kind = "checkout"
commit = "{commit}"
only_past = true
[[stages]]
kind = "pip"
requirements = "requirements.txt"
[[stages]]
kind = "apt"
packages = ["git"]
[[stages]]
kind = "npm"
[[stages]]
kind = "dependencies"
commands = ["cargo fetch --locked"]
locks = {{ "Cargo.lock" = "requirements.txt" }}
[[stages]]
kind = "files"
files = {{ "there" = "requirements.txt" }}
[[stages]]
kind = "setup"
commands = ["make"]
secrets = ["KEY"]
"""


def test_a_recipe_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("pytest\n")
    file = tmp_path / "recipe.toml"
    file.write_text(RIGHT.format(commit="a" * 40))
    recipe = recipes.load(file)
    assert recipe.image == "debian:12"
    kinds = [stage.kind for stage in recipe.stages]
    assert kinds == ["repository", "repository", *["dependencies"] * 4, "files", "setup"]
    assert recipe.stages[-1].secrets == ("KEY",)
    assert recipe.key() == recipes.load(file).key()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages = 3", "stages"),
        ("[[stages]]\nkind = 'pip'", "stage 1 of 1: pip has nothing"),
        (
            "[[stages]]\nkind = 'pop'",
            "stage 1 of 1: there is no kind of stage 'pop' .did you mean 'pip'. the kinds are",
        ),
        (
            "[[stages]]\ncommands = ['a']",
            "stage 1 of 1: the key 'kind' is missing .the kinds are: repository, ",
        ),
        ("imagine = 'a'", "no key 'imagine' .did you mean 'image'. the keys are: image, stages, services, "),
        (
            "[[stages]]\nkind = 'setup'\ncommands = 'a'",
            "stage 1 of 1: setup: commands must be a list, such as .\"a\"., not 'a'",
        ),
        (
            "[[stages]]\nkind = 'apt'\npackages = ['a']\n[[stages]]\nkind = 'setup'\ncommand = ['a']",
            "stage 2 of 2: setup: there is no key 'command' .did you mean 'commands'. the keys are: commands",
        ),
        ("[[stages]]\nkind = 'repository'\nsource = 'nowhere'", "neither a URL"),
        ("[[stages]]\nkind = 'repository'\nsource = 'https://a/b'\ncommit = 'abc'", "not a whole commit"),
        ("[[stages]]\nkind = 'files'\nfiles = { a = 'nowhere' }", "there is no"),
        ("env = ['A=b']", 'env must be a table, such as .name = "…"., not a list'),
        ("[env]\nLEVEL = 1", ".env. LEVEL must be a string, not 1"),
        ("[env]\n'A=' = '1'", "'A=' is not a valid name of a variable"),
        ("path = '.venv/bin'", "path must be a list, such as .\".venv/bin\"., not '.venv/bin'"),
        ("path = ['a:b']", "'a:b' is not a valid directory of PATH"),
        ("[[", "not TOML"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        recipes.load(file)
    with pytest.raises(UsageError, match="cannot be read"):
        recipes.load(tmp_path / "absent.toml")


def test_services_count_in_the_key_of_the_whole_alone() -> None:
    stage = Stage("setup", commands=("true",))
    plain = Recipe(stages=(stage,))
    served = Recipe(stages=(stage,), services=(Service("one", "sleep 9"),))
    other = Recipe(stages=(stage,), services=(Service("one", "sleep 9", env={"A": "b"}),))
    assert len({plain.key(), served.key(), other.key()}) == 3
    assert plain.key(1) == served.key(1) == other.key(1) == plain.key()  # its layers are the same
    first, second = {"A": "1", "B": "2"}, {"B": "2", "A": "1"}
    keys = {Recipe(services=(Service("one", "x", env=env),)).key() for env in (first, second)}
    assert len(keys) == 1
    assert recipes.python("json").command != recipes.python("ast").command


def test_variables_count_in_the_key_of_the_whole_alone() -> None:
    stage = Stage("setup", commands=("true",))
    plain = Recipe(stages=(stage,))
    given = [Recipe(stages=(stage,), env={"A": "1", "B": "2"}), Recipe(stages=(stage,), path=("bin",))]
    assert len({plain.key(), *(one.key() for one in given)}) == 3
    assert {one.keys() for one in given} == {plain.keys()}  # their layers are the same
    assert given[0].key() == Recipe(stages=(stage,), env={"B": "2", "A": "1"}).key()
    assert Recipe(path=("a", "b")).key() != Recipe(path=("b", "a")).key()
    assert Recipe(env={}, path=()).key() == Recipe().key()


def test_variables_stay_as_they_were_given() -> None:
    mine = {"A": "1"}
    recipe = RECIPE(env=mine, path=["bin"])
    mine["A"] = "2"
    assert recipe == Recipe(env={"A": "1"}, path=("bin",))


@pytest.mark.parametrize(
    ("env", "path", "wanted"),
    [
        ({}, (), {}),
        ({"A": "$B"}, (), {"A": "$B"}),
        ({}, ("bin", "/opt"), {"PATH": "/work/bin:/opt:/usr/bin"}),
        ({}, ("./a/../bin/",), {"PATH": "/work/bin:/usr/bin"}),
        ({"PATH": "/bin"}, ("bin",), {"PATH": "/work/bin:/bin"}),
        ({"PATH": ""}, ("bin",), {"PATH": "/work/bin"}),
        ({"PATH": "/bin"}, (), {"PATH": "/bin"}),
    ],
)
def test_what_commands_get(env: dict[str, str], path: tuple[str, ...], wanted: dict[str, str]) -> None:
    assert Recipe(env=env, path=path).variables("/work", "/usr/bin") == wanted


def test_variables_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('path = [".venv/bin"]\n[env]\nPYTHONPATH = "/workspace/repository"\nLEVEL = "1"\n')
    wanted = Recipe(env={"PYTHONPATH": "/workspace/repository", "LEVEL": "1"}, path=(".venv/bin",))
    assert recipes.load(file) == wanted


def test_services_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        """
        [[services]]
        name = "server"
        command = ["pylsp", "--tcp"]
        ready = { socket = "/tmp/s" }
        seconds = 5

        [[services]]
        name = "plain"
        command = "sleep 1"
        env = { A = "b" }

        [[python]]
        modules = ["ast", "pytest"]
        env = { PYTHONPATH = "/workspace/deps" }
        """
    )
    loaded = recipes.load(file)
    assert loaded.services == (
        Service("server", ("pylsp", "--tcp"), Ready(socket="/tmp/s"), 5),
        Service("plain", "sleep 1", env={"A": "b"}),
        recipes.python("ast", "pytest", env={"PYTHONPATH": "/workspace/deps"}),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[services]]\nname = 'a'\ncommand = ''", "a service needs a name and a command"),
        ("[[services]]\nname = 'a'\ncommand = 'x'\nseconds = 0", "needs time to become ready"),
        ("[[services]]\nname = 'a'\ncommand = 'x'\nready = { line = 'x', file = 'y' }", "give one of them"),
        ("[[services]]\nname = 'a'\ncommand = 'x'\nready = { line = '' }", "cannot be empty"),
        (
            "[[services]]\nname = 'a'\ncommand = 'x'\nsecrets = ['TOKEN']",
            "service 1 of 1: there is no key 'secrets'",
        ),
        (2 * "[[services]]\nname = 'a'\ncommand = 'x'\n", "two services have the same name"),
        (2 * "[[python]]\nmodules = ['ast']\n", "two services have the same name: python, python"),
    ],
)
def test_services_that_make_no_sense(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        recipes.load(file)
    assert says in str(raised.value)
    assert "recipe.toml" in str(raised.value)
