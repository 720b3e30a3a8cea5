"""The recorder of a scheduler's stats."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace

import pytest

from collectors import QueueCount, SchedulerStats
from sidestep.engines.sglang.rows import QUEUES
from sidestep.engines.sglang.wire import QueueCount as SentQueue
from sidestep.engines.sglang.wire import SglangSchedulerStats as SentStats
from sidestep.engines.sglang.wire import SglangStats
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics
from sidestep_adapters.sglang.stats import StatsRecorder


class Reports:
    """A recorder of stats, and its items."""

    def __init__(self) -> None:
        self.deferred = DeferredMetrics()
        self.failures: list[str] = []
        self.deferred.fail = self.failures.append
        self.source = StatsRecorder(self.deferred, 0)

    @property
    def sent(self) -> SentStats:
        """Return the stats of the only item."""
        (item,) = self.deferred.items()
        assert isinstance(item, SglangStats)
        return item.stats


@pytest.fixture
def reports() -> Reports:
    """Return a recorder without reports."""
    return Reports()


def test_a_report_is_copied(reports: Reports) -> None:
    """Each report keeps its values at that time; of two that wait the newer one counts."""
    stats = SchedulerStats(num_running_reqs=QueueCount(3), gen_throughput=10.0)
    reports.source.record_report(stats)
    stats.gen_throughput = 20.0
    first = reports.sent
    reports.source.record_report(stats)
    stats.num_running_reqs = QueueCount(4)
    reports.source.record_report(stats)

    assert first.gen_throughput == 10.0
    second = reports.sent
    assert (second.gen_throughput, second.num_running_reqs) == (20.0, SentQueue(4))


def test_nan_is_absent(reports: Reports) -> None:
    """SGLang uses NaN for values that were never measured; it is no failure."""
    reports.source.record_report(SchedulerStats(num_running_reqs=QueueCount(1)))
    sent = reports.sent

    assert sent.fwd_occupancy is None
    assert sent.lora_pool_slots_used is None
    assert reports.failures == []


def test_missing_fields_are_absent_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that the release should have; not those that came later, nor a renamed one."""
    release = ModuleType("sglang")
    release.__version__ = "0.5.20"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", release)
    found: list[Mapping[str, dict[str, str]]] = []
    recorder = StatsRecorder(DeferredMetrics(), 0, found.append)
    gone = {"gen_throughput", "prealloc_full_token_usage", "num_prefill_bootstrap_queue_reqs"}
    queue = SentQueue(1)
    report = dict.fromkeys(set(SentStats.__struct_fields__) - gone, 0) | dict.fromkeys(
        QUEUES, queue
    )
    del report["num_prefill_bootstrap_queue_reqs"]
    recorder.add((), {**report, "num_prefill_prealloc_queue_reqs": queue}, 1)
    recorder.add((), report, 1)
    (item,) = recorder.items(1.0)

    assert found == [
        {
            "missing_fields": {
                "stats__gen_throughput": "missing",
                "stats__prealloc_full_token_usage": "absent",
            }
        }
    ]
    (line,) = caplog.messages
    assert line.startswith("sidestep: sglang 0.5.20 has no field stats.gen_throughput: ")
    assert isinstance(item, SglangStats)
    assert item.stats.gen_throughput is None
    assert item.stats.num_prefill_bootstrap_queue_reqs == queue


def test_queues_by_priority(reports: Reports) -> None:
    """Priorities are numbers, or none where a request has none."""
    queue = QueueCount(6, {5: 1, -1: 2, None: 3})  # type: ignore[dict-item]
    reports.source.record_report(SchedulerStats(num_queue_reqs=queue))

    assert reports.sent.num_queue_reqs == SentQueue(6, {"5": 1, "-1": 2, "None": 3})
    assert reports.failures == []


def test_queues_of_older_releases_are_numbers(reports: Reports) -> None:
    """A queue is its total; with running requests the scheduler is not idle."""
    totals = dict.fromkeys(QUEUES, 3)
    reports.source.record_report(SimpleNamespace(**totals, gen_throughput=7.0))
    sent = reports.sent

    assert [getattr(sent, name) for name in QUEUES] == [SentQueue(3)] * len(QUEUES)
    assert sent.gen_throughput == 7.0
    assert reports.failures == []


@pytest.mark.parametrize("queue", ["num_running_reqs", "num_queue_reqs"])
def test_an_idle_scheduler_has_idle_values(reports: Reports, queue: str) -> None:
    """The last report's throughput is replaced once no request is left."""
    stats = SchedulerStats(
        gen_throughput=10.0, decode_sum_seq_lens=5, num_retracted_reqs=1, token_usage=0.5
    )
    busy_stats = dataclasses.replace(stats)
    setattr(busy_stats, queue, QueueCount(1))
    reports.source.record_report(busy_stats)
    busy = reports.sent
    reports.source.record_report(stats)
    idle = reports.sent

    assert (busy.gen_throughput, busy.decode_sum_seq_lens, busy.num_retracted_reqs) == (10, 5, 1)
    assert (idle.gen_throughput, idle.decode_sum_seq_lens, idle.num_retracted_reqs) == (0, 0, 0)
    assert idle.token_usage == 0.5


def test_queue_lengths_between_reports(reports: Reports) -> None:
    """Lengths replace those of the last report only; before the first report nothing is sent."""
    reports.source.record((), (9, 9), 1)
    assert reports.deferred.items() == []
    reports.source.record_report(SchedulerStats(num_running_reqs=QueueCount(1), token_usage=0.5))
    reports.source.record((), (7, 2), 1)
    sent = reports.sent
    reports.source.record((), (0, 0), 1)
    idle = reports.sent

    assert (sent.num_running_reqs, sent.num_queue_reqs) == (SentQueue(7), SentQueue(2))
    assert sent.token_usage == 0.5
    assert (idle.num_running_reqs, idle.gen_throughput) == (SentQueue(0), 0)


def test_stats_are_part_of_the_current_state(reports: Reports) -> None:
    """A restarted exporter gets them from an idle engine, too."""
    assert reports.source.current_state(1.0) == []
    reports.source.record_report(SchedulerStats(token_usage=0.5))
    first = reports.sent
    (again,) = reports.source.current_state(1.0)

    assert isinstance(again, SglangStats)
    assert again.stats == first


def test_an_invalid_field_drops_only_itself(reports: Reports) -> None:
    """The other fields are sent, and the failure is counted."""
    reports.source.record_report(
        SchedulerStats(gen_throughput=object(), token_usage=0.5, num_running_reqs=QueueCount(1))  # type: ignore[arg-type]
    )
    sent = reports.sent

    assert (sent.gen_throughput, sent.token_usage) == (None, 0.5)
    assert len(reports.failures) == 1
