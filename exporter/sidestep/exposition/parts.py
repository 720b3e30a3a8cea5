"""What the settings come to: what the exporter's parts are made with."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sidestep.catalog.layout import Layout
from sidestep.config.settings import Config
from sidestep.errors import ConfigError
from sidestep.exposition.series_filter import Choice
from sidestep.metrics.engine import ORIGIN
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.protocol.messages import Objective, Settings
from sidestep.transport.access import Access


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


def native(config: Config) -> NativeSettings | None:
    """The form of native histograms, where there are any."""
    if config.histograms == "classic":
        return None
    return NativeSettings(config.schemas, time.time, both=config.histograms == "both")


def engine_settings(config: Config) -> Settings:
    """What engines are told of ``config``, and everything that counts with it."""
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


def check_labels(config: Config, layouts: Mapping[str, Layout]) -> None:
    """Whether series can have the labels that forwarding adds.

    Raises:
        ConfigError: Some have one of that name.
    """
    for name, _ in config.forward_label:
        if name in (ORIGIN, "le", "quantile") or any(
            name in layout.own_labels | layout.required_labels for layout in layouts.values()
        ):
            raise ConfigError(f"--forward.label {name}: engines' series have a label of that name")
