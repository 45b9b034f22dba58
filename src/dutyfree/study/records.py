"""Records: what was measured, raw, append-only, one JSON line each, flushed as it happens.

A file holds one ``study`` line first, then in the order of events a ``session`` line for every start
or resumption, a ``substrate`` line for every substrate prepared, and a ``trial`` line for every trial,
warm-ups and failures included. Lines are never changed. A torn last line, left by a kill or a full
disk, is cut off when the study resumes; readers pass over it. A finished file may be compressed with gzip.

All times are seconds. ``Trial.total`` runs from the request for a sandbox to the end of its removal.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from dutyfree.contract import Span, Usage
from dutyfree.contract.errors import Phase, RecordsError

SCHEMA = 1
FILE = "records.jsonl"
COMPRESSED = f"{FILE}.gz"

ActionKind = Literal["ready", "setup", "inspect", "command", "modify", "test"]


class Study(msgspec.Struct, frozen=True, tag="study"):
    """The first line: what was asked for, and on what machine."""

    schema: int
    version: str
    """Of dutyfree."""
    started: str
    """ISO 8601, UTC."""
    plan: dict[str, Any]
    host: dict[str, Any]
    """Flat facts: cpu, cores, memory_gib, kernel, os, cgroups, python, ... ``host_key`` among them
    changes when measurements stop being comparable."""


class Session(msgspec.Struct, frozen=True, tag="session"):
    """The study was started or resumed here."""

    started: str
    load: float
    """One-minute load average."""


class SubstrateFacts(msgspec.Struct, frozen=True, tag="substrate"):
    """A substrate of the plan: available with its facts, or left out with the reason."""

    label: str
    use: str
    """The substrate's name in the registry; ``label`` is its name in the plan."""
    facts: dict[str, str]
    prepare_seconds: float = 0.0
    unavailable: str | None = None
    """Why it was left out."""


class ActionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One action of a trial, as the caller saw it."""

    label: str
    """The same label at the same place in every trial of the workload: "grep", "test-after", ..."""
    kind: ActionKind
    seconds: float
    """Wall time."""
    inside: float | None = None
    """The command's own time inside the environment, if the substrate tells."""
    spans: tuple[Span, ...] = ()
    usage: Usage | None = None


class Failure(msgspec.Struct, frozen=True):
    """Why a trial is no result. ``infrastructure``: the substrate failed. ``task``: a wrong answer.

    ``timeout``: the trial or one of its actions overran.
    """

    kind: Literal["infrastructure", "task", "timeout"]
    phase: Phase
    cause: str


class Trial(msgspec.Struct, frozen=True, tag="trial", kw_only=True, omit_defaults=True):
    """One rollout. A failed one holds what was measured until it failed."""

    id: str
    workload: str
    """T0, T1, T2, or trajectory-N."""
    substrate: str
    """The label in the plan."""
    index: int
    parallel: int = 1
    """Rollouts that ran at once."""
    warmup: bool = False
    started: str
    load: float
    creation: float = 0.0
    """From the request to the sandbox's handle."""
    creation_spans: tuple[Span, ...] = ()
    readiness: float = 0.0
    """From the handle to the first command's result."""
    first: ActionRecord | None = None
    """That first command; its wall time is within ``readiness``."""
    setup: tuple[ActionRecord, ...] = ()
    actions: tuple[ActionRecord, ...] = ()
    cleanup: float = 0.0
    total: float = 0.0
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def first_result(self) -> float:
        """Time to first command: from the request to the first command's result."""
        return self.creation + self.readiness

    @property
    def cell(self) -> tuple[str, str, int]:
        """Trials of one cell measure the same thing: (workload, substrate, parallel)."""
        return (self.workload, self.substrate, self.parallel)


Line = Study | Session | SubstrateFacts | Trial

_decoder = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()
_BEGINNING = b'{"type":"study",'
_GZIP = b"\x1f\x8b"


class Records(msgspec.Struct, frozen=True):
    """A whole file, read."""

    study: Study
    sessions: tuple[Session, ...]
    substrates: dict[str, SubstrateFacts]
    """By label, the latest line of each; the latest with facts, if there is one."""
    trials: tuple[Trial, ...]
    """In the order of their ends, warm-ups and failures included."""

    @property
    def measured(self) -> tuple[Trial, ...]:
        """Without warm-ups."""
        return tuple(trial for trial in self.trials if not trial.warmup)


def read(where: Path) -> Records:
    """Read the records of an output directory, or a file of them, compressed or not. Raises RecordsError."""
    path = _file(where)
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP):
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise RecordsError(
            f"there are no records in {where}" if where.is_dir() else f"there is no {where}",
            remedy="name a directory that 'dutyfree study --out' wrote, or a file of records",
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RecordsError(
            f"{path} is a damaged gzip file: {error}", remedy="copy it again from where it was compressed"
        ) from error
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error.strerror}") from error
    return _assemble(path, _parse(path, data))


def home(where: Path) -> Path:
    """The directory of the records that ``read`` finds: what is made from them is written there."""
    return where if where.is_dir() else where.parent


def begun(directory: Path) -> bool:
    """Whether a study was begun there: a killed one may have left half a line and nothing else."""
    path = _file(directory)
    return path.exists() and (path.name == COMPRESSED or b"\n" in path.read_bytes())


def _file(where: Path) -> Path:
    if not where.is_dir():
        return where
    plain, compressed = where / FILE, where / COMPRESSED
    return compressed if compressed.exists() and not plain.exists() else plain


def _parse(path: Path, data: bytes) -> Iterator[Line]:
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            yield _decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise RecordsError(
                f"{path}:{number}: not a record of ours: {error}",
                remedy=f"it was damaged, or written by a newer version (this one reads schema {SCHEMA})",
            ) from error


def _assemble(path: Path, lines: Iterator[Line]) -> Records:
    study = next(lines, None)
    if not isinstance(study, Study):
        raise RecordsError(f"{path} does not begin with a study line", remedy="begin anew elsewhere")
    if study.schema != SCHEMA:
        raise RecordsError(
            f"{path} has schema {study.schema}, this version reads {SCHEMA}",
            remedy=f"use the version of dutyfree that wrote it ({study.version})",
        )
    rest = list(lines)
    told: dict[str, SubstrateFacts] = {}
    for line in rest:
        # A substrate that was measured and is missing later keeps its facts.
        if isinstance(line, SubstrateFacts) and (line.unavailable is None or line.label not in told):
            told[line.label] = line
    return Records(
        study=study,
        sessions=tuple(line for line in rest if isinstance(line, Session)),
        substrates=told,
        trials=tuple(line for line in rest if isinstance(line, Trial)),
    )


class Writer:
    """Appends lines, each whole and on its way to the disk before the next begins."""

    def __init__(self, directory: Path) -> None:
        """Open for appending; a torn last line is cut off with the first write. Raises RecordsError."""
        self.path = directory / FILE
        if _file(directory) == directory / COMPRESSED:
            raise RecordsError(
                f"the records in {directory} are compressed, and nothing can be appended to them",
                remedy=f"to go on, run: gunzip {shlex.quote(str(directory / COMPRESSED))}",
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RecordsError(
                f"cannot write to {directory}: {error.strerror}", remedy="choose another directory with --out"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise RecordsError(
                f"another study is writing to {directory}", remedy="wait for its end, or choose another --out"
            ) from None
        data = self.path.read_bytes()
        self._end = data.rfind(b"\n") + 1
        if not self._end and not _BEGINNING.startswith(data[: len(_BEGINNING)]):
            os.close(self._fd)
            raise RecordsError(f"{self.path} is not ours", remedy="choose another directory with --out")

    @property
    def empty(self) -> bool:
        return self._end == 0

    def write(self, *lines: Line) -> None:
        """Append lines, all or none of them. Raises RecordsError; what was written before stays whole."""
        data = b"".join(_encoder.encode(line) + b"\n" for line in lines)
        left = memoryview(data)
        try:
            os.ftruncate(self._fd, self._end)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise RecordsError(
                f"cannot append to {self.path}: {error.strerror}",
                remedy="free some space, then go on with --resume: what was measured is kept",
            ) from error
        self._end += len(data)

    def close(self) -> None:
        os.close(self._fd)
