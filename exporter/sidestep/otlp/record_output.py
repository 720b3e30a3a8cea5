"""Delivery of the records of requests by OTLP, as spans or as log records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from sidestep.otlp.destination import Destination
from sidestep.otlp.resource import Resource
from sidestep.requests.record import RequestRecord
from sidestep.requests.record_queue import RecordQueue
from sidestep.requests.record_writer import Write

Convert = Callable[[RequestRecord, bytes, Resource], Sequence[Any]]
"""Returns the SDK's objects for a record, which is also given as its line."""


def record_output(
    queue: RecordQueue, convert: Convert, resource: Resource, destination: Destination
) -> Write:
    """Return what sends records until the receiver has accepted or refused them.

    Args:
        queue: Counts records that cannot be read.
        convert: Makes the SDK's objects.
        resource: Their resource.
        destination: The receiver.
    """
    decode = msgspec.json.Decoder(RequestRecord).decode

    def converted(lines: Sequence[bytes]) -> Iterator[Sequence[Any]]:
        for line in lines:
            try:
                yield convert(decode(line), line, resource)
            except (msgspec.MsgspecError, ValueError):
                # A snapshot of another release may have it.
                continue

    def write(lines: list[bytes]) -> bool:
        made = [*converted(lines)]
        parts = [part for each in made for part in each]
        if parts and destination.export(parts, len(parts)) == "failed":
            return False
        for _ in range(len(lines) - len(made)):
            queue.lose("unreadable")
        return True

    return write
