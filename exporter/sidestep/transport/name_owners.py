"""Ownership of stream and engine names: a name belongs to the first key that uses it."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from sidestep.errors import WireError

LOCAL = ""
"""Stands for the key of peers over an ipc path, which file permissions authorize."""
MAX_NAMES = 2048
"""Maximum number of streams and engines of one key."""


class NameOwners:
    """Owners of stream and engine ids."""

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

    def release(self, key: str) -> None:
        """Release all names of ``key``, which is no longer authorized."""
        for owners in (self._streams, self._engines):
            for name in [name for name, owner in owners.items() if owner == key]:
                del owners[name]
        self._held.pop(key, None)
