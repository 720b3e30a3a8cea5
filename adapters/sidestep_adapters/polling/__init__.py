"""Code that pollers share: an HTTP client, the state of a server, and the poller of ``--engine``."""
