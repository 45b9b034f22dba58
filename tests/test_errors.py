"""Whose fault an error is follows from its type, wherever the error has been."""

from __future__ import annotations

import errno
import pickle
import shutil

import pytest

from dutyfree import errors
from dutyfree.contract.errors import (
    ActionError,
    ActionTimeout,
    ArgumentError,
    CollectError,
    CreateError,
    EditError,
    ExecError,
    Exhausted,
    FileError,
    InputClosed,
    LimitError,
    PortClosed,
    RequestError,
    SandboxClosed,
    SandboxGone,
    SpecialFile,
    StageError,
    Unavailable,
    UsageError,
    file_error,
    verdict,
)


@pytest.mark.parametrize(
    ("number", "kind", "python"),
    [
        (errno.ENOENT, "not_found", FileNotFoundError),
        (errno.EISDIR, "is_directory", IsADirectoryError),
        (errno.ENOTDIR, "not_directory", NotADirectoryError),
        (errno.EACCES, "permission", PermissionError),
        (errno.EPERM, "permission", PermissionError),
        (errno.EROFS, "permission", PermissionError),
        (errno.EEXIST, "exists", FileExistsError),
        (errno.ENAMETOOLONG, "name_too_long", OSError),
        (errno.ELOOP, "link_loop", OSError),
        (errno.EFBIG, "too_large", OSError),
        (errno.ENOSPC, "no_space", OSError),
        (errno.EDQUOT, "no_space", OSError),
        (errno.ENOMEM, "no_memory", OSError),
        (errno.EAGAIN, "no_processes", OSError),
        (errno.EMFILE, "no_descriptors", OSError),
        (errno.EOWNERDEAD, "killed", OSError),
        (errno.EBUSY, "refused", OSError),
        (errno.ETXTBSY, "refused", OSError),
    ],
)
def test_errors_of_the_operating_system(number: int, kind: str, python: type[OSError]) -> None:
    error = file_error(number, "some/path")
    assert isinstance(error, ActionError)
    assert isinstance(error, python)
    assert (error.kind, error.errno, error.filename) == (kind, number, "some/path")
    assert str(error).startswith("some/path: ")
    assert verdict(error) == "task"


@pytest.mark.parametrize("number", sorted(errors.MACHINERY))
def test_errors_that_nothing_in_a_sandbox_can_bring_about(number: int) -> None:
    error = file_error(number, "path")
    assert isinstance(error, ExecError)
    assert verdict(error) == "infrastructure"


ALL = [
    (file_error(errno.ENOENT, "a"), "task"),
    (file_error(errno.ENOSPC, "a"), "task"),
    (SpecialFile("a"), "task"),
    (InputClosed("it has ended"), "task"),
    (PortClosed(80), "task"),
    (RequestError("a", kind="pattern"), "task"),
    (EditError("a", 2, (1, 3)), "task"),
    (ActionTimeout("late"), "task"),
    (SandboxGone("gone", remedy="none"), "task"),
    (ArgumentError("a"), "program"),
    (LimitError("a", remedy="b"), "program"),
    (UsageError("a"), "program"),
    (ExecError("a"), "infrastructure"),
    (CollectError("a"), "infrastructure"),
    (SandboxClosed("a"), "infrastructure"),
    (CreateError("a"), "infrastructure"),
    (StageError("a", number=1, command="b"), "infrastructure"),
    (Exhausted("a", numbers={"idle": 0}), "infrastructure"),
    (Unavailable("a"), "infrastructure"),
    (FileNotFoundError(2, "No such file", "a"), "program"),
    (KeyError("a"), "program"),
]


@pytest.mark.parametrize(("error", "wanted"), ALL, ids=lambda one: type(one).__name__)
def test_the_verdict_survives_a_journey(error: Exception, wanted: str) -> None:
    """Errors of workers come back to the trainer from other processes."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.__dict__) == (str(error), error.__dict__)
    assert verdict(error) == verdict(again) == wanted
    if isinstance(error, FileError):
        assert isinstance(again, FileError)
        assert (again.errno, again.strerror, again.filename) == (error.errno, error.strerror, error.filename)


def test_kinds_are_a_closed_set_and_documented() -> None:
    from pathlib import Path
    from typing import get_args

    page = (Path(__file__).parents[1] / "docs" / "contract.md").read_text()
    kinds = get_args(errors.ActionKind)
    assert len(kinds) == len(set(kinds)) > 20
    assert [kind for kind in kinds if f"`{kind}`" not in page] == []
    assert {error.kind for error, _ in ALL if isinstance(error, ActionError)} <= set(kinds)


def test_they_are_still_what_python_calls_them() -> None:
    assert isinstance(SpecialFile("a"), shutil.SpecialFileError)
    assert isinstance(InputClosed("a"), BrokenPipeError)
    assert isinstance(PortClosed(1), ConnectionRefusedError)
    assert isinstance(ActionTimeout("a"), TimeoutError)
    assert isinstance(EditError("a", 0, ()), ValueError)
    assert isinstance(ArgumentError("a"), TypeError)
    assert isinstance(ArgumentError("a"), ValueError)
