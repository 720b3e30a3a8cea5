"""What one core of the exporter takes in of raw events: request tokens and KV blocks a second.

Whole exporter processes, fed over ipc as ``bench_ingest`` does: handshake, batches,
acknowledgements, decoding, state machines, histograms. "tokens" are engine steps of a
steady batch in which requests come, are preempted now and then, and end; an event is a request's
token. "client inside" derives the same intervals, and updates prometheus_client's
children with them. "followed blocks" are events of blocks that the sender has sampled;
hashes of a prefix cache come another way (``bench_streams``). Every token and every end must be on the page, or the benchmark ends with an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from random import Random

from benchmarks.bench_ingest import AHEAD, Senders, serve_client
from benchmarks.process import SERVE, ExporterProcess
from benchmarks.table import show
from sidestep.engines.items import Item, encode_item
from sidestep.protocol.block_events import ALLOCATED, EVICTED, TOUCHED, BlockEvents
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Iteration,
    Output,
    Preempted,
    Prompt,
    Queued,
    RequestEvents,
    Scheduled,
)

CLIENT = ("-m", "benchmarks.bench_events", "--client")
STEP = 0.01
TOKENS = 128
"""A request's answer."""
START = 16
"""Steps in which the batch fills."""
TARGET = 1.0
"""Million events a second."""


@dataclasses.dataclass(frozen=True)
class Feed:
    """Encoded items of one sender, sent over and over, and the events in each."""

    items: Sequence[bytes]
    events: int
    page: str
    """The counter that tells how many have arrived."""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256, help="running, an engine")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0, help="per row and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    for flag in ("ingest.endpoint", "web.listen-address", "log.stats-interval", "log.level"):
        parser.add_argument(f"--{flag}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        flags = vars(args)
        serve_client(flags["ingest.endpoint"], flags["web.listen_address"])
        return
    feeds = {
        "tokens": tokens(args.requests),
        "followed blocks": followed_blocks(),
    }
    rows = []
    for name, feed in feeds.items():
        commands = {"client inside": CLIENT, "sidestep": SERVE}
        if name != "tokens":
            del commands["client inside"]
        found: dict[str, list[float]] = {peer: [] for peer in commands}
        for _ in range(args.rounds):
            for peer, command in commands.items():
                found[peer].append(run(feed, command, args.engines, args.seconds))
        for peer, values in found.items():
            theirs = found.get("client inside")
            ours = peer == "sidestep"
            gain = statistics.median(values) / statistics.median(theirs or values)
            rows.append(
                [
                    f"{name}, {peer}",
                    f"{statistics.median(values) / 1e6:.2f}",
                    f"{min(values) / 1e6:.2f}",
                    f"{gain:.1f}x" if ours and theirs else "",
                    f"{TARGET:.0f}" if ours else "",
                ]
            )
    show(
        f"Events that one core of the exporter takes in; {args.requests} requests an engine",
        ("feed, exporter", "Mevents/s", "worst", "ratio", "target"),
        rows,
    )


def run(feed: Feed, command: tuple[str, ...], engines: int, seconds: float) -> float:
    """Events a second of the exporter's CPU time."""
    with ExporterProcess(command) as exporter, Senders(exporter.endpoint, engines) as senders:
        sent = [0] * engines
        _feed(feed, senders, sent, 0.5)
        before, cpu = sum(sent), exporter.cpu_seconds
        _feed(feed, senders, sent, seconds)
        cpu = exporter.cpu_seconds - cpu
        arrived = exporter.totals.get(feed.page, 0.0)
        if senders.dropped:
            raise SystemExit(f"{senders.dropped} items were dropped")
        rounds = sum(sent) / len(feed.items)
        if feed.page == "vllm:generation_tokens_total" and arrived != rounds * feed.events:
            raise SystemExit(f"{rounds * feed.events} events were sent, {arrived} arrived")
        if feed.page == "sidestep_items_total" and arrived != sum(sent):
            raise SystemExit(f"{sum(sent)} items were sent, {arrived} arrived")
    return (sum(sent) - before) / len(feed.items) * feed.events / cpu


def _feed(feed: Feed, senders: Senders, sent: list[int], seconds: float) -> None:
    """Whole rounds of the feed for so long, then wait until all is applied."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for number, sender in enumerate(senders.all):
            while sender.held_bytes < AHEAD:
                sender.add(feed.items)
                sent[number] += len(feed.items)
        if not senders.pump():
            time.sleep(0.002)
    senders.drain()


def tokens(running: int) -> Feed:
    """Two seconds of an engine's steps, an item each; all requests have ended at the end."""
    random = Random(1)
    now, number, count = 100.0, 0, 0
    live: dict[int, int] = {}
    items: list[Item] = []
    steps = 2 * TOKENS
    for step in range(steps + TOKENS):
        now += STEP
        events: list[Event] = []
        fresh: list[int] = []
        while len(live) < running and step < steps and len(fresh) < (128 if step < START else 4):
            number += 1
            fresh.append(number)
            events.append(Queued(number, now - 0.02, 1e9 + now, 200))
            events.append(Scheduled(number, now))
            # Not all at once in the beginning.
            live[number] = random.randrange(1, TOKENS) if step < START else TOKENS
        if live and random.random() < 0.05:
            victim = next(iter(live))
            events += [Preempted(victim, now), Scheduled(victim, now)]
        batch = list(live)
        if not batch:
            break
        prompts = [Prompt(each, 150, 50) for each in fresh]
        scheduled = [200 if each in fresh else 1 for each in batch] if fresh else []
        events.append(
            Iteration(
                now,
                now + 0.008,
                1e9 + now + 0.008,
                [Output(now + 0.008, batch)],
                batch if fresh else None,
                scheduled,
                300 * len(batch),
                prompts,
            )
        )
        count += len(batch)
        for each in batch:
            live[each] -= 1
            if not live[each]:
                del live[each]
                events.append(Finished(each, now + 0.008, 1e9 + now, 1, 200, TOKENS))
        items.append(RequestEvents(0, now, 1, events))
    return Feed([encode_item(item) for item in items], count, "vllm:generation_tokens_total")


def followed_blocks() -> Feed:
    """Blocks that are handed out, hit twice, and handed out again."""
    items: list[Item] = []
    kinds = bytes([ALLOCATED, TOUCHED, TOUCHED, EVICTED]) * 64
    for item in range(64):
        blocks = [64 * item + block for block in range(64) for _ in range(4)]
        stamps = [float(item) + 0.1 * event for event in range(256)]
        items.append(BlockEvents(0, float(item), 1, 0.01, kinds, blocks, stamps))
    return Feed([encode_item(item) for item in items], 64 * 256, "sidestep_items_total")


if __name__ == "__main__":
    main()
