"""Paths that another user of the host prepared: none is written to, and no engine connects to one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidestep.errors import ConfigError
from sidestep.requests.log_file import LogFile
from sidestep.snapshot.state_file import DAMAGED, SNAPSHOT, StateDirectory
from sidestep.tracking.kv_blocks.hit_ratio_curve import Point
from sidestep.transport.listener import IngestListener
from sidestep.transport.path_owners import open_file
from sidestep.transport.plain_connection import PlainConnection
from sidestep_adapters.recording.format import Writer
from sidestep_tools.whatif.command import write_plot

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
STRANGER, EXPORTER = 1234, 65532


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a directory to which all users may write, as ``/tmp`` is."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    return path


def directory(path: Path, _: Path) -> None:
    """Make a directory of another user."""
    path.mkdir()
    os.chown(path, STRANGER, STRANGER)


def link(path: Path, target: Path) -> None:
    """Make a link of another user to a directory of this one."""
    path.symlink_to(target)
    os.lchown(path, STRANGER, STRANGER)


POINTS = [Point(1, 0.0, 0.0, 0.0), Point(2, 0.0, 0.0, 0.0)]
USES: dict[str, Callable[[Path], object]] = {
    "state": StateDirectory,
    "socket": lambda path: IngestListener([f"ipc://{path}/i.ipc"]).close(0),
    "log": lambda path: LogFile(path / "requests.jsonl", 1, 1),
    "recording": lambda path: Writer(path / "x.rec").close(),
    "plot": lambda path: write_plot(path / "x.svg", POINTS, ""),
}
"""Uses of a directory."""
EVERY_USE = pytest.mark.parametrize("use", USES.values(), ids=USES)


@pytest.mark.parametrize("below", ["", "a/b"])
@pytest.mark.parametrize("prepared", [directory, link])
@EVERY_USE
def test_what_another_user_prepared_is_refused(
    use: Callable[[Path], object],
    prepared: Callable[[Path, Path], None],
    below: str,
    shared: Path,
    tmp_path: Path,
) -> None:
    """Nothing is created there, and the message names the part that is not safe and its owner."""
    target = tmp_path / "target"
    target.mkdir()
    (target / below).mkdir(parents=True, exist_ok=True)
    prepared(shared / "sidestep", target)
    if below and prepared is directory:
        (shared / "sidestep" / below).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{shared}/sidestep belongs to user {STRANGER}"):
        use(shared / "sidestep" / below)

    found = [path for path in (*target.rglob("*"), *shared.rglob("*")) if path.is_file()]
    assert found == []


@EVERY_USE
def test_root_may_follow_its_own_links(
    use: Callable[[Path], object], shared: Path, tmp_path: Path
) -> None:
    """As ``/var/run`` is one."""
    (tmp_path / "target").mkdir(mode=0o700)
    (shared / "own").symlink_to("../target")
    use(shared / "own")

    assert list((tmp_path / "target").iterdir())


@pytest.mark.parametrize("name", ["lock", f"{SNAPSHOT}.new"])
def test_a_link_in_the_state_directory_overwrites_nothing(name: str, tmp_path: Path) -> None:
    """Whoever made it: the file that it names is as it was."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = tmp_path / "state"
    path.mkdir()
    (path / name).symlink_to(precious)
    if name == "lock":
        with pytest.raises(ConfigError, match="symbolic links"):
            StateDirectory(path)
    else:
        opened = StateDirectory(path)
        opened.write([b"piece"])
        assert opened.read() == [b"piece"]
        opened.release()

    assert precious.read_text() == "precious"


def test_a_state_directory_that_all_may_write_to_is_refused(shared: Path) -> None:
    """Another user could replace the snapshot; the message says what to do."""
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="world-writable; use a subdirectory"):
        StateDirectory(shared)


def test_a_state_directory_that_is_replaced_later_is_not_written_to(
    shared: Path, tmp_path: Path
) -> None:
    """The check is repeated for each snapshot, and a directory that is made again is used."""
    path = shared / "sidestep"
    opened = StateDirectory(path)
    path.rename(shared / "former")
    link(path, tmp_path)
    with pytest.raises(PermissionError):
        opened.write([b"piece"])
    path.unlink()
    path.mkdir()
    opened.write([b"piece"])
    assert opened.read() == [b"piece"]
    opened.release()

    assert not (tmp_path / SNAPSHOT).exists()


@pytest.mark.parametrize("made", [os.mkfifo, Path.touch], ids=["pipe", "another user's"])
def test_a_snapshot_that_this_user_did_not_write_is_set_aside(
    made: Callable[[Path], None], tmp_path: Path
) -> None:
    """Reading a pipe without a writer would never end."""
    made(tmp_path / SNAPSHOT)
    os.chown(tmp_path / SNAPSHOT, STRANGER, -1)
    opened = StateDirectory(tmp_path)
    with pytest.raises(Exception, match="another user"):
        opened.read()
    assert opened.set_aside() == DAMAGED
    opened.release()


def test_files_of_the_process_can_be_written_to(tmp_path: Path) -> None:
    """``/dev/stdout`` is a link to a link that is no path; an existing recording is replaced."""
    program = (
        "import os; from sidestep.transport.path_owners import open_file;"
        "os.write(open_file('/dev/stdout', os.O_WRONLY), b'said')"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"said"
    (tmp_path / "x").write_text("before")
    os.close(open_file(tmp_path / "x", os.O_WRONLY | os.O_TRUNC))
    assert (tmp_path / "x").read_text() == ""


def ended(path: Path) -> str:
    """Connect to a socket, and return why the connection ended; empty while it is open."""
    connection = PlainConnection(f"ipc://{path}", time.monotonic())
    connection.advance(time.monotonic())
    reason = connection.ended
    connection.close()
    return reason


@pytest.mark.parametrize("prepared", [directory, link, None])
def test_an_engine_sends_nothing_to_another_users_socket(
    prepared: Callable[[Path, Path], None] | None, shared: Path, tmp_path: Path
) -> None:
    """Not even the greeting: in a directory that all may write to, anyone can make the exporter's."""
    (tmp_path / "target").mkdir()
    path = shared / "ingest.ipc"
    if prepared is not None:
        prepared(shared / "sidestep", tmp_path / "target")
        path = shared / "sidestep" / "ingest.ipc"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        os.chown(path, STRANGER, STRANGER)
        listening.listen()
        assert f"belongs to user {STRANGER}" in ended(path)
        with listening.accept()[0] as peer:
            assert peer.recv(1) == b""


BECOMES = """
import os, sys, time
from sidestep.transport.access import Access
from sidestep.transport.listener import IngestListener
from sidestep.transport.plain_connection import PlainConnection
endpoint, user, group, *extra = sys.argv[1:]
os.setgroups([int(one) for one in extra])
os.setgid(int(group))
os.setuid(int(user))
"""
"""After the imports: a user other than root may not be able to read the modules."""
LISTENS = f"""{BECOMES}
listener = IngestListener([endpoint], Access(group=int(group)))
print("listens", flush=True)
sys.stdin.read()
listener.close(0)
"""
CONNECTS = f"""{BECOMES}
connection = PlainConnection(endpoint, time.monotonic())
while not connection.ready and not connection.ended:
    connection.wait(1)
    connection.advance(time.monotonic())
print(connection.ended or "ready")
"""


def command(program: str, endpoint: str, user: int, *groups: int) -> list[str]:
    """Return the command of a program that runs as a user."""
    return [sys.executable, "-c", program, endpoint, str(user), *map(str, groups)]


@pytest.fixture
def mount() -> Iterator[Path]:
    """Return a directory that all users reach, as a volume of a pod is."""
    with tempfile.TemporaryDirectory(prefix="volume") as name:
        Path(name).chmod(0o755)
        path = Path(name) / "mount"
        path.mkdir()
        yield path


@pytest.mark.parametrize("mode", [0o1777, 0o2777, 0o755])
def test_engines_of_a_pod_connect_whatever_their_user(mode: int, mount: Path) -> None:
    """The directory is open to a group of theirs; without the group another user's directory is refused.

    An emptyDir is open to all, in memory with the sticky bit too; an image's volume belongs to the exporter's user.
    """
    mount.chmod(mode)
    if mode == 0o755:
        os.chown(mount, EXPORTER, EXPORTER)
    endpoint = f"ipc://{mount}/ingest/ingest.ipc"
    listens = command(LISTENS, endpoint, EXPORTER, EXPORTER)
    pipe = subprocess.PIPE
    with subprocess.Popen(listens, stdin=pipe, stdout=pipe) as exporter:
        assert exporter.stdout is not None
        assert exporter.stdout.readline() == b"listens\n"
        for user, *groups in ((0, 0, EXPORTER), (1000, 1000, EXPORTER), (4711, EXPORTER)):
            assert said(endpoint, user, *groups) == "ready"
        alone = said(endpoint, 0, 0)
        exporter.communicate()

    if mode == 0o755:
        assert alone == "ready"
    else:
        assert "with --ingest.ipc-group one of a group of this process" in alone


def test_an_exporter_outside_its_group_says_so_at_each_start(mount: Path) -> None:
    """No directory is left that the next start would blame, as in a pod whose containers are restarted."""
    mount.chmod(0o1777)
    program = LISTENS.replace("Access(group=int(group))", "Access(group=4711)")
    for _ in range(2):
        listens = command(program, f"ipc://{mount}/ingest/ingest.ipc", EXPORTER, EXPORTER)
        done = subprocess.run(listens, capture_output=True, text=True, check=False)
        assert "ingest: this process is not in group 4711\n" in done.stderr


def said(endpoint: str, user: int, *groups: int) -> str:
    """Return what an engine's connection says as this user, of these groups."""
    connects = command(CONNECTS, endpoint, user, *groups)
    return subprocess.run(connects, capture_output=True, text=True, check=True).stdout.strip()
