"""What each item does to an engine, by dialect."""
