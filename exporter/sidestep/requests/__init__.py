"""Records of requests that have ended, and their queues: a line for each, for people and for accounting."""
