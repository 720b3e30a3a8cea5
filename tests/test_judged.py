"""Objectives' counters against a plain count, wherever observations come from and whatever is restarted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intakes import CORE_RUNS, Fed, Step, steps
from sidestep.catalog.slo import SLO_REQUESTS, SLO_UNDECIDED, Limit, Objective
from sidestep.config.slo import parse
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import Item, VllmStep, encode_item
from sidestep.exposition import json_format, protobuf_page
from sidestep.exposition.aggregated_text import Merged
from sidestep.exposition.series_filter import Choice
from sidestep.exposition.text_page import render
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.metrics.record_codec import decode_record
from sidestep.metrics.slo_histogram import SloCounter, with_slo_counter
from sidestep.protocol import messages
from sidestep.protocol.iteration_stats import FinishedRequestStats, IterationStats
from sidestep.protocol.messages import EngineInfo, Settings
from sidestep.protocol.records import Child, Head, Record, Totals
from sidestep.protocol.self_described import Family, Sample, Samples
from trees import Node, samples

VLLM = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})
LABELS = {"engine_type": "unified", "model_name": "m"}
SGLANG = EngineInfo("t", "sglang", LABELS)
RANKS = ("moe_ep_rank", "pp_rank", "tp_rank")
TTFT = "vllm:time_to_first_token_seconds"
# On a bound, between two, under the lowest, over the highest.
THRESHOLDS = (0.25, 0.35, 0.0005, 5000.0)
latencies = st.one_of(
    st.floats(0.0, 6000.0), st.sampled_from([0.25, 0.35, 0.0, 0.0005, 5000.0, 1e300, -1.0])
)


def objectives(*told: str) -> list[Objective]:
    """As ``--slo`` has them."""
    return [parse(one) for one in told]


def step(values: Sequence[float]) -> bytes:
    """Requests that got their first token so late."""
    return encode_item(
        VllmStep(0, 1.0, 1.0, None, IterationStats(0, time_to_first_tokens_iter=[*values]))
    )


def fed(slo: Iterable[Objective], engine: EngineInfo = VLLM, **options: object) -> Fed:
    """An exporter with one engine."""
    found = Fed(slo=slo, **options)  # type: ignore[arg-type]
    found.greet("s", [engine])
    return found


def counted(page: str, name: str = SLO_REQUESTS) -> dict[tuple[str, ...], float]:
    """Values of the family by objective and result, the engines' together."""
    found: Counter[tuple[str, ...]] = Counter()
    for series, value in samples(page).items():
        if series.startswith(name):
            labels = dict(
                pair.split("=") for pair in series.rstrip("}").partition("{")[2].split(",")
            )
            key = (labels["slo"].strip('"'), labels.get("result", "").strip('"'))
            found[tuple(filter(None, key))] += value  # type: ignore[assignment]
    return dict(found)


def expected(found: Iterable[float], **thresholds: float) -> dict[tuple[str, ...], float]:
    """The same by hand; what is no latency is in neither."""
    known = [value for value in found if 0.0 <= value <= 1e15]
    return {
        (name, result): sum((value <= threshold) == (result == "good") for value in known)
        for name, threshold in thresholds.items()
        for result in ("good", "bad")
    }


@pytest.mark.parametrize("native", [False, True])
@given(
    batches=st.lists(st.lists(latencies, max_size=12), max_size=6),
    weighted=st.lists(st.tuples(latencies, st.integers(1, 4)), max_size=8),
    run=st.tuples(latencies, st.integers(1, 9)),
)
def test_every_way_to_observe_is_judged_once(
    native: bool,
    batches: list[list[float]],
    weighted: list[tuple[float, int]],
    run: tuple[float, int],
) -> None:
    """The histogram stays what it would be without."""
    bounds = (0.001, 0.25, 0.5, 2560.0)
    plain = NativeHistogram(bounds) if native else Histogram(bounds)
    requests: dict[tuple[str, ...], int | float] = {}
    limits = [Limit(f"at_{place}", threshold) for place, threshold in enumerate(THRESHOLDS)]
    found = with_slo_counter(plain.empty_copy(), SloCounter(requests, {}, limits))
    for histogram in (plain, found):
        for number, batch in enumerate(batches):
            (histogram.observe_in_order if number % 2 else histogram.observe_many)([*batch])
        histogram.observe_weighted([*weighted])
        histogram.observe_run(*run)
        histogram.observe(0.3)
    everything = [value for batch in batches for value in batch]
    for value, count in [*weighted, run, (0.3, 1)]:
        everything += [value] * count
    thresholds = dict(limits)

    assert found.to_wire() == plain.to_wire()
    assert isinstance(found, NativeHistogram) == native
    told = {(name, result): count for (result, name), count in requests.items()}
    assert told == expected(everything, **thresholds)


def test_merged_counts_are_not_judged_again() -> None:
    """What combines histograms for a page counts nothing, nor do other bounds."""
    requests: dict[tuple[str, ...], int | float] = {}
    for plain in (Histogram((1.0,)), NativeHistogram((1.0,))):
        found = with_slo_counter(plain, SloCounter(requests, {}, [Limit("a", 0.5)]))
        found.observe_many([0.1, 0.7])
        before = dict(requests)
        found.empty_copy().merge(found)
        other = found.with_bounds((0.2, 2.0))

        assert requests == before
        other.observe(0.3)
        assert requests["good", "a"] == before["good", "a"] + 1


@given(st.lists(st.floats(0.0, 20.0)), st.floats(0.1, 15.0) | st.sampled_from([0.5, 1.0, 10.0]))
def test_buckets_alone_are_never_judged_wrongly(found: list[float], threshold: float) -> None:
    """What the threshold divides is in neither; where it is a bound that is nothing."""
    histogram = Histogram((0.5, 1.0, 10.0))
    histogram.observe_many([*found])
    requests: dict[tuple[str, ...], int | float] = {}
    unjudged: dict[tuple[str, ...], int | float] = {}
    judge = SloCounter(requests, unjudged, [Limit("a", threshold)])
    judge.count_buckets(histogram.bounds, histogram.counts)
    judge.count_buckets(histogram.bounds, histogram.counts, ["a"])
    exact = expected(found, a=threshold)

    assert requests["good", "a"] <= exact["a", "good"]
    assert requests["bad", "a"] <= exact["a", "bad"]
    assert sum((*requests.values(), *unjudged.values())) == len(found)
    assert threshold not in histogram.bounds or not unjudged


@given(st.data())
@settings(max_examples=60)
def test_the_counters_are_exact_over_folding_and_restarts(data: st.DataObject) -> None:
    """Observed, folded in the engine, gathered from many items, and carried from process to process."""
    slo = [
        Objective(f"at_{place}", (TTFT,), threshold) for place, threshold in enumerate(THRESHOLDS)
    ]
    native = data.draw(st.sampled_from([None, NativeSettings({}, lambda: 1.0)]))
    now = fed(slo, native=native)
    said = Settings(
        objectives=[messages.Objective(o.name, [*o.families], o.threshold) for o in slo],
        schemas=None if native is None else {},
    )
    everything: list[float] = []
    for _ in range(data.draw(st.integers(1, 6))):
        batches = data.draw(st.lists(st.lists(latencies, min_size=1, max_size=9), min_size=1))
        everything += [value for batch in batches for value in batch]
        match data.draw(st.sampled_from(["items", "folded", "one by one"])):
            case "items":
                now.items("s", [step(batch) for batch in batches])
            case "one by one":
                for batch in batches:
                    now.items("s", [step(batch)])
            case _:
                folder = ItemFolder()
                folder.settings = said
                assert all(folder.fold(step(batch), [VLLM]) for batch in batches)
                folded = folder.seal()
                now.aggregate("s", folded.items, folded.frames)
        if data.draw(st.booleans()):
            now = now.reborn(now.snapshot(), slo=slo)

    thresholds = {one.name: one.threshold for one in slo}
    assert counted(now.page) == expected(everything, **thresholds)
    assert counted(now.page, SLO_UNDECIDED) == {}


def test_a_sender_that_knows_no_objectives_is_judged_by_its_buckets() -> None:
    """An older one: the bucket from 0.25 to 0.5 cannot be told apart, and nothing is guessed."""
    now = fed(objectives("ttft=350ms", "mine=500ms,family=ttft"))
    folder = ItemFolder()
    assert folder.fold(step([0.1, 0.3, 0.4, 0.45, 0.6, 7.0]), [VLLM])
    folded = folder.seal()
    now.aggregate("s", folded.items, folded.frames)

    assert counted(now.page) == {
        ("ttft", "good"): 1, ("ttft", "bad"): 2, ("mine", "good"): 4, ("mine", "bad"): 2,
    }  # fmt: skip
    assert counted(now.page, SLO_UNDECIDED) == {("ttft",): 3}


def test_what_was_folded_and_judged_is_not_judged_again_in_parts() -> None:
    """Families that describe themselves go by themselves where all of them are too large for a frame."""
    family = Family("sglang:time_to_first_token_seconds", "histogram", ["is_streaming"])
    family.samples = [Sample(["true"], observations=[0.1, 0.3, 0.5])]
    bounds = [float(n) for n in range(250)]
    items = [tokenizer(family)]
    for number in range(10):
        children = [Sample([str(n)], counts=[1 << 35] * 251, total=1.0) for n in range(60)]
        items.append(tokenizer(Family(f"own_{number}", "histogram", ["k"], children, "", bounds)))
    told = messages.Objective("ttft", ["sglang:time_to_first_token_seconds"], 0.35)
    for known in ([told], []):
        folder, node = ItemFolder(), fed(objectives("ttft=350ms"), SGLANG)
        folder.settings = Settings(objectives=known)
        assert all(folder.fold(item, [SGLANG]) for item in items)
        folded = folder.seal()
        for records in folded.frames:
            node.aggregate("s", 1, [records])

        assert sum(map(len, folded.frames)) > 10
        assert counted(node.page) == {
            ("ttft", "good"): 2 if known else 1, ("ttft", "bad"): 1,
        }  # fmt: skip
        assert counted(node.page, SLO_UNDECIDED) == ({} if known else {("ttft",): 1})
        assert node.rejected == {}


def test_what_is_added_is_judged_whatever_else_is_refused() -> None:
    """One family of an old sender's record contradicts what is known: nothing of it counts, all else does."""
    node = fed(objectives("ttft=400ms"), SGLANG)
    family = Family("sglang:time_to_first_token_seconds", "histogram", ["is_streaming"])
    family.samples = [Sample(["true"], observations=[0.1, 0.3, 0.5])]
    own = Family("own", "gauge", ["a"], [Sample(["x"], 1.0)])
    node.items("s", [tokenizer(own)])
    for kinds in (["own"], ["own", "ttft"]):
        folder = ItemFolder()
        folder.fold(tokenizer(family), [SGLANG])
        folder.fold(tokenizer(Family("own", "gauge", ["b"], [Sample(["x"], 1.0)])), [SGLANG])
        folded = folder.seal()
        record = decode_record(folded.frames[0][0])
        if "ttft" in kinds:
            (first,) = (one for one in record.totals.open if one.name == family.name)
            first.labels = ["another"]
        node.aggregate("s", folded.items, [[msgspec.msgpack.encode(record)]])

        assert node.rejected == {("changed_family",): len(kinds)}
        assert counted(node.page) == {("ttft", "good"): 2, ("ttft", "bad"): 1}
    page = samples(node.page)
    assert [v for series, v in page.items() if series.startswith(f"{family.name}_count")] == [3]


def test_records_of_engines_without_latencies_may_say_anything_of_objectives() -> None:
    """They have no such family: what is not there is not read."""
    triton = EngineInfo("t", "triton", {"model": "m", "version": "1"})
    node = fed(objectives("ttft=350ms"), triton)
    for labels in ([], ["good", "ttft"]):
        head = Head(triton, {}, [], [], [], [SLO_REQUESTS])
        record = Record(head, Totals(keyed=[[Child(labels, 1)]]))
        node.aggregate("s", 1, [[msgspec.msgpack.encode(record)]])

        assert node.rejected == {}
        assert counted(node.page) == {}


def test_no_engine_names_objectives() -> None:
    """A Hello that knows labels beforehand knows none of these: there are the operator's alone."""
    engine = EngineInfo("e", "vllm", VLLM.labels, closed={"slo": ["mine", "ttft"]})

    assert "sidestep_slo" not in fed((), engine).page
    assert counted(fed(objectives("ttft=1s"), engine).page, SLO_UNDECIDED) == {}


def test_what_an_exporter_says_costs_an_engine_little() -> None:
    """However often it names a family, that one is held against each objective once."""
    told = [messages.Objective(f"o{n}", [TTFT] * 16, 0.35) for n in range(64)]
    folder = ItemFolder()
    folder.settings = Settings(objectives=told)
    assert folder.fold(step([0.1, 0.5]), [VLLM])
    record = decode_record(folder.seal().frames[0][0])

    children = record.totals.keyed[record.head.keyed.index(SLO_REQUESTS)]
    assert {child.value for child in children} == {1}
    assert len(children) == 2 * 64


def test_an_objective_counts_from_when_it_is_configured() -> None:
    """Under a new name from 0, under a new threshold from where it was: no counter ever falls."""
    first = fed(objectives("ttft=350ms"))
    first.items("s", [step([0.3, 0.4])])
    second = first.reborn(first.snapshot(), slo=objectives("ttft=100ms", "late=5s,family=ttft"))
    before = counted(second.page)
    second.items("s", [step([0.3, 0.05, 6.0])])
    third = second.reborn(second.snapshot(), slo=objectives("late=5s,family=ttft"))
    fourth = third.reborn(third.snapshot())

    assert before == {
        ("ttft", "good"): 1, ("ttft", "bad"): 1, ("late", "good"): 0, ("late", "bad"): 0,
    }  # fmt: skip
    assert counted(second.page) == {
        ("ttft", "good"): 2, ("ttft", "bad"): 3, ("late", "good"): 2, ("late", "bad"): 1,
    }  # fmt: skip
    assert counted(third.page) == {("late", "good"): 2, ("late", "bad"): 1}
    assert counted(fourth.page) == {}


ALL = objectives(
    "ttft=350ms", "inter_token=7ms", "e2e=3s", "queue=1ms", "time_per_output_token=9ms",
    "availability", "prefill=11ms,family=vllm:request_prefill_time_seconds",
)  # fmt: skip


def forms(node: Fed) -> dict[str, list[bytes]]:
    """The page in all forms: lines of text, else families."""
    registry = node.intake.registry
    choices = {
        "pod": Choice().of_pod,
        "thinned": Choice(thinning=3),
        "kept": Choice(kept={"vllm:*": (0.25, 0.5), "sglang:*": (0.4,)}),
        "dropped": Choice(dropped=frozenset({"engine", "tp_rank"})),
    }
    merged = {name: Merged(registry, choice).pieces() for name, choice in choices.items()}
    texts = {
        "text": render(registry),
        "openmetrics": render(registry, openmetrics=True),
        **{name: b"".join(map(b"".join, pieces)) for name, pieces in merged.items()},
    }
    return {
        **{name: text.splitlines() for name, text in texts.items()},
        "json": msgspec.json.decode(b"".join(json_format.pieces(registry)), type=list[msgspec.Raw]),
        "protobuf": [*map(b"".join, protobuf_page.pieces(registry))],
    }


def without(pieces: list[bytes]) -> list[bytes]:
    """Those that are not about objectives."""
    return [piece for one in pieces if b"sidestep_slo" not in (piece := bytes(one)) and piece]


@pytest.mark.parametrize("native", [None, NativeSettings({}, lambda: 1.0, both=True)])
def test_everything_else_is_the_same_to_the_byte(native: NativeSettings | None) -> None:
    """With objectives and without: text, OpenMetrics, JSON, protobuf, the pod view, thinned buckets."""
    with_them, bare = Fed(slo=ALL, native=native), Fed(native=native)
    for run in ("core", "core_aborts", "core_lora", "sglang", "sglang_dp"):
        for node in (with_them, bare):
            node.feed(steps(run))
    mine, theirs = forms(with_them), forms(bare)

    assert "sidestep_slo" not in str(theirs)
    for form, pieces in mine.items():
        assert b"sidestep_slo_requests_total" in b"".join(pieces), form
        assert without(pieces) == without(theirs[form]), form
    assert with_them.rejected == bare.rejected == {}


def test_nothing_is_kept_where_there_are_no_objectives() -> None:
    """Histograms are of the plain kinds, as they were."""
    bare, native = fed(()), fed((), native=NativeSettings({}, lambda: 1.0))
    (one,), (other,) = (node.intake.registry.engines.values() for node in (bare, native))

    assert {type(h) for h in one.histograms if h is not None} == {Histogram}
    assert {type(h) for h in other.histograms if h is not None} == {NativeHistogram}


def test_nothing_is_asked_of_items_where_there_are_no_objectives() -> None:
    """Not even whether there are any, for each family: what comes costs what it did."""
    node = fed((), VLLM)
    node.greet("t", [SGLANG])
    family = Family("sglang:time_to_first_token_seconds", "histogram", ["is_streaming"])
    family.samples = [Sample(["true"], observations=[0.1] * 30, counts=[1] * 25, total=1.0)]
    family.bounds = [float(n) for n in range(24)]
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add((Path(frame.f_code.co_filename).stem, frame.f_code.co_name))

    for number in range(2):
        # The first ones make what they are counted in.
        before = sys.getprofile()
        sys.setprofile(note if number else None)
        try:
            node.items("t", [tokenizer(family)])
            node.items("s", [step([0.1] * 30), encode_item(ended(0, 1))])
        finally:
            sys.setprofile(before)

    assert ("self_described", "add_samples") in called
    assert ("histogram", "observe_many") in called
    assert not [c for c in called if c[0] in {"slo_histogram", "slo", "availability"}]
    assert not [c for c in called if "judge" in c[1]]
    assert node.rejected == {}


@pytest.mark.parametrize("run", CORE_RUNS)
def test_real_runs_are_counted_as_their_buckets_say(run: str) -> None:
    """A threshold on a bound: what the bucket has is good, and the rest of the count is bad."""
    node = Fed(slo=objectives("ttft=5ms", "inter_token=10ms", "e2e=300ms", "queue=300ms"))
    node.feed(steps(run))
    found = samples(node.page)

    def total(name: str, le: str = "") -> float:
        return sum(
            value
            for series, value in found.items()
            if series.startswith(f"{name}{{") and (not le or f'le="{le}"' in series)
        )

    for slo, family, le in (
        ("ttft", TTFT, "0.005"),
        ("inter_token", "vllm:inter_token_latency_seconds", "0.01"),
        ("e2e", "vllm:e2e_request_latency_seconds", "0.3"),
        ("queue", "vllm:request_queue_time_seconds", "0.3"),
    ):
        told = counted(node.page)
        assert told[slo, "good"] == total(f"{family}_bucket", le)
        assert told[slo, "good"] + told[slo, "bad"] == total(f"{family}_count") > 0


def tokenizer(*families: Family) -> bytes:
    """What SGLang's front end tells."""
    return encode_item(Samples(0, 1.0, list(families)))


def test_one_name_goes_for_both_engines() -> None:
    """Of SGLang whatever its labels are; weights count; a family of its own stays its own."""
    node = Fed(slo=objectives("ttft=350ms", "inter_token=50ms", "availability"))
    node.greet("v", [VLLM])
    node.greet("g", [SGLANG])
    node.items("v", [step([0.3, 0.4])])
    first = Family("sglang:time_to_first_token_seconds", "histogram", ["is_streaming"])
    first.samples = [
        Sample(["true"], observations=[0.1, 0.5]),
        Sample(["false"], observations=[0.2]),
    ]
    gaps = Family("sglang:inter_token_latency_seconds", "histogram", [])
    gaps.samples = [Sample(observations=[0.02, 0.2], weights=[30, 2])]
    node.items("g", [tokenizer(first, gaps)])
    found = samples(node.page)

    sglang = 'engine_type="unified",model_name="m"'
    assert {series: n for series, n in found.items() if series.startswith(SLO_REQUESTS)} == {
        f'{SLO_REQUESTS}{{engine="0",model_name="m",result="good",slo="ttft"}}': 1,
        f'{SLO_REQUESTS}{{engine="0",model_name="m",result="bad",slo="ttft"}}': 1,
        f'{SLO_REQUESTS}{{engine="0",model_name="m",result="good",slo="inter_token"}}': 0,
        f'{SLO_REQUESTS}{{engine="0",model_name="m",result="bad",slo="inter_token"}}': 0,
        f'{SLO_REQUESTS}{{engine="0",model_name="m",result="good",slo="availability"}}': 0,
        f'{SLO_REQUESTS}{{engine="0",model_name="m",result="bad",slo="availability"}}': 0,
        f'{SLO_REQUESTS}{{{sglang},result="good",slo="ttft"}}': 2,
        f'{SLO_REQUESTS}{{{sglang},result="bad",slo="ttft"}}': 1,
        f'{SLO_REQUESTS}{{{sglang},result="good",slo="inter_token"}}': 30,
        f'{SLO_REQUESTS}{{{sglang},result="bad",slo="inter_token"}}': 2,
    }


def test_sglangs_counts_are_not_judged_again_by_another_process() -> None:
    """A snapshot has its buckets, and what was judged of them."""
    slo = objectives("ttft=350ms", "other=300ms,family=ttft")
    node = fed(slo, SGLANG)
    family = Family("sglang:time_to_first_token_seconds", "histogram", ["is_streaming"])
    family.samples = [Sample(["true"], observations=[0.1, 0.32, 0.5])]
    node.items("s", [tokenizer(family)])
    again = node.reborn(node.snapshot(), slo=slo)
    again.items("s", [tokenizer(family)])

    assert counted(node.page) == {
        ("ttft", "good"): 2, ("ttft", "bad"): 1, ("other", "good"): 1, ("other", "bad"): 2,
    }  # fmt: skip
    assert counted(again.page) == {key: 2 * count for key, count in counted(node.page).items()}
    assert counted(again.page, SLO_UNDECIDED) == {}


def test_what_comes_as_buckets_is_judged_by_them() -> None:
    """From an engine that only tells counts; an objective of a common name is judged as well."""
    node = fed(objectives("ttft=400ms", "other=300ms,family=ttft"), SGLANG)
    family = Family("sglang:time_to_first_token_seconds", "histogram", ["is_streaming"])
    family.bounds = [0.2, 0.4, 0.6]
    family.samples = [Sample(["true"], counts=[5, 4, 3, 2], total=4.0)]
    node.items("s", [tokenizer(family)])

    assert counted(node.page) == {
        ("ttft", "good"): 9, ("ttft", "bad"): 5, ("other", "good"): 5, ("other", "bad"): 5,
    }  # fmt: skip
    assert counted(node.page, SLO_UNDECIDED) == {("other",): 4}


def test_ranks_that_tell_the_same_count_once_in_the_pod_view() -> None:
    """Queue times of SGLang are told by each rank."""
    node = Fed(slo=objectives("queue=1s"))
    family = Family("sglang:queue_time_seconds", "histogram", [])
    family.samples = [Sample(observations=[0.5, 2.0, 3.0])]
    for rank in "01":
        labels = {**LABELS, **dict.fromkeys(RANKS, "0"), "tp_rank": rank}
        node.greet(rank, [EngineInfo(f"s/{rank}", "sglang", labels)])
        node.items(rank, [tokenizer(family)])
    pod = b"".join(b"".join(p) for p in Merged(node.intake.registry, Choice().of_pod).pieces())

    assert counted(node.page) == {("queue", "good"): 2, ("queue", "bad"): 4}
    assert counted(pod.decode()) == {("queue", "good"): 1, ("queue", "bad"): 2}


def ended(*reasons: int) -> Item:
    """Requests that ended so."""
    found = [FinishedRequestStats(finish_reason=reason) for reason in reasons]
    return VllmStep(0, 1.0, 1.0, None, IterationStats(0, finished_requests=found))


def test_availability_of_vllm() -> None:
    """Aborted, failed and turned away are bad; it is what the engine's counters say, also after a restart."""
    slo = objectives("availability")
    node = fed(slo)
    before = counted(node.page)
    node.items("s", [encode_item(ended(0, 1, 2, 3, 4, 0))])
    (engine,) = node.intake.registry.engines.values()
    node.intake.registry.add(
        engine, engine.layout.find("vllm:admission_rejections_total"), "max_num_queued_reqs", 3
    )
    folder = ItemFolder()
    assert folder.fold(encode_item(ended(0, 2)), [VLLM])
    folded = folder.seal()
    node.aggregate("s", folded.items, folded.frames)
    again = node.reborn(node.snapshot(), slo=slo)

    assert before == {("availability", "good"): 0, ("availability", "bad"): 0}
    assert counted(again.page) == counted(node.page) == {
        ("availability", "good"): 5, ("availability", "bad"): 6,
    }  # fmt: skip


def told(name: str, count: float) -> Family:
    """A counter of SGLang's front end grew."""
    labels = ["is_streaming"] if name == "num_requests" else []
    return Family(
        f"sglang:{name}_total", "counter", labels, [Sample(["true"][: len(labels)], count)]
    )


def test_availability_of_sglang_never_falls() -> None:
    """It counts an abort before the request has ended, and then that as well."""
    node = fed(objectives("availability"), SGLANG)
    seen = [counted(node.page)]
    for family in (
        told("num_requests", 5),
        told("num_aborted_requests", 2),
        told("num_requests", 3),
    ):
        node.items("s", [tokenizer(family)])
        seen.append(counted(node.page))

    assert seen[0] == {}
    assert [one["availability", "good"] for one in seen[1:]] == [5, 5, 6]
    assert [one["availability", "bad"] for one in seen[1:]] == [0, 2, 2]


def test_whoever_counts_judges() -> None:
    """Another exporter shows what it is told of, by the name and threshold there; its own are for its own."""
    slo = objectives("ttft=350ms", "availability")
    leaf, bare = Node("leaf", slo=slo), Node("bare")
    root = Node("root", slo=objectives("ttft=1s", "e2e=1s"))
    for node in (leaf, bare, root):
        name = node.name
        node.greet("s", [EngineInfo(name, "vllm", {"engine": name, "model_name": "m"})])
        node.items("s", [step([0.1, 0.5, 5.0]), encode_item(ended(0, 3))])
    for node in (leaf, bare):
        node.tell(root)

    found = {
        series: value
        for series, value in samples(root.page).items()
        if series.startswith(SLO_REQUESTS)
    }
    at_root = {series: value for series, value in found.items() if 'engine="root"' in series}
    assert {s: v for s, v in found.items() if s not in at_root} == {
        series: value
        for series, value in samples(leaf.page).items()
        if series.startswith(SLO_REQUESTS)
    }
    assert counted("\n".join(f"{s} {v}" for s, v in at_root.items())) == {
        ("ttft", "good"): 2, ("ttft", "bad"): 1, ("e2e", "good"): 0, ("e2e", "bad"): 0,
    }  # fmt: skip


def test_a_new_life_of_a_leaf_adds_to_the_last() -> None:
    """Without a snapshot it begins at 0; at the root nothing falls."""
    root = Node("root")
    for boot, found in ((1, [0.1, 0.5]), (2, [0.2])):
        leaf = Node("leaf", boot, slo=objectives("ttft=350ms"))
        leaf.greet("s", [VLLM])
        leaf.items("s", [step(found)])
        leaf.tell(root)

    assert counted(root.page) == {("ttft", "good"): 2, ("ttft", "bad"): 1}


def test_a_record_cannot_bring_objectives_of_its_own() -> None:
    """What a sender claims under other names, or of another result, has no series."""
    sender, node = ItemFolder(), fed(objectives("ttft=350ms", "late=9s,family=ttft"))
    sender.settings = Settings(
        objectives=[messages.Objective(name, [TTFT], 9.0) for name in ("ttft", "mine", "late")]
    )
    assert sender.fold(step([0.1, 9.5]), [VLLM])
    folded = sender.seal()
    record = decode_record(folded.frames[0][0])
    for child in record.totals.keyed[record.head.keyed.index(SLO_REQUESTS)]:
        if child.labels == ["bad", "late"]:
            child.labels[0] = "ugly"
    node.aggregate("s", folded.items, [[msgspec.msgpack.encode(record)]])

    assert counted(node.page) == {
        ("ttft", "good"): 1, ("ttft", "bad"): 1, ("late", "good"): 1, ("late", "bad"): 0,
    }  # fmt: skip
    assert node.rejected == {}


@pytest.mark.parametrize("run", CORE_RUNS)
def test_a_run_with_objectives_goes_on_in_another_process(run: str) -> None:
    """Cut in three places, requests in flight and all, its counters are the very same."""
    recorded: list[Step] = list(steps(run))
    whole = Fed(slo=ALL)
    whole.feed(recorded)
    cut = Fed(slo=ALL)
    for start, end in pairwise([0, *(len(recorded) * n // 4 for n in (1, 2, 3)), len(recorded)]):
        cut.feed(recorded[start:end])
        cut = cut.reborn(cut.snapshot(), slo=ALL)

    assert counted(whole.page) == counted(cut.page)
    assert sum(counted(cut.page).values()) > 0
