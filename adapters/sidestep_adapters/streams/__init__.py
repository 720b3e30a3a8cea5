"""Subscribers to the event streams that engines publish themselves."""
