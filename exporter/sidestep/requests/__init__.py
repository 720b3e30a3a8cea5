"""Records of requests that have ended: one line for each, for people and for accounting."""
