"""Parts that the configuration alone determines: the filter of pages, access rules, settings of engines."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

from sidestep.catalog import slo
from sidestep.config.settings import Config
from sidestep.errors import ConfigError, WireError
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import Ack, Objective, Settings, decode_from_exporter, encode
from sidestep.transport.access import Access
from sidestep.transport.peer_limits import MAX_ANSWER_BYTES

LOOKUP_KEY_BYTES = 16


def series_filter(config: Config) -> SeriesFilter:
    """Return the filter on exposed series."""
    return SeriesFilter(
        dropped_labels=frozenset(config.metrics_drop_label),
        allow=config.metrics_allow,
        deny=config.metrics_deny,
        bucket_thinning=config.metrics_bucket_thinning,
        shown_buckets=config.shown_buckets,
    )


def access(config: Config) -> Access:
    """Return the access rules of the ingest socket."""
    return Access.of(
        config.ingest_curve_key,
        config.ingest_authorized_keys,
        config.ingest_ipc_group,
        plain_tcp=config.ingest_allow_plain_tcp,
    )


def native_histograms(config: Config) -> NativeSettings | None:
    """Return the form of native histograms; None if they are off."""
    if config.histograms == "classic":
        return None
    return NativeSettings(config.schemas, time.time, both=config.histograms == "both")


def engine_settings(config: Config, objectives: Iterable[slo.Objective]) -> Settings:
    """Return the settings that the exporter sends to engines.

    Raises:
        ConfigError: An engine would not accept the answer that has them.
    """
    settings = Settings(
        {family: list(bounds) for family, bounds in config.buckets.items()},
        config.intervals_scheduled,
        config.intervals_inter_token,
        config.requests_max_tracked,
        config.requests_max_age,
        config.kv_scale_samples,
        config.kv_max_tracked,
        None if config.histograms == "classic" else dict(config.schemas),
        # Objectives on outcomes read the engine's own counters, which are folded anyway.
        [Objective(o.name, list(o.families), o.threshold) for o in objectives if o.families],
        secrets.token_bytes(LOOKUP_KEY_BYTES) if config.kv_curve_half_life else b"",
    )
    largest = 1 << 62
    answer = encode(Ack(VERSION, largest, largest, largest, largest, largest, 1.0, settings))
    what = "the bounds of [buckets] and the objectives of --slo"
    if len(answer) > MAX_ANSWER_BYTES:
        raise ConfigError(
            f"{what} take {len(answer)} bytes, and engines accept {MAX_ANSWER_BYTES}: give fewer"
        )
    try:
        decode_from_exporter(answer)
    except WireError as error:
        raise ConfigError(f"engines cannot read {what}: {error}") from None
    return settings
