"""The engine's end of a stream: a queue, and one thread that encodes and sends."""
