"""Forged messages of every kind, whole and damaged, in any order, do no harm."""

from __future__ import annotations

import os
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import forgery
from harm import World
from sidestep.engines.vllm.wire import VllmRejection, VllmSleep, VllmStep
from sidestep.metrics.totals_codec import encode_totals, totals_of
from sidestep.protocol.block_events import BlockEvents, CacheEvents
from sidestep.protocol.engine_totals import Totals
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import CORE, FRONT_END, Bye, EngineInfo, Heartbeat, Hello
from sidestep.protocol.request_events import RequestEvents
from sidestep.protocol.self_described import Samples
from sidestep_adapters.streams.wire import ForwardPass, LoadStat

ITEMS = (
    VllmStep,
    VllmSleep,
    VllmRejection,
    Samples,
    RequestEvents,
    BlockEvents,
    CacheEvents,
    ForwardPass,
    LoadStat,
)
items = forgery.encoded(st.sampled_from(ITEMS).flatmap(forgery.struct))
infos = st.builds(
    EngineInfo,
    st.sampled_from(["one", "two", "three"]),
    st.sampled_from(["vllm", "vllm", "stream"]),
    st.dictionaries(
        st.sampled_from(["pod", "zone"]), st.sampled_from(["", "a", "b"]), max_size=2
    ).map(lambda more: {"engine": "0", "model_name": "m", **more}),
    features=st.lists(st.sampled_from(["engine_core", "spec_decode", "lora"]), max_size=2),
    closed=st.dictionaries(
        st.just("position"), st.lists(st.text(max_size=2), max_size=3), max_size=1
    ),
    bounds=st.dictionaries(
        st.sampled_from(["request_tokens", "inter_token_latency"]),
        st.sampled_from([[0.5, 1.0], [0.0], [1.0, 2.0, 3.0]]),
        max_size=2,
    ),
    role=st.sampled_from(["", CORE, FRONT_END]),
)


class Attacker:
    """Sender of two streams that keeps correct seqs, so that its messages are accepted."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.incarnations = {"one": 1, "two": 2}
        self.seqs = {"one": 0, "two": 0}

    def send(self, stream: str, *parts: Any) -> None:
        """Send a message of these fields."""
        self.world.take(stream.encode(), forgery.encode(list(parts)))

    def send_hello(self, stream: str, engines: list[EngineInfo], first: int = 1) -> None:
        """Send a valid Hello."""
        said = (
            "H",
            VERSION,
            stream,
            self.incarnations[stream],
            1,
            self.seqs[stream] + first,
            engines,
        )
        self.send(stream, *said)
        self.seqs[stream] += first - 1

    def restart(self, stream: str) -> None:
        """Switch to another incarnation, which has sent no Hello."""
        self.incarnations[stream] += 10
        self.seqs[stream] = 0

    def batch(self, stream: str, found: list[bytes], skip: int = 0) -> None:
        """Send items, with the next seqs or others."""
        first = self.seqs[stream] + 1 + skip
        self.send(
            stream, "B", self.incarnations[stream], first, [msgspec.Raw(item) for item in found]
        )
        self.seqs[stream] += 0 if skip else len(found)

    def aggregate(self, stream: str, found: list[bytes], count: int) -> None:
        """Send records as ``count`` folded items."""
        first, last = self.seqs[stream] + 1, self.seqs[stream] + count
        records = [msgspec.Raw(record) for record in found]
        self.send(stream, "G", self.incarnations[stream], first, last, records)
        self.seqs[stream] += count

    def records(self, stream: str, data: st.DataObject) -> list[bytes]:
        """Return records of an engine of the stream, perhaps with one field forged."""
        engines = self.world.intake.bindings.engines.get(self.incarnations[stream], [])
        if not engines:
            return []
        engine = data.draw(st.sampled_from(engines))
        totals = totals_of(engine)
        if data.draw(st.booleans()):
            return [encode_totals(engine, totals)]
        head, plain = msgspec.msgpack.decode(encode_totals(engine, totals))
        fields = msgspec.inspect.type_info(Totals).fields  # type: ignore[attr-defined]
        changed = data.draw(st.integers(0, len(fields) - 1))
        value = data.draw(forgery.of(fields[changed].type))
        if isinstance(value, list) and isinstance(plain[changed], list) and plain[changed]:
            # In the column's place, so that it has its length.
            for one in value:
                plain[changed][data.draw(st.integers(0, len(plain[changed]) - 1))] = one
        else:
            plain[changed] = value
        return [forgery.encode([head, plain])]


EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "40"))
STREAMS = st.sampled_from(["one", "two"])


def attack(attacker: Attacker, data: st.DataObject) -> None:  # noqa: C901 - a case for each deed
    """Do one thing that a hostile peer may do."""
    stream = data.draw(STREAMS)
    world = attacker.world
    match data.draw(st.sampled_from("iiiiiiiiaaaaaahHrkbfpst")):
        case "i":
            found = data.draw(st.lists(items, min_size=1, max_size=9))
            attacker.batch(stream, found, data.draw(st.sampled_from([0] * 8 + [1, -1])))
        case "a":
            attacker.aggregate(
                stream, attacker.records(stream, data), data.draw(st.sampled_from([1, 1, 1, 9]))
            )
        case "h":
            attacker.send_hello(
                stream,
                data.draw(st.lists(infos, max_size=3)),
                data.draw(st.sampled_from([1, 1, 5])),
            )
        case "H":
            world.take(stream.encode(), data.draw(forgery.encoded(forgery.struct(Hello))))
        case "r":
            attacker.restart(stream)
            attacker.send_hello(stream, data.draw(st.lists(infos, max_size=3)))
        case "k":
            said = data.draw(forgery.struct(Heartbeat))
            attacker.send(stream, "b", attacker.incarnations[stream], *said[2:])
        case "b":
            attacker.send(stream, *data.draw(forgery.struct(Bye)))
            attacker.send(stream, "X", attacker.incarnations[stream], attacker.seqs[stream])
        case "f":
            world.take(stream.encode(), *data.draw(st.lists(st.binary(max_size=9), max_size=3)))
        case "p":
            world.advance(data.draw(st.sampled_from([1.0, 31.0, 301.0])))
        case "s":
            # Items of one kind, damaged: those of another are refused at their first byte.
            attacker.batch(stream, data.draw(st.lists(forgery.bent(items), max_size=3)))
        case _:
            frame = forgery.encode(
                ["B", attacker.incarnations[stream], attacker.seqs[stream] + 1, []]
            )
            world.take(stream.encode(), data.draw(forgery.bent(st.just(frame))))


@settings(
    max_examples=EXAMPLES,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_no_sequence_of_messages_does_harm(data: st.DataObject) -> None:
    """Nothing raises, no counter decreases, page and snapshot stay valid, and counts of others exact."""
    world = World(scale=data.draw(st.booleans()))
    attacker = Attacker(world)
    for stream in attacker.seqs:
        attacker.send_hello(stream, data.draw(st.lists(infos, min_size=1, max_size=3)))
    world.be_honest()
    for _ in range(data.draw(st.integers(3, 12))):
        attack(attacker, data)
        world.be_honest()
        world.check_counters()
        world.check_honest()
    world.check()
