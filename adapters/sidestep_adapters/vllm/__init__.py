"""vLLM: the stat logger plugin, and the scheduler tap in the engine core."""
