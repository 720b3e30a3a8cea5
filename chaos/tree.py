"""Kill exporters of a tree, and print what it cost: lost, doubled, gone back.

Every leaf is a real process with a state directory and without pages, fed by a real publisher,
and forwards to one root; leaves and the root are killed at random, by the seed. The publishers know
to the item what the root's page must show in the end, and a scraper watches that nothing goes
back meanwhile. The exit code is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from pathlib import Path
from random import Random

from chaos.exporter import ExporterProcess
from chaos.tally import Tally
from chaos.verdict import Difference
from chaos.watch import Watch
from sidestep.engines.items import VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

MODEL = "chaos/tree"
ITL = "vllm:inter_token_latency_seconds"
SCRAPES = 1.0
"""A second: each page has hundreds of series an engine."""
PATIENCE = 120.0
LOOK = 0.2


class Leaf:
    """An exporter, and what pushes to it."""

    def __init__(self, folder: Path, number: int, root: str, rate: float) -> None:
        own = folder / f"leaf-{number}"
        own.mkdir()
        path = own / "ingest" / "i.ipc"
        flags = ["--ingest.endpoint", f"ipc://{path}", "--state.dir", str(own / "state")]
        flags += ["--forward", root, "--forward.interval", "0.5"]
        flags += ["--forward.source", f"leaf-{number}"]
        self.exporter = ExporterProcess(own, flags, path)
        self.engine = str(number)
        info = EngineInfo(f"{MODEL}/{number}", "vllm", {"engine": self.engine, "model_name": MODEL})
        self.publisher = Publisher(f"ipc://{path}", f"engine-{number}", [info])
        self.tally = Tally()
        self.pushed = 0
        self._random = Random(number)
        self._interval = 1.0 / rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"chaos-{number}", daemon=True)

    def start(self) -> None:
        """Push from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Push no more."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        """End all."""
        self.stop()
        self.publisher.close(0.0)
        self.exporter.kill()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            tokens = self._random.randint(1, 8)
            latencies = [self._random.randint(1, 2048) / 1024 for _ in range(tokens)]
            self.tally.count("vllm:generation_tokens_total", tokens)
            self.tally.observe(ITL, "inter_token_latency", *latencies)
            iteration = IterationStats(tokens, inter_token_latencies_iter=latencies)
            self.publisher.push(VllmStep(0, time.monotonic(), time.time(), None, iteration))
            self.pushed += 1


class Tree:
    """All processes; use it as a context."""

    def __init__(self, folder: Path, leaves: int, rate: float, seed: int) -> None:
        endpoint = f"ipc://{folder}/root/i.ipc"
        (folder / "root").mkdir(mode=0o700)
        flags = ["--ingest.endpoint", endpoint, "--state.dir", str(folder / "state")]
        self.root = ExporterProcess(folder, flags)
        self.leaves = [Leaf(folder, number, endpoint, rate) for number in range(leaves)]
        self.random = Random(seed)
        self.kills = {"leaf": 0, "root": 0}

    def __enter__(self) -> Tree:  # noqa: PYI034 - Self is not yet in typing in 3.10
        self.root.start()
        for leaf in self.leaves:
            leaf.exporter.begin()
        for leaf in self.leaves:
            while not leaf.exporter.ready():
                time.sleep(LOOK)
            leaf.start()
        self.watch = Watch(self.root.port, MODEL, SCRAPES, timeout=5.0)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AttributeError):
            self.watch.close()
        for leaf in self.leaves:
            leaf.close()
        self.root.kill()

    def harm(self, seconds: float) -> None:
        """Kill for so long: a leaf mostly, or the root, and start it again a little later."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.random.random() < 1 / 4:
                self.kills["root"] += 1
                self.root.kill()
                time.sleep(self.random.uniform(0.0, 1.0))
                self.root.start()
            else:
                self.kills["leaf"] += 1
                leaf = self.random.choice(self.leaves)
                leaf.exporter.kill()
                time.sleep(self.random.uniform(0.0, 0.5))
                leaf.exporter.begin()
            time.sleep(self.random.uniform(0.2, 2.0))

    def settle(self) -> list[Difference]:
        """Push no more, and wait until all is there; what is not."""
        for leaf in self.leaves:
            leaf.stop()
        until = time.monotonic() + PATIENCE
        while (found := self.differences()) and time.monotonic() < until:
            time.sleep(LOOK)
        return found

    def differences(self) -> list[Difference]:
        """Series of the root's page that do not show what was pushed."""
        page = self.watch.page
        return [
            Difference(series, wanted, page.get(series, 0.0))
            for leaf in self.leaves
            for series, wanted in leaf.tally.page(leaf.engine, MODEL).items()
            if page.get(series, 0.0) != wanted
        ]


def main() -> None:
    """Run one tree, and say how it went."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos.tree",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--leaves", type=int, default=8)
    parser.add_argument("--rate", type=float, default=20.0, help="items a second, of each leaf")
    parser.add_argument("--seconds", type=float, default=30.0, help="of killing")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as name,
        Tree(Path(name), args.leaves, args.rate, args.seed) as tree,
    ):
        tree.harm(args.seconds)
        found = tree.settle()
        monotony, scrapes = tree.watch.monotony, tree.watch.scrapes
        pushed = sum(leaf.pushed for leaf in tree.leaves)
        dropped = sum(leaf.publisher.dropped for leaf in tree.leaves)
    lost = [one for one in found if one.share > 0]
    doubled = [one for one in found if one.share < 0]
    print(
        f"{args.leaves} leaves, {tree.kills['leaf']} of them killed, the root"
        f" {tree.kills['root']} times: {pushed} items pushed, {dropped} dropped; series that miss"
        f" some {len(lost)}, that have too many {len(doubled)}, that went back"
        f" {monotony.decreases} on {scrapes} pages"
    )
    for one in (lost + doubled)[:5]:
        print(f"- {one.series}: {one.pushed:g} pushed, {one.shown:g} shown")
    for back in monotony.examples:
        print(f"- {back.series} went from {back.before:g} to {back.after:g}")
    raise SystemExit(bool(found or monotony.decreases or dropped))


if __name__ == "__main__":
    main()
