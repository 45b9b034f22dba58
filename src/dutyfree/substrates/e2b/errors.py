"""What the errors of E2B's SDK mean here. Foreign exceptions do not pass this boundary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from connectrpc.errors import ConnectError
from e2b import exceptions as e2b

from dutyfree.contract.errors import (
    CreateError,
    DispatchError,
    DutyfreeError,
    Exhausted,
    SandboxClosed,
    SubstrateError,
)

GONE = (e2b.SandboxNotFoundException, e2b.SandboxNotRunningException)

FOREIGN = (
    e2b.SandboxException,
    e2b.AuthenticationException,
    e2b.ServiceBusyException,
    e2b.BuildException,
    ConnectError,
    httpx.HTTPError,
    OSError,
)
"""All that the SDK raises, apart from mistakes of the caller."""


def is_gone(error: BaseException) -> bool:
    """Whether the sandbox has ended: E2B does not say why."""
    return isinstance(error, GONE)


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
    text = f"{what}: {error or type(error).__name__}"
    if is_gone(error) and phase is not CreateError:
        return SandboxClosed(text, remedy="its time may have ended; see the option lease")
    if isinstance(error, e2b.RateLimitException | e2b.ServiceBusyException):
        return Exhausted(text, remedy="ask for fewer at once, or raise the limit of the account", numbers={})
    if isinstance(error, e2b.AuthenticationException):
        return phase(text, remedy="set E2B_API_KEY to a key of your account")
    return DispatchError(text) if phase is SubstrateError else phase(text)
