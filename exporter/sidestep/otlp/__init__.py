"""Export of the page's families by OTLP, OpenTelemetry's protocol, to a receiver."""
