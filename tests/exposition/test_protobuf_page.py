"""The protobuf page, read by the official classes, against the text page and the series."""

from __future__ import annotations

import aiohttp
import msgspec
import pytest

from exporters import MAIN_RUN, Start
from intakes import CORE_RUNS, Fed, steps
from metric_families import buckets_of, families, labels_of, parsed
from pages import parse
from rendered import render_protobuf as render
from replays import replay
from sidestep.app.exporter import Exporter
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.exposition.negotiation import CONTENT_TYPES
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.metrics.totals_codec import decode_totals
from sidestep.protocol.engine_totals import NativeBuckets
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo, Settings
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.snapshot.capture import restore

PROTOBUF = CONTENT_TYPES["protobuf"].replace(" ", "")
BOTH = NativeSettings({}, lambda: 1000.25, both=True)
NATIVE = NativeSettings({}, lambda: 1000.25)


def page(fed: Fed) -> bytes:
    """Return the engines' families."""
    return render(fed.intake.registry)


def bounds_as_numbers(page: str) -> dict[tuple[str, object], float]:
    """Return the samples of a text page, with ``le`` as Python writes it."""
    found: dict[tuple[str, object], float] = {}
    for family in parse(page).values():
        for (name, labels), value in family.samples.items():
            shown = tuple(
                (n, repr(float(v)) if n == "le" and v != "+Inf" else v) for n, v in labels
            )
            found[name, shown] = value
    return found


def samples(page: bytes) -> dict[tuple[str, object], float]:
    """Return the samples of a protobuf page."""
    return {key: value for family in parsed(page).values() for key, value in family.samples.items()}


@pytest.mark.parametrize("run", [*CORE_RUNS])
def test_the_page_has_the_samples_of_the_text_page(run: str) -> None:
    """Every family, its help and type, and every sample, with both kinds of buckets."""
    fed = Fed(native=BOTH)
    fed.feed(steps(run))
    found = list(families(page(fed)))

    assert samples(page(fed)) == bounds_as_numbers(fed.page)
    helps = [f"# HELP {family.name} {family.help}" for family in found]
    assert helps == [line for line in fed.page.splitlines() if line.startswith("# HELP")]
    kinds = {name: family.kind for name, family in parse(fed.page).items()}
    assert {name: family.kind for name, family in parsed(page(fed)).items()} == kinds


def test_native_buckets_are_those_of_the_series() -> None:
    """Every histogram has its native buckets, even without observations; classic buckets are left out."""
    fed = Fed(native=NATIVE)
    fed.feed(steps("core"))
    (engine,) = fed.intake.registry.engines.values()
    slots = dict(zip(engine.layout.histogram_names, engine.histograms, strict=True))
    seen = 0
    for family in families(page(fed)):
        for metric in family.metric:
            if family.type != 4:
                continue
            reported = metric.histogram
            assert not reported.bucket
            assert reported.positive_span
            assert reported.zero_threshold == 2.0**-128
            counts = buckets_of(reported)
            assert sum(counts.values()) + reported.zero_count == reported.sample_count
            assert (reported.created_timestamp.seconds, reported.created_timestamp.nanos) == (
                1000,
                250000000,
            )
            kept = slots.get(family.name)
            if isinstance(kept, NativeHistogram):
                assert counts == kept.buckets
                assert reported.schema == kept.schema
                assert (reported.sample_count, reported.sample_sum) == (sum(kept.counts), kept.sum)
                seen += reported.sample_count > 0

    assert seen > 10


@pytest.mark.parametrize("run", ["core", "sglang"])
def test_a_snapshot_restores_native_buckets(run: str) -> None:
    """The page and the next snapshot equal those of an exporter that kept running."""
    recorded = list(steps(run))
    whole, cut = Fed(native=BOTH), Fed(native=BOTH)
    whole.feed(recorded)
    cut.feed(recorded[: len(recorded) // 2])
    cut = cut.restarted(cut.snapshot())
    cut.feed(recorded[len(recorded) // 2 :])

    assert len(page(whole)) > 10_000
    assert without_kv(page(cut)) == without_kv(page(whole))
    again = Fed(boot=2, native=BOTH)
    restore(again.intake, cut.snapshot(), 0.0)
    # But for the process, which is another one.
    assert again.snapshot()[:-1] == cut.snapshot()[:-1]


def without_kv(page: bytes) -> dict[str, bytes]:
    """Return the families by name, without block lifetimes and recent rates, which restart."""
    return {
        family.name: family.SerializeToString()
        for family in families(page)
        if not family.name.startswith(("vllm:kv_block", "sidestep_kv", "sidestep_recent"))
    }


@pytest.mark.parametrize("run", ["core", "core_lora"])
def test_folded_items_have_native_buckets(run: str) -> None:
    """They equal those of the items."""
    whole, folded = Fed(native=NATIVE), Fed(native=NATIVE)
    whole.feed(steps(run))
    folders: dict[str, ItemFolder] = {}
    for stream, engines, item in steps(run):
        if item is None:
            folded.send_hello(stream, engines)
            continue
        folder = folders.setdefault(stream, ItemFolder())
        folder.settings = Settings(schemas={})
        assert folder.fold(item, engines)
    for stream, folder in folders.items():
        done = folder.seal()
        folded.aggregate(stream, done.items, done.frames)

    def native(fed: Fed) -> dict[object, object]:
        # Of questions that several engines' samples answer, each stream folds its own.
        return {
            (family.name, labels_of(metric)): (
                metric.histogram.schema, metric.histogram.zero_count, buckets_of(metric.histogram),
            )
            for family in families(page(fed))
            for metric in family.metric
            if family.type == 4
            and not family.name.endswith(("request_params_n", "max_num_generation_tokens"))
        }  # fmt: skip

    assert folded.rejected == {}
    assert native(folded) == native(whole)
    reported = families(page(folded))
    assert {
        m.histogram.created_timestamp.seconds for f in reported for m in f.metric if f.type == 4
    } == {1000}


def test_native_buckets_that_do_not_fit_are_refused() -> None:
    """In records and self-described families; nothing of the record is counted."""
    fed = Fed(native=NATIVE)
    engine = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})
    fed.send_hello("s", [engine])
    folder = ItemFolder()
    folder.settings = Settings(schemas={})
    observed = Sample([], observations=[0.1, 0.2])
    family = Family("mine_seconds", "histogram", [], [observed], "Mine.", [1.0])
    folder.fold(encode_item(Samples(0, 1.0, [family])), [engine])
    folder.fold(encode_item(VllmStep(0, 1.0, 1.0, iteration=IterationStats())), [engine])
    ((raw,),) = folder.seal().frames
    good = [decode_totals(raw) for _ in range(2)]
    first = next(b for b in good[0].totals.histograms if b is not None)
    (child,) = good[1].totals.open[0].children
    for buckets in (first, child.buckets):
        assert buckets is not None
        assert buckets.native is not None
        buckets.native.zeros = 7
    before = page(fed)
    fed.aggregate("s", 1, [[msgspec.msgpack.encode(good[0])]])
    assert (fed.rejected, page(fed)) == ({("bad_item",): 1.0}, before)

    fed.aggregate("s", 1, [[msgspec.msgpack.encode(good[1])]])
    assert fed.rejected == {("bad_item",): 2.0}
    assert "mine_seconds" not in fed.page
    sample = Sample([], counts=[1, 1], total=1.0, native=NativeBuckets(3, 0, [1], [1]))
    lie = Family("mine_seconds", "histogram", [], [sample], "Mine.", [1.0])
    fed.items("s", [encode_item(Samples(0, 1.0, [lie]))])
    assert fed.rejected == {("bad_item",): 3.0}
    fed.aggregate("s", 1, [[raw]])
    assert "mine_seconds_count" in fed.page


async def fetched(exporter: Exporter, accept: str, path: str = "") -> tuple[str, bytes]:
    """Return content type and body."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(exporter.url + path, headers={"Accept": accept}) as answer,
    ):
        return answer.headers["Content-Type"], await answer.read()


@pytest.mark.parametrize("histograms", ["native", "both"])
async def test_the_whole_page_over_http(start: Start, histograms: str) -> None:
    """With the exporter's own families; ``name[]`` selects families."""
    async with start(histograms=histograms) as exporter:
        await replay(exporter, MAIN_RUN)
        text = parse((await fetched(exporter, "text/plain"))[1].decode())
        kind, body = await fetched(exporter, PROTOBUF)
        found = {family.name: family for family in families(body)}
        _, some = await fetched(
            exporter, PROTOBUF, "?name[]=sidestep_items_total&name[]=vllm:request_success_total"
        )

    names = {name.removesuffix("_total") if f.type == 0 else name for name, f in found.items()}
    assert kind == CONTENT_TYPES["protobuf"]
    # How long the first page took is on the next.
    assert names - {"sidestep_scrape_duration_seconds"} == set(text)
    assert {f.name for f in families(some)} == {
        "vllm:request_success_total",
        "sidestep_items_total",
    }
    latency = found["vllm:e2e_request_latency_seconds"].metric[0].histogram
    assert latency.sample_count == sum(buckets_of(latency).values()) == 66
    assert bool(latency.bucket) == (histograms == "both")
    buckets = text["vllm:e2e_request_latency_seconds"].samples
    assert len([name for name, _ in buckets if name.endswith("_bucket")]) > 20


async def test_classic_histograms_have_no_protobuf_page(start: Start) -> None:
    """By default, the client gets its second choice."""
    async with start() as exporter:
        kind, _ = await fetched(exporter, f"{PROTOBUF},application/openmetrics-text;q=0.5")

    assert kind == CONTENT_TYPES["openmetrics"]


@pytest.mark.parametrize(
    ("options", "path"),
    [({}, "/pod"), ({"metrics_drop_label": ("engine",)}, ""), ({"metrics_bucket_thinning": 2}, "")],
)
async def test_merged_and_thinned_pages_are_text_only(
    start: Start, options: dict[str, object], path: str
) -> None:
    """A client that prefers protobuf gets text."""
    async with start(histograms="native", **options) as exporter:
        await replay(exporter, MAIN_RUN)
        kind, body = await fetched(exporter, f"{PROTOBUF},text/plain;q=0.5", path)

    assert kind == CONTENT_TYPES["text"]
    assert parse(body.decode())["vllm:e2e_request_latency_seconds"].samples
