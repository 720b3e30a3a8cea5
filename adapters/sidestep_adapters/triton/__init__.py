"""Triton: polling of its statistics extension over HTTP and gRPC."""
