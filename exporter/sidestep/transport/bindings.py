"""Whose streams and engines are whose: a name belongs to the first key that says it."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from sidestep.errors import WireError

LOCAL = ""
"""In place of a key: a peer over an ipc path, whose directory has let it in."""
SOURCE = "forwarded by "
"""Before the names of exporters, which no stream is called."""
MAX_NAMES = 2048
"""Streams and engines of one key."""


class Bindings:
    """Ownership of stream and engine ids; of a new process only exporters' names are known."""

    def __init__(self) -> None:
        self._streams: dict[str, str] = {}
        self._engines: dict[str, str] = {}
        self._held: dict[str, int] = {}

    def claim(
        self, key: str, stream: str, engines: Sequence[str], allowed: Sequence[str] = ()
    ) -> None:
        """Take what a Hello names for ``key``: all of it, or nothing.

        Args:
            key: Of the connection, or ``LOCAL``.
            stream: The stream's id.
            engines: Ids of the engines that it feeds.
            allowed: Patterns that every engine's id must match one of; empty: any may be.

        Raises:
            WireError: One of them is another key's, or not allowed, or there are too many.
        """
        for engine in engines:
            if allowed and not any(fnmatchcase(engine, pattern) for pattern in allowed):
                raise WireError("unauthorised", f"this key may not feed engine {engine}")
        # Never whose it is: that would tell one tenant about another.
        if self._streams.get(stream, key) != key:
            raise WireError("unauthorised", f"stream {stream} is another key's")
        for engine in engines:
            if self._engines.get(engine, key) != key:
                raise WireError("unauthorised", f"engine {engine} is another key's")
        new = {engine for engine in engines if engine not in self._engines}
        held = self._held.get(key, 0) + len(new) + (stream not in self._streams)
        if held > MAX_NAMES:
            if key == LOCAL:
                return
            raise WireError("over_limit", "this key has named too many streams and engines")
        self._held[key] = held
        self._streams[stream] = key
        self._engines.update(dict.fromkeys(new, key))

    def claim_source(self, key: str, source: str, engine: str, allowed: Sequence[str] = ()) -> None:
        """Take the name of an exporter for ``key``, which tells of ``engine``.

        Its engines are apart from everybody else's, and so nobody's but the exporter's.

        Raises:
            WireError: See ``claim``.
        """
        if allowed and not any(fnmatchcase(engine, pattern) for pattern in allowed):
            raise WireError("unauthorised", f"this key may not tell of engine {engine}")
        self.claim(key, f"{SOURCE}{source}", ())

    def owner(self, source: str) -> str | None:
        """The key that the name of an exporter belongs to; None where nobody's."""
        return self._streams.get(f"{SOURCE}{source}")

    def own(self, key: str, source: str) -> None:
        """Let the name of an exporter belong to ``key``, as it did before a restart."""
        name = f"{SOURCE}{source}"
        if name not in self._streams:
            self._streams[name] = key
            self._held[key] = self._held.get(key, 0) + 1

    def release(self, key: str) -> None:
        """Give free what ``key`` owns: it is authorized no more."""
        for owners in (self._streams, self._engines):
            for name in [name for name, owner in owners.items() if owner == key]:
                del owners[name]
        self._held.pop(key, None)
