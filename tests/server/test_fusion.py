"""SandboxFusion's call: whose fault a failure is."""

from __future__ import annotations

from typing import Any

import pytest

from dutyfree.contract.errors import DutyfreeError, ExecError, SandboxGone
from dutyfree.server import fusion


class Failing:
    """A sandbox whose commands fail."""

    def __init__(self, error: DutyfreeError) -> None:
        self._error = error

    async def exec(self, *_: object, **_options: object) -> None:
        raise self._error


async def test_a_program_that_ends_its_sandbox_has_failed() -> None:
    sandbox: Any = Failing(SandboxGone("it was destroyed"))
    found = await fusion._step(sandbox, ("python3", "main.py"), None, 10)
    assert (found.status, found.return_code, found.stderr) == ("Error", None, "it was destroyed")


async def test_a_failure_of_the_machinery_is_not_that_of_the_program() -> None:
    sandbox: Any = Failing(ExecError("the launcher has ended"))
    with pytest.raises(ExecError):
        await fusion._step(sandbox, ("python3", "main.py"), None, 10)
