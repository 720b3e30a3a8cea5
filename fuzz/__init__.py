"""Hostile input at length: coverage-guided fuzzing, floods, and what the dearest frames cost."""
