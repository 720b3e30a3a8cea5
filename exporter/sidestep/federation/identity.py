"""How an engine that other exporters count gets its place among those here, and loses it again."""

from __future__ import annotations

from hashlib import blake2b

from sidestep.errors import WireError
from sidestep.federation.federated_engine import Group, Said, Shown, latest
from sidestep.federation.lives import Word
from sidestep.ingest.hello_limits import check as check_engines
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, MAX_ENGINES, Registry
from sidestep.protocol.limits import MAX_LABEL_CHARS
from sidestep.protocol.messages import EngineInfo, check_engine, check_printable
from sidestep.protocol.records import Head


def said_in(registry: Registry, word: Word, head: Head) -> Said:
    """What the record of ``word`` says that its engine is, under all labels that it has got.

    Raises:
        WireError: An engine cannot be that.
    """
    told = head.engine
    info = EngineInfo(
        word.engine,
        told.dialect,
        # Where a label's name is taken, what the engine itself says stands.
        {**word.labels, **told.labels},
        told.info,
        _bounds(registry, head),
        told.features,
        told.closed,
    )
    check_engine(info)
    check_printable(text for of in head.core_info.values() for text in of.values())
    return Said(info, head.core_info)


def group_of(word: Word, said: Said, *, merge: bool) -> Group:
    """Which engine here ``word`` counts for; with ``merge`` whoever its source is."""
    scope = "" if merge else word.source
    return scope, word.engine, said.info.dialect, frozenset(said.info.labels.items())


def new_shown(registry: Registry, group: Group, word: Word, info: EngineInfo) -> Shown:
    """An engine of which ``word`` is the first that is told; it has no place yet.

    Raises:
        WireError: It cannot have one.
    """
    if info.id in registry.engines or info.id in registry.retired:
        raise WireError("engine_conflict", f"{info.id} is there already")
    registry.check(info)
    check_engines(registry, 0, [info])
    if word.standing.former and len(registry.retired) >= MAX_ENGINES:
        # Whoever counts remembers it; what is remembered here alone must not go for it.
        registry.limited["engines"] += 1
        raise WireError("over_limit", f"more than {MAX_ENGINES} engines that are gone")
    layout = registry.layouts[info.dialect]
    engine = Engine(layout, info, registry.overrides, registry.native)
    engine.federated = True
    engine.live = False
    engine.seen_at = word.since
    return Shown(group, engine, info)


def name_of(registry: Registry, group: Group, word: Word) -> str:
    """An identity that nobody has: readable, and the same each time."""
    scope, identity, _, labels = group
    parts = (scope, identity, *(f"{n}={v}" for n, v in sorted(word.labels.items())))
    name = "/".join(part for part in parts if part)
    if len(name) > MAX_LABEL_CHARS or name in registry.engines or name in registry.retired:
        digest = blake2b(repr((parts, sorted(labels))).encode(), digest_size=8).hexdigest()
        name = f"{name[: MAX_LABEL_CHARS - len(digest) - 1]}/{digest}"
    return name


def settle(registry: Registry, shown: Shown, now: float) -> None:
    """Let the engine be as its latest words say.

    Raises:
        WireError: It should be shown, and there is no room for it.
    """
    engine = shown.engine
    present = latest(shown.words.values())
    streams = {word.life for word in present if word.standing.up and not word.silent}
    live = any(word.live for word in present)
    absent = bool(present) and all(word.standing.absent for word in present)
    told = {n: v for word in present for n, v in word.standing.readings.items()}
    engine.seen_at = max(word.since for word in shown.words.values())
    if (engine.streams, engine.live, engine.absent, engine.computed) != (
        streams,
        live,
        absent,
        told,
    ):
        engine.streams, engine.live, engine.absent = streams, live, absent
        engine.computed = told
        registry.touch(engine)
    gone = not present or all(word.standing.former for word in present)
    if gone or (not streams and (absent or now - engine.seen_at >= ENGINE_EXPIRES_SECONDS)):
        if engine.id in registry.engines:
            registry.retire(engine)
    elif engine.id in registry.retired:
        if len(registry.engines) >= MAX_ENGINES:
            registry.limited["engines"] += 1
            raise WireError("over_limit", f"more than {MAX_ENGINES} engines")
        registry.restore(engine)


def is_known(registry: Registry, shown: Shown) -> bool:
    """Whether the engine is shown or remembered."""
    there = registry.engines, registry.retired
    return any(engines.get(shown.engine.id) is shown.engine for engines in there)


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
