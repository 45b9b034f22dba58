"""Trajectories: the first n actions of one endless sequence, the same on every substrate.

A mix in ``mixes/`` has the weights of the actions, and ``operands/`` has the files, strings and tests of the
repository that they work with. The generator keeps the files of the repository in memory
and applies the actions to them, so every action has an exact expected result, whatever was changed before
it.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain, count, islice
from pathlib import Path
from typing import TypeVar

import msgspec

from dutyfree.contract import Edit, Limits, List, Read, Write
from dutyfree.workloads import symbols, tiers
from dutyfree.workloads.fixture import Fixture
from dutyfree.workloads.project import ATTRS, Project
from dutyfree.workloads.workload import Expect, Step, StepKind, Workload

T = TypeVar("T")

MIXES = ("trajectory", "inspect", "edit", "build")
"""The mixes. ``trajectory`` is the usual one."""


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: str
    prints: str


class NewTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    text: str


class Operands(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    roots: list[str]
    parsed: str
    edited: list[str]
    directories: list[str]
    strings: list[str]
    symbols: list[str]
    globs: list[str]
    tests: dict[str, int]
    programs: list[Program]
    new_test: NewTest


class Mix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kinds: dict[StepKind, int]
    verbs: dict[StepKind, dict[str, int]]


def mix(name: str = MIXES[0]) -> Mix:
    path = Path(__file__).with_name("mixes") / f"{name}.toml"
    return msgspec.toml.decode(path.read_bytes(), type=Mix)


def operands(project: Project) -> Operands:
    path = Path(__file__).with_name("operands") / f"{project.name}.toml"
    return msgspec.toml.decode(path.read_bytes(), type=Operands)


def trajectory(n: int, fixture: Fixture, url: str, seed: int = 0, kind: str = MIXES[0]) -> Workload:
    """``n`` actions after T2's set-up. A shorter trajectory is the start of a longer one of its mix."""
    return Workload(
        name=f"{kind if fixture.project is ATTRS else fixture.project.name}-{n}",
        first=tiers.FIRST,
        recipe=tiers.recipe(fixture),
        setup=tiers.setup(fixture, url),
        actions=tuple(islice(steps(fixture, mix(kind), seed), n)),
        limits=Limits(network="on"),
    )


def steps(fixture: Fixture, mix: Mix, seed: int = 0) -> Iterator[Step]:
    """The endless sequence of steps."""
    kinds = spread(mix.kinds)
    verbs = {kind: spread(weights) for kind, weights in mix.verbs.items()}
    script = _Script(fixture, seed)
    for position in count(1):
        kind = next(kinds)
        yield script.step(position, kind, next(verbs[kind]))


def spread(weights: Mapping[T, int]) -> Iterator[T]:
    """Endless choices by weight, spread evenly: every part of the sequence has the same mix."""
    total = sum(weights.values())
    credit = dict.fromkeys(weights, 0)
    while True:
        for choice, weight in weights.items():
            credit[choice] += weight
        chosen = max(credit, key=credit.__getitem__)
        credit[chosen] -= total
        yield chosen


@lru_cache(1000)
def _found(path: str, content: bytes, name: str) -> tuple[str, ...]:
    """Cached, because parsing takes most of the time and most files never change."""
    return tuple(symbols.search([(path, content.decode())], name))


class _Script:
    """The files of the repository in memory, and the steps that read and change them."""

    def __init__(self, fixture: Fixture, seed: int) -> None:
        self._original = _tracked(fixture.checkout)
        self._files = dict(self._original)
        self._patch = fixture.patch
        self._project = fixture.project
        self._operands = operands(fixture.project)
        self._seed = seed
        self._position = 0
        self._reproduced = False
        self._fixed = False
        self._edits: dict[str, Edit] = {}
        self._written: list[str] = []

    def step(self, position: int, kind: StepKind, verb: str) -> Step:
        self._position = position
        verb = self._possible(verb)
        step: Step = getattr(self, f"_{verb}")(f"{position:03d}-{verb}")
        assert step.kind == kind, f"{verb} is not a verb of kind {kind}"
        return step

    def _possible(self, verb: str) -> str:
        """The verb, or another one if it is not possible yet: the failure comes first, then the fix."""
        if verb in ("edit", "revert"):
            if self._fix_is_due or not self._edits:
                return "edit"
            if len(self._edits) == len(self._operands.edited):
                return "revert"
        if verb in ("file", "new") and not self._reproduced:
            return "one"
        if verb == "new" and not self._written:
            return "file"
        return verb

    @property
    def _fix_is_due(self) -> bool:
        return self._reproduced and not self._fixed

    def _pick(self, options: Sequence[T], purpose: str = "") -> T:
        """A choice that never changes. The random module does not guarantee that between Python releases."""
        text = f"{self._seed}/{self._position}/{purpose}"
        return options[int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % len(options)]

    def _pick_source(self) -> str:
        return self._pick([path for path in sorted(self._files) if self._is_python(path)])

    def _is_python(self, path: str) -> bool:
        return path.endswith(".py") and path.startswith(tuple(f"{root}/" for root in self._operands.roots))

    def _run(
        self,
        label: str,
        kind: StepKind,
        command: tuple[str, ...],
        *,
        exit_code: int = 0,
        contains: tuple[bytes, ...] = (),
        env: dict[str, str] | None = None,
    ) -> Step:
        return tiers.run(
            label, kind, command, exit_code=exit_code, contains=contains, env=env, project=self._project
        )

    def _git(self, label: str, kind: StepKind, *arguments: str, contains: tuple[bytes, ...] = ()) -> Step:
        return tiers.git(label, kind, *arguments, contains=contains, project=self._project)

    def _shell(self, label: str, kind: StepKind, command: str, *, contains: tuple[bytes, ...]) -> Step:
        return tiers.shell(label, kind, command, contains=contains, project=self._project)

    def _pytest(self, label: str, test: str, *, says: bytes, exit_code: int = 0) -> Step:
        return tiers.pytest(label, test, exit_code=exit_code, says=says, project=self._project)

    # Inspection

    def _view(self, label: str) -> Step:
        path = self._pick_source()
        lines = self._files[path].splitlines(keepends=True)
        start = self._pick(range(max(1, len(lines) - 40)), "start")
        shown = lines[start : start + 40]
        command = ("sed", "-n", f"{start + 1},{start + 40}p", path)
        return self._run(label, "inspect", command, contains=(b"".join(shown),))

    def _grep(self, label: str) -> Step:
        string, sources = self._pick(self._operands.strings), self._project.sources
        found = []
        for path, content in self._files.items():
            if path.startswith(f"{sources}/") and path.endswith(".py"):
                numbered = enumerate(content.decode().splitlines(), 1)
                block = "".join(f"{path}:{number}:{line}\n" for number, line in numbered if string in line)
                found += [block.encode()] * bool(block)
        command = ("grep", "-rnF", "--include=*.py", "-e", string, sources)
        return self._run(label, "inspect", command, exit_code=0 if found else 1, contains=tuple(found))

    def _read(self, label: str) -> Step:
        path = self._pick_source()
        return Step(
            label, "inspect", Read(f"{self._project.name}/{path}"), Expect(contains=(self._files[path],))
        )

    def _symbols(self, label: str) -> Step:
        name, root = self._pick(self._operands.symbols), self._operands.parsed
        found = (
            _found(path, content, name)
            for path, content in self._files.items()
            if path.startswith(f"{root}/") and path.endswith(".py")
        )
        return tiers.symbols(label, root, name, tuple(sorted(chain.from_iterable(found))), self._project)

    def _list(self, label: str) -> Step:
        directory = self._pick(self._operands.directories)
        prefix = f"{directory}/" if directory else ""
        names = {path[len(prefix) :].split("/")[0] for path in self._files if path.startswith(prefix)}
        where = f"{self._project.name}/{directory}".rstrip("/")
        expect = Expect(contains=tuple(name.encode() for name in sorted(names)))
        return Step(label, "inspect", List(where), expect)

    def _log(self, label: str) -> Step:
        path = self._pick([path for path in self._original if self._is_python(path)])
        what = "the tests of " if self._project.is_test(path) else ""
        contains = (f"    Add {what}{self._project.name} {self._project.buggy}\n".encode(),)
        return self._git(label, "inspect", "log", "--stat", "--", path, contains=contains)

    def _diff(self, label: str) -> Step:
        changes = dict.fromkeys(self._edits, (1, 0))
        lines = [edit.new.splitlines()[1] for edit in self._edits.values()]
        if self._fixed:
            changes[self._patch.path] = (1, 1)
            lines.append(self._patch.new.rstrip(b"\n"))
        counts = "".join(f"{new}\t{old}\t{path}\n" for path, (new, old) in sorted(changes.items()))
        start = f"begin\n{counts}{'' if counts else 'end'}\n".encode()
        command = "echo begin && git --no-pager diff --no-ext-diff --numstat --patch && echo end"
        return self._shell(
            label, "inspect", command, contains=(start, *(b"\n+%b\n" % line for line in lines))
        )

    # Commands

    def _status(self, label: str) -> Step:
        changed = sorted([*self._edits, *([self._patch.path] if self._fixed else [])])
        changes = (*(f" M {path}" for path in changed), *(f"?? {path}" for path in sorted(self._written)))
        return tiers.status(label, changes=changes, project=self._project)

    def _python(self, label: str) -> Step:
        program = self._pick(self._operands.programs)
        contains = (f"{program.prints}\n".encode(),)
        return self._run(
            label, "command", ("python3", "-c", program.code), contains=contains, env=self._project.python
        )

    def _count(self, label: str) -> Step:
        path = self._pick_source()
        contains = (b"%d %b\n" % (self._files[path].count(b"\n"), path.encode()),)
        return self._run(label, "command", ("wc", "-l", path), contains=contains)

    def _find(self, label: str) -> Step:
        glob, roots = self._pick(self._operands.globs), tuple(f"{root}/" for root in self._operands.roots)
        found = sorted(
            path
            for path in self._files
            if path.startswith(roots) and fnmatchcase(path.rpartition("/")[2], glob)
        )
        block = "".join(f"{path}\n" for path in found)
        command = f"echo begin; find {' '.join(self._operands.roots)} -type f -name '{glob}' | sort; echo end"
        return self._shell(label, "command", command, contains=(f"begin\n{block}end\n".encode(),))

    def _checksum(self, label: str) -> Step:
        path = self._pick_source()
        contains = (f"{hashlib.sha256(self._files[path]).hexdigest()}  {path}\n".encode(),)
        return self._run(label, "command", ("sha256sum", path), contains=contains)

    # Builds: they write beside the repository, and start from nothing

    def _compile(self, label: str) -> Step:
        sources = self._project.sources
        number = sum(path.startswith(f"{sources}/") and path.endswith(".py") for path in self._files)
        command = (
            "rm -rf ../build/byte-code && "
            f"PYTHONPYCACHEPREFIX=../build/byte-code python3 -m compileall -qf {sources} ../deps/_pytest && "
            f"find ../build/byte-code -path '*/{self._project.name}/{sources}/*.pyc' | wc -l"
        )
        return self._shell(label, "command", command, contains=(b"%d\n" % number,))

    def _package(self, label: str) -> Step:
        return self._packed(label, "zipfile -c", "zipfile -t", ".zip", b"Done testing\n")

    def _archive(self, label: str) -> Step:
        return self._packed(label, "tarfile -c", "tarfile -v -t", ".tar.gz", b" is a tar archive.\n")

    def _packed(self, label: str, pack: str, test: str, suffix: str, says: bytes) -> Step:
        target = f"../build/{self._project.name}{suffix}"
        command = (
            f"mkdir -p ../build && python3 -m {pack} {target} {' '.join(self._operands.roots)} && "
            f"python3 -m {test} {target}"
        )
        return self._shell(label, "command", command, contains=(says,))

    def _install(self, label: str) -> Step:
        pip = shlex.join(tiers.install("../wheels", "../build/site", "pytest"))
        command = f"rm -rf ../build/site && {pip} && ls ../build/site/pytest"
        return self._shell(label, "command", command, contains=(b"__init__.py\n",))

    # Modification

    def _edit(self, label: str) -> Step:
        if self._fix_is_due:
            self._fixed = True
            return self._change(label, Edit(self._patch.path, self._patch.old, self._patch.new))
        path = self._pick([path for path in self._operands.edited if path not in self._edits])
        content = self._files[path]
        starts = [b"\n%b\n" % line for line in content.splitlines() if line.startswith((b"def ", b"class "))]
        start = self._pick([start for start in starts if content.count(start) == 1], "where")
        edit = Edit(path, start, b"\n# Looked at in action %03d.%b" % (self._position, start))
        self._edits[path] = edit
        return self._change(label, edit)

    def _revert(self, label: str) -> Step:
        path = self._pick(sorted(self._edits))
        edit = self._edits.pop(path)
        if self._pick((True, False), "how"):
            return self._change(label, Edit(path, edit.new, edit.old))
        self._files[path] = self._original[path]
        return self._git(label, "modify", "checkout", "--quiet", "--", path)

    def _change(self, label: str, edit: Edit) -> Step:
        content = self._files[edit.path]
        assert content.count(edit.old) == 1, f"{edit.path} does not contain {edit.old!r} exactly once"
        self._files[edit.path] = content.replace(edit.old, edit.new)
        return Step(label, "modify", Edit(f"{self._project.name}/{edit.path}", edit.old, edit.new))

    def _write(self, label: str) -> Step:
        number = self._position
        new = self._operands.new_test
        path, content = new.path % {"number": number}, (new.text % {"number": number}).encode()
        self._files[path] = content
        self._written.append(path)
        return Step(label, "modify", Write(f"{self._project.name}/{path}", content))

    # Tests

    def _file(self, label: str) -> Step:
        path = self._pick(list(self._operands.tests))
        return self._pytest(label, path, says=f"\n{self._operands.tests[path]} passed in ".encode())

    def _one(self, label: str) -> Step:
        self._reproduced = True
        if self._fixed:
            return self._pytest(label, self._project.failing, says=b"\n1 passed in ")
        return self._pytest(label, self._project.failing, exit_code=1, says=b"\n1 failed in ")

    def _new(self, label: str) -> Step:
        return self._pytest(label, self._written[-1], says=b"\n1 passed in ")


def _tracked(checkout: Path) -> dict[str, bytes]:
    """The files of the repository by path."""
    found = {str(path.relative_to(checkout)): path for path in sorted(checkout.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".git/")}
