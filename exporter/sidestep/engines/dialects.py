"""The tables: every metric is one row, and everything else is derived from the rows."""

from __future__ import annotations

from collections.abc import Collection

from sidestep.catalog.model import Row, check
from sidestep.engines import common_names
from sidestep.engines import slo_rows as objectives
from sidestep.engines.sglang import cache_rows as sglang_caches
from sidestep.engines.sglang import legacy_rows as sglang_legacy
from sidestep.engines.sglang import process_rows as sglang_process
from sidestep.engines.sglang import request_rows as sglang_requests
from sidestep.engines.sglang import rows as sglang
from sidestep.engines.sglang import scheduler_rows as sglang_scheduler
from sidestep.engines.streams import rows as streams
from sidestep.engines.triton import rows as triton
from sidestep.engines.vllm import connector_rows as vllm_connectors
from sidestep.engines.vllm import core_rows as engine_core
from sidestep.engines.vllm import legacy_rows as vllm_legacy
from sidestep.engines.vllm import own_rows as vllm_own
from sidestep.engines.vllm import rows as vllm

DIALECTS: dict[str, tuple[Row, ...]] = {
    "vllm": (
        *vllm.ROWS,
        *vllm_connectors.ROWS,
        *vllm_own.ROWS,
        *engine_core.ROWS,
        *vllm_legacy.ROWS,
        *objectives.VLLM,
    ),
    "sglang": (
        *sglang.ROWS,
        *sglang_scheduler.ROWS,
        *sglang_requests.ROWS,
        *sglang_caches.ROWS,
        *sglang_process.ROWS,
        *sglang_legacy.ROWS,
        sglang.SATURATION,
        vllm_own.REFUSED,
        *objectives.SGLANG,
    ),
    "stream": streams.ROWS,
    "triton": triton.ROWS,
}
"""Rows by the dialect that an engine's hello names."""

APART = {"stream", "triton"}
"""Dialects no family of which is another's, so that their engines may have another's labels."""

PARTS = {"triton": set(triton.MODEL)}
"""Labels of those engines of a dialect that are parts of another: versions of a server's models."""

COMMON: dict[str, tuple[Row, ...]] = {"vllm": common_names.VLLM, "sglang": common_names.SGLANG}
"""Likewise, under names that are the same for all engines."""


def is_part(dialect: str, labels: Collection[str]) -> bool:
    """Whether an engine with such labels is but a part of one that is told of by itself."""
    part = PARTS.get(dialect)
    return part is not None and part <= set(labels)


def rows_of(dialect: str, *, legacy: bool = False, common: bool = False) -> tuple[Row, ...]:
    """The rows of ``dialect``; hidden ones only with ``legacy``, common names with ``common``.

    Raises:
        CatalogueError: A row cannot work.
    """
    rows = DIALECTS[dialect] + (COMMON.get(dialect, ()) if common else ())
    return check(tuple(row for row in rows if legacy or row.status != "hidden"))
