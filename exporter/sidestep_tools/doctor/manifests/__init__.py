"""Check of Kubernetes manifests: the exporter in an engine's pod, and the engine's way to it."""
