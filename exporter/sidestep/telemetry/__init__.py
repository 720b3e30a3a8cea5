"""The exporter's own metrics and log lines, and how long work yields to the event loop."""
