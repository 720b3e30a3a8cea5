"""KV events that TensorRT-LLM publishes over ZMQ, as constructed from its source, and the reader of ``--subscribe``."""

from __future__ import annotations

import gzip
import json

from exporters import DATA
from sidestep_adapters.streams import kv_events


def test_the_reader_of_streams_takes_them() -> None:
    """Every event of the constructed messages becomes a change of the cache, and none is refused."""
    made = gzip.decompress((DATA / "trtllm" / "kv_events_made.jsonl.gz").read_bytes())
    found = []
    for line in made.splitlines():
        batch = kv_events.decode(bytes.fromhex(json.loads(line)["payload"]))
        changes = kv_events.Changes(batch.events, batch.stamp)
        assert not changes.rejected
        assert batch.rank == 0
        found += [(change.kind, change.medium, len(change.hashes)) for change in changes.found]

    assert found == [
        ("stored", "GPU", 4),
        ("stored", "GPU", 6),
        ("removed", "GPU", 3),
        ("stored", "GPU", 1),
        ("cleared", "", 0),
    ]
