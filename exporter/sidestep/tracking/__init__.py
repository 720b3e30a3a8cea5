"""State machines over raw events. Pure: time comes in as data."""
