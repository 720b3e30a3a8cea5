"""The files of the live page, read once and served with a strict content security policy."""

from __future__ import annotations

import hashlib
import html
import importlib.resources
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from aiohttp import web

from sidestep.catalog.tuning import CAUSES

FOLDER = importlib.resources.files("sidestep.http") / "live_page"
CONTENT_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LINKS = "<!-- links -->"
"""Place of the links in the page."""


class File(NamedTuple):
    """A file as it is sent."""

    body: bytes
    content_type: str
    tag: str


class LivePage:
    """The live page and the files that it loads."""

    def __init__(self, links: Iterable[tuple[str, str]]) -> None:
        found = {}
        for folder in (FOLDER, FOLDER / "vendor"):
            for entry in folder.iterdir():
                suffix = entry.name[entry.name.rfind(".") :]
                if entry.is_file() and suffix in CONTENT_TYPES:
                    found[entry.name] = entry.read_bytes()
        items = "".join(
            # The page may be served below a prefix, so that all its addresses are relative.
            f'<li><a href="{html.escape(to.lstrip("/"))}">{html.escape(text)}</a></li>'
            for to, text in links
        )
        found["tuning.json"] = msgspec.json.encode(
            {cause.name: cause._asdict() | {"changes": dict(cause.changes)} for cause in CAUSES}
        )
        page = found.pop("index.html").decode().replace(LINKS, items).encode()
        self._page = _file("index.html", page)
        self._files = {name: _file(name, body) for name, body in found.items()}

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Return the page."""
        return _answer(request, self._page)

    async def file(self, request: web.Request) -> web.StreamResponse:
        """Return a file that the page loads."""
        found = self._files.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound(text="no such file\n")
        return _answer(request, found)


def _file(name: str, body: bytes) -> File:
    content_type = CONTENT_TYPES[name[name.rfind(".") :]]
    return File(body, content_type, hashlib.sha256(body).hexdigest()[:32])


def _answer(request: web.Request, file: File) -> web.StreamResponse:
    if any(each.value == file.tag for each in request.if_none_match or ()):
        response = web.Response(status=304, headers=HEADERS)
    else:
        response = web.Response(
            body=file.body, content_type=file.content_type, charset="utf-8", headers=HEADERS
        )
    response.etag = file.tag
    return response
