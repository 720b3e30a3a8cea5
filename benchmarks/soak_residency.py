"""Whether following KV blocks stays within bounds: 64 engines of a million blocks, for minutes.

A `sidestep serve` process with its defaults takes in, over ipc, what the plugin of each engine
sends: a `Publisher` and a `BlockTap` apiece, in two sender processes. Blocks are sampled on the
engine's side at the rate that the exporter tells, 0.01: of a million blocks 10,000 are followed.
Senders draw these directly and hand them to the tap, which is told to take all, instead of
calling it for each of the other 99 in 100; items carry the exporter's rate. A share of the blocks
is handed out anew all the time, and hit in between, so that lives end as fast as others begin.
Some engines tell of a prefix cache as well, all of whose hashes are sent: the exporter samples
those.

Senders begin with as many blocks as they have, at once: that is in the first minute. A block event
is on the page once its block's life is over, as one of its lifetime or its hits; "events/s" is of
these. "lag" is the longest that the event loop was late. Memory of a tracked block is what
the exporter has grown by since its engines said hello, and had sent nothing: their histograms are
in it.

A block's life that is not on the page, a lost or refused item, or one that a sender had to drop ends the
run with an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from random import Random
from typing import Literal, TypeVar, final

import msgspec

from benchmarks.process import ExporterProcess
from benchmarks.steps import FEATURES, engine_info
from benchmarks.table import percentile, show
from sidestep.protocol.block_events import BlockEvents, CacheChange, CacheEvents
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.vllm.kv_block_tap import BlockTap

BLOCKS = 1_000_000
"""Of one engine."""
SENDERS = 2
TICK = 0.25
FLUSH = 0.1
"""Of a publisher; a plugin's is shorter, but here 32 of them share an interpreter."""
SCRAPE = 5.0
PREFIX = 16
"""Hashes of one change."""
WAIT = 60.0

ENDED = "vllm:kv_block_lifetime_seconds_count"
HITS = "sidestep_kv_block_reuses_sum"
HASHES = "sidestep_kv_cached_block_lifetime_seconds_count"
RATE = "sidestep_kv_sample_ratio"
TRACKED = "sidestep_kv_tracked_blocks"
REFUSED = "sidestep_kv_refused_blocks_total"
ABANDONED = "sidestep_kv_abandoned_blocks_total"
CACHED = {
    TRACKED: "sidestep_kv_cached_tracked_blocks",
    REFUSED: "sidestep_kv_cached_refused_blocks_total",
    ABANDONED: "sidestep_kv_cached_abandoned_blocks_total",
}
"""What blocks and hashes have each, and here together."""
ITEMS = "sidestep_items_total"
REJECTED = "sidestep_rejected_total"
LOST = "sidestep_lost_items_total"
DROPPED = "sidestep_stream_push_dropped_total"
LAG = "sidestep_loop_lag_seconds"
MEMORY = "process_resident_memory_bytes"

Held = TypeVar("Held")


@dataclasses.dataclass
class Block:
    """What a block pool hands out."""

    block_id: int


class Blocks:
    """The sampled ones among an engine's blocks."""

    def __init__(self, push: Callable[[BlockEvents], None], random: Random, count: int) -> None:
        self.tap = BlockTap(push)
        self.tap.flush(1.0)
        self.ended = 0
        self._random = random
        self._numbers: set[int] = set()
        self._resident: list[Block] = []
        self.begin(count)

    def begin(self, count: int) -> None:
        """Hand out so many."""
        random = self._random
        for _ in range(count):
            while (number := random.randrange(BLOCKS)) in self._numbers:
                pass
            self._numbers.add(number)
            self._resident.append(Block(number))
            self.tap.on_block_allocated(self._resident[-1])
        self.tap.flush(1.0)

    def turn(self, count: int) -> None:
        """Hand out so many anew, and hit twice as many."""
        for block in self._random.choices(self._resident, k=2 * count):
            self.tap.on_block_accessed(block)
        for _ in range(count):
            block = _taken(self._resident, self._random)
            self._numbers.discard(block.block_id)
            self.tap.on_block_evicted(block)
        self.ended += count
        self.begin(count)


class Cache:
    """An engine's prefix cache by hash."""

    def __init__(self, push: Callable[[CacheEvents], None], random: Random, room: int) -> None:
        self.removed = 0
        self._push = push
        self._random = random
        self._room = room
        self._source = secrets.randbits(40)
        self._held: list[int] = []

    def turn(self, count: int) -> None:
        """Store so many, and a few again, and remove what does not fit then."""
        random, held = self._random, self._held
        stored = [random.getrandbits(64) for _ in range(count)]
        if held:
            stored += random.choices(held, k=count // 8)
        held += stored[:count]
        removed = [_taken(held, random) for _ in range(max(len(held) - self._room, 0))]
        self.removed += len(removed)
        now = time.monotonic()
        changes = [*_changes("stored", now, stored), *_changes("removed", now, removed)]
        self._push(CacheEvents(1, now, self._source, changes))


def _changes(
    kind: Literal["stored", "removed"], now: float, hashes: list[int]
) -> Iterator[CacheChange]:
    for start in range(0, len(hashes), PREFIX):
        yield CacheChange(kind, now, hashes[start : start + PREFIX], "GPU")


def _taken(held: list[Held], random: Random) -> Held:
    """Any of ``held``, which loses it."""
    index = random.randrange(len(held))
    taken, held[index] = held[index], held[-1]
    held.pop()
    return taken


@final
class Engine:
    """One engine's plugin, and what it tells."""

    def __init__(self, endpoint: str, number: int, *, cached: bool) -> None:
        info = msgspec.structs.replace(engine_info(number), features=[*FEATURES, "engine_core"])
        self.items = 0
        cache = EngineInfo(f"{info.id}/cache", "stream", info.labels, features=["kv_events"])
        self.publisher = Publisher(endpoint, f"soak/{number}", [info, cache], flush=FLUSH)
        self._random = Random(number)
        self._cached = cached
        self.blocks: Blocks | None = None
        self.cache: Cache | None = None

    def begin(self, tracked: int, hashes: int) -> None:
        """Hand out all blocks."""
        self.blocks = Blocks(self._push_blocks, self._random, tracked)
        if self._cached:
            self.cache = Cache(self._push, self._random, hashes)

    def turn(self, blocks: int, hashes: int) -> None:
        """What happens in a tick."""
        if self.blocks is not None:
            self.blocks.turn(blocks)
        if self.cache is not None:
            self.cache.turn(hashes)

    def _push_blocks(self, item: BlockEvents) -> None:
        rate = self.publisher.kv_sample_rate
        if rate is None:
            raise SystemExit("the exporter has not said at which rate to sample")
        item.rate = rate
        self._push(item)

    def _push(self, item: BlockEvents | CacheEvents) -> None:
        self.items += 1
        self.publisher.push(item)


def send(args: argparse.Namespace) -> None:
    """Be a sender: greet; on a line feed, until the next one; report; end with the input."""
    endpoint, first, last = args.sender[0], int(args.sender[1]), int(args.sender[2])
    engines = [
        Engine(endpoint, number, cached=number < args.caches) for number in range(first, last)
    ]
    _wait(lambda: all(engine.publisher.connected for engine in engines))
    _say({})
    sys.stdin.readline()
    stop = threading.Event()
    threading.Thread(target=_set_at_line, args=(stop,), daemon=True).start()
    for engine in engines:
        engine.begin(args.tracked, args.hashes)
    due = time.monotonic()
    while not stop.is_set():
        for engine in engines:
            engine.turn(int(args.turnover * TICK), int(args.stored * TICK))
        # What cannot be kept up with is not made up for: the table says how much came.
        due = max(due + TICK, time.monotonic())
        stop.wait(due - time.monotonic())
    _wait(lambda: all(engine.publisher.drained for engine in engines))
    blocks = [engine.blocks for engine in engines if engine.blocks is not None]
    _say(
        {
            "items": sum(engine.items for engine in engines),
            "ended": sum(each.ended for each in blocks),
            "removed": sum(engine.cache.removed for engine in engines if engine.cache is not None),
            "dropped": sum(engine.publisher.dropped for engine in engines),
            "errors": sum(engine.publisher.errors for engine in engines),
        }
    )
    sys.stdin.readline()
    for engine in engines:
        engine.publisher.close()


def _set_at_line(stop: threading.Event) -> None:
    sys.stdin.readline()
    stop.set()


def _say(said: Mapping[str, int]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit("the exporter does not answer")
        time.sleep(0.05)


@final
class Senders:
    """The sender processes; use them as a context."""

    def __init__(self, endpoint: str, args: argparse.Namespace) -> None:
        flags = [
            word
            for name in ("caches", "tracked", "hashes", "turnover", "stored")
            for word in (f"--{name}", str(getattr(args, name)))
        ]
        command = [sys.executable, "-m", "benchmarks.soak_residency", *flags]
        cuts = [args.engines * each // SENDERS for each in range(SENDERS + 1)]
        self._processes = [
            subprocess.Popen(
                [*command, "--sender", endpoint, str(first), str(last)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first, last in pairwise(cuts)
        ]

    def __enter__(self) -> Senders:
        self.hear()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            process.wait(timeout=WAIT)

    def tell(self) -> None:
        """Have all of them go on to what comes next."""
        for process in self._processes:
            if process.stdin is None or process.poll() is not None:
                raise SystemExit("a sender has died; its error stands above")
            process.stdin.write("\n")
            process.stdin.flush()

    def hear(self) -> Counter[str]:
        """The sum of what they say next."""
        said: Counter[str] = Counter()
        for process in self._processes:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise SystemExit("a sender has died; its error stands above")
            said.update(json.loads(line))
        return said


@dataclasses.dataclass(frozen=True)
class Reading:
    """A page, and how long it took; the exporter's CPU time until then."""

    at: float
    took: float
    cpu: float
    page: Mapping[str, float]

    @property
    def events(self) -> float:
        """Block events of lives that are over: begun, hit, ended."""
        return 2 * self.page[ENDED] + self.page[HITS]

    @property
    def mebibytes(self) -> float:
        """The exporter's memory."""
        return self.page[MEMORY] / (1 << 20)


def read(exporter: ExporterProcess) -> Reading:
    """Scrape."""
    at = time.monotonic()
    page = dict(exporter.totals)
    for name, cached in CACHED.items():
        page[name] = page.get(name, 0.0) + page.get(cached, 0.0)
    return Reading(at, time.monotonic() - at, exporter.cpu_seconds, page)


def soak(args: argparse.Namespace) -> list[list[str]]:
    """Rows of the table, once all has been checked."""
    with ExporterProcess() as exporter, Senders(exporter.endpoint, args) as senders:
        for _ in range(3):
            idle = read(exporter)
        senders.tell()
        start = time.monotonic()
        readings: list[Reading] = []
        while (now := time.monotonic()) < start + 60.0 * args.minutes:
            time.sleep(min(SCRAPE, start + 60.0 * args.minutes - now))
            readings.append(read(exporter))
        senders.tell()
        sent = senders.hear()
        last = read(exporter)
        _check(sent, last.page, args)
    rows = []
    before = idle
    for minute in range(1, math.ceil(args.minutes) + 1):
        of = [each for each in readings if minute - 1 < (each.at - start) / 60.0 <= minute]
        if not of:
            break
        rows.append(_row(str(minute), before, of))
        before = of[-1]
    half = [each for each in readings if each.at - start >= 30.0 * args.minutes]
    slope = statistics.linear_regression(
        [each.at / 3600.0 for each in half], [each.mebibytes for each in half]
    ).slope
    whole = _row("after the first minute", readings[len(readings) // len(rows) - 1], readings)
    grown = (last.mebibytes - idle.mebibytes) * (1 << 20) / last.page[TRACKED]
    return [
        _row("0, idle", idle, [idle]),
        *rows,
        [*whole, f"{slope:+.1f}", f"{grown:.0f}"],
    ]


def _row(name: str, before: Reading, of: list[Reading]) -> list[str]:
    """What came between the reading before and the last one."""
    last = of[-1]
    seconds = max(last.at - before.at, 1e-9)
    # No life had begun where the page was read first: its events are those that came since.
    events = max(last.events - before.events, 0.0)
    took = [each.took for each in of]
    return [
        name,
        f"{last.page[ITEMS] - before.page[ITEMS]:.0f}",
        f"{events / 1e6:.2f}",
        f"{events / seconds:.0f}",
        f"{(last.cpu - before.cpu) / seconds:.0%}",
        f"{last.page[TRACKED]:.0f}",
        f"{last.page[REFUSED]:.0f}",
        f"{last.mebibytes:.1f}",
        f"{percentile(took, 0.5) * 1e3:.0f}",
        f"{max(took) * 1e3:.0f}",
        f"{max(each.page[LAG] for each in of) * 1e3:.0f}",
        f"{last.page[LOST] + last.page[REJECTED] + last.page[DROPPED]:.0f}",
    ]


def _check(sent: Counter[str], page: Mapping[str, float], args: argparse.Namespace) -> None:
    """All that was sent is on the page."""
    wrong: dict[str, object] = {
        name: page[name] for name in (LOST, REJECTED, DROPPED, ABANDONED) if page[name]
    }
    wrong |= {name: sent[name] for name in ("dropped", "errors") if sent[name]}
    if page[ITEMS] != sent["items"]:
        wrong["items sent, applied"] = (sent["items"], page[ITEMS])
    if page[ENDED] != sent["ended"]:
        wrong["blocks evicted, lifetimes told"] = (sent["ended"], page[ENDED])
    # What the exporter sampled of the hashes; the page has the sum of all engines' rates.
    expected = sent["removed"] * page[RATE] / args.engines
    if abs(page.get(HASHES, 0.0) - expected) > 5 * expected**0.5:
        wrong["hashes' lifetimes expected, told"] = (expected, page.get(HASHES))
    held = args.engines * args.tracked
    if not 0 <= page[TRACKED] - held <= 0.02 * args.caches * args.hashes:
        wrong["blocks tracked"] = page[TRACKED]
    if wrong:
        raise SystemExit(f"not all is well: {wrong}")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--caches", type=int, default=16, help="engines that send hashes, too")
    parser.add_argument("--tracked", type=int, default=10_000, help="sampled blocks of an engine")
    parser.add_argument(
        "--turnover", type=float, default=200.0, help="of them handed out anew, a second"
    )
    parser.add_argument("--hashes", type=int, default=100_000, help="that a cache holds")
    parser.add_argument("--stored", type=float, default=1000.0, help="hashes, a second")
    parser.add_argument("--sender", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sender:
        send(args)
        return
    rows = soak(args)
    show(
        f"{args.engines} engines, {args.tracked} of {BLOCKS} blocks followed each,"
        f" {args.turnover:g} anew a second; {args.caches} caches of {args.hashes} hashes",
        (
            *("minute", "items", "Mevents", "events/s", "CPU", "tracked", "refused", "RSS MiB"),
            *("scrape ms", "worst", "lag ms", "lost", "MiB/h, 2nd half", "bytes/tracked"),
        ),
        [[*row, *[""] * (14 - len(row))] for row in rows],
    )
    print("\nEvery item that was sent is applied, every block's life that ended is on the page,")
    print("and of the hashes' as many as the sample should have.")


if __name__ == "__main__":
    main()
