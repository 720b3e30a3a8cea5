"""Page sizes in each format, and the cost of compression.

Both are exporter processes with the same steps; in the peer, prometheus_client's objects
hold the values. prometheus_client's own server compresses at gzip's level 9.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Mapping

from benchmarks.flow import SETTLE, flowing
from benchmarks.process import SERVE, ExporterProcess
from benchmarks.summary.ingest import CLIENT
from benchmarks.summary.pages import milliseconds
from benchmarks.summary.rows import Figure, Row, Topic
from sidestep.exposition.negotiation import CONTENT_TYPES

ENGINES = 64
TEXT = "prometheus_client's text"
PACKED = "prometheus_client's text, gzip level 9"
OF = f"page of {ENGINES} engines"
ROWS = {
    "text": f"{OF}, text",
    "packed": f"{OF}, text, gzip level 1",
    "protobuf": f"{OF}, protobuf with native histograms",
    "packed protobuf": f"{OF}, protobuf with native histograms, gzip level 1",
    "compressing": f"{OF}, compressing the text",
}


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return KiB, and milliseconds of CPU for compression."""
    seconds = 1.0 if quick else 3.0
    native = (*SERVE, "--histograms", "native")
    text, packed = pages(native, seconds, "text")
    protobuf, packed_protobuf = pages(native, seconds, "protobuf")
    theirs, _ = pages(CLIENT, seconds, "text")
    # As prometheus_client's server compresses a page.
    theirs_packed = gzip.compress(theirs)
    return {
        ROWS["text"]: kib(text, theirs),
        ROWS["packed"]: kib(packed, theirs_packed),
        ROWS["protobuf"]: kib(protobuf, theirs),
        ROWS["packed protobuf"]: kib(packed_protobuf, theirs_packed),
        ROWS["compressing"]: Figure(
            milliseconds(lambda: zlib.compress(text, 1)),
            milliseconds(lambda: gzip.compress(theirs)),
        ),
    }


def pages(command: tuple[str, ...], seconds: float, form: str) -> tuple[bytes, bytes]:
    """Return the page as it is, and compressed with gzip."""
    accept = next(text for name, text in CONTENT_TYPES.items() if name == form)
    with ExporterProcess(command) as exporter:
        with flowing(exporter.endpoint, ENGINES, 20.0, 64):
            time.sleep(seconds)
        time.sleep(SETTLE)
        return (
            exporter.get("/metrics", {"Accept": accept}),
            exporter.get("/metrics", {"Accept": accept, "Accept-Encoding": "gzip"}),
        )


def kib(ours: bytes, theirs: bytes) -> Figure:
    """Return both sizes as a figure."""
    return Figure(len(ours) / 1024, len(theirs) / 1024)


SIZES = Topic(
    "What travels",
    tuple(
        Row(name, *(("ms", PACKED) if key == "compressing" else ("KiB", peer_of)))
        for key, name in ROWS.items()
        for peer_of in [PACKED if key.startswith("packed") else TEXT]
    ),
    measure,
)
