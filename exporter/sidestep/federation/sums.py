"""What an engine that other exporters count comes to, by their words: made apart, in small steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence

from msgspec.structs import replace

from sidestep.errors import WireError
from sidestep.federation.federated_engine import (
    Rest,
    Said,
    Shown,
    Split,
    counted,
    described,
    inform,
    latest,
    split,
)
from sidestep.federation.lives import Key, Word
from sidestep.federation.summing import Sum
from sidestep.ingest.hello_limits import check_described, excess
from sidestep.metrics.record_codec import decode_in_parts
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.records import Record


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A sum that is complete, and of what; nobody sees it before it is put in place.

    Attributes:
        words: What ``shown`` is the sum of then, with what each says of the engine.
    """

    shown: Shown
    words: Mapping[Key, Word]
    said: Mapping[Key, Said]
    split: Split
    info: EngineInfo
    sum: Sum
    rest: Rest | None


def make(
    registry: Registry,
    shown: Shown,
    words: Mapping[Key, Word],
    said: Mapping[Key, Said],
    decoded: Mapping[Key, Record],
) -> Generator[None, None, Made]:
    """Add up ``words``, of which the records in ``decoded`` need not be decoded.

    Raises:
        WireError: What they say of the engine together is too large.
    """
    how = split(words, is_told_whole=shown.is_told_whole)
    info = info_of(shown, said)
    if info != shown.info:
        check_described(registry, info)
    total = Sum(registry, info, shown.engine if info == shown.info else None)
    rest = yield from _rest(registry, shown, info, how.rest)
    if rest is not None:
        record = yield from decode_in_parts(rest.record)
        yield from total.add(record, gauges=False)
    for word in how.present:
        known = decoded.get(word.key)
        record = known or (yield from decode_in_parts(word.record))
        yield from total.add(record, gauges=word.key in how.voices)
        yield
    yield from total.keep(shown.engine)
    return Made(shown, words, said, how, info, total, rest)


def put(registry: Registry, made: Made) -> WireError | None:
    """Let the engine show what was made.

    Returns:
        What is wrong with families that describe themselves, which are left out.
    """
    shown, engine = made.shown, made.shown.engine
    shown.words, shown.said = dict(made.words), dict(made.said)
    shown.rest, shown.form, shown.changed = made.rest, made.split.form, 0
    shown.present = len(made.split.present)
    if made.info != shown.info:
        engine.update(made.info)
        shown.info = made.info
    engine.excess_bytes = excess(registry, made.info)
    inform(engine, made.said, latest(made.words.values()))
    return made.sum.show(registry, engine)


def info_of(shown: Shown, said: Mapping[Key, Said]) -> EngineInfo:
    """What the engine is, of which words have ``said`` that."""
    known = shown.said
    is_same = len(said) == len(known) and all(known.get(key) is each for key, each in said.items())
    if is_same and shown.info.id == shown.engine.id:
        return shown.info
    return described(shown.engine.id, said)


def total_of(
    registry: Registry, shown: Shown, words: Sequence[Word], said: Mapping[Key, Said]
) -> Generator[None, None, bytes]:
    """The record of all that ``words`` counted, as one of the engine."""
    labels = said[words[-1].key].info.labels
    words = counted(words, is_told_whole=shown.is_told_whole)
    # A record may have other labels in it: it is to be read under those of the last again.
    if len(words) == 1 and said[words[0].key].info.labels == labels:
        return words[0].record
    info = info_of(shown, {word.key: said[word.key] for word in words})
    return (yield from _added(registry, replace(info, labels=dict(labels)), words))


def _rest(
    registry: Registry, shown: Shown, info: EngineInfo, words: Sequence[Word]
) -> Generator[None, None, Rest | None]:
    """What ``words`` come to: what is known of them already, and the others."""
    if not words:
        return None
    orders = {word.key: word.order for word in words}
    known = shown.rest
    if known is not None and (info != shown.info or not known.orders.items() <= orders.items()):
        known = None
    if known is not None and len(known.orders) == len(orders):
        return known
    base = b"" if known is None else known.record
    more = [word for word in words if known is None or word.key not in known.orders]
    return Rest(orders, (yield from _added(registry, info, more, base)))


def _added(
    registry: Registry, info: EngineInfo, words: Sequence[Word], base: bytes = b""
) -> Generator[None, None, bytes]:
    total = Sum(registry, info)
    for raw in (*filter(None, [base]), *(word.record for word in words)):
        record = yield from decode_in_parts(raw)
        yield from total.add(record, gauges=False)
        yield
    return total.encoded()
