"""Triton: its dialect, and polling of its statistics extension."""
