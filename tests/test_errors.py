"""Whose fault an error is follows from its type, wherever the error has been."""

from __future__ import annotations

import errno
import pickle
import shutil

import pytest

from dutyfree import errors


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
    error = errors.file_error(number, "some/path")
    assert isinstance(error, errors.ActionError)
    assert isinstance(error, python)
    assert (error.kind, error.errno, error.filename) == (kind, number, "some/path")
    assert str(error).startswith("some/path: ")
    assert errors.verdict(error) == "task"


@pytest.mark.parametrize("number", sorted(errors.MACHINERY))
def test_errors_that_nothing_in_a_sandbox_can_bring_about(number: int) -> None:
    error = errors.file_error(number, "path")
    assert isinstance(error, errors.ExecError)
    assert errors.verdict(error) == "infrastructure"


ALL = [
    (errors.file_error(errno.ENOENT, "a"), "task"),
    (errors.file_error(errno.ENOSPC, "a"), "task"),
    (errors.SpecialFile("a"), "task"),
    (errors.InputClosed("it has ended"), "task"),
    (errors.PortClosed(80), "task"),
    (errors.RequestError("a", kind="pattern"), "task"),
    (errors.EditError("a", 2, (1, 3)), "task"),
    (errors.ActionTimeout("late"), "task"),
    (errors.SandboxGone("gone", remedy="none"), "task"),
    (errors.ArgumentError("a"), "program"),
    (errors.LimitError("a", remedy="b"), "program"),
    (errors.UsageError("a"), "program"),
    (errors.ExecError("a"), "infrastructure"),
    (errors.CollectError("a"), "infrastructure"),
    (errors.SandboxClosed("a"), "infrastructure"),
    (errors.CreateError("a"), "infrastructure"),
    (errors.StageError("a", number=1, command="b"), "infrastructure"),
    (errors.Exhausted("a", numbers={"idle": 0}), "infrastructure"),
    (errors.Unavailable("a"), "infrastructure"),
    (FileNotFoundError(2, "No such file", "a"), "program"),
    (KeyError("a"), "program"),
]


@pytest.mark.parametrize(("error", "wanted"), ALL, ids=lambda one: type(one).__name__)
def test_the_verdict_survives_a_journey(error: Exception, wanted: str) -> None:
    """Errors of workers come back to the trainer from other processes."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.__dict__) == (str(error), error.__dict__)
    assert errors.verdict(error) == errors.verdict(again) == wanted
    if isinstance(error, errors.FileError):
        assert isinstance(again, errors.FileError)
        assert (again.errno, again.strerror, again.filename) == (error.errno, error.strerror, error.filename)


def test_kinds_are_a_closed_set_and_documented() -> None:
    from pathlib import Path
    from typing import get_args

    page = (Path(__file__).parents[1] / "docs" / "contract.md").read_text()
    kinds = get_args(errors.ActionKind)
    assert len(kinds) == len(set(kinds)) > 20
    assert [kind for kind in kinds if f"`{kind}`" not in page] == []
    assert {error.kind for error, _ in ALL if isinstance(error, errors.ActionError)} <= set(kinds)


def test_they_are_still_what_python_calls_them() -> None:
    assert isinstance(errors.SpecialFile("a"), shutil.SpecialFileError)
    assert isinstance(errors.InputClosed("a"), BrokenPipeError)
    assert isinstance(errors.PortClosed(1), ConnectionRefusedError)
    assert isinstance(errors.ActionTimeout("a"), TimeoutError)
    assert isinstance(errors.EditError("a", 0, ()), ValueError)
    assert isinstance(errors.ArgumentError("a"), TypeError)
    assert isinstance(errors.ArgumentError("a"), ValueError)
