"""Steps of vLLM's own scheduler with forced limits, without a model; tokens are all the same.

Runs with vLLM's interpreter: ``vllm_limits_program.py MODEL``. For each case it writes a line of JSON:
its name, and the limits that the tap has read, each with its number of steps.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sidestep.protocol.request_events import LIMITS
from sidestep_adapters.vllm.scheduler import SidestepScheduler

BLOCK = 16
MOST = 400
"""Most steps of a case."""

sha256 = get_hash_fn_by_name("sha256")
init_none_hash(sha256)
hasher = get_request_block_hasher(BLOCK, sha256)


class Bench:
    """A scheduler with ``blocks`` of KV cache, and the requests that it has."""

    def __init__(self, blocks: int = 1000, **options: Any) -> None:
        config = EngineArgs(
            model=sys.argv[1], load_format="dummy", max_model_len=1024, **options
        ).create_engine_config()
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = SidestepScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=SimpleNamespace(accept_tokens=lambda *_: True),
            block_size=BLOCK,
        )
        self._numbers = itertools.count(2)

    def ask(
        self,
        count: int = 1,
        *,
        prompt: int = 8,
        tokens: int = 20,
        adapters: int = 0,
        priority: int = 0,
    ) -> Any:
        """Queue requests with different prompts, and return the last."""
        for _ in range(count):
            number = next(self._numbers)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            params.update_from_generation_config({}, 1)
            adapter = number % adapters + 1 if adapters else 0
            lora = LoRARequest(f"lora-{adapter}", adapter, "/nowhere") if adapter else None
            request = Request(
                f"cmpl-{number}",
                [number] * prompt,
                params,
                None,
                lora_request=lora,
                priority=priority,
                block_hasher=hasher,
            )
            self.scheduler.add_request(request)
        return request

    def step(self) -> str:
        """Schedule a batch and process its output; return the limit."""
        batch = self.scheduler.schedule()
        _, _, limit = self.scheduler._core.requests._started[-1]
        names = [*batch.num_scheduled_tokens]
        requests = [self.scheduler.requests[name] for name in names]
        tokens = [[17] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        output = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, tokens)
        self.scheduler.update_from_output(batch, output)
        return LIMITS[limit]

    def run(self, most: int = MOST) -> Iterator[str]:
        """Yield the limits of the steps until no request is unfinished."""
        for _ in range(most):
            if not self.scheduler.get_num_unfinished_requests():
                return
            yield self.step()


def priorities() -> Iterator[str]:
    """Blocks for a few requests of two priorities, of which some are preempted."""
    bench = Bench(blocks=12, scheduling_policy="priority")
    bench.ask(3, prompt=40, tokens=60, priority=1)
    bench.ask(3, prompt=40, tokens=60)
    yield from bench.run()


def lora_and_slots() -> Iterator[str]:
    """Two adapters fit, and two requests."""
    bench = Bench(enable_lora=True, max_loras=2, max_lora_rank=8, max_num_seqs=2)
    bench.ask(6, adapters=2)
    yield from bench.run()


def grammar() -> Iterator[str]:
    """One request waits for its grammar; a second one runs and ends meanwhile."""
    bench = Bench()
    waiting = bench.ask()
    bench.scheduler.waiting.remove_request(waiting)
    waiting.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    waiting.structured_output_request = SimpleNamespace(grammar=None)
    bench.scheduler._enqueue_waiting_request(waiting)
    bench.ask()
    yield from bench.run(most=30)
    waiting.structured_output_request = None
    waiting.status = RequestStatus.WAITING
    yield from bench.run(most=10)


def paused() -> Iterator[str]:
    """Requests of the batch go on, and one waits."""
    bench = Bench()
    bench.ask()
    yield bench.step()
    bench.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    bench.ask()
    yield from bench.run()
    bench.scheduler.set_pause_state(PauseState.UNPAUSED)
    yield from bench.run()


CASES: tuple[Callable[[], Iterator[str]], ...] = (
    priorities,
    lora_and_slots,
    grammar,
    paused,
)


def main() -> None:
    """Run all cases."""
    for case in CASES:
        runs = [[limit, len([*steps])] for limit, steps in itertools.groupby(case())]
        print(json.dumps([case.__name__, runs]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
