"""Polling of other exporters' pages."""
