"""Catalogue rows, their compilation to a layout of series, and histogram bucket bounds."""
