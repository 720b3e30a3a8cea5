"""Stands in for SGLang's kernels, which PyPI has for CUDA only.

SGLang imports them on any machine. A dense model with PyTorch's own attention
and sampling calls none. With it comes what SGLang expects of a device's events:
those of torch for the CPU cannot be asked for the time.
"""

from __future__ import annotations

import sys
import time

import torch.cpu
from stand_in import stand_in


class Event:
    """A point in time: on the CPU all work is done by then."""

    def __init__(self, *_: object, **__: object) -> None:
        self._at = 0.0

    def record(self, _stream: object = None) -> None:
        """Take the time."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Whether it has come."""
        return True

    def synchronize(self) -> None:
        """Wait for it."""

    def wait(self, _stream: object = None) -> None:
        """Let a stream wait for it."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds until another."""
        return (end._at - self._at) * 1e3


torch.cpu.Event = Event
# SGLang takes its own types where the kernels bring none.
stand_in(sys.modules[__name__], without="scalar_type")
