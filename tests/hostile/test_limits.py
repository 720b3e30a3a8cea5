"""Limits on what a peer may send: what exceeds one is refused by its reason and changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)

from intakes import Fed
from rendered import render
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.metrics.engine import ORIGIN
from sidestep.metrics.exposed_engines import ENGINE_EXPIRES_SECONDS, MAX_ENGINES
from sidestep.metrics.merge import LARGEST
from sidestep.metrics.quotas import MAX_ENGINE_BYTES, MAX_OPEN_FAMILIES
from sidestep.metrics.totals_codec import encode_totals, totals_of
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.block_events import MAX_HASHES, CacheChange, CacheEvents
from sidestep.protocol.engine_totals import (
    Buckets,
    Child,
    EngineTotals,
    Hits,
    OpenTotals,
    Totals,
)
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import (
    COUNT_LIMIT,
    MAX_ENGINES_PER_STREAM,
    MAX_LABELS,
    MAX_OBSERVATIONS,
    MAX_OPEN_VALUES,
)
from sidestep.protocol.messages import Aggregate, Bye, EngineInfo, Heartbeat
from sidestep.protocol.request_events import MAX_REQUESTS, Iteration, Output, Queued, RequestEvents
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.tracking.kv_blocks.tracker import Sampling

LABELS = {"engine": "0", "model_name": "m"}
TOKENS = "vllm:generation_tokens_total"
FLOPS = "vllm:estimated_flops_per_gpu_total"
ITL = "vllm:inter_token_latency_seconds"


def engine(name: str = "e", labels: dict[str, str] | None = None, **more: Any) -> EngineInfo:
    """Return an engine, by default with labels of its own."""
    return EngineInfo(name, "vllm", labels or {"engine": name, "model_name": "m"}, **more)


def cache(name: str, **more: Any) -> EngineInfo:
    """Return an engine whose prefix cache is observed."""
    return EngineInfo(name, "stream", {"engine": name, "model_name": "m"}, **more)


@pytest.fixture
def fed() -> Fed:
    """An intake with an engine with core events, fed by stream ``s``."""
    made = Fed(rate=1.0)
    made.send_hello("s", [engine(features=["engine_core"])])
    made.items("s", [encode_item(VllmStep(0, 1.0, 1.0, SchedulerStats(3), IterationStats(5)))])
    return made


def events(*found: Any, source: int = 1) -> bytes:
    """Encode request events."""
    return encode_item(RequestEvents(0, 1.0, source, list(found)))


def samples(*families: Family) -> bytes:
    """Encode self-described families."""
    return encode_item(Samples(0, 1.0, list(families)))


# Hellos.


def test_a_hello_over_the_limit_on_engines_registers_none() -> None:
    """Though only its second engine exceeds the limit."""
    fed = Fed()
    for part in range(MAX_ENGINES // MAX_ENGINES_PER_STREAM):
        names = range(part * MAX_ENGINES_PER_STREAM, (part + 1) * MAX_ENGINES_PER_STREAM)
        fed.send_hello(f"s{part}", [engine(str(n)) for n in list(names)[part == 0 :]])
    assert len(fed.intake.registry.engines) == MAX_ENGINES - 1
    fed.send_hello("late", [engine("late/0"), engine("late/1")])

    assert fed.rejected == {("over_limit",): 1}
    assert len(fed.intake.registry.engines) == MAX_ENGINES - 1
    fed.send_hello("late", [engine("late/0"), engine("late/0")])
    assert len(fed.intake.registry.engines) == MAX_ENGINES


def test_an_engine_missing_in_a_later_hello_expires() -> None:
    """A stream does not keep all engines that it ever named."""
    fed = Fed()
    fed.send_hello("s", [engine("a")])
    fed.send_hello("s", [engine("b")])

    assert not fed.intake.registry.engines["a"].feeds.streams
    fed.advance(ENGINE_EXPIRES_SECONDS / 2)
    fed.send("s", Heartbeat(1, 0, 0))
    fed.advance(ENGINE_EXPIRES_SECONDS / 2 + 1)
    assert list(fed.intake.registry.engines) == ["b"]


DESCRIPTIONS = {
    "many labels": [engine("x", {**LABELS, **{f"k{n}": "v" for n in range(40)}})],
    "long labels": [engine("x", {**LABELS, **{f"k{n}": "v" * 250 for n in range(9)}})],
    "much info": [engine("x", info={"x": {f"k{n}": "v" * 250 for n in range(128)}})],
    "many features": [engine("x", features=["f" * 250] * 64, closed={"c": ["v" * 250] * 64})],
    "two sets of labels": [engine("e", LABELS), engine("e", {**LABELS, "pod": "a"})],
    "negative bounds": [engine(bounds={"inter_token_latency": [-1.0, 1.0]})],
}
REASONS = {"two sets of labels": "bad_label", "negative bounds": "bad_bounds"}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_invalid_or_large_descriptions_are_refused(name: str) -> None:
    """Labels are repeated in each line of a page, and all of a description is held."""
    fed = Fed()
    fed.send_hello("s", DESCRIPTIONS[name])
    reason = REASONS.get(name, "over_limit")

    assert fed.rejected == {(reason,): 1}
    assert fed.intake.registry.limited["descriptions"] == (reason == "over_limit")
    assert fed.page == ""


def test_engines_named_by_all_streams_are_limited() -> None:
    """Several streams may feed an engine, but each one's description takes memory."""
    fed = Fed()
    named = [engine(str(n)) for n in range(MAX_ENGINES_PER_STREAM)]
    for stream in range(17):
        fed.send_hello(f"s{stream}", named)

    assert fed.rejected == {("over_limit",): 1}


def test_bounds_and_labels_together_are_limited() -> None:
    """Each within its own limit, they would make a page of gigabytes."""
    families = ["request_latency", "request_tokens", "iteration_tokens", "inter_token_latency"]
    bounds = {family: [float(n) for n in range(250)] for family in families}
    labels = {f"k{n}": "v" * 250 for n in range(2)}
    fed = Fed()
    for stream in range(60):
        fed.send_hello(f"s{stream}", [engine(f"{stream}", {**LABELS, **labels}, bounds=bounds)])

    assert 1 < len(fed.intake.registry.engines) < 60
    assert fed.intake.registry.limited["descriptions"] > 0


def test_an_engine_that_returns_gets_an_origin_label_if_its_labels_are_taken() -> None:
    """Two engines never expose the same series."""
    fed = Fed()
    fed.send_hello("a", [engine("a", LABELS)])
    fed.items("a", [encode_item(VllmStep(0, 1.0, 1.0, None, IterationStats(5)))])
    assert fed.page
    fed.advance(ENGINE_EXPIRES_SECONDS + 1)
    fed.send_hello("b", [engine("b", {**LABELS, "pod": ""})])
    fed.send_hello("a", [engine("a", LABELS)])
    found = [line for line in fed.page.splitlines() if line.startswith(ITL + "_count")]

    assert found == [
        f'{ITL}_count{{engine="0",model_name="m",pod=""}} 0',
        f'{ITL}_count{{engine="0",model_name="m",origin="a"}} 0',
    ]
    assert fed.intake.registry.engines["a"].labels[ORIGIN] == "a"


def test_a_closed_stream_needs_a_hello(fed: Fed) -> None:
    """Its engine may belong to another stream by then; a second Bye counts nothing."""
    fed.send("s", Bye(1, 9))
    fed.send("s", Bye(1, 9))
    fed.items("s", [encode_item(VllmStep(0, 1.0, 1.0, None, IterationStats(100)))])

    assert f'{TOKENS}{{engine="e",model_name="m"}} 5\n' in fed.page
    assert fed.intake.metrics.value("sidestep_lost_items_total") == 8


# Folded records.


def record(fed: Fed, change: Callable[[Totals], None] = lambda _: None) -> EngineTotals:
    """Return the engine's record after ``change``."""
    (known,) = fed.intake.registry.engines.values()
    plain = totals_of(known)
    plain.gauge_stamp = 2.0
    change(plain)
    return msgspec.msgpack.decode(encode_totals(known, plain), type=EngineTotals)


def send(fed: Fed, *found: EngineTotals) -> None:
    """Send records as one folded item."""
    raws = [msgspec.Raw(msgspec.msgpack.encode(each)) for each in found]
    seq = fed.seqs["s"] = fed.seqs["s"] + 1
    fed.send("s", Aggregate(fed.incarnation("s"), seq, seq, raws))


def place(fed: Fed, name: str) -> int:
    """Return the slot of a family."""
    (known,) = fed.intake.registry.engines.values()
    return known.layout.find(name).slots[0]


def changed(**values: Any) -> Callable[[Fed, EngineTotals], None]:
    """Set fields of the totals."""

    def change(_: Fed, found: EngineTotals) -> None:
        for name, value in values.items():
            setattr(found.totals, name, value)

    return change


def scalar(value: Any) -> Callable[[Fed, EngineTotals], None]:
    """Set the value of a counter."""

    def change(fed: Fed, found: EngineTotals) -> None:
        found.totals.scalars[place(fed, FLOPS)] = value

    return change


def histogram(total: float = 1.0, count: Any = 1) -> Callable[[Fed, EngineTotals], None]:
    """Set a histogram."""

    def change(fed: Fed, found: EngineTotals) -> None:
        bounds = found.head.bounds[place(fed, ITL)]
        buckets = Buckets(total, [count] * (len(bounds) + 1))
        found.totals.histograms[place(fed, ITL)] = buckets

    return change


def twice(column: str) -> Callable[[Fed, EngineTotals], None]:
    """Repeat the first entry of a column."""

    def change(_: Fed, found: EngineTotals) -> None:
        getattr(found.head, column).append(getattr(found.head, column)[0])
        getattr(found.totals, column).append(getattr(found.totals, column)[0])
        if column == "histograms":
            found.head.bounds.append(found.head.bounds[0])

    return change


def keyed(*children: Child) -> Callable[[Fed, EngineTotals], None]:
    """Set children of a family with open label values."""

    def change(_: Fed, found: EngineTotals) -> None:
        index = found.head.keyed.index("sidestep_cudagraph_tokens_total")
        found.totals.keyed[index] = list(children)

    return change


def own(*children: Child) -> Callable[[Fed, EngineTotals], None]:
    """Set children of a self-described family."""
    return changed(open=[OpenTotals("own_total", "counter", "", ["k"], [], list(children))])


FORGED = {
    "a limit that goes back": changed(limited=-1),
    "tokens that go back": changed(held_tokens=-1),
    "requests that go back": changed(cut_off=-1),
    "requests beyond all bounds": changed(cut_off=COUNT_LIMIT + 1),
    "hits that go back": changed(hits=[Hits(-1, -1, -1)]),
    "no time": changed(gauge_stamp=float("nan")),
    "the end of time": changed(gauge_stamp=float("inf")),
    "infinitely much": scalar(float("inf")),
    "less than nothing": scalar(-1),
    "too much": scalar(str(10 * LARGEST)),
    "too much at once": scalar(1e300),
    "no number": scalar("1e3"),
    "a sum that goes back": histogram(total=-1.0),
    "a sum that is none": histogram(total=float("nan")),
    "too large a sum": histogram(total=1e300),
    "a count that goes back": histogram(count=-1),
    "too large a count": histogram(count=str(10 * LARGEST)),
    "a scalar twice": twice("scalars"),
    "a histogram twice": twice("histograms"),
    "a family twice": twice("keyed"),
    "too large a child": keyed(Child(["FULL"], str(10 * LARGEST))),
    "a label that is none": keyed(Child(["a\nb"], 1)),
    "one label too many": keyed(Child(["a", "b"], 1)),
    "too large an own child": own(Child(["a"], 1e300)),
    "more children than are read": own(*(Child([str(n)], 1) for n in range(300))),
    "a histogram of its own too large": changed(
        open=[OpenTotals("own", "histogram", "", [], [1.0], [Child([], 0, Buckets(1e300, [1, 1]))])]
    ),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED.keys())
def test_a_forged_record_changes_nothing(
    fed: Fed, forge: Callable[[Fed, EngineTotals], None]
) -> None:
    """Not even by its parts that are valid."""
    fed.items("s", [events(Queued(1, 1.0), Queued(2, 1.0))])
    # Good in all other places, so that a part of it could count.
    good = record(fed)
    good.totals.cut_off, good.totals.blocks = 3, True
    forge(fed, good)
    page, before = fed.page, fed.snapshot()[1:-1]
    send(fed, good)

    assert sum(fed.rejected.values()) == 1
    assert {reason for (reason,) in fed.rejected} <= {"bad_item", "bad_label", "over_limit"}
    assert fed.page == page
    assert fed.snapshot()[1:-1] == before


def test_counts_over_64_bits_are_exposed_and_saved(fed: Fed) -> None:
    """They are sums of valid amounts; a snapshot holds them as text."""
    children = [Child(["FULL"], str(LARGEST))]
    family = OpenTotals("own_total", "counter", "", ["k"], [], [Child(["a"], str(LARGEST))])
    boxes = OpenTotals(
        "box", "histogram", "", [], [1.0], [Child([], 0, Buckets(1.0, [7, str(LARGEST)]))]
    )
    good = record(fed)
    histogram(count=str(LARGEST))(fed, good)
    keyed(*children)(fed, good)
    good.totals.open = [family, boxes]
    for _ in range(3):
        send(fed, good)
    other = fed.restarted(fed.snapshot())

    assert fed.rejected == {}
    assert f'box_bucket{{engine="e",model_name="m",le="+Inf"}} {3 * (LARGEST + 7)}\n' in fed.page
    assert f'own_total{{engine="e",k="a",model_name="m"}} {3 * LARGEST}\n' in fed.page
    assert other.page == fed.page


# Items.


REFUSED = {
    "no name but its end": (Family("_total", "counter", [], [Sample([], 1.0)]), "bad_family"),
    "the label of engines that look alike": (
        Family("own", "gauge", [ORIGIN], [Sample(["a"], 1.0)]), "bad_label",
    ),
    "bounds below nothing": (Family("own", "histogram", [], [Sample([])], "", [-1.0, 1.0]), "bad_bounds"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_families_that_would_make_a_page_invalid_are_refused(
    fed: Fed, family: Family, reason: str
) -> None:
    """OpenMetrics has no family without a name, and no sum with negative bounds."""
    fed.items("s", [samples(family)])

    assert fed.rejected == {(reason,): 1}
    page = render(fed.intake.registry, openmetrics=True).decode()
    families = openmetrics_families(f"{page}# EOF\n")  # type: ignore[no-untyped-call]
    assert list(families)


def test_the_size_of_self_described_families_on_a_page_is_limited(fed: Fed) -> None:
    """A histogram is one series, but hundreds of lines; other engines have a share as well."""
    bounds = [float(n) for n in range(250)]
    children = [Sample([f"{n:0200}"], 0.0, [1.0]) for n in range(MAX_OPEN_VALUES)]
    for number in range(20):
        fed.items("s", [samples(Family(f"own_{number}", "histogram", ["k"], children, "", bounds))])
    registry = fed.intake.registry
    assert registry.limited["engine_bytes"] > 0
    assert registry.quota.bytes <= MAX_ENGINE_BYTES

    fed.send_hello("t", [engine("t")])
    for number in range(20):
        fed.items("t", [samples(Family(f"own_{number}", "histogram", ["k"], children, "", bounds))])
    assert registry.limited["bytes"] > 0


def test_family_names_are_free_once_no_engine_has_them() -> None:
    """A stream cannot use up all names forever."""
    fed = Fed()
    fed.send_hello("s", [engine()])
    for start in range(0, MAX_OPEN_FAMILIES, 128):
        found = [Family(f"f{n}", "gauge", [], [Sample()]) for n in range(start, start + 128)]
        fed.items("s", [samples(*found)])
    fed.items("s", [samples(Family("one_more", "gauge", [], [Sample()]))])
    assert fed.rejected == {("over_limit",): 1}
    fed.send("s", Bye(1, fed.seqs["s"]))
    fed.restart("s")
    fed.send_hello("s", [engine("e", {**LABELS, "pod": "x"})])
    fed.items("s", [samples(Family("one_more", "gauge", [], [Sample()]))])

    assert fed.rejected == {("over_limit",): 1}
    assert list(fed.intake.registry.quota.families) == ["one_more"]


LONG = {
    "samples": ["s", 0, 1.0, [["a", "gauge", [], [[]] * 4096], ["b", "gauge", [], [[]] * 4096]]],
    "few samples": [
        "s",
        0,
        1.0,
        [["a", "gauge", [], [[]] * 3000], ["b", "gauge", [], [[]] * 1097]],
    ],
    "requests": ["re", 0, 1.0, 1, [[4, 0, 0, 0, [[1, [1] * MAX_REQUESTS], [1, [1]]]]]],
    "hashes": ["ce", 1, 1.0, 1, [["stored", 1.0, [1] * 4096]] * 5],
}


@pytest.mark.parametrize("item", LONG.values(), ids=LONG.keys())
def test_the_number_of_elements_of_an_item_is_limited(fed: Fed, item: list[Any]) -> None:
    """Elements of one byte each would block the loop for long."""
    fed.send_hello("s", [engine(features=["engine_core"]), cache("c")])
    before = fed.snapshot()[1:-1]
    fed.items("s", [msgspec.msgpack.encode(item)])

    assert fed.rejected == {("too_big",): 1}
    assert fed.snapshot()[1:-1] == before


@pytest.mark.parametrize(
    ("media", "reason"),
    [(["a\nb"], "bad_label"), ([str(n) for n in range(MAX_LABELS + 1)], "bad_item")],
    ids=["unprintable", "many"],
)
def test_media_of_a_cache_are_limited(media: list[str], reason: str) -> None:
    """Each is a label value, and has a table of blocks."""
    fed = Fed()
    fed.send_hello("s", [cache("a", features=["kv_events"])])
    changes = [CacheChange("stored", 1.0, [1], medium) for medium in media]
    fed.items("s", [encode_item(CacheEvents(0, 1.0, 1, changes))])

    assert fed.rejected == {(reason,): 1}


def test_items_at_the_limits_are_accepted(fed: Fed) -> None:
    """Every limit is inclusive."""
    outputs = [Output(1.0, list(range(MAX_REQUESTS)))]
    changes = [CacheChange("stored", 1.0, list(range(4096)), "GPU")] * (MAX_HASHES // 4096)
    found = [Sample([str(n)], 1.0) for n in range(MAX_OBSERVATIONS)]
    fed.send_hello("s", [engine(features=["engine_core"]), cache("c")])
    fed.items("s", [
        events(Iteration(0.0, 1.0, 1.0, outputs)),
        encode_item(CacheEvents(1, 1.0, 1, changes)),
        samples(Family("own", "gauge", ["k"], found)),
    ])  # fmt: skip

    assert fed.rejected == {}


# Capacity that engines share, and pages.


def test_engines_share_the_capacity_for_blocks() -> None:
    """A stream that names hundreds of engines does not get the capacity hundreds of times."""
    fed = Fed()
    fed.intake.registry.tracking.sampling = Sampling(1.0, capacity=10)
    count = 100
    fed.send_hello("s", [cache(str(n)) for n in range(count)])
    hashes = list(range(50))
    for number in range(count):
        changes = [CacheChange("stored", 1.0, hashes, "GPU")]
        fed.items("s", [encode_item(CacheEvents(number, 1.0, 1, changes))])
    trackers = [e.part(Trackers).blocks for e in fed.intake.registry.engines.values()]
    held = [blocks.tracked for blocks in trackers if blocks is not None]

    assert held == [1] * count


def test_refusals_are_logged_a_few_times_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """A peer must not fill a disk, whatever it calls itself."""
    fed = Fed()
    with caplog.at_level(logging.INFO):
        for number in range(300):
            name = f"s{number}"
            fed.send_hello(name, [engine(labels={**LABELS, "model_name": "\x1b[2J"})])
            fed.intake.accept(name.encode(), [b"\xc1"], fed.now)
            fed.advance(60 / 300)

    assert 1 < len(caplog.records) <= 10
    assert all(record.getMessage().isprintable() for record in caplog.records)
