"""Triton's API over gRPC, on one channel that is replaced when it fails."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sidestep.config.scrape_targets import Header, Target
from sidestep.errors import ConfigError, PollError
from sidestep.http.config_files import MAX_PEM_BYTES, WatchedFiles
from sidestep_adapters.polling.http_client import (
    CONNECT_SECONDS,
    client_context,
    header_value,
    printable_line,
)
from sidestep_adapters.triton.api import find_cause
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.statistics import ModelVersion
from sidestep_adapters.triton.wire import ModelStats

# gRPC would write failed connections to standard error; polls report them with names.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
try:
    import grpc
    import grpc.aio
    from google.protobuf.message import DecodeError

    from sidestep_adapters.triton import proto
except ImportError as error:
    raise ConfigError(
        "a URL with grpc:// needs grpcio and protobuf: pip install '.[grpc]' in a clone of"
        f" sidestep's repository ({error})"
    ) from None

PORT = 8001
SERVICE = "/inference.GRPCInferenceService"
MAX_BYTES = 8 << 20
"""Maximum bytes of an answer: decoding blocks the event loop."""
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BYTES),
    # Ignore proxies from the environment: they are meant for remote hosts.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
Code = grpc.StatusCode
CAUSES: Sequence[tuple[grpc.StatusCode, str, str]] = (
    (Code.UNAVAILABLE, "restricted, expecting header", "restricted"),
    (Code.UNAVAILABLE, "not support", "unsupported"),
    (Code.UNAVAILABLE, "not ready", "not_ready"),
    (Code.UNAVAILABLE, "", "unreachable"),
    (Code.UNIMPLEMENTED, "", "unsupported"),
    (Code.INVALID_ARGUMENT, "", "unknown_model"),
    (Code.DEADLINE_EXCEEDED, "", "slow"),
    (Code.RESOURCE_EXHAUSTED, "larger than max", "bad_answer"),
)
"""gRPC status, a part of its details, and the cause, as over HTTP."""

_KEY = re.compile(r"[0-9a-z_.-]+")
_State = grpc.ChannelConnectivity


class GrpcApi:
    """Implements ``api.ServerApi`` over gRPC; a query after ``close`` connects again.

    Args:
        target: The server's URL, files and headers.

    Raises:
        ConfigError: A header's name is not allowed in gRPC metadata.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._address = address(target.url)
        self._keys = [_key(header) for header in target.headers]
        self._has_files = any(header.file for header in target.headers)
        self._channel: grpc.aio.Channel | None = None
        self._opening = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    def check(self) -> None:
        """See ``ServerApi``."""
        self._credentials()
        self._metadata()

    async def extensions(self) -> Sequence[str]:
        """See ``ServerApi``."""
        return list((await self._query("ServerMetadata")).extensions)

    async def statistics(self, model: str = "", version: str = "") -> Sequence[bytes]:
        """See ``ServerApi``."""
        answer = await self._query("ModelStatistics", name=model, version=version)
        return list(answer.model_stats)

    async def ready(self) -> Sequence[str]:
        """See ``ServerApi``."""
        models = (await self._query("RepositoryIndex", ready=True)).models
        return sorted({each.name for each in models if each.state == "READY"})

    async def config(self, model: str) -> ModelConfig:
        """See ``ServerApi``."""
        return proto.translate_config((await self._query("ModelConfig", name=model)).config)

    def version_of(self, piece: bytes) -> ModelVersion:
        """See ``ServerApi``."""
        return proto.version_of(piece)

    def stats(self, piece: bytes, has_cache: bool) -> ModelStats:
        """See ``ServerApi``."""
        return proto.read(piece, has_cache=has_cache)

    async def close(self) -> None:
        """See ``ServerApi``; cancels running queries."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        for task in tuple(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _query(self, method: str, **fields: str | bool) -> Any:
        """Return the response message of ``method``.

        Raises:
            PollError: There is none.
        """
        request = proto.MESSAGES[f"{method}Request"](**fields).SerializeToString()
        try:
            if self._has_files:
                metadata = await asyncio.to_thread(self._metadata)
            else:
                metadata = self._metadata()
            channel = await self._open()
        except ConfigError as error:
            raise PollError("unreadable", str(error)) from None
        try:
            await _connect(channel)
            # As bytes: for an invalid message the library would log and return None.
            answer: bytes = await channel.unary_unary(f"{SERVICE}/{method}")(
                request, timeout=self._target.timeout, metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            found = failure(error.code(), error.details() or "")
        except PollError as error:
            found = error
        else:
            try:
                return proto.MESSAGES[f"{method}Response"].FromString(answer)
            except DecodeError as error:
                raise PollError("bad_answer", printable_line(error)) from None
        if found.cause in ("slow", "unreachable"):
            self._replace(channel)
        try:
            raise found
        finally:
            # Its frames hold this one.
            del found

    async def _open(self) -> grpc.aio.Channel:
        async with self._opening:
            if self._channel is None:
                if self._target.url.startswith("grpcs://"):
                    credentials = await asyncio.to_thread(self._credentials)
                    made = grpc.aio.secure_channel(self._address, credentials, options=OPTIONS)
                else:
                    made = grpc.aio.insecure_channel(self._address, options=OPTIONS)
                self._channel = made
            return self._channel

    def _replace(self, channel: grpc.aio.Channel) -> None:
        """Drop a failed channel; a new one connects at once and reads its files again."""
        if channel is self._channel:
            self._channel = None
            # Without a grace period other queries would fail as if their tasks had been cancelled.
            task = asyncio.ensure_future(channel.close(self._target.timeout + CONNECT_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _credentials(self) -> grpc.ChannelCredentials:
        target, files = self._target, WatchedFiles()
        # Check the files first: gRPC reports no error for a file that it cannot use.
        client_context(target, files)
        # gRPC's built-in roots may be older than the system's.
        ca = target.ca or ssl.get_default_verify_paths().cafile
        roots, key, chain = (
            files.read(Path(name), MAX_PEM_BYTES) if name else None
            for name in (ca, target.key or target.cert, target.cert)
        )
        return grpc.ssl_channel_credentials(roots, key, chain)

    def _metadata(self) -> list[tuple[str, str]]:
        return [
            (key, header_value(header))
            for key, header in zip(self._keys, self._target.headers, strict=True)
        ]


async def _connect(channel: grpc.aio.Channel) -> None:
    """Wait until the channel is connected or has failed; the call itself reports the failure.

    Raises:
        PollError: It is neither within the limit.
    """

    async def wait_settled() -> None:
        state = channel.get_state(try_to_connect=True)
        while state not in (_State.READY, _State.TRANSIENT_FAILURE):
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)

    if channel.get_state() is _State.READY:
        return
    try:
        await asyncio.wait_for(wait_settled(), CONNECT_SECONDS)
    except asyncio.TimeoutError:
        raise PollError("unreachable", f"no connection within {CONNECT_SECONDS:g} s") from None


def address(url: str) -> str:
    """Return host and port of a URL."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or PORT}"


def failure(code: grpc.StatusCode, details: str) -> PollError:
    """Return the error for a status other than OK."""
    cause = find_cause(CAUSES, code, details) or f"grpc_{code.name.lower()}"
    return PollError(cause, f"gRPC {code.name}, {printable_line(details)!r}")


def _key(header: Header) -> str:
    """Return the header's name as a metadata key, in lower case."""
    key = header.name.lower()
    if not _KEY.fullmatch(key) or key.endswith("-bin") or key.startswith("grpc-"):
        raise ConfigError(f"header.{header.name}= cannot be sent over gRPC")
    return key
