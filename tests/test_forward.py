"""What another exporter's page shows of engines that it does not count itself."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intakes import steps
from sidestep.engines.items import Item, VllmStep, encode_item
from sidestep.engines.triton.wire import InferenceStats, ModelStats, Timed, TritonStats
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.errors import WireError
from sidestep.federation import lives
from sidestep.federation import store as forwarded
from sidestep.federation.messages import (
    Forward,
    Standing,
    decode_forward,
    encode_forward,
    is_forward,
)
from sidestep.federation.outgoing import REFRESH
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.metrics.record_codec import decode_record
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, GAUGES_EXPIRE_SECONDS, MAX_ENGINES
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import Bye, EngineInfo, Heartbeat, Hello, encode
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.transport.guard import Guard
from trees import Node, frames_of, refresh, samples, wait

TOKENS = "vllm:generation_tokens_total"
RUNNING = "vllm:num_requests_running"


def info(engine: str = "0", **labels: str) -> EngineInfo:
    """Of vLLM."""
    return EngineInfo(f"ns/m/{engine}", "vllm", {"engine": engine, "model_name": "m", **labels})


def step(tokens: int, running: int | None = None, stamp: float = 1.0) -> VllmStep:
    """A step with latencies, and a gauge where it is given."""
    stats = None if running is None else SchedulerStats(num_running_reqs=running)
    iteration = IterationStats(tokens, inter_token_latencies_iter=[0.001 * tokens] * tokens)
    return VllmStep(0, stamp, 1.0, stats, iteration)


def push(node: Node, *items: Item, stream: str = "s") -> None:
    """Items of a stream that has greeted."""
    node.items(stream, [encode_item(item) for item in items])


def leaf(name: str = "leaf", boot: int = 1, *items: Item, **options: object) -> Node:
    """An exporter with one engine."""
    node = Node(name, boot, **options)  # type: ignore[arg-type]
    node.greet("s", [info()])
    push(node, *items)
    return node


def value(node: Node, name: str) -> float:
    """Of all series of a family on the page together."""
    found = samples(node.page)
    return sum(number for key, number in found.items() if key.partition("{")[0] == name)


def up(node: Node) -> list[float]:
    """``sidestep_engine_up`` of all engines."""
    found = (m for m in node.intake.metrics.collect() if m.name == "sidestep_engine_up")
    return [sample.value for family in found for sample in family.samples]


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


def test_a_new_life_adds_to_those_before() -> None:
    """An exporter that starts at 0 has not taken anything back."""
    words = [leaf("leaf", boot, step(boot, running=boot)).frames() for boot in (1, 2)]
    for order in ((0, 1), (1, 0)):
        root = Node("root")
        for place in (*order, *order):
            for frame in words[place]:
                root.hear(frame)

        assert (value(root, TOKENS), value(root, RUNNING)) == (3, 2)
        assert len(root.intake.registry.engines) == 1


def test_a_restored_exporter_goes_on_with_its_life() -> None:
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
    """Also with lives that nobody tells of any more; gauges wait for a word."""
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


def test_lives_that_are_too_many_become_one_sum() -> None:
    """None of them is counted again, whoever brings its word."""
    root, words = Node("root"), list[bytes]()
    root.intake.forwarded.lives.most = 3
    for boot in range(1, 9):
        words += leaf("leaf", boot, step(boot)).frames()
        root.hear(words[-1])
    for frame in words:
        root.hear(frame)

    assert value(root, TOKENS) == sum(range(1, 9))
    assert value(root, "vllm:inter_token_latency_seconds_count") == sum(range(1, 9))
    # Who was heard a moment ago may go on.
    assert len(root.intake.forwarded.lives) == 2 * 3 + 1
    root.save()
    again = Node("root", 2)
    again.intake.forwarded.lives.most = 3
    again.recall(root.disk)
    assert len(again.intake.forwarded.lives) == 2 * 3 + 1
    wait(GAUGES_EXPIRE_SECONDS, again)
    assert len(again.intake.forwarded.lives) == 3 + 1
    wait(GAUGES_EXPIRE_SECONDS, root)
    assert len(root.intake.forwarded.lives) == 3 + 1
    assert value(root, TOKENS) == sum(range(1, 9))
    upper = Node("upper")
    root.tell(upper)
    assert value(upper, TOKENS) == 6 + 7 + 8
    root.save()
    reborn = Node("root", 2, disk=root.disk)
    for frame in words:
        reborn.hear(frame)
    assert value(reborn, TOKENS) == sum(range(1, 9))


def test_a_process_is_not_in_a_sum_since_one_in_between_was_restarted() -> None:
    """Which tells of it at once, and does not know when it was heard."""
    root, between = Node("root"), Node("between")
    for boot in range(1, lives.MAX_LIVES + 1):
        dead = leaf("leaf", boot, step(1))
        dead.tell(between)
        between.tell(root)
        wait(1, root, between)
    alive = leaf("leaf", lives.MAX_LIVES + 1, step(1))
    alive.tell(between)
    between.save()
    between = Node("between", 2, disk=between.disk, now=root.now, wall=1.0 + root.now)
    between.tell(root)

    push(alive, step(5))
    alive.outbox.renew()
    refresh(alive, between, root)
    assert value(root, TOKENS) == lives.MAX_LIVES + 1 + 5
    assert root.rejected == {}


def test_a_process_that_only_a_snapshot_knows_is_not_in_a_sum() -> None:
    """The root's clock is set forward, and then it hears of those that died before it began."""
    root, between = Node("root"), Node("between")
    for boot in (1, 2):
        leaf("leaf", boot, step(1)).tell(between)
        wait(1, root, between)
    alive = leaf("leaf", 3, step(1))
    alive.tell(between)
    root.hear(between.frames()[-1])
    root.save()
    again = Node("root", 2, disk=root.disk, now=root.now, wall=1e4 + root.now)
    again.intake.forwarded.lives.most = 2
    between.outbox.renew()
    between.tell(again)

    push(alive, step(5))
    refresh(alive, between, again)
    assert value(again, TOKENS) == 3 + 5
    assert again.rejected == {}


def test_processes_that_may_go_on_do_not_take_others_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one that keeps nothing starts again and again."""
    monkeypatch.setattr(lives, "MAX_WORDS", 2 * lives.MAX_LIVES)
    root = Node("root")
    boots = 4 * lives.MAX_LIVES
    for boot in range(1, boots + 1):
        leaf("leaf", boot, step(1)).tell(root)
    leaf("other", 1, step(7)).tell(root)

    assert value(root, TOKENS) == boots + 7
    assert root.rejected == {}


@pytest.mark.parametrize(("limit", "most"), [("MAX_WORDS", 500), ("MAX_BYTES", 3 << 20)])
def test_others_find_a_place_though_processes_may_go_on(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    """Also where those came while there was room."""
    monkeypatch.setattr(lives, limit, most)
    root = Node("root")
    root.intake.forwarded.lives.most = 2
    boots, engines = 12, [info(str(number)) for number in range(12)]
    for boot in range(1, boots + 1):
        for source in ("a", "b", "c", "d"):
            node = Node(source, boot)
            node.greet("s", engines)
            push(node, step(1))
            node.tell(root)
        wait(1, root)

    assert len(root.intake.forwarded.lives) < 4 * len(engines) * (2 + 1) + 2 * len(engines)
    assert value(root, TOKENS) == 4 * boots
    assert root.rejected == {}


def test_processes_that_may_go_on_make_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others come, and not when it is certain that those are over."""
    monkeypatch.setattr(lives, "MAX_WORDS", 40)
    root = Node("root")
    root.intake.forwarded.lives.most = 2
    for boot in range(1, 5):
        leaf("leaf", boot, step(1)).tell(root)
    wait(2, root)
    assert len(root.intake.forwarded.lives) == 4
    for number in range(7):
        leaf(f"other-{number}", 1, step(1)).tell(root)
    wait(1, root)

    assert len(root.intake.forwarded.lives) == 2 + 1 + 7
    assert value(root, TOKENS) == 4 + 7


def test_processes_with_a_label_each_leave_room_for_engines() -> None:
    """Each is an engine here, and more of those there cannot be."""
    root = Node("root")
    root.intake.forwarded.lives.most = 8
    engines = [info(str(number)) for number in range(MAX_ENGINES // (8 + 1))]
    for boot in range(1, 8 + 5):
        node = Node("leaf", boot, labels={"pod": str(boot)})
        node.greet("s", engines)
        node.tell(root)

    assert root.rejected == {}


def test_lives_that_cannot_become_one_sum_hold_up_no_others() -> None:
    """Nor is that said again and again."""
    root = Node("root")
    root.intake.forwarded.lives.most = 2
    for boot in range(1, 6):
        odd = Node("odd", boot, labels={"pod": str(boot)})
        odd.greet(
            "s", [msgspec.structs.replace(info(), features=[f"{boot}-{n}" for n in range(40)])]
        )
        push(odd, step(1))
        odd.tell(root)
        leaf("plain", boot, step(1)).tell(root)
    before = value(root, TOKENS)
    wait(2 * GAUGES_EXPIRE_SECONDS, root)

    assert len(root.intake.forwarded.lives.of("plain", "ns/m/0")) == 2 + 1
    assert root.rejected == {("bad_item",): 1.0}
    assert value(root, TOKENS) == before


def test_lives_that_are_over_become_one_sum_a_few_in_a_second() -> None:
    """Nobody is heard while they are added up."""
    root = Node("root")
    engines = [info(str(number)) for number in range(40)]
    for boot in range(1, lives.MAX_LIVES + 3):
        node = Node("leaf", boot)
        node.greet("s", engines)
        node.tell(root)
    before = len(root.intake.forwarded.lives)
    wanted = len(engines) * (lives.MAX_LIVES + 1)
    wait(GAUGES_EXPIRE_SECONDS, root)
    after = len(root.intake.forwarded.lives)
    assert wanted + len(engines) // 2 < after < before

    wait(GAUGES_EXPIRE_SECONDS, root)
    assert len(root.intake.forwarded.lives) == wanted


def test_engines_of_two_sources_are_two() -> None:
    """Though they look alike: the later one says where it is from."""
    root = Node("root")
    leaf("one", 1, step(3)).tell(root)
    leaf("two", 1, step(4)).tell(root)

    assert {
        f'{TOKENS}{{engine="0",model_name="m"}}': 3.0,
        f'{TOKENS}{{engine="0",model_name="m",origin="two/ns/m/0"}}': 4.0,
    }.items() <= samples(root.page).items()


def test_engines_of_one_identity_are_one_where_asked() -> None:
    """Counts add up; each gauge is of whoever knows it."""
    root = Node("root", merge=True)
    leaf("one", 1, step(3, running=2)).tell(root)
    leaf("two", 1, step(4)).tell(root)

    assert len(root.intake.registry.engines) == 1
    assert (value(root, TOKENS), value(root, RUNNING)) == (7, 2)


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


def test_what_stays_under_old_labels_falls_silent() -> None:
    """A life before the one that took its counts along."""
    root = Node("root")
    leaf("leaf", 1, step(3, running=1), labels={"host": "old"}).tell(root)
    wait(GAUGES_EXPIRE_SECONDS, root)
    node = leaf("leaf", 2, step(4, running=2), state=True, labels={"host": "old"})
    node.save()
    node.tell(root)
    again = Node("leaf", 3, state=True, disk=node.disk, labels={"host": "new"})
    again.save()
    again.tell(root)
    old, new = (f'{TOKENS}{{engine="0",host="{host}",model_name="m"}}' for host in ("old", "new"))

    assert {old: 3.0, new: 4.0}.items() <= samples(root.page).items()
    assert up(root) == [0.0, 0.0]
    assert value(root, RUNNING) == 0
    wait(ENGINE_EXPIRES_SECONDS, root)
    assert root.page == ""


def test_what_did_not_change_is_not_made_anew() -> None:
    """Renderers keep its text; and since when it counts is when it was first told of."""
    seconds = [100.0]
    node, root = (
        leaf("leaf", 1, step(3)),
        Node("root", native=NativeSettings({}, lambda: seconds[0])),
    )
    family = Family("my_seconds", "histogram", [], bounds=[1.0], samples=[Sample(observations=[2])])
    push(node, Samples(0, 1.0, [family]))
    node.tell(root)
    (engine,) = root.intake.registry.engines.values()
    before, own = [*engine.histograms], engine.open_families["my_seconds"].children[()]
    seconds[0] = 200.0
    push(node, step(4))
    node.tell(root)
    changed = [old for old, new in zip(before, engine.histograms, strict=True) if old is not new]

    assert engine.open_families["my_seconds"].children[()] is own
    assert 0 < len(changed) < 5
    assert {h.created for h in engine.histograms if isinstance(h, NativeHistogram)} == {100.0}


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
    monkeypatch.setattr(lives, "MAX_BYTES", root.intake.forwarded.lives.bytes + 100)
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


def test_a_server_that_keeps_its_own_totals_is_not_counted_by_each_life() -> None:
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


@pytest.mark.parametrize("merge", [False, True])
def test_an_engine_that_is_pushed_has_its_name_whoever_came_first(merge: bool) -> None:
    """And neither its counts nor those of another exporter's engine are refused for it."""
    node, root = leaf("leaf", 1, step(3)), Node("root", merge=merge, state=True)
    node.tell(root)
    name = next(iter(root.intake.registry.engines))
    root.greet("s", [EngineInfo(name, "vllm", {"engine": "0", "model_name": "m"})])
    push(root, step(7))
    push(node, step(20))
    node.tell(root)

    assert value(root, TOKENS) == 30
    assert root.rejected == {}
    root.save()
    again = Node("root", 2, state=True, disk=root.disk, merge=merge)
    assert value(again, TOKENS) == 30


def test_what_engines_of_one_identity_say_of_themselves_stays_together() -> None:
    """Whoever spoke last: one has the front end, the other the core."""
    one, two, root = Node("one"), leaf("two", 1, step(2)), Node("root", merge=True)
    said = info()
    said.info = {"cache_config": {"block_size": "16"}}
    one.greet("s", [said])
    for node in (one, two, one):
        refresh(node, root)

        assert ('block_size="16"' in root.page) == (
            node is one or root.intake.forwarded.sources > 1
        )


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
    for life in range(1, 2 * lives.MAX_INCOMPLETE_BYTES // lives.PIECE_COST):
        root.hear(encode_forward(Forward(1, "a", "e", life, 1, 1, 0, 2, b"", Standing())))
    kept = root.intake.forwarded.lives._incomplete

    assert len(kept) <= lives.MAX_INCOMPLETE_BYTES // lives.PIECE_COST


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


def test_a_life_that_nobody_begins_is_none() -> None:
    """Its number is that of a sum."""
    (due,) = leaf("leaf", 1, step(3)).due()
    due.message.life = lives.SUM
    with pytest.raises(WireError, match=r"life|>= 1"):
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


def test_a_clock_that_was_set_back_costs_no_counts() -> None:
    """Later lives then have lower numbers; the one that goes on is never taken for an old one."""
    root = Node("root")
    root.intake.forwarded.lives.most = 2
    for boot in range(9, 1, -1):
        wait(1, root)
        leaf("leaf", boot, step(3)).tell(root)
    last = leaf("leaf", 1, step(3))
    for _ in range(3):
        push(last, step(1))
        wait(1, root)
        last.tell(root)

    assert value(root, TOKENS) == 9 * 3 + 3
    push(last, step(0, running=4))
    wait(GAUGES_EXPIRE_SECONDS, root)
    last.tell(root)
    assert value(root, RUNNING) == 4


@pytest.mark.parametrize("away", [0.0, GAUGES_EXPIRE_SECONDS])
@pytest.mark.parametrize("saved_late", [False, True])
def test_a_life_that_goes_on_is_not_taken_for_an_old_one_after_a_restart(
    away: float, saved_late: bool
) -> None:
    """It comes by way of another exporter, heard before the root that starts had its snapshot."""
    root, between = Node("root"), Node("between")
    root.intake.forwarded.lives.most = 2
    for boot in (1, 2):
        wait(1, root, between)
        leaf("leaf", boot, step(3)).tell(between)
        between.tell(root)
    root.save()
    last = leaf("leaf", 3, step(3))
    wait(1, root, between)
    last.tell(between)
    wait(away + 1, root, between)
    if saved_late:
        root.save()
    again = Node("root", 2, disk=root.disk, now=root.now, wall=1.0 + root.now)
    again.intake.forwarded.lives.most = 2
    between.tell(again)
    push(last, step(4))
    last.tell(between)
    between.tell(again)

    assert value(again, TOKENS) == 3 * 3 + 4


def test_a_root_that_was_away_finds_nobody_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence begins with its start: who is there has yet to be heard."""
    monkeypatch.setattr(forwarded, "MAX_GONE", 1)
    root = Node("root", merge=True)
    nodes = [leaf(f"leaf-{number}", 1, step(3)) for number in range(4)]
    for node in nodes:
        node.tell(root)
    wait(1, root)
    root.save()
    later = root.now + 2 * ENGINE_EXPIRES_SECONDS
    again = Node("root", 2, merge=True, disk=root.disk, now=later, wall=1.0 + later)
    wait(1, again)
    assert value(again, TOKENS) == 4 * 3
    for node in nodes:
        push(node, step(1))
        node.tell(again)
        wait(1, again)

    assert value(again, TOKENS) == 4 * 4
    assert again.rejected == {}


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
    monkeypatch.setattr(lives, "MAX_BYTES", 10)
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
