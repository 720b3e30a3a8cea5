"""Findings on an installation, with stable codes."""
