"""Export by OTLP, OpenTelemetry's protocol: the page's families, and spans and log records of requests."""
