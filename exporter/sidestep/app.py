"""Composition: the parts of one exporter process, and how long they live."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from prometheus_client.registry import Collector

from sidestep import __version__, logs, loops
from sidestep.catalogue import DIALECTS
from sidestep.choice import Choice
from sidestep.ending import Ending
from sidestep.engine import ORIGIN
from sidestep.errors import ConfigError
from sidestep.forwarding.forward import Forwarder
from sidestep.forwarding.told import Present
from sidestep.histograms.native import Native
from sidestep.http import application
from sidestep.ingest import Ingest
from sidestep.intake import Intake
from sidestep.lifecycle.rules import Rules
from sidestep.plan import Layout, compile_layout
from sidestep.registry import Registry, Sampling
from sidestep.saving.durable import StateDirectory
from sidestep.saving.snapshots import Snapshots
from sidestep.selfmetrics import SelfMetrics, names, own_registry
from sidestep.serving import packing
from sidestep.serving.scrapes import Pages
from sidestep.settings.config import Config
from sidestep.signals.objectives import Objectives
from sidestep.sources import Source
from sidestep.statslog import StatsLog
from sidestep.transport.access import Access
from sidestep.transport.guard import Guard
from sidestep.transport.process import calm_collector, raise_open_files, resident
from sidestep.transport.watchdog import MIB, Watchdog
from sidestep.web.front import Front
from sidestep.wire.messages import Objective, Settings

log = logging.getLogger(__name__)

SOURCES_GROUP = "sidestep.sources"
"""Entry points of what brings items by itself: functions of the configuration and the intake that
return ``sources.Source`` objects."""
COLLECTORS_GROUP = "sidestep.collectors"
"""Entry points of a user's own prometheus_client collectors: classes or functions without
arguments that return one."""


NO_PROMISE = (
    "counters start anew with this process, its own end is a counter reset"
    " (--state.dir lets them outlive it)"
)


class Exporter:
    """One exporter: made from a Config, alive inside ``running``.

    Attributes:
        registry: Engines and their series.
        choice: What of them pages show.
        metrics: The exporter's own numbers.
        addresses: Host and port of every listener, once running.
        endpoints: Where engines connect, once running.
        promise: What the end of this process does to counters, and what it went on with.
    """

    def __init__(self, config: Config, collectors: Iterable[Collector] = ()) -> None:
        self.config = config
        shown = {"legacy": config.metrics_legacy, "common": config.metrics_common}
        layouts = {name: compile_layout(name, **shown) for name in DIALECTS}
        rules = Rules(
            scheduled=config.intervals_scheduled,
            latency=config.intervals_inter_token,
            capacity=config.requests_max_tracked,
            max_age=config.requests_max_age,
        )
        sampling = Sampling(config.kv_sample_rate, config.kv_scale_samples, config.kv_max_tracked)
        self.registry = Registry(
            layouts,
            config.buckets,
            rules,
            sampling,
            _native(config),
            objectives=Objectives(config.slo),
        )
        self.choice = chosen(config)
        self.registry.shows = functools.lru_cache(4096)(self.choice.shows)
        self.metrics = SelfMetrics()
        allowed = access(config)
        watchdog = Watchdog(
            config.limits_memory_soft * MIB, config.limits_memory_hard * MIB, resident
        )
        self.intake = Intake(
            self.registry,
            self.metrics,
            boot=secrets.randbits(63),
            clock=time.monotonic,
            wall=time.time,
            guard=Guard(self.metrics, time.monotonic, allowed.keys, lambda: watchdog.full),
            merge=config.forward_merge,
        )
        _check_labels(config, layouts)
        self.intake.receiver.settings = _settings(config)
        self.ingest = Ingest(self.intake, allowed, watchdog)
        self.promise = NO_PROMISE
        self._set_sample_rate()
        self.collectors = own_registry(self.metrics, [*installed_collectors(), *collectors])
        self.registry.reserved = names(self.collectors)
        self.addresses: list[tuple[str, int]] = []
        self.front = Front(config.web_config_file, self.metrics)

    @property
    def endpoints(self) -> list[str]:
        """Where engines connect."""
        return self.ingest.endpoints

    @property
    def url(self) -> str:
        """The metrics page, by the first listener; in words, where nobody is served."""
        if not self.addresses:
            return "no page"
        host, port = self.addresses[0]
        shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host  # noqa: S104
        shown = f"[{shown}]" if ":" in shown else shown
        return f"{self.front.scheme}://{shown}:{port}{self.config.web_telemetry_path}"

    def adjust(self, config: Config) -> None:
        """Take over what of ``config`` can change while running; say what has and what cannot."""
        before = self.config
        self.config, taken, left = before.adjusted(config)
        # Unchanged as well: a share that has halved itself is whole again.
        self._set_sample_rate()
        if self.config.log_level != before.log_level:
            logs.set_level(self.config.log_level)
        log.info("configuration read again: %s", ", ".join(taken) or "nothing to change")
        if left:
            log.warning("differs from what is running, needs a restart: %s", ", ".join(left))

    def _set_sample_rate(self) -> None:
        self.intake.receiver.kv_sample_rate = self.config.kv_sample_rate
        self.registry.sample_blocks(self.config.kv_sample_rate)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Exporter]:
        """Listen, ingest and log until the block ends; then apply what has arrived.

        Raises:
            ConfigError: An address, an endpoint or the state directory cannot be had.
        """
        async with contextlib.AsyncExitStack() as stack:
            sockets = []
            for host, port in self.config.web_listen_address:
                sockets.append(listen(host, port))
                stack.callback(sockets[-1].close)
            self.addresses = [s.getsockname()[:2] for s in sockets]
            snapshots = self._recover()
            forwarder = self._forwarder(snapshots)
            if forwarder is not None:
                # After the last snapshot and the last acknowledgement: all there is may be told.
                stack.push_async_callback(forwarder.close)
            stack.callback(self.ingest.leave)
            if snapshots is not None:
                stack.push_async_callback(snapshots.close)
            stack.push_async_callback(self.ingest.wait_closed)
            # Runs before what was pushed before it: the last snapshot holds what it applies.
            stack.callback(self.ingest.drain)
            sources = installed_sources(self.config, self.intake)
            self.ingest.open(self.config.ingest_endpoint, sources)
            if sockets:
                await stack.enter_async_context(self._serving(sockets, snapshots))
            lines = StatsLog(self.registry).run(self.config.log_stats_interval)
            stack.callback(_background(lines).cancel)
            if snapshots is not None:
                stack.callback(_background(snapshots.run()).cancel)
            if forwarder is not None:
                telling = _background(forwarder.run(self.config.forward_interval))
                stack.push_async_callback(_cancelled, telling)
            yield self

    def _serving(
        self, sockets: Iterable[socket.socket], snapshots: Snapshots | None
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """The pages, while the block lasts."""
        pages = Pages(
            self.registry,
            self.collectors,
            self.metrics,
            self.endpoints,
            snapshots,
            choice=self.choice,
        )
        path, view = self.config.web_telemetry_path, self.config.web_default_view
        app = application(pages, path, lambda: bool(self.endpoints), view)
        return self.front.serving(app, sockets)

    def _forwarder(self, snapshots: Snapshots | None) -> Forwarder | None:
        config = self.config
        if not config.forward:
            return None
        source = config.forward_source or socket.gethostname()
        if source.partition(".")[0] in ("", "localhost"):
            raise ConfigError("--forward.source: this host has no name of its own; give one")
        self.intake.forwarded.own = source, self.intake.life
        records = Present() if snapshots is None else snapshots.records
        labels = dict(config.forward_label)
        return Forwarder(self.intake, config.forward, source, records, labels)

    def _recover(self) -> Snapshots | None:
        if not self.config.state_dir:
            return None
        directory = StateDirectory(Path(self.config.state_dir))
        snapshots = Snapshots(directory, self.ingest)
        found = snapshots.recover()
        self.promise = f"counters outlive this process, in {self.config.state_dir}; {found}"
        return snapshots


def _background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose failure is the process's."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: None if task.cancelled() else task.result())
    return task


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel ``task``, and return when it has ended."""
    task.cancel()
    await asyncio.wait([task])


def _check_labels(config: Config, layouts: Mapping[str, Layout]) -> None:
    """Whether series can have the labels that forwarding adds.

    Raises:
        ConfigError: Some have one of that name.
    """
    for name, _ in config.forward_label:
        if name in (ORIGIN, "le", "quantile") or any(
            name in layout.own_labels | layout.required for layout in layouts.values()
        ):
            raise ConfigError(f"--forward.label {name}: engines' series have a label of that name")


def _native(config: Config) -> Native | None:
    if config.histograms == "classic":
        return None
    return Native(config.schemas, time.time, both=config.histograms == "both")


def _settings(config: Config) -> Settings:
    return Settings(
        {family: list(bounds) for family, bounds in config.buckets.items()},
        config.intervals_scheduled,
        config.intervals_inter_token,
        config.requests_max_tracked,
        config.requests_max_age,
        config.kv_scale_samples,
        config.kv_max_tracked,
        None if config.histograms == "classic" else dict(config.schemas),
        # How requests end is read off the engine's own counters, which are in what is folded.
        [Objective(o.name, list(o.families), o.threshold) for o in config.slo if o.families],
    )


def chosen(config: Config) -> Choice:
    """What of the engines' series ``config`` wants on pages."""
    return Choice(
        dropped=frozenset(config.metrics_drop_label),
        allow=config.metrics_allow,
        deny=config.metrics_deny,
        thinning=config.metrics_bucket_thinning,
        kept=config.shown_buckets,
    )


def access(config: Config) -> Access:
    """Who may connect by ``config``.

    Raises:
        ConfigError: A key, directory or group cannot be had, or one key is missing.
    """
    return Access.of(
        config.ingest_curve_key,
        config.ingest_authorized_keys,
        config.ingest_ipc_group,
        plain_tcp=config.ingest_allow_plain_tcp,
    )


def installed_collectors() -> list[Collector]:
    """What other installed packages register under ``sidestep.collectors``.

    Raises:
        ConfigError: One of them cannot be made, or there is none to do what is asked for.
    """
    found: list[Collector] = []
    for point in entry_points(group=COLLECTORS_GROUP):
        try:
            found.append(point.load()())
        except Exception as error:
            raise ConfigError(f"collector {point.name}: {error!r}") from error
    return found


def installed_sources(config: Config, intake: Intake) -> list[Source]:
    """What installed packages, ours among them, register under ``sidestep.sources``.

    Raises:
        ConfigError: One of them cannot be made.
    """
    found: list[Source] = []
    # A package that was installed in two ways registers the same twice.
    points = {point.value: point for point in entry_points(group=SOURCES_GROUP)}
    for point in points.values():
        try:
            found += point.load()(config, intake)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"source {point.name}: {error!r}") from error
    if (config.subscribe or config.scrape or config.triton) and not found:
        raise ConfigError(
            "nothing here can subscribe or poll: install sidestep anew, with its entry points"
        )
    return found


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; an empty host is all addresses.

    Raises:
        ConfigError: The address is taken, not ours, or unknown.
    """
    shown = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # All addresses of both families through one socket, where the host has IPv6.
        found.sort(key=lambda entry: entry[0] == socket.AF_INET6, reverse=not host)
        family, _, _, _, address = found[0]
        dual = family == socket.AF_INET6 and not host
        return socket.create_server(
            address[:2], family=family, backlog=128, dualstack_ipv6=dual and socket.has_ipv6
        )
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {shown}: {reason}") from None


def on_hangup(exporter: Exporter, reload: Callable[[], Config]) -> None:
    """Adjust ``exporter`` to its configuration; where that cannot be read all stays as it was."""
    try:
        config = reload()
    except Exception as error:  # noqa: BLE001 - no file may end a process that runs well
        reason = " ".join((str(error) or repr(error)).split())
        log.error("configuration not read again, all stays as it was: %s", reason)  # noqa: TRY400
    else:
        exporter.adjust(config)


async def serve(config: Config, reload: Callable[[], Config] | None = None) -> None:
    """Run an exporter until SIGTERM or SIGINT, then drain and return.

    Args:
        config: All settings.
        reload: Reads them again; SIGHUP then applies what can change while running.

    Raises:
        ConfigError: An address or endpoint cannot be had.
        RunError: See ``Ending.check``.
    """
    ending = Ending()
    raise_open_files()
    exporter = Exporter(config)
    if reload is not None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, on_hangup, exporter, reload)
    async with exporter.running():
        calm_collector()
        log.info(
            "sidestep %s on %s and %s: metrics on %s, engines connect to %s; %s",
            __version__,
            loops.LIBRARY,
            packing.LIBRARY,
            exporter.url,
            ", ".join(exporter.endpoints),
            exporter.promise,
        )
        await ending.stop.wait()
    ending.check()
    log.info("drained and stopped")
