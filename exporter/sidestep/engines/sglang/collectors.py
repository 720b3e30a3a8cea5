"""The kinds of SGLang's metric collectors; each instance of a collector is an engine here.

``shared`` are the labels that every instance of a kind has. Optional labels (``dp_rank`` of a
scheduler, and those that an administrator adds) are part of the engine's labels and in no row.
"""

from __future__ import annotations

import dataclasses

from sidestep.catalog.model import Combine, Kind, Row, Sampled


@dataclasses.dataclass(frozen=True, slots=True)
class Collector:
    """One kind of collector; its methods build rows of families that it sends self-described.

    Attributes:
        shared: See ``Row.shared``.
        extra_labels: See ``Row.extra_labels``.
        mirrored: See ``Row.mirrored``.
    """

    shared: tuple[str, ...]
    extra_labels: bool = False
    mirrored: bool = False

    @property
    def of_rank(self) -> Collector:
        """The same kind, for values that differ between ranks."""
        return dataclasses.replace(self, mirrored=False)

    def counter(self, name: str, text: str, *own: str, closed: tuple[str, ...] = ()) -> Row:
        """Return a counter; ``closed`` are the label values that the engine itself starts at 0."""
        return dataclasses.replace(self._row(name, "counter", text, own), closed=closed)

    def gauge(self, name: str, text: str, *own: str, combine: Combine = "sum") -> Row:
        """Return a gauge."""
        return dataclasses.replace(self._row(name, "gauge", text, own), combine=combine)

    def histogram(self, name: str, text: str, bounds: tuple[float, ...] | str, *own: str) -> Row:
        """Return a histogram; ``bounds`` are its bounds or the name of a bucket family."""
        return dataclasses.replace(
            self._row(name, "histogram", text, own),
            buckets=bounds if isinstance(bounds, str) else "",
            bounds=() if isinstance(bounds, str) else bounds,
        )

    def summary(self, name: str, text: str, *own: str) -> Row:
        """Return a summary, which has a sum and a count only."""
        return self._row(name, "summary", text, own)

    def _row(self, name: str, kind: Kind, text: str, own: tuple[str, ...]) -> Row:
        return Row(
            name=f"sglang:{name}",
            kind=kind,
            source=Sampled(),
            help=text,
            labels=tuple(sorted((*self.shared, *own))),
            shared=self.shared,
            extra_labels=self.extra_labels,
            mirrored=self.mirrored,
        )


SCHEDULER = Collector(
    ("engine_type", "model_name", "moe_ep_rank", "pp_rank", "tp_rank"), mirrored=True
)
TOKENIZER = Collector(("engine_type", "model_name"), extra_labels=True)
RADIX = Collector(("cache_type", "dp_rank", "pp_rank", "tp_rank"), mirrored=True)
STORAGE = Collector(
    (
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
ENCODER = Collector(("dp_rank", "model_name"))
PROCESS = Collector(())
"""Metrics of a single process, without a label that identifies it."""
