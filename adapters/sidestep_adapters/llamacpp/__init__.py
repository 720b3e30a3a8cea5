"""llama.cpp: polling of llama-server, without waking a sleeping model."""
