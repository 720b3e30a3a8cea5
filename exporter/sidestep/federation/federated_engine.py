"""An engine here that other exporters count: whose words it is the sum of, and what they call it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sidestep.federation.lives import Key, Word
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS
from sidestep.protocol.messages import EngineInfo

Group = tuple[str, str, str, frozenset[tuple[str, str]]]
"""What is one engine here: source (empty where all are one), identity there, dialect, labels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """What a record says that its engine is: as its front ends have it, and its core."""

    info: EngineInfo
    core_info: Mapping[str, Mapping[str, str]]


class Split(NamedTuple):
    """How words add up.

    Attributes:
        rest: Words that only count, and seldom change: of lives that are over, and of sources that
            are silent.
        present: The latest of each other source, in the order in which they are added.
        voices: Those of them whose gauges count.
    """

    rest: list[Word]
    present: list[Word]
    voices: frozenset[Key]

    @property
    def form(self) -> tuple[frozenset[Key], tuple[Key, ...], frozenset[Key]]:
        """What it is told by: another one needs another sum, though no record changed."""
        present = tuple(word.key for word in self.present)
        return frozenset(word.key for word in self.rest), present, self.voices


class Rest(NamedTuple):
    """What words that seldom change come to, and the order that each had."""

    orders: dict[Key, tuple[int, int]]
    record: bytes


@dataclasses.dataclass(slots=True)
class Shown:
    """One engine here.

    Attributes:
        info: As the engine has it.
        words: What it is the sum of, once that is made.
        said: What each of them says of the engine.
        is_told_whole: Its server keeps its totals: each life was told all of them.
        rest: What was made last of words that seldom change.
        form: How the words were split for the last sum.
        present: Sources that are heard, as of then.
        changed: Words that say something else since.
    """

    group: Group
    engine: Engine
    info: EngineInfo
    words: dict[Key, Word] = dataclasses.field(default_factory=dict)
    said: dict[Key, Said] = dataclasses.field(default_factory=dict)
    is_told_whole: bool = False
    rest: Rest | None = None
    form: object = None
    present: int = 0
    changed: int = 0

    def intern(self, key: Key, said: Said) -> Said:
        """``said``, or what another word has said that is the same: exporters of one engine agree."""
        known = self.said.get(key)
        if known == said:
            return said if known is None else known
        distinct = {id(each): each for each in self.said.values()}.values()
        return next((each for each in distinct if each == said), said)


def latest(words: Iterable[Word]) -> list[Word]:
    """The words that say how an engine is: each source's latest, those that are live at the end."""
    found: dict[str, Word] = {}
    for word in words:
        known = found.get(word.source)
        if not word.is_sum and (known is None or (word.live, word.life) > (known.live, known.life)):
            found[word.source] = word
    return sorted(found.values(), key=lambda word: (word.live, word.source))


def counted(words: Iterable[Word], *, is_told_whole: bool) -> list[Word]:
    """Those of ``words`` that add up."""
    if not is_told_whole:
        return list(words)
    each = list(words)
    return [*latest(each), *(word for word in each if word.is_of_several)]


def split(words: Mapping[Key, Word], *, is_told_whole: bool) -> Split:
    """How ``words`` of one engine add up.

    Gauges are those of live words; of words of which none is, since nobody is shown them.
    """
    each = latest(words.values())
    heard = [word for word in each if not word.silent] or each
    present = sorted(heard, key=lambda word: word.key)
    taken = {word.key for word in present}
    added = counted(words.values(), is_told_whole=is_told_whole)
    rest = sorted((word for word in added if word.key not in taken), key=lambda word: word.key)
    voices = [word.key for word in present if word.live] or [word.key for word in present]
    return Split(rest, present, frozenset(voices))


def gone(words: Iterable[Word], now: float) -> list[list[Word]]:
    """Words of each source of which nothing was heard for long, the longest silent first."""
    sources: dict[str, list[Word]] = {}
    for word in words:
        sources.setdefault(word.source, []).append(word)
    since = {source: max(word.since for word in each) for source, each in sources.items()}
    heard = {source: max(word.heard for word in each) for source, each in sources.items()}
    found = [
        source
        for source, each in sources.items()
        if all(word.silent for word in each)
        and now - since[source] >= ENGINE_EXPIRES_SECONDS
        and not all(word.is_sum for word in each)
    ]
    return [sources[source] for source in sorted(found, key=lambda source: heard[source])]


def described(name: str, said: Mapping[Key, Said]) -> EngineInfo:
    """What an engine called ``name`` is, of which several have ``said`` something.

    It is the same whoever was the last; dialect and labels are those of all.
    """
    distinct = list({id(said[key]): said[key].info for key in sorted(said)}.values())
    closed: dict[str, list[str]] = {}
    for info in distinct:
        for label, values in info.closed.items():
            known = closed.setdefault(label, [])
            known += [value for value in values if value not in known]
    return EngineInfo(
        name,
        distinct[0].dialect,
        distinct[0].labels,
        {label: of for info in distinct for label, of in info.info.items()},
        dict(_common(distinct)),
        sorted({feature for info in distinct for feature in info.features}),
        closed,
    )


def inform(engine: Engine, said: Mapping[Key, Said], order: Sequence[Word]) -> None:
    """Let ``engine`` have the info metrics of all who say how it is; the later ones' stand."""
    heads = [said[word.key] for word in order]
    engine.core_info = {name: dict(of) for head in heads for name, of in head.core_info.items()}
    engine.front_info = {name: of for head in heads for name, of in head.info.info.items()}
    info = {**engine.core_info, **engine.front_info}
    if info != engine.info:
        engine.info = info
        engine.renew_label_version()


def _common(infos: Sequence[EngineInfo]) -> Iterator[tuple[str, list[float]]]:
    """Bounds that all have who have any, by bucket family: up to them each count is exact.

    Where there is none, those of the first stand.
    """
    for family in sorted({family for info in infos for family in info.bounds}):
        told = [info.bounds[family] for info in infos if family in info.bounds]
        shared = set(told[0]).intersection(*told[1:])
        yield family, [bound for bound in told[0] if bound in shared] or told[0]
