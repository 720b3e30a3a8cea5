"""Polling of other exporters' pages, with ``--scrape``."""
