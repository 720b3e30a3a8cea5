"""One package per engine with its wire structs, catalogue rows and handlers, and the code that all share."""
