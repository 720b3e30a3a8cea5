"""Exporters that come, go, take each other's names, and disagree."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import pytest

from sidestep.engines.items import VllmStep
from sidestep.errors import WireError
from sidestep.federation import lives
from sidestep.federation.lives import Lives, Word, summed
from sidestep.federation.messages import Standing
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, GAUGES_EXPIRE_SECONDS
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import Nack
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.transport.guard import Guard
from test_forward import RUNNING, TOKENS, info, leaf, push, step, value
from trees import Node, frames_of, refresh, samples, wait

ITL = "vllm:inter_token_latency_seconds"


def merged(monkeypatch: pytest.MonkeyPatch, most: int) -> Node:
    """A root that knows so many exporters of one engine apart that are gone."""
    monkeypatch.setattr("sidestep.federation.store.MAX_GONE", most)
    return Node("root", merge=True)


def pass_with(seconds: float, root: Node, *nodes: Node) -> None:
    """Time passes, in which only ``nodes`` say something."""
    until = root.now + seconds
    while root.now < until:
        for node in nodes:
            node.now = root.now
        wait(10.0, root, *nodes)
        for node in nodes:
            push(node, step(0, running=1))
            node.tell(root)


def test_exporters_that_are_gone_become_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what they told is lost with them, also by a process that goes on with it."""
    root = merged(monkeypatch, 2)
    stays = leaf("stays", 1, step(1))
    stays.tell(root)
    for number in range(9):
        node = leaf(f"goes-{number}", 1, step(3), now=root.now)
        node.tell(root)
        pass_with(20.0, root, stays)
    pass_with(ENGINE_EXPIRES_SECONDS + 20.0, root, stays)

    assert value(root, TOKENS) == 1 + 9 * 3
    assert value(root, f"{ITL}_count") == 1 + 9 * 3
    assert len(root.intake.forwarded.lives) == 1 + 2 + 1
    root.save()
    again = Node("root", 2, merge=True, disk=root.disk, now=root.now)
    assert value(again, TOKENS) == 1 + 9 * 3


def test_an_exporter_that_comes_back_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it had told: it is still known by itself, or refused, and told so."""
    root = merged(monkeypatch, 2)
    stays = leaf("stays", 1, step(1))
    gone = [leaf(f"goes-{number}", 1, step(3)) for number in range(5)]
    for node in (stays, *gone):
        wait(1.0, root, stays)
        node.now = root.now
        node.tell(root)
    pass_with(ENGINE_EXPIRES_SECONDS + 20.0, root, stays)
    assert value(root, TOKENS) == 1 + 5 * 3
    last, first = gone[-1], gone[0]
    for node in (last, first):
        node.now = root.now
        push(node, step(10))
    last.tell(root)
    pass_with(10.0, root, stays)
    assert value(root, TOKENS) == 1 + 5 * 3 + 10
    first.tell(root)
    answers = root.intake.answers()

    assert value(root, TOKENS) == 1 + 5 * 3 + 10
    assert root.rejected == {("folded",): 1.0}
    assert [(peer, answer.code) for peer, answer in answers if isinstance(answer, Nack)] == [
        (b"exporter", "folded")
    ]
    root.save()
    again = Node("root", 2, merge=True, disk=root.disk, now=root.now)
    push(first, step(1))
    first.tell(again)
    assert value(again, TOKENS) == 1 + 5 * 3 + 10
    assert again.rejected[("folded",)] == 2.0
    anew = leaf("goes-0", 7, step(4), wall=9.0, now=root.now)
    anew.tell(again)
    wait(1.0, again)
    assert value(again, TOKENS) == 1 + 5 * 3 + 10 + 4


@pytest.mark.parametrize("merge", [False, True])
def test_what_a_sum_has_is_no_news_and_what_it_lacks_is_refused_once(
    monkeypatch: pytest.MonkeyPatch, merge: bool
) -> None:
    """Whoever says it, and however late; a root that goes on with a snapshot knows as much."""
    monkeypatch.setattr("sidestep.federation.store.MAX_GONE", 1)
    root, stays = Node("root", merge=merge), leaf("stays", 9, step(1))
    root.intake.forwarded.lives.most = 1
    first, *others = (leaf(f"goes-{n}" if merge else "goes", 1 + n, step(3)) for n in range(4))
    told = [first.frames()]
    push(first, step(2))
    told.append(first.frames())
    push(first, step(7))
    told.append(first.frames())
    for frame in told[1]:
        root.hear(frame)
    for node in (stays, *others):
        wait(1.0, root)
        node.tell(root)
    pass_with(ENGINE_EXPIRES_SECONDS + 20.0, root, stays)
    assert root.intake.forwarded.lives.sum_with(
        ("goes-0" if merge else "goes", info().id, first.intake.life)
    )
    before = value(root, TOKENS)
    root.save()
    again = Node("root", 2, merge=merge, disk=root.disk, now=root.now)
    for known in (root, again):
        for frame in (*told[0], *told[1]):
            known.hear(frame)
        assert known.rejected == {}
        for frame in (*told[2], *told[2], *told[1]):
            known.hear(frame)

        assert known.rejected == {("folded",): 1.0}
        assert value(known, TOKENS) == before
        assert [
            answer.code for _, answer in known.intake.answers() if isinstance(answer, Nack)
        ] == ["folded"]


def test_of_the_very_oldest_lives_only_their_age_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused all the same: they might be counted."""
    monkeypatch.setattr(lives, "MAX_SUMMED", 2)
    root = merged(monkeypatch, 1)
    stays = leaf("stays", 90, step(1))
    gone = [leaf(f"goes-{number}", 1 + number, step(3)) for number in range(6)]
    for node in (stays, *gone):
        wait(1.0, root, stays)
        node.now = root.now
        node.tell(root)
    pass_with(ENGINE_EXPIRES_SECONDS + 20.0, root, stays)
    for node in gone[:5]:
        node.now = root.now
        push(node, step(10))
        node.tell(root)

    assert value(root, TOKENS) == 1 + 6 * 3
    assert root.rejected == {("folded",): 5.0}


def test_gauges_of_who_is_gone_go_though_others_stay() -> None:
    """Nobody knows any more whether they are true; what was counted stays."""
    root = Node("root", merge=True)
    stays, goes = leaf("b", 1, step(1)), leaf("a", 1, step(3, running=7))
    for node in (stays, goes):
        node.tell(root)
    assert (value(root, RUNNING), value(root, TOKENS)) == (7, 4)
    until = root.now + GAUGES_EXPIRE_SECONDS + 1
    while root.now < until:
        wait(10.0, root, stays)
        push(stays, step(0))
        stays.tell(root)

    assert (value(root, RUNNING), value(root, TOKENS)) == (0, 4)
    goes.now = root.now
    push(goes, step(0, running=8))
    goes.tell(root)
    assert (value(root, RUNNING), value(root, TOKENS)) == (8, 4)


def conflicts(node: Node) -> float:
    """Words of which another exporter of that name was heard as well."""
    return node.intake.metrics.value("sidestep_forward_conflicts_total")


def twins(root: Node, *nodes: Node, seconds: int = 60) -> None:
    """All of ``nodes`` count and tell for so long, by turns."""
    for _ in range(seconds // 5):
        for node in nodes:
            push(node, step(1))
            node.tell(root)
        wait(5.0, root, *nodes)


def test_two_exporters_of_one_name_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """In one line that says what to do; both are counted."""
    caplog.set_level(logging.WARNING)
    root, between = Node("root"), Node("between")
    nodes = [leaf("leaf", boot, step(3)) for boot in (1, 2)]
    twins(root, *nodes, seconds=25)
    assert conflicts(root) == 0
    twins(root, *nodes)

    assert conflicts(root) > 0
    (line,) = {record.getMessage().split(" (")[0] for record in caplog.records}
    assert "leaf" in line
    assert "--forward.source" in line
    assert value(root, TOKENS) == 2 * (3 + 17)
    caplog.clear()
    twins(between, *nodes)
    assert conflicts(between) > 0


def test_processes_that_follow_each_other_are_not_taken_for_two() -> None:
    """However often, and though an exporter on the way says the last ones' words again."""
    root, between = Node("root"), Node("between")
    for boot in range(1, 7):
        node = leaf("leaf", boot, step(3), now=root.now)
        node.greet("t", [info("1")])
        for _ in range(4):
            push(node, step(1))
            refresh(node, between, root)
            wait(0.0, node, between, root)

    assert conflicts(root) == conflicts(between) == 0


def test_two_that_go_on_with_one_snapshot_are_noticed() -> None:
    """The life is one, but the processes are two."""
    first = leaf("leaf", 1, step(3), state=True)
    first.save()
    root = Node("root")
    nodes = [Node("leaf", boot, state=True, disk=first.disk, wall=boot) for boot in (2, 3)]
    for _ in range(12):
        for node in nodes:
            node.restart("s")
            node.greet("s", [info()])
            push(node, step(1))
            node.save()
            node.tell(root)
        wait(5.0, root, *nodes)

    assert conflicts(root) > 0


def bounds(page: str) -> list[str]:
    """Of the latencies."""
    return [
        line.partition('le="')[2].partition('"')[0]
        for line in page.splitlines()
        if line.startswith(f"{ITL}_bucket")
    ]


def other(name: str, *upper: float, own: Sequence[float] = (1.0,)) -> Node:
    """A leaf whose latencies have these bounds, and a family of its own as well."""
    node = Node(name)
    said = info()
    said.bounds = {"inter_token_latency": [*upper]}
    node.greet("s", [said])
    push(node, step(3))
    family = Family("own_seconds", "histogram", [], help="H", bounds=[*own])
    family.samples = [Sample([], observations=[0.25, 0.75, 3.0])]
    push(node, Samples(0, 1.0, [family]))
    return node


def test_bounds_are_those_that_all_have_whoever_spoke_last() -> None:
    """Every count is by a bound that whoever counted had as well."""
    nodes = [
        other("a", 0.001, 0.002, 0.005, own=(0.5, 1.0)),
        other("b", 0.002, 0.005, own=(1.0, 2.0)),
        other("c", 0.002, 0.004, 0.005, own=(0.5, 1.0, 2.0)),
    ]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        root = Node("root", merge=True)
        for place in order:
            nodes[place].outbox.renew()
            nodes[place].tell(root)
        total = value(root, f"{ITL}_count")
        for place in (*order, *order):
            push(nodes[place], step(1))
            nodes[place].tell(root)
            total += 1
            found = samples(root.page)
            labels = 'engine="0",model_name="m"'

            assert bounds(root.page) == ["0.002", "0.005", "+Inf"]
            assert value(root, f"{ITL}_count") == total
            assert found[f'{ITL}_bucket{{{labels},le="0.002"}}'] == total - 9
            assert found[f'own_seconds_bucket{{{labels},le="1.0"}}'] == 6
            assert found[f'own_seconds_bucket{{{labels},le="+Inf"}}'] == 9
            assert f'own_seconds_bucket{{{labels},le="0.5"}}' not in found


def test_bounds_of_which_none_is_common_are_always_the_same_ones() -> None:
    """Those of the first exporter by name."""
    nodes = [other("a", 0.001, 0.01), other("b", 0.002, 0.02)]
    root = Node("root", merge=True)
    for node in reversed(nodes):
        node.tell(root)
    for node in (*nodes, *reversed(nodes)):
        push(node, step(1))
        node.tell(root)

        assert bounds(root.page) == ["0.001", "0.01", "+Inf"]


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


def word(life: int, size: int = 10) -> Word:
    """What a life said."""
    return Word("s", "e", life, (1, 1), b"x" * size, Standing(), {}, float(life))


def test_words_stand_until_their_sum_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum without room costs none of them."""
    known = Lives()
    words = [word(life) for life in (1, 2, 3)]
    for each in words:
        known.put(each)
    monkeypatch.setattr(lives, "MAX_BYTES", 25)
    with pytest.raises(WireError, match="over_limit"):
        known.replace(words[:2], summed(words[:2], b"x" * 30))

    assert list(known) == words
    assert (len(known), known.bytes) == (3, 30)


def test_however_many_lives_there_were_each_of_them_counts() -> None:
    """Of a sum that they are added to, no earlier one is taken for it."""
    root = Node("root")
    root.intake.forwarded.lives.most = 1
    for boot in range(1, lives.MAX_SUMMED + 9):
        wait(1.0, root)
        leaf("leaf", boot, step(1)).tell(root)

        assert value(root, TOKENS) == boot


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
    answers = root.intake.answers()

    assert [(peer, answer.code) for peer, answer in answers if isinstance(answer, Nack)] == [
        (b"exporter", "bad_schema")
    ]
    assert root.intake.answers() == []
    assert value(root, TOKENS) == 3


def test_a_frame_that_nobody_understands_is_answered() -> None:
    """So that an exporter of another release says why nothing of it arrives."""
    node, root = leaf("leaf", 1, step(3)), Node("root")
    (due,) = node.due()
    due.message.version = 9
    for frame in frames_of(due):
        root.hear(frame)

    assert [answer.code for _, answer in root.intake.answers() if isinstance(answer, Nack)] == [
        "version"
    ]


def test_no_sum_falls_because_it_is_added_up_in_another_order() -> None:
    """To Prometheus that would be a counter that began anew."""
    root = Node("root", merge=True)
    nodes = [leaf(name, 1) for name in "abc"]
    for node, seconds in zip(nodes, (0.1, 0.2, 0.4), strict=True):
        iteration = IterationStats(1, inter_token_latencies_iter=[seconds])
        push(node, VllmStep(0, 1.0, 1.0, None, iteration))
        node.tell(root)
    before = value(root, f"{ITL}_sum")
    while root.now < GAUGES_EXPIRE_SECONDS + 2:
        wait(5.0, root, *nodes[:2])
        for node in nodes[:2]:
            push(node, step(0))
            node.tell(root)

    assert before == 0.1 + 0.2 + 0.4 > 0.4 + 0.1 + 0.2
    assert value(root, f"{ITL}_sum") == before
