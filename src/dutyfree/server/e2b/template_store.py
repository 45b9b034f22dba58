"""Templates of E2B clients in a database file, so that they survive a restart of the server.

All of them are in memory too: the creation of a sandbox does not wait for the disk.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

import anyio.to_thread
import msgspec

from dutyfree.contract.errors import LimitError, RecipeError
from dutyfree.server.e2b.template_steps import TemplateState

DEFAULT_TAG = "default"
LATEST_BUILDS = 20
"""Builds of a template that are kept although no tag names them."""
MOST_TEMPLATES = 10_000
"""Templates of one tenant. It may have as many snapshots, and as many uploads are remembered."""
MOST_TAGS = 200
"""Tags of a template."""
MOST_BYTES = 256 << 20
"""Bytes of all templates of a tenant, as they are on disk."""

BuildStatus = Literal["waiting", "building", "ready", "error"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS templates (
    id TEXT PRIMARY KEY,
    document BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS uploads (
    tenant TEXT NOT NULL,
    hash TEXT NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (tenant, hash)
) STRICT;
CREATE TABLE IF NOT EXISTS snapshots (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    image TEXT NOT NULL,
    sandbox TEXT NOT NULL,
    build TEXT NOT NULL,
    PRIMARY KEY (tenant, name)
) STRICT;
"""


class BuildLog(msgspec.Struct, frozen=True):
    """A line of a build's log."""

    time: float
    level: Literal["debug", "info", "warn", "error"]
    message: str
    step: str = ""


class Failure(msgspec.Struct, frozen=True):
    """Why a build failed, and in which step: a number from 1, ``base`` or ``finalize``."""

    message: str
    step: str


class Build(msgspec.Struct):
    """One build of a template."""

    id: str
    created: float
    tags: tuple[str, ...]
    cpus: int | None = None
    memory: int | None = None
    """In MiB."""
    status: BuildStatus = "waiting"
    updated: float = 0.0
    state: TemplateState | None = None
    """What sandboxes start with, if it is ready."""
    failure: Failure | None = None
    logs: list[BuildLog] = []


class Tag(msgspec.Struct, frozen=True):
    build: str
    assigned: float


class Template(msgspec.Struct):
    """A name of a tenant, and its builds."""

    id: str
    tenant: str
    name: str
    created: float
    builds: dict[str, Build] = {}
    tags: dict[str, Tag] = {}

    @property
    def latest(self) -> Build:
        return max(self.builds.values(), key=lambda build: build.created)


class TakenSnapshot(NamedTuple):
    """A snapshot that a client took."""

    image: str
    sandbox: str
    build: str
    """The build of the template that the sandbox had, if it had one."""


class TemplateRef(NamedTuple):
    """``name``, ``name:tag`` or the same with an id; a team before the name is ignored."""

    name: str
    tag: str | None

    @staticmethod
    def parse(text: str) -> TemplateRef:
        name, _, tag = text.strip().rpartition("/")[2].partition(":")
        return TemplateRef(name.lower(), tag or None)


class TemplateStore:
    """The templates of all tenants."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._templates: dict[str, Template] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._uploads: dict[tuple[str, str], str] = {}
        self._sizes: dict[str, int] = {}
        """Bytes of each template on disk."""
        self._used: Counter[str] = Counter()
        """The same of each tenant."""
        self.snapshots: dict[tuple[str, str], TakenSnapshot] = {}
        """By tenant and name."""

    def __enter__(self) -> Self:
        self._database = sqlite3.connect(
            self._path, isolation_level=None, timeout=10, check_same_thread=False
        )
        self._path.chmod(0o600)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.executescript(_SCHEMA)
        for (document,) in self._database.execute("SELECT document FROM templates"):
            template = msgspec.json.decode(document, type=Template)
            self._templates[template.id] = template
            self._resize(template, len(document))
            self._names[template.tenant, template.name] = template.id
            for build in template.builds.values():
                if build.status in ("waiting", "building"):
                    build.status = "error"
                    build.failure = Failure("the server was restarted during the build", "base")
        rows = self._database.execute("SELECT tenant, hash, digest FROM uploads")
        self._uploads = {(tenant, name): digest for tenant, name, digest in rows}
        found = self._database.execute("SELECT tenant, name, image, sandbox, build FROM snapshots")
        self.snapshots = {(tenant, name): TakenSnapshot(*rest) for tenant, name, *rest in found}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._database.close()

    # --- Templates --------------------------------------------------------------------------------------

    def of(self, tenant: str) -> Iterator[Template]:
        """The templates of a tenant, the oldest first."""
        found = [one for one in self._templates.values() if one.tenant == tenant]
        yield from sorted(found, key=lambda one: (one.created, one.id))

    def find(self, tenant: str, name: str) -> Template | None:
        """The template of a tenant by its name or id."""
        found = self._templates.get(self._names.get((tenant, name), name))
        return found if found is not None and found.tenant == tenant else None

    def ready(self, tenant: str, text: str) -> tuple[Template, Build] | None:
        """The template that a tenant means, and its build that is ready, if there is one."""
        wanted = TemplateRef.parse(text)
        template = self.find(tenant, wanted.name)
        tag = None if template is None else template.tags.get(wanted.tag or DEFAULT_TAG)
        if template is None or tag is None:
            return None
        return template, template.builds[tag.build]

    def request(
        self, tenant: str, text: str, tags: tuple[str, ...], cpus: int | None, memory: int | None
    ) -> tuple[Template, Build]:
        """A new build of a template, which is created if it is new. Raises RecipeError, LimitError."""
        wanted = TemplateRef.parse(text)
        given = tuple(dict.fromkeys((*((wanted.tag,) if wanted.tag else ()), *tags))) or (DEFAULT_TAG,)
        template = self.find(tenant, wanted.name)
        _check_names((wanted.name,))
        _check_tags(template, given)
        if self._used[tenant] > MOST_BYTES:
            raise LimitError(f"your templates have more than {MOST_BYTES} bytes", remedy="delete some")
        if template is None:
            if sum(key[0] == tenant for key in self._names) >= MOST_TEMPLATES:
                raise LimitError(f"a tenant may have {MOST_TEMPLATES} templates", remedy="delete some")
            template = Template(secrets.token_hex(10), tenant, wanted.name, time.time())
            self._templates[template.id] = template
            self._names[tenant, wanted.name] = template.id
        build = Build(str(uuid.uuid4()), time.time(), given, cpus, memory)
        template.builds[build.id] = build
        _drop_old(template)
        return template, build

    def assign(self, template: Template, build: str, tags: Iterable[str]) -> None:
        """Let tags of a template name a build. Raises RecipeError, LimitError."""
        given = tuple(tags)
        _check_tags(template, given)
        now = time.time()
        template.tags.update({tag: Tag(build, now) for tag in given})

    async def save(self, template: Template) -> None:
        """Write a template to disk, unless it was removed meanwhile."""
        if template.id in self._templates:
            document = msgspec.json.encode(template)
            self._resize(template, len(document))
            await self._write("INSERT OR REPLACE INTO templates VALUES (?, ?)", (template.id, document))

    def _resize(self, template: Template, size: int) -> None:
        """Note how many bytes a template takes on disk now."""
        self._used[template.tenant] += size - self._sizes.pop(template.id, 0)
        if size:
            self._sizes[template.id] = size

    async def remove(self, template: Template) -> None:
        self._templates.pop(template.id, None)
        self._names.pop((template.tenant, template.name), None)
        self._resize(template, 0)
        await self._write("DELETE FROM templates WHERE id = ?", (template.id,))

    # --- Snapshots --------------------------------------------------------------------------------------

    def keep_snapshots(self, images: Container[str]) -> None:
        """Forget those that ended with an earlier server. For its start: it writes to disk."""
        for (tenant, name), taken in list(self.snapshots.items()):
            if taken.image not in images:
                del self.snapshots[tenant, name]
                self._database.execute("DELETE FROM snapshots WHERE tenant = ? AND name = ?", (tenant, name))

    def check_snapshot(self, tenant: str, name: str) -> None:
        """Raises RecipeError for what is no name, and LimitError for one snapshot too many."""
        _check_names((name,))
        if (tenant, name) in self.snapshots:
            return  # it is replaced
        if sum(owner == tenant for owner, _ in self.snapshots) >= MOST_TEMPLATES:
            raise LimitError(f"a tenant may have {MOST_TEMPLATES} snapshots", remedy="delete some")

    async def add_snapshot(self, tenant: str, name: str, taken: TakenSnapshot) -> None:
        self.snapshots[tenant, name] = taken
        await self._write("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?)", (tenant, name, *taken))

    async def remove_snapshot(self, tenant: str, name: str) -> None:
        self.snapshots.pop((tenant, name), None)
        await self._write("DELETE FROM snapshots WHERE tenant = ? AND name = ?", (tenant, name))

    # --- Files ------------------------------------------------------------------------------------------

    def upload(self, tenant: str, files_hash: str) -> str | None:
        """The digest of the archive that a tenant uploaded with this hash of the SDK."""
        return self._uploads.get((tenant, files_hash))

    async def add_upload(self, tenant: str, files_hash: str, digest: str) -> None:
        self._uploads[tenant, files_hash] = digest
        own = [name for owner, name in self._uploads if owner == tenant]
        for old in own[:-MOST_TEMPLATES]:
            self._uploads.pop((tenant, old), None)  # another upload may have removed it meanwhile
            await self._write("DELETE FROM uploads WHERE tenant = ? AND hash = ?", (tenant, old))
        await self._write("INSERT OR REPLACE INTO uploads VALUES (?, ?, ?)", (tenant, files_hash, digest))

    async def _write(self, statement: str, row: tuple[str | bytes, ...]) -> None:
        def write() -> None:
            with self._lock:
                self._database.execute(statement, row)

        await anyio.to_thread.run_sync(write)


def _drop_old(template: Template) -> None:
    named = {tag.build for tag in template.tags.values()}
    loose = [build for build in template.builds.values() if build.id not in named]
    loose.sort(key=lambda build: build.created)
    for build in loose[:-LATEST_BUILDS]:
        if build.status in ("ready", "error") or not build.updated:  # or it was never started
            del template.builds[build.id]


def _check_names(names: Iterable[str]) -> None:
    """Raises RecipeError."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise RecipeError(
                f"{name[:80]!r} is not a name for a template or a tag",
                remedy="use lower-case letters, digits, dots, hyphens and underscores",
            )


def _check_tags(template: Template | None, tags: Sequence[str]) -> None:
    """Raises RecipeError for what is no tag, and LimitError if the template would have too many."""
    if len(tags) > MOST_TAGS or len({*(template.tags if template else ()), *tags}) > MOST_TAGS:
        raise LimitError(f"a template may have {MOST_TAGS} tags", remedy="remove some")
    _check_names(tags)
