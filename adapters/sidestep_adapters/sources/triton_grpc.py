"""A Triton server that is asked over gRPC: one channel, which lasts as long as it works."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sidestep.errors import ConfigError, WireError
from sidestep.polls import Header, Target
from sidestep.wire.triton import ModelStats
from sidestep_adapters.sources.triton_config import ModelConfig
from sidestep_adapters.sources.triton_server import PollError, text_of, unreadable
from sidestep_adapters.sources.triton_statistics import Head, translate

# It would write to standard error of each connection that fails, which polls tell by name.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
try:
    import grpc
    import grpc.aio
    from google.protobuf.message import DecodeError

    from sidestep_adapters.sources import triton_proto as proto
except ImportError as error:
    raise ConfigError(
        f"a URL with grpc:// needs grpcio and protobuf: pip install 'sidestep[grpc]' ({error})"
    ) from None

PORT = 8001
MAX_BYTES = 64 << 20
"""Of one answer: as many as a version with a hundred thousand responses a request has."""
SERVICE = "/inference.GRPCInferenceService"
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BYTES),
    # A proxy that the environment names is meant for what is far away.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
Code = grpc.StatusCode
_ABSENT = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)

REFUSALS: Sequence[tuple[Sequence[grpc.StatusCode], str, bool | None, str]] = (
    ([Code.UNAVAILABLE], "restricted, expecting header", None, "restricted"),
    ([Code.UNAVAILABLE], "not support", None, "unsupported"),
    ([Code.UNAVAILABLE], "not ready", None, "not_ready"),
    ([Code.UNIMPLEMENTED], "", None, "unsupported"),
    ([Code.INVALID_ARGUMENT], "", None, "unknown_model"),
    ([Code.DEADLINE_EXCEEDED], "", True, "slow"),
    (_ABSENT, "SSL", False, "tls"),
    (_ABSENT, "certificate", False, "tls"),
    (_ABSENT, "", None, "unreachable"),
)
"""Status, what it says, whether the server was there meanwhile, and what it is called here."""
ADVICE = {
    "restricted": "give the header that it expects with header.NAME=@/FILE",
    "tls": "see ca=, cert= and key=, and whether the certificate has the URL's host",
    "unsupported": "the URL must be that of Triton's gRPC port, 8001 by default, and Triton built with"
    " statistics (TRITON_ENABLE_STATS)",
}

_KEY = re.compile(r"[0-9a-z_.-]+")


class GrpcServer:
    """One server's answers, in the place of a ``triton_server.Server``.

    Raises:
        ConfigError: A file cannot be used, or a header's name cannot be sent.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._place = place(target.url)
        self._channel: grpc.aio.Channel | None = None
        for header in target.headers:
            _key(header)
        self._credentials()

    async def extensions(self) -> Sequence[str]:
        """What it can do."""
        answer = await self._ask("ServerMetadata")
        return list(answer.extensions)

    async def statistics(self, model: str = "") -> Sequence[bytes]:
        """Of all models or of one: a submessage for each version that is ready."""
        answer = await self._ask("ModelStatistics", name=model)
        return list(answer.model_stats)

    async def ready(self) -> Sequence[str]:
        """Names of models of which a version is ready."""
        answer = await self._ask("RepositoryIndex", ready=True)
        return sorted({each.name for each in answer.models if each.state == "READY"})

    async def config(self, model: str) -> ModelConfig:
        """Of one model."""
        return proto.config((await self._ask("ModelConfig", name=model)).config)

    def head(self, piece: bytes) -> Head:
        """Whose statistics ``piece`` is.

        Raises:
            WireError: It does not say.
        """
        return proto.head(piece)

    def stats(self, piece: bytes, *, has_cache: bool) -> ModelStats:
        """What ``piece`` says.

        Raises:
            WireError: It contradicts itself.
        """
        return translate(proto.read(piece), has_cache=has_cache)

    async def close(self) -> None:
        """Let go of the connection; another question makes a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _ask(self, method: str, **fields: str | bool) -> Any:
        """The message that answers ``method``, within the poll's time.

        Raises:
            PollError: There is none.
        """
        channel = self._channel = self._channel or self._open()
        question = proto.MESSAGES[f"{method}Request"](**fields).SerializeToString()
        try:
            # As bytes: what cannot be read the library would log, and give None for.
            answer: bytes = await channel.unary_unary(f"{SERVICE}/{method}")(
                question, timeout=self._target.timeout, metadata=self._metadata()
            )
        except grpc.aio.AioRpcError as error:
            is_connected = channel.get_state() is grpc.ChannelConnectivity.READY
            found = refusal(error.code(), error.details() or "", is_connected=is_connected)
            if found.outcome in ("slow", "tls", "unreachable"):
                # A new one connects at once, reads its files anew, and has no peer that is gone.
                await self.close()
            raise found from None
        try:
            return proto.MESSAGES[f"{method}Response"].FromString(answer)
        except DecodeError as error:
            raise unreadable(WireError("bad_answer", str(error))) from None

    def _open(self) -> grpc.aio.Channel:
        try:
            credentials = self._credentials()
        except ConfigError as error:
            # They were fine at the start: somebody is changing them.
            raise PollError("tls", str(error)) from None
        if credentials is None:
            return grpc.aio.insecure_channel(self._place, options=OPTIONS)
        return grpc.aio.secure_channel(self._place, credentials, options=OPTIONS)

    def _credentials(self) -> grpc.ChannelCredentials | None:
        one = self._target
        if not one.url.startswith("grpcs://"):
            return None
        try:
            # gRPC itself says nothing of a file that it cannot use.
            context = ssl.create_default_context(cafile=one.ca or None)
            if one.cert:
                context.load_cert_chain(one.cert, one.key or None)
            trusted = one.ca or ssl.get_default_verify_paths().cafile
            return grpc.ssl_channel_credentials(
                Path(trusted).read_bytes() if trusted else None,
                Path(one.key or one.cert).read_bytes() if one.cert else None,
                Path(one.cert).read_bytes() if one.cert else None,
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{one.url}: ca=, cert= or key= cannot be used: {error}") from None

    def _metadata(self) -> list[tuple[str, str]]:
        return [(_key(header), _value(header)) for header in self._target.headers]


def place(url: str) -> str:
    """Host and port of a URL."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or PORT}"


def refusal(code: grpc.StatusCode, details: str, *, is_connected: bool) -> PollError:
    """What a status other than OK means; ``is_connected``: the server was there meanwhile."""
    outcome = f"grpc_{code.name.lower()}"
    for known, text, connected, name in REFUSALS:
        if code in known and text in details and connected in (None, is_connected):
            outcome = name
            break
    said = f"gRPC {code.name}, {text_of(details.encode())!r}"
    return PollError(outcome, said, ADVICE.get(outcome, ""))


def _key(header: Header) -> str:
    """The header's name as metadata has it, where letters are small."""
    key = header.name.lower()
    if not _KEY.fullmatch(key) or key.endswith("-bin") or key.startswith("grpc-"):
        raise ConfigError(f"header.{header.name}= cannot be sent over gRPC")
    return key


def _value(header: Header) -> str:
    if not header.file:
        return header.text
    return header.text + Path(header.file).read_text(encoding="ascii").strip()
