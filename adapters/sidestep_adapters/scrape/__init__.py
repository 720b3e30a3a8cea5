"""Pollers of other exporters' pages."""
