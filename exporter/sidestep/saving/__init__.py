"""An engine's series as bytes and back, and what outlives the process."""
