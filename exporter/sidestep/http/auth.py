"""Basic auth: bcrypt in one thread off the event loop, with cached results."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import bcrypt

BCRYPT_BYTES = 72
"""Bytes that bcrypt reads; its Python module rejects more, others ignore the rest."""
MAX_REMEMBERED = 128
Verify = Callable[[bytes, bytes], bool]


class Busy(Exception):  # noqa: N818 - a result, not an error
    """Too many passwords wait for verification."""


def verify(password: bytes, hashed: bytes) -> bool:
    """Return whether ``hashed`` is of ``password``; takes tens of milliseconds by design."""
    try:
        return bcrypt.checkpw(password[:BCRYPT_BYTES], hashed)
    except ValueError:  # a NUL in the password, for some releases
        return False


def credentials(header: str) -> tuple[bytes, bytes] | None:
    """Parse user and password of an Authorization header; None unless it is a Basic one."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (user, password) if colon else None


class PasswordVerifier:
    """Verifies passwords of one configuration's users, and caches the results.

    An unknown user takes as long as a known one: the password is verified against another user's
    hash, always the same one for a name, and the result is ignored.

    Args:
        users: Names and their bcrypt hashes; at least one.
        executor: Has one thread, so that a flood of wrong passwords uses one core at most.
        waiting: Passwords that may wait for the thread.
    """

    def __init__(
        self,
        users: Mapping[bytes, bytes],
        executor: Executor,
        waiting: int,
        verify: Verify = verify,
    ) -> None:
        self._users = dict(users)
        self._decoys = list(self._users.values())
        self._executor = executor
        self._waiting = waiting
        self._verify = verify
        # Secret of the cache keys, so that the cache reveals no password.
        self._secret = secrets.token_bytes(32)
        # Two caches, so that wrong passwords do not evict right ones.
        self._accepted: OrderedDict[bytes, None] = OrderedDict()
        self._rejected: OrderedDict[bytes, None] = OrderedDict()
        self._pending: dict[bytes, asyncio.Future[bool]] = {}

    async def is_valid(self, user: bytes, password: bytes) -> bool:
        """Return whether this is a user with this password.

        Raises:
            Busy: Too many others wait; nothing was verified.
        """
        key = self._digest(user, password)
        for remembered, answer in ((self._accepted, True), (self._rejected, False)):
            if key in remembered:
                remembered.move_to_end(key)
                return answer
        pending = self._pending.get(key)
        if pending is None:
            if len(self._pending) >= self._waiting:
                raise Busy
            pending = asyncio.ensure_future(self._verify_in_thread(key, user, password))
            self._pending[key] = pending
        # A client that disconnects must not cancel a verification that others wait for.
        return await asyncio.shield(pending)

    async def _verify_in_thread(self, key: bytes, user: bytes, password: bytes) -> bool:
        loop = asyncio.get_running_loop()
        hashed = self._users.get(user) or self._decoy(user)
        try:
            found = await loop.run_in_executor(self._executor, self._verify, password, hashed)
        finally:
            del self._pending[key]
        answer = found and user in self._users
        remembered = self._accepted if answer else self._rejected
        remembered[key] = None
        if len(remembered) > MAX_REMEMBERED:
            remembered.popitem(last=False)
        return answer

    def _decoy(self, user: bytes) -> bytes:
        chosen = int.from_bytes(self._digest(user, b"")[:8], "big")
        return self._decoys[chosen % len(self._decoys)]

    def _digest(self, user: bytes, password: bytes) -> bytes:
        length = len(user).to_bytes(8, "big")
        return hmac.new(self._secret, length + user + password, hashlib.sha256).digest()
