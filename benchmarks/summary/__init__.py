"""The table of ``make bench``: its rows, and the measurements of each topic."""
