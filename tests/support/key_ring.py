"""Keys of an exporter and its engines, as files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from sidestep.app import Exporter
from sidestep.transport import keys
from sidestep.transport.client_keys import CLIENT_KEY, SERVER_KEY
from socket_peers import Peer


class Ring:
    """The keys of an exporter and of engines, as files in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authorized = directory / "authorized"
        self.authorized.mkdir()
        self.secret, self.public = keys.generate(directory, "exporter")

    def engine(self, name: str, *lines: str, admitted: bool = True) -> Path:
        """A new engine's secret key, its public one among the authorized ones if it is."""
        secret, public = keys.generate(self.directory, name)
        if admitted:
            text = public.read_text() + "".join(f"{line}\n" for line in lines)
            (self.authorized / public.name).write_text(text)
        return secret

    def remove(self, name: str) -> None:
        """Authorize an engine no more."""
        (self.authorized / f"{name}.pub").unlink()

    def text(self, name: str) -> str:
        """An engine's public key."""
        return keys.read_public(self.directory / f"{name}.pub").text

    @property
    def flags(self) -> dict[str, Any]:
        """An exporter with a port for keys, and a path for those who are here."""
        path = f"ipc://{self.directory}/own/i.ipc"
        return {
            "ingest_endpoint": ("tcp://127.0.0.1:*", path),
            "ingest_curve_key": str(self.secret),
            "ingest_authorized_keys": str(self.authorized),
        }

    @asynccontextmanager
    async def connect(self, exporter: Exporter | str, secret: Path | None) -> AsyncIterator[Peer]:
        """A connection with an engine's key, or none."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        if secret is not None:
            own = keys.read_secret(secret)
            socket.curve_publickey, socket.curve_secretkey = keys.public_of(own), own
            socket.curve_serverkey = keys.read_public(self.public).text.encode()
        socket.connect(exporter if isinstance(exporter, str) else exporter.endpoints[0])
        try:
            yield Peer(socket)
        finally:
            socket.close()
            context.term()

    def environ(self, monkeypatch: pytest.MonkeyPatch, secret: object) -> None:
        """The environment of an engine."""
        monkeypatch.setenv(SERVER_KEY, str(self.public))
        monkeypatch.setenv(CLIENT_KEY, str(secret))
