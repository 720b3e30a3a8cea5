"""Requests that one engine hands over to another are counted once in the service's families."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handed_over import LENGTH, served, tokenizer
from sidestep.catalog.prices import Price, Prices
from sidestep.catalog.slo import Objective, Objectives
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.metrics.computed_gauges import scalar
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import SeriesSettings
from sidestep.metrics.registry import Accounting, Registry, Tracking
from sidestep.metrics.totals_codec import decode_totals
from sidestep.protocol.iteration_stats import (
    FINISH_REASONS,
    FinishedRequestStats,
    IterationStats,
    PromptTokenStats,
)
from sidestep.protocol.messages import BOTH, DECODE, PREFILL, EngineInfo
from sidestep.protocol.request_events import (
    HANDED_OVER,
    RECEIVED,
    WHOLE,
    Event,
    Queued,
    RequestEvents,
)
from sidestep.requests.record import RequestRecord, make_record
from sidestep.requests.request_log import EngineRequests
from sidestep.requests.tenants import Tenants
from sidestep.tracking.requests.outcomes import EndedRequest

ABORT = FINISH_REASONS.index("abort")
PRICE = Price("m", 5_000_000, 300_000, 70_000_000, 11_000_000)
TTFT, E2E = (
    "sidestep_service_time_to_first_token_seconds",
    "sidestep_service_e2e_request_latency_seconds",
)


class Sink(EngineRequests):
    """The receiver of an engine's requests, which also keeps their records."""

    def __init__(self, tenants: Tenants, engine: Engine, records: list[RequestRecord]) -> None:
        super().__init__(None, tenants, engine)
        self._of, self._records = engine, records

    def end(self, ended: EndedRequest) -> None:
        """Count a request, and make its record."""
        super().end(ended)
        self._records.append(make_record(self._of, ended, 0.0))


class Bench:
    """A service's engines, whose requests have identities, at one exporter."""

    def __init__(self) -> None:
        tenants = Tenants("id-prefix", 5)
        self.records: list[RequestRecord] = []
        self.registry = Registry(
            DIALECTS.layouts(),
            SeriesSettings(objectives=Objectives([Objective("fast", (TTFT,), 1e9)])),
            Tracking(request_sink=lambda engine: Sink(tenants, engine, self.records)),
            Accounting(tenants, Prices([PRICE])),
        )
        self.applier = Applier(self.registry)

    def engine(self, name: str, role: str = BOTH, *, dialect: str = "vllm", **more: Any) -> Engine:
        """Add an engine."""
        labels = {"engine": name} if dialect == "vllm" else {"engine_type": role}
        info = {"kv_transfer": {"role": role, **more}} if role != BOTH or more else {}
        info["cache_config"] = {"block_size": more.pop("block_size", "")}
        described = EngineInfo(name, dialect, {**labels, "model_name": "m"}, info)
        described.features = ["engine_core", "kv_transfer"] if dialect == "vllm" else []
        return self.registry.register(described)

    def apply(self, engine: Engine, *events: Event) -> None:
        """Apply events as one item."""
        self.applier.apply(engine, RequestEvents(0, 0.0, 1, [*events]))

    def total(self, family: str) -> float:
        """Return the sum of a family over all engines and labels."""
        return sum(self.of(engine, family) for engine in self.registry)

    def of(self, engine: Engine, family: str) -> float:
        """Return the sum of an engine's samples of a family."""
        row = engine.layout.find(family)
        if row.storage == "keyed":
            return sum(engine.keyed[row.slots[0]].values())
        return scalar(engine, family)


hand_overs = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
        st.integers(1, 4),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(hand_overs)
def test_sums_over_engines_are_those_of_the_clients(
    chosen: list[tuple[tuple[int, int], tuple[int, int, int], int, bool]],
) -> None:
    """Requests, tokens, goodput and cost, as counted and by tenant; engines' own counters have both parts."""
    bench = Bench()
    prefill, decode = bench.engine("p"), bench.engine("d")
    books: Counter[str] = Counter()
    for number, (computed, received, tokens, is_split) in enumerate(chosen, start=1):
        if is_split:
            bench.apply(prefill, *served(number, (*computed, 0), 1, HANDED_OVER))
        prompt = received if is_split else (*computed, 0)
        bench.apply(decode, *served(number, prompt, tokens, RECEIVED if is_split else WHOLE))
        books["computed"] += computed[0]
        books["cached"] += computed[1]
        books["transferred"] += received[2] * is_split
        books["generated"] += tokens
        books["requests"] += 1
        books["parts"] += 1 + is_split

    cost = PRICE.cost(*(books[key] for key in ("computed", "cached", "generated", "transferred")))
    for service, tenant in (("service_requests", "tenant_requests"), ("goodput_requests",) * 2):
        assert bench.total(f"sidestep_{service}_total") == books["requests"]
        assert bench.total(f"sidestep_{tenant}_total") == books["requests"]
    assert (
        bench.total("sidestep_service_prompt_tokens_total") == books["computed"] + books["cached"]
    )
    assert bench.total("sidestep_tenant_prompt_tokens_total") == books["computed"]
    assert bench.total("sidestep_tenant_cached_prompt_tokens_total") == books["cached"]
    transferred = bench.total("sidestep_tenant_transferred_prompt_tokens_total")
    assert transferred == books["transferred"]
    for family in ("service", "tenant"):
        assert bench.total(f"sidestep_{family}_generation_tokens_total") == books["generated"]
    assert bench.total("sidestep_goodput_tokens_total") == books["generated"]
    assert bench.total("sidestep_cost_total") == bench.total("sidestep_tenant_cost_total") == cost
    assert bench.total("vllm:request_success_total") == books["parts"]
    e2e = [engine.histogram(engine.layout.find(E2E).slots[0]) for engine in bench.registry]
    assert sum(sum(each.counts) for each in e2e) == books["requests"]


@given(hand_overs, st.booleans())
def test_counters_never_decrease(
    chosen: list[tuple[tuple[int, int], tuple[int, int, int], int, bool]], folds: bool
) -> None:
    """Not after any event, nor where a sender has folded items while the exporter was away."""
    bench = Bench()
    engine = bench.engine("e")
    families = [
        f"sidestep_service_{each}_total"
        for each in ("requests", "prompt_tokens", "generation_tokens")
    ]
    before = [0.0] * len(families)
    folder = ItemFolder()
    for number, (computed, received, tokens, is_split) in enumerate(chosen, start=1):
        kind = (HANDED_OVER, RECEIVED)[tokens % 2] if is_split else WHOLE
        events = served(number, received if kind == RECEIVED else (*computed, 0), tokens, kind)
        if folds:
            described = [EngineInfo("e", "vllm", {"engine": "e", "model_name": "m"})]
            described[0].features = ["engine_core", "kv_transfer"]
            folder.fold(encode_item(RequestEvents(0, 0.0, 1, events)), described)
            for frame in folder.seal().frames:
                for totals in frame:
                    bench.applier.add_totals(engine, decode_totals(totals))
        for event in [] if folds else events:
            bench.apply(engine, event)
            now = [bench.total(family) for family in families]
            assert all(a <= b for a, b in zip(before, now, strict=True))
            before = now
    assert bench.total(families[0]) == sum(
        not (is_split and (HANDED_OVER, RECEIVED)[tokens % 2] == HANDED_OVER)
        for *_, tokens, is_split in chosen
    )  # fmt: skip


def test_a_hand_over_that_fails_is_a_request_of_its_own() -> None:
    """No other engine continues it: the service has an aborted request."""
    bench = Bench()
    engine = bench.engine("p")
    bench.apply(engine, *served(1, (8, 0, 0), 1, HANDED_OVER, reason=ABORT))

    requests = engine.layout.find("sidestep_service_requests_total")
    assert engine.values[requests.slots[ABORT]] == 1
    assert bench.total("sidestep_tenant_failed_requests_total") == 1
    (record,) = bench.records
    assert record.transfer == ""


def test_a_role_stands_for_what_a_router_does_not_say() -> None:
    """A prefill engine that may generate one token hands over; what a decode engine loads was computed."""
    bench = Bench()
    prefill, decode = bench.engine("p", PREFILL), bench.engine("d", DECODE)
    bench.apply(prefill, *served(1, (8, 0, 0), 1))
    bench.apply(decode, *served(1, (2, 0, 6), 3))
    # Too short for a block, and a whole request of a client: no engine has computed it before.
    bench.apply(decode, *served(2, (5, 0, 0), 3))
    bench.apply(prefill, *served(2, (5, 0, 0), 3))

    assert bench.total("sidestep_service_requests_total") == 3
    assert bench.total("sidestep_service_prompt_tokens_total") == 18
    assert bench.total("sidestep_service_generation_tokens_total") == 9


def test_what_a_cache_had_is_cached() -> None:
    """A connector to a cache loads KV for any request; it was not computed for this one."""
    bench = Bench()
    cached = bench.engine("c", connectors="OffloadingConnector", external="cached")
    unknown = bench.engine("u")
    for engine in (cached, unknown):
        bench.apply(engine, *served(1, (2, 1, 6), 3))

    names = ("prompt", "cached_prompt", "transferred_prompt")
    found = {
        engine.id: [bench.of(engine, f"sidestep_tenant_{name}_tokens_total") for name in names]
        for engine in (cached, unknown)
    }
    assert found == {"c": [2, 7, 0], "u": [2, 1, 6]}


@pytest.mark.parametrize(
    ("role", "service", "generated", "prompt"),
    [(PREFILL, 0, 0, 9), (DECODE, 1, 4, 9), (BOTH, 1, 4, 9)],
)
def test_statistics_without_requests(role: str, service: int, generated: int, prompt: int) -> None:
    """By the role of their engine, in vLLM's mode beside."""
    bench = Bench()
    engine = bench.engine("e", role)
    prompts = PromptTokenStats(8, 1, 6, 7, 15)
    ended = [FinishedRequestStats(LENGTH)]
    stats = IterationStats(4, prompt_token_stats=prompts, finished_requests=ended)
    bench.applier.apply(engine, VllmStep(0, 1.0, 1.0, None, stats))

    assert bench.total("sidestep_service_requests_total") == service
    assert bench.total("sidestep_service_generation_tokens_total") == generated
    assert bench.total("sidestep_service_prompt_tokens_total") == prompt
    assert bench.total("sidestep_cost_total") == PRICE.cost(8, 1, generated, 6)


@pytest.mark.parametrize(("first", "second"), [("k", "k"), ("", "")])
def test_both_parts_are_joined(first: str, second: str) -> None:
    """By what their connectors call the request, or by its id; latencies then begin at the first arrival."""
    bench = Bench()
    prefill, decode = bench.engine("p"), bench.engine("d")
    bench.apply(prefill, *served(1, (8, 0, 0), 1, HANDED_OVER, join=first, name="a-2"))
    names: dict[str, Any] = {"name": "other" if second else "a-2"}
    bench.apply(
        decode, *served(1, (0, 0, 8), 2, RECEIVED, join=second, start=4.5, waited=2.0, **names)
    )

    handed_over, received = bench.records
    assert (handed_over.transfer, received.transfer) == ("handed_over", "received")
    assert handed_over.join_key == received.join_key == first
    parts = {"prefill_remote": 3.5, "queue.unknown": 0.25, "transfer": 2.0}
    # Its steps begin a quarter of a second after it has joined the batch, and make one long pause.
    parts |= {"prefill": 0.5, "prefill_gap": 0.25, "decode": 1.5, "stalled": 0.5}
    assert received.parts == parts
    assert received.e2e_seconds == sum(parts.values()) - 3.5
    ttft, e2e = (decode.histogram(decode.layout.find(name).slots[0]).sum for name in (TTFT, E2E))
    assert ttft == 3.5 + 3.0
    assert e2e == 3.5 + 5.0
    counted = decode.keyed[decode.layout.handler_slot("request_parts")]
    assert counted["", "prefill_remote"] == 0.0
    assert counted["", "transfer"] == 2.0


def test_every_parallel_sample_is_joined() -> None:
    """To what its connectors call it, although a later request has the same id."""
    bench = Bench()
    prefill, decode = bench.engine("p"), bench.engine("d")
    for number, (join, start) in enumerate([("k", 1.0), ("other", 2.0)]):
        bench.apply(
            prefill, *served(number, (8, 0, 0), 1, HANDED_OVER, join=join, name="a", start=start)
        )
    for sample in (0, 1):
        queued, *rest = served(sample, (0, 0, 8), 2, RECEIVED, join="k", name="a", start=4.5)
        assert isinstance(queued, Queued)
        queued.group, queued.sample, queued.samples = 7, sample, 2
        bench.apply(decode, queued, *rest)

    assert [record.parts.get("prefill_remote") for record in bench.records[2:]] == [3.5, 3.5]
    ttft, e2e = (decode.histogram(decode.layout.find(name).slots[0]).sum for name in (TTFT, E2E))
    assert ttft == 2 * (3.5 + 1.0)
    assert e2e == 2 * (3.5 + 3.0)


def test_prompts_that_are_computed_a_second_time() -> None:
    """None of their KV has come, although they fill a block, and this engine has not cached them."""
    bench = Bench()
    engine = bench.engine("d", block_size="4")
    prompts = [(4, 0, 0), (3, 0, 0), (4, 0, 4), (1, 8, 0), (9, 0, 0)]
    for number, prompt in enumerate(prompts):
        bench.apply(engine, *served(number, prompt, 2, RECEIVED))
    bench.apply(engine, *served(9, (9, 0, 0), 2))

    assert bench.total("sidestep_local_prefills_total") == 2
    assert bench.of(engine, "sidestep_received_prompt_tokens_total") == 33
    assert bench.of(engine, "sidestep_service_prompt_tokens_total") == 9


def test_sglang_by_role() -> None:
    """Made from its sources: an engine for prefill only hands over, and one for decode only receives.

    On a CPU neither starts (0.5.23): prefill has no backend for it, and decode registers memory with CUDA.
    """
    bench = Bench()
    roles = {
        role: bench.engine(role, role, dialect="sglang") for role in (PREFILL, DECODE, "unified")
    }
    for role, engine in roles.items():
        bench.applier.apply(engine, tokenizer(1, 1 if role == PREFILL else 4, queued=15.0))

    def of(family: str) -> list[float]:
        return [bench.of(engine, family) for engine in roles.values()]

    assert (
        of("sidestep_service_requests_total") == of("sidestep_tenant_requests_total") == [0, 1, 1]
    )
    assert of("sidestep_service_prompt_tokens_total") == [8, 0, 8]
    assert of("sidestep_service_generation_tokens_total") == [0, 4, 4]
    assert of("sidestep_tenant_transferred_prompt_tokens_total") == [0, 8, 0]
    costs = [PRICE.cost(5, 3, 0), PRICE.cost(0, 0, 4, 8), PRICE.cost(5, 3, 4)]
    assert of("sidestep_cost_total") == of("sidestep_tenant_cost_total") == costs
    assert [record.transfer for record in bench.records] == ["handed_over", "received", ""]
    assert bench.records[1].parts == {"prefill_remote": 5.0, "queue.unknown": 5.0}
