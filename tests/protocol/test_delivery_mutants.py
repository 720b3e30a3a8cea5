"""Mutants of the delivery rules, each of which must make the delivery model fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import sidestep

SOURCE = Path(sidestep.__file__).parent
MODEL = Path(__file__).with_name("test_delivery_model.py")
RUNS = 1000
"""Runs of the model per mutant; most are found in the first hundred."""

RECEIVER, SENDER = "protocol/receiver.py", "protocol/sender.py"
MUTANTS: Mapping[str, tuple[str, str, str]] = {
    "a repeated frame is applied again": (
        RECEIVER,
        "if message.first == seq + 1 and message.last >= seq:",
        "if message.first <= seq + 1:",
    ),
    "a gap is accepted": (
        RECEIVER,
        "if message.first == seq + 1 and message.last >= seq:",
        "if message.first >= seq + 1:",
    ),
    "a Hello takes the seq back": (
        RECEIVER,
        "Transition(_KNOWN, [Event.HELLO], Receiver._resume,",
        "Transition(_KNOWN, [Event.HELLO], Receiver._open,",
    ),
    "applied items are reported as durable": (
        RECEIVER,
        "durable = stream.durable if self.durable else stream.seq",
        "durable = stream.seq",
    ),
    "a replaced process that goes on has no seq": (
        RECEIVER,
        "stream.seq = known.retired.pop(hello.incarnation)",
        "known.retired.pop(hello.incarnation)",
    ),
    "a snapshot has no seqs of replaced processes": (
        "snapshot/capture.py",
        "list(stream.retired.values()),",
        "[0 for _ in stream.retired],",
    ),
    "records of a replica are refused": (
        "ingest/intake.py",
        "name = numbered_id(record.head.engine.id, replica)",
        "name = record.head.engine.id",
    ),
    "an aggregate takes one seq": (
        RECEIVER,
        "stream.seq = message.last",
        "stream.seq = message.first",
    ),
    "applied items free the ring": (
        SENDER,
        "self._ring.free(ack.durable)",
        "self._ring.free(ack.applied)",
    ),
    "any Ack completes the handshake": (
        SENDER,
        "if self._hello_sent and message.nonce == self._nonce:",
        "if self._hello_sent:",
    ),
    "nothing is retransmitted after a handshake": (
        "protocol/ring.py",
        "self._next = sum(chunk.last <= applied for chunk in self._chunks)",
        "self._next = len(self._chunks)",
    ),
    "folded items are dropped if others are queued": (
        SENDER,
        "        self._pending.append(folded)\n",
        "        self._pending.extend([] if self._pending else [folded])\n",
    ),
    "the ring exceeds its size": (
        SENDER,
        "if self._folder.count or self.held_bytes + len(item) > self._ring_bytes:",
        "if self._folder.count or self.held_bytes + len(item) > 2 * self._ring_bytes:",
    ),
    "folded items are never sent": (
        SENDER,
        "if self._folder.count and self.held_bytes <= self._ring_bytes // 2:",
        "if False:",
    ),
    "folding drops its first item": (
        "engines/folding.py",
        "        self.count += 1\n        try:",
        "        self.count += 1\n        if self.count == 1:\n            return True\n        try:",
    ),
    "folded totals replace counters": (
        "metrics/merge.py",
        "engine.values[slot] = (engine.values[slot] or 0) + value",
        "engine.values[slot] = value",
    ),
    "histograms of a record are not added": (
        "metrics/merge.py",
        "        if buckets is not None and name in slots:\n            moved",
        "        if buckets is None and name in slots:\n            moved",
    ),
    "a snapshot has the seqs of the one before": (
        "snapshot/capture.py",
        "        stream.seq,\n        stream.engines,",
        "        stream.durable,\n        stream.engines,",
    ),
    "a snapshot has no streams": (
        "snapshot/capture.py",
        "streams.append(_stream(piece))",
        "_stream(piece)",
    ),
    "a snapshot has engines as first encoded": (
        "snapshot/capture.py",
        "if version != engine.version:",
        "if version == -1:",
    ),
    "items applied after the snapshot are reported as durable": (
        "snapshot/capture.py",
        "self._intake.receiver.mark_durable(self._marks)",
        "self._intake.receiver.mark_durable(self._intake.receiver.cursors())",
    ),
    "a page is sent with an older snapshot": (
        "snapshot/capture.py",
        "        return self._intake.registry.version, self._intake.receiver.changes",
        "        return 0, 0",
    ),
    "an invalid item drops those behind it": (
        "ingest/intake.py",
        "        except WireError as error:\n            self.reject(error.reason)\n",
        "        except WireError as error:\n            self._work.clear()\n",
    ),
}

SHORT = ("a gap is accepted", "applied items free the ring", "folded totals replace counters")
"""Mutants that every run tries: one of the receiver, of the sender, and of what they send."""


def survives(folder: Path, path: str, before: str, after: str) -> bool:
    """Return whether the model passes with this mutant."""
    package = folder / "sidestep"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("data", "__pycache__"))
    module = package / path
    text = module.read_text()
    assert text.count(before) == 1, f"{path}: the mutant fits {text.count(before)} places"
    module.write_text(text.replace(before, after))
    adapters = SOURCE.parent.parent / "adapters"
    environ = {
        **os.environ,
        "PYTHONPATH": f"{folder}:{adapters}",
        "SIDESTEP_MODEL_RUNS": str(RUNS),
        "CI": "1",
    }
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(MODEL))
    done = subprocess.run(
        command, env=environ, cwd=MODEL.parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0


@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in MUTANTS],
)
def test_the_model_kills_the_mutant(name: str, tmp_path: Path) -> None:
    """A mutant that survives is a fault that the model cannot notice."""
    assert not survives(tmp_path, *MUTANTS[name])
