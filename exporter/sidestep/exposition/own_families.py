"""The exporter's own families; prometheus_client writes only those of other collectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.utils import floatToGoString

from sidestep.exposition import proto_format, protobuf_samples
from sidestep.exposition.negotiation import Format
from sidestep.exposition.text_format import header, label_text, series_text
from sidestep.telemetry.rows import SelfRow
from sidestep.telemetry.self_metrics import Labels, OwnRegistry, Sample

PER_SLICE = 100
"""Samples to write before yielding to the event loop: some microseconds each."""
MAX_TEXTS = 20_000
"""Cached label texts; some are of engines, which come and go."""

WRITERS: Mapping[Format, Callable[[Any], bytes]] = {
    "text": generate_latest,
    "openmetrics": generate_openmetrics,
    "protobuf": protobuf_samples.generate,
}


class OwnFamilies:
    """Writes the families of ``registry`` as prometheus_client does, several times faster."""

    def __init__(self, registry: OwnRegistry) -> None:
        self._registry = registry
        self._headers: dict[tuple[str, bool], bytes] = {}
        self._series: dict[tuple[str, Labels], str] = {}
        self._labels: dict[tuple[str, Labels], bytes] = {}

    def pieces(self, form: Format, names: Collection[str] = ()) -> Iterator[bytes]:
        """Yield the families, or those with one of the sample ``names``, and the end of the page.

        An empty piece means that the next one takes a while.
        """
        for cache in (self._series, self._labels):
            if len(cache) > MAX_TEXTS:
                cache.clear()
        for found in self._registry.metrics.samples(names):
            if found is None:
                yield b""
            elif form == "protobuf":
                yield from self._messages(*found)
            else:
                yield self._header(found[0], openmetrics=form == "openmetrics")
                yield from self._lines(*found)
        others: Any = self._registry.others
        yield WRITERS[form](others.restricted_registry(names) if names else others)

    def _messages(self, row: SelfRow, samples: Sequence[Sample]) -> Iterator[bytes]:
        """Yield a family in protobuf, which begins with its size."""
        metrics: list[bytes] = []
        for number, (labels, value) in enumerate(samples, start=1):
            label_bytes = self._labels.get((row.name, labels))
            if label_bytes is None:
                pairs = sorted(zip(row.labels, labels, strict=True))
                label_bytes = self._labels[row.name, labels] = proto_format.labels(pairs)
            encoded = proto_format.single(row.kind, float(value))
            metrics.append(proto_format.metric(label_bytes, encoded))
            if not number % PER_SLICE:
                yield b""
        yield b"".join(proto_format.family(row.name, row.kind, row.help, metrics))

    def _header(self, row: SelfRow, *, openmetrics: bool) -> bytes:
        found = self._headers.get((row.name, openmetrics))
        if found is None:
            found = header(row.name, row.kind, row.help, openmetrics=openmetrics).encode()
            self._headers[row.name, openmetrics] = found
        return found

    def _lines(self, row: SelfRow, samples: Sequence[Sample]) -> Iterator[bytes]:
        for start in range(0, len(samples), PER_SLICE):
            lines: list[str] = []
            for labels, value in samples[start : start + PER_SLICE]:
                text = self._series.get((row.name, labels))
                if text is None:
                    pairs = label_text(dict(zip(row.labels, labels, strict=True)))
                    text = self._series[row.name, labels] = series_text(row.name, pairs)
                lines.append(f"{text}{floatToGoString(value)}\n")  # type: ignore[no-untyped-call]
            yield "".join(lines).encode()
