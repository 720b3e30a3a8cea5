"""Code that all dialects share, and the dialects of vLLM and SGLang: wire structs, rows and handlers."""
