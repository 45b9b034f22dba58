"""Assertions for checks: with a message, without a test framework, also under ``python -O``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import anyio

from dutyfree.contract import Observation, Sandbox


def that(condition: object, complaint: str) -> None:
    if not condition:
        raise AssertionError(complaint)


def equal(found: Any, wanted: Any, what: str) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {_short(found)}, expected {_short(wanted)}")


def succeeded(seen: Observation, what: str) -> None:
    if not seen.ok:
        said = _short(seen.stderr or seen.stdout)
        ended = "timed out" if seen.timed_out else f"exit code {seen.exit_code}"
        raise AssertionError(f"{what}: {ended}: {said}")


class raises:  # noqa: N801 (reads as a phrase: with expect.raises(...))
    """The block must raise one of ``kinds``; everything else is a broken promise."""

    def __init__(self, kinds: type[BaseException] | tuple[type[BaseException], ...], what: str) -> None:
        self._kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, self._kinds):
            return True
        if error is not None and not isinstance(error, Exception):
            return False
        found = "nothing was raised" if error is None else f"{type(error).__name__} ({error})"
        wanted = " or ".join(kind.__name__ for kind in self._kinds)
        raise AssertionError(f"{self._what}: {found}, expected {wanted}") from error


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """The block must end within ``seconds``."""
    begun = perf_counter()
    yield
    taken = perf_counter() - begun
    that(taken < seconds, f"{what}: took {taken:.1f} s, expected less than {seconds:g} s")


async def written(sandbox: Sandbox, paths: Iterable[str]) -> bool:
    """Whether each of these files exists and is not empty."""
    try:
        return all([await sandbox.read(path) for path in paths])
    except FileNotFoundError:
        return False


async def quiet(sandbox: Sandbox, names: Iterable[str], when: str) -> None:
    """Check that processes that append to files of these names have started, and have ended."""
    before = {name: len(await sandbox.read(name)) for name in names}
    await anyio.sleep(0.4)
    for name, size in before.items():
        that(size, f"the process {name} never wrote to its file")
        grown = len(await sandbox.read(name)) - size
        that(grown == 0, f"the process {name} still runs {when}, and wrote {grown} more bytes to its file")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 240 else f"{text[:120]} … {text[-100:]}"
