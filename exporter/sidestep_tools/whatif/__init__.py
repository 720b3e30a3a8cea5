"""The command ``sidestep whatif``: the hit ratio of a prefix cache over its size, from a file."""
