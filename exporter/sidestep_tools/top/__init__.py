"""``sidestep top``: engines at the terminal, from exporters and from engines' own pages."""
