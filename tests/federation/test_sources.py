"""Exporters that come, go, take each other's names, and disagree."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import pytest

from downstream import RUNNING, TOKENS, info, leaf, push, step, up, value
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, GAUGES_EXPIRE_SECONDS
from sidestep.protocol.messages import Bye, Nack
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.transport.guard import Guard
from trees import Node, frames_of, refresh, samples, wait

ITL = "vllm:inter_token_latency_seconds"


def codes(node: Node) -> list[str]:
    """Codes of the refusals that wait to be sent."""
    return [answer.code for _, answer in node.intake.answers() if isinstance(answer, Nack)]


def conflicts(node: Node) -> float:
    """Records that were refused because their epoch has ended."""
    return node.intake.metrics.value("sidestep_forward_conflicts_total")


def test_epochs_add_up_and_gauges_are_of_the_current_one() -> None:
    """A source that starts at 0 has not taken anything back, however often it does so."""
    root = Node("root")
    for boot in range(1, 9):
        node = leaf("leaf", boot, step(boot, running=boot))
        for _ in range(2):
            node.outbox.renew()
            node.tell(root)

        assert value(root, TOKENS) == value(root, f"{ITL}_count") == sum(range(boot + 1))
        assert value(root, RUNNING) == boot
        assert len(root.intake.registry.engines) == 1
    push(node, step(5))
    node.tell(root)
    assert value(root, TOKENS) == sum(range(9)) + 5
    assert root.rejected == {}


def test_an_ended_epoch_that_goes_on_is_refused_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two processes use one name: the later one counts, and both sides learn of it."""
    caplog.set_level(logging.WARNING)
    root, (first, second) = Node("root"), [leaf("leaf", boot, step(3)) for boot in (1, 2)]
    first.tell(root)
    second.tell(root)
    for _ in range(3):
        for node in (first, second):
            push(node, step(1))
            refresh(node, root)

    assert value(root, TOKENS) == 3 + 3 + 3
    assert root.rejected == {("ended_epoch",): 3.0}
    assert conflicts(root) == 3
    assert codes(root) == ["ended_epoch"] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert "two processes use --forward.source leaf: set a unique one for each" in line
    root.save()
    again = Node("root", 2, disk=root.disk)
    push(first, step(1))
    first.tell(again)
    assert value(again, TOKENS) == 9
    assert conflicts(again) == 4


def test_an_ended_epoch_is_over_for_each_engine_by_itself() -> None:
    """An engine that the next process has not sent yet goes on."""
    root, node = Node("root"), leaf("leaf", 1, step(3))
    node.greet("t", [info("1")])
    push(node, step(5), stream="t")
    node.tell(root)
    leaf("leaf", 2, step(4)).tell(root)
    push(node, step(7), stream="t")
    node.tell(root)

    assert value(root, TOKENS) == 3 + 4 + 5 + 7
    assert root.rejected == {}


def test_records_of_an_ended_epoch_that_say_nothing_new_are_no_conflict() -> None:
    """Exporters in between repeat them, and the network may be late."""
    root, node = Node("root"), leaf("leaf", 1, step(3))
    early = node.frames()
    push(node, step(4))
    late = node.frames()
    for frame in (*late, *leaf("leaf", 2, step(2)).frames(), *early, *late):
        root.hear(frame)

    assert value(root, TOKENS) == 3 + 4 + 2
    assert root.rejected == {}


def test_a_clock_that_was_set_back_is_refused_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """The process without state that starts then has a smaller epoch; both logs say what to do."""
    caplog.set_level(logging.WARNING)
    root = Node("root")
    leaf("leaf", 1, step(3), wall=1e6).tell(root)
    leaf("leaf", 2, step(4), wall=1e5).tell(root)
    ((_, answer),) = root.intake.answers()

    assert value(root, TOKENS) == 3
    assert isinstance(answer, Nack)
    assert "--forward.source, or correct a clock that was set back" in answer.detail
    assert "clock was set back: correct it and restart" in caplog.text
    leaf("leaf", 3, step(4), wall=2e6).tell(root)
    assert value(root, TOKENS) == 7


def test_the_exporter_in_between_passes_on_what_an_ended_epoch_said_last() -> None:
    """Though it could not reach the next one when the epoch ended, before or after a restart."""
    between, root = Node("between"), Node("root")
    node = leaf("leaf", 1, step(3))
    node.tell(between)
    between.tell(root)
    push(node, step(4))
    node.tell(between)
    leaf("leaf", 2, step(2)).tell(between)
    between.save()
    for process in (between, Node("between", 2, disk=between.disk)):
        upper = Node("root", 2, disk=list(root.capture.pieces()))
        process.outbox.renew()
        process.tell(upper)

        assert value(upper, TOKENS) == 3 + 4 + 2
        assert upper.rejected == {}
        wait(20, upper, process)
        process.tell(upper)
        assert (value(upper, TOKENS), conflicts(upper)) == (9, 0)


def test_a_snapshot_that_has_an_engine_twice_restores_it_once() -> None:
    """None is written like that; nothing is shown that nobody updates."""
    root = Node("root")
    leaf("leaf", 1, step(3)).tell(root)
    root.save()
    again = Node("root", 2, disk=[*root.disk, *root.disk])

    assert value(again, TOKENS) == 3
    assert len(again.intake.registry.engines) == 1


def test_gauges_go_with_their_source_and_counters_stay() -> None:
    """30 s without a record, 300 s; and what ended is still there when the source is back."""
    root = Node("root")
    for boot in (1, 2):
        node = leaf("leaf", boot, step(3, running=2))
        node.tell(root)
    wait(GAUGES_EXPIRE_SECONDS, root)
    assert (value(root, TOKENS), value(root, RUNNING), up(root)) == (6, 0, [0.0])
    wait(ENGINE_EXPIRES_SECONDS, root)
    assert root.page == ""
    node.now = root.now
    push(node, step(1, running=1))
    node.tell(root)
    assert (value(root, TOKENS), value(root, RUNNING), up(root)) == (7, 1, [1.0])


def test_labels_of_the_current_record_stand_for_all_epochs() -> None:
    """A process that starts with another label takes along what was counted before."""
    root = Node("root")
    leaf("leaf", 1, step(3), labels={"host": "old"}).tell(root)
    leaf("leaf", 2, step(4), labels={"host": "new"}).tell(root)

    assert samples(root.page)[f'{TOKENS}{{engine="0",host="new",model_name="m"}}'] == 7
    assert 'host="old"' not in root.page
    assert len(root.intake.registry.engines) + len(root.intake.registry.retired) == 1


def test_another_dialect_of_one_name_is_another_engine() -> None:
    """Nothing of a vLLM engine's counters has a place in an SGLang engine."""
    root, node = Node("root"), Node("leaf", 2)
    leaf("leaf", 1, step(3)).tell(root)
    said = info()
    said.dialect = "sglang"
    node.greet("s", [said])
    node.tell(root)

    assert [e.layout.dialect for e in root.intake.registry.engines.values()] == ["sglang"]
    assert not root.intake.registry.retired
    assert TOKENS not in root.page
    assert root.rejected == {}


def family(name: str, labels: Sequence[str], values: Sequence[str]) -> Samples:
    """A self-described counter, 1 for each of ``values``."""
    return Samples(0, 1.0, [Family(name, "counter", [*labels], [Sample([v], 1) for v in values])])


def test_a_self_described_family_with_other_labels_starts_anew() -> None:
    """The newest process says what it is; all else goes on."""
    root = Node("root")
    leaf("leaf", 1, step(3), family("a_total", ["x"], "12"), family("b_total", ["x"], "1")).tell(
        root
    )
    leaf("leaf", 2, step(4), family("a_total", ["y"], "1"), family("b_total", ["x"], "12")).tell(
        root
    )

    assert (value(root, "a_total"), value(root, "b_total"), value(root, TOKENS)) == (1, 3, 7)
    assert root.rejected == {}


def test_no_series_of_an_ended_epoch_gives_way_to_a_new_one() -> None:
    """What is too much goes to ``__other__``: a counter that went there would fall."""
    root = Node("root")
    names = [f"a{n}" for n in range(60)], [f"b{n}" for n in range(60)]
    for boot, values in enumerate(names, 1):
        node = leaf("leaf", boot, family("a_total", ["x"], values))
        node.tell(root)
        assert value(root, "a_total") == 60 * boot
    found = samples(root.page)
    assert all(found[f'a_total{{engine="0",model_name="m",x="{v}"}}'] == 1 for v in names[0])


def test_buckets_of_an_ended_epoch_land_in_those_of_the_current_one() -> None:
    """By their upper bound, as nothing finer is known."""
    root = Node("root")
    for boot, bounds in ((1, [0.002, 0.004]), (2, [0.003, 0.004])):
        node = Node("leaf", boot)
        said = info()
        said.bounds = {"inter_token_latency": bounds}
        node.greet("s", [said])
        push(node, step(2))
        node.tell(root)
    key = f'{ITL}_bucket{{engine="0",model_name="m",le="%s"}}'
    found = samples(root.page)

    assert [found[key % bound] for bound in ("0.003", "0.004", "+Inf")] == [4, 4, 4]
    assert key % "0.002" not in found


def test_since_when_a_native_histogram_counts_is_since_it_was_first_received() -> None:
    """Its source keeps none, and does not say."""
    seconds = [100.0]
    node, root = (
        leaf("leaf", 1, step(3)),
        Node("root", native=NativeSettings({}, lambda: seconds[0])),
    )
    for boot in (1, 2):
        node = leaf("leaf", boot, step(3))
        for _ in range(2):
            push(node, step(1))
            node.tell(root)
            seconds[0] += 100.0
    (engine,) = root.intake.registry.engines.values()

    assert {h.created for h in engine.histograms if isinstance(h, NativeHistogram)} == {100.0}


def test_an_engine_that_ended_at_its_source_is_counted_on_by_the_next_process() -> None:
    """It is remembered there and here, and comes back with a new epoch."""
    root, node = Node("root"), leaf("leaf", 1, step(3))
    node.tell(root)
    node.say("s", Bye(1, 1))
    for _ in range(40):
        refresh(node, root)
    assert root.page == ""
    node = leaf("leaf", 2, step(4), now=root.now)
    node.tell(root)

    assert value(root, TOKENS) == 7


class Keys:
    """Any key may tell of everything."""

    def __init__(self, *known: str) -> None:
        self._known = known

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def engines(self, key: str) -> list[str]:  # noqa: ARG002 - all of them
        """All."""
        return []


def guarded(root: Node, *keys: str) -> Node:
    """Let ``root`` ask for keys."""
    root.intake.guard = Guard(root.intake.metrics, lambda: 0.0, Keys(*keys), lambda: False)
    return root


def hear(root: Node, node: Node, key: str) -> None:
    """All that ``node`` has to tell comes over a connection of ``key``."""
    for frame in node.frames():
        root.intake.take(b"exporter", [frame], root.now, key)
        while root.intake.busy:
            root.intake.work()


def test_a_source_is_its_keys_after_a_restart() -> None:
    """Another key cannot take the name meanwhile; once the key is gone, it can."""
    root = guarded(Node("root"), "one", "two")
    node, thief = leaf("leaf", 1, step(3)), leaf("leaf", 2, step(50))
    hear(root, node, "one")
    root.save()
    for keys, tokens in ((("one", "two"), 3), (("two",), 53)):
        again = guarded(Node("root", 2), *keys)
        again.recall(root.disk)
        thief.outbox.renew()
        hear(again, thief, "two")

        assert value(again, TOKENS) == tokens
        assert again.rejected.get(("unauthorised",), 0.0) == float(tokens == 3)


def test_a_refusal_is_told_to_whoever_asked() -> None:
    """With what is wrong; the record before it stands."""
    node, root = leaf("leaf", 1, step(3)), Node("root")
    node.tell(root)
    push(node, step(4))
    (due,) = node.due()
    record = msgspec.msgpack.decode(due.message.data)
    record[1][1] = record[1][1][:-1]
    due.message.data = msgspec.msgpack.encode(record)
    for frame in frames_of(due):
        root.hear(frame)
    assert codes(root) == ["bad_schema"]
    assert codes(root) == []
    assert value(root, TOKENS) == 3


def test_a_frame_that_nobody_understands_is_answered() -> None:
    """So that an exporter of another release says why nothing of it arrives."""
    node, root = leaf("leaf", 1, step(3)), Node("root")
    (due,) = node.due()
    due.message.version = 9
    for frame in frames_of(due):
        root.hear(frame)

    assert codes(root) == ["version"]
