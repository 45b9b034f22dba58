"""How a sandbox comes into being: the launcher is asked for one, and its first sign of life is awaited."""

from __future__ import annotations

import contextlib
import os
import socket
from time import perf_counter

import anyio

from dutyfree.contract import Limits, Span
from dutyfree.contract.errors import CleanupError, CreateError, SubstrateError
from dutyfree.engine.host import limits as exhaustion
from dutyfree.engine.host.features import HostFeatures
from dutyfree.engine.launcher import requests
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.handle import SandboxHandle
from dutyfree.engine.launcher.network import SandboxNetwork
from dutyfree.engine.launcher.protocol import Request, Tree
from dutyfree.engine.sandbox.channel import Channel

BODIES = 256
"""Requests that are kept ready."""


class SandboxCreator:
    """Of one launcher."""

    def __init__(self, launcher: Launcher, features: HostFeatures) -> None:
        self._launcher = launcher
        self._features = features
        self._bodies: dict[tuple[tuple[Tree, ...], Limits], bytes] = {}

    def body(self, trees: tuple[Tree, ...], limits: Limits) -> bytes:
        """The request for a sandbox upon these layers, without who it is."""
        asking = (trees, limits)
        body = self._bodies.get(asking)
        if body is None:
            body = requests.create(self._features, trees, limits)
            # Snapshots come and go, and are asked for a few times each.
            if len(self._bodies) >= BODIES:
                self._bodies.clear()
            self._bodies[asking] = body
        return body

    async def make(self, identity: str, body: bytes, reach: SandboxNetwork) -> tuple[Channel, SandboxHandle]:
        """A sandbox that stands, and how to remove it. Raises CreateError."""
        try:
            reply = await self._launcher.ask(Request.CREATE, 0, body)
        except LauncherError as error:
            raise CreateError(
                f"no sandbox could be made: {error.message}", remedy=exhaustion.remedy(error.number)
            ) from error
        if len(reply.descriptors) < 2:  # the kernel drops what we have no room for
            for descriptor in reply.descriptors:
                os.close(descriptor)
            self._launcher.tell(Request.DESTROY, reply.value)
            raise CreateError(
                f"no sandbox could be made: this process has too many open files, {exhaustion.open_files()}",
                remedy=exhaustion.OWN_FILES,
            )
        connected, pidfd = reply.descriptors
        os.close(pidfd)  # the launcher has it, and is the one to wait
        box = SandboxHandle(self._launcher, reply.value, identity, freezer=self._features.freezer)
        channel = Channel(socket.socket(fileno=connected), identity, box.give_up, box.responds)
        former = reach.number
        try:
            await reach.enter(reply.value)
            await channel.ready
        except BaseException as error:
            reach.number = former
            channel.close()
            with anyio.CancelScope(shield=True), contextlib.suppress(CleanupError):
                await box.destroy()
            if isinstance(error, LauncherError):
                raise CreateError(f"the sandbox has no network: {error.message}") from error
            if isinstance(error, SubstrateError) and not isinstance(error, CreateError):
                raise CreateError(f"the sandbox died while it was made: {error.message}") from error
            raise
        return channel, box


def spans(asked: float, begun: float, times: tuple[int, ...]) -> tuple[Span, ...]:
    """Where the time of a creation went, by what PID 1 tells of its own."""
    _, ordered, mounted = times
    at = [max(0.0, moment / 1e9 - asked) for moment in (ordered, mounted)]
    done = perf_counter() - asked
    return (
        Span("prepare", 0.0, begun - asked),
        Span("dispatch", begun - asked, at[0] - (begun - asked)),
        Span("mount", at[0], at[1] - at[0]),
        Span("return", at[1], done - at[1]),
    )


def following(asked: float, spans: tuple[Span, ...], name: str) -> Span:
    """From the end of the last one until now."""
    start = spans[-1].start + spans[-1].seconds
    return Span(name, start, perf_counter() - asked - start)
