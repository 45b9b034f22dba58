"""The tiers. T0: one command. T1: look at a repository. T2: clone, install, find and fix a bug, run tests.

Paths are relative to the working directory of the sandbox. Every result is checked.
"""

from __future__ import annotations

from pathlib import Path

from dutyfree.contract import Edit, Exec, Limits, List, Read, Recipe, Stage
from dutyfree.workloads.fixture import GIT_ENVIRONMENT, GIT_TRUST_ALL, Fixture
from dutyfree.workloads.workload import Expect, Step, StepKind, Workload

REPOSITORY = "attrs"
"""Path of the repository in the sandbox."""

SYMBOLS = Path(__file__).with_name("symbols.py")

GIT = {**GIT_ENVIRONMENT, **GIT_TRUST_ALL}

PYTHON = {
    "PYTHONPATH": "src:../deps",  # the attrs of the repository must come before the one that hypothesis needs
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONNOUSERSITE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}

FAILING = "tests/test_hooks.py::TestTransformHook::test_hook_generator"
"""The test that fails with the bug and passes with the fix."""

WIDER = (
    "tests/test_hooks.py",
    "tests/test_cmp.py",
    "tests/test_setattr.py",
    "tests/test_next_gen.py",
    "tests/test_dunders.py",
)

FIRST = Step("ready", "command", Exec(("echo", "ready")), Expect(contains=(b"ready\n",)))


def t0() -> Workload:
    return Workload(name="T0", first=FIRST)


def t1(fixture: Fixture) -> Workload:
    """Look at a repository that is part of the recipe."""
    stage = Stage("repository", files={REPOSITORY: fixture.checkout})
    return Workload(
        name="T1", first=FIRST, recipe=Recipe(stages=(stage,)), actions=(*_inspection(), status("status"))
    )


def t2(fixture: Fixture, url: str, *, full_tests: bool = False) -> Workload:
    """Clone, inspect, see the test fail, fix it, see it pass, run more tests, review the diff, reset."""
    patch = fixture.patch
    wider = full_suite() if full_tests else pytest("tests-wider", *WIDER, says=b"260 passed, 1 xfailed")
    actions = (
        *_inspection(),
        pytest("test-before", FAILING, exit_code=1, says=f"FAILED {FAILING}".encode(), and_says=b"1 failed"),
        Step("patch", "modify", Edit(f"{REPOSITORY}/{patch.path}", patch.old, patch.new)),
        pytest("test-after", FAILING, says=b"1 passed"),
        wider,
        git("diff", "inspect", "diff", "--no-ext-diff", contains=_changed_lines(patch.diff)),
        shell(
            "reset",
            "modify",
            "git reset --quiet --hard && git clean -fdxq && echo done",
            contains=(b"done\n",),
        ),
        status("status-after", "--ignored"),
    )
    return Workload(
        name="T2",
        first=FIRST,
        recipe=recipe(fixture),
        setup=setup(fixture, url),
        actions=actions,
        limits=Limits(network="on"),
    )


def recipe(fixture: Fixture) -> Recipe:
    """The recipe of T2 and the trajectories: the wheels, so that no trial needs a package index."""
    return Recipe(stages=(Stage("files", files={"wheels": fixture.wheels}),))


def setup(fixture: Fixture, url: str) -> tuple[Stage, ...]:
    """The measured set-up of T2 and the trajectories: clone and install."""
    environment = ("env", *(f"{name}={value}" for name, value in GIT.items()))
    clone = (*environment, "git", "clone", "--quiet", url, REPOSITORY)
    checkout = (*environment, "git", "-C", REPOSITORY, "checkout", "--quiet", "-b", "work", fixture.commit)
    pip = ("python3", "-m", "pip", "--isolated", "install", "--quiet", "--disable-pip-version-check")
    offline = ("--no-index", "--find-links", "wheels", "--no-cache-dir", "--target", "deps")
    packages = ("pytest", "hypothesis", "cloudpickle", "pympler")
    return (
        Stage("repository", commands=(clone, checkout)),
        Stage("dependencies", commands=((*pip, *offline, *packages),)),
    )


# --- Steps -----------------------------------------------------------------------------------------


def run(
    label: str,
    kind: StepKind,
    command: str | tuple[str, ...],
    *,
    exit_code: int = 0,
    contains: tuple[bytes, ...] = (),
    env: dict[str, str] | None = None,
) -> Step:
    """A command in the repository."""
    return Step(label, kind, Exec(command, cwd=REPOSITORY, env=env), Expect(exit_code, contains))


def git(label: str, kind: StepKind, *arguments: str, contains: tuple[bytes, ...] = ()) -> Step:
    return run(label, kind, ("git", "--no-pager", *arguments), contains=contains, env=GIT)


def shell(label: str, kind: StepKind, command: str, *, contains: tuple[bytes, ...] = ()) -> Step:
    return run(label, kind, command, contains=contains, env=GIT)


def status(label: str, *options: str, changes: tuple[str, ...] = ()) -> Step:
    """Check that the working tree has exactly ``changes``, in the format of ``git status --porcelain``."""
    expected = "".join(f"{line}\n" for line in changes)
    command = f"echo begin && git status {' '.join(('--porcelain', *options))} && echo end"
    return shell(label, "command", command, contains=(f"begin\n{expected}end\n".encode(),))


def pytest(
    label: str, *tests: str, exit_code: int = 0, says: bytes = b" passed", and_says: bytes = b""
) -> Step:
    """Run tests of the repository with its own source."""
    command = ("python3", "-m", "pytest", "--quiet", "--color=no", *tests)
    contains = (says, and_says) if and_says else (says,)
    return run(label, "test", command, exit_code=exit_code, contains=contains, env=PYTHON)


def full_suite() -> Step:
    """Run all tests of attrs, except those that cannot pass in a source tree."""
    return pytest(
        "tests-full",
        "-p",
        "_hypothesis_pytestplugin",
        "--hypothesis-seed=0",
        "--ignore=tests/test_packaging.py",
        "--deselect=tests/test_converters.py::TestPipe::test_wrapped_annotation",
        "tests",
    )


def symbols(label: str, root: str, name: str, lines: tuple[str, ...]) -> Step:
    """Search ``root`` for definitions and callers of ``name``, and expect exactly ``lines``."""
    command = ("python3", "-c", SYMBOLS.read_text(encoding="utf-8"), root, name)
    return run(
        label,
        "inspect",
        command,
        contains=("".join(f"{line}\n" for line in ("begin", *lines, "end")).encode(),),
    )


def _inspection() -> tuple[Step, ...]:
    """First steps in an unknown repository. The expected results are those of the buggy commit."""
    return (
        Step(
            "list",
            "inspect",
            List(REPOSITORY),
            Expect(contains=(b".git", b"README.md", b"pyproject.toml", b"src", b"tests")),
        ),
        run("ls", "inspect", ("ls", "-l", "src/attr"), contains=(b" _make.py\n", b" validators.py\n")),
        Step(
            "read",
            "inspect",
            Read(f"{REPOSITORY}/src/attr/_make.py"),
            Expect(contains=(b"def _transform_attrs(", b"attrs = field_transformer(cls, attrs)\n")),
        ),
        run(
            "grep",
            "inspect",
            ("grep", "-rn", "field_transformer(", "src"),
            contains=(b"src/attr/_make.py:451:        attrs = field_transformer(cls, attrs)\n",),
        ),
        git(
            "log",
            "inspect",
            "log",
            "--oneline",
            "--no-decorate",
            contains=(b"ebfa157 Test that a field_transformer may be a generator\n", b" Add attrs 25.2.0\n"),
        ),
        git("show", "inspect", "show", "HEAD", contains=(b"+    def test_hook_generator(self):\n",)),
        symbols(
            "symbols",
            "src/attr",
            "_transform_attrs",
            (
                "call src/attr/_make.py:667 _ClassBuilder.__init__",
                "definition src/attr/_make.py:375 _transform_attrs",
            ),
        ),
    )


def _changed_lines(diff: str) -> tuple[bytes, ...]:
    return tuple(
        f"\n{line}\n".encode()
        for line in diff.splitlines()
        if line[:1] in "+-" and not line.startswith(("+++", "---"))
    )
