"""Streams that engines publish by themselves: forward passes, load and KV events."""
