"""`sidestep doctor --endpoint`: every reason for which an engine does not reach its exporter."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from command_line import serving, sidestep
from exporters import Start
from key_ring import Ring
from ports import free_port
from sidestep.diagnosis.finding import Finding
from sidestep.transport import keys
from sidestep_tools.doctor import endpoint


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    """Keys of an exporter and of engines."""
    (tmp_path / "keys").mkdir()
    return Ring(tmp_path / "keys")


async def found(
    address: str, environ: Mapping[str, object] = MappingProxyType({})
) -> list[Finding]:
    """Check an endpoint beside the servers of the test."""
    given = {name: str(value) for name, value in environ.items()}
    return await asyncio.to_thread(lambda: list(endpoint.check(address, given)))


def codes(findings: list[Finding]) -> list[str]:
    """Return the findings' codes."""
    return [each.code for each in findings]


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """Accept connections, and send ``reply`` on each; yield the endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                held.append(connection)
                connection.sendall(reply)

        threading.Thread(target=accept, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for each in held:
            each.close()


async def test_a_good_endpoint(start: Start, tmp_path: Path) -> None:
    """By path and by port, as a command."""
    path = f"ipc://{tmp_path}/own/ingest.ipc"
    async with start(ingest_endpoint=(path, "tcp://127.0.0.1:*")) as exporter:
        both = [f"--endpoint={each}" for each in exporter.endpoints]
        done = await asyncio.to_thread(sidestep, "doctor", *both)
    assert done.stdout.endswith("nothing is wrong\n")
    assert (done.returncode, done.stderr, len(both)) == (0, "", 2)


def test_the_report_names_code_and_remedy(tmp_path: Path) -> None:
    """As text and as JSON."""
    address = f"ipc://{tmp_path}/no/ingest.ipc"
    done = sidestep("doctor", "--endpoint", address)
    first, remedy, _ = done.stdout.splitlines()
    assert first == f"SD161 error: {address}: the directory {tmp_path}/no does not exist"
    assert "--ingest.endpoint" in remedy
    assert done.returncode == 2
    report = json.loads(sidestep("doctor", "--endpoint", address, "--json").stdout)
    assert report["checked"] == [address]


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("http://127.0.0.1:5557", "must begin with ipc:// or tcp://"),
        ("ipc://run/sidestep/ingest.ipc", "write ipc:///run/sidestep/ingest.ipc"),
        (f"ipc:///{'x' * 107}", "longer than 107 bytes"),
        ("tcp://127.0.0.1", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:none", "must be tcp://HOST:PORT"),
        ("tcp://exporter..svc:9858", "must be tcp://HOST:PORT"),
        ("tcp://*:5557", "an address to listen on"),
    ],
)
async def test_malformed(address: str, what: str) -> None:
    """The text says how to write it."""
    (finding,) = await found(address)
    assert finding.code == "SD160"
    assert what in finding.text


async def test_an_exporter_that_has_ended(tmp_path: Path) -> None:
    """A killed exporter leaves its socket behind."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "ingest.ipc"))
    assert codes(await found(f"ipc://{tmp_path}/ingest.ipc")) == ["SD163"]
    assert codes(await found(f"tcp://127.0.0.1:{free_port()}")) == ["SD163"]


@contextmanager
def stranger() -> Iterator[None]:
    """Let this process be another user, with its own groups."""
    os.seteuid(64001)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
async def test_permissions() -> None:
    """The text names what is closed, and to whom; a group may open it."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        directory.chmod(0o755)  # noqa: ASYNC240 - of the test alone
        address = f"ipc://{directory}/own/ingest.ipc"
        # In a process of its own: one that becomes another user takes its own path for lost.
        flags = f"--ingest.endpoint={address}", "--web.listen-address=127.0.0.1:0"
        async with serving("serve", *flags):
            with stranger():
                (finding,) = await found(address)
            assert finding.code == "SD162"
            assert f"{directory}/own is drwx------" in finding.text
            assert "this process runs as user 64001" in finding.text
            (directory / "own").chmod(0o755)
            with stranger():
                (finding,) = await found(address)
            assert f"{directory}/own/ingest.ipc is srw-------" in finding.text
            (directory / "own" / "ingest.ipc").chmod(0o660)
            with stranger():
                assert not await found(address)


async def test_an_unknown_host() -> None:
    """Beyond this host records should be encrypted, too."""
    assert codes(await found("tcp://sidestep.invalid:5557")) == ["SD168", "SD164"]


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_another_program(reply: bytes) -> None:
    """The answer is not an exporter's, or there is none."""
    with answering(reply) as address:
        assert codes(await found(address)) == ["SD165"]


async def test_the_web_port(start: Start) -> None:
    """The two ports are easily mixed up."""
    async with start() as exporter:
        (finding,) = await found(exporter.url.replace("http", "tcp").removesuffix("/metrics"))
    assert finding.code == "SD165"
    assert "--web.listen-address" in finding.remedy


async def test_keys(start: Start, ring: Ring) -> None:
    """Good ones; none; those of another exporter; those of an engine that is not authorized."""
    good, stranger = ring.engine("good"), ring.engine("stranger", admitted=False)
    _, other = keys.generate(ring.directory, "other")
    async with start(**ring.flags) as exporter:
        address = exporter.endpoints[0]

        async def with_keys(server: Path, client: Path) -> list[str]:
            own = {"SIDESTEP_SERVER_KEY": server, "SIDESTEP_CLIENT_KEY": client}
            return codes(await found(address, environ=own))

        assert await with_keys(ring.public, good) == []
        assert codes(await found(address)) == ["SD166"]
        assert await with_keys(other, good) == ["SD166"]
        assert await with_keys(ring.public, stranger) == ["SD166"]


async def test_keys_for_an_exporter_without(start: Start, ring: Ring) -> None:
    """Nothing falls back to a plain connection."""
    async with start(ingest_endpoint=("tcp://127.0.0.1:*",)) as exporter:
        own = {"SIDESTEP_SERVER_KEY": ring.public, "SIDESTEP_CLIENT_KEY": ring.engine("good")}
        assert codes(await found(exporter.endpoints[0], environ=own)) == ["SD166"]


async def test_key_files(ring: Ring) -> None:
    """Each variable alone, a missing file, one without a key, one that all may read."""
    address, good = f"tcp://127.0.0.1:{free_port()}", ring.engine("good")
    readable, empty = ring.engine("readable"), ring.directory / "empty.key"
    readable.chmod(0o644)
    empty.write_text("no key\n")
    empty.chmod(0o600)
    faults: list[tuple[dict[str, object], str]] = [
        ({"SIDESTEP_SERVER_KEY": ring.public}, "SIDESTEP_CLIENT_KEY is not set"),
        ({"SIDESTEP_CLIENT_KEY": good}, "SIDESTEP_SERVER_KEY is not set"),
        ({"SIDESTEP_SERVER_KEY": ring.public, "SIDESTEP_CLIENT_KEY": "/no.key"}, "No such file"),
        ({"SIDESTEP_SERVER_KEY": ring.public, "SIDESTEP_CLIENT_KEY": empty}, "is not a key"),
        ({"SIDESTEP_SERVER_KEY": ring.public, "SIDESTEP_CLIENT_KEY": readable}, "other users"),
        ({"SIDESTEP_SERVER_KEY": "no key", "SIDESTEP_CLIENT_KEY": good}, "neither a key nor"),
    ]
    for environ, what in faults:
        (finding,) = await found(address, environ=environ)
        assert finding.code == "SD167"
        assert what in finding.text
