"""Parts of request events that a core and a front end send alike."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import replace

from sidestep.protocol.limits import MAX_OBSERVATIONS
from sidestep.protocol.request_events import (
    HANDED_OVER,
    MAX_EVENTS,
    MAX_REQUESTS,
    RECEIVED,
    WHOLE,
    Alive,
    Event,
    Iteration,
)

SAMPLE = re.compile(r"(\d+)_(.+)", re.DOTALL)
"""Id of a parallel sample: its number, and the id of the original request."""
_encoder, _decoder = Encoder(), Decoder(Event)

_FROM_PREFILL = ("do_remote_prefill", "remote_request_id", "remote_engine_id", "transfer_id")


def transfer_of(params: Any) -> int:
    """Return what a request with these ``kv_transfer_params`` is to its engine.

    Connectors take ``do_remote_prefill`` away once they have asked for the KV.
    """
    if not isinstance(params, dict):
        return WHOLE
    if params.get("do_remote_decode"):
        return HANDED_OVER
    return RECEIVED if any(map(params.get, _FROM_PREFILL)) else WHOLE


def join_key(params: Any, name: str) -> str:
    """Return what the connectors of both engines call a request, which is ``name`` to this one."""
    if not isinstance(params, dict):
        return ""
    own = name if params.get("do_remote_decode") else params.get("remote_request_id")
    return str(params.get("transfer_id") or own or "")


def batches(events: Sequence[Event], lose: Callable[[str], None]) -> list[list[Event]]:
    """Divide events into lists that fit into an item each.

    Call ``lose``, inside ``except``, for an event that the exporter would refuse, and leave it out:
    the exporter refuses an item as a whole.
    """
    found: list[list[Event]] = []
    capacity = 0
    for event in events:
        size, checked = 0, event
        if isinstance(event, Iteration):
            # These lists are too long to be checked at each step.
            size, checked = event.size, replace(event, outputs=[], scheduled=None, tokens=[])
        try:
            _decoder.decode(_encoder.encode(checked))
        except Exception:  # noqa: BLE001 - a release may have values of any type
            # A request that is alive was counted when it was queued. It would be left out of each
            # comparison, and counted again it would cause the next one.
            if not isinstance(event, Alive):
                lose("an event has a value that cannot be sent")
            continue
        if not found or size > capacity or len(found[-1]) >= MAX_EVENTS:
            found.append([])
            capacity = MAX_REQUESTS
        found[-1].append(event)
        capacity -= size
    return found


def parallel_sample(request_id: object) -> tuple[int, int]:
    """Return a parallel sample's number of the original request, and its own; both 0 for a single one."""
    found = SAMPLE.fullmatch(str(request_id))
    if found is None or len(found[1]) > len(str(MAX_OBSERVATIONS)):
        return 0, 0
    digest = hashlib.blake2b(found[2].encode(), digest_size=5).digest()
    return int.from_bytes(digest, "big") or 1, int(found[1])
