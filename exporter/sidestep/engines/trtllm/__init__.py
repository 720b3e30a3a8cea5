"""TensorRT-LLM: catalogue rows of trtllm-serve's page, and readers."""
