"""Subscribers to the streams that engines publish by themselves."""
