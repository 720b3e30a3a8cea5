"""Basic auth: admission, cost of verification, and floods of wrong passwords."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bcrypt
import pytest

from fronts import HASH, front, user
from sidestep.http.auth import MAX_REMEMBERED, Busy, PasswordVerifier, credentials, verify

USERS = f"basic_auth_users:\n  alice: {HASH}\n  böb: {HASH}\n"


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    """Return an executor with one thread, like the guard's."""
    with ThreadPoolExecutor(1) as made:
        yield made


class Counted:
    """``verify`` that records the hashes it ran with, and waits while ``gate`` is closed."""

    def __init__(self) -> None:
        self.hashes: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, password: bytes, hashed: bytes) -> bool:
        """Verify once the gate is open."""
        self.gate.wait(10)
        self.hashes.append(hashed)
        return verify(password, hashed)


async def test_only_users_with_their_password_are_admitted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Health and unknown paths need the password as well; the log says once what is denied to whom."""
    async with front(tmp_path, USERS) as site:
        for path in ("/", "/-/healthy"):
            assert (await site.get(path, headers=user("alice", "sesame"))).status == 200
            assert (await site.get(path, headers=user("böb", "sesame"))).status == 200
            for wrong in (user("alice", "Sesame"), user("carol", "sesame"), user("", ""), {}):
                answer = await site.get(path, headers=wrong)
                assert answer.status == 401
                assert answer.headers["WWW-Authenticate"] == 'Basic realm="sidestep"'
                assert answer.headers["Connection"] == "close"
                assert b"short" not in answer.body
        assert (await site.get("/nothing")).status == 401
        assert (await site.get("/", method="POST")).status == 401
        assert (await site.get("/nothing", headers=user("alice", "sesame"))).status == 404

        assert site.denied("password") == 6
        assert site.denied("no_password") == 4
    denied = "denied a request of 127.0.0.1:"
    assert caplog.messages == [f"{denied} password", f"{denied} no_password"]


@pytest.mark.parametrize(
    "header",
    [
        "", "Basic", "Basic ", "Bearer abc", "Basic !!!", "Basic YQ", "Basic YWxpY2U=",
        "Basic YTpi=Yg==", "Basic ü",
    ],
)  # fmt: skip
def test_invalid_credentials(header: str) -> None:
    """Another scheme, invalid base64 and a missing colon give no credentials."""
    assert credentials(header) is None


def test_passwords_of_any_bytes() -> None:
    """The first colon ends the user; bcrypt reads 72 bytes, as in Go, and no password raises an error."""
    header = f"bAsIc {base64.b64encode(b'alice:a:b').decode()}"

    assert credentials(header) == (b"alice", b"a:b")
    assert not verify(b"a\0b", HASH.encode())
    assert verify(b"x" * 1000, bcrypt.hashpw(b"x" * 72, bcrypt.gensalt(4)))
    assert not verify(b"x" * 1000, bcrypt.hashpw(b"x" * 71, bcrypt.gensalt(4)))


async def test_waiting_passwords_are_bounded(executor: ThreadPoolExecutor) -> None:
    """More are rejected at once; cached ones are still answered."""
    counted = Counted()
    passwords = PasswordVerifier({b"alice": HASH.encode()}, executor, 4, counted)
    assert await passwords.is_valid(b"alice", b"sesame")
    counted.gate.clear()
    requests = [
        asyncio.create_task(passwords.is_valid(b"alice", str(number).encode()))
        for number in range(9)
    ]
    await asyncio.sleep(0)
    assert await passwords.is_valid(b"alice", b"sesame")
    counted.gate.set()
    answers = await asyncio.gather(*requests, return_exceptions=True)

    assert answers[:4] == [False] * 4
    assert all(isinstance(answer, Busy) for answer in answers[4:])
    assert not await passwords.is_valid(b"alice", b"none waits any more")


async def test_a_result_is_cached(executor: ThreadPoolExecutor) -> None:
    """Bcrypt runs once per password, right or wrong, for any number of concurrent requests."""
    counted = Counted()
    passwords = PasswordVerifier({b"alice": HASH.encode()}, executor, 4, counted)
    counted.gate.clear()
    requests = [asyncio.create_task(passwords.is_valid(b"alice", b"sesame")) for _ in range(50)]
    await asyncio.sleep(0)
    counted.gate.set()

    assert all(await asyncio.gather(*requests))
    assert await passwords.is_valid(b"alice", b"sesame")
    assert len(counted.hashes) == 1
    for _ in range(3):
        assert not await passwords.is_valid(b"alice", b"wrong")
    assert len(counted.hashes) == 2


async def test_wrong_passwords_do_not_evict_right_ones(executor: ThreadPoolExecutor) -> None:
    """Right passwords stay cached after any number of wrong ones, of which only the last are cached."""
    counted = Counted()
    passwords = PasswordVerifier({b"alice": HASH.encode()}, executor, 4, counted)
    assert await passwords.is_valid(b"alice", b"sesame")
    for number in range(MAX_REMEMBERED + 1):
        assert not await passwords.is_valid(b"alice", str(number).encode())
    ran = len(counted.hashes)

    assert await passwords.is_valid(b"alice", b"sesame")
    assert len(counted.hashes) == ran
    assert not await passwords.is_valid(b"alice", b"0")
    assert len(counted.hashes) == ran + 1
    assert len(passwords._rejected) == MAX_REMEMBERED


async def test_an_unknown_user_costs_as_much_as_a_known_one(executor: ThreadPoolExecutor) -> None:
    """An unknown user runs bcrypt with a hash of equal cost, the same per name, and is denied."""
    counted = Counted()
    hashes = [HASH.replace("$2b$", kind).encode() for kind in ("$2a$", "$2b$", "$2y$")]
    known = dict(zip([b"a", b"b", b"c"], hashes, strict=True))
    passwords = PasswordVerifier(known, executor, 4, counted)
    for password in (b"sesame", b"x", b"y"):
        assert not await passwords.is_valid(b"nobody", password)

    assert len(counted.hashes) == 3
    assert len(set(counted.hashes)) == 1
    assert counted.hashes[0] in hashes


async def test_a_flood_of_wrong_passwords(tmp_path: Path) -> None:
    """Each gets 401 or 503, no queue remains, and users with cached passwords are served."""
    costly = USERS.replace("$04$", "$10$")
    async with front(tmp_path, costly + f"  carol: {HASH}\n") as site:
        assert await site.status(headers=user("carol", "sesame")) == 200
        flood = [site.status(headers=user("alice", f"{number}")) for number in range(60)]
        found = await asyncio.gather(
            *flood, *(site.status(headers=user("carol", "sesame")) for _ in range(10))
        )

        assert found[60:] == [200] * 10
        assert set(found[:60]) == {401, 503}
        assert site.denied("overload") == found.count(503)
        assert site.denied("password") == found.count(401)
