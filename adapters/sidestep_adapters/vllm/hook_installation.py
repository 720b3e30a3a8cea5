"""Installation of the hook of vLLM's outputs, where nothing else needs vLLM's statistics.

A release is compared with what the hook reads before anything is replaced.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import FrameType, SimpleNamespace
from typing import Any

from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep_adapters.vllm.front_end_requests import PREEMPTED, QUEUED, SCHEDULED, STOP, Outputs
from sidestep_adapters.vllm.output_hook import OutputHook

NAN_CHECK = "VLLM_COMPUTE_NANS_IN_LOGITS"
_PARAMETERS = {
    "process_outputs": ("engine_core_outputs", "engine_core_timestamp", "iteration_stats"),
    "add_request": ("request", "prompt", "parent_req"),
    "abort_requests": ("request_ids",),
}
"""First parameters of the output processor's methods that are wrapped."""
_STATE = {
    "is_prefilling",
    "lora_name",
    "max_tokens_param",
    "parent_req",
    "prompt_len",
    "queue",
    "request_index",
}
"""Attributes of the output processor's requests that are read, which are set when one is made."""


class UnusableError(Exception):
    """vLLM has to build its statistics; the text says why."""


def pin_nan_check(envs: Any) -> None:
    """Make a variable of vLLM a plain attribute of its module ``envs``.

    The module reads the environment whenever it is asked. Up to 0.32, vLLM's statistics ask it for
    each output of each request, at 1 to 2 us; its cores and workers have a cache, front ends none.
    """
    if NAN_CHECK not in vars(envs) and hasattr(envs, NAN_CHECK):
        setattr(envs, NAN_CHECK, getattr(envs, NAN_CHECK))


def install(
    front_end: Any,
    config: Any,
    base: type,
    make: Callable[[], OutputHook],
    callers: FrameType | None,
) -> OutputHook:
    """Install the hook that ``make`` makes, and switch vLLM's statistics off.

    Args:
        front_end: An ``AsyncLLM`` that is being made.
        config: Its ``VllmConfig``.
        base: Class of vLLM's stat loggers that write its statistics to the log.
        make: Makes the hook.
        callers: Frame of the caller, whose callers may have the server's arguments.

    Raises:
        UnusableError: vLLM has to build its statistics.
    """
    _check_use(config, callers)
    loggers = _other_loggers(front_end, base)
    try:
        _check_release(front_end)
        hook = make()
        processor = front_end.output_processor
        _replace(
            [
                *((processor, *wrapper) for wrapper in hook.wrappers(processor).items()),
                *(
                    (one, "log_stats", False)
                    for one in (front_end, processor, processor.lora_states)
                ),
                # Others would write throughputs of 0; the exporter writes a statistics line.
                (front_end.logger_manager, "stat_loggers", loggers),
            ]
        )
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise UnusableError(f"this release of vLLM is another: {error}") from error
    return hook


def _replace(attributes: Iterable[tuple[Any, str, Any]]) -> None:
    """Set attributes of objects: all of them or, if one cannot be set, none."""
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in attributes:
            before = getattr(owner, name)
            setattr(owner, name, value)
            replaced.append((owner, name, before))
    except Exception:
        for owner, name, before in reversed(replaced):
            setattr(owner, name, before)
        raise


def _check_use(config: Any, callers: FrameType | None) -> None:
    """Refuse options that show statistics elsewhere than in metrics."""
    observability = getattr(config, "observability_config", None)
    if getattr(observability, "otlp_traces_endpoint", None):
        raise UnusableError("--otlp-traces-endpoint needs them")
    if getattr(config, "watermark_config", None) is not None:
        raise UnusableError("--watermark-config needs them")
    if getattr(getattr(config, "parallel_config", None), "enable_elastic_ep", False):
        raise UnusableError("--enable-elastic-ep makes new stat loggers only with them")
    while callers is not None:
        arguments = callers.f_locals.get("args")
        if getattr(arguments, "enable_per_request_metrics", False):
            raise UnusableError("--enable-per-request-metrics needs them")
        callers = callers.f_back


def _other_loggers(front_end: Any, base: type) -> list[Any]:
    """Return the front end's stat loggers without those that write to the log; no other may remain."""
    kept = []
    for logger in front_end.logger_manager.stat_loggers:
        several = getattr(logger, "per_engine_stat_loggers", None)
        if not all(
            isinstance(one, base) for one in ([logger] if several is None else several.values())
        ):
            kept.append(logger)
    for logger in kept:
        if not type(logger).__module__.startswith("sidestep_adapters."):
            raise UnusableError(f"the stat logger {type(logger).__name__} needs them")
    return kept


def _check_release(front_end: Any) -> None:
    """Compare what the hook reads of vLLM with what this release has, and raise if that differs."""
    from vllm.v1.engine import (  # noqa: PLC0415 - only a front end has it
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        FinishReason,
    )

    processor = front_end.output_processor
    for name, parameters in _PARAMETERS.items():
        found = tuple(inspect.signature(getattr(processor, name)).parameters)
        if found[: len(parameters)] != parameters:
            raise AttributeError(f"{name}({', '.join(found)}) takes other parameters")
        if inspect.iscoroutinefunction(getattr(processor, name)):
            raise AttributeError(f"{name} is asynchronous")
    if not (front_end.log_stats and processor.log_stats and processor.lora_states.log_stats):
        raise AttributeError("its log_stats means something else")
    if tuple(str(reason) for reason in FinishReason) != FINISH_REASONS[: len(FinishReason)]:
        raise AttributeError("its finish reasons are others")
    state = sys.modules[type(processor).__module__].RequestState
    if lacking := _STATE.difference(state.__init__.__code__.co_names):
        raise AttributeError(f"its requests have no {', '.join(sorted(lacking))}")
    kinds = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED, EngineCoreEventType.PREEMPTED
    if tuple(map(int, kinds)) != (QUEUED, SCHEDULED, PREEMPTED):
        raise AttributeError("its event types are others")
    event = EngineCoreEvent(type=EngineCoreEventType.QUEUED, timestamp=1.0)
    output = EngineCoreOutput(request_id="a", new_token_ids=[1], events=[event])
    if not hasattr(output, "prefill_stats"):
        raise AttributeError(
            "its outputs do not say which tokens of a prompt were cached, and where"
        )
    stand_in: Any = type("StandIn", (), {"request_states": {}})
    stand_in.output_processor, stand_in.engine_core = stand_in, front_end.engine_core
    taken: list[Outputs] = []
    recorder: Any = SimpleNamespace(
        record=lambda *args, **_: taken.append(args[1]),
        outputs=None,
        numbers={"a": 1, "b": 2},
        takes_outputs=True,
    )
    hook = OutputHook(
        stand_in, [0], recorder, lambda _: None, sends_identity=False, nan_check=False
    )
    hook._hand_over(1.0, *hook._take([output]), ["b"])
    numbers, tokens, special, ended = taken[0][3:]
    events = [(QUEUED, 1.0)]
    if ([*numbers], tokens, ended) != ([1], (), [(2, STOP)]) or special[0].events != events:
        raise AttributeError("its outputs are others")
