"""Flags, environment variables and the configuration file, as one frozen ``Config``."""
