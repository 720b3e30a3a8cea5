"""Flood exporters at the limits of the sidecar's manifest: ``python -m fuzz.pod_flood --floods 20``, as root.

Each flood has 16 connections that send messages of 1 MB as fast as possible: whole ones, ones of many
parts, and one that never ends. An honest engine sends, too. The exit code is 1 if the kernel killed an
exporter, or a count of the engine is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fuzz import zmtp_peer as zmtp
from fuzz.siege import Siege
from fuzz.zmtp_peer import Address

MANIFEST = Path(__file__).parents[1] / "deploy/kustomize/parts/pod/pod.yaml"
CONNECTIONS = 16
BYTES = 1_000_000
PARTS = {"whole": 1, "parts": 60, "endless": sys.maxsize}
"""Parts of each message, by kind of flood."""
ROW = "{:>8}{:>6}{:>10}{:>10}{:>10}{:>10}  {}"
PERIOD = 100_000
"""Microseconds of a period of the CPU limit, as Kubernetes sets it."""


class Pod:
    """A cgroup with limits of CPU and memory, of version 1 or 2.

    Raises:
        OSError: This user may not make one.
    """

    def __init__(self, millicores: int, mib: int) -> None:
        root, name = Path("/sys/fs/cgroup"), f"sidestep-{os.getpid()}"
        quota = millicores * PERIOD // 1000
        if (root / "cgroup.controllers").exists():
            (root / "cgroup.subtree_control").write_text("+cpu +memory")
            self.folders = [root / name]
            limits = {"memory.max": mib << 20, "memory.swap.max": 0, "cpu.max": f"{quota} {PERIOD}"}
        else:
            self.folders = [root / "memory" / name, root / "cpu" / name]
            limits = {"memory.limit_in_bytes": mib << 20, "cpu.cfs_quota_us": quota}
        for folder in self.folders:
            folder.mkdir()
            for file, value in limits.items():
                if (folder / file).exists():
                    (folder / file).write_text(str(value))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Put the processes that the block starts into the pod."""
        before = _own_folders()
        _move(self.folders)
        try:
            yield
        finally:
            _move(before)

    @property
    def peak(self) -> int:
        """Most memory that was in use, in MiB; 0 if the kernel does not record it."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (file := self.folders[0] / name).exists():
                return int(file.read_text()) >> 20
        return 0

    def close(self) -> None:
        """Remove the empty cgroup."""
        for folder in self.folders:
            folder.rmdir()


def main() -> None:
    """Parse, flood, print."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.pod_flood", description=__doc__)
    parser.add_argument("--floods", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=8.0, help="that each one lasts")
    parser.add_argument("--memory", type=int, help="MiB of the container instead of the manifest's")
    options = parser.parse_args()
    print(ROW.format("kind", "door", "peak MiB", "hard", "limit", "rebinds", "outcome"))
    kinds = [(kind, door) for kind in PARTS for door in ("ipc", "tcp")]
    rows = [
        flood(*kinds[number % len(kinds)], options.seconds, options.memory)
        for number in range(options.floods)
    ]
    sys.exit(any(outcome != "lives" for outcome in rows))


def flood(kind: str, door: str, seconds: float, memory: int | None = None) -> str:
    """Run one flood, print its row, and return the outcome."""
    millicores, mib, flags = _of_manifest()
    pod = Pod(millicores, memory or mib)
    try:
        # The state directory is in memory, which counts, too.
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as state,
            tempfile.TemporaryDirectory() as folder,
        ):
            named = [*flags, "--state.dir", f"{state}/state"]
            siege = Siege(Path(folder), named, pod.entered())
            try:
                address: Address = siege.path if door == "ipc" else ("127.0.0.1", siege.port)
                send(address, PARTS[kind], seconds)
                outcome = _outcome(siege)
                rebinds = siege.value("sidestep_rebinds_total") if outcome != "killed" else 0
            finally:
                siege.end()
                siege.process.kill()
        hard = flags[-1].rpartition("=")[2]
        print(ROW.format(kind, door, pod.peak, hard, memory or mib, rebinds, outcome), flush=True)
        return outcome
    finally:
        pod.close()


def _outcome(siege: Siege) -> str:
    if not siege.process.running:
        return "killed"
    # The engine waits between two attempts to connect.
    siege.settled()
    siege.end()
    return "lives" if siege.waits_for(lambda: siege.counted() == siege.honest.pushed) else "lost"


def send(address: Address, parts: int, seconds: float) -> None:
    """Flood an address with messages of so many parts."""
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_send_one, args=(address, parts, until)) for _ in range(CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send_one(address: Address, parts: int, until: float) -> None:
    body = zmtp.noise(BYTES)
    part, last = zmtp.frame(body, zmtp.MORE), zmtp.frame(body)
    while time.monotonic() < until:
        with contextlib.suppress(OSError), zmtp.connect(address) as peer:
            sent = 0
            while time.monotonic() < until:
                sent += 1
                peer.sendall(part if sent % parts else last)
        time.sleep(0.01)


def _of_manifest() -> tuple[int, int, list[str]]:
    """Return the sidecar's CPU and memory, and its flags on memory."""
    text = MANIFEST.read_text()
    sidecar = text[text.index("- name: sidestep\n        image:") :]
    cpu, memory = re.findall(r"limits: \{cpu: (\d+)m, memory: (\d+)Mi\}", sidecar)[0]
    return int(cpu), int(memory), re.findall(r"--limits\.memory-\w+=\d+", sidecar)


def _own_folders() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory", "cpu") and (root / controllers / "cgroup.procs").exists():
            found.append(root / controllers / path.lstrip("/"))
    return found


def _move(folders: list[Path]) -> None:
    for folder in folders:
        (folder / "cgroup.procs").write_text(str(os.getpid()))


if __name__ == "__main__":
    main()
