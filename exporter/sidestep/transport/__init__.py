"""The ROUTER socket: bound where engines find it, open to whom keys and paths let in.

What a peer may name, how much nonsense it may send and how much memory it may take is
decided here; what its messages mean is not.
"""
