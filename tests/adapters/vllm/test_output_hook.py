"""The hook in vLLM's front end: when it is installed, and what its own faults may not do."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fake_vllm
from exporters import Start, until
from fake_vllm import AsyncLLM, FinishReason, importable
from pages import get
from vllm_front_ends import Client, Clock, HookedFrontEnd, output

NOT_HOOKED = "sidestep: vLLM builds its statistics on the event loop: "
HOOKED = "sidestep: vLLM builds no statistics; "
METHODS = "process_outputs", "add_request", "abort_requests"


@contextmanager
def front_end(
    patch: pytest.MonkeyPatch,
    endpoint: str,
    prepare: Callable[[AsyncLLM], object] = lambda _: None,
    **options: Any,
) -> Iterator[tuple[AsyncLLM, Any]]:
    """Yield a front end with the plugin in mode ``instead``, and its stat logger.

    Args:
        patch: Sets vLLM's modules, and the environment.
        endpoint: The exporter's.
        prepare: Changes the front end before its engines are ready.
        options: Parts of vLLM's configuration, with their attributes.
    """
    patch.setenv("SIDESTEP_VLLM_MODE", "instead")
    with importable(patch, endpoint) as ours:

        def stat_logger(vllm_config: Any, **more: Any) -> Any:
            for part, attributes in options.items():
                found = vars(vllm_config).setdefault(part, SimpleNamespace())
                vars(found).update(attributes)
            return ours.stat_logger(vllm_config=vllm_config, **more)

        def make() -> tuple[AsyncLLM, Any]:
            llm = AsyncLLM(Client(), [0], stat_logger)
            (logger,) = llm.logger_manager.stat_loggers
            prepare(llm)
            llm.logger_manager.log_engine_initialized()
            return llm, logger

        made = [make()]
        logger = made[0][1]
        try:
            # The caller has the only reference to the front end.
            yield made.pop()
        finally:
            logger._publisher.close()


def serve(llm: AsyncLLM, *, end: bool = True) -> None:
    """Serve a request with three tokens, and abort another one."""
    llm.add_request("a")
    llm.add_request("b")
    llm.receive([output("a", 2, queued=1.0, scheduled=1.5), output("b", queued=1.0)], 2.0)
    llm.abort("b")
    if end:
        llm.receive([output("a", reason=FinishReason.LENGTH)], 3.0)


def is_original(llm: AsyncLLM) -> bool:
    """Return whether nothing of a front end was replaced for good."""
    processor = llm.output_processor
    bound = [getattr(processor, name) for name in METHODS]
    return llm.log_stats and all(not str(m.__module__).startswith("sidestep") for m in bound)


def another_signature(llm: AsyncLLM) -> None:
    """Let a method take other parameters."""
    processor = llm.output_processor
    original = processor.process_outputs

    def process_outputs(batch: Any, stamp: Any, stats: Any, weight_version: Any = None) -> Any:
        return original(batch, stamp, stats, weight_version)

    processor.process_outputs = process_outputs


def gone(name: str) -> Callable[[AsyncLLM], None]:
    """Return a function that removes an attribute of the output processor."""
    return lambda llm: delattr(llm.output_processor, name)


def of_module(name: str, value: Any) -> Callable[[AsyncLLM], None]:
    """Return a function that replaces something in vLLM's module of outputs."""
    return lambda _: setattr(sys.modules["vllm.v1.engine"], name, value)


def other_logger(llm: AsyncLLM) -> None:
    """Add a stat logger of a user's."""
    llm.logger_manager.stat_loggers.append(fake_vllm.StatLoggerBase())


class RequestState:
    """A request of another release's."""

    def __init__(self) -> None:
        self.queue = None


class OtherProcessor(fake_vllm.OutputProcessor):
    """The output processor of a module with other requests."""


FAULTS: dict[str, tuple[Callable[[AsyncLLM], object] | dict[str, Any], str]] = {
    "signature": (another_signature, "release of vLLM is another: process_outputs(batch, stamp"),
    "no log_stats": (gone("log_stats"), "release of vLLM is another: "),
    "reasons": (of_module("FinishReason", ["stop", "abort"]), "its finish reasons are others"),
    "output": (
        of_module("EngineCoreOutput", lambda **_: output("b")),
        "release of vLLM is another: its outputs are others",
    ),
    "old": (
        of_module("EngineCoreOutput", SimpleNamespace),
        "its outputs do not say which tokens of a prompt were cached, and where",
    ),
    "requests": (
        lambda llm: setattr(llm.output_processor, "__class__", OtherProcessor),
        "its requests have no is_prefilling, lora_name, max_tokens_param, parent_req, prompt_len",
    ),
    "client": (lambda llm: setattr(llm, "engine_core", 1), "cannot create weak reference"),
    "logger": (other_logger, "the stat logger StatLoggerBase needs them"),
    "traces": (
        {"observability_config": {"otlp_traces_endpoint": "http://o"}},
        "--otlp-traces-endpoint needs them",
    ),
    "per request": ({}, "--enable-per-request-metrics needs them"),
    "chosen": ({}, "SIDESTEP_VLLM_STATISTICS=vllm"),
}


@pytest.mark.parametrize("fault", [*FAULTS, ""])
async def test_vllm_builds_its_statistics_where_it_has_to(
    fault: str, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One log line and a gauge say which way runs, and why; all requests are served and counted."""
    caplog.set_level(logging.INFO)
    change, reason = FAULTS.get(fault, ({}, ""))
    prepare, options = (lambda _: None, change) if isinstance(change, dict) else (change, {})
    if fault == "chosen":
        monkeypatch.setenv("SIDESTEP_VLLM_STATISTICS", "vllm")
    args = SimpleNamespace(enable_per_request_metrics=fault == "per request")
    async with start() as exporter:
        with front_end(monkeypatch, exporter.endpoints[0], prepare, **options) as (llm, logger):
            del args
            assert is_original(llm) is bool(fault)
            if fault == "logger":
                llm.logger_manager.stat_loggers.pop()
            serve(llm)
            assert not llm.output_processor.request_states
            page = ""

            async def has_all() -> bool:
                nonlocal page
                page = await get(exporter.url)
                tokens = 'vllm:generation_tokens_total{engine="0",model_name="m"} 4'
                return tokens in page and "builds_statistics{" in page

            await until(has_all, 60.0, "tokens and the gauge")
            errors = logger._publisher.errors
            await asyncio.to_thread(logger._publisher.close)

    lines = [one for one in caplog.messages if one.startswith((NOT_HOOKED, HOOKED))]
    assert len(lines) == 1
    assert lines[0].startswith(NOT_HOOKED if fault else HOOKED)
    assert reason in lines[0]
    (gauge,) = (line for line in page.splitlines() if line.startswith("sidestep_engine_process_b"))
    assert 'process="api0"' in gauge
    assert gauge.endswith("} 1.0" if fault else "} 0.0")
    assert (reason or 'reason=""') in gauge
    assert ("sidestep_untracked_requests_total{" in page) is not bool(fault)
    assert errors == 0


def test_writers_of_the_log_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They would write throughputs of 0; vLLM wraps those of several engines."""

    def add(llm: AsyncLLM) -> None:
        one = fake_vllm.LoggingStatLogger()
        several = SimpleNamespace(per_engine_stat_loggers={0: one}, log_engine_initialized=bool)
        llm.logger_manager.stat_loggers += [one, several]

    with front_end(monkeypatch, f"ipc://{tmp_path}/i.ipc", add) as (llm, logger):
        assert llm.logger_manager.stat_loggers == [logger]
        assert not is_original(llm)


def unreadable_request(llm: AsyncLLM) -> None:
    """Accept a request that the hook cannot read."""
    given = {"request_id": "x", "prompt_len": 7, "resumable": False}
    unknown = "lora_name", "max_tokens", "stop_at", "remote_prefill_cached_tokens"
    request = SimpleNamespace(**given, **dict.fromkeys(unknown))
    llm.output_processor.add_request(request, None)


def unreadable_state(llm: AsyncLLM) -> None:
    """Receive an output of a request whose state lacks what the hook reads of it."""
    del llm.add_request("x").prompt_len
    llm.receive([output("x", queued=1.0)], 1.0)


def unreadable_output(llm: AsyncLLM) -> None:
    """Receive an output with another kind of events."""
    llm.add_request("x")
    one = output("x")
    one.events = [5]  # type: ignore[list-item]
    llm.receive([one], 1.0)


def unreadable_client(llm: AsyncLLM) -> None:
    """Abort a request where the client has changed."""
    llm.engine_core.reqs_in_flight = None
    llm.add_request("x")
    llm.abort("x")
    assert llm.aborts == ["x"]
    del llm.engine_core.reqs_in_flight


RUNTIME_FAULTS = [unreadable_request, unreadable_state, unreadable_output, unreadable_client]


@pytest.mark.parametrize("fault", RUNTIME_FAULTS)
async def test_a_wrapper_that_fails(
    fault: Callable[[AsyncLLM], None], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request goes on, and so does all else; the page counts the error, and nothing is left over."""
    async with start() as exporter:
        with front_end(monkeypatch, exporter.endpoints[0]) as (llm, logger):
            fault(llm)
            state = llm.output_processor.request_states.get("x")
            if state is not None:
                state.prompt_len = 7
            # Drops are noticed by the second.
            await until(lambda: logger._publisher.dropped == 1 and not logger._requests.records)
            serve(llm)
            llm.receive([output("x", reason=FinishReason.STOP)], 9.0)
            assert not llm.output_processor.request_states

            async def is_counted() -> bool:
                page = await get(exporter.url)
                return "sidestep_stream_errors_total" in page and all(
                    f'finished_reason="{reason}",model_name="m"}} 1' in page
                    for reason in ("abort", "length")
                )

            await until(is_counted)
            assert logger._publisher.errors == 1
            await until(lambda: not logger._requests._requests, 60.0, "nothing left over")
            await asyncio.to_thread(logger._publisher.close)


@pytest.mark.parametrize("method", METHODS)
def test_what_vllm_raises(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """It passes through, and nothing is recorded of what did not happen."""
    front = HookedFrontEnd(Clock(monkeypatch))
    processor = front.llm.output_processor

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("of vLLM's own")

    failing = SimpleNamespace(**dict.fromkeys(METHODS, fail))
    setattr(processor, method, front.hook.wrappers(failing)[method])
    calls: dict[str, Callable[[], object]] = {
        "process_outputs": lambda: front.receive(output("a")),
        "add_request": lambda: front.add("a"),
        "abort_requests": lambda: front.llm.abort("a"),
    }

    with pytest.raises(RuntimeError, match="of vLLM's own"):
        calls[method]()
    assert len(front.requests) == 0


def test_a_publisher_that_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Requests go on, and what waits is bounded; after a refusal nothing waits."""
    monkeypatch.setattr("sidestep_adapters.vllm.front_end_requests.MAX_RECORDS", 30)
    with front_end(monkeypatch, f"ipc://{tmp_path}/i.ipc") as (llm, logger):
        logger._publisher.close()
        for _ in range(50):
            serve(llm)
        assert 0 < len(logger._requests) <= 32
        logger._publisher._queue.close()
        serve(llm)
        assert len(logger._requests) == 0
        assert not llm.output_processor.request_states


def test_a_forked_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has none of its parent's requests, and may serve its own."""
    with front_end(monkeypatch, f"ipc://{tmp_path}/i.ipc") as (llm, logger):
        serve(llm, end=False)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                requests = logger._requests
                left = len(requests), len(requests._requests), requests.current_state()
                serve(llm)
                is_served = not llm.output_processor.request_states
                status = 0 if left == (0, 0, []) and is_served else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        serve(llm)


class Tokens(list[int]):
    """A list of tokens, which may have weak references."""


class Named:
    """Something of a request's, which may have weak references."""


@pytest.mark.parametrize("tapped", [False, True])
def test_records_hold_nothing_of_vllms(monkeypatch: pytest.MonkeyPatch, tapped: bool) -> None:
    """Tokens, probabilities, requests and their states are freed with vLLM's own references."""
    front = HookedFrontEnd(Clock(monkeypatch), tapped=tapped)
    state, tokens, logprobs = front.add("a"), Tokens([1, 2]), Named()
    vars(state)["text"] = text = Named()
    first, last = output("a", queued=1.0), output("a", reason=FinishReason.STOP)
    first.new_token_ids, last.new_logprobs = tokens, logprobs
    seen = [*map(weakref.ref, (state, tokens, logprobs, text))]
    front.receive(first)
    front.receive(last)
    assert len(front.requests) == 5

    del state, tokens, logprobs, text, first, last
    gc.collect()
    assert [one() for one in seen] == [None] * 4


def test_a_front_end_is_collected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the hook nor the publisher's thread keeps it alive."""
    with front_end(monkeypatch, f"ipc://{tmp_path}/i.ipc") as (llm, logger):
        serve(llm)
        seen = weakref.ref(llm), weakref.ref(llm.output_processor), weakref.ref(llm.engine_core)
        llm.logger_manager.stat_loggers.clear()
        del llm
        gc.collect()
        assert [one() for one in seen] == [None] * 3
        assert logger._publisher.errors == 0
