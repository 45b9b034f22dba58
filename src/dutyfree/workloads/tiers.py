"""The tiers. T0: one command. T1: look at a repository. T2: clone, install, find and fix a bug, run tests.

Here are also the steps that trajectories have. Paths are relative to the working directory of the sandbox.
Every result is checked.
"""

from __future__ import annotations

from pathlib import Path

from dutyfree.contract import Edit, Exec, Limits, List, Read, Recipe, Stage
from dutyfree.workloads.fixture import GIT_ENVIRONMENT, GIT_TRUST_ALL, Fixture
from dutyfree.workloads.project import ATTRS, Project
from dutyfree.workloads.workload import Expect, Step, StepKind, Workload

SYMBOLS = Path(__file__).with_name("symbols.py")

GIT = {**GIT_ENVIRONMENT, **GIT_TRUST_ALL}

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
    stage = Stage("repository", files={ATTRS.name: fixture.checkout})
    return Workload(
        name="T1", first=FIRST, recipe=Recipe(stages=(stage,)), actions=(*_inspection(), status("status"))
    )


def t2(fixture: Fixture, url: str, *, full_tests: bool = False) -> Workload:
    """Clone, inspect, see the test fail, fix it, see it pass, run more tests, review the diff, reset."""
    patch = fixture.patch
    wider = full_suite() if full_tests else pytest("tests-wider", *WIDER, says=b"260 passed, 1 xfailed")
    actions = (
        *_inspection(),
        pytest(
            "test-before",
            ATTRS.failing,
            exit_code=1,
            says=f"FAILED {ATTRS.failing}".encode(),
            and_says=b"1 failed",
        ),
        Step("patch", "modify", Edit(f"{ATTRS.name}/{patch.path}", patch.old, patch.new)),
        pytest("test-after", ATTRS.failing, says=b"1 passed"),
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
    project = fixture.project
    environment = ("env", *(f"{name}={value}" for name, value in GIT.items()))
    # Through git's transport, also if the repository is in the sandbox: hard links would be another workload,
    # and not every sandbox's file system has them.
    clone = (*environment, "git", "clone", "--quiet", "--no-local", url, project.name)
    checkout = (*environment, "git", "-C", project.name, "checkout", "--quiet", "-b", "work", project.commit)
    return (
        Stage("repository", commands=(clone, checkout)),
        Stage("dependencies", commands=(install("wheels", "deps", *project.packages),)),
    )


def install(wheels: str, target: str, *packages: str) -> tuple[str, ...]:
    """The command that installs packages from a directory of wheels, without a package index."""
    pip = ("python3", "-m", "pip", "--isolated", "install", "--quiet", "--disable-pip-version-check")
    offline = ("--no-index", "--find-links", wheels, "--no-cache-dir", "--target", target)
    return (*pip, *offline, *packages)


# --- Steps -----------------------------------------------------------------------------------------


def run(
    label: str,
    kind: StepKind,
    command: str | tuple[str, ...],
    *,
    exit_code: int = 0,
    contains: tuple[bytes, ...] = (),
    env: dict[str, str] | None = None,
    project: Project = ATTRS,
) -> Step:
    """A command in the repository."""
    return Step(label, kind, Exec(command, cwd=project.name, env=env), Expect(exit_code, contains))


def git(
    label: str,
    kind: StepKind,
    *arguments: str,
    contains: tuple[bytes, ...] = (),
    project: Project = ATTRS,
) -> Step:
    command = ("git", "--no-pager", *arguments)
    return run(label, kind, command, contains=contains, env=GIT, project=project)


def shell(
    label: str, kind: StepKind, command: str, *, contains: tuple[bytes, ...] = (), project: Project = ATTRS
) -> Step:
    return run(label, kind, command, contains=contains, env=GIT, project=project)


def status(label: str, *options: str, changes: tuple[str, ...] = (), project: Project = ATTRS) -> Step:
    """Check that the working tree has exactly ``changes``, in the format of ``git status --porcelain``."""
    expected = "".join(f"{line}\n" for line in changes)
    command = f"echo begin && git status {' '.join(('--porcelain', *options))} && echo end"
    contains = (f"begin\n{expected}end\n".encode(),)
    return shell(label, "command", command, contains=contains, project=project)


def pytest(
    label: str,
    *tests: str,
    exit_code: int = 0,
    says: bytes = b" passed",
    and_says: bytes = b"",
    project: Project = ATTRS,
) -> Step:
    """Run tests of the repository with its own source."""
    command = ("python3", "-m", "pytest", "--quiet", "--color=no", *tests)
    contains = (says, and_says) if and_says else (says,)
    return run(
        label, "test", command, exit_code=exit_code, contains=contains, env=project.python, project=project
    )


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


def symbols(label: str, root: str, name: str, lines: tuple[str, ...], project: Project = ATTRS) -> Step:
    """Search ``root`` for definitions and callers of ``name``, and expect exactly ``lines``."""
    command = ("python3", "-c", SYMBOLS.read_text(encoding="utf-8"), root, name)
    return run(
        label,
        "inspect",
        command,
        contains=("".join(f"{line}\n" for line in ("begin", *lines, "end")).encode(),),
        project=project,
    )


def _inspection() -> tuple[Step, ...]:
    """First steps in an unknown repository. The expected results are those of the buggy commit."""
    return (
        Step(
            "list",
            "inspect",
            List(ATTRS.name),
            Expect(contains=(b".git", b"README.md", b"pyproject.toml", b"src", b"tests")),
        ),
        run("ls", "inspect", ("ls", "-l", "src/attr"), contains=(b" _make.py\n", b" validators.py\n")),
        Step(
            "read",
            "inspect",
            Read(f"{ATTRS.name}/src/attr/_make.py"),
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
