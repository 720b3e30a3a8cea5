"""The exporter's own metrics, and its log lines."""
