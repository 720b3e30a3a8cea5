"""State of one model of a llama-server: its last page, its properties and its progress. No I/O."""

from __future__ import annotations

from sidestep.engines.polled_page import PolledPage
from sidestep.protocol.messages import CORE, LIMITS, EngineInfo
from sidestep.protocol.progress import ASLEEP, Progress
from sidestep.protocol.self_described import Family, Sample
from sidestep_adapters.llamacpp import rows
from sidestep_adapters.llamacpp.answers import Props
from sidestep_adapters.polling.api import Update

DIALECT = "llamacpp"


class ModelState:
    """State of one model."""

    def __init__(self, identity: str, labels: dict[str, str]) -> None:
        self._identity = identity
        self._labels = labels
        self.props = Props()
        self.process = 0
        """Identifies the process that served the last page; 0 before the first page."""
        self._families: list[Family] = []
        self._used: int | None = 0
        """Tokens of the requests in slots; None if they are not known."""
        self._steps = 0
        self._stepped_at = 0.0

    @property
    def info(self) -> EngineInfo:
        """The model as an engine."""
        slots = self.props.total_slots
        info = {LIMITS: {"max_running_requests": str(slots)}} if slots else {}
        return EngineInfo(self._identity, DIALECT, self._labels, info, role=CORE)

    @property
    def running(self) -> int:
        """Requests in slots, on the last page."""
        return int(self._number(rows.RUNNING))

    def set_page(self, process: int, families: list[Family], now: float) -> None:
        """Record a page, and when it was requested."""
        self._families = families
        steps, waits = int(self._number(rows.STEPS)), self.running + self._number(rows.WAITING)
        if steps != self._steps or process != self.process or not waits:
            self._stepped_at = now
        self.process, self._steps = process, steps
        self._used = None if self.running else 0

    def set_used(self, tokens: int) -> None:
        """Record the tokens of the requests in slots."""
        self._used = tokens

    def update(self, now: float) -> Update:
        """Return the model's state at ``now``."""
        families = *self._families, *self._context()
        return Update(self.info, [PolledPage(0, now, self.process, families)], self._progress(now))

    def gone(self, now: float) -> Update:
        """Return the update that detaches the model: the server no longer has it in memory."""
        return Update(self.info, [PolledPage(0, now, absent=True)], detach=True)

    def starting(self, condition: str) -> Update:
        """Return the update of a model that does not answer yet."""
        return Update(self.info, progress=Progress(0, condition=condition))

    def _progress(self, now: float) -> Progress:
        if self.props.is_sleeping:
            return Progress(0, self._steps, condition=ASLEEP)
        unfinished = self.running + int(self._number(rows.WAITING))
        # A batch of prompts may take a minute on a CPU, and its size is not on the page. So its age is reported
        # as that of requests that wait for something outside the engine, which has a longer limit.
        age = max(now - self._stepped_at, 0.0) if unfinished else None
        return Progress(0, self._steps, unfinished, unfinished, waiting_age=age)

    def _context(self) -> list[Family]:
        size = self.props.context
        numbers: dict[str, float] = {}
        if size:
            numbers[rows.CONTEXT_SIZE] = size
        if self._used is not None:
            numbers[rows.CONTEXT_TOKENS] = self._used
            if size:
                numbers[rows.CONTEXT_USAGE] = self._used / size
        return [Family(name, "gauge", [], [Sample([], n)]) for name, n in numbers.items()]

    def _number(self, name: str) -> float:
        return sum(
            sample.value
            for family in self._families
            if family.name == name
            for sample in family.samples
        )
