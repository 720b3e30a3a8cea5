"""llama.cpp: catalogue rows of llama-server's page."""
