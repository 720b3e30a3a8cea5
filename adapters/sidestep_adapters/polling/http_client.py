"""HTTP client of polled servers: a request returns a complete body or one cause of failure."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import aiohttp
import msgspec
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from sidestep import __version__
from sidestep.config.scrape_targets import HEADER_TEXT, Header, Target
from sidestep.errors import ConfigError, PollError, drop_frames
from sidestep.http.config_files import MAX_PEM_BYTES, WatchedFiles
from sidestep.protocol.messages import DECODE_ERRORS
from sidestep.transport.http_response import BoundedResponse

CONNECT_SECONDS = 5.0
REASON_SECONDS = 1.0
"""Seconds to wait for the body of an error response."""
MAX_BODY_BYTES = 64 << 20
MAX_HEADER_FILE_BYTES = 64 << 10
MAX_REASON_BYTES = 4096
MAX_REASON_CHARS = 200
OK = 200

_SPACES = re.compile(r"[^ -~]+")


class Response(NamedTuple):
    """A complete response with status 200: its headers, and its body in chunks."""

    headers: CIMultiDictProxy[str]
    chunks: list[bytes]

    def text(self) -> list[bytes]:
        """Return the chunks of a text; its last line gets an end if HTTP shows that nothing is missing."""
        is_delimited = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        if is_delimited and self.chunks and not self.chunks[-1].endswith(b"\n"):
            return [*self.chunks, b"\n"]
        return self.chunks


Causes = Sequence[tuple[str, str, str]]
"""Causes of failures, a part of their text, and the causes that a kind of server means; the first counts."""


class Client:
    """Sends requests to one target; a request after ``close`` connects again.

    Redirects are off, so that secrets in headers reach no other server, and compression is off, so
    that a small response cannot expand.
    """

    def __init__(self, target: Target, causes: Causes = ()) -> None:
        self.target = target
        self._causes = causes
        self._tls_files: WatchedFiles | None = None
        self._tls: ssl.SSLContext | bool = True
        self._session: aiohttp.ClientSession | None = None

    def check(self) -> None:
        """Read all files that requests need, once before the first request."""
        self._prepare()

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(
        self, url: str, accept: str, kinds: Collection[str] = (), max_bytes: int = 0
    ) -> Response:
        """Return the response of ``url``, of one of the media types ``kinds`` if it names its own.

        Its body has at most ``max_bytes``, or else ``MAX_BODY_BYTES``.

        Raises:
            PollError: There is no complete response with status 200.
        """
        headers = CIMultiDict({"Accept": accept})
        try:
            # Each request reads the files: a secret may change in between.
            headers.update(await asyncio.to_thread(self._prepare))
        except ConfigError as error:
            raise PollError("unreadable", str(error)) from None
        try:
            return await self._fetch(url, headers, kinds, max_bytes)
        except PollError as error:
            drop_frames(error)
            for cause, part, meant in self._causes:
                if error.cause == cause and part in str(error):
                    raise PollError(meant, str(error)) from None
            raise

    async def _fetch(
        self, url: str, headers: CIMultiDict[str], kinds: Collection[str], max_bytes: int
    ) -> Response:
        if self._session is None:
            self._session = self._new_session()
        is_connected = asyncio.Event()
        try:
            async with self._session.get(
                URL(url, encoded=True),
                headers=headers,
                ssl=self._tls,
                allow_redirects=False,
                trace_request_ctx=is_connected,
            ) as response:
                return Response(response.headers, await _read_body(response, kinds, max_bytes))
        except asyncio.TimeoutError:
            if is_connected.is_set():
                detail = f"no whole answer within {self.target.timeout:g} s"
                raise PollError("slow", detail) from None
            seconds = min(CONNECT_SECONDS, self.target.timeout)
            raise PollError("unreachable", f"no connection within {seconds:g} s") from None
        except (aiohttp.ClientConnectionError, OSError) as error:
            # aiohttp's own text also mentions an SSL option that is not set.
            detail = _printable_line(getattr(error, "os_error", error))
            raise PollError("unreachable", detail) from None
        except aiohttp.ClientResponseError as error:
            # The error's own text includes the URL, whose query may be a secret.
            raise PollError("bad_answer", _printable_line(error.message)) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise PollError("bad_answer", _printable_line(error)) from None

    def _new_session(self) -> aiohttp.ClientSession:
        async def connected(_: object, context: SimpleNamespace, __: object) -> None:
            context.trace_request_ctx.set()

        traces = aiohttp.TraceConfig()
        traces.on_connection_create_end.append(connected)
        traces.on_connection_reuseconn.append(connected)
        headers = {"Accept-Encoding": "identity", "User-Agent": f"sidestep/{__version__}"}
        if not self.target.keepalive:
            # Not every release of aiohttp sets this header.
            headers["Connection"] = "close"
        return aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(force_close=not self.target.keepalive),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self.target.timeout, connect=CONNECT_SECONDS),
            auto_decompress=False,
            response_class=BoundedResponse,
            trace_configs=[traces],
        )

    def _prepare(self) -> dict[str, str]:
        """Return the target's headers, and read files for TLS again if one has changed."""
        if self._tls_files is None or self._tls_files.changed():
            files = WatchedFiles()
            self._tls = _client_context(self.target, files)
            self._tls_files = files
        return {header.name: _header_value(header) for header in self.target.headers}


def _client_context(target: Target, files: WatchedFiles) -> ssl.SSLContext | bool:
    """Return the TLS context of ``target``; True if it has no TLS options."""
    for path in (target.ca, target.cert, target.key):
        if path:
            files.read(Path(path), MAX_PEM_BYTES)
    if not target.ca and not target.cert:
        return True
    try:
        context = ssl.create_default_context(cafile=target.ca or None)
    except (OSError, ValueError):
        raise ConfigError(f"{target.ca} has no PEM certificate of a CA") from None

    def locked() -> str:
        # Without this OpenSSL would prompt on the terminal.
        raise ConfigError(f"{target.key or target.cert}: the key is encrypted")

    if target.cert:
        try:
            context.load_cert_chain(target.cert, target.key or None, locked)
        except (OSError, ValueError):
            names = " and ".join(filter(None, (target.cert, target.key)))
            raise ConfigError(f"{names}: not a PEM certificate and its PEM key") from None
    return context


def _header_value(header: Header) -> str:
    """Return the value of ``header``, with the content of its file."""
    if not header.file:
        return header.text
    content = WatchedFiles().read(Path(header.file), MAX_HEADER_FILE_BYTES)
    text = content.decode("latin-1").strip()
    if not HEADER_TEXT.fullmatch(text):
        raise ConfigError(f"{header.file}: not one line of ASCII")
    return header.text + text


async def _read_body(
    response: aiohttp.ClientResponse, kinds: Collection[str], max_bytes: int
) -> list[bytes]:
    if response.status != OK:
        raise PollError(f"http_{response.status}", await _error_reason(response))
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kinds and kind and kind not in kinds:
        raise PollError(
            "bad_answer", f"the response is {_printable_line(kind)}, not {' or '.join(kinds)}"
        )
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise PollError(
            "bad_answer",
            f"the response is encoded as {_printable_line(encoding)}, which was not requested",
        )
    chunks: list[bytes] = []
    size, limit = 0, max_bytes or MAX_BODY_BYTES
    try:
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > limit:
                raise PollError("bad_answer", f"more than {limit >> 20} MiB")
            chunks.append(chunk)
    except asyncio.TimeoutError:
        raise
    except (aiohttp.ClientError, OSError) as error:
        raise PollError(
            "truncated", f"the response ended after {size} bytes: {_printable_line(error)}"
        ) from None
    return chunks


async def _error_reason(response: aiohttp.ClientResponse) -> str:
    """Return the text of ``{"error": "..."}`` in an error response, or else HTTP's reason.

    Servers with OpenAI's API have ``{"error": {"message": "..."}}``.
    """
    try:
        reading = response.content.read(MAX_REASON_BYTES)
        payload = msgspec.json.decode(await asyncio.wait_for(reading, REASON_SECONDS))
    except (*DECODE_ERRORS, aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        drop_frames(error)
        payload = None
    text = payload.get("error") if isinstance(payload, dict) else None
    if isinstance(text, dict):
        text = text.get("message")
    return _printable_line(text if isinstance(text, str) else response.reason or "no reason given")


def _printable_line(text: object) -> str:
    return _SPACES.sub(" ", str(text) or repr(text)).strip()[:MAX_REASON_CHARS]
