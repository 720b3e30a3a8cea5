"""Engines that other exporters count: what these say, as series of this one's pages.

What the lives of one source said of one engine adds up to an engine here, whose gauges are those
of its latest life. Engines of two sources are two, unless the operator wants those of one
identity to be one.

To add up takes many small steps, between which others have their turn; nothing is changed before
the last of them. The steps of one word end before those of the next one begin.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from hashlib import blake2b

from msgspec.structs import replace

from sidestep.errors import WireError
from sidestep.federation.board import Board, Changes
from sidestep.federation.federated_engine import Group, Said, Shown, gone
from sidestep.federation.identity import group_of, is_known, name_of, new_shown, said_in, settle
from sidestep.federation.lives import NOBODY, SPARE, Lives, Word, summed
from sidestep.federation.messages import Forward
from sidestep.federation.sums import total_of
from sidestep.ingest.hello_limits import check_described
from sidestep.metrics.engine import ORIGIN, Engine
from sidestep.metrics.record_codec import decode_in_parts, decode_record
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS, MAX_ENGINES, Registry
from sidestep.metrics.validate_record import check as check_record
from sidestep.metrics.validate_record import check_in_parts
from sidestep.protocol.records import Record

PATIENCE = 2
MAX_GONE = 256
"""Sources of one engine that are told apart though they are gone: they may come back."""
AT_ONCE = 256
"""Words that are added up in a second, about, because a sum has waited; likewise because lives are over."""


class Forwarded:
    """What other exporters told of, and the engines here that show it.

    Args:
        merge: Whether engines of one identity are one, whoever counts them.

    Attributes:
        lives: What they said.
        own: Source and life of this exporter: what comes back to it is not counted again.
        patience: Times as many lives as ``Lives.most`` are told apart while something comes of them.
    """

    def __init__(self, registry: Registry, *, merge: bool = False) -> None:
        self.lives = Lives()
        self.merge = merge
        self.own = ("", 0)
        self.patience = PATIENCE
        self._registry = registry
        self._board = Board(registry, self.lives)
        self._fallen: dict[Group, None] = {}
        """Engines of which a source has fallen silent."""
        self._restored: dict[Group, bool] = {}
        """Those of a snapshot, and whether they were shown."""
        self._crowded: dict[tuple[str, str], float] = {}
        """Sources and engines with lives that are too many, and from when on some may be over."""

    def take(self, message: Forward, now: float) -> Word | None:
        """What ``message`` says that is new; to be applied before the next message is taken.

        Raises:
            WireError: It cannot be counted any more, or is too large.
        """
        if (message.source, message.life) == self.own:
            return None
        total = self.lives.sum_with((message.source, message.engine, message.life))
        if total is not None:
            self._check_folded(total, message)
            return None
        word = self.lives.take(message, now)
        if word is not None:
            word.silent = now - word.heard >= GAUGES_EXPIRE_SECONDS
        return word

    def apply(self, word: Word, now: float) -> Iterator[None]:
        """Let ``word`` stand in place of what its life said before.

        Raises:
            WireError: It cannot be shown, and what was said before stands; or of the families
                that describe themselves some are left out.
        """
        if self._is_same(word):
            known = self.lives.put(word)
            shown = self._board.of(word.key)
            shown.words[word.key] = word
            settle(self._registry, shown, now)
            is_other = known is None or (known.silent, known.live) != (word.silent, word.live)
            if is_other and self._board.is_due(shown):
                yield from self._board.add_up(shown)
            return
        self.lives.check(word)
        record = yield from decode_in_parts(word.record)
        said = said_in(self._registry, word, record.head)
        group = group_of(word, said, merge=self.merge)
        shown = self._board.shown.get(group) or self._new(group, word, said)
        if shown.said.get(word.key) != said:
            check_described(self._registry, replace(said.info, id=shown.engine.id))
        yield from check_in_parts(shown.engine, record)
        refused = yield from self._let_stand(shown, word, said, record, now)
        yield from self._fold_old(word.source, word.engine, now)
        if refused is not None:
            raise refused

    def restore(self, word: Word, name: str, *, origin: bool, shown: bool) -> None:
        """Take over a snapshot's word; ``restored`` is to be called after the last one.

        Raises:
            WireError: It cannot be shown.
        """
        record = decode_record(word.record)
        said = said_in(self._registry, word, record.head)
        group = group_of(word, said, merge=self.merge)
        found = self._board.shown.get(group) or self._new(group, word, said, name)
        check_record(found.engine, record)
        self.lives.put(word)
        if self.lives.is_crowded(word.source, word.engine):
            self._crowded[word.source, word.engine] = word.arrived + GAUGES_EXPIRE_SECONDS
        self._board.enter(found)
        engine = found.engine
        if origin:
            engine.labels[ORIGIN] = engine.id
        found.is_told_whole |= bool(record.totals.looked)
        self._board.bind(found, word, said)
        engine.seen_at = max(engine.seen_at, word.since)
        self._restored[group] = shown

    def restored(self, now: float) -> None:
        """Show what snapshot's words come to; gauges wait until a source is heard.

        Raises:
            WireError: Of the last engine of which something cannot be shown; all others are.
        """
        refused: WireError | None = None
        restored, self._restored = self._restored, {}
        for group, is_shown in restored.items():
            try:
                for _ in self._board.add_up(self._board.shown[group]):
                    pass
                if is_shown:
                    settle(self._registry, self._board.shown[group], now)
            except WireError as error:
                refused = error
        if refused is not None:
            raise refused

    def engine_of(self, word: Word) -> Engine:
        """The engine here that shows ``word``."""
        return self._board.of(word.key).engine

    def pass_time(self, now: float) -> None:
        """Notice which sources have fallen silent, and which engines nobody remembers any more."""
        silent = [w for w in self.lives if not w.silent and now - w.heard >= GAUGES_EXPIRE_SECONDS]
        for word in silent:
            word.silent = True
        self._fallen.update((self._board.groups[word.key], None) for word in silent)
        for group, shown in list(self._board.shown.items()):
            if not is_known(self._registry, shown):
                self._board.drop(group)

    def catch_up(self, now: float) -> Iterator[None]:
        """Let engines be as those say who have not fallen silent; add up what has waited for more.

        About once a second, after ``pass_time``; of sources that are gone some become one sum.

        Raises:
            WireError: See ``apply``; what comes after it waits for the next time.
        """
        while self._fallen:
            group, _ = self._fallen.popitem()
            if group in self._board.shown:
                settle(self._registry, self._board.shown[group], now)
                self._board.is_due(self._board.shown[group])
                yield
        room = AT_ONCE
        while self._board.stale and room > 0:
            shown = self._board.shown[next(iter(self._board.stale))]
            room -= len(shown.words)
            yield from self._board.add_up(shown)
        room = AT_ONCE
        while self._crowded and room > 0:
            pair, due = next(iter(self._crowded.items()))
            if now < due and self._has_room:
                break
            del self._crowded[pair]
            there = {id(s): s for s in (self._board.of(w.key) for w in self.lives.of(*pair))}
            room -= sum(len(shown.words) for shown in there.values()) or 1
            yield from self._fold_old(*pair, now)
        for shown in [s for s in self._board.shown.values() if len(s.words) > MAX_GONE]:
            yield from self._fold_gone(shown, now)

    def clear(self) -> None:
        """Forget all there is; the registry has been cleared."""
        self.lives = Lives()
        self._board = Board(self._registry, self.lives)
        self._fallen.clear()
        self._restored.clear()
        self._crowded.clear()

    def _check_folded(self, total: Word, message: Forward) -> None:
        """Whether ``total`` has all that ``message`` says; what is lost is so once.

        Raises:
            WireError: It says more, and nobody can tell what.
        """
        process, order = (message.source, message.life), (message.run, message.seq)
        known = total.summed.get(process)
        if known is None:
            # Of a source that is gone it is most likely what an exporter on the way says again.
            is_known = message.age >= GAUGES_EXPIRE_SECONDS
        else:
            is_known = order <= known
            total.summed[process] = max(order, known)
        if not is_known:
            text = "was gone for so long, or began anew so often, that its counts are part of a sum"
            anew = "restart it with an empty --state.dir, and it begins anew"
            raise WireError("folded", f"{message.source} {text}; {anew}")

    @property
    def _has_room(self) -> bool:
        """Whether lives may wait that will become a sum: with a label each, each is an engine."""
        engines = len(self._registry.engines) + len(self._registry.retired)
        return self.lives.has_room and SPARE * engines <= MAX_ENGINES

    @property
    def sources(self) -> int:
        """Exporters that are heard."""
        return len({word.source for word in self.lives if not word.silent})

    def _is_same(self, word: Word) -> bool:
        """Whether it says what the word before it said."""
        known = self.lives.find(word.key)
        return (
            known is not None
            and known.record == word.record
            and known.labels == word.labels
            and word.key in self._board.groups
        )

    def _new(self, group: Group, word: Word, said: Said, name: str = "") -> Shown:
        """An engine that is not there yet."""
        name = name or name_of(self._registry, group, word)
        return new_shown(self._registry, group, word, replace(said.info, id=name))

    def _let_stand(
        self, shown: Shown, word: Word, said: Said, record: Record, now: float
    ) -> Generator[None, None, WireError | None]:
        """Let ``word`` count for ``shown``, and not any more where its life's last word did.

        Returns:
            What is wrong with families that describe themselves, which are left out.
        """
        shown.is_told_whole |= bool(record.totals.looked)
        before = self._board.shown.get(self._board.groups.get(word.key, shown.group), shown)
        is_there = shown.group in self._board.shown
        if before is shown and is_there and self._board.may_wait(shown):
            self.lives.put(word)
            self._board.bind(shown, word, said)
            shown.changed += 1
            settle(self._registry, shown, now)
            return None
        new = {word.key: word}, {word.key: shown.intern(word.key, said)}
        decoded = {word.key: record}
        made: Changes = [(shown, (yield from self._board.changed(shown, set(), *new, decoded)))]
        if before is not shown:
            made.append((before, (yield from self._board.changed(before, {word.key}))))
        if any(
            self._board.is_gone(each) for each in (shown, before) if is_there or each is not shown
        ):
            # Nobody remembers it any more: it is there again, but by this word alone.
            yield from self.apply(word, now)
            return None
        self.lives.put(word)
        self._board.enter(shown)
        return self._board.put(made, now)

    def _fold_old(self, source: str, engine: str, now: float) -> Iterator[None]:
        """Make one sum of lives that are over, where there are too many; later of those that may go on."""
        pair = source, engine
        self._crowded.pop(pair, None)
        patience = self.patience if self._has_room else 1
        yield from self._fold(self.lives.excess(*pair, now - GAUGES_EXPIRE_SECONDS, patience), now)
        if self.lives.is_crowded(*pair):
            self._crowded[pair] = now + GAUGES_EXPIRE_SECONDS

    def _fold_gone(self, shown: Shown, now: float) -> Iterator[None]:
        """Make one sum of the sources that are gone for longest, where there are too many."""
        sources = gone(shown.words.values(), now)
        if len(sources) <= MAX_GONE or all(word.silent for word in shown.words.values()):
            return
        # Some more than have to: what is left is added up anew.
        some = sources[: len(sources) - MAX_GONE + MAX_GONE // 4]
        name = NOBODY + blake2b(repr(sorted(shown.group[3])).encode(), digest_size=8).hexdigest()
        before = [word for word in shown.words.values() if word.source == name]
        yield from self._fold([*before, *(word for words in some for word in words)], now, name)

    def _fold(self, words: Sequence[Word], now: float, name: str = "") -> Iterator[None]:
        """Make one sum of ``words``, called ``name`` or as the last of them."""
        if not words:
            return
        there = {word.key: self._board.of(word.key) for word in words}
        told = {key: shown.said[key] for key, shown in there.items()}
        shown = there[words[-1].key]
        record = yield from total_of(self._registry, shown, words, told)
        total = summed(words, record, name)
        new = {total.key: total}, {total.key: told[words[-1].key]}
        changes: Changes = [(shown, (yield from self._board.changed(shown, told.keys(), *new)))]
        for other in {each.group: each for each in there.values() if each is not shown}.values():
            changes.append((other, (yield from self._board.changed(other, told.keys()))))
        if any(self.lives.find(word.key) is not word for word in words):
            # Some of them were forgotten meanwhile.
            return
        self.lives.replace(words, total)
        for key in told:
            del self._board.groups[key]
        self._board.put(changes, now)
