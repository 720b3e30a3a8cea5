"""Basic auth: bcrypt off the event loop, one at a time, each answer remembered for a while."""

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
"""All that bcrypt looks at; its Python module refuses more, others ignore the rest."""
MAX_REMEMBERED = 128
Verify = Callable[[bytes, bytes], bool]


class Busy(Exception):  # noqa: N818 - it is an answer, and no fault
    """Too many passwords wait to be verified."""


def verify(password: bytes, hashed: bytes) -> bool:
    """Whether ``hashed`` is of ``password``: tens of milliseconds of a core, on purpose."""
    try:
        return bcrypt.checkpw(password[:BCRYPT_BYTES], hashed)
    except ValueError:  # a NUL in the password, for some releases
        return False


def credentials(header: str) -> tuple[bytes, bytes] | None:
    """User and password of an Authorization header; None where it is no Basic one."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (user, password) if colon else None


class PasswordVerifier:
    """The users of one configuration, and what is known of passwords tried with it.

    An unknown user costs as much as a known one: the password is verified against the hash
    of one of the others, always the same for the same name, and the answer ignored.

    Args:
        users: Names and their bcrypt hashes; at least one.
        executor: Of one thread: a flood of wrong passwords gets one core at most.
        waiting: Passwords that may wait for it.
        verify: What is run there.
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
        # Keys of the memory below: nobody who reads it learns a password from it.
        self._secret = secrets.token_bytes(32)
        # Apart, so that wrong passwords do not push out right ones.
        self._accepted: OrderedDict[bytes, None] = OrderedDict()
        self._rejected: OrderedDict[bytes, None] = OrderedDict()
        self._pending: dict[bytes, asyncio.Future[bool]] = {}

    async def is_valid(self, user: bytes, password: bytes) -> bool:
        """Whether this is a user and their password.

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
        # The question goes on where one of its askers hangs up.
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
