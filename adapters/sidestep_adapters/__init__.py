"""What connects an engine to the exporter: plugins, the publisher, recordings."""
