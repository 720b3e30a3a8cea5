"""SGLang: its collectors as items, its families as rows, and the handlers between them."""
