"""Faults with real processes and sockets, and what they lose: ``python -m chaos``."""
