"""Follow the pods of one selector by a watch: list once, then take each change as the server sends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import anyio

from dutyfree.substrates.kubernetes.api import Api, ApiError, ApiLost, Object

RETRY_SECONDS, RETRY_MAX = 0.1, 5.0
_GONE = 410
"""The server does not remember the version any more from which we want to go on."""

T = TypeVar("T")
Listener = Callable[[Object | None], None]

_log = logging.getLogger(__name__)


class PodWatch:
    """The pods that a label selector finds, as they are now. ``start`` it, and ``close`` it.

    After a lost connection it goes on from the last version, or lists again.
    """

    def __init__(self, api: Api, selector: str) -> None:
        self._api = api
        self._selector = selector
        self._version = ""
        self._listeners: dict[str, list[Listener]] = {}
        self._task: asyncio.Task[None] | None = None
        self.pods: dict[str, Object] = {}

    def __repr__(self) -> str:
        return f"<{len(self.pods)} pods with {self._selector}>"

    async def start(self) -> None:
        """Raises ApiError, ApiLost."""
        await self._list()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- For those who wait ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listening(self, name: str, listener: Listener) -> Iterator[None]:
        """Call ``listener`` with each new state of a pod, at once; with None if the pod is gone."""
        listeners = self._listeners.setdefault(name, [])
        listeners.append(listener)
        try:
            yield
        finally:
            listeners.remove(listener)
            if not listeners:
                self._listeners.pop(name, None)

    async def until(self, name: str, judge: Callable[[Object | None], T | None]) -> T:
        """Wait until ``judge`` returns something for a pod, whose state now counts too."""
        decided: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def look(pod: Object | None) -> None:
            try:
                found = judge(pod)
            except Exception as error:  # noqa: BLE001 (it goes to the one who waits)
                if not decided.done():
                    decided.set_exception(error)
                return
            if found is not None and not decided.done():
                decided.set_result(found)

        with self.listening(name, look):
            look(self.pods.get(name))
            return await decided

    # --- The watch ----------------------------------------------------------------------------------

    async def _list(self) -> None:
        known = [*self.pods]  # a pod that is made from now on may be missing in the list
        found = await self._api.request(
            "GET", self._api.path("pods"), query={"labelSelector": self._selector}
        )
        seen = {pod["metadata"]["name"]: pod for pod in found["items"]}
        for name in known:
            if name not in seen:
                self._set(name, None)
        for name, pod in seen.items():
            self._set(name, pod)
        self._version = found["metadata"]["resourceVersion"]

    async def _follow(self) -> None:
        delay = RETRY_SECONDS
        while True:
            try:
                if not self._version:
                    await self._list()
                query = {
                    "labelSelector": self._selector,
                    "resourceVersion": self._version,
                    "allowWatchBookmarks": "true",
                }
                async for event in self._api.events(self._api.path("pods"), query):
                    delay = RETRY_SECONDS
                    self._take(event["type"], event["object"])
                continue  # the server ends each watch after some minutes
            except ApiError as error:
                if error.status == _GONE:
                    self._version = ""
                    continue
                _log.info("the watch of pods was refused: %s", error)
            except ApiLost as error:
                _log.info("the watch of pods was lost: %s", error)
            await anyio.sleep(delay)
            delay = min(2 * delay, RETRY_MAX)

    def _take(self, kind: str, pod: Object) -> None:
        self._version = pod["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            # A pod that does not match any more is reported as deleted.
            self._set(pod["metadata"]["name"], None if kind == "DELETED" else pod)

    def _set(self, name: str, pod: Object | None) -> None:
        if pod is None:
            self.pods.pop(name, None)
        else:
            self.pods[name] = pod
        for listener in [*self._listeners.get(name, ())]:
            listener(pod)
