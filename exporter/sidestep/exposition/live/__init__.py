"""The live page: the state of all engines now, and over the last minutes."""
