"""Requests that end in SGLang's tokenizer, as the plugin sends them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from collectors import TOKENIZER, Unpublished
from sglang_managers import Manager
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.engines.sglang.wire import SglangRequest, SglangRequests
from sidestep.protocol.self_described import Samples
from sidestep_adapters.sglang import taps as sglang_taps
from sidestep_adapters.sglang.requests import OWN_COUNTERS, ROOM

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRETS = ("acme-17", "salty", TRACE[3:35], "secret prompt", "why it failed")
OWN = {f"sglang:{name}" for name in OWN_COUNTERS}


class Recorded(Unpublished):
    """The records of a process with requests."""

    def encoded(self) -> list[bytes]:
        """Return the bytes of all items."""
        return [encode_item(item) for item in self.taken()]

    def requests(self) -> list[SglangRequests]:
        """Return the items of requests, as the exporter decodes them."""
        items = map(DIALECTS.decode, self.encoded())
        return [item for item in items if isinstance(item, SglangRequests)]

    def ended(self) -> list[SglangRequest]:
        """Return the requests that have ended."""
        return [request for item in self.requests() for request in item.ended]


@pytest.fixture
def process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Return the records of this process; a test may choose the mode and the identity."""
    beside, identity = getattr(request, "param", (False, "none"))
    monkeypatch.setenv("SIDESTEP_REQUEST_IDENTITY", identity)
    made = Recorded(beside=beside)
    monkeypatch.setattr(sglang_taps, "_process", made)
    return made


def scheduled(queued: float, forward: float, waited: float = 0.0) -> Any:
    """Return a scheduler's times of a request."""
    return SimpleNamespace(
        wait_queue_entry_time=queued, forward_entry_time=forward, queue_duration_s=waited
    )


@pytest.mark.parametrize("process", [(False, "none"), (True, "none")], indirect=True)
def test_a_finished_request_is_sent_with_what_sglang_counts_for_it(process: Recorded) -> None:
    """One item has both; no other item has any of these counters."""
    manager = Manager()
    state = manager.ask(lora_path="sql", sampling_params={"max_new_tokens": 64})
    created = state.time_stats.created_time
    details = {"device": 2, "host": 1, "storage": 1}
    manager.finish(
        state,
        prompt=9,
        cached=4,
        details=details,
        scheduler=scheduled(created + 0.01, created + 0.05),
    )
    items = list(map(DIALECTS.decode, process.encoded()))
    (item,) = [item for item in items if isinstance(item, SglangRequests)]
    (request,) = item.ended
    others = [f.name for each in items if isinstance(each, Samples) for f in each.families]

    assert {f.name: sum(s.value for s in f.samples) for f in item.counters} == {
        "sglang:num_requests_total": 1,
        "sglang:prompt_tokens_total": 9,
        "sglang:cached_tokens_total": 4,
        "sglang:generation_tokens_total": 3,
    }
    assert OWN.isdisjoint(others)
    assert others == ["sglang:prompt_tokens_histogram"]
    assert request.queued == pytest.approx(created + 0.01)
    assert request.scheduled == pytest.approx(created + 0.05)
    assert request.first == pytest.approx(created + 0.25)
    assert request.ended == pytest.approx(created + 1)
    assert (request.prompt_tokens, request.cached_tokens, request.external_tokens) == (9, 4, 1)
    assert (request.reason, request.output_tokens, request.max_tokens) == ("stop", 3, 64)
    assert (request.adapter, request.sample, request.identity) == ("sql", 0, None)
    assert request.counted
    assert request.recorded
    assert process.failures == []


@pytest.mark.parametrize(
    ("reason", "output", "expected"),
    [
        ({"type": "length", "length": 8}, 8, ("length", "")),
        ({"type": "abort", "message": "why it failed"}, 4, ("abort", "")),
        ({"type": "abort", "status_code": 400}, 0, ("refused", "bad_request")),
        ({"type": "abort", "status_code": 503}, 5, ("error", "")),
        ({"type": "abort", "status_code": 500}, 0, ("error", "")),
        ({"type": "abort", "status_code": 499}, 0, ("refused", "499")),
        ({"type": "new"}, 1, ("new", "")),
    ],
)
def test_finish_reasons(
    reason: dict[str, Any], output: int, expected: tuple[str, str], process: Recorded
) -> None:
    """SGLang calls most of them aborts."""
    manager = Manager()
    # True is a number to Python, and none in an item.
    manager.finish(manager.ask(sampling_params={"max_new_tokens": True}), output, reason=reason)
    (request,) = process.ended()

    assert (request.reason, request.refused) == expected
    assert (request.first is None) == (output == 0)


def test_requests_that_no_collector_counts(process: Recorded) -> None:
    """Those that are aborted in the queue, and those that the tokenizer does not send."""
    manager = Manager()
    waiting, running, invalid, broken, left, known = (manager.ask(name) for name in "abcdef")
    running.output_ids = [1, 2, 3]
    for state in (invalid, broken, left):
        state.dispatched = False
    assert manager.dispatch_abort(SimpleNamespace(rid="a")) == "handled"
    refused = {"type": "abort", "status_code": 503}
    manager.dispatch_abort(SimpleNamespace(rid="b", finished_reason=refused))
    manager.dispatch_abort(SimpleNamespace(rid="unknown"))
    manager.fail(invalid, ValueError("why it failed"))
    manager.fail(broken, RuntimeError("why it failed"))
    manager.fail(left, asyncio.CancelledError())
    manager.fail(known, ValueError("its client has left"))
    items = process.requests()
    ended = [request for item in items for request in item.ended]

    assert [(each.reason, each.refused, each.output_tokens) for each in ended] == [
        ("abort", "", 0),
        ("error", "", 3),
        ("refused", "bad_request", 0),
        ("error", "", 0),
        ("abort", "", 0),
    ]
    assert not any(each.counted for each in ended)
    assert all(each.recorded and each.ended >= each.created for each in ended)
    assert [len(item.aborted) for item in items] == [1]
    assert manager.rid_to_state == {"f": known}
    assert waiting.finished


def test_parallel_samples(process: Recorded) -> None:
    """SGLang's own run of the prompt has no record, and samples are numbered as they end."""
    manager = Manager()
    params = {"n": 3, "max_new_tokens": 4}
    shared: dict[str, Any] = {"sampling_params": params, "text": "prompt"}
    manager.finish(manager.ask(**shared), 0, reason={"type": "length", "length": 0})
    for _ in range(3):
        manager.finish(manager.ask(**shared))
    manager.finish(manager.ask(**shared))
    requests = process.ended()

    assert [request.recorded for request in requests] == [False, True, True, True, True]
    assert [request.sample for request in requests] == [0, 0, 1, 2, 0]
    assert all(request.counted for request in requests)


def test_a_retracted_request(process: Recorded) -> None:
    """What it waited after its first batch is no part of its time in the queue."""
    manager = Manager()
    state = manager.ask()
    created = state.time_stats.created_time
    times = scheduled(created + 0.6, created + 0.101, waited=0.35)
    manager.finish(state, retractions=2, scheduler=times)
    (request,) = process.ended()

    assert request.retractions == 2
    assert request.queued == pytest.approx(created + 0.001)
    assert request.preempted_seconds == pytest.approx(0.25)


def test_health_checks_have_no_record(process: Recorded) -> None:
    """SGLang does not count them either."""
    manager = Manager()
    manager.ask("a", log_metrics=False)
    manager.dispatch_abort(SimpleNamespace(rid="a"))

    assert process.ended() == []


def identified(manager: Manager) -> None:
    """End requests with an identity in every way."""
    options: dict[str, Any] = {
        "extra_key": "salty",
        "external_trace_header": {"traceparent": TRACE},
        "priority": 1 << 60,
    }
    manager.finish(manager.ask("acme-17", **options))
    manager.abort_request(manager.ask("acme-17", **options).obj.rid)
    manager.dispatch_abort(SimpleNamespace(rid="acme-17"))
    invalid = manager.ask("acme-17", **options)
    invalid.dispatched = False
    manager.fail(invalid, ValueError("why it failed"))


@pytest.mark.parametrize(
    ("process", "visible"),
    [
        ((False, "none"), ()),
        ((False, "hash"), (TRACE[3:35],)),
        ((False, "full"), ("acme-17", "salty", TRACE[3:35])),
    ],
    indirect=["process"],
)
def test_only_what_the_administrator_allows_leaves_the_process(
    process: Recorded, visible: tuple[str, ...]
) -> None:
    """Whatever the bytes are, they have no prompt, and without the variable no identity."""
    identified(Manager())
    sent = b"".join(process.encoded())

    assert {text for text in SECRETS if text.encode() in sent} == set(visible)


def test_a_full_queue_counts_what_it_does_not_hold(process: Recorded) -> None:
    """The next item says how many requests ended unseen; the engine counts them all the same."""
    manager = Manager()
    process.deferred.limit = ROOM - 1
    manager.finish(manager.ask())
    manager.finish(manager.ask())
    process.encoded()
    process.deferred.limit = 10 * ROOM
    manager.finish(manager.ask())
    (item,) = process.requests()

    assert (len(item.ended), item.unseen) == (1, 2)
    assert process.deferred.dropped == 2


@pytest.mark.parametrize("process", [(False, "hash")], indirect=True)
def test_odd_values_cost_no_more_than_their_own_record(process: Recorded) -> None:
    """An item with an invalid value would be refused as a whole, with the counts of other requests."""
    manager = Manager()
    for priority in (0.5, "high", True):
        manager.finish(manager.ask(priority=priority))
    manager.finish(manager.ask(), scheduler=scheduled(-1.0, float("nan")))
    manager.finish(manager.ask(), reason="\ud800")
    (item,) = process.requests()

    assert [request.reason for request in item.ended] == ["stop"] * 3 + ["?"]
    assert item.unseen == len(process.failures) == 1
    assert {f.name: f.samples[0].value for f in item.counters}["sglang:num_requests_total"] == 5


def test_no_exception_reaches_the_engine(process: Recorded) -> None:
    """A request that cannot be read has no record; SGLang counts it, and other requests have theirs."""
    manager = Manager()
    manager.metrics_collector.observe_one_finished_request(dict(TOKENIZER), 1, 1, 0)
    for broken in (manager.ask("a"), manager.ask("b")):
        broken.dispatched = False
        del broken.obj.rid
        manager.rid_to_state["a"] = manager.rid_to_state["b"] = broken
        manager.dispatch_abort(SimpleNamespace(rid="a"))
        manager.collect_metrics(SimpleNamespace(obj=broken.obj), Columns(), 0)
    before = len(process.failures)
    unreadable = SimpleNamespace(obj=SimpleNamespace(), dispatched=False, finished=True)
    manager.rid_to_state["c"] = unreadable
    hooks = vars(manager)["_handle_abort_req"].__self__
    hooks._handle_abort = hooks._release = lambda _: "done"
    assert manager._handle_abort_req(SimpleNamespace(rid="c")) == "done"
    assert manager._handle_abort_req(SimpleNamespace()) == "done"
    assert manager._release_req_states_on_failure({"d": SimpleNamespace()}) == "done"
    assert len(process.failures) == before + 3
    manager.finish(manager.ask())
    items = list(map(DIALECTS.decode, process.encoded()))
    requests = [item for item in items if isinstance(item, SglangRequests)]
    families = [f for item in requests for f in item.counters]
    families += [f for item in items if isinstance(item, Samples) for f in item.families]
    counted = [f for f in families if f.name == "sglang:num_requests_total"]

    assert sum(len(item.ended) for item in requests) == 1
    assert sum(item.unseen for item in requests) == 2
    assert sum(sample.value for family in counted for sample in family.samples) == 4
    assert process.failures


class Columns:
    """A batch's output without most columns."""

    prompt_tokens = completion_tokens = cached_tokens = (1,)
    cached_tokens_details = (None,)
