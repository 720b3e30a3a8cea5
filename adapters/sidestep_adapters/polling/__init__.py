"""Polling of engines' servers: the source that all kinds share, and the reader of their pages."""
