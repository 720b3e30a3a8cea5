"""Recordings of what engines send: writing, reading and replaying them."""
