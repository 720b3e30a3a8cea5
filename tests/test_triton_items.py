"""Looks at Triton's statistics into series: told by items alone, over every way to begin anew."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tools import docs

from intakes import Fed
from pages import Family, parse
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import VllmSleep, decode_item, encode_item
from sidestep.engines.triton.fields import LEFT_OUT, READS
from sidestep.engines.triton.rows import CACHE, EXECUTES, FAILURES
from sidestep.engines.triton.statistics import EMPTY, CountersResetError, difference
from sidestep.engines.triton.wire import (
    Batch,
    InferenceStats,
    Memory,
    ModelStats,
    Responses,
    Timed,
    TritonStats,
)
from sidestep.errors import WireError
from sidestep.exposition.text_page import render
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Samples

LABELS = {"model": "m", "version": "1"}
MODEL = EngineInfo("t/m/1", "triton", LABELS, features=[FAILURES, EXECUTES])
SERVER = EngineInfo("t", "triton", {})
BIG = 2**64 - 1


def stats(n: int = 1, **fields: Any) -> ModelStats:
    """So many requests, each an execution of batch size 1 that took a microsecond."""
    timed = Timed(n, n * 1000)
    given: dict[str, Any] = {
        "last_inference": 1_000_000 * bool(n),
        "inference_count": n,
        "execution_count": n,
        "inference_stats": InferenceStats(timed, Timed(), timed, timed, timed, timed),
        "batch_stats": (Batch(1, n, 100 * n, 800 * n, 100 * n),) if n else (),
    }
    return ModelStats(**{**given, **fields})


def has_begun_anew(new: ModelStats, old: ModelStats) -> bool:
    """Whether ``new`` is no continuation of ``old``."""
    try:
        difference(new, old)
    except CountersResetError:
        return True
    return False


class Server:
    """A feed into an intake, and its page."""

    def __init__(self) -> None:
        self.fed = Fed()
        self.feed = ServerFeed(self.fed.intake, "triton t")
        self.feed.heard(0.0)
        self.stamp = 10.0
        self.parsed: tuple[str, dict[str, Family]] = "", {}

    def look(
        self, found: ModelStats | None, *, info: EngineInfo = MODEL, wait: float = 1.0, **more: Any
    ) -> None:
        """One second later, as another process would tell of it."""
        self.stamp += wait
        item = TritonStats(0, self.stamp, 1e6 + self.stamp, found, **more)
        self.feed.tell(info, decode_item(encode_item(item)))

    def restart(self) -> None:
        """The exporter, from its snapshot."""
        self.fed = self.fed.reborn(self.fed.snapshot())
        self.feed = ServerFeed(self.fed.intake, "triton t")
        self.feed.heard(0.0)
        while self.fed.intake.busy:
            self.fed.intake.work()

    @property
    def page(self) -> str:
        """As Prometheus gets it."""
        return render(self.fed.intake.registry).decode()

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Of one family, by the values of labels that are not the model's; no buckets."""
        base = name.removesuffix("_total")
        page = self.page
        if page != self.parsed[0]:
            self.parsed = page, parse(page)
        family = self.parsed[1].get(base)
        found: dict[tuple[str, ...], float] = {}
        for (sample, labels), number in (family.samples if family else {}).items():
            end = sample.removeprefix(base)
            key = [value for label, value in labels if label not in LABELS]
            if end != "_bucket":
                found[(*([end] if end in ("_count", "_sum") else []), *key)] = number
        return found

    def value(self, name: str) -> float | None:
        """Of a family with one sample, if there is any."""
        return self.samples(name).get(())


def test_the_first_look_is_all_since_the_model_was_loaded() -> None:
    """As on Triton's own page, whenever the exporter comes."""
    server = Server()
    server.look(stats(7))

    assert server.value("nv_inference_request_success") == 7
    assert server.value("nv_inference_request_failure") == 0
    assert server.value("nv_inference_request_duration_us") == 7.0
    assert server.value("sidestep_triton_resets_total") == 0
    assert "nv_cache" not in server.page
    assert "sidestep_triton_responses" not in server.page


def test_nanoseconds_are_kept() -> None:
    """Triton itself cuts each observation to a microsecond."""
    server = Server()
    server.look(stats(3, inference_stats=InferenceStats(Timed(3, 1_234_567), fail=Timed(1, 1))))
    server.look(stats(4, inference_stats=InferenceStats(Timed(4, 1_234_568), fail=Timed(1, 1))))

    assert server.value("nv_inference_request_duration_us") == 1234.568
    assert server.value("sidestep_triton_failed_request_seconds_total") == 1e-9


def test_64_bits_are_exact() -> None:
    """The nanoseconds of a busy model pass what a float holds, and with restarts any word."""
    server = Server()
    for _ in range(3):
        server.look(stats(1, inference_count=BIG, inference_stats=InferenceStats(Timed(BIG, BIG))))
        server.look(stats(0))
    server.restart()
    server.look(stats(1))

    assert f'nv_inference_count{{model="m",version="1"}} {3 * BIG + 1}\n' in server.page
    assert server.value("nv_inference_request_duration_us") == (3 * BIG + 1000) / 1000


@pytest.mark.parametrize(
    "less",
    [
        stats(9, inference_count=8),
        stats(9, execution_count=8),
        stats(9, batch_stats=()),
        stats(9, batch_stats=(Batch(2, 9),)),
        stats(9, batch_stats=(Batch(1, 8, 900, 7200, 900),)),
        stats(9, batch_stats=(Batch(1, 9, 900, 7199, 900),)),
        stats(9, inference_stats=InferenceStats(Timed(9, 8999))),
        stats(9, inference_stats=msgspec.structs.replace(stats(9).inference_stats, fail=Timed(2))),
        stats(9, last_inference=999_999),
        stats(9, last_inference=0),
        stats(9, response_stats=Responses(next=Timed(4, 1))),
    ],
)
def test_whatever_is_lower_begins_anew(less: ModelStats) -> None:
    """Any one field is enough; then all of the new numbers are new."""
    before = stats(
        9,
        inference_stats=msgspec.structs.replace(stats(9).inference_stats, fail=Timed(3)),
        response_stats=Responses(next=Timed(5, 1)),
    )
    if less.response_stats is None:
        before = msgspec.structs.replace(before, response_stats=None)
    if less.inference_stats.fail.count == 0:
        before = msgspec.structs.replace(before, inference_stats=stats(9).inference_stats)

    assert has_begun_anew(less, before)
    assert not has_begun_anew(before, before)
    server = Server()
    server.look(before)
    server.look(less)
    assert server.value("nv_inference_request_success") == 9 + less.inference_stats.success.count
    assert server.value("sidestep_triton_resets_total") == 1


def test_a_clock_set_back_is_no_reset() -> None:
    """The last inference is told by the server's clock, and requests went on."""
    server = Server()
    server.look(stats(5))
    server.look(stats(6, last_inference=900_000))

    assert server.value("nv_inference_request_success") == 6
    assert server.value("sidestep_triton_resets_total") == 0


def test_a_version_that_is_gone_is_not_shown_and_comes_back() -> None:
    """Unloaded and loaded again: its totals go on, its statistics begin from 0."""
    server = Server()
    server.look(stats(5))
    server.look(None)
    server.feed.leave(MODEL.id)
    assert "nv_" not in server.page
    server.fed.pass_time(400.0)
    server.restart()
    assert "nv_" not in server.page
    server.look(stats(9))

    assert server.value("nv_inference_request_success") == 14
    assert server.value("sidestep_triton_resets_total") == 1


def test_an_older_look_is_left_out() -> None:
    """Two pollers of one server: what one saw before the other must not look like a restart."""
    server = Server()
    server.look(stats(5))
    server.look(stats(3), wait=-0.5)

    assert server.value("nv_inference_request_success") == 5


def test_batch_sizes_are_exact() -> None:
    """Each size counts in its bucket; the sum is of sizes, failed executions among them."""
    server = Server()
    found = (Batch(1, 11), Batch(2, 25), Batch(3, 1), Batch(8, 1, 1, 2, 3), Batch(1000, 1))
    server.look(stats(1, batch_stats=found))

    assert server.samples("sidestep_triton_batch_size") == {("_count",): 39, ("_sum",): 1072}
    for bound, count in (("1.0", 11), ("2.0", 36), ("3.0", 37), ("512.0", 38), ("+Inf", 39)):
        line = f'sidestep_triton_batch_size_bucket{{model="m",version="1",le="{bound}"}} {count}\n'
        assert line in server.page
    executions = server.samples("sidestep_triton_batch_executions")
    assert executions == {("1",): 11, ("2",): 25, ("3",): 1, ("8",): 1, ("1000",): 1}
    assert server.samples("sidestep_triton_batch_seconds")["8",] == 6e-9
    assert server.value("sidestep_triton_busy_seconds_total") == 6e-9


def test_many_batch_sizes_share_a_label() -> None:
    """No execution is left out."""
    server = Server()
    server.look(stats(1, batch_stats=tuple(Batch(size, 1) for size in range(1, 201))))
    executions = server.samples("sidestep_triton_batch_executions")

    assert len(executions) == MAX_OPEN_VALUES + 1
    assert sum(executions.values()) == 200
    assert executions[OTHER,] == 200 - MAX_OPEN_VALUES


def test_an_ensemble_is_not_busy() -> None:
    """Its executions are its members'."""
    server = Server()
    server.look(stats(1), info=EngineInfo("t/m/1", "triton", LABELS))

    assert server.value("sidestep_triton_busy_seconds_total") is None
    assert server.value("nv_inference_request_failure") is None
    assert server.value("sidestep_triton_failed_requests_total") == 0


def test_a_cache_is_shown_where_there_is_one() -> None:
    """At 0 where the configuration has one, otherwise with its first use."""
    server = Server()
    server.look(stats(1), info=EngineInfo("t/m/1", "triton", LABELS, features=[CACHE]))
    assert server.value("nv_cache_num_hits_per_model") == 0
    cached = InferenceStats(Timed(3), cache_hit=Timed(2, 1500), cache_miss=Timed(1, 10))
    server.look(stats(1, inference_stats=cached))

    assert server.value("nv_cache_num_hits_per_model") == 2
    assert server.value("nv_cache_hit_duration_per_model") == 1.5
    assert server.value("nv_cache_miss_duration_per_model") == 0.01


def test_intervals_have_means_not_distributions() -> None:
    """Of what ended between two looks; where nothing did there is none."""
    server = Server()
    name = "sidestep_triton_interval_mean_seconds"
    server.look(stats(5))
    assert server.samples(name) == {}
    server.look(stats(7, response_stats=Responses(Timed(2, 4000), Timed(8, 800))))
    found = server.samples(name)
    assert found == {
        **dict.fromkeys(
            [
                (s,)
                for s in ("request", "queue", "compute_input", "compute_infer", "compute_output")
            ],
            1e-6,
        ),
        ("execution",): 1e-6,
        ("first_response",): 2e-6,
        ("next_response",): 1e-7,
    }
    server.look(stats(7, response_stats=Responses(Timed(2, 4000), Timed(8, 800))))

    assert server.samples(name) == {}


def test_how_busy_a_model_is() -> None:
    """Of the time that has passed and the instances there are."""
    server = Server()
    server.look(stats(0), instances=2)
    assert server.value("sidestep_triton_busy_ratio") is None
    server.look(stats(1, batch_stats=(Batch(1, 1, 0, 10**9, 0),)), wait=4.0, instances=2)
    assert server.value("sidestep_triton_busy_ratio") == pytest.approx(0.125)
    assert server.value("sidestep_triton_instances") == 2
    server.look(stats(2, batch_stats=(Batch(1, 2, 0, 2 * 10**9, 0),)))

    assert server.value("sidestep_triton_busy_ratio") is None


def test_idle_time_and_the_last_inference() -> None:
    """By the server's clock; without any there is no idle time."""
    server = Server()
    server.look(stats(0))
    assert server.value("sidestep_triton_last_inference_timestamp_seconds") == 0
    assert server.value("sidestep_triton_idle_seconds") is None
    server.look(stats(1))

    assert server.value("sidestep_triton_last_inference_timestamp_seconds") == 1000.0
    assert server.value("sidestep_triton_idle_seconds") == 1e6 + server.stamp - 1000.0


def test_memory_and_responses() -> None:
    """By type and id; by how they ended. What is not told any more goes."""
    server = Server()
    told = Responses(Timed(5, 10), Timed(20, 30), Timed(1, 2), Timed(5), Timed(1))
    memory = (Memory("CPU", 0, 123), Memory("GPU", 0, 4), Memory("GPU", 1, 5))
    server.look(stats(1, response_stats=told, memory_usage=memory))

    assert server.samples("sidestep_triton_memory_bytes") == {
        ("0", "CPU"): 123,
        ("0", "GPU"): 4,
        ("1", "GPU"): 5,
    }
    assert server.samples("sidestep_triton_responses") == {
        ("first",): 5,
        ("next",): 20,
        ("fail",): 1,
        ("empty",): 5,
        ("cancel",): 1,
    }
    assert server.samples("sidestep_triton_response_seconds")["next",] == 3e-8
    server.look(stats(2))
    assert server.samples("sidestep_triton_memory_bytes") == {}


def test_gauges_go_when_a_server_does_not_answer_or_is_not_there() -> None:
    """Counters stay; they are shown again by the next look."""
    server = Server()
    server.look(stats(1), instances=1)
    server.feed.doubt()
    assert server.value("sidestep_triton_instances") is None
    assert server.value("nv_inference_count") == 1
    server.look(stats(1), instances=1)
    assert server.value("sidestep_triton_instances") == 1
    server.feed.lost(server.fed.now)
    server.fed.pass_time(50.0)
    assert server.value("sidestep_triton_instances") is None
    server.feed.heard(server.fed.now)
    server.look(stats(2), instances=1)

    assert server.value("sidestep_triton_instances") == 1
    assert server.value("nv_inference_count") == 2


def test_only_versions_of_models_have_statistics() -> None:
    """And no other item is theirs."""
    server = Server()
    with pytest.raises(WireError):
        server.look(stats(1), info=SERVER)
    with pytest.raises(WireError):
        server.feed.tell(MODEL, VllmSleep(0, 1.0))
    server.feed.tell(SERVER, Samples(0, 1.0))


def test_the_server_is_told_of_and_not_each_model() -> None:
    """Five hundred models that are down are one server that is."""
    server = Server()
    server.look(stats(1))
    server.feed.tell(SERVER, Samples(0, 1.0))
    told = {family.name: family.samples for family in server.fed.intake.metrics.collect()}

    assert [s.labels["engine"] for s in told["sidestep_engine_up"]] == ["t"]


def test_openmetrics_has_no_such_counters() -> None:
    """There a counter ends in _total; the name is kept, the type is not."""
    server = Server()
    server.look(stats(1))
    page = render(server.fed.intake.registry, openmetrics=True).decode()

    assert "# TYPE nv_inference_count unknown\nnv_inference_count{" in page
    assert "# TYPE sidestep_triton_failed_requests counter\n" in page


def test_every_field_is_shown_or_said_to_be_left_out() -> None:
    """And the table names no other."""
    fields = set(docs.fields_of(ModelStats))
    shown = docs.shown_fields().keys()

    assert shown <= fields
    assert fields - shown == LEFT_OUT.keys()
    assert {field for read in READS.values() for field in read} <= fields


def test_folded_looks_are_refused() -> None:
    """Their difference is the exporter's to take; the next look has what they had."""
    fed, folder = Fed(), ItemFolder()
    fed.greet("p", [MODEL])
    first, second = (TritonStats(0, 10.0 + n, 1e6 + n, stats(n)) for n in (1, 2))
    assert folder.fold(encode_item(first), [MODEL])
    folded = folder.seal()
    fed.aggregate("p", folded.items, folded.frames)
    fed.items("p", [encode_item(second)])

    assert fed.rejected == {("bad_item",): 1}
    assert [*parse(fed.page)["nv_inference_count"].samples.values()] == [2]


Amounts = st.integers(0, 3)


@st.composite
def grown(draw: Any, before: ModelStats) -> ModelStats:
    """A model that went on from ``before``."""
    sizes = {batch.batch_size: batch for batch in before.batch_stats}
    executions = draw(st.lists(st.integers(1, 4), max_size=4))
    for size in executions:
        old = sizes.get(size, Batch(size))
        took = draw(st.integers(0, 5))
        sizes[size] = Batch(size, old.count + 1, old.compute_input_ns, old.compute_infer_ns + took)
    known = before.inference_stats

    def more(timed: Timed) -> Timed:
        return Timed(timed.count + draw(Amounts), timed.ns + draw(Amounts))

    return ModelStats(
        before.last_inference + 1000 * len(executions),
        before.inference_count + sum(executions),
        before.execution_count + len(executions),
        InferenceStats(
            more(known.success), more(known.fail), more(known.queue), known.compute_input
        ),
        tuple(sizes[size] for size in sorted(sizes)),
    )


@given(st.data())
def test_differences_add_up(data: st.DataObject) -> None:
    """Of any look to one that goes on from it."""
    old = data.draw(grown(EMPTY))
    new = data.draw(grown(old))
    found = difference(new, old)

    assert not has_begun_anew(new, old)
    assert difference(new, EMPTY) == new
    assert found.inference_count + old.inference_count == new.inference_count
    sizes = Counter({b.batch_size: b.count for b in old.batch_stats})
    sizes.update({b.batch_size: b.count for b in found.batch_stats})
    assert sizes == Counter({b.batch_size: b.count for b in new.batch_stats})
    assert old.busy_ns + found.busy_ns == new.busy_ns


class History(RuleBasedStateMachine):
    """A version of a model over all its lives, looked at now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.now = stats(0)
        self.total: Counter[str] = Counter()
        """Of the lives that are over, as they were last looked at."""
        self.seen = stats(0)

    def told(self, found: ModelStats | None) -> None:
        """Send what the server says."""
        self.server.look(found)
        self.seen = found or stats(0)

    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        """Requests end."""
        self.now = data.draw(grown(self.now))

    @rule()
    def look(self) -> None:
        """A poll."""
        self.told(self.now)

    @rule(data=st.data())
    def begin_anew(self, data: st.DataObject) -> None:
        """A reload or restart; what it does until the next look is not more of everything."""
        new = data.draw(grown(stats(0)))
        assume(has_begun_anew(new, self.seen) or self.seen == stats(0))
        self.end_life()
        self.now = new
        self.told(new)

    @rule()
    def unload(self) -> None:
        """The version is gone."""
        self.end_life()
        self.now = stats(0)
        self.told(None)

    @rule()
    def restart(self) -> None:
        """The exporter, from its snapshot."""
        self.server.restart()

    def end_life(self) -> None:
        """What was counted stays."""
        self.total["inferences"] += self.seen.inference_count
        self.total["executions"] += self.seen.execution_count
        self.total["success"] += self.seen.inference_stats.success.count
        self.total["fail"] += self.seen.inference_stats.fail.count
        self.total["busy"] += self.seen.busy_ns

    @invariant()
    def everything_is_counted_once(self) -> None:
        """Of all lives, by each family."""
        engine = self.server.fed.intake.registry.engines.get("t/m/1")
        if engine is None or engine.absent or engine.statistics is None:
            return
        found = {
            "inferences": "nv_inference_count",
            "executions": "nv_inference_exec_count",
            "success": "nv_inference_request_success",
            "fail": "nv_inference_request_failure",
        }
        now = {
            "inferences": self.seen.inference_count,
            "executions": self.seen.execution_count,
            "success": self.seen.inference_stats.success.count,
            "fail": self.seen.inference_stats.fail.count,
        }
        shown = {key: self.server.value(name) for key, name in found.items()}
        assert shown == {key: self.total[key] + now[key] for key in found}
        busy = self.server.value("sidestep_triton_busy_seconds_total")
        assert busy == (self.total["busy"] + self.seen.busy_ns) / 1e9
        batches = self.server.samples("sidestep_triton_batch_size")
        assert batches["_count",] == shown["executions"]
        assert batches["_sum",] == shown["inferences"]


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
