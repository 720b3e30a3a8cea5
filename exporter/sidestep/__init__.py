"""Metrics of LLM inference engines, taken off the engine's own loop."""

__version__ = "1.0.0"
