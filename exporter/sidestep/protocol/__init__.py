"""Messages, limits, and the two ends of the delivery protocol. No I/O and no clocks."""
