"""Recordings of what engines send: written, read, and replayed."""
