"""A stand-in for SGLang's kernels, which PyPI has for CUDA only.

SGLang imports them on any machine. A dense model with PyTorch's own attention
and sampling calls none. ``Event`` is here because torch's events for the CPU have
no elapsed time.
"""

from __future__ import annotations

import sys
import time

import torch.cpu
from stand_in import stand_in


class Event:
    """A point in time; on the CPU all work is done by then."""

    def __init__(self, *_: object, **__: object) -> None:
        self._at = 0.0

    def record(self, _stream: object = None) -> None:
        """Record the time."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self, _stream: object = None) -> None:
        """Return at once."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between this event and ``end``."""
        return (end._at - self._at) * 1e3


torch.cpu.Event = Event
# Without this module SGLang uses scalar types of its own.
stand_in(sys.modules[__name__], without="scalar_type")
