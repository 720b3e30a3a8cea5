"""Targets of ``sidestep top``: exporters, and engines' own metrics pages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus

import aiohttp
import msgspec

from sidestep.catalog.engine_pages import FURTHER_PATHS, PAGES, PATH
from sidestep.catalog.page_reader import Reading, read_page
from sidestep.exposition.live.answers import EngineRow, Live
from sidestep.exposition.live.increases import Increases
from sidestep_tools.top.report import Report, TargetReport, report
from sidestep_tools.web_client import fetch
from sidestep_tools.web_client.access import Access
from sidestep_tools.web_client.fetch import DENIED, FetchError

CONNECT_TIMEOUT = 1.0
LIVE = "/api/v1/live"
EXPORTER = "http://127.0.0.1:9857"
DISCOVERED = (
    EXPORTER,
    *(f"http://127.0.0.1:{port}{page.path}" for page in PAGES for port in page.ports),
)
"""Addresses that ``--discover`` tries."""


class Target:
    """One target."""

    def __init__(self, url: str) -> None:
        address = fetch.parse_address(url)
        self.host, self.port, self._root = address.host, address.port, address.root
        self.url = url if "://" in url else f"http://{url}"
        path = address.path.rstrip("/")
        # A server's page is looked for, unless the address is that of a page.
        self._page = "" if path == "" else self.url
        self._is_live: bool | None = None if path in ("", PATH) else False
        self._increases: dict[tuple[str, tuple[str, ...]], Increases] = {}
        self._engines: list[EngineRow] = []
        self._answered_at: float | None = None

    async def poll(self, session: aiohttp.ClientSession) -> TargetReport:
        """Ask the target once."""
        error = None
        try:
            with fetch.explained():
                self._engines = await asyncio.wait_for(self._rows(session), fetch.TIMEOUT)
            self._answered_at = time.monotonic()
        except FetchError as failure:
            error = str(failure)
        age = None if self._answered_at is None else time.monotonic() - self._answered_at
        return TargetReport(url=self.url, error=error, engines=self._engines, age=age)

    async def _rows(self, session: aiohttp.ClientSession) -> list[EngineRow]:
        if self._is_live is not False:
            found = await self._live(session)
            if found is not None:
                return found
        if not self._page:
            self._page = await self._find_page(session)
        status, text = await _get(session, self._page)
        if status == HTTPStatus.NOT_FOUND:
            raise FetchError(
                f"no page at {self._page}: give its whole URL, or start the engine with metrics"
            )
        if status != HTTPStatus.OK:
            raise _refusal(status)
        now = time.monotonic()
        return [self._row(reading, now) for reading in read_page(text)]

    async def _live(self, session: aiohttp.ClientSession) -> list[EngineRow] | None:
        """Return the engines of an exporter; None if it is none, or has no live page."""
        status, text = await _get(session, self._root + LIVE)
        if status == HTTPStatus.OK:
            with contextlib.suppress(msgspec.MsgspecError):
                live = msgspec.json.decode(text, type=Live)
                self._is_live = True
                # Two exporters may have the same engines.
                return [
                    msgspec.structs.replace(row, id=f"{self._root} {row.id}")
                    for row in live.engines
                ]
        elif status in DENIED or status >= HTTPStatus.INTERNAL_SERVER_ERROR or self._is_live:
            raise _refusal(status)
        self._is_live = False
        return None

    async def _find_page(self, session: aiohttp.ClientSession) -> str:
        for path in FURTHER_PATHS:
            status, text = await _get(session, self._root + path)
            if status == HTTPStatus.OK and text.startswith("#"):
                return self._root + path
        # Some servers' /metrics gives statistics to one reader only, which others would miss. Such a
        # server answers no HEAD.
        page = self._root + PATH
        async with session.head(page, allow_redirects=True) as answer:
            if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
                raise FetchError("answers no HEAD: give the whole URL of its metrics page")
            if answer.status in DENIED:
                raise _refusal(answer.status)
        return page

    def _row(self, reading: Reading, now: float) -> EngineRow:
        increases = self._increases.setdefault((reading.dialect, reading.key), Increases())
        increases.add(reading, now)
        model, *replica = reading.key
        name = ",".join(filter(None, replica)) or f"{self.host}:{self.port}"
        identity = " ".join([self._root, reading.dialect, *reading.key])
        return increases.row(identity, name, model)


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    """Return status and text of a page."""
    answer = await fetch.fetch(session, url)
    if answer.status == HTTPStatus.OK and answer.content_type == "text/html":
        raise FetchError("answers with HTML: give the whole URL of its metrics page")
    return answer.status, answer.text


def _refusal(status: int) -> FetchError:
    return FetchError(fetch.refusal(status))


class Targets:
    """All targets, asked at once.

    Args:
        urls: Addresses of exporters, servers or metrics pages; without a scheme they get http.
        access: Headers, login and certificates of all requests.

    Raises:
        ConfigError: An address is no URL.
    """

    def __init__(self, urls: Sequence[str], access: Access | None = None) -> None:
        self.targets = [Target(url) for url in dict.fromkeys(urls)]
        self._access = access or Access()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Targets]:
        """Keep connections to the targets open during the block, in which they may be polled."""
        async with self._access.session() as self._session:
            yield self

    async def poll(self) -> Report:
        """Ask all targets once."""
        found = await asyncio.gather(*(target.poll(self._session) for target in self.targets))
        return report(found, time.time())


async def discover() -> list[str]:
    """Return the addresses of this machine that ``--discover`` tries and that accept connections."""

    async def accepts(url: str) -> bool:
        target = Target(url)
        opening = asyncio.open_connection(target.host, target.port)
        try:
            _, writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT)
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return True

    found = await asyncio.gather(*map(accepts, DISCOVERED))
    return [url for url, is_open in zip(DISCOVERED, found, strict=True) if is_open]
