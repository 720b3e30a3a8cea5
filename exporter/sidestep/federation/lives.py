"""What other exporters said: the last word of each life about each engine.

Counts are cumulative within a *life*, which an exporter begins when it starts at 0: a later word
replaces an earlier one, so that nothing is lost when words are, and nothing doubled when they
come twice. What lives of one source said of one engine adds up. A word names its source and its
life from end to end: exporters on the way pass it on as it came.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sidestep.errors import WireError
from sidestep.federation.messages import Forward, Standing, check_size

MAX_LIVES = 16
"""Of one source and engine that are told apart; what older ones said becomes one sum."""
MAX_SUMMED = 1024
"""Lives that are known one by one to be in a sum, the latest of them."""
MAX_WORDS = 4096
MAX_BYTES = 96 << 20
"""Of all records."""
SPARE = 4
"""Times as many have to find a place as there are, for those to wait that will become one."""
MAX_INCOMPLETE_BYTES = 32 << 20
"""Of records of which pieces are missing."""
PIECE_COST = 4 << 10
"""Bytes, of them, that a piece takes beside what it holds: it may hold nothing."""
SUM = 0
"""In place of a life: the sum of those that are not told apart any more."""
NOBODY = "\n"
"""Begins the name under which a sum of several sources stands: no exporter is called that."""

LIFE_BITS = 20
"""Of a life's number that are random; those above are the milliseconds at which it began."""

NO_ROOM = "other exporters tell of more than there is room for"

Key = tuple[str, str, int]
"""Source, engine, life."""
Order = tuple[int, int]
"""Run and seq of a word: what is higher is newer."""


@dataclasses.dataclass(slots=True)
class Word:
    """What a life said last of an engine.

    Attributes:
        record: Encoded.
        heard: Monotonic time here when the source itself said so.
        silent: That was so long ago that nothing of it can be taken for the state of now.
        summed: Of the latest lives that a sum has in it, each with its source, the last word that
            it had, or that was refused since.
        until: The latest life in a sum that is not among these.
        restored: Monotonic time at which a snapshot gave it to this process, if one did.
        arrived: At which it came here.
    """

    source: str
    engine: str
    life: int
    order: Order
    record: bytes
    standing: Standing
    labels: Mapping[str, str]
    heard: float
    silent: bool = False
    summed: dict[tuple[str, int], Order] = dataclasses.field(default_factory=dict)
    until: int = 0
    restored: float = -math.inf
    arrived: float = -math.inf

    @property
    def since(self) -> float:
        """From when on its source is silent: while this process was not there nobody was heard."""
        return max(self.heard, self.restored)

    @property
    def key(self) -> Key:
        """Whose word it is, and about which engine."""
        return self.source, self.engine, self.life

    @property
    def is_sum(self) -> bool:
        """Whether it stands for lives that are not told apart any more."""
        return self.life == SUM

    @property
    def is_of_several(self) -> bool:
        """Whether it is a sum of several sources."""
        return self.source.startswith(NOBODY)

    @property
    def live(self) -> bool:
        """Whether its gauges say how the engine is."""
        return self.standing.live and not self.silent


@dataclasses.dataclass(slots=True)
class _Incomplete:
    order: Order
    wanted: int
    pieces: dict[int, bytes] = dataclasses.field(default_factory=dict)


def new_life(wall: float, chance: int) -> int:
    """The number of a life that begins at the Unix time ``wall``: later ones are larger."""
    return int(wall * 1000) << LIFE_BITS | chance % (1 << LIFE_BITS)


class Lives:
    """All words that count.

    Attributes:
        most: Lives of one source and engine that are told apart.
        bytes: Of all records.
    """

    def __init__(self) -> None:
        self.most = MAX_LIVES
        self._words: dict[tuple[str, str], dict[int, Word]] = {}
        self._sums: dict[str, dict[str, Word]] = {}
        """Those of several sources, by engine and name."""
        self._incomplete: dict[Key, _Incomplete] = {}
        self._count = self.bytes = self._incomplete_bytes = 0

    def __iter__(self) -> Iterator[Word]:
        for words in self._words.values():
            yield from words.values()

    def __len__(self) -> int:
        return self._count

    def of(self, source: str, engine: str) -> list[Word]:
        """What lives of ``source`` said of ``engine``."""
        return list(self._words.get((source, engine), {}).values())

    def find(self, key: Key) -> Word | None:
        """The word that stands for a life about an engine."""
        source, engine, life = key
        return self._words.get((source, engine), {}).get(life)

    def take(self, message: Forward, now: float) -> Word | None:
        """The word that ``message`` makes whole, if it is new; it does not stand yet.

        Raises:
            WireError: Its record is larger than one may be.
        """
        key = message.source, message.engine, message.life
        order = message.run, message.seq
        if not self._is_new(key, order):
            return None
        record = self._whole(key, order, message)
        if record is None:
            return None
        check_size(len(record))
        known = self.find(key)
        heard = now - message.age
        if known is not None:
            heard = max(heard, known.heard)
        return Word(*key, order, record, message.standing, message.labels, heard, arrived=now)

    def check(self, word: Word) -> None:
        """Whether there is room for ``word``.

        Raises:
            WireError: There is none.
        """
        known = self.find(word.key)
        size = self.bytes + len(word.record) - (0 if known is None else len(known.record))
        if size > MAX_BYTES or (known is None and self._count >= MAX_WORDS):
            raise WireError("over_limit", NO_ROOM)

    def put(self, word: Word) -> Word | None:
        """Let ``word`` stand, unless a newer one does; the one that it replaced.

        Raises:
            WireError: There is no room for it; the one before it still stands.
        """
        known = self.find(word.key)
        if not self._is_new(word.key, word.order):
            return known
        self.check(word)
        self._add(word)
        return known

    def _add(self, word: Word) -> None:
        known = self.find(word.key)
        self.bytes += len(word.record) - (0 if known is None else len(known.record))
        self._count += known is None
        self._words.setdefault((word.source, word.engine), {})[word.life] = word
        if word.is_of_several:
            self._sums.setdefault(word.engine, {})[word.source] = word

    def drop(self, words: Iterable[Word]) -> None:
        """Forget ``words``: nobody shows them any more."""
        for word in words:
            lives = self._words.get((word.source, word.engine), {})
            found = lives.pop(word.life, None)
            if found is not None:
                self.bytes -= len(found.record)
                self._count -= 1
            if not lives:
                self._words.pop((word.source, word.engine), None)
            sums = self._sums.get(word.engine, {})
            sums.pop(word.source, None)
            if not sums:
                self._sums.pop(word.engine, None)

    def sum_with(self, key: Key) -> Word | None:
        """The sum that has a life's counts, or may have them: of its source, or of several."""
        source, engine, life = key
        words = self._words.get((source, engine), {})
        if life in words:
            return None
        several = list(self._sums.get(engine, {}).values())
        sums = [words[SUM], *several] if SUM in words else several
        found = (word for word in sums if (source, life) in word.summed)
        # A clock that was set back makes lives of one source look earlier than they are.
        return next(found, next((word for word in several if life <= word.until), None))

    def is_crowded(self, source: str, engine: str) -> bool:
        """Whether more lives than are told apart have said something of ``engine``."""
        words = self._words.get((source, engine), {})
        return len(words) - (SUM in words) > self.most

    def excess(self, source: str, engine: str, silence: float, patience: int) -> list[Word]:
        """Words that should become one: the sum and the oldest lives, where they are too many.

        Args:
            source: Whose lives they are.
            engine: Of which they said something.
            silence: Monotonic moment: a life of which a word came since may go on, and have more to
                say, however long ago a clock or an exporter on the way lets it seem.
            patience: As many times ``most`` are told apart for the sake of such.
        """
        # By when they were heard: a clock that was set back makes a life's number lower.
        words = sorted(self.of(source, engine), key=lambda word: (not word.is_sum, word.heard))
        lives = [word for word in words if not word.is_sum]
        oldest = lives[: max(len(lives) - self.most, 0)]
        over = [word.life for word in oldest if word.arrived <= silence]
        going_on = [word.life for word in oldest if word.life not in over]
        over += going_on[: max(len(lives) - len(over) - patience * self.most, 0)]
        return [word for word in words if word.is_sum or word.life in over] if over else []

    @property
    def has_room(self) -> bool:
        """Whether words may wait that will become one: others' have to find a place as well."""
        return SPARE * self._count <= MAX_WORDS and SPARE * self.bytes <= MAX_BYTES

    def replace(self, words: Sequence[Word], total: Word) -> None:
        """Let ``total`` stand in place of ``words``, which it is the sum of.

        Raises:
            WireError: There is no room for it; ``words`` still stand.
        """
        size = self.bytes + len(total.record) - sum(len(word.record) for word in words)
        if size > MAX_BYTES:
            raise WireError("over_limit", NO_ROOM)
        self.drop(words)
        self._add(total)

    def _is_new(self, key: Key, order: Order) -> bool:
        known = self.find(key)
        return known is None or known.order < order

    def _whole(self, key: Key, order: Order, message: Forward) -> bytes | None:
        """The record that ``message`` completes."""
        found = self._incomplete.get(key)
        if found is not None and found.order > order:
            return None
        if found is not None and (found.order < order or found.wanted != message.pieces):
            self._abandon(key)
            found = None
        if message.pieces == 1:
            return message.data
        if found is None:
            found = self._incomplete[key] = _Incomplete(order, message.pieces)
        if message.piece not in found.pieces:
            found.pieces[message.piece] = message.data
            self._incomplete_bytes += PIECE_COST + len(message.data)
        if len(found.pieces) == message.pieces:
            self._abandon(key)
            return b"".join(piece for _, piece in sorted(found.pieces.items()))
        while self._incomplete_bytes > MAX_INCOMPLETE_BYTES:
            self._abandon(next(iter(self._incomplete)))
        return None

    def _abandon(self, key: Key) -> None:
        found = self._incomplete.pop(key)
        self._incomplete_bytes -= sum(PIECE_COST + len(data) for data in found.pieces.values())


def summed(words: Sequence[Word], record: bytes, name: str = "") -> Word:
    """The word that can stand in place of ``words``.

    Args:
        words: Those of ``Lives.excess``, or all of sources that are gone, with the sum of that
            name; the labels are those of the last.
        record: What they come to.
        name: In place of a source's, where they are of several.
    """
    lives = {(word.source, word.life): word.order for word in words if not word.is_sum}
    known = {pair: order for word in words for pair, order in word.summed.items()} | lives
    # Of those that are too many it is the earliest that nobody knows any more.
    pairs = sorted(known, key=lambda pair: pair[1])
    left, pairs = pairs[:-MAX_SUMMED], pairs[-MAX_SUMMED:]
    return dataclasses.replace(
        words[-1],
        source=name or words[-1].source,
        life=SUM,
        order=(0, len(lives) + sum(word.order[1] for word in words if word.is_sum)),
        record=record,
        standing=Standing(),
        silent=True,
        summed={pair: known[pair] for pair in pairs},
        until=max([word.until for word in words] + [life for _, life in left]),
    )
