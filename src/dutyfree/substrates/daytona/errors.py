"""What the errors of Daytona's SDK mean here. Foreign exceptions do not pass this boundary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import daytona
from daytona.common.errors import (
    SOURCE_DAEMON,
    DaytonaQueueTimeoutError,
    DaytonaServiceUnavailableError,
    DaytonaSpotEvictedError,
)

from dutyfree.contract.errors import (
    CreateError,
    DispatchError,
    DutyfreeError,
    Exhausted,
    SandboxClosed,
    SubstrateError,
)

FOREIGN = (daytona.DaytonaError, OSError)
"""All that the SDK raises: it turns the errors of its HTTP clients into its own."""


def is_gone(error: BaseException) -> bool:
    """Whether the sandbox does not exist.

    The program in the sandbox also answers "not found", for a session or a file: then the sandbox is there.
    """
    if isinstance(error, daytona.DaytonaNotFoundError):
        return bool(error.source != SOURCE_DAEMON)
    return isinstance(error, DaytonaSpotEvictedError)


@contextmanager
def mapped(phase: type[SubstrateError], what: str) -> Iterator[None]:
    """Raise errors of the SDK as an error of this phase, or as SandboxClosed."""
    try:
        yield
    except DutyfreeError:
        raise
    except FOREIGN as error:
        raise restated(error, phase, what) from error


def restated(error: BaseException, phase: type[SubstrateError], what: str) -> DutyfreeError:
    text = f"{what}: {str(error) or type(error).__name__}"
    if is_gone(error) and phase is not CreateError:
        return SandboxClosed(text, remedy="its time may have ended; see the option lease")
    if isinstance(
        error, daytona.DaytonaRateLimitError | DaytonaServiceUnavailableError | DaytonaQueueTimeoutError
    ):
        return Exhausted(text, remedy="ask for fewer at once, or raise the limit of the account", numbers={})
    if isinstance(error, daytona.DaytonaAuthenticationError):
        return phase(text, remedy="set DAYTONA_API_KEY to a key of your account")
    return DispatchError(text) if phase is SubstrateError else phase(text)
