"""The command ``sidestep whatif``: the hit-ratio curve of a prefix cache, from a file."""
