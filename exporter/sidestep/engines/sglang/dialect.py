"""SGLang's dialect."""

from __future__ import annotations

from sidestep.engines.common_names import SGLANG as COMMON_ROWS
from sidestep.engines.dialect import Dialect
from sidestep.engines.items import SglangStats
from sidestep.engines.sglang import (
    cache_rows,
    legacy_rows,
    process_rows,
    request_rows,
    rows,
    scheduler_rows,
)
from sidestep.engines.sglang.handlers import SglangHandlers
from sidestep.engines.sglang.readers import availability_counts, load_reader
from sidestep.engines.slo_rows import SGLANG as SLO_ROWS
from sidestep.engines.vllm.own_rows import REFUSED

DIALECT: Dialect = Dialect(
    name="sglang",
    rows=(
        *rows.ROWS,
        *scheduler_rows.ROWS,
        *request_rows.ROWS,
        *cache_rows.ROWS,
        *process_rows.ROWS,
        *legacy_rows.ROWS,
        rows.SATURATION,
        REFUSED,
        *SLO_ROWS,
    ),
    common_rows=COMMON_ROWS,
    structs=(SglangStats,),
    handlers=SglangHandlers,
    availability_counts=availability_counts,
    load_reader=load_reader,
)
