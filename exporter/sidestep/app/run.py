"""Startup, reload and shutdown of an exporter."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidestep import __version__
from sidestep.app.exporter import Exporter
from sidestep.app.from_config import access
from sidestep.catalog.engine_pages import NAMES
from sidestep.config.settings import Config
from sidestep.diagnosis.own_checks import OwnChecks
from sidestep.errors import ConfigError
from sidestep.exposition import renders
from sidestep.exposition.live.view import LiveView
from sidestep.exposition.pages import PageCopier, Pages
from sidestep.exposition.statistics_log import StatsLog
from sidestep.exposition.timeline import Timelines
from sidestep.http.listener import listen
from sidestep.http.routes import Endpoints, application
from sidestep.ingest import event_loop, plugins
from sidestep.ingest.event_loop import Shutdown
from sidestep.snapshot.schedule import Snapshots
from sidestep.snapshot.state_file import StateDirectory
from sidestep.transport.process import calm_collector, raise_open_files, return_large_blocks

if TYPE_CHECKING:
    from sidestep.otlp.senders import Senders

log = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.0005
"""Seconds for which another thread, such as the pages', may keep the interpreter from the event loop.

Python's 5 ms apply to each system call of a request, after which the loop waits for the interpreter.
"""
ABSENT_AFTER = 15.0
"""Seconds without an engine after which a line says how to connect one."""


def check(exporter: Exporter) -> None:
    """Check what an exporter would use, without a start; it has read the files that settings name.

    Raises:
        ConfigError: A source, an endpoint or the state directory cannot be used.
    """
    config = exporter.config
    plugins.sources(config, exporter.intake, exporter.passthrough)
    for endpoint in config.ingest_endpoint:
        access(config).check(endpoint)
    if config.state_dir:
        path = Path(config.state_dir)
        try:
            found = next(each for each in (path, *path.parents) if each.exists())
        except OSError as error:
            raise ConfigError(f"--state.dir {path}: {error.strerror}") from None
        if not found.is_dir() or not os.access(found, os.W_OK | os.X_OK):
            raise ConfigError(f"--state.dir {path}: {found} is no directory that can be written to")


@contextlib.asynccontextmanager
async def running(exporter: Exporter) -> AsyncIterator[Exporter]:
    """Run ``exporter``: listen, ingest and log until the block ends; then apply all messages that have arrived."""
    async with contextlib.AsyncExitStack() as stack:
        sockets = []
        for host, port in exporter.config.web_listen_address:
            sockets.append(listen(host, port))
            stack.callback(sockets[-1].close)
        exporter.addresses = [s.getsockname()[:2] for s in sockets]
        snapshots = _recover(exporter)
        if snapshots is not None:
            stack.callback(snapshots.directory.release)
        copier = PageCopier(
            exporter.registry,
            exporter.passthrough,
            exporter.collectors,
            hold=exporter.ingest.held,
            snapshots=snapshots,
        )
        senders = _otlp_senders(exporter, copier, snapshots)
        if senders is not None and senders.metrics is not None:
            # Everything has been saved then.
            stack.push_async_callback(senders.metrics.finish)
        stack.callback(exporter.ingest.leave)
        if snapshots is not None:
            stack.push_async_callback(snapshots.close)
        # Runs before the last snapshot, which then need not hold the records.
        stack.push_async_callback(_finish_records, exporter, senders)
        if snapshots is None:
            stack.callback(exporter.registry.release_requests)
        for output in exporter.outputs:
            output.start()
        stack.push_async_callback(exporter.ingest.wait_closed)
        # Callbacks run in reverse order: the last snapshot holds what this applies.
        stack.callback(exporter.ingest.drain)
        sources = plugins.sources(exporter.config, exporter.intake, exporter.passthrough)
        exporter.ingest.open(exporter.config.ingest_endpoint, sources)
        if sockets:
            await stack.enter_async_context(_serving(exporter, sockets, copier))
        lines = StatsLog(
            exporter.registry,
            exporter.intake.health.of,
            pages=lambda: exporter.passthrough.texts(NAMES),
        ).run(exporter.config.log_stats_interval)
        stack.callback(_background(lines).cancel)
        stack.callback(_background(_explain_absence(exporter)).cancel)
        if snapshots is not None:
            stack.callback(_background(snapshots.run()).cancel)
        if senders is not None and senders.metrics is not None:
            pushes = senders.metrics.run(exporter.config.otlp_interval)
            stack.push_async_callback(_cancelled, _background(pushes))
        yield exporter


@contextlib.asynccontextmanager
async def _serving(
    exporter: Exporter, sockets: Iterable[socket.socket], copier: PageCopier
) -> AsyncIterator[None]:
    pages = Pages(copier, final_scrape=exporter.final_scrape, series_filter=exporter.series_filter)
    live = LiveView(
        exporter.intake,
        lambda: exporter.endpoints,
        lambda: pages.scraped_at,
        dashboards=exporter.config.web_dashboard_url,
    )
    checks = OwnChecks(
        exporter.registry,
        live.evaluation,
        exporter.metrics,
        lambda: exporter.config,
        lambda: exporter.endpoints,
        scraped_at=lambda: pages.scraped_at,
        refusals=exporter.intake.refusals,
    )
    endpoints = Endpoints(
        pages,
        lambda: bool(exporter.endpoints),
        exporter.intake.health,
        checks,
        view=exporter.config.web_default_view,
        settings=lambda: exporter.config.given,
        live=None if exporter.config.web_disable_ui else live,
        timelines=None if exporter.config.web_disable_timeline else Timelines(exporter.intake),
    )
    app = application(endpoints, exporter.config.web_telemetry_path)
    async with exporter.http_server.serving(app, sockets):
        background = [_background(checks.run())]
        if not exporter.config.web_disable_ui:
            background.append(_background(live.run()))
        try:
            yield
        finally:
            for task in background:
                await _cancelled(task)


def _recover(exporter: Exporter) -> Snapshots | None:
    """Restore the last snapshot and return what writes the next; None without a state directory."""
    if not exporter.config.state_dir:
        return None
    directory = StateDirectory(Path(exporter.config.state_dir))
    snapshots = Snapshots(directory, exporter.ingest, exporter.request_log)
    found = snapshots.recover()
    if exporter.tenants is None:
        exporter.registry.drop_tenants()
    else:
        for name in exporter.tenants.restore(exporter.registry.requests_by_tenant()):
            exporter.registry.hide_tenant(name)
    exporter.durability = f"counters survive restarts, in {exporter.config.state_dir}; {found}"
    return snapshots


def _otlp_senders(
    exporter: Exporter, copier: PageCopier, snapshots: Snapshots | None
) -> Senders | None:
    """Return the senders to OTLP receivers; None: nothing is sent."""
    config = exporter.config
    if not (config.otlp_endpoint or config.otlp_traces_endpoint or config.otlp_logs_endpoint):
        return None
    port = exporter.addresses[0][1] if exporter.addresses else 0
    directory = None if snapshots is None else snapshots.directory
    try:
        # Only this feature needs the SDK, which takes 150 ms to load.
        from sidestep.otlp.senders import Senders  # noqa: PLC0415

        return Senders(
            config, copier, exporter.series_filter, exporter.outputs, port=port, directory=directory
        )
    except ImportError as error:
        raise ConfigError(
            "--otlp.* needs OpenTelemetry's SDK: pip install '.[otlp]' in a clone of sidestep's"
            f" repository ({error})"
        ) from None


async def _finish_records(exporter: Exporter, senders: Senders | None) -> None:
    """Write and send the last records of requests, for a few seconds."""
    await asyncio.gather(*(asyncio.to_thread(output.close) for output in exporter.outputs))
    if senders is not None:
        senders.close_records()


async def _explain_absence(exporter: Exporter) -> None:
    """Log how to connect an engine, if none has connected."""
    await asyncio.sleep(ABSENT_AFTER)
    if not (exporter.registry.engines or exporter.config.has_sources):
        log.warning(
            "no engine has connected for %.0f s: start engines with SIDESTEP_ENDPOINT=%s and sidestep in"
            " their environment, whose logs then say more; `sidestep doctor` checks an installation",
            ABSENT_AFTER,
            " or ".join(exporter.endpoints),
        )


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
    """
    shutdown = Shutdown()
    raise_open_files()
    return_large_blocks()
    exporter = Exporter(config)
    if reload is not None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, on_hangup, exporter, reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    async with running(exporter):
        calm_collector()
        sys.setswitchinterval(SWITCH_INTERVAL)
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
