"""vLLM: its stats objects and core events as items, its families as rows, and the handlers between them."""
