"""The exporter process: composition, startup, reload and shutdown of its parts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.registry import Collector

from sidestep import __version__
from sidestep.app.from_config import (
    access,
    engine_settings,
    native_histograms,
    series_filter,
)
from sidestep.catalog.engine_pages import NAMES
from sidestep.catalog.prices import Prices
from sidestep.catalog.slo import Objectives
from sidestep.config.scrape_targets import without_secrets
from sidestep.config.settings import Config
from sidestep.diagnosis.own_checks import Installation, OwnChecks
from sidestep.engines.apply import Applier
from sidestep.engines.dialect import Dialects
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.slo import resolve
from sidestep.errors import ConfigError
from sidestep.exposition import renders
from sidestep.exposition.live.view import LiveView
from sidestep.exposition.pages import PageCopier, Pages
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.statistics_log import StatsLog
from sidestep.http.listener import listen
from sidestep.http.routes import Endpoints, application
from sidestep.http.server import HttpServer
from sidestep.ingest import event_loop, plugins
from sidestep.ingest.event_loop import Shutdown
from sidestep.ingest.final_scrape import FinalScrape
from sidestep.ingest.intake import Intake
from sidestep.ingest.socket_loop import Ingest
from sidestep.metrics.engine_series import SeriesSettings
from sidestep.metrics.registry import Accounting, Registry, Tracking
from sidestep.protocol.receiver import Receiver
from sidestep.requests.record_output import RecordOutput
from sidestep.requests.request_log import EngineRequests, request_log
from sidestep.requests.tenants import Tenants
from sidestep.snapshot.schedule import Snapshots
from sidestep.snapshot.state_file import StateDirectory
from sidestep.telemetry import logs
from sidestep.telemetry.self_metrics import SelfMetrics, names, own_registry
from sidestep.tracking.health.step_times import Thresholds
from sidestep.tracking.kv_blocks.lookups import LookupSettings
from sidestep.tracking.kv_blocks.tracker import Sampling
from sidestep.tracking.requests.settings import RequestSettings
from sidestep.transport.guard import PeerGuard
from sidestep.transport.process import calm_collector, raise_open_files, resident
from sidestep.transport.upkeep import MIB, Watchdog

if TYPE_CHECKING:
    from sidestep.otlp.senders import Senders

log = logging.getLogger(__name__)

ABSENT_AFTER = 15.0
"""Seconds without an engine after which a line says how to connect one."""
NOT_DURABLE = (
    "counters start at 0 with this process, and a restart is a counter reset"
    " (--state.dir keeps them across restarts)"
)


class Exporter:
    """One exporter, built from a Config and run by ``running``.

    Args:
        collectors: Collectors of prometheus_client that the page includes.
        dialects: Dialects of the engines that may connect.

    Attributes:
        final_scrape: Detector of the scrape that has the last counts of all engines.
        addresses: Host and port of every HTTP listener, once running.
        endpoints: Ingest endpoints that engines connect to, once running.
        durability: Startup log text on counters across restarts and on the recovered snapshot.
    """

    def __init__(
        self,
        config: Config,
        collectors: Iterable[Collector] = (),
        dialects: Dialects = DIALECTS,
    ) -> None:
        self.config = config
        objectives = resolve(config.slo, dialects, common=config.metrics_common)
        layouts = dialects.layouts(legacy=config.metrics_legacy, common=config.metrics_common)
        request_settings = RequestSettings(
            scheduled=config.intervals_scheduled,
            latency=config.intervals_inter_token,
            capacity=config.requests_max_tracked,
            max_age=config.requests_max_age,
        )
        sampling = Sampling(config.kv_sample_rate, config.kv_scale_samples, config.kv_max_tracked)
        self.series_filter = series_filter(config)
        self.metrics = SelfMetrics()
        self.collectors = own_registry(self.metrics, [*plugins.collectors(), *collectors])
        self.request_log = request_log(config, self.metrics)
        self._outputs: Sequence[RecordOutput] = ()
        if self.request_log is not None:
            self._outputs = self.request_log.outputs
        self.tenants = None
        if config.tenants_by:
            self.tenants = Tenants(config.tenants_by, config.tenants_max, config.tenants_show)
        sink = None
        if self.request_log or self.tenants or objectives:
            sink = functools.partial(EngineRequests, self.request_log, self.tenants)
        self.registry = Registry(
            layouts,
            SeriesSettings(config.buckets, native_histograms(config), Objectives(objectives)),
            Tracking(request_settings, sampling, LookupSettings(config.kv_curve_half_life), sink),
            Accounting(self.tenants, Prices(config.prices_model)),
            reserved=names(self.collectors),
            is_exposed=functools.lru_cache(4096)(self.series_filter.shows),
            wall=time.time,
        )
        if self.tenants is not None:
            self.tenants.replaced = self.registry.hide_tenant
        self.passthrough = PassthroughRegistry(self.registry.names, common=config.metrics_common)
        allowed = access(config)
        watchdog = Watchdog(
            config.limits_memory_soft * MIB, config.limits_memory_hard * MIB, resident
        )
        receiver = Receiver(
            secrets.randbits(63),
            engine_settings(config, objectives),
            durable=bool(config.state_dir),
        )
        self.intake = Intake(
            Applier(self.registry, dialects),
            receiver,
            self.metrics,
            clock=time.monotonic,
            wall=time.time,
            guard=PeerGuard(self.metrics, time.monotonic, allowed.keys, lambda: watchdog.full),
            limits=Thresholds(config.health_min_threshold, config.health_max_threshold),
        )
        self.final_scrape = FinalScrape(self.intake, time.monotonic)
        self.ingest = Ingest(self.intake, allowed, watchdog)
        self.durability = NOT_DURABLE
        self._apply()
        self.addresses: list[tuple[str, int]] = []
        self.http_server = HttpServer(
            config.web_config_file, self.metrics, allowed_hosts=config.web_allowed_hosts
        )

    @property
    def endpoints(self) -> list[str]:
        """Ingest endpoints that engines connect to."""
        return self.ingest.endpoints

    @property
    def url(self) -> str:
        """URL of the metrics page on the first listener, or a text that there is none."""
        if not self.addresses:
            return "no page"
        host, port = self.addresses[0]
        shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host  # noqa: S104
        shown = f"[{shown}]" if ":" in shown else shown
        return f"{self.http_server.scheme}://{shown}:{port}{self.config.web_telemetry_path}"

    def adjust(self, config: Config) -> None:
        """Apply the settings of ``config`` that can change while running, and log the others."""
        before = self.config
        self.config, changed, pending = before.adjusted(config)
        self._apply()
        if self.config.log_level != before.log_level:
            logs.set_level(self.config.log_level)
        log.info("configuration reloaded: %s", ", ".join(changed) or "no changes")
        if pending:
            log.warning("changed settings that need a restart: %s", ", ".join(pending))

    def _apply(self) -> None:
        """Apply the settings that can change while running."""
        config = self.config
        self.intake.receiver.kv_sample_rate = config.kv_sample_rate
        self.registry.sample_blocks(config.kv_sample_rate)
        self.registry.accounting.change_prices(Prices(config.prices_model))
        price = config.prices_gpu_hour
        self.metrics.read("sidestep_gpu_hour_price", lambda: [] if price is None else [((), price)])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Exporter]:
        """Listen, ingest and log until the block ends; then apply all messages that have arrived.

        Raises:
            ConfigError: An address, an endpoint or the state directory is not available.
        """
        async with contextlib.AsyncExitStack() as stack:
            sockets = []
            for host, port in self.config.web_listen_address:
                sockets.append(listen(host, port))
                stack.callback(sockets[-1].close)
            self.addresses = [s.getsockname()[:2] for s in sockets]
            snapshots = self._recover()
            if snapshots is not None:
                stack.callback(snapshots.directory.release)
            copier = PageCopier(
                self.registry,
                self.passthrough,
                self.collectors,
                hold=self.ingest.held,
                snapshots=snapshots,
            )
            senders = self._otlp_senders(copier, snapshots)
            if senders is not None and senders.metrics is not None:
                # Everything has been saved then.
                stack.push_async_callback(senders.metrics.finish)
            stack.callback(self.ingest.leave)
            if snapshots is not None:
                stack.push_async_callback(snapshots.close)
            # Runs before the last snapshot, which then need not hold the records.
            stack.push_async_callback(self._finish_records, senders)
            if snapshots is None:
                stack.callback(self.registry.release_requests)
            for output in self._outputs:
                output.start()
            stack.push_async_callback(self.ingest.wait_closed)
            # Callbacks run in reverse order: the last snapshot holds what this applies.
            stack.callback(self.ingest.drain)
            sources = plugins.sources(self.config, self.intake, self.passthrough)
            self.ingest.open(self.config.ingest_endpoint, sources)
            if sockets:
                await stack.enter_async_context(self._serving(sockets, copier))
            lines = StatsLog(
                self.registry,
                self.intake.health.of,
                pages=lambda: self.passthrough.texts(NAMES),
            ).run(self.config.log_stats_interval)
            stack.callback(_background(lines).cancel)
            stack.callback(_background(self._explain_absence()).cancel)
            if snapshots is not None:
                stack.callback(_background(snapshots.run()).cancel)
            if senders is not None and senders.metrics is not None:
                pushes = senders.metrics.run(self.config.otlp_interval)
                stack.push_async_callback(_cancelled, _background(pushes))
            yield self

    @contextlib.asynccontextmanager
    async def _serving(
        self, sockets: Iterable[socket.socket], copier: PageCopier
    ) -> AsyncIterator[None]:
        """Serve the pages while the block runs."""
        pages = Pages(copier, final_scrape=self.final_scrape, series_filter=self.series_filter)
        live = LiveView(self.intake, lambda: self.endpoints, lambda: pages.scraped_at)
        checks = OwnChecks(
            self.registry,
            live.evaluation,
            self.metrics,
            self._installation,
            scraped_at=lambda: pages.scraped_at,
            refusals=self.intake.refusals,
        )
        endpoints = Endpoints(
            pages,
            lambda: bool(self.endpoints),
            self.intake.health,
            checks,
            view=self.config.web_default_view,
            live=None if self.config.web_disable_ui else live,
        )
        app = application(endpoints, self.config.web_telemetry_path)
        async with self.http_server.serving(app, sockets):
            background = [_background(checks.run())]
            if not self.config.web_disable_ui:
                background.append(_background(live.run()))
            try:
                yield
            finally:
                for task in background:
                    await _cancelled(task)

    async def _explain_absence(self) -> None:
        """Log how to connect an engine, if none has connected."""
        await asyncio.sleep(ABSENT_AFTER)
        if not (self.registry.engines or self.config.has_sources):
            log.warning(
                "no engine has connected for %.0f s: start engines with SIDESTEP_ENDPOINT=%s and sidestep in"
                " their environment, whose logs then say more; `sidestep doctor` checks an installation",
                ABSENT_AFTER,
                " or ".join(self.endpoints),
            )

    def _installation(self) -> Installation:
        config = self.config
        return Installation(
            self.endpoints,
            config.state_dir,
            config.limits_memory_soft,
            has_sources=config.has_sources,
            otlp=without_secrets(config.otlp_endpoint),
            otlp_interval=config.otlp_interval,
        )

    def _otlp_senders(self, copier: PageCopier, snapshots: Snapshots | None) -> Senders | None:
        """Return the senders to OTLP receivers; None: nothing is sent.

        Raises:
            ConfigError: OpenTelemetry's SDK is not installed, or one of its variables is invalid.
        """
        config = self.config
        if not (config.otlp_endpoint or config.otlp_traces_endpoint or config.otlp_logs_endpoint):
            return None
        port = self.addresses[0][1] if self.addresses else 0
        directory = None if snapshots is None else snapshots.directory
        try:
            # Only this feature needs the SDK, which takes 150 ms to load.
            from sidestep.otlp.senders import Senders  # noqa: PLC0415

            return Senders(
                config, copier, self.series_filter, self._outputs, port=port, directory=directory
            )
        except ImportError as error:
            raise ConfigError(
                "--otlp.* needs OpenTelemetry's SDK: pip install '.[otlp]' in a clone of sidestep's"
                f" repository ({error})"
            ) from None

    async def _finish_records(self, senders: Senders | None) -> None:
        """Write and send the last records of requests, for a few seconds."""
        await asyncio.gather(*(asyncio.to_thread(output.close) for output in self._outputs))
        if senders is not None:
            senders.close_records()

    def _recover(self) -> Snapshots | None:
        if not self.config.state_dir:
            return None
        directory = StateDirectory(Path(self.config.state_dir))
        snapshots = Snapshots(directory, self.ingest, self.request_log)
        found = snapshots.recover()
        if self.tenants is None:
            self.registry.drop_tenants()
        else:
            for name in self.tenants.restore(self.registry.requests_by_tenant()):
                self.registry.hide_tenant(name)
        self.durability = f"counters survive restarts, in {self.config.state_dir}; {found}"
        return snapshots


def _background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task whose failure stops the process."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: None if task.cancelled() else task.result())
    return task


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel ``task``, and return when it has ended."""
    task.cancel()
    await asyncio.wait([task])


def on_hangup(exporter: Exporter, reload: Callable[[], Config]) -> None:
    """Reload the configuration of ``exporter``; keep the current one if it is invalid."""
    try:
        config = reload()
    except Exception as error:  # noqa: BLE001 - an invalid file must not stop a running process
        reason = " ".join((str(error) or repr(error)).split())
        log.error("configuration not reloaded, the current one stays in effect: %s", reason)  # noqa: TRY400
    else:
        exporter.adjust(config)


async def _linger(shutdown: Shutdown, exporter: Exporter) -> None:
    """Keep the exporter running until the last counts have been scraped."""
    seconds, done = exporter.config.shutdown_linger, exporter.final_scrape.done
    # Without a page there is no scrape to wait for.
    if seconds and exporter.addresses and not (done() or shutdown.at_once.is_set()):
        log.info("stopping after the next scrape, within %g s (--shutdown.linger)", seconds)
        await shutdown.linger(seconds, done)


async def serve(config: Config, reload: Callable[[], Config] | None = None) -> None:
    """Run an exporter until SIGTERM or SIGINT, then drain and return; see ``--shutdown.linger``.

    ``reload`` reads the settings again on SIGHUP; those that can change while running apply then.

    Raises:
        ConfigError: An address or endpoint is not available.
        RunError: See ``Shutdown.check``.
    """
    shutdown = Shutdown()
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
            event_loop.NAME,
            renders.COMPRESSOR,
            exporter.url,
            ", ".join(exporter.endpoints),
            exporter.durability,
        )
        await shutdown.stop.wait()
        await _linger(shutdown, exporter)
    shutdown.check()
    log.info("drained and stopped")
