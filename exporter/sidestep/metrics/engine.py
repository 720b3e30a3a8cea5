"""An engine: its identity and labels, its description, and the streams that feed it."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping

from sidestep.catalog.buckets import DEFAULTS
from sidestep.catalog.dialect import Polled
from sidestep.catalog.layout import Layout
from sidestep.metrics.description import Description
from sidestep.metrics.engine_state import EngineState, SeriesSettings
from sidestep.protocol.limits import COUNT_LIMIT
from sidestep.protocol.messages import (
    BOTH,
    CORE_INFO,
    DECODE,
    ENGINE_CORE,
    KV_SAMPLING,
    KV_TRANSFER,
    LIMITS,
    PREFILL,
    REQUEST_EVENTS,
    EngineInfo,
)

ORIGIN = "origin"
"""The label with its identity that an engine gets if an earlier one has the same labels."""
MIN_SAMPLE_RATE = 1e-9
CACHE_CONFIG = "cache_config"
"""Info metric of vLLM's cache."""
MAX_SIZE_DIGITS = 9
_label_versions = itertools.count()


@dataclasses.dataclass(slots=True)
class Feeds:
    """The streams that feed an engine.

    Attributes:
        lost_cores: Streams of its core that are silent or closed.
        front_ends: Streams of front ends that send what users waited, or have sent it until recently.
        contested: Whether another living server had the ids of its server first.
        seen_at: Monotonic time at which the exporter last received anything for it.
        caught_up_at: Monotonic time since which its counters grow as things happen; NaN while a stream
            delivers what it has held.
    """

    streams: set[int] = dataclasses.field(default_factory=set)
    lost_cores: set[str] = dataclasses.field(default_factory=set)
    front_ends: set[str] = dataclasses.field(default_factory=set)
    contested: bool = False
    seen_at: float = 0.0
    caught_up_at: float = 0.0

    def remove(self, incarnation: int, seen_at: float) -> None:
        """Remove a stream from which the exporter last received something at ``seen_at``."""
        self.streams.discard(incarnation)
        self.seen_at = max(self.seen_at, seen_at)


class Engine(EngineState):
    """An engine: its state, with what its processes describe and which of them feed it.

    Only the registry and the code that applies items hold references to it.

    Attributes:
        id: Identity, which is unique in the registry.
        labels: The labels of every series: engine and model_name, and ``origin`` where another
            engine would have the same labels.
        label_version: A number that no other engine has; it changes when the labels may change.
        statistics: The last item of cumulative statistics that the engine's server keeps.
        gauge_stamp: Host-monotonic stamp of the newest gauges applied.
        last_seen: Unix time at which the exporter received the engine's last item.
        live: Whether gauges are exposed; they expire soon after the last stream detaches.
        absent: Whether the server no longer has the engine; nothing of it is exposed then.
        version: The registry's version when this engine last changed.
    """

    def __init__(
        self,
        layout: Layout,
        info: EngineInfo,
        settings: SeriesSettings | None = None,
        *,
        created: float = 0.0,
    ) -> None:
        super().__init__(layout, settings)
        self.id = info.id
        self.labels: dict[str, str] = dict(info.labels)
        self.info: Mapping[str, Mapping[str, str]] = {}
        self.statistics: Polled | None = None
        self.created = created
        self.version = self.label_version = 0
        self.gauge_stamp = self.last_seen = 0.0
        self.feeds = Feeds()
        self.live = True
        self.absent = False
        self.update(info)

    def update(self, info: EngineInfo) -> None:
        """Apply a new Hello; counters continue, except where bounds changed: see ``apply_bounds``."""
        features = frozenset(info.features)
        if ENGINE_CORE in features:
            features |= {REQUEST_EVENTS}
        if (self.description.features - features) & {ENGINE_CORE, REQUEST_EVENTS}:
            self.detach_core()
        core, front = self.description.core_info, self.description.front_info
        if any(name.startswith(CORE_INFO) for name in info.info):
            core = {n.removeprefix(CORE_INFO): labels for n, labels in info.info.items()}
        else:
            front = info.info
        # A front end's labels replace the core's, whichever Hello arrives last.
        self.info = {**core, **front}
        self.renew_label_version()
        sent = {name: tuple(bounds) for name, bounds in info.bounds.items()}
        bounds = {**DEFAULTS, **sent, **self.settings.overrides}
        self.description = Description(core, front, features, info.closed, info.bounds, bounds)
        self.apply_bounds()
        self.start_families()
        self.find_missing()

    def set_info(
        self, core_info: Mapping[str, dict[str, str]], front_info: Mapping[str, dict[str, str]]
    ) -> None:
        """Replace the info metrics."""
        self.description = dataclasses.replace(
            self.description, core_info=core_info, front_info=front_info, encoded_head=b""
        )
        info = {**core_info, **front_info}
        if info != self.info:
            self.info = info
            self.renew_label_version()
        self.find_missing()

    def renew_label_version(self) -> None:
        """Note that the labels may have changed."""
        self.label_version = next(_label_versions)

    @property
    def is_up(self) -> bool:
        """True if streams feed the engine, among them that of its core if it has one."""
        return bool(self.feeds.streams) and not self.feeds.lost_cores

    @property
    def sent_labels(self) -> dict[str, str]:
        """The labels without ``origin``, which the exporter adds."""
        return {name: value for name, value in self.labels.items() if name != ORIGIN}

    @property
    def name(self) -> str:
        """The label ``engine``, or the identity where the dialect has no such label."""
        return self.labels.get("engine") or self.id

    @property
    def own_sample_rate(self) -> float | None:
        """The share of KV blocks that the engine itself samples; None where it does not sample."""
        try:
            rate = float(self.info.get(KV_SAMPLING, {}).get("rate", ""))
        except ValueError:
            return None
        return rate if MIN_SAMPLE_RATE <= rate <= 1.0 else None

    @property
    def role(self) -> str:
        """``PREFILL``, ``DECODE`` or ``BOTH``."""
        role = self.info.get(KV_TRANSFER, {}).get("role", "")
        return role if role in (PREFILL, DECODE) else BOTH

    @property
    def external_is_cached(self) -> bool:
        """True if prompt tokens from outside come from a cache, not from another engine's request."""
        return self.info.get(KV_TRANSFER, {}).get("external") == "cached"

    @property
    def max_running_requests(self) -> int | None:
        """The most requests that fit into the batch; None where the Hello does not have it."""
        return self._limit("max_running_requests")

    @property
    def max_step_tokens(self) -> int | None:
        """The most tokens that a step computes; None where the Hello does not have it."""
        return self._limit("max_step_tokens")

    def _limit(self, name: str) -> int | None:
        try:
            most = int(self.info.get(LIMITS, {}).get(name, ""))
        except ValueError:
            return None
        return most if 0 < most <= COUNT_LIMIT else None

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; 0 where the Hello does not have it."""
        size = self.info.get(CACHE_CONFIG, {}).get("block_size", "")
        return int(size) if size.isdecimal() and len(size) <= MAX_SIZE_DIGITS else 0

    def detach_core(self) -> None:
        """End what depends on the events of the engine's core, which no stream sends any more."""
        for part in [*self.parts.values()]:
            part.detach_core(self)
        self.feeds.lost_cores.clear()
        self.description = dataclasses.replace(self.description, core_info={}, encoded_head=b"")


def distinct_names(engines: Iterable[Engine]) -> Mapping[str, str]:
    """Return names of engines by identity; of replicas, which share their label, the identities."""
    names = {engine.id: engine.name for engine in engines}
    counts = Counter(names.values())
    return {id_: name if counts[name] == 1 else id_ for id_, name in names.items()}
