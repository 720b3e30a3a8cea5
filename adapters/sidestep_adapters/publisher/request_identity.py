"""Identities of requests, as far as ``SIDESTEP_REQUEST_IDENTITY`` lets them leave the engine's process."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping

from sidestep.protocol.limits import COUNT_LIMIT, printable
from sidestep.protocol.request_events import Identity, id_prefix
from sidestep_adapters.publisher.environment import choice

NONE, HASH, FULL = MODES = ("none", "hash", "full")
VARIABLE = "SIDESTEP_REQUEST_IDENTITY"
KEY_VARIABLE = "SIDESTEP_REQUEST_IDENTITY_KEY"
DIGEST_BYTES = 12
MAX_KEY_BYTES = 64
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class IdentityMaker:
    """Maker of identities; with ``hash``, texts are replaced by keyed digests.

    Args:
        mode: One of ``MODES``.
        key: Secret of the digests, the same for all engines whose tenants are to be the same.
    """

    def __init__(self, mode: str, key: str = "") -> None:
        self.is_on = mode != NONE
        self._hashes = mode == HASH
        self._key = key.encode()[:MAX_KEY_BYTES]

    def make(
        self,
        request_id: str,
        salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        join: str = "",
    ) -> Identity | None:
        """Return the identity of a request; None if none may be sent.

        ``join`` is the key that it shares with its other part on another engine; empty: none.
        """
        if not self.is_on:
            return None
        # A client may give anything, such as 0.5 or "high".
        priority = max(-COUNT_LIMIT, min(priority, COUNT_LIMIT)) if type(priority) is int else 0
        trace = (trace_headers or {}).get("traceparent", "")
        if not _TRACEPARENT.fullmatch(trace):
            trace = ""
        if not self._hashes:
            texts = printable(request_id), "", printable(salt or "")
            return Identity(*texts, trace, priority, join=printable(join))
        digest = self._digest
        texts = digest(request_id), digest(id_prefix(request_id)), digest(salt or "")
        return Identity(*texts, trace, priority, join=digest(join))

    def _digest(self, text: str) -> str:
        if not text:
            return ""
        # The JSON of a client may have half a character, which has no UTF-8.
        data = text.encode(errors="backslashreplace")
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._key).hexdigest()


def identity_maker() -> IdentityMaker:
    """Return the maker that the environment describes."""
    return IdentityMaker(choice(VARIABLE, MODES), os.environ.get(KEY_VARIABLE, ""))
