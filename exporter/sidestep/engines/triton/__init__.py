"""Triton: wire structs of its statistics extension, catalogue rows, and handlers."""
