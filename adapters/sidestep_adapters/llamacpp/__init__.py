"""llama.cpp: its dialect, and polling of llama-server's page."""
