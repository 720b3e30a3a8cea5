"""The dialect of engines' native streams."""

from __future__ import annotations

from sidestep.catalog.dialect import KeySeries, Series
from sidestep.engines.dialect import Dialect
from sidestep.protocol.block_events import CacheEvents
from sidestep_adapters.streams.handlers import StreamHandlers
from sidestep_adapters.streams.rows import FORWARD_PASS, KV_EVENTS, LOAD, ROWS
from sidestep_adapters.streams.wire import ForwardPass, LoadStat

DIALECT: Dialect = Dialect(
    name="stream",
    title="Streams that engines publish by themselves",
    rows=ROWS,
    items=(ForwardPass, LoadStat, CacheEvents),
    structs=(ForwardPass, LoadStat),
    has_own_namespace=True,
    handlers=StreamHandlers,
    feature_options={
        KV_EVENTS: "sidestep's --subscribe kv-events=ADDRESS",
        FORWARD_PASS: "sidestep's --subscribe forward-pass=ADDRESS",
        LOAD: "sidestep's --subscribe load=ADDRESS",
    },
    key_series=KeySeries(
        running=Series("sidestep_forward_pass_scheduled_decode_requests"),
        waiting=Series("sidestep_forward_pass_queued_prefill_requests"),
        prompt=Series("sidestep_forward_pass_tokens_total", "prefill"),
        generation=Series("sidestep_forward_pass_tokens_total", "decode"),
        load_running=Series("sidestep_load_running_requests"),
        load_waiting=Series("sidestep_load_waiting_requests"),
        kv_tokens=Series("sidestep_load_kv_tokens"),
        kv_capacity=Series("sidestep_load_max_kv_tokens"),
        kv_blocks={
            "kv_lifetime": "sidestep_kv_cached_block_lifetime_seconds",
            "kv_idle": "sidestep_kv_cached_block_idle_seconds",
            "kv_reuse_gap": "sidestep_kv_cached_block_reuse_gap_seconds",
        },
    ),
)
