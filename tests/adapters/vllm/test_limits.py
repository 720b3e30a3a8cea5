"""The limit that is read of a scheduler after each step; the objects are shaped like vLLM's."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fake_vllm import Request, config, importable
from heartbeats import Heartbeats
from sidestep.protocol.request_events import LIMITS
from sidestep_adapters.vllm.limits import NONE, PAUSED, LimitReader

RELEASES = {
    # Requests that were passed over wait in front of the others; apart; among them, counted.
    "0.11.1": ("waiting",),
    "0.17.0": ("skipped_waiting", "waiting"),
    "0.32.0": ("kv_holding_waiting", "waiting"),
}


class Queue(deque[Any]):
    """A queue of waiting requests."""

    def peek_request(self) -> Any:
        """Return the first."""
        return self[0]


class Scheduler:
    """A scheduler of a release after a call of ``schedule()``, which a test fills."""

    def __init__(self, release: str = "0.32.0", **configs: Any) -> None:
        self.queues = RELEASES[release]
        for name in self.queues:
            setattr(self, name, Queue())
        if release == "0.32.0":
            self.deferred_waiting: set[str] = set()
            self.max_num_active_reqs = 4
            self.prefill_capacity_bound = False
        self.running: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.max_num_running_reqs = 4
        self.max_num_scheduled_tokens = 100
        self.block_size = 16
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=["one"])
        self.free = 0
        pool = SimpleNamespace(get_num_free_blocks=lambda: self.free)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        scheduling = {"max_num_batched_tokens": 100, **configs.pop("scheduling", {})}
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(**scheduling),
            **{f"{name}_config": SimpleNamespace(**value) for name, value in configs.items()},
        )
        self._last = 0

    def run(self, count: int = 1, adapter: int = 0) -> list[str]:
        """Add requests to the batch, and return their names."""
        added = [self._made(adapter=adapter) for _ in range(count)]
        self.running += added
        return [request.request_id for request in added]

    def wait(
        self, status: str = "WAITING", *, passed_over: bool = False, adapter: int = 0, **more: Any
    ) -> Any:
        """Add a request to the queue in which the release has it."""
        request = self._made(status, adapter=adapter, **more)
        first = passed_over and self.queues[0] == "skipped_waiting"
        getattr(self, self.queues[0] if first else "waiting").append(request)
        if passed_over and hasattr(self, "deferred_waiting"):
            self.deferred_waiting.add(request.request_id)
        return request

    def _made(self, status: str = "RUNNING", *, adapter: int = 0, **more: Any) -> Any:
        self._last += 1
        request = SimpleNamespace(
            request_id=f"r{self._last}",
            status=SimpleNamespace(name=status),
            lora_request=SimpleNamespace(lora_int_id=adapter) if adapter else None,
            num_computed_tokens=0,
            num_preemptions=0,
            num_tokens=50,
            mm_features=[],
        )
        vars(request).update(more)
        self.requests[request.request_id] = request
        return request


def batch(*new: str, tokens: int = 0, requests: int = 0, resumed: tuple[str, ...] = ()) -> Any:
    """Return what a call of ``schedule()`` has scheduled."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={*resumed}),
        num_scheduled_tokens=dict.fromkeys(map(str, range(requests)), 1),
        total_num_scheduled_tokens=tokens,
    )


def read(scheduler: Scheduler, some: Any = None, **more: Any) -> str:
    """Return the name of the limit after a call of ``schedule()``."""
    found = LimitReader(scheduler).read(scheduler, some or batch(), **more)
    assert found is not None
    return LIMITS[found]


Make = Callable[[Scheduler], Any]

OF_ALL: dict[str, tuple[str, Make]] = {
    "nobody waits": ("none", lambda s: s.run(4)),
    "the batch is full": ("slots", lambda s: (s.run(4), s.wait())),
    "no blocks are left": ("kv_blocks", lambda s: (s.run(), s.wait())),
    "the only request waits for its grammar": (
        "grammar",
        lambda s: s.wait("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", passed_over=True),
    ),
    "the only request waits for KV": (
        "kv_transfer",
        lambda s: s.wait("WAITING_FOR_REMOTE_KVS", passed_over=True),
    ),
    "its grammar came, but no blocks are left": (
        "kv_blocks",
        lambda s: (s.run(), s.wait(passed_over=True)),
    ),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("case", OF_ALL)
def test_all_releases(case: str, release: str) -> None:
    """They differ in where they keep the requests that they have passed over."""
    limit, fill = OF_ALL[case]
    scheduler = Scheduler(release)
    fill(scheduler)

    assert limit == read(scheduler)


@pytest.mark.parametrize("release", RELEASES)
def test_used_up_tokens(release: str) -> None:
    """A full batch comes first: more tokens would admit nobody."""
    scheduler = Scheduler(release)
    scheduler.run(3)
    scheduler.wait()

    assert "tokens" == read(scheduler, batch(tokens=100))
    assert "kv_blocks" == read(scheduler, batch(tokens=99))
    scheduler.run()
    assert "slots" == read(scheduler, batch(tokens=100))


def test_tokens_of_drafts_are_reserved() -> None:
    """Each request of the batch takes some, and the next one would."""
    scheduler = Scheduler(speculative={"max_num_new_slots_for_drafting": 3})
    scheduler.run(2)
    scheduler.wait()

    assert "tokens" == read(scheduler, batch(tokens=91, requests=2))
    assert "kv_blocks" == read(scheduler, batch(tokens=90, requests=2))


def test_a_prompt_that_may_not_be_divided() -> None:
    """It waits until all of it fits into a step."""
    scheduler = Scheduler(scheduling={"enable_chunked_prefill": False})
    scheduler.run()
    scheduler.wait(num_tokens=60)

    assert "tokens" == read(scheduler, batch(tokens=50))
    assert "kv_blocks" == read(scheduler, batch(tokens=40))


@pytest.mark.parametrize(("state", "limit"), [(0, "kv_blocks"), (1, "paused"), (2, "paused")])
def test_a_paused_scheduler(state: int, limit: str) -> None:
    """Whether requests of the batch go on or not; the exporter learns it without a step."""
    scheduler = Scheduler()
    scheduler.pause_state = state  # type: ignore[attr-defined]
    scheduler.run()
    scheduler.wait()

    assert limit == read(scheduler)


def test_output_in_flight_of_a_preempted_request() -> None:
    """It must arrive before the request continues."""
    scheduler = Scheduler()
    waiting = scheduler.wait("PREEMPTED", passed_over=True, num_stale_output_tokens=1)
    waiting.drop_stale_output = False

    assert "deferred" == read(scheduler)


def test_sessions_that_wait_for_their_clients() -> None:
    """They take slots, but the engine makes nobody wait."""
    scheduler = Scheduler()
    scheduler.num_waiting_for_streaming_input = 2  # type: ignore[attr-defined]
    for _ in range(2):
        scheduler.wait("WAITING_FOR_STREAMING_REQ", passed_over=True)
    scheduler.run(2)
    assert "none" == read(scheduler)
    scheduler.wait()
    assert "slots" == read(scheduler)


def test_a_step_that_has_preempted_admits_nobody() -> None:
    """Not even if slots and tokens are used up; the next step decides anew."""
    scheduler = Scheduler()
    reader = LimitReader(scheduler)
    scheduler.run(4)
    preempted = scheduler.wait("PREEMPTED")
    reader.preempted(preempted)
    first = reader.read(scheduler, batch(tokens=100))
    reader.started()

    assert LIMITS.index("kv_blocks") == first
    assert LIMITS.index("slots") == reader.read(scheduler, batch(tokens=100))


def test_the_batch_has_its_most_adapters() -> None:
    """As long as requests of them run; a request of one of them, or of none, waits for blocks."""
    scheduler = Scheduler(lora={"max_loras": 2})
    reader = LimitReader(scheduler)

    def limit(*new: str, **more: Any) -> str:
        found = reader.read(scheduler, batch(*new, **more))
        assert found is not None
        return LIMITS[found]

    one, two = scheduler.run(adapter=1) + scheduler.run(adapter=2)
    waiting = scheduler.wait(passed_over=True, adapter=3)
    assert "lora" == limit(one, two)
    waiting.lora_request.lora_int_id = 2
    assert "kv_blocks" == limit()
    waiting.lora_request.lora_int_id = 3
    reader.preempted(scheduler.requests[one])
    reader.started()
    assert "kv_blocks" == limit()
    assert "lora" == limit(resumed=(one,))
    reader.left(scheduler.requests[two])
    assert "kv_blocks" == limit()


def test_requests_of_a_connector() -> None:
    """It may not know yet what it has; what has ended may stay known until it has been sent."""
    scheduler = Scheduler()
    scheduler.connector = object()  # type: ignore[attr-defined]
    scheduler.run()
    scheduler._made("FINISHED_STOPPED")
    assert "none" == read(scheduler)
    asked = scheduler.wait(passed_over=True)
    assert "kv_transfer" == read(scheduler)
    # It has come.
    asked.num_computed_tokens = 32
    assert "kv_blocks" == read(scheduler)


def test_the_multimodal_encoder() -> None:
    """A request whose blocks would fit waits for the encoder's budget or cache, or for its input."""
    scheduler = Scheduler()
    scheduler.max_num_encoder_input_tokens = 8  # type: ignore[attr-defined]
    scheduler.run()
    request = scheduler.wait(has_encoder_inputs=True, mm_features=["image"])
    assert "kv_blocks" == read(scheduler)
    scheduler.free = 4
    assert "encoder" == read(scheduler)
    request.has_encoder_inputs = False
    assert "kv_blocks" == read(scheduler)
    scheduler.deferred_waiting.add(request.request_id)
    scheduler.ec_connector = object()  # type: ignore[attr-defined]
    assert "encoder" == read(scheduler)


def test_prefills_that_are_left_to_a_later_step() -> None:
    """By data parallelism: the ranks prefill at the same time."""
    scheduler = Scheduler()
    scheduler.run()
    scheduler.wait()

    assert "deferred" == read(scheduler, is_throttled=True)
    scheduler.prefill_capacity_bound = True
    assert "kv_blocks" == read(scheduler, is_throttled=True)


def test_a_release_that_lacks_an_attribute(caplog: pytest.LogCaptureFixture) -> None:
    """Limits are unknown from then on; the log says so once."""
    scheduler = Scheduler()
    reader = LimitReader(scheduler)
    scheduler.wait()
    del scheduler.max_num_scheduled_tokens
    with caplog.at_level(logging.WARNING):
        found = [reader.read(scheduler, batch()) for _ in range(2)]

    assert [None, None] == found
    assert 1 == len(caplog.records)


class Unreadable:
    """A scheduler, or a tap, that raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_what_fails_beside_a_step_ends_no_core(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures are counted; the engine knows nothing of them."""
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        scheduler = ours.scheduler(config())
        core = scheduler._core
        errors = core.publisher.errors
        assert core.is_paused(Unreadable()) is False
        core._blocks = Unreadable()
        core.flush_blocks()
        errors = core.publisher.errors - errors
        core._blocks = None
        scheduler.shutdown()

    assert errors == 2


def test_a_session_that_is_closed_while_it_answers_ends_for_its_own_reason(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one that waits for input ends by that; another may still be aborted."""
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        scheduler = ours.scheduler(config())
        last = Request("s")
        vars(last)["resumable"] = False
        for request in (Request("s"), last):
            scheduler.add_request(request)
        scheduler.finish_all()
        _, (_, _, _, is_stopped) = scheduler._core.requests._deferred_events[-1]
        scheduler.shutdown()

    assert not is_stopped


def test_a_pause_of_the_tapped_scheduler(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pausing says so, and so does a request that arrives meanwhile; resuming ends it."""
    with (
        Heartbeats(f"ipc://{tmp_path}/ingest.ipc") as exporter,
        importable(monkeypatch, exporter.endpoint) as ours,
    ):
        scheduler = ours.scheduler(config())
        sent: list[int] = []
        monkeypatch.setattr(scheduler._core.requests, "limited", sent.append)
        scheduler.add_request(Request("before"))
        scheduler.set_pause_state(2)
        scheduler.set_pause_state(2)
        scheduler.add_request(Request("during"))
        scheduler.set_pause_state(0)
        scheduler.add_request(Request("after"))
        scheduler.shutdown()

    assert [PAUSED, PAUSED, NONE] == sent
