"""Records from exporter to exporter: one for each source and engine."""
