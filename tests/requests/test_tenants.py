"""Counters by tenant: their sums equal the engine's own, whatever tenants come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporters import Start, until
from pages import Labels, get, parse
from replays import replay
from schedulers import WALL, Scheduler, actions
from sidestep.catalog.prices import Price, Prices
from sidestep.config.parsing import MAX_TENANTS
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import encode_item
from sidestep.metrics.ended_counter import REQUEST_PARTS, TENANT_PARTS
from sidestep.metrics.engine import Engine
from sidestep.metrics.merge import restore_engine
from sidestep.metrics.registry import Accounting, Registry, Tracking
from sidestep.metrics.totals_codec import decode_totals, encode_totals, totals_of
from sidestep.protocol.limits import OTHER
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
    id_prefix,
)
from sidestep.requests.request_log import EngineRequests
from sidestep.requests.tenants import NO_TENANT, HeavyHitters, Tenants
from sidestep_adapters.publisher.publisher import Publisher

ENGINE = EngineInfo(
    "e",
    "vllm",
    {"engine": "0", "model_name": "m"},
    {"core:cache_config": {"block_size": "4"}},
    features=["engine_core"],
)
PRICE = Price("m", 500_000, 50_000, 1_500_000)
TOTALS = {
    "sidestep_tenant_requests_total": ("vllm:request_success_total", None),
    "sidestep_tenant_failed_requests_total": ("vllm:request_success_total", ("abort", "error")),
    "sidestep_tenant_prompt_tokens_total": (
        "vllm:prompt_tokens_by_source_total",
        ("local_compute",),
    ),
    "sidestep_tenant_cached_prompt_tokens_total": (
        "vllm:prompt_tokens_by_source_total",
        ("local_cache_hit", "external_kv_transfer"),
    ),
    "sidestep_tenant_generation_tokens_total": ("vllm:generation_tokens_total", None),
    "sidestep_tenant_kv_block_seconds_total": ("sidestep_kv_block_seconds_total", None),
    "sidestep_tenant_cost_total": ("sidestep_cost_total", None),
}


class Bench:
    """A registry with tenants, and one engine."""

    def __init__(self, limit: int = 3, by: str = "cache-salt", always: Sequence[str] = ()) -> None:
        self.tenants = Tenants(by, limit, always)
        self.registry = Registry(
            DIALECTS.layouts(),
            tracking=Tracking(
                request_sink=lambda engine: EngineRequests(None, self.tenants, engine)
            ),
            accounting=Accounting(self.tenants, Prices([PRICE])),
        )
        self.tenants.replaced = self.registry.hide_tenant
        self.applier = Applier(self.registry)
        self.engine = self.registry.register(ENGINE)

    def apply(self, *events: Event) -> None:
        """Apply the events as one item."""
        self.applier.apply(self.engine, RequestEvents(0, 0.0, 1, [*events]))
        assert_sums(self.engine)

    def children(self, name: str) -> dict[str, float]:
        """Return the counts of a family by tenant."""
        row = self.engine.layout.find(f"sidestep_tenant_{name}_total")
        return {key[0]: value for key, value in self.engine.keyed[row.slots[0]].items()}


def assert_sums(engine: Engine) -> None:
    """Assert that every family by tenant adds up to the engine's own counter."""
    for name, (family, values) in TOTALS.items():
        row = engine.layout.find(family)
        slots = (
            row.slots if values is None else [row.slots[row.row.closed.index(v)] for v in values]
        )
        own = sum(engine.values[slot] or 0 for slot in slots)
        children = engine.keyed[engine.layout.find(name).slots[0]]
        assert sum(children.values()) == own, name
        assert all(value >= 0 for value in children.values()), name
    own_parts, by_tenant = (
        engine.keyed[engine.layout.handler_slot(name)] for name in (REQUEST_PARTS, TENANT_PARTS)
    )
    for part in {part for _, part in own_parts}:
        own = sum(seconds for (_, each), seconds in own_parts.items() if each == part)
        ours = sum(seconds for (each, _), seconds in by_tenant.items() if each == part)
        assert ours == pytest.approx(own, abs=1e-6), part


def with_tenants(events: Sequence[Event], names: Sequence[str]) -> list[Event]:
    """Return the events with a cache salt for each request, in turn."""
    queued = 0
    found: list[Event] = []
    for event in events:
        if isinstance(event, Queued):
            identity = Identity("id", "", names[queued % len(names)])
            queued += 1
            found.append(msgspec.structs.replace(event, identity=identity))
        else:
            found.append(event)
    return found


@example([("ask", 1, 0)] * 8, list("abcdefgh"), 1)
@given(actions, st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=9), st.integers(1, 5))
def test_sums_equal_totals_after_every_item(
    chosen: list[tuple[str, int, int]], names: list[str], limit: int
) -> None:
    """No series decreases, except that of a tenant that is no longer shown."""
    bench = Bench(limit)
    before: dict[str, dict[str, float]] = {}
    for event in with_tenants(Scheduler().run(chosen), names):
        bench.apply(event)
        for name in (
            "requests", "generation_tokens", "prompt_tokens", "queue_seconds", "kv_block_seconds", "cost",
        ):  # fmt: skip
            now = bench.children(name)
            assert len(now) <= limit + 1
            for tenant, value in before.get(name, {}).items():
                assert now.get(tenant, value) >= value
            before[name] = now


@given(st.lists(st.sampled_from("abcdefghij"), max_size=300), st.integers(1, 8))
def test_the_error_of_the_sketch(names: list[str], counters: int) -> None:
    """A count is never too high, too low by the stated bound at most, and memory is bounded."""
    sketch = HeavyHitters(counters)
    found = dict.fromkeys(names, 0)
    for name in names:
        found[name] = sketch.add(name)
        assert len(sketch._counts) <= counters
    for name, true in Counter(names).items():
        kept = sketch._counts.get(name, 0)
        assert kept <= true
        assert kept >= true - len(names) / (counters + 1)


@pytest.mark.parametrize(
    ("by", "identity", "adapter", "name"),
    [
        ("cache-salt", Identity("x", "", "acme"), "", "acme"),
        ("cache-salt", None, "", NO_TENANT),
        ("adapter", None, "sql", "sql"),
        ("priority", Identity(priority=-3), "", "-3"),
        ("id-prefix", Identity("chatcmpl-acme-17"), "", "acme"),
        ("id-prefix", Identity("0123", "digest"), "", "digest"),
    ],
)
def test_rules(by: str, identity: Identity | None, adapter: str, name: str) -> None:
    """Each rule reads its part of a request."""
    assert Tenants(by, 3).tenant(identity, adapter) == name


def test_id_prefix() -> None:
    """The prefixes of OpenAI's API are no tenants."""
    names = ("cmpl-acme-17-0", "chatcmpl-acme", "acme-1", "acme", "embd-acme-1")
    assert {id_prefix(name) for name in names} == {"acme"}


def test_folded_items_count_for_others() -> None:
    """A sender folds without knowing tenants; sums and costs are equal all the same."""
    chosen = [("ask", n, 1) for n in range(6)] + [("schedule", 0, 0), ("step", 0, 1)] * 9
    events = with_tenants(Scheduler().run(chosen), ["a"])
    whole, bench, folder = Bench(), Bench(), ItemFolder()
    whole.apply(*events)
    bench.apply(*events[:10])
    for event in events[10:]:
        assert folder.fold(encode_item(RequestEvents(0, 0.0, 1, [event])), [ENGINE])
    for frame in folder.seal().frames:
        for raw in frame:
            bench.applier.add_totals(bench.engine, decode_totals(msgspec.Raw(raw)))
    assert_sums(bench.engine)
    assert bench.children("generation_tokens")[OTHER] > 0
    cost = whole.engine.layout.find("sidestep_cost_total").slots[0]
    assert bench.engine.values[cost] == whole.engine.values[cost] != 0


async def test_an_exporter_and_its_successor(start: Start, tmp_path: Path) -> None:
    """A recorded run of a real engine by adapter; the shown tenants survive a restart."""
    settings = {"tenants_by": "adapter", "state_dir": str(tmp_path / "state")}
    async with start(**settings) as exporter:
        await replay(exporter, "core_lora")
        before = parse(await get(exporter.url))
    async with start(**settings) as exporter:
        after = parse(await get(exporter.url))
        assert exporter.tenants is not None
        adapters = exporter.registry.requests_by_tenant().keys() - {OTHER}
        assert all(name in exporter.tenants for name in adapters)
    family = "sidestep_tenant_generation_tokens"
    assert before[family].samples == after[family].samples
    assert len(adapters) > 1
    own = sum(before["vllm:generation_tokens"].samples.values())
    assert sum(before[family].samples.values()) == own > 0


async def send(endpoint: str, events: Sequence[Event]) -> None:
    """Send events as an engine's process."""
    sender = Publisher(endpoint, "s", [ENGINE])
    for at in range(0, len(events), 300):
        sender.push(RequestEvents(0, float(at), 1, [*events[at : at + 300]]))
    await until(lambda: sender.drained)
    sender.close()


async def test_as_many_tenants_as_may_be(start: Start, tmp_path: Path) -> None:
    """Their counters, by part of the latency, too, survive two restarts, and none decreases."""
    settings = {"tenants_by": "cache-salt", "tenants_max": str(MAX_TENANTS)}
    random = Random(3)
    events: list[Event] = []
    for number in range(1, 3 * MAX_TENANTS):
        waited, first, last = sorted(random.random() for _ in range(3))
        stamps = [number + waited, number + first, number + last]
        name = Identity("id", "", f"{number % (MAX_TENANTS + 1)}")
        events += [
            Queued(number, number, WALL + number - random.random(), 5, identity=name),
            Scheduled(number, stamps[0]),
            *(Iteration(at, at, WALL + at, [Output(at, [number])]) for at in stamps[1:]),
            Finished(number, stamps[2], WALL + stamps[2], 0, 5, 2),
        ]
    before: dict[tuple[str, Labels], float] = {}
    for run in range(4):
        async with start(state_dir=str(tmp_path / "state"), **settings) as exporter:
            if run == 0:
                await send(exporter.config.ingest_endpoint[0], events)
            page = parse(await get(exporter.url))
        now = {
            key: value
            for name, family in page.items()
            if name.startswith("sidestep_tenant")
            for key, value in family.samples.items()
        }
        assert len(now) > 1300
        assert {key: value for key, value in before.items() if not now[key] >= value} == {}
        assert sum(now.values()) == pytest.approx(sum(before.values() or now.values()))
        assert min(now.values()) >= 0
        before = now


def test_a_change_of_price() -> None:
    """Tokens cost what they cost when they were counted; without a price the counters stay."""
    bench = Bench()
    life = [("ask", 1, 1), ("schedule", 0, 0), ("step", 0, 1), ("finish", 0, 0)]
    events = with_tenants(Scheduler().run(life * 4), ["a", "b"])
    third = len(events) // 3
    bench.apply(*events[:third])
    first = bench.children("cost")
    bench.registry.accounting.change_prices(Prices())
    bench.apply(*events[third : 2 * third])
    assert bench.children("cost") == first
    bench.registry.accounting.change_prices(Prices([Price("*", 1, 1, 1)]))
    bench.apply(*events[2 * third :])
    added = sum(bench.children("cost").values()) - sum(first.values())
    assert 0 < added < 1000
    assert all(
        bench.children("cost")[name] >= first.get(name, 0) for name in bench.children("cost")
    )


def test_a_name_that_is_no_label_value() -> None:
    """A sender's Python may take characters for printable that the exporter's does not."""
    names = ["a\U00100000b", "c\nd", ""]
    bench = Bench()
    life = [("ask", 1, 1), ("schedule", 0, 0), ("step", 0, 1), ("finish", 0, 0)]
    bench.apply(*with_tenants(Scheduler().run(life * 3), names))
    record = decode_totals(encode_totals(bench.engine, totals_of(bench.engine)))
    again = restore_engine(Bench().registry, record)

    assert bench.children("requests").keys() - {OTHER} == {"a?b", "c?d", NO_TENANT}
    assert again.keyed == bench.engine.keyed


def test_fewer_tenants_after_a_restart() -> None:
    """Those with the most requests stay."""
    tenants = Tenants("cache-salt", 2, ["vip"])
    assert tenants.restore({"a": 1, "b": 3, "c": 2, OTHER: 9}) == ["c", "a"]
    assert "b" in tenants


@pytest.mark.parametrize("now", [{"tenants_max": 1}, {"tenants_by": ""}])
async def test_other_settings_after_a_restart(
    start: Start, tmp_path: Path, now: dict[str, object]
) -> None:
    """Series of tenants that are no longer shown end; all sums are still those of the engine."""
    settings: dict[str, object] = {"tenants_by": "adapter", "state_dir": str(tmp_path / "state")}
    family = "sidestep_tenant_generation_tokens"
    async with start(**settings) as exporter:
        await replay(exporter, "core_lora")
        before = parse(await get(exporter.url))[family].samples
    async with start(**settings | now) as exporter:
        page = parse(await get(exporter.url))
        again = page[family].samples if family in page else {}
        tenants = {dict(labels)["tenant"] for _, labels in again}
        own = sum(page["vllm:generation_tokens"].samples.values())
    assert len(before) > 2
    if now == {"tenants_max": 1}:
        assert OTHER in tenants
        assert len(tenants) == 2
        assert sum(again.values()) == sum(before.values()) == own
    else:
        assert again == {}
