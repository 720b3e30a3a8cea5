"""Log lines on engines that connect, leave, return or are refused.

``HealthMonitor`` logs engines that fall silent, and their return.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from sidestep.metrics.engine import Engine
from sidestep.metrics.exposed_engines import MAX_ENGINES
from sidestep.metrics.registry import Registry
from sidestep.protocol.limits import printable
from sidestep.protocol.messages import VERSIONS
from sidestep.protocol.receiver import Receiver
from sidestep.protocol.stream import Stream, StreamState
from sidestep.telemetry.logs import RateLimitedLog

log = logging.getLogger(__name__)

REMEDIES = {
    "version": "install the same release of sidestep here and in the engine's environment",
    "unauthorised": "check the engine's key, and its file in --ingest.authorized-keys",
    "over_limit": "connect fewer engines to this exporter, or give it more memory",
    "unknown_dialect": "install the same release of sidestep here and in the engine's environment",
    "changed_dialect": "set SIDESTEP_NAMESPACE, so that each engine has a name of its own",
    "id_conflict": "read the log of the engine, which has stopped sending",
    "not_printable": "give it another name (of a model: --served-model-name), without line breaks, control"
    " characters and spaces other than the plain one",
}
"""Remedy of a refusal, by its reason; the text of other refusals contains it."""

REFUSED_SENDERS = 8
"""Senders and reasons with lines of their own; a sender may name itself as it likes."""
NEW = "its counters start at 0"
SAVED = "its counters go on from the saved state"
GOES_ON = "its counters go on"


@dataclasses.dataclass(slots=True)
class _Known:
    """State of an engine by the lines so far.

    Attributes:
        streams: Names of the streams that feed it, by incarnation.
        last: Incarnations that fed it last, while there are none.
        is_saved: Whether it is from a snapshot and has not connected since.
        has_left: Whether its last stream was closed.
    """

    streams: dict[int, str] = dataclasses.field(default_factory=dict)
    last: frozenset[int] = frozenset()
    is_saved: bool = False
    has_left: bool = False


class ConnectionLog:
    """Follows which streams feed the engines that are counted here.

    Engines of sources in this process have no lines: the sources have their own. An engine has one line
    of each kind in a minute, by ``clock``.
    """

    def __init__(self, registry: Registry, receiver: Receiver, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._receiver = receiver
        self._known: dict[str, _Known] = {}
        self._lines = RateLimitedLog(log, 3 * MAX_ENGINES, clock)
        self._refusals = RateLimitedLog(log, REFUSED_SENDERS, clock)
        self.refusals: dict[str, str] = {}
        """Last refusal by reason: the sender, and what was refused."""

    def restored(self, streams: Iterable[Stream]) -> None:
        """Note that the engines of ``streams`` are from a snapshot."""
        for stream in streams:
            for info in stream.engines:
                known = self._known.setdefault(info.id, _Known(is_saved=True))
                known.last |= {stream.incarnation}

    def refused(self, sender: str, reason: str, text: str) -> None:
        """Log that ``sender``, or what it sent, is refused, and what to do about it."""
        remedy = REMEDIES.get(reason)
        self.refusals[reason] = f"{printable(sender)}: {printable(text)}"
        self._refusals.warning(
            f"{reason} {sender}",
            "refused %s: %s%s",
            printable(sender),
            printable(text),
            f"; {remedy}" if remedy else "",
            fields={"event": "refused", "sender": printable(sender), "reason": reason},
        )

    def conflict(self, stream: Stream, rival: Stream) -> None:
        """Log that the living process of ``rival`` has the ids that the sender of ``stream`` claims."""
        self._lines.warning(
            f"conflict {stream.id}",
            "two living processes claim the ids of stream %s: %s and %s; the second one counts as"
            " stream %s; set SIDESTEP_NAMESPACE, so that each server has a name of its own",
            rival.id,
            rival.process or "a process",
            stream.process or "another process",
            stream.id,
            fields={"event": "conflict", "id": stream.id, "other": rival.id},
        )

    def lost(self, stream: Stream, items: int) -> None:
        """Log that the sender of ``stream`` no longer had items that are not applied."""
        self._lines.warning(
            f"lost {stream.id}",
            "stream %s: %d items are lost: its sender no longer had them",
            stream.id,
            items,
            fields={"event": "lost", "sender": stream.id},
        )

    def update(self) -> None:
        """Log what has changed; call it about once a second."""
        for engine in self._registry.engines.values():
            known = self._known.get(engine.id)
            before = frozenset() if known is None else known.streams.keys()
            if engine.feeds.streams != before and not engine.absent:
                self._changed(engine, known)
        for name in self._known.keys() - self._registry.engines.keys():
            if name not in self._registry:
                # Its counters would start at 0.
                del self._known[name]

    def _changed(self, engine: Engine, known: _Known | None) -> None:
        streams = {
            stream.incarnation: stream
            for stream in self._receiver.streams.values()
            if stream.incarnation in engine.feeds.streams
        }
        if any(stream.state is StreamState.LOCAL for stream in streams.values()):
            return
        names = {incarnation: stream.id for incarnation, stream in streams.items()}
        if known is None:
            known = self._known[engine.id] = _Known()
            self._log_connected(engine, names, NEW)
        elif not known.streams:
            self._log_return(engine, names, known)
        elif not names:
            known.last = frozenset(known.streams)
            known.has_left = self._is_closed(known.streams.values())
            if known.has_left:
                text = "engine %s has left: its process has closed the connection"
                self._log("left", engine, text, engine.id)
        else:
            self._log_streams(engine, known.streams, names)
        known.streams = names

    def _log_return(self, engine: Engine, names: dict[int, str], known: _Known) -> None:
        is_new = known.last.isdisjoint(names)
        is_saved, known.is_saved = known.is_saved, False
        was_silent = not (is_saved or known.has_left)
        known.has_left = False
        if is_new or not was_silent:
            where = SAVED if is_saved else GOES_ON
            self._log_connected(engine, names, f"a new process, {where}" if is_new else where)

    def _log_connected(self, engine: Engine, names: dict[int, str], where: str) -> None:
        versions = engine.info.get(VERSIONS, {})
        model = engine.labels.get("model_name", "")
        streams = sorted(names.values())
        parts = [
            *([f"model {model}"] if model else ()),
            *(f"{name} {version}" for name, version in versions.items()),
            f"stream{'s' * (len(streams) > 1)} {', '.join(streams)}",
        ]
        self._log(
            "connected",
            engine,
            "engine %s has connected: %s; %s",
            engine.id,
            ", ".join(parts),
            where,
            versions=versions,
            streams=streams,
            counters=where,
        )

    def _log_streams(self, engine: Engine, before: dict[int, str], now: dict[int, str]) -> None:
        come = {name for incarnation, name in now.items() if incarnation not in before}
        gone = {name for incarnation, name in before.items() if incarnation not in now}
        changes = {
            "has a new process": come & gone,
            "has connected": come - gone,
            "has left": {name for name in gone - come if self._is_closed([name])},
        }
        parts = [
            f"{'stream' if len(names) == 1 else 'streams'} {', '.join(sorted(names))} {what}"
            for what, names in changes.items()
            if names
        ]
        if parts:
            text = "engine %s: %s; streams that feed it: %d"
            streams = sorted(now.values())
            self._log(
                "streams", engine, text, engine.id, ", ".join(parts), len(now), streams=streams
            )

    def _is_closed(self, names: Collection[str]) -> bool:
        streams = map(self._receiver.streams.get, names)
        return all(stream is None or stream.state is StreamState.CLOSED for stream in streams)

    def _log(self, event: str, engine: Engine, text: str, *arguments: object, **more: Any) -> None:
        fields = {
            "event": event,
            "id": engine.id,
            "engine": engine.name,
            "model": engine.labels.get("model_name", ""),
            "dialect": engine.layout.dialect,
            **more,
        }
        self._lines.info(f"{event} {engine.id}", text, *arguments, fields=fields)
