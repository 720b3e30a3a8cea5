"""Pictures of the dashboards, drawn from what a real Prometheus answers; no part of the product."""
