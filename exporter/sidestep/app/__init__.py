"""The exporter's process: its command line, and the composition of its parts."""
