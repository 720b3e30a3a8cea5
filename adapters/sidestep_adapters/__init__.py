"""Adapters: engine plugins, the publisher, sources inside the exporter, and recordings."""
