"""The test of the test: each of these defects must make the model of delivery fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import sidestep

SOURCE = Path(sidestep.__file__).parent
MODEL = Path(__file__).with_name("test_delivery_model.py")
RUNS = 1000
"""Of the model; a defect is found in the first hundred as a rule."""

RECEIVER, SENDER = "protocol/receiver.py", "protocol/sender.py"
MUTANTS: Mapping[str, tuple[str, str, str]] = {
    "a frame that comes again is applied again": (
        RECEIVER,
        "if first == stream.seq + 1 and last >= stream.seq:",
        "if first <= stream.seq + 1:",
    ),
    "a gap is passed over": (
        RECEIVER,
        "if first == stream.seq + 1 and last >= stream.seq:",
        "if first >= stream.seq + 1:",
    ),
    "what is applied is called durable": (
        RECEIVER,
        "durable = stream.durable if self.durable else stream.seq",
        "durable = stream.seq",
    ),
    "a process that was replaced is taken in again": (
        RECEIVER,
        "if stream is not None and (stream.local or hello.incarnation in stream.retired):",
        "if stream is None and hello.incarnation == 0:",
    ),
    "an aggregate takes one seq": (
        RECEIVER,
        "return self._items(stream, message.first, message.last, received)",
        "return self._items(stream, message.first, message.first, received)",
    ),
    "the ring is freed by what is applied": (
        SENDER,
        "self._ring.free(ack.durable)",
        "self._ring.free(ack.applied)",
    ),
    "any acknowledgement completes the handshake": (
        SENDER,
        "if self._hello_sent and message.nonce == self._nonce:",
        "if self._hello_sent:",
    ),
    "nothing is sent again after a handshake": (
        "protocol/ring.py",
        "self._next = sum(chunk.last <= applied for chunk in self._chunks)",
        "self._next = len(self._chunks)",
    ),
    "what was folded is left out where something waits": (
        SENDER,
        "        self._pending.append(folded)\n",
        "        self._pending.extend([] if self._pending else [folded])\n",
    ),
    "the ring grows": (
        SENDER,
        "if self._folder.count or self.held_bytes + len(item) > self._ring_bytes:",
        "if self._folder.count or self.held_bytes + len(item) > 2 * self._ring_bytes:",
    ),
    "what was folded is never sent": (
        SENDER,
        "if self._folder.count and self.held_bytes <= self._ring_bytes // 2:",
        "if False:",
    ),
    "folding forgets its first item": (
        "engines/folding.py",
        "        self.count += 1\n        try:",
        "        self.count += 1\n        if self.count == 1:\n            return True\n        try:",
    ),
    "what was folded replaces what was counted": (
        "metrics/merge.py",
        "engine.values[slot] = (engine.values[slot] or 0) + value",
        "engine.values[slot] = value",
    ),
    "a record's histograms are left out": (
        "metrics/merge.py",
        "        if buckets is not None and name in slots:\n            moved",
        "        if buckets is None and name in slots:\n            moved",
    ),
    "a snapshot says of streams what the last one said": (
        "snapshot/capture.py",
        "        stream.seq,\n        stream.engines,",
        "        stream.durable,\n        stream.engines,",
    ),
    "a snapshot has no streams": (
        "snapshot/capture.py",
        "streams.append(_stream(piece))",
        "_stream(piece)",
    ),
    "a snapshot has engines as they were once": (
        "snapshot/capture.py",
        "if version != engine.version:",
        "if version == -1:",
    ),
    "senders are told of what came after the snapshot": (
        "snapshot/capture.py",
        "self._intake.receiver.mark_durable(self._marks)",
        "self._intake.receiver.mark_durable(self._intake.receiver.cursors())",
    ),
    "a page is seen though the snapshot is older": (
        "snapshot/capture.py",
        "        return self._intake.registry.version, self._intake.receiver.changes",
        "        return 0, 0",
    ),
    "a poison item takes those behind it along": (
        "ingest/intake.py",
        "        except WireError as error:\n            self.reject(error.reason)\n",
        "        except WireError as error:\n            self._work.clear()\n",
    ),
}


def survives(folder: Path, path: str, before: str, after: str) -> bool:
    """Whether the model finds nothing wrong with the defect."""
    package = folder / "sidestep"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("data", "__pycache__"))
    module = package / path
    text = module.read_text()
    assert text.count(before) == 1, f"{path}: the defect fits {text.count(before)} places"
    module.write_text(text.replace(before, after))
    adapters = SOURCE.parent.parent / "adapters"
    environ = {
        **os.environ,
        "PYTHONPATH": f"{folder}:{adapters}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SIDESTEP_MODEL_RUNS": str(RUNS),
        "CI": "1",
    }
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(MODEL))
    done = subprocess.run(
        command, env=environ, cwd=MODEL.parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, object]:
    """Of each defect, what is known of it, from two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return {
            name: pool.submit(survives, tmp_path_factory.mktemp("mutant"), *defect)
            for name, defect in MUTANTS.items()
        }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", MUTANTS)
def test_the_model_finds(defect: str, found: Mapping[str, object]) -> None:
    """A model that a defect passes unnoticed is no proof of anything."""
    known = found[defect]

    assert not known.result()  # type: ignore[attr-defined]
