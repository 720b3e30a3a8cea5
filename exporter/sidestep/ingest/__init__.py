"""Ingest: decode frames, run them through the session protocol and apply their items."""
