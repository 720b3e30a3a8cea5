"""Front ends that send the events of their requests: through real items, into a real intake."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_vllm import FinishReason, ParentRequest
from intakes import Fed, samples
from sidestep.engines.items import encode_item
from sidestep.metrics.trackers import Trackers
from sidestep.tracking.requests.parallel_samples import GROUP_TIMEOUT, QUEUE_TIMEOUT
from vllm_front_ends import Clock, HookedFrontEnd, infos, output

HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "n": "vllm:request_params_n",
    "longest": "vllm:request_max_num_generation_tokens",
    "step": "vllm:iteration_tokens_total",
}
COUNTERS = {
    "vllm:generation_tokens_total": "tokens",
    "vllm:num_preemptions_total": "preempted",
}
UNTRACKED = "sidestep_untracked_requests_total"


def totals(page: str) -> dict[str, float]:
    """Return what the model below counts, summed over engines; zeros are left out."""
    found: dict[str, float] = defaultdict(float)
    for series, value in samples(page).items():
        name, _, labels = series.partition("{")
        for short, family in HISTOGRAMS.items():
            if name in (f"{family}_count", f"{family}_sum"):
                found[f"{short}{name.removeprefix(family)}"] += value
        for family, short in COUNTERS.items():
            if name == family:
                found[short] += value
        for family in ("vllm:request_success_total", UNTRACKED):
            if name == family:
                found[re.findall(r'reason="(\w+)"', labels)[0]] += value
    # A group of which the front end's end has left some is counted at once, or after an hour.
    found["samples"] = 0.0
    return found


def non_zero(found: dict[str, float]) -> dict[str, float]:
    """Return the counts that are not 0."""
    return {name: value for name, value in found.items() if value}


class World:
    """Engines, their front ends, an exporter, and a simple model of what it should count."""

    def __init__(self, patch: pytest.MonkeyPatch, engines: int = 1, processes: int = 1) -> None:
        self.clock = Clock(patch)
        self.engines, self.processes = engines, processes
        self.fed = Fed()
        self.fronts = [self.start(process) for process in range(processes)]
        self.model: dict[str, float] = defaultdict(float)
        self.live: dict[str, Any] = {}
        """What the model knows of unfinished requests."""
        self._last = 0

    def start(self, process: int) -> HookedFrontEnd:
        """Start a front end, and its stream."""
        self.fed.send_hello(f"api{process}", infos(range(self.engines)))
        return HookedFrontEnd(
            self.clock, range(self.engines), process=process, processes=self.processes
        )

    def observe(self, name: str, value: float) -> None:
        """Observe a value in the model's histogram."""
        self.model[f"{name}_count"] += 1
        self.model[f"{name}_sum"] += value

    def add(self, process: int, engine: int, n: int = 1) -> list[str]:
        """Send a prompt with ``n`` samples, on engines from this one on."""
        self._last += 1
        parent = ParentRequest(f"r{self._last}", n, streams=bool(self._last % 2)) if n > 1 else None
        names = [f"{i}_r{self._last}" for i in range(n)] if parent else [f"r{self._last}"]
        group = {"n": n, "ended": 0, "longest": 0, "aborted": False}
        for index, name in enumerate(names):
            where = (engine + index) % self.engines
            self.fronts[process].add(name, parent=parent, engine=where)
            self.live[name] = {
                "engine": where, "process": process, "arrival": self.clock.wall, "tokens": 0,
                "last": None, "group": group,
            }  # fmt: skip
        return names

    def step(self, engine: int, names: Iterable[str], seed: int = 0) -> None:
        """Make a step of an engine with outputs of these requests."""
        self.clock.now += 0.125
        found: dict[int, list[Any]] = {}
        for position, name in enumerate(names):
            known, choice = self.live[name], seed >> (3 * position)
            assert known["engine"] == engine
            count, reason = 1 + (choice & 1), None
            events: dict[str, Any] = {}
            stamp = self.clock.engine
            if known["last"] is None:
                events = {"queued": stamp - 0.0625, "scheduled": stamp - 0.03125}
                self.observe("ttft", self.clock.wall - known["arrival"])
            else:
                if choice & 6 == 2:
                    events = {"preempted": stamp - 0.0625, "scheduled": stamp - 0.03125}
                    self.model["preempted"] += 1
                self.observe("itl", self.clock.engine - known["last"])
            known["last"] = stamp
            known["tokens"] += count
            self.model["tokens"] += count
            if choice & 6 == 4:
                reason = FinishReason.LENGTH
            found.setdefault(known["process"], []).append(
                output(name, count, reason=reason, **events)
            )
            if choice & 6 == 6:
                state = self.fronts[known["process"]].llm.output_processor.request_states[name]
                state.stop_at = known["tokens"]
                reason = FinishReason.STOP
            if reason is not None:
                self.observe("e2e", self.clock.wall - known["arrival"])
                self._end(name, str(reason))
        if not found:
            return
        self.observe("step", sum(len(o.new_token_ids) for some in found.values() for o in some))
        last = max(found)
        for process, some in sorted(found.items()):
            self.fronts[process].receive(
                *some, engine=engine, has_stats=process == last, chunk=1 + seed % 3
            )

    def _end(self, name: str, reason: str) -> None:
        known = self.live.pop(name)
        group = known["group"]
        self.model[reason] += 1
        group["ended"] += 1
        group["longest"] = max(group["longest"], known["tokens"])
        group["aborted"] |= reason == "abort"
        if group["ended"] == group["n"] and not group["aborted"]:
            self.observe("n", group["n"])
            self.observe("longest", group["longest"])

    def abort(self, name: str) -> None:
        """Let the client of a request leave, with all samples."""
        group = self.live[name]["group"]
        siblings = [other for other, known in self.live.items() if known["group"] is group]
        for each in siblings:
            self.fronts[self.live[each]["process"]].llm.abort(each)
            self._end(each, "abort")

    def send(self) -> None:
        """Send all items."""
        for process, front in enumerate(self.fronts):
            self.fed.items(f"api{process}", front.encoded())

    def restart_front(self, process: int) -> None:
        """Replace a front end by a new process; the requests of the earlier one are lost."""
        self.send()
        lost = [name for name, known in self.live.items() if known["process"] == process]
        for name in lost:
            known = self.live.pop(name)
            if known["last"] is not None:
                self.model["restart"] += 1
        self.fed.restart(f"api{process}")
        self.fronts[process] = self.start(process)
        # Its first event is what the exporter notices.
        for engine in range(self.engines):
            self.step(engine, self.add(process, engine))

    def restart_exporter(self) -> None:
        """Replace the exporter's process by one that restores its snapshot."""
        self.fed = self.fed.restarted(self.fed.snapshot())

    def do(self, operation: str, seed: int) -> None:
        """Do something by its name."""
        engine, process = seed % self.engines, (seed >> 1) % self.processes
        match operation:
            case "add":
                self.add(process, engine)
            case "group":
                self.add(process, engine, 2 + seed % 2)
            case "step":
                self.step(
                    engine, [n for i, n in enumerate(self.of(engine)) if seed >> i & 1], seed >> 4
                )
            case "end":
                self.step(engine, self.of(engine), int("4" * 20, 8))
            case "abort" if self.live:
                self.abort(sorted(self.live)[seed % len(self.live)])
            case "send":
                self.send()
            case "exporter":
                self.restart_exporter()
            case "front":
                self.restart_front(process)

    def of(self, engine: int) -> list[str]:
        """Return the requests of an engine."""
        return [name for name, known in self.live.items() if known["engine"] == engine]

    def check(self) -> None:
        """Compare the page with the model."""
        self.send()
        assert self.fed.rejected == {}
        assert [failure for front in self.fronts for failure in front.failures] == []
        assert non_zero(totals(self.fed.page)) == non_zero(self.model)


OPERATIONS = st.tuples(
    st.sampled_from(
        ["add", "group", "step", "step", "step", "end", "abort", "send", "exporter", "front"]
    ),
    st.integers(0, 1 << 30),
)


@given(st.integers(1, 2), st.integers(1, 2), st.lists(OPERATIONS, max_size=40))
@settings(max_examples=2 * settings().max_examples)
def test_totals_equal_a_simple_model(
    engines: int, processes: int, operations: list[tuple[str, int]]
) -> None:
    """In any order of requests, outputs, aborts, and restarts of the exporter and of front ends."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(patch, engines, processes)
        for operation, seed in operations:
            world.do(operation, seed)
        world.check()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Return a function that makes a world."""
    return lambda *args: World(monkeypatch, *args)


def test_another_number_of_front_ends(make: Callable[..., World]) -> None:
    """All of them are other processes, which number their requests anew."""
    world = make(1, 2)
    for process in range(2):
        world.step(0, world.add(process, 0))
    world.send()
    world.processes, lost = 3, [*world.live]
    for process in range(2):
        world.fed.restart(f"api{process}")
    world.fronts = [world.start(process) for process in range(3)]
    for name in lost:
        del world.live[name]
        world.model["restart"] += 1
    for process in range(3):
        world.step(0, world.add(process, 0))
    world.step(0, world.of(0), 0o444)

    world.check()
    assert world.model["length"] == 3


def test_one_front_end_folds(make: Callable[..., World]) -> None:
    """Only its requests are skipped, and all is counted; what began before the fold has no more gaps."""
    world = make(1, 2)
    (first,), (other,) = world.add(0, 0), world.add(1, 0)
    world.step(0, [first, other])
    world.send()

    (second,) = world.add(0, 0)
    world.step(0, [first, second, other])
    itl = world.model["itl_count"]
    assert itl == 2
    world.fed.fold("api0", world.fronts[0].encoded())
    state = [encode_item(item) for item in world.fronts[0].requests.current_state()]
    world.fed.items("api0", state)
    world.step(0, [first, second, other], 0o444)

    world.model["folded"] = 2
    # Of the first one the folder knows no output, and of both the exporter.
    for _ in range(3):
        world.model["itl_count"] -= 1
        world.model["itl_sum"] -= 0.125
    # Whether they are the only samples, their state does not say.
    for name, longest in (("n", 1), ("longest", 3)):
        world.model[f"{name}_count"] -= 2
        world.model[f"{name}_sum"] -= longest + (name == "n" or 2)
    world.check()


@pytest.mark.parametrize(("queued", "known"), [(GROUP_TIMEOUT * 20, 2), (QUEUE_TIMEOUT + 1, 1)])
def test_a_sample_that_is_queued_for_long(
    make: Callable[..., World], queued: float, known: int
) -> None:
    """A group on two engines is complete with its last sample, up to an hour after the one before."""
    world = make(2, 1)
    first, second = world.add(0, 0, 2)
    (single,) = world.add(0, 0)
    world.step(0, [first, single])
    world.step(0, [first], 0o4)
    world.clock.now += queued
    world.step(0, [single])
    world.step(1, [second])
    world.step(1, [second], 0o4)
    world.step(0, [single], 0o4)
    world.send()

    found = totals(world.fed.page)
    assert found["n_count"] == known
    if known == 2:
        world.check()
    else:
        unknown = [
            n for series, n in samples(world.fed.page).items() if 'reason="samples"' in series
        ]
        assert sum(unknown) == 1


def test_a_new_exporter_gets_the_requests_in_flight(make: Callable[..., World]) -> None:
    """Without a snapshot they end there, with the latencies that still can be known."""
    world = make(1, 2)
    for process in range(2):
        world.step(0, world.add(process, 0))
    world.send()
    world.fed = Fed(boot=2)
    world.model = defaultdict(float, unknown=2.0)
    for process, front in enumerate(world.fronts):
        world.fed.send_hello(f"api{process}", infos())
        state = [encode_item(item) for item in front.requests.current_state()]
        world.fed.items(f"api{process}", state)
    world.step(0, world.of(0), 0o44)
    # The first output here begins no interval that is known.
    for name in ("itl", "n", "longest"):
        del world.model[f"{name}_count"], world.model[f"{name}_sum"]

    world.check()
    assert world.model["length"] == world.model["e2e_count"] == 2


def test_requests_after_records_were_dropped(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped beginnings and ends are settled, and what goes on or begins later is counted."""
    world = make(2, 1)
    (front,), (kept,), (ends,) = world.fronts, world.add(0, 0), world.add(0, 1)
    world.step(0, [kept])
    world.step(1, [ends])
    world.send()
    with monkeypatch.context() as patch:
        patch.setattr("sidestep_adapters.vllm.front_end_requests.MAX_RECORDS", 0)
        (accepted,), (lost,) = world.add(0, 0), world.add(0, 0)
    world.step(0, [lost, kept])
    world.step(1, [ends], 0o4)
    assert (front.requests.dropped, len(front.requests)) == (6, 1)

    world.fed.items("api0", front.encoded())
    (late,) = world.add(0, 0)
    world.step(0, [late])
    resynced = [encode_item(item) for item in front.requests.resync(front.hook.states)]
    world.fed.items("api0", resynced)
    trackers = [one.part(Trackers).requests for one in world.fed.intake.registry.engines.values()]
    assert [len(one.requests.live) for one in trackers if one is not None] == [2, 0]
    world.step(0, [accepted, lost, kept, late], 0o4444)
    world.send()

    assert world.fed.rejected == {}
    found = totals(world.fed.page)
    assert (found["tokens"], found["length"], found["ttft_count"]) == (7, 4, 4)
    # The arrival of one is unknown.
    assert (found["e2e_count"], found["restart"], found["unknown"]) == (3, 3, 1)
