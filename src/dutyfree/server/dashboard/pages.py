"""Serve the files of the dashboard. They hold no data: the page gets that from the API, with the token."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

HEADERS = {
    # Commands, labels and outputs are untrusted. Even if one got into the page as markup, it could not run,
    # nor load or send anything.
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304
}


@cache
def files() -> dict[str, tuple[bytes, str, str]]:
    """Content, type and entity tag of each file, by name."""
    found = {}
    for entry in resources.files(__package__).joinpath("static").iterdir():
        kind = TYPES.get("." + entry.name.rpartition(".")[2])
        if kind is not None:
            content = entry.read_bytes()
            found[entry.name] = (content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


def routes() -> list[Route]:
    return [
        Route("/", _page, methods=["GET"]),
        Route("/dashboard/{file}", _page, methods=["GET"]),
    ]


async def _page(request: Request) -> Response:
    found = files().get(request.path_params.get("file", "index.html"))
    if found is None:
        return Response("there is no such file\n", 404, HEADERS, "text/plain")
    content, kind, tag = found
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=kind)
