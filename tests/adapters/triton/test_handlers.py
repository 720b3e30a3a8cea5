"""Triton's cumulative statistics applied to series, with every way in which they restart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from intakes import Fed
from pages import Family, parse
from rendered import render
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.triton.differences import CountersResetError, difference
from sidestep_adapters.triton.handlers import STAGED_SIZES
from sidestep_adapters.triton.rows import BATCH_STAGES, EXECUTES, FAILURES
from sidestep_adapters.triton.wire import (
    Batch,
    InferenceStats,
    Memory,
    ModelStats,
    Responses,
    Timed,
    TritonStats,
)

LABELS = {"model": "m", "version": "1"}
MODEL = EngineInfo("t/m/1", "triton", LABELS, features=[FAILURES, EXECUTES])
SERVER = EngineInfo("t", "triton", {})
BIG = 2**64 - 1


def stats(n: int = 1, **fields: Any) -> ModelStats:
    """Return ``n`` requests, each an execution of batch size 1 that took a microsecond."""
    timed = Timed(n, n * 1000)
    given: dict[str, Any] = {
        "last_inference": 1_000_000 * bool(n),
        "inference_count": n,
        "execution_count": n,
        "inference_stats": InferenceStats(timed, Timed(), timed, timed, timed, timed),
        "batch_stats": (Batch(1, n, 100 * n, 800 * n, 100 * n),) if n else (),
    }
    return ModelStats(**{**given, **fields})


def was_reset(new: ModelStats, old: ModelStats) -> bool:
    """Return whether ``new`` does not continue ``old``."""
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
        self.feed.mark_seen(0.0)
        self.stamp = 10.0
        self.parsed: tuple[str, dict[str, Family]] = "", {}

    def poll(
        self, found: ModelStats | None, *, info: EngineInfo = MODEL, wait: float = 1.0, **more: Any
    ) -> None:
        """Apply the result of a poll one second after the last one."""
        self.stamp += wait
        item = TritonStats(0, self.stamp, 1e6 + self.stamp, found, **more)
        self.feed.apply(info, DIALECTS.decode(encode_item(item)))

    def restart(self) -> None:
        """Restart the exporter from its snapshot."""
        self.fed = self.fed.restarted(self.fed.snapshot())
        self.feed = ServerFeed(self.fed.intake, "triton t")
        self.feed.mark_seen(0.0)
        while self.fed.intake.busy:
            self.fed.intake.work()

    @property
    def page(self) -> str:
        """Return the page as Prometheus gets it."""
        return render(self.fed.intake.registry).decode()

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Return a family's samples by labels that are not the model's, without buckets."""
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
        """Return the sample of a family that has one, if any."""
        return self.samples(name).get(())


def test_nanoseconds_are_kept() -> None:
    """Triton truncates each observation to a microsecond."""
    server = Server()
    server.poll(stats(3, inference_stats=InferenceStats(Timed(3, 1_234_567), fail=Timed(1, 1))))
    server.poll(stats(4, inference_stats=InferenceStats(Timed(4, 1_234_568), fail=Timed(1, 1))))

    assert server.value("nv_inference_request_duration_us") == 1234.568
    assert server.value("sidestep_triton_failed_request_seconds_total") == 1e-9


def test_64_bits_are_exact() -> None:
    """Nanoseconds of a busy model exceed a float's precision and, with restarts, 64 bits."""
    server = Server()
    for _ in range(3):
        server.poll(stats(1, inference_count=BIG, inference_stats=InferenceStats(Timed(BIG, BIG))))
        server.poll(stats(0))
    server.restart()
    server.poll(stats(1))

    assert f'nv_inference_count{{model="m",version="1"}} {3 * BIG + 1}\n' in server.page
    assert server.value("nv_inference_request_duration_us") == (3 * BIG + 1000) / 1000


@pytest.mark.parametrize(
    "less",
    [
        stats(9, inference_count=8),
        stats(9, batch_stats=()),
        stats(9, batch_stats=(Batch(1, 9, 900, 7199, 900),)),
        stats(9, inference_stats=InferenceStats(Timed(9, 8999))),
        stats(9, inference_stats=msgspec.structs.replace(stats(9).inference_stats, fail=Timed(2))),
        stats(9, last_inference=999_999),
        stats(9, response_stats=Responses(next=Timed(4, 1))),
        stats(9, response_stats=Responses(next=Timed(5, 1), next_compute_output=Timed(5, 1))),
    ],
)
def test_any_lower_field_is_a_reset(less: ModelStats) -> None:
    """All of the new numbers count then."""
    before = stats(
        9,
        inference_stats=msgspec.structs.replace(stats(9).inference_stats, fail=Timed(3)),
        response_stats=Responses(next=Timed(5, 1), next_compute_output=Timed(5, 2)),
    )
    if less.response_stats is None:
        before = msgspec.structs.replace(before, response_stats=None)
    if less.inference_stats.fail.count == 0:
        before = msgspec.structs.replace(before, inference_stats=stats(9).inference_stats)

    assert was_reset(less, before)
    assert not was_reset(before, before)
    server = Server()
    server.poll(before)
    server.poll(less)
    assert server.value("nv_inference_request_success") == 9 + less.inference_stats.success.count
    assert server.value("sidestep_triton_resets_total") == 1


def test_a_clock_set_back_is_no_reset() -> None:
    """The last inference has the server's clock, and requests continued."""
    server = Server()
    server.poll(stats(5))
    server.poll(stats(6, last_inference=900_000))

    assert server.value("nv_inference_request_success") == 6
    assert server.value("sidestep_triton_resets_total") == 0


def test_an_older_poll_is_ignored() -> None:
    """With two pollers of one server, it would look like a restart."""
    server = Server()
    server.poll(stats(5))
    server.poll(stats(3), wait=-0.5)

    assert server.value("nv_inference_request_success") == 5


def test_batch_sizes_are_exact() -> None:
    """Each size is in its bucket; the sum is of sizes and includes failed executions."""
    server = Server()
    found = (Batch(1, 11), Batch(2, 25), Batch(3, 1), Batch(8, 1, 1, 2, 3), Batch(1000, 1))
    server.poll(stats(1, batch_stats=found))

    assert server.samples("sidestep_triton_batch_size") == {("_count",): 39, ("_sum",): 1072}
    for bound, count in (("1.0", 11), ("2.0", 36), ("3.0", 37), ("512.0", 38), ("+Inf", 39)):
        line = f'sidestep_triton_batch_size_bucket{{model="m",version="1",le="{bound}"}} {count}\n'
        assert line in server.page
    executions = server.samples("sidestep_triton_batch_executions")
    assert executions == {("1",): 11, ("2",): 25, ("3",): 1, ("8",): 1, ("1000",): 1}
    assert server.samples("sidestep_triton_batch_seconds")["8",] == 6e-9
    stages = server.samples("sidestep_triton_batch_stage_seconds")
    assert {stage: n for (size, stage), n in stages.items() if size == "8"} == {
        "compute_input": 1e-9,
        "compute_infer": 2e-9,
        "compute_output": 3e-9,
    }
    assert server.value("sidestep_triton_busy_seconds_total") == 6e-9


def test_batch_sizes_over_the_limit_share_a_series() -> None:
    """No execution is lost, and its stages stay apart, after a restart of the exporter, too."""
    server = Server()

    def poll(count: int) -> None:
        sizes = range(1, 201)
        server.poll(stats(1, batch_stats=tuple(Batch(n, count, 10, 20, 30) for n in sizes)))

    poll(1)
    executions = server.samples("sidestep_triton_batch_executions")

    assert len(executions) == MAX_OPEN_VALUES + 1
    assert sum(executions.values()) == 200
    assert executions[OTHER,] == 200 - MAX_OPEN_VALUES
    server.restart()
    poll(2)
    stages = server.samples("sidestep_triton_batch_stage_seconds")
    assert len(stages) == 3 * (STAGED_SIZES + 1) <= MAX_OPEN_VALUES
    for number, stage in enumerate(BATCH_STAGES, 1):
        assert stages["1", stage] == pytest.approx(number * 1e-8)
        assert stages[OTHER, stage] == pytest.approx((200 - STAGED_SIZES) * number * 1e-8)


def test_an_ensemble_is_not_busy() -> None:
    """Its executions are its members'."""
    server = Server()
    server.poll(stats(1), info=EngineInfo("t/m/1", "triton", LABELS))

    assert server.value("sidestep_triton_busy_seconds_total") is None
    assert server.value("nv_inference_request_failure") is None
    assert server.value("sidestep_triton_failed_requests_total") == 0


def test_intervals_have_means_not_distributions() -> None:
    """They cover what ended between two polls; otherwise there is no sample."""
    server = Server()
    name = "sidestep_triton_interval_mean_seconds"
    server.poll(stats(5))
    assert server.samples(name) == {}
    server.poll(stats(7, response_stats=Responses(Timed(2, 4000), Timed(8, 800))))
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
    server.poll(stats(7, response_stats=Responses(Timed(2, 4000), Timed(8, 800))))

    assert server.samples(name) == {}


def test_the_busy_ratio_is_of_time_and_instances() -> None:
    """The busy ratio is the executions' time by the time that passed and the number of instances."""
    server = Server()
    server.poll(stats(0), instances=2)
    assert server.value("sidestep_triton_busy_ratio") is None
    server.poll(stats(1, batch_stats=(Batch(1, 1, 0, 10**9, 0),)), wait=4.0, instances=2)
    assert server.value("sidestep_triton_busy_ratio") == pytest.approx(0.125)
    assert server.value("sidestep_triton_instances") == 2
    server.poll(stats(2, batch_stats=(Batch(1, 2, 0, 2 * 10**9, 0),)))

    assert server.value("sidestep_triton_busy_ratio") is None


def test_idle_time_and_the_last_inference() -> None:
    """They have the server's clock; without an inference there is no idle time."""
    server = Server()
    server.poll(stats(0))
    assert server.value("sidestep_triton_last_inference_timestamp_seconds") == 0
    assert server.value("sidestep_triton_idle_seconds") is None
    server.poll(stats(1))

    assert server.value("sidestep_triton_last_inference_timestamp_seconds") == 1000.0
    assert server.value("sidestep_triton_idle_seconds") == 1e6 + server.stamp - 1000.0


def test_memory_and_responses() -> None:
    """Memory is by type and id, responses by outcome; what a poll omits is removed."""
    server = Server()
    reported = Responses(
        Timed(5, 10), Timed(20, 30), Timed(1, 2), Timed(5), Timed(1),
        Timed(6, 8), Timed(6, 2), Timed(25, 29), Timed(20, 3),
    )  # fmt: skip
    memory = (Memory("CPU", 0, 123), Memory("GPU", 0, 4), Memory("GPU", 1, 5))
    server.poll(stats(1, response_stats=reported, memory_usage=memory))

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
    assert server.samples("sidestep_triton_response_stages") == {
        ("first", "compute_infer"): 6,
        ("first", "compute_output"): 6,
        ("next", "compute_infer"): 25,
        ("next", "compute_output"): 20,
    }
    assert server.samples("sidestep_triton_response_stage_seconds") == {
        ("first", "compute_infer"): 8e-9,
        ("first", "compute_output"): 2e-9,
        ("next", "compute_infer"): 29e-9,
        ("next", "compute_output"): 3e-9,
    }
    server.poll(stats(2))
    assert server.samples("sidestep_triton_memory_bytes") == {}


def test_folded_polls_are_refused() -> None:
    """Only the exporter computes differences; the next poll includes them."""
    fed = Fed()
    fed.send_hello("p", [MODEL])
    first, second = (TritonStats(0, 10.0 + n, 1e6 + n, stats(n)) for n in (1, 2))
    fed.fold("p", [encode_item(first)])
    fed.items("p", [encode_item(second)])

    assert fed.rejected == {("bad_item",): 1}
    assert [*parse(fed.page)["nv_inference_count"].samples.values()] == [2]
