"""The tables: every metric is one row, and everything else is derived from the rows."""

from __future__ import annotations

from collections.abc import Collection

from sidestep.catalogue import common as common_names
from sidestep.catalogue import (
    engine_core,
    objectives,
    sglang,
    sglang_caches,
    sglang_legacy,
    sglang_process,
    sglang_requests,
    sglang_scheduler,
    streams,
    triton,
    vllm,
    vllm_connectors,
    vllm_legacy,
    vllm_own,
)
from sidestep.catalogue.model import Row, check

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
