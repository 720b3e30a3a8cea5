"""The part of a poller that differs by the kind of server: how one poll is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from sidestep.config.engine_targets import EngineTarget
from sidestep.engines.items import Item
from sidestep.errors import PollError
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.progress import Progress


class Update(NamedTuple):
    """State of one engine of a server at one poll.

    Attributes:
        progress: What is known of its progress; None: nothing.
        detach: Whether the server no longer has the engine.
    """

    info: EngineInfo
    items: Sequence[Item] = ()
    progress: Progress | None = None
    detach: bool = False


class Poll(NamedTuple):
    """Result of one poll.

    Attributes:
        updates: The server's engines; empty: the server did not report any.
        failure: What the poll did not get.
    """

    updates: Sequence[Update]
    failure: PollError | None = None


class EngineApi(Protocol):
    """One server, as its poller uses it; a request connects as needed."""

    def check(self) -> EngineInfo:
        """Return an engine with the server's labels; raise ConfigError if a file cannot be used."""

    async def poll(self) -> Poll:
        """Poll the server once; raise PollError if it does not answer."""

    async def close(self) -> None:
        """Close the connection."""


class Kind(NamedTuple):
    """A kind of server.

    Attributes:
        api: Returns the API of a server; raises ValueError, with the end of an error line, if an
            option is invalid.
    """

    api: Callable[[EngineTarget], EngineApi]
    advice: Mapping[str, str]
