"""vLLM: the stat logger plugin, and the tap in the engine's core."""
