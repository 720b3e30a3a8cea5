"""Kill exporters that forward to each other, and print what is lost, doubled or decreased.

Each downstream exporter is a real process with a state directory and without pages. A real publisher
feeds it, and it forwards to one upstream exporter. A seed decides which process is killed when. The
publishers count what the upstream page must have in the end, and a scraper watches that no series
decreases meanwhile. The exit code is 1 if a promise was broken.
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
from sidestep.engines.vllm.wire import VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

MODEL = "chaos/federation"
ITL = "vllm:inter_token_latency_seconds"
SCRAPES = 1.0
"""A second: each page has hundreds of series an engine."""
PATIENCE = 120.0
LOOK = 0.2


class Downstream:
    """A downstream exporter, and the engine that pushes to it."""

    def __init__(self, folder: Path, number: int, upstream: str, rate: float) -> None:
        own = folder / f"downstream-{number}"
        own.mkdir()
        path = own / "ingest" / "i.ipc"
        flags = ["--ingest.endpoint", f"ipc://{path}", "--state.dir", str(own / "state")]
        flags += ["--forward", upstream, "--forward.interval", "0.5"]
        flags += ["--forward.source", f"downstream-{number}"]
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
        """Start pushing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop pushing."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        """End all processes."""
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


class Federation:
    """All processes; use it as a context."""

    def __init__(self, folder: Path, downstreams: int, rate: float, seed: int) -> None:
        endpoint = f"ipc://{folder}/upstream/i.ipc"
        (folder / "upstream").mkdir(mode=0o700)
        flags = ["--ingest.endpoint", endpoint, "--state.dir", str(folder / "state")]
        self.upstream = ExporterProcess(folder, flags)
        self.downstreams = [
            Downstream(folder, number, endpoint, rate) for number in range(downstreams)
        ]
        self.random = Random(seed)
        self.kills = {"downstream": 0, "upstream": 0}

    def __enter__(self) -> Federation:  # noqa: PYI034 - Self is not yet in typing in 3.10
        self.upstream.start()
        for downstream in self.downstreams:
            downstream.exporter.begin()
        for downstream in self.downstreams:
            while not downstream.exporter.ready():
                time.sleep(LOOK)
            downstream.start()
        self.watch = Watch(self.upstream.port, MODEL, SCRAPES, timeout=5.0)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AttributeError):
            self.watch.close()
        for downstream in self.downstreams:
            downstream.close()
        self.upstream.kill()

    def harm(self, seconds: float) -> None:
        """Kill downstream exporters, and sometimes the upstream one, and start each again a little later."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.random.random() < 1 / 4:
                self.kills["upstream"] += 1
                self.upstream.kill()
                time.sleep(self.random.uniform(0.0, 1.0))
                self.upstream.start()
            else:
                self.kills["downstream"] += 1
                downstream = self.random.choice(self.downstreams)
                downstream.exporter.kill()
                time.sleep(self.random.uniform(0.0, 0.5))
                downstream.exporter.begin()
            time.sleep(self.random.uniform(0.2, 2.0))

    def settle(self) -> list[Difference]:
        """Stop pushing and wait until everything arrived; return what did not."""
        for downstream in self.downstreams:
            downstream.stop()
        until = time.monotonic() + PATIENCE
        while (found := self.differences()) and time.monotonic() < until:
            time.sleep(LOOK)
        return found

    def differences(self) -> list[Difference]:
        """Return the series of the upstream page that differ from what was pushed."""
        page = self.watch.page
        return [
            Difference(series, wanted, page.get(series, 0.0))
            for downstream in self.downstreams
            for series, wanted in downstream.tally.page(downstream.engine, MODEL).items()
            if page.get(series, 0.0) != wanted
        ]


def main() -> None:
    """Run one federation, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos.federation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--downstreams", type=int, default=8)
    parser.add_argument("--rate", type=float, default=20.0, help="items per second and exporter")
    parser.add_argument("--seconds", type=float, default=30.0, help="of killing")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as name,
        Federation(Path(name), args.downstreams, args.rate, args.seed) as federation,
    ):
        federation.harm(args.seconds)
        found = federation.settle()
        monotony, scrapes = federation.watch.monotony, federation.watch.scrapes
        pushed = sum(downstream.pushed for downstream in federation.downstreams)
        dropped = sum(downstream.publisher.dropped for downstream in federation.downstreams)
    lost = [one for one in found if one.share > 0]
    doubled = [one for one in found if one.share < 0]
    print(
        f"{args.downstreams} downstream exporters, killed {federation.kills['downstream']} times, and"
        f" one upstream, killed {federation.kills['upstream']} times: {pushed} items pushed,"
        f" {dropped} dropped; series with losses {len(lost)}, with doubled counts {len(doubled)},"
        f" with decreases {monotony.decreases}, on {scrapes} pages"
    )
    for one in (lost + doubled)[:5]:
        print(f"- {one.series}: {one.pushed:g} pushed, {one.shown:g} shown")
    for back in monotony.examples:
        print(f"- {back.series} went from {back.before:g} to {back.after:g}")
    raise SystemExit(bool(found or monotony.decreases or dropped))


if __name__ == "__main__":
    main()
