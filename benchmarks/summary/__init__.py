"""The one table of ``make bench``: its rows, and how each topic's figures are taken."""
