"""Hostile connections over raw sockets, to an exporter and to an engine: neither process ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos.exporter import knows
from fuzz import zmtp_peer as zmtp
from fuzz.attacks import ATTACKS, attack
from fuzz.hostile_exporter import BEHAVIOURS, hostile_exporter
from fuzz.keyed_peers import KeyFiles, flood_exporter, flooding_exporter
from fuzz.relay import resetting
from fuzz.siege import LIMITS, Siege, besieged
from fuzz.zmtp_peer import Address

CONNECTIONS = 20
"""Connections per attack; ``make fuzz`` makes a thousand."""
MAX_EXPORTER_MIB = 512
MAX_ENGINE_GROWTH_MIB = 24.0
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not knows("limits.memory-hard"), reason="nothing limits what libzmq takes in"
)


@pytest.fixture(scope="module")
def siege() -> Iterator[Siege]:
    """An exporter for all attacks without keys."""
    with besieged() as made:
        yield made


@pytest.fixture(scope="module")
def keyed() -> Iterator[tuple[Siege, KeyFiles]]:
    """An exporter whose port requires keys; its honest engine uses a path."""
    with tempfile.TemporaryDirectory() as folder:
        files = KeyFiles(Path(folder))
        with besieged([*LIMITS, *files.flags]) as made:
            yield made, files


def by_one_door(names: Iterable[str]) -> list[Any]:
    """Return each name with a path or a port in turn, and with the other one in the long form."""
    return [
        pytest.param(name, door, marks=[pytest.mark.long] * ((number + turn) % 2))
        for number, name in enumerate(names)
        for turn, door in enumerate(("ipc", "tcp"))
    ]


def check(siege: Siege) -> None:
    """Check that the exporter runs, is small, and has all that its honest engine pushed."""
    assert siege.process.running, siege.process.said()[-1000:]
    assert siege.settled()
    assert siege.status("VmHWM") <= MAX_EXPORTER_MIB
    assert siege.value("sidestep_lost_items_total") == 0


@pytest.mark.parametrize(("name", "door"), by_one_door(ATTACKS))
def test_no_connection_ends_the_exporter(name: str, door: str, siege: Siege) -> None:
    """Whatever a peer sends and whenever it resets, counts of other engines stay exact."""
    address: Address = siege.path if door == "ipc" else ("127.0.0.1", siege.port)

    assert attack(name, address, CONNECTIONS) == CONNECTIONS
    check(siege)


@pytest.mark.parametrize("name", ["noise_with_keys", "half_a_handshake", "bad_metadata"])
def test_no_connection_without_a_key_ends_the_exporter(
    name: str, keyed: tuple[Siege, KeyFiles]
) -> None:
    """The port requires keys."""
    siege, _ = keyed

    assert attack(name, ("127.0.0.1", siege.port), CONNECTIONS) == CONNECTIONS
    check(siege)


def test_no_connection_with_a_key_ends_the_exporter(keyed: tuple[Siege, KeyFiles]) -> None:
    """A peer with a valid key floods and resets."""
    siege, files = keyed
    with resetting(("127.0.0.1", siege.port), 20_000) as relay:
        flood_exporter(relay.endpoint, files, CONNECTIONS)

        assert relay.resets >= CONNECTIONS // 2
    check(siege)


def engine_under_attack(endpoint: str, connections: int, **environ: str) -> float:
    """Run an engine's process against a hostile exporter; return by how many MiB it grew."""
    command = [sys.executable, "-m", "fuzz.engine_under_attack", endpoint, str(connections)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert "Traceback" not in done.stderr
    return float(done.stdout.split()[0])


@pytest.mark.parametrize(("name", "door"), by_one_door(BEHAVIOURS))
def test_no_exporter_ends_the_engine(name: str, door: str, tmp_path: Path) -> None:
    """Whatever answers in the exporter's place, the engine runs on and hardly grows."""
    address: Address = tmp_path / "x" if door == "ipc" else ("127.0.0.1", 0)
    with hostile_exporter(address, BEHAVIOURS[name]) as hostile:
        growth = engine_under_attack(hostile.endpoint, 3)

        assert hostile.connections >= 3
    assert growth <= MAX_ENGINE_GROWTH_MIB


def test_no_exporter_with_a_key_ends_the_engine(tmp_path: Path) -> None:
    """An exporter that floods and resets connections ends no engine with a key."""
    files = KeyFiles(tmp_path)
    with flooding_exporter(files) as place, resetting(place, 8 << 20) as relay:
        growth = engine_under_attack(relay.endpoint, 4, **files.environ)

    assert growth <= MAX_ENGINE_GROWTH_MIB


def test_all_connections_are_closed_before_descriptors_run_out() -> None:
    """With none left, libzmq would end the process."""
    with besieged() as siege:
        assert siege.settled()
        resource.prlimit(siege.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        with contextlib.ExitStack() as held:
            for _ in range(300):
                with contextlib.suppress(OSError):
                    held.enter_context(zmtp.connect(siege.path))
            assert siege.waits_for(
                lambda: 'sidestep_rebinds_total{reason="descriptors"}' in siege.page()
            )
        check(siege)


def test_an_exporter_that_aborts_loses_nothing(tmp_path: Path) -> None:
    """An exporter that aborts continues from its state directory."""
    with besieged([*LIMITS, "--state.dir", str(tmp_path / "state")]) as siege:
        for _ in range(3):
            assert siege.settled()
            os.kill(siege.process.pid, signal.SIGABRT)
            assert siege.waits_for(lambda: not siege.process.running)
            siege.process.start()
        check(siege)
        siege.end()
        assert siege.waits_for(lambda: siege.counted() == siege.honest.pushed)


WITHOUT_DESCRIPTORS = """
import logging, os, resource, sys, time
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher
def until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
opened, warnings = [], []
handler = logging.Handler()
handler.emit = warnings.append
logging.getLogger("sidestep_adapters").addHandler(handler)
limit = len(os.listdir("/proc/self/fd")) + 40
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    while True:
        opened.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
name = sys.argv[1][:3]
engine = EngineInfo(name, "vllm", {"engine": name, "model_name": "m"})
publisher = Publisher(sys.argv[1], name, [engine])
until(lambda: publisher._link.problem or warnings)
before = publisher.connected
for descriptor in opened:
    os.close(descriptor)
until(lambda: publisher.connected)
print(before, publisher.connected)
publisher.close()
"""


def test_an_engine_without_descriptors_connects_later(tmp_path: Path) -> None:
    """With none left, libzmq would end its process."""
    files = KeyFiles(tmp_path)
    with besieged(files.flags) as siege:
        for endpoint, environ in (
            (f"ipc://{siege.path}", {}),
            (f"tcp://127.0.0.1:{siege.port}", files.environ),
        ):
            done = subprocess.run(
                [sys.executable, "-c", WITHOUT_DESCRIPTORS, endpoint],
                env={**os.environ, **environ},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )

            assert done.stdout.split() == ["False", "True"], done.stderr[-1000:]
