"""The promise where many exporters are one engine, and come, go, and come back.

A state machine plays leaves that keep nothing, or are cut off for long, an exporter in between, and
a root that takes all of them for one engine; both make sums of what is too much to tell apart.
"""

from __future__ import annotations

import os
from collections import defaultdict

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidestep.engines.items import VllmStep, encode_item
from sidestep.federation import store as forwarded
from sidestep.federation.outgoing import REFRESH
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo, Heartbeat
from trees import Node

LEAVES = ("a", "b", "c", "d", "e")
BETWEEN = ("a", "b", "c")
"""Leaves that tell the exporter in between; the others tell the root."""
FEW_LIVES = 2
FEW_GONE = 1
Life = tuple[str, int]


class Crowd(RuleBasedStateMachine):
    """What leaves told is what the root shows, each once."""

    @initialize()
    def begin(self) -> None:
        """All processes, which never ran before."""
        self.most_gone, forwarded.MAX_GONE = forwarded.MAX_GONE, FEW_GONE
        self.now = 0.0
        self.boots = self.pushed = self.shown = 0
        self.cut_off: set[str] = set()
        self.nodes: dict[str, Node] = {}
        self.disk: list[bytes] = []
        self.counted: dict[Life, int] = defaultdict(int)
        self.told: dict[Life, int] = {}
        self.saved: dict[Life, int] = {}
        """What the root's snapshot has."""
        for name in ("root", "between", *LEAVES):
            self._start(name)

    def teardown(self) -> None:
        """In the end the root shows what was told, once those in between have told it."""
        if not hasattr(self, "nodes"):
            return
        try:
            for name in LEAVES:
                self._push(name, 1)
            self._elapse(REFRESH)
            self._elapse(REFRESH)
            assert self._total() == sum(self.told.values())
        finally:
            forwarded.MAX_GONE = self.most_gone

    @rule(leaf=st.sampled_from(LEAVES), tokens=st.integers(1, 9))
    def push(self, leaf: str, tokens: int) -> None:
        """An engine has made a step."""
        self._push(leaf, tokens)

    @rule(leaf=st.sampled_from(LEAVES))
    def tell(self, leaf: str) -> None:
        """What is new leaves for the next exporter."""
        self._tell(leaf)

    @rule()
    def pass_on(self) -> None:
        """The one in between tells what it was told."""
        self.nodes["between"].tell(self.nodes["root"])

    @rule(leaf=st.sampled_from(LEAVES))
    def replace(self, leaf: str) -> None:
        """A leaf dies, and all that it has not told; another process begins at 0."""
        self._scrape()
        self._start(leaf)

    @precondition(lambda self: len(self.cut_off) < len(LEAVES) - 1)
    @rule(leaf=st.sampled_from(LEAVES))
    def cut(self, leaf: str) -> None:
        """Nobody hears a leaf any more, which counts on."""
        self.cut_off.add(leaf)

    @precondition(lambda self: self.cut_off)
    @rule(data=st.data())
    def mend(self, data: st.DataObject) -> None:
        """It is heard again."""
        self.cut_off.discard(data.draw(st.sampled_from(sorted(self.cut_off))))

    @rule()
    def kill_between(self) -> None:
        """The one in between dies, which keeps nothing; the root has what it said."""
        self._scrape()
        self._start("between")
        for name in BETWEEN:
            self.nodes[name].outbox.renew()

    @rule()
    def kill_root(self) -> None:
        """The root goes on with what it showed; the rest is told again by who is there."""
        for life in self.told:
            if life[0] not in BETWEEN:
                self.told[life] = self.saved.get(life, 0)
        self._start("root")
        for name in ("between", *(name for name in LEAVES if name not in BETWEEN)):
            self.nodes[name].outbox.renew()

    @rule(seconds=st.sampled_from([1.0, REFRESH, ENGINE_EXPIRES_SECONDS + REFRESH]))
    def wait(self, seconds: float) -> None:
        """Time passes, and all that are not cut off say now and then that they are there."""
        while seconds > 0:
            self._elapse(min(seconds, REFRESH))
            seconds -= REFRESH

    @rule()
    def scrape(self) -> None:
        """Somebody sees the root's page."""
        self._scrape()

    @invariant()
    def never_back(self) -> None:
        """What the root has shown it shows for ever, and nothing that nobody counted."""
        if hasattr(self, "nodes"):
            assert self.shown <= self._total() <= self.pushed

    def _start(self, name: str) -> None:
        self.boots += 1
        disk = self.disk if name == "root" else ()
        node = Node(
            name, self.boots, merge=name == "root", disk=disk, now=self.now, wall=1.0 + self.now
        )
        self.nodes[name] = node
        node.intake.forwarded.lives.most = FEW_LIVES
        if name in LEAVES:
            self.cut_off.discard(name)
            node.greet("s", [EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})])

    def _push(self, leaf: str, tokens: int) -> None:
        node = self.nodes[leaf]
        node.items("s", [encode_item(VllmStep(0, self.now, 1.0, None, IterationStats(tokens)))])
        self.counted[leaf, node.intake.life] += tokens
        self.pushed += tokens

    def _tell(self, leaf: str) -> None:
        """A leaf tells, unless it is cut off; what is refused it says in another life."""
        if leaf in self.cut_off:
            return
        node = self.nodes[leaf]
        upper = self.nodes["between" if leaf in BETWEEN else "root"]
        life = leaf, node.intake.life
        total = self.nodes["root"].intake.forwarded.lives.sum_with((leaf, "e", node.intake.life))
        assert total is None or total.is_of_several, "a life that goes on is taken for an old one"
        node.tell(upper)
        if total is not None:
            self._start(leaf)
        else:
            self.told[life] = self.counted[life]

    def _elapse(self, seconds: float) -> None:
        self.now += seconds
        for name, node in self.nodes.items():
            node.pass_time(self.now - node.now)
            if name in LEAVES:
                node.say("s", Heartbeat(node.incarnation("s"), node.seqs["s"], 0))
        for name in LEAVES:
            self._tell(name)
        self.pass_on()
        self.nodes["root"].pass_time(0.0)
        self._catch_up()

    def _catch_up(self) -> None:
        """The root looks around, as it does once a second."""
        root = self.nodes["root"].intake
        root.pass_time(self.now)
        while root.busy:
            root.work()

    def _scrape(self) -> None:
        self.pass_on()
        self._catch_up()
        self.nodes["root"].save()
        self.disk = self.nodes["root"].disk
        self.saved = dict(self.told)
        self.shown = self._total()

    def _total(self) -> int:
        registry = self.nodes["root"].intake.registry
        (tokens,) = registry.layouts["vllm"].find("vllm:generation_tokens_total").slots
        engines = (*registry.engines.values(), *registry.retired.values())
        return sum(int(engine.values[tokens] or 0) for engine in engines)


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(
    max_examples=int(os.environ.get("SIDESTEP_TREES", "25")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
