"""Kill an exporter that writes a record for each request, and print what is lost or doubled.

Several engines push the events of requests of known tenants through real publishers to one exporter
with a state directory. It is killed at random times and started again. In the end each request must
have a record, records that were written twice must be equal, and the counters of tenants and engines must
have the values that were pushed. On every page the tenants must sum up to the engines' totals, and no
counter may decrease. The exit code is 1 if one of this does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from chaos.exporter import ExporterProcess, free_port
from chaos.watch import Page, Watch, total
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.messages import ENGINE_CORE, EngineInfo
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Prompt,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep_adapters.publisher.publisher import Publisher

MODEL = "chaos/records"
TENANTS = [f"tenant-{number}" for number in range(7)]
ENDS = [FINISH_REASONS.index(reason) for reason in ("stop", "length", "abort")]
FOLLOWS = 3
"""Steps from a request's first output to its end."""
PATIENCE = 120.0
LOOK = 0.1
LOST = "sidestep_request_records_lost_total"
SUMS = {
    "sidestep_tenant_requests_total": "vllm:request_success_total",
    "sidestep_tenant_prompt_tokens_total": "vllm:prompt_tokens_by_source_total",
    "sidestep_tenant_generation_tokens_total": "vllm:generation_tokens_total",
}
"""Counters by tenant, and the engine's own counters with the same sum."""


class Core:
    """An engine's core: each step queues a request, and ends the one that began three steps ago.

    Attributes:
        keys: Keys of the records of all requests that ended.
        expected: Value that the page must have, by series.
        pushed: Number of pushed items.
    """

    def __init__(self, endpoint: str, number: int, rate: float, source: int = 0) -> None:
        self.engine = str(number)
        labels = {"engine": self.engine, "model_name": MODEL}
        info = EngineInfo(f"{MODEL}/{number}", "vllm", labels, features=[ENGINE_CORE])
        self.publisher = Publisher(endpoint, f"core-{number}", [info])
        self.keys: set[str] = set()
        self.expected: Counter[str] = Counter()
        self.pushed = 0
        self.random = Random(number)
        self._source = source or number + 1
        self._open: list[tuple[int, str, int]] = []
        self._interval = 1.0 / rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"chaos-{number}", daemon=True)

    def start(self) -> None:
        """Start pushing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop pushing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def close(self) -> None:
        """End the publisher."""
        self.stop()
        self.publisher.close(0.0)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.step()

    def names(self) -> tuple[str, str]:
        """Return the tenant and the adapter of the next request."""
        return self.random.choice(TENANTS), ""

    def ended(self, request: int) -> None:
        """Record that a request has ended."""
        self.keys.add(f"{MODEL}/{self.engine}/{self._source:x}/{request}")

    def step(self) -> None:
        """Push one step."""
        self.pushed += 1
        number, now, wall = self.pushed, time.monotonic(), time.time()
        (tenant, adapter), prompt = self.names(), self.random.randint(1, 900)
        identity = Identity(f"request-{number}", "", tenant)
        self._open.append((number, tenant, prompt))
        running = [request for request, _, _ in self._open]
        events: list[Event] = [
            Queued(number, now, wall, prompt, adapter, identity=identity),
            Scheduled(number, now),
            Iteration(now, now, wall, [Output(now, running)], prompts=[Prompt(number, prompt)]),
        ]
        self._count("prompt_tokens", tenant, prompt)
        for _, each, _ in self._open:
            self._count("generation_tokens", each, 1)
        if len(self._open) > FOLLOWS:
            request, tenant, prompt = self._open.pop(0)
            reason = self.random.choice(ENDS)
            events.append(Finished(request, now, wall, reason, prompt, FOLLOWS + 1))
            self._count("requests", tenant, 1)
            self.ended(request)
        self.publisher.push(RequestEvents(0, now, self._source, events))

    def _count(self, name: str, tenant: str, amount: int) -> None:
        labels = f'engine="{self.engine}",model_name="{MODEL}",tenant="{tenant}"'
        self.expected[f"sidestep_tenant_{name}_total{{{labels}}}"] += amount


class SumsWatch(Watch):
    """A scraper that also adds up tenants on every page.

    Attributes:
        unequal: Sums that were not the engine's own total.
    """

    def __init__(self, port: int) -> None:
        self.unequal: list[str] = []
        super().__init__(port, MODEL, 10.0)

    def look(self, page: Page) -> None:
        """Compare sums over tenants with totals."""
        for ours, totals in SUMS.items():
            found, own = total_of(page, ours), total_of(page, totals)
            if found != own:
                self.unequal.append(f"{ours} add up to {found:g}, {totals} is {own:g}")


def total_of(page: Page, name: str) -> float:
    """Return the sum of the series of a family."""
    return sum(value for series, value in page.items() if series.startswith(f"{name}{{"))


class Records:
    """All processes; use it as a context."""

    def __init__(self, folder: Path, transport: str, engines: int, rate: float, seed: int) -> None:
        self.log = folder / "requests.jsonl"
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        if transport == "ipc":
            endpoint = f"ipc://{folder}/ingest/i.ipc"
        flags = ["--ingest.endpoint", endpoint, "--state.dir", str(folder / "state")]
        flags += ["--requests.log", str(self.log), "--requests.log.size", "1000"]
        flags += ["--tenants.by", "cache-salt"]
        self.exporter = ExporterProcess(folder, flags)
        self.random = Random(seed)
        self.kills = 0
        self._endpoint = endpoint
        self._engines = engines
        self._rate = rate
        self.cores: list[Core] = []

    def __enter__(self) -> Records:  # noqa: PYI034 - Self is not yet in typing in 3.10
        self.exporter.start()
        self.cores = [Core(self._endpoint, one, self._rate) for one in range(self._engines)]
        for core in self.cores:
            core.start()
        self.watch = SumsWatch(self.exporter.port)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AttributeError):
            self.watch.close()
        for core in self.cores:
            core.close()
        self.exporter.kill()

    def kill(self) -> None:
        """Let requests end for a while, kill the exporter, and start it again a little later."""
        time.sleep(self.random.uniform(0.3, 2.0))
        self.exporter.kill()
        self.kills += 1
        time.sleep(self.random.uniform(0.0, 1.0))
        self.exporter.start()

    def settle(self) -> None:
        """Stop pushing, and wait until everything has arrived and is written."""
        for core in self.cores:
            core.stop()
        until = time.monotonic() + PATIENCE
        while (self.missing or self.differences()) and time.monotonic() < until:
            time.sleep(LOOK)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The records in the file; an incomplete line was written again after the kill."""
        found = []
        for line in self.log.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    @property
    def missing(self) -> set[str]:
        """Keys of requests without a record."""
        keys = {key for core in self.cores for key in core.keys}
        return keys - {record["key"] for record in self.lines}

    @property
    def unequal(self) -> list[str]:
        """Keys of records that were written twice and are not equal, or that belong to no request that ended."""
        keys = {key for core in self.cores for key in core.keys}
        first: dict[str, Mapping[str, Any]] = {}
        return [
            record["key"]
            for record in self.lines
            if record != first.setdefault(record["key"], record) or record["key"] not in keys
        ]

    def differences(self) -> list[str]:
        """Return the series of tenants that differ from what was pushed."""
        page = self.watch.page
        wanted = {series: value for core in self.cores for series, value in core.expected.items()}
        shown = {series for series in page if series.startswith(tuple(SUMS))}
        return [
            f"{series}: {wanted.get(series, 0)} pushed, {page.get(series, 0.0):g} shown"
            for series in sorted(shown | wanted.keys())
            if page.get(series, 0.0) != wanted.get(series, 0)
        ]


def main() -> None:
    """Kill one exporter, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos.records",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second and engine")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as name,
        Records(Path(name), args.transport, args.engines, args.rate, args.seed) as records,
    ):
        for _ in range(args.kills):
            records.kill()
        records.settle()
        watch = records.watch
        found, missing, unequal = records.differences(), records.missing, records.unequal
        lines = [record["key"] for record in records.lines]
        counted = int(total(watch.text, LOST))
    ended = sum(len(core.keys) for core in records.cores)
    dropped = sum(core.publisher.dropped for core in records.cores)
    print(
        f"{args.engines} engines over {args.transport}, their exporter killed {records.kills} times:"
        f" {ended} requests ended, {dropped} items dropped; records missing {len(missing)}, counted as"
        f" lost {counted}, written twice {len(lines) - len({*lines})}, unequal or unknown"
        f" {len(unequal)}; tenants' series that differ {len(found)}, sums that differ"
        f" {len(watch.unequal)} and decreases {watch.monotony.decreases} on {watch.scrapes} pages"
    )
    for line in [*sorted(missing), *unequal, *found, *watch.unequal][:9]:
        print(f"- {line}")
    for back in watch.monotony.examples:
        print(f"- {back.series} went from {back.before:g} to {back.after:g}")
    is_broken = len(missing) != counted or unequal or found or watch.unequal
    raise SystemExit(bool(is_broken or watch.monotony.decreases or dropped))


if __name__ == "__main__":
    main()
