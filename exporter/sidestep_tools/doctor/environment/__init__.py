"""Checks of the environment that an engine runs in: packages, variables and processes."""
