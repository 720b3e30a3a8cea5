"""Tracking of requests: events become intervals and counts, one state machine per engine."""
