"""TensorRT-LLM: polling of trtllm-serve."""
