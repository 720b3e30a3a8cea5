"""Snapshots of the state: what they hold, the file, and when they are written."""
