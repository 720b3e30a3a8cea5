"""The HTTP side's edge: who may connect, who may ask, and what a hostile client can cost."""
