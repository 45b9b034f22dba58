"""How far each layer of an image is, on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dutyfree.engine.images.install import LayerProgress


class Bars:
    """A bar for each layer; nothing where nobody looks. ``show`` may be called from any thread."""

    def __init__(self, quiet: bool) -> None:
        self._progress = None if quiet or not sys.stderr.isatty() else _bars()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def show(self, event: LayerProgress) -> None:
        if self._progress is None:
            return
        task = self._tasks.get(event.layer)
        if task is None:
            label = event.layer.partition(":")[2][:12]
            task = self._tasks[event.layer] = self._progress.add_task("", total=None, layer=label)
        self._progress.update(task, description=event.phase, completed=event.done, total=event.total or None)


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.fields[layer]} {task.description:<11}", markup=False),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
