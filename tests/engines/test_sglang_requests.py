"""Requests of SGLang applied to engines: records, goodput, and tenants whose sums are SGLang's own totals."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors import Unpublished
from sglang_managers import Manager
from sidestep.catalog.prices import Price, Prices
from sidestep.catalog.slo import Objective, Objectives
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import Item, encode_item
from sidestep.engines.sglang.wire import SglangRequest, SglangRequests
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import SeriesSettings
from sidestep.metrics.registry import Accounting, Registry, Tracking
from sidestep.metrics.totals_codec import decode_totals
from sidestep.protocol.limits import OTHER
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import Identity
from sidestep.requests.request_log import EngineRequests
from sidestep.requests.tenants import Tenants
from sidestep.tracking.requests.outcomes import EndedRequest
from sidestep_adapters.sglang import deferred_metrics
from sidestep_adapters.sglang import taps as sglang_taps

ENGINE = EngineInfo("t", "sglang", {"engine_type": "unified", "model_name": "m"})
TOTALS = {
    "requests": ("sglang:num_requests_total", ()),
    "failed_requests": ("sglang:num_aborted_requests_total", ()),
    "prompt_tokens": ("sglang:prompt_tokens_total", ("sglang:cached_tokens_total",)),
    "cached_prompt_tokens": ("sglang:cached_tokens_total", ()),
    "generation_tokens": ("sglang:generation_tokens_total", ()),
}


def process() -> Unpublished:
    """Return the records of a new process, which tapped collectors use from now on."""
    made = Unpublished()
    sglang_taps._process = made
    return made


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines send identities, and forget a test's process after it."""
    monkeypatch.setenv("SIDESTEP_REQUEST_IDENTITY", "full")
    monkeypatch.setattr(sglang_taps, "_process", None)


TENANTS = "abcdefghijkl"


class Ends:
    """The requests of an engine that have ended.

    Attributes:
        ended: The requests.
        lost: Number of requests that ended unseen.
    """

    needs_gaps = True

    def __init__(self, tenants: Tenants, engine: Engine) -> None:
        self.ended: list[EndedRequest] = []
        self.lost = 0
        self._own = EngineRequests(None, tenants, engine)

    def tenant(self, identity: Identity | None, adapter: str) -> str:
        """Return the tenant of a request."""
        return self._own.tenant(identity, adapter)

    def end(self, ended: EndedRequest) -> None:
        """Receive a request."""
        self.ended.append(ended)
        self._own.end(ended)

    def lose(self, count: int) -> None:
        """Receive a number of unseen requests."""
        self.lost += count


class Bench:
    """A registry with tenants, and one tokenizer."""

    def __init__(
        self,
        limit: int = len(TENANTS),
        by: str = "cache-salt",
        prices: Prices | None = None,
        objectives: Objectives | None = None,
    ) -> None:
        self.tenants = Tenants(by, limit)
        self.registry = Registry(
            DIALECTS.layouts(),
            SeriesSettings(objectives=objectives or Objectives()),
            tracking=Tracking(request_sink=lambda engine: Ends(self.tenants, engine)),
            accounting=Accounting(self.tenants, prices),
        )
        self.tenants.replaced = self.registry.hide_tenant
        self.applier = Applier(self.registry)
        self.engine = self.registry.register(ENGINE)
        self.may_replace = limit < len(TENANTS)
        self._before: dict[tuple[str, str], float] = {}

    @property
    def ends(self) -> Ends:
        """The requests that have ended."""
        sink = self.registry.sink_of(self.engine)
        assert isinstance(sink, Ends)
        return sink

    def apply(self, *items: Item) -> None:
        """Apply items one by one, and check the sums after each."""
        for item in items:
            self.applier.apply(self.engine, DIALECTS.decode(encode_item(item)))
            self.check()

    def check(self) -> None:
        """Assert that the sums over tenants are the engine's totals, and that no series decreases."""
        now: dict[tuple[str, str], float] = {}
        for name, (plus, minus) in TOTALS.items():
            children = self.children(name)
            expected = self.own(plus) - sum(map(self.own, minus))
            assert sum(children.values()) == expected, name
            assert min(children.values(), default=0) >= 0, name
            now.update(((name, tenant), value) for tenant, value in children.items())
        for key, value in self._before.items():
            assert now.get(key, value if self.may_replace else -1) >= value, key
        self._before = now

    def own(self, name: str) -> float:
        """Return a counter of the engine's."""
        family = self.engine.open_families.get(name)
        children = family.children.values() if family is not None else ()
        return sum(value for value in children if isinstance(value, int | float))

    def children(self, name: str) -> dict[str, float]:
        """Return the counts of a family by tenant."""
        row = self.engine.layout.find(f"sidestep_tenant_{name}_total")
        return {key[0]: value for key, value in self.engine.keyed[row.slots[0]].items()}

    def reasons(self) -> dict[str, float]:
        """Return how many requests ended, by reason."""
        row = self.engine.layout.find("sidestep_ended_requests_total")
        found = zip((*row.row.closed, OTHER), row.slots, strict=True)
        return {reason: n for reason, slot in found if (n := self.engine.values[slot])}


actions = st.lists(
    st.tuples(
        st.sampled_from(["finish", "warm", "leave", "wait", "refuse", "abort_all", "take"]),
        st.sampled_from(TENANTS),
        st.integers(0, 9),
    ),
    max_size=40,
)


def run(manager: Manager, kind: str, tenant: str, number: int) -> None:
    """Let a request of ``tenant`` end by one of the ways that SGLang has."""
    if kind == "abort_all":
        manager.abort_request(abort_all=True)
        return
    state = manager.ask(cache_salt=tenant)
    if kind == "finish":
        manager.finish(state, number, prompt=number + 3, cached=number, details=None)
    elif kind == "warm":
        state.obj.sampling_params["n"] = 2
        manager.finish(state, 0, reason={"type": "length", "length": 0})
    elif kind == "leave":
        manager.abort_request(state.obj.rid)
        details = {"device": number, "host": 1}
        reason = {"type": "abort"}
        manager.finish(state, number, prompt=20, cached=number + 1, details=details, reason=reason)
    elif kind == "wait":
        manager.abort_request(state.obj.rid)
        manager.dispatch_abort(SimpleNamespace(rid=state.obj.rid))
    else:
        state.dispatched = False
        manager.fail(state, ValueError())


@given(actions, st.integers(1, 9), st.integers(1, 12))
def test_sums_equal_totals_after_every_item(
    chosen: list[tuple[str, str, int]], limit: int, slice_size: int
) -> None:
    """Wherever the publisher divides the calls into slices, and whatever tenants come and go."""
    own = process()
    bench, manager = Bench(limit), Manager()
    before = deferred_metrics.SLICE
    deferred_metrics.SLICE = slice_size
    try:
        for kind, tenant, number in chosen:
            if kind == "take":
                bench.apply(*own.deferred.items())
            else:
                run(manager, kind, tenant, number)
        bench.apply(*own.taken())
    finally:
        deferred_metrics.SLICE = before
    kinds = Counter(kind for kind, _, _ in chosen)

    assert (
        len(bench.ends.ended) == kinds["finish"] + kinds["leave"] + kinds["wait"] + kinds["refuse"]
    )
    assert (
        bench.own("sglang:num_requests_total") == kinds["finish"] + kinds["warm"] + kinds["leave"]
    )
    assert sum(bench.reasons().values()) == len(bench.ends.ended)


@given(actions)
def test_several_tokenizers_of_one_engine(chosen: list[tuple[str, str, int]]) -> None:
    """Their items may arrive in any order between each other."""
    processes: list[Unpublished] = []
    managers: list[Manager] = []
    for _ in range(2):
        processes.append(process())
        managers.append(Manager())
    bench = Bench()
    for kind, tenant, number in chosen:
        if kind == "take":
            bench.apply(*processes[number % 2].deferred.items())
        else:
            run(managers[number % 2], kind, tenant, number)
    bench.apply(*processes[1].taken(), *processes[0].taken())
    keys = {(ended.source, ended.number) for ended in bench.ends.ended}

    assert len(keys) == len(bench.ends.ended)


def test_counts_of_a_tenant() -> None:
    """A request that did not run has no tokens, and is only a failure."""
    own = process()
    bench, manager = Bench(), Manager()
    run(manager, "finish", "a", 4)
    run(manager, "finish", "b", 2)
    run(manager, "leave", "a", 6)
    run(manager, "wait", "b", 0)
    run(manager, "refuse", "b", 0)
    run(manager, "abort_all", "", 0)
    bench.apply(*own.taken())

    assert bench.children("requests") == {"a": 2, "b": 1, OTHER: 0}
    assert bench.children("failed_requests") == {"a": 1, "b": 1, OTHER: 1}
    assert bench.children("prompt_tokens") == {"a": 3 + 13, "b": 3, OTHER: 0}
    assert bench.children("cached_prompt_tokens") == {"a": 4 + 7, "b": 2, OTHER: 0}
    assert bench.children("generation_tokens") == {"a": 4 + 6, "b": 2, OTHER: 0}
    assert bench.reasons() == {"stop": 2, "abort": 2, "refused": 1}


def test_no_series_is_negative_where_an_item_has_requests_without_their_counters() -> None:
    """Another sender's items may have anything; the sums are right again once the counters come."""
    own = process()
    bench, manager = Bench(prices=Prices([Price("m", 1, 1, 1)])), Manager()
    run(manager, "finish", "a", 4)
    (item,) = [item for item in own.taken() if isinstance(item, SglangRequests)]
    counters, item.counters = item.counters, []
    bench.applier.apply(bench.engine, item)

    for name in (*TOTALS, "cost"):
        assert min(bench.children(name).values(), default=0) >= 0, name
    bench.apply(SglangRequests(0, 1.0, 1, counters=counters))
    assert bench.children("prompt_tokens") == {"a": 3, OTHER: 0}


def test_a_record_has_what_the_tokenizer_knows() -> None:
    """Times are those of SGLang's own histograms."""
    own = process()
    bench, manager = Bench(), Manager()
    state = manager.ask("acme-1", cache_salt="a", lora_path="sql", priority=3)
    manager.finish(state, 5, prompt=20, cached=8)
    bench.apply(*own.taken())
    (ended,) = bench.ends.ended
    request = ended.request
    assert request is not None
    assert request.arrival is not None
    assert ended.wall is not None

    assert (ended.reason, ended.prompt_tokens, ended.generation_tokens) == ("stop", 20, 5)
    assert ended.wall - request.arrival == pytest.approx(1.0, abs=1e-5)
    assert request.ttft == pytest.approx(0.25)
    assert (request.tenant, request.adapter, request.cached) == ("a", "sql", 8)
    assert request.identity == Identity("acme-1", "", "a", "", 3)


def test_goodput() -> None:
    """A request counts if it was served and met all objectives that can be decided."""
    objectives = Objectives(
        (
            Objective("ttft", ("sglang:time_to_first_token_seconds",), 0.3),
            Objective("e2e", ("sglang:e2e_request_latency_seconds",), 2.0),
        )
    )
    bench = Bench(objectives=objectives)
    quick = SglangRequest(1, 1e9, 10.0, 11.5, "stop", first=10.2, output_tokens=7)
    late = msgspec.structs.replace(quick, number=2, first=10.4)
    slow = msgspec.structs.replace(quick, number=3, ended=12.5)
    aborted = msgspec.structs.replace(quick, number=4, reason="abort")
    bench.apply(SglangRequests(0, 1.0, 1, [quick, late, slow, aborted]))
    values = {
        name: bench.engine.values[
            bench.engine.layout.find(f"sidestep_goodput_{name}_total").slots[0]
        ]
        for name in ("requests", "tokens")
    }

    assert values == {"requests": 1, "tokens": 7}


def test_requests_that_a_process_could_not_hold_are_counted() -> None:
    """They have a reason of their own, and no record."""
    bench = Bench()
    bench.apply(SglangRequests(0, 1.0, 1, unseen=3))

    assert bench.ends.lost == 3
    assert bench.reasons() == {OTHER: 3}


def test_folded_requests_are_unseen() -> None:
    """They are counted exactly, by another sender's exporter as well; the sums are equal all the same."""
    own = process()
    bench, manager, folder = Bench(), Manager(), ItemFolder()
    run(manager, "finish", "a", 4)
    bench.apply(*own.taken())
    for kind in ("finish", "leave", "wait", "refuse", "warm"):
        run(manager, kind, "a", 4)
    for item in own.taken():
        assert folder.fold(encode_item(item), [ENGINE])
    fresh = Bench()
    for frame in folder.seal().frames:
        for raw in frame:
            for each in (bench, fresh):
                each.applier.add_totals(each.engine, decode_totals(msgspec.Raw(raw)))
                each.check()

    assert (bench.ends.lost, fresh.ends.lost) == (4, 4)
    assert len(bench.ends.ended) == 1
    assert bench.children("requests") == {"a": 1, OTHER: 3}
    assert bench.reasons() == {"stop": 2, "abort": 2, "refused": 1}


def test_an_item_with_other_labels_changes_nothing() -> None:
    """All of it is refused before any of it is counted."""
    own = process()
    bench, manager = Bench(), Manager()
    run(manager, "finish", "a", 4)
    bench.apply(*own.taken())
    run(manager, "finish", "a", 4)
    (item,) = [item for item in own.taken() if isinstance(item, SglangRequests)]
    item.counters[-1].labels = ["other"]
    with pytest.raises(Exception, match="sglang:"):
        bench.apply(item)

    bench.check()
    assert len(bench.ends.ended) == 1


def stages(*times: float | None, preempted: float = 0.0) -> SglangRequest:
    """Return a request that arrived at 10, reached stages at ``times``, and ended at 20."""
    queued, scheduled, first = (*times, None, None, None)[:3]
    return SglangRequest(1, 1e9, 10.0, 20.0, "stop", queued, scheduled, first, preempted)


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        (
            stages(10.5, 12.0, 13.0, preempted=2.0),
            {"front_end_in": 0.5, "queue.unknown": 1.5, "prefill": 1.0, "decode": 5.0, "preempted": 2.0},
        ),
        (stages(10.0, 12.0), {"queue.unknown": 2.0, "prefill": 8.0}),
        (stages(11.0), {"front_end_in": 1.0, "queue.unknown": 9.0}),
        (stages(), {"front_end_in": 10.0}),
        # Without the times in between, or with a clock that has stepped, nothing is certain.
        (stages(None, None, 13.0), None),
        (stages(11.0, 10.5, 13.0), None),
    ],
)  # fmt: skip
def test_parts_of_a_request(request_: SglangRequest, parts: dict[str, float] | None) -> None:
    """They sum to its latency; a stage that it did not reach has none."""
    bench = Bench()
    bench.applier.apply(bench.engine, SglangRequests(0, 1.0, 1, [request_]))

    (ended,) = bench.ends.ended
    assert ended.parts == parts
    children = bench.engine.keyed[bench.engine.layout.handler_slot("request_parts")]
    assert sum(children.values()) == (0.0 if parts is None else 10.0)
    limits = {limit for limit, part in children if part == "queue"}
    assert limits <= {"unknown"}
