"""Stop what a client asked for over HTTP when it goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from dutyfree.server.connections import CONNECTION, HttpConnection

T = TypeVar("T")


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled if the client closes the connection.

    The body of the request must have been read. Raises ClientDisconnect.
    """
    connection: HttpConnection = request.scope[CONNECTION]
    task = asyncio.current_task()
    assert task is not None
    connection.cancel_when_lost(task)
    try:
        return await work
    except asyncio.CancelledError:
        if connection.lost and task.uncancel() == 0:  # otherwise someone else has cancelled it, too
            raise ClientDisconnect from None
        raise
    finally:
        connection.cancel_when_lost(None)
