"""Event streams that engines publish themselves: their dialect, and subscribers."""
