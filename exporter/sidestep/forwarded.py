"""Engines that other exporters count: what these say, as series of this one's pages.

What the lives of one source said of one engine adds up to an engine here, whose gauges are those
of its latest life. Engines of two sources are two, unless the operator wants those of one
identity to be one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b

from sidestep.descriptions import check as check_engines
from sidestep.descriptions import check_described, excess
from sidestep.engine import ORIGIN, Engine
from sidestep.errors import WireError
from sidestep.folded import check as check_record
from sidestep.merge import sum_up
from sidestep.records import decode_record, encode_record, totals_of
from sidestep.registry import GONE, MAX_ENGINES, SILENT, Registry
from sidestep.session.lives import Key, Lives, Word
from sidestep.wire.forwarded import Forward
from sidestep.wire.limits import MAX_LABEL_CHARS
from sidestep.wire.messages import EngineInfo, check_engine, check_printable
from sidestep.wire.totals import Head, Record

Group = tuple[str, str, str, frozenset[tuple[str, str]]]
"""What is one engine here: source (empty where all are one), identity there, dialect, labels."""


@dataclasses.dataclass(slots=True)
class _Shown:
    """One engine here.

    Attributes:
        words: What it is the sum of.
        rest: Orders of words that change no more, and their sum.
    """

    engine: Engine
    info: EngineInfo
    words: dict[Key, Word] = dataclasses.field(default_factory=dict)
    rest: tuple[list[tuple[Key, tuple[int, int]]], Record] | None = None

    @property
    def present(self) -> list[Word]:
        """The words that say how the engine is: each source's latest, those that are live at the end."""
        latest: dict[str, Word] = {}
        for word in self.words.values():
            known = latest.get(word.source)
            if not word.is_sum and (
                known is None or (word.live, word.life) > (known.live, known.life)
            ):
                latest[word.source] = word
        return sorted(latest.values(), key=lambda word: (word.live, word.source))


class Forwarded:
    """What other exporters told of, and the engines here that show it.

    Args:
        merge: Whether engines of one identity are one, whoever counts them.

    Attributes:
        lives: What they said.
        own: Source and life of this exporter: what comes back to it is not counted again.
    """

    def __init__(self, registry: Registry, *, merge: bool = False) -> None:
        self.lives = Lives()
        self.merge = merge
        self.own = ("", 0)
        self._registry = registry
        self._shown: dict[Group, _Shown] = {}
        self._groups: dict[Key, Group] = {}

    def take(self, message: Forward, now: float) -> Word | None:
        """What ``message`` says that is new; to be applied before the next message is taken."""
        if (message.source, message.life) == self.own:
            return None
        word = self.lives.take(message, now)
        if word is not None:
            word.silent = now - word.heard >= SILENT
        return word

    def apply(self, word: Word, now: float) -> None:
        """Let ``word`` stand in place of what its life said before.

        Raises:
            WireError: It cannot be shown, and what was said before stands; or of the families
                that describe themselves some are left out.
        """
        known = self.lives.find(word.key)
        if (
            known is not None
            and known.record == word.record
            and known.labels == word.labels
            and word.key in self._groups
        ):
            self.lives.put(word)
            shown = self._shown[self._groups[word.key]]
            shown.words[word.key] = word
            self._settle(shown, now)
            return
        record = decode_record(word.record)
        group, shown, info = self._place(word, record)
        try:
            self.lives.put(word)
        except WireError:
            if not shown.words:
                self._drop(group)
            raise
        # Not before it stands: other bounds cost what was counted by those of before.
        self._describe(shown, info)
        self._bind(word, group, shown, now)
        refused = self._sum(shown, {word.key: record})
        self._fold(word, now)
        self._settle(shown, now)
        if refused is not None:
            raise refused

    def restore(self, word: Word, name: str, *, origin: bool, shown: bool) -> None:
        """Take over a snapshot's word; its engine's gauges wait until its source is heard.

        Raises:
            WireError: It cannot be shown.
        """
        record = decode_record(word.record)
        group, found, info = self._place(word, record, name)
        engine = found.engine
        if origin:
            engine.labels[ORIGIN] = engine.id
        self.lives.put(word)
        self._describe(found, info)
        self._bind(word, group, found, word.heard)
        self._sum(found, {word.key: record})
        engine.heard = max(engine.heard, word.heard)
        if shown:
            self._settle(found, word.heard)

    def engine_of(self, word: Word) -> Engine:
        """The engine here that shows ``word``."""
        return self._shown[self._groups[word.key]].engine

    def pass_time(self, now: float) -> None:
        """Notice which sources have fallen silent, and which engines nobody remembers any more."""
        silent = [w for w in self.lives if not w.silent and now - w.heard >= SILENT]
        for word in silent:
            word.silent = True
        for group in {self._groups[word.key] for word in silent}:
            self._settle(self._shown[group], now)
        there = self._registry.engines, self._registry.kept
        for group, shown in list(self._shown.items()):
            if not any(engines.get(shown.engine.id) is shown.engine for engines in there):
                self._drop(group)

    def clear(self) -> None:
        """Forget all there is; the registry has been cleared."""
        self.lives = Lives()
        self._shown.clear()
        self._groups.clear()

    @property
    def sources(self) -> int:
        """Exporters that are heard."""
        return len({word.source for word in self.lives if not word.silent})

    def _place(
        self, word: Word, record: Record, name: str = ""
    ) -> tuple[Group, _Shown, EngineInfo]:
        """The engine that shows ``word``, and what that says of it; a new one is not shown yet."""
        registry, said = self._registry, record.head.engine
        # Where a label's name is taken, what the engine itself says stands.
        labels = {**word.labels, **said.labels}
        scope = "" if self.merge else word.source
        group = (scope, word.engine, said.dialect, frozenset(labels.items()))
        shown = self._shown.get(group)
        name = name or (shown.engine.id if shown is not None else self._name(group, word))
        info = EngineInfo(
            name,
            said.dialect,
            labels,
            said.info,
            _bounds(registry, record.head),
            said.features,
            said.closed,
        )
        check_engine(info)
        core_info = record.head.core_info
        check_printable(text for said in core_info.values() for text in said.values())
        if shown is None:
            if name in registry.engines or name in registry.kept:
                raise WireError("engine_conflict", f"{name} is there already")
            registry.check(info)
            check_engines(registry, 0, [info])
            if word.standing.former and len(registry.kept) >= MAX_ENGINES:
                # Whoever counts remembers it; what is remembered here alone must not go for it.
                registry.limited["engines"] += 1
                raise WireError("over_limit", f"more than {MAX_ENGINES} engines that are gone")
            layout = registry.layouts[info.dialect]
            shown = _Shown(Engine(layout, info, registry.overrides, registry.native), info)
            shown.engine.forwarded = True
            shown.engine.live = False
            check_record(shown.engine, record)
            self._shown[group] = shown
            registry.kept[name] = shown.engine
        else:
            check_record(shown.engine, record)
            if info != shown.info:
                check_described(registry, info)
        return group, shown, info

    def _describe(self, shown: _Shown, info: EngineInfo) -> None:
        """Let the engine be what a word that stands says that it is."""
        if info != shown.info:
            shown.engine.update(info)
            shown.info = info
        shown.engine.excess = excess(self._registry, info)

    def _name(self, group: Group, word: Word) -> str:
        """An identity that nobody has: readable, and the same each time."""
        scope, identity, _, labels = group
        parts = (scope, identity, *(f"{n}={v}" for n, v in sorted(word.labels.items())))
        name = "/".join(part for part in parts if part)
        registry = self._registry
        if len(name) > MAX_LABEL_CHARS or name in registry.engines or name in registry.kept:
            digest = blake2b(repr((parts, sorted(labels))).encode(), digest_size=8).hexdigest()
            name = f"{name[: MAX_LABEL_CHARS - len(digest) - 1]}/{digest}"
        return name

    def _bind(self, word: Word, group: Group, shown: _Shown, now: float) -> None:
        """Let ``word`` count there, and not any more where its life's last word did."""
        before = self._groups.get(word.key)
        self._groups[word.key] = group
        shown.words[word.key] = word
        if before is not None and before != group:
            self._shown[before].words.pop(word.key)
            self._lessen(before, now)

    def _lessen(self, group: Group, now: float) -> None:
        """A word that counted there does no more."""
        shown = self._shown[group]
        if shown.words:
            self._sum(shown, {})
            self._settle(shown, now)
        else:
            self._drop(group)

    def _drop(self, group: Group) -> None:
        """Forget an engine, and all that was said of it."""
        shown = self._shown.pop(group)
        self.lives.drop(shown.words.values())
        for key in shown.words:
            del self._groups[key]
        self._registry.discard(shown.engine)

    def _sum(self, shown: _Shown, decoded: dict[Key, Record]) -> WireError | None:
        """Add up what the words of an engine say; what is wrong with some families."""
        present = shown.present
        latest = {word.key for word in present}
        records = [decoded.get(word.key) or decode_record(word.record) for word in present]
        others = [word for key, word in shown.words.items() if key not in latest]
        if any(record.totals.looked for record in records):
            # A server that keeps its own totals told each life all of them.
            others = []
        counted = [self._rest(shown, others)] if others else []
        _inform(shown.engine, [record.head for record in records])
        return sum_up(self._registry, shown.engine, counted, records)

    def _rest(self, shown: _Shown, words: Sequence[Word]) -> Record:
        """What ``words``, which seldom change, come to."""
        orders = [(word.key, word.order) for word in words]
        if shown.rest is None or shown.rest[0] != orders:
            shown.rest = orders, decode_record(self._total(shown, words))
        return shown.rest[1]

    def _total(self, shown: _Shown, words: Sequence[Word]) -> bytes:
        """The record of all that ``words`` counted."""
        records = [decode_record(word.record) for word in words]
        if any(record.totals.looked for record in records):
            return max(words, key=lambda word: word.life).record
        registry = self._registry
        apart = Registry(registry.layouts, registry.overrides, native=registry.native)
        engine = Engine(shown.engine.layout, shown.info, registry.overrides, registry.native)
        sum_up(apart, engine, records, [])
        engine.core_info = shown.engine.core_info
        return encode_record(engine, totals_of(engine))

    def _fold(self, word: Word, now: float) -> None:
        """Make one sum of the oldest lives where there are too many to tell apart."""
        words = self.lives.excess(word.source, word.engine)
        if not words:
            return
        groups = {self._groups[old.key] for old in words}
        group = self._groups[words[-1].key]
        shown = self._shown[group]
        total = self.lives.sum_up(words, self._total(shown, words))
        for old in words:
            self._shown[self._groups.pop(old.key)].words.pop(old.key)
        self._groups[total.key] = group
        shown.words[total.key] = total
        for changed in groups:
            self._lessen(changed, now)

    def _settle(self, shown: _Shown, now: float) -> None:
        """Let the engine be as its latest words say."""
        engine, registry = shown.engine, self._registry
        present = shown.present
        streams = {word.life for word in present if word.standing.up and not word.silent}
        live = any(word.live for word in present)
        absent = bool(present) and all(word.standing.absent for word in present)
        told = {n: v for word in present for n, v in word.standing.readings.items()}
        engine.heard = max(word.heard for word in shown.words.values())
        if (engine.streams, engine.live, engine.absent, engine.told) != (
            streams,
            live,
            absent,
            told,
        ):
            engine.streams, engine.live, engine.absent = streams, live, absent
            engine.told = told
            registry.touch(engine)
        gone = not present or all(word.standing.former for word in present)
        if gone or (not streams and (absent or now - engine.heard >= GONE)):
            if engine.id in registry.engines:
                registry.retire(engine)
        elif engine.id in registry.kept:
            if len(registry.engines) >= MAX_ENGINES:
                registry.limited["engines"] += 1
                raise WireError("over_limit", f"more than {MAX_ENGINES} engines")
            registry.recall(engine)


def _inform(engine: Engine, heads: Sequence[Head]) -> None:
    """Let ``engine`` have the info metrics of all who say how it is; the later ones' stand."""
    if not heads:
        return
    engine.core_info = {name: said for head in heads for name, said in head.core_info.items()}
    engine.front_info = {name: said for head in heads for name, said in head.engine.info.items()}
    info = {**engine.core_info, **engine.front_info}
    if info != engine.info:
        engine.info = info
        engine.look_anew()


def _bounds(registry: Registry, head: Head) -> dict[str, list[float]]:
    """What bucket families have as bounds where the engine is counted."""
    found = dict(head.engine.bounds)
    layout = registry.layouts.get(head.engine.dialect)
    if layout is None:
        raise WireError("unknown_dialect", head.engine.dialect)
    rows = dict(zip(layout.histogram_names, layout.histograms, strict=True))
    for name, bounds in zip(head.histograms, head.bounds, strict=True):
        row = rows.get(name)
        if row is not None and row.buckets:
            found[row.buckets] = bounds
    return found
