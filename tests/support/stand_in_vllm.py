"""A program in vLLM's place: ``vllm serve`` without a model, which loads plugins as vLLM does.

It finds stat loggers by their entry points, obeys ``VLLM_PLUGINS``, makes the scheduler that
``--scheduler-cls`` names, and serves one request after the other until it is ended.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import threading
import time
from functools import partial
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

import fake_vllm
from fake_vllm import AsyncLLM, Core, Request

STEP = 0.02
"""Seconds of a step."""


class Steps:
    """Stats of the steps of requests with 50 tokens, one after the other."""

    def __init__(self) -> None:
        self._steps = 0

    def __iter__(self) -> Steps:
        """Return itself."""
        return self

    def __next__(self) -> tuple[Any, Any]:
        """Return what the scheduler and the front end report of a step."""
        first = self._steps % 50 == 0
        self._steps += 1
        iteration = SimpleNamespace(
            iteration_timestamp=time.monotonic(),
            num_generation_tokens=1,
            num_prompt_tokens=7 if first else 0,
            time_to_first_tokens_iter=[0.05] if first else [],
            inter_token_latencies_iter=[] if first else [STEP],
            num_preempted_reqs=0,
            num_corrupted_reqs=0,
            finished_requests=[],
            max_num_generation_tokens_iter=[],
            n_params_iter=[],
        )
        scheduler = SimpleNamespace(
            num_running_reqs=1,
            num_waiting_reqs=0,
            kv_cache_usage=0.5,
            prefix_cache_stats=SimpleNamespace(
                reset=False,
                requests=0,
                queries=0,
                hits=0,
                preempted_requests=0,
                preempted_queries=0,
                preempted_hits=0,
            ),
            connector_prefix_cache_stats=None,
            spec_decoding_stats=None,
            waiting_lora_adapters={},
            running_lora_adapters={},
        )
        return scheduler, iteration


def arguments() -> argparse.Namespace:
    """Parse the command line; a flag that the documents do not use is an error."""
    parser = argparse.ArgumentParser(prog="vllm")
    serve = parser.add_subparsers(required=True).add_parser("serve")
    serve.add_argument("model")
    serve.add_argument("--scheduler-cls")
    serve.add_argument("--shutdown-timeout", type=int)
    serve.add_argument("--host")
    serve.add_argument("--port", type=int)
    serve.add_argument("--kv-cache-metrics", action="store_true")
    return parser.parse_args()


def plugins() -> list[Any]:
    """Return the stat loggers that are installed, as far as ``VLLM_PLUGINS`` allows them."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return [
        found.load()
        for found in entry_points(group="vllm.stat_logger_plugins")
        if allowed is None or found.name in allowed.split(",")
    ]


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    args = arguments()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    logging.getLogger("vllm").addHandler(logging.StreamHandler())
    logging.getLogger("vllm").setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        fake_vllm.install(patch)
        config = fake_vllm.config()
        config.model_config.served_model_name = args.model
        config.scheduler_config.scheduler_cls = args.scheduler_cls
        front_ends = [
            AsyncLLM(
                SimpleNamespace(),
                [0],
                lambda cls=cls, **given: cls(config, given["engine_indexes"]),
            )
            for cls in plugins()
        ]
        core = None
        if args.scheduler_cls:
            module, _, name = args.scheduler_cls.rpartition(".")
            core = Core(getattr(importlib.import_module(module), name)(config))
        for count, step in enumerate(Steps()):
            if ended.wait(STEP):
                break
            if core is not None and count % 50 == 0:
                core.call(core.scheduler.finish_all)
                core.call(partial(core.scheduler.add_request, Request(str(count))))
            for front_end in front_ends:
                for logger in front_end.logger_manager.stat_loggers:
                    logger.record(*step, engine_idx=0)
        if core is not None:
            core.close()


if __name__ == "__main__":
    main()
