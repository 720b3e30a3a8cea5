"""Random histories of a server and of exporters, compared with the server's counts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from intakes import Fed
from pages import parse
from rendered import render
from sidestep.config.scrape_targets import Target
from sidestep.config.triton_servers import parse as flag
from sidestep.errors import PollError
from sidestep.ingest.local_stream import ServerFeed
from sidestep_adapters.triton.http import TritonApi
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.poller import TritonPoller
from tritons import Model

COUNTS: Mapping[str, Callable[[Model], int]] = {
    "nv_inference_request_success": lambda model: model.stages["success"][0],
    "nv_inference_request_failure": lambda model: model.stages["fail"][0],
    "nv_inference_count": lambda model: model.inference_count,
    "nv_inference_exec_count": lambda model: model.execution_count,
    "nv_cache_num_hits_per_model": lambda model: model.stages["cache_hit"][0],
}
"""What the server counts, by family."""
CACHED = "c"
"""The model with a cache; families of the others begin with the first hit."""
Key = tuple[str, str]
NAMES = st.sampled_from(["a", "b", "c"])
VERSIONS = st.sampled_from(["1", "2"])
SOME = st.integers(0, 3)
CAUSES = st.sampled_from(["unreachable", "slow", "bad_answer", "not_ready", "restricted"])


class Server(TritonApi):
    """Triton without sockets.

    Attributes:
        cause: Cause of the failure of every query; empty if queries succeed.
    """

    def __init__(self) -> None:
        super().__init__(Target("http://t:8000"))
        self.models: dict[Key, Model] = {}
        self.loads: dict[Key, int] = {}
        self.load_number = 0
        self.cause = ""
        self.tags: dict[str, str] = {}

    def load(self, name: str, *versions: str) -> None:
        """Load ``versions`` of a model, which start at 0."""
        for version in versions:
            self.load_number += 1
            self.models[name, version] = Model()
            self.loads[name, version] = self.load_number

    def work(self, key: Key, requests: int, failures: int, hits: int) -> None:
        """Serve requests; the batch size identifies each load of a version."""
        model = self.models[key]
        if requests or failures or hits:
            model.infer(1, size=self.loads[key])
            model.infer(requests, size=1000, now=self.load_number)
            model.fail(failures)
            model.hit(hits)

    async def statistics(self, model: str = "", version: str = "") -> Sequence[bytes]:
        """Return the statistics of all models or of one; no test asks for one version."""
        assert not version
        self._raise_failure()
        if model and not any(name == model for name, _ in self.models):
            raise PollError("unknown_model", f"requested model {model!r} is not available")
        return [
            json.dumps(each.reported(*key)).encode()
            for key, each in sorted(self.models.items())
            if not model or key[0] == model
        ]

    async def config(self, model: str) -> ModelConfig:
        """Return a constant configuration."""
        self._raise_failure()
        return ModelConfig(instances=1, has_cache=model == CACHED)

    def _raise_failure(self) -> None:
        if self.cause:
            raise PollError(self.cause, "every query fails")


@dataclasses.dataclass
class Seen:
    """Counts that polls have found for one version, and the last of them with its load."""

    total: Counter[str] = dataclasses.field(default_factory=Counter)
    load: int = 0
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def observe(self, load: int, counts: Counter[str]) -> None:
        """Record the counts of one load."""
        self.total.update(counts)
        if load == self.load:
            self.total.subtract(self.counts)
        self.load, self.counts = load, counts

    def copy(self) -> Seen:
        """Return a copy, which later observations leave as it is."""
        return Seen(self.total.copy(), self.load, self.counts)


class Histories(RuleBasedStateMachine):
    """Requests, reloads, unloads, restarts, failed polls, restarted exporters."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.server = Server()
        self.seen: dict[Key, Seen] = {}
        self.shown: set[Key] = set()
        """Versions that the last answer had."""
        self.fed = Fed()
        self._attach()
        self.saved: tuple[Any, dict[Key, Seen], set[Key]] | None = None
        self.server.load("a", "1")

    def teardown(self) -> None:
        """Close all."""
        self.loop.close()

    def _attach(self) -> None:
        self.triton = TritonPoller(
            flag("http://t:8000"),
            self.server,
            ServerFeed(self.fed.intake, "triton t"),
            has_failures=True,
        )

    @rule(name=NAMES, versions=st.sets(VERSIONS, min_size=1))
    def load(self, name: str, versions: set[str]) -> None:
        """Load a model again, perhaps with other versions: Triton starts all at 0."""
        self.unload(name)
        self.server.load(name, *sorted(versions))

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        """Unload all versions of a model."""
        for key in [key for key in self.server.models if key[0] == name]:
            del self.server.models[key]

    @rule(data=st.data(), requests=SOME, failures=SOME, hits=SOME)
    def serve(self, data: st.DataObject, requests: int, failures: int, hits: int) -> None:
        """Serve some requests of a loaded model."""
        if self.server.models:
            key = data.draw(st.sampled_from(sorted(self.server.models)))
            self.server.work(key, requests, failures, hits)

    @rule()
    def restart_server(self) -> None:
        """Reload all models."""
        for name, version in list(self.server.models):
            self.server.load(name, version)

    @rule()
    def poll(self) -> None:
        """Poll; all counts are seen."""
        self._poll()
        self._see(self.server.models.keys(), self.shown)

    @rule(cause=CAUSES)
    def fail(self, cause: str) -> None:
        """Fail a poll: no counts are seen, and no model counts as absent."""
        self.server.cause = cause
        self._poll()
        self.server.cause = ""

    @rule()
    def save(self) -> None:
        """Save a snapshot."""
        seen = {key: one.copy() for key, one in self.seen.items()}
        self.saved = self.fed.snapshot(), seen, set(self.shown)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restart_exporter(self) -> None:
        """Restart the exporter from its last snapshot."""
        assert self.saved is not None
        snapshot, seen, shown = self.saved
        self.fed = self.fed.restarted(snapshot)
        self.seen, self.shown = (
            {key: one.copy() for key, one in seen.items()},
            set(shown),
        )
        self._attach()

    @invariant()
    def the_page_has_what_was_seen(self) -> None:
        """The page has each version that was ready in the last answer, and no other."""
        families = parse(render(self.fed.intake.registry, names=[*COUNTS]).decode())
        for name in COUNTS:
            family = families.get(name)
            found: dict[Key, float] = {}
            for (_, labels), value in (family.samples if family else {}).items():
                named = dict(labels)
                found[named["model"], named["version"]] = value
            totals = {key: self.seen[key].total[name] for key in self.shown}
            if "cache" in name:
                totals = {key: n for key, n in totals.items() if n or key[0] == CACHED}

            assert found == totals, name
        assert self.fed.rejected == {}

    def _poll(self) -> None:
        self.loop.run_until_complete(self.triton.poll())
        more = True
        while more:
            more = self.triton.receive(time.monotonic())
            while self.fed.intake.busy:
                self.fed.intake.work()

    def _see(self, found: Collection[Key], before: Collection[Key]) -> None:
        """Record an answer with ``found`` after ``before``."""
        for key in found:
            model = self.server.models[key]
            counts = Counter({name: count(model) for name, count in COUNTS.items()})
            self.seen.setdefault(key, Seen()).observe(self.server.loads[key], counts)
        for key in set(before) - set(found):
            self.seen[key].load = 0
            self.shown.discard(key)
        self.shown.update(found)


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=30)
