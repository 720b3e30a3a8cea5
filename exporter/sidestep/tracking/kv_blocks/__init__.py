"""KV block events into lifetimes, idle times and reuse gaps of sampled blocks."""
