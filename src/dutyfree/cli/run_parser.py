"""``dutyfree run`` read without the general parser, which takes longer to load than all else that it needs.

What is not plain is left to the general parser, which knows what to say of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

KINDS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("substrate", "image", "memory", "disk", "network", "user", "cwd"), str),
    **dict.fromkeys(("cpus", "timeout"), float),
    "pids": int,
    "recipe": Path,
}
LISTS = ("option", "env", "upload", "download")
"""What may be repeated."""


def parsed(arguments: Sequence[str]) -> Callable[[], int] | None:
    """What to call for ``run [OPTION…] -- COMMAND…``; None for anything else."""
    if arguments[:1] != ["run"] or "--" not in arguments:
        return None
    at = list(arguments).index("--")
    given = _options(arguments[1:at])
    if given is None:
        return None
    from dutyfree.cli.run import once
    from dutyfree.cli.sandbox_options import Wanted

    timeout, json = given.pop("timeout", None), given.pop("json", False)
    return partial(once, tuple(arguments[at + 1 :]), Wanted(**given), timeout, json)  # type: ignore[arg-type]


def _options(words: Sequence[str]) -> dict[str, object] | None:
    """By name, in their types; None where one is not plain."""
    given: dict[str, object] = {}
    rest = iter(words)
    for word in rest:
        name, sign, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or (name in given and name not in LISTS):
            return None
        if name == "json" and not sign:
            given[name] = True
            continue
        value = value if sign else next(rest, "")
        if not value or value.startswith("-"):
            return None
        if name in LISTS:
            given[name] = (*given.get(name, ()), value)  # type: ignore[misc]
        elif name in KINDS:
            try:
                given[name] = KINDS[name](value)
            except ValueError:
                return None
        else:
            return None
    return given
