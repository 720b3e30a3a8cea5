"""The delivery promise as a state machine: nothing is lost or doubled, and no exposed counter decreases."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.ingest.intake import Intake
from sidestep.metrics.registry import Accounting, Registry, Tracking
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import OTHER
from sidestep.protocol.messages import EngineInfo, Settings, encode
from sidestep.protocol.receiver import Receiver
from sidestep.protocol.request_events import Event, Finished, Identity, Queued, RequestEvents
from sidestep.protocol.sender import Sender, State
from sidestep.requests.request_log import EngineRequests
from sidestep.requests.tenants import Tenants
from sidestep.snapshot.capture import Capture, restore
from sidestep.telemetry.self_metrics import SelfMetrics

RING = 60 << 10
"""Twice what the folded items of two engines come to: they are sealed once the ring is half empty."""
STREAMS = {"front/0": "shared", "front/1": "shared", "other": "own"}
"""Engine that each stream feeds."""
LATENCIES = [0.0001 * n for n in range(1, 121)]
"""Latencies of one item: a kilobyte, so that a ring of this size is full soon."""
SOON, LATER, TIMEOUT = 0.05, 0.3, 4.0
MAX_ZOMBIES = 8
"""Fewer than the retired incarnations whose seqs the receiver remembers."""
POISON = b"\xc0"

layouts = {"vllm": compile_layout(DIALECTS["vllm"])}
TOKENS = layouts["vllm"].find("vllm:generation_tokens_total").slots[0]
ENDED = layouts["vllm"].find("vllm:request_success_total").slots
BY_TENANT = layouts["vllm"].find("sidestep_tenant_requests_total").slots[0]
TENANTS = ("a", "b")
ITL = layouts["vllm"].find("vllm:inter_token_latency_seconds").slots[0]

Page = dict[str, tuple[int, ...]]
"""By engine: tokens, requests of the tenants and of all others, then the counts per bucket."""


class Exporter:
    """One exporter process, started from the last one's disk."""

    def __init__(self, boot: int, disk: list[bytes] | None, rate: float) -> None:
        self.now = 0.0
        metrics = SelfMetrics()
        tenants = Tenants("cache-salt", len(TENANTS))
        registry = Registry(
            layouts,
            tracking=Tracking(request_sink=lambda engine: EngineRequests(None, tenants, engine)),
            accounting=Accounting(tenants),
        )
        self.intake = Intake(
            Applier(registry),
            Receiver(boot, Settings(), durable=True),
            metrics,
            clock=lambda: self.now,
            wall=lambda: 1.0,
        )
        self.intake.receiver.kv_sample_rate = rate
        self.capture = Capture(self.intake)
        self.written: list[bytes] | None = None
        if disk is not None:
            restore(self.intake, disk, 0.0)
            assert tenants.restore(registry.requests_by_tenant()) == []

    def receive(self, peer: bytes, frame: bytes, now: float) -> list[tuple[bytes, bytes]]:
        """Process a frame and return the encoded replies."""
        replies = self.intake.accept(peer, [frame], now)
        while self.intake.busy:
            self.intake.work()
        return [(to, encode(reply)) for to, reply in replies]

    def page(self) -> Page:
        """Return what a scrape would show."""
        found: Page = {}
        for engine in self.intake.registry.engines.values():
            children = engine.keyed[BY_TENANT]
            tenants = [int(children.get((name,), 0)) for name in (*TENANTS, OTHER)]
            assert sum(tenants) == sum(engine.values[slot] or 0 for slot in ENDED)
            tokens = int(engine.values[TOKENS] or 0)
            found[engine.id] = (tokens, *tenants, *engine.histogram(ITL).counts)
        return found


def claimed(engine: str) -> str:
    """Return the id that the process asked for, without the number of a replica."""
    return re.sub(r"~\d+", "", engine)


def info(engine: str) -> EngineInfo:
    """Return a stream's description of an engine."""
    return EngineInfo(engine, "vllm", {"engine": engine, "model_name": "m"})


def request(engine: int, number: int, source: int) -> RequestEvents:
    """Return the events of a request of one of the tenants."""
    identity = Identity("", "", TENANTS[number % len(TENANTS)])
    events: list[Event] = [
        Queued(number, 1.0, 1.0, 1, identity=identity),
        Finished(number, 2.0, 2.0, 0, 1, 0),
    ]
    return RequestEvents(engine, 2.0, source, [*events])


class Process:
    """One engine process: its sender, its connection, and the frames on their way from and to it."""

    def __init__(self, stream: str, incarnation: int) -> None:
        self.engines = [info(STREAMS[stream])]
        self.sender = Sender(
            stream, incarnation, self.engines, Random(incarnation), ItemFolder(), ring_bytes=RING
        )
        self.stream = stream
        self.connection = 0
        self.pushed = 0
        self.up: list[tuple[bytes, bytes]] = []
        self.down: list[tuple[bytes, bytes]] = []

    @property
    def peer(self) -> bytes:
        """The present connection."""
        return f"{self.stream}/{self.sender.incarnation}/{self.connection}".encode()

    def turn(self, now: float) -> None:
        """Run the publisher's loop once."""
        if self.sender.reopen:
            self.reconnect()
            self.sender.reopened()
        while (frame := self.sender.next_frame(now)) is not None:
            self.up.append((self.peer, frame))
            self.sender.sent(now)

    def reconnect(self) -> None:
        """Open another connection; frames to the old one are lost, those from it may arrive."""
        self.connection += 1
        self.down.clear()


class Delivery(RuleBasedStateMachine):
    """Several streams and engines, one exporter at a time, and every fault that the promise covers."""

    @initialize()
    def begin(self) -> None:
        """Start an exporter without state, and the engines."""
        self.now = 0.0
        self.boots = self.incarnations = 0
        self.rate = 0.01
        self.disk: list[bytes] | None = None
        self.pushed: defaultdict[str, int] = defaultdict(int)
        self.asked: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Requests by engine and tenant."""
        self.uncertain: defaultdict[str, int] = defaultdict(int)
        """Items that a killed engine had not got acknowledged."""
        self.seen: Page = {}
        self.processes: dict[str, Process] = {}
        self.zombies: list[Process] = []
        self.ended: list[Process] = []
        for stream in STREAMS:
            self.start_engine(stream)
        self.start_exporter()

    def start_exporter(self) -> None:
        """Start a process from the disk; all connections to the last one are gone."""
        self.boots += 1
        self.exporter = Exporter(self.boots, self.disk, self.rate)
        for process in (*self.processes.values(), *self.zombies):
            process.up.clear()
            process.reconnect()

    def start_engine(self, stream: str, *, lives: bool = False) -> None:
        """Start a new process of this stream; what the last one held may be lost unless it lives."""
        last = self.processes.get(stream)
        if last is not None and not lives:
            sender = last.sender
            held = sender._ring.first
            durable = sender._seq if held is None else held - 1
            for engine in last.engines:
                self.uncertain[engine.id] += last.pushed - durable
            self.ended.append(last)
        self.incarnations += 1
        self.processes[stream] = Process(stream, self.incarnations)

    def pick(self, number: int) -> Process:
        """Return one of the processes."""
        return list(self.processes.values())[number % len(self.processes)]

    # Single steps.

    @rule(which=st.integers(0, 2), count=st.integers(1, 60), poison=st.integers(0, 9))
    def push(self, which: int, count: int, poison: int) -> None:
        """Push items, more than the ring holds if there are many."""
        process = self.pick(which)
        for number in range(count):
            index = number % len(process.engines)
            found = IterationStats(1, inter_token_latencies_iter=LATENCIES)
            process.sender.add([encode_item(VllmStep(index, self.now, 1.0, None, found))])
            self.pushed[process.engines[index].id] += 1
            asked = request(index, number, process.sender.incarnation)
            process.sender.add([encode_item(asked)])
            self.asked[process.engines[index].id, TENANTS[number % len(TENANTS)]] += 1
        process.pushed += 2 * count
        if poison == 0:
            process.sender.add([POISON])
            process.pushed += 1

    @rule(which=st.integers(0, 2))
    def turn(self, which: int) -> None:
        """Run the publisher's loop once."""
        self.pick(which).turn(self.now)

    @rule(seconds=st.sampled_from([SOON, LATER, TIMEOUT]))
    def advance(self, seconds: float) -> None:
        """Advance the time for all."""
        self.now += seconds
        self.exporter.now = self.now
        self.exporter.intake.expire(self.now)

    @rule(which=st.integers(0, 2), at=st.integers(0, 3), again=st.booleans())
    def arrive(self, which: int, at: int, again: bool) -> None:
        """Deliver a frame, perhaps before earlier ones, perhaps not for the last time."""
        process = self.pick(which)
        if process.up:
            at %= len(process.up)
            peer, frame = process.up[at] if again else process.up.pop(at)
            self.answer(process, self.exporter.receive(peer, frame, self.now))

    @rule(which=st.integers(0, 2), lost=st.booleans())
    def receive_answer(self, which: int, lost: bool) -> None:
        """Deliver or lose an answer."""
        process = self.pick(which)
        if process.down:
            peer, frame = process.down.pop(0)
            if not lost and peer == process.peer:
                process.sender.receive(frame, self.now)

    @rule(which=st.integers(0, 2))
    def lose(self, which: int) -> None:
        """Lose all frames on their way from an engine."""
        self.pick(which).up.clear()

    @rule(which=st.integers(0, 2))
    def cut(self, which: int) -> None:
        """Break a connection."""
        self.pick(which).sender.reopen = True

    @rule()
    def acknowledge(self) -> None:
        """Send the Acks that are due."""
        self.send_acks()

    @rule(rate=st.sampled_from([0.0, 0.01, 0.5]))
    def set_sample_rate(self, rate: float) -> None:
        """Change the exporter's sample rate of KV blocks."""
        self.rate = self.exporter.intake.receiver.kv_sample_rate = rate

    @rule()
    def take_snapshot(self) -> None:
        """Encode a snapshot without writing it."""
        self.exporter.written = list(self.exporter.capture.pieces())

    @precondition(lambda self: self.exporter.written is not None)
    @rule(reported=st.booleans())
    def rename_snapshot(self, reported: bool) -> None:
        """Write the snapshot; the exporter may die before it knows."""
        self.disk, self.exporter.written = self.exporter.written, None
        if reported:
            self.exporter.capture.mark_saved()
        else:
            self.start_exporter()

    @rule()
    def kill_exporter(self) -> None:
        """Kill the exporter with all that it had not saved."""
        self.start_exporter()

    @rule(which=st.integers(0, 2))
    def kill_engine(self, which: int) -> None:
        """Kill an engine process with all that it had not sent, or that the exporter loses later."""
        self.start_engine(self.pick(which).stream)

    @rule(which=st.integers(0, 2), lost=st.booleans())
    def close_engine(self, which: int, lost: bool) -> None:
        """Send a Bye, perhaps before the frames that precede it, and deliver frames again after it."""
        process = self.pick(which)
        process.turn(self.now)
        frames = process.up
        bye = process.peer, process.sender.bye("closed")
        process.up = [bye, bye, *frames] if lost else [*frames, bye, *frames]
        self.deliver_all(process)
        self.start_engine(process.stream)

    @precondition(lambda self: len(self.zombies) < MAX_ZOMBIES)
    @rule(which=st.integers(0, 2))
    def take_over(self, which: int) -> None:
        """Start a second process of the stream; the first one lives on."""
        self.zombies.append(self.pick(which))
        self.start_engine(self.pick(which).stream, lives=True)

    @rule()
    def run_replaced_processes(self) -> None:
        """Let replaced processes send and receive."""
        for zombie in self.zombies:
            self.round_trip(zombie)

    @rule(which=st.integers(0, 2), lost=st.booleans())
    def describe(self, which: int, lost: bool) -> None:
        """Describe a second engine; an Ack arrives at that moment, and both engines push."""
        self.work(which, 1, 2)
        self.apply_only(which, 1)
        process = self.pick(which)
        process.engines = [*process.engines[:1], info(f"late/{process.stream}")]
        process.sender.describe(process.engines)
        process.turn(self.now)
        if lost:
            process.up.clear()
        self.send_acks()
        self.deliver_answers(process)
        self.work(which, 2, 2)

    # Several steps at once: with single ones alone a search hardly gets past the handshake.

    @rule(which=st.integers(0, 2), count=st.integers(0, 3), rounds=st.integers(1, 3))
    def work(self, which: int, count: int, rounds: int) -> None:
        """Push, send, apply and answer."""
        for _ in range(rounds):
            if count:
                self.push(which, count, 1)
            self.round_trip(self.pick(which))

    @rule(which=st.integers(0, 2), count=st.integers(1, 3))
    def apply_only(self, which: int, count: int) -> None:
        """Push and apply items without an Ack."""
        process = self.pick(which)
        self.push(which, count, 1)
        process.turn(self.now)
        self.deliver_all(process)

    @rule(which=st.integers(0, 2))
    def repeat(self, which: int) -> None:
        """Deliver twice all that is on its way."""
        process = self.pick(which)
        process.turn(self.now)
        process.up *= 2
        self.deliver_all(process)

    @rule(which=st.integers(0, 2))
    def miss_one(self, which: int) -> None:
        """Lose the first of two frames."""
        process = self.pick(which)
        self.round_trip(process)
        for _ in range(2):
            self.push(which, 1, 1)
            process.turn(self.now)
        del process.up[:1]
        self.deliver_all(process)

    @precondition(lambda self: len(self.zombies) < MAX_ZOMBIES)
    @rule(which=st.integers(0, 2), count=st.integers(1, 3), frozen=st.booleans())
    def replace_while_applied(self, which: int, count: int, frozen: bool) -> None:
        """Replace a process whose items are applied but not acknowledged, and let it go on."""
        self.work(which, 0, 2)
        self.apply_only(which, count)
        self.take_over(which)
        zombie = self.zombies[-1]
        zombie.sender.reopen = True
        for number in range(16):
            self.advance(LATER * 2)
            if number >= 12 or not frozen:
                self.round_trip(zombie)
            self.work(which, count if number in (7, 15) else 0, 1)

    @rule(which=st.integers(0, 2), count=st.integers(1, 3), dies=st.booleans())
    def save_slowly(self, which: int, count: int, dies: bool) -> None:
        """Apply items while a snapshot is written, which does not include them."""
        pieces = list(self.exporter.capture.pieces())
        self.apply_only(which, count)
        self.disk, self.exporter.written = pieces, None
        self.exporter.capture.mark_saved()
        self.now += LATER
        self.send_acks()
        self.deliver_answers(self.pick(which))
        if dies:
            self.start_exporter()

    @rule()
    def save(self) -> None:
        """Write a snapshot and send the Acks."""
        self.exporter.written = None
        self.disk = list(self.exporter.capture.pieces())
        self.exporter.capture.mark_saved()
        self.send_acks()

    @rule(which=st.integers(0, 2))
    def overflow(self, which: int) -> None:
        """Push more than the ring holds while the exporter is unreachable."""
        process = self.pick(which)
        process.up.clear()
        self.push(which, 60, 1)
        process.turn(self.now)
        process.up.clear()

    @rule(late=st.booleans(), dies=st.sampled_from([None, None, "rendered", "taken", "renamed"]))
    def scrape(self, late: bool, dies: str | None) -> None:
        """Render a page, which is sent only once a snapshot at least as new is on disk."""
        page = self.exporter.page()
        if late:
            for process in self.processes.values():
                self.deliver_all(process)
        if dies == "rendered":
            return self.start_exporter()
        if self.exporter.capture.saved < self.exporter.capture.state:
            self.exporter.written = None
            pieces = list(self.exporter.capture.pieces())
            if dies == "taken":
                return self.start_exporter()
            self.disk = pieces
            if dies == "renamed":
                self.start_exporter()
            else:
                self.exporter.capture.mark_saved()
        return self.show(page)

    # What rules are made of.

    @property
    def has_folded(self) -> bool:
        """True if a process has folded items."""
        known = *self.processes.values(), *self.zombies, *self.ended
        return any(process.sender.folded for process in known)

    def show(self, page: Page) -> None:
        """Compare ``page`` with the last one and with what was pushed."""
        for engine, before in self.seen.items():
            after = page.get(engine, before)
            assert all(a >= b for a, b in zip(after, before, strict=True)), (engine, before, after)
            assert engine in page
        for engine, (tokens, *rest) in self.by_claim(page).items():
            assert tokens <= self.pushed[engine], (engine, tokens, self.pushed[engine])
            *requests, others = rest[: len(TENANTS) + 1]
            counts = rest[len(TENANTS) + 1 :]
            asked = [self.asked[engine, name] for name in TENANTS]
            # A folded item counts for the others: its sender knows no tenants.
            assert all(n <= most for n, most in zip(requests, asked, strict=True))
            assert sum(requests) + others <= sum(asked)
            assert sum(counts) == len(LATENCIES) * tokens
        self.seen = page

    def settle(self, alive: Sequence[Process]) -> None:
        """Run all processes without faults until they hold nothing; a handshake takes 18 s at most."""
        for _ in range(60):
            if all(p.sender.drained and p.sender.state is State.STREAMING for p in alive):
                break
            self.advance(LATER)
            for process in alive:
                self.round_trip(process)
            self.save()
            for process in alive:
                self.round_trip(process)
        self.show(self.exporter.page())

    @staticmethod
    def by_claim(page: Page) -> Page:
        """Return the sums over the servers that claim one id."""
        found: Page = {}
        for engine, counts in page.items():
            before = found.get(claimed(engine), (0,) * len(counts))
            found[claimed(engine)] = tuple(a + b for a, b in zip(before, counts, strict=True))
        return found

    def answer(self, process: Process, replies: list[tuple[bytes, bytes]]) -> None:
        """Send the replies to their connections."""
        everyone = [*self.processes.values(), *self.zombies]
        for to, frame in replies:
            owner = next((p for p in everyone if p.peer == to), process)
            owner.down.append((to, frame))

    def send_acks(self) -> None:
        """Send the Acks that are due."""
        for to, ack in self.exporter.intake.receiver.acks(self.now):
            for process in (*self.processes.values(), *self.zombies):
                if process.peer == to:
                    process.down.append((to, encode(ack)))

    def deliver_all(self, process: Process) -> None:
        """Deliver all frames of an engine."""
        while process.up:
            self.answer(process, self.exporter.receive(*process.up.pop(0), self.now))

    def round_trip(self, process: Process) -> None:
        """Deliver all frames of an engine, and all answers."""
        process.turn(self.now)
        self.deliver_all(process)
        self.deliver_answers(process)

    def deliver_answers(self, process: Process) -> None:
        """Deliver all answers to an engine."""
        while process.down:
            peer, frame = process.down.pop(0)
            if peer == process.peer:
                process.sender.receive(frame, self.now)

    @invariant()
    def rings_are_bounded(self) -> None:
        """No sender holds more than its ring."""
        for process in getattr(self, "processes", {}).values():
            assert process.sender.held_bytes <= RING

    def teardown(self) -> None:
        """Without faults everything that was pushed is exposed, and no sender holds anything."""
        if not hasattr(self, "processes"):
            return
        for which in range(len(STREAMS)):
            # A lost Ack with another sample rate is made up for by the Ack of the next items.
            self.push(which, 1, 1)
        alive = *self.processes.values(), *self.zombies
        self.settle(alive)
        shown_by = self.by_claim(self.seen)
        for engine, pushed in self.pushed.items():
            shown, *requests = shown_by.get(engine, (0,))[: len(TENANTS) + 2]
            everything = 2 * pushed
            assert shown <= pushed
            assert everything - self.uncertain[engine] <= shown + sum(requests) <= everything
            if not (self.has_folded or self.uncertain[engine]):
                assert requests == [*(self.asked[engine, name] for name in TENANTS), 0]
        for process in alive:
            assert process.sender.drained
            assert process.sender.state is State.STREAMING
        for process in self.processes.values():
            assert process.sender.kv_sample_rate == self.rate
        if not any(self.uncertain.values()):
            assert self.exporter.intake.metrics.value("sidestep_lost_items_total") == 0


Delivery.TestCase.settings = settings(
    max_examples=2 * settings().max_examples,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestDelivery = Delivery.TestCase
