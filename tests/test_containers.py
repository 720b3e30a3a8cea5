"""Commands as containers run them: as process 1, on a read-only file system, without rights."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from command_line import ENVIRON
from exporters import MAIN_RUN

SIDESTEP = [sys.executable, "-B", "-m", "sidestep"]
READ_ONLY = """
while read -r _ place _; do mount -o bind,remount,ro "$place" 2>/dev/null; done </proc/mounts
exec "$@"
"""
NO_RIGHTS = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
"""Takes from root what other users have not: to enter a directory against its mode."""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")),
    reason="namespaces of mounts and processes need root",
)


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without the variables that a container has not either."""
    missing = "HOME", "TMPDIR", "XDG_RUNTIME_DIR", "USER", "LOGNAME"
    environ = {name: value for name, value in ENVIRON.items() if name not in missing}
    arguments = [*map(str, command)]
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=100, check=False, env=environ, cwd="/"
    )


def test_liveness_probes_do_not_wait_for_the_pods_grace() -> None:
    """A frozen exporter would be replaced only after minutes: it does not react to SIGTERM."""
    deploy = Path(__file__).parents[1] / "deploy"
    files = [path for path in deploy.rglob("*.*") if path.suffix in {".yaml", ".tpl"}]
    found = [
        block[0]
        for path in files
        for block in re.finditer(
            r"^( *)livenessProbe:\n(?:\1 +.*\n)+", path.read_text(), re.MULTILINE
        )
    ]
    assert len(found) >= 2
    for block in found:
        (seconds,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", block)
        assert 0 < int(seconds) <= 10


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Yield the URL of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "command",
    [
        "serve --web.listen-address 127.0.0.1:0 --ingest.endpoint ipc://{folder}/i.ipc",
        "demo --web.listen-address 127.0.0.1:0",
        f"replay {MAIN_RUN} --connect ipc://{{folder}}/none.ipc",
        "record {folder}/x.rec --listen ipc://{folder}/i.ipc",
        "whatif {folder}/pipe",
        "top --once {url}",
        "doctor {url}",
    ],
)
def test_a_command_that_is_process_1_ends_by_sigterm(command: str, tmp_path: Path) -> None:
    """The kernel ignores a signal for which such a process has no handler."""
    os.mkfifo(tmp_path / "pipe")
    with silent_server() as url:
        words = command.format(folder=tmp_path, url=url).split()
        outer = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", *SIDESTEP, *words],
            env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            deadline = time.monotonic() + 30
            while outer.poll() is None and time.monotonic() < deadline:
                # At first it is still loading.
                subprocess.run(["kill", "-TERM", *children.read_text().split()], check=False)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    outer.wait(0.5)
            assert outer.poll() in (0, 143)
        finally:
            outer.kill()
            _, errors = outer.communicate()
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("demo --once --web.listen-address 127.0.0.1:0", "set TMPDIR"),
        ("serve --web.listen-address 127.0.0.1:0", "set TMPDIR"),
        (f"replay {MAIN_RUN}", "set TMPDIR"),
        ("record /x.rec --listen ipc:///x/i.ipc", "set TMPDIR"),
        ("serve --ingest.endpoint ipc:///x/i.ipc --state.dir /x", "--state.dir /x: Read-only"),
        (
            "serve --ingest.endpoint ipc:///x/i.ipc --requests.log /x",
            "--requests.log /x: Read-only",
        ),
        ("serve --ingest.endpoint ipc:///x/i.ipc", "cannot bind ingest endpoint"),
        ("keygen key", "cannot write key.key: Read-only"),
        ("whatif {trace} --plot /x.svg", "cannot write /x.svg: Read-only"),
    ],
)
def test_a_read_only_file_system_is_one_line(command: str, message: str, tmp_path: Path) -> None:
    """What to do stands in it."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [1, 2]}\n')
    words = command.format(trace=trace).split()
    done = run("unshare", "--mount", "sh", "-c", READ_ONLY, "sh", *SIDESTEP, *words)
    (line,) = done.stderr.splitlines()
    assert line.startswith("sidestep: ")
    assert message in line
    assert done.returncode in (1, 2)


@pytest.mark.parametrize(
    "command",
    [
        "whatif {closed}",
        "replay {closed}",
        "record {closed} --listen ipc://{folder}/i.ipc",
        "serve --state.dir {closed} --ingest.endpoint ipc://{folder}/i.ipc",
        "serve --ingest.endpoint ipc://{closed}",
        "serve --config.file {closed}",
        "keygen key --out {closed}",
        "top --once --cacert {closed}",
        "doctor --rules {closed} --dashboard {closed} --engine-page {closed}",
        "doctor --endpoint ipc://{closed}",
        "doctor --manifest {closed}",
    ],
)
def test_a_directory_that_may_not_be_entered_is_one_line(command: str, tmp_path: Path) -> None:
    """For a user of its own, as images have."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    words = command.format(closed=closed / "x", folder=tmp_path).split()
    done = run(*NO_RIGHTS, *SIDESTEP, *words)
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 2)
    assert done.stdout or len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.long)])
def test_an_engine_listens_over_one_of_the_protocols_of_its_name(host: str, tmp_path: Path) -> None:
    """As localhost has in pods: engines listen over IPv4 only. The other protocol has its turn after 10 s."""
    hosts = tmp_path / "hosts"
    hosts.write_text("::1 localhost\n127.0.0.1 localhost\n")
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.IPV6, 1)
        port = publisher.bind_to_random_port(f"tcp://{host}")
        words = [
            "serve",
            "--web.listen-address",
            "127.0.0.1:0",
            "--ingest.endpoint",
            f"ipc://{tmp_path}/i.ipc",
        ]
        words += ["--subscribe", f"load=tcp://localhost:{port}"]
        mount = f'mount --bind {hosts} /etc/hosts && exec "$@"'
        exporter = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", mount, "sh", *SIDESTEP, *words],
            env=ENVIRON, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert exporter.stderr is not None
            lines = (line for line in exporter.stderr if "the publisher" in line)
            absent = "no connection" in next(lines)
            assert absent is (host == "[::1]")
            assert not absent or "connected to the publisher" in next(lines)
        finally:
            exporter.kill()
            exporter.communicate()


def test_a_signal_within_a_callback_of_a_weak_reference_ends_the_command() -> None:
    """Python drops an exception there: imports run such callbacks."""
    program = """if True:
        import os, signal, weakref
        from sidestep.app.cli import cli, main

        @cli.command("drop")
        def drop():
            value = set()
            seen = weakref.ref(value, lambda _: (os.kill(os.getpid(), signal.SIGTERM), len([])))
            del value

        main(["drop"])
    """
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
