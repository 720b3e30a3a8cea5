"""The commands ``sidestep why`` and ``sidestep timeline``: where time went, from recent steps and requests."""
