"""vLLM: wire structs of its stats objects, catalogue rows, and handlers."""
