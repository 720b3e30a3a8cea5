"""One table of what sidestep costs beside its peers: ``python -m benchmarks``."""
