"""Self-metrics of the exporter."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Gauge

from sidestep.errors import ConfigError
from sidestep.telemetry.self_metrics import SelfMetrics, names, own_registry


def test_names_are_reserved_before_a_family_has_samples() -> None:
    """Families with labels and those of prometheus_client's collectors count as well."""
    found = names(own_registry(SelfMetrics(), []))

    assert {"sidestep_http_refused_total", "sidestep_http_refused_created"} <= found
    assert {"sidestep_engines", "python_info", "process_cpu_seconds_total"} <= found


def test_a_collector_cannot_have_a_name_of_the_exporters_own() -> None:
    """The error names the collector."""
    taken = Gauge("sidestep_engines", "Mine.", registry=CollectorRegistry())
    with pytest.raises(ConfigError, match=r"collector Gauge: .*sidestep_engines"):
        own_registry(SelfMetrics(), [taken])
