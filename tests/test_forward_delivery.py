"""The promise between exporters: nothing lost, nothing doubled, nothing taken back.

A state machine plays network, clock, disk and death for a tree of real exporters: leaves with and
without a state directory, one in between, and a root that shows all. Those two make sums of lives
that are too many to tell apart.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidestep.engines.items import VllmStep, encode_item
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.federation.outgoing import REFRESH
from sidestep.federation.store import PATIENCE
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo, Heartbeat
from trees import Node

KEPT = {"kept/a": True, "kept/b": True, "blank": False}
"""Leaves, and whether they have a state directory."""
UPPER = {"kept/a": "between", "kept/b": "root", "blank": "between", "between": "root"}
ENGINES = ("0", "1")
HOSTS = ("", "old", "new")
EPOCH = 1e6
FEW_LIVES = 2
CLOCKS = (-1000.0, -5.0, 0.0, 1000.0)
"""Seconds by which somebody moves a root's clock while it is down."""

Series = tuple[str, str]
"""Leaf and engine."""


class Tree(RuleBasedStateMachine):
    """What leaves counted is what the root shows, whatever happens in between."""

    patience = PATIENCE

    @initialize()
    def begin(self) -> None:
        """All processes, which never ran before."""
        self.now = self.ahead = 0.0
        self.boots = 0
        self.disks: dict[str, list[bytes]] = {}
        self.hosts = dict.fromkeys(UPPER, "")
        self.nodes: dict[str, Node] = {}
        self.wires: dict[str, list[bytes]] = {name: [] for name in UPPER}
        self.counted: dict[Series, int] = defaultdict(int)
        """By the leaf's process that runs, and those that it goes on with."""
        self.gauges: dict[Series, int] = {}
        self.heard: dict[tuple[str, int], dict[Series, int]] = defaultdict(dict)
        """What a leaf's life has told at most."""
        self.shown = self.most = 0
        for name in ("root", "between", *KEPT):
            self._start(name)

    def teardown(self) -> None:
        """In the end the root shows all, once everybody is there and has been heard."""
        if not hasattr(self, "nodes"):
            return
        for name in KEPT:
            for engine in ENGINES:
                self._push(name, engine, 1, 7)
        for _ in range(2):
            self._pass(REFRESH + 1)
            self._settle()
        self._compare()

    def _settle(self) -> None:
        for name in (*KEPT, "between"):
            if KEPT.get(name):
                self._save(name)
            self._tell(name)
            self._arrive(name, len(self.wires[name]))

    def _compare(self) -> None:
        found = self._page()
        for name in KEPT:
            for engine in ENGINES:
                wanted = self.counted[name, engine]
                for (leaf, life), told in self.heard.items():
                    # Of a process that died without a word all that it told counts.
                    if leaf == name and life != self.nodes[name].intake.life:
                        wanted += told.get((name, engine), 0)
                tokens = sum(
                    n for (leaf, e, _), (n, _) in found.items() if (leaf, e) == (name, engine)
                )
                assert tokens == wanted, (name, engine, tokens, wanted)
                key = name, engine, self.hosts[name]
                assert found[key][1] == self.gauges[name, engine], key

    @rule(
        leaf=st.sampled_from(sorted(KEPT)),
        engine=st.sampled_from(ENGINES),
        tokens=st.integers(0, 9),
        running=st.integers(0, 5),
    )
    def push(self, leaf: str, engine: str, tokens: int, running: int) -> None:
        """An engine has made a step."""
        self._push(leaf, engine, tokens, running)

    @rule(leaf=st.sampled_from([name for name, kept in sorted(KEPT.items()) if kept]))
    def save(self, leaf: str) -> None:
        """A leaf's snapshot is written."""
        self._save(leaf)

    @rule(name=st.sampled_from(sorted(UPPER)))
    def tell(self, name: str) -> None:
        """What is new leaves for the next exporter."""
        self._tell(name)

    @precondition(lambda self: any(self.wires.values()))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """Some of what is on the way arrives, in order or not, or twice."""
        name = data.draw(st.sampled_from(sorted(n for n, wire in self.wires.items() if wire)))
        wire = self.wires[name]
        fate = data.draw(st.sampled_from(["order", "mixed", "twice"]))
        if fate == "mixed":
            self.wires[name] = list(data.draw(st.permutations(wire)))
        elif fate == "twice":
            self.wires[name] = [*wire, *wire]
        self._arrive(name, data.draw(st.integers(1, len(self.wires[name]))))

    @precondition(lambda self: any(self.wires.values()))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A part of what is on the way does not arrive."""
        name = data.draw(st.sampled_from(sorted(n for n, wire in self.wires.items() if wire)))
        kept = data.draw(st.sets(st.integers(0, len(self.wires[name]) - 1)))
        self.wires[name] = [self.wires[name][place] for place in sorted(kept)]

    @rule(leaf=st.sampled_from([name for name, kept in sorted(KEPT.items()) if kept]))
    def kill_kept(self, leaf: str) -> None:
        """A leaf dies, and what no snapshot had is sent to the next one again."""
        self._start(leaf)

    @rule()
    def kill_blank(self) -> None:
        """One without a state directory dies, and its counts with it, but for what it told.

        The root's snapshot has that: the one in between makes a sum of lives that are too many,
        and tells of it no more.
        """
        self._settle_wire("blank")
        self._scrape()
        self._start("blank")

    @rule(host=st.sampled_from(HOSTS), leaf=st.sampled_from(sorted(KEPT)))
    def relabel(self, host: str, leaf: str) -> None:
        """A leaf starts with another label."""
        if not KEPT[leaf]:
            self._settle_wire(leaf)
            self._scrape()
        self.hosts[leaf] = host
        self._start(leaf)

    @rule()
    def kill_between(self) -> None:
        """The one in between dies, which keeps nothing; whoever told it something says all again."""
        self._settle_wire("between")
        self._scrape()
        self._start("between")
        for name, upper in UPPER.items():
            if upper == "between":
                self.nodes[name].outbox.renew()

    @rule()
    def kill_root(self) -> None:
        """The root dies; what it showed, its snapshot has."""
        self.disks["root"] = self.nodes["root"].disk
        self._start("root")
        for name, upper in UPPER.items():
            if upper == "root":
                self.nodes[name].outbox.renew()

    @rule(seconds=st.sampled_from([0.5, REFRESH, GAUGES_EXPIRE_SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        """Time passes; engines whose steps are rare are heard all the same."""
        self._pass(seconds)

    @rule()
    def scrape(self) -> None:
        """Somebody sees the root's page, once its snapshot has what it shows."""
        self._scrape()

    @invariant()
    def never_back(self) -> None:
        """What the root has shown it shows for ever, and nothing that nobody counted."""
        if hasattr(self, "nodes"):
            assert self._total() >= self.shown
            assert self._total() <= self.most

    def _scrape(self) -> None:
        self.nodes["root"].save()
        self.shown = self._total()

    def _total(self) -> int:
        return sum(tokens for tokens, _ in self._page().values())

    def _push(self, leaf: str, engine: str, tokens: int, running: int) -> None:
        node = self.nodes[leaf]
        stats = SchedulerStats(num_running_reqs=running)
        item = VllmStep(0, self.now, 1.0, stats, IterationStats(tokens))
        node.items(f"{leaf}/{engine}", [encode_item(item)])
        self.counted[leaf, engine] += tokens
        self.most += tokens
        self.gauges[leaf, engine] = running
        if KEPT[leaf]:
            self.unsaved[leaf].append((engine, item))

    def _save(self, leaf: str) -> None:
        self.nodes[leaf].save()
        self.disks[leaf] = self.nodes[leaf].disk
        self.unsaved[leaf] = []

    def _tell(self, name: str) -> None:
        node = self.nodes[name]
        self.wires[name] += node.frames()
        if name == "blank":
            # Only what it has counted until now; what it counts later is another word.
            told = self.heard[name, node.intake.life]
            told.update({key: n for key, n in self.counted.items() if key[0] == name})

    def _arrive(self, name: str, count: int) -> None:
        upper = self.nodes[UPPER[name]]
        now, self.wires[name] = self.wires[name][:count], self.wires[name][count:]
        for frame in now:
            upper.hear(frame)

    def _settle_wire(self, name: str) -> None:
        """What it has told arrives, all the way: what was lost is said again before it dies."""
        self.nodes[name].outbox.renew()
        self._tell(name)
        while name != "root":
            self._arrive(name, len(self.wires[name]))
            name = UPPER[name]
            if name != "root":
                self.nodes[name].outbox.renew()
                self._tell(name)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        for name, node in self.nodes.items():
            node.now = self.now
            if name in KEPT:
                for engine in ENGINES:
                    stream = f"{name}/{engine}"
                    beat = Heartbeat(node.incarnation(stream), node.seqs[stream], 0)
                    node.say(stream, beat)
            node.intake.pass_time(self.now)

    def _start(self, name: str) -> None:
        """Another process takes the place of the last one."""
        self.boots += 1
        before = self.nodes.get(name)
        labels = {"host": self.hosts[name]} if self.hosts.get(name) else {}
        node = self.nodes[name] = Node(
            name,
            self.boots,
            state=KEPT.get(name, False),
            disk=self.disks.get(name, ()),
            labels=labels,
            now=self.now,
            wall=EPOCH + self.now + (self.ahead if name == "root" else 0.0),
        )
        if name not in KEPT:
            node.intake.forwarded.lives.most = FEW_LIVES
            node.intake.forwarded.patience = self.patience
            return
        again = self.unsaved[name] if hasattr(self, "unsaved") else []
        if not hasattr(self, "unsaved"):
            self.unsaved: dict[str, list[tuple[str, VllmStep]]] = defaultdict(list)
        if not KEPT[name]:
            for engine in ENGINES:
                self.counted.pop((name, engine), None)
                self.gauges.pop((name, engine), None)
        for engine in ENGINES:
            stream = f"{name}/{engine}"
            if before is not None and KEPT[name]:
                node.processes[stream] = before.processes[stream]
                lost = sum(1 for e, _ in again if e == engine)
                node.seqs[stream] = before.seqs[stream] - lost
            node.greet(stream, [_info(name, engine)])
        for engine, item in again:
            node.items(f"{name}/{engine}", [encode_item(item)])

    def _page(self) -> dict[tuple[str, str, str], tuple[int, int | None]]:
        """Tokens and running requests by leaf, engine and host, as the root shows them."""
        found: dict[tuple[str, str, str], tuple[int, int | None]] = {}
        registry = self.nodes["root"].intake.registry
        layout = registry.layouts["vllm"]
        (tokens,) = layout.find("vllm:generation_tokens_total").slots
        (running,) = layout.find("vllm:num_requests_running").slots
        for engine in (*registry.engines.values(), *registry.retired.values()):
            labels = engine.labels
            key = labels["model_name"], labels["engine"], labels.get("host", "")
            known = found.get(key, (0, None))
            gauge = engine.values[running] if engine.live else None
            found[key] = (
                known[0] + int(engine.values[tokens] or 0),
                None if gauge is None else int(gauge),
            )
        return found


def _info(leaf: str, engine: str) -> EngineInfo:
    return EngineInfo(f"{leaf}/m/{engine}", "vllm", {"engine": engine, "model_name": leaf})


TestTree = Tree.TestCase
TestTree.settings = settings(
    max_examples=int(os.environ.get("SIDESTEP_TREES", "25")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class Clocks(Tree):
    """Somebody moves the root's clock while it is down; no leaf starts too often in a minute."""

    patience = 1000

    @rule(ahead=st.sampled_from(CLOCKS))
    def set_clock(self, ahead: float) -> None:
        """It is found out when the root starts."""
        self.ahead = ahead


TestClocks = Clocks.TestCase
TestClocks.settings = TestTree.settings


def test_a_sum_of_which_one_word_counts_is_under_the_last_ones_labels() -> None:
    """Also after a restart: the one that counts had other labels. Found by the model once."""
    tree = Tree()
    tree.begin()
    tree.push(engine="0", leaf="blank", running=0, tokens=1)
    tree.kill_blank()
    tree.relabel(host="old", leaf="blank")
    tree.relabel(host="", leaf="blank")
    for _ in range(3):
        tree.kill_blank()
    tree.kill_root()

    tree.never_back()
    tree.teardown()


@pytest.mark.parametrize("ahead", CLOCKS)
def test_a_process_that_one_in_between_forgot_is_not_in_a_sum(ahead: float) -> None:
    """Who has begun anew more often than lives are told apart, while both above it were killed.

    The model found it where it set the clock back whenever a process began.
    """
    tree = Clocks()
    tree.begin()
    tree.kill_blank()
    tree.kill_blank()
    tree._tell("blank")
    tree._arrive("blank", 1)
    tree.wait(0.5)
    tree.set_clock(ahead)
    tree.kill_root()
    tree.kill_between()
    tree.teardown()


@pytest.mark.parametrize("ahead", CLOCKS)
def test_a_process_that_was_cut_off_is_not_in_a_sum(ahead: float) -> None:
    """The root hears late of the present one, whom the one in between has not heard for long."""
    tree = Clocks()
    tree.begin()
    tree.kill_blank()
    tree.kill_blank()
    tree.wait(2 * GAUGES_EXPIRE_SECONDS)
    tree._tell("blank")
    tree._arrive("blank", 2)
    tree.wait(0.5)
    tree._save("kept/b")
    tree._settle_wire("kept/b")
    tree._scrape()
    tree.set_clock(ahead)
    tree.kill_root()
    tree.wait(GAUGES_EXPIRE_SECONDS + 1)
    tree._settle_wire("between")
    tree.teardown()


@pytest.mark.parametrize("ahead", CLOCKS)
def test_a_process_that_spoke_while_the_root_was_down_is_not_in_a_sum(ahead: float) -> None:
    """The one in between heard it, and nobody has for longer than a clock was set back."""
    tree = Clocks()
    tree.begin()
    tree.kill_blank()
    tree.kill_blank()
    tree._scrape()
    tree.wait(0.5)
    tree._tell("blank")
    tree._arrive("blank", 2)
    tree.wait(20)
    tree.set_clock(ahead)
    tree.kill_root()
    tree.wait(GAUGES_EXPIRE_SECONDS - 19)
    tree._settle_wire("between")
    tree.teardown()
