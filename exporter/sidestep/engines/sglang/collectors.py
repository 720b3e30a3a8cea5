"""The kinds of SGLang's metric collectors; each instance of a collector is an engine here.

``shared`` are the labels that every instance of a kind has. Optional labels (``dp_rank`` of a
scheduler, and those that an administrator adds) are part of the engine's labels and in no row.
"""

from __future__ import annotations

import dataclasses

from sidestep.catalog.row import Row, Source
from sidestep.engines.common_names import common_row
from sidestep.engines.row_builders import SampledRows


@dataclasses.dataclass(frozen=True, slots=True)
class Collector(SampledRows):
    """Builder of the rows of one kind of collector."""

    prefix: str = "sglang:"

    @property
    def of_rank(self) -> Collector:
        """The same kind, for values that differ between ranks."""
        return dataclasses.replace(self, mirrored=False)

    def common(self, name: str, source: Source) -> Row:
        """Return the row of a family that has the same name for all engines."""
        return common_row(name, source, self.shared, mirrored=self.mirrored)


SCHEDULER = Collector(
    shared=("engine_type", "model_name", "moe_ep_rank", "pp_rank", "tp_rank"), mirrored=True
)
TOKENIZER = Collector(shared=("engine_type", "model_name"), extra_labels=True)
RADIX = Collector(shared=("cache_type", "dp_rank", "pp_rank", "tp_rank"), mirrored=True)
STORAGE = Collector(
    shared=(
        "attn_cp_rank",
        "attn_cp_size",
        "dp_rank",
        "pp_rank",
        "pp_size",
        "storage_backend",
        "tp_rank",
    ),
    mirrored=True,
)
ENCODER = Collector(shared=("dp_rank", "model_name"))
PROCESS = Collector(shared=())
"""Metrics of a single process, without a label that identifies it."""
