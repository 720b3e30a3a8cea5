"""Make the demo's recording of a Triton server from two answers of a real one.

One answer is from before a load, the other from after it; polls in between are interpolated.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from sidestep.engines.items import encode_item
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.recording.format import Items, StreamStart, Writer
from sidestep_adapters.triton import statistics
from sidestep_adapters.triton.rows import CACHE, EXECUTES, FAILURES
from sidestep_adapters.triton.wire import TritonStats

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "triton"
STREAM = "triton"
POLLS = 40
INTERVAL = 0.5


def models(name: str) -> list[dict[str, Any]]:
    """Return the statistics in a recorded answer."""
    body = gzip.decompress((DATA / name).read_bytes()).rpartition(b"\r\n\r\n")[2]
    found: list[dict[str, Any]] = json.loads(body)["model_stats"]
    return found


def part(value: Any, share: float) -> Any:
    """Return statistics with a share of each count; other numbers stay."""
    if isinstance(value, dict):
        kept = ("batch_size", "last_inference", "byte_size", "id")
        return {key: v if key in kept else part(v, share) for key, v in value.items()}
    if isinstance(value, list):
        return [part(each, share) for each in value]
    return int(value * share) if isinstance(value, int) else value


def main() -> None:
    """Write the recording."""
    after = models("stats_all.http.gz")
    infos = [
        EngineInfo(
            f"{each['name']}/{each['version']}",
            "triton",
            {"model": each["name"], "version": each["version"]},
            features=sorted(
                [
                    FAILURES,
                    *([CACHE] if each["name"] == "cached" else []),
                    *([EXECUTES] if each["name"] != "ens" else []),
                ]
            ),
        )
        for each in after
    ]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "recording")
        writer = Writer(file)
        writer.write(StreamStart(0.0, STREAM, infos))
        for poll in range(POLLS + 1):
            items = []
            for engine, each in enumerate(after):
                piece = json.dumps(part(each, poll / POLLS)).encode()
                stats = statistics.read(piece, has_cache=each["name"] == "cached")
                items.append(msgspec.Raw(encode_item(TritonStats(engine, 0.0, 0.0, stats, 1))))
            writer.write(Items(poll * INTERVAL, STREAM, items))
        writer.close()
        out = ROOT / "exporter" / "sidestep" / "data" / "triton.rec.gz"
        out.write_bytes(gzip.compress(file.read_bytes(), mtime=0))


if __name__ == "__main__":
    main()
