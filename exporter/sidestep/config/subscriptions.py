"""Parser of ``--subscribe``: kind, endpoints and labels of an engine's own stream."""

from __future__ import annotations

import dataclasses
import re

from sidestep.catalog.row import ENGINE_LABELS
from sidestep.config import options, parsing
from sidestep.transport.addresses import MAX_PORT, checked_endpoint

FORM = "KIND=ENDPOINT[,option=value...]"
KINDS = ("kv-events", "forward-pass", "load")
OPTIONS = ("replay", "topic", "model", "engine")
MAX_RANKS = 128
MAX_ENDPOINT = 107 + len("ipc://")

_RANGE = re.compile(r"(.*[:.])(\d+)-(\d+)")
_PORT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^][:/*\s]+):(\d{1,5})")
_PREFIXES = {
    options.LABEL: options.label_check(ENGINE_LABELS, "; use engine= and model= for those two")
}


@dataclasses.dataclass(frozen=True, slots=True)
class Subscription:
    """One publisher of an engine; each rank has its own.

    Attributes:
        replay: Endpoint that replays missed messages; empty for none.
        topic: Prefix of the topics to receive.
        model: Value of the label ``model_name``; empty for none.
        engine: Value of the label; empty for the one in the messages, or else ``rank``.
        rank: Position in a range of endpoints.
        labels: Additional labels of all its series.
    """

    kind: str
    endpoint: str
    replay: str = ""
    topic: str = ""
    model: str = ""
    engine: str = ""
    rank: int = 0
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Identity among all subscriptions."""
        return f"{self.kind} {self.endpoint}"


def parse(value: object) -> tuple[Subscription, ...]:
    """Return the subscriptions of one ``--subscribe``, one per rank."""
    first, *rest = (part.strip() for part in parsing.text(value).split(","))
    kind, equals, place = first.partition("=")
    if not equals or kind not in KINDS:
        raise ValueError(f"must be {FORM}, with KIND one of {', '.join(KINDS)}")
    given = options.parse(rest, OPTIONS, _PREFIXES)
    endpoints = _ranks(place)
    replays = _ranks(given["replay"]) if "replay" in given else [""] * len(endpoints)
    if replays[0] and kind != "kv-events":
        raise ValueError("only kv-events can be replayed; remove replay=")
    if len(replays) != len(endpoints):
        raise ValueError(f"replay= must have as many ports as the endpoint, {len(endpoints)}")
    if "engine" in given and len(endpoints) > 1:
        raise ValueError("engine= names one rank; give each port a --subscribe of its own")
    return tuple(
        Subscription(
            kind,
            endpoint,
            replay,
            given.get("topic", ""),
            given.get("model", ""),
            given.get("engine", ""),
            rank,
            options.with_prefix(options.LABEL, given),
        )
        for rank, (endpoint, replay) in enumerate(zip(endpoints, replays, strict=True))
    )


def collect(given: tuple[tuple[Subscription, ...], ...]) -> tuple[Subscription, ...]:
    """Return the subscriptions of all flags."""
    found = tuple(one for some in given for one in some)
    if len(found) > MAX_RANKS:
        raise ValueError(f"no more than {MAX_RANKS} publishers can be subscribed to")
    options.check_unique(one.name for one in found)
    return found


def _ranks(place: str) -> list[str]:
    """Return the endpoints of ``place``; its port, or the number that ends its path, may be a range."""
    found = _RANGE.fullmatch(place)
    if found is None:
        return [_endpoint(place)]
    before, low, high = found[1], int(found[2]), int(found[3])
    if not low <= high < low + MAX_RANKS:
        raise ValueError(f"{low}-{high} must rise, over {MAX_RANKS} ports at most")
    return [_endpoint(f"{before}{number}") for number in range(low, high + 1)]


def _endpoint(text: str) -> str:
    port = _PORT.fullmatch(text)
    if port is None and not (text.startswith("ipc://") and len(text) > len("ipc://")):
        raise ValueError(
            f"{text!r} is no endpoint to connect to: tcp://HOST:PORT, tcp://HOST:PORT-PORT or"
            " ipc://PATH"
        )
    if len(text.encode()) > MAX_ENDPOINT:
        raise ValueError(f"{text!r} is longer than the {MAX_ENDPOINT} bytes that a socket takes")
    if port is not None and not 0 < int(port[2]) <= MAX_PORT:
        raise ValueError(f"{text!r}: a port is 1 to {MAX_PORT}")
    return checked_endpoint(text)
