"""Snapshots of the exporter's state: content, file format and schedule."""
