"""Keys: as files, at the socket, while it runs, and what each may name."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import threading
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from command_line import one_line, sidestep
from exporters import MAIN_RUN, Start, until
from key_ring import Ring
from peers import count, generated, publisher
from sidestep.app import Exporter
from sidestep.errors import ConfigError, WireError
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import EngineInfo, FromExporter, Hello, Nack
from sidestep.transport import keys
from sidestep.transport.access import Access
from sidestep.transport.authorized import INTERVAL, AuthorizedKeys
from sidestep.transport.bindings import LOCAL, MAX_NAMES, Bindings
from sidestep.transport.client_keys import CLIENT_KEY, SERVER_KEY, keys_for
from sidestep.transport.endpoint import require_keys, router
from sidestep.transport.zap import Authenticator
from sidestep_adapters.publisher import publisher as push
from sidestep_adapters.recording.recorder import Tee
from socket_peers import Peer, batch, connect, step, tokens

DENIED = "sidestep_auth_denied_total"


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    """A new one."""
    return Ring(tmp_path)


def hello(stream: str, *engines: str, incarnation: int = 1) -> Hello:
    """A stream that feeds ``engines``."""
    infos = [EngineInfo(e, "vllm", {"engine": e, "model_name": "m"}) for e in engines]
    return Hello(VERSION, stream, incarnation, 1, 1, infos)


async def refused(peer: Peer, message: Hello) -> str:
    """Why the exporter refuses ``message``."""
    await peer.say(message)
    answer: FromExporter = await peer.hear()
    assert isinstance(answer, Nack), answer
    return f"{answer.code}: {answer.detail}"


# Files


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_a_secret_is_its_owners_alone(umask: int, tmp_path: Path) -> None:
    """Whatever the umask leaves of, or adds to, the modes of files."""
    before = os.umask(umask)
    try:
        secret, public = keys.generate(tmp_path, "x")
    finally:
        os.umask(before)

    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644


def test_keygen_writes_a_pair_and_never_again(tmp_path: Path) -> None:
    """A second one of the name would lock out whoever uses the first."""
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


@given(st.binary(min_size=32, max_size=32))
def test_every_key_reads_as_one(raw: bytes) -> None:
    """Also one that begins with what elsewhere is a comment."""
    assert keys.is_key(z85.encode(raw).decode())


@pytest.mark.parametrize(
    "text", ["", "x" * 39, "x" * 41, "%" * 40, "x" * 39 + "é", "x" * 39 + "~", "x" * 39 + "\n"]
)
def test_what_is_no_key(text: str) -> None:
    """Too short, too long, out of the alphabet, or more than 32 bits in five characters."""
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
def test_a_bad_secret_key_is_one_line(
    content: bytes | None, name: str, what: str, tmp_path: Path
) -> None:
    """That says which file, and what is wrong with it."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o644 if name == "open.key" else 0o600)
    with pytest.raises(ConfigError, match=what):
        keys.read_secret(path)


def test_a_pipe_is_no_key(tmp_path: Path) -> None:
    """Nothing is read from it, which could take for ever."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a key of 40"):
        keys.read_secret(tmp_path / "pipe")


def test_a_slip_between_public_and_secret_is_seen(ring: Ring) -> None:
    """A secret key in the place of a public one would be shown to everybody."""
    with pytest.raises(ConfigError, match="holds a secret key"):
        keys.read_public(ring.secret)


# The directory


def test_the_directory_is_read_again_at_most_once_a_second(ring: Ring) -> None:
    """Added, changed, removed; and what is no key lets nobody in."""
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
def test_a_directory_that_cannot_be_read(
    code: int, left: int, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken away it lets nobody in; trouble that strangers can cause changes nothing."""
    ring.engine("a")
    authorized = AuthorizedKeys(ring.authorized)

    def failing(_: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "iterdir", failing)
    removed = authorized.refresh(100.0)

    assert (len(authorized), len(removed)) == (left, 1 - left)


def test_no_directory_is_no_start(tmp_path: Path) -> None:
    """Nobody could be let in."""
    with pytest.raises(ConfigError, match="cannot read the directory"):
        AuthorizedKeys(tmp_path / "none")


# Whose is what


def test_a_name_belongs_to_the_first_key_that_says_it() -> None:
    """Streams and engines, until the key is gone; what is refused takes nothing."""
    bindings = Bindings()
    bindings.claim("a", "s", ["e1", "e2"])
    bindings.claim("a", "s", ["e1", "e2", "e3"])
    for stream, engines in (("s", ["f"]), ("t", ["f", "e3"])):
        with pytest.raises(WireError, match="belongs to another key"):
            bindings.claim("b", stream, engines)
    with pytest.raises(WireError, match="belongs to another key"):
        bindings.claim(LOCAL, "local", ["e1"])
    bindings.claim("b", "t", ["f"])

    bindings.release("a")
    bindings.claim("b", "s", ["e1", "e2", "e3"])
    with pytest.raises(WireError, match="belongs to another key"):
        bindings.claim("a", "s", [])


def test_what_those_here_feed_is_theirs_as_well() -> None:
    """A key from elsewhere does not add to it."""
    bindings = Bindings()
    bindings.claim(LOCAL, "s", ["e"])
    with pytest.raises(WireError, match="belongs to another key"):
        bindings.claim("a", "t", ["e"])


def test_patterns_say_which_engines_a_key_may_feed() -> None:
    """All that it names must match one; case counts."""
    bindings = Bindings()
    bindings.claim("a", "s", ["prod/x/0", "test/1"], ["prod/*", "test/?"])
    for engine in ("dev/x", "test/12", "Prod/x", "xprod/x"):
        with pytest.raises(WireError, match=f"may not feed engine {engine}"):
            bindings.claim("a", "s", ["prod/x/0", engine], ["prod/*", "test/?"])


def test_what_a_key_can_make_us_remember_is_bounded() -> None:
    """Names beyond that are refused; those at home are heard, but own no more."""
    for key in ("a", LOCAL):
        bindings = Bindings()
        for number in range(MAX_NAMES // 2):
            bindings.claim(key, f"s{number}", [f"e{number}"])
        bindings.claim(key, "s0", ["e1"])
        if key:
            with pytest.raises(WireError, match="too many"):
                bindings.claim(key, "more", [])
        else:
            bindings.claim(key, "more", [])
        assert len(bindings._streams) + len(bindings._engines) == MAX_NAMES


# At the socket


async def test_a_good_key_is_let_in(ring: Ring, start: Start) -> None:
    """Its counts arrive; a path without keys works beside it."""
    good = ring.engine("good")
    async with start(**ring.flags) as exporter:
        async with ring.connect(exporter, good) as peer:
            await peer.greet()
            await peer.say(batch(1, step()))
            await until(lambda: tokens(exporter) == 1)
        async with connect(exporter.endpoints[1]) as local:
            await local.greet("local", incarnation=2)

        assert exporter.metrics.value(DENIED, "curve") == 0


async def test_a_strangers_key_is_turned_away(
    ring: Ring, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted, and said with the key, so that it can be added."""
    stranger = ring.engine("stranger", admitted=False)
    async with start(**ring.flags) as exporter, ring.connect(exporter, stranger) as peer:
        await peer.say(hello("s", "e"))
        await until(lambda: exporter.metrics.value(DENIED, "curve") >= 1)

        assert ring.text("stranger") in caplog.text
        assert not exporter.intake.receiver.streams


async def test_a_peer_without_a_key_is_not_heard(ring: Ring, start: Start) -> None:
    """Others are, meanwhile and afterwards."""
    good = ring.engine("good")
    async with start(**ring.flags) as exporter:
        async with ring.connect(exporter, None) as plain, ring.connect(exporter, good) as peer:
            # One that was refused by now has no connection to say it to.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(plain.say(hello("plain", "e")), 1)
            for number in range(20):
                await peer.greet(f"s{number}", incarnation=number + 1)

        assert "plain" not in exporter.intake.receiver.streams
        assert exporter.metrics.value("sidestep_messages_total", "hello") == 20


async def test_nobody_is_let_in_while_the_directory_is_empty(
    ring: Ring, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said at the start; a file that appears lets its key in without one."""
    late = ring.engine("late", admitted=False)
    async with start(**ring.flags) as exporter, ring.connect(exporter, late) as peer:
        assert "no engine can connect" in caplog.text
        await peer.say(hello("s", "s0"))
        await until(lambda: exporter.metrics.value(DENIED, "curve") >= 1)
        (ring.authorized / "late.pub").write_text((ring.directory / "late.pub").read_text())
        await until(lambda: "s" in exporter.intake.receiver.streams)


async def test_a_removed_key_is_cut_off_while_it_is_connected(ring: Ring, start: Start) -> None:
    """Its frames are refused at once, its next connection is turned away; others go on."""
    bad, good = ring.engine("bad"), ring.engine("good")
    async with start(**ring.flags) as exporter, ring.connect(exporter, bad) as peer:
        await peer.greet()
        await peer.say(batch(1, step()))
        await until(lambda: tokens(exporter) == 1)
        ring.remove("bad")
        await until(lambda: len(exporter.intake.guard._keys or ()) == 1)
        await peer.say(batch(2, step()))
        async with ring.connect(exporter, bad) as again:
            await again.say(batch(2, step()))
            await until(lambda: exporter.metrics.value(DENIED, "curve") >= 1)
        async with ring.connect(exporter, good) as other:
            await other.greet("s", incarnation=2)
            await other.say(batch(1, step(), incarnation=2))
            await until(lambda: tokens(exporter) == 2)

        assert exporter.metrics.value("sidestep_rejected_total", "unauthorised") == 1


async def test_a_removed_keys_sender_hears_why(ring: Ring, start: Start) -> None:
    """Whether what it says can be read or not."""
    secret = ring.engine("a")
    async with start(**ring.flags) as exporter, ring.connect(exporter, secret) as peer:
        await peer.greet()
        ring.remove("a")
        await until(lambda: not len(exporter.intake.guard._keys or ()))
        codes = []
        for frame in (hello("s", "s0"), b"\xc1"):
            await peer.say(frame)
            answer = await peer.hear()
            assert isinstance(answer, Nack)
            codes.append(answer.code)

        assert codes == ["unauthorised"] * 2


async def test_a_key_does_not_speak_for_another(ring: Ring, start: Start) -> None:
    """Neither as its stream nor about its engines, nor does one without; removal frees them."""
    a, b = ring.engine("a"), ring.engine("b")
    async with (
        start(**ring.flags) as exporter,
        ring.connect(exporter, a) as first,
        ring.connect(exporter, b) as second,
        connect(exporter.endpoints[1]) as local,
    ):
        await first.greet("s")
        assert (await refused(second, hello("s", "f", incarnation=2))).startswith("unauthorised: ")
        assert (await refused(second, hello("t", "s0", incarnation=2))).startswith("unauthorised: ")
        assert (await refused(local, hello("u", "s0", incarnation=3))).startswith("unauthorised: ")
        await first.say(batch(1, step()))
        await until(lambda: tokens(exporter) == 1)

        assert exporter.metrics.value("sidestep_rejected_total", "unauthorised") == 3
        assert list(exporter.intake.receiver.streams) == ["s"]
        ring.remove("a")
        await until(lambda: len(exporter.intake.guard._keys or ()) == 1)
        await second.greet("s", incarnation=2)


async def test_a_key_with_patterns_feeds_what_they_name(ring: Ring, start: Start) -> None:
    """And is told what it may not."""
    a = ring.engine("a", "prod/*")
    async with start(**ring.flags) as exporter, ring.connect(exporter, a) as peer:
        answer = await refused(peer, hello("s", "prod/x", "test/x"))
        assert answer.startswith("unauthorised: ")
        assert "this key may not feed engine test/x" in answer
        await peer.greet("prod/s")


async def test_throttling_is_by_key(ring: Ring, start: Start) -> None:
    """A new connection is no new start."""
    a = ring.engine("a")
    async with start(**ring.flags) as exporter:
        for round_number in range(1, 4):
            async with ring.connect(exporter, a) as peer:
                for _ in range(60):
                    await peer.say(b"\xc1")
                await until(lambda: refusals(exporter) == 60 * round_number)  # noqa: B023

        assert exporter.metrics.value("sidestep_rejected_total", "throttled") == 180 - 101


def refusals(exporter: Exporter) -> float:
    """Messages refused, read or not."""
    reasons = ("bad_schema", "throttled")
    return sum(exporter.metrics.value("sidestep_rejected_total", reason) for reason in reasons)


def test_a_check_that_fails_lets_nobody_in_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The callback of the library's own handler raises once and every later peer is refused."""
    context = zmq.Context()
    public, secret = zmq.curve_keypair()
    failing = True

    def allows(key: str) -> bool:
        if failing:
            raise ZeroDivisionError
        return key == public.decode()

    denied: list[int] = []
    authenticator = Authenticator(context, allows, lambda: denied.append(1))
    server = context.socket(zmq.ROUTER)
    server.linger = 0
    server_public, server.curve_secretkey = zmq.curve_keypair()
    server.curve_server = True
    server.setsockopt_string(zmq.ZAP_DOMAIN, "sidestep")
    server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    port = server.bind_to_random_port("tcp://127.0.0.1")

    def gets_through() -> bool:
        with zmq.Context() as own, own.socket(zmq.DEALER) as client:
            client.linger = 0
            client.curve_publickey, client.curve_secretkey = public, secret
            client.curve_serverkey = server_public
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"x")
            for _ in range(500):
                # Attempts of the one before may still be among the questions.
                authenticator.serve()
                if server.poll(10):
                    return True
                if failing and not authenticator.up:
                    break
            return bool(server.poll(300))

    assert not gets_through()
    assert not authenticator.up
    assert "ZeroDivisionError" in caplog.text
    failing = False
    assert gets_through()
    assert authenticator.up
    assert not denied
    for socket in (server, authenticator.socket):
        socket.close(linger=0)
    context.term()


def test_without_a_handler_nobody_gets_in() -> None:
    """Libzmq's own default lets in every key then."""
    context = zmq.Context()
    server, client = router(context), context.socket(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    require_keys(server, secret)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.linger = 0
    client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
    client.curve_serverkey = public
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(b"x")

    assert not server.poll(500)
    for socket in (server, client):
        socket.close(linger=0)
    context.term()


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b"1.0"],
        [b"no end"],
        [b"", b"1.0", b"1", b"other", b"127.0.0.1", b"", b"CURVE", b"k" * 32],
        [b"", b"1.0", b"1", b"sidestep", b"127.0.0.1", b"", b"NULL"],
        [b"", b"1.0", b"1", b"sidestep", b"127.0.0.1", b"", b"PLAIN", b"k" * 32],
        [b"", b"1.0", b"1", b"sidestep", b"127.0.0.1", b"", b"CURVE", b"k" * 31],
        [b"", b"1.0", b"1", b"sidestep", b"127.0.0.1", b"", b"CURVE", b"k" * 28],
    ],
)
def test_odd_questions_are_never_answered_with_yes(frames: list[bytes]) -> None:
    """Another domain, another mechanism, half a question."""
    context = zmq.Context()
    authenticator = Authenticator(context, lambda _: True, lambda: None)
    asking = context.socket(zmq.DEALER)
    asking.linger = 0
    asking.connect("inproc://zeromq.zap.01")
    asking.send_multipart(frames)
    authenticator.socket.poll(5000)
    authenticator.serve()
    answer = asking.recv_multipart(zmq.NOBLOCK) if asking.poll(100) else []

    assert b"200" not in answer
    for socket in (asking, authenticator.socket):
        socket.close(linger=0)
    context.term()


async def test_the_handlers_state_is_on_the_page(ring: Ring, start: Start) -> None:
    """With the number of keys; without keys neither is."""
    ring.engine("a")

    def shown(exporter: Exporter) -> dict[str, float]:
        return {
            metric.name: metric.samples[0].value
            for metric in exporter.metrics.collect()
            if metric.name in ("sidestep_zap_up", "sidestep_authorized_keys")
        }

    async with start(**ring.flags) as exporter:
        assert shown(exporter) == {"sidestep_zap_up": 1, "sidestep_authorized_keys": 1}
    async with start() as exporter:
        assert shown(exporter) == {}


async def test_a_path_that_is_lost_leaves_the_port_as_it_was(ring: Ring, start: Start) -> None:
    """Bound anew, the port still wants keys, and the path still wants none."""
    good = ring.engine("good")
    async with start(**ring.flags) as exporter:
        (ring.directory / "own" / "i.ipc").unlink()
        await until(lambda: exporter.metrics.value("sidestep_rebinds_total", "stolen") == 1)
        async with ring.connect(exporter, good) as peer:
            await peer.greet()
        async with ring.connect(exporter, ring.engine("bad", admitted=False)) as peer:
            await peer.say(hello("bad", "e"))
            await until(lambda: exporter.metrics.value(DENIED, "curve") >= 1)
        async with connect(exporter.endpoints[1]) as local:
            await local.greet("local", incarnation=2)


# The engine's end


async def test_an_engine_that_asked_for_a_key_too_late_is_heard_in_the_end(
    ring: Ring, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first connection is refused for want of a key; a later one has it."""
    secret = ring.engine("a")
    async with start(**ring.flags) as exporter:
        one = publisher(exporter.endpoints[0])
        one.push(count())
        await until(lambda: "CURVE" in one.problem)
        ring.environ(monkeypatch, secret)
        await until(lambda: generated(exporter) == 1)
        await asyncio.to_thread(one.close)


async def test_an_engine_with_a_key_delivers(
    ring: Ring, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over tcp with it, over a path without; its variable takes the key itself, too."""
    ring.environ(monkeypatch, ring.engine("a"))
    async with start(**ring.flags) as exporter:
        for number, endpoint in enumerate(exporter.endpoints):
            one = publisher(endpoint, f"s{number}", f"e{number}")
            one.push(count())
            await until(lambda: generated(exporter, f"e{number}") == 1)  # noqa: B023
            await asyncio.to_thread(one.close)
        monkeypatch.setenv(SERVER_KEY, keys.read_public(ring.public).text)
        one = publisher(exporter.endpoints[0], "s0", "e0")
        one.push(count())
        await until(lambda: generated(exporter, "e0") == 2)
        await asyncio.to_thread(one.close)


BAD_ENVIRONS: dict[str, tuple[dict[str, str], str]] = {
    "no client key": ({SERVER_KEY: "exporter.pub"}, f"{CLIENT_KEY} is not set"),
    "no server key": ({CLIENT_KEY: "a.key"}, f"{SERVER_KEY} is not set"),
    "missing file": ({SERVER_KEY: "exporter.pub", CLIENT_KEY: "none.key"}, "No such file"),
    "public for secret": ({SERVER_KEY: "exporter.pub", CLIENT_KEY: "a.pub"}, "a public key"),
    "secret for public": ({SERVER_KEY: "exporter.key", CLIENT_KEY: "a.key"}, "a secret key"),
    "noise": ({SERVER_KEY: "exporter.pub", CLIENT_KEY: "noise"}, "not a key of 40"),
    "a directory": ({SERVER_KEY: "exporter.pub", CLIENT_KEY: "authorized"}, "cannot read key file"),
}


@pytest.mark.parametrize("bad", BAD_ENVIRONS.values(), ids=BAD_ENVIRONS.keys())
async def test_a_bad_key_never_reaches_the_engine(
    bad: tuple[dict[str, str], str],
    ring: Ring,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line, no traceback; nothing is sent, to a plain exporter neither; mended it works."""
    environ, what = bad
    good = ring.engine("a")
    (ring.directory / "noise").write_text("noise")
    (ring.directory / "noise").chmod(0o600)
    for name, file in environ.items():
        monkeypatch.setenv(name, str(ring.directory / file))
    async with start(ingest_endpoint=("tcp://127.0.0.1:*",)) as plain:
        one = publisher(plain.endpoints[0])
        one.push(count())
        await until(lambda: what in caplog.text)
        assert not plain.intake.receiver.streams
        await asyncio.to_thread(one.close)
        assert not plain.intake.receiver.streams
    (record,) = (record for record in caplog.records if record.name == push.__name__)
    assert not record.exc_info
    assert one.errors == 0

    async with start(**ring.flags) as exporter:
        caplog.clear()
        two = publisher(exporter.endpoints[0])
        two.push(count())
        await until(lambda: what in caplog.text)
        ring.environ(monkeypatch, good)
        await until(lambda: generated(exporter) == 1)
        await asyncio.to_thread(two.close)


def test_keys_are_asked_for_where_they_are_used() -> None:
    """Over a path none is, whatever the environment says; without any there is none."""
    environ = {SERVER_KEY: "/none", CLIENT_KEY: "/none"}

    assert keys_for("ipc:///x", environ) is None
    assert keys_for("tcp://x:1", {}) is None
    with pytest.raises(ConfigError):
        keys_for("tcp://x:1", environ)


def test_a_library_without_curve_is_one_line(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a plain connection instead."""
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ConfigError, match="no CURVE"):
        keys_for("tcp://x:1", {SERVER_KEY: str(ring.public), CLIENT_KEY: str(ring.secret)})


async def test_commands_use_the_same_keys(ring: Ring, start: Start) -> None:
    """A replay over tcp, through a recording in between; a bad key is one line."""
    environ = {SERVER_KEY: str(ring.public), CLIENT_KEY: str(ring.engine("a"))}
    async with start(**ring.flags) as exporter:
        replay = ("replay", MAIN_RUN, "--speed", "max", "--connect", exporter.endpoints[0])
        done = await asyncio.to_thread(sidestep, *replay, **environ)
        assert done.returncode == 0, done.stderr
        bad = {**environ, CLIENT_KEY: "/none"}
        one_line(await asyncio.to_thread(sidestep, *replay, **bad), 2, "SIDESTEP_CLIENT_KEY: ")
        record = ("record", ring.directory / "x", "--connect", exporter.endpoints[0])
        listen = ("--listen", f"ipc://{ring.directory}/tee.ipc")
        done = await asyncio.to_thread(sidestep, *record, *listen, **bad)
        one_line(done, 2, "SIDESTEP_CLIENT_KEY: ")
        assert not (ring.directory / "x").exists()


async def test_a_recording_listens_with_the_exporters_keys(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who would not be let in there is not recorded."""
    good, bad = ring.engine("good"), ring.engine("bad", admitted=False)
    access = Access.of(str(ring.secret), str(ring.authorized), "", plain_tcp=False)
    tee = Tee("tcp://127.0.0.1:*", "", ring.directory / "x", access)
    stop = threading.Event()
    thread = threading.Thread(target=tee.run, args=(stop,))
    thread.start()
    try:
        endpoint = tee._listener.endpoints[0]
        async with ring.connect(endpoint, bad) as stranger:
            await stranger.say(hello("bad", "e"))
            ring.environ(monkeypatch, good)
            engine = publisher(endpoint, "good")
            engine.push(count())
            await until(lambda: engine.connected and engine.drained)
            await asyncio.to_thread(engine.close)
    finally:
        stop.set()
        await asyncio.to_thread(thread.join)

    assert tee.items == 1
    assert list(tee._receiver.streams) == ["good"]
