"""Lives of KV blocks: from raw events to lifetimes, idle times and reuse gaps of one engine.

Two kinds of block are followed side by side: ``physical`` by number, sampled by the
sender, ``cached`` by hash, sampled here. Time is data: all stamps of a source are of one
clock.

Weights. An observation stands for 1/p blocks, where p is the probability that its
block was followed: that of its birth, or a later one that was lower. To be followed at the
end, a cached hash ``h`` must have had u(h) < ``ratio`` at all times since its birth,
that is u(h) < the least of them, and u is uniform: so 1/p makes every sum over lives
that began under observation unbiased, however the rate moved. It is the same for physical blocks,
with the sender's rate at the birth, which this side cannot lower, times the least
share that thinning left since.

One bias is accepted. Whatever was cached before it was followed (the exporter started later, or
the rate was raised) has no known birth: where it is stored once more before it is
removed, that begins a life which is too short. Knowing better would take memory of
blocks that are not sampled.

No call takes time for all lives at once, but what its own events take and a slice: see ``room``.
"""
