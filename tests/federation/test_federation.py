"""What another exporter's page shows of engines that it does not count itself."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from downstream import RUNNING, TOKENS, info, leaf, push, step, up, value
from intakes import steps
from sidestep.engines.triton.wire import InferenceStats, ModelStats, Timed, TritonStats
from sidestep.errors import WireError
from sidestep.federation import pieces, store
from sidestep.federation.messages import (
    Forward,
    Standing,
    decode_forward,
    encode_forward,
    is_forward,
)
from sidestep.federation.outbox import REFRESH
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.metrics.record_codec import decode_record
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, GAUGES_EXPIRE_SECONDS, MAX_ENGINES
from sidestep.protocol.messages import Bye, EngineInfo, Heartbeat, Hello, encode
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.transport.guard import Guard
from trees import Node, frames_of, refresh, samples, wait


def test_a_page_of_all_dialects_is_the_same_elsewhere() -> None:
    """Two exporters away, line by line; what only the first can compute as well."""
    first, between, last = Node("a", legacy=True), Node("b"), Node("c", legacy=True)
    for run in ("core", "core_lora", "sglang", "sglang_dp"):
        first.feed(steps(run))
    first.greet("t", [EngineInfo("t/m/1", "triton", {"model": "m", "version": "1"})])
    timed = InferenceStats(success=Timed(3, 3000), queue=Timed(3, 100))
    push(first, TritonStats(0, 1.0, 1.0, ModelStats(0, 3, 3, timed)), stream="t")
    family = Family("my_seconds", "histogram", ["kind"], help="Mine.", bounds=[0.5, 1.0])
    family.samples.append(Sample(["x"], observations=[0.1, 0.7, 9.0]))
    first.greet("own", [info("9")])
    push(first, Samples(0, 1.0, [family]), stream="own")
    for engine in first.intake.registry.engines.values():
        if engine.layout.dialect == "vllm":
            engine.throughput = (3.5, 4.5)
    first.tell(between)
    between.tell(last)

    assert samples(last.page) == samples(first.page)
    assert len(samples(first.page)) > 1500
    assert last.rejected == between.rejected == {}


def test_an_engine_of_native_histograms_is_the_same_elsewhere() -> None:
    """Bucket by bucket, and since the same moment."""
    first = leaf("a", 1, step(3), step(70), native=NativeSettings({}, lambda: 100.0))
    last = Node("b", native=NativeSettings({}, lambda: 200.0))
    first.tell(last)
    before, after = (
        next(iter(node.intake.registry.engines.values())).histograms for node in (first, last)
    )

    assert [h and h.to_wire() for h in before] == [h and h.to_wire() for h in after]
    assert any(isinstance(h, NativeHistogram) and h.buckets for h in after)


def test_a_coarser_histogram_elsewhere_has_the_same_counts() -> None:
    """Its schema is the one of whoever sees less."""
    first = leaf(
        "a", 1, step(3), step(70), native=NativeSettings({"inter_token_latency": 4}, lambda: 1.0)
    )
    last = Node("b", native=NativeSettings({"inter_token_latency": 1}, lambda: 1.0))
    first.tell(last)
    (engine,) = last.intake.registry.engines.values()
    row = [row.name for row in engine.layout.histograms].index("vllm:inter_token_latency_seconds")
    found = engine.histograms[row]

    assert isinstance(found, NativeHistogram)
    assert found.schema == 1
    assert sum(found.buckets.values()) == sum(found.counts) == 73


def test_bounds_are_those_of_whoever_counts() -> None:
    """Its own configuration has set them, which no hello says."""
    first, last = Node("a"), Node("b")
    first.intake.registry.overrides = {"inter_token_latency": (0.002, 0.05)}
    first.greet("s", [info()])
    push(first, step(3), step(20))
    first.tell(last)

    assert samples(last.page) == samples(first.page)
    assert 'vllm:inter_token_latency_seconds_bucket{engine="0",model_name="m",le="0.05"} 23' in (
        last.page
    )


def test_what_an_exporter_does_not_count_is_not_shown_at_0_elsewhere() -> None:
    """Nobody knows how often it has happened."""
    first, last = leaf("a", 1, step(3)), Node("b")
    (due,) = first.due()
    record = msgspec.msgpack.decode(due.message.data)
    names = [name for name, _ in record[0][2]]
    record[0][2][names.index(TOKENS)][0] = "vllm:of_another_release_total"
    due.message.data = msgspec.msgpack.encode(record)
    for frame in frames_of(due):
        last.hear(frame)

    missing = samples(first.page).keys() - samples(last.page).keys()
    assert missing == {f'{TOKENS}{{engine="0",model_name="m"}}'}


def test_a_word_that_is_lost_doubled_or_late_changes_nothing() -> None:
    """Each says all there is; the latest stands."""
    node, root = leaf("leaf", 1, step(3)), Node("root")
    early = node.frames()
    push(node, step(4))
    late = node.frames()
    for frame in late:
        root.hear(frame)
    version = root.intake.registry.version
    for frame in (*early, *late, *early):
        root.hear(frame)

    assert value(root, TOKENS) == 7
    assert root.intake.registry.version == version
    push(node, step(5))
    node.frames()
    refresh(node, root)
    assert value(root, TOKENS) == 12
    assert root.intake.registry.version > version


def test_a_restored_exporter_continues_its_epoch() -> None:
    """It says what it had said, and more."""
    node, root = leaf("leaf", 1, step(3), state=True), Node("root")
    node.save()
    node.tell(root)
    push(node, step(100))
    assert node.frames() == []
    again = Node("leaf", 2, state=True, disk=node.disk)
    assert again.frames() == []
    again.seqs = {"s": 1}
    again.greet("s", [info()])
    push(again, step(4))
    again.save()
    again.tell(root)

    assert value(root, TOKENS) == 7


def test_the_root_goes_on_with_its_snapshot() -> None:
    """Also with ended epochs; gauges wait for a record."""
    root = Node("root")
    leaf("leaf", 1, step(3, running=2)).tell(root)
    other = leaf("leaf", 2, step(5, running=9))
    other.tell(root)
    root.save()
    reborn = Node("root", 2, disk=root.disk)

    assert (value(reborn, TOKENS), value(reborn, RUNNING), up(reborn)) == (8, 0, [0.0])
    push(other, step(1))
    other.tell(reborn)
    assert (value(reborn, TOKENS), value(reborn, RUNNING), up(reborn)) == (9, 9, [1.0])
    reborn.save()
    assert samples(Node("root", 3, disk=reborn.disk).page).items() <= samples(reborn.page).items()


def test_engines_of_two_sources_are_two() -> None:
    """Though they look alike: the later one says where it is from."""
    root = Node("root")
    leaf("one", 1, step(3)).tell(root)
    leaf("two", 1, step(4)).tell(root)

    assert {
        f'{TOKENS}{{engine="0",model_name="m"}}': 3.0,
        f'{TOKENS}{{engine="0",model_name="m",origin="two/ns/m/0"}}': 4.0,
    }.items() <= samples(root.page).items()


def test_labels_are_added_on_the_way() -> None:
    """By each exporter its own; what an engine says itself stands."""
    first = Node("a", labels={"host": "h1", "rack": "r1"})
    first.greet("s", [info(), info("1", host="own")])
    push(first, step(3))
    between, last = Node("b", labels={"rack": "none", "zone": "z"}), Node("c")
    first.tell(between)
    between.tell(last)

    key = f'{TOKENS}{{engine="0",host="h1",model_name="m",rack="r1",zone="z"}}'
    assert samples(last.page)[key] == 3
    assert samples(last.page)[key.replace('"0"', '"1"').replace("h1", "own")] == 0
    assert f'{TOKENS}{{engine="0",model_name="m"}} 3' in first.page


def test_an_exporter_that_comes_back_with_other_labels_takes_its_counts_along() -> None:
    """Nothing of them stays under the old ones."""
    node, root = leaf("leaf", 1, step(3), state=True, labels={"host": "old"}), Node("root")
    node.save()
    node.tell(root)
    again = Node("leaf", 2, state=True, disk=node.disk, labels={"host": "new"})
    again.save()
    again.tell(root)

    assert 'host="old"' not in root.page
    assert value(root, TOKENS) == 3
    assert root.intake.registry.quota.series == 0


def test_silence_is_that_of_the_source() -> None:
    """However many pass its last word on, and however late."""
    node, between, root = leaf("leaf", 1, step(3, running=2)), Node("b"), Node("root")
    node.tell(between)
    wait(GAUGES_EXPIRE_SECONDS - 1, node, between, root)
    between.tell(root)
    assert (value(root, RUNNING), up(root)) == (2, [1.0])
    wait(2, between, root)

    assert (value(root, TOKENS), value(root, RUNNING), up(root)) == (3, 0, [0.0])
    refresh(between, root)
    assert value(root, RUNNING) == 0
    node.say("s", Heartbeat(1, 1, 0))
    refresh(node, between, root)
    assert (value(root, RUNNING), up(root)) == (2, [1.0])
    push(node, step(0, running=5))
    node.tell(between)
    wait(GAUGES_EXPIRE_SECONDS - 5, between, root)
    between.tell(root)
    assert value(root, RUNNING) == 5
    wait(5, between, root)
    assert value(root, RUNNING) == 0
    wait(ENGINE_EXPIRES_SECONDS - GAUGES_EXPIRE_SECONDS, between, root)
    assert root.page == ""
    late = Node("late", now=between.now)
    between.tell(late)
    assert late.page == ""
    refresh(node, between, root)
    assert value(root, TOKENS) == 3


def test_an_engine_that_was_away_is_the_same_when_it_is_back() -> None:
    """Though its source has nothing new to say."""
    node, root = Node("leaf"), Node("root")
    node.feed(steps("core"))
    node.tell(root)
    page = samples(root.page)
    wait(ENGINE_EXPIRES_SECONDS + 1, root)
    assert root.page == ""
    node.now = REFRESH
    node.tell(root)

    assert samples(root.page) == page == samples(node.page)


def test_what_the_leaf_has_limited_is_not_limited_again() -> None:
    """The label value for all others comes with the record."""
    node, root = leaf("leaf", 1, step(3)), Node("root")
    family = Family("my_total", "counter", ["which"])
    family.samples += [Sample([str(number)], 1) for number in range(70)]
    push(node, Samples(0, 1.0, [family]))
    node.tell(root)

    assert value(root, "my_total") == 70
    assert samples(root.page) == samples(node.page)
    assert node.intake.registry.limited["label_values"] == 6
    assert root.intake.registry.limited["label_values"] == 0


def test_there_is_a_bound_on_what_others_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before stays, and what cannot be kept leaves nothing behind."""
    root = Node("root")
    leaf("one", 1, step(3)).tell(root)
    monkeypatch.setattr(store, "MAX_BYTES", root.intake.federation.bytes + 100)
    leaf("two", 1, step(4)).tell(root)

    assert root.rejected == {("over_limit",): 1.0}
    assert value(root, TOKENS) == 3
    assert not root.intake.registry.retired


def test_an_engine_that_says_goodbye_is_down_elsewhere_at_once() -> None:
    """Its gauges go when they go there, and it is remembered as long."""
    node, root = leaf("leaf", 1, step(3, running=2)), Node("root")
    node.tell(root)
    node.say("s", Bye(1, 1))
    node.tell(root)
    assert (value(root, RUNNING), up(root)) == (2, [0.0])
    for _ in range(4):
        refresh(node, root)
    assert (value(root, TOKENS), value(root, RUNNING)) == (3, 0)
    for _ in range(int(ENGINE_EXPIRES_SECONDS / REFRESH)):
        refresh(node, root)

    assert node.page == root.page == ""
    assert len(root.intake.registry.retired) == 1
    node.restart("s")
    node.greet("s", [info()])
    push(node, step(4))
    node.tell(root)
    assert value(root, TOKENS) == 7


def test_a_large_record_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts once all of them are there, in whatever order; half a record never."""
    monkeypatch.setattr("sidestep.federation.messages.PIECE_BYTES", 3000)
    node = leaf("leaf", 1, step(3))
    old = node.frames()
    push(node, step(4))
    new = node.frames()
    assert len(new) == len(old) > 2
    for missing in range(len(new)):
        root = Node("root")
        for frame in (*old[:-1], *reversed(new[:missing]), *new[missing + 1 :], *old):
            root.hear(frame)
        assert root.page == ""
        root.hear(new[missing])

        assert value(root, TOKENS) == 7
        assert root.rejected == {}


def test_a_server_that_keeps_its_own_totals_is_not_counted_by_each_epoch() -> None:
    """Each of them was told all of it."""
    root = Node("root")
    for boot, requests in ((1, 5), (2, 7)):
        node = Node("leaf", boot)
        node.greet("t", [EngineInfo("t/m/1", "triton", {"model": "m", "version": "1"})])
        timed = InferenceStats(success=Timed(requests, requests))
        stats = ModelStats(0, requests, requests, timed)
        push(node, TritonStats(0, 1.0, 1.0, stats), stream="t")
        node.tell(root)

    assert value(root, "nv_inference_request_success") == 7


def test_what_comes_back_to_its_source_is_not_counted_again() -> None:
    """Two exporters that forward to each other."""
    one, two = leaf("one", 1, step(3)), leaf("two", 1, step(4))
    for _ in range(3):
        one.tell(two)
        two.tell(one)
        wait(REFRESH, one, two)

    assert value(one, TOKENS) == value(two, TOKENS) == 7
    assert one.due()
    one.tell(two)
    two.frames()
    assert len(one.due()) == len(two.due()) == 0


def test_an_engine_that_is_pushed_has_its_name_whoever_came_first() -> None:
    """And neither its counts nor those of another exporter's engine are refused for it."""
    node, root = leaf("leaf", 1, step(3)), Node("root", state=True)
    node.tell(root)
    name = next(iter(root.intake.registry.engines))
    root.greet("s", [EngineInfo(name, "vllm", {"engine": "0", "model_name": "m"})])
    push(root, step(7))
    push(node, step(20))
    node.tell(root)

    assert value(root, TOKENS) == 30
    assert root.rejected == {}
    root.save()
    again = Node("root", 2, state=True, disk=root.disk)
    assert value(again, TOKENS) == 30


def test_what_others_remember_costs_nothing_that_is_remembered_here_alone() -> None:
    """There is room for so many, and those who count remember theirs."""
    root = leaf("root", 1, step(9))
    root.say("s", Bye(root.incarnation("s"), 1))
    wait(ENGINE_EXPIRES_SECONDS + 1, root)
    (due,) = leaf("a", 1, step(3)).due()
    due.message.standing = Standing(former=True)
    for number in range(MAX_ENGINES + 10):
        due.message.engine = f"e{number}"
        root.hear(encode_forward(due.message))
    wait(1, root)
    root.greet("s", [info()])
    push(root, step(1))

    assert value(root, TOKENS) == 10
    assert root.rejected == {("over_limit",): 11.0}


def test_an_exporter_that_got_an_older_snapshot_is_heard_again() -> None:
    """It counts from there on, and is not taken for late."""
    first = leaf("a", 1, step(5), state=True)
    first.save()
    older, disk, root = first.disk, first.disk, Node("root")
    for boot in (2, 3):
        later = Node("a", boot, state=True, disk=disk)
        later.save()
        later.tell(root)
        disk = later.disk
    again = Node("a", 4, state=True, disk=older, wall=9.0)
    again.restart("s")
    again.greet("s", [info()])
    push(again, step(20))
    again.save()
    again.tell(root)

    assert value(root, TOKENS) == value(again, TOKENS) == 25


def test_what_a_snapshot_had_is_not_news_further_on() -> None:
    """Nobody was heard since, and so its gauges are not those of now."""
    node, between = leaf("a", 1, step(5, 3)), Node("b", state=True)
    node.tell(between)
    between.save()
    again, root = Node("b", 2, state=True, disk=between.disk, now=1e4), Node("root", now=1e4)
    again.tell(root)

    assert up(again) == up(root) == [0.0]
    assert value(root, RUNNING) == 0
    assert value(root, TOKENS) == 5


def test_pieces_that_hold_nothing_cost_something() -> None:
    """As many as there may be of them are kept, and no more."""
    root = Node("root")
    most = pieces.MAX_BYTES // pieces.PIECE_COST
    for engine in range(2 * most):
        root.hear(encode_forward(Forward(1, "a", f"e{engine}", 1, 1, 1, 0, 2, b"", Standing())))

    assert len(root.intake.federation._pieces) <= most


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"cache_config": {"a": "x\x00"}}, "bad_label"),
        ({f"n{i}": {f"l{j}": "v" * 256 for j in range(128)} for i in range(16)}, "over_limit"),
    ],
)
def test_a_record_says_no_more_than_a_hello_may(
    known: bool,
    said: dict[str, dict[str, str]],
    reason: str,
) -> None:
    """Neither the first one nor a later one."""
    node, root = leaf("leaf", 1, step(3)), Node("root")
    if known:
        node.tell(root)
    push(node, step(4))
    (due,) = node.due()
    record = decode_record(due.message.data)
    record.head.engine.info = said
    due.message.data = msgspec.msgpack.encode(record)
    root.hear(encode_forward(due.message))

    assert root.rejected == {(reason,): 1.0}
    assert value(root, TOKENS) == (3 if known else 0)


def test_an_epoch_is_a_positive_number() -> None:
    """A frame with another one is malformed."""
    (due,) = leaf("leaf", 1, step(3)).due()
    due.message.epoch = 0
    with pytest.raises(WireError, match=r"epoch|>= 1"):
        decode_forward(encode_forward(due.message))


def test_a_record_that_makes_no_sense_leaves_the_last_one() -> None:
    """And is counted by its reason."""
    node, root = leaf("leaf", 1, step(3)), Node("root")
    node.tell(root)
    push(node, step(4))
    (due,) = node.due()
    due.message.data = due.message.data[:-9]

    for frame in frames_of(due):
        root.hear(frame)

    assert root.rejected == {("bad_item",): 1.0}
    assert value(root, TOKENS) == 3


def test_a_restart_makes_nobody_heard_who_is_not() -> None:
    """An exporter on the way says again what a leaf had said that is gone since."""
    root, between = Node("root"), Node("between")
    node = leaf("leaf", 1, step(3, running=2))
    node.tell(between)
    between.tell(root)
    root.save()
    push(node, step(1, running=4))
    node.tell(between)
    wait(GAUGES_EXPIRE_SECONDS + 1, between)
    again = Node("root", 2, disk=root.disk, now=between.now, wall=1.0 + between.now)
    between.tell(again)

    assert value(again, TOKENS) == 4
    assert (up(again), value(again, RUNNING)) == ([0.0], 0)


def test_refusing_one_engine_silences_no_other() -> None:
    """However many are refused: they are well-formed."""
    root = Node("root")
    root.intake.guard = Guard(root.intake.metrics, lambda: 0.0, Authorized(), lambda: False)
    node = Node("leaf")
    node.greet("s", [info(str(number)) for number in range(200)])
    node.tell(root)

    assert len(root.intake.registry.engines) == 1
    assert root.rejected == {("unauthorised",): 199.0}


class Authorized:
    """One key, for one engine."""

    def __contains__(self, key: str) -> bool:
        return True

    def __len__(self) -> int:
        return 1

    def engines(self, key: str) -> list[str]:  # noqa: ARG002 - all have the same
        """Those that it may feed."""
        return ["ns/m/7"]


@given(st.data())
def test_whatever_a_record_says_it_is_nobodys_bug(data: st.DataObject) -> None:
    """It is shown, or counted by its reason; what was said before stands or goes, never half."""
    root = Node("root")
    leaf("one", 1, step(3)).tell(root)
    node = leaf("leaf", 1, step(3, running=2))
    (due,) = node.due()
    record = bytearray(due.message.data)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(record) - 1))
        record[place] = data.draw(st.integers(0, 255))
    due.message.data = bytes(record)
    for frame in frames_of(due):
        root.hear(frame)

    assert ("bug",) not in root.rejected
    assert f'{TOKENS}{{engine="0",model_name="m"}} 3' in root.page


@given(st.binary(max_size=200))
def test_other_frames_are_no_forwards(data: bytes) -> None:
    """Nor is what follows the tag, if it is nonsense."""
    for message in (Bye(1, 1), Heartbeat(1, 1, 0), Hello(1, "F", 1, 1, 1, [])):
        assert not is_forward(encode(message))
    for frame in (data, b"\x9d\xa1F" + data, b"\xdc\x00\x10\xa1F" + data):
        assert is_forward(frame) or frame == data
        with pytest.raises(WireError):
            decode_forward(frame)


def test_a_word_without_room_leaves_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other bounds would have the histograms begin anew."""
    first, root = leaf("leaf", 1, step(5)), Node("root")
    first.tell(root)
    before = samples(root.page)
    monkeypatch.setattr(store, "MAX_BYTES", 10)
    said = info()
    said.bounds = {"inter_token_latency": [9.0]}
    first.greet("s", [said])
    push(first, step(6))
    first.tell(root)
    assert root.rejected == {("over_limit",): 1.0}
    name = "vllm:inter_token_latency_seconds_"
    after = samples(root.page)
    assert {k: v for k, v in after.items() if k.startswith(name)} == {
        k: v for k, v in before.items() if k.startswith(name)
    }
