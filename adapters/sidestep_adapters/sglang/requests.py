"""Requests that ended in SGLang's tokenizer, for records of single requests; needs no SGLang itself.

The tokenizer's loop appends references and numbers when a request ends; the publisher thread makes
wire structs of them. The prompt, the output and the text of errors stay in the process.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from sidestep.engines.items import Item
from sidestep.engines.sglang.wire import SglangAbort, SglangRequest, SglangRequests
from sidestep.protocol.limits import printable
from sidestep.protocol.request_events import MAX_REQUEST_LABELS, Identity
from sidestep.protocol.self_described import Samples
from sidestep_adapters.publisher.request_identity import IdentityMaker
from sidestep_adapters.publisher.translate import bounded_count, client_count
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics, MetricSource
from sidestep_adapters.sglang.metric_stubs import MetricStub

OWN_COUNTERS = (
    "num_requests_total",
    "prompt_tokens_total",
    "cached_tokens_total",
    "generation_tokens_total",
    "num_aborted_requests_total",
)
"""Attributes of the collector's counters to which those of tenants add up."""
COLUMNS = (
    "completion_tokens",
    "cached_tokens",
    "cached_tokens_details",
    "retraction_counts",
    "spec_num_correct_drafts",
    "time_stats",
)
"""Attributes of a batch's output with an element for each request."""
CACHE_SOURCES = ("device", "host", "storage")
EXTERNAL = "storage"
"""The source with tokens that another process computed, or this one before a restart."""
MAX_RECORDED = 32
"""Requests from which on an item is full: with the longest ids it stays below the limit of an item."""
MAX_PROMPTS = 1024
"""Maximum of prompts of whose parallel samples only some have ended."""
ROOM = 256
"""Free entries that the queue must have when a request ends: they are left to counters."""

_decode = msgspec.msgpack.Decoder(SglangRequest).decode
_STATUSES = {int(status): status.name.lower() for status in HTTPStatus}


class Ended(NamedTuple):
    """A request that ended, as the tokenizer's loop saw it.

    Attributes:
        asked: SGLang's object of the request.
        times: SGLang's times of the request in the tokenizer; ``scheduler``: in the scheduler, if known.
        reason: The finish reason, as SGLang's dictionary or as text.
        at: Time of its end, where SGLang does not note it.
        counted: Whether SGLang's own counters have it.
    """

    asked: Any
    times: Any
    reason: Any
    at: float = 0.0
    counted: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cached_by_source: Any = None
    retractions: int = 0
    draft_tokens: int = 0
    scheduler: Any = None


class Aborted(NamedTuple):
    """A request that is being aborted."""

    asked: Any


class RequestRecorder(MetricSource):
    """Recorder of one tokenizer's requests that end.

    ``stubs`` are those of the tokenizer's collector, by attribute.
    """

    order = 0
    """Before the stubs, whose calls it takes."""

    def __init__(
        self,
        deferred: DeferredMetrics,
        engine: int,
        stubs: Mapping[str, MetricStub],
        identities: IdentityMaker,
    ) -> None:
        super().__init__(deferred, engine)
        self.fail = deferred.fail
        self._counters = [stubs[name] for name in OWN_COUNTERS if name in stubs]
        self._others = [stub for name, stub in stubs.items() if name not in OWN_COUNTERS]
        self._identities = identities
        self._source = secrets.randbits(40)
        self._number = 0
        self._dropped = self._failed = self._counted_unseen = 0
        self._ended: list[SglangRequest] = []
        self._aborted: list[SglangAbort] = []
        self._samples: OrderedDict[tuple[int, int], list[Any]] = OrderedDict()

    def hold(self, request: Ended | Aborted, count: Callable[[], object] = lambda: None) -> bool:
        """Record a request, on the tokenizer's loop; return whether the queue has room for it.

        Args:
            request: What the loop knows of it.
            count: Counts it, in the publisher thread, so that both are in one item.
        """
        queue = self._deferred.queue
        if len(queue) + ROOM > self._deferred.limit:
            self._deferred.dropped += 1
            self._dropped += isinstance(request, Ended)
            return False
        queue.append((self, request, count, 1))
        return True

    def add(self, key: Ended | Aborted, value: Any, weight: int) -> None:  # noqa: ARG002
        """Count a recorded request, and add it to the next item."""
        if isinstance(key, Ended):
            try:
                value()
                # As the exporter takes it: with an invalid value it would refuse the whole item.
                made = msgspec.msgpack.encode(self._request(key))
                self._ended.append(_decode(made))
            except Exception:
                self._failed += 1
                raise
        else:
            value()
            self._aborted.append(SglangAbort(_adapter(key.asked), self._identity(key.asked)))
        self._deferred.is_full = len(self._ended) + len(self._aborted) >= MAX_RECORDED

    def items(self, now: float) -> list[Item]:
        """Return an item of the requests and what the own counters added, then what others observed."""
        counters = [
            family
            for stub in self._counters
            for item in stub.items(now)
            if isinstance(item, Samples)
            for family in item.families
        ]
        unseen, known = self._dropped + self._failed, self._counted_unseen
        item = SglangRequests(
            self._engine, now, self._source, self._ended, self._aborted, counters, unseen - known
        )
        self._ended, self._aborted, self._counted_unseen = [], [], unseen
        return [item, *(other for stub in self._others for other in stub.items(now))]

    def _request(self, ended: Ended) -> SglangRequest:
        self._number += 1
        asked, times, scheduler = ended.asked, ended.times, ended.scheduler
        params = getattr(asked, "sampling_params", None)
        params = params if isinstance(params, dict) else {}
        reason, refused = _reason(ended)
        is_warm_up = _is_warm_up(params, ended)
        created = times.created_time
        cached, external = _cached(ended)
        made = SglangRequest(
            self._number,
            created + time.time() - time.perf_counter(),
            created,
            ended.at or times.finished_time,
            reason,
            prompt_tokens=bounded_count(ended.prompt_tokens),
            output_tokens=bounded_count(ended.output_tokens),
            cached_tokens=cached,
            external_tokens=external,
            draft_tokens=bounded_count(ended.draft_tokens),
            retractions=bounded_count(ended.retractions),
            refused=refused,
            adapter=_adapter(asked),
            counted=ended.counted,
            recorded=not is_warm_up,
            identity=self._identity(asked),
        )
        made.max_tokens = client_count(params.get("max_new_tokens"))
        made.sample = 0 if is_warm_up else self._sample(asked, params)
        if ended.output_tokens and times.first_token_time:
            made.first = times.first_token_time
        if getattr(scheduler, "forward_entry_time", 0.0):
            made.scheduled = scheduler.forward_entry_time
            if not ended.retractions:
                made.queued = scheduler.wait_queue_entry_time or None
            else:
                _add_retractions(made, times, scheduler)
        return made

    def _identity(self, asked: Any) -> Identity | None:
        found = self._identities.make(
            str(asked.rid),
            getattr(asked, "cache_salt", None) or getattr(asked, "extra_key", None),
            getattr(asked, "external_trace_header", None),
            getattr(asked, "priority", None) or 0,
            _join_key(asked),
        )
        labels = getattr(asked, "custom_labels", None)
        if not labels:
            return found
        some = list(labels.items())[:MAX_REQUEST_LABELS]
        known = {printable(name): printable(value) for name, value in some}
        return msgspec.structs.replace(found or Identity(), labels=known)

    def _sample(self, asked: Any, params: Mapping[str, Any]) -> int:
        """Return how many samples of the same prompt have ended before.

        SGLang does not number samples; they share the objects of their parameters and of their prompt.
        """
        expected = params.get("n", 1)
        if not isinstance(expected, int) or expected <= 1:
            return 0
        prompt = getattr(asked, "text", None) or getattr(asked, "input_ids", None)
        key = id(asked.sampling_params), id(prompt)
        # The entry references both, so that no other object gets their identities.
        entry = self._samples.setdefault(key, [asked.sampling_params, prompt, 0])
        number = int(entry[2])
        entry[2] += 1
        if entry[2] >= expected:
            del self._samples[key]
        elif len(self._samples) > MAX_PROMPTS:
            self._samples.popitem(last=False)
        return number


def from_output(state: Any, output: Any, index: int) -> Ended:
    """Return the request ``state``, which ended with its part ``index`` of a batch's output."""
    tokens, cached, cached_by_source, retractions, drafts, scheduler = [
        column[index] if column and index < len(column) else None
        # A release or a batch may lack some.
        for column in [getattr(output, name, None) for name in COLUMNS]
    ]
    return Ended(
        state.obj,
        state.time_stats,
        output.finished_reasons[index],
        0.0,
        True,
        output.prompt_tokens[index],
        tokens or 0,
        cached or 0,
        cached_by_source,
        retractions or 0,
        drafts or 0,
        scheduler,
    )


def _join_key(asked: Any) -> str:
    """Return the room in which both engines of a request meet, with the host that has it."""
    room, host = (getattr(asked, f"bootstrap_{name}", None) for name in ("room", "host"))
    return "" if room is None else f"{host or ''}/{room}"


def _adapter(asked: Any) -> str:
    adapter = getattr(asked, "lora_path", None)
    return printable(adapter) if isinstance(adapter, str) else ""


def _reason(ended: Ended) -> tuple[str, str]:
    """Return the finish reason, and why the request was refused.

    SGLang calls every unexpected end an abort, with an HTTP status unless its client has left.
    """
    reason = ended.reason
    if not isinstance(reason, dict):
        return printable(reason), "bad_request" if reason == "refused" else ""
    kind, status = str(reason.get("type")), reason.get("status_code")
    if kind != "abort" or status is None:
        return printable(kind), ""
    is_refused = status < HTTPStatus.INTERNAL_SERVER_ERROR or (
        status == HTTPStatus.SERVICE_UNAVAILABLE and not ended.output_tokens
    )
    return ("refused", _STATUSES.get(status, str(status))) if is_refused else ("error", "")


def _is_warm_up(params: Mapping[str, Any], ended: Ended) -> bool:
    """Return whether SGLang itself asked for this, to cache the prompt of parallel samples."""
    reason = ended.reason
    return (
        isinstance(reason, dict)
        and reason.get("type") == "length"
        and reason.get("length") == 0
        and params.get("n", 1) != 1
        and params.get("max_new_tokens") != 0
    )


def _cached(ended: Ended) -> tuple[int, int]:
    """Return the cached prompt tokens as SGLang counts them, and those of them from a storage."""
    if ended.cached_tokens <= 0 or not ended.cached_by_source:
        return bounded_count(ended.cached_tokens), 0
    found = {name: bounded_count(ended.cached_by_source.get(name) or 0) for name in CACHE_SOURCES}
    return sum(found.values()), found[EXTERNAL]


def _add_retractions(made: SglangRequest, times: Any, scheduler: Any) -> None:
    """Divide the time in the queue of a retracted request.

    SGLang keeps the sum of the waits, but not when the first began. Here it begins when the tokenizer
    sent the request, less than a millisecond earlier.
    """
    sent = getattr(times, "api_server_dispatch_finish_time", 0.0)
    waited = getattr(scheduler, "queue_duration_s", None)
    if sent and made.scheduled is not None and waited is not None:
        made.queued = min(sent, made.scheduled)
        made.preempted_seconds = max(waited - (made.scheduled - made.queued), 0.0)
