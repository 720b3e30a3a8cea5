"""Delivery of an engine's items to the exporter: a queue, and one thread that encodes and sends."""
