"""Pages: which are made when, of what, and kept."""
