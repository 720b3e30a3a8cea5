"""The toy engine's dialect."""

from __future__ import annotations

from tests.engines.toy_engine.handlers import ToyHandlers
from tests.engines.toy_engine.rows import COMMON_ROWS, ROWS
from tests.engines.toy_engine.wire import ToyStep

from sidestep.catalog.dialect import KeySeries, Series
from sidestep.engines.dialect import Dialect

DIALECT = Dialect(
    name="toy",
    title="Toy",
    rows=ROWS,
    common_rows=COMMON_ROWS,
    items=(ToyStep,),
    structs=(ToyStep,),
    handlers=ToyHandlers,
    key_series=KeySeries(
        running=Series("toy:requests_running"),
        waiting=Series("toy:requests_waiting"),
        prompt=Series("toy:prompt_tokens_total"),
        generation=Series("toy:generated_tokens_total"),
        kv_cache_usage=Series("toy:kv_usage_ratio"),
        begun=Series("toy:first_token_seconds"),
    ),
    latencies={"ttft": "toy:first_token_seconds"},
)
