"""One folder for each engine: its wire structs, catalogue rows and handlers; beside them what is common to all."""
