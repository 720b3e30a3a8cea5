"""Benchmarks: each module is run by itself, ``python -m benchmarks.bench_...``."""
