"""What statistics cost the thread of vLLM's engine core, by the step, with the real ``Scheduler``.

Requests decode, one token a step each, without a model. Every mode has processes of its own; they are
measured in turns. The cost is the CPU time of the thread that schedules and processes the output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.process import Worker, cases, costs_in_turns, own_output, wait
from benchmarks.summary.engine import vllm_config_in
from benchmarks.summary.rows import Figure, Row, Topic

OFF, OWN, TAP = "no statistics", "vLLM's own statistics", "sidestep's tap"
MODES = (OFF, OWN, TAP)
SIZES = (64, 256, 1024)
STEPS = 256
BLOCK_SIZE = 16
SHARE = 2
"""Limit: per cent that the tap adds."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A number of requests in the batch."""

    requests: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """Microseconds of CPU a step."""

    step: float


def named(size: int) -> str:
    """Return the name of the row with what the tap adds to a step."""
    return f"{size:,} requests: what the tap adds to a step of the core"


def rows() -> list[Row]:
    """Return the rows: the shares first, then what each mode costs."""
    return [
        *(Row(named(size), "%", limit=SHARE) for size in SIZES),
        *(
            Row(f"{size:,} requests: {mode}", "us a step", OFF, is_absolute=True)
            for size in SIZES
            for mode in MODES[1:]
        ),
    ]


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return the figures."""
    sizes = SIZES[:2] if quick else SIZES
    of = costs_in_turns(Cost, MODES, [Case(size) for size in sizes], start, quick=quick)
    figures = {}
    for size in sizes:
        off, *others = (of[Case(size), mode].step for mode in MODES)
        figures[named(size)] = Figure(100 * (others[-1] - off) / off)
        for mode, cost in zip(MODES[1:], others, strict=True):
            figures[f"{size:,} requests: {mode}"] = Figure(cost, off)
    return figures


def start(mode: str, endpoint: str, stack: contextlib.ExitStack) -> Worker:
    """Start the process of a mode."""
    environ = {"SIDESTEP_ENDPOINT": endpoint} if mode == TAP else {}
    return stack.enter_context(Worker(["benchmarks.summary.scheduler", mode], environ))


def scheduler(mode: str) -> Any:
    """Return a scheduler of a mode."""
    import torch  # noqa: PLC0415
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )

    with tempfile.TemporaryDirectory() as folder:
        config = vllm_config_in(Path(folder), max_num_seqs=max(SIZES), max_num_batched_tokens=16384)
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = 1 << 16
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kind: Any = Scheduler
    if mode == TAP:
        from sidestep_adapters.vllm.scheduler import SidestepScheduler  # noqa: PLC0415

        config.observability_config.kv_cache_metrics = False
        kind = SidestepScheduler
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=1 << 16,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=SimpleNamespace(accept_tokens=lambda *_: True),
        block_size=BLOCK_SIZE,
        log_stats=mode == OWN,
    )


def cost(one: Any, case: Case) -> Cost:
    """Return the cost of a step while all requests decode."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.utils.hashing import sha256  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import (  # noqa: PLC0415
        get_request_block_hasher,
        init_none_hash,
    )
    from vllm.v1.outputs import ModelRunnerOutput  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    for number in range(case.requests):
        params = SamplingParams(max_tokens=STEPS + 64, ignore_eos=True)
        params.update_from_generation_config({}, 1)
        request = Request(f"cmpl-{number}", [2] * 8, params, None, block_hasher=hasher)
        one.add_request(request)
    spent = 0.0
    for step in range(STEPS + 8):
        before = time.thread_time()
        batch = one.schedule()
        spent += time.thread_time() - before
        names = list(batch.num_scheduled_tokens)
        output = ModelRunnerOutput(
            names, {name: index for index, name in enumerate(names)}, [[17] for _ in names]
        )
        before = time.thread_time()
        one.update_from_output(batch, output)
        if step < 8:
            # All requests have their first output.
            spent = 0.0
        else:
            spent += time.thread_time() - before
        # A core waits for its model.
        time.sleep(0.001)
    one.finish_requests(list(one.requests), _aborted())
    one.schedule()
    return Cost(spent / STEPS * 1e6)


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    return RequestStatus.FINISHED_ABORTED


def main() -> None:
    """Run a worker: a case a line on standard input, its cost a line on standard output."""
    answers = own_output()
    one = scheduler(sys.argv[1])
    core = getattr(one, "_core", None)
    if core is not None:
        wait(lambda: core.publisher.connected)
    gc.collect()
    gc.freeze()
    for case, answer in cases(answers):
        answer(cost(one, Case(**case)))
    one.shutdown()


SCHEDULER = Topic(
    "The thread of vLLM's engine core: what statistics cost it",
    tuple(rows()),
    measure,
    venv="vllm-venv",
    needs=("vllm", "tools/setup_vllm.sh"),
)

if __name__ == "__main__":
    main()
