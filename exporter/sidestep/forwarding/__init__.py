"""What exporters tell one another: a tree of them, up to a root."""
