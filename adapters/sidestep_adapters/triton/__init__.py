"""Triton: pollers of its statistics extension."""
