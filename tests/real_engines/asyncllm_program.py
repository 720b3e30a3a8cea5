"""A program that embeds vLLM: it generates, writes its registry's page and ends.

Runs with vLLM's interpreter: ``asyncllm_program.py MODEL PAGE``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from prometheus_client import REGISTRY, generate_latest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from sidestep_adapters.vllm.plugin import SidestepStatLogger


async def run(model: str, page: Path) -> None:
    """Generate eight answers of thirty tokens and write the page."""
    arguments = AsyncEngineArgs(
        model=model,
        served_model_name="tiny",
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=2048,
    )
    engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[SidestepStatLogger])

    async def ask(number: int) -> None:
        limits = SamplingParams(max_tokens=30, ignore_eos=True)
        async for _ in engine.generate("a prompt " * (number + 1), limits, str(number)):
            pass

    try:
        await asyncio.gather(*map(ask, range(8)))
        # The last record is made in the iteration of the loop that ended the last answer, or the next.
        while REGISTRY.get_sample_value(
            "vllm:num_requests_running", {"engine": "0", "model_name": "tiny"}
        ):
            await asyncio.sleep(0.01)
        page.write_bytes(generate_latest(REGISTRY))  # noqa: ASYNC240 - nothing else runs
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], Path(sys.argv[2])))
