"""A polled server over HTTP: one question, and its whole answer or one cause why there is none."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import ssl
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from sidestep import __version__
from sidestep.config.scrape_targets import HEADER_TEXT, Target
from sidestep.errors import ConfigError, PollError
from sidestep.http.config_files import MAX_PEM_BYTES, WatchedFiles

CONNECT_SECONDS = 5.0
REASON_SECONDS = 1.0
"""How long an error's own words are waited for."""
MAX_BODY_BYTES = 64 << 20
MAX_HEADER_FILE_BYTES = 64 << 10
MAX_REASON_BYTES = 4096
MAX_REASON_CHARS = 200
OK = 200

_SPACES = re.compile(r"[^ -~]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a server said.

    Attributes:
        kind: Media type in small letters, without parameters; empty where none is named.
        chunks: The body, as it came: joining many megabytes would hold the loop.
    """

    kind: str
    chunks: list[bytes]

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(self.chunks)


class Client:
    """Asks one target, between ``open`` and ``close``.

    Redirects are not followed and nothing is compressed: headers with secrets go to nobody
    else, and a small answer cannot grow.

    Args:
        at_once: Questions that may be under way.
    """

    def __init__(self, target: Target, at_once: int = 1) -> None:
        self.target = target
        self._at_once = at_once
        self._tls_files: WatchedFiles | None = None
        self._tls: ssl.SSLContext | bool = True
        self._session: aiohttp.ClientSession | None = None

    def check(self) -> None:
        """Read all files that questions need, once before the first.

        Raises:
            ConfigError: One cannot be read, or is not what it should be.
        """
        self._prepare()

    def open(self) -> None:
        """Begin, in the running event loop."""
        traces = aiohttp.TraceConfig()
        traces.on_connection_create_end.append(_connected)
        traces.on_connection_reuseconn.append(_connected)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._at_once, force_close=not self.target.keepalive
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_connect=None),
            auto_decompress=False,
            trace_configs=[traces],
        )

    async def close(self) -> None:
        """End; a question in flight ends with whoever asked it."""
        if self._session is not None:
            await self._session.close()

    async def ask(
        self, url: str, accept: str, kinds: Collection[str], method: str = "GET"
    ) -> Answer:
        """The answer of ``url``.

        Args:
            url: Of the target's server, or of another that has the same headers and files.
            accept: The header of that name.
            kinds: Media types that the answer may have; an answer need not name any.
            method: No question has a body.

        Raises:
            PollError: There is no whole answer of status 200.
        """
        headers = await self._headers(accept)
        connected = asyncio.get_running_loop().create_future()
        asking = asyncio.ensure_future(self._ask(method, url, headers, kinds, connected))
        try:
            await asyncio.wait((asking, connected), return_when=asyncio.FIRST_COMPLETED)
            # Its time begins here: who takes long to be reached is no slow server.
            if not (await asyncio.wait((asking,), timeout=self.target.timeout))[0]:
                raise PollError("slow", f"no whole answer within {self.target.timeout:g} s")
            return asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask(
        self,
        method: str,
        url: str,
        headers: CIMultiDict[str],
        kinds: Collection[str],
        connected: asyncio.Future[None],
    ) -> Answer:
        if self._session is None:
            raise RuntimeError("a client asks once it is open")
        try:
            async with self._session.request(
                method,
                URL(url, encoded=True),
                headers=headers,
                ssl=self._tls,
                allow_redirects=False,
                trace_request_ctx=connected,
            ) as response:
                return await _answer(response, kinds)
        except aiohttp.ServerTimeoutError:
            detail = f"no connection within {CONNECT_SECONDS:g} s"
            raise PollError("unreachable", detail) from None
        except (aiohttp.ClientConnectionError, OSError) as error:
            # Its own words also tell of an SSL option that nobody gave.
            raise PollError("unreachable", line(getattr(error, "os_error", error))) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise PollError("bad_answer", line(error)) from None

    async def _headers(self, accept: str) -> CIMultiDict[str]:
        """Of one question; a secret may be another one every time."""
        found: CIMultiDict[str] = CIMultiDict()
        found["Accept"] = accept
        found["Accept-Encoding"] = "identity"
        found["User-Agent"] = f"sidestep/{__version__}"
        if not self.target.keepalive:
            # Not every release of aiohttp says so by itself.
            found["Connection"] = "close"
        target = self.target
        if target.ca or target.cert or any(header.file for header in target.headers):
            try:
                own = await asyncio.to_thread(self._prepare)
            except ConfigError as error:
                raise PollError("unreadable", str(error)) from None
        else:
            own = self._prepare()
        found.update(own)
        return found

    def _prepare(self) -> dict[str, str]:
        """The target's headers; the files that TLS needs are read again when one has changed."""
        if self._tls_files is None or self._tls_files.changed():
            files = WatchedFiles()
            self._tls = client_context(self.target, files)
            self._tls_files = files
        return {
            header.name: header.text + (secret(Path(header.file)) if header.file else "")
            for header in self.target.headers
        }


def client_context(target: Target, files: WatchedFiles) -> ssl.SSLContext | bool:
    """How ``target`` is trusted and what it is shown; True where nothing was said about it.

    Raises:
        ConfigError: A file cannot be read, or is not what it should be.
    """
    for path in (target.ca, target.cert, target.key):
        if path:
            files.read(Path(path), MAX_PEM_BYTES)
    if not target.ca and not target.cert:
        return True
    try:
        context = ssl.create_default_context(cafile=target.ca or None)
    except (OSError, ValueError):
        raise ConfigError(f"{target.ca} has no PEM certificate of an authority") from None

    def locked() -> str:
        # Without this OpenSSL would ask on the terminal.
        raise ConfigError(f"{target.key or target.cert}: the key is encrypted")

    if target.cert:
        try:
            context.load_cert_chain(target.cert, target.key or None, locked)
        except (OSError, ValueError):
            names = " and ".join(filter(None, (target.cert, target.key)))
            raise ConfigError(f"{names}: not a PEM certificate and its PEM key") from None
    return context


def secret(path: Path) -> str:
    """What a header's file holds.

    Raises:
        ConfigError: It cannot be read, or is not one line.
    """
    text = WatchedFiles().read(path, MAX_HEADER_FILE_BYTES).decode("latin-1").strip()
    if not HEADER_TEXT.fullmatch(text):
        raise ConfigError(f"{path}: not one line of ASCII")
    return text


async def _connected(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
    future: asyncio.Future[None] = context.trace_request_ctx
    if not future.done():
        future.set_result(None)


async def _answer(response: aiohttp.ClientResponse, kinds: Collection[str]) -> Answer:
    if response.status != OK:
        raise PollError(f"http_{response.status}", await _reason(response))
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind and kind not in kinds:
        raise PollError("bad_answer", f"it is {line(kind)}, not {' or '.join(kinds)}")
    packing = response.headers.get("Content-Encoding", "identity").strip().lower()
    if packing != "identity":
        raise PollError("bad_answer", f"it is packed as {line(packing)}, which nobody asked for")
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise PollError("bad_answer", f"more than {MAX_BODY_BYTES >> 20} MiB")
            chunks.append(chunk)
    except (aiohttp.ClientError, OSError) as error:
        raise PollError("truncated", f"it ended after {size} bytes: {line(error)}") from None
    return Answer(kind, chunks)


async def _reason(response: aiohttp.ClientResponse) -> str:
    """What the server says about an error, where it says ``{"error": "..."}``; else HTTP's word."""
    try:
        reading = response.content.read(MAX_REASON_BYTES)
        said = msgspec.json.decode(await asyncio.wait_for(reading, REASON_SECONDS))
    except (
        aiohttp.ClientError,
        OSError,
        asyncio.TimeoutError,
        msgspec.MsgspecError,
        RecursionError,
    ):
        said = None
    text = said.get("error") if isinstance(said, dict) else None
    return line(text if isinstance(text, str) else response.reason or "no reason given")


def line(text: object) -> str:
    """One printable line, not long."""
    return _SPACES.sub(" ", str(text) or repr(text)).strip()[:MAX_REASON_CHARS]
