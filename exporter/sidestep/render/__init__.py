"""Pages: the registry as text."""
