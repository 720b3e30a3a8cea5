"""An exporter: its parts, built from a configuration."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Iterable, Sequence

from prometheus_client.registry import Collector

from sidestep.app.from_config import (
    access,
    engine_settings,
    native_histograms,
    series_filter,
)
from sidestep.catalog.prices import Prices
from sidestep.catalog.slo import Objectives
from sidestep.config.settings import Config
from sidestep.engines.apply import Applier
from sidestep.engines.dialect import Dialects
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.slo import resolve
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.http.server import HttpServer
from sidestep.ingest import plugins
from sidestep.ingest.final_scrape import FinalScrape
from sidestep.ingest.intake import Intake
from sidestep.ingest.socket_loop import Ingest
from sidestep.metrics.engine_state import SeriesSettings
from sidestep.metrics.registry import Accounting, Registry, Tracking
from sidestep.protocol.receiver import Receiver
from sidestep.requests.record_output import RecordOutput
from sidestep.requests.request_log import EngineRequests, request_log
from sidestep.requests.tenants import Tenants
from sidestep.telemetry import logs
from sidestep.telemetry.self_metrics import SelfMetrics, names, own_registry
from sidestep.tracking.health.step_times import Thresholds
from sidestep.tracking.kv_blocks.lookups import LookupSettings
from sidestep.tracking.kv_blocks.tracker import Sampling
from sidestep.tracking.requests.settings import RequestSettings
from sidestep.transport.guard import PeerGuard
from sidestep.transport.process import resident
from sidestep.transport.upkeep import MIB, Watchdog

log = logging.getLogger(__name__)

NOT_DURABLE = (
    "counters start at 0 with this process, and a restart is a counter reset"
    " (--state.dir keeps them across restarts)"
)


class Exporter:
    """One exporter, built from a Config; ``run.running`` runs it.

    Attributes:
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
        self.tenants = None
        if config.tenants_by:
            self.tenants = Tenants(config.tenants_by, config.tenants_max, config.tenants_show)
        sink = None
        keeps_timeline = not config.web_disable_timeline
        if self.request_log or self.tenants or objectives or keeps_timeline:
            sink = functools.partial(
                EngineRequests, self.request_log, self.tenants, keeps_timeline=keeps_timeline
            )
        self.registry = Registry(
            layouts,
            SeriesSettings(config.buckets, native_histograms(config), Objectives(objectives)),
            Tracking(
                request_settings,
                sampling,
                LookupSettings(config.kv_curve_half_life),
                sink,
                keeps_timeline,
            ),
            Accounting(self.tenants, Prices(config.prices_model)),
            reserved=names(self.collectors),
            is_exposed=functools.lru_cache(4096)(self.series_filter.shows),
            wall=time.time,
            clock=time.monotonic,
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
    def outputs(self) -> Sequence[RecordOutput]:
        """Outputs of the records of requests."""
        return () if self.request_log is None else self.request_log.outputs

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
