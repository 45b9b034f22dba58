"""Instances that an owner, its watcher and their machine left: found by their tags at the next opening.

A note on this disk names each opening that may have instances, so that ``dutyfree gc`` knows where to look.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dutyfree import paths
from dutyfree.contract.errors import Unavailable
from dutyfree.substrates.cloud.api import (
    DEADLINE,
    OURS,
    OWNER,
    RUN,
    Api,
    ApiError,
    Instance,
    Place,
    connected,
)
from dutyfree.substrates.local.owner import is_dead
from dutyfree.substrates.local.reaper import remove_tree

UNLISTED_SECONDS = 600.0
"""How long an instance may be missing in the provider's list although it exists, at the most."""

LATE_SECONDS = 3600.0
"""How long after its deadline others end an instance: their clocks may differ. EC2 refuses the requests of a
clock that is off by more than 15 minutes."""


class Note(msgspec.Struct, frozen=True):
    """Where an opening has its instances. It has no credentials."""

    place: Place
    run: str
    owner: str


def note_path(run: str) -> Path:
    return paths.cache() / "cloud" / f"{run}.json"


def directory(run: str) -> Path:
    """Where an opening has its keys."""
    return Path(tempfile.gettempdir(), f"dutyfree-cloud-{run}")


def write_note(note: Note) -> Path:
    """Blocks. Raises Unavailable."""
    path = note_path(note.run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(note))
    except OSError as error:
        raise Unavailable(
            f"cannot write {path}: {error.strerror}", remedy="set DUTYFREE_CACHE to a directory that you own"
        ) from error
    return path


def abandoned_notes() -> Iterator[tuple[Path, Note]]:
    """The notes of dead owners. Blocks."""
    for path in sorted((paths.cache() / "cloud").glob("*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            note = msgspec.json.decode(path.read_bytes(), type=Note)
            if is_dead(note.owner):
                yield path, note


def abandoned(api: Api) -> list[Instance]:
    """The instances in a place whose owner is certainly dead, or whose deadline has passed. Blocks.

    Raises ApiError.
    """
    now = time.time()
    return [
        one
        for one in api.find({OURS: "1"})
        if one.state != "ended" and (_is_orphan(one) or now > _deadline(one) + LATE_SECONDS)
    ]


def _is_orphan(instance: Instance) -> bool:
    """Whether its owner is certainly dead. The note of a run tells this machine from its clones."""
    has_note = note_path(instance.tags.get(RUN, "")).exists()
    return is_dead(instance.tags.get(OWNER, ""), after_reboot=has_note)


def _deadline(instance: Instance) -> float:
    try:
        return float(instance.tags.get(DEADLINE, ""))
    except ValueError:
        return float("inf")


def sweep(api: Api) -> list[tuple[Instance, str]]:
    """End the abandoned instances in a place: each with its failure, if there is one. Blocks.

    Raises ApiError if they cannot be listed.
    """
    return [(one, _end(api, one)) for one in abandoned(api)]


def _end(api: Api, instance: Instance) -> str:
    try:
        api.end(instance.id)
    except ApiError as error:
        return str(error)
    return ""


def collect(dry_run: bool) -> list[tuple[str, str]]:
    """End the instances that dead owners left, for ``dutyfree gc``, and remove their keys. Blocks.

    Returns what the instances were, each with its failure.
    """
    done: list[tuple[str, str]] = []
    seen: set[Place] = set()
    for path, note in abandoned_notes():
        where = f"{note.place.provider} {note.place.region}"
        try:
            if not dry_run:
                with contextlib.suppress(OSError):
                    remove_tree(str(directory(note.run)))
            api = connected(note.place)
            if note.place not in seen:
                seen.add(note.place)
                found = [(one, "") for one in abandoned(api)] if dry_run else sweep(api)
                done += [(f"{one.id} in {where}", failure) for one, failure in found]
            living = [one for one in api.find({RUN: note.run}) if one.state != "ended"]
            is_settled = time.time() - path.stat().st_mtime > UNLISTED_SECONDS
            if not living and is_settled and not dry_run:
                path.unlink(missing_ok=True)
        except (ApiError, Unavailable, OSError) as error:
            done.append((f"of the run {note.run} in {where}", str(error)))
    return done
