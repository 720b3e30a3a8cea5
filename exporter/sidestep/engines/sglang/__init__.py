"""SGLang: wire structs of its stats object, catalogue rows, and handlers."""
