"""Authentication at a registry: answer its challenge with a token or a password. Blocks."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias
from urllib.parse import urlencode, urlsplit

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images.credentials import Login

AGENT = "dutyfree"

Fetch: TypeAlias = Callable[[str, Mapping[str, str], bytes | None], bytes]
"""Request a URL with headers and a form, and return the body. Raises CreateError, TransientError."""

_PAIRS = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"|(\w+)=([^\s",]+)')


class Authentication:
    """The Authorization header for one repository, renewed when the registry asks. Threads may share it."""

    def __init__(self, base: str, repository: str, login: Login | None, fetch: Fetch) -> None:
        self.header = ""
        self._base = base
        self._repository = repository
        self._login = login
        self._fetch = fetch
        self._lock = threading.Lock()

    def renew(self, challenges: list[str], used: str) -> bool:
        """Answer a challenge to the header ``used``; return whether a retry may help.

        Raises CreateError, TransientError.
        """
        with self._lock:
            if used != self.header:
                return True  # another thread has already renewed it
            for challenge in challenges:
                scheme, _, rest = challenge.partition(" ")
                fields = {a or c: b or d for a, b, c, d in _PAIRS.findall(rest)}
                if scheme.lower() == "bearer" and "realm" in fields:
                    self.header = f"Bearer {self._token(fields)}"
                    break
                if scheme.lower() == "basic" and self._login:
                    self.header = _basic(self._login)
                    break
            return used != self.header

    def _token(self, fields: dict[str, str]) -> str:
        realm = fields["realm"]
        where = urlsplit(realm)
        if where.scheme != "https" and not (where.scheme == "http" and self._base.startswith("http:")):
            raise CreateError(f"{self._base} wants the login sent to {realm}, which is not encrypted")
        query = {"scope": fields.get("scope") or f"repository:{self._repository}:pull"}
        if "service" in fields:
            query["service"] = fields["service"]
        headers, form = {}, None
        if self._login and self._login.token:
            given = {"grant_type": "refresh_token", "client_id": AGENT, "refresh_token": self._login.secret}
            form = urlencode({**query, **given}).encode()
        else:
            realm += f"{'&' if where.query else '?'}{urlencode(query)}"
            headers = {"Authorization": _basic(self._login)} if self._login else {}
        data = self._fetch(realm, headers, form)
        try:
            answer = msgspec.json.decode(data)
            return str(answer.get("token") or answer["access_token"])
        except (msgspec.DecodeError, RecursionError, KeyError, AttributeError) as error:
            raise CreateError(f"{fields['realm']} sent no token: {error!r}") from error


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(f"{login.name}:{login.secret}".encode()).decode()
