"""State machines over raw events, without I/O: time is part of the events."""
