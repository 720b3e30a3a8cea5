"""What a peer says beyond what can be: refused by its reason, and nothing has changed."""

from __future__ import annotations

import asyncio
import logging
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from harm import World, check_page
from intakes import Fed
from sidestep.engines.items import VllmStep, encode_item
from sidestep.engines.vllm.wire import CUDAGraphStat, SchedulerStats
from sidestep.exposition.page_cache import CACHE_SECONDS, Pages
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.statistics_log import StatsLog
from sidestep.exposition.text_page import render
from sidestep.metrics.engine import ORIGIN
from sidestep.metrics.quotas import MAX_ENGINE_BYTES, MAX_OPEN_FAMILIES
from sidestep.metrics.record_codec import encode_record, totals_of
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, MAX_ENGINES, Registry
from sidestep.metrics.validate_record import LARGEST
from sidestep.protocol.block_events import MAX_HASHES, BlockEvents, CacheChange, CacheEvents
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import (
    COUNT_LIMIT,
    MAX_ENGINES_PER_STREAM,
    MAX_LABEL_CHARS,
    MAX_OBSERVATIONS,
    MAX_OPEN_VALUES,
    VALUE_LIMIT,
)
from sidestep.protocol.messages import Aggregate, Bye, EngineInfo, Heartbeat
from sidestep.protocol.records import TOTAL_LIMIT, Buckets, Child, Hits, OpenTotals, Record, Totals
from sidestep.protocol.request_events import MAX_REQUESTS, Iteration, Output, Queued, RequestEvents
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.tracking.kv_blocks.sampling import Sampling
from sidestep.tracking.requests.capacity import RequestCapacity
from sidestep.tracking.requests.inflight import InFlight

LABELS = {"engine": "0", "model_name": "m"}
TOKENS = "vllm:generation_tokens_total"
FLOPS = "vllm:estimated_flops_per_gpu_total"
ITL = "vllm:inter_token_latency_seconds"


def engine(name: str = "e", labels: dict[str, str] | None = None, **more: Any) -> EngineInfo:
    """An engine, which looks like all others unless it has labels."""
    return EngineInfo(name, "vllm", labels or {"engine": name, "model_name": "m"}, **more)


def cache(name: str, **more: Any) -> EngineInfo:
    """An engine that tells of its cache."""
    return EngineInfo(name, "stream", {"engine": name, "model_name": "m"}, **more)


@pytest.fixture
def fed() -> Fed:
    """An engine with a core, and one stream that feeds it."""
    made = Fed(rate=1.0)
    made.greet("s", [engine(features=["engine_core"])])
    made.items("s", [encode_item(VllmStep(0, 1.0, 1.0, SchedulerStats(3), IterationStats(5)))])
    return made


def events(*found: Any, source: int = 1) -> bytes:
    """Request events."""
    return encode_item(RequestEvents(0, 1.0, source, list(found)))


def samples(*families: Family) -> bytes:
    """Families that describe themselves."""
    return encode_item(Samples(0, 1.0, list(families)))


# Hellos.


def test_engines_are_counted_before_any_is_taken() -> None:
    """A Hello that passes the limit with its second engine: none of its engines is there."""
    fed = Fed()
    for part in range(MAX_ENGINES // MAX_ENGINES_PER_STREAM):
        names = range(part * MAX_ENGINES_PER_STREAM, (part + 1) * MAX_ENGINES_PER_STREAM)
        fed.greet(f"s{part}", [engine(str(n)) for n in list(names)[part == 0 :]])
    assert len(fed.intake.registry.engines) == MAX_ENGINES - 1
    fed.greet("late", [engine("late/0"), engine("late/1")])

    assert fed.rejected == {("over_limit",): 1}
    assert len(fed.intake.registry.engines) == MAX_ENGINES - 1
    fed.greet("late", [engine("late/0"), engine("late/0")])
    assert len(fed.intake.registry.engines) == MAX_ENGINES


def test_an_engine_named_twice_has_one_set_of_labels() -> None:
    """Else items would feed one that nobody sees."""
    fed = Fed()
    fed.greet("s", [engine("e", LABELS), engine("e", {**LABELS, "pod": "a"})])

    assert fed.rejected == {("bad_label",): 1}
    assert fed.page == ""


def test_an_engine_that_is_not_named_any_more_is_not_fed() -> None:
    """A stream that greets with ever other engines does not keep all of them."""
    fed = Fed()
    fed.greet("s", [engine("a")])
    fed.greet("s", [engine("b")])

    assert not fed.intake.registry.engines["a"].streams
    fed.pass_time(ENGINE_EXPIRES_SECONDS / 2)
    fed.say("s", Heartbeat(1, 0, 0))
    fed.pass_time(ENGINE_EXPIRES_SECONDS / 2 + 1)
    assert list(fed.intake.registry.engines) == ["b"]


LARGE = {
    "many labels": engine("x", {**LABELS, **{f"k{n}": "v" for n in range(40)}}),
    "long labels": engine("x", {**LABELS, **{f"k{n}": "v" * 250 for n in range(9)}}),
    "much info": engine("x", info={"x": {f"k{n}": "v" * 250 for n in range(128)}}),
    "many features": engine("x", features=["f" * 250] * 64, closed={"c": ["v" * 250] * 64}),
}


@pytest.mark.parametrize("info", LARGE.values(), ids=LARGE.keys())
def test_a_description_has_its_size(info: EngineInfo) -> None:
    """Labels stand in each line of a page, and all of it is held."""
    fed = Fed()
    fed.greet("s", [info])

    assert fed.rejected == {("over_limit",): 1}
    assert fed.intake.registry.limited["descriptions"] == 1
    assert fed.page == ""


def test_bounds_and_labels_come_to_a_page_of_limited_size() -> None:
    """Each within its own limit, they would come to gigabytes together."""
    families = ["request_latency", "request_tokens", "iteration_tokens", "inter_token_latency"]
    bounds = {family: [float(n) for n in range(250)] for family in families}
    labels = {f"k{n}": "v" * 250 for n in range(2)}
    fed = Fed()
    for stream in range(60):
        fed.greet(f"s{stream}", [engine(f"{stream}", {**LABELS, **labels}, bounds=bounds)])

    assert 1 < len(fed.intake.registry.engines) < 60
    assert len(fed.page) < 32 << 20


def test_streams_name_a_limited_number_of_engines() -> None:
    """Several may feed one, but what each says of it is held for each."""
    fed = Fed()
    named = [engine(str(n)) for n in range(MAX_ENGINES_PER_STREAM)]
    for stream in range(17):
        fed.greet(f"s{stream}", named)

    assert fed.rejected == {("over_limit",): 1}


def test_values_known_beforehand_are_capped_over_all_hellos(fed: Fed) -> None:
    """Every Hello may know others."""
    for part in range(9):
        values = [f"{part}/{n}" for n in range(100)]
        fed.greet("s", [engine(features=["spec_decode"], closed={"position": values})])
    (known,) = fed.intake.registry.engines.values()

    assert max(map(len, known.keyed)) <= MAX_OPEN_VALUES


def test_engines_that_look_alike_are_told_apart_whoever_returns() -> None:
    """What stood on the page before is not shown beside it under the same labels."""
    fed = Fed()
    fed.greet("a", [engine("a", LABELS)])
    fed.items("a", [encode_item(VllmStep(0, 1.0, 1.0, None, IterationStats(5)))])
    assert fed.page
    fed.pass_time(ENGINE_EXPIRES_SECONDS + 1)
    fed.greet("b", [engine("b", {**LABELS, "pod": ""})])
    fed.greet("a", [engine("a", LABELS)])
    found = [line for line in fed.page.splitlines() if line.startswith(ITL + "_count")]

    assert found == [
        f'{ITL}_count{{engine="0",model_name="m",pod=""}} 0',
        f'{ITL}_count{{engine="0",model_name="m",origin="a"}} 0',
    ]
    assert fed.intake.registry.engines["a"].labels[ORIGIN] == "a"


def test_an_engine_keeps_its_labels_over_a_restart() -> None:
    """Though whom it looked like is gone: its series would be others."""
    fed = Fed()
    fed.greet("a", [engine("a", LABELS)])
    fed.greet("b", [engine("b", LABELS)])
    fed.say("a", Bye(1, 0))
    fed.pass_time(ENGINE_EXPIRES_SECONDS / 2)
    fed.say("b", Heartbeat(2, 0, 0))
    fed.pass_time(ENGINE_EXPIRES_SECONDS / 2 + 1)
    assert 'origin="b"' in fed.page
    other = fed.reborn(fed.snapshot())

    assert other.intake.registry.engines["b"].labels[ORIGIN] == "b"


def test_own_metrics_tell_engines_apart_that_differ_in_other_labels_only() -> None:
    """Two samples of one name and labels would make the page invalid."""
    world = World()
    for pod in ("a", "b"):
        info = engine(pod, {**LABELS, "pod": pod})
        world.take(b"x", msgspec.msgpack.encode(["H", 1, pod, ord(pod), 1, 1, [info]]))

    world.check_pages()


def test_what_said_goodbye_has_to_greet(fed: Fed) -> None:
    """Its engine may be another's by then; and its goodbye counts once."""
    fed.say("s", Bye(1, 9))
    fed.say("s", Bye(1, 9))
    fed.items("s", [encode_item(VllmStep(0, 1.0, 1.0, None, IterationStats(100)))])

    assert f'{TOKENS}{{engine="e",model_name="m"}} 5\n' in fed.page
    assert fed.intake.metrics.value("sidestep_lost_items_total") == 8


def test_gauges_of_a_snapshot_are_hidden_until_their_stream_greets(fed: Fed) -> None:
    """However often the exporter looks around meanwhile."""
    fed.engines.clear()
    other = fed.reborn(fed.snapshot())
    other.pass_time(2.0)

    assert "vllm:num_requests_running" not in other.page
    assert TOKENS in other.page


def test_an_engine_that_is_given_up_leaves_nothing_behind(fed: Fed) -> None:
    """Under other labels it starts anew; questions, families and places of before are free."""
    registry = fed.intake.registry
    fed.items("s", [
        events(*(Queued(n, 1.0, group=n + 1) for n in range(50))),
        samples(Family("own", "gauge", ["k"], [Sample([str(n)], 1.0) for n in range(9)])),
    ])  # fmt: skip
    assert (len(registry.sample_groups.groups), registry.quota.series) == (50, 9)
    fed.say("s", Bye(1, fed.seqs["s"]))
    fed.restart("s")
    fed.greet("s", [engine("e", {**LABELS, "pod": "new"})])

    places = registry.sample_groups.capacity
    assert (registry.sample_groups.groups, places.used, places.engines) == ({}, 0, 0)
    assert (registry.quota.series, registry.quota.bytes) == (0, 0)
    assert (registry.quota.families, registry.quota.names) == ({}, set())


def test_the_statistics_line_forgets_engines_that_are_gone() -> None:
    """There is no end of names."""
    fed = Fed()
    registry = Registry(fed.intake.registry.layouts, {})
    lines = StatsLog(registry)
    for number in range(60):
        registry.clear()
        registry.register(engine(str(number)))
        lines.lines(1.0)

    assert len(lines._before) <= 3


# What a sender says it folded.


def record(fed: Fed, change: Callable[[Totals], None] = lambda _: None) -> Record:
    """The engine's own, but for ``change``."""
    (known,) = fed.intake.registry.engines.values()
    plain = totals_of(known)
    plain.gauge_stamp = 2.0
    change(plain)
    return msgspec.msgpack.decode(encode_record(known, plain), type=Record)


def send(fed: Fed, *found: Record) -> None:
    """As what one item came to."""
    raws = [msgspec.Raw(msgspec.msgpack.encode(each)) for each in found]
    seq = fed.seqs["s"] = fed.seqs["s"] + 1
    fed.say("s", Aggregate(fed.incarnation("s"), seq, seq, raws))


def place(fed: Fed, name: str) -> int:
    """The slot of a family."""
    (known,) = fed.intake.registry.engines.values()
    return known.layout.find(name).slots[0]


def changed(**values: Any) -> Callable[[Fed, Record], None]:
    """Other totals."""

    def change(_: Fed, found: Record) -> None:
        for name, value in values.items():
            setattr(found.totals, name, value)

    return change


def scalar(value: Any) -> Callable[[Fed, Record], None]:
    """Another number of a counter."""

    def change(fed: Fed, found: Record) -> None:
        found.totals.scalars[place(fed, FLOPS)] = value

    return change


def histogram(total: float = 1.0, count: Any = 1) -> Callable[[Fed, Record], None]:
    """Another histogram."""

    def change(fed: Fed, found: Record) -> None:
        bounds = found.head.bounds[place(fed, ITL)]
        buckets = Buckets(total, [count] * (len(bounds) + 1))
        found.totals.histograms[place(fed, ITL)] = buckets

    return change


def twice(column: str) -> Callable[[Fed, Record], None]:
    """A place that is told of twice."""

    def change(_: Fed, found: Record) -> None:
        getattr(found.head, column).append(getattr(found.head, column)[0])
        getattr(found.totals, column).append(getattr(found.totals, column)[0])
        if column == "histograms":
            found.head.bounds.append(found.head.bounds[0])

    return change


def keyed(*children: Child) -> Callable[[Fed, Record], None]:
    """Children of a family whose label values nobody knows."""

    def change(_: Fed, found: Record) -> None:
        index = found.head.keyed.index("sidestep_cudagraph_tokens_total")
        found.totals.keyed[index] = list(children)

    return change


def own(*children: Child) -> Callable[[Fed, Record], None]:
    """Children of a family that describes itself."""
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
def test_what_nothing_folds_to_changes_nothing(
    fed: Fed, forge: Callable[[Fed, Record], None]
) -> None:
    """Not a part of it counts, what comes before the check's end included."""
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


def test_what_was_seen_is_what_the_catalogue_has(fed: Fed) -> None:
    """Names of options would gather without end, and make a snapshot unreadable."""
    (known,) = fed.intake.registry.engines.values()
    path = min(known.layout.optional_paths)
    send(fed, record(fed, lambda totals: setattr(totals, "seen", [path, "x", "y"])))

    assert known.exposed_paths == {path}


def test_counts_that_no_64_bits_hold_are_shown_and_kept(fed: Fed) -> None:
    """Added up from what is allowed each time; a snapshot writes them as text."""
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
    other = fed.reborn(fed.snapshot())

    assert fed.rejected == {}
    assert f'box_bucket{{engine="e",model_name="m",le="+Inf"}} {3 * (LARGEST + 7)}\n' in fed.page
    assert f'own_total{{engine="e",k="a",model_name="m"}} {3 * LARGEST}\n' in fed.page
    assert other.page == fed.page


def test_totals_of_heartbeats_are_kept_however_often_they_change(fed: Fed) -> None:
    """A peer may say any number, time and again; the snapshot is made all the same."""
    fed.intake.receiver.streams["s"].dropped = TOTAL_LIMIT - 1
    for dropped in (COUNT_LIMIT, 0, COUNT_LIMIT):
        fed.say("s", Heartbeat(1, 1, 0, dropped))
    fed.intake.registry.limited["label_values"] = 9 * TOTAL_LIMIT
    other = fed.reborn(fed.snapshot())

    assert other.intake.receiver.streams["s"].dropped == TOTAL_LIMIT


def test_a_family_that_the_catalogue_has_by_now_costs_no_other(fed: Fed) -> None:
    """A newer release, or old names that are shown again: all else is there."""
    fed.items("s", [samples(Family("own_total", "counter", [], [Sample([], 4.0)]))])
    pieces = [piece.replace(b"own_total", b"vllm:box_") for piece in fed.snapshot()]
    other = fed.reborn(pieces)

    assert "own_total" not in other.page
    assert f'{TOKENS}{{engine="e",model_name="m"}} 5\n' in other.page


# Items.


def test_many_adapters_make_a_label_that_a_snapshot_takes_back(fed: Fed) -> None:
    """All adapters in use are one label value: longer than any that a peer may send."""
    names = {f"adapter-{n:03}": 1 for n in range(60)}
    stats = SchedulerStats(running_lora_adapters=names, waiting_lora_adapters={"a\nb": 2})
    fed.items("s", [encode_item(VllmStep(0, 3.0, 3.0, stats))])
    line = next(x for x in fed.page.splitlines() if x.startswith("vllm:lora_requests_info"))
    other = fed.reborn(fed.snapshot())

    assert len(line) > MAX_LABEL_CHARS
    assert 'waiting_lora_adapters="__other__"' in line
    assert line in other.page


def test_label_values_that_cannot_be_printed_are_others(fed: Fed) -> None:
    """A page is lines of text."""
    stats = SchedulerStats(cudagraph_stats=CUDAGraphStat(1, 2, 1, "FU\nLL"))
    fed.items("s", [encode_item(VllmStep(0, 3.0, 3.0, stats))])

    assert 'runtime_mode="__other__"' in fed.page
    assert "FU" not in fed.page


def test_tokens_of_a_step_that_cannot_be_take_no_sum_back(fed: Fed) -> None:
    """They are left out, and what its slices had added stays."""
    histogram = fed.intake.registry.engines["e"].histogram(
        place(fed, "vllm:iteration_tokens_total")
    )
    huge = IterationStats(COUNT_LIMIT, num_prompt_tokens=COUNT_LIMIT)
    for _ in range(int(VALUE_LIMIT / COUNT_LIMIT / 2) + 1):
        fed.items("s", [encode_item(VllmStep(0, 1.0, 1.0, None, huge))])
    before = histogram.sum
    fed.items("s", [encode_item(VllmStep(0, 2.0, 2.0, SchedulerStats(), IterationStats(5)))])

    assert (histogram.sum, sum(histogram.counts)) == (before, 1)


REFUSED = {
    "no name but its end": (Family("_total", "counter", [], [Sample([], 1.0)]), "bad_family"),
    "the label of engines that look alike": (
        Family("own", "gauge", [ORIGIN], [Sample(["a"], 1.0)]), "bad_label",
    ),
    "bounds below nothing": (Family("own", "histogram", [], [Sample([])], "", [-1.0, 1.0]), "bad_bounds"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_families_that_would_spoil_the_page_are_refused(
    fed: Fed, family: Family, reason: str
) -> None:
    """OpenMetrics has no family without a name, and no sum where bounds are negative."""
    fed.items("s", [samples(family)])

    assert fed.rejected == {(reason,): 1}
    page = render(fed.intake.registry, openmetrics=True).decode()
    families = openmetrics_families(f"{page}# EOF\n")  # type: ignore[no-untyped-call]
    assert list(families)


def test_negative_bounds_of_an_engine_are_refused() -> None:
    """Nothing that an engine measures is below 0."""
    fed = Fed()
    fed.greet("s", [engine(bounds={"inter_token_latency": [-1.0, 1.0]})])

    assert fed.rejected == {("bad_bounds",): 1}


def test_self_described_families_have_their_size_on_the_page(fed: Fed) -> None:
    """A histogram is one series, and hundreds of lines."""
    bounds = [float(n) for n in range(250)]
    children = [Sample([f"{n:0200}"], 0.0, [1.0]) for n in range(MAX_OPEN_VALUES)]
    for number in range(20):
        fed.items("s", [samples(Family(f"own_{number}", "histogram", ["k"], children, "", bounds))])

    assert fed.intake.registry.limited["engine_bytes"] > 0
    assert len(fed.page) < 2 * MAX_ENGINE_BYTES


def test_families_are_there_for_others_again_once_nobody_has_them() -> None:
    """A stream of nonsense does not use up all names for ever."""
    fed = Fed()
    fed.greet("s", [engine()])
    for start in range(0, MAX_OPEN_FAMILIES, 128):
        found = [Family(f"f{n}", "gauge", [], [Sample()]) for n in range(start, start + 128)]
        fed.items("s", [samples(*found)])
    fed.items("s", [samples(Family("one_more", "gauge", [], [Sample()]))])
    assert fed.rejected == {("over_limit",): 1}
    fed.say("s", Bye(1, fed.seqs["s"]))
    fed.restart("s")
    fed.greet("s", [engine("e", {**LABELS, "pod": "x"})])
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
def test_items_have_a_length_beside_their_size(fed: Fed, item: list[Any]) -> None:
    """Elements of one byte each would hold the loop for long."""
    fed.greet("s", [engine(features=["engine_core"]), cache("c")])
    before = fed.snapshot()[1:-1]
    fed.items("s", [msgspec.msgpack.encode(item)])

    assert fed.rejected == {("too_big",): 1}
    assert fed.snapshot()[1:-1] == before


def test_as_long_as_allowed_is_taken(fed: Fed) -> None:
    """The limits themselves are within."""
    outputs = [Output(1.0, list(range(MAX_REQUESTS)))]
    changes = [CacheChange("stored", 1.0, list(range(4096)), "GPU")] * (MAX_HASHES // 4096)
    found = [Sample([str(n)], 1.0) for n in range(MAX_OBSERVATIONS)]
    fed.greet("s", [engine(features=["engine_core"]), cache("c")])
    fed.items("s", [
        events(Iteration(0.0, 1.0, 1.0, outputs)),
        encode_item(CacheEvents(1, 1.0, 1, changes)),
        samples(Family("own", "gauge", ["k"], found)),
    ])  # fmt: skip

    assert fed.rejected == {}


# Requests and blocks of all engines.


def test_every_engine_has_its_share_of_the_requests_followed() -> None:
    """One that takes all that is left does not take another's."""
    places = RequestCapacity()
    greedy, modest = (InFlight(100, 1e9, places) for _ in range(2))
    other = InFlight(100, 1e9, places)
    for number in range(150):
        greedy.track(number, 1.0)
        other.track(number, 1.0)
    for number in range(90):
        modest.track(number, 1.0)

    assert [len(each.live) for each in (greedy, other, modest)] == [100, 100, 66]
    assert places.used == 266
    assert len(greedy.given_up) == 50
    for number in range(50):
        greedy.remove(number)
    greedy.clear()
    assert places.used == 166


def shown(fed: Fed, name: str) -> float:
    """Sum of all samples of ``name`` on the page."""
    page = text_string_to_metric_families(render(fed.intake.registry).decode())
    return sum(sample.value for family in page for sample in family.samples if sample.name == name)


def test_engines_share_the_capacity_for_blocks() -> None:
    """A stream that names hundreds of engines does not get the capacity hundreds of times."""
    fed = Fed()
    fed.intake.registry.sampling = Sampling(1.0, capacity=10)
    count = 100
    fed.greet("s", [cache(str(n)) for n in range(count)])
    hashes = list(range(50))
    for number in range(count):
        changes = [CacheChange("stored", 1.0, hashes, "GPU")]
        fed.items("s", [encode_item(CacheEvents(number, 1.0, 1, changes))])
    held = [e.blocks.tracked for e in fed.intake.registry.engines.values() if e.blocks is not None]

    assert held == [1] * count


def test_a_share_that_became_smaller_is_kept_at_once() -> None:
    """What an engine tracks beyond it is abandoned, and counted."""
    fed = Fed()
    fed.intake.registry.sampling = Sampling(1.0, capacity=2000)
    fed.greet("s", [engine(str(n), features=["engine_core"]) for n in range(200)])
    numbers = list(range(2000))
    first = BlockEvents(0, 1.0, 1, 1.0, bytes(2000), numbers, [1.0] * 2000)
    fed.items("s", [encode_item(first)])
    for number in range(1, 200):
        fed.items("s", [encode_item(BlockEvents(number, 1.0, 1, 1.0))])
    greedy = fed.intake.registry.engines["0"]
    assert greedy.blocks is not None
    assert greedy.blocks.tracked == 100

    fed.items("s", [encode_item(BlockEvents(0, 2.0, 1, 1.0, b"\0", [9999], [2.0]))])

    assert greedy.blocks.tracked == 100
    assert shown(fed, "sidestep_kv_abandoned_blocks_total") == 1900
    assert shown(fed, "sidestep_kv_refused_blocks_total") == 1


def test_refused_blocks_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """With the setting that helps; counts go on in between."""
    fed = Fed()
    fed.intake.registry.sampling = Sampling(1.0, capacity=3)
    fed.greet("s", [cache("a", features=["kv_events"])])
    for first in range(0, 50, 10):
        changes = [CacheChange("stored", 1.0, list(range(first, first + 10)), "GPU")]
        fed.items("s", [encode_item(CacheEvents(0, 1.0, 1, changes))])
        fed.pass_time(20.0)

    lines = [text for record in caplog.records if "blocks" in (text := record.getMessage())]
    assert len(lines) == 2
    assert "engine 'a': 7 sampled KV blocks are not tracked" in lines[0]
    assert "lower --kv.sample-rate (2 more like this since the last)" in lines[1]
    assert shown(fed, "sidestep_kv_cached_refused_blocks_total") == 47


def test_requests_that_are_too_old_go_a_part_at_a_time() -> None:
    """All of them with one item would hold the loop; the next items find the others."""
    fed = Fed()
    fed.greet("s", [engine(features=["engine_core"])])
    for start in range(0, 6000, 500):
        fed.items("s", [events(*(Queued(n, 1.0) for n in range(start, start + 500)))])
    late = encode_item(RequestEvents(0, 1e9, 1, []))
    requests = fed.intake.registry.requests_of(fed.intake.registry.engines["e"]).requests
    fed.items("s", [late])
    assert len(requests.live) == 6000 - 4096
    fed.items("s", [late])

    assert len(requests.live) == 0


async def test_a_large_page_does_not_hold_the_loop() -> None:
    """It is made a part at a time, of engines that change meanwhile."""
    world = World()
    registry = world.intake.registry
    for number in range(300):
        registry.register(engine(str(number)))
    pages = Pages(
        registry, PassthroughRegistry(registry.names), world.own, world.intake.metrics, []
    )
    making = asyncio.create_task(pages.page("engine", "text"))
    turns = 0
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
        registry.register(engine(f"late{turns}"))
    page = b"".join(await making).decode()

    assert turns > 5
    assert 'vllm:request_params_n_count{engine="299",model_name="m"} 0\n' in page
    check_page(text_string_to_metric_families(page))


async def test_a_page_does_not_keep_the_one_before_while_it_is_made() -> None:
    """Two pages at once would be twice the memory, which the allocator keeps for ever."""
    world = World()
    registry = world.intake.registry
    for number in range(100):
        registry.register(engine(str(number)))
    pages = Pages(
        registry, PassthroughRegistry(registry.names), world.own, world.intake.metrics, []
    )
    tracemalloc.start()
    try:
        size = sum(map(len, await pages.page("engine", "text")))
        for one in registry.engines.values():
            for histogram in one.histograms:
                if histogram is not None:
                    histogram.observe(1.0)
            registry.touch(one)
        await asyncio.sleep(CACHE_SECONDS)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        await pages.page("engine", "text")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held > 0.8 * size
    assert peak - held < 0.5 * size


def test_refusals_are_no_lines_in_the_log(fed: Fed, caplog: pytest.LogCaptureFixture) -> None:
    """A peer does not fill a disk."""
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            fed.items("s", [b"\xc1"])

    assert caplog.records == []
