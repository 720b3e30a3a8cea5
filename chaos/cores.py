"""Time for which threads ran, and time for which they were ready to run but had no core."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Cores(NamedTuple):
    """Seconds on a core, and seconds of waiting for one."""

    ran: float
    waited: float

    def since(self, before: Cores) -> Cores:
        """Return what was added since ``before``."""
        return Cores(self.ran - before.ran, self.waited - before.waited)


def of_thread(folder: Path) -> Cores:
    """Return the times of the thread of a ``/proc/*/task/*`` folder; 0 once it has ended."""
    try:
        ran, waited, _ = (folder / "schedstat").read_text(encoding="ascii").split()
    except OSError:
        return Cores(0.0, 0.0)
    return Cores(int(ran) / 1e9, int(waited) / 1e9)


def waited(pid: int) -> float:
    """Return the seconds that the present threads of a process waited for a core."""
    return sum(of_thread(folder).waited for folder in Path(f"/proc/{pid}/task").glob("*"))
