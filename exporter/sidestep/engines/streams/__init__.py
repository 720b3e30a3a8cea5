"""Native streams of engines (forward passes, load, KV events): wire structs, rows, and handlers."""
