"""Model test of forwarding: no counter is lost or duplicated, and none decreases.

A state machine loses and delays messages, and kills and restores real exporters: downstream ones
with and without a state directory, one in between, and the upstream, which exposes all engines. An
oracle follows what reaches the upstream by the rules alone: the newest record of each epoch counts, and
an ended epoch gets no more records.
"""

from __future__ import annotations

import os
from collections import defaultdict

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nodes import Node
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.federation.messages import decode_forward, order_of
from sidestep.federation.outbox import REFRESH
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo, Heartbeat

STATEFUL = {"state/a": True, "state/b": True, "blank": False}
"""Downstream exporters, and whether they have a state directory."""
UPPER = {"state/a": "between", "state/b": "upstream", "blank": "between", "between": "upstream"}
ENGINES = ("0", "1")
HOSTS = ("", "old", "new")
WALL = 1e6

Series = tuple[str, str]
"""Downstream exporter and engine."""
Order = tuple[int, int, int]


class Oracle:
    """Counters that an exporter must expose, by the records that have reached it."""

    def __init__(self) -> None:
        self.epochs: dict[Series, dict[int, tuple[Order, int]]] = defaultdict(dict)

    def accept(self, series: Series, order: Order, tokens: int) -> None:
        """Record the tokens in a record."""
        known = self.epochs[series]
        if order[0] >= max(known, default=0) and order >= known.get(order[0], (order, 0))[0]:
            known[order[0]] = order, tokens

    def tokens(self, series: Series) -> int:
        """Return the tokens that must be exposed."""
        return sum(tokens for _, tokens in self.epochs[series].values())

    def copy(self) -> Oracle:
        """Return a copy."""
        made = Oracle()
        made.epochs.update({series: dict(known) for series, known in self.epochs.items()})
        return made


class Federation(RuleBasedStateMachine):
    """Downstream exporters, one in between and the upstream, with any loss, delay and restart."""

    @initialize()
    def begin(self) -> None:
        """Start all processes."""
        self.now = 0.0
        self.boots = 0
        self.disks: dict[str, list[bytes]] = {}
        self.hosts = dict.fromkeys(UPPER, "")
        self.nodes: dict[str, Node] = {}
        self.wires: dict[str, list[bytes]] = {name: [] for name in UPPER}
        self.unsaved: dict[str, list[tuple[str, VllmStep]]] = defaultdict(list)
        self.counted: dict[Series, int] = defaultdict(int)
        """Tokens that the running process and those whose snapshot it continues have counted."""
        self.durable: dict[Series, int] = defaultdict(int)
        """Tokens that are in the snapshot."""
        self.gauges: dict[Series, int] = {}
        self.sent: dict[tuple[Series, Order], int] = {}
        """Tokens in each record that was sent."""
        self.oracles = {name: Oracle() for name in ("upstream", "between")}
        self.saved = Oracle()
        """Records in the upstream's snapshot."""
        self.owed: dict[tuple[Series, int], int] = {}
        """Tokens of the epochs whose last records the exporter in between has to forward."""
        self.forgiven: set[tuple[Series, int]] = set()
        """Epochs that it need not forward: a record was lost though no connection broke."""
        self.shown = self.most = 0
        for name in ("upstream", "between", *STATEFUL):
            self._start(name)

    def teardown(self) -> None:
        """Check that the upstream exposes everything once every process has been reached."""
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
                epochs = self.oracles["upstream"].epochs[name, engine]
                assert epochs[max(epochs)][1] == self.counted[name, engine]
                assert len(epochs) == 1 or not is_stateful
                assert tokens == self.oracles["upstream"].tokens((name, engine))
                assert (running, host) == (self.gauges[name, engine], self.hosts[name])
        for (series, epoch), tokens in self.owed.items():
            assert self.oracles["upstream"].epochs[series][epoch][1] >= tokens

    @rule(
        downstream=st.sampled_from(sorted(STATEFUL)),
        engine=st.sampled_from(ENGINES),
        tokens=st.integers(0, 9),
        running=st.integers(0, 5),
    )
    def push(self, downstream: str, engine: str, tokens: int, running: int) -> None:
        """Push a step of an engine."""
        self._push(downstream, engine, tokens, running)

    @rule(
        downstream=st.sampled_from(
            [name for name, is_stateful in sorted(STATEFUL.items()) if is_stateful]
        )
    )
    def save(self, downstream: str) -> None:
        """Write a snapshot of a downstream exporter."""
        self._save(downstream)

    @rule(name=st.sampled_from(sorted(UPPER)))
    def send(self, name: str) -> None:
        """Send due records to the next exporter."""
        self._send(name)

    @precondition(lambda self: any(self.wires.values()))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """Deliver some of the frames in transit, in order or not, or twice."""
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
        """Lose some of the frames in transit."""
        name = data.draw(st.sampled_from(sorted(n for n, wire in self.wires.items() if wire)))
        kept = data.draw(st.sets(st.integers(0, len(self.wires[name]) - 1)))
        self.wires[name] = [self.wires[name][place] for place in sorted(kept)]
        self._forgive(name)

    @rule(downstream=st.sampled_from(sorted(STATEFUL)))
    def deliver(self, downstream: str) -> None:
        """Deliver all records of a downstream exporter to the upstream."""
        if STATEFUL[downstream]:
            self._save(downstream)
        name = downstream
        while name != "upstream":
            self._send(name)
            self._arrive(name, len(self.wires[name]))
            name = UPPER[name]

    @precondition(lambda self: any(self.wires.values()))
    @rule(name=st.sampled_from(sorted(UPPER)))
    def cut(self, name: str) -> None:
        """Break a connection: frames in transit are lost, and all records are sent again."""
        self.wires[name] = []
        self.nodes[name].outbox.renew()

    @rule(downstream=st.sampled_from(sorted(STATEFUL)))
    def kill_downstream(self, downstream: str) -> None:
        """Restart a downstream exporter; without a state directory a new epoch starts."""
        self._start(downstream)

    @rule(host=st.sampled_from(HOSTS), downstream=st.sampled_from(sorted(STATEFUL)))
    def relabel(self, host: str, downstream: str) -> None:
        """Restart a downstream exporter with another label."""
        self.hosts[downstream] = host
        self._start(downstream)

    @rule()
    def kill_between(self) -> None:
        """Restart the exporter in between, which has no snapshot."""
        self._start("between")
        self._forgive("between")
        self.oracles["between"] = Oracle()
        for name in ("state/a", "blank"):
            self.nodes[name].outbox.renew()

    @rule()
    def kill_upstream(self) -> None:
        """Restart the upstream from its snapshot; all records are sent again."""
        self.disks["upstream"] = self.nodes["upstream"].disk
        self.oracles["upstream"] = self.saved.copy()
        self._start("upstream")
        for name in ("state/b", "between"):
            self.wires[name] = []
            self.nodes[name].outbox.renew()

    @rule(seconds=st.sampled_from([0.5, REFRESH, GAUGES_EXPIRE_SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        """Let time pass; idle engines send heartbeats."""
        self._pass(seconds)

    @rule()
    def scrape(self) -> None:
        """Scrape the upstream, after a snapshot that holds what the page exposes."""
        self.nodes["upstream"].save()
        self.saved = self.oracles["upstream"].copy()
        self.shown = self._total()

    @invariant()
    def exact(self) -> None:
        """Check that the upstream exposes exactly the records that reached it, and never less than before."""
        if not hasattr(self, "nodes"):
            return
        page = self._page()
        for series, known in self.oracles["upstream"].epochs.items():
            if known:
                assert page[series][0] == self.oracles["upstream"].tokens(series), series
        assert self.shown <= self._total() <= self.most
        assert ("bug",) not in self.nodes["upstream"].rejected
        store = self.nodes["upstream"].intake.federation
        assert store.bytes == sum(federated.size for federated in store)

    def _settle(self) -> None:
        for name in (*STATEFUL, "between"):
            if STATEFUL.get(name):
                self._save(name)
            self._send(name)
            self._arrive(name, len(self.wires[name]))

    def _total(self) -> int:
        return sum(tokens for tokens, _, _ in self._page().values())

    def _push(self, downstream: str, engine: str, tokens: int, running: int) -> None:
        node = self.nodes[downstream]
        stats = SchedulerStats(num_running_reqs=running)
        item = VllmStep(0, self.now, 1.0, stats, IterationStats(tokens))
        node.items(f"{downstream}/{engine}", [encode_item(item)])
        self.counted[downstream, engine] += tokens
        self.most += tokens
        self.gauges[downstream, engine] = running
        if STATEFUL[downstream]:
            self.unsaved[downstream].append((engine, item))

    def _save(self, downstream: str) -> None:
        self.nodes[downstream].save()
        self.disks[downstream] = self.nodes[downstream].disk
        self.unsaved[downstream] = []
        self.durable.update(self._counts(downstream))

    def _counts(self, downstream: str) -> dict[Series, int]:
        return {(downstream, engine): self.counted[downstream, engine] for engine in ENGINES}

    def _send(self, name: str) -> None:
        frames = self.nodes[name].frames()
        self.wires[name] += frames
        if name not in STATEFUL:
            return
        counts = self.durable if STATEFUL[name] else self._counts(name)
        for frame in frames:
            message = decode_forward(frame)
            series = name, message.engine.rpartition("/")[2]
            self.sent[series, order_of(message)] = counts[series]

    def _arrive(self, name: str, count: int) -> None:
        upper = UPPER[name]
        now, self.wires[name] = self.wires[name][:count], self.wires[name][count:]
        for frame in now:
            message = decode_forward(frame)
            series, order = (message.source, message.engine.rpartition("/")[2]), order_of(message)
            self.oracles[upper].accept(series, order, self.sent[series, order])
            if upper == "between" and series[0] == "blank":
                self._owe(series)
            self.nodes[upper].receive(frame)

    def _owe(self, series: Series) -> None:
        """Note the epochs that the exporter in between knows: the last two."""
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
                    node.send(stream, beat)
            node.intake.expire(self.now)

    def _start(self, name: str) -> None:
        """Start another process in the place of the previous one."""
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
            node.send_hello(stream, [_info(name, engine)])
        for engine, item in self.unsaved[name]:
            node.items(f"{name}/{engine}", [encode_item(item)])

    def _page(self) -> dict[Series, tuple[int, int | None, str]]:
        """Return tokens, running requests and host by series, as the upstream exposes them."""
        found: dict[Series, tuple[int, int | None, str]] = {}
        registry = self.nodes["upstream"].intake.registry
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


def _info(downstream: str, engine: str) -> EngineInfo:
    return EngineInfo(
        f"{downstream}/m/{engine}", "vllm", {"engine": engine, "model_name": downstream}
    )


TestFederation = Federation.TestCase
TestFederation.settings = settings(
    max_examples=int(os.environ.get("SIDESTEP_TREES", "25")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
