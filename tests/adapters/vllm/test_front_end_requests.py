"""Items that the publisher's thread makes of a front end's requests, as the exporter receives them."""

from __future__ import annotations

from typing import Any

import pytest

from fake_vllm import FinishReason
from intakes import Fed, samples
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.request_events import (
    Finished,
    Iteration,
    Output,
    Preempted,
    Prompt,
    Queued,
    Scheduled,
)
from vllm_front_ends import WALL, Clock, HookedFrontEnd, infos, output

STOP, LENGTH, ABORT, ERROR, _ = range(len(FINISH_REASONS))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return simulated time."""
    return Clock(monkeypatch)


def started(clock: Clock, *names: str, engines: int = 1, **more: Any) -> HookedFrontEnd:
    """Return a front end with requests that have had their first output, on the engines in turn."""
    front = HookedFrontEnd(clock, range(engines), **more)
    for index, name in enumerate(names):
        front.add(name, engine=index % engines)
        clock.now += 1.0
        times: dict[str, Any] = {"queued": clock.engine - 0.5, "scheduled": clock.engine - 0.25}
        front.receive(output(name, **times), engine=index % engines)
    front.encoded()
    return front


def finished(events: list[Any]) -> list[tuple[int, int, int]]:
    """Return number, reason and tokens of the requests that have ended."""
    ends = (event for event in events if isinstance(event, Finished))
    return [(event.request, event.reason, event.generation_tokens) for event in ends]


def test_a_request_from_its_arrival_to_its_end(clock: Clock) -> None:
    """All events have the engine's times; arrival and ends those of the front end."""
    front = HookedFrontEnd(clock)
    front.add("a", 9, lora_name="l", max_tokens=5)
    arrival = clock.wall
    assert front.items() == []
    clock.now += 2.0
    stamp, wall = clock.engine, clock.wall
    front.receive(output("a", prompt=(4, 3, 2), queued=163.0, scheduled=164.5))
    clock.now += 1.0
    front.receive(output("a", 2, reason=FinishReason.LENGTH, preempted=165.25, scheduled=165.5))

    queued = Queued(1, 163.0, arrival, 9, "l", max_tokens=5)
    first = Iteration(stamp, stamp, wall, [Output(stamp, [1])], [], prompts=[Prompt(1, 4, 3, 2)])
    second = Iteration(stamp + 1, stamp + 1, wall + 1, [Output(stamp + 1, [1], [2])], [])
    end = Finished(1, stamp + 1, wall + 1, LENGTH, 9, 3, 1, 5)
    assert front.events() == [
        queued, Scheduled(1, 164.5), first, Preempted(1, 165.25), Scheduled(1, 165.5), second, end
    ]  # fmt: skip
    assert front.prompt_tokens == [9, 0]
    assert front.failures == []


@pytest.mark.parametrize(("victim", "tokens"), [("a", 2), ("b", 1)])
def test_an_abort_between_two_chunks(clock: Clock, victim: str, tokens: int) -> None:
    """The step is one; the abort follows it, and its output counts if it came before."""
    front = started(clock, "a", "b", "c")
    aborted: list[None] = []

    def abort() -> None:
        if not aborted:
            front.llm.abort(victim)
            aborted.append(None)

    front.receive(output("a"), output("b"), output("c"), chunk=1, between=abort)

    step, end = front.events()
    number = "abc".index(victim) + 1
    assert step.outputs[0].requests == ([1, 2, 3] if victim == "a" else [1, 3])
    assert finished([end]) == [(number, ABORT, tokens)]


def session(
    clock: Clock, front: HookedFrontEnd, *, early: bool, short: bool
) -> tuple[list[float], float]:
    """Run a session of two inputs; return their times to first tokens, and the last one's latency.

    An ``early`` second input comes before the end of the first one's output, of which a ``short`` one
    has one.
    """
    boundary, waited = FinishReason.LENGTH, []
    front.add("s", 5, resumable=True)
    arrivals = [clock.now]
    clock.now += 1.0
    events: dict[str, Any] = {"queued": clock.engine - 0.5, "scheduled": clock.engine - 0.25}
    if early:
        front.add("s", 4, resumable=True)
        arrivals.append(clock.now)
    again: dict[str, Any] = {"queued_": clock.engine} if early else {}
    if not short:
        clock.now += 0.5
        waited.append(clock.now - arrivals[0])
        front.receive(output("s", prompt=(5, 0, 0), **events))
        clock.now += 1.0
        front.receive(output("s", reason=boundary, **again))
    else:
        waited.append(clock.now - arrivals[0])
        front.receive(output("s", prompt=(5, 0, 0), reason=boundary, **events, **again))
    if not early:
        clock.now += 4.0
        front.add("s", 4, resumable=True)
        arrivals.append(clock.now)
        again = {"queued_": clock.engine}
    else:
        again = {}
    clock.now += 2.0
    waited.append(clock.now - arrivals[1])
    front.receive(output("s", prompt=(3, 1, 0), **again, scheduled=clock.engine - 0.25))
    front.add("s", 0, resumable=False)
    clock.now += 1.0
    front.receive(output("s", reason=boundary))
    return waited, clock.now - arrivals[1]


@pytest.mark.parametrize("tapped", [False, True])
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_session(clock: Clock, early: bool, short: bool, tapped: bool) -> None:
    """Each input has a time to its first token; the end has those of the last input."""
    front, fed = HookedFrontEnd(clock, tapped=tapped), Fed()
    waited, e2e = session(clock, front, early=early, short=short)
    fed.send_hello("api", infos(tapped=tapped))
    fed.items("api", front.encoded())

    assert fed.rejected == {}
    assert front.failures == []
    page = {series.partition("{")[0]: value for series, value in samples(fed.page).items()}
    assert page["vllm:time_to_first_token_seconds_count"] == 2
    assert page["vllm:time_to_first_token_seconds_sum"] == sum(waited)
    assert page["vllm:e2e_request_latency_seconds_sum"] == e2e
    if not tapped:
        assert page["vllm:request_prompt_tokens_sum"] == page["vllm:prompt_tokens_total"] == 9
        assert page["vllm:inter_token_latency_seconds_count"] == (1 if short else 2)
    assert len(front.requests._requests) == len(front.requests.numbers) == 0


def test_values_of_some_requests(clock: Clock) -> None:
    """NaNs in logits, and cached tokens of another engine."""
    front = HookedFrontEnd(clock, nan_check=True)
    for name, cached in (("a", 6), ("b", True)):
        front.add(name, remote_prefill_cached_tokens=cached)
    front.receive(output("a", queued=1.0), output("b", queued=1.0))
    front.receive(output("a", nans=2), output("b"))
    front.receive(output("a", reason=FinishReason.STOP), output("b", reason=FinishReason.STOP))
    ends = [event for event in front.events() if isinstance(event, Finished)]
    assert [(end.corrupted, end.cached_tokens) for end in ends] == [(True, 6), (False, None)]


@pytest.mark.parametrize("tapped", [False, True])
def test_nothing_is_left_of_requests_whose_end_was_dropped(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tapped: bool
) -> None:
    """They are found out once dropping has ended, but not what has ended or begun since."""
    front = started(clock, "a", "b", "c", tapped=tapped)
    monkeypatch.setattr("sidestep_adapters.vllm.front_end_requests.MAX_RECORDS", -1)
    front.llm.abort("a")
    monkeypatch.setattr("sidestep_adapters.vllm.front_end_requests.MAX_RECORDS", 9)
    assert front.requests.items() == []
    front.add("new")
    front.receive(output("b", reason=FinishReason.STOP))
    items = front.requests.resync(front.hook.states)

    assert list(front.requests._requests) == [3, 4]
    assert front.requests.numbers == {"c": 3, "new": 4}
    if tapped:
        assert [item.front_end.e2e_latencies for item in items] == [[2.0]]
        return
    ended, alive = items
    assert finished(ended.events) == [(2, STOP, 2)]
    assert ended.source != alive.source
    assert (alive.unseen, [e.request for e in alive.events]) == (1, [3])
    # It has kept its arrival.
    clock.now += 1.0
    front.receive(output("new", queued=1.0))
    (queued, _step) = front.events()
    assert queued.arrival == clock.now - 1.0 + WALL
