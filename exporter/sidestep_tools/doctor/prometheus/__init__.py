"""Checks of a Prometheus server: what it scrapes, which rules it evaluates, and its queries."""
