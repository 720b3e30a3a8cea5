"""Triton: its statistics extension as items, its families as rows, and the handlers between them."""
