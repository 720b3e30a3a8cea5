"""Pages and counters of an upstream exporter."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from downstream import RUNNING, TOKENS, downstream, info, push, step, up, value
from intakes import steps
from nodes import Node, frames_of, refresh, samples, wait
from prefix_caches import BLOCK_SIZE, PrefixCache, conversations
from sidestep.engines.triton.wire import InferenceStats, ModelStats, Timed, TritonStats
from sidestep.errors import WireError
from sidestep.federation import messages, pieces, store
from sidestep.federation.messages import (
    EngineStatus,
    Forward,
    decode_forward,
    encode_forward,
    is_forward,
)
from sidestep.federation.outbox import REFRESH
from sidestep.metrics.kv_curves import INTERVAL, SIZES
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.metrics.record_codec import decode_record
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, GAUGES_EXPIRE_SECONDS, MAX_ENGINES
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.messages import Bye, EngineInfo, Heartbeat, Hello, encode
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep_adapters.publisher.cache_lookups import LookupEvents


def test_page_of_all_dialects_is_equal_two_exporters_upstream() -> None:
    """Every sample arrives, including gauges that only the first exporter can compute."""
    first, between, last = Node("a", legacy=True), Node("b"), Node("c", legacy=True)
    for run in ("core", "core_lora", "sglang", "sglang_dp"):
        first.feed(steps(run))
    first.send_hello("t", [EngineInfo("t/m/1", "triton", {"model": "m", "version": "1"})])
    timed = InferenceStats(success=Timed(3, 3000), queue=Timed(3, 100))
    push(first, TritonStats(0, 1.0, 1.0, ModelStats(0, 3, 3, timed)), stream="t")
    family = Family("my_seconds", "histogram", ["kind"], help="Mine.", bounds=[0.5, 1.0])
    family.samples.append(Sample(["x"], observations=[0.1, 0.7, 9.0]))
    first.send_hello("own", [info("9")])
    push(first, Samples(0, 1.0, [family]), stream="own")
    for engine in first.intake.registry.engines.values():
        if engine.layout.dialect == "vllm":
            engine.computed = {"prompt_throughput": 3.5, "generation_throughput": 4.5}
    first.send_hello("core", [info("8")])
    for item in lookups():
        push(first, item, stream="core")
    for call in range(len(first.intake.registry.engines) + 1):
        first.intake.curves.update(INTERVAL + call)
    first.forward_to(between)
    between.forward_to(last)

    assert samples(last.page) == samples(first.page)
    assert len(samples(first.page)) > 1500
    assert last.page.count("\nsidestep_kv_whatif_hit_ratio{") == len(SIZES)
    assert last.rejected == between.rejected == {}


def lookups() -> list[CacheLookups]:
    """Return the items of a few conversations."""
    events, cache = LookupEvents(BLOCK_SIZE, 100, 1, lambda: (b"key", 1.0)), PrefixCache(100)
    for number, request in enumerate(conversations(50, 1)):
        events.looked_up(number, 1.0, request.prompt, request.tokens, cache.admit(request))
        cache.release(request)
        events.released(number, 1.0, [*request.prompt, *request.output])
    return events.items(1.0)


def test_native_histograms_are_equal_upstream() -> None:
    """Buckets and creation times are those of the source."""
    first = downstream("a", 1, step(3), step(70), native=NativeSettings({}, lambda: 100.0))
    last = Node("b", native=NativeSettings({}, lambda: 200.0))
    first.forward_to(last)
    before, after = (
        next(iter(node.intake.registry.engines.values())).histograms for node in (first, last)
    )

    assert [h and h.to_wire() for h in before] == [h and h.to_wire() for h in after]
    assert any(isinstance(h, NativeHistogram) and h.buckets for h in after)


def test_coarser_schema_upstream_keeps_all_counts() -> None:
    """The upstream exporter merges buckets to its own schema."""
    first = downstream(
        "a", 1, step(3), step(70), native=NativeSettings({"inter_token_latency": 4}, lambda: 1.0)
    )
    last = Node("b", native=NativeSettings({"inter_token_latency": 1}, lambda: 1.0))
    first.forward_to(last)
    (engine,) = last.intake.registry.engines.values()
    row = [row.name for row in engine.layout.histograms].index("vllm:inter_token_latency_seconds")
    found = engine.histograms[row]

    assert isinstance(found, NativeHistogram)
    assert found.schema == 1
    assert sum(found.buckets.values()) == sum(found.counts) == 73


def test_bucket_bounds_are_those_of_the_source() -> None:
    """They are set in its configuration, and in no Hello."""
    first, last = Node("a"), Node("b")
    first.intake.registry.overrides = {"inter_token_latency": (0.002, 0.05)}
    first.send_hello("s", [info()])
    push(first, step(3), step(20))
    first.forward_to(last)

    assert samples(last.page) == samples(first.page)
    assert 'vllm:inter_token_latency_seconds_bucket{engine="0",model_name="m",le="0.05"} 23' in (
        last.page
    )


def test_series_unknown_to_the_source_are_absent_upstream() -> None:
    """They do not start at 0, since the true value is unknown."""
    first, last = downstream("a", 1, step(3)), Node("b")
    (due,) = first.due()
    record = msgspec.msgpack.decode(due.message.data)
    names = [name for name, _ in record[0][2]]
    record[0][2][names.index(TOKENS)][0] = "vllm:of_another_release_total"
    due.message.data = msgspec.msgpack.encode(record)
    for frame in frames_of(due):
        last.receive(frame)

    missing = samples(first.page).keys() - samples(last.page).keys()
    assert missing == {f'{TOKENS}{{engine="0",model_name="m"}}'}


def test_lost_repeated_or_late_records_change_nothing() -> None:
    """A record is cumulative, so the newest one is sufficient."""
    node, upstream = downstream("downstream", 1, step(3)), Node("upstream")
    early = node.frames()
    push(node, step(4))
    late = node.frames()
    for frame in late:
        upstream.receive(frame)
    version = upstream.intake.registry.version
    for frame in (*early, *late, *early):
        upstream.receive(frame)

    assert value(upstream, TOKENS) == 7
    assert upstream.intake.registry.version == version
    push(node, step(5))
    node.frames()
    refresh(node, upstream)
    assert value(upstream, TOKENS) == 12
    assert upstream.intake.registry.version > version


def test_restored_exporter_continues_its_epoch() -> None:
    """Its counters go on from the snapshot."""
    node, upstream = downstream("downstream", 1, step(3), state=True), Node("upstream")
    node.save()
    node.forward_to(upstream)
    push(node, step(100))
    assert node.frames() == []
    again = Node("downstream", 2, state=True, disk=node.disk)
    assert again.frames() == []
    again.seqs = {"s": 1}
    again.send_hello("s", [info()])
    push(again, step(4))
    again.save()
    again.forward_to(upstream)

    assert value(upstream, TOKENS) == 7


def test_upstream_exporter_continues_from_its_snapshot() -> None:
    """The snapshot includes ended epochs; gauges are hidden until a record arrives."""
    upstream = Node("upstream")
    downstream("downstream", 1, step(3, running=2)).forward_to(upstream)
    other = downstream("downstream", 2, step(5, running=9))
    other.forward_to(upstream)
    upstream.save()
    reborn = Node("upstream", 2, disk=upstream.disk)

    assert (value(reborn, TOKENS), value(reborn, RUNNING), up(reborn)) == (8, 0, [0.0])
    push(other, step(1))
    other.forward_to(reborn)
    assert (value(reborn, TOKENS), value(reborn, RUNNING), up(reborn)) == (9, 9, [1.0])
    reborn.save()
    assert (
        samples(Node("upstream", 3, disk=reborn.disk).page).items() <= samples(reborn.page).items()
    )


def test_equal_engines_of_two_sources_are_separate() -> None:
    """The later one gets the label ``origin``."""
    upstream = Node("upstream")
    downstream("one", 1, step(3)).forward_to(upstream)
    downstream("two", 1, step(4)).forward_to(upstream)

    assert {
        f'{TOKENS}{{engine="0",model_name="m"}}': 3.0,
        f'{TOKENS}{{engine="0",model_name="m",origin="two/ns/m/0"}}': 4.0,
    }.items() <= samples(upstream.page).items()


def test_every_exporter_adds_its_labels() -> None:
    """The engine's own label wins over an added one, and the nearest exporter's over later ones."""
    first = Node("a", labels={"host": "h1", "rack": "r1"})
    first.send_hello("s", [info(), info("1", host="own")])
    push(first, step(3))
    between, last = Node("b", labels={"rack": "none", "zone": "z"}), Node("c")
    first.forward_to(between)
    between.forward_to(last)

    key = f'{TOKENS}{{engine="0",host="h1",model_name="m",rack="r1",zone="z"}}'
    assert samples(last.page)[key] == 3
    assert samples(last.page)[key.replace('"0"', '"1"').replace("h1", "own")] == 0
    assert f'{TOKENS}{{engine="0",model_name="m"}} 3' in first.page


def test_counters_move_to_changed_labels() -> None:
    """No series with the old labels remains."""
    node, upstream = (
        downstream("downstream", 1, step(3), state=True, labels={"host": "old"}),
        Node("upstream"),
    )
    node.save()
    node.forward_to(upstream)
    again = Node("downstream", 2, state=True, disk=node.disk, labels={"host": "new"})
    again.save()
    again.forward_to(upstream)

    assert 'host="old"' not in upstream.page
    assert value(upstream, TOKENS) == 3
    assert upstream.intake.registry.quota.series == 0


def test_gauges_expire_by_the_age_of_the_record() -> None:
    """The age counts from the source, however many exporters and seconds are in between."""
    node, between, upstream = (
        downstream("downstream", 1, step(3, running=2)),
        Node("b"),
        Node("upstream"),
    )
    node.forward_to(between)
    wait(GAUGES_EXPIRE_SECONDS - 1, node, between, upstream)
    between.forward_to(upstream)
    assert (value(upstream, RUNNING), up(upstream)) == (2, [1.0])
    wait(2, between, upstream)

    assert (value(upstream, TOKENS), value(upstream, RUNNING), up(upstream)) == (3, 0, [0.0])
    refresh(between, upstream)
    assert value(upstream, RUNNING) == 0
    node.send("s", Heartbeat(1, 1, 0))
    refresh(node, between, upstream)
    assert (value(upstream, RUNNING), up(upstream)) == (2, [1.0])
    push(node, step(0, running=5))
    node.forward_to(between)
    wait(GAUGES_EXPIRE_SECONDS - 5, between, upstream)
    between.forward_to(upstream)
    assert value(upstream, RUNNING) == 5
    wait(5, between, upstream)
    assert value(upstream, RUNNING) == 0
    wait(ENGINE_EXPIRES_SECONDS - GAUGES_EXPIRE_SECONDS, between, upstream)
    assert upstream.page == ""
    late = Node("late", now=between.now)
    between.forward_to(late)
    assert late.page == ""
    refresh(node, between, upstream)
    assert value(upstream, TOKENS) == 3


def test_expired_engine_returns_with_the_next_unchanged_record() -> None:
    """The page is then the same as before."""
    node, upstream = Node("downstream"), Node("upstream")
    node.feed(steps("core"))
    node.forward_to(upstream)
    page = samples(upstream.page)
    wait(ENGINE_EXPIRES_SECONDS + 1, upstream)
    assert upstream.page == ""
    node.now = REFRESH
    node.forward_to(upstream)

    assert samples(upstream.page) == page == samples(node.page)


def test_updates_limited_downstream_are_not_limited_again() -> None:
    """The child ``__other__`` comes with the record."""
    node, upstream = downstream("downstream", 1, step(3)), Node("upstream")
    family = Family("my_total", "counter", ["which"])
    family.samples += [Sample([str(number)], 1) for number in range(70)]
    push(node, Samples(0, 1.0, [family]))
    node.forward_to(upstream)

    assert value(upstream, "my_total") == 70
    assert samples(upstream.page) == samples(node.page)
    assert node.intake.registry.limited["label_values"] == 6
    assert upstream.intake.registry.limited["label_values"] == 0


def test_total_size_of_records_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known engines stay, and the rejected one leaves nothing behind."""
    upstream = Node("upstream")
    downstream("one", 1, step(3)).forward_to(upstream)
    monkeypatch.setattr(store, "MAX_BYTES", upstream.intake.federation.bytes + 100)
    downstream("two", 1, step(4)).forward_to(upstream)

    assert upstream.rejected == {("over_limit",): 1.0}
    assert value(upstream, TOKENS) == 3
    assert not upstream.intake.registry.retired


def test_engine_that_ends_is_down_upstream_at_once() -> None:
    """Its gauges and series expire as they do downstream, and its totals are kept."""
    node, upstream = downstream("downstream", 1, step(3, running=2)), Node("upstream")
    node.forward_to(upstream)
    node.send("s", Bye(1, 1))
    node.forward_to(upstream)
    assert (value(upstream, RUNNING), up(upstream)) == (2, [0.0])
    for _ in range(4):
        refresh(node, upstream)
    assert (value(upstream, TOKENS), value(upstream, RUNNING)) == (3, 0)
    for _ in range(int(ENGINE_EXPIRES_SECONDS / REFRESH)):
        refresh(node, upstream)

    assert node.page == upstream.page == ""
    assert len(upstream.intake.registry.retired) == 1
    node.restart("s")
    node.send_hello("s", [info()])
    push(node, step(4))
    node.forward_to(upstream)
    assert value(upstream, TOKENS) == 7


def test_large_record_is_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large record is applied once all pieces have arrived, in any order, and never partially."""
    monkeypatch.setattr(messages, "PIECE_BYTES", 3000)
    node = downstream("downstream", 1, step(3))
    old = node.frames()
    push(node, step(4))
    new = node.frames()
    assert len(new) == len(old) > 2
    for missing in range(len(new)):
        upstream = Node("upstream")
        for frame in (*old[:-1], *reversed(new[:missing]), *new[missing + 1 :], *old):
            upstream.receive(frame)
        assert upstream.page == ""
        upstream.receive(new[missing])

        assert value(upstream, TOKENS) == 7
        assert upstream.rejected == {}


def test_totals_of_a_polled_server_are_not_added_up_over_epochs() -> None:
    """Each epoch includes all of them."""
    upstream = Node("upstream")
    for boot, requests in ((1, 5), (2, 7)):
        node = Node("downstream", boot)
        node.send_hello("t", [EngineInfo("t/m/1", "triton", {"model": "m", "version": "1"})])
        timed = InferenceStats(success=Timed(requests, requests))
        stats = ModelStats(0, requests, requests, timed)
        push(node, TritonStats(0, 1.0, 1.0, stats), stream="t")
        node.forward_to(upstream)

    assert value(upstream, "nv_inference_request_success") == 7


def test_own_records_are_ignored() -> None:
    """Two exporters may forward to each other."""
    one, two = downstream("one", 1, step(3)), downstream("two", 1, step(4))
    for _ in range(3):
        one.forward_to(two)
        two.forward_to(one)
        wait(REFRESH, one, two)

    assert value(one, TOKENS) == value(two, TOKENS) == 7
    assert one.due()
    one.forward_to(two)
    two.frames()
    assert len(one.due()) == len(two.due()) == 0


def test_federated_engine_gives_up_the_identity_of_a_pushed_one() -> None:
    """Neither engine loses counts or is rejected."""
    node, upstream = downstream("downstream", 1, step(3)), Node("upstream", state=True)
    node.forward_to(upstream)
    name = next(iter(upstream.intake.registry.engines))
    upstream.send_hello("s", [EngineInfo(name, "vllm", {"engine": "0", "model_name": "m"})])
    push(upstream, step(7))
    push(node, step(20))
    node.forward_to(upstream)

    assert value(upstream, TOKENS) == 30
    assert upstream.rejected == {}
    upstream.save()
    again = Node("upstream", 2, state=True, disk=upstream.disk)
    assert value(again, TOKENS) == 30


def test_retired_engines_of_other_exporters_evict_no_own_ones() -> None:
    """The other exporter keeps their totals, too."""
    upstream = downstream("upstream", 1, step(9))
    upstream.send("s", Bye(upstream.incarnation("s"), 1))
    wait(ENGINE_EXPIRES_SECONDS + 1, upstream)
    (due,) = downstream("a", 1, step(3)).due()
    due.message.status = EngineStatus(retired=True)
    for number in range(MAX_ENGINES + 10):
        due.message.engine = f"e{number}"
        upstream.receive(encode_forward(due.message))
    wait(1, upstream)
    upstream.send_hello("s", [info()])
    push(upstream, step(1))

    assert value(upstream, TOKENS) == 10
    assert upstream.rejected == {("over_limit",): 11.0}


def test_exporter_restored_from_an_older_snapshot_is_accepted() -> None:
    """Its run is higher than that of the processes in between."""
    first = downstream("a", 1, step(5), state=True)
    first.save()
    older, disk, upstream = first.disk, first.disk, Node("upstream")
    for boot in (2, 3):
        later = Node("a", boot, state=True, disk=disk)
        later.save()
        later.forward_to(upstream)
        disk = later.disk
    again = Node("a", 4, state=True, disk=older, wall=9.0)
    again.restart("s")
    again.send_hello("s", [info()])
    push(again, step(20))
    again.save()
    again.forward_to(upstream)

    assert value(upstream, TOKENS) == value(again, TOKENS) == 25


def test_restored_records_are_forwarded_as_old() -> None:
    """Gauges from a snapshot are stale at every exporter."""
    node, between = downstream("a", 1, step(5, 3)), Node("b", state=True)
    node.forward_to(between)
    between.save()
    again, upstream = (
        Node("b", 2, state=True, disk=between.disk, now=1e4),
        Node("upstream", now=1e4),
    )
    again.forward_to(upstream)

    assert up(again) == up(upstream) == [0.0]
    assert value(upstream, RUNNING) == 0
    assert value(upstream, TOKENS) == 5


def test_number_of_buffered_pieces_is_limited() -> None:
    """Empty pieces count, too."""
    most = pieces.MAX_BYTES // pieces.PIECE_COST
    found = pieces.Pieces()

    def add(engine: int, piece: int) -> bytes | None:
        return found.add(Forward(1, "a", f"e{engine}", 1, 1, 1, piece, 2, b"", EngineStatus()))

    for engine in range(2 * most):
        add(engine, 0)
    completed = [add(engine, 1) is not None for engine in reversed(range(2 * most))]

    assert completed == [True] * most + [False] * most


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ({"cache_config": {"a": "x\x00"}}, "not_printable"),
        ({f"n{i}": {f"l{j}": "v" * 256 for j in range(128)} for i in range(16)}, "over_limit"),
    ],
)
def test_description_limits_of_a_hello_hold_for_records(
    known: bool,
    description: dict[str, dict[str, str]],
    reason: str,
) -> None:
    """They hold for the first record and for later ones."""
    node, upstream = downstream("downstream", 1, step(3)), Node("upstream")
    if known:
        node.forward_to(upstream)
    push(node, step(4))
    (due,) = node.due()
    record = decode_record(due.message.data)
    record.head.engine.info = description
    due.message.data = msgspec.msgpack.encode(record)
    upstream.receive(encode_forward(due.message))

    assert upstream.rejected == {(reason,): 1.0}
    assert value(upstream, TOKENS) == (3 if known else 0)


def test_epoch_0_is_rejected() -> None:
    """An epoch is a positive number."""
    (due,) = downstream("downstream", 1, step(3)).due()
    due.message.epoch = 0
    with pytest.raises(WireError, match=r"epoch|>= 1"):
        decode_forward(encode_forward(due.message))


def test_restart_does_not_make_an_unreachable_source_current() -> None:
    """An exporter in between forwards an old record again."""
    upstream, between = Node("upstream"), Node("between")
    node = downstream("downstream", 1, step(3, running=2))
    node.forward_to(between)
    between.forward_to(upstream)
    upstream.save()
    push(node, step(1, running=4))
    node.forward_to(between)
    wait(GAUGES_EXPIRE_SECONDS + 1, between)
    again = Node("upstream", 2, disk=upstream.disk, now=between.now, wall=1.0 + between.now)
    between.forward_to(again)

    assert value(again, TOKENS) == 4
    assert (up(again), value(again, RUNNING)) == ([0.0], 0)


@given(st.data())
def test_corrupted_record_is_applied_or_rejected(data: st.DataObject) -> None:
    """A corrupted record never raises an unexpected error, and never changes other engines."""
    upstream = Node("upstream")
    downstream("one", 1, step(3)).forward_to(upstream)
    node = downstream("downstream", 1, step(3, running=2))
    (due,) = node.due()
    record = bytearray(due.message.data)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(record) - 1))
        record[place] = data.draw(st.integers(0, 255))
    due.message.data = bytes(record)
    for frame in frames_of(due):
        upstream.receive(frame)

    assert ("bug",) not in upstream.rejected
    assert f'{TOKENS}{{engine="0",model_name="m"}} 3' in upstream.page


@given(st.binary(max_size=200))
def test_other_frames_are_not_taken_for_forwards(data: bytes) -> None:
    """Garbage after the tag is rejected."""
    for message in (Bye(1, 1), Heartbeat(1, 1, 0), Hello(1, "F", 1, 1, 1, [])):
        assert not is_forward(encode(message))
    for frame in (data, b"\x9d\xa1F" + data, b"\xdc\x00\x10\xa1F" + data):
        assert is_forward(frame) or frame == data
        with pytest.raises(WireError):
            decode_forward(frame)


def test_record_over_the_size_limit_resets_no_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its changed bounds are not applied."""
    first, upstream = downstream("downstream", 1, step(5)), Node("upstream")
    first.forward_to(upstream)
    before = samples(upstream.page)
    monkeypatch.setattr(store, "MAX_BYTES", 10)
    description = info()
    description.bounds = {"inter_token_latency": [9.0]}
    first.send_hello("s", [description])
    push(first, step(6))
    first.forward_to(upstream)
    assert upstream.rejected == {("over_limit",): 1.0}
    name = "vllm:inter_token_latency_seconds_"
    after = samples(upstream.page)
    assert {k: v for k, v in after.items() if k.startswith(name)} == {
        k: v for k, v in before.items() if k.startswith(name)
    }
