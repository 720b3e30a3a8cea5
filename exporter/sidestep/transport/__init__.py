"""Transport: ZeroMQ sockets, authentication and the limits that peers are held to.

This package limits the names, the invalid messages and the memory of a peer. It does not
interpret messages.
"""
