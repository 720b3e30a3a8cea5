"""What people look at: the state of all engines now, and over the last minutes."""
