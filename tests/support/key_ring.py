"""CURVE keys of an exporter and its engines, as files."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from sidestep.app.exporter import Exporter
from sidestep.transport import keys
from sidestep.transport.keys import CLIENT_KEY, SERVER_KEY
from socket_peers import Peer, connect


class Ring:
    """A directory with the keys of an exporter and of engines."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authorized = directory / "authorized"
        self.authorized.mkdir()
        self.secret, self.public = keys.generate(directory, "exporter")

    def engine(self, name: str, *lines: str, admitted: bool = True) -> Path:
        """Make the keys of an engine, authorize it if ``admitted``, and return the secret one's path."""
        secret, public = keys.generate(self.directory, name)
        if admitted:
            text = public.read_text() + "".join(f"{line}\n" for line in lines)
            (self.authorized / public.name).write_text(text)
        return secret

    def remove(self, name: str) -> None:
        """Withdraw the authorization of an engine."""
        (self.authorized / f"{name}.pub").unlink()

    def text(self, name: str) -> str:
        """Return the public key of an engine."""
        return keys.read_public(self.directory / f"{name}.pub").text

    @property
    def flags(self) -> dict[str, Any]:
        """Settings of an exporter with a TCP port that requires keys, and an ipc path."""
        path = f"ipc://{self.directory}/own/i.ipc"
        return {
            "ingest_endpoint": ("tcp://127.0.0.1:*", path),
            "ingest_curve_key": str(self.secret),
            "ingest_authorized_keys": str(self.authorized),
        }

    def connect(self, exporter: Exporter | str, secret: Path) -> AbstractAsyncContextManager[Peer]:
        """Connect with the secret key of an engine."""
        return connect(exporter, keys.read_secret(secret), keys.read_public(self.public).text)

    def environ(self, monkeypatch: pytest.MonkeyPatch, secret: object) -> None:
        """Set the environment of an engine with this secret key."""
        monkeypatch.setenv(SERVER_KEY, str(self.public))
        monkeypatch.setenv(CLIENT_KEY, str(secret))
