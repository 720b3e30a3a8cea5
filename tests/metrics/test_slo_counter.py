"""Counters of objectives, compared with plain counts, for every way in which observations arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intakes import CORE_RUNS, Fed, samples, steps
from sidestep.catalog.slo import SLO_REQUESTS, SLO_UNDECIDED, Limit, Objective
from sidestep.config.objectives import parse
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import Item, encode_item
from sidestep.engines.slo import resolve
from sidestep.engines.vllm.wire import VllmStep
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.metrics.slo_counter import SloCounter
from sidestep.metrics.totals_codec import decode_totals
from sidestep.protocol import messages
from sidestep.protocol.iteration_stats import FinishedRequestStats, IterationStats
from sidestep.protocol.messages import EngineInfo, Settings
from sidestep.protocol.self_described import Family, Sample, Samples

VLLM = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})
LABELS = {"engine_type": "unified", "model_name": "m"}
SGLANG = EngineInfo("t", "sglang", LABELS)
TTFT = "vllm:time_to_first_token_seconds"
# On a bound, between two, under the lowest, over the highest.
THRESHOLDS = (0.25, 0.35, 0.0005, 5000.0)
latencies = st.one_of(
    st.floats(0.0, 6000.0), st.sampled_from([0.25, 0.35, 0.0, 0.0005, 5000.0, 1e300, -1.0])
)


def objectives(*texts: str) -> Sequence[Objective]:
    """Return objectives in the notation of ``--slo``."""
    return resolve(map(parse, texts), DIALECTS, common=False)


def step(values: Sequence[float]) -> bytes:
    """Return a step with these times to first token."""
    return encode_item(
        VllmStep(0, 1.0, 1.0, None, IterationStats(0, time_to_first_tokens_iter=[*values]))
    )


def fed(slo: Iterable[Objective], engine: EngineInfo = VLLM, **options: object) -> Fed:
    """Return an exporter with one engine."""
    found = Fed(slo=slo, **options)  # type: ignore[arg-type]
    found.send_hello("s", [engine])
    return found


def counted(page: str, name: str = SLO_REQUESTS) -> dict[tuple[str, ...], float]:
    """Return the family's values on ``page`` by objective and result, summed over engines."""
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
    """Return the plain counts of valid latencies by objective and result."""
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
def test_every_way_to_observe_counts_once(
    native: bool,
    batches: list[list[float]],
    weighted: list[tuple[float, int]],
    run: tuple[float, int],
) -> None:
    """The histogram itself is the same as without objectives."""
    bounds = (0.001, 0.25, 0.5, 2560.0)
    plain = NativeHistogram(bounds) if native else Histogram(bounds)
    requests: dict[tuple[str, ...], int | float] = {}
    limits = [Limit(f"at_{place}", threshold) for place, threshold in enumerate(THRESHOLDS)]
    found = plain.copy()
    found.slo_counter = SloCounter(requests, {}, limits)
    for histogram in (plain, found):
        for batch in batches:
            histogram.observe_many([*batch])
        histogram.observe_weighted([*weighted])
        histogram.observe_run(*run)
        histogram.observe(0.3)
    everything = [value for batch in batches for value in batch]
    for value, count in [*weighted, run, (0.3, 1)]:
        everything += [value] * count
    thresholds = dict(limits)

    assert found.to_wire() == plain.to_wire()
    assert isinstance(found, NativeHistogram) == native
    counts = {(name, result): count for (result, name), count in requests.items()}
    assert counts == expected(everything, **thresholds)


@given(st.data())
def test_counters_are_exact_over_folding_and_restarts(data: st.DataObject) -> None:
    """Observations arrive directly, folded or buffered, and processes restart."""
    slo = [
        Objective(f"at_{place}", (TTFT,), threshold) for place, threshold in enumerate(THRESHOLDS)
    ]
    native = data.draw(st.sampled_from([None, NativeSettings({}, lambda: 1.0)]))
    now = fed(slo, native=native)
    known = Settings(
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
                folder.settings = known
                assert all(folder.fold(step(batch), [VLLM]) for batch in batches)
                folded = folder.seal()
                now.aggregate("s", folded.items, folded.frames)
        if data.draw(st.booleans()):
            now = now.restarted(now.snapshot(), slo=slo)

    thresholds = {one.name: one.threshold for one in slo}
    assert counted(now.page) == expected(everything, **thresholds)
    assert counted(now.page, SLO_UNDECIDED) == {}


def test_folded_record_without_objectives_is_counted_by_its_buckets() -> None:
    """An older sender sends none; the bucket with the threshold is undecided."""
    now = fed(objectives("ttft=350ms", "mine=500ms,family=ttft"))
    folder = ItemFolder()
    assert folder.fold(step([0.1, 0.3, 0.4, 0.45, 0.6, 7.0]), [VLLM])
    folded = folder.seal()
    now.aggregate("s", folded.items, folded.frames)

    assert counted(now.page) == {
        ("ttft", "good"): 1, ("ttft", "bad"): 2, ("mine", "good"): 4, ("mine", "bad"): 2,
    }  # fmt: skip
    assert counted(now.page, SLO_UNDECIDED) == {("ttft",): 3}


def test_objective_counts_from_its_configuration_on() -> None:
    """A new name starts at 0, a new threshold continues, and no counter decreases."""
    first = fed(objectives("ttft=350ms"))
    first.items("s", [step([0.3, 0.4])])
    second = first.restarted(first.snapshot(), slo=objectives("ttft=100ms", "late=5s,family=ttft"))
    before = counted(second.page)
    second.items("s", [step([0.3, 0.05, 6.0])])
    third = second.restarted(second.snapshot(), slo=objectives("late=5s,family=ttft"))
    fourth = third.restarted(third.snapshot())

    assert before == {
        ("ttft", "good"): 1, ("ttft", "bad"): 1, ("late", "good"): 0, ("late", "bad"): 0,
    }  # fmt: skip
    assert counted(second.page) == {
        ("ttft", "good"): 2, ("ttft", "bad"): 3, ("late", "good"): 2, ("late", "bad"): 1,
    }  # fmt: skip
    assert counted(third.page) == {("late", "good"): 2, ("late", "bad"): 1}
    assert counted(fourth.page) == {}


@pytest.mark.parametrize("run", CORE_RUNS)
def test_recorded_runs_count_as_their_buckets(run: str) -> None:
    """The threshold is a bound, so that both counts are exact."""
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
        counts = counted(node.page)
        assert counts[slo, "good"] == total(f"{family}_bucket", le)
        assert counts[slo, "good"] + counts[slo, "bad"] == total(f"{family}_count") > 0


def tokenizer(*families: Family) -> bytes:
    """Return an item of SGLang's front end."""
    return encode_item(Samples(0, 1.0, list(families)))


def test_one_objective_counts_both_engines() -> None:
    """An objective counts all label values and weights of SGLang, and no families of its extensions."""
    node = Fed(slo=objectives("ttft=350ms", "inter_token=50ms", "availability"))
    node.send_hello("v", [VLLM])
    node.send_hello("g", [SGLANG])
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


def test_bucket_counts_of_an_engine_are_counted() -> None:
    """Objectives of common names are counted as well."""
    node = fed(objectives("ttft=400ms", "other=300ms,family=ttft"), SGLANG)
    family = Family("sglang:time_to_first_token_seconds", "histogram", ["is_streaming"])
    family.bounds = [0.2, 0.4, 0.6]
    family.samples = [Sample(["true"], counts=[5, 4, 3, 2], total=4.0)]
    node.items("s", [tokenizer(family)])

    assert counted(node.page) == {
        ("ttft", "good"): 9, ("ttft", "bad"): 5, ("other", "good"): 5, ("other", "bad"): 5,
    }  # fmt: skip
    assert counted(node.page, SLO_UNDECIDED) == {("other",): 4}


def ended(*reasons: int) -> Item:
    """Return a step with requests that ended for these reasons."""
    found = [FinishedRequestStats(finish_reason=reason) for reason in reasons]
    return VllmStep(0, 1.0, 1.0, None, IterationStats(0, finished_requests=found))


def test_availability_of_vllm() -> None:
    """Aborted, failed and rejected requests are bad, also after a restart."""
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
    again = node.restarted(node.snapshot(), slo=slo)

    assert before == {("availability", "good"): 0, ("availability", "bad"): 0}
    assert counted(again.page) == counted(node.page) == {
        ("availability", "good"): 5, ("availability", "bad"): 6,
    }  # fmt: skip


def counter(name: str, count: float) -> Family:
    """Return a family that increases a counter of SGLang."""
    labels = ["is_streaming"] if name == "num_requests" else []
    return Family(
        f"sglang:{name}_total", "counter", labels, [Sample(["true"][: len(labels)], count)]
    )


def test_availability_of_sglang_never_decreases() -> None:
    """SGLang counts an abort before the request ends."""
    node = fed(objectives("availability"), SGLANG)
    seen = [counted(node.page)]
    for family in (
        counter("num_requests", 5),
        counter("num_aborted_requests", 2),
        counter("num_requests", 3),
    ):
        node.items("s", [tokenizer(family)])
        seen.append(counted(node.page))

    assert seen[0] == {}
    assert [one["availability", "good"] for one in seen[1:]] == [5, 5, 6]
    assert [one["availability", "bad"] for one in seen[1:]] == [0, 2, 2]


def test_record_cannot_add_objectives() -> None:
    """Unknown names and results are ignored."""
    sender, node = ItemFolder(), fed(objectives("ttft=350ms", "late=9s,family=ttft"))
    sender.settings = Settings(
        objectives=[messages.Objective(name, [TTFT], 9.0) for name in ("ttft", "mine", "late")]
    )
    assert sender.fold(step([0.1, 9.5]), [VLLM])
    folded = sender.seal()
    record = decode_totals(folded.frames[0][0])
    for child in record.totals.keyed[record.head.keyed.index(SLO_REQUESTS)]:
        if child.labels == ["bad", "late"]:
            child.labels[0] = "ugly"
    node.aggregate("s", folded.items, [[msgspec.msgpack.encode(record)]])

    assert counted(node.page) == {
        ("ttft", "good"): 1, ("ttft", "bad"): 1, ("late", "good"): 1, ("late", "bad"): 0,
    }  # fmt: skip
    assert node.rejected == {}
