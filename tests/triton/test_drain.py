"""What ends while a server drains: random histories held against the truth, and a real exporter."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conftest import Start, page_of_engine, until
from intakes import Fed
from polled import head, polled
from sidestep.config.triton_servers import parse as flag
from sidestep.exposition.passthrough.page import Plan
from sidestep.exposition.passthrough.registry import Passed
from sidestep.ingest.local_stream import ServerFeed
from sidestep.metrics.computed_gauges import scalar
from sidestep_adapters.triton.counters import NATIVE, UNKNOWN, Places, numbers, raised
from sidestep_adapters.triton.drain import Drain
from sidestep_adapters.triton.poller import Triton
from sidestep_adapters.triton.statistics import Head, read, split, translate
from triton.test_histories import NoConnection, Server
from tritons import Model, recording, tritons

SUCCESS = "nv_inference_request_success"
KEYS = [("a", "1"), ("c", "1")]
SOME = st.integers(0, 3)
NS = st.integers(500, 5000)
CACHED = "c"


def lines(models: Iterable[tuple[tuple[str, str], Model]]) -> bytes:
    """Triton's page of what these have counted; failures by two reasons."""
    found = []
    for (name, version), model in models:
        for row, number in zip(NATIVE, numbers(model.stats), strict=True):
            series = f'{row.name}{{model="{name}",version="{version}"'
            if number is not None and row.name == "nv_inference_request_failure":
                found.append(f'{series},reason="OTHER"}} {number // 2}')
                found.append(f'{series},reason="BACKEND"}} {number - number // 2}')
            elif number is not None:
                found.append(f"{series}}} {number // row.per}")
    return ("\n".join([*found, "nv_up 1"]) + "\n").encode()


class Drains(RuleBasedStateMachine):
    """One server and its page: work, reloads, refused polls, drains, restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.server = Server()
        self.truth = {key: Model() for key in KEYS}
        self.fed = Fed()
        registry = self.fed.intake.registry
        self.page = registry.passed.page()
        self.triton = Triton(
            flag("http://t:8000"),
            self.server,
            NoConnection(),
            ServerFeed(self.fed.intake, "triton t"),
            pytest.fail,
            has_failures=True,
        )
        self.drain = self.triton.drain()
        self.now = time.monotonic()
        self.shown: Counter[tuple[str, str]] = Counter()
        self.exact: dict[tuple[str, str], tuple[float, int]] = {}
        """Of versions that rested from a poll to a page: what is shown, and the truth, then."""
        self.rested: set[tuple[str, str]] = set()
        """Versions that have not worked since the last poll."""
        self.last: dict[tuple[str, str], int] = {}
        """The truth of the last page since statistics are refused."""
        self.is_closed = False
        """Whether a poll has found statistics refused."""
        self._start()

    def _start(self) -> None:
        self.native = {key: Model() for key in KEYS}
        for key in KEYS:
            self.server.load(*key)
        self.in_flight: list[tuple[tuple[str, str], int]] = []
        self.server.cause = ""
        self.has_page = self.is_alive = True
        self.is_ending = self.is_unloaded = False
        self.is_late = self.is_reloaded = False
        """Whether the page has what no statistics will: of requests that outlived a load, or of
        what went before a load that no poll has seen. Only an end makes that right."""

    def teardown(self) -> None:
        """End."""
        self.loop.close()

    @precondition(lambda self: self.is_alive and not self.is_ending)
    @rule(key=st.sampled_from(KEYS), requests=SOME, failures=SOME, hits=SOME, ns=NS)
    def serve(self, key: tuple[str, str], requests: int, failures: int, hits: int, ns: int) -> None:
        """Some requests."""
        self._work(key, self.server.lives[key], (requests, failures, hits), ns)

    @precondition(lambda self: self.is_alive and not self.is_ending)
    @rule(key=st.sampled_from(KEYS))
    def begin(self, key: tuple[str, str]) -> None:
        """A request that takes long."""
        self.in_flight.append((key, self.server.lives[key]))

    @precondition(lambda self: self.in_flight and self.is_alive and not self.is_unloaded)
    @rule(ns=NS)
    def finish(self, ns: int) -> None:
        """The oldest of them, perhaps while the server ends."""
        key, life = self.in_flight.pop(0)
        self._work(key, life, (1, 0, 0), ns)

    @precondition(lambda self: self.is_alive and not self.is_ending)
    @rule(key=st.sampled_from(KEYS))
    def reload(self, key: tuple[str, str]) -> None:
        """Statistics begin anew, the page does not."""
        self.server.load(*key)
        self.is_reloaded = True

    @rule()
    def poll(self) -> None:
        """For statistics."""
        lives = {key: self.drain._versions.get(Head(*key)) for key in KEYS}
        self.loop.run_until_complete(self.triton._poll())
        self._take()
        if self.server.cause:
            self.is_closed = True
            return
        self.is_closed = self.is_reloaded = False
        self.last = {}
        self.rested = set(KEYS)
        for key in KEYS:
            version = self.drain._versions[Head(*key)]
            known = lives[key]
            if known is None or known.life is not version.life:
                self.exact.pop(key, None)

    @rule()
    def look(self) -> None:
        """At the page."""
        self.now += 20.0
        self.drain.asked(self.now)
        if not self.has_page:
            self.drain.failed("unreachable")
            self._take()
            if self.is_closed:
                self._ended()
            return
        known = () if self.is_unloaded else self.native.items()
        for _ in self.page.take([lines(known)]):
            pass
        assert self.page.plan is not None
        for _ in self.drain.read(self.page.plan):
            pass
        if self.is_unloaded:
            return
        for key in self.rested:
            if not self.drain._is_over:
                self.exact.setdefault(key, (self._shown(key), self._true(key)))
        if self.is_closed:
            self.last = {key: self._true(key) for key in KEYS}

    @precondition(lambda self: self.is_alive)
    @rule()
    def terminate(self) -> None:
        """SIGTERM: statistics are refused, what is in flight goes on."""
        self.server.cause, self.is_ending = "unreachable", True

    @precondition(lambda self: self.is_ending and not self.in_flight)
    @rule()
    def unload(self) -> None:
        """Before its end it unloads its models; the page is still there."""
        self.is_unloaded = True

    @precondition(lambda self: self.is_alive)
    @rule()
    def kill(self) -> None:
        """The process is gone."""
        self.is_alive = self.has_page = False
        self.in_flight = []
        self.server.cause = "unreachable"

    @rule()
    def restart(self) -> None:
        """Another process."""
        self.exact, self.rested, self.last = {}, set(), {}
        self._start()
        self.is_reloaded = True

    @precondition(lambda self: self.is_alive)
    @rule(is_page=st.booleans())
    def cut_off(self, is_page: bool) -> None:
        """It works, but a port of it cannot be reached."""
        if is_page:
            self.has_page = False
        else:
            self.server.cause = "unreachable"

    @precondition(lambda self: self.is_alive and not self.is_ending and not self.is_late)
    @rule()
    def heal(self) -> None:
        """It can be reached again, and has gone on."""
        self.server.cause, self.has_page = "", True

    @precondition(lambda self: self.is_alive)
    @rule()
    def rest(self) -> None:
        """It is looked at twice, and does nothing in between."""
        self.poll()
        self.look()

    @precondition(lambda self: self.is_alive and not self.is_unloaded)
    @rule(waits=st.lists(st.booleans(), max_size=4), unloads=st.booleans(), again=st.booleans())
    def drain_all(self, waits: list[bool], *, unloads: bool, again: bool) -> None:
        """A whole end, looked at now and then, and another process perhaps."""
        if not self.is_ending:
            self.rest()
            self.begin(KEYS[0])
        self.terminate()
        self.poll()
        for looks in waits:
            if self.in_flight:
                self.finish(1700)
            if looks:
                self.look()
        if unloads and not self.in_flight:
            self.unload()
            self.look()
        self.kill()
        self.look()
        if again:
            self.restart()
            self.poll()

    @precondition(lambda self: self.is_alive and not self.is_ending)
    @rule(key=st.sampled_from(KEYS), times=st.integers(1, 2), heals=st.booleans())
    def lose(self, key: tuple[str, str], times: int, *, heals: bool) -> None:
        """First one port, then the other; back is only the page, and then all perhaps."""
        self.server.cause = "unreachable"
        self.poll()
        for turn in range(times):
            self.has_page = True
            self.look()
            self._work(key, self.server.lives[key], (2 - turn, 1, 1), 900)
            self.look()
            self.has_page = False
            self.look()
        if heals and not self.is_late:
            self.heal()
            self.poll()

    @invariant()
    def nothing_is_more_than_it_was(self) -> None:
        """Nor does a total ever shrink."""
        for key in KEYS:
            true = numbers(self.truth[key].stats)
            engine = self.fed.intake.registry.engines.get("triton/http://t:8000/" + "/".join(key))
            for row, most in zip(NATIVE, true, strict=True):
                if engine is None or (row.feature == "response_cache" and key[0] != CACHED):
                    continue
                assert scalar(engine, row.name) <= (most or 0), row.name
            shown = self._shown(key)
            assert shown >= self.shown[key]
            self.shown[key] = int(shown)

    def _ended(self) -> None:
        """The page is refused as statistics are: what it had last has been told."""
        for key, (shown, true) in self.exact.items():
            if key in self.last:
                assert self._shown(key) >= shown + self.last[key] - true
        self.exact, self.rested, self.last = {}, set(), {}
        self.is_late |= self.is_reloaded

    def _work(self, key: tuple[str, str], life: int, counts: tuple[int, int, int], ns: int) -> None:
        """So many requests that succeed, that fail, and that the cache answers."""
        requests, failures, hits = counts
        if not any(counts):
            return
        self.rested.discard(key)
        self.is_late |= life != self.server.lives[key]
        hits = hits if key[0] == CACHED else 0
        models = [(self.truth[key], ns), (self.native[key], ns // 1000 * 1000)]
        if life == self.server.lives[key]:
            models.append((self.server.models[key], ns))
        for model, each in models:
            # By a batch size of its own each life can be told from the one before.
            model.infer(1, size=life, ns=each)
            model.infer(requests, size=1000, ns=each, now=life)
            model.fail(failures, each)
            model.hit(hits, each)

    def _take(self) -> None:
        more = True
        while more:
            more = self.triton.receive(time.monotonic())
            while self.fed.intake.busy:
                self.fed.intake.work()

    def _true(self, key: tuple[str, str]) -> int:
        return self.truth[key].stats.inference_stats.success.count

    def _shown(self, key: tuple[str, str]) -> float:
        engine = self.fed.intake.registry.engines.get("triton/http://t:8000/" + "/".join(key))
        return 0.0 if engine is None else scalar(engine, SUCCESS)


TestDrains = Drains.TestCase
TestDrains.settings = settings(max_examples=200, stateful_step_count=40)


def places_of(text: bytes) -> tuple[Places, Plan]:
    """Of a page."""
    page = Passed(list).page((("model", "x"), ("namespace", "y")))
    for _ in page.take([text]):
        pass
    assert page.plan is not None
    places = Places()
    for _ in places.find(page.plan):
        pass
    return places, page.plan


def test_the_page_has_the_numbers_of_statistics() -> None:
    """Recorded at one moment: counts are equal, each observation lacks less than a microsecond."""
    places, plan = places_of(page_of_engine("page_triton").encode())
    body = recording("stats_all.http").partition(b"\r\n\r\n")[2]
    found = [read(piece) for piece in split(body)]
    assert len(found) == 7
    for one in found:
        stats = translate(one, has_cache=one.name == "cached")
        page = places.numbers(Head(one.name, one.version), plan.values)
        for row, theirs, known in zip(NATIVE, page, numbers(stats), strict=True):
            if row.per == 1 or known is None:
                assert theirs == known, row.name
            else:
                assert theirs is not None
                served = stats.inference_stats.success.count
                assert theirs <= known <= theirs + 1000 * served, row.name
        assert raised(stats, numbers(stats)) == stats
        assert raised(stats, UNKNOWN) == stats


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{model="m",version="1"} 3\n', 3),
        (b'{model="m",version="1",_team="x"} 3\n', 3),
        (b'{model="m",version="1",gpu_uuid="a"} 3\n{model="m",version="1",gpu_uuid="b"} 4\n', 7),
        (b'{model="m",version="1",_team="x"} 3\n{model="m",version="1",_team="y"} 4\n', None),
        (b'{model="m",version="1",namespace="n"} 3\n', None),
        (b'{model="m",version="2"} 3\n', None),
        (b'{model="m"} 3\n', None),
        (b'{model="m",version="1"} 3.5\n', None),
        (b'{model="m",version="1"} NaN\n', None),
        (b'{model="m",version="1"} 3 1700000000000\n', None),
        (b'{model="m",version="1"} 1e16\n', None),
    ],
)
def test_only_what_is_surely_a_versions_own(text: bytes, expected: int | None) -> None:
    """Summed over GPUs; not of one of several with the same name."""
    places, plan = places_of(b"".join(SUCCESS.encode() + one for one in text.splitlines(True)))

    assert places.numbers(Head("m", "1"), plan.values)[0] == expected


def test_a_page_of_before_the_last_statistics_is_not_told() -> None:
    """It has less than they: to tell of it would look as if all began anew."""
    told: list[object] = []
    drain, model, head_ = Drain(told.append), Model(), Head("m", "1")
    page = Passed(list).page()

    def read_page() -> None:
        for _ in page.take([lines([(("m", "1"), model)])]):
            pass
        assert page.plan is not None
        for _ in drain.read(page.plan):
            pass

    drain.heard(1.0)
    drain.looked(head_, model.stats)
    drain.asked(2.0)
    read_page()
    drain.closed()
    drain.asked(3.0)
    model.infer(2)
    drain.heard(4.0)
    read_page()
    model.infer(3)
    drain.looked(head_, model.stats)
    drain.closed()
    drain.failed("unreachable")

    assert told == []


async def test_a_server_that_drains(start: Start) -> None:
    """Its statistics refuse, its page grows, is gone, and both begin at 0: all is counted once."""
    native = Model()

    def told() -> bytes:
        return lines([(("m", "1"), native)])

    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = told()
        writer.write(head(len(body)) + body)

    async with tritons("m") as server, contextlib.AsyncExitStack() as stack:
        page = await stack.enter_async_context(polled(say))
        target = f"{server.url},interval=0.05,metrics={page.url}"
        async with start(triton=(target,)) as exporter:

            def shown(name: str) -> float:
                engine = exporter.registry.engines.get(f"triton/{server.url}/m/1")
                return 0 if engine is None else scalar(engine, name)

            async def pages(count: int) -> None:
                until_then = len(page.asked) + count
                await until(lambda: len(page.asked) >= until_then)

            for model in (native, server.models["m", "1"]):
                model.infer(5)
            await until(lambda: shown(SUCCESS) == 5)
            await pages(3)
            # A reload that only the page does not feel.
            server.load("m").infer(1)
            native.infer(1)
            await until(lambda: shown(SUCCESS) == 6)
            await pages(3)

            await server.stop()
            await pages(3)
            native.infer(2, ns=3000)
            await pages(3)
            assert shown(SUCCESS) == 6
            await stack.aclose()
            await until(lambda: shown(SUCCESS) == 8)
            assert shown("nv_inference_exec_count") == 8
            assert shown("nv_inference_queue_duration_us") == 6 * 1000 + 2 * 3000
            assert shown("sidestep_triton_resets_total") == 1

            native = Model()
            for model in (native, server.load("m")):
                model.infer(1)
            async with polled(say, port=int(page.url.split(":")[2].split("/")[0])):
                await server.start()
                await until(lambda: shown(SUCCESS) == 9)
                await asyncio.sleep(0.2)
            assert shown(SUCCESS) == shown("nv_inference_exec_count") == 9
            assert shown("sidestep_triton_resets_total") == 2
            engine = exporter.registry.engines[f"triton/{server.url}/m/1"]
            (sizes,) = [
                engine.histogram(p.slots[0])
                for p in engine.layout.placed
                if p.row.name == "sidestep_triton_batch_size"
            ]
            # Which batches they were in, only statistics know.
            assert sum(sizes.counts) == 7
