"""Benchmarks of sidestep and its peers in one table: ``python -m benchmarks``."""
