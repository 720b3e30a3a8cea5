"""Commands for people at a terminal: compare, doctor, top and whatif."""
