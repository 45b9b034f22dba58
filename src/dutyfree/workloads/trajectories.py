"""Trajectories: the first n actions of one endless sequence, the same on every substrate.

The sequence follows the weights in ``mix.toml``. The generator keeps the files of the repository in memory
and applies the actions to them, so every action has an exact expected result, whatever was changed before
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain, count, islice
from pathlib import Path
from typing import TypeVar

import msgspec

from dutyfree.contract import Edit, Limits, List, Read, Write
from dutyfree.workloads import symbols, tiers
from dutyfree.workloads.downloads import BUGGY
from dutyfree.workloads.fixture import Fixture
from dutyfree.workloads.workload import Expect, Step, StepKind, Workload

T = TypeVar("T")

MIX = Path(__file__).with_name("mix.toml")


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: str
    prints: str


class Operands(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    edited: list[str]
    directories: list[str]
    strings: list[str]
    symbols: list[str]
    globs: list[str]
    tests: dict[str, int]
    programs: list[Program]


class Mix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kinds: dict[StepKind, int]
    verbs: dict[StepKind, dict[str, int]]
    operands: Operands


def mix() -> Mix:
    return msgspec.toml.decode(MIX.read_bytes(), type=Mix)


def trajectory(n: int, fixture: Fixture, url: str, seed: int = 0) -> Workload:
    """``n`` actions after T2's set-up. A shorter trajectory is the start of a longer one."""
    return Workload(
        name=f"trajectory-{n}",
        first=tiers.FIRST,
        recipe=tiers.recipe(fixture),
        setup=tiers.setup(fixture, url),
        actions=tuple(islice(steps(fixture, mix(), seed), n)),
        limits=Limits(network="on"),
    )


def steps(fixture: Fixture, mix: Mix, seed: int = 0) -> Iterator[Step]:
    """The endless sequence of steps."""
    kinds = spread(mix.kinds)
    verbs = {kind: spread(weights) for kind, weights in mix.verbs.items()}
    script = _Script(fixture, mix.operands, seed)
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

    def __init__(self, fixture: Fixture, operands: Operands, seed: int) -> None:
        self._original = _tracked(fixture.checkout)
        self._files = dict(self._original)
        self._patch = fixture.patch
        self._operands = operands
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
        return self._pick([path for path in sorted(self._files) if _is_source(path)])

    # Inspection

    def _view(self, label: str) -> Step:
        path = self._pick_source()
        lines = self._files[path].splitlines(keepends=True)
        start = self._pick(range(max(1, len(lines) - 40)), "start")
        shown = lines[start : start + 40]
        command = ("sed", "-n", f"{start + 1},{start + 40}p", path)
        return tiers.run(label, "inspect", command, contains=(b"".join(shown),))

    def _grep(self, label: str) -> Step:
        string = self._pick(self._operands.strings)
        found = []
        for path, content in self._files.items():
            if path.startswith("src/") and path.endswith(".py"):
                numbered = enumerate(content.decode().splitlines(), 1)
                block = "".join(f"{path}:{number}:{line}\n" for number, line in numbered if string in line)
                found += [block.encode()] * bool(block)
        command = ("grep", "-rnF", "--include=*.py", "-e", string, "src")
        return tiers.run(label, "inspect", command, exit_code=0 if found else 1, contains=tuple(found))

    def _read(self, label: str) -> Step:
        path = self._pick_source()
        return Step(
            label, "inspect", Read(f"{tiers.REPOSITORY}/{path}"), Expect(contains=(self._files[path],))
        )

    def _symbols(self, label: str) -> Step:
        name = self._pick(self._operands.symbols)
        found = (
            _found(path, content, name)
            for path, content in self._files.items()
            if path.startswith("src/attr/") and path.endswith(".py")
        )
        return tiers.symbols(label, "src/attr", name, tuple(sorted(chain.from_iterable(found))))

    def _list(self, label: str) -> Step:
        directory = self._pick(self._operands.directories)
        prefix = f"{directory}/" if directory else ""
        names = {path[len(prefix) :].split("/")[0] for path in self._files if path.startswith(prefix)}
        where = f"{tiers.REPOSITORY}/{directory}".rstrip("/")
        expect = Expect(contains=tuple(name.encode() for name in sorted(names)))
        return Step(label, "inspect", List(where), expect)

    def _log(self, label: str) -> Step:
        path = self._pick([path for path in self._original if _is_source(path)])
        subject = f"Add attrs {BUGGY}" if path.startswith("src/") else f"Add the tests of attrs {BUGGY}"
        contains = (f"    {subject}\n".encode(),)
        return tiers.git(label, "inspect", "log", "--stat", "--", path, contains=contains)

    def _diff(self, label: str) -> Step:
        changes = dict.fromkeys(self._edits, (1, 0))
        lines = [edit.new.splitlines()[1] for edit in self._edits.values()]
        if self._fixed:
            changes[self._patch.path] = (1, 1)
            lines.append(self._patch.new.rstrip(b"\n"))
        counts = "".join(f"{new}\t{old}\t{path}\n" for path, (new, old) in sorted(changes.items()))
        start = f"begin\n{counts}{'' if counts else 'end'}\n".encode()
        command = "echo begin && git --no-pager diff --no-ext-diff --numstat --patch && echo end"
        return tiers.shell(
            label, "inspect", command, contains=(start, *(b"\n+%b\n" % line for line in lines))
        )

    # Commands

    def _status(self, label: str) -> Step:
        changed = sorted([*self._edits, *([self._patch.path] if self._fixed else [])])
        changes = (*(f" M {path}" for path in changed), *(f"?? {path}" for path in sorted(self._written)))
        return tiers.status(label, changes=changes)

    def _python(self, label: str) -> Step:
        program = self._pick(self._operands.programs)
        contains = (f"{program.prints}\n".encode(),)
        return tiers.run(
            label, "command", ("python3", "-c", program.code), contains=contains, env=tiers.PYTHON
        )

    def _count(self, label: str) -> Step:
        path = self._pick_source()
        contains = (b"%d %b\n" % (self._files[path].count(b"\n"), path.encode()),)
        return tiers.run(label, "command", ("wc", "-l", path), contains=contains)

    def _find(self, label: str) -> Step:
        glob = self._pick(self._operands.globs)
        found = sorted(
            path
            for path in self._files
            if path.startswith(("src/", "tests/")) and fnmatchcase(path.rpartition("/")[2], glob)
        )
        block = "".join(f"{path}\n" for path in found)
        command = f"echo begin; find src tests -type f -name '{glob}' | sort; echo end"
        return tiers.shell(label, "command", command, contains=(f"begin\n{block}end\n".encode(),))

    def _checksum(self, label: str) -> Step:
        path = self._pick_source()
        contains = (f"{hashlib.sha256(self._files[path]).hexdigest()}  {path}\n".encode(),)
        return tiers.run(label, "command", ("sha256sum", path), contains=contains)

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
        return tiers.git(label, "modify", "checkout", "--quiet", "--", path)

    def _change(self, label: str, edit: Edit) -> Step:
        content = self._files[edit.path]
        assert content.count(edit.old) == 1, f"{edit.path} does not contain {edit.old!r} exactly once"
        self._files[edit.path] = content.replace(edit.old, edit.new)
        return Step(label, "modify", Edit(f"{tiers.REPOSITORY}/{edit.path}", edit.old, edit.new))

    def _write(self, label: str) -> Step:
        number = self._position
        path = f"tests/test_action_{number:03d}.py"
        content = (
            "import attr\n\n\n"
            f"def test_action_{number:03d}():\n"
            '    cls = attr.make_class("C", {"x": attr.ib(), "y": attr.ib(default=1)})\n\n'
            f"    assert (({number}, 1)) == attr.astuple(cls({number}))\n"
        ).encode()
        self._files[path] = content
        self._written.append(path)
        return Step(label, "modify", Write(f"{tiers.REPOSITORY}/{path}", content))

    # Tests

    def _file(self, label: str) -> Step:
        path = self._pick(list(self._operands.tests))
        return tiers.pytest(label, path, says=f"\n{self._operands.tests[path]} passed in ".encode())

    def _one(self, label: str) -> Step:
        self._reproduced = True
        if self._fixed:
            return tiers.pytest(label, tiers.FAILING, says=b"\n1 passed in ")
        return tiers.pytest(label, tiers.FAILING, exit_code=1, says=b"\n1 failed in ")

    def _new(self, label: str) -> Step:
        return tiers.pytest(label, self._written[-1], says=b"\n1 passed in ")


def _tracked(checkout: Path) -> dict[str, bytes]:
    """The files of the repository by path."""
    found = {str(path.relative_to(checkout)): path for path in sorted(checkout.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".git/")}


def _is_source(path: str) -> bool:
    return path.startswith(("src/", "tests/")) and path.endswith(".py")
