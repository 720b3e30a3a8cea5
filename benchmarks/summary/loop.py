"""What statistics cost the event loop of vLLM's API server, by the token, with the real ``AsyncLLM``.

A core in vLLM's place decodes real messages: each request gets ``TOKENS`` tokens, one a step, and
requests begin one after the other, so that some begin and some end while most run. Every mode has
processes of its own; they are measured in turns.

The cost of the loop is the CPU time of its thread from the first output to the last; the cost of
the process adds all other threads until everything has been sent. A step's wall time is that from
an output's arrival until all clients have theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.process import Worker, cases, costs_in_turns, own_output, wait
from benchmarks.summary.engine import vllm_config_in
from benchmarks.summary.rows import Figure, Row, Topic

OFF, OWN, BUILT, INSTEAD, TAP, BESIDE = (
    "no statistics",
    "vLLM's own metrics",
    "built, no logger",
    "plugin instead",
    "plugin instead, with the tap",
    "plugin beside",
)
MODES = (OFF, OWN, BUILT, INSTEAD, TAP, BESIDE)
SIZES = (64, 256, 1024)
TOKENS = 128
"""Tokens of a request."""
SPREAD = 64
"""Steps in which all requests get their first token."""
GAP = 0.005
"""Seconds between two steps, in which the loop has nothing to do."""
SHARE, PROCESS_SHARE, STEP = 10, 20, 1.2
"""Limits: per cent of vLLM's cost that is left on the loop and in the process; times the p99 of a step."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A number of requests at one time, and whether their clients take every token."""

    requests: int
    streaming: bool

    def __str__(self) -> str:
        return f"{self.requests:,} requests{', streaming' if self.streaming else ''}"


CASES = tuple(Case(size, streaming) for streaming in (False, True) for size in SIZES)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Microseconds of CPU a token, and milliseconds of wall time of a step."""

    loop: float
    process: float
    step: float


def share(case: Case, what: str = "loop") -> str:
    """Return the name of the row with what is left of vLLM's cost."""
    return f"{case}: left of vLLM's cost, {what}"


def step_row(case: Case) -> str:
    """Return the name of the row with the p99 of a step."""
    return f"{case}: p99 of a step, of that without statistics"


def rows() -> list[Row]:
    """Return the rows: the shares first, then what each mode costs."""
    made = []
    for case in CASES:
        made += [
            Row(share(case), "%", limit=SHARE),
            Row(share(case, "process"), "%", limit=PROCESS_SHARE),
            Row(step_row(case), "times", OWN, limit=STEP, is_absolute=True),
        ]
    for case in CASES:
        made += [
            Row(f"{case}: {mode}", "us a token", OWN if mode != OWN else "", is_absolute=True)
            for mode in MODES
        ]
    return made


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return the figures."""
    return figures(costs_in_turns(Cost, MODES, CASES[:2] if quick else CASES, start, quick=quick))


def start(mode: str, endpoint: str, stack: contextlib.ExitStack) -> Worker:
    """Start the process of a mode."""
    return stack.enter_context(Worker(["benchmarks.summary.loop", mode], environ(mode, endpoint)))


def environ(mode: str, endpoint: str) -> Mapping[str, str]:
    """Return the variables of a mode's process.

    vLLM loads the plugin wherever it is installed, and then builds statistics without an endpoint, too.
    """
    if mode not in (INSTEAD, TAP, BESIDE):
        return {"VLLM_PLUGINS": ""}
    return {
        "VLLM_PLUGINS": "sidestep",
        "SIDESTEP_ENDPOINT": endpoint,
        "SIDESTEP_NAMESPACE": mode.replace(" ", "-").replace(",", ""),
        "SIDESTEP_VLLM_MODE": "beside" if mode == BESIDE else "instead",
    }


def figures(found: Mapping[tuple[Case, str], Cost]) -> Mapping[str, Figure]:
    """Return the figures of all rows that were measured."""
    made: dict[str, Figure] = {}
    for case in {case for case, _ in found}:
        of = {mode: found[case, mode] for mode in MODES}
        off, own, ours = of[OFF], of[OWN], of[INSTEAD]
        made[share(case)] = Figure(100 * (ours.loop - off.loop) / (own.loop - off.loop))
        made[share(case, "process")] = Figure(
            100 * (ours.process - off.process) / (own.process - off.process)
        )
        made[step_row(case)] = Figure(ours.step / off.step, own.step / off.step)
        made[f"{case}: {OWN}"] = Figure(own.loop)
        for mode in MODES:
            if mode != OWN:
                made[f"{case}: {mode}"] = Figure(of[mode].loop, own.loop)
    return made


class Core:
    """A core in vLLM's place: it sends encoded messages of requests that it has been given.

    Attributes:
        steps: Seconds of each step of the case.
    """

    engine_ranks_managed = (0,)

    def __init__(self, *, log_stats: bool) -> None:
        from vllm.v1.engine import EngineCoreOutputs  # noqa: PLC0415
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder  # noqa: PLC0415

        self.resources = SimpleNamespace(engine_dead=False)
        self.steps: list[float] = []
        self.begun = self.ended = 0
        self._encode = MsgpackEncoder().encode
        self._decode = MsgpackDecoder(EngineCoreOutputs).decode
        self._log_stats = log_stats
        self._ids: list[str] = []
        self._has_come = asyncio.Condition()
        self._messages: deque[Any] = deque()
        self._has_messages = asyncio.Event()
        self._arrived: float | None = None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return what the model can do."""
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        """Take a request."""
        async with self._has_come:
            self._ids.append(request.request_id)
            self._has_come.notify_all()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Refuse an abort: no client leaves."""
        raise AssertionError(request_ids)

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing."""

    async def start(self, requests: int) -> None:
        """Encode the messages of so many requests once they have come, and begin to send them."""
        from vllm.v1.engine import (  # noqa: PLC0415
            EngineCoreEvent,
            EngineCoreEventType,
            EngineCoreOutput,
            EngineCoreOutputs,
            FinishReason,
        )
        from vllm.v1.metrics.stats import PrefillStats, SchedulerStats  # noqa: PLC0415

        async with self._has_come:
            await self._has_come.wait_for(lambda: len(self._ids) == requests)
        now = time.monotonic()
        events = [
            EngineCoreEvent(EngineCoreEventType.QUEUED, now),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, now),
        ]
        prefill = PrefillStats()
        prefill.set(7, 0, 0)
        ids, self._ids = self._ids, []
        first = {one: number * SPREAD // len(ids) for number, one in enumerate(ids)}
        for step in range(SPREAD + TOKENS):
            running = [one for one in ids if first[one] <= step < first[one] + TOKENS]
            if not running:
                continue
            outputs = [
                EngineCoreOutput(
                    request_id=one,
                    new_token_ids=[17],
                    events=events if step == first[one] else None,
                    prefill_stats=prefill if step == first[one] else None,
                    finish_reason=FinishReason.LENGTH if step == first[one] + TOKENS - 1 else None,
                )
                for one in running
            ]
            stats = SchedulerStats(num_running_reqs=len(running), kv_cache_usage=0.5)
            self._messages.append(
                self._encode(
                    EngineCoreOutputs(
                        outputs=outputs,
                        scheduler_stats=stats if self._log_stats else None,
                        timestamp=now + GAP * (step + 1),
                    )
                )
            )
        self._has_messages.set()

    async def get_output_async(self) -> Any:
        """Return the outputs of the next step."""
        if self._arrived is not None:
            # The clients that have been woken take theirs.
            await asyncio.sleep(0)
            self.steps.append(time.perf_counter() - self._arrived)
            self._arrived = None
        if not self._messages:
            self._has_messages.clear()
            await self._has_messages.wait()
        await asyncio.sleep(GAP)
        message = self._messages.popleft()
        self._arrived = time.perf_counter()
        return self._decode(message)


def tokenizer(folder: Path) -> None:
    """Write a tokenizer with a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def front_end(mode: str) -> tuple[Any, Core]:
    """Return an ``AsyncLLM`` of a mode, and its core."""
    from vllm.v1.engine import async_llm  # noqa: PLC0415

    made: list[Core] = []

    def core(*_: Any, log_stats: bool, **__: Any) -> Core:
        made.append(Core(log_stats=log_stats))
        return made[0]

    with tempfile.TemporaryDirectory() as folder:
        tokenizer(Path(folder))
        config = vllm_config_in(Path(folder))
        if mode == TAP:
            name = "sidestep_adapters.vllm.scheduler.SidestepScheduler"
            config.scheduler_config.scheduler_cls = name
        async_llm.EngineCoreClient.make_async_mp_client = staticmethod(core)
        engine = async_llm.AsyncLLM(
            config,
            SimpleNamespace,
            log_stats=mode not in (OFF, BUILT),
            log_requests=False,
            stat_loggers=loggers(mode),
        )
    return engine, made[0]


def loggers(mode: str) -> list[Any]:
    """Return the stat loggers of a mode beside vLLM's own and the plugin's."""
    if mode != BUILT:
        return []
    from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: PLC0415

    class Nothing(StatLoggerBase):  # type: ignore[misc]
        """A stat logger that ignores everything."""

        def __init__(self, *_: Any) -> None:
            pass

        def record(self, *_: Any, **__: Any) -> None:
            """Ignore a step."""

        def log_engine_initialized(self) -> None:
            """Ignore the start."""

    return [Nothing]


async def serve(mode: str, answers: Any) -> None:
    """Measure the cases that are asked for."""
    engine, core = front_end(mode)
    drained = publisher_is_drained(engine)
    # vLLM's server does so too when it starts.
    gc.collect()
    gc.freeze()
    for case, answer in cases(answers):
        answer(await cost(engine, core, Case(**case), drained))
    engine.shutdown()


def publisher_is_drained(engine: Any) -> Callable[[], bool]:
    """Return a function that tells whether everything recorded has been sent."""
    manager = engine.logger_manager
    publishers = [
        one._publisher for one in getattr(manager, "stat_loggers", ()) if hasattr(one, "_publisher")
    ]
    wait(lambda: all(one.connected for one in publishers))
    return lambda: all(one.drained for one in publishers)


async def cost(engine: Any, core: Core, case: Case, drained: Callable[[], bool]) -> Cost:
    """Return the cost of a case."""
    from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    kind = RequestOutputKind.DELTA if case.streaming else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(max_tokens=TOKENS, output_kind=kind, detokenize=case.streaming)

    async def ask(number: int) -> None:
        prompt = TokensPrompt(prompt_token_ids=[2] * 7)
        async for _ in engine.generate(prompt, params, str(number)):
            pass

    core.steps.clear()
    clients = [asyncio.create_task(ask(number)) for number in range(case.requests)]
    await core.start(case.requests)
    thread, process = time.thread_time(), time.process_time()
    await asyncio.gather(*clients)
    thread = time.thread_time() - thread
    wait(drained)
    process = time.process_time() - process
    tokens = case.requests * TOKENS
    p99 = statistics.quantiles(core.steps, n=100)[-1]
    return Cost(thread / tokens * 1e6, process / tokens * 1e6, p99 * 1e3)


def main() -> None:
    """Run a worker: a case a line on standard input, its costs a line on standard output."""
    answers = own_output()
    import uvloop  # noqa: PLC0415

    uvloop.run(serve(sys.argv[1], answers))


LOOP = Topic(
    "The loop of vLLM's API server: what statistics cost it",
    tuple(rows()),
    measure,
    venv="vllm-venv",
    needs=("vllm", "tools/setup_vllm.sh"),
)

if __name__ == "__main__":
    main()
