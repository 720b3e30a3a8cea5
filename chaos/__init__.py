"""Faults with real processes and sockets, and what they cost: ``python -m chaos``."""
