"""Self-metrics of the exporter."""

from __future__ import annotations

from sidestep.telemetry.self_metrics import SelfMetrics, names, own_registry


def test_names_are_taken_before_a_family_has_samples() -> None:
    """Of a family with labels, which is on no page yet, and of prometheus_client's collectors."""
    found = names(own_registry(SelfMetrics(), []))

    assert {"sidestep_http_refused_total", "sidestep_http_refused_created"} <= found
    assert {"sidestep_engines", "python_info", "process_cpu_seconds_total"} <= found
