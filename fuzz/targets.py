"""Fuzz targets: each takes bytes, processes them as the exporter does, and checks for harm.

An input is a list of chunks, each after its length, because a message can be dangerous after the messages
before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from harm import World
from intakes import CORE_RUNS, Fed, steps
from rendered import render
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmRejection, VllmSleep
from sidestep.errors import ConfigError, WireError
from sidestep.http.config_files import WatchedFiles
from sidestep.http.web_config import load
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import (
    Aggregate,
    Batch,
    Bye,
    EngineInfo,
    FromSender,
    Heartbeat,
    Hello,
    encode,
)
from sidestep.snapshot.capture import Capture, restore
from sidestep.snapshot.state_file import FORMAT, HEADER, LENGTH, MAGIC, verified

SIZE = struct.Struct("<H")
MAX_CHUNKS = 64
SEED_BYTES = 16 << 10
FEATURES = ["engine_core", "spec_decode", "lora", "cudagraph", "nixl"]
STREAM = "fuzz"
ENGINES = [
    EngineInfo("one", "vllm", {"engine": "0", "model_name": "m"}, features=FEATURES),
    EngineInfo("two", "vllm", {"engine": "0", "model_name": "m"}),
    EngineInfo("three", "stream", {"engine": "0", "model_name": "m"}),
]
EVERY = 16
"""A snapshot is restored for one in so many inputs, and the pages are parsed for one in four of
those: that takes 60 ms, all else a few."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One way for input to enter the exporter.

    Attributes:
        run: Takes an input; an exception is a finding.
        seeds: Inputs to begin with.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]


class _Turn:
    """Counts inputs, so that expensive checks run now and then."""

    def __init__(self) -> None:
        self.thorough = False
        self._count = 0

    def check(self, world: World) -> None:
        """Run the cheap checks, and the expensive ones from time to time."""
        self._count += 1
        world.be_honest()
        world.check_refusals()
        world.check_bounds()
        world.check_honest()
        world.check_counters()
        if self.thorough or self._count % EVERY == 0:
            world.check_snapshot()
        if self.thorough or self._count % (4 * EVERY) == 0:
            world.check_pages()


turn = _Turn()


def chunks(data: bytes) -> list[bytes]:
    """Return the chunks of an input; the last may be shorter than its declared size."""
    found: list[bytes] = []
    at = 0
    while at + SIZE.size <= len(data) and len(found) < MAX_CHUNKS:
        (size,) = SIZE.unpack_from(data, at)
        at += SIZE.size
        found.append(data[at : at + size])
        at += size
    return found


def joined(found: Sequence[bytes]) -> bytes:
    """Return an input of these chunks."""
    return b"".join(SIZE.pack(len(chunk)) + chunk for chunk in found)


def frames(data: bytes) -> None:
    """Process each chunk as a message: its first byte is the sender and the time that passes before it."""
    world = World(scale=bool(data[:1] == b"\xff"))
    world.be_honest()
    for chunk in chunks(data):
        if chunk[:1] >= b"\xf0":
            world.advance({0xF0: 1.0, 0xF1: 31.0}.get(chunk[0], 301.0))
            continue
        world.take(b"peer%d" % (chunk[0] % 3 if chunk else 0), chunk[1:])
        world.be_honest()
    turn.check(world)


def items(data: bytes) -> None:
    """Process each chunk as an item of an engine with every option."""
    world = _greeted()
    for seq, chunk in enumerate(chunks(data), start=1):
        _say(world, Batch(1, seq, [msgspec.Raw(chunk or b"\xc0")]))
    turn.check(world)


def records(data: bytes) -> None:
    """Process each chunk as a folded record."""
    world = _greeted()
    for seq, chunk in enumerate(chunks(data), start=1):
        _say(world, Aggregate(1, seq, seq, [msgspec.Raw(chunk or b"\xc0")]))
    turn.check(world)


def snapshot(data: bytes) -> None:
    """Restore the chunks as pieces of a valid file, and the input as a file."""
    with contextlib.suppress(WireError):
        list(verified(data))
    payload = b"".join(LENGTH.pack(len(piece)) + piece for piece in chunks(data))
    whole = HEADER.pack(MAGIC, FORMAT, len(payload), zlib.crc32(payload)) + payload
    world = World()
    try:
        restore(world.intake, verified(whole), 0.0)
    except WireError:
        assert not world.intake.registry.engines
        assert not world.intake.receiver.streams
        return
    # The file was valid, so work with its content must not fail.
    list(Capture(world.intake).pieces())
    render(world.intake.registry)
    world.advance(400.0)


def web(data: bytes) -> None:
    """Read the input as a web configuration file."""
    with tempfile.TemporaryDirectory(dir=_memory()) as directory:
        path = Path(directory) / "web.yml"
        path.write_bytes(data)
        with contextlib.suppress(ConfigError):
            load(path, WatchedFiles())


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _greeted() -> World:
    world = World()
    world.be_honest()
    _say(world, Hello(VERSION, STREAM, 1, 1, 1, ENGINES))
    return world


def _say(world: World, message: Hello | Batch | Aggregate) -> None:
    world.take(b"peer", encode(message))


# Seeds.


def _some(found: Sequence[bytes]) -> Iterator[bytes]:
    """Return inputs of a few chunks each."""
    for start in range(0, len(found), 4):
        some = [chunk for chunk in found[start : start + 4] if len(chunk) < 1 << 16]
        if sum(map(len, some)) <= SEED_BYTES:
            yield joined(some)


def _recorded(run: str) -> list[bytes]:
    return [item for _, _, item in islice(steps(run), 400) if item is not None][::9]


def _items() -> Iterator[bytes]:
    for run in CORE_RUNS:
        yield from _some(_recorded(run))
    yield joined([encode_item(VllmSleep(0, 1.0, 1, 1)), encode_item(VllmRejection(0, 1.0, "x"))])


def _frames() -> Iterator[bytes]:
    hello = b"\x00" + encode(Hello(VERSION, STREAM, 1, 1, 1, ENGINES))
    later: list[FromSender] = [Heartbeat(1, 9, 9, 1, 1, 1), Bye(1, 9, "end")]
    for run in CORE_RUNS:
        for seed in islice(_some(_recorded(run)), 12):
            found = [msgspec.Raw(item) for item in chunks(seed)]
            batch = b"\x00" + encode(Batch(1, 1, found))
            yield joined(
                [hello, batch, *(b"\x00" + encode(message) for message in later), b"\xf1", hello]
            )
    for seed in islice(_records(), 4):
        found = [msgspec.Raw(record) for record in chunks(seed)]
        yield joined([hello, b"\x00" + encode(Aggregate(1, 1, 5, found))])


def _records() -> Iterator[bytes]:
    for run in CORE_RUNS:
        folder = ItemFolder()
        for item in _recorded(run)[:12]:
            folder.fold(item, ENGINES)
        yield from (joined(frame) for frame in folder.seal().frames)


def _snapshots() -> Iterator[bytes]:
    for run in CORE_RUNS:
        for count in (3, 40):
            fed = Fed()
            fed.feed(islice(steps(run), count))
            pieces = fed.snapshot()
            if all(len(piece) < 1 << 16 for piece in pieces):
                yield joined(pieces)


def _web() -> Iterator[bytes]:
    yield b"tls_server_config:\n  cert_file: a.crt\n  key_file: a.key\n  min_version: TLS12\n"
    yield b"basic_auth_users:\n  a: $2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG\n"
    yield b"http_server_config:\n  http2: false\n  headers:\n    X-Frame-Options: deny\n"
    yield b"rate_limit:\n  interval: 1s\n  burst: 5\n# &a [*a]\n"


TARGETS = (
    Target("frames", frames, _frames),
    Target("items", items, _items),
    Target("records", records, _records),
    Target("snapshot", snapshot, _snapshots),
    Target("web", web, _web),
)
BY_NAME = {target.name: target for target in TARGETS}
