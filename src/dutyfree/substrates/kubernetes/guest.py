"""Our init as PID 1 of a pod: actions go over one kept exec, instead of an exec for each.

The exec runs ``init join``, which gives its streams to PID 1. When the owner ends, the cluster closes the
exec; then init exits, and the pod has ended.
"""

from __future__ import annotations

import asyncio
import contextlib

import anyio

from dutyfree.contract.errors import CleanupError, CreateError, ExecError
from dutyfree.engine.sandbox.guest import Guest
from dutyfree.substrates.kubernetes import status
from dutyfree.substrates.kubernetes.api import Api, ApiError, ApiLost, Object
from dutyfree.substrates.kubernetes.pods import DIRECTORY, PROGRAM, Pods
from dutyfree.substrates.kubernetes.status import CONTAINER
from dutyfree.substrates.kubernetes.stream import ExecStream

EXPLAIN_SECONDS = 5.0
"""How long the cluster may take to notice that a pod has ended."""

_JOIN = (PROGRAM, "join")
_VERSION = (PROGRAM, "version")
# The exec brings the program, wakes PID 1, which becomes init, and joins it. $1: the size of the program.
_BRING = (
    f"cd {DIRECTORY} && head -c $1 >init && chmod 555 init"
    " && { mkfifo go 2>/dev/null; echo >go; } && exec ./init join"
)


class PodControl:
    """End one pod. See ``GuestControl``. Pausing stops the processes by signals, one by one."""

    freezer = False

    def __init__(self, api: Api, pods: Pods, name: str, stream: ExecStream) -> None:
        self._api = api
        self._pods = pods
        self._name = name
        self._stream = stream
        self._ending: asyncio.Task[None] | None = None

    async def freeze(self) -> None:
        pass

    async def thaw(self) -> None:
        pass

    async def responds(self) -> bool:
        """Whether the stream carries bytes, and the node starts an exec soon."""
        if self._stream.is_stuck:
            return False
        with anyio.move_on_after(EXPLAIN_SECONDS), contextlib.suppress(ApiError, ApiLost):
            # The node accepts it before a process is started, so nothing in the pod can prevent it.
            async with self._api.execution(self._name, _VERSION, container=CONTAINER, stdin=False):
                return True
        return False

    def give_up(self) -> None:
        """Destroy it, without waiting for the end."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._remove())

    async def _remove(self) -> None:
        with contextlib.suppress(CleanupError):
            await self.destroy()

    async def destroy(self) -> None:
        await self._pods.remove(self._name)

    async def explain(self) -> Exception:
        """Why the stream ended."""
        await self._stream.ended()
        # Once init has the streams, ``join`` fails only if a signal or a debugger ends it.
        return await explain(
            self._pods, self._name, self._stream.said, killed=self._stream.exit_code is not None
        )


async def explain(pods: Pods, name: str, said: str = "", *, killed: bool = False) -> Exception:
    """Why an exec in a pod broke off: what has become of the pod, if the cluster says it soon."""

    def judge(pod: Object | None) -> Exception | None:
        return status.ending(pod, name, said, killed=killed)

    with anyio.move_on_after(EXPLAIN_SECONDS):
        return await pods.watch.until(name, judge)
    return ExecError(f"the connection to the pod {name} was lost" + (f": {said}" if said else ""))


async def joined(api: Api, pods: Pods, name: str, program: bytes) -> Guest:
    """The init of a pod that runs, ready. ``program`` is sent there, unless it is empty.

    Raises CreateError.
    """
    stream = ExecStream(api, name)
    command = ("/bin/sh", "-c", _BRING, "sh", str(len(program))) if program else _JOIN
    try:
        connected = await stream.open(command, program)
    except (ApiError, ApiLost) as error:
        raise CreateError(f"no exec could be started in the pod {name}: {error}") from error
    control = PodControl(api, pods, name, stream)
    guest = Guest(name, connected, control, explain=control.explain)
    try:
        await guest.wait_ready()
    except BaseException:
        guest.close()
        raise
    return guest
