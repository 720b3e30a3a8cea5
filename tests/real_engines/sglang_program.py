"""A program that embeds SGLang: it generates, then writes its page until the file END exists.

Runs with SGLang's interpreter: ``sglang_program.py MODEL PAGE END``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import sglang

from sidestep_adapters.sglang import plugin as sglang_plugin


def run(model: str, page: Path, end: Path) -> None:
    """Generate eight answers of thirty tokens, one of them streamed."""
    engine = sglang.Engine(
        model_path=model,
        served_model_name="tiny",
        load_format="dummy",
        dtype="float32",
        context_length=2048,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        mem_fraction_static=0.1,
        max_total_tokens=4096,
        max_running_requests=16,
        sleep_on_idle=True,
        enable_metrics=True,
        stat_loggers=sglang_plugin.stat_loggers(),
    )
    limits = {"max_new_tokens": 30, "ignore_eos": True}
    try:
        engine.generate([f"prompt {number}" for number in range(7)], limits)
        for _ in engine.generate("a stream", limits, stream=True):
            pass
        while not end.exists():
            written = page.with_suffix(".new")
            written.write_bytes(current_page())
            written.replace(page)
            time.sleep(0.2)
    finally:
        engine.shutdown()


def current_page() -> bytes:
    """Return the page of all processes of the engine, as its server would make it."""
    # Not before SGLang has chosen the directory in which processes share them.
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415
    from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415

    registry = CollectorRegistry()
    # Without the argument it is the directory that SGLang's environ names.
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
