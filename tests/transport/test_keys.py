"""Files of keys, the directory of authorized keys, and the names that a key owns."""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path

import pytest
import zmq

from command_line import one_line, sidestep
from intakes import Fed
from key_ring import Ring
from sidestep.errors import ConfigError, WireError
from sidestep.ingest.intake import Replies
from sidestep.protocol.messages import EngineInfo, FromSender, Heartbeat, Hello, Nack, encode
from sidestep.transport import keys
from sidestep.transport.access import INTERVAL, AuthorizedKeys
from sidestep.transport.guard import LOCAL, MAX_NAMES, NameOwners, PeerGuard
from sidestep.transport.keys import CLIENT_KEY, SERVER_KEY, keys_for


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    """Keys of an exporter, in a directory of the test."""
    return Ring(tmp_path)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_a_secret_key_file_is_readable_by_its_owner_only(umask: int, tmp_path: Path) -> None:
    """The file modes do not depend on the umask."""
    before = os.umask(umask)
    try:
        secret, public = keys.generate(tmp_path, "x")
    finally:
        os.umask(before)

    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644


def test_a_full_disk_leaves_no_file_that_looks_like_a_key(tmp_path: Path) -> None:
    """The next attempt would not overwrite it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*x\.key: File too large"):
            keys.generate(tmp_path, "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert not [*tmp_path.iterdir()]


def test_keygen_never_overwrites_a_key(tmp_path: Path) -> None:
    """A second pair of the same name would lock out the owner of the first."""
    done = sidestep("keygen", "engine-0", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    secret, public = tmp_path / "engine-0.key", tmp_path / "engine-0.pub"
    assert keys.public_of(keys.read_secret(secret)).decode() == keys.read_public(public).text

    kept = secret.read_text()
    one_line(sidestep("keygen", "engine-0", "--out", tmp_path), 2, "keys are never overwritten")
    assert secret.read_text() == kept
    secret.unlink()
    one_line(sidestep("keygen", "engine-0", "--out", tmp_path), 2, "keys are never overwritten")
    assert not secret.exists()


@pytest.mark.parametrize(
    "text", ["", "x" * 39, "x" * 41, "%" * 40, "x" * 39 + "é", "x" * 39 + "~", "x" * 39 + "\n"]
)
def test_invalid_keys_are_recognized(text: str) -> None:
    """Length, alphabet and the range of five characters are checked."""
    assert not keys.is_key(text)


BAD_SECRETS = {
    "missing": (None, "x.key", "No such file"),
    "empty": (b"", "x.key", "not a key of 40"),
    "noise": (b"\xff\x00" * 40, "x.key", "not a key of 40"),
    "short": (b"abc\n", "x.key", "not a key of 40"),
    "public": (b"x" * 40, "x.pub", "holds a public key"),
    "open to all": (b"x" * 40, "open.key", "chmod 600"),
    "NUL": (None, "x\0.key", "null byte"),
}


@pytest.mark.parametrize(("content", "name", "what"), BAD_SECRETS.values(), ids=BAD_SECRETS.keys())
def test_an_invalid_secret_key_is_a_configuration_error(
    content: bytes | None, name: str, what: str, tmp_path: Path
) -> None:
    """The message names the problem."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o644 if name == "open.key" else 0o600)
    with pytest.raises(ConfigError, match=what):
        keys.read_secret(path)


def test_a_secret_key_in_place_of_a_public_one_is_refused(ring: Ring) -> None:
    """A secret key in place of a public one is refused, because the configuration would expose it."""
    with pytest.raises(ConfigError, match="holds a secret key"):
        keys.read_public(ring.secret)


def test_the_directory_of_keys_is_reloaded_at_most_once_a_second(ring: Ring) -> None:
    """Added, changed and removed files take effect; invalid files authorize no key."""
    ring.engine("a", "prod/*", "", "# for now", "test/?")
    authorized = AuthorizedKeys(ring.authorized)
    a = ring.text("a")
    assert list(authorized.engines(a)) == ["prod/*", "test/?"]

    ring.engine("b")
    (ring.authorized / "noise.pub").write_text("noise")
    (ring.authorized / "readme").write_text("none of ours")
    assert authorized.refresh(100.0) == frozenset()
    assert len(authorized) == 2
    ring.remove("a")
    assert authorized.refresh(100.0 + INTERVAL / 2) == frozenset()
    assert a in authorized
    assert authorized.refresh(100.0 + INTERVAL) == {a}
    assert a not in authorized
    assert authorized.engines(a) == ()

    (ring.authorized / "b.pub").write_text(a)
    assert authorized.refresh(200.0) == {ring.text("b")}
    assert a in authorized


@pytest.mark.parametrize(
    ("code", "left"), [(errno.ENOENT, 0), (errno.EACCES, 0), (errno.EMFILE, 1), (errno.EIO, 1)]
)
def test_an_unreadable_directory_revokes_keys_only_if_it_was_taken_away(
    code: int, left: int, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that an untrusted peer can cause change nothing."""
    ring.engine("a")
    authorized = AuthorizedKeys(ring.authorized)

    def failing(_: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "iterdir", failing)
    removed = authorized.refresh(100.0)

    assert (len(authorized), len(removed)) == (left, 1 - left)


def test_a_missing_directory_of_keys_is_a_configuration_error(tmp_path: Path) -> None:
    """The exporter does not start without it."""
    with pytest.raises(ConfigError, match="cannot read the directory"):
        AuthorizedKeys(tmp_path / "none")


def test_the_names_of_a_key_are_limited() -> None:
    """Further names of a key are refused; local peers may use more, but own no more."""
    for key in ("a", LOCAL):
        owners = NameOwners()
        for number in range(MAX_NAMES // 2):
            owners.claim(key, f"s{number}", [f"e{number}"])
        owners.claim(key, "s0", ["e1"])
        if key:
            with pytest.raises(WireError, match="too many"):
                owners.claim(key, "more", [])
        else:
            owners.claim(key, "more", [])
        assert len(owners._streams) + len(owners._engines) == MAX_NAMES


def test_a_key_owns_the_ids_of_its_replicas(ring: Ring) -> None:
    """A second server gets ids of its own: a new stream, and another key must not use them."""
    ring.engine("a")
    ring.engine("b")
    intake = Fed().intake
    full: list[bool] = []
    allowed = AuthorizedKeys(ring.authorized)
    intake.guard = PeerGuard(intake.metrics, lambda: 0.0, allowed, lambda: bool(full))

    def send(number: int, message: FromSender, now: float, key: str = "a") -> Replies:
        return intake.accept(b"%d" % number, [encode(message)], now, ring.text(key))

    def hello(number: int, stream: str, engine: str = "h/m/0") -> Hello:
        labels = {"engine": "0", "model_name": "m"}
        return Hello(1, stream, number, 1, 1, [EngineInfo(engine, "vllm", labels)], str(number))

    send(1, hello(1, "h/m/0"), 0.0)
    send(2, hello(2, "h/m/0"), 1.0)
    send(1, Heartbeat(1, 0, 0), 2.5)
    full.append(True)
    ((_, answer),) = send(2, hello(2, "h/m/0"), 3.0)
    assert isinstance(answer, Nack)
    assert answer.code == "over_limit"
    full.clear()
    send(2, hello(2, "h/m/0"), 3.0)
    assert list(intake.receiver.streams) == ["h/m/0", "h~2/m/0"]
    ((_, answer),) = send(3, hello(3, "x", "h~2/m/0"), 3.0, "b")
    assert isinstance(answer, Nack)
    assert answer.code == "unauthorised"


def test_a_libzmq_without_curve_is_a_configuration_error(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no fallback to a plain connection."""
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ConfigError, match="no CURVE"):
        keys_for("tcp://x:1", {SERVER_KEY: str(ring.public), CLIENT_KEY: str(ring.secret)})
