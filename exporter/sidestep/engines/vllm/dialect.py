"""vLLM's dialect."""

from __future__ import annotations

from sidestep.engines.common_names import VLLM as COMMON_ROWS
from sidestep.engines.dialect import Dialect
from sidestep.engines.items import VllmStep
from sidestep.engines.slo_rows import VLLM as SLO_ROWS
from sidestep.engines.vllm import connector_rows, core_rows, legacy_rows, own_rows, rows
from sidestep.engines.vllm.handlers import VllmHandlers
from sidestep.engines.vllm.readers import availability_counts, load_reader
from sidestep.tracking.requests.outcomes import Outcomes

DIALECT: Dialect = Dialect(
    name="vllm",
    rows=(
        *rows.ROWS,
        *connector_rows.ROWS,
        *own_rows.ROWS,
        *core_rows.ROWS,
        *legacy_rows.ROWS,
        *SLO_ROWS,
    ),
    common_rows=COMMON_ROWS,
    structs=(VllmStep, Outcomes),
    has_requests=True,
    handlers=VllmHandlers,
    availability_counts=availability_counts,
    load_reader=load_reader,
)
