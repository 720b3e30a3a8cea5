"""Ingest endpoints: permissions of ipc paths, loopback, and binding again after a path was lost."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from exporters import Start, until
from peers import count, generated, publisher
from sidestep.app.exporter import Exporter
from sidestep.errors import ConfigError
from sidestep.transport.access import Access, is_loopback
from sidestep.transport.endpoint import Claim, claim, router
from sidestep.transport.listener import IngestListener
from socket_peers import connect

ROOT = os.getuid() == 0


@contextmanager
def bound(path: Path, group: int | None = None) -> Iterator[Claim]:
    """Bind a ROUTER to an ipc path."""
    context = zmq.Context()
    listening = router(context)
    try:
        claimed = claim(listening, f"ipc://{path}", group)
        yield claimed
    finally:
        listening.close(linger=0)
        context.term()
    claimed.release()


def mode(path: Path) -> int:
    """Return the permission bits of ``path``."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_only_the_owner_may_use_a_new_path(umask: int, tmp_path: Path) -> None:
    """The modes of directory and socket do not depend on the umask, which stays as it was."""
    before = os.umask(umask)
    try:
        with bound(tmp_path / "sub" / "i.ipc") as claimed:
            assert mode(claimed.path.parent) == 0o700
            assert mode(claimed.path) == 0o600
            assert os.umask(umask) == umask
    finally:
        os.umask(before)


@pytest.mark.skipif(not ROOT, reason="only root may give files to any group")
def test_a_named_group_may_use_the_path(tmp_path: Path) -> None:
    """The directory passes its group on; the socket belongs to the group and to no other user."""
    with bound(tmp_path / "sub" / "i.ipc", group=4711) as claimed:
        assert mode(claimed.path.parent) == 0o2770
        assert mode(claimed.path) == 0o660
        assert (claimed.path.parent.stat().st_gid, claimed.path.stat().st_gid) == (4711, 4711)
    with bound(tmp_path / "sub" / "i.ipc", group=4711):
        """A directory that is there and fits is taken as it is."""


@pytest.mark.parametrize(
    ("bits", "owner", "what"),
    [
        (0o777, 0, "world-writable"),
        (0o707, 0, "world-writable"),
        (0o1777, 1234, "belongs to another user"),
        (0o700, 1234, "belongs to another user"),
        (0o755, 0, ""),
        (0o1777, 0, ""),
    ],
)
@pytest.mark.skipif(not ROOT, reason="only root may give directories away")
def test_an_existing_directory_is_checked(bits: int, owner: int, what: str, tmp_path: Path) -> None:
    """An existing directory is not changed, but refused where another user could replace the socket."""
    directory = tmp_path / "there"
    directory.mkdir()
    os.chown(directory, owner, -1)
    directory.chmod(bits)
    if what:
        with pytest.raises(ConfigError, match=f"{directory}: .*{what}"), bound(directory / "i"):
            pass
    else:
        with bound(directory / "i"):
            pass
    assert mode(directory) == bits


@pytest.mark.skipif(not ROOT, reason="only root may give files to any group")
def test_a_directory_closed_to_the_group_is_refused(tmp_path: Path) -> None:
    """The message names the remedy: engines would fail without one."""
    directory = tmp_path / "there"
    directory.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="chgrp it and chmod 2770"), bound(directory / "i", 4711):
        pass


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """Else who may write to the directory could have any file created or locked."""
    (tmp_path / "i.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot bind"), bound(tmp_path / "i"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_is_not_a_socket_is_not_replaced(tmp_path: Path) -> None:
    """A mistake in the endpoint must not delete it."""
    (tmp_path / "i.ipc").write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"), bound(tmp_path / "i.ipc"):
        pass
    assert (tmp_path / "i.ipc").read_text() == "precious"


LOOPBACK = {
    "tcp://127.8.9.10:*": True,
    "tcp://localhost:5": True,
    "tcp://[::1]:5": True,
    "tcp://*:5": False,
    "tcp://[::]:5": False,
    "tcp://:5": False,
    "tcp://lo:5": False,
    "tcp://10.1.2.3:5": False,
    "tcp://127.0.0.1.evil.example:5": False,
    "tcp://0.0.0.0;127.0.0.1:5": False,
    "tcp://127.0.0.1": False,
}


@pytest.mark.parametrize(("endpoint", "local"), LOOPBACK.items(), ids=LOOPBACK.keys())
def test_an_endpoint_beyond_loopback_requires_keys_or_a_flag(endpoint: str, local: bool) -> None:
    """An endpoint beyond loopback is refused before anything is bound; the message names the flag."""
    assert is_loopback(endpoint) == local
    Access(plain_tcp=True).check(endpoint)
    Access(secret=b"x" * 40).check(endpoint)
    if local:
        Access().check(endpoint)
    else:
        with pytest.raises(ConfigError, match=r"--ingest\.allow-plain-tcp"):
            IngestListener([endpoint])


def rebinds(exporter: Exporter, reason: str = "stolen") -> float:
    """Return how often the socket was bound again."""
    return exporter.metrics.value("sidestep_rebinds_total", reason)


def steal(path: Path) -> None:
    """Replace the socket file, as a second bind does."""
    path.unlink()
    with socket.socket(socket.AF_UNIX) as thief:
        thief.bind(str(path))


def wipe(path: Path) -> None:
    """Remove the directory with socket and lock, as a cleaner of temporary files does."""
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()


@pytest.mark.parametrize("taken", [Path.unlink, steal, wipe], ids=["unlinked", "stolen", "wiped"])
async def test_a_lost_path_is_bound_again(taken: object, start: Start, tmp_path: Path) -> None:
    """Connected engines and new ones deliver, and nothing is lost."""
    path = tmp_path / "own" / "i.ipc"
    async with start(ingest_endpoint=(f"ipc://{path}", "tcp://127.0.0.1:*")) as exporter:
        old = publisher(exporter.endpoints[0])
        old.push(count())
        await until(lambda: generated(exporter) == 1)
        assert callable(taken)
        taken(path)
        await until(lambda: rebinds(exporter) == 1)
        old.push(count())
        new = publisher(exporter.endpoints[0], "new")
        new.push(count())
        await until(lambda: generated(exporter) == 3, timeout=20)
        await asyncio.to_thread(old.close)
        await asyncio.to_thread(new.close)

        assert rebinds(exporter) == 1
        assert mode(path) == 0o600
        listener = exporter.ingest._listener
        assert listener is not None
        # Else all would wait for the next tick.
        assert all(map(asyncio.get_running_loop().remove_reader, listener.descriptors))
    assert not path.exists()


def test_a_path_is_bound_again_after_a_failed_attempt(tmp_path: Path) -> None:
    """The lock that the failed attempt has made does not keep out its own process."""
    path = tmp_path / "i.ipc"
    listener = IngestListener([f"ipc://{path}"])
    (tmp_path / "i.ipc.lock").unlink()
    path.unlink()
    path.mkdir()
    listener.reopen()
    assert listener.unbound
    path.rmdir()
    listener.reopen()
    assert not listener.unbound
    listener.close(0)


async def test_a_path_that_another_exporter_uses_is_not_taken_back(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The conflict is logged, and the other endpoints work."""
    path = tmp_path / "own" / "i.ipc"
    async with start(ingest_endpoint=(f"ipc://{path}", "tcp://127.0.0.1:*")) as exporter:
        wipe(path)
        with bound(path) as other:
            await until(lambda: "is in use by another process" in caplog.text)
            async with connect(exporter.endpoints[1]) as peer:
                await peer.send_hello()

            assert not other.lost()
            assert rebinds(exporter) == 1


NUMBERED = """
import sys, zmq
from sidestep.transport.listener import IngestListener
listener = IngestListener([sys.argv[1]])
with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
    peer.linger = 0
    peer.connect(sys.argv[1])
    peer.send(b"x")
    listener.socket.poll(10000)
    print(listener.receive()[0].hex())
listener.close(0)
"""


def test_routing_ids_are_not_predictable(tmp_path: Path) -> None:
    """A peer that chooses the routing id of the next one for itself would end the process."""
    command = [sys.executable, "-c", NUMBERED, f"ipc://{tmp_path}/own/i"]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        for _ in range(2)
    )

    assert first.startswith("00")
    assert first != second
