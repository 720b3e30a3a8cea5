"""Request events into intervals and counts: one state machine per engine."""
