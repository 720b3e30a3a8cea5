"""From a frame to an engine: decode it, run it through the session protocol, apply its items."""
