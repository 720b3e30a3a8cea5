"""The promise between exporters: nothing lost, nothing doubled, nothing taken back.

A state machine plays network, disk and death for real exporters: leaves with and without a state
directory, one exporter in between, and a root that shows all. An oracle follows what reaches the
root by the rules alone: the newest record of each epoch counts, an ended epoch counts no more.
"""

from __future__ import annotations

import os
from collections import defaultdict

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidestep.engines.items import VllmStep, encode_item
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.federation.messages import decode_forward, order_of
from sidestep.federation.outbox import REFRESH
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo, Heartbeat
from trees import Node

STATEFUL = {"state/a": True, "state/b": True, "blank": False}
"""Leaves, and whether they have a state directory."""
UPPER = {"state/a": "between", "state/b": "root", "blank": "between", "between": "root"}
ENGINES = ("0", "1")
HOSTS = ("", "old", "new")
WALL = 1e6

Series = tuple[str, str]
"""Leaf and engine."""
Order = tuple[int, int, int]


class Oracle:
    """What an exporter must show, by the records that have reached it."""

    def __init__(self) -> None:
        self.epochs: dict[Series, dict[int, tuple[Order, int]]] = defaultdict(dict)

    def hear(self, series: Series, order: Order, tokens: int) -> None:
        """Take a record that says so many tokens."""
        known = self.epochs[series]
        if order[0] >= max(known, default=0) and order >= known.get(order[0], (order, 0))[0]:
            known[order[0]] = order, tokens

    def tokens(self, series: Series) -> int:
        """What is to be shown."""
        return sum(tokens for _, tokens in self.epochs[series].values())

    def copy(self) -> Oracle:
        """Another that knows the same."""
        made = Oracle()
        made.epochs.update({series: dict(known) for series, known in self.epochs.items()})
        return made


class Tree(RuleBasedStateMachine):
    """What leaves counted is what the root shows, whatever happens in between."""

    @initialize()
    def begin(self) -> None:
        """Start all processes, for the first time."""
        self.now = 0.0
        self.boots = 0
        self.disks: dict[str, list[bytes]] = {}
        self.hosts = dict.fromkeys(UPPER, "")
        self.nodes: dict[str, Node] = {}
        self.wires: dict[str, list[bytes]] = {name: [] for name in UPPER}
        self.unsaved: dict[str, list[tuple[str, VllmStep]]] = defaultdict(list)
        self.counted: dict[Series, int] = defaultdict(int)
        """By the leaf's process that runs, and those whose snapshot it continues."""
        self.durable: dict[Series, int] = defaultdict(int)
        """Of those, what the leaf's snapshot has."""
        self.gauges: dict[Series, int] = {}
        self.said: dict[tuple[Series, Order], int] = {}
        """Tokens in each record that was sent."""
        self.oracles = {name: Oracle() for name in ("root", "between")}
        self.saved = Oracle()
        """What the root's snapshot has."""
        self.owed: dict[tuple[Series, int], int] = {}
        """Tokens of the epochs whose last records the exporter in between has to pass on."""
        self.forgiven: set[tuple[Series, int]] = set()
        """Those that it need not: a record got lost, though no connection broke."""
        self.shown = self.most = 0
        for name in ("root", "between", *STATEFUL):
            self._start(name)

    def teardown(self) -> None:
        """In the end the root shows all, once every process is there and was heard."""
        if not hasattr(self, "nodes"):
            return
        for name in STATEFUL:
            for engine in ENGINES:
                self._push(name, engine, 1, 7)
        for _ in range(2):
            self._pass(REFRESH + 1)
            self._settle()
        page = self._page()
        for name, is_stateful in STATEFUL.items():
            for engine in ENGINES:
                tokens, running, host = page[name, engine]
                told = self.oracles["root"].epochs[name, engine]
                assert told[max(told)][1] == self.counted[name, engine]
                assert len(told) == 1 or not is_stateful
                assert tokens == self.oracles["root"].tokens((name, engine))
                assert (running, host) == (self.gauges[name, engine], self.hosts[name])
        for (series, epoch), tokens in self.owed.items():
            assert self.oracles["root"].epochs[series][epoch][1] >= tokens

    @rule(
        leaf=st.sampled_from(sorted(STATEFUL)),
        engine=st.sampled_from(ENGINES),
        tokens=st.integers(0, 9),
        running=st.integers(0, 5),
    )
    def push(self, leaf: str, engine: str, tokens: int, running: int) -> None:
        """An engine has made a step."""
        self._push(leaf, engine, tokens, running)

    @rule(leaf=st.sampled_from([name for name, kept in sorted(STATEFUL.items()) if kept]))
    def save(self, leaf: str) -> None:
        """A leaf's snapshot is written."""
        self._save(leaf)

    @rule(name=st.sampled_from(sorted(UPPER)))
    def send(self, name: str) -> None:
        """What is new leaves for the next exporter."""
        self._send(name)

    @precondition(lambda self: any(self.wires.values()))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """Some of what is on the way arrives, in order or not, or twice."""
        name = data.draw(st.sampled_from(sorted(n for n, wire in self.wires.items() if wire)))
        wire = self.wires[name]
        fate = data.draw(st.sampled_from(["order", "mixed", "twice"]))
        if fate == "mixed":
            order = data.draw(st.permutations(range(len(wire))))
            self.wires[name] = [wire[place] for place in order]
            self._forgive(name)
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
        self._forgive(name)

    @rule(leaf=st.sampled_from(sorted(STATEFUL)))
    def deliver(self, leaf: str) -> None:
        """All that a leaf has to say reaches the root."""
        if STATEFUL[leaf]:
            self._save(leaf)
        name = leaf
        while name != "root":
            self._send(name)
            self._arrive(name, len(self.wires[name]))
            name = UPPER[name]

    @precondition(lambda self: any(self.wires.values()))
    @rule(name=st.sampled_from(sorted(UPPER)))
    def cut(self, name: str) -> None:
        """A connection breaks: what is on the way is lost, and all is sent anew."""
        self.wires[name] = []
        self.nodes[name].outbox.renew()

    @rule(leaf=st.sampled_from(sorted(STATEFUL)))
    def kill_leaf(self, leaf: str) -> None:
        """A leaf dies; without a state directory the next one starts a new epoch."""
        self._start(leaf)

    @rule(host=st.sampled_from(HOSTS), leaf=st.sampled_from(sorted(STATEFUL)))
    def relabel(self, host: str, leaf: str) -> None:
        """A leaf starts with another label."""
        self.hosts[leaf] = host
        self._start(leaf)

    @rule()
    def kill_between(self) -> None:
        """The one in between dies, which keeps nothing; its leaves send all again."""
        self._start("between")
        self._forgive("between")
        self.oracles["between"] = Oracle()
        for name in ("state/a", "blank"):
            self.nodes[name].outbox.renew()

    @rule()
    def kill_root(self) -> None:
        """The root dies, and goes on with its snapshot; all is sent again."""
        self.disks["root"] = self.nodes["root"].disk
        self.oracles["root"] = self.saved.copy()
        self._start("root")
        for name in ("state/b", "between"):
            self.wires[name] = []
            self.nodes[name].outbox.renew()

    @rule(seconds=st.sampled_from([0.5, REFRESH, GAUGES_EXPIRE_SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        """Time passes; engines whose steps are rare are heard all the same."""
        self._pass(seconds)

    @rule()
    def scrape(self) -> None:
        """The root's page is seen, once its snapshot has what it shows."""
        self.nodes["root"].save()
        self.saved = self.oracles["root"].copy()
        self.shown = self._total()

    @invariant()
    def exact(self) -> None:
        """The root shows what has reached it, never less than before, and nothing that nobody counted."""
        if not hasattr(self, "nodes"):
            return
        page = self._page()
        for series, known in self.oracles["root"].epochs.items():
            if known:
                assert page[series][0] == self.oracles["root"].tokens(series), series
        assert self.shown <= self._total() <= self.most
        assert ("bug",) not in self.nodes["root"].rejected
        store = self.nodes["root"].intake.federation
        assert store.bytes == sum(federated.size for federated in store)

    def _settle(self) -> None:
        for name in (*STATEFUL, "between"):
            if STATEFUL.get(name):
                self._save(name)
            self._send(name)
            self._arrive(name, len(self.wires[name]))

    def _total(self) -> int:
        return sum(tokens for tokens, _, _ in self._page().values())

    def _push(self, leaf: str, engine: str, tokens: int, running: int) -> None:
        node = self.nodes[leaf]
        stats = SchedulerStats(num_running_reqs=running)
        item = VllmStep(0, self.now, 1.0, stats, IterationStats(tokens))
        node.items(f"{leaf}/{engine}", [encode_item(item)])
        self.counted[leaf, engine] += tokens
        self.most += tokens
        self.gauges[leaf, engine] = running
        if STATEFUL[leaf]:
            self.unsaved[leaf].append((engine, item))

    def _save(self, leaf: str) -> None:
        self.nodes[leaf].save()
        self.disks[leaf] = self.nodes[leaf].disk
        self.unsaved[leaf] = []
        self.durable.update(self._counts(leaf))

    def _counts(self, leaf: str) -> dict[Series, int]:
        return {(leaf, engine): self.counted[leaf, engine] for engine in ENGINES}

    def _send(self, name: str) -> None:
        frames = self.nodes[name].frames()
        self.wires[name] += frames
        if name not in STATEFUL:
            return
        counts = self.durable if STATEFUL[name] else self._counts(name)
        for frame in frames:
            message = decode_forward(frame)
            series = name, message.engine.rpartition("/")[2]
            self.said[series, order_of(message)] = counts[series]

    def _arrive(self, name: str, count: int) -> None:
        upper = UPPER[name]
        now, self.wires[name] = self.wires[name][:count], self.wires[name][count:]
        for frame in now:
            message = decode_forward(frame)
            series, order = (message.source, message.engine.rpartition("/")[2]), order_of(message)
            self.oracles[upper].hear(series, order, self.said[series, order])
            if upper == "between" and series[0] == "blank":
                self._owe(series)
            self.nodes[upper].hear(frame)

    def _owe(self, series: Series) -> None:
        """Note which epochs the one in between knows: the last two."""
        known = self.oracles["between"].epochs[series]
        for epoch in list(known):
            self.owed.pop((series, epoch), None)
        for epoch in sorted(known)[-2:]:
            if (series, epoch) not in self.forgiven:
                self.owed[series, epoch] = known[epoch][1]

    def _forgive(self, name: str) -> None:
        if name == "between":
            self.forgiven |= self.owed.keys()
            self.owed.clear()

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        for name, node in self.nodes.items():
            node.now = self.now
            if name in STATEFUL:
                for engine in ENGINES:
                    stream = f"{name}/{engine}"
                    beat = Heartbeat(node.incarnation(stream), node.seqs[stream], 0)
                    node.say(stream, beat)
            node.intake.expire(self.now)

    def _start(self, name: str) -> None:
        """Let another process take the place of the last one."""
        self.boots += 1
        before = self.nodes.get(name)
        labels = {"host": self.hosts[name]} if self.hosts.get(name) else {}
        node = self.nodes[name] = Node(
            name,
            self.boots,
            state=STATEFUL.get(name, False),
            disk=self.disks.get(name, ()),
            labels=labels,
            now=self.now,
            wall=WALL + self.now,
        )
        if name not in STATEFUL:
            return
        if not STATEFUL[name]:
            for engine in ENGINES:
                self.counted.pop((name, engine), None)
                self.gauges.pop((name, engine), None)
        for engine in ENGINES:
            stream = f"{name}/{engine}"
            if before is not None and STATEFUL[name]:
                node.processes[stream] = before.processes[stream]
                lost = sum(1 for e, _ in self.unsaved[name] if e == engine)
                node.seqs[stream] = before.seqs[stream] - lost
            node.greet(stream, [_info(name, engine)])
        for engine, item in self.unsaved[name]:
            node.items(f"{name}/{engine}", [encode_item(item)])

    def _page(self) -> dict[Series, tuple[int, int | None, str]]:
        """Tokens, running requests and host by leaf and engine, as the root shows them."""
        found: dict[Series, tuple[int, int | None, str]] = {}
        registry = self.nodes["root"].intake.registry
        layout = registry.layouts["vllm"]
        (tokens,) = layout.find("vllm:generation_tokens_total").slots
        (running,) = layout.find("vllm:num_requests_running").slots
        for engine in (*registry.engines.values(), *registry.retired.values()):
            key = engine.labels["model_name"], engine.labels["engine"]
            assert key not in found
            gauge = engine.values[running] if engine.live else None
            found[key] = (
                int(engine.values[tokens] or 0),
                None if gauge is None else int(gauge),
                engine.labels.get("host", ""),
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
