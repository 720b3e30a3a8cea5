"""A real exporter under attack over raw sockets: it stays small, and counts of others stay exact."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from chaos.exporter import knows
from fuzz.siege import Siege, besieged

from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import EngineInfo

pytestmark = pytest.mark.skipif(
    not knows("limits.memory-hard"), reason="nothing limits what libzmq takes in"
)
MAX_RESIDENT = 512
"""MiB."""
MAX_LAG = 1.0
MAX_PAGE = 40 << 20
HALF_OPEN = 300
SLOW_REQUESTS = 500
SCRAPE_TIMEOUT = 10.0
"""Prometheus' default."""


@pytest.fixture(scope="module")
def siege() -> Iterator[Siege]:
    """An exporter for all attacks of this module."""
    with besieged() as made:
        yield made


@pytest.fixture(autouse=True)
def unharmed(siege: Siege) -> Iterator[None]:
    """Check the exporter after every attack."""
    siege.lag = siege.late = 0.0
    yield

    assert siege.process.running, siege.process.said()[-3000:]
    assert siege.settled()
    # Beside an attacker on two cores everybody waits: what is left must not be ours.
    assert siege.lag <= MAX_LAG + siege.late
    assert siege.status("VmHWM") <= MAX_RESIDENT
    assert 'reason="bug"' not in siege.page()


def ports(siege: Siege) -> tuple[int, int]:
    """Return the ports for engines and for pages."""
    return siege.port, siege.web_port


def test_silent_connections_are_closed(siege: Siege) -> None:
    """Engines and pages are served meanwhile, and the descriptors are free afterwards."""
    before = siege.open_files()
    with contextlib.ExitStack() as stack:
        for port in ports(siege):
            for _ in range(HALF_OPEN):
                with contextlib.suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        assert siege.settled()
    until(lambda: siege.open_files() <= before + 20, siege)


def test_slow_requests_delay_nobody(siege: Siege) -> None:
    """Headers that come byte by byte and never end are cut off, and a scraper beside them has its pages."""
    with contextlib.closing(Scraper(siege)) as scraper, contextlib.ExitStack() as stack:
        slow = []
        for _ in range(SLOW_REQUESTS):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", siege.web_port), 5))
            peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            slow.append(peer)

        def all_are_cut_off() -> bool:
            for peer in list(slow):
                try:
                    peer.sendall(b"x")
                except OSError:
                    slow.remove(peer)
            scraper.scrape()
            return not slow

        assert siege.waits_for(all_are_cut_off)
        assert scraper.value('sidestep_http_refused_total{reason="slow"}') >= SLOW_REQUESTS


def test_a_flood_of_scrapes_does_not_delay_engines(siege: Siege) -> None:
    """Concurrent scrapes share pages."""
    stop = threading.Event()
    scrapes: list[int] = []
    door = "127.0.0.1", siege.web_port

    def scrape() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(door, 10) as peer:
                peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                while peer.recv(1 << 16):
                    pass
                scrapes.append(1)

    threads = [threading.Thread(target=scrape) for _ in range(200)]
    for thread in threads:
        thread.start()
    pushed = siege.honest.pushed
    until(lambda: siege.honest.pushed > pushed + 1000, siege)
    stop.set()
    for thread in threads:
        thread.join()

    assert len(scrapes) > 10


def test_labels_and_families_without_end_are_limited() -> None:
    """The page stays small, and counts of the honest engine exact."""
    # An exporter of its own: one over its soft limit of memory refuses new streams before it looks at labels.
    with besieged() as siege:
        assert throw_bombs(siege), own_samples(siege)
        page = siege.page()

        assert len(page) < MAX_PAGE
        assert siege.value("sidestep_series", page) < 50_000
        assert siege.process.running
        assert siege.settled()


def throw_bombs(siege: Siege) -> bool:
    """Send labels, buckets and families without end; return whether the exporter limited them."""
    bounds = list(range(250))
    labels = {f"k{n}": "v" * 200 for n in range(7)}
    families = {"request_latency": bounds, "request_tokens": bounds}
    with dealer(siege) as peer:
        for start in range(0, 512, 64):
            engines = [
                engine(n, labels if n % 2 else {}, families if n % 3 else {})
                for n in range(start, start + 64)
            ]
            send(peer, ["H", VERSION, f"bomb{start}", start + 1, 1, 1, engines])
        engines = [engine(f"open{n}", {}, {}) for n in range(200)]
        send(peer, ["H", VERSION, "open", 7777, 1, 1, engines])
        for seq in range(1, 500):
            children = [[[f"{seq}/{n}" * 20], 1.0, [1.0]] for n in range(100)]
            family = [f"own_{seq}", "histogram", ["k"], children, "", bounds]
            item = msgspec.msgpack.encode(["s", seq % 200, 1.0, [family]])
            send(peer, ["B", 7777, seq, [item]])
        return siege.waits_for(lambda: siege.value("sidestep_series_limited_total") > 100)


def own_samples(siege: Siege) -> str:
    """Return the exporter's own samples that are not zero."""
    lines = (line for line in siege.page().splitlines() if line.startswith("sidestep_"))
    return "\n".join(line for line in lines if not line.endswith(" 0.0"))


def test_after_all_attacks_counts_are_exact(siege: Siege) -> None:
    """All that the honest engine pushed arrived, and nothing is lost."""
    siege.end()
    until(lambda: siege.counted() == siege.honest.pushed, siege)

    assert siege.value("sidestep_lost_items_total") == 0


class Scraper:
    """A scraper that reads its pages in time over one connection, as Prometheus does."""

    def __init__(self, siege: Siege) -> None:
        door = "127.0.0.1", siege.web_port
        self._connection = http.client.HTTPConnection(*door, timeout=SCRAPE_TIMEOUT)
        self.scrape()

    def scrape(self) -> str:
        """Return a page, which must come in time."""
        since = time.monotonic()
        self._connection.request("GET", "/metrics")
        answer = self._connection.getresponse()
        page = answer.read().decode()

        assert answer.status == 200
        assert time.monotonic() - since < SCRAPE_TIMEOUT
        return page

    def value(self, series: str) -> float:
        """Return the value of one series on a new page."""
        (line,) = [line for line in self.scrape().splitlines() if line.startswith(f"{series} ")]
        return float(line.rpartition(" ")[2])

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def engine(name: object, labels: dict[str, str], bounds: dict[str, list[int]]) -> EngineInfo:
    """Return an engine of the attacker."""
    found = {family: [float(bound) for bound in wanted] for family, wanted in bounds.items()}
    shown = {"engine": str(name), "model_name": "m", **labels}
    return EngineInfo(str(name), "vllm", shown, bounds=found)


@contextlib.contextmanager
def dealer(siege: Siege) -> Iterator[zmq.Socket[bytes]]:
    """Connect as a DEALER."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.connect(f"ipc://{siege.path}")
    try:
        yield peer
    finally:
        peer.close()
        context.term()


def send(peer: zmq.Socket[bytes], message: list[object]) -> None:
    """Send a message, and read pending answers."""
    if message[0] == "B":
        message = [*message[:3], [msgspec.Raw(item) for item in message[3]]]  # type: ignore[attr-defined]
    peer.send(msgspec.msgpack.encode(message))
    with contextlib.suppress(zmq.Again):
        while True:
            peer.recv(zmq.NOBLOCK)


def until(condition: Callable[[], bool], siege: Siege) -> None:
    """Wait for ``condition``."""
    assert siege.waits_for(condition)
