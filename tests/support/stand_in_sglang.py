"""A program in SGLang's place: ``sglang.launch_server`` without a model, which loads plugins as SGLang does.

It finds plugins by their entry points, obeys ``SGLANG_PLUGINS``, and reports a scheduler's and a tokenizer's
work until it is ended. Without ``--enable-metrics`` it makes no collectors, as SGLang.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import collectors
from sidestep.engines.sglang.wire import SglangSchedulerStats

OBSERVABILITY = "sglang.srt.observability"
HOOKS: dict[str, Any] = {}
"""Functions by the name of SGLang's function that they follow."""


class HookRegistry:
    """SGLang's registry of hooks."""

    @staticmethod
    def register(name: str, function: Any, _: object = None) -> None:
        """Add a hook."""
        HOOKS[name] = function


def install() -> None:
    """Make the modules of SGLang that the plugin imports."""
    modules: dict[str, dict[str, Any]] = {
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": HookRegistry,
            "HookType": SimpleNamespace(AFTER="after", REPLACE="replace"),
        },
        OBSERVABILITY: {},
        f"{OBSERVABILITY}.metrics_collector": {
            "resolve_collector_class": lambda *_: None,
            "SchedulerMetricsCollector": collectors.SchedulerMetricsCollector,
            "TokenizerMetricsCollector": collectors.TokenizerMetricsCollector,
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module


def collector(cls: type, role: str, labels: dict[str, Any]) -> Any:
    """Make a collector of the class that the plugin chooses."""
    hook = HOOKS.get(f"{OBSERVABILITY}.metrics_collector.resolve_collector_class")
    return ((hook and hook(cls, role=role)) or cls)(labels)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--model-path", required=True)
    args = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    install()
    allowed = os.environ.get("SGLANG_PLUGINS")
    for plugin in entry_points(group="sglang.srt.plugins"):
        if allowed is None or plugin.name in allowed.split(","):
            plugin.load()()
    if not args.enable_metrics:
        ended.wait()
        return
    own = {"model_name": args.model_path}
    scheduler = collector(
        collectors.SchedulerMetricsCollector, "scheduler", {**collectors.RANK, **own}
    )
    labels = {**collectors.TOKENIZER, **own}
    tokenizer = collector(collectors.TokenizerMetricsCollector, "tokenizer", labels)
    report = collectors.SchedulerStats(token_usage=0.5)
    for name in SglangSchedulerStats.__struct_fields__:
        vars(report).setdefault(name, None)
    while not ended.wait(0.05):
        scheduler.log_stats(report)
        scheduler.increment_realtime_tokens("decode", 1)
        tokenizer.observe_time_to_first_token(labels, 0.05, stream=True)
