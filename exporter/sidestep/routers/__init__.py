"""Load of engines, published to request routers by ZeroMQ."""
