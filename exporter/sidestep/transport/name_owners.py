"""Ownership of stream and engine names: a name belongs to the first key that uses it."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from sidestep.errors import WireError

LOCAL = ""
"""Stands for the key of peers over an ipc path, which file permissions authorize."""
SOURCE = "forwarded by "
"""Prefix of the names of exporters, which no stream id has."""
MAX_NAMES = 2048
"""Maximum number of streams and engines of one key."""


class NameOwners:
    """Owners of stream and engine ids; after a restart only the owners of exporter names are restored."""

    def __init__(self) -> None:
        self._streams: dict[str, str] = {}
        self._engines: dict[str, str] = {}
        self._held: dict[str, int] = {}

    def claim(
        self, key: str, stream: str, engines: Sequence[str], allowed: Sequence[str] = ()
    ) -> None:
        """Assign all names of a Hello to ``key``, or none of them.

        Args:
            key: Key of the connection, or ``LOCAL``.
            stream: Id of the stream.
            engines: Ids of the engines that the stream feeds.
            allowed: Patterns that every engine's id must match one of; empty: all are allowed.

        Raises:
            WireError: A name belongs to another key or is not allowed, or the key has too many.
        """
        for engine in engines:
            if allowed and not any(fnmatchcase(engine, pattern) for pattern in allowed):
                raise WireError("unauthorised", f"this key may not feed engine {engine}")
        # The text never names the owner: that would leak one tenant's key to another.
        if self._streams.get(stream, key) != key:
            raise WireError("unauthorised", f"stream {stream} belongs to another key")
        for engine in engines:
            if self._engines.get(engine, key) != key:
                raise WireError("unauthorised", f"engine {engine} belongs to another key")
        new = {engine for engine in engines if engine not in self._engines}
        held = self._held.get(key, 0) + len(new) + (stream not in self._streams)
        if held > MAX_NAMES:
            if key == LOCAL:
                return
            raise WireError("over_limit", "this key uses too many streams and engines")
        self._held[key] = held
        self._streams[stream] = key
        self._engines.update(dict.fromkeys(new, key))

    def claim_source(self, key: str, source: str, engine: str, allowed: Sequence[str] = ()) -> None:
        """Assign the name of an exporter that forwards ``engine`` to ``key``.

        Engines of a forwarding exporter are separate from all others, so only its name is owned.

        Raises:
            WireError: See ``claim``.
        """
        if allowed and not any(fnmatchcase(engine, pattern) for pattern in allowed):
            raise WireError("unauthorised", f"this key may not forward engine {engine}")
        self.claim(key, f"{SOURCE}{source}", ())

    def owner(self, source: str) -> str | None:
        """Return the key that owns the name of an exporter, or None."""
        return self._streams.get(f"{SOURCE}{source}")

    def restore_owner(self, key: str, source: str) -> None:
        """Restore the owner of an exporter's name after a restart."""
        name = f"{SOURCE}{source}"
        if name not in self._streams:
            self._streams[name] = key
            self._held[key] = self._held.get(key, 0) + 1

    def release(self, key: str) -> None:
        """Release all names of ``key``, which is no longer authorized."""
        for owners in (self._streams, self._engines):
            for name in [name for name, owner in owners.items() if owner == key]:
                del owners[name]
        self._held.pop(key, None)
