"""Commands for people at a terminal: top, doctor and whatif."""
