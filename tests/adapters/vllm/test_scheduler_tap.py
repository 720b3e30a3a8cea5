"""Events that the tap makes of a scheduler's calls; the objects are shaped like vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_taps import Bench
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.request_events import (
    ALL_KNOWN,
    HANDED_OVER,
    PREEMPTED,
    RECEIVED,
    RUNNING,
    WAITING,
    WHOLE,
    Alive,
    Finished,
    Identity,
    Iteration,
    Preempted,
    Prompt,
    Queued,
    Scheduled,
)
from sidestep_adapters.publisher.request_identity import IdentityMaker, identity_maker
from sidestep_adapters.vllm.scheduler_tap import HeldKv

ABORT = FINISH_REASONS.index("abort")


def test_a_request_from_queue_to_end() -> None:
    """Events of a request come in order, by number, with the engine's own timestamps."""
    bench = Bench()
    request = bench.ask("a", 1.0)
    batch = bench.schedule("a", a=7)
    bench.update(batch, {"a": 1}, prompts=("a",))
    bench.tap.freed(request)
    bench.schedule("a")

    queued, scheduled, step, finished, _ = bench.events()

    assert queued == Queued(1, 1.0, 100.0, 7, max_tokens=50)
    assert scheduled == Scheduled(1, 2.0)
    assert isinstance(step, Iteration)
    assert (1.5, 3.0, 14) == (step.started, step.stamp, step.kv_tokens)
    assert ([1], [7]) == (step.scheduled, step.tokens)
    assert [(3.0, [1], [])] == [(o.stamp, o.requests, o.tokens) for o in step.outputs]
    assert [Prompt(1, 5, 2, 1)] == step.prompts
    assert isinstance(finished, Finished)
    assert (1, 1, 7, 3, 50) == (
        finished.request,
        finished.reason,
        finished.prompt_tokens,
        finished.generation_tokens,
        finished.max_tokens,
    )
    assert [] == bench.failures


def test_an_end_inside_a_step_follows_its_output_and_one_outside_comes_at_once() -> None:
    """A request's last output precedes its end; an abort is recorded where it happens."""
    bench = Bench()
    for name in "abc":
        bench.ask(name)
    bench.tap.freed(bench.requests["c"])
    batch = bench.schedule(a=1, b=1)
    bench.tap.update_started()
    bench.tap.freed(bench.requests["a"])
    bench.update(batch, {"a": 1, "b": 1})

    kinds = [(type(event), getattr(event, "request", 0)) for event in bench.events()]

    assert [(Finished, 3), (Iteration, 0), (Finished, 1)] == kinds[3:]


def test_a_preempted_request_is_scheduled_again() -> None:
    """A batch lists the request as resumed or, with another model runner, as new."""
    bench = Bench()
    for name in "ab":
        bench.ask(name)
    bench.tap.preempted("a", 5.0)
    bench.schedule("b", resumed=("a",))

    events = bench.events()[2:]

    assert [Preempted(1, 5.0), Scheduled(2, 2.0), Scheduled(1, 2.0)] == events


@pytest.mark.parametrize(
    ("name", "lone"),
    [("cmpl-1", True), ("_x", True), ("3", True), ("99999999_x", True), ("0_x", False)],
)
def test_parallel_samples_are_recognised_by_their_ids(name: str, lone: bool) -> None:
    """A number precedes the original request's id; the id itself is not sent."""
    bench = Bench()
    bench.ask(name)
    bench.ask("1_x")
    bench.ask("1_y")
    bench.schedule()

    one, other, another = bench.of(Queued)

    assert (one.group == 0) is lone
    assert lone or (one.group, 0, 1) == (other.group, one.sample, other.sample)
    assert another.group not in {one.group, other.group}


def test_a_requests_options_are_sent_at_its_end() -> None:
    """The event has its adapter, stop strings, NaNs, and a rejection by the engine."""
    bench = Bench(nan_check=True)
    bench.ask("nan", lora_request=SimpleNamespace(lora_name="ada\n"))
    bench.ask("b", status=SimpleNamespace(name="FINISHED_IGNORED"))
    bench.ask("c", sampling_params=SimpleNamespace(max_tokens=9, stop=["x"]))
    bench.ask("d", sampling_params=None, get_finished_reason=lambda: ABORT)
    bench.update(bench.schedule(nan=1), {"nan": 1})
    for request in bench.requests.values():
        bench.tap.freed(request)
    bench.schedule()

    events = bench.events()
    ends = [event for event in events if isinstance(event, Finished)]

    assert "ada?" == next(e.adapter for e in events if isinstance(e, Queued))
    assert [True, False, False, False] == [end.corrupted for end in ends]
    assert ["", "prompt_too_long", "", ""] == [end.refused for end in ends]
    assert [False, False, True, False] == [end.stop_strings for end in ends]
    assert [50, 50, 9, None] == [end.max_tokens for end in ends]
    assert [1, 1, 1, ABORT] == [end.reason for end in ends]


def test_an_invalid_event_drops_only_itself() -> None:
    """Failures in either thread are reported; the other events are sent."""
    bench = Bench()
    bench.ask("a", num_prompt_tokens="many", lora_request=SimpleNamespace())
    bench.ask("b", events=[])
    bench.ask("c")
    bench.tap.scheduled(None, {}, 0.0)
    bench.schedule("c")

    assert [Queued, Scheduled] == [type(event) for event in bench.events()]
    assert len(bench.failures) == 3


def test_a_sessions_next_input_follows_its_last_output() -> None:
    """If the input was queued, vLLM continues with it before the step is over."""
    bench = Bench()
    request = bench.ask("a", num_prompt_tokens=5)
    batch = bench.schedule("a", a=5)
    bench.tap.update_started()
    request.arrival_time, request.num_prompt_tokens = 200.0, 9
    bench.tap.queued(request)
    bench.update(batch, {"a": 1})

    first, _, step, again = bench.events()

    assert isinstance(first, Queued)
    assert isinstance(step, Iteration)
    assert isinstance(again, Queued)
    assert [(100.0, 5), (200.0, 9)] == [(q.arrival, q.prompt_tokens) for q in (first, again)]


def test_the_end_of_a_sessions_input_is_no_abort() -> None:
    """The engine ends the session as an abort; another request's abort stays one."""
    bench = Bench()
    for name in "ab":
        bench.ask(name, get_finished_reason=lambda: ABORT)
    bench.tap.session_closed("a")
    bench.tap.freed(bench.requests["a"])
    bench.tap.session_closed("nobody")
    bench.tap.freed(bench.requests["b"])

    ends = bench.of(Finished)

    assert [0, ABORT] == [end.reason for end in ends]


def test_resync_replaces_the_source() -> None:
    """Dropped ends are not waited for; current requests are sent under another source."""
    bench = Bench()
    for name in "abc":
        bench.ask(name)
    bench.schedule("a", "b", "c")
    before = bench.items()
    bench.requests["b"].is_finished = lambda: True

    (item,) = bench.tap.events.resync()
    bench.tap.freed(bench.requests["c"])
    bench.tap.flush()
    (later,) = bench.items()

    assert [1, 3] == [event.request for event in item.events if isinstance(event, Alive)]
    assert item.source != before[0].source
    assert later.source == item.source
    assert {"a": 1} == bench.tap.events._numbers
    assert {1} == bench.tap.events._requests.keys()


def test_a_tick_names_until_when_all_requests_are_known() -> None:
    """A tick names the start of a step that is still running, since later requests are not read yet."""
    tap = Bench().tap
    idle = tap.tick(1.0, 101.0)
    batch = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
        num_scheduled_tokens={},
    )
    tap.scheduled(batch, {}, 1.5)
    busy = [tap.tick(now, 100.0 + now) for now in (2.0, 3.0, 4.0)]
    tap.update_started()
    tap.update_finished(batch, {})

    known = [item.known_until for item in (idle, *busy, tap.tick(5.0, 105.0))]
    assert known == [101.0, 101.5, 101.5, 101.5, 105.0]
    tap.close()
    assert tap.tick(6.0, 106.0).known_until == ALL_KNOWN


def test_a_stopped_process_knows_no_requests_of_its_pause() -> None:
    """The publisher's thread may run before the scheduler has read what arrived meanwhile."""
    tap = Bench().tap

    known = [tap.tick(now, 100.0 + now).known_until for now in (1.0, 20.0, 22.0, 24.0, 25.0)]

    assert known == [101.0, 101.0, 101.0, 101.0, 125.0]


def test_current_state_has_the_live_requests() -> None:
    """Live requests have their state and arrival; ended requests are left out."""
    bench = Bench()
    states = {"a": "WAITING", "b": "RUNNING", "c": "PREEMPTED", "d": "RUNNING"}
    for name, state in states.items():
        bench.ask(name, status=SimpleNamespace(name=state))
    bench.ask("e", status=SimpleNamespace(name="WAITING_FOR_REMOTE_KVS"), num_preemptions=1)
    bench.tap.freed(bench.requests["d"])
    bench.schedule()
    before = bench.items()

    (item,) = bench.tap.events.current_state()

    alive = [event for event in item.events if isinstance(event, Alive)]
    assert [(1, WAITING), (2, RUNNING), (3, PREEMPTED), (5, PREEMPTED)] == [
        (event.request, event.state) for event in alive
    ]
    assert (100.0, 7) == (alive[0].arrival, alive[0].prompt_tokens)
    assert before[0].source == item.source


def test_an_old_release_reports_cached_prompt_tokens_only() -> None:
    """The rest was computed; without the number no prompt is counted."""
    bench = Bench()
    for name in "ab":
        bench.ask(name)
    batch = bench.schedule(a=7, b=7)
    bench.tap.update_started()
    old = SimpleNamespace(request_id="a", new_token_ids=[1], events=[0], num_cached_tokens=3)
    mute = SimpleNamespace(request_id="b", new_token_ids=[1], events=[0])
    bench.tap.update_finished(batch, {0: SimpleNamespace(timestamp=3.0, outputs=[old, mute])})
    bench.tap.update_finished(batch, {0: SimpleNamespace(timestamp=4.0, outputs=[old])})

    first, second = bench.of(Iteration)

    assert [Prompt(1, 4, 3)] == first.prompts
    assert [] == second.prompts


TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
WHOSE: dict[str, Any] = {
    "cache_salt": "acme-secret",
    "trace_headers": {"traceparent": TRACE, "tracestate": "x=y"},
    "priority": 3,
}


def identity(mode: str, name: str, **options: Any) -> Identity | None:
    """Return what the tap sends of a request's identity."""
    bench = Bench(identities=IdentityMaker(mode, "key"), **options)
    bench.ask(name, **WHOSE)
    (event,) = bench.of(Queued)
    (alive,) = bench.tap.events.current_state()[0].events
    assert isinstance(alive, Alive)
    assert alive.identity == event.identity
    return event.identity


def test_a_whole_identity() -> None:
    """As the client knows it: without the sample's number and the engine's suffix."""
    whole = Identity("chatcmpl-acme-1", "", "acme-secret", TRACE, 3)
    assert identity("full", "chatcmpl-acme-1") == whole
    assert identity("full", "2_chatcmpl-acme-1-0123abcd", has_suffix=True) == whole
    # A release that adds none may have such ids of clients.
    kept = identity("full", "chatcmpl-0123abcd")
    assert kept is not None
    assert kept.id == "chatcmpl-0123abcd"


def test_hashed_identities() -> None:
    """Requests of one prefix or salt can be grouped; no text is sent, and the key matters."""
    one, two = identity("hash", "acme-1"), identity("hash", "acme-2")
    assert one is not None
    assert two is not None
    assert (one.prefix, one.salt) == (two.prefix, two.salt)
    assert one.id != two.id
    assert "acme" not in f"{one}{two}"
    assert IdentityMaker("hash").make("any \ud800 text", "\ud800") is not None
    assert IdentityMaker("hash", "other").make("acme-1") != IdentityMaker("hash", "key").make(
        "acme-1"
    )


@pytest.mark.parametrize(
    ("value", "is_on", "warns"), [("", False, 0), ("full", True, 0), ("all", False, 1)]
)
def test_the_variable(
    value: str,
    is_on: bool,
    warns: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unknown value sends nothing, and is logged."""
    monkeypatch.setenv("SIDESTEP_REQUEST_IDENTITY", value)
    assert identity_maker().is_on == is_on
    assert len(caplog.records) == warns


TRANSFERS = {
    "plain": (None, WHOLE, ""),
    "prefill": ({"do_remote_decode": True}, HANDED_OVER, "prefill"),
    # NIXL takes the flag away once it has asked for the KV.
    "fetched": ({"do_remote_prefill": False, "remote_request_id": "p-1"}, RECEIVED, "p-1"),
    "mooncake": ({"do_remote_prefill": True, "transfer_id": "x"}, RECEIVED, "x"),
}


@pytest.mark.parametrize("name", TRANSFERS)
def test_what_a_request_is_to_its_engine(name: str) -> None:
    """Its events say so, also to an exporter that has missed its beginning, with the connectors' name of it."""
    params, transfer, join = TRANSFERS[name]
    bench = Bench(identities=IdentityMaker("full"))
    request = bench.ask(name, kv_transfer_params=params)
    found = [*bench.events(), *(e for i in bench.tap.events.current_state() for e in i.events)]
    bench.tap.freed(request)
    found += bench.events()

    assert [type(event) for event in found] == [Queued, Alive, Finished]
    assert [getattr(event, "transfer", None) for event in found] == [transfer] * 3
    assert [e.identity.join for e in found if isinstance(e, Queued | Alive) and e.identity] == [
        join
    ] * 2


@pytest.mark.parametrize("number", [True, -1, 1 << 40 | 1, 1 << 70, "9", 1.5])
def test_numbers_of_a_client_cost_no_other_request_its_events(number: object) -> None:
    """What an item cannot have is left out: with it, the exporter would refuse the whole item."""
    bench = Bench()
    params = {"remote_request_id": "p", "remote_prefill_cached_tokens": number}
    sampling = SimpleNamespace(max_tokens=number, stop=[])
    bench.ask("other")
    bench.tap.freed(bench.ask("a", kv_transfer_params=params, sampling_params=sampling))
    _, queued, ended = bench.events()
    assert isinstance(queued, Queued)
    assert isinstance(ended, Finished)
    assert [queued.max_tokens, ended.max_tokens, ended.cached_tokens] == [None] * 3


def test_a_request_that_waits_for_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first event in the batch has the time of the wait; a request that has not waited has none."""
    now = 4.0
    monkeypatch.setattr("sidestep_adapters.vllm.scheduler_tap._monotonic", lambda: now)
    bench = Bench()
    for name in ("fetches", "computes"):
        bench.ask(name)
        bench.tap.fetching(name, "waiting_to_start")
    bench.tap.fetching("fetches", "in_progress")
    now = 6.5
    bench.tap.fetching("fetches", "completed_waiting")
    now = 9.0
    bench.tap.fetching("fetches", None)
    bench.schedule("fetches", "computes")

    assert bench.of(Scheduled) == [Scheduled(1, 2.0, 4.0, 6.5), Scheduled(2, 2.0)]


class Referenced(SimpleNamespace):
    """An object that weak references can have."""


def test_kv_that_is_held_for_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that have ended and are still known, their blocks, and the longest time of one of them."""
    now = 1.0
    monkeypatch.setattr("sidestep_adapters.vllm.scheduler_tap._monotonic", lambda: now)
    blocks = {"runs": ([1, 2],), "held": ([3, 4, 5], [6]), "later": ([7], [])}
    requests = {
        name: SimpleNamespace(request_id=name, is_finished=lambda name=name: name != "runs")
        for name in ("runs", "held")
    }
    scheduler = Referenced(
        connector=object(),
        requests=requests,
        kv_cache_manager=SimpleNamespace(get_block_ids=blocks.__getitem__),
    )
    held = HeldKv(scheduler)

    def values() -> list[float]:
        return [family.samples[0].value for family in held.families()]

    assert values() == [1, 4, 0.0]
    now = 3.5
    requests["later"] = SimpleNamespace(request_id="later", is_finished=lambda: True)
    assert values() == [2, 5, 2.5]
    del requests["held"]
    assert values() == [1, 1, 0.0]
    scheduler.connector = None
    assert values() == []
