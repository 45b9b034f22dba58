"""The way to the engine: where it is, and whether it answers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec

from dutyfree.contract.errors import Unavailable
from dutyfree.substrates.docker.http import Engine, EngineError, EngineLost

API = (1, 41)
"""The version of the Engine API that this speaks (Docker 20.10); later engines still know it."""

LOOK_SECONDS = 20.0
"""How long the engine may take to tell what it has. One that hangs accepts requests and never answers."""

REMEDY = "start Docker: `sudo scripts/docker-engine start` on Debian, or as its documentation says"


def socket_path(host: str | None) -> str:
    """The engine's Unix socket. Raises Unavailable for an address of another kind."""
    address = host or os.environ.get("DOCKER_HOST") or "/var/run/docker.sock"
    path = address.removeprefix("unix://")
    if not path.startswith("/"):
        raise Unavailable(
            f"the Docker engine's address {address!r} is no Unix socket",
            remedy="give host= or DOCKER_HOST as unix:///path; forward a remote engine's socket with ssh -L",
        )
    return path


async def meet(engine: Engine) -> dict[str, Any]:
    """The engine's version facts. Raises Unavailable when nothing answers, or no Docker engine."""
    try:
        with anyio.fail_after(LOOK_SECONDS):
            return await engine.negotiate(API)
    except EngineLost as error:
        cause = error.__cause__
        if isinstance(cause, PermissionError):
            remedy = "run as root, or as a member of the group docker"
        else:
            remedy = REMEDY
        raise Unavailable(str(error), remedy=remedy) from error
    except TimeoutError as error:
        raise Unavailable(f"the Docker engine at {engine.path} does not answer", remedy=REMEDY) from error
    except (EngineError, msgspec.DecodeError, AttributeError, TypeError, ValueError) as error:
        raise Unavailable(
            f"what answers at {engine.path} is no Docker engine: {error}", remedy=REMEDY
        ) from error


@contextlib.asynccontextmanager
async def connected(host: str | None = None) -> AsyncIterator[Engine]:
    """The engine alone, to look at. Raises Unavailable."""
    async with Engine(socket_path(host)) as engine:
        await meet(engine)
        yield engine
