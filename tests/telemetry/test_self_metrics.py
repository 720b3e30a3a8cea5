"""Self-metrics of the exporter."""

from __future__ import annotations

from sidestep.telemetry.self_metrics import SelfMetrics, names, own_registry


def test_names_are_reserved_before_a_family_has_samples() -> None:
    """Families with labels and those of prometheus_client's collectors count as well."""
    found = names(own_registry(SelfMetrics(), []))

    assert {"sidestep_http_refused_total", "sidestep_http_refused_created"} <= found
    assert {"sidestep_engines", "python_info", "process_cpu_seconds_total"} <= found
