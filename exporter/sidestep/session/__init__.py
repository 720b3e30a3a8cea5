"""The delivery protocol, both ends, without I/O or clocks.

A *stream* is one sending process; an *engine* is what series belong to. Streams
have seqs, engines have series. Items get the seqs 1, 2, 3, ...; a frame that was
sent once never changes; the receiver applies each seq once and in order.
"""
