"""What a terminal is told while the stages of a recipe are run, which may take an hour."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from dutyfree.cli import standard

_STAGES = logging.getLogger("dutyfree.engine.layers.run_stage")


class _Teller(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        standard.say(record.getMessage())


@contextlib.contextmanager
def told() -> Iterator[None]:
    """On standard error, a line for each command of a stage that begins."""
    teller, level = _Teller(logging.INFO), _STAGES.level
    _STAGES.addHandler(teller)
    _STAGES.setLevel(logging.INFO)
    try:
        yield
    finally:
        _STAGES.setLevel(level)
        _STAGES.removeHandler(teller)
