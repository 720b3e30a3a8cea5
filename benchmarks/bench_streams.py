"""What following an engine's KV events costs: block events a second of CPU time.

A cache of ``--blocks`` blocks turns over: what is stored pushes out what was stored first. vLLM's events
store the blocks of a prefill at once and remove each block by itself; SGLang's, with pages of
one token, do both by hundreds. A block event is one hash stored or removed.

``messages`` are the payloads as a reader takes them: decoded, filtered, counted, followed. ``process`` is an
exporter process that subscribes over ipc, with its sockets, its loop and a scrape in the end.
The peer is what one writes in an afternoon: typed structs, a dict of when each hash was stored, and a
prometheus_client histogram of lifetimes. It follows every hash, so the fair row beside it is rate 1.

Both must count every event, or the benchmark ends with an error.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from random import Random

import msgspec
import zmq
from prometheus_client import CollectorRegistry, Counter, Histogram

from benchmarks.process import SERVE, ExporterProcess
from benchmarks.table import show
from sidestep.catalog.layout_builder import compile_layout
from sidestep.config.subscriptions import parse
from sidestep.engines.dialects import DIALECTS
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import RankFeed
from sidestep.metrics.registry import Registry
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.kv_blocks.sampling import Sampling
from sidestep_adapters.streams.readers import KvEvents
from sidestep_adapters.streams.sequence import Break

STORED = "sidestep_kv_cache_stored_blocks_total"
REMOVED = "sidestep_kv_cache_removed_blocks_total"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=2000, help="of one round")
    parser.add_argument("--blocks", type=int, default=20_000, help="that fit")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows: list[list[str]] = []
    for engine, make in (("vLLM", vllm), ("SGLang", sglang)):
        random = Random(1)
        messages = list(islice(encoded(make(random, args.blocks)), args.messages))
        count = sum(len(hashes(event)) for m in messages for event in msgspec.msgpack.decode(m)[1])
        for name, measure in (
            ("messages, rate 0.01", partial(ours, rate=0.01)),
            ("messages, rate 1", partial(ours, rate=1.0)),
            ("process, rate 0.01", partial(process, rate="0.01")),
            ("peer", peer),
        ):
            spent = statistics.median(measure(messages, count) for _ in range(args.rounds))
            goal = "> 200,000" if "0.01" in name else ""
            rows.append(
                [f"{engine}: {name}", f"{count / spent:,.0f}", f"{spent / count * 1e6:.2f}", goal]
            )
    show(
        "Block events of KV events streams",
        ["", "events/s of CPU", "us an event", "wanted"],
        rows,
    )


Event = dict[str, object]


def vllm(random: Random, blocks: int) -> Iterator[list[Event]]:
    """A prefill of 64 blocks of 16 tokens a message, and the removal of what it pushes out."""
    there: deque[int] = deque()
    while True:
        new = [random.getrandbits(64) for _ in range(64)]
        there.extend(new)
        gone = [there.popleft() for _ in range(len(there) - blocks)]
        tokens = [random.randrange(100_000) for _ in range(1024)]
        yield [
            *(
                {"type": "BlockRemoved", "block_hashes": [one], "medium": "GPU", "group_idx": 0}
                for one in gone
            ),
            {
                "type": "BlockStored",
                "block_hashes": new,
                "parent_block_hash": None,
                "token_ids": tokens,
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * 64,
                "group_idx": 0,
            },
        ]


def sglang(random: Random, blocks: int) -> Iterator[list[Event]]:
    """A prefill of 400 blocks of one token a message, likewise; hashes have a sign."""
    there: deque[int] = deque()
    while True:
        new = [random.getrandbits(64) - (1 << 63) for _ in range(400)]
        there.extend(new)
        gone = [there.popleft() for _ in range(len(there) - blocks)]
        removed: list[Event] = [{"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"}]
        stored: Event = {
            "type": "BlockStored",
            "block_hashes": new,
            "parent_block_hash": 1,
            "token_ids": [random.randrange(100_000) for _ in new],
            "block_size": 1,
            "lora_id": None,
            "medium": "GPU",
        }
        yield [*(removed if gone else []), stored]


def hashes(event: Event) -> list[int]:
    """Of one event."""
    found = event["block_hashes"]
    assert isinstance(found, list)
    return found


def encoded(batches: Iterator[list[Event]]) -> Iterator[bytes]:
    """Payloads, 10 ms apart."""
    for number, events in enumerate(batches):
        yield msgspec.msgpack.encode([1e9 + number / 100, events, 0])


def ours(messages: list[bytes], count: int, rate: float) -> float:
    """Seconds of CPU time that the reader takes."""
    layouts = {name: compile_layout(name) for name in DIALECTS}
    registry = Registry(layouts, {}, None, Sampling(rate))
    intake = Intake(registry, SelfMetrics(), boot=1, clock=time.monotonic, wall=time.time)
    (subscription,) = parse("kv-events=tcp://h:1")
    feed = RankFeed(intake, subscription, KvEvents.feature)
    reader = KvEvents(feed)
    reader.broke(Break(0, restarted=False, whole=True))

    def follow() -> None:
        for message in messages:
            reader.take(message, 0.0)
            while intake.busy:
                intake.work()

    spent = cpu(follow)
    (engine,) = registry.engines.values()
    slots = [engine.layout.find(name).slots[0] for name in (STORED, REMOVED)]
    assert sum(sum(engine.keyed[slot].values()) for slot in slots) == count
    return spent


def process(messages: list[bytes], count: int, rate: str) -> float:
    """Seconds of CPU time that an exporter process takes."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/kv"
        context = zmq.Context()
        socket = context.socket(zmq.XPUB)
        socket.sndhwm = len(messages)
        socket.linger = 0
        socket.bind(endpoint)
        command = (*SERVE, "--subscribe", f"kv-events={endpoint}", "--kv.sample-rate", rate)
        try:
            with ExporterProcess(command) as exporter:
                socket.recv()
                before = exporter.cpu_seconds
                for number, message in enumerate(messages):
                    socket.send_multipart([b"", number.to_bytes(8, "big"), message])
                while (found := exporter.totals).get(STORED, 0) + found.get(REMOVED, 0) < count:
                    time.sleep(0.1)
                return exporter.cpu_seconds - before
        finally:
            socket.close()
            context.term()


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[int]
    token_ids: list[int]
    medium: str | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed]


def peer(messages: list[bytes], count: int) -> float:
    """Seconds of CPU time that a straightforward subscriber takes."""
    registry = CollectorRegistry()
    lifetimes = Histogram("lifetime", "Lifetimes.", ["medium"], registry=registry)
    blocks = Counter("blocks", "Blocks.", ["action", "medium"], registry=registry)
    decoder = msgspec.msgpack.Decoder(_Batch)
    births: dict[tuple[str | None, int], float] = {}

    def follow() -> None:
        for message in messages:
            batch = decoder.decode(message)
            for event in batch.events:
                medium = event.medium
                action = "stored" if isinstance(event, _Stored) else "removed"
                blocks.labels(action, medium).inc(len(event.block_hashes))
                for one in event.block_hashes:
                    if action == "stored":
                        births.setdefault((medium, one), batch.ts)
                    elif (birth := births.pop((medium, one), None)) is not None:
                        lifetimes.labels(medium).observe(batch.ts - birth)

    spent = cpu(follow)
    counted = [
        registry.get_sample_value("blocks_total", {"action": a, "medium": "GPU"})
        for a in ("stored", "removed")
    ]
    assert sum(filter(None, counted)) == count
    return spent


def cpu(work: Callable[[], None]) -> float:
    """Seconds of CPU time."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
