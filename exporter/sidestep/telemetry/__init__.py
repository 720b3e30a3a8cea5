"""The exporter's own metrics, its log lines, and slices of work on the event loop."""
