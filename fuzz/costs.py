"""Cost of the most expensive frames that a peer can send: CPU time, and longest block of the event loop.

``python -m fuzz.costs`` prints one table. A frame is decoded as a whole, and its items or records are
applied one by one; after every 2 ms the event loop does other things.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from fuzz.world import make_intake
from rendered import render
from sidestep.ingest.intake import Intake
from sidestep.metrics.totals_codec import encode_totals, totals_of
from sidestep.protocol.limits import MAX_FRAME_BYTES, MAX_ITEM_BYTES, VERSION
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import MAX_REQUESTS
from sidestep.snapshot.capture import Begun, Capture, restore

encode = msgspec.msgpack.encode
Frames = Iterator[list[Any]]
LIVE = 100_000


def info(number: int, **more: Any) -> EngineInfo:
    """Return an engine."""
    labels = {"engine": str(number), "model_name": "m"}
    return EngineInfo(f"e{number}", "vllm", labels, **more)


class Case:
    """An intake with one stream, and the cost of its last message."""

    def __init__(
        self, engines: Sequence[EngineInfo] = (info(0, features=["engine_core"]),)
    ) -> None:
        self.intake: Intake = make_intake()
        self.seq = 0
        self.held = self.spent = 0.0
        self.say("H", VERSION, "s", 1, 1, 1, list(engines))

    def say(self, *parts: Any) -> None:
        """Send a message; measure its cost and its longest part."""
        frame = encode(parts)
        assert len(frame) <= MAX_FRAME_BYTES, len(frame)
        self.held = self.spent = 0.0
        # What was made before is not this message's.
        gc.collect()
        self._time(lambda: self.intake.accept(b"p", [frame], 0.0))
        while self.intake.busy:
            self._time(self.intake.work)

    def items(self, *items: Any) -> None:
        """Send items."""
        raws = [msgspec.Raw(item if isinstance(item, bytes) else encode(item)) for item in items]
        assert all(len(bytes(raw)) <= MAX_ITEM_BYTES for raw in raws), [len(bytes(r)) for r in raws]
        self.say("B", 1, self.seq + 1, raws)
        self.seq += len(raws)

    def records(self, *records: Any) -> None:
        """Send records as one folded item."""
        raws = [
            msgspec.Raw(record if isinstance(record, bytes) else encode(record))
            for record in records
        ]
        self.say("G", 1, self.seq + 1, self.seq + 1, raws)
        self.seq += 1

    def events(self, *events: Any, stamp: float = 1.0, source: int = 1) -> None:
        """Send request events."""
        self.items(["re", 0, stamp, source, list(events)])

    def fill(self, group: bool = False) -> None:
        """Track as many requests in flight as the limit allows."""
        for start in range(0, LIVE, 512):
            numbers = range(start, start + 512)
            self.events(*([1, n, 1.0, 1.0, 7, "", n + 1 if group else 0, 0] for n in numbers))

    def _time(self, call: Callable[[], object]) -> None:
        since = time.process_time()
        call()
        took = time.process_time() - since
        self.held = max(self.held, took)
        self.spent += took


def hello(**more: Any) -> Case:
    """Send a Hello with 256 new engines."""
    case = Case([])
    case.say("H", VERSION, "s", 1, 1, 1, [info(n, **more) for n in range(256)])
    return case


ALL = [
    "cudagraph", "diffusion", "engine_core", "hf3fs", "hisparse", "iteration_details", "kv_cache_metrics",
    "kv_consumer", "kv_offload", "lora", "mooncake", "nan_check", "nixl", "spec_decode", "watermark",
]  # fmt: skip


def hello_again() -> Case:
    """Send the Hello again, with all options."""
    case = hello(features=ALL)
    case.say("H", VERSION, "s", 1, 1, 1, [info(n, features=ALL) for n in range(256)])
    return case


def hello_large() -> Case:
    """Send a Hello with as much text as it may have."""
    more = {f"k{n}": "v" * 200 for n in range(100)}
    case = Case([])
    engines = [info(n, info={"x": more}) for n in range(40)]
    case.say("H", VERSION, "s", 1, 1, 1, engines)
    return case


def empty_samples() -> Case:
    """Send a quarter of a million samples of one byte each."""
    case = Case()
    families = [[f"f{n}", "gauge", [], [[]] * 4096] for n in range(63)]
    case.items(["s", 0, 1.0, families])
    return case


def many_samples() -> Case:
    """Send as many samples of one family as an item may have."""
    case = Case()
    case.items(["s", 0, 1.0, [["f", "gauge", ["a"], [[[str(n)], 1.0] for n in range(4096)]]]])
    return case


def new_families() -> Case:
    """Send 256 families, when 256 exist already."""
    case = Case()
    for start in (0, 256):
        case.items(["s", 0, 1.0, [[f"f{n}", "gauge", [], [[]]] for n in range(start, start + 256)]])
    return case


def wide_histograms() -> Case:
    """Send histograms with 256 bounds, with as many children as fit."""
    case = Case()
    bounds = list(range(256))
    children = [[[str(n)], 0.0, [], [1] * 257, 1.0] for n in range(65)]
    families = [[f"f{n}", "histogram", ["a"], children, "", bounds] for n in range(10)]
    case.items(["s", 0, 1.0, families])
    case.items(["s", 0, 1.0, families])
    return case


def observations() -> Case:
    """Send samples with as many observations of one byte as fit."""
    case = Case()
    sample = [[], 0.0, [(n * 7) % 127 for n in range(4096)]]
    case.items(["s", 0, 1.0, [["f", "histogram", [], [sample] * 63, "", [1.0, 2.0]]]])
    return case


def large_step() -> Case:
    """Send a step with every field at its limit."""
    case = Case()
    finished = [[0, 1.0, 5, 1, 5, 5, 1.0, 1.0, 1.0, 1.0, 1.0, False, 1]] * 1024
    evictions = [[1, 1, [n % 100 for n in range(64)]]] * 1024
    floats = [(n * 7919 % 4096) / 100 for n in range(4096)]
    counts = [n * 7919 % 4096 for n in range(4096)]
    scheduler = [1, 1, 1, {}, 0.5, None, None, None, evictions]
    iteration = [1, None, 1, 1, finished, counts, counts, floats, floats]
    case.items(["vs", 0, 1.0, 1.0, scheduler, iteration])
    return case


def large_tallies() -> Case:
    """Send unknown label values in every field that has them."""
    case = Case()
    names = {f"{n:0256}": 1 for n in range(128)}
    scheduler: list[Any] = [1, 1, 1, {}, 0.5, None, None, None, [], None, names, names]
    case.items(["vs", 0, 1.0, 1.0, scheduler, None])
    drafts = [5, 1, 1, 1, list(range(4096)), list(range(4096))]
    case.items(["vs", 0, 2.0, 1.0, [*scheduler[:9], drafts], None])
    return case


def repeated_outputs() -> Case:
    """Send output of one request, as often as an item can name it."""
    case = Case()
    outputs = [[1.0, [1] * MAX_REQUESTS]]
    case.events([4, 0.5, 1.0, 1.0, outputs])
    return case


def repeated_tokens() -> Case:
    """Send outputs of several tokens of one request, as often as an item can name it."""
    case = Case()
    outputs = [[float(n), [1] * (MAX_REQUESTS // 2), [2] * (MAX_REQUESTS // 2)] for n in (1, 2)]
    case.events([4, 0.5, 1.0, 1.0, outputs])
    return case


def new_outputs() -> Case:
    """Send outputs of as many unknown requests as an item can name."""
    case = Case()
    case.events([4, 0.5, 1.0, 1.0, [[1.0, list(range(MAX_REQUESTS))]]])
    return case


def prompts() -> Case:
    """Send as many prompts as an item can have."""
    case = Case()
    case.events([4, 0.5, 1.0, 1.0, [], None, [], 0, [[n % 100] for n in range(MAX_REQUESTS)]])
    return case


def leaping_stamps() -> Case:
    """Send events seconds apart, with all requests in flight."""
    case = Case()
    case.fill()
    case.events(*([2, n, 10.0 + 2 * n] for n in range(512)))
    return case


def aging() -> Case:
    """Let all requests in flight become too old at once."""
    case = Case()
    case.fill()
    case.events(stamp=1e9)
    return case


def another_source(group: bool = False) -> Case:
    """Replace the engine's process: all requests in flight are cut off."""
    case = Case()
    case.fill(group)
    case.events(source=2)
    return case


def cut_off() -> Case:
    """Send a record of folded events, with all requests in flight."""
    case = Case()
    case.fill(True)
    case.records(_record(case, cut_off=5))
    return case


def blocks_over() -> Case:
    """Allocate more blocks than may be tracked."""
    case = Case()
    for start in range(0, LIVE + 4096, 4096):
        case.items(_allocated(range(start, start + 4096)))
    worst = case.held, case.spent
    for start in range(LIVE + 4096, 2 * LIVE, 4096):
        case.items(_allocated(range(start, start + 4096)))
        worst = max(worst, (case.held, case.spent))
    case.held, case.spent = worst
    return case


def block_crowd() -> Case:
    """Track blocks of two hundred engines, which share the capacity of one."""
    case = Case([info(n) for n in range(200)])
    for start in range(0, LIVE, 4096):
        case.items(_allocated(range(start, start + 4096)))
    for number in range(1, 200):
        case.items(["be", number, 0.0, 1, 1.0])
    case.items(_allocated(range(2 * LIVE, 2 * LIVE + 4096)))
    return case


def block_resets() -> Case:
    """Reset a cache after every block."""
    case = Case()
    for _ in range(30):
        case.items(["be", 0, 1.0, 1, 1.0, bytes([0, 3] * 2048), list(range(4096)), [1.0] * 4096])
    return case


def shares() -> Case:
    """Change the sample rate with every item, and then allocate more blocks than are tracked."""
    case = Case()
    for start in range(4096):
        case.items(["be", 0, 1.0, 1, 1.0 / (start + 1), b"\x00", [start], [1.0]])
    worst = case.held
    for start in range(4096, LIVE + 8192, 4096):
        case.items(_allocated(range(start, start + 4096)))
        worst = max(worst, case.held)
    case.held = worst
    return case


def hashes() -> Case:
    """Store the same hash as often as an item may name it."""
    case = Case()
    changes = [["stored", 1.0 + n, [1] * 4096, "GPU"] for n in range(4)]
    case.items(["ce", 0, 1.0, 1, changes])
    return case


def clears() -> Case:
    """Clear as many media as there may be, as often as an item may name them."""
    case = Case()
    case.items(["ce", 0, 1.0, 1, [["stored", 1.0, [1], f"m{n}"] for n in range(128)]])
    case.items(["ce", 0, 1.0, 1, [["cleared", 1.0]] * 1024])
    return case


def tiny_children() -> Case:
    """Send a record with as many children of two bytes as it may have."""
    case = Case()
    record = _record(case)
    head, totals = record
    head[5] = [head[5][0]] * 64
    totals[2] = [[[[]]] * 256] * 64
    case.records(encode([head, totals]))
    return case


def open_children() -> Case:
    """Send a record with as many children of self-described families as it may have."""
    case = Case()
    head, totals = _record(case)
    totals[3] = [[f"f{n}", "gauge", "", [], [], [[[]]] * 96] for n in range(640)]
    case.records(encode([head, totals]))
    return case


def open_families() -> Case:
    """Send a record with as many self-described families as it may have."""
    case = Case()
    head, totals = _record(case)
    totals[3] = [[f"f{n}", "counter", "", [], [], []] for n in range(640)]
    case.records(encode([head, totals]))
    return case


def same_histogram() -> Case:
    """Send histograms of one bound, to be merged into others of 256 bounds."""
    case = Case([info(0, bounds={"request_latency": [float(n) for n in range(256)]})])
    head, totals = _record(case)
    name = "vllm:e2e_request_latency_seconds"
    head[3], head[4] = [name] * 4096, [[1.0]] * 4096
    totals[1] = [[1.0, [1, 1]]] * 4096
    case.records(encode([head, totals]))
    return case


def small_records() -> Case:
    """Send 256 records in a frame."""
    case = Case()
    record = encode(_record(case))
    case.records(*[record] * min(255, (MAX_FRAME_BYTES - 4096) // len(record)))
    return case


def noise() -> Case:
    """Send a million nested arrays."""
    case = Case()
    frame = b"\x91" * (MAX_FRAME_BYTES - 8)
    case.held = case.spent = 0.0
    case._time(lambda: case.intake.accept(b"p", [frame], 0.0))
    return case


def empties() -> Case:
    """Send a batch of as many tiny items as it may have."""
    case = Case()
    case.items(*[encode(["s", 0, 1.0, [[f"f{n}", "gauge"] for n in range(150)]])] * 300)
    return case


def snapshot() -> Case:
    """Measure how long writing and restoring a snapshot with all requests in flight holds the loop."""
    case = Case()
    case.fill(True)
    capture = Capture(case.intake)
    begun: list[Begun] = []
    case.held = case.spent = 0.0
    case._time(lambda: begun.append(capture.begin()))
    held = case.held
    pieces = capture.encode(begun[0])
    case._time(lambda: restore(make_intake(), pieces, 0.0))
    case.held = held
    return case


def page() -> Case:
    """Measure the page of an exporter that one stream filled as far as it can."""
    case = hello(features=ALL)
    bounds = list(range(256))
    children = [[[f"{n:0200}"], 0.0, [], [1] * 257, 1.0] for n in range(65)]
    for engine in range(256):
        for number in range(3):
            case.items(
                ["s", engine, 1.0, [[f"f{number}", "histogram", ["a"], children, "", bounds]]]
            )
    case.held = case.spent = 0.0
    case._time(lambda: render(case.intake.registry))
    return case


def _allocated(numbers: range) -> list[Any]:
    return ["be", 0, 1.0, 1, 1.0, bytes(len(numbers)), list(numbers), [1.0] * len(numbers)]


def _record(case: Case, **changes: Any) -> Any:
    (engine,) = case.intake.registry.engines.values()
    totals = totals_of(engine)
    for name, value in changes.items():
        setattr(totals, name, value)
    return msgspec.msgpack.decode(encode_totals(engine, totals))


CASES: tuple[Callable[[], Case], ...] = (
    hello, lambda: hello(features=ALL), hello_again, hello_large, noise, empties, empty_samples,
    many_samples, new_families, wide_histograms, observations, large_step, large_tallies,
    repeated_outputs, repeated_tokens, new_outputs, prompts, leaping_stamps, aging,
    another_source, lambda: another_source(True), cut_off, blocks_over, block_crowd, block_resets, shares,
    hashes, clears, tiny_children, open_children, open_families, same_histogram, small_records,
    snapshot, page,
)  # fmt: skip


def main() -> None:
    """Print the table."""
    print(f"{'ms held':>8} {'ms frame':>9}  case")
    for make in CASES:
        case = make()
        rejected = {
            labels[0]: int(n)
            for name, labels, n in case.intake.metrics.counters()
            if name == "sidestep_rejected_total"
        }
        text = " ".join((make.__doc__ or "256 engines that nobody knew.").split())
        print(f"{case.held * 1e3:8.1f} {case.spent * 1e3:9.1f}  {text} {rejected or ''}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
