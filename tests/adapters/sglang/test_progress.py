"""Progress of SGLang's scheduler and tokenizer, read from attributes as SGLang changes them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collectors import (
    RANK,
    TOKENIZER,
    SchedulerMetricsCollector,
    TokenizerMetricsCollector,
    Unpublished,
)
from heartbeats import Heartbeats
from sidestep.protocol.messages import CORE, FRONT_END
from sidestep.protocol.progress import ASLEEP, PAUSED, STARTING, Progress
from sidestep_adapters.sglang import taps as sglang_taps
from sidestep_adapters.sglang.process import Process
from sidestep_adapters.sglang.progress import (
    MAX_GAP,
    MAX_PREFILL,
    WARM_UP,
    SchedulerProgress,
    TokenizerProgress,
)

WAKE = 0.25


class Mode(enum.Enum):
    """The modes of SGLang's disaggregation."""

    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"


class Request:
    """A request inside a scheduler."""

    def __init__(self, *, done: bool = False) -> None:
        self.done = done

    def finished(self) -> bool:
        """Return whether it has ended."""
        return self.done


def batch(requests: Sequence[Request], prompt: int = 0) -> Any:
    """Return a batch that decodes, or prefills ``prompt`` tokens."""
    return SimpleNamespace(
        reqs=list(requests),
        forward_mode=SimpleNamespace(is_extend=lambda: prompt > 0),
        extend_num_tokens=prompt or 512,
    )


class Scheduler:
    """The attributes of SGLang's scheduler that are read, after its warm-up."""

    def __init__(self, **more: Any) -> None:
        self.is_initializing = False
        self.forward_ct = 9
        self.cur_batch_for_debug: Any = None
        self.last_batch: Any = None
        self.running_batch: Any = batch([])
        self.waiting_queue: list[Request] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.weight_updater = SimpleNamespace(offload_tags=set())
        self.chunked_req: Request | None = None
        self.disaggregation_mode = Mode.NULL
        self._engine_paused = False
        vars(self).update(more)

    def event_loop_normal(self) -> None:
        """Stand for the method by which a scheduler is recognized."""

    def begin(self, running: Any) -> None:
        """Begin a step."""
        self.forward_ct += 1
        self.cur_batch_for_debug = self.running_batch = running

    def end(self) -> None:
        """End the step, and have none to do."""
        self.last_batch = self.cur_batch_for_debug = None


class Clock:
    """Wakes of a publisher, which measures one engine."""

    def __init__(self, measure: Any) -> None:
        self.now = 100.0
        self._measure = measure

    def after(self, seconds: float = WAKE) -> Progress:
        """Return the progress after ``seconds`` of wakes."""
        end = self.now + seconds
        found: Progress | None = None
        while self.now < end:
            self.now = min(self.now + WAKE, end)
            found = self._measure(self.now)
        assert found is not None
        return found


def started(**more: Any) -> tuple[Scheduler, Clock]:
    """Return a scheduler, and the wakes that measure it."""
    scheduler = Scheduler(**more)
    clock = Clock(SchedulerProgress(scheduler, 3))
    clock.after()
    return scheduler, clock


def test_a_step_that_does_not_end() -> None:
    """Its age grows from its begin, with its tokens and the stack of the scheduler's thread."""
    scheduler, clock = started()
    idle = clock.after(60)
    scheduler.begin(batch([Request()], prompt=700))
    young, old = clock.after(1), clock.after(4)

    assert (idle.step_age, idle.waiting_age, idle.unfinished, idle.stack) == (None, None, 0, [])
    assert (old.engine, old.unfinished, old.step_tokens) == (3, 1, 700)
    assert old.step_age == pytest.approx(5 - WAKE)
    assert young.stack == []
    assert "test_a_step_that_does_not_end" in "".join(old.stack)


def test_steps_that_end() -> None:
    """Each ends the age of the one before; the longest is reported once, with its tokens."""
    scheduler, clock = started()
    running = batch([Request(), Request()])
    ages = []
    for _ in range(40):
        scheduler.begin(running)
        ages.append(clock.after(0.5).step_age)
    scheduler.begin(running)
    between = clock.after()
    scheduler.begin(running)
    last = clock.after()

    assert max(age for age in ages if age is not None) < 0.5
    assert between.longest == pytest.approx(0.5)
    assert between.longest_tokens == 2
    assert last.longest == pytest.approx(WAKE)
    assert (last.steps, last.unfinished) == (9 + 41, 2)


def test_requests_that_are_not_admitted() -> None:
    """They wait since they came, or since the last step ended."""
    scheduler, clock = started()
    scheduler.waiting_queue = [Request(), Request()]
    came = clock.after(6)
    scheduler.begin(batch([Request()]))
    admitted = clock.after(1)
    scheduler.end()
    ended = clock.after(3)

    assert (came.unfinished, came.step_age) == (2, None)
    assert came.waiting_age == pytest.approx(6 - WAKE)
    assert (admitted.unfinished, admitted.waiting_age) == (3, None)
    assert ended.waiting_age == pytest.approx(3 - WAKE)


def test_a_result_that_never_comes_while_batches_overlap() -> None:
    """The loop waits for the last batch without having launched another one."""
    scheduler, clock = started(enable_overlap=True)
    running = batch([Request()])
    scheduler.begin(running)
    clock.after(1)
    scheduler.last_batch, scheduler.cur_batch_for_debug = running, None
    stuck = clock.after(4)

    assert stuck.step_age == pytest.approx(5 - WAKE)
    assert stuck.waiting_age is None


def test_requests_that_are_owed_an_answer() -> None:
    """Ended ones, which SGLang keeps until the next step, are owed none; chunks and stages count once."""
    scheduler, clock = started(enable_overlap=True)
    request, second, third = Request(), Request(), Request()
    scheduler.begin(batch([request]))
    scheduler.last_batch = scheduler.cur_batch_for_debug
    request.done = True
    ended = clock.after(30)
    scheduler.chunked_req = third
    vars(scheduler)["running_mbs"] = [None, batch([second]), batch([request, second])]

    assert (ended.unfinished, ended.step_age, ended.waiting_age) == (0, None, None)
    assert clock.after().unfinished == 2


def test_a_batch_without_requests_is_no_step() -> None:
    """A rank runs such batches to keep step with the other ones."""
    scheduler, clock = started()
    scheduler.waiting_queue = [Request()]
    scheduler.begin(batch([]))
    after = clock.after(3)

    assert after.step_age is None
    assert after.waiting_age is not None


@pytest.mark.parametrize(
    ("more", "condition"),
    [
        ({"_engine_paused": True}, PAUSED),
        ({"weight_updater": SimpleNamespace(offload_tags={"kv_cache"})}, ASLEEP),
        ({"weight_updater": None, "offload_tags": {"weights"}}, ""),
        ({"is_initializing": True}, STARTING),
    ],
)
def test_conditions(more: dict[str, Any], condition: str) -> None:
    """A scheduler that is paused, asleep or starting has no ages, whatever waits."""
    scheduler, clock = started(**more)
    scheduler.waiting_queue = [Request()]
    after = clock.after(20)

    assert after.condition == condition
    assert (after.waiting_age is None) == bool(condition)


def test_older_releases() -> None:
    """Attributes have other places, and are made late."""
    scheduler = type("Scheduler", (), {})()
    clock = Clock(SchedulerProgress(scheduler, 0))
    loading = clock.after()
    scheduler.running_batch = scheduler.cur_batch = batch([Request(), Request()])
    scheduler.waiting_queue, scheduler.grammar_queue = [], [Request()]
    scheduler.forward_ct = 50
    running = clock.after(4)
    scheduler.offload_tags = {"weights"}
    asleep = clock.after()

    assert loading.condition == STARTING
    assert (running.unfinished, running.step_tokens, running.condition) == (3, 2, "")
    assert running.step_age == pytest.approx(4 - WAKE)
    assert asleep.condition == ASLEEP


def test_the_first_step_belongs_to_the_start() -> None:
    """Kernels are compiled in it; SGLang itself gives its warm-up as long."""
    scheduler, clock = started(forward_ct=0)
    scheduler.begin(batch([Request()], prompt=4))
    compiling = clock.after(300)
    late = clock.after(WARM_UP)
    scheduler.begin(batch([Request()]))
    compiled = clock.after()
    second = clock.after(4 - WAKE)

    assert (compiling.condition, compiling.step_age) == (STARTING, None)
    assert (late.condition, late.step_age is None) == ("", False)
    assert second.condition == ""
    assert second.step_age == pytest.approx(4 - WAKE)
    assert compiled.longest == 0


def test_requests_that_wait_for_others() -> None:
    """Grammars are compiled elsewhere, and a storage may have the blocks of waiting requests."""
    scheduler, clock = started()
    scheduler.grammar_manager.grammar_queue = [Request()]
    grammar = clock.after(9)
    stored, stored_clock = started(enable_hicache_storage=True)
    stored.waiting_queue = [Request(), Request()]
    transfer = stored_clock.after(9)

    assert (grammar.unfinished, grammar.blocked) == (1, 1)
    assert (transfer.unfinished, transfer.blocked) == (2, 2)


@pytest.mark.parametrize(
    ("request_name", "is_known"), [("load_lora_adapter", True), ("handle_generate_request", False)]
)
def test_an_operators_request_on_the_schedulers_loop(request_name: str, is_known: bool) -> None:
    """Loading an adapter stops all requests, which is no step that hangs; what else runs there is."""
    scheduler, clock = started()
    scheduler.begin(batch([Request(), Request()]))
    clock.after(1)
    found: list[Progress] = []
    # Functions of these names, as on the stack of SGLang's loop.
    code = f"def {request_name}():\n found.append(clock.after(9))\n"
    code += f"def process_input_requests():\n {request_name}()\n"
    names: dict[str, Any] = {"found": found, "clock": clock}
    exec(code, names)
    names["process_input_requests"]()
    after = clock.after()
    later = clock.after(4)

    (during,) = found
    assert (during.step_age is None, during.blocked) == (is_known, 2 if is_known else 0)
    assert (during.waiting_age is not None) == is_known
    assert after.step_age == pytest.approx(0 if is_known else 10)
    assert later.step_age == pytest.approx(4 if is_known else 14)


def test_a_node_for_prefill_or_decode_reports_steps_only() -> None:
    """Its requests wait for the other node's transfers, which it cannot know."""
    for mode in (Mode.PREFILL, Mode.DECODE):
        scheduler, clock = started(disaggregation_mode=mode)
        scheduler.waiting_queue = [Request()]
        waiting = clock.after(60)
        scheduler.begin(batch([Request()], prompt=64))
        stuck = clock.after(5)

        assert (waiting.waiting_age, waiting.stack, waiting.unfinished) == (None, [], 1)
        assert stuck.step_age == pytest.approx(5 - WAKE)


def state(text: str = "", *, dispatched: bool = True, answered: bool = False) -> Any:
    """Return the state of a request inside a tokenizer."""
    request = SimpleNamespace(input_ids=None, text=text)
    return SimpleNamespace(obj=request, dispatched=dispatched, ttft_observed=answered)


class Manager:
    """The attributes of SGLang's tokenizer manager that are read, after its warm-up."""

    def __init__(self, **more: Any) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.last_receive_tstamp = 1.0
        self.is_pause = False
        self.disaggregation_mode = Mode.NULL
        vars(self).update(more)

    def generate_request(self) -> None:
        """Stand for the method by which a tokenizer manager is recognized."""


def accepting(**more: Any) -> tuple[Manager, Clock]:
    """Return a tokenizer manager that has had an answer, and the wakes that measure it."""
    manager = Manager(**more)
    clock = Clock(TokenizerProgress(manager, 1))
    clock.after()
    manager.last_receive_tstamp += 1
    clock.after()
    return manager, clock


def test_a_tokenizer_that_gets_no_answer() -> None:
    """A tokenizer waits from its request, or from the last answer."""
    # Older releases have no mode of disaggregation.
    manager, clock = accepting(disaggregation_mode=None)
    idle = clock.after(60)
    manager.rid_to_state = {"a": state(), "b": state(answered=True)}
    asked = clock.after(5)
    manager.last_receive_tstamp += 1
    answered = clock.after()
    again = clock.after(4)
    manager.rid_to_state = {}
    clock.after(60)
    manager.last_receive_tstamp += 1
    unasked = clock.after()

    assert (idle.unfinished, idle.step_age) == (0, None)
    assert unasked.longest == 0
    assert (asked.engine, asked.unfinished) == (1, 2)
    assert asked.step_age == pytest.approx(5 - WAKE)
    assert answered.step_age == 0
    assert answered.longest == MAX_GAP
    assert again.step_age == pytest.approx(4)
    assert answered.steps > asked.steps


def test_a_long_prompt_is_due_later() -> None:
    """The longest one without any answer counts, up to a limit, as it would take a slow engine."""
    manager, clock = accepting()
    short, tokens = state("x" * 4), state()
    tokens.obj.input_ids = [7] * 1000
    manager.rid_to_state = {"a": short, "b": tokens, "c": state("y" * 3200)}
    young = clock.after(10)
    late = clock.after(5)
    tokens.ttft_observed = True
    manager.last_receive_tstamp += 1
    answered = clock.after()
    rest = clock.after(12)
    manager.rid_to_state = {"d": state("z" * 10**6)}
    longest = clock.after(MAX_PREFILL)

    assert young.step_age == 0
    assert late.step_age == pytest.approx(5 - WAKE)
    assert answered.longest == MAX_GAP
    assert rest.step_age == pytest.approx(4)
    assert longest.step_age == pytest.approx(12)


def test_requests_that_a_tokenizer_holds_back() -> None:
    """The engine owes nothing while requests wait for a pause to end, or for new weights."""
    manager, clock = accepting()
    manager.rid_to_state = {"a": state(dispatched=False)}
    held = clock.after(30)
    manager.rid_to_state["a"].dispatched = True
    sent = clock.after(3)
    manager.is_pause = True
    paused = clock.after()

    assert (held.unfinished, held.step_age) == (0, None)
    assert sent.step_age == pytest.approx(3 - WAKE)
    assert (paused.condition, paused.step_age) == (PAUSED, None)


@pytest.mark.parametrize(
    ("name", "is_owed"),
    [("update_lora_adapter_communicator", False), ("get_internal_state_communicator", True)],
)
def test_an_operators_request_that_a_tokenizer_has_sent(name: str, is_owed: bool) -> None:
    """Until an adapter is loaded nothing is owed; a scheduler that hangs answers no question, either."""
    manager, clock = accepting()
    manager.rid_to_state = {"a": state()}
    vars(manager)[name] = SimpleNamespace(_result_event=object())
    waiting = clock.after(9)

    assert waiting.unfinished == 1
    assert (waiting.step_age is not None) == is_owed


def test_a_tokenizer_without_any_answer_is_starting() -> None:
    """Its first request is that of the warm-up, as long as SGLang waits for it."""
    manager = Manager()
    clock = Clock(TokenizerProgress(manager, 1))
    before = clock.after()
    manager.rid_to_state = {"a": state()}
    warming, late = clock.after(300), clock.after(WARM_UP)
    manager.last_receive_tstamp += 1
    first = clock.after()

    assert first.longest == 0
    assert (before.condition, warming.condition, late.condition) == ("", STARTING, "")


def test_a_pause_is_no_long_step() -> None:
    """Neither the step that it interrupts nor the answer after an operator's request took as long."""
    scheduler, clock = started()
    scheduler.begin(batch([Request()]))
    clock.after(1)
    scheduler._engine_paused = True
    clock.after(60)
    scheduler._engine_paused = False
    scheduler.begin(batch([Request()]))
    manager, excused = accepting()
    manager.rid_to_state = {"a": state()}
    loads = SimpleNamespace(_result_event=object())
    manager.update_lora_adapter_communicator = loads  # type: ignore[attr-defined]
    excused.after(60)
    loads._result_event = None

    assert clock.after().longest <= 2 * WAKE
    assert excused.after().step_age == 0


def without(owner: Any, name: str) -> Any:
    """Return an object without one of its attributes."""
    delattr(owner, name)
    return owner


@pytest.mark.parametrize(
    ("kind", "owner"),
    [
        (SchedulerProgress, Scheduler(enable_pdmux=True)),
        (SchedulerProgress, without(Scheduler(), "forward_ct")),
        (TokenizerProgress, Manager(disaggregation_mode=Mode.PREFILL)),
        (TokenizerProgress, Manager(disaggregation_mode="decode")),
        (TokenizerProgress, without(Manager(), "last_receive_tstamp")),
    ],
)
def test_what_cannot_be_known_is_not_reported(kind: Any, owner: Any) -> None:
    """Without a current batch, a count of steps or a last answer, or if answers depend on another node."""
    assert kind(owner, 0)(1.0) is None


class Recorded(Unpublished):
    """A process of which a test reads what it would report."""

    def reported(self) -> list[tuple[str, str]]:
        """Return role and identity of the engines whose progress is reported."""
        infos = [self._infos[each.engine] for each in self._progress(1.0)]
        return [(info.role, info.id) for info in infos]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Return the records of this process, which tapped collectors use."""
    made = Recorded()
    monkeypatch.setattr(sglang_taps, "_process", made)
    return made


class Owners:
    """Objects that construct a collector as SGLang's do, some calls further up."""

    class Scheduler(Scheduler):
        """A scheduler with a collector."""

        def __init__(self) -> None:
            super().__init__()
            self.collector = self.made()

        @staticmethod
        def made() -> Any:
            """Return a tapped collector."""
            return sglang_taps.tapped(SchedulerMetricsCollector, "scheduler")()

    class Manager(Manager):
        """A tokenizer manager with a collector."""

        def __init__(self) -> None:
            super().__init__()
            self.collector = sglang_taps.tapped(TokenizerMetricsCollector, "tokenizer")()


def test_collectors_report_the_objects_that_construct_them(process: Recorded) -> None:
    """Each reports its own engine of the stream: the scheduler's as core, the tokenizer's as front end."""
    process.engine("radix_cache", TOKENIZER)
    owners = Owners.Manager(), Owners.Scheduler()
    ranks = ",".join(f"{name}={RANK[name]}" for name in sorted(RANK) if name != "model_name")

    assert process.reported() == [
        (FRONT_END, "pod/m/sglang/tokenizer/engine_type=unified"),
        (CORE, f"pod/m/sglang/scheduler/{ranks}"),
    ]
    del owners
    assert process.reported() == []


def test_heartbeats_carry_the_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They name the engine of the collector among the stream's engines."""
    with Heartbeats(f"ipc://{tmp_path}/x.ipc") as exporter:
        process = Process(exporter.endpoint, "pod", beside=False)
        monkeypatch.setattr(sglang_taps, "_process", process)
        process.engine("process", {})
        owner = Owners.Scheduler()
        owner.waiting_queue = [Request()]
        exporter.wait(lambda: any(each.unfinished == 1 for each in exporter.progress))
        assert process.publisher is not None
        process.publisher.close()

    assert {each.engine for each in exporter.progress} == {1}
