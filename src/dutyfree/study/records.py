"""Records: the raw measurements of a study, one JSON line each, appended when a trial ends.

The first line is a ``study`` line. Then follow, in the order of events, a ``session`` line for every start
or resume, a ``substrate`` line for every prepared substrate, and a ``trial`` line for every trial, including
warm-ups and failures. Lines are never changed. If a kill or a full disk leaves an incomplete last line,
readers skip it, and a resumed study removes it. A finished file may be compressed with gzip.

All times are in seconds. ``Trial.total`` lasts from the request for a sandbox until the sandbox is removed.
"""

from __future__ import annotations

import contextlib
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
    """The first line: the plan and the machine."""

    schema: int
    version: str
    """The version of dutyfree."""
    started: str
    """ISO 8601, UTC."""
    plan: dict[str, Any]
    host: dict[str, Any]
    """Facts: cpu, cores, memory_gib, kernel, os, cgroups, python, ... Hosts with the same ``host_key`` can be
    compared."""


class Session(msgspec.Struct, frozen=True, tag="session", omit_defaults=True):
    """A start or a resume of the study."""

    started: str
    load: float
    """One-minute load average."""
    budget: float | None = None
    """Seconds after which it stops, even if trials are missing."""


class SubstrateFacts(msgspec.Struct, frozen=True, tag="substrate"):
    """A substrate of the plan: its facts, or why it was left out."""

    label: str
    use: str
    """The substrate's name in the registry; ``label`` is its name in the plan."""
    facts: dict[str, str]
    prepare_seconds: float = 0.0
    unavailable: str | None = None
    """Why it was left out."""


class ActionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One action of a trial, as measured by the caller."""

    label: str
    """The same label at the same place in every trial of the workload: "grep", "test-after", ..."""
    kind: ActionKind
    seconds: float
    """Wall time."""
    inside: float | None = None
    """Time inside the command, if the substrate reports it."""
    spans: tuple[Span, ...] = ()
    usage: Usage | None = None


class TrialFailure(msgspec.Struct, frozen=True):
    """Why a trial failed.

    ``infrastructure``: the substrate failed. ``task``: a result was not as expected. ``timeout``: the trial
    or one of its actions took too long.
    """

    kind: Literal["infrastructure", "task", "timeout"]
    phase: Phase
    cause: str


class Trial(msgspec.Struct, frozen=True, tag="trial", kw_only=True, omit_defaults=True):
    """One rollout. A failed one has what was measured until it failed."""

    id: str
    workload: str
    """T0, T1, T2, trajectory-N, ... (``workloads.NAMES``), or the name of a recorded trajectory."""
    substrate: str
    """The label in the plan."""
    index: int
    parallel: int = 1
    """Number of parallel rollouts."""
    warmup: bool = False
    started: str
    load: float
    creation: float = 0.0
    """From the request until the caller has the handle of the sandbox."""
    creation_spans: tuple[Span, ...] = ()
    readiness: float = 0.0
    """From the handle to the result of the first command."""
    first: ActionRecord | None = None
    """The first command. Its wall time is part of ``readiness``."""
    setup: tuple[ActionRecord, ...] = ()
    actions: tuple[ActionRecord, ...] = ()
    cleanup: float = 0.0
    total: float = 0.0
    failure: TrialFailure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def first_result(self) -> float:
        """Time to first command: from the request to the first command's result."""
        return self.creation + self.readiness

    @property
    def cell(self) -> tuple[str, str, int]:
        """The key of the trial's cell: (workload, substrate, parallel)."""
        return (self.workload, self.substrate, self.parallel)


Line = Study | Session | SubstrateFacts | Trial

_decoder = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()
_FIRST_BYTES = b'{"type":"study",'
_GZIP = b"\x1f\x8b"


class Records(msgspec.Struct, frozen=True):
    """The content of a file of records."""

    study: Study
    sessions: tuple[Session, ...]
    substrates: dict[str, SubstrateFacts]
    """By label: the last line of each substrate that has facts, else the first."""
    trials: tuple[Trial, ...]
    """In the order in which they ended, including warm-ups and failures."""

    @property
    def measured(self) -> tuple[Trial, ...]:
        """The trials without warm-ups."""
        return tuple(trial for trial in self.trials if not trial.warmup)


def read(where: Path) -> Records:
    """Read the records in a directory, or a file of records, compressed or not. Raises RecordsError."""
    path = _file(where)
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP):
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise RecordsError(
            f"there are no records in {where}" if where.is_dir() else f"there is no {where}",
            remedy="name the directory of 'dutyfree study --out', or a file of records",
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RecordsError(f"{path} is a damaged gzip file: {error}", remedy="copy the file again") from error
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error.strerror}") from error
    return _assemble(path, _parse(path, data))


def home(where: Path) -> Path:
    """The directory of the records that ``read`` finds. Reports and exports are written there."""
    return where if where.is_dir() else where.parent


def exists(directory: Path) -> bool:
    """Whether the directory has a study. A killed one may have left an incomplete line only."""
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
                f"{path}:{number}: not a dutyfree record: {error}",
                remedy="the file is damaged, or a newer version wrote it (this version reads schema "
                f"{SCHEMA})",
            ) from error


def _assemble(path: Path, lines: Iterator[Line]) -> Records:
    study = next(lines, None)
    if not isinstance(study, Study):
        raise RecordsError(
            f"{path} does not start with a study line", remedy="start a new study in another directory"
        )
    if study.schema != SCHEMA:
        raise RecordsError(
            f"{path} has schema {study.schema}, but this version reads schema {SCHEMA}",
            remedy=f"use the version of dutyfree that wrote it ({study.version})",
        )
    rest = list(lines)
    facts: dict[str, SubstrateFacts] = {}
    for line in rest:
        # A substrate that was measured and later became unavailable keeps its facts.
        if isinstance(line, SubstrateFacts) and (line.unavailable is None or line.label not in facts):
            facts[line.label] = line
    return Records(
        study=study,
        sessions=tuple(line for line in rest if isinstance(line, Session)),
        substrates=facts,
        trials=tuple(line for line in rest if isinstance(line, Trial)),
    )


class RecordsWriter:
    """Appends lines to the records. Each write is complete before the next one starts."""

    def __init__(self, directory: Path) -> None:
        """Open for appending. The first write removes an incomplete last line. Raises RecordsError."""
        self.path = directory / FILE
        if _file(directory) == directory / COMPRESSED:
            raise RecordsError(
                f"the records in {directory} are compressed, so nothing can be appended",
                remedy=f"to continue, run: gunzip {shlex.quote(str(directory / COMPRESSED))}",
            )
        self._made_directory = not directory.exists()
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
                f"another study is writing to {directory}",
                remedy="wait until it ends, or choose another --out",
            ) from None
        data = self.path.read_bytes()
        self._end = data.rfind(b"\n") + 1
        if not self._end and not _FIRST_BYTES.startswith(data[: len(_FIRST_BYTES)]):
            os.close(self._fd)
            raise RecordsError(
                f"{self.path} is not a file of records", remedy="choose another directory with --out"
            )
        self._worthless = self.empty
        """Whether the file had no record before, and has no trial yet."""

    @property
    def empty(self) -> bool:
        return self._end == 0

    def write(self, *lines: Line) -> None:
        """Append all lines or none. Raises RecordsError; earlier lines stay intact."""
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
                remedy="free some space, then continue with --resume: earlier trials are kept",
            ) from error
        self._end += len(data)
        if any(isinstance(line, Trial) for line in lines):
            self._worthless = False

    def discard_if_no_trial(self) -> None:
        """Remove a new file without any trial, and the directory if it was made for the file.

        A study that was refused would otherwise be the latest one, and nothing can be resumed in it.
        """
        if self._worthless:
            self.path.unlink(missing_ok=True)
            if self._made_directory:
                with contextlib.suppress(OSError):  # something else is in it
                    self.path.parent.rmdir()

    def close(self) -> None:
        os.close(self._fd)
