"""Faults with real processes and sockets, and the counts that they lose: ``python -m chaos``."""
