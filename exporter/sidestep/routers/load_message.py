"""SGLang's load message: its fields, their encoding, and how they are read from an engine's series."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from sidestep.catalog.dialect import Series
from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine
from sidestep.metrics.series import number_reader

TOPIC = b"load"
RANK_LABELS = ("dp_rank", "engine")
"""Labels with the data-parallel rank of an engine, the first that it has."""
MIRROR_LABELS = ("attn_cp_rank", "moe_ep_rank", "pp_rank", "tp_rank")
"""Labels of ranks that work on the same requests; rank 0 has their load."""


class Load(NamedTuple):
    """The load of one engine, in the order of the message (SGLang 0.5.23).

    Attributes:
        running: Requests in the batch.
        waiting: Requests that wait.
        num_tokens: Tokens in the KV cache that requests use.
        max_tokens: Tokens that fit into it.
        rank: Data-parallel rank.
        waiting_uncached_tokens: Prompt tokens of waiting requests that no cache has; always 0 here.
        total_tokens: Tokens in use and waiting; here those in use.
        max_running: Most requests in the batch; 0: unknown.
        prefill_tokens: Prompt tokens computed since the counters began.
        prefill_microseconds: Time for them; always 0 here.
    """

    running: int
    waiting: int
    num_tokens: int
    max_tokens: int
    rank: int
    waiting_uncached_tokens: int = 0
    total_tokens: int = 0
    max_running: int = 0
    prefill_tokens: int = 0
    prefill_microseconds: int = 0


_encode = msgspec.msgpack.Encoder().encode


def encode(load: Load, sequence: int) -> list[bytes]:
    """Return the frames of a message: topic, sequence number (8 bytes, big-endian), payload."""
    return [TOPIC, sequence.to_bytes(8, "big"), _encode(("LoadStat", *load))]


def rank_of(engine: Engine) -> int | None:
    """Return the data-parallel rank; None for a rank whose load another one has, or of unknown number."""
    labels = engine.labels
    if any(labels.get(name, "0") != "0" for name in MIRROR_LABELS):
        return None
    found = next((labels[name] for name in RANK_LABELS if labels.get(name)), "0")
    return int(found) if found.isascii() and found.isdecimal() else None


def load_of(engine: Engine, rank: int) -> Load | None:
    """Return the present load; None while the engine does not report it."""
    return _reader(engine.layout)(engine, rank)


@functools.cache
def _reader(layout: Layout) -> Callable[[Engine, int], Load | None]:
    tables = layout.tables
    key, live = tables.key_series, tables.live_series
    named: Sequence[Series | None] = (None,) * 5
    if key is not None:
        named = key.running, key.waiting, key.kv_cache_usage, key.slots, key.prompt
    # A family of the load alone is better than one of forward passes.
    running, waiting, usage, slots, prompt, tokens = (
        number_reader(layout, series)
        for series in (
            live.running or named[0],
            live.waiting or named[1],
            *named[2:],
            live.kv_tokens,
        )
    )
    capacity = tables.kv_capacity or number_reader(layout, live.kv_capacity)

    def read(engine: Engine, rank: int) -> Load | None:
        in_batch, queued = running(engine), waiting(engine)
        if in_batch is None or queued is None:
            return None
        most, used = int(capacity(engine) or 0), tokens(engine)
        if used is None:
            used = (usage(engine) or 0.0) * most
        in_use = round(used)
        return Load(
            running=int(in_batch),
            waiting=int(queued),
            num_tokens=in_use,
            max_tokens=most,
            rank=rank,
            total_tokens=in_use,
            max_running=int(slots(engine) or 0),
            prefill_tokens=int(prompt(engine) or 0),
        )

    return read
