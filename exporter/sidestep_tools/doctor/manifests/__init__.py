"""Check of Kubernetes manifests: the exporter in an engine's pod, and what scrapes it."""
