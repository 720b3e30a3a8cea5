"""The command ``sidestep compare``: load, latencies and throughput of two inputs, and a verdict."""
