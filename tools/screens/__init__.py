"""Pictures of the dashboards, drawn from the answers of a real Prometheus; not part of the product."""
