"""Throughput of the exporter for the tap's raw events: request tokens per second of one core.

The peer is the same exporter and state machine, which updates prometheus_client's children.
Steps are those of a steady batch in which requests start, are preempted now and then, and
end; an event is a request's token. The measurement fails unless every token is on the page.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from random import Random

from benchmarks.process import SERVE, ExporterProcess
from benchmarks.summary.ingest import AHEAD, CLIENT, Senders
from benchmarks.summary.rows import Figure, Row, Topic
from sidestep.engines.items import Item, encode_item
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

STEP = 0.01
TOKENS = 128
"""Generated tokens of a request."""
START = 16
"""Steps in which the batch fills."""
ENGINES = 4
REQUESTS = 256
PEER = "the same state machine with prometheus_client"
NAME = f"{ENGINES} engines, {REQUESTS} requests each: tokens"


@dataclasses.dataclass(frozen=True)
class Feed:
    """Encoded items of one sender, which are sent repeatedly, and the number of events in them."""

    items: Sequence[bytes]
    events: int


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return million tokens per second of the exporter's CPU time, medians of the rounds."""
    feed = tokens(REQUESTS)
    seconds, rounds = (1.0, 1) if quick else (4.0, 3)
    found: dict[tuple[str, ...], list[float]] = {SERVE: [], CLIENT: []}
    for _ in range(rounds):
        for command, rates in found.items():
            rates.append(run(feed, command, ENGINES, seconds) / 1e6)
    return {NAME: Figure(statistics.median(found[SERVE]), statistics.median(found[CLIENT]))}


def run(feed: Feed, command: tuple[str, ...], engines: int, seconds: float) -> float:
    """Return events per second of the exporter's CPU time."""
    with ExporterProcess(command) as exporter, Senders(exporter.endpoint, engines) as senders:
        sent = [0] * engines
        _feed(feed, senders, sent, 0.5)
        before, cpu = sum(sent), exporter.cpu_seconds
        _feed(feed, senders, sent, seconds)
        cpu = exporter.cpu_seconds - cpu
        arrived = exporter.totals.get("vllm:generation_tokens_total", 0.0)
        if senders.dropped:
            raise SystemExit(f"{senders.dropped} items were dropped")
        rounds = sum(sent) / len(feed.items)
        if arrived != rounds * feed.events:
            raise SystemExit(f"{rounds * feed.events} events were sent, {arrived} arrived")
    return (sum(sent) - before) / len(feed.items) * feed.events / cpu


def _feed(feed: Feed, senders: Senders, sent: list[int], seconds: float) -> None:
    """Send whole rounds of the feed for ``seconds``, then wait until all is applied."""
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
    """Return two seconds of an engine's steps, an item each; all requests end by then."""
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
            # The first requests do not end together.
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
    return Feed([encode_item(item) for item in items], count)


EVENTS = Topic(
    "The exporter: raw request events", (Row(NAME, "M events/s", PEER, more=True),), measure
)
