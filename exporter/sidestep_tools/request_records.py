"""Records of requests, as the request log and the exporter's timeline have them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from sidestep.errors import ConfigError
from sidestep.protocol.limits import Count, Seconds
from sidestep_adapters.recording.format import lines

Time = Annotated[datetime, Meta(tz=True)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request's record that are needed; docs/requests.md describes the fields."""

    key: str
    time: Time
    engine: str = ""
    dialect: str = ""
    model: str = ""
    adapter: str = ""
    tenant: str = ""
    id: str = ""
    reason: str = ""
    arrival: Time | None = None
    queued: Time | None = None
    e2e_seconds: Seconds | None = None
    queue_seconds: Seconds | None = None
    prefill_seconds: Seconds | None = None
    decode_seconds: Seconds | None = None
    ttft_seconds: Seconds | None = None
    mean_itl_seconds: Seconds | None = None
    preempted_seconds: Seconds = 0.0
    preempted_at: list[tuple[Seconds, Seconds]] = []
    preemptions: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    output_tokens: Count = 0
    parts: dict[str, Seconds] | None = None
    role: str = ""
    transfer: str = ""
    join_key: str = ""
    trace_id: str = ""

    @property
    def begin(self) -> float:
        """Unix time of its arrival, or of its end where the arrival is not known."""
        return (self.arrival or self.time).timestamp()

    @property
    def name(self) -> str:
        """Its id as the client knows it, else its key."""
        return self.id or self.key

    @property
    def join_keys(self) -> set[tuple[str, str]]:
        """Keys of the request, of which its parts on several engines share at least one."""
        found = {(name, getattr(self, name)) for name in ("id", "join_key", "trace_id")}
        return {(name, key) for name, key in found if key}


_decode = msgspec.json.Decoder(Record).decode


def read_log(path: Path, file: BinaryIO, first: bytes) -> Iterator[Record]:
    """Yield the records in an open request log, behind the line ``first``, which was read from it.

    Raises:
        ConfigError: A line is no record.
    """
    for number, line in enumerate(lines(path, file, first), start=1):
        try:
            if line.strip():
                yield _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: line {number} is no record of a request, nor is the file a recording of"
                f" sidestep record: {error}"
            ) from None
