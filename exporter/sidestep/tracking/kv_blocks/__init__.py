"""Tracking of sampled KV blocks: lifetimes, idle times, reuse gaps, and hit-ratio curves."""
