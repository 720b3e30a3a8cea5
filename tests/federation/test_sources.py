"""Sources that start, end, change and share a name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from downstream import RUNNING, TOKENS, downstream, info, push, step, up, value
from nodes import Node, frames_of, refresh, samples, wait
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, GAUGES_EXPIRE_SECONDS
from sidestep.protocol.messages import Bye, Nack
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.transport.guard import PeerGuard

ITL = "vllm:inter_token_latency_seconds"


def codes(node: Node) -> list[str]:
    """Return the codes of the queued rejections."""
    return [answer.code for _, answer in node.intake.rejections() if isinstance(answer, Nack)]


def conflicts(node: Node) -> float:
    """Return the number of records that were rejected because their epoch has ended."""
    return node.intake.metrics.value("sidestep_forward_conflicts_total")


def test_counters_add_up_over_epochs() -> None:
    """Gauges are those of the current epoch."""
    upstream = Node("upstream")
    for boot in range(1, 9):
        node = downstream("downstream", boot, step(boot, running=boot))
        for _ in range(2):
            node.outbox.renew()
            node.forward_to(upstream)

        assert value(upstream, TOKENS) == value(upstream, f"{ITL}_count") == sum(range(boot + 1))
        assert value(upstream, RUNNING) == boot
        assert len(upstream.intake.registry.engines) == 1
    push(node, step(5))
    node.forward_to(upstream)
    assert value(upstream, TOKENS) == sum(range(9)) + 5
    assert upstream.rejected == {}


def test_records_of_an_ended_epoch_are_rejected_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two processes use one name: the later one counts, and both logs say so."""
    caplog.set_level(logging.WARNING)
    upstream, (first, second) = (
        Node("upstream"),
        [downstream("downstream", boot, step(3)) for boot in (1, 2)],
    )
    first.forward_to(upstream)
    second.forward_to(upstream)
    for _ in range(3):
        for node in (first, second):
            push(node, step(1))
            refresh(node, upstream)

    assert value(upstream, TOKENS) == 3 + 3 + 3
    assert upstream.rejected == {("ended_epoch",): 3.0}
    assert conflicts(upstream) == 3
    assert codes(upstream) == ["ended_epoch"] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert "two processes use --forward.source downstream: set a unique one for each" in line
    upstream.save()
    again = Node("upstream", 2, disk=upstream.disk)
    push(first, step(1))
    first.forward_to(again)
    assert value(again, TOKENS) == 9
    assert conflicts(again) == 4


def test_epoch_ends_for_each_engine_separately() -> None:
    """An engine that the next process has not sent yet continues."""
    upstream, node = Node("upstream"), downstream("downstream", 1, step(3))
    node.send_hello("t", [info("1")])
    push(node, step(5), stream="t")
    node.forward_to(upstream)
    downstream("downstream", 2, step(4)).forward_to(upstream)
    push(node, step(7), stream="t")
    node.forward_to(upstream)

    assert value(upstream, TOKENS) == 3 + 4 + 5 + 7
    assert upstream.rejected == {}


def test_repeated_records_of_an_ended_epoch_are_no_conflict() -> None:
    """Exporters in between repeat records, and the network may delay them."""
    upstream, node = Node("upstream"), downstream("downstream", 1, step(3))
    early = node.frames()
    push(node, step(4))
    late = node.frames()
    for frame in (*late, *downstream("downstream", 2, step(2)).frames(), *early, *late):
        upstream.receive(frame)

    assert value(upstream, TOKENS) == 3 + 4 + 2
    assert upstream.rejected == {}


def test_clock_set_back_is_rejected_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A process without a state directory then has a smaller epoch; both logs name the remedy."""
    caplog.set_level(logging.WARNING)
    upstream = Node("upstream")
    downstream("downstream", 1, step(3), wall=1e6).forward_to(upstream)
    downstream("downstream", 2, step(4), wall=1e5).forward_to(upstream)
    ((_, answer),) = upstream.intake.rejections()

    assert value(upstream, TOKENS) == 3
    assert isinstance(answer, Nack)
    assert "--forward.source, or correct a clock that was set back" in answer.detail
    assert "clock was set back: correct it and restart" in caplog.text
    downstream("downstream", 3, step(4), wall=2e6).forward_to(upstream)
    assert value(upstream, TOKENS) == 7


def test_exporter_in_between_forwards_the_last_record_of_an_ended_epoch() -> None:
    """An exporter in between forwards the last record of an ended epoch even if its upstream was unreachable then."""
    between, upstream = Node("between"), Node("upstream")
    node = downstream("downstream", 1, step(3))
    node.forward_to(between)
    between.forward_to(upstream)
    push(node, step(4))
    node.forward_to(between)
    downstream("downstream", 2, step(2)).forward_to(between)
    between.save()
    for process in (between, Node("between", 2, disk=between.disk)):
        upper = Node("upstream", 2, disk=list(upstream.capture.pieces()))
        process.outbox.renew()
        process.forward_to(upper)

        assert value(upper, TOKENS) == 3 + 4 + 2
        assert upper.rejected == {}
        wait(20, upper, process)
        process.forward_to(upper)
        assert (value(upper, TOKENS), conflicts(upper)) == (9, 0)


def test_engine_that_a_snapshot_contains_twice_is_restored_once() -> None:
    """No engine is exposed that nothing updates."""
    upstream = Node("upstream")
    downstream("downstream", 1, step(3)).forward_to(upstream)
    upstream.save()
    again = Node("upstream", 2, disk=[*upstream.disk, *upstream.disk])

    assert value(again, TOKENS) == 3
    assert len(again.intake.registry.engines) == 1


def test_gauges_expire_with_their_source_and_counters_stay() -> None:
    """Gauges expire after 30 s, series after 300 s, and counters continue afterwards."""
    upstream = Node("upstream")
    for boot in (1, 2):
        node = downstream("downstream", boot, step(3, running=2))
        node.forward_to(upstream)
    wait(GAUGES_EXPIRE_SECONDS, upstream)
    assert (value(upstream, TOKENS), value(upstream, RUNNING), up(upstream)) == (6, 0, [0.0])
    wait(ENGINE_EXPIRES_SECONDS, upstream)
    assert upstream.page == ""
    node.now = upstream.now
    push(node, step(1, running=1))
    node.forward_to(upstream)
    assert (value(upstream, TOKENS), value(upstream, RUNNING), up(upstream)) == (7, 1, [1.0])


def test_labels_of_the_current_record_apply_to_all_epochs() -> None:
    """Counters of earlier epochs move to the new labels."""
    upstream = Node("upstream")
    downstream("downstream", 1, step(3), labels={"host": "old"}).forward_to(upstream)
    downstream("downstream", 2, step(4), labels={"host": "new"}).forward_to(upstream)

    assert samples(upstream.page)[f'{TOKENS}{{engine="0",host="new",model_name="m"}}'] == 7
    assert 'host="old"' not in upstream.page
    assert len(upstream.intake.registry.engines) + len(upstream.intake.registry.retired) == 1


def test_changed_dialect_is_a_new_engine() -> None:
    """A vLLM engine's counters do not apply to an SGLang engine."""
    upstream, node = Node("upstream"), Node("downstream", 2)
    downstream("downstream", 1, step(3)).forward_to(upstream)
    engine = info()
    engine.dialect = "sglang"
    node.send_hello("s", [engine])
    node.forward_to(upstream)

    assert [e.layout.dialect for e in upstream.intake.registry.engines.values()] == ["sglang"]
    assert not upstream.intake.registry.retired
    assert TOKENS not in upstream.page
    assert upstream.rejected == {}


def family(name: str, labels: Sequence[str], values: Sequence[str]) -> Samples:
    """Return an item with a self-described counter, 1 for each of ``values``."""
    return Samples(0, 1.0, [Family(name, "counter", [*labels], [Sample([v], 1) for v in values])])


def test_self_described_family_with_changed_labels_restarts() -> None:
    """Other families continue."""
    upstream = Node("upstream")
    downstream(
        "downstream", 1, step(3), family("a_total", ["x"], "12"), family("b_total", ["x"], "1")
    ).forward_to(upstream)
    downstream(
        "downstream", 2, step(4), family("a_total", ["y"], "1"), family("b_total", ["x"], "12")
    ).forward_to(upstream)

    assert (value(upstream, "a_total"), value(upstream, "b_total"), value(upstream, TOKENS)) == (
        1,
        3,
        7,
    )
    assert upstream.rejected == {}


def test_label_values_of_ended_epochs_are_never_merged() -> None:
    """A counter that moved to ``__other__`` would decrease."""
    upstream = Node("upstream")
    names = [f"a{n}" for n in range(60)], [f"b{n}" for n in range(60)]
    for boot, values in enumerate(names, 1):
        node = downstream("downstream", boot, family("a_total", ["x"], values))
        node.forward_to(upstream)
        assert value(upstream, "a_total") == 60 * boot
    found = samples(upstream.page)
    assert all(found[f'a_total{{engine="0",model_name="m",x="{v}"}}'] == 1 for v in names[0])


def test_buckets_of_an_ended_epoch_move_to_the_current_bounds() -> None:
    """Each count moves by its upper bound."""
    upstream = Node("upstream")
    for boot, bounds in ((1, [0.002, 0.004]), (2, [0.003, 0.004])):
        node = Node("downstream", boot)
        engine = info()
        engine.bounds = {"inter_token_latency": bounds}
        node.send_hello("s", [engine])
        push(node, step(2))
        node.forward_to(upstream)
    key = f'{ITL}_bucket{{engine="0",model_name="m",le="%s"}}'
    found = samples(upstream.page)

    assert [found[key % bound] for bound in ("0.003", "0.004", "+Inf")] == [4, 4, 4]
    assert key % "0.002" not in found


@pytest.mark.parametrize("native", [None, NativeSettings({}, lambda: 1.0)])
@pytest.mark.parametrize("highest", [[240.0, 240.0000000002401, 240.0], [240.0000000002401, 240.0]])
def test_epochs_whose_bounds_differ_by_a_rounding_are_restored_exactly(
    highest: list[float], native: NativeSettings | None
) -> None:
    """After its restart the upstream exporter serves the same buckets, whichever epoch has the higher bound."""
    upstream = Node("upstream", native=native)
    for boot, bound in enumerate(highest, start=1):
        engine = info()
        engine.bounds = {"inter_token_latency": [0.002, bound]}
        node = Node("downstream", boot, native=native)
        node.send_hello("s", [engine])
        family = Family("my_seconds", "histogram", [], help="Mine.", bounds=[1.0, bound])
        family.samples.append(Sample([], counts=[1, 2, 3], total=1000.0))
        push(node, step(1), step(5), Samples(0, 1.0, [family]))
        node.forward_to(upstream)
        upstream.save()
        again = Node("upstream", 2, disk=upstream.disk, native=native)

        for name in (ITL, "my_seconds"):
            found = {key: n for key, n in samples(upstream.page).items() if key.startswith(name)}
            assert found == {key: n for key, n in samples(again.page).items() if key in found}
            assert len([key for key in found if "_bucket" in key]) == 3
        assert value(again, f"{ITL}_count") == 6 * boot
        assert value(again, "my_seconds_count") == 6 * boot


def test_native_histogram_without_creation_time_gets_that_of_its_first_record() -> None:
    """Sources without native histograms send none."""
    seconds = [100.0]
    node, upstream = (
        downstream("downstream", 1, step(3)),
        Node("upstream", native=NativeSettings({}, lambda: seconds[0])),
    )
    for boot in (1, 2):
        node = downstream("downstream", boot, step(3))
        for _ in range(2):
            push(node, step(1))
            node.forward_to(upstream)
            seconds[0] += 100.0
    (engine,) = upstream.intake.registry.engines.values()

    assert {h.created for h in engine.histograms if isinstance(h, NativeHistogram)} == {100.0}


def test_retired_engine_continues_with_the_next_epoch() -> None:
    """Its totals are kept upstream."""
    upstream, node = Node("upstream"), downstream("downstream", 1, step(3))
    node.forward_to(upstream)
    node.send("s", Bye(1, 1))
    for _ in range(40):
        refresh(node, upstream)
    assert upstream.page == ""
    node = downstream("downstream", 2, step(4), now=upstream.now)
    node.forward_to(upstream)

    assert value(upstream, TOKENS) == 7


class Keys:
    """A key ring whose keys may feed these engines, or all."""

    def __init__(self, *known: str, engines: Sequence[str] = ()) -> None:
        self._known = known
        self._engines = engines

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def engines(self, key: str) -> Sequence[str]:  # noqa: ARG002 - all have the same
        """Return the engines that the key may feed; empty for all."""
        return self._engines


def guarded(upstream: Node, keys: Keys) -> Node:
    """Require one of ``keys`` of every peer of ``upstream``."""
    upstream.intake.guard = PeerGuard(upstream.intake.metrics, lambda: 0.0, keys, lambda: False)
    return upstream


def deliver(upstream: Node, node: Node, key: str) -> None:
    """Deliver all due records of ``node`` over a connection with ``key``."""
    for frame in node.frames():
        upstream.intake.accept(b"exporter", [frame], upstream.now, key)
        while upstream.intake.busy:
            upstream.intake.work()


def test_source_belongs_to_its_key_after_a_restart() -> None:
    """Another key can take the name only once the owner is no longer authorized."""
    upstream = guarded(Node("upstream"), Keys("one", "two"))
    node, thief = downstream("downstream", 1, step(3)), downstream("downstream", 2, step(50))
    deliver(upstream, node, "one")
    upstream.save()
    for keys, tokens in ((("one", "two"), 3), (("two",), 53)):
        again = guarded(Node("upstream", 2), Keys(*keys))
        again.restore(upstream.disk)
        thief.outbox.renew()
        deliver(again, thief, "two")

        assert value(again, TOKENS) == tokens
        assert again.rejected.get(("unauthorised",), 0.0) == float(tokens == 3)


def test_unauthorized_engines_do_not_block_authorized_ones() -> None:
    """However many are rejected, the connection stays."""
    upstream = guarded(Node("upstream"), Keys("key", engines=["ns/m/7"]))
    node = Node("downstream")
    node.send_hello("s", [info(str(number)) for number in range(200)])
    deliver(upstream, node, "key")

    assert len(upstream.intake.registry.engines) == 1
    assert upstream.rejected == {("unauthorised",): 199.0}


def test_malformed_record_leaves_the_previous_one() -> None:
    """The rejection is counted by its reason and sent to the source."""
    node, upstream = downstream("downstream", 1, step(3)), Node("upstream")
    node.forward_to(upstream)
    push(node, step(4))
    (due,) = node.due()
    due.message.data = due.message.data[:-9]
    for frame in frames_of(due):
        upstream.receive(frame)

    assert upstream.rejected == {("bad_item",): 1.0}
    assert codes(upstream) == ["bad_schema"]
    assert codes(upstream) == []
    assert value(upstream, TOKENS) == 3


def test_frame_of_another_version_is_answered() -> None:
    """The log of the other exporter then has the reason."""
    node, upstream = downstream("downstream", 1, step(3)), Node("upstream")
    (due,) = node.due()
    due.message.version = 9
    for frame in frames_of(due):
        upstream.receive(frame)

    assert codes(upstream) == ["version"]
